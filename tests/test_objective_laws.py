"""Laws of the objective on masks, order and width, and on how a step may be cut."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles.batches import random_fields, take
from oracles.written import SPECS
from running import close, run

import klamp

INF, NAN = math.inf, math.nan

# --- laws on masks, order, width ------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_law_2_masked_positions_change_no_bit(spec: str) -> None:
    fields = random_fields(5, per_token=True)
    clean = {n: v.clone() for n, v in fields.items()}
    for value in clean.values():
        if value.is_floating_point():
            value[~fields["mask"]] = -1.0
    wanted, grad, grad_entropy = run(spec, clean)
    for rubbish in (NAN, INF, -INF, 1e10, -1e10):
        dirty = {n: v.clone() for n, v in clean.items()}
        for value in dirty.values():
            if value.is_floating_point():
                value[~fields["mask"]] = rubbish
        out, dirty_grad, dirty_entropy = run(spec, dirty)
        assert torch.equal(out.loss, wanted.loss)
        assert torch.equal(dirty_grad, grad)
        assert torch.equal(dirty_entropy, grad_entropy)
        assert out.metrics.show() == wanted.metrics.show()
        for name in ("per_token", "grad_policy", "grad_penalty", "inside", "kept"):
            assert torch.equal(getattr(out, name), getattr(wanted, name))


@pytest.mark.parametrize("spec", SPECS)
def test_law_5_order_and_width(spec: str) -> None:
    fields = random_fields(6, per_token=True)
    wanted, grad, _ = run(spec, fields)
    order = torch.tensor([3, 0, 4, 2, 1])
    out, shuffled, _ = run(spec, take(fields, order))
    close(out.loss, wanted.loss)
    close(shuffled, grad[order])
    for side in ((0, 3), (2, 0)):
        wider = {n: v if v.ndim == 1 else torch.nn.functional.pad(v, side) for n, v in fields.items()}
        out, padded, _ = run(spec, wider)
        close(out.loss, wanted.loss)
        close(padded[:, side[0] : side[0] + grad.shape[1]], grad)
        assert out.metrics.sums["batch/tokens_count"] == wanted.metrics.sums["batch/tokens_count"]


@pytest.mark.parametrize("spec", SPECS)
def test_law_1_on_policy_is_the_plain_gradient(spec: str) -> None:
    fields = random_fields(7, per_token=True)
    fields["logp_new"] = fields["logp_rollout"] = fields["logp_old"]
    out, _, _ = run(spec, fields)
    advantages = torch.where(fields["mask"], fields["advantages"], 0.0)
    close(out.grad_policy, advantages)
    assert (out.kept == fields["mask"]).all()


@pytest.mark.parametrize("spec", SPECS)
def test_law_6_zero_advantage_has_zero_gradient(spec: str) -> None:
    fields = random_fields(8, spread=2.0)
    fields["advantages"] = torch.zeros_like(fields["advantages"])
    out, _, _ = run(spec, fields)
    assert (out.grad_policy == 0.0).all()
    shown = out.metrics.show()
    for side in ("low", "high"):
        assert shown[f"guard/removed_{side}_share"] == 0.0
    assert shown["guard/removed_active_share"] is None
    assert shown["batch/zero_advantage_share"] == 1.0
    if "penalty" not in spec:
        assert out.loss.item() == 0.0


@pytest.mark.parametrize("text", ["trust_region('k3', {})", "trust_region('js', {}, scope='sequence', base=gspo())",
                                  "guard(measure='k3', radius={}, gate='always', cut_value='zero') + factor()"])  # fmt: skip
def test_law_7_a_larger_radius_keeps_a_superset(text: str) -> None:
    fields = random_fields(9, rows=40, spread=0.6)
    kept = [run(text.format(radius), fields)[0].kept for radius in (0.0, 1e-4, 0.01, 0.1, 0.5, 3.0, "inf")]
    for smaller, larger in itertools.pairwise(kept):
        assert (larger | ~smaller).all()
    assert kept[1].sum() < kept[3].sum() < kept[6].sum()
    assert (kept[6] == fields["mask"]).all()
    out, grad, _ = run(text.format("inf"), fields)
    spec = klamp.parse(text.format("inf"))
    free, free_grad, _ = run(dataclasses.replace(spec, guards=()), fields)
    close(out.loss, free.loss)
    close(grad, free_grad)


def test_theorem_2_clip_and_directional_mask_have_one_gradient() -> None:
    fields = random_fields(10, rows=30, per_token=True)
    clip, clip_grad, _ = run("trust_region('k3', 0.02)", fields)
    mask = "guard(measure='k3', radius=0.02, cut_value='zero') + factor() + sequence_mean()"
    masked, mask_grad, _ = run(mask, fields)
    assert torch.equal(clip_grad, mask_grad)
    assert not torch.equal(clip.loss, masked.loss)


# --- cutting a step -------------------------------------------------------------------------------------------

CUTS = [[5, 4, 3], [1] * 12, [12], [2, 9, 1], [6, 6]]
STEP_AGGREGATES = [
    "token_mean()",
    "sequence_mean()",
    "sequence_mean(rows='all')",
    "sequence_sum(divisor=5)",
    "prompt_mean()",
]
STEP_SPECS = ["atr_grpo(aggregate={})", "gspo(epsilon_low=0.05, epsilon_high=0.1, aggregate={})", "cispo_absolute(high=1.2, aggregate={})",
              "dual_clip(c=1.5, base=grpo(aggregate={})) + sequence_mask(high=1.4) + kl_reference(beta=0.1)"]  # fmt: skip


@pytest.mark.parametrize("aggregate", STEP_AGGREGATES)
@pytest.mark.parametrize("text", STEP_SPECS)
def test_law_4_any_cut_of_a_step_is_the_step(text: str, aggregate: str) -> None:
    spec = klamp.parse(text.format(aggregate))
    fields = random_fields(12, rows=12, per_token=True)
    fields["group"] = torch.tensor([5, 0, 0, 2, 2, 5, 7, 7, 7, 0, 2, 5])  # groups are split by the cuts
    fields["logp_rollout"][7, 0] = NAN  # a row that is excluded and counted
    fields["mask"][7, 0] = True
    whole, grad, _ = run(spec, fields)
    shown = whole.metrics.show()
    assert shown["batch/missing_rows_count"] == 1
    step = klamp.Objective(spec)
    for sizes in CUTS:
        parts = [take(fields, index) for index in torch.arange(12).split(sizes)]
        stats = sum(step.stats(klamp.Batch(**part)) for part in parts)
        outs = [run(spec, part, stats) for part in parts]
        close(sum(out.loss for out, _, _ in outs), whole.loss.detach())
        close(torch.cat([g for _, g, _ in outs]), grad)
        total = sum(out.metrics for out, _, _ in outs).show()
        assert set(total) == set(shown)
        for name, value in shown.items():
            assert total[name] == (
                value if value is None or isinstance(value, list) else pytest.approx(value, rel=1e-12, abs=1e-15)
            ), name


def test_averages_of_averages_would_differ() -> None:
    """The guard of the test above: windows with unequal counts, where a mean of means is wrong."""
    fields = random_fields(12, rows=12)
    parts = [take(fields, index) for index in torch.arange(12).split([2, 9, 1])]
    for aggregate in STEP_AGGREGATES:
        whole = run(f"grpo(aggregate={aggregate})", fields)[0].loss
        mean = sum(run(f"grpo(aggregate={aggregate})", part)[0].loss for part in parts) / 3
        assert (whole - mean).abs().item() > 1e-3


class World:
    """Two ranks as two threads with an all-reduce between them."""

    def __init__(self, ranks: int) -> None:
        self.slots: list[Any] = [None] * ranks
        self.barrier = threading.Barrier(ranks)

    def reducer(
        self, rank: int, combine: Callable[[torch.Tensor], torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        def reduce(value: torch.Tensor) -> torch.Tensor:
            self.slots[rank] = value
            self.barrier.wait()
            assert len({tuple(v.shape) for v in self.slots}) == 1, "ranks disagree on a shape"
            found = combine(torch.stack(self.slots))
            self.barrier.wait()
            return found

        return reduce

    def run(self, work: Callable[[int, Any, Any], Any]) -> list[Any]:
        found: list[Any] = [None] * len(self.slots)

        def one(rank: int) -> None:
            total = self.reducer(rank, lambda v: v.sum(0))
            found[rank] = work(rank, total, self.reducer(rank, lambda v: v.amax(0)))

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(len(found))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return found


@pytest.mark.parametrize("aggregate", STEP_AGGREGATES)
def test_law_4_over_ranks(aggregate: str) -> None:
    spec = f"atr_grpo(aggregate={aggregate})"
    fields = random_fields(13, rows=8)
    fields["group"] = torch.tensor([0, 0, 1, 1, 1, 4, 4, 0])  # the ranks' tables of groups have unequal lengths
    whole, grad, _ = run(spec, fields)
    parts, step = [take(fields, slice(0, 5)), take(fields, slice(5, 8))], klamp.Objective(spec)

    def work(rank: int, total: Any, largest: Any) -> Any:
        stats = step.stats(klamp.Batch(**parts[rank])).all_reduce(total, largest)
        out, own, _ = run(spec, parts[rank], stats)
        return out.loss.detach(), own, out.metrics.all_reduce(total, largest).show()

    one, two = World(2).run(work)
    close(one[0] + two[0], whole.loss.detach())
    close(torch.cat([one[1], two[1]]), grad)
    assert one[2] == two[2]
    for name, value in whole.metrics.show().items():
        assert one[2][name] == (
            value if value is None or isinstance(value, list) else pytest.approx(value, rel=1e-12)
        ), name
