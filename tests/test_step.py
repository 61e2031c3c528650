"""What a step is asked first: the same for any cut into micro-batches; and radii that move."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracles.batches import Fields, take
from running import close
from test_scopes import _fields

import klamp
from klamp.radii import Adaptive, Cosine, Linear, Scaled

ASKING = [
    "clip_cov(share=0.1, low=0.05, high=9.0)",
    "kl_cov(share=0.1)",
    "m2po(threshold=0.02)",
    "m2po(threshold=0.02, ratio='old/rollout', gate='always', over='kept')",
    "dapo() + tis(high=1.1, normalize=True)",
    "dapo() + tis(high=1.1, scope='geometric', normalize=True)",
    "grpo() + guard(region='nowhere', gate=entropy_below(quantile=0.8))",
    "real(tau=0.5)",
    "dapo() + rs_k3(radius=0.01)",
    "grpo() + rs_k2(radius=0.01, scope='sequence_max')",
    "dapo() + guard(ratio_low=0.9, ratio_high=1.1, gate='always', action='drop')",
    "trust_region('k3', 0.005, base=dapo(), scope='group')",
    "dapo() + guard(measure='k3', radius=0.02, scope='group', reduce='mean_after')",
    "dapo() + guard(measure='tv', radius=0.3, scope='group', reduce='max_after', ratio='old/rollout', gate='always')",
    "dapo() + factor(cap(high=1.5), ratio='old/rollout', scope='group')",
    "fipo()",
    "grpo(aggregate=prompt_sum())",
    "grpo(aggregate=token_sum())",
]  # fmt: skip


def run(spec: str, parts: list[Fields], per_micro: bool = False) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """(loss, gradient, metrics) of one step in micro-batches; ``per_micro``: statistics of each alone, as others do."""
    objective = klamp.Objective(spec)
    state = objective.init()
    news = [part["logp_new"].clone().requires_grad_(True) for part in parts]
    batches = [klamp.Batch(**{**part, "logp_new": new}) for part, new in zip(parts, news, strict=True)]
    every = [objective.stats(batch, state) for batch in batches]
    total = sum(every)
    loss, metrics = torch.zeros((), dtype=torch.float64), 0
    for batch, own in zip(batches, every, strict=True):
        stats = klamp.Stats(total.counts, total.group_tokens, own.samples) if per_micro else total
        out = objective(batch, stats, state)
        loss, metrics = loss + out.loss, metrics + out.metrics
    return loss.detach(), torch.cat(torch.autograd.grad(loss, news)), metrics


@pytest.mark.parametrize("spec", ASKING)
def test_any_cut_of_a_step_is_the_same_step(spec: str) -> None:
    for seed in range(4):
        fields = _fields(seed, rows=16, tokens=7)
        loss, gradient, metrics = run(spec, [fields])
        assert float(gradient.norm()) > 0.0
        for size in (8, 4, 2, 1):
            parts = [take(fields, slice(i, i + size)) for i in range(0, 16, size)]
            again, other, summed = run(spec, parts)
            close(again, loss, atol=1e-13)
            assert float((other - gradient).norm()) <= 1e-12 * float(gradient.norm())
            for name, value in metrics.show().items():
                assert summed.show()[name] == (
                    value if value is None else pytest.approx(value, rel=1e-12, abs=1e-15)
                ), name


@pytest.mark.parametrize("spec", ASKING[:7])
def test_statistics_of_each_micro_batch_alone_are_another_gradient(spec: str) -> None:
    """What the step's statistics are for: taken per micro-batch, as elsewhere, the gradient depends on the cut."""
    fields = _fields(1, rows=16, tokens=7)
    _, gradient, _ = run(spec, [fields])
    _, other, _ = run(spec, [take(fields, slice(i, i + 2)) for i in range(0, 16, 2)], per_micro=True)
    assert float((other - gradient).norm()) > 1e-3 * float(gradient.norm())


def test_a_budget_that_does_not_bind_cuts_nothing() -> None:
    fields = _fields(2)
    assert torch.equal(run("m2po(threshold=1e9)", [fields])[1], run("factor() + token_mean()", [fields])[1])
    _, gradient, metrics = run("m2po(threshold=0.0)", [fields])
    batch = klamp.Batch(**fields)
    x, a = batch.log_ratio("new/old"), batch.advantages
    outward = batch.mask & ((a > 0) & (x > 0) | (a < 0) & (x < 0))
    assert bool((gradient[outward] == 0.0).all())
    removed = metrics.sums["batch/tokens_count"] * metrics.show()["guard/removed_active_share"]
    assert removed > 0


