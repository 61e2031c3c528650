"""The map: one self-contained page on which every published ratio clip is a point that can be moved.

The page opens offline. Its script carries its own solver, so that a spec typed into it shows its interval at once.
"""

from __future__ import annotations

import os
from pathlib import Path

from klamp.atlas.document import page
from klamp.errors import UserError

__all__ = ["build", "page"]


def build(out: Path) -> Path:
    """Write the map to ``out``, a file; returns its path. Raises UserError if it cannot be written."""
    target = Path(out)
    if target.is_dir():
        raise UserError(
            f"cannot write the map to {target}: it is a directory; give a file, for example {target / 'map.html'}"
        )
    if not target.parent.is_dir():
        raise UserError(f"cannot write the map to {target}: there is no folder {target.parent}")
    temporary = target.with_name(f".{target.name}-{os.getpid()}.tmp")
    try:
        temporary.write_text(page(), encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(
            f"cannot write the map to {target}: {error.strerror}; give a file in a folder that can be written"
        ) from error
    return target
