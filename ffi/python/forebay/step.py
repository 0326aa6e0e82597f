"""A step: one forward pass of decode, from `Cache.prepare` to `retire`.

A layer call costs a few microseconds for a whole batch, including its checks. An engine that uses the same buffers for
every layer and step can check them once with `Buffers`; a call with them costs less.

Where the device works after a call returns, the cache keeps the tensors of enqueued work alive until the step has
ended. It does so from before the call, even if the call is interrupted or the program forgets the step
(`forebay.keep`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np

from . import cache as _cache
from ._library import NULL, check, fail, ffi, lib, sized
from .arrays import Tensor
from .errors import InvalidArgument, counted
from .lifetime import StepBase
from .record import InFlight
from .tensors import index, look, words

_new, _cast, _from_buffer = ffi.new, ffi.cast, ffi.from_buffer


class LayerCount(NamedTuple):
    """The counts of one layer of a step."""

    # Distinct selected rows that were resident.
    hits: int
    # Rows fetched.
    misses: int
    # Misses whose rows were fetched into scratch slots.
    scratch: int


@dataclass(frozen=True, slots=True, eq=False)
class Retired:
    """What a step did.

    Attributes:
        step: the step's number in its cache, from 1.
        hits: distinct selected rows that were resident, all layers.
        misses: rows fetched, all layers.
        counts: uint32 `[layers, 3]`, draft layers last: hits, misses, and misses whose rows went to scratch slots.
        lengths: uint32 `[rows]`: the committed tokens of each batch row's sequence, after the step's own commit and
            without its new rows.
    """

    step: int
    hits: int
    misses: int
    counts: np.ndarray[Any, np.dtype[np.uint32]]
    lengths: np.ndarray[Any, np.dtype[np.uint32]]

    @property
    def layers(self) -> list[LayerCount]:
        """The counts of each layer, draft layers last."""
        return [LayerCount(*counts) for counts in self.counts.tolist()]


class Buffers:
    """The selection (top-k indices) and slots of a step, checked once, for any step and layer of the cache.

    Args:
        cache: the cache of the steps.
        selection: int32 `[rows, query rows, top_k]` on the cache's device: token positions, -1 for none. The engine
            writes it in the order of the streams.
        slots: the same shape: receives the slots in the layer's slab, -1 for none.
        lists: int32 `[1 + attention_waves, rows, query rows, top_k]`, for split attention. Index list 0 has the slots
            of the resident rows, index list 1 + w the slots that attention wave w fetched. Valid slots come first, then
            -1.
        counts: int32 `[1 + attention_waves, rows, query rows]`: the number of valid slots in each index list.

    Raises:
        InvalidArgument: a tensor of another dtype, shape, layout or device, or lists without counts.

    Attributes:
        selection, slots, lists, counts: as given; they live as long as this object.
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
            several = 1 + cache.info.attention_waves
            self._lists = words(lists, "lists", (several, *whole), place, True)
            self._counts = ffi.cast(
                "uint32_t *", words(counts, "counts", (several, self.rows, self.query_rows), place, True)
            )
        self.cache = cache
        # The caller's own objects, with their methods.
        self.selection: Any = selection
        self.slots: Any = slots
        self.lists: Any = lists
        self.counts: Any = counts

    @classmethod
    def empty(cls, cache: _cache.Cache, rows: int, query_rows: int, *, split: bool = False) -> Buffers:
        """Makes buffers of NumPy arrays for a host device, with index lists if `split`. Nothing is selected."""
        whole = (rows, query_rows, cache.info.top_k)
        selection, slots = np.full(whole, -1, np.int32), np.full(whole, -1, np.int32)
        if not split:
            return cls(cache, selection, slots)
        several = 1 + cache.info.attention_waves
        lists = np.full((several, *whole), -1, np.int32)
        return cls(cache, selection, slots, lists, np.zeros((several, rows, query_rows), np.int32))

    def declare(self, buffers: Any) -> None:
        """Writes them into an fb_buffers."""
        buffers.selection, buffers.slots = self._selection, self._slots
        buffers.lists, buffers.counts = self._lists, self._counts
        buffers.batch = self.rows if self._lists else 0


