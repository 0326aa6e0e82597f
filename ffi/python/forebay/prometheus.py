"""A collector for `prometheus_client`: the statistics of caches.

A scrape runs on a thread of its own, and one thread drives a cache, whose calls would raise Busy during the scrape's
calls. So the driving thread stores the numbers whenever it retires a step, and a scrape reads the last stored numbers.
Changes between steps appear at the next step, or by `Collector.take`. `prometheus_client` is imported when a collector
is made.
"""

from __future__ import annotations

import weakref
from typing import Any, Iterator

from .cache import Cache, Stats
from .errors import InvalidArgument

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
