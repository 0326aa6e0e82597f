"""A cache's record: its C handle, the objects that must end before it, and the tensors that its enqueued work uses.

Caches of every kind have one: `Calls` has the C calls by which a kind ends what belongs to it.

The record outlives the cache object, and has each step from before the step is prepared. Whatever exception occurs, the
record keeps what a stream still uses (`forebay.keep`).
"""

from __future__ import annotations

import ctypes
import time
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from ._library import NULL, check, ffi, lib, sized, status_text
from .device import DeviceHandle, alive
from .errors import Closed
from .handle import Handle
from .keep import Kept

if TYPE_CHECKING:
    from .sequence import Ticket

# The interpreter's end waits 2 seconds for another thread's call.
_TURNS_AT_EXIT, _TURN_AT_EXIT = 200, 0.01


class Calls(NamedTuple):
    """The C calls of one kind of cache that end what belongs to it."""

    # The handle's type, and what ends it.
    kind: str
    destroy: Any
    # Of the cache, a stream, and room for the number of closed sequences that still wait.
    reap: Any
    # Of the cache, a sequence's number and a stream.
    close: Any
    # Of the cache and a step's number; finish takes a stream too.
    abandon: Any
    finish: Any
    # Retires a step without reading its report, and takes what else the call wants.
    retire: Any
    nowhere: tuple[Any, ...]
    # Of the cache, a sequence's number and a stream.
    abort: Any
    # Of the cache, a sequence's number, and room for the number of free pages.
    release: Any
    # Of the cache and a sequence's number: the status of the look, and whether a transfer may bring rows: the sequence
    # has not joined, or is parked.
    waits: Callable[[Any, int], tuple[int, bool]]


def _waits(pointer: Any, number: int) -> tuple[int, bool]:
    """Looks whether a sequence has not joined, or is parked."""
    length = sized("fb_sequence_length")
    return int(lib.fb_length(pointer, number, length)), not length.running


def _arrives(pointer: Any, number: int) -> tuple[int, bool]:
    """Looks whether a sequence of a dense cache is arriving. Nothing comes to a parked one there."""
    length = sized("fb_dense_sequence_length")
    return int(lib.fb_dense_length(pointer, number, length)), bool(length.arriving)


SPARSE = Calls(
    "fb_cache", lib.fb_cache_destroy, lib.fb_cache_reap, lib.fb_close, lib.fb_abandon, lib.fb_finish, lib.fb_retire,
    (NULL,), lib.fb_abort, lib.fb_release, _waits,
)  # fmt: skip
DENSE = Calls(
    "fb_dense", lib.fb_dense_destroy, lib.fb_dense_reap, lib.fb_dense_close, lib.fb_dense_abandon,
    lib.fb_dense_finish, lib.fb_dense_retire, (NULL, 0, NULL), lib.fb_dense_abort, lib.fb_dense_release,
    _arrives,
)  # fmt: skip


def _release_ended(joins: dict[Any, Any]) -> None:
    """Releases what the ended joins of one sequence have read. It asks for no ticket behind the oldest pending one, so
    each ticket is asked about once when it has ended, and one of each sequence when it has not.
    """
    refused: list[Any] = []
    for ticket in list(joins):
        if not ticket._is_made:
            refused.append(ticket)
            continue
        if ticket.outcome == "pending":
            return
        # A later call runs after the work that the device took of refused ones before it. Those are removed first: an
        # exception in between leaves the ticket, which then releases the rest.
        for other in (*refused, ticket):
            joins.pop(other, None)
        refused.clear()


class InFlight:
    """A step that is not retired, from before it is prepared."""

    __slots__ = ("number", "stream", "finishing", "finished", "held")

    def __init__(self, stream: Any) -> None:
        # The library writes the step's number here, and 0 when the step has ended.
        self.number = ffi.new("fb_step *")
        # The stream on which it was prepared, later the one on which it was finished.
        self.stream = stream
        # Whether finish was called, and whether it returned success.
        self.finishing = self.finished = False
        # The tensors that its enqueued work uses.
        self.held = Kept()


