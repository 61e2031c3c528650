"""Export: the flags of another framework that give a spec's constraint, and what will differ. Knows no method's name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from klamp.errors import UserError, did_you_mean
from klamp.export.facts import DIFFERENCES, EDGES
from klamp.export.frameworks import FRAMEWORKS
from klamp.export.model import Flags, Framework, Way
from klamp.export.shape import Found, Shape, recognise
from klamp.export.snippets import snippet
from klamp.presets import parse
from klamp.spec import Spec, part_text

ROWS = {"all": "counts them", "nonempty": "leaves them out"}


@dataclass(frozen=True)
class Export:
    """``settings``: flag -> value, given to ``call`` where that is Python, and ``text`` the same ready to paste. ``differences`` and ``edges``: key -> sentence of
    what will differ anywhere, and of what differs only at the edges; ``notes``: what else to know. ``exact``: nothing
    differs but at the edges. Where the framework cannot: no settings, a ``reason`` and ``alternatives``.
    """

    framework: str
    version: str
    spec: str
    call: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    differences: dict[str, str] = field(default_factory=dict)
    edges: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reason: str = ""
    alternatives: tuple[str, ...] = ()

    @property
    def differs(self) -> list[str]:
        return list(self.differences.values())

    @property
    def exact(self) -> bool:
        return not self.reason and not self.differences

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; infinity as the text ``inf``."""
        names = ("framework", "version", "spec", "exact", "call", "settings", "text", "differs", "edges", "notes", "reason",
                 "alternatives")  # fmt: skip
        found = {name: getattr(self, name) for name in names}
        return found | {
            "settings": {name: _plain(value) for name, value in self.settings.items()},
            "edges": list(self.edges.values()),
            "notes": list(self.notes),
            "alternatives": list(self.alternatives),
        }

    def report(self) -> str:
        """The export for a reader at a terminal."""
        head = f"{self.spec}  ->  {self.framework} ({self.version})"
        if self.reason:
            return "\n".join([head, f"cannot: {self.reason}", *(f"  instead: {line}" for line in self.alternatives)])
        lines = [head, "", self.text, ""]
        lines += [f"differs: {line}" for line in self.differs] or [
            "differs: nothing" + (" but at the edges" if self.edges else "")
        ]
        lines += [f"at the edges: {line}" for line in self.edges.values()]
        return "\n".join([*lines, *(f"note: {line}" for line in self.notes)])


class _Cannot(Exception):
    """Why a framework cannot write a piece, and the piece."""

    def __init__(self, reason: str, piece: Found | None = None) -> None:
        super().__init__(reason)
        self.reason, self.piece = reason, piece


def export(spec: Spec | str, to: str) -> Export:
    """The flags of framework ``to`` for a spec, with every difference said; never an exception where it cannot.

    Raises UserError for an unknown framework, a spec that cannot be read, or a mean that lacks its divisor.
    """
    if to not in FRAMEWORKS:
        raise UserError(f"unknown framework {to!r}; {did_you_mean(str(to), FRAMEWORKS)}")
    spec = parse(spec)
    if spec.mean.kind == "sequence_sum" and spec.mean.divisor is None:
        raise UserError(f"{spec} needs a constant divisor: for example aggregate=sequence_sum(divisor=1024)")
    table, shape = FRAMEWORKS[to], recognise(spec)
    try:
        return _write(table, shape, str(spec))
    except _Cannot as stop:
        return Export(
            table.name,
            table.version,
            str(spec),
            reason=stop.reason,
            alternatives=tuple(_instead(table, spec, shape, stop)),
        )


# --- writing ------------------------------------------------------------------------------------------------------


@dataclass
class _Draft:
    """Flags as they are collected; a flag that two pieces of the spec want differently stops the export."""

    flags: dict[str, Any]
    owned: dict[str, Found] = field(default_factory=dict)
    differences: dict[str, str] = field(default_factory=dict)
    edges: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def say(self, key: str, **words: object) -> None:
        self.differences[key] = DIFFERENCES[key].format(**words)

    def put(self, flags: Mapping[str, Any], piece: Found) -> None:
        for name, value in flags.items():
            if name in self.owned and self.flags[name] != value:
                raise _Cannot(f"{piece.text} and {self.owned[name].text} need different values of {name}", piece)
            self.flags[name], self.owned[name] = value, piece

    def take(self, way: Way, piece: Found, mean: str) -> None:
        self.put(way.write(piece.numbers), piece)
        for text in way.differs:
            key, *condition = text.split()
            if not condition or (condition[1] == mean) == (condition[0] == "if"):
                self.say(key)
        self.edges |= {key: EDGES[key] for key in way.edges}
        self.notes += way.notes


