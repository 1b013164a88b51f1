// Draws the page from /state, every two seconds; in report.html from the state in the page, once.
// Whatever comes from a run is put in as text, never as markup.
"use strict";

const POLL_MS = 2000;
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === false || value === null || value === undefined) continue;
    node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(3)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const show = (id, ...children) => $(id).replaceChildren(...children.flat(3).filter(Boolean));
const titled = (text) => s("title", {}, text);

// Time: the server's clock, carried on by ours; in a report, when it was written

const written = $("state") && JSON.parse($("state").textContent).written_unix;
let offset = 0, answered = null, silent = false;
const now = () => written || Date.now() / 1000 + offset;

function ago(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s ago`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ago`;
  if (whole < 48 * 3600) return `${Math.floor(whole / 3600)} h ${String(Math.floor(whole % 3600 / 60)).padStart(2, "0")} min ago`;
  return `${Math.floor(whole / 86400)} d ago`;
}
const age = (unix) => unix === null ? "-" : h("span", { "data-unix": unix }, ago(now() - unix));

function tick() {
  for (const node of document.querySelectorAll("[data-unix]")) node.textContent = ago(now() - Number(node.dataset.unix));
  const heard = $("heard"), state = last;
  let words = "connecting", tone = "";
  if (written) {
    words = `report of ${new Date(1000 * written).toISOString().slice(0, 16).replace("T", " ")} UTC`;
  } else if (silent && answered !== null) {
    words = `no answer from this page's server, last heard ${ago(Date.now() / 1000 - answered)}`; tone = "gone";
  } else if (silent) {
    words = "no answer from this page's server"; tone = "gone";
  } else if (state) {
    const when = state.heard_unix ? ago(now() - state.heard_unix) : "never";
    if (state.run.status !== "running") { words = `the run has ended, last heard ${when}`; }
    else if (state.run.stale || now() - state.heard_unix > state.run.timeout_seconds) { words = `nothing heard from the run, last ${when}`; tone = "gone"; }
    else { words = `live, last heard ${when}`; tone = "live"; }
  }
  if (heard.textContent !== words) heard.textContent = words;
  // What a screen reader says of it: a change, and not the seconds.
  const news = words.split(",")[0];
  if ($("announced").textContent !== news) $("announced").textContent = news;
  heard.className = `heard ${tone}`;
}

// Numbers

const figure = (value) => value >= 99.95 ? Math.round(value).toLocaleString("en") : String(+value.toFixed(value >= 9.95 ? 0 : 1));
function count(value) {
  const names = ["", " k", " M", " B", " T"];
  let power = 0;
  while (power < 4 && Math.abs(value) >= 999.5 * 1000 ** power) power += 1;
  return power ? figure(value / 1000 ** power) + names[power] : String(+value.toPrecision(3));
}
const FORMS = {
  loss: (y) => Math.abs(y) < 1e5 ? y.toFixed(3) : count(y),
  gap: (y) => `${y < 0 ? "−" : "+"}${Math.abs(y).toFixed(3)}`,
  number: (y) => String(+y.toPrecision(3)),
  count: (y) => count(y),
  seconds: (y) => `${figure(y)} s`,
  share: (y) => y >= 10 ? `${count(100 * y)} %` : y < 0.1 ? `${(100 * y).toPrecision(2)} %` : `${(100 * y).toFixed(1)} %`,
};
function ticks(low, high, about) {
  const raw = (high - low) / about;
  if (!(raw > 0) || !isFinite(raw)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((f) => f * power).find((one) => one >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9) && found.length < 20; i += 1) found.push(+(i * step).toPrecision(12));
  return found;
}

// Line charts

const charts = new Map(); // title -> what a resize draws again
const resized = new ResizeObserver(() => { for (const one of charts.values()) if (one.node.isConnected && one.drawn !== one.canvas.clientWidth) sketch(one); });
const LEFT = 46, RIGHT = 8, TOP = 20, BOTTOM = 34;

