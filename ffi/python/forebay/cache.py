"""The cache: one of one model on one device, driven by one thread at a time.

Sequences and steps that a program forgets are not lost: their ends are noted when the garbage collector comes by, and
made up for by the next `open`, `prepare`, `truncate`, `fork`, `reap` or `close`; a forgotten cache ends its steps and
sequences by itself, in whichever order all of them go, as soon as that waits for nothing. In a forked child everything
of the parent's is closed already: the library says so, and ends nothing.

What enqueued work names (selections, slots, warm-ups) belongs to the cache's record from before the call that hands it
over until that work has ended, whatever becomes of the call, the step or the ticket: see `forebay.keep`.
"""

from __future__ import annotations

import operator
import struct
import weakref
from types import TracebackType
from typing import Any, Callable, Iterable, NamedTuple, Sequence as Many

import numpy as np

from . import overlap
from ._library import check, check_created, ffi, lib, new_text, sized
from .arrays import Tensor
from .device import Device, HostMemory, end_left, give_up
from .config import SLOT_BLOCK, Info, by_layer_of, declare, set_fields
from .errors import InvalidArgument, counted
from .overlap import Captured, EngineCall, Layers
from .record import CacheHandle, InFlight
from .sequence import BRING_UP, Sequence, TokenKeys, tokens_of
from .shape import Shape
from .step import Step
from .tensors import HOST, index, words

# How many lines of fallbacks are read at most, and their length.
_FALLBACKS_MOST = 1 << 12
_LINE_BYTES = 512
_ON_DEVICE = lib.FB_ACCEPTED_ON_DEVICE


class Stats(NamedTuple):
    """What a cache has and does. Gauges describe now, counters only grow."""

    # Gauge: sequences that are open, or closed while work that names them is in flight.
    sequences: int
    # Gauge: steps between prepare and retire.
    steps_in_flight: int
    # Gauge: free pages of the total pool; unused_pages are not among them.
    free_host_pages: int
    # Gauge: free pages of index keys.
    free_index_pages: int
    # Gauge: shared pages that no sequence uses: what admission can take beside the free ones.
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
    # Counter: of these, rows in scratch slots.
    scratch: int
    # Counter: bytes of rows that misses asked for, host to device.
    bytes_up: int
    # Counter: prompt tokens that were looked up for sharing.
    prompt_tokens: int
    # Counter: of these, tokens in pages that were taken over.
    shared_tokens: int
    # Counter: pages that were published for others to find.
    published_pages: int
    # Counter: of these, pages that went to make room.
    evicted_pages: int


