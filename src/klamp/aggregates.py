"""Aggregates: the mean over what, as a value. ``klamp.stats`` turns it into weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from klamp.errors import UserError, check_choice

KINDS = (
    "token_mean", "sequence_mean", "sequence_sum", "prompt_mean", "prompt_sum", "local_token_mean", "token_sum",
)  # fmt: skip
PROMPTS = ("prompt_mean", "prompt_sum")


@dataclass(frozen=True)
class Aggregate:
    """How token losses become one loss.

    token_mean: sum / tokens (DAPO). sequence_mean: mean over responses of the mean over tokens (GRPO).
    sequence_sum: mean over responses of the sum over tokens / ``divisor``, a constant (Dr. GRPO). prompt_mean: mean
    over prompts of the mean over the prompt's tokens. prompt_sum: mean over prompts of the sum over its responses of
    their token means. local_token_mean: the mean over micro-batches of each one's token mean (BNPO): the gradient
    depends on how a step is cut. token_sum: no mean at all (Tinker). ``rows``: whether responses without a token count
    (``all``, as TRL does) or not (``nonempty``).
    """

    kind: str = "token_mean"
    divisor: float | None = None
    rows: str = "nonempty"

    def __post_init__(self) -> None:
        check_choice("aggregate", self.kind, KINDS)
        check_choice("rows", self.rows, ("nonempty", "all"))
        if self.divisor is not None:
            if self.kind != "sequence_sum":
                raise UserError(f"{self.kind} takes no divisor; sequence_sum(divisor=...) does")
            number = isinstance(self.divisor, (int, float)) and not isinstance(self.divisor, bool)
            if not number or not 0.0 < self.divisor < math.inf:
                raise UserError(f"divisor={self.divisor!r} must be a finite number above 0")
            object.__setattr__(self, "divisor", float(self.divisor))
        if self.rows != "nonempty" and self.kind not in ("sequence_mean", "sequence_sum"):
            raise UserError(f"{self.kind} does not average over rows; rows= belongs to sequence_mean and sequence_sum")
