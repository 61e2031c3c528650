"""Explanations: what a spec is, in numbers and words, without torch."""

from __future__ import annotations

import ast
import math
from dataclasses import fields
from typing import Any

from klamp.factors import Factor
from klamp.guards import Guard
from klamp.measures import MEASURES
from klamp.presets import PRESETS
from klamp.regions import Region, calibrate
from klamp.spec import Spec, part_name, part_text, value_text

_RULE = "g = A * keep * factors, keep = inside | ~gate; loss = -mean(g log pi_new) + penalties, g detached"
_MATCHED = ("ratio_dev", "k2", "k3", "k3_flipped", "k3_reverse", "jeffreys", "js", "hellinger2", "pearson", "neyman",
            "lecam", "sym_chi2")  # fmt: skip
MATCH_RULE = "log_width"


def explain(spec: Spec) -> dict[str, Any]:
    """Equation, parts, regions with coordinates and matched radii, needs and sources of a spec; JSON-ready."""
    return {
        "spec": str(spec),
        "rule": _RULE,
        "sources": [_source(name) for name in _presets(spec)],
        "parts": [part_text(part) for part in spec.parts],
        "guards": [_guard(guard) for guard in spec.guards],
        "factors": [{"text": part_text(part), "meaning": _factor(part)} for part in spec.factors],
        "penalties": [{"text": _in_full(part), "meaning": _first_line(part)} for part in spec.penalties],
        "aggregate": part_text(spec.mean),
        "needs": sorted({"logp_new", "logp_old", "advantages", "mask"} | spec.needs),
        "traits": sorted(spec.traits),
    }


def _presets(spec: Spec) -> list[str]:
    try:
        tree = ast.parse(spec.name, mode="eval")
    except SyntaxError:
        return []
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return [name for name in dict.fromkeys(names) if name in PRESETS]


def _source(name: str) -> dict[str, str]:
    found = PRESETS[name]
    return {"preset": name, "summary": found.summary, "equation": found.equation, "citation": found.citation,
            "deviation": found.deviation}  # fmt: skip


def _guard(guard: Guard) -> dict[str, Any]:
    region, where = guard.region, guard.region.coordinates
    return {
        "text": part_text(guard),
        "ratio": guard.ratio,
        "scope": guard.scope,
        "reduce": guard.reduce,
        "gate": str(guard.gate),
        "cut_value": guard.cut_value,
        "region": {
            "measure": None if region.measure is None else str(region.measure),
            "equation": None if region.measure is None else region.measure.equation or None,
            "low": region.low,
            "high": _finite(region.high),
            "log_low": _finite(region.log_low),
            "log_high": _finite(region.log_high),
            "coordinates": None if where is None else {"a": where.a, "radius": where.radius},
            "notes": list(region.notes),
        },
        "matched_radii": {"rule": MATCH_RULE, "radii": matched(region)},
    }


def matched(region: Region) -> dict[str, float] | None:
    """The radius of each measure with the same log(high / low); None unless the region is two-sided."""
    if not (0.0 < region.low < 1.0 < region.high < math.inf):
        return None
    return {name: calibrate(MEASURES[name], region.low, region.high, MATCH_RULE) for name in _MATCHED}


def _factor(factor: Factor) -> str:
    scope = "" if factor.scope == "token" else f" ({factor.reduce} of log w over the {factor.scope})"
    return f"multiplies g, detached: {_first_line(factor.transform)} w = {factor.ratio}{scope}"


def _first_line(part: object) -> str:
    return (type(part).__doc__ or "").strip().splitlines()[0]


def _in_full(part: Any) -> str:
    """The part with every argument, defaults included."""
    inner = ", ".join(f"{item.name}={value_text(getattr(part, item.name))}" for item in fields(part))
    return f"{part_name(part)}({inner})"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def text(spec: Spec) -> str:
    """The explanation for a reader at a terminal."""
    facts = explain(spec)
    lines = [facts["spec"], "", f"  rule        {facts['rule']}"]
    for source in facts["sources"]:
        lines += ["", f"  {source['preset']}: {source['summary']}", f"  equation    {source['equation']}"]
        lines += [f"  source      {source['citation']}"]
        lines += [f"  deviation   {source['deviation']}"] if source["deviation"] else []
    lines += ["", *(f"  part        {part}" for part in facts["parts"])]
    for guard in facts["guards"]:
        lines += ["", *_guard_lines(guard)]
    for kind in ("factors", "penalties"):
        for part in facts[kind]:
            lines += [
                "",
                f"  {kind[:-1] if kind == 'factors' else 'penalty':11} {part['text']}",
                f"    meaning   {part['meaning']}",
            ]
    lines += ["", f"  needs       {', '.join(facts['needs'])}"]
    lines += [f"  traits      {', '.join(facts['traits'])}"] if facts["traits"] else []
    return "\n".join(lines)


def _guard_lines(guard: dict[str, Any]) -> list[str]:
    region = guard["region"]
    high = "inf" if region["high"] is None else f"{region['high']:.12g}"
    log_low = "-inf" if region["log_low"] is None else f"{region['log_low']:.12g}"
    log_high = "inf" if region["log_high"] is None else f"{region['log_high']:.12g}"
    scope = guard["scope"] if guard["scope"] == "token" else f"{guard['reduce']} over the {guard['scope']}"
    lines = [
        f"  guard       w = {guard['ratio']} ({scope}), gate {guard['gate']}",
        f"    region    {region['low']:.12g} <= w <= {high}",
        f"    log       {log_low} <= log w <= {log_high}",
    ]
    if region["coordinates"]:
        where = region["coordinates"]
        lines.append(f"    power     a = {where['a']:.9g}, radius = {where['radius']:.9g}")
    lines += [f"    note      {note}" for note in region["notes"]]
    radii = guard["matched_radii"]["radii"]
    if radii:
        lines.append(
            f"    matched   radius with the same log(high/low): {', '.join(f'{k} {v:.5g}' for k, v in radii.items())}"
        )
    return lines
