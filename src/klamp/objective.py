"""Objective: folds the parts of a spec into a loss with a closed-form gradient. Knows no method's name.

g = A * product(keep of the guards) * product(factors)            (exactly 0 where A = 0)
loss = value.detach() + (s - s.detach()),   s = -sum_t weight_t g_t.detach() log pi_new_t    + penalties
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from klamp.batch import Batch
from klamp.errors import UserError
from klamp.guards import Guard, Verdict
from klamp.metrics import HISTOGRAM_BINS, HISTOGRAM_LIMIT
from klamp.penalties import FPenalty
from klamp.presets import parse
from klamp.spec import Spec
from klamp.stats import Stats, collect, weights
from klamp.tally import Tally

State = dict[str, float]


@dataclass(frozen=True)
class LossOutput:
    """``loss``: scalar with gradient. ``per_token``: its terms before averaging, detached. ``grad_policy``: g =
    dJ / d log pi_new per token before averaging (to maximise); ``grad_penalty``: the penalties' slope (to minimise).
    ``inside``: within every guard's region; ``kept``: unmasked and not cut. ``metrics``: sums and counts."""

    loss: Float[Tensor, ""]
    per_token: Float[Tensor, "B T"]
    grad_policy: Float[Tensor, "B T"]
    grad_penalty: Float[Tensor, "B T"]
    inside: Bool[Tensor, "B T"]
    kept: Bool[Tensor, "B T"]
    metrics: Tally


@dataclass(frozen=True)
class _Guarded:
    """The guards folded: cuts by side, and the value of a token that only clips have cut."""

    keep: Tensor
    outside_low: Tensor
    outside_high: Tensor
    removed_low: Tensor
    removed_high: Tensor
    value: Tensor


