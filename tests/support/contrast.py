"""Which text of the page is too pale to read, and a state in which every colour of text is there."""

# Text whose contrast with what is behind it is below WCAG 2's 4.5 (3 where it is large), with that contrast.
PALE = r"""(() => {
  const parse = (text) => {
    const all = (text.match(/[\d.]+/g) || []).map(Number);
    const scale = text.startsWith("color(") ? 255 : 1; // what color-mix gives is in shares of 1
    return [...all.slice(0, 3).map((v) => v * scale), all.length > 3 ? all[3] : 1];
  };
  const over = (top, below) => below.map((v, i) => top[i] * top[3] + v * (1 - top[3]));
  const linear = (v) => v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b) + 0.05;
  const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode.data.trim(), node = walk.currentNode.parentElement;
    if (!text || node.tagName === "title" || !node.getClientRects().length) continue;
    let below = [255, 255, 255], seen = 1;
    const behind = [], style = getComputedStyle(node);
    for (let one = node; one; one = one.parentElement) {
      behind.unshift(parse(getComputedStyle(one).backgroundColor));
      seen *= getComputedStyle(one).opacity;
    }
    for (const layer of behind) below = over(layer, below);
    const ink = parse(node.namespaceURI.endsWith("svg") ? style.fill : style.color);
    const pair = [light(over([...ink.slice(0, 3), ink[3] * seen], below)), light(below)];
    const contrast = Math.max(...pair) / Math.min(...pair), large = parseFloat(style.fontSize) >= 24;
    if (contrast < (large ? 3 : 4.5)) found.push([contrast.toFixed(2), node.getAttribute("class"), text]);
  }
  return found;
})()"""

EVERY_WORD = """(() => {
  const state = structuredClone(last), words = Object.keys(state.rounds.words);
  state.rounds.rows.forEach((row, r) => row.cells.forEach((cell, i) => {
    cell[0] = words[(r * row.cells.length + i) % words.length];
  }));
  state.run.status = state.run.tone = "interrupted";
  state.run.bucket = true;
  state.problems = ["something is wrong"];
  ["wait", "bad", "good"].forEach((tone, i) => {
    Object.assign(state.replicas[i], { tone, state: tone, why: "a reason", up: tone !== "bad" });
    state.events.push({ unix: 0, text: "it happened", tone });
  });
  draw(state);
  document.querySelectorAll("details").forEach((node) => { node.open = true; });
})()"""
