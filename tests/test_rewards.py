"""Rewards: numbers for every verdict, hostile answers, threads, a killed worker, users' functions."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from klamp import rewards
from klamp.answers import extract, plain_number
from klamp.errors import UserError
from klamp.rewards import completion_text, guarded, gym, reward


def score(function: Any, gold: Any, text: str) -> float | None:
    return function(prompts=["p"], completions=[text], answer=[gold])[0]


def test_import_is_cheap() -> None:
    heavy = "torch", "math_verify", "sympy", "reasoning_gym", "datasets"
    code = f"import sys, klamp.rewards, klamp.data; print([m for m in {heavy} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"


# --- exact --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("gold", "text", "expected"),
    [
        ("0112345679", " 0112345679\n", 1.0),
        ("0112345679", "112345679", 0.0),  # a sorted string of digits is not a number
        ("43.0", "43", 1.0),
        (43.0, "43", 1.0),
        ("43", "43.000", 1.0),
        ("007", "7", 0.0),
        ("0.1", "0.10000000000000001", 0.0),
        ("-2", "-2.0", 1.0),
        ("cat", "Cat", 0.0),
        ("", "", None),
        (None, "7", None),
        ("9" * 5000, "9" * 5000 + ".0", 0.0),  # too long to be compared as a number
    ],
)
def test_exact(gold: Any, text: str, expected: float | None) -> None:
    assert score(reward("exact"), gold, text) == expected


def test_chat_completions_count_by_the_last_assistant_message() -> None:
    chat = [{"role": "assistant", "content": "41"}, {"role": "tool", "content": "x"}]
    assert completion_text(chat) == "41"
    assert completion_text([*chat, {"role": "assistant", "content": [{"type": "text", "text": "43"}]}]) == "43"
    assert completion_text([{"role": "assistant", "content": None}]) == completion_text([]) == ""
    assert reward("exact")(["p"], [chat], answer=["41"]) == [1.0]


def test_a_missing_answer_column_is_named() -> None:
    with pytest.raises(UserError, match="needs a column 'answer'"):
        reward("exact")(["p"], ["43"], target=["43"])


# --- math ---------------------------------------------------------------------------------------------------
EXACT = [  # decided without math-verify
    ("1/2", "0.5", 1.0),
    ("70", "070", 1.0),
    ("", r"\boxed{7}", None),
    ("Evelyn", "Evelyn", 1.0),
    ("1e-7", "2e-7", 0.0),
    ("1e-7", r"$1 \cdot 2e-7$", 0.0),
    ("43.0", "43", 1.0),
    ("43.0", "the answer is 43", 1.0),
    ("43.0", r"so we get \boxed{43}", 1.0),
    ("43.0", "Sam now has 43 seashells.", 1.0),
    ("43", "The final answer is: **43**.", 1.0),
    ("43", "<think>44</think> 43", 1.0),
    ("43", "<think>so 43", 0.0),
    ("43", "<answer>43</answer> or 44", 1.0),
    ("43", r"\boxed{4", 0.0),
    ("43", "", 0.0),
    ("43", "no idea", 0.0),
    ("43", "The answer is 43 because 40 + 3 = 43.", 1.0),
    ("7", "7.0", 1.0),
    ("7", "$7$", 1.0),
    ("7", r"\text{7}", 1.0),
    ("7", r"\boxed{5} so no, \boxed{7}", 1.0),
    ("7", "it costs $5 and $7", 0.0),
    ("1", "1 1/2", 0.0),
    ("3/2", "1 1/2", 1.0),
    ("-43", "\N{MINUS SIGN}43", 1.0),
    ("70000", "so\n#### 70,000", 1.0),
    (r"\frac{1}{3}", "0.333333", 0.0),
    ("100/3", "33.3", 0.0),
    ("5", "5 7", 0.0),
]
SYMBOLIC = [
    ("1", "1" + "0" * 5000, 0.0),
    ("2", "2024-05-07", 0.0),
    ("5", "5 or 7", 0.0),
    ("7", "5 or 7", 0.0),
    ("5", r"\boxed{5\text{ or }7}", 0.0),
    ("7", r"\boxed{5\text{ or }7}", 0.0),
    ("7", "x = 5, x = 7", 0.0),
    ("7", r"$5$ or $7$", 0.0),
    ("5", r"the answer is $5$ or $7$", 0.0),
    ("7", r"\boxed{5}, \boxed{7}", 0.0),
    ("{1331,1728}", "1728", 0.0),
    ("1728", "{1331,1728}", 0.0),
    ("{1331,1728}", r"\boxed{1728, 1331}", 1.0),
    ("7", r"\boxed{5} or \boxed{7}", 0.0),
    ("1/2^99", "1/2^98", 0.0),
    ("1/2^99", r"\frac{1}{2^{99}}", 1.0),
    ("1/2004!", "1/2006!", 0.0),
    ("(0.0000001,1)", "(0.0000002,1)", 0.0),
    (r"\{1e-7\}", r"\{2e-7\}", 0.0),
    ("(0,12.5)", "0<x<12.5", 0.0),
    ("2", "y = 2x+4", 0.0),
    ("-2", "-2*pi", 0.0),
    (r"-2\pi", "-2*pi", 1.0),
    (r"\frac{\pi}{2}", "pi/2", 1.0),
    ("(1,9/2)", "(1,4.5)", 1.0),
    ("y=2x+3", "$y=2x+4$", 0.0),
    (r"\sqrt{2}", "1.414214", 1.0),
    (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", 1.0),
    ("43", r"\boxed{43\text{ cm}}", 1.0),
    ("43", "$x = 43$", 1.0),
    ("x^2-1", "(x-1)(x+1)", 1.0),
    ("x^2-1", "(x-1)(x+2)", 0.0),
    (r"\frac{1}{2", "0.5", None),  # not parsable
]


@pytest.fixture(scope="module")
def math_reward() -> Any:
    return reward("math", time_limit=20.0)  # a busy machine must not turn a slow answer into a wrong one


@pytest.mark.parametrize(("gold", "text", "expected"), EXACT)
def test_math_decides_plain_numbers_itself(gold: str, text: str, expected: Any, monkeypatch: Any) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the worker was asked")

    if "cdot" not in text:
        monkeypatch.setattr(rewards.WORKER, "map", lambda function, rows, **_: refuse() if rows else [])
    assert score(reward("math"), gold, text) == expected


@pytest.mark.parametrize(("gold", "text", "expected"), SYMBOLIC)
def test_math_by_math_verify(math_reward: Any, gold: str, text: str, expected: float | None) -> None:
    assert score(math_reward, gold, text) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.5", Fraction(2469, 2)),
        ("12,34", None),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"\dfrac34", Fraction(3, 4)),
        (r"2\frac{1}{2}", Fraction(5, 2)),
        ("1/0", None),
        ("1e999999999", None),  # must not be expanded
        (r"\$5", Fraction(5)),
        ("\N{ARABIC-INDIC DIGIT SEVEN}", None),
        ("5.", Fraction(5)),
        (".5", Fraction(1, 2)),
        ("1e3", Fraction(1000)),
    ],
)
def test_plain_numbers(text: str, value: Fraction | None) -> None:
    assert plain_number(text) == value


def test_extraction_is_linear_in_hostile_text() -> None:
    start = time.monotonic()
    for text in (
        "1," * 50_000,
        "$" * 50_000,
        r"\boxed{" * 20_000,
        "answer " * 20_000,
        "9" * 100_000,
        " " * 100_000 + "x",
    ):
        extract(text)
    assert time.monotonic() - start < 5.0


# --- reasoning-gym ------------------------------------------------------------------------------------------
def test_reasoning_gym_task() -> None:
    pytest.importorskip("reasoning_gym")
    task = rewards.reasoning_gym_task("reasoning_gym:chain_sum(min_terms=2, max_terms=2, max_digits=2)", size=40)
    rows = task.train(0)
    assert len(rows) == 40
    assert rows == task.train(0)
    assert rows != task.train(1)
    assert len(task.heldout()) == rewards.GYM_HELDOUT_SIZE
    assert not {r["prompt"] for r in rows} & {r["prompt"] for r in task.heldout()}
    texts = [rows[0]["answer"], f"<answer> {rows[1]['answer']} </answer>", "none of it"]
    columns = {name: [r[name] for r in rows[:3]] for name in ("answer", "entry")}
    assert task.reward([r["prompt"] for r in rows[:3]], texts, **columns, trainer_state=None) == [
        1.0,
        1.0,
        0.0,
    ]


def test_a_task_with_few_problems_still_holds_different_ones_out() -> None:
    pytest.importorskip("reasoning_gym")
    task = rewards.reasoning_gym_task("reasoning_gym:products(min_digits=1, max_digits=1, size=300)")
    train, heldout = ([row["prompt"] for row in rows] for rows in (task.train(3), task.heldout()))
    assert len(train) == 300
    assert 10 <= len(heldout) == len(set(heldout)) <= 25  # of 100 products of digits
    assert not set(train) & set(heldout)


@pytest.mark.parametrize(
    "options", ["(", "(3)", "(max_digits=len('x'))", "(seed=3)", "(**{})", "(max_digits=0)", "(nope=1)"]
)
def test_options_of_a_task_that_are_none(options: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(UserError, match="products"):
        rewards.reasoning_gym_task(f"reasoning_gym:products{options}")


def test_reasoning_gym_entries_keep_tuples_and_keys() -> None:
    entry = {"answer": "a", "metadata": {"grid": ((1, 2), [3, (4,)]), 5: {"x": None}}}
    assert gym._decode(json.loads(json.dumps(gym._encode(entry)))) == entry


def test_reasoning_gym_with_options() -> None:
    pytest.importorskip("reasoning_gym")
    function = reward("reasoning_gym('chain_sum', min_terms=2, max_terms=2)")
    row = rewards.reasoning_gym_task("reasoning_gym:chain_sum", size=1).train(0)[0]
    assert function(["p"], [row["answer"]], answer=[row["answer"]], entry=[row["entry"]]) == [1.0]
    assert function.counts == {"correct": 1}
    with pytest.raises(UserError, match="refuses the options"):
        reward("reasoning_gym('chain_sum', nope=3)")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("reasoning_gym:chainsum", "did you mean 'chain_sum'"),
        ("maths", "did you mean 'math'"),
        ("", "no reward ''"),
        ("nosuchmodule:f", "no reward module 'nosuchmodule'"),
        (":f", "no reward module ''"),
        ("json:dunps", "did you mean 'dumps'"),
        ("json:decoder", "of type module"),
        ("nosuch.py:f", "no file 'nosuch.py'"),
    ],
)
def test_unknown_rewards_name_the_nearest(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        reward(spec)


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match="pip install reasoning-gym"):
        reward("reasoning_gym:chain_sum")


# --- numbers, choices, shape, sums --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "gold", "answer", "expected"),
    [
        ("numeric", "100/3", r"\boxed{33.33}", 1.0),
        ("numeric", "100/3", r"\boxed{33.2}", 0.0),
        ("numeric(tolerance=0.01)", "100/3", "so about 33.1", 1.0),
        ("numeric", "1.2e5", r"\boxed{1.2 \times 10^{5}}", 1.0),
        ("numeric", "0.25", "the answer is 25%", 1.0),
        ("numeric", "0", "0.0001", 0.0),  # relative to 0 nothing is near
        ("numeric(absolute=0.001)", "0", "0.0001", 1.0),
        ("numeric", "x", "3", None),
        ("numeric", "3", "none", 0.0),
        ("numeric", "1000", "999.0", 1.0),  # the bound itself belongs to it, exactly
        ("multiple_choice", "C", r"\boxed{C}", 1.0),
        ("multiple_choice", r"\text{(C)}", "The answer is (C).", 1.0),
        ("multiple_choice", "C", "The answer is C: the third one.", 1.0),
        ("multiple_choice", "C", "The answer is B or C.", 0.0),
        ("multiple_choice", "A", "A good question.\nC", 0.0),
        ("multiple_choice", "C", "A good question.\n**C**", 1.0),
        ("multiple_choice", "C", "<answer>c</answer>", 1.0),
        ("multiple_choice", "C", "I do not know", 0.0),
        ("multiple_choice(choices='ABC')", "D", "D", None),
        ("multiple_choice", "C", "A. is wrong, so is B", 0.0),
        ("exact(extract='answer')", "cat", "I think <answer> cat </answer>", 1.0),
        ("exact(extract='answer')", "cat", "cat", 0.0),
        ("format('^<think>.*</think>')", "", "<think>a\nb</think> c", 1.0),
        ("format('^<think>.*</think>')", "", "<think>a", 0.0),
        (r"format('\d{3}')", "", "a 123", 1.0),  # no escapes in quotes
        ("format('(a+)+$')", "", "a" * 40 + "b", 0.0),  # would take years
    ],
)
def test_small_rewards(text: str, gold: str, answer: str, expected: float | None) -> None:
    assert score(reward(text, time_limit=1.0), gold, answer) == expected


def test_overlong_is_the_equation_of_dapo() -> None:
    lengths = [0, 3584, 3585, 3840, 4096, 4097, 9000]
    function = reward("overlong(limit=4096, cache=512)")
    found = function([""] * 7, [""] * 7, completion_ids=[[0] * n for n in lengths])
    assert found == [0.0, 0.0, -1 / 512, -0.5, -1.0, -1.0, -1.0]
    with pytest.raises(UserError, match="needs a column 'completion_ids'"):
        function([""], [""])


def test_a_sum_weighs_its_terms_and_is_correct_by_the_first() -> None:
    function = reward("exact + 0.5*format('^a') - 2*(overlong(limit=4, cache=2))")
    assert [(w, f.__name__) for w, f in function.terms] == [
        (1.0, "exact"), (0.5, "format('^a')"), (-2.0, "overlong(limit=4, cache=2)")
    ]  # fmt: skip
    columns = {"answer": ["a", "a", ""], "completion_ids": [[0] * 3, [0], [0]]}
    verdicts = function.verdicts([""] * 3, ["a", "b", "a"], **columns)
    assert [v.value for v in verdicts] == [1.0 + 0.5 + 1.0, 0.0, None]
    assert [v.result for v in verdicts] == ["correct", "wrong", "unscored"]
    assert function.counts == {"correct": 1, "wrong": 1, "unscored": 1}
    assert function.solved_by.__name__ == "exact"
    assert function.terms[1][1].counts == {"correct": 2, "wrong": 1}
    shaped = reward("exact + 0.5*format('^b')")
    assert shaped.verdicts([""], ["b"], answer=["a"])[0].result == "wrong"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("math(extrct='boxed')", "did you mean 'extract'"),
        ("math*math", "a weight is a finite number"),
        ("math(limit=0)", "number of seconds larger than 0"),
        ("math(extract='foo')", "neither a rule nor a pattern with exactly one"),
        ("math(extract=3)", "extract is a text in quotes"),
        ("format", "missing a required argument: 'pattern'"),
        ("format('(')", "not a regular expression"),
        ("format(open('x'))", "is no plain value"),
        ("math + os.system('x')", r"os.system\('x'\) is no reward"),
        ("__import__('os')", "there is no reward '__import__'"),
        ("numeric(tolerance=-1)", "0 or larger"),
        ("multiple_choice(choices='AA')", "different letters"),
        ("overlong(limit=1, cache=2)", "0 < cache <= limit"),
        ("math +", "invalid syntax"),
        ("math(*x)", "is no plain value|options are written out"),
        ("math + exakt", "did you mean 'exact'"),
        ("(" * 5000 + "math", "is not a reward"),
    ],
)
def test_what_is_no_reward_is_named(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        reward(text)


# --- users' functions ---------------------------------------------------------------------------------------
SOURCE = """
def length(prompts, completions, **columns):
    return [len(c) / 10 for c in completions]
