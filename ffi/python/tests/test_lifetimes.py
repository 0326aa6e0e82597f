"""Objects ended in any order: each script runs in its own process, which must end without errors and leave no handle.

The tests count the handles that are left by the library's statuses: at the end they try each handle once more.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

HEAD = """
import faulthandler, gc, os, sys, threading, types
faulthandler.enable()
# A stub: importing pytest costs a child more than all the rest, most of all under valgrind.
mark = types.SimpleNamespace(parametrize=lambda *_: lambda test: test)
sys.modules["pytest"] = types.SimpleNamespace(fixture=lambda made: made, mark=mark)
sys.path.insert(0, {tests!r})
import numpy as np
import forebay
from conftest import LAYERS, TOP_K, empty, joined, rows_of, some, whole
from forebay._library import ffi, lib

given = []

def make(threads=False, **changes):
    device = forebay.HostDevice(threads=threads)
    shape = forebay.Shape(layers=LAYERS, row_bytes=(16, 0), top_k=TOP_K, index_key_bytes=4, page_tokens=16)
    declared = dict(lanes=4, max_tokens=128, slots=16, query_rows=2, lock=False)
    cache = forebay.Cache(device, shape, **{{**declared, **changes}})
    given.extend([device._handle.pointer, cache._pointer])
    return device, cache

def ended():
    '''Whether every handle that was given has ended.'''
    text = ffi.new("char[]", 8)
    return all(lib.fb_error_text(handle, text, 8) == lib.FB_CLOSED for handle in given)

def settle():
    '''If work runs later, the leftovers of the garbage collector end with the next device, when that work is done.'''
    # Ending a step and a sequence enqueues work as well.
    for _ in range(4):
        for handle in given:
            lib.fb_stream_wait(ffi.cast("fb_device *", handle), ffi.NULL)
        forebay.HostDevice().close()
"""


def run(script: str) -> None:
    """Runs the script; a hang, a crash and a failed assertion fail the test."""
    text = HEAD.format(tests=str(ROOT / "ffi" / "python" / "tests")) + script
    # Newer Pythons warn about every fork in a process with threads, including NumPy's.
    quiet = "ignore:This process:DeprecationWarning"
    ran = subprocess.run(
        [sys.executable, "-X", "dev", "-W", quiet, "-c", text],
        timeout=120, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == "" and ran.stdout.endswith("done\n"), ran.stderr + ran.stdout


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("order", ["0123", "3210", "1032", "2301", "3120"])
def test_objects_dropped_in_any_order_end_all_handles(order: str, threads: bool) -> None:
    run(f"""
device, cache = make(threads={threads})
sequence = joined(cache)
step = cache.prepare([(sequence, 0, 1)])
step.layer(0, some(1, 2), empty())
held = [device, cache, sequence, step]
del device, cache, sequence, step
assert not ended()
for at in {order!r}:
    held[int(at)] = None
gc.collect()
assert ended() is not {threads}
settle()
assert ended()
print("done")
""")


def test_cycles_are_collected_whole() -> None:
    run("""
for _ in range(20):
    device, cache = make()
    sequence = joined(cache)
    step = cache.prepare([(sequence, 0, 1)])
    device.me, cache.me, sequence.me = (cache, step), (sequence, device), (device, cache)
    del device, cache, sequence, step
gc.collect()
assert ended()
print("done")
""")


def test_the_interpreter_ends_with_everything_open() -> None:
    for tail in ("", "sys.exit(0)", "raise SystemExit"):
        run(f"""
import atexit
for threads in (False, True):
    device, cache = make(threads)
    sequence = joined(cache)
    device.wait()
    child, ticket = sequence.fork()
    view = cache.slab(0)
    step = cache.prepare([(sequence, 0, 1), (child, 0, 2)])
    step.layer(0, np.zeros((2, 2, TOP_K), np.int32), empty(2, 2))
    # On a thread of the device, it runs when the interpreter is about to end.
    gate = threading.Event()
    if threads:
        device.call(gate.wait)
        atexit.register(gate.set)
    kept = [device, cache, sequence, child, ticket, view, step]
    globals()[f"kept{{threads}}"] = kept
    forebay.kept = kept
print("done")
{tail}
""")


def test_a_forked_child_ends_nothing_and_its_parent_continues() -> None:
    run("""
for threads in (False, True):
    device, cache = make(threads)
    sequence = joined(cache)
    step = cache.prepare([(sequence, 0, 1)])
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            cache.stats()
        except forebay.Closed:
            failed = 0
        for call in (sequence.close, cache.close, device.close, cache.close):
            try:
                call()
            except forebay.Closed:
                pass
        del step, sequence, cache, device
        gc.collect()
        # The child's own objects work.
        device, cache = make()
        joined(cache)
        cache.close()
        sys.stdout = open(os.devnull, "w")
        os._exit(failed)
    assert os.waitpid(child, 0)[1] == 0
    step.layer(0, some(1), empty())
    whole(step, 0)
    step.retire(wait=True)
    assert bytes(sequence.read_row(0, 3)) == bytes(rows_of(0, 3, 1)[0])
    cache.validate()
    cache.close()
print("done")
""")


def test_a_forked_child_that_exits_by_itself_does_not_hang() -> None:
    run("""
for threads in (False, True):
    device, cache = make(threads)
    sequence = joined(cache)
    kept = [device, cache, sequence, cache.prepare([(sequence, 0, 1)])]
    child = os.fork()
    if child == 0:
        # Finalizers run here, as at any interpreter's end.
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    cache.validate()
print("done")
""")


def test_a_view_outlives_its_cache_and_its_device() -> None:
    run("""
