"""The trainer on real TRL: parity with TRL's own losses, exactness over micro-batches, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from train_parts import digits_reward, gradients, loss_and_gradient, loss_inputs, relative, save_tiny_model, trainer
from trl import GRPOConfig, GRPOTrainer

from klamp.errors import UserError
from klamp.train import KlampConfig, KlampTrainer

# TRL holds SAPO's temperatures in float32 whatever the log-probs are; 1.05 rounded so is what it computes with.
TAU = float(torch.tensor(1.05, dtype=torch.float32))
PARITY: list[tuple[str, dict[str, Any]]] = [
    ("grpo()", {"loss_type": "grpo"}),
    ("dapo()", {"loss_type": "dapo", "epsilon_high": 0.28}),
    ("dr_grpo()", {"loss_type": "dr_grpo"}),
    ("cispo_absolute(high=1.1)", {"loss_type": "cispo", "epsilon_high": 1.1}),
    (f"sapo(tau_neg={TAU})", {"loss_type": "sapo"}),
    ("gspo()", {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}),
    ("gspo(epsilon_low=0.1, epsilon_high=0.1)", {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1}),
    ("dual_clip(c=1.5)", {"loss_type": "grpo", "delta": 1.5}),
    ("grpo(penalty=kl_reference(beta=0.3, weighted=True))", {"loss_type": "grpo", "beta": 0.3}),
    ("dapo() + kl_reference(beta=0.3)", {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.3, "use_bias_correction_kl": False}),
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(("spec", "options"), PARITY, ids=[spec for spec, _ in PARITY])
def test_parity_with_trl_in_float64(spec: str, options: dict[str, Any], tiny: Path, tmp_path: Path) -> None:
    """On one window that is the whole generation batch, loss and gradient are TRL's own."""
    theirs = trainer(GRPOTrainer, GRPOConfig, tiny, tmp_path, num_iterations=2, **options)
    ours = trainer(KlampTrainer, KlampConfig, tiny, tmp_path, num_iterations=2, spec=spec)
    for seed in range(5):
        inputs = loss_inputs(seed)
        loss, gradient = loss_and_gradient(theirs, inputs)
        our_loss, our_gradient = loss_and_gradient(ours, inputs)
        torch.testing.assert_close(our_loss, loss, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(our_gradient, gradient, rtol=1e-12, atol=1e-14)


def test_the_cases_above_cut_and_cap(tiny: Path, tmp_path: Path) -> None:
    """Parity would be empty if no token of its inputs were cut."""
    ours = trainer(KlampTrainer, KlampConfig, tiny, tmp_path, num_iterations=2, spec="grpo()")
    _, gradient = loss_and_gradient(ours, loss_inputs(0))
    removed = (gradient == 0) & loss_inputs(0)["completion_mask"].bool()
    assert 5 <= int(removed.sum()) <= 25


@pytest.mark.parametrize("index", [0, 1, 3], ids=["grpo", "dapo", "cispo"])
def test_parity_over_a_whole_run(index: int, tiny: Path, tmp_path: Path) -> None:
    """Three off-policy optimizer steps of both trainers, from generation to the optimizer, take equal gradients."""
    spec, options = PARITY[index]
    theirs = gradients(GRPOTrainer, GRPOConfig, tiny, tmp_path, num_iterations=3, **options)
    ours = gradients(KlampTrainer, KlampConfig, tiny, tmp_path, num_iterations=3, spec=spec)
    assert len(theirs) == 3
    for one, other in zip(theirs, ours, strict=True):
        assert relative(one, other) < 1e-5


# --- deliberate differences -----------------------------------------------------------------------------------


def test_token_mean_divides_by_the_tokens_of_its_own_window(tiny: Path, tmp_path: Path) -> None:
    """TRL divides by the mean window of the generation batch; we by the window that is summed."""
    inputs = loss_inputs(1)
    tokens = int(inputs["completion_mask"].sum())
    inputs["num_items_in_batch"] = torch.tensor(4 * tokens + 20)  # four windows, of which this one is short
    options = {"steps_per_generation": 4, "per_device_train_batch_size": 8}
    theirs = trainer(GRPOTrainer, GRPOConfig, tiny, tmp_path, loss_type="dapo", epsilon_high=0.28, **options)
    ours = trainer(KlampTrainer, KlampConfig, tiny, tmp_path, spec="dapo()", **options)
    loss, _ = loss_and_gradient(theirs, inputs)
    exact, _ = loss_and_gradient(ours, inputs)
    torch.testing.assert_close(loss * (tokens + 5.0) / tokens, exact, rtol=1e-12, atol=0.0)


def test_an_empty_row_does_not_count_unless_asked(tiny: Path, tmp_path: Path) -> None:
    inputs = loss_inputs(2, empty_row=True)
    theirs = trainer(GRPOTrainer, GRPOConfig, tiny, tmp_path, loss_type="grpo", num_iterations=2)
    as_trl = trainer(
        KlampTrainer, KlampConfig, tiny, tmp_path, spec="grpo(aggregate=sequence_mean(rows=all))", num_iterations=2
    )
    ours = trainer(KlampTrainer, KlampConfig, tiny, tmp_path, spec="grpo()", num_iterations=2)
    loss, _ = loss_and_gradient(theirs, inputs)
    torch.testing.assert_close(loss_and_gradient(as_trl, inputs)[0], loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(loss_and_gradient(ours, inputs)[0], loss * 8 / 7, rtol=1e-12, atol=1e-14)


def test_trl_epsilon_high_is_cispos_absolute_cap(tiny: Path, tmp_path: Path) -> None:
    """TRL's default epsilon_high (0.2) would cap every weight at 0.2; a cap below 1 is refused here."""
    with pytest.raises(UserError, match="bounds are absolute"):
        trainer(KlampTrainer, KlampConfig, tiny, tmp_path, spec="cispo_absolute(high=0.2)")


# --- law 4, end to end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mean", ["token_mean", "sequence_mean", "sequence_sum(divisor=10)", "prompt_mean", "sequence_mean(rows=all)"]
)
def test_micro_batches_do_not_change_the_gradient(mean: str, tiny: Path, tmp_path: Path) -> None:
    """One optimizer step on the same 64 completions, cut into 1, 2, 4 and 8 micro-batches."""
    found = {
        cuts: gradients(
            KlampTrainer, KlampConfig, tiny, tmp_path, spec=f"atr_grpo(aggregate={mean})", max_steps=1, num_generations=8,
            per_device_train_batch_size=64 // cuts, gradient_accumulation_steps=cuts, num_iterations=2,
        )[0]
        for cuts in (1, 2, 4, 8)
    }  # fmt: skip
    assert float(found[1].norm()) > 0.1
    for cuts in (2, 4, 8):
        assert relative(found[1], found[cuts]) < 1e-6


def test_metrics_are_sums_over_the_step(tiny: Path, tmp_path: Path) -> None:
    """The logged shares and means of a step do not depend on its cut either."""
    logs = []
    for cuts in (1, 4):
        made = trainer(
            KlampTrainer, KlampConfig, tiny, tmp_path, spec="atr_grpo()", max_steps=2, num_iterations=2,
            per_device_train_batch_size=32 // cuts, gradient_accumulation_steps=cuts,
        )  # fmt: skip
        made.train()
        logs.append(made.shown)
    assert logs[0]["guard/removed_high_share"] > 0.0
    for name in ("guard/removed_low_share", "guard/removed_high_share", "batch/tokens_count", "policy/ratio_histogram"):
        assert logs[0][name] == pytest.approx(logs[1][name], abs=0.02), name
    assert logs[0]["batch/tokens_count"] == logs[1]["batch/tokens_count"]


@pytest.mark.parametrize("mean", ["token_mean", "prompt_mean"])
def test_ranks_do_not_change_the_gradient(mean: str, tiny: Path, tmp_path: Path) -> None:
    """One optimizer step on the same completions by one process and by two (gloo), with uneven token counts."""
    found = []
    for ranks in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        script = [str(Path(__file__).parent / "ranks.py"), str(tiny), str(tmp_path), f"atr_grpo(aggregate={mean})"]
        done = subprocess.run(
            command + script, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(torch.load(tmp_path / f"ranks-{ranks}.pt", weights_only=True))
    assert float(found[0]["gradient"].norm()) > 0.05
    assert relative(found[0]["gradient"], found[1]["gradient"]) < 1e-6
    for name, value in found[0]["log"].items():
        assert found[1]["log"][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


# --- what travels along with the completions ------------------------------------------------------------------


def test_tied_groups_get_exactly_no_signal(tiny: Path, tmp_path: Path) -> None:
    """The float32 mean of eight 0.7 is not 0.7; divided by a tiny std it would be a spurious advantage."""
    made = trainer(
        KlampTrainer, KlampConfig, tiny, tmp_path, reward=lambda completions, **k: [0.7] * len(completions),
        num_generations=8, max_steps=1,
    )  # fmt: skip
    made.train()
    entry = made.state.log_history[0]
    assert entry["grad_norm"] == 0.0
    assert entry["batch/zero_advantage_share"] == 1.0
    assert entry["train/tied_groups_share"] == 1.0
    assert made.shown["guard/removed_active_share"] is None


def test_unscored_completions_are_excluded_and_counted(tiny: Path, tmp_path: Path) -> None:
    def half(completions: list[str], **columns: Any) -> list[float | None]:
        return [None if i % 2 else r for i, r in enumerate(digits_reward([], completions))]

    made = trainer(KlampTrainer, KlampConfig, tiny, tmp_path, reward=half, max_steps=1)
    made.train()
    assert made.state.log_history[0]["train/unscored_share"] == 0.5
    assert made.state.log_history[0]["batch/zero_advantage_share"] >= 0.4


def test_groups_and_rewards_are_shuffled_with_their_rows(tiny: Path, tmp_path: Path) -> None:
    """Advantages recomputed from the group ids and rewards of all slices are the ones that arrive."""
    seen: list[dict[str, torch.Tensor]] = []
    made = trainer(
        KlampTrainer, KlampConfig, tiny, tmp_path, steps_per_generation=2, max_steps=2,
        recorder=lambda trainer, inputs, batch, out: seen.append(inputs),
    )  # fmt: skip
    made.train()
    group, reward, given = (torch.cat([part[name] for part in seen]) for name in ("group", "reward", "advantages"))
    assert sorted(torch.cat([part["row"] for part in seen]).tolist()) == list(range(32))
    for one in group.unique():
        mine = reward[group == one]
        expected = (mine - mine.mean()) / (mine.std() + 1e-4)
        torch.testing.assert_close(given[group == one], expected, rtol=1e-4, atol=1e-5)


def test_truncated_completions_leave_the_count(tiny: Path, tmp_path: Path) -> None:
    """With TRL's mask_truncated_completions a truncated row counts neither above nor below the line."""
    seen: list[Any] = []
    made = trainer(
        KlampTrainer, KlampConfig, tiny, tmp_path, mask_truncated_completions=True, max_steps=1,
        recorder=lambda trainer, inputs, batch, out: seen.append((batch, trainer._window_stats)),
    )  # fmt: skip
    made.train()
    batch, stats = seen[0]
    alive = int(batch.mask.any(dim=1).sum())
    assert alive < 16
    assert stats.counts.tolist() == [int(batch.mask.sum()), alive, 16, 1]


# --- sampler and trainer --------------------------------------------------------------------------------------


def rollout(missing: bool) -> Any:
    """A sampler of our own that records log-probs: uniform letters, 0.1 nat off, one row with a missing value."""

    def sample(prompts: list[Any], made: Any) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(made.state.global_step)
        ids = torch.randint(4, 99, (len(prompts), 6), generator=draw).tolist()
        made.model.eval()
        prompt = [made.processing_class(text)["input_ids"] for text in prompts]
        full = torch.tensor([p + c for p, c in zip(prompt, ids, strict=True)])
        with torch.no_grad():
            logp = made.model(full).logits.log_softmax(-1)
        picked = logp[:, len(prompt[0]) - 1 : -1].gather(2, torch.tensor(ids)[..., None])[..., 0] + 0.1
        values = picked.tolist()
        if missing:
            values[0][2] = None
        made.model.train()
        return {"prompt_ids": prompt, "completion_ids": ids, "logprobs": values}

    return sample


@pytest.mark.filterwarnings("ignore")
def test_a_spec_on_the_sampler_sees_its_log_probs(tiny: Path, tmp_path: Path) -> None:
    """old/rollout of a response is e^-0.6 for six tokens 0.1 apart; the weight of every kept token."""
    seen: list[Any] = []
    made = trainer(
        KlampTrainer, KlampConfig, tiny, tmp_path, spec="dapo() + sequence_mask(high=3.0)", num_iterations=2, max_steps=1,
        rollout_func=rollout(missing=True), recorder=lambda trainer, inputs, batch, out: seen.append((batch, out)),
    )  # fmt: skip
    made.train()
    batch, out = seen[0]
    assert int(batch.missing_rows) == 1
    gone = (~batch.mask).all(dim=1)
    assert int(gone.sum()) == 1
    expected = batch.advantages.expand(batch.shape)[~gone] * torch.exp(torch.tensor(-0.6))
    torch.testing.assert_close(out.grad_policy[~gone], expected, rtol=2e-4, atol=1e-6)
    assert made.state.log_history[0]["batch/missing_rows_count"] == 1


def test_vllms_default_correction_is_translated_not_dropped() -> None:
    config = KlampConfig(output_dir="x", use_vllm=True, bf16=False, use_cpu=True)
    assert str(config.resolved_spec) == "atr_grpo(delta=0.02) + sequence_mask(high=3.0)"
    assert config.vllm_importance_sampling_correction is False
    plain = KlampConfig(output_dir="x", use_vllm=True, correction=False, bf16=False, use_cpu=True)
    assert str(plain.resolved_spec) == "atr_grpo(delta=0.02)"
    own = KlampConfig(
        output_dir="x", use_vllm=True, bf16=False, use_cpu=True,
        spec="dapo() + factor(transform=cap(high=2.0), ratio='old/rollout')",
    )  # fmt: skip
    assert str(own.resolved_spec) == own.spec


# --- refusals and warnings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"epsilon": 0.3}, r"grpo\(epsilon=0.3\)"),
        ({"epsilon_high": 0.28}, r"dapo\(epsilon_high=0.28\)"),
        ({"loss_type": "cispo"}, r"cispo_absolute\(\)"),
        ({"loss_type": "vespo"}, r"vespo\(\)"),
        ({"top_entropy_quantile": 0.2}, r"entropy_below\(quantile=0.8\)"),
        ({"delta": 4.0}, r"dual_clip\(c=4.0\)"),
        ({"importance_sampling_level": "sequence"}, r"gspo\(\)"),
        ({"beta": 0.04}, r"kl_reference\(beta=0.04\)"),
        ({"entropy_coef": 0.01}, r"entropy_bonus\(coefficient=0.01\)"),
        ({"off_policy_mask_threshold": 0.5}, r"opsm\(delta=0.5\)"),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, "steps_per_generation to a multiple"),
    ],
)
def test_options_that_fight_the_spec_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        KlampConfig(output_dir="x", bf16=False, use_cpu=True, **options)


