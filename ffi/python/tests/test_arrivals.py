"""Sequences that arrive: rows and index keys layer by layer, early joins, aborts, later turns, and what they keep."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any, Callable, Iterator

import numpy as np
import pytest

import forebay
from conftest import LAYERS, ROW, TOP_K, OnCuda, empty, joined, on_host, row_of, rows_of, some, whole
from forebay._library import NULL, ffi, lib
from forebay.record import SPARSE
from test_cuda import cuda  # noqa: F401 - a fixture
from test_interrupts import Asked
from test_ownership import Gate, held

Make = Callable[..., forebay.Cache]
PROMPT, KEY = 40, 4


def keys_of(layer: int, first: int, count: int) -> np.ndarray[Any, Any]:
    """Index keys whose bytes identify them."""
    made = [[layer, position, 0xC3, 0x3C] for position in range(first, first + count)]
    return np.array(made, np.uint8).reshape(count, KEY)


def bring(sequence: forebay.Sequence, layer: int, first: int = 0, count: int = PROMPT) -> None:
    """A layer's rows, written to the sequence's pages or given, and its keys, copied or written in place."""
    cache, pages = sequence.cache, sequence.pages()
    end = first + count
    if layer % 2:
        sequence.append(layer, rows_of(layer, first, count))
        for position in range(first, end):
            keys = cache.index_keys(layer)
            keys[pages[position // 16].index_keys, position % 16] = keys_of(layer, position, 1)[0]
        sequence.index_keys_in_place(layer, count)
        return
    for position in range(first, end):
        cache.rows(layer)[pages[position // 16].host, position % 16, :ROW] = row_of(layer, position)
    sequence.append_layer_in_place(layer, count)
    assert sequence.place_index_keys(layer, first, keys_of(layer, first, count)).done


def arrived(cache: forebay.Cache, **changes: Any) -> forebay.Sequence:
    sequence = cache.arrive(prompt=PROMPT, promised=16, **changes)
    for layer in range(LAYERS):
        bring(sequence, layer)
    sequence.join()
    return sequence


def selected(cache: forebay.Cache, sequence: forebay.Sequence, *positions: int) -> list[bytes]:
    """What attention reads of each layer in a step that selects these positions."""
    read = []
    with cache.prepare([(sequence, 0, 1)]) as step:
        for layer in range(LAYERS):
            slots = empty()
            step.layer(layer, some(*positions), slots)
            slab = cache.slab(layer)
            read += [slab[slot // 64, slot % 64].tobytes() for slot in slots[0, 0, : len(positions)].tolist()]
        whole(step, *range(LAYERS))
    return read


def rows_at(*positions: int) -> list[bytes]:
    return [row_of(layer, position).tobytes() for layer in range(LAYERS) for position in positions]


def test_a_sequence_arrives_layer_by_layer_and_decodes_what_an_opened_one_does(make: Make) -> None:
    cache = make(arriving=1)
    lanes = cache.stats().free_lanes
    sequence = cache.arrive(prompt=PROMPT, promised=16, bring_up="nothing")
    assert (sequence.length.arriving, sequence.length.running, sequence.shared) == (True, False, 0)
    assert (cache.stats().free_lanes, cache.stats().arriving) == (lanes, 1)
    for layer in reversed(range(LAYERS)):
        with pytest.raises(forebay.InvalidState):
            sequence.join()
        bring(sequence, layer)
    assert sequence.length.filled == PROMPT
    sequence.join()
    assert (sequence.length.arriving, sequence.length.running) == (False, True)
    opened = joined(cache, bring_up="nothing")
    positions = (0, 15, 16, PROMPT - 1)
    assert selected(cache, sequence, *positions) == selected(cache, opened, *positions) == rows_at(*positions)
    assert sequence.digest() == opened.digest()
    for layer in range(LAYERS):
        pages = sequence.pages()
        found = [cache.index_keys(layer)[pages[at // 16].index_keys, at % 16].tolist() for at in range(PROMPT)]
        assert found == keys_of(layer, 0, PROMPT).tolist()
    cache.validate()


def test_rows_without_keys_are_no_prompt(make: Make) -> None:
    cache = make(arriving=1)
    sequence = cache.arrive(prompt=PROMPT)
    sequence.append_in_place(PROMPT)
    for layer in range(LAYERS):
        with pytest.raises(forebay.InvalidState, match="index keys"):
            sequence.join()
        # The last page may be given whole.
        sequence.place_index_keys(layer, 0, keys_of(layer, 0, 20))
        sequence.place_index_keys(layer, 20, keys_of(layer, 20, 28).view(np.float32))
    sequence.join()
    assert sequence.length.running


def test_the_transfer_leaves_out_what_the_cache_has(make: Make) -> None:
    cache, tokens = make(arriving=2), np.arange(PROMPT)
    first = arrived(cache, tokens=tokens, salt=b"tenant")
    assert (first.shared, first.publish(0, tokens)) == (0, 32)
    other = cache.arrive(prompt=PROMPT, tokens=tokens, salt=b"other")
    assert other.shared == 0
    other.close()
    sequence = cache.arrive(prompt=PROMPT, promised=16, tokens=tokens, salt=b"tenant")
    assert sequence.shared == 32
    with pytest.raises(forebay.OutOfRange):
        sequence.place_index_keys(0, 16, keys_of(0, 16, 24))
    for layer in range(LAYERS):
        bring(sequence, layer, 32, 8)
    sequence.join()
    assert selected(cache, sequence, 3, 35) == rows_at(3, 35)


def test_an_early_join_ends_with_the_rows_of_one_join(make: Make) -> None:
    cache = make(arriving=1)
    warm_up = np.full((LAYERS, 2, TOP_K), -1, np.int32)
    for layer in range(LAYERS):
        warm_up[layer, :, :3] = [[3 + layer, 17, 30], [4 + layer, 17, 31]]
    opened = cache.open(prompt=PROMPT, promised=16, bring_up="nothing")
    opened.append_in_place(PROMPT)
    opened.join(warm_up=warm_up)
    sequence = cache.arrive(prompt=PROMPT, promised=16, bring_up="nothing")
    with pytest.raises(forebay.InvalidState):
        sequence.warm_layer(0)
    assert sequence.join_early().done
    for layer in range(LAYERS):
        with pytest.raises(forebay.InvalidState):
            sequence.warm_layer(layer, warm_up=warm_up[layer])
        bring(sequence, layer)
        assert not sequence.length.running
        with pytest.raises(forebay.InvalidArgument, match="warm_up"):
            sequence.warm_layer(layer, warm_up=warm_up)
        assert sequence.warm_layer(layer, warm_up=warm_up[layer]).done
    assert sequence.length.running and sequence.digest() == opened.digest()
    hits = cache.stats().hits
    assert selected(cache, sequence, 17, 30) == rows_at(17, 30)
    assert cache.stats().hits == hits + 2 * LAYERS
    # The control: without selections nothing is there.
    bare = cache.arrive(prompt=PROMPT, promised=16, bring_up="nothing")
    bare.join_early()
    for layer in range(LAYERS):
        bring(bare, layer)
        bare.warm_layer(layer)
    assert bare.digest() != opened.digest()


def test_pages_of_an_abort_go_to_no_other_sequence_before_their_release(make: Make) -> None:
    # Room for one sequence.
    cache = make(arriving=1, host_pages=5, index_pages=5)
    free = cache.stats()
    closed = cache.arrive(prompt=PROMPT)
    closed.close()
    # The control: the pages of a close are free at once.
    cache.open(prompt=PROMPT).close()
    sequence = cache.arrive(prompt=PROMPT)
    pages = len(sequence.pages())
    withheld = sequence.abort()
    assert sequence.closed and cache.withheld == (withheld,) and not withheld.released
    for call in (lambda: sequence.length, sequence.abort):
        with pytest.raises(forebay.Closed):
            call()
    sequence.close()
    cache.reap()
    now = cache.stats()
    assert (now.withheld_pages, now.free_host_pages, now.sequences) == (pages, free.free_host_pages - pages, 0)
    with pytest.raises(forebay.Exhausted):
        cache.open(prompt=PROMPT)
    cache.validate()
    assert (withheld.release(), withheld.release(), withheld.released) == (pages, 0, True)
    assert cache.withheld == () and cache.stats() == free
    cache.open(prompt=PROMPT).close()
    assert "released" in repr(withheld)


@pytest.mark.parametrize("how", ["forgotten", "left", "raised"])
def test_what_is_lost_before_it_has_joined_keeps_its_pages_from_others(make: Make, how: str) -> None:
    cache = make(arriving=2)
    sequence = cache.arrive(prompt=PROMPT)
    pages = len(sequence.pages())
    if how == "left":
        with sequence:
            bring(sequence, 0)
    elif how == "raised":
        with pytest.raises(KeyError), sequence:
            raise KeyError
    del sequence
    gc.collect()
    cache.reap()
    (withheld,) = cache.withheld
    assert (cache.stats().withheld_pages, cache.stats().sequences) == (pages, 0)
    assert withheld.release() == pages
    # The controls: one that has joined, and one that was opened, have no such writers.
    for other in (arrived(cache), cache.open(prompt=PROMPT)):
        with other:
            pass
    del other
    gc.collect()
    cache.reap()
    assert cache.withheld == () and cache.stats().withheld_pages == 0


def test_a_cache_ends_with_its_withheld_pages(make: Make) -> None:
    cache = make(arriving=2)
    withheld = cache.arrive(prompt=PROMPT).abort()
    sequence = cache.arrive(prompt=PROMPT)
    cache.close()
    assert withheld.released and withheld.release() == 0 and cache.withheld == ()
    assert sequence.closed
    with pytest.raises(forebay.Closed):
        sequence.abort()


def test_pages_that_a_refused_close_has_released_go_to_no_sequence(make: Make) -> None:
    """The other call comes when the pages are released, and the handle does not end."""
    # Room for one sequence.
    cache = make(arriving=1, host_pages=5, index_pages=5)
    withheld, record = cache.arrive(prompt=PROMPT).abort(), cache._record
    with pytest.raises(forebay.Exhausted):
        cache.open(prompt=PROMPT)
    record.calls = record.calls._replace(destroy=lambda _pointer: lib.FB_BUSY)
    with pytest.raises(forebay.Busy):
        cache.close()
    assert withheld.released
    # The control: the library gives them to the next one.
    number = ffi.new("uint64_t *")
    config, _table = cache._open_config(PROMPT, 0, None, None, "whole")
    assert lib.fb_open(cache._pointer, config, number) == 0
    assert lib.fb_close(cache._pointer, number[0], NULL) == 0
    for opens in (cache.open, cache.arrive):
        with pytest.raises(forebay.Closed, match="close it again"):
            opens(prompt=PROMPT)
    assert cache.stats().sequences == 0
    record.calls = SPARSE
    cache.close()
    assert cache.closed


def test_a_sequence_that_opens_during_a_refused_close_ends_unused(make: Make) -> None:
    """The close comes between the library's return and the sequence's entry in the record."""
    cache = make(arriving=2)
    withheld = cache.arrive(prompt=PROMPT).abort()

    def late(number: int) -> forebay.Sequence:
        with pytest.raises(forebay.Busy):
            cache.close()
        assert withheld.released
        return forebay.Sequence(cache, number)

    config, _table = cache._open_config(PROMPT, 0, None, None, "whole")
    with pytest.raises(forebay.Closed, match="close it again"):
        cache._opened(lambda number: int(lib.fb_open(cache._pointer, config, number)), late)
    cache.reap()
    assert cache.stats().sequences == 0
    cache.close()
    assert cache.closed


def test_a_refused_close_aborts_what_arrives(make: Make) -> None:
    """Another thread is inside when the close comes to the first of two sequences."""
    cache = make(arriving=2)
    opened, sequence = joined(cache), cache.arrive(prompt=PROMPT)
    earlier, pages = cache.arrive(prompt=8).abort(), len(sequence.pages())
    record = cache._record
    record.calls = record.calls._replace(close=lambda *_given: lib.FB_BUSY)
    with pytest.raises(forebay.Busy):
        cache.close()
    assert not earlier.released and len(cache.withheld) == 2
    assert cache.stats().withheld_pages == pages + 1 and opened.length.running
    with pytest.raises(forebay.Closed):
        sequence.pages()
    record.calls = SPARSE
    cache.close()
    assert earlier.released and cache.withheld == ()


class Refuses:
    """The library, whose next calls of one name return FB_BUSY."""

    def __init__(self, name: str, times: int) -> None:
        self.name, self.left = name, times

    def __getattr__(self, name: str) -> Any:
        if name != self.name or not self.left:
            return getattr(lib, name)
        self.left -= 1
        return lambda *_given: lib.FB_BUSY


def test_a_look_that_is_refused_closes_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread is inside at the look whether a transfer may still write."""
    cache = make(arriving=2)
    sequence = cache.arrive(prompt=PROMPT)
    pages = len(sequence.pages())
    # Closing tries twice.
    monkeypatch.setattr("forebay.record.lib", Refuses("fb_length", 2))
    with pytest.raises(forebay.Busy):
        cache.close()
    assert cache.stats().arriving == 1 and not cache.closed
    monkeypatch.setattr("forebay.record.lib", Refuses("fb_length", 2))
    with pytest.raises(forebay.Busy), sequence:
        pass
    assert not sequence.closed and cache.stats().arriving == 1
    del sequence
    gc.collect()
    cache.reap()
    assert cache.stats().arriving == 1 and cache.withheld == ()
    cache.reap()
    assert (cache.stats().arriving, cache.stats().withheld_pages) == (0, pages)
    (withheld,) = cache.withheld
    assert withheld.release() == pages


