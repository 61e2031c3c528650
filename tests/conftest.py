"""Runs the tensor rooms under jaxtyping's runtime checks: every shape string in them is asserted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import config, install_import_hook

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

# Rooms whose annotations are tensors. The rooms left of them name tensors under TYPE_CHECKING only (they must load
# without torch), which beartype cannot resolve.
install_import_hook(["klamp.batch", "klamp.objective", "klamp.advantages"], "beartype.beartype")

settings.register_profile("klamp", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "klamp"))


def load(name: str) -> Any:
    """One file of tests/data."""
    return json.loads((HERE / "data" / f"{name}.json").read_text())


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Runtime shape checks off, so that a wrong input reaches the package's own errors, as it does for a user."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
