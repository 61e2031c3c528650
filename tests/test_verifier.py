"""The verifier: gold answers of benchmarks, extraction rules, hostile answers, limits, threads, processes, the cache."""

from __future__ import annotations

import json
import operator
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from klamp.answers import extract
from klamp.errors import UserError
from klamp.rewards import REWARDS, reward, verify
from klamp.rewards.math import CACHE
from klamp.worker import Pool, WorkerFailed, _Worker

pytest.importorskip("math_verify")

GOLDS = [
    gold for some in json.loads((Path(__file__).parent / "data" / "golds.json").read_text())["golds"].values() for gold in some
]  # fmt: skip
TOWER = "10^{5^{5^{5^{5^5}}}}"
PATIENT = {"limit": 20.0}  # a busy machine must not turn a slow answer into a wrong one


def judged(pairs: list[tuple[str, str]], **options: Any) -> list[Any]:
    function = reward("math(budget=120)", time_limit=20.0)
    return function.verdicts([""] * len(pairs), [answer for _, answer in pairs], answer=[gold for gold, _ in pairs])


# --- gold answers ---------------------------------------------------------------------------------------------
def test_every_gold_answer_equals_itself() -> None:
    pairs = [(gold, rf"So the answer is $\boxed{{{gold}}}$.") for gold in GOLDS]
    wrong = [(pair, verdict) for pair, verdict in zip(pairs, judged(pairs), strict=True) if verdict.result != "correct"]
    assert wrong == []


def test_no_gold_answer_equals_another() -> None:
    rng, value = random.Random(0), {gold: gold.removesuffix(".0") for gold in GOLDS}
    pairs = [(rng.choice(GOLDS), rng.choice(GOLDS)) for _ in range(400)]
    pairs = [(gold, rf"\boxed{{{answer}}}") for gold, answer in pairs if value[gold] != value[answer]]
    found = [pair for pair, verdict in zip(pairs, judged(pairs), strict=True) if verdict.result == "correct"]
    assert found == []


def test_no_gold_answer_equals_itself_with_another_digit() -> None:
    rng, pairs = random.Random(1), []
    for gold in GOLDS:
        places = [i for i, letter in enumerate(gold) if letter.isdigit()]
        if places:
            at = rng.choice(places)
            pairs.append((gold, rf"\boxed{{{gold[:at]}{(int(gold[at]) + rng.randint(1, 9)) % 10}{gold[at + 1 :]}}}"))
    found = [pair for pair, verdict in zip(pairs, judged(pairs), strict=True) if verdict.result == "correct"]
    assert found == []