def test_the_next_turn_comes_to_a_parked_sequence(make: Make) -> None:
    cache = make(arriving=1, parked=1)
    sequence = arrived(cache, bring_up="nothing")
    with pytest.raises(forebay.InvalidState):
        sequence.place_index_keys(0, 0, keys_of(0, 0, 1))
    sequence.park()
    sequence.extend(prompt=60, promised=16)
    with pytest.raises(forebay.OutOfRange):
        sequence.place_index_keys(0, 32, keys_of(0, 32, 28))
    for layer in range(LAYERS):
        with pytest.raises(forebay.InvalidState):
            sequence.resume()
        bring(sequence, layer, PROMPT, 20)
    sequence.resume()
    assert selected(cache, sequence, 3, 45, 59) == rows_at(3, 45, 59)
    # A turn that is given up: its pages stay withheld, since it is parked and arrived.
    sequence.park()
    pages = len(sequence.pages())
    with sequence:
        pass
    assert (len(cache.withheld), cache.stats().withheld_pages) == (1, pages)


def test_wrong_arguments_change_nothing(make: Make) -> None:
    cache = make(arriving=1)
    sequence, opened = cache.arrive(prompt=PROMPT), cache.open(prompt=PROMPT)
    with pytest.raises(forebay.Exhausted, match="arriving"):
        cache.arrive(prompt=PROMPT)
    with pytest.raises(forebay.InvalidArgument, match="tokens"):
        cache.arrive(prompt=PROMPT, salt=b"alone")
    keys = keys_of(0, 0, PROMPT)
    for wrong in (keys[:, :3], keys[0], keys[:, ::-1], "keys", None, keys.astype(np.uint16), np.ma.masked_array(keys)):
        with pytest.raises(forebay.InvalidArgument, match="keys"):
            sequence.place_index_keys(0, 0, wrong)  # type: ignore[arg-type]
    for layer, first, count in ((LAYERS, 0, 1), (0, 1, 1), (0, 0, 49)):
        with pytest.raises(forebay.OutOfRange):
            sequence.place_index_keys(layer, first, keys_of(0, 0, count))
    numbers: list[tuple[str, Callable[[Any], object]]] = [
        ("layer", lambda value: sequence.place_index_keys(value, 0, keys)),
        ("first", lambda value: sequence.place_index_keys(0, value, keys)),
        ("layer", lambda value: sequence.index_keys_in_place(value, 1)),
        ("count", lambda value: sequence.index_keys_in_place(0, value)),
        ("layer", lambda value: sequence.append_layer_in_place(value, 1)),
        ("count", lambda value: sequence.append_layer_in_place(0, value)),
        ("layer", lambda value: sequence.warm_layer(value)),
    ]
    for name, call in numbers:
        for value in (-1, 1 << 32, 1.5, None, "1"):
            with pytest.raises(forebay.InvalidArgument, match=name):
                call(value)
    for declare in (sequence.index_keys_in_place, sequence.append_layer_in_place):
        with pytest.raises(forebay.OutOfRange):
            declare(0, PROMPT + 1)
    for refused in (
        lambda: opened.place_index_keys(0, 0, keys),
        lambda: opened.index_keys_in_place(0, 1),
        lambda: sequence.warm_layer(0),
    ):
        with pytest.raises(forebay.InvalidState):
            refused()
    sequence.index_keys_in_place(0, PROMPT)
    sequence.append_layer_in_place(0, PROMPT)
    assert not held(cache) and cache.stats().arriving == 1


