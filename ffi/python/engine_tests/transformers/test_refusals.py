"""Bad input: one clear error, in the user's words, and the cache or a new one can be used afterwards."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import forebay
import pytest
import torch
import transformers
from forebay.transformers import ForebayCache, check, models, register
from harness import forward, model, stock_cache

FAMILY = "deepseek_v32"


def cache_of(**options: Any) -> ForebayCache:
    return ForebayCache(model(FAMILY).config, **{"ratio": 0.3, "max_tokens": 128, **options})


def works(cache: ForebayCache) -> None:
    """A cache that decodes as the stock cache does."""
    of, tokens = model(FAMILY), models.prompts(1, 60, seed=1)
    stock = stock_cache(of)
    for part in (tokens[:, :50], *tokens[:, 50:].split(1, dim=1)):
        torch.testing.assert_close(forward(of, part, cache), forward(of, part, stock), atol=1e-3, rtol=1e-3)
    cache.validate()


def test_a_model_of_another_type() -> None:
    for config in (transformers.LlamaConfig(), transformers.DeepseekV3Config()):
        with pytest.raises(forebay.ForebayError, match=config.model_type):
            ForebayCache(config, ratio=0.2, max_tokens=64)


def test_another_version_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", "5.17.2")
    with pytest.raises(forebay.Unsupported, match=r"5\.17\.2.*5\.18|5\.18.*5\.17\.2"):
        register()
    with pytest.raises(forebay.Unsupported, match=r"5\.18"):
        cache_of()


def test_a_family_that_came_later(monkeypatch: pytest.MonkeyPatch) -> None:
    config = models.configuration("mistral_large4")
    monkeypatch.setattr(transformers, "__version__", "5.21.0")
    with pytest.raises(forebay.Unsupported, match=r"mistral_large4: transformers 5\.21\.0 has no such model.*5\.22"):
        ForebayCache(config, ratio=0.2, max_tokens=64)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ratio": None}, "ratio"),
        ({"slots": 64}, "ratio"),
        ({"ratio": 0}, "ratio"),
        ({"ratio": 1.5}, "ratio"),
        ({"ratio": "much"}, "ratio"),
        ({"ratio": None, "slots": 0}, "slots"),
        ({"ratio": None, "slots": 1.5}, "slots"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"batch": 0}, "batch"),
        ({"drafts": -1}, "drafts"),
        ({"device": "cuda:0"}, "device"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises((forebay.ForebayError, TypeError, ValueError), match=words):
        cache_of(**options)


def test_a_cache_used_by_two_models() -> None:
    with cache_of() as cache:
        forward(model(FAMILY), models.prompts(1, 20), cache)
        with pytest.raises(forebay.ForebayError, match="model"):
            forward(model(FAMILY, seed=1), models.prompts(1, 1), cache)
        cache.reset()
        works(cache)


def test_a_model_without_forebays_attention() -> None:
    """A model whose attention was not set would read the new rows alone: an error, not a wrong text."""
    with cache_of() as cache:
        of = model(FAMILY)
        of.set_attn_implementation("eager")
        with pytest.raises(forebay.ForebayError, match="forebay"), torch.inference_mode():
            of(models.prompts(1, 20), past_key_values=cache)
            of(models.prompts(1, 1), past_key_values=cache)


def test_a_model_of_one_layer_without_forebays_attention() -> None:
    """Its only layer is the first, which begins the next pass."""
    of = models.small(FAMILY, models.Sizes(layers=1))
    with ForebayCache(of.config, ratio=0.3, max_tokens=128) as cache:
        # A config that does not say how the model attends is taken on trust.
        cache._config = models.configuration(FAMILY, models.Sizes(layers=1))
        of.set_attn_implementation("eager")
        with pytest.raises(forebay.InvalidState, match="did not attend there by forebay"), torch.inference_mode():
            of(models.prompts(1, 20), past_key_values=cache)
            of(models.prompts(1, 1), past_key_values=cache)


def test_gradients() -> None:
    """None would come back from the pool: refused, and nothing has changed."""
    of = model(FAMILY)
    with cache_of() as cache:
        of.set_attn_implementation("forebay")
        with pytest.raises(forebay.Unsupported, match="no_grad"):
            of(models.prompts(1, 20), past_key_values=cache)
        works(cache)
    with ForebayCache(model("dots3_note").config, ratio=0.3, max_tokens=128) as cache:
        model("dots3_note").set_attn_implementation("forebay")
        with pytest.raises(forebay.Unsupported, match="no_grad"):
            model("dots3_note")(models.prompts(1, 20), past_key_values=cache)


def test_weights_of_attention() -> None:
    of = model(FAMILY)
    with cache_of() as cache, torch.inference_mode():
        of.set_attn_implementation("forebay")
        with pytest.raises(forebay.Unsupported, match="output_attentions"):
            of(models.prompts(1, 20), past_key_values=cache, output_attentions=True)
        with pytest.raises(forebay.Unsupported, match="output_attentions"):
            of(models.prompts(1, 20), output_attentions=True)
        cache.reset()
        works(cache)


@pytest.mark.parametrize(("rows", "tokens", "words"), [(3, 20, "batch"), (1, 65, "max_tokens")])
def test_a_stock_layer_that_comes_first_takes_nothing_either(rows: int, tokens: int, words: str) -> None:
    """The cache can be used without a reset: no layer has taken the rows that are refused."""
    kinds = ["sliding_attention"] + ["indexed_attention"] * 3
    of = models.small("dots3_note", layer_types=kinds)
    with ForebayCache(of.config, ratio=0.3, max_tokens=64, batch=2) as cache:
        for _again in range(2):
            with pytest.raises(forebay.ForebayError, match=words):
                forward(of, models.prompts(rows, tokens), cache)
        assert cache.layers[0].get_seq_length() == 0
        given = models.prompts(1, 30)
        torch.testing.assert_close(
            forward(of, given, cache), forward(of, given, stock_cache(of)), atol=1e-3, rtol=1e-3
        )


def failed(cache: ForebayCache, layer: int) -> None:
    """A prefill that fails in a layer, after its rows came or before its neighbour's did."""
    of = model(FAMILY)

    def fail(*_given: Any) -> None:
        raise ZeroDivisionError("planted")

    hook = of.model.layers[layer].mlp.register_forward_hook(fail)
    try:
        with pytest.raises(ZeroDivisionError, match="planted"):
            forward(of, models.prompts(1, 20), cache)
    finally:
        hook.remove()


