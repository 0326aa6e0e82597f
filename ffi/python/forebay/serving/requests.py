"""The requests of an engine over one cache, by the engine's own ids."""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections import deque
from types import TracebackType
from typing import Any, Callable, Hashable, Iterator, NamedTuple, Sequence as Many, TypeVar

import numpy as np

from ..cache import Cache, Stats
from ..errors import Exhausted, ForebayError, InvalidArgument, InvalidState, OutOfRange
from ..sequence import TokenKeys
from ..tensors import HOST, Place, index
from . import layout
from .failures import naming
from .recording import Recorder, Recording
from .request import ENDED, FAILED, FILLING, PARKED, RUNNING, Request
from .step import DecodeStep, Room, Work
from .tensors import Library, item_of, library_of, library_of_dtype

_T = TypeVar("_T")


class ServingStats(NamedTuple):
    """What the requests are and did."""

    # Requests by state; a failed one counts as running.
    filling: int
    running: int
    parked: int
    # Steps begun.
    steps: int
    # Requests that were ended because the engine forgot them.
    forgotten: int
    # int64 [layers, 3] over all retired steps, draft layers last: hits, misses, misses fetched into scratch slots.
    layers: np.ndarray[Any, np.dtype[np.int64]]
    # The cache's own statistics.
    cache: Stats