def test_an_option_said_in_python_is_refused_even_at_trls_default() -> None:
    """A ported script that says loss_type='dapo', TRL's default, must not train something else in silence."""
    with pytest.raises(UserError, match=r"dapo\(\)"):
        KlampConfig(output_dir="x", bf16=False, use_cpu=True, loss_type="dapo")
    config = KlampConfig(output_dir="x", bf16=False, use_cpu=True, spec="dr_grpo()", max_completion_length=9)
    assert str(config.resolved_spec) == "dr_grpo(aggregate=sequence_sum(divisor=9.0))"


def test_a_spec_that_the_trainer_cannot_feed_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs logp_rollout"):
        trainer(KlampTrainer, KlampConfig, tiny, tmp_path, spec="grpo() + sequence_mask()")


def test_a_region_that_cannot_act_is_said(tiny: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="steps_per_generation=4"):
        trainer(KlampTrainer, KlampConfig, tiny, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer(KlampTrainer, KlampConfig, tiny, tmp_path, steps_per_generation=2)
        trainer(KlampTrainer, KlampConfig, tiny, tmp_path, spec="reinforce()")


def test_the_divisor_of_dr_grpo_is_the_length_limit() -> None:
    config = KlampConfig(output_dir="x", bf16=False, use_cpu=True, spec="dr_grpo()", max_completion_length=77)
    assert config.resolved_spec.mean.divisor == 77.0


def test_an_adaptive_penalty_follows_the_step(tiny: Path, tmp_path: Path) -> None:
    """beta doubles after a step whose mean k3 exceeded 1.5 target, and its state is in the checkpoint."""
    made = trainer(
        KlampTrainer, KlampConfig, tiny, tmp_path, spec="ppo_kl_penalty(beta=0.5, target=1e-9)", num_iterations=3,
        max_steps=3, save_strategy="steps", save_steps=3,
    )  # fmt: skip
    made.train()
    # Step 1 is on-policy (k3 = 0): beta halves; steps 2 and 3 are far above the target: it doubles twice.
    assert made.objective_state == {"beta": 1.0}
    state = json.loads((tmp_path / "checkpoint-3" / "klamp_state.json").read_text())
    assert state["objective"] == {"beta": 1.0}
    assert state["step"] == 3