class Step(StepBase):
    """A step of a cache: open until it is finished, in flight until it is retired. `Cache.prepare` makes it.

    As a context manager it abandons the step if the body raises, and finishes it otherwise. If its work has ended by
    then (always, on a host device without threads) it also retires the step, and `retired` has the result. Otherwise
    the program calls `retire`; a later call on the cache retires a forgotten step.

    `layer` counts draft layers after the others. Without a `stream` a call uses the stream on which the step was
    prepared.

    Attributes:
        cache: the step's cache.
        rows, query_rows: of the step's batch.
        retired: what the step did, once it is retired.
    """

    __slots__ = ("query_rows", "retired", "_shape", "_place")
    cache: _cache.Cache

    def __init__(self, cache: _cache.Cache, in_flight: InFlight, rows: int, query_rows: int) -> None:
        super().__init__(cache, in_flight, rows)
        self.query_rows = query_rows
        self.retired: Retired | None = None
        self._shape = (rows, query_rows, cache.info.top_k)
        self._place = cache.device.place

    def layer(self, layer: int, selection: Tensor | Buffers, slots: Tensor | None = None, stream: Any = None) -> None:
        """Resolves a layer's selection (top-k indices) and gathers the rows that miss.

        Attention may read `slots` after this call, and before the next layer's call, which may use the same scratch
        slots.

        Args:
            layer: the layer.
            selection: int32 `[rows, query rows, top_k]` on the cache's device: token positions, -1 for none; or
                `Buffers`, without `slots`.
            slots: the same shape: receives the slots in the layer's slab, -1 for none. In a layer that another one
                selects for (`Shape.group_layers`) the call gathers only and writes no slots: attention reads those of
                the group's first layer.
            stream: see the class.

        Raises:
            InvalidArgument, OutOfRange, InvalidState (the step is finished): nothing was enqueued and nothing is
                written. If a position is at or beyond the sequence's length, `retire` raises DeviceFailed.
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
        """Calls `layer` for every layer, for replays and tests that have all selections beforehand.

        Layers share the scratch slots, for the rows beyond a sequence's slots. After this call they hold rows of the
        last layer only; where layers share a selection, of the last group's layers. So the call is rejected if an
        earlier layer might need one. No layer needs one if each sequence of the step has `query rows x top_k` slots in
        every layer, or as many slots as tokens, or if the cache is `residency_only`.

        Args:
            selection, slots: int32 `[index groups, rows, query rows, top_k]`: for each layer that selects, draft layers
                last.

        Raises:
            InvalidConfig: an earlier layer might need scratch slots. Call `layer` for each layer, with its attention
                before the next. Nothing was enqueued. Other errors: as `layer`.
        """
        on = self._stream if stream is None else self.cache.device.stream_of(stream)
        shape = (self.cache.info.index_groups, *self._shape)
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
        """R of a layer, for batch rows `first` to `first + count` (0: all from `first` on), or of a draft pass.

        The buffers begin with the first of these rows. Enqueue `gather` after it, before attention and before the next
        resolve of these rows.

        Raises:
            As `layer`.
        """
        on = self._stream if stream is None else self.cache.device.stream_of(stream)
        self._fits(buffers, (count or self.rows - first) if first or count else self.rows)
        taken, given = self._range(layer, first, count, draft_pass), sized("fb_buffers")
        buffers.declare(given)
        if self._later:
            self._held.append(buffers)
        status = lib.fb_resolve(self._pointer, self._number, taken, given, on)
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
        """G: fetches the rows that the last resolve of these rows missed, or those of one attention wave.

        In a layer that another one selects for (`Shape.group_layers`) the resolve is that of the group's first layer. G
        may run there at any time between that resolve and the layer's own attention.

        Raises:
            OutOfRange: no such layer, rows or wave.
            InvalidState: the step is finished.
            InvalidArgument, Closed.
        """
        on = self._stream if stream is None else self.cache.device.stream_of(stream)
        taken = self._range(layer, first, count, draft_pass)
        which = index(attention_wave, "attention_wave")
        check(lib.fb_gather(self._pointer, self._number, taken, which, on), self._pointer)

    def scatter(
        self, layer: int, *, first: int = 0, count: int = 0, draft_pass: int | None = None, stream: Any = None
    ) -> None:
        """S: stores the layer's new rows in the total pool, after the engine has written them to their landing slots.

        Raises:
            OutOfRange: no such layer, rows or draft pass.
            InvalidState: the step is finished.
            InvalidArgument, Closed.
        """
        on = self._stream if stream is None else self.cache.device.stream_of(stream)
        if first or count or draft_pass is not None:
            taken = self._range(layer, first, count, draft_pass)
            check(lib.fb_scatter_range(self._pointer, self._number, taken, on), self._pointer)
        else:
            check(lib.fb_scatter(self._pointer, self._number, index(layer, "layer"), on), self._pointer)

    def finish(self, stream: Any = None) -> None:
        """Ends the enqueueing of the step; `stream` is ordered after all of its work.

        Raises:
            InvalidState: the step is already finished, or a call is missing. The message names the call, layer, batch
                row and query row. Nothing was enqueued then, and the step stays open: make the call or abandon the
                step.
            InvalidArgument: the stream.
            Closed.
        """
        self._finish(stream)

    def retire(self, stream: Any = None, *, wait: bool = False) -> Retired:
        """Ends the step when its work has ended. An open step is finished first, on the stream on which it was
        prepared.

        Args:
            stream: the stream on which later work of its sequences is ordered.
            wait: first wait until the stream on which the step was finished has ended its work.

        Raises:
            Busy: the step is still running.
            DeviceFailed, Cancelled: discard the step's tokens; its sequences need `truncate` or `close`. The step has
                ended all the same.
            Closed: the step was already retired.
        """
        retired = sized("fb_retired")
        self._retire(stream, wait, lambda number, on: int(lib.fb_retire(self._pointer, number, on, retired)))
        self.retired = Retired(retired.step, retired.hits, retired.misses, *self._report())
        if self.cache._watchers:
            stats = self.cache.stats()
            for left in self.cache._watchers:
                left(stats)
        return self.retired

    def _refused(self, held: object, status: int) -> NoReturn:
        """Raises a refusal. It releases the call's tensors if the call certainly enqueued nothing."""
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

    def _range(self, layer: int, first: int, count: int, draft_pass: int | None) -> Any:
        given = sized("fb_step_range")
        given.layer, given.first, given.count = index(layer, "layer"), index(first, "first"), index(count, "count")
        given.draft_pass = 0 if draft_pass is None else index(draft_pass, "draft_pass") + 1
        return given

    def _fits(self, buffers: Buffers, rows: int | None = None) -> None:
        if type(buffers) is not Buffers or buffers.cache is not self.cache:
            raise InvalidArgument("buffers", repr(buffers), "Buffers of this step's cache")
        wanted = self.rows if rows is None else rows
        if buffers.rows < wanted or buffers.query_rows != self.query_rows:
            given = f"buffers for {counted(buffers.rows, 'row')} of {counted(buffers.query_rows, 'query row')}"
            wide = f"{counted(wanted, 'row')} or more, of {counted(self.query_rows, 'query row')}"
            raise InvalidArgument("buffers", given, wide)
