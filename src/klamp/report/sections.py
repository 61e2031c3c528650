"""The sections of the page, in order: header, learning, policy, trust region, samples, what was left out."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from klamp.report.charts import Series, histogram, line_chart, not_recorded, number
from klamp.report.page import document, text
from klamp.report.run import Run, finite, get, plural, points, tail

BINS = 64
EDGES = tuple(-1.6 + 3.2 * k / BINS for k in range(BINS + 1))  # of policy/ratio_histogram, in log-ratio
SAMPLES = 24  # completions in the table
CHARACTERS = 1200  # of a prompt or completion


def render(run: Run) -> str:
    """The page as text."""
    sections = [_header(run), _learning(run), _policy(run), _region(run), _samples(run)]
    if run.notes:
        items = "".join(f"<li>{text(note)}</li>" for note in dict.fromkeys(run.notes))
        sections.append(f'<section class="notes"><h2>What could not be shown</h2><ul>{items}</ul></section>')
    spec = run.manifest.get("spec")
    return document(f"{spec if isinstance(spec, str) else run.directory.name} - Klamp run report", "\n".join(sections))


# -- header ------------------------------------------------------------------------------------


def _header(run: Run) -> str:
    m = run.manifest
    tiles = _accuracy_tile(run, "sampled") + _accuracy_tile(run, "greedy") + _share_tiles(run)
    spec = text(m["spec"]) if isinstance(m.get("spec"), str) else "spec not recorded"
    state = f"finished {text(_when(m['finished']))}" if m.get("finished") else "not finished: stopped, or still running"
    task = f"on <strong>{text(m['task'])}</strong>" if m.get("task") else "on an unnamed task"
    command = m.get("command")
    shown = shlex.join(map(str, command)) if isinstance(command, list) and command else command
    versions = m.get("versions")
    packages = {"klamp": m["klamp"]} if m.get("klamp") else {}
    packages |= versions if isinstance(versions, dict) else {}
    facts = [
        ("Task", m.get("task")),
        ("Seed", m.get("seed")),
        ("Region", _region_text(m["region"]) if "region" in m else None),
        ("Started", _when(m.get("started"))),
        ("Finished", _when(m.get("finished"))),
        ("Time", _duration(run)),
        ("Git commit", m.get("git_commit")),
        ("Command", shown),
        ("Versions", ", ".join(f"{name} {version}" for name, version in packages.items()) or None),
    ]
    rows = "".join(
        f"<div><dt>{name}</dt><dd{' class=code' if name in ('Command', 'Git commit') else ''}>"
        f"{text(value) if value is not None else 'not recorded'}</dd></div>"
        for name, value in facts
    )
    return (
        f'<header><p class="eyebrow">Klamp run report</p><h1><code>{spec}</code></h1>'
        f'<p class="lede">Trained {task}; {state}.</p>'
        f'<div class="tiles">{tiles}'
        f"</div><dl>{rows}</dl></header>"
    )


def _accuracy_tile(run: Run, how: str) -> str:
    """Accuracy before and after, from the manifest; of a run that did not finish, the evaluations it has."""
    name = f"accuracy_{how}"
    before, after = (finite(get(run.manifest, "results", when, name)) for when in ("before", "after"))
    source = "before training, and after"
    if before is None or after is None:
        found = [(step, value) for step, value in points(run, run.evals, f"eval/{name}") if value is not None]
        if len(found) < 2:
            return _tile(f"Held-out accuracy, {how}", "not recorded", "", "")
        (first, before), (last, after) = found[0], found[-1]
        source = f"at step {first}, and at step {last}"
    change = f"{100 * (after - before):+.1f} points".replace("-", "\N{MINUS SIGN}")
    return _tile(
        f"Held-out accuracy, {how}",
        f"{number(before, True)} <i>\N{RIGHTWARDS ARROW}</i> {number(after, True)}",
        change,
        source,
    )


def _share_tiles(run: Run) -> str:
    last = tail(run.train)
    out = []
    for label, stem in (("Gradient removed", "removed"), ("Outside the region", "outside")):
        totals = []
        for line in last.values():
            low, high = (finite(line.get(f"guard/{stem}_{side}_share")) for side in ("low", "high"))
            if low is not None or high is not None:
                totals.append((low or 0.0) + (high or 0.0))
        value = number(math.fsum(totals) / len(totals), True) if totals else "not recorded"
        out.append(
            _tile(label, value, *(("of tokens", "mean of the last quarter of the steps") if totals else ("", "")))
        )
    return "".join(out)


def _tile(label: str, value: str, unit: str, source: str) -> str:
    return (
        f'<div class="tile"><p class="label">{label}</p><p class="figure">{value}</p>'
        f'<p class="source"><strong>{unit}</strong> {source}</p></div>'
    )


def _region_text(region: object) -> str:
    if not isinstance(region, dict):
        return "no interval of ratios"
    low, high = _bounds(region)
    ratio = region.get("ratio", "ratio")
    return (
        (f"{math.exp(low):.6g} \N{LESS-THAN OR EQUAL TO} " if low is not None else "")
        + f"{ratio}"
        + (f" \N{LESS-THAN OR EQUAL TO} {math.exp(high):.6g}" if high is not None else "")
    )


def _bounds(region: object) -> tuple[float | None, float | None]:
    """Log-ratio bounds of the manifest's region; a bound too far out to write as a ratio is none."""
    low, high = (finite(get(region, key)) for key in ("log_low", "log_high"))
    return low if low is not None and low > -700 else None, high if high is not None and high < 700 else None


