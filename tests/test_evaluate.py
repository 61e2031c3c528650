"""klamp eval: samples that can be repeated and resumed, numbers that agree with hand-made ones, a page that is safe."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from devtools import BROWSER, Tab
from train_parts import save_tiny_model

from klamp.errors import UserError
from klamp.evaluate import command, questions, store
from klamp.evaluate.compare import compare
from klamp.evaluate.generate import OwnDraws, Request, Sampling, Vllm, sample_seed, uniforms
from klamp.evaluate.judging import judge, reader
from klamp.evaluate.options import Options
from klamp.evaluate.page import render
from klamp.evaluate.run import evaluate
from klamp.evaluate.score import majority, per_question, totals
from klamp.train import rundir

PROGRAM = """
import argparse, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a script inherit that it is ignored
from klamp.errors import UserError
from klamp.evaluate import command, run
judged = run._judged
run._judged = lambda *words: time.sleep(0.1) or judged(*words)  # slow enough for a signal to meet it
parser = argparse.ArgumentParser()
command.add_parser(parser.add_subparsers(dest="verb"))
try:
    sys.exit(command.run(parser.parse_args(["eval", *sys.argv[1:]])))
except UserError as error:
    sys.exit(print(error, file=sys.stderr) or 2)
"""
FLAGS = ["--limit", "96", "--n", "4", "--batch-size", "8"]
SMALL = {"limit": 96, "n": 4, "batch_size": 8}
HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\x1b[31m\u202e<!--"
)


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(dest="verb"))
    return command.run(parser.parse_args(["eval", *words]))


def parts(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (directory / "samples").iterdir()}


def numbers(directory: Path) -> dict[str, Any]:
    """results.json without the names of the directory."""
    found = json.loads((directory / "results.json").read_text())
    return {name: value for name, value in found.items() if name not in ("directory", "page")}


def data_file(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation of the embedded model that nothing interrupted."""
    directory = tmp_path_factory.mktemp("whole") / "out"
    assert evaluate(Options(out=str(directory), **SMALL))["status"] == "complete"
    return directory


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


# --- samples --------------------------------------------------------------------------------------------------


def test_the_next_token_has_the_probability_of_the_softmax() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, -math.inf, 0.0])
    draws = uniforms([sample_seed(0, "q", i) for i in range(20_000)], 1)
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    out = OwnDraws(draws, 3, torch.device("cpu"))(torch.zeros(20_000, 3), logits.expand(20_000, 5))
    assert bool((torch.isfinite(out).sum(-1) == 1).all())
    shares = torch.bincount(out.argmax(-1), minlength=5) / 20_000
    assert shares[3] == 0.0
    wanted = torch.softmax(logits, -1)
    assert bool(((shares - wanted).abs() <= 4.5 * (wanted * (1 - wanted) / 20_000).sqrt() + 1e-9).all())


def test_the_edges_of_the_unit_interval_give_tokens_that_are_possible() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]] * 2)
    out = OwnDraws(np.array([[0.0], [1.0 - 2.0**-53]]), 0, torch.device("cpu"))(torch.zeros(2, 0), logits)
    assert out.argmax(-1).tolist() == [1, 2]


def test_chance_depends_on_the_sample_alone() -> None:
    seeds = [sample_seed(s, q, i) for s in range(3) for q in "ab" for i in range(50)]
    assert len(set(seeds)) == 300
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert (uniforms(seeds, 7)[5:9] == uniforms(seeds[5:9], 7)).all()
    assert sample_seed(0, "a", 0) == 3627697809258241319  # on every machine


def test_every_sample_is_there_once_and_was_drawn_from_its_own_seed(whole: Path) -> None:
    rows = store.read_samples(whole)
    assert len(rows) == 96 * 4
    assert len({(row["question"], row["sample"]) for row in rows}) == 96 * 4
    for row in rows:
        assert row["seed"] == sample_seed(0, row["question"], row["sample"])
        assert row["correct"] == (row["completion"].strip() == row["gold"]) == (row["reward"] == 1.0)
        assert row["answer"] == (row["completion"].strip() or None)
        assert row["tokens"] <= 12
        assert not row["truncated"] or row["tokens"] == 12
    assert {path.name for path in whole.iterdir()} == {
        ".lock",
        "manifest.json",
        "results.json",
        "samples",
        "samples.html",
    }
    assert pq.read_schema(whole / "samples" / "part-000000.parquet").names == list(store.COLUMNS)


