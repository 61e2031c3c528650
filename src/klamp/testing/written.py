"""The written-out objective: J per token as a formula of log pi_new, differentiated by torch.

Written from the parts of a spec and from the mathematics, never from ``klamp.objective``: the surrogate of the one
integrated factor, the other factors detached, the clip as a minimum or any guard as a constraint, the mean as a sum
over responses. Its gradient is autograd's, so a closed form that is wrong cannot agree with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from klamp.aggregates import Aggregate
from klamp.factors import Factor
from klamp.guards import GATES, Guard
from klamp.penalties import KLReference, Penalty
from klamp.spec import Spec
from klamp.testing.draws import Draw
from klamp.testing.live import LiveBatch
from klamp.testing.rulings import Ruling, Setting, State, ruling
from klamp.testing.weights import Pair, honest, in_token_form, ratio_of, surrogate, token_ratio, weight
from klamp.transforms import Identity


@dataclass(frozen=True)
class Written:
    """``policy``: J per token; ``penalty``: what is added to -J; ``share``: the weight of a token in the mean.

    ``cut``, ``inside``: by the guards' regions; ``turned``: rolled back, and not masked; ``dropped``: out of the mean;
    ``ties``: tokens too near a bound for a verdict. ``g``: dJ/dlogp_new; ``slope``: of the penalties that have one; ``loss`` and its ``grads`` by each leaf.
    """

    policy: Tensor
    penalty: Tensor
    share: Tensor
    cut: Tensor
    turned: Tensor
    inside: Tensor
    dropped: Tensor
    ties: Tensor
    g: Tensor
    slope: Tensor
    loss: Tensor
    grads: list[Tensor]

    @property
    def finite(self) -> bool:
        """Whether every term of the loss and every g is representable; a slope may overflow before its value."""
        return all(bool(torch.isfinite(value).all()) for value in (self.policy, self.penalty, self.g))


def written(
    spec: Spec,
    draw: Draw,
    state: State | None = None,
    *,
    clip: bool = False,
    by_measure: bool = False,
    tolerance: float = 1e-9,
) -> Written:
    """The objective of ``spec`` on ``draw``, a whole step, in float64.

    ``clip``: pessimistic clips as min(w A, clip(w) A) rather than as constraints. ``by_measure``: inside is
    D(w) <= radius rather than two bounds. ``tolerance``: what counts as a tie, relative to the log-ratios.
    """
    fresh, leaves = draw.cast(torch.float64).leaves()
    batch = fresh.build(LiveBatch)
    setting = Setting(state or {}, by_measure, tolerance)
    rulings = [ruling(f"guard {index}", guard, batch, setting) for index, guard in enumerate(spec.guards)]
    cut, inside, dropped, ties = batch.mask & False, batch.mask, batch.mask & False, batch.mask & False
    for one in rulings:
        cut, inside, dropped, ties = cut | one.cut, inside & one.inside, dropped | one.dropped, ties | one.ties
    pairs = list(zip(spec.guards, rulings, strict=True))
    turned = _cut_by([pair for pair in pairs if pair[0].action == "rollback"], batch)
    turned = turned & ~_cut_by([pair for pair in pairs if pair[0].cut_value == "zero"], batch)
    share = shares(spec.mean, batch, batch.mask & ~dropped)
    policy = _policy(spec, batch, pairs, share, clip)
    penalty, sloped = torch.zeros_like(policy), torch.zeros_like(policy)
    for index, part in enumerate(spec.penalties):
        where, guard = batch.mask, getattr(part, "on", None)
        if guard is not None:
            chosen = ruling(f"penalty {index}", guard, batch, setting)
            where, ties = chosen.cut, ties | chosen.ties
        value, has_slope = _penalty(part, batch, state or {})
        value = torch.where(where, value, 0.0)
        penalty = penalty + value
        sloped = sloped + value if has_slope else sloped
    loss = (torch.where(share > 0.0, penalty - policy, 0.0) * share).sum()
    (g,), (slope,) = _gradients(policy.sum(), leaves[:1]), _gradients(sloped.sum(), leaves[:1])
    return Written(
        policy.detach(), penalty.detach(), share, cut, turned, inside, dropped, ties,
        g, slope, loss.detach(), _gradients(loss, leaves),
    )  # fmt: skip


def _gradients(value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


def _penalty(part: Penalty, batch: LiveBatch, state: State) -> tuple[Tensor, bool]:
    """The value with its gradient, and whether the part has a slope in closed form."""
    if isinstance(part, KLReference):
        x = batch.log_ratio("new/ref")
        value = _estimate(part.estimator, x)
        if part.gradient is not None:  # the value of one estimator, the gradient of another
            other = _estimate(part.gradient, x)
            value = value.detach() + other - other.detach()
        return part.beta * value * (batch.log_ratio("new/old").exp() if part.weighted else 1.0), True
    value, slope = part.evaluate(batch, state)
    if slope is not None and "straight_through" in part.traits:  # its own claim is all there is
        logp = torch.where(batch.mask, batch.logp_new, 0.0)
        value = value.detach() + slope.detach() * (logp - logp.detach())
    return value, slope is not None


def _estimate(name: str, x: Tensor) -> Tensor:
    return {"k1": x, "k2": 0.5 * x * x, "k3": (-x).exp() - 1.0 + x, "abs": x.abs()}[name]


# --- the policy term ------------------------------------------------------------------------------------------


def _policy(spec: Spec, batch: LiveBatch, pairs: list[Pair], share: Tensor, clip: bool) -> Tensor:
    """J per token: A times the detached factors times the surrogate, and the guards' values where they cut."""
    carrier = next((factor for factor in spec.factors if factor.integrated), None)
    within = [[pair for pair in pairs if _absorbed(pair[0], factor)] for factor in spec.factors]
    scale = batch.signal
    for factor, held in zip(spec.factors, within, strict=True):
        if factor is not carrier:
            multiplier = weight(factor, ratio_of(factor, batch, held, clip).detach(), batch).detach()
            scale = torch.where(scale == 0.0, 0.0, scale * multiplier)
    bounding = [pair for held in within for pair in held]  # they bound a factor's ratio, and leave the value to it
    others = [pair for pair in pairs if pair not in bounding]
    clips = [pair for pair in others if clip and _is_clip(pair[0], carrier)]
    every, held_cut = _cut_by(others, batch), _cut_by(bounding, batch)
    forced = _cut_by([pair for pair in others if pair not in clips], batch)  # by a constraint, not by a minimum
    own = within[spec.factors.index(carrier)] if carrier is not None else []
    constant = (torch.where(every, 0.0, scale), share, 1.0 * (held_cut & (not own)))
    value = _surrogate(batch, carrier, own, constant, clip, forced)
    value = torch.where(held_cut & (not own), value.detach(), value)
    found = scale * value
    for guard, one in clips:
        found = torch.minimum(found, scale * _bent(guard, one, value))
    turned = _cut_by([pair for pair in others if pair[0].action == "rollback"], batch)
    masked = _cut_by([pair for pair in others if pair[0].cut_value == "zero"], batch)
    bent = (
        _surrogate(batch, carrier, own, (scale, share, 1.0 * every), clip, masked | ~turned)
        if bool(turned.any())
        else value
    )
    cut = torch.full_like(scale, math.inf)
    for guard, one in others:
        cut = torch.where(one.cut, torch.minimum(cut, _cut_value(guard, one, scale, bent, batch)), cut)
    cut = torch.where(masked, 0.0, cut)
    return torch.where(batch.live, torch.where(forced, cut, found), 0.0)