def fails(prompts, completions, answer, **columns):
    return [1.0 / (float(a) - 7) for a in answer]
def closed(prompts, completions, answer):
    return [0.0] * len(prompts)
async def later(prompts, completions, **columns):
    return []
"""


def test_a_function_from_a_file_and_from_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards_a.py").write_text(SOURCE)
    by_file = reward(f"{tmp_path}/own_rewards_a.py:length")
    assert by_file(["p", "q"], ["abc", ""], answer=["1", "2"]) == [0.3, 0.0]
    assert by_file.__name__ == f"{tmp_path}/own_rewards_a.py:length"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_rewards_b.py").write_text(SOURCE)
    assert reward("own_rewards_b:length")(["p"], ["abcd"], answer=["1"]) == [0.4]
    with pytest.raises(UserError, match="did you mean 'length'"):
        reward("own_rewards_b:lenght")
    with pytest.raises(UserError, match=r"must take \*\*columns"):
        reward("own_rewards_b:closed")
    with pytest.raises(UserError, match="is a coroutine"):
        reward("own_rewards_b:later")
    (tmp_path / "own_rewards_c.py").write_text("import nosuchpackage\n")
    with pytest.raises(UserError, match="raised ModuleNotFoundError: No module named 'nosuchpackage'"):
        reward("own_rewards_c:f")


def test_a_reward_that_raises_names_the_row(tmp_path: Path) -> None:
    (tmp_path / "own_rewards_d.py").write_text(SOURCE)
    function = reward(f"{tmp_path}/own_rewards_d.py:fails")
    with pytest.raises(UserError, match=r"raised ZeroDivisionError: .* on row 3 \(prompt: 'c'\)") as info:
        function(["a", "b", "c", "d"], ["", "", "", ""], answer=["1", "2", "7", "7"], trainer_state=object())
    assert isinstance(info.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], "returned 1 values"),
        (1.0, "returned float"),
        (None, "returned NoneType"),
        ([0.0, math.nan], r"returned nan for row 2 \(prompt: 'q'\)"),
        ([math.inf, 0.0], "returned inf for row 1"),
        (["1", 0.0], "returned '1' for row 1"),
    ],
)
def test_a_wrong_result_is_refused(result: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        guarded(lambda **_: result, name="mine")(["p", "q"], ["", ""])


def test_a_right_result_is_passed_on() -> None:
    function = guarded(lambda **_: (True, 2, None, 0.5))
    assert function(["p"] * 4, [""] * 4) == [1.0, 2.0, None, 0.5]
    assert function.counts == {"correct": 2, "wrong": 1, "unscored": 1}
    assert guarded(function) is function
    exact = reward("exact")
    assert guarded(exact) is exact


def test_a_failure_of_the_batch_alone_says_so() -> None:
    def only_together(prompts: list[Any], **_: Any) -> list[float]:
        if len(prompts) > 1:
            raise RuntimeError("too many")
        return [0.0]

    with pytest.raises(UserError, match="raised RuntimeError: too many on the whole batch, though on no row alone"):
        guarded(only_together)(["p", "q"], ["", ""])
