"""The questions of an evaluation: rows with names that are stable, and bad rows refused or counted."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from klamp import rewards, tasks
from klamp.data import BadRow as BadRow
from klamp.data import Example, Prompting, Rows, load
from klamp.data import options as data_options
from klamp.data.prompts import take_examples, tokens_of
from klamp.errors import UserError
from klamp.evaluate.options import Options

Row = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """One row: ``id`` depends on its prompt and answer alone, ``row`` is its number in the source, from 1.

    ``fields`` has the prompt as it is asked, with what was put around it.
    """

    id: str
    row: int
    fields: Row


@dataclass(frozen=True)
class Asked:
    """What is evaluated on what: questions and left out rows, the reward and its name, the model, default lengths.

    ``about`` says what was read and what was put around each prompt.
    """

    source: str
    questions: list[Question]
    bad: list[BadRow]
    reward: Callable[..., list[float | None]]
    reward_name: str
    model: str
    max_tokens: int
    about: dict[str, Any] = field(default_factory=dict)


def asked(options: Options) -> Asked:
    """The task or data that the options name. Raises UserError for what cannot be read, with the row's number."""
    return _asked_of_task(options) if options.data is None else _asked_of_data(options, options.data)


def _asked_of_task(options: Options) -> Asked:
    task = tasks.task(options.task or "sort")
    reward = rewards.reward(options.reward) if options.reward else task.reward
    name = options.reward or ("exact" if task is tasks.task("sort") else task.name)
    questions = named(list(enumerate(task.heldout(), 1)))
    examples: tuple[Example, ...] = ()
    if options.few_shot:
        shown = [Example(row["prompt"], row["answer"]) for row in task.train(0)]
        examples = take_examples(shown, options.few_shot, [one.fields["prompt"] for one in questions], task.name)
    whole = Asked(task.name, questions, [], rewards.guarded(reward), name, options.model or task.model,
                  options.max_tokens or task.max_completion_length)  # fmt: skip
    return _prompted(whole, options, data_options.prompting(options, None, examples))


def _asked_of_data(options: Options, source: str) -> Asked:
    name = options.reward or data_options.default_reward(source)
    assert name is not None  # the options were checked
    own = rewards.reward(name)
    request = data_options.request(options, source, "test")
    rows = load(request)
    for line in (*rows.left_out(), data_options.usual_instruction(options, source)):
        if line is not None:
            print(line, file=sys.stderr)
    questions = named([(number, row) for number, row in zip(rows.numbers, rows.dataset.to_list(), strict=True)])
    examples = data_options.examples_apart(options, request, [one.fields["prompt"] for one in questions])
    model = options.model or tasks.task("sort").model
    length = options.max_tokens or (32 if model.startswith(tasks.EMBEDDED_PREFIX) else 512)
    whole = Asked(source, questions, list(rows.bad), rewards.guarded(own), name, model, length, _read(rows))
    return _prompted(whole, options, data_options.prompting(options, source, examples))


def _read(rows: Rows) -> dict[str, Any]:
    return {"read_from": rows.source, "rows_read": rows.read, "rows_repeated": rows.repeated}


def named(rows: Sequence[tuple[int, Row]]) -> list[Question]:
    """Questions from numbered rows; the second of two equal rows is ``ID-2``."""
    seen: Counter[str] = Counter()
    questions = []
    for number, row in rows:
        text = json.dumps([row["prompt"], row["answer"]], sort_keys=True)
        name = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
        seen[name] += 1
        questions.append(Question(name if seen[name] == 1 else f"{name}-{seen[name]}", number, dict(row)))
    return questions


def fingerprint(questions: Sequence[Question]) -> str:
    """A checksum of every field of every question, in order."""
    text = json.dumps([question.fields for question in questions], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


# --- prompts --------------------------------------------------------------------------------------------------


def _prompted(whole: Asked, options: Options, prompting: Prompting) -> Asked:
    """The questions with what is put around their prompts, without those that are too long then."""
    whole = replace(whole, about=whole.about | {"prompting": prompting.to_dict()})
    if not prompting and options.max_prompt_tokens is None:
        return whole  # the engine's own room puts a text into the chat template
    from klamp.train.models import load_tokenizer, model_path

    tokenizer = load_tokenizer(model_path(whole.model, options.trust_remote_code), options.trust_remote_code)
    chat = bool(tokenizer.chat_template) and not options.plain_prompts
    questions: list[Question] = []
    long: list[BadRow] = []
    for one in whole.questions:
        prompt = prompting(one.fields["prompt"], chat)
        count = 0 if options.max_prompt_tokens is None else tokens_of(tokenizer, prompt)
        if options.max_prompt_tokens is not None and count > options.max_prompt_tokens:
            long.append(
                BadRow(one.row, f"the prompt has {count} tokens (--max-prompt-tokens {options.max_prompt_tokens})")
            )
        else:
            questions.append(replace(one, fields=one.fields | {"prompt": prompt}))
    if long:
        print(
            f"{whole.source}: {len(long)} of {len(whole.questions)} questions are left out; the first, row {long[0].row}: "
            f"{long[0].reason}",
            file=sys.stderr,
        )
    if not questions:
        raise UserError(
            f"{whole.source}: no prompt has at most {options.max_prompt_tokens} tokens (--max-prompt-tokens)"
        )
    return replace(whole, questions=questions, bad=sorted([*whole.bad, *long], key=lambda one: one.row))
