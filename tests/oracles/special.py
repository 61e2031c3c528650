"""Batches with everything a method may read: random ones of honest log-probs, and the corners."""

from __future__ import annotations

import torch
from torch import Tensor

from oracles.batches import Fields, random_fields

LOGPS = ("logp_new", "logp_old", "logp_rollout", "logp_ref")


def whole_fields(seed: int, rows: int = 5, tokens: int = 7, *, per_token: bool = False, spread: float = 0.4) -> Fields:
    """``random_fields`` with log-probs below 0 and ids of rows and turns."""
    fields = random_fields(seed, rows, tokens, spread=spread, per_token=per_token)
    rng = torch.Generator().manual_seed(seed + 1)
    for name in LOGPS:
        fields[name] = -fields[name].abs() - 1e-6
    fields["row"] = torch.randperm(1000, generator=rng)[:rows]
    fields["segment"] = (torch.rand(rows, tokens, generator=rng) < 0.4).cumsum(dim=1)
    fields["reward"] = torch.rand(rows, generator=rng, dtype=torch.float64)
    fields["distance"] = 0.1 * torch.rand(rows, tokens, generator=rng, dtype=torch.float64) ** 2
    return fields


def extreme(seed: int, per_token: bool) -> Fields:
    """Log-ratios new/old and old/rollout of about +-15, new/old of some tokens about +-40, between likely tokens."""
    fields = whole_fields(seed, 6, 6, per_token=per_token)
    rng = torch.Generator().manual_seed(seed)

    def far(share: float, size: float, default: Tensor) -> Tensor:
        sign = torch.where(torch.rand(6, 6, generator=rng) < 0.5, -1.0, 1.0).double()
        pick = torch.rand(6, 6, generator=rng) < share
        return torch.where(pick, sign * (size + torch.rand(6, 6, generator=rng, dtype=torch.float64)), default)

    x = far(0.3, 40.0, far(0.6, 15.0, fields["logp_new"] - fields["logp_old"]))
    near = fields["logp_old"] / 4
    fields["logp_new"], fields["logp_old"] = torch.where(x > 0, near, near + x), torch.where(x > 0, near - x, near)
    gap = far(0.5, 15.0, fields["logp_rollout"] - fields["logp_ref"])
    fields["logp_rollout"] = torch.minimum(fields["logp_old"] + gap, torch.full_like(gap, -1e-3))
    fields["mask"] = fields["mask"] | (torch.arange(6)[:, None] == 0)
    return fields


def on_policy(seed: int, per_token: bool) -> Fields:
    fields = whole_fields(seed, per_token=per_token)
    return fields | {"logp_new": fields["logp_old"].clone(), "logp_rollout": fields["logp_old"].clone()}


def rubbish(seed: int, per_token: bool) -> Fields:
    """Masked tokens hold +-800, NaN and infinities in every field of tokens."""
    fields = whole_fields(seed, 6, 8, per_token=per_token)
    if fields["advantages"].ndim == 1:
        fields["advantages"] = fields["advantages"][:, None].expand(6, 8).clone()
    values = torch.tensor(
        [800.0, -800.0, float("nan"), 800.0, float("inf"), -800.0, -float("inf")], dtype=torch.float64
    )
    for shift, name in enumerate((*LOGPS, "advantages", "entropy")):
        noise = values[(torch.arange(48).reshape(6, 8) + shift) % 7]
        fields[name] = torch.where(fields["mask"], fields[name], noise)
    return fields


def empty_row(seed: int, per_token: bool) -> Fields:
    fields = whole_fields(seed, per_token=per_token)
    fields["mask"] = fields["mask"] & (torch.arange(5)[:, None] != 1)
    return fields


def no_advantage(seed: int, per_token: bool) -> Fields:
    fields = whole_fields(seed, per_token=per_token)
    return fields | {"advantages": torch.zeros_like(fields["advantages"])}


def one_token(seed: int, per_token: bool) -> Fields:
    fields = whole_fields(seed, 1, 1, per_token=per_token)
    return fields | {"mask": torch.ones(1, 1, dtype=torch.bool)}


def nothing(seed: int, per_token: bool) -> Fields:
    fields = whole_fields(seed, per_token=per_token)
    return fields | {"mask": torch.zeros_like(fields["mask"])}


SPECIAL = {
    builder.__name__: builder for builder in (extreme, on_policy, rubbish, empty_row, no_advantage, one_token, nothing)
}
