// Reads specs as klamp.parse does, as far as guards with numbers and words go; whatever else gets a message.

class ReadError extends Error {}

function tokens(text) {
  const found = [], pattern = /\s*(?:([A-Za-z_]\w*)|((?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|'([^']*)'|"([^"]*)"|([()[\],=+\-]))/y;
  let at = 0;
  while (text.slice(at).trim()) {
    pattern.lastIndex = at;
    const match = pattern.exec(text);
    if (!match) throw new ReadError(`cannot read '${text.slice(at).trim()}'; write for example atr_grpo(delta=0.02)`);
    const [, name, number, single, double, sign] = match;
    if (name !== undefined) found.push({ kind: "name", value: name });
    else if (number !== undefined) found.push({ kind: "value", value: Number(number) });
    else if (sign !== undefined) found.push({ kind: sign, value: sign });
    else found.push({ kind: "value", value: single === undefined ? double : single });
    at = pattern.lastIndex;
  }
  return found;
}

// expression := term ("+" term)*; a call is { call, args, named }, a plain name { call, bare: true }.
function parseSpec(text) {
  const list = tokens(text);
  let at = 0;
  const peek = () => (list[at] ? list[at].kind : "end");
  const take = kind => {
    if (peek() !== kind) {
      const got = list[at] ? `'${list[at].value}'` : "the end";
      throw new ReadError(`expected ${kind === "name" ? "a name" : `'${kind}'`}, found ${got}; write for example grpo(epsilon=0.2)`);
    }
    return list[at++].value;
  };
  const value = () => {
    if (peek() === "value") return take("value");
    if (peek() === "-") {
      take("-");
      const inner = value();
      if (typeof inner !== "number") throw new ReadError("a minus sign stands before a number");
      return -inner;
    }
    if (peek() === "[" || peek() === "(") {
      const close = take(peek()) === "[" ? "]" : ")", items = [];
      while (peek() !== close) {
        items.push(value());
        if (peek() !== close) take(",");
      }
      take(close);
      return items;
    }
    const found = call();
    if (found.bare && found.call === "inf") return Infinity;
    return found.bare && ["None", "True", "False"].includes(found.call) ? { None: null, True: true, False: false }[found.call] : found;
  };
  const call = () => {
    const found = { call: take("name"), args: [], named: {}, bare: true };
    if (peek() !== "(") return found;
    take("(");
    found.bare = false;
    while (peek() !== ")") {
      if (peek() === "name" && list[at + 1] && list[at + 1].kind === "=") {
        const name = take("name");
        take("=");
        if (name in found.named) throw new ReadError(`${found.call} has ${name}= twice`);
        found.named[name] = value();
      } else {
        if (Object.keys(found.named).length) throw new ReadError(`${found.call}: plain values come before named ones`);
        found.args.push(value());
      }
      if (peek() !== ")") take(",");
    }
    take(")");
    return found;
  };
  const terms = [call()];
  while (peek() === "+") {
    take("+");
    terms.push(call());
  }
  if (peek() !== "end") throw new ReadError(`cannot read from '${list[at].value}' on; specs are added with +`);
  return terms;
}

const FORMS = {
  "p": p => p, "1 - p": p => 1 - p, "1 + p": p => 1 + p, "p / 2": p => p / 2, "1 / p": p => 1 / p,
  "exp(p)": p => Math.exp(p), "exp(-p)": p => Math.exp(-p),
};
const GUARD_DEFAULTS = {
  measure: null, ratio: "new/old", scope: "token", reduce: "mean", gate: "outward", action: "zero", cut_value: null,
  strength: 0, weight: "none", weight_low: 0, weight_high: Infinity, discount: 1,
};

function reader(data) {
  const shortly = text => (text.length > 60 ? text.slice(0, 57) + "..." : text);
  const inFull = text => `in full: klamp explain "${shortly(text)}"`;

  function nearest(name, known) {
    const distance = (a, b) => {
      let row = Array.from({ length: b.length + 1 }, (_, k) => k);
      for (let i = 1; i <= a.length; i += 1) {
        const next = [i];
        for (let j = 1; j <= b.length; j += 1) {
          next.push(Math.min(next[j - 1] + 1, row[j] + 1, row[j - 1] + (a[i - 1] === b[j - 1] ? 0 : 1)));
        }
        row = next;
      }
      return row[b.length];
    };
    const ranked = known.map(one => [one.startsWith(name) ? 0 : distance(name, one), one]).sort((a, b) => a[0] - b[0]);
    return ranked[0][0] <= 0.5 * name.length + 1 ? `did you mean ${ranked[0][1]}?` : `${known.length} names are known`;
  }

  // A radius as a number; one that moves has its value before the first step.
  function radius(value, who) {
    const start = value && value.call !== undefined && data.radii.includes(value.call)
      ? (value.named.start !== undefined ? value.named.start : value.args[0]) : value;
    if (typeof start !== "number" || Number.isNaN(start)) throw new ReadError(`${who} is not a number`);
    return start;
  }

  function setMeasure(guard, value) {
    const known = [...Object.keys(MEASURES), ...Object.keys(FAMILIES), ...Object.keys(BINARY)];
    let name = value, a = null;
    if (typeof value === "string" && value.includes("(")) value = parseSpec(value)[0];
    if (value && value.call !== undefined) {
      name = value.call;
      a = value.named.a !== undefined ? value.named.a : value.args[0];
    }
    if (!known.includes(name)) {
      throw new ReadError(`measure ${shortly(String(name))} is not one this page can read: ${nearest(String(name), known)} A function of your own: klamp explain`);
    }
    if (name in FAMILIES && !Number.isFinite(a)) throw new ReadError(`${name}(a) needs a number a, for example ${name}(2)`);
    guard.measure = name;
    guard.a = a;
    guard.kind = name in BINARY ? "binary" : guard.reduce.endsWith("_after") ? "after" : "interval";
    if (guard.kind === "binary") guard.cut_value = "zero";
  }

  function checked(guard, who) {
    if (guard.scope === "token" && guard.reduce !== "mean") throw new ReadError(`${who}: one token has nothing to reduce; give scope='sequence'`);
    if (guard.kind === "binary" && guard.scope !== "token") throw new ReadError(`${who}: a binary divergence is of single tokens`);
    if (guard.kind !== "interval" && guard.kind !== "binary") return guard;
    if (guard.measure) {
      for (const side of ["radius_low", "radius_high"]) {
        if (!(guard[side] >= 0)) throw new ReadError(`${who}: ${side === "radius_low" && guard.radius_low === guard.radius_high ? "radius" : side} must be a number >= 0`);
      }
    } else if (!(guard.ratio_low >= 0 && guard.ratio_low <= 1 && guard.ratio_high >= 1)) {
      throw new ReadError(`${who}: the interval [${shown(guard.ratio_low)}, ${shown(guard.ratio_high)}] must contain w = 1; bounds are ratios, 1 + epsilon rather than epsilon`);
    }
    return guard;
  }

  function ownGuard(term, text) {
    const guard = { ...GUARD_DEFAULTS, kind: "interval" }, given = { ...term.named };
    if (term.args.length) throw new ReadError("guard takes named arguments: guard(measure='k3', radius=0.02)");
    for (const name of ["ratio", "scope", "reduce", "gate", "action", "cut_value"]) {
      if (given[name] === undefined) continue;
      if (!data.words[name].includes(given[name])) {
        throw new ReadError(`${name}=${shortly(String(given[name].call || given[name]))} is not one this page can draw; it knows ${data.words[name].join(", ")}; ${inFull(text)}`);
      }
      guard[name] = given[name];
      delete given[name];
    }
    for (const name of ["strength", "discount"]) {
      if (given[name] !== undefined) guard[name] = radius(given[name], `${name}=`);
      delete given[name];
    }
    if (given.budget !== undefined) throw new ReadError(`a budget has no fixed interval: ${data.why.budget}; ${inFull(text)}`);
    if (given.region !== undefined) throw new ReadError(`region='nowhere' has no interval: ${data.why.nowhere}; ${inFull(text)}`);
    const names = ["measure", "radius", "radius_low", "radius_high", "ratio_low", "ratio_high"];
    const extra = Object.keys(given).find(name => !names.includes(name));
    if (extra) throw new ReadError(`guard has no argument ${extra}: ${nearest(extra, names)}`);
    const radii = ["radius", "radius_low", "radius_high"].filter(name => given[name] !== undefined);
    const ratios = ["ratio_low", "ratio_high"].filter(name => given[name] !== undefined);
    if (given.measure === undefined) {
      if (radii.length) throw new ReadError("a radius needs a measure: guard(measure='k3', radius=0.02)");
      if (!ratios.length) throw new ReadError("guard needs a region: guard(measure='k3', radius=0.02) or guard(ratio_low=0.8, ratio_high=1.2)");
      guard.ratio_low = given.ratio_low === undefined ? 0 : radius(given.ratio_low, "ratio_low=");
      guard.ratio_high = given.ratio_high === undefined ? Infinity : radius(given.ratio_high, "ratio_high=");
    } else {
      if (ratios.length) throw new ReadError("give a measure with a radius, or ratio_low and ratio_high, not both");
      if (!radii.length) throw new ReadError("a measure needs a radius: guard(measure='k3', radius=0.02)");
      if (given.radius !== undefined && radii.length > 1) throw new ReadError("give radius for both sides, or radius_low and radius_high, not both");
      setMeasure(guard, given.measure);
      const both = given.radius === undefined ? Infinity : radius(given.radius, "radius=");
      guard.radius_low = given.radius_low === undefined ? both : radius(given.radius_low, "radius_low=");
      guard.radius_high = given.radius_high === undefined ? both : radius(given.radius_high, "radius_high=");
    }
    if (guard.cut_value === null) guard.cut_value = guard.kind === "interval" ? "bound" : "zero";
    return [checked(guard, "guard")];
  }

  function ofPreset(term, text) {
    const known = data.presets[term.call], guards = known.guards.map(one => ({ ...GUARD_DEFAULTS, ...one }));
    const given = { ...term.named };
    if (term.args.length > known.parameters.length) throw new ReadError(`${term.call} takes at most ${known.parameters.length} arguments`);
    term.args.forEach((value, k) => {
      if (known.parameters[k] in given) throw new ReadError(`${term.call} has ${known.parameters[k]}= twice`);
      given[known.parameters[k]] = value;
    });
    for (const [name, value] of Object.entries(given)) {
      if (name === "aggregate" || name === "penalty" || known.idle.includes(name)) continue;
      if (!known.parameters.includes(name)) throw new ReadError(`${term.call} has no argument ${name}: ${nearest(name, [...known.parameters, "aggregate", "penalty"])}`);
      if (name === known.measure) {
        guards.forEach(guard => setMeasure(guard, value));
      } else if (known.forms[name]) {
        const number = radius(value, `${term.call}: ${name}=`);
        for (const [index, field, form] of known.forms[name]) guards[index][field] = FORMS[form](number);
      } else if (known.words[name] && typeof value === "string" && known.words[name][value]) {
        known.words[name][value].forEach((change, index) => Object.assign(guards[index], change));
      } else {
        const words = Object.keys(known.words[name] || {});
        throw new ReadError(`${name}= of ${term.call} is beyond what this page can read${words.length ? ` (it knows ${words.join(", ")})` : ""}; ${inFull(text)}`);
      }
    }
    return guards.map(guard => checked(guard, term.call));
  }

  // A factor's weight: of the ratio itself, or another function of it.
  function ownFactor(term) {
    const found = { ratio: "new/old", scope: "token", reduce: "mean", plain: !term.args.length };
    for (const [name, value] of Object.entries(term.named)) {
      if (["ratio", "scope", "reduce"].includes(name) && data.words[name].includes(value)) found[name] = value;
      else found.plain = false;
    }
    return found;
  }

  function weigh(guards, factors) {
    for (const factor of factors) {
      for (const guard of guards.filter(one => ["ratio", "scope", "reduce"].every(key => one[key] === factor[key]))) {
        guard.weight = guard.weight === "none" && factor.plain ? "ratio" : "other";
      }
    }
  }

  // The guards of a spec. Throws ReadError with one sentence that says what can be read instead.
  return function read(text) {
    if (!text.trim()) throw new ReadError("write a spec, for example atr_grpo(delta=0.02)");
    const guards = [], bare = [], terms = parseSpec(text);
    for (const term of terms) {
      const found = term.call === "guard" ? ownGuard(term, text)
        : Object.hasOwn(data.presets, term.call) ? ofPreset(term, text) : data.parts.includes(term.call) ? [] : null;
      if (found === null) throw new ReadError(`unknown name ${shortly(term.call)}: ${nearest(term.call, [...Object.keys(data.presets), "guard"])}`);
      guards.push(...found);
      if (!found.length) bare.push(term.call);
    }
    weigh(guards, terms.filter(term => term.call === "factor").map(ownFactor));
    const drawn = guards.filter(guard => guard.kind === "interval" || guard.kind === "binary");
    if (!drawn.length) {
      const why = guards.length ? data.why[guards[0].kind] : "it has no guard, so nothing is cut";
      throw new ReadError(`${bare[0] || "this spec"} has no interval: ${why}; ${inFull(text)}`);
    }
    return drawn;
  };
}
