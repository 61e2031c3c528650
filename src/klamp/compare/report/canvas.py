"""How the page draws: colours and marks of the specs, axes, and pictures that keep their type size at any width.

A picture is two SVGs side by side: a column of fixed width with the labels of the value axis, and an area whose
horizontal places are shares of its width (per cent), so that lines stretch with the page while text does not.
Every value is drawn inside its area; colours, heights and type come from the page's style sheet by class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from klamp.compare.report.data import Spec
from klamp.report.charts import Scale, number, ratio_marks, tick_labels, ticks
from klamp.report.page import text

TONES = 10
FEW = 4  # specs whose ranges and seeds can be told apart in one picture
TOP, BOTTOM = 8, 24  # of an area, for the tick labels
HEIGHTS = {"curve": 230, "tall": 320, "plane": 300, "small": 150}  # as in the style sheet
WIDE = 1000  # units across the lines of an area

# Ten marks that differ without colour, about 10 units wide.
SHAPES = (
    "M-4.6,0a4.6,4.6 0 1 0 9.2,0a4.6,4.6 0 1 0 -9.2,0Z",
    "M-4.2,-4.2H4.2V4.2H-4.2Z",
    "M0,-5.4L5.2,4H-5.2Z",
    "M0,-5.8L5.8,0L0,5.8L-5.8,0Z",
    "M0,5.4L5.2,-4H-5.2Z",
    "M-1.7,-5.2H1.7V-1.7H5.2V1.7H1.7V5.2H-1.7V1.7H-5.2V-1.7H-1.7Z",
    "M-5,-2.8L-2.8,-5L0,-2.2L2.8,-5L5,-2.8L2.2,0L5,2.8L2.8,5L0,2.2L-2.8,5L-5,2.8L-2.2,0Z",
    "M-4,0a4,4 0 1 0 8,0a4,4 0 1 0 -8,0Z",
    "M-3.8,-3.8H3.8V3.8H-3.8Z",
    "M0,-5L5,0L0,5L-5,0Z",
)
HOLLOW = 7  # the first that is an outline


def tone(place: int) -> str:
    """The colour class of a spec."""
    return f"s{place % TONES}"


def shape(place: int) -> int:
    """The mark of a spec; of more than ten specs two share a colour or a mark, and not both."""
    return (place + place // TONES) % TONES


def symbols() -> str:
    """The marks, small and big, once for the page."""
    found = [
        f'<path id="{kind}{k}" class="{"hollow" if k >= HOLLOW else "solid"}" d="{path}"{scale}/>'
        for k, path in enumerate(SHAPES)
        for kind, scale in (("m", ""), ("b", ' transform="scale(1.55)"'))
    ]
    return f'<svg class="defs" width="0" height="0" aria-hidden="true"><defs>{"".join(found)}</defs></svg>'


def mark(place: int, x: str, y: float | str, kind: str = "m", extra: str = "") -> str:
    return f'<use href="#{kind}{shape(place)}" class="series {tone(place)}" data-s="{place}" x="{x}" y="{y}"{extra}/>'


def far_mark(place: int, x: str, y: float, kind: str, extra: str, aside: int, up: int) -> str:
    """A mark that belongs beyond the picture (by its side, -1, 0 or 1): inside its edge, with an arrow that points on."""
    moved = f'{extra} transform="translate({0 if up else -13 * aside},{13 * up})"'
    inner = f'<svg class="here" x="{x}" y="{y:g}">{mark(place, "0", "0", kind, moved)}</svg>'
    pointer = arrow(x, y, -90 * up if up else 90 - 90 * aside)
    return f'<g class="series {tone(place)}" data-s="{place}">{inner}{pointer}</g>'


def swatch(place: int, line: bool = False) -> str:
    """The mark of a spec beside its name, on its line where lines are drawn."""
    stroke = f'<line class="mean d{place % 5}" x1="-17" x2="17" y1="0" y2="0"/>' if line else ""
    box = "-18 -8 36 16" if line else "-9 -8 18 16"
    kind = "swatch wide" if line else "swatch"
    return (
        f'<svg class="{kind} {tone(place)}" viewBox="{box}" aria-hidden="true">{stroke}'
        f'<use href="#m{shape(place)}"/></svg>'
    )


def named(spec: Spec) -> str:
    """A spec's mark and label, on one line; the whole text where the pointer rests."""
    return f'{swatch(spec.place)}<b class="name" title="{text(spec.text or spec.label)}">{text(spec.label)}</b>'


