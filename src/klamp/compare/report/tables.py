"""The rest in numbers: every metric with its definition, every run, the manifest and the notes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from klamp.compare.report import canvas
from klamp.compare.report.canvas import tone
from klamp.compare.report.data import ENOUGH, Comparison, Metric, Spec, words
from klamp.compare.report.forest import needed, ordered
from klamp.compare.report.words import HARD, NONE, definition, difference, interval, p_value, plain, shown
from klamp.report.charts import number
from klamp.report.page import text

FEW = 60  # rows of a table that is open from the start


def collapses(c: Comparison) -> str:
    """One sign for each seed of each spec."""
    signs = {True: ("collapsed", "\N{MULTIPLICATION X}"), False: ("held", "\N{BULLET}"), None: ("unknown", "?")}
    rows = []
    for spec in c.drawn:
        known = [run.collapsed for run in spec.runs if run.collapsed is not None]
        dots = ""
        for run in spec.runs:
            kind, sign = signs[run.collapsed]
            dots += f'<span class="{kind}" data-tip="{text(f"{spec.label}, seed {run.seed}: {kind}")}">{sign}</span>'
        count = f"{sum(known)} of {len(known)}" if known else "not recorded"
        rows.append(
            f'<div class="row brief series {tone(spec.place)}" data-s="{spec.place}"><p class="who">{canvas.named(spec)}</p>'
            f'<p class="seeds">{dots}</p><p class="what">{count}</p></div>'
        )
    caption = "A cross is a seed that collapsed, a dot one that held; ? is a run of which that is not known."
    return canvas.figure("Collapsed seeds", caption, f'<div class="rows">{"".join(rows)}</div>')


def metrics(c: Comparison) -> str:
    """One table: a line with the definition of each metric, then a row for each spec."""
    heads = ["Spec", "n", "Mean", "IQM", "Lowest", "Highest", *_tests(c)]
    groups, count = [], 0
    for metric in ordered(c):
        rows = [row for spec in c.specs if (row := _metric_row(c, spec, metric))]
        count += len(rows)
        unit = ", %" if metric.share else f", {metric.unit}" if metric.unit else ""
        about = f"<b>{text(metric.title)}</b>{text(unit)}. {text(definition(metric))} <code>{text(metric.name)}</code>"
        empty = f'<tr><td colspan="{len(heads)}">not recorded</td></tr>'
        head = f'<tr class="about"><th colspan="{len(heads)}" scope="rowgroup"><div>{about}</div></th></tr>'
        groups.append(f"<tbody>{head}{''.join(rows) or empty}</tbody>")
    if not groups:
        return canvas.section("metrics", "All metrics", "No metrics were recorded.", "")
    intro = "Every number of the page, with what it means."
    if c.judged:
        intro += (
            " In brackets: 95 % intervals (Student's t over seeds). IQM: the mean of the middle half of the seeds. Differences are "
            "paired by seed. P(better): how often the spec was ahead of the reference, a tie counting half. Seeds to see it: "
            "about how many would show a difference of this size, where these did not."
        )
    if _crossed(c):
        intro += " Over seeds and questions: the interval that also counts which questions were held out."
    return canvas.section(
        "metrics", "All metrics", intro, _folded("table of all metrics", _table(heads, "".join(groups)), count)
    )


def _tests(c: Comparison) -> list[str]:
    """The columns that compare; none where there are too few seeds."""
    if not c.judged:
        return []
    heads = [
        "Difference",
        "p",
        "p (Holm)",
        "p (sign)",
        "Better / worse / same",
        "P(better)",
        "Verdict",
        "Seeds to see it",
    ]
    return [*heads, "Over seeds and questions"] if _crossed(c) else heads


def _metric_row(c: Comparison, spec: Spec, metric: Metric) -> str:
    one, found = c.summaries.get((spec.label, metric.name)), c.differences.get((spec.label, metric.name))
    if (one is None or one.mean is None) and found is None:
        return ""
    cells = [NONE] * 5
    if one is not None:
        values = [NONE if value is None else plain(value, metric) for value in (one.mean, one.iqm, one.least, one.most)]
        cells = [str(one.n), f"{values[0]} {interval(one.low, one.high, metric)}", *values[1:]]
    if c.judged and (found is None or found.n < ENOUGH):
        cells += ["reference" if spec.label == c.reference else NONE, *[NONE] * (len(_tests(c)) - 1)]
    elif c.judged and found is not None:
        ps = [
            p_value(p, "").removeprefix(f"{HARD}={HARD}").strip() or NONE for p in (found.p, found.p_holm, found.sign_p)
        ]
        counts = [NONE if count is None else str(count) for count in (found.better, found.worse, found.same)]
        ahead = NONE if found.improvement is None else number(found.improvement)
        cells += [difference(found, metric, unit=False), *ps, " / ".join(counts), ahead]
        cells += [c.verdict(spec.label, metric.name) or NONE, needed(found) or NONE]
        if _crossed(c):
            low, high = found.crossed or (None, None)
            cells.append(interval(low, high, metric) or NONE)
    body = "".join(f"<td>{text(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row"><span class="who">{canvas.named(spec)}</span></th>{body}</tr>'


def _crossed(c: Comparison) -> bool:
    return any(one.crossed for one in c.differences.values())


def runs(c: Comparison) -> str:
    final = ordered(c)[:2]
    heads = ["Spec", "Seed", "Status", "Collapsed", *(metric.title for metric in final), "Directory"]
    rows = []
    for spec in c.specs:
        for run in spec.runs:
            known = {True: "yes", False: "no", None: NONE}[run.collapsed]
            cells = [
                run.seed or NONE,
                f"{run.status}: {run.why}" if run.why else run.status,
                known,
                *(shown(run.metrics.get(metric.name), metric) for metric in final),
            ]
            body = (
                "".join(f"<td>{text(cell)}</td>" for cell in cells)
                + f"<td><code>{text(run.directory or NONE)}</code></td>"
            )
            rows.append(f'<tr><th scope="row"><span class="who">{canvas.named(spec)}</span></th>{body}</tr>')
    intro = "Each run is a directory of klamp train, with its own report." if rows else "There are no runs."
    return canvas.section(
        "runs",
        "Runs",
        intro,
        _folded("table of runs", _table(heads, f"<tbody>{''.join(rows)}</tbody>"), len(rows)) if rows else "",
    )


def manifest(c: Comparison) -> str:
    m = c.manifest
    command = m.get("command")
    facts: list[tuple[str, Any]] = [
        ("Klamp", c.facts.get("klamp")), ("Schema", c.facts.get("schema")), ("Task", c.facts.get("task")), ("Model", c.facts.get("model")),
        ("Base", c.facts.get("base") or "none: the specs ran whole"), ("Calibrated", c.facts.get("calibrated") or "no"), ("Seeds", ", ".join(c.seeds) or None),
        ("Steps", c.facts.get("steps")), ("Started", m.get("started")), ("Finished", m.get("finished") or "not finished"),
        ("Git commit", m.get("git_commit")), ("Settings", _pairs(m.get("settings"))), ("Versions", _pairs(m.get("versions"))),
        ("Command", shlex.join(map(words, command)) if isinstance(command, (list, tuple)) and command else command),
    ]  # fmt: skip
    rows = "".join(
        f"<div><dt>{name}</dt><dd{' class=code' if name in ('Command', 'Git commit', 'Settings') else ''}>"
        f"{text(value) if value is not None else 'not recorded'}</dd></div>"
        for name, value in facts
    )
    return canvas.section("manifest", "How it was run", "What is needed to run it again.", f"<dl>{rows}</dl>")


def notes(c: Comparison) -> str:
    told = list(dict.fromkeys(c.notes)) + [f"{spec.label}: {spec.note}" for spec in c.specs if spec.note]
    if not told:
        return ""
    return f'<section class="notes" id="notes"><h2>Notes</h2><ul>{"".join(f"<li>{text(note)}</li>" for note in told)}</ul></section>'


def _pairs(values: object) -> str | None:
    return (
        ", ".join(f"{words(name)} {words(value)}" for name, value in values.items()) or None
        if isinstance(values, Mapping)
        else None
    )


def _table(heads: Sequence[str], body: str) -> str:
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in heads)
    return f'<div class="scroll" tabindex="0"><table class="numbers"><thead><tr>{head}</tr></thead>{body}</table></div>'


def _folded(name: str, table: str, rows: int) -> str:
    return f"<details{' open' if rows <= FEW else ''}><summary>{name[:1].upper()}{name[1:]}, {rows} rows</summary>{table}</details>"
