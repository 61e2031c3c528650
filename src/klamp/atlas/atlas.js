// The page: one interval is chosen at any time, by a point, a click on the plane, the sliders, or typing.

(() => {
  const $ = id => document.getElementById(id);
  const revive = (key, value) => (value === "inf" ? Infinity : value === "-inf" ? -Infinity : value);
  const data = JSON.parse($("data").textContent, revive);
  const read = reader(data);
  data.points.forEach(point => { point.logLow = point.log_low; point.logHigh = point.log_high; });

  // text: the spec; guards: its drawn guards; at: the chosen one; where: its (a, radius) in the power family.
  const state = { text: "", guards: [], at: 0, where: null, scope: "token", name: null };
  const overlays = new Map();
  const plain = value => String(Number(value.toPrecision(12)));

  // --- what is chosen ---------------------------------------------------------------------------------------------

  function choose(text, { index = null, from = "" } = {}) {
    const guards = read(text).map(guard => (guard.kind === "interval" ? { ...guard, ...interval(guard) } : guard));
    state.text = text.trim();
    state.guards = guards;
    state.at = index === null ? firstOf(guards) : index;
    settle(from);
  }

  // The guard to begin with: an interval, best with two bounds, best of the new policy.
  function firstOf(guards) {
    const rank = guard => (guard.kind !== "interval" ? 4 : 0) + (Number.isFinite(width(guard)) ? 0 : 2) + (guard.ratio.startsWith("new/") ? 0 : 1);
    return guards.map(rank).reduce((best, one, k, all) => (one < all[best] ? k : best), 0);
  }

  function settle(from) {
    const guard = state.guards[state.at];
    if (guard.kind === "interval") state.scope = guard.scope;
    state.where = guard.kind !== "interval" ? null
      : powerOf(guard) !== null && guard.radius_low === guard.radius_high && guard.radius_low > 0
        ? { a: powerOf(guard), radius: guard.radius_low } : coordinates(guard.logLow, guard.logHigh);
    say("");
    render(from);
  }

  // The power of a measure that is a member of the family.
  function powerOf(guard) {
    return guard.measure === "power" ? guard.a : Object.hasOwn(data.powers, guard.measure || "") ? data.powers[guard.measure] : null;
  }

  function say(message) {
    $("message").textContent = message;
    $("spec").setAttribute("aria-invalid", message ? "true" : "false");
  }

  function attempt(text, options) {
    try {
      choose(text, options);
      return true;
    } catch (error) {
      if (!(error instanceof ReadError)) throw error;
      say(error.message.charAt(0).toUpperCase() + error.message.slice(1) + (/[.?)"]$/.test(error.message) ? "" : "."));
      return false;
    }
  }

  // The spec of a member of the power family, over the scope last looked at.
  function powerText(a, radius) {
    if (state.scope === "token") return `power_clip(a=${plain(a)}, radius=${plain(radius)})`;
    return `guard(measure='power(${plain(a)})', radius=${plain(radius)}, scope='${state.scope}') + factor(scope='${state.scope}')`;
  }

  function move(where, from) {
    attempt(powerText(where.a, where.radius), { from });
  }

  // --- sliders: radius in decades, a in units of asinh -------------------------------------------------------------

  const sliderOf = { radius: value => Math.log10(value), a: value => Math.asinh(value) };
  const ofSlider = { radius: value => 10 ** value, a: value => Math.sinh(value) };
  const rounded = value => Number(value.toPrecision(4));

  function bindSlider(name) {
    const slider = $(name), typed = $(`${name}-value`);
    slider.addEventListener("input", () => {
      const where = { ...(state.where || { a: 0, radius: 0.02 }) };
      where[name] = rounded(ofSlider[name](Number(slider.value)));
      if (name === "a" && Math.abs(where.a) < 1e-3) where.a = 0;
      move(where, name);
    });
    typed.addEventListener("input", () => {
      const value = Number(typed.value.replace("\u2212", "-")), good = typed.value.trim() !== "" && Number.isFinite(value) && (name === "a" || value > 0);
      typed.setAttribute("aria-invalid", good ? "false" : "true");
      if (!good) {
        say(name === "a" ? "a must be a number, for example 0 (KL3) or 2 (a symmetric ratio clip)." : "The radius must be a number above 0, for example 0.02.");
        return;
      }
      move({ ...(state.where || { a: 0, radius: 0.02 }), [name]: value }, `${name}-value`);
    });
  }

  // --- the maps ---------------------------------------------------------------------------------------------------

  const panels = ["token", "sequence"].map(name => ({
    name, svg: $(`map-${name}`), points: data.points.filter(point => point.panel === name), key: "",
  }));
  const panelOf = scope => (scope === "token" ? "token" : "sequence");

  function currentIn(panel) {
    const guard = state.guards[state.at];
    return guard && guard.kind === "interval" && panelOf(guard.scope) === panel.name ? guard : null;
  }

  const same = (point, guard) => guard && ["logLow", "logHigh"].every(side =>
    point[side] === guard[side] || Math.abs(point[side] - guard[side]) <= 1e-9 * Math.max(1e-3, Math.abs(guard[side])));

  function drawPanel(panel) {
    const { svg, points } = panel, current = currentIn(panel);
    const W = Math.max(280, Math.round(svg.parentNode.clientWidth)), H = Math.round(Number(svg.dataset.height) * (W < 480 ? 0.96 : 1));
    const view = windowOf(points, current), key = JSON.stringify([W, H, view]);
    if (key !== panel.key) {  // the curves are drawn anew only where the window changed
      panel.key = key;
      svg.replaceChildren();
      svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
      svg.setAttribute("height", H);
      panel.grid = drawGrid(svg, { W, H }, view, `clip-${panel.name}`);
      const { left, right, top, bottom } = panel.grid;
      const plane = el("rect", { class: "plane", x: left, y: top, width: right - left, height: bottom - top });
      plane.addEventListener("click", event => {
        const box = svg.getBoundingClientRect(), u = (event.clientX - box.left) * W / box.width, v = (event.clientY - box.top) * H / box.height;
        const spread = 10 ** (view.left + (u - left) / (right - left) * (view.right - view.left));
        const r = fromMap(spread, Math.max(-0.99, Math.min(0.99, view.bottom + (bottom - v) / (bottom - top) * (view.top - view.bottom))));
        const where = coordinates(r.logLow, r.logHigh);
        if (panelOf(state.scope) !== panel.name) state.scope = panel.name;
        if (where) move({ a: rounded(where.a), radius: rounded(where.radius) }, "plane");
      });
      svg.append(plane);
      panel.labels = el("g", { "aria-hidden": "true" });
      panel.marks = el("g");
      svg.append(panel.labels, panel.marks);
      drawPoints(panel, { W, H });
    }
    panel.points.forEach((point, k) => {
      const chosen = same(point, current);
      panel.nodes[k].setAttribute("aria-checked", chosen ? "true" : "false");
      panel.texts[k].classList.toggle("chosen", Boolean(chosen));
    });
    const chosen = panel.points.findIndex(point => same(point, current));
    panel.nodes.forEach((node, k) => node.setAttribute("tabindex", k === Math.max(0, chosen) ? "0" : "-1"));
    drawHere(panel, current, chosen >= 0, { W, H });
  }

  function drawPoints(panel, { W, H }) {
    const { grid, points } = panel, at = positions(points, grid);
    const frame = { x0: 2, x1: W - 2, y0: grid.top - 6, y1: grid.bottom };
    const marks = at.map(p => ({ x0: p.x - 9, x1: p.x + 9, y0: p.y - 9, y1: p.y + 9, weight: 8, mark: p }));
    panel.taken = [...grid.taken, ...marks];
    panel.at = at;
    panel.nodes = points.map((point, k) => {
      const shape = shapeOf(point), kind = shape === "both" || shape === "sampler" ? shape : "one";
      const names = [...new Set(point.members.map(one => one.name))];
      const node = el("g", {
        class: `point ${kind}`, role: "radio", "aria-checked": "false", tabindex: "-1", "data-names": names.join(" "),
        "data-low": point.low, "data-high": point.high, transform: `translate(${at[k].x.toFixed(1)},${at[k].y.toFixed(1)})`,
        "aria-label": `${names.join(", ")}: ${spoken(point)}`,
      });
      node.append(el("circle", { class: "hit", r: 14 }), el("circle", { class: "halo", r: 12 }), el("path", { class: "mark", d: SHAPES[shape](6) }));
      node.append(el("title", {}, `${names.join(", ")}: ${spoken(point)}`));
      node.addEventListener("click", () => { pick(panel, k); });
      node.addEventListener("keydown", event => onKey(panel, k, event));
      panel.marks.append(node);
      return node;
    });
    const order = points.map((_, k) => k).sort((a, b) => points[b].members.length - points[a].members.length);
    panel.texts = [];
    for (const k of order) panel.texts[k] = placeLabel(panel.labels, nameOf(points[k], W), at[k], panel.taken, frame);
  }

  const spoken = r => (r.logLow === -Infinity ? `w up to ${shown(r.high, 6)}` : r.logHigh === Infinity ? `w from ${shown(r.low, 6)}`
    : `w from ${shown(r.low, 6)} to ${shown(r.high, 6)}`) + (r.a === null || r.a === undefined ? "" : `; a ${shown(r.a)}, radius ${shown(r.radius)}`);

  // A ring where the chosen interval lies, named unless a published point is there.
  function drawHere(panel, current, published, { W }) {
    panel.svg.querySelectorAll(".here, .label.mine, .leader.mine").forEach(node => node.remove());
    if (!current || !(width(current) > 0)) return;
    const [at] = Number.isFinite(width(current)) ? positions([current], panel.grid) : published
      ? [panel.at[panel.points.findIndex(point => same(point, current))]] : [{ x: panel.grid.right + 8 + STRIP / 2, y: panel.grid.top + 8 }];
    panel.svg.append(el("circle", { class: "here", cx: at.x, cy: at.y, r: 10 }));
    if (published) return;
    const layer = el("g", { "aria-hidden": "true" });
    panel.svg.append(layer);
    const frame = { x0: 2, x1: W - 2, y0: panel.grid.top - 6, y1: panel.grid.bottom };
    const most = W > 480 ? 34 : 22, text = state.text.length > most ? `${state.text.slice(0, most - 1)}\u2026` : state.text;
    placeLabel(layer, text, at, [...panel.taken, { x0: at.x - 10, x1: at.x + 10, y0: at.y - 10, y1: at.y + 10, weight: 8 }], frame);
    layer.querySelectorAll(".label, .leader").forEach(node => node.classList.add("mine", "chosen"));
    panel.svg.append(...layer.childNodes);
    layer.remove();
  }

  function pick(panel, k) {
    const [first] = panel.points[k].members;
    if (attempt(first.spec, { index: memberGuard(first), from: "point" })) panel.nodes[k].focus({ preventScroll: true });
  }

  // The place of a member's guard among the guards that are drawn.
  function memberGuard(member) {
    const all = data.presets[member.name].guards;
    return all.slice(0, member.guard).filter(guard => guard.kind === "interval" || guard.kind === "binary").length;
  }

  function onKey(panel, k, event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const order = panel.points.map((_, n) => n).sort((a, b) => panel.at[a].x - panel.at[b].x || panel.at[a].y - panel.at[b].y);
    const here = order.indexOf(k), count = order.length;
    const next = step ? order[(here + step + count) % count] : { Home: order[0], End: order[count - 1], Enter: k, " ": k }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    pick(panel, next);
  }

  // --- the chosen interval ----------------------------------------------------------------------------------------

  function button(text, pressed, act, tone = "") {
    const node = document.createElement("button");
    node.type = "button";
    node.setAttribute("aria-pressed", pressed ? "true" : "false");
    if (tone) node.append(Object.assign(document.createElement("i"), { className: tone }));
    node.append(text);
    node.addEventListener("click", act);
    return node;
  }

  function fact(name, value) {
    const node = document.createElement("span"), strong = document.createElement("b");
    strong.textContent = value;
    node.append(`${name} `, strong);
    return node;
  }

  function showMembers(guard, from) {
    const point = guard.kind === "interval" ? data.points.find(one => one.panel === panelOf(guard.scope) && same(one, guard)) : null;
    const members = point ? point.members : [], terms = parseSpec(state.text);
    const written = one => terms.length === 1 && terms[0].call === one.name;
    const chips = members.map(one => button(one.name, written(one), () => attempt(one.spec, { index: memberGuard(one), from: "chip" })));
    if (state.guards.length > 1 && (chips.length === 0 || terms.length > 1)) {
      chips.splice(0, chips.length, ...state.guards.map((one, k) => button(one.kind === "interval" ? `guard ${k + 1}: ${shown(one.low)} to ${shown(one.high)}` : `guard ${k + 1}: ${one.measure}`,
        k === state.at, () => { state.at = k; settle("guard"); })));
    }
    $("members").replaceChildren(...chips);
    const pressed = chips.find(one => one.getAttribute("aria-pressed") === "true");
    if (pressed && (from === "chip" || from === "guard")) pressed.focus();  // the pressed button was drawn anew
    const member = members.find(written);
    $("cite").textContent = member ? member.citation : members.length ? "The same interval as these methods." : "";
  }

  function showInterval(guard) {
    const low = $("low"), high = $("high");
    if (guard.kind !== "interval") {
      $("interval").hidden = $("same").parentNode.hidden = true;
      $("by-probability").hidden = false;
      const reach = p => allowed(guard.measure, p, guard.radius_low, guard.radius_high).map(q => shown(q, 5)).join(" to ");
      $("by-probability").replaceChildren(...[0.1, 0.5, 0.9].map(p => fact(`p = ${p} may become`, reach(p))));
      $("facts").replaceChildren(fact("measure", guard.measure), fact("radius", shown(guard.radius_high)), fact("w =", guard.ratio));
      return;
    }
    $("interval").hidden = $("same").parentNode.hidden = false;
    const ratios = [["low", guard.low, guard.low > 0], ["high", guard.high, guard.high < Infinity]].filter(([, , some]) => some);
    $("same").textContent = `guard(${ratios.map(([side, value]) => `ratio_${side}=${value}`).join(", ")})`;
    $("by-probability").hidden = true;
    low.textContent = shown(guard.low, 10);
    high.textContent = shown(guard.high, 10);
    low.dataset.value = guard.low;
    high.dataset.value = guard.high;
    const where = state.where, scope = guard.scope === "token" ? "token" : `${guard.reduce} over the ${guard.scope}`;
    $("facts").replaceChildren(
      fact("log w", `${shown(guard.logLow, 6)} to ${shown(guard.logHigh, 6)}`),
      ...(where ? [fact("a", shown(where.a, 6)), fact("radius", shown(where.radius, 6))] : []),
      fact("worst TV", shown(worstTV(guard.logLow, guard.logHigh))),
      ...(Number.isFinite(width(guard)) && width(guard) > 0 ? [fact("tilt", shown(tilt(guard), 3))] : []),
      fact("w =", `${guard.ratio}, ${scope}`), fact("gate", guard.gate), ...(guard.action === "zero" ? [] : [fact("outside", guard.action)]),
    );
  }

  function showSliders(from) {
    for (const name of ["radius", "a"]) {
      const known = state.where !== null, slider = $(name), typed = $(`${name}-value`);
      const value = known ? state.where[name] : null;
      if (from !== name && known) slider.value = sliderOf[name](value);
      if (from !== `${name}-value`) typed.value = known ? String(Number(value.toPrecision(8))) : "";
      typed.setAttribute("aria-invalid", "false");
      slider.setAttribute("aria-valuetext", known ? plain(value) : "none: this region has no place in the power family");
    }
    if (from !== "spec") $("spec").value = state.text;
  }

  function drawable(guard) {
    return guard.kind === "interval" && guard.gate !== "other" && guard.weight !== "other";
  }

  function drawCharts(guard) {
    const of = name => ({ W: Math.max(150, Math.round($(name).parentNode.clientWidth)), H: Number($(name).dataset.height) });
    const together = state.guards.filter(one => drawable(one) && one.ratio === guard.ratio && one.scope === guard.scope && one.reduce === guard.reduce);
    const drawn = drawable(guard) && width(guard) > 0;
    const guards = [guard, ...together.filter(one => one !== guard)];
    for (const [name, which, title] of [["chart-J", "J", "Surrogate J over the ratio"], ["chart-g", "g", "Gradient coefficient g over the ratio"]]) {
      $(name).parentNode.hidden = !drawn;
      if (drawn) drawCurve($(name), of(name), guards, which, `${title}: solid for A = +1, dashed for A = \u22121`);
    }
    $("legend-A").hidden = !drawn;
    $("drawn").textContent = drawn ? weightNote(guard) : guard.kind === "interval"
      ? `J and g are not drawn: ${guard.gate === "other" ? `the gate ${guard.where} reads more than the ratio` : width(guard) > 0 ? "its weight is another function of the ratio" : "nothing but w = 1 is inside"}.` : "";
    const binaries = [...overlays.values()].filter(one => one.on).map(one => ({ ...one.guard, tone: one.tone }));
    if (guard.kind === "binary") binaries.push({ ...guard, tone: "one" });
    drawAllowed($("chart-p"), of("chart-p"), guard.kind === "interval" ? guard : null, binaries);
  }

  function weightNote(guard) {
    const correction = !guard.ratio.startsWith("new/");
    const parts = [];
    if (guard.weight === "cap") parts.push(`the weight is w held in [${shown(guard.weight_low)}, ${shown(guard.weight_high)}], detached`);
    if (guard.weight === "none" && !correction) parts.push("the weight is 1, without a factor of this ratio: J = A log w");
    if (correction) parts.push("a correction: J and g are what it multiplies a method's by");
    if (guard.where && !["outward", "always", "positive", "negative"].includes(guard.where)) parts.push("drawn for a token where the gate applies");
    if (guard.scope !== "token") parts.push(`the ratio is that of a whole ${guard.scope}`);
    const text = parts.join("; ");
    return text ? `${text.charAt(0).toUpperCase()}${text.slice(1)}.` : "";
  }

  function render(from) {
    const guard = state.guards[state.at];
    panels.forEach(drawPanel);
    showMembers(guard, from);
    showInterval(guard);
    showSliders(from);
    drawCharts(guard);
    $("bar-text").replaceChildren(Object.assign(document.createElement("b"), { textContent: state.text }),
      guard.kind === "interval" ? `  ${shown(guard.low, 6)} \u2264 w \u2264 ${shown(guard.high, 6)}` : "  bounds depend on p");
  }

  // --- start ------------------------------------------------------------------------------------------------------

  function addOverlays() {
    const seen = new Set();
    data.binary.forEach((one, k) => {
      const guard = read(one.spec)[0], name = `${one.name} ${shown(guard.radius_high)}`;
      overlays.set(name, { guard, on: !seen.has(guard.measure), tone: `t${k % 4}` });
      seen.add(guard.measure);
    });
    const draw = () => {
      $("overlays").replaceChildren(...[...overlays].map(([name, one]) => button(name, one.on, event => {
        const index = [...$("overlays").children].indexOf(event.currentTarget);
        one.on = !one.on;
        draw();
        $("overlays").children[index].focus();
        drawCharts(state.guards[state.at]);
      }, one.tone)));
    };
    draw();
  }

  async function copy() {
    let done = true;
    try {
      await navigator.clipboard.writeText(state.text);
    } catch {
      $("spec").value = state.text;
      $("spec").select();
      done = document.execCommand("copy");
    }
    $("copy").textContent = done ? "Copied" : "Select it";
    setTimeout(() => { $("copy").textContent = "Copy"; }, 2000);
  }

  addOverlays();
  bindSlider("radius");
  bindSlider("a");
  $("spec").addEventListener("input", () => attempt($("spec").value, { from: "spec" }));
  $("copy").addEventListener("click", copy);
  attempt(data.start);
  let wide = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== wide) { wide = innerWidth; render("resize"); }
  });
  document.documentElement.dataset.ready = Math.round(performance.now());
})();
