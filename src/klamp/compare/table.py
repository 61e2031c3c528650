"""A comparison as text: one table of means with intervals, one of paired differences; also as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from klamp.compare.outcomes import JUDGED

SHORT = {
    "accuracy_sampled": "sampled",
    "accuracy_greedy": "greedy",
    "auc": "mean height",
    "largest_drop": "largest drop",
}

Row = dict[str, Any]


def text(found: Row) -> str:
    """For a terminal: means, and the differences to the reference in each judged metric."""
    start = "" if found["start"] is None else f"; {number(found['start'], 'share')} before training"
    lines = [f"held-out accuracy on {found['task']}: mean over seeds, with half of its 95 % interval{start}"]
    lines += [*_aligned(means(found)), ""]
    ranked = False
    for metric in JUDGED:
        rows = differences(found, metric)
        if len(rows) > 1:
            lines += [*_aligned(rows), ""]
            ranked = True
    if ranked:
        lines.append(
            "differences in percentage points, paired by seed; p by Holm's rule over all rows above; seen: the difference that so many "
            "seeds find in four of five comparisons. No difference found is not equal: read the interval."
        )
    return "\n".join(lines + [f"note: {note}" for note in found["notes"]])


def means(found: Row, metrics: Sequence[str] = JUDGED, titles: Mapping[str, str] = SHORT) -> list[list[str]]:
    """Spec, then each metric that is there: mean and half the width of its interval; collapsed of all runs."""
    by = {(row["label"], row["metric"]): row for row in found["summary"]}
    shown = [name for name in metrics if name in found["metrics"]]
    head = ["spec", *(titles.get(name, found["metrics"][name]["title"]) for name in shown), "collapsed"]
    table = [head]
    for spec in found["specs"]:
        label = spec["label"]
        ended = next((row for (one, _), row in by.items() if one == label), None)
        collapsed = f"{ended['collapsed']} of {ended['runs']}" if ended else "-"
        table.append(
            [label, *(_mean(by.get((label, name)), found["metrics"][name]["unit"]) for name in shown), collapsed]
        )
    return table


def differences(found: Row, metric: str) -> list[list[str]]:
    """Paired differences to the reference in one metric; none of fewer than three seeds, which rank nothing."""
    if metric not in found["metrics"]:
        return []
    facts = found["metrics"][metric]
    table = [
        [
            f"{facts['title']}, minus {found['reference']}",
            "difference",
            "95 %",
            "seen",
            "p (Holm)",
            "better/worse",
            "verdict",
        ]
    ]
    for row in found["differences"]:
        if row["metric"] == metric and row["low"] is not None:
            unit = facts["unit"]
            interval = f"[{signed(row['low'], unit)}, {signed(row['high'], unit)}]"
            p = next(
                (
                    f"{row[name]:.2g}{mark}"
                    for name, mark in (("p_holm", ""), ("p", " (unadjusted)"))
                    if row[name] is not None
                ),
                "-",
            )
            seen = "-" if row["detectable"] is None else signed(row["detectable"], unit).lstrip("+")
            sides = "-" if row["better"] is None else f"{row['better']}/{row['worse']}"
            table.append([row["label"], signed(row["mean"], unit), interval, seen, p, sides, row["verdict"] or ""])  # fmt: skip
    return table


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    head, *rest = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rest])


def number(value: float, unit: str) -> str:
    """A value in its unit: shares in percent."""
    if unit == "share":
        return f"{100 * value:.1f} %"
    return f"{value:.0f}" if unit in ("steps", "seconds") else f"{value:.3g}"


def signed(value: float, unit: str) -> str:
    """A difference: of shares in percentage points."""
    if unit == "share":
        return f"{100 * value:+.1f}"
    return f"{value:+.0f}" if unit in ("steps", "seconds") else f"{value:+.3g}"


def _mean(row: Row | None, unit: str) -> str:
    if row is None:
        return "-"
    shown = number(row["mean"], unit)
    if row["low"] is None:
        return shown
    half = (row["high"] - row["low"]) / 2
    scale = 100.0 if unit == "share" else 1.0
    return (
        f"{shown.removesuffix(' %')} ± {scale * half:.1f}{' %' if unit == 'share' else ''}"
        if unit == "share"
        else f"{shown} ± {half:.2g}"
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