def test_the_same_again_is_the_same_bit_for_bit_and_another_seed_is_not(whole: Path, tmp_path: Path) -> None:
    evaluate(Options(out=str(tmp_path / "again"), **SMALL))
    assert parts(tmp_path / "again") == parts(whole)
    assert numbers(tmp_path / "again") == numbers(whole)
    evaluate(Options(out=str(tmp_path / "other"), seed=1, **SMALL))
    one, other = (store.read_samples(path, ["completion"]) for path in (whole, tmp_path / "other"))
    assert sum(a != b for a, b in zip(one, other, strict=True)) > 50


def test_a_sample_does_not_depend_on_the_batch_it_is_drawn_in(whole: Path, tmp_path: Path) -> None:
    """Up to the last bits of the logits, which the shape of a batch can change: those decide a token very rarely."""
    evaluate(Options(out=str(tmp_path / "wide"), **SMALL | {"batch_size": 100, "limit": 48}))
    wide = store.read_samples(tmp_path / "wide", ["question", "sample", "completion"])
    narrow = {(row["question"], row["sample"]): row["completion"] for row in store.read_samples(whole)}
    assert sum(narrow[row["question"], row["sample"]] != row["completion"] for row in wide) <= 1


# --- stopped and continued ------------------------------------------------------------------------------------


def _start(directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, "--out", str(directory), *FLAGS], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def _wait_for_parts(process: subprocess.Popen[str], directory: Path, count: int) -> None:
    end = time.monotonic() + 90
    while len(list((directory / "samples").glob("part-*.parquet"))) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)


def test_killed_interrupted_and_continued_equals_uninterrupted(whole: Path, tmp_path: Path) -> None:
    directory = tmp_path / "out"
    process = _start(directory)
    _wait_for_parts(process, directory, 5)
    process.kill()
    process.communicate()
    kept = {name: content for name, content in parts(directory).items() if name.startswith("part-")}
    assert 5 <= len(kept) < 48
    assert all(parts(whole)[name] == content for name, content in kept.items())
    stamps = {name: (directory / "samples" / name).stat().st_mtime_ns for name in kept}
    (directory / "samples" / ".part-000020.tmp").write_bytes(b"half a part")

    process = _start(directory)
    _wait_for_parts(process, directory, len(kept) + 5)
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert f"{8 * len(kept)} of them drawn before" in said
    assert "to continue: klamp" in said
    results = json.loads((directory / "results.json").read_text())
    assert results["status"] == "interrupted"
    done = results["questions"]["complete"]
    assert 2 * (len(kept) + 5) <= done < 96
    assert f"only {done} of 96 questions have all their samples" in out
    assert (directory / "samples.html").exists()
    with pytest.raises(UserError, match=f"not complete: {done} of 96 questions"):
        compare(directory, whole)

    assert evaluate(Options(out=str(directory), **SMALL))["status"] == "complete"
    assert {name: (directory / "samples" / name).stat().st_mtime_ns for name in stamps} == stamps  # not drawn again
    assert parts(directory) == parts(whole)
    assert numbers(directory) == numbers(whole)
    before = parts(directory)
    assert run("--out", str(directory), *FLAGS, "--json") == 0  # finished: nothing is drawn
    assert parts(directory) == before


