"""The configuration of a cache, and the sizes that follow from it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple, Sequence as Many

from ._library import check_created, ffi, lib, new_text, set_field, sized
from .errors import InvalidArgument, counted
from .shape import Shape
from .tensors import index

# Fields in which 0 is a value, and not the default.
_MAY_BE_NOTHING = (
    "promised", "prompt", "micro_batch", "weights", "activations", "workspace", "number", "share", "least_ns",
)  # fmt: skip
# Fields of a cache without a default.
_REQUIRED = ("lanes", "max_tokens", "query_rows")
_FROM_ONE = "a whole number from 1 on"
_SHARE_BY = {"equal": lib.FB_SHARE_EQUAL, "length": lib.FB_SHARE_LENGTH, "misses": lib.FB_SHARE_MISSES}
# Slots of a slot block.
SLOT_BLOCK = 64


class Info(NamedTuple):
    """The configuration of a cache and the sizes that follow from it."""

    # Layers, draft layers included.
    layers: int
    # Layers that draft tokens: the last ones.
    draft_layers: int
    # Bytes of a row, both runs together.
    row_bytes: int
    # Bytes of the first run.
    first_run_bytes: int
    # Bytes from one row to the next in host memory.
    host_stride: int
    # Bytes of a slot block (64 slots of a slab), padding included.
    block_bytes: int
    # Bytes of one index key; 0 for a model without them.
    index_key_bytes: int
    # Tokens of a page.
    page_tokens: int
    # Positions that one query row selects in one layer.
    top_k: int
    # The most sequences that may be open at once.
    lanes: int
    # Tokens of the longest sequence: prompt plus promised tokens.
    max_tokens: int
    # The most batch rows of a step.
    batch: int
    # The most query rows of a sequence in one step.
    query_rows: int
    # The most steps of one sequence in flight.
    steps_in_flight: int
    # Micro-batches that may each have a step open at the same time.
    micro_batches: int
    # Attention waves of split attention.
    attention_waves: int
    # The fewest slots that a sequence may have in a layer.
    min_budget: int
    # Pages of the total pool.
    host_pages: int
    # Pages of index keys.
    index_pages: int
    # 1 if rows have no bytes.
    residency_only: int
    # Index groups: layers that select, draft layers included. Without groups, `layers`.
    index_groups: int
    # Layers that share a selection, as the shape has them.
    group_layers: int


@dataclass(frozen=True)
class Share:
    """How a cache divides its slots over its sequences, by resizes of its own: `Cache(..., share=Share())`.

    A lone sequence has a slot for each of its rows. As others come, all shrink, and as they end, the rest grow. The
    slots that a sequence is opened with are then the least that it ever has. docs/policies.md has the rule.

    Attributes:
        by: "equal" (as many slots for each sequence), "length" (in proportion to the sequences' lengths), or "misses"
            (where slots avoid the most misses, as estimated from past steps).
        every: the slots are divided again every so many steps; 0: only when a sequence has joined, ended or outgrown
            its budget.
        least_change: the least change of a budget, as a divisor of the budget: 8 is an eighth.
        resizes_a_step: the most sequences that one step resizes.
        bytes_a_step: the most bytes of rows that the shrinks of one step may move on the device.
    """

    by: str = "equal"
    every: int = 0
    least_change: int = 8
    resizes_a_step: int = 8
    bytes_a_step: int = 64 << 20

    def declare(self, config: Any) -> None:
        """Writes it into an fb_cache_config."""
        if not isinstance(self.by, str) or self.by not in _SHARE_BY:
            raise InvalidArgument("share.by", repr(self.by), " or ".join(map(repr, _SHARE_BY)))
        config.share = _SHARE_BY[self.by]
        for field in ("every", "least_change", "resizes_a_step", "bytes_a_step"):
            value = getattr(self, field)
            set_field(config, f"share_{field}", value, f"share.{field}")
            if value == 0 and field != "every":
                raise InvalidArgument(f"share.{field}", repr(value), _FROM_ONE)


def set_fields(config: Any, values: dict[str, Any], required: Many[str] = ()) -> None:
    """Writes numbers into a config. None selects the default, if the field has one. In C 0 selects the default, so a 0
    is refused here.

    Raises:
        InvalidArgument: a value that the field cannot hold.
    """
    for name, value in values.items():
        if value is None:
            if name in required:
                raise InvalidArgument(name, "None", _FROM_ONE)
            continue
        whole = set_field(config, name, value)
        if name == "ratio" and not 0 < value <= 1:
            raise InvalidArgument(name, repr(value), "a number above 0 and at most 1")
        if name not in _MAY_BE_NOTHING and value == 0:
            raise InvalidArgument(name, repr(value), _FROM_ONE if whole else "a number above 0")


class Footprint(NamedTuple):
    """Bytes of a cache on a GPU, and of pinned host memory."""

    # Device: index keys of every page, all layers.
    index_keys: int
    # Device: the slot blocks that budgets are made of, all layers.
    slots: int
    # Device: landing slots, all layers.
    landing: int
    # Device: scratch slots, which layers share: as many as one layer needs, for each layer of the largest index group.
    scratch: int
    # Device: bytes that whole mappings leave unused.
    padding: int
    # Device: residency tables, page tables, lists of fetches and step descriptors.
    tables: int
    # Host: the rows of the total pool.
    rows: int
    # Host: the ring of step descriptors, and the staging memory of a GPU's joins and truncations.
    step_descriptors: int
    # Device: the GPU's own page tables for registered host memory, 8 bytes for each 4 KiB.
    host_page_tables: int


def footprint(
    shape: Shape,
    *,
    lanes: int,
    max_tokens: int,
    slots: int | Many[int],
    pool_slots: int | Many[int] | None = None,
    **numbers: int | None,
) -> Footprint:
    """Computes what a `Cache` of these arguments takes on a GPU, which maps memory in multiples of 2 MiB. Takes
    nothing.

    Raises:
        InvalidConfig, Overflow: the message names the field.
    """
    numbers = {"lanes": lanes, "max_tokens": max_tokens, "query_rows": 1, **numbers}
    config, _slots, _pools = declare(shape, slots, pool_slots, numbers)
    answer, reason = sized("fb_cache_footprint"), new_text()
    check_created(lib.fb_footprint(config, reason, len(reason), answer), reason)
    return Footprint(*(int(getattr(answer, name)) for name in Footprint._fields))


def declare(
    shape: Shape, slots: int | Many[int], pool_slots: int | Many[int] | None, numbers: dict[str, int | None]
) -> tuple[Any, Many[int] | None, Any]:
    """An fb_cache_config, the slots by layer if there are any, and the objects that must live as long as the config."""
    if not isinstance(shape, Shape):
        raise InvalidArgument("shape", type(shape).__name__, "a Shape")
    config = sized("fb_cache_config")
    selects = shape.declare(config)
    fewest, by_layer = one_or_by_layer(slots, shape.all_layers, "slots")
    if by_layer is not None:
        if pool_slots is None:
            lanes = index(numbers["lanes"], "lanes", least=1)
            pool_slots = [-(-count // SLOT_BLOCK) * SLOT_BLOCK * lanes for count in by_layer]
    pool, pools = None, None
    if pool_slots is not None:
        pool, given = one_or_by_layer(pool_slots, shape.all_layers, "pool_slots")
        pools = None if given is None else by_layer_of(given, shape.all_layers, "pool_slots")
    fewest = fewest if by_layer is None else min(by_layer)
    set_fields(config, {**numbers, "slots": fewest, "pool_slots": pool, "slots_by_layer": pools}, _REQUIRED)
    return config, by_layer, (pools, selects)


def set_budget(config: Any, ratio: float | None, slots: int | Many[int] | None, layers: int) -> Any:
    """Writes a budget into an fb_open_config or an fb_budget. Returns what must live as long as the config.

    Raises:
        InvalidArgument: a value that the field cannot hold.
    """
    whole, given = (None, None) if slots is None else one_or_by_layer(slots, layers, "slots")
    by_layer = None if given is None else by_layer_of(given, layers, "slots")
    set_fields(config, {"ratio": ratio, "slots": whole, "slots_by_layer": by_layer})
    return by_layer


def one_or_by_layer(slots: int | Many[int], layers: int, name: str) -> tuple[int | None, list[int] | None]:
    """One number (NumPy's too), or one number for each layer.

    Raises:
        InvalidArgument: it is neither.
    """
    try:
        return operator.index(slots), None  # type: ignore[arg-type]
    except TypeError:
        return None, [int(count) for count in by_layer_of(slots, layers, name)]  # type: ignore[arg-type]


def by_layer_of(slots: Many[int], layers: int, name: str) -> Any:
    """One number for each layer, as C takes them.

    Raises:
        InvalidArgument: it is something else.
    """
    try:
        if isinstance(slots, (str, bytes)):
            raise TypeError
        if len(slots) == layers:
            given = [operator.index(count) for count in slots]
            if 0 in given:
                raise InvalidArgument(name, repr(slots), "whole numbers from 1 to 2^32 - 1")
            return ffi.new("uint32_t[]", given)
    except InvalidArgument:
        raise
    except (TypeError, OverflowError) as error:
        raise InvalidArgument(name, repr(slots), "whole numbers from 1 to 2^32 - 1") from error
    raise InvalidArgument(name, counted(len(slots), "number"), f"{layers}, one a layer, draft layers last")
