// What is this? Every odd word on the page can be asked: by pointer, touch or keyboard; all of them at its end.

const WORDS = {
  "anchor": "The weights that all replicas last agreed on. Every round starts from them, and ends with new ones.",
  "awaited": "The round is open, and this replica's update is not there yet.",
  "away": "The replica was not a member of that round: it had left, or had not joined yet.",
  "boundary": "Where one stage ends and the next begins. What crosses it is squeezed before the link and expanded behind it.",
  "bubble": "Time in which a stage has nothing to do, because the first micro-batch has not reached it yet or the last one has passed.",
  "bucket": "A folder or an object store such as S3. Replicas exchange everything through it and never connect to each other.",
  "clipping": "A gradient that is longer than the recipe allows is scaled down to that length before it is used.",
  "closer": "A replica that may settle a round: it checks every update that has come, and writes down which of them count.",
  "contributed": "Its update counted: the round's new anchor has it.",
  "control": "All that the bucket moves beside updates: snapshots of the weights, manifests, heartbeats.",
  "delivered": "Its update for the open round is in the bucket.",
  "dense methods": "The usual way to train on several machines: all gradients are averaged after every inner step, and whole streams cross between stages.",
  "error feedback": "What a replica did not send in a round, because only the largest changes travel. It is kept and added to what the next round would send.",
  "forward": "How the model is computed for a loss: full is the whole model with nothing compressed, pipelined goes through the compressed boundaries, mixed is the mean over replicas as each of them trains.",
  "full": "A full replica holds the whole model on one machine. A full forward is one with nothing compressed.",
  "gradient norm": "The length of the gradient. A sudden rise often comes before a run diverges.",
  "H": "Inner steps in a round: replicas talk to each other once in H steps.",
  "heartbeat": "A few lines that every replica writes into the bucket every few seconds: where it is, its loss, its rate.",
  "held-out loss": "The loss on text that is never trained on, in nats a token. Lower is better.",
  "inner step": "One update of a replica's own weights from one batch, without talking to other replicas.",
  "k/d": "How many of the d dimensions of the stream cross a boundary: at 1/8 the link carries an eighth of the numbers.",
  "kappa": "How many entries of each 64 x 64 block of a weight matrix are sent in a round (outer.keep): the largest ones.",
  "late": "The update lies in the bucket, but came after its round was settled. It returns to the replica's error feedback.",
  "manifest": "The document that settles a round: whose updates count, who was refused and why. All replicas follow it.",
  "micro-batch": "A part of a batch. A pipeline has several under way, so that its stages work at the same time.",
  "missing": "The replica was awaited in that round and delivered nothing before the deadline.",
  "mixed": "The mean of the held-out loss over the replicas, each computed as that replica trains.",
  "nats": "The unit of the loss: minus the natural logarithm of the probability given to the right token. 0.69 nats are one bit.",
  "outer round": "H inner steps of every replica, then one exchange of what has changed.",
  "payload": "An update as it is packed for the bucket, in bytes.",
  "pipelined": "A pipelined replica is cut into stages, one for each of several weaker machines. A pipelined forward goes through its compressed boundaries.",
  "pseudo-gradient": "The anchor less the weights after H inner steps: what a replica has learnt in a round. Its largest entries are its update.",
  "recomputed": "Activations are not kept for the backward pass but computed again from each layer's input: less memory, a third more compute.",
  "refused": "A closer did not count the update: it was malformed, from another anchor, far too large, against most others, or made the held-out loss worse. The cell says which.",
  "replica": "One copy of the model that trains on its own data: one machine, or several that share it as stages.",
  "S": "The subspace: k fixed directions out of d, the same for all stages. Only what lies in them crosses a compressed link.",
  "silent": "Nothing has been heard of the replica for longer than its heartbeats allow. The others go on without it.",
  "stage": "A slice of the model's layers, on one machine of a pipelined replica.",
  "subspace": "k fixed directions out of d, called S. Only what lies in them crosses a compressed link.",
  "T_perp": "The part of the token embedding outside the subspace S. Every stage has a copy of it, so it need not cross the link.",
  "token ids": "The numbers of the tokens. Later stages need them to add T_perp back.",
  "update": "What a replica sends in a round: the largest entries of its pseudo-gradient, in few bits.",
  "utilisation": "The share of a round in which a machine computes; the rest is waiting for links, other stages or other replicas.",
  "virtual clock": "A formula for how long a round would take on the recipe's machines and links. Nothing was measured there.",
  "waiting": "The replica's supervisor runs, but none of its processes trains: it waits for a stage, the bucket or the disk, and says for which.",
  "wire": "How numbers are written on a link between stages: int5 takes five bits for each, bf16 sixteen.",
};