@pytest.fixture
def threaded(make: Make) -> Iterator[tuple[forebay.Cache, Gate]]:
    """A cache whose stream is held."""
    device = forebay.HostDevice(threads=True)
    cache = make(device, arriving=2)
    gate = Gate(device, None)
    yield cache, gate
    gate.open()


@pytest.mark.parametrize("end", ["waited", "aborted", "forgotten"])
def test_keys_live_until_their_copy_has_run(threaded: tuple[forebay.Cache, Gate], end: str) -> None:
    cache, gate = threaded
    sequence = cache.arrive(prompt=PROMPT)
    keys = keys_of(0, 0, PROMPT)
    there = weakref.ref(keys)
    ticket = sequence.place_index_keys(0, 0, keys)
    page = sequence.pages()[2].index_keys
    del keys
    if end == "aborted":
        sequence.abort()
    elif end == "forgotten":
        del sequence, ticket
    gc.collect()
    cache.reap()
    assert there() is not None and cache.stats().sequences == 1
    gate.open()
    assert cache.index_keys(0)[page, 7].tolist() == keys_of(0, PROMPT - 1, 1)[0].tolist()
    cache.reap()
    cache.reap()
    assert there() is None
    assert cache.stats().sequences == (1 if end == "waited" else 0)


def test_an_earlier_ticket_does_not_let_later_keys_go(threaded: tuple[forebay.Cache, Gate]) -> None:
    """Work that the device took of a refused copy runs after the copies before it."""
    cache, gate = threaded
    sequence, record = cache.arrive(prompt=PROMPT), cache._record
    first = sequence.place_index_keys(0, 0, keys_of(0, 0, PROMPT))
    # As a copy that the device refused half-way leaves it.
    refused = forebay.Ticket()
    record.joins[sequence._number][refused] = ("keys",)
    gate.open()
    assert first.done
    record.make_up()
    assert held(cache) == [refused]
    last = sequence.place_index_keys(0, 0, keys_of(0, 0, PROMPT))
    cache.device.wait()
    assert last.done
    record.make_up()
    assert not held(cache)


