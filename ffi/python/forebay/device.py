"""Devices and their streams.

A device takes memory for its caches and gives streams. The host device is complete: what runs without a GPU. Closing
one ends it for new caches; its memory goes when its last cache and the last view of its memory have gone, in whichever
order they go.

The garbage collector may end caches and devices on any thread, also on one of a device's: it never waits. What it
cannot end without waiting is left, and ended by a later creation, `wait` or `close` of any cache or device, or at the
interpreter's end.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import sys
import warnings
import weakref
from collections import deque
from types import TracebackType
from typing import Any, Callable, TypeVar

import numpy as np

from . import dlpack
from ._library import NULL, check, check_created, ffi, lib, new_text, path_bytes, sized, status_text
from .config import set_fields
from .errors import Closed, InvalidArgument
from .tensors import HOST, Place, index

_Self = TypeVar("_Self", bound="Device")


_BYTES_MAX = 0xFFFFFFFFFFFFFFFF
_HOST_MEMORY = {"registered": lib.FB_HOST_MEMORY_REGISTERED, "driver": lib.FB_HOST_MEMORY_DRIVER}

# Handles of caches and devices that have not ended, in the order of their creation; and those among them that nobody
# has any more.
alive: dict[Any, None] = {}
# The device object among the users of its handle.
_OBJECT = "the device object"
_left: deque[Any] = deque()
# Not empty: the interpreter ends, and no callback may begin.
ending: list[bool] = []


def give_up(handle: Any) -> None:
    """Ends a handle that nobody has any more; where work runs later, which this would wait for, it is left."""
    if handle.later or not handle.end(wait=False):
        _left.append(handle)


def end_left() -> None:
    """Ends what was left, as far as it can end now."""
    for handle in _left.copy():
        # It is noted until it has ended: an exception between does not lose it.
        if handle.end(wait=False):
            try:
                _left.remove(handle)
            except ValueError:
                # Another thread was here.
                continue


@atexit.register
def _end_all() -> None:
    """At the interpreter's end: caches before their devices."""
    ending.append(True)
    for handle in reversed(list(alive.copy())):
        handle.at_exit()


class DeviceHandle:
    """The C handle, and how many still need it: the device object, caches, views of its memory.

    The garbage collector may end these in any order; the last one to leave ends the handle.
    """

    def __init__(self, later: bool) -> None:
        # Where the library puts the handle.
        self.made = ffi.new("fb_device **")
        self.later = later
        self.streams: dict[int, Any] = {0: NULL}
        # Calls that are enqueued or run, what they raised by stream, and the C function that runs them.
        self.calls: dict[int, tuple[Callable[[], object], int]] = {}
        self.failed: dict[int, list[BaseException]] = {}
        self.call = _caller(self.calls, self.failed)
        # Whether a thread of the device's may be in Python.
        self.called = False
        # Whether the device object is one of its users, which the interpreter's end does not wait for.
        self.owned = True
        # A dict, since its calls are whole beside other threads and the garbage collector.
        self._users: dict[object, None] = {_OBJECT: None}

    @property
    def pointer(self) -> Any:
        """The C handle."""
        return self.made[0]

    def enter(self, user: object) -> None:
        """One more needs it."""
        if not self._users:
            raise Closed("device: it was closed")
        self._users[user] = None

    def used_by(self, owner: object, end: Callable[..., object], *given: Any) -> Any:
        """`owner` needs it as long as it lives; then `end` is called, and the device left."""
        user = object()
        ends = weakref.finalize(owner, self._left_by, user, end, given)
        self.enter(user)
        return ends

    def _left_by(self, user: object, end: Callable[..., object], given: tuple[Any, ...]) -> None:
        end(*given)
        self.leave(user)

    def disown(self) -> None:
        """The device object goes."""
        self.owned = False
        self.leave(_OBJECT)

    def leave(self, user: object) -> None:
        """One less; the last one gives it up. May be called again."""
        self._users.pop(user, None)
        if not self._users:
            give_up(self)

    def end(self, wait: bool) -> bool:
        """Ends it, after what is enqueued; whether it has ended. With a call of Python's there, only if `wait`."""
        if self not in alive:
            return True
        if self.calls and not wait:
            return False
        if self.pointer == NULL:
            # It was not made.
            alive.pop(self, None)
            return True
        status = int(lib.fb_device_destroy(self.pointer))
        if status == lib.FB_BUSY:
            return False
        alive.pop(self, None)
        # A forked child, for which it was closed, has raised nothing.
        for error in itertools.chain.from_iterable(self.failed.values() if status == 0 else ()):
            warnings.warn(f"a call on a stream of a device has raised {error!r}", RuntimeWarning, stacklevel=2)
        self.failed.clear()
        if status not in (0, lib.FB_CLOSED):
            warnings.warn(f"a device could not be ended: {status_text(status)}", ResourceWarning, stacklevel=2)
        return True

    def wait(self) -> None:
        """Waits for its streams."""
        for stream in self.streams.copy().values():
            lib.fb_stream_wait(self.pointer, stream)

    def at_exit(self) -> None:
        """Calls of Python's run to their end while there is an interpreter; a device that is still viewed stays."""
        if self.called:
            self.wait()
        if len(self._users) <= self.owned:
            self.end(wait=True)