class Withheld:
    """The pages of an aborted sequence, to which others may still write: no sequence gets them until `release`.

    The cache has it too (`Cache.withheld`), so pages of one that the program forgets are not lost. It ends with the
    cache: the memory stays with the device until that ends.
    """

    def __init__(self, record: CacheHandle, number: int) -> None:
        self._record, self._number = record, number

    def release(self) -> int:
        """Releases the pages, once no writer reaches them any more; idempotent. They are free at once, or, if the
        sequence's own work has not ended, in the `reap` or `retire` after its end.

        Returns:
            How many pages are free now; 0 if they were released before.

        Raises:
            Busy: another call is inside the cache; they stay withheld.
        """
        record = self._record
        if self.released:
            return 0
        free = ffi.new("uint32_t *")
        status = record.calls.release(record.pointer, self._number, free)
        # Closed: an interrupted call has released them, or this is a forked child.
        if status != lib.FB_CLOSED:
            check(status, record.pointer)
        record.withheld.pop(self._number, None)
        return int(free[0])

    @property
    def released(self) -> bool:
        """Whether the pages were released, or their cache was closed."""
        return self._record.withheld.get(self._number) is not self

    def __repr__(self) -> str:
        return f"<forebay.Withheld of {self._number:#x}{' released' if self.released else ''}>"


