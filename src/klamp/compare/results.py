"""From the runs of a comparison to its results: means over seeds, paired differences, what may be said and what not."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from klamp.compare.grid import FAILED, state
from klamp.compare.outcomes import METRICS, PRIMARY, Outcome, from_curves, outcome, pass_shares, steps_to
from klamp.compare.plan import SCHEMA, Entry, Plan
from klamp.errors import UserError
from klamp.presets import parse
from klamp.regions import Region
from klamp.statistics import (
    crossed,
    holm,
    interquartile_mean,
    mean_interval,
    paired_seeds,
    probability_of_improvement,
    seeds_needed,
)
from klamp.train import rundir
from klamp.version import __version__

LEAST = 3  # seeds; with fewer nothing is ranked
ALPHA = 0.05

Row = dict[str, Any]


def results(plan: Plan, logs: Sequence[Path] = ()) -> Row:
    """The comparison as it stands on disk, JSON-ready. ``logs``: files of other trainers, a row each."""
    found = {entry.label: {seed: _run(plan, entry, seed) for seed in plan.seeds} for entry in plan.entries}
    outcomes = {
        label: {seed: one for seed, (_, one) in runs.items() if one is not None} for label, runs in found.items()
    }
    threshold = _threshold(plan, outcomes)
    for runs in outcomes.values():
        for one in runs.values():
            curve = one.curves.get("eval/accuracy_sampled", [])
            one.metrics["steps_to_threshold"] = None if threshold is None else steps_to(curve, threshold)
    metrics, notes = _metrics(outcomes, threshold), _notes(plan, found)
    specs = [_spec(entry, found[entry.label]) for entry in plan.entries]
    others = [_of_log(path) for path in logs]
    first = next((one for runs in found.values() for directory, one in runs.values() if one), None)
    manifest = _manifest(plan)
    return {
        "klamp": __version__,
        "schema": SCHEMA,
        "task": manifest.get("task"),
        "model": manifest.get("model"),
        "base": plan.base,
        "whole": plan.base is None,
        "calibrated": plan.calibrated,
        "reference": plan.reference,
        "seeds": plan.seeds,
        "steps": manifest.get("settings", {}).get("max_steps"),
        "start": None if first is None else first.start,
        "threshold": threshold,
        "manifest": manifest,
        "metrics": metrics,
        "specs": [*specs, *others],
        "summary": [row for name in metrics for row in _summary(name, outcomes)],
        "differences": [row for name in metrics for row in _differences(name, plan.reference, outcomes)],
        "notes": notes + [note for row in others for note in row["log_notes"]],
    }


def _run(plan: Plan, entry: Entry, seed: int) -> tuple[Row, Outcome | None]:
    """One run as a row, and what it came to where it has ended."""
    cell = plan.cell(entry, seed)
    status = state(cell)
    row: Row = {"seed": seed, "directory": str(cell.directory.relative_to(plan.directory)), "status": status,
                "collapsed": None, "metrics": {}, "curves": {}, "anatomy": None}  # fmt: skip
    if status not in ("finished", "failed"):
        return row, None
    try:
        one = outcome(cell.directory, status == "failed")
    except UserError:
        return row | {"status": "unreadable"}, None
    if status == "failed":
        row["why"] = json.loads((cell.directory / FAILED).read_text()).get("why")
    row |= {"collapsed": one.collapsed, "metrics": one.metrics, "curves": one.curves, "anatomy": one.anatomy}
    row["pass_at_k"] = {str(k): value for k, value in pass_shares(one).items()}
    return row, one


def _spec(entry: Entry, runs: Mapping[int, tuple[Row, Outcome | None]]) -> Row:
    return {
        "label": entry.label,
        "text": entry.text,
        "asked": entry.asked,
        "same_as": entry.same_as,
        "note": entry.note,
        "region": region(entry.text),
        "runs": [row for row, _ in runs.values()],
    }


def region(text: str) -> Row | None:
    """The first interval on the policy's own ratio, with its coordinates; None where there is none."""
    found = [guard for guard in parse(text).guards if isinstance(guard.region, Region)]
    if not found:
        return None
    guard = min(found, key=lambda one: (one.ratio != "new/old", str(one.gate) != "outward"))
    assert isinstance(guard.region, Region)
    place = guard.region.coordinates
    finite = {"low": guard.region.low or None, "high": guard.region.high if guard.region.high < math.inf else None}
    at = {"a": None, "radius": None} if place is None else {"a": place.a, "radius": place.radius}
    return finite | at | {"ratio": guard.ratio, "scope": guard.scope}


