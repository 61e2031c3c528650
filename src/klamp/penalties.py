"""Penalties: what is added to the policy term, per token and averaged like it.

A penalty returns its value v and its slope dv / d log pi_new in closed form; one that moves unsampled logits
(entropy) has no such slope, and its gradient flows through the value itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from klamp.errors import UserError, check_choice, did_you_mean
from klamp.guards import RATIOS, Guard, ratio_needs
from klamp.measures import MEASURES, Measure, measure
from klamp.whole import NAMES, split

if TYPE_CHECKING:
    from torch import Tensor

    from klamp.batch import Batch

_ESTIMATES = {"k1": ("k1", -1.0), "k2": ("k2", 1.0), "k3": ("k3_flipped", 1.0), "abs": ("log_ratio", 1.0)}
ESTIMATORS = tuple(_ESTIMATES)
_SMALLEST, _LARGEST = 1e-100, 1e100  # of an adaptive beta: 0 and inf could not be left again


class Terms(NamedTuple):
    """Value [B, T] of a penalty, and d value / d log pi_new, or None where autograd carries the gradient."""

    value: Tensor
    slope: Tensor | None


@runtime_checkable
class Penalty(Protocol):
    """A term added to the loss of each token; traits as in ``klamp.testing``."""

    @property
    def needs(self) -> frozenset[str]: ...

    @property
    def traits(self) -> frozenset[str]: ...

    def evaluate(self, batch: Batch, state: dict[str, float]) -> Terms: ...


@dataclass(frozen=True)
class FPenalty:
    """beta f(w), f a normalised measure of the ratio; slope beta w f'(w). PPO's KL penalty is f = k3.

    With ``target`` beta is the start value of PPO's controller: after each step it doubles if the mean
    k3(new/old) exceeded 1.5 target and halves if it fell below target / 1.5 (Schulman et al. 2017, section 4); with
    ``rate`` it ascends the dual instead, beta + rate (mean k3 - target), at least 0. ``on``: only on the tokens that
    this guard cuts (KL-Cov; a guard on the same measure penalises the part outside alone).
    """

    measure: Measure = MEASURES["k3"]
    beta: float = 1.0
    ratio: str = "new/old"
    target: float | None = None
    rate: float | None = None
    on: Guard | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "measure", measure(self.measure))
        object.__setattr__(self, "beta", check_positive("beta", self.beta))
        check_choice("ratio", self.ratio, tuple(ratio for ratio in RATIOS if ratio.startswith("new/")))
        if self.target is not None:
            object.__setattr__(self, "target", check_positive("target", self.target))
        if self.rate is not None:
            if self.target is None:
                raise UserError("rate= steers beta to a target: give target= too, for example target=0.01")
            object.__setattr__(self, "rate", check_positive("rate", self.rate))
        check_on(self.on)

    @property
    def needs(self) -> frozenset[str]:
        return ratio_needs(self.ratio) | (frozenset() if self.on is None else self.on.needs)

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"adaptive"} if self.target is not None else ())

    def evaluate(self, batch: Batch, state: dict[str, float]) -> Terms:
        x = batch.log_ratio(self.ratio)
        beta = state.get("beta", self.beta) if self.target is not None else self.beta
        return Terms(beta * self.measure.divergence(x), beta * self.measure.divergence_slope(x))

    def adapt(self, beta: float, divergence: float) -> float:
        """The next beta, given the mean k3(new/old) of the step just done; one that overflows doubles it."""
        assert self.target is not None
        if self.rate is not None:
            step = self.rate * (divergence - self.target)
            return max(beta + (step if step < math.inf else max(beta, self.rate * self.target)), 0.0)
        if divergence > 1.5 * self.target:
            return min(2.0 * beta, _LARGEST)
        return max(0.5 * beta, _SMALLEST) if divergence < self.target / 1.5 else beta


@dataclass(frozen=True)
class KLReference:
    """beta times an estimator of KL(new||ref) from samples of the new policy, x = log(pi_new / pi_ref).

    k1 = x, k2 = x^2 / 2, k3 = e^-x - 1 + x (k3 of ref/new, the usual GRPO penalty), abs = |x|. ``weighted`` multiplies
    by the ratio new/old with gradient, which makes value and gradient unbiased under samples of the old policy.
    ``gradient``: the estimator whose gradient is used, straight through the value: k2 gives the exact gradient of
    KL(new||ref) under samples of the new policy. ``on``: only on the tokens that this guard cuts.
    """

    beta: float = 0.04
    estimator: str = "k3"
    weighted: bool = False
    gradient: str | None = None
    on: Guard | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", check_positive("beta", self.beta))
        check_choice("estimator", self.estimator, ESTIMATORS)
        if not isinstance(self.weighted, bool):
            raise UserError(f"weighted={self.weighted!r} must be True or False")
        if self.gradient is not None:
            check_choice("gradient", self.gradient, ESTIMATORS)
        check_on(self.on)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logp_ref"}) | (frozenset() if self.on is None else self.on.needs)

    @property
    def traits(self) -> frozenset[str]:
        other = self.gradient is not None and self.gradient != self.estimator
        return frozenset({"straight_through"} if other else ())

    def evaluate(self, batch: Batch, state: dict[str, float]) -> Terms:
        x = batch.log_ratio("new/ref")
        found, sign = _ESTIMATES[self.estimator]
        value = sign * self.beta * MEASURES[found].divergence(x)
        found, sign = _ESTIMATES[self.gradient or self.estimator]
        slope = sign * self.beta * MEASURES[found].divergence_slope(x)
        if self.weighted:
            w = batch.log_ratio("new/old").exp()
            value, slope = w * value, w * (value + slope)
        return Terms(value, slope)


@dataclass(frozen=True)
class EntropyBonus:
    """-coefficient * H(pi_new), H in nats with its own gradient, which also moves unsampled tokens."""

    coefficient: float = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "coefficient", check_positive("coefficient", self.coefficient))

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"})

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"moves_unsampled"})

    def evaluate(self, batch: Batch, state: dict[str, float]) -> Terms:
        assert batch.entropy is not None
        entropy = batch.entropy.to(batch.log_ratio("new/old").dtype)
        return Terms(-self.coefficient * entropy, None)


@dataclass(frozen=True)
class DivergencePenalty:
    """beta D(old, new) over the whole vocabulary (``exact_*`` of ``klamp.whole``), with the gradient of the batch's D.

    That gradient also moves unsampled tokens. ``on``: only on the tokens that this guard cuts (Truly-PPO).
    """

    measure: str = "exact_kl_old_new"
    beta: float = 1.0
    on: Guard | None = None

    def __post_init__(self) -> None:
        found = split(self.measure) if isinstance(self.measure, str) else None
        if found is None or found[0] != "exact":
            exact = [name for name in NAMES if name.startswith("exact_")]
            raise UserError(
                f"measure={str(self.measure)!r} is not one of a whole distribution with a gradient; {did_you_mean(str(self.measure), exact)}"
            )
        object.__setattr__(self, "measure", f"exact_{found[1].name}")
        object.__setattr__(self, "beta", check_positive("beta", self.beta))
        check_on(self.on)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({f"divergences[{self.measure}]"}) | (frozenset() if self.on is None else self.on.needs)

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"moves_unsampled"})

    def evaluate(self, batch: Batch, state: dict[str, float]) -> Terms:
        distance = batch.divergences[self.measure].to(batch.log_ratio("new/old").dtype)
        return Terms(self.beta * distance, None)


def check_on(guard: object) -> None:
    if isinstance(guard, Guard) and guard.action != "zero":
        raise UserError(f"on= only selects tokens: action={guard.action!r} would do nothing there; leave it out")
    if guard is not None and not isinstance(guard, Guard):
        raise UserError(
            f"on={guard!r} must be a guard, whose cut tokens are penalised: on=guard(measure='k3', radius=0.02)"
        )


def check_positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < math.inf:
        raise UserError(f"{name}={value!r} must be a finite number above 0; leave the part out for none")
    return float(value)
