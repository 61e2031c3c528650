"""Every preset, composition, measure, penalty, mean and part of one's own obeys the laws of ``klamp.testing``."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import klamp
from klamp.aggregates import KINDS
from klamp.binary import BINARY
from klamp.factors import TRANSFORMS
from klamp.gates import SELECTIONS, Gate
from klamp.guards import ACTIONS, AFTER, SCOPES
from klamp.measures import MEASURES
from klamp.radii import RADII
from klamp.spec import PENALTIES
from klamp.testing import LAWS, check_spec

pytestmark = pytest.mark.usefixtures("unchecked")  # as a user runs the suite; shapes are checked in other tests


# --- parts of one's own, as a third party writes them ---------------------------------------------------------


def quartic(x: Any) -> Any:
    """x^2 + x^4 / 3: f''(1) = 2."""
    return x * x + x**4 / 3.0


def confident(log_ratio: torch.Tensor, advantages: torch.Tensor, batch: klamp.Batch) -> torch.Tensor:
    """Outward, and only where the old policy gave the token at least 0.05."""
    outward = (advantages > 0) & (log_ratio > 0) | (advantages < 0) & (log_ratio < 0)
    return outward & (batch.logp_old >= -3.0)


def _uncertain(log_ratio: torch.Tensor, advantages: torch.Tensor, batch: klamp.Batch) -> torch.Tensor:
    assert batch.entropy is not None
    return (log_ratio != 0) & (batch.entropy.detach() < 1.5)


uncertain = Gate(_uncertain, "test_laws:uncertain", frozenset({"entropy"}))

OWN = [
    "trust_region('test_laws:quartic', 0.02)",
    "trust_region(\"measure('test_laws:quartic', curvature=2.0)\", 0.02, base='dapo')",
    "trust_region('k3', 0.02, gate='test_laws:confident')",
    "grpo + guard(measure='js', radius=0.01, gate='test_laws:uncertain', cut_value='zero')",
    "grpo + f_penalty(measure='test_laws:quartic', beta=0.1)",
]
PRESETS = [
    "ppo", "grpo(epsilon=0.05)", "dapo", "dr_grpo", "bnpo",
    "atr_grpo(delta=0.02)", "power_clip(a=-2.3031794, radius=0.0277647)",
    "dual_clip(c=1.5, base='dapo')", "two_sided(delta=1.5)",
    "decoupled_ppo(cap=1.2)", "rollback(alpha=0.5, epsilon=0.1)", "ppo_lowprob_relaxed",
    "trust_region('k3', 0)", "gspo(epsilon_low=0.1, epsilon_high=0.2)", "gspo_token", "luspo", "segment(epsilon=0.05)",
    "gmpo(epsilon=0.1)", "reinforce", "gpg", "cispo", "cispo(epsilon_high=0.5, epsilon_low=0.5)",
    "cispo_absolute(high=1.5, low=0.5)", "tis_loss", "topr",
    "sapo(tau_pos=8.8, tau_neg=10.0)", "vespo", "real(tau=0.2)", "rollout_is",
    "divergence_gate(measure='js', radius=0.05, shape='rational', power=2.0, outward=False)",
    "rec(clip='ring', ring_low=0.3, ring_high=0.3)", "rec(clip='two_side', weight='exp_advantage')",
    "fipo(half_life=2.0, high=2.0, low=0.5)",
    "dppo_tv(delta=0.05, cap=2.0, ratio='new/rollout')", "dppo_kl(delta=0.01, cap=3.0)",
    "dppo_topk_tv(delta=0.05, k=8)", "dppo_topk_kl(delta=0.02, cap=3.0)", "truly_ppo(delta=0.02, alpha=2.0)", "ipo(threshold=0.02)",
    "m2po(threshold=0.01)", "m2po(ratio='old/rollout', gate='always', over='kept')",
    "kl_cov(share=0.2, coefficient=0.5)", "clip_cov(share=0.2, low=0.01, high=3.0)",
    "ppo_kl_penalty(beta=0.5, target=0.02)", "ppo_kl_penalty(measure='jeffreys')", "ppo_kl_adaptive", "dro",
    # corrections, alone or with a method
    "grpo + entropy_mask(quantile=0.6)", "tis", "dapo + mis(scope='sequence')",
    "grpo + icepop(low=0.8, high=1.2)",
    "sequence_mask(high=1.5, low=0.5)", "grpo + sequence_mask(high=3.0)",
    "cispo + geometric_mask(low=0.9, high=1.1)", "dapo + opsm(delta=0.05)", "grpo + vaco(radius=0.1)",
    "rs_k1(low=0.8, high=1.2)", "rs_k2(radius=0.02)",
    "grpo + rs_k2(radius=0.02, scope='sequence_mean')", "dr_grpo + rs_k3(radius=0.05, scope='sequence_max')",
    "dapo + rs_k3(radius=0.2, scope='sequence_sum')",
]  # fmt: skip
COMPOSITIONS = {
    "methods": [
        "gspo + guard(ratio_low=0.8, ratio_high=1.2)",
        "grpo + guard(ratio='old/rollout', ratio_low=0.9, gate='always')",
        "trust_region('k2', 0.02, base='cispo')",
        "reinforce + guard(ratio_low=0.5, ratio_high=2)",
        "factor(ratio='new/rollout') + guard(ratio='new/rollout', measure='k3', radius=0.1)",
        "trust_region('js', 0.05, ratio='new/rollout')",
        "trust_region('k3', 0.02, ratio='new/ref')",
        "trust_region('tv', 0.1, gate='negative', base='dapo')",
        "trust_region('k3', radius_low=0.01, radius_high=0.1, gate='always')",
    ],
    "scopes": [
        "trust_region('k3', 0.5, scope='sequence', reduce='sum')",
        "trust_region('power(-2508.0)', 1e-7, base='gspo', scope='sequence')",
        "grpo + guard(measure='k3', radius=0.02, scope='segment', cut_value='zero')",
        "dapo + guard(measure='k2', radius=0.05, scope='prefix', reduce='sum', discount=0.8)",
        "dapo + guard(measure='k3', radius=0.01, scope='suffix', discount=0.5)",
        "dapo + guard(measure='k3', radius=0.01, scope='group')",
        "factor(scope='prefix', reduce='sum', discount=0.7)",
        "dapo + factor(ratio='old/rollout', transform=cap(high=2), scope='group')",
        "factor(scope='group') + sequence_mean()",
    ],
    "reduces": [
        "dapo + guard(measure='k3', radius=0.03, scope='sequence', reduce='mean_after')",
        "dapo + guard(measure='tv', radius=0.1, scope='segment', reduce='mean_after')",
        "dapo + guard(measure='k3', radius=0.1, scope='prefix', reduce='sum_after', discount=0.9)",
        "dapo + guard(measure='k3', radius=0.1, scope='suffix', reduce='max_after')",
        "dapo + guard(measure='k3', radius=0.03, scope='group', reduce='max_after', gate='always')",
        "dapo + guard(measure='binary_tv', radius=0.05, scope='sequence', reduce='mean_after', ratio='new/rollout')",
    ],
    "gates": [
        "dapo + guard(measure='k3', radius=0.02, ratio='new/rollout', gate=likely(low=0.2, high=0.1, policy='rollout'))",
        "dapo + guard(region='nowhere', gate=likely(low=0.3, high=0.3))",
        "reinforce + guard(measure='tv', radius=0.05, gate=ring(low=0.8, high=1.2), cut_value='zero')",
        "dapo + guard(region='nowhere', gate=entropy_below(quantile=0.8))",
        "dapo + guard(measure='k3', radius=0.01, gate=entropy_below(quantile=0.5))",
        "dapo + guard(region='nowhere', gate=covariance_top(share=0.2))",
        "dapo + guard(measure='k3', radius=0.005, gate=covariance_top(share=0.5, seed=3))",
        "dapo + guard(region='nowhere', gate=covariance_window(share=0.2, low=0.05, high=2.0, unless=guard(ratio_high=1.2)))",
    ],
    "regions": [
        "trust_region('binary_tv', radius_low=0.02, radius_high=0.1, gate='always')",
        "trust_region('binary_kl_old_new', 0.01)",
        "trust_region('binary_kl_new_old', 0.02)",
        "trust_region('exact_kl_old_new', 0.02)",
        "trust_region('exact_power(0.3)', 0.02)",
        "trust_region('topk_js', radius_low=0.01, radius_high=0.02, gate='always')",
        "dapo + guard(measure='topk_kl_new_old', radius=0.05, scope='sequence', reduce='max_after', gate='always')",
        "dapo + guard(measure='exact_hellinger2', radius=0.05, scope='prefix', reduce='sum_after')",
        "dapo + guard(measure='tv', budget=0.02)",
        "dapo + guard(measure='k3', budget=0.0)",
        "dapo + guard(measure='k3', budget=0.01, over='kept', gate='positive')",
    ],
    "actions": [
        "dapo + guard(measure='k3', radius=0.02, action='drop')",
        "gspo(epsilon_low=0.1, epsilon_high=0.1) + rs_k3(radius=0.02)",
        "atr_grpo(aggregate=prompt_mean()) + rs_k3(radius=0.02)",
        "dapo + guard(measure='exact_tv', radius=0.05, scope='sequence', reduce='max_after', action='drop_row')",
        "grpo + guard(ratio_high=3.0, gate='negative', action='rollback', strength=0.2)",
        "rollback(alpha=0.3) + guard(ratio_low=0.5, ratio_high=2.0)",
        "rollback + sequence_mask",
        "guard(ratio_low=0.5, ratio_high=2.0, action='rollback', strength=0.3) + guard(ratio_low=0.8, ratio_high=1.2) + factor()",
        "gmpo(epsilon=0.1) + guard(ratio_high=1.05, gate='negative')",
        "factor(scope='sequence') + guard(scope='sequence', ratio_low=0.9, action='rollback', strength=1.0)",
    ],
    "factors": [
        "dapo + tis(normalize=True)",
        "grpo + tis(scope='geometric', normalize=True)",
        "factor(transform=normalized(soft_region('k3', 0.05)))",
        "factor(transform=by_sign(positive=cap(high=2.0), negative=soft_region('k3', 0.1)))",
        "factor(transform=cap(high=1.5), scope='suffix', reduce='sum', discount=0.5) + grpo",
        "vespo(ratio='new/rollout')",
        "dapo + factor(transform=exp_advantage(temperature=0.5))",
        "real + rs_k2(radius=0.02)",
        "gmpo(epsilon=0.1) + sequence_mask",
        "factor(scope='segment', clipped=True) + guard(ratio_low=0.8, ratio_high=1.2, gate='always')",
        "factor(scope='prefix', reduce='sum', clipped=True) + guard(ratio_low=0.8, ratio_high=1.2)",
        "factor(transform=cap(high=2), scope='sequence', clipped=True) + guard(ratio_low=0.8, ratio_high=1.2)",
    ],
    "penalties": [
        "grpo(penalty=kl_reference(0.04, estimator='k1', weighted=True))",
        "grpo(penalty=[kl_reference(0.1, estimator='k2'), entropy_bonus(0.01)])",
        "grpo + f_penalty(measure='renyi(2)', beta=0.1, ratio='new/ref')",
        "dapo + f_penalty(measure='k3', beta=0.3, target=0.01, rate=0.5)",
        "dapo + kl_reference(0.1, estimator='k1', gradient='k2')",
        "dapo + kl_reference(0.1, estimator='k3', gradient='k2', weighted=True)",
        "dapo + kl_reference(0.1, estimator='abs', on=guard(measure='k3', radius=0.02, ratio='new/ref', gate='always'))",
        "dapo + f_penalty(measure='k3', beta=0.3, on=guard(measure='k3', radius=0.02))",
        "dapo + f_penalty(measure='k2', beta=0.3, on=guard(measure='exact_tv', radius=0.02))",
        "dapo + divergence_penalty(measure='exact_js', beta=0.3)",
        "grpo(penalty=divergence_penalty('exact_tv', 0.1))",
        "dapo + f_penalty(measure='k3', beta=0.3, on=guard(region='nowhere', gate=entropy_below(quantile=0.5)))",
        "dapo + f_penalty(measure='k3', beta=0.3, on=guard(measure='k3', budget=0.01))",
    ],
    "means": [
        "grpo(aggregate=sequence_mean(rows='all'))",
        "atr_grpo(aggregate=prompt_mean())",
        "grpo(aggregate=prompt_sum())",
        "gspo(aggregate=token_sum())",
        "dr_grpo(aggregate=sequence_sum(divisor=7, rows='all'))",
        "gspo(aggregate=local_token_mean()) + rs_k3(radius=0.02)",
        "dapo(aggregate=sequence_sum(divisor=3, rows='all')) + rs_k3(scope='sequence_mean', radius=0.02)",
    ],
    "radii": [
        "atr_grpo(delta=linear(start=0.05, end=0.005, steps=4))",
        "dapo + guard(measure='k3', radius=cosine(start=0.01, end=0.1, steps=3), scope='sequence', reduce='mean_after')",
        "atr_grpo(delta=adaptive(start=0.02, removed=0.05))",
        "atr_grpo(delta=adaptive(start=0.02, kl=0.01, low=0.001, high=0.1))",
        "atr_grpo(delta=scaled(start=0.005))",
        "trust_region('k2', scaled(start=0.005, by='entropy', exponent=0.5))",
        "trust_region('binary_kl_old_new', scaled(start=0.005, exponent=-0.5))",
        "dapo + f_penalty(measure='k3', beta=0.3, on=guard(measure='k3', radius=adaptive(start=0.02, kl=0.01)))",
    ],
}
EVERYTHING = list(dict.fromkeys([*PRESETS, *OWN, *(spec for specs in COMPOSITIONS.values() for spec in specs)]))
# Every layout (packed, per-token advantages, 12 rows in 2, 4 and 8 micro-batches) for each way to need the whole step,
# and for each scope, action and mean that has code of its own.
EVERY_LAYOUT = {
    "gspo_token", "ppo_kl_penalty(beta=0.5, target=0.02)", "bnpo", "grpo + sequence_mask(high=3.0)",
    "grpo(aggregate=prompt_sum())", "segment(epsilon=0.05)", "gmpo(epsilon=0.1)", "real(tau=0.2)",
    "m2po(threshold=0.01)", "kl_cov(share=0.2, coefficient=0.5)", "clip_cov(share=0.2, low=0.01, high=3.0)",
    "dapo + tis(normalize=True)", "grpo + rs_k2(radius=0.02, scope='sequence_mean')", *COMPOSITIONS["scopes"][5:6],
    *COMPOSITIONS["reduces"][4:5], *COMPOSITIONS["gates"][3:4],
}  # fmt: skip
FAMILIES = ["power(-3.0)", "power(0.25)", "power(5.0)", "renyi(-1.0)", "renyi(0.5)", "renyi(2.0)"]

# What a spec may lack that a law speaks of; every other law holds, whatever the traits of the spec.
SILENT = {
    (3, "the spec has no guard"),
    (7, "the spec has no guard"),
    (7, "no guard of the spec has a radius"),
    (8, "the spec has no guard"),
    (8, "no region of the spec has bounds"),
    (11, "the spec reads no rollout log-probs"),
}


@pytest.mark.parametrize("spec", EVERYTHING)
def test_spec_obeys_the_laws(spec: str) -> None:
    results = check_spec(spec, batches=8 if spec in EVERY_LAYOUT else 4)
    assert [result.law for result in results] == sorted(LAWS)
    exempt = {(result.law, result.reason) for result in results if result.status == "exempt"}
    assert exempt <= SILENT
    guards, needs = klamp.parse(spec).guards, klamp.parse(spec).needs
    assert ((3, "the spec has no guard") in exempt) == (not guards)
    assert ((11, "the spec reads no rollout log-probs") in exempt) == ("logp_rollout" not in needs)
    for result in results:
        traits = klamp.parse(spec).traits & LAWS[result.law].exempt.keys()
        assert result.status == "exempt" or result.instances > 0
        assert bool(traits) == result.reason.startswith("the spec has the trait")
        assert all(
            f"the spec has the trait {trait}: {LAWS[result.law].exempt[trait]}" in result.reason for trait in traits
        )


@pytest.mark.parametrize("measure", [*MEASURES, *FAMILIES])
def test_measure_as_a_trust_region_obeys_the_laws(measure: str) -> None:
    held = {result.law: result.instances for result in check_spec(f"trust_region('{measure}', 0.05)", batches=3)}
    assert held[3] >= 1  # tokens that were cut
    assert held[8] > 500  # points of the grid at which predicate and bounds agree


def test_every_preset_is_covered() -> None:
    named = {word for spec in PRESETS for word in re.findall(r"\w+", spec) if word in klamp.list_presets()}
    assert named == set(klamp.list_presets())


def test_every_part_is_covered() -> None:
    words = set(re.findall(r"\w+", " ".join(str(_unnamed(klamp.parse(spec))) for spec in EVERYTHING)))
    assert {*SCOPES, *AFTER, *ACTIONS} - {"token", "zero"} <= words
    assert {*SELECTIONS, *TRANSFORMS, *RADII, *PENALTIES, *KINDS} - {"identity"} <= words
    assert {*BINARY, "budget", "nowhere", "exact_kl_old_new", "topk_js"} <= words
    assert {"discount", "clipped", "rate", "on", "gradient", "weighted", "target", "strength", "unless"} <= words


def _unnamed(spec: klamp.Spec) -> klamp.Spec:
    return replace(spec, name="")


def test_laws_that_say_nothing_of_a_spec_are_exempt_with_a_reason() -> None:
    results = {result.law: result for result in check_spec("cispo", batches=3)}
    assert {law for law, result in results.items() if result.status == "exempt"} == {3, 7, 8, 11}
    assert results[7].reason == "the spec has no guard"
    assert results[11].reason == "the spec reads no rollout log-probs"
    assert {result.law for result in check_spec("sequence_mask", batches=3) if result.status == "exempt"} == set()
    wide = {result.law: result.reason for result in check_spec("vaco", batches=3) if result.status == "exempt"}
    assert wide == {8: "no region of the spec has bounds"}  # a mean of divergences is compared, and no ratio
    chosen = {result.law: result.reason for result in check_spec("reinforce + guard(region='nowhere')", batches=1)}
    assert chosen[7] == "no guard of the spec has a radius"
    boundless = {result.law: result.reason for result in check_spec("trust_region('k3', inf)", batches=1)}
    assert boundless[3] == "no token was cut"


@pytest.mark.parametrize(
    ("spec", "laws"),
    [
        ("clip_cov(share=0.2)", {1: "selects"}),
        ("rec(weight='exp_advantage')", {1: "own_scale"}),
        ("real", {1: "group_coupled"}),
        ("rollback", {3: "pushes_back"}),
        ("bnpo", {4: "local_mean"}),
        ("grpo + kl_reference(0.1, estimator='k1', gradient='k2') + entropy_bonus(0.1)", {}),
    ],
)
def test_a_trait_takes_a_part_of_a_law_and_no_more(spec: str, laws: dict[int, str]) -> None:
    results = {result.law: result for result in check_spec(spec, batches=3) if result.status == "held"}
    assert {law for law, result in results.items() if result.reason} == laws.keys()
    assert all(f"trait {trait}: " in results[law].reason for law, trait in laws.items())