def test_an_end_that_would_wait_releases_no_withheld_pages(threaded: tuple[forebay.Cache, Gate]) -> None:
    cache, gate = threaded
    withheld, sequence = cache.arrive(prompt=8).abort(), cache.arrive(prompt=PROMPT)
    sequence.place_index_keys(0, 0, keys_of(0, 0, PROMPT))
    assert not cache._record.end(wait=False)
    assert not withheld.released and len(cache.withheld) == 2
    gate.open()
    cache.close()
    assert withheld.released


def test_a_placement_asks_for_one_ticket_of_each_sequence(
    threaded: tuple[forebay.Cache, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, gate = threaded
    sequences = [cache.arrive(prompt=PROMPT) for _ in range(2)]
    keys, calls, rounds = keys_of(0, 0, PROMPT), [], 20
    asked = Asked()
    monkeypatch.setattr("forebay.sequence.lib", asked)
    for _ in range(rounds):
        for sequence in sequences:
            before = asked.names.count("fb_ticket_outcome")
            sequence.place_index_keys(0, 0, keys)
            calls.append(asked.names.count("fb_ticket_outcome") - before)
    assert max(calls) == len(sequences) and len(held(cache)) == rounds * len(sequences)
    gate.open()
    asked.names.clear()
    cache._record.make_up()
    assert asked.names.count("fb_ticket_outcome") == rounds * len(sequences) and not held(cache)


def test_keys_on_a_gpu_are_copied_to_its_pages(cuda: forebay.CudaDevice, make: Make) -> None:  # noqa: F811
    cache = make(cuda, arriving=1)
    sequence = cache.arrive(prompt=PROMPT, promised=16)
    for layer in range(LAYERS):
        sequence.append(layer, rows_of(layer, 0, PROMPT))
        keys = OnCuda(cuda.allocate(PROMPT * KEY), (PROMPT, 1))
        keys.host()[:] = keys_of(layer, 0, PROMPT).view(np.int32)
        with pytest.raises(forebay.InvalidArgument, match="another memory"):
            sequence.place_index_keys(layer, 0, keys_of(layer, 0, PROMPT))
        ticket = sequence.place_index_keys(layer, 0, keys)
        del keys
    sequence.join()
    cuda.wait()
    assert ticket.done
    for layer in range(LAYERS):
        pages, found = sequence.pages(), on_host(cache.index_keys(layer))
        read = [found[pages[at // 16].index_keys, at % 16].tolist() for at in range(PROMPT)]
        assert read == keys_of(layer, 0, PROMPT).tolist()
    withheld = cache.arrive(prompt=8).abort()
    cuda.wait()
    cache.reap()
    assert withheld.release() == 1


def test_prometheus_shows_arrivals_and_withheld_pages(make: Make) -> None:
    prometheus = pytest.importorskip("forebay.prometheus")
    client = pytest.importorskip("prometheus_client")
    registry, cache = client.CollectorRegistry(), make(arriving=2)
    collector = prometheus.Collector(registry)
    collector.add("one", cache)
    withheld, kept = cache.arrive(prompt=8).abort(), cache.arrive(prompt=8)
    collector.take("one")
    value = functools.partial(registry.get_sample_value, labels={"cache": "one"})
    assert (value("forebay_arriving"), value("forebay_withheld_pages")) == (1, len(kept.pages()))
    withheld.release()
    kept.close()
    collector.take("one")
    assert (value("forebay_arriving"), value("forebay_withheld_pages")) == (0, 0)
