"""Recorder: token records of a training loop of one's own, written by a thread beside it."""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from klamp.errors import UserError
from klamp.records.files import RECORD_SCHEMA, RecordWriter, arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa

_PER_TOKEN = tuple(column.name for column in RECORD_SCHEMA if column.per_token)
_INTEGERS = ("token_ids",)
_FLAGS = ("mask", "kept")
UNKNOWN_TOKEN = -1  # a token id that the loop does not say


class Recorder:
    """Writes what a loss saw, [B, T] at a time, without holding up the loop that calls it.

    ``record`` copies the chosen responses to the host and returns; a thread makes Parquet parts of them, one at the latest
    every ``seconds`` or ``rows_per_part`` responses, so that a killed run leaves readable files. At most ``waiting_bytes`` wait:
    what comes beyond is left out and counted in ``dropped``. ``sample`` and ``seed`` choose responses as ``RecordWriter`` does.
    Once a part cannot be written it warns, records no more, and ``close`` raises UserError; the loop goes on.
    """

    def __init__(
        self,
        directory: str | Path,
        sample: float = 1.0,
        seed: int = 0,
        *,
        rows_per_part: int = 1024,
        seconds: float = 30.0,
        waiting_bytes: int = 256 << 20,
    ) -> None:
        self.writer = RecordWriter(directory, sample, seed, rows_per_part)
        self.seconds, self.waiting_bytes = seconds, waiting_bytes
        self.dropped = 0
        self.error: Exception | None = None
        self._waiting = 0
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[dict[str, Any], int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="klamp-recorder", daemon=True)
        self._thread.start()

    def record(
        self, *, step: int, logp_new: Any, advantages: Any, mask: Any, logp_old: Any = None, logp_rollout: Any = None,
        logp_ref: Any = None, entropy: Any = None, token_ids: Any = None, row: Any = None, group: Any = None, prompt_id: Any = None,
        reward: Any = None, kept: Any = None, g: Any = None, micro_step: int = 0,
    ) -> None:  # fmt: skip
        """Record a micro-batch of B responses, padded to T tokens: tensors, arrays or lists.

        Per token [B, T]: log-probs in nats, ``advantages`` (or [B]), ``mask`` (true where a token counts), ``kept`` and ``g`` of
        the loss. Per response [B]: ``row`` (unique in its step over all processes; default 0, 1, ...), ``group``,
        ``prompt_id``, ``reward``. Raises UserError for shapes that do not fit; what is not given is null, or -1, or NaN.
        """
        if self.error is not None:
            return
        flags = _host(mask)
        if flags.ndim != 2:
            raise UserError(f"mask must have the shape [B, T]; got {list(flags.shape)}")
        rows = len(flags)
        numbers = range(rows) if row is None else [int(one) for one in _host(row)]
        chosen = [i for i, number in enumerate(numbers) if self.writer.selects(step, number)]
        self.writer.sampled_out += rows - len(chosen)
        if not chosen:
            return
        given = {"logp_new": logp_new, "logp_old": logp_old, "logp_rollout": logp_rollout, "logp_ref": logp_ref,
                 "advantage": advantages, "mask": mask, "entropy": entropy, "token_ids": token_ids, "kept": kept, "g": g}  # fmt: skip
        columns = {
            name: _chosen(name, value, chosen, flags.shape) for name, value in given.items() if value is not None
        }
        columns |= {
            "row": [numbers[i] for i in chosen], "step": int(step), "micro_step": int(micro_step),
            "group": None if group is None else [int(one) for one in _host(group)[chosen]],
            "prompt_id": None if prompt_id is None else [str(prompt_id[i]) for i in chosen],
            "reward": None if reward is None else _host(reward)[chosen].astype("float32"),
        }  # fmt: skip
        size = sum(value.nbytes for name, value in columns.items() if name in _PER_TOKEN)
        with self._lock:
            full = self._waiting and self._waiting + size > self.waiting_bytes
            self._waiting += 0 if full else size
        if full:
            self.dropped += len(chosen)
            return
        self._queue.put((columns, size))

    def close(self) -> None:
        """Write what waits and stop; warns of what was dropped. Raises UserError if a part could not be written."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        if self.dropped:
            warnings.warn(
                f"{self.dropped} responses were not recorded: the disk of {self.writer.directory} is slower than the run; take a "
                "smaller sample",
                stacklevel=2,
            )
        if self.error is not None:
            raise UserError(f"token records of {self.writer.directory} are not complete: {self.error}") from self.error

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except UserError:
            if error is None:  # never in the place of the loop's own error
                raise

    # --- the thread -----------------------------------------------------------------------------------------

    def _write(self) -> None:
        last = time.monotonic()
        try:
            while True:
                try:
                    item = self._queue.get(timeout=self.seconds)
                except queue.Empty:
                    item = ({}, 0)
                if item is None:
                    break
                columns, size = item
                if columns:
                    self.writer.append(_table(columns))
                    with self._lock:
                        self._waiting -= size
                if time.monotonic() - last > self.seconds:
                    self.writer.flush()
                    last = time.monotonic()
            self.writer.flush()
        except Exception as error:  # a full disk must not end a run
            self.error = error
            warnings.warn(f"token records stop here: {error}", stacklevel=1)


def _host(value: Any) -> Any:
    """An array in main memory: of a tensor, of any device and precision."""
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach()
        value = value.float() if value.is_floating_point() else value
        return value.cpu().numpy()
    return np.asarray(value)


def _chosen(name: str, value: Any, chosen: list[int], shape: tuple[int, ...]) -> Any:
    """The chosen rows of one column, copied: [b, T]."""
    import numpy as np

    found = value if hasattr(value, "shape") else np.asarray(value)
    if name == "advantage" and tuple(found.shape) in ((shape[0],), (shape[0], 1)):
        found = found.reshape(-1, 1)
    elif tuple(found.shape) != tuple(shape):
        raise UserError(f"{name} must have the shape of mask, {list(shape)}; got {list(found.shape)}")
    rows = _host(found[chosen] if len(chosen) < shape[0] else found)
    rows = np.broadcast_to(rows, (len(chosen), shape[1]))
    kind = np.int32 if name in _INTEGERS else bool if name in _FLAGS else np.float32
    return np.array(rows, dtype=kind)


def _table(columns: dict[str, Any]) -> pa.Table:
    """Records of ours from padded rows: each response ends with its last token that counts."""
    import numpy as np
    import pyarrow as pa

    mask = columns["mask"]
    rows, width = mask.shape
    lengths = np.where(mask.any(axis=1), width - np.argmax(mask[:, ::-1], axis=1), 0)
    place = np.arange(width) < lengths[:, None]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    defaults: dict[str, Callable[[], Any]] = {
        "token_ids": lambda: np.full(mask.shape, UNKNOWN_TOKEN, np.int32), "kept": lambda: mask,
        "g": lambda: np.full(mask.shape, np.nan, np.float32),
        "group": lambda: columns["row"], "prompt_id": lambda: [""] * rows,
    }  # fmt: skip
    found = []
    for field in arrow_schema():
        value = columns.get(field.name)
        if value is None and field.name in defaults:
            value = defaults[field.name]()
        if value is None:
            found.append(pa.nulls(rows, field.type))
        elif field.name in _PER_TOKEN:
            inner = pa.array(value[place], type=field.type.value_type)
            found.append(pa.ListArray.from_arrays(offsets, inner, type=field.type))
        else:
            whole = np.full(rows, value) if isinstance(value, int) else value
            found.append(pa.array(whole, type=field.type, from_pandas=field.name == "reward"))
    return pa.table(found, schema=arrow_schema())


__all__ = ["Recorder"]
