"""What users of other frameworks reported: their smallest inputs, and the page that says which law or test answers each.

The numbers of test_reports.py are not repeated here; docs/reports.md names both.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.batches import take
from test_reports import ratios, step

import klamp
from klamp.advantages import estimator

F32, F64 = torch.float32, torch.float64
INF, NAN = math.inf, math.nan


def shown(spec: str, new: Any, old: Any, advantages: Any, mask: Any = None, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = step(spec, new, old, advantages, mask, **more)[0].metrics.show()
    return found


# --- overflow, NaN, masks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", ["grpo()", "gspo()", "cispo()", "sapo()", "reinforce() + f_penalty() + kl_reference()"]
)
@pytest.mark.parametrize("bad", [(0.0, -200.0), (0.0, 1.0), (-1e10, 0.0), (0.0, -1e10), (INF, NAN), (-INF, 5.0)])
def test_what_lies_in_padding_reaches_nothing(spec: str, bad: tuple[float, float]) -> None:
    """Log-ratios of 200 or 1e10, other fill values per engine, in one masked position: not one bit changes."""
    found = []
    for new, old in ((0.0, 0.0), bad):
        rows = [[-1.0, -0.9, new]], [[-1.0, -1.0, old]]
        more = {"logp_ref": torch.tensor([[-1.0, -1.1, old]]), "entropy": torch.tensor([[0.3, 0.2, new]])}
        out, grad = step(spec, *rows, [[1.0, 1.0, old]], [[1, 1, 0]], F32, **more)
        found.append((out.loss.item(), out.per_token.tolist(), grad.tolist(), out.metrics.show()))
    assert found[0] == found[1]
    assert found[0][2][0][2] == 0.0


def test_a_cut_is_a_selection_not_a_product() -> None:
    """A stale log-prob of -100: found by the region, and 0 times its ratio would be NaN."""
    spec = "guard(ratio_low=0.5, ratio_high=5.0, gate='always', cut_value='zero') + factor()"
    out, grad = step(spec, [[-1.0, -1.0]], [[-100.0, -1.0]], [1.0], dtype=F32)
    assert out.per_token.tolist() == [[0.0, -1.0]]
    assert grad.tolist() == [[0.0, -0.5]]


def test_a_rare_tokens_ratio_is_raised_or_capped_and_counted() -> None:
    with pytest.raises(klamp.UserError, match=r"weight at \[0, 0\] overflows"):
        step("factor()", [[-2.0]], [[-91.0]], [1.0], dtype=F32)
    out, grad = step("factor(transform=cap(low=0.0, high=5.0))", [[-2.0]], [[-91.0]], [1.0], dtype=F32)
    assert grad.tolist() == [[-5.0]]
    assert out.metrics.show()["policy/ratio_max"] == pytest.approx(
        math.exp(89.0), rel=1e-6
    )  # the raw ratio, not the cap
    capped = "factor(transform=cap(low=0.0, high=5.0))"
    found = shown(capped, [[-2.0, -1.0]], [[-802.0, -1.0]], [1.0])  # beyond doubles too: counted, and left out
    assert (found["policy/overflow_count"], found["policy/ratio_max"], found["policy/kl_old_new_mean"]) == (
        1,
        None,
        0.0,
    )


def test_an_overflowing_sequence_ratio_is_cut_or_raised() -> None:
    out, grad = step("gspo()", [[99.0, 101.0]], [[0.0, 0.0]], [1.0], dtype=F32)
    assert math.isfinite(out.loss.item())
    assert grad.tolist() == [[0.0, 0.0]]
    with pytest.raises(klamp.UserError, match="overflows"):
        step("gspo()", [[99.0, 101.0]], [[0.0, 0.0]], [-1.0], dtype=F32)


def test_a_drifted_reference_is_raised_in_float32_and_exact_in_float64() -> None:
    new, ref = [[-1.0] * 3], torch.tensor([[-1.0, 29.0, 89.0]], dtype=F64)
    spec = "reinforce() + kl_reference(beta=0.04)"
    with pytest.raises(klamp.UserError, match=r"loss term at \[0, 2\] overflows"):
        step(spec, new, new, [1.0], dtype=F32, logp_ref=ref.float())
    out, _ = step(spec, new, new, [1.0], logp_ref=ref)
    wanted = [0.04 * (1.0 - math.exp(x)) for x in (0.0, 30.0, 90.0)]
    assert out.grad_penalty[0].tolist() == pytest.approx(wanted, rel=1e-13)
    assert out.grad_policy[0].tolist() == [1.0, 1.0, 1.0]  # the policy's ratio is another one


def test_shares_count_the_same_tokens_above_and_below() -> None:
    """Two tokens, six of padding at log-ratio 50."""
    wide = shown("grpo()", [[0.3, 0.0] + [50.0] * 6], [[0.0] * 8], [1.0], [[1, 1] + [0] * 6])
    assert wide == shown("grpo()", [[0.3, 0.0]], [[0.0, 0.0]], [1.0])
    assert wide["guard/removed_high_share"] == 0.5
    assert all(0.0 <= value <= 1.0 for name, value in wide.items() if name.endswith("_share"))


def test_k3_near_one_keeps_its_digits() -> None:
    x = torch.tensor(-1e-4, dtype=F32)
    assert float(klamp.measure("k3").divergence(x)) == pytest.approx(5.0e-9, rel=1e-4)
    assert float(x.exp() - 1.0 - x) < 0.0  # the naive form


def test_a_null_log_prob_excludes_its_row_and_is_counted() -> None:
    rollout = torch.tensor([[-0.1, NAN, -2.0], [-1.0, -1.0, -1.0]], dtype=F64)
    rows = [[-0.1, -1.0, -2.0], [-1.0, -1.0, -1.0]]
    out, grad = step("reinforce() + sequence_mask()", rows, rows, [1.0, 1.0], logp_rollout=rollout)
    assert grad[0].tolist() == [0.0] * 3
    assert grad[1].tolist() == pytest.approx([-1 / 3] * 3)
    assert out.metrics.show()["batch/missing_rows_count"] == 1


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_an_infinite_log_prob_is_named_not_dropped() -> None:
    with pytest.raises(klamp.UserError, match=r"logp_new\[0, 1\] = -inf at an unmasked position"):
        step("grpo()", [[-1.0, -INF]], [[-1.0, -1.0]], [1.0])


def test_ratios_of_bfloat16_are_subtracted_in_float32() -> None:
    logp = torch.tensor([[-1.2345, -7.5]], dtype=torch.bfloat16)
    batch = klamp.Batch(logp, logp.float(), torch.ones(1), torch.ones(1, 2, dtype=torch.bool))
    assert batch.log_ratio("new/old").dtype == F32
    assert batch.log_ratio("new/old").tolist() == [[0.0, 0.0]]


# --- empty rows and disagreeing masks ---------------------------------------------------------------------------


def test_a_fully_masked_row_and_responses_of_no_tokens() -> None:
    out, grad = step("reinforce(aggregate=sequence_mean())", [[-INF, -1.0], [-1.0, -2.0]], [[0.0, 0.0]] * 2, [1.0, 1.0],
                     [[0, 0], [1, 1]])  # fmt: skip
    assert out.loss.item() == 1.5
    assert grad.tolist() == [[0.0, 0.0], [-0.5, -0.5]]
    for aggregate in ("token_mean", "sequence_mean", "prompt_mean"):
        group = torch.zeros(2, dtype=torch.int64)
        empty, _ = step(f"grpo(aggregate={aggregate}())", [[], []], [[], []], [1.0, -1.0], [[], []], group=group)
        assert empty.loss.item() == 0.0
        assert empty.metrics.show()["policy/loss_mean"] is None
        assert empty.metrics.show()["batch/tokens_count"] == 0


def test_a_rank_without_tokens_changes_nothing() -> None:
    """One of two rows is fully masked; cut into two, the counts of the step are still the true ones."""
    fields: dict[str, Any] = {
        "logp_new": torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], dtype=F64), "logp_old": torch.zeros(2, 2, dtype=F64),
        "advantages": torch.ones(2, dtype=F64), "mask": torch.tensor([[True, True], [False, False]]),
    }  # fmt: skip
    for spec in ("reinforce()", "reinforce(aggregate=sequence_mean())"):
        objective = klamp.Objective(spec)
        parts = [klamp.Batch(**take(fields, index)) for index in torch.arange(2).split(1)]
        stats = sum(objective.stats(part) for part in parts)
        assert [objective(part, stats).loss.item() for part in parts] == [1.5, 0.0]
        assert objective(klamp.Batch(**fields)).loss.item() == 1.5


@pytest.mark.parametrize("spec", ["grpo()", "gspo()", "dapo()", "grpo() + f_penalty()"])
def test_a_mask_with_a_hole_is_the_tokens_without_it(spec: str) -> None:
    """A tool's answer in the middle, at log-ratio -3: neither loss, gradient nor metric sees it."""
    x, kept = [0.1, -0.3, -3.0, -3.0, 0.02], [0, 1, 4]
    out, grad = step(spec, [x], [[0.0] * 5], [1.0], [[1, 1, 0, 0, 1]])
    close, narrow = step(spec, [[x[i] for i in kept]], [[0.0] * 3], [1.0])
    assert out.loss.item() == pytest.approx(close.loss.item(), rel=1e-15)
    assert grad[0, kept].tolist() == pytest.approx(narrow[0].tolist(), rel=1e-15)
    assert grad[0, [2, 3]].tolist() == [0.0, 0.0]
    for name, value in close.metrics.show().items():
        assert out.metrics.show()[name] == pytest.approx(value, rel=1e-14), name


