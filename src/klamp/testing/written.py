"""The written-out objective: J per token as a formula of log pi_new, differentiated by torch.

Written from the parts of a spec and from the mathematics, never from ``klamp.objective``: the surrogate of the one
integrated factor, the other factors detached, the clip as a minimum or any guard as a constraint, the mean as a sum
over responses. Its gradient is autograd's, so a closed form that is wrong cannot agree with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from klamp.aggregates import Aggregate
from klamp.batch import Batch
from klamp.factors import Factor, Identity
from klamp.guards import GATES, Guard
from klamp.spec import Spec
from klamp.testing.draws import Draw


class LiveBatch(Batch):
    """A batch whose log-ratios carry their gradient; every scope is [B, T]."""

    def log_ratio(self, ratio: str, scope: str = "token", reduce: str = "mean") -> Tensor:
        numerator, denominator = ratio.split("/")
        x = torch.where(self.mask, self.logp(numerator) - self.logp(denominator), 0.0)
        if scope == "token":
            return x
        total = self.members.T @ (self.members @ x.reshape(-1))
        count = self.members.T @ (self.members @ self.mask.reshape(-1).to(x.dtype))
        return (total if reduce == "sum" else total / count.clamp(min=1.0)).reshape(self.shape)

    @cached_property
    def members(self) -> Tensor:
        """[R, B*T], 1 where a position belongs to a response."""
        ids = self.row if self.packed else torch.arange(self.shape[0]).unsqueeze(1).expand(self.shape)
        assert ids is not None
        flat = ids.reshape(-1)
        return torch.eq(torch.unique(flat).unsqueeze(1), flat).to(self.logp_new.dtype)

    @property
    def signal(self) -> Tensor:
        """Advantages as [B, T], 0 at masked positions."""
        return torch.where(self.mask, self.advantages, 0.0)


@dataclass(frozen=True)
class Written:
    """``policy``: J per token; ``penalty``: what is added to -J; ``share``: the weight of a token in the mean.

    ``cut``, ``inside``: by the guards' regions; ``ties``: tokens too near a bound for a verdict. ``g``: dJ/dlogp_new;
    ``slope``: of the penalties that have one; ``loss`` and its ``grads`` by each leaf.
    """

    policy: Tensor
    penalty: Tensor
    share: Tensor
    cut: Tensor
    inside: Tensor
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
    state: dict[str, float] | None = None,
    *,
    clip: bool = False,
    by_measure: bool = False,
    tolerance: float = 1e-9,
) -> Written:
    """The objective of ``spec`` on ``draw``, in float64.

    ``clip``: pessimistic clips as min(w A, clip(w) A) rather than as constraints. ``by_measure``: inside is
    D(w) <= radius rather than two bounds. ``tolerance``: what counts as a tie, relative to the log-ratios.
    """
    fresh, leaves = draw.cast(torch.float64).leaves()
    batch = fresh.build(LiveBatch)
    verdicts = [_verdict(guard, batch, by_measure, tolerance) for guard in spec.guards]
    nothing = torch.zeros(batch.shape, dtype=torch.bool)
    cut, inside, ties = nothing, batch.mask, nothing
    for cuts, within, tie in verdicts:
        cut, inside, ties = cut | cuts, inside & within, ties | tie
    policy = _policy(spec, batch, [verdict[0] for verdict in verdicts], clip)
    penalty, sloped = torch.zeros_like(policy), torch.zeros_like(policy)
    for part in spec.penalties:
        value, slope = part.evaluate(batch, state or {})
        value = torch.where(batch.mask, value, 0.0)
        penalty = penalty + value
        if slope is not None:
            sloped = sloped + value
    share = shares(spec.mean, batch)
    loss = ((penalty - policy) * share).sum()
    (g,), (slope,) = _gradients(policy.sum(), leaves[:1]), _gradients(sloped.sum(), leaves[:1])
    return Written(
        policy.detach(), penalty.detach(), share, cut & batch.mask, inside, ties & batch.mask,
        g, slope, loss.detach(), _gradients(loss, leaves),
    )  # fmt: skip


def _gradients(value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


# --- the policy term ------------------------------------------------------------------------------------------


def _policy(spec: Spec, batch: LiveBatch, cuts: list[Tensor], clip: bool) -> Tensor:
    """J per token: A times the detached factors times the surrogate, and the guards' values where they cut."""
    carrier = next((factor for factor in spec.factors if factor.integrated), None)
    scale = batch.signal
    for factor in spec.factors:
        if factor is not carrier:
            weight, _ = factor.transform.evaluate(batch.log_ratio(*factor.of).detach(), batch.signal)
            scale = torch.where(scale == 0.0, 0.0, scale * weight.detach())
    clips = [guard for guard in spec.guards if clip and _is_clip(guard, carrier)]
    every = forced = torch.zeros(batch.shape, dtype=torch.bool)  # forced: cut by a constraint, not by a minimum
    for guard, cut in zip(spec.guards, cuts, strict=True):
        every, forced = every | cut, forced if guard in clips else forced | cut
    surrogate = _surrogate(batch, carrier, torch.where(every, 0.0, scale), forced)
    value = scale * surrogate
    for guard in clips:
        value = torch.minimum(value, scale * surrogate.clamp(*_ends(guard)))
    constant = torch.full_like(scale, math.inf)
    for guard, cut in zip(spec.guards, cuts, strict=True):
        constant = torch.where(cut, torch.minimum(constant, _cut_value(guard, scale, batch)), constant)
    for guard, cut in zip(spec.guards, cuts, strict=True):
        constant = torch.where(cut & (guard.cut_value == "zero"), 0.0, constant)
    live = batch.mask & (batch.signal != 0.0)
    return torch.where(live, torch.where(forced, constant, value), 0.0)


