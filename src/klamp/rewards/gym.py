"""reasoning-gym: its tasks, and its scorers as rewards."""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from klamp.answers import find
from klamp.errors import UserError, did_you_mean
from klamp.rewards.base import BUDGET, TIME_LIMIT, Columns, Reward, Verdict
from klamp.rewards.own import require
from klamp.worker import WORKER, Outcome

if TYPE_CHECKING:
    from klamp.tasks import Task

GYM_PREFIX = "reasoning_gym:"
GYM_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
GYM_SIZE, GYM_HELDOUT_SIZE, GYM_HELDOUT_SEED = 1024, 256, 2_000_000_000


def reasoning_gym_task(spec: str, *, size: int = GYM_SIZE) -> Task:
    """The task ``reasoning_gym:NAME``, scored by its own ``score_answer``; its options as in ``products(max_digits=1)``.

    Training rows depend on the seed; held-out rows do not, are all different, and no training row has the prompt of
    one. Of a task with few different problems a quarter is held out. Rows carry a column ``entry``: what
    ``score_answer`` needs. Raises UserError for an unknown name or option.
    """
    from klamp.tasks import Task

    name, options = _gym_call(spec)
    size = options.pop("size", size)
    check_options(name, options)

    def rows(seed: int, count: int) -> Iterator[dict[str, str]]:
        drawn = _gym_dataset(name, **options, seed=seed, size=4 * count)  # lazy: an item is made when asked for
        for entry in map(drawn.__getitem__, range(4 * count)):
            yield {
                "prompt": entry["question"],
                "answer": str(entry["answer"] or ""),  # None where there is no single right answer
                "entry": json.dumps(_encode(entry), default=str),
            }

    @functools.cache
    def heldout() -> list[dict[str, str]]:
        different: dict[str, dict[str, str]] = {}
        for row in rows(GYM_HELDOUT_SEED, GYM_HELDOUT_SIZE):
            different.setdefault(row["prompt"], row)
            if len(different) == GYM_HELDOUT_SIZE:
                return list(different.values())
        return list(different.values())[: len(different) // 4]

    def train(seed: int) -> list[dict[str, str]]:
        # item i of seed s is item i - 1 of seed s + 1: starts must be further apart than a run is long
        start = seed * 1_000_003 % (GYM_HELDOUT_SEED - 100_000_000)
        taken = {row["prompt"] for row in heldout()}
        found = list(itertools.islice((row for row in rows(start, size) if row["prompt"] not in taken), size))
        if not found or not taken:
            raise UserError(f"{spec} has too few different problems to hold any out; make it harder by its options")
        return found

    return Task(
        name=spec,
        description=f"reasoning-gym's {name}",
        train=train,
        heldout=heldout,
        reward=GymReward(spec, name, options),
        max_completion_length=256,
        model=GYM_MODEL,
    )


def gym_name(spec: str) -> str:
    name = spec.removeprefix(GYM_PREFIX)
    require("reasoning_gym", "reasoning-gym")
    known = importlib.import_module("reasoning_gym.factory").DATASETS
    if name not in known:
        raise UserError(f"reasoning-gym has no task {name!r}; {did_you_mean(name, known)}")
    return name


def _gym_call(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and options of ``reasoning_gym:NAME(option=value, ...)``; read, never evaluated."""
    text = spec.removeprefix(GYM_PREFIX)
    if "(" not in text:
        return gym_name(text), {}
    try:
        call = ast.parse(text.strip(), mode="eval").body
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Name)
        assert not call.args
        options = {str(key.arg): ast.literal_eval(key.value) for key in call.keywords if key.arg}
        assert len(options) == len(call.keywords)
    except (SyntaxError, ValueError, TypeError, AssertionError, RecursionError, MemoryError) as error:
        raise UserError(
            f"{spec!r} is no task; its options are written out, as in {GYM_PREFIX}products(max_digits=1)"
        ) from error
    if "seed" in options:
        raise UserError(f"{spec!r}: the seed is the run's, as in --seed {options['seed']}")
    return gym_name(call.func.id), options


def _gym_dataset(name: str, **options: Any) -> Any:
    try:
        return importlib.import_module("reasoning_gym").create_dataset(name, **options)
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"reasoning-gym's {name} refuses the options {options}: {error}") from error


class GymReward(Reward):
    """reasoning-gym's score, between 0 and 1, of what is inside the last ``<answer>``, else of the text after ``</think>``.

    The scorers run in the workers, where the hash of a string is the same in every run: some depend on it. One that
    raises, as many do on an answer of the wrong form, gives 0 and is counted in errors.
    """

    needs = ("answer", "entry")

    def __init__(
        self, name: str, task: str, options: dict[str, Any], *, limit: float = TIME_LIMIT, budget: float = BUDGET
    ) -> None:
        super().__init__(name)
        self.task, self.options, self.limit, self.budget = task, json.dumps(options), limit, budget

    def judge(self, prompts: Sequence[str], texts: Sequence[str], columns: Columns) -> list[Verdict]:
        answers = [_answer_of(text) for text in texts]
        requests = [
            (self.task, self.options, entry, text) for entry, text in zip(columns["entry"], answers, strict=True)
        ]
        distinct = list(dict.fromkeys(requests))
        outcomes = WORKER.map(_score, distinct, library="reasoning_gym", limit=self.limit, budget=self.budget)
        found = dict(zip(distinct, outcomes, strict=True))
        return [_verdict(found[request], request[3]) for request in requests]


def _answer_of(text: str) -> str:
    tagged = find(text, "answer")
    return tagged.text if tagged else text.rpartition("</think>")[2].strip()


def _verdict(outcome: Outcome, answer: str) -> Verdict:
    if outcome.kind == "done":
        return Verdict(float(outcome.value), "", answer)
    if outcome.kind in ("late", "lost"):
        return Verdict(None, outcome.kind, answer)
    return Verdict(0.0, "timeouts" if outcome.kind == "timeout" else "errors", answer)


def check_options(task: str, options: dict[str, Any]) -> None:
    """Raises UserError if the task refuses them."""
    _gym_dataset(task, **{"size": 1, "seed": 0, **options})


@functools.cache
def _gym_scorer(name: str, options: str) -> Any:
    return _gym_dataset(name, **{"size": 1, "seed": 0, **json.loads(options)})


def _score(name: str, options: str, entry: str, text: str) -> float:
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
