"""Dense caches: objects that are forgotten, dropped in any order, interrupted, used by two threads, or left behind in a
forked child; and tensors that outlive all of them."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any, Callable

import numpy as np
import pytest

import forebay
from dense_loop import Loop, Request, config_of, host, text_of
from forebay import dense
from forebay._library import lib
from forebay.device import alive
from test_dense import MakeDense, make  # noqa: F401 - a fixture
from test_exit import ends
from test_interrupts import interrupt, no_collector  # noqa: F401 - a fixture
from test_lifetimes import run
from test_ownership import Gate

HEAD = """
from dense_loop import Loop, Request, config_of, host, text_of
from forebay import dense
def built(threads=False):
    device = forebay.HostDevice(threads=threads)
    cache = dense.Cache(device, config_of())
    given.extend([device._handle.pointer, cache._pointer])
    return device, cache
"""


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("order", ["01234", "43210", "10324", "23014", "31204"])
def test_objects_dropped_in_any_order_end_all_handles(order: str, threads: bool) -> None:
    run(HEAD + f"""
device, cache = built({threads})
names = cache.names(text_of(1, 40))
given.append(names._made[0])
opened = cache.open_shared(names, prompt=40)
given.append(opened.ticket._made[0])
step = cache.prepare([(opened.sequence, 0, 4)])
held = [device, cache, opened, step, names]
del device, cache, opened, step, names
assert not ended()
for at in {order!r}:
    held[int(at)] = None
gc.collect()
assert ended() is not {threads}
settle()
assert ended()
print("done")
""")


def test_views_and_tensors_keep_the_memory_when_all_else_has_ended() -> None:
    run(HEAD + """
for first in (0, 1):
    device, cache = built()
    one = Request(cache.open(prompt=20, promised=4), text_of(1, 40))
    Loop(cache).prompt(one, 20)
    page = one.sequence.pages()[1]
    views = [cache.view(2)[page, 3], cache.tensors().lengths, cache.planes()[5].memory]
    row, length = views[0].copy(), views[1].copy()
    cache.close()
    device.close()
    del cache, device, one
    gc.collect()
    # The cache has ended, the device has not.
    assert not ended() and np.array_equal(views[0], row) and np.array_equal(views[1], length)
    views[0][:] = 5
    views.reverse() if first else None
    while views:
        assert not ended()
        views.pop()
        gc.collect()
    assert ended()
print("done")
""")


def test_the_interpreter_ends_with_everything_open() -> None:
    said = ends(HEAD + """
device, cache = built(threads=True)
gate = threading.Event()
opened = cache.open_shared(cache.names(text_of(1, 40)), prompt=40)
device.call(lambda: gate.wait(0.2))
step = cache.prepare([(opened.sequence, 0, 4)])
child = cache.open(prompt=8)
kept = [device, cache, opened, step, child, cache.view(0), cache.tensors()]
forebay.kept = kept
""")
    assert said == ""


def test_a_forked_child_ends_nothing_and_its_parent_continues() -> None:
    run(HEAD + """
for threads in (False, True):
    device, cache = built(threads)
    names = cache.names(text_of(1, 40))
    sequence = cache.open(prompt=40)
    step = cache.prepare([(sequence, 0, 4)])
    child = os.fork()
    if child == 0:
        failed = 0
        for call in (cache.stats, lambda: cache.find(names), step.retire, lambda: sequence.length):
            try:
                call()
                failed += 1
            except forebay.Closed:
                pass
        for call in (sequence.close, cache.close, device.close):
            try:
                call()
            except forebay.Closed:
                pass
        del step, sequence, cache, device, names
        gc.collect()
        device, cache = built()
        cache.open(prompt=8).close()
        cache.close()
        os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    step.retire(wait=True)
    sequence.close()
    device.wait()
    assert cache.reap() == 0
    cache.close()
    device.close()
