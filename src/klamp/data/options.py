"""The options about data that ``klamp train`` and ``klamp eval`` share: on the command line, and what they ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from klamp.data.benchmarks import BENCHMARKS, benchmark
from klamp.data.prompts import Example, Prompting, same_prompt, take_examples
from klamp.data.reading import Request, Rows, load
from klamp.errors import UserError

OF_DATA = ("split", "data_dir", "prompt_field", "answer_field", "skip_bad_rows")  # a task has none of these
SOURCES = f"JSONL, JSON, Parquet or CSV file, directory, Hugging Face id, or a benchmark: {', '.join(BENCHMARKS)}"


def add_arguments(add: Callable[..., Any], split: str) -> None:
    """The options as arguments of a parser; ``split`` is the default."""
    add("--prompt-field", metavar="NAME", help="column with the prompt, or a place in one, a.b (default: detected)")
    add("--answer-field", metavar="NAME", help="column with the answer, or a place in one, a.b (default: detected)")
    add("--split", help=f"split of a dataset, folder or benchmark (default: {split})")
    add(
        "--data-dir",
        metavar="DIR",
        help="of a dataset id or folder: the folder inside it (main); of a benchmark's name: the local folder with its file",
    )
    add("--skip-bad-rows", action="store_true", default=None, help="leave out rows that cannot be used, and count them")
    add("--system", metavar="TEXT", help="system message; without a chat template, text before the prompt")
    add(
        "--instruction",
        metavar="TEXT",
        help="text after each prompt (default: a benchmark's own, else none; '' for none)",
    )
    add("--few-shot", type=int, metavar="N", help="worked examples before each prompt, of the train split (default: 0)")
    add("--few-shot-data", metavar="D", help="take the examples from these data instead")
    add(
        "--max-prompt-tokens",
        type=int,
        metavar="N",
        help="leave out longer prompts, and count them (default: no limit)",
    )
    add("--plain-prompts", action="store_true", default=None, help="do not wrap text prompts in the chat template")


def check(options: Any, source: str | None, option: str) -> None:
    """Refuse values that mean nothing, and options of data where there are none. ``option`` names the one of the source."""
    if source is None:
        for name in OF_DATA:
            if getattr(options, name):
                raise UserError(f"--{name.replace('_', '-')} is about data of {option}, and a task has its own")
    if options.few_shot < 0:
        raise UserError(f"--few-shot {options.few_shot} must be at least 0")
    if options.few_shot_data is not None and not options.few_shot:
        raise UserError("--few-shot-data needs --few-shot N, the number of examples")
    if options.max_prompt_tokens is not None and options.max_prompt_tokens < 1:
        raise UserError(f"--max-prompt-tokens {options.max_prompt_tokens} must be at least 1")


def default_reward(source: str | None) -> str | None:
    """The reward of a benchmark, None for other data."""
    known = benchmark(source)
    return None if known is None else known.reward


def nearest_benchmark(source: str) -> str:
    """The end of a message: a benchmark that may have been meant, which needs no reward."""
    near = get_close_matches(source, BENCHMARKS, 1)
    return f"; did you mean the benchmark {near[0]!r}?" if near else ""


def request(options: Any, source: str, purpose: str) -> Request:
    """What the options ask for."""
    names = {item.name for item in fields(Request)} - {"source", "purpose"}
    return Request(source, purpose, **{name: getattr(options, name) for name in names})


def prompting(options: Any, source: str | None, examples: tuple[Example, ...]) -> Prompting:
    """What the options put around a prompt; an instruction that is not asked for is the benchmark's."""
    known = benchmark(source)
    usual = "" if known is None else known.instruction
    return Prompting(options.system, usual if options.instruction is None else options.instruction, examples)


def usual_instruction(options: Any, source: str) -> str | None:
    """A line that says so where the benchmark's own instruction is put after each prompt."""
    known = benchmark(source)
    if known is None or not known.instruction or options.instruction is not None:
        return None
    return f"{known.name}: after each prompt comes \"{known.instruction}\" (--instruction '' leaves it out)"


def examples_apart(options: Any, asked: Request, prompts: Sequence[Any]) -> tuple[Example, ...]:
    """``few_shot`` examples of data that are not asked: the first rows of --few-shot-data, or of the train split."""
    if not options.few_shot:
        return ()
    if options.few_shot_data is None:
        _needs_training_split(asked)
        wanted = replace(asked, purpose="train", split="train")
    else:
        known = benchmark(options.few_shot_data)
        wanted = replace(asked, source=options.few_shot_data, purpose="train", split=None)
        if known is not None:
            wanted = replace(wanted, prompt_field=None, answer_field=None)
        if known is None or benchmark(asked.source) is None:
            wanted = replace(wanted, data_dir=None)
    found = load(wanted)
    return take_examples(examples_of(found), options.few_shot, prompts, found.source)


def examples_first(options: Any, found: Rows) -> tuple[tuple[Example, ...], list[int]]:
    """The first ``few_shot`` examples of the rows themselves, and the indices of the rows that are left to ask."""
    examples = take_examples(examples_of(found), options.few_shot, (), found.source)
    shown = {same_prompt(one.prompt) for one in examples}
    return examples, [i for i, prompt in enumerate(found.dataset["prompt"]) if same_prompt(prompt) not in shown]


def examples_of(found: Rows) -> list[Example]:
    """Each row with its worked answer: its column ``solution`` if it is a text, else the text that the answer was in."""
    columns = found.dataset.column_names
    solutions = found.dataset["solution"] if "solution" in columns else [None] * len(found.dataset)
    return [
        Example(prompt, solution if isinstance(solution, str) and solution.strip() else worked)
        for prompt, solution, worked in zip(found.dataset["prompt"], solutions, found.worked, strict=True)
    ]


def _needs_training_split(asked: Request) -> None:
    known = benchmark(asked.source)
    if (known is not None and all(split.name != "train" for split in known.splits)) or Path(asked.source).is_file():
        raise UserError(f"{asked.source} has no training split to take examples from; give --few-shot-data D")
