// Curves as SVG: a faint line of every step, a trend over it, several runs over each other.
const COLOURS = ["#3f83e8", "#d9822b", "#2a9d64", "#c2456e", "#8457c9", "#8a8f2a", "#1c9aa8", "#7a5b4c"];
const SVG = "http://www.w3.org/2000/svg";
const LOGARITHMIC = new Set(["rollout_mismatch", "rollout_mismatch_k3", "kl_old_k3", "kl_reference_k3"]);

function shape(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

function number(value) {
  if (value === null || value === undefined) return "-";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return String(+value.toPrecision(4));
}

// Local linear regression under a Gaussian: the same as sluice.loop.plot.smoothed.
function smoothed(values, width) {
  if (!width) return values;
  const reach = Math.max(1, Math.ceil(4 * width)), kernel = [];
  for (let d = -reach; d <= reach; d++) kernel.push(Math.exp(-0.5 * (d / width) ** 2));
  return values.map((_, place) => {
    let s0 = 0, s1 = 0, s2 = 0, t0 = 0, t1 = 0;
    const first = Math.max(0, place - reach), last = Math.min(values.length - 1, place + reach);
    for (let at = first; at <= last; at++) {
      const y = values[at];
      if (y === null) continue;
      const d = at - place, w = kernel[d + reach];
      s0 += w; s1 += w * d; s2 += w * d * d; t0 += w * y; t1 += w * d * y;
    }
    if (s0 <= 1e-6) return null;
    const spread = s0 * s2 - s1 * s1;
    return spread > 1e-9 * s0 * s2 ? (s2 * t0 - s1 * t1) / spread : t0 / s0;
  });
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const distance = [1, 2, 5, 10].map((f) => f * power).find((d) => d >= rough);
  const found = [];
  for (let at = Math.ceil(low / distance) * distance; at <= high + distance * 1e-6; at += distance) {
    found.push(Math.abs(at) < distance * 1e-6 ? 0 : at);
  }
  return found;
}

// Points of a line, no more than the lowest and highest of each half pixel.
function path(xs, ys, x, y) {
  let text = "", pen = "M", column = null, low = null, high = null;
  const flush = () => {
    if (low === null) return;
    for (const [at, value] of low[0] <= high[0] ? [low, high] : [high, low]) {
      text += `${pen}${x(at).toFixed(1)},${y(value).toFixed(1)}`;
      pen = "L";
    }
    low = high = null;
  };
  for (let index = 0; index < xs.length; index++) {
    const value = ys[index];
    if (value === null || !Number.isFinite(y(value))) { flush(); pen = "M"; continue; }
    const here = Math.round(x(xs[index]) * 2);
    if (here !== column) { flush(); column = here; }
    if (low === null || value < low[1]) low = [xs[index], value];
    if (high === null || value > high[1]) high = [xs[index], value];
  }
  flush();
  return text;
}

// lines: [{run, label, colour, xs, ys, trend, dots}]
function chart(figure, name, lines, options) {
  const width = 400, height = 150, left = 46, right = 6, top = 6, bottom = 18;
  const xs = lines.flatMap((line) => [line.xs[0], line.xs[line.xs.length - 1]]).filter((v) => v !== undefined);
  let values = [];
  for (const line of lines) for (const list of [line.trend, options.raw || line.dots ? line.ys : []]) {
    for (const value of list) if (value !== null) values.push(value);
  }
  const logarithmic = LOGARITHMIC.has(name) && values.some((value) => value > 0);
  if (logarithmic) values = values.filter((value) => value > 0);
  const scale = logarithmic ? Math.log10 : (value) => value;
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, scale(value)); high = Math.max(high, scale(value)); }
  if (!(high - low > 1e-6 * Math.max(Math.abs(high), Math.abs(low)))) { const pad = Math.abs(high) * 0.05 || 0.5; low -= pad; high += pad; }
  const space = (high - low) * 0.05;
  low -= space; high += space;
  const from = Math.min(...xs), to = Math.max(...xs);
  const x = (at) => left + ((at - from) / (to - from || 1)) * (width - left - right);
  const y = (value) => top + (1 - (scale(value) - low) / (high - low)) * (height - top - bottom);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img" }, figure);
  shape("title", {}, svg).textContent = name;
  const marks = logarithmic && high - low >= 1.2
    ? ticks(low, high, 5).filter(Number.isInteger).map((power) => 10 ** power)
    : logarithmic ? ticks(10 ** low, 10 ** high, 6) : ticks(low, high, 6);
  for (const value of marks) {
    if (!Number.isFinite(y(value))) continue;
    shape("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }, svg);
    shape("text", { x: left - 4, y: y(value) + 3, "text-anchor": "end" }, svg).textContent = number(+value.toPrecision(6));
  }
  for (const value of ticks(from, to, 5)) {
    shape("text", { x: x(value), y: height - 4, "text-anchor": "middle" }, svg).textContent = number(+value.toPrecision(6));
  }
  for (const line of lines) {
    const stroke = { fill: "none", stroke: line.colour, "vector-effect": "non-scaling-stroke" };
    if (options.raw && !line.dots) shape("path", { ...stroke, "stroke-width": 1, opacity: 0.3, d: path(line.xs, line.ys, x, y) }, svg);
    shape("path", { ...stroke, "stroke-width": 1.6, "stroke-dasharray": line.dots ? "4 3" : "none", d: path(line.xs, line.trend, x, y) }, svg);
    if (line.dots) line.xs.forEach((at, index) => line.ys[index] !== null &&
      shape("circle", { cx: x(at), cy: y(line.ys[index]), r: 2.5, fill: line.colour }, svg));
  }
  const cross = shape("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" }, svg);
  svg.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = from + (((event.clientX - box.left) / box.width) * width - left) / (width - left - right) * (to - from);
    const told = lines.map((line) => {
      const index = nearest(line.xs, at);
      return `${line.label}: ${number(line.ys[index])} (trend ${number(line.trend[index])})`;
    });
    const index = nearest(lines[0].xs, at), px = x(lines[0].xs[index]);
    cross.setAttribute("x1", px); cross.setAttribute("x2", px); cross.setAttribute("visibility", "visible");
    tip(event, `${options.axis} ${number(lines[0].xs[index])}\n${told.join("\n")}`);
  });
  svg.addEventListener("mouseleave", () => { cross.setAttribute("visibility", "hidden"); tip(null); });
}

function nearest(sorted, at) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (sorted[middle] < at) low = middle; else high = middle; }
  return Math.abs(sorted[low] - at) <= Math.abs(sorted[high] - at) ? low : high;
}

function tip(event, text) {
  const box = document.getElementById("tip");
  box.hidden = event === null;
  if (event === null) return;
  box.textContent = text;
  box.style.left = `${Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8)}px`;
  box.style.top = `${Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 8)}px`;
}
