// Line charts

const charts = new Map(); // title -> what a resize draws again
const resized = new ResizeObserver(() => { for (const one of charts.values()) if (one.node.isConnected && one.drawn !== one.canvas.clientWidth) sketch(one); });
const LEFT = 46, RIGHT = 8, TOP = 20, BOTTOM = 34;

function chart(data) {
  const open = charts.get(data.title)?.node.querySelector("details")?.open;
  const reading = h("span", {}), legend = h("ul", { class: "legend" }), aloud = h("p", { class: "unseen", "aria-live": "polite" });
  const canvas = s("svg", { role: "img", tabindex: 0, "aria-label": spoken(data), "aria-roledescription": "line chart; arrow keys read its points" });
  const node = h("figure", { class: "chart" }, h("figcaption", {}, h("b", {}, explained(data.title)), reading),
    data.note && h("p", { class: "note" }, explained(data.note)), legend, aloud, canvas, h("details", { open }, h("summary", {}, "as a table"), table(data)));
  const one = { data, node, canvas, legend, reading, at: null };
  const xs = [...new Set(data.series.flatMap((line) => line.points.map((p) => p[0])))].sort((a, b) => a - b);
  one.xs = xs;
  const read = (x) => { one.at = x; sketch(one); };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(), x = one.back(event.clientX - box.left);
    read(xs.reduce((best, each) => Math.abs(each - x) < Math.abs(best - x) ? each : best, xs[0]));
  });
  canvas.addEventListener("pointerleave", () => read(null));
  canvas.addEventListener("blur", () => read(null));
  canvas.addEventListener("keydown", (event) => {
    const index = one.at === null ? xs.length : xs.indexOf(one.at);
    const next = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: xs.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    read(xs[Math.min(xs.length - 1, Math.max(0, next))]);
    const here = data.series.flatMap((line) => line.points.filter((p) => p[0] === one.at).map((p) => `${line.name} ${FORMS[data.form](p[1])}`));
    aloud.textContent = `at ${count(one.at)} tokens: ${here.join(", ")}`;
  });
  charts.set(data.title, one);
  resized.observe(canvas);
  return one;
}

function spoken(data) {
  const form = FORMS[data.form];
  return `${data.title}: ` + data.series.map((line) => `${line.name} ${form(line.points.at(-1)[1])}`).join(", ");
}

function table(data) {
  const form = FORMS[data.form];
  const by = new Map();
  data.series.forEach((line, i) => line.points.forEach(([x, y]) => by.set(x, Object.assign(by.get(x) || {}, { [i]: y }))));
  const xs = [...by.keys()].sort((a, b) => a - b).slice(-60);
  return h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": `${data.title}, as a table` }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "tokens"), data.series.map((line) => h("th", { scope: "col", class: "number" }, line.name)))),
    h("tbody", {}, xs.map((x) => h("tr", {}, h("th", { scope: "row" }, count(x)),
      data.series.map((_, i) => h("td", { class: "number" }, by.get(x)[i] === undefined ? "-" : form(by.get(x)[i]))))))));
}

function sketch(one) {
  const { data, canvas } = one, form = FORMS[data.form];
  const width = Math.max(240, canvas.clientWidth || 480), height = canvas.clientHeight || 236;
  canvas.setAttribute("viewBox", `0 0 ${width} ${height}`);
  one.drawn = canvas.clientWidth;
  const all = data.series.flatMap((line) => line.points), ys = all.map((p) => p[1]);
  const xLow = Math.min(0, ...one.xs), xHigh = Math.max(...one.xs) || 1;
  let low = Math.min(...ys), high = Math.max(...ys);
  if (data.zero) { low = Math.min(0, low); high = Math.max(0, high); }
  const air = 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
  if (!data.zero || low < 0) low -= air;
  high += air;
  const atX = (x) => LEFT + (x - xLow) / (xHigh - xLow) * (width - LEFT - RIGHT);
  const atY = (y) => height - BOTTOM - (y - low) / (high - low) * (height - TOP - BOTTOM);
  one.back = (px) => xLow + (px - LEFT) / (width - LEFT - RIGHT) * (xHigh - xLow);
  const parts = [], base = height - BOTTOM;
  const marks = ticks(low, high, 5);
  const scaled = data.form === "share" ? marks.map((y) => +(100 * y).toPrecision(12)) : marks;
  const decimals = Math.min(data.form === "number" ? 7 : 4, Math.max(0, ...scaled.map((y) => (String(y).split(".")[1] || "").length)));
  marks.forEach((y, i) => parts.push(
    s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: atY(y), y2: atY(y) }),
    s("text", { class: "end", x: LEFT - 8, y: atY(y) + 4 }, data.form === "count" || Math.abs(scaled[i]) >= 1e4 ? count(scaled[i]) : scaled[i].toFixed(decimals))));
  for (const x of ticks(xLow, xHigh, width < 400 ? 4 : 6)) parts.push(
    s("line", { class: "axis", x1: atX(x), x2: atX(x), y1: base, y2: base + 4 }),
    s("text", { class: atX(x) > width - RIGHT - 16 ? "end" : "mid", x: atX(x), y: base + 17 }, count(x)));
  parts.push(s("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: base, y2: base }),
    s("text", { class: "end", x: LEFT - 8, y: 10 }, data.unit), s("text", { class: "end", x: width - RIGHT, y: height - 2 }, "tokens"));
  for (const line of data.series) {
    const path = "M" + line.points.map(([x, y]) => `${atX(x).toFixed(1)} ${atY(y).toFixed(1)}`).join("L");
    parts.push(s("path", { class: `line c${line.colour}${line.dashed ? " dashed" : ""}`, d: path }));
    if (line.points.length < 3) line.points.forEach(([x, y]) => parts.push(s("circle", { class: `c${line.colour}`, cx: atX(x), cy: atY(y), r: 3.5 })));
  }
  if (one.at !== null) {
    parts.push(s("line", { class: "cursor", x1: atX(one.at), x2: atX(one.at), y1: TOP, y2: base }));
    for (const line of data.series) for (const [x, y] of line.points) if (x === one.at) parts.push(s("circle", { class: `c${line.colour}`, cx: atX(x), cy: atY(y), r: 3.5 }));
  }
  canvas.replaceChildren(...parts);
  const near = (line) => one.at === null ? line.points.at(-1) : line.points.find((p) => p[0] === one.at);
  one.reading.textContent = one.at === null ? "" : `at ${count(one.at)} tokens`;
  one.legend.replaceChildren(...data.series.map((line) => h("li", { class: `c${line.colour}${line.dashed ? " dashed" : ""}` },
    h("i", {}), `${line.name} `, h("b", {}, near(line) ? form(near(line)[1]) : "-"))));
}

function plots(id, list) {
  for (const data of list) {
    const known = charts.get(data.title);
    if (known && known.node.parentNode === $(id) && JSON.stringify(known.data) === JSON.stringify(data)) continue;
    const focused = known && document.activeElement === known.canvas, at = known ? known.at : null;
    if (known) resized.unobserve(known.canvas);
    const one = chart(data);
    if (known && known.node.parentNode === $(id)) known.node.replaceWith(one.node); else $(id).append(one.node);
    one.at = one.xs.includes(at) ? at : null;
    if (focused) one.canvas.focus();
  }
  const titles = new Set(list.map((data) => data.title));
  for (const child of [...$(id).children]) {
    const title = [...charts].find(([, one]) => one.node === child)?.[0];
    if (!titles.has(title)) child.remove();
  }
  for (const data of list) sketch(charts.get(data.title)); // only now are all as wide as they will be
}
