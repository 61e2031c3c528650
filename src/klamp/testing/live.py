"""A batch whose log-ratios carry their gradient, and whose scopes are lists of neighbours written with loops."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from klamp.batch import Batch

CELLS = ("token", "segment", "sequence", "group")  # scopes that partition the tokens


class LiveBatch(Batch):
    """Every log-ratio is [B, T], with gradient, from sums over the neighbours of each token."""

    def log_ratio(self, ratio: str, scope: str = "token", reduce: str = "mean", discount: float = 1.0) -> Tensor:
        numerator, denominator = ratio.split("/")
        x = torch.where(self.mask, self.logp(numerator) - self.logp(denominator), 0.0)
        return self.reduce(x, scope, reduce, discount)

    def reduce(self, values: Tensor, scope: str, how: str = "mean", discount: float = 1.0) -> Tensor:
        """The mean, sum or maximum over the neighbours of each token; 0 where masked, or as it is for a token."""
        if scope == "token":
            return values
        weight = self.near(scope, discount)
        flat = torch.where(self.mask, values, 0.0).reshape(1, -1).expand(weight.shape)
        if how == "max":
            top = torch.where(weight > 0.0, flat, -math.inf).amax(dim=1) if flat.numel() else flat.sum(dim=1)
            found = torch.where(top == -math.inf, 0.0, top)
        else:
            found = torch.where(weight > 0.0, weight * flat, 0.0).sum(dim=1)
            found = found / weight.sum(dim=1).clamp(min=1e-300) if how == "mean" else found
        return found.reshape(self.shape)

    def near(self, scope: str, discount: float = 1.0) -> Tensor:
        """[B T, B T]: discount ** distance where the second token is in the scope of the first, else 0."""
        key = (scope, discount)
        if key not in self._near:
            weight = [[0.0] * self.mask.numel() for _ in range(self.mask.numel())]
            for cell in self.cells("group" if scope == "group" else "sequence"):
                for i, one in enumerate(cell):
                    for j, other in enumerate(cell):
                        apart = abs(i - j)
                        inside = {
                            "prefix": j <= i, "suffix": j >= i, "segment": self._turn(one) == self._turn(other)
                        }.get(scope, True)  # fmt: skip
                        if inside:
                            weight[one][other] = discount**apart
            self._near[key] = torch.tensor(weight, dtype=torch.float64).reshape(self.mask.numel(), self.mask.numel())
        return self._near[key]

    def cells(self, scope: str) -> list[list[int]]:
        """The unmasked flat positions of each token, turn, response or group, in order; masked ones are nowhere."""
        found: dict[tuple[int, ...], list[int]] = {}
        for place in self.mask.reshape(-1).nonzero().reshape(-1).tolist():
            row = place // self.shape[1]
            response = int(self.row.reshape(-1)[place]) if self.row is not None and self.packed else row
            name = {"token": (place,), "segment": (response, self._turn(place)), "sequence": (response,)}.get(scope, ())
            if scope == "group":
                assert self.group is not None
                name = (int(self.group[row]),)
            found.setdefault(name, []).append(place)
        return list(found.values())

    def _turn(self, place: int) -> int:
        return 0 if self.segment is None else int(self.segment.reshape(-1)[place])

    @cached_property
    def _near(self) -> dict[tuple[str, float], Tensor]:
        return {}

    @cached_property
    def responses_seen(self) -> int:
        """The number of responses, empty ones included where rows are not packed."""
        return len(set(self.row.reshape(-1).tolist())) if self.row is not None and self.packed else self.shape[0]

    @property
    def signal(self) -> Tensor:
        """Advantages as [B, T], 0 at masked positions."""
        return torch.where(self.mask, self.advantages, 0.0).expand(self.shape)

    @property
    def live(self) -> Tensor:
        """Unmasked tokens with a signal."""
        return self.mask & (self.signal != 0.0)
