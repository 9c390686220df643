const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
function element(name, attributes = {}, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...inside.filter((each) => each !== null && each !== undefined));
  return made;
}
// Characters that move the cursor or turn the direction of writing, made visible.
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]/u;
const CONTROLS = new RegExp(CONTROL.source, "gu");
const code = (c) => `U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
const plain = (text) => text.replace(CONTROLS, (c) => `⟨${code(c)}⟩`);

document.title = plain(data.title);
byId("title").textContent = plain(data.title);
if (data.warnings.length) { byId("warnings").textContent = data.warnings.map(plain).join("\n"); byId("warnings").hidden = false; }
for (const part of document.querySelectorAll("main section")) {
  byId("nav").append(element("a", { href: `#${part.id}` }, part.getAttribute("aria-label")));
}
const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = (isDark) => { document.documentElement.dataset.theme = isDark ? "dark" : "light"; };
theme(dark.matches);
dark.addEventListener("change", (event) => theme(event.matches));
byId("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme !== "dark"));

const colourOf = (index) => COLOURS[index % COLOURS.length];
const swatch = (index) => element("span", { class: "swatch", style: `background:${colourOf(index)}` });
function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}
const when = (seconds) => seconds ? new Date(seconds * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC" : "-";

// runs
{
  const columns = [
    ["run", (run, index) => element("td", {}, swatch(index), plain(run.name))],
    ["state", (run) => element("td", { class: run.state === "failed" || run.state === "gone" ? "bad" : run.state === "done" ? "good" : "" },
      plain(run.state + (run.detail ? `: ${run.detail}` : "")))],
    ["steps", (run) => run.total ? `${run.step} of ${run.total}` : `${run.step}`],
    ["reward, last ten", (run) => number(run.summary.reward)],
    ["time", (run) => duration(run.summary.seconds)],
    ["tokens", (run) => number(run.summary.tokens)],
    ["tokens/s", (run) => number(run.summary.rate)],
    ["starts", (run) => `${run.summary.starts}`],
    ["went back", (run) => `${run.summary.backs}`],
    ["skipped steps", (run) => `${run.summary.skipped}`],
    ["groups", (run) => plain(run.summary.groups)],
    ["scores", (run) => plain(Object.entries(run.scores).map(([name, list]) => `${name} ${number(list[list.length - 1][1])}`).join(", ") || "-")],
    ["trace", (run) => run.trace ? element("td", {}, element("a", { href: run.trace }, "open")) : "-"],
  ];
  const table = byId("runs");
  table.append(element("tr", {}, ...columns.map(([name]) => element("th", {}, name))));
  data.runs.forEach((run, index) => table.append(element("tr", {}, ...columns.map(([, tell]) => {
    const told = tell(run, index);
    return typeof told === "string" ? element("td", {}, told) : told;
  }))));
}

// curves
const own = (record, name) => Object.hasOwn(record, name) ? record[name] : undefined;  // not Object's
function drawCharts() {
  const width = +byId("width").value, axis = byId("axis").value, raw = byId("raw").checked;
  byId("widthText").textContent = width ? `${width} steps` : "none";
  const target = byId("charts");
  target.replaceChildren();
  for (const [heading, names] of data.panels) {
    const panels = element("div", { class: "panels" });
    for (const name of names) {
      const lines = [];
      data.runs.forEach((run, index) => {
        const ys = own(run.columns, name);
        if (!ys || !ys.some((value) => value !== null)) return;
        const xs = axis === "hours" ? run.hours : run.steps;
        lines.push({ label: plain(run.name), colour: colourOf(index), xs, ys, trend: smoothed(ys, width) });
      });
      if (name === "reward_mean") data.runs.forEach((run, index) => {
        for (const [set, list] of Object.entries(run.scores)) {
          const at = axis === "hours" ? 2 : 0, ys = list.map((each) => each[1]);
          lines.push({ label: plain(`${run.name}: ${set} (held out)`), colour: colourOf(index), dots: true,
            xs: list.map((each) => each[at]), ys, trend: ys });
        }
      });
      if (!lines.length) continue;
      const figure = element("figure", { "data-metric": name }, element("figcaption", {}, plain(name),
        element("span", {}, plain(own(data.labels, name) || ""))));
      panels.append(figure);
      chart(figure, name, lines, { raw, axis: axis === "hours" ? "hour" : "step" });
    }
    if (panels.children.length) target.append(element("h3", {}, heading), panels);
  }
}
for (const id of ["width", "axis", "raw"]) byId(id).addEventListener("input", drawCharts);
drawCharts();

// time
for (const run of data.runs) {
  const total = run.phases.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!total) continue;
  const bar = element("div", { class: "bar" }), entries = element("div", { class: "entries" });
  run.phases.forEach(([name, seconds], index) => {
    bar.append(element("div", { style: `width:${(100 * seconds) / total}%;background:${colourOf(index)}`, title: name }));
    entries.append(element("span", {}, swatch(index), `${name} ${duration(seconds)}, ${Math.round((100 * seconds) / total)} %`));
  });
  byId("phases").append(element("div", {}, plain(run.name)), bar, entries);
}
if (!byId("phases").children.length) byId("phases").textContent = "No steps yet.";

