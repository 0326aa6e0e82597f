"""Where an engine's rows are, and what computes attention over them.

    Numpy    on the host device
    Standin  on the CUDA device of a driver whose device memory the host can read: the stand-in of forebay's tests
    Torch    on a GPU, with torch over forebay's slabs

`engine.Resident` and `offloaded.Offloaded` both get one of these, the same one: a bitwise comparison needs the same
kernels on both sides. NumPy computes all of the model except attention, everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import forebay
import numpy as np
from numpy.typing import NDArray
from smollm2 import Floats, Ids, attend

Array = Any
"""An array of NumPy, or of torch on the GPU."""


class Arrays(Protocol):
    """The operations that differ between the places. An index is one that NumPy takes, made of NumPy arrays."""

    def device(self, overlapped: bool) -> forebay.Device:
        """A device for a cache; ``overlapped``: with streams that run concurrently."""

    def stream(self, device: forebay.Device) -> Any:
        """A stream of the engine for concurrent work."""

    def view(self, memory: Any, kind: type[np.generic]) -> Array:
        """A view of the device's memory as numbers."""

    def numbers(self, device: forebay.Device, shape: tuple[int, ...]) -> tuple[Any, Array]:
        """An int32 array on the device, -1 everywhere, once as forebay takes it and once as the engine does. Both share
        the memory.
        """

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """A float32 array of the engine."""

    def put(self, array: Array, index: Any, values: NDArray[Any]) -> None:
        """Writes values in the order of the stream."""

    def own(self, values: Ids) -> Array:
        """Numbers of the host as `rows` takes them."""

    def rows(self, array: Array, major: Array, minor: Array) -> Array:
        """The rows at pairs of indices, one after another."""

    def numpy(self, array: Array) -> NDArray[Any]:
        """A copy on the host; on the host device the array itself."""

    def attend(self, queries: Floats, keys: Array, values: Array, valid: Array) -> tuple[Floats, Floats]:
        """As `smollm2.attend`."""

    def ready(self, device: forebay.Device, stream: Any) -> None:
        """Called before the host reads or writes memory that ``stream`` uses too. Waits if nothing else does."""

    def run(self, device: forebay.Device, stream: int, work: Callable[[], object]) -> None:
        """Runs a piece of the engine's work, in the order of ``stream``."""


class Numpy:
    """Rows in host memory."""

    def device(self, overlapped: bool) -> forebay.Device:
        """See `Arrays`: streams are threads, or there are none."""
        return forebay.HostDevice(threads=overlapped)

    def stream(self, device: forebay.Device) -> Any:
        """See `Arrays`."""
        return device.stream()

    def view(self, memory: Any, kind: type[np.generic]) -> Array:
        """See `Arrays`."""
        return np.asarray(memory).view(kind)

    def numbers(self, device: forebay.Device, shape: tuple[int, ...]) -> tuple[Any, Array]:
        """See `Arrays`."""
        made = np.full(shape, -1, np.int32)
        return made, made

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """See `Arrays`."""
        return np.zeros(shape, np.float32)

    def put(self, array: Array, index: Any, values: NDArray[Any]) -> None:
        """See `Arrays`."""
        array[index] = values

    def own(self, values: Ids) -> Array:
        """See `Arrays`."""
        return values

    def rows(self, array: Array, major: Array, minor: Array) -> Array:
        """See `Arrays`."""
        return array[major, minor]

    def numpy(self, array: Array) -> NDArray[Any]:
        """See `Arrays`."""
        return np.asarray(array)

    def attend(self, queries: Floats, keys: Array, values: Array, valid: Array) -> tuple[Floats, Floats]:
        """See `Arrays`."""
        return attend(queries, keys, values, valid)

    def ready(self, device: forebay.Device, stream: Any) -> None:
        """See `Arrays`: without threads all work has ended, and with threads this call runs on the stream's thread."""

    def run(self, device: forebay.Device, stream: int, work: Callable[[], object]) -> None:
        """See `Arrays`: on the stream's thread."""
        device.call(work, stream)


class Standin(Numpy):
    """Rows in device memory that the host can read by its address."""

    def __init__(self, number: int, driver: Path) -> None:
        self.number, self.driver = number, driver

    def device(self, overlapped: bool) -> forebay.Device:
        """See `Arrays`."""
        return forebay.CudaDevice(self.number, library=self.driver)

    def view(self, memory: Any, kind: type[np.generic]) -> Array:
        """See `Arrays`."""
        return np.asarray(_OnHost(memory)).view(kind)

    def numbers(self, device: forebay.Device, shape: tuple[int, ...]) -> tuple[Any, Array]:
        """See `Arrays`."""
        made = _Numbers(device.allocate((*shape, 4)))
        seen = self.view(made.memory, np.int32).reshape(shape)
        seen[...] = -1
        return made, seen

    def ready(self, device: forebay.Device, stream: Any) -> None:
        """See `Arrays`."""
        device.wait(stream)

    def run(self, device: forebay.Device, stream: int, work: Callable[[], object]) -> None:
        """See `Arrays`: immediately, after the work that is enqueued there."""
        device.wait(stream)
        work()


