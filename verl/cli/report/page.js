"use strict";
// The script of the page. The first half computes and touches no document: tests/cli/report/page.test.js runs it in node.

// ---------------------------------------------------------------- computing

const decode = (text) => new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);

// Control characters and marks that change the direction of text, as escapes: a text of a run may hold them.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const visible = (text) => String(text).replace(HIDDEN, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));

function format(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "none";
  if (Math.abs(value) >= 1e6 || (value !== 0 && Math.abs(value) < 1e-4)) return value.toExponential(2);
  return String(+value.toPrecision(Math.abs(value) >= 1000 ? 7 : digits));
}

// The first index whose x is not below a value; xs rises.
function lowerBound(xs, x) {
  let low = 0, high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low;
}

function nearest(xs, x) {
  const index = lowerBound(xs, x);
  return index > 0 && (index === xs.length || x - xs[index - 1] < xs[index] - x) ? index - 1 : index;
}

function interpolate(xs, ys, x) {
  const index = lowerBound(xs, x);
  if (index === 0) return xs[0] === x ? ys[0] : ys[0] * (xs[0] > 0 ? Math.max(0, x / xs[0]) : 0);
  if (index === xs.length) return ys[ys.length - 1];
  const share = (x - xs[index - 1]) / (xs[index] - xs[index - 1]);
  return ys[index - 1] + share * (ys[index] - ys[index - 1]);
}

// The range of the values at xs from low to high, or null.
function extent(xs, ys, low, high) {
  let least = Infinity, most = -Infinity;
  for (let i = lowerBound(xs, low); i < xs.length && xs[i] <= high; i++) {
    if (ys[i] < least) least = ys[i];
    if (ys[i] > most) most = ys[i];
  }
  return least <= most ? [least, most] : null;
}

// The points of a line, at most four in each column of pixels: its first, least, greatest and last value, so that no
// spike is lost. A gap is [x, NaN].
function pixelColumns(xs, ys, low, high, width) {
  const points = [], scale = width / (high - low || 1);
  let column = null;
  const flush = () => {
    if (column === null) return;
    const {first, least, most, last} = column;
    const order = [first, ...(least[2] < most[2] ? [least, most] : [most, least]), last];
    order.forEach((point, i) => { if (i === 0 || point[2] !== order[i - 1][2]) points.push([point[0], point[1]]); });
    column = null;
  };
  const end = Math.min(xs.length, lowerBound(xs, high) + 2);
  for (let i = Math.max(0, lowerBound(xs, low) - 1); i < end; i++) {
    const x = (xs[i] - low) * scale, y = ys[i], at = Math.floor(x);
    if (Number.isNaN(y)) { flush(); points.push([x, NaN]); continue; }
    const point = [x, y, i];
    if (column === null || column.at !== at) { flush(); column = {at, first: point, least: point, most: point}; }
    column.last = point;
    if (y < column.least[1]) column.least = point;
    if (y > column.most[1]) column.most = point;
  }
  flush();
  return points;
}

// The centred mean of `points` values; at the ends of fewer, evenly on both sides. A gap stays one.
function smooth(ys, points) {
  const sums = new Float64Array(ys.length + 1), counts = new Float64Array(ys.length + 1), reach = points >> 1;
  for (let i = 0; i < ys.length; i++) {
    const gap = Number.isNaN(ys[i]);
    sums[i + 1] = sums[i] + (gap ? 0 : ys[i]);
    counts[i + 1] = counts[i] + (gap ? 0 : 1);
  }
  return Float64Array.from(ys, (y, i) => {
    const r = Math.min(reach, i, ys.length - 1 - i);
    return Number.isNaN(y) ? NaN : (sums[i + r + 1] - sums[i - r]) / (counts[i + r + 1] - counts[i - r]);
  });
}

function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((size) => size >= raw * 0.999);
  const marks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) marks.push(+(i * step).toPrecision(12));
  return marks;
}

// Mean over curves at the x that all have, and t standard errors on both sides; without t no band.
function band(curves, t) {
  const xs = [], mean = [], low = [], high = [], n = curves.length;
  const rows = curves.map(({xs: grid, ys}) => new Map(Array.from(grid, (x, i) => [x, ys[i]])));
  for (const x of curves[0].xs) {
    const values = rows.map((row) => row.get(x));
    if (values.some((value) => value === undefined)) continue;
    const centre = values.reduce((a, b) => a + b, 0) / n;
    const spread = Math.sqrt(values.reduce((sum, value) => sum + (value - centre) ** 2, 0) / Math.max(n - 1, 1));
    const reach = t ? t * spread / Math.sqrt(n) : NaN;
    xs.push(x); mean.push(centre); low.push(centre - reach); high.push(centre + reach);
  }
  return {xs, mean, low, high};
}

// Words of two texts as [kind, text], kind "same", "del" or "ins": a longest common subsequence; null if too long.
function wordDiff(before, after) {
  const a = before.match(/\s+|[^\s]+/g) || [], b = after.match(/\s+|[^\s]+/g) || [];
  if (a.length * b.length > 1e6) return null;
  const width = b.length + 1, lengths = new Uint32Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      lengths[i * width + j] = a[i] === b[j] ? lengths[(i + 1) * width + j + 1] + 1
        : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
  const parts = [];
  const add = (kind, text) => {
    const last = parts[parts.length - 1];
    if (last && last[0] === kind) last[1] += text; else parts.push([kind, text]);
  };
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { add("same", a[i++]); j++; }
    else if (j === b.length || (i < a.length && lengths[(i + 1) * width + j] >= lengths[i * width + j + 1])) add("del", a[i++]);
    else add("ins", b[j++]);
  }
  return parts;
}

