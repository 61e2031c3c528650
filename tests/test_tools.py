"""explain, presets --table and diff: what they print is true of the specs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import klamp
from klamp.cli import main
from klamp.diff import diff, parts, recorded_steps, standard_batch
from klamp.explain import explain
from klamp.presets import PRESETS
from klamp.records import RecordWriter
from klamp.table import cells, markdown, page, rows

DOCS = Path(__file__).parents[1] / "docs"


def facts(spec: str) -> Any:
    return json.loads(json.dumps(explain(klamp.parse(spec)), allow_nan=False))


# --- explain --------------------------------------------------------------------------------------------------


def test_bounds_of_a_binary_divergence_by_probability() -> None:
    """DPPO: |q - p| <= 0.05 at p = 0.1 is [0.5, 1.5]; KL_bin(old||new) <= 0.05 at p = 0.5 is [0.6915, 1.30848]."""
    at = {row["p"]: row for row in facts("dppo_tv(delta=0.05)")["guards"][0]["region"]["by_probability"]}
    assert (at[0.1]["low"], at[0.1]["high"]) == (pytest.approx(0.5), pytest.approx(1.5))
    assert at[0.01]["low"] == 0.0
    assert at[0.99]["high"] is None  # q <= 1: no w reaches the radius
    at = {
        row["p"]: row
        for row in facts("trust_region('binary_kl_old_new', 0.05)")["guards"][0]["region"]["by_probability"]
    }
    assert (at[0.5]["low"], at[0.5]["high"]) == (pytest.approx(0.6915, abs=1e-4), pytest.approx(1.30848, abs=1e-5))
    p, q = 0.5, 0.5 * at[0.5]["high"]
    assert p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) == pytest.approx(0.05, rel=1e-12)


@pytest.mark.parametrize(("spec", "inside", "outside"), [
    ("m2po(threshold=0.04)", "the mean of k2 over all tokens <= 0.02", "gradient 0"),
    ("rollback", "0.8 <= w <= 1.2", "gradient pulls back, times -0.3"),
    ("guard(region='nowhere', gate=entropy_below(quantile=0.8))", "nothing", "gradient 0"),
    ("rs_k3(radius=0.1, scope='sequence_max')", "max of k3 <= 0.1", "the whole response leaves the loss and the mean"),
    ("trust_region('k3', adaptive(0.02, removed=0.01))",
     "k3 <= adaptive(start=0.02, removed=0.01): 0.81311 <= w <= 1.2135 before the first step", "gradient 0"),
    ("trust_region('exact_tv', radius_low=0.1, radius_high=0.2)", "exact_tv <= 0.1 (w < 1), 0.2 (w > 1)", "gradient 0"),
    ("guard(ratio_high=1.2)", "w <= 1.2", "gradient 0"),
])  # fmt: skip
def test_a_guard_in_words(spec: str, inside: str, outside: str) -> None:
    (guard,) = facts(spec)["guards"]
    assert (guard["inside"], guard["action_meaning"]) == (inside, outside)
    assert inside in markdown() + str(cells(klamp.parse(spec)))


def test_what_a_spec_costs() -> None:
    assert facts("grpo")["costs"] == []
    assert "one more forward pass" in facts("m2po")["costs"][0]
    assert "no forward pass" in facts("grpo + rs_k3")["costs"][0]
    assert "divergences[exact_tv]" in facts("trust_region('exact_tv', 0.1)")["costs"][0]
    assert "6 products" in facts("truly_ppo")["costs"][0]
    assert explain(klamp.parse("grpo"), 1000, 10)["costs"] == [
        "at 1,000 x 10: log-probs with their gradient 0.00 GFLOP per token; their logits would be 0.00 MB per token in float32, and are never held"
    ]
    at = explain(
        klamp.parse("trust_region('exact_tv', 0.1) + guard(measure='topk_js', radius=1.0, top_k=7)"), 151936, 1024
    )["costs"]
    assert "92 bytes per token for the buckets" in at[-2]
    assert "0.62 GFLOP per token more; 2,052 bytes per token and 311 MB once" in at[-1]
    with pytest.raises(klamp.UserError, match="give vocabulary and width"):
        explain(klamp.parse("grpo"), 1000)
    for spec in ("m2po", "kl_cov", "grpo + rs_k3", "dapo"):
        assert ("one more forward pass" in str(facts(spec)["costs"])) == klamp.parse(spec).reads_new


def test_a_penalty_on_some_tokens_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["explain", "grpo + kl_reference(on=guard(measure='k3', radius=0.02, ratio='new/ref', gate='always'))"])
        == 0
    )
    assert "only on   tokens outside k3 <= 0.02: 0.81311 <= w <= 1.2135 (w = new/ref)" in capsys.readouterr().out
    assert "covariance_top(): The share of tokens" in facts("kl_cov")["penalties"][0]["on"]


# --- the table ------------------------------------------------------------------------------------------------


def test_the_page_of_presets_is_the_table() -> None:
    assert (DOCS / "presets.md").read_text() == page(), "run: python -m klamp.table > docs/presets.md"


def test_every_preset_has_a_row() -> None:
    table = markdown()
    for row in rows():
        assert table.count(f"\n| {PRESETS[row['name']].usual} ") == 1
        assert klamp.parse(row["spec"]) == klamp.parse(PRESETS[row["name"]].usual)
        assert [klamp.parse(part) for part in row["parts"]]
        assert row["summary"]
        assert row["citation"]
        assert row["equation"]
        assert row["aggregate"]
    widths = {len(line) for line in table.splitlines()}
    assert len(widths) == 1  # aligned


def test_presets_as_json_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rows()
    assert main(["presets", "--table"]) == 0
    assert capsys.readouterr().out == markdown() + "\n"


# --- diff -----------------------------------------------------------------------------------------------------


def test_parts_that_differ() -> None:
    found = parts(klamp.parse("grpo()"), klamp.parse("atr_grpo(delta=0.02)"))
    assert [part["slot"] for part in found] == ["guard"]
    assert found[0]["differs"] == {"inside": ["0.8 <= w <= 1.2", "k3 <= 0.02: 0.81311 <= w <= 1.2135"]}
    found = parts(klamp.parse("dual_clip()"), klamp.parse("dapo() + entropy_bonus()"))
    assert [part["slot"] for part in found] == ["guard", "guard", "penalty", "aggregate"]
    assert {"inside": ["0.8 <= w <= 1.2", "0.8 <= w <= 1.28"]} in [part["differs"] for part in found]
    assert [part["b"] for part in found if part["a"] and "negative" in part["a"]] == [None]  # dual clip's alone
    assert parts(klamp.parse("grpo(epsilon=0.2)"), klamp.parse("grpo")) == []


def test_tokens_that_differ_are_those_between_the_bounds() -> None:
    """GRPO's [0.8, 1.2] and ATR-GRPO's [0.8131, 1.2135], counted by hand on the standard batch."""
    batch = standard_batch(3)
    w, a = (batch.logp_new - batch.logp_old).exp(), batch.advantages.expand(batch.shape)
    low, high = 0.8131051152131157, 1.2135497071517296
    up, down, live = batch.mask & (a > 0), batch.mask & (a < 0), batch.mask & (a != 0)
    grpo, atr = (up & (w > 1.2)) | (down & (w < 0.8)), (up & (w > high)) | (down & (w < low))
    found = diff(klamp.parse("grpo"), klamp.parse("atr_grpo"), seed=3)
    counts = found["tokens"]["counts"]
    assert counts["cut_by_a_only"] == int((grpo & ~atr).sum()) > 0
    assert counts["cut_by_b_only"] == int((atr & ~grpo).sum()) > 0
    assert counts["cut_by_both"] == int((atr & grpo).sum()) > 0
    assert counts["g_differs"] == counts["cut_by_a_only"] + counts["cut_by_b_only"]
    lengths = batch.mask.sum(dim=1, keepdim=True) * 64
    g, h = (torch.where(live & ~cut, a * w, 0.0) / lengths for cut in (grpo, atr))
    assert found["tokens"]["cosine"] == pytest.approx(float((g * h).sum() / (g.norm() * h.norm())), rel=1e-12)
    assert found["tokens"]["norm_ratio"] == pytest.approx(float(h.norm() / g.norm()), rel=1e-12)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_does_not_differ_from_itself_and_runs_on_the_standard_batch(name: str) -> None:
    spec = klamp.parse("dr_grpo(divisor=100)" if name == "dr_grpo" else PRESETS[name].usual)
    found = diff(spec, klamp.parse(str(spec)))
    assert found["equal"]
    assert found["parts"] == []
    assert set(found["tokens"]["counts"].values()) - {found["tokens"]["counts"]["cut_by_both"]} <= {0}
    assert found["tokens"]["cosine"] == pytest.approx(1.0)
    assert found["tokens"]["norm_ratio"] == 1.0
    assert found["batch"]["tokens"] > 4000


def test_the_two_ways_to_write_kl3_treat_every_token_alike(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "power_clip(a=0.0, radius=0.02)", "atr_grpo(delta=0.02)", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["equal"]
    assert found["tokens"]["counts"]["g_differs"] == 0
    assert main(["diff", "grpo", "grpo + kl_reference(beta=0.1)"]) == 0
    out = capsys.readouterr().out
    assert "kl_reference(beta=0.1)" in out
    assert "penalty differs                                   4" in out


def records(folder: Path, **changes: Any) -> Path:
    """Two steps of a run: three completions in the first, of which one was sampled without log-probs, one in the next."""
    with RecordWriter(folder) as writer:
        for step, row, length in ((0, 0, 3), (0, 1, 2), (0, 2, 1), (1, 0, 2)):
            line: dict[str, Any] = {
                "prompt_id": "p", "group": 7, "row": row, "step": step, "micro_step": 0, "token_ids": [1] * length,
                "logp_new": [-0.5] * length, "logp_old": [-1.0] * length,
                "logp_rollout": None if row == 2 else [-1.0] * length, "logp_ref": None,
                "advantage": [1.0] * length, "mask": [True] * length, "reward": 1.0, "entropy": None,
                "kept": [True] * length, "g": [1.0] * length,
            }  # fmt: skip
            writer.write([line | changes])
    return folder


def test_diff_on_the_tokens_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = recorded_steps(records(tmp_path / "tokens"))
    assert [int(step.mask.sum()) for step in steps] == [5, 2]  # the completion without rollout log-probs is excluded
    assert main(["diff", "reinforce", "grpo", "--batch", str(tmp_path / "tokens"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batch"] == {"kind": "given", "seed": None, "steps": 2, "responses": 3, "tokens": 7}
    assert found["tokens"]["counts"]["cut_by_b_only"] == 7  # w = e^0.5 with A = 1
    assert (found["tokens"]["cosine"], found["tokens"]["norm_ratio"]) == (None, 0.0)
    assert main(["diff", "grpo", "grpo + kl_reference()", "--batch", str(tmp_path / "tokens")]) == 2
    assert "needs logp_ref" in capsys.readouterr().err
    assert main(["diff", "grpo", "dapo", "--batch", str(records(tmp_path / "none", logp_new=None))]) == 2
    assert "hold no logp_new" in capsys.readouterr().err


def test_records_without_an_old_policy_are_on_policy(tmp_path: Path) -> None:
    (step, _) = recorded_steps(records(tmp_path / "tokens", logp_old=None))
    assert torch.equal(step.logp_old[step.mask], step.logp_new[step.mask])


def test_the_standard_batch_offers_everything_a_spec_may_need() -> None:
    batch = standard_batch()
    assert batch.offers >= {"logp_rollout", "logp_ref", "entropy", "group", "row", "segment", "reward"}
    assert batch.offers >= {f"divergences[{name}]" for name in klamp.conditions.WHOLE}
    p, q = batch.logp_old.exp(), batch.logp_new.exp()
    assert bool(((p < 1) & (p > 0) & (q < 1) & (q > 0)).all())
