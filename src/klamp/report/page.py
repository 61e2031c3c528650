"""The shell of a self-contained page: its style, its one script, and a policy that lets nothing else in."""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape


def document(title: str, body: str, style: str | None = None, script: str | None = None) -> str:
    """A whole HTML page. `title` is plain text, `body` is HTML in which foreign text went through `text`.

    Style and script (those of a run's page, unless a page brings its own) are allowed by their hashes, and
    nothing can be loaded: the page opens offline, and markup that slipped through could still not act.
    """
    style, script = STYLE if style is None else style, HOVER if script is None else script
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="referrer" content="no-referrer">\n<title>{text(title)}</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def text(value: object) -> str:
    """Any value as HTML text: markup escaped, control characters made visible."""
    plain = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return escape(plain.translate(_CONTROLS))


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}

# Reads a line chart's numbers off under the pointer or the arrow keys; the charts are complete without it.
HOVER = """\
"use strict";
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const chart = JSON.parse(figure.dataset.chart), svg = figure.querySelector("svg");
  const cross = svg.querySelector(".cross"), dots = svg.querySelectorAll(".dot");
  const shown = [...figure.querySelectorAll(".key b"), figure.querySelector(".at")];
  const rest = shown.map(node => node.textContent), steps = chart.steps;
  const map = ([low, high, start, stop], v) => start + (v - low) / (high - low) * (stop - start);
  const shownAs = v => v === null ? "\\u2013"
    : chart.percent ? +(100 * v).toPrecision(3) + "%" : +v.toPrecision(4) + "";
  let at = steps.length - 1;
  figure.classList.add("ready");
  const show = k => {
    at = Math.max(0, Math.min(steps.length - 1, k));
    const x = map(chart.x, steps[at]);
    cross.setAttribute("x1", x); cross.setAttribute("x2", x);
    chart.values.forEach((values, i) => {
      shown[i].textContent = shownAs(values[at]);
      dots[i].classList.toggle("gap", values[at] === null);
      dots[i].setAttribute("cx", x);
      if (values[at] !== null) dots[i].setAttribute("cy", map(chart.y, values[at]));
    });
    shown[shown.length - 1].textContent = "at step " + steps[at];
    svg.classList.add("live");
  };
  const hide = () => {
    svg.classList.remove("live");
    shown.forEach((node, i) => { node.textContent = rest[i]; });
  };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), [low, high, start, stop] = chart.x;
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const step = low + (x - start) / (stop - start) * (high - low);
    let a = 0, b = steps.length - 1;
    while (a < b) { const m = (a + b) >> 1; if (steps[m] < step) a = m + 1; else b = m; }
    show(a > 0 && step - steps[a - 1] < steps[a] - step ? a - 1 : a);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("focus", () => { if (svg.matches(":focus-visible")) show(at); });
  svg.addEventListener("keydown", event => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) { event.preventDefault(); show(at + move); }
  });
}
"""

