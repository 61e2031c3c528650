"""What a run trains on: a task or data with a reward, and the prompts as the model is asked."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from klamp.data import Example, Prompting, Rows, load, split_heldout
from klamp.data import options as data_options
from klamp.data.prompts import same_prompt, take_examples, templated, tokens_of, up_to
from klamp.errors import UserError
from klamp.rewards import RewardFunction
from klamp.train import rundir
from klamp.train.options import Options

Row = dict[str, Any]

HELDOUT = 256  # held-out problems of a task; of a dataset a tenth of it, at most these


@dataclass(frozen=True)
class Problem:
    """What to train on: rows with a prompt and an answer, a reward, and defaults for TRL's options.

    ``prompting`` is what will be put around each prompt; ``about`` says what was read and what was left out.
    """

    name: str
    train: list[Row]
    heldout: list[Row]
    reward: RewardFunction
    model: str
    defaults: dict[str, Any]
    prompting: Prompting = field(default_factory=Prompting)
    about: dict[str, Any] = field(default_factory=dict)


def problem(options: Options) -> Problem:
    """The task or dataset that the options name. Raises UserError where they contradict or cannot be read."""
    if options.task and options.dataset:
        raise UserError("--task is a dataset with its reward; give either --task or --dataset, not both")
    data_options.check(options, options.dataset, "--dataset")
    return _of_task(options) if options.dataset is None else _of_data(options, options.dataset)


def prompted(asked: Problem, options: Options, tokenizer: Any, template: dict[str, Any] | None = None) -> Problem:
    """The problem with its prompts as the model is asked, without those of more than ``max_prompt_tokens``.

    ``template``: arguments of the chat template. What is left out is counted in ``about`` and said on stderr.
    """
    chat = bool(tokenizer.chat_template) and not options.plain_prompts
    sides, long = [], {}
    for name, rows in (("train", asked.train), ("heldout", asked.heldout)):
        shown = [row | {"prompt": asked.prompting(row["prompt"], chat)} for row in rows]
        if not isinstance(shown[0]["prompt"], str):
            templated(tokenizer, shown[0]["prompt"], template)  # refused before anything is written
        kept, counts = up_to(shown, options.max_prompt_tokens, partial(tokens_of, tokenizer, chat=template))
        if not kept:
            raise UserError(
                f"no prompt of {asked.name} ({name}) has at most {options.max_prompt_tokens} tokens (--max-prompt-tokens); "
                f"the shortest has {min(counts)}"
            )
        sides.append(kept)
        long[name] = len(counts)
        if counts and rundir.is_main():
            print(
                f"{asked.name}: {len(counts)} of {len(rows)} rows ({name}) are left out, their prompts have more than "
                f"{options.max_prompt_tokens} tokens (the longest {max(counts)})",
                file=sys.stderr,
            )
    about = asked.about | {"prompting": asked.prompting.to_dict()}
    if options.max_prompt_tokens is not None:
        about["longer_than_max_prompt_tokens"] = long
    return replace(asked, train=sides[0], heldout=sides[1], about=about)


# --- where rows come from -------------------------------------------------------------------------------------


def _of_task(options: Options) -> Problem:
    from klamp import rewards, tasks

    own = rewards.reward(options.reward) if options.reward else None
    task = tasks.task(options.task or "sort")
    rows: list[Row] = list(task.train(options.seed))
    heldout: list[Row] = list(task.heldout()[: options.eval_size or HELDOUT])
    examples: tuple[Example, ...] = ()
    about: dict[str, Any] = {}
    if options.few_shot:
        shown = [Example(row["prompt"], row["answer"]) for row in rows]
        examples = take_examples(shown, options.few_shot, [row["prompt"] for row in heldout], task.name)
        taken = {same_prompt(one.prompt) for one in examples}
        rows = [row for row in rows if same_prompt(row["prompt"]) not in taken]
        about["rows_shown_as_examples"] = len(shown) - len(rows)
    defaults = {**task.defaults, "max_completion_length": task.max_completion_length}
    return Problem(
        task.name, rows, heldout, rewards.guarded(own or task.reward), options.model or task.model, defaults,
        data_options.prompting(options, None, examples), about,
    )  # fmt: skip


def _of_data(options: Options, source: str) -> Problem:
    from klamp import rewards, tasks

    name = options.reward or data_options.default_reward(source)
    if name is None:
        near = data_options.nearest_benchmark(source)
        raise UserError(f"--dataset needs --reward: {', '.join(rewards.FORMS)}{near}")
    own = rewards.reward(name)
    request = data_options.request(options, source, "train")
    found = load(request)
    if rundir.is_main():
        for line in (*found.left_out(), data_options.usual_instruction(options, source)):
            if line is not None:
                print(line, file=sys.stderr)
    rows, about = found.dataset, _about(found)
    if options.few_shot and options.few_shot_data is None:
        examples, left = data_options.examples_first(options, found)
        about["rows_shown_as_examples"] = len(rows) - len(left)
        rows = rows.select(left)
    else:
        examples = data_options.examples_apart(options, request, rows["prompt"] if options.few_shot else ())
    size = options.eval_size or min(HELDOUT, max(1, len(rows) // 10))
    if size >= len(rows):
        raise UserError(
            f"{source} has {len(rows)} rows: {size} held-out problems leave none to train on; "
            f"give at least 2 rows, and --eval-size below their number"
        )
    train, heldout = split_heldout(rows, size, seed=0)
    embedded = options.model is None or options.model.startswith(tasks.EMBEDDED_PREFIX)
    # The embedded model reads a text letter by letter: a short run shows that everything fits together.
    short = {"max_completion_length": 32, "per_device_train_batch_size": 16, "max_steps": 40}
    defaults = {**tasks.task("sort").defaults, **short} if embedded else {}
    return Problem(
        source, train.to_list(), heldout.to_list(), rewards.guarded(own), options.model or tasks.task("sort").model,
        defaults, data_options.prompting(options, source, examples), about,
    )  # fmt: skip


def _about(found: Rows) -> dict[str, Any]:
    return {
        "read_from": found.source,
        "rows_read": found.read,
        "rows_repeated": found.repeated,
        "skipped_rows": [one.to_dict() for one in found.bad],
    }
