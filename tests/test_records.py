"""Token records: the schema and its document agree, parts are whole, and the sample depends on nothing else."""

from __future__ import annotations

import hashlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from klamp.errors import UserError
from klamp.records import RECORD_SCHEMA, RecordWriter, arrow_schema, read_records

DOC = Path(__file__).parents[1] / "docs" / "records.md"


def record(step: int, row: int, tokens: int = 3, **changes: Any) -> dict[str, Any]:
    numbers = [0.5 * k - row for k in range(tokens)]
    return {
        "prompt_id": f"p{row // 4}",
        "group": row // 4,
        "row": row,
        "step": step,
        "micro_step": row // 8,
        "token_ids": list(range(tokens)),
        "logp_new": numbers,
        "logp_old": numbers,
        "advantage": [1.0] * tokens,
        "mask": [True] * tokens,
        "reward": 1.0,
        "kept": [k != 1 for k in range(tokens)],
        "g": [0.0 if k == 1 else 1.25 for k in range(tokens)],
    } | changes


def keys(table: pa.Table) -> list[tuple[int, int]]:
    return list(zip(table["step"].to_pylist(), table["row"].to_pylist(), strict=True))


def test_document_and_schema_are_equal():
    rows = [line for line in DOC.read_text().splitlines() if line.startswith("| ")]
    cells = [tuple(cell.strip().strip("`") for cell in row.strip("|").split("|")) for row in rows]
    assert cells[0] == ("column", "type", "unit", "null means", "meaning")
    assert cells[1:] == [(c.name, c.type, c.unit, c.null, c.meaning) for c in RECORD_SCHEMA]
    assert f'klamp.schema = "{arrow_schema().metadata[b"klamp.schema"].decode()}"' in DOC.read_text()


def test_arrow_types():
    schema = arrow_schema()
    expected = {
        "prompt_id": pa.string(),
        **dict.fromkeys(("group", "row", "step", "micro_step"), pa.int64()),
        "token_ids": pa.int32(),
        **dict.fromkeys(("logp_new", "logp_old", "logp_rollout", "logp_ref", "advantage"), pa.float32()),
        "mask": pa.bool_(),
        "reward": pa.float32(),
        "entropy": pa.float32(),
        "kept": pa.bool_(),
        "g": pa.float32(),
    }
    assert schema.names == list(expected)
    for field in schema:
        inner = field.type.value_type if pa.types.is_list(field.type) else field.type
        assert inner == expected[field.name], field.name
    nullable = {field.name for field in schema if field.nullable}
    assert nullable == {"logp_new", "logp_old", "logp_rollout", "logp_ref", "reward", "entropy"}


def test_round_trip_keeps_values_nulls_and_nans(tmp_path):
    full = record(7, 0, logp_rollout=np.array([-0.1, np.nan, -3.0]), logp_ref=[-1, -2, -3], entropy=[0.1, 0.2, 0.3])
    bare = record(7, 1, tokens=1, reward=None, logp_new=None, logp_old=None)
    empty = record(7, 2, tokens=0)
    with RecordWriter(tmp_path) as writer:
        writer.write([full, bare])
        writer.write(row for row in [empty])
    assert (writer.written, writer.sampled_out) == (3, 0)
    table = read_records(tmp_path)
    assert table.schema.equals(arrow_schema(), check_metadata=True)
    first, second, third = table.to_pylist()
    assert first["logp_rollout"][0] == np.float32(-0.1)
    assert math.isnan(first["logp_rollout"][1])
    assert first["logp_new"] == [0.0, 0.5, 1.0]
    assert first["g"] == [1.25, 0.0, 1.25]
    assert first["kept"] == [True, False, True]
    assert first["prompt_id"] == "p0"
    assert [second[name] for name in ("reward", "logp_new", "logp_old", "logp_ref", "entropy")] == [None] * 5
    assert third["token_ids"] == []
    assert third["logp_rollout"] is None


