// Plan against actual; bias

function against(state) {
  const plan = state.plan;
  $("plan").hidden = !plan;
  if (!plan) return;
  const groups = [...new Set(plan.lines.map((line) => line.kind))];
  // On a phone a line is a block of its own: what it is, and below it every figure under its head.
  const heads = ["Predicted", "Measured", "Ratio", ...(plan.both ? ["At the rate here", "Ratio then"] : [])];
  const row = (line) => [line.predicted, [line.measured, line.source && h("small", {}, explained(` ${line.source}`))], ratio(line.ratio, !plan.both),
    ...(plan.both ? [line.at_measured_rate, ratio(line.ratio_at_measured_rate)] : [])];
  const rows = groups.flatMap((kind) => [h("tr", { class: "group", role: "row" }, h("th", { colspan: heads.length + 1, scope: "rowgroup", role: "rowheader" }, kind || "the whole fleet")),
    ...plan.lines.filter((line) => line.kind === kind).map((line) => h("tr", { role: "row" },
      h("th", { scope: "row", role: "rowheader" }, explained(line.what), line.where && h("small", {}, ` ${line.where}`)),
      row(line).map((cell, i) => h("td", { class: "number", role: "cell", "data-head": heads[i] }, cell))))]);
  show("against", h("p", { class: "note" }, explained(plan.note)),
    h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Plan against actual" }, h("table", { role: "table" },
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, ["", ...heads].map((head, i) => h("th", { scope: "col", role: "columnheader", class: i ? "number" : null }, head)))),
      h("tbody", { role: "rowgroup" }, rows))));
}

function ratio(found, drawn = true) {
  if (!found) return "-";
  const { value, close } = found, x = 36 + 30 * Math.max(-1, Math.min(1, Math.log(Math.max(value, 1e-9)) / Math.log(4)));
  const text = value < 0.1 ? value.toPrecision(2) : value < 100 ? value.toFixed(2) : Math.round(value).toLocaleString("en");
  return [text, drawn && s("svg", { class: `slim c${close ? 1 : 2}`, viewBox: "0 0 72 14", "aria-hidden": "true" },
    s("line", { class: "grid", x1: 6, x2: 66, y1: 7, y2: 7 }), s("line", { class: "axis", x1: 36, x2: 36, y1: 1, y2: 13 }), s("circle", { cx: x, cy: 7, r: 4 }))];
}

function bias(state) {
  const data = state.bias;
  $("bias").hidden = !data;
  if (!data) return;
  const rows = data.kinds.flatMap((kind) => kind.gauges.map((one) => {
    const rail = h("span", { class: "rail" }), filled = h("b", {}), mark = h("i", { title: `at first ${FORMS.share(one.first ?? 0)}` });
    filled.style.width = `${Math.min(100, 100 * one.now)}%`;
    if (one.first !== null) { mark.style.left = `${Math.min(99.5, 100 * one.first)}%`; }
    rail.append(filled, one.first !== null ? mark : "");
    return [h("span", {}, `${kind.kind}, boundary ${one.boundary}`), rail, h("span", { class: "value" }, FORMS.share(one.now))];
  }));
  const drift = data.kinds.filter((kind) => kind.drift !== null).map((kind) => `${kind.kind} ${FORMS.share(kind.drift)}`);
  if (!$("bias-gauge")) show("gauges", h("figure", { id: "bias-gauge" }), h("div", { class: "charts", id: "bias-charts" }));
  $("bias-gauge").replaceChildren(h("figcaption", {}, explained(`Bias: energy that compressed boundaries drop, after round ${data.kinds[0]?.round ?? 0}`)), h("div", { class: "gauge" }, rows.flat()),
    h("p", { class: "note" }, explained("Of the stream less T_perp, on one held-out batch; the mark is where it stood at first." + (drift.length ? ` Drift out of S in that round: ${drift.join(", ")} of T_perp.` : ""))));
  plots("bias-charts", data.charts);
}
