"""The recorder of a loop of one's own: what is given is what is read, and nothing holds up the loop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import klamp
from klamp.audit.command import audit
from klamp.errors import UserError
from klamp.records import Recorder, RecordWriter, arrow_schema, read_records


def step(seed: int = 0, rows: int = 6, width: int = 9) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=draw) - 0.1
    lengths = torch.arange(rows) % width
    return {
        "logp_new": (old + 0.3 * torch.randn(rows, width, generator=draw)).requires_grad_(), "logp_old": old,
        "advantages": torch.randn(rows, generator=draw), "mask": torch.arange(width) < lengths[:, None],
        "token_ids": torch.randint(0, 99, (rows, width), generator=draw), "reward": torch.rand(rows, generator=draw),
    }  # fmt: skip


def test_what_is_given_is_what_is_read(tmp_path: Path) -> None:
    one = step()
    batch = klamp.Batch(one["logp_new"], one["logp_old"], one["advantages"], one["mask"])
    out = klamp.Objective("grpo")(batch)
    with Recorder(tmp_path) as recorder:
        recorder.record(
            step=3,
            **one,
            group=torch.arange(6) // 2,
            prompt_id=list("aabbcc"),
            kept=out.kept,
            g=out.grad_policy,
            micro_step=1,
        )
        recorder.record(
            step=4, **step(1), entropy=torch.rand(6, 9), logp_rollout=np.full((6, 9), -1.0), row=range(10, 16)
        )
    table = read_records(tmp_path)
    assert table.schema.equals(arrow_schema(), check_metadata=True)
    rows = table.to_pylist()
    assert [row["row"] for row in rows] == [*range(6), *range(10, 16)]
    for index, row in enumerate(rows[:6]):
        n = index % 9
        assert row["logp_new"] == one["logp_new"][index, :n].tolist()
        assert row["advantage"] == [float(one["advantages"][index])] * n
        assert row["mask"] == [True] * n
        assert row["token_ids"] == one["token_ids"][index, :n].tolist()
        assert row["g"] == out.grad_policy[index, :n].tolist()
        assert row["kept"] == out.kept[index, :n].tolist()
        assert (row["step"], row["micro_step"], row["group"], row["prompt_id"]) == (3, 1, index // 2, "aabbcc"[index])
        assert row["logp_rollout"] is None
        assert row["reward"] == float(one["reward"][index])
    assert np.isnan(rows[-1]["g"]).all()
    assert rows[-1]["kept"] == rows[-1]["mask"]
    assert rows[-1]["logp_rollout"] == [-1.0] * 5


def test_a_mask_with_holes_keeps_what_lies_between(tmp_path: Path) -> None:
    mask = torch.tensor([[True, False, True, False]])
    with Recorder(tmp_path) as recorder:
        recorder.record(
            step=0,
            logp_new=[[-1.0, -2.0, -3.0, -4.0]],
            logp_old=[[-1.0, -2.0, -3.0, -4.0]],
            advantages=[[1.0, 2.0, 3.0, 4.0]],
            mask=mask,
        )
    (row,) = read_records(tmp_path).to_pylist()
    assert row["mask"] == [True, False, True]
    assert row["advantage"] == [1.0, 2.0, 3.0]


def test_an_audit_reads_it(tmp_path: Path) -> None:
    one = step()
    del one["token_ids"]
    with Recorder(tmp_path) as recorder:
        recorder.record(step=0, **one)
    found = audit([str(tmp_path)], ["grpo"])
    tally = klamp.Objective("grpo")(
        klamp.Batch(one["logp_new"], one["logp_old"], one["advantages"], one["mask"])
    ).metrics
    assert found["specs"][0]["removed"]["low_share"] == tally.mean("guard/removed_low_share")
    assert found["specs"][0]["tokens_cut_most"] == []


def test_it_samples_as_the_writer_does(tmp_path: Path) -> None:
    with Recorder(tmp_path, sample=0.5, seed=3) as recorder:
        for k in range(20):
            recorder.record(step=k, **step(k))
    writer = RecordWriter(tmp_path / "other", 0.5, 3)
    table = read_records(tmp_path)
    assert list(zip(table["step"].to_pylist(), table["row"].to_pylist(), strict=True)) == [
        (k, row) for k in range(20) for row in range(6) if writer.selects(k, row)
    ]
    assert recorder.writer.written + recorder.writer.sampled_out == 120


def test_a_slow_disk_never_holds_up_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    append = RecordWriter.append
    monkeypatch.setattr(RecordWriter, "append", lambda self, table: (go.wait(30), append(self, table))[1])
    recorder = Recorder(tmp_path, waiting_bytes=100_000)
    start = time.perf_counter()
    for k in range(50):
        recorder.record(step=k, **step(k, rows=64, width=64))
    assert time.perf_counter() - start < 5.0
    assert recorder._waiting <= 100_000
    go.set()
    with pytest.warns(UserWarning, match="responses were not recorded"):
        recorder.close()
    assert recorder.dropped > 0
    assert read_records(tmp_path).num_rows + recorder.dropped == 50 * 64


def test_it_costs_little(tmp_path: Path) -> None:
    """A step of 260,000 tokens takes seconds on any device; recording it must take a hundredth."""
    one = step(0, rows=128, width=2048)
    one["mask"] = torch.ones(128, 2048, dtype=torch.bool)
    with Recorder(tmp_path) as recorder:
        recorder.record(step=0, **one)
        times = []
        for k in range(1, 4):
            start = time.perf_counter()
            recorder.record(step=k, **one)
            times.append(time.perf_counter() - start)
            time.sleep(0.5)
    assert min(times) < 0.05


@pytest.mark.filterwarnings("ignore:token records stop here")
def test_a_full_disk_does_not_end_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: RecordWriter, table: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordWriter, "append", full)
    recorder = Recorder(tmp_path)
    recorder.record(step=0, **step())
    recorder._thread.join(10)
    recorder.record(step=1, **step())
    with pytest.raises(UserError, match=r"are not complete.*No space left"):
        recorder.close()

    def loop() -> None:
        with Recorder(tmp_path) as another:
            another.record(step=0, **step())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()


@pytest.mark.parametrize(("changes", "message"), [
    ({"mask": torch.ones(6, dtype=torch.bool)}, r"mask must have the shape \[B, T\]"),
    ({"logp_old": torch.zeros(6, 8)}, r"logp_old must have the shape of mask, \[6, 9\]; got \[6, 8\]"),
    ({"advantages": torch.zeros(5)}, "advantage must have the shape of mask"),
])  # fmt: skip
def test_shapes_that_do_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder, pytest.raises(UserError, match=message):
        recorder.record(step=0, **(step() | changes))


def test_a_killed_loop_leaves_only_readable_files(tmp_path: Path) -> None:
    script = f"""
import sys; sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
from test_recorder import Recorder, step
recorder = Recorder({str(tmp_path)!r}, rows_per_part=6)
one = step()
for k in range(10**6):
    recorder.record(step=k, **one)
"""
    child = subprocess.Popen([sys.executable, "-c", script])
    end = time.monotonic() + 60
    while len(list(tmp_path.glob("part-*.parquet"))) < 5 and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    table = read_records(tmp_path)
    assert table.num_rows >= 30
    assert table["step"].to_pylist() == [k for k in range(table.num_rows // 6) for _ in range(6)]
