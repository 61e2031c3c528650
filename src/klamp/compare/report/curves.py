"""Curves over optimizer steps: the mean over seeds of each spec, the range of the seeds, and each seed, thin."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from klamp.compare.report import canvas
from klamp.compare.report.canvas import Axis, Frame, across, tone
from klamp.compare.report.data import Spec
from klamp.report.charts import number, smooth

LIMIT = 120  # points of a line that are drawn; more are averaged in equal groups of steps
MANY = 40  # of more points than that each seed is smoothed

Column = dict[int, float | None]  # by step; None a gap


@dataclass(frozen=True)
class Bundle:
    """The lines of one spec: one per seed, and over them the mean, the range and how many seeds there are."""

    spec: Spec
    seeds: tuple[tuple[str, Column], ...]
    mean: Column
    low: Column
    high: Column
    count: dict[int, int]


@dataclass(frozen=True)
class Chart:
    """What one chart shows: a quantity, the title and the sentence, and the unit of its values."""

    curve: str
    title: str
    caption: str
    unit: str
    percent: bool = False
    kind: str = "curve"  # of Frame; a tall one is as wide as the page


def section(name: str, title: str, intro: str, charts: Sequence[Chart], specs: Sequence[Spec], more: str = "") -> str:
    """Charts side by side, and after them the figures in `more`."""
    body = "".join(draw(chart, specs, f"{name}-{k}") for k, chart in enumerate(charts)) + more
    return canvas.section(name, title, intro, f'<div class="charts">{body}</div>')


def draw(chart: Chart, specs: Sequence[Spec], name: str) -> str:
    """One chart; the page's script reads its numbers off under the pointer or with the arrow keys."""
    found, grouped, window = bundles(chart.curve, specs)
    values = [v for one in found for column in (one.mean, one.low, one.high) for v in column.values() if v is not None]
    if not values:
        return canvas.nothing(chart.title, chart.caption)
    means = [v for one in found for v in one.mean.values() if v is not None]
    log = canvas.uneven([v for one in found for v in one.high.values() if v is not None])
    y = (
        canvas.logarithmic(values, chart.percent)
        if log
        else canvas.linear(values if len(found) <= canvas.FEW else means, chart.percent)
    )
    caption = chart.caption + _how(found, grouped, window)
    if log:
        caption += " The value axis is logarithmic."
        if y.floor is not None and min(values) < y.floor * (1 - 1e-9):
            caption += f" Values below {number(y.floor, chart.percent)} are drawn at its foot."
    elif any(y.beyond(value) for value in values):
        caption += " Seeds beyond the picture run along its edge."
    steps = sorted({step for one in found for step in one.mean})
    x = canvas.steps(steps[0], steps[-1])
    frame = Frame(chart.kind)
    lines = "".join(_lines(one, x, y, frame) for one in found)
    marks = "".join(_marks(one, x, y, frame, len(found)) for one in found)
    dots = "".join(
        f'<circle class="dot series {tone(one.spec.place)}" data-s="{one.spec.place}" r="4.5"/>' for one in found
    )
    cross = f'<line class="cross" y1="{canvas.TOP}" y2="{canvas.TOP + frame.depth}"/>'
    picture = frame.draw(x, y, frame.lines(lines) + marks + cross + dots, _label(chart, found),
                         "optimizer step", f"{chart.unit}{' (logarithmic)' if log else ''}", focus=True)  # fmt: skip
    data = json.dumps(_data(found, x, y, chart, log), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    body = f'<div class="curves" id="{name}">{picture}<div class="tip" hidden></div></div>{canvas.keys(specs)}'
    script = f'<script type="application/json" data-for="{name}">{data}</script>'
    return canvas.figure(chart.title, caption, body + script, "wide" if chart.kind == "tall" else "")


# -- numbers -----------------------------------------------------------------------------------


def bundles(curve: str, specs: Sequence[Spec]) -> tuple[list[Bundle], int, int]:
    """The lines of every spec that recorded a curve; how many steps each point averages, and over how many points."""
    every = sorted({step for spec in specs for run in spec.runs for step in run.curves.get(curve, ())})
    size = max(1, math.ceil(len(every) / LIMIT))
    ends = [every[min(k + size, len(every)) - 1] for k in range(0, len(every), size)]
    found, window = [], 1
    for spec in specs:
        seeds = []
        for run in spec.runs:
            column = grouped(run.curves.get(curve, {}), ends) if size > 1 else run.curves.get(curve, {})
            if len(column) > MANY:
                smoothed, width = smooth(list(column.items()))
                column, window = dict(smoothed), max(window, width)
            if any(value is not None for value in column.values()):
                seeds.append((run.seed, column))
        if seeds:
            found.append(over(spec, seeds))
    return found, size, window


def grouped(column: Column, ends: Sequence[int]) -> Column:
    """The mean of each group of steps, at the group's last step; a group of gaps is a gap."""
    parts: dict[int, list[float | None]] = {}
    for step, value in column.items():
        parts.setdefault(ends[bisect.bisect_left(ends, step)], []).append(value)
    known = {end: [value for value in values if value is not None] for end, values in parts.items()}
    return {end: math.fsum(values) / len(values) if values else None for end, values in known.items()}


def over(spec: Spec, seeds: Sequence[tuple[str, Column]]) -> Bundle:
    """Mean, range and number of the seeds that have a value at each step."""
    at: dict[int, list[float]] = {}
    for _, column in seeds:
        for step, value in column.items():
            at.setdefault(step, []).extend([] if value is None else [value])
    order = sorted(at)
    return Bundle(
        spec, tuple(seeds),
        {step: math.fsum(at[step]) / len(at[step]) if at[step] else None for step in order},
        {step: min(at[step], default=None) for step in order},
        {step: max(at[step], default=None) for step in order},
        {step: len(at[step]) for step in order},
    )  # fmt: skip


# -- lines -------------------------------------------------------------------------------------


def _pieces(column: Column) -> list[list[tuple[int, float]]]:
    """The runs of values between gaps."""
    pieces: list[list[tuple[int, float]]] = [[]]
    for step, value in column.items():
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((step, value))
    return [piece for piece in pieces if piece]


def _path(column: Column, x: Axis, y: Axis, frame: Frame) -> str:
    """One path for all pieces; a point between two gaps is a line of no length, which round caps make a dot."""
    out = []
    for piece in _pieces(column):
        points = [frame.point(x.at(step), y.at(value)) for step, value in piece]
        out.append("M" + " ".join(points if len(points) > 1 else points * 2))
    return "".join(out)


def _lines(one: Bundle, x: Axis, y: Axis, frame: Frame) -> str:
    inner = ""
    if len(one.seeds) > 1:
        for low in _pieces(one.low):
            high = [(step, one.high[step]) for step, _ in reversed(low)]
            outline = low + [(step, value) for step, value in high if value is not None]
            points = " ".join(frame.point(x.at(step), y.at(value)) for step, value in outline)
            inner += f'<polygon class="band" points="{points}"/>'
        inner += "".join(f'<path class="seed" d="{_path(column, x, y, frame)}"/>' for _, column in one.seeds)
    place = one.spec.place
    inner += f'<path class="mean d{place % 5}" d="{_path(one.mean, x, y, frame)}"/>'
    return f'<g class="series {tone(place)}" data-s="{place}">{inner}</g>'


def _marks(one: Bundle, x: Axis, y: Axis, frame: Frame, lines: int) -> str:
    """The spec's mark on its line, four times, shifted from spec to spec so that they do not cover each other."""
    known = [(step, value) for step, value in one.mean.items() if value is not None]
    if len(known) <= 12 and lines <= 4:
        chosen = known
    else:
        wanted = [(k + ((one.spec.place * 3) % 10) / 10) / 4 for k in range(4)]
        chosen = [known[min(len(known) - 1, round(share * (len(known) - 1)))] for share in wanted]
    return "".join(
        canvas.mark(one.spec.place, across(x.at(step)), frame.y(y.at(value))) for step, value in dict(chosen).items()
    )


def _how(found: Sequence[Bundle], size: int, window: int) -> str:
    out = ""
    if size > 1 or window > 1:
        width = size * window
        out = f" Each seed is averaged over {width} logged steps."
    if any(len(one.seeds) > 1 for one in found):
        counts = {len(one.seeds) for one in found}
        most = f"up to {max(counts)}" if len(counts) > 1 else max(counts)
        out += f" Line: mean over seeds; band (button Range): from the lowest to the highest of {most} seeds."
    return out


def _label(chart: Chart, found: Sequence[Bundle]) -> str:
    ends = []
    for one in found:
        step, value = next(((s, v) for s, v in reversed(one.mean.items()) if v is not None), (0, 0.0))
        ends.append(f"{one.spec.label} {number(value, chart.percent)} at step {step}")
    return f"{chart.title}, mean over seeds by optimizer step: {'; '.join(ends)}"


def _data(found: Sequence[Bundle], x: Axis, y: Axis, chart: Chart, log: bool) -> dict[str, object]:
    def short(column: Column, order: Sequence[int]) -> list[float | None]:
        return [None if (value := column[step]) is None else float(f"{value:.4g}") for step in order]

    series = []
    for one in found:
        order = list(one.mean)
        known: dict[str, object] = {"s": one.spec.place, "steps": order, "mean": short(one.mean, order)}
        if len(one.seeds) > 1:
            known |= {"low": short(one.low, order), "high": short(one.high, order), "n": list(one.count.values())}
        series.append(known)
    depth = Frame(chart.kind).depth
    return {"x": [x.low, x.high], "y": [y.low, y.high, canvas.TOP, depth], "log": log, "floor": y.floor,
            "percent": chart.percent, "series": series}  # fmt: skip