// The values of a row of tokens by the chosen quantity; null where the run did not record it.
const TOKEN_VIEWS = {
  "log-prob": (c) => c.old_log_probs || c.rollout_log_probs,
  "gap of log-probs": (c) => c.old_log_probs && c.rollout_log_probs
    && c.old_log_probs.map((value, i) => value === null || c.rollout_log_probs[i] === null ? null : value - c.rollout_log_probs[i]),
  entropy: (c) => c.entropies,
  advantage: (c) => c.advantages,
  mask: (c) => c.mask,
  version: (c) => c.versions,
};

// Background of a value: blue below zero and red above, by its share of the largest; low log-probs are red.
function tokenColor(value, name, values) {
  if (value === null || value === undefined) return "";
  const numbers = values.filter((v) => v !== null), least = Math.min(...numbers), most = Math.max(...numbers);
  let share = value / (Math.max(Math.abs(least), Math.abs(most)) || 1);
  if (name === "log-prob") share = Math.min(1, -value / 5);
  else if (name === "mask") share = value ? 0 : 1;
  else if (name === "version") share = most > least ? (most - value) / (most - least) : 0;
  const [r, g, b] = share < 0 ? [36, 108, 206] : [214, 80, 50];
  return Math.abs(share) < 0.02 ? "" : `rgba(${r}, ${g}, ${b}, ${(0.08 + 0.42 * Math.min(1, Math.abs(share))).toFixed(3)})`;
}

// Cells of the table of pass rates, first evaluation by last one: prompt rows in each.
const RATE_BANDS = ["0", "below half", "half or more", "all"];
const rateBand = (rate) => rate <= 0 ? 0 : rate >= 1 ? 3 : rate < 0.5 ? 1 : 2;
function rateTable(rows) {
  const cells = RATE_BANDS.map(() => RATE_BANDS.map(() => []));
  for (const row of rows) cells[rateBand(row[1])][rateBand(row[2])].push(row);
  return cells;
}

function compare(left, right, falls) {
  const rank = (value) => value === null ? 2 : typeof value === "number" ? 0 : 1;  // others come after numbers
  if (left === right || rank(left) !== rank(right)) return rank(left) - rank(right);
  return (left < right ? -1 : 1) * (falls ? -1 : 1);
}

const valueOf = (row, key) => {
  const value = key.startsWith("others.") ? row.others[key.slice(7)] : row[key];
  return value === undefined ? null : value !== null && typeof value === "object" ? JSON.stringify(value) : value;
};

// The directory above some paths, up to its last slash.
function commonDirectory(paths) {
  let length = 0;
  while (length < paths[0].length && paths.every((path) => path[length] === paths[0][length])) length++;
  return paths[0].slice(0, paths[0].lastIndexOf("/", length - 1) + 1);
}

// Whether a sample passes the filters: a mapping with a method `get`, such as URLSearchParams.
const RANGES = ["step", "score", "length"];
function passes(row, asked) {
  for (const name of RANGES) {
    const low = asked.get(name + "_min"), high = asked.get(name + "_max");
    if (low === null && high === null) continue;
    const value = row[name];
    if (value === null || (low !== null && value < +low) || (high !== null && value > +high)) return false;
  }
  for (const name of ["prompt", "response"])
    if (asked.get(name) !== null && !row[name].includes(asked.get(name))) return false;
  if (asked.get("exact") !== null && row.prompt !== asked.get("exact")) return false;
  return asked.get("source") === null || row.source === asked.get("source");
}

// ---------------------------------------------------------------- elements

// An element; properties are set, and strings among the children are shown as text.
function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  for (const [name, value] of Object.entries(properties.aria || {})) node.setAttribute(`aria-${name}`, value);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const textOf = (value) => value === null ? "null" : visible(typeof value === "string" ? value : typeof value === "number" ? format(value, 6)
  : JSON.stringify(value));

function section(title, ...children) {
  const id = title.toLowerCase().replace(/[^a-z]+/g, "-");
  const heading = element("h2", {id, textContent: title});
  document.querySelector("main").append(element("section", {aria: {labelledby: id}}, heading, ...children));
  document.querySelector("nav").append(element("a", {href: "#" + id, textContent: title, onclick: (event) => {
    event.preventDefault();  // the part of the URL after # holds the filters of the samples
    heading.tabIndex = -1; heading.focus(); heading.scrollIntoView();
  }}));
}

function table(name, columns, rows) {
  const cells = (row) => row.map((value) => value instanceof Node ? element("td", {}, value)
    : element("td", {className: typeof value === "number" ? "number" : "", textContent: value === null ? "" : textOf(value)}));
  return element("div", {className: "scroll", tabIndex: 0, role: "region", aria: {label: name}}, element("table", {},
    element("thead", {}, element("tr", {}, columns.map((text) => element("th", {scope: "col", textContent: text})))),
    element("tbody", {}, rows.map((row) => element("tr", {}, cells(row))))));
}

