"""One optimizer step of a small random model on the CPU, in the place of the model and the machine that a run is for."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from klamp.errors import UserError
from klamp.train.problem import Problem

_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
          "num_key_value_heads": 1, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4,
          "num_local_experts": 4, "num_experts_per_tok": 2}  # fmt: skip

# What only the real machine can do, and what the twin does instead.
ONLY_THERE: dict[str, Any] = {
    "use_vllm": False, "bf16": False, "fp16": False, "tf32": None, "optim": "adamw_torch", "torch_compile": False,
    "deepspeed": None, "fsdp": None, "fsdp_config": None, "use_liger_kernel": False,
    "use_transformers_continuous_batching": False, "report_to": "none", "push_to_hub": False,
}  # fmt: skip

PLAIN_CHAT = (
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def one_step(lora: int | None, asked: Problem, config: Any, model_config: Any, tokenizer: Any) -> dict[str, Any]:
    """One optimizer step with the same spec by a small random model of the same class."""
    from datasets import Dataset
    from transformers import PrinterCallback

    from klamp.train import adapters
    from klamp.train.trainer import KlampTrainer

    with tempfile.TemporaryDirectory(prefix="klamp-dry-run-") as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = _small_config(config, str(Path(directory) / "run"))
        twin = _twin(model_config, tokenizer, Path(directory) / "twin", config.trust_remote_code)
        start = time.monotonic()
        trainer = KlampTrainer(
            model=str(Path(directory) / "twin"),
            reward_funcs=_with_signal(asked.reward),
            args=small,
            train_dataset=Dataset.from_list(asked.train[: 4 * small.generation_batch_size // small.num_generations]),
            processing_class=tokenizer,
            peft_config=None if lora is None else adapters.low_rank(lora, model_config),
            rollout_func=_sample if config.use_vllm else None,
        )
        trainer.remove_callback(PrinterCallback)  # stdout is for the report
        trainer.train()
        seconds = time.monotonic() - start
    logged: dict[str, Any] = {}
    for line in reversed(trainer.state.log_history):
        logged = line | logged
    gradient = float(logged.get("grad_norm", math.nan))
    if not math.isfinite(gradient):
        raise UserError(f"the step of the small twin gave a gradient of norm {gradient}: {config.resolved_spec}")
    return {
        "twin": twin,
        "seconds": round(seconds, 2),
        "grad_norm": gradient,
        "loss": logged.get("loss"),
        "shrunk": {
            name: [getattr(config, name), getattr(small, name)]
            for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
                         "generation_batch_size", "max_completion_length", "max_steps", *ONLY_THERE)
            if getattr(config, name) != getattr(small, name)
        },
    }  # fmt: skip


def _small_config(config: Any, out: str) -> Any:
    """The configuration of the twin: the same generations and updates per rollout, as few micro-batches as give them."""
    from klamp.train.config import KlampConfig

    shared = math.gcd(config.steps_per_generation, config.gradient_accumulation_steps)
    times = min(2, shared)  # two micro-batches in a step where there are several, to sum over
    slices = config.steps_per_generation // shared * times
    values = {item.name: getattr(config, item.name) for item in dataclasses.fields(config) if item.init}
    values |= ONLY_THERE | {
        "output_dir": out, "spec": str(config.resolved_spec), "correction": False, "use_cpu": True, "max_steps": 1,
        "per_device_train_batch_size": 2 * config.num_generations // math.gcd(config.num_generations, slices),
        "gradient_accumulation_steps": config.gradient_accumulation_steps // shared * times,
        "steps_per_generation": slices, "generation_batch_size": None, "max_completion_length": 8,
        "model_init_kwargs": {"use_safetensors": True}, "save_strategy": "no", "eval_strategy": "no",
        "logging_steps": 1, "disable_tqdm": True, "warmup_steps": 0, "pad_to_multiple_of": None,
        "generation_kwargs": None if config.use_vllm else config.generation_kwargs,
        "hub_token": None, "log_completions": False, "run_name": None,
    }  # fmt: skip
    return KlampConfig(**values)


def _twin(model_config: Any, tokenizer: Any, folder: Path, trust_remote_code: bool) -> str:
    """Write a small random model of the same class; returns what it is."""
    import torch
    from transformers import AutoModelForCausalLM

    names = model_config.attribute_map
    facts = model_config.to_dict()
    sizes = {**_SMALL, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id,
             "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}  # fmt: skip
    sizes = {names.get(name, name): value for name, value in sizes.items()}
    small = facts | {name: value for name, value in sizes.items() if name in facts} | {"dtype": "float32"}
    if facts.get("layer_types"):
        small["layer_types"] = facts["layer_types"][-_SMALL["num_hidden_layers"] :]
    torch.manual_seed(0)
    try:
        made = type(model_config).from_dict(small)
        model = AutoModelForCausalLM.from_config(made, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UserError(f"no small twin of a {model_config.model_type} can be made: {error}") from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"{type(model).__name__} of {sum(p.numel() for p in model.parameters()):,} parameters"


def _with_signal(reward: Callable[..., Any]) -> Callable[..., list[float]]:
    """The reward, plus a made-up part: a random model is never right, and equal rewards would give no gradient."""

    def reward_and_length(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        found = reward(prompts, completions, **columns)
        return [(value or 0.0) + 0.1 * (row % 3) for row, value in enumerate(found)]

    return reward_and_length


def _sample(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """What vLLM would give: completions, and the log-probs that they were sampled with."""
    import torch

    ids, _, fields = trainer._tokenize_prompts(prompts)
    completions, _ = trainer._generate_single_turn(ids, None, fields, trainer.num_generations)
    logps = []
    with torch.no_grad():
        for prompt, completion in zip(ids, completions, strict=True):
            row = torch.tensor([[*prompt, *completion]])
            found, _, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model, row, torch.ones_like(row), len(completion)
            )
            logps.append(found[0].tolist())
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logps}
