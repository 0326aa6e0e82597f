"""`check`: engines answer the same prompts with a share of the rows in slots, and their tokens are compared.

The first engine has forebay off: the same attention, with all rows in vLLM's own KV cache. An engine with every row in
a slot (ratio 1) and one for each `--ratio` must give its tokens. Then two engines have so few blocks that vLLM has to
preempt requests, with ratio 1 and with the smallest `--ratio`: the second must give the tokens of the first.

Each is compared with an engine that forms the same batches. In other batches vLLM's matrix products differ in the last
bits, and of two nearly equal tokens or positions another one may be chosen, with forebay or without. So a preempted run
is not compared with one that is not.

Prompts and answers have different lengths, more requests are sent than run at once, and prompts are read in chunks. So
batches mix requests that prefill and that decode, and shrink from eight requests to one. The last prompt begins as the
first one does.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..commands import shown
from ..errors import BadFormat, Unsupported
from .engine import EngineFailed, Found, Run, start
from .options import MODELS, VLLM

# As in vLLM: bytes of the KV cache memory, tokens of a pass, and tokens of a block.
_MEMORY = 64 << 20
_CHUNK = 128
_BLOCK = 64
# Tokens of a prompt.
_SHORTEST, _LONGEST = 8, 300
HEAD = (
    f"{'engine':<22} {'tokens':<7} {'misses':>7} {'blocks':>7} {'vLLM cache':>12} {'preempted':>9} "
    f"{'resumed':>7} {'prefix':>7} {'drafts':>9}"
)
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Line:
    """An engine of the table. `options` are the plug-in's; the tokens are compared with those of `against`."""

    name: str
    against: str
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


def config_of(folder: Path) -> dict[str, Any]:
    """The configuration of a model with sparse attention.

    Raises:
        BadFormat: its file is not JSON.
        Unsupported: a model without sparse attention, or of a type that forebay.vllm does not know.
    """
    path = folder / "config.json"
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadFormat(f"{path} is not a JSON object")
    kind = found.get("model_type")
    if kind not in MODELS:
        raise Unsupported(f"{path}: a model of type {kind!r}; forebay.vllm knows {', '.join(MODELS)}")
    return found


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of different lengths. The last one begins as the first one does."""
    from . import models

    span = _LONGEST - _SHORTEST
    # Long and short ones in turn.
    lengths = [_SHORTEST + (number * 7 + 6) % 12 * span // 11 for number in range(count)]
    made = models.prompts(lengths, seed=seed)
    if count > 1:
        made[-1] = made[0][: 2 * _BLOCK] + made[-1][: _BLOCK // 2]
    return made


def most_tokens(chosen: argparse.Namespace) -> int:
    """Tokens of the longest request, as whole blocks."""
    return -(-int(_LONGEST + chosen.tokens) // _BLOCK) * _BLOCK


def lines(chosen: argparse.Namespace) -> list[Line]:
    """The engines."""
    more: dict[str, Any] = {}
    if chosen.drafts:
        more["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": chosen.drafts, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
        }  # fmt: skip
    off, few, least = "forebay off", "ratio 1, few blocks", min(chosen.ratio)
    made = [Line(off, off, {"rows": VLLM}, more)]
    made += [Line(f"ratio {ratio:g}", off, {"ratio": ratio}, more) for ratio in dict.fromkeys((1.0, *chosen.ratio))]
    more = {**more, "num_gpu_blocks_override": most_tokens(chosen) // _BLOCK + 2}
    made.append(Line(few, few, {"ratio": 1.0}, more))
    return [*made, Line(f"ratio {least:g}, few blocks", few, {"ratio": least, "validate": True}, more)]


def run(chosen: argparse.Namespace) -> int:
    """Runs the engines and prints a table; status 1 if tokens differ."""
    # The first answers are the longest, so the first requests outgrow few blocks.
    counts = [max(1, chosen.tokens * (8 - number % 8) // 8) for number in range(chosen.requests)]
    given = {
        "dtype": DTYPES[chosen.dtype], "max_model_len": most_tokens(chosen), "max_num_batched_tokens": _CHUNK,
        "kv_cache_memory_bytes": _MEMORY, "block_size": _BLOCK,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = chosen.model or small_model(Path(folder), chosen.dtype, chosen.seed)
        config_of(model)
        name = chosen.model or "a small deepseek_v32 with random weights"
        print(f"{name}, {chosen.dtype}: {chosen.requests} prompts, answers of up to {chosen.tokens} tokens")
        print(HEAD)
        began, failed = time.perf_counter(), 0
        done: dict[str, Found] = {}
        asked = prompts(chosen.requests, chosen.seed)
        for line in lines(chosen):
            try:
                found = start(Run(str(model), asked, counts, line.options, {**given, **line.arguments}))
            except EngineFailed as error:
                failed += 1
                print(f"{line.name:<22} FAILED")
                print(error, file=sys.stderr)
                continue
            done[line.name] = found
            first = done.get(line.against)
            same = first is not None and first.tokens == found.tokens
            failed += not same
            compared = "-" if first is found else "equal" if same else "DIFFER"
            print(f"{line.name:<22} {compared:<7} {figures(found)}")
    seconds = time.perf_counter() - began
    print(f"{'All tokens are equal' if failed == 0 else f'{failed} engines differ or failed'}; {seconds:.0f} s")
    return 1 if failed else 0


def figures(found: Found) -> str:
    """What an engine counted."""
    resumed = int(found.metrics.get("vllm:forebay_resumed", 0))
    return (
        f"{miss_ratio(found):>7} {found.blocks:>7,} {shown(found.kv_bytes):>12} {preempted(found):>9,} "
        f"{resumed:>7} {sum(cached or 0 for cached in found.cached):>7,} {drafts(found):>9}"
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
