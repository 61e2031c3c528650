"""The audit: its verdicts are the objective's, its sums are exact, and they equal what the trainer logged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_parts import masked, rows, tokens, write

import klamp
from klamp.audit import sketch, verdicts
from klamp.audit.engine import Request, collect
from klamp.audit.general import judged
from klamp.audit.sums import S, Sums, T
from klamp.batch import Batch, segments
from klamp.cli import main
from klamp.errors import UserError
from klamp.presets import PRESETS
from klamp.radii import Adaptive

COUNTS = {
    "guard/removed_low_share": ("low_positive", "low_negative"), "guard/removed_high_share": ("high_positive", "high_negative"),
    "guard/removed_positive_share": ("low_positive", "high_positive"), "guard/removed_negative_share": ("low_negative", "high_negative"),
    "guard/outside_low_share": ("outside_low",), "guard/outside_high_share": ("outside_high",),
}  # fmt: skip
OWN = (
    "guard(ratio_low=0.9, ratio_high=1.1) + factor()", "guard(ratio_high=1.05, gate='negative') + guard(ratio_low=0.9)",
    "guard(measure='tv', radius=0.05, gate='always')", "guard(measure='k3', radius=0.002, ratio='new/rollout')",
    "guard(measure='js', radius=0.01, gate='positive', ratio='old/rollout', action='drop') + factor()", "guard(measure='k2', radius=0.0) + factor()",
    "guard(measure='k3', radius=linear(0.001, 0.1, 4)) + factor()", "guard(measure='k3', radius=scaled(0.01)) + factor()",
    "guard(measure='binary_kl_new_old', radius=0.03, gate='always') + factor(transform=cap(low=0.5, high=1.5), ratio='new/rollout')",
    "guard(measure='binary_tv', radius_low=0.02, radius_high=0.1, ratio='new/rollout')",
)  # fmt: skip


def usable(spec: klamp.Spec) -> bool:
    """Whether records can say what a spec would have done."""
    alone = klamp.Spec(spec.guards, spec.factors)
    offered = {"logp_rollout", "logp_ref", "entropy", "group", "row", "segment", "reward"}
    return alone.needs <= offered and not any(
        isinstance(r, Adaptive) for guard in spec.guards for r in guard.region.moves
    )


ALL = [
    klamp.parse(preset.usual or name) if hasattr(preset, "usual") else klamp.parse(name)
    for name, preset in PRESETS.items()
]
SPECS = [spec for spec in ALL if usable(spec)] + [klamp.parse(text) for text in OWN]


def batch(found: list[dict[str, Any]]) -> Batch:
    width = max(len(row["mask"]) for row in found)

    def padded(name: str, kind: torch.dtype) -> torch.Tensor:
        full = torch.zeros((len(found), width), dtype=kind)
        for line, row in zip(full, found, strict=True):
            line[: len(row[name])] = torch.tensor(row[name], dtype=kind)
        return full

    mask = padded("mask", torch.bool)
    floats = {
        name: padded(name, torch.float32) for name in ("logp_new", "logp_old", "logp_rollout", "logp_ref", "entropy")
    }
    new, old = floats.pop("logp_new"), floats.pop("logp_old")
    return Batch(new, old, padded("advantage", torch.float32), mask, **floats, group=torch.tensor([row["group"] for row in found]),
                 row=torch.tensor([row["row"] for row in found]), segment=segments(mask))  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_counts_are_the_objectives(spec: klamp.Spec, tmp_path: Path) -> None:
    """Whatever way a spec goes, its counts are the metrics of the objective on the same step."""
    found = masked(rows(3, steps=4, responses=24, spread=0.3), 0.2)
    sums = collect([str(write(tmp_path, found))], Request((str(spec),)))
    objective = klamp.Objective(klamp.Spec(spec.guards, spec.factors))
    for step in range(4):
        own = batch([row for row in found if row["step"] == step])
        state = objective.init() | ({"step": float(step)} if objective.spec.counts_steps else {})
        tally = objective(own, state=state).metrics
        for name, parts in COUNTS.items():
            assert int(tally.means[name][0]) == sum(sums.spec_totals[step][0, S[part]] for part in parts), name
        assert int(tally.sums["batch/tokens_count"]) == sums.totals[step][0]
        g = objective(own, state=state).grad_policy.double()
        assert sums.spec_totals[step][0, S["g2"]] == pytest.approx(float((g * g).sum()), rel=1e-5)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if verdicts.is_plain(spec)], ids=str)
def test_the_fast_way_is_the_general_one(spec: klamp.Spec) -> None:
    found = tokens(
        rows(5, steps=1, responses=64, updates=2) + rows(6, steps=2, responses=64, updates=2, spread=0.4)[64:]
    )
    slow = judged(spec, found, 0)
    columns = {name: getattr(found, name) for name in ("logp_new", "logp_old", "logp_rollout", "logp_ref", "advantage")}
    for ratio in ("new/old", *verdicts.ratios_of([spec])):
        columns[ratio] = columns[f"logp_{ratio.split('/')[0]}"] - columns[f"logp_{ratio.split('/')[1]}"]
    columns["x"] = columns["new/old"]
    reach = verdicts.Reach.of([spec])
    sides = reach.sides(columns)
    fast = verdicts.judge(spec, columns, sides)
    for name in ("outside_low", "outside_high", "removed_low", "removed_high"):
        assert (getattr(fast, name) == getattr(slow.verdict, name)).all(), name
    assert not (fast.outside & ~reach.beyond(columns, sides)).any()
    weight = np.ones(found.size)
    for ratio, low, high in verdicts.weight_of(spec):
        weight *= np.exp(np.clip(columns[ratio], low, high))
    assert np.allclose(slow.u, found.advantage * weight, rtol=1e-5)
    assert np.allclose(slow.g, np.where(fast.removed, 0.0, slow.u), rtol=1e-6)
    assert fast.removed.any() or not fast.outside.any() or spec.guards == ()


def test_many_specs_take_the_fast_way() -> None:
    fast = {str(spec) for spec in SPECS if verdicts.is_plain(spec)}
    assert {
        "grpo",
        "atr_grpo",
        "dapo",
        "ppo",
        "dual_clip",
        "reinforce",
        "dppo_tv",
        "dppo_kl",
        "cispo",
        "icepop",
        "tis",
        "decoupled_ppo",
        "ipo",
    } <= {text.partition("(")[0] for text in fast}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of the embedded model that cuts something, with every token recorded."""
    out = tmp_path_factory.mktemp("run") / "run"
    words = ["train", "--max_steps", "8", "--logging_steps", "1", "--learning_rate", "3e-3", "--eval-size", "4", "--record-tokens",
             "--spec", "guard(measure='k3', radius=0.0005) + factor()", "--out", str(out)]  # fmt: skip
    assert main(words) == 0
    return out


