"""``PYTHONPATH=tests python -m conformance.document`` writes docs/conformance.md from the table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from conformance.micro_batches import CUTS, PIECES
from conformance.rows import DIFFERS, EQUAL, NOT_EXPRESSIBLE, Row
from conformance.table import FRAMEWORKS, ROWS, counts
from conformance.trl_rows import OUTSIDE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"

INTRO = """\
# Klamp against the originals

Every loss that TRL, verl and Liger ship, as a spec of Klamp, compared with the framework's own code on the same batches.
**equal** means: loss and gradient in float64 agree to 1e-10, relative to their largest element. Where they do not, the
difference has a name, and a test shows that it is the whole difference: undo it, and the two agree to 1e-10 again.

    make conformance        # makes .conformance/ (verl and Liger, 1.2 GB with torch), compares, prints the counts

The originals are called, not copied: TRL's `_compute_loss` on a stub of its trainer, verl's functions from its
registries, Liger's loss function. The tests enumerate those registries and switches and fail if one has no row here.
TRL is compared in every run of the tests; verl and Liger are installed without their own dependencies in an
environment of their own, and are left out of a run of the tests where it does not exist.

This page is written by `PYTHONPATH=tests python -m conformance.document` from the table in `tests/conformance/`, and a
test holds it to that.
"""

NOTES = """\
**different by design** is one of three things: Klamp decides otherwise (a statistic is of the whole step, a length has
nothing added to it, a missing log-prob is not a ratio of 1); the original has a trap (a bound that is set and not read);
or it rounds to float32 in between, whatever it is given. "Equal to" names the spec that is equal to 1e-10 all the same;
"equal where" says which change of the batch makes it so, and the test makes that change. **not expressible** says why.

`covered` counts the entries of a framework's registries and switches that have a row, the other columns the rows:
one entry may need several, for its options and for its traps.

A test that is named in a row is in `tests/conformance/`.
"""

CUT_INTRO = """\
## One step, cut into micro-batches

Some losses read a statistic of the tokens: a mean, a quantile, the largest few. The originals take it of each
micro-batch, so that the gradient of a step depends on how many of them it is cut into, which is a matter of memory.
Klamp takes it of the whole step (`Objective.stats`, added over the micro-batches before the first loss): its gradients
for 1, 2, 4 and 8 micro-batches agree to 1e-6 or better (`test_klamps_gradient_does_not_depend_on_the_cut`).

How far the originals' gradient over 2, 4 and 8 micro-batches is from that over one (relative L2 distance, 64 responses
in random order, 1,131 tokens):
"""

OUTSIDE_INTRO = """\
## Not compared

Trainers of TRL whose loss is no policy gradient on sampled answers with a reward:
"""

OUTSIDE_END = """\
Nor are Liger's Triton kernels, which need a GPU, verl's distillation losses, its value loss and its KL in the reward.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRO, _counts(), NOTES]
    for key, title in FRAMEWORKS.items():
        losses = [row for row in ROWS[key] if row.kind != "verl.advantage"]
        parts.append(f"## {title}\n\n{_rows(losses)}")
    advantages = [row for row in ROWS["verl"] if row.kind == "verl.advantage"]
    parts.append(f"## {FRAMEWORKS['verl']}: advantage estimators\n\n{_rows(advantages)}")
    parts += [CUT_INTRO, _cuts(), OUTSIDE_INTRO, _outside(), OUTSIDE_END]
    return "\n".join(parts)


def _counts() -> str:
    columns = list(counts("trl"))
    lines = [[title, *(str(counts(key)[column]) for column in columns)] for key, title in FRAMEWORKS.items()]
    return _table(["", *columns], lines)


def _rows(rows: Iterable[Row]) -> str:
    return _table(
        ["theirs", "Klamp", "result", "how, and why"],
        ([row.mode, _code(row.spec), row.status, _why(row)] for row in rows),
    )


def _why(row: Row) -> str:
    """The sentence, and what shows it."""
    text = " ".join(row.sentence.split())
    if row.status == EQUAL:
        return ""
    if row.status == NOT_EXPRESSIBLE:
        return text
    assert row.status == DIFFERS
    if row.exactly:
        return f"{text} Equal to {_code(row.exactly)}."
    return f"{text} `{row.test.partition('.')[2]}`" if row.test else text


def _cuts() -> str:
    lines = [
        [f"{FRAMEWORKS[found.framework].split()[0]}, {found.mode}", *(f"{value:.3g}" for value in found.apart),
         found.reason, _code(found.spec)]
        for found in CUTS
    ]  # fmt: skip
    return _table(["theirs", *(str(pieces) for pieces in PIECES), "what depends on the cut", "Klamp"], lines)


def _outside() -> str:
    reasons: dict[str, list[str]] = {}
    for name, reason in OUTSIDE.items():
        reasons.setdefault(reason, []).append(name)
    return "".join(f"* {', '.join(names)}: {reason}.\n" for reason, names in reasons.items())


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _table(head: list[str], lines: Iterable[list[str]]) -> str:
    made = [head, ["---"] * len(head), *lines]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in made)


if __name__ == "__main__":
    PAGE.write_text(page())
