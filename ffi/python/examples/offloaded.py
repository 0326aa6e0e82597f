"""How an engine embeds forebay: the K/V rows of SmolLM2 in host memory, a fifth of them in slots of the device.

One row of a layer is a position's keys and values, two runs of 768 bytes. The total pool has every row of every
sequence. The sparse pool has slots for a share of them. `Offloaded.rows` reads attention's keys and values from slots
only, and `Offloaded.put_rows` writes a step's new rows to landing slots, from which forebay stores them. Index keys are
half-precision copies of the keys, in forebay's pages, which are always on the device.

The engine chooses the order of a layer's work:

    whole   project, index, resolve and gather, prepare, scatter, attend: attention waits for the gather
    waves   the same with several gathers (attention waves) into the same scratch slots, attention after each, a merge
    da      attention over the resident rows during the gather, then over the fetched rows, and a merge
    dba     the same, and the first half's gather runs during the second half's indexer

The engine drives the first two orders itself. forebay drives the others: it calls the engine back for each piece of a
layer, and runs resolve, gather and scatter on streams of their own, which are threads on the host device. "whole" gives
the same bits as `engine.Resident`, the others the same sums in another order.

`arrays` selects the device, and how the engine reads and writes there. On a GPU torch computes attention, directly over
the slabs; NumPy's results are copied in and out on torch's stream.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import forebay
import numpy as np
from arrays import Array, Arrays, Numpy
from engine import Forward, Request
from numpy.typing import NDArray
from smollm2 import Floats, Halves, Ids, Model, top_k

BLOCK = 64
"""Slots of a block, and tokens of a page."""
ORDERS = ("whole", "waves", "da", "dba")


@dataclass(frozen=True)
class Work:
    """A step's selection and slots, as forebay takes them and as the engine does."""

    buffers: forebay.Buffers
    selection: Array
    slots: Array
    lists: Array


