"""forebay's cache behind vLLM: a `Store`, and what vLLM's connector does with requests.

    vLLM                              here
    a request waits                   `find`: how many of its tokens have rows here
    it is scheduled                   `admit`: a lane, and the shared pages
    a prefill's chunk                 pages for the chunk; rows go to the total pool, index keys to pages on the device
    a decode step                     `forebay.serving` resolves, gathers and stores
    an answer grows                   the request parks, takes pages and slots for `AHEAD` more tokens, and resumes
    drafts were rejected              the next pass begins at a smaller position: `crop`
    preemption                        `park`: pages stay. The request resumes, and nothing is computed again
    the request has ended             full pages are published for prompts that begin alike, then `end`

**Nothing may fail inside a pass**, because vLLM ends with its model. vLLM schedules by its blocks, and nothing else is
asked. A running request never has more tokens admitted here than vLLM has given it blocks for, and `AHEAD` tokens.
`sizes` makes the pools so large that this always fits: for every block a page and its share of slots, and for every
request those of `AHEAD` tokens.

**A preempted request** has no blocks of vLLM, so nothing counts its pages. It keeps them until a running one needs them
(`_room`): then the preempted request that was admitted last, which vLLM resumes last, loses its rows and is computed
again. One that is preempted during its prefill cannot park, and keeps its lane and slots as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Sequence as Many, TypeVar

import numpy as np
from vllm.logger import init_logger

from ..cache import Cache, Stats
from ..config import SLOT_BLOCK, Footprint, footprint
from ..device import HostDevice
from ..errors import Exhausted, ForebayError, Internal, InvalidConfig, OutOfMemory, counted
from ..serving import Request, Requests
from ..shape import Shape
from .batch import Batch, BatchRow
from .options import Options

# Tokens that a running request is admitted ahead. Each time that it has used them, its slots are filled again with the
# newest rows that it had selected, so a small number costs fetches, and a large one slots.
AHEAD = 128
# A prefill tells a request's first step what its last tokens selected.
_WARM = 8
_log = init_logger("vllm.forebay")
_T = TypeVar("_T")


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


class Admitted(NamedTuple):
    """What is known of a request of vLLM's, beside its rows."""

    # Tokens that it computes as a prompt: its prompt, and what it had answered when it was added again.
    prompt: int
    # The token ids of its prompt if it shares pages, otherwise None.
    ids: Any
    # That of its rows, see `ForebayRows.forget_prefixes`.
    generation: int


class Counts(NamedTuple):
    """What a pool has done. All of them only grow."""

    hits: int
    misses: int
    scratch: int
    prompt_tokens: int
    shared_tokens: int
    preempted: int
    resumed: int
    dropped: int


def sizes(shape: Shape, limits: Limits, options: Options, blocks: int) -> Sizes:
    """The sizes for so many of vLLM's blocks."""
    extra = spare(limits)
    pages = blocks + extra if options.host_memory is None else options.host_memory // page_bytes(shape, limits)
    if options.slots is not None:
        slots = min(options.slots, limits.tokens)
        return Sizes(blocks, _whole(slots) * limits.requests, slots, pages)
    ratio = options.ratio or 1.0
    least = _whole(int(ratio * limits.tokens) + 1)
    # The library rounds each request's slots up.
    pool = _whole(int(ratio * (blocks + extra) * limits.block)) + SLOT_BLOCK * limits.requests
    return Sizes(blocks, max(pool, least), 1, pages)


