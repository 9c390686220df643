const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const GUTTER = 132, AXIS = 22;
const hidden = new Set();
let pinned = null, hovered = null;

const whole = { from: 0, to: 1 };
for (const lane of data.lanes) for (const span of lane.spans) whole.to = Math.max(whole.to, span[0] + span[1]);
for (const engine of data.engines) for (const span of engine.spans) whole.to = Math.max(whole.to, span[3] + span[4]);
const view = { ...whole };

// Rows of the timeline: {label, note, top, height, spans: [{start, end, name, ...}]}.
const areas = [];
let bottom = AXIS;
function area(made, height, gap) {
  areas.push({ ...made, top: bottom, height });
  bottom += height + gap;
}
area({ label: "steps", kind: "steps",
  spans: data.steps.map(([start, time, name]) => ({ start, end: start + time, name })) }, 18, 4);
for (const lane of data.lanes) {
  area({ label: lane.label, kind: "phases", spans: lane.spans.map(([start, time, name, detail]) =>
    ({ start, end: start + time, name, detail })) }, 18, 4);
}
const commits = { __proto__: null };
for (const lane of data.lanes) {
  if (lane.label.startsWith("weights of ")) {
    commits[lane.label.slice(11)] = lane.spans.filter((span) => span[2] === "commit");
  }
}
bottom += 4;
for (const engine of data.engines) {
  const rowHeight = Math.max(0.75, Math.min(12, 380 / Math.max(1, engine.rowCount)));
  const rows = Array.from({ length: engine.rowCount }, () => []);
  for (const [row, group, episode, start, time, name] of engine.spans) {
    rows[row].push({ start, end: start + time, name, group, episode });
  }
  for (const row of rows) row.sort((one, other) => one.start - other.start);
  area({ label: `engine ${engine.name}`, note: `${engine.rowCount} slots used`, kind: "rows", rows,
    rowHeight, engine: engine.name }, Math.max(30, rowHeight * engine.rowCount), 10);
}
{
  const { rowCount, bars } = data.groupBars;
  const rowHeight = Math.max(0.75, Math.min(12, 240 / Math.max(1, rowCount)));
  const rows = Array.from({ length: rowCount }, () => []);
  for (const [row, group, sections] of bars) {
    for (const [start, time, name] of sections) rows[row].push({ start, end: start + time, name, group });
  }
  for (const row of rows) row.sort((one, other) => one.start - other.start);
  area({ label: "groups", note: `${bars.length} in all`, kind: "rows", rows, rowHeight },
    Math.max(30, rowHeight * rowCount), 6);
}

let context, width, ink;
const x = (micro) => GUTTER + ((micro - view.from) / (view.to - view.from)) * (width - GUTTER);
const micro = (pixel) => view.from + ((pixel - GUTTER) / (width - GUTTER)) * (view.to - view.from);

function drawSpan(span, y, height, withText) {
  const left = Math.max(GUTTER, x(span.start)), right = x(span.end);
  if (right < GUTTER || left > width || hidden.has(span.name)) return;
  const dim = pinned !== null && span.group !== undefined && span.group !== pinned;
  context.globalAlpha = dim ? 0.12 : 1;
  context.fillStyle = colour(span.name);
  context.fillRect(left, y, Math.max(0.6, right - left), height);
  if (withText && right - left > 30) {
    context.fillStyle = isPale(colour(span.name)) ? "#1f2933" : "#fff";
    label(context, span.detail && withText === 2 ? `${span.name} ${span.detail}` : span.name,
      left, y + height / 2 + 0.5, Math.min(right, width) - left);
  }
  context.globalAlpha = 1;
}

function drawRow(row, y, height) {
  let last = -1;
  for (const span of row) {
    if (span.end < view.from) continue;
    if (span.start > view.to) break;
    const right = x(span.end);
    if (right - last < 0.4) continue;  // nothing to see
    drawSpan(span, y, height > 3 ? height - 1 : height, false);
    last = right;
  }
}

