"""`bench`: the same requests with forebay off and on, by engines with the same KV cache memory in the same run.

Forebay off is the same attention over vLLM's own KV cache: stock vLLM has no sparse attention on a CPU. Each engine is
a process of its own; the two kinds run in turn, and of each kind the fastest counts, because other programs on the
machine only slow an engine down. The time is from the first request to the last token, prefills included.

How many requests fit is counted in vLLM's blocks. The memory of the device is vLLM's `kv_cache_memory_bytes`, and on
a CPU slots are host memory too, so that line says what a GPU would hold; no memory is saved here.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from ..commands import shown
from ..config import footprint
from ..shape import Shape
from .check import DTYPES, config_of, miss_ratio, preempted, small_model
from .engine import Found, Run, start
from .options import VLLM, Options
from .pool import Limits, arguments, sizes

_BLOCK = 64


def run(chosen: argparse.Namespace) -> int:
    """Runs the engines and prints what they did."""
    import torch
    import vllm

    longest = chosen.context + chosen.tokens
    kinds: dict[str, dict[str, Any]] = {"off": {"rows": VLLM}, "on": {"ratio": chosen.ratio}}
    best: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = chosen.model or small_model(Path(folder), chosen.dtype)
        config = config_of(model)
        print(
            f"{chosen.model or 'a small deepseek_v32 with random weights'}, {chosen.dtype}: {chosen.requests} requests "
            f"of {chosen.context:,} + {chosen.tokens} tokens, ratio {chosen.ratio:g}, {shown(chosen.memory)} of KV "
            f"cache memory, {chosen.threads} of {os.cpu_count()} cores, vLLM {vllm.__version__}, "
            f"torch {torch.__version__}"
        )
        from . import models

        prompts = models.prompts([chosen.context] * chosen.requests)
        given = {
            "dtype": DTYPES[chosen.dtype], "max_model_len": longest, "max_num_seqs": chosen.requests,
            "max_num_batched_tokens": 512, "kv_cache_memory_bytes": chosen.memory, "block_size": _BLOCK,
        }  # fmt: skip
        for number in range(chosen.repeats):
            for kind, options in kinds.items():
                found = start(Run(str(model), prompts, chosen.tokens, options, given), threads=chosen.threads)
                print(f"engine {number + 1} of {chosen.repeats}, forebay {kind}: {found.seconds:.1f} s")
                if kind not in best or found.seconds < best[kind].seconds:
                    best[kind] = found
    report(chosen, config, best["off"], best["on"])
    return 0


def report(chosen: argparse.Namespace, config: dict[str, Any], off: Found, on: Found) -> None:
    """Prints the comparison, and what it says in words."""
    longest = chosen.context + chosen.tokens
    held = memory(config, chosen, on.blocks)
    fits = {kind: found.blocks // -(-longest // _BLOCK) for kind, found in (("off", off), ("on", on))}
    rows = [
        ("requests a second", *(f"{chosen.requests / found.seconds:.2f}" for found in (off, on))),
        ("output tokens a second", *(f"{chosen.requests * chosen.tokens / one.seconds:.1f}" for one in (off, on))),
        (f"requests of {longest:,} tokens that fit", f"{fits['off']:,}", f"{fits['on']:,}"),
        ("blocks of vLLM's KV cache", f"{off.blocks:,}", f"{on.blocks:,}"),
        ("bytes that vLLM allocated for it", shown(off.kv_bytes), shown(on.kv_bytes)),
        *((name, "-", shown(count)) for name, count in held.items()),
        ("selected rows fetched", "-", miss_ratio(on)),
        ("requests preempted", f"{preempted(off):,}", f"{preempted(on):,}"),
    ]
    print(f"{'':<34} {'forebay off':>14} {'forebay on':>14}")
    for name, left, right in rows:
        print(f"{name:<34} {left:>14} {right:>14}")
    speed = off.seconds / on.seconds
    print(
        f"With forebay {speed:.2f} times the requests a second, and {fits['on'] / max(1, fits['off']):.1f} times the "
        "requests fit the same KV cache memory."
    )
    if min(fits.values()) >= chosen.requests:
        same = "the same" if off.tokens == on.tokens else "DIFFERENT"
        print(f"Both engines hold all requests at once, and give {same} tokens.")
    else:
        print("Tokens are not compared: what does not fit waits, so the engines form different batches (see `check`).")
    print(
        "On a CPU the slots are host memory too, in addition to the total pool: these are the bytes that a GPU would "
        "hold, and no memory is saved here."
    )
    if chosen.model is None:
        print("Random weights select without locality: a trained model fetches fewer rows.")


def declared(config: dict[str, Any], chosen: argparse.Namespace) -> tuple[Shape, Limits]:
    """What an engine with forebay makes its cache of, as in its worker."""
    size = {"fp32": 4, "bf16": 2}[chosen.dtype]
    longest = chosen.context + chosen.tokens
    shape = Shape(
        layers=config["num_hidden_layers"],
        row_bytes=((config["kv_lora_rank"] + config["qk_rope_head_dim"]) * size, 0),
        top_k=min(config["index_topk"], longest),
        index_key_bytes=config["index_head_dim"] * size,
        page_tokens=_BLOCK,
    )
    return shape, Limits(chosen.requests, longest, 1, _BLOCK, True)


def memory(config: dict[str, Any], chosen: argparse.Namespace, blocks: int) -> dict[str, int]:
    """Bytes of forebay's cache for vLLM's blocks; nothing for a model whose layers share selections, because that part
    of its shape is not read here."""
    if config.get("index_topk_freq", 1) != 1 or config.get("index_topk_pattern"):
        return {}
    shape, limits = declared(config, chosen)
    found = footprint(shape, **arguments(limits, sizes(shape, limits, Options(ratio=chosen.ratio), blocks)))
    slots = found.slots + found.landing + found.scratch + found.padding
    return {
        "slots on the device": slots,
        "index keys on the device": found.index_keys,
        "tables on the device": found.tables + found.host_page_tables,
        "total pool in host memory": found.rows,
    }
