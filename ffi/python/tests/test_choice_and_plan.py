"""Choice tables, choosers and plans."""

from __future__ import annotations

import dataclasses
from typing import Callable

import numpy as np
import pytest

import forebay
from forebay.choice import best

# None exposes every miss, DA half of them and 5 us, DBA nothing and 30 us.
PRICES = forebay.Prices([0, 100], [[[0, 100e3], [5e3, 55e3], [30e3, 30e3]]])
# Layer 0 selects for layer 1, which can run ahead, and cannot in the order DBA.
FIRST, FOLLOWER = [[0, 100e3], [5e3, 55e3], [30e3, 30e3], None], [[0, 100e3], [5e3, 55e3], None, [1e3, 2e3]]
GROUP = forebay.Prices([0, 100], [FIRST, FOLLOWER])


def test_a_table_survives_the_way_to_text_and_back() -> None:
    table = forebay.Table(("none", "da", "dba", "ahead"), version=7)
    text = table.to_text()
    assert forebay.Table.from_text(text) == table
    with pytest.raises(forebay.ForebayError):
        forebay.Table.from_text(text.replace("dba", "dbx"))
    with pytest.raises(forebay.InvalidArgument, match=r"by_layer\[1\]"):
        forebay.Table(("none", "both")).to_text()


def test_invalid_names_and_texts_are_named() -> None:
    for call, says in (
        (lambda: forebay.Table.from_text(3), "text"),  # type: ignore[arg-type]
        (lambda: forebay.Table.from_text("a\0b"), "text.*zero byte"),
        (lambda: forebay.Shape.preset(3), "name"),  # type: ignore[arg-type]
        (lambda: forebay.Shape.preset("deepseek-v3.2\0"), "name.*zero byte"),
        (lambda: forebay.Shape.preset("no-such"), "no-such"),
        (lambda: forebay.Shape.preset("deepseek-v3.2", layerz=3), "layerz"),
        (lambda: best(forebay.Prices([0, 1], np.zeros((5, 3, 2))), [1.0] * 3), "misses"),
        (lambda: best(PRICES, 5), "misses"),  # type: ignore[arg-type]
        (lambda: best(PRICES, ["few"]), "misses"),  # type: ignore[list-item]
        (lambda: best(forebay.Prices(["a"], [[[1]] * 3]), [0]), "misses|exposed"),  # type: ignore[list-item]
        (lambda: forebay.Table(("none",), version=-1).to_text(), "version"),
        (lambda: forebay.Table(5).to_text(), "by_layer"),  # type: ignore[arg-type]
        (lambda: forebay.Chooser([5]), r"buckets\[0\]"),  # type: ignore[list-item]
        (lambda: forebay.Chooser(5), "buckets"),  # type: ignore[arg-type]
        (lambda: forebay.Chooser([forebay.Bucket(-1, [], PRICES)]), "batch"),
        (lambda: forebay.Chooser([forebay.Bucket(1, [7], PRICES)]), r"tables\[0\]"),  # type: ignore[list-item]
        (lambda: forebay.Chooser([], tables_max=-1), "tables_max"),
        (lambda: forebay.plan(7, gpu=1, context=1), "shape"),  # type: ignore[arg-type]
        (lambda: forebay.footprint(7, lanes=1, max_tokens=64, slots=16), "shape"),  # type: ignore[arg-type]
    ):
        with pytest.raises(forebay.InvalidArgument, match=says):
            call()


def test_the_best_order_is_the_cheapest() -> None:
    assert best(PRICES, [0, 20, 90]) == ("none", "da", "dba")
    with pytest.raises(forebay.InvalidArgument, match="exposed"):
        best(forebay.Prices([0, 100], [[1, 2], [3, 4]]), [0])
    with pytest.raises(forebay.InvalidConfig):
        best(PRICES, [float("nan")])


def test_an_order_that_a_layer_cannot_run_in_has_no_price() -> None:
    assert best(GROUP, [90, 90]) == ("dba", "ahead") and best(GROUP, [20, 0]) == ("da", "none")
    lists = [[[-1, -1] if times is None else times for times in layer] for layer in (FIRST, FOLLOWER)]
    assert best(forebay.Prices([0, 100], np.array(lists)), [90, 90]) == ("dba", "ahead")
    three = forebay.Prices([0, 100], [FIRST[:3], FOLLOWER[:3]])
    assert best(three, [90, 90]) == ("dba", "da")
    for exposed in ([[None, *FIRST[1:]]], [[[0, 100e3], [5e3, -1], [30e3, 30e3]]]):
        with pytest.raises(forebay.InvalidConfig, match="exposed time of"):
            best(forebay.Prices([0, 100], exposed), [0])
    for exposed in ([FIRST[:2]], [[*FIRST, None]], [None], [7], [[None] * 3, [None] * 4]):
        with pytest.raises(forebay.InvalidArgument, match="exposed"):
            best(forebay.Prices([0, 100], exposed), [0])