class Requests:
    """The requests of one cache; a context manager that ends all of them.

    One thread uses it, the one that drives the cache. It uses one stream: the one that is current in torch, or the one
    of `stream`. All sequences of the cache are its own.

    Args:
        cache: the cache. It stays open when the requests end.
        ratio: slots of a request in each layer, as a share of the tokens that it may have.
        slots: slots of a request in each layer, or one number for each layer. None of both: as the cache was made.
        forget_after: ends a running request that took part in none of the last so many steps; 0: never.
        record: a file for the selections of the first request (`forebay replay` reads it); later requests get
            `<name>-1`, `<name>-2`, ... beside it. None: nothing is recorded.
        stream: see the device.

    Raises:
        InvalidArgument: both `ratio` and `slots`, or a value of another kind.

    Attributes:
        cache: as given.
        groups: the layers that select, in order: the index groups.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        ratio: float | None = None,
        slots: int | Many[int] | None = None,
        forget_after: int = 0,
        record: str | os.PathLike[str] | None = None,
        stream: Any = None,
    ) -> None:
        if not isinstance(cache, Cache):
            raise InvalidArgument("cache", type(cache).__name__, "a forebay.Cache")
        if ratio is not None and slots is not None:
            raise InvalidArgument("slots", "a ratio as well", "a ratio or slots")
        self.cache = cache
        self._ratio, self._slots = ratio, slots
        self._forget_after = index(forget_after, "forget_after")
        self._stream = stream
        self._layers = layout.leaders(cache.shape)
        self.groups = sorted(set(self._layers))
        self._recorder = Recorder(record, len(self._layers), cache.info.top_k, self._layers) if record else None
        self._by_id: dict[Hashable, Request] = {}
        # Requests whose owner was collected; noted by the garbage collector.
        self._orphans: deque[Request] = deque()
        self._turn, self._forgotten = 0, 0
        self._open: DecodeStep | None = None
        # Finished steps that have not ended, oldest first, and failures that no call has raised.
        self._flying: deque[DecodeStep] = deque()
        self._failures: deque[ForebayError] = deque()
        # Errors of recordings whose requests have ended.
        self._unrecorded: list[ForebayError] = []
        # Pieces of work that were enqueued, and those of them that have certainly ended.
        self._enqueued, self._waited = 0, 0
        self._counts = np.zeros((len(self._layers), 3), np.int64)
        self._dtypes: list[str | None] = [None] * len(self._layers)
        self._rooms: dict[str, Room] = {}
        self._works: dict[tuple[Any, ...], Work] = {}
        self._views: dict[tuple[Any, ...], Any] = {}
        self._pools: dict[int, layout.Bytes] = {}

    def add(
        self,
        id: Hashable,
        *,
        promised: int | None = None,
        prompt: int = 0,
        tokens: Any = None,
        keys: TokenKeys = None,
        salt: bytes = b"",
        owner: object = None,
        ratio: float | None = None,
        slots: int | Many[int] | None = None,
        bring_up: str = "whole",
    ) -> Request:
        """Adds a request: takes its lane, slots and pages, or nothing.

        Args:
            id: any hashable value, which no other request has.
            promised: tokens that it may decode after its prompt; None: as many as the cache's `max_tokens` leaves.
            prompt: tokens of the prompt, as far as they are known. Chunks beyond it are admitted as they arrive.
            tokens: the prompt's token ids, as far as they may be shared: the request shares the pages that another one
                has published with the same tokens, keys and salt (`Request.shared`).
            keys, salt, bring_up: as in `forebay.Cache.open`.
            owner: an object of the engine, weakly referenced. When it is collected, the next call ends the request.
            ratio, slots: instead of those of all requests.

        Raises:
            InvalidArgument: an id in use, or a value of another kind.
            OutOfRange: more tokens than the cache's `max_tokens`.
            Exhausted: names the pool that has too little left.
        """
        self._collect()
        self._check_new(id, owner)
        prompt = max(index(prompt, "prompt"), 0 if tokens is None else int(np.size(tokens)))
        most = self.cache.info.max_tokens
        left = max(most - prompt, 0) if promised is None else index(promised, "promised")
        with naming(id):
            if prompt + left > most:
                raise OutOfRange(f"a prompt of {prompt} and {left} promised: the cache admits {most} (max_tokens)")
            # A request without any token is not admitted.
            admitted = max(prompt + left, 1)
            given = {"bring_up": bring_up, "tokens": tokens, "keys": keys, "salt": salt, **self._budget(ratio, slots)}
            sequence = self._eagerly(lambda: self.cache.open(prompt=prompt, promised=admitted - prompt, **given))
        made = Request(self, id, sequence, promised, prompt, admitted)
        made._length = sequence.shared
        return self._enter(made, owner)

    def _enter(self, request: Request, owner: object) -> Request:
        if owner is not None:
            request._owner = weakref.ref(owner, functools.partial(_note, self._orphans, weakref.ref(request)))
        if self._recorder is not None:
            request._recording = Recording(self._recorder, str(request.id))
        self._by_id[request.id] = request
        return request

    def _leave(self, request: Request) -> None:
        self._by_id.pop(request.id, None)
        if not self._by_id:
            self._dtypes = [None] * len(self._layers)

    def _check_new(self, id: Hashable, owner: object) -> None:
        try:
            weakref.ref(owner if owner is not None else self)
        except TypeError:
            raise InvalidArgument("owner", type(owner).__name__, "an object that can be weakly referenced") from None
        try:
            taken = id in self._by_id
        except TypeError:
            raise InvalidArgument("id", type(id).__name__, "a hashable value") from None
        if taken:
            raise InvalidArgument("id", repr(id), "one that no request has: end that one first")

    def _budget(self, ratio: float | None, slots: int | Many[int] | None) -> dict[str, Any]:
        """The arguments of `open` for a budget."""
        if ratio is None and slots is None:
            ratio, slots = self._ratio, self._slots
        return {"ratio": ratio, "slots": slots}

    def __getitem__(self, id: Hashable) -> Request:
        try:
            return self._by_id[id]
        except (KeyError, TypeError):
            raise InvalidArgument("id", repr(id), "the id of a request that was added and has not ended") from None

    def __contains__(self, id: object) -> bool:
        return id in self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(tuple(self._by_id))

    def end(self, id: Hashable) -> None:
        """Ends a request.

        Raises:
            InvalidArgument: no request has this id.
        """
        self[id].end()

    def step(self, rows: Many[Hashable | tuple[Hashable, int]], *, query_rows: int = 1) -> DecodeStep:
        """Begins a step. Its requests join or resume if they have not, and the rows of their last steps are accepted up
        to their length.

        Args:
            rows: the ids, in the order of the batch; or pairs of an id and its query rows. An id that is a pair itself
                needs one around it.
            query_rows: of every request given without: 1 + drafts.

        Raises:
            InvalidArgument: an unknown id, one that appears twice, or no row.
            InvalidState: a step is open, or a step of a request failed.
            OutOfRange: more rows than the cache's batch or query rows, or more tokens than a request was admitted for.
            Exhausted: no lane or too few slots are free for a request that joins or resumes.
            DeviceFailed: an earlier step has failed meanwhile; nothing was begun.
        """
        self._collect()
        if self._open is not None:
            raise InvalidState("step: a step is open; finish it first")
        if self._failures:
            raise self._told()
        batch = self._batch(rows, query_rows)
        self._forget_idle([request for request, _ in batch])
        return DecodeStep(self, batch)

    def _batch(self, rows: Many[Any], query_rows: int) -> list[tuple[Request, int]]:
        """The requests of a step with their query rows."""
        if isinstance(rows, (str, bytes)) or not hasattr(rows, "__len__"):
            raise InvalidArgument("rows", repr(rows), "a list of ids, or of pairs of an id and its query rows")
        info, found = self.cache.info, []
        for row in rows:
            pair = isinstance(row, tuple) and len(row) == 2
            id, width = row if pair else (row, query_rows)
            request, width = self[id], index(width, "query_rows", least=1)
            if width > info.query_rows:
                raise OutOfRange(f"request {id!r}: {width} query rows; the cache was made for {info.query_rows}")
            found.append((request, width))
        if not 0 < len(found) <= info.batch:
            raise OutOfRange(f"a step of {len(found)} requests; the cache was made for 1 to {info.batch} (batch)")
        seen: set[Hashable] = set()
        for request, _ in found:
            if request.id in seen:
                raise InvalidArgument("rows", f"request {request.id!r} twice", "each request once")
            seen.add(request.id)
        return found

    def _check_leader(self, layer: int) -> None:
        leader = self._layers[index(layer, "layer", len(self._layers) - 1)]
        if leader != layer:
            raise InvalidArgument("layer", str(layer), f"layer {leader}, which selects for it")

    def slab(self, layer: int, dtype: Any = None, *, run: int = 0) -> Any:
        """A layer's slab as a tensor, for attention that reads slots in place, without `DecodeStep.rows`.

        Args:
            layer: the layer.
            dtype: of the result, of NumPy or torch; None: uint8, NumPy's on a host device and torch's on a GPU.
            run: 0 or 1, of rows that have two.

        Returns:
            A view, `[slots, width]`; `[blocks, 64, width]` where the device pads blocks or rows have two runs. Write
            nothing to it.

        Raises:
            OutOfRange, InvalidArgument: no such layer or run, or a dtype that does not divide the row.
        """
        return self._view(library_of_dtype(dtype, self.cache.device.place), layer, run, dtype)

    def retire(self) -> None:
        """Waits until all finished steps have ended, on a device that works later.

        Raises:
            DeviceFailed: a step has failed. Its requests need `Request.crop`.
        """
        self._wait()
        if self._failures:
            raise self._told()

    def stats(self) -> ServingStats:
        """The present numbers.

        Raises:
            Busy, Closed: as `Cache.stats`.
        """
        self._collect()
        states = [request.state for request in self._by_id.values()]
        filling, parked = states.count(FILLING), states.count(PARKED)
        running = len(states) - filling - parked
        layers = self._counts.copy()
        return ServingStats(filling, running, parked, self._turn, self._forgotten, layers, self.cache.stats())

    def close(self) -> None:
        """Ends all requests; idempotent. An open step is abandoned.

        Raises:
            OutOfRange, Io: a request's selections could not be recorded. All requests have ended all the same.
        """
        if self._open is not None:
            self._open.abandon()
        for request in tuple(self._by_id.values()):
            try:
                self._note(request._end())
            except ForebayError as error:
                self._note(error)
        errors = tuple(self._unrecorded)
        self._unrecorded.clear()
        if errors:
            raise errors[0]

    def __enter__(self) -> Requests:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collect(self) -> None:
        """At the beginning of a call: takes back what ended work and forgotten requests hold."""
        while self._orphans:
            self._forget(self._orphans[0], "its owner was collected")
            self._orphans.popleft()
        self._hear()
        if self.cache.device.later:
            # Nothing else frees a closed sequence whose work outside of steps ended after the close.
            self.cache.reap(self._stream)

    def _eagerly(self, call: Callable[[], _T]) -> _T:
        """Makes a call that takes from a pool. If the pool has too little left while ended requests wait for their
        work, waits for that and makes it once more.
        """
        try:
            return call()
        except Exhausted:
            self._hear()
            if not self.cache.reap(self._stream):
                raise
        self._wait()
        self.cache.reap(self._stream)
        return call()

    def _forget(self, request: Request, why: str) -> None:
        if request.state == ENDED or request._ending:
            return
        request._why = why
        self._note(request._end())
        self._forgotten += 1

    def _note(self, error: ForebayError | None) -> None:
        """Notes an error of a request that no call of its own raises: `close` raises the first."""
        if error is not None:
            self._unrecorded.append(error)

    def _forget_idle(self, batch: list[Request]) -> None:
        """Before a step: ends requests that took part in too few."""
        for request in tuple(self._by_id.values()) if self._forget_after else ():
            idle = self._turn + 1 - request._seen > self._forget_after and request not in batch
            if idle and request.state in (RUNNING, FAILED):
                self._forget(request, f"it took part in none of the last {self._forget_after} steps")

    def _hear(self) -> None:
        """Retires the finished steps that have ended."""
        while self._flying and self._flying[0]._land(wait=False):
            self._flying.popleft()

    def _wait(self) -> None:
        """Waits for the device's work that requests have enqueued."""
        while self._flying:
            self._flying[0]._land(wait=True)
            self._flying.popleft()
        begun = self._enqueued
        self.cache.device.wait(self._stream)
        self._waited = begun

    def _told(self) -> ForebayError:
        """The first failure that no call has raised. Later ones follow from it."""
        error = self._failures[0]
        self._failures.clear()
        return error

    def _tell_failure(self, error: ForebayError | None) -> None:
        """Raises a failure, if no call has raised it."""
        if error is not None and error in self._failures:
            self._failures.remove(error)
            raise error

    def _ready(self) -> None:
        """Before the host reads or writes slabs: on a host device with threads, waits for the stream."""
        if self.cache.device.later and self.cache.device.place is HOST:
            self.cache.device.wait(self._stream)

    def _rows_of(
        self, layer: int, rows: Any, shape: tuple[int, ...] | None, place: Place | None
    ) -> tuple[Library, str, Any, int]:
        """Rows of a layer as bytes, `[count, row bytes]`, and their dtype, which the caller notes once it has used
        them; `shape`: their leading extents, None: one of any extent."""
        layer = index(layer, "layer", len(self._layers) - 1)
        library = library_of(rows, "rows", place)
        (dtype, size), given, width = item_of(library, rows), tuple(rows.shape), self.cache.info.row_bytes
        lead = given[:1] if shape is None else shape
        size *= math.prod(given[len(lead) :])
        if given[: len(lead)] != lead or not lead or size != width:
            extents = ", ".join(map(str, lead)) if shape is not None else "count"
            text = f"{dtype} {list(given)}, rows of {size} bytes"
            raise InvalidArgument("rows", text, f"[{extents}, ...] with rows of {width} bytes")
        before = self._dtypes[layer]
        if before not in (None, dtype):
            raise InvalidArgument("rows", dtype, f"{before}, as the earlier rows of layer {layer}")
        count = math.prod(lead)
        return library, dtype, library.bytes_of(rows, count) if count else rows, count

    def _view(self, library: Library, layer: int, run: int, dtype: Any) -> Any:
        """A layer's slab as numbers."""
        key = (library.name, layer, run, dtype)
        found = self._views.get(key)
        if found is None:
            try:
                found = library.view(self.cache.slab(layer, run), dtype)
            except (RuntimeError, ValueError) as error:
                if isinstance(error, ForebayError):
                    raise
                width = self.cache.shape.row_bytes[run]
                raise InvalidArgument("dtype", str(dtype), f"one whose size divides rows of {width} bytes") from error
            self._views[key] = found
        return found

    def _pool(self, layer: int) -> layout.Bytes:
        """A layer's rows in the total pool."""
        found = self._pools.get(layer)
        if found is None:
            found = self._pools[layer] = self.cache.rows(layer)
        return found

    def _work(self, library: Library, rows: int, query_rows: int) -> Work:
        """The selection and slots of a step's shape; every layer of every step reuses them."""
        key = (library.name, rows, query_rows)
        found = self._works.get(key)
        if found is None:
            room = self._rooms.get(library.name)
            if room is None:
                room = self._rooms[library.name] = Room(self.cache, library)
            found = self._works[key] = Work(self.cache, library, room, rows, query_rows)
        return found

    def _keys_view(self, library: Library, group: int) -> Any:
        """A group's index keys, `[tokens of all pages, bytes]`."""
        if not self.cache.info.index_key_bytes:
            raise InvalidState("index keys: the cache's shape has none (index_key_bytes)")
        layer = self.groups[index(group, "group", len(self.groups) - 1)]
        key = (library.name, "index keys", layer)
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = library.view(self.cache.index_keys(layer), None)
        return found

    def _put_index_keys(self, library: Library, group: int, keys: Any, places: Any) -> None:
        view, width = self._keys_view(library, group), self.cache.info.index_key_bytes
        if keys.shape[1] != width:
            raise InvalidArgument("keys", f"keys of {keys.shape[1]} bytes", f"keys of {width} bytes")
        self._ready()
        library.put(view, places, keys)

    def _index_keys(
        self, library: Library, dtype: Any, group: int, pages: layout.Numbers, start: int, end: int
    ) -> Any:
        view, tokens = self._keys_view(library, group), self.cache.info.page_tokens
        self._ready()
        found = list(layout.stretches(pages, tokens, start, end))
        if len(found) <= 1:
            first, _, count = found[0] if found else (0, 0, 0)
            rows = view[first : first + count]
        else:
            at = layout.places(pages, tokens, np.arange(start, end))
            rows = library.take(view, library.to_device(at, self.cache.device.place), None)
        return rows if dtype is None else rows.view(dtype)

    def __repr__(self) -> str:
        return f"<forebay.serving.Requests: {len(self._by_id)} of {self.cache!r}>"


def _note(orphans: deque[Request], request: weakref.ref[Request], _owner: object) -> None:
    """Called by the garbage collector when an owner is gone."""
    found = request()
    if found is not None:
        orphans.append(found)
