"""The runs of a comparison: a few at a time, each an ordinary ``klamp train``; finished ones are never repeated."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from klamp.compare.overview import Overview
from klamp.compare.plan import Cell, Plan, replace_file
from klamp.errors import UserError
from klamp.train import rundir

TRAIN = [sys.executable, "-m", "klamp", "train"]
FAILED = "failed.json"  # beside a run that ended in an error of its own: it is a result, and is not tried again
ASIDE = "unreadable-"  # before the name of a checkpoint that cannot be resumed
ATTEMPTS = 3  # of a run whose process is killed, in one command
POLL = 0.2  # seconds


@dataclass
class Job:
    """A run that is going on: our own process, or (None) one that an earlier command left behind."""

    cell: Cell
    process: subprocess.Popen[bytes] | None
    resumed: bool = False
    log: IO[bytes] | None = None
    device: str | None = None
    step: int = 0  # where it started from
    said: int = 0  # bytes of its log before
    since: float = field(default_factory=time.monotonic)


def state(cell: Cell) -> str:
    """``finished``, ``failed``, ``running`` (in some process), ``stopped`` (it has a checkpoint) or ``missing``.

    Raises UserError for a directory that holds something else, which is never removed.
    """
    directory = cell.directory
    if (directory / FAILED).exists():
        return "failed"
    if not directory.exists():
        return "missing"
    if not directory.is_dir():
        raise UserError(f"{directory} is a file; move it away")
    if rundir.in_use(directory):
        return "running"
    if not rundir.started(directory):
        if not rundir.empty(directory):
            raise UserError(f"{directory} holds something, and no run; move it away")
        return "missing"
    data = rundir.load(directory)
    asked = data["options"] if isinstance(data["options"], dict) else {}
    if (asked.get("spec"), asked.get("seed")) != (cell.entry.text, cell.seed):
        raise UserError(
            f"{directory} holds a run of {asked.get('spec')} with seed {asked.get('seed')}, not of {cell.entry.text} with seed "
            f"{cell.seed}; move it away"
        )
    if data["finished"] is not None:
        return "finished"
    if checkpoints(directory):
        return "stopped"
    if any(directory.glob(f"{ASIDE}*")):
        raise UserError(f"no checkpoint of {directory} can be resumed; move it away to start it anew")
    return "missing"  # it has not come as far as its first checkpoint


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of a run that were written to the end, the last first."""
    found = [path for path in directory.glob("checkpoint-*") if (path / "klamp_state.json").exists()]
    found = [path for path in found if path.name.rpartition("-")[2].isdigit()]
    return sorted(found, key=lambda path: -int(path.name.rpartition("-")[2]))


def steps_done(cell: Cell) -> int:
    """Optimizer steps that a run has logged or saved."""
    step = last_line(cell.directory / "metrics.jsonl").get("step")
    saved = [int(path.name.rpartition("-")[2]) for path in checkpoints(cell.directory)[:1]]
    return max([step if isinstance(step, int) else 0, *saved])