def test_a_dropped_token_leaves_the_denominator() -> None:
    """Two responses of two tokens; one token of the second is far from the sampler."""
    mask = torch.ones(2, 2, dtype=torch.bool)
    new = torch.full((2, 2), -1.0, dtype=torch.float64)
    rollout = new.clone()
    rollout[1, 1] = -5.0
    fields: Fields = {"logp_new": new, "logp_old": new, "logp_rollout": rollout, "mask": mask,
                      "advantages": torch.tensor([1.0, 1.0], dtype=torch.float64), "row": torch.arange(2)}  # fmt: skip
    kept = [[-0.5, -0.5], [-1.0, 0.0]]
    for spec, wanted in {
        "reinforce() + guard(measure='k3', radius=0.1, ratio='old/rollout', gate='always', cut_value='zero')":
            torch.tensor([[-0.25, -0.25], [-0.25, 0.0]]),
        "reinforce() + rs_k3(radius=0.1)": torch.tensor([[-1.0, -1.0], [-1.0, 0.0]]).double() / 3.0,
        "reinforce(aggregate=sequence_mean()) + rs_k3(radius=0.1)": torch.tensor(kept) / 2.0,
        "reinforce() + rs_k3(radius=0.1, scope='sequence_max')": torch.tensor([[-0.5, -0.5], [0.0, 0.0]]),
        "reinforce(aggregate=sequence_mean(rows=all)) + rs_k3(radius=0.1, scope='sequence_mean')":
            torch.tensor([[-0.5, -0.5], [0.0, 0.0]]),
    }.items():  # fmt: skip
        _, gradient, _ = run(spec, [fields])
        close(gradient, wanted.double())
    _, _, metrics = run("reinforce() + rs_k3(radius=0.1)", [fields])
    assert metrics.show()["guard/dropped_count"] == 1


def test_stats_must_be_asked_with_what_they_need() -> None:
    fields = _fields(0)
    plain = klamp.Batch(**{name: fields[name] for name in ("logp_new", "logp_old", "advantages", "mask")})
    with pytest.raises(klamp.UserError, match=r"needs row .*covariance_window"):
        klamp.Objective("clip_cov()").stats(plain)
    stats = klamp.Objective("clip_cov()").stats(klamp.Batch(**fields))
    with pytest.raises(klamp.UserError, match="gather="):
        stats.all_reduce(lambda value: value, lambda value: value)


# --- radii that move ------------------------------------------------------------------------------------------


def test_schedules() -> None:
    line, wave = Linear(0.04, 0.01, 30), Cosine(0.04, 0.01, 30)
    assert [line.at(s) for s in (0, 10, 30, 99)] == pytest.approx([0.04, 0.03, 0.01, 0.01], rel=1e-15)
    assert [wave.at(s) for s in (0, 10, 15, 30, 99)] == pytest.approx([0.04, 0.0325, 0.025, 0.01, 0.01], rel=1e-14)


def test_a_scheduled_region_is_the_region_of_its_step() -> None:
    fields = _fields(0)
    objective = klamp.Objective("atr_grpo(delta=linear(0.04, 0.01, steps=3))")
    state = objective.init()
    assert state == {"step": 0.0}
    for step, radius in enumerate((0.04, 0.03, 0.02, 0.01, 0.01)):
        batch = klamp.Batch(**fields)
        fixed = klamp.Objective(f"atr_grpo(delta={radius!r})")(batch)
        out = objective(batch, None, state)
        assert torch.equal(out.kept, fixed.kept), step
        close(out.loss, fixed.loss)
        state = objective.update(state, objective.stats(batch, state), out.metrics)
    assert state == {"step": 5.0}


def test_an_adaptive_radius() -> None:
    removed = Adaptive(0.02, removed=0.01, rate=0.5, low=0.015, high=0.03)
    assert removed.adapt(0.02, 0.01) == 0.02
    assert removed.adapt(0.02, 0.015) == pytest.approx(0.02 * math.exp(0.25), rel=1e-15)
    assert removed.adapt(0.02, 1.0) == 0.03
    assert removed.adapt(0.02, 0.0) == 0.015
    kl = Adaptive(0.02, kl=0.001, rate=0.1)
    assert kl.adapt(0.02, 0.0015) == pytest.approx(0.02 * math.exp(-0.05), rel=1e-15)
    assert kl.adapt(0.02, math.inf) == pytest.approx(0.02 * math.exp(-0.1), rel=1e-15)
    objective = klamp.Objective(
        "trust_region('k3', radius_low=0.02, radius_high=adaptive(0.02, kl=1e-9))", diagnostics=False
    )
    batch = klamp.Batch(**_fields(0))
    state = objective.init()
    after = objective.update(state, objective.stats(batch, state), objective(batch, None, state).metrics)
    assert state == {"guard 0.high": 0.02}
    assert after == {"guard 0.high": pytest.approx(0.02 * math.exp(-0.1))}


def test_a_radius_of_each_token() -> None:
    fields = _fields(5)
    batch = klamp.Batch(**fields)
    x, a, mask = batch.log_ratio("new/old"), batch.advantages, batch.mask
    k3 = x.exp() - 1.0 - x
    outward = (a > 0) & (x > 0) | (a < 0) & (x < 0)
    surprise = {"probability": 0.01 * torch.exp(-batch.logp_old), "entropy": 0.01 * torch.exp(-0.5 * fields["entropy"])}
    for by, exponent in (("probability", 1.0), ("entropy", -0.5)):
        spec = f"trust_region('k3', scaled(0.01, by='{by}', exponent={exponent}))"
        out = klamp.Objective(spec)(batch)
        assert torch.equal(out.kept, mask & ~(outward & (k3 > surprise[by])))
        assert klamp.parse(str(klamp.parse(spec))) == klamp.parse(spec)
    assert Scaled(0.02).needs == frozenset()
    assert klamp.parse("trust_region('k3', scaled(0.02, by='entropy'))").needs == {"entropy"}