RIGHT = [
    (r"\frac{1}{m}t", r"\frac{t}{m}"),
    (r"\frac{1}{\sqrt{2}}c", r"\frac{c}{\sqrt{2}}"),
    ("-6,-8,-10", r"-10, -8 \text{ and } -6"),
    ("1,-1,7,-7", r"\pm 1, \pm 7"),
    ("90^\\circ", "90"),
    ("43", r"43\text{ cm}"),
    ("43%", "43"),
    ("43%", "0.43"),
    (r"43\%", "43%"),
    ("0.43", r"43\%"),
    ("Evelyn", r"\text{evelyn}"),
    (r"\text{(C)}", "C"),
    ("1.07e16", r"1.07 \times 10^{16}"),
    ("4130_5", "4130_{5}"),
    ("4130_5", "4130"),
    ("1010_2", "10"),
    (r"\frac{v_{0}}{r_{0}}", "v_0/r_0"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}"),
    ("10,000", r"10\,000"),
    (r"\log_2 3", r"\log_2 3"),
    ("3", r"\log_2 8"),
    (r"\frac{1\pm\sqrt{5}}{2}", r"\frac{1+\sqrt5}{2},\frac{1-\sqrt5}{2}"),
    (r"x\in [1,2]", "[1,2]"),
    (r"x=\pm2", r"\pm 2"),
    ("90", "90°"),
    ("5", r"5~\text{cm}"),
    (r"5\text{ cm}", r"5\text{ centimeters}"),
    (r"5\text{ cm}", "5"),
    (r"2\text{ hours } 30\text{ minutes}", r"2\text{ hours and }30\text{ minutes}"),
    ("12", r"\text{Area}=12"),
    ("12", "Area = 12"),
    (r"\frac{24}{2}", r"\text{Area}=12"),
    (r"2\sqrt{3}", "2√3"),
    ("204", r"\boldsymbol{204}"),
    ("-5", "–5"),
]
WRONG = [
    ("2t", "2"),  # t is no ton
    ("2", "2t"),
    ("43", r"43\%"),
    ("43", "0.43"),
    ("4130_5", "4130_6"),
    ("42_7", "42_9"),
    (r"\frac{1}{3}E_{1}", r"\frac{1}{3}E_{2}"),
    (r"(\frac{1}{2},\frac{1}{3})", r"-(\frac{1}{2},\frac{1}{3})"),
    ("f(x)=x,f(x)=2-x", "f(x)=x"),
    (r"\{e^{-x}\}", r"\{e^{x}\}"),
    ("Evelyn", "Carla"),
    ("x^2+1", "x^2+1.01"),
    (r"\sqrt{2}", "1.4142"),
    ("7", "5, 7"),
    (r"2\text{ hours } 30\text{ minutes}", r"2\text{ hours } 45\text{ minutes}"),
    (r"2\text{ hours } 30\text{ minutes}", "2"),
    (r"10:30\text{ AM}", r"10:30\text{ PM}"),
    (r"5\text{ km north}", r"5\text{ km south}"),
    (r"1\text{ m}", r"1\text{ km}"),
    ("5", r"5\text{ million}"),
    ("5", r"5\text{ or more}"),
    ("5", r"5\text{ cm}\times 3\text{ cm}"),
    ("6", "3x=6"),
    ("25", "x^2+y^2=25"),
    ("x+y=1", "1"),
    ("xy=6", "6"),
    ("1,1,2", "1,2,2"),
    ("0.3", "0.3..."),
]
IN_PROSE = [  # a number that is a part of something else is not the answer
    ("5", "The answer is negative 5."),
    ("5", "#### negative 5"),
    ("5", "It falls to minus 5 degrees"),
    ("5", "The temperature is –5"),
    ("5", "The answer is less than 5"),
    ("5", "The answer is not equal to 5"),
    ("5", "It cannot be 5"),
    ("5", "The answer is 5 million"),
    ("5", "The answer is 5 hours and 30 minutes"),
    ("5", "The answer is 5 and a half"),
    ("5", "The answer is $5$, or maybe $6$."),
    ("3", "The answer is 3 out of 4"),
    ("3", "The answer is 3 divided by 4"),
    ("3", "The answer is 3 quarters"),
    ("3", "2 or maybe 3"),
    ("3", "It is 2√3"),
    ("4", "3 in 4"),
    ("4", "the square root of 4"),
    ("5", "The answer is 5 " + "or " * 30_000 + "6"),
    ("5", r"\boxed{" * 1000 + "5" + "}" * 1000),
]
PROSE = [
    ("5", "答案：5"),
    ("5", "所以答案是5。"),
    ("5", "**Final Answer**\n\n5"),
    ("5", "It takes 5 hours."),
    ("7", "She has 7 apples left."),
]


def test_right_and_wrong_pairs() -> None:
    pairs = [(gold, rf"\boxed{{{answer}}}") for gold, answer in RIGHT + WRONG]
    results = [verdict.result for verdict in judged(pairs)]
    given = dict(zip(RIGHT + WRONG, results, strict=True))
    assert {pair for pair, result in given.items() if result != "correct"} == set(WRONG) | {("1010_2", "10")}


def test_numbers_in_prose() -> None:
    start = time.monotonic()
    results = [verdict.result for verdict in judged(IN_PROSE + PROSE)]
    assert results == ["wrong"] * len(IN_PROSE) + ["correct"] * len(PROSE)
    assert time.monotonic() - start < 10.0


