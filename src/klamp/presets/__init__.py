"""Published methods as values: one short function each, with citation, equation and any deviation."""

from klamp.language import PRESETS, Preset, list_presets, parse, preset, with_aggregate
from klamp.presets import clips, corrections, distances, penalised, sequences, weights

__all__ = [
    "PRESETS",
    "Preset",
    "clips",
    "corrections",
    "distances",
    "list_presets",
    "parse",
    "penalised",
    "preset",
    "sequences",
    "weights",
    "with_aggregate",
]
