"""docs/export.md: which preset is the same loss in which framework, and each framework's traps."""

from __future__ import annotations

from klamp.export.engine import Export, export
from klamp.export.facts import DIFFERENCES, EDGES, LABELS
from klamp.export.frameworks import FRAMEWORKS
from klamp.export.model import Framework
from klamp.language import PRESETS
from klamp.presets import list_presets, parse

EXAMPLE = "dapo(epsilon_low=0.2, epsilon_high=0.28)"
COMPOSED = (
    "gspo(epsilon_low=0.2, epsilon_high=0.28)",
    "grpo() + kl_reference(beta=0.04)",
    "dapo() + kl_reference(beta=0.04, weighted=True)",
    "dapo() + entropy_bonus(coefficient=0.01)",
    "dapo() + tis(high=2.0, scope='sequence')",
    "dapo() + mis(low=0.99, high=1.01, scope='geometric')",
    "dapo() + tis(high=inf) + geometric_mask()",
    "dppo_tv(ratio='new/rollout')",
    "cispo(epsilon_high=0.2, epsilon_low=0.2)",
)

_PAGE = """# The same constraint elsewhere

`klamp export SPEC --to FRAMEWORK` prints the flags with which a framework computes a spec's loss with no code of Klamp's, and
what will differ. An interval of the ratio is two numbers everywhere, whichever divergence it came from. This page is written
by `python -m klamp.export`; the tests evaluate every cell's flags with the framework's formula, written out by hand, against
Klamp's loss and gradient.

* **same**: loss and gradient are the same to rounding, but for corner cases (below).
* a word: what differs, as explained below the table; everything else is the same.
* **-**: the framework has no flags for it. `klamp export` says why, what it has that is nearest, where a loss of one's own
  goes, and which frameworks have the method exactly.

Of {total} cells {same} are the same, {differ} differ by what is named, {none} have no flags.

{table}

## The words

{words}

## Corner cases

What an export prints as "at the edges": where log-ratios are extreme, a response is empty, or an advantage varies within a
response.

{edges}

## The frameworks

{frameworks}
"""


def rows() -> list[str]:
    """The specs of the table: every preset with its usual arguments, corrections after `dapo()`, and a few compositions."""
    found = []
    for name in list_presets():
        usual = PRESETS[name].usual
        mean = parse(usual).aggregate
        if mean is None:
            usual = f"dapo() + {usual}"
        elif mean.kind == "sequence_sum" and mean.divisor is None:
            usual = f"{name}(divisor=1024)"
        found.append(usual)
    return [*found, *COMPOSED]


def cell(found: Export) -> str:
    """One export in a word or two."""
    if found.reason:
        return "-"
    return ", ".join(dict.fromkeys(LABELS[key] for key in found.differences)) or "same"


def page() -> str:
    """docs/export.md."""
    cells = {spec: [cell(export(spec, name)) for name in FRAMEWORKS] for spec in rows()}
    flat = [text for line in cells.values() for text in line]
    same, none = flat.count("same"), flat.count("-")
    return _PAGE.format(
        total=len(flat), same=same, none=none, differ=len(flat) - same - none, table=_table(cells),
        words="\n".join(f"* **{LABELS[key]}**: {_general(text)}." for key, text in DIFFERENCES.items()),
        edges="\n".join(f"* {_general(text)}." for text in EDGES.values()),
        frameworks="\n\n".join(map(_section, FRAMEWORKS.values())),
    )  # fmt: skip


def _general(text: str) -> str:
    return text.format(theirs="...", ours="...")


def _table(cells: dict[str, list[str]]) -> str:
    lines = [["spec", *FRAMEWORKS], *([f"`{spec}`", *line] for spec, line in cells.items())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    body = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    return "\n".join([body[0], rule, *body[1:]])


def _section(table: Framework) -> str:
    found = export(EXAMPLE, table.name)
    lines = [f"### {table.title}", "", f"Of {table.version}.", ""]
    if found.reason:
        lines += [f"`{EXAMPLE}` has no flags: {found.reason}.", ""]
    else:
        differs = f", which differs by {cell(found)}" if found.differences else ""
        lines += [f"`{EXAMPLE}`{differs}:", "", "```", found.text, "```", ""]
    facts = [*(f"* {trap}." for trap in table.traps), *(f"* {note}." for note in table.notes)]
    near = [f"* {text}." for text in table.related.values()]
    return "\n".join([*lines, *facts, *near, f"* a loss of one's own: {table.hook}."])
