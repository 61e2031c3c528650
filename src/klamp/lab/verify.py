"""Every statement on random instances: how many, the largest violation, and for conditional claims both signs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from klamp.errors import UserError
from klamp.lab import horizon, theorems
from klamp.lab.theorems import Sides
from klamp.lab.updates import divergence
from klamp.lab.worlds import World, bandit, tree
from klamp.measures import MEASURES
from klamp.regions import Region, calibrate, region

VOCABULARY = 12
TOLERANCE = 1e-9  # beyond it an exact statement is violated
EPSILON = 0.2
_CLIP = region(ratio_low=1.0 - EPSILON, ratio_high=1.0 + EPSILON)
RADII = (0.02, *(calibrate("k3", _CLIP.low, _CLIP.high, rule) for rule in ("lower", "upper")))  # KL3 beside that clip


@dataclass(frozen=True)
class Statement:
    """A statement with its source in docs/theory.md, its relation, and how its instances are drawn."""

    name: str
    text: str
    relation: str  # "=" or "<="
    instances: Callable[[torch.Generator, int], Iterator[Sides]]

    def check(self, generator: torch.Generator, seeds: int) -> dict[str, Any]:
        """{instances, excluded, violation}: the largest |left - right| / (1e-3 + |right|), or excess of left over right."""
        count, excluded, worst = 0, 0, 0.0
        for left, right, applies in self.instances(generator, seeds):
            count += int(applies.sum())
            excluded += int((~applies).sum())
            far = (left - right).abs() if self.relation == "=" else (left - right).clamp(min=0.0)
            relative = torch.where(applies, far / (1e-3 + right.abs()), 0.0)
            worst = max(worst, float(relative.max())) if relative.numel() else worst
        return {"name": self.name, "statement": self.text, "relation": self.relation, "instances": count,
                "excluded": excluded, "violation": worst}  # fmt: skip


# --- instances ------------------------------------------------------------------------------------------------


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def policies(generator: torch.Generator, seeds: int, spread: float = 0.15) -> tuple[Tensor, Tensor]:
    """(new, old) logits [S, V]: old of a random peakedness, new a step of size ``spread`` away."""
    scale = 3.0 * torch.rand((seeds, 1), generator=generator, dtype=torch.float64)
    old = scale * normal(generator, seeds, VOCABULARY)
    return old + spread * normal(generator, seeds, VOCABULARY), old


def _constraints(generator: torch.Generator, seeds: int) -> Iterator[Sides]:
    """Intervals of measures with three constants, and a constraint that is no interval: exact KL of a bandit."""
    x, a = 0.5 * normal(generator, 20 * seeds), normal(generator, 20 * seeds)
    for name in MEASURES:
        for radius in (0.002, 0.02, 0.2):
            where = region(name, radius)
            inside = (x >= where.log_low) & (x <= where.log_high)
            nearest = torch.where(x < 0.0, torch.full_like(x, where.low), torch.full_like(x, min(where.high, 1e300)))
            share = torch.rand(x.shape, generator=generator, dtype=torch.float64)
            for constant in (nearest, torch.ones_like(x), 1.0 + share * (nearest - 1.0)):
                yield theorems.gradient_equivalence(x, a, inside, constant)
    new, old = policies(generator, 20 * seeds, 0.4)
    allowed = divergence(bandit(VOCABULARY), new, old, "kl")[:, 0] <= 0.05
    token = torch.randint(0, VOCABULARY, (20 * seeds, 1), generator=generator)
    ratio = (new.log_softmax(-1) - old.log_softmax(-1)).gather(1, token)[:, 0]
    yield theorems.gradient_equivalence(ratio, a, allowed, torch.ones_like(ratio))


def _intervals(generator: torch.Generator, seeds: int) -> Iterator[Sides]:
    low, high = -(10.0 ** (-2.0 + 2.0 * torch.rand(2, min(seeds, 300), generator=generator, dtype=torch.float64)))
    yield theorems.interval_bijection(low, -high)


def _rules(generator: torch.Generator, seeds: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logits, old, G of KL3, G of the clip)."""
    new, old = policies(generator, seeds)
    a = normal(generator, seeds, VOCABULARY)
    both = [theorems.weights_under(where, new, old, a, old.softmax(-1)) for where in (region("k3", 0.02), _CLIP)]
    return new, old, both[0], both[1]


def _logits(generator: torch.Generator, seeds: int) -> Iterator[Sides]:
    new, _, one, other = _rules(generator, seeds)
    yield theorems.logit_difference(new, one, other, 0.1)


def _slopes(generator: torch.Generator, seeds: int) -> Iterator[Sides]:
    new, _, one, _ = _rules(generator, seeds)
    yield theorems.entropy_slope(new, one)
    yield theorems.entropy_slope(new, one, natural=True)


def _signs(generator: torch.Generator, seeds: int) -> Iterator[Sides]:
    new, _ = policies(generator, seeds)
    yield theorems.sign_theorem(new)
    yield theorems.sign_theorem(new, natural=True)


