"""The table itself: its specs are specs, its tests exist, every row is compared, and the page is the table."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import klamp
from conformance.document import PAGE, page
from conformance.micro_batches import CUTS
from conformance.rows import NOT_EXPRESSIBLE, STATUSES, Row
from conformance.table import FRAMEWORKS, ROWS, counts

HERE = Path(__file__).parent
ALL = [row for key in FRAMEWORKS for row in ROWS[key]]
KINDS = {"trl": {""}, "liger": {""}, "verl": {"", "verl.kl", "verl.ppo_loss", "verl.advantage"}}  # what the tests run


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text() == page(), "PYTHONPATH=tests python -m conformance.document writes it"


@pytest.mark.parametrize("key", FRAMEWORKS)
def test_every_row_is_compared_and_told_apart(key: str) -> None:
    modes = [row.mode + row.kind for row in ROWS[key]]
    assert len(modes) == len(set(modes))
    assert {row.kind for row in ROWS[key]} <= KINDS[key]
    assert all(row.covers for row in ROWS[key])
    found = counts(key)
    assert sum(found[status] for status in STATUSES) == found["comparisons"]


def test_what_is_not_expressible_is_argued() -> None:
    assert all(len(row.sentence) > 40 for row in ALL if row.status == NOT_EXPRESSIBLE)


@pytest.mark.parametrize("row", [row for row in ALL if row.test], ids=lambda row: row.mode)
def test_the_named_tests_exist(row: Row) -> None:
    module, _, name = row.test.partition(".")
    tree = ast.parse((HERE / f"{module}.py").read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_spec_is_one() -> None:
    texts = {text for row in ALL if row.kind != "verl.advantage" for text in (row.spec, row.exactly) if text}
    for text in texts | {found.spec for found in CUTS}:
        klamp.parse(text)
