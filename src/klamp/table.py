"""The methods side by side: a column per part, a row per method. ``python -m klamp.table`` writes docs/presets.md."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from klamp.explain import explain, gate_text, inside, of_scope
from klamp.factors import Factor
from klamp.language import PRESETS, Preset
from klamp.presets import list_presets, parse
from klamp.spec import Spec, part_text
from klamp.transforms import Identity

COLUMNS = ("method", "w", "over", "inside", "gate", "outside", "weight", "penalty", "mean")


def rows() -> list[dict[str, Any]]:
    """One dictionary per preset: signature, sources, and the parts of its default spec; JSON-ready."""
    return [_row(name, PRESETS[name]) for name in list_presets()]


def _row(name: str, found: Preset) -> dict[str, Any]:
    facts = explain(parse(found.usual))
    about = {"name": name, "signature": signature(found), "summary": found.summary, "equation": found.equation,
             "citation": found.citation, "deviation": found.deviation}  # fmt: skip
    return about | {key: facts[key] for key in ("spec", "parts", "aggregate", "needs", "costs", "traits")}


def signature(found: Preset) -> str:
    """The arguments of a preset with their defaults."""
    inner = ", ".join(
        name if item.default is item.empty else f"{name}={item.default!r}"
        for name, item in found.signature.parameters.items()
    )
    return f"({inner})"


def cells(spec: Spec) -> list[dict[str, str]]:
    """The parts of a spec as lines of the table: one per guard, the other parts in the first."""
    guards = [
        {"w": guard.ratio, "over": of_scope(guard), "inside": inside(guard), "gate": gate_text(guard.gate),
         "outside": guard.action}
        for guard in spec.guards
    ]  # fmt: skip
    lines = guards or [{}]
    lines[0]["weight"] = " x ".join(_weight(factor) for factor in spec.factors) or "1"
    lines[0]["penalty"] = " + ".join(_penalty(part) for part in spec.penalties)
    lines[0]["mean"] = "the other method's" if spec.aggregate is None else part_text(spec.aggregate).removesuffix("()")
    return lines


def _weight(factor: Factor) -> str:
    ratio = "w" if factor.ratio == "new/old" else factor.ratio
    ratio = "clipped " + ratio if factor.clipped else ratio
    where = "" if factor.scope == "token" else f", {of_scope(factor)}"
    plain = isinstance(factor.transform, Identity)
    return f"{ratio}{where}" if plain else f"{part_text(factor.transform)} of {ratio}{where}"


def _penalty(part: Any) -> str:
    on = getattr(part, "on", None)
    return part_text(part) if on is None else f"{part_text(replace(part, on=None))} on {gate_text(on.gate)}"


def markdown() -> str:
    """The table as Markdown, aligned so that it reads in a terminal too."""
    lines = [
        {"method": found.usual if index == 0 else ""} | line
        for found in map(PRESETS.__getitem__, list_presets())
        for index, line in enumerate(cells(parse(found.usual)))
    ]
    widths = {name: max(len(name), *(len(line.get(name, "")) for line in lines)) for name in COLUMNS}
    head = "| " + " | ".join(name.ljust(widths[name]) for name in COLUMNS) + " |"
    rule = "|" + "|".join("-" * (widths[name] + 2) for name in COLUMNS) + "|"
    body = [
        "| " + " | ".join(line.get(name, "").replace("|", "\\|").ljust(widths[name]) for name in COLUMNS) + " |"
        for line in lines
    ]
    return "\n".join([head, rule, *body])


_PAGE = """# Published constraints, side by side

One row per method with its published defaults, one column per part; a method with several guards takes several lines.
`klamp presets --table` prints the table, `klamp explain NAME` one method in full, `klamp diff A B` two of them.

* **w**, **over**: the ratio of policies that a guard looks at, and over what: a token, a response, a turn.
* **inside**: the region. **gate**: where a token outside it is cut; `outward` is where the step would move w further from
  1. **outside**: what happens there: `zero` the gradient, `drop` the token from the mean too, `drop_row` its response,
  `rollback` the gradient in the other direction.
* **weight**: what multiplies the gradient of A log pi_new; w alone is the importance weight new/old, 1 none.
* A method whose mean is "the other method's" is a correction: write `grpo() + NAME`.

{table}

## Sources

{sources}
"""


def page() -> str:
    """docs/presets.md."""
    sources = []
    for row in rows():
        lines = [f"### {row['name']}", "", f"`{row['name']}{row['signature']}`: {row['summary']}", "", f"* equation: `{row['equation']}`",
                 f"* source: {row['citation']}"]  # fmt: skip
        lines += [f"* of note: {row['deviation']}"] if row["deviation"] else []
        extra = sorted(set(row["needs"]) - {"logp_new", "logp_old", "advantages", "mask"})
        lines += [f"* needs: {', '.join(f'`{name}`' for name in extra)}"] if extra else []
        lines += [f"* costs: {cost}" for cost in row["costs"]]
        sources.append("\n".join(lines))
    return _PAGE.format(table=markdown(), sources="\n\n".join(sources))


if __name__ == "__main__":
    print(page(), end="")
