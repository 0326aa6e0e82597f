"""Sequences of a dense cache that arrive, in both ways, and what aborts withhold. The loop of `dense_loop` compares
every row that attention reads."""

from __future__ import annotations

import gc
from typing import Any, Callable

import numpy as np
import pytest

import forebay
from dense_loop import Loop, Request, config_of, host, prefixes, stamp, text_of, windowed
from forebay import dense
from forebay._library import lib
from forebay.record import DENSE
from test_arrivals import Refuses
from test_dense import MakeDense, device, make, request_of  # noqa: F401 - fixtures
from test_interrupts import interrupt, no_collector  # noqa: F401 - a fixture

PROMPT, PAGE = 50, 16
WAYS = ("direct", "host", "store")


def arrive(cache: dense.Cache, how: str, prompt: int = PROMPT, names: dense.Names | None = None) -> dense.Opened:
    way = "direct" if how == "direct" else "host"
    opened = cache.arrive(prompt=prompt, promised=20, names=names, way=way)
    # A transfer is on no stream.
    cache.device.wait()
    assert opened.ticket.done
    return opened


def bring(opened: dense.Opened, layer: int, ids: list[int], how: str, first: int = 0, end: int = PROMPT) -> None:
    """The rows of a layer, as a sender that computed the prompt writes them."""
    sequence, cache = opened.sequence, opened.sequence.cache
    shape = cache.config.shape
    which = next(at for at, group in enumerate(shape.groups) if layer in group.layers)
    device_pages = sequence.pages(which)
    host_pages = {one.block: one.page for one in sequence.host_pages(which)}
    at = np.arange(first, end)
    for run, width in enumerate(shape.groups[which].row_bytes):
        if not width:
            continue
        rows = stamp(layer, run, at, prefixes(ids[:end])[first:], width // 4)
        for position, row in zip(at.tolist(), rows):
            block, token = position // PAGE, position % PAGE
            if how == "store":
                sequence.store(layer, run, block, row, offset=token * width)
            elif how == "direct" and device_pages[block]:
                host(cache.view(layer, run)).view(np.uint32)[device_pages[block], token] = row
            elif how == "host" and block in host_pages:
                cache.host_view(layer, run).view(np.uint32)[host_pages[block], token] = row
    sequence.append_layer_in_place(layer, end - first)


def layers_of(cache: dense.Cache) -> list[int]:
    return [layer for group in cache.config.shape.groups for layer in group.layers]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("model", [config_of, windowed])
def test_what_arrives_is_what_attention_reads(
    device: forebay.Device,  # noqa: F811
    model: Callable[..., dense.Config],
    how: str,
) -> None:
    groups = len(model().shape.groups)
    with dense.Cache(device, model(host_pages=[12] * groups)) as cache:
        opened, ids = arrive(cache, how), text_of(1, 100)
        sequence = opened.sequence
        assert sequence.length == dense.Length(0, 0, 0, True, 0) and opened.found == (0, 0)
        assert (cache.stats().arriving, bool(sequence.host_pages())) == (1, how != "direct")
        for layer in reversed(layers_of(cache)):
            for refused in (lambda: sequence.join(), lambda: cache.prepare([(sequence, 0, 1)])):
                with pytest.raises(forebay.InvalidState):
                    refused()
            bring(opened, layer, ids, how)
            if how != "direct" and layer % 2:
                sequence.bring_layer(layer)
        ticket = sequence.join()
        request, loop = Request(sequence, ids, PROMPT), Loop(cache)
        loop.step([(request, 0, 1)])
        loop.step([(request, 1, 1)])
        assert loop.compared > 150 and ticket.done and sequence.length.arriving is False
        assert sequence.host_pages() == [] and cache.stats().arriving == 0
        device.wait()
        cache.validate()


def test_control_a_row_that_did_not_come_is_found(make: MakeDense) -> None:  # noqa: F811
    cache = make()
    opened, ids = arrive(cache, "direct"), text_of(1, 100)
    for layer in layers_of(cache):
        # The declared rows of the last page are not there.
        bring(opened, layer, ids, "direct", 0, 48)
        opened.sequence.append_layer_in_place(layer, 2)
    opened.sequence.join()
    with pytest.raises(AssertionError, match="layer"):
        Loop(cache).step([(Request(opened.sequence, ids, PROMPT), 0, 1)])


@pytest.mark.parametrize("how", WAYS)
def test_the_transfer_leaves_out_what_the_cache_has(make: MakeDense, how: str) -> None:  # noqa: F811
    cache, ids = make(config_of(host_pages=12)), text_of(1, 100)
    loop, (first, _) = Loop(cache), request_of(cache, ids, PROMPT)
    loop.prompt(first, PROMPT)
    assert first.publish() == 48
    names = cache.names(ids[: PROMPT - 1])
    assert cache.find_arriving(names, PROMPT) == (48, 0)
    opened = arrive(cache, how, names=names)
    assert opened.found.tokens == 48 and opened.sequence.length.filled == 48
    assert opened.sequence.pages()[:3] == first.sequence.pages()[:3]
    for layer in layers_of(cache):
        bring(opened, layer, ids, how, 48)
    opened.sequence.join()
    loop.step([(Request(opened.sequence, ids, PROMPT), 0, 1), (first, 0, 1)])
    assert opened.sequence.publish(48, ids[48:PROMPT]) == 48


@pytest.mark.parametrize("how", ["direct", "host"])
def test_pages_of_an_abort_are_withheld_until_their_release(make: MakeDense, how: str) -> None:  # noqa: F811
    # Room for one sequence.
    cache = make(config_of(max_tokens=72, device_pages=8, host_pages=5))
    free = cache.stats()
    # The control: the pages of a close are free at once.
    arrive(cache, how).sequence.close()
    opened = arrive(cache, how)
    pages = opened.sequence.host_pages() if how == "host" else opened.sequence.pages()[:4]
    withheld = opened.sequence.abort()
    assert opened.sequence.closed and cache.withheld == (withheld,)
    cache.reap()
    assert (cache.stats().withheld_pages, cache.stats().sequences) == (len(pages), 0)
    with pytest.raises(forebay.Exhausted):
        arrive(cache, how)
    cache.validate()
    assert (withheld.release(), withheld.release()) == (len(pages), 0)
    assert cache.stats() == free
    joined = arrive(cache, "direct")
    for layer in layers_of(cache):
        joined.sequence.append_layer_in_place(layer, PROMPT)
    joined.sequence.join()
    with pytest.raises(forebay.InvalidState):
        joined.sequence.abort()
    assert cache.withheld == () and not joined.sequence.closed


@pytest.mark.parametrize("how", ["forgotten", "left", "raised"])
def test_pages_of_what_is_lost_before_its_join_are_withheld(make: MakeDense, how: str) -> None:  # noqa: F811
    cache = make()
    opened = cache.arrive(prompt=PROMPT)
    sequence = opened.sequence
    if how == "left":
        with sequence:
            pass
    elif how == "raised":
        with pytest.raises(KeyError), sequence:
            raise KeyError
    del sequence, opened
    gc.collect()
    cache.reap()
    assert (cache.stats().withheld_pages, cache.stats().sequences) == (4, 0)
    (withheld,) = cache.withheld
    assert withheld.release() == 4
    # The control: one that was opened has no such writers.
    with cache.open(prompt=PROMPT):
        pass
    assert cache.withheld == () and cache.stats().withheld_pages == 0
    left = cache.arrive(prompt=PROMPT).sequence.abort()
    cache.close()
    assert left.released and left.release() == 0


def test_a_look_that_is_refused_closes_nothing(
    make: MakeDense,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread is inside at the look whether a transfer may still write."""
    cache = make()
    sequence = cache.arrive(prompt=PROMPT).sequence
    monkeypatch.setattr("forebay.record.lib", Refuses("fb_dense_length", 2))
    with pytest.raises(forebay.Busy), sequence:
        pass
    assert not sequence.closed and cache.stats().arriving == 1
    del sequence
    gc.collect()
    cache.reap()
    assert cache.stats().arriving == 1 and cache.withheld == ()
    cache.reap()
    assert (cache.stats().arriving, cache.stats().withheld_pages, len(cache.withheld)) == (0, 4, 1)


def test_a_refused_close_aborts_what_arrives_and_opens_nothing_more(make: MakeDense) -> None:  # noqa: F811
    cache = make()
    opened, sequence = cache.open(prompt=PROMPT), cache.arrive(prompt=PROMPT).sequence
    record = cache._record
    record.calls = record.calls._replace(close=lambda *_given: lib.FB_BUSY)
    with pytest.raises(forebay.Busy):
        cache.close()
    (withheld,) = cache.withheld
    assert cache.stats().withheld_pages == 4 and not withheld.released and opened.length.committed == 0
    record.calls = DENSE._replace(destroy=lambda _pointer: lib.FB_BUSY)
    with pytest.raises(forebay.Busy):
        cache.close()
    assert withheld.released
    for opens in (cache.open, cache.arrive):
        with pytest.raises(forebay.Closed, match="close it again"):
            opens(prompt=PROMPT)
    record.calls = DENSE
    cache.close()
    assert sequence.closed and opened.closed


def test_wrong_arguments_change_nothing(make: MakeDense) -> None:  # noqa: F811
    cache, bare = make(config_of(host_pages=12)), make()
    for way in ("device", 1, None):
        with pytest.raises(forebay.InvalidArgument, match="way"):
            cache.arrive(prompt=PROMPT, way=way)  # type: ignore[arg-type]
    with pytest.raises(forebay.InvalidArgument, match="names"):
        cache.arrive(prompt=PROMPT, names="names")  # type: ignore[arg-type]
    for refused in (lambda: bare.arrive(prompt=PROMPT, way="host"), lambda: bare.host_view(0)):
        with pytest.raises(forebay.InvalidState):
            refused()
    sequence, opened = arrive(cache, "host").sequence, cache.open(prompt=PROMPT)
    data = np.zeros(32, np.uint8)
    calls: list[tuple[str, Callable[[Any], object]]] = [
        ("layer", lambda value: sequence.store(value, 0, 0, data)),
        ("run", lambda value: sequence.store(0, value, 0, data)),
        ("block", lambda value: sequence.store(0, 0, value, data)),
        ("offset", lambda value: sequence.store(0, 0, 0, data, offset=value)),
        ("data", lambda value: sequence.store(0, 0, 0, value)),
        ("layer", lambda value: sequence.append_layer_in_place(value, 1)),
        ("count", lambda value: sequence.append_layer_in_place(0, value)),
        ("layer", lambda value: sequence.bring_layer(value)),
        ("group", lambda value: sequence.host_pages(value)),
        ("layer", lambda value: cache.host_view(value)),
        ("run", lambda value: cache.host_view(0, value)),
        ("prompt", lambda value: cache.arrive(prompt=value)),
        ("prompt", lambda value: cache.find_arriving(cache.names([]), value)),
    ]
    for name, call in calls:
        for value in (-1, 1 << 64, 1.5, None, "1"):
            with pytest.raises(forebay.InvalidArgument, match=name):
                call(value)
    with pytest.raises(forebay.InvalidArgument, match="strides"):
        sequence.store(0, 0, 0, np.zeros(64, np.uint8)[::2])
    for beyond in (
        lambda: sequence.store(3, 0, 0, data),
        lambda: sequence.store(0, 2, 0, data),
        lambda: sequence.store(0, 0, 4, data),
        lambda: sequence.store(0, 0, 0, data, offset=PAGE * 32 - 31),
        lambda: sequence.append_layer_in_place(0, PROMPT + 1),
        lambda: sequence.bring_layer(3),
        lambda: sequence.host_pages(1),
        lambda: cache.host_view(3),
    ):
        with pytest.raises(forebay.OutOfRange):
            beyond()
    for unfit in (
        lambda: opened.store(0, 0, 0, data),
        lambda: opened.append_layer_in_place(0, 1),
        lambda: opened.bring_layer(0),
        lambda: opened.join(),
        lambda: opened.abort(),
        lambda: sequence.bring_layer(0),
        lambda: sequence.park(0),
    ):
        with pytest.raises(forebay.InvalidState):
            unfit()
    assert sequence.length == dense.Length(0, 0, 0, True, 0) and cache.withheld == ()
    opened.close()
    for closed in (opened.join, opened.abort, opened.host_pages, lambda: opened.store(0, 0, 0, data)):
        with pytest.raises(forebay.Closed):
            closed()


def test_a_host_view_keeps_the_memory_alive(make: MakeDense) -> None:  # noqa: F811
    cache = make(config_of(host_pages=12))
    view = cache.host_view(2, 1)
    assert view.shape == (12, PAGE, 16) and view.flags.writeable
    view[:] = 7
    cache.close()
    cache.device.close()
    assert (view == 7).all()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_anywhere_loses_no_pages() -> None:
    at = 0
    while True:
        device = forebay.HostDevice()  # noqa: F811
        cache = dense.Cache(device, config_of(host_pages=12))
        free = cache.stats()

        def call() -> None:
            opened = cache.arrive(prompt=PROMPT, way="host")
            opened.sequence.append_layer_in_place(0, PROMPT)
            opened.sequence.bring_layer(0)
            with opened.sequence:
                pass
            other = cache.arrive(prompt=PROMPT).sequence
            other.abort().release()

        raised, _out = interrupt(call, at)
        for _ in range(2):
            cache.reap()
        for withheld in cache.withheld:
            withheld.release()
        found = cache.stats()
        assert found._replace(bytes_up=0) == free or not _out, at
        cache.validate()
        cache.close()
        device.close()
        if not raised:
            assert at > 10
            return
        at += 1
