"""The language of specs: ``grpo(epsilon=0.2) + sequence_mask(high=3.0)``, names of presets and parts.

The grammar is Python's own call syntax, read with ``ast`` and never evaluated.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from klamp.aggregates import KINDS, Aggregate
from klamp.conditions import condition
from klamp.errors import UserError, did_you_mean
from klamp.factors import TRANSFORMS, Factor
from klamp.gates import SELECTIONS, gate
from klamp.guards import Guard
from klamp.measures import FAMILIES, measure
from klamp.penalties import Penalty
from klamp.radii import RADII, Moving
from klamp.spec import NAMES, PENALTIES, Part, Spec, of_part, part_text, value_text


def guard(**arguments: Any) -> Guard:
    """A guard from the arguments of ``condition`` and of ``Guard``."""
    names = (
        "measure",
        "radius",
        "radius_low",
        "radius_high",
        "ratio_low",
        "ratio_high",
        "budget",
        "over",
        "region",
        "top_k",
    )
    own = [item.name for item in fields(Guard) if item.name != "region"]
    for key in arguments:
        if key not in names and key not in own:
            raise UserError(f"guard has no argument {key!r}; {did_you_mean(key, [*names, *own])}")
    where = {name: arguments.pop(name) for name in names if name in arguments}
    if "gate" in arguments:
        arguments["gate"] = gate(arguments["gate"])
    return Guard(condition(**where), **arguments)


def _aggregate(kind: str) -> Callable[..., Aggregate]:
    def build(divisor: float | None = None, rows: str = "nonempty") -> Aggregate:
        return Aggregate(kind, divisor, rows)

    return build


PARTS: dict[str, Callable[..., Part]] = {
    "guard": guard,
    "factor": Factor,
    **PENALTIES,
    **{kind: _aggregate(kind) for kind in KINDS},
}
VALUES: dict[str, Callable[..., Any]] = {**TRANSFORMS, **SELECTIONS, **RADII, **FAMILIES, "measure": measure}


def register_part(name: str, kind: type) -> None:
    """Give a penalty or transform of one's own, a frozen dataclass, a name in the language of specs.

    A penalty has ``needs``, ``traits`` and ``evaluate(batch, state)``; a transform ``integrated`` and
    ``evaluate(log_ratio, advantages)``. Raises UserError if the name is taken.
    """
    if name in PARTS or name in VALUES or name in PRESETS or not name.isidentifier():
        raise UserError(f"the name {name!r} is taken or not an identifier; choose another")
    (VALUES if hasattr(kind, "integrated") else PARTS)[name] = kind
    NAMES[kind] = name


# --- presets --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset:
    """A published method: a function from the paper's symbols to a spec, with its source.

    ``usual``: its text where the name alone is not a spec, because an argument has no default.
    """

    build: Callable[..., Spec]
    equation: str
    citation: str
    deviation: str = ""
    usual: str = ""

    @property
    def name(self) -> str:
        return self.build.__name__

    @property
    def summary(self) -> str:
        return (self.build.__doc__ or "").strip().splitlines()[0]

    @property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.build, eval_str=False)


PRESETS: dict[str, Preset] = {}


def register_preset(
    equation: str, citation: str, deviation: str = "", usual: str = ""
) -> Callable[[Callable[..., Spec]], Callable[..., Spec]]:
    """Make a function a preset under its own name; it also gains ``aggregate=`` and ``penalty=``."""

    def add(build: Callable[..., Spec]) -> Callable[..., Spec]:
        PRESETS[build.__name__] = Preset(build, equation, citation, deviation, usual or build.__name__)
        return build

    return add


def preset(name: str, *args: Any, **arguments: Any) -> Spec:
    """The spec of a published method, by name: ``preset("atr_grpo", delta=0.02)``.

    ``aggregate``: an Aggregate or its text, in place of the method's own. ``penalty``: one penalty or several, added.
    Raises UserError for unknown names and arguments, with the nearest valid ones.
    """
    if not isinstance(name, str) or name not in PRESETS:
        raise UserError(f"unknown preset {name!r}; {did_you_mean(str(name), PRESETS)}")
    found = PRESETS[name]
    aggregate, penalty = arguments.pop("aggregate", None), arguments.pop("penalty", None)
    bound = _bind(name, found.build, args, arguments, extra=("aggregate", "penalty"))
    spec = found.build(*bound.args, **bound.kwargs)
    shown: dict[str, Any] = dict(bound.arguments)
    if aggregate is not None:
        mean = _part(aggregate, Aggregate, "aggregate")
        spec, shown["aggregate"] = replace(spec, aggregate=mean), mean
    if penalty is not None:
        penalty = _penalties_of(penalty) if isinstance(penalty, (str, Spec)) else penalty
        several = penalty if isinstance(penalty, (tuple, list)) else [penalty]
        extra = tuple(_part(one, Penalty, "penalty") for one in several)
        spec = replace(spec, penalties=spec.penalties + extra)
        shown["penalty"] = extra[0] if len(extra) == 1 else extra
    text = ", ".join(f"{key}={value_text(value)}" for key, value in shown.items())
    return replace(spec, name=f"{name}({text})")


def with_aggregate(spec: Spec, mean: Aggregate) -> Spec:
    """The spec with another aggregate, under the preset's name where it is one preset's."""
    changed = replace(spec, aggregate=mean, name="")
    head, bracket, inner = spec.name.partition("(")
    if head not in PRESETS or not bracket or not inner.endswith(")") or "aggregate=" in inner:
        return changed
    arguments = ", ".join(filter(None, (inner[:-1], f"aggregate={value_text(mean)}")))
    try:
        named = parse(f"{head}({arguments})")
    except UserError:  # the name was a sum of specs
        return changed
    return named if named == changed else changed


def list_presets() -> list[str]:
    """The names of the presets."""
    return sorted(PRESETS)


def _penalties_of(given: str | Spec) -> tuple[Penalty, ...]:
    found = parse(given)
    others = [part for part in found.parts if part not in found.penalties]
    if others or not found.penalties:
        extra = f"; {', '.join(map(part_text, others))} would be lost: add it with +" if others else ""
        raise UserError(f"penalty={str(given)!r} must be penalties alone: {', '.join(PENALTIES)}{extra}")
    return found.penalties


def _part(value: Any, kind: Any, what: str) -> Any:
    if isinstance(value, str):
        value = _term(_expression(value), value)
    if isinstance(value, Spec) and len(value.parts) == 1:
        value = value.parts[0]
    if not isinstance(value, kind) or (what == "penalty" and not hasattr(value, "evaluate")):
        choices = ", ".join(KINDS if what == "aggregate" else PENALTIES)
        raise UserError(f"{what}={value!s} is not one; choose from {choices}")
    return value


def _bind(
    name: str, build: Callable[..., Any], args: Iterable[Any], arguments: dict[str, Any], extra: tuple[str, ...] = ()
) -> inspect.BoundArguments:
    signature = inspect.signature(build)
    names = [key for key, item in signature.parameters.items() if item.kind is not item.VAR_KEYWORD]
    open_ended = any(item.kind is item.VAR_KEYWORD for item in signature.parameters.values())
    for key in arguments:
        if key not in names and not open_ended:
            raise UserError(f"{name} has no argument {key!r}; {did_you_mean(key, [*names, *extra])}")
    try:
        bound = signature.bind(*args, **arguments)
    except TypeError as error:
        raise UserError(f"{name}({', '.join(names)}): {error}") from error
    for key, value in bound.arguments.items():
        wanted = str(signature.parameters[key].annotation)
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        numeric = numeric or (wanted.startswith("Radius") and isinstance(value, Moving))
        if wanted.startswith(("float", "Radius")) and not numeric and not (value is None and "None" in wanted):
            hint = "; a radius that moves belongs to a measure: atr_grpo(delta=...), trust_region('k3', ...)"
            raise UserError(f"{name}: {key}={value!r} is not a number{hint if isinstance(value, Moving) else ''}")
    return bound


# --- reading --------------------------------------------------------------------------------------------------


def parse(text: str | Spec) -> Spec:
    """The spec that a text describes; ``parse(str(spec)) == spec``. Raises UserError, with the nearest valid choice."""
    if isinstance(text, Spec):
        return text
    return _sum(_expression(text), text)


def _sum(node: ast.expr, text: str) -> Spec:
    specs = [
        found if isinstance(found, Spec) else of_part(found) for found in (_term(term, text) for term in _terms(node))
    ]
    total = specs[0]
    for spec in specs[1:]:
        total = total + spec
    return total


def _expression(text: str) -> ast.expr:
    if not isinstance(text, str):
        raise UserError(f"a spec is a klamp.Spec or its text; got {text!r}")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise UserError(f"cannot read the spec {text!r}: {error}; write for example 'atr_grpo(delta=0.02)'") from error


def _terms(node: ast.expr) -> Iterable[ast.expr]:
    waiting = [node]  # not by recursion: a sum may have thousands of terms
    while waiting:
        last = waiting.pop()
        if isinstance(last, ast.BinOp) and isinstance(last.op, ast.Add):
            waiting += [last.right, last.left]
        else:
            yield last


def _term(node: ast.expr, text: str) -> Spec | Part:
    return _named(*_call(node, text))


def _named(name: str, args: list[Any], arguments: dict[str, Any]) -> Spec | Part:
    if name in PARTS:
        return _build(name, PARTS[name], args, arguments)  # type: ignore[no-any-return]
    if name in PRESETS:
        return preset(name, *args, **arguments)
    if name in VALUES:
        raise UserError(
            f"{name}(...) is a value inside a part, not a part; for example guard(...) or factor(...) takes it"
        )
    raise UserError(f"unknown preset or part {name!r}; {did_you_mean(name, [*PRESETS, *PARTS])}")


def _build(name: str, build: Callable[..., Any], args: list[Any], arguments: dict[str, Any]) -> Any:
    bound = _bind(name, build, args, arguments)
    try:
        return build(*bound.args, **bound.kwargs)
    except TypeError as error:
        raise UserError(f"{name}: {error}") from error


def _call(node: ast.expr, text: str) -> tuple[str, list[Any], dict[str, Any]]:
    if isinstance(node, ast.Name):
        return node.id, [], {}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if any(keyword.arg is None for keyword in node.keywords):
            raise UserError(f"cannot read {text!r}: ** is not allowed")
        names = [str(keyword.arg) for keyword in node.keywords]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise UserError(f"{node.func.id} in {text!r} has {twice[0]!r} twice")
        values = {str(keyword.arg): _value(keyword.value, text) for keyword in node.keywords}
        return node.func.id, [_value(arg, text) for arg in node.args], values
    raise UserError(
        f"cannot read {ast.unparse(node)!r} in {text!r}; write a preset or part such as 'grpo(epsilon=0.2)'"
    )


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Name):
        if node.id in ("inf", "nan"):
            return float(node.id)
        return _build(node.id, VALUES[node.id], [], {}) if node.id in TRANSFORMS | SELECTIONS else node.id
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Name):
        value = _value(node.operand, text)
        if not isinstance(value, float):
            raise UserError(f"cannot read the value {ast.unparse(node)!r} in {text!r}")
        return -value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _sum(node, text)
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item, text) for item in node.elts]
    if isinstance(node, ast.Call):
        name, args, arguments = _call(node, text)
        if name in VALUES:
            return _build(name, VALUES[name], args, arguments)
        return _named(name, args, arguments)
    try:
        value = ast.literal_eval(node)
        if isinstance(value, int):
            float(value)  # a number of hundreds of digits is no number here
        return value
    except (OverflowError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise UserError(f"cannot read the value {ast.unparse(node)!r} in {text!r}") from error


def spec_from_dict(data: dict[str, Any]) -> Spec:
    """The inverse of ``Spec.to_dict``. Raises UserError for what ``to_dict`` does not write."""
    known = ("spec", *_SLOTS)
    if not isinstance(data, dict) or not set(data) <= set(known) or not any(data.get(name) for name in _SLOTS):
        raise UserError(
            f"a spec's dictionary has the keys {', '.join(known)} and at least one part; got {_brief(data)}"
        )
    found: dict[str, tuple[Any, ...]] = {}
    for slot, kind in _SLOTS.items():
        given = data.get(slot) or ()
        if isinstance(given, dict) and slot == "aggregate":
            given = [given]
        if not isinstance(given, (list, tuple)) or len(given) > (1 if slot == "aggregate" else math.inf):
            raise UserError(
                f"{slot} of a spec's dictionary: {'one part' if slot == 'aggregate' else 'a list of parts'}"
            )
        found[slot] = tuple(_part_from_dict(item) for item in given)
        for part in found[slot]:
            if not isinstance(part, kind):
                raise UserError(f"{value_text(part)} is no part for the {slot} of a spec")
    mean = found["aggregate"][0] if found["aggregate"] else None
    return Spec(found["guards"], found["factors"], found["penalties"], mean, str(data.get("spec", "")))


_SLOTS: dict[str, Any] = {"guards": Guard, "factors": Factor, "penalties": Penalty, "aggregate": Aggregate}


def _brief(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 200 else f"{shown[:200]} ..."


def _part_from_dict(data: Any) -> Any:
    if not isinstance(data, dict):
        raise UserError(f"a part's dictionary names it: {{'part': 'guard', ...}}; got {_brief(data)}")
    arguments = {key: _number(value) for key, value in data.items() if key != "part"}
    name = data.get("part")
    builders = PARTS | VALUES
    if name not in builders:
        raise UserError(f"unknown part {name!r}; {did_you_mean(str(name), builders)}")
    return _build(str(name), builders[str(name)], [], arguments)


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return _part_from_dict(value)
    return float(value) if value in ("inf", "-inf") else value


__all__ = [
    "PARTS",
    "PRESETS",
    "Penalty",
    "Preset",
    "guard",
    "list_presets",
    "parse",
    "preset",
    "register_part",
    "register_preset",
]
