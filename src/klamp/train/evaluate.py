"""Held-out accuracy: greedy and sampled answers to fixed prompts, without touching the training's random state."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from klamp.rewards import RewardFunction, Verdict
from klamp.statistics import exact_mcnemar

Row = dict[str, Any]


@dataclass(frozen=True)
class Answers:
    """Completions of the held-out rows and the verdicts on them; accuracy is the share of correct among the scored.

    Each row stands there ``samples`` times in succession.
    """

    rows: Sequence[Row]
    completions: list[str]
    verdicts: list[Verdict]
    samples: int = 1

    @property
    def correct(self) -> list[bool | None]:
        """Row by row; None where unscored."""
        return [None if v.result == "unscored" else v.result == "correct" for v in self.verdicts]

    @property
    def accuracy(self) -> float | None:
        scored = [one for one in self.correct if one is not None]
        return sum(scored) / len(scored) if scored else None

    @property
    def counts(self) -> list[int]:
        """Correct answers of each question."""
        return [sum(map(bool, found)) for found in self._by_question(self.correct)]

    @property
    def distinct(self) -> list[int]:
        """Different texts among the correct answers of each question."""
        right = [text.strip() if one else None for text, one in zip(self.completions, self.correct, strict=True)]
        return [len(set(found) - {None}) for found in self._by_question(right)]

    def _by_question(self, values: list[Any]) -> list[list[Any]]:
        return [values[start : start + self.samples] for start in range(0, len(values), self.samples)]


def answer(
    model: Any, tokenizer: Any, rows: Sequence[Row], reward: RewardFunction, *, greedy: bool, max_new_tokens: int,
    temperature: float = 1.0, batch_size: int = 256, seed: int = 0, chat: dict[str, Any] | None = None, samples: int = 1,
) -> Answers:  # fmt: skip
    """Generate ``samples`` completions per row and score them; sampling is from the full distribution at ``temperature``."""
    rows = [row for row in rows for _ in range(samples)]
    completions: list[str] = []
    tokens: list[list[int]] = []
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
            drawn = ids[:, inputs["input_ids"].shape[1] :]
            completions += tokenizer.batch_decode(drawn, skip_special_tokens=True)
            tokens += [up_to_end(one, tokenizer.eos_token_id) for one in drawn.tolist()]
    model.train(training)
    return Answers(rows, completions, score(reward, rows, completions, tokens), samples)


def up_to_end(ids: list[int], end: int | None) -> list[int]:
    """A completion's own tokens, its end token among them; what follows is padding."""
    return ids[: ids.index(end) + 1] if end in ids else ids


def paired_outcomes(path: Path) -> dict[str, dict[str, float]] | None:
    """The first evaluation of ``heldout.jsonl`` against the last, question by question: gained, lost, McNemar's exact p."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if len(lines) < 2:
        return None
    found = {}
    for name in ("greedy", "sampled"):
        pairs = Counter(zip(lines[0][name], lines[-1][name], strict=True))
        gained, lost = pairs["0", "1"], pairs["1", "0"]
        found[name] = {"gained": gained, "lost": lost, "p": exact_mcnemar(lost, gained)}
    return found


def score(
    reward: RewardFunction, rows: Sequence[Row], completions: list[str], tokens: Sequence[list[int]]
) -> list[Verdict]:
    """What the part of the reward that decides says; what shapes a completion (its length) has no say here."""
    prompts = [row["prompt"] for row in rows]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"} if rows else {}
    answers: list[Any] = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, completions, strict=True)
    ]
    return reward.solved_by.verdicts(prompts, answers, **columns, completion_ids=tokens) if rows else []


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
