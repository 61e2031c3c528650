"""Transforms: functions of a log-ratio and the sign of A that weigh the policy gradient, detached.

A transform that is the derivative of a surrogate J(w) also says its value (PPO: J = w A); the others weigh A log pi_new.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from klamp.errors import UserError, check_choice
from klamp.measures import Measure, measure, namespace

if TYPE_CHECKING:
    from torch import Tensor

    from klamp.batch import Batch


class Transform(Protocol):
    """A function of the log-ratio x and of A that multiplies the gradient."""

    @property
    def integrated(self) -> bool:
        """Whether ``evaluate`` returns a surrogate value whose derivative in log pi_new is the weight."""

    def evaluate(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """(weight, value): the multiplier of g, and the surrogate's value per unit of A."""


@runtime_checkable
class StepTransform(Protocol):
    """A transform that needs a statistic of the whole step: sampled, settled, and then given to each batch."""

    @property
    def integrated(self) -> bool: ...

    def collect(self, log_ratio: Tensor, advantages: Tensor, batch: Batch, where: Tensor) -> Tensor:
        """What it reads of the tokens ``where`` [B, T] (of a response: its first), [n, k]."""

    def settle(self, samples: Tensor) -> Tensor:
        """The statistic, from the samples of the whole step."""

    def given(self, statistic: Tensor, batch: Batch) -> Transform:
        """The transform once the statistic is known."""


@dataclass(frozen=True)
class Identity:
    """The likelihood ratio itself: weight w, value w."""

    @property
    def integrated(self) -> bool:
        return True

    def evaluate(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        w = log_ratio.exp()
        return w, w


def as_numbers(transform: Any) -> None:
    """Make every field of a frozen transform a float, so that 5 and 5.0 are one value."""
    for item in fields(transform):
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
class BySign:
    """One transform where A > 0 and another where A < 0; none is the weight 1 (TOPR: positive none, negative a cap)."""

    positive: Transform | None = None
    negative: Transform | None = None

    def __post_init__(self) -> None:
        for item in (self.positive, self.negative):
            if item is not None and (not hasattr(item, "evaluate") or item.integrated):
                raise UserError(f"by_sign() takes transforms with a detached weight, such as cap(); got {item!r}")

    @property
    def integrated(self) -> bool:
        return False

    def evaluate(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        up, down = (
            log_ratio.new_ones(()) if item is None else item.evaluate(log_ratio, advantages)[0]
            for item in (self.positive, self.negative)
        )
        weight = namespace(log_ratio).where(advantages > 0, up, down)
        return weight, weight


@dataclass(frozen=True)
class Gamma:
    """VESPO's gamma kernel: weight W^k exp(lambda (1 - W)), W = e^x, with k and lambda by the sign of A; 1 at W = 1."""

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def __post_init__(self) -> None:
        as_numbers(self)
        values = [getattr(self, item.name) for item in fields(self)]
        if not all(0.0 <= value < math.inf for value in values):
            raise UserError(f"gamma() needs finite numbers >= 0; got {values}")

    @property
    def integrated(self) -> bool:
        return False

    def evaluate(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        xp, up = namespace(log_ratio), advantages > 0
        negative_k, negative_rate = (
            log_ratio.new_full((), self.k_negative),
            log_ratio.new_full((), self.lambda_negative),
        )
        k, rate = xp.where(up, self.k_positive, negative_k), xp.where(up, self.lambda_positive, negative_rate)
        x = log_ratio.clamp(max=80.0)  # e^x may overflow; the weight is exactly 0 there unless lambda is 0
        decay = xp.where(rate > 0.0, rate * x.expm1(), 0.0)
        weight = (k * xp.where(rate > 0.0, x, log_ratio) - decay).exp()
        return weight, weight


@dataclass(frozen=True)
class DivergenceGate:
    """w h(D(w) / radius), h(y) = exp(-y^power) or 1 / (1 + y^power) (``rational``): a soft region of any measure.

    ``outward``: h only where the step would move w further from 1, as a clip does; the weight is w elsewhere. A large
    power is a hard mask at the radius.
    """

    measure: Measure
    radius: float
    shape: str = "exp"
    power: float = 1.0
    outward: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "measure", measure(self.measure))
        for name in ("radius", "power"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < math.inf:
                raise UserError(f"{name}={value!r} must be a finite number above 0")
            object.__setattr__(self, name, float(value))
        check_choice("shape", self.shape, ("exp", "rational"))
        if not isinstance(self.outward, bool):
            raise UserError(f"outward={self.outward!r} must be True or False")

    @property
    def integrated(self) -> bool:
        return False

    def evaluate(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        xp = namespace(log_ratio)
        x = log_ratio.double()
        y = (self.measure.divergence(x).clamp(min=0.0) / self.radius) ** self.power
        log_h = -y if self.shape == "exp" else -y.log1p()
        applies = (advantages > 0) & (x > 0) | (advantages < 0) & (x < 0) if self.outward else x == x
        weight = (x + xp.where(applies, log_h, 0.0)).exp().to(log_ratio.dtype)
        return weight, weight


@dataclass(frozen=True)
class ExpAdvantage:
    """exp(A / temperature): advantage-weighted regression; the log-ratio is not read."""

    temperature: float = 1.0

    def __post_init__(self) -> None:
        as_numbers(self)
        if not 0.0 < self.temperature < math.inf:
            raise UserError(f"temperature={self.temperature!r} must be a finite number above 0")

    traits = frozenset({"own_scale"})
    reads_ratio = False

    @property
    def integrated(self) -> bool:
        return False

    def evaluate(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        weight = (advantages / self.temperature).exp() + 0.0 * log_ratio
        return weight, weight