class Cache:
    """One model's cache on one device; a context manager that closes itself.

    A device keeps what its caches have taken until it ends: caches one after the other want a device each.

    Args:
        device: where its sparse pool is.
        shape: the model's cache.
        lanes: sequences that may be open.
        max_tokens: tokens of the longest sequence: prompt and promised.
        slots: slots of one sequence in each layer; or one number a layer, draft layers last, which is what `open`
            takes for a sequence that it is not told otherwise for.
        query_rows: query rows that a sequence may have in a step: 1 + drafts.
        batch: rows of a batch; None: `lanes`.
        steps_in_flight: steps of one sequence that may be in flight; None: 2.
        micro_batches: whose steps may be open at the same time; None: 1.
        host_pages, index_pages: pages of the total pool and of index keys; None: enough for every lane.
        pool_slots: slots of each layer's pool, all sequences; or one number a layer; None: enough for every lane.
        min_budget: fewest slots that a sequence may have in a layer; None: the fewest of `slots`.
        attention_waves: passes of attention that take the scratch slots in turn; None: 1.
        residency_only: rows have no bytes and nothing is gathered: for replays. The total pool takes addresses alone
            then, whatever `populate` and `lock` ask for; on a CUDA device, which pins it, all of it.
        huge_pages, populate, lock: how the total pool's memory is taken; `fallbacks` lists what was not to be had.
        numa_node: of the total pool; None: any.
        overcommit: takes more of the machine's memory than it says that it has (`MemAvailable`, and what its control
            group leaves). Without it that is refused before anything is taken: the system's own answer is the end of
            some process.

    Raises:
        InvalidConfig, Overflow: a field is named. OutOfMemory: the size is named, beside what there is.

    Attributes:
        device, shape: as given.
        info: sizes that follow, as the library has them.
        batch, query_rows: as given.
    """

    def __init__(
        self,
        device: Device,
        shape: Shape,
        *,
        lanes: int,
        max_tokens: int,
        slots: int | Many[int],
        query_rows: int = 1,
        batch: int | None = None,
        steps_in_flight: int | None = None,
        micro_batches: int | None = None,
        host_pages: int | None = None,
        index_pages: int | None = None,
        pool_slots: int | Many[int] | None = None,
        min_budget: int | None = None,
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
        config.memory = (
            (0 if huge_pages else lib.FB_MEMORY_SMALL_PAGES)
            | (0 if populate else lib.FB_MEMORY_LAZY)
            | (0 if lock else lib.FB_MEMORY_UNLOCKED)
            | (lib.FB_MEMORY_OVERCOMMIT if overcommit else 0)
        )
        end_left()
        self._record, text = CacheHandle(device._handle), new_text()
        self._closer = weakref.finalize(self, give_up, self._record)
        # The interpreter's end waits: `CacheHandle.at_exit`.
        self._closer.atexit = False
        try:
            self._record.enter()
            made = self._record.made
            check_created(lib.fb_cache_create(device._open(), config, text, len(text), made), text)
        except BaseException:
            # Also one that was made while an exception was pending.
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
            promised: tokens that it may decode.
            ratio: slots in each layer as a share of prompt and promised tokens. Not beside `slots`.
            slots: in each layer; or one number a layer; None: as the cache was declared.
            bring_up: "whole" (every row when it joins, if all fit its slots) or "nothing".
            tokens: the prompt's token ids, as far as they may be shared: pages that were published with the same
                tokens, keys and salt are taken over; `Sequence.shared` says how many tokens.
            keys: 16 bytes or None for each full page of `tokens`, for what ids do not say.
            salt: tells apart what equal tokens do not: tenants, adapters.

        Raises:
            Exhausted: names the pool that has too little left. InvalidConfig, OutOfRange: a field is named.
        """
        self._record.make_up()
        config, _table = self._open_config(prompt, promised, ratio, slots, bring_up)
        shared = ffi.new("uint32_t *")
        if tokens is None:
            if keys is not None or salt:
                raise InvalidArgument("tokens", "None beside keys or a salt", "the prompt's token ids")
            return self._opened(lambda number: lib.fb_open(self._pointer, config, number), shared)
        named, _keep = tokens_of(tokens, keys)
        salt = _salt(salt)
        return self._opened(
            lambda number: lib.fb_open_shared(self._pointer, config, named, salt, len(salt), number, shared), shared
        )

    def _opened(self, call: Callable[[Any], Any], shared: Any = (0,)) -> Sequence:
        """The sequence that a call opens; it is closed again if an exception comes between."""
        number = ffi.new("uint64_t *")
        try:
            check(call(number), self._pointer)
            return Sequence(self, number[0], shared[0])
        except BaseException:
            if number[0]:
                self._record.sequences.add(number[0])
                self._record.forget_sequence(number[0])
            raise

    def _open_config(
        self, prompt: int, promised: int, ratio: float | None, slots: int | Many[int] | None, bring_up: str
    ) -> tuple[Any, Any]:
        if not isinstance(bring_up, str) or bring_up not in BRING_UP:
            raise InvalidArgument("bring_up", repr(bring_up), " or ".join(map(repr, BRING_UP)))
        config = sized("fb_open_config")
        by_layer = None
        if slots is None and ratio is None:
            slots = self._by_layer
        if slots is not None and not hasattr(slots, "__index__"):
            by_layer, slots = by_layer_of(slots, self.shape.all_layers, "slots"), None
        prompt, promised = index(prompt, "prompt"), index(promised, "promised")
        numbers = {"prompt": prompt, "promised": promised, "ratio": ratio, "slots": slots, "slots_by_layer": by_layer}
        set_fields(config, numbers)
        config.bring_up = BRING_UP[bring_up]
        return config, by_layer

    def find_shared(self, tokens: Any, *, keys: TokenKeys = None, salt: bytes = b"") -> int:
        """How many tokens `open` would take over now. Changes nothing.

        Raises:
            InvalidArgument: tokens, keys or salt are none. Closed, Busy.
        """
        named, _keep = tokens_of(tokens, keys)
        salt = _salt(salt)
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
        """Begins a step: enqueues the wait for the work before it, and the commit of its sequences' accepted rows.

        Args:
            rows: of the batch: the sequence; how many rows of its previous step were accepted, 0 before its first
                step, None where `accepted` says it; its query rows in this step.
            query_rows: of each row: the width of the step; None: the most in `rows`.
            stream: see the device. The step's other calls take it too, where they are given none.
            accepted: int32 or uint32 [batch of the cache], on the device, read in the stream's order.
            micro_batch: which.

        Raises:
            Busy: every step is in flight: retire one. InvalidConfig, OutOfRange, Closed: the row is named.
        """
        self._record.make_up()
        try:
            given = list(rows)
        except TypeError as error:
            raise InvalidArgument("rows", type(rows).__name__, "(sequence, accepted, query rows) a row") from error
        table, widest = self._packed(given) or self._checked(given)
        config = sized("fb_step_config")
        config.rows, config.row_count = table, len(given)
        config.query_rows = widest
        set_fields(config, {"query_rows": query_rows, "micro_batch": micro_batch})
        on = self.device.stream_of(stream)
        in_flight = InFlight(on)
        if accepted is not None:
            counts = self._counts(accepted)
            config.accepted = ffi.cast("uint32_t *", counts)
            in_flight.held.append((accepted, counts))
        try:
            self._record.steps[in_flight] = None
            step = Step(self, in_flight, len(given), config.query_rows)
            check(lib.fb_prepare(self._pointer, config, on, in_flight.number), self._pointer)
            step._number = in_flight.number[0]
            return step
        except BaseException:
            self._record.forget_step(in_flight)
            raise

    def _packed(self, given: list[tuple[Sequence, int | None, int]]) -> tuple[Any, int] | None:
        """The rows of a batch as the library has them, and the widest; None where one is wrong.

        A step has hundreds of rows and each is looked at in each step: they are packed by one call.
        """
        words: list[Any] = []
        widest = 0
        try:
            for sequence, taken, width in given:
                if type(sequence) is not Sequence or sequence.cache is not self:
                    return None
                words += (sequence._number, _ON_DEVICE if taken is None else taken, width)
                if width > widest:
                    widest = width
            return ffi.from_buffer("fb_batch_row[]", struct.pack("QII" * len(given), *words)), widest
        except (TypeError, ValueError, struct.error):
            return None

    def _checked(self, given: list[tuple[Sequence, int | None, int]]) -> tuple[Any, int]:
        """The same, an error naming the row."""
        table = ffi.new("fb_batch_row[]", len(given))
        widest = 0
        for index, row in enumerate(given):
            try:
                sequence, taken, width = row
                if type(sequence) is not Sequence or sequence.cache is not self:
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

    def _counts(self, accepted: Tensor) -> Any:
        if isinstance(accepted, np.ndarray) and accepted.dtype == np.uint32:
            accepted = accepted.view(np.int32)
        return words(accepted, "accepted", (self.batch,), self.device.place, False)

    def reap(self, stream: Any = None) -> int:
        """Takes up what has ended since: releases closed sequences, and what was forgotten.

        Returns:
            How many closed sequences still wait.

        Raises:
            InvalidArgument: the stream. Busy, Closed.
        """
        self._record.make_up()
        waiting = ffi.new("uint32_t *")
        check(self._record.reap(self.device.stream_of(stream), waiting), self._pointer)
        return int(waiting[0])

    def slab(self, layer: int, run: int = 0) -> Any:
        """What attention reads of a layer: uint8 `[blocks, 64, row_bytes[run]]`, slot s at `[s // 64, s % 64]`.

        A NumPy view on the host device, writable; on CUDA a `CudaMemory`, of which `torch.from_dlpack` and
        `cupy.asarray` take views. It keeps the memory alive, also when the cache is closed. Attention reads it, and
        the engine writes a step's new rows to their landing slots; nothing else may be written.

        Raises:
            OutOfRange: no such layer. InvalidArgument: no such run.
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
        """A layer's rows in the total pool, for who writes prompt rows in place (`Sequence.append_in_place`).

        A writable view of host memory, whatever the device, uint8 `[pages, page_tokens, host_stride]`: a row's
        first `row_bytes` bytes are its own. `Sequence.pages` says which pages; shared ones may not be written. It keeps
        the memory alive, as `slab`.

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
            OutOfRange: no such layer, or a model without index keys.
        """
        address, count = ffi.new("void **"), ffi.new("uint64_t *")
        check(lib.fb_index_keys(self._pointer, index(layer, "layer"), address, count), self._pointer)
        page = self.shape.page_tokens * self.shape.index_key_bytes
        shape = (int(count[0]) // page, self.shape.page_tokens, self.shape.index_key_bytes)
        return self.device.view(int(ffi.cast("uintptr_t", address[0])), shape)

    def stats(self) -> Stats:
        """Counters and gauges, now. May be called beside another thread's calls that only read.

        Raises:
            Busy: beside one that does not. Closed.
        """
        stats = sized("fb_stats")
        check(lib.fb_cache_stats(self._pointer, stats), self._pointer)
        return Stats(*(int(getattr(stats, name)) for name in Stats._fields))

    def fallbacks(self) -> list[str]:
        """What the memory had to do without, a line each; empty: everything could be had.

        Raises:
            Busy, Closed.
        """
        lines: list[str] = []
        text = ffi.new("char[]", _LINE_BYTES)
        while len(lines) < _FALLBACKS_MOST:
            status = lib.fb_cache_fallback(self._pointer, len(lines), text, _LINE_BYTES)
            if status == lib.FB_OUT_OF_RANGE:
                break
            check(status, self._pointer)
            lines.append(ffi.string(text).decode("utf-8", "replace"))
        return lines

    def watch(self, left: Callable[[Stats], object]) -> None:
        """Calls `left` with the statistics whenever a step is retired, on the thread that retires it.

        Raises:
            InvalidArgument: `left` is not to be called.
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
        """Enqueues one layer of a step, or one pass of a draft layer, in the order "none", "da" or "dba".

        Args:
            step: open.
            layer: which.
            order: what hides the gather.
            layers: streams and buffers, the same for all layers of a step.
            enqueue: the engine's work, see `EngineCall`. It must not call into this cache.
            draft_pass: of a draft layer.

        Raises:
            InvalidArgument, InvalidConfig, OutOfRange: nothing was enqueued. What `enqueue` raises comes out of here,
            and the step is abandoned: finish and retire it, then roll its sequences back or close them.
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
        """Enqueues all layers of open steps, at most one of each micro-batch: each layer once, then the draft layers'
        passes, the steps in turn.

        Args:
            steps, layers: as many of one as of the other.
            by_layer: the order of every layer, draft layers last.
            enqueue, draft_passes: as of `overlap`.

        Raises:
            As `overlap`; all the steps are abandoned then.
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
        """Captures all layers of a bucket as one graph, to be launched for any steps that fit it.

        Args:
            micro_batches: whose steps run in the graph: streams, batch rows of the bucket, buffers.
            query_rows: of the steps.
            by_layer, draft_passes: as of `overlap_steps`.
            enqueue: called while it is captured, and never again.
            into: the engine's own capture is under way on the first compute stream: everything is enqueued there.

        Raises:
            InvalidConfig: the device captures nothing, or the config does not fit.
        """
        return overlap.capture(self, micro_batches, query_rows, by_layer, enqueue, draft_passes, into)

    def validate(self) -> None:
        """Checks every invariant of every pool and table: for tests, between steps.

        Raises:
            Internal: names the broken one. Busy, Closed.
        """
        check(lib.fb_cache_validate(self._pointer), self._pointer)

    def close(self) -> None:
        """Ends it with all its steps and sequences; idempotent. Waits for what is enqueued, where that runs later.

        Its memory, the total pool's too, stays with the device until that ends: views may still read it.

        Raises:
            Busy: another call is inside the cache, of another thread or around a callback; it stays open as it is.
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


def _salt(salt: bytes) -> bytes:
    if not isinstance(salt, bytes):
        raise InvalidArgument("salt", type(salt).__name__, "bytes")
    return salt
