"""Plain SVG charts for a page that opens offline: lines over optimizer steps, and a histogram of ratios.

Colours and sizes of text come from the page's style sheet by class; the geometry is here. A line chart
carries its numbers in `data-chart`, from which the page's script shows the values under the pointer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 30, 42
LIMIT = 600  # points of a line that are drawn; more are averaged in equal runs

Points = Sequence[tuple[int, float | None]]


@dataclass(frozen=True)
class Series:
    """A named line: (step, value) in order of step, None a gap; `tone` is a colour class of the page."""

    name: str
    points: Points
    tone: str


@dataclass(frozen=True)
class Scale:
    """Linear map of [low, high] onto [start, stop] in picture units."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def nice_step(span: float, count: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten that cuts `span` into at most `count` parts."""
    power = 10.0 ** math.floor(math.log10(span / count))
    return next((m * power for m in (1, 2, 5) if m * power >= span / count * (1 - 1e-9)), 10 * power)


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Round values that cover [low, high], about `count` of them."""
    step = nice_step(high - low, count)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def number(value: float, percent: bool = False) -> str:
    """Three or four significant digits, as a reader would write them."""
    scaled, unit = (100 * value, "%") if percent else (value, "")
    size = abs(scaled)
    if scaled == 0 or 1e-4 <= size < 1e6:
        digits = 2 if size < 0.1 else 3 if percent or size < 1 else 4
        shown = f"{scaled:.{digits}g}" if size < 1000 else f"{scaled:.0f}"
    else:
        shown = f"{scaled:.2e}".replace("e-0", "e-").replace("e+0", "e")
    return shown.replace("-", "\N{MINUS SIGN}") + unit


def tick_labels(values: Sequence[float], percent: bool = False) -> list[str]:
    """Labels with equally many decimals; 0 is plain."""
    short = [f"{100 * value if percent else value:.6g}" for value in values]
    if not any("e" in label for label in short):
        decimals = max(len(label.partition(".")[2]) for label in short)
        short = [f"{float(label):.{decimals}f}" if float(label) else "0" for label in short]
    return [label.replace("-", "\N{MINUS SIGN}") + ("%" if percent else "") for label in short]


def thin(points: Points, limit: int = LIMIT) -> tuple[Points, int]:
    """At most `limit` points, each the mean of k neighbours (gaps left out) at the last one's step; and k."""
    k = max(1, math.ceil(len(points) / limit))
    if k == 1:
        return points, 1
    thinned: list[tuple[int, float | None]] = []
    for start in range(0, len(points), k):
        run = points[start : start + k]
        values = [value for _, value in run if value is not None]
        thinned.append((run[-1][0], math.fsum(values) / len(values) if values else None))
    return thinned, k


def smooth(points: Points) -> tuple[Points, int]:
    """Each value's mean with its neighbours, over about a tenth of the points (gaps stay gaps); the width."""
    half = len(points) // 20
    out: list[tuple[int, float | None]] = []
    for k, (step, value) in enumerate(points):
        near = [v for _, v in points[max(0, k - half) : k + half + 1] if v is not None]
        out.append((step, math.fsum(near) / len(near) if value is not None else None))
    return out, 2 * half + 1


def figure(title: str, caption: str, body: str, legend: str = "", wide: bool = False, data: str = "") -> str:
    """A titled figure with one sentence that says what the quantity means."""
    kind = ' class="wide"' if wide else ""
    chart = f' data-chart="{escape(data)}"' if data else ""
    return (
        f"<figure{kind}{chart}><figcaption><h3>{escape(title)}</h3><p>{escape(caption)}</p></figcaption>"
        f'<div class="legend">{legend}</div><div class="plot">{body}</div></figure>'
    )


def svg(label: str, body: str, width: int = WIDTH, focus: bool = False) -> str:
    focusable = ' tabindex="0"' if focus else ""
    return f'<svg viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{escape(label)}"{focusable}>{body}</svg>'


def not_recorded(title: str, caption: str, wide: bool = False) -> str:
    """An empty figure that says so."""
    width = 2 * WIDTH if wide else WIDTH
    frame = (
        f'<rect class="frame" x="1" y="1" width="{width - 2}" height="{HEIGHT - 2}" rx="6"/>'
        f'<text class="empty" x="{width / 2:g}" y="{HEIGHT / 2:g}" text-anchor="middle">not recorded</text>'
    )
    return figure(title, caption, svg(f"{title}: not recorded", frame, width), wide=wide)


