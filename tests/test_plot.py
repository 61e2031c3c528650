"""Static pictures: what they draw is the spec's own loss, and nothing in them can act."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from devtools import BROWSER, Tab
from test_atlas import contrast, schemes

import klamp
from klamp.atlas.facts import first_interval
from klamp.errors import UserError
from klamp.plot import HEIGHT, WIDTH, curves, svg, write
from klamp.presets import PRESETS, parse

SVG = "{http://www.w3.org/2000/svg}"
DRAWN = [found.usual for found in PRESETS.values() if first_interval(parse(found.usual)) is not None]
XS = [-0.9 + 0.0601 * k for k in range(31)]


def clipped(x: float, advantage: int, low: float, high: float) -> tuple[float, float]:
    """PPO's objective and its slope in log pi_new, by autograd."""
    logp = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    w = logp.exp()
    value = torch.minimum(w * advantage, w.clamp(low, high) * advantage)
    (slope,) = torch.autograd.grad(value, logp)
    return value.item(), slope.item()


@pytest.mark.parametrize(("text", "low", "high"), [("grpo", 0.8, 1.2), ("dapo", 0.8, 1.28), ("gspo(0.1, 0.3)", 0.9, 1.3),
                                                   ("atr_grpo", *(klamp.region("k3", 0.02).low, klamp.region("k3", 0.02).high))])  # fmt: skip
def test_curves_are_the_clipped_surrogate_and_its_slope(text: str, low: float, high: float) -> None:
    guard = first_interval(parse(text))
    assert guard is not None
    found = curves(parse(text), guard, XS)
    for sign in (1, -1):
        expected = [clipped(x, sign, low, high) for x in XS]
        assert found.surrogate[sign] == pytest.approx([value for value, _ in expected], abs=1e-12)
        assert found.coefficient[sign] == pytest.approx([slope for _, slope in expected], abs=1e-12)


def test_a_rollback_falls_from_its_bound_and_a_second_bound_ends_the_fall() -> None:
    text = "rollback(alpha=0.5, epsilon=0.2)"
    guard = first_interval(parse(text))
    assert guard is not None
    found = curves(parse(text), guard, [math.log(1.5)])
    assert (found.surrogate[1][0], found.coefficient[1][0]) == pytest.approx((-0.5 * 1.5 + 1.5 * 1.2, -0.5 * 1.5))
    guard = first_interval(parse("dual_clip(c=3.0)"))
    assert guard is not None
    found = curves(parse("dual_clip(c=3.0)"), guard, [math.log(5.0)])
    assert (found.surrogate[-1][0], found.coefficient[-1][0]) == pytest.approx((-3.0, 0.0))


@pytest.mark.parametrize("text", DRAWN)
def test_every_interval_has_a_picture(text: str) -> None:
    root = ElementTree.fromstring(svg(text))
    assert root.get("role") == "img"
    assert (root.get("aria-label") or "").startswith(str(parse(text)))
    names = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert names <= {"svg", "title", "style", "rect", "path", "text"}
    numbers = re.findall(r"-?\d+\.?\d*|nan|inf", " ".join(e.get("d") or "" for e in root.iter(f"{SVG}path")))
    assert "nan" not in numbers
    assert all(-1.0 <= float(one) <= WIDTH for one in numbers)


def test_the_bounds_stand_where_they_are() -> None:
    root = ElementTree.fromstring(svg("dapo"))
    edges = [
        float(re.findall(r"[\d.]+", e.get("d") or "")[0]) for e in root.iter(f"{SVG}path") if e.get("class") == "edge"
    ]
    fills = [e for e in root.iter(f"{SVG}rect") if e.get("class") == "fill"]
    assert len(edges) == 6
    assert len(fills) == 3
    axis = next(
        re.findall(r"[\d.]+", e.get("d") or "")
        for e in root.iter(f"{SVG}path")
        if e.get("class") == "axis" and "H" in (e.get("d") or "")
    )
    left, right = float(axis[0]), float(axis[2])
    reach = 1.9 * math.log(1.28)
    for edge, bound in zip(edges[:2], (math.log(0.8), math.log(1.28)), strict=True):
        assert edge == pytest.approx(left + (bound + reach) / (2.0 * reach) * (right - left), abs=0.06)
    texts = [e.text for e in root.iter(f"{SVG}text")]
    assert texts.count("0.8") == texts.count("1.28") == 3


def test_foreign_text_is_escaped() -> None:
    guard = "guard(measure='k3', radius=0.1)"
    spec = klamp.Spec(parse(guard).guards, name="<script>alert(1)</script>&\"'")
    root = ElementTree.fromstring(svg(spec))
    assert "<script>" in (root.get("aria-label") or "")
    assert not list(root.iter(f"{SVG}script"))


@pytest.mark.parametrize("text", ["cispo", "dppo_tv(delta=0.15)", "m2po", "vaco", "token_mean"])
def test_a_spec_without_an_interval_is_told_which_have_one(text: str) -> None:
    with pytest.raises(UserError, match=r"no guard whose region is an interval.*grpo.*klamp map") as error:
        svg(text)
    assert "\n" not in str(error.value)


def test_write(tmp_path: Path) -> None:
    out = write("grpo", tmp_path / "out.svg")
    assert out.read_text() == svg("grpo")
    for bad in (tmp_path, tmp_path / "missing" / "out.svg"):
        with pytest.raises(UserError, match="cannot write the picture to"):
            write("grpo", bad)
    with pytest.raises(UserError):
        write("cispo", tmp_path / "none.svg")
    assert list(tmp_path.iterdir()) == [out]


def test_colours_can_be_read() -> None:
    for scheme in schemes(re.search(r"<style>(.*?)</style>", svg("grpo"), re.S)[1]):  # type: ignore[index]
        assert all(contrast(scheme[name], scheme["card"]) >= 4.5 for name in ("ink", "soft"))
        assert all(contrast(scheme[name], scheme["card"]) >= 3.0 for name in ("one", "two", "axis"))


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, klamp.plot; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")
def test_texts_do_not_overlap_in_a_browser(tmp_path: Path) -> None:
    page = tmp_path / "plots.html"
    page.write_text(f'<meta charset="utf-8"><body style="margin:0">{"".join(map(svg, DRAWN))}')
    tab = Tab(tmp_path / "profile")
    try:
        tab.view(WIDTH, HEIGHT * 3)
        tab.open(page)
        found = tab.run("""[...document.querySelectorAll('svg')].map(svg => { const f = svg.getBoundingClientRect();
          return { name: svg.getAttribute('aria-label'), frame: [f.left, f.top, f.right, f.bottom],
            boxes: [...svg.querySelectorAll('text')].map(t => { const b = t.getBoundingClientRect(); return [b.left + 1, b.top + 2, b.right - 1, b.bottom - 2, t.textContent]; }) }; })""")
        assert len(found) == len(DRAWN)
        for picture in found:
            left, top, right, bottom = picture["frame"]
            boxes = picture["boxes"]
            for k, (x0, y0, x1, y1, text) in enumerate(boxes):
                assert min(x0 - left, right - x1, y0 - top, bottom - y1) >= 0.0, (picture["name"], text)
                crossed = [b for b in boxes[:k] if x0 < b[2] and b[0] < x1 and y0 < b[3] and b[1] < y1]
                assert not crossed, (picture["name"], text, crossed)
        tab.screenshot(tmp_path / "plots.png")
        assert tab.errors() == []
    finally:
        tab.close()