def test_it_equals_what_the_trainer_logged(run: Path) -> None:
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = {line["step"]: line for line in logged if line["event"] == "train"}
    sums = collect([str(run)], Request((json.loads((run / "manifest.json").read_text())["spec"],)))
    assert len(train) == len(sums.totals) == 8
    removed = 0
    for step, line in train.items():
        totals, spec = sums.totals[step - 1], sums.spec_totals[step - 1][0]  # the trainer logs a step once it is done
        tokens, active = totals[T["tokens"]], totals[T["active"]]
        assert tokens == line["batch/tokens_count"]
        for name, parts in COUNTS.items():
            assert sum(spec[S[part]] for part in parts) / tokens == line[name], name
        cut = sum(spec[S[part]] for part in ("low_positive", "low_negative", "high_positive", "high_negative"))
        assert cut / active == line["guard/removed_active_share"]
        assert (tokens - active) / tokens == line["batch/zero_advantage_share"]
        assert totals[T["k3"]] / tokens == pytest.approx(line["policy/kl_old_new_mean"], rel=1e-9, abs=1e-15)
        assert totals[T["k3"]] / totals[T["responses"]] == pytest.approx(
            line["policy/kl_old_new_sequence_mean"], rel=1e-9, abs=1e-15
        )
        assert totals[T["entropy"]] / tokens == pytest.approx(line["policy/entropy_mean"], rel=1e-5)
        removed += cut
    assert removed > 100


