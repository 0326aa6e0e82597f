"""A KeyboardInterrupt at every point of every call that is given memory: no memory is freed that a stream still uses.

The points are the lines of the package and the return of each call that it makes, where the interpreter raises pending
exceptions. The device has threads and a held stream, so that the enqueued work runs when all objects of the interrupted
call are gone. Then the test compares the bytes.
"""

from __future__ import annotations

import dis
import functools
import gc
import sys
import weakref
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Callable, Iterator

import numpy as np
import pytest

import forebay
from conftest import LAYERS, ROW, TOP_K, joined, row_of, rows_of
from forebay._library import lib
from forebay.device import alive
from forebay.keep import Kept
from test_cuda import Captures, cuda  # noqa: F401 - a fixture
from test_ownership import Gate

PACKAGE = str(Path(forebay.__file__).parent)
CANARY, UNTOUCHED = 0x5A, -77
# How many index keys are placed, and their bytes.
KEYS, KEY = 8, 0x33
POSITIONS = (3, 17, 30)
# Memory of freed arrays is never released: a faulty write hits it, and not the interpreter's memory.
_kept: list[Any] = []


class Ground:
    """The program's memory. When an array is freed, its memory gets a canary, as if another array used it."""

    def __init__(self) -> None:
        self.memory, self.used = np.zeros(1 << 14, np.uint8), 0
        self.freed: list[tuple[int, int]] = []
        _kept.append(self.memory)

    def array(self, shape: tuple[int, ...], fill: int) -> Any:
        """An int32 array in this memory."""
        first, self.used = self.used, self.used + 4 * int(np.prod(shape))
        assert self.used <= self.memory.nbytes
        owner = _Owner(self.memory.ctypes.data + first, shape)
        weakref.finalize(owner, self._free, first, self.used)
        made = np.asarray(owner)
        made[:] = fill
        return made

    def _free(self, first: int, end: int) -> None:
        self.memory[first:end] = CANARY
        self.freed.append((first, end))

    def check(self) -> None:
        """Checks that every canary is unchanged."""
        for first, end in self.freed:
            assert (self.memory[first:end] == CANARY).all(), "another array of the program was written"


class _Owner:
    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": "<i4", "data": (address, False)}