class Memory:
    """Memory of a device that keeps it alive: what views of it have as their base."""

    def __init__(
        self, handle: DeviceHandle, address: int, place: Place, shape: tuple[int, ...], strides: tuple[int, ...] | None
    ) -> None:
        self._end = handle.used_by(self, _nothing)
        # What still reads it at the interpreter's end is not cut off.
        self._end.atexit = False
        self.address, self.place, self.shape, self.strides = address, place, shape, strides

    def interface(self) -> dict[str, Any]:
        """The array interface, version 3: writable bytes."""
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": self.strides,
        }


class HostMemory(Memory):
    """What `numpy.asarray` takes a view of."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.interface()


class CudaMemory(Memory):
    """What `torch.from_dlpack`, `cupy.from_dlpack`, `cupy.asarray` and others take a view of: uint8. A view keeps it.

    `torch.as_tensor` takes one only where it is told the device (`device="cuda:0"`); else it copies to the host.
    Nothing is ordered by taking a view: who reads on a stream has ordered it behind the work that writes.

    Attributes:
        address: of the first byte, on the device.
        place: which device.
        shape: extents, in bytes on the last axis.
        strides: bytes; None: without gaps.
    """

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.interface(), "stream": None}

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        """A DLPack tensor of it, ordered by nothing.

        Raises:
            BufferError: a copy, or another device, was asked for.
        """
        if copy or (dl_device is not None and tuple(map(int, dl_device)) != self.__dlpack_device__()):
            raise BufferError(f"memory of {self.place} is given out where it is, and not copied")
        return dlpack.on_cuda(np.asarray(_Addressed(self)), self.place.number)

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's kind of device, and the device's number."""
        return (dlpack.CUDA, self.place.number)

    @property
    def device(self) -> int:
        """The device's number."""
        return self.place.number


class _Addressed:
    """Device memory as NumPy is told of it, to make a capsule: nobody may read the array."""

    def __init__(self, memory: CudaMemory) -> None:
        self.memory = memory

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.memory.interface()


class Stream:
    """A stream of a device's own: `device.stream()`. It lives as long as the device.

    Attributes:
        device: whose it is.
        address: what the C interface calls it.
    """

    def __init__(self, device: Device, pointer: Any) -> None:
        self.device = device
        self.address = int(ffi.cast("uintptr_t", pointer))
        self._pointer = pointer

    def wait(self) -> None:
        """Blocks until what is enqueued has ended."""
        self.device.wait(self)

    def call(self, work: Callable[[], object]) -> None:
        """Enqueues a call of `work`: see `Device.call`."""
        self.device.call(work, self)