def test_a_dropped_response_trains_on_nothing() -> None:
    """Composed with a sequence ratio: a weight of 0 inside its mean would give exp(0) = 1 and leave -A."""
    rollout = torch.tensor([[-3.0, -1.0], [-1.0, -1.0]], dtype=F64)  # the first response: ratio e^2, beyond 3
    rows = [[-1.0, -1.0], [-1.0, -1.0]]
    out, grad = step("gspo() + sequence_mask(high=3.0)", rows, rows, [1.0, 1.0], logp_rollout=rollout)
    assert out.per_token.tolist() == [[0.0, 0.0], [-1.0, -1.0]]
    assert grad[0].tolist() == [0.0, 0.0]


def test_whether_tied_groups_count_is_the_mask() -> None:
    """One tied group of six tokens, one live group of two: in the mean by default, out of it by masking ``tied``."""
    found = estimator("dr_grpo")(torch.tensor([0.7, 0.7, 1.0, 0.0]), torch.tensor([0, 0, 1, 1]))
    rows = torch.full((4, 3), -1.0, dtype=F64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 0], [1, 0, 0]]).bool()
    for counted, share in ((mask, 1 / 8), (mask & ~found.tied.unsqueeze(1), 1 / 2)):
        out = klamp.Objective("grpo(aggregate=token_mean())")(
            klamp.Batch(rows, rows.detach(), found.values.double(), counted)
        )
        (grad,) = torch.autograd.grad(out.loss, rows)
        assert grad[:, 0].tolist() == pytest.approx([0.0, 0.0, -0.5 * share, 0.5 * share], rel=1e-12, abs=0.0)
    assert shown("grpo()", [[-1.0]] * 2, [[-1.0]] * 2, [0.0, 0.5])["batch/zero_advantage_share"] == 0.5


