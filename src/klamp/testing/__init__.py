"""The laws that every policy loss obeys, as a public suite: ``check_spec(spec)``.

===  ===================================================================================  ==================================
law  what holds                                                                           trait that takes a part of it
===  ===================================================================================  ==================================
1    on-policy (all policies equal) the policy term is the plain policy gradient: g = A   selects, group_coupled, own_scale
2    NaN, inf, +-1e10 in masked positions change no bit of loss, gradient or metric
3    a cut token has policy gradient exactly 0, even if its ratio overflows               pushes_back
4    any cut into micro-batches, ranks, windows: same loss, gradient and metrics          local_mean
5    padding side and width, packing, row order and group order do not matter
6    A = 0, or equal rewards: exactly zero policy gradient, not counted as cut
7    a larger radius keeps a superset; an infinite one equals the spec without the guard
8    D(w) <= radius and the solved bounds give the same cuts away from ties
9    g equals float64 autograd of the written-out objective, away from ties               (g and penalty are held apart)
10   log-ratios of +-50 in float32 and bfloat16: masks, g and signs right; k3 >= 0
11   a row without rollout log-probs is excluded and counted, never repaired
12   spec -> text -> spec is the identity; presets have a citation and an equation
13   a kept weight that overflows is capped by a factor or raised; nothing else clamps
===  ===================================================================================  ==================================

What a law may not ask of a spec is taken from it by a trait (``spec.traits``), never by a method's name, and the rest is
asked all the same; a law is exempt as a whole where a spec has nothing that it speaks of. ``docs/laws.md`` says what
each law means.
"""

from __future__ import annotations

from dataclasses import replace

from klamp.language import parse
from klamp.objective import Objective
from klamp.spec import Spec
from klamp.testing import extremes, gradients, invariance, widening
from klamp.testing.court import LAWS, Law, LawResult, LawViolation, Maker, Trial
from klamp.testing.draws import check_needs

__all__ = ["LAWS", "Law", "LawResult", "LawViolation", "check_spec", "extremes", "gradients", "invariance", "widening"]

_DIVISOR = 16.0  # a trainer fills in its maximum completion length


def check_spec(spec: Spec | str, *, seed: int = 0, batches: int = 8, objective: Maker = Objective) -> list[LawResult]:
    """Hold a spec to the laws on random batches; one ``LawResult`` per law, or ``LawViolation`` at the first broken.

    ``batches``: random batches per law, from one token to [12, 16], with every layout among the first 8. ``seed``
    fixes them. ``objective``: what turns a spec into a loss, for a kernel or bridge of one's own. Raises UserError
    for a spec that cannot be read or that needs what no batch can carry.
    """
    original = parse(spec)
    check_needs(original)
    mean = original.mean
    filled = original
    if mean.kind == "sequence_sum" and mean.divisor is None:
        filled = replace(original, aggregate=replace(mean, divisor=_DIVISOR))
    trials = (Trial(original, filled, LAWS[number], seed, batches, objective) for number in sorted(LAWS))
    return [trial.run() for trial in trials]
