"""Advantages: the signal of each response from the rewards of its group; a value of the run, not of the spec."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from klamp.errors import UserError
from klamp.guards import check_choice

BASELINES = ("mean", "leave_one_out", "none")
SCALES = ("std", "population_std", "none")


class Advantages(NamedTuple):
    """``values`` [B], 0 where there is no signal; ``scored``: rows with a reward; ``tied``: rows of equal groups."""

    values: Float[Tensor, "B"]
    scored: Bool[Tensor, "B"]
    tied: Bool[Tensor, "B"]


def group_advantages(
    rewards: Float[Tensor, "B"],
    group: Int[Tensor, "B"],
    *,
    baseline: str = "mean",
    scale: str = "std",
    eps: float = 0.0,
) -> Advantages:
    """A = (r - baseline) / (scale + eps) within each group of responses to one prompt.

    ``baseline``: group ``mean``, ``leave_one_out`` mean of the others, or ``none``. ``scale``: sample ``std`` (GRPO,
    arXiv 2402.03300), ``population_std``, or ``none`` (Dr. GRPO, arXiv 2503.20783; RLOO). A NaN reward is unscored:
    it leaves the statistics and gets 0. A tied group, and a group of one under a scale or leave-one-out, gives
    exactly 0. Groups are ids in any order. Raises UserError on shapes or on an unknown name.
    """
    check_choice("baseline", baseline, BASELINES)
    check_choice("scale", scale, SCALES)
    if rewards.ndim != 1 or rewards.shape != group.shape:
        raise UserError(f"rewards and group must be [B]; got {list(rewards.shape)} and {list(group.shape)}")
    if not rewards.is_floating_point() or bool(torch.isinf(rewards).any()):
        raise UserError("rewards must be floating-point and not infinite; NaN means unscored")
    scored = ~torch.isnan(rewards)
    value = torch.where(scored, rewards, 0.0).double()
    identity, index = torch.unique(group, return_inverse=True)
    slots = identity.numel()

    def total(items: Tensor) -> Tensor:
        return torch.zeros(slots, dtype=torch.float64, device=rewards.device).index_add(0, index, items.double())

    count = total(scored)
    mean = total(value) / count.clamp(min=1.0)
    deviation = torch.where(scored, value - mean[index], 0.0)
    most = torch.full((slots,), -torch.inf, dtype=torch.float64, device=rewards.device)
    least = -most
    most = most.scatter_reduce(0, index[scored], value[scored], "amax")
    least = least.scatter_reduce(0, index[scored], value[scored], "amin")
    tied = (most <= least)[index]
    n = count[index]
    result = value if baseline == "none" else deviation
    if baseline == "leave_one_out":
        result = deviation * n / (n - 1.0).clamp(min=1.0)
    if scale != "none":
        ddof = 1.0 if scale == "std" else 0.0
        std = (total(deviation**2) / (count - ddof).clamp(min=1.0)).sqrt()
        result = result / (std[index] + eps)
    silent = ~scored | (tied & (baseline != "none"))
    return Advantages(torch.where(silent, 0.0, result).to(rewards.dtype), scored, tied)
