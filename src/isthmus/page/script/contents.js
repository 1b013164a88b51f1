// Contents: at the side on a wide screen, folded at the top on a narrow one

const wideScreen = matchMedia("(min-width: 1240px)");

function contents() {
  const found = [...document.querySelectorAll("main section[aria-labelledby]")].filter((section) => !section.hidden)
    .map((section) => $(section.getAttribute("aria-labelledby")));
  const list = $("contents-list"), before = [...list.querySelectorAll("a")].map((link) => link.hash);
  if (found.map((title) => `#${title.id}`).join() === before.join()) return;
  list.replaceChildren(...found.map((title) => h("li", {}, h("a", { href: `#${title.id}` }, title.textContent))));
  passing.disconnect();
  for (const title of found) passing.observe(title.closest("section"));
}

// The section under the upper part of the window is the current one.
const passing = new IntersectionObserver((seen) => {
  for (const one of seen) {
    if (!one.isIntersecting) continue;
    const title = one.target.getAttribute("aria-labelledby");
    for (const link of $("contents-list").querySelectorAll("a")) {
      if (link.hash === `#${title}`) link.setAttribute("aria-current", "location"); else link.removeAttribute("aria-current");
    }
  }
}, { rootMargin: "-20% 0px -75% 0px" });

const fold = () => { $("contents").open = wideScreen.matches; };
wideScreen.addEventListener("change", fold);
fold();
$("contents-list").addEventListener("click", () => { if (!wideScreen.matches) $("contents").open = false; });