def keys(specs: Iterable[Spec]) -> str:
    """The marks under a picture, for print: on the screen the bar of specs is always in sight."""
    return '<div class="keys">' + "".join(f"<span>{named(spec)}</span>" for spec in specs) + "</div>"


# -- axes --------------------------------------------------------------------------------------


def _same(value: float) -> float:
    return value


@dataclass(frozen=True)
class Axis:
    """A map of values onto 0 .. 1 of an axis, with labelled marks; what lies beyond the ends is drawn at the end."""

    low: float  # in scaled units
    high: float
    marks: tuple[tuple[float, str], ...]  # (share of the axis, label)
    scale: Callable[[float], float] = _same
    floor: float | None = None  # of a logarithmic axis: the least value that has its own place

    def at(self, value: float) -> float:
        return min(1.0, max(0.0, self._share(value)))

    def beyond(self, value: float) -> int:
        """-1 below the axis, 1 above it, 0 on it."""
        share = self._share(value)
        return (share > 1 + 1e-9) - (share < -1e-9)

    def _share(self, value: float) -> float:
        value = value if self.floor is None else max(value, self.floor)
        return (self.scale(value) - self.low) / (self.high - self.low)


def across(share: float) -> str:
    """A horizontal place as a share of the area's width."""
    return f"{100 * share:.2f}%"


def linear(values: Sequence[float], percent: bool = False, count: int = 4) -> Axis:
    """An axis between round values that holds all values."""
    low, high = _apart(min(values), max(values))
    found = ticks(low, high, count)
    low, high = min(low, found[0]), max(high, found[-1])
    return Axis(low, high, _placed(found, tick_labels(found, percent), low, high))


