"""Divergences over the vocabulary in the real trainer, against the logits of both policies written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_divergences import written
from torch import Tensor
from train_parts import gradients, relative, save_tiny_model, trainer
from transformers import AutoModelForCausalLM

import klamp
from klamp.train import KlampConfig, KlampTrainer
from klamp.train import vocabulary as room

SPEC = (
    "trust_region('exact_kl_old_new', 1e-3, base='dapo') + guard(measure='topk_tv', radius=0.01, top_k=5)"
    " + divergence_penalty(measure='exact_js', beta=0.5)"
)
TWICE = {"num_generations": 4, "num_iterations": 2, "max_steps": 4, "steps_per_generation": 2, "temperature": 0.8}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


class Witness:
    """Compares each step's divergences with those of the models at the rollout and now."""

    def __init__(self, model: Path) -> None:
        self.old = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.steps: list[dict[str, Tensor]] = []

    def watch(self, made: Any) -> None:
        score = made._generate_and_score_completions

        def scored(inputs: Any) -> Any:
            self.old.load_state_dict(made.model.state_dict())
            return score(inputs)

        made._generate_and_score_completions = scored

    def __call__(self, made: Any, inputs: dict[str, Any], batch: klamp.Batch, out: Any) -> None:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        width = inputs["completion_ids"].shape[1]
        logs = []
        for model in (made.model, self.old):
            with torch.no_grad():
                logits = (
                    model(input_ids=ids, attention_mask=attention).logits[:, -width - 1 : -1].double()
                    / made.temperature
                )
            logs.append(torch.log_softmax(logits, -1)[batch.mask])
        logq, logp = logs
        sampled = inputs["completion_ids"][batch.mask][:, None]
        boxed = (
            torch.zeros_like(logp, dtype=torch.bool).scatter(1, logp.topk(5).indices, True).scatter(1, sampled, True)
        )
        merged = [
            torch.cat([one.masked_fill(~boxed, -1e9), one.masked_fill(boxed, -1e9).logsumexp(1, keepdim=True)], 1)
            for one in logs
        ]
        wanted = {"exact_kl_old_new": written("kl_old_new", logq, logp), "exact_js": written("js", logq, logp),
                  "topk_tv": written("tv", *merged)}  # fmt: skip
        for name, values in wanted.items():
            assert (batch.divergences[name][batch.mask] - values).abs().max() < 2e-6
            assert (batch.divergences[name][~batch.mask] == 0).all()
        self.steps.append({name: values.mean() for name, values in wanted.items()} | {"kept": out.kept.sum()})


@pytest.mark.parametrize("options", [{}, {"old_states_offload": True}, {"old_states_dtype": "float32"}])
def test_each_step_sees_both_policies_whole(options: dict[str, Any], tiny: Path, tmp_path: Path) -> None:
    witness = Witness(tiny)
    made = trainer(KlampTrainer, KlampConfig, tiny, tmp_path, spec=SPEC, recorder=witness, **TWICE, **options)
    witness.watch(made)
    made.train()
    assert len(witness.steps) == 4
    assert witness.steps[0]["exact_kl_old_new"] < 1e-12  # the first step of a rollout is on-policy
    assert witness.steps[1]["exact_kl_old_new"] > 1e-3


def test_kept_in_bfloat16_the_old_policy_is_nearly_itself(tiny: Path, tmp_path: Path) -> None:
    found: dict[str, list[Tensor]] = {}
    for dtype in ("auto", "bfloat16"):
        seen = found[dtype] = []
        made = trainer(
            KlampTrainer, KlampConfig, tiny, tmp_path, spec="trust_region('exact_kl_old_new', 0.02)", old_states_dtype=dtype,
            recorder=lambda made, inputs, batch, out, seen=seen: seen.append(batch.divergences["exact_kl_old_new"]), **TWICE,
        )  # fmt: skip
        made.train()
    for one, other in zip(*found.values(), strict=True):
        assert (one - other).abs().max() < 2e-3
    assert 0 < found["bfloat16"][0].max() < 1e-3


def test_a_region_that_cuts_nothing_leaves_the_gradient_as_it_was(tiny: Path, tmp_path: Path) -> None:
    """The log-probs of our kernel and of TRL's: the same run to rounding."""
    both = [
        gradients(KlampTrainer, KlampConfig, tiny, tmp_path, spec=spec, **TWICE)
        for spec in (
            "grpo()",
            "grpo() + guard(measure='exact_kl_old_new', radius=1e9) + guard(measure='topk_tv', radius=2.0)",
        )
    ]
    for one, other in zip(*both, strict=True):
        assert relative(one, other) < 1e-4
    assert relative(both[0][0], both[1][0]) < 3e-6


def test_with_one_step_per_rollout_the_old_policy_is_the_new_one(tiny: Path, tmp_path: Path) -> None:
    seen: list[Tensor] = []
    made = trainer(
        KlampTrainer, KlampConfig, tiny, tmp_path, spec=SPEC, max_steps=2,
        recorder=lambda made, inputs, batch, out: seen.extend(batch.divergences.values()),
    )  # fmt: skip
    made.train()
    assert len(seen) == 6
    assert all((values == 0).all() for values in seen)


def test_a_head_that_is_not_trained_is_not_copied(tiny: Path, tmp_path: Path) -> None:
    from peft import LoraConfig

    made = trainer(
        KlampTrainer,
        KlampConfig,
        tiny,
        tmp_path,
        spec="trust_region('exact_tv', 0.01)",
        peft_config=LoraConfig(r=2),
        **TWICE,
    )
    made.train()
    assert made.vocabulary.old_head[0].data_ptr() == made.model.get_base_model().lm_head.weight.data_ptr()


def test_resumed_within_a_rollout_the_run_is_the_same(tiny: Path, tmp_path: Path) -> None:
    weights = []
    for stop in (False, True):
        out = tmp_path / str(stop)
        made = trainer(KlampTrainer, KlampConfig, tiny, out, spec=SPEC, **TWICE, save_strategy="steps", save_steps=1)
        if stop:  # the second step of the first rollout was the last
            assert (tmp_path / "False" / "checkpoint-1" / "klamp_old_head.pt").exists()
            made.train(resume_from_checkpoint=str(tmp_path / "False" / "checkpoint-1"))
        else:
            made.train()
        weights.append(torch.cat([p.detach().flatten() for p in made.model.parameters()]))
    assert torch.equal(*weights)


def test_what_the_trainer_cannot_know_is_refused(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(klamp.UserError, match="the trainer has new/old alone"):
        KlampConfig(
            output_dir=str(tmp_path),
            spec="dapo() + guard(measure='exact_tv', radius=0.1, ratio='new/rollout')",
            use_cpu=True,
            bf16=False,
        )
    with pytest.raises(klamp.UserError, match="old_states_dtype='float8' is unknown"):
        KlampConfig(output_dir=str(tmp_path), old_states_dtype="float8", use_cpu=True, bf16=False)
    monkeypatch.setattr(room.trl_utils, "_ChunkedLogProbFunction", torch.nn.Identity)
    with pytest.raises(klamp.UserError, match="the output layer of TRL"):
        KlampConfig(output_dir=str(tmp_path), spec="dppo_topk_tv", use_cpu=True, bf16=False)
