"""The model families, and what forebay keeps of each layer.

A layer that attends to a selection keeps its rows in forebay: one latent of `kv_lora_rank` values and the rotated key
of `qk_rope_head_dim` values for each token, in the model's dtype. All else stays where transformers keeps it.

    family            layers with an indexer        what differs
    deepseek_v32      all
    glm_moe_dsa       `indexer_types`: "full"       a "shared" layer uses the selection of the layer before it
    axk2              all
    hy_v4             `indexer_types`: "full"       as glm_moe_dsa; attention sinks, which the model's attention adds
    mistral_large4    `indexer_types`: "full"       as glm_moe_dsa. Layers without RoPE have no rotated key: their rows
                                                    are padded. A layer that attends to another layer's latents
                                                    (`kv_source_layers`) keeps a copy of those rows
    dots3_note        type "indexed_attention"      layers with a sliding window, or without a selection, have rows of
                                                    other sizes and stay in transformers' own layers

forebay's rows have one size, that of the widest layer. So a layer without RoPE of mistral_large4 wastes
`qk_rope_head_dim` of its values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers

from ..errors import InvalidArgument, Unsupported

OLDEST = (5, 18)
SPARSE = "indexed_attention"
# Layers of transformers that hold keys and values of every token, or of a window.
_STOCK = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        name: the model type of its configuration.
        text: the model type of the part that generates text, if the model has others.
        shares_selections: whether layers may use another layer's selection.
        shares_rows: whether layers may attend to another layer's latents.
        since: the first transformers that has the model.
    """

    name: str
    text: str
    shares_selections: bool = False
    shares_rows: bool = False
    since: tuple[int, int] = OLDEST


FAMILIES = {
    family.name: family
    for family in (
        Family("deepseek_v32", "deepseek_v32"),
        Family("glm_moe_dsa", "glm_moe_dsa", shares_selections=True),
        Family("axk2", "axk2"),
        Family("hy_v4", "hy_v4", shares_selections=True),
        Family("mistral_large4", "mistral_large4_text", shares_selections=True, shares_rows=True, since=(5, 22)),
        Family("dots3_note", "dots3_note_text", since=(5, 23)),
    )
}
_BY_TEXT = {family.text: family for family in FAMILIES.values()}


@dataclass(frozen=True)
class SparseLayer:
    """A layer whose rows are in forebay.

    Attributes:
        layer: its number in the model.
        source: the layer of the model that computes its rows: itself, or an earlier one.
        selects: whether it has an indexer. If not, it uses the selection of the sparse layer before it.
        latent: values of a row that hold the latent.
        rotated: values of a row that hold the rotated key; 0 without RoPE.
    """

    layer: int
    source: int
    selects: bool
    latent: int
    rotated: int


@dataclass(frozen=True)
class Layout:
    """What forebay keeps of a model.

    Attributes:
        family: the model's family.
        layers: layers of the model.
        sparse: the layers in forebay, in the model's order: forebay's layer n is `sparse[n]`.
        top_k: positions that one query selects in one layer.
        width: values of a row: those of the widest layer.
        index_heads, index_head: heads of an indexer, and values of an index key.
    """

    family: Family
    layers: int
    sparse: tuple[SparseLayer, ...]
    top_k: int
    width: int
    index_heads: int
    index_head: int


def check_version(family: Family | None = None) -> None:
    """Refuses a transformers whose caches do not hold latents, or one without `family`.

    Raises:
        Unsupported: it is older than 5.18, or than the family's model.
    """
    found = transformers.__version__
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise Unsupported(f"transformers {found}: its caches hold expanded keys; {wanted} or newer keeps latents")
    if family is not None and numbers < family.since:
        since = ".".join(map(str, family.since))
        raise Unsupported(f"{family.name}: transformers {found} has no such model; {since} or newer has")


def layout(config: Any) -> Layout:
    """Reads a model's configuration.

    Raises:
        InvalidArgument: it is no configuration.
        Unsupported: a model type, or a kind of layer, that is not known here; or transformers has no such model.
    """
    if not isinstance(config, transformers.PreTrainedConfig):
        raise InvalidArgument("config", type(config).__name__, "a model's config (model.config), or the model")
    text = config.get_text_config(decoder=True)
    family = _BY_TEXT.get(text.model_type)
    if family is None:
        known = ", ".join(FAMILIES)
        raise Unsupported(f"model type {config.model_type!r}: its attention takes no selection; known are {known}")
    check_version(family)
    count = text.num_hidden_layers
    kinds = list(text.layer_types)
    strange = sorted({kind for kind in kinds if kind != SPARSE and kind not in _STOCK})
    if strange or len(kinds) != count:
        raise Unsupported(f"{family.name}: layers of type {', '.join(strange) or len(kinds)!r}: not known here")
    sparse = tuple(_sparse(text, family, layer) for layer in range(count) if kinds[layer] == SPARSE)
    if not sparse:
        raise Unsupported(f"{family.name}: this model has no layer that selects; DynamicCache serves it")
    if not sparse[0].selects:
        raise Unsupported(f"{family.name}: layer {sparse[0].layer} uses a selection that no layer before it makes")
    width = max(one.latent + one.rotated for one in sparse)
    return Layout(family, count, sparse, text.index_topk, width, text.index_n_heads, text.index_head_dim)


def _sparse(text: Any, family: Family, layer: int) -> SparseLayer:
    config = text.per_layer_config[layer]
    selects = not family.shares_selections or text.indexer_types[layer] == "full"
    source, rotated = layer, config.qk_rope_head_dim
    if family.shares_rows:
        source = text.kv_source_layers[layer]
        rotated *= text.no_rope_layers[layer]
    return SparseLayer(layer, source, selects, config.kv_lora_rank, rotated)