def test_a_chooser_takes_the_order_ahead_only_where_it_has_a_price() -> None:
    quick = forebay.Hysteresis(smoothing=1.0, share=0.1, least_ns=1000.0, steps=1)
    bucket = forebay.Bucket(4, [forebay.Table(("none", "none"))], GROUP)
    chooser = forebay.Chooser([bucket], tables_max=2, hysteresis=quick)
    choice = chooser.choose([forebay.LayerCount(0, 360, 0)] * 2, 4, 4)
    assert choice.changed and chooser.table(choice.bucket, choice.index).by_layer == ("dba", "ahead")
    for orders in (("ahead", "ahead"), ("none", "dba")):
        with pytest.raises(forebay.InvalidConfig, match="an order without a price"):
            forebay.Chooser([forebay.Bucket(4, [forebay.Table(orders)], GROUP)])


def test_a_chooser_switches_when_the_misses_change() -> None:
    bucket = forebay.Bucket(4, [forebay.Table(("none", "none"))], PRICES)
    quick = forebay.Hysteresis(smoothing=1.0, share=0.1, least_ns=1000.0, steps=2)
    chooser = forebay.Chooser([bucket], tables_max=2, hysteresis=quick)
    few, many = forebay.LayerCount(100, 0, 0), forebay.LayerCount(0, 400, 0)
    choices = [chooser.choose([few, many], 4, 4) for _ in range(4)]
    assert not choices[0].changed and any(choice.changed for choice in choices)
    last = choices[-1]
    assert chooser.table(last.bucket, last.index).by_layer == ("none", "dba")
    with pytest.raises(forebay.OutOfRange):
        chooser.table(1, 0)
    with pytest.raises(forebay.InvalidConfig):
        forebay.Chooser([], tables_max=2)
    with pytest.raises(forebay.ForebayError):
        chooser.choose([few], 4, 4)


def test_a_plan_reports_whether_it_fits() -> None:
    shape = forebay.Shape.preset("deepseek-v3.2")
    plan = forebay.plan(shape, gpu=80 << 30, context=32768, weights=30 << 30, batch=128)
    assert plan.offloads and 0 < plan.ratio < 1 and plan.batch == 128 and plan.slots > 0
    assert plan.available == 50 << 30
    device = plan.index_key_bytes + plan.slot_bytes + plan.landing_bytes + plan.scratch_bytes
    tables = plan.table_bytes + plan.host_page_table_bytes
    assert device + plan.padding_bytes + tables <= plan.available
    assert plan.host_page_table_bytes == 8 * -(-(plan.row_bytes + plan.step_descriptor_bytes) // 4096)
    assert plan.host_pages > 0 and plan.row_bytes > 0
    small = forebay.plan(shape, gpu=80 << 30, context=1024, weights=1 << 30, batch=1)
    assert not small.offloads and any("does not pay" in note for note in small.notes)
    with pytest.raises(forebay.OutOfMemory):
        forebay.plan(shape, gpu=1 << 30, context=1 << 20, weights=1 << 30, batch=64)
    with pytest.raises(forebay.InvalidArgument, match="batch"):
        forebay.plan(shape, gpu=80 << 30, context=32768, batch=-1)
    assert np.isfinite(plan.ratio)


def test_numbers_of_numpy_are_accepted_as_numbers(make: Callable[..., forebay.Cache]) -> None:
    plain, numpys = (make(slots=count, pool_slots=4 * count) for count in (64, np.int64(64)))
    assert plain.info == numpys.info
    shape, slots = plain.shape, np.array([16, 32, 64])
    by_layer = forebay.footprint(shape, lanes=2, max_tokens=64, slots=slots.tolist())
    assert forebay.footprint(shape, lanes=np.int32(2), max_tokens=64, slots=slots) == by_layer  # type: ignore[arg-type]
    for slots, says in ((2.5, "slots"), ([1, 2], "slots"), ([1, 2, "3"], "slots"), (-1, "slots"), ([-1] * 3, "slots")):
        with pytest.raises(forebay.InvalidArgument, match=says):
            forebay.footprint(shape, lanes=2, max_tokens=64, slots=slots)
    for wrong, says in (
        ({"layers": np.float32(1.9)}, r"shape\.layers"),
        ({"layers": -1}, r"shape\.layers"),
        ({"row_bytes": 64}, r"shape\.row_bytes"),
        ({"row_bytes": (np.float32(64.5), 0)}, r"shape\.row_bytes"),
    ):
        with pytest.raises(forebay.InvalidArgument, match=says):
            forebay.footprint(dataclasses.replace(shape, **wrong), lanes=2, max_tokens=64, slots=16)
    for name, value in (("gpu", np.float32(2.5e9)), ("context", "many"), ("ratio", "much")):
        with pytest.raises(forebay.InvalidArgument, match=name):
            forebay.plan(shape, **{"gpu": 1 << 30, "context": 64, name: value})  # type: ignore[arg-type]
