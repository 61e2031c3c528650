"""One static picture of a spec: its region, its surrogate and its gradient coefficient, as a plain SVG without a script."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from klamp.aggregates import Aggregate
from klamp.atlas.facts import drawn_factors, first_interval, is_interval
from klamp.atlas.places import entries
from klamp.errors import UserError
from klamp.factors import Factor
from klamp.gates import GATES, SelectingGate
from klamp.guards import Guard
from klamp.measures import Measure, power
from klamp.presets import parse
from klamp.radii import number
from klamp.regions import Region
from klamp.report.charts import Scale, tick_labels, ticks
from klamp.spec import Spec

WIDTH, HEIGHT = 780, 262
_PANEL, _LEFT, _TOP, _FOOT = 250, 44, 62, 206
_FARTHEST = 6.0  # of log w that is drawn
_POINTS = 121


@dataclass(frozen=True)
class Curves:
    """What a spec does over the log-ratio of one guard: per sign of A the surrogate J and the coefficient g."""

    guard: Guard
    x: list[float]
    surrogate: dict[int, list[float]]
    coefficient: dict[int, list[float]]

    @property
    def region(self) -> Region:
        assert isinstance(self.guard.region, Region)
        return self.guard.region


def svg(spec: Spec | str) -> str:
    """The picture of a spec's first interval guard: {D <= radius}, J(w) and g(w) for A = +1 and A = -1.

    The curves are the objective's own, of a response of one token, with every other ratio of policies at 1. Raises
    UserError if no guard's region is an interval of w.
    """
    method = parse(spec)
    guard = first_interval(method)
    if guard is None:
        names = list(dict.fromkeys(entry["name"] for entry in entries()))
        known = f"{', '.join(names[:8])} and {len(names) - 8} others (klamp map)"
        raise UserError(
            f"{method} has no guard whose region is an interval of w, so there is nothing to draw; "
            f"specs with one: guard(measure=..., radius=...), {known}"
        )
    return _picture(method, curves(method, guard))


def write(spec: Spec | str, out: Path) -> Path:
    """Write the picture to a file; returns its path. Raises UserError as ``svg``, and if it cannot be written."""
    target, content = Path(out), svg(spec)
    try:
        target.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write the picture to {os.fspath(out)}: {error.strerror}; give a file, such as out.svg"
        ) from error
    return target


# --- the numbers ----------------------------------------------------------------------------------------------


def curves(spec: Spec, guard: Guard, x: Sequence[float] | None = None) -> Curves:
    """J and g over log-ratios ``x`` of a guard's ratio, for A = +1 and A = -1, from the objective."""
    import torch

    from klamp.batch import Batch
    from klamp.objective import Objective

    xs = list(_grid(guard, _kin(spec, guard)) if x is None else x)
    n = len(xs)
    value = torch.tensor([*xs, *xs], dtype=torch.float64).unsqueeze(1)
    zero, numerator = torch.zeros_like(value), guard.ratio.partition("/")[0]
    old = value if numerator == "old" else zero
    batch = Batch(
        value, old, torch.tensor([1.0] * n + [-1.0] * n, dtype=torch.float64), torch.ones_like(value, dtype=torch.bool),
        logp_rollout=zero, logp_ref=zero, entropy=zero, group=torch.arange(2 * n), segment=torch.zeros(2 * n, 1, dtype=torch.int64),
    )  # fmt: skip
    out = Objective(_isolated(spec, guard), diagnostics=False)(batch)
    surrogate, coefficient = (-out.per_token).flatten().tolist(), out.grad_policy.flatten().tolist()
    return Curves(guard, xs, {1: surrogate[:n], -1: surrogate[n:]}, {1: coefficient[:n], -1: coefficient[n:]})


def _isolated(spec: Spec, guard: Guard) -> Spec:
    """The parts that act on the guard's own ratio; a correction multiplies w A, whose w is 1 here."""
    kin = _kin(spec, guard)
    plain = [replace(one, gate=GATES["always"]) if isinstance(one.gate, SelectingGate) else one for one in kin]
    factors = drawn_factors(spec, guard)
    if not guard.ratio.startswith("new/"):
        factors = [*factors, Factor()]
    return Spec(tuple(plain), tuple(factors), (), Aggregate("token_mean"))


