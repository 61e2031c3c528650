"""``klamp eval``: options and tables only; torch is loaded when it runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klamp.data import options as data_options
from klamp.errors import UserError

_EPILOG = """\
  klamp eval                                                      the embedded model on its task, in seconds
  klamp eval --model M --data test.jsonl --reward math --n 32 --k 1,4,16,32 --out runs/m
  klamp eval --model M --data D --reward math --limit 50 --n 1 --temperature 0
  klamp eval --model M --data aime24 --n 32 --max-tokens 8192     a benchmark by its name
  klamp eval --compare runs/a runs/b                              b minus a, paired by question

The same command with the same --out continues an evaluation that was stopped, and gives the same samples.
"""


def add_parser(verbs: Any) -> None:
    """The verb ``eval``."""
    parser = verbs.add_parser(
        "eval", help="sample answers of a model: pass@k, avg@k, majority@k with errors; compare two", epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--compare", nargs=2, metavar=("A", "B"), help="compare two evaluations, paired by question")
    add(
        "--model",
        metavar="M",
        help="path, Hugging Face id, or smollm2-135m (default: the task's; of data the embedded model)",
    )
    add("--data", "--dataset", dest="data", metavar="D", help=data_options.SOURCES)
    add("--task", help="data and reward under one name: sort (default) or reasoning_gym:NAME")
    add(
        "--reward",
        metavar="R",
        help="math, numeric, exact, multiple_choice, reasoning_gym:NAME, module:function, file.py:function, or a weighted sum (of a benchmark: math)",
    )
    data_options.add_arguments(add, "test")
    add("--limit", type=int, metavar="N", help="the first N questions only")
    add("--n", type=int, metavar="N", help="samples per question (default: 8; at --temperature 0: 1)")
    add("--k", type=_ks, metavar="K,K", help="the k of pass@k and majority@k (default: 1,4,16,... and n)")
    add("--temperature", type=float, help="of sampling; 0 is greedy (default: 1)")
    add("--top-p", type=float, metavar="P", help="keep the likeliest tokens up to this probability (default: 1, all)")
    add("--top-k", type=int, metavar="K", help="keep this many of the likeliest tokens (default: 0, all)")
    add("--max-tokens", type=int, metavar="N", help="tokens of a completion (default: the task's; of data 512)")
    add("--seed", type=int, help="of all samples (default: 0)")
    add("--engine", help="transformers or vllm (default: vllm where it is installed and there is a CUDA device)")
    add("--dtype", help="float32, bfloat16 or float16 (default: float32 on the CPU, else the model's)")
    add("--batch-size", type=int, metavar="N", help="samples drawn together (default: 64; vllm: 1024)")
    add("--trust-remote-code", action="store_true", default=None, help="run model code from the hub")
    add("--out", metavar="DIR", help="new, or an evaluation to continue (default: a fresh one under runs/)")
    add("--json", action="store_true", help="the results as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the verb; 0 done, 130 interrupted."""
    given = {
        name: value
        for name, value in vars(arguments).items()
        if value is not None and name not in ("verb", "json", "compare")
    }
    if arguments.compare is not None:
        if given:
            others = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
            raise UserError(f"--compare reads two evaluations that exist; leave out {others}")
        from klamp.evaluate.compare import compare

        found = compare(*map(Path, arguments.compare))
        print(json.dumps(found, indent=2, allow_nan=False) if arguments.json else comparison_text(found))
        return 0
    from klamp.evaluate.options import Options

    if given.get("temperature") == 0.0:
        given.setdefault("n", 1)
    options = Options(**given)
    from klamp.evaluate.run import evaluate

    results = evaluate(options)
    print(json.dumps(results, indent=2, allow_nan=False) if arguments.json else results_text(results))
    return 0 if results["status"] == "complete" else 130


def _ks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, as in 1,4,16") from error


# --- tables ---------------------------------------------------------------------------------------------------


