"""Decoding with a share of the rows equals decoding with all of them, bit by bit, and the stock model's tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from forebay.transformers import ForebayCache, check, models
from harness import DTYPES, FAMILIES, model, some

CONTEXT, TOKENS = 160, 16
BATCHES = some((1, 4), (1, 2, 4, 8))
RATIOS = some((0.1,), (0.1, 0.3, 0.6))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("family", "dtype"), list(itertools.product(FAMILIES, DTYPES)))
def test_logits_equal_the_twins_bit_by_bit(family: str, dtype: str, batch: int) -> None:
    """The prompts of a batch have different lengths, so all but the first are padded on the left."""
    given = check.prompt(batch, CONTEXT, seed=batch)
    stock = check.decode(model(family, dtype), given, TOKENS)
    with ForebayCache(model(family, dtype).config, ratio=1, max_tokens=CONTEXT + TOKENS, batch=batch) as cache:
        twin = check.decode(model(family, dtype), given, TOKENS, cache)
        cache.validate()
    assert twin.miss_ratio == 0
    if dtype == "fp32":
        assert torch.equal(twin.tokens, stock.tokens)
        torch.testing.assert_close(twin.logits, stock.logits, atol=1e-3, rtol=1e-3)
    for ratio in RATIOS:
        with ForebayCache(model(family, dtype).config, ratio=ratio, max_tokens=CONTEXT + TOKENS, batch=batch) as cache:
            found = check.decode(model(family, dtype), given, TOKENS, cache)
            cache.validate()
        assert check.same_bits(found.logits, twin.logits), ratio
        assert found.miss_ratio > 0 or ratio > 0.5


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # A layer attends to the latents of an earlier one, with and without an indexer of its own.
    "shared rows": ("mistral_large4", {"kv_source_layers": [0, 0, 0, 3]}),
    "shared rows and selection": (
        "mistral_large4",
        {"kv_source_layers": [0, 0, 2, 3], "indexer_types": ["full", "shared", "full", "full"]},
    ),
    "one selection for all": ("glm_moe_dsa", {"indexer_types": ["full", "shared", "shared", "shared"]}),
    "no selection shared": ("hy_v4", {"indexer_types": ["full"] * 4}),
    "bias": ("deepseek_v32", {"attention_bias": True}),
    # Latents whose bytes are no multiple of four in bf16.
    "odd rows": ("axk2", {"kv_lora_rank": 33}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_other_configurations_of_a_family(name: str, dtype: str) -> None:
    family, changes = VARIANTS[name]
    of = models.small(family, dtype=DTYPES[dtype], **changes)
    given = check.prompt(2, 96, seed=4)
    stock = check.decode(of, given, TOKENS)
    with ForebayCache(of, ratio=1, max_tokens=112, batch=2) as cache:
        twin = check.decode(of, given, TOKENS, cache)
    with ForebayCache(of, ratio=0.2, max_tokens=112, batch=2) as cache:
        found = check.decode(of, given, TOKENS, cache)
        cache.validate()
    assert check.same_bits(found.logits, twin.logits)
    assert dtype != "fp32" or torch.equal(found.tokens, stock.tokens)


def test_the_comparison_notices_a_bit() -> None:
    one = torch.randn(3, 5)
    other = one.clone()
    assert check.same_bits(one, other)
    other.view(torch.int32)[2, 4] ^= 1
    assert not check.same_bits(one, other)
    # Equal numbers with other bits.
    assert not check.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_weights_make_tokens_vary() -> None:
    """Control of the small models: a changed token of the prompt changes what follows in every family."""
    for family in FAMILIES:
        given = check.prompt(1, CONTEXT, seed=0)
        decoded = check.decode(model(family), given, TOKENS).tokens
        given.tokens[0, 3] = 1 + given.tokens[0, 3] % 255
        changed = check.decode(model(family), given, TOKENS).tokens
        assert len(set(decoded[0].tolist())) > TOKENS // 2, family
        assert not torch.equal(decoded, changed), family
