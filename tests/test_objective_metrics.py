"""Metrics of the objective by hand; missing and lacking fields; the adaptive penalty."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from oracles.batches import Fields, random_fields
from oracles.written import SPECS
from running import close, run

import klamp
from klamp.metrics import METRICS, OBJECTIVE, PROBABILITY_EDGES

NAN = math.nan

# --- metrics --------------------------------------------------------------------------------------------------

Side = Callable[[float, float, dict[str, float]], tuple[bool, bool, bool, bool]]  # (w, A, row) -> outside, removed


def _clip_sides(low: float, high: float) -> Side:
    return lambda w, a, row: (w < low, w > high, w < low and a < 0, w > high and a > 0)


def _gspo_sides(w: float, a: float, row: dict[str, float]) -> tuple[bool, bool, bool, bool]:
    return _clip_sides(0.95, 1.1)(row["s"], a, row)


def _dual_sides(w: float, a: float, row: dict[str, float]) -> tuple[bool, bool, bool, bool]:
    return w < 0.8, w > 1.2, w < 0.8 and a < 0, (w > 1.2 and a > 0) or (w > 1.5 and a < 0)


def _mask_sides(w: float, a: float, row: dict[str, float]) -> tuple[bool, bool, bool, bool]:
    low, high = w < 0.8131051152131157, w > 1.2135497071517296
    return low, high, low and a != 0, high and a != 0


def _response_sides(w: float, a: float, row: dict[str, float]) -> tuple[bool, bool, bool, bool]:
    """A token that is low by the clip and high by the mask is removed once; the mask, first by name, has it."""
    low, high, cut_low, cut_high = _clip_sides(0.8, 1.2)(w, a, row)
    far = row["v"] > 1.4
    return low, high or far, cut_low and not far, cut_high or (far and a != 0)


SIDES: dict[str, Side] = {
    "grpo()": _clip_sides(0.8, 1.2),
    "dapo()": _clip_sides(0.8, 1.28),
    "dual_clip(c=1.5)": _dual_sides,
    "gspo(epsilon_low=0.05, epsilon_high=0.1)": _gspo_sides,
    "guard(measure='k3', radius=0.02, gate='always', cut_value='zero') + factor()": _mask_sides,
    "grpo() + sequence_mask(high=1.4)": _response_sides,
    "cispo_absolute(high=1.2)": lambda w, a, row: (False, False, False, False),
    "dapo() + factor(cap(high=1.1), ratio='old/rollout')": _clip_sides(0.8, 1.28),
}


@pytest.mark.parametrize("spec", SIDES)
@pytest.mark.parametrize("seed", range(4))
def test_metrics_by_hand(spec: str, seed: int) -> None:
    fields = random_fields(20 + seed, rows=9, tokens=11, spread=0.5)
    out, _, _ = run(spec, fields)
    sums = dict.fromkeys(("outside_low", "outside_high", "removed_low", "removed_high"), 0)
    tokens = active = zero = reweighted = 0
    kl, entropy, ratios = 0.0, 0.0, []
    cut_signs, by_probability = Counter[float](), {"all": [], "low": [], "high": []}
    for i, j in fields["mask"].nonzero().tolist():
        x = (fields["logp_new"] - fields["logp_old"])[i, j].item()
        m = fields["mask"][i]
        row = {
            "s": math.exp(((fields["logp_new"] - fields["logp_old"])[i][m]).mean().item()),
            "v": math.exp(((fields["logp_old"] - fields["logp_rollout"])[i][m]).sum().item()),
        }
        w, a = math.exp(x), fields["advantages"][i].item()
        flags = SIDES[spec](w, a, row)
        for name, flag in zip(sums, flags, strict=True):
            sums[name] += flag
        tokens, active, zero = tokens + 1, active + (a != 0), zero + (a == 0)
        kl += w - 1 - x
        p_old = math.exp(fields["logp_old"][i, j].item())
        by_probability["all"].append(p_old)
        by_probability["low"] += [p_old] * flags[2]
        by_probability["high"] += [p_old] * flags[3]
        cut_signs[np.sign(a)] += flags[2] or flags[3]
        entropy += fields["entropy"][i, j].item()
        ratios.append(x)
        gone = flags[2] or flags[3] or (a == 0 and _gone_at_zero(spec, row))
        u = math.exp((fields["logp_old"] - fields["logp_rollout"])[i, j].item())
        weight = {"gspo": row["s"], "cispo_absolute": min(w, 1.2)}.get(spec.split("(")[0], w)
        weight *= row["v"] if "sequence_mask" in spec else min(u, 1.1) if "cap" in spec else 1.0
        reweighted += abs(weight / w - 1.0) > 1e-6 and not gone
    shown = out.metrics.show()
    for name, count in sums.items():
        assert shown[f"guard/{name}_share"] == pytest.approx(count / tokens), name
    total = (fields["mask"] & ~out.kept & (fields["advantages"] != 0)[:, None]).sum().item()
    assert sums["removed_low"] + sums["removed_high"] == total
    assert shown["guard/removed_active_share"] == pytest.approx((sums["removed_low"] + sums["removed_high"]) / active)
    assert shown["batch/tokens_count"] == tokens
    assert shown["batch/zero_advantage_share"] == pytest.approx(zero / tokens)
    assert shown["policy/kl_old_new_mean"] == pytest.approx(kl / tokens, rel=1e-12)
    rows = int(fields["mask"].any(dim=1).sum())
    assert shown["policy/kl_old_new_sequence_mean"] == pytest.approx(kl / rows, rel=1e-12)
    for name, sign in (("positive", 1.0), ("negative", -1.0)):
        assert shown[f"guard/removed_{name}_share"] == pytest.approx(cut_signs[sign] / tokens)
    for name, key in (("batch/probability", "all"), ("guard/removed_low", "low"), ("guard/removed_high", "high")):
        counts = [sum(a < p <= b for p in by_probability[key]) for a, b in pairwise(PROBABILITY_EDGES)]
        assert shown[f"{name}_histogram"] == counts
    assert shown["policy/entropy_mean"] == pytest.approx(entropy / tokens, rel=1e-12)
    assert shown["policy/ratio_max"] == pytest.approx(math.exp(max(ratios)), rel=1e-12)
    inner = np.clip(ratios, -1.6 + 1e-9, 1.6 - 1e-9)
    assert shown["policy/ratio_histogram"] == np.histogram(inner, np.linspace(-1.6, 1.6, 65))[0].tolist()
    assert shown["policy/loss_mean"] == pytest.approx((out.per_token.sum() / tokens).item(), rel=1e-12)
    if "factor/reweighted_share" in shown:
        assert shown["factor/reweighted_share"] == pytest.approx(reweighted / tokens)
    else:
        assert reweighted == 0
    assert set(shown) <= set(METRICS)


def _gone_at_zero(spec: str, row: dict[str, float]) -> bool:
    return "sequence_mask" in spec and row["v"] > 1.4


def test_a_token_is_removed_on_one_side() -> None:
    """High by one guard and low by another: it is one removed token, and the sides sum to the whole."""
    fields: Fields = {
        "logp_new": torch.tensor([[-1.0, -1.0]]), "logp_old": torch.tensor([[-2.0, -1.0]]),
        "logp_rollout": torch.tensor([[0.0, -1.0]]), "advantages": torch.tensor([[1.0, 1.0]]),
        "mask": torch.ones(1, 2, dtype=torch.bool),
    }  # fmt: skip
    one = "guard(ratio_high=1.2, gate='always')"
    for other in ("guard(ratio_low=0.8, ratio='new/rollout', gate='always')",
                  "guard(ratio_low=0.9, ratio_high=5.0, ratio='new/rollout', gate='always')"):  # fmt: skip
        shown = run(f"{one} + {other} + factor()", fields)[0].metrics.show()
        assert shown["guard/removed_low_share"] + shown["guard/removed_high_share"] == 0.5
        assert shown["guard/removed_active_share"] == 0.5


def test_emitted_metrics_are_documented() -> None:
    fields = random_fields(30)
    emitted: set[str] = set()
    for spec in [*SPECS, "grpo() + sequence_mask(high=3.0)", "dapo() + rs_k3()"]:
        emitted |= set(run(spec, fields)[0].metrics.show())
    # Counted on devices only, only where missing='token', and only of a batch that looks at whole distributions.
    elsewhere = {"batch/nonfinite_count", "batch/missing_tokens_count", "explore/vanilla_push_mean"}
    assert emitted | elsewhere == set(OBJECTIVE)
    for name, (meaning, span) in METRICS.items():
        assert name.count("/") == 1
        assert meaning
        assert span


def test_a_divergence_that_overflows_is_counted() -> None:
    """Law 10: k3 of e^1000 is no double. It is left out of the mean, sum and count, and counted."""
    fields: Fields = {
        "logp_new": torch.tensor([[0.0, -1.0]]), "logp_old": torch.tensor([[-1000.0, -1.1]]),
        "advantages": torch.ones(1), "mask": torch.ones(1, 2, dtype=torch.bool),
    }  # fmt: skip
    out, _, _ = run("grpo()", fields)
    shown = out.metrics.show()
    assert shown["policy/overflow_count"] == 1
    assert shown["policy/kl_old_new_mean"] == pytest.approx(math.exp(0.1) - 1.1, rel=1e-5)
    assert shown["policy/ratio_max"] is None
    step = klamp.Objective("ppo_kl_penalty(beta=0.5, target=0.01)")
    assert step.update(step.init(), step.stats(klamp.Batch(**fields)), out.metrics) == {"beta": 1.0}


def test_a_capped_token_is_reweighted_even_if_its_ratio_overflows() -> None:
    fields: Fields = {
        "logp_new": torch.tensor([[-2.0, -1.0]]), "logp_old": torch.tensor([[-91.0, -1.0]]), "logp_ref": torch.tensor([[799.0, -1.0]]),
        "advantages": torch.ones(1), "mask": torch.ones(1, 2, dtype=torch.bool),
    }  # fmt: skip
    shown = run("factor(transform=cap(high=5.0))", fields)[0].metrics.show()
    assert shown["factor/reweighted_share"] == 0.5
    assert shown["policy/overflow_ref_count"] == 1
    assert shown["policy/kl_new_ref_mean"] == 0.0


def test_nonfinite_counts_are_raised_when_shown() -> None:
    fields = random_fields(31)
    batch = klamp.Batch(**fields)
    batch.nonfinite = torch.tensor(3)
    with pytest.raises(klamp.UserError, match="3 non-finite"):
        klamp.Objective("grpo()")(batch).metrics.show()


def test_diagnostics_may_be_left_out() -> None:
    batch = klamp.Batch(**random_fields(32))
    plain, full = klamp.Objective("grpo()", diagnostics=False)(batch), klamp.Objective("grpo()")(batch)
    assert torch.equal(plain.loss, full.loss)
    costly = ("kl_old_new_mean", "kl_new_ref_mean", "overflow_count", "overflow_ref_count", "entropy_mean", "ratio_max",
              "ratio_histogram")  # fmt: skip
    costly += ("kl_old_new_sequence_mean",)
    extra = {"batch/probability_histogram", "guard/removed_low_histogram", "guard/removed_high_histogram"}
    extra |= {f"explore/{name}" for name in ("kept_surprise_mean", "cut_surprise_mean", "entropy_push_mean")}
    assert set(full.metrics.show()) - set(plain.metrics.show()) == {f"policy/{name}" for name in costly} | extra
    adaptive = klamp.Objective("ppo_kl_penalty(target=0.01)", diagnostics=False)
    assert "policy/kl_old_new_mean" in adaptive(batch).metrics.show()


# --- missing rollouts, needs ----------------------------------------------------------------------------------


def test_missing_rollouts_by_row_and_token() -> None:
    fields = random_fields(33, rows=6, per_token=True)
    fields["mask"][2:4, 0] = True
    broken = {n: v.clone() for n, v in fields.items()}
    broken["logp_rollout"][2, 0] = broken["logp_rollout"][3, 0] = NAN
    spec = "grpo() + sequence_mask(high=1.4)"
    for missing in ("row", "token"):
        excluded = {n: v.clone() for n, v in fields.items()}
        excluded["mask"][2:4] = False if missing == "row" else fields["mask"][2:4] & (torch.arange(7) > 0)
        wanted, wanted_grad, _ = run(spec, excluded)
        out, grad, _ = run(spec, broken, missing=missing)
        assert torch.equal(out.loss, wanted.loss)
        assert torch.equal(grad, wanted_grad)
        if missing == "row":
            assert out.metrics.show()["batch/missing_rows_count"] == 2
            assert wanted.metrics.show()["batch/missing_rows_count"] == 0
    with pytest.raises(klamp.UserError, match=r"logp_rollout\[2, 0\] = nan at an unmasked position \(2 in all\)"):
        run(spec, broken, missing="raise")


@pytest.mark.parametrize(
    ("spec", "name"),
    [("grpo() + sequence_mask()", "logp_rollout"), ("grpo(penalty=kl_reference())", "logp_ref"),
     ("grpo(penalty=entropy_bonus())", "entropy"), ("grpo(aggregate=prompt_mean())", "group"),
     ("factor() + guard(measure='k3', radius=0.1, gate='custom_parts:CONFIDENT')", "entropy")],
)  # fmt: skip
def test_what_a_batch_lacks_is_named(spec: str, name: str) -> None:
    fields = {n: v for n, v in random_fields(34).items() if n in ("logp_new", "logp_old", "advantages", "mask")}
    assert klamp.parse(spec).needs == {name}
    with pytest.raises(klamp.UserError, match=rf"needs {name}.*this batch does not offer; it offers nothing beyond"):
        run(spec, fields)


@pytest.mark.parametrize("ids", [[0, 1, -1, 2, 0], [-3] * 5])
def test_negative_group_ids_are_refused(ids: list[int]) -> None:
    fields = random_fields(35) | {"group": torch.tensor(ids)}
    with pytest.raises(klamp.UserError, match="group ids must be >= 0; got -"):
        run("grpo(aggregate=prompt_mean())", fields)


def test_dr_grpo_needs_its_divisor() -> None:
    with pytest.raises(klamp.UserError, match="constant divisor"):
        klamp.Objective("dr_grpo()")


# --- the adaptive penalty -------------------------------------------------------------------------------------


def test_adaptive_penalty_doubles_and_halves() -> None:
    fields = random_fields(40)
    step = klamp.Objective("ppo_kl_penalty(beta=0.5, target=0.01)")
    state = step.init()
    assert state == {"beta": 0.5}
    batch = klamp.Batch(**fields)
    out = step(batch, None, state)
    kl = out.metrics.mean("policy/kl_old_new_mean")
    for target, wanted in ((kl / 1.6, 1.0), (kl / 1.4, 0.5), (kl, 0.5), (kl * 1.4, 0.5), (kl * 1.6, 0.25)):
        step = klamp.Objective(klamp.preset("ppo_kl_penalty", beta=0.5, target=target))
        assert step.update(step.init(), step.stats(batch), out.metrics) == {"beta": wanted}
    assert klamp.Objective("grpo()").init() == {}


def test_adaptive_beta_is_used() -> None:
    fields = random_fields(41)
    for beta in (0.25, 2.0):
        out, grad, _ = run("ppo_kl_penalty(beta=0.5, target=0.01)", fields, None, {"beta": beta})
        wanted, wanted_grad, _ = run(f"ppo_kl_penalty(beta={beta})", fields)
        close(out.loss, wanted.loss.detach())
        close(grad, wanted_grad)
    out, _, _ = run("ppo_kl_penalty(beta=0.5, target=0.01)", fields)
    close(out.loss, run("ppo_kl_penalty(beta=0.5)", fields)[0].loss.detach())


def test_an_empty_step_leaves_beta_alone() -> None:
    fields = random_fields(42)
    fields["mask"] = torch.zeros_like(fields["mask"])
    step = klamp.Objective("ppo_kl_penalty(beta=0.5, target=0.01)")
    batch = klamp.Batch(**fields)
    assert step.update({"beta": 3.0}, step.stats(batch), step(batch).metrics) == {"beta": 3.0}