def test_beta_by_dual_ascent() -> None:
    objective = klamp.Objective("factor() + f_penalty(beta=0.5, target=0.01, rate=10.0) + token_mean()")
    batch = klamp.Batch(**_fields(0))
    state = objective.init()
    out = objective(batch, None, state)
    kl = out.metrics.show()["policy/kl_old_new_mean"]
    after = objective.update(state, objective.stats(batch, state), out.metrics)
    assert after == {"beta": pytest.approx(0.5 + 10.0 * (kl - 0.01))}


REFUSED = {
    "atr_grpo(delta=linear(0.04, 0.01))": "steps",
    "atr_grpo(delta=linear(0.04, -0.01, 3))": "end=-0.01 must be",
    "atr_grpo(delta=adaptive(0.02))": "one target",
    "atr_grpo(delta=adaptive(0.02, removed=0.1, kl=0.1))": "one target",
    "atr_grpo(delta=adaptive(0.02, kl=0.1, low=0.03))": "low <= start <= high",
    "atr_grpo(delta=scaled(0.02, by='entrpy'))": "did you mean 'entropy'",
    "grpo(epsilon=linear(0.2, 0.1, 9))": "a radius that moves belongs to a measure",
    "guard(measure='k3', radius=0.1, scope='sequence', reduce='max')": "did you mean 'max_after'",
    "guard(measure='binary_tv', radius=0.1, scope='sequence')": "reduce='mean_after' takes the mean of D",
    "guard(ratio_high=1.2, scope='sequence', reduce='mean_after')": "give the guard a measure and a radius",
    "guard(measure='binary_tv', radius=0.1, cut_value='bound')": "cut_value='bound' needs an interval",
    "guard(measure='binary_kl', radius=0.1)": "did you mean 'binary_kl_",
    "guard(measure='k2', budget=-1)": "budget=-1 must be",
    "guard(measure='k2', budget=0.1, radius=0.1)": "a budget needs a measure and no radius",
    "guard(measure='binary_tv', budget=0.1)": "a budget is over a measure of the ratio",
    "guard(region='here')": "region='nowhere'",
    "guard(measure='k2', budget=0.1, action='drop')": "changes the counts",
    "guard(ratio_high=1.2, action='rollback')": "needs strength= above 0",
    "guard(ratio_high=1.2, strength=0.3)": "belongs to action='rollback'",
    "guard(ratio_high=1.2, discount=0.5)": "discount= weighs",
    "guard(ratio_high=1.2, gate=ring)": "ring",
    "guard(ratio_high=1.2, gate='covariance_top')": "write it as a call without quotes",
    "guard(ratio_high=1.2, gate=ring(low=1.5, high=2))": "must satisfy",
    "guard(ratio_high=1.2, gate=likely(low=2))": "low=2 must be between 0 and 1",
    "guard(ratio_high=1.2, gate=covariance_window(low=5, high=1))": "is empty",
    "guard(ratio_high=1.2, gate=covariance_window(unless=3))": "must be a fixed guard",
    "factor(by_sign(positive=identity))": "detached weight",
    "factor(normalized(contrast))": "takes a transform such as cap",
    "factor(scope='sequence', clipped=3)": "must be True or False",
    "factor(clipped=True)": "wider than a token",
    "f_penalty(rate=0.1)": "give target= too",
    "f_penalty(on=3)": "must be a guard",
    "kl_reference(gradient='k9')": "did you mean 'k",
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refusals(text: str) -> None:
    with pytest.raises(klamp.UserError, match=REFUSED[text].replace("(", r"\(")):
        klamp.parse(text)


def test_a_spec_that_needs_the_vocabulary_is_refused_by_who_cannot_offer_it() -> None:
    spec = klamp.parse("trust_region('exact_kl_old_new', 0.02)")
    assert spec.needs == {"divergences[exact_kl_old_new]"}
    batch = klamp.Batch(**_fields(0))
    with pytest.raises(klamp.UserError, match=r"needs divergences\[exact_kl_old_new\] .*this batch does not offer"):
        klamp.Objective(spec)(batch)
    distance = torch.rand(batch.shape, dtype=torch.float64) * 0.04
    given = klamp.Batch(**_fields(0), divergences={"exact_kl_old_new": distance})
    out = klamp.Objective(spec)(given)
    x, a = batch.log_ratio("new/old"), batch.advantages
    outward = (a > 0) & (x > 0) | (a < 0) & (x < 0)
    assert torch.equal(out.kept, batch.mask & ~(outward & (distance > 0.02)))
