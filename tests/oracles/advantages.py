"""Advantage estimators as the frameworks write them, in plain Python floats, one response at a time.

Nothing here imports the package. A row is (reward, group, length); a NaN reward is unscored.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

Row = tuple[float, int, int]
Rewards = list[float]


def scored(rows: list[Row], group: int | None = None) -> list[Row]:
    return [row for row in rows if not math.isnan(row[0]) and (group is None or row[1] == group)]


def each(
    rows: list[Row], of: Callable[[float, list[float], list[int]], float], alone: str = "zero", eps: float = 0.0
) -> Rewards:
    """``of(reward, rewards of its group, lengths of its group)``; 0 where unscored, tied or alone."""
    found = []
    for reward, group, _ in rows:
        peers = [row[0] for row in scored(rows, group)]
        lengths = [row[2] for row in scored(rows, group)]
        if math.isnan(reward):
            found.append(0.0)
        elif len(peers) == 1:
            found.append(reward / (1.0 + eps) if alone == "reward" else 0.0)
        elif len(set(peers)) == 1:
            found.append(0.0)
        else:
            found.append(of(reward, peers, lengths))
    return found


def others(reward: float, peers: list[float]) -> list[float]:
    rest = list(peers)
    rest.remove(reward)
    return rest


def grpo(
    rows: list[Row], eps: float, std: Callable[[list[float]], float] = statistics.stdev, alone: str = "zero"
) -> Rewards:
    return each(rows, lambda r, peers, _: (r - statistics.fmean(peers)) / (std(peers) + eps), alone, eps)


def dr_grpo(rows: list[Row], alone: str = "zero") -> Rewards:
    return each(rows, lambda r, peers, _: r - statistics.fmean(peers), alone)


def rloo(rows: list[Row], alone: str = "zero") -> Rewards:
    return each(rows, lambda r, peers, _: r - statistics.fmean(others(r, peers)), alone)


def left_out(rows: list[Row], eps: float) -> Rewards:
    """NeMo RL's GRPO: mean and std of the other rows; a row whose others are equal is not divided."""

    def of(r: float, peers: list[float], _: list[int]) -> float:
        rest = others(r, peers)
        centred = r - statistics.fmean(rest)
        return centred if len(set(rest)) == 1 else centred / (statistics.stdev(rest) + eps)

    return each(rows, of)


def batch_std(rows: list[Row], eps: float) -> Rewards:
    every = [row[0] for row in scored(rows)]
    spread = statistics.stdev(every) if len(every) > 1 else 0.0
    return each(rows, lambda r, peers, _: (r - statistics.fmean(peers)) / (spread + eps))


def passk(rows: list[Row], eps: float) -> Rewards:
    def of(r: float, peers: list[float], _: list[int]) -> float:
        best, second = sorted(peers, reverse=True)[:2]
        return (best - second) / (statistics.stdev(peers) + eps) if r == best else 0.0

    return each(rows, of)


def opo(rows: list[Row], alone: str = "zero") -> Rewards:
    def of(r: float, peers: list[float], lengths: list[int]) -> float:
        total = sum(n * q for n, q in zip(lengths, peers, strict=True))
        return r - total / max(sum(lengths), 1)

    return each(rows, of, alone)


def gpg(rows: list[Row], alone: str = "zero") -> Rewards:
    every = [row[0] for row in scored(rows)]
    alpha = len(every) / max(sum(1 for r in every if r != 0.0), 1)
    return [alpha * a for a in dr_grpo(rows, alone)]


def maxrl(rows: list[Row], eps: float, alone: str = "zero") -> Rewards:
    def of(r: float, peers: list[float], _: list[int]) -> float:
        mean = statistics.fmean(peers)
        return (r - mean) / (mean + eps) if mean > 0.0 else 0.0

    return each(rows, of, alone, eps)


def whiten_tokens(rows: list[Row], values: Rewards, ddof: int, eps: float, floor: bool) -> Rewards:
    """Every token of a response carries the response's value."""
    tokens = [a for a, (r, _, n) in zip(values, rows, strict=True) for _ in range(n) if not math.isnan(r)]
    if len(set(tokens)) < 2:
        return [0.0] * len(rows)
    mean = statistics.fmean(tokens)
    var = sum((a - mean) ** 2 for a in tokens) / (len(tokens) - ddof)
    root = math.sqrt(max(var, eps) if floor else var + eps)
    return [0.0 if math.isnan(row[0]) else (a - mean) / root for a, row in zip(values, rows, strict=True)]


def whiten_rows(rows: list[Row], values: Rewards, eps: float) -> Rewards:
    every = [a for a, row in zip(values, rows, strict=True) if not math.isnan(row[0])]
    if len(set(every)) < 2:
        return [0.0] * len(rows)
    mean, std = statistics.fmean(every), statistics.stdev(every)
    return [0.0 if math.isnan(row[0]) else (a - mean) / (std + eps) for a, row in zip(values, rows, strict=True)]


def raw(rows: list[Row]) -> Rewards:
    return [0.0 if math.isnan(row[0]) else row[0] for row in rows]


