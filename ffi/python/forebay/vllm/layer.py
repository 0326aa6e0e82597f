"""The layer that takes the place of vLLM's `MultiHeadLatentAttentionWrapper` in models with sparse attention.

vLLM's own layer builds an `MLAAttention`, which asks the platform for a sparse attention backend: there is none on a
CPU. This one runs the same projections, normalizations and rotations, by the modules that the model's code has built
and loaded, then the indexer's arithmetic in the model's type and attention over a `Store`. Layers of other models are
vLLM's.

vLLM sees two things of it: a `ForebayAttention` in the model's forward context, which says what KV cache the layer
needs, and metadata of the batch, from `ForebayMetadataBuilder`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.attention.mla_attention import split_kv_b_proj
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadata, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from ..errors import Unsupported
from . import attention
from .batch import Batch, BatchRow, Store
from .options import FOREBAY, Options

# What the layers of one model share is found here among the model's layers, see `Model`.
NAME = "forebay.attention"


@dataclass
class Metadata(AttentionMetadata):
    """What vLLM says of a pass."""

    # Numbers of the requests' first tokens in the flat list, and the end of the last.
    starts: Any
    # Tokens of each request after the pass.
    ends: Any
    # Of vLLM's KV cache: each request's blocks, and each token's place.
    block_table: Any
    slot_mapping: Any


class ForebayMetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Makes the metadata of a pass."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """See vLLM."""
        given = common_attn_metadata
        return Metadata(
            given.query_start_loc_cpu, given.seq_lens, given.block_table_tensor, given.slot_mapping
        )


class ForebayBackend(AttentionBackend):
    """Tells vLLM how to make the metadata, and the extents of its own cache's tensors."""

    @staticmethod
    def get_name() -> str:
        """See vLLM."""
        return "FOREBAY"

    @staticmethod
    def get_impl_cls() -> Any:
        """See vLLM. The layer attends by itself."""
        raise NotImplementedError("forebay's layer attends by itself")

    @staticmethod
    def get_builder_cls() -> type[ForebayMetadataBuilder]:
        """See vLLM."""
        return ForebayMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        """See vLLM."""
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        """See vLLM."""
        return True


class Model:
    """What the layers of a model share.

    Attributes:
        options: of the plug-in.
        layers: the attention layers, in order.
        store: where rows are; None until vLLM has made its KV cache.
        runner: vLLM's model runner, which knows the batch's requests.
    """

    def __init__(self) -> None:
        self.options = Options.read()
        self.layers: list[ForebayAttention] = []
        self.store: Store | None = None
        self.runner: Any = None
        self.query_rows = 1
        # What each prefilling request selected in the last layer that selects.
        self.selections: dict[str, Any] = {}

    def begin(self, metadata: Metadata) -> Batch:
        """Begins a pass: which requests it has."""
        assert self.store is not None
        held = self.runner.input_batch
        starts, ends = metadata.starts.tolist(), metadata.ends.tolist()
        rows = []
        for number, (first, stop) in enumerate(zip(starts[:-1], starts[1:])):
            start = int(ends[number]) - (stop - first)
            id = held.req_ids[number]
            prompt = self.store.prompt(id) or int(held.num_prompt_tokens[number])
            rows.append(BatchRow(id, number, first, stop - first, start, prompt))
        self.selections.clear()
        batch = Batch(rows, self.query_rows)
        self.store.begin(batch)
        return batch


class ForebayAttention(torch.nn.Module, AttentionLayerBase):
    """A layer as vLLM's cache manager sees it."""

    def __init__(self, model: Model, number: int, width: int, keys: int, leads: bool) -> None:
        super().__init__()
        self.model, self.number, self.width, self.key_values, self.leads = model, number, width, keys, leads
        self.kv_cache = torch.tensor([])
        self.batch: Batch | None = None
        self.metadata: Metadata | None = None

    def bind_kv_cache(self, kv_cache: Any) -> None:
        """See vLLM: `[blocks, 1, tokens of a block, values]`."""
        self.kv_cache = kv_cache.squeeze(1)

    def get_attn_backend(self) -> type[ForebayBackend]:
        """See vLLM."""
        return ForebayBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> MLAAttentionSpec | None:
        """What vLLM allocates. For rows in forebay's pools that is one byte for each token of the first layer, so that
        vLLM counts blocks, and nothing for the others.
        """
        if self.model.options.rows == FOREBAY:
            return None if self.number else counting_spec(vllm_config)
        values, block = self.width + self.key_values, vllm_config.cache_config.block_size
        dtype = vllm_config.model_config.dtype
        return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=values, dtype=dtype)


