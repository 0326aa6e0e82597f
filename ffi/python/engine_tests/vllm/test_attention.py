"""The arithmetic of sparse attention against one token and one head at a time."""

from __future__ import annotations

import pytest
import torch
from forebay.vllm import attention

HEADS, LATENT, WIDTH, VALUES, TOP_K, SCALE = 3, 6, 8, 5, 4, 0.3


def random(*extents: int) -> torch.Tensor:
    return torch.randn(extents, generator=torch.Generator().manual_seed(sum(extents)), dtype=torch.float64)


@pytest.mark.parametrize(("part", "bytes_"), [(256, 1 << 26), (2, 1 << 26), (256, 500), (256, 1)])
@pytest.mark.parametrize(("start", "tokens"), [(0, 9), (7, 5), (30, 1)])
def test_a_prefill_in_parts(
    start: int, tokens: int, part: int, bytes_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token selects among those before it and itself, and attends to what it selected."""
    monkeypatch.setattr(attention, "_PART", part)
    monkeypatch.setattr(attention, "_BYTES", bytes_)
    context = start + tokens
    queries, weights, keys = random(tokens, HEADS, VALUES), random(tokens, HEADS).abs(), random(context, VALUES)
    chosen = attention.select_all(queries, weights, keys, start, TOP_K)
    query, rows = random(tokens, HEADS, WIDTH), random(context, WIDTH)
    found = attention.attend_all(query, rows, chosen, SCALE, LATENT)
    for token in range(tokens):
        scores = {}
        for position in range(start + token + 1):
            heads = (max(0.0, float(queries[token, head] @ keys[position])) for head in range(HEADS))
            scores[position] = sum(float(weights[token, head]) * one for head, one in enumerate(heads))
        kept = chosen[token][chosen[token] >= 0].tolist()
        assert len(set(kept)) == len(kept) == min(TOP_K, len(scores))
        assert set(kept) <= set(scores)
        left = [scores[position] for position in scores if position not in kept]
        assert min(scores[position] for position in kept) >= max(left, default=0.0) - 1e-5
        for head in range(HEADS):
            exponents = torch.tensor([float(query[token, head] @ rows[position]) * SCALE for position in kept])
            expected = (exponents.softmax(0)[:, None] * rows[kept, :LATENT]).sum(0)
            assert torch.allclose(found[token, head], expected, atol=1e-5)


def test_a_decode_reads_what_is_valid() -> None:
    """As a prefill over the same rows; what is not valid may have any value."""
    query, rows = random(2, HEADS, WIDTH), random(9, WIDTH)
    chosen = torch.tensor([[3, 8, 1], [5, -1, -1]])
    gathered = rows[chosen.clamp(min=0)]
    gathered[1, 1:] = torch.nan
    found = attention.attend(query, gathered, chosen >= 0, SCALE, LATENT)
    assert torch.allclose(found, attention.attend_all(query, rows, chosen, SCALE, LATENT), atol=1e-6)


@pytest.mark.parametrize(("queries", "heads", "context"), [(1, 1, 1), (256, 64, 163_840), (700, 8, 1024), (5, 1, 0)])
def test_parts_cover_and_are_bounded(queries: int, heads: int, context: int) -> None:
    found = attention.parts(queries, heads, context)
    assert [at for part in found for at in range(part.start, part.stop)] == list(range(queries))
    most = max(part.stop - part.start for part in found)
    assert most == 1 or 4 * most * heads * context <= 64 << 20
