"use strict";
// The page is complete without this script: it shows and hides specs, reads numbers off the pictures, and copies.
const main = document.querySelector("main"), SVG = "http://www.w3.org/2000/svg";
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const chips = all("[data-toggle]"), names = new Map(chips.map(chip => [chip.dataset.toggle, chip.querySelector(".name").textContent]));
const hidden = new Set();

function show() {
  for (const node of all(".series[data-s]")) node.classList.toggle("off", hidden.has(node.dataset.s));
  for (const chip of chips) chip.setAttribute("aria-pressed", String(!hidden.has(chip.dataset.toggle)));
}

function light(place) {
  main.classList.toggle("dim", place !== null);
  for (const node of all(".series[data-s]")) node.classList.toggle("lit", node.dataset.s === place);
}

for (const chip of chips) {
  const place = chip.dataset.toggle;
  chip.addEventListener("click", () => {
    if (!hidden.delete(place)) hidden.add(place);
    light(null);
    show();
  });
  const over = () => { if (!hidden.has(place)) light(place); };
  chip.addEventListener("pointerenter", event => { if (event.pointerType === "mouse") over(); });
  chip.addEventListener("focus", () => { if (chip.matches(":focus-visible")) over(); });
  for (const kind of ["pointerleave", "blur"]) chip.addEventListener(kind, () => light(null));
}
document.getElementById("all").addEventListener("click", () => { hidden.clear(); show(); });
for (const button of all("[data-view]")) {
  const view = () => main.classList.toggle("no-" + button.dataset.view, button.getAttribute("aria-pressed") !== "true");
  button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
    view();
  });
  view();
}

// -- curves: the numbers at the step under the pointer, or under the arrow keys ----------------

function element(name, kind, text) {
  const node = document.createElement(name);
  node.className = kind;
  node.textContent = text;
  return node;
}

function marked(place) {
  const svg = document.createElementNS(SVG, "svg"), use = document.createElementNS(SVG, "use");
  const mark = document.querySelector(`[data-toggle="${place}"] use`);
  svg.setAttribute("class", "swatch s" + place % 10);
  svg.setAttribute("viewBox", "-9 -8 18 16");
  use.setAttribute("href", mark ? mark.getAttribute("href") : "#m0");
  svg.append(use);
  return svg;
}

const near = (steps, step) => steps.reduce((best, one, k) => Math.abs(one - step) < Math.abs(steps[best] - step) ? k : best, 0);

for (const script of all("script[data-for]")) {
  const chart = JSON.parse(script.textContent), box = document.getElementById(script.dataset.for);
  const area = box.querySelector(".area"), tip = box.querySelector(".tip"), cross = area.querySelector(".cross");
  const [first, last] = chart.x, [low, high, top, depth] = chart.y;
  const steps = [...new Set(chart.series.flatMap(one => one.steps))].sort((a, b) => a - b);
  const dots = new Map(all(".dot", area).map(dot => [dot.dataset.s, dot]));
  const plain = v => (chart.percent ? (100 * v).toFixed(1) : String(+v.toPrecision(3))).replace(/-/g, "\u2212");
  const shown = v => v === null ? "\u2013" : plain(v) + (chart.percent ? "%" : "");
  const scaled = v => chart.log ? Math.log10(Math.max(v, chart.floor)) : v;
  const height = v => top + depth * (1 - Math.min(1, Math.max(0, (scaled(v) - low) / (high - low))));
  const reach = 0.03 * (last - first);
  let at = steps.length - 1;

  function read(k) {
    at = Math.max(0, Math.min(steps.length - 1, k));
    const step = steps[at], share = (step - first) / (last - first), rows = [];
    cross.setAttribute("x1", 100 * share + "%");
    cross.setAttribute("x2", 100 * share + "%");
    for (const one of chart.series) {
      const place = String(one.s), i = near(one.steps, step), dot = dots.get(place);
      const value = Math.abs(one.steps[i] - step) <= reach ? one.mean[i] : null;
      dot.classList.toggle("on", value !== null);
      if (hidden.has(place)) continue;
      if (value !== null) {
        dot.setAttribute("cx", 100 * (one.steps[i] - first) / (last - first) + "%");
        dot.setAttribute("cy", height(value));
      }
      const number = element("span", "value", shown(value)), row = document.createElement("div");
      if (value !== null && one.low) number.append(element("i", "", ` [${plain(one.low[i])}, ${plain(one.high[i])}]${one.n[i] < Math.max(...one.n) ? " n = " + one.n[i] : ""}`));
      row.append(marked(one.s), element("span", "name", names.get(place) ?? ""), number);
      rows.push([value, row]);
    }
    rows.sort((a, b) => (b[0] ?? -Infinity) - (a[0] ?? -Infinity));
    tip.replaceChildren(element("p", "", "step " + step), ...rows.map(([, row]) => row));
    tip.hidden = false;
    const left = area.getBoundingClientRect().left - box.getBoundingClientRect().left, x = left + share * area.clientWidth;
    const room = box.clientWidth - tip.offsetWidth;
    tip.style.left = Math.max(0, Math.min(room, share > 0.5 ? x - tip.offsetWidth - 14 : x + 14)) + "px";
    const wide = tip.offsetWidth > 0.6 * area.clientWidth; // then below the picture, which it would hide
    tip.style.top = (wide ? box.querySelector(".picture").offsetTop + area.clientHeight + 20 : 26) + "px";
    area.classList.add("live");
  }
  const hide = () => { tip.hidden = true; area.classList.remove("live"); };
  const point = event => {
    const frame = area.getBoundingClientRect();
    read(near(steps, first + (event.clientX - frame.left) / frame.width * (last - first)));
  };
  area.addEventListener("pointermove", point);
  area.addEventListener("pointerdown", point);
  area.addEventListener("pointerleave", hide);
  area.addEventListener("blur", hide);
  area.addEventListener("focus", () => { if (area.matches(":focus-visible")) read(at); });
  area.addEventListener("keydown", event => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) { event.preventDefault(); read(at + move); }
    if (event.key === "Escape") hide();
  });
}

// -- what a mark is: a line of text beside the pointer -----------------------------------------

const tip = document.getElementById("tip");
function tell(event) {
  const node = event.target.closest("[data-tip]");
  tip.hidden = !node;
  if (!node) return;
  tip.textContent = node.dataset.tip;
  const wide = document.documentElement.clientWidth;
  tip.style.left = Math.max(4, Math.min(wide - tip.offsetWidth - 4, event.clientX + 14)) + "px";
  tip.style.top = (event.clientY > tip.offsetHeight + 24 ? event.clientY - tip.offsetHeight - 12 : event.clientY + 18) + "px";
}
for (const kind of ["pointerover", "pointerdown"]) document.addEventListener(kind, tell);
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

// -- the table as Markdown ---------------------------------------------------------------------

const copy = document.getElementById("copy"), source = document.querySelector("#markdown pre");
copy.addEventListener("click", async () => {
  let done = true;
  try {
    await navigator.clipboard.writeText(source.textContent);
  } catch {
    document.getElementById("markdown").open = true;
    getSelection().selectAllChildren(source);
    done = document.execCommand("copy");
  }
  copy.textContent = done ? "Copied" : "Select and copy it below";
  setTimeout(() => { copy.textContent = "Copy as Markdown"; }, 2000);
});
