"""Shapes of common data, benchmarks by name, what is put around a prompt, and bad rows in training and evaluation."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from train_parts import save_tiny_model

from klamp.cli import _parser, main
from klamp.data import BENCHMARKS, BOXED, SHAPES, BadRow, Example, Prompting, Request, benchmark, load
from klamp.errors import UserError
from klamp.evaluate import questions
from klamp.evaluate.options import Options as EvalOptions
from klamp.train.models import load_tokenizer
from klamp.train.options import Options as TrainOptions
from klamp.train.problem import problem, prompted

PAGE = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
USER = {"role": "user", "content": "1 + 1?"}


def jsonl(path: Path, rows: list[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def one(path: Path, row: dict[str, Any]) -> dict[str, Any]:
    return dict(load(Request(jsonl(path / "d.jsonl", [row]))).dataset[0])


# --- shapes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"problem": "p", "solution": "so $\\boxed{1}$, no: \\boxed{\\frac{1}{\\sqrt{2}}}."}, "p", r"\frac{1}{\sqrt{2}}"),
        ({"problem": "p", "solution": r"\boxed{\left\{1, 2\right\}}"}, "p", r"\left\{1, 2\right\}"),
        ({"problem": "p", "solution": "a\n#### 1,000"}, "p", "1,000"),
        ({"problem": "p", "solution": "204", "answer": "7"}, "p", "7"),
        ({"question": "q", "solution": "204"}, "q", "204"),
        ({"prompt": [USER], "reward_model": {"ground_truth": "2", "style": "rule"}, "extra_info": {"index": 0}}, [USER], "2"),
        ({"messages": [USER], "ground_truth": 2}, [USER], "2"),
        ({"messages": [USER, {"role": "assistant", "content": r"It is \boxed{2}."}]}, [USER], "2"),
        (
            {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]},
            [{"role": "system", "content": "s"}, USER],
            "2",
        ),
        ({"question": "q", "final_answer": ["1", "2"]}, "q", "1, 2"),
        ({"Body": "Two apples", "Question": "How many?", "Answer": 2.0}, "Two apples. How many?", "2.0"),
        ({"Body": "Two apples.", "Question": "How many?", "Answer": 2.0}, "Two apples. How many?", "2.0"),
    ],
)  # fmt: skip
def test_common_shapes(tmp_path: Path, row: dict[str, Any], prompt: Any, answer: str) -> None:
    found = one(tmp_path, row)
    assert (found["prompt"], found["answer"]) == (prompt, answer)
    for kept in ("reward_model", "extra_info"):
        assert (kept in found) == (kept in row)  # a reward may need them


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"problem": "p", "solution": "it is 5"}, r"has no \\boxed\{...\} and no ####"),
        ({"problem": "p", "solution": r"\boxed{\frac{1}{2}"}, "empty or cut off"),
        ({"problem": "p", "solution": r"\boxed{ }"}, "empty or cut off"),
        ({"prompt": [USER], "reward_model": {"style": "rule"}}, "answer .*reward_model.ground_truth.* is null"),
        ({"prompt": [USER], "reward_model": {"ground_truth": {"target": ["a"]}}}, r"is an object.*NAME\.target"),
        ({"prompt": [USER], "reward_model": "rule"}, "is null"),
        ({"messages": [{"role": "assistant", "content": r"\boxed{2}"}]}, "no user's message"),
        ({"messages": [USER]}, "ends in a message of the user"),
        ({"messages": [USER, {"role": "assistant", "content": "two"}]}, "no .*boxed"),
        ({"messages": "hi"}, "must be a list of messages"),
        ({"question": "q", "final_answer": [{"a": 1}]}, "is an object"),
    ],
)
def test_rows_that_have_no_answer_are_bad_with_the_reason(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=f"d.jsonl, row 1: the .*{reason}"):
        one(tmp_path, row)


@given(
    st.recursive(st.text("ab1+ \\,", min_size=1, max_size=4), lambda inner: inner.map(lambda text: "{" + text + "}"))
)
def test_a_box_gives_its_content_whatever_is_nested(content: str) -> None:
    shape = next(shape for shape in SHAPES if shape.answer == "solution")
    content = content.replace("\\", "") or "x"
    if content.strip():
        _, answer, worked = shape.read({"problem": "p", "solution": f"text \\boxed{{{content}}} more"})
        assert answer == content.strip()
        assert worked == f"text \\boxed{{{content}}} more"


def test_a_place_inside_a_column_can_be_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", [{"q": {"text": "1 + 1?"}, "a": {"gold": [1], "value": 2}}])
    assert load(Request(path, prompt_field="q.text", answer_field="a.value")).dataset[0]["answer"] == "2"
    with pytest.raises(UserError, match="is a list"):
        load(Request(path, prompt_field="q.text", answer_field="a.gold"))
    with pytest.raises(UserError, match=r"no column 'b\.value' \(--answer-field\)"):
        load(Request(path, prompt_field="q.text", answer_field="b.value"))


# --- bad rows -------------------------------------------------------------------------------------------------

GOOD = '{"prompt": "1+1", "answer": 2}'
WRONG = {
    "{": "malformed JSON at column 2",
    "[1]": "expected an object",
    '{"prompt": "", "answer": 1}': "is empty",
    '{"prompt": "p"}': "is null: the row has only prompt",
    '{"prompt": "p", "answer": null}': "is null",
    '{"prompt": "p", "answer": {"a": 1}}': "is an object",
    '{"prompt": "p\udcff", "answer": 1}': "not UTF-8 (byte 0xff",
}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([GOOD, *WRONG]), min_size=1, max_size=12).filter(lambda lines: GOOD in lines))
def test_the_good_rows_are_kept_and_the_bad_ones_counted(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    path = tmp_path_factory.mktemp("rows") / "d.jsonl"
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape") + b"\n")
    rows = load(Request(str(path), skip_bad_rows=True))
    assert list(rows.numbers) == [i for i, line in enumerate(lines, 1) if line == GOOD]
    assert [bad.row for bad in rows.bad] == [i for i, line in enumerate(lines, 1) if line != GOOD]
    assert all(WRONG[lines[bad.row - 1]] in bad.reason for bad in rows.bad)
    assert rows.read == len(lines)
    if rows.bad:
        assert f"{len(rows.bad)} of {len(lines)} rows are bad" in rows.left_out()[0]
        with pytest.raises(UserError, match=rf"(line|row) {rows.bad[0].row}: .*--skip-bad-rows"):
            load(Request(str(path)))
    else:
        assert load(Request(str(path))).left_out() == []


def test_files_in_a_wrong_encoding(tmp_path: Path) -> None:
    latin = '{"prompt": "café", "answer": 1}\n' + GOOD + '\n{"prompt": "naïve", "answer": 2}\n'
    (tmp_path / "latin.jsonl").write_bytes(latin.encode("latin-1"))
    rows = load(Request(str(tmp_path / "latin.jsonl"), skip_bad_rows=True))
    assert [(bad.row, bad.reason.partition(")")[0]) for bad in rows.bad] == [
        (1, 'not UTF-8 (byte 0xe9 after \'{"prompt": "caf\''),
        (3, 'not UTF-8 (byte 0xef after \'{"prompt": "na\''),
    ]
    (tmp_path / "latin.csv").write_bytes('prompt,answer\n"caf\né",1\nb,2\n'.encode("latin-1"))
    rows = load(Request(str(tmp_path / "latin.csv"), skip_bad_rows=True))
    assert rows.numbers == (2,)
    assert rows.bad[0].row == 1
    for name in ("wide.jsonl", "wide.csv"):
        (tmp_path / name).write_bytes(latin.encode("utf-16"))
        with pytest.raises(UserError, match="is UTF-16; save the file as UTF-8"):
            load(Request(str(tmp_path / name), skip_bad_rows=True))


def test_files_that_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(f"{GOOD}\n{GOOD[:-8]}")
    with pytest.raises(UserError, match=r"line 2: malformed JSON at column 19.*the file ends within this line"):
        load(Request(str(path)))
    assert load(Request(str(path), skip_bad_rows=True)).bad[0].row == 2
    table = pa.table({"prompt": [f"{i}+{i}" for i in range(5000)], "answer": list(range(5000))})
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=1000)
    whole = (tmp_path / "d.parquet").read_bytes()
    assert load(Request(str(tmp_path / "d.parquet"))).read == 5000
    (tmp_path / "d.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="not a readable Parquet file"):
        load(Request(str(tmp_path / "d.parquet"), skip_bad_rows=True))
    middle = len(whole) // 2
    (tmp_path / "d.parquet").write_bytes(whole[:middle] + bytes(2000) + whole[middle + 2000 :])
    with pytest.raises(UserError, match=r"d\.parquet is damaged after row [1-4]\d* and not used at all"):
        load(Request(str(tmp_path / "d.parquet"), skip_bad_rows=True))


def test_parquet_with_nested_columns_and_broken_text(tmp_path: Path) -> None:
    table = pa.table({
        "prompt": ["a", "b", "c"],
        "answer": pa.array([{"value": "1"}, {"value": "2"}, None]),
        "list": pa.array([["1"], ["2"], ["3"]]),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(UserError, match=r"row 1: the answer .* is an object.*NAME\.value"):
        load(Request(str(tmp_path / "d.parquet")))
    rows = load(Request(str(tmp_path / "d.parquet"), answer_field="answer.value", skip_bad_rows=True))
    assert rows.dataset["answer"][:] == ["1", "2"]
    assert rows.bad == (BadRow(3, "the answer (column 'answer.value') is null; every row needs one"),)
    with pytest.raises(UserError, match=r"row 1: the answer .* is a list"):
        load(Request(str(tmp_path / "d.parquet"), answer_field="list"))
    text = pa.array([b"ok", b"caf\xe9", b"ok"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": text, "answer": [1, 2, 3]}), tmp_path / "e.parquet")
    rows = load(Request(str(tmp_path / "e.parquet"), skip_bad_rows=True))
    assert rows.bad == (BadRow(2, "not UTF-8 (byte 0xe9)"),)
    assert rows.numbers == (1, 3)


def test_rows_of_a_folder_are_numbered_through_and_named_by_their_file(tmp_path: Path) -> None:
    jsonl(tmp_path / "train-0.jsonl", [{"prompt": "a", "answer": 1}] * 2)
    jsonl(tmp_path / "train-1.jsonl", [{"prompt": "b", "answer": None}, {"prompt": "c", "answer": 1}])
    with pytest.raises(UserError, match=r"train-1\.jsonl, row 1: the answer .* is null"):
        load(Request(str(tmp_path)))
    rows = load(Request(str(tmp_path), skip_bad_rows=True))
    assert (rows.numbers, rows.bad[0].row) == ((1, 2, 4), 3)


# --- benchmarks -----------------------------------------------------------------------------------------------

ROWS: dict[str, dict[str, Any]] = {
    "olympiadbench": {"question": "q", "final_answer": ["2"]},
    "svamp": {"Body": "b", "Question": "q", "Answer": 2},
    "mawps": {"question": "q", "result": "2"},
    "math": {"problem": "q", "solution": r"\boxed{2}"},
    "dapo-math-17k": {"prompt": [USER], "reward_model": {"ground_truth": "2"}},
    **{name: {"question": "q", "answer": "2"} for name in ("amc23", "gsm8k", "minerva")},
    **{name: {"problem": "q", "answer": "2", "solution": "s"} for name in ("aime24", "aime25", "aime26", "math500")},
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_is_read_with_its_own_shape_and_its_size_is_checked(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = BENCHMARKS[name]
    assert known.shape.fits(list(ROWS[name]))
    for split in known.splits:
        jsonl(tmp_path / name / f"{split.name}.jsonl", [ROWS[name]] * 2)
        rows = load(Request(name, split.name, data_dir=str(tmp_path)))
        assert rows.dataset["answer"][:] == ["2"] * (1 if known.distinct else 2)
        assert rows.repeated == int(known.distinct)
        assert f"2 rows, where the split {split.name} of {known.hub} has {split.rows}" in caplog.text
    assert load(Request(str(tmp_path / name / f"{split.name}.jsonl"))).read == 2  # a file is what it is
    if known.distinct:
        assert "1 of 2 rows repeat" in rows.left_out()[0]


def test_local_files_of_a_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "test"):
        row = {"question": split, "answer": "#### 1"}
        jsonl(tmp_path / "a" / f"gsm8k_{split}.jsonl", [row])
        jsonl(tmp_path / "b" / "gsm8k" / f"{split}-00000-of-00001.jsonl", [row])
    jsonl(tmp_path / "c" / "gsm8k.jsonl", [{"question": "both", "answer": "1"}])
    pq.write_table(pa.table({"problem": ["p"], "answer": ["1"]}), tmp_path / "aime24.parquet")
    for folder in "ab":
        for purpose in ("train", "test"):
            found = load(Request("gsm8k", purpose, data_dir=str(tmp_path / folder)))
            assert found.dataset["prompt"][:] == [purpose]
        assert load(Request("gsm8k", "test", "train", str(tmp_path / folder))).dataset["prompt"][:] == ["train"]
    assert load(Request("gsm8k", "test", data_dir=str(tmp_path / "c"))).dataset["prompt"][:] == ["both"]
    with pytest.raises(UserError, match=r"tried gsm8k_train\{\.jsonl,.*gsm8k/train"):
        load(Request("gsm8k", "train", data_dir=str(tmp_path / "c")))  # it may hold the test split
    assert load(Request("aime24", "test", data_dir=str(tmp_path))).source == str(tmp_path / "aime24.parquet")
    monkeypatch.chdir(tmp_path / "b")
    assert benchmark("gsm8k") is None  # a path that exists is what it is
    assert load(Request("gsm8k", "test")).source == "gsm8k/test-00000-of-00001.jsonl"


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request("aime24", "train"), "aime24 is for evaluation only.*klamp eval --data aime24; to train on: .*gsm8k"),
        (Request("aime24", "train", "test"), "for evaluation only"),
        (Request("dapo-math-17k", "test"), "only the split train; say --split train"),
        (Request("gsm8k", "test", "tset"), "no split 'tset'; did you mean 'test'"),
        (Request("gsm8k", "test", data_dir="/nowhere"), "no folder '/nowhere'.*openai/gsm8k on the hub"),
        (Request("gsm8k", "test", answer_field="a"), "--answer-field is for data of your own"),
        (Request("gsm8k", "test"), "'openai/gsm8k' is .*--data-dir DIR names its folder"),
        (Request("aime2024", "test"), "did you mean 'aime24'"),
    ],
)
def test_benchmarks_refuse_what_they_are_not(request_: Request, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", unreachable)
    with pytest.raises(UserError, match=said):
        load(request_)


def test_the_hub_is_asked_for_the_config_and_the_hubs_name_of_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[tuple[Any, ...]] = []

    def stand_in(name: str, config: str | None, *, split: str, data_dir: str | None) -> Any:
        asked.append((name, config, split, data_dir))
        return datasets.Dataset.from_dict({"question": ["q"], "problem": ["q"], "answer": ["1"]})

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    monkeypatch.setattr("datasets.load_dataset", stand_in)
    for source, purpose in (("gsm8k", "test"), ("gsm8k", "train"), ("aime24", "test"), ("own/data", "test")):
        load(Request(source, purpose))
    load(Request("own/data", "train", data_dir="main"))
    assert asked == [
        ("openai/gsm8k", "main", "test", None), ("openai/gsm8k", "main", "train", None),
        ("HuggingFaceH4/aime_2024", None, "train", None), ("own/data", None, "test", None),
        ("own/data", None, "train", "main"),
    ]  # fmt: skip


# --- prompts --------------------------------------------------------------------------------------------------

SHOT = Example("0+1?", "It is 1.")


@pytest.mark.parametrize(
    ("prompting", "text"),
    [
        (Prompting(), "1+1?"),
        (Prompting(system="Be brief."), "Be brief.\n\n1+1?"),
        (Prompting(instruction="Box it."), "1+1?\nBox it."),
        (Prompting(instruction="1+1"), "1+1?"),  # it is there
        (
            Prompting("Be brief.", "Box it.", (SHOT,)),
            "Be brief.\n\n0+1?\nBox it.\nIt is 1.\n\n1+1?\nBox it.\n",
        ),
    ],
)
def test_what_is_put_around_a_text(prompting: Prompting, text: str) -> None:
    assert prompting("1+1?", chat=False) == text


def test_what_is_put_around_messages() -> None:
    whole = Prompting("Be brief.", "Box it.", (SHOT,))
    expected = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "0+1?\nBox it."},
        {"role": "assistant", "content": "It is 1."},
        {"role": "user", "content": "1+1?\nBox it."},
    ]
    assert whole("1+1?", chat=True) == expected
    assert whole([{"role": "user", "content": "1+1?"}], chat=False) == expected
    own = [{"role": "system", "content": "Mine."}, USER]
    assert Prompting()(own, chat=True) == own
    assert Prompting(instruction="Box it.")(own, chat=True)[-1]["content"] == "1 + 1?\nBox it."
    assert Prompting(examples=(Example(own, "2"),))(own, chat=True) == [
        own[0],
        USER,
        {"role": "assistant", "content": "2"},
        USER,
    ]
    with pytest.raises(UserError, match="system message of its own"):
        whole(own, chat=True)
    with pytest.raises(UserError, match="does not end in a user's message"):
        Prompting(instruction="Box it.")([USER, {"role": "assistant", "content": "<think>"}], chat=True)
    with pytest.raises(UserError, match="take both from alike data"):
        Prompting(examples=(Example([USER], "2"),))("1+1?", chat=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model", chat=True)


def sums(path: Path, numbers: range) -> str:
    return jsonl(path, [{"question": f"{n}+{n}?", "answer": f"twice\n#### {2 * n}"} for n in numbers])


def test_examples_are_never_asked(tmp_path: Path) -> None:
    path = sums(tmp_path / "d.jsonl", range(30))
    rows = problem(TrainOptions(dataset=path, reward="math", few_shot=2))
    assert rows.prompting.examples == (Example("0+0?", "twice\n#### 0"), Example("1+1?", "twice\n#### 2"))
    asked = [row["prompt"] for row in (*rows.train, *rows.heldout)]
    assert sorted(asked) == sorted(f"{n}+{n}?" for n in range(2, 30))
    assert rows.about["rows_shown_as_examples"] == 2
    options = EvalOptions(
        data=sums(tmp_path / "e" / "test.jsonl", range(3)), reward="math", few_shot=2, few_shot_data=path
    )
    found = questions.asked(options)
    assert found.about["prompting"]["examples"][0] == {"prompt": "3+3?", "response": "twice\n#### 6"}
    assert [one.fields["prompt"][:14] for one in found.questions] == ["3+3?\ntwice\n###"] * 3
    sums(tmp_path / "e" / "train.jsonl", range(5, 9))
    folder = EvalOptions(data=str(tmp_path / "e"), reward="math", few_shot=1)
    assert questions.asked(folder).about["prompting"]["examples"][0]["prompt"] == "5+5?"
    with pytest.raises(UserError, match=r"only 4 examples .*\(--few-shot 5\)"):
        questions.asked(EvalOptions(data=str(tmp_path / "e"), reward="math", few_shot=5))
    with pytest.raises(UserError, match="no training split to take examples from; give --few-shot-data"):
        questions.asked(EvalOptions(data=path, reward="math", few_shot=1))
    jsonl(tmp_path / "aime24.jsonl", [ROWS["aime24"]])
    with pytest.raises(UserError, match="no training split"):
        questions.asked(EvalOptions(data="aime24", data_dir=str(tmp_path), few_shot=1))


def test_long_prompts_are_left_out_and_counted(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "d.jsonl", [{"prompt": "1" * (10 * n), "answer": "1"} for n in range(1, 9)])
    tokenizer = load_tokenizer(str(tiny))
    counts = [len(tokenizer.apply_chat_template([{"role": "user", "content": "1" * (10 * n)}], add_generation_prompt=True,
                                                return_dict=False)) for n in range(1, 9)]  # fmt: skip
    for limit in (counts[4] - 1, counts[4]):  # at most so many
        fit = sum(count <= limit for count in counts)
        found = questions.asked(EvalOptions(data=path, reward="exact", model=str(tiny), max_prompt_tokens=limit))
        assert len(found.questions) == fit
        assert [bad.row for bad in found.bad] == list(range(fit + 1, 9))
        assert f"{8 - fit} of 8 questions are left out; the first, row {fit + 1}" in capsys.readouterr().err
        asked = TrainOptions(dataset=path, reward="exact", model=str(tiny), max_prompt_tokens=limit, eval_size=3)
        shown = prompted(problem(asked), asked, tokenizer)
        assert len(shown.train) + len(shown.heldout) == fit
        assert sum(shown.about["longer_than_max_prompt_tokens"].values()) == 8 - fit
        assert "rows (train) are left out" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"at most 3 tokens .*the shortest has"):
        prompted(problem(asked), TrainOptions(max_prompt_tokens=3), tokenizer)
    with pytest.raises(UserError, match="no prompt has at most 3 tokens"):
        questions.asked(EvalOptions(data=path, reward="exact", model=str(tiny), max_prompt_tokens=3))


def test_the_instruction_of_a_benchmark_and_its_default_reward(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jsonl(tmp_path / "gsm8k_test.jsonl", [{"question": "2+2?", "answer": "#### 4"}])
    asked: dict[str, Any] = {"data": "gsm8k", "data_dir": str(tmp_path), "model": str(tiny)}
    usual, without = questions.asked(EvalOptions(**asked)), questions.asked(EvalOptions(**asked, instruction=""))
    assert usual.reward_name == "math"
    assert usual.questions[0].fields["prompt"] == [{"role": "user", "content": f"2+2?\n{BOXED}"}]
    assert usual.about["prompting"]["instruction"] == BOXED
    assert capsys.readouterr().err.count("--instruction '' leaves it out") == 1
    assert without.questions[0].fields["prompt"] == "2+2?"
    assert usual.questions[0].id == without.questions[0].id  # a question is its row: such runs can be compared
    assert questions.fingerprint(usual.questions) != questions.fingerprint(without.questions)
    plain = questions.asked(EvalOptions(**asked, plain_prompts=True, system="S"))
    assert plain.questions[0].fields["prompt"] == f"S\n\n2+2?\n{BOXED}"
    assert questions.asked(EvalOptions(**asked, reward="numeric")).reward_name == "numeric"


def test_training_leaves_bad_rows_out_and_says_so(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": f"{n}+{n}?", "answer": f"{2 * n}"} for n in range(40)]
    path = jsonl(tmp_path / "d.jsonl", [*rows, {"question": "x"}, {"question": "", "answer": "1"}])
    (tmp_path / "own.py").write_text(
        "def score(prompts, completions, **columns):\n"
        "    assert all(prompt[0] == {'role': 'system', 'content': 'Be brief.'} for prompt in prompts), prompts[0]\n"
        "    assert all(prompt[-1]['content'].endswith('?\\nBox it.') for prompt in prompts), prompts[0]\n"
        "    return [float(i % 2) for i in range(len(prompts))]\n"
    )
    words = ["train", "--dataset", path, "--reward", f"{tmp_path}/own.py:score", "--model", str(tiny), "--eval-size", "4",
             "--max_steps", "1", "--per_device_train_batch_size", "8", "--max_completion_length", "4",
             "--system", "Be brief.", "--instruction", "Box it.", "--out", str(tmp_path / "run")]  # fmt: skip
    assert main(words) == 2
    assert "row 41: the answer (column 'answer') is null" in capsys.readouterr().err
    assert main([*words, "--skip-bad-rows"]) == 0
    out, err = capsys.readouterr()
    assert "2 of 42 rows are bad and left out: row 41: the answer" in err
    assert "2 bad rows are left out" in out
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert [one["row"] for one in manifest["rows"]["skipped_rows"]] == [41, 42]
    assert manifest["rows"]["prompting"] == {"system": "Be brief.", "instruction": "Box it.", "examples": []}
    assert (manifest["rows"]["rows_read"], manifest["options"]["skip_bad_rows"]) == (42, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"task": "sort", "split": "test"}, "--split is about data of --"),
        ({"skip_bad_rows": True}, "--skip-bad-rows is about data of --"),
        ({"few_shot": -1}, "--few-shot -1 must be at least 0"),
        ({"few_shot_data": "d"}, "--few-shot-data needs --few-shot"),
        ({"max_prompt_tokens": 0}, "--max-prompt-tokens 0 must be at least 1"),
    ],
)
def test_options_that_mean_nothing_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        EvalOptions(**change)
    with pytest.raises(UserError, match=said):
        problem(TrainOptions(**change))


def test_prompts_of_a_task_can_be_shaped_too() -> None:
    found = problem(TrainOptions(system="Sort.", few_shot=1))
    assert len(found.prompting.examples) == 1
    assert found.prompting.examples[0].prompt not in [row["prompt"] for row in (*found.train, *found.heldout)]
    first = questions.asked(EvalOptions(system="Sort.", few_shot=1)).questions[0].fields["prompt"]
    assert re.fullmatch(r"Sort\.\n\n(\d{10}=\n\d{10})\n\n\d{10}=\n", first)


# --- the page -------------------------------------------------------------------------------------------------


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "data.md", "exec"), {"__name__": "page"})


def test_the_page_names_every_benchmark_shape_and_option() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| `(\S+?)(?:, (\w+))?` \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    assert rows == [
        (one.name, one.hub, one.config or "", ", ".join(f"{s.name} {s.rows:,}" for s in one.splits), one.origin)
        for one in BENCHMARKS.values()
    ]
    for shape in SHAPES:
        assert f"`{shape}`" in PAGE
    verbs = next(action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)).choices
    for option in re.findall(r"^\| `(--[a-z-]+)", PAGE, re.MULTILINE):
        for verb in ("train", "eval"):
            assert option in verbs[verb]._option_string_actions, (verb, option)


@pytest.mark.parametrize("answer", ["", "  ", "#### 3\n#### "])
def test_an_empty_answer_is_a_bad_row(answer: str, tmp_path: Path) -> None:
    source = tmp_path / "d.jsonl"
    rows = [{"question": "1+1?", "answer": answer}, {"question": "1+2?", "answer": "3"}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load(Request(str(source), skip_bad_rows=True))
    assert [one.row for one in found.bad] == [1]
    with pytest.raises(UserError, match=r"row 1|line 1"):
        load(Request(str(source)))
