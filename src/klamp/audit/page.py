"""The page of an audit: one file that opens offline, with its pictures, numbers and style inside; foreign text stays text."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from klamp.audit.text import agreement_table, main_sentence, number, percent, slice_table, specs_table
from klamp.errors import UserError
from klamp.report.charts import Series, histogram, line_chart
from klamp.report.page import STYLE, document, text

Row = Mapping[str, Any]
_MOST_STEPS = 4000  # points of a chart, of which it draws fewer
_SLICES = {
    "old_prob": "probability of the token under the old policy",
    "side": "side of w = new/old",
    "position": "place of the token in its response",
    "advantage": "advantage",
    "entropy": "entropy of the new policy at the token",
}


def write(found: Row, target: Path) -> Path:
    """Write the page, whole or not at all; returns its path. Raises UserError if it cannot be written."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(render(found).encode("utf-8", "backslashreplace"))
        os.replace(temporary, target)
    except OSError as error:
        raise UserError(
            f"cannot write {target}: {error.strerror}; give a file in a directory that can be written"
        ) from error
    finally:
        if temporary.exists():
            temporary.unlink()
    return target


def render(found: Row) -> str:
    """The page as text, from what ``klamp audit --json`` prints."""
    parts = [
        _header(found),
        _findings(found),
        _specs(found),
        _steps(found),
        _where(found),
        _tokens(found),
        _sizes(found),
        _facts(found),
    ]
    return document(f"{_title(found)} - Klamp audit", "\n".join(part for part in parts if part), STYLE + _STYLE)


def _title(found: Row) -> str:
    files = found["files"]
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{Path(files[0]).name or files[0]}{more}"


# --- head and findings ----------------------------------------------------------------------------------------


def _header(found: Row) -> str:
    log = found["log"]
    steps = log["steps"]
    tiles = _tile("Tokens", f"{log['tokens']:,}", f"of {log['responses']:,} responses, {steps['count']:,} steps")
    for spec in found["specs"][:3]:
        removed = spec["removed"]
        tiles += _tile(
            f"Gradient removed by {spec['label']}", percent(removed["mass_share"]),
            f"at {percent(removed['share'])} of the tokens: low {percent(removed['low_share'])}, high {percent(removed['high_share'])}",
        )  # fmt: skip
    tiles += _tile(
        "KL(old || new)",
        number(log["kl_old_new"]["k3"]),
        f"nats per token; {number(log['kl_old_new_sequence'])} per response",
    )
    sentences = "".join(f"<li>{text(main_sentence(spec))}</li>" for spec in found["specs"])
    return (
        f'<header><p class="eyebrow">Klamp audit</p><h1><code>{text(_title(found))}</code></h1>'
        f'<p class="lede">What each constraint would have cut of these logged tokens, and what is wrong with the log.</p>'
        f'<div class="tiles">{tiles}</div><ul class="main">{sentences}</ul></header>'
    )


def _tile(label: str, figure: str, source: str) -> str:
    return f'<div class="tile"><p class="label">{text(label)}</p><p class="figure">{text(figure)}</p><p class="source">{text(source)}</p></div>'


def _findings(found: Row) -> str:
    cards = "".join(
        f'<article class="finding"><h3>{text(one["what"])}</h3><p>{text(one["evidence"])}</p><p class="do">{text(one["do"])}</p></article>'
        for one in found["findings"]
    )
    count = len(found["findings"])
    intro = (
        f"{count} finding{'s' if count > 1 else ''}, each with its evidence and what to do."
        if count
        else "Nothing in this log looks wrong."
    )
    return _section("findings", "What is wrong", intro, cards)


# --- specs ----------------------------------------------------------------------------------------------------


def _specs(found: Row) -> str:
    if not found["specs"]:
        return ""
    intro = (
        "Removed: tokens whose gradient the spec sets to 0, by the side of w on which they lie. Gradient: their share of the sum of |A| w. Outside: "
        "beyond the region, whatever the sign of A. Effective: the effective share of the tokens that carry the gradient. Cosine: of the "
        "gradient's coefficients with and without the guards."
    )
    body = _table(specs_table(found), titles=[spec["spec"] for spec in found["specs"]])
    if len(found["specs"]) > 1:
        body += "<h3>Removed by the row's spec, kept by the column's</h3>" + _table(agreement_table(found))
    return _section("specs", "What each spec removes", intro, body)


