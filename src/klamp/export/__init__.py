"""Export: the flags or YAML of other frameworks that give the same constraint, and what will differ.

``export(spec, to)`` reads a spec's parts; ``FRAMEWORKS`` holds what each framework can say, as data.
"""

from __future__ import annotations

from klamp.export.engine import Export, export
from klamp.export.frameworks import FRAMEWORKS
from klamp.export.model import Framework, Way

__all__ = ["FRAMEWORKS", "Export", "Framework", "Way", "export"]
