"""Guards: where a policy gradient is cut. Every guard is the same rule, keep = inside | ~gate.

A guard is ratio x scope x reduce x region x gate x action: which two policies, over what, how far apart they may
be, where the rule applies, and what happens outside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from klamp.errors import UserError, did_you_mean
from klamp.measures import import_path
from klamp.regions import Region

if TYPE_CHECKING:
    from torch import Tensor

    from klamp.batch import Batch

RATIOS = ("new/old", "new/rollout", "old/rollout", "new/ref")
SCOPES = ("token", "sequence")
REDUCES = ("mean", "sum")
CUT_VALUES = ("bound", "zero")
ACTIONS = ("zero",)

Predicate = Callable[..., Any]


@dataclass(frozen=True)
class Gate:
    """Where a guard applies: ``predicate(log_ratio, advantages, batch)`` is true where the rule may cut.

    ``needs`` names what the predicate reads from the batch beyond log-probs and advantages. ``name`` is what a spec's
    text finds the gate by again: the import path of the predicate, or, for a gate with needs, of the gate itself.
    """

    predicate: Predicate
    name: str = ""
    needs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", frozenset(self.needs))
        if not self.name and self.needs:
            raise UserError("a gate with needs is found again by its own path: give name='package.module:variable'")
        if not self.name:
            path = f"{getattr(self.predicate, '__module__', None)}:{getattr(self.predicate, '__qualname__', 'gate')}"
            object.__setattr__(self, "name", path)

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return (gate, (self.name,))

    def __deepcopy__(self, memo: Any) -> Gate:
        return self  # a value


def _outward(log_ratio: Tensor, advantages: Tensor, batch: Batch) -> Tensor:
    """The step would move the ratio further from 1: by signs, never by a product that could underflow."""
    return (advantages > 0) & (log_ratio > 0) | (advantages < 0) & (log_ratio < 0)


def _always(log_ratio: Tensor, advantages: Tensor, batch: Batch) -> Tensor:
    return log_ratio == log_ratio


def _positive(log_ratio: Tensor, advantages: Tensor, batch: Batch) -> Tensor:
    return (advantages > 0) & (log_ratio == log_ratio)


def _negative(log_ratio: Tensor, advantages: Tensor, batch: Batch) -> Tensor:
    return (advantages < 0) & (log_ratio == log_ratio)


GATES: dict[str, Gate] = {
    "outward": Gate(_outward, "outward"),
    "always": Gate(_always, "always"),
    "positive": Gate(_positive, "positive"),
    "negative": Gate(_negative, "negative"),
}


def gate(name: str | Gate | Predicate) -> Gate:
    """The gate with this name: one of ``GATES`` or ``package.module:predicate``."""
    if isinstance(name, Gate):
        return name
    if callable(name):
        return Gate(name)
    if isinstance(name, str) and name in GATES:
        return GATES[name]
    if ":" in str(name):
        found = import_path(name, "gate")
        if not isinstance(found, Gate) and not callable(found):
            raise UserError(f"gate {name!r} is a {type(found).__name__}; a predicate is needed")
        return found if isinstance(found, Gate) else Gate(found)
    raise UserError(f"unknown gate {name!r}; {did_you_mean(str(name), [*GATES, 'package.module:predicate'])}")


class Verdict(NamedTuple):
    """What a guard says of each token: outside on which side, and whether the rule applies there."""

    outside_low: Tensor
    outside_high: Tensor
    applies: Tensor


@dataclass(frozen=True)
class Guard:
    """keep = inside | ~gate, with inside: log_low <= x <= log_high, x the log-ratio over ``scope``.

    ``cut_value``: the value of a cut token in the loss: A times the nearest ``bound`` (a clip), or ``zero``
    (a mask). The gradient of a cut token is exactly 0 either way (theory: pessimistic clip = directional mask).
    """

    region: Region
    ratio: str = "new/old"
    scope: str = "token"
    reduce: str = "mean"
    gate: Gate = GATES["outward"]
    action: str = "zero"
    cut_value: str = "bound"

    def __post_init__(self) -> None:
        object.__setattr__(self, "gate", gate(self.gate))
        for name, choices in (("ratio", RATIOS), ("scope", SCOPES), ("reduce", REDUCES), ("action", ACTIONS),
                              ("cut_value", CUT_VALUES)):  # fmt: skip
            check_choice(name, getattr(self, name), choices)
        if self.scope == "token" and self.reduce != "mean":
            raise UserError(f"reduce={self.reduce!r} needs scope='sequence': one token has nothing to reduce")

    @property
    def needs(self) -> frozenset[str]:
        return ratio_needs(self.ratio) | self.gate.needs

    def judge(self, log_ratio: Tensor, advantages: Tensor, batch: Batch) -> Verdict:
        return Verdict(
            log_ratio < self.region.log_low,
            log_ratio > self.region.log_high,
            self.gate.predicate(log_ratio, advantages, batch),
        )


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{name}={value!r} is unknown; {did_you_mean(str(value), choices)}")


def ratio_needs(ratio: str) -> frozenset[str]:
    """The optional batch fields that a ratio reads."""
    return frozenset(f"logp_{role}" for role in ratio.split("/") if role in ("rollout", "ref"))
