"""Small real parts for tests of training: a random Qwen3 with a character tokenizer, and real TRL runs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_tiny_model(folder: Path, *, chat: bool = False) -> Path:
    """A Hugging Face directory with a random Qwen3 of 30 thousand parameters and its own tokenizer."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", "\n", *map(chr, range(32, 127))])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0,
        max_position_embeddings=512,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def digits_reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """A reward with variance from the first step: the number of digits, and a fraction by length."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [float(sum(c.isdigit() for c in text)) + 0.1 * (len(text) % 7) for text in texts]


def prompts(count: int = 64) -> Dataset:
    rng = random.Random(0)
    rows = [{"prompt": "".join(rng.choices("0123456789", k=5)) + "=", "answer": "1"} for _ in range(count)]
    return Dataset.from_list(rows)


class Gradients(TrainerCallback):  # type: ignore[misc]
    """Keeps the whole gradient of each optimizer step, before clipping."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps.append(torch.cat([p.grad.flatten() for p in model.parameters()]).clone())


def trainer(kind: Any, config_kind: Any, model: Path, out: Path, *, reward: Any = digits_reward, **options: Any) -> Any:
    """A trainer of either library on the tiny model."""
    extra = {name: options.pop(name) for name in ("rollout_func", "recorder", "peft_config") if name in options}
    settings: dict[str, Any] = {
        "output_dir": str(out), "per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 8,
        "learning_rate": 1e-2, "max_steps": 3, "report_to": "none", "bf16": False, "activation_checkpointing": False,
        "use_cpu": True, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "seed": 3,
    } | options  # fmt: skip
    return kind(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=config_kind(**settings),
        train_dataset=prompts(),
        processing_class=AutoTokenizer.from_pretrained(model),
        **extra,
    )


def gradients(kind: Any, config_kind: Any, model: Path, out: Path, **options: Any) -> list[torch.Tensor]:
    """The gradient of every optimizer step of a real run."""
    made = trainer(kind, config_kind, model, out, **options)
    kept = Gradients()
    made.add_callback(kept)
    made.train()
    return kept.steps


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm())


def loss_inputs(seed: int = 0, rows: int = 8, width: int = 6, *, empty_row: bool = False) -> dict[str, torch.Tensor]:
    """What TRL hands to ``_compute_loss`` in the middle of a rollout, in float64."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=draw)
    if empty_row:
        lengths[0] = 0
    mask = (torch.arange(width)[None] < lengths).long()
    old = -3.0 * torch.rand(rows, width, generator=draw, dtype=torch.float64) - 0.1
    return {
        "prompt_ids": torch.ones(rows, 2, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 2, dtype=torch.long),
        "completion_ids": torch.ones(rows, width, dtype=torch.long),
        "completion_mask": mask,
        "advantages": torch.randn(rows, generator=draw, dtype=torch.float64),
        "old_per_token_logps": old,
        "ref_per_token_logps": old + 0.3 * torch.randn(rows, width, generator=draw, dtype=torch.float64),
        "new": old + 0.3 * torch.randn(rows, width, generator=draw, dtype=torch.float64),
        "num_items_in_batch": mask.sum(),
        "group": torch.arange(rows) // 4,
        "row": torch.arange(rows),
    }


def loss_and_gradient(made: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A trainer's own loss and its gradient in the new log-probs, with the model's forward replaced by them."""
    new = inputs["new"].clone().requires_grad_(True)
    made._get_per_token_logps_and_entropies = lambda *a, **k: (new, torch.ones_like(new), None)
    made.current_gradient_accumulation_steps = made.args.gradient_accumulation_steps
    made.model.train()
    if hasattr(made, "objective"):
        made._window_stats = made.objective.stats(made._asked(inputs), made.objective_state)
    loss = made._compute_loss(made.model, inputs)
    loss.backward()
    assert new.grad is not None
    return loss.detach(), new.grad
