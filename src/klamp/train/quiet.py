"""Libraries that keep their bars and chatter to themselves."""

from __future__ import annotations

import logging
import sys
import warnings


def quiet() -> None:
    """Leave stderr to our own progress: no bars and no chatter of libraries, warnings once."""
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(torch|transformers|trl|accelerate)\.")
    warnings.showwarning = lambda message, *rest, **more: print(f"warning: {message}", file=sys.stderr)