def test_other_options_data_or_model_are_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(3)]
    data = data_file(tmp_path / "d.jsonl", rows)
    asked: dict[str, Any] = {"model": str(model), "data": str(data), "reward": "exact", "n": 2, "max_tokens": 4,
                             "out": str(tmp_path / "out")}  # fmt: skip
    evaluate(Options(**asked))
    before = parts(tmp_path / "out")
    for change, said in (
        ({"n": 3, "temperature": 0.5}, "n was 2, is 3; temperature was 1.0, is 0.5"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"reward": "math"}, "reward_name was 'exact', is 'math'"),
        ({"limit": 2}, "the questions changed"),
    ):
        with pytest.raises(UserError, match=said):
            evaluate(Options(**asked | change))
    torch.manual_seed(5)
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-4] + b"\0\0\0\0")
    with pytest.raises(UserError, match="the model's files changed"):
        evaluate(Options(**asked))
    (model / "model.safetensors").write_bytes(weights)
    assert evaluate(Options(**asked, k=(1, 2)))["status"] == "complete"  # k decides no sample
    assert parts(tmp_path / "out") == before


def test_a_second_process_and_a_broken_part_are_refused(whole: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(whole, tmp_path / "out")
    part = directory / "samples" / "part-000003.parquet"
    shutil.copy(directory / "samples" / "part-000004.parquet", part)
    with pytest.raises(UserError, match=r"part-000003\.parquet holds other samples"):
        evaluate(Options(out=str(directory), **SMALL))
    part.write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"part-000003\.parquet is not a readable Parquet file; remove it"):
        evaluate(Options(out=str(directory), **SMALL))
    part.unlink()
    with rundir.locked(directory, "evaluating into"), pytest.raises(UserError, match="another process is evaluating"):
        evaluate(Options(out=str(directory), **SMALL))
    evaluate(Options(out=str(directory), **SMALL))
    assert parts(directory) == parts(whole)


# --- questions ------------------------------------------------------------------------------------------------

BAD = [
    {"prompt": "1+1=", "answer": "2"},
    '{"prompt": "1+2=", "answer": ',
    {"prompt": "", "answer": "4"},
    {"prompt": "1+4=", "answer": None},
    [1, 2],
    {"prompt": "9" * 600, "answer": "6"},
    {"prompt": "1+1=", "answer": "2"},
    {"prompt": [{"role": "user", "content": "hi"}], "answer": "2"},
]


