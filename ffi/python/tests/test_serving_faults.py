"""`forebay.serving` when something goes wrong between two calls: refusals half-way, late devices, forgotten requests,
recordings that fail. What an engine does right is in test_serving.py.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import threading
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

import forebay
from conftest import LAYERS, ROW, TOP_K, rows_of
from forebay.serving import Request, Requests
from places import Standin
from test_serving import SHAPES, SIZES, filled, run

Make = Callable[..., forebay.Cache]
# Selects fewer positions than a recording takes.
FEW = np.array([3])


class Owner:
    """What an engine holds for a request."""


def lanes(requests: Requests) -> int:
    return requests.cache.stats().free_lanes


def test_ended_requests_give_their_lanes_back_on_a_device_that_works_later(make: Make) -> None:
    with forebay.HostDevice(threads=True) as device:
        requests = Requests(make(device, **{**SIZES, "lanes": 1}), ratio=0.5)
        for turn in range(4):
            # The one before ended with its join in flight: this waits for it.
            request, gate = filled(requests, turn), threading.Event()
            device.call(lambda: gate.wait(5))
            request.resume()
            requests.end(turn)
            assert lanes(requests) == 0
            threading.Timer(0.02, gate.set).start()
        device.wait()
        assert requests.stats().cache.free_lanes == 1
        # A step too, whose retirement nothing else hears.
        filled(requests, "a")
        run(requests, ["a"])
        requests.end("a")
        device.wait()
        filled(requests, "b").park()
        assert requests.stats().cache.free_lanes == 1
        requests.close()


def test_only_a_pool_that_ended_requests_hold_is_waited_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with forebay.HostDevice(threads=True) as device:
        requests = Requests(make(device, **{**SIZES, "lanes": 1}), ratio=0.5)
        filled(requests, "a")
        waits: list[Any] = []
        monkeypatch.setattr(device, "wait", waits.append)
        with pytest.raises(forebay.Exhausted, match="'b'.*lanes"):
            requests.add("b")
        assert waits == []
        monkeypatch.undo()
        requests.close()


def twice(call: Callable[[], None]) -> None:
    """A call, made again if it reports what the device has refused before."""
    try:
        call()
    except forebay.OutOfMemory:
        call()


@pytest.mark.parametrize("call", ["park", "resume", "join"])
def test_a_call_that_the_device_refuses_half_way_can_be_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str
) -> None:
    # A stand-in of its own: what other tests set in theirs stays there.
    if own := os.environ.get("FOREBAY_STANDIN_LIBRARY"):
        monkeypatch.setenv("FOREBAY_STANDIN_LIBRARY", str(shutil.copy(own, tmp_path / "libcuda.so.1")))
    place = Standin()
    driver = ctypes.CDLL(place.library)
    device, refused = place.device(), 0
    try:
        for at in range(14):
            cache = forebay.Cache(device, SHAPES["one run"], **SIZES, lock=False)
            requests = Requests(cache, slots=16, stream=0)
            request = filled(requests, "a")
            if call != "join":
                request.resume()
                device.wait(0)
            if call == "resume":
                request.park()
            act = request.park if call == "park" else request.resume
            driver.standin_fail_call(ctypes.c_uint64(at), 2)
            try:
                act()
            except forebay.ForebayError as error:
                assert "'a'" in str(error)
                refused += 1
            driver.standin_fail_call(ctypes.c_uint64(0xFFFFFFFFFFFFFFFF), 2)
            half = request._sequence.length
            assert (request.state == "running", request.state == "parked") == (half.running, half.parked)
            if at % 2:
                twice(act)
            # The next turn, whatever the state is.
            for layer in range(LAYERS):
                twice(lambda: request.prefill(layer, rows_of(layer, 40, 3)))
            twice(request.resume)
            assert request.state == "running" and request.length == 43
            assert request.read(1).tobytes() == rows_of(1, 0, 43).tobytes()
            cache.close()
        assert refused > 2
    finally:
        place.leave()


@pytest.mark.parametrize("call", ["park", "resume"])
def test_an_interrupt_after_a_call_leaves_the_request_usable(
    make: Make, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    requests = Requests(make(**SIZES), ratio=0.5)
    request = filled(requests, "a")
    run(requests, ["a"], query_rows=2)
    if call == "resume":
        request.park()
    original = getattr(forebay.Sequence, call)

    def interrupted(self: Any, *given: Any) -> None:
        original(self, *given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(forebay.Sequence, call, interrupted)
        getattr(request, call)()
    assert (request.state, request.length) == ("parked" if call == "park" else "running", 42)
    run(requests, ["a"])
    request.park()
    assert request.length == 43


def test_a_request_of_the_open_step_ends_with_the_step(make: Make) -> None:
    requests = Requests(make(**SIZES), ratio=0.5)
    owner = Owner()
    for id in "abc":
        filled(requests, id, owner=owner if id == "b" else None)
    row = np.zeros((3, 1, ROW), np.uint8)
    keys = np.zeros((3, 1, 4), np.uint8)
    with requests.step(["a", "b", "c"]) as step:
        requests.end("a")
        del owner
        gc.collect()
        requests.add("d", promised=5)
        assert "a" in requests and requests["b"].state == "running"
        with pytest.raises(forebay.InvalidArgument, match="'a'"):
            requests.add("a")
        for layer in range(LAYERS):
            # Its page table is used here.
            step.put_index_keys(layer, keys)
            step.write(layer, row)
            step.select(layer, np.zeros((3, 1, 1), np.int32))
    assert list(requests) == ["c", "d"] and requests["c"].length == 41
    assert requests.stats().forgotten == 1
    # So does one of a step that is abandoned.
    step = requests.step(["c"])
    requests.end("c")
    step.abandon()
    assert list(requests) == ["d"] and requests.cache.stats().sequences == 1


def recorded(make: Make, tmp_path: Path, ids: str, **options: Any) -> Requests:
    """Requests with a recording, of which the first has a row that it does not take."""
    requests = Requests(make(**SIZES), ratio=0.5, record=tmp_path / "run.topk.zst", **options)
    for id in ids:
        filled(requests, id)
    run(requests, [ids[0]], select=FEW)
    return requests


def test_a_recording_that_fails_is_the_matter_of_its_request(make: Make, tmp_path: Path) -> None:
    requests = recorded(make, tmp_path, "ab")
    for _ in range(2):
        run(requests, ["b", "a"])
    a, b = requests["a"], requests["b"]
    assert (a.length, b.length) == (43, 42)
    with pytest.raises(forebay.OutOfRange, match="recording of request a: "):
        a.park()
    # Told once, and nothing was done.
    assert a.state == "running"
    a.park()
    run(requests, ["a", "b"])
    requests.close()
    # The other's recording is whole.
    assert forebay.SelectionTrace(tmp_path / "run-1.topk.zst").header.steps == 3


def test_an_engine_may_ask_for_a_recordings_error(make: Make, tmp_path: Path) -> None:
    """Then no call raises it."""
    requests = recorded(make, tmp_path, "a")
    request = requests["a"]
    assert request.recording_error() is None
    request.park()
    error = request.recording_error()
    assert isinstance(error, forebay.OutOfRange) and "recording of request a: " in str(error)
    assert request.recording_error() is None
    request.resume()
    request.end()


def test_a_recording_that_fails_in_a_park_does_not_break_it(make: Make, tmp_path: Path) -> None:
    requests = recorded(make, tmp_path, "a")
    request = requests["a"]
    request.park()
    assert request.state == "parked" and request._sequence.length.parked
    with pytest.raises(forebay.OutOfRange, match="recording of request a: "):
        request.resume()
    run(requests, ["a"])
    assert request.length == 42
    request.end()


def test_all_requests_end_before_the_error_of_a_recording(make: Make, tmp_path: Path) -> None:
    requests = recorded(make, tmp_path, "abc", forget_after=2)
    for _ in range(3):
        # Forgetting a concerns no other request.
        run(requests, ["b"])
    assert list(requests) == ["b", "c"] and requests.stats().forgotten == 1
    filled(requests, "d")
    run(requests, ["d"], select=FEW)
    with pytest.raises(forebay.OutOfRange, match="recording of request d: "):
        requests.end("d")
    assert "d" not in requests
    with pytest.raises(forebay.OutOfRange, match="recording of request a: "):
        requests.close()
    assert len(requests) == 0 and requests.cache.stats().sequences == 0
    requests.close()


def test_a_refused_call_changes_nothing(make: Make) -> None:
    requests = Requests(make(**SIZES), ratio=0.5)
    request = requests.add("a", promised=8)
    with pytest.raises(forebay.OutOfRange):
        request.prefill(0, np.zeros((999, ROW // 4), np.float32))
    for layer in range(LAYERS):
        request.prefill(layer, rows_of(layer, 0, 40))
    run(requests, ["a"])
    calls: list[Callable[[], None]] = [lambda: request.promise(1000), lambda: request.prefill(0, rows_of(0, 0, 150))]
    for call in calls:
        with pytest.raises(forebay.OutOfRange, match="'a'.*160"):
            call()
        assert (request.state, request.promised, request.length) == ("running", 8, 41)
    for dtype in "V7", "no dtype":
        with pytest.raises(forebay.InvalidArgument, match="'a': dtype"):
            request.read(0, dtype=dtype)


def test_a_layer_is_stored_and_selected_once(make: Make) -> None:
    requests = Requests(make(**SIZES), ratio=0.5)
    filled(requests, "a")
    wrong, row = np.full((1, 1, 1), (1 << 32) + 3), np.zeros((1, 1, ROW), np.uint8)
    step = requests.step(["a"])
    for position in wrong, -wrong:
        with pytest.raises(forebay.OutOfRange, match="'a'.*position"):
            step.select(0, position)
    step.select(0, np.zeros((1, 1, 1), np.int32))
    with pytest.raises(forebay.InvalidState, match="layer 0 has selected"):
        step.select(0, np.zeros((1, 1, 1), np.int32))
    step.write(0, row)
    step.stored(0)
    with pytest.raises(forebay.InvalidState, match="layer 0 was stored"):
        step.write(0, row)
    step.abandon()


def test_index_keys_go_before_rows_and_into_no_page_of_others(make: Make) -> None:
    requests = Requests(make(**SIZES), ratio=0.5)
    request, keys = requests.add("a", promised=8), np.full((40, 4), 7, np.uint8)
    request.admit(40)
    request.put_index_keys(0, keys)
    for layer in range(LAYERS):
        request.prefill(layer, rows_of(layer, 0, 40))
    child = request.fork("b")
    child.crop(20)
    child.put_index_keys(0, keys[20:] + 1, 20)
    assert request.index_keys(0).tobytes() == keys.tobytes()
    with pytest.raises(forebay.InvalidState, match="'b'.*other requests may share"):
        child.put_index_keys(0, keys)


def test_buffers_do_not_grow_with_the_batches_that_occur() -> None:
    lanes, requests, rng = 4, None, np.random.default_rng(3)
    shape = forebay.Shape(layers=1, row_bytes=(16, 0), top_k=4, page_tokens=16)
    with forebay.HostDevice() as device:
        cache = forebay.Cache(device, shape, lanes=lanes, max_tokens=64, slots=16, query_rows=3, lock=False)
        with Requests(cache) as requests:
            for id in range(lanes):
                requests.add(id).prefill(0, rng.integers(0, 256, (8, 16), np.uint8))
            found = set()
            for batch in range(1, lanes + 1):
                for width in range(1, 4):
                    with requests.step([(id, width) for id in range(batch)]) as step:
                        step.write(0, rng.integers(0, 256, (batch, width, 16), np.uint8))
                        slots = step.select(0, np.full((batch, width, 4), 2, np.int32))
                        found.add(slots.__array_interface__["data"][0])
                    for id in range(batch):
                        requests[id].crop(8)
            assert len(found) == 1
        cache.close()
