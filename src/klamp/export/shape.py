"""Shapes: what a spec is in the terms that training frameworks have flags for, recognised from its parts alone.

A spec's policy term is one form (a clip, a capped weight, a mask, ...) with its numbers, on one ratio; beside it stand
corrections of the sampler's mismatch (old/rollout), penalties, and a mean. Names of methods play no role.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from klamp.conditions import Distance, Nowhere
from klamp.factors import Factor
from klamp.gates import CovarianceTop
from klamp.guards import GATES, Guard
from klamp.penalties import EntropyBonus, FPenalty, KLReference
from klamp.regions import Region
from klamp.spec import Part, Spec, part_text
from klamp.transforms import BySign, Cap, Gamma, Identity, SoftGate

Numbers = dict[str, Any]
INF = math.inf


class Found(NamedTuple):
    """A recognised piece: its kind, its numbers, and the parts of the spec that it is made of."""

    kind: str
    numbers: Numbers
    parts: tuple[Any, ...] = ()

    @property
    def text(self) -> str:
        return " + ".join(part_text(part) for part in self.parts) or self.kind


@dataclass(frozen=True)
class Shape:
    """A spec as one form on one ratio, corrections, penalties and a mean; ``strange``: parts outside all of these."""

    form: Found | None
    anchor: str | None
    corrections: tuple[Found, ...]
    penalties: tuple[Found, ...]
    mean: Found
    rows: str
    strange: tuple[Part, ...] = ()


def recognise(spec: Spec) -> Shape:
    """The shape of a spec. Never raises: what has no name among the forms is ``strange``."""
    corrections, guards, factors, odd = _corrections(spec.guards, spec.factors)
    penalties, strange = _penalties(spec.penalties)
    ratios = {guard.ratio for guard in guards} | {factor.ratio for factor in factors}
    form = None
    if len(ratios) <= 1 and not ratios & {"new/ref", "old/rollout"}:
        form = next(filter(None, (read(guards, factors) for read in FORMS)), None)
    if form is None:
        odd = (*odd, *guards, *factors)
    numbers = {"divisor": spec.mean.divisor}
    mean = Found(spec.mean.kind, numbers, (spec.mean,))
    anchor = next(iter(ratios)).partition("/")[2] if ratios and form is not None else None
    return Shape(form, anchor, corrections, penalties, mean, spec.mean.rows, (*odd, *strange))


# --- forms of the policy term -------------------------------------------------------------------------------------

Guards = tuple[Guard, ...]
Factors = tuple[Factor, ...]


def _fixed(guard: Guard) -> Region | None:
    """The guard's interval where it is constant and zeroes what it cuts."""
    where = guard.region
    constant = isinstance(where, Region) and not where.moves and guard.action == "zero" and guard.discount == 1.0
    return where if constant and isinstance(where, Region) else None


def _interval(guards: Guards) -> Numbers | None:
    """Bounds by the sign of A: ``low`` where A < 0, ``high`` where A > 0, ``c`` above where A < 0; None if otherwise."""
    low, high, c = 0.0, INF, INF
    for guard in guards:
        where = _fixed(guard)
        if where is None:
            return None
        below, above = where.low, where.high
        if guard.gate not in (GATES["outward"], GATES["always"], GATES["positive"], GATES["negative"]):
            return None
        if guard.gate in (GATES["always"], GATES["positive"]) and below > 0.0:
            return None  # cuts A > 0 from below: a step back to the region
        if guard.gate != GATES["positive"]:
            low = max(low, below)
        if guard.gate != GATES["negative"]:
            high = min(high, above)
        if guard.gate in (GATES["always"], GATES["negative"]):
            c = min(c, above)
    value = "cut_value" if any(guard.cut_value == "zero" for guard in guards) else None
    return {"low": low, "high": high, "c": c, "value": value}


def _clip(guards: Guards, factors: Factors) -> Found | None:
    """One likelihood ratio, cut outside an interval where the step leads outward: PPO's clip, at any scope.

    A detached weight without a cap has the same gradient; only the loss's value is another.
    """
    if len(factors) != 1 or factors[0].clipped or factors[0].discount != 1.0:
        return None
    over, detached = (factors[0].scope, factors[0].reduce), factors[0].transform == Cap()
    numbers = _interval(guards)
    if numbers is None or any((guard.scope, guard.reduce) != over for guard in guards):
        return None
    if detached and guards:
        numbers["value"] = "ratio_value"
    elif factors[0].transform != Identity():
        return None
    where = {("token", "mean"): "", ("sequence", "mean"): "sequence_", ("sequence", "sum"): "product_",
             ("segment", "mean"): "segment_"}.get(over)  # fmt: skip
    if where is None:
        return None
    return Found(where + ("clip" if numbers["c"] == INF else "dual_clip"), numbers, (*guards, *factors))


