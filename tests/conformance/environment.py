"""The environment of the originals: verl and Liger without their dependency lists, in .conformance/ of the repository.

``python tests/conformance/environment.py`` makes it, ``--torch`` and ``--index`` choose the build of torch.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent / ".conformance"
PYTHON = ROOT / "bin" / "python"
STAMP = ROOT / "made"
TORCH, INDEX = "torch==2.13.0", "https://download.pytorch.org/whl/cpu"


def made() -> bool:
    """Whether the environment exists and is of these requirement files."""
    return PYTHON.exists() and STAMP.exists() and STAMP.read_text() == _digest()


def make(torch: str = TORCH, index: str = INDEX) -> str:
    """Make the environment where it is missing or out of date; '' or the reason why it cannot be made."""
    if made():
        return ""
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--retries", "1", "--timeout", "15"]
    steps = [
        [sys.executable, "-m", "venv", "--clear", str(ROOT)],
        [*pip, "--no-deps", "--extra-index-url", index, torch],
        [*pip, "--no-deps", "--requirement", str(HERE / "originals.txt")],
        # torch is pinned once more: a dependency must not replace the build chosen above
        [*pip, "--extra-index-url", index, torch, "--requirement", str(HERE / "requirements.txt")],
    ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
            return f"{' '.join(step[-3:])} failed: {last[0]}"
    STAMP.write_text(_digest())
    return ""


def _digest() -> str:
    texts = ((HERE / name).read_bytes() for name in ("requirements.txt", "originals.txt"))
    return hashlib.sha256(b"\n".join(texts)).hexdigest()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--torch", default=TORCH)
    options.add_argument("--index", default=INDEX)
    found = options.parse_args()
    problem = make(found.torch, found.index)
    if problem:
        sys.exit(f"the originals cannot be installed: {problem}")
