"""What was cut: the share of tokens whose gradient was removed, by old probability, by side and by the sign of A."""

from __future__ import annotations

import math
from collections.abc import Sequence

from klamp.compare.report import canvas, curves
from klamp.compare.report.canvas import Axis, Frame, across, tone
from klamp.compare.report.data import Anatomy, Comparison, Spec
from klamp.compare.report.words import fixed, listed
from klamp.report.charts import number
from klamp.report.page import text

REMOVED = curves.Chart("removed_share", "Gradient removed", "Share of tokens whose policy gradient was set to zero.",
                       "share of tokens", percent=True)  # fmt: skip


def section(c: Comparison) -> str:
    found = [(spec, whole) for spec in c.drawn if (whole := total(spec))]
    absent = [spec.label for spec in c.drawn if spec not in {one for one, _ in found}]
    over_time = f'<div class="charts">{curves.draw(REMOVED, c.drawn, "removed")}</div>'
    intro = (
        "Each bar is the share of the tokens of that old probability (the one they were sampled with) whose gradient was "
        "removed: upward those that would have become likelier still (high side), downward those that would have "
        "become rarer still (low side). All panels have the same axes; all seeds are counted together."
    )
    if not found:
        return canvas.section("anatomy", "What was cut", "What was cut by old probability was not recorded.", over_time)
    edges = {whole.edges for _, whole in found}
    reach = max(
        [share for _, whole in found for side in (whole.low, whole.high) for share in _shares(side, whole.tokens)]
        + [1e-4]
    )
    cutting = [(spec, whole) for spec, whole in found if removed(whole) > 0]
    panels = "".join(_panel(spec, whole, reach) for spec, whole in cutting)
    idle = [f"{spec.label} (of {math.fsum(whole.tokens):,.0f} tokens)" for spec, whole in found if removed(whole) <= 0]
    rest = f'<p class="aside">Nothing was removed by {text(listed(idle))}.</p>' if idle else ""
    rest += f'<p class="aside">Not recorded: {text(", ".join(absent))}.</p>' if absent else ""
    rest += '<p class="aside">The panels have different bins.</p>' if len(edges) > 1 else ""
    legend = '<p class="sides"><span><i class="high"></i>high side</span><span><i class="low"></i>low side</span></p>'
    signs = _signs(cutting)
    return canvas.section(
        "anatomy",
        "What was cut",
        intro,
        f'{legend}<div class="panels">{panels}</div>{rest}<div class="charts two">{signs}</div>{over_time}',
    )


