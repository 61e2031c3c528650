"""KlampTrainer: TRL's GRPOTrainer with the loss of a spec, and nothing else changed.

Generation, vLLM, PEFT, DeepSpeed and FSDP, logging and checkpoints stay TRL's. Added: the counts of the whole
optimizer step are summed before its first micro-batch, so that any cut into micro-batches and ranks gives the same
gradient; group ids travel with the completions; and a checkpoint resumes exactly, in the middle of a rollout too.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from klamp.batch import Batch, segments
from klamp.objective import LossOutput, Objective
from klamp.rewards import REASONS, verdict_counts
from klamp.stats import Stats
from klamp.tally import Tally
from klamp.train.config import KlampConfig
from klamp.train.vocabulary import Vocabulary, vocabulary

_STATE = "klamp_state.json"
_BUFFER = "klamp_rollout"
_HEAD = "klamp_old_head.pt"  # the old policy's output matrix, within a rollout
_WINDOW = "klamp_log"  # what was counted since the last log

OFFERS = frozenset(
    {"logp_ref", "entropy", "group", "row", "segment", "reward"}
)  # what batches have beside the policies

Recorder = Callable[["KlampTrainer", dict[str, Any], Batch, LossOutput], None]


class EpochSampler(RepeatSampler):  # type: ignore[misc]
    """TRL's sampler with an order that depends on the seed and the epoch alone, so that a resumed run repeats it."""

    def set_epoch(self, epoch: int) -> None:
        if self.shuffle:
            self.generator.manual_seed(self.seed + epoch)


class KlampTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer with ``args.spec`` as the policy loss. ``recorder`` is called with every micro-batch's outcome."""

    _tag_names = ("trl", "grpo", "klamp")

    def __init__(self, *args: Any, recorder: Recorder | None = None, **kwargs: Any) -> None:
        self.vocabulary: Vocabulary | None = None
        super().__init__(*args, **kwargs)
        config = self.args
        if not isinstance(config, KlampConfig):
            raise TypeError(f"KlampTrainer needs args=KlampConfig(...); got {type(config).__name__}")
        self.spec = config.resolved_spec
        self.vocabulary = vocabulary(self.spec, config.old_states_dtype, config.old_states_offload)
        self.spec.require(self._offers(config), "this trainer")
        self.objective = Objective(self.spec)
        self.objective_state = self.objective.init()
        self.recorder = recorder
        self.shown: dict[str, Any] = {}  # the latest of our metrics, with lists and nulls, which trackers cannot take
        self._tallies = {"train": Tally(), "eval": Tally()}
        self._window_tally = Tally()
        self._window_stats: Stats | None = None
        self._rewards: Tensor | None = None
        self._rollouts = 0
        self._kept: (
            dict[str, Tensor] | None
        ) = {}  # of the old policy, by the rollout that is being scored; None: not yet
        self._old_top: Tensor | None = None
        if not self.can_act(config):
            warnings.warn(
                f"there is one optimizer step per rollout, so new = old and no region of {self.spec} can act; set "
                f"steps_per_generation={4 * config.gradient_accumulation_steps} for four steps per rollout",
                stacklevel=2,
            )

    def can_act(self, config: KlampConfig) -> bool:
        """Whether some guard can ever cut: one on another ratio, or several steps per rollout."""
        return not self.spec.guards or config.updates_per_rollout > 1 or self.spec.acts_at_once

    def _offers(self, config: KlampConfig) -> frozenset[str]:
        rollout = {"logp_rollout"} if self.use_vllm or self.rollout_func is not None else set()
        return OFFERS | rollout | (frozenset() if self.vocabulary is None else self.vocabulary.offers)

    # --- what TRL scores: group ids and rewards travel along ------------------------------------------------

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        before = verdict_counts(self.reward_funcs)
        self._rewards = super()._calculate_rewards(*args, **kwargs)
        if self.model.training:
            self._note_verdicts(verdict_counts(self.reward_funcs) - before)
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._kept, self._old_top = None, None
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if output.get("old_per_token_logps") is not None and self._kept is not None:
            output |= self._kept
        self._kept = {}
        mode = "train" if self.model.training else "eval"
        assert self._rewards is not None
        size = self.num_generations if mode == "train" else self.num_generations_eval
        weights = self.reward_weights.to(self._rewards.device)
        unscored = self._rewards.isnan().all(dim=1)
        rewards = torch.where(unscored, torch.nan, (self._rewards * weights).nansum(dim=1))
        rows = torch.arange(rewards.numel(), device=rewards.device)
        groups = rewards.view(-1, size)
        # Equal rewards give exactly no signal: the mean of equal floats need not equal them.
        low, high = groups.nan_to_num(torch.inf).amin(1), groups.nan_to_num(-torch.inf).amax(1)
        tied = (high <= low).repeat_interleave(size)
        mine = slice(self.accelerator.process_index * len(inputs), (self.accelerator.process_index + 1) * len(inputs))
        output["advantages"] = torch.where(tied[mine], 0.0, output["advantages"])
        output["group"] = (rows // size)[mine]
        output["row"] = rows[mine] + self._rollouts * rewards.numel()
        output["reward"] = rewards[mine]
        if mode == "train":
            self._rollouts += 1
            self._note_rewards(groups, tied, unscored)
        return output

    def _note_verdicts(self, counts: Counter[str]) -> None:
        """What became of the answers of this rollout, over all ranks."""
        local = torch.tensor([counts[reason] for reason in REASONS], device=self.accelerator.device)
        for reason, count in zip(REASONS, self._sum(local).tolist(), strict=True):
            self._metrics["train"][f"reward/{reason}_count"].append(float(count))

    def _note_rewards(self, groups: Tensor, tied: Tensor, unscored: Tensor) -> None:
        metrics = self._metrics["train"]
        scored = groups.isfinite()
        mean = groups.nanmean(dim=1, keepdim=True)
        variance = torch.where(scored, (groups - mean) ** 2, 0.0).sum(1) / (scored.sum(1) - 1).clamp(min=1)
        metrics["train/reward_mean"].append(groups.nanmean().item())
        metrics["train/reward_std"].append(variance[scored.sum(1) > 1].sqrt().mean().item())
        metrics["train/tied_groups_share"].append(tied.float().mean().item())
        metrics["train/unscored_share"].append(unscored.float().mean().item())

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        """TRL's, whose output layer the vocabulary answers where the spec needs it; a rollout's first call is the old policy."""
        whole = self.vocabulary
        score = super()._get_per_token_logps_and_entropies
        if whole is None:
            return score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        with whole.watching(self._old_top):
            found = score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        if self._kept is None:
            mask = attention_mask[:, -logits_to_keep:].bool()
            self._kept = whole.keep_old(mask)
        return found

    # --- the loss -------------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        window = self.current_gradient_accumulation_steps
        if self.model.training and self._step % window == 0:
            slices = self.args.steps_per_generation
            parts = [self._buffered_inputs[(self._step + i) % slices] for i in range(window)]
            local = sum(self.objective.stats(self._asked(part), self.objective_state) for part in parts)
            assert isinstance(local, Stats)
            self._window_stats = local.all_reduce(self._sum, self._max, self.accelerator.gather)
        return inputs

    def _asked(self, inputs: dict[str, Any]) -> Batch:
        """The batch that the step's statistics are taken of: with one more forward pass where they need log-probs."""
        old = inputs.get("old_per_token_logps")
        if not self.spec.asks_step or not (self.spec.reads_new or old is None):
            return self._batch(inputs)
        with torch.no_grad():
            logp, entropy, _ = self._forward(self.model, inputs)
        return self._batch(inputs, logp, entropy)

    def _sum(self, value: Tensor) -> Tensor:
        reduced: Tensor = self.accelerator.reduce(value, reduction="sum")
        return reduced

    def _max(self, value: Tensor) -> Tensor:
        gathered: Tensor = self.accelerator.gather(value.reshape(1)).max()
        return gathered

    def _batch(self, inputs: dict[str, Any], logp: Tensor | None = None, entropy: Tensor | None = None) -> Batch:
        """The klamp batch of TRL's inputs, right after their forward pass; without ``logp`` only its counts are used."""
        mask = scored = inputs["completion_mask"].bool()
        if "tool_mask" in inputs:
            mask = mask & inputs["tool_mask"].bool()
        new = torch.zeros(mask.shape, device=mask.device) if logp is None else logp
        old = inputs.get("old_per_token_logps")
        rollout = inputs.get("sampling_per_token_logps") if "logp_rollout" in self.spec.needs else None
        bonus = "moves_unsampled" in self.spec.traits
        return Batch(
            new,
            new.detach() if old is None else old,
            inputs["advantages"],
            mask,
            logp_rollout=None if rollout is None else _padded(rollout, mask),
            logp_ref=inputs.get("ref_per_token_logps"),
            entropy=entropy if bonus or entropy is None else entropy.detach(),
            **({} if self.vocabulary is None or logp is None else self.vocabulary.fields(inputs, scored)),
            group=inputs.get("group"),
            row=inputs.get("row"),
            segment=segments(mask) if "segment" in self.spec.needs else None,
            reward=inputs.get("reward"),
            validate=logp is not None,
        )

    def _forward(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Any]:
        """(log-probs, entropies, auxiliary loss) of the completions under the model as it is."""
        if self.vocabulary is not None:
            self._old_top = self.vocabulary.old_top(inputs, inputs["completion_mask"].bool())
        found: tuple[Tensor, Tensor, Any] = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **{name: inputs.get(name) for name in _MULTIMODAL},
        )
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mode = "train" if self.model.training else "eval"
        logp, entropy, aux_loss = self._forward(model, inputs)
        batch = self._batch(inputs, logp, entropy)
        stats = self._window_stats if mode == "train" else None
        if mode == "eval":  # no accumulation: the batch of all ranks is the whole
            asked = self.objective.stats(batch, self.objective_state)
            stats = asked.all_reduce(self._sum, self._max, self.accelerator.gather)
        out = self.objective(batch, stats, self.objective_state)
        if self.recorder is not None and mode == "train":
            self.recorder(self, inputs, batch, out)
        # Gradients are averaged over ranks and summed over micro-batches; the counts are of all of them.
        loss: Tensor = out.loss * self.accelerator.num_processes
        if self.aux_loss_enabled:
            window = self.current_gradient_accumulation_steps if mode == "train" else 1
            loss = loss + self.router_aux_loss_coef * aux_loss / window
            self._metrics[mode]["aux_loss"].append(self.accelerator.gather_for_metrics(aux_loss).mean().item())
        self._tallies[mode] = self._tallies[mode] + out.metrics
        if mode == "train" and self.objective_state:
            self._advance(out.metrics)
        return loss

    def _advance(self, metrics: Tally) -> None:
        """Once per optimizer step: the adaptive parts see the step's metrics over all ranks."""
        self._window_tally = self._window_tally + metrics
        if self.accelerator.sync_gradients:
            assert self._window_stats is not None
            total = self._window_tally.all_reduce(self._sum, self._max)
            self.objective_state = self.objective.update(self.objective_state, self._window_stats, total)
            self._window_tally = Tally()

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        tally, self._tallies[mode] = self._tallies[mode], Tally()
        if tally.means:
            self.shown = tally.all_reduce(self._sum, self._max).show()
            prefix = "" if mode == "train" else "eval_"
            numbers = {name: value for name, value in self.shown.items() if isinstance(value, (int, float))}
            logs = logs | {f"{prefix}{name}": value for name, value in numbers.items()}
        super().log(logs, start_time)

    # --- exact resume ---------------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        sampler.__class__ = EpochSampler
        return sampler

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        limit, self.args.save_total_limit = self.args.save_total_limit, None  # older ones go when this one is whole
        super()._save_checkpoint(model, trial)
        self.args.save_total_limit = limit
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self._step % (self.args.steps_per_generation * self.num_iterations) and self._buffered_inputs:
            buffer = [
                {key: value for key, value in part.items() if value is not None} for part in self._buffered_inputs
            ]
            torch.save(buffer, folder / f"{_BUFFER}_{self.accelerator.process_index}.pt")
            if self.args.should_save and self.vocabulary is not None and self.vocabulary.old_head is not None:
                torch.save(self.vocabulary.old_head, folder / _HEAD)  # the same on every rank
        tally = self._tallies["train"]
        window = {**vars(tally), "metrics": {name: list(values) for name, values in self._metrics["train"].items()}}
        torch.save(window, folder / f"{_WINDOW}_{self.accelerator.process_index}.pt")
        if self.args.should_save:
            files = sorted(path.name for path in folder.iterdir() if path.is_file())
            state = {"step": self._step, "rollouts": self._rollouts, "objective": self.objective_state, "files": files}
            temporary = folder / f".{_STATE}"
            temporary.write_text(json.dumps(state))
            os.replace(temporary, folder / _STATE)  # last and at once: its presence says that the checkpoint is whole
            rotate_checkpoints(output_dir=str(folder.parent), save_total_limit=limit, use_mtime=True)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not os.path.exists(os.path.join(checkpoint, _STATE)):
            return
        state = json.loads((Path(checkpoint) / _STATE).read_text())
        self._step, self._rollouts, self.objective_state = state["step"], state["rollouts"], state["objective"]
        buffer, window = (
            Path(checkpoint) / f"{name}_{self.accelerator.process_index}.pt" for name in (_BUFFER, _WINDOW)
        )
        device = self.accelerator.device.type
        if buffer.exists():
            self._buffered_inputs = torch.load(buffer, map_location=device, weights_only=True)
            if self.vocabulary is not None and (Path(checkpoint) / _HEAD).exists():
                self.vocabulary.old_head = torch.load(Path(checkpoint) / _HEAD, map_location=device, weights_only=True)
        if window.exists():
            held = torch.load(window, map_location=device, weights_only=True)
            self._metrics["train"].update(held.pop("metrics"))
            self._tallies["train"] = Tally(**held)


_MULTIMODAL = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


def _padded(rollout: Tensor, mask: Tensor) -> Tensor:
    """The sampler's log-probs, widened to the mask where the completions were padded further."""
    return torch.nn.functional.pad(rollout, (0, mask.shape[1] - rollout.shape[1]))
