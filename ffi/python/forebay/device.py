"""Devices and their streams.

A device takes memory for its caches and provides streams. The host device is complete: it runs everything without a
GPU. Closing a device ends it for new caches; its memory is freed when its last cache and the last view of its memory
are gone, in any order.

The garbage collector may end caches and devices on any thread, even a device's own, so it never waits. What it cannot
end without waiting, a later creation, `wait` or `close` of any cache or device ends, or the end of the interpreter.
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
from .calls import DROPPED, RUNS, Call, caller
from .config import set_fields
from .errors import Closed, InvalidArgument
from .keep import Loans
from .tensors import BYTES_MAX, HOST, Place, index

_Self = TypeVar("_Self", bound="Device")


_BYTES = np.dtype(np.uint8)
_HOST_MEMORY = {"registered": lib.FB_HOST_MEMORY_REGISTERED, "driver": lib.FB_HOST_MEMORY_DRIVER}

# Handles of caches and devices that have not ended, in the order of their creation. `_left` has those of them that no
# object uses any more.
alive: dict[Any, None] = {}
# The device object among the users of its handle.
_OBJECT = "the device object"
_left: deque[Any] = deque()
# Not empty: the interpreter is ending, and no callback may begin.
ending: list[bool] = []


def give_up(handle: Any) -> None:
    """Ends a handle that no object uses any more. If ending would wait for running work, the handle is left for later.
    """
    if handle.later or not handle.end(wait=False):
        _left.append(handle)


def end_left() -> None:
    """Ends the handles left for later, as far as that is possible now."""
    for handle in _left.copy():
        # The note stays until the handle has ended, so an exception in between does not lose it.
        if handle.end(wait=False):
            try:
                _left.remove(handle)
            except ValueError:
                # Another thread has removed it.
                continue


@atexit.register
def _end_all() -> None:
    """At the interpreter's end: caches before their devices."""
    ending.append(True)
    for handle in reversed(list(alive.copy())):
        handle.at_exit()


