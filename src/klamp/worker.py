"""Killable processes for calls that can hang or eat all memory on a model's text.

Each worker is a small supervisor that imports the libraries once and forks a child to run the calls. A child that
is late or dies is replaced by a new fork in milliseconds, and what was imported is not imported again. Messages are
JSON, nothing is unpickled, and no signal handler or ``__main__`` guard is needed: any thread of any process may ask.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

START_LIMIT = 120.0  # seconds for a library to be imported in a worker
MEMORY_LIMIT = 2 << 30  # bytes of address space of a child
GRACE = 10.0  # seconds beyond its limit after which a supervisor itself is given up
CALLS = 2000  # calls of one child, so that what libraries cache in it does not grow for ever
WORKERS = 4  # at most, of one process

Function = Callable[..., Any]


class WorkerFailed(RuntimeError):
    """The call raised, ran out of memory or ended its process; the text says which."""


@dataclass(frozen=True)
class Outcome:
    """What became of one call: its value, or why there is none.

    ``timeout``: it took longer than its own limit; ``error``: it raised or its process died; ``late``: the time of
    the whole batch was over before it was decided; ``lost``: the machinery failed, which is not the call's fault.
    """

    kind: Literal["done", "timeout", "error", "late", "lost"]
    value: Any = None


class Pool:
    """Some workers, started when first needed."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size or _share_of_cores()
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._workers = [_Worker() for _ in range(self.size)]
        for worker in self._workers:
            self._idle.put(worker)

    def ask(self, function: Function, *args: Any, library: str, limit: float) -> Any:
        """``function(*args)``, a module's function with arguments and result as JSON.

        Raises TimeoutError after ``limit`` seconds, WorkerFailed if the call raises or its process dies.
        """
        outcome = self.map(function, [args], library=library, limit=limit)[0]
        if outcome.kind in ("timeout", "late"):
            raise TimeoutError(f"no reply within {limit} s")
        if outcome.kind != "done":
            raise WorkerFailed(str(outcome.value))
        return outcome.value

    def map(
        self,
        function: Function,
        rows: Sequence[Sequence[Any]],
        *,
        library: str,
        limit: float,
        budget: float | None = None,
    ) -> list[Outcome]:
        """``function(*row)`` for every row, on all idle workers, each within ``limit`` seconds.

        Returns within ``budget`` seconds (plus ``GRACE`` if a supervisor is stuck, plus the import of ``library`` on
        first use): what is not decided then is ``late``. Waiting for workers that other threads use counts. Raises
        WorkerFailed if the library cannot be imported.
        """
        start = time.monotonic()
        workers = self._take(len(rows), budget) if rows else []
        if budget is not None:
            budget -= time.monotonic() - start
        try:
            for worker in workers:
                worker.begin(function, library)
            for worker in workers:
                worker.ready(function, library)
            return _Batch(function, rows, limit, budget).run(workers)
        finally:
            for worker in workers:
                if worker.busy:  # interrupted: the reply to come would be taken for the next one's
                    worker.stop()
                self._idle.put(worker)

    def _take(self, wanted: int, patience: float | None) -> list[_Worker]:
        """A worker, and others that are idle; none if all are busy for so long."""
        taken: list[_Worker] = []
        with contextlib.suppress(queue.Empty):
            taken.append(self._idle.get(timeout=patience))
            while len(taken) < min(wanted, self.size):
                taken.append(self._idle.get_nowait())
        return taken

    def stop(self) -> None:
        """Kills the processes, if there are any; they start again when next needed."""
        for worker in self._workers:
            worker.stop()

    def pids(self) -> list[int]:
        """The supervisors that run."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def forget(self) -> None:
        """In a forked process: the workers are the parent's."""
        for worker in self._workers:
            worker.forget()
        Pool.__init__(self, self.size)


class _Batch:
    """The calls of one ``map``, handed out to workers as they become free."""

    def __init__(self, function: Function, rows: Sequence[Sequence[Any]], limit: float, budget: float | None) -> None:
        self.function, self.rows, self.limit = function, rows, limit
        self.end = float("inf") if budget is None else time.monotonic() + budget
        self.outcomes: list[Outcome] = [Outcome("late")] * len(rows)
        self.following = 0

    def run(self, workers: Sequence[_Worker]) -> list[Outcome]:
        rows = {worker: row for worker in workers if (row := self._hand_out(worker)) is not None}
        while rows:
            overdue = min(worker.overdue for worker in rows)
            ready = wait([w.connection for w in rows if w.connection], timeout=max(0.0, overdue - time.monotonic()))
            for worker in list(rows):
                if worker.connection in ready or worker.overdue <= time.monotonic():
                    self.outcomes[rows.pop(worker)] = self._receive(worker)
                    if (row := self._hand_out(worker)) is not None:
                        rows[worker] = row
        return self.outcomes

    def _hand_out(self, worker: _Worker) -> int | None:
        left = self.end - time.monotonic()
        if self.following == len(self.rows) or left <= 0.0:
            return None
        row, self.following = self.following, self.following + 1
        worker.full = left >= self.limit
        worker.send(self.function, self.rows[row], min(left, self.limit))
        return row

    def _receive(self, worker: _Worker) -> Outcome:
        kind, value = worker.receive()
        return Outcome("late") if kind == "timeout" and not worker.full else Outcome(kind, value)


