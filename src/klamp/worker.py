"""One killable process for calls that can hang or eat all memory on a model's text."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

START_LIMIT = 120.0  # seconds for a library to be imported in the worker
MEMORY_LIMIT = 4 << 30  # bytes of address space of the worker


class WorkerFailed(RuntimeError):
    """The worker raised, ran out of memory or died; the text says which."""


class Worker:
    """One child process that runs module-level functions; killed when late, started again when next needed.

    A plain subprocess that talks JSON lines: it works from any thread and any ``__main__``, and unpickles
    nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._loaded: set[str] = set()

    def ask(self, function: Callable[..., Any], *args: Any, library: str, limit: float) -> Any:
        """``function(*args)``, arguments and result as JSON.

        Raises TimeoutError after ``limit`` seconds, WorkerFailed if the call raises or the process dies.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            if library not in self._loaded:  # importing is not the answer's fault: it has its own limit
                self._exchange(_import_in_worker, [library], START_LIMIT)
                self._loaded.add(library)
            return self._exchange(function, args, limit)

    def _start(self) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from klamp.worker import _serve; _serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        self._replies, self._loaded = queue.SimpleQueue(), set()
        threading.Thread(target=_pump, args=(self._process.stdout, self._replies), daemon=True).start()

    def _exchange(self, function: Callable[..., Any], args: Sequence[Any], limit: float) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            request = [function.__module__, function.__name__, list(args), limit]
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            reply = self._replies.get(timeout=limit)
        except queue.Empty:
            self.stop()
            raise TimeoutError(f"no reply within {limit} s") from None
        except BrokenPipeError:
            reply = None
        except BaseException:  # interrupted: the reply to come would be taken for the next one's
            self.stop()
            raise
        if reply is None:
            self.stop()
            raise WorkerFailed("the worker died, most likely out of memory")
        value, error = json.loads(reply)
        if error:
            raise WorkerFailed(error)
        return value

    def stop(self) -> None:
        """Kills the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError, AttributeError):
                    pipe.close()  # type: ignore[union-attr]
            self._process = None


def _pump(lines: Any, replies: queue.SimpleQueue[str | None]) -> None:
    with contextlib.suppress(ValueError, OSError):  # closed under us: the process was killed
        for line in lines:
            replies.put(line)
    replies.put(None)


def _import_in_worker(library: str) -> None:
    importlib.import_module(library)


def _serve() -> None:
    """The worker's loop: a line ``[module, function, args, limit]`` in, a line ``[value, error]`` out."""
    logging.disable()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a library that prints must not break the protocol
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's business; it ends us by closing stdin
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    for line in sys.stdin:
        module, function, args, limit = json.loads(line)
        if hasattr(signal, "setitimer"):  # if the parent is gone and cannot kill us
            signal.setitimer(signal.ITIMER_REAL, 2 * limit + 1)
        try:
            reply: list[Any] = [getattr(importlib.import_module(module), function)(*args), None]
        except Exception as error:  # str() of an error may hold a parsed object that cannot be printed
            reply = [None, type(error).__name__]
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies, flush=True)


WORKER = Worker()
atexit.register(WORKER.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=WORKER.__init__)  # type: ignore[misc]
