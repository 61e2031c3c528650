"""The diagnoses: a table of planted faults, each found and nothing else with it, and clean runs that stay silent."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audit_parts import Rows, rows, write

from klamp.audit.command import audit
from klamp.audit.findings import DIAGNOSES
from klamp.audit.thresholds import Thresholds, meanings, with_limits
from klamp.cli import main
from klamp.errors import UserError

DOC = Path(__file__).parents[1] / "docs" / "audit.md"


def clean(seed: int = 0, **changes: Any) -> Rows:
    return rows(seed, steps=16, responses=64, **changes)


def names(log: Path, spec: str = "atr_grpo", *limits: str) -> list[str]:
    return list(dict.fromkeys(one["name"] for one in audit([str(log)], [spec], limits=limits)["findings"]))


def each(found: Rows, change: Callable[[np.random.Generator, dict[str, Any]], dict[str, Any]]) -> Rows:
    random = np.random.default_rng(1)
    return [row | change(random, row) for row in found]


# --- faults ---------------------------------------------------------------------------------------------------


def missing() -> Rows:
    found = clean()
    for row in found[::9]:
        row["logp_rollout"][0] = math.nan
    return found


def positive() -> Rows:
    """The fill value 1.0 of a padding that the mask forgot."""
    found = clean()
    for row in found[::7]:
        row["logp_old"][-1] = row["logp_new"][-1] = 1.0
        row["logp_rollout"][-1] = 1.0
    return found


def padding() -> Rows:
    def pad(random: np.random.Generator, row: dict[str, Any]) -> dict[str, Any]:
        more = 44 - len(row["mask"])
        fills = {"token_ids": 0, "mask": True, "kept": True, "advantage": row["advantage"][0], "g": 0.0, "entropy": 0.3}
        logps = dict.fromkeys(("logp_new", "logp_old", "logp_rollout", "logp_ref"), 0.0)
        return {name: row[name] + [fill] * more for name, fill in (fills | logps).items()}

    return each(clean(), pad)


def bfloat16(values: list[float]) -> list[float]:
    bits = np.array(values, np.float32).view(np.uint32)
    return ((bits + 0x8000) & np.uint32(0xFFFF0000)).view(np.float32).tolist()


def grid() -> Rows:
    return each(clean(), lambda random, row: {"logp_rollout": bfloat16(row["logp_rollout"])})


def half() -> Rows:
    return each(clean(), lambda random, row: {"logp_rollout": np.float16(row["logp_rollout"]).astype(float).tolist()})


def shifted() -> Rows:
    return each(clean(), lambda random, row: {"logp_rollout": [-0.3, *row["logp_rollout"][:-1]]})


def softmaxes(random: np.random.Generator, n: int) -> np.ndarray:
    """Sampled from n distributions over 60 tokens, some sure and some not: log-probs, sorted."""
    logits = random.standard_normal((n, 60)) * random.uniform(0.5, 6.0, (n, 1))
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return -np.sort(-logp, axis=1)


def sampled(
    random: np.random.Generator, row: dict[str, Any], change: Callable[[np.ndarray], np.ndarray]
) -> dict[str, Any]:
    """A response sampled from a changed policy; the trainer's log-probs are those of the unchanged one."""
    logp = softmaxes(random, len(row["mask"]))
    theirs = change(logp)
    cumulative = np.exp(theirs).cumsum(1)
    chosen = (random.random((len(logp), 1)) * cumulative[:, -1:] > cumulative).sum(1)
    pick = np.arange(len(logp)), chosen
    old = np.minimum(logp[pick], -1e-6)
    moved = np.array(row["logp_new"]) - np.array(row["logp_old"])
    return {"logp_old": old.tolist(), "logp_new": np.minimum(old + moved, -1e-6).tolist(),
            "logp_rollout": np.minimum(theirs[pick] + 0.005 * random.standard_normal(len(old)), -1e-6).tolist(),
            "entropy": (-(np.exp(logp) * logp).sum(1)).tolist()}  # fmt: skip


def temperature(degree: float) -> Rows:
    def heated(logp: np.ndarray) -> np.ndarray:
        return logp / degree - np.log(np.exp(logp / degree).sum(1, keepdims=True))

    return each(clean(), lambda random, row: sampled(random, row, heated))


def top_p(share: float) -> Rows:
    def nucleus(logp: np.ndarray) -> np.ndarray:
        p = np.exp(logp)
        kept = p.cumsum(1) - p < share
        return np.where(kept, logp - np.log((p * kept).sum(1, keepdims=True)), -np.inf)

    return each(clean(), lambda random, row: sampled(random, row, nucleus))


def top_k() -> Rows:
    def first(logp: np.ndarray) -> np.ndarray:
        return np.where(np.arange(logp.shape[1]) < 5, logp - np.log(np.exp(logp[:, :5]).sum(1, keepdims=True)), -np.inf)

    return each(clean(), lambda random, row: sampled(random, row, first))


def tails() -> Rows:
    found = clean()
    for row in found[::100]:
        row["logp_rollout"][3] -= 50.0
    return found


