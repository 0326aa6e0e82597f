"""Traces: written and read again, replayed, and recorded from a batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import forebay
from conftest import ROOT, skip

DEMO = ROOT / "data" / "demo.topk.zst"


def test_what_is_recorded_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.topk"
    chance = np.random.default_rng(7)
    kept = []
    with forebay.TraceWriter(
        path, layers=2, k=4, first_position=10, decode_start=12, layer_ids=[3, 9], label="a test", model="none"
    ) as writer:
        for position in range(10, 20):
            sets = np.stack([chance.choice(position + 1, 4, replace=False) for _ in range(2)]).astype(np.int32)
            writer.record(position, sets)
            kept.append(np.sort(sets, axis=1))
        with pytest.raises(forebay.OutOfRange):
            writer.record(25, sets)
        with pytest.raises(forebay.InvalidArgument, match="selected"):
            writer.record(20, sets.astype(np.int64))
        with pytest.raises(forebay.InvalidArgument, match="position"):
            writer.record(-1, sets)
        writer.flush()
        writer.sync()
    with pytest.raises(forebay.Closed):
        writer.record(20, sets)
    with pytest.raises(forebay.Io):
        forebay.TraceWriter(path, layers=2, k=4)
    trace = forebay.SelectionTrace(path)
    header = trace.header
    assert (header.layers, header.k, header.steps, header.warm_steps) == (2, 4, 10, 2)
    assert (header.first_position, header.decode_start, header.unfinished) == (10, 12, 0)
    assert trace.layer_ids == [3, 9] and trace.text("label") == "a test"
    assert (trace.read(0, 10) == np.stack(kept)).all()
    out = np.empty((3, 2, 4), np.int32)
    assert (trace.read(4, 3, out) == np.stack(kept)[4:7]).all() and (out == np.stack(kept)[4:7]).all()
    for first, steps in ((0, 11), (-1, 2), (10, 1), (0, -1)):
        with pytest.raises(forebay.InvalidArgument, match="first_step"):
            trace.read(first, steps)
    with pytest.raises(forebay.InvalidArgument, match="out"):
        trace.read(0, 1, np.empty((1, 2, 4), np.int64))
    with pytest.raises(forebay.InvalidArgument, match="which"):
        trace.text("author")


def test_a_dropped_recording_keeps_its_steps(tmp_path: Path) -> None:
    writer = forebay.TraceWriter(tmp_path / "a.topk", layers=1, k=2, first_position=5)
    for position in range(5, 9):
        writer.record(position, np.array([[0, position]], np.int32))
    del writer
    header = forebay.SelectionTrace(tmp_path / "a.topk").header
    assert (header.steps, header.unfinished) == (4, 1)


def test_bad_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "b.topk").write_bytes(b"no trace at all")
    with pytest.raises(forebay.BadFormat, match="b.topk"):
        forebay.SelectionTrace(tmp_path / "b.topk")
    with pytest.raises(forebay.Io, match="c.topk"):
        forebay.SelectionTrace(tmp_path / "c.topk")
    with pytest.raises(forebay.InvalidArgument, match="layer_ids"):
        forebay.TraceWriter(tmp_path / "d.topk", layers=2, k=4, layer_ids=[1])
    with pytest.raises(forebay.InvalidArgument, match="layers"):
        forebay.TraceWriter(tmp_path / "d.topk", layers=-2, k=4)
    assert not (tmp_path / "d.topk").exists()


def test_requests_are_lines(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with forebay.RequestWriter(path, block_tokens=512) as writer:
        writer.record(milliseconds=0, input_tokens=700, blocks=[1, 2], output_tokens=3)
        writer.record(milliseconds=12, input_tokens=100, blocks=[7])
        with pytest.raises(forebay.InvalidArgument, match="blocks"):
            writer.record(milliseconds=13, input_tokens=100, blocks=[-7])
        with pytest.raises(forebay.OutOfRange):
            writer.record(milliseconds=1, input_tokens=100, blocks=[7])
        assert writer.finish() == 2
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [len(line["hash_ids"]) for line in lines] == [2, 1]
    assert [line["input_length"] for line in lines] == [700, 100]


def test_a_recorder_leaves_rejected_drafts_out(tmp_path: Path) -> None:
    with forebay.TraceRecorder(tmp_path, layers=2, k=3, batch=2, query_rows=2, mode="a test") as recorder:
        first, second = recorder.start("a", 10), recorder.start("b", 20)
        for turn, accepted in enumerate([(2, 1), (1, 2)]):
            selection = np.arange(12, dtype=np.int32).reshape(2, 2, 3) % 9
            for layer in range(2):
                recorder.select(layer, selection)
            recorder.accept([("a", 10 + 2 * turn, accepted[0]), ("b", 20 + turn, accepted[1])])
        recorder.select(0, selection[:1, 0])
        recorder.select(1, selection[:1, 0])
        recorder.accept([("a", 13, 1)])
        recorder.accept([None, ("b", 23, 0)])
        for wrong in ([("c", 1, 1)], [("a", 14, 3)], [None] * 3):
            with pytest.raises(forebay.InvalidArgument, match="rows"):
                recorder.accept(wrong)  # type: ignore[arg-type]
        with pytest.raises(forebay.InvalidArgument, match="layer"):
            recorder.select(2, selection)
        with pytest.raises(forebay.InvalidArgument, match="selection"):
            recorder.select(0, selection.astype(np.int64))
        assert recorder.finish("b") == 3
    a, b = forebay.SelectionTrace(first), forebay.SelectionTrace(second)
    assert (a.header.steps, a.header.first_position, b.header.steps) == (4, 10, 3)
    assert a.read(0, 2)[:, 0].tolist() == [[0, 1, 2], [3, 4, 5]]
    # Of b the first step's second row was rejected: the next row has its position.
    assert b.read(0, 3)[:, 1].tolist() == [[6, 7, 8], [6, 7, 8], [0, 1, 2]]
    assert a.text("mode") == "a test"


def test_a_recorder_leaves_out_layers_that_share_another_layers_sets(tmp_path: Path) -> None:
    with forebay.TraceRecorder(tmp_path, layers=3, k=2, batch=1, shares=[0, 0, 2]) as recorder:
        path = recorder.start("a", 5)
        for turn in range(2):
            recorder.select(0, np.array([[0, 1 + turn]], np.int32))
            recorder.select(2, np.array([[2, 3 + turn]], np.int32))
            recorder.accept([("a", 5 + turn, 1)])
    trace = forebay.SelectionTrace(path)
    assert trace.read(0, 2).tolist() == [[[0, 1], [0, 1], [2, 3]], [[0, 2], [0, 2], [2, 4]]]
    with pytest.raises(forebay.InvalidArgument, match="shares"):
        forebay.TraceRecorder(tmp_path, layers=3, k=2, batch=1, shares=[0])


def test_a_recorder_records_no_selection_of_another_step(tmp_path: Path) -> None:
    with forebay.TraceRecorder(tmp_path, layers=2, k=2, batch=2) as recorder:
        recorder.start("a", 10)
        for layer in range(2):
            recorder.select(layer, np.array([[0, 1]], np.int32))
        with pytest.raises(forebay.InvalidArgument, match=r"rows\[1\].*layer 0"):
            recorder.accept([None, ("a", 10, 1)])
        recorder.accept([("a", 10, 1)])
        recorder.select(0, np.array([[2, 3]], np.int32))
        with pytest.raises(forebay.InvalidArgument, match=r"rows\[0\].*layer 1"):
            recorder.accept([("a", 11, 1)])
        recorder.select(1, np.array([[4, 5]], np.int32))
        recorder.accept([("a", 11, 1)])
        for name in ("a", "../b"):
            with pytest.raises(forebay.InvalidArgument, match="name"):
                recorder.start(name, 0)
        assert recorder.finish("a") == 2
    assert forebay.SelectionTrace(tmp_path / "a.topk").read(1, 1).tolist() == [[[2, 3], [4, 5]]]


def test_a_zero_byte_in_a_path_or_text_is_refused(tmp_path: Path) -> None:
    path = f"{tmp_path}/a\0b"
    for call in (
        lambda: forebay.TraceWriter(path, layers=1, k=1),
        lambda: forebay.RequestWriter(path, block_tokens=4),
        lambda: forebay.SelectionTrace(path),
        lambda: forebay.CudaDevice(library=path),
    ):
        with pytest.raises(forebay.InvalidArgument, match="path.*zero byte"):
            call()
    with pytest.raises(forebay.InvalidArgument, match="label.*zero byte"):
        forebay.TraceWriter(tmp_path / "c", layers=1, k=1, label="a\0b")
    with pytest.raises(forebay.InvalidArgument, match="path"):
        forebay.RequestWriter(5, block_tokens=4)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("share", "mtp"), [(0.1, 1), (0.2, 2), (0.05, 3)])
def test_a_replay_counts_the_same_as_the_command(share: float, mtp: int) -> None:
    import replay

    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    commands = [target / profile / "forebay" for profile in ("release", "debug")]
    command = next((str(path) for path in commands if path.exists()), None)
    if command is None:
        skip("a_replay_counts_the_same_as_the_command", "the command was not built")
    counts, _ = replay.by_command(command, str(DEMO), [share], mtp)
    trace = forebay.SelectionTrace(DEMO)
    found = replay.replay(trace, slots=replay.slots_of(share, trace.header.decode_start), mtp=mtp)
    assert [found.hits, found.misses] == counts
    assert sum(found.misses) > 0


def test_the_bench_of_calls_runs() -> None:
    script = ROOT / "ffi" / "python" / "benches" / "calls.py"
    ran = subprocess.run([sys.executable, script, "--short"], check=True, stdout=subprocess.PIPE, text=True)
    assert ran.stdout.count(" us a layer") == 3
