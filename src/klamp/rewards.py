"""Rewards: exact match, math answers, reasoning-gym tasks, and a user's own function.

A reward is a TRL reward function ``f(prompts, completions, **columns) -> list[float | None]``; None means
unscored: the row is excluded, which is not the same as wrong. Completions are strings or lists of chat
messages. Nothing heavy is imported before a reward needs it. Texts of a model are handed to math-verify and
reasoning-gym only inside one killable process, because both can hang or eat all memory on a single answer.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import logging
import math
import numbers
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from klamp.answers import MathScore, Verdict
from klamp.errors import UserError, did_you_mean
from klamp.worker import WORKER, WorkerFailed

if TYPE_CHECKING:
    from klamp.tasks import Task

logger = logging.getLogger(__name__)

TIME_LIMIT = 5.0  # seconds for one answer
GYM_PREFIX = "reasoning_gym:"
GYM_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
GYM_SIZE, GYM_HELDOUT_SIZE, GYM_HELDOUT_SEED = 1024, 128, 2_000_000_000
KNOWN = ("exact", "math", GYM_PREFIX + "NAME", "module:function")


class RewardFunction(Protocol):
    """A TRL reward function with a name and counts: scored, unscored, no_answer, timeouts, errors."""

    __name__: str
    counts: Counter[str]

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]: ...


def reward(spec: str, *, time_limit: float = TIME_LIMIT) -> RewardFunction:
    """The reward ``exact``, ``math``, ``reasoning_gym:NAME``, ``module:function`` or ``file.py:function``.

    ``time_limit`` is the most seconds that one answer may take (math, reasoning-gym). Raises UserError for
    anything else, for what cannot be imported, and for a function that does not take ``**columns``.
    """
    if spec == "exact":
        return RowReward("exact", _exact)
    if spec == "math":
        _require("math_verify", "math-verify")
        return RowReward("math", MathScore(time_limit))
    if spec.startswith(GYM_PREFIX):
        score = functools.partial(_gym, _gym_name(spec), {}, time_limit)
        return RowReward(spec, score, columns=("answer", "entry"))
    if ":" in spec:
        return guarded(_load_function(spec), name=spec)
    raise UserError(f"there is no reward {spec!r}; {did_you_mean(spec, KNOWN)}")


def completion_text(completion: Any) -> str:
    """A completion's text: itself, or the content of its last assistant message (else of its last)."""
    if isinstance(completion, str):
        return completion
    messages = [m for m in completion if m.get("role") == "assistant"] or list(completion)
    content = messages[-1].get("content") if messages else ""
    if isinstance(content, list):  # parts, as multimodal chats have them
        content = "".join(part.get("text") or "" for part in content)
    return content or ""


class RowReward:
    """A reward made of ``score(text, *values of the columns) -> (reward, count)``, one row at a time."""

    def __init__(self, name: str, score: Callable[..., Verdict], columns: Sequence[str] = ("answer",)) -> None:
        self.__name__ = name
        self.counts: Counter[str] = Counter()
        self._score, self._columns = score, columns

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        for name in self._columns:
            if columns.get(name) is None:
                raise UserError(f"reward {self.__name__} needs a column {name!r}; there is {sorted(columns)}")
        rewards: list[float | None] = []
        for completion, *values in zip(completions, *(columns[c] for c in self._columns), strict=True):
            value, kind = self._score(completion_text(completion), *values)
            if value is None and not self.counts["unscored"]:
                logger.warning(
                    "reward %s cannot score the answer %.80r; such rows do not count",
                    self.__name__,
                    values[0],
                )
            self.counts[kind] += 1
            rewards.append(value)
        return rewards


# --- exact --------------------------------------------------------------------------------------------------
_DECIMAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?")


def _exact(text: str, gold: Any) -> Verdict:
    """1 if the stripped texts are equal or are equal decimal numbers: 43.0 and 43, not 007 and 7."""
    gold, text = "" if gold is None else str(gold).strip(), text.strip()
    if not gold:
        return None, "unscored"
    same = text == gold
    if not same and len(text) + len(gold) < 2000 and _DECIMAL.fullmatch(text) and _DECIMAL.fullmatch(gold):
        same = Fraction(text) == Fraction(gold)
    return float(same), "scored"


