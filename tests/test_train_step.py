"""Specs that ask the whole step first, in the real trainer: micro-batches, ranks, schedules, drops, turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from train_parts import gradients, relative, save_tiny_model, trainer

import klamp
from klamp.batch import segments
from klamp.train import KlampConfig, KlampTrainer

ASKING = [
    "clip_cov(share=0.1, low=0.05, high=9.0)",
    "kl_cov(share=0.1, coefficient=1.0)",
    "m2po(threshold=1e-4)",
    "grpo() + guard(region='nowhere', gate=entropy_below(quantile=0.8))",
    "real(tau=0.5)",
    "dapo() + guard(measure='k3', radius=1e-4, scope='group', cut_value='zero')",
    "trust_region('k3', 0.001, base=dapo()) + guard(ratio_low=0.97, ratio_high=1.03, gate='always', action='drop')",
    "grpo() + guard(measure='exact_tv', radius=0.1, gate='always', action='drop')",
    "dapo() + divergence_penalty(measure='exact_js', beta=3.0) + guard(measure='topk_tv', radius=0.001, top_k=4)",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("spec", ASKING)
def test_micro_batches_do_not_change_what_the_step_selects(spec: str, tiny: Path, tmp_path: Path) -> None:
    """The second optimizer step, off-policy, on the same 32 completions in 1, 2 and 8 micro-batches, with SGD."""
    found = {
        cuts: gradients(
            KlampTrainer, KlampConfig, tiny, tmp_path, spec=spec, max_steps=2, num_generations=4, num_iterations=2,
            optim="sgd", learning_rate=3.0, per_device_train_batch_size=32 // cuts, gradient_accumulation_steps=cuts,
        )[1]
        for cuts in (1, 2, 8)
    }  # fmt: skip
    assert float(found[1].norm()) > 1e-3
    for cuts in (2, 8):
        assert relative(found[1], found[cuts]) < 3e-6  # float32: the first step already differs by 1e-7


@pytest.mark.parametrize("spec", ["clip_cov(share=0.2, low=0.05, high=9.0) + tis(high=1.01, normalize=True)",
                                  "dapo() + rs_k3(radius=1e-4)"])  # fmt: skip
def test_ranks_do_not_change_what_the_step_selects(spec: str, tiny: Path, tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        script = [str(Path(__file__).parent / "ranks.py"), str(tiny), str(tmp_path), spec]
        done = subprocess.run(
            command + script, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(torch.load(tmp_path / f"ranks-{ranks}.pt", weights_only=True))
    assert float(found[0]["gradient"].norm()) > 0.01
    assert relative(found[0]["gradient"], found[1]["gradient"]) < 1e-6
    for name, value in found[0]["log"].items():
        assert found[1]["log"][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_one_more_forward_pass_only_where_the_step_needs_it(tiny: Path, tmp_path: Path) -> None:
    counts = {}
    for spec in ("grpo()", "clip_cov()"):
        made = trainer(KlampTrainer, KlampConfig, tiny, tmp_path, spec=spec, max_steps=1, num_iterations=2)
        calls, forward = [], made._forward
        made._forward = lambda *a, calls=calls, forward=forward: calls.append(1) or forward(*a)
        made.train()
        counts[spec] = len(calls)
    assert counts == {"grpo()": 1, "clip_cov()": 2}
    assert klamp.parse("clip_cov()").reads_new
    assert not klamp.parse("grpo() + rs_k3()").reads_new


def test_a_radius_follows_its_schedule_and_is_saved(tiny: Path, tmp_path: Path) -> None:
    made = trainer(
        KlampTrainer, KlampConfig, tiny, tmp_path, spec="atr_grpo(delta=linear(0.04, 0.01, steps=3))", num_iterations=2,
        max_steps=3, save_strategy="steps", save_steps=2,
    )  # fmt: skip
    made.train()
    assert made.objective_state == {"step": 3.0}
    state = json.loads((tmp_path / "checkpoint-2" / "klamp_state.json").read_text())
    assert state["objective"] == {"step": 2.0}
    again = trainer(
        KlampTrainer, KlampConfig, tiny, tmp_path, spec="atr_grpo(delta=linear(0.04, 0.01, steps=3))", num_iterations=2, max_steps=3,
    )  # fmt: skip
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.objective_state == {"step": 3.0}
    for one, other in zip(made.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_adaptive_radius_moves_to_its_target(tiny: Path, tmp_path: Path) -> None:
    """Nothing is removed on-policy, so the radius shrinks after step 1; then far more than the target is, and it widens."""
    spec = "atr_grpo(delta=adaptive(0.001, removed=0.001, rate=0.5))"
    made = trainer(KlampTrainer, KlampConfig, tiny, tmp_path, spec=spec, num_iterations=2, max_steps=2)
    made.train()
    shrunk = 0.001 * torch.exp(torch.tensor(-0.5, dtype=torch.float64)).item()
    grown = shrunk * torch.exp(torch.tensor(0.5, dtype=torch.float64)).item()
    assert made.objective_state == {"guard 0.low": pytest.approx(grown), "guard 0.high": pytest.approx(grown)}


def test_turns_are_the_runs_of_the_mask(tiny: Path, tmp_path: Path) -> None:
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 0], [1, 0, 1, 0, 1, 1, 1, 1]]).bool()
    assert torch.equal(segments(mask)[mask], torch.tensor([1, 1, 2, 2, 1, 2, 3, 3, 3, 3]))
    seen: list[Any] = []
    made = trainer(
        KlampTrainer, KlampConfig, tiny, tmp_path, spec="segment(epsilon=0.01)", num_iterations=2, max_steps=2,
        recorder=lambda trainer, inputs, batch, out: seen.append(batch),
    )  # fmt: skip
    made.train()
    assert all(torch.equal(batch.segment, segments(batch.mask)) for batch in seen)