class Grid:
    """Runs the cells of a plan that are not done, ``jobs`` at a time."""

    def __init__(self, plan: Plan, cells: list[Cell], jobs: int, drop_models: bool = False) -> None:
        self.plan, self.jobs, self.drop_models = plan, jobs, drop_models
        self.waiting = [cell for cell in cells if state(cell) not in ("finished", "failed")]
        self.going: list[Job] = []
        self.attempts: dict[tuple[Path, bool], int] = {}
        self.devices = [] if jobs == 1 or plan.embedded else _devices()
        self.stopping = False
        self.overview = Overview(len(cells), len(cells) - len(self.waiting))

    def run(self) -> bool:
        """Whether all cells came to an end (False: interrupted). Raises UserError where runs cannot start."""
        with self._signals(), self.overview:
            try:
                while self.going or (self.waiting and not self.stopping):
                    if self.stopping:  # what others run is theirs
                        self.going = [job for job in self.going if job.process is not None]
                    self._start()
                    time.sleep(POLL)
                    self._collect()
                    self.overview.show([job.cell for job in self.going])
            except BaseException:
                self._stop()
                for job in self.going:
                    if job.process is not None:
                        job.process.wait()
                raise
        return not self.stopping

    # --- starting -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        while self.waiting and len(self.going) < self.jobs and not self.stopping:
            cell = self.waiting.pop(0)
            found = state(cell)
            if found == "running":
                self.going.append(Job(cell, None))
            elif found == "stopped":
                self.going.append(self._launch(cell, ["--resume", str(cell.directory)], resumed=True))
            elif found == "missing":
                shutil.rmtree(cell.directory, ignore_errors=True)  # what is left of a start, no more
                self.going.append(self._launch(cell, self.plan.words(cell.entry.text, cell.seed, cell.directory)))

    def _launch(self, cell: Cell, words: list[str], resumed: bool = False) -> Job:
        log = log_of(cell)
        log.parent.mkdir(parents=True, exist_ok=True)
        handle = log.open("ab")
        # Each run has a GPU of its own, the one that the fewest others have.
        taken = [job.device for job in self.going]
        device = min(self.devices, key=taken.count) if self.devices else None
        environment = os.environ | self.plan.environment | ({"CUDA_VISIBLE_DEVICES": device} if device else {})
        before = steps_done(cell), log.stat().st_size
        process = subprocess.Popen(
            [*TRAIN, *words, "--json"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=handle, env=environment,
            start_new_session=True,  # a terminal's Ctrl-C reaches us alone: we pass it on, once
        )  # fmt: skip
        return Job(cell, process, resumed, handle, device, *before)

    # --- ending ---------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        for job in list(self.going):
            if job.process is None:
                if state(job.cell) == "running":
                    continue
            elif job.process.poll() is None:
                continue
            self.going.remove(job)
            if job.log is not None:
                job.log.close()
            self._ended(job)

    def _ended(self, job: Job) -> None:
        cell, code = job.cell, None if job.process is None else job.process.returncode
        if state(cell) == "finished":
            self._tidy(cell)
            self.overview.done(cell, time.monotonic() - job.since)
        elif self.stopping:
            pass  # it has saved a checkpoint
        elif state(cell) == "running":  # one that an earlier command left behind was there first
            self.waiting.insert(0, cell)
        elif code == 2 and steps_done(cell) > job.step:
            self._fail(cell, _last_words(job))
        elif code == 2 and not job.resumed:
            raise UserError(
                f"{cell.entry.label} seed {cell.seed} does not start: {_last_words(job)}\n{self.plan.command(cell)}"
            )
        else:
            self._again(job, code)

    def _again(self, job: Job, code: int | None) -> None:
        """One whose process was killed continues; one whose checkpoint is refused continues from the one before, once."""
        cell, refused = job.cell, job.resumed and code == 2
        key = (cell.directory, refused)
        tried = self.attempts[key] = self.attempts.get(key, 0) + 1
        if tried >= (2 if refused else ATTEMPTS):  # that two checkpoints are refused is not their fault
            raise UserError(
                f"the run {cell.directory} ended {tried} times before its time (exit code {code}): {_last_words(job)}; "
                "the same command continues"
            )
        if refused:
            newest = checkpoints(cell.directory)[0]
            self.overview.say(f"{newest} cannot be resumed and is set aside: {_last_words(job)}")
            os.replace(newest, newest.with_name(f"{ASIDE}{newest.name}"))
        self.waiting.insert(0, cell)

    def _fail(self, cell: Cell, why: str) -> None:
        replace_file(cell.directory / FAILED, json.dumps({"step": steps_done(cell), "why": why}) + "\n")
        self._tidy(cell)
        self.overview.done(cell, None, why)

    def _tidy(self, cell: Cell) -> None:
        """Remove the checkpoints of a run that has ended."""
        for folder in cell.directory.glob("checkpoint-*"):
            shutil.rmtree(folder, ignore_errors=True)
        if self.drop_models:
            for name in ("model", "adapter"):
                shutil.rmtree(cell.directory / name, ignore_errors=True)

    def _stop(self) -> None:
        for job in self.going:
            if job.process is not None and job.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    job.process.send_signal(signal.SIGINT)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM lets all runs save and stop; the second stops them at once."""

        def ask(number: int, frame: FrameType | None) -> None:
            if not self.stopping:
                self.overview.say("stopping all runs after their current step; once more to stop at once")
            self.stopping = True
            self._stop()

        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, ask) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


def _devices() -> list[str]:
    """The GPUs that runs may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def log_of(cell: Cell) -> Path:
    """The file with what a run says."""
    return cell.directory.with_name(f"{cell.directory.name}.log")


def _last_words(job: Job) -> str:
    """What a run said last, since it was started."""
    log = log_of(job.cell)
    lines = log.read_bytes()[job.said :].decode(errors="replace").splitlines() if log.exists() else []
    said = [line for line in lines if line.startswith("klamp: ")] or [line for line in lines if line.strip()]
    return f"{said[-1].removeprefix('klamp: ')} ({log})" if said else f"{log} is empty"


def last_line(path: Path) -> dict[str, Any]:
    """The last whole line of a file of JSON lines, {} where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                return row
    return {}
