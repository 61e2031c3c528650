"""Spec: a policy loss as a value. Guards x factors x penalties x aggregate; specs compose with ``+``."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

from klamp.aggregates import PROMPTS, Aggregate
from klamp.conditions import Distance
from klamp.errors import UserError
from klamp.factors import TRANSFORMS, Factor, absorbs
from klamp.gates import SELECTIONS, Gate
from klamp.guards import Guard
from klamp.measures import Measure
from klamp.penalties import DivergencePenalty, EntropyBonus, FPenalty, KLReference, Penalty
from klamp.radii import RADII, Cosine, Linear

PENALTIES: dict[str, type] = {"f_penalty": FPenalty, "kl_reference": KLReference, "entropy_bonus": EntropyBonus,
                               "divergence_penalty": DivergencePenalty}  # fmt: skip
NAMES: dict[type, str] = {Guard: "guard", Factor: "factor"}
NAMES |= {kind: name for name, kind in (PENALTIES | TRANSFORMS | SELECTIONS | RADII).items()}
Part = Guard | Factor | Penalty | Aggregate


@dataclass(frozen=True, repr=False)
class Spec:
    """A policy loss: g = A x keep of the guards x factors, plus penalties, averaged by the aggregate.

    A set of parts: equality ignores their order and how the spec was written. ``aggregate=None`` leaves the mean to
    the spec it is composed with, and is a token mean when used alone. ``name`` is the text it was made from.
    """

    guards: tuple[Guard, ...] = ()
    factors: tuple[Factor, ...] = ()
    penalties: tuple[Penalty, ...] = ()
    aggregate: Aggregate | None = None
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for which in ("guards", "factors", "penalties"):
            unique = dict.fromkeys(getattr(self, which))
            object.__setattr__(self, which, tuple(sorted(unique, key=part_text)))
        for factor in self.factors:
            clash = [
                other for other in self.factors if other.of == factor.of and other != factor and _reads(other, factor)
            ]
            if clash:
                raise UserError(
                    f"two factors weigh by the same ratio: {part_text(factor)} and {part_text(clash[0])}; "
                    "keep one of the two methods and add the other's guards only"
                )
        for factor, guard in itertools.product(self.factors, self.guards):
            if guard.action == "rollback" and absorbs(factor, guard):
                raise UserError(
                    f"{part_text(factor)} clamps its log-ratios at the bounds of {part_text(guard)}, which has a slope beyond "
                    "them; use action='zero', or clipped=False"
                )
        if sum(factor.integrated for factor in self.factors) > 1:
            raise UserError("two factors both carry the dependence on the new policy; cap one of them with cap()")
        regions = [guard.region for guard in [*self.guards, *self._selectors]]
        sizes = {region.top_k for region in regions if isinstance(region, Distance) and region.top_k is not None}
        if len(sizes) > 1:
            raise UserError(
                f"two guards take the {' and the '.join(map(str, sorted(sizes)))} likeliest tokens; give both one top_k"
            )
        if sum("adaptive" in penalty.traits for penalty in self.penalties) > 1:
            raise UserError("two adaptive penalties would steer by the same divergence; keep one")

    def __add__(self, other: Spec | Part) -> Spec:
        if isinstance(other, str):
            raise UserError(f"a spec is composed with a spec or a part: write klamp.parse({other!r})")
        if not isinstance(other, Spec):
            if not isinstance(other, (Guard, Factor, Aggregate, Penalty)):
                raise UserError(f"a spec is composed with a spec or a part; got {other!r}")
            other = of_part(other)
        mine, theirs = self.aggregate, other.aggregate
        if mine is not None and theirs is not None and mine != theirs:
            raise UserError(
                f"{self} averages by {part_text(mine)} and {other} by {part_text(theirs)}; "
                f"pass aggregate={part_text(mine)} to one of them"
            )
        return Spec(
            self.guards + other.guards,
            self.factors + other.factors,
            self.penalties + other.penalties,
            mine or theirs,
            " + ".join(filter(None, (str(self), str(other)))),
        )

    def __repr__(self) -> str:
        return f"Spec({str(self)!r})"

    def __str__(self) -> str:
        return self.name or " + ".join(part_text(part) for part in self.parts)

    @property
    def parts(self) -> tuple[Part, ...]:
        mean = () if self.aggregate is None else (self.aggregate,)
        return (*self.guards, *self.factors, *self.penalties, *mean)

    @property
    def mean(self) -> Aggregate:
        return self.aggregate or Aggregate("token_mean")

    @property
    def needs(self) -> frozenset[str]:
        """Optional fields of a batch that this spec reads: logp_rollout, logp_ref, entropy, group, ..."""
        found: frozenset[str] = frozenset({"group"} if self.mean.kind in PROMPTS else ())
        return found.union(*(part.needs for part in self._active))

    @property
    def _active(self) -> list[Guard | Factor | Penalty]:
        return [*self.guards, *self.factors, *self.penalties]

    @property
    def traits(self) -> frozenset[str]:
        """Where a law of ``klamp.testing`` does not apply, and why, as the parts declare it."""
        found: frozenset[str] = frozenset({"counts_empty_rows"} if self.mean.rows == "all" else ())
        found |= frozenset({"local_mean"} if self.mean.kind == "local_token_mean" else ())
        return found.union(*(part.traits for part in self._active))

    @property
    def reads_new(self) -> bool:
        """Whether a statistic of the whole step depends on the new policy: one more forward pass."""
        return any(getattr(part, "reads_new", False) for part in [*self._active, *self._selectors])

    @property
    def acts_at_once(self) -> bool:
        """Whether a guard can cut where the new policy is the old one: one on another ratio, or one that selects."""
        return any(guard.ratio != "new/old" or "selects" in guard.traits for guard in self.guards)

    @property
    def asks_step(self) -> bool:
        """Whether a part needs a statistic of the whole step, or changes what is counted."""
        return bool(self._asking)

    @property
    def step_needs(self) -> frozenset[str]:
        """The optional fields that ``Objective.stats`` reads."""
        found: frozenset[str] = frozenset({"group"} if self.mean.kind in PROMPTS else ())
        return found.union(*(part.needs for part in self._asking))

    @property
    def _asking(self) -> list[Guard | Factor]:
        guards = [g for g in [*self.guards, *self._selectors] if g.surveyed or g.action.startswith("drop")]
        return [*guards, *(factor for factor in self.factors if factor.surveyed)]

    @property
    def counts_steps(self) -> bool:
        """Whether the spec changes with the number of the optimizer step: a schedule, or a lottery."""
        guards = [*self.guards, *self._selectors]
        moves = any(isinstance(radius, (Linear, Cosine)) for guard in guards for radius in guard.region.moves)
        return moves or any(getattr(guard.gate, "counts_steps", False) for guard in guards)

    @property
    def _selectors(self) -> list[Guard]:
        """The guards that select where a penalty acts."""
        found = [getattr(penalty, "on", None) for penalty in self.penalties]
        return [guard for guard in found if guard is not None]

    def require(self, offers: frozenset[str], who: str, needs: frozenset[str] | None = None) -> None:
        """Raise UserError unless ``offers`` covers ``needs`` (the spec's); names what is missing and who lacks it."""
        lacking = sorted((self.needs if needs is None else needs) - offers)
        if lacking:
            users = [part_text(part) for part in self._active if set(lacking) & part.needs]
            which = f" ({', '.join(users)})" if users else ""
            raise UserError(
                f"{self} needs {', '.join(lacking)}{which}, which {who} does not offer; "
                f"it offers {', '.join(sorted(offers)) or 'nothing beyond logp_new and logp_old'}"
            )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; ``Spec.from_dict`` gives the spec back."""
        return {
            "spec": str(self),
            "guards": [part_dict(part) for part in self.guards],
            "factors": [part_dict(part) for part in self.factors],
            "penalties": [part_dict(part) for part in self.penalties],
            "aggregate": None if self.aggregate is None else part_dict(self.aggregate),
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Spec:
        from klamp.language import spec_from_dict  # the reader stands to the right of the value

        return spec_from_dict(data)


def of_part(part: Part) -> Spec:
    """A spec with this one part."""
    if isinstance(part, Guard):
        return Spec(guards=(part,), name=part_text(part))
    if isinstance(part, Factor):
        return Spec(factors=(part,), name=part_text(part))
    if isinstance(part, Aggregate):
        return Spec(aggregate=part, name=part_text(part))
    return Spec(penalties=(part,), name=part_text(part))


def _reads(*factors: Factor) -> bool:
    """Whether all factors read their ratio."""
    return all(getattr(factor.transform, "reads_ratio", True) for factor in factors)


# --- text -----------------------------------------------------------------------------------------------------


def part_name(part: object) -> str:
    if isinstance(part, Aggregate):
        return part.kind
    if type(part) not in NAMES:
        raise UserError(f"{type(part).__name__} has no name in the language of specs; call klamp.register_part for it")
    return NAMES[type(part)]


def part_arguments(part: Any) -> dict[str, object]:
    """The arguments that differ from their defaults, in the order of the fields."""
    found: dict[str, object] = dict(part.region.arguments()) if isinstance(part, Guard) else {}
    for item in dataclasses.fields(part):
        value = getattr(part, item.name)
        if item.name not in ("region", "kind") and value != item.default:
            found[item.name] = value
    if isinstance(part, Guard) and part.cut_value == part.usual_cut_value:
        found.pop("cut_value")
    return found


def part_text(part: Any) -> str:
    inner = ", ".join(f"{name}={value_text(value)}" for name, value in part_arguments(part).items())
    return f"{part_name(part)}({inner})"


def part_dict(part: Any) -> dict[str, Any]:
    return {"part": part_name(part)} | {name: _plain(value) for name, value in part_arguments(part).items()}


def value_text(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, (Measure, Gate)):
        return repr(str(value))
    if type(value) in NAMES or isinstance(value, Aggregate):
        return part_text(value)
    if isinstance(value, Spec):
        return str(value)
    if callable(value) and not isinstance(value, type):  # a function of one's own, by its import path
        return repr(f"{value.__module__}:{getattr(value, '__qualname__', value)}")
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    if isinstance(value, float):  # NumPy's too
        return repr(float(value))
    return repr(value.item() if hasattr(value, "item") else value)


def _plain(value: object) -> Any:
    if isinstance(value, (Measure, Gate)):
        return str(value)
    if type(value) in NAMES:
        return part_dict(value)
    return repr(value) if isinstance(value, float) and math.isinf(value) else value
