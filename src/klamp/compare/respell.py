"""The text of a spec with another region: in its own words where they can say it, else by its parts."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from klamp.errors import UserError
from klamp.guards import Guard
from klamp.presets import PRESETS, parse
from klamp.regions import Region
from klamp.spec import Spec

_OF_REGION = ("measure", "radius_low", "radius_high", "ratio_low", "ratio_high", "budget", "over")


def with_guard(spec: Spec, guard: Guard, other: Guard) -> Spec:
    """The spec with one guard in the place of another."""
    kept = tuple(other if one == guard else one for one in spec.guards)
    return Spec(kept, spec.factors, spec.penalties, spec.aggregate)


def respelled(spec: Spec, guard: Guard, wanted: Guard) -> tuple[Spec, Guard]:
    """The spec with the wanted guard, in its own words if they can say it (to the last digit or so), else by its parts."""
    target = with_guard(spec, guard, wanted)
    for text in itertools.chain(_rewritten(str(spec), guard, wanted), [str(target)]):
        try:
            found = parse(text)
        except UserError:
            continue
        new = [one for one in found.guards if one not in target.guards]
        close = len(new) <= 1 and all(_near(one, wanted) for one in new)
        if close and with_guard(found, new[0] if new else wanted, wanted) == target:
            return found, new[0] if new else wanted
    raise UserError(
        f"{spec} has a part that no text can say; give functions by their import path, 'package.module:name'"
    )


def _near(one: Guard, other: Guard) -> bool:
    """Whether two guards are one but for the rounding of bounds."""
    if type(one.region) is not type(other.region) or replace(one, region=other.region) != other:
        return False
    pairs: list[tuple[Any, Any]] = [(getattr(one.region, n, None), getattr(other.region, n, None)) for n in _OF_REGION]
    return all(a == b or (_is_number(a) and _is_number(b) and math.isclose(a, b, rel_tol=1e-14)) for a, b in pairs)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _rewritten(text: str, guard: Guard, wanted: Guard) -> Iterator[str]:
    """The text with the numbers that say a guard's bounds in the place of the old ones, defaults written out."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return
    added = [one for node in list(ast.walk(tree)) if isinstance(node, ast.Call) for one in _write_defaults(node)]
    choices = _choices(guard, wanted)
    places: list[tuple[Any, float, list[float]]] = []
    for node in ast.walk(tree):
        value: Any = getattr(node, "value", None)
        news = [new for old, new in choices if _is_number(value) and math.isclose(value, old, rel_tol=1e-9)]
        places += [(node, value, list(dict.fromkeys(news)))] if news else []
    options = [[(node, value, False), *((node, new, True) for new in news)] for node, value, news in places[:4]]
    for chosen in sorted(itertools.product(*options), key=lambda chosen: sum(changed for *_, changed in chosen)):
        for node, value, _ in chosen:
            node.value = value
        unused = [(call, keyword) for call, keyword, usual in added if keyword.value.value == usual]  # type: ignore[attr-defined]
        for call, keyword in unused:
            call.keywords.remove(keyword)
        yield ast.unparse(tree)
        for call, keyword in unused:
            call.keywords.append(keyword)


def _choices(guard: Guard, wanted: Guard) -> list[tuple[float, float]]:
    """(number in the text, number in its place): a radius or a bound, a bound's distance from 1, its logarithm."""
    old, new = guard.region.arguments(), wanted.region.arguments()
    pairs = [(float(old[name]), float(new[name])) for name in old if _is_number(old[name])]  # type: ignore[arg-type]
    found = [*pairs, *((2.0 * a, 2.0 * b) for a, b in pairs)]  # a second moment is twice a budget of k2
    if isinstance(guard.region, Region) and guard.region.measure is None:
        found += [(abs(a - 1.0), abs(b - 1.0)) for a, b in pairs]
        found += [(abs(math.log(a)), abs(math.log(b))) for a, b in pairs]
    return found


def _write_defaults(node: ast.Call) -> Iterator[tuple[ast.Call, ast.keyword, float]]:
    """Add the number-valued defaults of a preset's call to it."""
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    usual = PRESETS[name].signature.parameters if name in PRESETS else {}
    given = {keyword.arg for keyword in node.keywords} | set(list(usual)[: len(node.args)])
    for key, item in usual.items():
        if key not in given and _is_number(item.default) and math.isfinite(item.default):
            node.keywords.append(ast.keyword(key, ast.Constant(float(item.default))))
            yield node, node.keywords[-1], float(item.default)
