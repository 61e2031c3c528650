"""What each row of the table claims, as assertions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from conformance import cases
from conformance.adjustments import ADJUSTMENTS
from conformance.cases import Arrays
from conformance.rows import DIFFERS, EQUAL, Row
from conformance.sides import Result, apart, ours

TOLERANCE = 1e-10
Theirs = Callable[[Row, Arrays], Result]


def runnable(rows: Iterable[Row], *kinds: str) -> list[Row]:
    """The rows of these kinds that ``check`` can show: equal, or apart by a spec or an adjustment."""
    shown = [row for row in rows if row.status == EQUAL or row.exactly or row.adjust]
    return [row for row in shown if not kinds or row.kind in kinds]


def check(row: Row, theirs: Theirs) -> None:
    """Equal in loss and gradient on every case; or apart with the row's spec, and equal once the difference is undone."""
    for name in row.cases:
        arrays = cases.make(name)
        original = theirs(row, arrays)
        assert np.isfinite(original[1]).all(), name
        assert np.abs(original[1]).max() > 0.0, name
        if row.status == EQUAL:
            found = apart(ours(row.spec, arrays), original)
            assert found <= TOLERANCE, f"{row.mode} on {name}: {row.spec} is {found:.2e} apart"
            continue
        assert row.status == DIFFERS
        before = apart(ours(row.spec, arrays), original)
        assert before >= row.visible, f"{row.mode} on {name}: {row.spec} should differ, and is {before:.2e} apart"
        found = apart(exactly(row, arrays), _restricted(original, row, arrays))
        assert found <= TOLERANCE, f"{row.mode} on {name}: {found:.2e} apart with the difference undone"


def exactly(row: Row, arrays: Arrays) -> Result:
    """Our side with the named difference undone."""
    where = None
    if row.adjust:
        arrays, where = ADJUSTMENTS[row.adjust](arrays)
    loss, gradient = ours(row.exactly or row.spec, arrays)
    return loss, gradient if where is None else np.where(where, gradient, 0.0)


def _restricted(original: Result, row: Row, arrays: Arrays) -> Result:
    """Where an adjustment leaves no gradient, the original has none either."""
    if row.adjust:
        where = ADJUSTMENTS[row.adjust](arrays)[1]
        assert where is None or not original[1][~where].any()
    return original
