"""Tokens with forebay equal those without it, and those of the run with every row in a slot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from forebay.vllm import models
from forebay.vllm.engine import Found
from harness import OFF, QUICK, RESIDENT, SHARE, prompts, run, whole

PREEMPTING = {"num_gpu_blocks_override": 20}
DRAFTS = {
    "speculative_config": {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
    }
}  # fmt: skip


def share(model: str, **changes: Any) -> Found:
    """A run with a part of the rows in slots, checked after every step."""
    return run(model, {**SHARE, "validate": True}, **changes)


def test_tokens_equal(model: str) -> None:
    """Ten requests, at most eight at once: prompts in chunks, mixed batches, shared beginnings."""
    off, found = run(model, OFF), share(model)
    assert found.tokens == off.tokens
    assert found.metrics["vllm:forebay_row_misses"] > 0
    assert all(len(set(answer)) > 30 for answer in off.tokens)


@whole
def test_tokens_equal_the_resident_run(model: str) -> None:
    resident = run(model, RESIDENT)
    assert resident.tokens == run(model, OFF).tokens
    assert resident.metrics["vllm:forebay_row_misses"] < share(model).metrics["vllm:forebay_row_misses"] / 2


def test_tokens_equal_transformers(model: str) -> None:
    """The same weights in transformers, with eager attention."""
    stock = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    for prompt, answer in list(zip(prompts(), share(model).tokens))[:5]:
        given = torch.tensor([prompt])
        made = stock.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=16, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        assert made[0, len(prompt) :].tolist() == answer[:16]


@whole
def test_layers_that_share_a_selection(tmp_path: Path) -> None:
    models.save(tmp_path, selects="FSFS")
    found = share(str(tmp_path))
    assert found.tokens == run(str(tmp_path), OFF).tokens
    assert found.metrics["vllm:forebay_row_misses"] > 0


@whole
@pytest.mark.parametrize("together", [1, 3])
def test_batches_of_other_sizes(model: str, together: int) -> None:
    assert share(model, together=together).tokens == run(model, OFF).tokens


@whole
def test_lengths_at_the_edges_of_pages(model: str) -> None:
    """Prompts of one token and around a page's end, answers of one token and to the end of the context."""
    lengths = [1, 2, 63, 64, 65, 128, 129, 1000, 1023]
    given = {"prompts": models.prompts(lengths), "tokens": [1, 70, 1, 64, 2, 1, 63, 24, 1]}
    found = share(model, **given)
    assert found.tokens == run(model, OFF, **given).tokens
    assert [len(answer) for answer in found.tokens] == given["tokens"]
    assert found.left["sequences"] == 0


@whole
def test_bf16(tmp_path: Path) -> None:
    models.save(tmp_path, dtype=torch.bfloat16)
    changes = {"arguments": {"dtype": "bfloat16"}, "together": 1}
    assert share(str(tmp_path), **changes).tokens == run(str(tmp_path), OFF, **changes).tokens


def test_prefixes_are_shared(model: str) -> None:
    """Five prompts begin with the same 200 tokens: three pages of 64 of each later one are not computed again."""
    found = share(model)
    assert sum(found.cached) >= 3 * 192
    counted = [found.metrics[f"vllm:{name}_hits"] for name in ("external_prefix_cache", "forebay_prefix")]
    assert counted == [sum(found.cached)] * 2
    if QUICK:
        return
    alone = run(model, {**SHARE, "validate": True}, arguments={"enable_prefix_caching": False})
    assert not any(alone.cached)
    assert alone.tokens == found.tokens


def test_preempted_requests_compute_nothing_again(model: str) -> None:
    """vLLM has too few blocks for eight requests. Each that it preempts is parked, and goes on where it was."""
    found = run(model, {**SHARE, "validate": True, "host_memory": 64 << 20}, arguments=PREEMPTING)
    assert found.tokens == run(model, OFF).tokens
    assert found.metrics["vllm:num_preemptions"] > 0
    assert found.metrics["vllm:forebay_preempted"] == found.metrics["vllm:forebay_resumed"] > 0


def test_aborted_requests_leave_nothing(model: str) -> None:
    """Requests are aborted while they prefill, decode and wait."""
    aborts = {"1": 2, "7": 6, "3": 9, "9": 1}
    found = run(model, {**SHARE, "validate": True}, aborts=aborts)
    whole = run(model, OFF)
    for number, (answer, expected) in enumerate(zip(found.tokens, whole.tokens)):
        assert answer == (None if str(number) in aborts else expected)
    assert (found.left["sequences"], found.left["parked"]) == (0, 0)
    assert found.left["free_lanes"] == 8


@whole
def test_drafts_by_prompt_lookup(model: str) -> None:
    """Rejected drafts leave nothing behind, also in a preempted request."""
    found = run(model, {**SHARE, "validate": True, "host_memory": 64 << 20}, arguments={**DRAFTS, **PREEMPTING})
    assert found.tokens == run(model, OFF).tokens
    assert found.metrics["vllm:spec_decode_num_drafts"] > 0


def test_nothing_is_left(model: str) -> None:
    """After the last request every page, lane and slot is free, or holds a published prefix."""
    left = share(model).left
    assert (left["sequences"], left["parked"], left["free_lanes"]) == (0, 0, 8)


def test_vllm_allocates_no_row(model: str) -> None:
    """In the same memory vLLM counts more blocks, and its own KV cache has one byte for each token."""
    off, found = run(model, OFF), share(model)
    assert found.kv_bytes == found.blocks * 64
    assert found.blocks >= 2 * off.blocks
    row, key = 4 * (512 + 64), 4 * 128
    assert off.kv_bytes == off.blocks * 64 * 4 * (row + key)
