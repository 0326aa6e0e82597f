"""Models, prompts and runs of the tests with transformers."""

from __future__ import annotations

import functools
import gc
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
import torch
import transformers
from forebay.transformers import ForebayCache, models, register

QUICK = bool(os.environ.get("FOREBAY_QUICK"))
# One family for each kind of layer: plain; shared selections and sinks; no RoPE and shared rows; a window.
KINDS = ("deepseek_v32", "hy_v4", "mistral_large4", "dots3_note")
FAMILIES = KINDS if QUICK else models.FAMILIES
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_T = TypeVar("_T")

register()


def some(quick: Sequence[_T], all_of_them: Sequence[_T]) -> Sequence[_T]:
    """The first with FOREBAY_QUICK, else the second."""
    return quick if QUICK else all_of_them


@functools.lru_cache(maxsize=4)
def model(family: str, dtype: str = "fp32", seed: int = 0, **sizes: int) -> Any:
    """A small model of other `sizes` than `models.TINY`. Tests share it: they set its attention before each use, and
    change nothing else."""
    return models.small(family, models.Sizes(**sizes), dtype=DTYPES[dtype], seed=seed)


@contextmanager
def attention(of: Any, kind: str) -> Iterator[None]:
    """Sets a model's attention and puts the old one back."""
    before = of.config._attn_implementation
    of.set_attn_implementation(kind)
    try:
        yield
    finally:
        of.set_attn_implementation(before)


def forward(of: Any, tokens: torch.Tensor, cache: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits `[batch, tokens, vocabulary]` of one forward pass over `tokens`."""
    kind = "forebay" if isinstance(cache, ForebayCache) else "eager"
    with attention(of, kind), torch.inference_mode():
        return of(tokens, past_key_values=cache, attention_mask=mask, use_cache=True).logits


def stock_cache(of: Any) -> Any:
    """transformers' own cache for a model."""
    return transformers.DynamicCache(config=of.config)


def save(family: str, folder: Path) -> Any:
    """Writes a small model and a tokenizer of 256 words, `w0` to `w255`; the tokenizer."""
    model(family).save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{word}": word for word in range(256)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    tokenizer.save_pretrained(folder)
    return tokenizer


def objects() -> dict[str, int]:
    """Live objects of forebay's classes, by class: caches, batches, requests, handles."""
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())
    return dict(Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("forebay")))


def resident_bytes() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
