"""The share of a training step that the objective takes, in a short run of the embedded model.

    python benchmarks/step.py [--steps N] [--json]

Counted as the objective: building the batches, the counts of the step, the loss with all metrics and checks, and its
part of the backward pass down to the log-probs, timed apart on the same tensors.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

from klamp.train.options import Options, configure
from klamp.train.problem import problem
from klamp.train.quiet import quiet
from klamp.train.run import Job


class Clock:
    """Seconds spent inside wrapped functions, nested ones counted once."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.perf_counter() - start

        return timed


def backward_seconds(trainer: Any, batches: list[Any]) -> float:
    """Backward from the loss to the log-probs, repeated on the last batches of the run."""
    total = 0.0
    for batch in batches:
        batch.logp_new = batch.logp_new.detach().requires_grad_(True)
        loss = trainer.objective(batch).loss
        start = time.perf_counter()
        loss.backward()
        total += time.perf_counter() - start
    return total / len(batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    quiet()
    from klamp.train.models import load_tokenizer, model_path

    options = Options(trl=["--max_steps", str(arguments.steps), "--save_strategy", "no"])
    asked = problem(options)
    config = configure(options, asked.defaults)
    with tempfile.TemporaryDirectory() as folder:
        from pathlib import Path

        config.output_dir = folder
        tokenizer = load_tokenizer(model_path(asked.model))
        job = Job(options, asked, config, tokenizer, Path(folder), {}, None)
        trainer = job._trainer()
        ours, whole, batches = Clock(), Clock(), []
        build = trainer._batch

        def keep(*args: Any) -> Any:
            batch = build(*args)
            if len(args) > 1:
                batches.append(batch)
                del batches[:-8]
            return batch

        trainer._batch = ours.wrap(keep)
        trainer.objective.stats = ours.wrap(trainer.objective.stats)
        call = ours.wrap(trainer.objective.__call__)
        kind = type(trainer.objective)
        trainer.objective.__class__ = type("Timed", (kind,), {"__call__": lambda self, *a: call(*a)})
        trainer.training_step = whole.wrap(trainer.training_step)
        trainer.train()
        trainer.objective.__class__ = kind
        share = (ours.seconds / arguments.steps + backward_seconds(trainer, batches)) / (
            whole.seconds / arguments.steps
        )
    report = {"share": share, "milliseconds_step": 1e3 * whole.seconds / arguments.steps}
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print(f"the objective takes {100 * share:.2f} % of a training step of {report['milliseconds_step']:.0f} ms")


if __name__ == "__main__":
    main()
