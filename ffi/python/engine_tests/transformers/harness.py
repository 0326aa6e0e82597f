"""Models, prompts and runs of the tests with transformers."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import transformers
from forebay.transformers import ForebayCache, models, register

QUICK = bool(os.environ.get("FOREBAY_QUICK"))
FAMILIES = models.FAMILIES
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_T = TypeVar("_T")


def some(quick: Sequence[_T], all_of_them: Sequence[_T]) -> Sequence[_T]:
    """The first with FOREBAY_QUICK, else the second."""
    return quick if QUICK else all_of_them


@functools.lru_cache(maxsize=4)
def model(family: str, dtype: str = "fp32", seed: int = 0, **sizes: int) -> Any:
    """A small model of other `sizes` than `models.TINY`. Tests share it: they set its attention before each use, and
    change nothing else."""
    register()
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


def resident_bytes() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
