"""Running sums over a vocabulary that arrives in blocks, per token: log-sum-exp, and the mean of z under softmax(z)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from klamp.kernels.head import LOWEST
from klamp.kernels.loops import loops


class Online:
    """m = max z, s = sum e^(z - m), t = sum e^(z - m) z of all that was taken; shapes [N], in the dtype of ``like``."""

    def __init__(self, like: Tensor, moment: bool = False) -> None:
        count = like.shape[0]
        self.most = like.new_full((count,), LOWEST)
        self.total = like.new_zeros(count)
        self.moment = like.new_zeros(count) if moment else None

    def take(self, here: slice, z: Tensor) -> None:
        """Add the words of a block [tokens, words] for the tokens ``here``; z may be overwritten if there is no moment."""
        moment = None if self.moment is None else self.moment[here]
        loops(z).take(self.most[here], self.total[here], moment, z)

    @property
    def lse(self) -> Tensor:
        return self.most + self.total.log()

    @property
    def mean(self) -> Tensor:
        assert self.moment is not None
        return self.moment / self.total


class Tilted:
    """An ``Online`` of u = y + a (z - y) for several a at once; t = sum e^(u - m) (z - y) for those of ``means``."""

    def __init__(self, like: Tensor, powers: Iterable[float], means: Collection[float]) -> None:
        # 1 and 0, whose u are z and y themselves, may overwrite them: they come last.
        ordered = sorted(set(powers), key=lambda a: (a in (0.0, 1.0), a))
        self._places = {a: place for place, a in enumerate(ordered)}
        self._streams = tuple((a, a in means) for a in ordered)
        self.most = like.new_full((len(ordered), like.shape[0]), LOWEST)
        self.total, self.moment = torch.zeros_like(self.most), torch.zeros_like(self.most)

    def take(self, here: slice, z: Tensor, y: Tensor) -> None:
        """Add a pair of blocks [tokens, words], which may be overwritten."""
        most, total, moment = (each[:, here] for each in (self.most, self.total, self.moment))
        loops(z).take_tilted(self._streams, most, total, moment, z, y)

    def lse(self, a: float) -> Tensor:
        return self.most[self._places[a]] + self.total[self._places[a]].log()

    def mean(self, a: float) -> Tensor:
        return self.moment[self._places[a]] / self.total[self._places[a]]


class Top:
    """The K largest logits so far and whose they are; what falls out of the top goes to ``rest``."""

    def __init__(self, like: Tensor, size: int) -> None:
        count = like.shape[0]
        self.best = like.new_full((count, size), LOWEST)
        self.who = torch.full((count, size), -1, dtype=torch.int64, device=like.device)

    def take(self, here: slice, z: Tensor, offset: int, rest: Online) -> None:
        """Take the largest of a block, leaving LOWEST behind in it."""
        size = self.best.shape[1]
        high, places = z.topk(min(size, z.shape[1]), dim=1)
        z.scatter_(1, places, LOWEST)
        both, names = torch.cat([self.best[here], high], 1), torch.cat([self.who[here], places + offset], 1)
        self.best[here], order = both.topk(size, dim=1)
        self.who[here] = names.gather(1, order)
        rest.take(here, both.scatter(1, order, LOWEST))

    def with_own(self, own: Tensor, ids: Tensor, rest: Online) -> tuple[Tensor, Tensor]:
        """(logits, ids) of the top K of all words, the given token ``own`` among them where it belongs there."""
        both, names = torch.cat([own[:, None], self.best], 1), torch.cat([ids[:, None], self.who], 1)
        size = self.best.shape[1]
        found, order = both.topk(size, dim=1)
        left = both.scatter(1, order, LOWEST)
        rest.take(slice(None), left[:, 1:].clone())  # the given token has its own place, in the top or not
        return found, names.gather(1, order)