def results_text(results: Mapping[str, Any]) -> str:
    """The table of an evaluation, and a line for everything that is not in it."""
    questions, samples = results["questions"], results["samples"]
    lines = [
        f"{results['model']} on {results['data']}: {questions['asked']} questions x {results['n']} samples, "
        f"temperature {results['temperature']:g}, seed {results['seed']}, at most {results['max_tokens']} tokens",
        "",
        f"{'':14}{'mean':>9}{'s.e.':>9}   {'95 % interval':<20}questions",
    ]
    lines += [_row(name, one) for name, one in results["metrics"].items()]
    if results["reward"] is not None and results["reward"] != results["metrics"].get(f"avg@{results['n']}"):
        lines.append(_row("reward", results["reward"], digits=3))
    if results["truncated"] is not None:
        lines += [_row("truncated", results["truncated"]), _row("tokens", results["tokens"], digits=1)]
    if not results["metrics"]:
        lines.append("no question has all its samples and a score")
    lines += ["", *notes(results)]
    lines += [f"samples       {samples['drawn']} in {results['directory']}", f"to read       {results['page']}"]
    return "\n".join(lines)


def notes(results: Mapping[str, Any]) -> list[str]:
    """What was left out, and how much of it."""
    questions, samples = results["questions"], results["samples"]
    found = [f"k = {one['k']} is left out: {one['reason']}" for one in results["k_excluded"]]
    found += [
        f"k = {k}: {count} questions are left out, which have fewer scored samples"
        for k, count in questions["fewer_scored_than_k"].items()
    ]
    if samples["unscored"]:
        found.append(
            f"{samples['unscored']} samples are unscored (the reward gave None) and left out, and so are "
            f"{questions['unscored']} questions without a scored one"
        )
    cut = results["truncated"]
    if cut is not None and cut["mean"] > 0.05:
        found.append(
            f"{100 * cut['mean']:.0f} % of the samples ran into the limit of {results['max_tokens']} tokens (--max-tokens)"
        )
    if results["skipped_rows"]:
        first = results["skipped_rows"][0]
        found.append(
            f"{len(results['skipped_rows'])} rows were skipped; the first, row {first['row']}: {first['reason']}"
        )
    if results["status"] != "complete":
        found.append(
            f"interrupted: only {questions['complete']} of {questions['asked']} questions have all their samples"
        )
    return found


def comparison_text(found: Mapping[str, Any]) -> str:
    """The table of a comparison."""
    lines = [f"A {found['a']}", f"B {found['b']}", f"{found['questions']} questions, B minus A"]
    lines += [f"{name}: A {a!r}, B {b!r}" for name, (a, b) in found["differ_in"].items()]
    lines += [
        "",
        f"{'':14}{'A':>9}{'B':>9}{'B - A':>9}   {'95 % interval':<20}{'p':>8}{'McNemar':>9}   better A / B / same",
    ]
    for name, one in found["metrics"].items():
        difference = one["difference"]
        exact = f"{one['mcnemar']:.4f}" if one["mcnemar"] is not None else "-"
        lines.append(
            f"{name:14}{_share(one['a']):>9}{_share(one['b']):>9}{100 * difference['mean']:>+9.1f}   "
            f"{_interval(difference, '{:+.1f}', 100):<20}{one['p']:>8.4f}{exact:>9}   "
            f"{one['only_a']} / {one['only_b']} / {one['same']}"
            + (f"   ({one['questions_left_out']} questions left out)" if one["questions_left_out"] else "")
        )
    return "\n".join(lines)


def _row(name: str, one: Mapping[str, Any], digits: int | None = None) -> str:
    """A line of the table: a share in percent, or a number with so many digits."""
    scale, form = (100.0, "{:.1f}") if digits is None else (1.0, f"{{:.{digits}f}}")
    mean = form.format(scale * one["mean"]) + (" %" if digits is None else "")
    error = "-" if one["error"] is None else form.format(scale * one["error"])
    return f"{name:14}{mean:>9}{error:>9}   {_interval(one, form, scale):<20}{one['questions']}"


def _interval(one: Mapping[str, Any], form: str, scale: float) -> str:
    if one["low"] is None:
        return "-"
    return f"[{form.format(scale * one['low'])}, {form.format(scale * one['high'])}]"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"
