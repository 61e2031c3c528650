"""Where the constraints lie: their regions as intervals of the ratio, and their places in the power family."""

from __future__ import annotations

import math

from klamp.atlas.places import points
from klamp.compare.report import canvas
from klamp.compare.report.anatomy import removed, total
from klamp.compare.report.canvas import Axis, Frame, across, ruled, tone
from klamp.compare.report.data import Comparison, Region, Spec
from klamp.compare.report.words import coordinates, listed, region
from klamp.report.charts import number
from klamp.report.page import text


def section(c: Comparison) -> str:
    placed = [(spec, spec.region) for spec in c.drawn if spec.region and (spec.region.low or spec.region.high)]
    body = (_intervals(placed) + _family(c, placed)) if placed else ""
    absent = [spec for spec in c.drawn if spec not in {one for one, _ in placed}]
    items = "".join(f"<li>{canvas.named(spec)} {text(_why(spec))}</li>" for spec in absent)
    rest = (
        f'<div class="card"><h3>Without an interval of the ratio</h3><ul class="plain">{items}</ul></div>'
        if items
        else ""
    )
    intro = (
        "The region of a constraint is the interval of ratios that a token may have before its gradient can be removed."
    )
    if c.facts.get("calibrated"):
        intro += (
            f" The radii were set so that the regions have the same {str(c.facts['calibrated']).replace('_', ' ')}."
        )
    return canvas.section("regions", "Where the constraints lie", intro, f'<div class="charts">{body}</div>{rest}')


def _why(spec: Spec) -> str:
    if spec.note:
        return spec.note
    whole = total(spec)
    if whole is not None and removed(whole) <= 0:
        return "It removed nothing from the gradient: it weighs tokens, and cuts none."
    return (
        "Which tokens it cuts does not follow from one ratio alone."
        if whole is not None
        else "No interval of one ratio says what it does."
    )


def _intervals(placed: list[tuple[Spec, Region]]) -> str:
    x = canvas.ratios([bound for _, one in placed for bound in (one.low, one.high) if bound is not None])
    rows = "".join(_row(spec, one, x) for spec, one in placed)
    of = sorted({one.ratio for _, one in placed})
    caption = "A wider bar lets tokens move further; a bar that reaches further right of 1 leaves more room upward than downward."
    if len(of) > 1:
        caption += f" The ratios differ: {listed(of)}."
    title = f"ratio {of[0] if len(of) == 1 else ''} (logarithmic)".replace("  ", " ")
    return canvas.figure(
        "Intervals of the ratio", caption, f'<div class="rows">{rows}{canvas.row_foot(x, title)}</div>'
    )


def _row(spec: Spec, one: Region, x: Axis) -> str:
    low = None if one.low is None or one.low <= 0 or math.log(one.low) < x.low else one.low
    high = None if one.high is None or math.log(one.high) > x.high else one.high
    left, right = (0.0 if low is None else x.at(low)), (1.0 if high is None else x.at(high))
    body = f'<line class="interval" x1="{across(left)}" x2="{across(right)}" y1="12" y2="12"/>'
    for bound, end, turn in ((low, left, 180), (high, right, 0)):
        if bound is None:  # an arrow at the end of the picture
            body += canvas.arrow(across(end), 12, turn)
        else:
            body += f'<line class="whisker" x1="{across(end)}" x2="{across(end)}" y1="5" y2="19"/>'
    middle = (left + right) / 2
    body += canvas.mark(spec.place, across(middle), 12, "b")
    said = region(one) + (f" \N{MIDDLE DOT} {place}" if (place := coordinates(one)) else "")
    return (
        f'<div class="row series {tone(spec.place)}" data-s="{spec.place}"><p class="who">{canvas.named(spec)}</p>'
        f'<p class="what">{text(said)}</p>{ruled(x, body, zero=1.0)}</div>'
    )


def _family(c: Comparison, placed: list[tuple[Spec, Region]]) -> str:
    """The plane of the power family, with the published methods as grey dots."""
    title = "Places in the power family"
    caption = (
        "Every two-sided interval is the region of one member of the power family: a says how it leans (2: as far down as "
        "up in the ratio, 0: KL3), the radius how wide it is. Grey: the published methods of the map (klamp map)."
    )
    found = [
        (spec, one.a, one.radius)
        for spec, one in placed
        if one.a is not None and one.radius is not None and one.radius > 0
    ]
    if not found:
        return canvas.nothing(title, caption, "none of the regions has two sides")
    known = [
        (p["a"], p["radius"], [m["name"] for m in p["members"]])
        for p in points()
        if p["a"] is not None and p["radius"] > 0
    ]
    spread = [radius for _, _, radius in found]
    reach = min(spread) / 30, max(spread) * 30
    tilt = [a for _, a, _ in found]
    edge = min(-4.0, *tilt), max(4.0, *tilt)
    near = [one for one in known if reach[0] <= one[1] <= reach[1] and 2 * edge[0] <= one[0] <= 2 * edge[1]]
    x = canvas.logarithmic([*spread, *(radius for _, radius, _ in near)], least=0.0)
    y = canvas.bowed([*tilt, *(a for a, _, _ in near)])
    frame = Frame("plane")
    body = ""
    for a, radius, names in near:
        tip = f"{', '.join(names)}: a = {number(a)}, radius {number(radius)}"
        body += (
            f'<circle class="known" cx="{across(x.at(radius))}" cy="{frame.y(y.at(a))}" r="4" data-tip="{text(tip)}"/>'
        )
    for spec, a, radius in found:
        tip = f"{spec.label}: a = {number(a)}, radius {number(radius)}"
        body += canvas.mark(spec.place, across(x.at(radius)), frame.y(y.at(a)), "b", f' data-tip="{text(tip)}"')
    label = f"{title}: " + "; ".join(
        f"{spec.label} a {number(a)}, radius {number(radius)}" for spec, a, radius in found
    )
    picture = frame.draw(x, y, body, label, "radius (logarithmic)", "a")
    return canvas.figure(title, caption, picture + canvas.keys(c.drawn))
