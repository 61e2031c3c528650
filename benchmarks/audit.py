"""What an audit costs beside reading alone: time and memory, in one run, on generated token records.

    python benchmarks/audit.py [--tokens 2 20 200] [--jobs N] [--dir DIR] [--repeat 3] [--json]

``--tokens``: millions of tokens, of responses of 100 to 2,000. Reading is pyarrow's own of the same columns with as many
threads as the audit has processes, as a dataset and file by file, whichever is faster. Every figure is the median of
``--repeat`` fresh processes, taken in turn, without the start of the interpreter; memory is that of all processes of one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from klamp.records import arrow_schema

COLUMNS = (
    "step",
    "row",
    "group",
    "reward",
    "token_ids",
    "logp_new",
    "logp_old",
    "logp_rollout",
    "advantage",
    "mask",
    "entropy",
)
SPECS = ("atr_grpo(delta=0.02)", "grpo", "dapo", "trust_region('tv', 0.1)")
PART = 4_000_000  # tokens of a file


def generate(directory: Path, tokens: int, seed: int = 0) -> int:
    """Records of a run with four updates to a rollout, in files of ``PART`` tokens; returns the bytes."""
    directory.mkdir(parents=True)
    written = 0
    for number in range(-(-tokens // PART)):
        table = part(np.random.default_rng([seed, number]), min(PART, tokens - written), number)
        pq.write_table(table, directory / f"part-{number:06d}.parquet", compression="zstd")
        written += PART
    return sum(path.stat().st_size for path in directory.iterdir())


def part(random: np.random.Generator, tokens: int, number: int) -> pa.Table:
    lengths = random.integers(100, 2001, tokens // 1000)
    lengths[-1] += max(tokens - int(lengths.sum()), 0)
    rows, n = len(lengths), int(lengths.sum())
    old = -(0.4 * random.standard_exponential(n, np.float32) ** 2) - np.float32(1e-6)
    drift = 0.05 * (number % 4)
    new = np.minimum(old + np.float32(drift) * random.standard_normal(n, np.float32), np.float32(-1e-6))
    reward = random.integers(0, 2, rows).astype(np.float32)
    mean = np.repeat(reward[: rows // 8 * 8].reshape(-1, 8).mean(1), 8)
    advantage = reward - np.concatenate([mean, np.full(rows - len(mean), 0.5, np.float32)])
    per_token = {
        "token_ids": random.integers(0, 150_000, n, np.int32), "logp_new": new, "logp_old": old,
        "logp_rollout": old + np.float32(0.01) * random.standard_normal(n, np.float32), "logp_ref": old - np.float32(0.1) * random.random(n, np.float32),
        "advantage": np.repeat(advantage.astype(np.float32), lengths), "mask": np.ones(n, bool), "entropy": -old * random.random(n, np.float32),
        "kept": np.ones(n, bool), "g": np.repeat(advantage.astype(np.float32), lengths) * np.exp(new - old),
    }  # fmt: skip
    per_row = {
        "prompt_id": [f"p{number}-{k // 8}" for k in range(rows)], "group": np.arange(rows) // 8, "row": np.arange(rows),
        "step": np.full(rows, number), "micro_step": np.zeros(rows, np.int64), "reward": reward,
    }  # fmt: skip
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    columns = [
        pa.array(per_row[field.name], field.type) if field.name in per_row
        else pa.ListArray.from_arrays(offsets, pa.array(per_token[field.name], field.type.value_type), type=field.type)
        for field in arrow_schema()
    ]  # fmt: skip
    return pa.table(columns, schema=arrow_schema())


# --- what is timed, each in a process of its own ----------------------------------------------------------------


def read_dataset(directory: Path, jobs: int) -> None:
    import pyarrow.dataset as ds

    pa.set_cpu_count(jobs)
    for _ in ds.dataset(directory, format="parquet").to_batches(columns=list(COLUMNS), use_threads=jobs > 1):
        pass


def read_files(directory: Path, jobs: int) -> None:
    pa.set_cpu_count(jobs)
    for path in sorted(directory.iterdir()):
        with pq.ParquetFile(path) as file:
            for _ in file.iter_batches(256, columns=list(COLUMNS), use_threads=jobs > 1):
                pass


def audit(directory: Path, jobs: int, specs: Sequence[str]) -> None:
    from klamp.audit.command import audit

    audit([str(directory)], specs, jobs=jobs)


TASKS: dict[str, Any] = {
    "reading, dataset": read_dataset,
    "reading, file by file": read_files,
    "audit, 1 spec": lambda directory, jobs: audit(directory, jobs, SPECS[:1]),
    "audit, 4 specs": lambda directory, jobs: audit(directory, jobs, SPECS),
}


def measured(task: str, directory: Path, jobs: int) -> tuple[float, float]:
    """(seconds, peak MiB of the process and its children) of one task in a fresh process."""
    words = [sys.executable, __file__, "--task", task, "--dir", str(directory), "--jobs", str(jobs)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            peak[0] = max(peak[0], sum(_resident(pid) for pid in _family(process.pid)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, _ = process.communicate()
    done.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{task} failed")
    return float(out), peak[0]


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(one for child in children for one in _family(int(child)))]


def _resident(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, IndexError):
        return 0.0


def row(millions: float, directory: Path, jobs: int, repeat: int) -> dict[str, Any]:
    target = directory / f"tokens-{millions:g}"
    size = generate(target, int(millions * 1e6))
    found: dict[str, list[tuple[float, float]]] = {task: [] for task in TASKS}
    for _ in range(repeat):
        for task in TASKS:  # in turn, so that the machine is the same for all
            found[task].append(measured(task, target, jobs))
    shutil.rmtree(target)
    seconds = {task: statistics.median(one for one, _ in times) for task, times in found.items()}
    reading = min(seconds["reading, dataset"], seconds["reading, file by file"])
    return {
        "tokens": int(millions * 1e6), "bytes": size, "jobs": jobs, "seconds": seconds,
        "times_reading": {task: seconds[task] / reading for task in TASKS if task.startswith("audit")},
        "peak_mib": {task: max(peak for _, peak in times) for task, times in found.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, nargs="+", default=[2.0, 20.0, 200.0], metavar="MILLIONS")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task is not None:
        import klamp.audit.engine
        import klamp.audit.results  # noqa: F401  what an interpreter takes to start is not the audit's

        start = time.perf_counter()
        TASKS[arguments.task](arguments.dir, arguments.jobs)
        print(time.perf_counter() - start)
        return
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        rows = []
        for millions in arguments.tokens:
            rows.append(row(millions, Path(folder), arguments.jobs, arguments.repeat))
            if not arguments.json:
                one = rows[-1]
                print(f"{millions:g} million tokens, {one['bytes'] / 1e9:.2f} GB, {one['jobs']} processes", flush=True)
                for task, seconds in one["seconds"].items():
                    times = one["times_reading"].get(task)
                    extra = f"{times:5.2f} times reading" if times is not None else ""
                    print(f"  {task:22} {seconds:8.2f} s  {one['peak_mib'][task]:6.0f} MiB  {extra}", flush=True)
    if arguments.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