function chart(data) {
  const open = charts.get(data.title)?.node.querySelector("details")?.open;
  const reading = h("span", {}), legend = h("ul", { class: "legend" }), aloud = h("p", { class: "unseen", "aria-live": "polite" });
  const canvas = s("svg", { role: "img", tabindex: 0, "aria-label": spoken(data), "aria-roledescription": "line chart; arrow keys read its points" });
  const node = h("figure", { class: "chart" }, h("figcaption", {}, data.title, reading),
    data.note && h("p", { class: "note" }, data.note), legend, aloud, canvas, h("details", { open }, h("summary", {}, "as a table"), table(data)));
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

// The fleet as a picture: the bucket, and the replicas on both sides of it, or on one where there is little room

const BOX = 62, GAP = 12;

function picture(state) {
  const kinds = new Map(state.kinds.map((kind) => [kind.name, kind]));
  const drawn = state.replicas.slice(0, state.drawn);
  const width = Math.max(280, ($("picture").clientWidth || 900) - (innerWidth <= 560 ? 22 : 34));
  const alone = state.replicas.length === 1, two = width >= 680 && drawn.length > 1;
  let sides = [[], drawn];
  if (two) {
    const full = drawn.filter((one) => kinds.get(one.kind).kind === "full"), split = drawn.filter((one) => kinds.get(one.kind).kind !== "full");
    const even = full.length && split.length && Math.max(full.length, split.length) <= 3 * Math.min(full.length, split.length) + 1;
    const half = Math.ceil(drawn.length / 2);
    sides = even ? [full, split] : [drawn.slice(0, half), drawn.slice(half)];
  }
  const pool = alone ? 0 : 34, reach = alone ? 0 : two ? 128 : 40;
  const box = two ? (width - pool) / 2 - reach : width - pool - reach;
  const rows = Math.max(...sides.map((side) => side.length)), height = rows * (BOX + GAP) - GAP;
  const middle = two ? width / 2 : pool / 2;
  const parts = [];
  if (!alone) {
    parts.push(s("rect", { class: "pool", x: middle - pool / 2 + 0.5, y: 0.5, width: pool - 1, height: height - 1, rx: 9 }),
      s("text", { class: "mid", x: 0, y: 0, transform: `translate(${middle + 4} ${height / 2}) rotate(-90)` }, state.run.real ? "bucket" : "exchange"));
  }
  sides.forEach((side, which) => {
    const top = (height - (side.length * (BOX + GAP) - GAP)) / 2;
    side.forEach((one, i) => {
      const left = which === 0 ? 0 : middle + pool / 2 + reach, y = top + i * (BOX + GAP);
      parts.push(boxed(one, kinds.get(one.kind), left + 0.5, y, box - 1, state));
      if (!alone) parts.push(cable(one, kinds.get(one.kind), which === 0 ? box : left, which === 0 ? middle - pool / 2 : middle + pool / 2, y + BOX / 2, two));
    });
  });
  const words = state.replicas.map((one) => `${one.name} ${one.state}`).join(", ");
  const art = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `The fleet: ${words}` }, parts);
  art.style.height = `${height}px`;
  const more = state.replicas.length - drawn.length;
  const measured = state.kinds.some((kind) => kind.links.some((link) => link.band !== null));
  const keys = measured ? state.bands.map((text, i) => h("li", {}, h("i", { class: `wire band${i}` }), text)) : [];
  show("picture", h("figure", {}, art, h("ul", { class: "legend" },
    measured ? h("li", {}, "a link's stated rate in use:") : h("li", {}, "no round has reported what its links carried"), keys,
    state.run.bucket && state.rounds.open && h("li", {}, h("i", { class: "arrived" }), "this round's update is there"),
    more > 0 && h("li", {}, `and ${more} more, in the table`))));
}

