"""A small DeepSeek-V3.2 in a folder, for `check`, `bench` and the tests, without a checkpoint.

Matrices have a standard deviation of 0.25. vLLM's own dummy weights are too small: all tokens are alike then, and a
wrong row changes nothing. It has no tokenizer, so prompts are token ids.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 1024
# Latents and heads of the published model's sizes; four narrow layers, the first of which is dense.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "index_topk": 64,
    "index_head_dim": 128,
    "index_n_heads": 8,
    "max_position_embeddings": 1 << 14,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_DEVIATION = 0.25
# What transformers does not write and vLLM reads.
_MORE = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def save(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    selects: str = "",
    layers: float = 1.0,
    **changes: Any,
) -> None:
    """Writes the model as safetensors.

    Args:
        folder: where.
        dtype: of the weights.
        seed: of the weights.
        selects: for each layer F if it selects, S if it shares the selection of the layer before (`index_topk_pattern`
            of vLLM). Nothing: every layer selects.
        layers: a factor of what layers add to the residual. With a small one a token follows mostly from the one before
            it, so answers soon repeat themselves, and drafts by prompt lookup are accepted.
        changes: fields of its configuration that replace ours.
    """
    config = transformers.DeepseekV32Config(**{**SIZES, **changes})
    model = transformers.DeepseekV32ForCausalLM(config)
    for layer, kind in zip(model.model.layers, selects):
        if kind == "S":
            del layer.self_attn.indexer
    _write(model, folder, dtype, seed, {"index_topk_pattern": selects} if selects else {}, layers)


def save_dense(folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
    """Writes a DeepSeek-V3 of the same sizes, which has no indexer: forebay leaves it to vLLM."""
    sizes = {name: value for name, value in SIZES.items() if not name.startswith("index_")}
    _write(transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes)), folder, dtype, seed, {})


def _write(
    model: Any, folder: Path, dtype: torch.dtype, seed: int, changes: dict[str, Any], layers: float = 1.0
) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if "embed_tokens" in name:
                weight.copy_(drawn)
            elif weight.dim() > 1:
                adds = name.endswith(("o_proj.weight", "down_proj", "down_proj.weight"))
                weight.copy_(drawn * (_DEVIATION * layers if adds else _DEVIATION))
            else:
                weight.add_(drawn, alpha=0.1)
    model.to(dtype).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **_MORE, **changes}))


def prompts(lengths: list[int], *, seed: int = 0) -> list[list[int]]:
    """Random token ids, none of them the padding token 0."""
    generator = random.Random(seed)
    return [[generator.randrange(1, VOCABULARY) for _ in range(length)] for length in lengths]
