"""The CUDA device from Python, on the stand-in driver that `FOREBAY_STANDIN_LIBRARY` names."""

from __future__ import annotations

import os
from typing import Any, Callable

import numpy as np
import pytest

import forebay
from conftest import LAYERS, TOP_K, empty, joined, skip, some

Make = Callable[..., forebay.Cache]


class OnCuda:
    """Device memory as an int32 tensor: what CuPy shows. The stand-in's memory is the host's."""

    def __init__(self, memory: forebay.CudaMemory, shape: tuple[int, ...]) -> None:
        self.memory, self.shape = memory, shape
        self.device = memory.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": self.shape, "typestr": "<i4", "data": (self.memory.address, False)}

    def host(self) -> Any:
        size = 4 * int(np.prod(self.shape))
        from forebay._library import ffi

        raw = ffi.buffer(ffi.cast("char *", self.memory.address), size)
        return np.frombuffer(raw, np.int32).reshape(self.shape)


@pytest.fixture
def cuda() -> forebay.CudaDevice:
    library = os.environ.get("FOREBAY_STANDIN_LIBRARY")
    if not library:
        skip("the_cuda_device_from_python", "FOREBAY_STANDIN_LIBRARY names no stand-in driver")
    return forebay.CudaDevice(0, library=library)


def test_a_step_on_cuda_comes_to_what_the_host_device_does(make: Make, cuda: forebay.CudaDevice) -> None:
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
    step.retire(wait=True)


def test_no_driver_is_an_error_that_says_so() -> None:
    with pytest.raises(forebay.ForebayError, match="no-such-driver"):
        forebay.CudaDevice(0, library="/no-such-driver.so")


def test_a_stream_of_the_engines_is_given_back(make: Make, cuda: forebay.CudaDevice) -> None:
    own = cuda.stream()
    with pytest.raises(forebay.InvalidArgument, match="stream"):
        cuda.return_stream(own)
    with pytest.raises(forebay.InvalidArgument, match="stream"):
        cuda.return_stream(0xF0EBA0)
    # Another device's stream is an engine's to this one.
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
    # What was forgotten on it ends all the same.
    cuda.wait()
    cache.reap()
    assert cache.stats().steps_in_flight == 0
