"""The arithmetic of sparse MLA attention on latent rows, in plain torch.

A row is a token's normalized latent and its rotated key, `[kv_lora_rank + rope]`. Queries are multiplied with the key
half of `kv_b_proj` first (weight absorption, DeepSeek-V2, arXiv 2405.04434), so attention reads rows as they are. The
selection is DeepSeek-V3.2's: scores of an index query with every index key, summed over index heads with a weight for
each, and the `top_k` largest that a query may see. Index keys keep the model's type; vLLM's GPU kernels quantize them
to fp8.

Every function works on one request, or on rows that were gathered, and knows nothing of where they come from. So what
is computed is bit for bit the same wherever rows are kept.
"""

from __future__ import annotations

from typing import Any

import torch

# Most queries of a prefill that attend at the same time, and most bytes of their scores.
_PART = 256
_BYTES = 64 << 20


class Projections:
    """The two halves of `kv_b_proj`: `[latent, heads, key values]` and `[latent, heads, values]`."""

    def __init__(self, key: Any, value: Any) -> None:
        self.key, self.value = key, value

    def absorb(self, query: Any, rotated: Any) -> Any:
        """Queries in the space of rows, `[tokens, heads, row]`, of `[tokens, heads, key values]` and the rotated
        part."""
        latent = torch.einsum("thk,lhk->thl", query, self.key)
        return torch.cat([latent, rotated], dim=-1)

    def output(self, latent: Any) -> Any:
        """Attention's output, `[tokens, heads * values]`, of `[tokens, heads, latent]`."""
        return torch.einsum("thl,lhv->thv", latent, self.value).flatten(1)


def parts(queries: int, heads: int, context: int) -> list[slice]:
    """Queries of a prefill in parts whose float32 scores with every row of the context take at most 64 MiB, or of one
    query. The functions here hold up to four copies of them at a time."""
    size = max(1, min(_PART, _BYTES // (4 * heads * max(context, 1))))
    return [slice(first, min(first + size, queries)) for first in range(0, queries, size)]


def index_scores(queries: Any, weights: Any, keys: Any) -> Any:
    """The indexer's scores, float32 `[tokens, keys]`: of queries `[tokens, heads, values]` with a weight for each head,
    `[tokens, heads]`, and keys float32 `[keys, values]`."""
    products = torch.relu(queries.float() @ keys.transpose(0, 1))
    return torch.einsum("ths,th->ts", products, weights.float())


def select(scores: Any, start: int, top_k: int) -> Any:
    """The `top_k` best positions for tokens from position `start` on, int64 `[tokens, k]`, -1 for none. A token sees
    itself and those before it."""
    tokens, keys = scores.shape
    limits = torch.arange(start + 1, start + 1 + tokens)
    hidden = torch.arange(keys) >= limits[:, None]
    best = scores.masked_fill(hidden, -torch.inf).topk(min(top_k, keys), dim=-1).indices
    # Beyond a token's own limit there are only hidden positions.
    return best.masked_fill(torch.arange(best.shape[1]) >= limits[:, None], -1)


def select_all(queries: Any, weights: Any, keys: Any, start: int, top_k: int) -> Any:
    """What a prefill's tokens from position `start` on select; see `index_scores` and `select`."""
    keys = keys.float()
    return torch.cat([
        select(index_scores(queries[part], weights[part], keys), start + part.start, top_k)
        for part in parts(len(queries), queries.shape[1], len(keys))
    ])  # fmt: skip


def attend_all(query: Any, rows: Any, selection: Any, scale: float, latent: int) -> Any:
    """Attention of a prefill's tokens over all rows of the context, of which those that were not selected are masked.

    Args:
        query: `[tokens, heads, row]`.
        rows: `[context, row]`.
        selection: int64 `[tokens, k]`, -1 for none.
        scale: of the scores.
        latent: values of a row that are summed.

    Returns:
        `[tokens, heads, latent]`.
    """
    found = []
    for each in parts(len(query), query.shape[1], len(rows)):
        part, chosen = query[each], selection[each]
        # Positions of -1 go to a column that is cut off.
        seen = torch.zeros((len(part), len(rows) + 1), dtype=torch.bool)
        seen.scatter_(1, torch.where(chosen < 0, len(rows), chosen), True)
        scores = torch.einsum("thr,sr->ths", part, rows).float() * scale
        scores.masked_fill_(~seen[:, None, :-1], -torch.inf)
        weights = scores.softmax(dim=-1).to(rows.dtype)
        found.append(torch.einsum("ths,sl->thl", weights, rows[:, :latent]))
    return torch.cat(found)


def attend(query: Any, rows: Any, valid: Any, scale: float, latent: int) -> Any:
    """Attention of decoding tokens over the rows that each has selected.

    Args:
        query: `[tokens, heads, row]`.
        rows: `[tokens, k, row]`, whatever values where nothing is selected.
        valid: bool `[tokens, k]`: what is selected.
        scale, latent: as in `attend_all`.

    Returns:
        `[tokens, heads, latent]`.
    """
    rows = rows.masked_fill(~valid[:, :, None], 0)
    scores = torch.einsum("thr,tkr->thk", query, rows).float() * scale
    weights = scores.masked_fill(~valid[:, None], -torch.inf).softmax(dim=-1).to(rows.dtype)
    return torch.einsum("thk,tkl->thl", weights, rows[..., :latent])
