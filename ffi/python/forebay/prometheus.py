"""A collector for `prometheus_client`: what a cache has and does.

A scrape comes on a thread of its own, and a cache is one thread's, whose calls would be Busy beside the scrape's: so
the thread that drives the cache leaves the numbers, whenever it retires a step, and a scrape reads what was left last.
What changes between steps shows at the next one, or by `Collector.take`. `prometheus_client` is imported when a
collector is made.
"""

from __future__ import annotations

import weakref
from typing import Any, Iterator

from .cache import Cache, Stats
from .errors import InvalidArgument

_GAUGES = {
    "sequences": "Sequences that are open, or closed while work that names them is in flight",
    "steps_in_flight": "Steps between prepare and retire",
    "free_host_pages": "Free pages of the total pool",
    "free_index_pages": "Free pages of index keys",
    "unused_pages": "Shared pages that no sequence uses",
    "free_slots": "Free slots of the layer that has the fewest",
    "free_lanes": "Free lanes",
}
_COUNTERS = {
    "steps": "Steps retired",
    "hits": "Distinct selected rows that were resident",
    "misses": "Rows fetched",
    "scratch": "Rows fetched into scratch slots",
    "bytes_up": "Bytes of rows that misses asked for, host to device",
    "prompt_tokens": "Prompt tokens that were looked up for sharing",
    "shared_tokens": "Prompt tokens in pages that were taken over",
    "published_pages": "Pages that were published for others to find",
    "evicted_pages": "Published pages that went to make room",
}


class Collector:
    """Gauges and counters `forebay_*` of caches, with the label `cache`.

    Args:
        registry: where it registers itself; None: nowhere, `register` it yourself.
    """

    def __init__(self, registry: Any = None) -> None:
        from prometheus_client import core

        self._families = (core.GaugeMetricFamily, core.CounterMetricFamily)
        self._last: dict[str, Stats] = {}
        self._caches: dict[str, weakref.ref[Cache]] = {}
        if registry is not None:
            registry.register(self)

    def add(self, name: str, cache: Cache) -> None:
        """Takes up a cache under a name, in place of another one. It does not keep the cache; one that was closed is
        left out."""
        reference = weakref.ref(cache)
        self._caches[name], self._last[name] = reference, cache.stats()
        # The cache keeps its watcher, which keeps neither of the two.
        collector = weakref.ref(self)

        def left(stats: Stats) -> None:
            there = collector()
            if there is not None and there._caches.get(name) is reference:
                there._last[name] = stats

        cache.watch(left)

    def take(self, name: str) -> None:
        """Takes a cache's numbers now, on the thread that drives it: behind admissions while nothing is decoded.

        Raises:
            InvalidArgument: no such cache. Closed, Busy: as of `Cache.stats`.
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
        """Nothing, so that registering it collects nothing."""
        return []

    def collect(self) -> Iterator[Any]:
        """What `prometheus_client` calls at a scrape."""
        gauge, counter = self._families
        # Others add and remove meanwhile.
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