// What else a word is called on the page.
const ALIASES = {
  "boundaries": "boundary", "feedback": "error feedback", "round": "outer round", "dense": "dense methods",
  "uncompressed": "dense methods", "bf16": "wire", "int8": "wire", "int6": "wire", "int5": "wire", "int4": "wire",
};

// A text in which words can be asked. `text` stays text, whatever it holds.
const names = [...Object.keys(WORDS), ...Object.keys(ALIASES)].sort((a, b) => b.length - a.length);
const plural = (name) => `${name.replace(/[/]/g, "\\/")}${/[a-z]$/.test(name) && !name.endsWith("s") ? "(?:e?s)?" : ""}`;
const mention = new RegExp(`(?<![\\w-])(?:${names.map(plural).join("|")})(?![\\w-])`, "gi");
function named(found) {
  const forms = [found, found.replace(/s$/, ""), found.replace(/es$/, "")].map((form) => form.toLowerCase());
  const name = names.find((one) => one === found) || names.find((one) => one.length > 1 && forms.includes(one.toLowerCase()));
  return ALIASES[name] || name;
}

function explained(text) {
  const parts = [];
  let from = 0;
  for (const found of text.matchAll(mention)) {
    const name = named(found[0]);
    if (!name) continue;
    parts.push(text.slice(from, found.index), ask(name, found[0]));
    from = found.index + found[0].length;
  }
  return [...parts, text.slice(from)];
}

// Not a button: that would be one block in the line, and part from the comma behind it.
const ask = (name, label) => h("dfn", { role: "button", tabindex: 0, class: "word", "data-word": name, "aria-expanded": "false", title: "What is this?" }, label);

let asked = null; // the word whose answer is shown

function answer(button) {
  const box = $("answer"), name = button.dataset.word;
  asked = button;
  button.setAttribute("aria-expanded", "true");
  box.replaceChildren(h("strong", {}, name), ` ${WORDS[name]}`);
  box.hidden = false;
  // Below the word, and inside the window; on a phone that is as wide as the window.
  const at = button.getBoundingClientRect(), own = box.getBoundingClientRect(), edge = 10, wide = document.documentElement.clientWidth;
  const left = Math.max(edge, Math.min(at.left, wide - own.width - edge));
  const above = at.bottom + own.height + 8 > innerHeight && at.top > own.height + 8;
  box.style.left = `${left + scrollX}px`;
  box.style.top = `${(above ? at.top - own.height - 6 : at.bottom + 6) + scrollY}px`;
}

function dismiss() {
  if (!asked) return;
  asked.setAttribute("aria-expanded", "false");
  asked = null;
  $("answer").hidden = true;
  $("answer").replaceChildren();
}

addEventListener("click", (event) => {
  const button = event.target.closest?.("[data-word]"), again = button && button === asked;
  if (!$("answer").contains(event.target)) dismiss();
  if (button && !again) { event.preventDefault(); answer(button); }
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") dismiss();
  if ((event.key === "Enter" || event.key === " ") && event.target.dataset?.word) { event.preventDefault(); event.target.click(); }
});
let width_ = innerWidth; // a phone changes its height while one scrolls, which moves nothing
addEventListener("resize", () => { if (innerWidth !== width_) { width_ = innerWidth; dismiss(); } });

// In each section a word can be asked where it is first; after that it is a word like others.
function onceEach() {
  for (const place of document.querySelectorAll("main section, #words, #tiles")) {
    const seen = new Set();
    for (const word of place.querySelectorAll(".word")) {
      if (seen.has(word.dataset.word)) word.replaceWith(word.textContent);
      seen.add(word.dataset.word);
    }
  }
}

// A section that is drawn anew has new words: the one that has the focus, or is asked, stays so.
function keepAsked(drawing) {
  const again = (word) => word && { word, name: word.dataset.word, place: word.closest("section") };
  const focused = document.activeElement?.dataset.word ? again(document.activeElement) : null, shown = again(asked);
  drawing();
  onceEach();
  const same = (one) => one.place?.querySelector(`[data-word="${CSS.escape(one.name)}"]`);
  if (focused && !focused.word.isConnected) same(focused)?.focus();
  if (!shown || shown.word.isConnected) return;
  if (same(shown)) { asked = same(shown); asked.setAttribute("aria-expanded", "true"); } else dismiss();
}

const glossary = () => h("dl", { class: "glossary" }, Object.entries(WORDS).map(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]));
