"""Paired differences against the reference: the mean with its interval, and one dot for each seed."""

from __future__ import annotations

import math

from klamp.compare.report import canvas
from klamp.compare.report.canvas import Axis, across, ruled, tone
from klamp.compare.report.data import ENOUGH, Comparison, Difference, Metric, Spec
from klamp.compare.report.words import difference, listed, p_value, signed, too_few, unit_of_difference
from klamp.report.page import text

MAIN = 4  # panels that are always open
FIRST = ("accuracy_sampled", "accuracy_greedy", "auc", "largest_drop")


def section(c: Comparison) -> str:
    title = f"Differences from {c.reference or 'the reference'}"
    others = [spec for spec in c.drawn if spec.label != c.reference]
    metrics = ordered(c)
    panels = [panel(c, metric, others) for metric in metrics]
    shown = [panel for panel in panels if panel]
    if not shown:
        why = "There are no differences to show: nothing but the reference ran, or no seed finished with both."
        return canvas.section("differences", title, why, "")
    intro = (
        "Each seed is compared with the same seed of the reference: the same questions in the same order, so that what "
        "the seeds have in common drops out. Big mark: mean; whisker: 95 % interval; small dots: the seeds. "
        "An interval that crosses the line of no difference does not show one, nor that there is none. Better and worse are said of "
        "the main metrics alone, with p corrected (Holm) for all their comparisons together; of many others some look "
        "different by chance."
    )
    if not c.judged:
        intro = "Each seed is compared with the same seed of the reference, a dot each. " + too_few(c)
    rest = ""
    if len(shown) > MAIN:
        noun = "one more metric" if len(shown) == MAIN + 1 else f"{len(shown) - MAIN} more metrics"
        rest = f'<details class="more"><summary>Differences in {noun}</summary><div class="charts">{"".join(shown[MAIN:])}</div></details>'
    return canvas.section("differences", title, intro, f'<div class="charts">{"".join(shown[:MAIN])}</div>{rest}')


def ordered(c: Comparison) -> list[Metric]:
    """The metrics that the page is about first, then the others as they came."""
    first = [metric for name in FIRST if (metric := c.find(name))]
    return list(dict.fromkeys([*first, *c.metrics]))


def panel(c: Comparison, metric: Metric, others: list[Spec]) -> str:
    found = [
        (spec, one) for spec in others if (one := c.differences.get((spec.label, metric.name))) and one.mean is not None
    ]
    if not found:
        return ""
    factor = 100.0 if metric.share else 1.0
    values = [0.0]
    for _, one in found:
        values += [factor * v for v in _drawn(c, one)]
    x = canvas.linear([*canvas.inner(values), 0.0])
    far = [spec.label for spec, one in found if any(x.beyond(factor * v) for v in _drawn(c, one))]
    rows = "".join(_row(c, spec, one, metric, x, factor) for spec, one in found)
    absent = [spec.label for spec in others if spec.label not in {spec.label for spec, _ in found}]
    caption = _caption(metric) + (f" Not recorded: {', '.join(absent)}." if absent else "")
    caption += f" Arrows: {listed(far)} beyond the picture." if far else ""
    unit = unit_of_difference(metric) or "count"
    return canvas.figure(
        metric.title,
        caption,
        f'<div class="rows">{rows}{canvas.row_foot(x, f"difference from {c.reference}, {unit}")}</div>',
    )


def _caption(metric: Metric) -> str:
    if metric.better is None:
        return "Right of the line: more than the reference; neither side is better as such."
    return f"{'Right' if metric.better == 'higher' else 'Left'} of the line is better."


def _tested(c: Comparison, one: Difference) -> bool:
    return c.judged and one.n >= ENOUGH


def _drawn(c: Comparison, one: Difference) -> list[float]:
    ends = [one.low, one.high] if _tested(c, one) else []
    return [value for value in (one.mean, *ends, *(v for _, v in one.values)) if value is not None]


def _row(c: Comparison, spec: Spec, one: Difference, metric: Metric, x: Axis, factor: float) -> str:
    assert one.mean is not None
    tested = _tested(c, one)
    body = ""
    if tested and one.low is not None and one.high is not None:
        ends = [factor * one.low, factor * one.high]
        left, right = (across(x.at(end)) for end in ends)
        body += f'<line class="whisker" x1="{left}" x2="{right}" y1="10" y2="10"/>'
        for end, place in zip(ends, (left, right), strict=True):
            side = x.beyond(end)
            cap = f'<line class="whisker" x1="{place}" x2="{place}" y1="6" y2="14"/>'
            body += canvas.arrow(place, 10, 90 - 90 * side) if side else cap
    for seed, value in one.values:
        place, side = across(x.at(factor * value)), x.beyond(factor * value)
        tip = text(f"{spec.label}, seed {seed}: {signed(value, metric)} {unit_of_difference(metric)}")
        dot = (
            canvas.arrow(place, 23, 90 - 90 * side)
            if side
            else f'<circle class="seed-dot" cx="{place}" cy="23" r="3.5"/>'
        )
        body += f'<g data-tip="{tip}">{dot}</g>'
    middle, side = across(x.at(factor * one.mean)), x.beyond(factor * one.mean)
    body += (
        canvas.far_mark(spec.place, middle, 10, "b", "", side, 0) if side else canvas.mark(spec.place, middle, 10, "b")
    )
    strip = ruled(x, body, zero=0.0)
    name = f'<p class="who">{canvas.named(spec)}</p>'
    return f'<div class="row series {tone(spec.place)}" data-s="{spec.place}">{name}<p class="what">{_said(c, spec, one, metric)}</p>{strip}</div>'


def _said(c: Comparison, spec: Spec, one: Difference, metric: Metric) -> str:
    if not _tested(c, one):
        assert one.mean is not None
        n = "1 seed" if one.n == 1 else f"{one.n} seeds"
        return f"{text(f'{signed(one.mean, metric)} {unit_of_difference(metric)}'.strip())} ({n})"
    out = text(difference(one, metric))
    verdict = c.verdict(spec.label, metric.name)
    if verdict:
        out += f' \N{MIDDLE DOT} <b class="verdict {verdict.split()[0]}">{verdict}</b>'
    return out + (f" \N{MIDDLE DOT} {p_value(one.p_holm)}" if one.p_holm is not None else "")


def needed(one: Difference) -> str:
    """How many seeds would show a difference of this size, where these did not."""
    known = one.needed is not None and one.mean is not None and not math.isclose(one.mean, 0.0, abs_tol=1e-300)
    return f"{one.needed:,}" if known and one.needed is not None else ""
