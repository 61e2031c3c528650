"""Pictures of a study's report for the docs, taken by a headless Chromium.

PYTHONPATH=tests python studies/figures.py runs/studies/methods_sort docs/figures/methods_sort
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

from devtools import BROWSER, Tab

SECTIONS = ("differences",)


def main() -> int:
    run, stem = Path(sys.argv[1]), Path(sys.argv[2])
    if BROWSER is None:
        print("there is no Chromium here", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as profile:
        tab = Tab(Path(profile))
        tab.view(1200, 900)
        tab.open((run / "report.html").resolve())
        for name in SECTIONS:
            box = tab.run(f"(() => {{ const b = document.getElementById('{name}').getBoundingClientRect();"
                          " return [b.left + scrollX, b.top + scrollY, b.width, b.height]; })()")  # fmt: skip
            clip = dict(zip(("x", "y", "width", "height"), box, strict=True)) | {"scale": 1}
            shot = tab.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
            path = stem.with_name(f"{stem.name}-{name}.png")
            path.write_bytes(base64.b64decode(shot["data"]))
            print(path)
        tab.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
