"""``klamp eval``: from options to a directory with every sample, the numbers, and a page to read them."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klamp.data.prompts import templated
from klamp.errors import UserError
from klamp.evaluate import questions as source
from klamp.evaluate import store
from klamp.evaluate.generate import (
    BATCH,
    Completion,
    Engine,
    Request,
    Sampling,
    device_name,
    dtype_name,
    engine_name,
    make_engine,
    sample_seed,
)
from klamp.evaluate.judging import Judged, judge
from klamp.evaluate.options import Options
from klamp.evaluate.score import NEEDED, per_question, totals
from klamp.tasks import EMBEDDED_PREFIX
from klamp.train.quiet import quiet

EVERY = 10.0  # seconds between two lines of progress where stderr is no terminal


@dataclass(frozen=True)
class Prompt:
    """A question as the reward is given it (``given``: a text or messages) and as the model sees it."""

    question: source.Question
    given: Any
    text: str
    tokens: tuple[int, ...]


def evaluate(options: Options) -> dict[str, Any]:
    """Draw what is missing of the samples, and return the results; ``status`` is complete or interrupted.

    The same options with the same ``out`` continue a run that was stopped, to the same samples as if it had not been.
    Raises UserError for what cannot be read or continued; then nothing was written, or what was there is left.
    """
    store.check_target(options.out)
    asked = source.asked(options)
    quiet()
    import torch

    from klamp.train.models import load_tokenizer, model_path

    if asked.model.startswith(EMBEDDED_PREFIX) and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # too small for two to help
    path = model_path(asked.model, options.trust_remote_code)
    config = _config(path, options.trust_remote_code)
    tokenizer = load_tokenizer(path, options.trust_remote_code)
    prompts, bad = _prompts(options, asked, tokenizer, getattr(config, "max_position_embeddings", None))
    name, device = engine_name(options.engine), device_name()
    dtype = dtype_name(options.dtype, config, device)
    plan = store.Plan([prompt.question for prompt in prompts], options.n, options.batch_size or BATCH[name])
    sampling = Sampling(options.temperature, options.top_p, options.top_k, asked.max_tokens)
    identity = {
        "model_fingerprint": store.model_fingerprint(path, getattr(config, "_commit_hash", None)),
        "data_fingerprint": source.fingerprint(plan.questions),
        "reward_name": asked.reward_name, "plain_prompts": options.plain_prompts,
        "prompting": asked.about.get("prompting"), "n": options.n,
        "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens, "seed": options.seed, "engine": name, "dtype": dtype,
        "device": device, "batch_size": plan.size,
    }  # fmt: skip
    about = {"model": asked.model, "data": asked.source, "skipped_rows": [one.to_dict() for one in bad],
             "rows": asked.about, "command": ["klamp", *sys.argv[1:]]}  # fmt: skip
    directory = Path(options.out) if options.out is not None else store.fresh_name(asked.model, options.seed)
    with store.opened(directory, plan, store.new_manifest(identity, about, plan)) as (held, manifest, notes):
        for note in notes:
            _say(f"warning: {note} since {directory} started: equal numbers are not certain")
        missing = held.missing()
        before = plan.samples - sum(len(plan.batch(batch)) for batch in missing)
        _say(
            f"{directory}: {asked.model} on {asked.source}, {len(prompts)} questions x {plan.n} samples"
            + (f", {before} of them drawn before ({name})" if before else f" ({name})")
        )
        interrupted = False
        try:
            if missing:
                engine = make_engine(name, path, tokenizer, sampling, dtype, device, options.trust_remote_code)
                _draw(held, engine, asked, prompts, options.seed, missing, Progress(plan.samples, before))
        except KeyboardInterrupt:
            if not any(held.part(batch).exists() for batch in range(plan.batches)):
                raise
            interrupted = True
        results = finish(held, manifest, options.ks, interrupted)
    if interrupted:
        _say(f"interrupted; to continue: {_again(directory, options.out)}")
    return results


def finish(held: store.Store, manifest: dict[str, Any], ks: Sequence[int], interrupted: bool) -> dict[str, Any]:
    """Score what is there, and write results, page and manifest."""
    from klamp.evaluate.page import write_page

    n = int(manifest["identity"]["n"])
    found = per_question(store.read_samples(held.directory, NEEDED), n, ks)
    results = {
        "directory": str(held.directory),
        "status": "interrupted" if interrupted else "complete",
        "model": manifest["model"],
        "data": manifest["data"],
        **{name: value for name, value in manifest["identity"].items() if not name.endswith("_fingerprint")},
        **totals(found, len(held.plan.questions), n, ks),
        "skipped_rows": manifest["skipped_rows"],
        "page": str(held.directory / store.PAGE),
    }
    store.write_json(held.directory / store.RESULTS, results | {"per_question": found})
    write_page(held.directory, manifest, results, found)
    if not interrupted and manifest["finished"] is None:
        store.write_json(held.directory / store.MANIFEST, manifest | {"finished": store.now()})
    return results


# --- prompts --------------------------------------------------------------------------------------------------


def _prompts(
    options: Options, asked: source.Asked, tokenizer: Any, positions: int | None
) -> tuple[list[Prompt], list[source.BadRow]]:
    """The first ``limit`` questions that fit the model, and the rows left out."""
    found: list[Prompt] = []
    bad = list(asked.bad)
    for question in asked.questions:
        if len(found) == options.limit:
            break
        given, text, tokens = encoded(tokenizer, question.fields["prompt"], options.plain_prompts)
        reason = ""
        if not tokens:
            reason = "the prompt has no token"
        elif positions is not None and len(tokens) + asked.max_tokens > positions:
            reason = (
                f"the prompt has {len(tokens)} tokens; with {asked.max_tokens} (--max-tokens) after it, it does not fit "
                f"into the model's {positions} positions"
            )
        if reason and not options.skip_bad_rows:
            raise UserError(f"{asked.source}, row {question.row}: {reason}; --skip-bad-rows leaves such rows out")
        if reason:
            bad.append(source.BadRow(question.row, reason))
        else:
            found.append(Prompt(question, given, text, tokens))
    if not found:
        first = min(bad, key=lambda one: one.row)
        raise UserError(f"{asked.source} has no row that can be used; the first, row {first.row}: {first.reason}")
    return found, sorted(bad, key=lambda one: one.row)


def encoded(tokenizer: Any, prompt: Any, plain: bool) -> tuple[Any, str, tuple[int, ...]]:
    """(prompt, text, tokens) as in training: a text becomes a user's message where there is a template, unless ``plain``."""
    if isinstance(prompt, str) and (plain or not tokenizer.chat_template):
        return prompt, prompt, tuple(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = templated(tokenizer, messages)
    return messages, text, tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


# --- drawing --------------------------------------------------------------------------------------------------


def _draw(
    held: store.Store,
    engine: Engine,
    asked: source.Asked,
    prompts: Sequence[Prompt],
    seed: int,
    missing: Sequence[int],
    progress: Progress,
) -> None:
    for batch in missing:
        places = held.plan.batch(batch)
        seeds = [sample_seed(seed, prompts[q].question.id, s) for q, s in places]
        requests = [Request(prompts[q].tokens, one) for (q, _), one in zip(places, seeds, strict=True)]
        drawn = engine.generate(requests)
        verdicts = _judged(asked, [prompts[q] for q, _ in places], drawn)
        rows = [
            {
                "question": prompts[q].question.id, "row": prompts[q].question.row, "sample": s,
                "prompt": prompts[q].text, "gold": prompts[q].question.fields["answer"], "completion": one.text,
                "answer": said.answer, "reward": said.reward, "correct": said.correct,
                "tokens": len(one.ids), "truncated": one.truncated, "seed": own,
            }
            for (q, s), own, one, said in zip(places, seeds, drawn, verdicts, strict=True)
        ]  # fmt: skip
        held.write(batch, rows)
        progress.add(len(rows), sum(len(one.ids) for one in drawn))
    progress.end()


def _judged(asked: source.Asked, prompts: Sequence[Prompt], drawn: Sequence[Completion]) -> list[Judged]:
    """The reward as in training: after messages a completion is a message, and every other column is passed."""
    texts = [one.text for one in drawn]
    completions: list[Any] = [
        text if isinstance(prompt.given, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    names = [name for name in prompts[0].question.fields if name != "prompt"]
    columns = {name: [prompt.question.fields[name] for prompt in prompts] for name in names}
    columns["completion_ids"] = [list(one.ids) for one in drawn]
    return judge(asked.reward, asked.reward_name, [prompt.given for prompt in prompts], completions, texts, columns)


class Progress:
    """One line on stderr: renewed in a terminal, else repeated every ``EVERY`` seconds."""

    def __init__(self, samples: int, done: int) -> None:
        self.samples, self.done, self.drawn, self.tokens = samples, done, 0, 0
        self.start = self.shown = time.monotonic()
        self.live = sys.stderr.isatty()

    def add(self, samples: int, tokens: int) -> None:
        self.done, self.drawn, self.tokens = self.done + samples, self.drawn + samples, self.tokens + tokens
        now = time.monotonic()
        if self.live or now - self.shown >= EVERY:
            self.shown = now
            left = (now - self.start) / self.drawn * (self.samples - self.done)
            rate = self.tokens / max(1e-9, now - self.start)
            line = f"{self.done}/{self.samples} samples, {rate:.0f} tokens/s, {left:.0f} s left"
            print(f"\r\x1b[K{line}" if self.live else line, end="" if self.live else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


# --- small things ---------------------------------------------------------------------------------------------


def _config(path: str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def _again(directory: Path, out: str | None) -> str:
    words = ["klamp", *sys.argv[1:]]
    return shlex.join(words if out is not None else [*words, "--out", str(directory)])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def load_results(directory: Path) -> dict[str, Any]:
    """``results.json`` of an evaluation, with its manifest under ``manifest``."""
    manifest = store.load_manifest(directory)
    path = directory / store.RESULTS
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        if not isinstance(found, dict) or not {"status", "metrics", "per_question"} <= found.keys():
            raise ValueError("it does not hold the results of an evaluation")
    except FileNotFoundError as error:
        raise UserError(f"{directory} has no {store.RESULTS}: it was stopped; run its command again") from error
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}; run the command again, which writes it") from error
    return found | {"manifest": manifest}
