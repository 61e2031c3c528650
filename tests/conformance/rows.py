"""Row: one comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STATUSES = EQUAL, DIFFERS, NOT_EXPRESSIBLE = "equal", "different by design", "not expressible"
PLAIN = ("plain-0", "plain-1", "wide-2", "some_zero-3")


@dataclass(frozen=True)
class Row:
    """One comparison of a framework's loss with a spec, on the named cases.

    ``covers``: the entries of the framework's registry that this row accounts for. ``call``: how its side is called.
    ``spec``: what means the same. Where the status is "different by design", ``sentence`` says how, and the difference
    is exactly that: the two sides are apart with ``spec`` and equal with ``exactly`` (another spec) and ``adjust`` (a
    change of our batch, by name in ``adjustments.py``). ``test``: in place of those, the test that shows it.
    ``visible``: the least relative difference that ``spec`` must show.
    """

    mode: str
    covers: tuple[str, ...]
    call: Mapping[str, Any]
    spec: str
    status: str = EQUAL
    sentence: str = ""
    cases: tuple[str, ...] = PLAIN
    exactly: str = ""
    adjust: str = ""
    test: str = ""
    visible: float = 1e-9
    kind: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        assert self.status in STATUSES, self.status
        assert self.status == EQUAL or self.sentence, self.mode
        assert (self.status == DIFFERS) == bool(self.exactly or self.adjust or self.test), self.mode
