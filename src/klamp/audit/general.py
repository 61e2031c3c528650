"""Verdicts of any spec, by the objective's own parts on batches of whole responses; loads torch when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from klamp.audit.tokens import Array, Tokens
from klamp.audit.verdicts import Verdict
from klamp.spec import Spec

if TYPE_CHECKING:
    from klamp.batch import Batch

TOKENS = 1 << 17  # of one batch with its padding, about


@dataclass(frozen=True)
class Judged:
    """A verdict on every unmasked token [n], and the coefficients of d J / d log pi_new: ``g``, and ``u`` without the guards."""

    verdict: Verdict
    g: Array
    u: Array
    overflows: int = 0


def judged(spec: Spec, tokens: Tokens, step: int) -> Judged:
    """The verdict of a spec on the responses of one optimizer step; all of them where it asks for statistics of the step."""
    from klamp.objective import Objective
    from klamp.survey import Moment

    alone = Spec(spec.guards, spec.factors)  # neither the mean nor the penalties have a say
    objective = Objective(alone, diagnostics=False)
    state = objective.init() | ({"step": float(step)} if alone.counts_steps else {})
    batches = [_batch(part, alone) for part in _padded(tokens)]
    stats: Any = sum(objective.stats(batch, state) for batch in batches)
    return _joined([_of_batch(alone, batch, Moment(stats, state)) for batch in batches])


def _padded(tokens: Tokens) -> Sequence[Tokens]:
    """Parts in which padding to the longest response stays below the limit."""
    parts, start = [], 0
    while start < tokens.responses:
        widths = np.maximum.accumulate(tokens.lengths[start : start + 4096])
        fits = int((widths * np.arange(1, len(widths) + 1) <= TOKENS).sum())
        parts.append(tokens.part(start, start + max(fits, 1)))
        start += max(fits, 1)
    return parts


def _batch(tokens: Tokens, spec: Spec) -> Batch:
    """Responses as a padded batch, in the precision in which they were recorded."""
    import torch

    from klamp.batch import Batch, segments

    rows, width = tokens.responses, int(tokens.lengths.max(initial=0))
    place = np.arange(width) < tokens.lengths[:, None]

    def padded(values: Array | None, fill: Any = 0.0) -> Any:
        if values is None:
            return None
        full = np.full((rows, width), fill, values.dtype)
        full[place] = values
        return torch.from_numpy(full)

    mask = padded(tokens.mask, False)
    group = None
    if tokens.group is not None:
        group = torch.from_numpy(np.unique(tokens.group, return_inverse=True)[1].astype(np.int64))
    rollout = tokens.logp_rollout if "logp_rollout" in spec.needs else None
    return Batch(
        padded(tokens.logp_new), padded(tokens.logp_old), padded(tokens.advantage), mask, logp_rollout=padded(rollout),
        logp_ref=padded(tokens.logp_ref), entropy=padded(tokens.entropy), group=group, row=torch.from_numpy(np.array(tokens.row)),
        segment=segments(mask) if "segment" in spec.needs else None,
        reward=None if tokens.reward is None else torch.from_numpy(np.array(tokens.reward)),
    )  # fmt: skip


def _of_batch(spec: Spec, batch: Batch, moment: Any) -> Judged:
    import torch

    from klamp.fold import fold, weigh
    from klamp.survey import signal

    x, advantages = batch.log_ratio("new/old"), signal(batch)
    weighed = weigh(spec, batch, advantages, x, moment)
    guarded = fold(spec, batch, advantages, x, weighed, moment)
    weight = weighed.weight
    finite = torch.isfinite(weight)
    # As in the objective: exactly 0 where A = 0, whatever the weight.
    u = torch.where((advantages != 0) & finite, advantages * weight, 0.0).expand(batch.shape)
    g = torch.where(guarded.keep, u, 0.0 if guarded.pull is None else guarded.pull * u)
    live = advantages.expand(batch.shape) != 0
    mask = batch.mask
    sides = (guarded.outside_low, guarded.outside_high, guarded.removed_low & live, guarded.removed_high & live)
    flags = [one[mask].numpy() for one in sides]
    overflows = int(((~finite).expand(batch.shape) & mask & guarded.keep & live).sum())
    return Judged(Verdict(*flags), g[mask].double().numpy(), u[mask].double().numpy(), overflows)


def _joined(parts: list[Judged]) -> Judged:
    names = ("outside_low", "outside_high", "removed_low", "removed_high")
    verdict = Verdict(*(np.concatenate([getattr(part.verdict, name) for part in parts]) for name in names))
    g, u = (np.concatenate([getattr(part, name) for part in parts]) for name in ("g", "u"))
    return Judged(verdict, g, u, sum(part.overflows for part in parts))
