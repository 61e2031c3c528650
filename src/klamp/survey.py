"""Survey: what the parts of a spec must know of the whole step, and the parts once it is known.

Each part that selects by a statistic (a quantile, a budget, a covariance, a group's log-sum-exp) samples every
micro-batch of the step first; the samples travel in ``Stats`` and are settled once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klamp.batch import Batch
from klamp.conditions import Budget
from klamp.factors import Factor
from klamp.gates import PlainGate, SelectingGate
from klamp.guards import Guard, Settled, Verdict
from klamp.spec import Spec
from klamp.stats import Stats
from klamp.transforms import StepTransform, Transform

State = Mapping[str, float]


@dataclass(frozen=True)
class Moment:
    """Where a loss is computed: the statistics of its step and the objective's state."""

    stats: Stats
    state: State = field(default_factory=dict)

    @property
    def step(self) -> int:
        return int(self.state.get("step", 0.0))


def guards_of(spec: Spec) -> list[tuple[str, Guard]]:
    """Every guard with its key: the policy's, and those that select where a penalty acts."""
    found = [(f"guard {index}", guard) for index, guard in enumerate(spec.guards)]
    extra = [(f"penalty {index}", getattr(part, "on", None)) for index, part in enumerate(spec.penalties)]
    return found + [(key, guard) for key, guard in extra if guard is not None]


class Question(NamedTuple):
    """One statistic of the step: what a batch is asked for, and how the samples are settled."""

    key: str
    take: Callable[[Batch], Tensor]
    settle: Callable[[Tensor], Tensor]


def sample(spec: Spec, batch: Batch, state: State) -> dict[str, Tensor]:
    """What every part reads of this batch, by key."""
    return {question.key: question.take(batch) for question in _questions(spec, state)}


def _questions(spec: Spec, state: State) -> Iterator[Question]:
    for key, guard in guards_of(spec):
        yield from _of_guard(key, guard, int(state.get("step", 0.0)))
    for index, factor in enumerate(spec.factors):
        if factor.scope == "group":
            take = partial(_of_groups, factor)
            yield Question(f"factor {index} group", take, _join_groups(factor))
        if isinstance(factor.transform, StepTransform):
            yield Question(f"factor {index}", partial(_of_factor, factor, factor.transform), factor.transform.settle)


def _of_guard(key: str, guard: Guard, step: int) -> Iterator[Question]:
    gate, region = guard.gate, guard.region
    if guard.scope == "group":
        yield Question(f"{key} group", partial(_of_groups, guard), _join_groups(guard))
    if isinstance(gate, SelectingGate):
        yield Question(f"{key} gate", partial(_of_gate, guard, gate, step), gate.settle)
    if isinstance(region, Budget):
        yield Question(f"{key} region", partial(_of_budget, guard, region), region.settle)


def signal(batch: Batch) -> Tensor:
    """The advantages in the precision of the log-ratios."""
    return batch.advantages.to(batch.log_ratio("new/old").dtype)


def _of_gate(guard: Guard, gate: SelectingGate, step: int, batch: Batch) -> Tensor:
    return gate.collect(guard.measured(batch), signal(batch), batch, step)


def _of_budget(guard: Guard, region: Budget, batch: Batch) -> Tensor:
    assert isinstance(guard.gate, PlainGate)
    x = guard.measured(batch)
    return region.collect(x, guard.gate.predicate(x, signal(batch), batch), batch)


def _of_factor(factor: Factor, transform: StepTransform, batch: Batch) -> Tensor:
    where = batch.first if factor.scope == "sequence" else batch.mask
    return transform.collect(batch.log_ratio(*factor.of), signal(batch), batch, where)


# --- settled parts --------------------------------------------------------------------------------------------


def judge(key: str, guard: Guard, batch: Batch, advantages: Tensor, moment: Moment) -> Verdict:
    """The verdict of a guard, with the state's radius and the step's statistics."""
    region: Any = guard.region.now(dict(moment.state), key)
    gate, own = guard.gate, None
    if guard.scope == "group":
        own = _in_groups(batch, moment.stats.settled(f"{key} group", _join_groups(guard)))
    if isinstance(gate, SelectingGate):
        gate = gate.given(moment.stats.settled(f"{key} gate", gate.settle), moment.step)
    if isinstance(region, Budget):
        region = region.given(moment.stats.settled(f"{key} region", region.settle))
    return guard.judge(advantages, batch, Settled(region, gate, own))


def ratio_of(key: str, factor: Factor, batch: Batch, moment: Moment) -> Tensor:
    """The log-ratio of a factor over its scope."""
    if factor.scope != "group":
        return batch.log_ratio(*factor.of)
    return _in_groups(batch, moment.stats.settled(f"{key} group", _join_groups(factor)))


def transform_of(key: str, factor: Factor, batch: Batch, moment: Moment) -> Transform:
    """The transform of a factor, its statistic known."""
    transform = factor.transform
    if isinstance(transform, StepTransform):
        return transform.given(moment.stats.settled(key, transform.settle), batch)
    return transform


# --- groups, which may lie in several micro-batches -----------------------------------------------------------


def _of_groups(part: Guard | Factor, batch: Batch) -> Tensor:
    """(group, sum or maximum of the log-ratios or divergences, tokens) of each group of this batch, [groups, 3]."""
    assert batch.group is not None
    values = part.distances(batch) if isinstance(part, Guard) and part.after else batch.log_ratio(part.ratio)
    group = batch.group.unsqueeze(1).expand(batch.shape)[batch.mask].double()
    ids, index = torch.unique(group, return_inverse=True)
    own = values.double().expand(batch.shape)[batch.mask]
    most = part.reduce == "max_after"
    start = torch.full_like(ids, -torch.inf) if most else torch.zeros_like(ids)
    total = start.scatter_reduce(0, index, own, "amax" if most else "sum")
    return torch.stack([ids, total, torch.zeros_like(ids).index_add(0, index, torch.ones_like(own))], dim=-1)


def _join_groups(part: Guard | Factor) -> Callable[[Tensor], Tensor]:
    """(group, reduced value) from the samples of the whole step, [groups, 2], by group id."""

    def join(samples: Tensor) -> Tensor:
        ids, index = torch.unique(samples[:, 0], return_inverse=True)
        if part.reduce == "max_after":
            top = torch.full_like(ids, -torch.inf).scatter_reduce(0, index, samples[:, 1], "amax")
            return torch.stack([ids, top], dim=-1)
        total = torch.zeros_like(ids).index_add(0, index, samples[:, 1])
        count = torch.zeros_like(ids).index_add(0, index, samples[:, 2])
        return torch.stack([ids, total / count if part.reduce.startswith("mean") else total], dim=-1)

    return join


def _in_groups(batch: Batch, table: Tensor) -> Tensor:
    """The value of each row's group, [B, 1]; 0 for a group without tokens."""
    assert batch.group is not None
    ids = batch.group.double()
    if not table.shape[0]:
        return torch.zeros((ids.numel(), 1), dtype=torch.float64, device=ids.device)
    at = torch.searchsorted(table[:, 0].contiguous(), ids).clamp(max=table.shape[0] - 1)
    found = torch.where(table[at, 0] == ids, table[at, 1], 0.0).unsqueeze(1)
    return found.to(batch.log_ratio("new/old").dtype)
