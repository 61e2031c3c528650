"""What a run shows and keeps while it trains: metrics, held-out answers, progress, and a clean stop on Ctrl-C."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState

from klamp.metrics import METRICS
from klamp.train.evaluate import Answers

# TRL's and transformers' names for what is documented under ours.
_ALIASES = {
    "completions/mean_length": "train/completion_length_mean",
    "completions/clipped_ratio": "train/truncated_share",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
}
_SAMPLES_PER_EVALUATION = 4

Evaluate = Callable[[bool, bool], Answers]  # greedily?, at an end of the run?


class Journal:
    """The lines of ``metrics.jsonl``, ``samples.jsonl`` and ``heldout.jsonl``; on resume it drops what came after the checkpoint."""

    def __init__(self, directory: Path, resumed_at: int | None = None) -> None:
        self.metrics, self.samples = directory / "metrics.jsonl", directory / "samples.jsonl"
        self.heldout = directory / "heldout.jsonl"
        self.latest: dict[str, Any] = {}
        self.step = 0
        self._before = 0.0
        if resumed_at is not None:
            for path in (self.metrics, self.samples, self.heldout):
                self._rewind(path, resumed_at)
        self._start = time.monotonic()

    def _rewind(self, path: Path, step: int) -> None:
        kept = []
        for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the last line of a killed run
            if isinstance(row, dict) and row.get("step", step + 1) <= step:
                kept.append(line)
                self._before = max(self._before, row.get("seconds", 0.0))
                self.latest.update(row)
        path.write_text("".join(line + "\n" for line in kept))

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._start

    def write(self, step: int, event: str, values: dict[str, Any]) -> None:
        row = {"step": step, "event": event, "seconds": round(self.seconds, 3), **values}
        self.latest.update(values)
        with self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def keep_outcomes(self, step: int, **answers: Answers) -> None:
        """One character per held-out row: 1 correct, 0 wrong, - unscored; of several samples the first, and the numbers
        of correct ones and of different texts among these."""
        marks = {None: "-", False: "0", True: "1"}
        line: dict[str, Any] = {}
        for name, found in answers.items():
            line[name] = "".join(marks[one] for one in found.correct[:: found.samples])
            if found.samples > 1:
                line |= {"samples": found.samples, "correct": found.counts, "distinct": found.distinct}
        with self.heldout.open("a") as file:
            file.write(json.dumps({"step": step, **line}) + "\n")

    def keep_samples(self, step: int, answers: Answers) -> None:
        with self.samples.open("a") as file:
            rows = list(zip(answers.rows, answers.completions, answers.verdicts, strict=True))
            wrong = [one for one in rows if one[2].result != "correct"][: _SAMPLES_PER_EVALUATION // 2]
            right = [one for one in rows if one[2].result == "correct"][: _SAMPLES_PER_EVALUATION - len(wrong)]
            for row, completion, verdict in wrong + right:
                prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
                line = {
                    "step": step,
                    "prompt": prompt,
                    "completion": completion,
                    "answer": row.get("answer"),
                    "reward": verdict.value,
                    "result": verdict.result,
                }
                file.write(json.dumps(line) + "\n")


class Observer(TrainerCallback):  # type: ignore[misc]
    """Writes the journal, evaluates every ``every`` steps, and shows progress."""

    def __init__(
        self, journal: Journal, evaluate: Evaluate, every: int, main: bool, shown: Callable[[], dict[str, Any]]
    ) -> None:
        self.journal, self.evaluate, self.every, self.main, self.shown = journal, evaluate, every, main, shown
        self.show: Progress | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.show = Progress(state.max_steps, state.global_step, self.journal) if self.main else None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        named = {_ALIASES.get(name, name): value for name, value in (logs or {}).items()}
        if any(name.startswith("policy/") for name in named):
            named |= self.shown()
        values = {name: value for name, value in named.items() if name in METRICS}
        if values and self.main:
            self.journal.write(state.global_step, "train", values)
            if self.show:
                self.show.update(state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.every and state.global_step % self.every == 0 and state.global_step < state.max_steps:
            self.measure(state.global_step, last=False)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.show:
            self.show.close(state.global_step)

    def measure(self, step: int, last: bool = True) -> dict[str, float | None]:
        """Held-out accuracy, greedy and sampled, written to the journal; with all samples at both ends of the run."""
        greedy, sampled = self.evaluate(True, last), self.evaluate(False, last)
        found = {"accuracy_greedy": greedy.accuracy, "accuracy_sampled": sampled.accuracy}
        if sampled.samples > 1:
            found["pass_share"] = sum(map(bool, sampled.counts)) / len(sampled.counts)
            found["distinct_correct_mean"] = sum(sampled.distinct) / len(sampled.distinct)
        if self.main:
            self.journal.write(step, "eval", {f"eval/{name}": value for name, value in found.items()})
            self.journal.keep_outcomes(step, greedy=greedy, sampled=sampled)
            self.journal.keep_samples(step, sampled)
        return found


class Progress:
    """A bar on a terminal, plain lines otherwise: reward, held-out accuracy, gradient removed, time left. On stderr."""

    def __init__(self, total: int, done: int, journal: Journal) -> None:
        self.total, self.first, self.journal = total, done, journal
        self.start = self.said = time.monotonic()
        terminal = sys.stderr.isatty()
        self.bar = (
            tqdm(total=total, initial=done, desc="training", unit="step", dynamic_ncols=True) if terminal else None
        )

    def update(self, step: int) -> None:
        latest = self.journal.latest
        removed = sum(latest.get(f"guard/removed_{side}_share") or 0.0 for side in ("low", "high"))
        facts = {
            "reward": _two(latest.get("train/reward_mean")),
            "accuracy (sampled)": _two(latest.get("eval/accuracy_sampled")),
            "removed": f"{100.0 * removed:.1f}%",
        }
        if self.bar is not None:
            self.bar.set_postfix(facts, refresh=False)
            self.bar.update(step - self.bar.n)
        elif time.monotonic() - self.said >= 5.0:
            self.said = time.monotonic()
            pace = (self.said - self.start) / max(step - self.first, 1)
            left = time.strftime("%H:%M:%S", time.gmtime(pace * (self.total - step)))
            shown = "  ".join(f"{name} {value}" for name, value in facts.items())
            print(f"step {step}/{self.total}  {shown}  left {left}", file=sys.stderr, flush=True)

    def close(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(step - self.bar.n)
            self.bar.close()


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


class Keeper(TrainerCallback):  # type: ignore[misc]
    """Writes buffered token records before a checkpoint is saved, so that a killed run misses none up to it."""

    def __init__(self, flush: Callable[[], object]) -> None:
        self.flush = flush

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if control.should_save:
            self.flush()


class Interruption(TrainerCallback):  # type: ignore[misc]
    """The first Ctrl-C or SIGTERM saves a checkpoint after the current step and stops; the second stops at once."""

    def __init__(self) -> None:
        self.asked = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("\nstopping after this step, with a checkpoint; once more to stop at once", file=sys.stderr, flush=True)

    def _asked_anywhere(self, args: Any) -> bool:
        """All processes stop after the same step: the signal may reach them at different ones."""
        if args.world_size > 1:
            flag = torch.tensor(int(self.asked), device=args.device)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
            self.asked = bool(flag)
        return self.asked

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._asked_anywhere(args):
            control.should_training_stop = control.should_save = control.should_log = True
