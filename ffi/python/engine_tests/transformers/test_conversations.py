"""Conversations of 20 turns with rejected drafts and crops, by seed: each logit against the stock cache's and the
twin's, and nothing left over: pages, lanes, slots, process memory."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from forebay.transformers import ForebayCache, check, models
from harness import FAMILIES, QUICK, forward, model, objects, resident_bytes, some, stock_cache

TURNS, TURN, DRAFTS, LAYERS = 20, 8, 3, 2
LONGEST = TURNS * 2 * TURN + DRAFTS + 1
SEEDS = 6 if QUICK else 100


class Talk:
    """One conversation on several caches: each gets the same tokens, and each logit is compared."""

    def __init__(self, of: Any, caches: list[Any], seed: int) -> None:
        self.of, self.caches, self.dice = of, caches, random.Random(seed)
        self.batch = self.dice.choice([1, 1, 2, 3])
        self.length = 0

    def feed(self, count: int) -> None:
        """A forward pass over `count` random tokens."""
        tokens = torch.tensor([[self.dice.randrange(1, 256) for _ in range(count)] for _ in range(self.batch)])
        ours, twin, stock = (forward(self.of, tokens, cache) for cache in self.caches)
        assert check.same_bits(ours, twin)
        torch.testing.assert_close(ours, stock, atol=2e-3, rtol=2e-3)
        self.length += count

    def crop(self, count: int) -> None:
        """Takes the last `count` tokens back."""
        for cache in self.caches:
            cache.crop(-count)
        self.length -= count
        assert {cache.get_seq_length() for cache in self.caches} == {self.length}

    def turn(self) -> None:
        """What the user says, in chunks or at once; an answer with drafts, of which some are rejected; sometimes the
        end of the conversation is taken back, as by a user who asks again."""
        said = 1 + self.dice.randrange(TURN)
        while said:
            chunk = min(said, 1 + self.dice.randrange(2 * TURN))
            self.feed(chunk)
            said -= chunk
        answered = 0
        while answered < TURN:
            drafts = self.dice.randrange(DRAFTS + 1)
            self.feed(1 + drafts)
            if rejected := self.dice.randrange(drafts + 1):
                self.crop(rejected)
            answered += 1 + drafts - rejected
            if answered >= TURN + DRAFTS:
                break
        if self.dice.randrange(4) == 0:
            self.crop(1 + self.dice.randrange(min(self.length - 1, 3 * TURN)))


def gauges(cache: ForebayCache) -> tuple[int, ...]:
    """What must be as it was: sequences, steps in flight, free pages, slots and lanes."""
    stats = cache.stats()
    return (
        stats.sequences, stats.steps_in_flight, stats.free_host_pages, stats.free_index_pages, stats.free_slots,
        stats.free_lanes, stats.slots_in_use,
    )  # fmt: skip


@pytest.mark.parametrize("family", some(("deepseek_v32", "glm_moe_dsa"), FAMILIES))
def test_twenty_turns_leave_nothing_behind(family: str) -> None:
    """Two conversations at least on the same cache, with a reset between them. All seeds over all families."""
    of = model(family, layers=LAYERS)
    options = {"max_tokens": LONGEST, "batch": 3, "drafts": DRAFTS}
    families = some(("deepseek_v32", "glm_moe_dsa"), FAMILIES)
    seeds = range(list(families).index(family), SEEDS, len(families))
    left = []
    with ForebayCache(of.config, ratio=0.25, **options) as cache, ForebayCache(of.config, ratio=1, **options) as twin:
        start = None
        for seed in seeds:
            talk = Talk(of, [cache, twin, stock_cache(of)], seed)
            for _turn in range(TURNS):
                talk.turn()
            cache.validate()
            for kept in (cache, twin):
                kept.reset()
            start = start or gauges(cache)
            assert gauges(cache) == start, seed
            assert cache.stats().sequences == 0
            # Without what is kept for each number of batch rows.
            left.append({kind: count for kind, count in objects().items() if kind not in ("Buffers", "Work")})
    assert all(one == left[0] for one in left), left


LIMIT = 16 << 20
"""The most bytes that the process grows by; a cache of the next tests has more."""
LARGE = 1 << 16
"""Their tokens."""


class Left(NamedTuple):
    """What is left after each cache: objects of forebay by class, and by how many bytes the process grew."""

    objects: list[dict[str, int]]
    grown: int


def come_and_go(count: int, keep: int | None = None) -> Left:
    """Makes, uses and drops `count` caches of 24 MiB, but not the one of number `keep`."""
    of, tokens = model("deepseek_v32", layers=LAYERS), models.prompts(1, 40, seed=1)
    counted, resident, kept = [], [], []
    for number in range(count):
        cache = ForebayCache(of.config, ratio=0.01, max_tokens=LARGE)
        forward(of, tokens, cache)
        forward(of, tokens[:, :1], cache)
        for layer in range(LAYERS):
            cache.forebay.rows(layer)[:] = 1
        if number == keep:
            kept.append(cache)
        del cache
        counted.append(objects())
        resident.append(resident_bytes())
    # The first caches still fill torch's and Python's own memory.
    return Left(counted, resident[-1] - resident[min(2, count - 1)])


def test_caches_that_come_and_go_leave_no_memory() -> None:
    """A cache of its own for each conversation."""
    found = come_and_go(12 if QUICK else 40)
    assert all(one == found.objects[0] for one in found.objects), found
    assert found.grown < LIMIT, found


def test_control_one_cache_that_stays_is_found() -> None:
    """By its objects, and by its bytes."""
    found = come_and_go(6, keep=4)
    assert found.objects[4] != found.objects[3]
    assert found.grown > LIMIT, found