def silence_ties(rows: list[Row], values: Rewards) -> Rewards:
    return [
        0.0 if len({row[0] for row in scored(rows, g)}) < 2 else a for a, (_, g, _) in zip(values, rows, strict=True)
    ]


def whitened(rows: list[Row], values: Rewards, floor: bool = False) -> Rewards:
    return whiten_tokens(rows, values, 0 if floor else 1, 1e-8, floor)


def discounted(length: int, value: float, discount: float) -> list[float]:
    """The returns of a reward at the last token."""
    found, running = [], 0.0
    for t in reversed(range(length)):
        running = (value if t == length - 1 else 0.0) + discount * running
        found.append(running)
    return found[::-1]


Oracle = Callable[[list[Row]], Rewards]
ORACLES: dict[tuple[str, str | None], Oracle] = {
    ("grpo", None): lambda rows: grpo(rows, 0.0),
    ("grpo", "trl"): lambda rows: grpo(rows, 1e-4),
    ("grpo", "ms_swift"): lambda rows: grpo(rows, 1e-4),
    ("grpo", "areal"): lambda rows: grpo(rows, 1e-5),
    ("grpo", "verl"): lambda rows: grpo(rows, 1e-6, alone="reward"),
    ("grpo", "skyrl"): lambda rows: grpo(rows, 1e-6, alone="reward"),
    ("grpo", "slime"): lambda rows: grpo(rows, 1e-6),
    ("grpo", "roll"): lambda rows: grpo(rows, 1e-6),
    ("grpo", "tunix"): lambda rows: grpo(rows, 1e-6),
    ("grpo", "openrlhf"): lambda rows: grpo(rows, 1e-9),
    ("grpo", "open_instruct"): lambda rows: grpo(rows, 1e-8, statistics.pstdev),
    ("grpo", "nemo_rl"): lambda rows: left_out(rows, 1e-6),
    ("dr_grpo", None): dr_grpo,
    **{("dr_grpo", name): dr_grpo for name in ("trl", "openrlhf", "open_instruct", "prime_rl", "tinker", "slime", "tunix")},
    **{("dr_grpo", name): lambda rows: dr_grpo(rows, "reward") for name in ("verl", "skyrl")},
    ("rloo", None): rloo,
    **{("rloo", name): rloo for name in ("trl", "skyrl", "openrlhf", "nemo_rl", "areal", "ms_swift", "tunix")},
    ("rloo", "verl"): lambda rows: rloo(rows, "reward"),
    ("batch_std", None): lambda rows: batch_std(rows, 0.0),
    ("batch_std", "trl"): lambda rows: batch_std(rows, 1e-4),
    ("batch_std", "ms_swift"): lambda rows: batch_std(rows, 1e-4),
    ("reinforce", None): raw,
    ("reinforce", "nemo_rl"): lambda rows: whitened(rows, raw(rows), floor=True),
    ("reinforce_plus_plus", None): lambda rows: whitened(rows, raw(rows)),
    ("reinforce_plus_plus", "verl"): lambda rows: whitened(rows, raw(rows)),
    ("reinforce_plus_plus", "slime"): lambda rows: whitened(rows, raw(rows)),
    ("reinforce_plus_plus", "openrlhf"): lambda rows: whitened(rows, raw(rows), floor=True),
    ("reinforce_plus_plus", "nemo_rl"): lambda rows: whitened(rows, raw(rows), floor=True),
    ("reinforce_plus_plus_baseline", None): lambda rows: silence_ties(rows, whitened(rows, dr_grpo(rows))),
    ("reinforce_plus_plus_baseline", "verl"): lambda rows: whitened(rows, dr_grpo(rows, "reward")),
    ("reinforce_plus_plus_baseline", "slime"): lambda rows: whitened(rows, dr_grpo(rows)),
    ("reinforce_plus_plus_baseline", "openrlhf"): lambda rows: whitened(rows, dr_grpo(rows), floor=True),
    ("reinforce_plus_plus_baseline", "nemo_rl"): lambda rows: whitened(rows, dr_grpo(rows), floor=True),
    ("gdpo", None): lambda rows: silence_ties(rows, whiten_rows(rows, grpo(rows, 0.0), 0.0)),
    ("gdpo", "trl"): lambda rows: whiten_rows(rows, grpo(rows, 1e-4), 1e-4),
    ("gdpo", "verl"): lambda rows: whitened(rows, grpo(rows, 1e-6, alone="reward")),
    ("gdpo", "nemo_rl"): lambda rows: whiten_rows(rows, left_out(rows, 1e-6), 0.0),
    ("passk", None): lambda rows: passk(rows, 0.0),
    ("passk", "verl"): lambda rows: passk(rows, 1e-6),
    ("opo", None): opo,
    ("opo", "verl"): lambda rows: opo(rows, "reward"),
    ("gpg", None): gpg,
    ("gpg", "verl"): lambda rows: gpg(rows, "reward"),
    ("maxrl", None): lambda rows: maxrl(rows, 0.0),
    ("maxrl", "prime_rl"): lambda rows: maxrl(rows, 0.0),
    ("maxrl", "skyrl"): lambda rows: maxrl(rows, 1e-6, "reward"),
    ("maxrl", "open_instruct"): lambda rows: maxrl(rows, 1e-8),
}  # fmt: skip