def test_bad_rows_are_refused_with_their_number_or_skipped_and_counted(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {
        "model": str(tiny),
        "reward": "exact",
        "n": 1,
        "max_tokens": 4,
        "out": str(tmp_path / "out"),
    }
    for rows, said in (
        (BAD[:2], "line 2.*malformed JSON"),
        ([BAD[0], BAD[2]], "row 2: the prompt .* is empty"),
        ([BAD[0], BAD[3]], "row 2: the answer .* is null"),
        ([BAD[0], BAD[5]], "row 2: the prompt has 600 tokens; .*512 positions"),
    ):
        with pytest.raises(UserError, match=said):
            evaluate(Options(**asked, data=str(data_file(tmp_path / "d.jsonl", rows))))
        assert not (tmp_path / "out").exists()
    data = data_file(tmp_path / "d.jsonl", BAD)
    words = ["--model", str(tiny), "--reward", "exact", "--n", "1", "--max-tokens", "4", "--out", str(tmp_path / "out")]
    assert run(*words, "--data", str(data), "--skip-bad-rows") == 0
    assert re.search("6 rows were skipped; the first, row 2: .*malformed JSON", capsys.readouterr().out)
    results = numbers(tmp_path / "out")
    assert [one["row"] for one in results["skipped_rows"]] == [2, 3, 4, 5, 6, 8]
    assert "null" in results["skipped_rows"][2]["reason"]
    rows = store.read_samples(tmp_path / "out", ["question", "row"])
    assert [row["row"] for row in rows] == [1, 7]
    assert rows[1]["question"] == rows[0]["question"] + "-2"  # equal rows are two questions


def test_bad_rows_of_other_formats(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("question,answer\n1+1,2\n1+2\n,4\n1+4,5\n")
    found = questions.asked(Options(data=str(path), reward="exact", skip_bad_rows=True))
    assert [question.row for question in found.questions] == [1, 4]
    assert found.bad[0] == questions.BadRow(2, "1 cells, but the header has 2")
    assert found.bad[1].row == 3
    pq.write_table(
        store.schema().empty_table().select(["prompt", "gold"]).rename_columns(["prompt", "answer"]),
        tmp_path / "d.parquet",
    )
    with pytest.raises(UserError, match="no row that can be used"):
        questions.asked(Options(data=str(tmp_path / "d.parquet"), reward="exact", skip_bad_rows=True))


def test_gsm8k_rows_chat_templates_and_own_rewards(tmp_path: Path) -> None:
    """The reward is given what it is given in training: messages, every column, token ids; the gold after ####."""
    model = save_tiny_model(tmp_path / "model", chat=True)
    data = data_file(tmp_path / "d.jsonl", [{"question": "2+2?", "answer": "two and two\n#### 4", "level": 3}] * 2)
    (tmp_path / "own.py").write_text(
        "def score(prompts, completions, **columns):\n"
        "    assert prompts[0] == [{'role': 'user', 'content': '2+2?'}], prompts\n"
        "    assert completions[0][0]['role'] == 'assistant'\n"
        "    assert columns['answer'] == ['4'] * len(prompts) and columns['level'] == [3] * len(prompts)\n"
        "    assert all(len(ids) <= 5 for ids in columns['completion_ids'])\n"
        "    return [None if i == 0 else 1.5 if i % 2 else 0.25 for i in range(len(prompts))]\n"
    )
    results = evaluate(Options(model=str(model), data=str(data), reward=f"{tmp_path}/own.py:score", n=3, k=(1, 2, 3, 4),
                               max_tokens=5, out=str(tmp_path / "out")))  # fmt: skip
    rows = store.read_samples(tmp_path / "out")
    assert rows[0]["prompt"] == "<user>2+2?\n<assistant>"
    assert [row["correct"] for row in rows] == [None, True, False, True, False, True]
    assert results["samples"] == {"drawn": 6, "scored": 5, "unscored": 1}
    assert results["metrics"]["avg@3"]["mean"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert results["metrics"]["pass@2"]["mean"] == 1.0
    assert results["metrics"]["pass@3"]["questions"] == 1
    assert results["questions"]["fewer_scored_than_k"] == {"3": 1}
    assert [one["k"] for one in results["k_excluded"]] == [4]
    assert results["reward"]["mean"] == pytest.approx((1.75 / 2 + 3.25 / 3) / 2)


def test_a_reward_that_fails_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    data = data_file(tmp_path / "d.jsonl", [{"prompt": "1", "answer": "2"}])
    (tmp_path / "own.py").write_text("def score(prompts, completions, **columns):\n    raise ValueError('no')\n")
    with pytest.raises(UserError, match="raised ValueError: no"):
        evaluate(Options(model=str(tiny), data=str(data), reward=f"{tmp_path}/own.py:score", n=1, max_tokens=2,
                         out=str(tmp_path / "deep" / "out")))  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".pyc" and path.name != "__pycache__") == [
        "d.jsonl", "own.py",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data", "nowhere.jsonl"], "--data needs --reward"),
        (["--data", "nowhere.jsonl", "--reward", "exact"], "there is no file 'nowhere.jsonl'"),
        (["--task", "sorrt"], "did you mean 'sort'"),
        (["--task", "sort", "--data", "d", "--reward", "exact"], "not both"),
        (["--temperature", "0", "--n", "2"], "give --n 1"),
        (["--temperature", "-1"], "at least 0"),
        (["--temperature", "1e-30"], "0 is greedy"),
        (["--n", "999999999999"], "more than 100,000 samples"),
        (["--n", "0"], "--n 0 must be at least 1"),
        (["--k", "0"], "at least 1"),
        (["--top-p", "0"], r"in \(0, 1\]"),
        (["--engine", "vlm"], "did you mean 'vllm'"),
        (["--model", "/nowhere/model"], "cannot be loaded"),
        (["--compare", "a", "b", "--n", "3"], "leave out --n"),
        (["--compare", "a", "b"], "a is not an evaluation"),
    ],
)
def test_mistakes_say_what_is_possible_and_write_nothing(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=said):
        run(*words)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty and no evaluation"):
        run("--out", str(tmp_path))
    with pytest.raises(UserError, match="is a file"):
        run("--out", str(tmp_path / "notes.txt"))


# --- engines --------------------------------------------------------------------------------------------------


def test_greedy_is_one_sample_without_chance(tmp_path: Path) -> None:
    for seed in "01":
        assert run("--temperature", "0", "--limit", "40", "--seed", seed, "--out", str(tmp_path / seed)) == 0
    one, other = (store.read_samples(tmp_path / seed, ["completion"]) for seed in "01")
    assert one == other
    assert len(one) == 40
    found = compare(tmp_path / "0", tmp_path / "1")
    assert found["metrics"]["avg"]["mcnemar"] == 1.0
    assert found["differ_in"] == {"seed": [0, 1]}


def test_top_k_of_one_is_greedy_and_generation_defaults_of_the_model_do_not_count(tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    defaults = {"eos_token_id": 1, "pad_token_id": 0, "do_sample": True, "top_k": 3, "temperature": 0.1}
    defaults |= {"repetition_penalty": 9.0, "no_repeat_ngram_size": 1}
    (model / "generation_config.json").write_text(json.dumps(defaults))
    data = data_file(tmp_path / "d.jsonl", [{"prompt": "12345", "answer": "2"}, {"prompt": "1", "answer": "2"}])
    texts = []
    for name, path, more in (("a", tiny, {"top_k": 1}), ("b", model, {"top_k": 1}), ("c", model, {"temperature": 0.0})):
        asked: dict[str, Any] = {
            "data": str(data),
            "reward": "exact",
            "n": 1,
            "max_tokens": 20,
            "out": str(tmp_path / name),
        }
        evaluate(Options(model=str(path), **asked, **more))
        texts.append([row["completion"] for row in store.read_samples(tmp_path / name)])
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0][0]) >= 15


