"""Token records: what the policy term did to each completion at each optimizer step, in Parquet.

A run writes `tokens/part-000000.parquet`, `part-000001.parquet`, ...; every part is complete from the moment
it has its name, so a killed run leaves only readable files. `docs/records.md` describes the columns.
"""

from __future__ import annotations

from klamp.records.files import (
    RECORD_SCHEMA,
    SCHEMA_KEY,
    SCHEMA_VERSION,
    Column,
    RecordWriter,
    arrow_schema,
    read_records,
)
from klamp.records.recorder import Recorder

__all__ = [
    "RECORD_SCHEMA",
    "SCHEMA_KEY",
    "SCHEMA_VERSION",
    "Column",
    "RecordWriter",
    "Recorder",
    "arrow_schema",
    "read_records",
]
