"""The other side of verl and Liger: a worker process in their environment, asked one call at a time."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from conformance.cases import Arrays
from conformance.environment import PYTHON
from conformance.sides import Result

WORKER = Path(__file__).with_name("worker.py")


class Originals:
    """A running worker; ``folder`` holds the files that go back and forth."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked = 0
        self.log = folder / "worker.log"
        self.process = subprocess.Popen(
            [str(PYTHON), str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"),
            text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "VERL_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip

    def ask(self, kind: str, call: Mapping[str, Any], arrays: Arrays | None = None) -> dict[str, np.ndarray]:
        """The arrays of the answer; RuntimeError with the worker's own message where the call failed."""
        self.asked += 1
        data, out = (self.folder / f"{self.asked}-{name}.npz" for name in ("in", "out"))
        np.savez(data, **(arrays or {}))
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(
            json.dumps({"kind": kind, "call": dict(call), "data": str(data), "out": str(out)}) + "\n"
        )
        self.process.stdin.flush()
        if not self.process.stdout.readline():
            raise RuntimeError(f"the worker ended:\n{self.log.read_text()[-2000:]}")
        answer = dict(np.load(out))
        if "error" in answer:
            raise RuntimeError(f"{kind} {dict(call)}: {answer['error']}")
        return answer

    def result(self, kind: str, call: Mapping[str, Any], arrays: Arrays) -> Result:
        answer = self.ask(kind, call, arrays)
        return float(answer["loss"]), answer["gradient"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
