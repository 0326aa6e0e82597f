"""Choice tables, choosers and plans."""

from __future__ import annotations

import numpy as np
import pytest

import forebay
from forebay.choice import best

# None exposes what is missed, DA half of it and 5 us, DBA nothing and 30 us.
PRICES = forebay.Prices([0, 100], [[[0, 100e3], [5e3, 55e3], [30e3, 30e3]]])


def test_a_table_is_text_and_back() -> None:
    table = forebay.Table(("none", "da", "dba", "da"), version=7)
    text = table.to_text()
    assert forebay.Table.from_text(text) == table
    with pytest.raises(forebay.ForebayError):
        forebay.Table.from_text(text.replace("dba", "dbx"))
    with pytest.raises(forebay.InvalidArgument, match=r"by_layer\[1\]"):
        forebay.Table(("none", "both")).to_text()


def test_the_best_order_is_the_cheapest() -> None:
    assert best(PRICES, [0, 20, 90]) == ("none", "da", "dba")
    with pytest.raises(forebay.InvalidArgument, match="exposed"):
        best(forebay.Prices([0, 100], [[1, 2], [3, 4]]), [0])
    with pytest.raises(forebay.InvalidConfig):
        best(PRICES, [float("nan")])


def test_a_chooser_moves_when_misses_do() -> None:
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


def test_a_plan_says_what_fits() -> None:
    shape = forebay.Shape.preset("deepseek-v3.2")
    plan = forebay.plan(shape, gpu=80 << 30, context=32768, weights=30 << 30, batch=128)
    assert plan.offloads and 0 < plan.ratio < 1 and plan.batch == 128 and plan.slots > 0
    assert plan.available == 50 << 30
    device = plan.index_key_bytes + plan.slot_bytes + plan.landing_bytes + plan.scratch_bytes
    assert device + plan.padding_bytes + plan.table_bytes <= plan.available
    assert plan.host_pages > 0 and plan.row_bytes > 0
    small = forebay.plan(shape, gpu=80 << 30, context=1024, weights=1 << 30, batch=1)
    assert not small.offloads and any("does not pay" in note for note in small.notes)
    with pytest.raises(forebay.OutOfMemory):
        forebay.plan(shape, gpu=1 << 30, context=1 << 20, weights=1 << 30, batch=64)
    with pytest.raises(forebay.InvalidArgument, match="batch"):
        forebay.plan(shape, gpu=80 << 30, context=32768, batch=-1)
    assert np.isfinite(plan.ratio)
