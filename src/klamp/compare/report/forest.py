"""Paired differences against the reference: the mean with its interval, and one dot for each seed."""

from __future__ import annotations

import math

from klamp.compare.report import canvas
from klamp.compare.report.canvas import Axis, across, ruled, tone
from klamp.compare.report.data import ENOUGH, Comparison, Difference, Metric, Spec
from klamp.compare.report.words import difference, p_value, signed, too_few, unit_of_difference
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
        "An interval that crosses the line of no difference does not show one. The p values are corrected for the number "
        "of comparisons (Holm)."
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
        ends = [one.low, one.high] if _tested(c, one) else []
        values += [factor * v for v in (one.mean, *ends, *(v for _, v in one.values)) if v is not None]
    x = canvas.linear(values)
    rows = "".join(_row(c, spec, one, metric, x, factor) for spec, one in found)
    absent = [spec.label for spec in others if spec.label not in {spec.label for spec, _ in found}]
    caption = _caption(metric) + (f" Not recorded: {', '.join(absent)}." if absent else "")
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


def _row(c: Comparison, spec: Spec, one: Difference, metric: Metric, x: Axis, factor: float) -> str:
    assert one.mean is not None
    tested = _tested(c, one)
    body = ""
    if tested and one.low is not None and one.high is not None:
        low, high = (across(x.at(factor * end)) for end in (one.low, one.high))
        body += f'<line class="whisker" x1="{low}" x2="{high}" y1="10" y2="10"/>'
        body += "".join(f'<line class="whisker" x1="{end}" x2="{end}" y1="6" y2="14"/>' for end in (low, high))
    body += "".join(
        f'<circle class="seed-dot" cx="{across(x.at(factor * value))}" cy="23" r="3.5" '
        f'data-tip="{text(f"{spec.label}, seed {seed}: {signed(value, metric)} {unit_of_difference(metric)}")}"/>'
        for seed, value in one.values
    )
    body += canvas.mark(spec.place, across(x.at(factor * one.mean)), 10, "b")
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
        out += f' <b class="verdict {verdict.split()[0]}">{verdict}</b>'
    return out + f" {p_value(one.p_holm, 'p')}".rstrip()


def needed(one: Difference) -> str:
    """How many seeds would show a difference of this size, where these did not."""
    known = one.needed is not None and one.mean is not None and not math.isclose(one.mean, 0.0, abs_tol=1e-300)
    return f"{one.needed:,}" if known and one.needed is not None else ""