# --- means --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "wanted"), [("reinforce()", (1 + 2 * 2 + 5 * 3) / 8),
                                              ("reinforce(aggregate=sequence_mean())", 2.0),
                                              ("reinforce(aggregate=sequence_sum(divisor=10))", (1 + 4 + 15) / 30)])  # fmt: skip
@pytest.mark.parametrize("sizes", [[3], [1, 1, 1], [2, 1], [1, 2]])
@pytest.mark.parametrize("width", [5, 8, 16])
def test_neither_micro_batches_nor_padding_scale_the_loss(
    spec: str, wanted: float, sizes: list[int], width: int
) -> None:
    """Responses of 1, 2 and 5 tokens with losses 1, 2 and 3."""
    lengths = torch.tensor([[1], [2], [5]])
    fields: dict[str, Any] = {
        "logp_new": -torch.tensor([[1.0], [2.0], [3.0]], dtype=F64).expand(3, width).contiguous(),
        "logp_old": torch.zeros(3, width, dtype=F64), "advantages": torch.ones(3, dtype=F64),
        "mask": torch.arange(width) < lengths,
    }  # fmt: skip
    objective = klamp.Objective(spec)
    parts = [klamp.Batch(**take(fields, index)) for index in torch.arange(3).split(sizes)]
    stats = sum(objective.stats(part) for part in parts)
    assert sum(objective(part, stats).loss.item() for part in parts) == pytest.approx(wanted, rel=1e-14)


