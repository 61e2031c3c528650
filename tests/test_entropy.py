"""What two regions do to the entropy of a softmax policy in one step: the clip and KL3, against stored numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import load
from running import close

import klamp

CASES = load("entropy")["cases"]
RULES = {"sym": "grpo(epsilon={eps!r}, aggregate=token_sum)", "k3": "atr_grpo(delta={delta!r}, aggregate=token_sum)"}


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    logp = logits.log_softmax(0)
    return -(logp.exp() * logp).sum()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_one_step_on_the_logits(case: dict[str, Any], rule: str) -> None:
    """G = w A where kept; logits move by -eta d loss / d logits; entropy to first order and exactly."""
    wanted = case["rules"][rule]
    actions = [int(action) for action, count in case["counts"].items() for _ in range(count)]
    logits = torch.tensor(case["pi_now"], dtype=torch.float64).log().requires_grad_()
    old = torch.tensor(case["pi_old"], dtype=torch.float64).log()
    batch = klamp.Batch(
        logits.log_softmax(0)[actions].unsqueeze(0),
        old[actions].unsqueeze(0),
        torch.tensor([[case["advantage"][str(action)] for action in actions]], dtype=torch.float64),
        torch.ones(1, len(actions), dtype=torch.bool),
    )
    objective = klamp.Objective(RULES[rule].format(**case))
    out = objective(batch)
    close(out.grad_policy[0], [wanted["G"][action] for action in actions])
    step = -case["eta"] * torch.autograd.grad(out.loss, logits)[0]
    close(step, wanted["delta_logits"])
    slope = torch.autograd.grad(_entropy(logits), logits)[0]
    close(slope @ step, wanted["dH_first_order"])
    close(_entropy(logits.detach() + step) - _entropy(logits.detach()), wanted["dH_exact"], 1e-9)
    close((logits.detach() + step).softmax(0) - logits.detach().softmax(0), wanted["delta_pi"], 1e-9)