def _cut_by(pairs: list[Pair], batch: LiveBatch) -> Tensor:
    found = torch.zeros_like(batch.mask)
    for _, one in pairs:
        found = found | one.cut
    return found


def _absorbed(guard: Guard, factor: Factor) -> bool:
    """Whether a clipped factor takes the guard's bounds into its own ratio."""
    return factor.clipped and guard.cut_value == "bound" and (guard.ratio, guard.scope) == (factor.ratio, "token")


def _surrogate(batch: LiveBatch, carrier: Factor | None, absorbed: list[Pair], constant: tuple[Tensor, ...],
               clip: bool, forced: Tensor) -> Tensor:  # fmt: skip
    """What A multiplies: the factor's surrogate of its ratio, or log pi_new; 0 where a constraint cuts.

    Where A, the cuts or the mean (``constant``) differ within the scope, its ratio enters in its token form.
    """
    if carrier is None:
        return torch.where(batch.mask & ~forced, batch.logp_new, 0.0)
    x = ratio_of(carrier, batch, absorbed, clip)
    if carrier.scope != "token" and not honest(carrier, batch, *constant):
        x = in_token_form(carrier, x, token_ratio(carrier, batch, absorbed, clip))
    return surrogate(carrier.transform, torch.where(batch.live & ~forced, x, 0.0), batch.signal)


