"""Gates: where a guard applies, keep = inside | ~gate. A predicate per token; some select by a statistic of the step.

A gate has ``predicate(log_ratio, advantages, batch)`` and ``needs``. One that selects by a statistic has in its place
``collect`` (what it reads of each unmasked token, [n, k]), ``settle`` (the statistic, from the samples of the whole
step) and ``given`` (the gate once the statistic is known), so that no cut into micro-batches matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from klamp.errors import UserError, did_you_mean
from klamp.measures import import_path
from klamp.radii import Scaled

if TYPE_CHECKING:
    from torch import Tensor

    from klamp.batch import Batch

Predicate = Callable[..., Any]


@runtime_checkable
class PlainGate(Protocol):
    """A gate that looks at one token at a time."""

    @property
    def needs(self) -> frozenset[str]: ...

    @property
    def predicate(self) -> Predicate: ...


@runtime_checkable
class SelectingGate(Protocol):
    """A gate that selects by a statistic of the whole step."""

    @property
    def needs(self) -> frozenset[str]: ...

    def collect(self, log_ratio: Tensor, advantages: Tensor, batch: Batch, step: int) -> Tensor: ...

    def settle(self, samples: Tensor) -> Tensor: ...

    def given(self, statistic: Tensor, step: int) -> PlainGate: ...


@dataclass(frozen=True)
class Gate:
    """Where a guard applies: ``predicate(log_ratio, advantages, batch)`` is true where the rule may cut.

    ``needs`` names what the predicate reads from the batch beyond log-probs and advantages. ``name`` is what a spec's
    text finds the gate by again: the import path of the predicate, or, for a gate with needs, of the gate itself.
    """

    predicate: Predicate
    name: str = ""
    needs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", frozenset(self.needs))
        if not self.name and self.needs:
            raise UserError("a gate with needs is found again by its own path: give name='package.module:variable'")
        if not self.name:
            path = f"{getattr(self.predicate, '__module__', None)}:{getattr(self.predicate, '__qualname__', 'gate')}"
            object.__setattr__(self, "name", path)

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return (gate, (self.name,))

    def __deepcopy__(self, memo: Any) -> Gate:
        return self  # a value


def _outward(log_ratio: Tensor, advantages: Tensor, batch: Batch) -> Tensor:
    """The step would move the ratio further from 1: by signs, never by a product that could underflow."""
    return (advantages > 0) & (log_ratio > 0) | (advantages < 0) & (log_ratio < 0)


def _always(log_ratio: Tensor, advantages: Tensor, batch: Batch) -> Tensor:
    return log_ratio == log_ratio


def _positive(log_ratio: Tensor, advantages: Tensor, batch: Batch) -> Tensor:
    return (advantages > 0) & (log_ratio == log_ratio)


def _negative(log_ratio: Tensor, advantages: Tensor, batch: Batch) -> Tensor:
    return (advantages < 0) & (log_ratio == log_ratio)


def _not_inward(log_ratio: Tensor, advantages: Tensor, batch: Batch) -> Tensor:
    """The step would not move the ratio towards 1: outward, or no direction at all."""
    return ~((advantages > 0) & (log_ratio < 0) | (advantages < 0) & (log_ratio > 0))


GATES: dict[str, Gate] = {
    "outward": Gate(_outward, "outward"),
    "not_inward": Gate(_not_inward, "not_inward"),
    "always": Gate(_always, "always"),
    "positive": Gate(_positive, "positive"),
    "negative": Gate(_negative, "negative"),
}


# --- gates with numbers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Likely:
    """Outward, and only tokens of probability >= ``low`` (where w < 1) or >= ``high`` (w > 1) under ``policy``."""

    low: float = 0.0
    high: float = 0.0
    policy: str = "old"

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            _set_share(self, name)
        if self.policy not in ("old", "rollout", "ref"):
            raise UserError(
                f"policy={self.policy!r} is unknown; {did_you_mean(str(self.policy), ('old', 'rollout', 'ref'))}"
            )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({f"logp_{self.policy}"} if self.policy != "old" else ())

    def predicate(self, log_ratio: Tensor, advantages: Tensor, batch: Batch) -> Tensor:
        p = batch.select(batch.logp(self.policy)).exp()
        up, down = (advantages > 0) & (log_ratio > 0), (advantages < 0) & (log_ratio < 0)
        return (up & (p >= self.high)) | (down & (p >= self.low))


@dataclass(frozen=True)
class Ring:
    """Everywhere but where the step would pull a far ratio back: A > 0 with w <= low, A < 0 with w >= high.

    Yao et al. 2025, Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203 (REC-Ring).
    """

    low: float
    high: float
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise UserError(f"{name}={value!r} is not a number")
        if not 0.0 < self.low <= 1.0 <= self.high < math.inf:
            raise UserError(f"ring(low={self.low!r}, high={self.high!r}) must satisfy 0 < low <= 1 <= high < inf")
        object.__setattr__(self, "low", float(self.low))
        object.__setattr__(self, "high", float(self.high))

    def predicate(self, log_ratio: Tensor, advantages: Tensor, batch: Batch) -> Tensor:
        back = (advantages > 0) & (log_ratio <= math.log(self.low)) | (advantages < 0) & (
            log_ratio >= math.log(self.high)
        )
        return ~back


# --- gates that select by a statistic of the whole step -------------------------------------------------------


@dataclass(frozen=True)
class EntropyBelow:
    """Tokens whose entropy is below the ``quantile`` of all unmasked tokens of the step.

    Wang et al. 2025, Beyond the 80/20 Rule, arXiv 2506.01939: 0.8 trains on the 20 % of highest entropy.
    """

    quantile: float = 0.8
    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})
    reads_new: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _set_share(self, "quantile")

    def collect(self, log_ratio: Tensor, advantages: Tensor, batch: Batch, step: int) -> Tensor:
        assert batch.entropy is not None
        return batch.entropy.detach().double()[batch.mask].unsqueeze(1)

    def settle(self, samples: Tensor) -> Tensor:
        """The quantile, linear between order statistics."""
        if not samples.shape[0]:
            return samples.new_tensor(-math.inf)
        value = samples[:, 0].sort().values
        place = self.quantile * (value.numel() - 1)
        low = int(place)
        return value[low].lerp(value[min(low + 1, value.numel() - 1)], place - low)

    def given(self, statistic: Tensor, step: int) -> Gate:
        def below(log_ratio: Tensor, advantages: Tensor, batch: Batch) -> Tensor:
            assert batch.entropy is not None
            return batch.select(batch.entropy) < statistic

        return Gate(below, "entropy_below", self.needs)


@dataclass(frozen=True)
class CovarianceTop:
    """The ``share`` of tokens with the largest covariance (A - mean A)(log pi_new - its mean), at least one.

    Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning, arXiv 2505.22617 (KL-Cov). Ties by lottery.
    """

    share: float = 2e-4
    seed: int = 0
    needs: ClassVar[frozenset[str]] = frozenset({"row"})
    reads_new: ClassVar[bool] = True
    counts_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _set_share(self, "share")
        _check_seed(self.seed)

    def collect(self, log_ratio: Tensor, advantages: Tensor, batch: Batch, step: int) -> Tensor:
        return _signals(advantages, batch, batch.lottery(self.seed, step))

    def settle(self, samples: Tensor) -> Tensor:
        """(mean A, mean log pi_new, covariance of the last token chosen, its lottery number)."""
        if not samples.shape[0]:
            return samples.new_tensor([0.0, 0.0, math.inf, 0.0])
        mean = samples[:, :2].mean(dim=0)
        covariance = (samples[:, 0] - mean[0]) * (samples[:, 1] - mean[1])
        count = max(int(self.share * samples.shape[0]), 1)
        least = covariance.topk(count).values[-1]
        spare = count - int((covariance > least).sum())
        last = samples[covariance == least, 2].sort().values[spare - 1]
        return _joined(mean, least, last)

    def given(self, statistic: Tensor, step: int) -> Gate:
        seed = self.seed

        def chosen(log_ratio: Tensor, advantages: Tensor, batch: Batch) -> Tensor:
            covariance = _covariance(advantages, batch, statistic)
            tied = (covariance == statistic[2]) & (batch.lottery(seed, step) <= statistic[3])
            return (covariance > statistic[2]) | tied

        return Gate(chosen, "covariance_top", self.needs)


@dataclass(frozen=True)
class CovarianceWindow:
    """A random ``share`` of all tokens, drawn among those with low < covariance < high that ``unless`` does not cut.

    Cui et al. 2025, arXiv 2505.22617 (Clip-Cov). The draw is the smallest hash(seed, step, row, position).
    """

    share: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    unless: Any = None
    seed: int = 0
    reads_new: ClassVar[bool] = True
    counts_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _set_share(self, "share")
        _check_seed(self.seed)
        if not self.low < self.high:
            raise UserError(f"the window ({self.low!r}, {self.high!r}) is empty: low must be below high")
        object.__setattr__(self, "low", float(self.low))
        object.__setattr__(self, "high", float(self.high))
        if self.unless is not None:
            fixed = hasattr(self.unless, "judge") and not self.unless.surveyed
            if not fixed or any(not isinstance(radius, Scaled) for radius in self.unless.region.moves):
                raise UserError(
                    "unless= must be a fixed guard without a statistic of the step, such as guard(ratio_high=1.2)"
                )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"row"}) | (frozenset() if self.unless is None else self.unless.needs)

    def collect(self, log_ratio: Tensor, advantages: Tensor, batch: Batch, step: int) -> Tensor:
        free = ~self._blocked(advantages, batch)
        return _signals(advantages, batch, batch.lottery(self.seed, step), free)

    def settle(self, samples: Tensor) -> Tensor:
        """(mean A, mean log pi_new, the largest lottery number chosen)."""
        if not samples.shape[0]:
            return samples.new_tensor([0.0, 0.0, -1.0])
        mean = samples[:, :2].mean(dim=0)
        covariance = (samples[:, 0] - mean[0]) * (samples[:, 1] - mean[1])
        open_ = (covariance > self.low) & (covariance < self.high) & (samples[:, 3] > 0.0)
        tickets = samples[open_, 2].sort().values[: max(int(self.share * samples.shape[0]), 1)]
        return _joined(mean, tickets[-1] if tickets.numel() else mean.new_tensor(-1.0))

    def given(self, statistic: Tensor, step: int) -> Gate:
        def chosen(log_ratio: Tensor, advantages: Tensor, batch: Batch) -> Tensor:
            covariance = _covariance(advantages, batch, statistic)
            open_ = (covariance > self.low) & (covariance < self.high) & ~self._blocked(advantages, batch)
            return open_ & (batch.lottery(self.seed, step) <= statistic[2])

        return Gate(chosen, "covariance_window", self.needs)

    def _blocked(self, advantages: Tensor, batch: Batch) -> Tensor:
        if self.unless is None:
            return ~batch.mask
        verdict = self.unless.judge(advantages, batch)
        found: Tensor = ((verdict.outside_low | verdict.outside_high) & verdict.applies).expand(batch.shape)
        return found


def _signals(advantages: Tensor, batch: Batch, *more: Tensor) -> Tensor:
    """[n, 2 + more]: A, log pi_new and more of each unmasked token, float64."""
    columns = [advantages.double().expand(batch.shape), batch.select(batch.logp_new), *more]
    import torch

    return torch.stack([column.double() for column in columns], dim=-1)[batch.mask]


def _covariance(advantages: Tensor, batch: Batch, mean: Tensor) -> Tensor:
    return (advantages.double() - mean[0]) * (batch.select(batch.logp_new) - mean[1])


def _joined(mean: Tensor, *more: Tensor) -> Tensor:
    import torch

    return torch.cat([mean, *(value.reshape(1) for value in more)])


def _set_share(part: Any, name: str) -> None:
    value = getattr(part, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
        raise UserError(f"{name}={value!r} must be between 0 and 1")
    object.__setattr__(part, name, float(value))


def _check_seed(seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise UserError(f"seed={seed!r} must be a whole number from 0 to 2^31 - 1")


SELECTIONS: dict[str, type] = {
    "likely": Likely,
    "ring": Ring,
    "entropy_below": EntropyBelow,
    "covariance_top": CovarianceTop,
    "covariance_window": CovarianceWindow,
}
AnyGate = PlainGate | SelectingGate


def gate(name: str | AnyGate | Predicate) -> AnyGate:
    """The gate with this name: one of ``GATES``, ``package.module:predicate``, or a gate itself."""
    if isinstance(name, (PlainGate, SelectingGate)):
        return name
    if callable(name):
        return Gate(name)
    if isinstance(name, str) and name in GATES:
        return GATES[name]
    if isinstance(name, str) and name in SELECTIONS:
        raise UserError(
            f"the gate {name} takes numbers: write it as a call without quotes, for example gate={name}(...)"
        )
    if isinstance(name, str) and ":" in name:
        found = import_path(name, "gate")
        if not isinstance(found, Gate) and not callable(found):
            raise UserError(f"gate {name!r} is a {type(found).__name__}; a predicate is needed")
        return found if isinstance(found, Gate) else Gate(found)
    known = [*GATES, *(f"{kind}(...)" for kind in SELECTIONS), "package.module:predicate"]
    raise UserError(f"unknown gate {name!r}; {did_you_mean(str(name), known)}")


__all__ = ["GATES", "SELECTIONS", "AnyGate", "Gate", "PlainGate", "Predicate", "SelectingGate", "gate"]
