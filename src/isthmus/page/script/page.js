// The top of the page and its end; which section is drawn from what; asking for the state

function top_(state) {
  const run = state.run;
  document.title = `${run.name}, round ${run.round} of ${run.rounds} - Isthmus`;
  $("name").textContent = run.name;
  const badge = $("status");
  badge.hidden = false; badge.textContent = run.status; badge.className = `badge ${run.tone}`;
  $("facts").textContent = [`${run.fleet.replace(/,$/, "")}, ${run.parameters} parameters`, ...run.facts].join(" · ");
  const share = Math.min(1, run.rounds ? run.round / run.rounds : 0);
  show("now", h("p", {}, unparted(explained(state.now))), h("div", { class: "bar" }, h("span", {}, `round ${run.round.toLocaleString("en")} of ${run.rounds.toLocaleString("en")}`),
    h("progress", { max: 1, value: share, "aria-label": "Rounds done" }), h("span", {}, run.left ? `about ${run.left} left` : `${Math.round(100 * share)} %`)));
  const ended = written || run.status !== "running";
  $("words").hidden = !ended;
  show("words", ended && state.summary.map((text) => h("li", {}, unparted(explained(text)))));
  show("tiles", state.tiles.map((tile) => h("div", {}, h("span", {}, explained(tile.name)), h("strong", {}, tile.value), h("span", { title: tile.words }, tile.words))));
}

function problems(state) {
  show("problems", state.problems.map((text) => h("p", { class: "alert", role: "alert" }, unparted([text]))));
}

function changes(state) {
  $("changes").hidden = Boolean(written); // a report was looked at once: nothing can have changed
  const line = (one) => h("li", { class: one.tone || null },
    h("time", { datetime: new Date(1000 * one.unix).toISOString() }, new Date(1000 * one.unix).toLocaleTimeString("en-GB")), h("span", {}, unparted([one.text])));
  show("comings", state.comings.map(line));
  $("comings").hidden = !state.comings.length;
  show("events", state.events.length ? state.events.map(line) : h("li", {}, "No round yet, since this page's server started."));
}

function details(state) {
  const open = new Set([...document.querySelectorAll("#details > details[open] > summary")].map((node) => node.textContent));
  const folded = (title, body) => h("details", { open: open.has(title) }, h("summary", {}, title), body);
  const about = [...(state.run.where ? [["read from", state.run.where]] : []), ...state.about];
  show("details", $("words").hidden && folded("The run in words", h("ul", { class: "words inside" }, state.summary.map((text) => h("li", {}, text)))),
    folded("The resolved recipe", h("pre", { tabindex: 0 }, state.recipe)),
    folded("About this run", h("table", {}, h("tbody", {}, about.map(([key, value]) => h("tr", {}, h("th", { scope: "row" }, key), h("td", {}, value)))))),
    folded("What the words mean", glossary()));
}

// Which parts of the state a section is drawn from: it is left alone while they stay the same.
const SECTIONS = [
  [top_, ["run", "now", "tiles", "summary"]],
  [problems, ["problems"]],
  [picture, ["run", "kinds", "replicas", "bands", "rounds"]],
  [members, ["run", "kinds", "replicas"]],
  [(state) => { $("loss").hidden = !state.charts.length; plots("charts", state.charts); }, ["charts"]],
  [rounds, ["rounds", "kinds"]],
  [bytes, ["traffic", "kinds", "run"]],
  [against, ["plan"]],
  [(state) => { $("time").hidden = !state.speeds.length; plots("speeds", state.speeds); }, ["speeds"]],
  [changes, ["comings", "events"]],
  [details, ["run", "summary", "recipe", "about"]],
];
let last = null, tag = "";
const drawn = new Map();

function draw(state) {
  keepAsked(() => drawSections(state));
}

function drawSections(state) {
  for (const [section, keys] of SECTIONS) {
    const slice = JSON.stringify(keys.map((key) => state[key]));
    if (drawn.get(section) === slice) continue;
    drawn.set(section, slice);
    section(state);
  }
  contents();
}

async function poll() {
  try {
    const answer = await fetch("/state", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store", signal: AbortSignal.timeout(8000) });
    const clock = Number(answer.headers.get("X-Isthmus-Now"));
    if (clock) offset = clock - Date.now() / 1000;
    if (answer.status === 200) { last = await answer.json(); tag = answer.headers.get("ETag") || ""; draw(last); }
    else if (answer.status !== 304) throw new Error(`status ${answer.status}`);
    answered = Date.now() / 1000; silent = false;
  } catch (error) {
    silent = true;
    if (error instanceof TypeError === false && error.name !== "TimeoutError") console.error(error);
  }
  tick();
  document.documentElement.dataset.ready = last ? "yes" : "no";
  setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
}

let waiting = 0;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => { if (last) { picture(last); bytes(last); const cells = document.querySelector(".cells"); if (cells) cells.scrollLeft = cells.scrollWidth; } }, 120);
});
if (written) {
  last = JSON.parse($("state").textContent);
  draw(last);
  tick();
  document.documentElement.dataset.ready = "yes";
} else {
  setInterval(tick, 1000);
  poll();
}
