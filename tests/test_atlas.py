"""The map: its points are the registry's, its solver is klamp's, and it can be used by mouse, keyboard and typing."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devtools import BROWSER, Tab

import klamp
from klamp.atlas import build, page
from klamp.atlas.arguments import FORMS, table, usual_arguments
from klamp.atlas.facts import first_interval, is_interval
from klamp.atlas.places import absent, binary, entries, panel_of, points
from klamp.binary import BINARY, binary_bounds
from klamp.errors import UserError
from klamp.language import Preset
from klamp.measures import MEASURES
from klamp.plot import curves
from klamp.presets import PRESETS, parse
from klamp.regions import Region, region

SIZES = ((1280, 800), (390, 844))
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")


# --- the registry on the map ----------------------------------------------------------------------------------


def test_every_preset_is_on_the_map_or_named_as_absent() -> None:
    placed = {entry["name"] for entry in entries()} | {one["name"] for one in binary()}
    gone = {name for _, names in absent() for name in names}
    assert placed | gone == set(PRESETS)
    assert not placed & gone


def test_points_are_the_regions_of_the_specs() -> None:
    found = points()
    for point in found:
        for member in point["members"]:
            guard = parse(member["spec"]).guards[member["guard"]]
            assert isinstance(guard.region, Region)
            assert (point["log_low"], point["log_high"]) == pytest.approx(
                (guard.region.log_low, guard.region.log_high), abs=1e-9
            )
            assert point["panel"] == panel_of(guard.scope)
    clip = next(point for point in found if point["low"] == 0.8 and point["high"] == 1.2 and point["panel"] == "token")
    assert {"ppo", "grpo", "dr_grpo", "bnpo"} <= {member["name"] for member in clip["members"]}
    long = next(point for point in found if "gspo" in {member["name"] for member in point["members"]})
    assert (long["panel"], round(long["a"])) == ("sequence", -2509)


def test_arguments_were_probed_not_guessed() -> None:
    """Each form gives the number that the preset itself gives, at values that no probe used."""
    for name, entry in table().items():
        found = PRESETS[name]
        assert set(entry["forms"]) | set(entry["words"]) | set(entry["idle"]) | set(entry["unread"]) | {
            entry["measure"]
        } >= set(entry["parameters"])
        for key, moved in entry["forms"].items():
            value = (0.97 if key == "low" else 1.07) * (usual_arguments(found)[key] or 0.3)
            guards = klamp.preset(name, **usual_arguments(found) | {key: value}).guards
            for index, field, form in moved:
                if field.startswith(("radius", "ratio_")):
                    assert float(getattr(guards[index].region, field)) == pytest.approx(FORMS[form](value), rel=1e-14)


def test_foreign_text_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    def hostile(epsilon: float = 0.2) -> klamp.Spec:
        return parse("grpo").__class__(parse("grpo").guards)

    text = "</script><script>document.title='owned'</script><b>&"
    monkeypatch.setitem(PRESETS, "hostile", Preset(hostile, "J", text, "", "grpo"))
    written = page()
    assert written.count("<script") == page_scripts(written) == 2
    assert "&lt;script&gt;document.title=" in written
    assert "<b>" not in written
    known = json.loads(re.search(r'id="data">(.*?)</script>', written, re.S)[1])  # type: ignore[index]
    assert text in json.dumps(known, ensure_ascii=False)


def page_scripts(written: str) -> int:
    return len(re.findall(r"<script[ >].*?</script>", written, re.S))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("map") / "map.html")


# --- the file -------------------------------------------------------------------------------------------------


def test_the_page_is_one_small_file_that_loads_nothing(file: Path, tmp_path: Path) -> None:
    written = file.read_text()
    assert file.stat().st_size < 3_000_000
    assert build(tmp_path / "again.html").read_text() == written
    assert list(tmp_path.iterdir()) == [tmp_path / "again.html"]
    without = written.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|\bsrc=|<link|@import|url\((?!#)", without)
    assert "default-src 'none'" in written
    for name in PRESETS:
        assert name in written


@pytest.mark.parametrize("where", ["", "missing/map.html"])
def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path: Path, where: str) -> None:
    with pytest.raises(UserError, match="cannot write the map to") as error:
        build(tmp_path / where)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_the_map_needs_no_torch() -> None:
    code = "import sys, klamp.atlas; klamp.atlas.page(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


# --- colours --------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * one for one in digits) if len(digits) == 3 else digits
    parts = [int(digits[k : k + 2], 16) / 255 for k in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def schemes(style: str) -> list[dict[str, str]]:
    """The colours by name: light, and dark over them."""
    light, dark = style.split("@media (prefers-color-scheme: dark)")[:2]
    found = [dict(re.findall(r"--([a-z]+): (#[0-9a-f]{3,6})\b", part.split("}")[0])) for part in (light, dark)]
    return [found[0], found[0] | found[1]]


def test_colours_can_be_read(file: Path) -> None:
    style = re.search(r"<style>(.*?)</style>", file.read_text(), re.S)[1]  # type: ignore[index]
    for scheme in schemes(style):
        for ground in ("card", "page"):
            for text in ("ink", "soft", "error", "one"):
                assert contrast(scheme[text], scheme[ground]) >= 4.5, (text, ground)
        for mark in ("one", "two", "low", "high", "line"):
            assert contrast(scheme[mark], scheme["card"]) >= 3.0, mark


# --- in a browser ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    found = Tab(tmp_path_factory.mktemp("profile"))
    found.offline()
    yield found
    found.close()


@pytest.fixture
def tab(browser: Tab, file: Path) -> Iterator[Tab]:
    browser.view(*SIZES[0])
    browser.open(file)
    yield browser
    assert browser.errors() == []


def fill(tab: Tab, field: str, text: str) -> None:
    """Type into a field in place of what it holds."""
    tab.run(f"(() => {{ const e = document.getElementById({field!r}); e.focus(); e.select(); }})()")
    tab.write(text)


def interval(tab: Tab) -> tuple[float, float]:
    """The bounds that the page shows."""
    shown = tab.run("[document.getElementById('low').textContent, document.getElementById('high').textContent]")
    low, high = (float(one.replace("\N{MINUS SIGN}", "-").replace("\N{INFINITY}", "inf")) for one in shown)
    return low, high


def message(tab: Tab) -> str:
    return str(tab.run("document.getElementById('message').textContent"))


def centre(tab: Tab, name: str) -> tuple[float, float, dict[str, Any]]:
    """Where the point of a method lies on the screen, and its data."""
    found = tab.run(f"""(() => {{
      const node = [...document.querySelectorAll('.point')].find(p => p.dataset.names.split(' ').includes({name!r}));
      node.scrollIntoView({{ block: 'center', behavior: 'instant' }});
      const box = node.querySelector('.mark').getBoundingClientRect();
      return [box.x + box.width / 2, box.y + box.height / 2, {{ ...node.dataset, label: node.getAttribute('aria-label') }}];
    }})()""")
    return found[0], found[1], found[2]


@needs_browser
def test_it_is_ready_within_a_second(tab: Tab) -> None:
    assert int(tab.run("document.documentElement.dataset.ready")) < 1000
    assert interval(tab) == pytest.approx((0.8131051152131157, 1.2135497071517296), abs=1e-6)


@needs_browser
@pytest.mark.parametrize(("name", "bounds"), [("grpo", (0.8, 1.2)), ("dapo", (0.8, 1.28)), ("gspo", (0.9997, 1.0004)),
                                              ("sequence_mask", (0.0, 3.0))])  # fmt: skip
def test_a_click_on_a_point_shows_its_interval(tab: Tab, name: str, bounds: tuple[float, float]) -> None:
    x, y, data = centre(tab, name)
    assert (float(data["low"]), float(data["high"])) == pytest.approx(bounds, abs=1e-9)
    tab.click(x, y)
    assert interval(tab) == pytest.approx(bounds, abs=1e-6)
    checked = tab.run("[...document.querySelectorAll('.point[aria-checked=true]')].map(p => p.dataset.names)")
    assert len(checked) == 1
    assert name in checked[0].split()


@needs_browser
def test_the_radius_by_slider_and_by_typing(tab: Tab) -> None:
    tab.click(*centre(tab, "atr_grpo")[:2])
    tab.run("document.getElementById('radius').focus()")
    for _ in range(25):
        tab.press("ArrowRight")
    radius = float(tab.run("document.getElementById('radius-value').value"))
    assert radius == pytest.approx(0.02 * 10**0.025, rel=1e-3)
    found = region("k3", radius)
    assert interval(tab) == pytest.approx((found.low, found.high), abs=1e-6)
    fill(tab, "radius-value", "0.05")
    found = region("k3", 0.05)
    assert interval(tab) == pytest.approx((found.low, found.high), abs=1e-6)
    assert tab.run("document.getElementById('spec').value") == "power_clip(a=0, radius=0.05)"
    fill(tab, "a-value", "-2.5")
    found = region("power(-2.5)", 0.05)
    assert interval(tab) == pytest.approx((found.low, found.high), abs=1e-6)
    spec = tab.run("document.getElementById('spec').value")
    assert parse(spec) == parse("power_clip(a=-2.5, radius=0.05)")
    for field, text in (("radius-value", "-1"), ("radius-value", "x"), ("a-value", "")):
        fill(tab, field, text or " ")
        assert message(tab).endswith(".")
        assert interval(tab) == pytest.approx((found.low, found.high), abs=1e-6)


@needs_browser
def test_a_click_on_the_plane_is_an_interval_that_klamp_reads(tab: Tab) -> None:
    at = tab.run(
        "(() => { const b = document.querySelector('#map-token .plane').getBoundingClientRect(); return [b.x + 0.6 * b.width, b.y + 0.3 * b.height]; })()"
    )
    tab.click(*at)
    found = parse(tab.run("document.getElementById('spec').value")).guards[0].region
    assert isinstance(found, Region)
    assert interval(tab) == pytest.approx((found.low, found.high), abs=1e-6)
    ring = tab.run(
        "(() => { const b = document.querySelector('#map-token .here').getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
    )
    assert ring == pytest.approx(at, abs=3.0)


READ = [
    "atr_grpo(delta=0.03)", "dapo(epsilon_low=0.2, epsilon_high=0.28)", "power_clip(a=2, radius=0.02)", "power_clip(-3.5, 0.4)",
    "guard(ratio_low=0.8, ratio_high=1.3)", "trust_region('k3', 0.05)", "trust_region(measure='renyi(2)', radius=0.1)",
    "trust_region('js', 5.0)", "gspo", "gmpo(epsilon=0.3)", "trust_region('k3', 0.02, scope='sequence', reduce='sum')",
    "dual_clip(c=4.0, epsilon=0.1)", "dapo() + mis(low=0.25, high=4.0)", "atr_grpo(delta=cosine(0.05, 0.01, steps=400))",
    "guard(measure='k3', radius_low=0.01, radius_high=0.05, scope='sequence')", "rs_k1(low=0.4, high=3.0)", "opsm(delta=0.3)",
    "guard(ratio_high=3.0, gate='negative') + token_mean", 'guard(measure="tv", radius=1e-3)', "atr_grpo(delta=1e-9)",
    "dr_grpo(epsilon=0.25, divisor=100) + kl_reference(beta=0.1)", "grpo(epsilon=0.2, aggregate=sequence_mean(rows='all'))",
    "trust_region('power(-2508.6)', 5.88e-8, scope='sequence')", "guard(measure=power(1.5), radius=0.3)", "grpo + tis(high=2.0)",
    "trust_region('k3', 0.0)", "rollback(0.5, epsilon=.1)", "rec(clip='one_side', epsilon_low=0.1)",
    "guard(measure='k1', radius=0.5, gate='negative')", "guard(measure='power(-9.0)', radius=0.001, scope='sequence') + factor(scope='sequence')", "trust_region('k3_flipped', inf)",
]  # fmt: skip


@needs_browser
def test_typed_specs_have_klamps_interval(tab: Tab) -> None:
    for text in READ:
        guards = [guard for guard in parse(text).guards if is_interval(guard)]
        fill(tab, "spec", text)
        assert message(tab) == "", text
        found = tab.run(f"""(() => {{ const data = JSON.parse(document.getElementById('data').textContent, (k, v) => v === 'inf' ? Infinity : v);
          return reader(data)({text!r}).map(g => {{ const r = interval(g); return [String(r.logLow), String(r.logHigh), g.ratio, g.scope, g.reduce, g.gate, g.action, g.cut_value]; }}); }})()""")
        mine = [
            [
                one.region.log_low,
                one.region.log_high,
                one.ratio,
                one.scope,
                one.reduce,
                str(one.gate),
                one.action,
                one.cut_value,
            ]
            for one in guards
        ]  # type: ignore[union-attr]
        for theirs in found:
            low, high = (float(one.replace("Infinity", "inf")) for one in theirs[:2])
            twin = next(
                own
                for own in mine
                if own[:2] == pytest.approx([low, high], rel=1e-9, abs=1e-13) and own[2:] == theirs[2:]
            )
            mine.remove(twin)
        assert not mine, text
        first = first_interval(parse(text))
        assert first is not None
        if math.isfinite(first.region.log_low):  # type: ignore[union-attr]
            assert interval(tab) == pytest.approx((first.region.low, first.region.high), abs=1e-6), text  # type: ignore[union-attr]


REFUSED = [
    ("", "write a spec"), ("grpo(", "expected"), ("grop", "did you mean grpo"), ("grpo(eps=0.2)", "no argument eps"),
    ("atr_grpo(delta=-0.1)", "radius must be a number >= 0"), ("dapo(epsilon_high=-0.5)", "must contain w = 1"),
    ("guard(ratio_low=0.8, ratio_high=0.28)", "1 \\+ epsilon"), ("guard(measure='k3')", "needs a radius"), ("guard(radius=0.1)", "needs a measure"),
    ("trust_region('k4', 0.1)", "did you mean k"), ("cispo", "no guard.*klamp explain"), ("m2po", "whole step.*klamp explain"),
    ("dual_clip(base=dapo())", "beyond what this page can read.*klamp explain"), ("guard(measure='k2', budget=0.1)", "no fixed interval"),
    ("grpo(epsilon='x')", "not a number"), ("<img src=x onerror=alert(1)>", "cannot read"), ("grpo(0.1, 0.2)", "at most 1"),
    ("grpo(0.1, epsilon=0.2)", "twice"), ("guard(measure='k3', radius=0.1, scope='sequens')", "not one this page can draw"),
    ("toString", "unknown name"), ("trust_region('k3', 0.1, reduce='sum')", "nothing to reduce"), ("grpo dapo", "added with \\+"),
    ("trust_region('power(x)', 0.1)", "needs a number"), ("trust_region('constructor', 0.1)", "not one this page"),
]  # fmt: skip


EXTREME = ["trust_region('k3', 1e300)", "trust_region('k3', 1e-300)", "trust_region('k3', inf)", "trust_region('k2', 1e300)",
           "power_clip(a=1000000, radius=0.1)", "power_clip(a=-1e12, radius=1e-20)", "power_clip(2, 0.6)", "trust_region('js', 1e9)",
           "guard(ratio_low=1e-300, ratio_high=1e300)", "guard(ratio_low=1.0, ratio_high=1.0)", "guard(ratio_low=1, ratio_high=1.5)",
           "trust_region('power(-3000)', 1e5, scope='sequence')", "guard(ratio_high=1.0000000001, scope='sequence')"]  # fmt: skip


@needs_browser
@pytest.mark.parametrize("width", [1280, 320])
def test_extremes_are_drawn_too(browser: Tab, file: Path, width: int) -> None:
    browser.view(width, 800)
    browser.open(file)
    for text in EXTREME:
        fill(browser, "spec", text)
        assert browser.errors() == [], text
        assert message(browser) == "", text
        found = first_interval(parse(text))
        assert found is not None
        assert isinstance(found.region, Region)
        assert interval(browser) == pytest.approx((found.region.low, found.region.high), rel=1e-6, abs=1e-9), text
        broken = browser.run("""[...document.querySelectorAll('svg *')].flatMap(e => [...e.attributes])
          .filter(a => !a.name.startsWith('data-') && /NaN|Infinity|undefined/.test(a.value)).map(a => a.value)""")
        assert broken == [], text
        assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.errors() == []


@needs_browser
def test_what_cannot_be_read_gets_one_clear_line(tab: Tab) -> None:
    before = interval(tab)
    for text, expected in REFUSED:
        fill(tab, "spec", text or " ")
        said = message(tab)
        assert re.search(expected, said, re.I), (text, said)
        assert "\n" not in said
        assert tab.run("document.getElementById('spec').getAttribute('aria-invalid')") == "true"
        assert interval(tab) == before
    assert tab.run("document.querySelectorAll('img').length") == 0


@needs_browser
def test_binary_divergences_bend_away_from_a_ratio_clip(tab: Tab) -> None:
    fill(tab, "spec", "trust_region('binary_tv', 0.1)")
    assert message(tab) == ""
    assert "p = 0.5 may become 0.4 to 0.6" in tab.run("document.getElementById('by-probability').textContent")
    assert tab.run("document.querySelectorAll('#chart-p .line').length") == 2 * 3  # its own, and two that are shown
    cases = [
        (name, p, radius) for name in BINARY for p in (0.001, 0.1, 0.5, 0.9, 0.999) for radius in (0.001, 0.05, 0.3)
    ]
    found = tab.run(f"({json.dumps(cases)}).map(([name, p, radius]) => allowed(name, p, radius, radius))")
    for (name, p, radius), bounds in zip(cases, found, strict=True):
        low, high = binary_bounds(name, p, radius)
        assert bounds == pytest.approx([p * math.exp(low), min(p * math.exp(high), 1.0)], abs=1e-9), (name, p, radius)


@needs_browser
def test_the_pages_solver_is_klamps(tab: Tab) -> None:
    names = [*MEASURES, "power(-7.5)", "power(-0.5)", "power(0.25)", "power(1.0)", "power(3.0)", "power(40.0)", "power(-2508.6)",
             "renyi(0.5)", "renyi(2.0)", "renyi(-1.0)"]  # fmt: skip
    radii = (1e-12, 1e-6, 1e-3, 0.02, 0.1, 0.5, 1.0, 5.0, 50.0)
    cases = []
    for name in names:
        family, _, a = name.partition("(")
        cases += [
            {"measure": family, "a": float(a.rstrip(")")) if a else None, "radius_low": r, "radius_high": r}
            for r in radii
        ]
    found = tab.run(
        f"({json.dumps(cases)}).map(g => {{ const r = interval(g); return [String(r.logLow), String(r.logHigh)]; }})"
    )
    for case, bounds in zip(cases, found, strict=True):
        name = case["measure"] if case["a"] is None else f"{case['measure']}({case['a']!r})"
        mine = region(name, case["radius_low"])
        theirs = [float(one.replace("Infinity", "inf")) for one in bounds]
        assert theirs == pytest.approx([mine.log_low, mine.log_high], rel=1e-11, abs=0.0), (name, case["radius_low"])
    clips = [(0.8, 1.2), (0.8, 1.28), (0.9997, 1.0004), (0.5, 5.0), (0.1, 1.01), (0.99, 8.0)]
    found = tab.run(
        f"({json.dumps(clips)}).map(([l, u]) => {{ const c = coordinates(Math.log(l), Math.log(u)); return [c.a, c.radius]; }})"
    )
    for (low, high), place in zip(clips, found, strict=True):
        mine_at = region(ratio_low=low, ratio_high=high).coordinates
        assert mine_at is not None
        assert place == pytest.approx([mine_at.a, mine_at.radius], rel=1e-8)


@needs_browser
def test_surrogate_and_coefficient_are_the_objectives(tab: Tab) -> None:
    """The page's J and g against those of the objective, for every guard that the page draws."""
    drawn = 0
    for spec in [
        *(found.usual for found in PRESETS.values()),
        "dual_clip + guard(measure='k2', radius=0.3)",
        "rollback(2.0)",
    ]:
        guard = first_interval(parse(spec))
        if guard is None:
            continue
        xs = [float(x) for x in np.linspace(-2.0, 2.0, 41) + 0.0103]
        own = curves(parse(spec), guard, xs)
        found = tab.run(f"""(() => {{ const data = JSON.parse(document.getElementById('data').textContent, (k, v) => v === 'inf' ? Infinity : v);
          const all = reader(data)({spec!r}).filter(g => g.kind === 'interval').map(g => ({{ ...g, ...interval(g) }}));
          const first = all.find(g => Number.isFinite(width(g)) && g.ratio.startsWith('new/')) || all.find(g => Number.isFinite(width(g))) || all[0];
          if (first.gate === 'other' || first.weight === 'other') return null;
          const guards = [first, ...all.filter(g => g !== first && g.gate !== 'other' && g.ratio === first.ratio && g.scope === first.scope && g.reduce === first.reduce)];
          return [1, -1].map(A => ({json.dumps(xs)}).map(x => {{ const o = outcome(guards, x, A); return [o.J, o.g]; }})); }})()""")
        if found is None:
            continue
        drawn += 1
        for sign, series in zip((1, -1), found, strict=True):
            assert [one[0] for one in series] == pytest.approx(own.surrogate[sign], abs=1e-9), spec
            assert [one[1] for one in series] == pytest.approx(own.coefficient[sign], abs=1e-9), spec
    assert drawn > 25


