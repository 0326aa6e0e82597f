"""The end of the interpreter with work in flight, and unsupported interpreters: no crash and no hang."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from conftest import ROOT, skip
from test_lifetimes import HEAD

DAEMON = """
device, cache = make(threads=True)
sequence = joined(cache)
device.wait()
cache.reap()
buffers = forebay.Buffers.empty(cache, 1, 1)
layers, turns = forebay.Layers(buffers), threading.Semaphore(0)
def enqueue(call):
    sum(range(200))
def drive():
    while True:
        step = cache.prepare([(sequence, 0, 1)])
        for layer in range(LAYERS):
            {call}
        step.retire(wait=True)
        sequence.truncate(40)
        turns.release()
def quietly():
    try:
        drive()
    except forebay.ForebayError:
        pass
threading.Thread(target=quietly, daemon=True).start()
for _ in range(20):
    turns.acquire()
"""
LAYER = "step.layer(layer, buffers); step.scatter(layer)"
OVERLAP = "cache.overlap(step, layer, 'none', layers, enqueue)"
HELD = """
device, cache = make(threads=True)
sequence = joined(cache)
gate = threading.Event()
device.call(lambda: gate.wait(0.2))
step = cache.prepare([(sequence, 0, 1)])
"""
VARIANTS = {
    "a step that is open, on a stream that is held": HELD + "step.layers(np.zeros((LAYERS, 1, 1, TOP_K), np.int32),"
    " np.zeros((LAYERS, 1, 1, TOP_K), np.int32))",
    "a step that is finished and runs": HELD + """
for layer in range(LAYERS):
    step.layer(layer, some(1, 2), empty())
    step.scatter(layer)
step.finish()
""",
    "a join whose warm-up is read": """
device, cache = make(threads=True)
sequence = cache.open(prompt=8)
sequence.append_in_place(8)
gate = threading.Event()
device.call(lambda: gate.wait(0.2))
ticket = sequence.join(warm_up=np.zeros((LAYERS, 1, TOP_K), np.int32))
del sequence, ticket
""",
    "a daemon thread that decodes": DAEMON.format(call=LAYER),
    "a daemon thread inside callbacks": DAEMON.format(call=OVERLAP),
    "a daemon thread, and sys.exit": DAEMON.format(call=OVERLAP) + "sys.exit(0)",
    "a daemon thread that never comes out of a callback": DAEMON.replace(
        "sum(range(200))", "turns.release(20); threading.Event().wait()"
    ).format(call=OVERLAP),
}


def ends(script: str, *options: str) -> str:
    """Runs the script, which must exit with 0; returns its stderr."""
    text = HEAD.format(tests=str(ROOT / "ffi" / "python" / "tests")) + script
    ran = subprocess.run([sys.executable, *options, "-c", text], timeout=60, capture_output=True, text=True)
    assert ran.returncode == 0, (ran.returncode, ran.stderr)
    return ran.stderr


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_interpreter_ends_while_work_is_in_flight(variant: str) -> None:
    said = ends(VARIANTS[variant])
    assert "Traceback" not in said and "Fatal" not in said and "panicked" not in said, said


def test_the_interpreter_ends_while_a_capture_is_launched() -> None:
    if not os.environ.get("FOREBAY_STANDIN_LIBRARY"):
        skip("the_interpreter_ends_while_a_capture_is_launched", "FOREBAY_STANDIN_LIBRARY names no stand-in driver")
    said = ends("""
from test_cuda import Captures
made = []
def build(device=None):
    shape = forebay.Shape(layers=LAYERS, row_bytes=(16, 0), top_k=TOP_K, index_key_bytes=4, page_tokens=16)
    device = device or forebay.HostDevice()
    made.append(forebay.Cache(device, shape, lanes=4, max_tokens=128, slots=16, query_rows=2, lock=False))
    return made[-1]
both = Captures(build, forebay.CudaDevice(0, library=os.environ["FOREBAY_STANDIN_LIBRARY"]))
captured = both.capture()
rows = [(one, 0, 1) for one in both.sequences[1]]
step = both.caches[1].prepare(rows, stream=both.streams["compute"])
captured.launch([step])
del captured, both
""")
    assert said == "", said


def test_a_free_threaded_interpreter_is_refused_in_one_sentence() -> None:
    ends("""
for name in [name for name in sys.modules if name.startswith("forebay")]:
    del sys.modules[name]
sys._is_gil_enabled = lambda: False
try:
    import forebay
    raise AssertionError
except ImportError as error:
    assert "free-threaded Python is not supported" in str(error), error
sys._is_gil_enabled = lambda: True
import forebay
""")