def test_a_worker_that_is_killed_while_it_imports_is_tried_again(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    receive, killed = _Worker.receive, []

    def once(self: _Worker) -> Any:
        if not killed:
            killed.append(self)
            self.stop()
            return "lost", "the worker was killed"
        return receive(self)

    monkeypatch.setattr(_Worker, "receive", once)
    assert pool.ask(operator.add, 1, 2, library="json", limit=5.0) == 3


def test_a_percent_sign_is_a_unit_where_percent_is_asked_for() -> None:
    asked = "She sold 3 of 7 cakes. What percentage of them, rounded, did she sell? Put it in a box."
    assert verify(gold="43", answer="43%", prompt=asked, **PATIENT).result == "correct"
    assert verify(gold="43", answer="43%", prompt="He lost 5% of his marbles. How many are left?").result == "wrong"


def test_an_unreadable_gold_answer_is_unscored_whatever_the_answer() -> None:
    for gold in ("", None, r"\frac{1}{2", "Find x and prove that 3 works", r"\frac{1}{", float("nan")):
        for answer in ("", "7", r"\boxed{1}", f"\\boxed{{{gold}}}"):
            verdict = verify(gold=gold, answer=answer, **PATIENT)  # type: ignore[arg-type]
            assert (verdict.result, verdict.reason) == ("unscored", "bad_gold"), (gold, answer)


# --- extraction -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 43 because 40 + 3 = 43.", "43"),
        ("The answer is 5 or 7.", "5 or 7"),  # a list, not 5 and not 7
        ("The answer is 5 apples or 7 apples.", None),
        ("The answer is not 43.", None),
        ("Answer: $ 9 $", "9"),
        ("The answer is:\n\\[\n x=5\n\\]", "x=5"),
        (r"$$\boxed{(2, 2)} \quad \text{and} \quad \boxed{(6, 2)}$$", "(2, 2), (6, 2)"),
        ("$20$ each, so he has 43 shells.", "43"),
        ("So he has $43$ shells.", "43"),
        ("It took 43cm of rope", "43"),
        ("It took 43x of rope", None),
        ("it costs $5 and $7", None),
        ("on 2024-05-07 then", None),
        (r"\boxed{\boxed{43}}", "43"),
        (r"\boxed{5} is wrong, \boxed{43", None),  # cut off
        ("<think>\\boxed{44}</think> so 43", "43"),
        ("<think>\\boxed{43}", None),
        ("Final Answer: The final answer is $28 \\%$. I hope it is correct.", r"28 \%"),
        ("The total is $1,234.50.", "1,234.50"),
        ("#### 70,000", "70,000"),
        ("<answer>43</answer> or 44", "43"),
        ("no idea", None),
    ],
)
def test_the_rules_of_extraction(text: str, expected: str | None) -> None:
    assert extract(text) == expected


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("boxed", r"\boxed{43} and 44", 1.0),
        ("boxed", "the answer is 43", 0.0),
        ("number", "the answer is 44, not 43x", 1.0),
        ("number", r"\boxed{43} + 44", 0.0),
        ("answer", "<answer>43</answer> 44", 1.0),
        ("answer", "43", 0.0),
        ("whole", "43", 1.0),
        ("whole", "44, 43", 0.0),
        ("Result=(.*?);", "Result=1; Result=43; 44", 1.0),
        ("Result=(.*?);", "43", 0.0),
        ("(?:a|a)*(b)", "a" * 60_000, 0.0),
    ],
)
def test_other_rules(rule: str, text: str, expected: float) -> None:
    assert reward(f"math(extract='{rule}')", time_limit=2.0)([""], [text], answer=["43"]) == [expected]