function boxed(one, kind, x, y, width, state) {
  const gone = !one.up && one.state !== "interrupted", parts = [];
  parts.push(s("rect", { class: `boxed${gone ? " gone" : ""}`, x, y: y + 0.5, width, height: BOX - 1, rx: 8 }, titled(`${one.name}: ${one.state}${one.why ? `, ${one.why}` : ""}`)),
    s("circle", { class: `dot ${one.tone}`, cx: x + 16, cy: y + 19, r: one.tone === "wait" ? 3.5 : 4 }),
    s("text", { class: "strong", x: x + 27, y: y + 23 }, one.name.length > 22 ? `${one.name.slice(0, 21)}…` : one.name));
  const step = one.state === "training" && one.inner_step ? ` ${one.inner_step}/${state.run.inner_steps}` : "";
  parts.push(s("text", { class: `end state ${one.tone === "good" ? "" : one.tone}`, x: x + width - 12, y: y + 23 }, one.state + step));
  const loss = one.loss !== null && one.loss !== undefined ? FORMS.loss(one.loss) : "";
  const figures = [loss, one.rate].filter(Boolean).join("  ·  ");
  parts.push(s("text", { class: "end", x: x + width - 12, y: y + 46 }, figures));
  const room = width - 24 - 7 * figures.length - 16, each = 16;
  const shown = Math.max(1, Math.min(kind.stages, Math.floor((room + 10) / (each + 10))));
  const space = shown > 1 ? Math.min(width > 300 ? 44 : 26, (room - shown * each) / (shown - 1)) : 0;
  const dead = new Set(one.processes.filter((p) => p.state === "silent").map((p) => p.stage));
  for (let stage = 0; stage < shown; stage += 1) {
    const at = x + 12 + stage * (each + space);
    if (stage < shown - 1) {
      [[`stage ${stage} to ${stage + 1}`, -2.5], [`stage ${stage + 1} to ${stage}`, 2.5]].forEach(([where, shift]) => {
        const link = kind.links.find((each) => each.where === where);
        parts.push(s("line", { class: `wire ${gone ? "gone" : `band${link && link.band !== null ? link.band : "-"}`}`, x1: at + each + 1, x2: at + each + space - 1, y1: y + 42 + shift, y2: y + 42 + shift },
          titled(link ? `${where}: ${link.what}, ${link.round_text} in the last round, ${link.use_text} of its rate` : where)));
      });
    }
    parts.push(s("rect", { class: `stage c${kind.colour}${gone && (dead.size === 0 || dead.has(stage)) ? " gone" : one.tone === "wait" && one.up ? " dim" : ""}`, x: at, y: y + 34, width: each, height: each, rx: 3 },
      titled(kind.stages > 1 ? `stage ${stage}` : "the whole model")));
  }
  if (shown < kind.stages) parts.push(s("text", { x: x + 12 + shown * (each + space), y: y + 46 }, `+${kind.stages - shown}`));
  if (one.inner_step && state.run.status === "running") {
    const done = Math.min(1, one.inner_step / state.run.inner_steps);
    parts.push(s("rect", { class: "track", x: x + 12, y: y + BOX - 6, width: width - 24, height: 2, rx: 1 }),
      s("rect", { class: `done c${kind.colour}`, x: x + 12, y: y + BOX - 6, width: (width - 24) * done, height: 2, rx: 1 }));
  }
  return s("g", {}, parts);
}

function cable(one, kind, from, to, y, labelled) {
  const gone = !one.up && one.state !== "interrupted", sign = to > from ? 1 : -1, parts = [];
  [["to the bucket", -4], ["from the bucket", 4]].forEach(([where, shift]) => {
    const link = kind.links.find((each) => each.where === where);
    parts.push(s("line", { class: `wire ${gone ? "gone" : `band${link && link.band !== null ? link.band : "-"}`}`, x1: from + 2 * sign, x2: to - 2 * sign, y1: y + shift, y2: y + shift },
      titled(link ? `${one.name} ${where}: ${link.each_text} in the last round, ${link.use_text} of its rate` : where)));
  });
  for (const [where, word, shift] of labelled && !gone ? [["to the bucket", "up", -10], ["from the bucket", "down", 18]] : []) {
    const link = kind.links.find((each) => each.where === where);
    if (link) parts.push(s("text", { class: "mid small", x: (from + to) / 2, y: y + shift }, `${link.each_text} ${word}`));
  }
  if (one.delivered) parts.push(s("circle", { class: "sent", cx: to - 7 * sign, cy: y, r: 5 }, titled("this round's update is there")));
  return s("g", {}, parts);
}

