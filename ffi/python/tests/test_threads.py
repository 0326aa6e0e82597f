"""Threads: calls release the interpreter's lock, and one thread at a time uses a cache."""

from __future__ import annotations

import sys
import threading
from typing import Any, Callable, Dict

import numpy as np
import pytest

import forebay
from conftest import LAYERS, TOP_K, empty, joined, some, whole
from forebay._library import NULL, lib
from forebay.calls import caller
from forebay.device import end_left

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


def behind(device: forebay.Device) -> None:
    """Waits for what a device's first stream has now, also when the device is closed and its memory is in use."""
    assert lib.fb_stream_wait(device._handle.pointer, NULL) == 0


class Paused(Dict[int, Any]):
    """Calls of a device. A thread that has noted one waits before it enqueues it."""

    def __init__(self) -> None:
        super().__init__()
        self.noted, self.goes_on = threading.Event(), threading.Event()

    def __setitem__(self, key: int, call: Any) -> None:
        super().__setitem__(key, call)
        self.noted.set()
        assert self.goes_on.wait(60)


@pytest.mark.parametrize("threads", [False, True])
def test_a_call_that_a_close_overtakes_raises_and_does_not_run(threads: bool) -> None:
    device = forebay.HostDevice(threads=threads)
    # The view keeps the C device, which would refuse the call otherwise.
    view = device.allocate(64)
    handle, calls, seen = device._handle, Paused(), []
    handle.calls, handle.call = calls, caller(calls, handle.failed)

    def enqueue() -> None:
        try:
            device.call(lambda: seen.append("ran"))
            seen.append("enqueued")
        except forebay.Closed:
            seen.append("refused")

    enqueues = threading.Thread(target=enqueue)
    enqueues.start()
    assert calls.noted.wait(60)
    device.close()
    calls.goes_on.set()
    enqueues.join(60)
    behind(device)
    assert seen == ["refused"] and not calls
    del view
    end_left()


def test_every_call_beside_a_close_runs_or_raises() -> None:
    switches = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for turn in range(200):
            device = forebay.HostDevice(threads=True)
            view, ran, done, begun = device.allocate(64), [], [], threading.Event()

            def enqueue() -> None:
                try:
                    while True:
                        device.call(lambda: ran.append(1))  # noqa: B023 - joined in this turn
                        done.append(1)  # noqa: B023 - the same
                        begun.set()  # noqa: B023 - the same
                except forebay.ForebayError:
                    return

            enqueues = threading.Thread(target=enqueue)
            enqueues.start()
            assert begun.wait(60)
            sum(range(10 * turn))
            device.close()
            enqueues.join(60)
            behind(device)
            assert len(ran) == len(done)
            del view
    finally:
        sys.setswitchinterval(switches)
    end_left()
