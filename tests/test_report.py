"""The report: its pictures agree with the numbers, and nothing that a run recorded can act on the page."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from run_page import HOSTILE, LOG_HIGH, LOG_LOW, Page, fake_run, lines_of, page_of

from klamp.errors import UserError
from klamp.report import write_report
from klamp.report.charts import nice_step, number, smooth, thin, tick_labels, ticks
from klamp.report.sections import EDGES

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


TITLES = [
    "Reward",
    "Held-out accuracy",
    "Entropy",
    "KL(old || new)",
    "Gradient removed",
    "Outside the region",
    "Ratios and the region",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return page_of(run)


@pytest.mark.parametrize(
    ("title", "css", "event", "name", "top"),
    [
        ("Reward", "raw one", "train", "train/reward_mean", 0.8),
        ("Held-out accuracy", "one", "eval", "eval/accuracy_sampled", 1.0),
        ("Held-out accuracy", "two", "eval", "eval/accuracy_greedy", 1.0),
        ("Entropy", "raw one", "train", "policy/entropy_mean", 0.8),
        ("KL(old || new)", "raw one", "train", "policy/kl_old_new_mean", 0.015),
        ("Gradient removed", "raw low", "train", "guard/removed_low_share", 0.06),
        ("Gradient removed", "raw high", "train", "guard/removed_high_share", 0.06),
        ("Outside the region", "raw low", "train", "guard/outside_low_share", 0.15),
        ("Outside the region", "raw high", "train", "guard/outside_high_share", 0.15),
    ],
)
def test_lines_are_the_metrics(run, page, title, css, event, name, top):
    drawn = page.polyline(page.figure(title), css)
    rows = lines_of(run, event)
    assert len(drawn) == len(rows)
    for (step, value), row in zip(drawn, rows, strict=True):
        assert step == pytest.approx(row["step"], abs=0.003)
        assert value == pytest.approx(row[name], abs=1e-4 * top)


def test_thick_line_is_the_mean_of_eleven_steps(run, page):
    figure = page.figure("Reward")
    thick = [line for line in page.find("polyline", "one", figure) if "raw" not in line["attrs"]["class"]]
    raw = [row["train/reward_mean"] for row in lines_of(run, "train")]
    assert smooth(list(enumerate(raw)))[0][50][1] == pytest.approx(sum(raw[45:56]) / 11, rel=1e-14)
    assert smooth(list(enumerate(raw)))[0][0][1] == pytest.approx(sum(raw[:6]) / 6, rel=1e-14)
    (y0, low), *_, (y1, high) = page.axis(figure, "y")
    drawn = float(thick[0]["attrs"]["points"].split()[50].split(",")[1])
    assert low + (drawn - y0) / (y1 - y0) * (high - low) == pytest.approx(sum(raw[45:56]) / 11, abs=1e-4)
    assert "thick: the mean over 11 steps" in figure["text"]


def test_histogram_sums_the_last_quarter_and_draws_the_bounds(run, page):
    figure = page.figure("Ratios and the region")
    sums = [0] * 64
    for row in lines_of(run, "train"):
        if row["step"] > 75:
            sums = [a + b for a, b in zip(sums, row["policy/ratio_histogram"], strict=True)]
    (x0, r0), *_, (x1, r1) = page.axis(figure, "x")
    slope = (x1 - x0) / (math.log(r1) - math.log(r0))
    (y0, n0), *_, (y1, n1) = page.axis(figure, "y")
    rise = (y1 - y0) / (math.log10(n1) - math.log10(n0))
    for side, log_bound, label in (
        ("low", LOG_LOW, "low bound 0.8131"),
        ("high", LOG_HIGH, "high bound 1.214"),
    ):
        (line,) = page.find("line", f"bound {side}", figure)
        assert float(line["attrs"]["x1"]) == pytest.approx(x0 + slope * (log_bound - math.log(r0)), abs=0.02)
        assert line["attrs"]["x1"] == line["attrs"]["x2"]
        assert label in [text["text"] for text in page.find("text", "bound-label", figure)]
    held = [k for k in range(64) if sums[k]]
    groups = page.find("g", "", figure)
    assert len(groups) == len(held)
    for group, k in zip(groups, held, strict=True):
        assert group["text"].endswith(f": {sums[k]:,} tokens")
        bars = page.find("rect", "bar", group)
        left = min(float(bar["attrs"]["x"]) for bar in bars)
        assert left == pytest.approx(x0 + slope * (EDGES[k] - math.log(r0)), abs=0.02)
        for bar in bars:
            top = float(bar["attrs"]["y"])
            assert top == pytest.approx(y0 + rise * (math.log10(sums[k]) - math.log10(n0)), abs=0.02)
            middle = math.log(r0) + (float(bar["attrs"]["x"]) + 0.5 * float(bar["attrs"]["width"]) - x0) / slope
            tone = "low" if middle < LOG_LOW else "high" if middle > LOG_HIGH else "inside"
            assert tone in bar["attrs"]["class"].split()
    split = [group for group in groups if len(page.find("rect", "bar", group)) == 2]
    assert len(split) == 2  # the bins that a bound crosses
    assert f"steps 76 to 100 (the last quarter), {sum(sums):,} tokens" in figure["text"]


def test_header_shows_the_run(page):
    (header,) = page.find("header")
    assert page.find("h1")[0]["text"] == "atr_grpo(delta=0.02)"
    for shown in (
        "39.1% \N{RIGHTWARDS ARROW} 75.2%",
        "+36.1 points",
        "55.5% \N{RIGHTWARDS ARROW} 81.2%",
        "+25.7 points",
        "sort_digits",
        "torch 2.13.0",
        "klamp train --spec 'atr_grpo(delta=0.02)' --seed 0",
        "0.813105 \N{LESS-THAN OR EQUAL TO} new/old \N{LESS-THAN OR EQUAL TO} 1.21355",
        "1 min 47 s",
        "2026-03-01 10:01 UTC",
        "4f0c2b9e77a1",
    ):
        assert shown in header["text"], shown


def test_page_is_accessible_and_needs_nothing_else(run, page):
    assert [h["text"] for h in page.find("h3")] == TITLES
    pictures = page.find("svg")
    assert len(pictures) == len(TITLES)
    for picture, title in zip(pictures, TITLES, strict=True):
        assert picture["attrs"]["role"] == "img"
        assert picture["attrs"]["aria-label"].startswith(title)
        assert picture["attrs"]["viewbox"]
    assert "mean reward 0.7" in pictures[0]["attrs"]["aria-label"]
    assert not [e for e in page.all if e["tag"] in ("img", "link", "iframe", "object", "embed", "form", "base")]
    for element in page.all:
        for name, value in element["attrs"].items():
            assert name not in ("src", "href", "xlink:href", "srcset", "style", "action"), (
                element["tag"],
                name,
            )
            assert not name.startswith("on"), (element["tag"], name)
            assert "://" not in (value or ""), (element["tag"], name)
    source = (run / "report.html").read_text()
    assert "http:" not in source
    assert "https:" not in source
    assert "url(" not in source
    assert "@import" not in source
    (policy,) = [e for e in page.find("meta") if e["attrs"].get("http-equiv") == "Content-Security-Policy"]
    assert policy["attrs"]["content"].startswith("default-src 'none';")
    assert "unsafe" not in policy["attrs"]["content"]


def test_hostile_text_is_text(tmp_path):
    run = fake_run(tmp_path, steps=20)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest |= dict.fromkeys(("klamp", "spec", "git_commit", "task", "started", "finished", "seed"), HOSTILE)
    manifest |= {
        "command": [HOSTILE],
        "versions": {HOSTILE: HOSTILE},
        "results": HOSTILE,
        "schema": HOSTILE,
        "region": {"log_low": HOSTILE, "log_high": None, "ratio": HOSTILE},
    }
    (run / "manifest.json").write_text(json.dumps(manifest))
    sample = dict.fromkeys(("step", "prompt", "completion", "answer", "reward"), HOSTILE)
    odd = {
        "step": None,
        "prompt": [{"role": HOSTILE}],
        "completion": "a\x00b\x1b[31m\ud800\u202e",
        "reward": 1,
    }
    (run / "samples.jsonl").write_text(json.dumps(sample) + "\n" + json.dumps(odd) + "\n")
    page = page_of(run)
    scripts = page.find("script")
    assert len(scripts) == 1
    assert "owned" not in scripts[0]["text"]
    assert not page.find("img")
    assert len(page.find("svg")) == len(TITLES)
    first, second = page.find("tr")[1:]
    assert [cell["text"] for cell in page.find("td", "", first)] == [HOSTILE] * 5
    assert page.find("td", "completion", second)[0]["text"] == "a\u2400b\u241b[31m\\ud800\u202e"
    assert HOSTILE in page.find("h1")[0]["text"]


def test_missing_metrics_are_said_and_nulls_are_gaps(tmp_path):
    run = fake_run(tmp_path, steps=20)
    rows = [
        {"step": step, "event": "train", "train/reward_mean": value, "policy/entropy_mean": None}
        for step, value in enumerate([0.1, 0.2, None, 0.4, float("nan"), 0.5, 0.6, "x"])
    ]
    rows[6]["policy/ratio_histogram"] = [1] * 63
    rows[7]["policy/ratio_histogram"] = [-1] * 64
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "manifest.json").write_text("{")
    (run / "samples.jsonl").unlink()
    page = page_of(run)
    for title in TITLES[1:]:
        assert page.find("text", "empty", page.figure(title))[0]["text"] == "not recorded"
    reward = page.figure("Reward")
    assert [len(line["attrs"]["points"].split()) for line in page.find("polyline", "", reward)] == [2, 2]
    assert len(page.find("circle", "point", reward)) == 5
    (notes,) = page.find("section", "notes")
    assert [item["text"] for item in page.find("li", "", notes)] == [
        "manifest.json cannot be read.",
        "samples.jsonl is missing.",
        "train/reward_mean: 2 values were not a finite number and shown as a gap.",
        "policy/ratio_histogram: 2 lines were not 64 counts and left out.",
    ]


@pytest.mark.parametrize("cut", [1, 7, 40, 400])
def test_a_run_killed_while_writing_still_reports(tmp_path, cut):
    run = fake_run(tmp_path, steps=30)
    manifest = json.loads((run / "manifest.json").read_text()) | {"finished": None, "results": {}}
    (run / "manifest.json").write_text(json.dumps(manifest))
    metrics = (run / "metrics.jsonl").read_bytes()
    evals = [row["eval/accuracy_sampled"] for row in lines_of(run, "eval")]
    (run / "metrics.jsonl").write_bytes(metrics[: -1 - cut])
    page = page_of(run)
    (notes,) = page.find("section", "notes")
    assert notes["text"].endswith("metrics.jsonl: 1 line, the last, is cut off (the run was stopped) and left out.")
    assert len(page.polyline(page.figure("Reward"), "one")) == 29
    shown = f"{number(evals[0], True)} \N{RIGHTWARDS ARROW} {number(evals[-1], True)}"
    (header,) = page.find("header")
    assert shown in header["text"]
    assert "at step 0, and at step 30" in header["text"]
    assert "not finished" in header["text"]


def test_bad_lines_are_counted_and_a_resumed_run_replaces(tmp_path):
    run = fake_run(tmp_path, steps=10)
    rows = [
        b'{"step": 1, "event": "train", "train/reward_mean": 0.25}',
        b"\xff\xfe",
        b"[1]",
        b"[" * 100_000,
        b'{"step": true, "event": "train"}',
        b'{"step": 1, "event": "other"}',
        b'{"event": "train"}',
        b'{"step": 1' + b"0" * 400 + b', "event": "train"}',
        b"",
        b'{"step": 2, "event": "train", "train/reward_mean": 1' + b"0" * 400 + b"}",
        b'{"step": 1, "event": "train", "train/reward_mean": 0.75}',
    ]
    (run / "metrics.jsonl").write_bytes(b"\n".join(rows) + b"\n")
    page = page_of(run)
    (notes,) = page.find("section", "notes")
    assert [item["text"] for item in page.find("li", "", notes)] == [
        "metrics.jsonl: 3 lines were unreadable and left out.",
        "metrics.jsonl: 1 line was replaced by later lines about the same step.",
        "metrics.jsonl: 4 lines were without a step or a known event, and left out.",
        "train/reward_mean: 1 value was not a finite number and shown as a gap.",
    ]
    figure = page.figure("Reward")
    (point,) = page.find("circle", "point", figure)
    (a, low), *_, (b, high) = page.axis(figure, "y")
    assert low + (float(point["attrs"]["cy"]) - a) / (b - a) * (high - low) == pytest.approx(0.75, abs=1e-4)


def test_empty_files_and_no_run(tmp_path):
    with pytest.raises(UserError, match=r"holds none of manifest\.json, metrics\.jsonl, samples\.jsonl"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="is not a directory"):
        write_report(tmp_path / "none")
    for name in ("manifest.json", "metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).touch()
    page = page_of(tmp_path)
    assert [e["text"] for e in page.find("text", "empty")] == ["not recorded"] * len(TITLES)
    assert sorted(path.name for path in tmp_path.iterdir())[-2:] == ["report.html", "samples.jsonl"]


def test_regions_that_are_not_in_the_picture(tmp_path):
    run = fake_run(tmp_path, steps=20)
    manifest = json.loads((run / "manifest.json").read_text())

    def figure_with(region: object) -> tuple[Page, dict[str, Any]]:
        (run / "manifest.json").write_text(json.dumps(manifest | {"region": region}))
        page = page_of(run)
        return page, page.figure("Ratios and the region")

    page, figure = figure_with(None)
    assert not page.find("line", "bound", figure)
    assert "has no bounds on this ratio" in figure["text"]
    page, figure = figure_with({"log_low": None, "log_high": math.log(3.0), "ratio": "new/old"})
    assert [e["text"] for e in page.find("text", "bound-label", figure)] == ["high bound 3"]
    page, figure = figure_with({"log_low": -5.0, "log_high": 0.1, "ratio": "new/old"})
    assert "The low bound, 0.006738, is outside the picture." in figure["text"]
    assert len(page.find("line", "bound", figure)) == 1
    page, figure = figure_with({"log_low": -0.1, "log_high": 0.1, "ratio": "new/rollout"})
    assert not page.find("line", "bound", figure)
    assert "bounds are of new/rollout" in figure["text"]
    page, figure = figure_with({"log_low": -1e300, "log_high": 1e300, "ratio": "new/old"})
    assert not page.find("line", "bound", figure)
    page, figure = figure_with({"log_low": -3e-4, "log_high": 4e-4, "ratio": "new/old"})
    low, high = (float(e["attrs"]["x1"]) for e in page.find("line", "bound", figure))
    assert 0 < high - low < 2


def test_long_runs_are_averaged_and_long_texts_cut(tmp_path):
    run = fake_run(tmp_path, steps=2000)
    page = page_of(run)
    drawn = page.polyline(page.figure("Reward"), "raw one")
    raw = [row["train/reward_mean"] for row in lines_of(run, "train")]
    assert len(drawn) == 500
    assert "Each point is the mean of 4 logged steps." in page.figure("Reward")["text"]
    assert drawn[10] == (pytest.approx(44, abs=0.1), pytest.approx(sum(raw[40:44]) / 4, abs=1e-4))
    assert (run / "report.html").stat().st_size < 500_000
    assert len(page.find("tr")) == 1 + 24
    assert "24 of the 401 that were recorded" in page.find("main")[0]["text"]
    (run / "samples.jsonl").write_text(json.dumps({"step": 1, "completion": "é" * 5000}) + "\n")
    (cell,) = page_of(run).find("td", "completion")
    assert cell["text"] == "é" * 1200 + "3,800 more characters in samples.jsonl"


def test_round_numbers():
    assert [nice_step(span, 5) for span in (1.0, 0.7, 3.0, 24, 0.0031)] == [0.2, 0.2, 1.0, 5.0, 0.001]
    assert ticks(0.0, 0.62) == [0.0, 0.2, 0.4, 0.6, 0.8]
    assert ticks(-0.5, 1.0) == [-0.5, 0.0, 0.5, 1.0]
    assert ticks(1, 3, 6, whole=True) == [1, 2, 3]
    assert tick_labels([0, 0.005, 0.01]) == ["0", "0.005", "0.010"]
    assert tick_labels([-0.5, 0, 1], percent=True) == ["\N{MINUS SIGN}50%", "0%", "100%"]
    assert [number(v) for v in (0, 0.5, 0.0123, 12.3456, 123456.0, -2e-7, 1e9)] == [
        "0",
        "0.5",
        "0.012",
        "12.35",
        "123456",
        "\N{MINUS SIGN}2.00e\N{MINUS SIGN}7",
        "1.00e9",
    ]
    assert [number(v, True) for v in (0.39062, 1.0, 0.0305)] == ["39.1%", "100%", "3.05%"]
    assert thin([(k, float(k)) for k in range(5)] + [(5, None)], limit=2) == ([(2, 1.0), (5, 3.5)], 3)


def browse(page: Path, profile: Path, *arguments: str) -> str:
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={profile}",
        *arguments,
        page.as_uri(),
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")
def test_in_a_browser(tmp_path):
    run = fake_run(tmp_path / "run")
    page = write_report(run)
    dump = browse(page, tmp_path / "profile", "--dump-dom")
    assert "<title>atr_grpo(delta=0.02) - Klamp run report</title>" in dump  # and not "owned"
    assert len(re.findall(r"<svg[ >]", dump)) == len(TITLES)
    assert "<img" not in dump
    assert dump.count("<script>") == 1
    assert "&lt;script&gt;document.title=" in dump

    assert dump.count(' class="ready"') == 6  # the page's own script ran: its hash is in the policy

    # The same with escaping undone: the policy alone still stops the script, and without it the script runs.
    naked = page.read_text().replace("&lt;script&gt;", "<script>").replace("&lt;/script&gt;", "</script>")
    naked = naked.replace("&quot;owned&quot;", '"owned"')
    move = """<script>
    const svg = document.querySelector("svg"), box = svg.getBoundingClientRect();
    const x = box.left + box.width * (56 + 49.3 / 99 * (480 - 14 - 56)) / 480;
    svg.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: box.top + 50 }));
    </script>"""
    (tmp_path / "guarded.html").write_text(naked)
    (tmp_path / "bare.html").write_text(
        naked.replace("Content-Security-Policy", "x").replace("</body>", move + "</body>")
    )
    assert "<title>atr_grpo(" in browse(tmp_path / "guarded.html", tmp_path / "profile2", "--dump-dom")
    dump = browse(tmp_path / "bare.html", tmp_path / "profile3", "--dump-dom")
    assert "<title>owned</title>" in dump

    # The pointer at step 50.3 shows the numbers of step 50.
    reward = next(row["train/reward_mean"] for row in lines_of(run, "train") if row["step"] == 50)
    bare = Page(dump)
    figure = bare.figure("Reward")
    assert float(bare.find("b", "", figure)[0]["text"]) == pytest.approx(reward, abs=1e-4)
    assert bare.find("span", "at", figure)[0]["text"] == "at step 50"
    assert float(bare.find("line", "cross", figure)[0]["attrs"]["x1"]) == pytest.approx(56 + 49 / 99 * 410)
