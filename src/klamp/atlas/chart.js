// Plain SVG: the map panels with labels that do not overlap, and the three small charts of one interval.

const SVG = "http://www.w3.org/2000/svg";

function el(name, attributes = {}, text = null) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  return node;
}

// A number as a reader writes it, with `digits` significant digits and a real minus sign.
function shown(value, digits = 4) {
  if (value === Infinity) return "\u221e";
  if (value === -Infinity) return "\u2212\u221e";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e6 || size < 1e-4 ? value.toExponential(Math.min(digits, 6) - 1).replace(/\.?0+e/, "e") : String(Number(value.toPrecision(digits)));
  return text.replace("e+", "e").replace(/-/g, "\u2212");
}

const scale = (low, high, start, stop) => v => start + (v - low) / (high - low) * (stop - start);

function niceTicks(low, high, count) {
  const raw = (high - low) / count, unit = 10 ** Math.floor(Math.log10(raw));
  const step = unit * [1, 2, 5, 10].find(m => m * unit >= raw * 0.999);
  const out = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k += 1) out.push(Number((k * step).toPrecision(9)));
  return out;
}

function logTicks(low, high, count) {
  for (const digits of [[1, 2, 5], [1, 3], [1]]) {
    const out = [];
    for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k += 1) {
      for (const digit of digits) out.push(Number(`${digit}e${k}`));
    }
    const within = out.filter(v => v >= low * 0.999 && v <= high * 1.001);
    if (within.length <= count || digits.length === 1) return within;
  }
  return [];
}