@needs_browser
def test_arrow_keys_move_between_points(tab: Tab) -> None:
    tab.run("document.querySelector('#map-token .point[tabindex=\"0\"]').focus()")
    seen = []
    for key in ("Home", "ArrowRight", "ArrowDown", "ArrowLeft", "End"):
        tab.press(key)
        low, high = (
            float(one)
            for one in tab.run("(() => { const d = document.activeElement.dataset; return [d.low, d.high]; })()")
        )
        assert interval(tab) == pytest.approx((low, high), abs=1e-6)
        seen.append((low, high))
    assert len(set(seen[:3])) == 3
    assert seen[3] == seen[1]
    ring = tab.run("getComputedStyle(document.activeElement.querySelector('.halo')).stroke")
    assert ring not in ("none", "rgba(0, 0, 0, 0)")
    assert tab.run("document.querySelectorAll('#map-token .point[tabindex=\"0\"]').length") == 1
    tab.press("Tab")  # on to the other panel
    assert tab.run("document.activeElement.closest('svg').id") == "map-sequence"


@needs_browser
def test_methods_with_one_interval_are_told_apart(tab: Tab) -> None:
    tab.click(*centre(tab, "grpo")[:2])
    before = tab.run("document.querySelector('#chart-g .line.one').getAttribute('d')")
    tab.run("[...document.querySelectorAll('#members button')].find(b => b.textContent === 'rollback').click()")
    assert tab.run("document.activeElement.textContent") == "rollback"
    pressed = tab.run("[...document.querySelectorAll('#members [aria-pressed=true]')].map(b => b.textContent)")
    assert pressed == ["rollback"]
    assert tab.run("document.getElementById('cite').textContent") == PRESETS["rollback"].citation
    assert tab.run("document.querySelector('#chart-g .line.one').getAttribute('d')") != before
    assert interval(tab) == (0.8, 1.2)


