"""The Hugging Face hub: asked once and briefly, then its local cache. Remote code is never run."""

from __future__ import annotations

import logging
import re
from typing import Any

from klamp.errors import UserError

HUB_TIMEOUT = 5.0  # seconds for the hub to answer at all

logger = logging.getLogger(__name__)


def is_hub_id(source: str) -> bool:
    """Whether it could be the id of a dataset."""
    return re.fullmatch(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?", source) is not None


def load_hub(source: str, split: str, data_dir: str | None, config: str | None = None) -> Any:
    """A dataset of the hub. The hub is asked once, briefly, first: datasets itself retries for long."""
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    neither = f"{source!r} is neither an existing file nor"
    try:
        huggingface_hub.HfApi().dataset_info(source, timeout=HUB_TIMEOUT)
    except RepositoryNotFoundError as error:
        hint = "if it is private, log in with `hf auth login`"
        raise UserError(f"{neither} a dataset on the hub ({hint})") from error
    except Exception as error:  # whichever way the network fails
        cached = _load_cached(source, split, data_dir, config)
        if cached is None:
            reason = str(error).strip().split("\n")[0]
            raise UserError(f"{neither} reachable on the hub ({type(error).__name__}: {reason})") from error
        logger.warning("the hub cannot be reached: %s is read from the local cache", source)
        return cached
    try:
        return datasets.load_dataset(source, config, split=split, data_dir=data_dir)
    except Exception as error:
        chosen = data_dir or config
        hint = "" if chosen else "; a configuration is chosen by its folder, as in --data-dir main"
        raise UserError(f"the dataset {source!r} of the hub cannot be loaded: {error}{hint}") from error


def _load_cached(source: str, split: str, data_dir: str | None, config: str | None) -> Any:
    """The dataset from the local cache, or None; both libraries read the setting at import, hence by hand."""
    import datasets
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(source, config, split=split, data_dir=data_dir)
    except Exception:  # not there; the caller says so with the reason why the hub did not answer
        return None
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
