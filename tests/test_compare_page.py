"""The page of a comparison: its pictures agree with the numbers, foreign text stays text, few seeds rank nothing."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from devtools import BROWSER, Tab
from run_page import HOSTILE, Page

from klamp.compare.report import canvas, curves, render, write
from klamp.compare.report.data import read
from klamp.errors import UserError

Json = dict[str, Any]

NAMES = (
    ("atr_grpo", "atr_grpo(delta=0.02)", (0.8182, 1.2070, 0.0, 0.02)),
    ("grpo", "grpo()", (0.8, 1.2, 2.0, 0.02)),
    ("dapo", "dapo(low=0.2, high=0.28)", (0.8, 1.28, -2.3032, 0.0277647)),
    ("dual_clip(base=dapo()) + sequence_mask(high=3.0)", "dual_clip(base=dapo(low=0.2, high=0.28), c=3.0) + sequence_mask(high=3.0)", (0.8, 1.28, -2.3032, 0.0277647)),
    ("gspo", "gspo()", (0.9997, 1.0004, -2508.0, 6e-8)),
    ("cispo", "cispo(high=5.0)", None),
    ("dppo_tv(delta=0.15)", "dppo_tv(delta=0.15)", None),
    ("no upper bound", "guard(region=ratio(low=0.5))", (0.5, None, None, None)),
    ("truly_ppo", "truly_ppo(delta=0.03)", (0.7768, 1.2616, 0.0, 0.03)),
    ("js(0.01)", "guard(region=js(0.01))", (0.72, 1.35, 0.5, 0.045)),
)  # fmt: skip
METRICS: dict[str, tuple[str, str, str | None, str]] = {
    "accuracy_sampled": ("final accuracy, sampled", "share", "higher", "held-out problems answered correctly at temperature 1 at the end"),
    "accuracy_greedy": ("final accuracy, greedy", "share", "higher", "held-out problems answered correctly by greedy decoding at the end"),
    "auc": ("area under the curve", "share", "higher", "mean height of the curve of sampled held-out accuracy"),
    "largest_drop": ("largest drop", "share", "lower", "largest fall of sampled held-out accuracy below its best so far"),
    "kl": ("KL(old||new) per token", "nats", None, "mean over optimizer steps of policy/kl_old_new_mean"),
    "entropy_final": ("final entropy", "nats", None, "mean of policy/entropy_mean over the last tenth of the steps"),
    "grad_norm_variance": ("variance of the gradient norm", "norm", "lower", "variance over optimizer steps of the gradient norm"),
}  # fmt: skip
EDGES = [0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0]
STUDENT = {3: 4.303, 5: 2.776, 10: 2.262}


def fake_run(spec: int, seed: int, steps: int) -> Json:
    """One run of one spec: the later specs learn a little less, and the fifth sometimes collapses."""
    rng = random.Random(100 * spec + seed)
    shared = random.Random(seed).gauss(0, 0.015)
    gone = spec == 4 and seed % 4 == 1
    top = 0.75 - 0.012 * spec + shared + rng.gauss(0, 0.008)

    def height(step: int, start: float) -> float:
        grown = start + (top - start) * (1 - math.exp(-step / (0.25 * steps + 6 * spec)))
        return max(0.02, grown * (1 if not gone or step < 0.6 * steps else max(0.05, 1 - 3 * (step / steps - 0.6))))

    evals = range(0, steps + 1, max(1, steps // 8))
    found: dict[str, list[list[Any]]] = {
        "eval/accuracy_sampled": [[step, height(step, 0.39) + rng.gauss(0, 0.008)] for step in evals],
        "eval/accuracy_greedy": [[step, 0.04 + height(step, 0.50) + rng.gauss(0, 0.008)] for step in evals],
        "train/reward_mean": [[step, height(step, 0.40) + rng.gauss(0, 0.05)] for step in range(1, steps + 1)],
        "policy/kl_old_new_mean": [[step, 0.0012 * (1 + 0.5 * spec) * ((step - 1) % 4) ** 1.5 * (1 + rng.random()) * (40 if gone and step > 0.6 * steps else 1)] for step in range(1, steps + 1)],
        "policy/entropy_mean": [[step, max(0.01, 0.6 - (0.3 + 0.02 * spec) * (1 - math.exp(-step / (0.3 * steps))) + rng.gauss(0, 0.01))] for step in range(1, steps + 1)],
        "train/grad_norm": [[step, abs(rng.gauss(0.8, 0.15)) * (30 if gone and step > 0.6 * steps else 1)] for step in range(1, steps + 1)],
        "removed_share": [[step, 0.01 * (1 + spec) * ((step - 1) % 4) * rng.random()] for step in range(1, steps + 1)],
    }  # fmt: skip
    sampled = [value for _, value in found["eval/accuracy_sampled"]]
    numbers = {
        "accuracy_sampled": sampled[-1],
        "accuracy_greedy": found["eval/accuracy_greedy"][-1][1],
        "auc": sum(sampled) / len(sampled),
        "largest_drop": max(max(sampled[: k + 1]) - value for k, value in enumerate(sampled)),
        "kl": sum(v for _, v in found["policy/kl_old_new_mean"]) / steps,
        "entropy_final": found["policy/entropy_mean"][-1][1],
        "grad_norm_variance": 0.02 + 0.01 * rng.random(),
    }
    tokens = [9000, 8000, 12000, 9000, 20000, 40000, 50000, 60000, 90000, 200000]
    anatomy = {
        "edges": EDGES,
        "tokens": tokens,
        "removed_low": [round(n * 0.02 * (1 + spec / 3) * (1 - k / 10) * rng.random()) for k, n in enumerate(tokens)],
        "removed_high": [round(n * 0.05 * (1 - k / 10) ** 2) for k, n in enumerate(tokens)],
        "removed_positive": 2100 + 300 * spec, "removed_negative": 3300, "tokens_positive": 240_000, "tokens_negative": 258_000,
    }  # fmt: skip
    return {"seed": seed, "directory": f"specs/{spec}/seed-{seed}", "status": "finished", "collapsed": gone,
            "metrics": numbers, "curves": found, "anatomy": anatomy}  # fmt: skip


def fake(specs: int = 3, seeds: int = 5, steps: int = 100, **changes: Any) -> Json:
    """A comparison as `klamp compare` hands it over, with plausible numbers."""
    entries = [
        {"label": label, "text": text, "asked": label, "same_as": None, "note": None if bounds else "its bounds depend on the token's probability",
         "region": None if bounds is None else dict(zip(("low", "high", "a", "radius"), bounds, strict=True)) | {"ratio": "new/old"},
         "runs": [fake_run(place, seed, steps) for seed in range(seeds)]}
        for place, (label, text, bounds) in enumerate(NAMES[:specs])
    ]  # fmt: skip
    found = {
        "klamp": "0.1.0", "schema": 1, "task": "sort", "model": "embedded:sort", "base": "grpo()", "whole": False, "calibrated": None,
        "reference": "atr_grpo", "seeds": list(range(seeds)), "steps": steps,
        "manifest": {"command": ["klamp", "compare", "--spec", "atr_grpo(delta=0.02)", "--seeds", str(seeds)], "versions": {"python": "3.11.7", "torch": "2.13.0"},
                     "settings": {"learning_rate": 1e-4, "num_generations": 8}, "git_commit": "4f0c2b9e77a1", "started": "2026-03-01T10:00:00+00:00", "finished": "2026-03-01T10:31:47+00:00"},
        "metrics": {name: dict(zip(("title", "unit", "better", "definition"), known, strict=True)) for name, known in METRICS.items()},
        "specs": entries, "notes": [],
    }  # fmt: skip
    return measured(found | changes)


def measured(found: Json) -> Json:
    """The same with the statistics of its runs; the tests of these are elsewhere."""
    found["summary"], found["differences"] = [], []
    reference = next((spec for spec in found["specs"] if spec["label"] == found["reference"]), None)
    for spec in found["specs"]:
        for name in found["metrics"]:
            values = {run["seed"]: run["metrics"].get(name) for run in spec["runs"]}
            known = {seed: value for seed, value in values.items() if value is not None}
            if known:
                mean, low, high = _interval(list(known.values()))
                found["summary"].append({"label": spec["label"], "metric": name, "n": len(known), "mean": mean, "low": low, "high": high, "iqm": mean,
                                         "min": min(known.values()), "max": max(known.values()), "collapsed": 0})  # fmt: skip
            if reference is None or spec is reference:
                continue
            base = {run["seed"]: run["metrics"].get(name) for run in reference["runs"]}
            pairs = [[seed, value - base[seed]] for seed, value in known.items() if base.get(seed) is not None]
            if pairs:
                mean, low, high = _interval([value for _, value in pairs])
                apart = low is not None and high is not None and (low > 0 or high < 0)
                up = found["metrics"][name]["better"] != "lower"
                verdict = (
                    "too few seeds"
                    if low is None
                    else "no difference found"
                    if not apart
                    else "better"
                    if (mean > 0) == up
                    else "worse"
                )
                found["differences"].append({
                    "label": spec["label"], "metric": name, "n": len(pairs), "mean": mean, "low": low, "high": high, "p": 0.0213, "p_holm": 0.0426 if apart else 0.31,
                    "sign_p": 0.0625, "better": sum(v > 0 for _, v in pairs), "worse": sum(v < 0 for _, v in pairs), "same": 0, "improvement": 0.8,
                    "verdict": verdict, "values": pairs, "needed": 23,
                })  # fmt: skip
    return found


def _interval(values: list[float]) -> tuple[float, float | None, float | None]:
    mean = sum(values) / len(values)
    if len(values) < 3:
        return mean, None, None
    reach = STUDENT.get(len(values), 2.5) * math.sqrt(
        sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values)
    )
    return mean, mean - reach, mean + reach


@pytest.fixture(scope="module")
def three() -> Json:
    return fake()


@pytest.fixture(scope="module")
def page(three: Json) -> Page:
    return Page(render(three))


def hostile() -> Json:
    """A comparison in which every text is an attack, and long."""
    found = fake(3, 3, 40)
    for place, spec in enumerate(found["specs"]):
        spec |= dict.fromkeys(("label", "text", "asked"), f"{HOSTILE} {place} {'verylongword' * 12}") | {
            "note": HOSTILE
        }
        for run in spec["runs"]:
            run |= {"directory": HOSTILE, "status": HOSTILE, "why": HOSTILE}
    found |= dict.fromkeys(("task", "model", "base", "calibrated", "klamp", "steps"), HOSTILE) | {"notes": [HOSTILE]}
    found["reference"] = found["specs"][0]["label"]
    found["manifest"] = dict.fromkeys(found["manifest"], HOSTILE) | {"command": [HOSTILE], "versions": {HOSTILE: HOSTILE}, "settings": {HOSTILE: HOSTILE}}  # fmt: skip
    for metric in found["metrics"].values():
        metric |= {"title": HOSTILE, "definition": HOSTILE, "unit": HOSTILE}
    return measured(found)


def partial() -> Json:
    """A comparison of which much is missing: a run that goes on, a log of another trainer, a spec that has not begun."""
    found = fake(4, 3, 60)
    found["specs"][1]["runs"][2] |= {
        "status": "running",
        "metrics": {},
        "curves": {},
        "anatomy": None,
        "collapsed": None,
    }
    reward = {"train/reward_mean": found["specs"][2]["runs"][0]["curves"]["train/reward_mean"]}
    found["specs"][2] |= {"text": None, "asked": None, "region": None, "note": "from the log of another trainer"}
    found["specs"][2]["runs"] = [{"seed": None, "directory": None, "status": "log", "collapsed": None, "metrics": {"accuracy_sampled": None}, "curves": reward, "anatomy": None}]  # fmt: skip
    found["specs"][3]["runs"] = []
    found["manifest"] = {"command": None}
    return measured(found)


# --- numbers --------------------------------------------------------------------------------------------------


def section(page: Page, name: str) -> Json:
    return next(one for one in page.find("section") if one["attrs"].get("id") == name)


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in path.lstrip("M").split())]


def test_lines_are_the_means_and_the_numbers_under_the_pointer_too(three: Json, page: Page) -> None:
    (script,) = [one for one in page.find("script") if one["attrs"].get("data-for") == "learning-0"]
    data = json.loads(script["text"])
    (chart,) = [one for one in page.find("div", "curves") if one["attrs"]["id"] == "learning-0"]
    lines = page.find("path", "mean", chart)
    seeds = page.find("path", "seed", chart)
    assert (len(lines), len(seeds)) == (3, 15)
    depth = canvas.Frame("tall").depth
    for spec, series, line in zip(three["specs"], data["series"], lines, strict=True):
        columns = [dict(run["curves"]["eval/accuracy_sampled"]) for run in spec["runs"]]
        drawn = points(line["attrs"]["d"])
        for (x, y), step, shown, low, high in zip(
            drawn, columns[0], series["mean"], series["low"], series["high"], strict=True
        ):
            values = [column[step] for column in columns]
            assert shown == pytest.approx(sum(values) / 5, rel=1e-3)
            assert (low, high) == pytest.approx((min(values), max(values)), rel=1e-3)
            assert x == pytest.approx(1000 * step / 96, abs=0.06)
            share = (sum(values) / 5 - data["y"][0]) / (data["y"][1] - data["y"][0])
            assert y == pytest.approx(depth * (1 - share), abs=0.06)
        assert series["n"] == [5] * len(drawn)
    assert "atr_grpo 76" in page.find("svg", "area", chart)[0]["attrs"]["aria-label"]


def test_many_steps_are_averaged_and_smoothed_and_it_is_said() -> None:
    found = read(fake(1, 2, 1000)).drawn
    bundles, size, window = curves.bundles("train/reward_mean", found)
    (one,) = bundles
    assert (size, len(one.mean), window) == (9, 112, 11)
    raw = [dict(run.curves["train/reward_mean"]) for run in found[0].runs]
    middle = [step for step in range(1, 1001) if 9 * 50 < step <= 9 * 61]  # 11 groups of 9
    means = [sum(column[step] for step in middle) / len(middle) for column in raw]
    assert one.mean[9 * 56] == pytest.approx(sum(means) / 2, rel=1e-12)
    assert (one.low[504], one.high[504]) == pytest.approx((min(means), max(means)), rel=1e-12)
    text = Page(render(fake(1, 2, 1000))).figure("Reward")["text"]
    assert "averaged over 99 logged steps" in text
    assert "band (button Range): from the lowest to the highest of 2 seeds" in text


def test_gaps_stay_gaps_and_seeds_may_end_early() -> None:
    spec = read(fake(1, 2, 10)).specs[0]
    one = curves.over(spec, [("0", {1: 0.1, 2: None, 3: 0.3, 4: 0.5}), ("1", {1: 0.3, 2: None, 3: 0.5})])
    assert one.mean == {1: 0.2, 2: None, 3: 0.4, 4: 0.5}
    assert one.count == {1: 2, 2: 0, 3: 2, 4: 1}
    assert curves.grouped({1: 1.0, 2: None, 3: 3.0, 5: None}, [2, 4, 6]) == {2: 1.0, 4: 3.0, 6: None}


def test_the_forest_is_the_differences(three: Json, page: Page) -> None:
    (figure,) = [
        one for one in page.find("figure", "", section(page, "differences")) if "Final accuracy, sampled" in one["text"]
    ]
    rows = page.find("div", "row", figure)
    assert len(rows) == 2
    marks = [
        (float(t["attrs"]["x"].rstrip("%")), float(t["text"].replace("\N{MINUS SIGN}", "-")))
        for t in page.find("text", "", figure)
    ]
    (x0, v0), *_, (x1, v1) = marks
    found = {one["label"]: one for one in three["differences"] if one["metric"] == "accuracy_sampled"}
    for row, name in zip(rows, ("grpo", "dapo"), strict=True):
        one = found[name]
        bar, *caps = page.find("line", "whisker", row)
        for end, value in (("x1", one["low"]), ("x2", one["high"])):
            assert float(bar["attrs"][end].rstrip("%")) == pytest.approx(
                x0 + (100 * value - v0) / (v1 - v0) * (x1 - x0), abs=0.02
            )
        assert len(caps) == 2
        dots = [float(dot["attrs"]["cx"].rstrip("%")) for dot in page.find("circle", "seed-dot", row)]
        assert dots == pytest.approx([x0 + (100 * v - v0) / (v1 - v0) * (x1 - x0) for _, v in one["values"]], abs=0.02)
        (zero,) = page.find("line", "zero", row)
        assert float(zero["attrs"]["x1"].rstrip("%")) == pytest.approx(x0 + (0 - v0) / (v1 - v0) * (x1 - x0), abs=0.02)
        assert one["verdict"] in row["text"]
        assert f"p = {one['p_holm']:.2g}" in row["text"].replace("\N{NO-BREAK SPACE}", " ")
    assert "Right of the line is better." in figure["text"]
    (drop,) = [
        one for one in page.find("figure", "", section(page, "differences")) if one["text"].startswith("Largest drop")
    ]
    assert "Left of the line is better." in drop["text"]


def test_a_collapse_does_not_hide_the_others() -> None:
    page = Page(render(fake(10, 10, 320)))
    (figure,) = [
        one for one in page.find("figure", "", section(page, "differences")) if "Final accuracy, sampled" in one["text"]
    ]
    assert "Arrows: gspo beyond the picture." in figure["text"]
    assert canvas.inner([*range(20), 1000]) == (0, 19)
    assert canvas.inner([0, 1, 1000]) == (0, 1000)  # of so few none is odd
    assert canvas.inner([5.0] * 9) == (5.0, 5.0)


def test_the_headline_is_the_summary(three: Json, page: Page) -> None:
    table = page.find("table", "headline")[0]
    found = {(one["label"], one["metric"]): one for one in three["summary"]}
    for row, spec in zip(page.find("tr", "", table)[1:], three["specs"], strict=True):
        sampled = found[spec["label"], "accuracy_sampled"]
        assert f"{100 * sampled['mean']:.1f}%[{100 * sampled['low']:.1f}, {100 * sampled['high']:.1f}]" in row["text"]
        assert f"{spec['region']['low']:.4g} to {spec['region']['high']:.4g}" in row["text"]
        assert spec["text"] in row["text"]
        assert "0 of 5" in row["text"]
    source = page.find("pre")[0]["text"]
    lines = [line for line in source.splitlines() if line.startswith("|")]
    assert len(lines) == 5
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "| `atr_grpo` | 0.8182 to 1.207 |" in source
    assert "worse (" in source or "no difference found (" in source


def test_markdown_survives_bars_and_backquotes() -> None:
    found = fake(2, 3, 20)
    found["specs"][1]["label"] = "a|b`c`` <i>\nd"
    source = Page(render(measured(found))).find("pre")[0]["text"]
    assert "| ```a\\|b`c`` <i> d``` |" in source
    rows = [line for line in source.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1


def test_regions_are_where_they_should_be(page: Page) -> None:
    (figure,) = [one for one in page.find("figure") if one["text"].startswith("Intervals of the ratio")]
    marks = [(float(t["attrs"]["x"].rstrip("%")), float(t["text"])) for t in page.find("text", "", figure)]
    (x0, r0), *_, (x1, r1) = marks
    slope = (x1 - x0) / math.log(r1 / r0)
    for row, (_, _, bounds) in zip(page.find("div", "row", figure), NAMES, strict=False):
        assert bounds is not None
        (bar,) = page.find("line", "interval", row)
        for end, bound in (("x1", bounds[0]), ("x2", bounds[1])):
            assert bound is not None
            assert float(bar["attrs"][end].rstrip("%")) == pytest.approx(x0 + slope * math.log(bound / r0), abs=0.02)
    (family,) = [one for one in page.find("figure") if one["text"].startswith("Places in the power family")]
    assert len(page.find("use", "series", family)) == 3
    assert page.find("circle", "known", family)


def test_specs_without_an_interval_are_named_with_the_reason() -> None:
    page = Page(render(fake(10, 3, 20)))
    part = section(page, "regions")
    items = [item["text"] for item in page.find("li", "", part)]
    assert items == [
        "cispo its bounds depend on the token's probability",
        "dppo_tv(delta=0.15) its bounds depend on the token's probability",
    ]
    assert "0.9997 to 1.0004" in part["text"]
    assert "at least 0.5" in part["text"]


def test_anatomy_is_the_sum_over_seeds(three: Json, page: Page) -> None:
    part = section(page, "anatomy")
    for spec in three["specs"]:
        (figure,) = [
            one for one in page.find("figure", "", part) if page.find("h3", "", one)[0]["text"] == spec["label"]
        ]
        counts = {name: [sum(values) for values in zip(*(run["anatomy"][name] for run in spec["runs"]), strict=True)]
                  for name in ("tokens", "removed_low", "removed_high")}  # fmt: skip
        bars = {
            side: [float(bar["attrs"]["height"]) for bar in page.find("rect", f"bar {side}", figure)]
            for side in ("low", "high")
        }
        shares = {
            side: [cut / n for cut, n in zip(counts[f"removed_{side}"], counts["tokens"], strict=True)] for side in bars
        }
        scale = bars["high"][0] / shares["high"][0]
        for side in bars:
            assert bars[side] == pytest.approx([scale * share for share in shares[side]], abs=0.16)
        removed = sum(counts["removed_low"]) + sum(counts["removed_high"])
        assert (
            f"{100 * removed / sum(counts['tokens']):.1f}% of {sum(counts['tokens']):,} tokens removed"
            in figure["text"]
        )
    assert "share of tokens of that sign" in part["text"]
    for spec in (changed := fake(2, 3, 20))["specs"]:
        for run in spec["runs"]:
            del run["anatomy"]["tokens_positive"]
    assert "share of all tokens" in section(other := Page(render(changed)), "anatomy")["text"]
    assert other.find("rect", "plus")


def test_a_spec_that_cuts_nothing_says_so() -> None:
    found = fake(3, 3, 20)
    found["specs"][2] |= {"region": None, "note": None}
    for run in found["specs"][2]["runs"]:
        run["anatomy"] |= {"removed_low": [0] * 10, "removed_high": [0] * 10}
    page = Page(render(found))
    assert "Nothing was removed by dapo (of 1,494,000 tokens)." in section(page, "anatomy")["text"]
    assert "dapo It removed nothing from the gradient" in section(page, "regions")["text"]


# --- words ----------------------------------------------------------------------------------------------------

SECTIONS = ["headline", "learning", "differences", "trade-off", "regions", "stability", "anatomy", "metrics", "runs", "manifest"]  # fmt: skip


@pytest.mark.parametrize("make", [fake, partial, hostile, lambda: fake(3, 1, 20), lambda: fake(10, 10, 40)])
def test_structure(make: Any) -> None:
    source = render(make())
    page = Page(source)
    assert [one["attrs"]["id"] for one in page.find("section") if one["attrs"]["id"] != "notes"] == SECTIONS
    for figure in page.find("figure"):
        (title,) = page.find("h3", "", figure)
        (caption,) = [one for one in page.find("p", "", figure) if page.all[one["inside"][-1]]["tag"] == "figcaption"]
        assert title["text"].strip()
        assert len(caption["text"]) > 20
    for picture in page.find("svg", "area"):
        assert picture["attrs"]["role"] == "img"
        assert picture["attrs"]["aria-label"]
        figure = next(page.all[k] for k in reversed(picture["inside"]) if page.all[k]["tag"] == "figure")
        names = [one["text"] for one in page.find("p", "axis-name", figure)]
        assert len(names) == 2
        assert all(names)
    ids = [one["attrs"]["id"] for one in page.all if "id" in one["attrs"]]
    assert len(ids) == len(set(ids))
    assert not [e for e in page.all if e["tag"] in ("img", "link", "iframe", "object", "embed", "form", "base")]
    for element in page.all:
        for name, value in element["attrs"].items():
            assert name not in ("src", "srcset", "style", "action", "xlink:href"), (element["tag"], name)
            assert name != "href" or (value or "").startswith("#")
            assert not name.startswith("on"), (element["tag"], name)
    assert not re.search(r"https?:", source.replace("http://www.w3.org/2000/svg", ""))
    assert "url(" not in source
    assert "@import" not in source
    (policy,) = [e for e in page.find("meta") if e["attrs"].get("http-equiv") == "Content-Security-Policy"]
    assert policy["attrs"]["content"].startswith("default-src 'none';")
    assert "unsafe" not in policy["attrs"]["content"]


def test_hostile_text_is_text() -> None:
    page = Page(render(hostile()))
    assert len([one for one in page.find("script") if "type" not in one["attrs"]]) == 1
    assert all("owned" not in one["text"] for one in page.find("script"))
    assert HOSTILE in page.find("h1")[0]["text"]
    assert HOSTILE in section(page, "notes")["text"]
    chips = page.find("button", "chip")
    assert all(HOSTILE in chip["text"] and HOSTILE in chip["attrs"]["title"] for chip in chips)
    odd = fake(1, 3, 20)
    odd["specs"][0]["label"] = "a\x00b\x1b[31m\ud800\u202e"
    assert "a\u2400b\u241b[31m\ud800\u202e" in Page(render(odd)).find("button", "chip")[0]["text"]


@pytest.mark.parametrize("seeds", [1, 2])
def test_few_seeds_rank_nothing(seeds: int) -> None:
    found = fake(3, seeds, 40)
    for one in found["differences"]:
        one |= {"p": 0.01, "p_holm": 0.01, "sign_p": 0.5, "verdict": "worse", "low": -0.1, "high": -0.05}
    source = render(found)
    page = Page(source)
    words = " ".join(one["text"] for one in page.find("main")).replace("\N{NO-BREAK SPACE}", " ")
    assert f"With {'1 seed' if seeds == 1 else '2 seeds'} nothing is ranked here" in words
    assert not re.search(r"\bworse\b(?! \(A <)|no difference|\bp = |\bp \(|P\(better\)|Holm|Verdict", words)
    assert not page.find("b", "verdict")
    assert not page.find("line", "whisker", section(page, "differences"))
    assert "nothing is ranked" in page.find("pre")[0]["text"]
    for one in fake(3, 3, 40)["differences"]:
        assert one["n"] == 3  # and with three there are verdicts
    assert Page(render(fake(3, 3, 40))).find("b", "verdict")


def test_what_is_missing_is_said() -> None:
    page = Page(render(partial()))
    words = page.find("main")[0]["text"]
    assert "Not all of the 7 runs finished (1 running)" in words
    assert "too few seeds" in page.find("table", "headline")[0]["text"]
    assert "Not recorded: dapo, dual_clip" in section(page, "differences")["text"]
    assert "from the log of another trainer" in section(page, "regions")["text"]
    figure = page.figure("Reward")
    assert len(page.find("path", "mean", figure)) == 3
    for title in ("KL(old || new)", "Entropy"):
        assert len(page.find("path", "mean", page.figure(title))) == 2


def test_the_same_constraint_is_drawn_once() -> None:
    found = fake(3, 3, 20)
    found["specs"][2] |= {"same_as": "grpo"}
    page = Page(render(found))
    assert "Drawn once: dapo is the same constraint as grpo." in section(page, "learning")["text"]
    assert len(page.find("button", "chip")) == 2
    assert "same constraint as grpo" in page.find("table", "headline")[0]["text"]
    assert len(page.find("path", "mean", page.figure("Reward"))) == 2


@pytest.mark.parametrize(
    "empty",
    [
        {},
        {"specs": []},
        {"specs": [{}]},
        {"specs": [{"runs": [{}]}], "metrics": {"x": {}}},
        {"specs": 3, "summary": "x"},
    ],
)
def test_next_to_nothing_is_a_page(empty: Json) -> None:
    page = Page(render(empty))
    assert "nothing is ranked" in page.find("main")[0]["text"]
    assert page.find("p", "empty")


def test_any_value_may_be_missing_or_odd() -> None:
    """Every kind of place in turn holds something else; the page is still whole."""
    rng = random.Random(5)
    whole = json.dumps(fake(3, 3, 12))

    def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            yield (*path, key)
            yield from places(value, (*path, key))

    kinds: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for path in places(json.loads(whole)):
        kinds.setdefault(tuple(key for key in path if isinstance(key, str)), []).append(path)
    assert len(kinds) > 80
    for number, paths in enumerate(kinds.values()):
        found = json.loads(whole)
        *inner, last = rng.choice(paths)
        node = found
        for key in inner:
            node = node[key]
        node[last] = (None, HOSTILE, [], {}, -1.0, 10**400, 1e99, [[1, 2, 3]], True)[number % 9]
        page = Page(render(found))
        assert page.find("h1"), (inner, last)
        assert not page.find("img")


def test_what_was_left_out_is_counted() -> None:
    found = fake(1, 3, 20)
    found["specs"][0]["runs"][0]["metrics"]["auc"] = "much"
    found["specs"][0]["runs"][0]["curves"]["train/reward_mean"][3] = ["x", 1.0]
    found["specs"][0]["runs"][1]["anatomy"]["tokens"] = [1]
    notes = section(Page(render(found)), "notes")["text"]
    for what in ("auc", "train/reward_mean", "clip anatomy"):
        assert f"{what}: 1 of another form than expected, and left out." in notes


# --- axes and colours -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [[0.0], [1e99, 1e99], [5.0, 5.0], [-3.0, 7.0], [1e20, 1e20 + 1], [0.391, 0.392]])
def test_axes_hold_their_values(values: list[float]) -> None:
    for axis in (canvas.linear(values), canvas.bowed(values)):
        assert all(not axis.beyond(value) for value in values)
        assert axis.marks
        assert all(-1e-9 <= place <= 1 + 1e-9 for place, _ in axis.marks)
    if min(values) > 0:
        axis = canvas.logarithmic(values)
        assert all(not axis.beyond(value) for value in values)


def test_logarithmic_axes_share_their_foot() -> None:
    axis = canvas.logarithmic([0.0, 1e-9, 1.0, 2.0, 3.0, 400.0])
    assert axis.floor == pytest.approx(2e-3)
    assert axis.at(0.0) == axis.at(1e-9) == axis.at(2e-3)
    assert [label for _, label in axis.marks] == ["0.01", "1", "100"]
    assert canvas.uneven([0.1, 0.1, 0.1, 5.0])
    assert not canvas.uneven([0.1, 0.1, 0.1, 1.0])
    assert [label for _, label in canvas.ratios([0.9997, 1.0004]).marks] == ["0.9998", "1.0000", "1.0002", "1.0004"]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_specs_can_be_told_apart() -> None:
    assert len(set(canvas.SHAPES)) == canvas.TONES
    assert len({(canvas.tone(place), canvas.shape(place)) for place in range(60)}) == 60
    style = re.search(r"<style>(.*?)</style>", render(fake(1, 1, 10)), re.S)
    assert style
    blocks = re.findall(r":root \{(.*?)\}", style[1], re.S)
    schemes = [dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6})\b", block)) for block in blocks]
    assert len(schemes) == 4  # of every page, light and dark; of this one, light and dark
    for card, scheme in (("#ffffff", schemes[2]), (schemes[1]["card"], schemes[3])):
        tones = [scheme[f"t{k}"] for k in range(canvas.TONES)]
        assert len(set(tones)) == canvas.TONES
        for colour in [*tones, scheme["good"], scheme["bad"], scheme["plus"], scheme["less"]]:
            high, low = sorted((luminance(colour), luminance(card)), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 3.0, colour
        for k in range(canvas.TONES):
            for other in tones[:k]:
                assert seen_apart(tones[k], other) > 0.08, (tones[k], other)


NORMAL = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
DEUTAN = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))
PROTAN = ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998))
TO_LMS = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
TO_LAB = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)


def seen_apart(one: str, other: str) -> float:
    """The least distance in OKLab for normal eyes and the two common kinds of colour blindness (Machado et al. 2009)."""

    def times(matrix: Any, vector: list[float]) -> list[float]:
        return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]

    def lab(colour: str, eye: Any) -> list[float]:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        seen = [min(1.0, max(0.0, c)) for c in times(eye, linear)]
        return times(TO_LAB, [math.cbrt(c) for c in times(TO_LMS, seen)])

    return min(math.dist(lab(one, eye), lab(other, eye)) for eye in (NORMAL, DEUTAN, PROTAN))


# --- files ----------------------------------------------------------------------------------------------------


def test_write(three: Json, tmp_path: Path) -> None:
    assert write(three, tmp_path) == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_text() == render(three)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(UserError, match=r"cannot write .*report\.html: No such file or directory"):
        write(three, tmp_path / "none")
    (tmp_path / "taken" / "report.html").mkdir(parents=True)
    with pytest.raises(UserError, match="cannot write"):
        write(three, tmp_path / "taken")
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["report.html"]
    surrogate = fake(1, 1, 10, notes=["\ud800"])
    write(surrogate, tmp_path)
    assert "\\ud800" in (tmp_path / "report.html").read_text()


def test_a_large_comparison_is_a_small_file() -> None:
    assert len(render(fake(10, 10, 2000))) < 3_000_000


# --- in a browser ---------------------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")
SIZES = ((1440, 900, False), (390, 844, True))


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    made = Tab(tmp_path_factory.mktemp("profile"))
    made.offline()
    yield made
    made.close()


LAYOUT = """[...document.querySelectorAll('figure')].filter(f => f.offsetParent).map(figure => { const r = figure.getBoundingClientRect();
  return { name: figure.querySelector('h3').textContent, frame: [r.left, r.right, r.bottom],
    boxes: [...figure.querySelectorAll('.picture, .strip.foot')].map(p => [...p.querySelectorAll('text')].map(t => { const b = t.getBoundingClientRect();
      return [b.left + 1, b.top + 3, b.right - 1, b.bottom - 3, t.textContent, parseFloat(getComputedStyle(t).fontSize)]; })) }; })"""


@needs_browser
@pytest.mark.parametrize("make", [fake, partial, hostile, lambda: fake(3, 1, 40), lambda: fake(10, 10, 60)], ids=["three", "partial", "hostile", "one seed", "ten"])  # fmt: skip
def test_it_can_be_read_at_any_width(make: Any, tab: Tab, tmp_path: Path) -> None:
    path = write(make(), tmp_path)
    for width, height, dark in SIZES:
        tab.view(width, height, dark)
        tab.open(path)
        assert tab.errors() == []
        assert tab.run("document.title") != "owned"
        assert tab.run("document.images.length") == 0
        assert tab.run("document.documentElement.scrollWidth") <= width
        for figure in tab.run(LAYOUT):
            left, right, bottom = figure["frame"]
            for boxes in figure["boxes"]:
                for k, (x0, y0, x1, y1, text, size) in enumerate(boxes):
                    assert size >= 12, (figure["name"], text)
                    assert left <= x0, (figure["name"], text)
                    assert x1 <= right, (figure["name"], text)
                    assert y1 <= bottom, (figure["name"], text)
                    crossed = [b for b in boxes[:k] if x0 < b[2] and b[0] < x1 and y0 < b[3] and b[1] < y1]
                    assert not crossed, (figure["name"], text, crossed)
        small = "[...document.querySelectorAll('main *')].filter(e => e.offsetParent && e.textContent.trim() && parseFloat(getComputedStyle(e).fontSize) < 12).length"
        assert tab.run(small) == 0


@needs_browser
def test_specs_are_shown_and_hidden_everywhere(three: Json, tab: Tab, tmp_path: Path) -> None:
    tab.view(1440, 900)
    tab.open(write(three, tmp_path))
    shown = "[...document.querySelectorAll('.series[data-s=\"1\"]')].filter(e => getComputedStyle(e).display !== 'none').length"
    others = shown.replace('data-s="1"', 'data-s="2"')
    before = tab.run(shown), tab.run(others)
    assert before[0] == before[1] > 20
    tab.run("document.querySelector('[data-toggle=\"1\"]').click()")
    assert (tab.run(shown), tab.run(others)) == (0, before[1])
    assert tab.run("[...document.querySelectorAll('.chip')].map(c => c.getAttribute('aria-pressed'))") == [
        "true",
        "false",
        "true",
    ]
    tab.run("document.getElementById('all').click()")
    assert tab.run(shown) == before[0]
    for name, css in (("range", ".band"), ("seeds", ".seed")):
        count = f"[...document.querySelectorAll('{css}')].filter(e => getComputedStyle(e).display !== 'none').length"
        assert tab.run(count) > 0
        tab.run(f"document.querySelector('[data-view={name}]').click()")
        assert tab.run(count) == 0
    assert tab.errors() == []


@needs_browser
def test_numbers_under_the_pointer_and_the_arrow_keys(three: Json, tab: Tab, tmp_path: Path) -> None:
    tab.view(1440, 900)
    tab.open(write(three, tmp_path))
    tab.run("document.getElementById('learning').scrollIntoView()")
    left, top, width = tab.run(
        "(r => [r.left, r.top, r.width])(document.querySelector('#learning-0 .area').getBoundingClientRect())"
    )
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + width * 49 / 96, y=top + 60)
    read_off = "document.querySelector('#learning-0 .tip').innerText.split(/\\s*\\n\\s*/)"
    values = [dict(run["curves"]["eval/accuracy_sampled"])[48] for run in three["specs"][0]["runs"]]
    lines = tab.run(read_off)
    assert lines[0] == "step 48"
    assert f"{100 * sum(values) / 5:.1f}% [{100 * min(values):.1f}, {100 * max(values):.1f}]" in " ".join(lines)
    assert tab.run("document.querySelectorAll('#learning-0 .dot.on').length") == 3
    tab.run("document.querySelector('[data-toggle=\"0\"]').click()")
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + width * 50 / 96, y=top + 60)
    assert "atr_grpo" not in " ".join(tab.run(read_off))
    tab.run("document.getElementById('all').click(); document.querySelector('#learning-0 .area').focus()")
    for key in ("ArrowLeft", "ArrowLeft", "ArrowRight"):
        tab.press(key)
    assert tab.run(read_off)[0] == "step 36"
    tab.run(
        "document.querySelector('.seed-dot').dispatchEvent(new PointerEvent('pointerover', { bubbles: true, clientX: 50, clientY: 300 }))"
    )
    assert tab.run("document.getElementById('tip').textContent").startswith("grpo, seed 0: ")
    assert tab.errors() == []


@needs_browser
def test_copy_as_markdown(three: Json, tab: Tab, tmp_path: Path) -> None:
    tab.view(1440, 900)
    tab.open(write(three, tmp_path))
    source = tab.run("document.querySelector('#markdown pre').textContent")
    tab.run(
        "Object.defineProperty(navigator, 'clipboard', { value: { writeText: async text => { window.copied = text; } }, configurable: true })"
    )
    tab.run("document.getElementById('copy').click()")
    assert tab.run("new Promise(done => setTimeout(() => done(window.copied), 50))") == source
    assert tab.run("document.getElementById('copy').textContent") == "Copied"
    assert not tab.run("document.getElementById('markdown').open")
    tab.run("Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })")
    tab.run("document.getElementById('copy').click()")
    assert tab.run("new Promise(done => setTimeout(() => done(document.getElementById('markdown').open), 50))")
    assert tab.run("String(getSelection())").strip() == source.strip()
    assert tab.errors() == []


@needs_browser
def test_markup_that_slipped_through_cannot_act(tab: Tab, tmp_path: Path) -> None:
    naked = (
        render(hostile())
        .replace("&lt;script&gt;", "<script>")
        .replace("&lt;/script&gt;", "</script>")
        .replace("&quot;owned&quot;", '"owned"')
    )
    assert naked.count("<script>document.title=") > 10
    (tmp_path / "guarded.html").write_text(naked)
    (tmp_path / "bare.html").write_text(naked.replace("Content-Security-Policy", "x"))
    tab.open(tmp_path / "bare.html")
    assert tab.run("document.title") == "owned"
    tab.open(tmp_path / "guarded.html")
    assert tab.run("document.title") != "owned"
    tab.log.clear()
