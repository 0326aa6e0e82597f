"""The sessions of a rank with the others of its group: `Weights.meet` makes them.

Each call serves the sessions. So an engine polls at least every few seconds, on any thread, or other ranks hold this
one for lost.
"""

from __future__ import annotations

import math
import os
from typing import Any, Callable, NamedTuple

from ._library import check, ffi, lib, new_text, path_bytes, sized
from .device import DeviceHandle
from .errors import ForebayError, InvalidArgument, error_of
from .handle import Handle, Handled
from .tensors import index

_GEOMETRY_BYTES = 32
_MILLISECONDS_MAX = 0xFFFFFFFF
_KINDS = {
    lib.FB_LINKS_NOTHING: "nothing",
    lib.FB_LINKS_LOST: "lost",
    lib.FB_LINKS_RETURNED: "returned",
    lib.FB_LINKS_ENDED: "ended",
    lib.FB_LINKS_MESSAGE: "message",
}


class LinkEvent(NamedTuple):
    """What another rank did."""

    # "nothing": nothing has happened. "lost": the rank's process has died, or has broken the protocol; call
    # `Weights.lost`. "returned": a rank that was lost has come back; call `Weights.reattach` next. "ended": the rank
    # has ended its session in order. "message": the rank has sent a message that is of no call; it was dropped.
    kind: str
    # The rank; None for "nothing".
    rank: int | None
    # For "lost": why. Otherwise None.
    error: ForebayError | None
    # Whether every session has ended or was lost: no further event comes.
    is_over: bool


def milliseconds(seconds: float, name: str) -> int:
    """A time in seconds as C takes it, rounded up.

    Raises:
        InvalidArgument: it is no such time.
    """
    try:
        count = math.ceil(1000 * seconds)
    except (TypeError, ValueError, OverflowError):
        count = -1
    if 0 <= count <= _MILLISECONDS_MAX:
        return count
    raise InvalidArgument(name, repr(seconds), f"seconds from 0 to {_MILLISECONDS_MAX // 1000}")


class Links(Handled):
    """The sessions of a rank with all others of its group; a context manager that closes itself.

    One thread at a time uses them: another thread's call raises Busy, and so do `Weights.share`, `Weights.reattach`,
    `Update.share`, `Weights.commit`, `Replication.share` and `Weights.commit_replicas`, which serve the sessions
    meanwhile. Closing ends them at once: to ranks with which they had not ended (`end`) this one is lost.
    """

    def __init__(self, device: DeviceHandle, call: Callable[[Any], object]) -> None:
        self._make(Handle("fb_links", lib.fb_links_destroy, device, False), call)

    def poll(self, at_most: float = 0) -> LinkEvent:
        """Serves the sessions and returns the next event, or "nothing" after `at_most` seconds, at once if all sessions
        are over; 0 looks once and never waits. Call it at least every few seconds, on any thread. A rank that was lost
        is an event, and no failure of this call. Messages of an update or a change of replicas are kept for their
        `share`.

        Raises:
            InvalidState: `readmit` has returned a rank that was not attached again (`Weights.reattach`).
            InvalidArgument: the time.
            Busy, Closed.
        """
        event, text = sized("fb_links_event"), new_text()
        check(
            lib.fb_links_poll(self._pointer, milliseconds(at_most, "at_most"), text, len(text), event), self._pointer
        )
        return _seen(event, text)

    def readmit(self, at_most: float = 0) -> LinkEvent:
        """Looks whether a rank that was lost has come back, for at most `at_most` seconds; 0 looks once and never
        waits. The event is "returned", of the lowest such rank, or "nothing"; at once if no rank was lost. The rank's
        new process does what it did at the start: fill, `Weights.meet` in the same folder, `Weights.share`.

        Raises:
            InvalidConfig: a process with another plan, geometry or content than its rank had. That connection is
                closed, and the next process can come.
            InvalidArgument: the time.
            Busy, Closed.
        """
        event = sized("fb_links_event")
        check(lib.fb_links_readmit(self._pointer, milliseconds(at_most, "at_most"), event), self._pointer)
        return _seen(event, None)

    def end(self) -> None:
        """Ends this side of every session in order. Then poll until `LinkEvent.is_over`, so that the other ranks do not
        hold this one for lost.

        Raises:
            Busy, Closed.
        """
        check(lib.fb_links_end(self._pointer), self._pointer)

    def __repr__(self) -> str:
        return f"<forebay.Links{' closed' if self.closed else ''}>"


def config_of(
    folder: str | os.PathLike[str],
    geometry: bytes | None,
    hello: float | None,
    interval: float | None,
    lost: float | None,
    queue_bytes: int | None,
) -> tuple[Any, Any]:
    """An fb_links_config, and what must live as long.

    Raises:
        InvalidArgument: a value that the field cannot hold. A 0 would be the default in C, so it is refused.
    """
    made, path = sized("fb_links_config"), ffi.new("char[]", path_bytes(folder))
    made.folder = path
    if geometry is not None:
        if not isinstance(geometry, bytes) or len(geometry) != _GEOMETRY_BYTES:
            raise InvalidArgument("geometry", repr(geometry), f"{_GEOMETRY_BYTES} bytes")
        ffi.memmove(made.geometry, geometry, _GEOMETRY_BYTES)
    for name, value in (("hello", hello), ("interval", interval), ("lost", lost)):
        if value is not None:
            count = milliseconds(value, name)
            if count == 0:
                raise InvalidArgument(name, repr(value), "seconds above 0")
            setattr(made, f"{name}_ms", count)
    if queue_bytes is not None:
        made.queue_bytes = index(queue_bytes, "queue_bytes", least=1)
    return made, path


def _seen(event: Any, text: Any) -> LinkEvent:
    kind = _KINDS[event.kind]
    error = None
    if kind == "lost":
        error = error_of(event.status, ffi.string(text).decode("utf-8", "replace"))
    return LinkEvent(kind, None if kind == "nothing" else event.rank, error, bool(event.is_over))
