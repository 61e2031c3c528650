"""Runs of a comparison without training: directories as klamp train leaves them, and a program that makes them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

BINS = 10


def write_run(
    directory: Path, sampled: list[float], *, spec: str = "grpo()", seed: int = 0, every: int = 10, questions: int = 20,
    samples: int = 4, finished: bool = True, kl: float = 0.01,
) -> Path:  # fmt: skip
    """A run whose held-out accuracy went through ``sampled``, one every ``every`` steps; the last line of questions agrees."""
    directory.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    outcomes: list[dict[str, Any]] = []
    for number, value in enumerate(sampled):
        step, right = number * every, round(value * questions)
        if number:
            lines.append({
                "step": step, "event": "train", "seconds": float(step), "train/reward_mean": value, "train/grad_norm": 1.0 + number % 2,
                "policy/kl_old_new_mean": kl, "policy/kl_old_new_sequence_mean": 5 * kl, "policy/entropy_mean": 1.0 - 0.1 * number,
                "guard/removed_low_share": 0.01, "guard/removed_high_share": 0.02, "guard/removed_positive_share": 0.02,
                "guard/removed_negative_share": 0.01, "batch/probability_histogram": [100] * BINS,
                "guard/removed_low_histogram": [10] + [0] * (BINS - 1), "guard/removed_high_histogram": [0, 20] + [0] * (BINS - 2),
            })  # fmt: skip
        ends = (
            {"eval/pass_share": min(1.0, 1.2 * value), "eval/distinct_correct_mean": 2 * value} if samples > 1 else {}
        )
        lines.append({"step": step, "event": "eval", "seconds": float(step), "eval/accuracy_greedy": right / questions, "eval/accuracy_sampled": value, **ends})  # fmt: skip
        marks = "1" * right + "0" * (questions - right)
        outcomes.append({"step": step, "greedy": marks, "sampled": marks, "samples": samples,
                         "correct": [samples * (mark == "1") for mark in marks], "distinct": [0] * questions})  # fmt: skip
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "heldout.jsonl").write_text("".join(json.dumps(line) + "\n" for line in outcomes))
    manifest = {
        "schema": 1, "klamp": "0", "spec": spec, "seed": seed, "task": "sort", "options": {"model": None, "spec": spec, "seed": seed}, "versions": {"torch": "0"},
        "settings": {"max_steps": every * (len(sampled) - 1), "seed": seed}, "results": {},
        "finished": "2026-01-01T00:00:00+00:00" if finished else None,
    }  # fmt: skip
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def checkpoint(directory: Path, step: int) -> None:
    folder = directory / f"checkpoint-{step}"
    folder.mkdir(exist_ok=True)
    (folder / "klamp_state.json").write_text(json.dumps({"files": []}))


def check(words: list[str]) -> int:
    """What ``klamp train --check`` says."""
    if "--nonsense" in words:
        print("loading\nklamp: there is no option '--nonsense'", file=sys.stderr)
        return 2
    updates = 1 if "--on-policy" in words else 8
    print(
        json.dumps(
            {"task": "sort", "model": "embedded:sort", "steps": 10, "updates_per_rollout": updates, "offers": ["row"]}
        )
    )
    return 0


def main(words: list[str]) -> int:
    """Stands for ``klamp train``: what it does is in its seed. Keeps a line about each start in ``starts`` beside the run.

    0-9 finish; 10 ends in an error after a step; 11 cannot start; 12 is killed at its first start, and can be resumed; 13
    is killed at every start; 14 waits to be interrupted, and can be resumed; 15 is killed, and its last
    checkpoint is broken; of 16 all are.
    """
    if "--check" in words:
        return check(words)
    given = dict(pairwise(words))
    resumed = "--resume" in given
    directory = Path(given["--resume"] if resumed else given["--out"])
    seed = int(directory.name.removeprefix("seed-"))
    spec = json.loads((directory / "manifest.json").read_text())["spec"] if resumed else given["--spec"]
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.starts").open("a") as file:
        file.write(
            f"{'resume' if resumed else 'start'} {os.environ['OMP_NUM_THREADS']} {os.environ['OMP_WAIT_POLICY']} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}\n"
        )
    if seed == 11:
        print("klamp: there is no option '--nonsense'", file=sys.stderr)
        return 2
    if resumed and (seed == 16 or (seed == 15 and (directory / "checkpoint-10").exists())):
        print("klamp: this checkpoint is broken", file=sys.stderr)
        return 2
    if seed < 10 or resumed:
        write_run(directory, [0.3, 0.4 + 0.01 * seed], spec=spec, seed=seed)
        return 0
    write_run(directory, [0.3, 0.2], spec=spec, seed=seed, finished=False)
    if seed == 10:
        print("klamp: the policy gradient weight overflows\nstopped at step 10", file=sys.stderr)
        return 2
    if seed == 12:
        checkpoint(directory, 10)
    if seed == 16:
        checkpoint(directory, 1)
    if seed in (15, 16):
        checkpoint(directory, 5)
        checkpoint(directory, 10)
    if seed == 14:
        checkpoint(directory, 10)
        signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
        (directory / "waits").touch()
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGKILL)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
