"""Memory: what the device holds while decoding follows the slots and not the context, and what a prefill takes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from forebay.transformers import ForebayCache, models
from harness import DTYPES, FAMILIES, forward, model, stock_cache
from torch.profiler import ProfilerActivity, profile

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


def profiled_peak(of: Any, tokens: torch.Tensor, cache: ForebayCache) -> int:
    """The most bytes that one pass holds at a time beyond those before it, by torch's profiler."""
    of.set_attn_implementation("forebay")
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        of.model(tokens, past_key_values=cache)
    now = most = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("family", "batch"), [("deepseek_v32", 1), ("deepseek_v32", 2), ("hy_v4", 1)])
def test_prefill_peak_is_what_a_pass_takes(family: str, batch: int, dtype: str) -> None:
    """The formula of docs/transformers.md against the profiler, for whole prompts and for chunks of half their
    length, which take less. The profiler sees all of a pass, so it says somewhat more."""
    of = models.small(family, models.SMALL, dtype=DTYPES[dtype])
    tokens, said = models.prompts(batch, 512, sizes=models.SMALL, seed=3), {}
    for chunk in (512, 256):
        with ForebayCache(of.config, ratio=0.2, max_tokens=512, batch=batch) as cache:
            real = max(profiled_peak(of, part, cache) for part in tokens.split(chunk, dim=1))
            said[chunk] = cache.memory().prefill_peak
        assert 0.95 < real / said[chunk] < 1.25, chunk
    assert said[256] < 0.7 * said[512]
