"""The page of a comparison, piece by piece: what was handed over (`data`), how it is drawn (`canvas`), each section.

path = write(comparison, directory)      # directory/report.html
html = render(comparison)
"""

from __future__ import annotations

from klamp.compare.report.page import render, write

__all__ = ["render", "write"]
