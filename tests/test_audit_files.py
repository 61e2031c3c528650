"""What the audit reads, under whose names; and files that are broken or mean harm: exit code 2 and one line."""

from __future__ import annotations

import csv
import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from audit_parts import Rows, masked, rows, write
from hostile import Trap

from klamp.audit.command import audit
from klamp.audit.engine import Request, collect
from klamp.cli import main
from klamp.errors import UserError

SPECS = ["grpo", "dppo_tv"]
RUN = rows(2, steps=4, responses=16)


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same counts; sums up to the digits that a log wrote."""
    assert one["log"]["tokens"] == other["log"]["tokens"]
    assert one["log"]["steps"] == other["log"]["steps"]
    for a, b in zip(one["specs"], other["specs"], strict=True):
        assert a["removed"]["low"] == b["removed"]["low"]
        assert a["removed"]["high"] == b["removed"]["high"]
        for name in ("step", "removed_low", "removed_high", "outside"):
            assert [row[name] for row in a["by_step"]] == [row[name] for row in b["by_step"]]
    assert one["log"]["kl_old_new"]["k3"] == pytest.approx(other["log"]["kl_old_new"]["k3"], rel=1e-5)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return audit([str(write(tmp_path_factory.mktemp("ours"), RUN))], SPECS)


def dump(path: Path, lines: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


# --- formats --------------------------------------------------------------------------------------------------


def prime_rl(found: Rows, root: Path) -> Path:
    """As prime-rl exports tokens: a prompt of masked tokens first, one file to a step and rank."""
    for step in {row["step"] for row in found}:
        for rank in (0, 1):
            lines = []
            for row in found:
                if row["step"] == step and row["row"] % 2 == rank:
                    prompt = 3
                    lines.append({
                        "schema_version": 1, "step": step, "export_step": step, "rank": rank, "micro_step": 0, "env_name": "math",
                        "token_ids": [7] * prompt + row["token_ids"], "loss_mask": [False] * prompt + row["mask"],
                        "advantages": [None] * prompt + row["advantage"], "rewards": [row["reward"]] * (prompt + len(row["mask"])),
                        "inference_logprobs": [0.0] * prompt + row["logp_old"], "trainer_logprobs": [None] * prompt + row["logp_new"],
                        "entropy": [None] * prompt + row["entropy"], "is_masked": [False] * (prompt + len(row["mask"])),
                    })  # fmt: skip
            dump(root / "token_exports" / f"step_{step}" / f"rank_{rank}.jsonl", lines)
    return root / "token_exports"


def test_prime_rl(ours: dict[str, Any], tmp_path: Path) -> None:
    folder = prime_rl(RUN, tmp_path)
    found = audit([str(folder)], SPECS)
    same(found, ours)
    assert found["kinds"] == ["prime-rl"]
    assert any("trainer/inference" in note for note in found["notes"])
    same(audit([str(folder / "step_*" / "rank_*.jsonl")], SPECS), ours)


def test_verl(ours: dict[str, Any], tmp_path: Path) -> None:
    """A rollout dump with log-probs: the step in the file, groups by the prompt."""
    lines = [
        {"input": row["prompt_id"], "output": "text", "gts": "1", "score": row["reward"], "step": row["step"], "response_mask": [int(m) for m in row["mask"]],
         "old_log_probs": row["logp_old"], "rollout_log_probs": row["logp_rollout"], "log_probs": row["logp_new"], "advantages": row["advantage"]} for row in RUN
    ]  # fmt: skip
    log = dump(tmp_path / "rollouts" / "all.jsonl", lines)
    found = audit([log], [*SPECS, "m2po"])
    assert found["kinds"] == ["verl"]
    assert found["log"]["kl_rollout_old"]["k3"] == pytest.approx(5e-5, rel=0.2)
    same(found | {"specs": found["specs"][:2]}, audit([str(write(tmp_path / "w", RUN))], SPECS))


def test_trl_parquet(ours: dict[str, Any], tmp_path: Path) -> None:
    table = pa.table({
        "step": [row["step"] for row in RUN], "prompt": [row["prompt_id"] for row in RUN], "completion": ["text"] * len(RUN),
        "advantage": [row["advantage"][0] for row in RUN], "old_per_token_logps": [row["logp_old"] for row in RUN],
        "per_token_logps": [row["logp_new"] for row in RUN], "sampling_per_token_logps": [row["logp_rollout"] for row in RUN],
        "accuracy_reward": [row["reward"] for row in RUN],
    })  # fmt: skip
    pq.write_table(table, tmp_path / "completions_00001.parquet", row_group_size=10)
    found = audit([str(tmp_path)], SPECS)
    assert found["kinds"] == ["TRL"]
    same(found, ours)


def test_csv_of_lists_and_of_tokens(ours: dict[str, Any], tmp_path: Path) -> None:
    names = {"s": "step", "id": "row", "now": "logp_new", "before": "logp_old", "A": "advantage"}
    maps = {ours_: theirs for theirs, ours_ in names.items()}
    with (tmp_path / "lists.csv").open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(names)
        writer.writerows([[json.dumps(row[name]) for name in names.values()] for row in RUN])
    same(audit([str(tmp_path / "lists.csv")], SPECS, mapping=maps), ours)
    with (tmp_path / "tokens.csv").open("w", newline="") as handle:
        writer = csv.writer(handle, delimiter=";")
        writer.writerow(names)
        for row in RUN:
            for k in range(len(row["mask"])):
                writer.writerow([row["step"], row["row"], row["logp_new"][k], row["logp_old"][k], row["advantage"][k]])
    same(audit([str(tmp_path / "tokens.csv")], SPECS, mapping=maps), ours)


def test_parquet_under_other_names(ours: dict[str, Any], tmp_path: Path) -> None:
    table = pa.table({"a": pa.array([row["logp_new"] for row in RUN], pa.large_list(pa.float64())), "b": [row["logp_old"] for row in RUN],
                      "adv": [row["advantage"] for row in RUN], "t": pa.array([row["step"] for row in RUN], pa.int16())})  # fmt: skip
    pq.write_table(table, tmp_path / "x.parquet")
    same(
        audit(
            [str(tmp_path / "x.parquet")],
            SPECS,
            mapping={"logp_new": "a", "logp_old": "b", "advantage": "adv", "step": "t"},
        ),
        ours,
    )


def test_masked_records(tmp_path: Path) -> None:
    """What lies under the mask is never seen: NaN there changes nothing."""
    found = masked(RUN, 0.3)
    clean = [row | {name: np.nan_to_num(row[name]).tolist() for name in ("logp_new", "advantage")} for row in found]
    one, other = (audit([str(write(tmp_path / name, log))], SPECS) for name, log in (("a", found), ("b", clean)))
    assert {**one, "files": 0} == {**other, "files": 0}


def test_rows_without_the_samplers_log_probs_are_left_out_where_a_spec_reads_them(tmp_path: Path) -> None:
    found = [
        row | ({"logp_rollout": [float("nan"), *row["logp_rollout"][1:]]} if row["row"] == 3 else {}) for row in RUN
    ]
    log = str(write(tmp_path, found))
    whole, less = audit([log], ["grpo"]), audit([log], ["grpo", "icepop"])
    assert whole["log"]["responses"] == 64
    assert less["log"]["responses"] == 60
    assert "4 are left out" in less["findings"][0]["evidence"]


def test_unknown_shapes_say_what_was_found_and_what_is_needed(tmp_path: Path) -> None:
    log = dump(tmp_path / "x.jsonl", [{"prompt": "p", "completion": "c", "reward": 1.0, "logprobs": [-1.0]}])
    with pytest.raises(
        UserError,
        match=r"found 'prompt', 'completion', 'reward', 'logprobs'; needed log-probs of two policies .* and advantage, of which it has logp_rollout",
    ):
        audit([log], SPECS)
    with pytest.raises(UserError, match="klamp has no column 'logp_odl'; did you mean 'logp_old'"):
        main_words(["audit", log, "--map", "logp_odl=x"])
    with pytest.raises(UserError, match="--map logp_old=nope, but it has no such column; found 'prompt'"):
        audit([log], SPECS, mapping={"logp_old": "nope"})


def main_words(words: list[str]) -> None:
    """The verb without the wall around it."""
    from klamp.audit.command import run
    from klamp.cli import _parser

    run(_parser().parse_args(words))


# --- broken and hostile files ---------------------------------------------------------------------------------

LINE = {"logp_new": [-1.0, -2.0], "logp_old": [-1.0, -2.5], "advantage": [1.0, 1.0]}
ENDINGS = (".parquet", ".jsonl", ".json", ".csv", ".tsv", ".ndjson", ".bin")


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["audit", *words, "--spec", "grpo", "--jobs", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == "", "a part of a report"
    assert err.startswith("klamp: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("content", [
    b"", b"PAR1", b"PAR1PAR1", b"PAR1" + b"\xff" * 40 + b"\xff\xff\xff\x7fPAR1", b"\x00" * 100, b"[" * 100_000, b'{"a":' * 50_000, b"not a log", b"\xff\xfe" * 50,
    b"[1, 2]", b"null\n", b'{"logp_new": [1', b"{}\n", b"a,b\n1,2\n", b"logp_new,logp_old,advantage\n[,2,3\n",
])  # fmt: skip
def test_files_that_are_no_log(content: bytes, ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"log{ending}"
    path.write_bytes(content)
    refused([str(path)], capsys)


@pytest.mark.parametrize("ending", ENDINGS)
def test_no_pickle_is_loaded(ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "mark"
    (tmp_path / f"log{ending}").write_bytes(pickle.dumps(Trap(str(mark))))
    refused([str(tmp_path / f"log{ending}")], capsys)
    assert not mark.exists()


@pytest.mark.parametrize("change", [
    {"logp_new": [-1.0]}, {"logp_new": [-1.0, None]}, {"logp_new": [-1.0, float("nan")]}, {"logp_old": [float("-inf"), -1.0]}, {"logp_new": "text"}, {"logp_new": [[1], [2]]},
    {"logp_new": ["a", "b"]}, {"logp_new": -1.0}, {"logp_new": [10**400, 0]}, {"advantage": "x"}, {"advantage": None}, {"advantage": [1.0]}, {"step": -1}, {"step": 1.5},
    {"step": 1e300}, {"step": "x"}, {"mask": [2, 0]}, {"mask": [False, False]}, {"token_ids": [-5, 1]}, {"token_ids": [2**40, 1]}, {"logp_new": {}}, {"row": [1, 2]},
])  # fmt: skip
def test_rows_that_do_not_fit(change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused([dump(tmp_path / "x.jsonl", [LINE | change])], capsys)
    assert "x.jsonl" in said


def test_a_log_that_is_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = dump(tmp_path / "x.jsonl", [LINE] * 10)
    text = Path(log).read_text()
    Path(log).write_text(text[:-20])
    assert "line 10 is not JSON" in refused([log], capsys)
    part = next(write(tmp_path / "p", RUN).glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:-100])
    assert "not a readable Parquet file" in refused([str(part)], capsys)


def test_lists_that_differ_in_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(
        pa.table({"logp_new": [[-1.0], [-1.0, -2.0]], "logp_old": [[-1.0], [-1.0]], "advantage": [1.0, 1.0]}),
        tmp_path / "x.parquet",
    )
    assert "response 1 has 2 logp_new and 1 logp_old" in refused([str(tmp_path / "x.parquet")], capsys)
    pq.write_table(pa.table({"logp_new": [{"a": 1}], "logp_old": [[-1.0]], "advantage": [1.0]}), tmp_path / "y.parquet")
    refused([str(tmp_path / "y.parquet")], capsys)


def varint(value: int) -> bytes:
    out = b""
    value *= 2  # zigzag of a number above 0
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def test_metadata_of_a_billion_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.parquet"
    n = 12345
    pq.write_table(
        pa.table(
            {"step": np.zeros(n, int), "logp_new": [[-1.0]] * n, "logp_old": [[-1.0]] * n, "advantage": np.ones(n)}
        ),
        path,
    )
    data = path.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    body, footer = data[: -8 - size], data[-8 - size : -8]
    claimed = footer.replace(b"\x16" + varint(n), b"\x16" + varint(10**9))
    assert claimed != footer
    path.write_bytes(body + claimed + len(claimed).to_bytes(4, "little") + b"PAR1")
    assert pq.ParquetFile(path).metadata.num_rows == 10**9
    refused([str(path)], capsys)


def test_any_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    """Bytes changed anywhere in records: an error of ours or a whole audit, nothing else."""
    whole = next(write(tmp_path / "p", rows(1, steps=2, responses=4)).glob("*.parquet")).read_bytes()
    draw = random.Random(0)
    seen = {"refused": 0, "read": 0}
    path = tmp_path / "x.parquet"
    for trial in range(300):
        data = bytearray(whole)
        start = len(data) - 6000 if trial % 2 else 0  # the footer, or anywhere
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(max(start, 0), len(data))] = draw.randrange(256)
        path.write_bytes(bytes(data))
        try:
            collect([str(path)], Request(("grpo",)))
            seen["read"] += 1
        except UserError:
            seen["refused"] += 1
    assert seen["refused"] > 50


def test_files_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist" in refused([str(tmp_path / "none.parquet")], capsys)
    assert "holds no token log" in refused([str(tmp_path)], capsys)
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "no regular file" in refused([str(tmp_path / "pipe.jsonl")], capsys)
    assert main(["audit", str(tmp_path), "--by", "colour"]) == 2
    assert main(["audit"]) == 2
    assert main(["audit", str(tmp_path), "--html", str(tmp_path / "no" / "x.html")]) == 2


def test_a_folder_gives_the_log_that_is_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "tokens", RUN)
    dump(tmp_path / "metrics.jsonl", [{"step": 1}])
    (tmp_path / "config.json").write_text("{}")
    assert audit([str(tmp_path)], SPECS)["log"]["responses"] == len(RUN)
    dump(tmp_path / "dumps" / "2.jsonl", [LINE | {"step": 2}])
    dump(tmp_path / "dumps" / "10.jsonl", [LINE | {"step": 10}])
    (tmp_path / "dumps" / "config.json").write_text("{}")
    assert audit([str(tmp_path / "dumps")], SPECS)["log"]["responses"] == 2
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{}")
    assert "with --record-tokens" in refused([str(tmp_path / "run")], capsys)
    if os.getuid():  # root may read everything
        (tmp_path / "dumps" / "2.jsonl").chmod(0)
        assert "cannot read" in refused([str(tmp_path / "dumps")], capsys)


def test_bad_rows_can_be_skipped(tmp_path: Path) -> None:
    log = dump(tmp_path / "x.jsonl", [LINE, LINE | {"logp_new": [-1.0, None]}, LINE])
    found = audit([log], ["grpo"], skip_bad_rows=True)
    assert found["log"]["responses"] == 2
    assert "1 responses left out" in found["findings"][0]["evidence"]
