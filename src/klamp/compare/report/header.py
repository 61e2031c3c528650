"""The top of the page: what was compared, the main numbers of every spec, and the same as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from klamp.compare.report import canvas
from klamp.compare.report.canvas import tone
from klamp.compare.report.data import ENOUGH, Comparison, Metric, Spec, words
from klamp.compare.report.words import (
    NONE,
    coordinates,
    definition,
    difference,
    inside,
    listed,
    mean,
    p_value,
    region,
    seeds,
    too_few,
)
from klamp.report.page import text

# The columns of numbers: (names of the metric, the heading).
COLUMNS = (
    (("accuracy_sampled",), "Sampled"),
    (("accuracy_greedy",), "Greedy"),
    (("auc",), "AUC"),
    (("largest_drop", "drop"), "Largest drop"),
)


def header(c: Comparison) -> str:
    return (
        f'<header><p class="eyebrow">Klamp comparison report</p><h1>{text(title(c))}</h1>'
        f'<p class="lede">{"".join(text(sentence) + " " for sentence in setting(c))}</p>{_state(c)}</header>{_headline(c)}'
    )


def title(c: Comparison) -> str:
    count = sum(any(run.status != "log" for run in spec.runs) or not spec.runs for spec in c.specs)
    noun = "1 constraint" if count == 1 else f"{count} constraints"
    task = words(c.facts.get("task"))
    return f"{noun} on {task}, {seeds(len(c.seeds))} each" if task else f"{noun}, {seeds(len(c.seeds))} each"


def setting(c: Comparison) -> list[str]:
    """What was held fixed, a sentence each."""
    model, steps, base = (c.facts.get(name) for name in ("model", "steps", "base"))
    out = []
    if model or steps:
        out.append(
            "Each run trained"
            + (f" {words(model)}" if model else "")
            + (f" for {words(steps)} optimizer steps" if steps else "")
            + "."
        )
    if base and not c.facts.get("whole"):
        out.append(f"Only the constraint differs: each one was put into {words(base)}.")
    elif c.facts.get("whole"):
        out.append("The specs ran whole, so they may differ in more than their constraint.")
    if c.facts.get("calibrated"):
        out.append(
            f"The radii were set so that all regions have the same {words(c.facts['calibrated']).replace('_', ' ')}."
        )
    if c.reference:
        out.append(f"The reference is {c.reference}.")
    return out


def _state(c: Comparison) -> str:
    """What is not there, and why nothing is ranked."""
    states = Counter(run.status for spec in c.specs for run in spec.runs)
    odd = [f"{count} {status}" for status, count in states.items() if status not in ("finished", "log")]
    out = (
        [f"Not all of the {sum(states.values())} runs finished ({listed(odd)}); what is not recorded is left out."]
        if odd
        else []
    )
    out += [too_few(c)] if not c.judged else []
    return "".join(f'<p class="warning">{text(one)}</p>' for one in out)


def columns(c: Comparison) -> list[tuple[Metric, str]]:
    found = [(metric, name) for names, name in COLUMNS if (metric := c.find(*names))]
    kept: dict[str, tuple[Metric, str]] = {}
    for metric, name in found:
        kept.setdefault(metric.name, (metric, name))
    if not kept:
        kept = {metric.name: (metric, metric.title) for metric in c.metrics[:4]}
    return list(kept.values())


def collapsed(spec: Spec) -> str:
    """How many of the runs that can tell have collapsed."""
    known = [run.collapsed for run in spec.runs if run.collapsed is not None]
    return f"{sum(known)} of {len(known)}" if known else NONE


def verdict(c: Comparison, spec: Spec) -> tuple[str, list[str]]:
    """(the word, the numbers behind it), on the first metric of the table."""
    if spec.label == c.reference:
        return "reference", []
    shown = columns(c)
    metric = shown[0][0] if shown else None
    word = c.verdict(spec.label, metric.name) if metric else None
    found = c.differences.get((spec.label, metric.name)) if metric else None
    if found is not None and found.n < ENOUGH:
        return "too few seeds", []
    if metric is None or word is None or found is None:
        return NONE, []
    return word, [part for part in (difference(found, metric), p_value(found.p_holm)) if part]


# -- the table ---------------------------------------------------------------------------------


def _headline(c: Comparison) -> str:
    shown = columns(c)
    heads = ["Spec", "Region", *(name for _, name in shown), "Collapsed", *(["Verdict"] if c.judged else [])]
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in heads)
    rows = "".join(_row(c, spec, shown, heads) for spec in c.specs)
    defined = [f"{name}: {definition(metric)}" for metric, name in shown]
    foot = "".join(f"<li>{text(one)}</li>" for one in defined)
    if c.judged and shown:
        foot += f"<li>{text(f'Verdict: on {inside(shown[0][0].title)}, against {c.reference}, seed by seed; p corrected (Holm) for all comparisons of the main metrics. No difference found is not equal: read the interval.')}</li>"
    intro = "Means over seeds, with 95 % intervals in brackets." if c.judged else "Means over the seeds that finished."
    told = _told(c)
    copy = '<button type="button" id="copy">Copy as Markdown</button>'
    table = (
        f'<div class="scroll"><table class="headline"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )
    raw = f'<details id="markdown"><summary>The table as Markdown</summary><pre tabindex="0">{text(markdown(c))}</pre></details>'
    return (
        f'<section id="headline"><div class="bar-of-title"><h2>In short</h2>{copy}</div>'
        f'<p class="intro">{text(" ".join([*told, intro]))}</p>{table}<ul class="fine">{foot}</ul>{raw}</section>'
    )


def _told(c: Comparison) -> list[str]:
    """What the first metric showed, in one sentence; nothing where too few seeds ran."""
    shown = columns(c)
    if not c.judged or not shown:
        return []
    metric = shown[0][0]
    by: dict[str, list[str]] = {}
    for spec in c.drawn:
        word = c.verdict(spec.label, metric.name)
        if word:
            by.setdefault(word, []).append(spec.label)
    if not by:
        return []
    names = {word: listed(by[word]) for word in ("better", "worse", "no difference found") if word in by}
    parts = [f"{word}: {some}" for word, some in names.items()]
    return [f"{metric.title}, against {c.reference}: {'; '.join(parts)}."]


def _row(c: Comparison, spec: Spec, shown: Sequence[tuple[Metric, str]], heads: Sequence[str]) -> str:
    same = f'<span class="sub">same constraint as {text(spec.same_as)}</span>' if spec.same_as else ""
    known = c.summaries.get((spec.label, shown[0][0].name)) if shown else None
    if known is not None and known.n < len(c.seeds):
        same += f'<span class="sub">{known.n} of {seeds(len(c.seeds))}</span>'
    ran = f"<code>{text(spec.text)}</code>" if spec.text and spec.text != spec.label else ""
    hover = f' title="{text(f"asked: {spec.asked}")}"' if spec.asked and spec.asked != spec.text else ""
    place = coordinates(spec.region)
    cells = [f"{text(region(spec.region))}{f'<span class=sub>{text(place)}</span>' if place else ''}"]
    cells += [_mean(c, spec, metric) for metric, _ in shown]
    cells.append(text(collapsed(spec)))
    if c.judged:
        word, why = verdict(c, spec)
        sub = "".join(f'<span class="sub">{text(part)}</span>' for part in why)
        cells.append(f'<b class="verdict {word.split()[0] if why else ""}">{text(word)}</b>{sub}')
    body = "".join(f'<td data-label="{text(name)}">{cell}</td>' for name, cell in zip(heads[1:], cells, strict=True))
    return f'<tr class="{tone(spec.place)}"><th scope="row"{hover}><span class="who">{canvas.named(spec)}</span>{ran}{same}</th>{body}</tr>'


def _mean(c: Comparison, spec: Spec, metric: Metric) -> str:
    whole = mean(c.summaries.get((spec.label, metric.name)), metric)
    value, bracket, ends = whole.partition(" [")
    return f"{text(value)}{f'<span class=sub>[{text(ends)}</span>' if bracket else ''}"


# -- Markdown ----------------------------------------------------------------------------------


def markdown(c: Comparison) -> str:
    """The table for a pull request or a note; foreign text is code, in which nothing acts."""
    shown = columns(c)
    heads = [
        "spec",
        "region",
        *(metric.title for metric, _ in shown),
        "collapsed",
        *([f"against {c.reference}"] if c.judged else []),
    ]
    lines = [
        f"**{_escaped(title(c))}**",
        "",
        *(_escaped(one) for one in setting(c)),
        *([too_few(c)] if not c.judged else []),
        "",
    ]
    lines += ["| " + " | ".join(_escaped(head) for head in heads) + " |", "|" + " --- |" * len(heads)]
    for spec in c.specs:
        cells = [
            _code(spec.label),
            region(spec.region),
            *(mean(c.summaries.get((spec.label, metric.name)), metric) for metric, _ in shown),
        ]
        cells.append(collapsed(spec))
        if c.judged:
            word, why = verdict(c, spec)
            cells.append(f"{word} ({', '.join(why)})" if why else word)
        lines.append("| " + " | ".join([cells[0], *(_escaped(cell) for cell in cells[1:])]) + " |")
    if c.judged:
        lines += [
            "",
            "Means over seeds, 95 % intervals in brackets; differences are paired by seed, p corrected by Holm.",
        ]
    return "\n".join(lines) + "\n"


def _code(value: str) -> str:
    """Text as a code span of one line inside a table."""
    flat = " ".join(value.split()).replace("|", "\\|")
    fence = "`"
    while fence in flat:
        fence += "`"
    pad = " " if flat.startswith("`") or flat.endswith("`") else ""
    return f"{fence}{pad}{flat}{pad}{fence}"


def _escaped(value: str) -> str:
    flat = " ".join(value.split())
    for sign in "\\`*_<>|[]":
        flat = flat.replace(sign, "\\" + sign)
    return flat
