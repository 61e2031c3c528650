"""The fold: all guards of a spec as one verdict per token, all factors as one weight and one value."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from klamp.batch import Batch
from klamp.factors import Factor, absorbs
from klamp.guards import Guard
from klamp.spec import Spec
from klamp.survey import Moment, judge, ratio_of, transform_of


@dataclass(frozen=True)
class Weighed:
    """The factors folded: the weight of g is carried' x rest, the value per unit of A carried x rest.

    ``carried``: the surrogate of the one integrated factor, or log pi_new; ``rest``: the detached others, if any.
    """

    weight: Tensor
    carried: Tensor
    rest: Tensor | None

    @property
    def value(self) -> Tensor:
        return self.scaled(self.carried)

    def scaled(self, value: Tensor) -> Tensor:
        return value if self.rest is None else value * self.rest


@dataclass(frozen=True)
class Guarded:
    """The guards folded, [B, T]: cuts by side, dropped tokens, and the value of a token that only clips have cut.

    ``pull``: what g of a cut token is multiplied by: 0, or less where a rollback's value is the one that counts; None
    where no guard rolls back.
    """

    keep: Tensor
    outside_low: Tensor
    outside_high: Tensor
    removed_low: Tensor
    removed_high: Tensor
    value: Tensor
    pull: Tensor | None


def weigh(spec: Spec, batch: Batch, advantages: Tensor, x: Tensor, moment: Moment) -> Weighed:
    """Every factor's weight and value, before any cut; what overflows where it is cut is selected away later."""
    slope = rest = carried = None
    for index, factor in enumerate(spec.factors):
        key = f"factor {index}"
        own = x if factor.plain else ratio_of(key, factor, batch, moment)
        if factor.clipped:
            own = clipped_ratio(spec, factor, batch, advantages, moment)
        weight, surrogate = transform_of(key, factor, batch, moment).evaluate(own, advantages)
        if factor.integrated:
            slope, carried = weight, surrogate
        else:
            rest = weight if rest is None else rest * weight
    if carried is None or slope is None:
        one = rest if rest is not None else torch.ones((), dtype=x.dtype, device=x.device)
        return Weighed(one, torch.where(batch.mask, batch.logp_new.detach().to(x.dtype), 0.0), rest)
    return Weighed(slope if rest is None else slope * rest, carried, rest)


def clipped_ratio(spec: Spec, factor: Factor, batch: Batch, advantages: Tensor, moment: Moment) -> Tensor:
    """The factor's log-ratio over its scope, of token log-ratios held at the bounds of the guards that cut them."""
    x = batch.log_ratio(factor.ratio)
    for index, guard in enumerate(spec.guards):
        if absorbs(factor, guard):
            key = f"guard {index}"
            verdict, region = judge(key, guard, batch, advantages, moment), guard.region.now(dict(moment.state), key)
            for cut, bound in ((verdict.outside_low, region.log_low), (verdict.outside_high, region.log_high)):  # type: ignore[union-attr]
                x = torch.where(cut & verdict.applies, bound, x) if math.isfinite(bound) else x
    return batch.reduce(torch.where(batch.mask, x, 0.0), factor.scope, factor.reduce, factor.discount)


def dropped(spec: Spec, batch: Batch, advantages: Tensor, moment: Moment) -> Tensor | None:
    """The tokens that guards take out of the mean's denominator, [B, T]; None where no guard drops."""
    found = None
    for index, guard in enumerate(spec.guards):
        if guard.action.startswith("drop"):
            cut = judge(f"guard {index}", guard, batch, advantages, moment).cuts.expand(batch.shape) & batch.mask
            if guard.action == "drop_row":
                cut = (batch.sequence_sum(cut) > 0) & batch.mask
            found = cut if found is None else found | cut
    return found


def fold(spec: Spec, batch: Batch, advantages: Tensor, x: Tensor, weighed: Weighed, moment: Moment) -> Guarded:
    """Every guard's verdict as one; a token belongs to the side on which the first guard cut it."""
    nothing = torch.zeros((), dtype=torch.bool, device=x.device).expand_as(x)
    low = high = cut_low = cut_high = masked = nothing
    value = torch.zeros((), dtype=x.dtype, device=x.device).expand_as(x)
    pull = torch.zeros_like(x) if any(guard.action == "rollback" for guard in spec.guards) else None
    for index, guard in enumerate(spec.guards):
        key = f"guard {index}"
        verdict = judge(key, guard, batch, advantages, moment)
        down, up = verdict.outside_low & verdict.applies, verdict.outside_high & verdict.applies
        low, high = low | verdict.outside_low, high | verdict.outside_high
        if guard.action == "drop_row":
            row, own = (
                batch.sequence_sum((down | up).expand(batch.shape) & batch.mask) > 0,
                batch.log_ratio(guard.ratio),
            )
            up, down = up | (row & ~down & (own >= 0)), down | (row & ~up & (own < 0))
        if guard.cut_value == "zero":
            masked = masked | down | up
        else:
            taken = any(absorbs(factor, guard) for factor in spec.factors)
            mine = weighed.carried if taken else _bound(guard, key, up, value, weighed, moment)
            chosen = (down | up) & (_lower(mine, value, advantages) | ~(cut_low | cut_high)) if index else down | up
            value = torch.where(chosen, mine, value)
            pull = None if pull is None else torch.where(chosen, -guard.strength, pull)
        cut_low, cut_high = cut_low | (down & ~cut_high), cut_high | (up & ~cut_low)
    value = weighed.scaled(value) if spec.guards else value
    if any(guard.cut_value == "zero" for guard in spec.guards):
        value = torch.where(masked, 0.0, value)  # last: a factor may overflow where the token is cut
        pull = None if pull is None else torch.where(masked, 0.0, pull)
    low, high, cut_low, cut_high = (side.expand_as(x) & batch.mask for side in (low, high, cut_low, cut_high))
    return Guarded(~(cut_low | cut_high), low, high, cut_low, cut_high, value, pull)


def _bound(guard: Guard, key: str, up: Tensor, like: Tensor, weighed: Weighed, moment: Moment) -> Tensor:
    """The value of a token that a guard cuts: the nearest bound b; a rollback's falls from there: (1 + strength) b - strength w."""
    region = guard.region.now(dict(moment.state), key)
    bound = torch.where(up, like.new_full((), region.high), region.low)  # type: ignore[union-attr]
    return bound if guard.action != "rollback" else (1.0 + guard.strength) * bound - guard.strength * weighed.carried


def _lower(mine: Tensor, value: Tensor, advantages: Tensor) -> Tensor:
    """Where guards overlap the pessimistic value counts, that of the smaller A * value."""
    return torch.where(advantages > 0, mine < value, mine > value)
