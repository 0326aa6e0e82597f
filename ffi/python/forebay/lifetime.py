"""What caches of every kind have in common: how their sequences and steps begin and end, and how rows reach a step.

A subclass adds the calls of its kind. What ends an object is in the cache's record (`record.Calls`), because the record
outlives the cache.
"""

from __future__ import annotations

import operator
import struct
import weakref
from types import TracebackType
from typing import Any, Callable, Iterable, TypeVar

import numpy as np

from ._library import check, fail, ffi, lib
from .arrays import Tensor
from .device import Device
from .errors import Busy, Closed, InvalidArgument, InvalidState, counted
from .record import CacheHandle, InFlight, Withheld
from .tensors import words

# The most lines of fallbacks that are read, and their length.
_FALLBACKS_MOST = 1 << 12
_LINE_BYTES = 512
_ON_DEVICE = lib.FB_ACCEPTED_ON_DEVICE
_Made = TypeVar("_Made")
_OfCache = TypeVar("_OfCache", bound="SequenceBase")
_Begun = TypeVar("_Begun", bound="StepBase")


class CacheBase:
    """The common part of caches."""

    device: Device
    batch: int
    _record: CacheHandle
    _pointer: Any
    # The class of its sequences.
    _sequences: type[SequenceBase]

    @property
    def withheld(self) -> tuple[Withheld, ...]:
        """The pages of aborted sequences that were not released (`Sequence.abort`), also those that the program
        forgot.
        """
        return tuple(self._record.withheld.values())

    def _opened(self, call: Callable[[Any], int], make: Callable[[int], _Made]) -> _Made:
        """What is made of the sequence that a call opens. It is closed again if an exception occurs in between."""
        number = ffi.new("uint64_t *")
        self._record.check_open()
        try:
            check(call(number), self._pointer)
            made = make(number[0])
            self._record.check_open()
            return made
        except BaseException:
            if number[0]:
                self._record.sequences.add(number[0])
                self._record.forget_sequence(number[0])
            raise

    def _rows(self, rows: Iterable[tuple[Any, int | None, int]]) -> tuple[Any, int, int]:
        """The rows of a batch as the library has them, how many, and the most query rows."""
        try:
            given = list(rows)
        except TypeError as error:
            raise InvalidArgument("rows", type(rows).__name__, "(sequence, accepted, query rows) a row") from error
        table, widest = self._packed(given) or self._checked(given)
        return table, len(given), widest

    def _packed(self, given: list[tuple[Any, int | None, int]]) -> tuple[Any, int] | None:
        """The rows of a batch as the library has them, and the widest; None if one of them is wrong.

        Every step looks at each of its hundreds of rows, so one call packs all of them.
        """
        words: list[Any] = []
        widest = 0
        try:
            for sequence, taken, width in given:
                if type(sequence) is not self._sequences or sequence.cache is not self:
                    return None
                words += (sequence._number, _ON_DEVICE if taken is None else taken, width)
                if width > widest:
                    widest = width
            return ffi.from_buffer("fb_batch_row[]", struct.pack("QII" * len(given), *words)), widest
        except (TypeError, ValueError, struct.error):
            return None

    def _checked(self, given: list[tuple[Any, int | None, int]]) -> tuple[Any, int]:
        """The same, with an error that names the row."""
        table = ffi.new("fb_batch_row[]", len(given))
        widest = 0
        for index, row in enumerate(given):
            try:
                sequence, taken, width = row
                if type(sequence) is not self._sequences or sequence.cache is not self:
                    raise InvalidArgument(f"rows[{index}]", repr(sequence), "a sequence of this cache")
                entry = table[index]
                entry.sequence = sequence._number
                entry.accepted = _ON_DEVICE if taken is None else operator.index(taken)
                entry.query_rows = operator.index(width)
            except InvalidArgument:
                raise
            except (TypeError, ValueError, OverflowError) as error:
                raise InvalidArgument(f"rows[{index}]", repr(row), "(sequence, accepted, query rows)") from error
            widest = max(widest, width)
        return table, widest

    def _counts(self, accepted: Tensor, in_flight: InFlight) -> Any:
        """The accepted counts on the device, which the step's record keeps."""
        if isinstance(accepted, np.ndarray) and accepted.dtype == np.uint32:
            accepted = accepted.view(np.int32)
        counts = words(accepted, "accepted", (self.batch,), self.device.place, False)
        in_flight.held.append((accepted, counts))
        return ffi.cast("uint32_t *", counts)

    def _begin(self, step: _Begun, call: Callable[[Any], int]) -> _Begun:
        """The step that a call prepares. The record has it from before the call."""
        in_flight = step._in_flight
        try:
            self._record.steps[in_flight] = None
            check(call(in_flight.number), self._pointer)
            step._number = in_flight.number[0]
            return step
        except BaseException:
            self._record.forget_step(in_flight)
            raise

    def _lines(self, call: Callable[[int, Any, int], int]) -> list[str]:
        """The texts that a call copies, by number, until there is none."""
        lines: list[str] = []
        text = ffi.new("char[]", _LINE_BYTES)
        while len(lines) < _FALLBACKS_MOST:
            status = call(len(lines), text, _LINE_BYTES)
            if status == lib.FB_OUT_OF_RANGE:
                break
            check(status, self._pointer)
            lines.append(ffi.string(text).decode("utf-8", "replace"))
        return lines


