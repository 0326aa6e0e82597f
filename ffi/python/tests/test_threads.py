"""Threads: calls release the interpreter's lock, and one thread at a time uses a cache."""

from __future__ import annotations

import threading
from typing import Any, Callable

import numpy as np
import pytest

import forebay
from conftest import LAYERS, TOP_K, empty, joined, some, whole

Make = Callable[..., forebay.Cache]


def test_a_second_thread_on_one_cache_is_refused(make: Make) -> None:
    """While one thread's call is in the library, held there by work of its stream, another thread's call is refused."""
    cache = make()
    sequence = joined(cache)
    step = cache.prepare([(sequence, 0, 1)])
    inside, leave = threading.Event(), threading.Event()
    layers = forebay.Layers(forebay.Buffers.empty(cache, 1, 1))

    def enqueue(call: forebay.EngineCall) -> None:
        inside.set()
        assert leave.wait(30)

    thread = threading.Thread(target=cache.overlap, args=(step, 0, "none", layers, enqueue))
    thread.start()
    try:
        assert inside.wait(30)
        for call in (
            lambda: step.layer(1, some(1), empty()),
            lambda: cache.open(prompt=8),
            cache.stats,
            cache.close,
            lambda: sequence.length,
        ):
            with pytest.raises(forebay.Busy):
                call()
    finally:
        leave.set()
        thread.join()
    assert not cache.closed
    whole(step, 0)
    step.retire()


def test_racing_threads_succeed_or_get_busy(make: Make) -> None:
    cache = make()
    served, refused, other = [0], [0], []

    def drive() -> None:
        for _ in range(300):
            try:
                sequence = cache.open(prompt=8)
                sequence.append_in_place(8)
                sequence.close()
                served[0] += 1
            except forebay.Busy:
                refused[0] += 1
            except forebay.Exhausted:
                pass
            except BaseException as error:
                other.append(error)

    threads = [threading.Thread(target=drive) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert other == [] and served[0] > 0
    cache.reap()
    cache.validate()


def test_two_threads_drive_two_caches_at_once(make: Make) -> None:
    device = forebay.HostDevice(threads=True)
    caches = [make(device), make(device)]
    found: dict[int, Any] = {}

    def drive(at: int, cache: forebay.Cache) -> None:
        sequence = joined(cache, bring_up="nothing")
        chance = np.random.default_rng(3)
        counts = []
        for turn in range(40):
            step = cache.prepare([(sequence, min(turn, 0), 1)], stream=None)
            for layer in range(LAYERS):
                selection = chance.integers(0, 40, (1, 1, TOP_K), np.int32)
                step.layer(layer, selection, empty())
                step.scatter(layer)
            retired = step.retire(wait=True)
            counts.append((retired.hits, retired.misses))
        found[at] = (counts, sequence.digest())

    threads = [threading.Thread(target=drive, args=pair) for pair in enumerate(caches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] and sum(misses for _, misses in found[0][0]) > 0


def test_calls_release_the_interpreters_lock(make: Make) -> None:
    """Otherwise a call that waits for another thread's action would hang for ever."""
    device = forebay.HostDevice(threads=True)
    make(device)
    go = threading.Event()
    device.call(lambda: go.wait(30))
    threading.Timer(0.0, go.set).start()
    device.wait()
    assert go.is_set()
