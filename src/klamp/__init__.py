"""Klamp: the policy-divergence layer for reinforcement learning with verifiable rewards."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from klamp.version import __version__ as __version__

if TYPE_CHECKING:
    from klamp.advantages import Estimator as Estimator
    from klamp.advantages import Whiten as Whiten
    from klamp.advantages import estimator as estimator
    from klamp.advantages import group_advantages as group_advantages
    from klamp.aggregates import Aggregate as Aggregate
    from klamp.batch import Batch as Batch
    from klamp.conditions import condition as condition
    from klamp.errors import UserError as UserError
    from klamp.factors import Factor as Factor
    from klamp.guards import Gate as Gate
    from klamp.guards import Guard as Guard
    from klamp.language import list_presets as list_presets
    from klamp.language import parse as parse
    from klamp.language import preset as preset
    from klamp.language import register_part as register_part
    from klamp.language import register_preset as register_preset
    from klamp.measures import Measure as Measure
    from klamp.measures import measure as measure
    from klamp.objective import LossOutput as LossOutput
    from klamp.objective import Objective as Objective
    from klamp.regions import Region as Region
    from klamp.regions import calibrate as calibrate
    from klamp.regions import region as region
    from klamp.spec import Spec as Spec
    from klamp.stats import Stats as Stats

# Names load on first use, so that bounds and explanations start without torch.
_HOMES = {
    "klamp.advantages": ["Estimator", "Whiten", "estimator", "group_advantages"],
    "klamp.aggregates": ["Aggregate"],
    "klamp.batch": ["Batch"],
    "klamp.conditions": ["condition"],
    "klamp.errors": ["UserError"],
    "klamp.factors": ["Factor"],
    "klamp.guards": ["Gate", "Guard"],
    "klamp.language": ["register_part", "register_preset"],
    "klamp.presets": ["list_presets", "parse", "preset"],
    "klamp.measures": ["Measure", "measure"],
    "klamp.objective": ["LossOutput", "Objective"],
    "klamp.regions": ["Region", "calibrate", "region"],
    "klamp.spec": ["Spec"],
    "klamp.stats": ["Stats"],
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted([*_HOME, "__version__"])


_ROOMS = ("measures", "testing", "train")  # also reached as attributes, on first use


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"klamp.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'klamp' has no attribute {name!r}")
    importlib.import_module("klamp.presets")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
