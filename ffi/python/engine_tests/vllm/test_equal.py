"""Tokens with forebay equal those without it, and those of the run with every row in a slot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from forebay.vllm import models
from forebay.vllm.engine import Found
from harness import APART, OFF, QUICK, RESIDENT, SHARE, driven, prompts, run, whole

PREEMPTING = {"num_gpu_blocks_override": 20}
DRAFTS = {
    "speculative_config": {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
    }
}  # fmt: skip
# Counts how often requests grow.
PROMISES = """
from forebay.serving import Request
promise, told["promises"] = Request.promise, 0

def counted(self, tokens):
    told["promises"] += 1
    promise(self, tokens)

Request.promise = counted
"""
# Preempted requests keep their pages.
PLENTY = {"host_memory": 64 << 20}


def share(model: str, **changes: Any) -> Found:
    """A run with a part of the rows in slots, checked after every step."""
    return run(model, {**SHARE, "validate": True, **changes.pop("options", {})}, **changes)


def both(model: str, **changes: Any) -> tuple[Found, Found]:
    """Runs without forebay and with it, which form the same batches."""
    given = {**changes, "arguments": {**APART, **changes.get("arguments", {})}}
    return run(model, OFF, **given), share(model, **given)


def test_tokens_equal(model: str) -> None:
    """Ten requests, at most eight at once: prompts in chunks, and batches of prefills and decode steps."""
    off, found = both(model)
    assert found.tokens == off.tokens
    assert found.metrics["vllm:forebay_row_misses"] > 0
    assert all(len(set(answer)) > 30 for answer in off.tokens)
    # vLLM was told not to share prefixes.
    assert sum(found.cached) == found.metrics["vllm:forebay_prefix_queries"] == 0


@whole
def test_tokens_equal_the_resident_run(model: str) -> None:
    off, found = both(model)
    resident = run(model, RESIDENT, arguments=APART)
    assert resident.tokens == off.tokens
    assert resident.metrics["vllm:forebay_row_misses"] < found.metrics["vllm:forebay_row_misses"] / 2


def test_tokens_equal_transformers(model: str) -> None:
    """The same weights in transformers, with eager attention."""
    stock = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    for prompt, answer in list(zip(prompts(), both(model)[1].tokens))[:5]:
        given = torch.tensor([prompt])
        made = stock.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=16, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        assert made[0, len(prompt) :].tolist() == answer[:16]


@whole
def test_layers_that_share_a_selection(tmp_path: Path) -> None:
    models.save(tmp_path, selects="FSFS")
    off, found = both(str(tmp_path))
    assert found.tokens == off.tokens
    assert found.metrics["vllm:forebay_row_misses"] > 0


@whole
@pytest.mark.parametrize("together", [1, 3])
def test_batches_of_other_sizes(model: str, together: int) -> None:
    off, found = both(model, together=together)
    assert found.tokens == off.tokens


@whole
def test_lengths_at_the_edges_of_pages(model: str) -> None:
    """Prompts of one token and around a page's end, answers of one token and to the end of the context."""
    lengths, tokens = [1, 2, 63, 64, 65, 128, 129, 1000, 1023], [1, 70, 1, 64, 2, 1, 63, 24, 1]
    off, found = both(model, prompts=models.prompts(lengths), tokens=tokens)
    assert found.tokens == off.tokens
    assert [len(answer) for answer in found.tokens] == tokens
    assert found.left["sequences"] == 0


@whole
def test_answers_that_grow(model: str) -> None:
    """Requests take pages and slots for some of their answers at a time, here twice and more."""
    chosen = {"prompts": prompts()[:4], "tokens": [400, 300, 400, 500], "arguments": APART}
    off = run(model, OFF, **chosen)
    found, told = driven(model, PROMISES, {**SHARE, "validate": True}, **chosen)
    assert found.tokens == off.tokens
    assert told["promises"] > 4 * 2


@whole
def test_bf16(tmp_path: Path) -> None:
    models.save(tmp_path, dtype=torch.bfloat16)
    off, found = both(str(tmp_path), arguments={"dtype": "bfloat16"})
    assert found.tokens == off.tokens


def test_prefixes_are_shared(model: str) -> None:
    """Five prompts begin with the same 200 tokens: three pages of 64 of each later one are not computed again."""
    found = share(model, together=1)
    counted = [found.metrics[f"vllm:{name}_hits"] for name in ("external_prefix_cache", "forebay_prefix")]
    assert counted == [sum(found.cached)] * 2
    assert sum(found.cached) >= 4 * 192
    if not QUICK:
        # One at a time vLLM finds the same prefixes in its own cache.
        off = run(model, OFF, together=1)
        assert (found.tokens, found.cached) == (off.tokens, off.cached)