def test_a_failed_pass_and_a_pass_without_a_cache() -> None:
    """A pass with a mask of its own makes none, so nothing but its keys tells that it is another's."""
    of, tokens = model(FAMILY), models.prompts(1, 12)
    causal = torch.ones(12, 12).tril().bool()[None, None]
    with cache_of() as cache, torch.inference_mode():
        of.set_attn_implementation("eager")
        wanted = of(tokens).logits
        failed(cache, 1)
        of.set_attn_implementation("forebay")
        torch.testing.assert_close(of(tokens, attention_mask=causal, use_cache=False).logits, wanted)
        cache.reset()
        works(cache)


def test_a_failed_pass_does_not_keep_the_cache() -> None:
    cache = cache_of()
    failed(cache, 1)
    batch = weakref.ref(cache._batch)
    del cache
    gc.collect()
    assert batch() is None


@pytest.mark.parametrize("what", ["reset", "close"])
def test_another_caches_reset_in_a_pass(what: str) -> None:
    of, other = model(FAMILY), cache_of()
    with cache_of() as cache:
        forward(of, models.prompts(1, 20), cache)
        # Between a layer's rows and its attention.
        hook = of.model.layers[1].self_attn.indexer.register_forward_hook(lambda *_given: getattr(other, what)())
        try:
            forward(of, models.prompts(1, 1), cache)
        finally:
            hook.remove()
        cache.reset()
        works(cache)


def test_two_threads() -> None:
    """The second pass begins while the first is in its second layer."""
    of, found = model(FAMILY), []

    def second() -> None:
        with pytest.raises(forebay.InvalidState) as error, torch.inference_mode():
            of(models.prompts(1, 1), past_key_values=cache)
        found.append(str(error.value))

    def begin(*_given: Any) -> None:
        if not found:
            thread = threading.Thread(target=second)
            thread.start()
            thread.join()

    with cache_of() as cache:
        hook = of.model.layers[1].mlp.register_forward_hook(begin)
        try:
            with pytest.raises(forebay.InvalidState, match="two threads"):
                forward(of, models.prompts(1, 20), cache)
        finally:
            hook.remove()
        assert "two threads" in found[0]
        cache.reset()
        works(cache)


def test_rotated_keys_of_another_dtype() -> None:
    with cache_of() as cache, pytest.raises(forebay.InvalidArgument, match="float64"):
        text = cache._config
        latent = torch.zeros(1, 1, 4, text.kv_lora_rank)
        cache.update(latent, torch.zeros(1, 1, 4, text.qk_rope_head_dim, dtype=torch.float64), 0)


def test_a_mask_of_another_number_of_rows() -> None:
    with cache_of(batch=2) as cache:
        forward(model(FAMILY), models.prompts(2, 20), cache)
        for mask in ([True], [True, False, True]):
            with pytest.raises(forebay.InvalidArgument, match="mask"):
                cache.batch_select_indices(torch.tensor(mask))
        cache.batch_select_indices(torch.tensor([False, True]))
        assert len(cache.rows) == 1


