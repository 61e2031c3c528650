"""A comparison as text: one table of means with intervals, one of paired differences; also as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SHOWN = ("accuracy_sampled", "accuracy_greedy", "auc", "largest_drop", "pass_at_n", "distinct_correct", "kl", "entropy_final", "removed_low", "removed_high")  # fmt: skip
JUDGED = ("accuracy_sampled", "accuracy_greedy", "auc", "largest_drop")

Row = dict[str, Any]


def text(found: Row) -> str:
    """For a terminal."""
    lines = [*_aligned(means(found)), ""]
    for metric in JUDGED:
        rows = differences(found, metric)
        if len(rows) > 1:
            lines += [*_aligned(rows), ""]
    if len(lines) == 1 + len(found["specs"]) + 1:
        lines.append("nothing is ranked with fewer than 3 seeds")
    return "\n".join(lines + [f"note: {note}" for note in found["notes"]])


def means(found: Row, metrics: Sequence[str] = SHOWN) -> list[list[str]]:
    """Spec, then each metric that is there: mean and half the width of its interval; collapsed of all runs."""
    by = {(row["label"], row["metric"]): row for row in found["summary"]}
    shown = [name for name in metrics if name in found["metrics"]]
    head = ["spec", *(found["metrics"][name]["title"] for name in shown), "collapsed"]
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
        [f"{facts['title']}, minus {found['reference']}", "difference", "95 %", "p (Holm)", "better/worse", "verdict"]
    ]
    for row in found["differences"]:
        if row["metric"] == metric and row["verdict"] != "too few seeds":
            unit = facts["unit"]
            interval = "-" if row["low"] is None else f"[{signed(row['low'], unit)}, {signed(row['high'], unit)}]"
            p = "-" if row["p_holm"] is None else f"{row['p_holm']:.2g}"
            table.append([row["label"], signed(row["mean"], unit), interval, p, f"{row['better']}/{row['worse']}", row["verdict"] or ""])  # fmt: skip
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
