"""Numbers from public bug reports (rows C01 to C30): each is a mistake that shipped somewhere.

C22 and C25 (advantages) are in test_advantages.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracles.batches import Fields, take

import klamp


def step(
    spec: str, new: Any, old: Any, advantages: Any, mask: Any = None, dtype: torch.dtype = torch.float64, **more: Any
) -> tuple[Any, torch.Tensor]:
    """(output, d loss / d logp_new) of one batch."""
    logp = torch.tensor(new, dtype=dtype, requires_grad=True)
    kept = torch.ones(logp.shape, dtype=torch.bool) if mask is None else torch.tensor(mask).bool()
    batch = klamp.Batch(logp, torch.tensor(old, dtype=dtype), torch.tensor(advantages, dtype=dtype), kept, **more)
    out = klamp.Objective(spec)(batch)
    (grad,) = torch.autograd.grad(out.loss, logp)
    return out, grad


def ratios(spec: str, w: list[float], advantages: list[float]) -> tuple[Any, torch.Tensor]:
    return step(spec, [[math.log(v) for v in w]], [[0.0] * len(w)], [advantages])


def test_c01_bounds_are_asymmetric_in_the_stated_way() -> None:
    for delta, low, high in ((0.05, 0.716189455169, 1.350403255981), (0.02, 0.813105115213, 1.213549707150)):
        region = klamp.region("k3", delta)
        assert (region.low, region.high) == pytest.approx((low, high), abs=5e-12)
        for bound in (region.log_low, region.log_high):
            assert klamp.measure("k3").divergence(bound) == pytest.approx(delta, rel=1e-12)
        assert region.high - 1.0 > 1.0 - region.low
        assert abs(region.log_low) > region.log_high
        assert region.low * region.high < 1.0


def test_c03_signs_and_sides() -> None:
    out, grad = ratios("atr_grpo(delta=0.05)", [1.5, 1.5, 0.5, 0.5, 1.3, 0.72], [1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    assert out.per_token[0].tolist() == pytest.approx([-1.350403, 1.5, -0.5, 0.716189, -1.3, 0.72], abs=5e-7)
    assert (6.0 * grad[0]).tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0, -1.3, 0.72], rel=1e-12, abs=0.0)


def test_c05_no_single_radius_for_a_ratio_box() -> None:
    found = [float(klamp.measure("k3").divergence(math.log(w))) for w in (0.8, 1.2, 1.28)]
    assert found == pytest.approx([0.0231435513, 0.0176784432, 0.0331399221], abs=5e-11)
    assert klamp.calibrate("k3", 0.8, 1.2, "lower") == pytest.approx(found[0], rel=1e-12)
    assert klamp.calibrate("k3", 0.8, 1.28, "upper") == pytest.approx(found[2], rel=1e-12)


def test_c06_masked_infinity_in_float32() -> None:
    spec = "grpo(epsilon=0.2, aggregate=token_mean())"
    out, grad = step(spec, [[-1.0, -1.0, 0.0]], [[-1.0, -1.1, -100.0]], [1.0], [[1, 1, 0]], torch.float32)
    assert out.loss.item() == pytest.approx(-1.0525855, rel=1e-6)
    assert grad[0].tolist() == pytest.approx([-0.5, -0.5525855, 0.0], rel=1e-6, abs=0.0)


def test_c08_an_overflowing_ratio_that_is_cut() -> None:
    spec = "guard(ratio_low=0.8, ratio_high=1.2) + factor() + token_mean()"
    out, grad = step(spec, [[0.0]], [[-100.0]], [1.0], dtype=torch.float32)
    assert out.loss.item() == pytest.approx(-1.2, rel=1e-6)
    assert grad.tolist() == [[0.0]]
    out, grad = step(spec, [[0.0]], [[-100.0]], [0.0], dtype=torch.float32)
    assert (out.loss.item(), grad.tolist()) == (0.0, [[0.0]])


def test_c10_k3_in_bfloat16_is_not_negative() -> None:
    x = torch.tensor(0.010009765625, dtype=torch.bfloat16)
    assert float(klamp.measure("k3").divergence(x)) == pytest.approx(5.02653e-5, rel=1e-5)
    assert float(x.exp() - 1.0 - x) < 0.0  # the naive form


@pytest.mark.parametrize("aggregate", ["token_mean()", "sequence_mean()", "sequence_mean(rows='all')",
                                       "sequence_sum(divisor=4)", "prompt_mean()"])  # fmt: skip
@pytest.mark.parametrize("base", ["grpo", "gspo", "cispo", "sapo"])
def test_c13_nothing_unmasked(base: str, aggregate: str) -> None:
    new = [[math.nan, 5.0], [-math.inf, -1.0]]
    out, grad = step(f"{base}(aggregate={aggregate}, penalty=f_penalty())", new, [[0.0, math.inf], [1.0, -1.0]],
                     [math.nan, 1.0], [[0, 0], [0, 0]], group=torch.tensor([0, 1]))  # fmt: skip
    assert out.loss.item() == 0.0
    assert grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    shown = out.metrics.show()
    assert shown["batch/tokens_count"] == 0
    assert sum(shown["policy/ratio_histogram"]) == 0
    for name, value in shown.items():
        if name.endswith(("_mean", "_share")):
            assert value is None, name
    assert shown.get("policy/ratio_max") is None  # the largest of nothing is not a ratio of 0


def test_c14_empty_rows_in_a_mean_over_rows() -> None:
    for rows, wanted in (("nonempty", 2.0), ("all", 1.0)):
        out, _ = step(f"reinforce(aggregate=sequence_mean(rows='{rows}'))", [[-1.0, -3.0], [-9.0, -9.0]],
                      [[0.0, 0.0], [0.0, 0.0]], [1.0, 1.0], [[1, 1], [0, 0]])  # fmt: skip
        assert out.loss.item() == wanted
        assert rows in str(klamp.Aggregate("sequence_mean", rows=rows))


def test_c15_every_split_has_the_mean_of_the_whole() -> None:
    fields: Fields = {
        "logp_new": torch.tensor([[-2.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64),
        "logp_old": torch.zeros(2, 3, dtype=torch.float64), "advantages": torch.ones(2, dtype=torch.float64),
        "mask": torch.tensor([[True, False, False], [True, True, True]]),
    }  # fmt: skip
    for aggregate, wanted in (("token_mean()", 0.5), ("sequence_mean()", 1.0)):
        objective = klamp.Objective(f"reinforce(aggregate={aggregate})")
        for cut in ([2], [1, 1]):
            parts = [klamp.Batch(**take(fields, index)) for index in torch.arange(2).split(cut)]
            stats = sum(objective.stats(part) for part in parts)
            assert sum(objective(part, stats).loss.item() for part in parts) == wanted
    sizes, values = (100, 900), (0.5, 0.3)
    objective = klamp.Objective("reinforce()")
    parts = [
        klamp.Batch(torch.full((1, n), -v, dtype=torch.float64), torch.zeros(1, n, dtype=torch.float64),
                    torch.ones(1, dtype=torch.float64), torch.ones(1, n, dtype=torch.bool))
        for n, v in zip(sizes, values, strict=True)
    ]  # fmt: skip
    stats = sum(objective.stats(part) for part in parts)
    assert sum(objective(part, stats).loss.item() for part in parts) == pytest.approx(0.32, rel=1e-12)


def test_c18_an_excluded_response_and_padding() -> None:
    for width in (4, 9):
        rows = [[-1.0] * 4 + [0.0] * (width - 4)] * 2
        mask = [[1] * 4 + [0] * (width - 4), [0] * width]
        zeros = [[0.0] * width] * 2
        assert step("reinforce()", rows, zeros, [1.0, 1.0], mask)[0].loss.item() == 1.0
        fixed = step("reinforce(aggregate=sequence_sum(divisor=8))", rows, zeros, [1.0, 1.0], mask)[0]
        assert fixed.loss.item() == 0.5  # 4 tokens / 8, one response counts, whatever the width
        every = step("reinforce(aggregate=sequence_sum(divisor=8, rows='all'))", rows, zeros, [1.0, 1.0], mask)[0]
        assert every.loss.item() == 0.25


def test_c19_removed_and_outside_are_two_metrics() -> None:
    out, _ = ratios("grpo(epsilon=0.2)", [1.5, 1.5, 1.5, 0.5], [0.0, 1.0, -1.0, -1.0])
    shown = out.metrics.show()
    assert (shown["guard/removed_high_share"], shown["guard/removed_low_share"]) == (0.25, 0.25)
    assert shown["guard/outside_high_share"] + shown["guard/outside_low_share"] == 1.0
    assert (shown["guard/outside_high_share"], shown["guard/outside_low_share"]) == (0.75, 0.25)
    assert shown["guard/removed_active_share"] == pytest.approx(2 / 3)
    assert shown["batch/zero_advantage_share"] == 0.25


def test_c21_shares_over_ranks() -> None:
    one, _ = ratios("grpo", [1.5] + [1.0] * 9, [1.0] * 10)
    two, _ = ratios("grpo", [1.5] * 4 + [1.0], [1.0] * 5)
    shown = sum([one.metrics, two.metrics]).show()  # type: ignore[arg-type]
    assert shown["guard/removed_high_share"] == pytest.approx(1 / 3, rel=1e-12)
    separate = (one.metrics.mean("guard/removed_high_share") + two.metrics.mean("guard/removed_high_share")) / 2
    assert separate == pytest.approx(0.45)


def test_c26_a_sequence_ratio_ignores_masked_tokens() -> None:
    out, grad = step("gspo", [[0.2, -0.2, 0.3]], [[0.0, 0.0, 0.0]], [1.0], [[1, 1, 0]])
    assert out.loss.item() == pytest.approx(-1.0, rel=1e-15)
    assert grad[0].tolist() == pytest.approx([-0.5, -0.5, 0.0], rel=1e-12, abs=0.0)


def test_c28_k3_ignores_how_likely_the_token_was() -> None:
    x = torch.log(torch.tensor([0.004 / 0.001, 0.6 / 0.9], dtype=torch.float64))
    assert klamp.measure("k3").divergence(x).tolist() == pytest.approx([1.61370564, 0.07213177], abs=5e-9)
    region = klamp.region("k3", 0.1)
    assert (region.low, region.high) == pytest.approx((0.616817, 1.516221), abs=5e-7)
    out, _ = step("guard(measure='k3', radius=0.1, gate='always') + factor()", [x.tolist()], [[0.0, 0.0]], [1.0])
    assert out.kept.tolist() == [[False, True]]


def test_c30_which_kl_is_estimated() -> None:
    old, new = torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=torch.float64)
    x = (new / old).log()
    kl_old_new, kl_new_old = float((old * -x).sum()), float((new * x).sum())
    assert (kl_old_new, kl_new_old) == pytest.approx((0.5108256, 0.3680642), abs=5e-8)
    assert float((old * klamp.measure("k3").divergence(x)).sum()) == pytest.approx(kl_old_new, rel=1e-14)
    assert float((old * klamp.measure("k3_reverse").divergence(x)).sum()) == pytest.approx(kl_new_old, rel=1e-14)
    flipped = float((old * klamp.measure("k3_flipped").divergence(x)).sum())
    assert flipped == pytest.approx(1.2669522, abs=5e-8)
    out, _ = step("grpo", [new.log().tolist()], [old.log().tolist()], [1.0])
    assert out.metrics.mean("policy/kl_old_new_mean") == pytest.approx(kl_old_new, rel=1e-14)
