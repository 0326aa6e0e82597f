"""The parts of the GPU bench outside forebay: arrays, streams, captures and times. One class has torch on a GPU, the
other a driver whose device memory the host reads; both have the same methods."""

from __future__ import annotations

import ctypes
import sys
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

import forebay

# The GPU cycles during which timed work is enqueued: about 2 ms, and 20 ms for a graph of thousands of nodes.
AHEAD, FAR_AHEAD = 4_000_000, 40_000_000


def stop(message: str) -> NoReturn:
    """Ends the program with one line."""
    print(f"gpu.py: {message}", file=sys.stderr)
    raise SystemExit(2)


class Torch:
    """Torch on a GPU."""

    means_something = True

    def __init__(self, torch: Any, number: int, blocks: int | None) -> None:
        self.torch, self.gpu, self.number, self.blocks = torch, torch.device("cuda", number), number, blocks
        torch.cuda.set_device(self.gpu)
        self.name = torch.cuda.get_device_name(number)
        self.one = torch.randn((1536, 1536), device=self.gpu, dtype=torch.float16)
        self.out = torch.empty_like(self.one)
        self.stream = self.new_stream()
        self.marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def device(self) -> forebay.CudaDevice:
        return forebay.CudaDevice(self.number, gather_blocks=self.blocks)

    def array(self, values: NDArray[Any]) -> Any:
        made = self.torch.from_numpy(values).to(self.gpu)
        self.torch.cuda.synchronize()
        return made

    def numpy(self, array: Any) -> NDArray[Any]:
        self.torch.cuda.synchronize()
        return np.asarray(array.cpu().numpy())

    def copy(self, to: Any, source: Any, stream: int) -> None:
        with self.on(stream):
            to.copy_(source)

    def on(self, stream: int) -> Any:
        return self.torch.cuda.stream(self.torch.cuda.ExternalStream(stream, device=self.gpu))

    def new_stream(self) -> Any:
        made = self.torch.cuda.Stream(self.gpu)
        with self.torch.cuda.stream(made):
            # cuBLAS takes its memory for a stream now, and not in a capture.
            self.torch.matmul(self.one, self.one, out=self.out)
        self.torch.cuda.synchronize()
        return made

    def timed(self, work: Callable[[], object], ahead: int = AHEAD) -> float:
        """Microseconds of the GPU on `stream`."""
        with self.torch.cuda.stream(self.stream):
            self.torch.cuda._sleep(ahead)
            self.marks[0].record(self.stream)
            work()
            self.marks[1].record(self.stream)
        self.marks[1].synchronize()
        return float(self.marks[0].elapsed_time(self.marks[1]) * 1e3)

    def view(self, slab: forebay.CudaMemory) -> Any:
        return self.torch.from_dlpack(slab)

    def has_rows(self, slab: forebay.CudaMemory, slots: Any, rows: NDArray[np.uint8]) -> bool:
        self.torch.cuda.synchronize()
        found = self.view(slab).reshape(-1, rows.shape[-1])[slots.clamp(min=0).long()]
        found[slots < 0] = 0
        return bool(self.torch.equal(found, self.array(rows)))

    def compute(self, products: int, stream: int) -> None:
        """Enqueues the engine's work."""
        with self.on(stream):
            for _ in range(products):
                self.torch.matmul(self.one, self.one, out=self.out)

    def captured(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Returns the result of `work`, and a function that replays the work it enqueued."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, stream=self.stream):
            made = work()
        return made, graph.replay

    def ceilings(self, size: int, rounds: int) -> dict[str, float]:
        """Bytes a second by one large copy, either way and both at once; microseconds of an operation that does
        nothing, and of a matrix product."""
        torch = self.torch
        pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        own = [torch.empty(size, dtype=torch.uint8, device=self.gpu) for _ in range(2)]
        tiny, down = own[0][:16], self.new_stream()

        def up() -> None:
            own[0].copy_(pinned[0], non_blocking=True)

        def both() -> None:
            down.wait_stream(self.stream)
            with torch.cuda.stream(down):
                pinned[1].copy_(own[1], non_blocking=True)
            up()
            self.stream.wait_stream(down)

        def least(work: Callable[[], object]) -> float:
            return min(self.timed(work) for _ in range(rounds + 1))

        return {
            "copy_up": size / least(up) * 1e6,
            "copy_down": size / least(lambda: pinned[1].copy_(own[1], non_blocking=True)) * 1e6,
            "both": 2 * size / least(both) * 1e6,
            "launch_us": least(tiny.zero_),
            "product_us": least(lambda: torch.matmul(self.one, self.one, out=self.out)),
        }


class Held:
    """Numbers in the stand-in's device memory, which is the host's."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> None:
        self.address, self.shape, self.dtype, self.owner, self.device = address, shape, np.dtype(dtype), owner, 0
        self.nbytes = int(np.prod(shape)) * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": self.shape, "typestr": self.dtype.str, "data": (self.address, False)}

    def __getitem__(self, at: int) -> Held:
        item = self.nbytes // self.shape[0]
        return Held(self.address + range(self.shape[0])[at] * item, self.shape[1:], self.dtype, self.owner)


class Standin:
    """A driver whose device memory the host reads, by its own functions."""

    means_something = False
    name = "stand-in driver"

    def __init__(self, path: str, number: int, blocks: int | None = None) -> None:
        try:
            self.library = ctypes.CDLL(path)
        except OSError as error:
            stop(f"--driver: {error}")
        self.path, self.number, self.blocks, context = path, number, blocks, ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        self.call("cuCtxPushCurrent_v2", context)
        self.stream = self.new_stream()

    def call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self.library, name)(*arguments):
            stop(f"{name} returned {code}")

    def device(self) -> forebay.CudaDevice:
        return forebay.CudaDevice(self.number, library=self.path, gather_blocks=self.blocks)

    def array(self, values: NDArray[Any]) -> Any:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(values.nbytes, 1)))
        made = Held(address.value, values.shape, values.dtype, self)
        ctypes.memmove(made.address, np.ascontiguousarray(values).ctypes.data, values.nbytes)
        return made

    def numpy(self, array: Any) -> NDArray[Any]:
        self.call("cuCtxSynchronize")
        return np.frombuffer(ctypes.string_at(array.address, array.nbytes), array.dtype).reshape(array.shape)

    def copy(self, to: Any, source: Any, stream: int) -> None:
        pointers = [ctypes.c_uint64(array.address) for array in (to, source)]
        self.call("cuMemcpyDtoDAsync_v2", *pointers, ctypes.c_size_t(to.nbytes), ctypes.c_void_p(stream))

    def new_stream(self) -> Any:
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        return types.SimpleNamespace(cuda_stream=int(stream.value or 0))

    def timed(self, work: Callable[[], object], ahead: int = AHEAD) -> float:
        """Microseconds of the host."""
        began = time.perf_counter()
        work()
        self.call("cuCtxSynchronize")
        return (time.perf_counter() - began) * 1e6

    def view(self, slab: forebay.CudaMemory) -> Any:
        return Held(slab.address, slab.shape, np.uint8, slab)

    def has_rows(self, slab: forebay.CudaMemory, slots: Any, rows: NDArray[np.uint8]) -> bool:
        at = self.numpy(slots)
        whole = self.numpy(self.view(slab)).reshape(-1, rows.shape[-1])
        return np.array_equal(np.where(at[..., None] < 0, 0, whole[np.maximum(at, 0)]), rows)

    def compute(self, products: int, stream: int) -> None:
        """Does nothing: this driver runs only forebay's kernels."""

    def captured(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Returns the result of `work`, and a function that replays the work it enqueued."""
        compute, graph, executable = ctypes.c_void_p(self.stream.cuda_stream), ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuStreamBeginCapture_v2", compute, 0)
        made = work()
        self.call("cuStreamEndCapture", compute, ctypes.byref(graph))
        self.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        return made, lambda: self.call("cuGraphLaunch", executable, compute)

    def ceilings(self, size: int, rounds: int) -> dict[str, float]:
        """A copy by the host's processor."""
        one, other = np.zeros(size, np.uint8), np.ones(size, np.uint8)
        us = min(self.timed(lambda: np.copyto(one, other)) for _ in range(rounds))
        nothing = min(self.timed(lambda: None) for _ in range(rounds))
        speed = size / us * 1e6
        return {"copy_up": speed, "copy_down": speed, "both": speed, "launch_us": nothing, "product_us": nothing}


Place = Torch | Standin
