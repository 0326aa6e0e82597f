"""Lives of shared weights: views that outlive them, tensors that a copy reads, processes that die and come back."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

import forebay
from conftest import ROOT, skip
from forebay._library import lib
from forebay.device import alive
from ranks import LAYERS, NAME, WAIT, Rank, content, group
from test_lifetimes import run
from test_ownership import Gate

WHOLE = [True] * LAYERS
# The head of a script: two ranks that have shared, in a process of their own.
PAIR = """
import pathlib, tempfile
from ranks import BYTES, LAYERS, NAME, WAIT, Rank, content, each, group

def pair(threads=False):
    with tempfile.TemporaryDirectory() as folder:
        ranks = group(pathlib.Path(folder), [forebay.HostDevice(threads=threads) for _ in range(2)])
    for rank in ranks:
        given.extend([rank.device._handle.pointer, rank.weights._pointer, rank.links._pointer])
    return ranks
"""


@pytest.fixture
def later() -> Iterator[tuple[Rank, Callable[[], Gate]]]:
    """A rank alone whose device works later, and what holds its stream."""
    rank, gates = Rank(0, 1, forebay.HostDevice(threads=True)), []

    def hold() -> Gate:
        gates.append(Gate(rank.device, None))
        return gates[-1]

    yield rank, hold
    for gate in gates:
        gate.opened.set()
    rank.close()


# Threads on which a tensor of `filled` has ended.
ended: list[int] = []


def filled(fill: Callable[..., object], layer: int = 0, version: int = 0) -> weakref.ref[Any]:
    """Fills a layer from a tensor that nothing else keeps."""
    tensor = content(layer, version)
    fill(layer, NAME, tensor)
    return weakref.ref(tensor, lambda _: ended.append(threading.get_ident()))


def test_a_tensor_lives_until_its_copy_has_run_and_no_longer(
    later: tuple[Rank, Callable[[], Gate]], tmp_path: Path
) -> None:
    rank, hold = later
    ended.clear()
    first = filled(rank.weights.fill)
    rank.device.wait()
    second = filled(rank.weights.fill, 1)
    assert first() is None
    gate = hold()
    third, fourth = filled(rank.weights.fill, 2), filled(rank.weights.fill, 3)
    gc.collect()
    assert third() is not None and fourth() is not None
    gate.open()
    assert (second(), third(), fourth()) == (None, None, None)
    fifth, sixth = filled(rank.weights.fill, 4), filled(rank.weights.fill, 5)
    links = rank.weights.meet(tmp_path)
    assert (fifth(), sixth()) == (None, None)
    links.close()
    # Never on a thread of the device, where the end of a tensor might call CUDA.
    assert ended == [threading.get_ident()] * 6
    assert not rank.device._handle.loans and not rank.device._handle.loans._kept


def test_a_stream_that_is_held_keeps_nothing_of_another(later: tuple[Rank, Callable[[], Gate]]) -> None:
    rank, hold = later
    gate, other = hold(), rank.device.stream()
    # More than a call would ever look through.
    held = [filled(rank.weights.fill) for _ in range(100)]
    run = [filled(lambda *given: rank.weights.fill(*given, other), 1) for _ in range(100)]
    # Waits for the other stream, and looks for what has run only in the call behind it.
    waits(rank.device, other)
    last = filled(lambda *given: rank.weights.fill(*given, other), 1)
    assert all(tensor() is None for tensor in run)
    assert all(tensor() is not None for tensor in held) and last() is not None
    gate.open()
    assert not any(tensor() is not None for tensor in held)


def waits(device: forebay.Device, stream: Any) -> None:
    """Waits for a stream, and releases nothing."""
    assert lib.fb_stream_wait(device._handle.pointer, device.stream_of(stream)) == 0


class Owner:
    """What a copy reads."""


def lent(rank: Rank, copy: Callable[[], int]) -> weakref.ref[Owner]:
    """Lends an owner that nothing else keeps."""
    owner = Owner()
    handle = rank.device._handle
    try:
        handle.lend(owner, copy, rank.device.stream_of(None))
    except KeyboardInterrupt:
        return weakref.ref(owner)
    return weakref.ref(owner)


def interrupted() -> int:
    """A copy that was enqueued, and no status was seen."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("ends", ["wait", "close"])
