"""Token records of a run: one row per completion and optimizer step, from what the trainer's loss just saw."""

from __future__ import annotations

from typing import Any

import torch

from klamp.batch import Batch
from klamp.objective import LossOutput
from klamp.records import RecordWriter


def recorder(writer: RecordWriter) -> Any:
    """A ``KlampTrainer(recorder=...)`` that writes each micro-batch's completions."""

    def record(trainer: Any, inputs: dict[str, Any], batch: Batch, out: LossOutput) -> None:
        step = trainer.state.global_step
        rows = [int(row) for row in inputs["row"]]
        chosen = [i for i, row in enumerate(rows) if writer.selects(step, row)]
        if not chosen:
            return
        lengths = inputs["completion_mask"].sum(dim=1)
        per_token: dict[str, Any] = {
            "token_ids": inputs["completion_ids"],
            "logp_new": batch.logp_new,
            "logp_old": inputs.get("old_per_token_logps"),
            "logp_rollout": inputs.get("sampling_per_token_logps"),
            "logp_ref": batch.logp_ref,
            "advantage": batch.advantages.expand(batch.shape),
            "mask": batch.mask,
            "entropy": batch.entropy,
            "kept": out.kept,
            "g": out.grad_policy,
        }
        host = {name: None if value is None else value.detach().cpu() for name, value in per_token.items()}
        writer.write(
            {
                "prompt_id": _prompt_id(inputs, i),
                "group": int(inputs["group"][i]),
                "row": rows[i],
                "step": step,
                "micro_step": trainer._step % trainer.current_gradient_accumulation_steps,
                "reward": None if torch.isnan(inputs["reward"][i]) else float(inputs["reward"][i]),
                **{name: None if v is None else v[i, : int(lengths[i])].tolist() for name, v in host.items()},
            }
            for i in chosen
        )

    return record


def _prompt_id(inputs: dict[str, Any], i: int) -> str:
    """A name that is stable over the run: a checksum of the prompt's tokens."""
    import hashlib

    ids = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].cpu()
    return hashlib.blake2b(",".join(map(str, ids.tolist())).encode(), digest_size=8).hexdigest()
