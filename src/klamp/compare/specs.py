"""The specs of a comparison: put under one base, recognised when they are equal, and named for tables and folders."""

from __future__ import annotations

import ast
import hashlib
import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from klamp.aggregates import KINDS
from klamp.errors import UserError
from klamp.gates import Gate
from klamp.guards import Guard
from klamp.language import PRESETS, parse
from klamp.measures import Measure
from klamp.regions import Region
from klamp.spec import NAMES, PENALTIES, Spec, part_text
from klamp.transforms import Cap, Identity

LONGEST = 60  # characters of a label
_FOLDER = 40  # of a folder's name, without its hash
_DIGITS = 12  # significant digits to which bounds are compared

# --- under one base -------------------------------------------------------------------------------------------


def under(base: Spec, spec: Spec) -> Spec:
    """The guards and factors of ``spec`` with the aggregate and the penalties of ``base``, in a text that parses back.

    The text is the spec's own where that says it already, else its presets with another ``aggregate=`` and without
    their penalties, else the parts. Raises UserError for parts that no text can say.
    """
    wanted = Spec(spec.guards, spec.factors, base.penalties, base.mean)
    for text in (str(spec), _assembled(base, spec), str(wanted)):
        try:
            found = parse(text)
        except UserError:
            continue
        if _same(found, wanted):
            return found
    raise UserError(
        f"{spec} has a part that no text can say, so no other process could run it; give functions by their import path, "
        "for example measure='package.module:function'"
    )


def _same(one: Spec, other: Spec) -> bool:
    """Equality, where no aggregate is the mean over tokens that it stands for."""
    return all(getattr(one, name) == getattr(other, name) for name in ("guards", "factors", "penalties", "mean"))


def _assembled(base: Spec, spec: Spec) -> str:
    """The spec's terms with their aggregates changed and their penalties taken out, then what is the base's."""
    found, averaged, penalised = [], False, set()
    for node in terms(str(spec)):
        term = _parsed(node)
        if term is None or not (term.guards or term.factors or _preset_of(node)):
            continue
        node = _under(base, node, term)
        term = _parsed(node)
        if term is None or not set(term.penalties) <= set(base.penalties):
            continue
        averaged |= term.aggregate is not None
        penalised |= set(term.penalties)
        found.append(ast.unparse(node))
    if not averaged and base.aggregate is not None:
        found.append(part_text(base.aggregate))
    return " + ".join(found + [part_text(part) for part in base.penalties if part not in penalised])


def _under(base: Spec, node: ast.expr, term: Spec) -> ast.expr:
    """The call of a preset with the base's aggregate and without penalties that the base lacks; the term's parts else."""
    if _preset_of(node):
        call = _without(node, "aggregate", "penalty")
        for extra in ([], [ast.keyword("aggregate", _expression(part_text(base.mean)))]):
            changed = ast.Call(call.func, call.args, [*call.keywords, *extra])
            found = _parsed(changed)
            if found and found.aggregate in (None, base.mean) and set(found.penalties) <= set(base.penalties):
                return changed
    kept = [*term.guards, *term.factors]
    return _expression(" + ".join(map(part_text, kept))) if kept else node


# --- text as a tree -------------------------------------------------------------------------------------------


def terms(text: str) -> list[ast.expr]:
    """The terms of a spec's text, of ``a + b`` the two; none where it is no text of a spec."""
    try:
        waiting, found = [_expression(text)], []
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            waiting += [node.right, node.left]
        else:
            found.append(node)
    return found


def _expression(text: str) -> ast.expr:
    return ast.parse(text.strip(), mode="eval").body


def _parsed(node: ast.expr) -> Spec | None:
    try:
        return parse(ast.unparse(node))
    except UserError:
        return None


def _name_of(node: ast.expr) -> str:
    called = node.func if isinstance(node, ast.Call) else node
    return called.id if isinstance(called, ast.Name) else ""


def _preset_of(node: ast.expr) -> str:
    name = _name_of(node)
    return name if name in PRESETS else ""


def _without(node: ast.expr, *names: str) -> ast.Call:
    """A call without some of its keywords."""
    if not isinstance(node, ast.Call):
        return ast.Call(node, [], [])
    return ast.Call(node.func, node.args, [keyword for keyword in node.keywords if keyword.arg not in names])


