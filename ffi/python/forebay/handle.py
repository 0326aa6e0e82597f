"""C handles. Those of weights, of their sessions, updates and changes of replicas end before their device; those of
transfers have none.

The handle outlives the object that has it: what the garbage collector cannot end without waiting is left for later
(`device.give_up`).
"""

from __future__ import annotations

import warnings
import weakref
from types import TracebackType
from typing import Any, Callable, TypeVar

from ._library import NULL, check, ffi, lib, status_text
from .device import DeviceHandle, alive, end_left, give_up

_Self = TypeVar("_Self", bound="BareHandled")


class BareHandle:
    """A C handle. The library writes it to `made`."""

    def __init__(self, kind: str, destroy: Any, later: bool) -> None:
        self.made = ffi.new(f"{kind} **")
        # Whether its end waits for enqueued work.
        self.later = later
        self._kind, self._destroy = kind, destroy

    def enter(self) -> None:
        """Called before the handle is made: the end of the interpreter ends it."""
        alive[self] = None

    def leave(self) -> None:
        """Called when it has ended."""

    def end(self, wait: bool) -> bool:
        """Ends the handle; returns whether it has ended. If another call is inside the object, it does nothing."""
        if self not in alive:
            return True
        status = 0 if self.made[0] == NULL else int(self._destroy(self.made[0]))
        if status == lib.FB_BUSY:
            return False
        self.leave()
        if alive.pop(self, self) is not self and status not in (0, lib.FB_CLOSED):
            said = f"{self._kind} could not be ended: {status_text(status)}"
            warnings.warn(said, ResourceWarning, stacklevel=2)
        return True

    def at_exit(self) -> None:
        """At the interpreter's end. One that a daemon thread is inside stays open."""
        self.end(wait=True)


class Handle(BareHandle):
    """A C handle, and its device."""

    def __init__(self, kind: str, destroy: Any, device: DeviceHandle, later: bool) -> None:
        super().__init__(kind, destroy, later)
        self.device = device

    def enter(self) -> None:
        """Called before the handle is made: the handle needs the device, and the end of the interpreter ends it."""
        super().enter()
        self.device.enter(self)

    def leave(self) -> None:
        """Called when it has ended: it needs the device no longer."""
        self.device.leave(self)


class BareHandled:
    """An object with a handle; a context manager that closes itself."""

    _handle: BareHandle
    _pointer: Any
    _closer: Any

    def _make(self, handle: BareHandle, call: Callable[[Any], object]) -> None:
        """Makes the handle by `call`, which raises a refusal."""
        end_left()
        self._handle = handle
        self._closer = weakref.finalize(self, give_up, handle)
        # At the interpreter's end `Handle.at_exit` ends it.
        self._closer.atexit = False
        try:
            handle.enter()
            call(handle.made)
        except BaseException:
            # This also ends a handle that was made while an exception was pending.
            handle.end(wait=False)
            raise
        self._pointer = handle.made[0]

    def close(self) -> None:
        """Ends the object; idempotent. The class says what that means.

        Raises:
            Busy: another call is inside it, on another thread or around a callback; it stays open.
        """
        if self._closer.alive:
            if not self._handle.end(wait=True):
                check(lib.FB_BUSY, self._pointer)
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


class Handled(BareHandled):
    """An object with a handle of a device; a context manager that closes itself."""

    _handle: Handle

    def close(self) -> None:
        """Ends the object; idempotent. The class says what that means.

        Raises:
            Busy: another call is inside it, on another thread or around a callback; it stays open.
        """
        super().close()
        self._handle.device.loans.release()
        end_left()
