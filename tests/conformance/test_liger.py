"""Liger's chunked GRPO loss, called in the environment of the originals, against the specs of the table."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import klamp
from conformance import cases
from conformance.cases import Arrays
from conformance.comparing import TOLERANCE, check, runnable
from conformance.formulas import kl_of_the_response
from conformance.originals import Originals
from conformance.rows import PLAIN, Row
from conformance.sides import apart, ours
from conformance.table import ROWS, shipped

RUNNABLE = runnable(ROWS["liger"])


@pytest.mark.parametrize("row", RUNNABLE, ids=[row.mode for row in RUNNABLE])
def test_row(row: Row, originals: Originals) -> None:
    check(row, lambda row, arrays: originals.result("liger.loss", row.call, arrays))


def test_every_switch_of_ligers_loss_has_a_row(originals: Originals) -> None:
    assert set(originals.ask("liger.shipped", {})["shipped"].tolist()) == shipped("liger")


@pytest.mark.parametrize("name", PLAIN[:3])
def test_luspo_over_tokens_includes_padding(name: str, originals: Originals) -> None:
    """Each position weighs (length of its response) / width, also where the response has ended."""
    arrays = cases.make(name)
    row = next(row for row in ROWS["liger"] if row.test.endswith("test_luspo_over_tokens_includes_padding"))
    original = originals.result("liger.loss", row.call, arrays)
    assert apart(ours(row.spec, arrays), original) > 1e-2
    assert np.abs(original[1][~arrays["mask"]]).max() > 1e-3  # padding trains
    mask, width = arrays["mask"], arrays["mask"].shape[1]
    everywhere = arrays | {
        "mask": np.ones_like(mask),
        "advantages": arrays["advantages"] * mask.sum(1) / width,
    }
    assert apart(ours(row.spec, everywhere), original) <= TOLERANCE


@pytest.mark.parametrize("name", PLAIN)
def test_the_kl_is_weighed_by_the_response(name: str, originals: Originals) -> None:
    arrays = cases.make(name)
    row = next(row for row in ROWS["liger"] if row.test.endswith("test_the_kl_is_weighed_by_the_response"))
    original = originals.result("liger.loss", row.call, arrays)
    assert apart(ours(row.spec, arrays), original) > 1e-6
    assert apart(kl_of_the_response(arrays, "gspo(epsilon_low=0.2, epsilon_high=0.2)", 0.3), original) <= TOLERANCE


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize(
    ("loss_type", "spec"), [("dapo", "ppo()"), ("grpo", "grpo()"), ("cispo", "cispo_absolute(high=1.3)")]
)
def test_the_fused_layer(loss_type: str, spec: str, chunk: int, originals: Originals) -> None:
    """Loss, and the gradients of the hidden states and of the output matrix: as far as float32 goes."""
    arrays = _with_head(cases.make("plain-0"))
    options = {"loss_type": loss_type, "beta": 0.0, "epsilon_high": 1.3 if loss_type == "cispo" else 0.2}
    answer = originals.ask("liger.head", {"options": options, "chunk": chunk}, arrays)
    hidden, weight = (torch.from_numpy(arrays[name]).requires_grad_(True) for name in ("hidden", "weight"))
    logp = (hidden @ weight.T).log_softmax(-1).gather(-1, torch.from_numpy(arrays["tokens"])[..., None])[..., 0]
    old, mask, advantages = (torch.from_numpy(arrays[name]) for name in ("old", "mask", "advantages"))
    loss = klamp.Objective(spec)(klamp.Batch(logp, old, advantages, mask)).loss
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    mine = (float(loss.detach()), np.concatenate([hidden.grad.numpy().ravel(), weight.grad.numpy().ravel()]))
    theirs = (float(answer["loss"]), np.concatenate([answer["gradient"].ravel(), answer["weight"].ravel()]))
    assert TOLERANCE < apart(mine, theirs) <= 2e-6


def _with_head(arrays: Arrays) -> Arrays:
    """Hidden states of 5 numbers, 11 words; the old policy's log-probs lie around the new one's."""
    draw = np.random.default_rng(0)
    shape = arrays["mask"].shape
    hidden, weight, tokens = (
        draw.standard_normal((*shape, 5)),
        draw.standard_normal((11, 5)),
        draw.integers(0, 11, shape),
    )
    logits = hidden @ weight.T
    logp = np.take_along_axis(logits, tokens[..., None], 2)[..., 0] - np.log(np.exp(logits).sum(2))
    return arrays | {"hidden": hidden, "weight": weight, "tokens": tokens, "old": logp + arrays["old"] - arrays["new"]}
