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
// A name such as edge-1 or lab-berlin is not parted at its hyphen.
const unparted = (parts) => parts.flatMap((part) => typeof part !== "string" ? part : part.split(/(\S{1,24}-\S{1,16})/).map((text, i) => i % 2 ? h("span", { class: "whole" }, text) : text));
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
    else if (state.run.silent_unix) { // what is shown comes from its last answer, or from the rows of the run directory
      words = `the bucket does not answer, shown as of ${ago(now() - (state.run.as_of_unix ?? state.heard_unix ?? state.run.silent_unix))}`; tone = "gone";
    } else if (state.run.stale || (state.run.timeout_seconds && now() - state.heard_unix > state.run.timeout_seconds)) { words = `nothing heard from the run, last ${when}`; tone = "gone"; }
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

