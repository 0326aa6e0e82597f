"""The attention that transformers calls under the name "forebay".

In a decode pass of a `ForebayCache` it attends to the selected rows only: it resolves the selection, expands the
latents at these slots as the model does (`module.expand_kv`), and calls the model's own attention on them. In a
prefill, in a layer without a selection, and in a model without a `ForebayCache`, it does what the model does by itself:
it masks what is not selected and calls the model's own attention on all keys. Using the model's own function keeps what
families add to it: hy_v4's attention sinks, for example.

transformers passes no cache to attention. The cache whose rows came last in this thread is the one that is meant. To
keep a pass that ended early from lending its cache to another model, the mask, which most passes make first, forgets
it. A pass with a mask of the caller's makes none, so keys of a whole context that the cache does not expect are taken
for another pass's.

The weights of attention are not returned, and a model that asks for them is refused: those of a decode pass belong to
the selected positions.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any, Callable

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from ..errors import Unsupported
from .batch import Batch, Pass

ATTENTION = "forebay"
# Positions of a prompt whose selections say which rows the first step is likely to need.
WARM_UP = 8
_EAGER = "eager_attention_forward"


class _Current(threading.local):
    # Weak: the memory goes with the cache.
    batch: weakref.ref[Batch] | None = None


_current = _Current()


def enter(batch: Batch) -> None:
    """Says whose rows came last in this thread."""
    _current.batch = weakref.ref(batch)


def leave(only: Batch | None = None) -> None:
    """Forgets it; or forgets `only`, if its rows came last."""
    if only is None or _came_last() is only:
        _current.batch = None


def _came_last() -> Batch | None:
    return None if _current.batch is None else _current.batch()


def mask(*args: Any, **kwargs: Any) -> Any:
    """The mask of a pass: additive, `[batch, 1, tokens, context]`. The indexer needs it even where it masks nothing."""
    leave()
    return eager_mask(*args, **kwargs)


def register_names() -> None:
    """Makes "forebay" known to transformers as an attention implementation."""
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, mask)


def attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    indices: Any = None,
    **how: Any,
) -> tuple[Any, None]:
    """Attention, as transformers calls it.

    Args:
        module: the layer's attention.
        query: `[batch, heads, tokens, values]`.
        key, value: expanded, `[batch, heads, keys, values]`: of the context, or in a decode pass of the new tokens.
        attention_mask: `[batch, 1, tokens, context]`, additive, or boolean with True where a query attends.
        indices: int32 `[batch, tokens, k]`, positions that the indexer selects; None in a layer without a selection.
        how: scaling, dropout and what else the model passes, for its own attention.

    Returns:
        `[batch, tokens, heads, values]`, and no weights.

    Raises:
        Unsupported: the weights of attention are asked for.
        InvalidState: another layer's turn, or another model's rows; see `Batch.attending`.
    """
    batch = _came_last()
    if how.get("output_attentions") or getattr(module.config, "output_attentions", False):
        why = "output_attentions: forebay's attention returns no weights; use attn_implementation='eager' for them"
        if batch is not None:
            batch.give_up(why)
        raise Unsupported(why)
    number = None if batch is None or indices is None else batch.number(module.layer_idx)
    keys = int(key.shape[2])
    if batch is not None and number is not None and keys == int(attention_mask.shape[-1]):
        if not batch.expects(number, int(query.shape[2]), keys):
            # Not this cache's pass: the caller made the mask, so none forgot the cache.
            leave()
            batch = None
    if batch is None or number is None:
        return _dense(module, query, key, value, attention_mask, indices, how), None
    passing = batch.attending(module, number, int(query.shape[2]), keys)
    try:
        if passing.step is not None:
            found = _sparse(batch, passing, number, module, query, attention_mask, indices, how)
        else:
            batch.prefill_peak = max(batch.prefill_peak, _prefill_bytes(batch, module, query, key, value))
            found = _dense(module, query, key, value, attention_mask, indices, how)
            last = slice(-WARM_UP, None)
            batch.warm_up(number, _selected(attention_mask[:, :, last], indices[:, last])[0])
    except BaseException:
        batch.give_up(f"the attention of layer {module.layer_idx} failed")
        raise
    if batch.attended(passing, number):
        leave()
    return found, None


def _prefill_bytes(batch: Batch, module: Any, query: Any, key: Any, value: Any) -> int:
    """What a layer takes of a prefill at its worst moment, by what the models' code keeps at a time.

    Keys and values (a view of the tensor that they are expanded to), the queries twice and the mask twice live
    throughout. At the worst moment of attention the softmax has its float32 input and result, beside the scores if
    these are of another dtype; attention with sinks has the scores four times. At the indexer's, scores of all its
    heads live twice in float32, or once beside the index keys, which a batch of several rows copies for every query;
    its queries live three times.
    """
    count, heads, tokens, _ = query.shape
    size, context, layout = query.element_size(), int(key.shape[2]), batch.layout
    pairs = count * tokens * context
    value_bytes = 4 * size if hasattr(module, "sinks") else 8 + (0 if size == 4 else size)
    scores = pairs * heads * value_bytes
    copied = layout.index_head if count > 1 else 0
    indexer = 4 * pairs * max(2 * layout.index_heads, layout.index_heads + copied)
    indexer += 4 * count * tokens * 3 * layout.index_heads * layout.index_head
    throughout = key.nbytes + value.untyped_storage().nbytes() + 2 * query.nbytes + 2 * pairs * size
    return int(throughout + max(scores, indexer))


def _sparse(
    batch: Batch,
    passing: Pass,
    number: int,
    module: Any,
    query: Any,
    attention_mask: Any,
    indices: Any,
    how: dict[str, Any],
) -> Any:
    """Attention over the selected rows: every query token is a batch row of its own, with its own keys."""
    one = batch.layout.sparse[number]
    count, heads, tokens, values = query.shape
    width = int(indices.shape[-1])
    positions, allowed = _selected(attention_mask, indices)
    allowed = _additive(allowed, query.dtype)
    rows = batch.select(passing, number, positions, width)
    latent, rotated = rows[..., : one.latent], rows[..., one.latent : one.latent + one.rotated]
    key, value = module.expand_kv(latent, rotated)
    alone = query.transpose(1, 2).reshape(count * tokens, heads, 1, values)
    found, _ = _eager(module)(module, alone, key, value, allowed.reshape(count * tokens, 1, 1, width), **how)
    return found.reshape(count, tokens, heads, -1)


def _selected(attention_mask: Any, indices: Any) -> tuple[Any, Any]:
    """The selected positions, -1 where the mask forbids one: padding, or fewer tokens than k. And the mask there."""
    allowed = attention_mask[:, 0].expand(indices.shape[0], -1, -1).gather(-1, indices.long())
    forbidden = ~allowed if allowed.dtype == torch.bool else allowed <= torch.finfo(allowed.dtype).min
    return indices.masked_fill(forbidden, -1), allowed


def _additive(attention_mask: Any, dtype: Any) -> Any:
    """A mask that the models' own attention adds to the scores: it would add True as 1."""
    if attention_mask is None or attention_mask.dtype != torch.bool:
        return attention_mask
    nothing = torch.zeros_like(attention_mask, dtype=dtype)
    return nothing.masked_fill(~attention_mask, torch.finfo(dtype).min)


def _dense(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, indices: Any, how: dict[str, Any]
) -> Any:
    """Attention over all keys, with those masked that are not selected, as the models do it by themselves."""
    if indices is not None:
        shape = (query.shape[0], query.shape[2], key.shape[2])
        index_mask = indices.new_ones(shape, dtype=torch.bool).scatter(-1, indices.long(), False).unsqueeze(1)
        if attention_mask.dtype == torch.bool:
            attention_mask = attention_mask & ~index_mask
        else:
            attention_mask = attention_mask.masked_fill(index_mask, torch.finfo(query.dtype).min)
    attention_mask = _additive(attention_mask, query.dtype)
    found, _ = _eager(module)(module, query, key, value, attention_mask, **how)
    return found


def _eager(module: Any) -> Callable[..., tuple[Any, Any]]:
    """The model's own attention, of the file that has its code."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules.get(kind.__module__), _EAGER, None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    raise Unsupported(f"{type(module).__name__}: its file has no {_EAGER}, which forebay calls")
