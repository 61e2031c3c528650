"""Scopes: what a log-ratio or a divergence is taken over: a token, a turn, what came before, what follows, a response.

Each reduction maps values [B, T], 0 where masked, to values that broadcast to [B, T]. Distances in a prefix or suffix
are counted over unmasked tokens, so padding, holes and packing do not matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from klamp.errors import UserError

if TYPE_CHECKING:
    from klamp.batch import Batch


def reduce(batch: Batch, values: Tensor, scope: str, how: str = "mean", discount: float = 1.0) -> Tensor:
    """The ``mean``, ``sum`` or ``max`` of values over the scope of each token; ``discount`` ** distance weighs a prefix or suffix."""
    if scope == "token":
        return values
    if scope in ("prefix", "suffix"):
        return _running(batch, values, how, discount, scope == "suffix")
    if how == "max":
        return _largest(batch, values, scope)
    total = totals(batch, values, scope)
    return total if how == "sum" else total / totals(batch, batch.mask, scope).clamp(min=1)


def totals(batch: Batch, values: Tensor, scope: str) -> Tensor:
    """Sums over each response, turn or group of this batch, broadcastable to [B, T]; booleans are counted."""
    value = values.to(torch.int64) if values.dtype == torch.bool else values
    if scope == "sequence" and not batch.packed:
        return value.sum(dim=1, keepdim=True)
    slots, index = slots_of(batch, scope)
    found = torch.zeros(slots, dtype=value.dtype, device=value.device)
    return found.index_add(0, index.reshape(-1), value.expand(batch.shape).reshape(-1))[index]


def _largest(batch: Batch, values: Tensor, scope: str) -> Tensor:
    hidden = torch.where(batch.mask, values, -torch.inf)
    if scope == "sequence" and not batch.packed:
        top = hidden.amax(dim=1, keepdim=True) if values.shape[1] else hidden.new_zeros((values.shape[0], 1))
    else:
        slots, index = slots_of(batch, scope)
        top = hidden.new_full((slots,), -torch.inf)
        top = top.scatter_reduce(0, index.reshape(-1), hidden.reshape(-1), "amax")[index]
    return torch.where(top == -torch.inf, 0.0, top)


def slots_of(batch: Batch, scope: str) -> tuple[int, Tensor]:
    """(number of slots, slot of each position [B, T]) of the responses, turns or groups of a batch."""
    if scope == "group":
        if batch.group is None:
            raise UserError("scope 'group' needs group ids: give group= to Batch")
        identity, index = torch.unique(batch.group, return_inverse=True)
        return identity.numel(), index.unsqueeze(1).expand(batch.shape)
    slots, index = batch.responses
    if scope == "sequence":
        return slots, index
    if batch.segment is None:
        raise UserError(
            "scope 'segment' needs turn numbers: give segment= to Batch (klamp.batch.segments(mask) counts runs)"
        )
    _, turn = torch.unique(batch.segment, return_inverse=True)
    pair = index * (int(turn.max()) + 1 if turn.numel() else 1) + turn
    identity, index = torch.unique(pair, return_inverse=True)
    return identity.numel(), index


def positions(batch: Batch) -> Tensor:
    """The place of each unmasked token among the unmasked tokens of its response, from 0; [B, T], int64."""
    if not batch.packed:
        return batch.mask.cumsum(dim=1) - 1
    slots, index = batch.responses
    flat, mask = index.reshape(-1), batch.mask.reshape(-1)
    order = flat.argsort(stable=True)
    count = mask[order].to(torch.int64).cumsum(0)
    before = torch.zeros(slots + 1, dtype=torch.int64, device=flat.device)
    before[1:] = torch.zeros_like(before[1:]).index_add(0, flat, mask.to(torch.int64)).cumsum(0)
    place = torch.empty_like(count)
    place[order] = count - 1 - before[flat[order]]
    return place.reshape(batch.shape)


def _running(batch: Batch, values: Tensor, how: str, discount: float, backwards: bool) -> Tensor:
    """Over a token and those before it (or after it) in its response, by doubling: log2(T) vector steps."""
    slots, index = batch.responses
    place = positions(batch)
    if backwards:
        place = totals(batch, batch.mask, "sequence") - 1 - place
    mask = batch.mask
    width = int(place[mask].max()) + 1 if bool(mask.any()) else 0
    at = (index[mask], place[mask])
    start = -torch.inf if how == "max" else 0.0
    dense = values.new_full((slots, width), start).index_put(at, values.expand(batch.shape)[mask])
    if how != "max":
        dense = _scan(dense, discount)
    elif width:
        dense = dense.cummax(dim=1).values
    if how == "mean":
        dense = dense / _scan(torch.ones_like(dense), discount)
    return torch.zeros(batch.shape, dtype=values.dtype, device=values.device).index_put((mask,), dense[at])


def _scan(dense: Tensor, discount: float) -> Tensor:
    shift = 1
    while shift < dense.shape[1] and discount**shift > 0.0:  # beyond, weights underflow: 0 * inf is nothing, not NaN
        dense = torch.cat([dense[:, :shift], dense[:, shift:] + discount**shift * dense[:, :-shift]], dim=1)
        shift *= 2
    return dense
