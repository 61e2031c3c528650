"""A mergeable sketch of log-ratios: counts in bins that share sign, exponent and seven bits of the float32.

The middle of a bin is within 1/256 (0.4 %) of every log-ratio in it, for 6e-8 <= |x| < 128; smaller ones count as 0, larger
ones as 128. Sketches of parts add up to that of the whole, whatever the order.
"""

from __future__ import annotations

import numpy as np

from klamp.audit.tokens import Array

ERROR = 2.0**-8  # relative, of a quantile
_LEAST, _MOST = -24, 7  # exponents of 2
_BASE = (127 + _LEAST) << 7
SIDE = (_MOST - _LEAST) << 7  # bins to a side, and one for 0
BINS = 2 * (SIDE + 1)
_MANY = 1 << 18


class Sketch:
    """Counts [kinds, BINS] of codes that come in small blocks: copied into one place, and counted many at a time."""

    def __init__(self, kinds: int) -> None:
        self.counts = np.zeros((kinds, BINS), np.int64)
        self._codes = np.empty(_MANY, np.int64)
        self._used = 0

    def add(self, code: Array) -> None:
        """Codes [n], each with BINS times its kind added."""
        if self._used + len(code) > len(self._codes):
            self.settled()
        if len(code) > len(self._codes):  # one long response
            self._codes = np.empty(len(code), np.int64)
        self._codes[self._used : self._used + len(code)] = code
        self._used += len(code)

    def settled(self) -> Array:
        """The counts of all that was added."""
        if self._used:
            found = np.bincount(self._codes[: self._used], minlength=self.counts.size)
            self.counts += found.reshape(self.counts.shape)
            self._used = 0
        return self.counts

    def __getstate__(self) -> Array:
        return self.settled()

    def __setstate__(self, counts: Array) -> None:
        self.__init__(len(counts))  # type: ignore[misc]
        self.counts = counts


def codes(x: Array) -> Array:
    """The bin of each float32 log-ratio, int32 [n]."""
    bits = x.view(np.uint32)
    found = (bits >> 16).view(np.int32)
    found &= 0x7FFF
    found -= _BASE - 1
    np.maximum(found, 0, out=found)
    np.minimum(found, SIDE, out=found)
    side = (bits >> 31).view(np.int32)
    side *= SIDE + 1
    found += side
    return found


def middles() -> Array:
    """The log-ratio that stands for each bin, [BINS]."""
    low = ((np.arange(SIDE, dtype=np.uint32) + np.uint32(_BASE)) << 16).view(np.float32).astype(np.float64)
    high = np.append(low[1:], 2.0**_MOST)
    one = np.concatenate([[0.0], 0.5 * (low + high)])
    return np.concatenate([one, -one])


def quantiles(counts: Array, shares: tuple[float, ...]) -> list[float | None]:
    """The log-ratios below which these shares of the tokens lie; None of no token."""
    total = int(counts.sum())
    if not total:
        return [None for _ in shares]
    middle = middles()
    order = np.argsort(middle, kind="stable")
    reached = np.cumsum(counts[order])
    ranks = [min(max(int(np.ceil(share * total)), 1), total) for share in shares]
    return [float(middle[order[int(np.searchsorted(reached, rank))]]) for rank in ranks]
