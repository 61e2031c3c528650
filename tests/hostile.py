"""A pickle that leaves a mark when it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Trap:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)
