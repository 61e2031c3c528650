"""Exploration: does what a spec keeps, and a plain clip would cut, raise the entropy or lower it? A proxy per step.

To first order a natural-gradient step changes the entropy by rate * sum of g (-log q(a) - H), q the new policy at the
token: pushing up a token that is rarer than e^-H raises it. The vanilla gradient's
rate is sum of g (Phi - q(a) (log q(a) + H)), Phi = sum_v q_v^2 (log q_v + H), where the batch brings Phi (docs/theory.md). The plain clip is [0.8, 1.2], outward, with the importance weight: GRPO's.
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
    """Sums and counts of the metrics ``explore/*``; x = log(new/old), g of the policy term, all detached.

    Surprise is -log q(a) - H in nats, averaged with weights |g| over tokens that only the spec keeps, and with |A| w over
    those that only the clip keeps; the push is the mean of (g - g of the clip) times it. Source: docs/theory.md, entropy.
    """
    assert batch.entropy is not None
    low, high = (math.log(bound) for bound in REFERENCE)
    surprise = torch.where(batch.mask, -(batch.logp_new.detach() + batch.entropy.detach()), 0.0).to(x.dtype)
    outward = (advantages > 0) & (x > high) | (advantages < 0) & (x < low)
    plain = advantages * x.exp()  # in the dtype of g, so that equal weights cancel exactly
    finite = batch.mask & torch.isfinite(plain)
    clipped, mine = torch.where(finite & ~outward, plain, 0.0), torch.where(finite, g, 0.0)
    only_kept = torch.where(outward & kept, mine, 0.0).abs()
    only_cut = torch.where(kept, 0.0, clipped).abs()
    tokens = batch.mask.sum()
    found = {}
    if batch.phi_mean is not None:
        found["explore/vanilla_push_mean"] = (_sum((mine - clipped) * _vanilla(batch, x.dtype)), tokens)
    return found | {
        "explore/kept_surprise_mean": (_sum(only_kept * surprise), _sum(only_kept)),
        "explore/cut_surprise_mean": (_sum(only_cut * surprise), _sum(only_cut)),
        "explore/entropy_push_mean": (_sum((mine - clipped) * surprise), tokens),
    }


def _vanilla(batch: Batch, dtype: torch.dtype) -> Tensor:
    """Phi - q(a) (log q(a) + H) of each token: what a unit of its g adds to the entropy under the vanilla gradient."""
    assert batch.entropy is not None
    assert batch.phi_mean is not None
    logq, entropy = (torch.where(batch.mask, one.detach(), 0.0).to(dtype) for one in (batch.logp_new, batch.entropy))
    return torch.where(batch.mask, batch.phi_mean.detach().to(dtype), 0.0) - logq.exp() * (logq + entropy)


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)
