"""verl's own losses, called in an environment of their own, against the specs of the table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import klamp
from conformance import cases
from conformance.advantage_side import ROUNDED, advantages
from conformance.cases import Arrays
from conformance.comparing import TOLERANCE, check, runnable
from conformance.originals import Originals
from conformance.rows import DIFFERS, PLAIN, Row
from conformance.sides import apart, batch, ours
from conformance.table import ROWS, shipped

RUNNABLE = runnable(ROWS["verl"], "", "verl.kl", "verl.ppo_loss")
ADVANTAGES = runnable(ROWS["verl"], "verl.advantage")


@pytest.mark.parametrize("row", RUNNABLE, ids=[row.mode for row in RUNNABLE])
def test_row(row: Row, originals: Originals) -> None:
    check(row, lambda row, arrays: originals.result(row.kind or "verl.loss", row.call, arrays))


def test_every_entry_of_verls_registries_has_a_row(originals: Originals) -> None:
    assert set(originals.ask("verl.shipped", {})["shipped"].tolist()) == shipped("verl")


@pytest.mark.parametrize("row", ADVANTAGES, ids=[row.mode for row in ADVANTAGES])
def test_advantages(row: Row, originals: Originals) -> None:
    for name in row.cases:
        arrays = cases.make(name)
        original = originals.ask("verl.advantage", row.call, arrays)["advantages"]
        found = advantages(row.spec, arrays)
        assert np.abs(original).max() > 0.1
        if row.status == DIFFERS:
            before = np.abs(found - original).max()
            assert before >= row.visible, f"{row.spec} on {name} should differ, and is {before:.2e} apart"
            found = ROUNDED[row.adjust](row.spec, arrays)
        apart_by = np.abs(found - original).max()
        assert apart_by <= TOLERANCE, f"{row.spec} on {name}: {apart_by:.2e} apart"


def test_clamping_at_20_nats_does_not_show_below_a_clip(originals: Originals) -> None:
    """e^-20 is 2e-9: where large ratios are clipped, capped or faded, the clamp of the log-ratio changes nothing more."""
    for loss, spec in (
        ("vanilla", "dual_clip(c=3.0, base='ppo()')"),
        ("cispo", "cispo(epsilon_high=0.2, epsilon_low=0.2)"),
    ):
        for seed in range(3):
            arrays = cases.make(f"far-{seed}")
            original = originals.result("verl.loss", {"loss": loss}, arrays)
            assert apart(ours(spec, arrays), original) < 1e-8


def test_clip_cov_draws_as_many_tokens_of_the_same_window(originals: Originals) -> None:
    policy = {"clip_cov_lb": 0.2, "clip_cov_ub": 1.5}
    for seed in range(4):
        arrays = cases.make(f"large-{seed}")
        cut = []
        for share in (1.0, 0.05):
            call = {"loss": "clip_cov", "policy_loss": {**policy, "clip_cov_ratio": share}, "seed": seed}
            theirs = originals.result("verl.loss", call, arrays)[1]
            mine = ours(f"clip_cov(share={share}, low=0.2, high=1.5)", arrays)[1]
            cut.append([(gradient == 0.0) & arrays["mask"] for gradient in (theirs, mine)])
        window = cut[0][0]
        assert (window == cut[0][1]).all()
        one, other = cut[1]
        assert one.sum() == other.sum() < window.sum()
        assert not (one & ~window).any()
        assert not (other & ~window).any()
        assert (one != other).any()


@pytest.mark.parametrize("name", PLAIN[:3])
@pytest.mark.parametrize("mode", ["dro with rollout_is", "kl_cov with rollout_is"])
def test_the_rollouts_weight_is_on_the_penalty_too(mode: str, name: str, originals: Originals) -> None:
    """verl's loss is Klamp's policy term plus the rollout's weight times Klamp's penalty, token by token."""
    row = next(row for row in ROWS["verl"] if row.mode == mode)
    arrays = cases.make(name)
    original = originals.result("verl.loss", row.call, arrays)
    assert apart(ours(row.spec, arrays), original) > 1e-3
    weight = np.exp(arrays["old"] - arrays["rollout"]).clip(max=1.3)
    (loss, gradient), terms = ours(row.spec, arrays), _penalty_terms(row.spec, arrays)
    share = 1.0 / arrays["mask"].sum()
    loss += float(((weight - 1.0) * terms[0] * share).sum())
    assert apart((loss, gradient + (weight - 1.0) * terms[1] * share), original) <= TOLERANCE


def _penalty_terms(spec: str, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Value and slope of the penalty of each token."""
    whole, bare = klamp.parse(spec), klamp.parse(spec)
    bare = replace(bare, penalties=())
    made, _ = batch(arrays)
    with_penalty, without = klamp.Objective(whole)(made), klamp.Objective(bare)(made)
    return (with_penalty.per_token - without.per_token).numpy(), with_penalty.grad_penalty.numpy()


def test_the_full_kl_is_not_there(originals: Originals) -> None:
    with pytest.raises(RuntimeError, match="NotImplementedError"):
        originals.ask("verl.kl", {"kl": "full", "coefficient": 0.3}, cases.make("zero-0"))
