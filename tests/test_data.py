"""Data: every format, hostile files, errors that name line, row or column, held-out splits."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from klamp.data import Request, load, split_heldout
from klamp.errors import UserError

datasets = pytest.importorskip("datasets")

MAWPS = (
    '{"input":"Joan found 70 seashells on the beach . she gave Sam some of her seashells . '
    'She has 27 seashell . How many seashells did she give to Sam ?","target":43.0}\n'
    '{"input":"There were 28 bales of hay in the barn . Tim stacked bales in the barn today . '
    'There are now 54 bales of hay in the barn . How many bales did he store in the barn ?","target":26.0}\n'
)


def load_rows(source: Path | str, **options: Any) -> Any:
    return load(Request(str(source), **options)).dataset


def write(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_jsonl_of_numbers(tmp_path: Path) -> None:
    rows = load_rows(write(tmp_path, "a.jsonl", MAWPS), prompt_field="input", answer_field="target")
    assert rows.column_names == ["prompt", "answer"]
    assert rows["answer"][:] == ["43.0", "26.0"]
    assert rows[0]["prompt"].startswith("Joan found 70 seashells")
    assert load_rows(tmp_path / "a.jsonl")[:] == rows[:]  # the fields are found


@pytest.mark.parametrize("answer", ["x", 5, 5.5, True])
def test_answers_become_text(tmp_path: Path, answer: Any) -> None:
    path = write(tmp_path, "a.json", json.dumps([{"question": "q", "answer": answer}]))
    assert load_rows(path)["answer"][:] == [str(answer)]


def test_mixed_answer_types_and_other_columns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [
        {"problem": "p", "solution": "s", "answer": 1, "mixed": 1, "images": "x", "kept": 1},
        {"problem": "q", "solution": "t", "answer": "two", "mixed": "a", "images": "y", "extra": [1]},
    ]
    rows = load_rows(write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, lines))))
    assert rows[:] == {
        "prompt": ["p", "q"],
        "answer": ["1", "two"],
        "solution": ["s", "t"],
        "kept": [1, None],
        "extra": [None, [1]],
    }
    assert "'mixed' is left out" in caplog.text
    assert "'images' is left out" in caplog.text


def test_the_final_part_of_a_worked_answer(tmp_path: Path) -> None:
    text = "He sells 9 * 2 = <<9*2=18>>18.\n#### 18 "
    assert load_rows(write(tmp_path, "a.json", json.dumps([{"question": "q", "answer": text}])))["answer"][:] == ["18"]
    with pytest.raises(UserError, match=r"row 1: the answer .* has nothing after its last ####"):
        load_rows(write(tmp_path, "b.json", json.dumps([{"question": "q", "answer": "#### "}])))


def test_parquet_csv_folder_and_saved_dataset_agree(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"question": ["a", "b", "c"], "answer": [1, 2, 3], "level": [3, 2, 1]})
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table, "test": table.select([2])}).save_to_disk(tmp_path / "dict")
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder", "train-1.jsonl", '{"question": "c", "answer": 3, "level": 1}\n')
    write(tmp_path / "folder", "train-0.csv", "question,answer,level\na,1,3\nb,2,2\n")
    write(tmp_path / "folder", "test.csv", "question,answer,level\nz,9,9\n")
    expected = {"prompt": ["a", "b", "c"], "answer": ["1", "2", "3"], "level": [3, 2, 1]}
    for source in ("rows.parquet", "saved", "dict"):
        assert load_rows(tmp_path / source)[:] == expected
    assert load_rows(tmp_path, data_dir="saved")[:] == expected
    assert load_rows(tmp_path / "dict", split="test")["prompt"][:] == ["c"]
    assert load_rows(tmp_path / "folder", split="test")["answer"][:] == ["9"]
    folder = load_rows(tmp_path / "folder")
    assert folder["prompt"][:] == ["a", "b", "c"]
    assert folder["answer"][:] == ["1", "2", "3"]
    for source in ("dict", "folder"):
        with pytest.raises(UserError, match="no split 'tset'; did you mean 'test'"):
            load_rows(tmp_path / source, split="tset")


def test_order_of_a_shuffled_dataset_is_its_own(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"prompt": list("abcd"), "answer": list("1234")}).select([3, 1, 0])
    table.save_to_disk(tmp_path / "s")
    assert load_rows(tmp_path / "s")[:] == {"prompt": ["d", "b", "a"], "answer": ["4", "2", "1"]}


def test_chat_prompts(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1"}]
    path = write(tmp_path, "a.jsonl", json.dumps({"prompt": chat, "answer": 2}))
    assert load_rows(path)[0] == {"prompt": chat, "answer": "2"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", "\n\n", "is empty"),
        ("a.json", "[]", "is empty"),
        ("a.csv", "prompt,answer\n", "is empty"),
        ("a.jsonl", '{"prompt": "p", "answer": 1}\n{"prompt": "q", \n', "line 2.*malformed JSON"),
        ("a.jsonl", '{"prompt": "p", "answer": 1}\n[1]\n', "line 2: expected an object .* found a list"),
        ("a.jsonl", '{"prompt": "p", "answer": 1, "answer": 2}\n', "line 1: a key appears twice"),
        (
            "a.jsonl",
            b'{"prompt": "p", "answer": 1}\n{"prompt": "\xff", "answer": 1}\n',
            "line 2: not UTF-8 .*0xff",
        ),
        ("a.jsonl", '{"prompt": "\\ud800", "answer": 1}\n', "line 1: malformed JSON.*surrogates"),
        ("a.jsonl", "[" * 100_000, "malformed JSON"),
        ("a.jsonl", '{"prompt": "p", "answer": ' + "[" * 100_000 + "\n", "line 1.*malformed JSON"),
        ("a.jsonl", '{"prompt": "p", "answer": ' + "9" * 5000 + "}\n", "line 1.*malformed JSON"),
        (
            "a.jsonl",
            '{"prompt": "p", "answer": 1}\n{"prompt": "q", "answer": null}\n',
            "row 2: the answer .* is null",
        ),
        ("a.jsonl", '{"prompt": "p", "answer": NaN}\n', "row 1: the answer .* is null"),
        ("a.jsonl", '{"prompt": "p", "answer": 1}\n{"answer": 1}\n', "row 2: the prompt .* is null"),
        ("a.jsonl", '{"prompt": " ", "answer": 1}\n', "row 1: the prompt .* is empty"),
        ("a.jsonl", '{"prompt": 5, "answer": 1}\n', "row 1: the prompt .* is a number"),
        ("a.jsonl", '{"prompt": {"a": 1}, "answer": 1}\n', "row 1: the prompt .* is an object"),
        ("a.jsonl", '{"prompt": [[1]], "answer": 1}\n', "row 1: the prompt .* without a text role"),
        ("a.jsonl", '{"prompt": [{"role": "user"}], "answer": 1}\n', "without a text role and content"),
        (
            "a.jsonl",
            '{"prompt": "p", "answer": 1}\n{"prompt": [{"role": "user", "content": "x"}], "answer": 1}\n',
            "row 2: .* is a list, but row 1 is a text",
        ),
        ("a.jsonl", '{"prompt": "p", "answer": [1]}\n', "row 1: the answer .* is a list"),
        ("a.jsonl", '{"prompts": "p", "answer": 1}\n', r"has the columns \['prompts', 'answer'\]"),
        ("a.csv", "prompt,answer,answer\na,1,2\n", "more than one column 'answer'"),
        ("a.csv", "prompt,answer\na,1\nb\n", "line 3: 1 cells, but the header has 2"),
        ("a.csv", "prompt,answer\na,\n", "row 1: the answer .* is null"),
        ("a.csv", 'prompt,answer\n"a"b,1\n', "malformed CSV"),
        ("a.csv", b"prompt,answer\na\xe9,1\n", "line 2: not UTF-8"),
        ("a.parquet", "not parquet", "not a readable Parquet file"),
        ("a.txt", "x", "ends in '.txt'"),
    ],
)
def test_bad_files_say_where(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_rows(write(tmp_path, name, content))


def test_a_byte_order_mark_and_a_huge_line(tmp_path: Path) -> None:
    long = "x" * 5_000_000
    for name, text in (
        ("a.jsonl", json.dumps({"prompt": long, "answer": 1})),
        ("a.csv", f"prompt,answer\n{long},1\n"),
    ):
        rows = load_rows(write(tmp_path, name, b"\xef\xbb\xbf" + text.encode()))
        assert rows.column_names == ["prompt", "answer"]
        assert len(rows[0]["prompt"]) == 5_000_000


def test_missing_columns_and_files_name_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path, "mawps.jsonl", MAWPS)
    with pytest.raises(UserError, match=r"no column 'imput'.*did you mean 'input'.*input, target"):
        load_rows(path, prompt_field="imput")
    with pytest.raises(UserError, match="cannot be both"):
        load_rows(path, prompt_field="input", answer_field="input")
    with pytest.raises(UserError, match=r"no file .*did you mean 'mawps.jsonl'"):
        load_rows(tmp_path / "mawp.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no file that ends in"):
        load_rows(tmp_path / "empty")
    with pytest.raises(UserError, match="no file or folder"):
        load_rows(tmp_path, data_dir="nowhere")


@pytest.mark.parametrize("answers", [False, True])
def test_an_unreachable_hub_fails_soon(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that refuses, and one that accepts and then says nothing."""
    import huggingface_hub

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answers:
            server.listen(8)
            monkeypatch.setattr("klamp.data.hub.HUB_TIMEOUT", 1.0)
        api = huggingface_hub.HfApi(endpoint=f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
        start = time.monotonic()
        with pytest.raises(UserError, match="'nobody/nothing' is neither an existing file nor reachable on the hub"):
            load_rows("nobody/nothing")
        assert time.monotonic() - start < 5.0


def test_held_out_rows_share_no_prompt() -> None:
    prompts = [f"p{i % 40}" + " " * (i % 3) for i in range(100)]  # repeated, up to white space
    rows = datasets.Dataset.from_dict({"prompt": prompts, "answer": list(map(str, range(100)))})
    train, heldout = split_heldout(rows, 10, seed=0)
    assert len(heldout) == 10
    assert len(train) == 90
    assert not {p.strip() for p in train["prompt"]} & {p.strip() for p in heldout["prompt"]}
    assert sorted(map(int, [*train["answer"], *heldout["answer"]])) == list(range(100))
    assert [int(a) for a in train["answer"]] == sorted(int(a) for a in train["answer"])
    assert split_heldout(rows, 10, seed=0)[1][:] == heldout[:]
    assert split_heldout(rows, 10, seed=1)[1][:] != heldout[:]
    shuffled = split_heldout(rows.select(range(99, -1, -1)), 10, seed=0)[1]
    assert set(shuffled["answer"]) == set(heldout["answer"])  # the order of the rows does not matter
    assert len(split_heldout(rows, 0, seed=0)[1]) == 0


@pytest.mark.parametrize("n", [-1, 4, 100])
def test_too_many_held_out_rows_are_refused(n: int) -> None:
    with pytest.raises(UserError, match="of 4 rows"):
        split_heldout(datasets.Dataset.from_dict({"prompt": list("abcd"), "answer": list("1234")}), n, seed=0)
    with pytest.raises(UserError, match="repeated"):
        split_heldout(datasets.Dataset.from_dict({"prompt": list("aabb"), "answer": list("1234")}), 1, seed=0)