def test_the_old_mean_of_means_has_its_own_name() -> None:
    """100 tokens at 0.5 in one micro-batch, 900 at 0.3 in another: 0.32 per token, 0.40 as a mean of the two means."""
    sizes, values = (100, 900), (0.5, 0.3)
    for aggregate, wanted in (("token_mean", 0.32), ("local_token_mean", 0.40)):
        objective = klamp.Objective(f"reinforce(aggregate={aggregate}())")
        parts = [
            klamp.Batch(torch.full((1, n), -v, dtype=F64), torch.zeros(1, n, dtype=F64), torch.ones(1, dtype=F64),
                        torch.ones(1, n, dtype=torch.bool))
            for n, v in zip(sizes, values, strict=True)
        ]  # fmt: skip
        stats = sum(objective.stats(part) for part in parts)
        assert sum(objective(part, stats).loss.item() for part in parts) == pytest.approx(wanted, rel=1e-12)
        assert ("local_mean" in objective.spec.traits) == (aggregate == "local_token_mean")


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_every_term_has_the_counts_of_the_step(pieces: int) -> None:
    """A penalty beside the policy term: its weight does not grow with the number of micro-batches."""
    lengths = torch.tensor([[1], [4], [2], [3]])
    x = torch.linspace(-0.5, 0.5, 16, dtype=F64).view(4, 4)
    fields: dict[str, Any] = {
        "logp_new": x, "logp_old": torch.zeros(4, 4, dtype=F64), "advantages": torch.tensor([1.0, -1.0, 0.0, 2.0]).double(),
        "mask": torch.arange(4) < lengths, "logp_ref": x.flip(0), "entropy": x.abs(),
    }  # fmt: skip
    objective = klamp.Objective(
        "dapo() + f_penalty(beta=2.0) + kl_reference(beta=0.5) + entropy_bonus(coefficient=0.1)"
    )
    parts = [klamp.Batch(**take(fields, index)) for index in torch.arange(4).chunk(pieces)]
    stats = sum(objective.stats(part) for part in parts)
    total = sum(objective(part, stats).loss.item() for part in parts)
    assert total == pytest.approx(objective(klamp.Batch(**fields)).loss.item(), rel=1e-14)


def test_per_batch_and_per_prompt_means_have_two_names() -> None:
    """Prompt one: two responses of 1 token, loss 1; prompt two: two of 10 tokens, loss 0."""
    rows = [[-1.0] + [0.0] * 9] * 2 + [[0.0] * 10] * 2
    mask = [[1] + [0] * 9] * 2 + [[1] * 10] * 2
    for aggregate, wanted in (("token_mean", 2 / 22), ("prompt_mean", 0.5), ("sequence_mean", 0.5)):
        out, _ = step(f"reinforce(aggregate={aggregate}())", rows, [[0.0] * 10] * 4, [1.0] * 4, mask,
                      group=torch.tensor([0, 0, 1, 1]))  # fmt: skip
        assert out.loss.item() == pytest.approx(wanted, rel=1e-14)