class SequenceBase:
    """The common part of sequences; a context manager that closes itself."""

    cache: Any

    def __init__(self, cache: Any, number: int, arrives: bool = False) -> None:
        self.cache = cache
        self._number = number
        self._pointer = cache._pointer
        record = cache._record
        if arrives:
            record.arrivals.add(number)
        record.sequences.add(number)
        self._forget = weakref.finalize(self, record.forget_sequence, number)
        # At the interpreter's end its cache ends it.
        self._forget.atexit = False

    def close(self, stream: Any = None) -> None:
        """Ends the sequence, also as an abort; idempotent. What it holds becomes free when its last step is retired and
        the last copy on its pages has ended. In a forked child it is already closed.

        Raises:
            Busy: another call is inside its cache; the sequence stays open.
            InvalidArgument: the stream.
        """
        if not self._forget.alive:
            return
        record = self.cache._record
        if not self.cache.closed:
            status = record.close(self._number, self.cache.device.stream_of(stream))
            if status != lib.FB_CLOSED:
                check(status, self._pointer)
        self._forget.detach()
        record.left(self._number)

    def abort(self, stream: Any = None) -> Withheld:
        """Ends a sequence to whose pages others may still write: a write that is under way when a transfer is given up
        lands later, and may not land in another sequence's rows. It is like `close`, but the pages that the sequence
        does not share stay withheld until `Withheld.release`. No time releases them.

        A sequence of `Cache.arrive` that the program forgets, or leaves as a context manager, is aborted too if it has
        not joined, or is parked (in a dense cache only if it has not joined): `Cache.withheld` has its pages.

        Raises:
            InvalidState: a sequence of a dense cache that is not arriving: close it.
            OutOfMemory, DeviceFailed, InvalidArgument (the stream), Closed, Busy: the sequence is as before.
        """
        record = self.cache._record
        if not self._forget.alive:
            raise Closed("abort: the sequence was closed")
        check(record.abort(self._number, self.cache.device.stream_of(stream)), self._pointer)
        withheld: Withheld = record.withheld[self._number]
        self._forget.detach()
        record.left(self._number)
        return withheld

    @property
    def closed(self) -> bool:
        """Whether the sequence or its cache was closed."""
        return not self._forget.alive or bool(self.cache.closed)

    def __enter__(self: _OfCache) -> _OfCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.closed:
            status, written = self.cache._record.is_written(self._number)
            # A close would give pages to others that a transfer may still write to.
            check(status, self._pointer)
            if written:
                self.abort()
        self.close()

    def __repr__(self) -> str:
        name = f"{type(self).__module__.rpartition('.')[0]}.{type(self).__name__}"
        return f"<{name} {self._number:#x}{' closed' if self.closed else ''}>"


