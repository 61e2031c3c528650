"""Sums: everything an audit counts, as plain sums that add over blocks, files and processes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from klamp.audit import sketch
from klamp.audit.slices import DIMENSIONS
from klamp.audit.tokens import Array

# Of the tokens of a step, whatever the spec.
TOTALS = (
    "tokens", "responses", "active", "positive", "unmoved", "x", "x2", "k3", "overflow",
    "surprisal", "entropy", "entropy_tokens", "y_tokens", "y", "y2", "y_k3",
)  # fmt: skip
# Of a step and a spec: counts by side (and by the sign of A), |g| and |u| with and without the guards.
OF_SPEC = (
    "outside_low", "outside_high", "low_positive", "low_negative", "high_positive", "high_negative", "mass_low", "mass_high",
    "g", "g2", "gu", "u", "u2", "overflow",
)  # fmt: skip
OF_SLICE = ("tokens", "active")
OF_SLICE_AND_SPEC = ("outside", "low", "high", "removed_mass", "mass")
T = {name: index for index, name in enumerate(TOTALS)}
S = {name: index for index, name in enumerate(OF_SPEC)}
SIGNS = 3  # A = 0, A > 0, A < 0
_PENDING, _DENSE = 1 << 19, 1 << 22


@dataclass
class Counted:
    """Counts and sums by token id, of which only a few are seen: what is new is held and counted now and then."""

    ids: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    sums: Array = field(default_factory=lambda: np.zeros((0, 2)))  # tokens, |u|
    held: list[tuple[Array, Array]] = field(default_factory=list)
    waiting: int = 0

    def add(self, ids: Array, mass: Array) -> None:
        """Tokens [n] with their masses."""
        if not len(ids):
            return
        self.held.append((ids, np.stack([np.ones(len(ids)), mass], axis=1)))
        self.waiting += len(ids)
        if self.waiting > _PENDING:
            self.settle()

    def settle(self) -> None:
        """Count what is held."""
        if not self.held:
            return
        ids = np.concatenate([self.ids, *(one for one, _ in self.held)])
        sums = np.concatenate([self.sums, *(one for _, one in self.held)])
        if not len(ids):
            self.ids, self.sums = ids, sums
        elif ids.max() < _DENSE:  # as of any vocabulary: no sort
            whole = np.stack([np.bincount(ids, sums[:, k]) for k in range(2)], axis=1)
            self.ids = np.flatnonzero(whole[:, 0])
            self.sums = whole[self.ids]
        else:
            self.ids, index = np.unique(ids, return_inverse=True)
            self.sums = np.stack([np.bincount(index, sums[:, k], len(self.ids)) for k in range(2)], axis=1)
        self.held, self.waiting = [], 0

    def __iadd__(self, other: Counted) -> Counted:
        other.settle()
        self.held.append((other.ids, other.sums))
        self.settle()
        return self


@dataclass
class Sums:
    """The sums of an audit of some specs; ``by``: the slices besides the step."""

    specs: int
    by: tuple[str, ...] = ()
    totals: dict[int, Array] = field(default_factory=dict)  # step -> [TOTALS]
    spec_totals: dict[int, Array] = field(default_factory=dict)  # step -> [specs, OF_SPEC]
    both: Array = field(default_factory=lambda: np.zeros((0, 0)))  # tokens that two specs remove
    ratios: sketch.Sketch = field(default_factory=lambda: sketch.Sketch(SIGNS))
    slices: dict[str, Array] = field(default_factory=dict)  # [codes, OF_SLICE]
    spec_slices: dict[str, Array] = field(default_factory=dict)  # [specs, codes, OF_SLICE_AND_SPEC]
    cut_probability: Array = field(default_factory=lambda: np.zeros((0, 0, 0)))  # [specs, sides, codes of old_prob]
    cut_ids: list[Counted] = field(default_factory=list)  # of each spec
    seen_ids: Counted = field(default_factory=Counted)
    facts: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # of klamp.audit.evidence
    kinds: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.both = np.zeros((self.specs, self.specs))
        self.cut_probability = np.zeros((self.specs, 2, len(DIMENSIONS["old_prob"].labels)))
        self.cut_ids = [Counted() for _ in range(self.specs)]
        for name in self.by:
            if name in DIMENSIONS:
                codes = len(DIMENSIONS[name].labels)
                self.slices[name] = np.zeros((codes, len(OF_SLICE)))
                self.spec_slices[name] = np.zeros((self.specs, codes, len(OF_SLICE_AND_SPEC)))

    def of_step(self, step: int) -> tuple[Array, Array]:
        """The sums of one step, to add to."""
        if step not in self.totals:
            self.totals[step] = np.zeros(len(TOTALS))
            self.spec_totals[step] = np.zeros((self.specs, len(OF_SPEC)))
        return self.totals[step], self.spec_totals[step]

    def settle(self) -> None:
        """Count what is held, so that little travels between processes."""
        self.ratios.settled()
        for counted in (*self.cut_ids, self.seen_ids):
            counted.settle()

    def __iadd__(self, other: Sums) -> Sums:
        for step, totals in other.totals.items():
            mine, specs = self.of_step(step)
            mine += totals
            specs += other.spec_totals[step]
        self.both += other.both
        self.cut_probability += other.cut_probability
        self.ratios.counts += other.ratios.settled()
        for name, value in other.slices.items():
            self.slices[name] += value
            self.spec_slices[name] += other.spec_slices[name]
        for one, another in zip([*self.cut_ids, self.seen_ids], [*other.cut_ids, other.seen_ids], strict=True):
            one += another
        for name, fact in other.facts.items():
            self.facts[name] = max(self.facts[name], fact) if name.endswith("_max") else self.facts[name] + fact
        self.kinds |= other.kinds
        self.notes |= other.notes
        return self

    @property
    def steps(self) -> list[int]:
        return sorted(self.totals)

    def series(self, name: str) -> Array:
        """One of the totals over the steps in order."""
        return np.array([self.totals[step][T[name]] for step in self.steps])

    def spec_series(self, spec: int, name: str) -> Array:
        return np.array([self.spec_totals[step][spec, S[name]] for step in self.steps])

    def total(self, name: str) -> float:
        return float(self.series(name).sum())

    def spec_total(self, spec: int, name: str) -> float:
        return float(self.spec_series(spec, name).sum())
