// Bytes: against dense methods, by purpose and by link

const unbroken = (text) => text.replace(/(\d) ([kMGT]?B)\b/g, "$1\u00a0$2"); // a number stays beside its unit

function bytes(state) {
  const kinds = state.kinds.filter((kind) => kind.links.length);
  $("bytes").hidden = !state.traffic.length && !kinds.length;
  spans(state.traffic.filter((one) => one.dense));
  show("traffic", state.traffic.map((one) => {
    const total = one.parts.reduce((sum, part) => sum + part.bytes, 0) || 1;
    const bar = h("div", { class: `share c${one.colour}`, role: "img", "aria-label": one.parts.map((part) => `${part.name} ${part.text}`).join(", ") });
    one.parts.forEach((part, i) => { const piece = h("span", { class: `shade${i}`, title: `${part.name} ${part.text}` }); piece.style.flex = String(part.bytes / total); bar.append(piece); });
    return h("figure", {}, h("figcaption", {}, explained(unbroken(one.title))), h("ul", { class: "legend" },
      one.parts.map((part, i) => h("li", { class: `square c${one.colour} shade${i}` }, h("i", {}), explained(part.name), " ", h("b", {}, part.text)))), bar,
      one.note && h("p", { class: "note" }, explained(unbroken(one.note))));
  }));
  const rows = kinds.flatMap((kind) => [h("tr", { class: "group" }, h("th", { colspan: 4, scope: "rowgroup" }, kind.name)),
    ...kind.links.map((link) => h("tr", {}, h("td", {}, link.where, h("small", {}, ` ${link.what}`)), h("td", { class: "number" }, link.text), h("td", { class: "number slim" }, link.round_text), h("td", { class: "number" }, link.use_text, meter(link.use))))]);
  show("links", rows.length && h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Bytes by link" }, h("table", {},
    h("thead", {}, h("tr", {}, ["Link", "Whole run", "Last round", "Of its rate"].map((head, i) => h("th", { scope: "col", class: i === 2 ? "number slim" : i ? "number" : null }, head)))), h("tbody", {}, rows))),
    rows.length && h("p", { class: "note kinds" }, explained("All replicas of a kind together; the share of the rate is one replica's, in the last round. " +
      (state.run.facts.includes("real processes") ? "Links between stages are looked at while inner steps run, those to the bucket over the whole round." : "Nothing travelled in this simulated run: bytes by shape, seconds by the virtual clock."))));
}

// Sent, and what dense methods would have sent, on a logarithmic scale: a thousand times as much fits beside twice as much.
function spans(list) {
  if (!list.length) { show("spans"); return; }
  const width = Math.max(280, ($("spans").clientWidth || $("bytes").clientWidth || 900) - 38), each = 58, height = each * list.length + 24;
  const values = list.flatMap((one) => [one.sent, one.dense]).map(Math.log10);
  const low = Math.floor(Math.min(...values)), high = Math.max(low + 2, Math.ceil(Math.max(...values)));
  const at = (value) => 24 + (Math.log10(value) - low) / (high - low) * (width - 48), parts = [];
  for (let power = low; power <= high; power += (width < 500 && high - low > 4) || high - low > 8 ? 3 : 1) parts.push(
    s("line", { class: "grid", x1: at(10 ** power), x2: at(10 ** power), y1: 0, y2: height - 18 }),
    s("text", { class: "mid", x: at(10 ** power), y: height - 4 }, `${10 ** (power % 3)} ${["B", "kB", "MB", "GB", "TB", "PB"][Math.floor(power / 3)] ?? "EB"}`));
  list.forEach((one, i) => {
    const y = each * i + 28, text = unbroken(`sent ${one.sent_text}, ${one.dense_text}`), half = 3.3 * text.length;
    const middle = Math.min(width - half, Math.max(half, (at(one.sent) + at(one.dense)) / 2));
    parts.push(s("text", { class: "strong", x: 0, y: y - 15 }, `Between ${one.link}`), s("text", { class: "strong end", x: width, y: y - 15 }, one.times),
      s("line", { class: `span c${one.colour}`, x1: at(one.sent), x2: at(one.dense), y1: y, y2: y }), s("text", { class: "mid", x: middle, y: y + 18 }, text),
      s("circle", { class: `c${one.colour}`, cx: at(one.sent), cy: y, r: 5 }), s("circle", { class: `c${one.colour} hollow`, cx: at(one.dense), cy: y, r: 5 }));
  });
  const words = list.map((one) => `between ${one.link} ${one.sent_text} sent, ${one.dense_text}, ${one.times}`).join("; ");
  show("spans", h("figure", {}, h("figcaption", {}, explained("Sent, against what dense methods would have sent")), s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words }, parts),
    h("p", { class: "note" }, explained("All links of the fleet together, over the whole run, on a logarithmic scale. Uncompressed stages would send activations and their gradients in all dimensions; dense replicas would average fp32 gradients after every inner step."))));
}

function meter(share) {
  if (share === null) return h("span", { class: "meter slim", "aria-hidden": "true" });
  const bar = h("b", {});
  bar.style.width = `${Math.min(100, 100 * share)}%`;
  return h("span", { class: `meter slim${share > 0.9 ? " full" : ""}`, "aria-hidden": "true" }, bar);
}
