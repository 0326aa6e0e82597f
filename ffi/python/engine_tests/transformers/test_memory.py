"""Memory: what the device holds while decoding follows the slots and not the context, and what a prefill takes."""

from __future__ import annotations

import gc

import pytest
import torch
from forebay.transformers import ForebayCache, models
from harness import FAMILIES, forward, model, stock_cache

SLOTS = 64


def tensor_bytes() -> int:
    """Bytes of all tensors that Python can reach, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        try:
            if issubclass(type(thing), torch.Tensor):
                storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        except (ReferenceError, RuntimeError, NotImplementedError):
            continue
    return sum(storages.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_device_bytes_follow_the_slots(family: str) -> None:
    """Four times the context with the same slots: rows on the device stay, in the total pool they grow fourfold."""
    found = {}
    for context in (256, 1024):
        tokens = models.prompts(1, context + 4, seed=1)
        with ForebayCache(model(family).config, slots=SLOTS, max_tokens=context + 4) as cache:
            for first in range(0, context, 128):
                forward(model(family), tokens[:, first : first + 128], cache)
            for column in range(context, context + 4):
                forward(model(family), tokens[:, column : column + 1], cache)
            memory = cache.memory()
            slabs = sum(cache.forebay.slab(layer).nbytes for layer in range(cache.forebay.shape.layers))
            found[context] = (slabs, memory)
    assert found[256][0] == found[1024][0]
    grown = found[1024][1].dense / found[256][1].dense
    assert 3 < grown < 4.2
    # In whole pages of rows.
    assert found[1024][1].host > 2.5 * found[256][1].host


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_dense_stays_after_a_prefill(family: str) -> None:
    """Tensors that live after prefill and a decode step: fewer bytes than one layer's latents of the context would be,
    beyond index keys and the layers that do not select. The stock cache is the control."""
    context = 2048
    of, tokens = model(family), models.prompts(1, context + 1, seed=2)
    text = of.config.get_text_config()
    row = 4 * (text.kv_lora_rank + text.qk_rope_head_dim)
    left = {}
    for name in ("stock", "forebay"):
        before = tensor_bytes()
        cache = stock_cache(of) if name == "stock" else ForebayCache(of.config, slots=SLOTS, max_tokens=context + 1)
        for first in range(0, context, 256):
            forward(of, tokens[:, first : first + 256], cache)
        forward(of, tokens[:, context:], cache)
        left[name] = tensor_bytes() - before
        if name == "forebay":
            cache.close()
        del cache
    sparse = sum(kind == "indexed_attention" for kind in text.layer_types)
    assert left["stock"] > sparse * context * row
    assert left["forebay"] < left["stock"] - (sparse - 1) * context * row


def test_prefill_peak_is_reported_and_grows_with_the_chunk() -> None:
    """A chunk's expanded keys, values and scores, by the formula of docs/transformers.md; smaller chunks take less."""
    peaks = {}
    of, tokens = model("deepseek_v32"), models.prompts(1, 512, seed=3)
    for chunk in (512, 64):
        with ForebayCache(of.config, ratio=0.2, max_tokens=512) as cache:
            for first in range(0, 512, chunk):
                forward(of, tokens[:, first : first + chunk], cache)
            peaks[chunk] = cache.memory().prefill_peak
    sizes = models.TINY
    key, value = sizes.head + sizes.rotary, sizes.head
    assert peaks == {chunk: sizes.heads * 4 * 512 * (key + value + chunk) for chunk in (512, 64)}
