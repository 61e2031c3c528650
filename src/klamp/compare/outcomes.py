"""What one run of a comparison came to: its metrics as numbers, its curves, and what its regions cut."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from klamp.errors import UserError
from klamp.metrics import PROBABILITY_EDGES
from klamp.report import Run, load_run
from klamp.report.run import finite, points
from klamp.statistics import pass_at_k

Curve = list[tuple[int, float | None]]

# name -> (title, unit, which is better, definition)
METRICS: dict[str, tuple[str, str, str | None, str]] = {
    "accuracy_sampled": ("final accuracy, sampled", "share", "higher", "held-out problems answered correctly at temperature 1 at the end, mean over the samples"),
    "accuracy_greedy": ("final accuracy, greedy", "share", "higher", "held-out problems answered correctly by greedy decoding at the end"),
    "auc": ("area under the curve", "share", "higher", "mean height of the curve of sampled held-out accuracy over the optimizer steps, by trapezoids"),
    "best": ("best accuracy, sampled", "share", "higher", "highest sampled held-out accuracy of all evaluations"),
    "reward": ("training reward", "reward", "higher", "mean of train/reward_mean over the logged steps"),
    "steps_to_threshold": ("steps to the threshold", "steps", "lower", "optimizer steps at the first evaluation with at least the threshold's sampled accuracy; none where it is never reached"),
    "pass_at_n": ("final pass@n", "share", "higher", "held-out problems with a correct answer among all n samples at the end"),
    "distinct_correct": ("distinct correct answers", "count", "higher", "different texts among the correct samples of a problem at the end, mean over problems"),
    "largest_drop": ("largest drop", "share", "lower", "largest fall of sampled held-out accuracy below its best so far"),
    "grad_norm_variance": ("variance of the gradient norm", "norm", "lower", "variance over the logged steps of the gradient norm before clipping"),
    "kl": ("KL(old||new) per token", "nats", None, "mean of policy/kl_old_new_mean over the logged steps (all of them, unless --logging_steps says otherwise)"),
    "kl_sequence": ("KL(old||new) per response", "nats", None, "mean of policy/kl_old_new_sequence_mean over the logged steps"),
    "entropy_floor": ("lowest entropy", "nats", None, "lowest policy/entropy_mean of the logged steps"),
    "entropy_final": ("final entropy", "nats", None, "mean of policy/entropy_mean over the last tenth of the logged steps"),
    "removed_low": ("gradient removed, low side", "share", None, "tokens whose gradient a guard removed, w below its region, of all tokens"),
    "removed_high": ("gradient removed, high side", "share", None, "the same, w above"),
    "removed_positive": ("gradient removed, A > 0", "share", None, "tokens removed with an advantage above 0, of all tokens"),
    "removed_negative": ("gradient removed, A < 0", "share", None, "tokens removed with an advantage below 0, of all tokens"),
    "seconds": ("time", "seconds", None, "wall time of the run, evaluations included; runs beside it on the machine slow it down"),
}  # fmt: skip
PRIMARY = "accuracy_sampled"
# Named beforehand: the family of comparisons that share one error rate.
JUDGED = (PRIMARY, "accuracy_greedy", "auc", "largest_drop")
CURVES = {
    "eval/accuracy_sampled": "evals", "eval/accuracy_greedy": "evals", "train/reward_mean": "train",
    "policy/kl_old_new_mean": "train", "policy/entropy_mean": "train", "train/grad_norm": "train",
}  # fmt: skip
COLLAPSE = 0.5  # a run has collapsed if its final sampled accuracy is below this share of its accuracy at the start


@dataclass
class Outcome:
    """``metrics``: those of METRICS, None where the run does not say. ``questions``: final share of correct answers by
    held-out problem, greedy and sampled. ``start``: sampled accuracy before training."""

    metrics: dict[str, float | None]
    curves: dict[str, Curve]
    anatomy: dict[str, Any] | None = None
    collapsed: bool | None = None
    start: float | None = None
    samples: int = 1
    notes: list[str] = field(default_factory=list)
    questions: dict[str, list[float]] = field(default_factory=dict)


def outcome(directory: Path, failed: bool = False) -> Outcome:
    """What a run directory says, whole or not.

    ``failed``: it ended in an error. Then it has no model: it answers nothing, from the step of the error on, and has
    collapsed. Raises UserError where the files do not say what a run says.
    """
    try:
        return _outcome(directory, failed)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, IndexError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{directory} cannot be read: {type(error).__name__} {error}") from error


def _outcome(directory: Path, failed: bool) -> Outcome:
    run = load_run(directory)
    curves: dict[str, Curve] = {name: points(run, getattr(run, kind), name) for name, kind in CURVES.items()}
    curves["removed_share"] = _removed(run)
    samples, questions = _questions(directory)
    if failed:
        curves, questions = _nothing_after(run, curves), {name: [0.0] * len(found) for name, found in questions.items()}
    found = from_curves(curves) | _counted(run)
    found["seconds"] = max((finite(row.get("seconds")) or 0.0 for row in run.train.values()), default=None)
    found["kl_sequence"] = _mean(value for _, value in points(run, run.train, "policy/kl_old_new_sequence_mean"))
    last = run.evals[max(run.evals)] if run.evals else {}
    if samples > 1:
        found["pass_at_n"] = 0.0 if failed else finite(last.get("eval/pass_share"))
        found["distinct_correct"] = 0.0 if failed else finite(last.get("eval/distinct_correct_mean"))
    start = next((value for _, value in curves["eval/accuracy_sampled"] if value is not None), None)
    metrics = {name: finite(found.get(name)) for name in METRICS}
    end = metrics[PRIMARY]
    gone = failed or (start is not None and end is not None and end < COLLAPSE * start)
    return Outcome(metrics, curves, _anatomy(run), gone, start, samples, run.notes + _cut_off(run, failed), questions)


def _nothing_after(run: Run, curves: dict[str, Curve]) -> dict[str, Curve]:
    """The curves of a run that ended in an error: its accuracy is 0 from there to where it should have ended."""
    step = max([*run.train, *run.evals, 0])
    settings = run.manifest.get("settings")
    planned = settings.get("max_steps") if isinstance(settings, dict) else None
    ends = sorted({step, planned if isinstance(planned, int) and planned > step else step})
    accuracy: dict[str, Curve] = {
        name: [point for point in curves[name] if point[0] < step] + [(end, 0.0) for end in ends]
        for name in CURVES
        if name.startswith("eval/")
    }
    return curves | accuracy


def _cut_off(run: Run, failed: bool) -> list[str]:
    """Whether a run that is called finished lacks its end."""
    last, measured = max(run.train, default=0), max(run.evals, default=-1)
    if failed or run.manifest.get("finished") is None or measured >= last > 0:
        return []
    return ["its last evaluation is missing, so what stands for its end is an earlier one"]


def from_curves(curves: dict[str, Curve]) -> dict[str, float | None]:
    """The metrics that curves alone give; those of other trainers' logs too."""
    sampled = [(step, value) for step, value in curves.get("eval/accuracy_sampled", []) if value is not None]
    greedy = [value for _, value in curves.get("eval/accuracy_greedy", []) if value is not None]
    heights = [value for _, value in sampled]
    norms = [value for _, value in curves.get("train/grad_norm", []) if value is not None]
    entropy = [value for _, value in curves.get("policy/entropy_mean", []) if value is not None]
    return {
        "accuracy_sampled": heights[-1] if heights else None,
        "accuracy_greedy": greedy[-1] if greedy else None,
        "auc": area(sampled),
        "best": max(heights, default=None),
        "largest_drop": largest_drop(heights),
        "reward": _mean(value for _, value in curves.get("train/reward_mean", [])),
        "kl": _mean(value for _, value in curves.get("policy/kl_old_new_mean", [])),
        "grad_norm_variance": statistics.variance(norms) if len(norms) > 1 else None,
        "entropy_floor": min(entropy, default=None),
        "entropy_final": _mean(entropy[-max(1, len(entropy) // 10) :]),
    }


def area(curve: Sequence[tuple[int, float]]) -> float | None:
    """Mean height of a curve over its steps, by trapezoids; None for fewer than two points."""
    if len(curve) < 2 or curve[-1][0] <= curve[0][0]:
        return None
    parts = [(b - a) * (u + v) / 2.0 for (a, u), (b, v) in pairwise(curve)]
    return math.fsum(parts) / (curve[-1][0] - curve[0][0])


def largest_drop(values: Sequence[float]) -> float | None:
    """max over t of (best of the first t) - (value at t)."""
    best, drop = -math.inf, 0.0
    for value in values:
        best = max(best, value)
        drop = max(drop, best - value)
    return drop if values else None


def steps_to(curve: Curve, threshold: float) -> float | None:
    """The first step with a value of at least ``threshold``."""
    return next((float(step) for step, value in curve if value is not None and value >= threshold), None)


# --- a run directory ------------------------------------------------------------------------------------------


def _counted(run: Run) -> dict[str, float | None]:
    """Shares of tokens removed over the whole run: counts of every line, divided once."""
    anatomy = _anatomy(run)
    if anatomy is None:
        return {}
    tokens = sum(anatomy["tokens"])
    counts = {
        "removed_low": sum(anatomy["removed_low"]), "removed_high": sum(anatomy["removed_high"]),
        "removed_positive": anatomy["removed_positive"], "removed_negative": anatomy["removed_negative"],
    }  # fmt: skip
    return {name: count / tokens if tokens else None for name, count in counts.items()}


def _anatomy(run: Run) -> dict[str, Any] | None:
    """Tokens removed by side and by the old policy's probability of them, and by the sign of the advantage."""
    names = {"tokens": "batch/probability_histogram", "removed_low": "guard/removed_low_histogram",
             "removed_high": "guard/removed_high_histogram"}  # fmt: skip
    bins = len(PROBABILITY_EDGES) - 1
    sums: dict[str, Any] = {name: [0] * bins for name in names} | {"removed_positive": 0, "removed_negative": 0}
    seen = False
    for row in run.train.values():
        lists = {name: row.get(metric) for name, metric in names.items()}
        if not all(
            isinstance(found, list) and len(found) == bins and None not in map(finite, found)
            for found in lists.values()
        ):
            continue
        seen = True
        for name, found in lists.items():
            sums[name] = [a + b for a, b in zip(sums[name], found, strict=True)]  # type: ignore[arg-type]
        tokens = sum(row[names["tokens"]])
        for side in ("removed_positive", "removed_negative"):
            sums[side] += round(tokens * (finite(row.get(f"guard/{side}_share")) or 0.0))
    return {"edges": list(PROBABILITY_EDGES), **sums} if seen else None


def _removed(run: Run) -> Curve:
    """Share of tokens removed, both sides."""
    low, high = (dict(points(run, run.train, f"guard/removed_{side}_share")) for side in ("low", "high"))
    both = [(step, value, high.get(step)) for step, value in low.items()]
    return [(step, None if a is None or b is None else a + b) for step, a, b in both]


def _questions(directory: Path) -> tuple[int, dict[str, list[float]]]:
    """(samples a question, the share of correct ones by question at the last evaluation), from ``heldout.jsonl``."""
    path = directory / "heldout.jsonl"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for line in reversed(lines):
        try:
            row = json.loads(line)
            samples = max(1, int(row.get("samples", 1)))
            marks = {name: [float(mark == "1") for mark in row[name]] for name in ("greedy", "sampled")}
            if samples > 1:
                marks["sampled"] = [min(max(count / samples, 0.0), 1.0) for count in row["correct"]]
            return samples, marks
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue  # the last line of a killed run
    return 1, {}


def pass_shares(outcome: Outcome) -> dict[int, float]:
    """k -> pass@k of the final samples, mean over questions, for k = 1, 2, 4, ... up to their number."""
    n, shares = outcome.samples, outcome.questions.get("sampled", [])
    ks = sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})
    return {k: math.fsum(pass_at_k(n, round(share * n), k) for share in shares) / len(shares) for k in ks if shares}


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return math.fsum(found) / len(found) if found else None