function drawArea(each) {
  const { top, height } = each;
  if (each.kind === "steps") {
    each.spans.forEach((span, index) => {
      const left = Math.max(GUTTER, x(span.start)), right = Math.min(width, x(span.end));
      if (right <= left) return;
      context.fillStyle = ink[index % 2 ? "even" : "odd"];
      context.fillRect(left, top, right - left, height);
      context.fillStyle = ink.ink;
      const texts = [span.name, span.name.replace("step ", "")];
      const text = texts.find((one) => context.measureText(one).width < right - left - 6);
      if (text) context.fillText(text, left + 3, top + height / 2 + 0.5);
    });
  } else if (each.kind === "phases") {
    for (const span of each.spans) drawSpan(span, top, height, 2);
  } else {
    context.fillStyle = ink.slots;
    context.fillRect(GUTTER, top, width - GUTTER, each.rowHeight * each.rows.length);
    each.rows.forEach((row, index) => drawRow(row, top + index * each.rowHeight, each.rowHeight));
    for (const [start, time] of commits[each.engine] || []) {
      const left = x(start), right = x(start + time);
      if (right < GUTTER || left > width || hidden.has("commit")) continue;
      context.fillStyle = "rgba(214, 40, 90, 0.55)";
      context.fillRect(Math.max(GUTTER, left), top, Math.max(1, right - left), height);
    }
  }
}

function drawGutter() {
  context.fillStyle = ink.paper;
  context.fillRect(0, 0, GUTTER, bottom);
  context.strokeStyle = ink.line;
  context.beginPath();
  context.moveTo(GUTTER + 0.5, 0);
  context.lineTo(GUTTER + 0.5, bottom);
  context.stroke();
  for (const each of areas) {
    context.fillStyle = ink.ink;
    const middle = each.note ? each.top + 9 : each.top + each.height / 2;
    label(context, each.label, 6, middle, GUTTER - 8);
    if (each.note) {
      context.fillStyle = ink.soft;
      label(context, each.note, 6, each.top + 24, GUTTER - 8);
    }
  }
}

function drawAxis() {
  const distance = tickDistance(view.to - view.from, Math.max(2, (width - GUTTER) / 110));
  context.strokeStyle = ink.even;
  context.fillStyle = ink.soft;
  for (let tick = Math.ceil(view.from / distance) * distance; tick <= view.to; tick += distance) {
    const at = Math.round(x(tick)) + 0.5;
    context.beginPath();
    context.moveTo(at, AXIS - 5);
    context.lineTo(at, bottom);
    context.stroke();
    context.fillText(tickText(tick, distance), at + 3, 9);
  }
}

const INKS = ["ink", "soft", "line", "paper", "slots", "odd", "even", "border", "shade"];

function draw() {
  ink = Object.fromEntries(INKS.map((name) => [name, paint(name)]));
  [context, width] = fit(byId("rows"), bottom);
  drawAxis();
  for (const each of areas) drawArea(each);
  if (data.steps.length && x(data.steps[0][1]) - x(0) > 8) {
    context.strokeStyle = ink.border;
    context.setLineDash([3, 3]);
    for (const [start] of data.steps) {
      const at = Math.round(x(start)) + 0.5;
      if (at < GUTTER) continue;
      context.beginPath();
      context.moveTo(at, AXIS);
      context.lineTo(at, bottom);
      context.stroke();
    }
    context.setLineDash([]);
  }
  if (hovered && hovered.box) {
    context.strokeStyle = ink.ink;
    context.lineWidth = 1.5;
    context.strokeRect(...hovered.box);
    context.lineWidth = 1;
  }
  drawGutter();
  drawOverview();
  const inside = data.steps.filter(([start, time]) => start < view.to && start + time > view.from);
  const ends = inside.length ? [inside[0][2], inside[inside.length - 1][2].replace("step ", "")] : [];
  byId("where").textContent = `${seconds(Math.round(view.to - view.from))} shown` +
    (inside.length > 1 ? `, ${ends.join("–")}` : inside.length ? `, ${ends[0]}` : "");
}

// Samples on the engines, by pixel of the overview.
function concurrency(pixels) {
  const counts = new Float64Array(pixels + 1);
  const scale = pixels / whole.to;
  for (const engine of data.engines) {
    for (const [, , , start, time, name] of engine.spans) {
      if (name === "queue") continue;
      const first = start * scale, last = (start + time) * scale;
      for (let pixel = Math.floor(first); pixel <= last && pixel < pixels; pixel++) {
        counts[pixel] += Math.min(last, pixel + 1) - Math.max(first, pixel);
      }
    }
  }
  return counts;
}
let curve = null;

