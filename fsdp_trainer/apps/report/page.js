"use strict";
const find = id => document.getElementById(id), data = JSON.parse(find("data").textContent), runs = data.runs, root = document.documentElement;
const state = { x: "steps", smooth: 0.5, range: null, hidden: new Set(), quiet: new Set(["data", "evaluation", "tasks", ...(runs.length > 1 ? ["start", "end", "checkpoint"] : [])]), log: new Set(["grad_norm"]), run: 0 };
const BAD = ["skipped", "spike", "rewind", "hang", "straggler", "corruption", "not_deterministic", "checkpoint_failed", "checkpoint_waited", "damaged", "out_of_memory", "signal", "chosen_less_likely", "equal_rewards"];
const MINOR = ["checkpoint", "evaluation", "tasks", "compile", "data", "profile", "export"];
let charts = [], scatters = [], active = null;

const css = name => getComputedStyle(root).getPropertyValue(name).trim();
const colour = i => css("--c" + (i % 8)), dashes = i => [[], [8, 4], [2, 3], [9, 3, 2, 3]][Math.floor(i / 8) % 4];
const visible = () => runs.map((run, i) => [run, i]).filter(([, i]) => !state.hidden.has(i));
function make(tag, text, name) { const e = document.createElement(tag); if (text !== undefined) e.textContent = text; if (name) e.className = name; return e; }
function number(v) {
  if (v === null || v === undefined) return "–";
  const a = Math.abs(v);
  if (a >= 1e6) return v.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 });
  return a && a < 1e-3 ? v.toExponential(2).replace(/\.?0+e/, "e") : v.toLocaleString("en", { maximumSignificantDigits: Math.max(5, a >= 1e4 ? 6 : 0) });
}
function duration(s) {
  if (s < 120) return number(Math.round(s * 10) / 10) + " s";
  const m = Math.round(s / 60), h = Math.floor(m / 60);
  return h > 48 ? number(Math.round(h / 2.4) / 10) + " d" : h ? h + " h" + (m % 60 ? " " + m % 60 : "") : m + " m";
}
const tick = (v, log) => v === null || log && Number(v.toPrecision(1)) !== Number(v.toPrecision(6)) ? null : number(v);
// A number of one digit near v: a logarithmic axis has its numbers there alone, and needs two.
function digit(v, round) {
  const unit = 10 ** Math.floor(Math.log10(v));
  return Number((round(v / unit) * unit).toPrecision(1));
}
const place = v => state.x === "time" ? duration(v) : number(v), whole = v => state.x === "time" ? duration(v) : Math.round(v).toLocaleString("en");
// The times of uPlot's own axis are dates; these are round numbers of seconds, minutes or hours.
const SECONDS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000, 1728000];
const WHOLE = [...Array(15).keys()].flatMap(power => [1, 2, 5].map(digit => digit * 10 ** power));

// Of one run each line has a colour of its own, of several runs that of its run: then dashes tell the lines of a run apart.
const look = (chart, line, k) => chart.many ? { colour: colour(k), dash: dashes(k) }
  : { colour: colour(runs.length > 1 ? line.run : line.style), dash: line.is_validation ? [6, 3] : runs.length > 1 && line.style ? [[], [2, 3], [9, 3, 2, 3], [12, 4]][line.style % 4] : dashes(runs.length > 1 ? line.run : 0) };