def spare(limits: Limits) -> int:
    """Pages beyond those of vLLM's blocks. Of each request: those of the tokens that it is admitted ahead, one that
    drafts which were rejected since may have begun, and those that a step's rows may begin."""
    return (-(-AHEAD // limits.block) + 1 + -(-limits.query_rows // limits.block)) * limits.requests


def page_bytes(shape: Shape, limits: Limits) -> int:
    """Bytes of a page of the total pool."""
    stride = -(-sum(shape.row_bytes) // 64) * 64
    return shape.layers * limits.block * stride


def longest(limits: Limits) -> int:
    """Pages of the longest request, with the rows of a step in flight."""
    return -(-(limits.tokens + limits.query_rows) // limits.block) + 1


def _whole(slots: int) -> int:
    return -(-slots // SLOT_BLOCK) * SLOT_BLOCK


def arguments(limits: Limits, found: Sizes) -> dict[str, Any]:
    """The arguments of `Cache` and `footprint`."""
    return {
        "lanes": limits.requests,
        "max_tokens": limits.tokens,
        "slots": found.slots,
        "pool_slots": found.pool_slots,
        "query_rows": limits.query_rows,
        "steps_in_flight": 1,
        # Beside all others a running one parks for a moment, to grow.
        "parked": limits.requests + 1,
        "host_pages": found.pages,
        "index_pages": found.pages,
    }


def on_device(found: Footprint) -> int:
    """Bytes of the device, as a GPU would take them."""
    slots = found.slots + found.landing + found.scratch + found.padding
    return found.index_keys + slots + found.tables + found.host_page_tables


def fit(shape: Shape, limits: Limits, options: Options, device: int, both: int | None = None) -> Sizes:
    """The most blocks whose pools fit.

    Args:
        shape: of the model.
        limits: of vLLM.
        options: of the plug-in.
        device: bytes for slots, index keys and tables.
        both: bytes for these and the total pool together, where the device is host memory too; None: any.

    Raises:
        OutOfMemory: not even the longest request fits.
        InvalidConfig: `host_memory` does not hold its rows.
    """
    least = longest(limits)
    most = None
    if options.host_memory is not None:
        most = options.host_memory // page_bytes(shape, limits) - spare(limits)
        if most < least:
            needed = (least + spare(limits)) * page_bytes(shape, limits)
            raise InvalidConfig(
                f"host_memory: {options.host_memory:,} bytes do not hold the rows of one request of "
                f"{counted(limits.tokens, 'token')} and of those that run beside it: {needed:,} bytes do"
            )

    def needs(blocks: int) -> tuple[int, int]:
        """Bytes of the device, and of both memories."""
        found = footprint(shape, **arguments(limits, sizes(shape, limits, options, blocks)))
        taken = on_device(found)
        return taken, taken + found.rows + found.step_descriptors

    def fits(blocks: int) -> bool:
        taken, total = needs(blocks)
        return taken <= device and (both is None or total <= both) and (most is None or blocks <= most)

    if not fits(least):
        taken, total = needs(least)
        request = f"one request of {counted(limits.tokens, 'token')}"
        short = f"{both or 0:,} bytes of host memory do not hold the slots, index keys and rows of {request}, {total:,}"
        if taken > device:
            short = f"{device:,} bytes of KV cache memory do not hold the slots and index keys of {request}, {taken:,}"
        raise OutOfMemory(
            f"{short} bytes: lower the ratio, max_model_len or max_num_seqs, or give vLLM more memory "
            "(--kv-cache-memory-bytes, --gpu-memory-utilization)"
        )
    low, high = least, 2 * least
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return sizes(shape, limits, options, low)


class ForebayRows:
    """A `Store` in forebay's pools, and the requests by vLLM's ids."""

    def __init__(self, shape: Shape, limits: Limits, options: Options, blocks: int, dtype: Any) -> None:
        found = sizes(shape, limits, options, blocks)
        self._limits, self._options, self._dtype = limits, options, dtype
        self._device = HostDevice()
        try:
            self.cache = Cache(self._device, shape, **arguments(limits, found))
            slots = None if options.slots is None else found.slots
            self.requests = Requests(self.cache, ratio=options.ratio, slots=slots, record=options.record)
        except BaseException:
            self._device.close()
            raise
        self._batch: Any = None
        self._step: Any = None
        self._layers = 0
        # The requests, in the order of their admission.
        self._admitted: dict[Any, Admitted] = {}
        # Those that vLLM preempted.
        self._idle: set[Any] = set()
        self._generation = 0
        self._prompt_tokens = self._shared_tokens = self._preempted = self._resumed = self._dropped = 0

    def find(self, id: str, prompt: Many[int], tokens: int, salt: bytes, share: bool) -> int | None:
        """How many tokens of a waiting request have rows here; None: it cannot be admitted now.

        A request that has rows and must not use them loses them: vLLM computes it from the beginning.

        Args:
            id: vLLM's id.
            prompt: the token ids of its prompt.
            tokens: its tokens so far: of the prompt, and of an answer that was begun.
            salt: what its prompt is shared under.
            share: whether it may share its prompt's beginning. vLLM computes others from the beginning, always.
        """
        if id in self.requests:
            if share and self._admitted[id].generation == self._generation:
                return min(self.requests[id].length, tokens - 1)
            self._remove(id)
        if len(self.requests) - len(self._idle) >= self._limits.requests:
            # vLLM has taken all running requests back (`reset_prefix_cache`), and this one overtakes them. They are
            # told of only when vLLM has scheduled.
            return None
        return self.cache.find_shared(_ids(prompt[:-1]), salt=self._salt(salt)) if share and self._limits.share else 0

    def admit(self, id: str, prompt: Many[int], tokens: int, found: int, salt: bytes, share: bool) -> None:
        """vLLM has scheduled a waiting request, whose first `found` tokens it does not compute.

        Raises:
            Internal: they are not here any more.
        """
        if id in self.requests:
            self._resumed += id in self._idle
            self._idle.discard(id)
            return
        # At least one token of the prompt is computed: it says what comes next.
        share = share and self._limits.share
        given = {"tokens": _ids(prompt[:found]), "salt": self._salt(salt)} if share else {}
        request = self._room(lambda: self.requests.add(id, promised=0, **given))
        self._admitted[id] = Admitted(tokens, _ids(prompt) if share else None, self._generation)
        if share:
            self._prompt_tokens += len(prompt) - 1
            self._shared_tokens += request.shared
        if request.shared != found:
            raise Internal(f"request {id}: {found} tokens were found, and {request.shared} are shared")

    def forget_prefixes(self) -> None:
        """No row that was computed before is used for a request that begins or resumes from now on, for example because
        the model's weights have changed."""
        self._generation += 1

    def _salt(self, salt: bytes) -> bytes:
        return salt if self._generation == 0 else salt + self._generation.to_bytes(8, "little")

    def _room(self, call: Callable[[], _T]) -> _T:
        """Makes a call that takes from the pools. While they have too little, preempted requests lose their rows."""
        while True:
            try:
                return call()
            except Exhausted:
                if not self._idle:
                    raise
                self._drop()

    def _of(self, request: Request, call: Callable[[], _T]) -> _T:
        """As `_room`, for a call of a request."""
        self._hear(request)
        return self._room(call)

    def _hear(self, request: Request) -> None:
        """An error of a recording ends the recording alone: otherwise the request's next call would raise it."""
        error = request.recording_error()
        if error is not None:
            _log.warning("%s", error)

    def _drop(self) -> None:
        """Takes the rows of a preempted request: vLLM computes it again. One that has a lane and slots comes first."""
        last = [id for id in reversed(self._admitted) if id in self._idle]
        self._remove(next((id for id in last if self.requests[id].state == "filling"), last[0]))
        self._dropped += 1

    def _remove(self, id: str) -> None:
        """Ends a request. An error of its recording ends the recording alone."""
        try:
            self.requests.end(id)
        except ForebayError as error:
            _log.warning("%s", error)
        if id in self.requests:
            self.requests.end(id)
        self._admitted.pop(id, None)
        self._idle.discard(id)

    def preempt(self, id: str) -> None:
        """vLLM has taken a request's blocks. Its rows stay, or if too many are parked, it is computed again."""
        if id not in self.requests or id in self._idle:
            return
        self._preempted += 1
        request = self.requests[id]
        if request.state == "running":
            self._hear(request)
            try:
                request.park()
            except Exhausted:
                self._remove(id)
                self._dropped += 1
                return
        self._idle.add(id)

    def end(self, id: str, tokens: Many[int]) -> None:
        """Ends a request with these token ids, after its full pages were published."""
        if id not in self.requests:
            return
        found = self.requests[id]
        try:
            if id not in self._idle and found.state in ("filling", "running") and found.length >= self.prompt(id):
                self._publish(found, tokens)
        except ForebayError as error:
            # vLLM would end with it, and what was lost is a shared prefix.
            _log.warning("%s", error)
        self._remove(id)

    def _publish(self, request: Request, tokens: Many[int]) -> None:
        """Publishes the full pages of a request that ends. The newest token never has a row: at its position there may
        be that of a rejected draft.
        """
        kept = min(request.length, len(tokens) - 1)
        if self._ids_of(request) is None or kept < 1:
            return
        if request.length > kept:
            self._of(request, lambda: request.crop(kept))
        self._of(request, lambda: request.publish(_ids(tokens[:kept])))

    def _ids_of(self, request: Request) -> Any:
        return self._admitted[request.id].ids

    def prompt(self, id: str) -> int:
        """See `Store`."""
        return self._admitted[id].prompt

    def begin(self, batch: Batch) -> None:
        """See `Store`."""
        self.abandon()
        self._batch, self._layers = batch, 0
        for row in (*batch.prefills, *batch.decodes):
            request = self.requests[row.id]
            if request.length > row.start:
                # Drafts that were rejected.
                self._of(request, functools.partial(request.crop, row.start))
        for row in batch.prefills:
            request = self.requests[row.id]
            if request.promised:
                # It has answered, and gets another prompt.
                self._of(request, functools.partial(request.promise, 0))
            self._of(request, functools.partial(request.admit, row.width))
        for row in batch.decodes:
            self._prepare(row, self.requests[row.id])
        if batch.decodes:
            self._step = self.requests.step([(row.id, row.width) for row in batch.decodes])

    def _prepare(self, row: BatchRow, request: Request) -> None:
        """Makes a request ready for a decode step."""
        complete, ids = request.state == "filling", self._ids_of(request)
        if request.admitted < row.end:
            block = self._limits.block
            ahead = min(-(-(row.end + AHEAD) // block) * block, self._limits.tokens)
            self._of(request, lambda: request.promise(ahead - request.length))
        if complete and ids is not None:
            # Its prompt is complete. Others that begin alike need not wait for its end.
            self._of(request, lambda: request.publish(ids))
        self._of(request, request.resume)

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

    def stats(self) -> tuple[Counts, Stats]:
        """What it has done so far, and the cache's statistics."""
        self.requests.retire()
        found = self.requests.stats()
        hits, misses, scratch = map(int, found.layers.sum(axis=0))
        prefix = (self._prompt_tokens, self._shared_tokens)
        counts = Counts(hits, misses, scratch, *prefix, self._preempted, self._resumed, self._dropped)
        return counts, found.cache

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


def _ids(tokens: Many[int]) -> Any:
    return np.asarray(tokens, np.uint32)