def test_a_sequence_loss_weighs_by_length_only_if_its_mean_does() -> None:
    """Responses of 2 and 8 tokens, s = 1, A = 1."""
    mask = [[1] * 2 + [0] * 6, [1] * 8]
    for aggregate, wanted in (("sequence_mean()", [0.5, 0.5]), ("token_mean()", [0.2, 0.8])):
        _, grad = step(f"gspo(aggregate={aggregate})", [[0.0] * 8] * 2, [[0.0] * 8] * 2, [1.0, 1.0], mask)
        assert (-grad).sum(1).tolist() == pytest.approx(wanted, rel=1e-14)


def test_a_loss_of_zero_has_a_gradient() -> None:
    out, grad = step("grpo()", [[-1.0, -2.0]] * 2, [[-1.0, -2.0]] * 2, [0.5, -0.5])
    assert out.loss.item() == 0.0
    assert grad.tolist() == [[-0.125, -0.125], [0.125, 0.125]]


# --- ratios, clips and their metrics ------------------------------------------------------------------------------


def test_both_tails_are_seen() -> None:
    found = shown("grpo()", [[math.log(w) for w in (0.02, 1.0, 5.0)]], [[0.0] * 3], [[-1.0, 1.0, 1.0]])
    assert (found["guard/removed_low_share"], found["guard/removed_high_share"]) == pytest.approx((1 / 3, 1 / 3))
    assert found["policy/ratio_max"] == pytest.approx(5.0)
    counts = found["policy/ratio_histogram"]
    assert (counts[0], counts[-1], sum(counts)) == (1, 1, 3)  # log 0.02 and log 5 lie beyond +-1.6


def test_a_mean_over_tokens_says_so_everywhere() -> None:
    """A response of one token with KL 1, one of nine with KL 0: 0.1, not 0.5."""
    x = [-1.8414056604369606] + [0.0] * 8  # w - 1 - log w = 1
    found = shown("grpo()", [x, [0.0] * 9], [[0.0] * 9] * 2, [1.0, 1.0], [[1] + [0] * 8, [1] * 9])
    assert found["policy/kl_old_new_mean"] == pytest.approx(0.1, rel=1e-12)


def test_a_wide_metric_under_a_narrow_mask() -> None:
    narrow = shown("grpo()", [[0.1]], [[0.0]], [[2.0]])
    assert shown("grpo()", [[0.1] + [9.0] * 6], [[0.0] * 7], [[2.0] + [77.0] * 6], [[1] + [0] * 6]) == narrow


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("w", [0.5, 1.0, 1.5])
def test_a_clip_is_the_smaller_of_two_products(w: float, advantage: float) -> None:
    out, _ = ratios("grpo(epsilon=0.2)", [w], [advantage])
    assert out.loss.item() == pytest.approx(-min(w * advantage, min(max(w, 0.8), 1.2) * advantage), rel=1e-14)


def test_a_dual_clip_bounds_negative_advantages_only() -> None:
    plain, dual = (ratios(spec, [5.0, 5.0, 2.0], [1.0, -1.0, -1.0]) for spec in ("grpo()", "dual_clip(c=3.0)"))
    assert plain[0].per_token[0].tolist() == pytest.approx([-1.2, 5.0, 2.0])
    assert dual[0].per_token[0].tolist() == pytest.approx([-1.2, 3.0, 2.0])
    assert [g != 0.0 for g in dual[1][0].tolist()] == [False, False, True]
    with pytest.raises(klamp.UserError, match=r"c=0.5 must exceed 1"):
        klamp.parse("dual_clip(c=0.5)")


def test_a_cap_is_absolute_and_lifts_nothing() -> None:
    _, grad = ratios("factor(transform=cap(low=0.0, high=5.0))", [6.0, 0.1, 1.0], [1.0] * 3)
    assert (-3.0 * grad[0]).tolist() == pytest.approx([5.0, 0.1, 1.0], rel=1e-14)
    with pytest.raises(klamp.UserError, match="bounds are absolute"):
        klamp.parse("factor(transform=cap(low=0.0, high=0.2))")