@pytest.mark.parametrize("why", ["interrupted", "refused"])
def test_a_copy_without_a_mark_is_over_with_a_wait_for_its_stream(
    later: tuple[Rank, Callable[[], Gate]], monkeypatch: pytest.MonkeyPatch, why: str, ends: str
) -> None:
    rank, hold = later
    gate, other = hold(), rank.device.stream()
    if why == "interrupted":
        owner = lent(rank, interrupted)
    else:

        class Refusing:
            """The library, but it marks nothing."""

            def __getattr__(self, name: str) -> Any:
                return (lambda *_: lib.FB_EXHAUSTED) if name == "fb_stream_mark" else getattr(lib, name)

        with monkeypatch.context() as patch:
            patch.setattr("forebay.device.lib", Refusing())
            owner = lent(rank, lambda: 0)
    rank.device.wait(other)
    rank.device._handle.loans.release()
    gc.collect()
    assert owner() is not None
    gate.opened.set()
    if ends == "wait":
        rank.device.wait()
    else:
        rank.weights.close()
        rank.device.close()
    gc.collect()
    assert owner() is None


def test_a_copy_that_is_enqueued_while_the_device_closes_ends_with_the_device() -> None:
    device = forebay.HostDevice(threads=True)
    rank = Rank(0, 1, device)
    view = device.allocate(8)

    def closes() -> int:
        # As another thread may.
        rank.weights.close()
        device.close()
        return 0

    owner = lent(rank, closes)
    handle = device._handle
    waits_for = lib.fb_stream_wait(handle.pointer, device._streams[0])
    handle.loans.release()
    gc.collect()
    assert waits_for == 0 and owner() is not None and not handle.loans
    del view
    # The device ends with its last view, or else with the next device.
    forebay.HostDevice().close()
    gc.collect()
    assert owner() is None and handle not in alive


def test_a_tensor_that_was_refused_at_the_door_is_released(later: tuple[Rank, Callable[[], Gate]]) -> None:
    rank, hold = later
    gate = hold()

    def refuse(layer: int, name: str, tensor: Any) -> None:
        with pytest.raises(forebay.OutOfRange):
            rank.weights.fill(layer + LAYERS, name, tensor)

    # Another refusal may have enqueued a part: its tensor is kept behind what the stream does now.
    kept = filled(refuse)
    assert kept() is not None
    rank.weights.close()

    def closed(layer: int, name: str, tensor: Any) -> None:
        with pytest.raises(forebay.Closed):
            rank.weights.fill(layer, name, tensor)

    assert filled(closed)() is None
    gate.open()
    assert kept() is None


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_a_copy_that_has_not_run_outlives_the_weights(how: str) -> None:
    device = forebay.HostDevice(threads=True)
    rank = Rank(0, 1, device)
    gate = Gate(device, None)
    tensor = filled(rank.weights.fill)
    if how == "closed":
        rank.weights.close()
    del rank
    gc.collect()
    assert tensor() is not None
    gate.open()
    assert tensor() is None
    device.close()


def test_an_update_that_is_forgotten_waits_for_its_copies_later(tmp_path: Path) -> None:
    rank = group(tmp_path, [forebay.HostDevice(threads=True)])[0]
    gate = Gate(rank.device, None)
    update = rank.weights.update(1, [2], 1 << 30)
    tensor = filled(update.fill, 2, 1)
    taken = update._pointer
    # The end of an update waits for its copies, so the collector only notes it.
    del update
    gc.collect()
    text = forebay._library.ffi.new("char[]", 8)
    assert forebay._library.lib.fb_error_text(taken, text, 8) == 0 and tensor() is not None
    gate.open()
    assert forebay._library.lib.fb_error_text(taken, text, 8) == forebay.Closed.status and tensor() is None
    rank.close()


