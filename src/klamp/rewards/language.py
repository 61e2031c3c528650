"""The language of rewards: ``math + 0.1*format('<think>.*</think>') + overlong(limit=4096, cache=512)``.

The grammar is Python's own expression syntax, read with ``ast`` and never evaluated. Texts in quotes are taken as they
stand, without escapes.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from klamp.errors import UserError, did_you_mean
from klamp.rewards.base import TIME_LIMIT, Reward, RewardFunction
from klamp.rewards.gym import GYM_PREFIX, GymReward, check_options, gym_name
from klamp.rewards.math import MathReward
from klamp.rewards.own import guarded, load_function, require
from klamp.rewards.rows import Exact, MultipleChoice, Numeric
from klamp.rewards.shaping import Format, Overlong
from klamp.rewards.sums import Sum

_QUOTED = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
_TOKENS = re.compile(
    rf"(?P<quoted>(?<!\w)[rR]?(?:{_QUOTED}))|(?P<path>[\w./~\\-]+:[A-Za-z_]\w*)|(?P<drive>[A-Za-z]:[\\/][\w./\\-]+:[A-Za-z_]\w*)"
)
_PATH = "path"  # the name under which a path stands in the tree: path('module:function')


def _gym(name: str, task: str, /, limit: float = TIME_LIMIT, **options: Any) -> Reward:
    task = gym_name(task)
    check_options(task, options)
    return GymReward(name, task, options, limit=limit)


REWARDS: Mapping[str, Callable[..., Reward]] = {
    "exact": Exact,
    "format": Format,
    "math": MathReward,
    "multiple_choice": MultipleChoice,
    "numeric": Numeric,
    "overlong": Overlong,
    "reasoning_gym": _gym,
}
FORMS = (*REWARDS, GYM_PREFIX + "NAME", "module:function", "file.py:function")


def reward(spec: str, *, time_limit: float = TIME_LIMIT) -> RewardFunction:
    """The reward that a text names: one of ``REWARDS``, ``module:function``, or a weighted sum of such.

    ``time_limit``: the most seconds that one answer may take, where the text does not say ``limit=``. Raises UserError
    for what is unknown, for what cannot be imported, and for a function that does not take ``**columns``.
    """
    if not isinstance(spec, str):
        raise UserError(f"a reward is a text such as 'math', not {type(spec).__name__}; to check a function: guarded()")
    if Path(spec.rpartition(":")[0]).is_file():  # whatever its name
        return guarded(load_function(spec), name=spec)
    terms = _Reader(spec, time_limit).terms()
    if len(terms) == 1 and terms[0][0] == 1.0:
        return terms[0][1]
    return Sum(" ".join(spec.split()), terms)


class _Reader:
    """Reads one text; errors quote the part that they are about."""

    def __init__(self, text: str, time_limit: float) -> None:
        self.text, self.time_limit = text, time_limit

    def terms(self) -> list[tuple[float, RewardFunction]]:
        def mark(match: re.Match[str]) -> str:
            if quoted := match["quoted"]:
                return quoted if quoted[0] in "rR" else f"r{quoted}"
            return f"{_PATH}({match.group()!r})"

        if not self.text.strip():
            raise self._error("there is no reward ''; ", did_you_mean(self.text, FORMS))
        if self.text.startswith(":"):
            return [(1.0, self._own(self.text))]
        try:
            tree = ast.parse(_TOKENS.sub(mark, self.text.strip()), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = error.msg if isinstance(error, SyntaxError) else type(error).__name__
            raise self._error(
                f"{self.text!r} is not a reward ({why}); ",
                "it is a name, a name with options, or a sum such as \"math + 0.1*format('<think>.*</think>')\"; ",
                did_you_mean(self.text, FORMS),
            ) from error
        try:
            return self._sum(tree.body, 1.0)
        except RecursionError as error:
            raise self._error(f"{self.text[:80]!r}... is nested too deeply to be a reward") from error

    def _sum(self, node: ast.expr, weight: float) -> list[tuple[float, RewardFunction]]:
        match node:
            case ast.BinOp(left, ast.Add(), right):
                return self._sum(left, weight) + self._sum(right, weight)
            case ast.BinOp(left, ast.Sub(), right):
                return self._sum(left, weight) + self._sum(right, -weight)
            case ast.BinOp(left, ast.Mult(), right):
                if (factor := _weight(left)) is not None:
                    return self._sum(right, weight * factor)
                if (factor := _weight(right)) is not None:
                    return self._sum(left, weight * factor)
                raise self._error(f"{self._shown(node)}: a weight is a finite number, as in 0.1*format('...')")
            case ast.UnaryOp(ast.USub(), inner):
                return self._sum(inner, -weight)
            case ast.Name(name):
                return [(weight, self._call(name, [], {}, self._shown(node)))]
            case ast.Call(ast.Name(name), arguments, keywords):
                given = {key.arg: self._value(key.value) for key in keywords if key.arg is not None}
                if len(given) < len(keywords) or any(isinstance(a, ast.Starred) for a in arguments):
                    raise self._error(f"{self._shown(node)}: options are written out, name=value")
                return [(weight, self._call(name, [self._value(a) for a in arguments], given, self._shown(node)))]
        raise self._error(f"{self._shown(node)} is no reward; ", did_you_mean(self._shown(node), FORMS))

    def _call(self, name: str, arguments: list[Any], options: dict[str, Any], shown: str) -> RewardFunction:
        if name == _PATH and len(arguments) == 1 and not options and isinstance(arguments[0], str):
            return self._path(arguments[0])
        if name not in REWARDS:
            raise self._error(f"there is no reward {name!r}; ", did_you_mean(name, FORMS))
        if name == "math":
            require("math_verify", "math-verify")
        build = REWARDS[name]
        signature = inspect.signature(build)
        known = [key for key in signature.parameters if key not in ("name", "self", "options")]
        if "limit" in known and name != "overlong":
            options = {"limit": self.time_limit, **options}
        try:
            bound = signature.bind(shown, *arguments, **options)
        except TypeError as error:
            wrong = next((key for key in options if key not in known), None)
            near = did_you_mean(wrong, known) if wrong else f"its options: {', '.join(known) or 'none'}"
            raise self._error(f"{shown}: {error}; {near}") from error
        for key, value in bound.arguments.items():
            if key in ("limit", "budget") and name != "overlong" and not _positive(value):
                raise self._error(f"{shown}: {key} is a number of seconds larger than 0")
            if key in ("pattern", "extract", "task") and not isinstance(value, str):
                raise self._error(f"{shown}: {key} is a text in quotes")
        return build(*bound.args, **bound.kwargs)

    def _path(self, path: str) -> RewardFunction:
        if path.startswith(GYM_PREFIX):
            return GymReward(path, gym_name(path), {}, limit=self.time_limit)
        return self._own(path)

    def _own(self, path: str) -> RewardFunction:
        return guarded(load_function(path), name=path)

    def _value(self, node: ast.expr) -> Any:
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            raise self._error(
                f"{self._shown(node)} is no plain value: a number, a text in quotes, True, None or a tuple"
            ) from None

    def _shown(self, node: ast.expr) -> str:
        text = ast.unparse(node)
        return re.sub(rf"\b{_PATH}\((['\"])(.*?)\1\)", r"\2", text)

    def _error(self, *parts: str) -> UserError:
        message = "".join(parts)
        return UserError(message if self.text in message else f"{message} (in the reward {self.text!r})")


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value < float("inf")


def _weight(node: ast.expr) -> float | None:
    """A number, possibly with a sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = _weight(node.operand)
        return None if inner is None else -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value) if abs(node.value) < 1e300 else None
    return None
