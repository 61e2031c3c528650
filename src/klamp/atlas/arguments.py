"""How the arguments of each preset move its guards, found by asking the preset itself with other values.

A number of a guard is one of the ``FORMS`` of one argument, the same in every probe, or the argument is ``unread``:
the page then says so instead of guessing.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any

from klamp.atlas.facts import NUMBERS, facts
from klamp.errors import UserError
from klamp.gates import GATES
from klamp.guards import AFTER, BEFORE, RATIOS, SCOPES
from klamp.language import PRESETS, Preset, preset
from klamp.measures import MEASURES

FORMS: dict[str, Callable[[float], float]] = {
    "p": lambda p: p,
    "1 - p": lambda p: 1.0 - p,
    "1 + p": lambda p: 1.0 + p,
    "p / 2": lambda p: p / 2.0,
    "1 / p": lambda p: 1.0 / p,
    "exp(p)": math.exp,
    "exp(-p)": lambda p: math.exp(-p),
}
WORDS = (*RATIOS, *SCOPES, *BEFORE, *AFTER, *GATES)
Facts = list[dict[str, Any]]


def table() -> dict[str, dict[str, Any]]:
    """Per preset: ``parameters`` in order, ``guards`` at its published values, and what each argument does to them.

    ``forms``: argument -> [guard, number, form]. ``words``: argument -> value -> changes per guard. ``measure``: the
    argument that is the measure. ``idle``: arguments that no guard depends on. ``unread``: the others.
    """
    return {name: _entry(name, found) for name, found in PRESETS.items()}


def usual_arguments(found: Preset) -> dict[str, Any]:
    """The arguments of a preset's published text, defaults included."""
    node = ast.parse(found.usual, mode="eval").body
    args, given = [], {}
    if isinstance(node, ast.Call):
        args = [ast.literal_eval(one) for one in node.args]
        given = {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}
    bound = found.signature.bind(*args, **given)
    bound.apply_defaults()
    return dict(bound.arguments)


def _entry(name: str, found: Preset) -> dict[str, Any]:
    usual = usual_arguments(found)
    base = facts(preset(name, **usual))
    entry: dict[str, Any] = {"parameters": list(usual), "guards": base, "forms": {}, "words": {}, "idle": [],
                             "unread": [], "measure": None}  # fmt: skip
    for key, value in usual.items() if base else ():
        wanted = str(found.signature.parameters[key].annotation)
        if "Measure" in wanted:
            same = all(_is_measure(name, usual, key, one, base) for one in MEASURES)
            entry["measure" if same else "unread"] = key if same else [*entry["unread"], key]
        elif "Spec" in wanted:
            entry["unread"].append(key)
        elif isinstance(value, str):
            entry["words"][key] = _words(name, usual, key, entry["words"])
        else:
            _number(name, usual, key, entry)
    if not base:
        entry["idle"] = list(usual)
    return entry


def _ask(name: str, usual: dict[str, Any], **changed: Any) -> Facts | None:
    """The guards with some arguments changed; None where the preset refuses them."""
    try:
        return facts(preset(name, **usual | changed))
    except UserError:
        return None


# --- numbers --------------------------------------------------------------------------------------------------


def _number(name: str, usual: dict[str, Any], key: str, entry: dict[str, Any]) -> None:
    answers = [(value, found) for value in _probes(usual[key]) if (found := _ask(name, usual, **{key: value}))]
    forms = _forms(key, entry["guards"], answers) if len(answers) > 1 else None
    if forms is None:
        entry["unread"].append(key)
    elif forms:
        entry["forms"][key] = forms
    else:
        entry["idle"].append(key)


def _probes(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [value, not value]
    if isinstance(value, int):
        return [value, value + 1, value + 2]
    if value is None or value == math.inf:
        return [2.0, 3.0, 7.0]
    return [value, 0.75 * value, 0.9 * value, 1.125 * value, 1.5 * value] if value else [value, 0.125, 0.25, 0.5]


def _forms(key: str, base: Facts, answers: list[tuple[Any, Facts]]) -> list[tuple[int, str, str]] | None:
    """[guard, number, form] of the numbers that move; None where a word moves or no form fits."""
    found = []
    if any(len(guards) != len(base) for _, guards in answers):
        return None
    for index, guard in enumerate(base):
        for field, value in guard.items():
            moved = [guards[index].get(field) for _, guards in answers]
            if all(one == value for one in moved) or field == "where":
                continue
            form = _form([float(p) for p, _ in answers], moved) if field in NUMBERS else None
            if form is None:
                return None
            found.append((index, field, form))
    return found


def _form(arguments: list[float], values: list[Any]) -> str | None:
    def fits(form: Callable[[float], float]) -> bool:
        pairs = zip(arguments, values, strict=True)
        return all(p != 0.0 and math.isclose(form(p), value, rel_tol=1e-13) for p, value in pairs)

    return next((text for text, form in FORMS.items() if fits(form)), "p" if arguments == values else None)


# --- words ----------------------------------------------------------------------------------------------------


def _words(name: str, usual: dict[str, Any], key: str, earlier: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """value -> per guard the facts that it changes; a value that is refused alone is tried with one of ``earlier``."""
    found: dict[str, list[dict[str, Any]]] = {}
    for other in [{}, *({other: word} for other, values in earlier.items() for word in values)]:
        before = _ask(name, usual, **other)
        for value in dict.fromkeys([usual[key], *WORDS]):
            after = None if value in found or before is None else _ask(name, usual, **other, **{key: value})
            if before is not None and after is not None and len(before) == len(after):
                pairs = zip(before, after, strict=True)
                found[value] = [
                    {field: item for field, item in new.items() if old.get(field) != item} for old, new in pairs
                ]
    return found


def _is_measure(name: str, usual: dict[str, Any], key: str, measure: str, base: Facts) -> bool:
    """Whether the argument is the measure of every guard and moves nothing else."""
    found = _ask(name, usual, **{key: measure})
    return found == [guard | {"measure": measure} for guard in base]
