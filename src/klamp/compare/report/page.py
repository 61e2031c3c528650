"""``report.html`` of a comparison: one file that opens offline, with its pictures, numbers, style and script inside.

    path = write(comparison, directory)

The comparison is the JSON form that ``klamp compare`` keeps; whatever of it is missing is called "not recorded". With
fewer than 3 seeds the page shows the numbers and ranks nothing. All foreign text is shown as text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from klamp.compare.report import anatomy, canvas, curves, forest, header, planes, regions, tables
from klamp.compare.report.curves import Chart
from klamp.compare.report.data import Comparison, read
from klamp.errors import UserError
from klamp.report.page import BASE, document, text

LEARNING = (
    Chart("eval/accuracy_sampled", "Held-out accuracy, sampled",
          "Higher and earlier is better: problems kept out of training, answered by sampling.", "share of problems", True, "tall"),
    Chart("eval/accuracy_greedy", "Held-out accuracy, greedy",
          "Higher and earlier is better: the same problems, answered by always taking the likeliest token.", "share of problems", True),
    Chart("train/reward_mean", "Reward", "What training sees: the mean reward of the answers sampled for each step.", "reward"),
)  # fmt: skip
STABILITY = (
    Chart("policy/kl_old_new_mean", "KL(old || new)",
          "How far each update went from the policy that sampled; a line that keeps climbing is coming loose.", "nats per token"),
    Chart("policy/entropy_mean", "Entropy",
          "How undecided the policy is about the next token; near 0 it no longer explores.", "nats per token"),
    Chart("train/grad_norm", "Gradient norm", "The size of each step before clipping; spikes announce a collapse.", "norm"),
)  # fmt: skip


def write(comparison: Mapping[str, Any], directory: Path) -> Path:
    """Write ``report.html`` into a directory, whole or not at all; returns its path.

    Raises UserError if it cannot be written.
    """
    target = Path(directory) / "report.html"
    temporary = target.with_name(f".report-{os.getpid()}.tmp")
    try:
        temporary.write_bytes(render(comparison).encode("utf-8", "backslashreplace"))
        os.replace(temporary, target)
    except OSError as error:
        raise UserError(
            f"cannot write {target}: {error.strerror}; give a directory that exists and is writable"
        ) from error
    finally:
        if temporary.exists():
            temporary.unlink()
    return target


def render(comparison: Mapping[str, Any]) -> str:
    """The page as text."""
    c = read(comparison)
    stability = curves.section(
        "stability", "Did it stay stable?",
        "Signs of a run that comes loose: the policy moves further with each update, entropy falls to nothing or shoots up, gradients spike.",
        STABILITY, c.drawn, tables.collapses(c),
    )  # fmt: skip
    parts = [
        canvas.symbols(),
        header.header(c),
        _bar(c),
        curves.section("learning", "What was learned", _learned(c), LEARNING, c.drawn),
        forest.section(c),
        planes.section(c),
        regions.section(c),
        stability,
        anatomy.section(c),
        tables.metrics(c),
        tables.runs(c),
        tables.manifest(c),
        tables.notes(c),
        '<div class="tip floating" id="tip" role="status" hidden></div>',
    ]
    return document(
        f"{header.title(c)} - Klamp comparison report",
        "\n".join(parts),
        BASE + _file("compare.css"),
        _file("compare.js"),
    )


def _learned(c: Comparison) -> str:
    same = [f"{spec.label} is the same constraint as {spec.same_as}" for spec in c.specs if spec not in c.drawn]
    intro = "Reward is what training sees; held-out accuracy is what it is for. The bar above shows and hides specs, in every picture."
    return intro + (f" Drawn once: {'; '.join(same)}." if same else "")


def _bar(c: Comparison) -> str:
    """The legend of all pictures, which stays in sight: each spec is a button that shows or hides it."""
    chips = "".join(
        f'<button type="button" class="chip {canvas.tone(spec.place)}" data-toggle="{spec.place}" aria-pressed="true" title="{text(spec.text or spec.label)}">'
        f'{canvas.swatch(spec.place, line=True)}<span class="name">{text(spec.label)}</span></button>'
        for spec in c.drawn
    )
    detail = "true" if len(c.drawn) <= canvas.FEW else "false"
    extra = "".join(
        f'<button type="button" class="view" data-view="{name}" aria-pressed="{detail}">{label}</button>'
        for name, label in (("range", "Range"), ("seeds", "Seeds"))
    )
    extra = extra if len(c.seeds) > 1 else ""
    views = f'<div class="views" role="group" aria-label="What curves show">{extra}<button type="button" class="view" id="all">All specs</button></div>'
    return (
        f'<nav class="legend-bar" aria-label="Specs to show"><div class="chips" role="group">{chips}</div>{views}</nav>'
    )


@cache
def _file(name: str) -> str:
    return files("klamp.compare.report").joinpath(name).read_text(encoding="utf-8")
