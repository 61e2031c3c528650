"""``klamp train``: from options to a run directory with the trained model, its metrics and its report."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from klamp.data import benchmark
from klamp.errors import UserError
from klamp.presets import parse
from klamp.train import rundir
from klamp.train.options import Options, configure, settings
from klamp.train.problem import Problem, problem, prompted
from klamp.train.quiet import quiet


def train(options: Options) -> dict[str, Any]:
    """Train as asked, in a new run directory; returns the summary. Raises UserError before anything is written."""
    if rundir.is_main():
        rundir.check_writable(options.out)
    parse("grpo" if options.spec is None else options.spec)  # before the slow imports
    _keep_whole(options)
    return _run(options, _problem(options), None)


def check(options: Options) -> dict[str, Any]:
    """What a run would do, from its options and data, without the model. Raises UserError as ``train`` does."""
    _keep_whole(options)
    asked = _problem(options)
    from klamp.train.trainer import OFFERS

    config, _, shown = _prepared(options, asked)
    return {
        "task": asked.name,
        "model": asked.model,
        "spec": str(config.resolved_spec),
        "rows": len(shown.train),
        "heldout": len(shown.heldout),
        "steps": config.max_steps if config.max_steps > 0 else steps_planned(config, len(shown.train)),
        "updates_per_rollout": config.updates_per_rollout,
        "offers": sorted(OFFERS | ({"logp_rollout"} if config.use_vllm else set())),
    }


def continue_or_train(options: Options) -> dict[str, Any] | None:
    """Continue the run in ``out``, or start it; None where it has finished. For a scheduler that repeats a command.

    A run that was stopped before its first checkpoint starts anew. Raises UserError without ``out``, and where another
    process trains there.
    """
    if options.out is None:
        raise UserError("--continue needs --out DIR, the run to continue or to start")
    directory = Path(options.out)
    if not rundir.started(directory):
        return train(options)
    if rundir.load(directory)["finished"] is not None:
        return None
    try:
        rundir.latest_checkpoint(directory)
    except UserError:
        rundir.clear(directory)
        return train(options)
    return resume(directory)


def _keep_whole(options: Options) -> None:
    """Paths as absolute ones: a run is resumed from another folder too."""
    local = ("data_dir",) if benchmark(options.dataset) else ()  # else a folder inside the data
    for name in ("dataset", "model", "few_shot_data", *local):
        value = getattr(options, name)
        if value is not None and Path(value).exists():
            setattr(options, name, str(Path(value).resolve()))


def resume(directory: Path) -> dict[str, Any]:
    """Continue a run from its last checkpoint, bit for bit as if it had not stopped (at equal thread count)."""
    data = rundir.load(directory)
    if data["finished"] is not None:
        raise UserError(f"{directory} has finished; nothing is left to resume")
    checkpoint = rundir.latest_checkpoint(directory)
    names = {item.name for item in dataclasses.fields(Options)}
    options = Options(**{name: value for name, value in data["options"].items() if name in names})
    if options.dataset is None:
        options.split = None  # earlier versions wrote their default for tasks too
    return _run(options, _problem(options), checkpoint, data)


def _problem(options: Options) -> Problem:
    try:
        return problem(options)
    except OSError as error:
        raise UserError(f"the dataset cannot be read: {_reason(error)}") from error


def _prepared(options: Options, asked: Problem) -> tuple[Any, Any, Problem]:
    """(TRL's configuration, tokenizer, the problem with its prompts as the model is asked), all checked."""
    quiet()
    _use_threads(asked.model)
    from klamp.train.models import load_tokenizer, model_path

    config = configure(options, asked.defaults)
    path = model_path(asked.model, config.trust_remote_code)
    tokenizer = load_tokenizer(path, config.trust_remote_code)
    shown = prompted(asked, options, tokenizer, config.chat_template_kwargs)
    require_rows(shown, config)
    adapter_config(options, asked.model, config.trust_remote_code)  # refused before anything is written
    return config, tokenizer, shown


def _run(
    options: Options, asked: Problem, checkpoint: Path | None, earlier: dict[str, Any] | None = None
) -> dict[str, Any]:
    config, tokenizer, shown = _prepared(options, asked)
    spec = config.resolved_spec
    if checkpoint is None:
        directory, made = rundir.create(options.out, spec, options.seed)
        manifest = rundir.manifest(spec, asked.name, options.seed, rundir.command_line(), dataclasses.asdict(options))
        manifest |= {"settings": settings(config), "data": _fingerprint(asked), "processes": config.world_size}
        manifest["rows"] = shown.about
    else:
        assert earlier is not None
        directory, manifest, made = checkpoint.parent, earlier, checkpoint.parent
        if manifest.get("data") != _fingerprint(asked):
            raise UserError(
                f"the data of {asked.name} changed since {directory} started: a resumed run would be another one"
            )
        if manifest.get("processes") != config.world_size:
            raise UserError(
                f"{directory} ran on {manifest.get('processes')} processes, this is {config.world_size}: resume with as many"
            )
    config.output_dir = str(directory)
    if rundir.is_main():
        many = f", {config.world_size} processes" if config.world_size > 1 else ""
        print(f"{directory}: {spec} on {asked.name}, model {asked.model}{many}", file=sys.stderr, flush=True)
    job = Job(options, shown, config, tokenizer, directory, manifest, checkpoint)
    try:
        with rundir.locked(directory):
            return job.run()
    except BaseException as error:
        begun = job.steps_done > job.first_step
        if checkpoint is None and not begun and rundir.is_main():
            rundir.discard(directory, made)
        if begun or isinstance(error, UserError) or not isinstance(error, Exception) or os.environ.get("KLAMP_DEBUG"):
            raise
        # Before the first step it is what was asked for that does not work; KLAMP_DEBUG=1 shows where.
        where = (
            "training cannot start"
            if checkpoint is None
            else f"{checkpoint} cannot be resumed (remove it for the one before)"
        )
        raise UserError(f"{where}: {_reason(error)}") from error


def adapter_config(options: Options, model: str, trust_remote_code: bool) -> Any:
    """PEFT's configuration of --lora, None without it."""
    if options.lora is None:
        return None
    from transformers import AutoConfig

    from klamp.train.adapters import low_rank
    from klamp.train.models import model_path

    found = AutoConfig.from_pretrained(model_path(model, trust_remote_code), trust_remote_code=trust_remote_code)
    return low_rank(options.lora, found)


def _fingerprint(asked: Problem) -> str:
    """A checksum of the rows, so that a resumed run is known to see the same data."""
    around = [asked.prompting.to_dict()] if asked.prompting else []
    text = json.dumps([asked.train, asked.heldout, *around], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def require_rows(asked: Problem, config: Any) -> None:
    """Raise UserError if there are fewer rows than one rollout takes prompts."""
    needed = config.generation_batch_size // config.num_generations
    if len(asked.train) < needed:
        raise UserError(
            f"{asked.name} has {len(asked.train)} rows to train on, and one rollout takes {needed} prompts "
            f"(generation batch of {config.generation_batch_size} / num_generations {config.num_generations}); give more "
            "rows, or lower --per_device_train_batch_size or --steps_per_generation"
        )


def _use_threads(model: str) -> None:
    """One thread for the embedded model: it is too small for two to help, and results then do not depend on the machine."""
    import torch

    if model.startswith("embedded:") and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


# --- the job --------------------------------------------------------------------------------------------------


class Job:
    """One run: builds the trainer, evaluates before and after, trains, and writes what a run keeps."""

    def __init__(
        self, options: Options, asked: Problem, config: Any, tokenizer: Any, directory: Path, manifest: dict[str, Any],
        checkpoint: Path | None,
    ) -> None:  # fmt: skip
        self.options, self.asked, self.config, self.tokenizer = options, asked, config, tokenizer
        self.rows, self.heldout = asked.train, asked.heldout
        self.directory, self.manifest, self.checkpoint = directory, manifest, checkpoint
        self.trainer: Any = None
        self.first_step = 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])

    @property
    def steps_done(self) -> int:
        return self.first_step if self.trainer is None else int(self.trainer.state.global_step)

    @property
    def _whole(self) -> bool:
        """Whether each process holds the whole model: answers to held-out problems are sampled from that one alone."""
        return not (self.trainer.is_deepspeed_enabled or self.trainer.is_fsdp_enabled)

    def run(self) -> dict[str, Any]:
        from klamp.train.callbacks import Interruption, Journal, Keeper, Observer
        from klamp.train.evaluate import paired_outcomes

        resumed_at = None if self.checkpoint is None else self.first_step
        self.trainer = self._trainer()
        main = self.trainer.accelerator.is_main_process
        if main:
            rundir.write(self.directory, self.manifest)
        journal = Journal(self.directory, resumed_at if main else None)
        trainer = self.trainer
        observer = Observer(journal, self._answers, self._evaluate_every(), main, lambda: dict(trainer.shown))
        with Interruption() as interruption:
            self.trainer.add_callback(observer)
            self.trainer.add_callback(interruption)
            if self.trainer.recorder is not None:
                self.trainer.add_callback(Keeper(self.writer.flush))
            if self.checkpoint is None and self._whole:
                self.manifest["results"]["before"] = observer.measure(0)
                if main:
                    rundir.write(self.directory, self.manifest)
            self._train()
        interrupted = interruption.asked and self.steps_done < self.trainer.state.max_steps
        if not interrupted:
            after = observer.measure(self.steps_done) if self._whole else {}
            self._save_model()
            if main:
                self.manifest["results"]["paired"] = paired_outcomes(journal.heldout) if self._whole else None
                rundir.finish(self.directory, self.manifest, after | removed_shares(journal.metrics))
        if main:
            from klamp.report import write_report

            write_report(self.directory)
            self._warn_of_silence(journal.metrics)
        return self._summary(interrupted, journal)

    def _train(self) -> None:
        try:
            self.trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
        except UserError as error:
            if not self.steps_done:
                raise
            self.trainer._save_checkpoint(self.trainer.model, None)
            raise UserError(
                f"{error}\nstopped at step {self.steps_done}; mend it, then --resume {self.directory}"
            ) from error
        finally:
            if self.trainer.recorder is not None:
                self.writer.flush()

    def _trainer(self) -> Any:
        from datasets import Dataset
        from transformers import PrinterCallback

        from klamp.records import RecordWriter
        from klamp.train.models import model_path
        from klamp.train.recording import recorder
        from klamp.train.trainer import KlampTrainer

        record = None
        if self.options.record_tokens > 0.0:
            self.writer = RecordWriter(self.directory / "tokens", self.options.record_tokens, self.options.seed)
            if self.checkpoint is not None and rundir.is_main():
                self.writer.rewind(self.first_step)
            record = recorder(self.writer)
        trainer = KlampTrainer(
            model=str(model_path(self.asked.model, self.config.trust_remote_code)),
            reward_funcs=self.asked.reward,
            args=self.config,
            train_dataset=Dataset.from_list(self.rows),
            processing_class=self.tokenizer,
            peft_config=adapter_config(self.options, self.asked.model, self.config.trust_remote_code),
            recorder=record,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.create_model_card = lambda *args, **kwargs: None  # TRL's card speaks of models on the hub
        return trainer

    def _save_model(self) -> None:
        if self.options.lora is None:
            self.trainer.save_model(str(self.directory / "model"))
            return
        self.trainer.save_model(str(self.directory / "adapter"))
        if rundir.is_main():
            from klamp.train.adapters import merge
            from klamp.train.models import model_path

            code = self.config.trust_remote_code
            path = model_path(self.asked.model, code)
            merge(path, self.directory / "adapter", self.directory / "model", self.tokenizer, code)

    def _evaluate_every(self) -> int:
        """Steps between evaluations: as asked, or six times in the run, at the end of a rollout; 0: none."""
        if not self._whole:
            if rundir.is_main():
                print("held-out evaluation is left out under DeepSpeed and FSDP; klamp eval does it", file=sys.stderr)
            return 0
        if self.options.eval_every is not None:
            return self.options.eval_every
        rollout = self.config.updates_per_rollout
        total = self.config.max_steps if self.config.max_steps > 0 else steps_planned(self.config, len(self.rows))
        return int(max(rollout, total // 6 // rollout * rollout))

    def _answers(self, greedy: bool, last: bool) -> Any:
        from accelerate.utils import gather_object

        from klamp.train.evaluate import Answers, answer

        accelerator = self.trainer.accelerator
        mine = self.heldout[accelerator.process_index :: accelerator.num_processes]
        samples = self.options.eval_samples if last and not greedy else 1
        found = answer(
            accelerator.unwrap_model(self.trainer.model), self.tokenizer, mine, self.asked.reward, greedy=greedy,
            max_new_tokens=self.config.max_completion_length, seed=accelerator.process_index,
            chat=self.config.chat_template_kwargs or {}, samples=samples,
        )  # fmt: skip
        if accelerator.num_processes == 1:
            return found
        rows, completions, verdicts = (gather_object(list(p)) for p in (found.rows, found.completions, found.verdicts))
        return Answers(rows, completions, verdicts, samples)

    def _warn_of_silence(self, metrics: Path) -> None:
        """Say so if no group of the run ever gave a signal: all rewards equal, or none."""
        rows = [json.loads(line) for line in (metrics.read_text().splitlines() if metrics.exists() else [])]
        tied = [row["train/tied_groups_share"] for row in rows if row.get("train/tied_groups_share") is not None]
        if tied and min(tied) == 1.0:
            print(
                "warning: in every group all rewards were equal or missing, so there was nothing to learn from; "
                "check the reward on samples.jsonl, or start from a model that is sometimes right",
                file=sys.stderr,
            )

    def _summary(self, interrupted: bool, journal: Any) -> dict[str, Any]:
        results, latest, seconds = self.manifest["results"], journal.latest, journal.seconds
        return {
            "run": str(self.directory),
            "spec": str(self.trainer.spec),
            "task": self.asked.name,
            "seed": self.options.seed,
            "steps": self.steps_done,
            "seconds": round(seconds, 1),
            "status": "interrupted" if interrupted else "finished",
            "heldout": len(self.heldout),
            "skipped_rows": len(self.asked.about.get("skipped_rows", ())),
            "before": results["before"],
            "after": results["after"]
            or {name: latest.get(f"eval/{name}") for name in ("accuracy_greedy", "accuracy_sampled")},
            "paired": results.get("paired"),
            "report": str(self.directory / "report.html"),
            "model": None if interrupted else str(self.directory / "model"),
        }


def steps_planned(config: Any, rows: int) -> int:
    """Optimizer steps of a run whose length is given by epochs."""
    per_step = config.per_device_train_batch_size * config.world_size * config.gradient_accumulation_steps
    return int(rows * config.num_generations * config.num_train_epochs * config.num_iterations // per_step)


def removed_shares(metrics: Path) -> dict[str, float | None]:
    """Share of tokens whose gradient was removed over the whole run, by side: counts of every line, divided once."""
    tokens, removed = 0.0, {"low": 0.0, "high": 0.0}
    for line in metrics.read_text().splitlines() if metrics.exists() else []:
        row = json.loads(line)
        count = row.get("batch/tokens_count")
        if count and row.get("guard/removed_low_share") is not None:
            tokens += count
            for side in removed:
                removed[side] += count * row[f"guard/removed_{side}_share"]
    return {f"removed_{side}": value / tokens if tokens else None for side, value in removed.items()}
