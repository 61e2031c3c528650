"""``python -m klamp``."""

import sys

from klamp.cli import main

sys.exit(main())
