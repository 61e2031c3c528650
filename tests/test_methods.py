"""A method is a value: nothing outside ``presets/`` knows a method by its name."""

from __future__ import annotations

import ast
from pathlib import Path

import klamp
from klamp.guards import ACTIONS, SCOPES

SRC = Path(__file__).parents[1] / "src" / "klamp"
NAMES = set(klamp.list_presets()) - {*ACTIONS, *SCOPES}  # two methods are named after their part: segment, rollback


def branches(tree: ast.AST) -> list[str]:
    """Names of methods that code decides by: compared, matched, or asked for a prefix."""
    found: list[str] = []
    for node in ast.walk(tree):
        tested: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            tested = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            tested = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            tested = list(node.args) if node.func.attr in ("startswith", "endswith", "fullmatch") else []
        for one in tested:
            constants = [part.value for part in ast.walk(one) if isinstance(part, ast.Constant)]
            found += [str(value) for value in constants if value in NAMES]
    return found


def test_no_branch_on_a_methods_name() -> None:
    for path in SRC.rglob("*.py"):
        if "presets" not in path.relative_to(SRC).parts:
            assert not branches(ast.parse(path.read_text())), path.relative_to(SRC)


def test_the_checker_sees_a_branch() -> None:
    for text in ("if name == 'grpo': pass", "x = kind in ('sapo', 'x')", "match n:\n  case 'gspo': pass",
                 "if n.startswith('dapo'): pass"):  # fmt: skip
        assert branches(ast.parse(text)), text
    assert not branches(ast.parse("table = {'grpo': 1}; f('dapo')"))
