"""`bench`: times a decode step at each context, beside the stock model's in the same run.

The model is a small one of its family with random weights (`models.SMALL`: latents and heads of the published sizes).
The stock model is the same model with transformers' own cache and eager attention, which expands every cached latent
at every step. Both read the same prompt in chunks and decode the same tokens. Then all sides decode in turn, a step
each, so that whatever else the machine does meets all of them. The time of a step is the median; with one thread it is
the thread's CPU time. The device bytes are those of slots, tables and index keys with forebay, and of all rows and
index keys without.

`--judge` holds the claims of docs/benchmarks.md: how a step may grow from the shortest context to the longest, and how
much faster it has to be than the stock model's at the longest. Both are ratios of CPU time within one run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import transformers

from . import ATTENTION, ForebayCache, models, register
from .check import DTYPES, miss_ratio
from .stop import stop

_MIB = 1 << 20
CHUNK = 512
"""Tokens of a chunk of the prefill."""
WARM = 2
"""Steps before those that are timed."""
GROWS = 1.3
"""The most that a step at the longest context takes, of one at the shortest (`--judge`)."""
FASTER = 12.0
"""The least that the stock model's step takes, of ours, at the longest context (`--judge`)."""


class Side:
    """A cache of either kind at one context, from its prefill on. `seconds`: of each step so far."""

    def __init__(self, model: Any, cache: Any, context: int, tokens: torch.Tensor) -> None:
        self.model, self.cache, self.tokens, self.read = model, cache, tokens, context
        self.seconds: list[float] = []
        self.attention = ATTENTION if isinstance(cache, ForebayCache) else "eager"
        model.set_attn_implementation(self.attention)
        with torch.inference_mode():
            for first in range(0, context, CHUNK):
                model(tokens[:, first : min(first + CHUNK, context)], past_key_values=cache, logits_to_keep=1)

    def step(self) -> None:
        """Decodes a token of each sequence, and notes the time."""
        self.model.set_attn_implementation(self.attention)
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        with torch.inference_mode():
            token = self.tokens[:, self.read : self.read + 1]
            began = clock()
            self.model(token, past_key_values=self.cache)
            self.seconds.append(clock() - began)
        self.read += 1

    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds[WARM:])

    def device(self) -> int:
        """Bytes on the device."""
        if isinstance(self.cache, ForebayCache):
            return self.cache.memory().device
        names = ("keys", "values", "indexer_keys")
        held = [getattr(layer, name, None) for layer in self.cache.layers for name in names]
        return sum(tensor.nbytes for tensor in held if tensor is not None)


def run(chosen: argparse.Namespace) -> int:
    """Prints a line for each context, and how the step grows from the shortest to the longest."""
    if chosen.judge and (chosen.no_stock or chosen.threads != 1 or len(set(chosen.context)) < 2):
        stop("--judge: it needs two contexts, the stock model, and one thread, whose CPU time is compared")
    torch.set_num_threads(chosen.threads)
    register()
    sizes, contexts = models.SMALL, sorted(set(chosen.context))
    model = models.small(chosen.model, sizes, dtype=DTYPES[chosen.dtype])
    threads = f"{chosen.threads} thread{'s' if chosen.threads > 1 else ''}"
    print(
        f"{chosen.model}, random weights, {sizes.layers} layers, {chosen.dtype}, top-k {sizes.top_k}, "
        f"batch {chosen.batch}, ratio {chosen.ratio}, {threads}; torch {torch.__version__}, "
        f"transformers {transformers.__version__}; median of {chosen.steps} steps"
    )
    ours, stock = {}, {}
    for context in contexts:
        most = context + WARM + chosen.steps
        tokens = models.prompts(chosen.batch, most, sizes=sizes)
        cache = ForebayCache(model, ratio=chosen.ratio, max_tokens=most, batch=chosen.batch)
        ours[context] = Side(model, cache, context, tokens)
        if not chosen.no_stock:
            stock[context] = Side(model, transformers.DynamicCache(config=model.config), context, tokens)
    for _step in range(WARM + chosen.steps):
        for side in (*ours.values(), *stock.values()):
            side.step()
    print(f"{'context':>8} {'forebay':>11} {'stock':>11} {'faster':>7} {'misses':>7} {'on device':>11} {'stock':>11}")
    for context in contexts:
        print(line(context, ours[context], stock.get(context)))
    longest = contexts[-1]
    grown = ours[longest].median() / ours[contexts[0]].median()
    if len(contexts) > 1:
        print(f"A step at {longest:,} tokens takes {grown:.2f} times one at {contexts[0]:,}.")
    return judge(grown, stock[longest].median() / ours[longest].median()) if chosen.judge else 0


def judge(grown: float, faster: float) -> int:
    """Prints the claims that are not met; status 1 if there is one."""
    missed = []
    if grown > GROWS:
        missed.append(f"a step grows {grown:.2f} times, more than {GROWS}")
    if faster < FASTER:
        missed.append(f"a step is {faster:.1f} times faster than stock, less than {FASTER:.0f}")
    print("Missed: " + "; ".join(missed) + "." if missed else "Both targets are met.")
    return 1 if missed else 0


def line(context: int, ours: Side, stock: Side | None) -> str:
    """The line of a context."""
    shown = [f"{context:>8,} {ours.median() * 1e3:>8.1f} ms"]
    if stock is None:
        shown.append(f"{'-':>11} {'-':>7}")
    else:
        shown.append(f"{stock.median() * 1e3:>8.1f} ms {stock.median() / ours.median():>6.1f}x")
    shown.append(f"{miss_ratio(ours.cache):>7.1%} {ours.device() / _MIB:>7.1f} MiB")
    shown.append(f"{'-':>11}" if stock is None else f"{stock.device() / _MIB:>7.1f} MiB")
    return " ".join(shown)