def test_copies() -> None:
    with cache_of() as cache:
        for how in (copy.copy, copy.deepcopy):
            with pytest.raises(forebay.Unsupported, match="batch_repeat_interleave"):
                how(cache)


def test_a_batch_beyond_the_lanes() -> None:
    with cache_of(batch=2) as cache:
        with pytest.raises(forebay.ForebayError, match="3.*2|2.*3"):
            forward(model(FAMILY), models.prompts(3, 20), cache)
        cache.reset()
        works(cache)


def test_a_prompt_longer_than_admitted() -> None:
    with cache_of(max_tokens=64) as cache:
        with pytest.raises(forebay.ForebayError, match="max_tokens"):
            forward(model(FAMILY), models.prompts(1, 65), cache)
        cache.reset()
        works(cache)


def test_a_text_that_grows_beyond_what_was_admitted() -> None:
    with cache_of(max_tokens=64) as cache:
        forward(model(FAMILY), models.prompts(1, 62), cache)
        with pytest.raises(forebay.ForebayError, match="max_tokens"):
            for _step in range(4):
                forward(model(FAMILY), models.prompts(1, 1), cache)
        cache.reset()
        works(cache)


def test_out_of_host_memory() -> None:
    """More rows than the machine has memory for."""
    config = models.configuration(FAMILY, models.Sizes(context=1 << 30))
    cache = ForebayCache(config, slots=64, max_tokens=1 << 29)
    with pytest.raises(forebay.OutOfMemory, match="[0-9]"):
        forward(model(FAMILY), models.prompts(1, 20), cache)


@pytest.mark.parametrize("when", ["prefill", "decode"])
@pytest.mark.parametrize("layer", [0, 2])
def test_an_exception_inside_a_layer(when: str, layer: int) -> None:
    """The step is abandoned; the cache says so until `reset`, and then decodes as a new one."""
    of = models.small(FAMILY, seed=0)
    of.set_attn_implementation("forebay")

    def fail(*_given: Any) -> None:
        raise ZeroDivisionError("planted")

    with ForebayCache(of.config, ratio=0.3, max_tokens=128) as cache:
        if when == "decode":
            forward(of, models.prompts(1, 20), cache)
            forward(of, models.prompts(1, 1), cache)
        hook = of.model.layers[layer].mlp.register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError, match="planted"):
            forward(of, models.prompts(1, 20 if when == "prefill" else 1), cache)
        hook.remove()
        cache.reset()
        tokens, stock = models.prompts(1, 60, seed=1), stock_cache(of)
        for part in (tokens[:, :50], *tokens[:, 50:].split(1, dim=1)):
            torch.testing.assert_close(forward(of, part, cache), forward(of, part, stock), atol=1e-3, rtol=1e-3)
        cache.validate()


def test_compilation_and_static_caches_are_refused() -> None:
    of = models.small(FAMILY, seed=0)
    of.set_attn_implementation("forebay")
    with cache_of() as cache:
        assert not cache.is_compileable
        with pytest.raises(ValueError, match="cache_implementation"):
            of.generate(models.prompts(1, 8), past_key_values=cache, cache_implementation="static", max_new_tokens=2)
    options: dict[str, Any] = {"ratio": 0.3, "max_tokens": 128}
    with pytest.raises(forebay.Unsupported, match=r"torch\.compile"):
        ForebayCache(torch.compile(of), **options)
    static = transformers.StaticCache(config=of.config, max_cache_len=64)
    with pytest.raises(forebay.ForebayError, match="StaticCache"):
        ForebayCache(static, **options)
    of.generation_config.cache_implementation = "static"
    with pytest.raises(forebay.Unsupported, match="static"):
        ForebayCache(of, **options)
    of.generation_config.cache_implementation = None
    ForebayCache(of, **options).close()


def test_a_closed_cache() -> None:
    cache = cache_of()
    forward(model(FAMILY), models.prompts(1, 20), cache)
    cache.close()
    cache.close()
    with pytest.raises(forebay.ForebayError):
        forward(model(FAMILY), models.prompts(1, 1), cache)


def test_forebays_attention_with_a_cache_of_transformers() -> None:
    """No rows are in forebay then: the model computes as with eager attention, to the last bit."""
    of, given = model(FAMILY), check.prompt(2, 40, seed=0)
    eager = check.decode(of, given, 6)
    of.set_attn_implementation("forebay")
    tokens = of.generate(given.tokens, attention_mask=given.mask, max_new_tokens=6, do_sample=False)
    assert torch.equal(tokens[:, 40:], eager.tokens)
