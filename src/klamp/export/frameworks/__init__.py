"""The tables: one room per framework, data only."""

from __future__ import annotations

from klamp.export.frameworks.areal import AREAL
from klamp.export.frameworks.liger import LIGER
from klamp.export.frameworks.ms_swift import MS_SWIFT
from klamp.export.frameworks.nemo_rl import NEMO_RL
from klamp.export.frameworks.open_instruct import OPEN_INSTRUCT
from klamp.export.frameworks.openrlhf import OPENRLHF
from klamp.export.frameworks.prime_rl import PRIME_RL
from klamp.export.frameworks.roll import ROLL
from klamp.export.frameworks.skyrl import SKYRL
from klamp.export.frameworks.slime import SLIME
from klamp.export.frameworks.tinker import TINKER
from klamp.export.frameworks.trl import TRL
from klamp.export.frameworks.tunix import TUNIX
from klamp.export.frameworks.verl import VERL
from klamp.export.model import Framework

FRAMEWORKS: dict[str, Framework] = {
    table.name: table
    for table in (TRL, VERL, OPENRLHF, NEMO_RL, SKYRL, PRIME_RL, SLIME, AREAL, ROLL, MS_SWIFT, TINKER, TUNIX, LIGER,
                  OPEN_INSTRUCT)
}  # fmt: skip
