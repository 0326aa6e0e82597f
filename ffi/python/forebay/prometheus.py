"""Collectors for `prometheus_client`: the statistics of caches, and those of transfers.

A scrape runs on a thread of its own, and one thread drives a cache, whose calls would raise Busy during the scrape's
calls. So the driving thread stores the numbers whenever it retires a step, and a scrape reads the last stored numbers.
Changes between steps appear at the next step, or by `Collector.take`. `prometheus_client` is imported when a collector
is made.

The ends of transfers may be asked on any thread at any time, so a scrape asks them itself.
"""

from __future__ import annotations

import weakref
from typing import Any, Iterator, Sequence as Many

from .cache import Cache, Stats
from .errors import Busy, Closed, InvalidArgument
from .transfer import Receiver, Sender

_GAUGES = {
    "sequences": "Sequences that are open, or closed while work that uses them is in flight",
    "steps_in_flight": "Steps between prepare and retire",
    "free_host_pages": "Free pages of the total pool",
    "free_index_pages": "Free pages of index keys",
    "unused_pages": "Published pages that no sequence uses",
    "free_slots": "Free slots of the layer that has the fewest",
    "slots_in_use": "Slots that belong to a sequence, all layers, in whole blocks of 64",
    "free_lanes": "Free lanes",
    "arriving": "Sequences that a transfer brings, and that have not joined",
    "withheld_pages": "Pages of aborted sequences that no sequence gets until they are released",
}
_COUNTERS = {
    "steps": "Steps retired",
    "hits": "Distinct selected rows that were resident",
    "misses": "Rows fetched",
    "scratch": "Rows fetched into scratch slots",
    "bytes_up": "Bytes of the rows that missed, host to device",
    "prompt_tokens": "Prompt tokens that were looked up among published pages",
    "shared_tokens": "Prompt tokens found in published pages",
    "published_pages": "Pages that were published for other sequences to find",
    "evicted_pages": "Published pages that were evicted to make room",
    "resizes": "Resizes of a sequence's budgets",
    "parked": "Parked sequences",
    "moved_rows": "Rows that resizes have moved to other slots",
}
_SENDER_GAUGES = {
    "held": "Parts whose rows are held: computed, and not yet released",
    "exposed_longest": "The longest time, in seconds, from when all was computed until the receivers had it",
}
_SENDER_COUNTERS = {
    "done": "Requests that have ended with all rows at their receivers",
    "failed": "Requests that have ended otherwise",
    "runs": "Runs of bytes that were told, each as often as it was told",
    "again": "Runs that were told again because they had arrived with other bytes",
    "repeats": "Messages that were sent again because no answer came in time",
    "exposed": "Seconds from when all was computed until the receivers had it",
}
_LAG_COUNTERS = {
    "parts": "Parts of a layer that were released",
    "total": "Seconds for which rows of a layer were held",
}
_RECEIVER_COUNTERS = {
    "whole": "Uses of pages that became whole",
    "failed": "Uses of pages that failed or were aborted",
    "runs": "Runs of bytes that were stored",
    "bytes": "Bytes of rows that were stored",
    "wrong": "Runs that arrived with other bytes than their digests say, or could not be read",
}


