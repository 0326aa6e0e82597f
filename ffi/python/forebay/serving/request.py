"""A request: from its first chunk to its end.

    filling ──join──> running ──park──> parked ──resume──> running
       └──────────────────│───park─────────^
                          └─ a step fails ──> failed ──crop──> running

The engine states two things: rows of its prompt, and the number of tokens that count. The rest follows. A request joins
when it first takes part in a step, and resumes when it next does so after it was parked. `length` counts every row of
the last step as accepted until `crop` says otherwise. The library hears of it when the next step is prepared, or when
another call needs to know.

**Waiting.** On a device that works later, a request cannot be truncated, parked or forked while work of it is in
flight. Such a call waits once for the streams on which work was enqueued. It never polls.
"""

from __future__ import annotations

import functools
import weakref
from contextlib import contextmanager, suppress
from typing import Any, Callable, Hashable, Iterator, Sequence as Many, TypeVar

import numpy as np

from ..errors import Busy, Closed, ForebayError, InvalidArgument, InvalidState, OutOfRange, counted
from ..sequence import Sequence
from ..tensors import HOST, index
from . import layout, recording, requests as _requests
from .failures import naming
from .tensors import INTEGERS, NUMPY, Library, item_of, check_divides, library_of, library_of_dtype

FILLING, RUNNING, PARKED, FAILED, ENDED = "filling", "running", "parked", "failed", "ended"
# Positions of a warm-up.
_WARM_MOST = 8
_T = TypeVar("_T")