def _kin(spec: Spec, guard: Guard) -> list[Guard]:
    """The intervals of the guard's own ratio over the same scope, itself among them."""

    def of(one: Guard) -> tuple[object, ...]:
        return one.ratio, one.scope, one.reduce, one.discount

    return [one for one in spec.guards if is_interval(one) and of(one) == of(guard)]


def _bounds(guard: Guard) -> list[float]:
    assert isinstance(guard.region, Region)
    return [bound for bound in (guard.region.log_low, guard.region.log_high) if bound and math.isfinite(bound)]


def _grid(guard: Guard, kin: Sequence[Guard]) -> Iterable[float]:
    """Log-ratios from end to end of the picture, with both sides of every step."""
    others = [1.3 * abs(bound) for one in kin for bound in _bounds(one)]
    reach = min(max([1.9 * abs(bound) for bound in _bounds(guard)] + others, default=1.0), _FARTHEST)
    even = [reach * (2.0 * k / (_POINTS - 1) - 1.0) for k in range(_POINTS)]
    steps = [bound * (1.0 + side * 1e-9) for one in kin for bound in _bounds(one) for side in (-1.0, 1.0)]
    return sorted({*even, *(step for step in steps if abs(step) < reach)})


# --- the picture ----------------------------------------------------------------------------------------------

_STYLE = """\
svg { color-scheme: light dark; --card: #fff; --ink: #1d2126; --soft: #59616b; --rule: #dedbd2; --grid: #eceae4; --axis: #8b939e;
  --one: #0f766e; --two: #a8327f; --fill: #0f766e1c; }
@media (prefers-color-scheme: dark) { svg { --card: #1b1e23; --ink: #e8e9eb; --soft: #a7aeb8; --rule: #343a42; --grid: #272c32;
  --axis: #7d8692; --one: #3ccfb9; --two: #ec8fc9; --fill: #3ccfb922; } }
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--soft); }
.head { font-size: 14px; font-weight: 650; fill: var(--ink); } .name { font-weight: 650; fill: var(--ink); } .strong { fill: var(--ink); font-weight: 600; }
.card { fill: var(--card); stroke: var(--rule); } .grid { stroke: var(--grid); } .axis { stroke: var(--axis); }
.fill { fill: var(--fill); } .edge { stroke: var(--one); stroke-dasharray: 1 3; } .limit { stroke: var(--axis); stroke-dasharray: 4 3; }
.one, .two { fill: none; stroke: var(--one); stroke-width: 2; stroke-linejoin: round; } .two { stroke: var(--two); stroke-dasharray: 5 3.5; }
"""


def _picture(spec: Spec, found: Curves) -> str:
    region, reach = found.region, found.x[-1]
    where = f"w = {found.guard.ratio}" + ("" if found.guard.scope == "token" else f" over the {found.guard.scope}")
    bounds = f"{_ratio(region.low)} \N{LESS-THAN OR EQUAL TO} w \N{LESS-THAN OR EQUAL TO} {_ratio(region.high)}"
    title = f"{spec}: {bounds}, {where}"
    shown = str(spec) if len(str(spec)) <= 66 else f"{str(spec)[:65]}\N{HORIZONTAL ELLIPSIS}"
    panels = [
        _divergence(found, reach),
        _panel(1, "surrogate J(w)", found, reach, found.surrogate),
        _panel(2, "gradient coefficient g(w)", found, reach, found.coefficient),
    ]
    legend = (
        f'<path class="one" d="M{WIDTH - 176},20h22"/><text x="{WIDTH - 150}" y="24">A = +1</text>'
        f'<path class="two" d="M{WIDTH - 92},20h22"/><text x="{WIDTH - 66}" y="24">A = \N{MINUS SIGN}1</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{escape(title)}"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"/>'
        f'<text class="head" x="16" y="24">{escape(shown)}</text>{legend}{"".join(panels)}'
        f'<text x="{WIDTH - 16}" y="{HEIGHT - 12}" text-anchor="end">{escape(where)}, log scale</text>'
        f'<text class="strong" x="16" y="{HEIGHT - 12}">{bounds}</text></svg>\n'
    )