function choice(label, options, onchange) {
  const select = element("select", {onchange: () => onchange(select.value)},
    options.map((option) => {
      const [text, value = text] = [option].flat();
      return new Option(visible(text), value);
    }));
  return element("label", {}, label, select);
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const swatch = (color) => {
  const key = element("i", {className: "key"});
  key.style.background = `var(--line${color % 8})`;
  return key;
};

// ---------------------------------------------------------------- curves

const charts = [];
const view = {axis: "step", points: 0, low: null, high: null, x: null};
const LEFT = 52, BOTTOM = 20, TOP = 6, HEIGHT = 190;

// A curve of a run: its steps, values, and its x on each axis.
class Curve {
  constructor(run, curve, grids) {
    this.run = run; this.steps = grids(curve.grid); this.values = decode(curve.values);
    this.again = (curve.again || []).map((part) => new Curve(run, part, grids));
    this.caches = new Map();
  }
  get xs() {
    const axis = this.run.axes[view.axis];
    if (view.axis === "step" || !axis) return this.steps;
    if (!this.caches.has(view.axis))
      this.caches.set(view.axis, Float64Array.from(this.steps, (step) => interpolate(axis.steps, axis.values, step)));
    return this.caches.get(view.axis);
  }
}

// A chart. `lines` has {label, color, curve} or {label, color, curves, t}; `stacked` draws areas upon each other, `level`
// a horizontal line with a label.
class Chart {
  constructor(title, lines, {stacked = false, level = null} = {}) {
    Object.assign(this, {title, lines, stacked, level});
    this.canvas = element("canvas", {tabIndex: 0, role: "img", aria: {label: visible(title)}});
    this.caption = element("figcaption", {});
    this.node = element("figure", {}, this.canvas, this.caption);
    this.canvas.onpointermove = (event) => hover(this.xAt(event));
    this.canvas.onpointerleave = () => hover(null);
    this.canvas.onpointerdown = (event) => { this.from = this.xAt(event); };
    this.canvas.onpointerup = (event) => {
      const to = this.xAt(event), from = this.from;
      this.from = null;
      if (from !== null && Math.abs(to - from) > (this.high - this.low) * 0.02) zoom(Math.min(from, to), Math.max(from, to));
    };
    this.canvas.ondblclick = () => zoom(null, null);
    this.canvas.onkeydown = (event) => this.key(event);
    charts.push(this);
    watcher.observe(this.canvas);
  }
  xAt(event) {
    const box = this.canvas.getBoundingClientRect();
    return this.low + (event.clientX - box.left - LEFT) / (box.width - LEFT - 4) * (this.high - this.low);
  }
  key(event) {
    const span = this.high - this.low, x = view.x ?? this.low;
    const xs = this.curves()[0].xs, at = nearest(xs, x);
    const moves = {
      ArrowLeft: () => hover(xs[Math.max(0, at - (event.shiftKey ? 10 : 1))]),
      ArrowRight: () => hover(xs[Math.min(xs.length - 1, view.x === null ? 0 : at + (event.shiftKey ? 10 : 1))]),
      Home: () => hover(xs[0]), End: () => hover(xs[xs.length - 1]),
      "+": () => zoom(Math.max(this.low, x - span / 4), Math.min(this.high, x + span / 4)),
      "-": () => zoom(null, null), Escape: () => { hover(null); zoom(null, null); },
    };
    if (moves[event.key]) { event.preventDefault(); moves[event.key](); }
  }
  curves() { return this.lines.flatMap((line) => line.curves || [line.curve]); }
  // What is drawn of a line: {xs, ys, faint: [[xs, ys]], low, high}.
  shapes() {
    return this.lines.map((line) => {
      if (line.curves) {
        const mean = band(line.curves.map((curve) => ({xs: curve.xs, ys: curve.values})), line.t);
        return mean.xs.length && line.curves.length > 1 ? {line, xs: mean.xs, ys: mean.mean, low: mean.low, high: mean.high,
          faint: line.t ? [] : line.curves.map((curve) => [curve.xs, curve.values])}
          : {line, xs: line.curves[0].xs, ys: line.curves[0].values,
            faint: line.curves.slice(1).map((curve) => [curve.xs, curve.values])};
      }
      return {line, xs: line.curve.xs, ys: line.curve.values, faint: line.curve.again.map((part) => [part.xs, part.values])};
    }).map((shape) => view.points > 1 && shape.ys.length > view.points && !this.stacked
      ? {...shape, ys: smooth(shape.ys, view.points), faint: [...shape.faint, [shape.xs, shape.ys]]} : shape);
  }
  draw() {
    const width = this.canvas.clientWidth, ratio = window.devicePixelRatio || 1;
    if (!width) return;
    this.isDrawn = true;
    this.canvas.width = width * ratio; this.canvas.height = HEIGHT * ratio;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    let shapes = this.shapes();
    const ends = this.curves().filter((curve) => curve.xs.length).map((curve) => [curve.xs[0], curve.xs[curve.xs.length - 1]]);
    this.low = view.low ?? Math.min(...ends.map(([x]) => x));
    this.high = view.high ?? Math.max(...ends.map(([, x]) => x));
    if (this.high === this.low) { this.low -= 0.5; this.high += 0.5; }
    const inner = width - LEFT - 4, tall = HEIGHT - BOTTOM - TOP;
    if (this.stacked) shapes = this.stack(shapes, inner);
    const ranges = shapes.flatMap(({xs, ys, low, high, faint}) => [extent(xs, ys, this.low, this.high),
      ...faint.map(([gx, gy]) => extent(gx, gy, this.low, this.high)),
      ...(high ? [extent(xs, low, this.low, this.high), extent(xs, high, this.low, this.high)] : [])]).filter(Boolean);
    let bottom = Math.min(...ranges.map((r) => r[0])), top = Math.max(...ranges.map((r) => r[1]));
    if (!ranges.length) { bottom = 0; top = 1; }
    if (this.stacked) bottom = 0;
    if (this.level) top = Math.max(top, this.level.value);
    const margin = (top - bottom) * 0.06 || Math.abs(top) * 0.1 || 0.5;
    top += margin; if (!this.stacked) bottom -= margin;
    const x = (value) => LEFT + (value - this.low) / (this.high - this.low) * inner;
    const y = (value) => TOP + (top - value) / (top - bottom) * tall;
    this.frame(context, width, x, y, bottom, top);
    context.save();
    context.beginPath(); context.rect(LEFT, 0, inner + 2, HEIGHT - BOTTOM + 1); context.clip();
    const path = (xs, ys) => {
      const points = pixelColumns(xs, ys, this.low, this.high, inner);
      let isDown = false;
      context.beginPath();
      for (const [px, value] of points) {
        if (Number.isNaN(value)) isDown = false;
        else { context[isDown ? "lineTo" : "moveTo"](LEFT + px, y(value)); isDown = true; }
      }
      context.stroke();
      return points;
    };
    let below = null;
    for (const {line, xs, ys, low, high, faint} of shapes) {
      const color = style(`--line${line.color % 8}`);
      context.strokeStyle = context.fillStyle = color;
      if (this.stacked) {
        context.globalAlpha = 0.75; context.beginPath();
        xs.forEach((value, i) => context[i ? "lineTo" : "moveTo"](x(value), y(ys[i])));
        for (let i = xs.length - 1; i >= 0; i--) context.lineTo(x(xs[i]), y(below ? below[i] : 0));
        context.fill(); context.globalAlpha = 1; below = ys;
        continue;
      }
      context.lineWidth = 1; context.globalAlpha = 0.35;
      for (const [gx, gy] of faint) path(gx, gy);
      if (high && line.t) {
        context.globalAlpha = 0.2; context.beginPath();
        xs.forEach((value, i) => context[i ? "lineTo" : "moveTo"](x(value), y(high[i])));
        for (let i = xs.length - 1; i >= 0; i--) context.lineTo(x(xs[i]), y(low[i]));
        context.fill();
      }
      context.globalAlpha = 1; context.lineWidth = 1.6;
      const points = path(xs, ys);
      if (points.length <= 40) for (const [px, value] of points) if (!Number.isNaN(value)) {
        context.beginPath(); context.arc(LEFT + px, y(value), 2.4, 0, 7); context.fill();
      }
    }
    context.restore();
    this.shown = shapes;
    this.read(context, x);
  }
  // Areas upon each other: the mean of each line in each of at most 300 stretches, and the sums of these.
  stack(shapes, width) {
    const count = Math.max(2, Math.min(300, Math.floor(width), shapes[0].xs.length)), total = new Float64Array(count);
    const span = (this.high - this.low) / count;
    return shapes.map((shape) => {
      const ys = new Float64Array(count), means = new Float64Array(count), xs = new Float64Array(count);
      for (let i = 0; i < count; i++) {
        let sum = 0, n = 0;
        const from = lowerBound(shape.xs, this.low + i * span), to = this.low + (i + 1) * span;
        for (let j = from; j < shape.xs.length && (shape.xs[j] < to || i === count - 1); j++)
          if (!Number.isNaN(shape.ys[j])) { sum += shape.ys[j]; n++; }
        means[i] = n ? sum / n : i ? means[i - 1] : 0;
        total[i] += means[i]; ys[i] = total[i]; xs[i] = this.low + (count > 1 ? i / (count - 1) : 0) * (this.high - this.low);
      }
      return {...shape, xs, ys, means, faint: []};
    });
  }
  frame(context, width, x, y, bottom, top) {
    context.font = "11px system-ui, sans-serif"; context.lineWidth = 1;
    context.strokeStyle = style("--edge"); context.fillStyle = style("--dim");
    context.textAlign = "right"; context.textBaseline = "middle";
    for (const mark of ticks(bottom, top, 5)) {
      const at = Math.round(y(mark)) + 0.5;
      context.beginPath(); context.moveTo(LEFT, at); context.lineTo(width - 4, at); context.stroke();
      context.fillText(format(mark), LEFT - 5, at);
    }
    context.textAlign = "center"; context.textBaseline = "alphabetic";
    for (const mark of ticks(this.low, this.high, Math.max(2, width / 90)))
      context.fillText(format(mark), Math.max(LEFT + 8, Math.min(width - 14, x(mark))), HEIGHT - 5);
    context.setLineDash([2, 3]);
    for (const run of this.curves().length ? [this.curves()[0].run] : [])
      for (const step of view.axis === "step" ? run.resumes : []) {
        const at = x(step);
        if (at < LEFT || at > width) continue;
        context.strokeStyle = style("--dim");
        context.beginPath(); context.moveTo(at, TOP); context.lineTo(at, HEIGHT - BOTTOM); context.stroke();
      }
    if (this.level) {
      context.strokeStyle = style("--bad"); context.fillStyle = style("--bad"); context.textAlign = "left";
      context.beginPath(); context.moveTo(LEFT, y(this.level.value)); context.lineTo(width - 4, y(this.level.value)); context.stroke();
      context.fillText(this.level.label, LEFT + 6, y(this.level.value) + 13);
    }
    context.setLineDash([]);
  }
  // The crosshair, and the values at it; without one the last values.
  read(context, x) {
    if (view.x !== null && view.x >= this.low && view.x <= this.high) {
      context.strokeStyle = style("--text"); context.globalAlpha = 0.6;
      context.beginPath(); context.moveTo(x(view.x), TOP); context.lineTo(x(view.x), HEIGHT - BOTTOM); context.stroke();
      context.globalAlpha = 1;
    }
    const at = view.x ?? this.high;
    const values = this.shown.map(({line, xs, ys, means}) => {
      const index = xs.length ? nearest(xs, at) : -1;
      return [line, index < 0 ? NaN : (means || ys)[index]];
    });
    const where = view.x === null ? "" : ` at ${view.axis} ${format(this.curves()[0].xs[nearest(this.curves()[0].xs, at)])}`;
    const mean = view.points > 1 && !this.stacked && this.shown.some((shape) => shape.xs.length > view.points)
      ? `, centred mean of ${view.points} points` : "";
    this.caption.replaceChildren(element("b", {textContent: visible(this.title) + mean + where}), ...values.map(([line, value]) =>
      element("span", {}, swatch(line.color), `${visible(line.label)} ${format(value)}`)));
    const spoken = values.map(([line, value]) => `${line.label} ${format(value)}`).join(", ");
    this.canvas.setAttribute("aria-label", visible(`${this.title}${mean}, by ${view.axis}${where || ", last values"}: ${spoken}`));
  }
}

const watcher = typeof IntersectionObserver === "undefined" ? null : new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = charts.find(({canvas}) => canvas === entry.target);
    chart.isVisible = entry.isIntersecting;
    if (chart.isVisible && !chart.isDrawn) chart.draw();
  }
}, {rootMargin: "300px"});

