"""What a framework can say, as data: ways to write each form, correction, penalty and mean, with what differs.

A value that starts with ``=`` is one of ``FORMULAS`` of the spec's numbers, every other value is written as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

INF = math.inf
Numbers = Mapping[str, Any]
Flags = Mapping[str, Any]


def shortest(value: float, bound: Callable[[float], float]) -> float:
    """The shortest decimal near ``value`` from which ``bound`` computes the very same number; else ``value``."""
    if not math.isfinite(value):
        return value
    near = (round(value, digits) for digits in range(1, 17))
    return next((number for number in near if bound(number) == bound(value)), value)


def _below(low: float) -> float:
    return shortest(1.0 - low, lambda offset: 1.0 - offset)


def _above(high: float) -> float:
    return shortest(high - 1.0, lambda offset: 1.0 + offset)


# verl refuses a lower bound of 0; below exp(-20), where it clamps, a bound never acts.
_NEVER_LOW = 1e-9

FORMULAS: dict[str, Callable[[Numbers], Any]] = {
    "low": lambda n: n["low"],
    "high": lambda n: n["high"],
    "c": lambda n: n["c"],
    "cap": lambda n: n["cap"],
    "1 - low": lambda n: _below(n["low"]),
    "high - 1": lambda n: _above(n["high"]),
    "[1 - low, high - 1]": lambda n: [_below(n["low"]), _above(n["high"])],
    "[low, high]": lambda n: [n["low"], n["high"]],
    "{low}_{high}": lambda n: f"{max(n['low'], _NEVER_LOW)!r}_{n['high']!r}",
    "{1 / high}_{1 / low}": lambda n: f"{1.0 / n['high']!r}_{1.0 / n['low']!r}",
    "low or none": lambda n: n["low"] or None,
    "high or none": lambda n: None if n["high"] == INF else n["high"],
    "high or 0": lambda n: 0.0 if n["high"] == INF else n["high"],
    "-log low": lambda n: INF if not n["low"] else shortest(-math.log(n["low"]), lambda radius: math.exp(-radius)),
    "log high": lambda n: INF if n["high"] == INF else shortest(math.log(n["high"]), math.exp),
    "(c - 1) / 2": lambda n: shortest((n["c"] - 1.0) / 2.0, lambda half: 1.0 + 2.0 * half),
    "divisor": lambda n: int(n["divisor"]),
    "tau_pos": lambda n: n["tau_pos"],
    "tau_neg": lambda n: n["tau_neg"],
    "k_positive": lambda n: n["k_positive"],
    "lambda_positive": lambda n: n["lambda_positive"],
    "k_negative": lambda n: n["k_negative"],
    "lambda_negative": lambda n: n["lambda_negative"],
    "beta": lambda n: n["beta"],
    "beta / 2": lambda n: n["beta"] / 2.0,
    "coefficient": lambda n: n["coefficient"],
    "delta": lambda n: n["delta"],
    "radius": lambda n: n["radius"],
    "share": lambda n: n["share"],
    "option": lambda n: n["option"],
}

CONDITIONS: dict[str, tuple[str, Callable[[Numbers], bool]]] = {
    "no lower bound": ("it has no lower bound here", lambda n: n["low"] == 0.0),
    "no upper bound": ("it has no upper bound here", lambda n: n["high"] == INF),
    "two bounds": ("it needs both bounds here", lambda n: n["low"] > 0.0 and n["high"] < INF),
    "an upper bound": ("it needs an upper bound here", lambda n: n["high"] < INF),
    "high > 1": ("the upper bound must be above 1", lambda n: n["high"] > 1.0),
    "c >= high": ("the second bound c must not lie below the upper bound", lambda n: n["c"] >= n["high"]),
    "c > 1": ("c must be above 1", lambda n: n["c"] > 1.0),
    "no cap": ("the weight has no cap here", lambda n: n["cap"] == INF),
    "a cap": ("the weight needs a finite cap here", lambda n: n["cap"] < INF),
    "one radius": ("both sides share one radius here", lambda n: n["low"] == n["high"]),
    "[0, 1]": ("its bounds are fixed at [0, 1]", lambda n: (n["low"], n["high"]) == (0.0, 1.0)),
    "[0.9, 1.1]": ("its bounds are fixed at [0.9, 1.1]", lambda n: (n["low"], n["high"]) == (1.0 - 0.1, 1.0 + 0.1)),
    "beta = 0.1": ("its coefficient is fixed at 0.1", lambda n: n["beta"] == 0.1),
    "divisor = 1": ("its divisor is 1", lambda n: n["divisor"] == 1.0),
    "whole divisor": (
        "the divisor must be a whole number", lambda n: n["divisor"] is not None and float(n["divisor"]).is_integer()
    ),
    "no bounds": ("it has no bounds here", lambda n: n["low"] == 0.0 and n["high"] == INF),
    "around 1": (
        "its bounds must lie on both sides of 1", lambda n: n["low"] < 1.0 < n["high"]
    ),
    "whole responses": ("it takes rejected tokens out of a response's ratio", lambda n: n["level"] != "token"),
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """One way to write a piece: ``flags``, ``needs`` of its numbers (keys of ``CONDITIONS``), and what differs then.

    ``differs`` and ``edges`` are keys of ``klamp.export.facts``: anywhere (``key if mean``, ``key unless mean``: by the
    kind of the mean), or only at the edges. ``rows``: whether responses without a token count in this mean. ``call``, ``means``,
    ``anchors``, ``corrections`` and ``penalties`` stand in place of the framework's own where this way is taken.
    """

    flags: Flags = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    edges: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    call: str | None = None
    rows: str | None = None
    means: Ways | None = None
    anchors: Mapping[str, Flags] | None = None
    corrections: Ways | None = None
    penalties: Ways | None = None

    def write(self, numbers: Numbers) -> dict[str, Any]:
        """The flags with their numbers. Raises KeyError for a formula that is not in ``FORMULAS``."""
        return {name: written(value, numbers) for name, value in self.flags.items()}

    def unmet(self, numbers: Numbers) -> list[str]:
        """What it needs and these numbers do not give, as clauses."""
        return [CONDITIONS[need][0] for need in self.needs if not CONDITIONS[need][1](numbers)]


Ways = Mapping[str, tuple[Way, ...]]


def written(value: Any, numbers: Numbers) -> Any:
    if isinstance(value, str) and value.startswith("="):
        return FORMULAS[value.removeprefix("=")](numbers)
    return value


@dataclass(frozen=True)
class Framework:
    """A training framework: how it writes each piece of a loss, what it adds by default, and where else code goes.

    ``forms``, ``corrections``, ``penalties``, ``means``: kind -> ways, tried in order. ``anchors``: the policy in the
    ratio's denominator -> flags. ``base``: flags of every export, which turn off what is on by default. ``hook``: where
    a loss of one's own goes. ``related``: what it has near pieces that it cannot write. ``traps``: what to know.
    """

    name: str
    title: str
    version: str
    syntax: str
    call: str
    base: Flags
    forms: Ways
    means: Ways
    anchors: Mapping[str, Flags]
    corrections: Ways
    penalties: Ways
    hook: str
    related: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    traps: tuple[str, ...] = ()
    weighs_penalties: bool = False


def ways(*several: Way) -> tuple[Way, ...]:
    return several
