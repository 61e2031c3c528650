"""The objective: stored oracles, written-out objectives with autograd, precision, and parts of a third party."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import load
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import objective
from oracles.batches import Fields, packed, random_fields, take
from oracles.written import CLIP, CONSTANT, NAMED, WRITTEN, Case, G
from running import close, compare, run

import klamp

BATCHES = load("batches")["batches"]


# --- the file of oracles --------------------------------------------------------------------------------------

METHODS = {
    "grpo_sym": "grpo(epsilon=0.2, aggregate={})",
    "dapo": "dapo(aggregate={})",
    "atr_k3": "atr_grpo(delta=0.02, aggregate={})",
    "k3_reverse": "trust_region('k3_reverse', 0.02, aggregate={})",
    "js": "trust_region('js', 0.02, aggregate={})",
    "hellinger2": "trust_region('hellinger2', 0.02, aggregate={})",
    "cispo_two_sided": "cispo(epsilon_low=0.2, epsilon_high=0.28, aggregate={})",
    "gspo": "gspo_token(epsilon_low=0.0003, epsilon_high=0.0004, aggregate={})",
    "dual_clip": "dual_clip(c=3.0, epsilon=0.2, base=grpo(aggregate={}))",
    "mask_two_sided_k3": "guard(measure='k3', radius=0.02, gate='always', cut_value='zero') + factor() + {}",
    "sapo": "sapo(aggregate={})",
    "penalty_k3": "factor() + f_penalty(measure='k3', beta=0.1) + {}",
}
AGGREGATES = {
    "token_mean": "token_mean()",
    "seq_mean_token_mean": "sequence_mean()",
    "seq_mean_token_sum": "sequence_sum(divisor=1)",
}


def test_every_method_of_the_file_is_tested() -> None:
    assert set(METHODS) == set(BATCHES[0]["methods"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", BATCHES, ids=lambda b: str(b["id"]))
def test_batches_of_the_file(method: str, batch: dict[str, Any]) -> None:
    case = batch["methods"][method]
    fields: Fields = {
        name: torch.tensor(batch[name], dtype=torch.float64) for name in ("logp_new", "logp_old", "advantages")
    }
    fields["mask"] = torch.tensor(batch["mask"]).bool()
    rtol = 3e-12 if method == "sapo" else 1e-12  # theory.md section 5: SAPO's saturated tails
    for key, text in AGGREGATES.items():
        out, grad, _ = run(METHODS[method].format(text), fields)
        close(out.loss, case[f"loss_{key}"], rtol)
        close(-out.per_token, case["J_token"], rtol)
        close(out.grad_policy - out.grad_penalty, case["g_token"], rtol)
        if f"grad_{key}" in case:
            close(grad, case[f"grad_{key}"], rtol)
        removed = fields["mask"] & ~out.kept & (fields["advantages"] != 0)
        if method not in ("cispo_two_sided", "sapo", "penalty_k3"):  # there "clipped" means reweighted
            assert removed.int().tolist() == case["clipped"]


# --- written-out objectives -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", WRITTEN, ids=lambda case: case[0])
@settings(max_examples=8)
@given(
    st.integers(0, 2**31), st.sampled_from([(5, 7), (1, 1), (3, 12)]), st.sampled_from([0.02, 0.4, 1.5]), st.booleans()
)
def test_written_out_objectives(case: Case, seed: int, shape: tuple[int, int], spread: float, per_token: bool) -> None:
    fields = random_fields(seed, *shape, spread=spread, per_token=per_token)
    if "renyi(2.0)" in case[0] or "renyi(-1.5)" in case[0]:
        spread = min(spread, 0.4)
    compare(case, fields, atol=1e-13, rtol=1e-11 if spread == 1.5 else 1e-12)  # the naive forms lose digits far out


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.sampled_from([0.02, 0.3]))
def test_gspo_is_its_sequence_form(seed: int, spread: float) -> None:
    """With one advantage per response the token form has the sequence form's value and gradient."""
    case = ("gspo(epsilon_low=0.05, epsilon_high=0.1)", objective.gspo(0.95, 1.1), (), "sequence_mean")
    fields = random_fields(seed, spread=spread)
    out, grad, _ = run(case[0], fields)
    wanted = objective.evaluate(fields, case[1], (), "sequence_mean")
    close(out.loss, wanted.loss, atol=1e-13)
    close(grad, wanted.grad, atol=1e-13)
    close(out.grad_policy, wanted.grad_policy, atol=1e-13)


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.sampled_from([c for c in NAMED if "aggregate" not in c[0]]))
def test_packed_rows_are_the_same_responses(seed: int, case: Case) -> None:
    fields = random_fields(seed, per_token=True)
    plain, grad, _ = run(case[0], fields)
    laid = packed(fields, 4)
    out, packed_grad, _ = run(case[0], laid)
    close(out.loss, plain.loss, atol=1e-13)
    close(packed_grad[laid["mask"]], grad[fields["mask"]], atol=1e-13)
    compare(case, laid, atol=1e-13)