function members(state) {
  const rows = state.replicas.map((one) => h("tr", { "data-replica": one.name, "data-state": one.state },
    h("th", { scope: "row" }, one.name),
    h("td", { class: one.tone === "bad" ? "bad" : "" }, h("span", { class: `dot ${one.tone}` }), one.state, one.why && h("small", {}, ` ${one.why}`)),
    state.run.bucket && h("td", { class: "number" }, age(one.seen_unix)),
    state.run.bucket && h("td", { class: "number slim" }, one.inner_step ? `${one.inner_step} of ${state.run.inner_steps}` : "-"),
    state.run.bucket && h("td", { class: "number slim" }, one.loss === null ? "-" : FORMS.loss(one.loss)),
    state.run.bucket && h("td", { class: "number slim" }, one.rate || "-"),
    state.replicas.some((each) => each.processes.length) && h("td", {}, processes(one))));
  const kinds = state.kinds.map((kind) => `${kind.count} ${kind.name}: ${kind.kind}${kind.stages > 1 ? ` in ${kind.stages} stages` : ""}${kind.compression ? `, ${kind.compression}` : ""}${kind.link ? `, ${kind.link} between stages` : ""}${kind.bucket_link ? `, ${kind.bucket_link} to the bucket` : ""}`);
  const heads = ["Replica", "State", ...(state.run.bucket ? ["Heartbeat", "Inner step", "Loss", "Rate"] : []), ...(state.replicas.some((one) => one.processes.length) ? ["Processes here"] : [])];
  show("members", h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "The replicas, as a table" }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col", class: head === "Heartbeat" ? "number" : ["Inner step", "Loss", "Rate"].includes(head) ? "number slim" : null }, head)))),
    h("tbody", {}, rows))), h("p", { class: "note kinds" }, `${kinds.join("; ")}.`));
}

function processes(one) {
  if (!one.processes.length) return "-";
  const odd = one.processes.filter((p) => p.state !== one.processes[0].state);
  if (!odd.length) return one.processes.length === 1 ? one.processes[0].state : `${one.processes.length} ${one.processes[0].state === "runs" ? "run" : one.processes[0].state}`;
  return one.processes.map((p) => `stage ${p.stage} ${p.state}`).join(", ");
}

// Round by round

const GLYPHS = { counted: "", late: "L", refused: "×", missing: "−", away: "", delivered: "✓", awaited: "" };
let current = [0, -1]; // row and column that Tab leads to

function rounds(state) {
  const data = state.rounds;
  $("rounds").hidden = !data.rounds.length;
  if (!data.rounds.length) return;
  const focused = $("grid").contains(document.activeElement) && document.activeElement.dataset.round;
  const scrolled = $("grid").querySelector(".cells"), end = !scrolled || scrolled.scrollLeft + scrolled.clientWidth > scrolled.scrollWidth - 40;
  const why = h("p", { class: "why", "aria-live": "polite" }, "Point at a cell, or move with the arrow keys, for what happened there.");
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
  const legend = h("ul", { class: "legend" }, Object.keys(data.words).filter((word) => used.has(word)).map((word) => h("li", {}, h("i", { class: `cell ${word}` }, GLYPHS[word]), data.words[word])),
    data.simulated && h("li", {}, "a simulated fleet: every replica takes part in every round"),
    data.settled > width && h("li", {}, `the last ${width} of ${data.settled} rounds`));
  show("grid", h("div", { class: `wide grid${width <= 34 ? " few" : ""}` }, holder, legend, why));
  if (end) holder.scrollLeft = holder.scrollWidth;
  if (focused) cells[current[0]][current[1]].focus();
}

// Bytes, plan, bias

const unbroken = (text) => text.replace(/(\d) ([kMGT]?B)\b/g, "$1\u00a0$2"); // a number stays beside its unit

