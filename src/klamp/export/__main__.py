"""``python -m klamp.export`` writes docs/export.md."""

from klamp.export.page import page

print(page(), end="")
