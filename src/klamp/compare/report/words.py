"""Numbers as the page writes them: with their unit, with their interval, and regions."""

from __future__ import annotations

from klamp.compare.report.data import Comparison, Difference, Metric, Region, Summary
from klamp.report.charts import number

MINUS = "\N{MINUS SIGN}"
NONE = "\N{EN DASH}"
HARD = "\N{NO-BREAK SPACE}"
UNITS = {"share": "", "count": "", "norm": "", "": ""}  # units that are not written after a number


def plain(value: float, metric: Metric) -> str:
    """A value without its unit: of a share in per cent."""
    return fixed(100 * value) if metric.share else number(value)


def fixed(value: float) -> str:
    return (
        f"{value:.{1 if abs(value) >= 0.05 or value == 0 else 2}f}".replace("-", MINUS)
        if abs(value) >= 0.005 or value == 0
        else number(value)
    )


def shown(value: float | None, metric: Metric) -> str:
    """A value with its unit, if it has one that is written."""
    if value is None:
        return NONE
    unit = "%" if metric.share else UNITS.get(metric.unit, f" {metric.unit}")
    return plain(value, metric) + unit


def interval(low: float | None, high: float | None, metric: Metric) -> str:
    return "" if low is None or high is None else f"[{plain(low, metric)}, {plain(high, metric)}]"


def mean(summary: Summary | None, metric: Metric) -> str:
    """The mean and, where there are seeds enough for one, its interval."""
    if summary is None or summary.mean is None:
        return NONE
    return f"{shown(summary.mean, metric)} {interval(summary.low, summary.high, metric)}".strip()


def signed(value: float, metric: Metric) -> str:
    return ("+" if value > 0 else "") + plain(value, metric)


def unit_of_difference(metric: Metric) -> str:
    return "points" if metric.share else metric.unit


def difference(found: Difference, metric: Metric, unit: bool = True) -> str:
    """The mean difference, with its interval where there is one."""
    if found.mean is None:
        return NONE
    both = found.low is not None and found.high is not None
    ends = f" [{', '.join(signed(end, metric) for end in (found.low, found.high) if end is not None)}]" if both else ""
    name = unit_of_difference(metric)
    return f"{signed(found.mean, metric)}{ends}{f' {name}' if unit and name not in ('', 'count', 'norm') else ''}"


def definition(metric: Metric) -> str:
    """What a metric is, in a sentence or two, and which side is better."""
    better = {"higher": " Higher is better.", "lower": " Lower is better."}.get(metric.better or "", "")
    return f"{metric.definition or metric.title}".rstrip(".") + "." + better


def p_value(value: float | None, name: str = "p") -> str:
    """Two digits, and no more precision than a test of a few seeds has."""
    if value is None:
        return ""
    return f"{name}{HARD}<{HARD}0.001" if value < 0.001 else f"{name}{HARD}={HARD}{value:.2g}"


def region(found: Region | None) -> str:
    if found is None or (found.low is None and found.high is None):
        return "no interval"
    low = None if found.low is None or found.low <= 0 else ratio(found.low)
    high = None if found.high is None else ratio(found.high)
    if low is None or high is None:
        return f"at least {low}" if high is None else f"at most {high}"
    return f"{low} to {high}"


def ratio(value: float) -> str:
    """Four digits; near 1 four digits of the distance from it, which is what a clip sets."""
    return f"{value:.4g}" if abs(value - 1) >= 0.01 else f"{value:.6g}" if abs(value - 1) >= 1e-4 else f"{value:.9g}"


def coordinates(found: Region | None) -> str:
    if found is None or found.a is None or found.radius is None:
        return ""
    return f"a = {number(round(found.a, 4) + 0.0)}, radius {number(found.radius)}"


def seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def inside(title: str) -> str:
    """A title inside a sentence: without its capital, unless it begins with a symbol."""
    return title[:1].lower() + title[1:] if title[1:2].islower() else title


def listed(names: list[str]) -> str:
    """a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def too_few(comparison: Comparison) -> str:
    """Why nothing is ranked; empty where there are seeds enough."""
    if comparison.judged:
        return ""
    return (
        f"With {seeds(len(comparison.seeds))} nothing is ranked here: no intervals, no tests and no verdicts. "
        "Those need 3 seeds at least; 5 or more are better."
    )
