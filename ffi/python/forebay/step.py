"""A step: one forward pass of decode, from `Cache.prepare` to `retire`.

A layer call costs a few microseconds for a whole batch, checks included. Where an engine uses the same buffers for
every layer and step, `Buffers` checks them once, and a call with them costs less.

Tensors of enqueued work are kept alive until the step has ended, where the device works later than the call: by the
cache, from before the call, also if the call is interrupted or the step forgotten (`forebay.keep`).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from . import cache as _cache
from ._library import NULL, check, fail, ffi, lib, sized
from .arrays import Tensor
from .errors import Busy, Closed, InvalidArgument, InvalidConfig, counted
from .record import InFlight
from .tensors import index, look, words

_new, _cast, _from_buffer = ffi.new, ffi.cast, ffi.from_buffer


class LayerCount(NamedTuple):
    """What a layer of a step has done."""

    # Distinct selected rows that were resident.
    hits: int
    # Rows fetched.
    misses: int
    # Of these, rows in scratch slots.
    scratch: int


@dataclass(frozen=True, slots=True, eq=False)
class Retired:
    """What a step has done.

    Attributes:
        step: its number in its cache, from 1.
        hits: distinct selected rows that were resident, all layers.
        misses: rows fetched, all layers.
        counts: uint32 `[layers, 3]`, draft layers last: hits, misses, and of these the rows in scratch slots.
        lengths: uint32 `[rows]`: tokens of each batch row's sequence committed when the step began.
    """

    step: int
    hits: int
    misses: int
    counts: np.ndarray[Any, np.dtype[np.uint32]]
    lengths: np.ndarray[Any, np.dtype[np.uint32]]

    @property
    def layers(self) -> list[LayerCount]:
        """The counts by layer, draft layers last."""
        return [LayerCount(*counts) for counts in self.counts.tolist()]


class Buffers:
    """A step's selection and answer, checked once, for any step and layer of the cache.

    Args:
        cache: whose steps.
        selection: int32 `[rows, query rows, top_k]` on the cache's device: token positions, -1 for none. Engines write
            it in the order of the streams.
        slots: the same shape: receives the slots in the layer's slab, -1 for none.
        lists: int32 `[1 + attention passes, rows, query rows, top_k]`, where attention runs in parts: list 0 has the
            slots of what was resident, list 1 + p of what pass p fetched, compact, -1 beyond the count.
        counts: int32 `[1 + attention passes, rows, query rows]`: how long each list is.

    Raises:
        InvalidArgument: a tensor of another dtype, shape, layout or device; lists without counts.

    Attributes:
        selection, slots, lists, counts: as given; they live as long as this does.
        rows, query_rows: of the batch.
    """

    def __init__(
        self,
        cache: _cache.Cache,
        selection: Tensor,
        slots: Tensor,
        lists: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> None:
        top_k, place = cache.info.top_k, cache.device.place
        shape = look(selection, "selection").shape
        if len(shape) != 3 or shape[0] > cache.batch or shape[1] > cache.query_rows:
            expected = f"int32 [rows up to {cache.batch}, query rows up to {cache.query_rows}, {top_k}]"
            raise InvalidArgument("selection", f"{type(selection).__name__} {list(shape)}", expected)
        self.rows, self.query_rows = int(shape[0]), int(shape[1])
        whole = (self.rows, self.query_rows, top_k)
        self._selection = words(selection, "selection", whole, place, False)
        self._slots = words(slots, "slots", whole, place, True)
        self._lists, self._counts = NULL, NULL
        if (lists is None) != (counts is None):
            raise InvalidArgument("lists", "one of lists and counts", "both or none")
        if lists is not None:
            parts = 1 + cache.info.attention_waves
            self._lists = words(lists, "lists", (parts, *whole), place, True)
            self._counts = ffi.cast(
                "uint32_t *", words(counts, "counts", (parts, self.rows, self.query_rows), place, True)
            )
        self.cache = cache
        # As the caller has them, with whatever methods these have.
        self.selection: Any = selection
        self.slots: Any = slots
        self.lists: Any = lists
        self.counts: Any = counts

    @classmethod
    def empty(cls, cache: _cache.Cache, rows: int, query_rows: int, *, parts: bool = False) -> Buffers:
        """Buffers of NumPy arrays for a host device, with lists and counts if `parts`; nothing is selected yet."""
        whole = (rows, query_rows, cache.info.top_k)
        selection, slots = np.full(whole, -1, np.int32), np.full(whole, -1, np.int32)
        if not parts:
            return cls(cache, selection, slots)
        passes = 1 + cache.info.attention_waves
        lists = np.full((passes, *whole), -1, np.int32)
        return cls(cache, selection, slots, lists, np.zeros((passes, rows, query_rows), np.int32))

    def declare(self, buffers: Any) -> None:
        """Writes them into an fb_buffers."""
        buffers.selection, buffers.slots = self._selection, self._slots
        buffers.lists, buffers.counts = self._lists, self._counts
        buffers.batch = self.rows if self._lists else 0


class Step:
    """A step of a cache: open until finished, in flight until retired. `Cache.prepare` gives it.

    As a context manager it is abandoned if its body raises, else finished; it is retired if its work has ended then
    (always, on a host device without threads), and `retired` says what it did. A step that still runs then is ended by
    `retire`, or forgotten, by a later call on the cache.

    `layer` counts draft layers behind the others. `stream` is the one that it was prepared on, where none is given.

    Attributes:
        cache: whose it is.
        rows, query_rows: of its batch.
        retired: what it has done, once it is retired.
    """

    __slots__ = (
        "cache", "rows", "query_rows", "retired", "_number", "_pointer", "_stream", "_shape", "_place", "_later",
        "_in_flight", "_held", "_finished",
    )  # fmt: skip

    def __init__(self, cache: _cache.Cache, in_flight: InFlight, rows: int, query_rows: int) -> None:
        self.cache, self.rows, self.query_rows = cache, rows, query_rows
        self.retired: Retired | None = None
        # Once it is prepared, until it is retired.
        self._number = 0
        self._pointer, self._stream = cache._pointer, in_flight.stream
        self._shape = (rows, query_rows, cache.info.top_k)
        self._place, self._later = cache.device.place, cache.device.later
        # The cache's record has it too: it outlives the step.
        self._in_flight, self._held = in_flight, in_flight.held
        self._finished = False

    def layer(self, layer: int, selection: Tensor | Buffers, slots: Tensor | None = None, stream: Any = None) -> None:
        """Resolves a layer's selection and gathers what it misses: attention may read `slots` behind it, and before the
        next layer's call, which takes the same scratch slots.

        Args:
            layer: which.
            selection: int32 `[rows, query rows, top_k]` on the cache's device: token positions, -1 for none; or
                `Buffers`, and no `slots`.
            slots: the same shape: receives the slots in the layer's slab, -1 for none.
            stream: see the class.

        Raises:
            InvalidArgument, OutOfRange: nothing was enqueued and nothing is written. A position at or beyond the
            sequence's length shows in `retire`: DeviceFailed.
        """
        on = self._stream if stream is None else self.cache.device.stream_of(stream)
        if type(selection) is Buffers:
            self._fits(selection)
            which = index(layer, "layer")
            held: Any = selection
            if self._later:
                self._held.append(held)
            status = lib.fb_layer(self._pointer, self._number, which, selection._selection, selection._slots, on)
        else:
            shape, place = self._shape, self._place
            read = words(selection, "selection", shape, place, False)
            written = words(slots, "slots", shape, place, True)
            which = index(layer, "layer")
            held = (selection, slots, read, written)
            if self._later:
                self._held.append(held)
            status = lib.fb_layer(self._pointer, self._number, which, read, written, on)
        if status:
            self._refused(held, status)

    def layers(self, selection: Tensor, slots: Tensor, stream: Any = None) -> None:
        """`layer` of every layer in one call, for replays and tests that know the selections beforehand.

        Layers share the scratch slots, in which rows beyond a sequence's slots are: behind this call they hold rows of
        the last layer alone. So it is refused where an earlier layer might need one. None is needed where each
        sequence of the step has `query rows x top_k` slots in every layer, or as many as tokens; nor in a cache that
        is `residency_only`.

        Args:
            selection, slots: int32 `[layers, rows, query rows, top_k]`, draft layers last.

        Raises:
            As `layer`. InvalidConfig: scratch slots might be needed: call `layer` for each, attention of one before the
            next. Nothing was enqueued then.
        """
        on = self._stream if stream is None else self.cache.device.stream_of(stream)
        shape = (self.cache.info.layers, *self._shape)
        read = words(selection, "selection", shape, self._place, False)
        written = words(slots, "slots", shape, self._place, True)
        held = (selection, slots, read, written)
        if self._later:
            self._held.append(held)
        status = lib.fb_layers(self._pointer, self._number, read, written, on)
        if status:
            self._refused(held, status)

    def resolve(
        self,
        layer: int,
        buffers: Buffers,
        *,
        first: int = 0,
        count: int = 0,
        draft_pass: int | None = None,
        stream: Any = None,
    ) -> None:
        """R of a layer, or of batch rows `first` to `first + count` (0: all from `first`), or of a draft layer's pass.

        The buffers begin with the first of these rows.
        `gather` must follow, ordered behind it, before attention and before the next resolve of these rows.

        Raises:
            As `layer`. InvalidConfig: it is not these rows' turn.
        """
        on = self._stream if stream is None else self.cache.device.stream_of(stream)
        self._fits(buffers, (count or self.rows - first) if first or count else self.rows)
        part, given = self._part(layer, first, count, draft_pass), sized("fb_buffers")
        buffers.declare(given)
        if self._later:
            self._held.append(buffers)
        status = lib.fb_resolve(self._pointer, self._number, part, given, on)
        if status:
            self._refused(buffers, status)

    def gather(
        self,
        layer: int,
        *,
        attention_wave: int = 0,
        first: int = 0,
        count: int = 0,
        draft_pass: int | None = None,
        stream: Any = None,
    ) -> None:
        """G: fetches what the last resolve of these rows missed, or what a pass of attention reads of it.

        Raises:
            InvalidConfig: they were not resolved. OutOfRange: no such layer, rows or pass. InvalidArgument, Closed.
        """
        on = self._stream if stream is None else self.cache.device.stream_of(stream)
        part = self._part(layer, first, count, draft_pass)
        which = index(attention_wave, "attention_wave")
        check(lib.fb_gather(self._pointer, self._number, part, which, on), self._pointer)

    def scatter(
        self, layer: int, *, first: int = 0, count: int = 0, draft_pass: int | None = None, stream: Any = None
    ) -> None:
        """S: stores the layer's new rows in the total pool, once they stand in their landing slots.

        Raises:
            OutOfRange: no such layer, rows or pass. InvalidConfig: they were stored. InvalidArgument, Closed.
        """
        on = self._stream if stream is None else self.cache.device.stream_of(stream)
        if first or count or draft_pass is not None:
            part = self._part(layer, first, count, draft_pass)
            check(lib.fb_scatter_range(self._pointer, self._number, part, on), self._pointer)
        else:
            check(lib.fb_scatter(self._pointer, self._number, index(layer, "layer"), on), self._pointer)

    def finish(self, stream: Any = None) -> None:
        """Ends its enqueueing; `stream` is behind all of its work.

        Raises:
            InvalidConfig: it is finished; or a call is missing, with its layer, batch row and query row: nothing was
            enqueued then, and the step is open, to be completed or abandoned. InvalidArgument: the stream. Closed.
        """
        on = self._stream if stream is None else self.cache.device.stream_of(stream)
        one = self._in_flight
        before, one.stream, one.finishing = one.stream, on, True
        status = lib.fb_finish(self._pointer, self._number, on)
        if status:
            one.stream, one.finishing = before, False
            fail(status, self._pointer)
        self._finished = one.finished = True

    def abandon(self) -> None:
        """Gives it up: it is still to be finished and retired, which raises Cancelled; its sequences need
        `truncate` or `close`.

        Raises:
            Closed.
        """
        check(lib.fb_abandon(self._pointer, self._number), self._pointer)

    def retire(self, stream: Any = None, *, wait: bool = False) -> Retired:
        """Ends it, when its work has ended; finishes it first on the stream that it was prepared on, where that was
        not done.

        Args:
            stream: that later work of its sequences is ordered on.
            wait: first waits until the stream that it was finished on has ended its work.

        Raises:
            Busy: it runs. DeviceFailed, Cancelled: none of its tokens may be published, and its sequences need
            `truncate` or `close`; it has ended all the same. Closed: it was retired.
        """
        on = self._stream if stream is None else self.cache.device.stream_of(stream)
        if not self._number:
            raise Closed("retire: the step was retired")
        if not self._finished:
            self._finish_once()
        if wait and self._later:
            device = self.cache.device._handle.pointer
            check(lib.fb_stream_wait(device, self._in_flight.stream), device)
        retired = sized("fb_retired")
        status = lib.fb_retire(self._pointer, self._in_flight.number, on, retired)
        if not self._in_flight.number[0]:
            self.cache._record.steps.pop(self._in_flight, None)
            self._number = 0
            self._held.clear()
        check(status, self._pointer)
        self.retired = Retired(retired.step, retired.hits, retired.misses, *self._report())
        if self.cache._watchers:
            stats = self.cache.stats()
            for left in self.cache._watchers:
                left(stats)
        return self.retired

    def _finish_once(self) -> None:
        """Finishes it, unless a call of `finish` that was interrupted has done so."""
        began, stream = self._in_flight.finishing, self._in_flight.stream
        try:
            self.finish()
        except InvalidConfig:
            if not began:
                raise
            self._in_flight.stream = stream

    def _refused(self, held: object, status: int) -> NoReturn:
        """Raises a refusal; what the call was given is let go where it surely enqueued nothing."""
        self._held.refused(held, status)
        fail(status, self._pointer)

    def _report(self) -> tuple[Any, Any]:
        counts, lengths = np.empty((self.cache.info.layers, 3), np.uint32), np.empty(self.rows, np.uint32)
        count = _new("uint32_t *")
        room = _cast("fb_layer_count *", _from_buffer(counts))
        check(lib.fb_retired_counts(self._pointer, room, len(counts), count), self._pointer)
        tokens = _from_buffer("uint32_t[]", lengths)
        check(lib.fb_retired_lengths(self._pointer, tokens, self.rows, count), self._pointer)
        return counts, lengths

    def _part(self, layer: int, first: int, count: int, draft_pass: int | None) -> Any:
        part = sized("fb_step_range")
        part.layer, part.first, part.count = index(layer, "layer"), index(first, "first"), index(count, "count")
        setattr(part, "pass", 0 if draft_pass is None else index(draft_pass, "draft_pass") + 1)
        return part

    def _fits(self, buffers: Buffers, rows: int | None = None) -> None:
        if type(buffers) is not Buffers or buffers.cache is not self.cache:
            raise InvalidArgument("buffers", repr(buffers), "Buffers of this step's cache")
        wanted = self.rows if rows is None else rows
        if buffers.rows < wanted or buffers.query_rows != self.query_rows:
            given = f"buffers for {counted(buffers.rows, 'row')} of {counted(buffers.query_rows, 'query row')}"
            wide = f"{counted(wanted, 'row')} or more, of {counted(self.query_rows, 'query row')}"
            raise InvalidArgument("buffers", given, wide)

    def __enter__(self) -> Step:
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
            # With its cache, or in a forked child.
            self._number = 0

    def __del__(self) -> None:
        if getattr(self, "_number", 0):
            self.cache._record.forget_step(self._in_flight)

    def __repr__(self) -> str:
        state = "retired" if not self._number else "in flight" if self._finished else "open"
        return f"<forebay.Step of {counted(self.rows, 'row')}, {state}>"
