"""Tokens: whole responses with their tokens end to end, as flat NumPy arrays; what every reader gives and the audit reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from klamp.errors import UserError

Array = NDArray[Any]

_OF_ROWS = ("step", "group", "row", "reward", "length", "missing")
_OF_TOKENS = ("logp_new", "logp_old", "logp_rollout", "logp_ref", "advantage", "mask", "entropy", "token_ids")
ROLES = ("new", "old", "rollout", "ref")


@dataclass(frozen=True)
class Tokens:
    """R responses and their N tokens. ``offsets`` [R + 1]: response i is ``offsets[i]:offsets[i + 1]``.

    Per response [R]: ``step``, ``group``, ``row``, ``reward`` (NaN: unscored), ``length`` (as the log says it). Per
    token [N]: float32 log-probs, ``advantage``, ``entropy``; boolean ``mask``; ``token_ids``. None where the log has
    none. ``missing``: per response, whether the sampler left it without log-probs. ``origin``, ``first``: the file, and the place
    of its first response there.
    """

    offsets: Array
    step: Array
    row: Array
    logp_new: Array
    logp_old: Array
    advantage: Array
    mask: Array
    group: Array | None = None
    reward: Array | None = None
    length: Array | None = None
    logp_rollout: Array | None = None
    logp_ref: Array | None = None
    entropy: Array | None = None
    token_ids: Array | None = None
    missing: Array | None = None
    origin: str = ""
    first: int = 0

    @property
    def responses(self) -> int:
        return len(self.offsets) - 1

    @property
    def size(self) -> int:
        return int(self.offsets[-1] - self.offsets[0])

    @property
    def lengths(self) -> Array:
        found: Array = np.diff(self.offsets)
        return found

    @property
    def offers(self) -> frozenset[str]:
        """The optional information of a ``klamp.Batch`` that these responses have; turns follow from the mask."""
        optional = ("logp_rollout", "logp_ref", "entropy", "group", "reward")
        return frozenset(name for name in optional if getattr(self, name) is not None) | {"row", "segment"}

    def part(self, start: int, stop: int) -> Tokens:
        """The responses start:stop, as views."""
        low, high = int(self.offsets[start]), int(self.offsets[stop])
        return self._each(
            lambda one: one[start:stop],
            lambda one: one[low:high],
            self.offsets[start : stop + 1] - low,
            self.first + start,
        )

    def take(self, rows: Array) -> Tokens:
        """These responses, in this order."""
        lengths = self.lengths[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        index = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths)
        return self._each(lambda one: one[rows], lambda one: one[index], offsets, self.first)

    def _each(self, of_row: Any, of_token: Any, offsets: Array, first: int) -> Tokens:
        rows = {name: of_row(value) for name in _OF_ROWS if (value := getattr(self, name)) is not None}
        tokens = {name: of_token(value) for name in _OF_TOKENS if (value := getattr(self, name)) is not None}
        return Tokens(offsets, origin=self.origin, first=first, **rows, **tokens)

    def runs(self) -> Iterator[tuple[int, Tokens]]:
        """(step, its responses), one by one; responses that lie in another order are put in order first."""
        if not self.responses:
            return
        ordered = self
        if (np.diff(self.step) < 0).any():
            ordered = self.take(np.argsort(self.step, kind="stable"))
        edges = [0, *(np.flatnonzero(np.diff(ordered.step)) + 1).tolist(), ordered.responses]
        for start, stop in itertools.pairwise(edges):
            yield int(ordered.step[start]), ordered if stop - start == ordered.responses else ordered.part(start, stop)

    def blocks(self, tokens: int) -> Iterator[Tokens]:
        """The responses in order, at most so many tokens at a time (or one response)."""
        start = 0
        while start < self.responses:
            reach = self.offsets[start] + tokens
            stop = max(int(np.searchsorted(self.offsets, reach, side="right")) - 1, start + 1)
            yield self if stop - start == self.responses else self.part(start, stop)
            start = stop

    def where(self, token: int) -> str:
        """A place for a message: the file, the response and the token."""
        response = int(np.searchsorted(self.offsets, token, side="right")) - 1
        return f"{self.origin}: response {self.first + response}, token {token - int(self.offsets[response])}"


def counted(flags: Array, offsets: Array) -> Array:
    """The true flags of each response, int64 [R]."""
    return _reduced(np.add, flags.view(np.uint8), offsets, np.int32)


def some(flags: Array, offsets: Array) -> Array:
    """Whether a response has a true flag, [R]."""
    return _reduced(np.logical_or, flags, offsets, None)


def _reduced(how: np.ufunc, flags: Array, offsets: Array, kind: Any) -> Array:
    found = np.zeros(len(offsets) - 1, bool if kind is None else np.int64)
    filled = np.flatnonzero(np.diff(offsets))  # reduceat would take the next token of an empty response
    if len(filled):
        found[filled] = how.reduceat(flags, offsets[:-1][filled], dtype=kind)
    return found


def join(parts: list[Tokens]) -> Tokens:
    """Several of them as one; what one of them lacks, the whole lacks."""
    if len(parts) == 1:
        return parts[0]
    changed: dict[str, Any] = {}
    for item in fields(Tokens):
        values = [getattr(part, item.name) for part in parts]
        if item.name not in ("offsets", "origin", "first"):
            changed[item.name] = None if any(value is None for value in values) else np.concatenate(values)
    sizes = [part.offsets[-1] for part in parts]
    before = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    offsets = [part.offsets[1:] + start for part, start in zip(parts, before, strict=True)]
    return replace(parts[0], offsets=np.concatenate([[0], *offsets]), **changed)


def checked(tokens: Tokens, skip: bool) -> tuple[Tokens, int]:
    """The responses whose log-probs and advantages are finite where the mask counts them, and how many are left out.

    A missing log-prob of the sampler is no error (it is NaN). Raises UserError at the first other one unless ``skip``.
    """
    bad: Array | None = None
    name = ""
    for field in ("logp_new", "logp_old", "advantage", "logp_ref", "entropy", "logp_rollout"):
        value = getattr(tokens, field)
        if value is None or not value.size or np.isfinite(np.dot(value, value)):
            continue
        broken = ~np.isfinite(value) & tokens.mask
        if field == "logp_rollout":
            broken &= ~np.isnan(value)
        if broken.any():
            name = name or field
            bad = broken if bad is None else bad | broken
    if bad is None:
        return tokens, 0
    rows = some(bad, tokens.offsets)
    if not skip:
        at = int(np.flatnonzero(bad)[0])
        raise UserError(
            f"{tokens.where(at)}: {name} is {getattr(tokens, name)[at]} ({int(rows.sum())} responses of this part have "
            "such values); mask the token, or leave such responses out with --skip-bad-rows"
        )
    return tokens.take(np.flatnonzero(~rows)), int(rows.sum())
