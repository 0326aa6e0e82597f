"""The batch rows of a `ForebayCache`, and the forward pass in progress.

Every batch row is a request of `forebay.serving`. A pass is one of two kinds:

    prefill   the first pass, or one of more than `1 + drafts` tokens. Each layer's rows go to the total pool. The model
              gets all latents of the context, as from transformers' own cache, and attends to them densely; they are
              read from the pool, and the tensors die with the layer.
    decode    any other pass. Each layer's rows go to landing slots. The model gets the new rows only. When it calls
              attention, the selection is resolved to slots, and the rows at these slots are what it attends to.

So the device holds slots, not context, and what the indexer needs: an index key for every token. Index keys are in one
tensor for each layer that selects, which doubles when it is full, up to `max_tokens`.

transformers gives the layers of a model no common object except the cache, so the order of the calls is checked here:
for each sparse layer first its rows, then its attention. A pass that ends early (an exception in the model, an
interrupt) leaves layers of different lengths. It is noticed at the next call, and from then on every call but `reset`
is refused.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Iterator, NamedTuple, NoReturn, Sequence as Many

import torch

from .. import config as sizes
from ..cache import Cache
from ..device import CudaDevice, Device, HostDevice
from ..errors import InvalidArgument, InvalidState, OutOfMemory, OutOfRange, Unsupported, counted
from ..serving import Request, Requests
from ..shape import Shape
from ..tensors import index
from .families import Layout, SparseLayer

# Bytes of a row are a multiple of this.
_ROW_ALIGN = 4
# A pass ends before the next one begins.
_STEPS = 1
# The least tokens that a tensor of index keys has room for.
_KEYS_LEAST = 256


@dataclass(frozen=True)
class Limits:
    """What a cache was made for; see `ForebayCache`."""

    max_tokens: int
    slots: int
    batch: int
    drafts: int
    record: Any
    overcommit: bool


class LayerMisses(NamedTuple):
    """What decode steps did in one layer of the model."""

    # The layer's number in the model.
    layer: int
    # Distinct selected rows that were in slots.
    hits: int
    # Rows fetched from host memory.
    misses: int
    # Misses whose rows were fetched into scratch slots.
    scratch: int


@dataclass
class Pass:
    """A forward pass in progress.

    Attributes:
        start: tokens of each batch row before it.
        width: tokens that it adds to each batch row.
        step: the step of a decode pass; None in a prefill.
        next: the sparse layer whose rows or attention come next, by forebay's number.
        ready: the sparse layers whose rows have come.
        thread: the thread that began it.
    """

    start: int
    width: int
    step: Any
    next: int = 0
    ready: set[int] = field(default_factory=set)
    thread: int = field(default_factory=threading.get_ident)

    @property
    def end(self) -> int:
        """Tokens of each batch row after it."""
        return self.start + self.width


class Batch:
    """The batch rows of a cache. Memory is taken when the first rows come, which say their dtype and device.

    Attributes:
        layout: what forebay keeps of the model.
        length: tokens of each batch row.
        cache, requests: forebay's; None before the first rows.
        passing: the forward pass in progress.
        prefill_peak: bytes that a layer took in the largest prefill so far, by `attention`'s formula.
    """

    def __init__(self, layout: Layout, limits: Limits, device: Device | None) -> None:
        self.layout, self.limits = layout, limits
        self.length = 0
        self.cache: Cache | None = None
        self.requests: Requests | None = None
        self.passing: Pass | None = None
        self.prefill_peak = 0
        self._device, self._own_device = device, device is None
        self._numbers = {one.layer: number for number, one in enumerate(layout.sparse)}
        self._copies = [
            [number for number, other in enumerate(layout.sparse) if other.source == one.layer]
            for one in layout.sparse
        ]
        self._rows: list[Request] = []
        self._ids = itertools.count()
        self._keys: dict[int, Any] = {}
        self._dtype: Any = None
        self._place: Any = None
        self._values = 0
        self._out: Any = None
        self._before: Any = None
        self._broken: str | None = None
        self._closed = False
        self._modules: dict[int, weakref.ref[Any]] = {}

    @property
    def rows(self) -> tuple[Request, ...]:
        """The requests, in the order of the batch."""
        return tuple(self._rows)

    def number(self, layer: Any) -> int | None:
        """forebay's number of a layer of the model; None if its rows are not in forebay."""
        return self._numbers.get(layer)

    def admit(self, rows: Any) -> None:
        """Checks that a pass may begin with these rows of some layer, `[batch, heads, tokens, values]`, before any
        layer takes them.

        Raises:
            InvalidArgument: more batch rows than the cache has, or another number than before.
            OutOfRange: more tokens than `max_tokens`.
            Unsupported: the rows are for gradients. Nothing has changed after these three.
            InvalidState: an earlier pass ended early, or the model does not attend through forebay.
        """
        self._check_idle()
        count, width, limits = int(rows.shape[0]), int(rows.shape[2]), self.limits
        self._check_count(count)
        if self._rows and count != len(self._rows):
            expected = f"{len(self._rows)}, as before; or reset() first"
            raise InvalidArgument("batch", counted(count, "batch row"), expected)
        if self.length + width > limits.max_tokens:
            given = f"{self.length} tokens and {width} more" if self.length else counted(width, "token")
            raise OutOfRange(f"{given}: the cache was made for max_tokens={limits.max_tokens} in a batch row")
        if torch.is_grad_enabled() and rows.requires_grad:
            raise Unsupported(
                "gradients: none pass through a ForebayCache; call the model under torch.no_grad() or "
                "model.eval() with inference_mode"
            )

    def update(self, number: int, latent: Any, rotated: Any) -> tuple[Any, Any]:
        """A layer's new rows: `[batch, 1, tokens, values]` each. Returns what the model expands. Rows of the first
        layer begin a pass, which `admit` has checked.

        Raises:
            InvalidArgument: another dtype or device than before.
            OutOfMemory: there is too little host memory for the cache.
            InvalidState: an earlier pass ended early, or the model does not attend through forebay.
        """
        if number == 0:
            self._begin(latent)
        passing = self._passing(number)
        try:
            with plain():
                return self._take(passing, number, latent, rotated)
        except BaseException:
            self.give_up(f"the forward pass failed when layer {self.layout.sparse[number].layer} gave its rows")
            raise

    def _begin(self, latent: Any) -> None:
        """Begins a pass with the first layer's rows."""
        self._check_idle()
        count, width = int(latent.shape[0]), int(latent.shape[2])
        requests, step = self._made(latent), None
        if not self._rows:
            try:
                for _ in range(count):
                    self._rows.append(requests.add(next(self._ids), prompt=width))
            except BaseException:
                self.clear()
                raise
        elif width <= 1 + self.limits.drafts:
            step = requests.step([(row.id, width) for row in self._rows])
        self.passing = Pass(self.length, width, step)

    def _passing(self, number: int) -> Pass:
        """The pass in progress, in which it is a layer's turn."""
        self._check_usable()
        passing = self.passing
        if passing is None or number != passing.next or number in passing.ready:
            layer = self.layout.sparse[number].layer
            if passing is not None and passing.next in passing.ready:
                waits = self.layout.sparse[passing.next].layer
                self.refuse(f"layer {waits} did not attend by forebay: model.set_attn_implementation('forebay')")
            self.refuse(f"layer {layer} gave its rows out of turn")
        return passing

    def _take(self, passing: Pass, number: int, latent: Any, rotated: Any) -> tuple[Any, Any]:
        one, count = self.layout.sparse[number], len(self._rows)
        given = (int(latent.shape[-1]), int(rotated.shape[-1]))
        kinds = {(part.dtype, part.device) for part in (latent, rotated)}
        if given != (one.latent, one.rotated) or kinds != {(self._dtype, self._place)}:
            kind = " and ".join(f"{part.dtype} on {part.device}" for part in (latent, rotated))
            found = f"{given[0]} + {given[1]} values of {kind}"
            wanted = f"{one.latent} + {one.rotated} of {self._dtype} on {self._place}"
            raise InvalidArgument(f"rows of layer {one.layer}", found, wanted)
        rows = latent.new_zeros((count, passing.width, self._values))
        rows[..., : one.latent] = latent[:, 0]
        rows[..., one.latent : one.latent + one.rotated] = rotated[:, 0]
        for copy in self._copies[number]:
            passing.ready.add(copy)
            if passing.step is not None:
                passing.step.write(copy, rows)
            else:
                for request, one_row in zip(self._rows, rows):
                    request.prefill(copy, one_row)
        if passing.step is not None or passing.start == 0:
            return latent, rotated
        return self._context(passing, number, one, rows)

    def _context(self, passing: Pass, number: int, one: SparseLayer, rows: Any) -> tuple[Any, Any]:
        """All latents of the context, for a prefill's attention: the earlier ones from the total pool."""
        whole = torch.empty((len(self._rows), passing.end, self._values), dtype=self._dtype, device="cpu")
        for request, room in zip(self._rows, whole):
            request.read(number, 0, passing.start, out=room[: passing.start])
        whole = whole.to(self._place)
        whole[:, passing.start :] = rows
        whole = whole.unsqueeze(1)
        return whole[..., : one.latent], whole[..., one.latent : one.latent + one.rotated]

    def update_indexer(self, number: int, keys: Any) -> Any:
        """A layer's new index keys, `[batch, tokens, values]`. Returns those of the whole context.

        Raises:
            InvalidState: no pass is in progress.
        """
        self._check_usable()
        passing = self.passing
        if passing is None or number != passing.next:
            layer = self.layout.sparse[number].layer
            self.refuse(f"layer {layer} gave its index keys out of turn")
        with plain():
            room = self._keys.get(number)
            if room is None or room.shape[1] < passing.end:
                room = self._more_keys(room, passing, keys)
                self._keys[number] = room
            room[:, passing.start : passing.end] = keys
            return room[:, : passing.end]

    def _more_keys(self, room: Any, passing: Pass, keys: Any) -> Any:
        have = 0 if room is None else int(room.shape[1])
        tokens = min(max(passing.end, 2 * have, _KEYS_LEAST), self.limits.max_tokens)
        larger = keys.new_empty((keys.shape[0], tokens, keys.shape[2]))
        if room is not None:
            larger[:, : passing.start] = room[:, : passing.start]
        return larger

    def expects(self, number: int, queries: int, keys: int) -> bool:
        """Whether a pass is in progress in which this layer attends next, over so many queries and keys."""
        passing = self.passing
        if passing is None or number != passing.next or number not in passing.ready:
            return False
        return (queries, keys) == (passing.width, passing.width if passing.step is not None else passing.end)

    def attending(self, module: Any, number: int, queries: int, keys: int) -> Pass:
        """The pass in which a layer attends, before its attention over so many queries and keys.

        Raises:
            InvalidState: it is not this layer's turn, or the layer belongs to another model.
        """
        self._check_usable()
        passing, layer = self.passing, self.layout.sparse[number].layer
        known = self._modules.setdefault(number, weakref.ref(module))
        if known() is not module:
            self.refuse("two models used this cache, which holds the rows of one")
        if passing is None or number != passing.next or number not in passing.ready:
            self.refuse(f"layer {layer} attended out of turn")
        if not self.expects(number, queries, keys):
            wanted = passing.width if passing.step is not None else passing.end
            given = f"{queries} queries and {keys} keys, not {passing.width} and {wanted}"
            self.refuse(f"layer {layer} attended with {given}")
        return passing

    def select(self, passing: Pass, number: int, positions: Any, width: int) -> Any:
        """The rows at a layer's selected positions in a decode pass, and stores its new rows.

        Args:
            passing: the pass.
            number: the layer.
            positions: int32 `[batch, tokens, k]`, -1 for none.
            width: k.

        Returns:
            `[batch * tokens, 1, k, values]`, whatever row where nothing is selected. Its memory is reused.
        """
        one, step = self.layout.sparse[number], passing.step
        with plain():
            slots = step.select(number, positions if one.selects else None)
            if int(slots.shape[-1]) != width:
                slots = slots[..., :width]
            shape = (len(self._rows), passing.width, width, self._values)
            if self._out is None or tuple(self._out.shape) != shape:
                self._out = None
                self._out = torch.empty(shape, dtype=self._dtype, device=self._place)
            found = step.rows(number, slots, self._dtype, out=self._out)
            step.stored(number)
            return found.view(-1, 1, width, self._values)

    def warm_up(self, number: int, positions: Any) -> None:
        """Notes what the last tokens of a prefill pass selected: int32 `[batch, tokens, k]`, -1 for none. A row that
        decoded before resumes with what it selected then."""
        if self.layout.sparse[number].selects:
            for request, selection in zip(self._rows, positions):
                if request.state == "filling":
                    request.warm_up(number, selection)

    def attended(self, passing: Pass, number: int) -> bool:
        """Notes that a layer has attended. Returns whether it was the pass's last, which ends it."""
        passing.next += 1
        if passing.next < len(self.layout.sparse):
            return False
        try:
            if passing.step is not None:
                passing.step.finish()
        except BaseException:
            self.give_up("the step failed")
            raise
        self.passing, self.length = None, passing.end
        return True

    def crop(self, tokens: int) -> None:
        """Removes the last tokens of every batch row.

        Raises:
            InvalidState: a pass ended early.
        """
        self._check_idle()
        if not tokens or not self._rows:
            return
        if tokens >= self.length:
            self.clear()
            return
        for request in self._rows:
            request.crop(self.length - tokens)
        self.length -= tokens

    def rearrange(self, sources: Many[int]) -> None:
        """Makes batch row i a copy of the present row `sources[i]`. Rows that are named twice are forked, and rows
        that are not named end first, so that the copies find lanes and slots.

        Raises:
            InvalidArgument: more rows than the cache was made for, or no such row.
            InvalidState: a pass ended early.
        """
        self._check_idle()
        if not self._rows or list(sources) == list(range(len(self._rows))):
            return
        have = len(self._rows)
        if not sources or not all(0 <= source < have for source in sources):
            raise InvalidArgument("batch rows", repr(list(sources)), f"numbers from 0 to {have - 1}")
        self._check_count(len(sources))
        before, rows = self._rows, [self._rows[source] for source in sources]
        try:
            for number in sorted(set(range(have)) - set(sources)):
                before[number].end()
            for at, source in enumerate(sources):
                if source in sources[:at]:
                    rows[at] = before[source].fork(next(self._ids))
                    self._rows = [*self._rows, rows[at]]
        except BaseException:
            self.give_up("batch rows could not be copied")
            raise
        self._rows = rows
        for number, room in self._keys.items():
            order = torch.tensor(list(sources), dtype=torch.int64, device=room.device)
            with plain():
                self._keys[number] = room.index_select(0, order)

    def clear(self) -> None:
        """Ends every batch row. The memory stays, for other rows of the same dtype and device."""
        step, self.passing = None if self.passing is None else self.passing.step, None
        if step is not None:
            step.abandon()
        rows, self._rows = self._rows, []
        for request in rows:
            request.end()
        self.length, self._broken = 0, None
        self._keys.clear()
        self._modules.clear()
        self._out = None

    def reset(self) -> None:
        """`clear`, and counts from 0 again."""
        self.clear()
        self.prefill_peak = 0
        self._before = None if self.requests is None else self.requests.stats().layers.copy()

    def close(self) -> None:
        """Ends everything; idempotent. The memory goes with the device."""
        if self._closed:
            return
        self.clear()
        self._closed = True
        if self.requests is not None:
            self.requests.close()
        if self.cache is not None:
            self.cache.close()
        if self._own_device and self._device is not None:
            self._device.close()

    def counts(self) -> list[LayerMisses]:
        """What decode steps did in each sparse layer since the last `reset`."""
        if self.requests is None:
            return []
        layers = self.requests.stats().layers
        counts = layers if self._before is None else layers - self._before
        return [LayerMisses(one.layer, *map(int, found)) for one, found in zip(self.layout.sparse, counts)]

    def key_bytes(self, used: bool = False) -> int:
        """Bytes of the index keys' tensors, or of their part that is in use."""
        tokens = [(room, self.length if used else int(room.shape[1])) for room in self._keys.values()]
        return sum(room[:, :count].numel() * room.element_size() for room, count in tokens)

    def buffer_bytes(self) -> int:
        """Bytes of the rows that the last layer of a decode pass attended to; the next one reuses them."""
        return 0 if self._out is None else int(self._out.nbytes)

    def footprint(self) -> sizes.Footprint | None:
        """What forebay's cache takes; None before it is made."""
        if self._dtype is None:
            return None
        return sizes.footprint(self._shape(), **self._sizes())

    def dense_bytes(self) -> int:
        """What transformers' own cache would hold of the sparse layers at this length, index keys aside."""
        if self._dtype is None:
            return 0
        values = sum(one.latent + one.rotated for one in self.layout.sparse if one.source == one.layer)
        return len(self._rows) * self.length * values * int(self._dtype.itemsize)

    def _made(self, latent: Any) -> Requests:
        """The requests of forebay's cache, which is made for rows like the first."""
        place = latent.device
        if self.requests is not None:
            if latent.dtype != self._dtype or place != self._place:
                expected = f"{self._dtype} on {self._place}, as the first; make another cache"
                raise InvalidArgument("rows", f"{latent.dtype} on {place}", expected)
            return self.requests
        device = self._device
        if device is None:
            device = CudaDevice(place.index or 0) if place.type == "cuda" else HostDevice()
        wanted = device.place
        if (place.type, place.index or 0) != (wanted.device, wanted.number):
            raise InvalidArgument("device", f"rows on {place}", f"rows in {wanted}, where the cache is")
        whole = max(_ROW_ALIGN // int(latent.dtype.itemsize), 1)
        self._dtype, self._values = latent.dtype, -(-self.layout.width // whole) * whole
        try:
            self._take_memory(device)
        except BaseException:
            self._dtype = None
            if self._own_device:
                device.close()
            raise
        self._device, self._place = device, place
        return self._made(latent)

    def _take_memory(self, device: Device) -> None:
        limits = self.limits
        try:
            cache = Cache(
                device, self._shape(), parked=limits.batch, overcommit=limits.overcommit, **self._sizes()
            )
        except OutOfMemory as error:
            given = f"{counted(limits.batch, 'batch row')} of {counted(limits.max_tokens, 'token')}"
            raise OutOfMemory(f"{given} do not fit host memory: lower max_tokens or batch ({error})") from error
        try:
            self.requests = Requests(cache, slots=limits.slots, record=limits.record)
        except BaseException:
            cache.close()
            raise
        self.cache = cache

    def _sizes(self) -> dict[str, Any]:
        """forebay's numbers for these limits."""
        limits = self.limits
        rows = 1 + limits.drafts
        # forebay's own number has room for a page of rows in flight; a wide step has more.
        pages = limits.batch * -(-(limits.max_tokens + max(rows, Shape.page_tokens)) // Shape.page_tokens)
        return {
            "lanes": limits.batch,
            "max_tokens": limits.max_tokens,
            "slots": limits.slots,
            "query_rows": rows,
            "steps_in_flight": _STEPS,
            "host_pages": pages,
            "index_pages": pages,
        }

    def _shape(self) -> Shape:
        layers = self.layout.sparse
        selects = tuple(one.selects for one in layers)
        return Shape(
            layers=len(layers),
            row_bytes=(self._values * int(self._dtype.itemsize), 0),
            top_k=min(self.layout.top_k, self.limits.max_tokens),
            selects_by_layer=None if all(selects) else selects,
        )

    def refuse(self, why: str) -> NoReturn:
        """Gives up the pass in progress, and says why: two threads, if it is another thread's.

        Raises:
            InvalidState: always.
        """
        passing = self.passing
        if passing is not None and passing.thread != threading.get_ident():
            why = "two threads used this cache, which serves one forward pass at a time"
        self.give_up(why)
        self._check_usable()
        raise InvalidState(why)

    def give_up(self, why: str) -> None:
        """Gives up the pass in progress. Layers may differ in length now, so nothing but `clear` helps."""
        self._broken = self._broken or why
        passing, self.passing = self.passing, None
        if passing is not None and passing.step is not None:
            passing.step.abandon()

    def _check_usable(self) -> None:
        if self._closed:
            raise InvalidState("the cache was closed")
        if self._broken is not None:
            raise InvalidState(f"{self._broken}; reset() the cache, which is empty then")

    def _check_idle(self) -> None:
        self._check_usable()
        passing = self.passing
        if passing is not None:
            why = f"an earlier forward pass ended in layer {self.layout.sparse[passing.next].layer}"
            if passing.next in passing.ready:
                why += ", or it did not attend there by forebay: model.set_attn_implementation('forebay')"
            self.refuse(why)

    def _check_count(self, count: int) -> None:
        if count > self.limits.batch:
            expected = f"at most {self.limits.batch}: make the cache with batch={count}"
            raise InvalidArgument("batch", counted(count, "batch row"), expected)


@contextmanager
def plain() -> Iterator[None]:
    """Tensors that outlive a pass, made and written without gradients and outside inference mode: the next pass may run
    in another mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def slots_of(ratio: Any, slots: Any, max_tokens: int) -> int:
    """Slots of a batch row in each layer.

    Raises:
        InvalidArgument: both or neither, or a value of another kind.
    """
    if (ratio is None) == (slots is None):
        given = "neither ratio nor slots" if ratio is None else "both ratio and slots"
        raise InvalidArgument("ratio", given, "one of them")
    if ratio is None:
        return min(index(slots, "slots", least=1), max_tokens)
    if not isinstance(ratio, (int, float)) or isinstance(ratio, bool) or not 0 < ratio <= 1:
        raise InvalidArgument("ratio", repr(ratio), "a number above 0 and at most 1")
    return max(1, min(math.ceil(ratio * max_tokens), max_tokens))