def _of_log(path: Path) -> Row:
    from klamp.compare.foreign import read_log

    log = read_log(path)
    measured = from_curves(log.curves)
    run = {"seed": None, "directory": str(path), "status": "log", "collapsed": None, "anatomy": None,
           "metrics": {name: measured.get(name) for name in METRICS}, "curves": log.curves}  # fmt: skip
    return {"label": log.name, "text": None, "asked": None, "same_as": None, "region": None, "runs": [run],
            "note": "from the log of another trainer: shown, not compared", "log_notes": [f"{path}: {n}" for n in log.notes]}  # fmt: skip


def _manifest(plan: Plan) -> Row:
    """What all runs share, from the first that has a manifest."""
    facts = dict(plan.facts)
    for cell in plan.cells:
        try:
            data = rundir.load(cell.directory)
        except UserError:
            continue
        settings = {name: value for name, value in data.get("settings", {}).items() if name != "seed"}
        return facts | {"task": data["task"], "model": data["options"].get("model") or _default_model(data["task"]),
                        "versions": data["versions"], "settings": settings, "threads": plan.threads,
                        "train": plan.train, "config": plan.config}  # fmt: skip
    return facts


def _default_model(task: str) -> str:
    from klamp.tasks import TASKS
    from klamp.tasks import task as named

    return named(task if task in TASKS else "sort").model


# --- metrics over seeds ---------------------------------------------------------------------------------------


def _metrics(outcomes: Mapping[str, Mapping[int, Outcome]], threshold: float | None) -> dict[str, Row]:
    """The metrics that some run has, with what they mean."""
    found = {}
    for name, (title, unit, better, definition) in METRICS.items():
        if any(one.metrics.get(name) is not None for runs in outcomes.values() for one in runs.values()):
            if name == "steps_to_threshold" and threshold is not None:
                title = f"steps to {100 * threshold:.0f} %"
            found[name] = {"title": title, "unit": unit, "better": better, "definition": definition}
    return found


def _threshold(plan: Plan, outcomes: Mapping[str, Mapping[int, Outcome]]) -> float | None:
    """As asked, or midway between the start and the best mean of final accuracies."""
    if plan.threshold is not None:
        return plan.threshold
    starts = [one.start for runs in outcomes.values() for one in runs.values() if one.start is not None]
    means = [math.fsum(ends) / len(ends) for runs in outcomes.values() if (ends := _values(PRIMARY, runs))]
    if not starts or not means:
        return None
    return (math.fsum(starts) / len(starts) + max(means)) / 2.0


def _values(name: str, runs: Mapping[int, Outcome]) -> list[float]:
    return [value for one in runs.values() if (value := one.metrics.get(name)) is not None]


def _summary(name: str, outcomes: Mapping[str, Mapping[int, Outcome]]) -> list[Row]:
    rows = []
    for label, runs in outcomes.items():
        values = _values(name, runs)
        if not values:
            continue
        row: Row = {"label": label, "metric": name, "n": len(values), "mean": math.fsum(values) / len(values),
                    "low": None, "high": None, "iqm": None, "min": min(values), "max": max(values),
                    "collapsed": sum(bool(one.collapsed) for one in runs.values()), "runs": len(runs)}  # fmt: skip
        if len(values) >= LEAST:
            interval = mean_interval(values)
            row |= {"low": interval.low, "high": interval.high, "iqm": interquartile_mean(values).value}
        rows.append(row)
    return rows


def _differences(name: str, reference: str, outcomes: Mapping[str, Mapping[int, Outcome]]) -> list[Row]:
    """Each spec minus the reference, paired by seed; p by Holm's rule over the specs."""
    direction = METRICS[name][2]
    rows = [
        _difference(name, label, outcomes[reference], runs, direction)
        for label, runs in outcomes.items()
        if label != reference
    ]
    rows = [row for row in rows if row["n"]]
    for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = p
        row["verdict"] = _verdict(row, direction)
    return rows