del names, step
gc.collect()
settle()
assert ended()
print("done")
""")


@pytest.mark.parametrize("call", [
    lambda cache, kept: cache.open(prompt=8).close(),
    lambda cache, kept: cache.open_shared(cache.names([]), prompt=8).sequence.close(),
    lambda cache, kept: cache.prepare([(kept, 0, 4)]).retire(),
    lambda cache, kept: cache.reap(),
    lambda cache, kept: kept.extend(prompt=30),
    lambda cache, kept: kept.fork()[0].close(),
    lambda cache, kept: kept.truncate(4),
    lambda cache, kept: kept.park(0),
    lambda cache, kept: kept.resume(),
], ids=["open", "open_shared", "prepare", "reap", "extend", "fork", "truncate", "park", "resume"])  # fmt: skip
def test_forgotten_objects_are_ended_by_the_next_call(
    make: MakeDense,  # noqa: F811
    call: Callable[[dense.Cache, dense.Sequence], object],
) -> None:
    cache = make(config_of(host_pages=8))
    kept = cache.open(prompt=20)
    cache.prepare([(kept, 0, 4)]).retire()
    kept.truncate(4)
    opened = cache.open_shared(cache.names(text_of(1, 40)), prompt=40)
    step = cache.prepare([(opened.sequence, 0, 4)])
    del step, opened
    assert cache.stats().sequences == 2 and cache.stats().steps_in_flight == 1
    try:
        call(cache, kept)
    except forebay.InvalidState as error:
        # Only a parked sequence can be resumed.
        assert "running" in str(error)
    assert cache.stats().sequences == 1 and cache.stats().steps_in_flight == 0
    cache.validate()


@pytest.mark.parametrize("how", ["forgotten", "raised", "retired"])
def test_accepted_counts_live_until_the_step_has_ended(make: MakeDense, how: str) -> None:  # noqa: F811
    device = forebay.HostDevice(threads=True)
    cache = make(config_of(), device)
    sequence = cache.open(prompt=20, promised=8)
    for accepted, rows in ((0, 20), (20, 1)):
        cache.prepare([(sequence, accepted, rows)]).retire(wait=True)
    gate = Gate(device, None)

    def enqueue() -> tuple[weakref.ref[Any], dense.Step | None]:
        counts = np.ones(cache.batch, np.int32)
        step = cache.prepare([(sequence, None, 1)], accepted=counts)
        if how == "raised":
            with pytest.raises(KeyError), step:
                raise KeyError
        return weakref.ref(counts), step if how == "retired" else None

    named, step = enqueue()
    gc.collect()
    cache.reap()
    assert named() is not None
    gate.open()
    if step is not None:
        assert step.retire(wait=True).lengths.tolist() == [21]
    cache.reap()
    device.wait()
    cache.reap()
    gc.collect()
    assert named() is None and cache.stats().steps_in_flight == 0


def test_racing_threads_succeed_or_get_busy(make: MakeDense) -> None:  # noqa: F811
    cache = make()
    served, refused, other = [0], [0], []

    def drive() -> None:
        for _ in range(200):
            try:
                cache.stats()
                with cache.open(prompt=8) as sequence:
                    sequence.extend(prompt=9)
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


def test_a_dense_cache_that_cannot_end_is_reported(
    make: MakeDense,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = make()
    with monkeypatch.context() as patch:
        patch.setattr(cache._record, "calls", cache._record.calls._replace(destroy=lambda _: lib.FB_INTERNAL))
        with pytest.warns(ResourceWarning, match="could not be ended"):
            cache.close()
    assert lib.fb_dense_destroy(cache._pointer) == 0


class World:
    """A dense cache on a device with threads, whose stream is held; a sequence whose prompt is published."""

    def __init__(self) -> None:
        self.device = forebay.HostDevice(threads=True)
        self.cache = dense.Cache(self.device, config_of(host_pages=40, bring_layers=1))
        self.ids = text_of(1, 128)
        opened = self.cache.open_shared(self.cache.names(self.ids[:40]), prompt=40, promised=20)
        self.one = Request(opened.sequence, self.ids)
        Loop(self.cache).prompt(self.one, 40)
        self.cache.reap()
        self.more: list[Any] = []
        self.gate = Gate(self.device, None)

    def end(self, noted: bool) -> None:
        """Checks that nothing is left of the interrupted call, and that the cache works."""
        self.more.clear()
        self.gate.open()
        for _ in range(3):
            self.device.wait()
            self.cache.reap()
        stats = self.cache.stats()
        if noted:
            assert (stats.sequences, stats.steps_in_flight) == (1, 0), stats
            assert not self.cache._record.steps and not self.cache._record.forgotten
        self.cache.validate()
        self.one.sequence.close()
        with self.cache.open(prompt=30) as again:
            Loop(self.cache).prompt(Request(again, self.ids), 30)
        self.cache.close()
        self.device.close()


def opening(world: World) -> None:
    names = world.cache.names(world.ids[:39])
    world.more += [names, world.cache.open_shared(names, prompt=40), world.cache.open(prompt=8)]
    assert world.cache.find(names).tokens == 0


def stepping(world: World) -> None:
    accepted = np.zeros(world.cache.batch, np.int32)
    world.more.append(world.cache.prepare([(world.one.sequence, None, 1)], accepted=accepted))
    world.more[-1].arrived(2)
    world.more[-1].finish()


def body(world: World) -> None:
    with world.cache.prepare([(world.one.sequence, 0, 1)]) as step:
        step.abandon()


def branching(world: World) -> None:
    world.more.append(world.one.sequence.fork(promised=4))
    world.one.sequence.extend(prompt=41, promised=20)


def publishing(world: World) -> None:
    world.one.publish()
    world.cache.save(1 << 20)
    world.more.append(world.one.sequence.truncate(30))


def retiring(world: World) -> None:
    step = world.cache.prepare([(world.one.sequence, 0, 1)])
    step.arrived(2)
    world.gate.open()
    step.retire(wait=True)


def parking(world: World) -> None:
    world.more += [world.one.sequence.park(0), world.one.sequence.resume()]
    assert [ticket.outcome for ticket in world.more] == ["pending"] * 2
    world.more.append(world.cache.prepare([(world.one.sequence, 0, 1)]))
    world.more[-1].arrived(0)
    world.more[-1].arrived(2)
    world.more[-1].finish()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("call", [opening, stepping, body, branching, publishing, retiring, parking])
@pytest.mark.usefixtures("no_collector")
def test_an_interrupt_anywhere_loses_nothing(call: Callable[[World], None]) -> None:
    before, at = set(alive), 0
    while True:
        world = World()
        raised, out = interrupt(lambda: call(world), at)
        try:
            world.end(noted=out or not raised)
        finally:
            world.gate.opened.set()
        if not raised:
            break
        at += 1
    assert at > 30
    assert set(alive) == before, "a handle was lost"


def test_reading_waits_for_the_device_alone(make: MakeDense) -> None:  # noqa: F811
    """Calls do not wait for a held stream; what they enqueue comes in its order."""
    device = forebay.HostDevice(threads=True)
    cache = make(config_of(), device)
    one = Request(cache.open(prompt=20, promised=4), text_of(1, 40))
    gate = Gate(device, None)
    with cache.prepare([(one.sequence, 0, 20)]) as step:
        pass
    assert step.retired is None and "in flight" in repr(step)
    with pytest.raises(forebay.Busy):
        step.retire()
    assert host(cache.tensors().lengths)[0] == 0
    gate.open()
    assert step.retire(wait=True).lengths.tolist() == [0] and host(cache.tensors().lengths)[0] == 20


def test_copies_run_on_the_stream_that_their_call_is_given(make: MakeDense) -> None:  # noqa: F811
    """While that stream is held their tickets are pending; the other streams go on."""
    device = forebay.HostDevice(threads=True)
    cache = make(config_of(host_pages=40, device_pages=10, sequences=3), device)
    ids, own = text_of(1, 128), device.stream()
    one = Request(cache.open_shared(cache.names(ids[:40]), prompt=40, promised=8).sequence, ids)
    Loop(cache).prompt(one, 40)
    assert one.publish() == 32

    def held(call: Callable[[], tuple[dense.Sequence, forebay.Ticket]]) -> dense.Sequence:
        gate = Gate(device, own)
        sequence, ticket = call()
        device.wait()
        assert ticket.outcome == "pending"
        gate.open()
        assert ticket.outcome == "done"
        return sequence

    child = held(lambda: one.sequence.fork(promised=4, stream=own))
    # The child's page 1 is its parent's too, so it is copied.
    held(lambda: (child, child.truncate(20, own)))
    assert cache.save(1 << 20, own) > 0
    device.wait(own)
    # The partial page has no copy yet.
    held(lambda: (one.sequence, one.sequence.park(0, own)))
    held(lambda: (one.sequence, one.sequence.resume(stream=own)))
    child.close()
    one.sequence.close()
    cache.open(prompt=128).close()

    def back() -> tuple[dense.Sequence, forebay.Ticket]:
        sequence, found, ticket = cache.open_shared(cache.names(ids[:40]), prompt=40, stream=own)
        assert found == (32, 32)
        return sequence, ticket

    again = Request(held(back), ids, 32)
    Loop(cache).step([(again, 0, 8)])


def test_a_stream_waits_for_the_pages_of_a_layer_and_no_other_does(make: MakeDense) -> None:  # noqa: F811
    """While pages come back on a held stream, the streams that `arrived` is given are held too; without one it is the
    step's. The step's stream goes on until then: `prepare` waits for no pages."""
    device = forebay.HostDevice(threads=True)
    cache = make(config_of(host_pages=8, bring_layers=1), device)
    own, other, copies = (device.stream() for _ in range(3))
    loop = Loop(cache, own)
    one = Request(cache.open(prompt=40, promised=4), text_of(1, 64))
    loop.prompt(one, 40)
    one.sequence.park(0, own)
    device.wait(own)
    gate = Gate(device, copies)
    ticket = one.sequence.resume(copies)
    step = cache.prepare([(one.sequence, 0, 1)], stream=own)

    def mark(stream: Any) -> threading.Event:
        reached = threading.Event()
        device.call(reached.set, stream)
        return reached

    step.arrived(0, other)
    held = mark(other)
    assert mark(own).wait(60) and mark(None).wait(60)
    step.arrived(2)
    held_too = mark(own)
    assert mark(None).wait(60) and not held.wait(0.2) and not held_too.wait(0.2)
    assert ticket.outcome == "pending"
    gate.open()
    assert held.wait(60) and held_too.wait(60) and ticket.outcome == "done"
    device.wait(own)
    loop.compute([(one, 0, 1)])
    step.finish()
    assert step.retire(wait=True).lengths.tolist() == [40]


def test_a_step_runs_on_its_streams(
    make: MakeDense,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = forebay.HostDevice(threads=True)
    cache = make(config_of(), device)
    sequence, own, lengths = cache.open(prompt=20, promised=8), device.stream(), host(cache.tensors().lengths)
    gate = Gate(device, own)
    step = cache.prepare([(sequence, 0, 20)], stream=own)
    device.wait()
    assert lengths[0] == 0
    gate.open()
    assert lengths[0] == 20
    step.retire(wait=True)
    # Finished on another stream than it was prepared on: `retire` waits for that one.
    step = cache.prepare([(sequence, 20, 1)])
    gate = Gate(device, own)
    step.finish(own)
    device.wait()
    assert lengths[0] == 21
    with pytest.raises(forebay.Busy):
        step.retire()

    class Waits:
        """The library; a wait for the held stream releases it."""

        def __getattr__(self, name: str) -> Any:
            if name != "fb_stream_wait":
                return getattr(lib, name)
            return self.wait

        def wait(self, pointer: Any, stream: Any) -> Any:
            if stream == own._pointer:
                gate.opened.set()
            return lib.fb_stream_wait(pointer, stream)

    monkeypatch.setattr("forebay.lifetime.lib", Waits())
    assert step.retire(wait=True).lengths.tolist() == [20]
    # A context manager finishes and retires what has ended.
    with cache.prepare([(sequence, 1, 1)]) as step:
        device.wait()
    device.wait()
    assert (step.retired or step.retire()).lengths.tolist() == [21] and step.retired is not None
