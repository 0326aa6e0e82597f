"""A step's layers in an order that hides the gather, and captured steps.

The engine's work is a Python callable. The library calls it once for each piece of a layer, inside the call, and
enqueues resolve, gather and scatter in between. `forebay.choice` has the tables of orders.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from dataclasses import dataclass
from typing import Any, Callable, Sequence as Many, TypeVar

from . import cache as _cache
from ._library import NULL, check, ffi, lib, sized
from .device import ending
from .errors import InvalidArgument, counted
from .step import Buffers, Step
from .tensors import index

_Item = TypeVar("_Item")
ORDERS = {"none": 0, "da": 1, "dba": 2, "ahead": 3}
ORDER_NAMES = tuple(ORDERS)
_WORKS = ("project", "index", "prepare", "attend", "merge", "rest")
_ATTENDED = ("all", "resident", "fetched")

# The first torch whose graphs keep the priorities of the captured streams (pytorch#167346), and the variable that
# decides for every graph of a process (CUDA Programming Guide, 5.2.3.5).
_TORCH_KEEPS = (2, 10)
_VARIABLE = "CUDA_GRAPHS_USE_NODE_PRIORITY"
_warned = False


@dataclass(slots=True)
class EngineCall:
    """A piece of a layer that the engine enqueues on `stream`.

    | work | what |
    |---|---|
    | project | the projections for the indexer, and the write of the index keys |
    | index | logits and top-k of the call's batch rows, which write their selection; not where another layer selects |
    | prepare | the preparation of attention, which writes the new rows to their landing slots |
    | attend | attention over `attended`: "all" (`slots`), "resident" (list 0), "fetched" (list 1 + attention_wave) |
    | merge | the merge of split attention's results by their log-sum-exp |
    | rest | the rest of the layer after attention: output projection, experts, communication |
    """

    # The work, from the table.
    work: str
    # For "attend": which rows attention reads; otherwise None.
    attended: str | None
    # For "fetched": the attention wave that fetched the rows.
    attention_wave: int
    # The micro-batch.
    micro_batch: int
    # The layer.
    layer: int
    # The first batch row.
    first: int
    # The number of batch rows: half of the batch for each half of DBA's indexer, otherwise all.
    count: int
    # The first query row of each batch row.
    first_query_row: int
    # The number of query rows of each batch row: 1 in a draft pass.
    query_rows: int
    # The stream in the C interface: a CUstream on CUDA.
    stream: int


class Layers:
    """The streams and buffers of a step's layers.

    Args:
        buffers: the selection, which the "index" work writes, and the slots; with lists if any order is "da" or "dba".
        compute: the engine's stream, on which the step was prepared.
        resolve, gather, scatter: streams, which may be equal; None: `compute`. The order "ahead" needs `gather`: on
            `compute` a gather cannot run before its layer.
        batch: batch rows to enqueue, at most the buffers'; 0: the step's. In a capture there may be more than the
            step's; the additional rows do nothing.
        half: the first batch row of DBA's second half; 0: the batch is not divided.
        micro_batch: the micro-batch in a capture; otherwise 0.

    Raises:
        InvalidArgument: names the value that is no number, stream or buffers, or a batch larger than the buffers.
    """

    def __init__(
        self,
        buffers: Buffers,
        *,
        compute: Any = None,
        resolve: Any = None,
        gather: Any = None,
        scatter: Any = None,
        batch: int = 0,
        half: int = 0,
        micro_batch: int = 0,
    ) -> None:
        if type(buffers) is not Buffers:
            raise InvalidArgument("buffers", type(buffers).__name__, "Buffers")
        if index(batch, "batch") > buffers.rows:
            raise InvalidArgument("batch", repr(batch), f"at most the buffers' {counted(buffers.rows, 'row')}")
        self.buffers = buffers
        device = buffers.cache.device
        config = sized("fb_overlap_config")
        config.compute = device.stream_of(compute)
        config.resolve = config.compute if resolve is None else device.stream_of(resolve)
        config.gather = config.compute if gather is None else device.stream_of(gather)
        config.scatter = config.compute if scatter is None else device.stream_of(scatter)
        config.selection, config.slots = buffers._selection, buffers._slots
        config.lists, config.counts = buffers._lists, buffers._counts
        config.lists_batch = buffers.rows if buffers.lists is not None else 0
        config.batch, config.half = index(batch, "batch"), index(half, "half")
        config.micro_batch = index(micro_batch, "micro_batch")
        self._config = config


class _Engine:
    """A callable as C calls it. Its exception is kept and raised again after the call into the library has ended."""

    def __init__(self, enqueue: Callable[[EngineCall], object]) -> None:
        if not callable(enqueue):
            raise InvalidArgument("enqueue", type(enqueue).__name__, "a callable that takes an EngineCall")
        self.enqueue = enqueue
        self.error: BaseException | None = None
        self._callback = ffi.callback("fb_enqueue", self._called, error=lib.FB_CANCELLED, onerror=self._raised)
        self.config = sized("fb_engine")
        self.config.enqueue = self._callback

    def _called(self, _data: Any, call: Any, stream: Any) -> int:
        if ending:
            return int(lib.FB_CANCELLED)
        self.enqueue(
            EngineCall(
                _WORKS[call.work],
                _ATTENDED[call.attended] if call.work == lib.FB_WORK_ATTEND else None,
                call.attention_wave,
                call.micro_batch,
                call.layer,
                call.first,
                call.count,
                call.first_query_row,
                call.query_rows,
                int(ffi.cast("uintptr_t", stream)),
            )
        )
        return 0

    def _raised(self, _kind: object, error: BaseException, _trace: object) -> None:
        """Called by cffi with any exception of `_called`, including an interrupt: C is between it and the caller."""
        self.error = error

    def check(self, status: int, pointer: Any) -> None:
        """Raises the callable's exception, or else the library's error."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            # Its traceback refers to this frame, and so to all objects of the caller.
            del error
        check(status, pointer)