let isWaiting = false;
function redraw(all = false) {
  for (const chart of charts) chart.isDrawn = false;
  if (all) { for (const chart of charts) chart.draw(); return; }
  if (isWaiting) return;
  isWaiting = true;
  requestAnimationFrame(() => { isWaiting = false; for (const chart of charts) if (chart.isVisible) chart.draw(); });
}
function hover(x) { view.x = x; redraw(); }
function zoom(low, high) { view.low = low; view.high = high; redraw(); }

function toolbar(runs, longest) {
  const axes = ["step", ...["samples", "seconds"].filter((axis) => runs.every((run) => run.axes[axis]))];
  view.points = longest < 60 ? 0 : longest < 400 ? 11 : longest < 2000 ? 31 : 101;
  const smoothing = choice("smoothing", [["none", 0], ...[5, 11, 31, 101, 301].map((n) => [`centred mean of ${n} points`, n])],
    (value) => { view.points = +value; redraw(); });
  smoothing.querySelector("select").value = view.points;
  return element("div", {className: "bar"}, choice("horizontal axis", axes, (value) => {
    Object.assign(view, {axis: value, low: null, high: null, x: null}); redraw();
  }), smoothing, element("button", {type: "button", textContent: "whole range", onclick: () => zoom(null, null)}),
  element("span", {className: "dim"}, "Drag to zoom; arrow keys move the line, + zooms, Escape shows everything."));
}