class _OnHost:
    """Device memory that NumPy may read."""

    def __init__(self, memory: forebay.CudaMemory) -> None:
        self.memory = memory
        self.__array_interface__ = memory.interface()


class _Numbers:
    """Device memory as int32."""

    def __init__(self, memory: forebay.CudaMemory) -> None:
        self.memory, self.device = memory, memory.device
        data = (memory.address, False)
        self.__cuda_array_interface__ = {"version": 3, "shape": memory.shape[:-1], "typestr": "<i4", "data": data}


class Torch:
    """Rows in a GPU's memory. Torch computes attention on both sides of a comparison, in float32: matrix products of
    equal shapes on one stream have equal bits.

    This class does not switch on torch's deterministic mode. In that mode torch writes some rows of a slab, whose runs
    have gaps, by copying the slab out and all of it back, and so overwrites what forebay writes there meanwhile.
    """

    def __init__(self, number: int) -> None:
        """Imports torch.

        Raises:
            ImportError, RuntimeError: torch is not installed, or it has no such GPU.
        """
        import torch

        if not 0 <= number < torch.cuda.device_count():
            raise RuntimeError(f"torch has {torch.cuda.device_count()} GPUs")
        self.number, self.torch, self.gpu = number, torch, torch.device("cuda", number)
        torch.cuda.set_device(self.gpu)
        torch.backends.cuda.matmul.allow_tf32 = False

    def device(self, overlapped: bool) -> forebay.Device:
        """See `Arrays`."""
        return forebay.CudaDevice(self.number)

    def stream(self, device: forebay.Device) -> Any:
        """See `Arrays`."""
        return self.torch.cuda.Stream(self.gpu)

    def view(self, memory: Any, kind: type[np.generic]) -> Array:
        """See `Arrays`."""
        return self.torch.from_dlpack(memory).view(getattr(self.torch, np.dtype(kind).name))

    def numbers(self, device: forebay.Device, shape: tuple[int, ...]) -> tuple[Any, Array]:
        """See `Arrays`."""
        made = self.torch.full(shape, -1, dtype=self.torch.int32, device=self.gpu)
        # It may be used on any stream.
        self.torch.cuda.synchronize()
        return made, made

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """See `Arrays`."""
        return self.torch.zeros(shape, device=self.gpu)

    def put(self, array: Array, index: Any, values: NDArray[Any]) -> None:
        """See `Arrays`."""
        array[self._index(index)] = self._given(values)

    def own(self, values: Ids) -> Array:
        """See `Arrays`."""
        return self._given(values)

    def rows(self, array: Array, major: Array, minor: Array) -> Array:
        """See `Arrays`."""
        return array[self._index((major, minor))]

    def numpy(self, array: Array) -> NDArray[Any]:
        """See `Arrays`."""
        copied: NDArray[Any] = array.cpu().numpy()
        return copied

    def attend(self, queries: Floats, keys: Array, values: Array, valid: Array) -> tuple[Floats, Floats]:
        """See `Arrays`: the sums of `smollm2.attend`, with torch's kernels."""
        torch, (count, heads, head) = self.torch, queries.shape
        groups = keys.shape[-1] // head
        grouped = self._given(queries).reshape(count, groups, heads // groups, head)
        split = (count, -1, groups, head)
        scores = grouped @ keys.reshape(split).permute(0, 2, 3, 1) / head**0.5
        scores = scores.masked_fill(~valid[:, None, None], -torch.inf)
        top = scores.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        weights = (scores - top).exp()
        total = weights.sum(dim=-1, keepdim=True)
        summed = weights @ values.reshape(split).permute(0, 2, 1, 3)
        attended = summed / total.masked_fill(total == 0, 1)
        # Minus infinity if no entry is valid.
        log = top + total.log()
        return self.numpy(attended.reshape(count, heads, head)), self.numpy(log.reshape(count, heads))

    def ready(self, device: forebay.Device, stream: Any) -> None:
        """See `Arrays`: torch's copies are in the order of the stream."""

    def run(self, device: forebay.Device, stream: int, work: Callable[[], object]) -> None:
        """See `Arrays`: enqueued immediately on the stream; NumPy's computations wait for what they read."""
        with self.torch.cuda.stream(self.torch.cuda.ExternalStream(stream, device=self.gpu)):
            work()

    def _given(self, values: NDArray[Any]) -> Array:
        return self.torch.from_numpy(np.array(values)).to(self.gpu)

    def _index(self, index: Any) -> Any:
        """Indices on the GPU; numbers and slices unchanged."""
        several = index if isinstance(index, tuple) else (index,)
        found = tuple(self._given(one) if isinstance(one, np.ndarray) else one for one in several)
        return tuple(one.long() if hasattr(one, "long") else one for one in found)


def arrays(device: str, driver: Path | None = None) -> Arrays:
    """The arrays of a device, named as on the command line: ``host``, ``cuda:0``.

    Raises:
        ValueError: no such name.
        ImportError, RuntimeError: torch is not installed, or there is no such GPU.
    """
    if device == "host":
        return Numpy()
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number.isdecimal():
        raise ValueError(f"{device!r} is neither host nor cuda:N")
    return Torch(int(number)) if driver is None else Standin(int(number), driver)
