"""Rewards that shape a completion, whatever its answer: ``format`` and ``overlong``."""

from __future__ import annotations

from collections.abc import Sequence

from klamp.errors import UserError
from klamp.rewards.base import TIME_LIMIT, Columns, Reward, Verdict
from klamp.rewards.extracting import compiled, matches


class Format(Reward):
    """1 where a pattern is found in the completion, else 0; ``^`` and ``$`` in it ask for the whole of it.

    A dot also matches the end of a line. A pattern that takes longer than the time limit is not found.
    """

    needs = ()

    def __init__(self, name: str, pattern: str, *, limit: float = TIME_LIMIT) -> None:
        super().__init__(name)
        compiled(pattern, "pattern")
        self.pattern, self.limit = pattern, limit

    def judge(self, prompts: Sequence[str], texts: Sequence[str], columns: Columns) -> list[Verdict]:
        return [Verdict(float(found is not None)) for found in matches(self.pattern, texts, self.limit)]


class Overlong(Reward):
    """DAPO's penalty for length (arXiv 2503.14476, eq. 13), of n tokens with a limit L and a margin C before it:

        0 for n <= L - C,    (L - C - n) / C for L - C < n <= L,    -1 beyond.

    The tokens are those of the column ``completion_ids``, which TRL passes.
    """

    needs = ("completion_ids",)

    def __init__(self, name: str = "overlong", *, limit: int = 4096, cache: int = 512) -> None:
        super().__init__(name)
        if not (isinstance(limit, int) and isinstance(cache, int) and 0 < cache <= limit):
            raise UserError(f"overlong(limit={limit!r}, cache={cache!r}): whole numbers of tokens, 0 < cache <= limit")
        self.limit, self.cache = limit, cache

    def judge(self, prompts: Sequence[str], texts: Sequence[str], columns: Columns) -> list[Verdict]:
        return [Verdict(self.penalty(len(ids))) for ids in columns["completion_ids"]]

    def penalty(self, tokens: int) -> float:
        return max(-1.0, min(0.0, (self.limit - self.cache - tokens) / self.cache))
