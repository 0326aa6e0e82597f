"""The engine's work by a Python callable, in each order; captures; a callable that fails."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import numpy as np
import pytest

import forebay
from conftest import LAYERS, TOP_K, joined, row_of

Make = Callable[..., forebay.Cache]
ORDERS = ("none", "da", "dba")


class Engine:
    """Selects by position and layer, writes stamped rows, and reads the rows that it attends to."""

    def __init__(self, cache: forebay.Cache, sequences: list[forebay.Sequence], buffers: forebay.Buffers) -> None:
        self.cache, self.sequences, self.buffers = cache, sequences, buffers
        self.calls: list[forebay.EngineCall] = []
        self.read: dict[tuple[int, int], list[int]] = {}
        self.length = 40

    def __call__(self, call: forebay.EngineCall) -> None:
        self.calls.append(call)
        rows = range(call.first, call.first + call.count)
        if call.work == "index":
            for row in rows:
                self.buffers.selection[row, 0] = [(3 * at + 5 * call.layer + row) % 40 for at in range(TOP_K)]
        elif call.work == "prepare":
            for row in rows:
                slot = self.sequences[row].landing_slot(0) if self.outside else self.landing[row]
                self.cache_slab[call.layer][slot // 64, slot % 64] = row_of(call.layer, self.length)
        elif call.work == "attend":
            for row in rows:
                slots = self.buffers.slots[row, 0].tolist()
                if call.attended != "all":
                    part = 0 if call.attended == "resident" else 1 + call.attention_wave
                    count = int(self.buffers.counts[part, row, 0])
                    slots = self.buffers.lists[part, row, 0].tolist()[:count]
                found = [self.cache_slab[call.layer][slot // 64, slot % 64].tobytes() for slot in slots]
                positions = [int(np.frombuffer(row, np.uint32)[1]) for row in found]
                assert all(row == row_of(call.layer, p).tobytes() for row, p in zip(found, positions))
                self.read.setdefault((call.layer, row), []).extend(positions)

    outside = False

    def ready(self) -> None:
        """Looks up everything that the callable needs, because it may not call into its cache."""
        self.landing = [sequence.landing_slot(0) for sequence in self.sequences]
        self.cache_slab = [self.cache.slab(layer) for layer in range(LAYERS)]


def begin(make: Make, *, rows: int = 2, **changes: Any) -> tuple[forebay.Cache, Engine, forebay.Layers]:
    cache = make(**changes)
    sequences = [joined(cache, bring_up="nothing") for _ in range(rows)]
    buffers = forebay.Buffers.empty(cache, rows, 1, split=True)
    engine = Engine(cache, sequences, buffers)
    engine.ready()
    return cache, engine, forebay.Layers(buffers, half=1)


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_attends_to_the_selected_rows(make: Make, order: str) -> None:
    cache, engine, layers = begin(make)
    for turn in range(2):
        engine.read.clear()
        step = cache.prepare([(s, min(turn, 1), 1) for s in engine.sequences])
        cache.overlap_steps([step], [layers], [order] * LAYERS, engine)
        retired = step.retire()
        for layer in range(LAYERS):
            for row in range(2):
                selected = [(3 * at + 5 * layer + row) % 40 for at in range(TOP_K)]
                assert sorted(engine.read[layer, row]) == sorted(selected)
        # Besides a new row of the previous step, the same rows are hits again.
        assert (retired.hits, retired.misses) == ((0, 2 * LAYERS * TOP_K) if turn == 0 else (2 * LAYERS * TOP_K, 0))
        engine.length += 1
    works = [call.work for call in engine.calls if call.layer == 0]
    assert works[0] == "project" and works.count("index") == (4 if order == "dba" else 2)
    assert ("merge" in works) == (order != "none")
    assert bytes(engine.sequences[1].read_row(2, 40)) == bytes(row_of(2, 40))


def test_layer_by_layer_is_the_same(make: Make) -> None:
    counts = []
    for whole in (True, False):
        cache, engine, layers = begin(make)
        step = cache.prepare([(s, 0, 1) for s in engine.sequences])
        if whole:
            cache.overlap_steps([step], [layers], ["da", "none", "dba"], engine)
        else:
            for layer, order in enumerate(["da", "none", "dba"]):
                cache.overlap(step, layer, order, layers, engine)
        counts.append((step.retire().layers, [(c.work, c.attended, c.layer, c.first, c.count) for c in engine.calls]))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "by_layer", [("none", "ahead", "ahead"), ("dba", "ahead", "ahead"), ("da", "da", "ahead"), ("dba", "dba", "none")]
)
@pytest.mark.parametrize("whole", [True, False])
def test_an_index_group_has_the_same_slots_in_every_order(
    make: Make, shape: forebay.Shape, by_layer: tuple[str, ...], whole: bool
) -> None:
    """Layer 0 selects for all. Half of what a step selects is in scratch slots."""
    found: list[tuple[Any, ...]] = []
    for orders in (("none",) * LAYERS, by_layer):
        cache, engine, _ = begin(make, shape=dataclasses.replace(shape, group_layers=LAYERS), slots=TOP_K // 2)
        layers = forebay.Layers(engine.buffers, half=1, gather=cache.device.stream())
        slots = []
        for turn in range(3):
            engine.read.clear()
            step = cache.prepare([(s, min(turn, 1), 1) for s in engine.sequences])
            if whole:
                cache.overlap_steps([step], [layers], orders, engine)
            else:
                for layer, order in enumerate(orders):
                    cache.overlap(step, layer, order, layers, engine)
            retired = step.retire()
            slots.append((engine.buffers.slots.copy(), retired.layers))
            for (layer, row), positions in engine.read.items():
                assert sorted(positions) == sorted((3 * at + row) % 40 for at in range(TOP_K)), layer
            assert len(engine.read) == 2 * LAYERS
            engine.length += 1
        assert {call.layer for call in engine.calls if call.work == "index"} == {0}
        found.append((slots, [sequence.digest() for sequence in engine.sequences]))
    for (none, none_counts), (ahead, ahead_counts) in zip(found[0][0], found[1][0]):
        assert np.array_equal(none, ahead) and none_counts == ahead_counts
    assert found[0][1] == found[1][1]


def test_the_order_ahead_needs_a_layer_that_selects_and_has_run(make: Make, shape: forebay.Shape) -> None:
    cache, engine, layers = begin(make, shape=dataclasses.replace(shape, lone_layers=1, group_layers=2))
    plain = forebay.Layers(forebay.Buffers.empty(cache, 2, 1))
    for _ in range(2):
        engine.calls.clear()
        step = cache.prepare([(s, 0, 1) for s in engine.sequences])
        for layer in (0, 1):
            with pytest.raises(forebay.InvalidConfig, match="the order ahead in a layer that selects for itself"):
                cache.overlap(step, layer, "ahead", layers, engine)
        with pytest.raises(forebay.InvalidConfig, match="the order ahead"):
            cache.overlap_steps([step], [layers], ["none", "ahead", "ahead"], engine)
        with pytest.raises(forebay.InvalidState, match="has not resolved the layer that selects"):
            cache.overlap(step, 2, "ahead", layers, engine)
        assert engine.calls == []
        engine.buffers = plain.buffers
        cache.overlap(step, 0, "none", plain, engine)
        cache.overlap(step, 1, "none", plain, engine)
        # No index lists: attention is not split.
        cache.overlap(step, 2, "ahead", plain, engine)
        engine.buffers = layers.buffers
        step.retire()


@pytest.mark.parametrize("at", range(0, 14, 3))
def test_an_exception_of_the_callable_is_raised_and_abandons_the_step(make: Make, at: int) -> None:
    cache, engine, layers = begin(make)
    step = cache.prepare([(s, 0, 1) for s in engine.sequences])
    left = iter(range(at))

    def failing(call: forebay.EngineCall) -> None:
        if next(left, None) is None:
            raise KeyError("the engine's own")
        engine(call)

    with pytest.raises(KeyError, match="the engine's own"):
        cache.overlap_steps([step], [layers], ["da"] * LAYERS, failing)
    with pytest.raises(forebay.Cancelled):
        step.retire()
    for sequence in engine.sequences:
        assert sequence.truncate(40).done
    step = cache.prepare([(s, 0, 1) for s in engine.sequences])
    cache.overlap_steps([step], [layers], ["da"] * LAYERS, engine)
    step.retire()
    cache.validate()


def test_a_callable_may_not_call_into_its_cache(make: Make) -> None:
    cache, engine, layers = begin(make)
    step = cache.prepare([(s, 0, 1) for s in engine.sequences])
    with pytest.raises(forebay.Busy):
        cache.overlap_steps([step], [layers], ["none"] * LAYERS, lambda call: cache.stats())
    with pytest.raises(forebay.Cancelled):
        step.retire()


def test_bad_orders_and_layers_are_named(make: Make) -> None:
    cache, engine, layers = begin(make)
    step = cache.prepare([(s, 0, 1) for s in engine.sequences])
    for by_layer in (["none"], "none", ["none", "da", "both"]):
        with pytest.raises(forebay.InvalidArgument, match="by_layer"):
            cache.overlap_steps([step], [layers], by_layer, engine)
    with pytest.raises(forebay.InvalidArgument, match="enqueue"):
        cache.overlap_steps([step], [layers], ["none"] * 3, None)  # type: ignore[arg-type]
    with pytest.raises(forebay.InvalidArgument, match="layers"):
        cache.overlap_steps([step], [], ["none"] * 3, engine)
    with pytest.raises(forebay.InvalidArgument, match=r"steps\[0\]"):
        cache.overlap_steps([7], [layers], ["none"] * 3, engine)  # type: ignore[list-item]
    with pytest.raises(forebay.OutOfRange):
        cache.overlap(step, LAYERS, "none", layers, engine)
    with pytest.raises(forebay.InvalidArgument, match="buffers"):
        forebay.Layers(None)  # type: ignore[arg-type]
    plain = forebay.Layers(forebay.Buffers.empty(cache, 2, 1))
    with pytest.raises(forebay.InvalidConfig):
        cache.overlap(step, 0, "da", plain, engine)
    assert engine.calls == []
    cache.overlap_steps([step], [layers], ["none"] * 3, engine)
    step.retire()


def test_a_host_device_captures_nothing(make: Make) -> None:
    cache, engine, layers = begin(make)
    called: list[Any] = []
    with pytest.raises(forebay.ForebayError):
        cache.capture([layers], query_rows=1, by_layer=["none"] * LAYERS, enqueue=called.append)


def test_more_rows_than_the_buffers_have_are_refused(make: Make) -> None:
    cache, engine, layers = begin(make)
    arrays = [np.full((4, 1, TOP_K), -77, np.int32) for _ in range(2)]
    one_row = forebay.Buffers(cache, *(array[:1] for array in arrays))
    with pytest.raises(forebay.InvalidArgument, match="batch.*1 row$"):
        forebay.Layers(one_row, batch=4)
    assert forebay.Layers(one_row, batch=1).buffers is one_row
    step = cache.prepare([(s, 0, 1) for s in engine.sequences])
    with pytest.raises(forebay.InvalidArgument, match="buffers"):
        cache.overlap_steps([step], [forebay.Layers(one_row)], ["none"] * LAYERS, engine)
    assert all((array == -77).all() for array in arrays)
    cache.overlap_steps([step], [layers], ["none"] * LAYERS, engine)
    step.retire()


def test_bad_arguments_of_a_capture_are_named(make: Make) -> None:
    cache, engine, layers = begin(make)
    other = forebay.Layers(forebay.Buffers.empty(make(), 2, 1, split=True), batch=2)
    two = forebay.Layers(forebay.Buffers.empty(cache, 2, 2, split=True), batch=2)
    for given, says in (
        ([3], r"micro_batches\[0\]"),
        (layers, "micro_batches"),
        ([layers, other], r"micro_batches\[1\]"),
        ([two], r"micro_batches\[0\].*2 query rows"),
    ):
        with pytest.raises(forebay.InvalidArgument, match=says):
            cache.capture(given, query_rows=1, by_layer=["none"] * LAYERS, enqueue=engine)  # type: ignore[arg-type]
    for by_layer in (5, [["none"]] * LAYERS):
        with pytest.raises(forebay.InvalidArgument, match="by_layer"):
            cache.capture([layers], query_rows=1, by_layer=by_layer, enqueue=engine)  # type: ignore[arg-type]
    with pytest.raises(forebay.InvalidArgument, match="query_rows"):
        cache.capture([layers], query_rows=-1, by_layer=["none"] * LAYERS, enqueue=engine)
    step = cache.prepare([(s, 0, 1) for s in engine.sequences])
    with pytest.raises(forebay.InvalidArgument, match="steps"):
        cache.overlap_steps(step, [layers], ["none"] * LAYERS, engine)  # type: ignore[arg-type]
    with pytest.raises(forebay.InvalidArgument, match=r"layers\[0\]"):
        cache.overlap_steps([step], [other], ["none"] * LAYERS, engine)
    assert engine.calls == []
