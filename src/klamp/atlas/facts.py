"""A guard as plain facts: numbers and words that fit into a page, and whether its region is an interval of w."""

from __future__ import annotations

import math
from typing import Any

from klamp.binary import BINARY
from klamp.conditions import Budget, Condition, Distance
from klamp.factors import Factor
from klamp.gates import GATES, Gate, Likely
from klamp.guards import Guard
from klamp.measures import FAMILIES
from klamp.radii import number
from klamp.regions import Region
from klamp.spec import Spec, part_text
from klamp.transforms import Cap, Identity

NUMBERS = ("radius_low", "radius_high", "ratio_low", "ratio_high", "a", "strength", "weight_low", "weight_high")
WHY = {
    "budget": "its radius follows from the divergences of the whole step",
    "whole": "its divergence is over the vocabulary",
    "nowhere": "its gate alone selects what is cut",
    "after": "it bounds a mean of divergences, not one ratio",
}


def is_interval(guard: Guard) -> bool:
    """Whether what lies inside is one interval of w."""
    return isinstance(guard.region, Region) and not guard.after


def first_interval(spec: Spec) -> Guard | None:
    """The first guard whose region is an interval, best with two bounds, best of the new policy."""
    found = [guard for guard in spec.guards if is_interval(guard)]
    return min(
        found, key=lambda guard: (not _two_sided(guard.region), not guard.ratio.startswith("new/")), default=None
    )


def _two_sided(region: Condition) -> bool:
    return isinstance(region, Region) and -math.inf < region.log_low and region.log_high < math.inf


def facts(spec: Spec) -> list[dict[str, Any]]:
    """The guards of a spec as dictionaries of numbers and words, in the order of the spec."""
    return [_fact(spec, guard) for guard in spec.guards]


def _fact(spec: Spec, guard: Guard) -> dict[str, Any]:
    weight, low, high = _weight(drawn_factors(spec, guard))
    gate, where = _gate(guard)
    found: dict[str, Any] = {
        "kind": _kind(guard), "measure": None, "ratio": guard.ratio, "scope": guard.scope, "reduce": guard.reduce,
        "gate": gate, "where": where, "action": guard.action, "cut_value": guard.cut_value, "weight": weight,
        "strength": guard.strength, "weight_low": low, "weight_high": high,
    }  # fmt: skip
    return found | _region(guard.region)


def _kind(guard: Guard) -> str:
    region = guard.region
    if guard.after:
        return "after"
    if isinstance(region, Distance):
        return "binary" if region.measure in BINARY else "whole"
    return "interval" if isinstance(region, Region) else "budget" if isinstance(region, Budget) else "nowhere"


def _region(region: Condition) -> dict[str, Any]:
    if not isinstance(region, (Region, Distance)):
        return {}
    if isinstance(region, Region) and region.measure is None:
        high = math.inf if region.ratio_high is None else region.ratio_high
        return {"ratio_low": region.ratio_low or 0.0, "ratio_high": high}
    family, _, inner = str(region.measure).partition("(")
    parameter = {"a": float(inner.rstrip(")"))} if family in FAMILIES else {}
    radii = {f"radius_{side}": float(number(getattr(region, f"radius_{side}"))) for side in ("low", "high")}
    return {"measure": family} | parameter | radii


def _gate(guard: Guard) -> tuple[str, str]:
    """The plain gate that a token meets, and in words what more the gate asks of it."""
    if isinstance(guard.gate, Gate):
        return (str(guard.gate) if str(guard.gate) in GATES else "other"), str(guard.gate)
    return ("outward" if isinstance(guard.gate, Likely) else "other"), part_text(guard.gate)


def drawn_factors(spec: Spec, guard: Guard) -> list[Factor]:
    """The factors that depend on the guard's own ratio; all others are 1 in a picture of that ratio."""
    of = (guard.ratio, guard.scope, guard.reduce, guard.discount)
    return [one for one in spec.factors if one.of == of or (one.clipped and one.ratio == guard.ratio)]


def _weight(factors: list[Factor]) -> tuple[str, float, float]:
    """none, the ratio itself, the ratio capped, or another function of it."""
    if not factors:
        return "none", 0.0, math.inf
    transform = factors[0].transform
    if len(factors) == 1 and isinstance(transform, Identity):
        return "ratio", 0.0, math.inf
    if len(factors) == 1 and isinstance(transform, Cap):
        return "cap", transform.low, transform.high
    return "other", 0.0, math.inf


def plain(value: Any) -> Any:
    """The same for JSON, which has no infinity."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return ("inf" if value > 0 else "-inf") if isinstance(value, float) and math.isinf(value) else value