class DeviceHandle:
    """The C handle, and its users: the device object, caches, views of its memory.

    The garbage collector may end these in any order; the last user to leave ends the handle.
    """

    def __init__(self, later: bool) -> None:
        # The library writes the handle here.
        self.made = ffi.new("fb_device **")
        self.later = later
        self.streams: dict[int, Any] = {0: NULL}
        # Calls that are enqueued or running, their exceptions by stream, and the C function that runs them.
        self.calls: dict[int, Call] = {}
        self.failed: dict[int, list[BaseException]] = {}
        self.call = caller(self.calls, self.failed)
        self.keys = itertools.count(1)
        # What copies outside of steps read.
        self.loans = Loans()
        # Objects that read the device's memory while they live.
        self._readers: dict[weakref.ref[object], None] = {}
        # Whether a thread of the device may be running Python code.
        self.called = False
        # Whether the device object is one of its users. The interpreter's end does not wait for that user.
        self.owned = True
        # A dict, whose operations are atomic with other threads and the garbage collector.
        self._users: dict[object, None] = {_OBJECT: None}

    @property
    def pointer(self) -> Any:
        """The C handle."""
        return self.made[0]

    def enter(self, user: object) -> None:
        """Adds a user."""
        if not self._users:
            raise Closed("device: it was closed")
        self._users[user] = None

    def used_by(self, owner: object, end: Callable[..., object], *given: Any) -> Any:
        """Makes `owner` a user for its lifetime; afterwards calls `end` and leaves the device."""
        user = object()
        ends = weakref.finalize(owner, self._left_by, user, end, given)
        self.enter(user)
        return ends

    def read_by(self, reader: object) -> None:
        """Keeps the handle from its end while `reader` lives; a later call ends it then. When the reader ends, C alone
        runs: no exception can come between.
        """
        self._readers[weakref.ref(reader, self._readers.pop)] = None

    def _left_by(self, user: object, end: Callable[..., object], given: tuple[Any, ...]) -> None:
        end(*given)
        self.leave(user)

    def disown(self) -> None:
        """Removes the device object from the users."""
        self.owned = False
        self.leave(_OBJECT)

    def leave(self, user: object) -> None:
        """Removes a user; the last one releases the handle. May be called again."""
        self._users.pop(user, None)
        if not self._users:
            give_up(self)

    def end(self, wait: bool) -> bool:
        """Ends the handle after the enqueued work; returns whether it has ended. While a Python call is enqueued, or a
        copy of what was lent, it does so only if `wait`; while it is read, never.
        """
        if self not in alive:
            return True
        self.loans.release()
        if self._readers or ((self.calls or self.loans) and not wait):
            return False
        if self.pointer == NULL:
            # The creation failed.
            alive.pop(self, None)
            return True
        status = int(lib.fb_device_destroy(self.pointer))
        if status == lib.FB_BUSY:
            return False
        alive.pop(self, None)
        # In a forked child, where the status is FB_CLOSED, no call has raised anything.
        for error in itertools.chain.from_iterable(self.failed.values() if status == 0 else ()):
            warnings.warn(f"a call on a stream of a device has raised {error!r}", RuntimeWarning, stacklevel=2)
        self.failed.clear()
        if status not in (0, lib.FB_CLOSED):
            warnings.warn(f"a device could not be ended: {status_text(status)}", ResourceWarning, stacklevel=2)
        elif status == 0:
            # All copies have run. In a forked child the parent's may not have.
            self.loans = Loans()
        return True

    def enqueue(self, work: Callable[[], object], on: Any) -> int:
        """Enqueues a call of `work` on a stream of the C interface. Returns the status.

        Raises:
            Closed: the device is being closed, and `work` will not run.
        """
        key, call = next(self.keys), Call(work, _address_of(on))
        self.called = True
        self.calls[key] = call
        try:
            status = int(lib.fb_stream_call(self.pointer, on, self.call, ffi.cast("void *", key)))
        finally:
            # The work has run, even if an exception occurred in between.
            if not self.later:
                self.calls.pop(key, None)
        if status:
            self.calls.pop(key, None)
        elif not call.decide(RUNS):
            raise Closed("device: it was closed")
        return status

    def lend(self, owner: object, copy: Callable[[], int], on: Any) -> int:
        """Makes a call that enqueues a copy of `owner`'s memory on a stream, and keeps `owner` until the copy has run.
        Returns the call's status.

        Behind the copy the library marks a word that it has run. That runs no Python code, so nothing waits for the
        interpreter's lock on the stream, and code that holds the lock may wait for the stream. A later call releases
        what was marked: never a thread of the device, for the end of a tensor may call CUDA.
        """
        if not self.later:
            return copy()
        self.loans.release()

        def mark(word: Any) -> int:
            return int(lib.fb_stream_mark(self.pointer, on, word))

        return self.loans.lend(owner, _address_of(on), copy, mark)

    def wait(self) -> None:
        """Waits for its streams. A call that is noted before and after was never enqueued: an exception came between.
        Its note would keep the device from its end. Or a thread is about to enqueue it, which then raises Closed. The
        same is true of what is lent, but no copy can be called back: that is kept until the device has ended.
        """
        noted, loans = list(self.calls), self.loans.unmarked()
        streams = self.streams.copy()
        failed = [lib.fb_stream_wait(self.pointer, stream) for stream in streams.values()]
        self.loans.release()
        if any(failed):
            return
        for key in noted:
            call = self.calls.get(key)
            if call is not None and call.decide(DROPPED):
                self.calls.pop(key, None)
        # Another thread may be returning a stream, which is none of these then.
        self.loans.waited([loan for loan in loans if loan[0].stream in streams])
        self.loans.keep(loans)

    def at_exit(self) -> None:
        """Lets Python calls finish while the interpreter exists; a device with views stays."""
        if self.called or self.loans:
            self.wait()
        if len(self._users) <= self.owned:
            self.end(wait=True)


class Memory:
    """Memory of a device that keeps the device alive: the base object of views."""

    def __init__(
        self,
        handle: DeviceHandle,
        address: int,
        place: Place,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        dtype: np.dtype[Any] = _BYTES,
        readonly: bool = False,
    ) -> None:
        self._end = handle.used_by(self, _nothing)
        # Objects that still read the memory at the interpreter's end may continue.
        self._end.atexit = False
        self.address, self.place, self.shape, self.strides = address, place, shape, strides
        self.dtype, self.readonly = dtype, readonly

    def interface(self) -> dict[str, Any]:
        """The array interface, version 3."""
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, self.readonly),
            "strides": self.strides,
        }


