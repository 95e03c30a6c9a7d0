"use strict";
// Draws the charts of the page from the JSON in it, with Observable Plot. Text always goes in as text, never as HTML.

const root = document.documentElement;
const charts = new Map();
const hidden = new Map(); // chart -> series that are switched off
const COLOURS = 10;

const colour = (i) => `var(--c${i % COLOURS})`;
const dashes = (i) => (i < COLOURS ? null : i < 2 * COLOURS ? "6,3" : "2,3");
const actual = (name) => getComputedStyle(root).getPropertyValue(name).trim();

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// ---- data

function load() {
  charts.clear();
  for (const chart of JSON.parse(document.getElementById("charts").textContent)) {
    const scale = (key, v) => (v !== null && (chart.percent || []).includes(key) ? 100 * v : v);
    chart.data = chart.rows.map((row) => Object.fromEntries(chart.columns.map((key, i) => [key, scale(key, row[i])])));
    charts.set(chart.id, chart);
  }
}

function csv({ columns, rows }) {
  const quoted = (v) => (v === null ? "" : /[",\r\n]/.test(String(v)) ? `"${String(v).replaceAll('"', '""')}"` : String(v));
  return [columns, ...rows].map((row) => row.map(quoted).join(",") + "\n").join("");
}

function save(chart) {
  const url = URL.createObjectURL(new Blob([csv(chart)], { type: "text/csv" }));
  make("a", { href: url, download: `${chart.id}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

const MOST_ROWS = 500;
function dataTable({ id, columns, rows }) {
  const line = (row, tag) => make("tr", {}, ...row.map((v) => make(tag, tag === "th" ? { scope: "col" } : {}, v === null ? "" : String(v))));
  const body = make("tbody", {}, ...rows.slice(0, MOST_ROWS).map((row) => line(row, "td")));
  const table = make("table", {}, make("thead", {}, line(columns, "th")), body);
  const label = rows.length > MOST_ROWS ? `First ${MOST_ROWS} of ${rows.length} rows; the CSV has all` : `${rows.length} rows`;
  return make("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": `Data of ${id}` }, make("p", { class: "rows" }, label), table);
}

// ---- numbers

const short = (v) => (v === null || v === undefined ? "" : v === "inf" ? "infinite," : d3.format(Math.abs(v) >= 1e6 || (v !== 0 && Math.abs(v) < 1e-3) ? ".3~g" : ".4~r")(v));
function size(v) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(v) < 999.5 || unit === "GB") return `${d3.format(".3~r")(v)} ${unit}`;
    v /= 1000;
  }
}
// As many digits as the steps of an axis need.
function axisFormat(low, high, count) {
  const [most, step] = [Math.max(Math.abs(low), Math.abs(high)), d3.tickStep(low, high, count)];
  if (most >= 1e5 || (most > 0 && most < 1e-3)) return d3.format(`.${Math.min(4, d3.precisionRound(step, most))}~e`);
  return d3.format(`,.${d3.precisionFixed(step)}f`);
}
// What hardly changes is drawn flat, not magnified.
function extent(data, keys) {
  const [low, high] = d3.extent(keys.flatMap((k) => data.map((d) => d[k])).filter((v) => typeof v === "number"));
  if (low === undefined) return [0, 1];
  const size = Math.max(Math.abs(low), Math.abs(high));
  return high - low >= 1e-3 * size && size > 0 ? [low, high] : [low - (0.05 * size || 1), high + (0.05 * size || 1)];
}
// A linear axis: domain, ticks and their text, and the grid that belongs to them.
function axis(data, keys, count, options = {}) {
  let [low, high] = extent(data, keys);
  if (options.zero) low = Math.min(0, low);
  [low, high] = d3.nice(low, high, count);
  const format = options.format || axisFormat(low, high, count);
  const ticks = d3.ticks(low, high, count);
  return { scale: { domain: [low, high], ticks, tickFormat: format, labelArrow: "none" }, ticks, wide: 7 * Math.max(...ticks.map((v) => format(v).length)) };
}
// A logarithmic one, as of ratios: as many ticks as there is room for.
function logAxis(data, keys, count) {
  const [low, high] = d3.extent(keys.flatMap((k) => data.map((d) => d[k])).filter((v) => typeof v === "number" && v > 0));
  const domain = low === undefined ? [0.5, 2] : [Math.min(low / 1.05, 0.9), Math.max(high * 1.05, 1.1)];
  const powers = d3.range(Math.floor(Math.log10(domain[0])), Math.ceil(Math.log10(domain[1])) + 1);
  const inside = (steps) => powers.flatMap((k) => steps.map((v) => v * 10 ** k)).filter((v) => v >= domain[0] && v <= domain[1]);
  const fits = (marks) => marks.slice(1).every((v, i) => Math.log(v / marks[i]) * count > 0.6 * Math.log(domain[1] / domain[0]));
  const choices = [[1, 2, 5], [1, 3], [1]].map(inside).filter((marks) => marks.length > 1 && fits(marks));
  const ticks = choices[0] || [domain[0], 1, domain[1]].filter((v, i) => i !== 1 || (domain[0] < 0.8 && domain[1] > 1.25));
  return { scale: { type: "log", domain, ticks, tickFormat: tick, labelArrow: "none" }, ticks, wide: 7 * Math.max(...ticks.map((v) => tick(v).length)) };
}
const tick = (v) => (Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3) ? d3.format(".2~g")(v) : d3.format(",.4~r")(v));
const cut = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
const present = (data, key) => data.filter((d) => d[key] !== null && d[key] !== undefined);
const widest = (texts, most) => 7 * Math.min(most, Math.max(1, ...texts.map((t) => String(t).length)));

// ---- kinds of charts

function frame(width, options) {
  const style = { background: "transparent", color: "var(--ink)", fontFamily: "inherit", fontSize: "12px", overflow: "visible" };
  return { width, marginTop: 22, marginRight: 14, ...options, style };
}
const tip = (extra = {}) => ({ fill: "var(--card)", stroke: "var(--line)", textPadding: 8, ...extra });

function lines(chart, width) {
  const off = hidden.get(chart.id) || new Set();
  const names = chart.series ? [...new Set(chart.data.map((d) => d[chart.series]))] : [null];
  const data = present(chart.data, chart.y).filter((d) => !chart.series || !off.has(d[chart.series]));
  const height = chart.small ? 190 : Math.min(340, Math.max(240, width * 0.42));
  const upwards = axis(data, [chart.y, chart.low, chart.high].filter(Boolean), chart.small ? 4 : 6, { zero: chart.zero });
  const marks = chart.log ? [] : [Plot.gridY(upwards.ticks, { stroke: "var(--grid)", strokeOpacity: 1 })];
  const xOf = (v) => (chart.bytes ? size(v) : short(v));
  names.forEach((name, i) => {
    const own = chart.series ? data.filter((d) => d[chart.series] === name) : data;
    const at = { x: chart.x, y: chart.y };
    if (chart.low) marks.push(Plot.areaY(own, { x: chart.x, y1: chart.low, y2: chart.high, fill: colour(i), fillOpacity: 0.13 }));
    marks.push(Plot.lineY(own, { ...at, stroke: colour(i), strokeWidth: chart.first === name ? 3.2 : 1.8, strokeDasharray: dashes(i) || undefined }));
    if (own.length <= (chart.small ? 30 : 60)) marks.push(Plot.dot(own, { ...at, r: own.length === 1 ? 4 : 2.2, fill: colour(i) }));
  });
  if (chart.mark) {
    const first = d3.extent(data, (d) => d[chart.x]);
    const right = chart.mark.x > (first[0] + first[1]) / 2;
    marks.push(Plot.ruleX([chart.mark.x], { stroke: "var(--soft)", strokeDasharray: "3,3" }));
    marks.push(Plot.text([chart.mark], { x: "x", text: (d) => `${d.text}, round ${d.x}`, frameAnchor: "top", dy: -14, textAnchor: right ? "end" : "start", fill: "var(--soft)" }));
  }
  const title = (d) => [chart.series && d[chart.series], `${chart.x} ${xOf(d[chart.x])}`, `${chart.y} ${short(d[chart.y])}`].filter(Boolean).join("\n");
  marks.push(Plot.tip(data, Plot.pointer({ x: chart.x, y: chart.y, title, ...tip() })));
  const left = chart.log ? 48 : Math.max(30, upwards.wide + 14);
  const rounds = new Set(data.map((d) => d[chart.x])).size;
  const x = { label: chart.xlabel || chart.x, labelArrow: "none", ticks: Math.min(Math.max(2, Math.floor(width / 90)), Math.max(2, rounds - 1)) };
  if (chart.bytes) x.tickFormat = size;
  else if (chart.dates) x.tickFormat = (v) => d3.utcFormat("%b %Y")(new Date(864e5 * v));
  else if (data.every((d) => Number.isInteger(d[chart.x]))) x.tickFormat = (v) => (Number.isInteger(v) ? d3.format(",")(v) : "");
  else x.tickFormat = axisFormat(...extent(data, [chart.x]), x.ticks);
  const y = { ...upwards.scale, label: chart.ylabel || null };
  if (chart.log) {
    const [low, high] = d3.extent(present(data, chart.y), (d) => d[chart.y]);
    const ticks = ticksOfLog(low, high, 450).filter((v, i, all) => all.length < 4 || Math.abs(Math.log10(v) % 1) < 1e-9);
    marks.unshift(Plot.gridY(ticks, { stroke: "var(--grid)", strokeOpacity: 1 }));
    Object.assign(y, { type: "log", domain: [low, high], ticks, tickFormat: d3.format(".1~g") });
  }
  return frame(width, { height, marginLeft: left, marginBottom: 44, marginTop: chart.mark ? 36 : 24, x, y, marks });
}

function dots(chart, width) {
  const groups = chart.series ? [...new Set(chart.data.map((d) => d[chart.series]))] : [null];
  const data = present(chart.data, chart.x);
  const inner = width - 56;
  const across = axis(data, [chart.x], Math.max(3, Math.floor(width / 90)));
  const [low, high] = across.scale.domain;
  const tallest = chart.series ? 96 : 260;
  const stack = (r) => Math.max(1, ...d3.rollup(data, (v) => v.length, (d) => `${d[chart.series]} ${Math.floor(((d[chart.x] - low) / (high - low)) * inner / (2 * r + 1))}`).values()) * (2 * r + 1.2);
  const r = [4, 3, 2.2, 1.6].find((size) => stack(size) <= tallest);
  const row = r ? Math.max(chart.series ? 56 : 130, stack(r) + (chart.series ? 26 : 16)) : 64;
  const sign = (d) => (d[chart.x] === 0 ? "var(--soft)" : d[chart.x] < 0 ? "var(--bad)" : "var(--good)");
  const title = (d) => [chart.name && d[chart.name], chart.series && d[chart.series], `${chart.xlabel || chart.x} ${short(d[chart.x])}`].filter(Boolean).join("\n");
  const fy = chart.series ? { fy: chart.series } : {};
  const means = groups.map((g) => ({ [chart.series || "all"]: g, mean: d3.mean(data.filter((d) => g === null || d[chart.series] === g), (d) => d[chart.x]) }));
  const marks = [
    Plot.gridX(across.ticks, { stroke: "var(--grid)", strokeOpacity: 1 }),
    chart.diverging ? Plot.ruleX([0], { stroke: "var(--soft)" }) : null,
    r
      ? Plot.dot(data, Plot.dodgeY({ anchor: "middle", padding: 1, x: chart.x, ...fy, r, fill: chart.diverging ? sign : "var(--c0)", fillOpacity: 0.8 }))
      : Plot.boxX(data, { x: chart.x, ...fy, fill: "var(--c0)", fillOpacity: 0.35, stroke: "var(--c0)", r: 1.5, insetTop: 18, insetBottom: 18 }),
    Plot.tickX(means, { x: "mean", ...fy, stroke: "var(--ink)", strokeWidth: 1.8, insetTop: row * 0.25, insetBottom: row * 0.25 }),
    Plot.tip(data, Plot.pointerX({ x: chart.x, ...fy, title, ...tip() })),
    chart.series ? Plot.text(groups, { fy: (d) => d, text: (d) => cut(d, Math.floor(width / 7.5)), frameAnchor: "top-left", dy: 2, dx: -16, fontWeight: 600, fontSize: 12.5 }) : null,
  ];
  const x = { ...across.scale, label: chart.xlabel || chart.x, inset: 8 };
  const options = { height: row * groups.length + 60, marginLeft: 20, marginRight: 20, marginBottom: 44, marginTop: 10, x, marks };
  if (chart.series) Object.assign(options, { fy: { axis: null, domain: groups, padding: 0.08 } });
  return frame(width, options);
}

function bars(chart, width) {
  const data = present(chart.data, chart.x);
  const named = data.length <= 40;
  const sign = (d) => (!chart.diverging ? "var(--c0)" : d[chart.x] < 0 ? "var(--bad)" : "var(--good)");
  const title = (d) => `${d[chart.name]}\n${chart.xlabel || chart.x} ${short(d[chart.x])}`;
  const order = data.map((d) => d[chart.name]);
  const most = Math.floor((width * 0.4) / 7);
  const zero = [...data, { [chart.x]: 0 }];
  if (!named) {
    const upwards = axis(zero, [chart.x], 6);
    const ranked = data.map((d, i) => ({ ...d, rank: i + 1 }));
    return frame(width, {
      height: 260, marginLeft: upwards.wide + 16, marginBottom: 44, marginTop: 26,
      x: { label: chart.rank || "clients, by gain", labelArrow: "none", ticks: Math.max(2, Math.floor(width / 110)), tickFormat: ",d" },
      y: { ...upwards.scale, label: chart.xlabel || chart.x },
      marks: [
        Plot.gridY(upwards.ticks, { stroke: "var(--grid)", strokeOpacity: 1 }), Plot.ruleY([0], { stroke: "var(--soft)" }),
        Plot.rectY(ranked, { x1: (d) => d.rank - 0.5, x2: (d) => d.rank + 0.5, y: chart.x, fill: sign, inset: data.length > 150 ? 0 : 0.5 }),
        Plot.tip(ranked, Plot.pointerX({ x: "rank", y: chart.x, title, ...tip() })),
      ],
    });
  }
  const left = widest(order, most) + 16;
  const across = axis(zero, [chart.x, chart.low, chart.high].filter(Boolean), Math.max(2, Math.floor((width - left) / 75)));
  return frame(width, {
    height: order.length * 24 + 60, marginLeft: left, marginBottom: 44, marginTop: 8,
    x: { ...across.scale, label: chart.xlabel || chart.x },
    y: { domain: order, label: null, padding: 0.28, tickSize: 0, tickFormat: (t) => cut(t, most) },
    marks: [
      Plot.gridX(across.ticks, { stroke: "var(--grid)", strokeOpacity: 1 }), Plot.ruleX([0], { stroke: "var(--soft)" }),
      Plot.barX(data, { x: chart.x, y: chart.name, fill: sign, rx: 2 }),
      chart.low ? Plot.ruleY(data, { x1: chart.low, x2: chart.high, y: chart.name, stroke: "var(--ink)", strokeWidth: 1.5 }) : null,
      Plot.tip(data, Plot.pointerY({ x: chart.x, y: chart.name, title, ...tip() })),
    ],
  });
}

// Estimates with their intervals, a line each. Several series: each beside the other if they are few, else the first
// has its interval and the others are dots around it. Very many lines stand side by side, by rank.
const FEW = 6;
function intervals(chart, width) {
  const off = hidden.get(chart.id) || new Set();
  const series = chart.series ? [...new Set(chart.data.map((d) => d[chart.series]))] : [null];
  const data = present(chart.data, chart.x).filter((d) => !chart.series || !off.has(d[chart.series]));
  const order = [...new Set(chart.data.map((d) => d[chart.name]))];
  const bounds = [chart.x, chart.low, chart.high];
  const title = (d) => [d[chart.name], chart.series && d[chart.series], `${chart.xlabel || chart.x} ${short(d[chart.x])}`, typeof d[chart.low] === "number" ? `${short(d[chart.low])} to ${short(d[chart.high])}` : null].filter(Boolean).join("\n");
  const middle = chart.log ? 1 : 0;
  const all = chart.diverging ? [...data, { [chart.x]: middle }] : data;
  if (order.length > 40) {
    const upwards = chart.log ? logAxis(all, bounds, 6) : axis(all, bounds, 6);
    const ranked = data.map((d, i) => ({ ...d, rank: i + 1 }));
    return frame(width, {
      height: 280, marginLeft: upwards.wide + 16, marginBottom: 44, marginTop: 26,
      x: { label: chart.rank || "sites, in order", labelArrow: "none", ticks: Math.max(2, Math.floor(width / 110)), tickFormat: ",d" },
      y: { ...upwards.scale, label: chart.xlabel || chart.x },
      marks: [
        Plot.gridY(upwards.ticks, { stroke: "var(--grid)", strokeOpacity: 1 }),
        chart.diverging ? Plot.ruleY([middle], { stroke: "var(--soft)" }) : null,
        Plot.ruleX(ranked.filter((d) => typeof d[chart.low] === "number"), { x: "rank", y1: chart.low, y2: chart.high, stroke: "var(--c0)", strokeOpacity: 0.45, strokeWidth: order.length > 100 ? 1.5 : 3 }),
        Plot.dot(ranked, { x: "rank", y: chart.x, r: order.length > 100 ? 1.6 : 2.6, fill: "var(--c0)" }),
        Plot.tip(ranked, Plot.pointerX({ x: "rank", y: chart.x, title, ...tip() })),
      ],
    });
  }
  const most = Math.floor((width * 0.42) / 7);
  const left = widest(order, most) + 16;
  const room = Math.max(2, Math.floor((width - left) / 75));
  const across = chart.log ? logAxis(all, bounds, room) : axis(all, [...bounds, ...(chart.inner || [])], room);
  const few = series.length <= FEW;
  const row = few && chart.low ? Math.max(24, 9 * series.length + 12) : 28;
  const marks = [Plot.gridX(across.ticks, { stroke: "var(--grid)", strokeOpacity: 1 }), chart.diverging ? Plot.ruleX([middle], { stroke: "var(--soft)" }) : null];
  if (!few) marks.push(Plot.dot(data.filter((d) => d[chart.series] !== series[0]), { x: chart.x, y: chart.name, r: 2.4, fill: "var(--c1)", fillOpacity: 0.4 }));
  series.forEach((name, i) => {
    if (!few && i > 0) return;
    const own = data.filter((d) => !chart.series || d[chart.series] === name);
    const at = { y: chart.name, dy: few && chart.low ? 9 * (i - (series.length - 1) / 2) : 0 };
    marks.push(Plot.ruleY(own.filter((d) => typeof d[chart.low] === "number"), { ...at, x1: chart.low, x2: chart.high, stroke: colour(i), strokeWidth: 2 }));
    if (chart.inner) marks.push(Plot.ruleY(own, { ...at, x1: chart.inner[0], x2: chart.inner[1], stroke: colour(i), strokeWidth: 6, strokeOpacity: 0.45 }));
    marks.push(Plot.dot(own, { ...at, x: chart.x, r: series.length > 1 && few ? 3.4 : 4.2, fill: colour(i) }));
  });
  marks.push(Plot.tip(data, Plot.pointer({ x: chart.x, y: chart.name, title, ...tip() })));
  return frame(width, {
    height: order.length * row + 56, marginLeft: left, marginBottom: 44, marginTop: 8,
    x: { ...across.scale, label: chart.xlabel || chart.x, inset: 6 },
    y: { type: "point", domain: order, label: null, padding: 0.6, tickSize: 0, tickFormat: (t) => cut(t, most) }, marks,
  });
}

function ramp(chart) {
  if (chart.scale === "share") return [actual("--own"), actual("--middle"), actual("--common")];
  return [actual("--zero"), actual("--full")];
}

function logDomain(values) {
  const [low, high] = d3.extent(values.filter((v) => v > 0));
  return low === undefined ? [0.1, 1] : [low, Math.max(high, 10 * low)];
}

function heat(chart, width) {
  const across = [...new Set(chart.data.map((d) => d[chart.x]))];
  const down = [...new Set(chart.data.map((d) => d[chart.y]))];
  const most = Math.floor((width * 0.32) / 7);
  const left = down.length <= 60 ? widest(down, most) + 14 : 16;
  const cell = (width - left - 14) / across.length;
  const numbers = across.every((v) => typeof v === "number");
  const labelled = across.length <= 60;
  const flat = labelled && (numbers || cell > widest(across, 99) + 6);
  const bottom = flat || !labelled || numbers ? 36 : Math.min(110, widest(across, 16) * 0.75 + 22);
  const row = chart.square ? Math.max(4, Math.min(cell, 34)) : down.length <= 60 ? Math.max(16, Math.min(26, 420 / down.length)) : Math.max(2, 900 / down.length);
  const between = d3.piecewise(d3.interpolateLab, ramp(chart));
  const values = chart.data.map((d) => d[chart.fill]).filter((v) => typeof v === "number");
  const top = chart.most ?? (chart.scale === "share" ? 1 : d3.max(values) || 1);
  const colours = chart.scale === "log"
    ? { type: "log", domain: logDomain(values), interpolate: between }
    : { type: "linear", domain: [0, top], interpolate: between, clamp: true };
  const every = numbers ? Math.ceil(across.length / Math.max(2, Math.floor(width / 60))) : 1;
  const title = (d) => `${d[chart.y]}\n${chart.x} ${d[chart.x]}\n${chart.fill} ${short(d[chart.fill])}`;
  const x = { domain: across, padding: 0, label: numbers ? chart.x : null, labelArrow: "none", tickSize: 0, tickRotate: flat || numbers ? 0 : -45, tickFormat: (v) => (numbers ? String(v) : cut(v, 16)) };
  if (!labelled && !numbers) x.axis = null;
  if (numbers) x.ticks = across.filter((_, i) => i % every === 0);
  const box = { x: chart.x, y: chart.y, inset: cell > 8 && row > 8 ? 1 : 0, rx: cell > 8 && row > 8 ? 2 : 0 };
  const infinite = chart.data.filter((d) => d[chart.fill] === "inf");
  const fill = (d) => (typeof d[chart.fill] !== "number" || (chart.scale === "log" && d[chart.fill] <= 0) ? null : d[chart.fill]);
  return frame(width, {
    height: down.length * row + bottom + 12, marginLeft: left, marginBottom: bottom, marginTop: 8, color: { ...colours, unknown: "var(--grid)" },
    x, y: { domain: down, padding: 0, label: null, tickSize: 0, axis: down.length <= 60 ? "left" : null, tickFormat: (t) => cut(t, most) },
    marks: [
      Plot.cell(chart.data, { ...box, fill }),
      Plot.cell(infinite, { ...box, fill: "var(--full)" }),
      Plot.tip(chart.data, Plot.pointer({ x: chart.x, y: chart.y, title, ...tip() })),
    ],
  });
}

function scatter(chart, width) {
  const data = present(present(chart.data, chart.x), chart.y).filter((d) => !chart.bytes || d[chart.x] > 0);
  const [low, high] = d3.extent(data, (d) => d[chart.x]);
  const log = low > 0 && high > 30 * low;
  const xOf = chart.bytes ? size : short;
  const fill = (d) => (chart.labels ? colour(data.indexOf(d)) : "var(--c0)");
  const title = (d) => `${d[chart.name]}\n${chart.xlabel || chart.x} ${xOf(d[chart.x])}\n${chart.ylabel || chart.y} ${short(d[chart.y])}`;
  const upwards = axis(data, [chart.y], 6);
  const x = { label: chart.xlabel || chart.x, labelArrow: "none", insetLeft: 10, insetRight: 10 };
  if (log) Object.assign(x, { type: "log", domain: [low, high], ticks: ticksOfLog(low, high, width), tickFormat: chart.bytes ? size : tick });
  else Object.assign(x, axis(data, [chart.x], Math.max(2, Math.floor(width / 110)), chart.bytes ? { format: size } : {}).scale);
  const options = {
    height: Math.min(360, Math.max(chart.labels ? 280 : 240, width * 0.45)), marginLeft: Math.max(30, upwards.wide + 14), marginBottom: 44, x,
    y: { ...upwards.scale, label: chart.ylabel || chart.y, inset: 10 },
    marks: [
      Plot.gridY(upwards.ticks, { stroke: "var(--grid)", strokeOpacity: 1 }), Plot.gridX(x.ticks, { stroke: "var(--grid)", strokeOpacity: 1 }),
      Plot.dot(data, { x: chart.x, y: chart.y, r: chart.labels ? 5 : data.length > 150 ? 2.5 : 4, fill, fillOpacity: chart.labels ? 1 : 0.75 }),
      Plot.tip(data, Plot.pointer({ x: chart.x, y: chart.y, title, ...tip() })),
    ],
  };
  if (chart.labels) options.marks.push(...labels(chart, data, frame(width, options), width));
  return frame(width, options);
}

function ticksOfLog(low, high, width) {
  const all = d3.range(Math.floor(Math.log10(low)), Math.ceil(Math.log10(high)) + 1).flatMap((p) => [10 ** p, 3 * 10 ** p]).filter((v) => v >= low * 0.99 && v <= high * 1.01);
  const step = Math.ceil(all.length / Math.max(2, Math.floor(width / 110)));
  return all.filter((_, i) => i % step === 0);
}

// Names beside their dots where there is room; the others have the pointer and the table.
function labels(chart, data, options, width) {
  const drawn = Plot.plot(options);
  const [x, y] = [drawn.scale("x"), drawn.scale("y")];
  const taken = data.map((d) => { const [cx, cy] = [x.apply(d[chart.x]), y.apply(d[chart.y])]; return [cx - 6, cy - 6, cx + 6, cy + 6]; });
  const marks = [];
  data.forEach((d) => {
    const [cx, cy, text] = [x.apply(d[chart.x]), y.apply(d[chart.y]), cut(d[chart.name], 28)];
    const wide = text.length * 6.7;
    const places = [[9, 0, "start"], [-9, 0, "end"], [0, -14, "middle"], [0, 14, "middle"], [9, -12, "start"], [9, 12, "start"], [-9, -12, "end"], [-9, 12, "end"]];
    for (const [dx, dy, textAnchor] of places) {
      const left = cx + dx - (textAnchor === "end" ? wide : textAnchor === "middle" ? wide / 2 : 0);
      const box = [left, cy + dy - 7, left + wide, cy + dy + 7];
      const free = taken.every((t) => box[0] > t[2] || box[2] < t[0] || box[1] > t[3] || box[3] < t[1]);
      if (!free || box[0] < options.marginLeft || box[2] > width - 4 || box[1] < 14) continue;
      taken.push(box);
      marks.push(Plot.text([d], { x: chart.x, y: chart.y, text: () => text, dx, dy, textAnchor, fill: "var(--ink)", stroke: "var(--card)", strokeWidth: 3 }));
      break;
    }
  });
  return marks;
}

const KINDS = { lines, dots, bars, heat, scatter, intervals };

// ---- page

function legend(chart, node) {
  node.replaceChildren();
  if (chart.kind === "heat") {
    const bar = make("span", { class: "ramp" });
    bar.style.background = `linear-gradient(to right in lab, ${ramp(chart).join(", ")})`;
    const values = chart.data.map((d) => d[chart.fill]).filter((v) => typeof v === "number" && (chart.scale !== "log" || v > 0));
    const top = chart.data.some((d) => d[chart.fill] === "inf") ? "inf" : d3.max(values);
    const [low, high] = chart.scale === "log" ? [d3.min(values) ?? 0, top] : [0, chart.most ?? (chart.scale === "share" ? 1 : d3.max(values))];
    node.append(`${short(low)} ${chart.low}`, bar, `${short(high)} ${chart.high}`);
    return;
  }
  const named = chart.kind === "lines" || chart.kind === "intervals";
  const names = named && chart.series ? [...new Set(chart.data.map((d) => d[chart.series]))] : [];
  if (names.length < 2 || (chart.kind === "intervals" && names.length > FEW)) return;
  names.forEach((name, i) => {
    const off = hidden.get(chart.id) || new Set();
    const sample = d3.create("svg").attr("width", 18).attr("height", 8).attr("aria-hidden", "true");
    sample.append("line").attr("x2", 18).attr("y1", 4).attr("y2", 4).attr("stroke-width", 2.5).attr("stroke-dasharray", dashes(i)).style("stroke", colour(i));
    const button = make("button", { type: "button", "aria-pressed": String(!off.has(name)) }, sample.node(), String(name));
    button.addEventListener("click", () => {
      off.has(name) ? off.delete(name) : off.add(name);
      hidden.set(chart.id, off);
      button.setAttribute("aria-pressed", String(!off.has(name)));
      draw(chart.id);
    });
    node.append(button);
  });
}

function draw(id) {
  const chart = charts.get(id);
  const node = document.querySelector(`.plot[data-chart="${CSS.escape(id)}"]`);
  const svg = Plot.plot(KINDS[chart.kind](chart, Math.max(240, Math.floor(node.clientWidth))));
  svg.setAttribute("aria-hidden", "true");
  node.replaceChildren(svg);
}

function drawAll(withLegends = true) {
  for (const chart of charts.values()) {
    if (withLegends) legend(chart, document.querySelector(`#chart-${CSS.escape(chart.id)} .legend`));
    draw(chart.id);
  }
}

function sortBy(button) {
  const th = button.closest("th");
  const table = th.closest("table");
  const column = [...th.parentNode.children].indexOf(th);
  const down = th.getAttribute("aria-sort") === "descending" || (column === 0 && !th.hasAttribute("aria-sort"));
  for (const other of th.parentNode.children) other.removeAttribute("aria-sort");
  th.setAttribute("aria-sort", down ? "ascending" : "descending");
  const keyOf = (row) => row.children[column].dataset.key ?? row.children[column].textContent;
  const compare = (a, b) => (a === "" || b === "" ? (a === "") - (b === "") : (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b) * (down ? 1 : -1));
  table.tBodies[0].append(...[...table.tBodies[0].rows].sort((a, b) => compare(keyOf(a), keyOf(b))));
}

function setTheme(name, keep) {
  root.dataset.theme = name;
  const button = document.getElementById("theme");
  button.textContent = name === "dark" ? "Light" : "Dark";
  button.setAttribute("aria-label", `Switch to ${name === "dark" ? "light" : "dark"} colours`);
  try { if (keep) localStorage.setItem("fedtailor-theme", name); } catch { /* a file may have no storage */ }
  if (charts.size) drawAll();
}

function theme() {
  let kept = null;
  try { kept = localStorage.getItem("fedtailor-theme"); } catch { /* as above */ }
  const system = matchMedia("(prefers-color-scheme: dark)");
  setTheme(kept || (system.matches ? "dark" : "light"));
  system.addEventListener("change", () => setTheme(system.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark", true));
}

function listen() {
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button?.classList.contains("csv")) save(charts.get(button.dataset.chart));
    else if (button?.closest("table[data-sortable] thead")) sortBy(button);
  });
  document.addEventListener("toggle", (event) => {
    const details = event.target;
    if (details.matches?.("details.data[open]") && details.children.length === 1) details.append(dataTable(charts.get(details.dataset.chart)));
  }, true);
  let width = innerWidth, waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(() => drawAll(false), 120);
  });
}