def test_a_soft_gate_is_one_at_one_and_follows_the_sign() -> None:
    out, grad = ratios("sapo()", [1.0, 1.0], [1.0, -1.0])
    assert out.grad_policy[0].tolist() == [1.0, -1.0]
    assert grad[0].tolist() == [-0.5, 0.5]


def test_product_and_geometric_mean_are_two_reductions() -> None:
    new, mask = torch.full((1, 1000), 0.012, dtype=F64), torch.ones(1, 1000, dtype=torch.bool)
    batch = klamp.Batch(new, torch.zeros_like(new), torch.ones(1, dtype=F64), mask)
    product, mean = (batch.log_ratio("new/old", "sequence", reduce).exp().item() for reduce in ("sum", "mean"))
    assert (product, mean) == pytest.approx((162754.7914, 1.0120722889), rel=1e-9)


# --- penalties ----------------------------------------------------------------------------------------------------


def test_value_and_gradient_of_a_kl_estimator_are_two_things() -> None:
    """By enumeration over three tokens: every estimator has the value of KL(new||ref), but not every one its gradient."""
    ref = torch.tensor([0.2, 0.3, 0.5], dtype=F64)
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=F64).log().requires_grad_()
    logp = logits.log_softmax(0)
    p = logp.exp().detach()
    forward = (logp.exp() * (logp - ref.log())).sum()
    backward = (ref * (ref.log() - logp)).sum()
    (true,) = torch.autograd.grad(forward, logits, retain_graph=True)
    (other,) = torch.autograd.grad(backward, logits, retain_graph=True)
    zero = torch.zeros_like(true)
    unbiased = {"k2", "k1 weighted", "k3 weighted"}
    for name, wanted in {"k1": zero, "k2": true, "k3": other, "k1 weighted": true, "k3 weighted": true}.items():
        text = f"kl_reference(beta=1.0, estimator='{name[:2]}', weighted={name.endswith('weighted')})"
        rows = logp.detach().view(3, 1)
        batch = klamp.Batch(
            rows, rows, torch.zeros(3, dtype=F64), torch.ones(3, 1, dtype=torch.bool), logp_ref=ref.log().view(3, 1)
        )
        out = klamp.Objective(f"reinforce() + {text}")(batch)
        if name != "k2":
            assert float((p * out.per_token[:, 0]).sum()) == pytest.approx(forward.item(), rel=1e-12)
        (found,) = torch.autograd.grad((p * out.grad_penalty[:, 0] * logp).sum(), logits, retain_graph=True)
        assert found.tolist() == pytest.approx(wanted.tolist(), rel=1e-10, abs=1e-12)
        assert (name in unbiased) == bool(torch.allclose(found, true))


def test_a_penalty_pulls_towards_the_reference() -> None:
    def loss(shift: float) -> float:
        out, _ = step("reinforce() + kl_reference(beta=0.04)", [[-1.0 + shift]], [[-1.0]], [0.0],
                      logp_ref=torch.tensor([[-1.0]], dtype=F64))  # fmt: skip
        return float(out.loss)

    assert loss(0.0) == 0.0
    assert min(loss(0.1), loss(-0.1)) > 0.0
    assert (loss(0.1 + 1e-6) - loss(0.1 - 1e-6)) / 2e-6 == pytest.approx(0.04 * (1 - math.exp(-0.1)), rel=1e-6)


def test_a_tied_group_still_feels_the_penalty_and_says_so() -> None:
    more = {"logp_ref": torch.tensor([[-2.0], [-1.0]], dtype=F64)}
    out, _ = step("grpo() + kl_reference(beta=0.04)", [[-1.0]] * 2, [[-1.0]] * 2, [0.0, 0.0], **more)
    assert out.grad_policy.tolist() == [[0.0], [0.0]]
    assert out.grad_penalty[:, 0].tolist() == pytest.approx([0.04 * (1 - math.exp(-1.0)), 0.0])
    assert out.metrics.show()["batch/zero_advantage_share"] == 1.0
    assert out.metrics.show()["penalty/loss_mean"] == pytest.approx(0.02 * math.exp(-1.0))