// Panels of charts, the important ones first; other metrics are drawn when their group is opened.
function curvesSection(content, grids) {
  const runs = content.runs, groups = content.comparison && content.comparison.groups;
  const byPanel = new Map(), others = new Map();
  for (const [key, panel] of content.panels) {
    const target = panel ? byPanel : others, name = panel || key.split("/")[0];
    target.set(name, [...(target.get(name) || []), key]);
  }
  const curve = (index, key) => new Curve(runs[index], runs[index].series[key], grids);
  const make = (title, keys, options) => groups
    ? keys.map((key) => new Chart(key, groups.map((group, color) => ({label: group.name, color, t: group.t,
      curves: group.runs.filter((i) => runs[i].series[key]).map((i) => curve(i, key))})).filter((line) => line.curves.length), options))
    : [new Chart(title, keys.map((key, color) => ({label: key, color, curve: curve(0, key)})), options)];
  const main = element("div", {className: "charts"}, [...byPanel].flatMap(([title, keys]) => make(title, keys)));
  const details = [...others].map(([name, keys]) => {
    const group = element("details", {}, element("summary", {textContent: `${visible(name)}: ${keys.length} ${keys.length === 1 ? "metric" : "metrics"}`}));
    group.ontoggle = () => {
      if (group.open && group.children.length === 1)
        group.append(element("div", {className: "charts"}, keys.flatMap((key) => make(key, [key])).map((chart) => chart.node)));
    };
    return group;
  });
  main.replaceChildren(...charts.map((chart) => chart.node));
  const longest = Math.max(0, ...charts.flatMap((chart) => chart.curves().map((line) => line.steps.length)));
  const again = runs.some((run) => run.resumes.length)
    ? element("p", {className: "dim"}, "Dotted vertical lines are resumes; faint lines are steps that were trained again.") : null;
  const bands = groups ? element("p", {className: "dim"}, "A band is the 95 % interval of the mean over seeds, from three seeds on. "
    + "With fewer there is no interval: single runs are faint.") : null;
  section("Curves", again, bands, toolbar(runs, longest), main, ...details);
  if (!groups) timeSection(runs[0], curve, content);
}

