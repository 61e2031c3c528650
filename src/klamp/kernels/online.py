"""Running sums over a vocabulary that arrives in blocks, per token: log-sum-exp, and the mean of z under softmax(z)."""

from __future__ import annotations

import torch
from torch import Tensor

from klamp.kernels.head import LOWEST


class Online:
    """m = max z, s = sum e^(z - m), t = sum e^(z - m) z of all that was taken; shapes [N], in the dtype of ``like``."""

    def __init__(self, like: Tensor, moment: bool = False) -> None:
        count = like.shape[0]
        self.most = like.new_full((count,), LOWEST)
        self.total = like.new_zeros(count)
        self.moment = like.new_zeros(count) if moment else None

    def take(self, here: slice, z: Tensor) -> None:
        """Add the words of a block [tokens, words] for the tokens ``here``; z is overwritten unless there is a moment."""
        high = torch.maximum(self.most[here], z.amax(1))
        shrink = (self.most[here] - high).exp_()
        if self.moment is None:
            weights = z.sub_(high[:, None]).exp_()
        else:
            weights = (z - high[:, None]).exp_()
            self.moment[here] = self.moment[here] * shrink + torch.linalg.vecdot(weights, z)
        self.total[here] = self.total[here] * shrink + weights.sum(1)
        self.most[here] = high

    @property
    def lse(self) -> Tensor:
        return self.most + self.total.log()

    @property
    def mean(self) -> Tensor:
        assert self.moment is not None
        return self.moment / self.total


def lift(z: Tensor, ids: Tensor, part: slice, into: Tensor, leave: bool = True) -> None:
    """Copy the logits of the words ``ids`` [tokens, K] that lie in this block into ``into``, and ``leave`` LOWEST there."""
    rows, columns = ((ids >= part.start) & (ids < part.stop)).nonzero(as_tuple=True)
    places = ids[rows, columns] - part.start
    into[rows, columns] = z[rows, places]
    if leave:
        z[rows, places] = LOWEST


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
