"""How the ends of transfers end: processes, kills, forks, interrupts, forgotten objects, the interpreter's exit."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

import forebay
from forebay import transfer
from forebay.device import alive
from forebay.transfer import Rank
from test_interrupts import Interrupt
from test_transfer import CANARY, OPTIONS, PAGES, PARTS, SIDE, SOON, TOKENS, rows

HEAD = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_transfer import *
"""
# Sends a request and says when it has ended; holds the next one half computed.
SENDER = HEAD + """
sender = transfer.Sender(FABRIC, SIDE, Rank(1), 4 * LAYERS * PARTS.bytes, PARTS.planes, options=OPTIONS, lock=False)
sender.add(AT)
for request in (1, 2):
    sender.begin(request, TOKENS)
    for layer in range(LAYERS if request == 1 else 1):
        origin = (request % 4 * LAYERS + layer) * PARTS.bytes
        for component in range(2):
            start = origin + PARTS.planes[2 * layer + component].offset
            made = rows(request, layer, component)
            sender.memory[start : start + made.size] = made.reshape(-1)
        sender.computed([transfer.Computed(request, layer, 0, TOKENS, origin)])
    if request == 1:
        sender.finish(request)
while True:
    event = sender.poll(None)
    if isinstance(event, transfer.Ended):
        print(event, flush=True)
"""


def run(script: str) -> str:
    """Runs a script that must exit with 0 and say nothing on stderr; returns what it says."""
    ran = subprocess.run([sys.executable, "-c", HEAD + script], timeout=120, capture_output=True, text=True)
    assert ran.returncode == 0 and not ran.stderr, (ran.returncode, ran.stderr)
    return ran.stdout


def threads() -> list[str]:
    """The library's transfer threads of this process."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if name.startswith("forebay-")]


@pytest.mark.parametrize("fabric", ["tcp", "shm"])
def test_another_process_sends_and_is_killed(tmp_path: Path, fabric: str) -> None:
    planes = [np.full((PAGES, size), CANARY, np.uint8) for size in SIDE.page_bytes[0]]
    at = "127.0.0.1:0" if fabric == "tcp" else str(tmp_path / "at")
    with transfer.Receiver(fabric, at, SIDE, Rank(2), planes, options=OPTIONS) as receiver:
        script = f"FABRIC, AT = {fabric!r}, {receiver.address!r}\n"
        sends = subprocess.Popen([sys.executable, "-c", script + SENDER], stdout=subprocess.PIPE, text=True)
        try:
            seen: list[Any] = []

            def until(event: Callable[[Any], bool]) -> Any:
                end = time.monotonic() + 2 * SOON
                while time.monotonic() < end and sends.poll() is None or seen:
                    if (found := receiver.poll(1)) is not None:
                        seen.append(found)
                        if event(found):
                            return found
                    assert time.monotonic() < end, seen
                raise AssertionError((sends.returncode, seen))

            until(lambda event: isinstance(event, transfer.Met))
            first = receiver.grant(1, TOKENS, [5, 2, 7], (1, 0))
            second = receiver.grant(2, TOKENS, [0, 8, 3], (1, 0))
            until(lambda event: event == transfer.Ready(second, 0))
            assert transfer.Whole(first) in seen
            assert sends.stdout is not None and sends.stdout.readline() == "Ended(request=1, error=None)\n"
            sends.send_signal(signal.SIGKILL)
            failed = until(lambda event: isinstance(event, transfer.Failed))
            assert failed.use == second and isinstance(failed.error, forebay.PeerLost)
        finally:
            sends.kill()
            sends.wait()
            if sends.stdout is not None:
                sends.stdout.close()
        left = [plane.copy() for plane in planes]
        for plane, found in enumerate(planes):
            layer, component = divmod(plane, 2)
            for token, row in enumerate(rows(1, layer, component)):
                at_byte = token % 16 * row.size
                assert (found[[5, 2, 7][token // 16], at_byte : at_byte + row.size] == row).all()
            # Nothing of the second request's other layer, and nothing anywhere else.
            assert (found[[1, 4, 6]] == CANARY).all() and (layer == 0 or (found[[0, 8, 3]] == CANARY).all())
    assert all((a == b).all() for a, b in zip(left, planes))


OPEN = """
import tempfile, threading
folder = tempfile.TemporaryDirectory()
pair = Pair("shm", folder.name + "/at")
pair.receiver.grant(1, TOKENS, [1, 2, 3], (1, 0))
pair.sender.begin(1, TOKENS)
def waits(end):
    try:
        while True:
            end.poll(None)
    except forebay.Closed:
        pass