def test_tensors_are_taken_as_they_are(tmp_path):
    torch = pytest.importorskip("torch")
    row = record(
        0,
        3,
        logp_new=torch.tensor([-1.5, -2.0, 0.25], dtype=torch.bfloat16, requires_grad=True),
        mask=torch.tensor([True, False, True]),
        reward=torch.tensor(0.5),
    )
    with RecordWriter(tmp_path) as writer:
        writer.write([row | {"row": torch.tensor(3)}])
    (back,) = read_records(tmp_path).to_pylist()
    assert back["logp_new"] == [-1.5, -2.0, 0.25]
    assert back["mask"] == [True, False, True]
    assert back["reward"] == 0.5
    assert back["row"] == 3


def test_each_flush_is_one_numbered_part_and_a_new_writer_goes_on(tmp_path):
    writer = RecordWriter(tmp_path / "tokens")
    assert writer.flush() is None
    writer.write([record(0, 0)])
    assert list(writer.directory.iterdir()) == []
    assert writer.flush() == tmp_path / "tokens" / "part-000000.parquet"
    assert writer.flush() is None
    with RecordWriter(tmp_path / "tokens", rows_per_part=2) as again:
        again.write([record(1, 0)])
        again.write([record(1, 1)])  # the buffer is full: written
        again.write([record(1, 2)])
        assert len(list(again.directory.iterdir())) == 2
    names = sorted(path.name for path in (tmp_path / "tokens").iterdir())
    assert names == ["part-000000.parquet", "part-000001.parquet", "part-000002.parquet"]
    assert keys(read_records(tmp_path / "tokens")) == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert keys(read_records(tmp_path / "tokens" / names[1])) == [(1, 0), (1, 1)]


def test_two_writers_share_a_directory(tmp_path):
    one, two = RecordWriter(tmp_path), RecordWriter(tmp_path)
    for k in range(5):
        one.write([record(k, 0)])
        two.write([record(k, 1)])
        one.flush()
        two.flush()
    assert len(list(tmp_path.iterdir())) == 10
    assert sorted(keys(read_records(tmp_path))) == [(k, row) for k in range(5) for row in (0, 1)]


def test_parts_stay_in_order_beyond_the_padding(tmp_path):
    for number, step in ((999_999, 0), (1_000_000, 1)):
        writer = RecordWriter(tmp_path)
        writer._next = number
        writer.write([record(step, 0)])
        writer.flush()
    assert keys(read_records(tmp_path)) == [(0, 0), (1, 0)]
    assert RecordWriter(tmp_path)._next == 1_000_001


def test_an_error_inside_the_context_keeps_what_was_written(tmp_path):
    def stopped() -> None:
        with RecordWriter(tmp_path) as writer:
            writer.write([record(0, 0)])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert keys(read_records(tmp_path)) == [(0, 0)]