def _weight(guards: Guards, factors: Factors) -> Found | None:
    """A detached weight per token: capped, or zero outside an interval; nothing at all is the plain gradient."""
    if not factors:
        return Found("plain", {}, ()) if not guards else None
    (first, *rest) = factors
    if rest or first.scope != "token" or not isinstance(first.transform, Cap):
        return None
    cap = {"low": first.transform.low, "high": first.transform.high}
    if not guards:
        return Found("capped_weight", cap, factors)
    raw = cap == {"low": 0.0, "high": INF}
    if len(guards) == 1 and raw and guards[0].gate == GATES["always"]:
        guard, where = guards[0], _fixed(guards[0])
        if where is not None and guard.scope == "token" and guard.cut_value == "zero":
            return Found("masked_weight", {"low": where.low, "high": where.high}, (*guards, *factors))
    return None


def _soft(guards: Guards, factors: Factors) -> Found | None:
    """A smooth weight in place of a guard: the soft gate, the gamma weight, a cap on one sign of A."""
    if guards or len(factors) != 1:
        return None
    factor, transform = factors[0], factors[0].transform
    over = (factor.scope, factor.reduce)
    if isinstance(transform, SoftGate) and over in (("token", "mean"), ("sequence", "mean")):
        kind = "soft_gate" if factor.scope == "token" else "sequence_soft_gate"
        return Found(kind, {"tau_pos": transform.tau_positive, "tau_neg": transform.tau_negative}, factors)
    if isinstance(transform, Gamma) and over == ("sequence", "sum"):
        names = ("k_positive", "lambda_positive", "k_negative", "lambda_negative")
        return Found("gamma", {name: getattr(transform, name) for name in names}, factors)
    if isinstance(transform, BySign) and transform.positive is None and isinstance(transform.negative, Cap):
        cap = {"low": transform.negative.low, "high": transform.negative.high}
        return Found({"token": "signed_cap", "sequence": "sequence_signed_cap"}.get(factor.scope, ""), cap, factors)
    return None


def _binary(guards: Guards, factors: Factors) -> Found | None:
    """A mask by the change of the token's own probability: binary TV or KL, outward or on both sides."""
    if len(guards) != 1 or len(factors) != 1 or factors[0].scope != "token" or guards[0].scope != "token":
        return None
    where, gate, transform = guards[0].region, guards[0].gate, factors[0].transform
    names = {"binary_tv": "binary_tv", "binary_kl_old_new": "binary_kl"}
    if not isinstance(where, Distance) or where.moves or where.measure not in names or guards[0].action != "zero":
        return None
    if gate not in (GATES["outward"], GATES["always"]) or not isinstance(transform, (Identity, Cap)):
        return None
    if isinstance(transform, Cap) and transform.low > 0.0:
        return None
    cap = transform.high if isinstance(transform, Cap) else INF
    kind = names[where.measure] + ("" if gate == GATES["outward"] else "_always")
    kind += "_capped" if isinstance(transform, Cap) else ""
    return Found(kind, {"low": where.radius_low, "high": where.radius_high, "cap": cap}, (*guards, *factors))


def _geometric(guards: Guards, factors: Factors) -> Found | None:
    """The geometric mean over a response of the ratios clamped where a token guard cuts."""
    if len(factors) != 1 or not factors[0].clipped or factors[0].transform != Identity():
        return None
    numbers = _interval(guards)
    if numbers is None or numbers["c"] < INF or any(guard.scope != "token" for guard in guards):
        return None
    return (
        Found("clipped_geometric", numbers, (*guards, *factors)) if factors[0].of[1:3] == ("sequence", "mean") else None
    )


Reader = Callable[[Guards, Factors], Found | None]
FORMS: tuple[Reader, ...] = (_weight, _clip, _soft, _binary, _geometric)


# --- corrections of the sampler's mismatch, and penalties -----------------------------------------------------------


def _corrections(
    guards: Iterable[Guard], factors: Iterable[Factor]
) -> tuple[tuple[Found, ...], Guards, Factors, tuple[Part, ...]]:
    """(corrections, the other guards, the other factors, mismatch parts that are none of the known corrections)."""
    found: list[Found] = []
    rest_guards, rejects, masks = [], [], []
    for guard in guards:
        sequence = _sequence_of_negatives(guard)
        if sequence is not None:
            found.append(sequence)
        elif guard.ratio != "old/rollout":
            rest_guards.append(guard)
        elif guard.action in ("drop", "drop_row"):
            rejects.append(guard)
        else:
            masks.append(guard)
    weights = [factor for factor in factors if factor.ratio == "old/rollout"]
    odd: list[Part] = []
    for guard in rejects:
        rejection = _rejection(guard)
        if rejection is None:
            odd.append(guard)
        else:
            found.append(rejection)
    if masks or weights:
        weighed = _weighed(masks, weights)
        if weighed is None:
            odd += [*masks, *weights]
        else:
            found.append(weighed)
    rest = tuple(factor for factor in factors if factor.ratio != "old/rollout")
    return tuple(found), tuple(rest_guards), rest, tuple(odd)