function bytes(state) {
  const kinds = state.kinds.filter((kind) => kind.links.length);
  $("bytes").hidden = !state.traffic.length && !kinds.length;
  spans(state.traffic.filter((one) => one.dense));
  show("traffic", state.traffic.map((one) => {
    const total = one.parts.reduce((sum, part) => sum + part.bytes, 0) || 1;
    const bar = h("div", { class: `share c${one.colour}`, role: "img", "aria-label": one.parts.map((part) => `${part.name} ${part.text}`).join(", ") });
    one.parts.forEach((part, i) => { const piece = h("span", { class: `shade${i}`, title: `${part.name} ${part.text}` }); piece.style.flex = String(part.bytes / total); bar.append(piece); });
    return h("figure", {}, h("figcaption", {}, unbroken(one.title)), h("ul", { class: "legend" },
      one.parts.map((part, i) => h("li", { class: `square c${one.colour} shade${i}` }, h("i", {}), `${part.name} `, h("b", {}, part.text)))), bar,
      one.note && h("p", { class: "note" }, unbroken(one.note)));
  }));
  const rows = kinds.flatMap((kind) => [h("tr", { class: "group" }, h("th", { colspan: 4, scope: "rowgroup" }, kind.name)),
    ...kind.links.map((link) => h("tr", {}, h("td", {}, link.where, h("small", {}, ` ${link.what}`)), h("td", { class: "number" }, link.text), h("td", { class: "number slim" }, link.round_text), h("td", { class: "number" }, link.use_text, meter(link.use))))]);
  show("links", rows.length && h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Bytes by link" }, h("table", {},
    h("thead", {}, h("tr", {}, ["Link", "Whole run", "Last round", "Of its rate"].map((head, i) => h("th", { scope: "col", class: i === 2 ? "number slim" : i ? "number" : null }, head)))), h("tbody", {}, rows))),
    rows.length && h("p", { class: "note kinds" }, "All replicas of a kind together; the share of the rate is one replica's, in the last round. " +
      (state.run.facts.includes("real processes") ? "Links between stages are looked at while inner steps run, those to the bucket over the whole round." : "Nothing travelled in this simulated run: bytes by shape, seconds by the virtual clock.")));
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
  show("spans", h("figure", {}, h("figcaption", {}, "Sent, against what dense methods would have sent"), s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words }, parts),
    h("p", { class: "note" }, "All links of the fleet together, over the whole run, on a logarithmic scale. Uncompressed stages would send activations and their gradients in all dimensions; dense replicas would average fp32 gradients after every inner step.")));
}

function meter(share) {
  if (share === null) return h("span", { class: "meter slim", "aria-hidden": "true" });
  const bar = h("b", {});
  bar.style.width = `${Math.min(100, 100 * share)}%`;
  return h("span", { class: `meter slim${share > 0.9 ? " full" : ""}`, "aria-hidden": "true" }, bar);
}

