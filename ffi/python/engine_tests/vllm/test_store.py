"""forebay's store without an engine: what vLLM's connector and layers call, in orders that engines rarely use."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forebay.errors import InvalidConfig, OutOfMemory
from forebay.shape import Shape
from forebay.vllm import pool
from forebay.vllm.batch import Batch, BatchRow
from forebay.vllm.options import Options
from forebay.vllm.pool import ForebayRows, Limits, fit, page_bytes, spare
from harness import QUICK

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


def admit(store: ForebayRows, id: str, prompt: list[int], tokens: int = 0, share: bool = True) -> int:
    """What vLLM asks and tells when it schedules a waiting request."""
    found = store.find(id, prompt, tokens or len(prompt), b"", share)
    assert found is not None
    store.admit(id, prompt, tokens or len(prompt), found, b"", share)
    return found


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
    for id in ("a", "b", "d"):
        assert admit(store, id, prompt, share=False) == 0
        step(store, id, 0, prompt, 20)
        step(store, id, 20, [50], 20)
        store.preempt(id)
    assert admit(store, "c", prompt, share=False) == 0
    step(store, "c", 0, prompt, 20)
    step(store, "c", 20, [50], 20)
    # All places are taken.
    store.preempt("c")
    assert "c" not in store.requests
    assert admit(store, "c", prompt, 22) == 0
    step(store, "c", 0, [*prompt, 50], 20)
    step(store, "c", 21, [51], 20)
    step(store, "c", 22, [52], 20)
    assert store.requests["c"].length == 23
    for id in ("a", "b", "c", "d"):
        store.end(id, [])
    assert store.cache.stats().free_lanes == 2


def test_prefixes_are_forgotten() -> None:
    """What was published before `reset_cache` is not found, also by a request that was added before it."""
    store = ForebayRows(SHAPE, LIMITS._replace(requests=3), Options(ratio=1.0, validate=True), 16, torch.float32)
    prompt = list(range(40))
    for id in ("a", "b"):
        assert admit(store, id, prompt) == 0
        step(store, id, 0, prompt, 40)
    step(store, "a", 40, [50], 40)
    assert store.find("c", prompt, 40, b"", True) == 32
    store.forget_prefixes()
    step(store, "b", 40, [50], 40)
    store.end("a", [*prompt, 50])
    store.end("b", [*prompt, 50])
    assert store.find("c", prompt, 40, b"", True) == 0
    assert admit(store, "c", prompt) == 0
    step(store, "c", 0, prompt, 40)
    store.end("c", [*prompt, 50])
    assert store.find("d", prompt, 40, b"", True) == 32
    assert store.find("d", prompt, 40, b"another salt", True) == 0
    store.close()


@pytest.mark.parametrize("pages", [12, 13])
def test_a_preempted_request_gives_its_rows_to_a_running_one(pages: int) -> None:
    """That of the last admission; for a prompt's chunk, or for an answer."""
    limits = LIMITS._replace(requests=3)
    options = Options(slots=16, host_memory=pages * page_bytes(SHAPE, limits), validate=True)
    store = ForebayRows(SHAPE, limits, options, 4, torch.float32)
    prompt = list(range(48))
    for id in ("a", "b"):
        admit(store, id, prompt, share=False)
        step(store, id, 0, prompt, 48)
    step(store, "a", 48, [50], 48)
    # One decodes and one still prefills.
    store.preempt("a")
    store.preempt("b")
    assert store.stats()[0][-3:] == (2, 0, 0)
    assert store.find("a", prompt, 50, b"", True) == 49
    admit(store, "c", prompt, share=False)
    step(store, "c", 0, prompt, 48)
    assert ("b" in store.requests) == (pages == 13)
    step(store, "c", 48, [50], 48)
    assert "b" not in store.requests
    assert admit(store, "a", prompt, 50) == 49
    assert store.stats()[0][-3:] == (2, 1, 1)
    store.close()


def test_a_salt_keeps_prompts_apart() -> None:
    """`cache_salt` of a request."""
    from forebay.vllm.connector import salt_of

    salts = [salt_of(SimpleNamespace(cache_salt=one)) for one in (None, "a", "b", "")]
    assert salts[0] == b"" == salt_of(SimpleNamespace())
    assert len(set(salts)) == 4 and {len(salt) for salt in salts[1:]} == {32}


