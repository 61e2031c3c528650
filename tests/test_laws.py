"""Every preset, composition, measure, penalty, mean and part of one's own obeys the laws of ``klamp.testing``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import klamp
from klamp.guards import Gate
from klamp.measures import MEASURES
from klamp.testing import LAWS, check_spec

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
    "grpo(epsilon=0.05)", "dapo", "dapo(epsilon_low=0.1, epsilon_high=0.5)", "dr_grpo",
    "atr_grpo(delta=0.02)", "atr_grpo(delta=1e-6)", "power_clip(a=-2.3031794, radius=0.0277647)",
    "power_clip(a=3.5, radius=0.1)", "gspo(epsilon_low=0.1, epsilon_high=0.2)", "gspo_token", "cispo",
    "cispo(high=1.5, low=0.5)", "cispo(high=inf)", "sapo(tau_pos=8.8, tau_neg=10.0)", "dual_clip",
    "dual_clip(c=1.5, base='dapo')", "sequence_mask(high=1.5, low=0.5)", "ppo_kl_penalty",
    "ppo_kl_penalty(beta=0.5, target=0.02)", "ppo_kl_penalty(measure='jeffreys')", "reinforce",
    "trust_region('k3', inf)", "trust_region('k3', 0)",
]  # fmt: skip
COMPOSITIONS = [
    "grpo + sequence_mask(high=3.0)",
    "gspo + guard(ratio_low=0.8, ratio_high=1.2)",
    "grpo + guard(ratio='old/rollout', ratio_low=0.9, gate='always')",
    "trust_region('k2', 0.02, base='cispo')",
    "grpo + guard(measure='k3', radius=0.1)",
    "reinforce + guard(ratio_low=0.5, ratio_high=2)",
    "dapo + factor(ratio='old/rollout', transform=cap(high=2))",
    "factor(ratio='new/rollout') + guard(ratio='new/rollout', measure='k3', radius=0.1)",
    "trust_region('js', 0.05, ratio='new/rollout')",
    "trust_region('k3', 0.02, ratio='new/ref')",
    "trust_region('k2', 0.02, base='sapo')",
    "trust_region('k3', 0.5, scope='sequence', reduce='sum')",
    "trust_region('power(-2508.0)', 1e-7, base='gspo', scope='sequence')",
    "trust_region('tv', 0.1, gate='negative', base='dapo')",
    "trust_region('k3', radius_low=0.01, radius_high=0.1, gate='always')",
]
MEANS_AND_PENALTIES = [
    "grpo(aggregate=token_mean())",
    "grpo(aggregate=sequence_mean(rows='all'))",
    "atr_grpo(aggregate=prompt_mean())",
    "gspo(aggregate=prompt_mean())",
    "dr_grpo(aggregate=sequence_sum(divisor=7, rows='all'))",
    "grpo(penalty=kl_reference(0.04))",
    "grpo(penalty=kl_reference(0.04, estimator='k1', weighted=True))",
    "grpo(penalty=[kl_reference(0.1, estimator='k2'), entropy_bonus(0.01)])",
    "grpo + f_penalty(measure='renyi(2)', beta=0.1, ratio='new/ref')",
    "dapo + f_penalty(measure='renyi(0.5)', beta=0.1)",
]
EVERY_LAYOUT = {
    "dapo", "gspo_token", "sapo(tau_pos=8.8, tau_neg=10.0)", "ppo_kl_penalty(beta=0.5, target=0.02)",
    "grpo + sequence_mask(high=3.0)", "atr_grpo(aggregate=prompt_mean())",
}  # fmt: skip
FAMILIES = ["power(-3.0)", "power(0.25)", "power(5.0)", "renyi(-1.0)", "renyi(0.5)", "renyi(2.0)"]


@pytest.mark.parametrize("spec", PRESETS + COMPOSITIONS + MEANS_AND_PENALTIES + OWN)
def test_spec_obeys_the_laws(spec: str) -> None:
    results = check_spec(spec, batches=8 if spec in EVERY_LAYOUT else 4)
    assert [result.law for result in results] == sorted(LAWS)
    assert all(result.instances > 0 for result in results if result.status == "held")
    assert {result.law for result in results if result.status == "held"} >= {1, 2, 4, 5, 6, 9, 10, 12, 13}


@pytest.mark.parametrize("measure", [*MEASURES, *FAMILIES])
def test_measure_as_a_trust_region_obeys_the_laws(measure: str) -> None:
    held = {result.law: result.instances for result in check_spec(f"trust_region('{measure}', 0.05)", batches=4)}
    assert held[3] >= 1  # tokens that were cut
    assert held[8] > 500  # points of the grid at which predicate and bounds agree


def test_every_preset_is_covered() -> None:
    assert {spec.partition("(")[0] for spec in PRESETS} == set(klamp.list_presets())


def test_laws_that_say_nothing_of_a_spec_are_exempt_with_a_reason() -> None:
    results = {result.law: result for result in check_spec("cispo", batches=4)}
    assert {law for law, result in results.items() if result.status == "exempt"} == {3, 7, 8, 11}
    assert results[7].reason == "the spec has no guard"
    assert results[11].reason == "the spec reads no rollout log-probs"
    assert {result.law for result in check_spec("sequence_mask", batches=4) if result.status == "exempt"} == set()
