"""A sequence, from its prompt to its end."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence as Many, Union

import numpy as np

from . import cache as _cache
from ._library import NULL, cell, check, fail, ffi, lib, sized, status_text
from .arrays import Tensor
from .config import set_budget
from .dlpack import Placed
from .errors import InvalidArgument, counted, error_of
from .keep import NOT_LET_IN
from .lifetime import SequenceBase
from .tensors import BYTES_MAX, HOST, Place, checked, describe, index, look, words

TokenKeys = Optional[Many[Union[bytes, None]]]
BRING_UP = {"whole": lib.FB_BRING_UP_WHOLE, "nothing": lib.FB_BRING_UP_NOTHING}
_KEY_BYTES = 16


class Length(NamedTuple):
    """The lengths of a sequence, in tokens."""

    # Committed, as far as the host can see from retired steps and from work that the library enqueued.
    committed: int
    # Rows that the last retired step wrote after them, neither accepted nor rejected yet.
    landed: int
    # Tokens of the sequence's published pages.
    published: int
    # Whether it has joined and may take part in steps.
    running: bool
    # Whether it is parked (`Sequence.park`).
    parked: bool
    # Prompt rows that every layer has. While it is parked, all its tokens are a prompt.
    filled: int
    # Whether it is arriving (`Cache.arrive`): it has pages, and neither a lane nor slots.
    arriving: bool = False


class Page(NamedTuple):
    """A page of a sequence: its page of rows in the total pool, and its page of index keys on the device."""

    host: int
    index_keys: int


class Ticket:
    """The completion of work that the library has enqueued."""

    def __init__(self) -> None:
        # Made before the call that fills it: see `forebay.keep`.
        self._made, self._end = cell(self, "fb_ticket **", lib.fb_ticket_destroy)

    @property
    def _is_made(self) -> bool:
        """Whether the call has given the ticket; until then it is unknown whether that call enqueues anything."""
        return bool(self._made[0] != NULL)

    @property
    def outcome(self) -> str:
        """"pending", "done", "failed" or "cancelled". It does not change again once it is not pending."""
        return self._ask()[0]

    @property
    def done(self) -> bool:
        """Whether the work has succeeded.

        Raises:
            ForebayError: the work failed or was cancelled; the class is that of the failure.
        """
        outcome, status = self._ask()
        if outcome in ("failed", "cancelled"):
            raise error_of(status or int(lib.FB_CANCELLED), f"ticket: {status_text(status)}")
        return outcome == "done"

    def _ask(self) -> tuple[str, int]:
        pointer, outcome, status = self._made[0], ffi.new("uint32_t *"), ffi.new("uint32_t *")
        if not self._is_made:
            return "pending", 0
        check(lib.fb_ticket_outcome(pointer, outcome, status), pointer)
        names = {
            lib.FB_TICKET_PENDING: "pending",
            lib.FB_TICKET_DONE: "done",
            lib.FB_TICKET_FAILED: "failed",
            lib.FB_TICKET_CANCELLED: "cancelled",
        }
        return names[outcome[0]], int(status[0])


class Sequence(SequenceBase):
    """A sequence of a cache; a context manager that closes itself. `Cache.open`, `Cache.arrive` and `fork` make it.

    Attributes:
        cache: the sequence's cache.
        shared: tokens of its prompt in shared published pages; `append` continues after them.
    """

    cache: _cache.Cache

    def __init__(self, cache: _cache.Cache, number: int, shared: int = 0, arrives: bool = False) -> None:
        super().__init__(cache, number, arrives)
        self.shared = int(shared)

    def append(self, layer: int, rows: Tensor) -> None:
        """Appends prompt rows to one layer. Layers fill independently, each in token order.

        Args:
            layer: the layer.
            rows: `[count, ...]` of any dtype, whose rows have as many bytes as the cache's rows, run 0 then run 1; in
                host memory, C-contiguous.

        Raises:
            InvalidArgument, OutOfRange, InvalidState (the sequence has joined), Closed: nothing is written.
        """
        found = _packed(rows, "rows", self.cache.info.row_bytes, HOST)
        address, which = ffi.cast("void *", found.address), index(layer, "layer")
        check(lib.fb_append(self._pointer, self._number, which, address, found.shape[0]), self._pointer)

    def append_in_place(self, count: int) -> None:
        """Declares that `count` prompt rows of every layer are already in the total pool, or that their bytes are not
        needed.

        Raises:
            OutOfRange: rows beyond the prompt.
            InvalidState: the sequence has joined.
            InvalidArgument, Closed.
        """
        check(lib.fb_append_in_place(self._pointer, self._number, index(count, "count")), self._pointer)

    def append_layer_in_place(self, layer: int, count: int) -> None:
        """Declares that `count` more prompt rows of one layer are already in the total pool, as `append_in_place` does
        for every layer: for a transfer that brings a sequence layer by layer.

        Raises:
            OutOfRange: no such layer, or rows beyond the prompt.
            InvalidState: the sequence has joined.
            InvalidArgument, Closed.
        """
        which, rows = index(layer, "layer"), index(count, "count")
        check(lib.fb_append_layer_in_place(self._pointer, self._number, which, rows), self._pointer)

    def place_index_keys(self, layer: int, first: int, keys: Tensor, stream: Any = None) -> Ticket:
        """Copies index keys of a layer to the pages of a sequence that arrives, or that arrived and is parked. The join
        waits for the copy. Keys in place may be placed again, but not those of tokens that the sequence shares or had
        when it was parked.

        Args:
            layer: a layer with index keys of its own.
            first: the first token; not beyond the keys that are in place.
            keys: `[count, ...]` of any dtype, on the device, C-contiguous: each has as many bytes as an index key. The
                last page may be given whole. The cache keeps it alive until the ticket has ended; do not change it
                before.
            stream: see the device. It must be ordered after the work that writes `keys`.

        Raises:
            InvalidState: the sequence did not arrive, or has joined and is not parked.
            OutOfRange: no such layer, keys beyond the last page of the prompt, or another `first`.
            DeviceFailed: an earlier copy failed; or the device refuses this one half-way, then the keys from `first` on
                count no more: place them again.
            InvalidArgument, Closed.
        """
        on, which, begin = self.cache.device.stream_of(stream), index(layer, "layer"), index(first, "first")
        self.cache._record.make_up()
        width = self.cache.info.index_key_bytes
        found = _packed(keys, "keys", width, self.cache.device.place)
        address, size = ffi.cast("void *", found.address), found.shape[0] * width
        ticket = self._hold(keys, found)
        status = lib.fb_place_index_keys(self._pointer, self._number, which, begin, address, size, on, ticket._made)
        self._joined(ticket, status)
        return ticket

    def index_keys_in_place(self, layer: int, count: int) -> None:
        """Declares that the index keys of `count` more tokens of a layer are in place (`Cache.index_keys`, `pages`): a
        transfer or a kernel of the engine wrote them, and the stream of the join is ordered after that.

        Raises:
            OutOfRange: no such layer, or keys beyond the prompt.
            InvalidState: as `place_index_keys`.
            InvalidArgument, Closed.
        """
        which, keys = index(layer, "layer"), index(count, "count")
        check(lib.fb_index_keys_in_place(self._pointer, self._number, which, keys), self._pointer)

    def extend(self, *, prompt: int, promised: int = 0) -> None:
        """Admits more tokens, before the sequence has joined or while it is parked, for prompts that arrive in chunks.

        Args:
            prompt: tokens of the prompt in all, not fewer than before.
            promised: tokens that it may decode after them. The sum may not become smaller either. A budget that was
                given as a ratio is that ratio of the new sum.

        Raises:
            Exhausted: names the pool that has too little left.
            OutOfRange: fewer tokens than before, or more than the cache's `max_tokens`.
            InvalidState: the sequence has joined and is not parked.
            InvalidArgument, Closed. After all of these nothing has changed.
        """
        tokens = index(prompt, "prompt"), index(promised, "promised")
        check(lib.fb_extend(self._pointer, self._number, *tokens), self._pointer)

    def park(self, accepted: int = 0, stream: Any = None) -> None:
        """Parks the sequence, for example to preempt it: its lane and slots are free for others at once, and its pages
        stay. `resume` brings it back without computing a row again.

        Until then the sequence is a prompt: it can be extended, appended to (the next turn of a conversation),
        truncated and closed. The device notes the rows that it selected last, in the order of `stream`.

        Args:
            accepted: how many rows of its last step count, as in `Cache.prepare`; the others are rejected. 0 before it
                has joined.
            stream: see the device.

        Raises:
            Exhausted: as many sequences are parked as the cache's `parked`.
            Busy: work of the sequence is in flight.
            InvalidState: it is joining, or its step failed (`truncate` it first).
            OutOfRange: more accepted rows than landed.
            InvalidArgument, Closed. After all of these nothing has changed.
        """
        self.cache._record.make_up()
        on, count = self.cache.device.stream_of(stream), index(accepted, "accepted")
        check(lib.fb_park(self._pointer, self._number, count, on), self._pointer)

    def resume(self, stream: Any = None, *, bytes_a_call: int = 0) -> Ticket:
        """Resumes a parked sequence: takes a lane and slots, and joins with the rows that it selected last before it
        was parked. Steps on any stream wait for this work without further calls.

        Args:
            stream: see the device.
            bytes_a_call: the most bytes that one call gathers; 0 for no bound. `join_more` gathers the rest.

        Raises:
            Exhausted: names lanes or slot blocks.
            InvalidState: the sequence is not parked, or a layer lacks rows of its prompt.
            Busy: as `join`.
            InvalidArgument, Closed. After all of these nothing has changed.
        """
        self.cache._record.make_up()
        on, limit = self.cache.device.stream_of(stream), index(bytes_a_call, "bytes_a_call", BYTES_MAX)
        ticket = Ticket()
        check(lib.fb_resume(self._pointer, self._number, limit, on, ticket._made), self._pointer)
        return ticket

    def join(self, stream: Any = None, *, warm_up: Tensor | None = None, bytes_a_call: int = 0) -> Ticket:
        """Joins the sequence to its lane, once every layer has its whole prompt.

        It decides which rows are resident: first all of them, if `bring_up` asked for it at the opening and they fit,
        then, by the rule, the rows that the selections of `warm_up` name. It gathers these rows, up to `bytes_a_call`;
        `join_more` gathers the rest. All of it is enqueued on `stream`. Steps on any stream wait for it without further
        calls. A program need not use the ticket, which reports the end of the work and its outcome.

        Args:
            stream: see the device. It must be ordered after the work that writes `warm_up`, and after a prefill that
                writes the prompt's rows in place on the device.
            warm_up: the selections of the last prompt positions, oldest first: int32 `[index groups, steps, top_k]` on
                the device, -1 for none. The cache keeps it alive until the ticket has ended; do not change it before.
                It is a hint: a position at or beyond the prompt's length loads nothing.
            bytes_a_call: the most bytes that one call gathers; 0 for no bound.

        Raises:
            InvalidState: a layer's prompt is incomplete, or the sequence has already joined.
            Busy: in a cache with `share`, while the slots that it needs belong to sequences in open steps, or to some
                whose last resize has not run. Nothing has changed.
            InvalidArgument, Closed.
        """
        on = self.cache.device.stream_of(stream)
        self.cache._record.make_up()
        config, selections = NULL, None
        if warm_up is not None or bytes_a_call:
            config = sized("fb_warm_up")
            config.bytes_a_call = index(bytes_a_call, "bytes_a_call", BYTES_MAX)
            if warm_up is not None:
                selections, config.steps = self._selections(warm_up)
                config.selections = selections
        ticket = self._hold(warm_up, selections)
        self._joined(ticket, lib.fb_join(self._pointer, self._number, config, on, ticket._made))
        return ticket

    def join_early(self, stream: Any = None) -> Ticket:
        """Takes a lane and slots before the prompt is complete. Rows and index keys go on coming, and `warm_layer`
        loads each layer that is whole, while the transfer brings later ones. Until the sequence runs it has slots that
        no step uses: call it only if nothing else wants them.

        Raises:
            InvalidState: the sequence has joined, or is parked.
            Exhausted: names lanes or slot blocks.
            Busy: as `join`.
            DeviceFailed: a copy of its index keys failed; or the device refuses the call half-way: try again.
            InvalidArgument, Closed.
        """
        on = self.cache.device.stream_of(stream)
        self.cache._record.make_up()
        ticket = self._hold()
        self._joined(ticket, lib.fb_join_early(self._pointer, self._number, on, ticket._made))
        return ticket

    def warm_layer(self, layer: int, stream: Any = None, *, warm_up: Tensor | None = None) -> Ticket:
        """Loads the rows of one layer of a sequence that joined early, once the layer has all rows and all index keys.
        The first layer of an index group comes first, and decides which rows its group has, as `join` does. After the
        last layer the sequence may decode: `length.running`.

        Args:
            layer: the layer.
            stream: see the device. It must be ordered after the work that writes `warm_up`.
            warm_up: the selections of the layer's group, int32 `[steps, top_k]` on the device, as in `join`; only for a
                layer that selects.

        Raises:
            InvalidState: the sequence did not join early, the layer is incomplete or was warmed up before, or the layer
                that selects for it was not.
            OutOfRange: no such layer, or selections of a layer that another one selects for.
            DeviceFailed: work of the sequence failed; or the device refuses the call half-way: try again, with the same
                warm-up.
            InvalidArgument, Closed.
        """
        on, which = self.cache.device.stream_of(stream), index(layer, "layer")
        self.cache._record.make_up()
        config, selections = NULL, None
        if warm_up is not None:
            config, found = sized("fb_warm_up"), look(warm_up, "warm_up")
            config.steps = found.shape[0] if len(found.shape) == 2 else 0
            shape = (config.steps, self.cache.info.top_k)
            selections = words(warm_up, "warm_up", shape, self.cache.device.place, False)
            config.selections = selections
        ticket = self._hold(warm_up, selections)
        self._joined(ticket, lib.fb_warm_layer(self._pointer, self._number, which, config, on, ticket._made))
        return ticket

    def _hold(self, *things: Any) -> Ticket:
        """Makes the ticket of a join, or of keys that are placed, before the call. The ticket keeps the given tensors
        until it has ended, and those of earlier calls that the device refused half-way.
        """
        ticket, record = Ticket(), self.cache._record
        if self.cache.device.later and (any(thing is not None for thing in things) or record.refused(self._number)):
            record.joins.setdefault(self._number, {})[ticket] = things
        return ticket

    def _joined(self, ticket: Ticket, status: int) -> None:
        """Raises a refusal of a join. The device may have taken part of an admitted join, whatever the refusal says. So
        the ticket keeps its tensors until the join was repeated, or the sequence closed, and that has ended
        (`CacheHandle.make_up`, `reap`).
        """
        joins = self.cache._record.joins.get(self._number, {})
        if status and (status in NOT_LET_IN or self._has_joined()):
            joins.pop(ticket, None)
        elif ticket in joins:
            # A join that is repeated with the same warm-up keeps it once.
            for other in self.cache._record.refused(self._number):
                held, own = joins.get(other, ()), joins[ticket]
                if other is not ticket and held[:1] and own[:1] and held[0] is own[0]:
                    joins.pop(other, None)
        if status:
            fail(status, self._pointer)

    def _has_joined(self) -> bool:
        """Whether the sequence had joined before; such a join is refused before anything else happens."""
        length = sized("fb_sequence_length")
        return lib.fb_length(self._pointer, self._number, length) == 0 and bool(length.running)

    def _selections(self, warm_up: Any) -> tuple[Any, int]:
        info, found = self.cache.info, look(warm_up, "warm_up")
        steps = found.shape[1] if len(found.shape) == 3 else 0
        place = self.cache.device.place
        return words(warm_up, "warm_up", (info.index_groups, steps, info.top_k), place, False), steps

    def join_more(self, stream: Any = None) -> Ticket:
        """Gathers the next portion of a bounded warm-up. After the last portion the sequence may decode:
        `length.running`.

        Raises:
            InvalidState: the sequence is not joining.
            InvalidArgument: the stream.
            Closed.
        """
        on, ticket = self.cache.device.stream_of(stream), self._hold()
        self._joined(ticket, lib.fb_join_more(self._pointer, self._number, on, ticket._made))
        return ticket

    def fork(
        self,
        *,
        promised: int = 0,
        ratio: float | None = None,
        slots: int | Many[int] | None = None,
        bring_up: str = "whole",
        stream: Any = None,
    ) -> tuple[Sequence, Ticket]:
        """Opens a sequence that begins as a copy of this one, whose committed tokens are its prompt.

        The two share full pages; the partial page is copied on `stream`. Their slots differ: the child begins with
        the rows that `bring_up` loads. The child has already joined: steps on any stream wait for the copy without
        further calls, and the ticket reports when the child is ready. The parent may decode, or be closed, immediately.

        Args:
            promised, ratio, slots, bring_up: as in `Cache.open`, for the child.
            stream: see the device. The copy is ordered after the parent's earlier work on any stream.

        Raises:
            Busy: work of this sequence is in flight.
            InvalidState: it has rows that are neither accepted nor rejected (`truncate` it to the intended length), or
                has not joined.
            Exhausted: names the pool that has too little left; nothing is taken.
            InvalidArgument, InvalidConfig, OutOfRange, Closed: as `Cache.open`.
        """
        config, _table = self.cache._open_config(0, promised, ratio, slots, bring_up)
        self.cache._record.make_up()
        on, ticket = self.cache.device.stream_of(stream), Ticket()
        child = self.cache._opened(
            lambda number: int(lib.fb_fork(self._pointer, self._number, config, on, number, ticket._made)),
            lambda number: Sequence(self.cache, number),
        )
        return child, ticket

    def truncate(self, length: int, stream: Any = None) -> Ticket:
        """Truncates the sequence to `length` tokens, in every layer.

        Landed rows below the length are accepted, landed rows from it on are rejected. Landed rows of a failed step
        cannot be accepted. After the call a sequence whose step failed may take part in steps again. Before a sequence
        has joined, and while it is parked, the call shortens its prompt.

        Raises:
            Busy: work of the sequence is in flight.
            OutOfRange: a length beyond the committed and landed rows.
            InvalidState: the sequence is joining; or it has not joined, and other sequences share the pages of the rows
                to drop.
            Closed.
        """
        self.cache._record.make_up()
        ticket, on, kept = Ticket(), self.cache.device.stream_of(stream), index(length, "length")
        check(lib.fb_truncate(self._pointer, self._number, kept, on, ticket._made), self._pointer)
        return ticket

    def resize(
        self, *, ratio: float | None = None, slots: int | Many[int] | None = None, stream: Any = None
    ) -> None:
        """Changes the sequence's budget between two of its steps, layer by layer.

        A smaller budget keeps the rows that were selected last; a larger one adds empty slots, which misses fill.
        Nothing crosses the link. On the device the call moves the rows that stay but whose slots go. The sequence's
        next step waits for that on any stream without further calls, and captured graphs stay valid. The slots that go
        are free at once for `Cache.open` and `resize`. Slots are taken and freed in whole blocks of 64. Slots beyond
        the tokens that the sequence may have are not taken.

        Args:
            ratio: slots in each layer as a fraction of prompt plus promised tokens, and at least the cache's
                `min_budget`. Give it or `slots`, not both.
            slots: slots in each layer; or one number for each layer, draft layers last.
            stream: see the device.

        Raises:
            Busy: a step of the sequence is prepared and not finished, or work that the library enqueued for it outside
                of steps, such as its last resize, is in flight.
            InvalidState: the sequence has not joined, or its step failed.
            InvalidConfig: fewer slots than the cache's `min_budget`, or a cache with `share`.
            OutOfRange: more slots than a layer has.
            Exhausted: more slots than are free.
            DeviceFailed: work of the sequence failed.
            InvalidArgument, Closed. After all of these nothing has changed.
        """
        if ratio is None and slots is None:
            raise InvalidArgument("slots", "None without a ratio", "slots or a ratio")
        budget = sized("fb_budget")
        _table = set_budget(budget, ratio, slots, self.cache.info.layers)
        on = self.cache.device.stream_of(stream)
        self.cache._record.make_up()
        check(lib.fb_resize(self._pointer, self._number, budget, on), self._pointer)

    @property
    def budgets(self) -> tuple[int, ...]:
        """The sequence's slots in each layer, draft layers last.

        Raises:
            Closed.
        """
        layers = self.cache.info.layers
        slots = ffi.new("uint32_t[]", layers)
        check(lib.fb_budgets(self._pointer, self._number, slots, layers), self._pointer)
        return tuple(slots)

    def publish(self, start: int, tokens: Any, *, keys: TokenKeys = None) -> int:
        """Publishes full pages after the first `start` tokens, so that other sequences find them by block hash.

        Args:
            start: `length.published`.
            tokens: the token ids from there on, as far as they are known.
            keys: as in `Cache.open`.

        Returns:
            Tokens of the sequence's published pages.

        Raises:
            OutOfRange: `start` is not `length.published`, or `tokens` exceed what was admitted.
            InvalidState: the sequence was opened without `tokens`, or is not running.
            Busy: work that the library enqueued for it is in flight.
            InvalidArgument, Closed.
        """
        named, _keep = tokens_of(tokens, keys)
        published = ffi.new("uint32_t *")
        check(lib.fb_publish(self._pointer, self._number, index(start, "start"), named, published), self._pointer)
        return int(published[0])

    @property
    def length(self) -> Length:
        """The lengths of the sequence.

        Raises:
            Closed.
        """
        length = sized("fb_sequence_length")
        check(lib.fb_length(self._pointer, self._number, length), self._pointer)
        flags = bool(length.running), bool(length.parked)
        return Length(length.committed, length.landed, length.published, *flags, length.filled, bool(length.arriving))

    def pages(self) -> list[Page]:
        """The sequence's pages, in token order: the entries of an indexer's block table (`block_table`).

        Raises:
            Closed.
        """
        count = ffi.new("uint32_t *")
        check(lib.fb_pages(self._pointer, self._number, NULL, 0, count), self._pointer)
        pages = ffi.new("fb_page[]", max(count[0], 1))
        check(lib.fb_pages(self._pointer, self._number, pages, count[0], count), self._pointer)
        return [Page(pages[index].host, pages[index].index_keys) for index in range(count[0])]

    def landing_slot(self, query_row: int) -> int:
        """The slot to which the engine writes the new row of a query row. It is the same in every layer's slab.

        Raises:
            OutOfRange: no such query row.
            InvalidArgument, Closed.
        """
        slot = ffi.new("uint32_t *")
        check(lib.fb_landing_slot(self._pointer, self._number, index(query_row, "query_row"), slot), self._pointer)
        return int(slot[0])

    def read_row(self, layer: int, position: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A copy of one row of the total pool with its present content: uint8 `[row bytes]`.

        Raises:
            OutOfRange: no such layer or position.
            InvalidArgument, Closed.
        """
        row = np.empty(self.cache.info.row_bytes, np.uint8)
        which, at, room = index(layer, "layer"), index(position, "position"), ffi.from_buffer("uint8_t[]", row, True)
        check(lib.fb_read_row(self._pointer, self._number, which, at, room, row.nbytes), self._pointer)
        return row

    def digest(self) -> int:
        """The residency digest over all layers. Ranks that got the same selections in every step since the join have
        equal digests.

        On a GPU the call waits for the device, so call it between steps. docs/integration.md (Ranks) says what to do
        when ranks differ.

        Raises:
            Busy: work of the sequence is in flight.
            Closed.
        """
        digest = ffi.new("uint64_t *")
        check(lib.fb_digest(self._pointer, self._number, digest), self._pointer)
        return int(digest[0])


