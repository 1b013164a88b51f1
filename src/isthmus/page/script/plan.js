// Plan against actual

function against(state) {
  const plan = state.plan;
  $("plan").hidden = !plan;
  if (!plan) return;
  const groups = [...new Set(plan.lines.map((line) => line.kind))];
  // On a phone a line is a block of its own: what it is, and below it every figure under its head.
  const heads = ["Predicted", "Measured", "Ratio"];
  const row = (line) => [line.predicted, [line.measured, line.source && h("small", {}, explained(` ${line.source}`))], ratio(line.ratio)];
  const rows = groups.flatMap((kind) => [h("tr", { class: "group", role: "row" }, h("th", { colspan: heads.length + 1, scope: "rowgroup", role: "rowheader" }, kind || "the whole fleet")),
    ...plan.lines.filter((line) => line.kind === kind).map((line) => h("tr", { role: "row" },
      h("th", { scope: "row", role: "rowheader" }, explained(line.what), line.where && h("small", {}, ` ${line.where}`)),
      row(line).map((cell, i) => h("td", { class: "number", role: "cell", "data-head": heads[i] }, cell))))]);
  show("against", h("p", { class: "note" }, explained(plan.note)),
    h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Plan against actual" }, h("table", { role: "table" },
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, ["", ...heads].map((head, i) => h("th", { scope: "col", role: "columnheader", class: i ? "number" : null }, head)))),
      h("tbody", { role: "rowgroup" }, rows))));
}

function ratio(found) {
  if (!found) return "-";
  const { value, close } = found, x = 36 + 30 * Math.max(-1, Math.min(1, Math.log(Math.max(value, 1e-9)) / Math.log(4)));
  const text = value < 0.1 ? value.toPrecision(2) : value < 100 ? value.toFixed(2) : Math.round(value).toLocaleString("en");
  return [text, s("svg", { class: `slim c${close ? 1 : 2}`, viewBox: "0 0 72 14", "aria-hidden": "true" },
    s("line", { class: "grid", x1: 6, x2: 66, y1: 7, y2: 7 }), s("line", { class: "axis", x1: 36, x2: 36, y1: 1, y2: 13 }), s("circle", { cx: x, cy: 7, r: 4 }))];
}