def on_policy() -> Rows:
    return clean(updates=1)


def tied() -> Rows:
    return [row | {"advantage": [0.0] * len(row["mask"])} if row["group"] % 4 else row for row in clean()]


def noise() -> Rows:
    """Two forward passes in half precision that do not agree."""

    def jitter(random: np.random.Generator, row: dict[str, Any]) -> dict[str, Any]:
        return {
            "logp_new": np.minimum(
                np.array(row["logp_new"]) + 0.09 * random.standard_normal(len(row["mask"])), -1e-6
            ).tolist()
        }

    return each(clean(), jitter)


def drifting() -> Rows:
    def further(random: np.random.Generator, row: dict[str, Any]) -> dict[str, Any]:
        old, new = np.array(row["logp_old"]), np.array(row["logp_new"])
        return {"logp_new": np.minimum(old + (new - old) * (0.1 + 0.15 * row["step"]), -1e-6).tolist()}

    return each(clean(), further)


def fading(factor: float) -> Rows:
    return each(
        clean(), lambda random, row: {"entropy": [value * factor ** (row["step"] / 15) for value in row["entropy"]]}
    )


def longer() -> Rows:
    return each(
        clean(), lambda random, row: {"reward": 0.02 * len(row["mask"]) + 0.05 * float(random.standard_normal())}
    )


FAULTS: dict[str, tuple[Callable[[], Rows], set[str]]] = {
    "missing log-probs": (missing, {"missing"}),
    "a fill value under the mask": (positive, {"positive"}),
    "padding under the mask": (padding, {"mask"}),
    "bfloat16": (grid, {"grid"}),
    "float16": (half, {"grid"}),
    "one token off": (shifted, {"shift"}),
    "temperature 0.6": (lambda: temperature(0.6), {"temperature"}),
    "temperature 0.9": (lambda: temperature(0.9), {"temperature"}),
    "temperature 1.5": (lambda: temperature(1.5), {"temperature"}),
    "top-k 5": (top_k, {"offset"}),
    "top-p 0.95": (lambda: top_p(0.95), {"offset"}),
    "top-p 0.9": (lambda: top_p(0.9), {"offset"}),
    "top-p 0.8": (lambda: top_p(0.8), {"offset"}),
    "heavy tails": (tails, {"tails"}),
    "one update a rollout": (on_policy, {"on_policy"}),
    "tied groups": (tied, {"tied"}),
    "noise": (noise, {"noise"}),
    "drift": (drifting, {"drift"}),
    "entropy collapse": (lambda: fading(0.01), {"entropy"}),
    "entropy explosion": (lambda: fading(50.0), {"entropy"}),
    "reward by length": (longer, {"length"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_nothing_else(fault: str, tmp_path: Path) -> None:
    make, expected = FAULTS[fault]
    assert set(names(write(tmp_path, make()))) == expected


def test_the_table_covers_every_diagnosis() -> None:
    kinds = {"mismatch": {"temperature", "offset", "tails"}}
    for diagnosis in DIAGNOSES:
        assert any(expected & kinds.get(diagnosis, {diagnosis}) for _, expected in FAULTS.values()), diagnosis


@pytest.mark.parametrize("seed", range(20))
def test_clean_logs_are_silent(seed: int, tmp_path: Path) -> None:
    assert names(write(tmp_path, clean(seed))) == []


def test_clean_runs_of_the_embedded_task_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(20):
        out = tmp_path / str(seed)
        words = ["--max_steps", "10", "--eval-size", "4", "--per_device_train_batch_size", "16", "--record-tokens"]
        assert main(["train", *words, "--seed", str(seed), "--out", str(out)]) == 0
        assert names(out) == [], seed


def test_masks_that_disagree_with_lengths(tmp_path: Path) -> None:
    import json

    found = clean()
    lines = [
        {"logp_new": row["logp_new"], "logp_old": row["logp_old"], "advantage": row["advantage"][0], "step": row["step"],
         "completion_length": len(row["mask"]) + (index % 5 == 0)} for index, row in enumerate(found)
    ]  # fmt: skip
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (one,) = audit([str(tmp_path / "log.jsonl")], ["grpo"])["findings"]
    assert one["name"] == "mask"
    assert "205 of 1,024 (20 %)" in one["evidence"]


def test_limits_can_be_changed(tmp_path: Path) -> None:
    log = write(tmp_path, tied())
    assert names(log, "atr_grpo", "tied=0.9") == []
    assert names(log, "atr_grpo", "tied=0.1") == ["tied"]
    with pytest.raises(UserError, match="--limit tyed=1: write name=value; did you mean 'tied'"):
        with_limits(["tyed=1"])
    with pytest.raises(UserError, match="'x' is no number"):
        with_limits(["tied=x"])
    assert with_limits([]) == Thresholds()


def test_the_limits_are_documented() -> None:
    page = DOC.read_text()
    for name, (default, meaning) in meanings().items():
        assert f"| `{name}` | {default:g} | {meaning} |" in page, name
    assert len(meanings()) == len(dataclasses.fields(Thresholds))