// settings
function drawSettings() {
  const table = byId("config"), all = byId("allSettings").checked || data.runs.length === 1;
  table.replaceChildren(element("tr", {}, element("th", {}, "setting"), ...data.runs.map((run, index) => element("th", {}, swatch(index), plain(run.name)))));
  let shown = 0;
  for (const [name, values] of data.settings) {
    const differs = values.some((value) => value !== values[0]);
    if (!all && !differs) continue;
    shown++;
    table.append(element("tr", { class: differs ? "differs" : "" }, element("td", {}, plain(name)),
      ...values.map((value) => element("td", {}, value === null ? "-" : plain(value)))));
  }
  if (!shown) table.append(element("tr", {}, element("td", {}, "The same in all runs, or not recorded.")));
}
byId("allSettings").addEventListener("change", drawSettings);
drawSettings();

// events
{
  const table = byId("journal");
  table.append(element("tr", {}, ...["when", "run", "step", "what", ""].map((name) => element("th", {}, name))));
  for (const [run, time, step, what, text, isBad] of data.events) {
    table.append(element("tr", {}, element("td", {}, when(time)), element("td", {}, swatch(run), plain(data.runs[run].name)),
      element("td", {}, step === null ? "-" : String(step)), element("td", { class: isBad ? "bad" : "" }, plain(what)), element("td", {}, plain(text))));
  }
  if (!data.events.length) table.append(element("tr", {}, element("td", {}, "Nothing is recorded.")));
}

