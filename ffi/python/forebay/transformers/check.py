"""`check`: small models of each family decode with a share of their rows in slots, compared with two other runs.

The *twin* is the same code with every row resident: its logits must be equal bit by bit. *Stock* is the model with
transformers' own cache and eager attention: in fp32 its tokens must be equal. Its logits differ in the last bits,
because it computes over all positions and masks those that were not selected, which changes the order of sums.

The longest prompt has `--context` tokens; the others of a batch are shorter and padded on the left.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import Internal
from . import ForebayCache, models, register

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Prompt:
    """A batch of prompts, padded on the left. `tokens` and `mask` are `[batch, length]`."""

    tokens: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Decoded:
    """What a run gave: `tokens` `[batch, decoded]`, `logits` `[decoded, batch, vocabulary]`."""

    tokens: torch.Tensor
    logits: torch.Tensor
    miss_ratio: float


def prompt(batch: int, length: int, *, seed: int, sizes: models.Sizes = models.TINY) -> Prompt:
    """Prompts of different lengths: each is shorter than the one before by a quarter of the longest, at least 1."""
    tokens = models.prompts(batch, length, sizes=sizes, seed=seed)
    mask = torch.ones_like(tokens)
    for row in range(batch):
        padding = min(row * length // 4, length - 1)
        tokens[row, :padding] = 0
        mask[row, :padding] = 0
    return Prompt(tokens, mask)


def decode(model: Any, given: Prompt, count: int, cache: Any = None, **options: Any) -> Decoded:
    """Decodes `count` tokens greedily. Without a cache it is the stock model."""
    model.set_attn_implementation("eager" if cache is None else "forebay")
    made = model.generate(
        given.tokens,
        attention_mask=given.mask,
        past_key_values=cache,
        max_new_tokens=count,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    ratio = 0.0 if cache is None else miss_ratio(cache)
    return Decoded(made.sequences[:, given.tokens.shape[1] :], torch.stack(made.logits), ratio)


def miss_ratio(cache: Any) -> float:
    """Rows fetched as a share of the distinct rows selected."""
    stats = cache.stats()
    return float(stats.misses / max(1, stats.hits + stats.misses))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit by bit."""
    kind = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return one.shape == other.shape and bool((one.view(kind) == other.view(kind)).all())


def run(chosen: argparse.Namespace) -> int:
    """Runs all combinations and prints a table; status 1 if a comparison fails."""
    torch.set_num_threads(1)
    register()
    everything = "all" in chosen.model
    families = models.FAMILIES if everything else chosen.model
    print(f"{'model':<15} {'type':<5} {'batch':>5} {'ratio':>6}  {'= twin':<8} {'= stock':<8} {'misses':>7}  valid")
    failed = 0
    began = time.perf_counter()
    for family in families:
        if everything and not models.known(family):
            print(f"{family:<15} not in this transformers")
            continue
        for dtype in chosen.dtype:
            model = models.small(family, dtype=DTYPES[dtype], seed=chosen.seed)
            for batch in chosen.batch:
                failed += compare(model, f"{family:<15} {dtype:<5} {batch:>5}", batch, chosen)
    seconds = time.perf_counter() - began
    print(f"{'every run is equal' if failed == 0 else f'{failed} runs failed'}; {seconds:.0f} s")
    return 1 if failed else 0


def compare(model: Any, name: str, batch: int, chosen: argparse.Namespace) -> int:
    """Runs a model at each ratio and prints a line for each; the number of runs that differ."""
    given = prompt(batch, chosen.context, seed=chosen.seed)
    stock = decode(model, given, chosen.tokens)
    exact = model.dtype == torch.float32
    longest = chosen.context + chosen.tokens
    with ForebayCache(model.config, ratio=1.0, max_tokens=longest, batch=batch) as cache:
        twin = decode(model, given, chosen.tokens, cache)
    failed = 0
    for ratio in chosen.ratio:
        with ForebayCache(model.config, ratio=ratio, max_tokens=longest, batch=batch) as cache:
            found = decode(model, given, chosen.tokens, cache)
            sound = valid(cache)
        equal = same_bits(found.logits, twin.logits)
        tokens = torch.equal(found.tokens, stock.tokens)
        failed += not equal or not sound or (exact and not tokens)
        print(
            f"{name} {ratio:>6.3g}  {'yes' if equal else 'NO':<8} "
            f"{('yes' if tokens else 'NO') if exact else '-':<8} {found.miss_ratio:>7.1%}  "
            f"{'yes' if sound else 'NO'}"
        )
    return failed


def valid(cache: ForebayCache) -> bool:
    """Whether every invariant of a cache holds; the broken one goes to standard error."""
    try:
        cache.validate()
    except Internal as error:
        print(error, file=sys.stderr)
        return False
    return True
