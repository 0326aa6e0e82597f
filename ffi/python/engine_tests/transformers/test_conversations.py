"""Conversations of 20 turns with rejected drafts and crops, by seed: each logit against the stock cache's and the
twin's, and nothing left over: pages, lanes, slots, process memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from forebay.transformers import ForebayCache, check, models
from harness import FAMILIES, QUICK, forward, model, resident_bytes, some, stock_cache

TURNS, TURN, DRAFTS, LAYERS = 20, 8, 3, 2
LONGEST = TURNS * 2 * TURN + DRAFTS + 1
SEEDS = 12 if QUICK else 100


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
    resident = []
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
            resident.append(resident_bytes())
    # The first conversations still fill torch's and Python's own caches.
    later = resident[len(resident) // 3 :]
    assert later[-1] - later[0] < 8 << 20, resident


def test_caches_that_come_and_go_leave_no_memory() -> None:
    """A cache of its own for each conversation."""
    of, tokens = model("deepseek_v32", layers=LAYERS), models.prompts(1, 40, seed=1)
    resident = []
    for _number in range(12 if QUICK else 40):
        cache = ForebayCache(of.config, ratio=0.5, max_tokens=4096)
        forward(of, tokens, cache)
        forward(of, tokens[:, :1], cache)
        del cache
        resident.append(resident_bytes())
    later = resident[len(resident) // 3 :]
    assert later[-1] - later[0] < 8 << 20, resident