# --- hostile answers ------------------------------------------------------------------------------------------
DEEP = r"\frac{1}{1+" * 150 + "x" + "}" * 150
HOSTILE = [
    rf"\boxed{{{TOWER}}}",
    r"\boxed{9!!!!}",
    r"\boxed{1001!!!!}",  # an error inside the comparison
    r"\boxed{(x+1)^{99999}-y^{99999}}",
    r"\boxed{" + "7" * 1_000_000 + "}",
    r"\boxed{2^{99999999}}",
    rf"\boxed{{{DEEP}}}",
    r"\boxed{" * 20_000,
    r"\boxed{\sqrt{" + "{" * 400 + "2" + "}" * 400 + "}}",
    "\\boxed{\x00+\\sqrt{3}\x00}",
    "\x00" * 1_000_000,
    "so 5 " * 200_000,
    "$" * 100_000,
    r"\[" * 100_000,
    "answer is " * 100_000,
    "1," * 400_000,
    "\ud800 \\boxed{\udfff}",
]


def test_hostile_answers_are_wrong_and_within_the_limit() -> None:
    judged([(r"\sqrt{2}", r"\boxed{\sqrt{3}}")])  # the workers are up
    for answer in HOSTILE:
        start = time.monotonic()
        verdict = reward("math", time_limit=1.0).verdicts([""], [answer], answer=[r"\sqrt{2}"])[0]
        assert time.monotonic() - start < 3.5, answer[:40]
        assert verdict.result == "wrong", answer[:40]


def test_a_batch_that_hangs_ends_with_its_budget() -> None:
    judged([(r"\sqrt{2}", r"\boxed{\sqrt{3}}")])
    texts = [rf"\boxed{{10^{{5^{{5^{{5^{{{n}}}}}}}}}}}" for n in range(100, 140)]
    function = reward("math(limit=0.5, budget=3)")
    start = time.monotonic()
    verdicts = function.verdicts([""] * 40, texts, answer=[r"\sqrt{2}"] * 40)
    assert time.monotonic() - start < 6.0
    assert {(v.result, v.reason) for v in verdicts} == {("wrong", "timeouts"), ("unscored", "late")}
    assert function.counts["timeouts"] + function.counts["late"] == 40
    assert function.counts["wrong"] == function.counts["timeouts"]


# --- the workers ----------------------------------------------------------------------------------------------
def crash(code: int) -> None:
    os._exit(code)


def hog(size: int) -> int:
    return len(bytearray(size))


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def hash_of(text: str) -> int:
    return hash(text)


@pytest.fixture
def pool() -> Any:
    made = Pool(2)
    yield made
    made.stop()


def test_a_call_that_hangs_crashes_or_eats_memory_is_replaced(pool: Pool) -> None:
    with pytest.raises(TimeoutError):
        pool.ask(nap, 60.0, library="json", limit=0.2)
    supervisors = pool.pids()
    with pytest.raises(WorkerFailed, match="died"):
        pool.ask(crash, 3, library="json", limit=5.0)
    with pytest.raises(WorkerFailed, match="MemoryError"):
        pool.ask(hog, 1 << 40, library="json", limit=5.0)
    assert pool.ask(nap, 0.0, library="json", limit=5.0) == 0.0
    assert pool.pids() == supervisors  # only the children were replaced


def test_a_killed_supervisor_is_replaced(pool: Pool) -> None:
    pool.ask(nap, 0.0, library="json", limit=5.0)
    (before,) = pool.pids()
    threading.Timer(0.3, os.kill, (before, 9)).start()
    assert pool.map(nap, [[2.0]], library="json", limit=5.0)[0].kind == "lost"
    assert pool.ask(nap, 0.0, library="json", limit=5.0) == 0.0


def test_calls_of_a_batch_share_the_workers_and_its_budget(pool: Pool) -> None:
    start = time.monotonic()
    outcomes = pool.map(nap, [[0.3]] * 4 + [[60.0]] * 40, library="json", limit=1.0, budget=2.0)
    assert time.monotonic() - start < 5.0
    assert [outcome.kind for outcome in outcomes[:4]] == ["done"] * 4
    assert {outcome.kind for outcome in outcomes[4:]} == {"timeout", "late"}


