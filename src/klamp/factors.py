"""Factors: detached multipliers of the policy gradient, g = A * product(factors).

A factor is ratio x scope x reduce x transform. Importance weights, CISPO's cap, truncated importance sampling and
SAPO's soft gate are factors; REINFORCE has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from klamp.coupled import Contrast, Normalized
from klamp.errors import UserError, check_choice
from klamp.guards import BEFORE, RATIOS, SCOPES, Guard, check_scope, ratio_needs, scope_needs
from klamp.transforms import (
    BySign,
    Cap,
    DivergenceGate,
    ExpAdvantage,
    Gamma,
    Identity,
    SoftGate,
    StepTransform,
    Transform,
)


@dataclass(frozen=True)
class Factor:
    """transform(x), x the log-ratio of two policies over ``scope``; detached, multiplies g.

    ``clipped``: the tokens' log-ratios are first clamped at the bounds of the spec's token guards on the same ratio,
    where these cut (GMPO), and those guards' cut tokens have this factor's value.
    """

    transform: Transform | StepTransform = Identity()
    ratio: str = "new/old"
    scope: str = "token"
    reduce: str = "mean"
    discount: float = 1.0
    clipped: bool = False

    def __post_init__(self) -> None:
        if not hasattr(self.transform, "integrated"):
            known = ", ".join(f"{name}()" for name in TRANSFORMS)
            raise UserError(f"transform={self.transform!r} is not one; choose {known}, or a transform of your own")
        for name, choices in (("ratio", RATIOS), ("scope", SCOPES), ("reduce", BEFORE)):
            check_choice(name, getattr(self, name), choices)
        check_scope(self)
        if not isinstance(self.clipped, bool):
            raise UserError(f"clipped={self.clipped!r} must be True or False")
        if self.clipped and (self.scope == "token" or not self.ratio.startswith("new/")):
            raise UserError("clipped=True is of a ratio new/... over a scope wider than a token, such as 'sequence'")
        if self.clipped and (self.scope == "group" or self.surveys):
            raise UserError(
                "clipped=True needs no statistic of the step: take a scope of one response, and a plain transform"
            )
        own = getattr(self.transform, "scope", self.scope)
        if own != self.scope:
            raise UserError(f"this transform weighs whole responses: it needs scope={own!r}; got scope={self.scope!r}")
        if self.scope == "group" and self.surveys:
            raise UserError("a transform that needs a statistic of the step takes the scope of a response at most")

    @cached_property
    def surveys(self) -> bool:
        """Whether the transform needs a statistic of the whole step."""
        return isinstance(self.transform, StepTransform)

    @property
    def surveyed(self) -> bool:
        return self.surveys or self.scope == "group"

    @property
    def reads_new(self) -> bool:
        """Whether what the whole step must be asked first depends on the new policy."""
        return self.surveyed and self.ratio.startswith("new/")

    @property
    def needs(self) -> frozenset[str]:
        return ratio_needs(self.ratio) | scope_needs(self.scope) | getattr(self.transform, "needs", frozenset())

    @property
    def traits(self) -> frozenset[str]:
        found: frozenset[str] = getattr(self.transform, "traits", frozenset())
        return found

    @property
    def integrated(self) -> bool:
        """Whether this factor carries the surrogate's dependence on the new policy."""
        return self.transform.integrated and self.ratio.startswith("new/")

    @property
    def plain(self) -> bool:
        """Whether it is of the token's own ratio new/old."""
        return self.of == ("new/old", "token", "mean", 1.0)

    @property
    def of(self) -> tuple[str, str, str, float]:
        return self.ratio, self.scope, self.reduce, self.discount


def absorbs(factor: Factor, guard: Guard) -> bool:
    """Whether a clipped factor takes the guard's bounds into its own ratio."""
    same = guard.ratio == factor.ratio and guard.scope == "token"
    return factor.clipped and same and guard.cut_value == "bound"


TRANSFORMS: dict[str, type] = {
    "identity": Identity,
    "cap": Cap,
    "soft_gate": SoftGate,
    "by_sign": BySign,
    "gamma": Gamma,
    "soft_region": DivergenceGate,
    "exp_advantage": ExpAdvantage,
    "normalized": Normalized,
    "contrast": Contrast,
}
