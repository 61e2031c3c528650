"""One optimizer step of KlampTrainer on fixed completions, run by torchrun; rank 0 saves the gradient.

torchrun --nproc_per_node N tests/ranks.py MODEL OUT SPEC
"""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from train_parts import Gradients, trainer

from klamp.train import KlampConfig, KlampTrainer


def sample(prompts: list[Any], made: Any) -> dict[str, Any]:
    """Completions that depend on the prompt and the place in its group alone, of uneven lengths on uneven ranks."""
    ids, seen = [], dict.fromkeys(prompts, 0)
    for prompt in prompts:
        draw = torch.Generator().manual_seed(zlib.crc32(prompt.encode()) + seen[prompt])
        seen[prompt] += 1
        length = int(torch.randint(1, 8, (1,), generator=draw)) if int(prompt[0]) % 2 else 7
        ids.append(torch.randint(4, 99, (length,), generator=draw).tolist())
    encoded = [made.processing_class(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": encoded, "completion_ids": ids, "logprobs": [[-4.6] * len(one) for one in ids]}


def main() -> None:
    model, out, spec = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    made = trainer(
        KlampTrainer, KlampConfig, model, out / "run", spec=spec, max_steps=1, num_iterations=2, rollout_func=sample,
        per_device_train_batch_size=16 // ranks, gradient_accumulation_steps=2,
    )  # fmt: skip
    kept = Gradients()
    made.add_callback(kept)
    made.train()
    if made.accelerator.is_main_process:
        log = {k: v for k, v in made.state.log_history[0].items() if k.startswith(("guard/", "batch/", "policy/"))}
        torch.save({"gradient": kept.steps[0], "log": log}, out / f"ranks-{ranks}.pt")


if __name__ == "__main__":
    main()