function against(state) {
  const plan = state.plan;
  $("plan").hidden = !plan;
  if (!plan) return;
  const groups = [...new Set(plan.lines.map((line) => line.kind))];
  const slim = plan.both ? "number slim" : "number"; // on a phone the plan at the measured rate says more
  const heads = [["", ""], ["Predicted", slim], ["Measured", "number"], ["Ratio", slim], ...(plan.both ? [["At the rate here", "number"], ["Ratio", "number"]] : [])];
  const cell = (style, ...children) => h("td", { class: style }, children);
  const rows = groups.flatMap((kind) => [h("tr", { class: "group" }, h("th", { colspan: heads.length, scope: "rowgroup" }, kind || "the whole fleet")),
    ...plan.lines.filter((line) => line.kind === kind).map((line) => h("tr", {}, h("td", {}, line.what, line.where && h("small", {}, ` ${line.where}`)), cell(slim, line.predicted),
      cell("number", line.measured, line.source && h("small", {}, ` ${line.source}`)), cell(slim, ratio(line.ratio)),
      plan.both && cell("number", line.at_measured_rate), plan.both && cell("number", ratio(line.ratio_at_measured_rate))))]);
  show("against", h("p", { class: "note" }, plan.note),
    h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Plan against actual" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map(([head, style]) => h("th", { scope: "col", class: style }, head)))), h("tbody", {}, rows))));
}

function ratio(found) {
  if (!found) return "-";
  const { value, close } = found, x = 36 + 30 * Math.max(-1, Math.min(1, Math.log(Math.max(value, 1e-9)) / Math.log(4)));
  const text = value < 0.1 ? value.toPrecision(2) : value < 100 ? value.toFixed(2) : Math.round(value).toLocaleString("en");
  return [text, s("svg", { class: `slim c${close ? 1 : 2}`, viewBox: "0 0 72 14", "aria-hidden": "true" },
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
  $("bias-gauge").replaceChildren(h("figcaption", {}, `Energy that compressed boundaries drop, after round ${data.kinds[0]?.round ?? 0}`), h("div", { class: "gauge" }, rows.flat()),
    h("p", { class: "note" }, "Of the stream less T_perp, on one held-out batch; the mark is where it stood at first." + (drift.length ? ` In that round the embedding drifted out of S by ${drift.join(", ")} of T_perp.` : "")));
  plots("bias-charts", data.charts);
}

// The rest

function top_(state) {
  const run = state.run;
  document.title = `${run.name}, round ${run.round} of ${run.rounds} - Isthmus`;
  $("name").textContent = run.name;
  const badge = $("status");
  badge.hidden = false; badge.textContent = run.status; badge.className = `badge ${run.tone}`;
  $("facts").textContent = [`${run.fleet.replace(/,$/, "")}, ${run.parameters} parameters`, ...run.facts].join(" · ");
  const share = Math.min(1, run.rounds ? run.round / run.rounds : 0);
  show("now", h("p", {}, state.now), h("div", { class: "bar" }, h("span", {}, `round ${run.round.toLocaleString("en")} of ${run.rounds.toLocaleString("en")}`),
    h("progress", { max: 1, value: share, "aria-label": "Rounds done" }), h("span", {}, run.left ? `about ${run.left} left` : `${Math.round(100 * share)} %`)));
  const ended = written || run.status !== "running";
  $("words").hidden = !ended;
  show("words", ended && state.summary.map((text) => h("li", {}, text)));
  show("tiles", state.tiles.map((tile) => h("div", {}, h("span", {}, tile.name), h("strong", {}, tile.value), h("span", { title: tile.words }, tile.words))));
}

function problems(state) {
  show("problems", state.problems.map((text) => h("p", { class: "alert", role: "alert" }, text)));
}

function events(state) {
  $("changes").hidden = Boolean(written); // a report was looked at once: nothing can have changed
  show("events", state.events.length ? state.events.map((one) => h("li", { class: one.tone || null },
    h("time", { datetime: new Date(1000 * one.unix).toISOString() }, new Date(1000 * one.unix).toLocaleTimeString("en-GB")), h("span", {}, one.text))) : h("li", {}, "Nothing yet, since this page's server started."));
}

function details(state) {
  const open = new Set([...document.querySelectorAll("#details > details[open] > summary")].map((node) => node.textContent));
  const fold = (title, body) => h("details", { open: open.has(title) }, h("summary", {}, title), body);
  const about = [...(state.run.where ? [["read from", state.run.where]] : []), ...state.about];
  show("details", $("words").hidden && fold("The run in words", h("ul", { class: "words inside" }, state.summary.map((text) => h("li", {}, text)))),
    fold("The resolved recipe", h("pre", { tabindex: 0 }, state.recipe)),
    fold("About this run", h("table", {}, h("tbody", {}, about.map(([key, value]) => h("tr", {}, h("th", { scope: "row" }, key), h("td", {}, value)))))));
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
  [bias, ["bias"]],
  [(state) => { $("time").hidden = !state.speeds.length; plots("speeds", state.speeds); }, ["speeds"]],
  [events, ["events"]],
  [details, ["run", "summary", "recipe", "about"]],
];
let last = null, tag = "";
const drawn = new Map();

function draw(state) {
  for (const [section, keys] of SECTIONS) {
    const slice = JSON.stringify(keys.map((key) => state[key]));
    if (drawn.get(section) === slice) continue;
    drawn.set(section, slice);
    section(state);
  }
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