class CacheHandle(Handle):
    """The C handle, the objects that must end before it, and the tensors that its enqueued work uses."""

    def __init__(self, device: DeviceHandle, calls: Calls) -> None:
        super().__init__(calls.kind, calls.destroy, device, device.later)
        self.calls = calls
        self.sequences: set[int] = set()
        # Those that were opened for a transfer. Others may write to the pages of one that has not joined, or is parked.
        self.arrivals: set[int] = set()
        # What aborts have left, by the numbers of their sequences, from before the abort.
        self.withheld: dict[int, Withheld] = {}
        # In the order in which they were prepared.
        self.steps: dict[InFlight, None] = {}
        # Warm-ups of joins, and index keys that are placed, by the numbers of their sequences, in the order of the
        # calls. The key is the ticket that ends when they have been read. An empty dict stays while its sequence is
        # open: another thread may be about to add to it.
        self.joins: dict[int, dict[Ticket, Any]] = {}
        # Whether an end of the cache has begun. Nothing opens any more: see `end`.
        self.ending = False
        # Sequences and steps that the program forgot.
        self.forgotten: deque[int | InFlight] = deque()

    @property
    def pointer(self) -> Any:
        """The C handle."""
        return self.made[0]

    def forget_sequence(self, number: int) -> None:
        """Called by the garbage collector, perhaps inside another call, so it only makes a note."""
        self.forgotten.append(number)

    def forget_step(self, step: InFlight) -> None:
        """As `forget_sequence`."""
        self.forgotten.append(step)

    def make_up(self) -> None:
        """Ends forgotten objects, as far as they can end now, and releases tensors that nothing reads any more."""
        for number, joins in list(self.joins.items()):
            if joins:
                _release_ended(joins)
            elif number not in self.sequences:
                self.joins.pop(number, None)
        for _ in range(len(self.forgotten)):
            try:
                one = self.forgotten[0]
            except IndexError:
                return
            # The note is removed when the object has ended, so an exception in between does not lose it.
            ended = self.end_step(one) if isinstance(one, InFlight) else self._end_sequence(one)
            try:
                self.forgotten.remove(one)
            except ValueError:
                # Another thread has removed it.
                continue
            if not ended:
                self.forgotten.append(one)

    def refused(self, number: int) -> list[Any]:
        """Joins of a sequence without a ticket: the call made none, or it has not returned yet."""
        return [ticket for ticket in list(self.joins.get(number, ())) if not ticket._is_made]

    def reap(self, stream: Any, waiting: Any) -> int:
        """Reaps the cache and returns its status. When no closed sequence waits any more, none has work left."""
        closed = [number for number in list(self.joins) if number not in self.sequences]
        status = int(self.calls.reap(self.pointer, stream, waiting))
        if status == 0 and waiting[0] == 0:
            for number in closed:
                self.joins.pop(number, None)
        return status

    def _end_sequence(self, number: int) -> bool:
        """Ends a sequence; returns whether it has ended. Otherwise it is unchanged, and the device may still read its
        tensors.
        """
        return number not in self.sequences or self._stop(number) == 0

    def _stop(self, number: int) -> int:
        """Ends a sequence, by an abort if a transfer may still write to its pages. Returns the status, 0 also if it had
        ended.
        """
        status, written = self.is_written(number)
        if status == 0:
            status = (self.abort if written else self.close)(number, NULL)
        if status not in (0, lib.FB_CLOSED):
            return status
        self.left(number)
        return 0

    def close(self, number: int, stream: Any) -> int:
        """Closes a sequence and returns the status."""
        status = int(self.calls.close(self.pointer, number, stream))
        if status == 0:
            # Of an abort that was refused and interrupted.
            self.withheld.pop(number, None)
        return status

    def abort(self, number: int, stream: Any) -> int:
        """Aborts a sequence and returns the status. What it leaves is in `withheld` from before the call."""
        known = number in self.withheld
        self.withheld.setdefault(number, Withheld(self, number))
        status = int(self.calls.abort(self.pointer, number, stream))
        if status and not known:
            self.withheld.pop(number, None)
        return status

    def is_written(self, number: int) -> tuple[int, bool]:
        """Whether a transfer may still write to the pages of a sequence: it was opened for one, and has not joined, or
        is parked. The first part is a status; unless that is 0 the answer is not known.
        """
        if number not in self.arrivals:
            return 0, False
        status, waits = self.calls.waits(self.pointer, number)
        return (0, False) if status == lib.FB_CLOSED else (status, waits)

    def left(self, number: int) -> None:
        """Notes that a sequence has ended."""
        self.arrivals.discard(number)
        self.sequences.discard(number)

    def end_step(self, step: InFlight) -> bool:
        """Gives up a step; returns whether it has ended. A step without a number was not prepared, or is already
        retired.
        """
        number = step.number[0]
        if step in self.steps and number:
            # A stream that was returned orders nothing any more.
            stream = step.stream if int(ffi.cast("uintptr_t", step.stream)) in self.device.streams else NULL
            if not step.finished:
                self.calls.abandon(self.pointer, number)
                if self.calls.finish(self.pointer, number, stream) == 0:
                    step.stream, step.finished = stream, True
            if self.calls.retire(self.pointer, step.number, stream, *self.calls.nowhere) == lib.FB_BUSY:
                return False
        self.steps.pop(step, None)
        return True

    def end(self, wait: bool) -> bool:
        """Ends steps and sequences, then the cache; returns whether it has ended. Waits for enqueued work, if allowed.
        If another call is inside the cache, it does nothing.

        Another thread may enter after that first look, and the cache then stays, maybe with its withheld pages
        released. So from there on it opens nothing (`check_open`): no sequence can get those pages.
        """
        if self not in alive:
            return True
        if self.pointer == NULL:
            # The creation failed.
            self.device.leave(self)
            alive.pop(self, None)
            return True
        if self.calls.reap(self.pointer, NULL, NULL) == lib.FB_BUSY:
            return False
        self.ending = True
        status = self._end_all()
        if status == lib.FB_BUSY and wait:
            self.device.wait()
            status = self._end_all()
        if status == lib.FB_BUSY:
            return False
        # Each of these can be repeated after an exception in between.
        self.steps.clear()
        self.joins.clear()
        self.withheld.clear()
        self.arrivals.clear()
        self.sequences.clear()
        self.device.leave(self)
        if alive.pop(self, self) is not self and status not in (0, lib.FB_CLOSED):
            warnings.warn(f"a cache could not be ended: {status_text(status)}", ResourceWarning, stacklevel=2)
        return True

    def check_open(self) -> None:
        """Called before and after each call that opens a sequence.

        Raises:
            Closed: an end of the cache has begun. It looks for sequences after it has said so, and what is opened
                meanwhile ends here, unused.
        """
        # After the end the library says so itself.
        if self.ending and self in alive:
            raise Closed("cache: its end has begun, and another call kept it from ending: close it again")

    def _end_all(self) -> int:
        """One try of the end; returns the status. FB_BUSY: something is left."""
        for step in list(self.steps):
            self.end_step(step)
        if lib.FB_BUSY in [self._stop(number) for number in tuple(self.sequences)]:
            return int(lib.FB_BUSY)
        # Those that the device refuses to abort. No other sequence is left that could get their pages.
        for number in tuple(self.sequences):
            if self.close(number, NULL) != lib.FB_BUSY:
                self.left(number)
        waiting = ffi.new("uint32_t *")
        if self.calls.reap(self.pointer, NULL, waiting) == lib.FB_BUSY or waiting[0] or self.sequences or self.steps:
            return int(lib.FB_BUSY)
        # The library ends no cache with withheld pages. No sequence is left that could get them, and none opens.
        for number in tuple(self.withheld):
            if self.calls.release(self.pointer, number, NULL) != lib.FB_BUSY:
                self.withheld.pop(number, None)
        return int(self.calls.destroy(self.pointer))

    def at_exit(self) -> None:
        """Called at the end of the interpreter. A daemon thread may be inside the cache, and a thread that returns to
        an ended interpreter is stopped there, even in a callback of the library. So this waits for the thread, and
        refuses further callbacks. If the thread does not return, the tensors of the cache's work stay alive for the
        rest of the process.
        """
        for _ in range(_TURNS_AT_EXIT):
            if self.end(wait=True):
                return
            time.sleep(_TURN_AT_EXIT)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        warnings.warn("a cache is in use at the interpreter's end: it is left open", ResourceWarning, stacklevel=2)