def _steps(found: Row) -> str:
    steps = found["log"]["by_step"]
    if len(steps) < 2 or len(steps) > 50 * _MOST_STEPS:
        return ""
    tokens = {row["step"]: row["tokens"] for row in steps}
    charts = [
        line_chart(
            f"Removed by {spec['label']}", "Share of the tokens whose gradient is removed, by side.",
            [Series(f"{side} side", [(row["step"], row[f"removed_{side}"] / max(tokens[row["step"]], 1)) for row in spec["by_step"]], side)
             for side in ("low", "high")],
            "share of tokens", percent=True,
        )
        for spec in found["specs"]
    ]  # fmt: skip
    entropy = "entropy" if found["log"]["entropy"] is not None else "surprisal_old"
    for name, title, caption in (
        ("kl_old_new", "KL(old || new)", "How far the update had gone from the policy that sampled, by the k3 estimate."),
        (entropy, "Entropy" if entropy == "entropy" else "Mean -log p under the old policy", "How undecided the policy is about the next token."),
        ("kl_rollout_old", "KL(rollout || old)", "How far the trainer's policy is from the sampler's before the update: 0 if they were the same."),
    ):  # fmt: skip
        if any(row[name] is not None for row in steps):
            charts.append(
                line_chart(
                    title,
                    caption,
                    [Series(title, [(row["step"], row[name]) for row in steps], "one")],
                    "nats per token",
                )
            )
    return _section(
        "steps",
        "Over the run",
        "A region cuts most where an update has gone far.",
        f'<div class="charts">{"".join(charts)}</div>',
    )


def _where(found: Row) -> str:
    """The histogram of ratios, and each slice as a table with bars."""
    ratios = found["log"]["log_ratio_histogram"]
    bounds = next(
        (
            bound
            for spec in found["specs"]
            for bound in spec["bounds"]
            if bound["ratio"] == "new/old" and bound["scope"] == "token"
        ),
        None,
    )
    low, high = (None, None) if _unbounded(bounds) else (bounds["low"], bounds["high"])  # type: ignore[index]
    picture = histogram(
        "Ratios", "How much likelier each token had become than when it was sampled; the ends hold all that lies further out.",
        ratios["edges"], ratios["counts"], (math.log(low) if low else None, math.log(high) if high else None), "w = new/old", "tokens",
    )  # fmt: skip
    names = list(dict.fromkeys(name for spec in found["specs"] for name in spec["slices"]))
    body = f'<div class="charts">{picture}</div>'
    for name in names:
        for spec in found["specs"]:
            body += f"<h3>{text(spec['label'])}, by {text(_SLICES.get(name, name))}</h3>{_slice(spec, name)}"
    return _section(
        "where",
        "Where it cuts",
        "Shares are of the tokens with A != 0 in that row; the bar is the share removed, low and high.",
        body,
    )


def _unbounded(bounds: Row | None) -> bool:
    return bounds is None or (bounds["low"] is None and bounds["high"] is None)


def _slice(spec: Row, name: str) -> str:
    rows = slice_table(spec, name)
    bars = [_bar(row["removed_low"], row["removed_high"], row["active"]) for row in spec["slices"][name]]
    return _table(rows, extra=bars)


def _bar(low: int, high: int, active: int) -> str:
    """Low and high shares as one bar of 120 units, 100 % wide."""
    if not active:
        return ""
    a, b = 120.0 * low / active, 120.0 * high / active
    return (
        f'<svg class="share" viewBox="0 0 120 10" aria-hidden="true"><rect class="track" width="120" height="10"/>'
        f'<rect class="bar low" width="{a:.2f}" height="10"/><rect class="bar high" x="{a:.2f}" width="{b:.2f}" height="10"/></svg>'
    )


def _tokens(found: Row) -> str:
    tables = "".join(
        f"<h3>{text(spec['label'])}</h3>{_table(slice_table(spec, 'token'))}"
        for spec in found["specs"]
        if spec["tokens_cut_most"]
    )
    return (
        _section(
            "tokens",
            "The tokens cut most often",
            "A few tokens, such as those of a format, may carry most of what is cut.",
            tables,
        )
        if tables
        else ""
    )


