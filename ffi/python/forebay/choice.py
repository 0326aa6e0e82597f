"""Tables of orders: the overlap order of each layer, and when to change to another table of orders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Sequence as Many

import numpy as np

from . import tensors
from ._library import NULL, cell, check, check_created, ffi, lib, new_text, sized, text_bytes
from .config import set_fields
from .errors import InvalidArgument
from .overlap import ORDER_NAMES, orders_of, several
from .step import LayerCount


@dataclass(frozen=True)
class Table:
    """An order for each layer, draft layers last: "none", "da", "dba" or, where another layer selects, "ahead".

    Attributes:
        by_layer: the orders.
        version: rises whenever they change.
    """

    by_layer: tuple[str, ...]
    version: int = 1

    @staticmethod
    def from_text(text: str) -> Table:
        """Reads a text of `to_text` or `forebay simulate`.

        Raises:
            BadFormat, BadVersion: the message names the line.
        """
        reason, version, layers = new_text(), ffi.new("uint32_t *"), ffi.new("uint32_t *")
        given, room = text_bytes(text, "text"), 0
        orders: Any = NULL
        while True:
            status = lib.fb_table_from_text(given, reason, len(reason), version, orders, room, layers)
            check_created(status, reason)
            if layers[0] <= room:
                return Table(tuple(ORDER_NAMES[orders[at]] for at in range(layers[0])), int(version[0]))
            room = int(layers[0])
            orders = ffi.new("uint32_t[]", room)

    def to_text(self) -> str:
        """A text that `from_text` reads.

        Raises:
            InvalidArgument: an invalid order or version.
        """
        table, _orders = self._declare()
        length, reason = ffi.new("size_t *"), new_text()
        check_created(lib.fb_table_to_text(table, reason, len(reason), NULL, 0, length), reason)
        text = ffi.new("char[]", length[0])
        check_created(lib.fb_table_to_text(table, reason, len(reason), text, length[0], length), reason)
        return str(ffi.string(text).decode())

    def _declare(self) -> tuple[Any, Any]:
        orders, table = orders_of(self.by_layer, None), ffi.new("fb_table *")
        table.version, table.layers, table.orders = tensors.index(self.version, "version"), len(orders), orders
        return table, orders


@dataclass(frozen=True)
class Prices:
    """The price of each order: by how many nanoseconds it makes a layer longer, by misses of a batch row.

    The comparison is the same layer without misses in which no order costs anything, so an order's own costs (split
    attention, merge) are part of its price. The price of a layer's order is the layer's exposed time: the time of the
    gather and of these costs that nothing hides.

    Attributes:
        misses: numbers of misses of a batch row, ascending from 0: `[n]`.
        exposed: nanoseconds, `[layers][none, da, dba][n]` or `[layers][none, da, dba, ahead][n]`, finite and not
            negative; one layer if all layers are alike. An order that a layer cannot run in has None for its list, in
            an array -1 throughout: "ahead" in a layer that selects for itself, "dba" in the others.
    """

    misses: Many[float]
    exposed: Any

    def _declare(self) -> tuple[Any, Any]:
        misses = _doubles(self.misses, "misses")
        exposed = _doubles(_filled(self.exposed, misses.size), "exposed")
        if misses.ndim != 1 or exposed.ndim != 3 or exposed.shape[1:] not in ((3, misses.size), (4, misses.size)):
            raise InvalidArgument("exposed", f"float64 {list(exposed.shape)}", f"[layers, 3 or 4, {misses.size}]")
        prices = ffi.new("fb_prices *")
        held = (ffi.from_buffer("double[]", misses), ffi.from_buffer("double[]", exposed))
        prices.misses, prices.miss_count = held[0], misses.size
        prices.exposed, prices.layers, prices.orders = held[1], exposed.shape[0], exposed.shape[1]
        return prices, held


@dataclass(frozen=True)
class Bucket:
    """A captured batch size.

    Attributes:
        batch: the batch rows that it was captured for.
        tables: the tables of orders captured at the start; the chooser starts with the first one.
        prices: the price of each order at this size.
    """

    batch: int
    tables: Many[Table]
    prices: Prices


@dataclass(frozen=True)
class Hysteresis:
    """The conditions under which a chooser changes to another table of orders.

    Attributes:
        smoothing: the weight of a new step's misses in the running average, above 0 and at most 1.
        share: the fraction of the exposed time, over all layers (`Prices`), that the other table of orders must save, 0
            to 1.
        least_ns: the nanoseconds per step that it must save as well.
        steps: the number of consecutive steps in which it must save both.
    """

    smoothing: float
    share: float
    least_ns: float
    steps: int


@dataclass(frozen=True)
class Choice:
    """What the next step runs."""

    # The index of the bucket.
    bucket: int
    # The index of the table of orders in that bucket: `Chooser.table`.
    index: int
    # The version of that table of orders.
    version: int
    # Whether this call has changed that table of orders: capture it before you use it.
    changed: bool


@dataclass
class Chooser:
    """Chooses a table of orders for each step, from the counters of earlier steps.

    Args:
        buckets: the captured batch sizes, ascending.
        tables_max: the most tables of orders of one bucket that may be captured at the same time.
        hysteresis: when to change; None: when it saves a tenth and 50 us per step, in 32 consecutive steps.

    Raises:
        InvalidConfig: names the value that does not fit, or the layer in which a table has an order without a price.
    """

    buckets: Many[Bucket]
    tables_max: int = 2
    hysteresis: Hysteresis | None = None
    _pointer: Any = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        held: list[Any] = []
        table = ffi.new("fb_bucket[]", max(len(several(self.buckets, "buckets")), 1))
        for at, bucket in enumerate(self.buckets):
            if not isinstance(bucket, Bucket) or not isinstance(bucket.prices, Prices):
                raise InvalidArgument(f"buckets[{at}]", repr(bucket), "a Bucket with Prices")
            tables = ffi.new("fb_table[]", max(len(several(bucket.tables, "tables")), 1))
            for index, one in enumerate(bucket.tables):
                if not isinstance(one, Table):
                    raise InvalidArgument(f"tables[{index}]", repr(one), "a Table")
                declared, orders = one._declare()
                tables[index] = declared[0]
                held.append(orders)
            prices, numbers = bucket.prices._declare()
            table[at].batch, table[at].table_count = tensors.index(bucket.batch, "batch"), len(bucket.tables)
            table[at].tables, table[at].prices = tables, prices[0]
            held += [tables, numbers]
        config = sized("fb_chooser_config")
        config.buckets, config.bucket_count = table, len(self.buckets)
        config.tables_max = tensors.index(self.tables_max, "tables_max")
        if self.hysteresis is not None:
            moves = sized("fb_hysteresis")
            names = ("smoothing", "share", "least_ns", "steps")
            set_fields(moves, {name: getattr(self.hysteresis, name, None) for name in names})
            config.hysteresis = moves
        text, (made, _end) = new_text(), cell(self, "fb_chooser **", lib.fb_chooser_destroy)
        check_created(lib.fb_chooser_create(config, text, len(text), made), text)
        self._pointer = made[0]

    __hash__ = object.__hash__

    def choose(self, counts: Many[LayerCount], rows: int, next_rows: int) -> Choice:
        """Adds the counters of a retired step of `rows` batch rows, and chooses the orders of a step of `next_rows`.

        Args:
            counts: `Retired.layers`.

        Raises:
            OutOfRange: counts of other layers, a step without rows, or more rows than the largest bucket.
            InvalidArgument: names the value that is no number.
        """
        try:
            given = ffi.new("fb_layer_count[]", [tuple(count) for count in counts])
        except (TypeError, OverflowError, ValueError) as error:
            raise InvalidArgument("counts", repr(counts), "`Retired.layers`") from error
        choice = sized("fb_choice")
        rows, next_rows = tensors.index(rows, "rows"), tensors.index(next_rows, "next_rows")
        check(lib.fb_choose(self._pointer, given, len(given), rows, next_rows, choice), self._pointer)
        return Choice(choice.bucket, choice.index, choice.version, bool(choice.changed))

    def table(self, bucket: int, index: int) -> Table:
        """The table of orders that a choice names.

        Raises:
            OutOfRange: no such table.
        """
        layers, version = ffi.new("uint32_t *"), ffi.new("uint32_t *")
        bucket, index = tensors.index(bucket, "bucket"), tensors.index(index, "index")
        check(lib.fb_chooser_table(self._pointer, bucket, index, NULL, 0, layers, version), self._pointer)
        orders = ffi.new("uint32_t[]", max(layers[0], 1))
        status = lib.fb_chooser_table(self._pointer, bucket, index, orders, layers[0], layers, version)
        check(status, self._pointer)
        return Table(tuple(ORDER_NAMES[orders[at]] for at in range(layers[0])), int(version[0]))


def _doubles(values: Any, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    try:
        return np.asarray(values, np.float64, order="C")
    except (TypeError, ValueError) as error:
        raise InvalidArgument(name, repr(values), "numbers") from error


def _filled(exposed: Any, count: int) -> Any:
    """The same lists, with C's -1 in place of None."""
    if not isinstance(exposed, (list, tuple)):
        return exposed
    try:
        return [[[-1.0] * count if times is None else times for times in orders] for orders in exposed]
    except TypeError:
        return exposed


def best(prices: Prices, misses: Many[float]) -> tuple[str, ...]:
    """For each layer, the order with the lowest price at that layer's misses of a batch row.

    Raises:
        InvalidConfig, InvalidArgument: invalid prices or misses.
    """
    if not isinstance(prices, Prices):
        raise InvalidArgument("prices", type(prices).__name__, "Prices")
    declared, _held = prices._declare()
    counts = _doubles(misses, "misses")
    if counts.ndim != 1 or declared.layers not in (1, counts.size):
        wanted = "one for each layer" if declared.layers == 1 else f"{declared.layers}, one a layer"
        raise InvalidArgument("misses", f"float64 {list(counts.shape)}", wanted)
    orders = ffi.new("uint32_t[]", max(counts.size, 1))
    reason, given = new_text(), ffi.from_buffer("double[]", counts)
    check_created(lib.fb_table_best(declared, given, counts.size, reason, len(reason), orders), reason)
    return tuple(ORDER_NAMES[orders[at]] for at in range(counts.size))