function lines(chart) {
  const found = [], alone = new Set(chart.lines.map(line => line.label)).size === 1, log = state.log.has(chart.name);
  for (const line of chart.lines.filter(line => !state.hidden.has(line.run))) {
    const run = runs[line.run], values = run.lines[line.column], x = run.x[state.x], label = line.label || (alone ? "" : "training");
    const at = values.map((v, j) => j).filter(j => values[j] !== null && !(log && values[j] <= 0) && x[j] !== null), of_at = values => at.map(j => values[j]), ys = of_at(values);
    const shown = { run: line.run, label: runs.length > 1 ? run.name + (label ? " · " + label : "") : label || chart.title, part: label, style: line.style, points: line.is_validation, xs: of_at(x), ys, ...look(chart, line, found.filter(s => !s.faint).length) };
    const smooth = state.smooth > 0 && chart.smoothed && !line.is_validation && ys.length > 4;
    if (ys.length) found.push({ ...shown, faint: smooth });
    if (smooth) found.push({ ...shown, label: shown.label + ", smoothed", ys: smoothed(of_at(run.lines["mean of " + line.column] || values), of_at(run.x.steps)) });
  }
  return found;
}
// What the table of runs does not say: which line is which, of a chart with several lines of a run.
function legend(chart, shown) {
  const box = make("div", undefined, "legend"), clear = shown.filter(s => !s.faint), trained = clear.filter(s => !s.points), listed = [];
  if (chart.many) listed.push(...clear.map(s => [s.label.replace(/, smoothed$/, ""), s.colour]));
  else for (const style of new Set(clear.map(s => s.style))) {
    const names = [...new Set(trained.filter(s => s.style === style).map(s => s.part))].join(" · ");
    if (names) listed.push([names, ...runs.length > 1 ? [css("--faint"), style ? "dotted" : "solid"] : [colour(style)]]);
  }
  if (trained.length < clear.length) listed.push(["validation", css("--faint"), "dashed"]);
  for (const [text, shade, dash] of listed) {
    const entry = make("span", text), mark = make("i", undefined, dash ? "stroke" : "");
    if (dash) mark.style.borderTop = "2px " + dash + " " + shade; else mark.style.background = shade;
    entry.prepend(mark); box.append(entry);
  }
  return chart.many || listed.length > 1 ? box : null;
}
// An exponential mean without the bias of its start. The slider says how much of a line's length it reaches over.
function smoothed(ys, steps) {
  const reach = (steps[steps.length - 1] - steps[0]) * 0.1 * state.smooth ** 3 + 1e-9;
  let sum = 0, weight = 0, before = steps[0];
  return ys.map((y, j) => {
    const keep = Math.exp(-(steps[j] - before) / reach);
    before = steps[j];
    if (y !== null) { sum = sum * keep + y; weight = weight * keep + 1; }
    return sum / weight;
  });
}
function extent() {
  const ends = visible().flatMap(([run]) => [run.x[state.x][0], run.x[state.x][run.x[state.x].length - 1]]).filter(v => v !== null && v !== undefined);
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  return !ends.length ? [0, 1] : low < high ? [low, high] : [low - 1, high + 1];
}
function zoom(range) {
  const [low, high] = extent();
  state.range = range && (range[0] > low || range[1] < high) ? [Math.max(low, range[0]), Math.min(high, range[1])] : null;
  const [min, max] = state.range || [low, high];
  charts.forEach(u => u.setScale("x", { min, max }));
  find("reset").hidden = !state.range;
}
function nearest(u, series, at) {
  const ys = u.data[series], xs = u.data[0];
  if (!series || ys[at] !== null && ys[at] !== undefined) return at;
  let left = at, right = at;
  while (left >= 0 && (ys[left] === null || ys[left] === undefined)) left--;
  while (right < xs.length && (ys[right] === null || ys[right] === undefined)) right++;
  const best = left < 0 ? right : right >= xs.length || xs[at] - xs[left] <= xs[right] - xs[at] ? left : right;
  return best >= 0 && best < xs.length && Math.abs(xs[best] - xs[at]) <= (u.scales.x.max - u.scales.x.min) * 0.05 ? best : null;
}
const events = () => visible().flatMap(([run]) => run.events.filter(e => !state.quiet.has(e.kind)).map(e => ({ ...e, of: run.name })));
function markers(u) {
  const c = u.ctx, top = u.bbox.top, bottom = top + u.bbox.height;
  c.save();
  c.rect(u.bbox.left, top, u.bbox.width, u.bbox.height);
  c.clip();
  for (const e of events()) {
    const x = Math.round(u.valToPos(e[state.x], "x", true)), minor = MINOR.includes(e.kind);
    c.strokeStyle = c.fillStyle = css(BAD.includes(e.kind) ? "--bad" : minor ? "--faint" : "--ink");
    c.globalAlpha = minor ? 0.8 : 0.55;
    c.setLineDash(minor ? [] : [4, 4]);
    c.beginPath(); c.moveTo(x, minor ? bottom - 8 * devicePixelRatio : top); c.lineTo(x, bottom); c.stroke();
    if (!minor) { const s = 4 * devicePixelRatio; c.beginPath(); c.moveTo(x - s, top); c.lineTo(x + s, top); c.lineTo(x, top + 1.5 * s); c.fill(); }
  }
  c.restore();
}
function tell(u) {
  const box = find("tip"), at = u.cursor.idx;
  if (u !== active) return;
  box.hidden = at === null || at === undefined || u.cursor.left < 0;
  if (box.hidden) return;
  box.replaceChildren(make("b", u.setting ? u.setting + " " + number(u.data[0][at]) : (state.x === "time" ? "" : { steps: "step ", tokens: "tokens " }[state.x]) + whole(u.posToVal(u.cursor.left, "x"))));
  const rows = u.shown.map((line, k) => ({ line, value: line.own ? line.own[u.cursor.idxs[k + 1]] : u.data[k + 1][u.cursor.idxs[k + 1]] }));
  for (const { line, value } of rows.filter(row => row.value !== null && row.value !== undefined).slice(0, 24)) {
    const row = make("div", line.label + "  " + number(value) + (line.unit || "")), mark = make("i");
    mark.style.background = line.colour;
    if (!line.faint) row.prepend(mark); else row.className = "faint";
    box.append(row);
  }
  for (const e of u.setting ? [] : events().filter(e => Math.abs(u.valToPos(e[state.x], "x") - u.cursor.left) < 6).slice(0, 6))
    box.append(make("div", (runs.length > 1 ? e.of + ": " : "") + e.kind + " at step " + number(e.steps) + (e.text ? ": " + e.text.slice(0, 160) : ""), BAD.includes(e.kind) ? "bad" : "event"));
  const r = u.over.getBoundingClientRect(), left = r.left + u.cursor.left, wide = box.offsetWidth;
  box.style.left = Math.max(4, left + 16 + wide < innerWidth ? left + 12 : left - wide - 12) + "px";
  box.style.top = Math.max(4, Math.min(r.top + 8, innerHeight - box.offsetHeight - 4)) + "px";
}
function by_hand(u) {
  const over = u.over, fingers = new Map();
  over.tabIndex = 0;
  over.setAttribute("role", "application");
  over.setAttribute("aria-label", u.title + ": arrow keys move, + and - zoom, Escape shows all");
  over.addEventListener("mouseenter", () => active = u);
  over.addEventListener("mouseleave", () => { find("tip").hidden = true; });
  over.addEventListener("blur", () => { find("tip").hidden = true; });
  over.addEventListener("dblclick", () => zoom(null));
  over.addEventListener("keydown", e => {
    const { min, max } = u.scales.x, wide = over.clientWidth, at = u.cursor.left >= 0 ? u.cursor.left : wide / 2, middle = u.posToVal(at, "x");
    const scaled = by => zoom([middle - (middle - min) * by, middle + (max - middle) * by]), move = by => { active = u; u.setCursor({ left: Math.max(0, Math.min(wide - 1, at + by)), top: 20 }); };
    const act = { ArrowLeft: () => move(-wide / 100), ArrowRight: () => move(wide / 100), "+": () => scaled(0.6), "-": () => scaled(1 / 0.6), Escape: () => zoom(null) }[e.key];
    if (act) { act(); e.preventDefault(); }
  });
  over.addEventListener("pointerdown", e => { if (e.pointerType === "touch") { active = u; fingers.set(e.pointerId, e.clientX); } });
  over.addEventListener("pointermove", e => {
    if (!fingers.has(e.pointerId)) return;
    const left = over.getBoundingClientRect().left, [other] = [...fingers].filter(([id]) => id !== e.pointerId).map(([, x]) => x - left);
    const before = fingers.get(e.pointerId) - left, now = e.clientX - left;
    fingers.set(e.pointerId, e.clientX);
    if (other === undefined) { u.setCursor({ left: now, top: 20 }); return; }
    if (Math.abs(now - other) < 20) return;
    const by = (before - other) / (now - other), { min, max } = u.scales.x, fixed = u.posToVal(other, "x");
    zoom([fixed - (fixed - min) * by, fixed + (max - fixed) * by]);
  });
  for (const name of ["pointerup", "pointercancel", "pointerleave"]) over.addEventListener(name, e => fingers.delete(e.pointerId));
}
function draw(parent, chart, shown, more = {}) {
  const { title, name } = chart, figure = make("figure"), head = make("figcaption", title);
  if (chart.lines) head.title = [...new Set(chart.lines.map(line => line.column))].join(", ");
  if (chart.log) {
    const label = make("label", " log"), box = make("input");
    box.type = "checkbox"; box.checked = state.log.has(name);
    box.onchange = () => { state.log[box.checked ? "add" : "delete"](name); redraw(); };
    label.prepend(box); head.append(label);
  }
  figure.append(head);
  const list = legend(chart, shown);
  if (list) figure.append(list);
  parent.append(figure);
  const [min, max] = state.range || extent(), grid = { stroke: css("--line"), width: 1 }, axis = { stroke: css("--faint"), grid, ticks: grid, font: "12px system-ui, sans-serif" };
  const u = new uPlot({
    width: figure.clientWidth, height: innerWidth < 600 ? 200 : 240, legend: { show: false }, padding: [8, 24, 0, 0],
    cursor: { sync: { key: "x", scales: ["x", null], filters: { pub: type => !["mousedown", "mouseup", "dblclick"].includes(type) } }, drag: { x: true, y: false, setScale: false, dist: 6 }, dataIdx: nearest, y: false, bind: { dblclick: () => null }, points: { size: 7 } },
    scales: { x: { time: false, auto: false, min, max }, y: { distr: state.log.has(name) ? 3 : 1, ...(state.log.has(name) ? { range: (_, low, high) => low === null ? [null, null] : [digit(low * 0.97, Math.floor), digit(high * 1.03, Math.ceil)] } : { range: (_, low, high) => low === null ? [null, null] : chart.share && high > 0.5 ? [Math.min(-0.02, low), Math.max(1.02, high)] : low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true) }), ...more.scale } },
    axes: [{ ...axis, size: 32, values: (_, ticks) => ticks.map(place), ...(state.x === "time" ? { incrs: SECONDS, space: 70 } : { incrs: WHOLE }) }, { ...axis, size: 62, values: (_, ticks) => ticks.map(v => tick(v, state.log.has(name))) }],
    series: [{}, ...shown.map(s => ({ stroke: s.colour, width: s.faint ? 1 : 1.75, alpha: s.faint ? 0.35 : 1, dash: s.dash, spanGaps: true, points: { show: s.ys.length < 40 || s.points || name.startsWith("validation") || name === "tasks/", size: 5, fill: s.colour }, ...s.more }))],
    hooks: { draw: [markers], setCursor: [tell], setSelect: [u => { const { left, width } = u.select; if (width) { zoom([u.posToVal(left, "x"), u.posToVal(left + width, "x")]); u.setSelect({ width: 0 }, false); } }] },
  }, uPlot.join(shown.map(s => [s.xs, s.ys])), figure);
  u.title = title; u.shown = shown; u.name = name;
  by_hand(u);
  charts.push(u);
}
// Of a sweep: the objective over each setting that takes numbers.
function settings() {
  const table = find("runs"), heads = table ? [...table.tHead.rows[0].cells].map(th => th.textContent) : [], end = heads.indexOf("objective");
  const rows = table ? [...table.tBodies[0].rows].filter(row => row.cells[end].dataset.v && row.querySelector("[data-run]")) : [];
  for (let k = 1; k < end; k++) {
    const points = rows.map(row => [Number(row.cells[k].textContent || NaN), Number(row.cells[end].dataset.v), Number(row.querySelector("[data-run]").dataset.run)]);
    const xs = points.map(point => point[0]), low = Math.min(...xs), high = Math.max(...xs), log = low > 0 && high / low >= 10;
    if (!points.length || xs.some(isNaN) || low === high) continue;
    const figure = make("figure"), grid = { stroke: css("--line"), width: 1 }, axis = { stroke: css("--faint"), grid, ticks: grid, font: "12px system-ui, sans-serif" };
    figure.append(make("figcaption", "Objective over " + heads[k]));
    find("settings").append(figure);
    const u = new uPlot({
      width: figure.clientWidth, height: 200, legend: { show: false }, padding: [8, 18, 0, 0], cursor: { drag: { x: false }, y: false, points: { size: 9 }, dataIdx: (_, series, at) => at },
      scales: { x: { time: false, distr: log ? 3 : 1, range: () => log ? [low / 1.2, high * 1.2] : [low - (high - low) * 0.05, high + (high - low) * 0.05] } },
      axes: [{ ...axis, size: 32, values: (_, ticks) => ticks.map(v => tick(v, log)) }, { ...axis, size: 62, values: (_, ticks) => ticks.map(number) }],
      series: [{}, ...points.map(([, , i]) => ({ stroke: colour(i), points: { show: true, size: 9, fill: colour(i) } }))], hooks: { setCursor: [tell] },
    }, uPlot.join(points.map(([x, y]) => [[x], [y]])), figure);
    u.shown = points.map(([, , i]) => ({ label: runs[i].name, colour: colour(i) })); u.setting = heads[k];
    u.over.addEventListener("mouseenter", () => active = u);
    u.over.addEventListener("mouseleave", () => { find("tip").hidden = true; });
    scatters.push(u);
  }
}
function redraw() {
  [...charts, ...scatters].forEach(u => u.destroy());
  charts = []; scatters = [];
  const places = [find("charts"), find("phases"), find("settings")];
  places.forEach(p => p.replaceChildren());
  for (const section of data.sections) {
    const drawn = section.charts.map(chart => [chart, lines(chart)]).filter(([, shown]) => shown.length), box = make("div", undefined, "figures");
    if (!drawn.length) continue;
    places[0].append(...section.title === "Course" ? [] : [make("h2", section.title)], box);
    for (const [chart, shown] of drawn) draw(box, chart, shown);
  }
  settings();
  const run = runs[state.run], spent = run && run.phases;
  if (spent && spent.x) {
    const used = data.groups.filter(g => spent.bars[g].some(v => v)), own = used.map(g => [0, ...spent.count.keys()].map(j => spent.bars[g][j] / spent.count[j]));
    const xs = [state.x === "steps" ? spent.x.steps[0] - spent.count[0] : 0, ...spent.x[state.x]];
    const stack = own.map((_, k) => own[0].map((_, j) => own.slice(0, k + 1).reduce((sum, ys) => sum + ys[j], 0)));
    const paths = uPlot.paths.stepped({ align: -1 });
    draw(places[1], { title: "Seconds of a step by phase" + (runs.length > 1 ? ": " + run.name : ""), name: "phases", many: false }, used.map((g, k) => ({ label: g, unit: " s", xs, ys: stack[k], own: own[k], colour: css("--c" + data.groups.indexOf(g)), more: { paths, fill: css("--c" + data.groups.indexOf(g)), width: 0, points: { show: false } } })).reverse(), { scale: { range: (_, low, high) => [0, high * 1.05] } });
  }
  find("reset").hidden = !state.range;
}
function controls() {
  for (const input of document.querySelectorAll("[name=x]")) input.onchange = () => { state.x = input.value; state.range = null; redraw(); };
  find("smooth").oninput = e => { state.smooth = Number(e.target.value); redraw(); };
  find("reset").onclick = () => zoom(null);
  for (const box of document.querySelectorAll("[data-run]")) {
    box.onchange = () => { state.hidden[box.checked ? "delete" : "add"](Number(box.dataset.run)); state.range = null; redraw(); };
    box.nextElementSibling.style.borderTop = `3px ${["solid", "dashed", "dotted", "double"][Math.floor(box.dataset.run / 8) % 4]} var(--c${box.dataset.run % 8})`;
  }
  const kinds = [...new Set(runs.flatMap(run => run.events.map(e => e.kind)))];
  for (const kind of kinds) {
    const label = make("label", " " + kind), box = make("input");
    box.type = "checkbox"; box.checked = !state.quiet.has(kind); box.dataset.kind = kind;
    box.onchange = () => { state.quiet[box.checked ? "delete" : "add"](kind); charts.forEach(u => u.redraw(false)); };
    label.prepend(box);
    find("kinds").append(label);
  }
  if (find("which")) find("which").onchange = e => { state.run = Number(e.target.value); redraw(); };
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  find("theme").onclick = () => { root.dataset.theme = dark() ? "light" : "dark"; redraw(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let before = null;
  addEventListener("beforeprint", () => { before = root.dataset.theme; root.dataset.theme = "light"; redraw(); });
  addEventListener("afterprint", () => { if (before) root.dataset.theme = before; else delete root.dataset.theme; redraw(); });
  let wide = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== wide) { wide = innerWidth; redraw(); } });
  addEventListener("scroll", () => { find("tip").hidden = true; }, { passive: true });
}
function tables() {
  for (const button of document.querySelectorAll("th button"))
    button.onclick = () => {
      const head = button.parentNode, body = head.closest("table").tBodies[0], up = head.getAttribute("aria-sort") !== "ascending";
      const value = row => { const cell = row.cells[head.cellIndex], v = cell.dataset.v ?? cell.textContent.trim(); return v === "" || v === "None" ? null : isNaN(v) ? v : Number(v); };
      const order = (a, b) => a === null ? 1 : b === null ? -1 : (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1) * (up ? 1 : -1);
      head.parentNode.querySelectorAll("th").forEach(th => th.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      body.append(...[...body.rows].sort((a, b) => order(value(a), value(b))));
    };
  for (const input of document.querySelectorAll("input[type=search]"))
    input.oninput = () => { for (const row of find(input.dataset.of).tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(input.value.toLowerCase()); };
}
controls();
tables();
redraw();
