"""A user's own function as a reward: loaded by name, checked, its errors named by the row."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import math
import numbers
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from klamp.errors import UserError, did_you_mean
from klamp.rewards.base import Reward, RewardFunction, Verdict, completion_text

KNOWN = ("exact", "math", "module:function")


def guarded(function: Callable[..., Any], name: str | None = None) -> RewardFunction:
    """The same reward, checked: a finite number or None per row; its errors are UserErrors naming the row.

    A reward that ``reward`` made is returned as it is.
    """
    return function if isinstance(function, Reward) else Guarded(function, name)


class Guarded(Reward):
    """A user's function as ``guarded`` describes it; a reward of 1 or more counts as correct."""

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        super().__init__(name or str(getattr(function, "__name__", type(function).__name__)))
        self._function = function

    def verdicts(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[Verdict]:
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
        found = [Verdict(value) for value in _checked_result(self.__name__, result, prompts)]
        self.count(found)
        return found


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


def load_function(spec: str) -> Callable[..., Any]:
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


def require(module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UserError(f"the package {package} is not installed; pip install {package}")
