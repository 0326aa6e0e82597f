"""Decoding against a naive model of the rule, and against the rows that were written."""

from __future__ import annotations

import random
from typing import Any, Callable

import numpy as np
import pytest

import forebay
from conftest import LAYERS, ROW, TOP_K, empty, joined, row_of, some, whole

Make = Callable[..., forebay.Cache]


class Naive:
    """The resident rows of one sequence in one layer: a list, oldest first (the rule of `residency`)."""

    def __init__(self, budget: int, resident: list[int]) -> None:
        self.budget, self.order = budget, resident

    def step(self, selected: set[int]) -> tuple[int, int]:
        """Returns hits and misses of a step, and updates the order."""
        hits = len(selected & set(self.order))
        self.order = [p for p in self.order if p not in selected] + sorted(selected)
        self.order = self.order[-self.budget :]
        return hits, len(selected) - hits

    def born(self, positions: list[int]) -> None:
        self.order = (self.order + positions)[-self.budget :]


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_random_steps_equal_a_naive_lru_and_read_the_written_rows(
    make: Make, threads: bool, seed: int
) -> None:
    chance = random.Random(seed)
    cache = make(forebay.HostDevice(threads=threads))
    sequences = [joined(cache, 20 + 7 * at, 40) for at in range(3)]
    naive = [[Naive(16, []) for _ in range(LAYERS)] for _ in sequences]
    lengths, landed = [20 + 7 * at for at in range(3)], [0, 0, 0]
    for _ in range(18):
        # Rows are accepted from the first one on; rejected ones are overwritten.
        accepted = [chance.randint(0, count) for count in landed]
        for at, count in enumerate(accepted):
            for model in naive[at]:
                model.born(list(range(lengths[at], lengths[at] + count)))
            lengths[at] += count
        width = chance.randint(1, 2)
        step = cache.prepare([(s, accepted[at], width) for at, s in enumerate(sequences)], query_rows=width)
        hits = [0] * LAYERS
        misses = [0] * LAYERS
        for layer in range(LAYERS):
            # All rows of a step are resident: 8 of 16 slots, and landing slots.
            selection = np.full((3, width, TOP_K), -1, np.int32)
            for at in range(3):
                pool = chance.sample(range(lengths[at]), 6)
                for query in range(width):
                    chosen = chance.sample(pool, 5)
                    selection[at, query, : len(chosen)] = chosen
                union = set(selection[at].ravel().tolist()) - {-1}
                hit, miss = naive[at][layer].step(union)
                hits[layer] += hit
                misses[layer] += miss
            slots = empty(3, width)
            step.layer(layer, selection, slots)
            cache.device.wait()
            check_slots(cache, layer, selection, slots)
            slab = cache.slab(layer)
            for at, sequence in enumerate(sequences):
                for query in range(width):
                    slot = sequence.landing_slot(query)
                    slab[slot // 64, slot % 64] = row_of(layer, lengths[at] + query)
            step.scatter(layer)
        landed = [width] * 3
        retired = step.retire(wait=True)
        assert [count.hits for count in retired.layers] == hits
        assert [count.misses for count in retired.layers] == misses
        assert (retired.hits, retired.misses) == (sum(hits), sum(misses))
        assert retired.lengths.tolist() == lengths
        cache.validate()
    for at, sequence in enumerate(sequences):
        for layer in range(LAYERS):
            for position in range(lengths[at]):
                assert bytes(sequence.read_row(layer, position)) == bytes(row_of(layer, position))


def check_slots(cache: forebay.Cache, layer: int, selection: Any, slots: Any) -> None:
    """Checks that each slot has the selected row."""
    slab = cache.slab(layer)
    assert slab.shape[1:] == (64, ROW)
    for position, slot in zip(selection.ravel().tolist(), slots.ravel().tolist()):
        if position == -1:
            assert slot == -1
        else:
            assert bytes(slab[slot // 64, slot % 64]) == bytes(row_of(layer, position))


def test_all_ways_of_calling_a_layer_give_the_same_result(make: Make) -> None:
    answers = []
    for way in range(4):
        cache = make()
        sequence = joined(cache, bring_up="nothing")
        selection, slots = some(3, 1, 4, 1, 5), empty()
        step = cache.prepare([(sequence, 0, 1)])
        if way == 0:
            for layer in range(LAYERS):
                step.layer(layer, selection, slots)
        elif way == 1:
            buffers = forebay.Buffers(cache, selection, slots)
            for layer in range(LAYERS):
                step.layer(layer, buffers)
        elif way == 2:
            all_slots = np.empty((LAYERS, 1, 1, TOP_K), np.int32)
            step.layers(np.stack([selection] * LAYERS), all_slots)
            slots = all_slots[-1]
        else:
            buffers = forebay.Buffers.empty(cache, 1, 1, split=True)
            buffers.selection[:] = selection
            for layer in range(LAYERS):
                step.resolve(layer, buffers)
                step.gather(layer)
            slots = buffers.slots
            assert buffers.counts.ravel().tolist() == [0, 5]
            assert sorted(buffers.lists[1].ravel()[:5].tolist()) == sorted(slots.ravel()[:5].tolist())
        for layer in range(LAYERS):
            step.scatter(layer)
        retired = step.retire()
        answers.append((slots.tolist(), retired.layers, retired.hits, sequence.digest() != 0, sequence.length))
    assert answers[0] == answers[1] == answers[2]
    # A position that is selected twice is one row.
    assert answers[0][1] == [(0, 4, 0)] * LAYERS
    assert answers[3][1] == [(0, 4, 0)] * LAYERS


def test_all_layers_at_once_are_refused_where_a_row_might_be_in_a_scratch_slot(make: Make) -> None:
    cache = make(slots=TOP_K // 2)
    sequence = joined(cache, bring_up="nothing")
    selection = np.stack([some(*range(layer, layer + TOP_K)) for layer in range(LAYERS)])
    slots = np.full((LAYERS, 1, 1, TOP_K), -77, np.int32)
    step = cache.prepare([(sequence, 0, 1)])
    with pytest.raises(forebay.InvalidConfig, match="layer 0, batch row 0, selected 8, budget 4.*call layer by layer"):
        step.layers(selection, slots)
    assert (slots == -77).all()
    # The step continues, one layer at a time.
    for layer in range(LAYERS):
        step.layer(layer, selection[layer], slots[layer])
        check_slots(cache, layer, selection[layer], slots[layer])
        step.scatter(layer)
    assert [count.scratch for count in step.retire().layers] == [TOP_K // 2] * LAYERS


def test_a_step_is_a_context_manager(make: Make) -> None:
    cache = make()
    sequence = joined(cache)
    with cache.prepare([(sequence, 0, 1)]) as step:
        step.layer(0, some(1), empty())
        whole(step, 0)
        assert repr(step) == "<forebay.Step of 1 row, open>"
    assert step.retired is not None and step.retired.step == 1
    with pytest.raises(forebay.Closed):
        step.retire()
    with pytest.raises(RuntimeError, match="half-way"):
        with cache.prepare([(sequence, 0, 1)]) as step:
            step.layer(0, some(1), empty())
            raise RuntimeError("half-way")
    # The step was abandoned: only a truncate can follow.
    with pytest.raises(forebay.ForebayError):
        cache.prepare([(sequence, 0, 1)])
    sequence.truncate(40)
    with cache.prepare([(sequence, 0, 1)]) as step:
        whole(step)
    assert cache.stats().steps_in_flight == 0


def test_a_position_beyond_the_length_fails_the_step_and_is_named(make: Make) -> None:
    cache = make()
    sequence = joined(cache)
    step = cache.prepare([(sequence, 0, 1)])
    step.layer(1, some(3, 40, 999), empty())
    whole(step, 1)
    with pytest.raises(forebay.DeviceFailed, match="999|40") as caught:
        step.retire()
    assert (caught.value.kind, caught.value.status) == ("DeviceFailed", 9)
    sequence.truncate(40)
    with cache.prepare([(sequence, 0, 1)]) as step:
        step.layer(1, some(3), empty())
        whole(step, 1)


def test_slots_by_layer_and_rows_in_two_runs(make: Make) -> None:
    shape = forebay.Shape(layers=2, row_bytes=(16, 8), top_k=TOP_K, page_tokens=16)
    cache = make(shape=shape, slots=[16, 32])
    with cache.open(prompt=20) as sequence:
        rows = np.arange(20 * 24, dtype=np.uint8).reshape(20, 24)
        for layer in range(2):
            sequence.append(layer, rows)
        sequence.join()
        with cache.prepare([(sequence, 0, 1)]) as step:
            slots = empty()
            for layer in range(2):
                step.layer(layer, some(7, 19), slots)
                first, second = cache.slab(layer), cache.slab(layer, run=1)
                assert first.shape[1:] == (64, 16) and second.shape[1:] == (64, 8)
                for at, position in enumerate((7, 19)):
                    slot = int(slots[0, 0, at])
                    found = np.concatenate([first[slot // 64, slot % 64], second[slot // 64, slot % 64]])
                    assert (found == rows[position]).all()
                step.scatter(layer)
        assert step.retired is not None
        # 20 rows fit 32 slots but not 16: the second layer loaded all of them.
        assert step.retired.layers == [(0, 2, 0), (2, 0, 0)]
    with pytest.raises(forebay.InvalidArgument, match="run"):
        cache.slab(0, run=2)
    assert cache.info.block_bytes == 64 * 24


def test_numbers_of_accepted_rows_may_be_on_the_device(make: Make) -> None:
    cache = make()
    sequence = joined(cache)
    accepted = np.zeros(4, np.int32)
    with cache.prepare([(sequence, None, 2)], accepted=accepted) as step:
        whole(step)
    accepted[0] = 2
    with cache.prepare([(sequence, None, 2)], accepted=accepted.view(np.uint32)) as step:
        whole(step)
    assert step.retired is not None and step.retired.lengths.tolist() == [42]
    with pytest.raises(forebay.InvalidArgument, match="accepted"):
        cache.prepare([(sequence, None, 2)], accepted=np.zeros(3, np.int32))
