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
  const step = one.state === "training" && one.inner_step ? ` ${one.inner_step}/${state.run.inner_steps}` : one.restarts && one.up ? `, again (${one.restarts})` : "";
  parts.push(s("text", { class: `end state ${one.tone === "good" ? "" : one.tone}`, x: x + width - 12, y: y + 23 }, one.state + step));
  const loss = one.loss !== null && one.loss !== undefined ? FORMS.loss(one.loss) : "";
  const figures = [loss, one.rate].filter(Boolean).join("  ·  ");
  parts.push(s("text", { class: "end", x: x + width - 12, y: y + 46 }, figures));
  const room = width - 24 - 7 * figures.length - 16, each = 16;
  const shown = Math.max(1, Math.min(kind.stages, Math.floor((room + 10) / (each + 10))));
  const space = shown > 1 ? Math.min(width > 300 ? 44 : 26, (room - shown * each) / (shown - 1)) : 0;
  const dead = new Set(one.missing);
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
  const disks = state.replicas.some((one) => one.disk_free);
  const heads = ["Replica", "State", ...(state.run.bucket ? ["Heartbeat", "Inner step", "Loss", "Rate in training"] : []), ...(disks ? ["Disk free"] : [])];
  const cell = (head, value, bad) => h("td", { class: `number${bad ? " bad" : ""}`, "data-head": head }, value);
  const rows = state.replicas.flatMap((one) => [h("tr", { "data-replica": one.name, "data-state": one.state },
    h("th", { scope: "row" }, one.name, one.closes && h("small", {}, " closes")),
    h("td", { class: one.tone === "bad" ? "bad" : "" }, h("span", { class: `dot ${one.tone}` }), one.state, one.why && h("small", {}, unparted([` ${one.why}`]))),
    state.run.bucket && [cell("Heartbeat", age(one.seen_unix)), cell("Inner step", one.inner_step ? `${one.inner_step} of ${state.run.inner_steps}` : "-"),
      cell("Loss", one.loss === null ? "-" : FORMS.loss(one.loss)), cell("Rate in training", one.rate || "-")],
    disks && cell("Disk free", one.disk_free || "-", one.disk_short)), trouble(one, heads.length)]).filter(Boolean);
  const kinds = state.kinds.map((kind) => `${kind.count} ${kind.name}: ${kind.kind}${kind.stages > 1 ? ` in ${kind.stages} stages` : ""}${kind.compression ? `, ${kind.compression}` : ""}${kind.link ? `, ${kind.link} between stages` : ""}${kind.bucket_link ? `, ${kind.bucket_link} to the bucket` : ""}`);
  show("members", h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "The replicas, as a table" }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((head, i) => h("th", { scope: "col", class: i > 1 ? "number" : null }, explained(head))))),
    h("tbody", {}, rows))), h("p", { class: "note kinds" }, explained(`${kinds.join("; ")}.`)));
}

// What went wrong on a replica's machine, in a row of its own below it.
function trouble(one, columns) {
  const again = one.restarts ? `started again ${one.restarts === 1 ? "once" : `${one.restarts.toLocaleString("en")} times`}` : "";
  const disk = one.disk_short ? `${one.disk_free} free on its disk: its next save needs more` : "";
  if (!again && !one.last_error && !disk) return null;
  const parts = [again && [again], one.last_error && ["last error", one.last_error_unix ? [" ", age(one.last_error_unix)] : "", `: ${one.last_error}`], disk && [h("b", {}, disk)]].filter(Boolean);
  return h("tr", { class: "trouble", "data-trouble": one.name }, h("td", { colspan: columns }, unparted(parts.flatMap((part, i) => i ? ["; ", ...part] : part))));
}
