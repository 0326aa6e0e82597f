"""vLLM's CPU platform with forebay on. What cannot work is refused here, when vLLM starts.

For a model without sparse attention it is vLLM's own platform.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

import vllm
from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform

from ..errors import InvalidArgument, Unsupported
from .options import FOREBAY, MODELS, Options

# The versions whose hooks were tried.
VERSIONS = ("0.32",)
_BLOCK = 64
_CONNECTOR = "ForebayConnector"
_log = init_logger("vllm.forebay")


def check_version(version: str = vllm.__version__) -> None:
    """Refuses a vLLM that was not tried.

    Raises:
        Unsupported: another version.
    """
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        from .hooks import missing

        known, gone = ", ".join(f"{one}.x" for one in VERSIONS), missing()
        lacks = f"; this one lacks {', '.join(gone)}" if gone else ""
        raise Unsupported(f"vLLM {version}: forebay.vllm uses internals of vLLM and knows {known}{lacks}")


class ForebayCpuPlatform(CpuPlatform):
    """See vLLM."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Configures vLLM for forebay's layers.

        Raises:
            Unsupported, InvalidArgument: the configuration, or vLLM's version.
        """
        # vLLM makes its platform while it imports its configuration.
        from vllm.config import CompilationMode, KVTransferConfig

        model = vllm_config.model_config
        if model is None or not hasattr(model.hf_text_config, "index_topk"):
            if model is not None and Options.read().required:
                kind = model.hf_text_config.model_type
                _refuse(f"a model of type {kind!r}", "it has no sparse attention; serve it without forebay")
            super().check_and_update_config(vllm_config)
            _log.info("forebay is off for this model: it has no sparse attention")
            return
        check_version()
        options = Options.read()
        if os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0") != "0":
            _refuse("VLLM_USE_V2_MODEL_RUNNER=1", "the other model runner knows requests by other names; unset it")
        _check(vllm_config)
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        block = cache.block_size if cache.user_specified_block_size else _BLOCK
        # vLLM's MLA on a CPU can do neither of them, and has other blocks.
        chunks = (scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens)
        # vLLM's engine process configures itself once more.
        before = vllm_config.kv_transfer_config
        own = before is not None and before.kv_connector == _CONNECTOR
        share = before.get_from_extra_config("share", True) if own else cache.enable_prefix_caching
        super().check_and_update_config(vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunks
        cache.block_size, cache.enable_prefix_caching = block, share
        # Rows move by calls that no compiled graph contains.
        vllm_config.compilation_config.mode = CompilationMode.NONE
        # Scheduler and worker share one cache, so they are one process.
        vllm_config.parallel_config.distributed_executor_backend = "uni"
        vllm_config.parallel_config.worker_cls = "forebay.vllm.worker.ForebayWorker"
        if options.rows == FOREBAY:
            # Prefixes are found among forebay's pages.
            cache.enable_prefix_caching = False
            vllm_config.kv_transfer_config = KVTransferConfig(
                kv_connector=_CONNECTOR,
                kv_connector_module_path="forebay.vllm.connector",
                kv_role="kv_both",
                kv_connector_extra_config={"share": bool(share)},
            )


def _check(vllm_config: Any) -> None:
    """Refuses what forebay's layers cannot do."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    kind = model.hf_text_config.model_type
    if kind not in MODELS:
        _refuse(f"models of type {kind!r}", f"forebay.vllm knows {', '.join(MODELS)}")
    for name in (
        "tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size",
        "prefill_context_parallel_size", "data_parallel_size",
    ):  # fmt: skip
        if getattr(parallel, name, 1) > 1:
            _refuse(f"{name}={getattr(parallel, name)}", "one process attends, so it has to be 1")
    if parallel.distributed_executor_backend not in (None, "uni"):
        _refuse(
            f"distributed_executor_backend={parallel.distributed_executor_backend!r}",
            'scheduler and worker share one cache: leave it out, or "uni"',
        )
    drafts = vllm_config.speculative_config
    if drafts is not None and drafts.method != "ngram":
        _refuse(f"drafts by {drafts.method!r}", 'drafts come from prompt lookup ("method": "ngram")')
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector not in (None, _CONNECTOR):
        _refuse(f"the KV connector {transfer.kv_connector}", "forebay is the connector")
    if vllm_config.lora_config is not None:
        _refuse("LoRA", "leave it out")
    if getattr(model, "enable_prompt_embeds", False):
        _refuse("enable_prompt_embeds", "prompts are token ids")
    cache = vllm_config.cache_config
    if cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        _refuse(f"kv_cache_dtype={cache.cache_dtype!r}", f"rows have the model's type, {model.dtype}")
    block = cache.block_size if cache.user_specified_block_size else _BLOCK
    if block & (block - 1) or not 16 <= block <= 1024:
        raise InvalidArgument("block_size", str(block), "a power of two from 16 to 1024")


def _refuse(what: str, why: str) -> NoReturn:
    raise Unsupported(f"{what} with forebay: {why}")