const path = points => points.map(([x, y], k) => `${k ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");
const overlap = (a, b) => Math.max(0, Math.min(a.x1, b.x1) - Math.max(a.x0, b.x0)) * Math.max(0, Math.min(a.y1, b.y1) - Math.max(a.y0, b.y0));

// --- labels -----------------------------------------------------------------------------------------------------

const away = (box, x, y) => Math.hypot(Math.max(box.x0 - x, 0, x - box.x1), Math.max(box.y0 - y, 0, y - box.y1));

// Puts one text near (x, y): the place that covers least of `taken`, is no nearer to another mark, and is near; a
// text that lies further off gets a line.
function placeLabel(layer, text, at, taken, frame) {
  const node = el("text", { class: "label" }, text);
  layer.append(node);
  const w = node.getComputedTextLength() + 6, h = 16;
  let best = null;
  for (const far of [13, 24, 38, 54, 74, 98, 126, 158]) {
    for (let k = 0; k < 16; k += 1) {
      const angle = k * Math.PI / 8, x = at.x + far * Math.cos(angle), y = at.y + far * Math.sin(angle);
      const side = Math.cos(angle) > 0.3 ? 0 : Math.cos(angle) < -0.3 ? 1 : 0.5;
      const box = { x0: x - side * w, x1: x + (1 - side) * w, y0: y - h / 2, y1: y + h / 2 };
      const out = Math.max(0, frame.x0 - box.x0) + Math.max(0, box.x1 - frame.x1) + Math.max(0, frame.y0 - box.y0) + Math.max(0, box.y1 - frame.y1);
      const covered = taken.reduce((sum, other) => sum + (other.weight || 1) * overlap(box, other), 0);
      const rival = Math.min(...taken.filter(one => one.mark && Math.hypot(one.mark.x - at.x, one.mark.y - at.y) > 1).map(one => away(box, one.mark.x, one.mark.y)));
      const doubt = Math.max(0, away(box, at.x, at.y) + 8 - rival);
      const cost = 50 * out + covered + 0.35 * far + 1.2 * doubt + (side === 0.5 ? 3 : 0) + (side === 1 ? 1 : 0);
      if (best === null || cost < best.cost) best = { cost, box, side, far, x, y };
    }
  }
  node.setAttribute("x", (best.box.x0 + 3).toFixed(1));
  node.setAttribute("y", (best.box.y0 + 12).toFixed(1));
  if (best.far > 20) {
    layer.prepend(el("path", { class: "leader", d: path([[at.x, at.y], [best.x, best.y]]) }));
  }
  taken.push({ ...best.box, weight: 40 });
  return node;
}

// --- the map ----------------------------------------------------------------------------------------------------

const CURVES = [-3000, -1000, -300, -100, -30, -10, -5, -2, -1, 0, 1, 2, 5, 10, 30, 100, 300, 1000];
const TVS = [1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3];
const STRIP = 34;

// The window of a panel: every point and the current interval inside, with some air.
function windowOf(points, current) {
  const both = points.filter(p => Number.isFinite(p.logLow) && Number.isFinite(p.logHigh));
  const all = current && width(current) > 1e-9 && width(current) < 200 ? [...both, current] : both;  // others at the edge
  const w = all.map(p => Math.log10(width(p))), t = all.map(tilt);
  const pad = 0.22 * Math.max(0.9, Math.max(...w) - Math.min(...w));
  return {
    left: Math.min(...w) - pad, right: Math.max(...w) + pad,
    bottom: Math.max(-1, Math.min(-0.3, ...t.map(v => v - 0.12))), top: Math.min(1, Math.max(0.3, ...t.map(v => v + 0.12))),
  };
}

function curveOf(a, view) {
  const points = [], low = 10 ** view.left, high = 10 ** view.right;
  const steps = 48, first = Math.log(low * low / 32), last = Math.log(Math.max(high * high, high) * 8);
  for (let k = 0; k <= steps; k += 1) {
    const radius = Math.exp(first + (last - first) * k / steps);
    const r = interval({ measure: "power", a, radius_low: radius, radius_high: radius });
    if (!Number.isFinite(r.logLow) || !(width(r) > 0)) break;
    points.push([Math.log10(width(r)), tilt(r)]);
    if (width(r) > 1.5 * high || Math.abs(tilt(r)) > 0.999) break;
  }
  return points;
}

function tvCurve(tv, view) {
  const points = [];
  for (let k = 0; k <= 24; k += 1) {
    const t = view.bottom + (view.top - view.bottom) * k / 24;
    let low = 1e-9, high = 1e3;
    for (let n = 0; n < 70; n += 1) {
      const middle = Math.sqrt(low * high), r = fromMap(middle, t);
      if (worstTV(r.logLow, r.logHigh) < tv) low = middle; else high = middle;
    }
    points.push([Math.log10(low), t]);
  }
  return points;
}

// Where a polyline leaves the window, and the part inside it.
function inWindow(points, view) {
  const inside = ([x, y]) => x >= view.left && x <= view.right && y >= view.bottom && y <= view.top;
  const last = points.findLastIndex(inside);
  if (last < 0) return null;
  const end = points[last], next = points[last + 1] || end;
  let share = 1;
  for (const [k, least, most] of [[0, view.left, view.right], [1, view.bottom, view.top]]) {
    const step = next[k] - end[k];
    if (step > 0) share = Math.min(share, (most - end[k]) / step);
    if (step < 0) share = Math.min(share, (least - end[k]) / step);
  }
  return [end[0] + share * (next[0] - end[0]), end[1] + share * (next[1] - end[1])];
}

function drawGrid(svg, size, view, id) {
  const { W, H } = size, left = 44, right = W - STRIP - 8, top = 24, bottom = H - 42;
  const x = scale(view.left, view.right, left, right), y = scale(view.bottom, view.top, bottom, top);
  const taken = [];
  svg.append(el("rect", { class: "frame", x: left, y: top, width: right - left, height: bottom - top }));
  svg.append(el("rect", { class: "strip", x: right + 8, y: top, width: STRIP, height: bottom - top, rx: 4 }));
  svg.append(el("text", { class: "tick", x: right + 8 + STRIP / 2, y: top - 8, "text-anchor": "middle" }, "\u221e"));
  for (const w of logTicks(10 ** view.left, 10 ** view.right, Math.max(3, Math.floor((right - left) / 64)))) {
    const at = x(Math.log10(w));
    svg.append(el("line", { class: "axis", x1: at, x2: at, y1: bottom, y2: bottom + 4 }));
    svg.append(el("text", { class: "tick", x: at, y: bottom + 17, "text-anchor": "middle" }, shown(w)));
  }
  for (const t of niceTicks(view.bottom, view.top, Math.max(3, Math.floor((bottom - top) / 50)))) {
    svg.append(el("line", { class: t === 0 ? "axis" : "grid", x1: left, x2: right, y1: y(t), y2: y(t) }));
    svg.append(el("text", { class: "tick", x: left - 7, y: y(t) + 4, "text-anchor": "end" }, shown(t)));
    taken.push({ x0: 0, x1: left - 4, y0: y(t) - 8, y1: y(t) + 8, weight: 3 });
  }
  svg.append(el("text", { class: "axis-title", x: left, y: H - 6 }, "log width  log(u / l)"));
  svg.append(el("text", { class: "axis-title", x: 4, y: 14 }, "tilt"));
  const clip = el("clipPath", { id });
  clip.append(el("rect", { x: left, y: top, width: right - left, height: bottom - top }));
  svg.append(clip);
  const lines = el("g", { "clip-path": `url(#${id})` }), texts = el("g");
  svg.append(lines, texts);
  const write = (text, at, anchor, kind) => {
    const node = el("text", { class: `curve-label ${kind}`, x: at[0].toFixed(1), y: at[1].toFixed(1), "text-anchor": anchor }, text);
    texts.append(node);
    const w = node.getComputedTextLength(), x0 = at[0] - (anchor === "end" ? w : anchor === "middle" ? w / 2 : 0);
    const box = { x0: x0 - 5, x1: x0 + w + 5, y0: at[1] - 12, y1: at[1] + 4, weight: 3 };
    const out = box.x0 < left - 1 || box.x1 > right + 6 || box.y0 < top - 22 || box.y1 > bottom + 2;
    if (out || taken.some(other => overlap(box, other) > 0)) { node.remove(); return; }
    taken.push(box);
  };
  for (const tv of TVS) {
    const points = tvCurve(tv, view);
    lines.append(el("path", { class: "tv", d: path(points.map(([u, t]) => [x(u), y(t)])) }));
    const end = points[points.length - 1];
    if (end[0] > view.left && end[0] < view.right) write(`TV ${shown(tv)}`, [x(end[0]), top - 8], "middle", "of-tv");
  }
  for (const a of [-1, 0, 2, -2, ...CURVES.filter(one => ![-1, 0, 2, -2].includes(one))]) {
    const points = curveOf(a, view);
    if (points.length < 2) continue;
    lines.append(el("path", { class: a === 0 ? "power zero" : "power", d: path(points.map(([u, t]) => [x(u), y(t)])) }));
    const exit = inWindow(points, view);
    if (!exit) continue;
    const at = [x(exit[0]), y(exit[1])], text = `a = ${shown(a)}`;
    if (at[0] > right - 30) write(text, [right - 4, Math.max(top + 13, Math.min(bottom - 6, at[1] + (a < 0 ? -4 : 11)))], "end", "of-a");
    else write(text, [at[0] - 5, exit[1] > 0 ? top + 13 : bottom - 6], "end", "of-a");
  }
  return { x, y, left, right, top, bottom, taken };
}

const SHAPES = {
  both: r => `M${-r},0a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0Z`,
  sampler: r => `M0,${-1.25 * r}L${1.25 * r},0L0,${1.25 * r}L${-1.25 * r},0Z`,
  cap: r => `M0,${-1.2 * r}L${1.15 * r},${0.85 * r}L${-1.15 * r},${0.85 * r}Z`,
  floor: r => `M0,${1.2 * r}L${1.15 * r},${-0.85 * r}L${-1.15 * r},${-0.85 * r}Z`,
};

function shapeOf(point) {
  if (point.logLow === -Infinity) return "cap";
  if (point.logHigh === Infinity) return "floor";
  return point.members.every(one => !one.ratio.startsWith("new/")) ? "sampler" : "both";
}

// Where the points lie: on the plane, or one under another in the strip of intervals with one bound.
function positions(points, grid) {
  const ends = points.filter(p => !Number.isFinite(width(p)));
  return points.map(point => {
    if (Number.isFinite(width(point))) {
      const x = grid.x(Math.log10(width(point))), y = grid.y(tilt(point));
      return { x: Math.max(grid.left, Math.min(grid.right, x)), y: Math.max(grid.top, Math.min(grid.bottom, y)) };
    }
    const k = ends.indexOf(point), step = (grid.bottom - grid.top) / (ends.length + 1);
    return { x: grid.right + 8 + STRIP / 2, y: grid.top + step * (k + 1) };
  });
}

function nameOf(point, room) {
  const names = [...new Set(point.members.map(one => one.name))], letters = room > 520 ? 38 : room > 400 ? 24 : 16;
  let head = 1;
  while (head < names.length && head < 3 && names.slice(0, head + 1).join(", ").length <= letters) head += 1;
  const rest = names.length - head;
  const bounds = point.logLow === -Infinity ? ` w \u2264 ${shown(point.high)}` : point.logHigh === Infinity ? ` w \u2265 ${shown(point.low, 3)}` : "";
  return names.slice(0, head).join(", ") + (rest ? ` +${rest}` : "") + bounds;
}

// --- small charts -----------------------------------------------------------------------------------------------

// keep, weight and value of a token at log-ratio x with advantage A = +1 or -1: the guards of one ratio, folded.
function outcome(guards, x, A) {
  const w = Math.exp(x), first = guards[0];
  const weight = first.weight === "ratio" ? w : first.weight === "cap" ? Math.min(Math.max(w, first.weight_low), first.weight_high) : 1;
  const surrogate = first.ratio.startsWith("new/") && first.weight === "ratio" ? w : first.ratio.startsWith("new/") ? weight * x : weight;
  let value = null, zero = false, pull = 1, cut = false;
  for (const guard of guards) {
    const down = x < guard.logLow, up = x > guard.logHigh;
    const applies = { outward: A > 0 ? x > 0 : x < 0, always: true, positive: A > 0, negative: A < 0 }[guard.gate];
    if (!(down || up) || !applies) continue;
    cut = true;
    if (guard.cut_value === "zero") zero = true;
    const edge = up ? guard.high : guard.low, roll = guard.action === "rollback";
    const own = roll ? (1 + guard.strength) * edge - guard.strength * w : edge;
    value = value === null ? own : A > 0 ? Math.min(own, value) : Math.max(own, value);
    if (roll) pull = -guard.strength;
  }
  const rolls = cut && pull !== 1;
  return { J: A * (zero ? 0 : cut ? value : surrogate), g: cut && !rolls ? 0 : A * weight * (rolls ? pull : 1) };
}

function chartFrame(svg, size, ends, label) {
  const { W, H } = size, left = 38, right = W - 10, top = 12, bottom = H - 34;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  svg.setAttribute("aria-label", label);
  const x = scale(ends.x0, ends.x1, left, right), y = scale(ends.y0, ends.y1, bottom, top);
  return { x, y, left, right, top, bottom };
}

function ratioTicks(svg, frame, marks) {
  const placed = [];
  for (const [at, text, strong] of marks) {
    const node = el("text", { class: strong ? "tick strong" : "tick", x: at.toFixed(1), y: frame.bottom + 16, "text-anchor": "middle" }, text);
    svg.append(node);
    const half = node.getComputedTextLength() / 2 + 4;
    if (placed.some(([a, b]) => at - half < b && at + half > a)) { node.remove(); continue; }
    placed.push([at - half, at + half]);
    svg.append(el("line", { class: "axis", x1: at, x2: at, y1: frame.bottom, y2: frame.bottom + 4 }));
  }
}

// J or g over log w for A = +1 (solid) and A = -1 (dashed), the interval shaded.
function drawCurve(svg, size, guards, which, title) {
  const chosen = guards[0], finite = [chosen.logLow, chosen.logHigh].filter(Number.isFinite).map(Math.abs);
  const others = guards.flatMap(one => [one.logLow, one.logHigh]).filter(Number.isFinite).map(v => 1.3 * Math.abs(v));
  const reach = Math.min(Math.max(1e-12, ...(finite.length ? finite : [1]).map(v => 1.9 * v), ...others), 6), x0 = -reach, x1 = reach;
  const knots = guards.flatMap(g => [g.logLow, g.logHigh]).filter(k => k > x0 && k < x1).flatMap(k => [k * (1 - 1e-9), k * (1 + 1e-9)]);
  const xs = [...Array.from({ length: 121 }, (_, k) => x0 + (x1 - x0) * k / 120), ...knots].sort((a, b) => a - b);
  const series = [1, -1].map(A => xs.map(x => outcome(guards, x, A)[which]));
  const all = series.flat();
  const y0 = Math.min(0, ...all), y1 = Math.max(0, ...all);
  const pad = 0.08 * (y1 - y0 || 1);
  const frame = chartFrame(svg, size, { x0, x1, y0: y0 - pad, y1: y1 + pad }, title);
  const { x, y } = frame, from = x(Math.max(x0, chosen.logLow)), to = x(Math.min(x1, chosen.logHigh));
  svg.append(el("rect", { class: "region", x: from, y: frame.top, width: Math.max(0, to - from), height: frame.bottom - frame.top }));
  for (const tick of niceTicks(y0 - pad, y1 + pad, 4)) {
    svg.append(el("line", { class: tick === 0 ? "axis" : "grid", x1: frame.left, x2: frame.right, y1: y(tick), y2: y(tick) }));
    svg.append(el("text", { class: "tick", x: frame.left - 5, y: y(tick) + 4, "text-anchor": "end" }, shown(tick, 3)));
  }
  for (const side of [chosen.logLow, chosen.logHigh]) {
    if (Number.isFinite(side)) svg.append(el("line", { class: "edge", x1: x(side), x2: x(side), y1: frame.top, y2: frame.bottom }));
  }
  const digits = reach < 0.01 ? 5 : 3;
  ratioTicks(svg, frame, [...[chosen.logLow, chosen.logHigh].filter(k => Number.isFinite(k) && k !== 0).map(k => [x(k), shown(Math.exp(k), digits), true]), [x(0), "1", false]]);
  series.forEach((values, k) => svg.append(el("path", { class: k ? "line two" : "line one", d: path(xs.map((at, n) => [x(at), y(values[n])])) })));
  svg.append(el("text", { class: "axis-title", x: frame.right, y: frame.bottom + 30, "text-anchor": "end" }, `w = ${chosen.ratio}, log scale`));
}

// New probability that is allowed, over the old one: the band of the interval, and the curves of binary divergences.
function drawAllowed(svg, size, guard, others) {
  const frame = chartFrame(svg, size, { x0: 0, x1: 1, y0: 0, y1: 1 }, "Permitted new probability of a token over its old probability");
  const { x, y } = frame, ps = Array.from({ length: 141 }, (_, k) => 0.0005 + 0.999 * k / 140);
  for (const tick of [0, 0.25, 0.5, 0.75, 1]) {
    svg.append(el("line", { class: tick ? "grid" : "axis", x1: frame.left, x2: frame.right, y1: y(tick), y2: y(tick) }));
    svg.append(el("text", { class: "tick", x: frame.left - 5, y: y(tick) + 4, "text-anchor": "end" }, shown(tick)));
    svg.append(el("text", { class: "tick", x: x(tick), y: frame.bottom + 16, "text-anchor": "middle" }, shown(tick)));
  }
  if (guard) {
    const at = (bound, fallback) => ps.map(p => [x(p), y(Math.min(1, Number.isFinite(bound) ? p * Math.exp(bound) : fallback))]);
    const lower = at(guard.logLow, 0), upper = at(guard.logHigh, 1);
    svg.append(el("path", { class: "region", d: path([...lower, ...upper.slice().reverse()]) + "Z" }));
    svg.append(el("path", { class: "line one", d: path(lower) }), el("path", { class: "line one", d: path(upper) }));
  }
  svg.append(el("path", { class: "same", d: path([[x(0), y(0)], [x(1), y(1)]]) }));
  for (const other of others) {
    const pairs = ps.map(p => [p, allowed(other.measure, p, other.radius_low, other.radius_high)]);
    for (const side of [0, 1]) svg.append(el("path", { class: `line over ${other.tone}`, d: path(pairs.map(([p, q]) => [x(p), y(q[side])])) }));
  }
  svg.append(el("text", { class: "axis-title", x: frame.right, y: frame.bottom + 30, "text-anchor": "end" }, "old probability"));
}
