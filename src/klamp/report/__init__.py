"""One self-contained page about a run: what it learned, and what the trust region did to it.

The page opens offline: its pictures (`charts`), its style and its one script (`page`) are inside it.
Whatever a run recorded is shown as text.
"""

from __future__ import annotations

import os
from pathlib import Path

from klamp.errors import UserError
from klamp.report.run import Run, load_run
from klamp.report.sections import render

__all__ = ["Run", "load_run", "render", "write_report"]


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run directory from its manifest, metrics and samples; returns its path.

    Works for a run that was stopped at any moment: what is missing is called "not recorded", and what cannot
    be read is counted on the page. Raises UserError if the directory is not a run or cannot be written.
    """
    run = load_run(Path(run_dir))
    target = run.directory / "report.html"
    temporary = run.directory / f".report-{os.getpid()}.tmp"
    try:
        temporary.write_bytes(render(run).encode("utf-8", "backslashreplace"))
        os.replace(temporary, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}; make the run directory writable") from error
    finally:
        if temporary.exists():
            temporary.unlink()
    return target
