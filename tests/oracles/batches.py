"""Random batches as dictionaries of tensors, for both sides of a comparison."""

from __future__ import annotations

import torch
from torch import Tensor

Fields = dict[str, Tensor | None]
ROLES = ("logp_new", "logp_old", "logp_rollout", "logp_ref")


def random_fields(
    seed: int, rows: int = 5, tokens: int = 7, *, spread: float = 0.4, per_token: bool = False, dtype: torch.dtype = torch.float64
) -> Fields:  # fmt: skip
    """Log-ratios of about +-spread, some far; zero advantages, empty and full rows; rubbish where masked."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    old = -3.0 * torch.rand(rows, tokens, generator=rng, dtype=torch.float64) - 1e-3
    wide = torch.where(torch.rand(rows, tokens, generator=rng) < 0.15, 4.0, 1.0)
    lengths = torch.randint(0, tokens + 1, (rows,), generator=rng)
    lengths[0] = tokens
    mask = (torch.arange(tokens) < lengths[:, None]) & (torch.rand(rows, tokens, generator=rng) < 0.9)
    advantages = normal(rows, tokens) if per_token else normal(rows)
    advantages = torch.where(torch.rand(advantages.shape, generator=rng) < 0.1, 0.0, advantages)
    fields: Fields = {
        "logp_new": old + spread * wide * normal(rows, tokens),
        "logp_old": old,
        "logp_rollout": old + 0.2 * normal(rows, tokens),
        "logp_ref": old + 0.5 * normal(rows, tokens),
        "entropy": 2.0 * torch.rand(rows, tokens, generator=rng, dtype=torch.float64),
        "advantages": advantages,
    }
    fields = {name: value.to(dtype) for name, value in fields.items() if value is not None}
    return fields | {"mask": mask, "group": torch.randint(0, 3, (rows,), generator=rng)}


def take(fields: Fields, index: Tensor | slice) -> Fields:
    """Some rows of the fields."""
    return {name: None if value is None else value[index] for name, value in fields.items()}


def packed(fields: Fields, width: int) -> Fields:
    """The unmasked tokens of all responses in one line each after the other, cut into rows of ``width``."""
    mask, shape = fields["mask"], fields["mask"].shape
    ids = torch.arange(shape[0])[:, None].expand(shape)
    spare = -int(mask.sum()) % width

    def lay(value: Tensor) -> Tensor:
        value = value[:, None].expand(shape) if value.ndim == 1 else value
        line = value[mask]
        return torch.cat([line, line.new_zeros(spare)]).reshape(-1, width)

    found = {name: lay(value) for name, value in fields.items() if name not in ("group",) and value is not None}
    last = int(ids[mask].max()) if bool(mask.any()) else 0
    row = torch.cat([ids[mask], torch.full((spare,), last)]).reshape(-1, width)  # padding belongs to the last response
    return found | {"row": row}