def _divergence(found: Curves, reach: float) -> str:
    """The first panel: D over the ratio, its radius, and the interval that they leave."""
    measure, radius = _measure(found.region)
    if measure is None or radius is None or radius == 0.0:
        return _panel(0, "region", found, reach, {})
    values = [float(measure.divergence(x)) / radius for x in found.x]
    return _panel(0, "divergence / radius", found, reach, {1: values}, limit=1.0)


def _measure(region: Region) -> tuple[Measure | None, float | None]:
    """A measure and radius with this region: its own, or the power family's."""
    if region.measure is not None:
        radius = None if region.radius is None else float(number(region.radius))
        return region.measure, radius if radius is not None and math.isfinite(radius) else None
    where = region.coordinates
    return (None, None) if where is None else (power(where.a), where.radius)


def _panel(
    k: int, name: str, found: Curves, reach: float, series: dict[int, list[float]], limit: float | None = None
) -> str:
    left, right = _LEFT + k * (_PANEL + 6), _LEFT + k * (_PANEL + 6) + _PANEL - 54
    top = math.inf if limit is None else 3.2 * limit
    values = [value for one in series.values() for value in one if value <= top] + ([] if limit is None else [1.6])
    low, high = (min([0.0, *values]), max([0.0, *values])) if values else (0.0, 1.0)
    pad = 0.08 * (high - low or 1.0)
    x, y = Scale(-reach, reach, left, right), Scale(low - (0 if limit else pad), high + pad, _FOOT, _TOP)
    region = found.region
    start, stop = x(max(-reach, region.log_low)), x(min(reach, region.log_high))
    parts = [f'<text class="name" x="{left}" y="{_TOP - 10}">{name}</text>',
             f'<rect class="fill" x="{start:.1f}" y="{_TOP}" width="{max(stop - start, 0):.1f}" height="{_FOOT - _TOP}"/>']  # fmt: skip
    marks = [mark for mark in ticks(y.low, y.high, 4) if y.low <= mark <= y.high] if values else []
    for mark, label in zip(marks, tick_labels(marks) if marks else [], strict=True):
        kind = "axis" if mark == 0.0 else "grid"
        parts.append(
            f'<path class="{kind}" d="M{left},{y(mark):.1f}H{right}"/><text x="{left - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{label}</text>'
        )
    if limit is not None:
        parts.append(f'<path class="limit" d="M{left},{y(limit):.1f}H{right}"/>')
    parts += [
        f'<path class="edge" d="M{x(bound):.1f},{_TOP}V{_FOOT}"/>'
        for bound in (region.log_low, region.log_high)
        if abs(bound) <= reach
    ]
    for sign, line in series.items():
        pairs = zip(found.x, line, strict=True)
        path = "L".join(f"{x(at):.1f},{y(value):.1f}" for at, value in pairs if value <= top)
        parts.append(f'<path class="{"one" if sign > 0 else "two"}" d="M{path}"/>')
    return "".join(parts) + _ratio_ticks(region, x, reach)


def _ratio_ticks(region: Region, x: Scale, reach: float) -> str:
    out = [f'<path class="axis" d="M{x.start},{_FOOT}H{x.stop}"/>']
    taken: list[float] = []
    for at in (region.log_low, region.log_high, 0.0):
        label = _ratio(math.exp(at)) if abs(at) <= reach else ""
        if label and all(abs(x(at) - other) > 13 + 4 * len(label) for other in taken):
            taken.append(x(at))
            kind = ' class="strong"' if at else ""
            out.append(
                f'<path class="axis" d="M{x(at):.1f},{_FOOT}v4"/><text{kind} x="{x(at):.1f}" y="{_FOOT + 17}" text-anchor="middle">{label}</text>'
            )
    return "".join(out)


def _ratio(w: float) -> str:
    """Enough digits to tell a bound from 1."""
    if w == math.inf:
        return "\N{INFINITY}"
    gap = abs(w - 1.0)
    return f"{w:.{3 if gap == 0.0 or gap > 0.01 else min(2 - math.floor(math.log10(gap)), 12)}g}"