# --- reasoning-gym ------------------------------------------------------------------------------------------
def reasoning_gym_task(spec: str, *, size: int = GYM_SIZE, **options: Any) -> Task:
    """The task ``reasoning_gym:NAME``, scored by its own ``score_answer``; options go to its config.

    Training rows depend on the seed; held-out rows do not, and no training row has the prompt of one. Rows
    carry a column ``entry``: what ``score_answer`` needs. Raises UserError for an unknown name or option.
    """
    from klamp.tasks import Task

    name = _gym_name(spec)

    def rows(seed: int, count: int, taken: frozenset[str] = frozenset()) -> list[dict[str, str]]:
        drawn = _gym_dataset(name, seed=seed, size=4 * count, **options)  # lazy: an item is made when asked for
        entries = (entry for entry in map(drawn.__getitem__, range(4 * count)) if entry["question"] not in taken)
        found = [
            {
                "prompt": entry["question"],
                "answer": str(entry["answer"] or ""),  # None where there is no single right answer
                "entry": json.dumps(_encode(entry), default=str),
            }
            for entry in itertools.islice(entries, count)
        ]
        if not found:
            raise UserError(f"{spec} has too few different problems to hold any out; make it harder by its options")
        return found

    @functools.cache
    def heldout() -> list[dict[str, str]]:
        return rows(GYM_HELDOUT_SEED, GYM_HELDOUT_SIZE)

    def train(seed: int) -> list[dict[str, str]]:
        # item i of seed s is item i - 1 of seed s + 1: starts must be further apart than a run is long
        start = seed * 1_000_003 % (GYM_HELDOUT_SEED - 100_000_000)
        return rows(start, size, frozenset(row["prompt"] for row in heldout()))

    score = functools.partial(_gym, name, options, TIME_LIMIT)
    return Task(
        name=spec,
        description=f"reasoning-gym's {name}",
        train=train,
        heldout=heldout,
        reward=RowReward(spec, score, columns=("answer", "entry")),
        max_completion_length=256,
        model=GYM_MODEL,
    )


def _gym_name(spec: str) -> str:
    name = spec.removeprefix(GYM_PREFIX)
    _require("reasoning_gym", "reasoning-gym")
    known = importlib.import_module("reasoning_gym.factory").DATASETS
    if name not in known:
        raise UserError(f"reasoning-gym has no task {name!r}; {did_you_mean(name, known)}")
    return name


def _gym_dataset(name: str, **options: Any) -> Any:
    try:
        return importlib.import_module("reasoning_gym").create_dataset(name, **options)
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"reasoning-gym's {name} refuses the options {options}: {error}") from error


def _gym(name: str, options: dict[str, Any], limit: float, text: str, gold: Any, entry: str) -> Verdict:
    """reasoning-gym's score of what is inside the last ``<answer>``, else of the text after ``</think>``."""
    text = text.rpartition("</think>")[2]
    if "<answer>" in text:
        text = text.rpartition("<answer>")[2].partition("</answer>")[0]
    request = (name, json.dumps(options), entry, text.strip())
    try:
        return WORKER.ask(_gym_in_worker, *request, library="reasoning_gym", limit=limit), "scored"
    except TimeoutError:
        return 0.0, "timeouts"
    except WorkerFailed:  # many scorers raise on an answer of the wrong form
        return 0.0, "errors"


@functools.cache
def _gym_scorer(name: str, options: str) -> Any:
    return _gym_dataset(name, **{"size": 1, "seed": 0, **json.loads(options)})


def _gym_in_worker(name: str, options: str, entry: str, text: str) -> float:
    return float(_gym_scorer(name, options).score_answer(text, _decode(json.loads(entry))))