def test_a_preempted_prefill_gives_its_lane_to_a_running_request(store: ForebayRows) -> None:
    prompt = list(range(20))
    admit(store, "a", prompt)
    step(store, "a", 0, prompt, 20)
    step(store, "a", 20, [50], 20)
    store.preempt("a")
    admit(store, "b", prompt, share=False)
    step(store, "b", 0, prompt[:10], 20)
    store.preempt("b")
    admit(store, "c", prompt, share=False)
    step(store, "c", 0, prompt, 20)
    assert admit(store, "a", prompt, 22) == 21
    step(store, "a", 21, [51], 20)
    assert "b" not in store.requests and store.stats()[0][-3:] == (2, 1, 1)


def test_rows_are_computed_again_after_their_generation(store: ForebayRows) -> None:
    """Of running requests that vLLM takes back too, as for new weights."""
    prompt = list(range(20))
    for id in ("a", "b"):
        admit(store, id, prompt)
        step(store, id, 0, prompt, 20)
    step(store, "a", 20, [50], 20)
    store.preempt("b")
    store.forget_prefixes()
    assert store.find("a", prompt, 22, b"", True) == 0
    assert store.find("b", prompt, 21, b"", True) == 0
    store.admit("a", prompt, 22, 0, b"", True)
    step(store, "a", 0, [*prompt, 50, 51], 20)
    assert len(store.requests) == 1


def test_requests_that_vllm_took_back_are_not_overtaken(store: ForebayRows) -> None:
    """`reset_prefix_cache` takes all running requests back, and vLLM tells of it after it has scheduled."""
    prompt = list(range(20))
    for id in ("a", "b"):
        admit(store, id, prompt)
        step(store, id, 0, prompt, 20)
        step(store, id, 20, [50], 20)
    assert store.find("c", prompt, 20, b"", True) is None
    assert admit(store, "a", prompt, 22) == 21
    store.preempt("b")
    assert admit(store, "c", prompt, 20) == 16


def test_a_second_prompt(store: ForebayRows) -> None:
    """A session whose input comes in parts, up to the whole context."""
    prompt = list(range(20))
    admit(store, "a", prompt)
    step(store, "a", 0, prompt, 20)
    step(store, "a", 20, [50], 20)
    step(store, "a", 21, list(range(30, 72)), 20)
    step(store, "a", 63, [51], 20)
    assert store.requests["a"].length == TOKENS


def test_a_recording_that_fails_ends_alone(tmp_path: Path) -> None:
    """Its file exists already. The requests go on."""
    made = ForebayRows(SHAPE, LIMITS, Options(ratio=1.0, record=str(tmp_path / "r.topk")), 16, torch.float32)
    (tmp_path / "r-1.topk").write_bytes(b"")
    prompt = list(range(20))
    for id in ("a", "b"):
        admit(made, id, prompt)
        step(made, id, 0, prompt, 20)
        for at in range(3):
            step(made, id, 20 + at, [50 + at], 20)
    made.preempt("b")
    assert admit(made, "b", prompt, 24) == 23
    step(made, "b", 23, [53], 20)
    for id in ("a", "b"):
        made.end(id, [*prompt, 50, 51, 52])
    assert len(made.requests) == 0
    assert (tmp_path / "r.topk").stat().st_size > 0 == (tmp_path / "r-1.topk").stat().st_size
    made.close()


@pytest.mark.parametrize(
    "options", [{"slots": 64}, {"slots": 1000}, {"slots": 65, "host_memory": 1 << 20}, {"ratio": 0.5}]
)
@pytest.mark.parametrize("query_rows", [1, 2, 70])
def test_what_fits_holds_the_longest_request(options: dict[str, float], query_rows: int) -> None:
    limits = LIMITS._replace(requests=1, query_rows=query_rows)
    chosen = Options(**options)
    found = fit(SHAPE, limits, chosen, 1 << 30)
    made = ForebayRows(SHAPE, limits, chosen, found.blocks, torch.float32)
    assert admit(made, "a", list(range(TOKENS - 1))) == 0
    step(made, "a", 0, list(range(TOKENS - 1)), TOKENS - 1)
    step(made, "a", TOKENS - 1, [5], TOKENS - 1)
    made.close()