def equal(one: Sums, other: Sums, exact: bool = True) -> None:
    assert one.steps == other.steps
    for step in one.steps:
        for a, b in ((one.totals[step], other.totals[step]), (one.spec_totals[step], other.spec_totals[step])):
            assert np.allclose(a, b, rtol=1e-9, atol=1e-9)
    assert (one.ratios.settled() == other.ratios.settled()).all()
    assert (one.both == other.both).all()


def test_any_cut_of_the_log_gives_the_same_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows(7, steps=5)
    request = Request(
        ("grpo", "gspo", "m2po", "dppo_tv"), ("side", "old_prob", "position", "advantage", "token", "entropy")
    )
    whole = collect([str(write(tmp_path / "a", found, 1000))], request)
    parts = write(tmp_path / "b", found, 7)
    equal(whole, collect([str(parts)], request))
    equal(whole, collect([str(tmp_path / "b" / "part-*.parquet")], request))
    monkeypatch.setattr("klamp.audit.blocks.TOKENS", 100)
    monkeypatch.setattr("klamp.audit.general.TOKENS", 200)
    monkeypatch.setattr("klamp.audit.parquet.TOKENS", 300)
    cut = collect([str(parts)], request)
    equal(whole, cut)
    for name, value in whole.slices.items():
        assert np.allclose(value, cut.slices[name]), name
        assert value[:, 0].sum() == whole.total("tokens"), name
        assert np.allclose(whole.spec_slices[name], cut.spec_slices[name]), name


def test_several_processes_give_the_same_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("klamp.audit.engine._SMALL", 0)
    found = rows(8, steps=6)
    log = str(write(tmp_path, found, 32))
    equal(collect([log], Request(("grpo", "m2po"))), collect([log], Request(("grpo", "m2po")), jobs=2))


def test_the_sketch_states_its_error() -> None:
    random = np.random.default_rng(0)
    x = np.concatenate([random.standard_normal(20000) * 10.0 ** random.uniform(-6, 1, 20000), [0.0, -0.0]]).astype(
        np.float32
    )
    counts = np.bincount(sketch.codes(x), minlength=sketch.BINS)
    assert counts.sum() == len(x)
    shares = (0.001, 0.01, 0.2, 0.5, 0.8, 0.99, 0.999)
    for share, got in zip(shares, sketch.quantiles(counts, shares), strict=True):
        true = float(np.sort(x)[max(math.ceil(share * len(x)) - 1, 0)])
        assert got == pytest.approx(true, rel=sketch.ERROR * 1.001, abs=2.0**-24)
    one, two = (np.bincount(sketch.codes(part), minlength=sketch.BINS) for part in (x[:777], x[777:]))
    assert (one + two == counts).all()
    middle = sketch.middles()[sketch.codes(x)]
    near = (abs(x) >= 2.0**-24) & (abs(x) < 128)
    assert (abs(middle - x)[near] <= sketch.ERROR * abs(x)[near]).all()


@pytest.mark.parametrize(("spec", "message"), [
    ("entropy_mask", "needs entropy"),
    ("sequence_mask()", "needs logp_rollout.*--map"),
    ("trust_region('k3', adaptive(0.02, removed=0.01))", "adapts to the run that it steers"),
])  # fmt: skip
def test_a_spec_that_the_log_cannot_judge_is_refused(spec: str, message: str, tmp_path: Path) -> None:
    log = write(tmp_path, rows(rollout=None, entropy=False, ref=False))
    spec = "guard(region='nowhere', gate=entropy_below(quantile=0.5))" if spec == "entropy_mask" else spec
    with pytest.raises(UserError, match=message):
        collect([str(log)], Request((spec,)))
