"""Two numbers of each run against each other: what was gained, and what it took."""

from __future__ import annotations

import math
from collections.abc import Callable

from klamp.compare.report import canvas
from klamp.compare.report.canvas import Axis, Frame, across
from klamp.compare.report.data import Comparison, Metric, Run, Spec
from klamp.compare.report.words import shown
from klamp.report.charts import number
from klamp.report.page import text

Point = tuple[Run, float, float]
KL, ENTROPY = "policy/kl_old_new_mean", "policy/entropy_mean"


def section(c: Comparison) -> str:
    accuracy = c.find("accuracy_sampled", "accuracy_greedy", "accuracy", "reward")
    if accuracy is None:
        return canvas.section("trade-off", "What it took", "No final accuracy was recorded.", "")
    kl = _measured(c, ("kl_mean", "mean_kl", "kl"), KL, whole_run=True)
    entropy = _measured(c, ("entropy_final", "final_entropy", "entropy"), ENTROPY, whole_run=False)
    title = accuracy.title
    up = "Higher" if accuracy.better != "lower" else "Lower"
    body = _plane(c, accuracy, kl, f"{title} against KL(old || new)",
                  f"{up} and further left is better: as much learned by smaller moves away from the policy that sampled.",
                  "mean KL(old || new), nats per token")  # fmt: skip
    body += _plane(c, accuracy, entropy, f"{title} against entropy",
                   f"{up} is better; further left, less entropy is left to explore with.",
                   "final entropy, nats per token")  # fmt: skip
    intro = "Small marks are single seeds, the big mark is their mean. Marks that overlap differ little in these two numbers."
    return canvas.section("trade-off", "What it took", intro, f'<div class="charts">{body}</div>')


def _measured(c: Comparison, names: tuple[str, ...], curve: str, whole_run: bool) -> Callable[[Run], float | None]:
    """A quantity of a run: the metric of that name, or else the mean of its curve (of the last quarter)."""
    metric = c.find(*names)

    def read(run: Run) -> float | None:
        if metric is not None and metric.name in run.metrics:
            return run.metrics[metric.name]
        line = run.curves.get(curve, {})
        last = max(line, default=0)
        values = [v for step, v in line.items() if v is not None and (whole_run or step > 0.75 * last or step == last)]
        return math.fsum(values) / len(values) if values else None

    return read


def _plane(
    c: Comparison, accuracy: Metric, across_of: Callable[[Run], float | None], title: str, caption: str, x_title: str
) -> str:
    points = {spec: _points(spec, accuracy, across_of) for spec in c.drawn}
    flat = [point for found in points.values() for point in found]
    if not flat:
        return canvas.nothing(title, caption)
    xs, ys = [x for _, x, _ in flat], [y for _, _, y in flat]
    log = min(xs) > 0 and canvas.uneven(xs)
    x = canvas.logarithmic(xs) if log else canvas.linear(canvas.inner(xs))
    y = canvas.linear(canvas.inner(ys), accuracy.share)
    frame = Frame("plane")
    small, big = "", ""
    for spec, found in points.items():
        for run, one, other in found:
            tip = f"{spec.label}, seed {run.seed}: {shown(other, accuracy)} at {number(one)}"
            small += _place(spec, x, y, frame, one, other, tip, "m" if len(found) > 1 else "b")
        if len(found) > 1:
            middle = [math.fsum(values) / len(found) for values in ([x for _, x, _ in found], [y for _, _, y in found])]
            tip = f"{spec.label}, mean of {len(found)} seeds: {shown(middle[1], accuracy)} at {number(middle[0])}"
            big += _place(spec, x, y, frame, middle[0], middle[1], tip, "b")
    far = sum(bool(x.beyond(one) or y.beyond(other)) for _, one, other in flat)
    caption += f" Arrows: {'1 run lies' if far == 1 else f'{far} runs lie'} beyond the picture." if far else ""
    label = f"{title}; {len(flat)} runs, the numbers are in the table of all metrics"
    x_title += " (logarithmic)" if log else ""
    y_title = f"{accuracy.title}" + ("" if accuracy.share else f", {accuracy.unit}" if accuracy.unit else "")
    absent = [spec.label for spec, found in points.items() if not found]
    caption += f" Not recorded: {', '.join(absent)}." if absent else ""
    return canvas.figure(title, caption, frame.draw(x, y, small + big, label, x_title, y_title) + canvas.keys(c.drawn))


def _place(spec: Spec, x: Axis, y: Axis, frame: Frame, one: float, other: float, tip: str, kind: str) -> str:
    """A mark where it belongs; beyond the picture at its edge, with an arrow that points on."""
    aside, up = x.beyond(one), y.beyond(other)
    at, height = across(x.at(one)), frame.y(y.at(other))
    faint = ' fill-opacity=".45" stroke-opacity=".45"' if kind == "m" else ""
    extra = f'{faint} data-tip="{text(tip)}"'
    if aside or up:
        return canvas.far_mark(spec.place, at, height, kind, extra, aside, up)
    return canvas.mark(spec.place, at, height, kind, extra)


def _points(spec: Spec, accuracy: Metric, across_of: Callable[[Run], float | None]) -> list[Point]:
    return [(run, x, y) for run, y in spec.values(accuracy.name) if (x := across_of(run)) is not None]