def _difference(
    name: str, label: str, base: Mapping[int, Outcome], runs: Mapping[int, Outcome], direction: str | None
) -> Row:
    seeds = [seed for seed in base if seed in runs]
    both = [(seed, base[seed].metrics.get(name), runs[seed].metrics.get(name)) for seed in seeds]
    pairs = [(seed, a, b) for seed, a, b in both if a is not None and b is not None]
    row: Row = {"label": label, "metric": name, "n": len(pairs), "mean": None, "low": None, "high": None, "p": None,
                "p_holm": None, "sign_p": None, "flip_p": None, "better": 0, "worse": 0, "same": 0, "improvement": None,
                "needed": None, "values": [[seed, b - a] for seed, a, b in pairs], "crossed": None}  # fmt: skip
    if not pairs:
        return row
    a, b = [one for _, one, _ in pairs], [one for _, _, one in pairs]
    found = paired_seeds(a, b)
    better, worse = (found.worse, found.better) if direction == "lower" else (found.better, found.worse)
    row |= {"mean": found.difference.value, "better": better, "worse": worse, "same": found.same}
    if len(pairs) < LEAST:
        return row
    chance = probability_of_improvement(a, b).value
    row |= {"low": found.difference.low, "high": found.difference.high, "p": found.p, "sign_p": found.p_sign,
            "flip_p": found.p_sign_flip, "improvement": 1.0 - chance if direction == "lower" else chance,
            "needed": _needed(found.difference.value, found.deviation),
            "crossed": _crossed(name, base, runs, seeds)}  # fmt: skip
    return row


def _needed(effect: float, deviation: float) -> int | None:
    """Seeds to see a difference of this size in four of five comparisons."""
    if not effect or not deviation > 0.0:
        return None
    try:
        return seeds_needed(effect, deviation)
    except UserError:
        return None


def _crossed(name: str, base: Mapping[int, Outcome], runs: Mapping[int, Outcome], seeds: Sequence[int]) -> Row | None:
    """Of accuracies: the interval for new seeds and new questions."""
    kind = name.removeprefix("accuracy_")
    if kind not in ("greedy", "sampled"):
        return None
    matrix = []
    for seed in seeds:
        one, other = base[seed].questions.get(kind), runs[seed].questions.get(kind)
        if one and other and len(one) == len(other):
            matrix.append([b - a for a, b in zip(one, other, strict=True)])
    if len(matrix) < LEAST or len(set(map(len, matrix))) != 1 or len(matrix[0]) < 2:
        return None
    found = crossed(matrix)
    return {"mean": found.mean, "low": found.low, "high": found.high, "questions": found.questions}


def _verdict(row: Row, direction: str | None) -> str | None:
    """better, worse, no difference found; too few seeds; None for a metric that has no better side."""
    if row["n"] < LEAST:
        return "too few seeds"
    if direction is None:
        return None
    if row["p_holm"] is None or row["p_holm"] >= ALPHA:
        return "no difference found"
    return "better" if (row["mean"] > 0) == (direction == "higher") else "worse"


def _notes(plan: Plan, found: Mapping[str, Mapping[int, tuple[Row, Outcome | None]]]) -> list[str]:
    notes = []
    open_runs = [row["directory"] for runs in found.values() for row, one in runs.values() if one is None]
    if open_runs:
        notes.append(f"{len(open_runs)} of {len(plan.cells)} runs have not ended; the same command continues them.")
    failed = [f"{row['directory']} ({row.get('why')})" for runs in found.values() for row, _ in runs.values() if row["status"] == "failed"]  # fmt: skip
    if failed:
        notes.append(f"ended in an error, which counts as a collapse: {'; '.join(failed)}.")
    if len(plan.seeds) < LEAST:
        notes.append(f"nothing is ranked with fewer than {LEAST} seeds.")
    if any(one is not None and one.collapsed for runs in found.values() for _, one in runs.values()):
        notes.append("some runs collapsed: then every interval covers less than it says; read the counts and the sign test.")  # fmt: skip
    notes += [f"{e.label} is the same constraint as {e.same_as}, and runs its text." for e in plan.entries if e.same_as]
    notes += [f"{e.label}: {e.note}" for e in plan.entries if e.note]
    return notes
