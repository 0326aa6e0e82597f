"""forebay's counters in vLLM's log and Prometheus endpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from .pool import Counts, ForebayRows

# By field of `Counts`: the counter's name, and its help.
COUNTERS = {
    "hits": ("vllm:forebay_row_hits", "Selected rows that were in slots, all layers."),
    "misses": ("vllm:forebay_row_misses", "Selected rows that were fetched from host memory, all layers."),
    "scratch": ("vllm:forebay_row_scratch", "Fetched rows that went to scratch slots, all layers."),
    "prompt_tokens": ("vllm:forebay_prefix_queries", "Prompt tokens that were looked up among published pages."),
    "shared_tokens": ("vllm:forebay_prefix_hits", "Prompt tokens found in published pages."),
    "preempted": ("vllm:forebay_preempted", "Requests that vLLM preempted."),
    "resumed": ("vllm:forebay_resumed", "Preempted requests that went on without computing a token again."),
    "dropped": ("vllm:forebay_dropped", "Preempted requests that lost their rows and were computed again."),
}
# The present, by field of the cache's statistics.
GAUGES = {
    "free_lanes": ("vllm:forebay_free_lanes", "Requests that could still run at the same time."),
    "free_slots": ("vllm:forebay_free_slots", "Free slots of the layer that has the fewest."),
    "free_host_pages": ("vllm:forebay_free_host_pages", "Free pages of the total pool."),
    "unused_pages": ("vllm:forebay_unused_pages", "Published pages that no request uses; admission may evict them."),
    "parked": ("vllm:forebay_parked", "Requests that are parked."),
}


@dataclass
class ForebayStats(KVConnectorStats):
    """Counts of an interval, and gauges at its end, by the fields' names."""

    data: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(store: ForebayRows) -> ForebayStats:
        """The present numbers of a store."""
        counts, cache = store.stats()
        gauges = {name: getattr(cache, name) for name in GAUGES}
        return ForebayStats(data={**counts._asdict(), **gauges})

    def since(self, before: ForebayStats) -> ForebayStats:
        """The counts since earlier ones."""
        counts = {name: self.data[name] - before.data.get(name, 0) for name in COUNTERS}
        return ForebayStats(data={**self.data, **counts})

    def reset(self) -> None:
        """See vLLM."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> ForebayStats:
        """See vLLM: this interval and the next."""
        counts = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in COUNTERS}
        return ForebayStats(data={**self.data, **other.data, **counts})

    def reduce(self) -> dict[str, int | float]:
        """See vLLM: for the log."""
        return {f"forebay {name}": value for name, value in self.data.items()}

    def is_empty(self) -> bool:
        """See vLLM."""
        return not any(self.data.get(name, 0) for name in Counts._fields)


class ForebayProm(KVConnectorPromMetrics):
    """The metrics of vLLM's `/metrics`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge = metric_types[Counter], metric_types[Gauge]
        self._counters = self._by_engine(counter, COUNTERS)
        self._gauges = self._by_engine(gauge, GAUGES)

    def _by_engine(self, kind: Any, names: dict[str, tuple[str, str]]) -> dict[int, dict[str, Any]]:
        made = {
            name: kind(name=title, documentation=text, labelnames=self._labelnames)
            for name, (title, text) in names.items()
        }
        return {
            engine: {name: one.labels(*values) for name, one in made.items()}
            for engine, values in self.per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """See vLLM."""
        for name, one in self._counters[engine_idx].items():
            one.inc(transfer_stats_data.get(name, 0))
        for name, one in self._gauges[engine_idx].items():
            if name in transfer_stats_data:
                one.set(transfer_stats_data[name])