def _sizes(found: Row) -> str:
    tables = ""
    for spec in found["specs"]:
        rows = [["measure", "radius", "ratio bounds", "removed"]]
        rows += [
            [one["measure"], number(one["radius"], 4), f"{number(one['low'], 4)} to {number(one['high'], 4)}", f"{one['removed']:,}"]
            for one in spec["same_share"] if one["radius"] is not None
        ]  # fmt: skip
        tables += f"<h3>As many tokens as {text(spec['label'])}</h3>{_table(rows)}" if len(rows) > 1 else ""
    intro = "The radius of each measure, on the ratio of a token, that would have removed the same share here: to compare measures, not sizes."
    return _section("sizes", "The same size in other measures", intro, tables) if tables else ""


def _facts(found: Row) -> str:
    log = found["log"]
    quantiles = [["share below", *log["ratio_quantiles"]], ["w = new/old", *(number(value, 4) for value in log["ratio_quantiles"].values())],
                 ["log w", *(number(value, 4) for value in log["log_ratio_quantiles"].values())]]  # fmt: skip
    notes = "".join(
        f"<li>{text(note)}</li>"
        for note in [*found["notes"], f"log-ratio quantiles are within {percent(log['quantile_error'])} of the value"]
    )
    files = "".join(f"<li><code>{text(name)}</code></li>" for name in found["files"][:50])
    limits = ", ".join(f"{name} {value:g}" for name, value in found["limits"].items())
    return (
        f'<section class="notes" id="log"><h2>The log</h2>{_table(quantiles)}<ul>{notes}{files}<li>limits of the diagnoses: {text(limits)}</li>'
        f"<li>klamp {text(found['klamp'])}</li></ul></section>"
    )


# --- pieces ---------------------------------------------------------------------------------------------------


def _section(name: str, title: str, intro: str, body: str) -> str:
    return f'<section id="{name}"><h2>{text(title)}</h2><p class="intro">{text(intro)}</p>{body}</section>'


def _table(rows: Sequence[Sequence[str]], titles: Sequence[str] = (), extra: Sequence[str] = ()) -> str:
    """A table whose first row is its head; ``titles`` of rows where the pointer rests; ``extra``: a cell of HTML at their ends."""
    head = "".join(f'<th scope="col">{text(cell)}</th>' for cell in rows[0]) + ("<th></th>" if extra else "")
    body = ""
    for index, row in enumerate(rows[1:]):
        title = f' title="{text(titles[index])}"' if index < len(titles) else ""
        cells = f'<th scope="row"{title}>{text(row[0])}</th>' + "".join(f"<td>{text(cell)}</td>" for cell in row[1:])
        body += f"<tr>{cells}{f'<td>{extra[index]}</td>' if index < len(extra) else ''}</tr>"
    return (
        f'<div class="scroll"><table class="numbers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


_STYLE = """\
.main { padding-left: 20px; color: var(--soft); } .main li { margin-top: 4px; overflow-wrap: anywhere; }
.finding { background: var(--card); border: 1px solid var(--rule); border-left: 4px solid var(--high); border-radius: 10px; padding: 14px 18px; margin-top: 12px; }
.finding p { font-size: 14px; color: var(--soft); overflow-wrap: anywhere; } .finding .do { color: var(--ink); margin-top: 6px; }
section > h3 { margin: 20px 0 8px; overflow-wrap: anywhere; }
table.numbers { min-width: 0; } .numbers td, .numbers th { padding: 6px 14px; white-space: nowrap; }
.numbers th[scope="row"] { color: var(--ink); border-bottom: 0; border-top: 1px solid var(--grid); max-width: 340px; overflow: hidden; text-overflow: ellipsis; }
.numbers td { text-align: right; } .numbers thead th { text-align: right; } .numbers th:first-child { text-align: left; }
.numbers .share { width: 120px; min-width: 120px; } .track { fill: var(--grid); }
.tile .source { overflow-wrap: anywhere; }
"""