// ---- while a run goes on: ask whether anything is new, and then put the new content in place

async function follow() {
  const said = document.getElementById("live");
  let seen = null;
  for (;;) {
    try {
      const state = await (await fetch("data", { cache: "no-store" })).json();
      if (seen !== null && state.version !== seen) await renew();
      seen = state.version;
      said.textContent = state.finished ? "finished" : "live";
      if (state.finished) return;
    } catch {
      said.textContent = "waiting for fedtailor watch";
    }
    await new Promise((wake) => setTimeout(wake, 3000));
  }
}

async function renew() {
  const text = await (await fetch("./", { cache: "no-store" })).text();
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const open = [...document.querySelectorAll("details.data[open]")].map((d) => d.dataset.chart);
  const [top, focused] = [scrollY, document.activeElement?.dataset?.chart];
  document.title = fresh.title;
  document.getElementById("content").replaceWith(document.adoptNode(fresh.getElementById("content")));
  load();
  drawAll();
  for (const id of open) document.querySelector(`details.data[data-chart="${CSS.escape(id)}"]`)?.setAttribute("open", "");
  if (focused) document.querySelector(`button.csv[data-chart="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  scrollTo({ top, behavior: "instant" });
}

load();
theme();
listen();
if (document.body.hasAttribute("data-live")) follow();
