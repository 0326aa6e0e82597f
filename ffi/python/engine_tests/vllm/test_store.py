"""forebay's store without an engine: what vLLM's connector and layers call, in orders that engines rarely use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from forebay.shape import Shape
from forebay.vllm.batch import Batch, BatchRow
from forebay.vllm.options import Options
from forebay.vllm.pool import ForebayRows, Limits, fit

BLOCK, TOKENS, WIDTH = 16, 64, 8
SHAPE = Shape(layers=1, row_bytes=(4 * WIDTH, 0), top_k=4, index_key_bytes=4 * WIDTH, page_tokens=BLOCK)
LIMITS = Limits(requests=2, tokens=TOKENS, query_rows=2, block=BLOCK, share=True)


@pytest.fixture
def store() -> Iterator[ForebayRows]:
    made = ForebayRows(SHAPE, LIMITS, Options(ratio=1.0, validate=True), 16, torch.float32)
    yield made
    made.close()


def row_of(token: int, position: int) -> torch.Tensor:
    """The row of a token: it depends on both, as a model's does."""
    return torch.arange(WIDTH, dtype=torch.float32) + 1000 * token + position


def step(store: ForebayRows, id: str, start: int, tokens: list[int], prompt: int) -> None:
    """A pass with one request, whose tokens begin at a position."""
    batch = Batch([BatchRow(id, 0, 0, len(tokens), start, store.prompt(id) or prompt)], LIMITS.query_rows)
    store.begin(batch)
    rows = torch.stack([row_of(token, start + at) for at, token in enumerate(tokens)])
    store.write(0, rows, rows)
    if batch.decodes:
        store.gather(0, torch.zeros((1, len(tokens), 1), dtype=torch.int64))
    store.attended(0)
    store.finish()


def admit(store: ForebayRows, id: str, prompt: list[int], tokens: int = 0, share: bool = True) -> int | None:
    return store.admit(id, prompt, tokens or len(prompt), TOKENS, b"", share)


def test_a_rejected_draft_is_not_published(store: ForebayRows) -> None:
    """The last step has a draft that fills a page and is rejected: the answer's last token takes its position."""
    prompt = list(range(100, 114))
    assert admit(store, "a", prompt) == 0
    step(store, "a", 0, prompt, 14)
    # Token 500 was sampled; the draft after it, at the page's last position, is 999, and 501 is the answer.
    step(store, "a", 14, [500, 999], 14)
    store.end("a", [*prompt, 500, 501])
    assert admit(store, "b", [*prompt, 500, 501, 7]) == 0
    store.end("b", [])
    # The control: an accepted one is found.
    assert admit(store, "c", prompt) == 0
    step(store, "c", 0, prompt, 14)
    step(store, "c", 14, [500, 501], 14)
    store.end("c", [*prompt, 500, 501, 502])
    assert admit(store, "d", [*prompt, 500, 501, 7]) == BLOCK
    rows = store.requests["d"].read(0, 0, BLOCK, dtype=torch.float32)
    expected = [row_of(token, at) for at, token in enumerate([*prompt, 500, 501])]
    assert torch.equal(rows, torch.stack(expected))


def test_a_request_that_vllm_computes_from_the_beginning(store: ForebayRows) -> None:
    """vLLM ignores what forebay has for a request with logarithms of its prompt (`skip_reading_prefix_cache`)."""
    prompt = list(range(20))
    assert admit(store, "a", prompt, share=False) == 0
    step(store, "a", 0, prompt, 20)
    step(store, "a", 20, [50], 20)
    store.preempt("a")
    assert admit(store, "a", prompt, 22, share=False) == 0
    step(store, "a", 0, [*prompt, 50, 51], 20)
    assert store.requests["a"].filled(0) == 22


def test_a_request_without_a_place_is_computed_again(store: ForebayRows) -> None:
    """Its last chunk is one token beyond its prompt: a prefill all the same."""
    prompt = list(range(20))
    for id in ("a", "b"):
        assert admit(store, id, prompt, share=False) == 0
        step(store, id, 0, prompt, 20)
        step(store, id, 20, [50], 20)
        store.preempt(id)
    assert admit(store, "c", prompt, share=False) == 0
    step(store, "c", 0, prompt, 20)
    step(store, "c", 20, [50], 20)
    # Both places are taken.
    store.preempt("c")
    assert "c" not in store.requests
    assert admit(store, "c", prompt, 22) == 0
    step(store, "c", 0, [*prompt, 50], 20)
    step(store, "c", 21, [51], 20)
    step(store, "c", 22, [52], 20)
    assert store.requests["c"].length == 23
    for id in ("a", "b", "c"):
        store.end(id, [])
    assert store.cache.stats().free_lanes == 2


def test_later_requests_do_not_overtake_one_that_waits() -> None:
    """Within a scan of vLLM's queue, what the first waits for is not given to the next."""
    made = ForebayRows(SHAPE, LIMITS._replace(requests=1), Options(ratio=1.0), 16, torch.float32)
    assert admit(made, "a", [1, 2, 3]) == 0
    assert admit(made, "b", [1, 2, 3]) is None
    made.end("a", [])
    assert admit(made, "c", [1, 2, 3]) is None
    made.scanned()
    assert admit(made, "b", [1, 2, 3]) == 0
    made.close()


@pytest.mark.parametrize("options", [{"slots": 64}, {"slots": 64, "host_memory": 1 << 20}, {"ratio": 0.5}])
@pytest.mark.parametrize("query_rows", [1, 2, 70])
def test_what_fits_holds_the_longest_request(options: dict[str, float], query_rows: int) -> None:
    limits = LIMITS._replace(requests=1, query_rows=query_rows)
    chosen = Options(**options)
    found = fit(SHAPE, limits, chosen, 1 << 30)
    made = ForebayRows(SHAPE, limits, chosen, found.blocks, torch.float32)
    assert made.admit("a", list(range(TOKENS - 1)), TOKENS - 1, TOKENS, b"", True) == 0
    made.close()
