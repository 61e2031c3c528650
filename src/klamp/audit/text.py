"""An audit for a reader at a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
WIDTH = 120


def text(found: Row, by: Sequence[str] = ()) -> str:
    """The log, what each spec removes, where the specs differ, and what is wrong; the slices asked for."""
    lines = [*log_lines(found), ""]
    if found["specs"]:
        lines += [*_aligned(specs_table(found)), "", *_explained(_HEADS), ""]
        lines += [*(main_sentence(spec) for spec in found["specs"]), ""]
    if len(found["specs"]) > 1:
        lines += [
            "tokens that the spec of the row removes and that of the column keeps",
            *_aligned(agreement_table(found)),
            "",
        ]
    for name in by:
        for spec in found["specs"]:
            lines += [*_slice_lines(spec, name), ""]
    for spec in found["specs"]:
        lines += [*_same_share(spec), *_cut_most(spec)]
    lines += ["", *finding_lines(found)]
    lines = [part for line in lines for part in _wrapped(line)]
    return "\n".join(lines).rstrip() + "".join(f"\nnote: {note}" for note in found["notes"])


# --- pieces that the page shares ------------------------------------------------------------------------------


def percent(share: float | None) -> str:
    """A share in per cent with three digits, so that a rare cut does not look like none."""
    if share is None:
        return "-"
    if share == 0.0:
        return "0 %"
    value = 100.0 * share
    return f"{value:.1f} %" if value >= 10.0 else f"{value:.2g} %" if value >= 0.0001 else f"{value:.1e} %"


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def log_lines(found: Row) -> list[str]:
    log = found["log"]
    steps, ratio, kl = log["steps"], log["ratio_quantiles"], log["kl_old_new"]
    kinds = ", ".join(found["kinds"])
    span = (
        f"step {steps['first']}"
        if steps["count"] == 1
        else f"{steps['count']} steps ({steps['first']} to {steps['last']})"
    )
    entropy = (
        f"{number(log['entropy'])} nats"
        if log["entropy"] is not None
        else f"not recorded; mean -log p_old {number(log['surprisal_old'])} nats"
    )
    mismatch = log["kl_rollout_old"]
    sampler = "no log-probs of the sampler" if mismatch is None else (
        f"KL(rollout||old) {number(mismatch['k3'])} nats per token (k3; k1 {number(mismatch['k1'])})"
    )  # fmt: skip
    return [
        f"log        {log['tokens']:,} tokens of {log['responses']:,} responses, {span}, {kinds}",
        f"signal     {percent(log['active_share'])} of the tokens have A != 0, {percent(log['positive_share'])} have A > 0",
        f"w=new/old  median {number(ratio['0.5'], 4)}, 1 % below {number(ratio['0.01'], 4)}, 1 % above {number(ratio['0.99'], 4)}; exactly 1 at "
        f"{percent(log['unmoved_share'])}",
        f"moved      KL(old||new) {number(kl['k3'])} nats per token (k3; k1 {number(kl['k1'])}, k2 {number(kl['k2'])}), "
        f"{number(log['kl_old_new_sequence'])} per response",
        f"sampler    {sampler}",
        f"entropy    {entropy}",
    ]


_HEADS: tuple[tuple[str, str], ...] = (
    ("removed", "tokens whose gradient the spec removes, of all"),
    ("low", "of these w too small, where A < 0"),
    ("high", "w too large, where A > 0"),
    ("gradient", "share of sum |A| w (or of the spec's own weight) that is removed"),
    ("outside", "tokens outside the region, whatever A says"),
    ("effective", "effective share of the tokens: (sum |g|)^2 / sum g^2, of those with A != 0"),
    ("cosine", "of the gradient coefficients with and without the guards"),
)


def specs_table(found: Row) -> list[list[str]]:
    rows = [["spec", *(name for name, _ in _HEADS)]]
    for spec in found["specs"]:
        removed, outside, gradient = spec["removed"], spec["outside"], spec["gradient"]
        low, high = percent(removed["low_share"]), percent(removed["high_share"])
        out = (outside["low_share"] or 0.0) + (outside["high_share"] or 0.0)
        rows.append([
            spec["label"], percent(removed["share"]), low, high, percent(removed["mass_share"]), percent(out),
            percent(gradient["effective_share"]), number(gradient["cosine"], 4),
        ])  # fmt: skip
    return rows


def main_sentence(spec: Row) -> str:
    """Which side a spec cut most, why, and where."""
    removed = spec["removed"]
    label, total = spec["label"], removed["tokens"]
    if not total:
        return f"{label} removes no token's gradient."
    side = "low" if removed["low"] >= removed["high"] else "high"
    count = removed[side]
    signs = {"positive": "A > 0", "negative": "A < 0"}
    sign = max(signs, key=lambda name: removed[f"{side}_{name}"])
    pushed = "pushed down" if side == "low" else "pushed up"
    bound = next((one for one in spec["bounds"] if one[side] is not None), None)
    beyond = f" beyond {bound['ratio']} = {number(bound[side], 4)}" if bound else ""
    most = max(spec["removed_by_old_prob"], key=lambda row: row[side])
    where = f"; {most[side]:,} of them at tokens to which the old policy gave a probability of {most['slice']}"
    known = next((row for row in spec["slices"].get("old_prob", []) if row["slice"] == most["slice"]), None)
    where += f", of which it removes {percent(known['removed_share'])}" if known else ""
    return (
        f"{label} cuts most on the {side} side: {count:,} of {total:,} tokens, {signs[sign]}, {pushed}{beyond}{where}."
    )


def agreement_table(found: Row) -> list[list[str]]:
    labels, counts = found["agreement"]["labels"], found["agreement"]["cut_and_kept"]
    rows = [["", *labels]]
    return rows + [
        [label, *("-" if i == j else f"{count:,}" for j, count in enumerate(counts[i]))]
        for i, label in enumerate(labels)
    ]


def slice_table(spec: Row, name: str) -> list[list[str]]:
    """One slice of one spec; the steps of a long run thinned to two dozen."""
    if name == "token":
        rows = spec["tokens_cut_most"]
        head = ["token", "text", "cut", "seen", "cut of seen"]
        return [head, *([str(row["id"]), _shown(row["text"]), f"{row['cut']:,}", "-" if row["seen"] is None else f"{row['seen']:,}",
                         "-" if not row["seen"] else percent(row["cut"] / row["seen"])] for row in rows)]  # fmt: skip
    if name == "step":
        every = max(1, -(-len(spec["by_step"]) // 24))
        return [["step", "removed low", "removed high", "outside", "gradient"], *(
            [str(row["step"]), f"{row['removed_low']:,}", f"{row['removed_high']:,}", f"{row['outside']:,}", percent(row["mass_share"])]
            for row in spec["by_step"][::every])]  # fmt: skip
    return [[name, "tokens", "removed low", "removed high", "of A != 0", "gradient", "outside"], *(
        [row["slice"], f"{row['tokens']:,}", f"{row['removed_low']:,}", f"{row['removed_high']:,}", percent(row["removed_share"]),
         percent(row["mass_share"]), f"{row['outside']:,}"] for row in spec["slices"][name])]  # fmt: skip


def _shown(value: str | None) -> str:
    """The text of a token on one line of a terminal: what a terminal would act on is spelled out."""
    return "-" if value is None else value if value.isprintable() else ascii(value)[1:-1]


# --- lines ----------------------------------------------------------------------------------------------------


def _slice_lines(spec: Row, name: str) -> list[str]:
    return [f"{spec['label']} by {name}", *_aligned(slice_table(spec, name))]


def _same_share(spec: Row) -> list[str]:
    known = [f"{row['measure']} {number(row['radius'])}" for row in spec["same_share"] if row["radius"] is not None]
    return [f"same share as {spec['label']}, by a radius of: {', '.join(known)}"] if known else []


def _cut_most(spec: Row) -> list[str]:
    rows = spec["tokens_cut_most"][:8]
    shown = ", ".join(
        f"{_shown(row['text']) if row['text'] is not None else row['id']} ({row['cut']:,})" for row in rows
    )
    return [f"tokens that {spec['label']} cuts most often: {shown}"] if rows else []


def finding_lines(found: Row) -> list[str]:
    if not found["findings"]:
        return ["no finding: nothing in this log looks wrong"]
    lines = []
    for one in found["findings"]:
        lines += [f"! {one['what']}", f"    {one['evidence']}", f"    {one['do']}"]
    return lines


def _explained(heads: Sequence[tuple[str, str]]) -> list[str]:
    return textwrap.wrap("; ".join(f"{name}: {meaning}" for name, meaning in heads), WIDTH)


def _wrapped(line: str) -> list[str]:
    """Prose of more than a terminal's width on several lines; tables have columns and stay."""
    indent = line[: len(line) - len(line.lstrip())]
    prose = len(line) > WIDTH and "  " not in line.strip()
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False) if prose else [line]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) if k == 0 else cell.rjust(width) for k, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
            for row in rows]  # fmt: skip