def test_an_update_fills_from_tensors_that_it_keeps(tmp_path: Path) -> None:
    rank = group(tmp_path, [forebay.HostDevice(threads=True)])[0]
    with rank.weights.update(1, [2], 1 << 30) as update:
        gate = Gate(rank.device, None)
        tensor = filled(update.fill, 2, 1)
        gc.collect()
        assert tensor() is not None
        gate.opened.set()
        update.share(rank.links, WAIT)
        assert tensor() is None
        assert rank.weights.commit(update, rank.links, 1, WAIT)
    assert rank.reads(2, 1)
    rank.close()


# A stream that waits for a semaphore in C, which needs no lock of the interpreter, and a fill behind it.
HELD = """
import ctypes, weakref
from ranks import NAME, Rank, content
device = {device}
rank = Rank(0, 1, device)
given.extend([device._handle.pointer, rank.weights._pointer])
system, gate = ctypes.CDLL(None), ffi.new("uint64_t[8]")
opened = ctypes.c_void_p(int(ffi.cast("uintptr_t", gate)))
assert system.sem_init(opened, 0, 0) == 0
waits = ffi.cast("void (*)(void *)", ctypes.cast(system.sem_wait, ctypes.c_void_p).value)
stream = device.stream_of(None)

def opens():
    assert system.sem_post(opened) == 0

# The stand-in does the work of a stream inside the call that enqueues it: there the gate is open from the beginning.
if device.place.device != "cpu":
    opens()
assert lib.fb_stream_call(device._handle.pointer, stream, waits, ffi.cast("void *", gate)) == 0
tensor = content(0)
rank.weights.fill(0, NAME, tensor)
tensor = weakref.ref(tensor)
gc.collect()
assert tensor() is not None
"""
HOST = "forebay.HostDevice(threads=True)"
STANDIN = "forebay.CudaDevice(0, library=os.environ['FOREBAY_STANDIN_LIBRARY'])"


@pytest.mark.parametrize("device", [HOST, STANDIN])
def test_code_that_holds_the_interpreters_lock_may_wait_for_a_fill(device: str) -> None:
    if device == STANDIN and not os.environ.get("FOREBAY_STANDIN_LIBRARY"):
        skip("code_that_holds_the_lock_may_wait_for_a_fill", "FOREBAY_STANDIN_LIBRARY names no stand-in driver")
    run(HELD.format(device=device) + """
locked = ctypes.PyDLL(os.path.join(os.path.dirname(forebay.__file__), "libforebay.so"))
locked.fb_stream_wait.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
waited = [int(ffi.cast("uintptr_t", at)) for at in (device._handle.pointer, stream)]
opens()
assert locked.fb_stream_wait(*waited) == 0
# The copy has run, and no thread of the device has released its tensor.
assert tensor() is not None
device._handle.loans.release()
assert tensor() is None and not device._handle.called
rank.close()
assert ended()
print("done")
""")


def test_the_collector_waits_for_no_fill() -> None:
    run(HELD.format(device=HOST) + """
del rank, device
gc.collect()
assert tensor() is not None and not ended()
opens()
settle()
assert tensor() is None and ended()
print("done")
""")


def test_a_device_that_closes_has_released_what_was_lent() -> None:
    run(HELD.format(device=HOST) + """
rank.weights.close()
assert tensor() is not None
opens()
device.close()
assert tensor() is None and ended()
print("done")
""")


@pytest.mark.parametrize("order", ["012", "210", "102", "021"])
@pytest.mark.parametrize("threads", [False, True])
def test_objects_dropped_in_any_order_end_all_handles(order: str, threads: bool) -> None:
    run(PAIR + f"""
ranks = pair({threads})
for rank in ranks:
    assert rank.step() == [True] * LAYERS
held = [[rank.device, rank.weights, rank.links] for rank in ranks]
rank = ranks = None
for at in {order!r}:
    assert not ended()
    for own in held:
        own[int(at)] = None
gc.collect()
# Nothing is left for later, unless the device works later.
assert ended() or {threads}
settle()
assert ended()
print("done")
""")


