"""Ways to decode: prefill in chunks, turns, drafts, beams, crop and reset; each with the stock cache's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from forebay.transformers import ForebayCache, check, models
from harness import FAMILIES, forward, model, save, stock_cache

CONTEXT, TOKENS = 96, 16
LONGEST = 2 * (CONTEXT + TOKENS)


def cache_of(family: str, ratio: float = 0.2, **options: Any) -> ForebayCache:
    """A cache of the small model of `family`."""
    return ForebayCache(model(family).config, ratio=ratio, **{"max_tokens": LONGEST, **options})


def agree(family: str, given: check.Prompt, *, cache: dict[str, Any] | None = None, **options: Any) -> Any:
    """Decodes with a fifth of the rows, with all, and with the stock cache, and compares. Returns the first run's
    statistics."""
    stock = check.decode(model(family), given, TOKENS, **options)
    twin_cache, found_cache = cache_of(family, 1, **cache or {}), cache_of(family, **cache or {})
    with twin_cache, found_cache:
        twin = check.decode(model(family), given, TOKENS, twin_cache, **options)
        found = check.decode(model(family), given, TOKENS, found_cache, **options)
        found_cache.validate()
        stats = found_cache.stats()
    assert torch.equal(found.tokens, stock.tokens)
    assert check.same_bits(found.logits, twin.logits)
    return stats


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 37])
def test_prefill_in_chunks(family: str, chunk: int) -> None:
    length = 24 if chunk == 1 else CONTEXT
    agree(family, check.prompt(2, length, seed=3), cache={"batch": 2}, prefill_chunk_size=chunk)


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_of_the_caller(family: str) -> None:
    """Boolean and additive masks `[batch, 1, tokens, context]`, in a prefill, in a step and without a cache. Rows and
    columns are masked that no causal mask would mask. A window as long as the context: sliding layers get the same
    mask."""
    of, length = model(family, window=CONTEXT), 40
    tokens = models.prompts(2, length, seed=14)
    allowed = torch.ones(2, 1, length, length).tril().bool()
    allowed[:, :, 5:, 3] = False
    allowed[1, :, 20:, 6:10] = False
    least = torch.finfo(torch.float32).min
    masks = {"boolean": allowed, "additive": torch.zeros(allowed.shape).masked_fill(~allowed, least)}
    of.set_attn_implementation("sdpa" if family != "hy_v4" else "eager")
    with torch.inference_mode():
        wanted = of(tokens, attention_mask=masks["boolean" if family != "hy_v4" else "additive"]).logits
        of.set_attn_implementation("forebay")
        for name, mask in masks.items():
            alone = of(tokens, attention_mask=mask, use_cache=False).logits
            torch.testing.assert_close(alone, wanted, atol=1e-3, rtol=1e-3, msg=lambda said: f"{name}: {said}")
            with ForebayCache(of.config, ratio=0.2, max_tokens=LONGEST, batch=2) as cache:
                for first, end in ((0, 30), *((at, at + 1) for at in range(30, length))):
                    part = mask[:, :, first:end, :end]
                    found = of(tokens[:, first:end], attention_mask=part, past_key_values=cache).logits
                    torch.testing.assert_close(found, wanted[:, first:end], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_on_the_same_cache(family: str) -> None:
    """The second prompt arrives while the sequence runs; what the first turn computed is not computed again."""
    first = check.prompt(2, CONTEXT, seed=5)
    said = models.prompts(2, CONTEXT // 2, seed=6)
    answers = []
    for cache in (None, cache_of(family, batch=2), cache_of(family, 1, batch=2)):
        kept = stock_cache(model(family)) if cache is None else cache
        of = model(family)
        of.set_attn_implementation("eager" if cache is None else "forebay")
        tokens, mask = first.tokens, first.mask
        for more in (None, said):
            if more is not None:
                tokens = torch.cat([tokens, more], dim=1)
            mask = torch.cat([mask, mask.new_ones(2, tokens.shape[1] - mask.shape[1])], dim=1)
            tokens = of.generate(
                tokens, attention_mask=mask, past_key_values=kept, max_new_tokens=TOKENS, do_sample=False
            )
        answers.append(tokens)
        if cache is not None:
            cache.validate()
            cache.close()
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_lookup(family: str) -> None:
    """Drafts that repeat the prompt, nearly all rejected; the first of them arrive with the prompt."""
    part = models.prompts(1, 12, seed=7)
    tokens = part.repeat(1, 6)
    given = check.Prompt(tokens, torch.ones_like(tokens))
    agree(family, given, cache={"drafts": 3}, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_assisted_decoding(family: str, noise: float) -> None:
    """The assistant is the model itself, so every draft is accepted, or the model with noise in its weights."""
    assistant = models.small(family, seed=0)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std(unbiased=False), alpha=noise)
    assistant.set_attn_implementation("eager")
    assistant.generation_config.num_assistant_tokens = 3
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    stats = agree(family, check.prompt(1, CONTEXT, seed=8), cache={"drafts": 3}, assistant_model=assistant)
    # Without noise a step yields four tokens; the first comes from the prompt.
    assert noise > 0 or stats.steps <= 2 + TOKENS // 4


@pytest.mark.parametrize("family", FAMILIES)
def test_beams(family: str) -> None:
    """Beams fork: after each step some continue in several sequences and others end."""
    given = check.prompt(2, CONTEXT, seed=9)
    stock = check.decode(model(family), given, TOKENS, num_beams=3)
    with cache_of(family, batch=6) as cache, cache_of(family, 1, batch=6) as all_rows:
        found = check.decode(model(family), given, TOKENS, cache, num_beams=3)
        twin = check.decode(model(family), given, TOKENS, all_rows, num_beams=3)
        cache.validate()
    assert torch.equal(found.tokens, stock.tokens)
    assert check.same_bits(found.logits, twin.logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_several_answers(family: str) -> None:
    given = check.prompt(1, CONTEXT, seed=10)
    answers = []
    for cache in (None, cache_of(family, batch=4)):
        model(family).set_attn_implementation("eager" if cache is None else "forebay")
        torch.manual_seed(11)
        answers.append(
            model(family).generate(
                given.tokens, past_key_values=cache, max_new_tokens=TOKENS, do_sample=True, num_return_sequences=4
            )
        )
        if cache is not None:
            cache.validate()
            cache.close()
    assert torch.equal(answers[0], answers[1])
    assert len({tuple(row) for row in answers[0].tolist()}) > 1


def test_a_pipeline(tmp_path: Path) -> None:
    """transformers' pipeline hands the cache on."""
    tokenizer = save("glm_moe_dsa", tmp_path)
    text = " ".join(f"w{word}" for word in models.prompts(1, 40, seed=13)[0].tolist())
    answers = []
    for kind in ("eager", "forebay"):
        of = model("glm_moe_dsa")
        of.set_attn_implementation(kind)
        options = {} if kind == "eager" else {"past_key_values": cache_of("glm_moe_dsa")}
        pipeline = transformers.pipeline("text-generation", model=of, tokenizer=tokenizer)
        answers.append(pipeline(text, max_new_tokens=TOKENS, do_sample=False, **options)[0]["generated_text"])
    assert answers[0] == answers[1]
    # Without the words that the tokenizer leaves out.
    assert len(answers[0].split()) > 40 + TOKENS // 2


