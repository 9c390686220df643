// Colours, words and texts of spans.
const KINDS = {
  __proto__: null,
  task: ["#a0aab4", "the task is made and tokenised"],
  lease: ["#f2c14e", "waits for an engine with room"],
  queue: ["#f08a4b", "waits inside the engine"],
  prefill: ["#8fc1f5", "its prompt is read"],
  decode: ["#2c6fd1", "its tokens are sampled"],
  generate: ["#2c6fd1", "in an engine that tells no more"],
  tool: ["#9256c9", "a tool or the environment answers"],
  siblings: ["#d3d9e0", "waits for others of its group", "#4a5663"],
  reward: ["#23a08a", "is rewarded"],
  store: ["#8d6e63", "is written to the store"],
  sampling: ["#bcd4f2", "the engine works on its samples", "#37588a"],
  "wait for groups": ["#dfe5ec", "for rollouts to finish", "#3a4551"],
  "wait for engines": ["#e9b69b", "until one serves the newest weights"],
  stage: ["#f7cfdd", "engines read them while they are written", "#7d5263"],
  upload: ["#9aa8b5", "rows go to the trainer"],
  old_logprobs: ["#8fc1f5", "log-probs of the policy"],
  reference_logprobs: ["#5b9be0", "log-probs of the reference"],
  values: ["#4bb8c9", "estimates of the critic"],
  returns: ["#7fd0dc", "targets of the critic"],
  advantages: ["#c3d95a", "rewards become advantages"],
  forward_backward: ["#46a35a", "gradients"],
  optimizer: ["#1c6b34", "the weights change"],
  publish: ["#a25cc4", "new weights go to the store"],
  prepare: ["#f3a6c0", "engines load them, sampling on"],
  commit: ["#d6285a", "engines swap them in, standing still"],
  columns: ["#c9b18f", "what the trainer knows of samples, to keep"],
  checkpoint: ["#8d6e63", "a place to resume from"],
  other: ["#b8c0c8", "none of these", "#5d6873"],
};
const PLAIN = ["#8896a5", ""];
const isDark = () => document.documentElement.dataset.theme === "dark";
// What is pale on white is dark on black: the third of a kind.
const colour = (name) => {
  const [onWhite, , onBlack] = KINDS[name] || PLAIN;
  return (isDark() && onBlack) || onWhite;
};
const paint = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Whether dark text is read better on it.
function isPale(hex) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 150;
}

function seconds(micro) {
  if (micro >= 60e6) return `${Math.floor(micro / 60e6)} min ${((micro % 60e6) / 1e6).toFixed(0)} s`;
  if (micro >= 1e6) return `${(micro / 1e6).toFixed(2)} s`;
  if (micro >= 1e3) return `${(micro / 1e3).toFixed(micro >= 1e5 ? 0 : 1)} ms`;
  return `${micro} µs`;
}

// A tick, with as many digits as tell it from the next one.
function tickText(micro, distance) {
  if (micro >= 60e6 && distance >= 1e6) return seconds(micro);
  const digits = Math.max(0, Math.min(6, Math.ceil(6 - Math.log10(distance))));
  return `${(micro / 1e6).toFixed(digits)} s`;
}

// A round distance between ticks, so that about `count` fit into `span` microseconds.
function tickDistance(span, count) {
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((distance) => distance >= rough);
}

function fit(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.parentElement.clientWidth;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return [context, width];
}

// Text inside a box, cut where it does not fit.
function label(context, text, x, y, width) {
  if (width < 14) return;
  let shown = text;
  while (shown && context.measureText(shown).width > width - 4) shown = shown.slice(0, -1);
  if (shown.length >= Math.min(3, text.length)) context.fillText(shown, x + 3, y);
}

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  Object.assign(made, attributes);
  made.append(...children);
  return made;
}

// A stacked bar of shares, with an entry each; a click on one hides its kind in the timeline.
function shares(bar, entries, values, toggle) {
  const total = Object.values(values).reduce((sum, value) => sum + value, 0) || 1;
  for (const [name, value] of Object.entries(values)) {
    const share = (100 * value) / total;
    if (share < 0.05) continue;
    const part = element("div", { title: `${name} ${share.toFixed(1)} %` });
    part.style.width = `${share}%`;
    bar.append(part);
    const swatch = element("span", { className: "swatch" });
    for (const each of [part, swatch]) each.dataset.kind = name;
    const what = element("span", { className: "what" }, (KINDS[name] || PLAIN)[1]);
    const entry = element("button", { className: "entry", title: "show or hide" }, swatch,
      element("span", { className: "name" }, name), " ",
      element("b", {}, `${share.toFixed(share < 10 ? 1 : 0)} %`), " ", what);
    entry.onclick = () => entry.classList.toggle("off", toggle(name));
    entries.append(entry);
  }
}