def test_vllm_is_given_tokens_and_a_seed_per_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM itself is not here: a stand-in with its documented calls shows what it would be asked."""
    asked: list[Any] = []

    class LLM:
        def __init__(self, **options: Any) -> None:
            asked.append(options)

        def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> Any:
            asked.append((prompts, params))
            one = types.SimpleNamespace(text="5", token_ids=[7, 1], finish_reason="stop")
            cut = types.SimpleNamespace(text="55", token_ids=[7, 7], finish_reason="length")
            return [types.SimpleNamespace(outputs=[one]), types.SimpleNamespace(outputs=[cut])]

    module = types.SimpleNamespace(LLM=LLM, SamplingParams=lambda **options: options)
    monkeypatch.setitem(sys.modules, "vllm", module)
    engine = Vllm("m", types.SimpleNamespace(eos_token_id=1), Sampling(0.7, 0.9, 5, 2), "bfloat16", "cuda", False)
    found = engine.generate([Request((3, 4), 11), Request((5,), 12)])
    assert [(one.text, one.ids, one.truncated) for one in found] == [("5", (7, 1), False), ("55", (7, 7), True)]
    prompts, params = asked[1]
    assert prompts == [{"prompt_token_ids": [3, 4]}, {"prompt_token_ids": [5]}]
    assert [one["seed"] for one in params] == [11, 12]
    assert params[0] | {"seed": 0} == {"n": 1, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_tokens": 2, "seed": 0,
                                       "stop_token_ids": [1], "skip_special_tokens": True}  # fmt: skip


# --- numbers --------------------------------------------------------------------------------------------------


def sample(question: str, index: int, correct: bool | None, answer: str | None = None, **more: Any) -> dict[str, Any]:
    reward = None if correct is None else float(correct)
    return {"question": question, "row": 1, "sample": index, "answer": answer, "reward": reward, "correct": correct,
            "tokens": 10, "truncated": False} | more  # fmt: skip


def hand_made() -> list[dict[str, Any]]:
    return [
        *(sample("a", i, i < 1, "1" if i < 1 else f"w{i}") for i in range(4)),  # 1 of 4, all answers different
        *(sample("b", i, i < 3, "2" if i < 3 else "w") for i in range(4)),  # 3 of 4
        *(sample("c", i, None) for i in range(4)),  # unscored
        *(sample("d", i, i == 2 or None, "4") for i in range(4)),  # one scored
        *(sample("e", i, True) for i in range(3)),  # not all drawn yet
    ]


def test_numbers_by_hand() -> None:
    found = per_question(hand_made(), 4, (1, 2, 4))
    assert [one["question"] for one in found] == ["a", "b", "c", "d"]
    by = {one["question"]: one for one in found}
    assert by["a"]["pass"] == pytest.approx({"1": 1 / 4, "2": 1 / 2, "4": 1.0})
    assert by["b"]["pass"] == pytest.approx({"1": 3 / 4, "2": 1.0, "4": 1.0})
    assert by["d"]["pass"] == {"1": 1.0}
    assert by["a"]["majority"]["4"] == 0.25  # four answers tie
    assert by["b"]["majority"]["4"] == 1.0
    assert by["c"]["avg"] is None
    whole = totals(found, 5, 4, (1, 2, 4, 8))
    assert whole["metrics"]["avg@4"]["mean"] == pytest.approx((1 / 4 + 3 / 4 + 1) / 3)
    assert whole["metrics"]["avg@4"]["error"] == pytest.approx(np.std([0.25, 0.75, 1.0], ddof=1) / math.sqrt(3))
    assert whole["metrics"]["pass@2"]["mean"] == pytest.approx(0.75)
    assert "pass@8" not in whole["metrics"]
    assert whole["k_excluded"] == [{"k": 8, "reason": "n = 4: 8 of 4 samples cannot be drawn"}]
    assert whole["questions"] == {"asked": 5, "complete": 4, "scored": 3, "unscored": 1,
                                  "fewer_scored_than_k": {"2": 1, "4": 1}}  # fmt: skip
    assert whole["samples"] == {"drawn": 16, "scored": 9, "unscored": 7}
    json.dumps(whole, allow_nan=False)
    nothing = totals([], 5, 4, (1,))
    assert nothing["metrics"] == {}


def test_votes_that_are_known_exactly_are_not_sampled() -> None:
    assert majority(["1", "2", None], [False, False, False], 2, 1, 0) == 0.0
    assert majority(["1", None, None, None], [True, False, False, False], 2, 1, 0) == pytest.approx(0.5)


def test_an_answer_with_two_verdicts_counts_by_their_share_in_any_order() -> None:
    """A reward of one's own may look at more than the answer."""
    for flags in ([True, False, False], [False, True, False]):
        assert majority(["5", "5", "7"], flags, 3, 1, 0) == 0.5


