"""The engine's side of a test, with torch on a GPU and on the stand-in driver: arrays on the device, streams, captures.

Both classes have the same methods, so that a test runs on either. The engine's kernels are copies here, because apart
from forebay's kernels the stand-in runs only copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import types
from typing import Any, Callable, Iterator, Union

import numpy as np

import forebay
from conftest import Driver, skip

Array = Any


class Held:
    """An array in the stand-in's device memory, which is the host's."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> None:
        self.address, self.shape, self.dtype, self.owner = address, shape, np.dtype(dtype), owner
        self.nbytes = int(np.prod(shape)) * self.dtype.itemsize
        self.device = 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": self.shape, "typestr": self.dtype.str, "data": (self.address, False)}

    def __getitem__(self, at: int) -> Held:
        item = self.nbytes // self.shape[0]
        return Held(self.address + range(self.shape[0])[at] * item, self.shape[1:], self.dtype, self.owner)

    def host(self) -> np.ndarray[Any, Any]:
        seen = types.SimpleNamespace(__array_interface__={**self.__cuda_array_interface__, "strides": None})
        return np.asarray(seen)


class Dlpack:
    """A tensor with DLPack and nothing else."""

    def __init__(self, tensor: Any, device: tuple[int, int]) -> None:
        self.tensor, self.device = tensor, device

    def __dlpack__(self, **asked: Any) -> Any:
        return self.tensor.__dlpack__(**asked)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class EngineStream:
    """A stream in the form of `torch.cuda.Stream`."""

    def __init__(self, address: int) -> None:
        self.cuda_stream, self.device = address, types.SimpleNamespace(type="cuda", index=0)