def order_of(name: str, argument: str) -> int:
    """The number of an order.

    Raises:
        InvalidArgument: no such order.
    """
    if not isinstance(name, str) or name not in ORDERS:
        raise InvalidArgument(argument, repr(name), " or ".join(map(repr, ORDERS)))
    return ORDERS[name]


def orders_of(names: Many[str], layers: int | None, argument: str = "by_layer") -> Any:
    """Orders by layer, as C takes them; None accepts any number of them."""
    if len(several(names, argument)) != (len(names) if layers is None else layers):
        raise InvalidArgument(argument, repr(names), f"{counted(layers or 0, 'order')}, one a layer, draft layers last")
    return ffi.new("uint32_t[]", [order_of(name, f"{argument}[{at}]") for at, name in enumerate(names)])


def overlap(
    cache: _cache.Cache,
    step: Step,
    layer: int,
    order: str,
    layers: Layers,
    enqueue: Callable[[EngineCall], object],
    draft_pass: int | None,
) -> None:
    """`Cache.overlap`."""
    _check_steps(cache, [step], [layers])
    engine, number = _Engine(enqueue), order_of(order, "order")
    which = 0 if draft_pass is None else index(draft_pass, "draft_pass") + 1
    at = index(layer, "layer")
    step._held.append(layers)
    status = lib.fb_overlap(cache._pointer, step._number, at, which, number, layers._config, engine.config)
    step._held.refused(layers, status)
    engine.check(status, cache._pointer)


def overlap_steps(
    cache: _cache.Cache,
    steps: Many[Step],
    layers: Many[Layers],
    by_layer: Many[str],
    enqueue: Callable[[EngineCall], object],
    draft_passes: int,
) -> None:
    """`Cache.overlap_steps`."""
    _check_steps(cache, steps, layers)
    engine, orders = _Engine(enqueue), orders_of(by_layer, cache.info.layers)
    numbers, configs, passes = _numbers(steps), _configs(layers), index(draft_passes, "draft_passes")
    for step, one in zip(steps, layers):
        step._held.append(one)
    status = lib.fb_overlap_steps(cache._pointer, numbers, configs, len(steps), orders, passes, engine.config)
    for step, one in zip(steps, layers):
        step._held.refused(one, status)
    engine.check(status, cache._pointer)


class Captured:
    """The captured layers of a bucket: `Cache.capture` makes it. Closing it waits for nothing."""

    def __init__(self, cache: _cache.Cache, held: Any) -> None:
        self.cache = cache
        # Made before the capture: the handle ends with this object, and the device not before it.
        self._held = held
        self._made = ffi.new("fb_captured **")
        self._end = cache.device._handle.used_by(self, _end_captured, self._made)

    def close(self) -> None:
        """Destroys the captured layers; idempotent. Launches in progress still run."""
        self._end()

    def launch(self, steps: Many[Step]) -> None:
        """Launches the graph for open steps, one of each micro-batch, in their order.

        Raises:
            InvalidState: the engine owns the graph, or a step is finished, already launched, or prepared on another
                stream than the compute stream of the capture. Nothing was launched.
            InvalidConfig, OutOfRange, Closed: the steps do not fit the capture. Nothing was launched. If the device
                refuses something afterwards, the steps are abandoned.
        """
        self._for(lib.fb_launch, steps)

    def launched(self, steps: Many[Step]) -> None:
        """Tells the cache that the engine has launched its own graph, captured around this one, for these steps.

        Raises:
            InvalidState: it was not captured `into` the engine's graph, or a step is finished or already launched.
            InvalidConfig, OutOfRange, Closed: the steps do not fit the capture.
        """
        self._for(lib.fb_launched, steps)

    def _for(self, call: Any, steps: Many[Step]) -> None:
        _check_steps(self.cache, steps, None)
        numbers = _numbers(steps)
        for step in steps:
            step._held.append(self)
        status = call(self.cache._pointer, self._made[0], numbers, len(steps))
        for step in steps:
            step._held.refused(self, status)
        check(status, self.cache._pointer)