def _thresholds(generator: torch.Generator, seeds: int) -> Iterator[Sides]:
    yield theorems.threshold_above(policies(generator, seeds)[0])


def _kl3(generator: torch.Generator, seeds: int) -> Iterator[Sides]:
    for delta in RADII:
        new, old = policies(generator, seeds)
        a = normal(generator, seeds, VOCABULARY)
        yield theorems.kl3_against_symmetric(new, old, a, old.softmax(-1), 0.1, EPSILON, delta)


def _means(generator: torch.Generator, seeds: int) -> Iterator[Sides]:
    for name, law in theorems.MEANS:
        yield theorems.estimator_mean(name, law, *policies(generator, seeds, 0.3))


def _gradients(generator: torch.Generator, seeds: int) -> Iterator[Sides]:
    for name, law in theorems.GRADIENTS:
        yield theorems.estimator_gradient(name, law, *policies(generator, seeds, 0.3))


def _variances(generator: torch.Generator, seeds: int) -> Iterator[Sides]:
    for name in ("k1", "k2", "k3"):
        yield theorems.estimator_variance(name, 1.2 * torch.rand(seeds, generator=generator, dtype=torch.float64))


def _regions() -> Iterator[tuple[Region, str]]:
    for where in (region("k3", 0.02), region("k3", 0.2), _CLIP, region(ratio_low=0.8, ratio_high=1.28)):
        for name in ("k3", "tv", "k3_reverse", "pearson", "hellinger2"):
            yield where, name


def _bounded(generator: torch.Generator, seeds: int) -> Iterator[Sides]:
    for where, name in _regions():
        new, old = policies(generator, seeds, 0.05)
        yield theorems.bounded_everywhere(where, name, new, old)


def _attained(generator: torch.Generator, seeds: int) -> Iterator[Sides]:
    for where, name in _regions():
        new, old = theorems.two_points(where)
        left, right, _ = theorems.bounded_everywhere(where, name, new, old)
        yield theorems._sides(left, right)


def _mostly(generator: torch.Generator, seeds: int) -> Iterator[Sides]:
    for spread in (0.1, 0.4, 1.0):
        yield theorems.mostly_inside(region("k3", 0.02), *policies(generator, seeds, spread))


def _trees(generator: torch.Generator, seeds: int) -> Iterator[tuple[World, Tensor, Tensor, Tensor]]:
    for vocabulary, depth in ((3, 4), (2, 6)):
        world = tree(vocabulary, depth)
        old = normal(generator, seeds, world.state_count * vocabulary)
        size = 10.0 ** (-2.0 + 2.0 * torch.rand((seeds, 1), generator=generator, dtype=torch.float64))
        yield world, old + size * normal(generator, *old.shape), old, normal(generator, seeds, world.size)


def _of_trees(
    statement: Callable[..., Sides], rewarded: bool = True
) -> Callable[[torch.Generator, int], Iterator[Sides]]:
    def draw(generator: torch.Generator, seeds: int) -> Iterator[Sides]:
        for world, new, old, reward in _trees(generator, seeds):
            yield statement(world, new, old, reward) if rewarded else statement(world, new, old)

    return draw


STATEMENTS = (
    Statement("gradient_equivalence", "min(w A, clip_C(w) A) has the gradient A w keep, for any constraint C", "=", _constraints),
    Statement("interval_bijection", "every interval around 1 is {power(a) <= radius} of one pair (a, radius)", "=", _intervals),
    Statement("logit_difference", "two rules move the logits apart by rate (d - q sum d), d = G1 - G2", "=", _logits),
    Statement("entropy_slope", "dH = -rate sum G (Phi - Phi_bar); natural: -rate sum G (log q + H)", "=", _slopes),
    Statement("sign_theorem", "pushing a token up raises H to first order iff q < p* (natural: q < e^-H)", "=", _signs),
    Statement("threshold_above", "e^-H <= p*", "<=", _thresholds),
    Statement("kl3_against_symmetric", "entropy, KL3 minus clip, to first order = rate sum over K+ and D- of p w |A| (Phi_bar - Phi)", "=", _kl3),
    Statement("estimator_means", "what k1, k3, k3_reverse, k3_flipped estimate, under samples of old and of new", "=", _means),
    Statement("estimator_gradients", "the gradient that each estimator's samples have in expectation", "=", _gradients),
    Statement("estimator_variances", "variance of k1, k2, k3 between unit normals", "=", _variances),
    Statement("bounded_everywhere", "a ratio inside [l, u] for every token bounds E_old D(w) by its chord", "<=", _bounded),
    Statement("bound_attained", "two tokens attain that bound", "=", _attained),
    Statement("mostly_inside", "TV <= (1 - eta)(1 - l) + eta, eta the old mass outside", "<=", _mostly),
    Statement("chain_rule", "KL of a response = sum of the expected KL of its tokens", "=", _of_trees(horizon.chain_rule, False)),
    Statement("horizon_quadratic", "|J(new) - J(old) - L| <= R T (T-1) eps^2", "<=", _of_trees(horizon.quadratic)),
    Statement("horizon_three_halves", "|J(new) - J(old) - L| <= 2/3 R delta T^(3/2)", "<=", _of_trees(horizon.three_halves)),
    Statement("return_difference", "|J(new) - J(old)| <= R sqrt(T delta / 2)", "<=", _of_trees(horizon.return_difference)),
)  # fmt: skip