class Standin:
    """An engine on the stand-in driver, by its own functions."""

    def __init__(self) -> None:
        if not os.environ.get("FOREBAY_STANDIN_LIBRARY"):
            skip("the_cuda_device_from_python", "FOREBAY_STANDIN_LIBRARY names no stand-in driver")
        self.library = os.environ["FOREBAY_STANDIN_LIBRARY"]
        self.driver = Driver()
        self.devices: list[Any] = []

    def leave(self) -> None:
        for device in self.devices:
            device.close()
        self.driver.leave()

    def seed(self, seed: int | None) -> None:
        """With a seed, work runs late and across streams in an order by the seed; else when it is enqueued."""
        # The stand-in's `StandinOptions` with their defaults: they stay for tests that follow in this process.
        numbers = (9, 0, 12080, 1, 32, 0, 1, 1, 1, 1, 0, 1, 2, 1, 1)
        sizes = (seed or 0, 8 << 30, 2**64 - 1, 2 << 20)
        options = struct.pack("<4Q16I", *sizes, seed is not None, *numbers).ljust(256, b"\0")
        self.driver.library.standin_configure(options)

    def device(self) -> forebay.CudaDevice:
        self.devices.append(forebay.CudaDevice(0, library=self.library))
        return self.devices[-1]  # type: ignore[no-any-return]

    def array(self, values: np.ndarray[Any, Any]) -> Array:
        address = ctypes.c_uint64()
        self.driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(values.nbytes))
        made = Held(address.value, values.shape, values.dtype, self)
        made.host()[:] = values
        return made

    def write(self, array: Array, values: np.ndarray[Any, Any]) -> None:
        array.host()[:] = values

    def read(self, array: Array) -> np.ndarray[Any, Any]:
        self.driver("cuCtxSynchronize")
        return np.array(array.host())

    def view(self, memory: forebay.CudaMemory) -> Array:
        return Held(memory.address, memory.shape, np.uint8, memory)

    def copy(self, to: Array, source: Array, stream: int) -> None:
        assert to.nbytes == source.nbytes
        pointers = [ctypes.c_uint64(array.address) for array in (to, source)]
        self.driver("cuMemcpyDtoDAsync_v2", *pointers, ctypes.c_size_t(to.nbytes), ctypes.c_void_p(stream))

    def has_rows(self, slab: Array, slots: Array, rows: np.ndarray[Any, Any]) -> bool:
        at = self.read(slots)
        found = self.read(slab).reshape(-1, rows.shape[-1])[np.maximum(at, 0)]
        return np.array_equal(np.where(at[..., None] < 0, 0, found), rows)

    def dlpack(self, array: Array) -> Any:
        made = np.asarray(types.SimpleNamespace(__array_interface__={**array.__cuda_array_interface__}))
        capsules = types.SimpleNamespace(__dlpack__=lambda **_: forebay.dlpack.on_cuda(made, 0))
        return Dlpack(capsules, (2, 0))

    def stream(self) -> Any:
        stream = ctypes.c_void_p()
        self.driver("cuStreamCreate", ctypes.byref(stream), 1)
        return EngineStream(int(stream.value or 0))

    def end(self, stream: Any) -> None:
        self.driver("cuStreamDestroy_v2", ctypes.c_void_p(stream.cuda_stream))

    def state(self) -> Any:
        context = ctypes.c_void_p()
        self.driver("cuCtxGetCurrent", ctypes.byref(context))
        return context.value

    @contextlib.contextmanager
    def capture(self, stream: Any) -> Iterator[list[Callable[[], None]]]:
        compute, graph, executable = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p(), ctypes.c_void_p()
        replay: list[Callable[[], None]] = []
        # In global mode, as torch does it: meanwhile no thread may make a call that could wait.
        self.driver("cuStreamBeginCapture_v2", compute, 0)
        try:
            yield replay
        finally:
            ended = self.driver.library.cuStreamEndCapture(compute, ctypes.byref(graph))
        assert ended == 0
        self.driver("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        self.driver("cuGraphDestroy", graph)
        replay.append(lambda: self.driver("cuGraphLaunch", executable, compute))

    SCRIPT = """
        sys.path.insert(0, {tests!r})
        from places import Standin
        place = Standin()
    """


class Late(Standin):
    """The same with a seed: work runs late, and across streams."""

    def __init__(self) -> None:
        super().__init__()
        self.seed(11)

    def leave(self) -> None:
        super().leave()
        self.seed(None)


class Torch:
    """Torch on the first GPU."""

    def __init__(self) -> None:
        try:
            import torch
        except ImportError:
            skip("torch_on_a_gpu", "torch is not installed")
        if os.environ.get("FOREBAY_STANDIN_LIBRARY"):
            # A program that loads libcuda.so.1 gets the library that is already loaded under this name.
            skip("torch_on_a_gpu", "FOREBAY_STANDIN_LIBRARY names a stand-in, which torch would take for the driver")
        if not torch.cuda.is_available():
            skip("torch_on_a_gpu", "torch has no GPU")
        self.torch, self.gpu = torch, torch.device("cuda", 0)
        self.devices: list[Any] = []
        torch.empty(1, device=self.gpu)

    def leave(self) -> None:
        self.torch.cuda.synchronize()
        for device in self.devices:
            device.close()

    def device(self) -> forebay.CudaDevice:
        self.devices.append(forebay.CudaDevice(0))
        return self.devices[-1]  # type: ignore[no-any-return]

    def array(self, values: np.ndarray[Any, Any]) -> Array:
        return self.torch.from_numpy(values.copy()).to(self.gpu)

    def write(self, array: Array, values: np.ndarray[Any, Any]) -> None:
        array.copy_(self.torch.from_numpy(values.copy()))
        self.torch.cuda.synchronize()

    def read(self, array: Array) -> np.ndarray[Any, Any]:
        self.torch.cuda.synchronize()
        return np.asarray(array.cpu().numpy())

    def view(self, memory: forebay.CudaMemory) -> Array:
        return self.torch.from_dlpack(memory)

    def copy(self, to: Array, source: Array, stream: int) -> None:
        with self.on(stream):
            to.copy_(source)

    def on(self, stream: int) -> Any:
        return self.torch.cuda.stream(self.torch.cuda.ExternalStream(stream, device=self.gpu))

    def has_rows(self, slab: Array, slots: Array, rows: np.ndarray[Any, Any]) -> bool:
        self.torch.cuda.synchronize()
        found = slab.reshape(-1, rows.shape[-1])[slots.clamp(min=0).long()]
        found[slots < 0] = 0
        return bool(self.torch.equal(found, self.torch.from_numpy(rows).to(self.gpu)))

    def dlpack(self, array: Array) -> Any:
        return Dlpack(array, (2, 0))

    def stream(self) -> Any:
        return self.torch.cuda.Stream(self.gpu)

    def end(self, stream: Any) -> None:
        """Torch's streams come from a pool, which keeps them."""

    def state(self) -> Any:
        context = ctypes.c_void_p()
        assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) == 0
        return context.value, self.torch.cuda.current_device(), self.torch.cuda.current_stream().cuda_stream

    @contextlib.contextmanager
    def capture(self, stream: Any) -> Iterator[list[Callable[[], None]]]:
        graph = self.torch.cuda.CUDAGraph()
        replay: list[Callable[[], None]] = []

        def launch() -> None:
            with self.torch.cuda.stream(stream):
                graph.replay()

        with self.torch.cuda.graph(graph, stream=stream):
            yield replay
        replay.append(launch)

    SCRIPT = """
        sys.path.insert(0, {tests!r})
        from places import Torch
        place = Torch()
    """


Place = Union[Standin, Torch]