function timeSection(run, curve, content) {
  const keys = content.panels.map(([key]) => key);
  const stages = keys.filter((key) => /^timing\/.*_s$/.test(key) && key !== "timing/step_s");
  const boxes = [];
  if (stages.length) boxes.push(new Chart("seconds of a step by stage", stages.map((key, color) =>
    ({label: key.slice(7, -2), color, curve: curve(0, key)})), {stacked: true}));
  const memory = keys.filter((key) => key === "perf/peak_memory_mib"), peak = run.plan.peak;
  if (memory.length) boxes.push(new Chart("peak memory (MiB)", memory.map((key, color) => ({label: key, color, curve: curve(0, key)})),
    {level: peak && peak.bytes ? {value: peak.bytes / 2 ** 20, label: "plan, without code and libraries"} : null}));
  const phases = Array.isArray(run.plan.phases) ? run.plan.phases : [];
  const plan = phases.length ? [element("h3", {textContent: "Plan of memory, MiB in each process"}), table("plan of memory",
    ["phase", "MiB", "largest parts"], phases.map((phase) => [phase.name, phase.bytes / 2 ** 20, Object.entries(phase.parts || {})
      .sort((a, b) => b[1] - a[1]).slice(0, 4).map(([name, bytes]) => `${name} ${format(bytes / 2 ** 20)}`).join(", ")]))] : [];
  if (boxes.length || plan.length)
    section("Time and memory", element("div", {className: "charts"}, boxes.map((chart) => chart.node)), ...plan);
}

// ---------------------------------------------------------------- facts of runs

function runSection(run, written) {
  const state = {finished: "good", failed: "bad", killed: "bad"}[run.status] || "";
  document.querySelector("header").append(element("p", {className: `outcome ${state}`, textContent: visible(run.sentence)}));
  const parts = [];
  if (run.error) parts.push(element("pre", {textContent: visible(run.error)}));
  if (run.command) parts.push(element("pre", {aria: {label: "command"}, textContent: visible(run.command)}));
  parts.push(table("facts of the run", ["fact", "value"], [...run.facts, ["page written", written]]));
  const changed = Object.entries(run.differences);
  if (changed.length) parts.push(element("h3", {textContent: "Differences from the defaults"}), table("differences from the defaults",
    ["setting", "value", "default"], changed.map(([path, pair]) => [path, ...[pair].flat().map(textOf)])));
  section("Run", ...parts);
  if (run.diagnosis.length) section("Diagnosis", table("diagnosis", ["", "what", "value", "threshold", "metric", "if so"],
    run.diagnosis.map((finding) => [element("span", {className: finding.exceeded ? "bad" : "good",
      textContent: finding.exceeded ? "look" : "fine"}), finding.title, finding.value, finding.threshold, finding.key,
    finding.exceeded ? finding.advice : null])));
}

function endSections(run) {
  if (run.anomalies.length) section("Anomalies", ...run.anomalies.map(([path, text]) =>
    element("details", {}, element("summary", {textContent: visible(path)}), element("pre", {textContent: visible(text)}))));
  if (run.lineage.length) section("Lineage", table("lineage, oldest first", ["run", "from step", "status", "began", "directory", "changed"],
    run.lineage.map((link) => [link.run_id, link.step, link.status || "running or killed", link.time.slice(0, 19), link.directory,
      Object.entries(link.changed).map(([path, values]) => `${path}: ${JSON.stringify(values)}`).join("; ")])));
}

function comparisonSections({runs, comparison, written}) {
  const colorOf = (index) => comparison.groups.findIndex((group) => group.runs.includes(index));
  const common = commonDirectory(runs.map((run) => run.directory));
  const key = (index) => element("span", {}, swatch(colorOf(index)), `run ${index + 1}`);
  section("Runs", element("p", {className: "dim"}, `Page written ${written}. Directories are below ${visible(common)}`),
    table("runs", ["", "directory", "name", "outcome"],
      runs.map((run, index) => [key(index), run.directory.slice(common.length), run.name, run.sentence])));
  const settings = Object.entries(comparison.settings);
  section("Settings that differ", settings.length ? table("settings that differ", ["setting", ...runs.map((_, i) => `run ${i + 1}`)],
    settings.map(([path, values]) => [path, ...values.map(textOf)])) : element("p", {textContent: "None."}));
  section("Statistics", table("statistics", ["what", "of", "mean", "95 % interval", "by"], comparison.statistics.map((line) =>
    [line.what, line.of, line.mean === null ? null : +format(line.mean),
      line.interval ? `${format(line.interval[1])} to ${format(line.interval[2])}` : "none", line.why])));
}

function promptsSection(prompts) {
  const list = element("div", {}), cells = rateTable(prompts.rows);
  const show = (rows, name) => list.replaceChildren(element("h3", {textContent: name}), table(name,
    ["prompt", `step ${prompts.first}`, `step ${prompts.last}`, "best"], rows.slice(0, 500).map((row) => [...row])));
  const change = prompts.change ? ` Mean pass rate changed by ${format(prompts.change[0])}, 95 % interval ${format(prompts.change[1])} to `
    + `${format(prompts.change[2])} (bootstrap over ${prompts.change[3]} prompts; not over seeds).` : "";
  const button = (rows, name) => rows.length
    ? element("button", {type: "button", textContent: rows.length, title: name, aria: {label: `${rows.length} prompts: ${name}`},
      onclick: () => show(rows, name)}) : element("span", {className: "dim", textContent: "0"});
  const kind = prompts.kind === "sampled" ? "of sampled responses" : "of greedy responses";
  section("Prompts", element("p", {}, `${prompts.learned} of ${prompts.count} prompts pass more often at step ${prompts.last} than at step `
    + `${prompts.first}, ${prompts.forgotten} less often, ${prompts.never} never passed in any evaluation (${kind}).${change}`),
  table("pass rates, first evaluation by last", [`step ${prompts.first} \\ ${prompts.last}`, ...RATE_BANDS],
    cells.map((row, i) => [RATE_BANDS[i], ...row.map((rows, j) =>
      button(rows, `pass rate ${RATE_BANDS[i]} at step ${prompts.first}, ${RATE_BANDS[j]} at step ${prompts.last}`))])), list);
}