def line_chart(
    title: str,
    caption: str,
    series: Sequence[Series],
    unit: str,
    percent: bool = False,
    reach: tuple[float, float] = (0.0, 0.0),
) -> str:
    """Lines over optimizer steps; gaps stay gaps, a point between two gaps is a dot.

    The value axis holds every value and at least `reach`. Series without a value are named as not
    recorded; if all are, the figure says so.
    """
    drawn = [(s, *thin(s.points)) for s in series]
    values = [value for _, points, _ in drawn for _, value in points if value is not None]
    if not values:
        return not_recorded(title, caption)
    steps = sorted({step for _, points, _ in drawn for step, _ in points})
    averaged = max(k for _, _, k in drawn)
    if averaged > 1:
        caption += f" Each point is the mean of {averaged} logged steps."

    low, high = min(*reach, *values), max(*reach, *values)
    marks = ticks(low, high if high - low > 1e-100 else low + 1)
    x_low, x_high = (steps[0], steps[-1]) if len(steps) > 1 else (steps[0] - 1, steps[0] + 1)
    x = Scale(x_low, x_high, LEFT, WIDTH - RIGHT)
    y = Scale(marks[0], marks[-1], HEIGHT - BOTTOM, TOP)
    x_marks = [mark for mark in ticks(x_low, x_high, 6, whole=True) if x_low <= mark <= x_high]
    parts = [
        _y_axis(unit, zip(map(y, marks), tick_labels(marks, percent), strict=True), WIDTH),
        _x_axis("optimizer step", zip(map(x, x_marks), tick_labels(x_marks), strict=True), WIDTH),
    ]
    many = max(len(points) for _, points, _ in drawn) > 40
    if many:
        smoothed = [smooth(points) for _, points, _ in drawn]
        noun = "step" if averaged == 1 else "point"
        caption += f" Thin: each {noun}; thick: the mean over {max(k for _, k in smoothed)} {noun}s."
        parts += [_line(s, points, x, y, "raw ") for s, points, _ in drawn]
    parts += [_line(s, smooth(points)[0] if many else points, x, y) for s, points, _ in drawn]
    parts.append(f'<line class="cross" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    parts += [f'<circle class="dot {s.tone}" r="4"/>' for s in series]

    ends, legend = _ends([(s, points) for s, points, _ in drawn], percent)
    columns = [dict(points) for _, points, _ in drawn]
    table = {
        "steps": steps,
        "percent": percent,
        "x": [x_low, x_high, LEFT, WIDTH - RIGHT],
        "y": [y.low, y.high, y.start, y.stop],
        "values": [[column.get(step) for step in steps] for column in columns],
    }
    picture = svg(f"{title} by optimizer step: {'; '.join(ends)}", "".join(parts), focus=True)
    return figure(title, caption, picture, legend, data=json.dumps(table, separators=(",", ":")))


def _ends(lines: Sequence[tuple[Series, Points]], percent: bool) -> tuple[list[str], str]:
    """Each line's latest value, as a sentence and as a legend."""
    ends, keys, ended = [], [], set()
    for series, points in lines:
        step, value = next((p for p in reversed(points) if p[1] is not None), (0, None))
        shown = "not recorded" if value is None else number(value, percent)
        ended |= set() if value is None else {step}
        ends.append(f"{series.name} {shown}" + ("" if value is None else f" at step {step}"))
        keys.append(f'<span class="key"><i class="{series.tone}"></i>{escape(series.name)} <b>{shown}</b></span>')
    rest = f"at step {min(ended)}" if len(ended) == 1 else "latest of each"
    return ends, "".join(keys) + f'<span class="at">{rest}</span>'


def _line(series: Series, points: Points, x: Scale, y: Scale, kind: str = "") -> str:
    """Polylines between gaps, dots where a point stands alone or where there are few."""
    runs: list[list[tuple[int, float]]] = [[]]
    for step, value in points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append((step, value))
    few = len(points) <= 40
    out = []
    for run in runs:
        if len(run) > 1:
            path = " ".join(f"{x(step):.2f},{y(value):.2f}" for step, value in run)
            out.append(f'<polyline class="line {kind}{series.tone}" points="{path}"/>')
        if run and (few or len(run) == 1):
            out += [
                f'<circle class="point {series.tone}" cx="{x(step):.2f}" cy="{y(value):.2f}" r="3"/>'
                for step, value in run
            ]
    return "".join(out)


def histogram(
    title: str,
    caption: str,
    edges: Sequence[float],
    counts: Sequence[float],
    bounds: tuple[float | None, float | None],
    x_title: str,
    y_title: str,
) -> str:
    """Counts over bins uniform in log-ratio, labelled in ratio units, with a logarithmic count axis.

    `edges` and `bounds` (low, high; None where there is no bound) are log-ratios. What lies outside the
    bounds is coloured by side; a bin that a bound crosses is divided where the bound crosses it. The picture
    shows every bin that holds something, and both bounds if they lie within the bins.
    """
    width = 2 * WIDTH
    held = [k for k, count in enumerate(counts) if count > 0]
    if not held:
        return not_recorded(title, caption, wide=True)
    within = [b for b in bounds if b is not None and edges[0] <= b <= edges[-1]]
    margin = 2 * (edges[1] - edges[0])
    low = max(edges[0], min([edges[held[0]], -4 * margin, *(b - margin for b in within)]))
    high = min(edges[-1], max([edges[held[-1] + 1], 4 * margin, *(b + margin for b in within)]))
    decades = max(1, math.ceil(math.log10(max(counts))))
    x = Scale(low, high, LEFT, width - RIGHT)
    y = Scale(math.log10(0.5), decades, HEIGHT - BOTTOM, TOP)  # half a token at the foot, so that one shows

    y_marks = [(y(k), _count(10**k)) for k in range(0, decades + 1, max(1, math.ceil(decades / 6)))]
    parts = [_y_axis(y_title, y_marks, width), _x_axis(x_title, ratio_marks(x), width)]
    for k in held:
        top = y(math.log10(counts[k])) if counts[k] > 0.5 else HEIGHT - BOTTOM
        text = f"ratio {number(math.exp(edges[k]))} to {number(math.exp(edges[k + 1]))}: {counts[k]:,.0f} tokens"
        pieces = "".join(_bar(x(a), x(b), top, tone) for a, b, tone in _pieces(edges[k], edges[k + 1], bounds))
        parts.append(f"<g><title>{escape(text)}</title>{pieces}</g>")
    parts += [
        _bound(x, bound, side)
        for bound, side in zip(bounds, ("low", "high"), strict=True)
        if bound is not None and low <= bound <= high
    ]
    keys = [("inside", "inside the region" if any(b is not None for b in bounds) else "no bounds")]
    keys += [(side, f"outside, {side} side") for side, b in zip(("low", "high"), bounds, strict=True) if b is not None]
    legend = "".join(f'<span class="key"><i class="block {tone}"></i>{name}</span>' for tone, name in keys)
    named = [
        f"{side} bound {number(math.exp(b))}" for side, b in zip(("low", "high"), bounds, strict=True) if b is not None
    ]
    label = f"{title}: {sum(counts):,.0f} tokens; {', '.join(named) or 'no bounds'}"
    return figure(title, caption, svg(label, "".join(parts), width), legend, wide=True)


def _pieces(start: float, stop: float, bounds: tuple[float | None, float | None]) -> list[tuple[float, float, str]]:
    low, high = (
        (bounds[0] if bounds[0] is not None else -math.inf),
        (bounds[1] if bounds[1] is not None else math.inf),
    )
    spans = [
        (start, min(stop, low), "low"),
        (max(start, low), min(stop, high), "inside"),
        (max(start, high), stop, "high"),
    ]
    return [span for span in spans if span[0] < span[1]]


def _bar(left: float, right: float, top: float, tone: str) -> str:
    gap = 1 if right - left > 4 else 0
    return (
        f'<rect class="bar {tone}" x="{left:.2f}" y="{top:.2f}" width="{max(right - left - gap, 0.5):.2f}" '
        f'height="{max(HEIGHT - BOTTOM - top, 0):.2f}"/>'
    )


def _bound(x: Scale, bound: float, side: str) -> str:
    """A bound's line and its ratio, written away from the region unless the picture ends there."""
    at = x(bound)
    room = at - x.start if side == "low" else x.stop - at
    leftward = (side == "low") == (room > 90)
    anchor, shift, row = ("end", -7, TOP + 10) if leftward else ("start", 7, TOP + 10)
    row += 0 if room > 90 else 16
    return (
        f'<line class="bound {side}" x1="{at:.2f}" x2="{at:.2f}" y1="{TOP - 6}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text class="bound-label" x="{at + shift:.2f}" y="{row}" text-anchor="{anchor}">'
        f"{side} bound {math.exp(bound):.4g}</text>"
    )


def ratio_marks(x: Scale) -> list[tuple[float, str]]:
    """Round ratios in the picture, the most familiar first, as many as fit."""
    order = (1, 0.5, 2, 0.25, 4, 0.8, 1.25, 0.6, 1.6, 0.4, 2.5, 0.3, 3, 0.9, 1.1, 0.7, 1.4)
    placed: list[tuple[float, str]] = []
    for ratio in order:
        at = x(math.log(ratio))
        if x.start <= at <= x.stop and all(abs(at - other) >= 42 for other, _ in placed):
            placed.append((at, f"{ratio:g}"))
    return sorted(placed)


def _count(value: int) -> str:
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= size:
            return f"{value // size}{letter}"
    return str(value)


def _y_axis(title: str, marks: Iterable[tuple[float, str]], width: int) -> str:
    out = [f'<text class="axis-title" x="{LEFT - 48}" y="{TOP - 16}">{escape(title)}</text>']
    for at, label in marks:
        out.append(
            f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{at:.2f}" y2="{at:.2f}"/>'
            f'<text class="tick y" x="{LEFT - 8}" y="{at + 4:.2f}" text-anchor="end">{label}</text>'
        )
    return "".join(out)


def _x_axis(title: str, marks: Iterable[tuple[float, str]], width: int) -> str:
    foot = HEIGHT - BOTTOM
    out = [f'<line class="axis" x1="{LEFT}" x2="{width - RIGHT}" y1="{foot}" y2="{foot}"/>']
    for at, label in marks:
        out.append(
            f'<line class="axis" x1="{at:.2f}" x2="{at:.2f}" y1="{foot}" y2="{foot + 4}"/>'
            f'<text class="tick x" x="{at:.2f}" y="{foot + 17}" text-anchor="middle">{label}</text>'
        )
    middle = (LEFT + width - RIGHT) / 2
    out.append(f'<text class="axis-title" x="{middle:g}" y="{HEIGHT - 6}" text-anchor="middle">{escape(title)}</text>')
    return "".join(out)
