"""What a law is: its number, its words, what a trait takes from it, its check; and how a check accuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from klamp.errors import UserError
from klamp.objective import Objective
from klamp.spec import Spec
from klamp.stats import Stats
from klamp.tally import Tally
from klamp.testing.draws import KINDS, Draw, Outcome, make, run

Maker = Callable[[Spec], Objective]


@dataclass(frozen=True)
class LawResult:
    """What became of one law: ``held`` on so many ``instances``, or ``exempt`` for a ``reason``.

    A law may hold but for what a trait of the spec takes from it; the ``reason`` says that too, and is else empty.
    """

    law: int
    name: str
    status: str
    reason: str
    instances: int


class LawViolation(AssertionError):
    """A broken law: its number and words, the spec, the seed, and the numbers that disagree."""

    def __init__(self, law: int, name: str, spec: str, seed: int, what: str, where: str = "",
                 position: tuple[int, ...] = (), expected: object = None, got: object = None) -> None:  # fmt: skip
        self.law, self.name, self.spec, self.seed, self.what, self.where = law, name, spec, seed, what, where
        self.position, self.expected, self.got = position, expected, got
        lines = [f"law {law} is broken: {name}", f"  spec: {spec}", f"  seed {seed}; {where}"]
        numbers = "" if expected is None and got is None else f": expected {expected!r}, got {got!r}"
        lines.append(f"  {what}{f' at {list(position)}' if position else ''}{numbers}")
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Law:
    """``exempt``: what a trait of the spec takes from the law; the check asks for all the rest."""

    number: int
    name: str
    exempt: Mapping[str, str]
    check: Callable[[Trial], int | str]


LAWS: dict[int, Law] = {}


def law(number: int, name: str, **exempt: str) -> Callable[[Callable[[Trial], int | str]], None]:
    """Make a check a law. It returns how many instances held, or a sentence why it does not apply."""

    def add(check: Callable[[Trial], int | str]) -> None:
        LAWS[number] = Law(number, name, exempt, check)

    return add


@dataclass(frozen=True)
class Trial:
    """One spec before one law. ``original``: the spec as given; ``spec``: with a divisor where it lacked one."""

    original: Spec
    spec: Spec
    law: Law
    seed: int
    batches: int
    make_objective: Maker

    def run(self) -> LawResult:
        number, name = self.law.number, self.law.name
        found = self.law.check(self)
        if isinstance(found, str):
            return LawResult(number, name, "exempt", found, 0)
        if not found:
            return LawResult(number, name, "exempt", f"no instance among {self.batches} batches", 0)
        taken = sorted(self.law.exempt.keys() & self.spec.traits)
        reason = "; ".join(f"the spec has the trait {trait}: {self.law.exempt[trait]}" for trait in taken)
        return LawResult(number, name, "held", reason, found)

    # --- material -------------------------------------------------------------------------------------------

    @property
    def objective(self) -> Objective:
        return self.make_objective(self.spec)

    @property
    def policy_spec(self) -> Spec:
        """The spec without its penalties: its gradient is the policy term's."""
        return replace(self.spec, penalties=(), name="")

    @property
    def start(self) -> dict[str, float]:
        """The state before the first step: the spec's, and what an objective of one's own adds."""
        return Objective(self.spec).init() | self.objective.init()

    def generator(self, index: int = 0) -> torch.Generator:
        return torch.Generator().manual_seed(1_000_003 * self.seed + 1009 * self.law.number + index)

    def draws(self) -> Iterator[tuple[Draw, torch.Generator]]:
        """Random batches from the smallest kind to the largest, then again."""
        packs = "counts_empty_rows" not in self.spec.traits  # a packed batch holds no empty response to count
        kinds = [kind for kind in KINDS if packs or kind != "packed rows"]
        for index in range(self.batches):
            generator = self.generator(index)
            yield make(self.spec, kinds[index % len(kinds)], generator), generator

    def outcome(self, draw: Draw, objective: Objective | None = None, stats: Stats | None = None,
                state: dict[str, float] | None = None) -> Outcome:  # fmt: skip
        """What the objective says of a draw that it has no reason to refuse."""
        try:
            return run(self.objective if objective is None else objective, draw, stats, state)
        except UserError as error:
            raise self.violation(f"refused: {error}", draw) from error

    # --- accusations ----------------------------------------------------------------------------------------

    def violation(self, what: str, where: object, position: tuple[int, ...] = (), expected: object = None,
                  got: object = None) -> LawViolation:  # fmt: skip
        place = f"batch {where.label!r} {list(where.shape)}" if isinstance(where, Draw) else str(where)
        return LawViolation(
            self.law.number, self.law.name, str(self.original), self.seed, what, place, position, expected, got
        )

    def close(self, what: str, where: object, expected: Tensor, got: Tensor, rtol: float, atol: float = 0.0,
              but: Tensor | None = None) -> None:  # fmt: skip
        """Elementwise |got - expected| <= rtol |expected| + atol; NaN and infinity must agree."""
        expected, got = expected.detach().double(), got.detach().double()
        bad = ~torch.isclose(got, expected, rtol=rtol, atol=atol, equal_nan=True)
        self._accuse(what, where, expected, got, bad if but is None else bad & ~but)

    def same(self, what: str, where: object, expected: Tensor, got: Tensor, but: Tensor | None = None) -> None:
        """Equal bits (NaN equals itself, 0.0 does not equal -0.0)."""
        if expected.shape != got.shape or expected.dtype != got.dtype:
            raise self.violation(f"{what}: another shape or dtype", where, (), tuple(expected.shape), tuple(got.shape))
        bad = _bits(expected) != _bits(got)
        self._accuse(what, where, expected, got, bad if but is None else bad & ~but)

    def holds(self, what: str, where: object, condition: bool, expected: object = None, got: object = None) -> None:
        if not condition:
            raise self.violation(what, where, (), expected, got)

    def same_metrics(self, where: object, expected: Tally, got: Tally, *, rtol: float | None = None) -> None:
        """Metrics equal: counts exactly, sums bit for bit or, with ``rtol``, to rounding."""
        one, other = _flat(expected), _flat(got)
        self.holds("names of metrics", where, one.keys() == other.keys(), sorted(one), sorted(other))
        for name, value in one.items():
            if rtol is None or not value.is_floating_point():
                self.same(f"metric {name}", where, value, other[name])
            else:
                self.close(f"metric {name}", where, value, other[name], rtol, rtol)

    def _accuse(self, what: str, where: object, expected: Tensor, got: Tensor, bad: Tensor) -> None:
        if not bool(bad.any()):
            return
        size = torch.where(bad, torch.nan_to_num(expected.double().abs(), nan=math.inf), math.inf)
        flat = int(size.reshape(-1).argmin()) if bool((size < math.inf).any()) else int(bad.reshape(-1).int().argmax())
        position = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), bad.shape)) if bad.ndim else ()
        many = f" ({int(bad.sum())} of {bad.numel()} differ)" if bad.ndim else ""
        raise self.violation(what + many, where, position, expected[position].item(), got[position].item())


def _bits(value: Tensor) -> Tensor:
    views = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}
    plain = value.detach().contiguous()
    return plain.view(views[plain.dtype]) if plain.dtype in views else plain


def _flat(tally: Tally) -> dict[str, Tensor]:
    found = {name: torch.as_tensor(value) for name, value in (tally.sums | tally.maxima).items()}
    for name, (total, count) in tally.means.items():
        found[f"{name} (sum)"], found[f"{name} (count)"] = torch.as_tensor(total), torch.as_tensor(count)
    return found