// ---------------------------------------------------------------- tokens

function tokensSection(rows, leftOut) {
  let row = rows[0], name = "log-prob";
  const box = element("div", {className: "tokens", role: "group", aria: {label: "tokens of the response"}});
  const output = element("output", {aria: {live: "polite"}}), prompt = element("pre", {}), legend = element("p", {className: "dim"});
  const describe = (index) => `token ${index} ${JSON.stringify(visible(row.texts[index]))}: ` + [
    ...Object.entries(TOKEN_VIEWS).map(([title, of]) => [title, of(row.columns)]), ["id", row.columns.ids]]
    .filter(([, values]) => values).map(([title, values]) => `${title} ${format(values[index])}`).join(", ");
  const names = () => Object.keys(TOKEN_VIEWS).filter((title) => TOKEN_VIEWS[title](row.columns));
  const LEGENDS = {
    "log-prob": "red: unlikely, full at -5", "gap of log-probs": "trainer less engine; red: the trainer's is higher, blue: lower",
    entropy: "red: high", advantage: "red: above 0, blue: below", mask: "red: not trained on", version: "red: older weights",
  };
  const draw = () => {
    if (!names().includes(name)) name = names()[0];
    const values = name ? TOKEN_VIEWS[name](row.columns) : [], numbers = values.filter((value) => value !== null);
    prompt.textContent = visible(row.prompt);
    legend.textContent = name ? `${LEGENDS[name]}; from ${format(Math.min(...numbers))} to ${format(Math.max(...numbers))}` : "no values";
    box.replaceChildren(...row.texts.map((text, index) => {
      const token = element("span", {tabIndex: index ? -1 : 0, textContent: visible(text) || "\u2205", title: describe(index)});
      token.style.background = name ? tokenColor(values[index], name, values) : "";
      token.onfocus = token.onpointerenter = () => { output.textContent = describe(index); };
      return token;
    }));
  };
  box.onkeydown = (event) => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!move) return;
    const next = move < 0 ? document.activeElement.previousElementSibling : document.activeElement.nextElementSibling;
    if (next) { event.preventDefault(); document.activeElement.tabIndex = -1; next.tabIndex = 0; next.focus(); }
  };
  const label = (item) => `step ${item.step}, prompt ${textOf(item.prompt_id)}, sample ${textOf(item.sample_id)}, score ${textOf(item.score)}`;
  section("Tokens", leftOut.length ? element("p", {className: "dim"}, `${leftOut.length} steps are left out.`) : null,
    element("div", {className: "bar"}, choice("response", rows.map((item, i) => [label(item), i]), (value) => { row = rows[value]; draw(); }),
      choice("color", Object.keys(TOKEN_VIEWS), (value) => { name = value; draw(); })), prompt, box, legend, output);
  draw();
}

// ---------------------------------------------------------------- samples

const MOST = 1000;  // rows drawn at a time
const filters = () => new URLSearchParams(location.hash.slice(1));

// Who wrote what: the model's tokens, which are trained on, and the environment's, which are masked.
function turnsOf(episode) {
  const parts = [];
  const add = (kind, text, title) => parts.push(element("span", {className: kind, textContent: visible(text), title: visible(title)}));
  episode.turns.forEach((turn, number) => {
    add("model", turn.text + (turn.is_complete ? "" : " ... cut"), `turn ${number}, ${turn.tokens} tokens of the model`);
    if (turn.reward) add("reward", ` [${+turn.reward.toPrecision(6)}]`, "reward of the turn");
    parts.push("\n");
    if (turn.observation === null) return;
    const contents = (typeof turn.observation === "string" ? [turn.observation]
      : turn.observation.map((message) => message.content)).flat();
    const text = contents.map((part) => part.image ? "" : part.text ?? part).join("\n");
    const calls = turn.calls.map((call) => `${call.name} ${call.outcome} ${call.seconds.toPrecision(3)} s ${call.error}`);
    add("environment", text, ["of the environment, masked", ...calls].join("\n"));
    for (const part of contents) if (part.image) parts.push(element("img", {src: part.image, alt: "image of the environment"}));
    parts.push("\n");
  });
  add("reward", `ended by ${episode.end}`, `${episode.seconds.toPrecision(3)} s`);
  return parts;
}

function responseOf(row, before) {
  if (row.others.episode) {
    try { return turnsOf(row.others.episode); } catch { return [visible(row.response)]; }  // its record is damaged
  }
  const parts = before === null ? null : wordDiff(visible(before.response), visible(row.response));
  return parts === null ? [visible(row.response)]
    : parts.map(([kind, text]) => kind === "same" ? text : element(kind, {textContent: text}));
}

