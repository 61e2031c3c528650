"""Where each published method lies: one point per interval, with every method that has it."""

from __future__ import annotations

import math
from typing import Any

from klamp.atlas.facts import WHY, facts
from klamp.guards import Guard
from klamp.presets import PRESETS, parse
from klamp.regions import Region

Entry = dict[str, Any]


def entries() -> list[Entry]:
    """One per published method and guard whose region is an interval with at least one bound."""
    found = []
    for name, published in PRESETS.items():
        spec = parse(published.usual)
        for index, (guard, fact) in enumerate(zip(spec.guards, facts(spec), strict=True)):
            if fact["kind"] == "interval" and (bounds := _bounds(guard)):
                about = {"name": name, "spec": published.usual, "guard": index, "citation": published.citation}
                found.append(about | bounds | {"scope": guard.scope, "ratio": guard.ratio})
    return found


def _bounds(guard: Guard) -> dict[str, Any] | None:
    region = guard.region
    assert isinstance(region, Region)
    if region.log_low == -math.inf and region.log_high == math.inf:
        return None
    where = region.coordinates
    return {
        "log_low": region.log_low, "log_high": region.log_high, "low": region.low, "high": region.high,
        "a": where.a if where else None, "radius": where.radius if where else None,
    }  # fmt: skip


def panel_of(scope: str) -> str:
    """The panel of a scope: single tokens, or anything wider."""
    return "token" if scope == "token" else "sequence"


def points() -> list[dict[str, Any]]:
    """Entries that coincide in one panel as one point, in the order of the registry."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for entry in entries():
        key = (panel_of(entry["scope"]), *(round(entry[side], 9) for side in ("log_low", "log_high")))
        shared = ("log_low", "log_high", "low", "high", "a", "radius")
        point = found.setdefault(key, {"panel": key[0], "members": []} | {name: entry[name] for name in shared})
        point["members"].append({name: entry[name] for name in ("name", "spec", "guard", "scope", "ratio", "citation")})
    return list(found.values())


def binary() -> list[dict[str, Any]]:
    """The published methods whose bounds depend on the token's probability."""
    return [
        {"name": name, "spec": found.usual, "guard": index, "citation": found.citation}
        for name, found in PRESETS.items()
        for index, fact in enumerate(facts(parse(found.usual)))
        if fact["kind"] == "binary"
    ]


def absent() -> list[tuple[str, list[str]]]:
    """(why, names) of the methods that have no place on the map."""
    placed = {entry["name"] for entry in entries()} | {one["name"] for one in binary()}
    found: dict[str, list[str]] = {}
    for name, published in PRESETS.items():
        if name not in placed:
            spec = parse(published.usual)
            why = ([WHY[fact["kind"]] for fact in facts(spec)] or ["it has no guard: it weighs, and cuts nothing"])[0]
            found.setdefault(why, []).append(name)
    return list(found.items())
