"""The estimator as a value: reward less a baseline, over a scale, whitened over the batch where it says so."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from klamp.advantages.groups import BASELINES, SCALES, Groups
from klamp.errors import UserError, did_you_mean

OVER = ("rows", "tokens")
FORMS = ("added", "inside", "floor")


def _choose(name: str, value: object, choices: Collection[str]) -> None:
    if value not in choices:
        raise UserError(f"{name}={value!r} is unknown; {did_you_mean(str(value), choices)}")


def _amount(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0.0):
        raise UserError(f"{name}={value!r} must be finite and at least 0")


class Advantages(NamedTuple):
    """``values`` [B], or [B, T] under a discount, 0 where there is no signal; ``scored``; ``tied``: of equal groups."""

    values: Float[Tensor, "B"] | Float[Tensor, "B T"]
    scored: Bool[Tensor, "B"]
    tied: Bool[Tensor, "B"]


@dataclass(frozen=True)
class Whiten:
    """(A - mean) / std over the rows or the tokens of the batch, exactly 0 if all are equal.

    ``form`` says where eps stands: ``added`` std + eps, ``inside`` sqrt(var + eps), ``floor`` sqrt(max(var, eps)).
    """

    over: str = "tokens"
    ddof: int = 1
    eps: float = 1e-8
    form: str = "inside"

    def __post_init__(self) -> None:
        _choose("over", self.over, OVER)
        _choose("form", self.form, FORMS)
        _amount("eps", self.eps)
        if self.ddof not in (0, 1):
            raise UserError(f"ddof={self.ddof!r} must be 0 (population) or 1 (sample)")

    def __str__(self) -> str:
        inner = {
            "added": f"std + {self.eps:g}" if self.eps else "std",
            "inside": f"sqrt(var + {self.eps:g})",
            "floor": f"sqrt(max(var, {self.eps:g}))",
        }
        return f"{self.over}, {inner[self.form]}, ddof {self.ddof}"

    def __call__(self, values: Tensor, weight: Tensor) -> Tensor:
        """``values`` and ``weight`` (how many items each value stands for) of one shape, float64."""
        total = weight.sum()
        counted = values[weight > 0.0]
        if counted.numel() == 0 or bool(counted.max() <= counted.min()):
            return torch.zeros_like(values)
        deviation = values - (values * weight).sum() / total
        var = (deviation**2 * weight).sum() / (total - self.ddof).clamp(min=1.0)
        if self.form == "added":
            return deviation / (var.sqrt() + self.eps)
        return deviation / (var + self.eps if self.form == "inside" else var.clamp(min=self.eps)).sqrt()


@dataclass(frozen=True)
class Estimator:
    """A = (r - baseline) / (scale + eps) for each response, from the rewards of its group.

    ``alone``: a group with one scored response gives ``zero``, or ``reward`` (baseline 0, scale 1: r / (1 + eps)).
    ``components``: ``one`` reward [B], or ``each`` of several [B, K] on its own, then summed with ``weights``.
    ``discount``: A_t = discount^(tokens after t) A, [B, T]. ``whiten``: over the batch, last. ``ties``: a tied group
    is ``zero`` after whitening too, or ``whitened`` with the rest.
    """

    baseline: str = "mean"
    scale: str = "std"
    eps: float = 0.0
    alone: str = "zero"
    components: str = "one"
    weights: tuple[float, ...] | None = None
    discount: float = 1.0
    whiten: Whiten | None = None
    ties: str = "zero"

    def __post_init__(self) -> None:
        _choose("baseline", self.baseline, BASELINES)
        _choose("scale", self.scale, SCALES)
        _choose("alone", self.alone, ("zero", "reward"))
        _choose("components", self.components, ("one", "each"))
        _choose("ties", self.ties, ("zero", "whitened"))
        _amount("eps", self.eps)
        if not 0.0 <= self.discount <= 1.0:
            raise UserError(f"discount={self.discount!r} must lie in [0, 1]")
        if self.weights is not None:
            if self.components == "one":
                raise UserError("weights are of several rewards: say components='each', or weigh and sum them yourself")
            object.__setattr__(self, "weights", tuple(float(weight) for weight in self.weights))
        if self.eps and self.scale == "none":
            raise UserError(f"eps={self.eps:g} is added to a scale, and scale='none' has none")
        if self.discount < 1.0 and self.whiten is not None and self.whiten.over == "rows":
            raise UserError("a discount gives one advantage per token: whiten over='tokens'")

    @property
    def needs(self) -> frozenset[str]:
        """What a call needs beyond rewards and groups: ``mask``, or ``lengths`` (which a mask gives too)."""
        if self.discount < 1.0:
            return frozenset({"mask"})
        by_tokens = self.whiten is not None and self.whiten.over == "tokens"
        return frozenset({"lengths"} if by_tokens or self.baseline == "length_mean" else ())

    @property
    def of_group(self) -> bool:
        """Whether a group of equal rewards carries no signal."""
        return self.baseline != "none" or SCALES[self.scale].of_group

    def __call__(
        self,
        rewards: Float[Tensor, "B"] | Float[Tensor, "B K"],
        group: Int[Tensor, "B"],
        *,
        lengths: Int[Tensor, "B"] | Float[Tensor, "B"] | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
    ) -> Advantages:
        """The advantages of a whole generation batch: before it is cut into micro-batches.

        ``rewards`` [B], or [B, K] for ``components='each'``; ``group`` [B], ids in any order; ``lengths`` [B], tokens
        of each response, or ``mask`` [B, T], true where a token counts. A NaN reward is unscored: it leaves the
        statistics and gets 0. A tied group gives exactly 0. Raises UserError on shapes and on what is missing.
        """
        lengths = self._check(rewards, group, lengths, mask)
        columns = rewards.unsqueeze(1) if rewards.ndim == 1 else rewards
        factors = self.weights or (1.0,) * columns.shape[1]
        each = [Groups(column, group, lengths) for column in columns.unbind(1)]
        scored = torch.stack([one.scored for one in each]).any(0)
        silent = torch.stack([self._silent(one) for one in each]).all(0)
        values = torch.stack([factor * self._of(one) for factor, one in zip(factors, each, strict=True)]).sum(0)
        weight = scored.double()
        if self.discount < 1.0 and mask is not None:
            after = (mask.flip(1).cumsum(1).flip(1) - 1).clamp(min=0)  # unmasked tokens after this one
            values, silent = values.unsqueeze(1) * self.discount ** after.double(), silent.unsqueeze(1)
            weight = (mask & scored.unsqueeze(1)).double()
            values = torch.where(weight > 0.0, values, 0.0)
        elif self.whiten is not None and self.whiten.over == "tokens" and lengths is not None:
            weight = weight * lengths
        if self.whiten is not None:
            still = silent if self.ties == "zero" else torch.zeros_like(silent)
            left_out = weight == 0.0 if values.ndim == 2 else ~scored
            values = torch.where(still | left_out, 0.0, self.whiten(values, weight))
        tied = torch.stack([one.tied for one in each]).all(0)
        return Advantages(values.to(rewards.dtype), scored, tied)

    def _silent(self, groups: Groups) -> Tensor:
        """Rows whose group says nothing: its rewards are equal, or it is one response."""
        silent = groups.tied if self.of_group else torch.zeros_like(groups.tied)
        return silent & ~groups.alone if self.alone == "reward" else silent

    def _of(self, groups: Groups) -> Tensor:
        """(r - baseline) / (scale + eps) of one reward, 0 without signal."""
        scale = SCALES[self.scale]
        centred, divisor = BASELINES[self.baseline](groups), scale.divisor(groups, self.eps)
        if self.alone == "reward":
            centred = torch.where(groups.alone, groups.value, centred)
            divisor = torch.where(groups.alone, 1.0 + self.eps, divisor) if scale.of_group else divisor
        live = groups.scored & ~self._silent(groups) & (divisor > 0.0)  # a scale of 0 leaves nothing to compare by
        return torch.where(live, centred / torch.where(live, divisor, 1.0), 0.0)

    def _check(
        self, rewards: Tensor, group: Tensor, lengths: Tensor | None, mask: Tensor | None
    ) -> Float[Tensor, "B"] | None:
        """The lengths, float64; UserError for what cannot be meant."""
        if self.components == "one" and rewards.ndim == 2:
            raise UserError(
                f"rewards are [B, K], {list(rewards.shape)}: sum them into one, or estimate components='each' (gdpo)"
            )
        shape = list(rewards.shape)
        if rewards.ndim != (2 if self.components == "each" else 1) or rewards.shape[:1] != group.shape:
            wanted = (
                "rewards must be [B, K] and group [B]" if self.components == "each" else "rewards and group must be [B]"
            )
            raise UserError(f"{wanted}; got {shape} and {list(group.shape)}")
        if not rewards.is_floating_point() or bool(torch.isinf(rewards).any()):
            raise UserError("rewards must be floating-point and not infinite; NaN means unscored")
        if self.weights is not None and len(self.weights) != rewards.shape[1]:
            raise UserError(f"there are {rewards.shape[1]} rewards and {len(self.weights)} weights")
        if mask is not None and (mask.ndim != 2 or mask.shape[:1] != group.shape):
            raise UserError(f"mask must be [B, T] with B = {len(group)}; got {list(mask.shape)}")
        if mask is not None:
            if lengths is not None:
                raise UserError("the mask gives the lengths: leave lengths out")
            lengths = mask.sum(1)
        if lengths is not None and (lengths.shape != group.shape or not bool((lengths >= 0).all())):
            raise UserError(f"lengths must be [B] with B = {len(group)} and not negative; got {list(lengths.shape)}")
        if "mask" in self.needs and mask is None:
            raise UserError("a discount gives one advantage per token: give mask=[B, T]")
        if "lengths" in self.needs and lengths is None:
            raise UserError("this estimator weighs responses by their tokens: give lengths=[B] or mask=[B, T]")
        return None if lengths is None else lengths.double()


def group_advantages(
    rewards: Float[Tensor, "B"],
    group: Int[Tensor, "B"],
    *,
    baseline: str = "mean",
    scale: str = "std",
    eps: float = 0.0,
) -> Advantages:
    """A = (r - baseline) / (scale + eps) within each group of responses to one prompt: ``Estimator`` as a function.

    ``baseline``: group ``mean``, ``leave_one_out`` mean of the others, ``none``, ... ``scale``: sample ``std`` (GRPO,
    arXiv 2402.03300), ``population_std``, ``none`` (Dr. GRPO, arXiv 2503.20783; RLOO), ... A NaN reward is unscored:
    it leaves the statistics and gets 0. A tied group, and a group of one, gives exactly 0. Groups are ids in any
    order. ``eps`` is added to the scale, if there is one. Raises UserError on shapes or on an unknown name.
    """
    return Estimator(baseline, scale, eps if scale != "none" else 0.0)(rewards, group)