def capture(
    cache: _cache.Cache,
    micro_batches: Many[Layers],
    query_rows: int,
    by_layer: Many[str],
    enqueue: Callable[[EngineCall], object],
    draft_passes: int,
    into: bool,
) -> Captured:
    """`Cache.capture`."""
    engine, orders = _Engine(enqueue), orders_of(by_layer, cache.info.layers)
    micro_batches, width = several(micro_batches, "micro_batches"), index(query_rows, "query_rows")
    for at, one in enumerate(micro_batches):
        name = f"micro_batches[{at}]"
        _check_layers(cache, one, name)
        if one.buffers.query_rows != width:
            wide = counted(one.buffers.query_rows, "query row")
            raise InvalidArgument(name, f"buffers of {wide}", f"of {width}: query_rows")
    config, configs = sized("fb_capture_config"), _configs(micro_batches)
    config.micro_batches, config.count, config.by_layer = configs, len(micro_batches), orders
    config.query_rows, config.draft_passes = width, index(draft_passes, "draft_passes")
    if into:
        _warn_of_priorities()
    captured = Captured(cache, (tuple(micro_batches), engine))
    call = lib.fb_capture_into if into else lib.fb_capture
    status = call(cache._pointer, config, engine.config, captured._made)
    engine.check(status, cache._pointer)
    return captured


def _warn_of_priorities() -> None:
    """Warns once that torch, whose capture is in progress, will make a graph without the priorities of its nodes."""
    global _warned
    torch, said = sys.modules.get("torch"), os.environ.get(_VARIABLE)
    if _warned or torch is None or said == "1" or not torch.cuda.is_initialized():
        return
    release = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    old = release is not None and (int(release[1]), int(release[2])) < _TORCH_KEEPS
    if (old or said == "0") and torch.cuda.is_current_stream_capturing():
        _warned = True
        why = f"{_VARIABLE} is 0" if said == "0" else f"torch {torch.__version__} makes its graphs so"
        warnings.warn(
            f"the captured step loses its priorities, and its gathers wait for the engine's kernels: {why}. Set "
            f"{_VARIABLE}=1 in the environment before CUDA is used" + (", or take torch 2.10 or later" if old else ""),
            RuntimeWarning,
            stacklevel=4,
        )


def _end_captured(made: Any) -> None:
    if made[0] != NULL:
        lib.fb_captured_destroy(made[0])


def _check_steps(cache: _cache.Cache, steps: Many[Step], layers: Many[Layers] | None) -> None:
    """Checks for steps of this cache, and for layers whose buffers have room for each."""
    for at, step in enumerate(several(steps, "steps")):
        if type(step) is not Step or step.cache is not cache:
            raise InvalidArgument(f"steps[{at}]", repr(step), "a step of this cache")
    if layers is None:
        return
    if len(several(layers, "layers")) != len(steps):
        raise InvalidArgument("layers", f"{len(layers)} Layers", f"{len(steps)}, one a step")
    for at, (step, one) in enumerate(zip(steps, layers)):
        _check_layers(cache, one, f"layers[{at}]")
        step._fits(one.buffers)


def _check_layers(cache: _cache.Cache, one: Layers, name: str) -> None:
    if type(one) is not Layers or one.buffers.cache is not cache:
        raise InvalidArgument(name, repr(one), "Layers with buffers of this cache")


def several(value: Many[_Item], name: str) -> Many[_Item]:
    """A sequence, which has a length."""
    if isinstance(value, (str, bytes)) or not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        raise InvalidArgument(name, type(value).__name__, "a list or a tuple")
    return value


def _numbers(steps: Many[Step]) -> Any:
    return ffi.new("fb_step[]", [step._number for step in steps])


def _configs(layers: Many[Layers]) -> Any:
    configs = ffi.new("fb_overlap_config[]", max(len(layers), 1))
    for at, one in enumerate(layers):
        configs[at] = one._config[0]
    return configs
