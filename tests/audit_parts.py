"""Token logs for the audit: synthetic runs of a policy that learns, written as records or as others write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from klamp.audit.tokens import Tokens
from klamp.records import RecordWriter

Rows = list[dict[str, Any]]


def rows(seed: int = 0, steps: int = 8, responses: int = 32, *, group: int = 8, updates: int = 4, rollout: float | None = 0.01,
         entropy: bool = True, ref: bool = True, spread: float = 0.06, width: tuple[int, int] = (8, 40)) -> Rows:  # fmt: skip
    """A clean run: ``updates`` optimizer steps on each rollout, the first of them with new = old exactly."""
    random = np.random.default_rng(seed)
    found: Rows = []
    for step in range(steps):
        drift = spread * (step % updates)
        rewards = random.integers(0, 2, responses).astype(np.float32)
        for row in range(responses):
            n = int(random.integers(*width))
            surprise = 0.4 * random.exponential(size=n) ** 2 + 1e-4
            old = np.float32(-surprise)
            new = np.minimum(old + drift * random.standard_t(4, n), -1e-6).astype(np.float32) if drift else old
            own = rewards[row // group * group : row // group * group + group]
            scale = float(own.std()) or 1.0
            found.append({
                "prompt_id": f"p{step // updates}-{row // group}", "group": row // group, "row": row, "step": step, "micro_step": 0,
                "token_ids": random.integers(2, 500, n).tolist(), "logp_new": new.tolist(), "logp_old": old.tolist(),
                "logp_rollout": None if rollout is None else np.minimum(old + rollout * random.standard_normal(n), -1e-7).astype(np.float32).tolist(),
                "logp_ref": (old + 0.3 * random.standard_normal(n)).astype(np.float32).tolist() if ref else None,
                "advantage": [float(np.float32((rewards[row] - own.mean()) / scale))] * n, "mask": [True] * n, "reward": float(rewards[row]),
                "entropy": (surprise * (1 + random.random(n))).astype(np.float32).tolist() if entropy else None,
                "kept": [True] * n, "g": [0.0] * n,
            })  # fmt: skip
    return found


def write(directory: Path, found: Rows, per_part: int = 64) -> Path:
    """As records of ours, in parts of so many rows."""
    with RecordWriter(directory, rows_per_part=per_part) as writer:
        for start in range(0, len(found), per_part):
            writer.write(found[start : start + per_part])
    return directory


def masked(found: Rows, share: float, seed: int = 0) -> Rows:
    """Some tokens masked, with poison where nothing may look."""
    random = np.random.default_rng(seed)
    out = []
    for row in found:
        mask = random.random(len(row["mask"])) >= share
        poison = {
            name: np.where(mask, row[name], np.nan).tolist()
            for name in ("logp_new", "advantage")
            if row[name] is not None
        }
        out.append(row | {"mask": mask.tolist()} | poison)
    return out


def tokens(found: Rows) -> Tokens:
    """The rows as the audit reads them."""
    lengths = [len(row["mask"]) for row in found]

    def flat(name: str, kind: Any) -> Any:
        if any(row[name] is None for row in found):
            return None
        return np.concatenate([np.asarray(row[name], kind) for row in found])

    floats = ("logp_new", "logp_old", "logp_rollout", "logp_ref", "advantage", "entropy")
    return Tokens(
        np.concatenate([[0], np.cumsum(lengths)]), np.array([row["step"] for row in found]), np.array([row["row"] for row in found]),
        mask=flat("mask", bool), group=np.array([row["group"] for row in found]), token_ids=flat("token_ids", np.int32),
        reward=np.array([row["reward"] for row in found], np.float32), **{name: flat(name, np.float32) for name in floats},
    )  # fmt: skip
