"""The cache of a dense model on one device. One thread at a time drives it.

What the program forgets is not lost, as in `forebay.cache`: the garbage collector only notes it, and the next `open`,
`open_shared`, `arrive`, `prepare`, `reap`, or `extend`, `fork`, `truncate`, `park` or `resume` of a sequence ends it.
"""

from __future__ import annotations

from typing import Any, Iterable, NamedTuple

import numpy as np

from .._library import NULL, check, check_created, ffi, lib, new_text, sized
from ..arrays import Tensor
from ..device import Device, HostMemory
from ..errors import InvalidArgument, counted
from ..handle import Handled
from ..lifetime import CacheBase
from ..record import DENSE, CacheHandle, InFlight
from ..sequence import Ticket, TokenKeys
from ..tensors import BYTES_MAX, HOST, index
from .config import Config
from .sequence import Found, Names, Opened, Sequence
from .step import Step

_WAYS = {"direct": lib.FB_DENSE_DIRECT, "host": lib.FB_DENSE_HOST}
_WORD = np.dtype(np.int32)
_BY_GROUP = ("free_pages", "published", "unused", "saved", "free_host_pages", "parked_pages")


class Stats(NamedTuple):
    """Statistics of a dense cache. A gauge describes the present; a counter only grows. Tuples have a number for each
    group.
    """

    # Gauge: sequences that are open, and closed ones that are not released yet (`Cache.reap`).
    sequences: int
    # Gauge: those of them that are parked.
    parked: int
    # Gauge: sequences that may still be opened, as far as pages allow.
    free_sequences: int
    # Gauge: steps between prepare and retire.
    steps_in_flight: int
    # Gauge: device pages that a sequence may still take, or, with a sliding window, be promised. Unused published pages
    # count: admission can evict and reuse them.
    free_pages: tuple[int, ...]
    # Gauge: published pages on the device.
    published: tuple[int, ...]
    # Gauge: those of them that no sequence uses.
    unused: tuple[int, ...]
    # Gauge: published pages in the host's tier, whether or not they are on the device too.
    saved: tuple[int, ...]
    # Gauge: free pages of the host's tier.
    free_host_pages: tuple[int, ...]
    # Gauge: pages of the host's tier that parked sequences have for themselves: those of them that are not published.
    parked_pages: tuple[int, ...]
    # Counter: bytes of pages that were copied to the host's tier.
    bytes_down: int
    # Counter: bytes of pages that came back from it.
    bytes_up: int
    # Counter: steps retired.
    steps: int
    # Gauge: arriving sequences (`Cache.arrive`), which `sequences` counts too.
    arriving: int = 0
    # Gauge: pages, of the device and of the host, that are withheld after an abort (`Cache.withheld`).
    withheld_pages: int = 0


class Plane(NamedTuple):
    """Device memory with one piece of every page of a group."""

    # uint8 `[pages, bytes of the piece]`, as `Cache.view` gives memory.
    memory: Any
    # The layer; None: all layers of the group, one after the other.
    layer: int | None
    # The run: 0 for K, 1 for V; None: both, or the only one.
    run: int | None


class Tensors(NamedTuple):
    """What attention kernels read in the steps of one micro-batch, on the device, at addresses that never change. The
    begin of a step writes them; the engine only reads them.
    """

    # For each group the page tables, int32 `[batch, blocks]` (vLLM: block_table). Entries beyond a sequence's pages
    # have no meaning.
    tables: tuple[Any, ...]
    # For each group where the new rows go, `[step tokens]` of the configuration's `width`: page * page_tokens + token
    # (vLLM: slot_mapping). -1 beyond the step's rows.
    slots: tuple[Any, ...]
    # The position of each new row, `[step tokens]` of `width`. 0 beyond the step's rows.
    positions: Any
    # Tokens of each batch row's sequence, new rows included, int32 `[batch]` (vLLM: seq_lens). 0 beyond the step's
    # batch rows.
    lengths: Any
    # Where the new rows of each batch row begin, int32 `[batch + 1]` (vLLM: query_start_loc).
    starts: Any


