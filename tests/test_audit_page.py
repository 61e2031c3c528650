"""The page and the table of an audit: their numbers are the results', foreign text stays text, nothing is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from audit_parts import rows, write
from devtools import BROWSER, Tab
from run_page import HOSTILE

from klamp.audit.command import audit
from klamp.audit.page import render
from klamp.audit.text import percent, text
from klamp.cli import main

SPECS = ["grpo", "atr_grpo(delta=0.005)", "gspo"]
BY = ("side", "old_prob", "position", "advantage", "token", "entropy")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records in a folder whose name is markup, every third group without a signal."""
    folder = tmp_path_factory.mktemp("log") / HOSTILE.replace("/", "")
    found = rows(4, steps=12, responses=48, spread=0.2)
    return write(
        folder, [row | ({"logp_rollout": [float("nan")] * len(row["mask"])} if row["row"] < 3 else {}) for row in found]
    )


@pytest.fixture(scope="module")
def found(log: Path) -> dict[str, Any]:
    result = audit([str(log)], SPECS, by=BY)
    for spec in result["specs"]:
        for row in spec["tokens_cut_most"]:
            row["text"] = HOSTILE
    return result | {
        "notes": [HOSTILE],
        "findings": result["findings"] + [dict.fromkeys(("name", "what", "evidence", "do"), HOSTILE)],
    }


def test_foreign_text_is_text(found: dict[str, Any]) -> None:
    page = render(found | {"files": [HOSTILE]})
    assert "<script>document" not in page
    assert "<img" not in page
    assert page.count("&lt;script&gt;document.title") > 40
    assert re.search(r"default-src 'none'", page)
    assert "http" not in re.sub(r"http-equiv|http://www.w3.org/2000/svg", "", page)


def test_the_page_has_the_numbers(found: dict[str, Any]) -> None:
    page = render(found)
    for spec in found["specs"]:
        assert percent(spec["removed"]["share"]) in page
        for row in spec["slices"]["old_prob"]:
            assert f"<td>{row['removed_low']:,}</td>" in page
        assert f"Removed by {spec['label']}" in page


def test_a_log_of_one_step_without_specs_or_findings_has_a_page(tmp_path: Path) -> None:
    found = audit([str(write(tmp_path, rows(steps=1, updates=1)))], [])
    assert found["specs"] == []
    assert "What is wrong" in render(found)
    assert "log        " in text(found)


def test_the_json_is_the_audit(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", str(log), *(word for spec in SPECS for word in ("--spec", spec)), "--jobs", "1"]
    assert main([*words, "--json", "--html", str(tmp_path / "a.html")]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found == json.loads(json.dumps(audit([str(log)], SPECS, by=("old_prob", "position"))))
    assert err == f"wrote {tmp_path / 'a.html'}\n"
    assert (tmp_path / "a.html").read_text() == render(found)
    assert not list(tmp_path.glob(".*"))


def test_the_table_says_which_side_was_cut_most_and_where(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(log), "--spec", "grpo", "--by", ",".join(BY), "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    spec = audit([str(log)], ["grpo"])["specs"][0]
    side = "low" if spec["removed"]["low"] >= spec["removed"]["high"] else "high"
    said = " ".join(out.split())
    assert (
        f"grpo cuts most on the {side} side: {spec['removed'][side]:,} of {spec['removed']['tokens']:,} tokens" in said
    )
    assert f"new/old = {0.8 if side == 'low' else 1.2}" in said
    for name in BY:
        assert f"grpo by {name}" in out
    assert "! the sampler's log-probs are missing in some responses" in out


def test_terminals_see_no_control_characters(found: dict[str, Any]) -> None:
    for spec in found["specs"]:
        for row in spec["tokens_cut_most"]:
            row["text"] = "\x1b[31mred\n"
    assert "\x1b" not in text(found, BY)


def test_the_runs_own_spec_and_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "tokens", rows(spread=0.2))
    (tmp_path / "manifest.json").write_text(json.dumps({"spec": "dapo"}))
    assert main(["audit", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["specs"][0]["spec"] == "dapo()"
    (tmp_path / "manifest.json").unlink()
    assert main(["audit", str(tmp_path)]) == 0
    assert "judged by atr_grpo" in capsys.readouterr().err
    for bad in (b"{}", b"[" * 100_000, b"\xff"):
        (tmp_path / "tokenizer.json").write_bytes(bad)
        assert main(["audit", str(tmp_path), "--tokenizer", str(tmp_path)]) == 2
        assert "cannot be read" in capsys.readouterr().err


def test_the_example_of_the_docs_runs() -> None:
    (block,) = re.findall(
        r"```python\n(.*?)```", (Path(__file__).parents[1] / "docs" / "audit.md").read_text(), re.DOTALL
    )
    names: dict[str, Any] = {"__name__": "docs"}
    exec(compile(block, "audit.md", "exec"), names)
    assert audit([names["folder"]], ["grpo"])["log"]["responses"] > 0


# --- in a browser ---------------------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    made = Tab(tmp_path_factory.mktemp("profile"))
    made.offline()
    yield made
    made.close()


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_it_opens_offline_and_nothing_acts(found: dict[str, Any], tab: Tab, tmp_path: Path, width: int) -> None:
    (tmp_path / "a.html").write_text(render(found))
    tab.view(width, 900, dark=width > 500)
    tab.open(tmp_path / "a.html")
    assert tab.errors() == []
    assert tab.run("document.title") != "owned"
    assert HOSTILE in tab.run("document.querySelector('.finding:last-of-type').textContent")
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert tab.run("document.querySelectorAll('#specs table').length") == 2
    assert tab.run("document.querySelectorAll('#where .share').length") > 20
    bar = tab.run("getComputedStyle(document.querySelector('#where .bar.low')).fill")
    assert bar not in ("rgb(0, 0, 0)", "none")
    hover = "document.querySelector('#steps svg').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft', bubbles: true}));"
    assert "at step" in tab.run(f"{hover} document.querySelector('#steps .at').textContent")
