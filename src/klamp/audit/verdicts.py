"""Verdicts: which tokens a spec cuts, and the weight of each. Two ways to one rule, keep = inside | ~gate.

Fixed regions of single tokens under the plain gates are judged here with NumPy, on the few tokens outside; all else goes
through the objective's own parts (``klamp.audit.general``). A test holds the two equal over all presets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from klamp.audit.tokens import Array
from klamp.binary import BINARY, binary_divergence
from klamp.conditions import Distance
from klamp.errors import UserError
from klamp.gates import GATES
from klamp.guards import Guard
from klamp.radii import Adaptive
from klamp.regions import Region
from klamp.spec import Spec, part_text
from klamp.transforms import Cap, Identity

Columns = Mapping[str, Array]  # of tokens [n]: log-ratios by the name of the ratio, x (new/old), log-probs, advantage
Sides = tuple[Array, Array]
Weight = tuple[tuple[str, float, float], ...]
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
    """Whether NumPy can judge a spec: fixed regions of single tokens, plain gates, weights that are ratios, capped or not."""
    return all(map(_plain_guard, spec.guards)) and weight_of(spec) is not None


def weight_of(spec: Spec) -> Weight | None:
    """What multiplies A, as (ratio, lowest and highest log-ratio) of each factor; None where it is something else."""
    found: list[tuple[str, float, float]] = []
    for factor in spec.factors:
        plain = factor.scope == "token" and not factor.clipped
        if plain and isinstance(factor.transform, Identity):
            found.append((factor.ratio, -math.inf, math.inf))
        elif plain and isinstance(factor.transform, Cap):
            low, high = factor.transform.low, factor.transform.high
            found.append((factor.ratio, math.log(low) if low > 0.0 else -math.inf, math.log(high)))
        else:
            return None
    return tuple(found)


def _plain_guard(guard: Guard) -> bool:
    binary = isinstance(guard.region, Distance) and guard.region.measure in BINARY
    fixed = (isinstance(guard.region, Region) or binary) and not guard.region.moves and not guard.after
    return fixed and guard.scope == "token" and guard.action in ("zero", "drop") and guard.gate in _GATE_NAMES


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
    """The ratios that the guards of plain specs compare and their factors weigh by."""
    guards = [guard.ratio for spec in specs for guard in spec.guards]
    return list(dict.fromkeys([*guards, *(factor.ratio for spec in specs for factor in spec.factors)]))


@dataclass(frozen=True)
class Reach:
    """Where any guard of several plain specs has a token outside; elsewhere none of them cuts.

    ``bounds``: the log-ratios that are inside all intervals on a ratio. ``distances``: (ratio, region) of binary measures.
    """

    bounds: Mapping[str, tuple[np.float32, np.float32]]
    distances: tuple[tuple[str, Distance], ...] = ()

    @staticmethod
    def of(specs: Sequence[Spec]) -> Reach:
        found: dict[str, tuple[np.float32, np.float32]] = {}
        distances: dict[tuple[str, Distance], None] = {}
        for guard in (guard for spec in specs for guard in spec.guards):
            if isinstance(guard.region, Distance):
                distances[guard.ratio, guard.region] = None
                continue
            assert isinstance(guard.region, Region)
            low, high = found.get(guard.ratio, (np.float32(-np.inf), np.float32(np.inf)))
            found[guard.ratio] = (
                max(low, np.float32(guard.region.log_low)),
                min(high, np.float32(guard.region.log_high)),
            )
        return Reach(found, tuple(distances))

    def sides(self, columns: Columns) -> dict[tuple[str, Distance], Sides]:
        """Of each binary region, the tokens outside on the low and on the high side, [n] each."""
        return {key: _far(*key, columns) for key in self.distances}

    def beyond(self, columns: Columns, sides: Mapping[tuple[str, Distance], Sides]) -> Array:
        """Which tokens are outside for some guard, as flags [n]."""
        found = np.zeros(len(columns["x"]), bool)
        for ratio, (low, high) in self.bounds.items():
            found |= (columns[ratio] < low) | (columns[ratio] > high)
        for low_side, high_side in sides.values():
            found |= low_side | high_side
        return found


def _far(ratio: str, region: Distance, columns: Columns) -> Sides:
    x = columns[ratio]
    logp = columns[f"logp_{ratio.partition('/')[2]}"]
    distance = binary_divergence(region.measure, x.astype(np.float64), logp.astype(np.float64))
    below, above = float(region.radius_low), float(region.radius_high)  # type: ignore[arg-type]
    return (x < 0) & (distance > below), (x >= 0) & (distance > above)


def judge(spec: Spec, columns: Columns, sides: Mapping[tuple[str, Distance], Sides]) -> Verdict:
    """The verdict of a plain spec on tokens [n]; a token belongs to the side on which the first guard cut it."""
    advantage = columns["advantage"]
    nothing = np.zeros(len(advantage), bool)
    low = high = cut_low = cut_high = nothing
    for guard in spec.guards:
        x = columns[guard.ratio]
        if isinstance(guard.region, Distance):
            below, above = sides[guard.ratio, guard.region]
        else:
            assert isinstance(guard.region, Region)
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
