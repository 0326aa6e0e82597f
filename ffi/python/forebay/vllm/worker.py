"""vLLM's CPU worker with forebay's memory: how many blocks vLLM may count, and the making of the store."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info
from vllm.v1.worker.cpu_worker import CPUWorker

from ..errors import InvalidConfig
from ..shape import Shape
from .layer import Model, counting_spec, layers_of
from .options import FOREBAY
from .pool import ForebayRows, Limits, Sizes, fit
from .resident import ResidentRows

# Of the machine's available memory, what the pools may take if vLLM was told a number of bytes.
_SHARE = 0.9
_log = init_logger("vllm.forebay")


def model_of(vllm_config: Any) -> Model | None:
    """What the layers of a model share; None for a model that forebay leaves alone."""
    layers = layers_of(vllm_config)
    return layers[0].model if layers else None


def available() -> int:
    """Bytes of host memory that are free where vLLM has bound this process: of its node, and of its control group."""
    return int(get_memory_node_info(get_allowed_cpu_list()[0].numa_node).available_memory)


class ForebayWorker(CPUWorker):
    """See vLLM."""

    def determine_available_memory(self) -> int:
        """The memory for vLLM's KV cache: what it needs to count the blocks whose pools fit.

        `kv_cache_memory_bytes` is for what a GPU would hold; the total pool is in addition, as far as the machine has
        memory. Without this setting vLLM takes a share of the machine's memory, which has to hold both.

        Raises:
            OutOfMemory: the longest request does not fit.
            InvalidConfig: its rows do not fit `host_memory`.
        """
        memory = int(super().determine_available_memory())
        model = model_of(self.vllm_config)
        if model is None or model.options.rows != FOREBAY:
            return memory
        given = self.vllm_config.cache_config.kv_cache_memory_bytes is not None
        both = int(_SHARE * available()) if given else memory
        self._fits: Sizes = fit(self._shape(model), self._limits(model), model.options, memory, both)
        return self._fits.blocks * int(counting_spec(self.vllm_config).page_size_bytes)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Makes vLLM's KV cache, and the store.

        Raises:
            OutOfMemory: forebay's cache does not fit host memory.
            InvalidConfig: more blocks than fit (`num_gpu_blocks_override`).
        """
        model = model_of(self.vllm_config)
        if model is not None and model.options.rows == FOREBAY:
            dtype, blocks = self.vllm_config.model_config.dtype, kv_cache_config.num_blocks
            if blocks > self._fits.blocks:
                raise InvalidConfig(f"num_gpu_blocks_override: {blocks} blocks, and {self._fits.blocks} fit")
            model.store = ForebayRows(self._shape(model), self._limits(model), model.options, blocks, dtype)
        super().initialize_from_config(kv_cache_config)
        if model is None:
            return
        model.runner = self.model_runner
        if isinstance(model.store, ForebayRows):
            cache = model.store.cache
            _log.info("forebay: %s", cache)
        else:
            model.store = ResidentRows(model.layers)

    def shutdown(self) -> None:
        """Gives forebay's memory back."""
        model = model_of(self.vllm_config)
        if model is not None and isinstance(model.store, ForebayRows):
            model.store.close()
            model.store = None
        super().shutdown()

    def _limits(self, model: Model) -> Limits:
        config = self.vllm_config
        share = bool(config.kv_transfer_config.get_from_extra_config("share", True))
        tokens, block = config.model_config.max_model_len, config.cache_config.block_size
        return Limits(config.scheduler_config.max_num_seqs, tokens, model.query_rows, block, share)

    def _shape(self, model: Model) -> Shape:
        config = self.vllm_config
        size, first = config.model_config.dtype.itemsize, model.layers[0]
        leads = tuple(layer.leads for layer in model.layers)
        return Shape(
            layers=len(model.layers),
            row_bytes=(first.width * size, 0),
            top_k=min(config.model_config.hf_text_config.index_topk, config.model_config.max_model_len),
            index_key_bytes=first.key_values * size,
            page_tokens=config.cache_config.block_size,
            selects_by_layer=None if all(leads) else leads,
        )