def test_a_view_outlives_weights_and_device() -> None:
    run(PAIR + """
ranks = pair()
for rank in ranks:
    rank.weights.make_resident(4)
view, window = ranks[0].views[4][8:], ranks[0].weights.window(4)
for rank in ranks:
    rank.views = rank.weights.window(0)
    rank.close()
    rank.close()
    del rank.views
assert not ended()
del rank, ranks
gc.collect()
assert not ended() and (view == content(4)[8:]).all()
del view
assert not ended() and (window == content(4).view(np.uint8)).all()
del window
gc.collect()
assert ended()
print("done")
""")


def test_closed_objects_refuse_calls() -> None:
    run(PAIR + """
one, other = pair()
update = one.weights.update(1, [1], 1 << 30)
change = other.weights.replicate(1, [(1, NAME, 1)], 1 << 30)
given += [update._pointer, change._pointer]
for own in (update, change, one.links, one.weights, one.device, update, change, one.links, one.weights):
    own.close()
    assert own.closed
for call in (one.weights.begin, one.weights.abandon, lambda: one.weights.device_bytes, lambda: one.weights.layer(0),
             lambda: one.weights.fill(0, NAME, content(0)), one.links.poll, one.links.end, one.links.readmit,
             lambda: update.fill(1, NAME, content(1)), lambda: update.verify(1), lambda: Rank(0, 1, one.device),
             lambda: change.advance(1), lambda: change.left, change.abort, lambda: one.weights.replicas,
             one.weights.drop_replicas, one.weights.reroute, lambda: one.weights.replicate(1, [], 1)):
    try:
        call()
        raise AssertionError(call)
    except forebay.Closed:
        pass
del one.views
other.close()
del other.views
gc.collect()
assert ended() and repr(one.weights) == "<forebay.Weights on host memory: closed>"
print("done")
""")


def test_the_interpreter_ends_with_everything_open() -> None:
    run(PAIR + """
import atexit
for threads in (False, True):
    ranks = pair(threads)
    gate = threading.Event()
    update = ranks[0].weights.update(1, [1], 1 << 30)
    change = ranks[1].weights.replicate(1, [(1, NAME, 1)], 1 << 30)
    if threads:
        # They run when the interpreter is about to end, and behind them copies into the update and the change.
        ranks[0].device.call(gate.wait)
        ranks[1].device.call(gate.wait)
        atexit.register(gate.set)
    update.fill(1, NAME, content(1))
    assert change.advance(1) == change.left > 0
    ranks[1].weights.begin()
    forebay.__dict__[f"kept{threads}"] = [ranks, update, change]
print("done")
""")


def test_a_forked_child_ends_nothing() -> None:
    run(PAIR + """
one, other = pair()
child = os.fork()
if child == 0:
    refused = 0
    for call in (one.weights.begin, one.links.poll, lambda: one.weights.fill(0, NAME, content(0))):
        try:
            call()
        except forebay.Closed:
            refused += 1
    del one, other
    gc.collect()
    os._exit(refused)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert one.step() == other.step() == [True] * LAYERS and one.links.poll().kind == "nothing"
print("done")
""")


# A rank as a process: it says what it has seen, and goes on when it is told to.
PROCESS = """
import faulthandler, pathlib, sys
faulthandler.enable()
sys.path.insert(0, {tests!r})
import forebay
from ranks import LAYERS, WAIT, Rank

rank = Rank(int(sys.argv[1]), 2, forebay.HostDevice()).fill().join(pathlib.Path(sys.argv[2]))
print(rank.step() == [True] * LAYERS, flush=True)
for line in sys.stdin:
    rank.links.poll()
    print(rank.step() == [True] * LAYERS, flush=True)
rank.links.end()
while not rank.links.poll(WAIT).is_over:
    continue
rank.close()
print("done", flush=True)
"""


