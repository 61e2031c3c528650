"""Verdicts: which tokens a spec cuts, and the weight of each. Two ways to one rule, keep = inside | ~gate.

Intervals of a token's ratio under the plain gates are two comparisons, done here with NumPy on the few tokens outside; all
else goes through the objective's own parts (``klamp.audit.general``). A test holds the two equal over all presets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from klamp.audit.tokens import Array
from klamp.errors import UserError
from klamp.factors import Factor
from klamp.gates import GATES
from klamp.guards import Guard
from klamp.radii import Adaptive
from klamp.regions import Region
from klamp.spec import Spec, part_text
from klamp.transforms import Identity

Ratios = Mapping[str, Array]  # log-ratios by the name of the ratio
_GATE_NAMES = {gate: name for name, gate in GATES.items()}


@dataclass(frozen=True)
class Verdict:
    """Of n tokens [n]: outside a region, and with a gradient (A != 0) that a guard removes, by side."""

    outside_low: Array
    outside_high: Array
    removed_low: Array
    removed_high: Array

    @property
    def outside(self) -> Array:
        found: Array = self.outside_low | self.outside_high
        return found

    @property
    def removed(self) -> Array:
        found: Array = self.removed_low | self.removed_high
        return found

    def at(self, where: Array) -> Verdict:
        """Of some of the tokens."""
        return Verdict(
            self.outside_low[where], self.outside_high[where], self.removed_low[where], self.removed_high[where]
        )


def is_plain(spec: Spec) -> bool:
    """Whether NumPy can judge a spec: fixed intervals of a token's ratio, plain gates, weight w or 1."""
    return all(map(_plain_guard, spec.guards)) and weight_of(spec) is not None


def weight_of(spec: Spec) -> str | None:
    """What multiplies A: the plain ``ratio``, ``one``, or None where it is something else."""
    if not spec.factors:
        return "one"
    (factor, *more) = spec.factors
    return "ratio" if not more and factor == Factor(Identity()) else None


def _plain_guard(guard: Guard) -> bool:
    interval = isinstance(guard.region, Region) and not guard.region.moves and not guard.after
    return interval and guard.scope == "token" and guard.action in ("zero", "drop") and guard.gate in _GATE_NAMES


def check(spec: Spec, offers: frozenset[str], who: str) -> None:
    """Raises UserError where a log cannot say what a spec would have done: it lacks what the spec reads, or the spec's
    radius follows the run that it steers."""
    try:
        Spec(spec.guards, spec.factors, name=str(spec)).require(offers, who)
    except UserError as error:
        raise UserError(
            f"{error}; name it with --map ours=theirs, record it (docs/audit.md), or leave this spec out"
        ) from None
    for guard in spec.guards:
        if any(isinstance(radius, Adaptive) for radius in guard.region.moves):
            raise UserError(
                f"{spec}: the radius of {part_text(guard)} adapts to the run that it steers, so no log of another run says "
                "what it would have been; give a fixed radius, for example its start"
            )


def ratios_of(specs: Sequence[Spec]) -> list[str]:
    """The ratios that the guards of plain specs compare."""
    return list(dict.fromkeys(guard.ratio for spec in specs for guard in spec.guards))


@dataclass(frozen=True)
class Reach:
    """The log-ratios that are inside for every guard of several specs: outside it, and only there, something is cut."""

    bounds: Mapping[str, tuple[np.float32, np.float32]]

    @staticmethod
    def of(specs: Sequence[Spec]) -> Reach:
        found: dict[str, tuple[np.float32, np.float32]] = {}
        for guard in (guard for spec in specs for guard in spec.guards):
            assert isinstance(guard.region, Region)
            low, high = found.get(guard.ratio, (np.float32(-np.inf), np.float32(np.inf)))
            found[guard.ratio] = (
                max(low, np.float32(guard.region.log_low)),
                min(high, np.float32(guard.region.log_high)),
            )
        return Reach(found)

    def beyond(self, ratios: Ratios) -> Array:
        """Which tokens are not inside for every guard, as flags [n]."""
        found: Array | None = None
        for ratio, (low, high) in self.bounds.items():
            x = ratios[ratio]
            out = (x < low) | (x > high)
            found = out if found is None else found | out
        if found is None:
            return np.zeros(len(next(iter(ratios.values()))), bool)
        return found


def judge(spec: Spec, ratios: Ratios, advantage: Array) -> Verdict:
    """The verdict of a plain spec on tokens [n]; a token belongs to the side on which the first guard cut it."""
    nothing = np.zeros(len(advantage), bool)
    low = high = cut_low = cut_high = nothing
    for guard in spec.guards:
        assert isinstance(guard.region, Region)
        x = ratios[guard.ratio]
        below, above = x < np.float32(guard.region.log_low), x > np.float32(guard.region.log_high)
        applies = _applies(_GATE_NAMES[guard.gate], x, advantage)  # type: ignore[index]
        down, up = below & applies, above & applies
        low, high = low | below, high | above
        cut_low, cut_high = cut_low | (down & ~cut_high), cut_high | (up & ~cut_low)
    live = advantage != 0
    return Verdict(low, high, cut_low & live, cut_high & live)


def _applies(gate: str, x: Array, advantage: Array) -> Array:
    if gate == "outward":
        found: Array = ((advantage > 0) & (x > 0)) | ((advantage < 0) & (x < 0))
        return found
    if gate == "always":
        return np.ones(len(x), bool)
    sign: Array = advantage > 0 if gate == "positive" else advantage < 0
    return sign