def _write(table: Framework, shape: Shape, text: str) -> Export:
    if shape.form is None or shape.strange:
        strange = ", ".join(part_text(part) for part in shape.strange) or "the policy term"
        raise _Cannot(f"{table.title} has no flag for {strange}", None)
    form, way, penalties = _form(table, shape)
    draft = _Draft(dict(table.base))
    anchor = _anchor(table, shape, way, draft, form)
    mean = _mean(table, shape, way, draft)
    draft.take(way, form, mean)
    if form.numbers.get("value"):
        draft.say(form.numbers["value"])
    for piece in shape.corrections:
        draft.take(_correction(table, shape, way, piece), piece, mean)
    for piece in penalties:
        offered = table.penalties if way.penalties is None else way.penalties
        draft.take(_choose(table, offered.get(piece.kind, ()), piece, "penalty"), piece, mean)
    singly = any("token" in piece.numbers.get("level", piece.kind) for piece in shape.corrections)
    if singly and draft.edges.pop("gradient_per_response", ""):
        draft.say("gradient_per_response")  # where single tokens are weighed it shows everywhere
    weighs = (table.weighs_penalties and penalties) or len(penalties) < len(shape.penalties)
    if shape.corrections and weighs:
        draft.say("penalty_corrected")
    if anchor == "rollout" and any(piece.kind.endswith("_weighted") for piece in penalties):
        draft.say("penalty_anchor")
    notes = (*dict.fromkeys(draft.notes), *table.notes)
    call = way.call or table.call
    body = snippet(table.syntax, call, draft.flags)
    return Export(table.name, table.version, text, call, draft.flags, body, draft.differences, draft.edges, notes)


def _form(table: Framework, shape: Shape) -> tuple[Found, Way, tuple[Found, ...]]:
    """The form as the framework writes it, its way, and the penalties that are not part of it."""
    assert shape.form is not None
    for penalty in shape.penalties:
        kind = f"{shape.form.kind} + {penalty.kind}"
        if kind in table.forms:
            joint = Found(kind, shape.form.numbers | penalty.numbers, (*shape.form.parts, *penalty.parts))
            rest = tuple(other for other in shape.penalties if other is not penalty)
            return joint, _choose(table, _by_anchor(table.forms[kind], shape.anchor), joint, "loss"), rest
    offered = _by_anchor(table.forms.get(shape.form.kind, ()), shape.anchor)
    return shape.form, _choose(table, offered, shape.form, "loss"), shape.penalties


def _by_anchor(offered: Iterable[Way], anchor: str | None) -> tuple[Way, ...]:
    """The ways in order, those that take the ratio to the wanted policy first."""
    return tuple(sorted(offered, key=lambda way: way.anchors is not None and anchor not in way.anchors))


def _choose(table: Framework, offered: Iterable[Way], piece: Found, what: str) -> Way:
    unmet: list[str] = []
    for way in offered:
        lacking = way.unmet(piece.numbers)
        if not lacking:
            return way
        unmet += lacking
    why = f": {' or '.join(dict.fromkeys(unmet))}" if unmet else ""
    raise _Cannot(f"{table.title} has no {what} like {piece.text}{why}", piece)


def _anchor(table: Framework, shape: Shape, way: Way, draft: _Draft, form: Found) -> str:
    anchors = table.anchors if way.anchors is None else way.anchors
    wanted = shape.anchor or "old"
    found = wanted if wanted in anchors else next(iter(anchors))
    draft.put(anchors[found], Found("anchor", {}, form.parts))
    if shape.anchor is not None and found != shape.anchor:
        draft.say("anchor", theirs=found, ours=shape.anchor)
    if found == "rollout" and any(piece.kind != "negatives" for piece in shape.corrections):
        raise _Cannot(
            f"{table.title} takes the ratio to the sampler here, so a weight of old/rollout beside it would count the "
            "mismatch twice",
            shape.corrections[0],
        )
    return found


