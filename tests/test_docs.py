"""Documents are executed: the README's Python runs, its numbers are true, and the metrics page names what is emitted."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch

import klamp
from klamp.cli import main
from klamp.metrics import METRICS, OBJECTIVE, TRAINER

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[str(i) for i in range(len(BLOCKS))])
def test_python_blocks_run(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_the_table_of_coordinates_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    rows = re.findall(r"\| \[([\d.]+), ([\d.]+)\] \| (-?[\d.]+) \| ([\d.]+) \| `klamp explain '?(.*?)'?` \|", README)
    assert len(rows) == 3
    for low, high, a, radius, spec in rows:
        assert main(["explain", spec, "--json"]) == 0
        region = json.loads(capsys.readouterr().out)["guards"][0]["region"]
        found = (region["low"], region["high"], region["coordinates"]["a"], region["coordinates"]["radius"])
        for text, value in zip((low, high, a, radius), found, strict=True):
            digits = len(text.partition(".")[2])
            assert f"{value:.{digits}f}" == text


def test_the_readme_names_every_preset_and_measure() -> None:
    for name in [*klamp.list_presets(), *klamp.measures.MEASURES]:
        assert re.search(rf"\b{name}\b", README), name


def test_the_tables_of_the_studies_are_those_of_their_results() -> None:
    spec = importlib.util.spec_from_file_location("collect", ROOT / "studies" / "collect.py")
    assert spec
    assert spec.loader
    collect = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(collect)
    for page in (ROOT / "docs" / "results.md", ROOT / "README.md"):
        assert collect.filled(page.read_text()) == page.read_text()
    for file in sorted((ROOT / "studies").glob("*.yaml")):
        assert f"studies/{file.name}" in file.read_text()
        assert (ROOT / "studies" / "results" / f"{file.stem}.json").exists()


def test_the_tables_of_the_kernels_are_those_of_their_results() -> None:
    spec = importlib.util.spec_from_file_location("kernels", ROOT / "benchmarks" / "kernels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page, found = (ROOT / "docs" / "kernels.md").read_text(), json.loads((ROOT / "docs" / "kernels.json").read_text())
    assert module.filled(page, found) == page
    assert set(re.findall(r"<!-- (\w+ \w+) -->", page)) == set(found["measured"])


def test_the_metrics_page_is_the_table() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(.*?)` \| (.*) \| (.*?) \|$", page, re.MULTILINE)
    assert [(name, text.replace("\\|", "|"), span) for name, text, span in rows] == [
        (n, *d) for n, d in METRICS.items()
    ]


def test_the_objective_emits_what_is_documented() -> None:
    """Every documented metric of the objective is emitted by some batch, and nothing else is."""
    emitted: set[str] = set()
    mask = torch.ones(2, 3, dtype=torch.bool)
    logp = -torch.rand(2, 3)
    rollout = logp.clone()
    rollout[0, 0] = torch.nan
    for spec in ("grpo() + kl_reference()", "dapo() + sequence_mask()", "dapo() + rs_k3()"):
        batch = klamp.Batch(
            logp.clone().requires_grad_(), logp, torch.ones(2), mask, logp_ref=logp, entropy=-logp, phi_mean=-logp,
            logp_rollout=rollout,
        )  # fmt: skip
        emitted |= set(klamp.Objective(spec)(batch).metrics.show())
    batch = klamp.Batch(logp, logp, torch.ones(2), mask, logp_rollout=rollout, missing="token")
    emitted |= set(klamp.Objective("sequence_mask()")(batch).metrics.show())
    assert emitted == set(OBJECTIVE) - {"batch/nonfinite_count"}  # counted on CUDA; raised at once on the CPU


def test_a_run_emits_what_is_documented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from train_parts import save_tiny_model

    words = ["train", "--eval-samples", "2", "--model", str(save_tiny_model(tmp_path / "m")), "--max_steps", "2", "--logging_steps", "1",
             "--per_device_train_batch_size", "8", "--steps_per_generation", "1", "--eval-size", "4",
             "--spec", "cispo() + kl_reference(beta=0.1) + guard(measure='topk_tv', radius=0.9)", "--out", str(tmp_path / "run")]  # fmt: skip
    assert main(words) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    named = {name for line in lines for name in line} - {"step", "event", "seconds"}
    only_elsewhere = {
        "batch/missing_rows_count",
        "batch/missing_tokens_count",
        "batch/nonfinite_count",
        "guard/dropped_count",
    }
    assert named == set(METRICS) - only_elsewhere
    assert set(TRAINER) <= named


@pytest.mark.parametrize(("spec", "name"), [("atr_grpo(delta=0.02)", "atr_grpo"), ("dapo", "dapo")])
def test_figures_are_current(spec: str, name: str) -> None:
    from klamp.plot import svg

    assert (ROOT / "docs" / "figures" / f"{name}.svg").read_text().strip() == svg(klamp.parse(spec)).strip()