def total(spec: Spec) -> Anatomy | None:
    """The sums over the seeds that have the bins of the first."""
    found = [run.anatomy for run in spec.runs if run.anatomy is not None]
    same = [one for one in found if one.edges == found[0].edges]
    if not same:
        return None

    def sums(columns: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(math.fsum(values) for values in zip(*columns, strict=True))

    def signs(pairs: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
        known = [pair for pair in pairs if pair is not None]
        return (math.fsum(removed for removed, _ in known), math.fsum(whole for _, whole in known)) if known else None

    return Anatomy(
        same[0].edges, sums([one.tokens for one in same]), sums([one.low for one in same]), sums([one.high for one in same]),
        signs([one.positive for one in same]), signs([one.negative for one in same]), all(one.of_sign for one in same),
    )  # fmt: skip


def removed(whole: Anatomy) -> float:
    return math.fsum([*whole.low, *whole.high])


def _shares(side: Sequence[float], tokens: Sequence[float]) -> list[float]:
    return [min(1.0, removed / whole) if whole > 0 else 0.0 for removed, whole in zip(side, tokens, strict=True)]


def _panel(spec: Spec, whole: Anatomy, reach: float) -> str:
    frame, bins = Frame("small"), len(whole.tokens)
    up = canvas.linear([0.0, reach], percent=True, count=3)
    top = up.high
    y = Axis(
        -top,
        top,
        tuple((0.5 + sign * place / 2, name) for place, name in up.marks for sign in ((1, -1) if place else (1,))),
    )
    every = max(1, math.ceil(bins / 5))
    at = [k for k in range(bins + 1) if k % every == 0 or k == bins]
    at = [k for k in at if k == bins or bins - k >= every / 2]
    x = Axis(0, bins, tuple((k / bins, f"{whole.edges[k]:.3g}") for k in at))
    bars = ""
    for k, (low, high) in enumerate(
        zip(_shares(whole.low, whole.tokens), _shares(whole.high, whole.tokens), strict=True)
    ):
        tip = (
            f"old probability {whole.edges[k]:.4g} to {whole.edges[k + 1]:.4g}: {number(high, True)} removed on the high side, "
            f"{number(low, True)} on the low side, of {whole.tokens[k]:,.0f} tokens"
        )
        for share, side, sign in ((high, "high", 1), (low, "low", -1)):
            a, b = sorted((frame.y(0.5), frame.y(y.at(sign * share))))
            bars += f'<rect class="bar {side}" x="{across((k + 0.06) / bins)}" width="{across(0.88 / bins)}" y="{a}" height="{b - a:.1f}"/>'
        bars += f'<rect class="hit" x="{across(k / bins)}" width="{across(1 / bins)}" y="{canvas.TOP}" height="{frame.depth}" data-tip="{text(tip)}"/>'
    middle = f'<line class="axis" x1="0" x2="100%" y1="{frame.y(0.5)}" y2="{frame.y(0.5)}"/>'
    picture = frame.draw(x, y, bars + middle, f"{spec.label}: {_told(whole)}", "old probability", "share of tokens")
    return (
        f'<figure class="series {tone(spec.place)}" data-s="{spec.place}"><figcaption><h3>{canvas.named(spec)}</h3>'
        f"<p>{text(_told(whole))}</p></figcaption><div class=body>{picture}</div></figure>"
    )


def _told(whole: Anatomy) -> str:
    """One sentence from the counts: how much was removed, on which side, and of which tokens."""
    tokens, high, cut = math.fsum(whole.tokens), math.fsum(whole.high), removed(whole)
    if tokens <= 0:
        return "No tokens were counted."
    half, sofar, bound = 0.5 * cut, 0.0, whole.edges[-1]
    for k, pair in enumerate(zip(whole.low, whole.high, strict=True)):
        sofar += sum(pair)
        if sofar >= half:
            bound = whole.edges[k + 1]
            break
    share = f"{fixed(100 * cut / tokens)}% of {tokens:,.0f} tokens removed, {fixed(100 * high / cut)}% of them on the high side"
    return (
        f"{share}; at least half of them had an old probability of at most {bound:.3g}."
        if bound < whole.edges[-1]
        else f"{share}."
    )


def _signs(found: Sequence[tuple[Spec, Anatomy]]) -> str:
    """Removed shares by the sign of the advantage, a row for each spec."""
    known = [(spec, one.positive, one.negative) for spec, one in found if one.positive or one.negative]
    title = "By the sign of the advantage"
    caption = "Upper bar: tokens of answers that were better than their group (A > 0), lower bar: worse (A < 0)."
    if not known:
        return canvas.nothing(title, caption)
    pairs = [pair for _, *both in known for pair in both if pair is not None]
    x = canvas.linear([0.0, *(removed / whole for removed, whole in pairs if whole > 0)], percent=True)
    rows = "".join(_sign_row(spec, positive, negative, x) for spec, positive, negative in known)
    legend = '<p class="sides"><span><i class="plus"></i>A &gt; 0</span><span><i class="less"></i>A &lt; 0</span></p>'
    of = "tokens of that sign" if all(one.of_sign for _, one in found) else "all tokens"
    foot = canvas.row_foot(x, f"gradient removed, share of {of}")
    return canvas.figure(title, caption, f'{legend}<div class="rows">{rows}{foot}</div>', "wide")


def _sign_row(spec: Spec, positive: tuple[float, float] | None, negative: tuple[float, float] | None, x: Axis) -> str:
    bars, said = "", []
    for pair, kind, y, name in ((positive, "plus", 4, "A > 0"), (negative, "less", 16, "A < 0")):
        share = pair[0] / pair[1] if pair and pair[1] > 0 else None
        said.append(f"{name}: {'not recorded' if share is None else f'{fixed(100 * share)}%'}")
        bars += (
            "" if share is None else f'<rect class="{kind}" x="0" y="{y}" width="{across(x.at(share))}" height="10"/>'
        )
    return (
        f'<div class="row series {tone(spec.place)}" data-s="{spec.place}"><p class="who">{canvas.named(spec)}</p>'
        f'<p class="what">{text("; ".join(said))}</p>{canvas.ruled(x, bars)}</div>'
    )
