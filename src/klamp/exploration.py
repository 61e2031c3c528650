"""Exploration: does what a spec keeps, and a plain clip would cut, raise the entropy or lower it? A proxy per step.

To first order a natural-gradient step changes the entropy by rate * sum of g (-log q(a) - H), q the new policy at the
token: pushing up a token that is rarer than e^-H raises it. The vanilla gradient's exact statistic needs the whole
distribution (docs/theory.md). The plain clip is [0.8, 1.2], outward, with the importance weight: GRPO's.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from klamp.batch import Batch

REFERENCE = (0.8, 1.2)


def exploration(
    batch: Batch, x: Float[Tensor, "B T"], advantages: Tensor, kept: Bool[Tensor, "B T"], g: Float[Tensor, "B T"]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Sums and counts of the three metrics ``explore/*``; x = log(new/old), g of the policy term, all detached.

    Surprise is -log q(a) - H in nats, averaged with weights |g| over tokens that only the spec keeps, and with |A| w over
    those that only the clip keeps; the push is the mean of (g - g of the clip) times it. Source: docs/theory.md, entropy.
    """
    assert batch.entropy is not None
    low, high = (math.log(bound) for bound in REFERENCE)
    surprise = -batch.select(batch.logp_new) - batch.select(batch.entropy)
    live = batch.mask & (advantages != 0)
    outward = (advantages > 0) & (x > high) | (advantages < 0) & (x < low)
    plain = advantages * x.exp()  # in the dtype of g, so that equal weights cancel exactly
    finite = live & torch.isfinite(plain)
    clipped = torch.where(finite & ~outward, plain, 0.0).double()
    mine = torch.where(finite, g.double(), 0.0)
    only_kept, only_cut = finite & kept & outward, finite & ~kept & ~outward
    found = {}
    for name, where, size in (("kept", only_kept, mine.abs()), ("cut", only_cut, clipped.abs())):
        weight = torch.where(where, size, 0.0)
        found[f"explore/{name}_surprise_mean"] = ((weight * surprise).sum(), weight.sum())
    return found | {"explore/entropy_push_mean": (((mine - clipped) * surprise).sum(), batch.mask.sum())}