class Request:
    """A request of an engine. `Requests.add` and `fork` make it.

    Attributes:
        id: the engine's id.
        promised: tokens that it may decode after its prompt; None: as many as the cache's `max_tokens` leaves.
        state: "filling", "running", "parked", "failed" (a step of it failed: `crop` it) or "ended".
    """

    def __init__(
        self,
        requests: _requests.Requests,
        id: Hashable,
        sequence: Sequence,
        promised: int | None,
        prompt: int,
        admitted: int,
    ) -> None:
        self.id, self.promised, self.state = id, promised, FILLING
        self._requests, self._sequence = requests, sequence
        # Tokens that count; of them, those that the library has committed; rows of the last step after those.
        self._length = self._committed = self._landed = 0
        # Tokens of the prompt and in all that the library has admitted; prompt rows of each layer.
        self._prompt, self._admitted = prompt, admitted
        self._filled = [sequence.shared] * requests.cache.info.layers
        # The number of the last work on the device that writes its rows.
        self._touched = 0
        # The last step that it took part in, or the one before its first.
        self._seen = requests._turn
        self._pages: tuple[layout.Numbers, layout.Numbers] | None = None
        self._landing: layout.Numbers | None = None
        self._owner: weakref.ref[Any] | None = None
        self._recording: recording.Recording | None = None
        # What its recording could not take: raised by its next call, or by its end.
        self._unrecorded: ForebayError | None = None
        # The failure of its last step.
        self._failure: ForebayError | None = None
        # Leading tokens in pages that others may have too.
        self._common = sequence.shared
        # Whether it may still be warmed up: it has neither joined nor parked.
        self._fresh = True
        # Whether the device refused a join half-way, and whether `end` waits for the open step.
        self._half = self._ending = False
        # For each layer that selects, what the last positions of the prompt selected.
        self._warm: dict[int, np.ndarray[Any, Any]] = {}
        self._warm_library: Library = NUMPY
        self._why = "it was ended"

    @property
    def length(self) -> int:
        """Tokens that count: the prompt, and the decoded ones without those that were cropped. While a prompt arrives,
        up to the end of the chunk that any layer has."""
        return self._length

    @property
    def shared(self) -> int:
        """Leading tokens of the prompt whose rows another request has published: `prefill` goes on after them."""
        return self._sequence.shared

    @property
    def admitted(self) -> int:
        """Tokens that it may have so far: those of its prompt, and those that were promised after it. `prefill`,
        `admit` and `promise` admit more."""
        return self._admitted

    def filled(self, layer: int) -> int:
        """Prompt rows that a layer has.

        Raises:
            InvalidArgument: no such layer.
        """
        return self._filled[index(layer, "layer", len(self._filled) - 1)]

    def prefill(self, layer: int, rows: Any) -> None:
        """Appends a chunk of the prompt to one layer. Layers come in any order, the chunks of a layer in token order.

        The first layer that brings a chunk admits it: the library takes the pages of the longer prompt, and slots. A
        running request is parked first, so its next turn goes on in the same way.

        Args:
            layer: the layer.
            rows: `[count, ...]` of any dtype, whose rows have as many bytes as the cache's rows: a NumPy array or torch
                tensor. One of a GPU is copied to the host.

        Raises:
            InvalidArgument: rows of another width, or of another dtype than the layer's earlier rows.
            OutOfRange: more tokens than the cache's `max_tokens`.
            Exhausted: names the pool that has too little left; nothing was taken. A running request may be parked.
            InvalidState: the request is in the open step, or a step of it failed.
            Closed: the request has ended.
        """
        with naming(self.id):
            self._check_free("prefill")
            library, dtype, given, count = self._requests._rows_of(layer, rows, None, None)
            if not count:
                return
            before = self._length if self.state == RUNNING else self._filled[layer]
            self._check_fits(before + count, self.promised or 0)
            if self.state == RUNNING or self._half:
                self._park()
            total = self._filled[layer] + count
            if total > self._prompt:
                self._extend(total, self.promised)
            self._sequence.append(layer, library.to_host(given))
            self._requests._dtypes[layer] = dtype
            self._filled[layer] = total
            self._length = max(self._length, total)

    def admit(self, tokens: int) -> None:
        """Admits the next chunk of the prompt, of `tokens` tokens, before a layer brings it: for index keys that are
        written before the layers' rows (`put_index_keys`). A running request is parked first. `prefill` by itself
        admits what was not.

        Raises:
            OutOfRange, Exhausted, InvalidState, Closed: as `prefill`.
        """
        with naming(self.id):
            self._check_free("admit")
            total = self._length + index(tokens, "tokens")
            self._check_fits(total, self.promised or 0)
            if self.state == RUNNING or self._half:
                self._park()
            if total > self._prompt:
                self._extend(total, self.promised)

    def promise(self, tokens: int) -> None:
        """Lets the request decode `tokens` more tokens from its present length on. A running request is parked first.

        Raises:
            OutOfRange: more tokens than the cache's `max_tokens`.
            Exhausted: names the pool that has too little left; nothing was taken. A running request may be parked.
            InvalidState, Closed: as `prefill`.
        """
        with naming(self.id):
            self._check_free("promise")
            promised = index(tokens, "tokens")
            self._check_fits(self._length if self.state == RUNNING else max(self._prompt, self._length), promised)
            if self.state == RUNNING or self._half:
                self._park()
            self._extend(max(self._prompt, self._length), promised)
            self.promised = promised

    def _check_fits(self, prompt: int, promised: int) -> None:
        """Refuses more tokens than the cache admits, before anything changes."""
        most = self._requests.cache.info.max_tokens
        if prompt + promised > most:
            given = counted(prompt, "token") + (f" and {promised} promised" if promised else "")
            raise OutOfRange(f"{given}: the cache admits {most} a request (max_tokens)")

    def _extend(self, prompt: int, promised: int | None) -> None:
        """Makes room for a prompt of `prompt` tokens, and `promised` after it; None: as many as are left."""
        if promised is None:
            promised = max(self._requests.cache.info.max_tokens - prompt, 0)
        # What was promised stays promised.
        promised = max(promised, self._admitted - prompt)
        self._requests._eagerly(lambda: self._sequence.extend(prompt=prompt, promised=promised))
        self._prompt, self._admitted, self._pages = prompt, prompt + promised, None

    def read(
        self, layer: int, start: int = 0, end: int | None = None, *, dtype: Any = None, out: Any = None
    ) -> Any:
        """Copies rows from the total pool, for the attention of a prefill: the rows of tokens `start` to `end` of one
        layer, `[end - start, bytes]`, in host memory. Full pages that follow each other are copied at once.

        Args:
            layer: the layer.
            start, end: the tokens; None: all that the layer has.
            dtype: of the result, of NumPy or torch; None: NumPy's uint8.
            out: the destination, in host memory and C-contiguous; its dtype does not matter. None: a new tensor.

        Raises:
            OutOfRange: tokens that the layer does not have.
            InvalidArgument: `out` of another size or in another memory; a dtype that does not divide the row.
            Closed: the request has ended.
        """
        with naming(self.id):
            self._check_open("read")
            have = self.filled(layer) if self.state in (FILLING, PARKED) else self._length
            start, end = index(start, "start"), have if end is None else index(end, "end")
            if not start <= end <= have:
                raise OutOfRange(f"rows {start} to {end} of layer {layer}, which has {have}")
            if self._touched > self._requests._waited:
                self._requests._wait()
            width, count = self._requests.cache.info.row_bytes, end - start
            library = library_of_dtype(dtype) if out is None else library_of(out, "out", HOST)
            check_divides(library, dtype, width)
            if out is None:
                room = np.empty((count, width), np.uint8)
            else:
                room = np.asarray(library.host_bytes(out, count))
                if room.shape != (count, width):
                    raise InvalidArgument("out", f"{room.nbytes} bytes", f"{count * width}: {count} rows of {width}")
            pages = self._page_table()[0]
            layout.read(self._requests._pool(layer), pages, start, end, room)
            return library.of_numpy(room, dtype) if out is None else out

    def put_index_keys(self, group: int, keys: Any, start: int = 0) -> None:
        """Writes index keys of the prompt to forebay's pages on the device.

        Args:
            group: the index group: the layers that select, counted from 0.
            keys: `[count, ...]` of any dtype, with as many bytes each as the cache's index keys, on the cache's device.
            start: the first key's token.

        Raises:
            InvalidArgument: keys of another width or in another memory.
            OutOfRange: no such group, or tokens beyond the admitted ones: `admit` them first.
            InvalidState: tokens in pages that were shared, published or forked, so that others may read them.
            Closed: the request has ended.
        """
        with naming(self.id):
            self._check_open("put_index_keys")
            library = library_of(keys, "keys", self._requests.cache.device.place)
            count, start = int(keys.shape[0]), index(start, "start")
            if not count:
                return
            if self.state == RUNNING and self._length < self._committed:
                # Its pages beyond its length may be those of a fork too, until it is truncated.
                self._check_apart("put_index_keys")
                self._truncate(self._length)
            if start < self._common:
                given = f"index keys from token {start} on: the first {self._common} are in pages"
                raise InvalidState(f"{given} that other requests may share")
            places = self._index_places(np.arange(start, start + count))
            at = library.to_device(places, self._requests.cache.device.place)
            self._requests._put_index_keys(library, group, library.bytes_of(keys, count), at)

    def index_keys(self, group: int, start: int = 0, end: int | None = None, *, dtype: Any = None) -> Any:
        """The index keys of tokens `start` to `end`, `[end - start, bytes]` on the cache's device: a view if the pages
        follow each other, otherwise a copy by one gather.

        Args:
            group: the index group.
            start, end: the tokens; None: `length`.
            dtype: of the result, of NumPy or torch; None: uint8, NumPy's on a host device and torch's on a GPU.

        Raises:
            OutOfRange: no such group, or tokens beyond the admitted ones.
            Closed: the request has ended.
        """
        with naming(self.id):
            self._check_open("index_keys")
            start, end = index(start, "start"), self._length if end is None else index(end, "end")
            self._check_admitted(max(end, start))
            library = library_of_dtype(dtype, self._requests.cache.device.place)
            check_divides(library, dtype, self._requests.cache.shape.index_key_bytes)
            return self._requests._index_keys(library, dtype, group, self._page_table()[1], start, end)

    def _index_places(self, positions: layout.Numbers) -> layout.Numbers:
        """Where the index keys of positions are in a group's pages."""
        self._check_admitted(int(positions.max(initial=-1)) + 1)
        return layout.places(self._page_table()[1], self._requests.cache.info.page_tokens, positions)

    def _check_admitted(self, tokens: int) -> None:
        room = len(self._page_table()[1]) * self._requests.cache.info.page_tokens
        if tokens > room:
            raise OutOfRange(f"token {tokens - 1}: pages are admitted for {room} tokens")

    def crop(self, length: int) -> None:
        """States that only the first `length` tokens count: rejects drafts of the last step, or gives up more.

        Rows of a prompt may be cropped too, before the first step: drafts that arrived with it. After a failed step the
        length is at most what was committed before it (`length`).

        Raises:
            OutOfRange: a length above `length`.
            Exhausted: others share the page in which it would end, and no page is free for a copy, or no lane for a
                parked request, which then resumes. Crop it again later.
            InvalidState: the request is in the open step.
            Closed: the request has ended.
        """
        with naming(self.id):
            self._check_open("crop")
            self._check_apart("crop")
            self._requests._hear()
            self._requests._tell_failure(self._failure)
            self._failure = None
            self._tell()
            kept = index(length, "length")
            if kept > self._length:
                raise OutOfRange(f"crop to {kept} tokens: only {self._length} count")
            if self.state == RUNNING:
                self._length = kept
                return
            if self.state == FAILED or kept < max(self._length, min(self._prompt, self._length + 1)):
                self._crop_at_rest(kept)

    def _crop_at_rest(self, length: int) -> None:
        """Crops a request that no step uses."""
        requests = self._requests
        try:
            self._truncate(length)
            return
        except InvalidState:
            if self.state == FAILED:
                raise
        # Others share the page in which it would end: perhaps only a fork whose copy of it has ended.
        requests._wait()
        requests.cache.reap(requests._stream)
        try:
            self._truncate(length)
        except InvalidState:
            # The next step of a running request replaces the page by a copy.
            least = min(self._filled)
            if least < self._prompt:
                self._truncate(least)
            self._bring()
            self._length = length

    def _truncate(self, length: int) -> None:
        """Truncates the library's sequence, which then has no landed rows."""
        truncate = self._sequence.truncate
        self._patiently(lambda: self._requests._eagerly(lambda: truncate(length, self._requests._stream)))
        self._account(length)
        self._length = self._committed = length
        self._landed, self._pages = 0, None
        page = self._requests.cache.info.page_tokens
        self._common = min(self._common, length // page * page)
        if self.state == FAILED:
            self.state = RUNNING
        elif self.state != RUNNING:
            self._prompt = length
            self._filled = [min(filled, length) for filled in self._filled]

    def park(self) -> None:
        """Gives back lane and slots and keeps the rows, for a request that has to wait. It resumes at its next step.
        Meanwhile its prompt may go on to arrive.

        Raises:
            InvalidState: a step of it failed, or it is in the open step.
            Exhausted: as many sequences are parked as the cache was made for.
            Closed: the request has ended.
        """
        with naming(self.id):
            self._check_free("park")
            if self.state != PARKED:
                self._park()

    def _park(self) -> None:
        if self._half:
            self._bring()
        if self.state == RUNNING and self._length < self._committed:
            self._truncate(self._length)
        accepted = self._length - self._committed if self.state == RUNNING else 0
        with self._settled(joins=False):
            self._patiently(lambda: self._sequence.park(accepted, self._requests._stream))

    @contextmanager
    def _settled(self, joins: bool) -> Iterator[None]:
        """Takes over the state in which a call left the library's sequence, also one that the device refused half-way,
        or that an interrupt ended. InvalidState changes nothing.
        """
        try:
            yield
        except InvalidState:
            raise
        except BaseException:
            with suppress(ForebayError):
                self._settle()
                self._half = joins and self.state == FILLING
            raise
        self._settle()

    def _settle(self) -> None:
        found = self._sequence.length
        state = RUNNING if found.running else PARKED if found.parked else FILLING
        if self.state == RUNNING and state != RUNNING:
            # All its tokens are a prompt now. The library has accepted the last step's rows.
            self._account(self._length)
            self._prompt, self._filled = self._length, [self._length] * len(self._filled)
            self._landed = 0
        if state != self.state:
            self.state, self._committed = state, self._length
            self._landing = None
        self._half, self._fresh = False, False

    def resume(self) -> None:
        """Takes a lane and slots again. A step does so by itself.

        Raises:
            Exhausted: no lane or too few slots are free; the request stays parked.
            InvalidState: the prompt is not complete, or it is in the open step.
            Closed: the request has ended.
        """
        with naming(self.id):
            self._check_free("resume")
            self._bring()

    def _bring(self) -> None:
        """Makes the request take part in steps."""
        if self.state not in (FILLING, PARKED):
            return
        self._check_filled()
        enter = self._join if self.state == FILLING else self._resume
        with self._settled(joins=True):
            self._patiently(lambda: self._requests._eagerly(enter))
        self._warm.clear()

    def _resume(self) -> None:
        self._sequence.resume(self._requests._stream)

    def _join(self) -> None:
        stream = self._requests._stream
        try:
            self._sequence.join(stream, warm_up=self._warmed())
        except InvalidState:
            if not self._half:
                raise
            # The join that the device refused had come as far as its gather.
            self._sequence.join_more(stream)

    def warm_up(self, layer: int, selection: Any) -> None:
        """States what the last positions of the prompt selected in a layer: the join makes these rows resident, so that
        the first step finds them. Without it, a request whose slots do not hold its whole prompt begins without rows.

        Args:
            layer: a layer that selects; its last call before the first step counts.
            selection: int32 or int64 `[positions, k]`, the newest position last, -1 for none. The last 8 are used.

        Raises:
            InvalidArgument: a tensor of another dtype or shape, or a layer that another one selects for.
            InvalidState: it has joined, or was parked before: then it resumes with the rows that it selected last.
            Closed: the request has ended.
        """
        with naming(self.id):
            self._check_free("warm_up")
            self._requests._check_leader(layer)
            if not self._fresh:
                raise InvalidState("warm_up: it has joined or was parked, and resumes with what it selected last")
            library = library_of(selection, "selection")
            dtype, shape, top_k = item_of(library, selection)[0], selection.shape, self._requests.cache.info.top_k
            if dtype not in INTEGERS or len(shape) != 2 or shape[1] > top_k:
                expected = f"int32 or int64 [positions, {top_k} or fewer]"
                raise InvalidArgument("selection", f"{dtype} {list(shape)}", expected)
            self._warm[layer] = library.to_numpy(selection[-_WARM_MOST:]).astype(np.int32)
            self._warm_library = library

    def _warmed(self) -> Any:
        """The warm-up of the join, on the device; None without one."""
        steps = max((len(selection) for selection in self._warm.values()), default=0)
        if not steps:
            return None
        info, groups = self._requests.cache.info, self._requests.groups
        given = np.full((info.index_groups, steps, info.top_k), -1, np.int32)
        for layer, selection in self._warm.items():
            given[groups.index(layer), steps - len(selection) :, : selection.shape[1]] = selection
        return self._warm_library.to_device(given, self._requests.cache.device.place)

    def _check_filled(self) -> None:
        least = min(self._filled)
        if least < self._prompt:
            layer = self._filled.index(least)
            raise InvalidState(f"layer {layer} has {least} of {self._prompt} prompt rows: prefill the rest")

    def fork(
        self,
        id: Hashable,
        *,
        promised: int | None = None,
        ratio: float | None = None,
        slots: int | Many[int] | None = None,
        owner: object = None,
    ) -> Request:
        """A new request that begins as a copy of this one: a beam, or one of several answers. Full pages are shared.

        Args:
            id: the new request's id.
            promised: tokens that it may decode; None: as many as this one still may.
            ratio, slots, owner: as in `Requests.add`; None: as `Requests` was made.

        Raises:
            InvalidArgument: the id is in use.
            InvalidState: the prompt is not complete, a step of it failed, or it is in the open step.
            Exhausted: names the pool that has too little left; nothing was taken.
            Closed: the request has ended.
        """
        requests = self._requests
        with naming(self.id):
            self._check_free("fork")
            requests._check_new(id, owner)
            self._bring()
            if self._landed or self._length < self._committed:
                self._truncate(self._length)
            left = max(self._admitted - self._length, 0) if promised is None else index(promised, "promised")
            budget = requests._budget(ratio, slots)
            fork = functools.partial(self._sequence.fork, promised=left, stream=requests._stream, **budget)
            child, _ticket = self._patiently(lambda: requests._eagerly(fork))
        own = self.promised if promised is None else promised
        made = Request(requests, id, child, own, self._length, self._length + left)
        made.state, made._length, made._committed, made._touched = RUNNING, self._length, self._length, self._touched
        made._filled = [self._length] * len(self._filled)
        page = requests.cache.info.page_tokens
        self._common = made._common = max(self._common, self._length // page * page)
        return requests._enter(made, owner)

    def publish(self, tokens: Any, *, keys: Any = None) -> int:
        """Publishes full pages, so that requests with the same beginning share them (`Requests.add(tokens=...)`).

        Args:
            tokens: the token ids from the beginning, as far as they are known.
            keys: as in `forebay.Cache.open`, for the pages of `tokens`.

        Returns:
            Tokens of the request's published pages.

        Raises:
            InvalidState: the request was added without `tokens`, or its prompt is not complete.
            As `forebay.Sequence.publish`.
        """
        with naming(self.id):
            self._check_free("publish")
            self._bring()
            if self._landed or self._length < self._committed:
                self._truncate(self._length)
            start, page = self._sequence.length.published, self._requests.cache.info.page_tokens
            later = None if keys is None else keys[start // page :]
            published = self._patiently(lambda: self._sequence.publish(start, tokens[start:], keys=later))
            self._common = max(self._common, published)
            return published

    def end(self) -> None:
        """Ends the request; idempotent. Its pages, slots and lane are free when its last step has ended. In the open
        step it takes part to that step's end, and ends then.

        Raises:
            OutOfRange, Io: its recording could not take its selections. It has ended all the same.
        """
        error = self._end()
        if error is not None:
            raise error

    def _end(self) -> ForebayError | None:
        """Ends the request; returns what its recording could not take."""
        step = self._requests._open
        if self.state == ENDED:
            return None
        if step is not None and self in step.requests:
            self._ending = True
            return None
        with naming(self.id):
            self._sequence.close(self._requests._stream)
        if self.state != FAILED:
            self._account(self._length)
        self.state = ENDED
        self._requests._leave(self)
        self._record(lambda kept: kept.finish())
        self._recording = None
        return self._unrecorded

    def _account(self, length: int) -> None:
        """Records the selections of the last step's rows that count."""
        self._record(lambda kept: kept.accept(length))

    def _record(self, call: Callable[[recording.Recording], None]) -> None:
        """Makes a call on the recording, which ends with its first error. The error is the request's own matter: no
        call fails for it that concerns others.
        """
        if self._recording is None:
            return
        try:
            call(self._recording)
        except ForebayError as error:
            with suppress(ForebayError):
                self._recording.finish()
            self._recording, self._unrecorded = None, error

    def recording_error(self) -> ForebayError | None:
        """The error with which its recording ended, once. An engine in which no call may fail for it asks before each
        call; otherwise the next call raises it, or `end`."""
        error, self._unrecorded = self._unrecorded, None
        return error

    def _tell(self) -> None:
        """Raises once what its recording could not take."""
        error = self.recording_error()
        if error is not None:
            raise error

    def _accepted(self, width: int) -> int:
        """Prepares for a step of `width` rows: how many rows of the last step were accepted."""
        self._check_open("step")
        if self.state == FAILED:
            raise InvalidState(f"a step of it failed: crop it, to at most {self._length} tokens")
        info = self._requests.cache.info
        # The library keeps room for the drafts of steps in flight.
        if self._length + width > self._admitted + info.query_rows * info.steps_in_flight:
            given = f"{counted(width, 'row')} at {self._length} tokens"
            raise OutOfRange(f"{given}: it was admitted for {self._admitted}; promise it more, or end it")
        self._bring()
        if self._length < self._committed:
            self._truncate(self._length)
        return self._length - self._committed

    def _fail(self, error: ForebayError | None = None) -> None:
        """Notes that a step of it failed."""
        if self.state == ENDED:
            return
        self._failure = error
        self.state, self._landed = FAILED, 0
        self._account(0)
        self._length = self._committed = min(self._sequence.length.committed, self._length)

    def _landing_slots(self) -> layout.Numbers:
        """The slots of its new rows, of all query rows that a step may have. They are those of its lane."""
        if self._landing is None:
            rows = range(self._requests.cache.query_rows)
            self._landing = np.array([self._sequence.landing_slot(row) for row in rows], np.int64)
        return self._landing

    def _page_table(self) -> tuple[layout.Numbers, layout.Numbers]:
        """Its pages of rows, and of index keys."""
        if self._pages is None:
            pages = np.array(self._sequence.pages(), np.int64).reshape(-1, 2)
            self._pages = (np.ascontiguousarray(pages[:, 0]), np.ascontiguousarray(pages[:, 1]))
        return self._pages

    def _patiently(self, call: Callable[[], _T]) -> _T:
        """Makes a call that needs the request to be idle. If work of it is in flight, waits once for its streams."""
        try:
            self._touch()
            return call()
        except Busy:
            self._requests._wait()
            self._touch()
            return call()

    def _touch(self) -> None:
        """Notes that work which writes its rows is about to be enqueued."""
        self._requests._enqueued += 1
        self._touched = self._requests._enqueued

    def _check_open(self, what: str) -> None:
        if self.state == ENDED:
            raise Closed(f"{what}: {self._why}")

    def _check_apart(self, what: str) -> None:
        """Refuses a request of the open step."""
        step = self._requests._open
        if step is not None and self in step.requests:
            raise InvalidState(f"{what}: it is in the open step; finish that first")

    def _check_free(self, what: str) -> None:
        self._requests._collect()
        self._check_open(what)
        self._check_apart(what)
        if self.state == FAILED:
            raise InvalidState(f"{what}: a step of it failed; crop it, to at most {self._length} tokens")
        self._tell()

    def __repr__(self) -> str:
        return f"<forebay.serving.Request {self.id!r}: {self.state}, {counted(self._length, 'token')}>"