def test_what_does_not_fit_is_refused() -> None:
    limits, ratio = LIMITS._replace(requests=1), Options(ratio=0.5)
    found = fit(SHAPE, limits, ratio, 1 << 23)
    with pytest.raises(OutOfMemory, match="bytes of KV cache memory do not hold the slots and index keys"):
        fit(SHAPE, limits, ratio, 1 << 12)
    with pytest.raises(OutOfMemory, match="bytes of host memory do not hold"):
        fit(SHAPE, limits, ratio, 1 << 23, 1 << 12)
    assert fit(SHAPE, limits, ratio, 1 << 23, 1 << 23).blocks < found.blocks
    with pytest.raises(InvalidConfig, match="host_memory: 65,536 bytes"):
        fit(SHAPE, limits._replace(tokens=1 << 14), Options(ratio=0.5, host_memory=1 << 16), 1 << 30)
    held = 40 * page_bytes(SHAPE, limits)
    assert fit(SHAPE, limits, Options(ratio=0.5, host_memory=held), 1 << 30).blocks == 40 - spare(limits)


class Scheduler:
    """vLLM's scheduler, as far as rows are concerned: blocks by need, the last request preempted when there are none,
    chunks, drafts, aborts. It checks what a request reads against `row_of`."""

    def __init__(self, seed: int, limits: Limits, options: Options, blocks: int) -> None:
        self.chance, self.limits, self.blocks = random.Random(seed), limits, blocks
        self.store = ForebayRows(SHAPE, limits, options, blocks, torch.float32)
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        # Taken back, and the store is not told yet.
        self.taken: list[Any] = []
        self.made = self.preempted = 0

    def add(self) -> None:
        length = self.chance.randint(1, self.limits.tokens // self.chance.choice((1, 4)) - 2)
        begin = self.chance.choice(([], list(range(length // 2))))
        prompt = begin + [self.chance.randrange(100, 200) for _ in range(length - len(begin))]
        answer = self.chance.randint(1, self.limits.tokens - length)
        share = self.chance.random() < 0.8
        made = {"id": str(self.made), "tokens": prompt, "prompt": length, "answer": answer, "share": share}
        self.waiting.append(SimpleNamespace(**made, computed=0, held=0))
        self.made += 1

    def reset(self) -> None:
        """vLLM's `reset_prefix_cache`: all running requests wait again, and others may overtake them (priorities)."""
        self.taken, self.running = self.running, []
        for request in self.taken:
            request.held = request.computed = 0
            self.waiting.insert(self.chance.randint(0, len(self.waiting)), request)
        if self.chance.random() < 0.5:
            self.store.forget_prefixes()

    def _held(self) -> int:
        return sum(one.held for one in self.running)

    def _take(self, request: Any, tokens: int) -> bool:
        """Blocks for a request's tokens, from those that run after it if need be."""
        needed = -(-tokens // self.limits.block)
        while request in self.running and self._held() - request.held + needed > self.blocks:
            last = self.running.pop()
            last.held = last.computed = 0
            self.waiting.insert(0, last)
            self.store.preempt(last.id)
            self.preempted += 1
        if self._held() - request.held + needed > self.blocks:
            return False
        request.held = needed
        return True

    def _width(self, request: Any, budget: int) -> int:
        left = len(request.tokens) - request.computed
        drafts = self.chance.randrange(self.limits.query_rows) if left == 1 else 0
        most = self.limits.tokens - request.computed
        return min(left + drafts, budget, most)

    def pass_(self) -> None:
        budget, rows, preempted, skipped = 48, [], self.preempted, []
        for request in list(self.running):
            width = self._width(request, budget)
            if request in self.running and width and self._take(request, request.computed + width):
                rows.append((request, width))
                budget -= width
        rows = [row for row in rows if row[0] in self.running]
        while self.waiting and budget and len(self.running) < self.limits.requests and preempted == self.preempted:
            request = self.waiting[0]
            given = (request.id, request.tokens[: request.prompt], len(request.tokens))
            found = self.store.find(*given, b"", request.share)
            if found is None:
                skipped.append(self.waiting.pop(0))
                continue
            request.computed = found
            width = self._width(request, budget)
            if not self._take(request, request.computed + width):
                request.computed = 0
                break
            self.store.admit(*given, request.computed, b"", request.share)
            self.running.append(self.waiting.pop(0))
            rows.append((request, width))
            budget -= width
        self.waiting[:0] = skipped
        for request in self.taken:
            if request in self.waiting:
                self.store.preempt(request.id)
                self.preempted += request.id in self.store.requests
        self.taken = []
        if rows:
            self._run(rows)

    def _run(self, rows: list[tuple[Any, int]]) -> None:
        """A pass over the requests; then each has a token more, or drafts were accepted."""
        given, values, first = [], [], 0
        for number, (request, width) in enumerate(rows):
            start = request.computed
            prompt = self.store.prompt(request.id)
            given.append(BatchRow(request.id, number, first, width, start, prompt))
            drafted = request.tokens[start : start + width]
            drafted += [900 + at for at in range(width - len(drafted))]
            values += [row_of(token, start + at) for at, token in enumerate(drafted)]
            first += width
        batch = Batch(given, self.limits.query_rows)
        self.store.begin(batch)
        self.store.write(0, torch.stack(values), torch.stack(values))
        for row in batch.prefills:
            self._check(row, self.store.context(0, row))
            last = self.chance.sample(range(row.end), min(4, row.end))
            self.store.selected(0, row, torch.tensor([last], dtype=torch.int64))
        if batch.decodes:
            places = torch.tensor([[self.chance.randrange(row.start + 1) for _ in range(4)] for row in batch.decodes])
            selection = places.sort(dim=-1).values[:, None].expand(-1, batch.at.shape[1], -1)
            distinct = torch.cat([selection[..., :1] >= 0, selection[..., 1:] != selection[..., :-1]], dim=-1)
            selection = torch.where(distinct, selection, -1)
            rows_, valid = self.store.gather(0, selection.contiguous())
            for number, row in enumerate(batch.decodes):
                tokens = self._by_id(row.id).tokens
                for query in range(row.width):
                    for place, found, used in zip(selection[number, query], rows_[number, query], valid[number, query]):
                        assert bool(used) == (int(place) >= 0)
                        assert not used or torch.equal(found, row_of(tokens[place], int(place)))
        self.store.attended(0)
        self.store.finish()
        for request, width in rows:
            self._accept(request, width)

    def _check(self, row: BatchRow, context: torch.Tensor) -> None:
        tokens = self._by_id(row.id).tokens
        expected = [row_of(token, at) for at, token in enumerate(tokens[: row.end])]
        assert torch.equal(context[: len(expected)], torch.stack(expected))

    def _by_id(self, id: str) -> Any:
        return next(one for one in self.running if one.id == id)

    def _accept(self, request: Any, width: int) -> None:
        known = len(request.tokens) - request.computed
        if width < known:
            request.computed += width
            return
        accepted = self.chance.randint(0, width - known)
        # An accepted draft is the token that its row was computed for.
        request.computed += known + accepted
        request.tokens += [900 + at for at in range(accepted)] + [self.chance.randrange(100, 200)]
        if len(request.tokens) >= request.prompt + request.answer or self.chance.random() < 0.02:
            del request.tokens[request.prompt + request.answer :]
            self.running.remove(request)
            self.store.end(request.id, request.tokens)

    def abort(self) -> None:
        for queue in (self.running, self.waiting):
            if queue and self.chance.random() < 0.5:
                request = queue.pop(self.chance.randrange(len(queue)))
                request.held = 0
                self.store.end(request.id, request.tokens)


@pytest.mark.parametrize("seed", range(3 if QUICK else 12))
@pytest.mark.parametrize(
    ("options", "blocks"),
    [({"ratio": 1.0}, 18), ({"ratio": 0.25}, 18), ({"slots": 8}, 24), ({"ratio": 0.5, "host_memory": 1 << 16}, 20)],
)
def test_a_pass_never_lacks_room(
    options: dict[str, Any], blocks: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that counts blocks as vLLM does: no pass fails, and every row is the request's own. Answers grow by
    one page at a time, by two, or at once to the whole context."""
    monkeypatch.setattr(pool, "AHEAD", (1, BLOCK, 128)[seed % 3])
    limits = LIMITS._replace(requests=4, tokens=256, query_rows=1 + seed // 3 % 3)
    made = Scheduler(seed, limits, Options(**options, validate=True), blocks)
    for turn in range(500):
        if turn < 400 and len(made.waiting) < 4 and made.chance.random() < 0.3:
            made.add()
        if made.chance.random() < 0.03:
            made.abort()
        if made.chance.random() < 0.02:
            made.reset()
        made.pass_()
    while made.running or made.waiting:
        made.pass_()
    counts = made.store.stats()[0]
    assert counts.resumed > 0 and counts.hits > 100
    stats = made.store.cache.stats()
    assert (stats.free_lanes, stats.parked, len(made.store.requests)) == (4, 0, 0)
    made.store.close()
    assert made.made > 10
