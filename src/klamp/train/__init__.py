"""Training on TRL: the same trainer, with the loss of a spec."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from klamp.train.config import KlampConfig as KlampConfig
    from klamp.train.trainer import KlampTrainer as KlampTrainer

_HOME = {"KlampConfig": "klamp.train.config", "KlampTrainer": "klamp.train.trainer"}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'klamp.train' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