def inner(values: Sequence[float]) -> tuple[float, float]:
    """The range of the values without a few that lie so far out that the others could not be told apart."""
    ordered = sorted(values)
    n = len(ordered)
    first, third = ordered[n // 4], ordered[(3 * n) // 4]
    reach = 3 * (third - first)
    near = [value for value in ordered if first - reach <= value <= third + reach]
    few = n >= 8 and reach > 0 and n - len(near) <= 0.2 * n
    return (
        (near[0], near[-1])
        if few and ordered[-1] - ordered[0] > 2 * (near[-1] - near[0])
        else (ordered[0], ordered[-1])
    )


def arrow(x: str, y: float, turn: int) -> str:
    """The sign of what lies beyond the picture; `turn` in degrees, 0 to the right."""
    return (
        f'<svg class="here" x="{x}" y="{y:g}"><path class="open" transform="rotate({turn})" d="M-6,-5L0,0L-6,5"/></svg>'
    )


def steps(low: int, high: int) -> Axis:
    """Whole numbers without a margin: the line begins and ends where the run does."""
    first, last = (low, high) if low < high else (low - 1, high + 1)
    found = [value for value in ticks(first, last, 5, whole=True) if first <= value <= last]
    return Axis(first, last, _placed(found, tick_labels(found), first, last))


def logarithmic(values: Sequence[float], percent: bool = False, least: float = 1e-3) -> Axis:
    """Decades, with 2 and 5 between few of them; values below `least` times the median share the foot."""
    positive = sorted(value for value in values if value > 0)
    floor = max(positive[0], least * positive[len(positive) // 2])
    low, high = _apart(math.log10(floor), math.log10(positive[-1]))
    between = (1, 2, 5) if high - low < 1.7 else (1, 3) if high - low < 3 else (1,)
    every = max(1, math.ceil((high - low) / 5))
    decades = range(math.floor(low), math.ceil(high) + 1)
    found = [(math.log10(k) + d, k * 10.0**d) for d in decades if d % every == 0 for k in between]
    inside = [(place, value) for place, value in found if low - 0.02 <= place <= high + 0.02]
    low, high = min([low, *(place for place, _ in inside)]), max([high, *(place for place, _ in inside)])
    pad = 0.04 * (high - low)
    low, high = low - pad, high + pad
    shown = [((place - low) / (high - low), _short(value, percent)) for place, value in inside]
    return Axis(low, high, tuple(shown), math.log10, 10.0 ** (low + pad))


def _short(value: float, percent: bool) -> str:
    """A round number: 1e-6 rather than 1.00e-6."""
    return (
        f"{value:.0e}".replace("e-0", "e\N{MINUS SIGN}") if 0 < value < 1e-4 and not percent else number(value, percent)
    )


def uneven(values: Sequence[float]) -> bool:
    """Whether a few values are so much larger than the others that only a logarithmic axis shows both."""
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2] if ordered else 0.0
    return len(ordered) > 1 and ordered[0] >= 0 and middle > 0 and ordered[-1] > 20 * middle


def bowed(values: Sequence[float]) -> Axis:
    """asinh: linear about 0, logarithmic far out, for values of either sign and any size."""
    low, high = _apart(*(math.asinh(edge) for edge in (min([*values, -1.0]), max([*values, 1.0]))))
    pad = 0.06 * (high - low)
    low, high = low - pad, high + pad
    found: list[tuple[float, str]] = []
    for value in (0, *(sign * size * 10**k for k in range(9) for size in (2, 5, 1) for sign in (1, -1))):
        place = (math.asinh(value) - low) / (high - low)
        if 0 <= place <= 1 and all(abs(place - other) >= 0.09 for other, _ in found):
            found.append((place, number(value)))
    return Axis(low, high, tuple(sorted(found)), math.asinh)


def ratios(values: Sequence[float]) -> Axis:
    """Ratios about 1 on a logarithmic axis; what is further out than a factor of 20 is drawn at the end."""
    near = [math.log(value) for value in values if value > 0] or [0.1]
    reach = max(-20, min([*near, 0.0])), min(20, max([*near, 0.0]))
    low, high = (max(reach[0], -math.log(20)), min(reach[1], math.log(20)))
    low, high = _apart(low, high)
    pad = 0.08 * (high - low)
    low, high = low - pad, high + pad
    if high - low > 0.35:
        shown = [(at / 320, label) for at, label in ratio_marks(Scale(low, high, 0, 320))]
    else:
        found = [value for value in ticks(math.exp(low), math.exp(high), 6) if low <= math.log(value) <= high]
        shown = [((math.log(v) - low) / (high - low), name) for v, name in zip(found, tick_labels(found), strict=True)]
    return Axis(low, high, tuple(shown), math.log, 1e-300)


def _apart(low: float, high: float) -> tuple[float, float]:
    """The two, or a little around them where they are as good as equal."""
    size = max(abs(low), abs(high))
    return (
        (low, high) if high - low > 1e-9 * size and high > low else (low - (0.1 * size or 1), high + (0.1 * size or 1))
    )


def _placed(values: Sequence[float], labels: Sequence[str], low: float, high: float) -> tuple[tuple[float, str], ...]:
    return tuple(((value - low) / (high - low), label) for value, label in zip(values, labels, strict=True))


# -- pictures ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """The vertical places of a picture of one kind."""

    kind: str

    @property
    def depth(self) -> int:
        return HEIGHTS[self.kind] - TOP - BOTTOM

    def y(self, share: float) -> float:
        return round(TOP + (1 - share) * self.depth, 1)

    def lines(self, body: str) -> str:
        """Lines in units of WIDE x depth, downward, that stretch with the area."""
        return (
            f'<svg class="lines" x="0" y="{TOP}" width="100%" height="{self.depth}" '
            f'viewBox="0 0 {WIDE} {self.depth}" preserveAspectRatio="none">{body}</svg>'
        )

    def point(self, x: float, y: float) -> str:
        return f"{WIDE * x:.1f},{(1 - y) * self.depth:.1f}"

    def draw(self, x: Axis, y: Axis, body: str, label: str, x_title: str, y_title: str, focus: bool = False) -> str:
        """The whole picture with its axes; both axes have a title, with the unit."""
        grid = "".join(
            f'<line class="grid" x1="0" x2="100%" y1="{self.y(at)}" y2="{self.y(at)}"/>' for at, _ in y.marks
        )
        side = "".join(
            f'<text x="100%" dx="-8" y="{self.y(at) + 4:g}" text-anchor="end">{text(name)}</text>'
            for at, name in y.marks
        )
        focusable = ' tabindex="0"' if focus else ""
        return (
            f'<p class="axis-name">{text(y_title)}</p><div class="picture"><svg class="side {self.kind}" aria-hidden="true">{side}</svg>'
            f'<svg class="area {self.kind}" role="img" aria-label="{text(label)}"{focusable}>{grid}{foot(x, TOP + self.depth)}{body}</svg>'
            f'</div><p class="axis-name x">{text(x_title)}</p>'
        )  # fmt: skip


def foot(x: Axis, y: float) -> str:
    """The horizontal axis at a height. A long label at an end of it is written inward."""
    out = [f'<line class="axis" x1="0" x2="100%" y1="{y:g}" y2="{y:g}"/>']
    for at, label in x.marks:
        anchor = "middle" if len(label) <= 5 or 0.03 < at < 0.97 else "start" if at < 0.5 else "end"
        out.append(
            f'<line class="axis" x1="{across(at)}" x2="{across(at)}" y1="{y:g}" y2="{y + 4:g}"/>'
            f'<text x="{across(at)}" y="{y + 17:g}" text-anchor="{anchor}">{text(label)}</text>'
        )
    return "".join(out)


def ruled(x: Axis, body: str, height: int = 30, zero: float | None = None) -> str:
    """One row of a picture of rows: the marks of the axis run through it, and a strong line at `zero`."""
    grid = "".join(
        f'<line class="grid" x1="{across(at)}" x2="{across(at)}" y1="0" y2="{height}"/>' for at, _ in x.marks
    )
    strong = (
        ""
        if zero is None
        else f'<line class="zero" x1="{across(x.at(zero))}" x2="{across(x.at(zero))}" y1="0" y2="{height}"/>'
    )
    return f'<svg class="strip" aria-hidden="true">{grid}{strong}{body}</svg>'


def row_foot(x: Axis, title: str) -> str:
    """The axis under the last row."""
    return f'<svg class="strip foot" aria-hidden="true">{foot(x, 1)}</svg><p class="axis-name x">{text(title)}</p>'


def figure(title: str, caption: str, body: str, kind: str = "") -> str:
    """A titled card with one sentence that says what to see."""
    css = f' class="{kind}"' if kind else ""
    head = f"<figcaption><h3>{text(title)}</h3><p>{text(caption)}</p></figcaption>"
    return f'<figure{css}>{head}<div class="body">{body}</div></figure>'


def nothing(title: str, caption: str, why: str = "not recorded") -> str:
    return figure(title, caption, f'<p class="empty">{text(why)}</p>')


def section(name: str, title: str, intro: str, body: str) -> str:
    return f'<section id="{name}"><h2>{text(title)}</h2><p class="intro">{text(intro)}</p>{body}</section>'
