"""forebay's cache behind vLLM: a `Store`, and what vLLM's connector does with requests.

    vLLM                              here
    a request waits for memory        `admit`: lane, slots and pages, or the request waits on
    a prefill's chunk                 rows go to the total pool, index keys to forebay's pages on the device
    a decode step                     `forebay.serving` resolves, gathers and stores
    drafts were rejected              the next pass begins at a smaller position: `crop`
    preemption                        `park`: pages stay; the next `admit` resumes, and nothing is computed again
    the request has ended             full pages are published for prompts that begin alike, then `end`

**A request that vLLM preempts during its prefill** keeps its lane and slots. vLLM puts it first in its queue.

**Nothing may fail inside a pass**, because vLLM ends with its model. So `admit` takes everything that a request can
need, for its prompt and all tokens that it may be given, and vLLM's blocks are the only thing that runs out later.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence as Many

import numpy as np
from vllm.logger import init_logger

from ..cache import Cache
from ..config import SLOT_BLOCK, footprint
from ..device import HostDevice
from ..errors import Exhausted, ForebayError, Internal, InvalidConfig, OutOfMemory, counted
from ..serving import Request, Requests
from ..shape import Shape
from .batch import Batch, BatchRow
from .options import Options

# A prefill tells a request's first step what its last tokens selected.
_WARM = 8
_log = init_logger("vllm.forebay")


class Limits(NamedTuple):
    """What vLLM was started with."""

    # Most requests of a batch, and most tokens of a request.
    requests: int
    tokens: int
    # 1 + drafts.
    query_rows: int
    # Tokens of a block.
    block: int
    # Whether prompts share pages.
    share: bool


class Sizes(NamedTuple):
    """The sizes of forebay's cache that hold the tokens of vLLM's blocks."""

    # vLLM's blocks.
    blocks: int
    # Slots of all requests in each layer.
    pool_slots: int
    # Slots of a request in each layer, if no ratio is given; otherwise the fewest.
    slots: int
    # Pages of the total pool.
    pages: int


class Counts(NamedTuple):
    """What a pool has done. All of them only grow."""

    hits: int
    misses: int
    scratch: int
    prompt_tokens: int
    shared_tokens: int
    preempted: int
    resumed: int


def sizes(shape: Shape, limits: Limits, options: Options, blocks: int) -> Sizes:
    """The sizes for so many of vLLM's blocks."""
    page_bytes = shape.layers * limits.block * _stride(shape)
    # A request's last page may be partly used, and drafts may begin another one.
    more = (1 + -(-limits.query_rows // limits.block)) * limits.requests
    pages = blocks if options.host_memory is None else options.host_memory // page_bytes
    if options.slots is not None:
        slots = min(options.slots, limits.tokens)
        return Sizes(blocks, _whole(slots) * limits.requests, slots, pages + more)
    ratio = options.ratio or 1.0
    least = _whole(int(ratio * limits.tokens) + 1)
    pool = _whole(int(ratio * blocks * limits.block)) + SLOT_BLOCK * limits.requests
    return Sizes(blocks, max(pool, least), 1, pages + more)


def longest(limits: Limits) -> int:
    """Pages of the longest request, with the rows of a step in flight."""
    return -(-(limits.tokens + limits.query_rows) // limits.block) + 1


def _whole(slots: int) -> int:
    return -(-slots // SLOT_BLOCK) * SLOT_BLOCK


def _stride(shape: Shape) -> int:
    return -(-sum(shape.row_bytes) // 64) * 64


def arguments(limits: Limits, found: Sizes) -> dict[str, Any]:
    """The arguments of `Cache` and `footprint`."""
    return {
        "lanes": limits.requests,
        "max_tokens": limits.tokens,
        "slots": found.slots,
        "pool_slots": found.pool_slots,
        "query_rows": limits.query_rows,
        "steps_in_flight": 1,
        "parked": limits.requests,
        "host_pages": found.pages,
        "index_pages": found.pages,
    }


def fit(shape: Shape, limits: Limits, options: Options, memory: int) -> Sizes:
    """The most blocks whose slots, index keys and tables fit `memory` bytes of the device.

    Raises:
        OutOfMemory: not even the longest request fits.
    """
    least = longest(limits)

    def taken(blocks: int) -> int:
        found = footprint(shape, **arguments(limits, sizes(shape, limits, options, blocks)))
        return found.index_keys + found.slots + found.landing + found.scratch + found.padding + found.tables

    if taken(least) > memory:
        given = f"{memory:,} bytes of KV cache memory do not hold the slots and index keys of one request"
        raise OutOfMemory(
            f"{given} of {counted(limits.tokens, 'token')}, {taken(least):,} bytes: lower the ratio or max_model_len, "
            "or give vLLM more memory (--kv-cache-memory-bytes, --gpu-memory-utilization)"
        )
    if options.slots is not None and options.host_memory is not None:
        # Nothing grows with the blocks: they count the tokens of all requests at once.
        return sizes(shape, limits, options, limits.requests * least)
    low, high = least, 2 * least
    while taken(high) <= memory:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if taken(middle) <= memory else (low, middle)
    return sizes(shape, limits, options, low)


class ForebayRows:
    """A `Store` in forebay's pools, and the requests by vLLM's ids."""

    def __init__(self, shape: Shape, limits: Limits, options: Options, blocks: int, dtype: Any) -> None:
        found = sizes(shape, limits, options, blocks)
        least = longest(limits)
        if found.pages < least:
            given = f"host_memory: {counted(found.pages, 'page')} of {limits.block} tokens"
            raise InvalidConfig(f"{given} do not hold one request of {limits.tokens} tokens: {least} are needed")
        self._limits, self._options, self._dtype = limits, options, dtype
        self._device = HostDevice()
        try:
            self.cache = Cache(self._device, shape, **arguments(limits, found))
            self.requests = Requests(
                self.cache, ratio=options.ratio, slots=options.slots, record=options.record
            )
        except BaseException:
            self._device.close()
            raise
        self._batch: Any = None
        self._step: Any = None
        self._layers = 0
        # The token ids of the prompts of requests that share pages.
        self._sharing: dict[Any, Any] = {}
        self._prompts: dict[Any, int] = {}
        # Whether a request of the present scan of vLLM's queue waits: later ones must not take what it waits for.
        self._waits = False
        self._preempted = self._resumed = 0

    def admit(self, id: str, prompt: Many[int], tokens: int, most: int, salt: bytes, share: bool) -> int | None:
        """Takes what a waiting request needs, once. Returns the tokens whose rows are here; None: too little is free.

        Args:
            id: vLLM's id.
            prompt: the token ids of its prompt.
            tokens: its tokens so far: of the prompt, and of an answer that has to be computed again.
            most: tokens that it may have in the end.
            salt: what its prompt is shared under.
            share: whether it may share its prompt's beginning.
        """
        if id in self.requests and not share and self.requests[id].length:
            # vLLM computes it from the beginning.
            self.requests.end(id)
        if id in self.requests:
            found = self.requests[id]
            if found.state == "parked":
                try:
                    found.resume()
                except Exhausted:
                    self._waits = True
                    return None
                self._resumed += 1
            return min(found.length, tokens - 1)
        if self._waits:
            return None
        # At least one token of the prompt is computed: it says what comes next.
        given = np.asarray(prompt[:-1], np.uint32) if share and self._limits.share else None
        try:
            found = self.requests.add(id, prompt=tokens, promised=most - tokens, tokens=given, salt=salt)
        except Exhausted:
            self._waits = True
            return None
        self._prompts[id] = tokens
        if given is not None:
            self._sharing[id] = np.asarray(prompt, np.uint32)
        return found.shared

    def scanned(self) -> None:
        """vLLM has asked about its queue, in order."""
        self._waits = False

    def preempt(self, id: str) -> None:
        """Takes lane and slots from a request. Its rows stay, or if too many are parked, it is computed again."""
        if id not in self.requests or self.requests[id].state != "running":
            return
        try:
            self.requests[id].park()
            self._preempted += 1
        except Exhausted:
            self.requests.end(id)
            self._forget(id)

    def end(self, id: str, tokens: Many[int]) -> None:
        """Ends a request with these token ids, after its full pages were published."""
        if id not in self.requests:
            self._forget(id)
            return
        found = self.requests[id]
        try:
            if found.state in ("filling", "running") and found.length >= self._prompts[id]:
                self._publish(found, tokens)
            found.end()
        except ForebayError as error:
            # vLLM would end with it, and what was lost is a shared prefix or a recording.
            _log.warning("%s", error)
        if id in self.requests:
            self.requests.end(id)
        self._forget(id)

    def _publish(self, request: Request, tokens: Many[int]) -> None:
        """Publishes the full pages of a request that ends. The newest token never has a row: at its position there may
        be that of a rejected draft.
        """
        kept = min(request.length, len(tokens) - 1)
        if request.id not in self._sharing or kept < 1:
            return
        if request.length > kept:
            request.crop(kept)
        request.publish(np.asarray(tokens[:kept], np.uint32))

    def _forget(self, id: str) -> None:
        self._sharing.pop(id, None)
        self._prompts.pop(id, None)

    def prompt(self, id: str) -> int:
        """The tokens of a request that it computes as a prompt: its prompt, and what it had answered when it was added
        again."""
        return self._prompts[id]

    def begin(self, batch: Batch) -> None:
        """See `Store`."""
        self.abandon()
        self._batch, self._layers = batch, 0
        for row in (*batch.prefills, *batch.decodes):
            request = self.requests[row.id]
            if request.length > row.start:
                # Drafts that were rejected.
                request.crop(row.start)
        for row in batch.decodes:
            if row.id in self._sharing and self.requests[row.id].state == "filling":
                # Its prompt is complete. Others that begin alike need not wait for its end.
                self.requests[row.id].publish(self._sharing[row.id])
        if batch.decodes:
            self._step = self.requests.step([(row.id, row.width) for row in batch.decodes])

    def write(self, layer: int, rows: Any, keys: Any) -> None:
        """See `Store`."""
        group = self.requests.groups.index(layer) if keys is not None else -1
        for row in self._batch.prefills:
            request, part = self.requests[row.id], slice(row.first, row.first + row.width)
            if request.filled(layer) != row.start:
                raise Internal(f"request {row.id}: rows from {row.start} on, and {request.filled(layer)} are here")
            request.prefill(layer, rows[part])
            if keys is not None:
                request.put_index_keys(group, keys[part].contiguous(), row.start)
        if self._step is not None:
            self._step.write(layer, rows[self._batch.at])
            if keys is not None:
                self._step.put_index_keys(group, keys[self._batch.at])

    def keys(self, layer: int, row: BatchRow) -> Any:
        """See `Store`."""
        group = self.requests.groups.index(layer)
        return self.requests[row.id].index_keys(group, end=row.end, dtype=self._dtype)

    def context(self, layer: int, row: BatchRow) -> Any:
        """See `Store`."""
        return self.requests[row.id].read(layer, end=row.end, dtype=self._dtype)

    def selected(self, layer: int, row: BatchRow, selection: Any) -> None:
        """See `Store`: the rows that a request's first step finds in slots."""
        request = self.requests[row.id]
        if request.state == "filling" and row.end >= row.prompt:
            request.warm_up(layer, selection[-_WARM:])

    def gather(self, layer: int, selection: Any) -> tuple[Any, Any]:
        """See `Store`."""
        slots = self._step.select(layer, selection)
        return self._step.rows(layer, slots, self._dtype), slots >= 0

    def attended(self, layer: int) -> None:
        """See `Store`."""
        self._layers = layer + 1
        if self._step is not None:
            self._step.stored(layer)

    def finish(self) -> None:
        """Ends the pass. One that an exception ended is abandoned: the exception is vLLM's."""
        if self._layers < self.cache.info.layers:
            self.abandon()
            return
        step, self._step = self._step, None
        if step is not None:
            step.finish()
        if self._options.validate:
            self.cache.validate()

    def abandon(self) -> None:
        """Gives up a step that was not finished."""
        step, self._step = self._step, None
        if step is not None:
            step.abandon()

    def counts(self) -> Counts:
        """What it has done so far."""
        stats = self.requests.stats()
        hits, misses, scratch = map(int, stats.layers.sum(axis=0))
        prompt, shared = stats.cache.prompt_tokens, stats.cache.shared_tokens
        return Counts(hits, misses, scratch, prompt, shared, self._preempted, self._resumed)

    def close(self) -> None:
        """Ends all requests, and gives the memory back."""
        self.abandon()
        try:
            self.requests.close()
        except ForebayError as error:
            # A recording: all requests have ended all the same.
            _log.warning("%s", error)
        self.cache.close()
        self._device.close()
