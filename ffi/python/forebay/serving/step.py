"""A step over a batch of requests: its calls, layer by layer, and its end."""

from __future__ import annotations

import contextlib
import functools
from types import TracebackType
from typing import Any

import numpy as np

from ..cache import Cache
from ..errors import Busy, ForebayError, InvalidArgument, InvalidState, OutOfRange
from ..step import Buffers, Retired, Step
from ..tensors import HOST, index
from . import request as _request, requests as _requests
from .failures import naming, naming_batch
from .tensors import INTEGERS, Library, item_of, library_of


class Room:
    """Memory for the selection and slots of the widest step. Steps run one after the other and use its beginning."""

    def __init__(self, cache: Cache, library: Library) -> None:
        most, place = (cache.batch * cache.query_rows * cache.info.top_k,), cache.device.place
        self.selection, self.slots = library.words(most, place), library.words(most, place)


class Work:
    """The selection and slots of a step's shape, checked once."""

    def __init__(self, cache: Cache, library: Library, room: Room, rows: int, query_rows: int) -> None:
        whole = (rows, query_rows, cache.info.top_k)
        self.selection, self.slots = library.part(room.selection, whole), library.part(room.slots, whole)
        self.buffers = Buffers(cache, self.selection, self.slots)


class DecodeStep:
    """An open step of `Requests.step`; a context manager that finishes it, or abandons it if the body raises.

    Every layer needs `write` and `select`, in either order, and then may read `rows`. A layer that another one selects
    for (`Shape.group_layers`) calls `select(layer)` without a selection. All calls use the requests' stream.

    Attributes:
        requests: the batch, in its order.
        starts: int64 `[batch]`: the position of each request's first new row, which is the number of tokens before it.
        query_rows: the width of the step. A request with fewer rows uses the first ones.
        retired: what the step did, as soon as it is known: at its end, or on a device that works later, some calls
            later.
    """

    def __init__(self, requests: _requests.Requests, batch: list[tuple[_request.Request, int]]) -> None:
        self._owner, cache = requests, requests.cache
        self.requests, self._widths = [request for request, _ in batch], [width for _, width in batch]
        self._ids = [request.id for request in self.requests]
        self.query_rows = max(self._widths)
        self.retired: Retired | None = None
        self._ragged = self._widths if min(self._widths) < self.query_rows else None
        accepted = []
        for request, width in batch:
            with naming(request.id):
                accepted.append(request._accepted(width))
        self._step = self._prepare([request._sequence for request in self.requests], accepted)
        for request in self.requests:
            request._account(request._length)
        requests._open = self
        try:
            self._begin(cache)
        except BaseException:
            self.abandon()
            raise

    def _prepare(self, sequences: list[Any], accepted: list[int]) -> Step:
        owner, rows = self._owner, list(zip(sequences, accepted, self._widths))
        with naming_batch(self._ids):
            try:
                return owner.cache.prepare(rows, stream=owner._stream)
            except Busy:
                # As many steps are in flight as may be.
                owner._wait()
        if owner._failures:
            raise owner._told()
        with naming_batch(self._ids):
            return owner.cache.prepare(rows, stream=owner._stream)

    def _begin(self, cache: Cache) -> None:
        """What every layer of the step uses."""
        owner = self._owner
        owner._turn += 1
        for request in self.requests:
            request._committed, request._landed, request._seen = request._length, 0, owner._turn
        self.starts = np.array([request._length for request in self.requests], np.int64)
        # The landing slots of the new rows that are in use.
        slots = [request._landing_slots()[:width] for request, width in zip(self.requests, self._widths)]
        self._landing = np.concatenate(slots)
        # By library: the landing slots, and where the new tokens' index keys are.
        self._places: dict[str, Any] = {}
        self._key_places: dict[str, Any] = {}
        self._written = [False] * cache.info.layers
        self._stored = [False] * cache.info.layers
        self._chosen = [False] * cache.info.layers
        limits = self.starts[:, None] + 1 + np.arange(self.query_rows)
        self._limits = limits if cache.device.place is HOST else None
        # The last layer that selected, with its buffers.
        self._slots: tuple[int, Work] | None = None
        self._selected: Any = None
        if owner._recorder is not None:
            shape = (len(owner.groups), self.batch, self.query_rows, cache.info.top_k)
            self._selected = np.full(shape, -1, np.int32)

    @property
    def batch(self) -> int:
        """The number of requests."""
        return len(self.requests)

    def write(self, layer: int, rows: Any) -> None:
        """Writes a layer's new rows to their landing slots: before its attention, which may read them.

        Args:
            layer: the layer.
            rows: `[batch, query rows, ...]` of any dtype, whose rows have as many bytes as the cache's, on the cache's
                device. Rows beyond a request's own query rows are not read.

        Raises:
            InvalidArgument: rows of another shape, width, dtype or memory. Nothing is written.
            InvalidState: the step is finished, or the layer was stored.
        """
        self._check_open("write")
        owner = self._owner
        shape, place = (self.batch, self.query_rows), owner.cache.device.place
        library, dtype, given, _ = owner._rows_of(layer, rows, shape, place)
        if self._stored[layer]:
            raise InvalidState(f"write: layer {layer} was stored")
        places = self._places.get(library.name)
        if places is None:
            places = self._places[library.name] = library.to_device(self._landing, place)
        if self._ragged is not None:
            given = library.used(given, self.query_rows, self._ragged)
        owner._ready()
        first, second = owner.cache.shape.row_bytes
        if second:
            library.put(owner._view(library, layer, 0, None), places, given[:, :first])
            library.put(owner._view(library, layer, 1, None), places, given[:, first:])
        else:
            library.put(owner._view(library, layer, 0, None), places, given)
        self._written[layer], owner._dtypes[layer] = True, dtype

    def select(self, layer: int, selection: Any = None) -> Any:
        """Resolves a layer's selection (top-k indices) and gathers the rows that miss.

        Args:
            layer: the layer.
            selection: int32 or int64 `[batch, query rows, k]` on the cache's device, k at most the cache's `top_k`:
                positions of tokens, those of the new rows included, -1 for none. Rows beyond a request's own query rows
                are not read. None in a layer that another one selects for.

        Returns:
            The slots, int32 `[batch, query rows, top_k]`, -1 where a row selects nothing. Their memory is reused: read
            them before the next layer selects.

        Raises:
            InvalidArgument: a tensor of another dtype, shape or memory.
            OutOfRange: a position that the query row cannot see, on a host device; on another the step fails at its
                end. Nothing was enqueued.
            InvalidState: the step is finished, the layer has selected, or the group's first layer has not.
        """
        self._check_open("select")
        owner = self._owner
        layer = index(layer, "layer", len(self._stored) - 1)
        if owner._layers[layer] != layer:
            return self._share(layer, selection)
        self._check_once(layer)
        place = owner.cache.device.place
        library = library_of(selection, "selection", place)
        self._check_selection(library, layer, selection)
        work = owner._work(library, self.batch, self.query_rows)
        owner._ready()
        library.fill(work.selection, selection)
        with naming_batch(self._ids):
            self._step.layer(layer, work.buffers)
        self._slots, self._chosen[layer] = (layer, work), True
        if self._selected is not None:
            self._selected[owner.groups.index(layer)] = library.to_numpy(work.selection)
        owner._ready()
        return work.slots

    def _share(self, layer: int, selection: Any) -> Any:
        """`select` of a layer that another one selects for."""
        leader = self._owner._layers[layer]
        if selection is not None:
            raise InvalidArgument("selection", "a selection", f"None: layer {leader} selects for layer {layer}")
        if self._slots is None or self._slots[0] != leader:
            raise InvalidState(f"select: layer {leader}, which selects for layer {layer}, has not selected before it")
        self._check_once(layer)
        work = self._slots[1]
        with naming_batch(self._ids):
            self._step.layer(layer, work.buffers)
        self._chosen[layer] = True
        self._owner._ready()
        return work.slots

    def _check_once(self, layer: int) -> None:
        if self._chosen[layer]:
            raise InvalidState(f"select: layer {layer} has selected in this step")

    def _check_selection(self, library: Library, layer: int, selection: Any) -> None:
        dtype, shape = item_of(library, selection)[0], tuple(selection.shape)
        top_k = self._owner.cache.info.top_k
        if dtype not in INTEGERS or shape[:2] != (self.batch, self.query_rows) or len(shape) != 3:
            expected = f"int32 or int64 [{self.batch}, {self.query_rows}, {top_k} or fewer]"
            raise InvalidArgument("selection", f"{dtype} {list(shape)}", expected)
        if shape[2] > top_k:
            raise InvalidArgument("selection", f"{shape[2]} positions", f"at most {top_k}: the cache's top_k")
        if self._limits is None:
            return
        beyond = library.beyond(selection, self._limits)
        if beyond.any():
            for row, at in np.argwhere(beyond).tolist():
                if at < self._widths[row]:
                    position, limit = int(selection[row, at].max()), int(self._limits[row, at])
                    position = position if position >= limit else int(selection[row, at].min())
                    given = f"layer {layer}: query row {at} selects position {position}, and sees {limit} tokens"
                    raise OutOfRange(f"request {self.requests[row].id!r}: {given}")

    def rows(self, layer: int, slots: Any, dtype: Any = None, *, run: int | None = None, out: Any = None) -> Any:
        """The rows at slots, by one gather for the whole batch.

        Args:
            layer: the layer.
            slots: what `select` returned, or a part of it, of any shape.
            dtype: of the result, of the slots' library; None: uint8.
            run: 0 or 1: one run of rows that have two. None: the whole row; of two runs, both one after the other.
            out: the destination, `[*slots.shape, width]` of `dtype`; None: a new tensor.

        Returns:
            `[*slots.shape, width]`. Where a slot is -1 it has the row of slot 0: mask it.

        Raises:
            InvalidArgument: slots in another memory, a dtype that does not divide the row, or another `out`.
            InvalidState: the step is finished.
        """
        self._check_open("rows")
        owner = self._owner
        library = library_of(slots, "slots", owner.cache.device.place)
        owner._ready()
        runs = [0, 1] if run is None and owner.cache.shape.row_bytes[1] else [run or 0]
        slabs = [owner._view(library, layer, part, dtype) for part in runs]
        if item_of(library, slots)[0] not in INTEGERS:
            raise InvalidArgument("slots", str(slots.dtype), "int32 or int64, as select returns them")
        if out is not None:
            shape = (*slots.shape, sum(slab.shape[-1] for slab in slabs))
            if library_of(out, "out") is not library or out.dtype != slabs[0].dtype or tuple(out.shape) != shape:
                raise InvalidArgument("out", f"{out.dtype} {list(out.shape)}", f"{slabs[0].dtype} {list(shape)}")
        if len(slabs) == 1:
            return library.take(slabs[0], slots, out)
        return library.join([library.take(slab, slots, None) for slab in slabs], out)

    def put_index_keys(self, group: int, keys: Any) -> None:
        """Writes the index keys of the step's new tokens: `[batch, query rows, ...]`, see `Request.put_index_keys`."""
        self._check_open("put_index_keys")
        owner, shape = self._owner, (self.batch, self.query_rows)
        library = library_of(keys, "keys", owner.cache.device.place)
        if tuple(keys.shape[:2]) != shape:
            raise InvalidArgument("keys", str(list(keys.shape)), f"[{shape[0]}, {shape[1]}, ...]")
        given = library.bytes_of(keys, shape[0] * shape[1])
        if self._ragged is not None:
            given = library.used(given, self.query_rows, self._ragged)
        places = self._key_places.get(library.name)
        if places is None:
            new = zip(self.requests, self.starts.tolist(), self._widths)
            found = [request._index_places(np.arange(start, start + width)) for request, start, width in new]
            places = library.to_device(np.concatenate(found), owner.cache.device.place)
            self._key_places[library.name] = places
        owner._put_index_keys(library, group, given, places)

    def stored(self, layer: int) -> None:
        """States that a layer's new rows are written, so that they go to the total pool (scatter). The end of the step
        does so for layers where it was left out; earlier is better, because the copy then runs beside later layers.

        Raises:
            InvalidState: the layer was not written, or the step is finished.
        """
        self._check_open("stored")
        layer = index(layer, "layer", len(self._stored) - 1)
        if not self._written[layer]:
            raise InvalidState(f"stored: layer {layer} was not written")
        if not self._stored[layer]:
            with naming_batch(self._ids):
                self._step.scatter(layer)
            self._stored[layer] = True

    def finish(self) -> None:
        """Ends the step. Until `Request.crop` says otherwise, all of its rows count.

        Raises:
            InvalidState: a layer was not written or has not selected: the step is abandoned.
            DeviceFailed: the step failed. Its requests need `Request.crop`.
        """
        self._check_open("finish")
        try:
            for layer, written in enumerate(self._written):
                if not written:
                    raise InvalidState(f"finish: layer {layer} was not written")
                self.stored(layer)
            with naming_batch(self._ids):
                self._step.finish()
        except BaseException:
            self.abandon()
            raise
        self._owner._open = None
        for row, (request, width) in enumerate(zip(self.requests, self._widths)):
            request._touch()
            request._landed, request._length = width, request._committed + width
            if request._recording is not None:
                selected = self._selected[:, row, :width]
                request._recording.step(int(self.starts[row]), np.ascontiguousarray(selected.transpose(1, 0, 2)))
        self._owner._hear()
        if not self._land(wait=False):
            self._owner._flying.append(self)
        self._end_requests()
        if self.retired is None and self not in self._owner._flying:
            raise self._owner._told()

    def abandon(self) -> None:
        """Gives up the step; idempotent. Waits for its work, so that it is known what is committed. Its requests have
        failed, and are usable again after `Request.crop`."""
        if self._owner._open is not self:
            return
        self._owner._open = None
        # One that was finished already only ends. The engine raises what has happened, or asked for this.
        for end in (self._step.abandon, functools.partial(self._step.retire, wait=True)):
            with contextlib.suppress(ForebayError):
                end()
        self._owner._hear()
        for request in self.requests:
            request._fail()
        self._end_requests()

    def _end_requests(self) -> None:
        """Ends the requests whose end waited for that of the step."""
        for request in self.requests:
            if request._ending:
                self._owner._note(request._end())

    def _land(self, wait: bool) -> bool:
        """Retires the step if it has ended; returns whether it has. A failure is noted for the next call."""
        try:
            with naming_batch(self._ids):
                self.retired = self._step.retire(wait=wait)
        except Busy:
            return False
        except ForebayError as error:
            self._owner._failures.append(error)
            for request in self.requests:
                request._fail(error)
            return True
        self._owner._counts += self.retired.counts
        return True

    def _check_open(self, what: str) -> None:
        if self._owner._open is not self:
            raise InvalidState(f"{what}: the step is finished")

    def __enter__(self) -> DecodeStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owner._open is not self:
            return
        if error is not None:
            self.abandon()
        else:
            self.finish()

    def __repr__(self) -> str:
        state = "open" if self._owner._open is self else "finished"
        return f"<forebay.serving.DecodeStep of {self.batch} requests, {state}>"