def _is_clip(guard: Guard, carrier: Factor | None) -> bool:
    """Whether the guard is min(w A, clip(w) A) of the surrogate w."""
    if carrier is None or not isinstance(carrier.transform, Identity):
        return False
    same = (guard.ratio, guard.scope, guard.reduce, guard.discount) == carrier.of
    return (
        same and guard.gate == GATES["outward"] and guard.cut_value == "bound" and guard.action in ("zero", "rollback")
    )


def _bent(guard: Guard, one: Ruling, w: Tensor) -> Tensor:
    """The ratio held at the bounds, or bent back from there."""
    held = w.clamp(one.low, one.high)
    return (1.0 + guard.strength) * held - guard.strength * w if guard.action == "rollback" else held


def _cut_value(guard: Guard, one: Ruling, scale: Tensor, w: Tensor, batch: LiveBatch) -> Tensor:
    """J of a cut token: A times the nearest bound; of one that is rolled back, less the more w is beyond it."""
    x = batch.log_ratio(guard.ratio, guard.scope, guard.reduce, guard.discount).detach()
    bound = torch.where(x > 0.0, torch.full_like(x, one.high), one.low)
    if guard.action == "rollback":
        bound = (1.0 + guard.strength) * bound - guard.strength * torch.where(one.cut, w, 0.0)
    return torch.where(batch.live, scale * bound, 0.0)  # a weight that underflows does not tame a bound that overflows


# --- means ----------------------------------------------------------------------------------------------------


def shares(mean: Aggregate, batch: LiveBatch, left: Tensor | None = None) -> Tensor:
    """The weight of each token in the loss of a whole step, from the definition of the mean; ``left``: not dropped."""
    left = batch.mask if left is None else left
    flat, weight = left.reshape(-1), torch.zeros(left.numel(), dtype=torch.float64)
    own = {"prompt_mean": "group"}.get(mean.kind, "sequence")
    cells = [[place for place in cell if flat[place]] for cell in batch.cells(own)]
    filled = [cell for cell in cells if cell]
    tokens, rows = sum(map(len, filled)), len(filled)
    if mean.rows == "all":  # an empty response counts, one that was dropped does not
        rows = batch.responses_seen - (len(cells) - len(filled))
    if mean.kind == "prompt_sum":
        rows = sum(any(bool(flat[place]) for place in cell) for cell in batch.cells("group"))
    for cell in filled:
        weight[cell] = {
            "token_mean": 1.0 / tokens,
            "local_token_mean": 1.0 / tokens,
            "token_sum": 1.0,
            "sequence_sum": 1.0 / (max(rows, 1) * (mean.divisor or 1.0)),
        }.get(mean.kind, 1.0 / (max(rows, 1) * len(cell)))
    return weight.reshape(batch.shape)