"""


@pytest.mark.parametrize(
    "script",
    [
        "",
        "threading.Thread(target=waits, args=(pair.sender,), daemon=True).start()\n",
        "threading.Thread(target=waits, args=(pair.receiver,), daemon=True).start()\ntime.sleep(0.1)\n",
        "kept = pair.sender.memory[3:]\nkept[:] = 1\n",
        "kept = pair.sender.memory[3:]\npair.close()\nkept[:] = 1\n",
        "pair.close()\nsys.exit(0)\n",
    ],
)
def test_the_interpreter_ends_with_open_ends(script: str) -> None:
    assert run(OPEN + script + "print('at the end')\n" if "exit" not in script else OPEN + script) in (
        "at the end\n",
        "",
    )


def test_a_forked_child_has_none_of_the_ends() -> None:
    said = run(
        OPEN
        + """
import os
child = os.fork()
if child == 0:
    try:
        pair.receiver.poll()
    except forebay.Closed:
        pair.close()
        print("closed", flush=True)
    os._exit(0)
os.waitpid(child, 0)
pair.compute(1)
pair.until(lambda: bool(of(pair.sent, transfer.Ended, 1)))
print(of(pair.sent, transfer.Ended, 1), flush=True)
pair.close()
"""
    )
    assert said == "closed\n[Ended(request=1, error=None)]\n"


# Functions that make nothing which has to end.
PURE = ("declare", "_declare", "index", "look", "_numpy", "contiguous", "describe", "milliseconds", "text_bytes",
        "choice", "sized", "address_bytes", "within_ms", "seen")  # fmt: skip


def scenario(at: Path) -> None:
    """Calls of every kind, which an interrupt may leave anywhere."""
    planes = [np.full((PAGES, size), CANARY, np.uint8) for size in SIDE.page_bytes[0]]
    receiver = transfer.Receiver("shm", at, SIDE, Rank(2), planes, options=OPTIONS)
    sender = transfer.Sender("shm", SIDE, Rank(1), 4096, PARTS.planes, options=OPTIONS, lock=False, huge_pages=False)
    sender.add(receiver.address)
    use = receiver.grant(1, TOKENS, [1, 2, 3], (99, 0))
    while receiver.poll(1) is None:
        pass
    receiver.abort(use)
    sender.begin(1, TOKENS)
    sender.memory[:5] = 1
    sender.computed([transfer.Computed(1, 0, 0, TOKENS, 0)])
    sender.stats()
    sender.close()
    receiver.close()


def test_an_interrupt_anywhere_leaves_no_thread_and_no_handle(tmp_path: Path) -> None:
    before, hook = set(alive), sys.unraisablehook
    swallowed: list[object] = []
    sys.unraisablehook = swallowed.append
    count = 0
    try:
        while True:
            interrupt = Interrupt(count, PURE)
            sys.settrace(interrupt)
            try:
                scenario(tmp_path / "at")
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            gc.collect()
            if swallowed:
                # Inside the garbage collector, where no exception gets out: the interpreter's end does the rest.
                swallowed.clear()
                for handle in set(alive) - before:
                    assert handle.end(wait=True)
            assert set(alive) <= before and not threads(), count
            if not interrupt.raised:
                break
            count += 1
    finally:
        sys.unraisablehook = hook
    assert count > 100


def test_forgotten_ends_end(tmp_path: Path) -> None:
    before = set(alive)
    for number in range(3):
        planes = [np.zeros((PAGES, size), np.uint8) for size in SIDE.page_bytes[0]]
        receiver = transfer.Receiver("shm", tmp_path / str(number), SIDE, Rank(2), planes)
        sender = transfer.Sender("shm", SIDE, Rank(1), 4096, PARTS.planes, lock=False)
        sender.add(receiver.address)
        # A thread gives itself its name.
        end = time.monotonic() + SOON
        while len(threads()) < 2:
            assert time.monotonic() < end
            time.sleep(0.001)
        kept = sender.memory if number else None
        del receiver, sender
        gc.collect()
        assert threads() == [] and len(set(alive) - before) == bool(number)
        del kept
        gc.collect()
        assert set(alive) <= before and not os.listdir(tmp_path)
