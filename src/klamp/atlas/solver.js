"use strict";
// The measures of klamp.measures as functions of x = log w, normalised to f''(1) = 1, their bounds, and the
// coordinates of an interval. Written without cancellation near x = 0; each bound is bisected to the last digits.

const MAX = Number.MAX_VALUE, TOP = Math.log(MAX), LN2 = Math.LN2;

const SERIES = (() => {
  const out = [];
  for (let k = 2, factorial = 2; k < 16; k += 1, factorial *= k) out.push(1 / factorial);
  return out;
})();

function k3(x) {  // e^x - 1 - x
  if (!(Math.abs(x) < 0.5)) return Math.expm1(x) - x;
  let sum = 0;
  for (let k = SERIES.length - 1; k >= 0; k -= 1) sum = sum * x + SERIES[k];
  return x * x * sum;
}

function power(x, a) {  // (w^a - 1 - a (w - 1)) / (a (a - 1))
  if (a > 0.5) {  // f_a(w) = w f_{1-a}(1/w)
    const y = Math.max(x, -TOP / 1.01);
    return Math.exp(y) * power(-y, 1 - a);
  }
  if (Math.abs(a) < 1e-290) return k3(x);
  if (Math.abs(x) <= 1) return (k3(x) - k3(a * x) / a) / (1 - a);
  if (x > TOP) return Infinity;
  return (Math.expm1(x) - Math.expm1(a * x) / a) / (1 - a);
}

function renyi(x, a) {  // log(w^a - a (w - 1)) / (a (a - 1))
  const c = a * (a - 1);
  if (c === 0) return power(x, a);
  const plain = power(x, a), inner = c * plain, large = 0.4 * TOP;
  if (Math.abs(inner) < 1e-17) return plain;
  if (c < 0) return inner > -1 ? Math.log1p(inner) / c : Infinity;
  if (a * x > large) return (a * x + Math.log1p(a * (Math.exp(-a * x) - Math.exp((1 - a) * x)))) / c;
  if (x > large && a < 0) return (x + Math.log(-a) + Math.log1p(-Math.exp(-x) - Math.exp((a - 1) * x) / a)) / c;
  return Math.log1p(inner) / c;
}

function js(x) {  // [w log(2w/(1+w)) + log(2/(1+w))] / 2
  if (x < -1) {
    const v = Math.exp(x);
    return 0.5 * ((v > 0 ? v * x : 0) - (1 + v) * (Math.log1p(v) - LN2));
  }
  if (x > 1) {
    const tail = Math.log1p(Math.exp(-x));
    return 0.5 * (Math.exp(x) * (LN2 - tail) + LN2 - x - tail);
  }
  const half = 0.5 * x, spread = Math.log1p(2 * Math.sinh(0.5 * half) ** 2);
  return 0.5 * Math.exp(half) * (x * Math.sinh(half) - 2 * Math.cosh(half) * spread);
}

const MEASURES = {
  ratio_dev: x => Math.abs(Math.expm1(x)),
  tv: x => 0.5 * Math.abs(Math.expm1(x)),
  log_ratio: x => Math.abs(x),
  k1: x => -x,
  k2: x => 0.5 * x * x,
  k3,
  k3_flipped: x => k3(-x),
  k3_reverse: x => power(x, 1),
  jeffreys: x => 0.5 * x * Math.expm1(x),
  js: x => 4 * js(x),
  hellinger2: x => 2 * Math.expm1(0.5 * x) ** 2,
  pearson: x => 0.5 * Math.expm1(x) ** 2,
  neyman: x => 2 * Math.sinh(0.5 * x) ** 2,
  lecam: x => Math.expm1(x) * Math.tanh(0.5 * x),
  sym_chi2: x => Math.sinh(0.5 * x) ** 2 * (1 + Math.exp(x)),
};
const FAMILIES = { power, renyi };

function measureOf(name, a) {
  return name in FAMILIES ? x => FAMILIES[name](x, a) : MEASURES[name];
}

