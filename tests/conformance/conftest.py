"""The environment of the originals, and the worker in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from conformance import environment
from conformance.originals import Originals


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """verl and Liger, in the environment that ``make conformance`` makes; with CONFORMANCE=1 it is made here."""
    if not environment.made():
        if os.environ.get("CONFORMANCE") != "1":
            pytest.skip("verl and Liger are compared by `make conformance`, which makes an environment for them")
        problem = environment.make()
        if problem:
            pytest.skip(f"the originals cannot be installed: {problem}")
    worker = Originals(tmp_path_factory.mktemp("originals"))
    yield worker
    worker.close()
