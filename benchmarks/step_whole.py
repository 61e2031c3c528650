"""A training step with a divergence over the vocabulary, next to one without, on the embedded model.

    python benchmarks/step_whole.py [--steps N] [--rounds N] [--specs SPEC ...]

Every run is a process of its own; they take turns, and each spec's fastest counts. Seconds are the processor's, of
``Trainer.train`` per optimizer step, rollouts included: what other processes do then matters less.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SPECS = ["atr_grpo", "trust_region(measure='exact_kl_old_new', radius=0.02)", "dppo_topk_tv", "truly_ppo"]


def seconds(spec: str, steps: int) -> float:
    """Processor seconds of a step, in this process."""
    from klamp.train.models import load_tokenizer, model_path
    from klamp.train.options import Options, configure
    from klamp.train.problem import problem
    from klamp.train.quiet import quiet
    from klamp.train.run import Job

    quiet()
    options = Options(spec=spec, trl=["--max_steps", str(steps), "--save_strategy", "no"])
    asked = problem(options)
    config = configure(options, asked.defaults)
    with tempfile.TemporaryDirectory() as folder:
        config.output_dir = folder
        trainer = Job(
            options, asked, config, load_tokenizer(model_path(asked.model)), Path(folder), {}, None
        )._trainer()
        start = time.process_time()
        trainer.train()
        return (time.process_time() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--specs", nargs="+", default=SPECS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(seconds(given.one, given.steps))
        return
    best: dict[str, float] = {}
    for spec in given.specs * given.rounds:
        command = [sys.executable, __file__, "--one", spec, "--steps", str(given.steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        best[spec] = min(best.get(spec, float("inf")), float(done.stdout.splitlines()[-1]))
    for spec, found in best.items():
        print(f"{spec}: {1e3 * found:.0f} ms, {found / best[given.specs[0]]:.2f} x {given.specs[0]}")


if __name__ == "__main__":
    main()
