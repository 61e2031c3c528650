"""Losses that read a statistic of the step: the originals change with the number of micro-batches, Klamp does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import klamp
from conformance import cases
from conformance.comparing import TOLERANCE
from conformance.micro_batches import CASE, CUTS, PIECES, Cut
from conformance.originals import Originals
from conformance.sides import cut, ours, ours_cut, relative
from conformance.trl_side import theirs
from klamp.language import PRESETS

VERL = [found for found in CUTS if found.framework == "verl"]
TRL = [found for found in CUTS if found.framework == "trl"]


@pytest.mark.parametrize("found", CUTS, ids=[f"{found.framework} {found.mode}" for found in CUTS])
@pytest.mark.parametrize("seed", [0, 1])
def test_klamps_gradient_does_not_depend_on_the_cut(found: Cut, seed: int) -> None:
    arrays = cases.make(f"shuffled-{seed}")
    loss, whole = ours(found.spec, arrays)
    for pieces in (1, *PIECES):
        piecewise, gradient = ours_cut(found.spec, arrays, pieces)
        assert relative(gradient, whole) <= 1e-6
        assert piecewise == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("name", klamp.list_presets())
def test_no_presets_gradient_depends_on_the_cut(name: str) -> None:
    """Of what is published, only bnpo's does, as documented: a mean of micro-batch means."""
    spec = klamp.parse(PRESETS[name].usual)
    spec = spec if spec.aggregate else klamp.parse("grpo()") + spec
    if spec.mean.kind == "sequence_sum" and spec.mean.divisor is None:
        spec = replace(spec, aggregate=replace(spec.mean, divisor=32.0))
    arrays = cases.make(CASE)
    one, *more = (ours_cut(spec, arrays, pieces)[1] for pieces in (1, *PIECES))
    apart = max(relative(gradient, one) for gradient in more)
    assert np.abs(one).max() > 0.0
    assert apart > 1e-3 if name == "bnpo" else apart <= 1e-6


def measured(found: Cut, originals: Originals) -> tuple[float, ...]:
    arrays = cases.make(CASE)
    one, *more = (originals.result("verl.loss", {**found.call, "micro": pieces}, arrays)[1] for pieces in (1, *PIECES))
    return tuple(relative(gradient, one) for gradient in more)


@pytest.mark.parametrize("found", VERL, ids=[found.mode for found in VERL])
def test_verls_gradient_depends_on_the_cut(found: Cut, originals: Originals) -> None:
    """By as much as the page says."""
    apart = measured(found, originals)
    assert min(apart) > 1e-3
    assert apart == pytest.approx(found.apart, rel=0.01)


def measured_of_trl(found: Cut) -> tuple[float, ...]:
    arrays = cases.make(CASE)
    gradients = []
    for pieces in (1, *PIECES):
        micro = cut(arrays, pieces)
        gradients.append(np.concatenate([theirs(piece, accumulate=pieces, **found.call)[1] for piece in micro]))
    return tuple(relative(gradient, gradients[0]) for gradient in gradients[1:])


@pytest.mark.parametrize("found", TRL, ids=[found.mode for found in TRL])
def test_trls_gradient_depends_on_the_cut(found: Cut) -> None:
    apart = measured_of_trl(found)
    assert min(apart) > 1e-3
    assert apart == pytest.approx(found.apart, rel=0.01)


def test_without_a_statistic_the_originals_do_not_depend_on_it(originals: Originals) -> None:
    """The harness cuts as the engines do: plain losses come out the same."""
    assert max(measured_of_trl(Cut("trl", "grpo", {"loss_type": "grpo"}, "grpo()", (0, 0, 0), ""))) <= TOLERANCE
    for mean in ("token-mean", "seq-mean-token-mean"):
        assert (
            max(measured(Cut("verl", mean, {"loss": "vanilla", "agg": mean}, "", (0, 0, 0), ""), originals))
            <= TOLERANCE
        )