class HostMemory(Memory):
    """Host memory of which `numpy.asarray` takes a view."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.interface()


class CudaMemory(Memory):
    """CUDA memory of which `torch.from_dlpack`, `cupy.from_dlpack`, `cupy.asarray` and others take a view: uint8, but
    for weights that were asked for in another dtype. A view keeps it alive.

    `torch.as_tensor` takes a view only with `device="cuda:0"`; without it, it copies to the host. Taking a view orders
    nothing: order the reading stream after the work that writes.

    Attributes:
        address: the address of the first byte, on the device.
        place: the device.
        shape: extents.
        strides: bytes; None: without gaps.
        dtype: NumPy's.
        readonly: whether it may only be read. A consumer of DLPack 1.0 is told so; an older one, and one without
            read-only tensors, such as torch, gets a tensor all the same, which must not be written.
    """

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.interface(), "stream": None}

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        """A DLPack tensor of the memory. It orders nothing.

        Raises:
            BufferError: a copy, or another device, was requested.
        """
        if copy or (dl_device is not None and tuple(map(int, dl_device)) != self.__dlpack_device__()):
            raise BufferError(f"memory of {self.place} is given out where it is, and not copied")
        says = self.readonly and max_version is not None and max_version[0] >= 1
        return dlpack.on_cuda(np.asarray(_Addressed(self)), self.place.number, says)

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's kind of device, and the device's number."""
        return (dlpack.CUDA, self.place.number)

    @property
    def device(self) -> int:
        """The device's number."""
        return self.place.number


class _Addressed:
    """Device memory described to NumPy, to make a capsule. Nothing may read this array, nor write it: it is said to be
    writable because NumPy makes no capsule without a version of one that is not.
    """

    def __init__(self, memory: CudaMemory) -> None:
        self.memory = memory

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {**self.memory.interface(), "data": (self.memory.address, False)}


class Stream:
    """A stream that belongs to a device: `device.stream()`. It lives as long as the device.

    Attributes:
        device: the stream's device.
        address: the stream in the C interface.
    """

    def __init__(self, device: Device, pointer: Any) -> None:
        self.device = device
        self.address = int(ffi.cast("uintptr_t", pointer))
        self._pointer = pointer

    def wait(self) -> None:
        """Blocks until everything now enqueued has ended."""
        self.device.wait(self)

    def call(self, work: Callable[[], object]) -> None:
        """Enqueues a call of `work`: see `Device.call`."""
        self.device.call(work, self)


class Device:
    """The common part of host and CUDA devices; a context manager that closes itself."""

    place: Place = HOST
    # Whether enqueued work may still run after the enqueueing call has returned.
    later: bool = False

    def __init__(self, config: Any) -> None:
        end_left()
        self._handle, text = DeviceHandle(self.later), new_text()
        self._closer = weakref.finalize(self, self._handle.disown)
        # At the interpreter's end `_end_all` waits.
        self._closer.atexit = False
        try:
            alive[self._handle] = None
            check_created(lib.fb_device_create(config, text, len(text), self._handle.made), text)
        except BaseException:
            # This also ends a handle that was made while an exception was pending.
            self._closer()
            raise
        self._streams = self._handle.streams

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
        """Blocks until everything now enqueued on `stream` has ended.

        Raises:
            DeviceFailed: the device has failed.
            The exception of a `call` that was enqueued on `stream`.
        """
        pointer, on = self._open(), self.stream_of(stream)
        loans = self._handle.loans
        unmarked = loans.unmarked(_address_of(on))
        check(lib.fb_stream_wait(pointer, on), pointer)
        loans.waited(unmarked)
        end_left()
        loans.release()
        raised = self._handle.failed.get(_address_of(on))
        if raised:
            raise raised.pop(0)

    def call(self, work: Callable[[], object], stream: Any = None) -> None:
        """Enqueues a call of `work`, without arguments, on a thread of the device. It must not call into CUDA or into a
        cache. It needs the interpreter's lock, so code that holds the lock must not wait for the stream before it has
        run: `wait` and torch's waits release it. The next `wait` for that stream raises its exception.

        Raises:
            InvalidArgument: `work` is not callable.
            Closed, Busy: another thread closes the device. `work` does not run.
            DeviceFailed: the device has failed.
        """
        if not callable(work):
            raise InvalidArgument("work", type(work).__name__, "a callable without arguments")
        pointer, on = self._open(), self.stream_of(stream)
        check(self._handle.enqueue(work, on), pointer)

    def order(self, before: Any, after: Any) -> None:
        """Orders two streams: work enqueued on `after` from now on runs after the work that is now enqueued on
        `before`.

        Raises:
            InvalidArgument: a value that is no stream of this device.
            DeviceFailed: the device has failed.
        """
        pointer = self._open()
        check(lib.fb_stream_order(pointer, self.stream_of(before), self.stream_of(after)), pointer)

    def return_stream(self, stream: Any) -> None:
        """Returns a stream of the engine, before the engine destroys it: waits for the work enqueued on it. First
        retire the steps that were prepared or finished on it.

        Raises:
            InvalidArgument: a stream that was not used here before, or the device's own.
            InvalidState: the stream is being captured.
        """
        pointer, on = self._open(), self._streams.get(self._borrowed(stream), NULL)
        if on == NULL:
            raise InvalidArgument("stream", _stream_text(stream), "a stream of the engine's that was named before")
        # Forgotten before the call: if a program names the stream again, it is borrowed again.
        self._streams.pop(_address_of(on), None)
        unmarked = self._handle.loans.unmarked(_address_of(on))
        status = lib.fb_stream_return(pointer, on)
        if status:
            self._streams[_address_of(on)] = on
        else:
            self._handle.loans.waited(unmarked)
            self._handle.loans.release()
        check(status, pointer)

    def _borrowed(self, stream: Any) -> int:
        """The address of a stream of the engine; 0 if it is none."""
        return 0

    def close(self) -> None:
        """Ends the device for new caches; idempotent. Waits for the work of `call` and the copies of `fill`. Its
        memory, including that of closed caches, is freed with the last cache and the last view.

        An exception of a `call` that no `wait` has raised becomes a RuntimeWarning.
        """
        if self._closer.alive:
            if self._handle.called or self._handle.loans:
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

    def view(
        self,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        dtype: np.dtype[Any] = _BYTES,
        readonly: bool = False,
    ) -> Any:
        """A view of the device's memory that keeps it alive: an array on the host device, `CudaMemory` on CUDA."""
        raise NotImplementedError

    def allocate(self, shape: tuple[int, ...] | int) -> Any:
        """Allocates zeroed memory that the device keeps until it ends; returns a view like a slab's, uint8 of `shape`.

        Raises:
            OutOfMemory: the device has no more memory.
            InvalidArgument.
        """
        axes = shape if isinstance(shape, (tuple, list)) else (shape,)
        extents = tuple(index(extent, "shape", BYTES_MAX) for extent in axes)
        pointer, made = self._open(), ffi.new("void **")
        check(lib.fb_device_allocate(pointer, math.prod(extents), made), pointer)
        return self.view(int(ffi.cast("uintptr_t", made[0])), extents)

    def stream_of(self, stream: Any) -> Any:
        """The C interface's stream for a caller's stream.

        Raises:
            InvalidArgument: it is no stream of this device.
        """
        raise NotImplementedError