@pytest.mark.parametrize("family", FAMILIES)
def test_crop_and_reset(family: str) -> None:
    """After `crop` and `reset` the cache continues as one that never had the rows, at a prompt and while decoding. A
    window as long as the context: transformers' own sliding layers cannot be cropped beyond their window."""
    of, tokens = model(family, window=CONTEXT), models.prompts(2, CONTEXT, seed=12)
    with ForebayCache(of.config, ratio=0.2, max_tokens=LONGEST, batch=2) as cache:
        stock = stock_cache(of)
        for _again in range(2):
            # At the prompt: drafts that arrived with it.
            for kept in (cache, stock):
                forward(of, tokens[:, :40], kept)
                kept.crop(-5)
            assert cache.get_seq_length() == stock.get_seq_length() == 35
            for column in range(35, 60):
                logits = [forward(of, tokens[:, column : column + 1], kept) for kept in (cache, stock)]
                torch.testing.assert_close(logits[0], logits[1], atol=1e-3, rtol=1e-3)
            # While decoding, into decoded rows and then into the prompt.
            for down, up in ((7, 70), (40, 50)):
                for kept in (cache, stock):
                    kept.crop(-down)
                length = stock.get_seq_length()
                assert cache.get_seq_length() == length
                for column in range(length, up):
                    logits = [forward(of, tokens[:, column : column + 1], kept) for kept in (cache, stock)]
                    torch.testing.assert_close(logits[0], logits[1], atol=1e-3, rtol=1e-3)
            cache.validate()
            cache.reset()
            assert cache.get_seq_length() == 0
            stock = stock_cache(of)
