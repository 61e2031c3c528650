"""From where on the audit speaks up. Every number is an option of ``klamp audit``, ``--limit name=value``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from klamp.errors import UserError, did_you_mean


def _limit(default: float, meaning: str) -> float:
    found: float = field(default=default, metadata={"meaning": meaning})
    return found


@dataclass(frozen=True)
class Thresholds:
    """The limits of the diagnoses; ``meaning`` in each field's metadata."""

    least: float = _limit(200, "tokens (or responses) that a diagnosis of a share or a correlation needs at least")
    on_policy: float = _limit(0.999, "share of tokens with w = 1 exactly from which a run is on-policy")
    offset_share: float = _limit(0.05, "share of tokens off by more than 0.02 nats from which that is a pattern")
    one_sided: float = _limit(0.97, "share of these on one side from which the sampler's vocabulary is cut")
    temperature: float = _limit(0.4, "correlation of log old/rollout with log p_old, by size, of another temperature")
    spread: float = _limit(0.05, "nats by which log old/rollout spreads at least, of another temperature")
    tails: float = _limit(0.5, "share of the summed size of log old/rollout in tokens beyond 1 nat")
    shift: float = _limit(0.5, "mean absolute difference at another lag, of that at lag 0")
    grid: float = _limit(0.99, "share of log-probs that fit bfloat16 or float16")
    missing: float = _limit(0.0, "share of responses with a missing log-prob")
    positive: float = _limit(1e-5, "nats by which a log-prob is above 0")
    padded: float = _limit(0.05, "share of responses that end in padding which the mask counts")
    tied: float = _limit(0.5, "share of groups without a signal: all advantages 0")
    noise: float = _limit(0.01, "share of tokens outside at the quietest quarter of the steps")
    drift: float = _limit(10.0, "KL(old, new) of the last quarter of the steps over that of the first")
    drift_kl: float = _limit(1e-3, "nats of KL(old, new) per token at the end below which nothing drifts")
    collapse: float = _limit(0.1, "entropy of the last tenth of the steps over that of the first: below it collapses")
    explosion: float = _limit(3.0, "the same ratio: above it explodes")
    length: float = _limit(0.6, "correlation of reward and length, by size")
    trend_steps: float = _limit(8, "steps that a diagnosis of a trend needs at least")


def meanings() -> dict[str, tuple[float, str]]:
    """name -> (default, meaning)."""
    return {item.name: (float(item.default), item.metadata["meaning"]) for item in dataclasses.fields(Thresholds)}  # type: ignore[arg-type]


def with_limits(words: Iterable[str]) -> Thresholds:
    """The thresholds with some changed, each ``name=value``. Raises UserError for an unknown name or what is no number."""
    known = meanings()
    changed: dict[str, float] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            raise UserError(f"--limit {word}: write name=value; {did_you_mean(name, known)}")
        try:
            changed[name] = float(value)
        except ValueError:
            changed[name] = math.nan
        if math.isnan(changed[name]):
            raise UserError(
                f"--limit {word}: {value!r} is no number; {name} is {known[name][0]:g} by default: {known[name][1]}"
            )
    return Thresholds(**changed)