class HostDevice(Device):
    """Host memory as the device: complete, and the oracle of all other devices.

    Args:
        threads: each stream is a thread; otherwise work runs in the call that enqueues it.
        memory: the most bytes of device memory; None: no bound.

    Raises:
        OutOfMemory, OsRefused: the system refused memory or a thread.
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

    def view(
        self,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        dtype: np.dtype[Any] = _BYTES,
        readonly: bool = False,
    ) -> Any:
        return np.asarray(HostMemory(self._handle, address, HOST, shape, strides, dtype, readonly))


class CudaDevice(Device):
    """A CUDA device, in its primary context, which torch uses too. Streams are the engine's.

    A stream is a `torch.cuda.Stream`, any object with `__cuda_stream__`, a `CUstream` as an int, or a `Stream` of this
    device. None is torch's current stream of the device if torch is in use, and the legacy default stream otherwise.
    The package borrows each stream at its first use; it must live as long as the device, or until `return_stream`.

    Args:
        number: the device's number.
        library: the driver's path; None: libcuda.so.1 as the loader finds it.
        gather_blocks: thread blocks of a gather; None: the library's default, 4.
        threads: threads of a block; None: the library's default.
        host_memory: the memory of the total pool: "registered", the system's, or "driver", allocated by the driver;
            None: the library's default, "registered". "driver" needs a driver of CUDA 12.2 or newer.

    Raises:
        InvalidArgument: another word for `host_memory`.
        Unsupported: the driver is older than CUDA 12.0, the device lacks what forebay needs, or device or driver lack
            what an option needs.
        OsRefused: no driver. InvalidConfig: no such device. DeviceFailed.
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
        # Calls without a stream use the legacy default stream, which is borrowed like any other.
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

    def view(
        self,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        dtype: np.dtype[Any] = _BYTES,
        readonly: bool = False,
    ) -> Any:
        return CudaMemory(self._handle, address, self.place, shape, strides, dtype, readonly)


def _stream_text(stream: Any) -> str:
    if type(stream) is Stream:
        return f"a stream of another device ({stream.address:#x})"
    device = getattr(stream, "device", None)
    return f"{type(stream).__name__} {stream!r}" + (f" of {device}" if device is not None else "")


def _nothing() -> None:
    """The end of a view: the device ends the memory itself."""


def _address_of(stream: Any) -> int:
    return int(ffi.cast("uintptr_t", stream))
