"""Small models of each family with random weights: for `check`, `bench` and the tests, without a checkpoint.

A small model has the parts of its family: every kind of layer, index groups where the family shares selections, hy_v4's
attention sinks, dots3_note's sliding layers, mistral_large4's layers without rotary positions. Its weights have the
spread of a trained model's: each matrix keeps the variance of its input, so that scores, selections and tokens vary
with the input. With transformers' own initial weights all tokens are alike, and a wrong row changes nothing.

Everything follows from the family, the sizes and the seed. The text such a model writes means nothing, and its
selections have less locality than a trained model's: its misses say nothing about a trained model's misses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers

from ..errors import Unsupported

FAMILIES = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "mistral_large4", "dots3_note")
"""The families, by the `model_type` of their configuration."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a small model, the same in every family.

    Attributes:
        layers: layers of the language model.
        hidden: width of a hidden state.
        heads: attention heads.
        latent: values of a latent without the rotary part (`kv_lora_rank`).
        rotary: values of its rotary part (`qk_rope_head_dim`).
        head: values of a head's key without the rotary part, and of its value.
        index_heads, index_head: heads of the indexer and values of an index key. With few heads many scores are 0, and
            which of equal scores is selected depends on the shape of a pass.
        top_k: positions that a query row selects (`index_topk`).
        vocabulary: tokens.
        context: the longest context (`max_position_embeddings`).
        window: positions that a sliding layer of dots3_note sees.
    """

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    latent: int = 32
    rotary: int = 16
    head: int = 16
    index_heads: int = 8
    index_head: int = 32
    top_k: int = 16
    vocabulary: int = 256
    context: int = 1 << 14
    window: int = 24


TINY = Sizes()
"""Milliseconds a step, for tests."""
SMALL = Sizes(
    hidden=256, heads=8, latent=512, rotary=64, head=128, index_heads=8, index_head=128, top_k=256, vocabulary=1024,
    window=128,
)  # fmt: skip
"""Latents and heads of the published models' sizes in a narrow model of four layers, for figures."""


def known(family: str) -> bool:
    """Whether the installed transformers has the family: some are newer than 5.18."""
    return hasattr(transformers, _CLASSES[family])


def configuration(family: str, sizes: Sizes = TINY, **changes: Any) -> Any:
    """The configuration of a small model of `family`. `changes` are fields of its language model that replace ours.

    Raises:
        KeyError: another family.
        Unsupported: the installed transformers does not have the family.
    """
    if not known(family):
        raise Unsupported(f"{family}: not in this transformers, which is {transformers.__version__}")
    return _CONFIGURATIONS[family](sizes, changes)


def small(
    family: str, sizes: Sizes = TINY, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> Any:
    """A small model of `family` with random weights, in evaluation mode. See `configuration` for `changes`."""
    config = configuration(family, sizes, **changes)
    kind = getattr(transformers, _CLASSES[family])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
        _spread(model)
    model = model.to(dtype).eval()
    # No token ends a text, so that every run has the length that it asks for.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts(batch: int, length: int, *, sizes: Sizes = TINY, seed: int = 0) -> torch.Tensor:
    """Random tokens `[batch, length]` (int64), none of them the padding token 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, sizes.vocabulary, (batch, length), generator=generator)


def _spread(model: torch.nn.Module) -> None:
    """Draws each parameter again. A matrix gets the standard deviation that keeps its input's variance; a vector (a
    norm, a bias, sinks, scales) is moved from its initial value, so that a program that ignores it is noticed."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if "embed_tokens" in name:
                parameter.copy_(noise)
            elif parameter.dim() >= 2:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            elif "sinks" in name:
                parameter.copy_(noise)
            else:
                parameter.add_(noise, alpha=0.1)
        # Logits of a trained model differ by more than one from token to token.
        model.get_output_embeddings().weight.mul_(3)