def test_sequence_means_over_all_rows() -> None:
    for seed in range(5):
        fields = random_fields(seed)
        for kind, text in (
            ("sequence_mean", "sequence_mean(rows='all')"),
            ("sequence_sum", "sequence_sum(divisor=9, rows='all')"),
        ):
            out, grad, _ = run(f"grpo(aggregate={text})", fields)
            wanted = objective.evaluate(fields, CLIP, (), kind, 9.0 if kind == "sequence_sum" else 1.0, every=True)
            close(out.loss, wanted.loss)
            close(grad, wanted.grad)


# --- precision ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", NAMED, ids=lambda case: case[0])
def test_float32(case: Case) -> None:
    fields = random_fields(11, dtype=torch.float32, per_token=True)
    out, grad, _ = run(case[0], fields)
    assert grad.dtype == out.loss.dtype == out.grad_policy.dtype == torch.float32
    compare(case, fields, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("case", NAMED, ids=lambda case: case[0])
def test_bfloat16_is_computed_in_float32(case: Case) -> None:
    fields = random_fields(11, dtype=torch.bfloat16, per_token=True)
    out, grad, _ = run(case[0], fields)
    wanted = objective.evaluate(fields, case[1], case[2], case[3], CONSTANT.get(case[3], 1.0))
    assert out.loss.dtype == torch.float32
    assert grad.dtype == torch.bfloat16
    close(out.loss, wanted.loss, rtol=1e-5, atol=2e-6)
    close(out.grad_policy, wanted.grad_policy, rtol=1e-5, atol=2e-6)
    parts = wanted.grad_policy.abs() + wanted.grad_penalty.abs()  # a sum of the two may cancel after rounding to 8 bits
    assert ((grad.double() - wanted.grad).abs() <= 2**-7 * (parts if case[2] else wanted.grad.abs()) + 2e-6).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gates_compare_signs_not_products(dtype: torch.dtype) -> None:
    """1e-5 * 2e-3 is 0 in float16: a gate by product would let these tokens through."""
    fields: Fields = {
        "logp_new": torch.tensor([[0.0, 0.0, 0.0]]) - torch.tensor([[0.0, 0.002, -0.002]]),
        "logp_old": torch.zeros(1, 3),
        "advantages": torch.tensor([[1e-5, -1e-5, 1e-5]]),
    }
    fields = {name: value.to(dtype) for name, value in fields.items()} | {"mask": torch.ones(1, 3, dtype=torch.bool)}
    out, grad, _ = run("guard(ratio_low=1.0, ratio_high=1.0) + factor()", fields)
    assert out.grad_policy[0, 1:].tolist() == [0.0, 0.0]
    assert grad[0, 1:].tolist() == [0.0, 0.0]
    assert out.grad_policy[0, 0] != 0.0
    tiny = torch.finfo(torch.float32).tiny  # and in float32: tiny * 1e-3 is 0 or denormal
    one: Fields = {
        "logp_new": torch.tensor([[1e-20]]), "logp_old": torch.zeros(1, 1),
        "advantages": torch.tensor([[tiny]]), "mask": torch.ones(1, 1, dtype=torch.bool),
    }  # fmt: skip
    assert run("guard(ratio_high=1.0) + factor()", one)[0].grad_policy.tolist() == [[0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x", [50.0, 80.0])
def test_far_log_ratios(dtype: torch.dtype, x: float) -> None:
    fields: Fields = {
        "logp_new": torch.tensor([[-1.0 - x, -1.0, -1.0 - x, -1.0]], dtype=dtype),
        "logp_old": torch.tensor([[-1.0, -1.0 - x, -1.0, -1.0 - x]], dtype=dtype),
        "advantages": torch.tensor([[1.0, 1.0, -1.0, 0.0]], dtype=dtype),
        "mask": torch.ones(1, 4, dtype=torch.bool),
    }
    out, grad, _ = run("atr_grpo(delta=0.02)", fields)
    low, high = 0.8131051152131157, 1.2135497071517296
    assert out.per_token[0].tolist() == pytest.approx([-math.exp(-x), -high, low, 0.0], rel=1e-6)
    assert grad[0, 1:].tolist() == [0.0, 0.0, 0.0]
    assert grad[0, 0].item() == pytest.approx(-math.exp(-x) / 4.0, rel=1e-2)
    assert out.inside.tolist() == [[False] * 4]
    shown = out.metrics.show()
    assert shown["policy/kl_old_new_mean"] == pytest.approx(
        (2 * (math.exp(x) - 1.0 - x) + 2 * (math.exp(-x) - 1 + x)) / 4
    )
    assert shown["policy/ratio_max"] == pytest.approx(math.exp(x), rel=1e-5)


def _one(x: float, advantage: float, dtype: torch.dtype = torch.float32, **more: torch.Tensor) -> Fields:
    return {
        "logp_new": torch.tensor([[0.0, -1.0]], dtype=dtype), "logp_old": torch.tensor([[-x, -1.0]], dtype=dtype),
        "advantages": torch.tensor([[advantage, 1.0]], dtype=dtype), "mask": torch.ones(1, 2, dtype=torch.bool), **more,
    }  # fmt: skip


@pytest.mark.parametrize("x", [100.0, 1000.0])
def test_a_cut_token_may_overflow(x: float) -> None:
    """Law 3: exactly 0, even where w is infinite."""
    out, grad, _ = run("grpo()", _one(x, 1.0))
    assert out.loss.item() == pytest.approx((-1.2 - 1.0) / 2.0)
    assert grad.tolist() == [[0.0, -0.5]]
    out, grad, _ = run("dual_clip(c=3.0)", _one(x, -1.0))
    assert out.loss.item() == pytest.approx((3.0 - 1.0) / 2.0)
    assert grad.tolist() == [[0.0, -0.5]]
    out, grad, _ = run("guard(measure='k3', radius=0.02, gate='always', cut_value='zero') + factor()", _one(x, -1.0))
    assert (out.loss.item(), grad.tolist()) == (-0.5, [[0.0, -0.5]])
    out, grad, _ = run("sapo()", _one(x, -1.0))
    assert math.isfinite(out.loss.item())
    assert grad[0, 0] == 0.0


def test_a_cut_response_may_overflow() -> None:
    """Law 3 for a sequence weight: v = exp(100) is infinite in float32, and the response is dropped by v <= 3."""
    rollout = torch.tensor([[-50.0, -51.0], [-1.0, -1.0]])
    fields: Fields = {
        "logp_new": torch.full((2, 2), -1.0), "logp_old": torch.full((2, 2), -1.0), "logp_rollout": rollout,
        "advantages": torch.tensor([1.0, 1.0]), "mask": torch.ones(2, 2, dtype=torch.bool),
    }  # fmt: skip
    for base in ("grpo()", "reinforce()", "sapo()"):
        out, grad, _ = run(f"{base} + sequence_mask(high=3.0)", fields)
        kept, kept_grad, _ = run(base, take(fields, slice(1, 2)))
        assert out.loss.item() == pytest.approx(kept.loss.item() / 2.0, rel=1e-6)
        assert grad[0].tolist() == [0.0, 0.0]
        assert torch.allclose(grad[1:], kept_grad / 2.0)


def test_a_kept_weight_that_overflows_is_raised() -> None:
    """Law 13: nothing clamps in silence."""
    for spec in ("grpo()", "factor()", "dapo()"):
        with pytest.raises(klamp.UserError, match=r"at \[0, 0\] overflows \(1 in all\).*cap it"):
            run(spec, _one(100.0, -1.0))
    run("cispo()", _one(100.0, -1.0))  # capped by its factor
    assert run("grpo()", _one(100.0, -1.0, torch.float64))[0].loss.item() == pytest.approx(math.exp(100.0) / 2.0)


def test_a_nonfinite_new_logp_is_raised_without_validation() -> None:
    fields = _one(0.1, 1.0)
    fields["logp_new"][0, 0] = math.nan
    with pytest.raises(klamp.UserError, match=r"overflows|not finite"):
        run("grpo()", fields, validate=False)


# --- parts of a third party -----------------------------------------------------------------------------------


def _surprised(r: objective.Response) -> torch.Tensor:
    w = r.ratio
    outside = G["k3"](w.detach()) > 0.02
    return torch.where(outside & (torch.exp(r.old) >= 0.5), 0.0, w * r.advantage)


def _confident(r: objective.Response) -> torch.Tensor:
    w = r.ratio
    cut = (G["k3"](w.detach()) > 0.02) & (w.detach() > 1) & (r.advantage > 0) & (r.entropy.detach() < 1.0)
    return torch.where(cut, 0.0, w * r.advantage)


@pytest.mark.parametrize(
    ("gate", "term"), [("custom_parts:surprised", _surprised), ("custom_parts:CONFIDENT", _confident)]
)
def test_a_gate_of_a_third_party(gate: str, term: objective.Term) -> None:
    spec = f"guard(measure='k3', radius=0.02, gate='{gate}', cut_value='zero') + factor() + token_mean()"
    assert klamp.parse(str(klamp.parse(spec))) == klamp.parse(spec)
    for seed in range(6):
        compare((spec, term, (), "token_mean"), random_fields(seed, rows=9))


@pytest.mark.parametrize("spec", [
    "trust_region(\"measure('custom_parts:cosh_gap', curvature=2)\", 0.03, base=dapo())",
    "trust_region('custom_parts:quartic', 0.03, base=dapo())",
    "guard(measure='custom_parts:torch_only', radius=0.03, gate='custom_parts:surprised') + factor()",
])  # fmt: skip
def test_training_with_parts_of_a_third_party(spec: str) -> None:
    """A softmax policy of 6 actions per state, 4 updates per rollout: each update's gradient is the oracle's."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 1, 6, generator=rng, dtype=torch.float64).requires_grad_(True)
    best = torch.randint(0, 6, (8, 1), generator=rng)
    parsed = klamp.parse(spec)
    low, high = parsed.guards[0].region.low, parsed.guards[0].region.high
    step, start, removed = klamp.Objective(parsed), float(_chance(logits, best)), 0.0
    for _ in range(6):
        actions = torch.multinomial(logits.detach().softmax(-1).flatten(0, 1), 12, True, generator=rng)
        old = logits.detach().log_softmax(-1).squeeze(1).gather(1, actions)
        advantages = torch.where(actions == best, 1.0, -0.25).double()
        for _ in range(4):
            new = logits.log_softmax(-1).squeeze(1).gather(1, actions)
            out = step(klamp.Batch(new, old, advantages, torch.ones_like(actions, dtype=torch.bool)))
            w = torch.exp(new - old)
            cut = torch.minimum(w * advantages, w.clamp(low, high) * advantages)
            if "surprised" in spec:
                cut = torch.where((old.exp() >= 0.5) & ((w < low) | (w > high)), (w.clamp(low, high) * advantages).detach(),
                                  w * advantages)  # fmt: skip
            (wanted,) = torch.autograd.grad(-cut.mean(), logits, retain_graph=True)
            (got,) = torch.autograd.grad(out.loss, logits)
            close(out.loss, -cut.mean().detach())
            close(got, wanted)
            removed += out.metrics.show()["guard/removed_high_share"]
            logits = (logits - 6.0 * got).detach().requires_grad_(True)
    assert float(_chance(logits, best)) > start + 0.2
    assert removed > 0.0


def _chance(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    return logits.detach().softmax(-1).squeeze(1).gather(1, best).mean()


def test_metrics_and_stats_must_be_of_the_whole_step() -> None:
    """What the state follows are the metrics of every micro-batch; a loss needs the counts of at least its own."""
    objective = klamp.Objective("ppo_kl_penalty(beta=0.1, target=0.01)")
    state = objective.init()
    mask = torch.ones(1, 2, dtype=torch.bool)
    far = klamp.Batch(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-2.0, -2.0]]), torch.ones(1), mask)
    near = klamp.Batch(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -1.0]]), torch.ones(1), mask)
    stats = objective.stats(far) + objective.stats(near)
    outs = [objective(batch, stats, state) for batch in (far, near)]
    with pytest.raises(klamp.UserError, match="4 tokens, these metrics are of 2"):
        objective.update(state, stats, outs[-1].metrics)
    assert objective.update(state, stats, outs[0].metrics + outs[1].metrics) == {"beta": 0.2}
    short = klamp.Batch(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -1.0]]), torch.ones(1), ~mask)
    with pytest.raises(klamp.UserError, match="2 tokens, the stats of its step only 0"):
        objective(far, objective.stats(short), state)