class Cache(Handled, CacheBase):
    """The cache of one dense model on one device; a context manager that closes itself, with all its steps and
    sequences.

    Closing waits for enqueued work on a device that runs it later. The memory remains with the device until that ends,
    because views may still read it. So successive caches need a device each. A `close` that raises Busy is made again:
    if the other call came while the cache was ending, steps and sequences may have ended already; withheld pages may be
    free, and so opening a sequence raises Closed from then on.

    Args:
        device: the device of the pages.
        config: the configuration.

    Raises:
        InvalidConfig, Overflow: the message names the field.
        OutOfMemory: the message names the wanted and the available size.

    Attributes:
        device, config: as given.
        batch: the most batch rows of a step.
        step_tokens: the most query rows of a step.
        blocks: entries of a page table: pages of the longest sequence with its rows in flight.
    """

    _sequences = Sequence

    def __init__(self, device: Device, config: Config) -> None:
        if not isinstance(device, Device):
            raise InvalidArgument("device", type(device).__name__, "a HostDevice or a CudaDevice")
        if not isinstance(config, Config):
            raise InvalidArgument("config", type(config).__name__, "a dense.Config")
        declared, _keep = config.declare()
        self._record, text = CacheHandle(device._handle, DENSE), new_text()

        def create(made: Any) -> None:
            check_created(lib.fb_dense_create(device._open(), declared, text, len(text), made), text)

        self._make(self._record, create)
        self.device, self.config = device, config
        self._groups = int(declared.group_count)
        found = self._tensors(0)
        self.batch, self.step_tokens = int(found.batch), int(found.step_tokens)
        self.blocks = int(found.blocks)

    def names(self, tokens: Any, *, keys: TokenKeys = None, salt: bytes = b"") -> Names:
        """Hashes the full pages of a prompt, for `find` and `open_shared`.

        Args:
            tokens: the prompt's leading token ids, as far as they may be shared. Leave out the last one of the prompt
                if its row must be computed again for its logits.
            keys: 16 bytes or None for each full page of `tokens`, for content that ids do not identify.
            salt: separates equal tokens of different tenants, adapters or weights.

        Raises:
            OutOfRange: more tokens than the configuration's `max_tokens`, or keys that are neither none nor one for
                each full page.
            InvalidArgument: values that are not tokens, keys or a salt.
            Closed, Busy.
        """
        return Names(self, tokens, keys, salt)

    def find(self, names: Names) -> Found:
        """How much of a prompt `open_shared` would find now. It changes nothing, not even the order in which pages are
        evicted.

        Raises:
            InvalidArgument: no names.
            Closed, Busy.
        """
        found = sized("fb_dense_found")
        check(lib.fb_dense_find(self._pointer, _made(names), found), self._pointer)
        return Found(int(found.tokens), int(found.host_tokens))

    def open(self, *, prompt: int, promised: int = 0) -> Sequence:
        """Admits a sequence: takes, in every group, all pages that its steps will need, or nothing. Its first steps
        compute the prompt, in chunks.

        Args:
            prompt: tokens of the prompt.
            promised: tokens that it may decode after the prompt.

        Raises:
            Exhausted: names the sequences, or the pages with their group.
            OutOfRange: no tokens, or more than the configuration's `max_tokens`.
            InvalidArgument, Closed, Busy.
        """
        self._record.make_up()
        tokens = index(prompt, "prompt"), index(promised, "promised")
        return self._opened(
            lambda number: int(lib.fb_dense_open(self._pointer, *tokens, number)),
            lambda number: Sequence(self, number),
        )

    def open_shared(self, names: Names, *, prompt: int, promised: int = 0, stream: Any = None) -> Opened:
        """Admits a sequence like `open`, for a prompt whose names are known. The sequence shares the leading pages that
        were published under these names and are still in a tier; those that are on the host alone come back on
        `stream`. Admission counts only the pages that are not shared.

        For all ranks to share the same prefix, pass on each rank the names that the rank with the fewest can find.

        Args:
            names: of the prompt's leading tokens.
            prompt, promised: as in `open`.
            stream: see the device. Steps wait for it on the device, on any stream.

        Raises:
            OutOfRange: names of more tokens than the prompt has.
            Others as `open`. An error takes nothing; if the device refuses the call half-way, `reap` frees the pages.
        """
        self._record.make_up()
        tokens, known = (index(prompt, "prompt"), index(promised, "promised")), _made(names)
        on, ticket, found = self.device.stream_of(stream), Ticket(), sized("fb_dense_found")
        return self._opened(
            lambda number: int(
                lib.fb_dense_open_shared(self._pointer, *tokens, known, on, number, found, ticket._made)
            ),
            lambda number: Opened(
                Sequence(self, number), Found(int(found.tokens), int(found.host_tokens)), ticket
            ),
        )

    def arrive(
        self, *, prompt: int, promised: int = 0, names: Names | None = None, way: str = "direct", stream: Any = None
    ) -> Opened:
        """Admits a sequence whose rows a transfer brings, layer by layer: takes its pages as `open` does. It takes part
        in steps once it has joined (`Sequence.join`). If others write to its pages on their own, `Sequence.abort` ends
        it.

        Args:
            prompt, promised: as in `open`.
            names: of the prompt's leading tokens. The pages that the cache has (`find_arriving`) are shared: the
                transfer leaves out the tokens of `Opened.found`. None: none are.
            way: "direct": the transfer writes to the device pages (`Sequence.pages`, `view`); "host": to pages of the
                host's tier (`Sequence.store`, or `Sequence.host_pages` and `host_view`), and the cache copies each
                layer up.
            stream: one of copies; see the device. Work on it behind this call may write to the pages. A transfer that
                is on no stream waits for `Opened.ticket`.

        Raises:
            Exhausted: as `open`; also names the host pages with their group.
            InvalidState: "host" in a cache without pages on the host.
            OutOfRange: as `open_shared`.
            InvalidArgument, Closed, Busy. An error takes nothing; if the device refuses the call half-way, `reap` frees
                the pages.
        """
        self._record.make_up()
        if not isinstance(way, str) or way not in _WAYS:
            raise InvalidArgument("way", repr(way), " or ".join(map(repr, _WAYS)))
        tokens, by = (index(prompt, "prompt"), index(promised, "promised")), _WAYS[way]
        on, ticket, found = self.device.stream_of(stream), Ticket(), sized("fb_dense_found")
        known = None if names is None else _made(names)

        def call(number: Any) -> int:
            if known is None:
                return int(lib.fb_dense_arrive(self._pointer, *tokens, by, on, number, ticket._made))
            given = (*tokens, known, by, on, number, found, ticket._made)
            return int(lib.fb_dense_arrive_shared(self._pointer, *given))

        return self._opened(
            call,
            lambda number: Opened(
                Sequence(self, number, True), Found(int(found.tokens), int(found.host_tokens)), ticket
            ),
        )

    def find_arriving(self, names: Names, prompt: int) -> Found:
        """How much of a prompt of `prompt` tokens `arrive` would find now. It may be more than `find` says: a group
        with a sliding window needs only the pages that a query behind the prompt reads.

        Raises:
            InvalidArgument: no names, or no number of tokens.
            Closed, Busy.
        """
        found, tokens = sized("fb_dense_found"), index(prompt, "prompt")
        check(lib.fb_dense_find_arriving(self._pointer, _made(names), tokens, found), self._pointer)
        return Found(int(found.tokens), int(found.host_tokens))

    def host_view(self, layer: int, run: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The rows of a layer in the host's tier: uint8 `[host pages, page_tokens, row bytes]`, host memory on every
        device. A transfer may write to the pages of a sequence that arrives (`Sequence.host_pages`), and to no others.
        The view keeps the memory alive, as `view` does.

        Raises:
            InvalidState: a cache without pages on the host.
            OutOfRange: no such layer, or a run that the layer does not have.
            InvalidArgument, Closed, Busy.
        """
        found = sized("fb_dense_layer_view")
        which = index(layer, "layer"), index(run, "run")
        check(lib.fb_dense_host_view(self._pointer, *which, found), self._pointer)
        tokens, row, stride = self.config.shape.page_tokens, int(found.row_bytes), int(found.stride)
        shape, strides = (int(found.pages), tokens, row), (stride, row, 1)
        return np.asarray(HostMemory(self.device._handle, _address(found.address), HOST, shape, strides))

    def save(self, limit: int, stream: Any = None) -> int:
        """Copies published pages that are not yet in the host's tier to it, the oldest first, at most `limit` bytes in
        this call: so the caller bounds the bytes a second.

        Args:
            limit: bytes.
            stream: one of low priority, and no stream of steps; see the device.

        Returns:
            The bytes: 0 if nothing is left to copy, `limit` is less than a page, or there is no such tier.

        Raises:
            DeviceFailed: the next call that copies or begins a step enqueues the copies that the device refused.
            InvalidArgument, Closed, Busy.
        """
        saved, on, most = ffi.new("uint64_t *"), self.device.stream_of(stream), index(limit, "limit", BYTES_MAX)
        check(lib.fb_dense_save(self._pointer, on, most, saved), self._pointer)
        return int(saved[0])

    def prepare(
        self,
        rows: Iterable[tuple[Sequence, int | None, int]],
        *,
        stream: Any = None,
        accepted: Tensor | None = None,
        micro_batch: int = 0,
    ) -> Step:
        """Begins a step: enqueues the wait for earlier work, and what fills the micro-batch's tensors.

        Args:
            rows: for each batch row: the sequence; how many rows of its previous step were accepted (0 before its first
                step, None if `accepted` has the number; all of a prompt's chunk are); its query rows in this step. More
                than the configuration's `query_rows` are a chunk of a prompt.
            stream: see the device. The step's other calls use it too, unless they get their own.
            accepted: int32 or uint32 [batch of the cache], on the device, read in the stream's order.
            micro_batch: the micro-batch of the step.

        Raises:
            Busy: every step is in flight (retire one), the micro-batch's last step is not finished, or steps behind a
                failed one are in flight in a model with windows (retire those).
            InvalidState: a sequence that is parked, whose step failed, or whose first step since it was opened or
                resumed was in another micro-batch.
            DeviceFailed: the last copy of a sequence failed.
            InvalidConfig, OutOfRange, Closed: the message names the row. No step begins and no row is accepted.
        """
        self._record.make_up()
        table, count, _widest = self._rows(rows)
        which, on = index(micro_batch, "micro_batch"), self.device.stream_of(stream)
        in_flight = InFlight(on)
        counts = NULL if accepted is None else self._counts(accepted, in_flight)
        step = Step(self, in_flight, count)
        return self._begin(
            step, lambda number: int(lib.fb_dense_prepare(self._pointer, which, table, count, counts, on, number))
        )

    def tensors(self, micro_batch: int = 0) -> Tensors:
        """What attention reads in the steps of a micro-batch. The addresses stay the same for the cache's life, so a
        captured graph can read them.

        On the host device they are read-only NumPy views; on CUDA `CudaMemory`, of which `torch.from_dlpack` takes
        views. They keep the memory alive, even when the cache is closed.

        Raises:
            OutOfRange: no such micro-batch.
            InvalidArgument, Closed, Busy.
        """
        found = self._tensors(micro_batch)
        wide = np.dtype(np.int64 if found.integer_bytes == 8 else np.int32)

        def tensor(pointer: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
            return self.device.view(_address(pointer), shape, None, dtype, True)

        groups, rows = range(self._groups), (self.step_tokens,)
        return Tensors(
            tuple(tensor(found.tables[at], (self.batch, self.blocks), _WORD) for at in groups),
            tuple(tensor(found.slots[at], rows, wide) for at in groups),
            tensor(found.positions, rows, wide),
            tensor(found.lengths, (self.batch,), _WORD),
            tensor(found.starts, (self.batch + 1,), _WORD),
        )

    def _tensors(self, micro_batch: int) -> Any:
        found = sized("fb_dense_step_tensors")
        check(lib.fb_dense_tensors(self._pointer, index(micro_batch, "micro_batch"), found), self._pointer)
        return found

    def view(self, layer: int, run: int = 0) -> Any:
        """The rows of a layer: uint8 `[pages, page_tokens, row bytes]`, with a stride from page to page that depends on
        `layout` and `runs`. Slot `s` is at `[s // page_tokens, s % page_tokens]`. Within a page the engine may order
        its values otherwise, as its kernel wants them.

        On the host device it is a writable NumPy view; on CUDA it is a `CudaMemory`, of which `torch.from_dlpack` and
        `cupy.asarray` take views. It keeps the memory alive, even when the cache is closed. The engine writes a step's
        new rows to their slots, and nothing else.

        Args:
            layer: the layer.
            run: 0 is K or the latent, 1 is V.

        Raises:
            OutOfRange: no such layer, or a run that the layer does not have.
            InvalidArgument, Closed, Busy.
        """
        found = sized("fb_dense_layer_view")
        which = index(layer, "layer"), index(run, "run")
        check(lib.fb_dense_view(self._pointer, *which, found), self._pointer)
        tokens, row, stride = self.config.shape.page_tokens, int(found.row_bytes), int(found.stride)
        strides = None if stride == tokens * row else (stride, row, 1)
        return self.device.view(_address(found.address), (int(found.pages), tokens, row), strides)

    def planes(self, group: int = 0) -> tuple[Plane, ...]:
        """The planes of a group, which stay the same for the cache's life: one for each layer and run with
        "layer_first" and "apart", by layer, then by run; fewer where layers or runs share a plane. For an engine that
        moves pages itself; attention reads `view`.

        Raises:
            OutOfRange: no such group.
            InvalidArgument, Closed, Busy.
        """
        which, count = index(group, "group"), ffi.new("uint32_t *")
        check(lib.fb_dense_planes(self._pointer, which, NULL, 0, count), self._pointer)
        planes = ffi.new("fb_dense_plane[]", max(count[0], 1))
        check(lib.fb_dense_planes(self._pointer, which, planes, count[0], count), self._pointer)

        def whole(number: int) -> int | None:
            return None if number == lib.FB_DENSE_ALL else number

        def plane(one: Any) -> Plane:
            shape = (int(one.bytes) // int(one.page_bytes), int(one.page_bytes))
            return Plane(self.device.view(_address(one.address), shape), whole(int(one.layer)), whole(int(one.run)))

        return tuple(plane(planes[at]) for at in range(count[0]))

    def reap(self, stream: Any = None) -> int:
        """Frees what ended work still holds: closed sequences, pages that finished copies have read, and whatever the
        program forgot.

        Returns:
            The number of closed sequences that still wait.

        Raises:
            InvalidArgument: the stream.
            Busy, Closed.
        """
        self._record.make_up()
        waiting = ffi.new("uint32_t *")
        check(self._record.reap(self.device.stream_of(stream), waiting), self._pointer)
        return int(waiting[0])

    def stats(self) -> Stats:
        """The present counters and gauges. Other threads may call it together with calls that only read.

        Raises:
            Busy: a call that changes the cache is running.
            Closed.
        """
        stats = sized("fb_dense_cache_stats")
        check(lib.fb_dense_stats(self._pointer, stats), self._pointer)

        def read(name: str) -> Any:
            value = getattr(stats, name)
            return tuple(int(value[at]) for at in range(self._groups)) if name in _BY_GROUP else int(value)

        return Stats(*map(read, Stats._fields))

    def fallbacks(self) -> list[str]:
        """The memory options that the system refused, one line each; empty if it granted all of them.

        Raises:
            Busy, Closed.
        """
        return self._lines(lambda *given: int(lib.fb_dense_fallback(self._pointer, *given)))

    def validate(self) -> None:
        """Checks every invariant of the pages and the page tables, for tests, between steps.

        Raises:
            Internal: names the broken invariant.
            Busy, Closed.
        """
        check(lib.fb_dense_validate(self._pointer), self._pointer)

    def __repr__(self) -> str:
        state = "closed" if self.closed else counted(len(self._record.sequences), "sequence")
        return f"<forebay.dense.Cache on {self.device.place}: {state}>"


def _made(names: Names) -> Any:
    """The handle of names.

    Raises:
        InvalidArgument: it is something else.
    """
    if type(names) is not Names:
        raise InvalidArgument("names", type(names).__name__, "Names: Cache.names(tokens)")
    return names._made[0]


def _address(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))