// samples: [run, step, group, sample, prompt pieces, response pieces, reward, numbers, finish, notes, advantages, mismatch, logprobs, mask, images, texts]
const ROW = 24, list = byId("list"), rowsBox = byId("rows");
const samples = data.samples.map((row) => {
  const [run, step, group, id, prompt, response, reward, numbers, finish, notes, adv, mis, lp, mask, images] = row;
  return { run, step, group, id, prompt, response, reward, numbers, finish, notes, adv, mis, lp, mask, images };
});
const piece = (index) => data.pieces[index];
const joined = (pieces) => typeof pieces === "string" ? pieces : pieces.map(piece).join("");
for (const sample of samples) {
  sample.text = joined(sample.response);
  sample.apart = sample.mis ? Math.max(...sample.mis.map((value) => Math.abs(value || 0))) : -1;
}
let shown = samples, chosen = 0;
const ORDERS = {
  step: (a, b) => (b.step ?? -1) - (a.step ?? -1), high: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
  low: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity), long: (a, b) => b.response.length - a.response.length,
  apart: (a, b) => b.apart - a.apart,
};
function select() {
  const text = byId("find").value.toLowerCase();
  shown = samples.filter((sample) => !text || sample.text.toLowerCase().includes(text) || sample.id.toLowerCase().includes(text)
    || sample.finish.toLowerCase().includes(text) || joined(sample.prompt).toLowerCase().includes(text));
  const order = ORDERS[byId("order").value];
  shown = shown.map((sample, index) => [sample, index]).sort((a, b) => order(a[0], b[0]) || a[1] - b[1]).map(([sample]) => sample);
  byId("count").textContent = `${shown.length} of ${samples.length} samples`;
  rowsBox.style.height = `${shown.length * ROW}px`;
  chosen = 0;
  list.scrollTop = 0;
  drawRows();
  drawDetail();
}
function drawRows() {
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5), last = Math.min(shown.length, first + Math.ceil(list.clientHeight / ROW) + 10);
  rowsBox.replaceChildren();
  for (let index = first; index < last; index++) {
    const sample = shown[index];
    const row = element("div", { class: index === chosen ? "row on" : "row", role: "option", id: `sample-${index}`,
      "aria-selected": index === chosen, style: `top:${index * ROW}px` },
      data.runs.length > 1 ? swatch(sample.run) : null, element("i", {}, sample.step === null ? "new" : `step ${sample.step}`),
      element("b", {}, number(sample.reward)), element("bdi", {}, plain(sample.text.slice(0, 120)).replace(/\s+/g, " ")));
    row.addEventListener("click", () => { choose(index); list.focus(); });
    rowsBox.append(row);
  }
  if (shown.length) list.setAttribute("aria-activedescendant", `sample-${chosen}`);
}
function choose(index) {
  chosen = Math.max(0, Math.min(shown.length - 1, index));
  const top = chosen * ROW;
  if (top < list.scrollTop) list.scrollTop = top;
  if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  drawRows();
  drawDetail();
}
function put(parent, text) {
  let rest = text;
  for (let found = CONTROL.exec(rest); found; found = CONTROL.exec(rest)) {
    parent.append(rest.slice(0, found.index), element("span", { class: "control", title: "a control character" }, code(found[0])));
    rest = rest.slice(found.index + found[0].length);
  }
  parent.append(rest);
}
function drawText(pieces, values, colours, facts) {
  const box = element("p", { class: "text", dir: "auto" });
  if (typeof pieces === "string") { put(box, pieces); return box; }
  let largest = 0;
  if (values) for (const value of values) largest = Math.max(largest, Math.abs(value || 0));
  pieces.forEach((index, place) => {
    const text = piece(index);
    const value = values ? values[place] : null;
    if (!values && !facts) { put(box, text); return; }
    const span = element("span", facts ? { title: facts(place) } : {});
    if (value !== null && value !== undefined && largest) {
      const strength = (Math.abs(value) / largest) * 0.75;
      span.style.background = `rgba(var(${colours(value)}), ${strength.toFixed(3)})`;
    }
    if (facts && !maskOf(place)) span.className = "shown";
    put(span, text);
    box.append(span);
  });
  return box;
}
let maskOf = () => true;
function drawDetail() {
  const box = byId("detail"), sample = shown[chosen];
  box.replaceChildren();
  if (!sample) { box.append(element("p", { class: "hint" }, samples.length ? "No sample fits." : "There are no samples to show.")); return; }
  const by = byId("colour").value, values = by ? sample[by] : null;
  maskOf = (place) => !sample.mask || sample.mask[place];
  const numbers = Object.entries(sample.numbers).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  box.append(element("div", {}, plain(`${sample.id}, ${sample.step === null ? "not trained on" : `step ${sample.step}`}, reward ${number(sample.reward)}`
    + `${sample.finish ? `, ended by ${sample.finish}` : ""}${numbers ? `, ${numbers}` : ""}`)));
  const trace = data.runs[sample.run].trace;
  if (trace && sample.step !== null) box.append(element("a", { href: `${trace}#step-${sample.step}` }, "the step in the trace"));
  box.append(element("h3", {}, "prompt"), drawText(sample.prompt, null, null, null));
  for (const image of sample.images) box.append(image.startsWith("data:") ? element("img", { src: image, alt: "what the model was shown" }) : element("p", { class: "hint" }, image));
  const name = { adv: "advantage", mis: "mismatch", lp: "log-prob" }[by];
  box.append(element("h3", {}, by && !values ? `response (no ${name} was kept of it)` : by ? `response, coloured by ${name}` : "response"));
  const colours = by === "lp" ? () => "--other" : (value) => value < 0 ? "--minus" : "--plus";
  const facts = (place) => `token ${place}` + [["advantage", "adv"], ["mismatch", "mis"], ["log-prob", "lp"]]
    .filter(([, key]) => sample[key]).map(([label, key]) => `\n${label} ${number(sample[key][place])}`).join("") + (maskOf(place) ? "" : "\nnot trained on");
  box.append(drawText(sample.response, values, colours, facts));
  const notes = Object.entries(sample.notes);
  if (notes.length) {
    const table = element("table", {});
    for (const [key, text] of notes) table.append(element("tr", {}, element("th", {}, plain(key)), element("td", {}, plain(text))));
    box.append(element("h3", {}, "of the environment"), table);
  }
}
for (const id of ["find", "order"]) byId(id).addEventListener("input", select);
byId("colour").addEventListener("input", drawDetail);
list.addEventListener("scroll", drawRows);
document.addEventListener("keydown", (event) => {
  const typing = ["INPUT", "SELECT"].includes(event.target.tagName);
  if (event.key === "/" && !typing) { byId("find").focus(); event.preventDefault(); }
  else if (event.key === "Escape" && typing) { event.target.blur(); list.focus(); }
  else if (!typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    const move = { j: 1, k: -1, ...(document.activeElement === list ? { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20, Home: -1e9, End: 1e9 } : {}) }[event.key];
    if (move) { choose(chosen + move); event.preventDefault(); }
  }
});
select();
document.documentElement.dataset.ready = "true";
