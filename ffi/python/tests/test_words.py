"""Errors in the caller's words: the package's own names, the broken rule, and numbers as given."""

from __future__ import annotations

import dataclasses
import functools
import inspect
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
SHAPE_FIELDS = tuple(field.name for field in dataclasses.fields(forebay.Shape))
OPTIONAL = ("batch", "steps_in_flight", "micro_batches", "host_pages", "index_pages", "pool_slots", "min_budget",
            "attention_waves", "selects_by_layer", "parked", "arriving")  # fmt: skip


# A broken rule of each field: the given value, the number as the error has it, and the rule in its words.
MOST = "at most 4096, draft layers included"
BY_SHAPE: list[tuple[str, Any, str, str]] = [
    ("layers", 0, "value 0", "pass 1 or more"),
    ("layers", 5000, "layers 5000, draft_layers 0", MOST),
    ("draft_layers", 5000, f"layers {LAYERS}, draft_layers 5000", MOST),
    ("draft_layers", (1 << 32) - 1, f"layers {LAYERS}, draft_layers 4294967295", MOST),
    ("row_bytes", (13, 0), "value 13", "a multiple of 4, at most 1048576"),
    ("row_bytes", (16, 2), "value 2", "a multiple of 4, at most 1048576"),
    ("row_bytes", (1 << 21, 0), "value 2097152", "a multiple of 4, at most 1048576"),
    ("row_bytes", (0, 16), "value 0", "a multiple of 4 above 0 for the first run"),
    ("index_key_bytes", 3, "value 3", "a multiple of 4, at most 65536, or 0"),
    ("index_key_bytes", 1 << 17, "value 131072", "a multiple of 4, at most 65536, or 0"),
    ("page_tokens", 0, "value 0", "a power of two from 16 to 1024"),
    ("page_tokens", 17, "value 17", "a power of two from 16 to 1024"),
    ("page_tokens", 2048, "value 2048", "a power of two from 16 to 1024"),
    ("top_k", 0, "value 0", "pass 1 or more"),
    ("top_k", 1 << 21, "value 2097152", "at most 1048576"),
    ("host_stride", 18, "value 18", "a multiple of 4 from a row's bytes to 2097216"),
    ("host_stride", 12, "value 12", "a multiple of 4 from a row's bytes to 2097216"),
    ("host_stride", 1 << 30, "value 1073741824", "a multiple of 4 from a row's bytes to 2097216"),
    ("device_block_align", 3, "value 3", "a multiple of 4, or 0 for no padding"),
    ("group_layers", 9, "value 9", "at most 8"),
    ("lone_layers", 1 + LAYERS, f"value {1 + LAYERS}", "at most the layers"),
    ("selects_by_layer", (False, True, True), "value 0", "the first layer selects for itself"),
]
BY_CACHE: list[tuple[str, Any, str, str]] = [
    ("max_tokens", (1 << 31) - 3, "value 2147483645", "max_tokens + query_rows x steps_in_flight must stay below"),
    ("max_tokens", (1 << 32) - 1, "max_tokens 4294967295, query_rows 1", "query_rows x steps_in_flight"),
    ("query_rows", 1 << 31, "query_rows 2147483648, steps_in_flight 2", "query_rows x steps_in_flight"),
    ("steps_in_flight", (1 << 32) - 1, "query_rows 1, steps_in_flight 4294967295", "query_rows x steps_in_flight"),
    ("host_pages", 1, "given 1, least 2", "one token and the rows in flight: query_rows x steps_in_flight"),
    ("index_pages", 1, "given 1, least 2", "one token and the rows in flight: query_rows x steps_in_flight"),
    ("pool_slots", 8, "given 8, least 16", "at least min_budget"),
    ("pool_slots", [64, 8, 64], "given 8, least 16", "at least min_budget"),
    ("pool_slots", 1 << 31, "value 2147", "fewer pool_slots, lanes or query_rows"),
    ("min_budget", 400, "given 256, least 400", "at least min_budget"),
    ("batch", 40000, "value 40000, most 32767", "divide the batch over several micro-batches"),
    ("lanes", 1 << 31, "value 6442", "fewer pool_slots, lanes or query_rows"),
    ("slots", [16, 16], "got 2 numbers", "expected 3, one a layer, draft layers last"),
    ("slots", [0, 16, 16], "got [0, 16, 16]", "whole numbers from 1"),
    ("slots", [16, -7, 16], "got [16, -7, 16]", "whole numbers from 1"),
    ("slots", "sixteen", "got 'sixteen'", "whole numbers from 1"),
]
NUMBERS = ["lanes", "max_tokens", "slots", "pool_slots", "query_rows", "batch", "steps_in_flight", "micro_batches",
           "host_pages", "index_pages", "min_budget", "attention_waves", "parked", "arriving"]  # fmt: skip
# Fields that are no counts: switches, the place of the memory, and a policy.
OTHERS = {"residency_only", "huge_pages", "populate", "lock", "overcommit", "numa_node", "share"}


def refusal(**changes: Any) -> str:
    """The error of a cache with these fields, of its shape or its own."""
    shape = {**SHAPE, **{name: changes.pop(name) for name in list(changes) if name in SHAPE_FIELDS}}
    declared = {**CACHE, **changes}
    del declared["lock"]
    told = []
    for made in (forebay.footprint, functools.partial(forebay.Cache, forebay.HostDevice())):
        with pytest.raises((forebay.InvalidConfig, forebay.Overflow, forebay.OutOfMemory)) as caught:
            made(forebay.Shape(**shape), **declared)  # type: ignore[operator]
        told.append(str(caught.value))
        # Rules of the cache only.
        declared["lock"] = False
    # The host device and a GPU differ in mapping sizes, and values far too large may exceed the machine's memory.
    numbers = [re.sub(r"value \d+", "value", text) for text in told]
    assert numbers[0] == numbers[1] or caught.type is forebay.OutOfMemory
    return told[0]