def _packed(rows: Tensor, name: str, width: int, place: Place) -> Placed:
    """Rows of `width` bytes each, one after the other.

    Raises:
        InvalidArgument: the tensor is something else.
    """
    found = look(rows, name)
    count = found.bits // 8
    for extent in found.shape[1:]:
        count *= extent
    if len(found.shape) < 2 or count != width:
        given = f"{describe(found.dtype, found.shape)}, rows of {counted(count, 'byte')}"
        raise InvalidArgument(name, given, f"[count, ...] with rows of {width} bytes")
    return checked(rows, name, None, found.shape, place, False)


def tokens_of(tokens: Any, keys: TokenKeys) -> tuple[Any, tuple[Any, ...]]:
    """An fb_tokens, and the objects that must live as long.

    Raises:
        InvalidArgument: values that are not token ids, or keys that are neither None nor 16 bytes.
    """
    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument("tokens", type(tokens).__name__, "token ids, one axis") from error
    kind = ids.dtype.kind if ids.size else "u"
    if ids.ndim != 1 or kind not in "iu" or (ids.size and (ids.min() < 0 or ids.max() > 0xFFFFFFFF)):
        raise InvalidArgument("tokens", describe(ids.dtype.name, ids.shape), "integers from 0 to 2^32 - 1, one axis")
    ids = np.ascontiguousarray(ids, np.uint32)
    named = sized("fb_tokens")
    words_ = ffi.from_buffer("uint32_t[]", ids)
    named.ids, named.count = (words_, ids.size) if ids.size else (NULL, 0)
    table = NULL
    if keys is not None:
        if not isinstance(keys, (list, tuple)):
            raise InvalidArgument("keys", type(keys).__name__, "None or 16 bytes for each page")
        table = ffi.new("fb_key[]", max(len(keys), 1))
        for index, key in enumerate(keys):
            if key is None:
                continue
            if not isinstance(key, bytes) or len(key) != _KEY_BYTES:
                raise InvalidArgument(f"keys[{index}]", repr(key), "None or 16 bytes")
            table[index].is_set = 1
            ffi.memmove(table[index].bytes, key, _KEY_BYTES)
        named.keys, named.key_count = table, len(keys)
    return named, (ids, words_, table)


def salt_of(salt: bytes) -> bytes:
    """A salt as C takes it.

    Raises:
        InvalidArgument: it is something else.
    """
    if not isinstance(salt, bytes):
        raise InvalidArgument("salt", type(salt).__name__, "bytes")
    return salt