# --- equal specs ----------------------------------------------------------------------------------------------


def canonical(spec: Spec) -> Hashable:
    """A value that is equal for specs whose gradients are equal on every batch, however they are spelled.

    Fixed intervals count by their bounds of log w, to 12 significant digits, each side apart: one guard or two, a gate
    ``outward`` or ``positive`` on an upper bound. Radii that move, and distances that are reduced over a scope, count by
    measure and radius; k3 is power(0). The loss's value is no part of the gradient, except beside a rollback and a
    clipped factor, which read it: there ``cut_value`` and the surrogate count. Not every pair of equal specs is found;
    different ones are never equal.
    """
    coupled = any(guard.action == "rollback" for guard in spec.guards) or any(f.clipped for f in spec.factors)
    sides: dict[Hashable, float] = {}
    others: list[Hashable] = []
    for guard in spec.guards:
        if coupled:  # what one guard cuts changes what another's bound means: order and cut_value count
            others.append((_guard(guard), guard.cut_value))
        elif _fixed_interval(guard):
            named = isinstance(guard.gate, Gate) and str(guard.gate) in _SIGNS
            if named:
                _add_sides(sides, guard)
            elif guard.region.log_low > -math.inf or guard.region.log_high < math.inf:  # type: ignore[union-attr]
                others.append(_guard(guard))
        else:
            others.append(_guard(guard))
    return (
        frozenset((key, _rounded(bound)) for key, bound in sides.items()),
        tuple(others) if coupled else frozenset(others),
        frozenset((factor.integrated and coupled, _plain(factor)) for factor in spec.factors),
        frozenset(map(_plain, spec.penalties)),
        _plain(spec.mean),
    )


# The signs of A that a gate cuts on (the low, the high) side; of A = 0 there is no gradient to cut.
_SIGNS = {"outward": ("-", "+"), "positive": ("+", "+"), "negative": ("-", "-"), "always": ("+-", "+-")}


def _fixed_interval(guard: Guard) -> bool:
    return isinstance(guard.region, Region) and not guard.region.moves and not guard.after


def _add_sides(sides: dict[Hashable, float], guard: Guard) -> None:
    """Each bound with the sign of A that it cuts; of several the tightest counts."""
    for side, bound, signs in zip(
        ("low", "high"), (guard.region.log_low, guard.region.log_high), _SIGNS[str(guard.gate)], strict=True  # type: ignore[union-attr]
    ):  # fmt: skip
        if math.isinf(bound):
            continue
        both = [signs] if guard.action != "zero" else list(signs)  # a dropped token with A = 0 leaves the mean
        for sign in both:
            key = (guard.ratio, guard.scope, guard.reduce, guard.discount, guard.action, side, sign)
            sides[key] = min(bound, sides.get(key, bound), key=abs)


def _guard(guard: Guard) -> Hashable:
    where: Hashable = _plain(guard.region)
    if _fixed_interval(guard):
        where = ("interval", _rounded(guard.region.log_low), _rounded(guard.region.log_high))  # type: ignore[union-attr]
    return (where, guard.ratio, guard.scope, guard.reduce, _plain(guard.gate), guard.action, guard.strength,
            guard.discount)  # fmt: skip


def _plain(value: Any) -> Hashable:
    """A part as nested tuples: numbers rounded, members of the power family by their exponent."""
    if isinstance(value, Guard):
        return _guard(value)
    if isinstance(value, Identity):
        value = Cap()  # the same weight w; they differ in the value of the loss alone
    if isinstance(value, float):
        return _rounded(value)
    if isinstance(value, Measure):
        return ("power", _rounded(value.power)) if value.power is not None else value
    if isinstance(value, Gate):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value), *(_plain(getattr(value, item.name)) for item in fields(value) if item.compare))
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value  # type: ignore[no-any-return]


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def unify(specs: Sequence[Spec]) -> list[tuple[str, int | None]]:
    """For each spec the text to run, and the index of the earlier spec that it equals: it runs that one's text."""
    first: dict[Hashable, int] = {}
    found: list[tuple[str, int | None]] = []
    for index, spec in enumerate(specs):
        earlier = first.setdefault(canonical(spec), index)
        found.append((str(specs[earlier]), None if earlier == index else earlier))
    return found