def _encode(value: Any) -> Any:
    """Plain JSON that keeps tuples and dictionary keys as they are: some scorers compare with ``==``."""
    if isinstance(value, dict):
        return {"dict": [[_encode(k), _encode(v)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_encode(v) for v in value]}
    return [_encode(v) for v in value] if isinstance(value, list) else value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if "tuple" in value:
            return tuple(_decode(v) for v in value["tuple"])
        return {_decode(k): _decode(v) for k, v in value["dict"]}
    return [_decode(v) for v in value] if isinstance(value, list) else value


# --- a user's own function ----------------------------------------------------------------------------------
def guarded(function: Callable[..., Any], name: str | None = None) -> RewardFunction:
    """The same reward, checked: a finite number or None per row; its errors are UserErrors naming the row.

    A reward that ``reward`` made is returned as it is.
    """
    return function if isinstance(function, RowReward | Guarded) else Guarded(function, name)


class Guarded:
    """A user's function as ``guarded`` describes it."""

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self.__name__: str = name or str(getattr(function, "__name__", type(function).__name__))
        self.counts: Counter[str] = Counter()
        self._function = function

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        try:
            result = self._function(prompts=prompts, completions=completions, **columns)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            row, cause = _first_failure(self._function, prompts, completions, columns)
            where = f"row {row + 1} {_at(prompts[row])}" if cause else "the whole batch, though on no row alone"
            cause = cause or error
            message = f"reward {self.__name__} raised {type(cause).__name__}: {cause} on {where}"
            raise UserError(message) from cause
        rewards = _checked_result(self.__name__, result, prompts)
        self.counts["unscored"] += rewards.count(None)
        self.counts["scored"] += len(rewards) - rewards.count(None)
        return rewards


def _at(prompt: Any) -> str:
    text = prompt if isinstance(prompt, str) else completion_text(prompt)
    return f"(prompt: {text if len(text) <= 80 else text[:77] + '...'!r})"


def _first_failure(
    function: Callable[..., Any], prompts: Sequence[Any], completions: Sequence[Any], columns: dict[str, Any]
) -> tuple[int, BaseException | None]:
    """The first row that raises when called alone, and what it raises; -1 and None if none does."""
    for row in range(len(prompts)):
        own = {
            name: value[row : row + 1] if isinstance(value, list) and len(value) == len(prompts) else value
            for name, value in columns.items()
        }
        own |= {name: lambda *_: None for name in ("log_extra", "log_metric") if name in own}  # not logged twice
        try:
            function(prompts=prompts[row : row + 1], completions=completions[row : row + 1], **own)
        except (Exception, SystemExit) as error:
            return row, error
    return -1, None


def _checked_result(name: str, result: Any, prompts: Sequence[Any]) -> list[float | None]:
    result = result.tolist() if hasattr(result, "tolist") else result  # arrays and tensors
    if not isinstance(result, list | tuple) or len(result) != len(prompts):
        got = f"{len(result)} values" if isinstance(result, list | tuple) else type(result).__name__
        raise UserError(f"reward {name} returned {got}; it must return a list of one value per row ({len(prompts)})")
    for row, value in enumerate(result):
        if value is not None and not (isinstance(value, numbers.Real) and math.isfinite(value)):
            raise UserError(
                f"reward {name} returned {value!r:.80} for row {row + 1} {_at(prompts[row])}; "
                "a reward is a finite number, or None for an unscored row"
            )
    return [None if value is None else float(value) for value in result]


def _load_function(spec: str) -> Callable[..., Any]:
    """``module:function`` or ``file.py:function``; the working directory is importable, as with ``-m``."""
    source, _, name = spec.rpartition(":")
    module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    if not hasattr(module, name):
        known = [k for k, v in vars(module).items() if inspect.isfunction(v) and not k.startswith("_")]
        raise UserError(f"{source} has no function {name!r}; {did_you_mean(name, known)}")
    function = getattr(module, name)
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "a coroutine" if callable(function) else f"of type {type(function).__name__}"
        raise UserError(f"{spec} is {kind}; a reward is a plain function of (prompts, completions, **columns)")
    signature = inspect.signature(function)
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values()):
        raise UserError(f"{spec}{signature} must take **columns as well: every column of the data is passed")
    return function  # type: ignore[no-any-return]


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*.py")])
        raise UserError(f"there is no file {str(path)!r}; {near}")
    sys.path.insert(0, str(path.resolve().parent))  # its neighbours too, as for ``python file.py``
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules.setdefault(path.stem, module)
    with _importing(str(path)):
        found.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(name) if name else None
    except (ImportError, ValueError):
        found = None
    if found is None:
        near = did_you_mean(name, [*KNOWN, *(path.stem for path in Path.cwd().glob("*.py"))])
        raise UserError(f"there is no reward module {name!r}; {near}")
    with _importing(name):
        return importlib.import_module(name)


@contextlib.contextmanager
def _importing(name: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        raise UserError(f"importing {name} for a reward raised {type(error).__name__}: {error}") from error


def _require(module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UserError(f"the package {package} is not installed; pip install {package}")