def test_killed_while_writing_leaves_only_readable_parts(tmp_path):
    script = f"""
import sys; sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
from test_records import RecordWriter, record
writer = RecordWriter({str(tmp_path)!r})
print("ready", flush=True)
for step in range(10**6):
    writer.write([record(step, row, tokens=500) for row in range(4)])
    writer.flush()
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    while len(list(tmp_path.glob("part-*.parquet"))) < 5:
        time.sleep(0.005)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    parts = len(list(tmp_path.glob("part-*.parquet")))
    assert keys(read_records(tmp_path)) == [(step, row) for step in range(parts) for row in range(4)]


def test_leftovers_are_not_read_and_their_number_is_not_used(tmp_path):
    (tmp_path / ".part-000002.tmp").write_bytes(b"PAR1 half")
    writer = RecordWriter(tmp_path)
    writer.write([record(0, 0)])
    assert writer.flush() == tmp_path / "part-000003.parquet"
    assert keys(read_records(tmp_path)) == [(0, 0)]
    assert writer.rewind(1) == 0
    assert not (tmp_path / ".part-000002.tmp").exists()


def test_rewind_removes_the_steps_that_will_be_done_again(tmp_path):
    writer = RecordWriter(tmp_path)
    for steps in ((0, 1), (2, 3), (4, 5)):
        writer.write([record(step, row) for step in steps for row in range(2)])
        writer.flush()
    assert writer.rewind(3) == 6
    assert keys(read_records(tmp_path)) == [(step, row) for step in range(3) for row in range(2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part-000000.parquet", "part-000001.parquet"]
    writer.write([record(3, 0)])
    writer.flush()
    assert keys(read_records(tmp_path))[-1] == (3, 0)


def chosen(tmp_path: Path, name: str, sizes: list[int], sample: float, seed: int = 0) -> set[tuple[int, int]]:
    """What is kept of 40 steps of 64 rows that arrive in batches of these sizes."""
    rows = [record(step, row, tokens=1) for step in range(40) for row in range(64)]
    writer = RecordWriter(tmp_path / name, sample=sample, seed=seed)
    while rows:
        size = sizes[len(rows) % len(sizes)]
        writer.write(rows[:size])
        rows = rows[size:]
    writer.flush()
    assert writer.written + writer.sampled_out == 40 * 64
    return set(keys(read_records(tmp_path / name)))


def test_sampling_takes_the_smallest_hashes_however_the_rows_arrive(tmp_path):
    whole = chosen(tmp_path, "a", [2560], 0.1)
    cut = chosen(tmp_path, "b", [1, 7, 64, 3], 0.1)
    assert whole == cut

    def share(seed: int, step: int, row: int) -> float:
        digest = hashlib.blake2b(f"{seed}:{step}:{row}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64

    assert whole == {(step, row) for step in range(40) for row in range(64) if share(0, step, row) < 0.1}
    assert abs(len(whole) - 256) < 4 * math.sqrt(2560 * 0.1 * 0.9)
    assert whole < chosen(tmp_path, "c", [64], 0.3)
    other = chosen(tmp_path, "d", [64], 0.1, seed=1)
    assert len(whole & other) < 60  # independent: about 26
    writer = RecordWriter(tmp_path / "e", sample=0.1)
    assert {(s, r) for s in range(40) for r in range(64) if writer.selects(s, r)} == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage": None}, r"step 2, row 5: column 'advantage' \(list<float32>\) is missing"),
        ({"step": None}, "column 'step' .int64. is missing"),
        ({"logp_olds": [0.0]}, "no column 'logp_olds'; did you mean 'logp_old'"),
        ({"g": [1.0]}, "'g' has 1 entries for 3 tokens"),
        ({"logp_rollout": [0.0, None, 0.0]}, "'logp_rollout' is null at token 1; write NaN"),
        ({"token_ids": [1, 2, 2**40]}, "do not fit the schema"),
        ({"mask": [1.5, 0.0, 1.0]}, "do not fit the schema"),
    ],
)
def test_rows_that_do_not_fit(tmp_path, changes, message):
    writer = RecordWriter(tmp_path)
    with pytest.raises(UserError, match=message):
        writer.write([record(2, 4), record(2, 5) | changes])
    assert writer.flush() is None  # all rows of a call, or none
    assert list(tmp_path.iterdir()) == []
    assert writer.written == 0


@pytest.mark.parametrize("sample", [0.0, -0.1, 1.5, math.nan])
def test_a_share_outside_its_range_is_refused(tmp_path, sample):
    with pytest.raises(UserError, match=r"must be in \(0, 1\]"):
        RecordWriter(tmp_path / "new", sample=sample)
    assert not (tmp_path / "new").exists()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write token records"):
        RecordWriter(tmp_path / "file" / "tokens")


def test_foreign_files_are_refused(tmp_path):
    def refused(path: Path, message: str) -> None:
        with pytest.raises(UserError, match=message):
            read_records(path)

    refused(tmp_path / "none", "does not exist")
    refused(tmp_path, "no token records .part-.*; a run writes them with --record-tokens")
    (tmp_path / "tokens").mkdir()
    refused(tmp_path, f"did you mean {re.escape(str(tmp_path / 'tokens'))}")
    part = tmp_path / "tokens" / "part-000000.parquet"
    for junk in (b"", b"PAR1", b"not parquet at all" * 10):
        part.write_bytes(junk)
        refused(part, "not a readable Parquet file")
    pq.write_table(pa.table({"a": [1]}), part)
    refused(tmp_path / "tokens", "not a klamp token record")
    other = arrow_schema().with_metadata({"klamp.schema": "2"})
    pq.write_table(other.empty_table(), part)
    refused(part, "schema 2, this klamp reads 1")
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"klamp.schema": "1"}), part)
    refused(part, "its columns are a;")


def test_import_is_cheap():
    code = "import sys, klamp.records, klamp.report; print(*{'pyarrow', 'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
