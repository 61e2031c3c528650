"""``klamp lab``: verify the statements, explore specs. Options only; torch is loaded when a verb runs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from klamp.errors import UserError

_EXPLORE = """\
The first spec is the baseline: differences of the others to it are paired by seed, with 95 % intervals.

  klamp lab explore grpo 'atr_grpo(delta=0.02314355)'                the four scenarios, 16 samples a rollout
  klamp lab explore grpo dapo cispo --scenario dominant --rollouts 20
  klamp lab explore grpo atr_grpo --world tree --vocabulary 4 --horizon 4 --group 0     in expectation
"""


def add_parser(verbs: Any) -> None:
    """The verb ``lab`` with its two verbs."""
    lab = verbs.add_parser("lab", help="the theory as statements that run, and small worlds to explore specs in")
    inner = lab.add_subparsers(dest="lab_verb", metavar="VERB", required=True)
    check = inner.add_parser("verify", help="every statement of docs/theory.md on random instances")
    check.add_argument("--seeds", type=int, default=200, metavar="N", help="random instances each (default: 200)")
    check.add_argument("--seed", type=int, default=0, help="which instances (default: 0)")
    check.add_argument("--json", action="store_true", help="as JSON")
    walk = inner.add_parser(
        "explore", help="train small policies under specs: entropy, mass on correct answers, pass@k", epilog=_EXPLORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = walk.add_argument
    add("specs", nargs="+", metavar="SPEC", help="specs; the first is the baseline")
    add(
        "--scenario",
        action="append",
        metavar="NAME",
        help="rare, dominant, noise, several, needle (default: the first four)",
    )
    add("--world", help="bandit (default), tree or chain")
    add("--vocabulary", type=int, metavar="V", help="tokens (default: 32; tree and chain: 4)")
    add("--horizon", type=int, metavar="T", help="tokens of a response in a tree or chain (default: 3)")
    add("--seeds", type=int, metavar="N", help="policies, each with its own logits and samples (default: 1500)")
    add("--rollouts", type=int, metavar="R", help="rollouts (default: 1)")
    add("--inner", type=int, metavar="K", help="steps on each rollout (default: 24)")
    add("--group", type=int, metavar="G", help="responses of a rollout; 0 takes the expectation (default: 16)")
    add("--rate", type=float, help="size of a step (default: 0.2)")
    add("--peak", type=float, help="standard deviation of the logits at the start (default: 3)")
    add("--natural", action="store_true", default=None, help="the natural gradient")
    add("--seed", type=int, help="seed of all of it (default: 0)")
    add("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the verb; 0, or 1 where a statement is violated."""
    return _verify(arguments) if arguments.lab_verb == "verify" else _explore(arguments)


def _verify(arguments: argparse.Namespace) -> int:
    from klamp.lab.verify import TOLERANCE, text, verify

    found = verify(arguments.seeds, arguments.seed)
    print(json.dumps(found, indent=2) if arguments.json else text(found))
    return 0 if found["largest_violation"] <= TOLERANCE else 1


def _explore(arguments: argparse.Namespace) -> int:
    from klamp.presets import parse

    specs = [parse(text) for text in arguments.specs]
    from klamp.lab.explore import SCENARIOS, Setting, explore, text

    given = {name: getattr(arguments, name) for name in Setting.__dataclass_fields__}
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("world", "bandit") != "bandit":
        given.setdefault("vocabulary", 4)
    elif "horizon" in given:
        raise UserError("--horizon belongs to --world tree or chain; a bandit's response is one token")
    setting = Setting(**given)
    names = arguments.scenario or [name for name in SCENARIOS if name != "needle"]
    found = [explore(specs, name, setting) for name in names]
    print(json.dumps(found, indent=2) if arguments.json else "\n\n".join(map(text, found)))
    return 0
