"""Sequences apart from their steps: forks, truncation, warm-ups, shared prefixes, tickets, lengths, pages."""

from __future__ import annotations

from typing import Callable

import numpy as np
import pytest

import forebay
from conftest import LAYERS, TOP_K, empty, joined, row_of, rows_of, some, whole

Make = Callable[..., forebay.Cache]


def decode(cache: forebay.Cache, sequence: forebay.Sequence, accepted: int, length: int) -> None:
    with cache.prepare([(sequence, accepted, 1)]) as step:
        for layer in range(LAYERS):
            slot = sequence.landing_slot(0)
            cache.slab(layer)[slot // 64, slot % 64] = row_of(layer, length)
        whole(step)


def test_a_sequence_from_open_to_close(make: Make) -> None:
    cache = make()
    free = cache.stats()
    sequence = cache.open(prompt=40, promised=16)
    assert sequence.length == forebay.Length(0, 0, 0, False, False, 0)
    for layer in range(LAYERS):
        sequence.append(layer, rows_of(layer, 0, 16))
        sequence.append(layer, rows_of(layer, 16, 24).view(np.float32))
    ticket = sequence.join()
    assert (ticket.outcome, ticket.done) == ("done", True)
    assert sequence.length == forebay.Length(40, 0, 0, True, False, 40)
    pages = sequence.pages()
    assert len(pages) == (40 + 16 + 4 + 15) // 16 and len({page.host for page in pages}) == len(pages)
    keys = cache.index_keys(0)
    assert keys.shape == (cache.info.index_pages, 16, 4)
    keys[pages[0].index_keys, 3] = 9
    decode(cache, sequence, 0, 40)
    assert sequence.length == forebay.Length(40, 1, 0, True, False, 40)
    decode(cache, sequence, 1, 41)
    assert sequence.length.committed == 41
    assert bytes(sequence.read_row(2, 40)) == bytes(row_of(2, 40))
    assert not sequence.closed
    sequence.close()
    sequence.close()
    assert sequence.closed
    with pytest.raises(forebay.Closed):
        sequence.length
    assert cache.stats()._replace(steps=0, hits=0, misses=0, bytes_up=0) == free


def test_prompt_rows_may_be_written_in_place(make: Make) -> None:
    cache = make()
    sequence = cache.open(prompt=40)
    for layer in range(LAYERS):
        rows = cache.rows(layer)
        assert rows.shape == (cache.info.host_pages, 16, 64) and rows.flags.writeable
        for position in range(40):
            rows[sequence.pages()[position // 16].host, position % 16, :16] = row_of(layer, position)
    sequence.append_in_place(40)
    sequence.join()
    slots = empty()
    with cache.prepare([(sequence, 0, 1)]) as step:
        step.layer(2, some(33), slots)
        whole(step, 2)
    slot = int(slots[0, 0, 0])
    assert bytes(cache.slab(2)[slot // 64, slot % 64]) == bytes(row_of(2, 33))
    cache.close()
    cache.device.close()
    # The view keeps the memory alive.
    assert (rows[:, :, 12:16] == 0).sum() > 0


def test_a_prompt_is_admitted_by_chunks(make: Make) -> None:
    cache = make()
    sequence = cache.open(prompt=10)
    for layer in range(LAYERS):
        sequence.append(layer, rows_of(layer, 0, 10))
    pages = len(sequence.pages())
    for prompt, promised in ((9, 10), (10, 1 << 31), (129, 0)):
        with pytest.raises(forebay.OutOfRange):
            sequence.extend(prompt=prompt, promised=promised)
    for name, tokens in (("prompt", (-1, 0)), ("promised", (10, 1.5))):
        with pytest.raises(forebay.InvalidArgument, match=name):
            sequence.extend(prompt=tokens[0], promised=tokens[1])  # type: ignore[arg-type]
    assert len(sequence.pages()) == pages
    sequence.extend(prompt=43, promised=16)
    assert len(sequence.pages()) == (43 + 16 + 4 + 15) // 16
    with pytest.raises(forebay.InvalidState):
        sequence.join()
    for layer in range(LAYERS):
        sequence.append(layer, rows_of(layer, 10, 33))
    # Three drafts came with the last chunk.
    assert sequence.truncate(40).done
    assert sequence.length == forebay.Length(0, 0, 0, False, False, 40)
    sequence.join()
    with pytest.raises(forebay.InvalidState):
        sequence.extend(prompt=50, promised=9)
    decode(cache, sequence, 0, 40)
    for position in (0, 9, 10, 39):
        assert bytes(sequence.read_row(1, position)) == bytes(row_of(1, position))
    cache.validate()


def test_a_conversation_parks_between_its_turns(make: Make) -> None:
    cache = make(parked=1)
    free = cache.stats()
    sequence, other = joined(cache), joined(cache, 20)
    length = 40
    for turn in range(3):
        decode(cache, sequence, 0, length)
        running = cache.stats()
        with pytest.raises(forebay.OutOfRange):
            sequence.park(2)
        sequence.park(1)
        length += 1
        parked = cache.stats()
        assert (parked.parked, parked.free_lanes, parked.free_host_pages) == (
            1, running.free_lanes + 1, running.free_host_pages)  # fmt: skip
        assert parked.slots_in_use < running.slots_in_use
        assert sequence.length == forebay.Length(length, 0, 0, False, True, length)
        for refused in (sequence.park, sequence.join, sequence.digest, lambda: sequence.landing_slot(0)):
            with pytest.raises(forebay.InvalidState):
                refused()
        with pytest.raises(forebay.Exhausted, match="parked"):
            other.park()
        # The turn's rows.
        sequence.extend(prompt=length + 10, promised=16)
        with pytest.raises(forebay.InvalidState):
            sequence.resume()
        for layer in range(LAYERS):
            sequence.append(layer, rows_of(layer, length, 10))
        length += 10
        ticket = sequence.resume()
        assert ticket.done and sequence.length == forebay.Length(length, 0, 0, True, False, length)
        with pytest.raises(forebay.InvalidState):
            sequence.resume()
        for position in (0, 39, length - 1):
            assert bytes(sequence.read_row(2, position)) == bytes(row_of(2, position)), (turn, position)
        cache.validate()
    for name, call in (
        ("accepted", lambda: sequence.park(-1)),
        ("bytes_a_call", lambda: sequence.resume(bytes_a_call=-1)),
        ("bytes_a_call", lambda: sequence.resume(bytes_a_call=1.5)),  # type: ignore[arg-type]
    ):
        with pytest.raises(forebay.InvalidArgument, match=name):
            call()
    sequence.park()
    sequence.close()
    other.close()
    for call in (sequence.park, sequence.resume, lambda: sequence.extend(prompt=99)):
        with pytest.raises(forebay.Closed):
            call()
    assert cache.stats()._replace(steps=0, hits=0, misses=0, bytes_up=0) == free


def test_a_resume_may_gather_in_parts(make: Make) -> None:
    cache = make(parked=1)
    sequence = joined(cache)
    slots = empty()
    with cache.prepare([(sequence, 0, 1)]) as step:
        step.layer(2, some(33), slots)
        whole(step, 2)
    sequence.park(1)
    sequence.resume(bytes_a_call=64)
    while not sequence.length.running:
        sequence.join_more()
    with cache.prepare([(sequence, 0, 1)]) as step:
        step.layer(2, some(33), slots)
        whole(step, 2)
    slot = int(slots[0, 0, 0])
    assert bytes(cache.slab(2)[slot // 64, slot % 64]) == bytes(row_of(2, 33))


def test_a_fork_decodes_independently_of_its_parent(make: Make) -> None:
    cache = make()
    parent = joined(cache)
    child, ticket = parent.fork(promised=8)
    assert ticket.done and child.length.committed == 40
    assert parent.pages()[0] == child.pages()[0] and parent.pages()[2] != child.pages()[2]
    decode(cache, child, 0, 40)
    child.truncate(41)
    assert bytes(child.read_row(0, 40)) == bytes(row_of(0, 40))
    assert parent.length.committed == 40
    with pytest.raises(forebay.OutOfRange):
        child.truncate(42)
    with pytest.raises(forebay.InvalidArgument, match="length"):
        child.truncate(-1)
    child.truncate(20)
    assert child.length.committed == 20
    cache.validate()


def test_a_prefix_is_shared_by_content(make: Make) -> None:
    cache = make()
    ids = np.arange(100, 140, dtype=np.int64)
    first = cache.open(prompt=40, tokens=ids, salt=b"tenant")
    assert first.shared == 0
    for layer in range(LAYERS):
        first.append(layer, rows_of(layer, 0, 40))
    first.join()
    assert first.publish(0, ids.tolist()) == 32
    assert first.length.published == 32
    assert cache.find_shared(ids, salt=b"tenant") == 32
    assert cache.find_shared(ids) == 0
    second = cache.open(prompt=40, tokens=ids, salt=b"tenant")
    assert second.shared == 32 and second.pages()[:2] == first.pages()[:2]
    for layer in range(LAYERS):
        second.append(layer, rows_of(layer, 32, 8))
    second.join()
    assert bytes(second.read_row(1, 5)) == bytes(row_of(1, 5))
    keys = [b"0123456789abcdef", None]
    assert cache.find_shared(ids, keys=keys, salt=b"tenant") == 0
    image = cache.open(prompt=40, tokens=ids, keys=keys)
    for layer in range(LAYERS):
        image.append(layer, rows_of(layer, 0, 40))
    image.join()
    assert image.publish(0, ids, keys=keys) == 32
    assert cache.find_shared(ids, keys=keys) == 32
    assert cache.find_shared(ids, keys=[b"fedcba9876543210", None]) == 0
    with pytest.raises(forebay.InvalidArgument, match=r"keys\[0\]"):
        cache.find_shared(ids, keys=[b"short", None])
    for wrong in ([-1], [1 << 32], [[1]], [0.5], ["a"]):
        with pytest.raises(forebay.InvalidArgument, match="tokens"):
            cache.find_shared(wrong)
    with pytest.raises(forebay.OutOfRange):
        cache.open(prompt=10, tokens=ids)
    stats = cache.stats()
    assert (stats.shared_tokens, stats.published_pages) == (32, 4)


def test_a_warm_up_loads_the_selected_rows(make: Make) -> None:
    cache = make()
    sequence = cache.open(prompt=40, promised=4, bring_up="nothing")
    for layer in range(LAYERS):
        sequence.append(layer, rows_of(layer, 0, 40))
    warm_up = np.full((LAYERS, 2, TOP_K), -1, np.int32)
    warm_up[:, 0, :3], warm_up[:, 1, :3] = (1, 2, 3), (3, 4, 5)
    with pytest.raises(forebay.InvalidArgument, match="warm_up"):
        sequence.join(warm_up=warm_up[:2])
    ticket = sequence.join(warm_up=warm_up, bytes_a_call=16 * 4)
    while not sequence.length.running:
        ticket = sequence.join_more()
    assert ticket.done
    with cache.prepare([(sequence, 0, 1)]) as step:
        for layer in range(LAYERS):
            step.layer(layer, some(1, 2, 3, 4, 5, 6), empty())
            step.scatter(layer)
    assert step.retired is not None and step.retired.layers == [(5, 1, 0)] * LAYERS


def test_a_budget_changes_between_steps(make: Make) -> None:
    cache = make(lanes=2, slots=64, min_budget=8, pool_slots=192)
    sequence = joined(cache, 100, 20)
    assert sequence.budgets == (8,) * LAYERS and cache.stats().slots_in_use == LAYERS * 64
    # Slots beyond the 120 tokens and the four rows in flight are not taken.
    for given, budgets, blocks in (
        ({"slots": 70}, (70, 70, 70), 6),
        ({"ratio": 0.5}, (60, 60, 60), 3),
        ({"slots": np.int64(9)}, (9, 9, 9), 3),
        ({"slots": [8, 65, 190]}, (8, 65, 124), 5),
        ({"slots": np.array([128, 8, 8])}, (124, 8, 8), 4),
    ):
        before = cache.stats().resizes
        sequence.resize(**given, stream=cache.device.stream())  # type: ignore[arg-type]
        stats = cache.stats()
        assert (sequence.budgets, stats.slots_in_use, stats.resizes) == (budgets, blocks * 64, before + 1)
        slots = empty()
        with cache.prepare([(sequence, 0, 1)]) as step:
            for layer in range(LAYERS):
                step.layer(layer, some(*range(90, 97)), slots)
                for position, slot in zip(range(90, 97), slots.ravel().tolist()):
                    assert bytes(cache.slab(layer)[slot // 64, slot % 64]) == bytes(row_of(layer, position))
                step.scatter(layer)
        sequence.truncate(100)
        cache.validate()
    sequence.close()
    assert cache.stats().slots_in_use == 0
    # Of the 100 rows that a join brings up, the newest 70 stay; those at positions 70 to 99 move.
    moved = cache.stats().moved_rows
    sequence = joined(cache, 100, 20, slots=100)
    sequence.resize(slots=70)
    with cache.prepare([(sequence, 0, 1)]) as step:
        whole(step)
    assert cache.stats().moved_rows == moved + 30 * LAYERS


def test_a_resize_that_does_not_fit_is_refused_and_changes_nothing(make: Make) -> None:
    cache = make(lanes=3, max_tokens=256, slots=8, pool_slots=192)
    sequence, other = joined(cache, 100, 100, slots=64), joined(cache, 100, 20)
    waits = cache.open(prompt=8)
    for error, says, given in (
        (forebay.InvalidArgument, "slots: got None without a ratio; expected slots or a ratio", {}),
        (forebay.InvalidArgument, "slots: got 0; expected a whole number from 1", {"slots": 0}),
        (forebay.InvalidArgument, "slots: got 2 numbers; expected 3, one a layer", {"slots": [64, 64]}),
        (forebay.InvalidArgument, "slots: got 1.5; expected whole numbers", {"slots": 1.5}),
        (forebay.InvalidArgument, "ratio: got 2; expected a number above 0 and at most 1", {"ratio": 2}),
        (forebay.InvalidArgument, "stream", {"slots": 70, "stream": 7}),
        (forebay.InvalidConfig, "set one of them", {"slots": 70, "ratio": 0.5}),
        (forebay.InvalidConfig, "slots 7, least 8", {"slots": 7}),
        (forebay.OutOfRange, "slots of a layer .layer 1, wanted 204, most 192.", {"slots": [64, 250, 64]}),
        (forebay.Exhausted, "free", {"slots": 65}),
    ):
        with pytest.raises(error, match=says):
            sequence.resize(**given)  # type: ignore[arg-type]
    with pytest.raises(forebay.InvalidState):
        waits.resize(slots=8)
    step = cache.prepare([(sequence, 0, 1)])
    with pytest.raises(forebay.Busy, match="a step of the sequence is open"):
        sequence.resize(slots=8)
    whole(step)
    step.retire()
    assert (sequence.budgets, cache.stats().resizes) == ((64,) * LAYERS, 0)
    # A forgotten sequence gives its slots up.
    del other
    sequence.resize(slots=65)
    assert sequence.budgets == (65,) * LAYERS
    sequence.close()
    for call in (lambda: sequence.resize(slots=8), lambda: sequence.budgets):
        with pytest.raises(forebay.Closed):
            call()


@pytest.mark.parametrize("by", ["equal", "length", "misses"])
def test_a_cache_with_a_share_divides_its_slots(make: Make, by: str) -> None:
    cache = make(lanes=3, max_tokens=256, slots=8, pool_slots=192, share=forebay.Share(by, resizes_a_step=1))
    alone = joined(cache, 150, 38)
    digest = cache.budgets_digest()
    # All slots are in use, and 128 can still be promised to others.
    assert alone.budgets == (192,) * LAYERS and cache.stats().free_slots == 128
    with pytest.raises(forebay.InvalidConfig, match="the cache shares its slots"):
        alone.resize(slots=64)
    decode(cache, alone, 0, 150)
    other = cache.open(prompt=40)
    assert other.budgets == (0,) * LAYERS
    for layer in range(LAYERS):
        other.append(layer, rows_of(layer, 0, 40))
    other.join()
    assert (alone.budgets, other.budgets) == ((128,) * LAYERS, (44,) * LAYERS)
    assert cache.budgets_digest() != digest
    other.close()
    decode(cache, alone, 1, 151)
    assert (cache.share_slots(), cache.share_slots()) == (1, 0)
    assert (alone.budgets, cache.budgets_digest()) == ((192,) * LAYERS, digest)
    cache.validate()


def test_an_invalid_share_is_refused_and_named(make: Make) -> None:
    for share, says in (
        ("equal", "share: got str; expected a Share"),
        (forebay.Share("evenly"), "share.by: got 'evenly'; expected 'equal' or 'length' or 'misses'"),
        (forebay.Share(every=-1), "share.every: got -1; expected a whole number from 0"),
        (forebay.Share(least_change=0), "share.least_change: got 0; expected a whole number from 1"),
        (forebay.Share(resizes_a_step=1 << 32), "share.resizes_a_step: got 4294967296"),
        (forebay.Share(bytes_a_step=1.5), "share.bytes_a_step: got 1.5"),  # type: ignore[arg-type]
    ):
        with pytest.raises(forebay.InvalidArgument, match=says):
            make(share=share)
    with pytest.raises(forebay.InvalidConfig, match="no share"):
        make().share_slots()


def test_calls_that_do_not_fit_are_refused_and_named(make: Make) -> None:
    cache = make(lanes=1)
    held = joined(cache)
    with pytest.raises(forebay.Exhausted, match="lane") as caught:
        cache.open(prompt=8)
    assert isinstance(caught.value, forebay.ForebayError) and caught.value.status == 5
    with pytest.raises(forebay.InvalidArgument, match="bring_up"):
        cache.open(prompt=8, bring_up="all")
    with pytest.raises(forebay.InvalidArgument, match="prompt"):
        cache.open(prompt=-8)
    with pytest.raises(forebay.InvalidArgument, match="slots"):
        cache.open(prompt=8, slots=[1])
    with pytest.raises(forebay.InvalidArgument, match="tokens"):
        cache.open(prompt=8, salt=b"tenant")
    assert not held.closed
    # A forgotten sequence frees its lane.
    del held
    cache.open(prompt=8).close()


def test_a_bad_declaration_names_its_field(shape: forebay.Shape) -> None:
    device = forebay.HostDevice()
    for changes, field in (
        ({"lanes": 0}, "lanes"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"slots": [1, 2]}, "slots"),
        ({"query_rows": "two"}, "query_rows"),
        ({"lanes": 1 << 40}, "lanes"),
    ):
        with pytest.raises(forebay.InvalidConfig, match=field):
            forebay.Cache(device, shape, **{"lanes": 1, "max_tokens": 64, "slots": 16, **changes})
    with pytest.raises(forebay.InvalidConfig, match="device"):
        forebay.Cache(shape, shape, lanes=1, max_tokens=64, slots=16)  # type: ignore[arg-type]
    with pytest.raises(forebay.InvalidArgument, match=r"shape\.row_bytes"):
        forebay.Cache(device, forebay.Shape(1, 16, 8), lanes=1, max_tokens=64, slots=16)  # type: ignore[arg-type]
    with pytest.raises(forebay.OutOfMemory):
        small = forebay.HostDevice(memory=1 << 12)
        forebay.Cache(small, shape, lanes=1, max_tokens=1 << 16, slots=1 << 14, lock=False)
    assert forebay.Shape.preset("deepseek-v3.2").row_bytes == (656, 0)
    assert forebay.Shape.preset("gqa-8x128", layers=2).layers == 2
    with pytest.raises(forebay.InvalidArgument, match="deepseek-v3.2"):
        forebay.Shape.preset("gpt")
    footprint = forebay.footprint(shape, lanes=2, max_tokens=64, slots=16)
    assert footprint.rows > 0 and footprint.index_keys > 0
    assert footprint.host_page_tables == 8 * -(-(footprint.rows + footprint.step_descriptors) // 4096)
    with pytest.raises(forebay.ForebayError):
        forebay.footprint(shape, lanes=0, max_tokens=64, slots=16)


def test_layers_that_share_a_selection_have_one_budget(make: Make) -> None:
    """A group of two layers: one residency, and a warm-up by group."""
    shape = forebay.Shape(layers=4, row_bytes=(16, 0), top_k=4, page_tokens=16, lone_layers=2, group_layers=2)
    cache = make(shape=shape)
    assert (cache.info.layers, cache.info.index_groups, cache.info.group_layers) == (4, 3, 2)
    assert forebay.Shape.preset("glm-5.2").group_layers == 4
    # A list of the layers that select says the same.
    listed = forebay.Shape(layers=4, row_bytes=(16, 0), top_k=4, page_tokens=16, selects_by_layer=(1, 1, 1, 0))
    assert make(shape=listed).info.index_groups == 3
    for wrong in [(1, 1, 1), 4]:
        with pytest.raises(forebay.InvalidArgument, match="4 of True or False"):
            make(shape=forebay.Shape(layers=4, row_bytes=(16, 0), top_k=4, selects_by_layer=wrong))
    with pytest.raises(forebay.InvalidArgument, match="None in a plan"):
        forebay.plan(listed, gpu=1 << 30, context=64)
    with pytest.raises(forebay.InvalidConfig, match="selects_by_layer"):
        make(shape=forebay.Shape(layers=2, row_bytes=(16, 0), top_k=4, selects_by_layer=(False, True)))
    with pytest.raises(forebay.InvalidArgument, match="group_layers"):
        make(shape=forebay.Shape(layers=4, row_bytes=(16, 0), top_k=4, group_layers=-1))
    sequence = cache.open(prompt=20)
    rows = np.arange(20 * 16, dtype=np.uint8).reshape(20, 16)
    for layer in range(4):
        sequence.append(layer, rows + layer)
    sequence.join(warm_up=np.zeros((3, 1, 4), np.int32))
    selection = np.full((3, 1, 1, 4), 5, np.int32)
    slots = np.empty_like(selection)
    with cache.prepare([(sequence, 0, 1)]) as step:
        step.layers(selection, slots)
        for layer in range(4):
            step.scatter(layer)
    for layer, group in enumerate((0, 1, 2, 2)):
        slot = int(slots[group, 0, 0, 0])
        assert np.array_equal(cache.slab(layer)[slot // 64, slot % 64], rows[5] + layer), layer
    with pytest.raises(forebay.OutOfRange):
        cache.index_keys(3)