class Collector:
    """Gauges and counters `forebay_*` of caches, with the label `cache`.

    Args:
        registry: the registry in which it registers itself; None: the program calls `register` itself.
    """

    def __init__(self, registry: Any = None) -> None:
        from prometheus_client import core

        self._families = (core.GaugeMetricFamily, core.CounterMetricFamily)
        self._last: dict[str, Stats] = {}
        self._caches: dict[str, weakref.ref[Cache]] = {}
        if registry is not None:
            registry.register(self)

    def add(self, name: str, cache: Cache) -> None:
        """Adds a cache under a name, in place of an earlier one. The collector does not keep the cache alive, and
        leaves out a closed one.
        """
        reference = weakref.ref(cache)
        self._caches[name], self._last[name] = reference, cache.stats()
        # The cache keeps its watcher alive, and the watcher keeps neither cache nor collector alive.
        collector = weakref.ref(self)

        def left(stats: Stats) -> None:
            there = collector()
            if there is not None and there._caches.get(name) is reference:
                there._last[name] = stats

        cache.watch(left)

    def take(self, name: str) -> None:
        """Stores a cache's numbers now, on the thread that drives the cache, for example after admissions while nothing
        is decoded.

        Raises:
            InvalidArgument: no such cache.
            Closed, Busy: as `Cache.stats`.
        """
        reference = self._caches.get(name)
        cache = None if reference is None else reference()
        if cache is None:
            raise InvalidArgument("name", repr(name), "the name of a cache that is there")
        self._last[name] = cache.stats()

    def remove(self, name: str) -> None:
        """Leaves a cache out from now on."""
        self._caches.pop(name, None)
        self._last.pop(name, None)

    def describe(self) -> list[Any]:
        """Returns nothing, so that registering the collector collects nothing."""
        return []

    def collect(self) -> Iterator[Any]:
        """Called by `prometheus_client` at a scrape."""
        gauge, counter = self._families
        # Other threads may add and remove caches meanwhile.
        there, last = tuple(self._caches.items()), dict(self._last)
        alive = {name: last[name] for name, cache in there if name in last and _is_open(cache())}
        for family, fields in ((gauge, _GAUGES), (counter, _COUNTERS)):
            for field, says in fields.items():
                metric = family(f"forebay_{field}", says, labels=["cache"])
                for name, stats in alive.items():
                    metric.add_metric([name], getattr(stats, field))
                yield metric


def _is_open(cache: Cache | None) -> bool:
    return cache is not None and not cache.closed


class TransferCollector:
    """Gauges and counters `forebay_sender_*` and `forebay_receiver_*` of ends of transfers, with the label `end`; and
    `forebay_sender_lag_*`, with the label `layer` too.

    Args:
        registry: the registry in which it registers itself; None: the program calls `register` itself.
    """

    def __init__(self, registry: Any = None) -> None:
        from prometheus_client import core

        self._families = (core.GaugeMetricFamily, core.CounterMetricFamily)
        self._senders: dict[str, tuple[weakref.ref[Sender], tuple[int, ...]]] = {}
        self._receivers: dict[str, weakref.ref[Receiver]] = {}
        if registry is not None:
            registry.register(self)

    def add_sender(self, name: str, sender: Sender, layers: Many[int] = ()) -> None:
        """Adds a sender under a name, in place of an earlier one, with the lag of these layers of the model. The
        collector does not keep it alive, and leaves out a closed one.
        """
        self._senders[name] = (weakref.ref(sender), tuple(layers))

    def add_receiver(self, name: str, receiver: Receiver) -> None:
        """Adds a receiver, as `add_sender` does."""
        self._receivers[name] = weakref.ref(receiver)

    def remove(self, name: str) -> None:
        """Leaves the ends of a name out from now on."""
        self._senders.pop(name, None)
        self._receivers.pop(name, None)

    def describe(self) -> list[Any]:
        """Returns nothing, so that registering the collector collects nothing."""
        return []

    def collect(self) -> Iterator[Any]:
        """Called by `prometheus_client` at a scrape."""
        sent, received, lags = {}, {}, {}
        # Other threads may add, remove and close ends meanwhile.
        for name, (reference, layers) in tuple(self._senders.items()):
            if (sender := reference()) is not None:
                try:
                    sent[(name,)] = sender.stats()
                    lags.update({(name, str(layer)): sender.lag(layer) for layer in layers})
                except (Busy, Closed):
                    # It is being closed.
                    sent.pop((name,), None)
        for name, of in tuple(self._receivers.items()):
            if (receiver := of()) is not None:
                try:
                    received[(name,)] = receiver.stats()
                except (Busy, Closed):
                    continue
        gauge, counter = self._families
        yield from _metrics(gauge, "sender", _SENDER_GAUGES, ["end"], sent)
        yield from _metrics(counter, "sender", _SENDER_COUNTERS, ["end"], sent)
        yield from _metrics(counter, "sender_lag", _LAG_COUNTERS, ["end", "layer"], lags)
        yield from _metrics(counter, "receiver", _RECEIVER_COUNTERS, ["end"], received)


def _metrics(
    family: Any, of: str, fields: dict[str, str], labels: list[str], found: dict[Any, Any]
) -> Iterator[Any]:
    """A metric for each field, of all that was found by its labels."""
    for field, says in fields.items():
        metric = family(f"forebay_{of}_{field}", says, labels=labels)
        for values, stats in found.items():
            metric.add_metric(list(values), getattr(stats, field))
        yield metric