def counting_spec(vllm_config: Any) -> MLAAttentionSpec:
    """One byte for each token: what vLLM needs to count blocks."""
    block = vllm_config.cache_config.block_size
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.uint8)


def layers_of(vllm_config: Any) -> list[ForebayAttention]:
    """forebay's layers of a model, in order; none for a model without sparse attention."""
    held = vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in held if isinstance(layer, ForebayAttention)]


class ForebayMLA(MultiHeadLatentAttentionWrapper):
    """An MLA layer over a `Store`, where the model selects; otherwise vLLM's."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        mla_modules: Any,
        cache_config: Any = None,
        quant_config: Any = None,
        prefix: str = "",
        skip_topk: bool = False,
        **others: Any,
    ) -> None:
        sparse = bool(mla_modules.is_sparse)
        if not sparse:
            super().__init__(
                hidden_size, num_heads, scale, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, q_lora_rank,
                kv_lora_rank, mla_modules, cache_config, quant_config, prefix, skip_topk, **others,
            )  # fmt: skip
            self.sparse = False
            return
        # Not that of vLLM's layer, which would build its attention.
        torch.nn.Module.__init__(self)
        if mla_modules.g_proj is not None or q_lora_rank is None:
            raise Unsupported(f"{prefix}: this kind of MLA layer; forebay knows DeepSeek-V3.2's")
        self.sparse = True
        self.num_heads, self.scale, self.q_rank, self.rank = num_heads, scale, q_lora_rank, kv_lora_rank
        self.nope, self.rope, self.values = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        for name in ("fused_qkv_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj", "o_proj"):
            setattr(self, name, getattr(mla_modules, name))
        config = get_current_vllm_config().model_config
        self.top_k = min(config.hf_text_config.index_topk, config.max_model_len)
        self.rotary_emb, self.indexer = mla_modules.rotary_emb, mla_modules.indexer
        self.index_rotary_emb = mla_modules.indexer_rotary_emb
        # Attention reads its weights, so vLLM must not pack them.
        self.kv_b_proj._cpu_skip_gemm_dispatch = True
        self.projections: attention.Projections | None = None
        self.dtype = torch.get_default_dtype()
        self.attention = self._join(prefix, leads=not skip_topk)

    def _join(self, prefix: str, leads: bool) -> ForebayAttention:
        """Takes its place among the model's layers."""
        config = get_current_vllm_config()
        held = config.compilation_config.static_forward_context
        before = layers_of(config)
        model = before[0].model if before else Model()
        keys = 0
        if self.indexer is not None:
            # vLLM's cache of index keys: the store keeps them.
            held.pop(self.indexer.k_cache.prefix, None)
            keys = self.indexer.head_dim
        made = ForebayAttention(model, len(before), self.rank + self.rope, keys if leads else 0, leads)
        name = f"{prefix}.attn"
        if name in held:
            raise ValueError(f"Duplicate layer name: {name}")
        held[name] = made
        made.name = name
        model.layers.append(made)
        drafts = config.speculative_config
        model.query_rows = 1 + (drafts.num_speculative_tokens if drafts is not None else 0)
        return made

    def forward(self, positions: Any, hidden_states: Any, llama_4_scaling: Any = None) -> Any:
        """See vLLM: `[tokens, hidden]` to the same."""
        if not self.sparse:
            return super().forward(positions, hidden_states, llama_4_scaling)
        compressed, latent = self.fused_qkv_a_proj(hidden_states)[0].split(
            [self.q_rank, self.rank + self.rope], dim=-1
        )
        compressed = self.q_a_layernorm(compressed)
        row, rotated = latent.split([self.rank, self.rope], dim=-1)
        row, rotated = self.kv_a_layernorm(row), rotated.unsqueeze(1)
        query = self.q_b_proj(compressed)[0].view(-1, self.num_heads, self.nope + self.rope)
        plain, turned = query.split([self.nope, self.rope], dim=-1)
        turned, rotated = self.rotary_emb(positions, turned.contiguous(), rotated)
        if llama_4_scaling is not None:
            plain, turned = plain * llama_4_scaling, turned * llama_4_scaling
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            # vLLM measures its memory.
            found = hidden_states.new_zeros((len(hidden_states), self.num_heads * self.values))
            return self.o_proj(found)[0]
        absorbed = self._projections().absorb(plain, turned)
        index = self._index(hidden_states, compressed, positions)
        rows = torch.cat([row, rotated.squeeze(1)], dim=-1)
        latent = self._attend(self._metadata(metadata), absorbed, rows, index)
        return self.o_proj(self._projections().output(latent))[0]

    def _projections(self) -> attention.Projections:
        """The halves of `kv_b_proj`, once its weights are loaded."""
        if self.projections is None:
            sizes = (self.rank, self.num_heads, self.nope, self.values)
            self.projections = attention.Projections(*split_kv_b_proj(self.kv_b_proj, self.dtype, *sizes))
        return self.projections

    def _metadata(self, metadata: Any) -> Metadata:
        first = self.attention.model.layers[0]
        found = metadata[first.name] if isinstance(metadata, dict) else metadata
        if not isinstance(found, Metadata):
            raise TypeError(f"{type(found).__name__} in place of forebay's metadata")
        return found

    def _index(self, hidden: Any, compressed: Any, positions: Any) -> tuple[Any, Any, Any] | None:
        """Index queries, their weights and index keys, as in DeepSeek-V3.2's indexer without its quantization."""
        if not self.attention.leads:
            return None
        of = self.indexer
        queries = of.wq_b(compressed)[0].view(-1, of.n_head, of.head_dim)
        both = of.wk_weights_proj(hidden)[0]
        keys, weights = of.k_norm(both[:, : of.head_dim]), both[:, of.head_dim :]
        turned, key = self.index_rotary_emb(
            positions, queries[..., : of.rope_dim].contiguous(), keys[:, None, : of.rope_dim].contiguous()
        )
        turned, key = turned.reshape(-1, of.n_head, of.rope_dim), key.reshape(-1, of.rope_dim)
        queries = torch.cat([turned, queries[..., of.rope_dim :]], dim=-1)
        keys = torch.cat([key, keys[:, of.rope_dim :]], dim=-1).to(hidden.dtype)
        return queries, weights * (of.softmax_scale * of.n_head_scale), keys

    def _attend(self, metadata: Metadata, query: Any, rows: Any, index: Any) -> Any:
        """Attention's output, `[tokens, heads, latent]`, of absorbed queries and new rows."""
        own, model = self.attention, self.attention.model
        first = model.layers[0]
        if own.number == 0:
            own.metadata = metadata
            first.batch = model.begin(metadata)
        store, batch = model.store, first.batch
        assert store is not None and batch is not None
        tokens = int(metadata.starts[-1])
        store.write(own.number, rows[:tokens], None if index is None else index[2][:tokens])
        found = query.new_zeros((len(query), self.num_heads, self.rank))
        for row in batch.prefills:
            self._prefill(store, row, query, index, found)
        if batch.decodes:
            self._decode(store, batch, query, index, found)
        store.attended(own.number)
        return found

    def _prefill(self, store: Store, row: BatchRow, query: Any, index: Any, found: Any) -> None:
        own, part = self.attention, slice(row.first, row.first + row.width)
        if index is not None:
            keys = store.keys(own.number, row)
            chosen = attention.select_all(index[0][part], index[1][part], keys, row.start, self.top_k)
            own.model.selections[row.id] = chosen
            store.selected(own.number, row, chosen)
        chosen = own.model.selections[row.id]
        context = store.context(own.number, row)
        found[part] = attention.attend_all(query[part], context, chosen, self.scale, self.rank)

    def _decode(self, store: Store, batch: Batch, query: Any, index: Any, found: Any) -> None:
        own, at, selection = self.attention, batch.at, None
        if index is not None:
            selection = torch.full((*at.shape, self.top_k), -1)
            for number, row in enumerate(batch.decodes):
                part = slice(row.first, row.first + row.width)
                keys = store.keys(own.number, row)
                chosen = attention.select_all(index[0][part], index[1][part], keys, row.start, self.top_k)
                selection[number, : row.width, : chosen.shape[1]] = chosen
        rows, valid = store.gather(own.number, selection)
        used = batch.used
        found[at[used]] = attention.attend(query[at[used]], rows[used], valid[used], self.scale, self.rank)


def register() -> None:
    """Makes vLLM build `ForebayMLA`; idempotent."""
    from vllm.model_executor.custom_op import op_registry_oot

    name = MultiHeadLatentAttentionWrapper.__name__
    if op_registry_oot.get(name) is not ForebayMLA:
        PluggableLayer.register_oot(ForebayMLA, name=name)