def test_preempted_requests_compute_nothing_again(model: str) -> None:
    """vLLM has too few blocks for eight requests. Each that it preempts is parked, and goes on where it was."""
    found = share(model, options=PLENTY, arguments=PREEMPTING)
    assert found.metrics["vllm:num_preemptions"] > 0
    assert found.metrics["vllm:forebay_preempted"] == found.metrics["vllm:forebay_resumed"] > 0
    resident = run(model, {**RESIDENT, **PLENTY}, arguments=PREEMPTING)
    assert found.tokens == resident.tokens
    # Not preempted, and without forebay. These prompts' tokens do not depend on what else is in a batch.
    assert found.tokens == run(model, OFF, arguments=APART).tokens


def test_aborted_requests_leave_nothing(model: str) -> None:
    """Requests are aborted while they prefill, decode and wait."""
    off, found = both(model, aborts={"1": 2, "7": 6, "3": 9, "9": 1})
    assert found.tokens == off.tokens
    assert [number for number, answer in enumerate(found.tokens) if answer is None] == [1, 3, 7, 9]
    assert (found.left["sequences"], found.left["parked"], found.left["free_lanes"]) == (0, 0, 8)


@whole
def test_drafts_by_prompt_lookup(model: str) -> None:
    """Rejected drafts leave nothing behind."""
    off, found = both(model, arguments=DRAFTS)
    assert found.tokens == off.tokens
    assert found.metrics["vllm:spec_decode_num_drafts"] > 0


def accepted(found: Found) -> int:
    return int(found.metrics["vllm:spec_decode_num_accepted_tokens"])


@whole
def test_accepted_drafts(repeating: str) -> None:
    off, found = both(repeating, tokens=90, arguments=DRAFTS)
    assert found.tokens == off.tokens
    assert accepted(found) == accepted(off) > 100


@whole
def test_accepted_drafts_of_preempted_requests(repeating: str) -> None:
    arguments = {**DRAFTS, **PREEMPTING}
    found = share(repeating, tokens=90, options=PLENTY, arguments=arguments)
    resident = run(repeating, {**RESIDENT, **PLENTY}, tokens=90, arguments=arguments)
    assert found.tokens == resident.tokens
    assert accepted(found) > 100
    assert found.metrics["vllm:forebay_resumed"] > 0


@whole
def test_requests_with_priorities(model: str) -> None:
    """vLLM preempts by priority, so in another order, and other requests overtake."""
    arguments = {**PREEMPTING, "scheduling_policy": "priority"}
    chosen = {"arguments": arguments, "priorities": [5, 1, 4, 2, 3, 9, 0, 7, 8, 6]}
    found = share(model, options=PLENTY, **chosen)
    resident = run(model, {**RESIDENT, **PLENTY}, **chosen)
    assert found.tokens == resident.tokens
    assert found.metrics["vllm:forebay_resumed"] > 0


@whole
def test_several_samples_of_a_request(model: str) -> None:
    off, found = both(model, sampling={"n": 3, "temperature": 1.0})
    assert found.tokens == off.tokens
    assert all(len(answer) == 3 * 40 for answer in found.tokens)
    assert (found.left["sequences"], found.left["parked"], found.left["free_lanes"]) == (0, 0, 8)


@whole
def test_logarithms_of_a_prompt(model: str) -> None:
    """vLLM computes such a prompt from its beginning, and again after it was preempted. Tokens are compared."""
    chosen = {"sampling": {"prompt_logprobs": 1}, "arguments": PREEMPTING}
    found = share(model, options=PLENTY, **chosen)
    resident = run(model, {**RESIDENT, **PLENTY}, **chosen)
    assert found.tokens == resident.tokens
    assert sum(found.cached) == 0
    assert found.metrics["vllm:forebay_preempted"] > 0
    assert found.metrics["vllm:forebay_resumed"] == 0


def test_nothing_is_left(model: str) -> None:
    """After the last request every page, lane and slot is free, or holds a published prefix."""
    left = share(model, together=1).left
    assert (left["sequences"], left["parked"], left["free_lanes"]) == (0, 0, 8)
    assert left["unused_pages"] > 0


def test_vllm_allocates_no_row(model: str) -> None:
    """In the same memory vLLM counts more blocks, and its own KV cache has one byte for each token."""
    off, found = both(model)
    assert found.kv_bytes == found.blocks * 64
    assert found.blocks >= 2 * off.blocks
    row, key = 4 * (512 + 64), 4 * 128
    assert off.kv_bytes == off.blocks * 64 * 4 * (row + key)
