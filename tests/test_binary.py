"""Binary divergences and DPPO against stored 60-digit oracles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from conftest import load
from oracles.batches import Fields
from running import close, run

import klamp
from klamp.binary import binary_bounds, binary_divergence

BINARY = load("binary")
BATCHES = load("dppo_batches")["batches"]
MEASURES = ("tv", "kl_old_new", "kl_new_old")
SPECS = {"dppo_tv": "dppo_tv(delta=0.1, aggregate={})", "dppo_kl": "dppo_kl(delta=0.05, aggregate={})"}
MEANS = {
    "token_mean": "token_mean()",
    "seq_mean_token_mean": "sequence_mean()",
    "seq_mean_token_sum": "sequence_sum(divisor=1)",
}


@pytest.mark.parametrize("method", SPECS)
@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: str(batch["id"]))
def test_dppo_on_the_batches_of_the_file(method: str, batch: dict[str, Any]) -> None:
    case = batch["methods"][method]
    fields: Fields = {
        name: torch.tensor(batch[name], dtype=torch.float64) for name in ("logp_new", "logp_old", "advantages")
    }
    fields["mask"] = torch.tensor(batch["mask"]).bool()
    for key, text in MEANS.items():
        out, grad, _ = run(SPECS[method].format(text), fields)
        close(out.loss, case[f"loss_{key}"])
        close(-out.per_token, case["J_token"])
        close(out.grad_policy, case["g_token"])
        if f"grad_{key}" in case:
            close(grad, case[f"grad_{key}"])
        removed = fields["mask"] & ~out.kept & (fields["advantages"] != 0)
        assert removed.int().tolist() == case["clipped"]


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("case", BINARY["bounds"], ids=lambda case: f"{case['p_old']}-{case['delta']}")
def test_bounds(case: dict[str, Any], name: str) -> None:
    wanted = case[name]
    low, high = binary_bounds(f"binary_{name}", case["p_old"], case["delta"])
    assert low == (pytest.approx(wanted["x_l"], rel=1e-12) if wanted["has_lower"] else -math.inf)
    assert high == (pytest.approx(wanted["x_u"], rel=1e-12) if wanted["has_upper"] else math.inf)


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize(
    "case", [c for c in BINARY["bounds"] if c["p_old"] < 0.99], ids=lambda c: f"{c['p_old']}-{c['delta']}"
)
def test_the_divergence_at_a_bound_is_the_radius(case: dict[str, Any], name: str) -> None:
    """Not for p = 0.999, where one ulp of x near log(1/p) is a large part of 1 - q."""
    wanted, logp = case[name], np.float64(math.log(case["p_old"]))
    for has, x in ((wanted["has_lower"], wanted["x_l"]), (wanted["has_upper"], wanted["x_u"])):
        if has:
            found = float(binary_divergence(f"binary_{name}", np.float64(x), logp))
            assert found == pytest.approx(case["delta"], rel=1e-12)


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("case", BINARY["values"], ids=lambda case: str(case["p_old"]))
def test_values(case: dict[str, Any], name: str) -> None:
    x, logp = math.log(case["p_new"]) - math.log(case["p_old"]), math.log(case["p_old"])
    wanted = pytest.approx(case[name], rel=1e-12)
    assert float(binary_divergence(f"binary_{name}", np.float64(x), np.float64(logp))) == wanted
    two = (torch.tensor([x, 0.0], dtype=torch.float64), torch.tensor([logp, logp], dtype=torch.float64))
    found = binary_divergence(f"binary_{name}", *two)
    assert found[0].item() == wanted
    assert found[1].item() == 0.0


def test_c28_the_same_move_is_far_or_near_by_the_measure() -> None:
    """(p_old, p_new) = (0.001, 0.004) and (0.9, 0.6): a ratio of 4 that is harmless, one of 2/3 that is not."""
    pairs = ((0.001, 0.004), (0.9, 0.6))
    expected = ((4.0, 0.003, 0.00161822, 1.61370564), (0.666667, 0.3, 0.22628916, 0.07213177))
    for (p, q), (ratio, tv, kl, k3) in zip(pairs, expected, strict=True):
        x, logp = np.float64(math.log(q / p)), np.float64(math.log(p))
        assert math.exp(x) == pytest.approx(ratio, rel=1e-6)
        assert float(binary_divergence("binary_tv", x, logp)) == pytest.approx(tv, rel=1e-6)
        assert float(binary_divergence("binary_kl_old_new", x, logp)) == pytest.approx(kl, rel=1e-5)
        assert float(klamp.measure("k3").divergence(x)) == pytest.approx(k3, rel=1e-6)
    region = klamp.region("k3", 0.1)
    assert (region.low, region.high) == pytest.approx((0.616817, 1.516221), abs=5e-7)
    old, new = ([math.log(pair[i]) for pair in pairs] for i in (0, 1))
    for advantage, tv_kept, k3_kept in ((1.0, [True, True], [False, True]), (-1.0, [True, False], [True, True])):
        fields: Fields = {
            "logp_new": torch.tensor([new], dtype=torch.float64), "logp_old": torch.tensor([old], dtype=torch.float64),
            "advantages": torch.full((1, 2), advantage, dtype=torch.float64), "mask": torch.ones(1, 2, dtype=torch.bool),
        }  # fmt: skip
        for spec, kept in (("dppo_tv(delta=0.2)", tv_kept), ("atr_grpo(delta=0.1)", k3_kept)):
            out, grad, _ = run(spec, fields)
            assert out.kept[0].tolist() == kept
            assert (grad[0] != 0.0).tolist() == kept


@pytest.mark.parametrize("case", BINARY["logits"], ids=lambda case: str(case["sampled"]))
@pytest.mark.parametrize("name", MEASURES)
def test_divergence_from_logits_and_its_place_below_the_whole_one(case: dict[str, Any], name: str) -> None:
    old, new = (torch.tensor(case[f"logits_{role}"], dtype=torch.float64).log_softmax(0) for role in ("old", "new"))
    x, logp = (new - old)[case["sampled"]], old[case["sampled"]]
    found = float(binary_divergence(f"binary_{name}", x, logp))
    assert found == pytest.approx(case["binary"][name], rel=1e-11)
    assert found <= case["exact"][name]  # data processing