@pytest.mark.parametrize(("field", "value", "number", "rule"), BY_SHAPE + BY_CACHE)
def test_a_broken_rule_is_reported_with_field_and_number(
    field: str, value: Any, number: str, rule: str
) -> None:
    # One page is too few for so many steps; without a batch size it is the number of lanes.
    beside = {"host_pages": {"steps_in_flight": 16}, "index_pages": {"steps_in_flight": 16}, "lanes": {"batch": 4}}
    said = refusal(**{field: value}, **beside.get(field, {}))
    assert re.search(rf"\b{field}\b", said) and number in said and rule in said, said


@pytest.mark.parametrize(("field", "value"), [
    (field, value)
    for value in (-7, 1 << 32, 1.5, float("nan"), "many", None)
    for field in [*SHAPE_FIELDS, *NUMBERS]
    if value is not None or field not in OPTIONAL
])  # fmt: skip
def test_an_error_quotes_a_value_that_no_field_holds(field: str, value: Any) -> None:
    name = f"shape.{field}" if field in SHAPE_FIELDS else field
    assert refusal(**{field: value}).startswith(f"{name}: got {value!r}; expected "), field


def test_an_error_quotes_an_invalid_numa_node() -> None:
    with pytest.raises(forebay.InvalidArgument, match="^numa_node: got -7; expected a whole number from 0 "):
        forebay.Cache(forebay.HostDevice(), forebay.Shape(**SHAPE), **CACHE, numa_node=-7)


@pytest.mark.parametrize("field", NUMBERS)
def test_a_count_of_zero_is_refused(field: str) -> None:
    assert refusal(**{field: 0}).startswith(f"{field}: got 0; expected a whole number from 1 ")


def test_a_rule_of_every_field_is_broken_in_a_test() -> None:
    declared = set(inspect.signature(forebay.Cache).parameters) - {"device", "shape"}
    assert declared == {*NUMBERS, *OTHERS}
    assert {rule[0] for rule in BY_SHAPE} == set(SHAPE_FIELDS)


def test_arguments_of_a_wrong_type_raise_the_packages_own_error(make: Make, tmp_path: Path) -> None:
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
        ("ratio: got 0; expected a number above 0 and at most 1", lambda: cache.open(prompt=8, ratio=0)),
        ("number: got None", lambda: forebay.CudaDevice(None)),  # type: ignore[arg-type]
        ("gpu: got None", lambda: forebay.plan(cache.shape, gpu=None, context=500)),  # type: ignore[arg-type]
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
    # The number of promised rows may be 0.
    cache.open(prompt=8, promised=0).close()


def test_a_count_of_one_has_no_plural(make: Make) -> None:
    cache = make()
    with joined(cache) as sequence, cache.prepare([(sequence, 0, 1)]) as step:
        assert "1 sequence>" in repr(cache) and "of 1 row," in repr(step)
        with pytest.raises(forebay.InvalidArgument, match="for 1 row of 2 query rows; expected 1 row or more"):
            step.layer(0, forebay.Buffers(cache, some(1).repeat(2, 1), empty(1, 2)))
        for layer in range(LAYERS):
            step.layer(layer, some(1), empty())
            step.scatter(layer)
    assert "0 sequences" in repr(cache)


def test_all_errors_name_a_sequence_alike(make: Make) -> None:
    cache = make()
    sequence = cache.open(prompt=8)
    sequence.close()
    name = re.findall(r"0x[0-9a-f]+", repr(sequence))
    with pytest.raises(forebay.Closed) as caught:
        sequence.append(0, rows_of(0, 0, 1))
    assert re.findall(r"0x[0-9a-f]+", str(caught.value)) == name and len(name) == 1


def test_an_error_shows_a_position_as_given_in_the_selection(make: Make) -> None:
    cache = make()
    sequence = joined(cache)
    step = cache.prepare([(sequence, 0, 1)])
    for layer in range(LAYERS):
        step.layer(layer, some(-7 if layer == 1 else 1), empty())
        step.scatter(layer)
    with pytest.raises(forebay.DeviceFailed, match=r"position is -7, and only -1 is none \(batch row 0, layer 1\)"):
        step.retire()


def test_a_cache_larger_than_the_machines_memory_is_refused_with_both_numbers() -> None:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = 1024 * int(fields["MemAvailable"].split()[0])
    # Rows of the device's pool, which a host device takes from the machine when they are used: twice the available
    # memory, in eight layers, because the system itself may refuse one mapping of that size.
    shape = forebay.Shape(layers=8, row_bytes=(1 << 16, 0), top_k=8, page_tokens=16)
    declared = {**CACHE, "lanes": 1, "host_pages": 16, "pool_slots": 2 * available >> 19}
    with pytest.raises(forebay.OutOfMemory, match="memory of the machine.*overcommit") as caught:
        forebay.Cache(forebay.HostDevice(), shape, **declared)
    wanted, has = map(int, re.findall(r"wanted (\d+), available (\d+)", str(caught.value))[0])
    assert wanted > 2 * available - (1 << 23) and 0 < has < wanted
    # With overcommit the same cache is created if the system does not count promised memory: nothing touches it.
    device = forebay.HostDevice()
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        with pytest.raises(forebay.OutOfMemory) as refused:
            forebay.Cache(device, shape, overcommit=True, **declared)
        assert "memory of the machine" not in str(refused.value)
    else:
        cache = forebay.Cache(device, shape, overcommit=True, **declared)
        assert cache.slab(7).nbytes >= declared["pool_slots"] << 16
        cache.close()
    device.close()
