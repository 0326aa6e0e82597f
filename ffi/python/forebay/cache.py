"""The cache of one model on one device. One thread at a time drives it.

A sequence or step that the program forgets is not lost. The garbage collector only notes its end, and the next `open`,
`prepare`, `truncate`, `resize`, `share_slots`, `fork`, `join`, `reap` or `close` completes it. A forgotten sequence
to which a transfer may still write is aborted: its pages stay withheld (`Cache.withheld`). A forgotten cache ends its
steps and sequences by itself, in any order, as soon as that needs no waiting. In a forked child everything of the
parent is already closed: the library reports it as closed and ends nothing.

The tensors that enqueued work uses (selections, slots, warm-ups) belong to the cache's record, from before the call
that hands them over until that work has ended, whatever happens to the call, the step or the ticket: see
`forebay.keep`.
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, Callable, Iterable, NamedTuple, Sequence as Many

import numpy as np

from . import overlap
from ._library import check, check_created, ffi, lib, new_text, sized
from .arrays import Tensor
from .device import Device, HostMemory, end_left, give_up
from .config import SLOT_BLOCK, Info, Share, declare, set_budget, set_fields
from .errors import InvalidArgument, counted
from .overlap import Captured, EngineCall, Layers
from .lifetime import CacheBase
from .record import SPARSE, CacheHandle, InFlight
from .sequence import BRING_UP, Sequence, TokenKeys, salt_of, tokens_of
from .shape import Shape
from .step import Step
from .tensors import HOST, index, words


class Stats(NamedTuple):
    """Statistics of a cache. A gauge describes the present; a counter only grows."""

    # Gauge: sequences that are open, or closed while work that uses them is in flight.
    sequences: int
    # Gauge: steps between prepare and retire.
    steps_in_flight: int
    # Gauge: free pages of the total pool, not counting `unused_pages`.
    free_host_pages: int
    # Gauge: free pages of index keys.
    free_index_pages: int
    # Gauge: published pages that no sequence uses. Admission can evict and reuse them.
    unused_pages: int
    # Gauge: free slots of the layer that has the fewest.
    free_slots: int
    # Gauge: free lanes.
    free_lanes: int
    # Counter: steps retired.
    steps: int
    # Counter: distinct selected rows that were resident, all layers.
    hits: int
    # Counter: rows fetched, all layers.
    misses: int
    # Counter: misses whose rows were fetched into scratch slots.
    scratch: int
    # Counter: bytes of the rows that missed, host to device.
    bytes_up: int
    # Counter: prompt tokens that were looked up among published pages.
    prompt_tokens: int
    # Counter: prompt tokens found in published pages, whose pages the new sequence shares.
    shared_tokens: int
    # Counter: pages that were published for other sequences to find.
    published_pages: int
    # Counter: published pages that were evicted to make room.
    evicted_pages: int
    # Gauge: slots that belong to a sequence, all layers, in whole blocks of 64.
    slots_in_use: int
    # Counter: resizes of a sequence's budgets.
    resizes: int
    # Counter: rows that resizes have moved to other slots, all layers, as far as a retired step has reported them.
    moved_rows: int
    # Gauge: parked sequences.
    parked: int
    # Gauge: arriving sequences (`Cache.arrive`). One that has ended counts until its work has ended.
    arriving: int = 0
    # Gauge: pages of rows, and as many of index keys, that are withheld after an abort (`Cache.withheld`).
    withheld_pages: int = 0


class Cache(CacheBase):
    """One model's cache on one device; a context manager that closes itself.

    A device keeps the memory that its caches have taken until the device ends, so successive caches need a device each.

    Args:
        device: the device of the slabs.
        shape: the model's shape.
        lanes: the most sequences that may be open at once.
        max_tokens: tokens of the longest sequence: prompt plus promised tokens.
        parked: the most sequences that may be parked at once (`Sequence.park`), in addition to the open ones; None:
            none.
        arriving: the most sequences that may arrive at once (`Cache.arrive`), in addition to these; None: none.
        slots: slots of one sequence in each layer; or one number for each layer, draft layers last, which `open` then
            uses by default.
        query_rows: the most query rows of a sequence in one step: 1 + drafts.
        batch: the most batch rows of a step; None: `lanes`.
        steps_in_flight: the most steps of one sequence in flight; None: 2.
        micro_batches: micro-batches that may each have a step open at the same time; None: 1.
        host_pages, index_pages: pages of the total pool and of index keys; None: enough for every lane.
        pool_slots: slots of each layer's pool, for all sequences together; or one number for each layer; None: enough
            for every lane.
        min_budget: the fewest slots that a sequence may have in a layer; None: the fewest of `slots`.
        share: how the cache divides its slots over the sequences; None: each sequence keeps its budget until the
            program resizes it.
        attention_waves: the most attention waves of a step, which use the same scratch slots in turn; None: 1. With
            more, attention must be split.
        residency_only: rows have no bytes and nothing is gathered, for replays. The total pool then takes addresses but
            no memory, whatever `populate` and `lock` say. A CUDA device pins the pool, and so takes all of its memory.
        huge_pages, populate, lock: how the total pool takes its memory; `fallbacks` lists the options that the system
            refused.
        numa_node: the NUMA node of the total pool; None: any.
        overcommit: takes more memory than the machine reports as available (`MemAvailable`, and what its control group
            leaves). Without it such a cache is refused before it takes anything; otherwise the system would kill a
            process.

    Raises:
        InvalidConfig, Overflow: the message names the field.
        OutOfMemory: the message names the wanted and the available size.

    Attributes:
        device, shape: as given.
        info: the configuration and the sizes that follow from it, as the library has them.
        batch, query_rows: as given.
    """

    _sequences = Sequence

    def __init__(
        self,
        device: Device,
        shape: Shape,
        *,
        lanes: int,
        max_tokens: int,
        slots: int | Many[int],
        parked: int | None = None,
        arriving: int | None = None,
        query_rows: int = 1,
        batch: int | None = None,
        steps_in_flight: int | None = None,
        micro_batches: int | None = None,
        host_pages: int | None = None,
        index_pages: int | None = None,
        pool_slots: int | Many[int] | None = None,
        min_budget: int | None = None,
        share: Share | None = None,
        attention_waves: int | None = None,
        residency_only: bool = False,
        huge_pages: bool = True,
        populate: bool = True,
        lock: bool = True,
        numa_node: int | None = None,
        overcommit: bool = False,
    ) -> None:
        if not isinstance(device, Device):
            raise InvalidArgument("device", type(device).__name__, "a HostDevice or a CudaDevice")
        config, self._by_layer, _pools = declare(
            shape,
            slots,
            pool_slots,
            {
                "lanes": lanes,
                "max_tokens": max_tokens,
                "parked": parked,
                "arriving": arriving,
                "query_rows": query_rows,
                "batch": batch,
                "steps_in_flight": steps_in_flight,
                "micro_batches": micro_batches,
                "host_pages": host_pages,
                "index_pages": index_pages,
                "min_budget": min_budget,
                "attention_waves": attention_waves,
                "residency_only": 1 if residency_only else None,
                "numa_node": None if numa_node is None else index(numa_node, "numa_node", 0xFFFFFFFE) + 1,
            },
        )
        if share is not None:
            if not isinstance(share, Share):
                raise InvalidArgument("share", type(share).__name__, "a Share")
            share.declare(config)
        config.memory = (
            (0 if huge_pages else lib.FB_MEMORY_SMALL_PAGES)
            | (0 if populate else lib.FB_MEMORY_LAZY)
            | (0 if lock else lib.FB_MEMORY_UNLOCKED)
            | (lib.FB_MEMORY_OVERCOMMIT if overcommit else 0)
        )
        end_left()
        self._record, text = CacheHandle(device._handle, SPARSE), new_text()
        self._closer = weakref.finalize(self, give_up, self._record)
        # At the interpreter's end `CacheHandle.at_exit` waits.
        self._closer.atexit = False
        try:
            self._record.enter()
            made = self._record.made
            check_created(lib.fb_cache_create(device._open(), config, text, len(text), made), text)
        except BaseException:
            # This also ends a handle that was made while an exception was pending.
            self._record.end(wait=False)
            raise
        self._pointer = made[0]
        self.device, self.shape = device, shape
        self.batch, self.query_rows = lanes if batch is None else batch, query_rows
        self._watchers: list[Callable[[Stats], object]] = []
        self.info: Info = self._read_info()

    def _read_info(self) -> Info:
        info = sized("fb_info")
        check(lib.fb_cache_info(self._pointer, info), self._pointer)
        return Info(*(int(getattr(info, name)) for name in Info._fields))

    def open(
        self,
        *,
        prompt: int,
        promised: int = 0,
        ratio: float | None = None,
        slots: int | Many[int] | None = None,
        bring_up: str = "whole",
        tokens: Any = None,
        keys: TokenKeys = None,
        salt: bytes = b"",
    ) -> Sequence:
        """Admits a sequence: takes its pages, slots and lane, or nothing.

        Args:
            prompt: tokens of the prompt.
            promised: tokens that it may decode after the prompt.
            ratio: slots in each layer as a fraction of prompt plus promised tokens. Give it or `slots`, not both.
            slots: slots in each layer; or one number for each layer; None: as the cache was configured. In a cache
                with `share` they are the least that the sequence ever has; `join` takes them.
            bring_up: "whole" (the join loads every row, if all fit its slots) or "nothing".
            tokens: the prompt's token ids, as far as they may be shared. The sequence shares the leading pages that
                were published with the same tokens, keys and salt; `Sequence.shared` is the number of their tokens.
            keys: 16 bytes or None for each full page of `tokens`, for content that ids do not identify.
            salt: separates equal tokens of different tenants or adapters.

        Raises:
            Exhausted: names the pool that has too little left.
            InvalidConfig, OutOfRange: the message names the field.
        """
        config, _table = self._open_config(prompt, promised, ratio, slots, bring_up)
        return self._admit(lib.fb_open, lib.fb_open_shared, config, (tokens, keys, salt), False)

    def arrive(
        self,
        *,
        prompt: int,
        promised: int = 0,
        ratio: float | None = None,
        slots: int | Many[int] | None = None,
        bring_up: str = "whole",
        tokens: Any = None,
        keys: TokenKeys = None,
        salt: bytes = b"",
    ) -> Sequence:
        """Admits a sequence whose rows and index keys a transfer brings, layer by layer: takes its pages, and neither
        slots nor a lane, or nothing.

        `Sequence.append`, `append_layer_in_place`, `place_index_keys` and `index_keys_in_place` count what has come;
        `join` takes slots and a lane once every layer is whole. The transfer brings the tokens behind
        `Sequence.shared`: nothing may write to the pages of those before. If others write to its pages on their own,
        `Sequence.abort` ends it.

        Args:
            prompt, promised, ratio, slots, bring_up, tokens, keys, salt: as in `open`.

        Raises:
            Exhausted: as many sequences arrive as the cache's `arriving`; or names the pool that has too little.
            InvalidConfig, OutOfRange: the message names the field.
        """
        config, _table = self._open_config(prompt, promised, ratio, slots, bring_up)
        return self._admit(lib.fb_arrive, lib.fb_arrive_shared, config, (tokens, keys, salt), True)

    def _admit(
        self, alone: Any, sharing: Any, config: Any, prompt: tuple[Any, TokenKeys, bytes], arrives: bool
    ) -> Sequence:
        """Admits a sequence by the first call, or by the second if the prompt's tokens are known."""
        self._record.make_up()
        tokens, keys, salt = prompt
        if tokens is None:
            if keys is not None or salt:
                raise InvalidArgument("tokens", "None together with keys or a salt", "the prompt's token ids")
            return self._opened(
                lambda number: int(alone(self._pointer, config, number)),
                lambda number: Sequence(self, number, 0, arrives),
            )
        named, _keep = tokens_of(tokens, keys)
        salt = salt_of(salt)
        shared = ffi.new("uint32_t *")
        return self._opened(
            lambda number: int(sharing(self._pointer, config, named, salt, len(salt), number, shared)),
            lambda number: Sequence(self, number, shared[0], arrives),
        )

    def _open_config(
        self, prompt: int, promised: int, ratio: float | None, slots: int | Many[int] | None, bring_up: str
    ) -> tuple[Any, Any]:
        if not isinstance(bring_up, str) or bring_up not in BRING_UP:
            raise InvalidArgument("bring_up", repr(bring_up), " or ".join(map(repr, BRING_UP)))
        config = sized("fb_open_config")
        if slots is None and ratio is None:
            slots = self._by_layer
        by_layer = set_budget(config, ratio, slots, self.shape.all_layers)
        set_fields(config, {"prompt": index(prompt, "prompt"), "promised": index(promised, "promised")})
        config.bring_up = BRING_UP[bring_up]
        return config, by_layer

    def find_shared(self, tokens: Any, *, keys: TokenKeys = None, salt: bytes = b"") -> int:
        """How many tokens `open` would share now. It changes nothing.

        Raises:
            InvalidArgument: values that are not tokens, keys or a salt.
            Closed, Busy.
        """
        named, _keep = tokens_of(tokens, keys)
        salt = salt_of(salt)
        shared = ffi.new("uint32_t *")
        check(lib.fb_find_shared(self._pointer, named, salt, len(salt), shared), self._pointer)
        return int(shared[0])

    def prepare(
        self,
        rows: Iterable[tuple[Sequence, int | None, int]],
        *,
        query_rows: int | None = None,
        stream: Any = None,
        accepted: Tensor | None = None,
        micro_batch: int = 0,
    ) -> Step:
        """Begins a step: enqueues the wait for earlier work, and the commit of its sequences' accepted rows.

        Args:
            rows: for each batch row: the sequence; how many rows of its previous step were accepted (0 before its first
                step, None if `accepted` has the number); its query rows in this step.
            query_rows: the width of the step; None: the most query rows in `rows`.
            stream: see the device. The step's other calls use it too, unless they get their own.
            accepted: int32 or uint32 [batch of the cache], on the device, read in the stream's order.
            micro_batch: the micro-batch of the step.

        Raises:
            Busy: every step is in flight; retire one.
            InvalidState: a sequence has not joined, belongs to another micro-batch, or its step failed.
            InvalidConfig, OutOfRange, Closed: the message names the row.
        """
        self._record.make_up()
        table, count, widest = self._rows(rows)
        config = sized("fb_step_config")
        config.rows, config.row_count = table, count
        config.query_rows = widest
        set_fields(config, {"query_rows": query_rows, "micro_batch": micro_batch})
        on = self.device.stream_of(stream)
        in_flight = InFlight(on)
        if accepted is not None:
            config.accepted = self._counts(accepted, in_flight)
        step = Step(self, in_flight, count, config.query_rows)
        return self._begin(step, lambda number: int(lib.fb_prepare(self._pointer, config, on, number)))

    def reap(self, stream: Any = None) -> int:
        """Releases what ended work still holds: closed sequences, and whatever the program forgot.

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

    def share_slots(self, stream: Any = None) -> int:
        """Moves the budgets of all sequences towards their shares, within the limits of `share` for one step.

        `prepare` does this by itself for the sequences of its micro-batch; this call is for a program that wants it at
        a time of its own. Sequences in an open step stay as they are, and so do those that have retired no step since
        they joined or were last resized or truncated.

        Returns:
            The number of sequences that it has resized: 0 when there is nothing left to do.

        Raises:
            InvalidConfig: the cache was made without `share`.
            InvalidArgument: the stream.
            Busy, Closed.
        """
        self._record.make_up()
        resized = ffi.new("uint32_t *")
        check(lib.fb_share_slots(self._pointer, self.device.stream_of(stream), resized), self._pointer)
        return int(resized[0])

    def budgets_digest(self) -> int:
        """A digest of the budgets of all open sequences. Ranks that made the same calls with the same results have
        equal digests. The call waits for no device.

        Raises:
            Busy, Closed.
        """
        digest = ffi.new("uint64_t *")
        check(lib.fb_budgets_digest(self._pointer, digest), self._pointer)
        return int(digest[0])

    def slab(self, layer: int, run: int = 0) -> Any:
        """A layer's slab, which attention reads: uint8 `[blocks, 64, row_bytes[run]]`, slot s at `[s // 64, s % 64]`.

        On the host device it is a writable NumPy view; on CUDA it is a `CudaMemory`, of which `torch.from_dlpack` and
        `cupy.asarray` take views. It keeps the memory alive, even when the cache is closed. Attention reads it, and the
        engine writes a step's new rows to their landing slots. Write nothing else.

        Raises:
            OutOfRange: no such layer.
            InvalidArgument: no such run.
        """
        widths = self.shape.row_bytes
        if index(run, "run") > 1 or not widths[run]:
            runs = "0: rows have one run" if not widths[1] else "0 or 1"
            raise InvalidArgument("run", repr(run), runs)
        address, count = ffi.new("void **"), ffi.new("uint64_t *")
        check(lib.fb_slab(self._pointer, index(layer, "layer"), address, count), self._pointer)
        start = int(ffi.cast("uintptr_t", address[0])) + (SLOT_BLOCK * widths[0] if run else 0)
        block, width = self.info.block_bytes, widths[run]
        shape = (int(count[0]) // block if block else 0, SLOT_BLOCK, width)
        strides = None if block == SLOT_BLOCK * width else (block, width, 1)
        return self.device.view(start, shape, strides)

    def rows(self, layer: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A layer's rows in the total pool. A prefill or a transfer may write prompt rows there
        (`Sequence.append_in_place`).

        It is a writable view of host memory on every device, uint8 `[pages, page_tokens, host_stride]`; the row itself
        is the first `row_bytes` bytes. `Sequence.pages` has a sequence's pages; do not write shared ones. The view
        keeps the memory alive, as `slab` does.

        Raises:
            OutOfRange: no such layer.
        """
        address, count = ffi.new("void **"), ffi.new("uint64_t *")
        check(lib.fb_rows(self._pointer, index(layer, "layer"), address, count), self._pointer)
        page = self.info.page_tokens * self.info.host_stride
        shape = (int(count[0]) // page, self.info.page_tokens, self.info.host_stride)
        start = int(ffi.cast("uintptr_t", address[0]))
        return np.asarray(HostMemory(self.device._handle, start, HOST, shape, None))

    def index_keys(self, layer: int) -> Any:
        """A layer's index keys, which the engine writes and reads: uint8 `[pages, page_tokens, key bytes]`, as `slab`.

        Raises:
            OutOfRange: no such layer, one that another layer selects for, or a model without index keys.
        """
        address, count = ffi.new("void **"), ffi.new("uint64_t *")
        check(lib.fb_index_keys(self._pointer, index(layer, "layer"), address, count), self._pointer)
        page = self.shape.page_tokens * self.shape.index_key_bytes
        shape = (int(count[0]) // page, self.shape.page_tokens, self.shape.index_key_bytes)
        return self.device.view(int(ffi.cast("uintptr_t", address[0])), shape)

    def stats(self) -> Stats:
        """The present counters and gauges. Other threads may call it together with calls that only read.

        Raises:
            Busy: a call that changes the cache is running.
            Closed.
        """
        stats = sized("fb_stats")
        check(lib.fb_cache_stats(self._pointer, stats), self._pointer)
        return Stats(*(int(getattr(stats, name)) for name in Stats._fields))

    def fallbacks(self) -> list[str]:
        """The memory options that the system refused, one line each; empty if it granted all of them.

        Raises:
            Busy, Closed.
        """
        return self._lines(lambda *given: int(lib.fb_cache_fallback(self._pointer, *given)))

    def watch(self, left: Callable[[Stats], object]) -> None:
        """Calls `left` with the statistics whenever a step is retired, on the thread that retires it.

        Raises:
            InvalidArgument: `left` is not callable.
        """
        if not callable(left):
            raise InvalidArgument("left", type(left).__name__, "a callable that takes Stats")
        self._watchers.append(left)

    def overlap(
        self,
        step: Step,
        layer: int,
        order: str,
        layers: Layers,
        enqueue: Callable[[EngineCall], object],
        *,
        draft_pass: int | None = None,
    ) -> None:
        """Enqueues one layer of a step, or one draft pass, in the order "none", "da", "dba" or "ahead".

        Args:
            step: an open step.
            layer: the layer.
            order: the overlap order, which decides what hides the gather. "ahead" is for a layer that another one
                selects for (`Shape.group_layers`). There, all orders but "none" need this call for that one first,
                and "dba" is "da".
            layers: streams and buffers, the same for all layers of a step.
            enqueue: the engine's callback, see `EngineCall`. It must not call into this cache.
            draft_pass: the number of the draft pass, from 0, for a draft layer.

        Raises:
            InvalidArgument, OutOfRange: nothing was enqueued.
            InvalidConfig: "ahead" in a layer that selects for itself, or split attention without index lists. Nothing
                was enqueued.
            InvalidState: the step is finished or abandoned or was prepared on another stream, or this call has not
                enqueued the layer that selects for this one. Nothing was enqueued.
            An exception of `enqueue` passes through this call and abandons the step: finish and retire it, then
                truncate or close its sequences.
        """
        overlap.overlap(self, step, layer, order, layers, enqueue, draft_pass)

    def overlap_steps(
        self,
        steps: Many[Step],
        layers: Many[Layers],
        by_layer: Many[str],
        enqueue: Callable[[EngineCall], object],
        *,
        draft_passes: int = 0,
    ) -> None:
        """Enqueues all layers of open steps, at most one step of each micro-batch: each layer once, then the draft
        passes, alternating between the steps.

        Args:
            steps, layers: lists of the same length.
            by_layer: the order of every layer, draft layers last.
            enqueue, draft_passes: as in `overlap`; the number of draft passes.

        Raises:
            As `overlap`; an exception of `enqueue` abandons all the steps.
        """
        overlap.overlap_steps(self, steps, layers, by_layer, enqueue, draft_passes)

    def capture(
        self,
        micro_batches: Many[Layers],
        *,
        query_rows: int,
        by_layer: Many[str],
        enqueue: Callable[[EngineCall], object],
        draft_passes: int = 0,
        into: bool = False,
    ) -> Captured:
        """Captures all layers of a bucket as one graph, which can be launched for any steps that fit it.

        Args:
            micro_batches: for each micro-batch in the graph: streams, the bucket's batch rows, buffers.
            query_rows: query rows of the steps.
            by_layer, draft_passes: as in `overlap_steps`.
            enqueue: the engine's callback; the capture calls it, a launch never does.
            into: the engine's own capture is in progress on the first compute stream, and everything is enqueued there.

        Raises:
            Unsupported: the device cannot capture.
            InvalidState: with `into`, no capture is in progress on the first compute stream.
            InvalidConfig, OutOfRange: the configuration does not fit the cache.
            Busy: a step of these micro-batches is open.
        """
        return overlap.capture(self, micro_batches, query_rows, by_layer, enqueue, draft_passes, into)

    def validate(self) -> None:
        """Checks every invariant of the pools, page tables and residency tables, for tests, between steps.

        Raises:
            Internal: names the broken invariant.
            Busy, Closed.
        """
        check(lib.fb_cache_validate(self._pointer), self._pointer)

    def close(self) -> None:
        """Ends the cache with all its steps and sequences; idempotent. Waits for enqueued work on a device that runs it
        later.

        Its memory, including the total pool, remains with the device until that ends, because views may still read it.

        Raises:
            Busy: another call is inside the cache, on another thread or around a callback: close it again. If that call
                came while the cache was ending, steps and sequences may have ended already; withheld pages may be free,
                and so opening a sequence raises Closed from then on.
        """
        if self._closer.alive:
            if not self._record.end(wait=True):
                check(lib.FB_BUSY, self._pointer)
            self._closer.detach()
        end_left()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._closer.alive

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else counted(len(self._record.sequences), "sequence")
        return f"<forebay.Cache on {self.device.place}: {state}>"
