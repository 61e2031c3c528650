"""Radii that move: with the step, with what training does, or with the token. A fixed radius is a plain number.

A moving radius has a ``start``, the value before the first step, and gives the next one through ``at(step)`` or
``adapt(radius, observed)``; the objective keeps it in its state, which is saved and resumed with the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from klamp.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

    from klamp.batch import Batch


@dataclass(frozen=True)
class Linear:
    """From ``start`` to ``end`` in equal steps: start + (end - start) min(step / steps, 1)."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _check_ends(self)

    def at(self, step: float) -> float:
        share = min(step / self.steps, 1.0)
        return self.start * (1.0 - share) + self.end * share


@dataclass(frozen=True)
class Cosine:
    """From ``start`` to ``end`` along half a cosine: end + (start - end) (1 + cos(pi step / steps)) / 2."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _check_ends(self)

    def at(self, step: float) -> float:
        share = 0.5 * (1.0 - math.cos(math.pi * min(step / self.steps, 1.0)))
        return self.start * (1.0 - share) + self.end * share


@dataclass(frozen=True)
class Adaptive:
    """A radius steered to a target; after each step radius *= exp(+-rate clip(observed / target - 1, -1, 1)).

    ``removed``: the target share of tokens with a signal whose gradient the guards remove; more than that widens the
    region. ``kl``: the target mean k3(new/old) in nats; more than that narrows it, which is dual ascent on the
    logarithm of the multiplier 1 / radius. ``low`` and ``high`` bound the radius.
    """

    start: float
    removed: float | None = None
    kl: float | None = None
    rate: float = 0.1
    low: float = 0.0
    high: float = math.inf

    def __post_init__(self) -> None:
        for name in ("start", "rate"):
            object.__setattr__(self, name, _positive(name, getattr(self, name)))
        if (self.removed is None) == (self.kl is None):
            raise UserError("adaptive() follows one target: give removed=0.01 (a share of tokens) or kl=0.001 (nats)")
        target = "removed" if self.removed is not None else "kl"
        object.__setattr__(self, target, _positive(target, getattr(self, target)))
        if self.removed is not None and self.removed >= 1.0:
            raise UserError(
                f"removed={self.removed!r} is a share of tokens: it must be below 1; 0.01 is one in a hundred"
            )
        if not 0.0 <= self.low <= self.start <= self.high:
            raise UserError(f"adaptive() needs low <= start <= high; got {self.low!r}, {self.start!r}, {self.high!r}")

    def adapt(self, radius: float, observed: float) -> float:
        """The next radius, given the observed share removed or mean KL of the step just done."""
        target, sign = (self.removed, 1.0) if self.removed is not None else (self.kl, -1.0)
        assert target is not None
        push = min(max(observed / target - 1.0, -1.0), 1.0)
        return min(max(radius * math.exp(sign * self.rate * push), self.low), self.high)


@dataclass(frozen=True)
class Scaled:
    """A radius per token: start * exp(exponent * s), s the token's surprisal -log p or the entropy H, in nats.

    ``by='probability'``: p of the ratio's denominator, so exponent 1 is start / p (binary KL's region is close to KL3's
    there). ``by='entropy'``: exponent 1 is start times the perplexity.
    """

    start: float
    by: str = "probability"
    exponent: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", _positive("start", self.start))
        if self.by not in ("probability", "entropy"):
            raise UserError(f"by={self.by!r} is unknown; {did_you_mean(str(self.by), ('probability', 'entropy'))}")
        if isinstance(self.exponent, bool) or not isinstance(self.exponent, (int, float)):
            raise UserError(f"exponent={self.exponent!r} is not a number")
        if not math.isfinite(self.exponent):
            raise UserError(f"exponent={self.exponent!r} must be finite")
        object.__setattr__(self, "exponent", float(self.exponent))

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"} if self.by == "entropy" else ())

    def of_tokens(self, batch: Batch, denominator: str) -> Tensor:
        """The radius of each token, [B, T], float64."""
        if self.by == "entropy":
            assert batch.entropy is not None
            surprise = batch.select(batch.entropy)
        else:
            surprise = -batch.select(batch.logp(denominator))
        return self.start * (self.exponent * surprise).exp()


Moving = Linear | Cosine | Adaptive | Scaled
RADII: dict[str, type] = {"linear": Linear, "cosine": Cosine, "adaptive": Adaptive, "scaled": Scaled}


def number(radius: Any) -> Any:
    """The radius as a number: of one that moves, its value before the first step."""
    return radius.start if isinstance(radius, Moving) else radius


def moved(radius: Any, state: dict[str, float], key: str) -> Any:
    """The radius now, a number unless it differs by token."""
    if isinstance(radius, (Linear, Cosine)):
        return radius.at(state.get("step", 0.0))
    return state.get(key, radius.start) if isinstance(radius, Adaptive) else radius


def per_token(radius: Any, batch: Batch, denominator: str) -> Any:
    """The radius of each token [B, T], or one number for all."""
    return radius.of_tokens(batch, denominator) if isinstance(radius, Scaled) else radius


def _check_ends(value: Linear | Cosine) -> None:
    for name in ("start", "end"):
        object.__setattr__(value, name, _positive(name, getattr(value, name)))
    if isinstance(value.steps, bool) or not isinstance(value.steps, int) or value.steps < 1:
        raise UserError(f"steps={value.steps!r} must be a whole number of optimizer steps, at least 1")


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < math.inf:
        raise UserError(f"{name}={value!r} must be a finite number above 0")
    return float(value)
