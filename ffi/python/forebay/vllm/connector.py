"""forebay as vLLM's KV connector: by it vLLM says what becomes of requests, and forebay which tokens need no compute.

Both roles are in one process (`platform` sees to it) and use the same store. In a step of vLLM:

    scheduler   get_num_new_matched_tokens   a request waits: `find`
                update_state_after_alloc     it is scheduled: `admit`
                request_finished             it is done or aborted: `end`
                reset_cache                  `forget_prefixes`
                build_connector_meta         the preempted requests
    worker      handle_preemptions           `preempt`, before anything runs
                the model's layers           `layer`
                wait_for_save                the pass ends
                get_kv_connector_stats       counters for vLLM's log and its Prometheus endpoint

Rows never move through vLLM's KV cache, so nothing is loaded or saved.

vLLM tells its worker of ended requests too, by `get_finished`. That is a step later, when it has already scheduled the
next request, which would find their lanes and slots taken.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from .metrics import ForebayProm, ForebayStats
from .pool import ForebayRows
from .worker import model_of


@dataclass
class ForebayMetadata(KVConnectorMetadata):
    """What the scheduler tells the worker in a step."""

    # Requests that were preempted.
    preempted: list[str] = field(default_factory=list)


class ForebayConnector(KVConnectorBase_V1, SupportsHMA):
    """See vLLM."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._told = ForebayStats()

    @property
    def requires_kv_delivery(self) -> bool:
        """See vLLM: nothing is handed to another instance, so a preempted request's answer is complete."""
        return False

    @property
    def store(self) -> ForebayRows:
        """Where rows are."""
        model = model_of(self._vllm_config)
        assert model is not None and isinstance(model.store, ForebayRows)
        return model.store

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See vLLM."""
        found = self.store.find(
            request.request_id, request.prompt_token_ids, request.num_tokens, salt_of(request), shares(request)
        )
        return found if found is None else max(found - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See vLLM."""
        self.store.admit(
            request.request_id, request.prompt_token_ids, request.num_tokens, num_external_tokens, salt_of(request),
            shares(request),
        )  # fmt: skip

    def reset_cache(self) -> bool:
        """See vLLM."""
        self.store.forget_prefixes()
        return True

    def build_connector_meta(self, scheduler_output: Any) -> ForebayMetadata:
        """See vLLM."""
        # `reset_prefix_cache` preempts requests and schedules them again in the same step.
        again = scheduler_output.num_scheduled_tokens
        return ForebayMetadata(sorted(id for id in scheduler_output.preempted_req_ids or () if id not in again))

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM."""
        self.store.end(request.request_id, request.all_token_ids)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM."""
        return self.request_finished(request, block_ids)

    def handle_preemptions(self, kv_connector_metadata: ForebayMetadata) -> None:
        """See vLLM."""
        for id in kv_connector_metadata.preempted:
            self.store.preempt(id)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: rows are where attention reads them."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: the layer has kept its rows."""

    def wait_for_save(self) -> None:
        """See vLLM: the pass ends."""
        self.store.finish()

    def get_kv_connector_stats(self) -> ForebayStats | None:
        """See vLLM: what has happened since the last call. The worker's; the scheduler's role has none."""
        if self._role != KVConnectorRole.WORKER:
            return None
        now = ForebayStats.of(self.store)
        since, self._told = now.since(self._told), now
        return since

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ForebayStats:
        """See vLLM."""
        return ForebayStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> ForebayProm:
        """See vLLM."""
        return ForebayProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def shares(request: Any) -> bool:
    """Whether a request may share its prompt's beginning."""
    return not request.skip_reading_prefix_cache


def salt_of(request: Any) -> bytes:
    """What a request's prompt is shared under: vLLM's salt of the request."""
    salt = getattr(request, "cache_salt", None)
    return b"" if salt is None else hashlib.sha256(str(salt).encode()).digest()