function drawOverview() {
  const height = 46;
  const [strip, full] = fit(byId("overview"), height);
  const pixels = full - GUTTER;
  if (!curve || curve.length !== pixels + 1) curve = concurrency(pixels);
  const highest = Math.max(1, ...curve);
  strip.fillStyle = colour("sampling");
  for (let pixel = 0; pixel < pixels; pixel++) {
    const tall = (curve[pixel] / highest) * (height - 8);
    strip.fillRect(GUTTER + pixel, height - tall, 1, tall);
  }
  strip.fillStyle = "#d6285a";
  for (const spans of Object.values(commits)) {
    for (const [start] of spans) strip.fillRect(GUTTER + (start / whole.to) * pixels, 0, 1, 5);
  }
  strip.fillStyle = ink.ink;
  label(strip, "samples on engines", 6, 14, GUTTER - 8);
  strip.fillStyle = ink.soft;
  label(strip, `at most ${Math.round(highest)}`, 6, 30, GUTTER - 8);
  const left = GUTTER + (view.from / whole.to) * pixels, right = GUTTER + (view.to / whole.to) * pixels;
  strip.fillStyle = ink.shade;
  strip.fillRect(GUTTER, 0, left - GUTTER, height);
  strip.fillRect(right, 0, full - right, height);
  strip.strokeStyle = ink.ink;
  strip.strokeRect(left + 0.5, 0.5, Math.max(2, right - left - 1), height - 1);
}

function show(from, to) {
  const size = Math.min(whole.to, Math.max(50, to - from));
  view.from = Math.max(0, Math.min(from, whole.to - size));
  view.to = view.from + size;
  draw();
}

function zoom(factor, at) {
  show(at - (at - view.from) * factor, at + (view.to - at) * factor);
}

const middle = () => (view.from + view.to) / 2;

function showStep(offset) {
  const at = middle();
  let index = data.steps.findIndex(([start, time]) => at < start + time);
  if (index < 0) index = data.steps.length - 1;
  const wide = view.to - view.from > 1.5 * data.steps[index][1];
  index = Math.max(0, Math.min(data.steps.length - 1, index + (wide ? 0 : offset)));
  const [start, time] = data.steps[index];
  show(start - time * 0.03, start + time * 1.03);
}

function find(offsetX, offsetY) {
  if (offsetX < GUTTER) return null;
  const each = areas.find(({ top, height }) => offsetY >= top && offsetY < top + height);
  if (!each) return null;
  let row = each.spans, y = each.top, height = each.height;
  if (each.rows) {
    const index = Math.floor((offsetY - each.top) / each.rowHeight);
    row = each.rows[index] || [];
    y = each.top + index * each.rowHeight;
    height = each.rowHeight;
  }
  const at = micro(offsetX), near = ((view.to - view.from) / (width - GUTTER)) * 2;
  const span = row.filter((one) => one.start - near <= at && at <= one.end + near && !hidden.has(one.name))
    .sort((one, other) => Math.abs(one.start + one.end - 2 * at) - Math.abs(other.start + other.end - 2 * at))[0];
  if (!span) return null;
  const left = Math.max(GUTTER, x(span.start));
  return { area: each, span, box: [left, y, Math.max(1, x(span.end) - left), height] };
}

function tipText({ area: each, span }) {
  const lines = [`${span.name}: ${seconds(span.end - span.start)}`];
  const meaning = (KINDS[span.name] || PLAIN)[1];
  if (meaning) lines.push(meaning);
  if (span.detail) lines.push(span.detail);
  if (span.group !== undefined) {
    const sample = span.episode === undefined ? "" : `, sample ${span.episode}`;
    lines.push(`group ${data.groups[span.group]}${sample}`);
    const detail = data.details[`${span.group}/${span.episode}`];
    if (detail) lines.push(detail);
  }
  if (each.engine) lines.push(`on engine ${each.engine}`);
  lines.push(`from ${seconds(span.start)} to ${seconds(span.end)}`);
  return lines.join("\n");
}

