"""The table: for each loss and mode that a framework ships, the spec that means the same, or the named difference.

Data, read by the tests, by ``report.py`` and by ``document.py``. Nothing here imports Klamp or a framework.
"""

from __future__ import annotations

from conformance import liger_rows, trl_rows, verl_advantage_rows, verl_rows
from conformance.rows import STATUSES, Row

FRAMEWORKS = {
    "trl": "TRL 1.16.0",
    "verl": "verl 0.9.1",
    "liger": "Liger 0.8.5",
}
ROWS: dict[str, tuple[Row, ...]] = {
    "trl": trl_rows.ROWS,
    "verl": verl_rows.ROWS + verl_advantage_rows.ROWS,
    "liger": liger_rows.ROWS,
}


def shipped(framework: str) -> set[str]:
    """The losses and modes that have a row."""
    return {item for row in ROWS[framework] for item in row.covers}


def counts(framework: str) -> dict[str, int]:
    """``covered``: entries of the framework's registries and switches that have a row; then its rows, by status."""
    found = {"covered": len(shipped(framework)), "comparisons": len(ROWS[framework])}
    return found | {status: sum(row.status == status for row in ROWS[framework]) for status in STATUSES}
