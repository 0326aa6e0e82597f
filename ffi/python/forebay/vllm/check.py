"""`check`: engines answer the same prompts with a share of the rows in slots, and their tokens are compared.

The first engine has forebay off: the same attention, with all rows in vLLM's own KV cache. Every other one must give
its tokens: one with every row in a slot (ratio 1), one for each `--ratio`, and one more of the smallest ratio with so
few blocks that vLLM has to preempt requests. With `--drafts` the engines draft by prompt lookup, and an engine without
forebay and without drafts comes first.

Prompts and answers have different lengths, more requests are sent than run at once, and prompts are read in chunks. So
batches mix requests that prefill and that decode, and shrink from eight requests to one. The last prompt begins as the
first one does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..commands import shown
from .engine import EngineFailed, Found, Run, start
from .options import VLLM

# As in vLLM: bytes of the KV cache memory, most tokens of a request, and tokens of a pass.
_MEMORY = 64 << 20
_LONGEST = 1024
_CHUNK = 128
_BLOCK = 64
# Of a prompt.
_SHORTEST_PROMPT, _LONGEST_PROMPT = 8, 450
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Line:
    """An engine of the table. `options` are the plug-in's."""

    name: str
    options: dict[str, Any]
    arguments: dict[str, Any]


def small_model(folder: Path, dtype: str, seed: int = 0) -> Path:
    """Writes a small model with random weights, in a folder of its own."""
    import torch
    import transformers

    from . import models

    transformers.utils.logging.disable_progress_bar()
    models.save(folder / "model", dtype=getattr(torch, DTYPES[dtype]), seed=seed)
    return folder / "model"


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of different lengths. The last one begins as the first one does."""
    from . import models

    span = _LONGEST_PROMPT - _SHORTEST_PROMPT
    # Long and short ones in turn.
    lengths = [_SHORTEST_PROMPT + (number * 7 + 6) % 12 * span // 11 for number in range(count)]
    made = models.prompts(lengths, seed=seed)
    if count > 1:
        made[-1] = made[0][: 2 * _BLOCK] + made[-1][: _BLOCK // 2]
    return made


def lines(chosen: argparse.Namespace) -> list[Line]:
    """The engines. The first is what the others are compared with."""
    drafting = {}
    if chosen.drafts:
        drafting["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": chosen.drafts, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
        }  # fmt: skip
    made = [Line("forebay off", {"rows": VLLM}, {})]
    if drafting:
        made.append(Line("forebay off, drafts", {"rows": VLLM}, drafting))
    made += [Line(f"ratio {ratio:g}", {"ratio": ratio}, drafting) for ratio in dict.fromkeys((1.0, *chosen.ratio))]
    least = min(chosen.ratio)
    few = {**drafting, "num_gpu_blocks_override": -(-_LONGEST // _BLOCK) + 2}
    return [*made, Line(f"ratio {least:g}, few blocks", {"ratio": least, "validate": True}, few)]


def run(chosen: argparse.Namespace) -> int:
    """Runs the engines and prints a table; status 1 if one of them differs from the first."""
    with tempfile.TemporaryDirectory() as folder:
        model = chosen.model or small_model(Path(folder), chosen.dtype, chosen.seed)
        given = prompts(chosen.requests, chosen.seed)
        counts = [max(1, chosen.tokens * (number % 8 + 1) // 8) for number in range(chosen.requests)]
        named = chosen.model or "a small deepseek_v32 with random weights"
        print(f"{named}, {chosen.dtype}: {chosen.requests} prompts, answers of up to {chosen.tokens} tokens")
        print(f"{'engine':<22} {'tokens':<7} {'misses':>7} {'blocks':>7} {'vLLM cache':>12} {'preempted':>9} {'drafts':>9}")
        began, failed = time.perf_counter(), 0
        first: Found | None = None
        for line in lines(chosen):
            arguments = {
                "dtype": DTYPES[chosen.dtype], "max_model_len": _LONGEST, "max_num_batched_tokens": _CHUNK,
                "kv_cache_memory_bytes": _MEMORY, **line.arguments,
            }  # fmt: skip
            try:
                found = start(Run(str(model), given, counts, line.options, arguments))
            except EngineFailed as error:
                failed += 1
                print(f"{line.name:<22} FAILED")
                print(error, file=sys.stderr)
                continue
            first = first or found
            same = found.tokens == first.tokens
            failed += not same
            print(f"{line.name:<22} {'equal' if same else 'NOT':<7} {figures(found)}")
    seconds = time.perf_counter() - began
    print(f"{'All engines give the same tokens' if failed == 0 else f'{failed} engines differ or failed'}; {seconds:.0f} s")
    return 1 if failed else 0


def figures(found: Found) -> str:
    """What an engine counted."""
    return (
        f"{miss_ratio(found):>7} {found.blocks:>7,} {shown(found.kv_bytes):>12} "
        f"{preempted(found):>9,} {drafts(found):>9}"
    )


def preempted(found: Found) -> int:
    """Requests that vLLM preempted, each as often as it did."""
    return int(found.metrics.get("vllm:num_preemptions", 0))


def miss_ratio(found: Found) -> str:
    """Rows fetched as a share of the distinct rows selected."""
    hits, misses = (found.metrics.get(f"vllm:forebay_row_{name}", 0) for name in ("hits", "misses"))
    return f"{misses / (hits + misses):.1%}" if hits + misses else "-"


def drafts(found: Found) -> str:
    """Accepted and all draft tokens."""
    names = ("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens")
    accepted, drafted = (int(found.metrics.get(name, 0)) for name in names)
    return f"{accepted}/{drafted}" if drafted else "-"
