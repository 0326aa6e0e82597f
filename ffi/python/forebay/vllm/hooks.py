"""The parts of vLLM that forebay uses, and whether the installed vLLM has them.

vLLM documents few of them. A version in which one is gone would fail somewhere in the middle of a start, or worse,
work otherwise. `missing` names what is gone, for a test that runs with every new vLLM and for the error of a version
that was not tried.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from importlib import import_module
from typing import Any, NamedTuple

DOCUMENTED, EXPERIMENTAL, INTERNAL = "documented", "experimental", "internal"


class Hook(NamedTuple):
    """A part of vLLM.

    Attributes:
        place: its module and name.
        names: parameters that it must take if it is a function; otherwise attributes that it must have, those that its
            class sets in `__init__` among them.
        stability: what vLLM says of it.
    """

    place: str
    names: tuple[str, ...]
    stability: str


_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1."
_RUNNER = "vllm.v1.worker."
HOOKS = (
    Hook("vllm.platforms.cpu:CpuPlatform", ("check_and_update_config",), DOCUMENTED),
    Hook("vllm.model_executor.custom_op:PluggableLayer", ("register_oot",), DOCUMENTED),
    Hook("vllm.model_executor.custom_op:op_registry_oot", (), DOCUMENTED),
    Hook("vllm.model_executor.layers.mla:MultiHeadLatentAttentionWrapper", ("forward",), DOCUMENTED),
    Hook(
        "vllm.model_executor.layers.mla:MultiHeadLatentAttentionWrapper.__init__",
        (
            "hidden_size", "num_heads", "scale", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank",
            "kv_lora_rank", "mla_modules", "cache_config", "quant_config", "prefix", "skip_topk",
        ),
        INTERNAL,
    ),
    Hook(
        "vllm.model_executor.layers.mla:MLAModules.__init__",
        (
            "kv_a_layernorm", "kv_b_proj", "rotary_emb", "o_proj", "fused_qkv_a_proj", "q_a_layernorm", "q_b_proj",
            "indexer", "is_sparse", "indexer_rotary_emb", "g_proj",
        ),
        INTERNAL,
    ),
    Hook(
        "vllm.model_executor.models.deepseek_v2:Indexer",
        (
            "wq_b", "wk_weights_proj", "k_norm", "k_cache", "n_head", "head_dim", "rope_dim",
            "softmax_scale", "n_head_scale",
        ),
        INTERNAL,
    ),
    Hook(
        "vllm.model_executor.layers.attention.mla_attention:split_kv_b_proj",
        ("kv_b_proj", "out_dtype", "kv_lora_rank", "num_heads", "qk_nope_head_dim", "v_head_dim"),
        INTERNAL,
    ),
    Hook(
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
        ("bind_kv_cache", "get_attn_backend", "get_kv_cache_spec"),
        INTERNAL,
    ),
    Hook("vllm.config.compilation:CompilationConfig", ("static_forward_context",), INTERNAL),
    Hook("vllm.config:CompilationMode", ("NONE",), DOCUMENTED),
    Hook(
        "vllm.config:KVTransferConfig",
        ("kv_connector_module_path", "kv_connector_extra_config", "get_from_extra_config"),
        EXPERIMENTAL,
    ),
    Hook("vllm.config:ParallelConfig", ("worker_cls", "distributed_executor_backend"), INTERNAL),
    Hook(
        "vllm.config:CacheConfig",
        ("block_size", "user_specified_block_size", "cache_dtype", "kv_cache_memory_bytes", "enable_prefix_caching"),
        INTERNAL,
    ),
    Hook(
        "vllm.config:SchedulerConfig", ("enable_chunked_prefill", "max_num_batched_tokens", "max_num_seqs"), INTERNAL
    ),
    Hook("vllm.config:SpeculativeConfig", ("method", "num_speculative_tokens"), INTERNAL),
    Hook("vllm.config:ModelConfig", ("hf_text_config", "max_model_len", "dtype"), INTERNAL),
    Hook("vllm.v1.kv_cache_interface:KVCacheConfig", ("num_blocks",), INTERNAL),
    Hook("vllm.forward_context:get_forward_context", (), INTERNAL),
    Hook("vllm.v1.attention.backend:AttentionBackend", ("get_builder_cls", "is_mla", "is_sparse"), INTERNAL),
    Hook(
        "vllm.v1.attention.backend:CommonAttentionMetadata",
        ("query_start_loc_cpu", "seq_lens", "block_table_tensor", "slot_mapping"),
        INTERNAL,
    ),
    Hook("vllm.v1.attention.backend:AttentionMetadataBuilder.build", ("common_attn_metadata",), INTERNAL),
    Hook(
        "vllm.v1.kv_cache_interface:MLAAttentionSpec.__init__", ("block_size", "num_kv_heads", "head_size", "dtype"),
        INTERNAL,
    ),
    Hook(
        _RUNNER + "cpu_worker:CPUWorker",
        ("determine_available_memory", "initialize_from_config", "shutdown"),
        INTERNAL,
    ),
    Hook("vllm.utils.cpu_resource_utils:get_memory_node_info", (), INTERNAL),
    Hook("vllm.utils.cpu_resource_utils:get_allowed_cpu_list", (), INTERNAL),
    Hook(_RUNNER + "gpu_model_runner:GPUModelRunner", ("input_batch",), INTERNAL),
    Hook(_RUNNER + "gpu_input_batch:InputBatch", ("req_ids", "num_prompt_tokens"), INTERNAL),
    Hook(
        _CONNECTOR + "base:KVConnectorBase_V1",
        (
            "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "request_finished",
            "handle_preemptions", "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save",
            "get_kv_connector_stats", "build_kv_connector_stats", "build_prom_metrics",
            "requires_kv_delivery", "reset_cache",
        ),
        EXPERIMENTAL,
    ),
    Hook(_CONNECTOR + "base:KVConnectorMetadata", (), EXPERIMENTAL),
    Hook(_CONNECTOR + "base:KVConnectorRole", ("WORKER",), EXPERIMENTAL),
    Hook(_CONNECTOR + "base:SupportsHMA", ("request_finished_all_groups",), EXPERIMENTAL),
    Hook(_CONNECTOR + "metrics:KVConnectorStats", ("aggregate", "reduce", "is_empty", "reset"), EXPERIMENTAL),
    Hook(_CONNECTOR + "metrics:KVConnectorPromMetrics", ("observe",), EXPERIMENTAL),
    Hook("vllm.v1.core.sched.output:SchedulerOutput", ("preempted_req_ids", "num_scheduled_tokens"), INTERNAL),
    Hook(
        "vllm.v1.request:Request",
        (
            "request_id", "prompt_token_ids", "num_tokens", "all_token_ids", "skip_reading_prefix_cache", "cache_salt",
        ),
        INTERNAL,
    ),
    Hook("vllm.entrypoints.cli.serve:cmd_init", (), INTERNAL),
    Hook("vllm.entrypoints.serve.utils.api_utils:cli_env_setup", (), INTERNAL),
    Hook("vllm.logger:configure_logging_from_args", (), INTERNAL),
    Hook("vllm.utils.argparse_utils:FlexibleArgumentParser", ("add_subparsers", "parse_args"), INTERNAL),
)  # fmt: skip


def table() -> str:
    """The hooks as a table of docs/vllm.md."""
    lines = ["| of vLLM | names | stability |", "|---|---|---|"]
    for hook in HOOKS:
        names = ", ".join(f"`{name}`" for name in hook.names) or "-"
        lines.append(f"| `{hook.place.replace(':', '.')}` | {names} | {hook.stability} |")
    return "\n".join(lines) + "\n"


def missing() -> list[str]:
    """What the installed vLLM lacks, one line each."""
    return [line for hook in HOOKS for line in _missing(hook)]


def _missing(hook: Hook) -> list[str]:
    module, _, path = hook.place.partition(":")
    try:
        found: Any = import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return [f"{hook.place} ({hook.stability})"]
    have = _parameters(found) if inspect.isroutine(found) else _attributes(found)
    return [f"{hook.place}: {name} ({hook.stability})" for name in hook.names if name not in have]


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def _attributes(found: Any) -> set[str]:
    """The names that a class or its bases define, the fields that it declares, and what its `__init__` assigns."""
    names = set(dir(found))
    for kind in getattr(found, "__mro__", ()):
        names.update(getattr(kind, "__annotations__", ()))
        if inspect.isfunction(kind.__dict__.get("__init__")):
            names.update(_assigned(kind))
    return names


def _assigned(kind: type) -> set[str]:
    """The names that a class's methods assign to `self`."""
    spec = importlib.util.find_spec(kind.__module__)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return set()
    with open(spec.origin, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == kind.__name__]
    targets = [
        target
        for node in classes
        for statement in ast.walk(node)
        if isinstance(statement, (ast.Assign, ast.AnnAssign))
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
    ]
    return {
        target.attr
        for target in targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }
