"""Memory that enqueued work uses lives until the work ends, whatever happens to steps, tickets, caches and devices."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import weakref
from typing import Any, Callable, Iterator

import numpy as np
import pytest

import forebay
from conftest import LAYERS, TOP_K, OnCuda, empty, joined, some, whole
from test_cuda import cuda  # noqa: F401 - a fixture
from test_lifetimes import run

Make = Callable[..., forebay.Cache]
Hold = Callable[..., "Gate"]


class Gate:
    """Holds a stream of a device with threads."""

    def __init__(self, device: forebay.Device, stream: Any) -> None:
        self.device, self.stream, self.opened = device, stream, threading.Event()
        device.call(lambda: self.opened.wait(60), stream)

    def open(self) -> None:
        self.opened.set()
        self.device.wait(self.stream)


@pytest.fixture
def hold(make: Make) -> Iterator[Callable[..., Gate]]:
    """Holds streams, and releases them before the test's caches end."""
    gates: list[Gate] = []

    def held(device: forebay.Device, stream: Any = None) -> Gate:
        gates.append(Gate(device, stream))
        return gates[-1]

    yield held
    for gate in gates:
        gate.opened.set()


def threaded(make: Make, **changes: Any) -> tuple[forebay.Device, forebay.Cache, forebay.Sequence]:
    """A cache whose work runs later, and a sequence that has joined."""
    device = forebay.HostDevice(threads=True)
    cache = make(device, **changes)
    sequence = joined(cache)
    device.wait()
    cache.reap()
    return device, cache, sequence


@pytest.mark.parametrize("how", ["forgotten", "raised", "left running"])
@pytest.mark.parametrize("as_buffers", [False, True])
def test_tensors_of_an_abandoned_step_live_until_it_has_ended(
    make: Make, hold: Hold, how: str, as_buffers: bool
) -> None:
    device, cache, sequence = threaded(make)
    gate = hold(device)

    def enqueue() -> list[Any]:
        selection, slots = some(1, 2), empty()
        step = cache.prepare([(sequence, 0, 1)])
        given = (forebay.Buffers(cache, selection, slots),) if as_buffers else (selection, slots)
        if how == "forgotten":
            step.layer(0, *given)
        elif how == "raised":
            with pytest.raises(KeyError), step:
                step.layer(0, *given)
                raise KeyError
        else:
            with step:
                for layer in range(LAYERS):
                    step.layer(layer, *given)
                    step.scatter(layer)
            assert step.retired is None
        return [weakref.ref(selection), weakref.ref(slots)]

    named = enqueue()
    gc.collect()
    cache.reap()
    assert all(one() is not None for one in named) and cache.stats().steps_in_flight == 1
    gate.open()
    sequence.truncate(40)
    gc.collect()
    assert all(one() is None for one in named) and cache.stats().steps_in_flight == 0


def test_steps_whose_bodies_raise_do_not_pile_up(make: Make, hold: Hold) -> None:
    device, cache, sequence = threaded(make)
    for _ in range(5):
        gate = hold(device)
        with pytest.raises(KeyError), cache.prepare([(sequence, 0, 1)]):
            raise KeyError
        with pytest.raises(forebay.Busy):
            sequence.truncate(40)
        gate.open()
        sequence.truncate(40)
        device.wait()


def test_a_warm_up_lives_until_its_join_has_ended_without_its_ticket(make: Make, hold: Hold) -> None:
    device = forebay.HostDevice(threads=True)
    cache = make(device)
    sequence = cache.open(prompt=8)
    sequence.append_in_place(8)
    gate = hold(device)

    def join() -> weakref.ref[Any]:
        warm_up = np.full((LAYERS, 1, TOP_K), 3, np.int32)
        sequence.join(warm_up=warm_up)
        return weakref.ref(warm_up)

    named = join()
    gc.collect()
    cache.reap()
    assert named() is not None
    gate.open()
    cache.reap()
    gc.collect()
    assert named() is None


def refused(join: Callable[[Any], object], warm_up: Any) -> tuple[weakref.ref[Any], type[BaseException] | None]:
    """Makes the join; returns a weak reference to the warm-up, and the type of the exception, if one was raised."""
    named, kind = weakref.ref(warm_up), None
    try:
        join(warm_up)
    except forebay.ForebayError as error:
        kind = type(error)
    del warm_up
    return named, kind


def held(cache: forebay.Cache) -> list[forebay.Ticket]:
    """The joins of which the cache's record has something."""
    return [ticket for joins in cache._record.joins.values() for ticket in joins]


def warm() -> Any:
    return np.full((LAYERS, 1, TOP_K), 3, np.int32)


@pytest.mark.parametrize("why", ["incomplete", "joined", "closed", "busy", "stream"])
def test_a_refused_warm_up_is_released_at_once_or_with_its_sequence(
    make: Make, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, cache, sequence = threaded(make)
    own = sequence if why == "joined" else cache.open(prompt=8)
    if why not in ("incomplete", "joined"):
        own.append_in_place(8)
    if why == "closed":
        own.close()
    if why == "stream":
        # A stream that no device knows; the package lets none through.
        monkeypatch.setattr(device, "stream_of", lambda _stream: forebay._library.ffi.cast("void *", 0xF0EBA0))
    found: list[Any] = []

    def call(_call: object = None) -> None:
        found.append(refused(lambda warm_up: own.join(warm_up=warm_up), warm()))

    if why == "busy":
        buffers = forebay.Buffers.empty(cache, 1, 1)
        step = cache.prepare([(sequence, 0, 1)])
        cache.overlap(step, 0, "none", forebay.Layers(buffers), call)
        step.abandon()
    else:
        call()
    kinds = {"closed": forebay.Closed, "busy": forebay.Busy, "stream": forebay.OutOfRange}
    gc.collect()
    if why == "incomplete":
        # An engine that retries until its prefill is complete keeps one warm-up once.
        warm_up = warm()
        for _ in range(3):
            found.append(refused(lambda given: own.join(warm_up=given), warm_up))
        del warm_up
        gc.collect()
        assert len(held(cache)) == 2
    # A refusal inside the library does not say whether something was enqueued.
    let_in = why in ("incomplete", "stream")
    assert found and all(kind is kinds.get(why, forebay.InvalidState) for _named, kind in found)
    assert all((named() is not None) == let_in for named, _kind in found)
    if let_in:
        monkeypatch.undo()
        own.close()
        device.wait()
        cache.reap()
        gc.collect()
        assert all(named() is None for named, _kind in found)
    assert not held(cache)


@pytest.mark.parametrize(("code", "refusal"), [(2, forebay.OutOfMemory), (900, forebay.InvalidState)])
@pytest.mark.parametrize("retried", [True, False])
def test_a_warm_up_that_the_device_refused_is_released_once_nothing_can_read_it(
    make: Make,
    cuda: forebay.CudaDevice,  # noqa: F811
    retried: bool,
    code: int,
    refusal: type[BaseException],
) -> None:
    """The driver refuses one of a join's calls on a held stream, because of memory or a capture. The work enqueued
    before the refusal runs late: until another join on another stream has ended, or until the sequence, closed on
    another stream, is reaped. A join is accepted if the driver refuses only the record that keeps warm-ups apart, which
    the device's next warm-up makes good."""
    driver = ctypes.CDLL(os.environ["FOREBAY_STANDIN_LIBRARY"])
    cache, stream, other, kept, accepted = make(cuda), cuda.stream(), cuda.stream(), 0, 0
    address = ctypes.c_uint64(stream.address)
    for at in range(0, 20, 3):
        sequence = cache.open(prompt=8)
        sequence.append_in_place(8)
        driver.standin_hold(address, 1)
        warm_up = OnCuda(cuda.allocate(4 * LAYERS * TOP_K), (LAYERS, 1, TOP_K))
        warm_up.host()[:] = 3
        driver.standin_fail_call(ctypes.c_uint64(at), code)
        named, kind = refused(lambda given: sequence.join(stream, warm_up=given), warm_up)
        driver.standin_fail_call(ctypes.c_uint64(0xFFFFFFFFFFFFFFFF), 2)
        del warm_up
        gc.collect()
        assert kind in (refusal, None)
        accepted += kind is None
        if retried and kind is refusal:
            try:
                sequence.join(other)
            except forebay.InvalidState:
                # The call had come as far as the rows.
                sequence.join_more(other)
        else:
            sequence.close(other)
        for _ in range(2):
            cache.reap(other)
            gc.collect()
            # The stream is held: the accepted work has not run.
            assert bool(held(cache)) == (named() is not None)
        kept += named() is not None
        driver.standin_hold(address, 0)
        cuda.wait(stream)
        cuda.wait(other)
        for _ in range(2):
            cache.reap(other)
        gc.collect()
        assert named() is None and not held(cache), at
        sequence.close(stream)
        cuda.wait(stream)
        cache.reap(stream)
    assert kept > 3 and accepted <= 2
    cache.validate()


def test_an_export_made_for_a_call_lives_as_long_as_its_work(make: Make, hold: Hold) -> None:
    """With a DLPack producer whose export is a copy, which the capsule frees."""
    made: list[weakref.ref[Any]] = []

    class Copies:
        shape = (1, 1, TOP_K)

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **given: Any) -> Any:
            copy = some(1, 2)
            made.append(weakref.ref(copy))
            return copy.__dlpack__(**given)

    from forebay.tensors import HOST, words

    address = words(Copies(), "selection", (1, 1, TOP_K), HOST, False)
    gc.collect()
    assert made[-1]() is not None and list(address[0:2]) == [1, 2]
    del address
    assert made[-1]() is None
    device, cache, sequence = threaded(make)
    gate = hold(device)
    step = cache.prepare([(sequence, 0, 1)])
    step.layer(0, Copies(), empty())
    buffers = forebay.Buffers(cache, Copies(), empty())
    step.layer(1, buffers)
    del buffers
    gc.collect()
    # Buffers look at the shape first.
    held = [made[1], made[-1]]
    assert all(one() is not None for one in held)
    whole(step, 0, 1)
    gate.open()
    step.retire(wait=True)
    gc.collect()
    assert all(one() is None for one in held)


def test_the_garbage_collector_does_not_wait_for_its_own_thread() -> None:
    run("""
device, cache = make(threads=True)
sequence = joined(cache)
step = cache.prepare([(sequence, 0, 1)])
class Node: pass
node = Node()
node.kept, node.cache, node.sequence, node.step = node, cache, sequence, step
gc.disable()
del node, cache, sequence, step
device.call(gc.collect)
device.wait()
device.close()
settle()
assert ended()
device, cache = make(threads=True)
node = Node()
node.kept, node.device, node.cache = node, device, cache
leave = threading.Event()
device.call(lambda: (leave.wait(), gc.collect()))
pointer = device._handle.pointer
del node, device, cache
leave.set()
lib.fb_stream_wait(pointer, ffi.NULL)
settle()
assert ended()
print("done")
""")


def test_a_call_that_runs_at_the_interpreters_end_ends_before_it() -> None:
    run("""
import time
device, cache = make(threads=True)
slab = cache.slab(0)
cache.close()
inside = threading.Event()
def work():
    inside.set()
    for _ in range(20):
        time.sleep(0.01)
    print("done", flush=True)
device.call(work, device.stream())
inside.wait()
""")


def test_a_view_outlives_even_the_interpreters_last_calls() -> None:
    run("""
class Last:
    def __init__(self, view):
        self.view, self.write = view, os.write
    def __del__(self):
        if self.view[1 << 20] == 7:
            self.write(1, b"done\\n")
device = forebay.HostDevice()
last = Last(device.allocate(1 << 24))
last.view[:] = 7
del device
gc.collect()
""")


def test_a_close_that_is_refused_changes_nothing() -> None:
    run("""
device, cache = make()
one, two = joined(cache), joined(cache)
step = cache.prepare([(one, 0, 1)])
layers = forebay.Layers(forebay.Buffers.empty(cache, 1, 1))
def work(call):
    global two
    try:
        cache.close()
        raise AssertionError
    except forebay.Busy as error:
        assert "callback" in str(error)
    two = None
    gc.collect()
    try:
        cache.reap()
        raise AssertionError
    except forebay.Busy:
        pass
cache.overlap(step, 0, "none", layers, work)
assert cache.stats().sequences == 2 and cache.stats().steps_in_flight == 1 and not cache.closed
assert len(cache._record.sequences) == 2 and len(cache._record.steps) == 1
whole(step, 0)
step.retire()
cache.reap()
assert cache.stats().sequences == 1
del step
cache.close()
device.close()
assert ended()
print("done")
""")


@pytest.mark.parametrize("name", ["Sequence", "Step"])
def test_an_object_interrupted_in_its_creation_is_ended(make: Make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By a KeyboardInterrupt between the library's return and the creation of the Python object."""
    cache = make()
    sequence = joined(cache)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"forebay.cache.{name}", interrupted)
        if name == "Sequence":
            cache.open(prompt=8)
        else:
            cache.prepare([(sequence, 0, 1)])
    cache.reap()
    assert cache.stats().sequences == 1 and cache.stats().steps_in_flight == 0
    sequence.close()
    cache.close()
    assert cache.closed


@pytest.mark.parametrize("by_hand", [False, True])
def test_retire_waits_for_the_stream_that_the_step_was_finished_on(make: Make, by_hand: bool, hold: Hold) -> None:
    device, cache, sequence = threaded(make)
    first, other = device.stream(), device.stream()
    step = cache.prepare([(sequence, 0, 1)], stream=first)
    whole(step)
    gate = hold(device, first)
    if by_hand:
        step.finish()
    for _ in range(2):
        with pytest.raises(forebay.Busy):
            step.retire(other)
        device.wait(other)
    threading.Timer(0.0, gate.opened.set).start()
    assert step.retire(other, wait=True).step == 1


def test_a_device_that_is_closed_still_serves_its_caches(make: Make) -> None:
    device, cache, sequence = threaded(make)
    device.close()
    step = cache.prepare([(sequence, 0, 1)])
    whole(step)
    assert step.retire(wait=True).step == 1


def test_one_stream_runs_after_another_on_request(hold: Hold) -> None:
    device = forebay.HostDevice(threads=True)
    one, two, ran = device.stream(), device.stream(), []
    gate = hold(device, one)
    device.call(lambda: ran.append("before"), one)
    device.order(one, two)
    device.call(lambda: ran.append("after"), two)
    gate.opened.set()
    two.wait()
    assert ran == ["before", "after"]


def test_an_exception_of_a_call_is_raised_by_the_wait_of_its_own_stream() -> None:
    device = forebay.HostDevice(threads=True)
    one, two = device.stream(), device.stream()
    for stream in (one, two):
        device.call(lambda: 1 / 0, stream)
    device.wait()
    for stream in (one, two):
        with pytest.raises(ZeroDivisionError):
            device.wait(stream)
        device.wait(stream)
    device.call(lambda: 1 / 0, one)
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
        device.close()


def test_a_forked_child_leaves_its_parents_blocks_quietly() -> None:
    run("""
device, cache = make()
with device, cache, joined(cache) as sequence, cache.prepare([(sequence, 0, 1)]) as step:
    whole(step)
    child = os.fork()
    if child == 0:
        try:
            step.layer(0, some(1), empty())
            raise AssertionError
        except forebay.Closed as error:
            assert "cache" in str(error) and "forked" in str(error)
if child == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert step.retired.step == 1 and ended()
print("done")
""")


def test_a_cache_that_cannot_end_is_reported(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay._library import lib

    cache = make()
    with monkeypatch.context() as patch:
        broken = cache._record.calls._replace(destroy=lambda _pointer: lib.FB_INTERNAL)
        patch.setattr(cache._record, "calls", broken)
        with pytest.warns(ResourceWarning, match="cache could not be ended"):
            cache.close()
    assert lib.fb_cache_destroy(cache._pointer) == 0


def test_errors_of_closed_and_used_objects_give_the_reason(make: Make) -> None:
    device = forebay.HostDevice()
    cache = make(device)
    cache.close()
    with pytest.raises(forebay.Closed, match="cache: closed: .*forked"):
        cache.stats()
    device.close()
    with pytest.raises(forebay.Closed, match="device: it was closed"):
        device.stream()