def _common(sizes: Sizes) -> dict[str, Any]:
    """Fields that all families have."""
    return {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": 2 * sizes.hidden,
        "moe_intermediate_size": sizes.hidden // 2,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": sizes.latent,
        "qk_rope_head_dim": sizes.rotary,
        "qk_nope_head_dim": sizes.head,
        "v_head_dim": sizes.head,
        "index_topk": sizes.top_k,
        "index_head_dim": sizes.index_head,
        "index_n_heads": sizes.index_heads,
        "max_position_embeddings": sizes.context,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        # The first layer has a dense MLP, the others have experts.
        "mlp_layer_types": ["dense"] + ["sparse"] * (sizes.layers - 1),
    }


def _deepseek_v32(sizes: Sizes, changes: dict[str, Any]) -> Any:
    return transformers.DeepseekV32Config(**{**_common(sizes), "q_lora_rank": sizes.hidden // 2, **changes})


def _glm_moe_dsa(sizes: Sizes, changes: dict[str, Any]) -> Any:
    # Two layers in four take the selection of the layer before them.
    shared = {"indexer_types": ["full" if layer % 2 == 0 else "shared" for layer in range(sizes.layers)]}
    return transformers.GlmMoeDsaConfig(**{**_common(sizes), "q_lora_rank": sizes.hidden // 2, **shared, **changes})


def _axk2(sizes: Sizes, changes: dict[str, Any]) -> Any:
    # The gate of a norm has less width than the model.
    narrow = {"q_lora_rank": sizes.hidden // 2, "gated_norm_rank": 8}
    return transformers.AXK2Config(**{**_common(sizes), **narrow, **changes})


def _hy_v4(sizes: Sizes, changes: dict[str, Any]) -> Any:
    # Its own default shares selections: full, full, shared, shared.
    return transformers.HYV4Config(**{**_common(sizes), "q_lora_rank": sizes.hidden // 2, "hc_mult": 2, **changes})


def _mistral_large4(sizes: Sizes, changes: dict[str, Any]) -> Any:
    text = _common(sizes)
    # Each fourth layer has no rotary positions, by its default; the last two layers share a selection.
    text["indexer_types"] = ["full"] * (sizes.layers - 1) + ["shared"]
    text["rope_parameters"] = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": sizes.context / 512,
        "original_max_position_embeddings": 512, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0,
    }  # fmt: skip
    vision = {
        "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "patch_size": 4, "image_size": 16,
    }  # fmt: skip
    return transformers.MistralLarge4Config(
        text_config=transformers.MistralLarge4TextConfig(**{**text, **changes}), vision_config=vision
    )


def _dots3_note(sizes: Sizes, changes: dict[str, Any]) -> Any:
    text = _common(sizes)
    text["q_lora_rank"] = sizes.hidden // 2
    text["head_dim"] = sizes.head + sizes.rotary
    # Each fourth layer sees a window; the others select.
    text["layer_types"] = [
        "sliding_attention" if layer % 4 == 2 else "indexed_attention" for layer in range(sizes.layers)
    ]
    text["sliding_window"] = sizes.window
    text["shared_experts_intermediate_size"] = sizes.hidden // 2
    for name in ("num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank", "head_dim"):
        text[f"swa_{name}"] = text[name]
    text["swa_qk_nope_head_dim"] = text["swa_v_head_dim"] = sizes.head
    return transformers.Dots3NoteTextConfig(**{**text, **changes})


_CONFIGURATIONS = {
    "deepseek_v32": _deepseek_v32,
    "glm_moe_dsa": _glm_moe_dsa,
    "axk2": _axk2,
    "hy_v4": _hy_v4,
    "mistral_large4": _mistral_large4,
    "dots3_note": _dots3_note,
}
_CLASSES = {
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "axk2": "AXK2ForCausalLM",
    "hy_v4": "HYV4ForCausalLM",
    # The language model alone has no class of its own.
    "mistral_large4": "MistralLarge4ForConditionalGeneration",
    "dots3_note": "Dots3NoteForCausalLM",
}