def test_results_that_are_none_are_refused(whole: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(whole, other)
    (other / "results.json").write_text("[]")
    with pytest.raises(UserError, match=r"results.json cannot be read: it does not hold"):
        compare(whole, other)


def test_answers_of_a_vote() -> None:
    math_answer, text = reader("math"), reader("exact")
    assert math_answer("so the answer is \\boxed{\\frac{1}{2}}") == math_answer("The answer is 0.5") == "1/2"
    assert math_answer("I do not know") is None
    assert (text(" 0012 "), text("  ")) == ("0012", None)

    def own(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
        return [1.0, 0.5, None]

    found = judge(own, "m:own", ["p"] * 3, ["=4"] * 3, ["The answer is 4.", "no idea", "none at all"], {})
    assert [(one.reward, one.correct, one.answer) for one in found] == [
        (1.0, True, "4"),
        (0.5, False, None),
        (None, None, None),
    ]


def stored(directory: Path, right: dict[str, list[bool]], **identity: Any) -> Path:
    """An evaluation as it would be stored, with the correctness of every sample given."""
    n = len(next(iter(right.values())))
    rows = [sample(q, i, flag, str(flag)) for q, flags in right.items() for i, flag in enumerate(flags)]
    found = per_question(rows, n, (1, n))
    directory.mkdir(parents=True)
    manifest = {"kind": store.KIND, "schema": store.SCHEMA, "identity": {"n": n} | identity}
    results = {"status": "complete", "model": "m", "n": n, **identity, **totals(found, len(right), n, (1, n))}
    store.write_json(directory / "manifest.json", manifest)
    store.write_json(directory / "results.json", results | {"per_question": found})
    return directory


def test_a_comparison_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten questions, greedy: A alone is right on 1, B alone on 6; McNemar's p is 2 (C(7,0) + C(7,1)) / 2^7."""
    names = [f"q{i}" for i in range(10)]
    a = stored(tmp_path / "a", {q: [i in (0, 7)] for i, q in enumerate(names)}, temperature=0.0)
    b = stored(tmp_path / "b", {q: [1 <= i <= 7] for i, q in enumerate(names)}, temperature=0.7)
    found = compare(a, b)
    one = found["metrics"]["avg"]
    assert (one["a"], one["b"], one["only_a"], one["only_b"], one["same"]) == (0.2, 0.7, 1, 6, 3)
    assert one["difference"]["mean"] == pytest.approx(0.5)
    assert one["mcnemar"] == pytest.approx(2 * 8 / 128)
    assert one["p"] == pytest.approx(2 * 8 / 128)
    assert one["difference"]["low"] < 0.5 < one["difference"]["high"]
    assert found["differ_in"] == {"temperature": [0.0, 0.7]}
    assert run("--compare", str(a), str(b)) == 0
    assert "0.1250" in capsys.readouterr().out
    assert run("--compare", str(a), str(b), "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found))


def test_a_comparison_of_samples_and_of_other_questions(tmp_path: Path) -> None:
    a = stored(tmp_path / "a", {"x": [True, False], "y": [False, False]})
    b = stored(tmp_path / "b", {"y": [True, False, False, False], "x": [True, True, True, False]})
    found = compare(a, b)["metrics"]
    assert set(found) == {"avg", "pass@1"}  # pass@2 and pass@4 are not in both
    assert found["avg"]["difference"]["mean"] == pytest.approx(0.25)
    assert found["avg"]["mcnemar"] is None
    c = stored(tmp_path / "c", {"x": [True, True], "z": [True, True], "w": [True, True]})
    with pytest.raises(UserError, match=r"has 2, .* has 3, and 1 are in both"):
        compare(a, c)


def test_a_sum_shows_its_value_and_a_comparison_the_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = data_file(tmp_path / "d.jsonl", [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(3)])
    words = ["--data", str(data), "--n", "1", "--max-tokens", "3", "--reward", "math + 0.25*format('.*')"]
    assert run(*words, "--out", str(tmp_path / "a")) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("reward")]
    assert line.split()[1] == f"{numbers(tmp_path / 'a')['reward']['mean']:.3f}" != "0.000"
    assert run(*words, "--instruction", "In digits.", "--out", str(tmp_path / "b")) == 0
    differ = compare(tmp_path / "a", tmp_path / "b")["differ_in"]
    assert set(differ) == {"prompting"}
    assert [one["instruction"] for one in differ["prompting"]] == [None, "In digits."]


def test_k_above_n_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--limit", "8", "--n", "2", "--k", "1,2,16", "--out", str(tmp_path / "out")]
    assert run(*words) == 0
    out, said = capsys.readouterr()
    assert "k = 16 is left out: n = 2: 16 of 2 samples cannot be drawn" in out
    assert "pass@16" not in out
    assert "8 questions x 2 samples" in said
    assert run(*words, "--json") == 0
    assert json.loads(capsys.readouterr().out)["k_excluded"][0]["k"] == 16


def test_the_options_load_no_torch() -> None:
    code = (
        "import sys; from klamp.evaluate import command, options; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.split() == ["False", "False"]


# --- the page -------------------------------------------------------------------------------------------------


def hostile_page(path: Path) -> Path:
    rows = [
        sample(q, i, (i + k) % 2 == 0 if k < 3 else None, HOSTILE, prompt=f"{HOSTILE} number {k}", gold=HOSTILE,
               completion=f"completion {k}.{i} {HOSTILE}", truncated=i == 1)
        for k, q in enumerate("abcd") for i in range(2)
    ]  # fmt: skip
    found = per_question(rows, 2, (1, 2))
    manifest = {"model": HOSTILE, "data": HOSTILE}
    results = {"status": "complete", "n": 2, "temperature": 1.0, "seed": 0, "reward_name": HOSTILE, "max_tokens": 4,
               "skipped_rows": [{"row": 3, "reason": HOSTILE}], **totals(found, 4, 2, (1, 2, 3))}  # fmt: skip
    path.write_text(render(manifest, results, found, rows))
    return path


def test_hostile_text_cannot_end_the_data_or_begin_markup(tmp_path: Path) -> None:
    source = hostile_page(tmp_path / "page.html").read_text()
    assert source.count("<script") == source.count("</script>") == 2
    assert "<img" not in source
    assert source.count("<!--") == 0
    assert "unsafe" not in source


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    made = Tab(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")
def test_the_page_in_a_browser(tab: Tab, tmp_path: Path) -> None:
    def shown(what: str = "where") -> str:
        return str(tab.run(f"document.getElementById('{what}').textContent"))

    def key(name: str) -> None:
        tab.run(f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{key: '{name}', bubbles: true}}))")

    for width, height, dark in ((1280, 800, False), (390, 844, True)):
        tab.view(width, height, dark)
        tab.open(hostile_page(tmp_path / "page.html"))
        assert tab.errors() == []
        assert tab.run("document.title").startswith("</script>")
        assert tab.run("document.images.length + document.scripts.length") == 2
        assert tab.run("document.documentElement.scrollWidth") <= width
        assert shown("completion") == "completion 0.0 " + HOSTILE.replace("\x1b", "\u241b")
        assert shown("answer") == HOSTILE.replace("\x1b", "\u241b")
        assert [b.split() for b in tab.run("[...document.querySelectorAll('nav button')].map(b => b.textContent)")] == [
            ["all", "8"], ["correct", "3"], ["wrong", "3"], ["truncated", "4"], ["unscored", "2"],
        ]  # fmt: skip
        key("j")
        assert shown().startswith("Question 1, sample 2, 1 of 2 samples correct")
        assert shown("state") == "wrong, truncated"
        key("n")
        key("n")
        assert shown().startswith("Question 3, sample 1")
        key("p")
        assert shown().startswith("Question 2, sample 1")
        key("5")
        assert shown("count") == "2 samples"
        assert shown("state") == "unscored"
        key("1")
        key("/")
        tab.write("NUMBER 2")
        assert shown("count") == "2 samples"
        key("j")  # typed into the search, where it is a letter
        assert shown().startswith("Question 3, sample 1")
        key("Escape")
        key("ArrowDown")
        assert shown().startswith("Question 3, sample 2")
        tab.run("document.getElementById('previous').click()")
        assert shown().startswith("Question 3, sample 1")
        tab.run("document.getElementById('search').value = 'no such text';"
                "document.getElementById('search').dispatchEvent(new Event('input'))")  # fmt: skip
        assert shown("count") == "0 samples"
        assert tab.errors() == []


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")
def test_a_page_of_many_samples(tab: Tab, whole: Path) -> None:
    tab.view(1280, 800)
    tab.open(whole / "samples.html")
    assert tab.errors() == []
    tab.run("document.getElementById('list').focus();"
            "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'End', bubbles: true}))")  # fmt: skip
    assert tab.run("document.getElementById('where').textContent").startswith("Question 96, sample 4")
    assert tab.run("document.querySelectorAll('[role=option][aria-selected=true]').length") == 1
    assert tab.run("document.getElementById('next').disabled")