def _surrogate(batch: LiveBatch, carrier: Factor | None, scale: Tensor, forced: Tensor) -> Tensor:
    """What A multiplies: the factor's surrogate of its ratio, or log pi_new; 0 where a constraint cuts."""
    if carrier is None:
        return torch.where(batch.mask & ~forced, batch.logp_new, 0.0)
    x = batch.log_ratio(*carrier.of)
    if carrier.scope == "sequence" and not (carrier.reduce == "mean" and _constant(batch, scale)):
        # Where A or the cuts differ within a response, the sequence's ratio enters in its token form.
        token = batch.log_ratio(carrier.ratio)
        x = x.detach() + token - token.detach()
    live = batch.mask & ~forced & (batch.signal != 0.0)
    return carrier.transform.evaluate(torch.where(live, x, 0.0), batch.signal)[1]


def _constant(batch: LiveBatch, values: Tensor) -> bool:
    """Whether unmasked tokens of a response share one value."""
    flat, mask = values.reshape(-1), batch.mask.reshape(-1)
    return all(torch.unique(flat[mask & (own > 0)]).numel() <= 1 for own in batch.members)


def _is_clip(guard: Guard, carrier: Factor | None) -> bool:
    """Whether the guard is min(w A, clip(w) A) of the surrogate w."""
    if carrier is None or not isinstance(carrier.transform, Identity):
        return False
    same = (guard.ratio, guard.scope, guard.reduce) == carrier.of
    return same and guard.gate == GATES["outward"] and guard.cut_value == "bound"


def _ends(guard: Guard) -> tuple[float, float]:
    high = guard.region.log_high
    return math.exp(guard.region.log_low), math.exp(high) if high < 709.0 else math.inf


def _cut_value(guard: Guard, scale: Tensor, batch: LiveBatch) -> Tensor:
    low, high = _ends(guard)
    x = batch.log_ratio(guard.ratio, guard.scope, guard.reduce).detach()
    return torch.where(scale == 0.0, 0.0, scale * torch.where(x > 0.0, torch.full_like(x, high), low))


# --- guards and means -----------------------------------------------------------------------------------------


def _verdict(guard: Guard, batch: LiveBatch, by_measure: bool, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """(cut, inside, too near a bound), all [B, T]."""
    x, region = batch.log_ratio(guard.ratio, guard.scope, guard.reduce).detach(), guard.region
    inside = inside_by_measure(guard, x) if by_measure else inside_by_bounds(guard, x)
    applies = guard.gate.predicate(x, batch.signal, batch).expand(batch.shape)
    near = tolerance * (x.abs() + _terms(guard, batch))
    ties = ((x - region.log_low).abs() <= near) | ((x - region.log_high).abs() <= near)
    return ~inside & applies & batch.mask, inside, ties


def _terms(guard: Guard, batch: LiveBatch) -> Tensor:
    """The size of what a log-ratio is the sum of: its rounding is relative to that."""
    size = torch.zeros(batch.shape, dtype=batch.logp_new.dtype)
    for role in guard.ratio.split("/"):
        size = size + torch.where(batch.mask, batch.logp(role), 0.0).detach().abs()
    if guard.scope == "token":
        return size
    return (batch.members.T @ (batch.members @ size.reshape(-1))).reshape(batch.shape)


def inside_by_bounds(guard: Guard, x: Tensor) -> Tensor:
    return (x >= guard.region.log_low) & (x <= guard.region.log_high)


def inside_by_measure(guard: Guard, x: Tensor) -> Tensor:
    """D(w) <= radius by evaluating the measure; an interval by evaluating w."""
    region = guard.region
    if region.measure is None:
        low, high = region.ratio_low or 0.0, math.inf if region.ratio_high is None else region.ratio_high
        return torch.ge(x.exp(), low) & torch.le(x.exp(), high)
    below, above = (torch.full_like(x, float(radius or 0.0)) for radius in (region.radius_low, region.radius_high))
    return torch.le(region.measure.divergence(x), torch.where(x < 0.0, below, above))


def shares(mean: Aggregate, batch: LiveBatch) -> Tensor:
    """The weight of each token in the loss, from the definition of the mean."""
    flat = batch.mask.reshape(-1).to(batch.logp_new.dtype)
    tokens = batch.members @ flat
    filled = float((tokens > 0).sum()) if mean.rows == "nonempty" else float(tokens.numel())
    if mean.kind == "token_mean":
        weight = torch.full_like(flat, 1.0 / max(float(flat.sum()), 1.0))
    elif mean.kind == "sequence_sum":
        assert mean.divisor is not None
        weight = torch.full_like(flat, 1.0 / (max(filled, 1.0) * mean.divisor))
    elif mean.kind == "sequence_mean":
        weight = batch.members.T @ (1.0 / (max(filled, 1.0) * tokens.clamp(min=1.0)))
    else:
        assert batch.group is not None
        group = batch.group.unsqueeze(1).expand(batch.shape).reshape(-1)
        of = torch.stack([flat[group == one].sum() for one in group])
        prompts = len({int(one) for one in group[flat > 0]})
        weight = 1.0 / (max(prompts, 1) * of.clamp(min=1.0))
    return (weight * flat).reshape(batch.shape)