function samplesSection(rows, leftOut) {
  const ofData = [...new Set(rows.flatMap((row) => Object.keys(row.others)))].filter((name) => !["episode", "pictures"].includes(name));
  const columns = [
    ["step", "step"], ["source", "source"], ["score", "reward"],
    ["prompt", "prompt"], ["response", "response"], ...ofData.map((name) => ["others." + name, name]),
  ].filter(([key]) => rows.some((row) => valueOf(row, key) !== null));
  const body = element("tbody", {}), count = element("p", {id: "count", aria: {live: "polite"}});
  const change = (values) => {
    const next = filters();
    for (const [name, value] of Object.entries(values)) value === "" ? next.delete(name) : next.set(name, value);
    location.hash = next.toString();
    show();
  };
  const cell = (row, name, before) => {
    const td = element("td", {}), value = valueOf(row, name);
    td.textContent = value === null ? "" : typeof value === "number" ? +value.toPrecision(6) : visible(value);
    td.className = typeof value === "number" ? "number" : "text";
    if (name === "prompt") {
      td.classList.add("prompt");
      td.replaceChildren(element("button", {type: "button", textContent: visible(value), title: "this prompt through all steps",
        onclick: () => change({exact: row.prompt, sort: "step"})}));
      for (const src of Array.isArray(row.others.pictures) ? row.others.pictures : [])
        td.prepend(element("img", {src, alt: "image of the prompt"}));
    }
    if (name === "response") {
      td.replaceChildren(...responseOf(row, before));
      if (!row.others.episode) td.title = visible(JSON.stringify({...row.others, pictures: undefined}, null, 1));
    }
    return td;
  };
  const form = element("form", {onsubmit: (event) => event.preventDefault()});
  const field = (name, text, type) => {
    const input = element("input", {name, type, step: "any", onchange: () => change({[name]: input.value})});
    form.append(element("label", {}, text, input));
  };
  for (const [name, text] of columns.filter(([key]) => RANGES.includes(key)))
    for (const end of ["min", "max"]) field(`${name}_${end}`, `${text} ${end}`, "number");
  for (const name of ["prompt", "response"]) field(name, `${name} contains`, "text");
  const source = choice("source", [["all", ""], ...new Set(rows.map((row) => row.source))], (value) => change({source: value}));
  source.querySelector("select").name = "source";
  form.append(source, element("button", {type: "button", textContent: "show all", onclick: () => { location.hash = ""; show(); }}));
  const head = element("tr", {}, columns.map(([key, text]) => {
    const th = element("th", {scope: "col"}, element("button", {type: "button", textContent: visible(text),
      onclick: () => change({sort: filters().get("sort") === key ? "-" + key : key})}));
    th.dataset.key = key;
    return th;
  }));
  function show() {
    const asked = filters(), sort = asked.get("sort") || "step", falls = sort.startsWith("-"), name = sort.replace(/^-/, "");
    const chosen = rows.filter((row) => passes(row, asked));
    chosen.sort((left, right) => compare(valueOf(left, name), valueOf(right, name), falls));
    const isOne = asked.get("exact") !== null;  // one prompt: each response with its differences from the one before
    body.replaceChildren(...chosen.slice(0, MOST).map((row, i) => element("tr", {}, columns.map(([key]) => cell(row, key,
      isOne && i > 0 && chosen[i - 1].source === row.source ? chosen[i - 1] : null)))));
    const cut = chosen.length > MOST ? `, the first ${MOST} shown` : "";
    const scores = chosen.map((row) => row.score).filter((score) => typeof score === "number");
    const mean = scores.length ? `, mean reward ${(scores.reduce((a, b) => a + b, 0) / scores.length).toFixed(4)}` : "";
    const diff = isOne ? "; green and red: differences from the row before" : "";
    count.textContent = `${chosen.length} of ${rows.length} rows${cut}${mean}${diff}`;
    for (const input of form.querySelectorAll("[name]")) input.value = asked.get(input.name) || "";
    for (const th of head.children)
      th.setAttribute("aria-sort", th.dataset.key !== name ? "none" : falls ? "descending" : "ascending");
  }
  section("Samples", leftOut.length ? element("p", {className: "dim"}, `${leftOut.length} steps are left out: samples/ of the run has all.`) : null,
    form, count, element("div", {className: "scroll", tabIndex: 0, role: "region", aria: {label: "samples"}},
      element("table", {id: "samples"}, element("thead", {}, head), body)));
  show();
  window.addEventListener("hashchange", show);
}

// ---------------------------------------------------------------- the page

function start() {
  const content = JSON.parse(document.getElementById("content").textContent);
  document.querySelector("noscript").remove();
  document.querySelector("header").append(element("nav", {aria: {label: "sections"}}));
  if (content.runs) {
    const decoded = new Map();
    const grids = (index) => {
      if (!decoded.has(index)) decoded.set(index, decode(content.grids[index]));
      return decoded.get(index);
    };
    for (const {axes} of content.runs)
      for (const [name, axis] of Object.entries(axes)) axes[name] = {steps: grids(axis.grid), values: decode(axis.values)};
    if (content.comparison) comparisonSections(content); else runSection(content.runs[0], content.written);
    curvesSection(content, grids);
    if (content.prompts) promptsSection(content.prompts);
  }
  if (content.tokens) tokensSection(content.tokens, content.tokens_left_out);
  if (content.samples) samplesSection(content.samples, content.samples_left_out || []);
  if (content.runs && !content.comparison) endSections(content.runs[0]);
  window.addEventListener("resize", () => redraw());
  window.addEventListener("beforeprint", () => redraw(true));
  window.addEventListener("afterprint", () => redraw(true));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
}

if (typeof document === "undefined") {
  module.exports = {decode, visible, format, lowerBound, nearest, interpolate, extent, pixelColumns, smooth, ticks, band, wordDiff,
    TOKEN_VIEWS, tokenColor, rateTable, compare, commonDirectory, passes};
} else start();