def test_k3_of_the_ratio_not_of_its_log() -> None:
    k3 = klamp.measure("k3")
    assert k3.divergence(0.0) == 0.0
    assert float(k3.divergence(1.0)) == pytest.approx(math.e - 2.0, rel=1e-15)


def test_a_penalty_covers_the_tokens_that_a_guard_cut() -> None:
    out, _ = step("grpo() + f_penalty(beta=1.0)", [[3.0, 0.0]], [[0.0, 0.0]], [1.0])
    assert out.kept.tolist() == [[False, True]]
    assert out.grad_policy.tolist() == [[0.0, 1.0]]
    assert out.grad_penalty[0].tolist() == pytest.approx([math.exp(3.0) - 1.0, 0.0], rel=1e-14)
    only = "grpo() + f_penalty(beta=1.0, on=guard(ratio_low=0.8, ratio_high=1.2))"
    out, _ = step(only, [[3.0, 0.1]], [[0.0, 0.0]], [1.0])
    assert out.grad_penalty[0].tolist() == pytest.approx([math.exp(3.0) - 1.0, 0.0], rel=1e-14)


# --- groups -------------------------------------------------------------------------------------------------------


def test_uneven_interleaved_groups_are_told_apart_by_id() -> None:
    rewards = torch.tensor([1.0, 4.0, 0.0, 2.0, 3.0], dtype=F64)
    found = estimator("dr_grpo")(rewards, torch.tensor([8, 3, 8, 3, 3]))
    assert found.values.tolist() == [0.5, 1.0, -0.5, -1.0, 0.0]


def test_one_response_has_no_signal_and_is_said() -> None:
    for name in ("grpo", "dr_grpo", "rloo", "batch_std", "passk", "maxrl", "gpg"):
        found = estimator(name)(torch.tensor([1.0, 0.3, 0.1]), torch.tensor([0, 1, 1]))
        assert found.values[0] == 0.0
        assert found.tied.tolist() == [True, False, False]


# --- the page -----------------------------------------------------------------------------------------------------

HERE = Path(__file__).parent
PAGE = (HERE.parent / "docs" / "reports.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "](https://github.com/" in line]


def defined(path: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", (HERE.parent / path).read_text(), re.MULTILINE))


def test_every_row_names_laws_and_tests_that_exist() -> None:
    laws = re.findall(r"^\*\*(\d+)\. ", (HERE.parent / "docs" / "laws.md").read_text(), re.MULTILINE)
    assert len(ROWS) > 50
    for row in ROWS:
        said, where, does, shows = (cell.strip() for cell in row.strip("| ").split(" | "))
        assert min(len(said), len(where), len(does)) > 0, row
        named = re.findall(r"`(tests/\w+\.py)::(test_\w+)`", shows)
        numbers = re.findall(r"laws? (\d+(?:, \d+)*)", shows)
        assert named or numbers, row
        for path, name in named:
            assert name in defined(path), f"{path}::{name}"
        for number in ", ".join(numbers).split(", "):
            assert not number or number in laws, row


def test_every_test_here_is_named_on_the_page() -> None:
    named = set(re.findall(r"`tests/test_reported\.py::(test_\w+)`", PAGE))
    own = {"test_every_row_names_laws_and_tests_that_exist", "test_every_test_here_is_named_on_the_page",
           "test_links_say_where_they_lead"}  # fmt: skip
    assert named == defined("tests/test_reported.py") - own


def test_links_say_where_they_lead() -> None:
    links = re.findall(r"\[([\w.-]+/[\w.-]+)#(\d+)\]\((.*?)\)", PAGE)
    assert len(links) > 100
    for repository, number, target in links:
        assert target == f"https://github.com/{repository}/issues/{number}"
