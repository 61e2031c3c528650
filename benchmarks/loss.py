"""What a loss costs: ours against TRL's own loss code, interleaved in one process, on [64, 1024] float32.

    python benchmarks/loss.py [--rounds N] [--json]

TRL's side is ``GRPOTrainer._compute_loss`` itself with its forward pass replaced by stored log-probs, so that both
sides start from the same tensors. Each side is timed with its backward pass to the log-probs; the ratio of medians
is what counts, for absolute times are noisy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from trl import GRPOTrainer

import klamp

SHAPE = (64, 1024)


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(SHAPE, generator=generator) * 3 - 0.05
    new = old + 0.15 * torch.randn(SHAPE, generator=generator)
    lengths = torch.randint(200, SHAPE[1] + 1, (SHAPE[0], 1), generator=generator)
    return {
        "new": new.clamp(max=-1e-3),
        "old": old,
        "advantages": torch.randn(SHAPE[0], generator=generator),
        "mask": torch.arange(SHAPE[1])[None] < lengths,
    }


def trl_loss(data: dict[str, torch.Tensor], loss_type: str = "grpo") -> Callable[[torch.Tensor], torch.Tensor]:
    """TRL's loss as a function of the new log-probs."""
    mask = data["mask"].long()
    ids = torch.zeros(SHAPE, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": mask[:, :1], "completion_ids": ids, "completion_mask": mask,
        "advantages": data["advantages"], "old_per_token_logps": data["old"], "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    held: dict[str, Any] = {}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (held["new"], held["entropy"], None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=0.0,
        importance_sampling_level="token", loss_type=loss_type, epsilon_low=0.2, epsilon_high=0.2, use_vllm=False,
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False, accelerator=Accelerator(cpu=True),
        args=SimpleNamespace(delta=None, steps_per_generation=1), _metrics={"train": defaultdict(list)},
        model=SimpleNamespace(training=True), max_completion_length=SHAPE[1],
    )  # fmt: skip

    def loss(new: torch.Tensor) -> torch.Tensor:
        held["new"], held["entropy"] = new, data["old"].neg()
        result: torch.Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
        return result

    return loss


def our_loss(
    data: dict[str, torch.Tensor], *, full: bool, spec: str = "grpo"
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Klamp's: loss, g and counts; ``full`` adds field checks, the KL, the entropy and the ratio histogram."""
    objective = klamp.Objective(spec, diagnostics=full)

    def loss(new: torch.Tensor) -> torch.Tensor:
        entropy = data["old"].neg() if full else None
        batch = klamp.Batch(new, data["old"], data["advantages"], data["mask"], entropy=entropy, validate=full)
        return objective(batch).loss

    return loss


def measure(
    sides: dict[str, Callable[[torch.Tensor], torch.Tensor]], new: torch.Tensor, rounds: int
) -> dict[str, float]:
    """Median milliseconds of loss and backward, the sides taking turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 5):
        for name, side in sides.items():
            leaf = new.clone().requires_grad_(True)
            start = time.perf_counter()
            side(leaf).backward()
            if turn >= 5:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    data = tensors()
    sides = {
        "trl": trl_loss(data),
        "klamp": our_loss(data, full=False),
        "klamp_full": our_loss(data, full=True),
    }
    torch.testing.assert_close(sides["klamp"](data["new"]), sides["trl"](data["new"]))
    found = measure(sides, data["new"], arguments.rounds)
    report = {
        "shape": list(SHAPE),
        "milliseconds": found,
        "ratio": found["klamp"] / found["trl"],
        "ratio_full": found["klamp_full"] / found["trl"],
        "threads": torch.get_num_threads(),
    }
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print(f"TRL {found['trl']:.2f} ms; loss, g and counts {found['klamp']:.2f} ms ({report['ratio']:.2f} x); "
              f"with checks and histogram {found['klamp_full']:.2f} ms ({report['ratio_full']:.2f} x)")  # fmt: skip


if __name__ == "__main__":
    main()
