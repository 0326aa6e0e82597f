"""What senders and receivers have in common: their events, and how a program waits for these."""

from __future__ import annotations

import asyncio
import os
import select
import time
from typing import Any, Callable, Generic, TypeVar

from .._library import check, ffi, lib, new_text, sized
from ..errors import Closed
from ..handle import BareHandle, BareHandled
from ..links import milliseconds
from .events import seen
from .side import Use

_Event = TypeVar("_Event")
_Self = TypeVar("_Self", bound="TransferEnd[Any]")
# The longest wait before a look whether another thread has closed the object.
_TURN = 1.0
_MOMENT = 0.001


class TransferEnd(BareHandled, Generic[_Event]):
    """What senders and receivers have in common; a context manager that closes itself.

    Any thread may call, at the same time as others; but one thread at a time takes events, by `poll`, `next` or
    `async for`. An exception from outside (KeyboardInterrupt) in one of these may lose the event that it was about to
    return: a program that goes on after that closes the object.
    """

    _look: Callable[[Any, Any], int]
    _fileno: Any

    def _start(self, handle: BareHandle, call: Callable[[Any], object], poll: Any, descriptor: Any) -> None:
        """Makes the handle by `call`."""
        self._make(handle, call)
        self._look = lambda text, event: int(poll(self._pointer, 0, text, len(text), event))
        self._fileno = descriptor

    def _call(self, call: Any, *given: Any) -> None:
        """Calls the library, and raises its error."""
        # Another thread may be inside to close the object, which is closed in a moment.
        while (status := call(self._pointer, *given)) == lib.FB_BUSY:
            time.sleep(_MOMENT)
        check(status, self._pointer)

    def _payload(self, use: Use, event: Any) -> bytes:
        raise NotImplementedError

    def fileno(self) -> int:
        """A descriptor that is readable while there are events, for `select`, `selectors` or an event loop. Only wait
        for it. It is closed with the object.

        Raises:
            Closed.
        """
        into = ffi.new("int32_t *")
        self._call(self._fileno, into)
        return int(into[0])

    def poll(self, at_most: float | None = 0) -> _Event | None:
        """The next event, or None if there is none within `at_most` seconds; 0 never waits, None waits as long as it
        takes. Other threads may call meanwhile, and may close the object: then Closed is raised.

        Raises:
            InvalidArgument: the time.
            Closed; any error with which the library's thread has ended, after all events.
        """
        seconds = None if at_most is None else milliseconds(at_most, "at_most") / 1000
        start = time.monotonic()
        while True:
            event, text = sized("fb_transfer_event"), new_text()
            status = self._look(text, event)
            if status == lib.FB_BUSY:
                # Another thread is inside to close it.
                time.sleep(_MOMENT)
                continue
            check(status, self._pointer)
            if event.kind != lib.FB_TRANSFER_NOTHING:
                made: _Event = seen(event, text, self._payload)
                return made
            left = _TURN if seconds is None else seconds - (time.monotonic() - start)
            if left <= 0:
                return None
            waits = select.poll()
            waits.register(self.fileno(), select.POLLIN)
            waits.poll(1000 * min(left, _TURN))

    async def next(self) -> _Event:
        """The next event. Other tasks run meanwhile.

        Raises:
            Closed, and as `poll`.
        """
        loop = asyncio.get_running_loop()
        while True:
            event = self.poll()
            if event is not None:
                return event
            # A descriptor of its own: several tasks may wait, and closing the object ends no wait unnoticed.
            try:
                descriptor = os.dup(self.fileno())
            except OSError:
                # Another thread has closed it since.
                continue
            try:
                if self.closed:
                    # What the descriptor names may be another file by now.
                    continue
                ready = asyncio.Event()
                loop.add_reader(descriptor, ready.set)
                try:
                    await ready.wait()
                finally:
                    loop.remove_reader(descriptor)
            finally:
                os.close(descriptor)

    def __aiter__(self: _Self) -> _Self:
        return self

    async def __anext__(self) -> _Event:
        try:
            return await self.next()
        except Closed:
            if self.closed:
                raise StopAsyncIteration from None
            raise

    def __repr__(self) -> str:
        return f"<forebay.{type(self).__name__}{' closed' if self.closed else ''}>"