device, cache = make()
sequence = joined(cache, 10)
with cache.prepare([(sequence, 0, 1)]) as step:
    slots = empty()
    step.layer(0, some(4), slots)
    whole(step, 0)
slot = int(slots[0, 0, 0])
row = cache.slab(0)[slot // 64, slot % 64][4:8]
keys = cache.index_keys(0)
cache.close()
device.close()
assert device.closed and cache.closed and not ended()
del device, cache, sequence, step
gc.collect()
assert not ended()
assert row.view(np.uint32)[0] == 4
del row
assert not ended()
del keys
assert ended()
print("done")
""")


def test_closing_is_idempotent_and_closed_objects_refuse_calls() -> None:
    run("""
device, cache = make()
sequence = joined(cache)
step = cache.prepare([(sequence, 0, 1)])
cache.close(); cache.close(); sequence.close(); device.close(); device.close()
for call in (cache.stats, cache.validate, lambda: cache.open(prompt=1), lambda: sequence.length, step.finish,
             lambda: step.layer(0, some(1), empty()), step.retire, lambda: cache.prepare([(sequence, 0, 1)]),
             device.stream, lambda: forebay.Cache(device, cache.shape, lanes=1, max_tokens=64, slots=16)):
    try:
        call()
        raise AssertionError(call)
    except forebay.Closed:
        pass
assert ended()
print("done")
""")


def test_exceptions_halfway_leave_nothing() -> None:
    run("""
def fails():
    device, cache = make()
    with device, cache:
        with joined(cache) as sequence, cache.prepare([(sequence, 0, 1)]) as step:
            step.layer(0, some(1), empty())
            raise KeyError("half-way")
for _ in range(5):
    try:
        fails()
    except KeyError:
        pass
try:
    device = forebay.HostDevice(memory=1 << 12)
    given.append(device._handle.pointer)
    forebay.Cache(device, forebay.Shape(2, (64, 0), 8), lanes=8, max_tokens=4096, slots=2048, lock=False)
    raise AssertionError
except forebay.OutOfMemory:
    pass
del device
gc.collect()
assert ended()
print("done")
""")


def test_a_thousand_lives_leave_no_handle_and_no_memory() -> None:
    run("""
import resource
device, cache = make()
free = cache.stats()
def live():
    sequence = joined(cache)
    with cache.prepare([(sequence, 0, 1)]) as step:
        step.layer(0, some(1), empty())
        whole(step, 0)
for _ in range(200):
    live()
gc.collect()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(1000):
    live()
gc.collect()
cache.reap()
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096
now = cache.stats()
assert (now.free_lanes, now.free_host_pages, now.sequences) == (free.free_lanes, free.free_host_pages, 0)
print("done")
""")


def test_calls_that_are_enqueued_run_before_the_interpreter_ends() -> None:
    run("""
import atexit
device = forebay.HostDevice(threads=True)
view = device.allocate(64)
gate = threading.Event()
def last():
    view[0] = 7
    print("done", flush=True)
device.call(gate.wait)
device.call(last)
forebay.kept = [device, view]
atexit.register(gate.set)
""")


def test_a_forgotten_step_is_ended_by_the_next_call() -> None:
    run("""
device, cache = make(steps_in_flight=1)
one, two = joined(cache), joined(cache)
step = cache.prepare([(one, 0, 1)])
del step
def decode(sequence):
    with cache.prepare([(sequence, 0, 1)]) as step:
        whole(step)
decode(two)
one.truncate(40)
decode(one)
assert cache.stats().steps_in_flight == 0
print("done")
""")


def test_callbacks_of_a_stream_run_or_are_dropped_with_it() -> None:
    run("""
device, cache = make(threads=True)
stream, ran = device.stream(), []
for at in range(100):
    stream.call(lambda at=at: ran.append(at))
stream.wait()
assert ran == list(range(100))
stream.call(lambda: 1 / 0)
try:
    stream.wait()
    raise AssertionError
except ZeroDivisionError:
    pass
stream.wait()
stream.call(lambda: ran.append("last"))
lib.fb_stream_wait(device._handle.pointer, stream._pointer)
del stream, device, cache
gc.collect()
settle()
assert ended() and ran[-1] == "last"
print("done")
""")


def test_valgrind_finds_nothing_in_a_life(tmp_path: Path) -> None:
    """Errors of memory in the library or between it and cffi; what the interpreter does itself is suppressed."""
    import shutil

    from conftest import skip

    if shutil.which("valgrind") is None:
        skip("valgrind_finds_nothing_in_a_life", "valgrind is not installed")
    script = tmp_path / "life.py"
    script.write_text(
        HEAD.format(tests=str(ROOT / "ffi" / "python" / "tests")).replace("faulthandler.enable()", "")
        + """
device, cache = make()
sequence = joined(cache)
with cache.prepare([(sequence, 0, 1)]) as step:
    step.layer(0, some(1, 2), empty())
    whole(step, 0)
sequence.truncate(40)
child, ticket = sequence.fork()
del sequence, step
cache.close()
os._exit(0)
"""
    )
    ran = subprocess.run(
        ["valgrind", "-q", "--undef-value-errors=no", sys.executable, str(script)],
        timeout=300, stderr=subprocess.PIPE, text=True, env={"PYTHONMALLOC": "malloc", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    # The loader's own string functions read beyond ends, which valgrind reports for any Python.
    ours = re.findall(r".*(?:\w\.rs:\d+\)|libforebay\.so|: fb_\w+).*", ran.stderr)
    assert ran.returncode == 0 and ours == [], ran.stderr[-4000:]