class _Worker:
    """This process's end of one supervisor."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: Connection[Any, Any] | None = None
        self.loaded: set[str] = set()
        self.busy = False
        self.full = True  # the running call has its whole limit
        self.overdue = 0.0

    def begin(self, function: Function, library: str) -> None:
        """Start the process if there is none, and the import of what is not imported."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        wanted = {library, function.__module__} - self.loaded
        if wanted:
            self._send(["import", sorted(wanted)], START_LIMIT)
            self.loaded |= wanted

    def ready(self, function: Function, library: str) -> None:
        """Wait for the import; one that is killed meanwhile (by the machine's memory, for one) is tried again once."""
        for last in (False, True):
            if not self.busy:
                return
            kind, value = self.receive()
            if kind == "done":
                return
            self.stop()
            if last or kind != "lost":
                raise WorkerFailed(f"a worker could not start: {value or kind}")
            self.begin(function, library)

    def send(self, function: Function, row: Sequence[Any], limit: float) -> None:
        if self.process is None:  # lost with its last call
            self.begin(function, function.__module__)
            self.ready(function, function.__module__)
        self._send(["call", function.__module__, function.__name__, list(row), limit], limit)

    def receive(self) -> tuple[Any, Any]:
        """``(kind, value)`` of the running call; kills a supervisor that is overdue."""
        try:
            assert self.connection is not None
            if not self.connection.poll(max(0.0, self.overdue - time.monotonic())):
                raise EOFError
            kind, value = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.stop()
            return "lost", "the worker was killed"
        self.busy = False
        return kind, value

    def stop(self) -> None:
        """Kills the supervisor and its child."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.forget()

    def forget(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.process, self.connection, self.loaded, self.busy = None, None, set(), False

    def _start(self) -> None:
        self.stop()
        self.connection, theirs = Pipe()
        code = f"import sys; sys.path[:] = {sys.path!r}; from klamp.worker import supervise; supervise()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # some scorers go by the order of a set: the same in every process and on every rank
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            start_new_session=True,  # a process group to kill; and Ctrl-C is the trainer's business
        )
        theirs.close()

    def _send(self, request: list[Any], limit: float) -> None:
        assert self.connection is not None
        self.busy, self.overdue = True, time.monotonic() + limit + GRACE
        with contextlib.suppress(OSError):  # a broken pipe: receive() finds the end of it
            self.connection.send_bytes(json.dumps(request).encode())


# --- in the worker --------------------------------------------------------------------------------------------
def supervise() -> None:
    """A worker's main loop: imports libraries, and passes calls on to a child that it kills when late."""
    logging.disable()
    above: Connection[Any, Any] = Connection(int(sys.argv[1]))
    child: _Child | None = None
    try:
        while True:
            message = above.recv_bytes()
            request = json.loads(message)
            if request[0] == "import":
                _end(child)
                child = None
                reply = _import(request[1])
            else:
                if child is None or child.calls == CALLS:
                    _end(child)
                    child = _Child()
                reply = child.call(message, request[-1], above)
                if reply[0] == "timeout" or not child.alive:
                    _end(child)
                    child = None
            above.send_bytes(json.dumps(reply).encode())
    except (EOFError, OSError):  # the process that asked is gone
        pass
    finally:
        _end(child)


def _import(names: Sequence[str]) -> list[Any]:
    try:
        for name in names:
            module = importlib.import_module(name)
            if name.startswith("klamp.") and hasattr(module, "warm_up"):
                module.warm_up()  # once here, not in every child
    except Exception as error:
        return ["error", f"{type(error).__name__}: {error}"]
    gc.collect()
    gc.freeze()  # so that the children share its memory
    return ["done", None]


class _Child:
    """The supervisor's end of a forked child."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self.calls, self.alive = 0, True
        self.pid = os.fork()
        if self.pid == 0:
            self.connection.close()
            os.close(int(sys.argv[1]))
            _serve(theirs)
        theirs.close()

    def call(self, message: bytes, limit: float, above: Connection[Any, Any]) -> list[Any]:
        self.calls += 1
        try:
            self.connection.send_bytes(message)
            ready = wait([self.connection, above], timeout=limit)
            if above in ready:  # nobody speaks while waiting for a reply: this is the end
                raise SystemExit
            if not ready:
                return ["timeout", None]
            return list(json.loads(self.connection.recv_bytes()))
        except (EOFError, OSError):
            self.alive = False
            return ["error", "its process died, most likely out of memory"]


def _end(child: _Child | None) -> None:
    if child is not None:
        child.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)


def _serve(connection: Connection[Any, Any]) -> None:
    """The child's loop; it never returns."""
    try:
        with contextlib.suppress(ImportError, ValueError, OSError):
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        while True:
            _, module, function, args, limit = json.loads(connection.recv_bytes())
            signal.setitimer(signal.ITIMER_REAL, 2 * limit + 1)  # its default is death, if the supervisor is gone
            try:
                reply = ["done", getattr(importlib.import_module(module), function)(*args)]
                message = json.dumps(reply)
            except Exception as error:  # str() of an error may hold a parsed object that cannot be printed
                message = json.dumps(["error", type(error).__name__])
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(message.encode())
    finally:
        os._exit(0)


def _share_of_cores() -> int:
    """The cores that this process may use, shared among the ranks of its machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(WORKERS, cores // max(1, int(ranks) if ranks.isdecimal() else 1)))


WORKER = Pool()
atexit.register(WORKER.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=WORKER.forget)
