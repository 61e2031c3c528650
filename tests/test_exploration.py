"""The exploration metrics against a loop over tokens, and their sign against an exact step of the natural gradient."""

from __future__ import annotations

import math

import pytest
import torch

import klamp
from klamp.lab import theorems


def batch(seed: int = 0) -> klamp.Batch:
    draw = torch.Generator().manual_seed(seed)
    new = -3.0 * torch.rand((6, 9), generator=draw, dtype=torch.float64) - 0.01
    old = new + 0.5 * torch.randn((6, 9), generator=draw, dtype=torch.float64)
    advantages = torch.randn((6,), generator=draw, dtype=torch.float64)
    advantages[2] = 0.0
    mask = torch.rand((6, 9), generator=draw) < 0.8
    entropy = 2.0 * torch.rand((6, 9), generator=draw, dtype=torch.float64)
    return klamp.Batch(new, torch.where(old < 0.0, old, -0.01), advantages, mask, entropy=entropy)


@pytest.mark.parametrize("spec", ["atr_grpo(delta=0.05)", "atr_grpo(delta=0.005)", "cispo", "dapo", "rollback"])
def test_metrics_by_a_loop(spec: str) -> None:
    given = batch()
    out = klamp.Objective(spec)(given)
    assert given.entropy is not None
    kept = [0.0, 0.0]
    cut, push, count = [0.0, 0.0], 0.0, 0
    for row, column in given.mask.nonzero().tolist():
        x = float(given.logp_new[row, column] - given.logp_old[row, column])
        a, g = float(given.advantages[row, 0]), float(out.grad_policy[row, column])
        surprise = -float(given.logp_new[row, column]) - float(given.entropy[row, column])
        clip_keeps = not ((a > 0 and math.exp(x) > 1.2) or (a < 0 and math.exp(x) < 0.8))
        clip = a * math.exp(x) if clip_keeps else 0.0
        count += 1
        push += (g - clip) * surprise
        if a and bool(out.kept[row, column]) and not clip_keeps:
            kept = [kept[0] + abs(g) * surprise, kept[1] + abs(g)]
        if a and not bool(out.kept[row, column]) and clip_keeps:
            cut = [cut[0] + abs(clip) * surprise, cut[1] + abs(clip)]
    shown = out.metrics.show()
    assert shown["explore/entropy_push_mean"] == pytest.approx(push / count, rel=1e-12, abs=1e-15)
    for name, (total, weight) in (("kept", kept), ("cut", cut)):
        wanted = total / weight if weight else None
        assert shown[f"explore/{name}_surprise_mean"] == (
            wanted if wanted is None else pytest.approx(wanted, rel=1e-12)
        )
    assert spec != "atr_grpo(delta=0.05)" or shown["explore/kept_surprise_mean"] is not None
    assert spec != "atr_grpo(delta=0.005)" or shown["explore/cut_surprise_mean"] is not None


def test_the_clip_itself_pushes_nothing() -> None:
    shown = klamp.Objective("grpo(epsilon=0.2)")(batch()).metrics.show()
    assert shown["explore/entropy_push_mean"] == 0.0
    assert shown["explore/kept_surprise_mean"] is None
    assert shown["explore/cut_surprise_mean"] is None


def test_the_push_is_the_entropy_that_a_natural_step_adds() -> None:
    """For one state: mean push times the number of tokens = d H / d rate of the difference, exactly."""
    draw = torch.Generator().manual_seed(4)
    old = torch.randn((1, 8), generator=draw, dtype=torch.float64)
    new = old + 0.4 * torch.randn((1, 8), generator=draw, dtype=torch.float64)
    action = torch.randint(0, 8, (40,), generator=draw)
    advantages = torch.randn(40, generator=draw, dtype=torch.float64)
    entropy = theorems.entropy(new).expand(40, 1)
    made = klamp.Batch(
        new.log_softmax(-1)[0, action].unsqueeze(1), old.log_softmax(-1)[0, action].unsqueeze(1), advantages,
        torch.ones(40, 1, dtype=torch.bool), entropy=entropy,
    )  # fmt: skip
    weights = []
    for spec in ("atr_grpo(delta=0.05)", "grpo"):
        out = klamp.Objective(spec)(made)
        weights.append(torch.zeros(1, 8, dtype=torch.float64).index_add(1, action, out.grad_policy.T))
    wanted = theorems.entropy_slope(new, weights[0] - weights[1], natural=True).left
    push = klamp.Objective("atr_grpo(delta=0.05)")(made).metrics.show()["explore/entropy_push_mean"]
    assert isinstance(push, float)
    assert 40.0 * push == pytest.approx(float(wanted), rel=1e-10)
    assert push != 0.0


def test_the_exact_push_is_the_entropy_that_a_vanilla_step_adds() -> None:
    draw = torch.Generator().manual_seed(5)
    old = torch.randn((1, 8), generator=draw, dtype=torch.float64)
    new = old + 0.4 * torch.randn((1, 8), generator=draw, dtype=torch.float64)
    action = torch.randint(0, 8, (40,), generator=draw)
    entropy, logq = theorems.entropy(new), new.log_softmax(-1)
    phi = (logq.exp() ** 2 * (logq + entropy)).sum()
    made = klamp.Batch(
        logq[0, action].unsqueeze(1), old.log_softmax(-1)[0, action].unsqueeze(1),
        torch.randn(40, generator=draw, dtype=torch.float64), torch.ones(40, 1, dtype=torch.bool),
        entropy=entropy.expand(40, 1), phi_mean=phi.expand(40, 1),
    )  # fmt: skip
    weights = []
    for spec in ("atr_grpo(delta=0.05)", "grpo"):
        out = klamp.Objective(spec)(made)
        weights.append(torch.zeros(1, 8, dtype=torch.float64).index_add(1, action, out.grad_policy.T))
    wanted = theorems.entropy_slope(new, weights[0] - weights[1], natural=False).left
    push = klamp.Objective("atr_grpo(delta=0.05)")(made).metrics.show()["explore/vanilla_push_mean"]
    assert isinstance(push, float)
    assert 40.0 * push == pytest.approx(float(wanted), rel=1e-10)
    assert push != 0.0


def test_an_overflowing_ratio_leaves_the_metrics_finite() -> None:
    given = klamp.Batch(
        torch.tensor([[-1.0, -0.5]]), torch.tensor([[-900.0, -0.6]]), torch.tensor([[1.0, 1.0]]),
        torch.ones(1, 2, dtype=torch.bool), entropy=torch.ones(1, 2),
    )  # fmt: skip
    shown = klamp.Objective("grpo")(given).metrics.show()
    assert shown["explore/entropy_push_mean"] == 0.0
