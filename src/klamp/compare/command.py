"""``klamp compare``: plan, run, measure, report."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klamp.compare.options import Options
from klamp.errors import UserError

PILOT = 16  # optimizer steps of the reference that the rule "removed" is measured over
MEASURED = "measured"  # in the folder of those steps: they are all there


def run(arguments: argparse.Namespace, train: list[str], config: Mapping[str, Any]) -> int:
    """The verb; ``train``: the words of klamp train among the command line's, ``config``: the configuration file."""
    try:
        return _report(arguments, train) if arguments.report is not None else _compare(arguments, train, config)
    except OSError as error:
        if error.filename is None:
            raise
        raise UserError(f"{error.filename}: {error.strerror}") from error


def _compare(arguments: argparse.Namespace, train: list[str], config: Mapping[str, Any]) -> int:
    if arguments.add:
        raise UserError("--add belongs to --report DIR")
    from klamp.compare import plan as planning
    from klamp.compare.grid import Grid
    from klamp.train import rundir

    options = _options(arguments, train, config)
    plan = planning.make(options)
    new = not (plan.directory / planning.PLAN).exists()
    if new or len(plan.entries) > len(planning.read(plan.directory).entries):
        _check(plan)
    plan.directory.mkdir(parents=True, exist_ok=True)
    with rundir.locked(plan.directory, "comparing in"):
        if new:
            plan = plan if plan.calibrated is None else _calibrated(plan)
        plan.write()
        _announce(plan)
        if arguments.print_commands:
            for cell in plan.cells:
                print(plan.command(cell))
            print(f"klamp compare --report {plan.directory} collects them", file=sys.stderr)
            return 0
        jobs = options.jobs or (os.cpu_count() or 1 if plan.threads == 1 and plan.embedded else 1)
        print(f"{len(plan.cells)} runs, {jobs} at a time, {plan.threads} threads each", file=sys.stderr, flush=True)
        whole = Grid(plan, plan.cells, jobs, options.drop_models).run()
        _finish(plan.directory, arguments.json, [])
    if not whole:
        print(f"stopped; the same command with --out {plan.directory} continues", file=sys.stderr)
    return 0 if whole else 130


def _announce(plan: Any) -> None:
    print(f"{plan.directory}: {len(plan.entries)} specs x {len(plan.seeds)} seeds", file=sys.stderr)
    for entry in plan.entries:
        same = f", the same constraint as {entry.same_as}" if entry.same_as else ""
        note = f" ({entry.note})" if entry.note else ""
        print(f"  {entry.label}: {entry.text}{same}{note}", file=sys.stderr, flush=True)
    for warning in plan.facts.get("warnings", ()):
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def _check(plan: Any) -> None:
    """Options and data of the runs, before anything is written; what they will do, and warnings, become facts of the plan."""
    from klamp.compare.grid import TRAIN
    from klamp.presets import parse

    text = next(entry.text for entry in plan.entries if entry.label == plan.reference)
    with tempfile.TemporaryDirectory() as folder:
        apart = dataclasses.replace(plan, directory=Path(folder))
        apart.write_options()
        words = apart.words(text, plan.seeds[0], plan.directory / "check")
        done = subprocess.run(
            [*TRAIN, *words, "--check"], capture_output=True, text=True, env=os.environ | plan.environment
        )
    if done.returncode:
        raise UserError(f"the runs cannot start: {_last_words(done.stderr)}")
    found = json.loads(done.stdout)
    plan.facts |= {name: found[name] for name in ("task", "model", "steps", "updates_per_rollout")}
    specs = [parse(entry.text) for entry in plan.entries]
    for spec in specs:
        spec.require(frozenset(found["offers"]), "a run")
    if found["updates_per_rollout"] == 1 and not any(spec.acts_at_once for spec in specs):
        plan.facts["warnings"] = [
            "each rollout has one optimizer step, so new = old at every step and these specs cannot differ; for four give "
            "--steps_per_generation 4, with a quarter of --per_device_train_batch_size for the same rollouts"
        ]


def _last_words(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return (
        next((line for line in lines if line.startswith("klamp: ")), None) or (lines or ["no word"])[-1]
    ).removeprefix("klamp: ")


def _options(arguments: argparse.Namespace, train: list[str], config: Mapping[str, Any]) -> Options:
    """The command line over the configuration file; what is not ours there is klamp train's."""
    rest = dict(config)
    ours = {item.name for item in dataclasses.fields(Options)} - {"train", "config"}
    given = {name: rest.pop(name) for name in list(rest) if name in ours}
    given |= {name: value for name in ours if (value := getattr(arguments, name)) not in (None, [])}
    return Options(**given, train=train, config=rest)


def _calibrated(plan: Any) -> Any:
    from klamp.compare.plan import calibrated

    if plan.calibrated != "removed":
        return calibrated(plan)
    from klamp.diff import recorded_steps

    folder = plan.directory / "calibration"
    if not (folder / MEASURED).exists():
        _pilot(plan, folder)
    return calibrated(plan, recorded_steps(folder / "tokens")[:PILOT])


def _pilot(plan: Any, folder: Path) -> None:
    """The first steps of the reference, as any run makes them, stopped there; its tokens are kept."""
    from klamp.compare.grid import TRAIN, last_line

    shutil.rmtree(folder, ignore_errors=True)  # what is left of one that was stopped
    plan.write_options()
    text = next(entry.text for entry in plan.entries if entry.label == plan.reference)
    words = plan.words(text, plan.seeds[0], folder)
    words += [] if any(word.startswith("--record-tokens") for word in words) else ["--record-tokens"]
    print(f"{folder}: {PILOT} steps of {text}, to measure what share of the gradient it removes", file=sys.stderr)
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [*TRAIN, *words, "--json"], stdout=subprocess.DEVNULL, stderr=said,
            env=os.environ | plan.environment, start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None and last_line(folder / "metrics.jsonl").get("step", 0) < PILOT:
                time.sleep(0.1)
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # it stops after its step
            process.wait()
        finally:
            process.kill()
        if process.returncode not in (0, 130):
            said.seek(0)
            raise UserError(f"the run to calibrate with fails: {_last_words(said.read())}")
    (folder / MEASURED).touch()


def _report(arguments: argparse.Namespace, train: list[str]) -> int:
    given = [f"--{name}" for name in ("config", "seeds", "base", "calibrate", "reference", "threshold", "jobs", "out")
             if getattr(arguments, name) is not None] + [f"--{name.replace('_', '-')}" for name in ("whole", "drop_models", "print_commands")
             if getattr(arguments, name)]  # fmt: skip
    if arguments.specs or train or given:
        hint = "; say --add before each log" if arguments.add else ""
        raise UserError(
            f"--report only reads what is there; leave out {' '.join([*arguments.specs, *train, *given])}{hint}"
        )
    _finish(Path(arguments.report), arguments.json, arguments.add or [])
    return 0


def _finish(directory: Path, as_json: bool, logs: list[str]) -> None:
    """Measure what is there, write results.json and report.html, print the table."""
    from klamp.compare.plan import read, replace_file
    from klamp.compare.report import write
    from klamp.compare.results import results
    from klamp.compare.table import text

    found = results(read(directory), logs)
    replace_file(directory / "results.json", json.dumps(found, indent=1) + "\n")
    page = write(found, directory)
    print(json.dumps(found, indent=2) if as_json else f"{text(found)}\nreport  {page}")