# What every page shares: colours, type, cards and tables.
BASE = """\
:root { color-scheme: light dark; --page: #f6f5f1; --card: #fff; --ink: #1d2126; --soft: #5a626c;
  --rule: #e3e1da;
  --grid: #eceae4; --one: #0f766e; --two: #a8327f; --low: #0068a8; --high: #c84e00; --inside: #8b939e; }
@media (prefers-color-scheme: dark) { :root { --page: #121417; --card: #1b1e23; --ink: #e8e9eb;
  --soft: #a2a9b3;
  --rule: #30353c; --grid: #292e35; --one: #3ccfb9; --two: #ec8fc9; --low: #5cb8f2; --high: #ff9a52;
  --inside: #7b8490; } }
* { box-sizing: border-box; margin: 0; }
body { background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%; }
main { max-width: 1120px; margin: 0 auto; padding: 48px 24px 80px; }
code, .code, td { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.eyebrow { color: var(--soft); font-size: 14px; font-weight: 600; }
h1 { font-size: clamp(24px, 4vw, 36px); line-height: 1.2; font-weight: 650; margin: 6px 0 8px;
  overflow-wrap: anywhere; }
h1 code { letter-spacing: -0.02em; }
.lede { color: var(--soft); font-size: 17px; }
.lede strong { color: var(--ink); font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 232px), 1fr));
  gap: 16px; margin: 28px 0; }
.tile, figure, .scroll { background: var(--card); border: 1px solid var(--rule); border-radius: 12px;
  min-width: 0; }
.tile { padding: 16px 18px; }
.tile .label { font-size: 14px; color: var(--soft); }
.tile .figure { font-size: 25px; font-weight: 650; letter-spacing: -0.02em; line-height: 1.4;
  white-space: nowrap; }
.tile .figure i { color: var(--soft); font-style: normal; font-weight: 400; }
.tile .source { font-size: 13px; color: var(--soft); }
.tile .source strong { color: var(--ink); font-weight: 600; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 0 32px;
  font-size: 14px; }
dl div { display: flex; gap: 12px; padding: 7px 0; border-top: 1px solid var(--rule); }
dl div:nth-last-child(-n+2) { grid-column: 1 / -1; }
dt { flex: 0 0 88px; color: var(--soft); }
dd { min-width: 0; overflow-wrap: anywhere; }
.code { font-size: 13px; }
section { margin-top: 56px; }
h2 { font-size: 22px; line-height: 1.3; font-weight: 650; letter-spacing: -0.01em; }
.intro { color: var(--soft); max-width: 68ch; margin: 4px 0 18px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr));
  gap: 20px; }
figure { padding: 18px 20px 14px; display: flex; flex-direction: column; }
figure.wide { grid-column: 1 / -1; }
figcaption { flex: 1; }
h3 { font-size: 16px; font-weight: 650; }
figcaption p { font-size: 14px; line-height: 1.45; color: var(--soft); max-width: 100ch; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; min-width: 720px; font-size: 13px; line-height: 1.5; }
th { text-align: left; font-weight: 600; color: var(--soft); padding: 12px 16px;
  border-bottom: 1px solid var(--rule); }
td { padding: 9px 16px; vertical-align: top; border-top: 1px solid var(--grid); }
tbody tr:first-child td { border-top: 0; }
td div { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; max-height: 14em;
  overflow-y: auto; }
td em { color: var(--soft); font-family: system-ui, sans-serif; }
.step, .reward { white-space: nowrap; text-align: right; }
.prompt { min-width: 180px; } .completion { min-width: 240px; } .answer { min-width: 140px; }
.notes ul { padding-left: 20px; color: var(--soft); font-size: 14px; margin-top: 8px; }
@media (max-width: 560px) { main { padding: 28px 14px 48px; } figure { padding: 14px 12px 10px; } dl {
  grid-template-columns: 1fr; } }
@media print { body { background: none; } figure, .tile { break-inside: avoid; } }
"""

# The charts of `klamp.report.charts`.
CHARTS = """\
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: 13px; margin: 10px 0 4px;
  min-height: 20px; }
.legend b { font-weight: 650; display: inline-block; min-width: 3.2em; }
.legend .at { color: var(--soft); margin-left: auto; }
.key i { display: inline-block; width: 18px; height: 0; border-top: 3px solid; vertical-align: middle;
  margin: -3px 7px 0 0; }
.key i.two, .key i.high { border-top-style: dashed; }
.key i.block { width: 11px; height: 11px; border: 0; border-radius: 3px; background: currentColor; }
.plot { overflow-x: auto; }
svg { display: block; width: 100%; height: auto; }
.wide svg { min-width: 620px; }
svg text { fill: var(--soft); font-size: 12px; }
svg:focus { outline: none; }
svg:focus-visible { outline: 2px solid var(--one); outline-offset: 2px; border-radius: 4px; }
.one { color: var(--one); } .two { color: var(--two); } .low { color: var(--low); } .high {
  color: var(--high); }
.inside { color: var(--inside); }
.ready svg { cursor: crosshair; }
.grid { stroke: var(--grid); } .axis { stroke: var(--inside); }
.line { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round;
  stroke-linecap: round; }
.line.two, .line.high { stroke-dasharray: 5 3.5; }
.raw { stroke-width: 1; stroke-opacity: .35; stroke-dasharray: none !important; }
.point, .bar { fill: currentColor; }
.point { stroke: var(--card); stroke-width: 1.2; }
.bound { stroke: currentColor; stroke-width: 1.6; }
svg .bound-label { fill: var(--ink); font-weight: 600; }
svg .empty { font-size: 14px; } .frame { fill: none; stroke: var(--rule); stroke-dasharray: 4 4; }
.cross, .dot { visibility: hidden; pointer-events: none; }
.cross { stroke: var(--soft); } .dot { fill: currentColor; stroke: var(--card); stroke-width: 2; }
.live .cross, .live .dot:not(.gap) { visibility: visible; }
"""

STYLE = BASE + CHARTS
