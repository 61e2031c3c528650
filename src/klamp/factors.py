"""Factors: detached multipliers of the policy gradient, g = A * product(factors).

A factor is ratio x scope x reduce x transform. Importance weights, CISPO's cap, truncated importance sampling and
SAPO's soft gate are factors; REINFORCE has none. A transform that is the derivative of a surrogate J(w) also says
its value (PPO: J = w A); the others weigh A * log pi_new.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

from klamp.errors import UserError
from klamp.guards import RATIOS, REDUCES, SCOPES, check_choice, ratio_needs
from klamp.measures import namespace

if TYPE_CHECKING:
    from torch import Tensor


class Transform(Protocol):
    """A function of the log-ratio x and the sign of A that multiplies the gradient."""

    @property
    def integrated(self) -> bool:
        """Whether ``evaluate`` returns a surrogate value whose derivative in log pi_new is the weight."""

    def evaluate(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """(weight, value): the multiplier of g, and the surrogate's value per unit of A."""


@dataclass(frozen=True)
class Identity:
    """The likelihood ratio itself: weight w, value w."""

    @property
    def integrated(self) -> bool:
        return True

    def evaluate(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        w = log_ratio.exp()
        return w, w


def as_numbers(transform: Transform) -> None:
    """Make every field of a frozen transform a float, so that 5 and 5.0 are one value."""
    for item in fields(transform):  # type: ignore[arg-type]
        value = getattr(transform, item.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UserError(f"{item.name}={value!r} is not a number")
        object.__setattr__(transform, item.name, float(value))


@dataclass(frozen=True)
class Cap:
    """The ratio clamped to [low, high], absolute and detached: the gradient survives outside (CISPO, TIS)."""

    low: float = 0.0
    high: float = math.inf

    def __post_init__(self) -> None:
        as_numbers(self)
        if not 0.0 <= self.low <= 1.0 <= self.high:
            near = f"; bounds are absolute: for 1 + {self.high!r} write {1 + self.high!r}" if self.high < 1.0 else ""
            raise UserError(f"cap(low={self.low!r}, high={self.high!r}) must satisfy 0 <= low <= 1 <= high{near}")

    @property
    def integrated(self) -> bool:
        return False

    def evaluate(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        low = math.log(self.low) if self.low > 0.0 else None
        high = math.log(self.high) if self.high < math.inf else None
        w = (log_ratio if low is None and high is None else log_ratio.clamp(low, high)).exp()
        return w, w


@dataclass(frozen=True)
class SoftGate:
    """SAPO's gate: value (4/tau) sigmoid(tau (w - 1)), weight w sech^2(tau (w - 1) / 2); tau by the sign of A."""

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        as_numbers(self)
        if not (0.0 < self.tau_positive < math.inf and 0.0 < self.tau_negative < math.inf):
            raise UserError(
                f"temperatures must be finite and above 0; got {self.tau_positive!r}, {self.tau_negative!r}"
            )

    @property
    def integrated(self) -> bool:
        return True

    def evaluate(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        negative = log_ratio.new_full((), self.tau_negative)
        tau = namespace(log_ratio).where(advantages > 0, self.tau_positive, negative)
        x = log_ratio.clamp(max=80.0)  # the weight is exactly 0 there; keeps 0 * inf out
        z = tau * x.expm1()
        decay = (-z.abs()).exp()
        return x.exp() * 4.0 * decay / (1.0 + decay) ** 2, 4.0 / tau * z.sigmoid()


@dataclass(frozen=True)
class Factor:
    """transform(x), x the log-ratio of two policies over ``scope``; detached, multiplies g."""

    transform: Transform = Identity()
    ratio: str = "new/old"
    scope: str = "token"
    reduce: str = "mean"

    def __post_init__(self) -> None:
        if not hasattr(self.transform, "evaluate") or not hasattr(self.transform, "integrated"):
            known = ", ".join(f"{name}()" for name in TRANSFORMS)
            raise UserError(f"transform={self.transform!r} is not one; choose {known}, or a transform of your own")
        for name, choices in (("ratio", RATIOS), ("scope", SCOPES), ("reduce", REDUCES)):
            check_choice(name, getattr(self, name), choices)
        if self.scope == "token" and self.reduce != "mean":
            raise UserError(f"reduce={self.reduce!r} needs scope='sequence': one token has nothing to reduce")

    @property
    def needs(self) -> frozenset[str]:
        return ratio_needs(self.ratio)

    @property
    def integrated(self) -> bool:
        """Whether this factor carries the surrogate's dependence on the new policy."""
        return self.transform.integrated and self.ratio.startswith("new/")

    @property
    def of(self) -> tuple[str, str, str]:
        return self.ratio, self.scope, self.reduce


TRANSFORMS: dict[str, type] = {"identity": Identity, "cap": Cap, "soft_gate": SoftGate}