def _when(moment: object) -> object:
    """An ISO 8601 moment to the minute; anything else as it is."""
    try:
        parsed = datetime.fromisoformat(moment)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return moment
    return f"{parsed:%Y-%m-%d %H:%M} {parsed.tzname() or ''}".strip()


def _duration(run: Run) -> str | None:
    try:
        start, stop = (datetime.fromisoformat(run.manifest[key]) for key in ("started", "finished"))
        seconds = round((stop - start).total_seconds())
    except (KeyError, TypeError, ValueError):
        return None
    hours, minutes = divmod(seconds // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds % 60} s"


# -- charts ------------------------------------------------------------------------------------


def _section(title: str, intro: str, figures: list[str]) -> str:
    charts = f'<div class="charts">{"".join(figures)}</div>'
    return f'<section><h2>{title}</h2><p class="intro">{intro}</p>{charts}</section>'


def _learning(run: Run) -> str:
    reward = Series("mean reward", points(run, run.train, "train/reward_mean"), "one")
    accuracy = [
        Series(how, points(run, run.evals, f"eval/accuracy_{how}"), tone)
        for how, tone in (("sampled", "one"), ("greedy", "two"))
    ]
    return _section(
        "What it learned",
        "Reward is what training sees; held-out accuracy is what it is for.",
        [
            line_chart(
                "Reward",
                "Mean reward of the completions sampled for each optimizer step.",
                [reward],
                "reward",
            ),
            line_chart(
                "Held-out accuracy",
                "Share of problems kept out of training that are answered correctly, by "
                "sampling and by always taking the likeliest token.",
                accuracy,
                "share of problems",
                percent=True,
                reach=(0.0, 1.0),
            ),
        ],
    )


def _policy(run: Run) -> str:
    entropy = Series("entropy", points(run, run.train, "policy/entropy_mean"), "one")
    kl = Series("KL(old || new)", points(run, run.train, "policy/kl_old_new_mean"), "one")
    return _section(
        "How the policy moved",
        "Both are means over the tokens that count, in nats.",
        [
            line_chart(
                "Entropy",
                "How undecided the policy is about the next token; near 0 it no longer explores.",
                [entropy],
                "nats per token",
            ),
            line_chart(
                "KL(old || new)",
                "How far each update has gone from the policy that sampled, by the k3 estimate.",
                [kl],
                "nats per token",
            ),
        ],
    )


def _region(run: Run) -> str:
    def by_side(stem: str) -> list[Series]:
        return [
            Series(f"{side} side", points(run, run.train, f"guard/{stem}_{side}_share"), side)
            for side in ("low", "high")
        ]

    return _section(
        "What the trust region did",
        "A token on the low side has become less likely than it was when "
        "it was sampled, one on the high side more likely. Under the usual (outward) gate, a token outside "
        "loses its gradient only if that would push it further out.",
        [
            line_chart(
                "Gradient removed",
                "Share of tokens whose policy gradient the region set to zero, by side.",
                by_side("removed"),
                "share of tokens",
                percent=True,
            ),
            line_chart(
                "Outside the region",
                "Share of tokens whose ratio lies outside the region, by side, whatever the sign of their advantage.",
                by_side("outside"),
                "share of tokens",
                percent=True,
            ),
            _ratios(run),
        ],
    )


def _ratios(run: Run) -> str:
    title = "Ratios and the region"
    last = tail(run.train)
    counts, used, odd = [0.0] * BINS, [], 0
    for step, line in last.items():
        bins = line.get("policy/ratio_histogram")
        if bins is None:
            continue
        values = [finite(b) for b in bins] if isinstance(bins, list) else []
        if len(values) != BINS or any(v is None or v < 0 for v in values):
            odd += 1
            continue
        used.append(step)
        counts = [total + (v or 0.0) for total, v in zip(counts, values, strict=True)]
    if odd:
        run.notes.append(f"policy/ratio_histogram: {plural(odd, 'line')} not {BINS} counts and left out.")
    caption = "How much likelier each token has become than when it was sampled, against the region's bounds"
    if not used:
        return not_recorded(title, caption + ".", wide=True)
    caption += f"; steps {used[0]} to {used[-1]} (the last quarter), {sum(counts):,.0f} tokens."
    region, ends = run.manifest.get("region"), counts[0] + counts[-1]
    bounds = _bounds(region)
    if ends:
        caption += f" The outermost bins also hold what lies beyond them ({ends:,.0f} tokens)."
    ratio = get(region, "ratio")
    if isinstance(region, dict) and ratio != "new/old":
        caption += f" The histogram is of new/old; the spec's bounds are of {ratio} and not drawn."
        bounds = (None, None)
    elif bounds == (None, None):
        caption += " The spec has no bounds on this ratio."
    caption += "".join(
        f" The {side} bound, {math.exp(b):.4g}, is outside the picture."
        for side, b in zip(("low", "high"), bounds, strict=True)
        if b is not None and not EDGES[0] <= b <= EDGES[-1]
    )
    return histogram(
        title,
        caption,
        EDGES,
        counts,
        bounds,
        "probability ratio new/old (logarithmic)",
        "tokens (logarithmic)",
    )


# -- samples -----------------------------------------------------------------------------------


def _samples(run: Run) -> str:
    found = run.samples
    if not found:
        return '<section><h2>Sample completions</h2><p class="intro">not recorded</p></section>'
    count = min(SAMPLES, len(found))
    chosen = [found[round(k * (len(found) - 1) / max(count - 1, 1))] for k in range(count)]
    rows = "".join(
        "<tr>"
        + _cell(row, "step", _plain)
        + _cell(row, "reward", _reward)
        + _cell(row, "prompt", _long)
        + _cell(row, "completion", _long)
        + _cell(row, "answer", _long)
        + "</tr>"
        for row in chosen
    )
    some = (
        f"{count} of the {len(found)} that were recorded" if count < len(found) else f"All {count} that were recorded"
    )
    return (
        f'<section><h2>Sample completions</h2><p class="intro">{some}, from the first to the last.</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="Sample completions"><table><thead><tr>'
        f'<th scope="col">Step</th><th scope="col">Reward</th><th scope="col">Prompt</th>'
        f'<th scope="col">Completion</th><th scope="col">Answer</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
        f"</div></section>"
    )


def _cell(row: Mapping[str, Any], name: str, show: Callable[[object], str]) -> str:
    return f'<td class="{name}">{show(row.get(name))}</td>'


def _plain(value: object) -> str:
    return text(value) if value is not None else "-"


def _reward(value: object) -> str:
    if value is None:
        return "unscored"
    known = finite(value)
    return number(known) if known is not None else text(value)


def _long(value: object) -> str:
    if value is None:
        return "-"
    whole = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(whole) <= CHARACTERS:
        return f'<div dir="auto">{text(whole)}</div>'
    return (
        f'<div dir="auto">{text(whole[:CHARACTERS])}</div>'
        f"<em>{len(whole) - CHARACTERS:,} more characters in samples.jsonl</em>"
    )