def _sequence_of_negatives(guard: Guard) -> Found | None:
    """Responses with A < 0 whose mean log(old/new) exceeds delta, cut."""
    if not guard.ratio.startswith("new/") or (guard.scope, guard.reduce) != ("sequence", "mean"):
        return None
    where = _fixed(guard)
    if where is None or guard.gate != GATES["negative"] or guard.cut_value != "zero":
        return None
    if where.log_high < INF or where.log_low == -INF:
        return None
    anchor = guard.ratio.partition("/")[2]
    return Found("negatives", {"delta": -where.log_low, "anchor": anchor}, (guard,))


def _scope(part: Guard | Factor) -> str | None:
    names = {("token", "mean"): "token", ("sequence", "sum"): "sequence", ("sequence", "mean"): "geometric",
             ("segment", "mean"): "segment"}  # fmt: skip
    return names.get((part.scope, part.reduce))


def _weighed(masks: list[Guard], weights: list[Factor]) -> Found | None:
    """Truncated weights, weights that are zero outside an interval, or a mask without a weight."""
    if len(masks) > 1 or len(weights) > 1 or any(factor.clipped for factor in weights):
        return None
    factor = weights[0] if weights else None
    cap = Cap() if factor is None or factor.transform == Identity() else factor.transform
    if not isinstance(cap, Cap) or (factor is not None and _scope(factor) is None):
        return None
    parts = (*masks, *weights)
    if not masks:
        assert factor is not None
        return Found(f"{_scope(factor)}_truncate", {"low": cap.low, "high": cap.high}, parts)
    guard, where = masks[0], _fixed(masks[0])
    plain = guard.gate == GATES["always"] and guard.cut_value == "zero"
    if where is None or not plain or _scope(guard) is None or cap != Cap():
        return None
    numbers = {"low": where.low, "high": where.high}
    if factor is None:
        return Found(f"{_scope(guard)}_filter", numbers, parts)
    weight = "" if _scope(factor) == _scope(guard) else f"_{_scope(factor)}_weight"
    return Found(f"{_scope(guard)}_mask{weight}", numbers, parts)


def _rejection(guard: Guard) -> Found | None:
    """Tokens or responses that leave the denominator: bounds of the ratio, or a radius of k2 or k3 and how it is reduced."""
    where = guard.region
    if guard.gate != GATES["always"] or not isinstance(where, Region) or where.moves or guard.discount != 1.0:
        return None
    if (guard.scope == "token") != (guard.action == "drop") or guard.scope not in ("token", "sequence"):
        return None
    level = "token" if guard.scope == "token" else f"seq_{guard.reduce.removesuffix('_after')}"
    if where.measure is None and not guard.after:
        return Found(
            "reject_ratio", {"option": f"{level}_k1", "level": level, "low": where.low, "high": where.high}, (guard,)
        )
    if str(where.measure) in ("k2", "k3") and where.radius is not None and (guard.after or level == "token"):
        numbers = {"option": f"{level}_{where.measure}", "level": level, "radius": where.radius}
        return Found(f"reject_{where.measure}", numbers, (guard,))
    return None


def _penalties(penalties: Iterable[Any]) -> tuple[tuple[Found, ...], tuple[Part, ...]]:
    found: list[Found] = []
    odd: list[Part] = []
    for part in penalties:
        if isinstance(part, KLReference) and part.on is None:
            other = f"_as_{part.gradient}" if part.gradient not in (None, part.estimator) else ""
            kind = f"kl_{part.estimator}{other}" + ("_weighted" if part.weighted else "")
            found.append(Found(kind, {"beta": part.beta}, (part,)))
        elif isinstance(part, EntropyBonus):
            found.append(Found("entropy", {"coefficient": part.coefficient}, (part,)))
        elif isinstance(part, FPenalty) and part.target is None and (part.on is None or _covariance(part.on)):
            kind = f"{part.measure}_to_{part.ratio.partition('/')[2]}"
            numbers: Numbers = {"beta": part.beta}
            if part.on is not None:
                kind, numbers["share"] = f"{kind}_on_top_covariance", getattr(part.on.gate, "share", None)
            found.append(Found(kind, numbers, (part,)))
        else:
            odd.append(part)
    return tuple(found), tuple(odd)


def _covariance(guard: Guard) -> bool:
    return isinstance(guard.region, Nowhere) and isinstance(guard.gate, CovarianceTop) and guard.action == "zero"