def _mean(table: Framework, shape: Shape, way: Way, draft: _Draft) -> str:
    """Write the mean, the nearest where the framework has not the spec's own; returns the kind that is written."""
    means = table.means if way.means is None else way.means
    kind, numbers = shape.mean.kind, shape.mean.numbers
    fitting = [one for one in means.get(kind, ()) if not one.unmet(numbers)]
    if not fitting:
        nearest = "sequence_mean" if kind.startswith("sequence") and "sequence_mean" in means else next(iter(means))
        draft.say("aggregate", theirs=nearest, ours=shape.mean.text)
        kind, fitting = nearest, list(means[nearest])
    chosen = fitting[0]
    draft.take(chosen, Found(kind, numbers, shape.mean.parts), kind)
    if chosen.rows is not None and chosen.rows != shape.rows and "aggregate" not in draft.differences:
        draft.edges["empty_rows"] = EDGES["empty_rows"].format(theirs=ROWS[chosen.rows], ours=ROWS[shape.rows])
    return kind


def _correction(table: Framework, shape: Shape, way: Way, piece: Found) -> Way:
    offered = table.corrections if way.corrections is None else way.corrections
    kinds = [piece.kind]
    if piece.kind == "negatives":
        kinds = [f"negatives_{piece.numbers['anchor']}"]
        kinds += ["negatives_same"] if piece.numbers["anchor"] == shape.anchor else []
    return _choose(table, [way for kind in kinds for way in offered.get(kind, ())], piece, "correction")


# --- where it cannot ----------------------------------------------------------------------------------------------


def _instead(table: Framework, spec: Spec, shape: Shape, stop: _Cannot) -> Iterable[str]:
    nearest = _without(spec, stop.piece.parts if stop.piece is not None else shape.strange)
    if nearest is not None:
        try:
            found = _write(table, recognise(nearest), str(nearest))
            yield f"the nearest it has: {nearest}: {snippet('line', '', _own(found, table))}"
        except _Cannot:
            pass
    for tag in _tags(spec, shape):
        if tag in table.related:
            yield f"related: {table.related[tag]}"
    yield f"a loss of one's own: {table.hook}"
    others = [name for name in FRAMEWORKS if name != table.name and _exact(name, shape)]
    if others:
        yield f"exact in {', '.join(others)}"


def _without(spec: Spec, parts: Iterable[Any]) -> Spec | None:
    """The spec without some parts, or None where no policy term is left or nothing was taken."""
    gone = set(parts)
    guards = tuple(part for part in spec.guards if part not in gone)
    factors = tuple(part for part in spec.factors if part not in gone)
    penalties = tuple(part for part in spec.penalties if part not in gone)
    left = Spec(guards, factors, penalties, spec.aggregate)
    lost = bool(spec.factors) and not factors
    return None if left == spec or lost or not left.parts else left


def _own(found: Export, table: Framework) -> Flags:
    return {
        name: value for name, value in found.settings.items() if name not in table.base or value != table.base[name]
    }


def _exact(name: str, shape: Shape) -> bool:
    try:
        return _write(FRAMEWORKS[name], shape, "").exact
    except _Cannot:
        return False


def _tags(spec: Spec, shape: Shape) -> list[str]:
    """What a spec is made of, for the tables' ``related``: scopes, ratios, reductions, needs, kinds."""
    found: list[str] = [] if shape.form is None else [shape.form.kind]
    parts: list[Any] = [*spec.guards, *spec.factors]
    for part in parts:
        found += [part.scope, part.reduce, part.ratio, *(("product",) if part.reduce == "sum" else ())]
    for guard in spec.guards:
        found += ["budget"] if hasattr(guard.region, "budget") else []
        found += ["random"] if getattr(guard.gate, "counts_steps", False) else []
        found += ["drop"] if guard.action.startswith("drop") else []
    found += [piece.kind.partition("_")[0] for piece in shape.penalties]
    return list(dict.fromkeys([*found, *spec.needs]))


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, list) else "inf" if value == float("inf") else value