@needs_browser
def test_the_spec_can_be_copied(tab: Tab) -> None:
    tab.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    fill(tab, "spec", "dapo(0.1, 0.3)")
    at = tab.run(
        "(() => { const b = document.getElementById('copy').getBoundingClientRect(); return [b.x + 9, b.y + 9]; })()"
    )
    tab.click(*at)
    later = "new Promise(done => setTimeout(() => done(document.getElementById('copy').textContent), 200))"
    assert tab.run(later) == "Copied"
    assert tab.run("navigator.clipboard.readText()") == "dapo(0.1, 0.3)"


@needs_browser
def test_everything_that_can_be_used_has_a_name(tab: Tab) -> None:
    nameless = tab.run("""[...document.querySelectorAll('button, input, [role=radio], svg[role=img], svg[role=radiogroup], [role=group]')]
      .filter(e => !(e.textContent.trim() || e.getAttribute('aria-label') || (e.labels && e.labels.length)))
      .map(e => e.outerHTML)""")
    assert nameless == []


@needs_browser
def test_the_table_pushes_nothing_aside(tab: Tab) -> None:
    sides = "['.left .card', '.right .card'].map(q => { const b = document.querySelector(q).getBoundingClientRect(); return [b.left, b.right]; })"
    before = tab.run(sides)
    tab.run("document.querySelector('details').open = true")
    assert tab.run(sides) == before
    assert before[0][1] < before[1][0]
    assert tab.run("document.querySelectorAll('tbody tr').length") == len(entries())


