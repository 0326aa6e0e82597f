"""The CUDA device from Python, on the stand-in driver that `FOREBAY_STANDIN_LIBRARY` names."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import types
import warnings
from typing import Any, Callable

import numpy as np
import pytest

import forebay
from conftest import LAYERS, TOP_K, Driver, OnCuda, empty, joined, on_host, skip, some, whole

Make = Callable[..., forebay.Cache]


@pytest.fixture
def cuda() -> forebay.CudaDevice:
    library = os.environ.get("FOREBAY_STANDIN_LIBRARY")
    if not library:
        skip("the_cuda_device_from_python", "FOREBAY_STANDIN_LIBRARY names no stand-in driver")
    return forebay.CudaDevice(0, library=library)


def test_a_step_on_cuda_equals_one_on_the_host_device(make: Make, cuda: forebay.CudaDevice) -> None:
    host, device = make(), make(cuda)
    pair = [joined(host, bring_up="nothing"), joined(device, bring_up="nothing")]
    shape = (1, 1, TOP_K)
    given, taken = (OnCuda(cuda.allocate(4 * TOP_K), shape) for _ in range(2))
    found = []
    for turn in range(4):
        selections = [some(*((turn * 3 + at * (layer + 2)) % 40 for at in range(6))) for layer in range(LAYERS)]
        one = host.prepare([(pair[0], min(turn, 1), 1)])
        two = device.prepare([(pair[1], min(turn, 1), 1)])
        for layer, selection in enumerate(selections):
            slots = empty()
            one.layer(layer, selection, slots)
            one.scatter(layer)
            given.host()[:] = selection
            two.layer(layer, given, taken)
            two.scatter(layer)
            cuda.wait()
            assert (taken.host() >= 0).sum() == (slots >= 0).sum()
        found.append((one.retire().layers, two.retire(wait=True).layers))
    assert all(a == b for a, b in found) and sum(count.misses for a, _ in found for count in a) > 0
    assert pair[0].digest() == pair[1].digest()
    device.validate()
    assert isinstance(device.slab(0), forebay.CudaMemory) and device.slab(0).shape[1:] == (64, 16)


def test_rows_are_stored_in_the_memory_the_device_was_created_with(make: Make, cuda: forebay.CudaDevice) -> None:
    library = os.environ["FOREBAY_STANDIN_LIBRARY"]
    calls_of = ctypes.CDLL(library).standin_calls_of
    calls_of.restype = ctypes.c_uint64
    found = []
    for host_memory in (None, "registered", "driver"):
        with forebay.CudaDevice(0, library=library, host_memory=host_memory) as device:
            before = calls_of(b"cuMemHostRegister_v2")
            make(device).close()
            found.append(calls_of(b"cuMemHostRegister_v2") - before)
    # The ring, and rows in system memory.
    assert found == [2, 2, 1]
    with pytest.raises(forebay.InvalidArgument, match="host_memory.*'pinned'.*'registered' or 'driver'"):
        forebay.CudaDevice(0, library=library, host_memory="pinned")


def test_tensors_of_another_memory_are_refused(make: Make, cuda: forebay.CudaDevice) -> None:
    cache = make(cuda)
    sequence = joined(cache)
    step = cache.prepare([(sequence, 0, 1)])
    slots = empty()
    with pytest.raises(forebay.InvalidArgument, match="host memory.*cuda:0"):
        step.layer(0, some(1), slots)
    assert (slots == -77).all()
    with pytest.raises(forebay.InvalidArgument, match="stream"):
        step.scatter(0, stream="stream")
    with pytest.raises(forebay.ForebayError):
        step.scatter(0, stream=0x1234)
    step.abandon()
    with pytest.raises(forebay.Cancelled):
        step.retire(wait=True)


def test_a_missing_driver_is_an_error_that_names_it() -> None:
    with pytest.raises(forebay.ForebayError, match="no-such-driver"):
        forebay.CudaDevice(0, library="/no-such-driver.so")


class Captures:
    """A cache on the stand-in with a bucket of two batch rows, next to one on the host device; the selections of a step
    are written beforehand, the same in every layer."""

    def __init__(self, make: Make, cuda: forebay.CudaDevice) -> None:
        self.caches = [make(), make(cuda)]
        self.sequences = [[joined(cache, bring_up="nothing") for _ in range(2)] for cache in self.caches]
        whole = (2, 1, TOP_K)
        self.selection, self.slots, lists, counts = (
            OnCuda(cuda.allocate(4 * int(np.prod(shape))), shape) for shape in (whole, whole, (2, *whole), (2, 2, 1))
        )
        buffers = forebay.Buffers(self.caches[1], self.selection, self.slots, lists, counts)
        names = ("compute", "resolve", "gather", "scatter")
        self.streams = {name: cuda.stream() for name in names}
        self.layers = forebay.Layers(buffers, **self.streams, batch=2, half=1)
        self.cuda, self.turn = cuda, 0
        self.calls: list[forebay.EngineCall] = []

    def capture(self, **changes: Any) -> forebay.Captured:
        declared: dict[str, Any] = {"query_rows": 1, "by_layer": ["none", "da", "dba"], "enqueue": self.calls.append}
        return self.caches[1].capture([self.layers], **{**declared, **changes})

    def step(self, launch: Callable[[forebay.Step], object]) -> list[forebay.LayerCount]:
        """Runs a step on both; `launch` runs the one on CUDA."""
        positions = [[[(self.turn * 3 + at * (row + 2)) % 40 for at in range(TOP_K)]] for row in range(2)]
        selected = np.array(positions, np.int32)
        accepted = min(self.turn, 1)
        self.turn += 1
        host, device = (
            cache.prepare([(sequence, accepted, 1) for sequence in sequences], stream=stream)
            for cache, sequences, stream in zip(self.caches, self.sequences, (None, self.streams["compute"]))
        )
        slots = empty(2)
        for layer in range(LAYERS):
            host.layer(layer, selected, slots)
            host.scatter(layer)
        self.selection.host()[:] = selected
        self.slots.host()[:] = -77
        launch(device)
        told, own = device.retire(wait=True).layers, host.retire().layers
        assert told == own
        assert ((self.slots.host() >= 0) == (slots >= 0)).all()
        return own


def test_launches_of_a_capture_equal_calls(make: Make, cuda: forebay.CudaDevice) -> None:
    both = Captures(make, cuda)
    captured = both.capture()
    # The engine enqueues its work once, on the streams of the bucket.
    assert {call.stream for call in both.calls} == {both.streams["compute"].address}
    assert {call.layer for call in both.calls} == set(range(LAYERS))
    asked = len(both.calls)
    counts = [both.step(lambda step: captured.launch([step])) for _ in range(4)]
    assert len(both.calls) == asked
    assert sum(count.hits for step in counts for count in step) > 0 < sum(count.misses for count in counts[-1])
    for one, other in zip(*both.sequences):
        assert one.digest() == other.digest()
    both.caches[1].validate()

    def wrong(step: forebay.Step) -> None:
        for steps in ([], [step, step]):
            with pytest.raises(forebay.ForebayError):
                captured.launch(steps)
        with pytest.raises(forebay.InvalidArgument, match=r"steps\[0\]"):
            captured.launch([7])  # type: ignore[list-item]
        with pytest.raises(forebay.InvalidState):
            captured.launched([step])
        captured.launch([step])

    both.step(wrong)
    captured.close()
    captured.close()

    def closed(step: forebay.Step) -> None:
        with pytest.raises(forebay.Closed):
            captured.launch([step])
        both.caches[1].overlap_steps([step], [both.layers], ["none"] * LAYERS, both.calls.append)

    both.step(closed)


def test_an_exception_of_the_callable_ends_a_capture(make: Make, cuda: forebay.CudaDevice) -> None:
    both = Captures(make, cuda)

    def failing(call: forebay.EngineCall) -> None:
        raise KeyError("the engine's own")

    with pytest.raises(KeyError, match="the engine's own"):
        both.capture(enqueue=failing)
    captured = both.capture()
    both.step(lambda step: captured.launch([step]))


def test_an_engine_captures_around_the_layers(make: Make, cuda: forebay.CudaDevice) -> None:
    both = Captures(make, cuda)
    driver, compute = Driver(), ctypes.c_void_p(both.streams["compute"].address)
    with pytest.raises(forebay.InvalidState, match="no capture is in progress"):
        both.capture(into=True)
    driver("cuStreamBeginCapture_v2", compute, 1)
    captured = both.capture(into=True)
    graph, exec_ = ctypes.c_void_p(), ctypes.c_void_p()
    driver("cuStreamEndCapture", compute, ctypes.byref(graph))
    driver("cuGraphInstantiateWithFlags", ctypes.byref(exec_), graph, ctypes.c_ulonglong(0))

    def launch(step: forebay.Step) -> None:
        with pytest.raises(forebay.InvalidState):
            captured.launch([step])
        driver("cuGraphLaunch", exec_, compute)
        captured.launched([step])

    for _ in range(3):
        both.step(launch)
    captured.close()
    driver("cuGraphExecDestroy", exec_)
    driver("cuGraphDestroy", graph)
    driver.leave()


@pytest.mark.parametrize(
    ("version", "variable", "capturing", "says"),
    [
        ("2.9.1+cu128", None, True, "torch 2.9.1.cu128 makes its graphs so.*=1 in the environment.*torch 2.10"),
        ("2.9.1", "0", True, "PRIORITY is 0"),
        ("2.12.0", "0", True, "PRIORITY is 0"),
        ("2.9.1", "1", True, None),
        ("2.9.1", None, False, None),
        ("2.10.0", None, True, None),
        ("3.0.0a0+git1", None, True, None),
        ("unknown", None, True, None),
    ],
)
def test_a_torch_that_drops_priorities_is_named_once(
    make: Make,
    cuda: forebay.CudaDevice,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    variable: str | None,
    capturing: bool,
    says: str | None,
) -> None:
    both = Captures(make, cuda)
    here = types.SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=lambda: capturing)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__=version, cuda=here))
    monkeypatch.setattr(forebay.overlap, "_warned", False)
    if variable is None:
        monkeypatch.delenv("CUDA_GRAPHS_USE_NODE_PRIORITY", raising=False)
    else:
        monkeypatch.setenv("CUDA_GRAPHS_USE_NODE_PRIORITY", variable)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            # Without a capture of the driver's, the call is refused after the warning.
            with pytest.raises(forebay.InvalidState, match="no capture is in progress"):
                both.capture(into=True)
        both.capture()
    said = [str(one.message) for one in caught if one.category is RuntimeWarning]
    assert len(said) == (says is not None), said
    if says is not None:
        assert re.search(says, said[0]), said[0]
        assert next(one for one in caught if one.category is RuntimeWarning).filename == __file__


class TorchStream:
    """A stream in the form of torch.cuda.Stream."""

    def __init__(self, address: int, number: int = 0) -> None:
        self.cuda_stream, self.device = address, types.SimpleNamespace(type="cuda", index=number)


def test_torchs_stream_is_accepted(make: Make, cuda: forebay.CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    own = cuda.stream()
    cache = make(cuda)
    sequence = joined(cache)
    into = (OnCuda(cuda.allocate(4 * TOP_K), (1, 1, TOP_K)), OnCuda(cuda.allocate(4 * TOP_K), (1, 1, TOP_K)))
    into[0].host()[:] = -1
    for stream in (TorchStream(own.address), own, own.address):
        step = cache.prepare([(sequence, 0, 1)], stream=stream)
        assert cuda.stream_of(stream) == cuda.stream_of(own) != cuda.stream_of(None)
        whole(step, into=into)
        step.retire(wait=True)
    for stream in (TorchStream(own.address, number=1), types.SimpleNamespace(cuda=own.address)):
        with pytest.raises(forebay.InvalidArgument, match="stream"):
            cache.reap(stream)
    # Without a stream: torch's current one, once torch uses CUDA.
    asked: list[int] = []

    def current(number: int) -> TorchStream:
        asked.append(number)
        return TorchStream(own.address)

    initialized = [False]
    fake: Any = types.ModuleType("torch")
    fake.cuda = types.SimpleNamespace(is_initialized=lambda: initialized[0], current_stream=current)
    monkeypatch.setitem(sys.modules, "torch", fake)
    legacy = cuda.stream_of(None)
    initialized[0] = True
    assert asked == [] and legacy != cuda.stream_of(own)
    assert cuda.stream_of(None) == cuda.stream_of(own) and asked == [0]


def test_a_stream_of_the_engine_is_released(make: Make, cuda: forebay.CudaDevice) -> None:
    own = cuda.stream()
    with pytest.raises(forebay.InvalidArgument, match="stream"):
        cuda.return_stream(own)
    with pytest.raises(forebay.InvalidArgument, match="stream"):
        cuda.return_stream(0xF0EBA0)
    # To this device, a stream of another forebay device is a stream of the engine.
    other = forebay.CudaDevice(0, library=os.environ["FOREBAY_STANDIN_LIBRARY"])
    stream = other.stream().address
    cache = make(cuda)
    sequence = joined(cache)
    cuda.wait()
    step = cache.prepare([(sequence, 0, 1)], stream=stream)
    del step
    cuda.return_stream(stream)
    with pytest.raises(forebay.InvalidArgument, match="stream"):
        cuda.return_stream(stream)
    # The forgotten work on it ends as well.
    cuda.wait()
    cache.reap()
    assert cache.stats().steps_in_flight == 0


def test_memory_exported_by_dlpack_lives_as_long_as_its_consumer(make: Make, cuda: forebay.CudaDevice) -> None:
    cache = make(cuda)
    slab = cache.slab(1)

    class OnTheHost:
        """The stand-in's memory is the host's, so a consumer of host tensors may use it."""

        def __dlpack__(self, **_: Any) -> Any:
            capsule = slab.__dlpack__()
            tensor = forebay.dlpack._Tensor.from_address(forebay.dlpack._pointer_of(capsule, b"dltensor"))
            assert (tensor.device.kind, tensor.device.number) == slab.__dlpack_device__() == (2, 0)
            tensor.device.kind = 1
            return capsule

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    unused = slab.__dlpack__()
    view = np.from_dlpack(OnTheHost())  # type: ignore[arg-type]
    assert view.shape == slab.shape and view.ctypes.data == slab.address
    on_host(slab)[2, 3] = 77
    cache.close()
    users = cuda._handle._users
    del slab, unused
    cuda.close()
    gc.collect()
    assert len(users) == 1 and (view[2, 3] == 77).all()
    del view
    gc.collect()
    assert not users
