"""The page of the map: its skeleton, its data and its table, around the script and the style that lie beside it."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files
from typing import Any

from klamp.atlas.arguments import table
from klamp.atlas.facts import WHY, plain
from klamp.atlas.places import absent, binary, points
from klamp.guards import ACTIONS, AFTER, BEFORE, CUT_VALUES, GATES, RATIOS, SCOPES
from klamp.language import PARTS
from klamp.measures import MEASURES
from klamp.radii import RADII
from klamp.report.page import text

SCRIPTS = ("solver.js", "reader.js", "chart.js", "atlas.js")
START = "atr_grpo(delta=0.02)"


@cache
def _file(name: str) -> str:
    return files("klamp.atlas").joinpath(name).read_text(encoding="utf-8")


def data() -> dict[str, Any]:
    """What the script knows of the library: points, presets and how their arguments act, words, reasons."""
    words = {"ratio": RATIOS, "scope": SCOPES, "reduce": BEFORE + AFTER, "gate": tuple(GATES), "action": ACTIONS,
             "cut_value": CUT_VALUES}  # fmt: skip
    found = {"points": points(), "presets": table(), "binary": binary(), "words": words, "why": WHY,
             "radii": list(RADII), "powers": {name: one.power for name, one in MEASURES.items() if one.power is not None}, "parts": [name for name in PARTS if name != "guard"], "start": START}  # fmt: skip
    return plain(found)  # type: ignore[no-any-return]


def page() -> str:
    """The whole page. It opens offline: nothing can be loaded, and only this script and style may act."""
    style, script = _file("atlas.css"), "".join(map(_file, SCRIPTS))
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    known = json.dumps(data(), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="referrer" content="no-referrer">\n<title>Klamp: the map of ratio clips</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n{_BODY.format(table=_table(), absent=_absent())}"
        f'<script type="application/json" id="data">{known}</script>\n<script>{script}</script>\n</body>\n</html>\n'
    )


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _table() -> str:
    """Every interval as a row, for readers who do not see the map or run no script."""
    rows = []
    for point in points():
        for member in point["members"]:
            high = "\N{INFINITY}" if point["log_high"] == float("inf") else f"{point['high']:.7g}"
            where = ["", ""] if point["a"] is None else [f"{point[name]:.6g}" for name in ("a", "radius")]
            cells = [member["spec"], f"{point['low']:.7g} to {high}", *where, f"{member['ratio']}, {member['scope']}"]
            numbers = "".join(f'<td class="n">{text(cell)}</td>' for cell in cells[1:])
            rows.append(f"<tr><td><code>{text(cells[0])}</code></td>{numbers}<td>{text(member['citation'])}</td></tr>")
    head = "".join(f'<th scope="col">{name}</th>' for name in ("spec", "interval of w", "a", "radius", "w", "source"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _absent() -> str:
    listed = "; ".join(f"{', '.join(names)} ({why})" for why, names in absent())
    by_probability = ", ".join(one["name"] for one in binary())
    return text(
        f"Not on the plane: {by_probability} (bounds depend on the token's probability: see that chart); {listed}."
    )


_SHAPES = (
    ("both", "M-6,0a6,6 0 1 0 12,0a6,6 0 1 0 -12,0Z", "new policy against old or sampler"),
    ("sampler", "M0,-7L7,0L0,7L-7,0Z", "old against sampler"),
    ("one", "M0,-7L7,5L-7,5Z", "one bound only (strip on the right)"),
)
_LEGEND = "".join(
    f'<span><svg viewBox="-11 -8 22 16" aria-hidden="true"><g class="kind {kind}"><path class="mark" d="{shape}"/></g></svg>'
    f"{meaning}</span>"
    for kind, shape, meaning in _SHAPES
) + (
    '<span><svg viewBox="0 0 22 14" aria-hidden="true"><path class="power zero" d="M0,7H22"/></svg>one a of the power family</span>'
    '<span><svg viewBox="0 0 22 14" aria-hidden="true"><path class="tv" d="M0,7H22"/></svg>equal worst-case TV</span>'
)

_BODY = f"""\
<main>
<header><h1>The map of ratio clips</h1><p>Every two-sided clip of the ratio w is one point: how wide, and how tilted.</p></header>
<noscript><p>The map needs its script, which is inside this file; the table below does not.</p></noscript>
<div class="layout">
<div class="left">
<section class="card" aria-labelledby="title-token"><h2 id="title-token">Per token</h2>
<div><svg id="map-token" data-height="330" role="radiogroup" aria-label="Intervals of the ratio of single tokens; arrow keys move between the points"></svg></div>
<div class="legend">{_LEGEND}</div></section>
<section class="card" aria-labelledby="title-sequence"><h2 id="title-sequence">Per response or turn <span>the ratio is taken over a sequence or segment</span></h2>
<div><svg id="map-sequence" data-height="250" role="radiogroup" aria-label="Intervals of the ratio of whole responses or turns; arrow keys move between the points"></svg></div></section>
<div class="notes">
<p class="quiet">{{absent}}</p>
<p class="quiet">Width is log(u / l), tilt is (log u + log l) / (log u \N{MINUS SIGN} log l) of an interval [l, u]. Each two-sided interval is the region {{{{w : (w^a \N{MINUS SIGN} 1 \N{MINUS SIGN} a(w \N{MINUS SIGN} 1)) / (a(a \N{MINUS SIGN} 1)) \N{LESS-THAN OR EQUAL TO} radius}}}} of exactly one a and radius. The worst-case TV is (u \N{MINUS SIGN} 1)(1 \N{MINUS SIGN} l) / (u \N{MINUS SIGN} l).</p>
</div>
</div>
<div class="right">
<section class="card ask" aria-label="Spec"><label for="spec">Click a point, move a slider, or type a spec</label>
<div class="copy"><input type="text" id="spec" autocomplete="off" autocapitalize="off" spellcheck="false" aria-describedby="message"><button type="button" id="copy">Copy</button></div>
<p class="message" id="message" role="status"></p></section>
<section class="card stack" id="chosen" aria-label="The chosen interval">
<p class="interval mono" id="interval" aria-live="polite"><output id="low"></output> <i>\N{LESS-THAN OR EQUAL TO} w \N{LESS-THAN OR EQUAL TO}</i> <output id="high"></output></p>
<div class="facts lines" id="by-probability" hidden></div>
<div class="facts" id="facts"></div>
<p class="note">The same region: <code id="same"></code></p>
<div class="chips" id="members" role="group" aria-label="Methods with this interval"></div>
<p class="note" id="cite"></p>
<div class="sliders">
<label for="radius">radius</label><input type="range" id="radius" min="-8" max="1.3" step="0.001"><input type="text" inputmode="decimal" id="radius-value" aria-label="radius, typed">
<label for="a">a</label><input type="range" id="a" min="-8.7" max="8.7" step="0.001"><input type="text" inputmode="text" id="a-value" aria-label="a, typed">
</div>
<div class="charts">
<figure><figcaption><h3>Surrogate J</h3></figcaption><svg id="chart-J" data-height="176" role="img"></svg></figure>
<figure><figcaption><h3>Gradient coefficient g</h3></figcaption><svg id="chart-g" data-height="176" role="img"></svg></figure>
<div class="legend wide" id="legend-A"><span><svg viewBox="0 0 22 14" aria-hidden="true"><path class="line one" d="M0,7H22"/></svg>A = +1</span><span><svg viewBox="0 0 22 14" aria-hidden="true"><path class="line two" d="M0,7H22"/></svg>A = \N{MINUS SIGN}1</span></div>
<p class="note wide" id="drawn"></p>
<figure class="wide"><figcaption><h3>Permitted new probability of a token</h3></figcaption><svg id="chart-p" data-height="230" role="img"></svg></figure>
<div class="wide stack"><span class="caption">Shaded: the interval above. Binary divergences, whose bounds bend with the probability:</span><div class="chips" id="overlays" role="group" aria-label="Binary divergences to show"></div></div>
</div>
</section>
</div>
</div>
<details><summary>All intervals as a table</summary><div class="scroll">{{table}}</div></details>
</main>
<div class="bar" aria-hidden="true"><a href="#chosen" id="bar-text" tabindex="-1"></a></div>
"""