# --- names ----------------------------------------------------------------------------------------------------


def labels(specs: Sequence[Spec]) -> list[str]:
    """A short name of each spec, all different: ``grpo``, ``atr_grpo(delta=0.02314)``.

    Defaults are left out, and so are an aggregate and penalties that all share; more is said where two would be alike.
    Specs of one text are numbered.
    """
    shared = len(specs) > 1 and all(_same(Spec((), (), one.penalties, one.aggregate),
                                          Spec((), (), specs[0].penalties, specs[0].aggregate)) for one in specs)  # fmt: skip
    ladders = {str(spec): _ladder(str(spec), shared) for spec in specs}
    level = dict.fromkeys(ladders, 0)
    while True:
        shown = {text: ladder[level[text]] for text, ladder in ladders.items()}
        often = Counter(shown.values())
        alike = [text for text, label in shown.items() if often[label] > 1 and level[text] + 1 < len(ladders[text])]
        if not alike:
            break
        for text in alike:
            level[text] += 1
    found: list[str] = []
    for spec in specs:
        label, count = shown[str(spec)], 2
        while label in found:
            label, count = f"{shown[str(spec)]} ({count})", count + 1
        found.append(label)
    return found


def _ladder(text: str, shared: bool) -> list[str]:
    """Names of one spec, from the shortest to one that says it all."""
    nodes = terms(text)
    if not nodes:
        return [_fitting(text)]
    own = [_without(node, "aggregate", "penalty") if _preset_of(node) else node for node in nodes if _kept(node)]
    tried = [(own, True)] if shared and own else []
    tried += [(nodes, True), (nodes, False)]
    found = [" + ".join(tidied(node, few) for node in chosen) for chosen, few in tried]
    return [*map(_fitting, found), _fitting(text), _hashed(text)]


def _kept(node: ast.expr) -> bool:
    """Whether a term is more than an aggregate or a penalty."""
    kinds = [NAMES.get(kind, "") for kind in NAMES if kind in PENALTIES.values()]
    return _name_of(node) not in (*KINDS, *kinds)


def tidied(node: ast.expr, few: bool = False) -> str:
    """The text of an expression without arguments that are a preset's defaults; ``few``: numbers with four digits."""
    brief = _Brief(few).visit(ast.parse(ast.unparse(node), mode="eval").body)
    return ast.unparse(ast.fix_missing_locations(brief))


class _Brief(ast.NodeTransformer):
    """Rewrites calls and numbers for ``tidied``."""

    def __init__(self, few: bool) -> None:
        self.few = few

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Constant(float(f"{node.value:.4g}")) if self.few and isinstance(node.value, float) else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if name := _preset_of(node):
            usual = {key: item.default for key, item in PRESETS[name].signature.parameters.items()}
            node.keywords = [one for one in node.keywords if one.arg not in usual or not _is(one.value, usual[one.arg])]
        self.generic_visit(node)
        return node.func if not node.args and not node.keywords else node


def _is(node: ast.expr, value: object) -> bool:
    try:
        found = ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return isinstance(node, ast.Name) and node.id == "inf" and value == math.inf
    return bool(found == value)


def _fitting(text: str) -> str:
    return text if len(text) <= LONGEST else _hashed(text)


def _hashed(text: str) -> str:
    """The beginning of a text, and six digits that belong to the whole of it."""
    head = text if len(text) <= LONGEST - 10 else f"{text[: LONGEST - 14].rstrip()} ..."
    return f"{head} #{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=3).hexdigest()


def slug(label: str) -> str:
    """A folder's name for a label: itself where that is one, else its letters and digits with a hash of the whole."""
    plain = re.sub(r"[^a-z0-9._]+", "-", label.lower()).strip("-._")[:_FOLDER].strip("-._")
    return plain if plain and plain == label else "-".join(filter(None, (plain, _digest(label))))


__all__ = ["canonical", "labels", "slug", "terms", "tidied", "under", "unify"]
