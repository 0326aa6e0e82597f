"""`bench`: times a decode step at each context, beside the stock model's in the same run.

The model is a small one of its family with random weights (`models.SMALL`: latents and heads of the published sizes).
The stock model is the same model with transformers' own cache and eager attention, which expands every cached latent
at every step. Both read the same prompt in chunks and decode the same tokens. The time of a step is the median; with
one thread it is the thread's CPU time, so that other programs on the machine do not count. The device bytes are those
of slots, tables and index keys with forebay, and of all rows and index keys without.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers

from . import ATTENTION, ForebayCache, models, register
from .check import DTYPES, miss_ratio

_MIB = 1 << 20
CHUNK = 512
"""Tokens of a chunk of the prefill."""
WARM = 2
"""Steps before those that are timed."""


class Timed(NamedTuple):
    """A run: seconds of a step, bytes on the device while it decodes, and the logits of its last step."""

    seconds: float
    device: int
    logits: torch.Tensor


def timed(model: Any, cache: Any, tokens: torch.Tensor, steps: int, device: Callable[[], int]) -> Timed:
    """Reads `tokens` without their last `WARM + steps` columns in chunks, and then these, one by one."""
    read = tokens.shape[1] - WARM - steps
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    with torch.inference_mode():
        for first in range(0, read, CHUNK):
            model(tokens[:, first : min(first + CHUNK, read)], past_key_values=cache, logits_to_keep=1)
        took = []
        for column in range(read, tokens.shape[1]):
            began = clock()
            logits = model(tokens[:, column : column + 1], past_key_values=cache).logits
            took.append(clock() - began)
    return Timed(statistics.median(took[WARM:]), device(), logits[:, -1])


def stock_bytes(cache: Any) -> int:
    """Bytes of the tensors of a cache of transformers."""
    names = ("keys", "values", "indexer_keys")
    held = [getattr(layer, name, None) for layer in cache.layers for name in names]
    return sum(tensor.nbytes for tensor in held if tensor is not None)


def run(chosen: argparse.Namespace) -> int:
    """Prints a line for each context, and how the step grows from the shortest to the longest."""
    torch.set_num_threads(chosen.threads)
    register()
    sizes = models.SMALL
    model = models.small(chosen.model, sizes, dtype=DTYPES[chosen.dtype])
    threads = f"{chosen.threads} thread{'s' if chosen.threads > 1 else ''}"
    print(
        f"{chosen.model}, random weights, {sizes.layers} layers, {chosen.dtype}, top-k {sizes.top_k}, "
        f"batch {chosen.batch}, ratio {chosen.ratio}, {threads}; torch {torch.__version__}, "
        f"transformers {transformers.__version__}; median of {chosen.steps} steps"
    )
    print(f"{'context':>8} {'forebay':>11} {'stock':>11} {'faster':>7} {'misses':>7} {'on device':>11} {'stock':>11}")
    found = [line(model, sizes, context, chosen) for context in sorted(chosen.context)]
    if len(found) > 1:
        contexts = sorted(chosen.context)
        grown = found[-1] / found[0]
        print(f"A step at {contexts[-1]:,} tokens takes {grown:.2f} times one at {contexts[0]:,}.")
    return 0


def line(model: Any, sizes: models.Sizes, context: int, chosen: argparse.Namespace) -> float:
    """Times both at one context and prints the line; seconds of forebay's step."""
    tokens = models.prompts(chosen.batch, context + WARM + chosen.steps, sizes=sizes)
    model.set_attn_implementation(ATTENTION)
    with ForebayCache(model.config, ratio=chosen.ratio, max_tokens=tokens.shape[1], batch=chosen.batch) as cache:
        ours = timed(model, cache, tokens, chosen.steps, lambda: cache.memory().device)
        misses = miss_ratio(cache)
    shown = f"{context:>8,} {ours.seconds * 1e3:>8.1f} ms"
    if chosen.no_stock:
        print(f"{shown} {'-':>11} {'-':>7} {misses:>7.1%} {ours.device / _MIB:>7.1f} MiB {'-':>11}")
        return ours.seconds
    model.set_attn_implementation("eager")
    stock = transformers.DynamicCache(config=model.config)
    theirs = timed(model, stock, tokens, chosen.steps, lambda: stock_bytes(stock))
    print(
        f"{shown} {theirs.seconds * 1e3:>8.1f} ms {theirs.seconds / ours.seconds:>6.1f}x {misses:>7.1%} "
        f"{ours.device / _MIB:>7.1f} MiB {theirs.device / _MIB:>7.1f} MiB"
    )
    return ours.seconds
