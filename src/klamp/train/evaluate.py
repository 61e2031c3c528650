"""Held-out accuracy: greedy and sampled answers to fixed prompts, without touching the training's random state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Row = dict[str, Any]
Reward = Callable[..., "list[float | None]"]


@dataclass(frozen=True)
class Answers:
    """Completions of the held-out rows and their rewards; accuracy is the share with a reward of at least 1."""

    rows: Sequence[Row]
    completions: list[str]
    rewards: list[float | None]

    @property
    def accuracy(self) -> float | None:
        scored = [reward for reward in self.rewards if reward is not None]
        return sum(reward >= 1.0 for reward in scored) / len(scored) if scored else None


def answer(
    model: Any, tokenizer: Any, rows: Sequence[Row], reward: Reward, *, greedy: bool, max_new_tokens: int,
    temperature: float = 1.0, batch_size: int = 256, seed: int = 0, chat: dict[str, Any] | None = None,
) -> Answers:  # fmt: skip
    """Generate one completion per row and score it; sampling is from the full distribution at ``temperature``."""
    completions: list[str] = []
    devices = [model.device] if model.device.type == "cuda" else []
    training = model.training
    model.eval()
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed)
        for start in range(0, len(rows), batch_size):
            prompts = [row["prompt"] for row in rows[start : start + batch_size]]
            inputs = encode(tokenizer, prompts, chat or {}).to(model.device)
            sampling: dict[str, Any] = {"do_sample": False} if greedy else {
                "do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0,
            }  # fmt: skip
            ids = model.generate(
                **inputs, **sampling, max_new_tokens=max_new_tokens, pad_token_id=tokenizer.pad_token_id
            )
            completions += tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    model.train(training)
    return Answers(rows, completions, score(reward, rows, completions))


def score(reward: Reward, rows: Sequence[Row], completions: list[str]) -> list[float | None]:
    prompts = [row["prompt"] for row in rows]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"} if rows else {}
    answers: list[Any] = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, completions, strict=True)
    ]
    return list(reward(prompts=prompts, completions=answers, **columns)) if rows else []


def encode(tokenizer: Any, prompts: list[Any], chat: dict[str, Any]) -> Any:
    """Left-padded ids of prompts: text as it is, chat messages through the tokenizer's template."""
    texts = [
        prompt
        if isinstance(prompt, str)
        else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **chat)
        for prompt in prompts
    ]
    plain = all(isinstance(prompt, str) for prompt in prompts)
    return tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=plain,
                     return_token_type_ids=False)  # fmt: skip