// |x| at which D(sign |x|) = radius; Infinity where the measure never exceeds the radius on that side.
function bound(D, sign, radius) {
  if (radius === 0 || radius === Infinity) return radius;
  if (D(sign * MAX) <= radius) return Infinity;
  const inside = t => D(sign * t) <= radius;
  let low = 0, high = Math.min(1, Math.sqrt(2) * Math.sqrt(radius));
  for (let factor = 2; inside(high); factor = Math.min(factor * factor, 1e150)) {
    if (high === MAX) return Infinity;
    low = high;
    high = Math.min(high * factor, MAX);
  }
  for (let factor = 2; low === 0; factor = Math.min(factor * factor, 1e150)) {
    if (inside(high / factor)) low = high / factor; else high /= factor;
    if (high < 1e-300) return 0;
  }
  while (high - low > 1e-15 * high) {
    const middle = high > 2 * low ? Math.sqrt(low) * Math.sqrt(high) : low + 0.5 * (high - low);
    if (middle <= low || middle >= high) break;
    if (inside(middle)) low = middle; else high = middle;
  }
  return 0.5 * low + 0.5 * high;
}

// The bounds of log w of a guard: from its measure and radii, or from its ratios.
function interval(guard) {
  const D = guard.measure ? measureOf(guard.measure, guard.a) : null;
  const logLow = D ? -bound(D, -1, guard.radius_low) : guard.ratio_low > 0 ? Math.log(guard.ratio_low) : -Infinity;
  const logHigh = D ? bound(D, 1, guard.radius_high) : guard.ratio_high < Infinity ? Math.log(guard.ratio_high) : Infinity;
  return {
    logLow, logHigh,
    low: D ? Math.exp(logLow) : guard.ratio_low,
    high: D ? (logHigh < TOP ? Math.exp(logHigh) : Infinity) : guard.ratio_high,
  };
}

// The one (a, radius) of the power family with this interval; null unless it has two bounds around w = 1.
function coordinates(logLow, logHigh) {
  if (!(-Infinity < logLow && logLow < 0 && logHigh > 0 && logHigh < Infinity)) return null;
  const excess = a => {
    const up = power(logHigh, a), down = power(logLow, a);
    return down > 0 ? Math.log(up / down) : Infinity;
  };
  const start = excess(0);
  let a = 0;
  if (start !== 0) {
    const sign = start < 0 ? 1 : -1;
    let low = 0, high = 1;
    while (sign * excess(sign * high) < 0) {
      low = high;
      high *= 2;
      if (high > 1e300) return null;
    }
    for (let k = 0; k < 200 && high - low > 1e-15 * high; k += 1) {
      const middle = 0.5 * (low + high);
      if (sign * excess(sign * middle) < 0) low = middle; else high = middle;
    }
    a = Number((sign * 0.5 * (low + high)).toPrecision(13));
    if (Math.abs(a) < 1e-11) a = 0;
  }
  const radius = power(logHigh, a);
  return radius > 0 && radius < Infinity ? { a, radius } : null;
}

// The largest TV(old, new) of two policies whose ratio stays inside: (u - 1)(1 - l) / (u - l).
function worstTV(logLow, logHigh) {
  const up = Math.expm1(logHigh), down = -Math.expm1(logLow);
  return up === Infinity ? down : up * down / (up + down);
}

// Log width and tilt of an interval, and back.
const width = r => r.logHigh - r.logLow;
const tilt = r => (r.logHigh + r.logLow) / (r.logHigh - r.logLow);
const fromMap = (w, t) => ({ logLow: -0.5 * w * (1 - t), logHigh: 0.5 * w * (1 + t) });

// Divergences of the split {this token, any other}, from its probability p under the old and q under the new policy.
const BINARY = {
  binary_tv: (p, q) => Math.abs(q - p),
  binary_kl_old_new: (p, q) => p * k3(Math.log(q / p)) + (1 - p) * k3(Math.log1p((p - q) / (1 - p))),
  binary_kl_new_old: (p, q) => q * k3(Math.log(p / q)) + (1 - q) * k3(Math.log((1 - p) / (1 - q))),
};

// [lowest, highest] new probability that {D <= radius} allows to a token of old probability p.
function allowed(measure, p, radiusLow, radiusHigh) {
  const D = BINARY[measure];
  const reach = (end, radius) => {
    let inside = p, outside = end;
    if (D(p, end === 0 ? 1e-300 : 1 - 1e-16) <= radius) return end;
    for (let k = 0; k < 80; k += 1) {
      const middle = 0.5 * (inside + outside);
      if (D(p, middle) <= radius) inside = middle; else outside = middle;
    }
    return 0.5 * (inside + outside);
  };
  return [reach(0, radiusLow), reach(1, radiusHigh)];
}