def process(number: int, folder: Path) -> subprocess.Popen[str]:
    """A rank in a process of its own."""
    text = PROCESS.format(tests=str(ROOT / "ffi" / "python" / "tests"))
    command = [sys.executable, "-c", text, str(number), str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(rank: subprocess.Popen[str], tell: str = "") -> str:
    """Tells a rank to make a step, and reads its line."""
    assert rank.stdin is not None and rank.stdout is not None
    rank.stdin.write(tell)
    rank.stdin.flush()
    return rank.stdout.readline().strip()


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of a test, which do not outlive it."""
    made: list[subprocess.Popen[str]] = []
    yield made
    for rank in made:
        rank.kill()
        with rank:
            continue


def test_ranks_are_processes_and_end_in_order(tmp_path: Path, processes: list[subprocess.Popen[str]]) -> None:
    processes += [process(number, tmp_path) for number in range(2)]
    assert [said(rank) for rank in processes] == ["True"] * 2
    assert [said(rank, "step\n") for rank in processes] == ["True"] * 2
    for rank in processes:
        assert rank.stdin is not None
        rank.stdin.close()
    assert [said_last(rank) for rank in processes] == ["done"] * 2
    assert [rank.wait(WAIT) for rank in processes] == [0, 0]


def said_last(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    return rank.stdout.readline().strip()


def test_a_process_that_died_comes_back(tmp_path: Path, processes: list[subprocess.Popen[str]]) -> None:
    processes.append(process(1, tmp_path))
    rank = Rank(0, 2, forebay.HostDevice()).fill().join(tmp_path)
    weights, links = rank.weights, rank.links
    assert said(processes[0]) == "True" and rank.step() == WHOLE
    assert links.readmit() == ("nothing", None, None, False)
    processes[0].send_signal(signal.SIGKILL)
    event = links.poll(WAIT)
    assert (event.kind, event.rank, event.is_over) == ("lost", 1, True) and type(event.error) is forebay.PeerLost
    assert "rank 1" in str(event.error)
    weights.lost(1)
    # The first layers are there; the third is pulled from the rank behind the first.
    with pytest.raises(forebay.PeerLost, match="layer 2.*rank 1|rank 1.*layer 2"):
        rank.step()
    with pytest.raises(forebay.PeerLost):
        weights.reattach(links, 1, WAIT)
    # Its memory is still mapped: a layer can be made resident, and then needs it no more, but not the reverse.
    weights.make_resident(2)
    assert rank.reads(2)
    with pytest.raises(forebay.PeerLost):
        weights.make_sharded(2)
    processes.append(process(1, tmp_path))
    event = links.readmit(WAIT)
    assert event == ("returned", 1, None, False)
    # It would drop what the rank says first.
    with pytest.raises(forebay.InvalidState, match="rank 1"):
        links.poll()
    weights.reattach(links, event.rank, WAIT)
    weights.make_sharded(2)
    assert said(processes[1]) == "True" and rank.step() == WHOLE
    weights.verify(1)
    assert said(processes[1], "step\n") == "True" and rank.step() == WHOLE
    assert processes[1].stdin is not None
    processes[1].stdin.close()
    links.end()
    while not event.is_over:
        event = links.poll(WAIT)
        assert event.kind in ("ended", "nothing")
    assert said_last(processes[1]) == "done"
    rank.close()


def test_a_rank_alone_and_one_from_the_host_need_no_other(tmp_path: Path) -> None:
    alone = group(tmp_path, [forebay.HostDevice()])[0]
    assert alone.step() == WHOLE and alone.weights.planned.pulled == 0
    alone.close()
    ranks = group(tmp_path, [forebay.HostDevice() for _ in range(2)], source="host")
    assert [rank.step() for rank in ranks] == [WHOLE] * 2
    with pytest.raises(forebay.Unsupported):
        ranks[0].weights.update(1, [0], 1 << 30)
    ranks[1].close()
    assert ranks[0].step() == WHOLE
    ranks[0].close()
