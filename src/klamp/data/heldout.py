"""A part of the rows held out, by a hash of the prompt."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from klamp.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset


def split_heldout(dataset: Dataset, n: int, seed: int) -> tuple[Dataset, Dataset]:
    """``(train, heldout)``: at most ``n`` rows held out, and no prompt (up to white space) on both sides.

    Prompts are ranked by a hash of the seed and the text, so a row's side depends on neither row order nor
    machine. All rows of a prompt move together: fewer than ``n`` are held out only if no prompt left fits.
    """
    if n < 0 or n >= len(dataset):
        raise UserError(f"cannot hold {n} of {len(dataset)} rows out; between 0 and {len(dataset) - 1} is possible")
    rows: dict[str, list[int]] = {}
    for row, prompt in enumerate(dataset["prompt"]):
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
        rows.setdefault(" ".join(text.split()), []).append(row)
    held: set[int] = set()
    for text in sorted(rows, key=lambda text: hashlib.sha256(f"{seed}\0{text}".encode()).digest()):
        if len(held) + len(rows[text]) <= n:
            held.update(rows[text])
        if len(held) == n:
            break
    if n and not held:
        raise UserError(f"cannot hold {n} rows out: every prompt is repeated more than {n} times")
    train = [row for row in range(len(dataset)) if row not in held]
    return dataset.select(train), dataset.select(sorted(held))
