"""A run directory as it was left, whole or cut off at any moment, and the numbers in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klamp.errors import UserError

HUGE = 1e100  # beyond this a value is not drawn


@dataclass
class Run:
    """What a run directory holds; `notes` says what could not be read and was left out."""

    directory: Path
    manifest: dict[str, Any] = field(default_factory=dict)
    train: dict[int, dict[str, Any]] = field(default_factory=dict)  # by optimizer step
    evals: dict[int, dict[str, Any]] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def load_run(directory: Path) -> Run:
    """Read a run directory; a later line about a step replaces an earlier one (a resumed run)."""
    names = ("manifest.json", "metrics.jsonl", "samples.jsonl")
    if not any((directory / name).is_file() for name in names):
        what = "holds none of " + ", ".join(names) if directory.is_dir() else "is not a directory"
        raise UserError(f"{directory} {what}; give the output directory of `klamp train`")
    run = Run(directory)
    try:
        manifest = json.loads((directory / names[0]).read_bytes())
        run.manifest = manifest if isinstance(manifest, dict) else {}
        problem = "" if isinstance(manifest, dict) else "does not hold an object"
    except FileNotFoundError:
        problem = "is missing"
    except (ValueError, RecursionError):
        problem = "cannot be read"
    if problem:
        run.notes.append(f"manifest.json {problem}.")
    elif run.manifest.get("schema") != 1:
        run.notes.append(f"manifest.json has schema {run.manifest.get('schema')}; this page understands schema 1.")

    replaced = unusable = 0
    for line in _read_lines(directory / names[1], run.notes):
        events = {"train": run.train, "eval": run.evals}.get(str(line.get("event")))
        step = line.get("step")
        if events is None or not isinstance(step, int) or isinstance(step, bool) or abs(step) > 2**53:
            unusable += 1
            continue
        replaced += step in events
        events[step] = line
    run.train, run.evals = dict(sorted(run.train.items())), dict(sorted(run.evals.items()))
    if replaced:
        run.notes.append(f"metrics.jsonl: {plural(replaced, 'line')} replaced by later lines about the same step.")
    if unusable:
        run.notes.append(f"metrics.jsonl: {plural(unusable, 'line')} without a step or a known event, and left out.")
    run.samples = _read_lines(directory / names[2], run.notes)
    return run


def _read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The JSON objects of a file of lines; notes what is missing, cut off or unreadable."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        notes.append(f"{path.name} is missing.")
        return []
    rows: list[dict[str, Any]] = []
    lines = data.split(b"\n")
    bad = 0
    for k, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if k == len(lines) - 1:  # no newline after it
                notes.append(f"{path.name}: 1 line, the last, is cut off (the run was stopped) and left out.")
            else:
                bad += 1
            continue
        if isinstance(row, dict):
            rows.append(row)
        else:
            bad += 1
    if bad:
        notes.append(f"{path.name}: {plural(bad, 'line')} unreadable and left out.")
    return rows


def plural(count: int, noun: str) -> str:
    return f"1 {noun} was" if count == 1 else f"{count} {noun}s were"


def get(mapping: object, *keys: str) -> Any:
    for key in keys:
        mapping = mapping.get(key) if isinstance(mapping, Mapping) else None
    return mapping


def finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -HUGE < value < HUGE else None  # false for NaN as well


def points(run: Run, lines: Mapping[int, Mapping[str, Any]], name: str) -> list[tuple[int, float | None]]:
    """A metric over the lines that name it; null is a gap, and so is what is not a number, which is noted."""
    found = [(step, finite(line[name])) for step, line in lines.items() if name in line]
    odd = sum(value is None and lines[step][name] is not None for step, value in found)
    if odd:
        run.notes.append(f"{name}: {plural(odd, 'value')} not a finite number and shown as a gap.")
    return found


def tail(lines: Mapping[int, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """The lines of the last quarter of the steps, the last line at least."""
    last = max(lines, default=0)
    return {step: line for step, line in lines.items() if step > last - last / 4 or step == last}