BOXES = """(() => {
  const out = { labels: [], marks: [], width: document.documentElement.scrollWidth };
  for (const svg of document.querySelectorAll('svg[role=radiogroup]')) {
    const frame = svg.getBoundingClientRect();
    const box = (e, d) => { const b = e.getBoundingClientRect(); return [b.left + d, b.top + d, b.right - d, b.bottom - d, e.textContent]; };
    out.labels.push({ frame: [frame.left, frame.top, frame.right, frame.bottom],
      boxes: [...svg.querySelectorAll('.label')].map(e => box(e, 1)), marks: [...svg.querySelectorAll('.mark')].map(e => box(e, 2)),
      quiet: [...svg.querySelectorAll('.curve-label, .tick')].map(e => box(e, 1)) });
  }
  return out;
})()"""


def crossing(one: list[Any], other: list[Any]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def within(box: list[Any], frame: list[float]) -> bool:
    return frame[0] <= box[0] and box[2] <= frame[2] and frame[1] <= box[1] and box[3] <= frame[3]


@needs_browser
@pytest.mark.parametrize("size", SIZES)
def test_labels_do_not_overlap(browser: Tab, file: Path, tmp_path: Path, size: tuple[int, int]) -> None:
    browser.view(*size)
    browser.open(file)
    for text in ("", "dapo(epsilon_low=0.18, epsilon_high=0.3)", "trust_region('k3', 0.3, scope='sequence')"):
        if text:
            fill(browser, "spec", text)
            mine = browser.run("[...document.querySelectorAll('.label.mine')].map(e => e.textContent.slice(0, 4))")
            assert mine == [text[:4]]
        found = browser.run(BOXES)
        assert found["width"] <= size[0], "no horizontal scrolling"
        for panel in found["labels"]:
            boxes, frame = panel["boxes"], panel["frame"]
            for k, box in enumerate(boxes):
                assert within(box, frame), box
                others = [*boxes[:k], *panel["marks"], *panel["quiet"]]
                assert not [other for other in others if crossing(box, other)], (text, box)
    for dark in (False, True):
        browser.view(*size, dark)
        browser.open(file)
        shot = browser.screenshot(tmp_path / f"map-{size[0]}-{'dark' if dark else 'light'}.png")
        assert shot.stat().st_size > 20_000
    assert browser.errors() == []
