"""200 requests of Mooncake's conversation trace, scaled down, by vLLM over forebay.

`mooncake.jsonl` holds the requests of 200 conversation turns that share beginnings: the first groups of 3 to 12
requests of the trace (github.com/kvcache-ai/Mooncake, Apache-2.0) with the same second block, in their order. A block
of 512 tokens became one of 16, a request has at most 24 blocks, and an answer has a 64th of its tokens, at most 6. A
block's tokens follow from its number, so prompts share what the trace's requests shared.
"""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forebay.vllm import engine, models
from forebay.vllm.engine import Found, Run
from harness import APART, OFF, QUICK, whole

TRACE = Path(__file__).parent / "mooncake.jsonl"
BLOCK = 16
COUNT = 40 if QUICK else 200
# Blocks of 16 tokens, and prompts of up to 385 of them.
SIZES = {"block_size": BLOCK, "max_model_len": 512}
# Bytes of a block's rows in four layers.
PAGE = 4 * BLOCK * 4 * (512 + 64)


@functools.cache
def requests() -> list[dict[str, Any]]:
    lines = TRACE.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 200
    return [json.loads(line) for line in lines[:COUNT]]


@functools.cache
def block(number: int) -> tuple[int, ...]:
    chance = random.Random(number)
    return tuple(chance.randrange(1, models.VOCABULARY) for _ in range(BLOCK))


def prompts() -> list[list[int]]:
    """Each ends with a token of its own: vLLM always computes a prompt's last one, and so every block can be found."""
    return [
        [token for one in request["hash_ids"] for token in block(one)] + [1 + number % (models.VOCABULARY - 1)]
        for number, request in enumerate(requests())
    ]


def serve(model: str, options: dict[str, Any], tokens: int | list[int], **changes: Any) -> Found:
    together = changes.pop("together", 0)
    arguments = {**SIZES, "max_num_batched_tokens": 512, **changes}
    return engine.start(Run(model, prompts(), tokens, options, arguments, together=together), timeout=900)


@whole
def test_together(model: str) -> None:
    """All at once, at most eight in a batch: the answers are those of vLLM's own KV cache."""
    tokens = [request["output_length"] for request in requests()]
    off = serve(model, OFF, tokens, **APART)
    found = serve(model, {"ratio": 0.3}, tokens, **APART)
    assert found.tokens == off.tokens
    assert (found.left["sequences"], found.left["parked"], found.left["free_lanes"]) == (0, 0, 8)


@whole
def test_one_at_a_time_with_prefixes(model: str) -> None:
    """The same answers and the same hits as by vLLM's own prefix cache, where both have room for all blocks."""
    tokens, room = [request["output_length"] for request in requests()], {"kv_cache_memory_bytes": 512 << 20}
    off = serve(model, OFF, tokens, together=1, **room)
    found = serve(model, {"ratio": 0.3}, tokens, together=1, **room)
    assert (found.tokens, found.cached) == (off.tokens, off.cached)
    assert sum(found.cached) == found.metrics["vllm:forebay_prefix_hits"] > 30_000


@pytest.mark.parametrize("capacity", [60] if QUICK else [60, 400])
def test_hits_one_at_a_time_are_those_of_replay(model: str, capacity: int, tmp_path: Path) -> None:
    """With as many pages as the replay has blocks, and one more for the page that is not full."""
    options = {"ratio": 1.0, "host_memory": (capacity + 1) * PAGE, "validate": True}
    found = serve(model, options, 1, together=1, max_num_seqs=1)
    replayed = replay(tmp_path / "trace.jsonl", capacity)
    assert sum(found.cached) == replayed["hit_tokens"] > 0
    assert replayed["evicted_blocks"] > 0
    # Nothing but published pages is left.
    left = found.left
    assert (left["sequences"], left["parked"], left["free_lanes"]) == (0, 0, 1)
    assert left["free_host_pages"] + left["unused_pages"] == capacity + 1


def replay(trace: Path, capacity: int) -> dict[str, Any]:
    """`forebay replay` of the same requests."""
    command = os.environ.get("FOREBAY_COMMAND")
    assert command, "ci/engines builds the command forebay, and names it in FOREBAY_COMMAND"
    trace.write_text("".join(f"{json.dumps(request)}\n" for request in requests()), encoding="utf-8")
    given = [command, "replay", str(trace), "--block-tokens", str(BLOCK), "--capacity", str(capacity), "--json", "-"]
    done = subprocess.run(given, capture_output=True, text=True, check=True)
    (found,) = json.loads(done.stdout)
    return dict(found)