def test_threads_share_the_pool(pool: Pool) -> None:
    found: list[Any] = []

    def work(n: int) -> None:
        found.extend(o.value for o in pool.map(nap, [[0.001 * n]] * 20, library="json", limit=5.0))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(found) == sorted(0.001 * n for n in range(6) for _ in range(20))


def test_the_hash_of_a_text_is_the_same_in_every_worker(pool: Pool) -> None:
    code = "from test_verifier import Pool, hash_of; p = Pool(1); print(p.ask(hash_of, 'a', library='json', limit=9)); p.stop()"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True, text=True, check=True, timeout=120,
        ).stdout
        for seed in (1, 2)
    }  # fmt: skip
    assert found == {f"{pool.ask(hash_of, 'a', library='json', limit=9.0)}\n"}


@pytest.mark.skipif(not Path("/proc").exists(), reason="counts processes in /proc")
def test_no_process_outlives_the_one_that_asked(tmp_path: Path) -> None:
    code = (
        "import os, signal, threading\nfrom test_verifier import Pool, nap\np = Pool(1)\n"
        "p.ask(nap, 0.0, library='json', limit=9)\nprint(p.pids()[0], flush=True)\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()\np.ask(nap, 60.0, library='json', limit=60)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    supervisor, deadline = int(done.stdout), time.monotonic() + 10
    while _group(supervisor) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _group(supervisor) == []


def _group(leader: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(group) == leader and state != "Z":
                found.append(int(entry.name))
    return found


def test_the_verdicts_of_a_thread_and_of_a_fork_are_the_same() -> None:
    pairs = [(gold, rf"\boxed{{{answer}}}") for gold, answer in (RIGHT + WRONG)[:12]]
    here, found = [v.result for v in judged(pairs)], []
    CACHE.clear()
    thread = threading.Thread(target=lambda: found.extend(v.result for v in judged(pairs)))
    thread.start()
    thread.join(60)
    assert found == here
    CACHE.clear()
    child = os.fork()
    if child == 0:
        os._exit([v.result for v in judged(pairs)] != here)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- counts and the cache -------------------------------------------------------------------------------------
def test_counts_add_up_and_the_cache_is_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    CACHE.clear()
    golds = [r"\sqrt{8}", r"\sqrt{8}", r"\sqrt{8}", "7", "", None]
    texts = [r"\boxed{2\sqrt{2}}", r"\boxed{2\sqrt{3}}", "no idea", r"\boxed{7}", "7", "7"]
    function = reward("math", time_limit=20.0)
    values = function([""] * 6, texts, answer=golds)
    assert values == [1.0, 0.0, 0.0, 1.0, None, None]
    assert function.counts == {"correct": 2, "wrong": 2, "unscored": 2, "no_answer": 1}
    assert len([r for r in caplog.records if "cannot score" in r.message]) == 1
    assert function([""] * 6, texts, answer=golds) == values
    assert function.counts["cached"] == 3
    monkeypatch.setattr("klamp.rewards.math.version", lambda: "another")
    function.counts.clear()
    function([""] * 6, texts, answer=golds)
    assert function.counts["cached"] == 0


def test_verify_takes_its_arguments_by_name() -> None:
    with pytest.raises(TypeError):
        verify("7", "7")  # type: ignore[misc]
    assert verify(gold="(0,12.5)", answer=r"\boxed{0<x<12.5}", **PATIENT).result == "wrong"
    assert verify(gold="0<x<12.5", answer=r"\boxed{(0,12.5)}", **PATIENT).result == "correct"


def test_columns_of_another_length_are_refused() -> None:
    with pytest.raises(UserError, match="2 values in column 'answer', 1 completions"):
        reward("math")([""], ["7"], answer=["7", "8"])


def test_the_document_runs() -> None:
    page = (Path(__file__).parents[1] / "docs" / "rewards.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "rewards.md", "exec"), {"__name__": "page"})
    for name in REWARDS:
        assert f"| `{name}" in page, name