class Device:
    """What host and CUDA devices have in common; a context manager that closes itself."""

    place: Place = HOST
    # Whether work enqueued may still run when the call that enqueued it has returned.
    later: bool = False

    def __init__(self, config: Any) -> None:
        end_left()
        self._handle, text = DeviceHandle(self.later), new_text()
        self._closer = weakref.finalize(self, self._handle.disown)
        # The interpreter's end waits: `_end_all`.
        self._closer.atexit = False
        try:
            alive[self._handle] = None
            check_created(lib.fb_device_create(config, text, len(text), self._handle.made), text)
        except BaseException:
            # Also one that was made while an exception was pending.
            self._closer()
            raise
        self._streams = self._handle.streams
        self._keys = itertools.count(1)

    def stream(self) -> Stream:
        """A new stream.

        Raises:
            Exhausted: too many; OutOfMemory, DeviceFailed: the device refused.
        """
        pointer = self._open()
        made = ffi.new("void **")
        check(lib.fb_stream_create(pointer, made), pointer)
        stream = Stream(self, made[0])
        self._streams[stream.address] = made[0]
        return stream

    def wait(self, stream: Any = None) -> None:
        """Blocks until what is enqueued on `stream` has ended.

        Raises:
            DeviceFailed: the device has failed. Whatever a `call` that was enqueued on `stream` has raised.
        """
        pointer, on = self._open(), self.stream_of(stream)
        check(lib.fb_stream_wait(pointer, on), pointer)
        end_left()
        raised = self._handle.failed.get(_address_of(on))
        if raised:
            raise raised.pop(0)

    def call(self, work: Callable[[], object], stream: Any = None) -> None:
        """Enqueues a call of `work`, without arguments, for a thread of the device's. It must not call into CUDA or
        into a cache. What it raises comes out of the next `wait` for that stream.

        Raises:
            InvalidArgument: `work` is not to be called. DeviceFailed: the device has failed.
        """
        if not callable(work):
            raise InvalidArgument("work", type(work).__name__, "a callable without arguments")
        pointer, on = self._open(), self.stream_of(stream)
        key = next(self._keys)
        self._handle.called = True
        self._handle.calls[key] = (work, _address_of(on))
        try:
            status = lib.fb_stream_call(pointer, on, self._handle.call, ffi.cast("void *", key))
        finally:
            # It has run, also where an exception has come between.
            if not self.later:
                self._handle.calls.pop(key, None)
        if status:
            self._handle.calls.pop(key, None)
        check(status, pointer)

    def order(self, before: Any, after: Any) -> None:
        """Orders two streams: what is enqueued on `after` from now on runs behind what is enqueued on `before` now.

        Raises:
            InvalidArgument: no stream of this device. DeviceFailed: the device has failed.
        """
        pointer = self._open()
        check(lib.fb_stream_order(pointer, self.stream_of(before), self.stream_of(after)), pointer)

    def return_stream(self, stream: Any) -> None:
        """Gives a stream of the engine's back, before the engine destroys it: waits for what is enqueued on it. Steps
        that were prepared or finished on it are retired before.

        Raises:
            InvalidArgument: none that was named here, or the device's own. InvalidConfig: it is being captured.
        """
        pointer, on = self._open(), self._streams.get(self._borrowed(stream), NULL)
        if on == NULL:
            raise InvalidArgument("stream", _stream_text(stream), "a stream of the engine's that was named before")
        # Unknown before the call: a name that is given again is borrowed again, where it had not been returned.
        self._streams.pop(_address_of(on), None)
        status = lib.fb_stream_return(pointer, on)
        if status:
            self._streams[_address_of(on)] = on
        check(status, pointer)

    def _borrowed(self, stream: Any) -> int:
        """The address of a stream of the engine's; 0: it is none."""
        return 0

    def close(self) -> None:
        """Ends it for new caches; idempotent. Waits for what was enqueued by `call`. Memory, that of closed caches
        too, goes with the last cache and the last view.

        What a `call` has raised and no `wait` has shown is a RuntimeWarning.
        """
        if self._closer.alive:
            if self._handle.called:
                self._handle.wait()
            self._handle.disown()
            self._closer.detach()
        end_left()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._closer.alive

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> Any:
        if not self._closer.alive:
            raise Closed("device: it was closed")
        return self._handle.pointer

    def view(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Any:
        """A view of the device's memory that keeps it alive: a uint8 array of the host's, `CudaMemory` on CUDA."""
        raise NotImplementedError

    def allocate(self, shape: tuple[int, ...] | int) -> Any:
        """Memory of the device's, zeroed, which it keeps until it ends: a view as of a slab, uint8 of `shape`.

        Raises:
            OutOfMemory: the device has no more. InvalidArgument.
        """
        axes = shape if isinstance(shape, (tuple, list)) else (shape,)
        extents = tuple(index(extent, "shape", _BYTES_MAX) for extent in axes)
        pointer, made = self._open(), ffi.new("void **")
        check(lib.fb_device_allocate(pointer, math.prod(extents), made), pointer)
        return self.view(int(ffi.cast("uintptr_t", made[0])), extents)

    def stream_of(self, stream: Any) -> Any:
        """The C interface's stream for what a caller gave as one.

        Raises:
            InvalidArgument: it is no stream of this device.
        """
        raise NotImplementedError


class HostDevice(Device):
    """Host memory as the device: complete, the oracle of all others.

    Args:
        threads: each stream is a thread; else work runs in the call that enqueues it.
        memory: bound on the device's memory, bytes; None: none.

    Raises:
        OutOfMemory, OsRefused: what could not be had.
    """

    def __init__(self, *, threads: bool = False, memory: int | None = None) -> None:
        config = sized("fb_device_config")
        config.kind = lib.FB_DEVICE_HOST_THREADS if threads else lib.FB_DEVICE_HOST
        set_fields(config, {"memory": memory})
        self.later = threads
        super().__init__(config)

    def stream_of(self, stream: Any) -> Any:
        if stream is None:
            return NULL
        if type(stream) is Stream and stream.device is self:
            return stream._pointer
        if type(stream) is int and stream in self._streams:
            return self._streams[stream]
        raise InvalidArgument("stream", _stream_text(stream), "None, or a stream of this host device: device.stream()")

    def view(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Any:
        return np.asarray(HostMemory(self._handle, address, HOST, shape, strides))


class CudaDevice(Device):
    """A CUDA device, in its primary context, which torch uses too. Streams are the engine's.

    A stream is a `torch.cuda.Stream`, any object with `__cuda_stream__`, a `CUstream` as an int, or a `Stream` of
    this device; None is torch's current stream of the device where torch is in use, else the legacy default stream.
    Each is made known to the library when it is first named, and must live as long as the device, or until
    `return_stream`.

    Args:
        number: which one.
        library: the driver's path; None: libcuda.so.1 as the loader finds it.
        gather_blocks: thread blocks of a gather; None: the library's choice, 4.
        threads: threads of a block; None: the library's choice.
        host_memory: whose memory rows stand in: "registered", the system's, or "driver", which the driver makes; None:
            the library's choice, "registered". For "driver" the driver must be of CUDA 12.2 or newer.

    Raises:
        InvalidArgument: a word that is none of these. DeviceFailed, OsRefused: no driver, or no such device.
    """

    later = True

    def __init__(
        self,
        number: int = 0,
        *,
        library: str | os.PathLike[str] | None = None,
        gather_blocks: int | None = None,
        threads: int | None = None,
        host_memory: str | None = None,
    ) -> None:
        config = sized("fb_device_config")
        config.kind = lib.FB_DEVICE_CUDA
        if host_memory is not None:
            if host_memory not in _HOST_MEMORY:
                raise InvalidArgument("host_memory", repr(host_memory), " or ".join(map(repr, _HOST_MEMORY)))
            config.host_memory = _HOST_MEMORY[host_memory]
        number = index(number, "number")
        set_fields(config, {"number": number, "gather_blocks": gather_blocks, "threads": threads})
        path = ffi.new("char[]", path_bytes(library)) if library is not None else NULL
        config.library = path
        self.place = Place("cuda", number)
        super().__init__(config)
        # The legacy default stream, which is the one of calls that are given none, is borrowed like any other.
        pointer = self._open()
        check(lib.fb_stream_borrow(pointer, NULL), pointer)

    def stream_of(self, stream: Any) -> Any:
        address = self._address(stream)
        known = self._streams.get(address)
        if known is None:
            pointer = self._open()
            known = ffi.cast("void *", address)
            check(lib.fb_stream_borrow(pointer, known), pointer)
            self._streams[address] = known
        return known

    def _borrowed(self, stream: Any) -> int:
        return 0 if type(stream) is Stream else self._address(stream)

    def _address(self, stream: Any) -> int:
        if stream is None:
            torch = sys.modules.get("torch")
            if torch is None or not torch.cuda.is_initialized():
                return 0
            return int(torch.cuda.current_stream(self.place.number).cuda_stream)
        if type(stream) is Stream:
            if stream.device is self:
                return stream.address
        elif type(stream) is int and stream >= 0:
            return stream
        elif hasattr(stream, "cuda_stream"):
            device = getattr(stream, "device", None)
            if getattr(device, "index", self.place.number) in (self.place.number, None):
                return int(stream.cuda_stream)
        elif hasattr(stream, "__cuda_stream__"):
            return int(stream.__cuda_stream__()[1])
        expected = f"None, a CUstream as an int, or a stream of {self.place}"
        raise InvalidArgument("stream", _stream_text(stream), expected)

    def view(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Any:
        return CudaMemory(self._handle, address, self.place, shape, strides)


def _stream_text(stream: Any) -> str:
    if type(stream) is Stream:
        return f"a stream of another device ({stream.address:#x})"
    device = getattr(stream, "device", None)
    return f"{type(stream).__name__} {stream!r}" + (f" of {device}" if device is not None else "")


def _nothing() -> None:
    """Of a view: what ends with it is the device's."""


def _address_of(stream: Any) -> int:
    return int(ffi.cast("uintptr_t", stream))


def _caller(calls: dict[int, tuple[Callable[[], object], int]], failed: dict[int, list[BaseException]]) -> Any:
    """The C function that runs one of `calls`. It refers to no device: a device that goes leaves it nothing to run."""

    def run(key: Any) -> None:
        number = int(ffi.cast("uintptr_t", key))
        work, stream = calls[number]
        try:
            work()
        except BaseException as error:  # noqa: B036 - it comes out of wait
            failed.setdefault(stream, []).append(error)
        finally:
            calls.pop(number, None)

    return ffi.callback("void(void *)", run)
