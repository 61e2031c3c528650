"""A self-contained page to read samples: filters, search and keys around the text, which stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from klamp.errors import UserError
from klamp.evaluate import store
from klamp.report.page import text

SAMPLES = 4000  # on one page, and
CHARACTERS = 8_000_000  # of text; of longer results the first samples of each question
LONGEST = 20_000  # characters of one text


def write_page(
    directory: Path, manifest: Mapping[str, Any], results: Mapping[str, Any], questions: Sequence[Mapping[str, Any]]
) -> Path:
    """Write ``samples.html`` beside the samples; returns its path. Raises UserError if it cannot be written."""
    target = directory / store.PAGE
    temporary = directory / f".{store.PAGE}.tmp"
    columns = (
        "question",
        "sample",
        "prompt",
        "gold",
        "completion",
        "answer",
        "reward",
        "correct",
        "tokens",
        "truncated",
    )
    try:
        page = render(manifest, results, questions, store.read_samples(directory, columns))
        temporary.write_bytes(page.encode("utf-8", "backslashreplace"))
        os.replace(temporary, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from error
    return target


def render(
    manifest: Mapping[str, Any], results: Mapping[str, Any], questions: Sequence[Mapping[str, Any]],
    samples: Sequence[Mapping[str, Any]],
) -> str:  # fmt: skip
    """The page as text. Nothing can be loaded, and only this style and script may act."""
    style, script = _file("samples.css"), _file("samples.js")
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    shown = chosen(samples)
    known = json.dumps(_data(questions, shown), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    title = f"{manifest['model']} on {manifest['data']}"
    left = "" if len(shown) == len(samples) else (
        f"<p>This page holds {len(shown)} of {len(samples)} samples, the first of each question; all are in "
        f"<code>{store.SAMPLES}/</code>.</p>"
    )  # fmt: skip
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="referrer" content="no-referrer">\n<title>{text(title)} - Klamp samples</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n"
        f"<header><h1>{text(title)}</h1>{_summary(results)}{left}</header>\n{_BODY}"
        f'<script type="application/json" id="data">{_inert(known)}</script>\n<script>{script}</script>\n</body>\n</html>\n'
    )


def chosen(samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """As many samples of every question as the page can hold, the first ones; of too many questions the first."""
    if not samples:
        return []
    low, high = 1, 1 + max(sample["sample"] for sample in samples)
    while low < high:  # the most that fit
        middle = (low + high + 1) // 2
        fits = _fits([one for one in samples if one["sample"] < middle])
        low, high = (middle, high) if fits else (low, middle - 1)
    per_question = low
    kept = [one for one in samples if one["sample"] < per_question]
    while not _fits(kept):
        kept = kept[: len(kept) // 2]
    return kept


def _fits(samples: Sequence[Mapping[str, Any]]) -> bool:
    if len(samples) > SAMPLES:
        return False
    prompts = {one["question"]: len(one["prompt"]) for one in samples}
    return sum(min(LONGEST, len(one["completion"])) for one in samples) + sum(prompts.values()) <= CHARACTERS


def _data(questions: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Questions once, and samples that name them by their place."""
    numbers = {one["question"]: one for one in questions}
    places: dict[str, int] = {}
    asked: list[dict[str, Any]] = []
    rows = []
    for one in samples:
        name = one["question"]
        if name not in places:
            places[name] = len(asked)
            whole = numbers.get(name)
            right = None if whole is None else [whole["correct"], whole["scored"]]
            asked.append({"id": name, "prompt": _cut(one["prompt"]), "gold": _cut(one["gold"]), "right": right})
        state = "unscored" if one["correct"] is None else "correct" if one["correct"] else "wrong"
        rows.append(
            [places[name], one["sample"], state, one["truncated"], one["reward"], one["tokens"],
             None if one["answer"] is None else _cut(one["answer"]), _cut(one["completion"])]
        )  # fmt: skip
    return {"questions": asked, "samples": rows}


def _cut(value: str) -> str:
    rest = len(value) - LONGEST
    return value if rest <= 0 else f"{value[:LONGEST]}\n[{rest} more characters are not on this page]"


def _summary(results: Mapping[str, Any]) -> str:
    """The numbers as a table, and what was left out."""
    from klamp.evaluate.command import notes

    rows = []
    for name, one in results["metrics"].items():
        low, high = one["low"], one["high"]
        interval = "" if low is None else f"{100 * low:.1f} to {100 * high:.1f} %"
        rows.append(f'<tr><th scope="row">{text(name)}</th><td>{100 * one["mean"]:.1f} %</td><td>{interval}</td></tr>')
    head = '<tr><th scope="col">over questions</th><th scope="col">mean</th><th scope="col">95 % interval</th></tr>'
    table = f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>" if rows else ""
    said = "".join(f"<p>{text(note)}</p>" for note in notes(results))
    how = (
        f"{results['questions']['asked']} questions x {results['n']} samples, temperature {results['temperature']:g}, "
        f"seed {results['seed']}, reward {results['reward_name']}, at most {results['max_tokens']} tokens"
    )
    return f"<p>{text(how)}</p>{table}{said}"


def _inert(content: str) -> str:
    """JSON in which no markup can begin."""
    return content.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@cache
def _file(name: str) -> str:
    return files("klamp.evaluate").joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


_FILTERS = "".join(
    f'<button type="button" data-filter="{name}" aria-pressed="{str(name == "all").lower()}">{name} <b></b></button>'
    for name in ("all", "correct", "wrong", "truncated", "unscored")
)
_BODY = f"""\
<noscript><p class="none">The samples are shown by the script inside this file; the Parquet files hold them too.</p></noscript>
<nav aria-label="Samples to show"><div role="group" aria-label="Filter">{_FILTERS}</div>
<input type="search" id="search" placeholder="Search prompts and completions" aria-label="Search prompts and completions" autocomplete="off" spellcheck="false">
<span class="keys" aria-hidden="true"><kbd>j</kbd> <kbd>k</kbd> next, previous · <kbd>n</kbd> <kbd>p</kbd> question · <kbd>1</kbd>-<kbd>5</kbd> filter · <kbd>/</kbd> search</span></nav>
<main>
<div class="side"><p id="count" role="status"></p><div id="list" role="listbox" tabindex="0" aria-label="Samples"></div></div>
<article id="sample" aria-live="polite" hidden>
<div class="head"><h2 id="where"></h2><span id="state"></span><span class="step"><button type="button" id="previous">Previous</button><button type="button" id="next">Next</button></span></div>
<h3>Prompt</h3><pre id="prompt" dir="auto"></pre>
<h3>Completion</h3><pre id="completion" dir="auto"></pre>
<dl><div><dt>Answer read</dt><dd id="answer"></dd></div><div><dt>Gold</dt><dd id="gold"></dd></div><div><dt>Reward</dt><dd id="reward"></dd></div><div><dt>Tokens</dt><dd id="tokens"></dd></div></dl>
</article>
</main>
"""
