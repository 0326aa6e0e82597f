"""Errors in the caller's words: the package's own names, the rule that was broken, numbers as they were given."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

import forebay
from conftest import LAYERS, empty, joined, rows_of, some

Make = Callable[..., forebay.Cache]
SHAPE: dict[str, Any] = {"layers": LAYERS, "row_bytes": (16, 0), "top_k": 8, "index_key_bytes": 4, "page_tokens": 16}
CACHE: dict[str, Any] = {"lanes": 4, "max_tokens": 128, "slots": 16, "lock": False}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"row_bytes": (13, 0)}, r"row_bytes \(value 13\); pass a multiple of 4"),
        ({"row_bytes": (0, 16)}, r"row_bytes \(value 0\); pass a multiple of 4 above 0"),
        ({"page_tokens": 17}, r"page_tokens \(value 17\); pass a power of two from 16 to 1024"),
        ({"host_stride": 18}, r"host_stride \(value 18\); pass a multiple of 4"),
        ({"index_key_bytes": 3}, r"index_key_bytes \(value 3\); pass a multiple of 4"),
        ({"device_block_align": 3}, r"device_block_align \(value 3\); pass a multiple of 4"),
        ({"layers": -7}, r"^shape.layers: got -7; expected a whole number from 0 to 2\^32 - 1$"),
    ],
)
def test_a_shape_that_breaks_a_rule_is_told_the_rule(change: dict[str, Any], says: str) -> None:
    with pytest.raises(forebay.InvalidConfig, match=says):
        forebay.Cache(forebay.HostDevice(), forebay.Shape(**{**SHAPE, **change}), **CACHE)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({name: 0}, f"^{name}: got 0; expected a whole number from 1")
        for name in (
            "slots", "lanes", "max_tokens", "query_rows", "batch", "steps_in_flight", "micro_batches", "host_pages",
            "index_pages", "pool_slots", "min_budget", "attention_passes",
        )
    ]  # fmt: skip
    + [
        ({"slots": [0, 16, 16]}, r"^slots: got \[0, 16, 16\]; expected whole numbers from 1"),
        ({"slots": [16, -7, 16]}, r"^slots: got \[16, -7, 16\]"),
        ({"slots": [16]}, r"^slots: got 1 number; expected 3, one a layer"),
        ({"numa_node": -7}, "^numa_node: got -7"),
        ({"pool_slots": 8}, r"pool_slots \(given 8, least 16\)"),
    ],
)
def test_a_cache_is_refused_by_the_names_of_its_arguments(change: dict[str, Any], says: str) -> None:
    with pytest.raises(forebay.InvalidConfig, match=says):
        forebay.Cache(forebay.HostDevice(), forebay.Shape(**SHAPE), **{**CACHE, **change})


def test_arguments_that_are_something_else_are_the_packages_own_error(make: Make, tmp_path: Path) -> None:
    cache = make()
    sequence = joined(cache)
    lone = "\ud800"
    path = tmp_path / "x.topk"
    wrong: list[tuple[str, Callable[[], object]]] = [
        (r"bring_up: got \[\]; expected", lambda: cache.open(prompt=8, bring_up=[])),  # type: ignore[arg-type]
        ("run: got array", lambda: cache.slab(0, run=np.zeros(2))),  # type: ignore[arg-type]
        ("run: got 1; expected 0: rows have one run", lambda: cache.slab(0, run=1)),
        ("slots: got 0", lambda: cache.open(prompt=8, slots=0)),
        ("slots: got \\[0", lambda: cache.open(prompt=8, slots=[0, 16, 16])),
        ("ratio: got 0.0; expected a number above 0", lambda: cache.open(prompt=8, ratio=0.0)),
        ("ratio: got -0.5; expected a number above 0 and at most 1", lambda: cache.open(prompt=8, ratio=-0.5)),
        ("ratio: got nan", lambda: cache.open(prompt=8, ratio=float("nan"))),
        ("ratio: got 0.0", lambda: sequence.fork(ratio=0.0)),
        ("ratio: got 0.0", lambda: forebay.plan(cache.shape, gpu=1 << 30, context=500, ratio=0.0)),
        ("batch: got 0", lambda: forebay.plan(cache.shape, gpu=1 << 30, context=500, batch=0)),
        ("name: got ", lambda: forebay.Shape.preset(lone)),
        ("text: got ", lambda: forebay.Table.from_text(lone)),
        ("label: got ", lambda: forebay.TraceWriter(path, layers=1, k=1, label=lone)),
        ("path: got ", lambda: forebay.SelectionTrace(lone)),
        ("path: got ", lambda: forebay.RequestWriter(tmp_path / lone, block_tokens=16)),
        ("path: got ", lambda: forebay.CudaDevice(0, library=lone)),
        ("1 number, one a layer", lambda: forebay.TraceWriter(path, layers=1, k=1, shares=[0, 1])),
    ]
    for says, call in wrong:
        with pytest.raises(forebay.InvalidArgument, match=says):
            call()
    assert not path.exists()
    # What is nothing at all may be 0.
    cache.open(prompt=8, promised=0).close()


def test_one_is_not_many(make: Make) -> None:
    cache = make()
    with joined(cache) as sequence, cache.prepare([(sequence, 0, 1)]) as step:
        assert "1 sequence>" in repr(cache) and "of 1 row," in repr(step)
        with pytest.raises(forebay.InvalidArgument, match="for 1 row of 2 query rows; expected 1 row or more"):
            step.layer(0, forebay.Buffers(cache, some(1).repeat(2, 1), empty(1, 2)))
        for layer in range(LAYERS):
            step.layer(layer, some(1), empty())
            step.scatter(layer)
    assert "0 sequences" in repr(cache)


def test_a_sequence_is_called_the_same_by_its_errors(make: Make) -> None:
    cache = make()
    sequence = cache.open(prompt=8)
    sequence.close()
    name = re.findall(r"0x[0-9a-f]+", repr(sequence))
    with pytest.raises(forebay.Closed) as caught:
        sequence.append(0, rows_of(0, 0, 1))
    assert re.findall(r"0x[0-9a-f]+", str(caught.value)) == name and len(name) == 1


def test_a_position_is_shown_as_the_selection_has_it(make: Make) -> None:
    cache = make()
    sequence = joined(cache)
    step = cache.prepare([(sequence, 0, 1)])
    for layer in range(LAYERS):
        step.layer(layer, some(-7 if layer == 1 else 1), empty())
        step.scatter(layer)
    with pytest.raises(forebay.DeviceFailed, match=r"position is -7, and only -1 is none \(batch row 0, layer 1\)"):
        step.retire()


def test_a_cache_that_the_machine_has_no_memory_for_is_refused_with_both_numbers() -> None:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = 1024 * int(fields["MemAvailable"].split()[0])
    # Rows of the device's pool, which a host device takes of the machine as they are used: twice what there is.
    shape = forebay.Shape(layers=1, row_bytes=(1 << 16, 0), top_k=8, page_tokens=16)
    declared = {**CACHE, "lanes": 1, "host_pages": 16, "pool_slots": 2 * available >> 16}
    with pytest.raises(forebay.OutOfMemory, match="memory of the machine.*overcommit") as caught:
        forebay.Cache(forebay.HostDevice(), shape, **declared)
    wanted, has = map(int, re.findall(r"wanted (\d+), available (\d+)", str(caught.value))[0])
    assert wanted > 2 * available - (1 << 21) and 0 < has < wanted
    device = forebay.HostDevice()
    try:
        # Nothing of it is touched; a system that has promised too much already may refuse its addresses.
        forebay.Cache(device, shape, overcommit=True, **declared).close()
    except forebay.OutOfMemory as error:
        assert "memory of the machine" not in str(error)
    device.close()
