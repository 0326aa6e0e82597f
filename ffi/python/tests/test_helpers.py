"""Helpers for engines: FlashMLA's arguments, block tables, a Prometheus collector."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
import weakref
from typing import Any, Callable

import numpy as np
import pytest

import forebay
from conftest import LAYERS, joined, skip, whole
from forebay import flashmla

Make = Callable[..., forebay.Cache]

def needs_prometheus(name: str) -> None:
    """Skips a test if the client library is not installed."""
    if importlib.util.find_spec("prometheus_client") is None:
        skip(name, "prometheus_client is not installed")


FP8 = forebay.Shape(layers=2, row_bytes=(656, 0), top_k=64, index_key_bytes=4, page_tokens=16)


def test_slots_are_flashmlas_indices(make: Make) -> None:
    cache = make(shape=FP8, slots=128)
    with cache.open(prompt=100) as sequence:
        rows = np.random.default_rng(1).integers(0, 256, (100, 656), np.uint8)
        for layer in range(2):
            sequence.append(layer, rows)
        sequence.join()
        selection = np.full((1, 1, 64), -1, np.int32)
        selection[0, 0, :40] = np.arange(30, 70)
        slots = np.empty_like(selection)
        with cache.prepare([(sequence, 0, 1)]) as step:
            step.layer(1, selection, slots)
            indices, blocks = flashmla.indices(slots), flashmla.kv_cache(cache, 1)
            assert indices is slots and blocks.shape[1:] == (64, 1, 656)
            # FlashMLA's indices: block x page size + offset.
            for position, index in zip(selection.ravel(), indices.ravel()):
                assert index == -1 if position == -1 else (blocks[index // 64, index % 64, 0] == rows[position]).all()
            whole(step, 1)


def test_arguments_that_flashmla_rejects_are_refused(make: Make) -> None:
    with pytest.raises(forebay.InvalidArgument, match="multiple of 64"):
        flashmla.indices(np.zeros((1, 1, 8), np.int32))
    with pytest.raises(forebay.InvalidArgument, match="int64"):
        flashmla.indices(np.zeros((1, 1, 64), np.int64))
    cache = make()
    with pytest.raises(forebay.InvalidArgument, match="656"):
        flashmla.kv_cache(cache, 0)
    with pytest.raises(forebay.InvalidArgument, match="which"):
        flashmla.split_indices(forebay.Buffers.empty(cache, 1, 1), 0)
    wide = make(shape=FP8, slots=128)
    buffers = forebay.Buffers.empty(wide, 1, 1, split=True)
    assert flashmla.split_indices(buffers, 1).shape == (1, 1, 64)
    with pytest.raises(forebay.InvalidArgument, match="which"):
        flashmla.split_indices(buffers, 2)


def test_block_tables_name_the_pages_of_index_keys(make: Make) -> None:
    cache = make()
    sequences = [joined(cache, 20, 4), joined(cache, 60, 4)]
    table = flashmla.block_table(sequences, fill=-1)
    assert table.dtype == np.int32 and table.shape[0] == 2
    for row, sequence in zip(table.tolist(), sequences):
        pages = [page.index_keys for page in sequence.pages()]
        assert row == pages + [-1] * (len(row) - len(pages))
    out = np.full((4, 12), 7, np.int32)
    flashmla.block_table(sequences, pages=12, out=out)
    assert (out[2:] == 0).all() and out[0, 0] == table[0, 0]
    with pytest.raises(forebay.InvalidArgument, match="pages"):
        flashmla.block_table(sequences, pages=1)
    for wrong, says in (([sequences[0], 7], r"sequences\[1\]"), (sequences, "pages")):
        with pytest.raises(forebay.InvalidArgument, match=says):
            flashmla.block_table(wrong, pages=-1)  # type: ignore[arg-type]
    with pytest.raises(forebay.InvalidArgument, match="out"):
        flashmla.block_table(sequences, out=np.zeros((2, 12), np.int64))


def test_a_collector_shows_the_last_stats_of_the_driving_thread(make: Make) -> None:
    needs_prometheus("a_collector_shows_the_last_stats_of_the_driving_thread")
    import prometheus_client

    from forebay.prometheus import Collector

    registry = prometheus_client.CollectorRegistry()
    collector = Collector(registry)
    cache = make()
    collector.add("rank0", cache)
    sequence = joined(cache, bring_up="nothing")

    def value(name: str) -> Any:
        return registry.get_sample_value(name, {"cache": "rank0"})

    assert value("forebay_steps_total") == 0
    with cache.prepare([(sequence, 0, 1)]) as step:
        step.layer(0, np.array([[[1, 2, 3, -1, -1, -1, -1, -1]]], np.int32), np.empty((1, 1, 8), np.int32))
        whole(step, 0)
    assert (value("forebay_steps_total"), value("forebay_misses_total")) == (1, 3)
    assert value("forebay_sequences") == 1
    assert (value("forebay_slots_in_use"), value("forebay_resizes_total")) == (LAYERS * 64, 0)
    text = prometheus_client.generate_latest(registry).decode()
    assert 'forebay_free_lanes{cache="rank0"} 3.0' in text and "# TYPE forebay_hits_total counter" in text
    for field in cache.stats()._fields:
        assert f"forebay_{field}" in text, field
    cache.close()
    assert value("forebay_steps_total") is None
    collector.remove("rank0")
    del cache, sequence, step
    gc.collect()
    assert list(collector.collect())[0].samples == []


def test_a_collectors_name_shows_its_own_cache(make: Make) -> None:
    needs_prometheus("a_collectors_name_shows_its_own_cache")
    from forebay.prometheus import Collector

    def step(cache: forebay.Cache, sequence: forebay.Sequence, accepted: int) -> None:
        with cache.prepare([(sequence, accepted, 1)]) as one:
            whole(one)

    def value(name: str) -> Any:
        found = [metric.samples for metric in collector.collect() if metric.name == f"forebay_{name}"][0]
        return found[0].value if found else None

    collector = Collector()
    old, new = make(), make()
    sequence = joined(old)
    collector.add("m", old)
    collector.add("m", new)
    step(old, sequence, 0)
    assert value("steps") == 0
    waits = joined(new)
    # No step was retired since: an engine that admits requests publishes the stats itself, by `take`.
    assert value("sequences") == 0
    collector.take("m")
    assert value("sequences") == 1
    step(new, waits, 0)
    assert value("steps") == 1
    collector.remove("m")
    step(new, waits, 1)
    assert value("steps") is None and collector._last == {}
    for name in ("m", "another"):
        with pytest.raises(forebay.InvalidArgument, match="name"):
            collector.take(name)
    # A cache may outlive the collectors that watch it.
    gone = weakref.ref(collector)
    del collector
    gc.collect()
    assert gone() is None
    step(new, waits, 1)


def test_the_package_imports_no_optional_package_by_itself() -> None:
    heavy = ("torch", "prometheus_client", "cupy", "jax", "cffi")
    script = f"import sys, forebay; print([m for m in {heavy} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True)
    assert ran.stdout == "[]\n"