class Interrupt:
    """Raises at one point of the package, counted from 0, except in functions with these names."""

    def __init__(self, at: int, but: tuple[str, ...] = ()) -> None:
        self.left, self.raised, self.but = at, False, but

    def __call__(self, frame: FrameType, event: str, _given: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_name in self.but:
            return None
        frame.f_trace_opcodes = True
        calls, handlers = places(frame.f_code)
        behind = event == "opcode" and frame.f_lasti in calls
        if (behind or (event == "line" and frame.f_lasti not in handlers)) and not self.raised:
            self.left -= 1
            if self.left < 0:
                self.raised = True
                raise KeyboardInterrupt
        return self


@functools.cache
def places(code: CodeType) -> tuple[frozenset[int], frozenset[int]]:
    """Offsets of instructions after calls; and offsets where an exception handler begins or ends: the interpreter
    raises nothing there, and if a tracer raises there, the exception in handling is lost."""
    listed = list(dis.get_instructions(code))
    calls = frozenset(b.offset for a, b in zip(listed, listed[1:]) if a.opname.startswith("CALL"))
    return calls, frozenset(one.offset for one in listed if one.opname in ("PUSH_EXC_INFO", "POP_EXCEPT"))


class World:
    """A cache on a device with threads, whose stream is held; calls get memory of `ground`."""

    def __init__(self) -> None:
        self.ground = Ground()
        self.device = forebay.HostDevice(threads=True)
        shape = forebay.Shape(layers=LAYERS, row_bytes=(ROW, 0), top_k=TOP_K, index_key_bytes=4, page_tokens=16)
        declared: dict[str, Any] = {"lanes": 4, "max_tokens": 64, "slots": 16, "parked": 1, "arriving": 2}
        self.cache = forebay.Cache(self.device, shape, **declared, lock=False, huge_pages=False)
        self.sequence = joined(self.cache, 40, 8, bring_up="nothing")
        self.device.wait()
        self.cache.reap()
        self.slots: Any = None
        self.warm: forebay.Sequence | None = None
        # An arriving sequence, to whose pages index keys are copied.
        self.placed: forebay.Sequence | None = None
        self.more: list[Any] = []

    def hold(self) -> None:
        self.gate = Gate(self.device, None)

    def selection(self, layers: tuple[int, ...] = ()) -> Any:
        made = self.ground.array((*layers, 1, 1, TOP_K), -1)
        made[..., : len(POSITIONS)] = POSITIONS
        return made

    def answer(self, layers: tuple[int, ...] = ()) -> Any:
        return self.ground.array((*layers, 1, 1, TOP_K), UNTOUCHED)

    def buffers(self) -> forebay.Buffers:
        parts = 1 + self.cache.info.attention_waves
        lists = self.ground.array((parts, 1, 1, TOP_K), UNTOUCHED)
        return forebay.Buffers(
            self.cache, self.selection(), self.answer(), lists, self.ground.array((parts, 1, 1), UNTOUCHED)
        )

    def check(self) -> None:
        """After a call, interrupted or not: releases the stream, and checks the bytes that it read and wrote."""
        self.gate.open()
        self.device.wait()
        self.ground.check()
        if self.slots is not None:
            slots = self.slots[0, 0, : len(POSITIONS)].tolist()
            if slots != [UNTOUCHED] * len(POSITIONS):
                slab = self.cache.slab(0)
                found = [slab[slot // 64, slot % 64].tobytes() for slot in slots]
                assert found == [row_of(0, p).tobytes() for p in POSITIONS], "the wrong rows were read"

        if self.placed is not None:
            page = self.placed.pages()[0].index_keys
            placed = set(self.cache.index_keys(0)[page, :KEYS].flat)
            assert placed in ({0}, {KEY}), "the wrong rows were read"
        if self.warm is not None and self.warm.length.running:
            assert self.warm.digest() == expected_digest(), "the wrong rows were read"

    def end(self, noted: bool) -> None:
        """Checks that all resources are released and that the cache still works. The cache ends objects that a
        finalizer could not note."""
        self.more.clear()
        self.warm = self.placed = None
        for _ in range(2):
            self.device.wait()
            self.cache.reap()
        for withheld in self.cache.withheld:
            withheld.release()
        stats = self.cache.stats()
        if noted:
            assert (stats.arriving, stats.withheld_pages) == (0, 0), stats
            assert (stats.sequences, stats.steps_in_flight) == (1, 0), stats
            assert not self.cache._record.steps and not self.cache._record.forgotten
        self.cache.validate()
        self.sequence.close()
        with self.cache.open(prompt=8) as again:
            again.append_in_place(8)
            again.join()
            self.device.wait()
        self.cache.close()
        self.device.close()


Scenario = Callable[[World], Callable[[], object]]


def step_of(world: World) -> forebay.Step:
    return world.cache.prepare([(world.sequence, 0, 1)])


def layer(world: World, held: bool = False) -> Callable[[], object]:
    step = step_of(world)
    if held:
        world.slots = world.answer()
    return lambda: step.layer(0, world.selection(), world.answer() if world.slots is None else world.slots)


def layer_that_is_read(world: World) -> Callable[[], object]:
    return layer(world, held=True)


def layer_of_buffers(world: World) -> Callable[[], object]:
    step = step_of(world)
    return lambda: step.layer(0, world.buffers())


def layers(world: World) -> Callable[[], object]:
    step = step_of(world)
    return lambda: step.layers(world.selection((LAYERS,)), world.answer((LAYERS,)))


def resolve(world: World) -> Callable[[], object]:
    step = step_of(world)

    def call() -> None:
        step.resolve(0, world.buffers())
        step.gather(0)

    return call


def prepare(world: World) -> Callable[[], object]:
    """The accepted counts are read late; a canary there fails the step."""

    def call() -> None:
        accepted = world.ground.array((world.cache.batch,), 0)
        world.more.append(world.cache.prepare([(world.sequence, None, 1)], accepted=accepted))

    return call


def join(world: World) -> Callable[[], object]:
    sequence = world.warm = world.cache.open(prompt=40)
    for at in range(LAYERS):
        sequence.append(at, rows_of(at, 0, 40))

    def call() -> None:
        warm_up = world.ground.array((LAYERS, 2, TOP_K), -1)
        warm_up[..., : len(POSITIONS)] = POSITIONS
        sequence.join(warm_up=warm_up)

    return call


@functools.cache
def expected_digest() -> int:
    """The digest of a sequence that has joined without an interrupt."""
    world = World()
    join(world)()
    world.device.wait()
    assert world.warm is not None
    return world.warm.digest()


def overlap(world: World) -> Callable[[], object]:
    step = step_of(world)

    def call() -> None:
        world.cache.overlap(step, 0, "da", forebay.Layers(world.buffers()), lambda _call: None)

    return call


def overlap_steps(world: World) -> Callable[[], object]:
    step = step_of(world)

    def call() -> None:
        given = forebay.Layers(world.buffers())
        world.cache.overlap_steps([step], [given], ["none"] * LAYERS, lambda _call: None)

    return call


def whole_step(world: World) -> Callable[[], object]:
    """The `with` block also ends the step if the body raises, while it runs, and after its end."""

    def call() -> None:
        with world.cache.prepare([(world.sequence, 0, 1)]) as step:
            step.layers(world.selection((LAYERS,)), world.answer((LAYERS,)))
            for at in range(LAYERS):
                step.scatter(at)

    return call


def retire(world: World) -> Callable[[], object]:
    step = step_of(world)
    step.layers(world.selection((LAYERS,)), world.answer((LAYERS,)))
    for at in range(LAYERS):
        step.scatter(at)

    def call() -> None:
        try:
            step.finish()
            step.retire()
        except forebay.Busy:
            pass

    return call


def sequences(world: World) -> Callable[[], object]:
    def call() -> None:
        child, _ticket = world.sequence.fork(promised=4)
        child.close()
        with world.cache.open(prompt=8) as other:
            other.append(0, rows_of(0, 0, 8))
        world.cache.reap()

    return call


def park(world: World) -> Callable[[], object]:
    """An interrupted resume has a ticket that no one holds."""

    def call() -> None:
        world.sequence.park()
        world.sequence.resume()

    return call


def keys(world: World) -> Callable[[], object]:
    sequence = world.placed = world.cache.arrive(prompt=KEYS)

    def call() -> None:
        sequence.place_index_keys(0, 0, world.ground.array((KEYS, 1), 0x01010101 * KEY))

    return call


def arrivals(world: World) -> Callable[[], object]:
    """What is lost on the way is withheld, and the cache has it."""

    def call() -> None:
        with world.cache.arrive(prompt=8) as sequence:
            sequence.join_early()
        world.cache.reap()
        world.cache.arrive(prompt=8).abort().release()

    return call


READ_OR_WRITTEN = (
    keys, layer, layer_that_is_read, layer_of_buffers, layers, resolve, join, overlap, overlap_steps,
)  # fmt: skip
ALL = (*READ_OR_WRITTEN, prepare, whole_step, retire, sequences, park, arrivals)


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Reference counts free the objects of an interrupted call: a collection at each point would take long."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def interrupt(call: Callable[[], object], at: int, *but: str) -> tuple[bool, bool]:
    """Whether there was such a point, and whether the interrupt was raised: the interpreter drops a finalizer's."""
    tracer, before = Interrupt(at, but), sys.gettrace()
    sys.settrace(tracer)
    try:
        call()
    except KeyboardInterrupt:
        return True, True
    finally:
        sys.settrace(before)
    return tracer.raised, False


def at_each_point(scenario: Scenario, ends: bool) -> int:
    """Runs the scenario once for each point; returns the number of points."""
    at = 0
    while True:
        world = World()
        call = scenario(world)
        world.hold()
        raised, out = interrupt(call, at)
        _late.clear()
        del call
        try:
            world.check()
            if ends:
                world.end(noted=out or not raised)
        finally:
            world.gate.opened.set()
        if not raised:
            return at
        at += 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("scenario", ALL)
def test_an_interrupt_anywhere_frees_nothing_that_is_in_use(scenario: Scenario) -> None:
    before = set(alive)
    assert at_each_point(scenario, ends=True) > 10
    assert set(alive) == before, "a handle was lost"


# The objects that a package would hold meanwhile if it kept them only after the call.
_late: list[Any] = []


class HeldBehind(Kept):
    """Keeps objects only after the call has returned."""

    __slots__ = ()

    def append(self, thing: Any) -> None:
        _late.append(thing)


class JoinsHeldBehind(dict[Any, Any]):
    def setdefault(self, number: Any, joins: Any = None) -> Any:
        return super().setdefault(number, JoinsHeldBehind())

    def __setitem__(self, ticket: Any, things: Any) -> None:
        _late.append((ticket, things))


@pytest.mark.parametrize("scenario", READ_OR_WRITTEN)
def test_control_memory_that_is_held_only_after_the_call_is_overwritten(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = forebay.record.CacheHandle.__init__

    def late(handle: Any, *given: Any) -> None:
        made(handle, *given)
        handle.joins = JoinsHeldBehind()

    monkeypatch.setattr("forebay.record.Kept", HeldBehind)
    monkeypatch.setattr("forebay.record.CacheHandle.__init__", late)
    with pytest.raises(AssertionError, match="was written|wrong rows"):
        at_each_point(scenario, ends=False)


class Asked:
    """The library, with a note of every call."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        known = getattr(lib, name)

        def call(*given: Any) -> Any:
            self.names.append(name)
            return known(*given)

        return call if callable(known) else known


def launch_at_each_point(both: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the step holds the capture when its launch has returned."""
    cache, raised, at = both.caches[1], True, 0
    while raised:
        captured, asked = both.capture(), Asked()
        step = cache.prepare([(one, 0, 1) for one in both.sequences[1]], stream=both.streams["compute"])
        with monkeypatch.context() as patch:
            patch.setattr("forebay.overlap.lib", asked)
            raised, _out = interrupt(functools.partial(captured.launch, [step]), at)
        named = weakref.ref(captured)
        del captured
        _late.clear()
        assert "fb_launch" not in asked.names or named() is not None, "what a launch names was let go"
        del step
        cache.reap()
        both.cuda.wait(both.streams["compute"])
        cache.reap()
        assert named() is None
        for one in both.sequences[1]:
            one.truncate(40)
        at += 1
    assert at > 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_launch_keeps_its_capture_until_the_step_has_ended(
    make: Callable[..., forebay.Cache],
    cuda: forebay.CudaDevice,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = Captures(make, cuda)
    launch_at_each_point(both, monkeypatch)
    # An interrupted capture leaves nothing that its device would wait for, except in a finalizer, whose exceptions the
    # interpreter drops.
    at = 0
    while interrupt(both.capture, at, "_left_by", "_end_captured", "leave")[0]:
        at += 1
    assert at > 50
    both.calls.clear()
    handles = [both.caches[1]._record, cuda._handle]
    both.sequences.clear()
    both.caches[1].close()
    cuda.close()
    del both
    gc.collect()
    # Creating the next device ends the leftovers.
    forebay.HostDevice().close()
    assert not any(handle in alive for handle in handles)


def test_control_a_capture_that_is_held_only_after_the_launch_is_released(
    make: Callable[..., forebay.Cache],
    cuda: forebay.CudaDevice,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = Captures(make, cuda)
    monkeypatch.setattr("forebay.record.Kept", HeldBehind)
    with pytest.raises(AssertionError, match="was let go"):
        launch_at_each_point(both, monkeypatch)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_creation_or_end_loses_no_handle_and_no_viewed_memory() -> None:
    shape = forebay.Shape(layers=1, row_bytes=(ROW, 0), top_k=TOP_K, page_tokens=16)
    views: list[Any] = []

    def live() -> None:
        with forebay.HostDevice(threads=True) as device:
            with forebay.Cache(device, shape, lanes=1, max_tokens=16, slots=16, lock=False, huge_pages=False) as cache:
                views.append(cache.slab(0))

    before, raised, at = set(alive), True, 0
    while raised:
        raised, _out = interrupt(live, at, "_left_by", "leave", "give_up")
        at += 1
        for view in views:
            view[:] = at % 256
            assert (view == at % 256).all()
        views.clear()
        view = None
        forebay.HostDevice().close()
        # Handles that earlier tests left may end meanwhile.
        assert not set(alive) - before, "a handle was lost"
    assert at > 100