class StepBase:
    """The common part of steps: open until finished, in flight until retired.

    As a context manager a step is abandoned if the body raises, and finished otherwise. If its work has ended by then,
    it is also retired.
    """

    __slots__ = ("cache", "rows", "_number", "_pointer", "_stream", "_later", "_in_flight", "_held", "_finished")

    def __init__(self, cache: Any, in_flight: InFlight, rows: int) -> None:
        self.cache, self.rows = cache, rows
        # Not 0 from prepare to retire.
        self._number = 0
        self._pointer, self._stream = cache._pointer, in_flight.stream
        self._later = cache.device.later
        # The cache's record has it too, and outlives the step.
        self._in_flight, self._held = in_flight, in_flight.held
        self._finished = False

    def finish(self, stream: Any = None) -> None:
        """Ends the enqueueing of the step; `stream` is ordered after all of its work."""
        raise NotImplementedError

    def retire(self, stream: Any = None) -> Any:
        """Ends the step when its work has ended."""
        raise NotImplementedError

    def _finish(self, stream: Any) -> None:
        """Finishes the step on a caller's stream."""
        on = self._stream if stream is None else self.cache.device.stream_of(stream)
        one = self._in_flight
        before, one.stream, one.finishing = one.stream, on, True
        status = self.cache._record.calls.finish(self._pointer, self._number, on)
        if status:
            one.stream, one.finishing = before, False
            fail(status, self._pointer)
        self._finished = one.finished = True

    def abandon(self) -> None:
        """Gives up the step. It must still be finished and retired; `retire` then raises Cancelled, and its sequences
        need `truncate` or `close`.

        Raises:
            InvalidState: the step is finished.
            Closed.
        """
        check(self.cache._record.calls.abandon(self._pointer, self._number), self._pointer)

    def _retire(self, stream: Any, wait: bool, call: Callable[[Any, Any], int]) -> None:
        """Ends the step by `call`, of the step's number and the stream."""
        on = self._stream if stream is None else self.cache.device.stream_of(stream)
        if not self._number:
            raise Closed("retire: the step was retired")
        if not self._finished:
            self._finish_once()
        if wait and self._later:
            device = self.cache.device._handle.pointer
            check(lib.fb_stream_wait(device, self._in_flight.stream), device)
        status = call(self._in_flight.number, on)
        if not self._in_flight.number[0]:
            self.cache._record.steps.pop(self._in_flight, None)
            self._number = 0
            self._held.clear()
        check(status, self._pointer)

    def _finish_once(self) -> None:
        """Finishes the step, unless an interrupted call of `finish` has already done so."""
        began, stream = self._in_flight.finishing, self._in_flight.stream
        try:
            self.finish()
        except InvalidState:
            if not began:
                raise
            self._in_flight.stream = stream

    def __enter__(self: _Begun) -> _Begun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._number:
            return
        if error is not None:
            if not self.cache._record.end_step(self._in_flight):
                self.cache._record.forget_step(self._in_flight)
            self._number = 0
            return
        try:
            self.retire()
        except Busy:
            return
        except Closed:
            # Its cache was closed, or this is a forked child.
            self._number = 0

    def __del__(self) -> None:
        if getattr(self, "_number", 0):
            self.cache._record.forget_step(self._in_flight)

    def __repr__(self) -> str:
        state = "retired" if not self._number else "in flight" if self._finished else "open"
        name = f"{type(self).__module__.rpartition('.')[0]}.{type(self).__name__}"
        return f"<{name} of {counted(self.rows, 'row')}, {state}>"