const canvas = byId("rows"), tip = byId("tip");
let grip = null;
canvas.addEventListener("wheel", (event) => {
  if (event.offsetX < GUTTER || event.ctrlKey) return;
  event.preventDefault();
  const sideways = event.shiftKey ? event.deltaY : event.deltaX;
  const step = ((view.to - view.from) / (width - GUTTER)) * sideways;
  if (Math.abs(sideways) > Math.abs(event.deltaY) || event.shiftKey) show(view.from + step, view.to + step);
  else zoom(1.0015 ** event.deltaY, micro(event.offsetX));
}, { passive: false });
canvas.addEventListener("mousedown", (event) => {
  grip = { x: event.clientX, from: view.from, to: view.to, moved: false };
});
window.addEventListener("mousemove", (event) => {
  if (!grip) return;
  const moved = ((grip.x - event.clientX) / (width - GUTTER)) * (grip.to - grip.from);
  if (Math.abs(grip.x - event.clientX) > 3) {
    grip.moved = true;
    canvas.classList.add("dragging");
    show(grip.from + moved, grip.to + moved);
  }
});
window.addEventListener("mouseup", () => {
  if (grip && !grip.moved) {
    pinned = hovered && hovered.span.group !== undefined && hovered.span.group !== pinned
      ? hovered.span.group : null;
    draw();
  }
  grip = null;
  canvas.classList.remove("dragging");
});
canvas.addEventListener("mousemove", (event) => {
  if (grip && grip.moved) return;
  const found = find(event.offsetX, event.offsetY);
  if ((found && found.span) !== (hovered && hovered.span)) {
    hovered = found;
    draw();
  }
  tip.hidden = !found;
  if (found) {
    tip.textContent = tipText(found);
    const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
    const above = event.clientY + 18 + tip.offsetHeight > window.innerHeight;
    tip.style.left = `${left}px`;
    tip.style.top = `${above ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18}px`;
  }
});
canvas.addEventListener("mouseleave", () => {
  hovered = null;
  tip.hidden = true;
  draw();
});
const overview = byId("overview");
function jump(event) {
  const at = ((event.offsetX - GUTTER) / (width - GUTTER)) * whole.to, half = (view.to - view.from) / 2;
  show(at - half, at + half);
}
overview.addEventListener("mousedown", jump);
overview.addEventListener("mousemove", (event) => { if (event.buttons) jump(event); });

byId("zoomIn").onclick = () => zoom(0.5, middle());
byId("zoomOut").onclick = () => zoom(2, middle());
byId("all").onclick = () => show(0, whole.to);
byId("previous").onclick = () => showStep(-1);
byId("next").onclick = () => showStep(1);
window.addEventListener("keydown", (event) => {
  const keys = { "+": "zoomIn", "=": "zoomIn", "-": "zoomOut", 0: "all", ArrowLeft: "previous", ArrowRight: "next" };
  if (keys[event.key]) byId(keys[event.key]).click();
  if (event.key === "Escape") { pinned = null; draw(); }
});

{
  const { summary } = data, toggle = (name) => {
    if (!hidden.delete(name)) hidden.add(name);
    draw();
    return hidden.has(name);
  };
  byId("title").textContent = data.title;
  byId("facts").textContent = `steps ${data.firstStep}–${data.lastStep}, begun ${data.begun}, ` +
    `${seconds(Math.round(summary.wall_seconds * 1e6))} in all, ${data.groups.length} groups, ` +
    `${summary.sample_count} samples`;
  const warnings = [];
  if (data.isShortened) warnings.push("Only the latest steps are shown; --steps FIRST-LAST shows others, --steps all every one.");
  if (data.leftOut) warnings.push(`${data.leftOut} spans of samples were left out when the run wrote its trace.`);
  byId("warning").textContent = warnings.join(" ");
  byId("warning").hidden = !warnings.length;
  shares(byId("stepBar"), byId("stepEntries"), summary.steps, toggle);
  shares(byId("sampleBar"), byId("sampleEntries"), summary.samples, toggle);
  const table = byId("engines");
  table.title = "busy: share of the time with a sample in prefill or decode";
  table.append(element("tr", {}, ...["", "busy", "samples while busy"].map((text) => element("th", {}, text))));
  for (const { name, busy, running } of summary.engines) {
    const cells = [name, `${(100 * busy).toFixed(0)} %`, running.toFixed(1)];
    table.append(element("tr", {}, ...cells.map((text) => element("td", {}, text))));
  }
}
// `#step-7` opens the page at step 7.
function openAtHash() {
  const step = data.steps.find(([, , name]) => `#${name.replace(" ", "-")}` === window.location.hash);
  if (step) show(step[0] - step[1] * 0.03, step[0] + step[1] * 1.03);
  else draw();
}
const dark = matchMedia("(prefers-color-scheme: dark)");
function theme(dressedDark) {
  document.documentElement.dataset.theme = dressedDark ? "dark" : "light";
  for (const each of document.querySelectorAll("[data-kind]")) {
    each.style.background = colour(each.dataset.kind);
  }
}
theme(dark.matches);
dark.addEventListener("change", (event) => { theme(event.matches); draw(); });
byId("theme").addEventListener("click", () => { theme(!isDark()); draw(); });
window.addEventListener("hashchange", openAtHash);
window.addEventListener("resize", draw);
openAtHash();