class Offloaded:
    """A cache for `engine.Decoder` that keeps its rows in forebay. Use it in a ``with``, whose end closes everything.
    """

    def __init__(
        self,
        model: Model,
        requests: Sequence[Request],
        *,
        top_k: int,
        query_rows: int = 1,
        ratio: float = 0.2,
        order: str = "whole",
        attention_waves: int = 1,
        resize_every: int = 0,
        arrays: Arrays | None = None,
        device: forebay.Device | None = None,
        arriving: int | None = None,
    ) -> None:
        """Takes all memory and opens the requests one after another; requests with the same beginning share pages.

        Args:
            model: the model whose rows are kept.
            requests: the prefilled requests to decode.
            top_k: positions that a query row reads in a layer.
            query_rows: 1 + drafts.
            ratio: slots of a sequence in each layer as a share of its prompt and promised tokens.
            order: the order of a layer's work, one of `ORDERS`.
            attention_waves: attention waves that share the scratch slots in turn, for any order but "whole".
            resize_every: after each this many steps all budgets are halved, or made whole again; 0: never. A server
                does so as sequences come and go.
            arrays: the device's arrays; None: the host device's.
            device: a device that the engine uses for other things too, and closes; None: one of the cache's own.
            arriving: the most sequences that may arrive at once (`arrived.Arrived`); None: none.
        """
        self.arrays: Arrays = arrays or Numpy()
        self.model, self.k, self.query_rows, self.order = model, top_k, query_rows, order
        self.ratio, self.resize_every, self.steps = ratio, resize_every, 0
        tokens = [request.prompt.keys.shape[1] + request.promised for request in requests]
        self.tokens = max(tokens)
        self.budget = max(int(ratio * self.tokens + 0.5), 1)
        least = max(int(self._ratios()[-1] * min(tokens) + 0.5), 1)
        run = 4 * model.kv_width
        shape = forebay.Shape(
            layers=model.layers,
            row_bytes=(run, run),
            top_k=top_k,
            index_key_bytes=2 * model.kv_width,
            page_tokens=BLOCK,
        )
        overlapped = order in ("da", "dba")
        self.device, self.lent = device or self.arrays.device(overlapped), device is not None
        # For compute, resolve, gather and scatter. None is the device's first stream, or torch's current one.
        self.streams = [self.arrays.stream(self.device) if overlapped else None for _ in range(4)]
        self.cache = forebay.Cache(
            self.device,
            shape,
            lanes=len(requests),
            max_tokens=self.tokens,
            slots=self.budget,
            min_budget=least,
            query_rows=query_rows,
            attention_waves=attention_waves,
            arriving=arriving,
        )
        layers = range(model.layers)
        view = self.arrays.view
        self.keys = [view(self.cache.slab(layer, 0), np.float32) for layer in layers]
        self.values = [view(self.cache.slab(layer, 1), np.float32) for layer in layers]
        self.key_pages = [view(self.cache.index_keys(layer), np.float16) for layer in layers]
        # For each layer, over all retired steps: distinct selected rows that were resident, and rows fetched.
        self.hits, self.misses = np.zeros(model.layers, np.int64), np.zeros(model.layers, np.int64)
        # For each sequence: index-key pages, committed tokens.
        self.pages: list[NDArray[np.intp]] = []
        self.lengths = np.array([request.prompt.keys.shape[1] for request in requests], np.int32)
        # For the current step: its sequences, positions [n, q], and the slots of its new rows.
        self.batch: list[int] = []
        self.positions: Ids = np.empty(0, np.int32)
        self.landing: NDArray[np.intp] = np.empty(0, np.intp)
        # For each shape of a step, shared by all layers.
        self.work: dict[tuple[int, ...], Work] = {}
        self.sequences = [self._open(request, ratio) for request in requests]

    def _open(self, request: Request, ratio: float) -> forebay.Sequence:
        """Admits a request, appends its prompt's rows, and joins it to its lane with a warm-up."""
        keys, values = request.prompt.keys, request.prompt.values
        length = keys.shape[1]
        tokens = np.asarray(request.tokens[:length], np.uint32)
        sequence = self.cache.open(
            prompt=length, promised=request.promised, ratio=ratio, bring_up="nothing", tokens=tokens
        )
        pages = np.array([page.index_keys for page in sequence.pages()], np.intp)
        self.pages.append(pages)
        # Published pages already have their rows and index keys.
        fresh = np.arange(sequence.shared, length)
        for layer in range(self.model.layers):
            sequence.append(layer, np.concatenate([keys[layer, fresh], values[layer, fresh]], axis=1))
            at = (pages[fresh // BLOCK], fresh % BLOCK)
            self.arrays.put(self.key_pages[layer], at, keys[layer, fresh].astype(np.float16))
        sequence.join(warm_up=self._warm_up(request.prompt.queries, keys))
        # Steps wait for the join without this call, but publish needs it to have ended.
        self.device.wait()
        sequence.publish(sequence.shared, tokens[sequence.shared :])
        return sequence

    def _warm_up(self, queries: Floats, keys: Floats) -> Array | None:
        """The selections of the last prompt positions, oldest first: ``[layers, steps, k]``, on the device."""
        steps, length = queries.shape[1], keys.shape[1]
        if steps == 0:
            return None
        visible = np.arange(length - steps, length, dtype=np.int32) + 1
        halves = keys.astype(np.float16)
        given, seen = self.arrays.numbers(self.device, (len(keys), steps, self.k))
        for layer in range(len(keys)):
            self.arrays.put(seen, layer, top_k(queries[layer], halves[layer], visible, self.k))
        return given

    def _ratios(self) -> list[float]:
        """The ratios that budgets have in turn."""
        return [self.ratio, self.ratio / 2] if self.resize_every else [self.ratio]

    def _resize(self) -> None:
        """Gives all sequences the budgets whose turn it is, if it changes with this step."""
        if self.resize_every and self.steps and self.steps % self.resize_every == 0:
            ratio = self._ratios()[self.steps // self.resize_every % 2]
            for sequence in self.sequences:
                if not sequence.closed:
                    sequence.resize(ratio=ratio, stream=self.streams[0])
        self.steps += 1

    def step(self, rows: Sequence[int], accepted: Sequence[int], tokens: Ids) -> Floats:
        """See `engine.Cache`."""
        self._resize()
        self.batch = list(rows)
        self.lengths[self.batch] += np.asarray(accepted, np.int32)
        batch = [(self.sequences[row], count, tokens.shape[1]) for row, count in zip(rows, accepted, strict=True)]
        forward = Forward(self.model, self, self.lengths[self.batch], tokens, self.k)
        with self.cache.prepare(batch, stream=self.streams[0]) as step:
            # The same slots in every layer.
            landing = [[sequence.landing_slot(row) for row in range(width)] for sequence, _, width in batch]
            self.landing = np.array(landing, np.intp)
            self.positions = forward.positions
            if self.order == "whole":
                self._whole(step, forward)
            elif self.order == "waves":
                self._waves(step, forward)
            else:
                self._overlapped(step, forward)
            retired = step.retire(wait=True)
        for layer, count in enumerate(retired.layers):
            self.hits[layer] += count.hits
            self.misses[layer] += count.misses
        return forward.logits()

    def end(self, row: int) -> None:
        """See `engine.Cache`. The next request can use its pages, slots and lane."""
        self.sequences[row].close(self.streams[0])

    def _work_of(self, forward: Forward) -> Work:
        """A layer's selection and slots; every layer of every step reuses them."""
        if forward.shape not in self.work:
            whole, lists = (*forward.shape, self.k), 1 + self.cache.info.attention_waves
            shapes = [whole, whole]
            if self.order != "whole":
                shapes += [(lists, *whole), (lists, *forward.shape)]
            made = [self.arrays.numbers(self.device, shape) for shape in shapes]
            buffers = forebay.Buffers(self.cache, *(given for given, _ in made))
            seen = [array for _, array in made]
            self.work[forward.shape] = Work(buffers, seen[0], seen[1], seen[2] if len(seen) > 2 else None)
        return self.work[forward.shape]

    def _whole(self, step: forebay.Step, forward: Forward) -> None:
        """Every layer, with attention over all rows at once."""
        work = self._work_of(forward)
        for layer in range(self.model.layers):
            forward.project(layer)
            forward.index(layer, work.selection)
            step.layer(layer, work.buffers)
            forward.prepare(layer)
            step.scatter(layer)
            forward.attend(layer, work.slots)
            forward.rest(layer)

    def _waves(self, step: forebay.Step, forward: Forward) -> None:
        """Every layer, with split attention: the resident rows, then the rows of each attention wave."""
        work = self._work_of(forward)
        for layer in range(self.model.layers):
            forward.project(layer)
            forward.index(layer, work.selection)
            step.resolve(layer, work.buffers)
            forward.prepare(layer)
            step.scatter(layer)
            forward.attend(layer, work.lists[0])
            for number in range(self.cache.info.attention_waves):
                # A wave reuses the slots of the previous wave, whose attention comes first.
                step.gather(layer, attention_wave=number)
                forward.attend(layer, work.lists[1 + number])
            forward.rest(layer)

    def _overlapped(self, step: forebay.Step, forward: Forward) -> None:
        """Every layer in an order that hides its gather. The engine's work is enqueued, as kernels would be."""
        work = self._work_of(forward)
        compute, resolve, gather, scatter = self.streams
        layers = forebay.Layers(
            work.buffers, compute=compute, resolve=resolve, gather=gather, scatter=scatter, half=(step.rows + 1) // 2
        )

        def enqueue(call: forebay.EngineCall) -> None:
            self.arrays.run(self.device, call.stream, functools.partial(self._piece, forward, work, call))

        self.cache.overlap_steps([step], [layers], [self.order] * self.model.layers, enqueue)
        step.finish()
        self.device.wait(compute)

    def _piece(self, forward: Forward, work: Work, call: forebay.EngineCall) -> None:
        """Does the engine's piece of a layer."""
        match call.work, call.attended:
            case "project", _:
                forward.project(call.layer)
            case "index", _:
                forward.index(call.layer, work.selection, call.first, call.count)
            case "prepare", _:
                forward.prepare(call.layer)
            case "attend", "all":
                forward.attend(call.layer, work.slots)
            case "attend", "resident":
                forward.attend(call.layer, work.lists[0])
            case "attend", "fetched":
                forward.attend(call.layer, work.lists[1 + call.attention_wave])
            case "rest", _:
                # It merges as well.
                forward.rest(call.layer)

    def put_index_keys(self, layer: int, keys: Halves) -> None:
        """See `engine.Store`."""
        for row, sequence in enumerate(self.batch):
            page, place = np.divmod(self.positions[row], BLOCK)
            self.arrays.put(self.key_pages[layer], (self.pages[sequence][page], place), keys[row])

    def index_keys(self, layer: int, row: int, count: int) -> Halves:
        """See `engine.Store`."""
        pages = self.pages[self.batch[row]][: -(-count // BLOCK)]
        found = self.arrays.rows(self.key_pages[layer], pages, slice(None))
        keys: Halves = self.arrays.numpy(found).reshape(-1, self.model.kv_width)[:count]
        return keys

    def put_rows(self, layer: int, keys: Floats, values: Floats) -> None:
        """See `engine.Store`."""
        # The old rows in these slots may be accepted ones, which the step's commit still has to copy.
        self.arrays.ready(self.device, self.streams[0])
        at = np.divmod(self.landing, BLOCK)
        self.arrays.put(self.keys[layer], at, keys)
        self.arrays.put(self.values[layer], at, values)

    def rows(self, layer: int, slots: Array) -> tuple[Array, Array]:
        """See `engine.Store`."""
        self.arrays.ready(self.device, self.streams[0])
        flat = slots.clip(min=0).reshape(-1, slots.shape[-1])
        at = (flat // BLOCK, flat % BLOCK)
        return self.arrays.rows(self.keys[layer], *at), self.arrays.rows(self.values[layer], *at)

    def host_bytes(self) -> int:
        """Bytes of a layer's rows in host memory; shared rows count once."""
        rows = int(self.lengths.sum()) - sum(sequence.shared for sequence in self.sequences)
        return rows * self.cache.info.host_stride

    def slot_bytes(self) -> int:
        """Bytes of a layer's slots on the device, in whole blocks, without landing slots and the shared scratch slots.
        """
        blocks = -(-self.budget // BLOCK) * len(self.sequences)
        return blocks * self.cache.info.block_bytes

    def describe(self) -> str:
        """The sizes, in one line."""
        shared = [sequence.shared for sequence in self.sequences[1:]]
        return (
            f"{self.budget:,} slots for {self.tokens:,} rows in each layer ({100 * self.budget / self.tokens:.0f}%); "
            f"a query row reads {self.k}, a step has {self.query_rows}"
            + (f"; found shared: {', '.join(f'{count:,}' for count in shared)} tokens" if shared else "")
        )

    def close(self) -> None:
        """Ends the sequences, the cache, and a device of its own."""
        self.keys, self.values, self.key_pages, self.work = [], [], [], {}
        self.cache.close()
        if not self.lent:
            self.device.close()

    def __enter__(self) -> Offloaded:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