class Objective:
    """The loss of a spec, as a function of a batch, the counts of the whole step, and a state.

    ``diagnostics=False`` leaves out the metrics that cost more than a count: KL, histogram, extremes.
    """

    def __init__(self, spec: Spec | str, *, diagnostics: bool = True) -> None:
        self.spec = parse(spec)
        self.diagnostics = diagnostics
        mean = self.spec.mean
        if mean.kind == "sequence_sum" and mean.divisor is None:
            raise UserError(f"{self.spec} needs a constant divisor: for example aggregate=sequence_sum(divisor=1024)")

    def stats(self, batch: Batch) -> Stats:
        """The counts of one micro-batch; add them over the step (micro-batches, ranks, windows)."""
        return collect(self.spec.mean, batch)

    def init(self) -> State:
        """The state before the first step: the adaptive penalty's beta, if there is one."""
        return {"beta": self._adaptive[0].beta} if self._adaptive else {}

    def update(self, state: State, stats: Stats, metrics: Tally) -> State:
        """The state after an optimizer step, from the metrics of the whole step, added over its micro-batches.

        Raises UserError where the metrics are not those of as many tokens as ``stats`` counted.
        """
        for penalty in self._adaptive:
            measured, counted = int(metrics.sums["batch/tokens_count"]), int(stats.counts[0])
            if measured != counted:
                raise UserError(
                    f"the step has {counted} tokens, these metrics are of {measured}: add out.metrics over all micro-batches"
                )
            divergence = metrics.mean("policy/kl_old_new_mean")
            if bool(metrics.sums["policy/overflow_count"]):
                divergence = math.inf
            if divergence is not None:
                return {"beta": penalty.adapt(state["beta"], divergence)}
        return state

    @property
    def _adaptive(self) -> list[FPenalty]:
        return [p for p in self.spec.penalties if isinstance(p, FPenalty) and p.target is not None]

    def __call__(self, batch: Batch, stats: Stats | None = None, state: State | None = None) -> LossOutput:
        """The loss of ``batch`` within a step; ``stats=None`` means that this batch is the whole step.

        Raises UserError where the batch lacks what the spec needs, or a kept weight overflows (never clamped).
        """
        self.spec.require(batch.offers, "this batch")
        stats = self.stats(batch) if stats is None else self._of_step(stats, batch)
        x = batch.log_ratio("new/old")
        mask, advantages = batch.mask, batch.advantages.to(x.dtype)
        guarded = self._guard(batch, advantages, x)
        weight, value = self._weigh(batch, advantages, x)
        live = mask & (advantages != 0)
        kept = mask & guarded.keep
        g = torch.where(kept & live, advantages * weight, 0.0)
        value = torch.where(guarded.keep, value, guarded.value)
        policy = torch.where(live, -advantages * value, 0.0)
        share = weights(self.spec.mean, batch, stats, x.dtype)
        surrogate = -(g * share * torch.where(mask, batch.logp_new, 0.0)).sum()
        loss = (policy * share).sum() + (surrogate - surrogate.detach())
        penalty, slope = torch.zeros_like(policy), torch.zeros_like(policy)
        if self.spec.penalties:
            extra, penalty, slope = self._penalise(batch, share, state or self.init())
            loss = loss + extra
        self._check_overflow(loss, g, policy + penalty)
        metrics = self._tally(batch, x, guarded, live, policy, penalty, weight)
        inside = mask & ~(guarded.outside_low | guarded.outside_high)
        return LossOutput(loss, policy + penalty, g, slope, inside, kept, metrics)

    def _of_step(self, stats: Stats, batch: Batch) -> Stats:
        """The stats, checked (on the CPU, where it costs no wait) to count at least this batch."""
        if stats.counts.device.type == "cpu" and int(batch.mask.sum()) > int(stats.counts[0]):
            raise UserError(
                f"this batch has {int(batch.mask.sum())} tokens, the stats of its step only {int(stats.counts[0])}: "
                "add objective.stats(b) over every micro-batch of the step"
            )
        return stats

    # --- the fold -------------------------------------------------------------------------------------------

    def _guard(self, batch: Batch, advantages: Tensor, x: Tensor) -> _Guarded:
        nothing = torch.zeros((), dtype=torch.bool, device=x.device).expand_as(x)
        low = high = cut_low = cut_high = nothing
        value = torch.zeros((), dtype=x.dtype, device=x.device).expand_as(x)
        masked = nothing
        for index, guard in enumerate(self.spec.guards):
            verdict = self._judge(batch, guard, advantages, x)
            down, up = verdict.outside_low & verdict.applies, verdict.outside_high & verdict.applies
            if guard.cut_value == "zero":
                masked = masked | down | up
            else:
                value = self._bound(guard, advantages, down, up, value, cut_low | cut_high if index else None)
            low, high = low | verdict.outside_low, high | verdict.outside_high
            cut_low, cut_high = cut_low | (down & ~cut_high), cut_high | (up & ~cut_low)
        rest = [factor for factor in self.spec.factors if not factor.integrated]
        for factor in rest if self.spec.guards else []:
            value = value * factor.transform.evaluate(batch.log_ratio(*factor.of), advantages)[0]
        if any(guard.cut_value == "zero" for guard in self.spec.guards):
            value = torch.where(masked, 0.0, value)  # last: a factor may overflow where the token is cut
        low, high, cut_low, cut_high = (side.expand_as(x) & batch.mask for side in (low, high, cut_low, cut_high))
        return _Guarded(~(cut_low | cut_high), low, high, cut_low, cut_high, value)

    def _judge(self, batch: Batch, guard: Guard, advantages: Tensor, x: Tensor) -> Verdict:
        token = guard.scope == "token" and guard.ratio == "new/old"
        own = x if token else batch.log_ratio(guard.ratio, guard.scope, guard.reduce)
        return guard.judge(own, advantages, batch)

    def _bound(
        self, guard: Guard, advantages: Tensor, down: Tensor, up: Tensor, value: Tensor, already: Tensor | None
    ) -> Tensor:
        """The nearest bound for the cut tokens; where clips overlap, the pessimistic one (smallest A * bound)."""
        high = torch.full((), guard.region.high, dtype=value.dtype, device=value.device)
        bound = torch.where(up, high, guard.region.low)
        cut = down | up
        if already is None:
            return torch.where(cut, bound, value)
        lower = torch.where(advantages > 0, torch.minimum(bound, value), torch.maximum(bound, value))
        return torch.where(cut, torch.where(already, lower, bound), value)

    def _weigh(self, batch: Batch, advantages: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """(weight of g, value per unit of A), before any cut; overflow of cut tokens is selected away later."""
        weight: Tensor = torch.ones((), dtype=x.dtype, device=x.device)
        value = weight
        carried = False
        for factor in self.spec.factors:
            own = x if factor.of == ("new/old", "token", "mean") else batch.log_ratio(*factor.of)
            one, surrogate = factor.transform.evaluate(own, advantages)
            weight = weight * one
            value = value * (surrogate if factor.integrated else one)
            carried = carried or factor.integrated
        if not carried:
            value = value * torch.where(batch.mask, batch.logp_new.detach(), 0.0)
        return weight, value

    def _penalise(self, batch: Batch, share: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
        total = torch.zeros((), dtype=share.dtype, device=share.device)
        values, slopes = torch.zeros_like(batch.logp_new.detach(), dtype=share.dtype), None
        slopes = torch.zeros_like(values)
        logp = torch.where(batch.mask, batch.logp_new, 0.0)
        for penalty in self.spec.penalties:
            value, slope = penalty.evaluate(batch, state)
            value = torch.where(batch.mask, value, 0.0)
            values = values + value.detach()
            if slope is None:
                total = total + (value * share).sum()
                continue
            slope = torch.where(batch.mask, slope, 0.0)
            slopes = slopes + slope
            carrier = (slope * share * logp).sum()
            total = total + (value * share).sum() + (carrier - carrier.detach())
        return total, values, slopes

    def _check_overflow(self, loss: Tensor, g: Tensor, per_token: Tensor) -> None:
        if loss.device.type != "cpu" or bool(torch.isfinite(loss)):
            return
        for name, values in (("policy gradient weight", g), ("loss term", per_token)):
            bad = ~torch.isfinite(values)
            if bool(bad.any()):
                row, column = (int(i) for i in bad.nonzero()[0])
                raise UserError(
                    f"the {name} at [{row}, {column}] overflows ({int(bad.sum())} in all): the new and old policy differ "
                    f"too much there for {self.spec}; cap it, for example with + guard(ratio_high=10, gate='negative')"
                )
        raise UserError(
            f"the loss of {self.spec} is {float(loss.detach())}: a log-prob of the new policy is not finite"
        )

    # --- metrics --------------------------------------------------------------------------------------------

    def _tally(
        self, batch: Batch, x: Tensor, guarded: _Guarded, live: Tensor, policy: Tensor, penalty: Tensor, weight: Tensor
    ) -> Tally:
        tokens = batch.mask.sum()
        active = live.sum()
        removed_low, removed_high = (guarded.removed_low & live).sum(), (guarded.removed_high & live).sum()
        means = {
            "policy/loss_mean": (policy.sum(), tokens),
            "guard/removed_low_share": (removed_low, tokens),
            "guard/removed_high_share": (removed_high, tokens),
            "guard/removed_active_share": (removed_low + removed_high, active),
            "guard/outside_low_share": (guarded.outside_low.sum(), tokens),
            "guard/outside_high_share": (guarded.outside_high.sum(), tokens),
            "batch/zero_advantage_share": (tokens - active, tokens),
        }
        sums = {"batch/tokens_count": tokens}
        if self.spec.penalties:
            means["penalty/loss_mean"] = (penalty.sum(), tokens)
        if batch.missing_rows is not None:
            sums["batch/missing_rows_count"] = batch.missing_rows
        if batch.missing_tokens is not None:
            sums["batch/missing_tokens_count"] = batch.missing_tokens
        if batch.nonfinite is not None:
            sums["batch/nonfinite_count"] = batch.nonfinite
        if not self.diagnostics and not self._adaptive:
            return Tally(means, sums)
        wide = x.double()
        k3 = wide.expm1() - wide
        overflow = (k3 == math.inf).sum()
        means["policy/kl_old_new_mean"] = (torch.where(k3 < math.inf, k3, 0.0).sum(), tokens - overflow)
        sums["policy/overflow_count"] = overflow
        if not self.diagnostics:
            return Tally(means, sums)
        if batch.entropy is not None:
            means["policy/entropy_mean"] = (torch.where(batch.mask, batch.entropy.detach(), 0.0).sum(), tokens)
        if batch.logp_ref is not None:
            x_ref = batch.log_ratio("new/ref").double()
            k3_ref = (-x_ref).expm1() + x_ref
            far = (k3_ref == math.inf).sum()
            means["policy/kl_new_ref_mean"] = (torch.where(k3_ref < math.inf, k3_ref, 0.0).sum(), tokens - far)
        if any(factor.of != ("new/old", "token", "mean") or not factor.integrated for factor in self.spec.factors):
            differs = (weight - x.exp()).abs() > 1e-6 * x.exp()
            means["factor/reweighted_share"] = ((differs & batch.mask & guarded.keep).sum(), tokens)
        sums["policy/ratio_histogram"] = _histogram(x, batch.mask)
        largest = torch.where(batch.mask, wide, -math.inf).amax() if x.numel() else wide.new_full((), -math.inf)
        return Tally(means, sums, {"policy/ratio_max": largest.exp()})


def _histogram(x: Tensor, mask: Tensor) -> Tensor:
    scale = HISTOGRAM_BINS / (2.0 * HISTOGRAM_LIMIT)
    bins = ((x + HISTOGRAM_LIMIT) * scale).clamp(0, HISTOGRAM_BINS - 1).to(torch.int64)
    bins = torch.where(mask, bins, HISTOGRAM_BINS)
    return torch.bincount(bins.reshape(-1), minlength=HISTOGRAM_BINS + 1)[:HISTOGRAM_BINS]
