// Round by round

const GLYPHS = { counted: "", late: "L", refused: "×", missing: "−", away: "", delivered: "✓", awaited: "" };
let current = [0, -1]; // row and column that Tab leads to

function rounds(state) {
  const data = state.rounds;
  $("rounds").hidden = !data.rounds.length;
  if (!data.rounds.length) return;
  const focused = $("grid").contains(document.activeElement) && document.activeElement.dataset.round;
  const scrolled = $("grid").querySelector(".cells"), end = !scrolled || scrolled.scrollLeft + scrolled.clientWidth > scrolled.scrollWidth - 40;
  const why = h("p", { class: "why", "aria-live": "polite" }, matchMedia("(pointer: coarse)").matches ? "Tap a cell for what happened there." : "Point at a cell, or move with the arrow keys, for what happened there.");
  const colour = (name) => state.kinds.find((kind) => state.replicas.some((one) => one.name === name && one.kind === kind.name));
  const label = (row, column) => {
    const [word, reason] = data.rows[row].cells[column];
    return `Round ${data.rounds[column]}, ${data.rows[row].replica}: ${data.words[word] || word}${reason ? `; ${reason}` : ""}`;
  };
  const width = data.rounds.length, height = data.rows.length;
  if (current[1] < 0 || current[1] >= width || current[0] >= height) current = [0, width - 1];
  const cells = data.rows.map((row, i) => row.cells.map(([word], j) => {
    const td = h("td", { role: "gridcell", tabindex: i === current[0] && j === current[1] ? 0 : -1, "aria-label": label(i, j), "data-round": data.rounds[j], "data-word": word },
      h("span", { class: `cell ${word}`, "aria-hidden": "true" }, GLYPHS[word] || ""));
    const tell = () => { why.textContent = label(i, j); };
    td.addEventListener("pointerenter", tell);
    td.addEventListener("focus", () => { tell(); cells[current[0]][current[1]].tabIndex = -1; current = [i, j]; td.tabIndex = 0; });
    return td;
  }));
  const body = data.rows.map((row, i) => h("tr", {}, h("th", { scope: "row", title: row.replica, class: `c${colour(row.replica)?.colour ?? 7}` }, row.replica), cells[i],
    h("td", { class: "score" }, row.stranger ? "not in the recipe" : [h("span", { class: "slim" }, `${row.counted} of ${data.settled}`), h("span", { class: "narrow" }, `${row.counted}/${data.settled}`)])));
  const every = width > 30 ? 10 : 5, round_ = (t) => t % every === 0;
  // Wider than their column, so two must not be neighbours: the round number says more than the edge's.
  const marked = (t, j) => round_(t) || (j === 0 && !data.rounds.slice(1, 4).some(round_)) || (t === data.open && !data.rounds.slice(-4, -1).some(round_));
  const grid = h("table", { role: "grid", "aria-label": "Replicas and rounds; arrow keys move" },
    h("thead", {}, h("tr", {}, h("td", {}), data.rounds.map((t, j) => h("th", { scope: "col" }, h("span", {}, marked(t, j) && String(t)))))), h("tbody", {}, body));
  grid.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -width], End: [0, width] }[event.key];
    if (!step) return;
    event.preventDefault();
    cells[Math.min(height - 1, Math.max(0, current[0] + step[0]))][Math.min(width - 1, Math.max(0, current[1] + step[1]))].focus();
  });
  const used = new Set(data.rows.flatMap((row) => row.cells.map(([word]) => word)));
  const holder = h("div", { class: "cells" }, grid);
  const legend = h("ul", { class: "legend" }, Object.keys(data.words).filter((word) => used.has(word)).map((word) => h("li", {}, h("i", { class: `cell ${word}` }, GLYPHS[word]), h("span", {}, explained(data.words[word])))),
    data.simulated && h("li", {}, "a simulated fleet: every replica takes part in every round"),
    data.settled > width && h("li", {}, `the last ${width} of ${data.settled} rounds`));
  show("grid", h("div", { class: `wide grid${width <= 34 ? " few" : ""}` }, holder, legend, why));
  if (end) holder.scrollLeft = holder.scrollWidth;
  if (focused) cells[current[0]][current[1]].focus();
}