# --- conditional claims ---------------------------------------------------------------------------------------

CLAIM = "KL3 leaves more entropy than the symmetric clip"


def conditional(generator: torch.Generator, seeds: int, rate: float = 0.1) -> list[dict[str, Any]]:
    """The claim on random policies, by which tokens the regions treat differently: rarer than p*, or not.

    One-token advantages, so that a single action decides; per radius and case: instances where the regions differ, the
    share where the claim holds after an exact step, and the share where the deciding statistic has that sign.
    """
    found = []
    for delta in RADII[:2]:
        kl3 = region("k3", delta)
        for case, wanted in (("rarer than p*", True), ("likelier than p*", False)):
            new, old, a = _single(generator, 20 * seeds, wanted, kl3)
            share = old.softmax(-1)
            result = theorems.compare(kl3, _CLIP, new, old, a, share, rate)
            decides = theorems.deciding_sum(kl3, _CLIP, new, old, a, share)
            differs = decides != 0.0
            count = int(differs.sum())
            higher, agrees = result.exact[differs] > 0.0, (result.exact * decides)[differs] > 0.0
            found.append({
                "claim": CLAIM, "delta": delta, "case": f"the affected token is {case}", "instances": count,
                "holds": int(higher.sum()) / count if count else None,
                "statistic_decides": int(agrees.sum()) / count if count else None,
                "mean_difference": float(result.exact[differs].mean()) if count else None,
            })  # fmt: skip
    return found


def _single(generator: torch.Generator, seeds: int, rare: bool, kl3: Region) -> tuple[Tensor, Tensor, Tensor]:
    """(new, old, advantages): one action per seed whose ratio lies between the bounds of the two regions."""
    _, old = policies(generator, seeds)
    p = old.softmax(-1)
    order = p.argsort(-1)
    place = (
        torch.randint(0, VOCABULARY // 2, (seeds, 1), generator=generator)
        if rare
        else torch.full((seeds, 1), VOCABULARY - 1)
    )
    action = order.gather(1, place)
    up = torch.rand((seeds, 1), generator=generator, dtype=torch.float64) < 0.5
    t = torch.rand((seeds, 1), generator=generator, dtype=torch.float64)
    x = torch.where(
        up, _CLIP.log_high + t * (kl3.log_high - _CLIP.log_high), _CLIP.log_low + t * (kl3.log_low - _CLIP.log_low)
    )
    mine = p.gather(1, action)
    q = (mine * x.exp()).clamp(max=0.999)
    new = (p * (1.0 - q) / (1.0 - mine)).scatter(1, action, q)
    sign = torch.where(up, 1.0, -1.0).double()
    advantages = torch.zeros_like(p).scatter(1, action, sign)
    limit = theorems.threshold(new.log())
    mask = (q.squeeze(1) < limit) == rare
    return new.log()[mask], old[mask], advantages[mask]


# --- all ------------------------------------------------------------------------------------------------------


def verify(seeds: int = 200, seed: int = 0) -> dict[str, Any]:
    """All statements on ``seeds`` random instances each (some take several per seed); JSON-ready."""
    for name, value, least in (("seeds", seeds, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 100_000:
            raise UserError(f"{name}={value!r} must be a whole number from {least} to 100000")
    exact = [
        statement.check(torch.Generator().manual_seed(1000 * seed + index), seeds)
        for index, statement in enumerate(STATEMENTS)
    ]
    return {
        "seeds": seeds,
        "statements": exact,
        "conditional": conditional(torch.Generator().manual_seed(1000 * seed + 999), seeds),
        "largest_violation": max(row["violation"] for row in exact),
    }


def text(found: dict[str, Any]) -> str:
    """The result for a reader at a terminal."""
    lines = [f"{'statement':24} {'instances':>10} {'largest violation':>18}"]
    for row in found["statements"]:
        lines += [f"{row['name']:24} {row['instances']:>10} {row['violation']:>18.2e}   {row['statement']}"]
    lines += ["", f"Conditional: {CLAIM}. The sign of sum p w |A| (Phi_bar - Phi) decides it."]
    for row in found["conditional"]:
        shares = "no instance" if not row["instances"] else (
            f"true in {100.0 * row['holds']:.1f} %, the statistic right in {100.0 * row['statistic_decides']:.1f} %, "
            f"mean difference {row['mean_difference']:+.2e} nats"
        )  # fmt: skip
        lines.append(f"  delta = {row['delta']:.6g}, {row['case']:40} {row['instances']:>7} instances: {shares}")
    return "\n".join(lines)


__all__ = ["STATEMENTS", "Statement", "conditional", "policies", "text", "verify"]
