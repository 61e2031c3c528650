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
from klamp.exploration import exploration
from klamp.fold import Guarded, dropped, fold, weigh
from klamp.guards import Guard
from klamp.metrics import HISTOGRAM_BINS, HISTOGRAM_LIMIT, PROBABILITY_EDGES
from klamp.penalties import FPenalty, Penalty
from klamp.presets import parse
from klamp.radii import Adaptive
from klamp.spec import Spec
from klamp.stats import Stats, collect, weights
from klamp.survey import Moment, guards_of, judge, sample, signal
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

    def stats(self, batch: Batch, state: State | None = None) -> Stats:
        """What one micro-batch tells of the step; add it over the step (micro-batches, ranks, windows).

        Where ``spec.reads_new`` it depends on ``logp_new``, so it takes a forward pass before the one with gradients.
        """
        self.spec.require(batch.offers, "this batch", self.spec.step_needs)
        state = state or self.init()
        samples = sample(self.spec, batch, state)
        moment = Moment(Stats(torch.zeros(4), None, samples), state)  # dropping guards need no statistic
        kept = self._kept(batch, moment)
        return collect(self.spec.mean, batch, batch if kept is None else batch.restricted(kept), samples)

    def init(self) -> State:
        """The state before the first step: the step's number, radii that adapt, an adaptive penalty's beta."""
        state: State = {"beta": self._adaptive[0].beta} if self._adaptive else {}
        if self.spec.counts_steps:
            state["step"] = 0.0
        return state | {key: radius.start for key, radius in self._radii.items()}

    def update(self, state: State, stats: Stats, metrics: Tally) -> State:
        """The state after an optimizer step, from the metrics of the whole step, added over its micro-batches.

        Raises UserError where the metrics are not those of as many tokens as ``stats`` counted.
        """
        lacking = sorted(self.init().keys() - state.keys())
        if lacking:
            raise UserError(f"this state lacks {', '.join(lacking)}: it is another spec's; start from objective.init()")
        following = dict(state)
        if self.spec.counts_steps:
            following["step"] = state["step"] + 1.0
        if not self._adaptive and not self._radii:
            return following
        measured, counted = int(metrics.sums["batch/tokens_count"]), int(stats.counts[0])
        measured -= int(metrics.sums.get("guard/dropped_count", 0))
        if measured != counted:
            raise UserError(
                f"the step has {counted} tokens, these metrics are of {measured}: add out.metrics over all micro-batches"
            )
        divergence = metrics.mean("policy/kl_old_new_mean")
        if bool(metrics.sums["policy/overflow_count"]):
            divergence = math.inf
        removed = metrics.mean("guard/removed_active_share")
        for penalty in self._adaptive:
            if divergence is not None:
                following["beta"] = penalty.adapt(state["beta"], divergence)
        for key, radius in self._radii.items():
            observed = divergence if radius.kl is not None else removed
            if observed is not None:
                following[key] = radius.adapt(state[key], observed)
        return following

    @property
    def _adaptive(self) -> list[FPenalty]:
        return [p for p in self.spec.penalties if isinstance(p, FPenalty) and p.target is not None]

    @property
    def _radii(self) -> dict[str, Adaptive]:
        """The radii that adapt, by their place in the state."""
        sides = [(f"{key}.{side}", getattr(guard.region, f"radius_{side}", None)) for key, guard in guards_of(self.spec)
                 for side in ("low", "high")]  # fmt: skip
        return {key: radius for key, radius in sides if isinstance(radius, Adaptive)}

    def __call__(self, batch: Batch, stats: Stats | None = None, state: State | None = None) -> LossOutput:
        """The loss of ``batch`` within a step; ``stats=None`` means that this batch is the whole step.

        Raises UserError where the batch lacks what the spec needs, or a kept weight overflows (never clamped).
        """
        self.spec.require(batch.offers, "this batch")
        state = state or self.init()
        stats = self.stats(batch, state) if stats is None else stats
        moment = Moment(stats, state)
        x, advantages = batch.log_ratio("new/old"), signal(batch)
        mask, left = batch.mask, self._kept(batch, moment)
        self._check_step(stats, mask if left is None else left)
        weighed = weigh(self.spec, batch, advantages, x, moment)
        guarded = fold(self.spec, batch, advantages, x, weighed, moment)
        live = mask & (advantages != 0)
        kept = mask & guarded.keep
        weight = (
            weighed.weight if guarded.pull is None else torch.where(guarded.keep, 1.0, guarded.pull) * weighed.weight
        )
        moving = kept if guarded.pull is None else mask & (guarded.keep | (guarded.pull != 0))
        g = torch.where(moving & live, advantages * weight, 0.0)
        value = torch.where(guarded.keep, weighed.value, guarded.value)
        policy = torch.where(live, -advantages * value, 0.0)
        share = weights(self.spec.mean, batch if left is None else batch.restricted(left), stats, x.dtype)
        if left is not None:
            share = torch.where(left, share, 0.0)
        surrogate = -(g * share * torch.where(mask, batch.logp_new, 0.0)).sum()
        loss = (policy * share).sum() + (surrogate - surrogate.detach())
        penalty, slope = torch.zeros_like(policy), torch.zeros_like(policy)
        if self.spec.penalties:
            extra, penalty, slope = self._penalise(batch, advantages, share, moment)
            loss = loss + extra
        self._check_overflow(loss, g, policy + penalty)
        metrics = self._tally(batch, x, guarded, live, policy, penalty, weighed.weight)
        if self.diagnostics and batch.entropy is not None:
            metrics.means |= exploration(batch, x, advantages, kept, g)
        if left is not None:
            metrics.sums["guard/dropped_count"] = (mask & ~left).sum()
        inside = mask & ~(guarded.outside_low | guarded.outside_high)
        return LossOutput(loss, policy + penalty, g, slope, inside, kept, metrics)

    def _kept(self, batch: Batch, moment: Moment) -> Tensor | None:
        """The tokens that stay in the mean, where a guard drops some."""
        gone = dropped(self.spec, batch, signal(batch), moment)
        return None if gone is None else batch.mask & ~gone

    def _check_step(self, stats: Stats, mask: Tensor) -> None:
        """The stats, checked (on the CPU, where it costs no wait) to count at least this batch."""
        if stats.counts.device.type == "cpu" and int(mask.sum()) > int(stats.counts[0]):
            raise UserError(
                f"this batch has {int(mask.sum())} tokens, the stats of its step only {int(stats.counts[0])}: "
                "add objective.stats(b) over every micro-batch of the step"
            )

    def _penalise(
        self, batch: Batch, advantages: Tensor, share: Tensor, moment: Moment
    ) -> tuple[Tensor, Tensor, Tensor]:
        total = torch.zeros((), dtype=share.dtype, device=share.device)
        values = torch.zeros(batch.shape, dtype=share.dtype, device=share.device)
        slopes = torch.zeros_like(values)
        logp = torch.where(batch.mask, batch.logp_new, 0.0)
        for index, penalty in enumerate(self.spec.penalties):
            where = self._where(f"penalty {index}", penalty, batch, advantages, moment)
            value, slope = penalty.evaluate(batch, dict(moment.state))
            value = torch.where(where, value, 0.0)
            values = values + value.detach()
            if slope is None:
                total = total + (value * share).sum()
                continue
            slope = torch.where(where, slope, 0.0)
            slopes = slopes + slope
            carrier = (slope * share * logp).sum()
            total = total + (value * share).sum() + (carrier - carrier.detach())
        return total, values, slopes

    def _where(self, key: str, penalty: Penalty, batch: Batch, advantages: Tensor, moment: Moment) -> Tensor:
        """The tokens that a penalty is on: all unmasked ones, or those that its guard cuts."""
        guard: Guard | None = getattr(penalty, "on", None)
        return batch.mask if guard is None else batch.mask & judge(key, guard, batch, advantages, moment).cuts

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
        self, batch: Batch, x: Tensor, guarded: Guarded, live: Tensor, policy: Tensor, penalty: Tensor, weight: Tensor
    ) -> Tally:
        tokens = batch.mask.sum()
        active = live.sum()
        removed = guarded.removed_low | guarded.removed_high
        removed_low, removed_high = (guarded.removed_low & live).sum(), (guarded.removed_high & live).sum()
        means = {
            "policy/loss_mean": (policy.sum(), tokens),
            "guard/removed_low_share": (removed_low, tokens),
            "guard/removed_high_share": (removed_high, tokens),
            "guard/removed_active_share": (removed_low + removed_high, active),
            "guard/removed_positive_share": ((removed & live & (batch.advantages > 0)).sum(), tokens),
            "guard/removed_negative_share": ((removed & live & (batch.advantages < 0)).sum(), tokens),
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
        if not self.diagnostics and not self._adaptive and not self._radii:
            return Tally(means, sums)
        wide = x.double()
        k3 = wide.expm1() - wide
        overflow = (k3 == math.inf).sum()
        distance = torch.where(k3 < math.inf, k3, 0.0)
        means["policy/kl_old_new_mean"] = (distance.sum(), tokens - overflow)
        sums["policy/overflow_count"] = overflow
        if not self.diagnostics:
            return Tally(means, sums)
        means["policy/kl_old_new_sequence_mean"] = (distance.sum(), batch.sequence_count()[0])
        if batch.entropy is not None:
            means["policy/entropy_mean"] = (torch.where(batch.mask, batch.entropy.detach(), 0.0).sum(), tokens)
        if batch.logp_ref is not None:
            x_ref = batch.log_ratio("new/ref").double()
            k3_ref = (-x_ref).expm1() + x_ref
            far = (k3_ref == math.inf).sum()
            means["policy/kl_new_ref_mean"] = (torch.where(k3_ref < math.inf, k3_ref, 0.0).sum(), tokens - far)
            sums["policy/overflow_ref_count"] = far
        if any(not factor.plain or not factor.integrated for factor in self.spec.factors):
            plain = x.exp()
            differs = ((weight - plain).abs() > 1e-6 * plain) | ((plain == math.inf) & (weight != math.inf))
            means["factor/reweighted_share"] = ((differs & batch.mask & guarded.keep).sum(), tokens)
        sums["policy/ratio_histogram"] = _histogram(x, batch.mask)
        kinds = _by_probability(batch, guarded.removed_low & live, guarded.removed_high & live)
        sums["batch/probability_histogram"] = kinds.sum(0)
        sums["guard/removed_low_histogram"], sums["guard/removed_high_histogram"] = kinds[1], kinds[2]
        largest = torch.where(batch.mask, wide, -math.inf).amax() if x.numel() else wide.new_full((), -math.inf)
        return Tally(means, sums, {"policy/ratio_max": largest.exp()})


def _histogram(x: Tensor, mask: Tensor) -> Tensor:
    scale = HISTOGRAM_BINS / (2.0 * HISTOGRAM_LIMIT)
    bins = ((x + HISTOGRAM_LIMIT) * scale).clamp(0, HISTOGRAM_BINS - 1).to(torch.int64)
    bins = torch.where(mask, bins, HISTOGRAM_BINS)
    return torch.bincount(bins.reshape(-1), minlength=HISTOGRAM_BINS + 1)[:HISTOGRAM_BINS]


def _by_probability(batch: Batch, low: Tensor, high: Tensor) -> Tensor:
    """Counts [3, bins] of tokens that are not removed, removed low and removed high, by the old policy's probability."""
    logp, size = batch.logp_old.detach(), len(PROBABILITY_EDGES) - 1
    place = size * (low.to(torch.uint8) + 2 * high.to(torch.uint8))
    for edge in PROBABILITY_EDGES[1:-1]:  # a third of the time of bucketize
        place += logp > math.log(edge)
    place = torch.where(batch.mask, place, 3 * size)
    return torch.bincount(place.reshape(-1), minlength=3 * size + 1)[: 3 * size].reshape(3, size)
