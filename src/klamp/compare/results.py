"""From the runs of a comparison to its results: means over seeds, paired differences, what may be said and what not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from klamp.compare.grid import FAILED, last_line, log_of, state
from klamp.compare.outcomes import JUDGED, METRICS, PRIMARY, Curve, Outcome, from_curves, outcome, pass_shares, steps_to
from klamp.compare.plan import SCHEMA, Entry, Plan
from klamp.errors import UserError
from klamp.presets import parse
from klamp.regions import Region
from klamp.report.charts import thin
from klamp.statistics import (
    LEAST,
    crossed,
    detectable,
    holm,
    interquartile_mean,
    mean_interval,
    paired_seeds,
    probability_of_improvement,
    seeds_needed,
)
from klamp.train import rundir
from klamp.version import __version__

ALPHA = 0.05

POINTS = 120  # of a curve in results.json and on the page

Row = dict[str, Any]


def results(plan: Plan, logs: Sequence[str] = ()) -> Row:
    """The comparison as it stands on disk, JSON-ready. ``logs``: [NAME=]FILE of other trainers, a row each."""
    found = {entry.label: {seed: _run(plan, entry, seed) for seed in plan.seeds} for entry in plan.entries}
    outcomes = {
        label: {seed: one for seed, (_, one) in runs.items() if one is not None} for label, runs in found.items()
    }
    threshold = _threshold(plan, outcomes)
    for runs in outcomes.values():
        for one in runs.values():
            curve = one.curves.get("eval/accuracy_sampled", [])
            one.metrics["steps_to_threshold"] = None if threshold is None else steps_to(curve, threshold)
    taken = {entry.label for entry in plan.entries}
    others = [_of_log(text, taken) for text in logs]
    twins = {entry.label: entry.same_as for entry in plan.entries if entry.same_as is not None}
    metrics, notes = _metrics(outcomes, others, threshold), _notes(plan, found)
    specs = [_spec(entry, found[entry.label]) for entry in plan.entries]
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
        "summary": [row for name in metrics for row in _summary(name, outcomes)]
        + [row for one in others for row in one.pop("summary")],
        "differences": _judged(
            [row for name in metrics for row in _differences(name, plan.reference, outcomes)], twins
        ),
        "notes": notes + [note for row in others for note in row["log_notes"]],
    }


def _run(plan: Plan, entry: Entry, seed: int) -> tuple[Row, Outcome | None]:
    """One run as a row, and what it came to where it has ended."""
    cell = plan.cell(entry, seed)
    status = state(cell)
    row: Row = {"seed": seed, "directory": str(cell.directory.relative_to(plan.directory)), "status": status,
                "collapsed": None, "metrics": {}, "curves": {}, "anatomy": None}  # fmt: skip
    if status == "missing":
        return row, None
    try:
        one = outcome(cell.directory, status == "failed")
    except UserError as error:
        return row | {"status": "unreadable", "why": str(error)}, None
    if status not in ("finished", "failed"):  # shown as far as it is, and not measured
        return row | {"curves": _thin(one.curves)}, None
    if status == "failed":
        row["why"] = last_line(cell.directory / FAILED).get("why")
    if one.notes:
        row["notes"] = one.notes
    row |= {"collapsed": one.collapsed, "metrics": one.metrics, "curves": _thin(one.curves), "anatomy": one.anatomy}
    row["pass_at_k"] = {str(k): value for k, value in pass_shares(one).items()}
    return row, one


def _thin(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """At most POINTS points a curve, means of neighbours; the run directory has all."""
    return {name: list(thin(curve, POINTS)[0]) for name, curve in curves.items()}


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


def _of_log(text: str, taken: set[str]) -> Row:
    """A log as a row, under a label that is none of those taken."""
    from klamp.compare.foreign import read_log

    name, equals, rest = text.partition("=")
    path = Path(rest if equals and not Path(text).exists() else text)
    log = read_log(path)
    label = name if path != Path(text) else log.name
    while label in taken:
        label += " (log)"
    taken.add(label)
    measured = from_curves(log.curves)
    metrics = {metric: value for metric in METRICS if (value := measured.get(metric)) is not None}
    run: Row = {"seed": None, "directory": str(path), "status": "log", "collapsed": None, "anatomy": None, "metrics": metrics,
                "curves": _thin(log.curves)}  # fmt: skip
    summary = [{"label": label, "metric": metric, "n": 1, "mean": value, "low": None, "high": None, "iqm": None, "min": value,
                "max": value, "collapsed": 0, "runs": 1} for metric, value in metrics.items()]  # fmt: skip
    return {"label": label, "summary": summary, "text": None, "asked": None, "same_as": None, "region": None, "runs": [run],
            "note": "from the log of another trainer: shown, not compared", "log_notes": [f"{path}: {n}" for n in log.notes]}  # fmt: skip


def _manifest(plan: Plan) -> Row:
    """What all runs share, from the first that has a manifest."""
    facts = dict(plan.facts)
    for cell in plan.cells:
        try:
            data = rundir.load(cell.directory)
        except UserError:
            continue
        said = data.get("settings")
        settings = {name: value for name, value in said.items() if name != "seed"} if isinstance(said, dict) else {}
        asked = data["options"] if isinstance(data["options"], dict) else {}
        task = facts.get("task") or str(data.get("task"))
        model = facts.get("model") or asked.get("model") or _default_model(task)
        return facts | {"task": task, "model": model, "versions": data.get("versions"), "settings": settings, "threads": plan.threads, "finished": _finished(plan),
                        "train": plan.train, "config": plan.config}  # fmt: skip
    return facts


def _finished(plan: Plan) -> str | None:
    """When the last run ended, if all have."""
    ends = []
    for cell in plan.cells:
        try:
            ends.append(str(rundir.load(cell.directory)["finished"] or ""))
        except UserError:
            return None
    return None if "" in ends else max(ends)


def _default_model(task: str) -> str:
    from klamp.tasks import TASKS
    from klamp.tasks import task as named

    return named(task if task in TASKS else "sort").model


# --- metrics over seeds ---------------------------------------------------------------------------------------


def _metrics(
    outcomes: Mapping[str, Mapping[int, Outcome]], logs: Sequence[Row], threshold: float | None
) -> dict[str, Row]:
    """The metrics that some run or log has, with what they mean."""
    measured = [one.metrics for runs in outcomes.values() for one in runs.values()]
    measured += [run["metrics"] for log in logs for run in log["runs"]]
    found = {}
    for name, (title, unit, better, definition) in METRICS.items():
        if any(metrics.get(name) is not None for metrics in measured):
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
            highest = 1.0 if METRICS[name][1] == "share" else math.inf
            # No metric is below 0, and no share above 1: an interval that reaches out of there ends there.
            row |= {
                "low": max(0.0, interval.low),
                "high": min(highest, interval.high),
                "iqm": interquartile_mean(values).value,
            }
        rows.append(row)
    return rows


def _differences(name: str, reference: str, outcomes: Mapping[str, Mapping[int, Outcome]]) -> list[Row]:
    """Each spec minus the reference, paired by seed."""
    direction = METRICS[name][2]
    rows = [
        _difference(name, label, outcomes[reference], runs, direction)
        for label, runs in outcomes.items()
        if label != reference
    ]
    return [row for row in rows if row["n"]]


def _judged(rows: list[Row], twins: Mapping[str, str]) -> list[Row]:
    """With a verdict on the metrics of JUDGED, their p by Holm's rule over all of these comparisons together.

    ``twins``: specs that are another one again, by its label; they ask nothing new and have the other's verdict.
    """
    ours = [row for row in rows if row["metric"] in JUDGED and row["label"] not in twins]
    for row, p in zip(ours, holm([row["p"] for row in ours]), strict=True):
        row["p_holm"] = p
        row["verdict"] = _verdict(row, METRICS[row["metric"]][2])
    known = {(row["label"], row["metric"]): row for row in ours}
    for row in rows:
        twin = known.get((twins.get(row["label"], ""), row["metric"]))
        if twin is not None:
            row |= {"p_holm": twin["p_holm"], "verdict": twin["verdict"]}
    return rows


def _difference(
    name: str, label: str, base: Mapping[int, Outcome], runs: Mapping[int, Outcome], direction: str | None
) -> Row:
    seeds = [seed for seed in base if seed in runs]
    both = [(seed, base[seed].metrics.get(name), runs[seed].metrics.get(name)) for seed in seeds]
    pairs = [(seed, a, b) for seed, a, b in both if a is not None and b is not None]
    row: Row = {"label": label, "metric": name, "n": len(pairs), "mean": None, "low": None, "high": None, "p": None,
                "p_holm": None, "sign_p": None, "flip_p": None, "better": None, "worse": None, "same": None, "improvement": None,
                "needed": None, "detectable": None, "verdict": None, "values": [[seed, b - a] for seed, a, b in pairs], "crossed": None}  # fmt: skip
    if not pairs:
        return row
    a, b = [one for _, one, _ in pairs], [one for _, _, one in pairs]
    found = paired_seeds(a, b)
    better, worse = (found.worse, found.better) if direction == "lower" else (found.better, found.worse)
    row["mean"] = found.difference.value
    if len(pairs) < LEAST:
        return row
    if direction is not None:
        row |= {"better": better, "worse": worse, "same": found.same}
    chance = probability_of_improvement(a, b).value
    row |= {"low": found.difference.low, "high": found.difference.high, "p": found.p, "sign_p": found.p_sign,
            "flip_p": found.p_sign_flip, "improvement": None if direction is None else 1.0 - chance if direction == "lower" else chance,
            "detectable": detectable(len(pairs), found.deviation) if found.deviation > 0.0 else None, "needed": _needed(found.difference.value, found.deviation),
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
    found = crossed(matrix).to_dict()
    return {name: found[name] for name in ("mean", "low", "high", "questions")}


def _verdict(row: Row, direction: str | None) -> str:
    """better, worse, no difference found, no test possible, or too few seeds."""
    if row["n"] < LEAST:
        return "too few seeds"
    if row["p_holm"] is None:
        return "no test possible"  # the seeds differ by the same amount, all of them
    if row["p_holm"] >= ALPHA:
        return "no difference found"
    return "better" if (row["mean"] > 0) == (direction == "higher") else "worse"


def _warnings(plan: Plan) -> list[str]:
    """What runs warned of, each warning once, with the number of runs."""
    counts: Counter[str] = Counter()
    for cell in plan.cells:
        log = log_of(cell)
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        counts.update({line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")})
    return [f"{count} of {len(plan.cells)} runs warned: {text}" for text, count in counts.items()]


def _notes(plan: Plan, found: Mapping[str, Mapping[int, tuple[Row, Outcome | None]]]) -> list[str]:
    notes = []
    open_runs = [row["directory"] for runs in found.values() for row, one in runs.values() if one is None]
    if open_runs:
        notes.append(
            f"{len(open_runs)} of {len(plan.cells)} runs have not ended; they continue with the same command: klamp compare, or of "
            "--print-commands the run's own."
        )
    failed = [f"{row['directory']} ({row.get('why')})" for runs in found.values() for row, _ in runs.values() if row["status"] == "failed"]  # fmt: skip
    if failed:
        notes.append(f"ended in an error, which counts as a collapse: {'; '.join(failed)}.")
    notes += [f"{row['directory']}: {note}" for runs in found.values() for row, _ in runs.values() for note in row.get("notes", ())]  # fmt: skip
    notes += [row["why"] for runs in found.values() for row, _ in runs.values() if row["status"] == "unreadable"]
    if len(plan.seeds) < LEAST:
        notes.append(f"nothing is ranked with fewer than {LEAST} seeds.")
    if any(one is not None and one.collapsed for runs in found.values() for _, one in runs.values()):
        notes.append("some runs collapsed: then every interval covers less than it says; read the counts and the sign test.")  # fmt: skip
    notes += plan.facts.get("warnings", [])
    notes += _warnings(plan)
    notes += [f"{e.label} is the same constraint as {e.same_as}, and runs its text." for e in plan.entries if e.same_as]
    notes += [f"{e.label}: {e.note}" for e in plan.entries if e.note]
    return notes
