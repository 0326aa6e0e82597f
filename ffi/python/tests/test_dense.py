"""Dense caches: loops whose attention finds every row by the page tables, on every device, and prefixes in two tiers.

The engine is `dense_loop.Loop`: it knows nothing but the step's tensors and the views of layers.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Iterator

import numpy as np
import pytest

import forebay
from conftest import ROOT
from dense_loop import Loop, Request, config_of, overwritten, text_of, windowed
from forebay import dense
from places import Late, Standin

MakeDense = Callable[..., dense.Cache]
PAGE = 16


@pytest.fixture
def make() -> Iterator[MakeDense]:
    """Makes caches, each on its own device, and closes them."""
    made: list[Any] = []

    def build(config: dense.Config | None = None, device: forebay.Device | None = None) -> dense.Cache:
        device = device or forebay.HostDevice()
        cache = dense.Cache(device, config or config_of())
        made.extend((cache, device))
        return cache

    yield build
    for one in made:
        one.close()


@pytest.fixture(params=["host", "threads", "stand-in", "late stand-in"])
def device(request: pytest.FixtureRequest) -> Iterator[forebay.Device]:
    """Each kind of device."""
    if request.param in ("host", "threads"):
        with forebay.HostDevice(threads=request.param == "threads") as made:
            yield made
        return
    place = Late() if request.param.startswith("late") else Standin()
    with forebay.CudaDevice(0, library=place.library) as cuda:
        yield cuda
    place.leave()


def request_of(cache: dense.Cache, ids: list[int], prompt: int, promised: int = 16) -> tuple[Request, dense.Found]:
    """A request whose prompt may be shared, but for its last token."""
    opened = cache.open_shared(cache.names(ids[: prompt - 1]), prompt=prompt, promised=promised)
    return Request(opened.sequence, ids, opened.found.tokens), opened.found


LAYOUTS = [
    {},
    {"layout": "page_first"},
    {"runs": "together", "width": "int32"},
    {"layout": "page_first", "runs": "together"},
]


@pytest.mark.parametrize("changes", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", [config_of, windowed])
def test_a_loop_reads_every_row(
    device: forebay.Device, model: Callable[..., dense.Config], changes: dict[str, Any]
) -> None:
    """Chunks of a prompt beside sequences that decode with drafts. Some counts of accepted rows are on the device."""
    with dense.Cache(device, model(query_rows=2, **changes)) as cache:
        loop = Loop(cache)
        one = Request(cache.open(prompt=50, promised=30), text_of(1, 100))
        loop.step([(one, 0, 40)])
        loop.step([(one, 40, 10)])
        other = Request(cache.open(prompt=30, promised=40), text_of(2, 100))
        loop.step([(other, 0, 30), (one, 10, 2)])
        for turn in range(12):
            accepted = 1 + turn % 2
            taken = 30 if turn == 0 else accepted
            loop.step([(one, accepted, 2), (other, taken, 2)], on_device=turn % 3 == 1)
        assert one.length > 60 and other.length > 40 and loop.compared > 5000
        assert cache.stats().steps == 15
        device.wait()
        cache.validate()
        one.sequence.close()
        other.sequence.close()
        assert cache.reap() == 0
        assert cache.stats().sequences == 0


@pytest.mark.parametrize("how", ["row", "table"])
def test_control_the_loop_finds_a_wrong_row_and_a_wrong_entry(make: MakeDense, how: str) -> None:
    cache = make()
    loop = Loop(cache)
    one = Request(cache.open(prompt=40, promised=8), text_of(1, 48))
    loop.prompt(one, 40)
    page = one.sequence.pages()[1]
    if how == "row":
        cache.view(1)[page, 3, 5] ^= 1
    else:
        # The entry of block 1 names the page of block 0.
        overwritten(loop.tensors.tables[0], 4, one.sequence.pages()[0])
    with pytest.raises(AssertionError, match="layer"):
        loop.step([(one, 0, 1)])


def test_a_prefix_is_shared_on_the_device_and_returns_from_the_host(device: forebay.Device) -> None:
    config = config_of(device_pages=10, host_pages=40, max_tokens=128, sequences=2)
    with dense.Cache(device, config) as cache:
        loop, ids = Loop(cache), text_of(3, 128)
        first, found = request_of(cache, ids, 70)
        assert found == (0, 0)
        loop.prompt(first, 70)
        assert first.publish() == 64 == first.sequence.length.published
        # Beside the first one: the pages are on the device.
        again, found = request_of(cache, ids, 70)
        assert found == (64, 0) and again.sequence.pages()[:4] == first.sequence.pages()[:4]
        loop.step([(again, 0, 6)])
        again.sequence.close()
        page = sum(cache.config.shape.groups[0].row_bytes) * 3 * PAGE
        assert cache.save(page + 1) == page and cache.save(1 << 20) == 3 * page and cache.save(1 << 20) == 0
        device.wait()
        first.sequence.close()
        cache.reap()
        before = cache.stats()
        assert (before.published, before.unused, before.saved) == ((4,), (4,), (4,))
        assert (before.bytes_down, before.bytes_up) == (4 * page, 0)
        # Another prompt takes all pages of the device, and overwrites them.
        other = Request(cache.open(prompt=128), text_of(4, 128))
        loop.prompt(other, 128)
        assert cache.stats().published == (0,) and cache.stats().saved == (4,)
        other.sequence.close()
        names = cache.names(ids[:69])
        assert cache.find(names) == (64, 64)
        opened = cache.open_shared(names, prompt=70, promised=16)
        assert opened.found == (64, 64)
        device.wait()
        assert opened.ticket.done and opened.ticket.outcome == "done"
        assert cache.stats().bytes_up == 4 * page
        back = Request(opened.sequence, ids, 64)
        loop.step([(back, 0, 6)])
        for _ in range(8):
            loop.step([(back, 6 if back.length == 64 else 1, 1)])
        opened.sequence.close()
        device.wait()
        cache.validate()


def test_pages_come_back_by_write_back_as_well(make: MakeDense) -> None:
    cache = make(config_of(device_pages=10, host_pages=40, sequences=2, save="evicted"))
    loop, ids = Loop(cache), text_of(3, 128)
    first, _ = request_of(cache, ids, 70)
    loop.prompt(first, 70)
    first.publish()
    first.sequence.close()
    assert cache.stats().saved == (0,)
    other = Request(cache.open(prompt=128), text_of(4, 128))
    loop.prompt(other, 128)
    other.sequence.close()
    assert cache.stats().bytes_down > 0
    back, found = request_of(cache, ids, 70)
    assert found == (64, 64)
    loop.step([(back, 0, 6)])


def test_names_distinguish_tenants_keys_and_caches(make: MakeDense) -> None:
    cache, stranger = make(), make()
    loop, ids = Loop(cache), text_of(5, 128)
    keys = [b"picture of a cat", None]
    opened = cache.open_shared(cache.names(ids[:32], keys=keys, salt=b"tenant"), prompt=40)
    one = Request(opened.sequence, ids)
    loop.prompt(one, 40)
    assert opened.sequence.publish(0, ids[:40], keys=keys) == 32
    found = {
        "same": cache.find(cache.names(ids[:40], keys=keys, salt=b"tenant")).tokens,
        "numpy": cache.find(cache.names(np.array(ids[:40]), keys=keys, salt=b"tenant")).tokens,
        "one page": cache.find(cache.names(ids[:31], keys=keys[:1], salt=b"tenant")).tokens,
        "salt": cache.find(cache.names(ids[:40], keys=keys, salt=b"other")).tokens,
        "no keys": cache.find(cache.names(ids[:40], salt=b"tenant")).tokens,
        "last key": cache.find(cache.names(ids[:40], keys=[keys[0], keys[0]], salt=b"tenant")).tokens,
        "cache": cache.find(stranger.names(ids[:40], keys=keys, salt=b"tenant")).tokens,
    }
    expected = {"same": 32, "numpy": 32, "one page": 16, "salt": 0, "no keys": 0, "last key": 16, "cache": 0}
    assert found == expected
    names = stranger.names(ids[:40])
    stranger.close()
    # Names outlive their cache.
    assert cache.find(names).tokens == 0


def test_a_fork_continues_its_parent_and_both_go_on(device: forebay.Device) -> None:
    with dense.Cache(device, config_of()) as cache:
        loop, ids = Loop(cache), text_of(6, 128)
        parent = Request(cache.open(prompt=40, promised=20), ids)
        loop.prompt(parent, 40)
        sequence, ticket = parent.sequence.fork(promised=20)
        child = Request(sequence, ids[:40] + text_of(7, 60), 40)
        # Full pages are shared, the partial one is a copy.
        pages = parent.sequence.pages(), child.sequence.pages()
        assert pages[0][:2] == pages[1][:2] and pages[0][2] != pages[1][2]
        for turn in range(10):
            loop.step([(parent, turn and 1, 1), (child, turn and 1, 1)])
        device.wait()
        assert ticket.done
        parent.sequence.close()
        loop.step([(child, 1, 1)])
        device.wait()
        cache.validate()


def test_a_sequence_is_truncated_and_extended(make: MakeDense) -> None:
    cache = make()
    loop, ids = Loop(cache), text_of(8, 128)
    one = Request(cache.open(prompt=20), ids)
    loop.step([(one, 0, 20)])
    assert one.sequence.length[:3] == (0, 20, 0)
    with pytest.raises(forebay.OutOfRange):
        loop.cache.prepare([(one.sequence, 20, 5)])
    one.sequence.extend(prompt=60, promised=10)
    assert len(one.sequence.pages()) == -(-(70 + 2) // PAGE)
    loop.step([(one, 20, 40)])
    # Back into the first chunk; other text from there on.
    assert one.sequence.truncate(33).done
    assert one.sequence.length[:3] == (33, 0, 0)
    one.ids, one.length = ids[:33] + text_of(9, 90), 33
    loop.step([(one, 0, 20)])
    loop.step([(one, 20, 1)])
    for length, kind in ((100, forebay.OutOfRange), (-1, forebay.InvalidArgument)):
        with pytest.raises(kind):
            one.sequence.truncate(length)
    with pytest.raises(forebay.OutOfRange):
        one.sequence.extend(prompt=59, promised=10)
    assert one.sequence.length.committed == 53


def test_windows_hold_the_pages_of_the_window_alone(make: MakeDense) -> None:
    cache = make(windowed(max_tokens=256, step_tokens=32, host_pages=[40, 40]))
    loop, ids = Loop(cache), text_of(10, 256)
    one, _ = request_of(cache, ids, 200, 20)
    loop.prompt(one, 200, chunk=20, publish=True)
    for _ in range(3):
        loop.step([(one, 0 if one.length == 200 else 1, 1)])
    whole, window = one.sequence.pages(0), one.sequence.pages(1)
    assert 0 not in whole and set(window[:10]) == {0} and window[12] != 0
    assert one.publish() == 192
    stats = cache.stats()
    assert stats.published[0] == 12 and 0 < stats.published[1] <= 12
    # Another request finds the prefix: all pages of one group, those of the window of the other.
    again, found = request_of(cache, ids, 190, 10)
    assert found.tokens == 176
    loop.step([(again, 0, 14)])
    cache.validate()


def test_a_step_that_raises_is_abandoned_and_its_sequence_repaired(device: forebay.Device) -> None:
    with dense.Cache(device, config_of()) as cache:
        loop, ids = Loop(cache), text_of(11, 128)
        one = Request(cache.open(prompt=40, promised=8), ids)
        loop.prompt(one, 40)
        with pytest.raises(KeyError), cache.prepare([(one.sequence, 0, 1)]) as step:
            raise KeyError
        device.wait()
        cache.reap()
        assert step.retired is None and cache.stats().steps_in_flight == 0
        with pytest.raises(forebay.InvalidState):
            cache.prepare([(one.sequence, 0, 1)])
        one.sequence.truncate(40)
        loop.step([(one, 0, 1)])
        # By hand.
        step = cache.prepare([(one.sequence, 1, 1)])
        step.abandon()
        step.finish()
        with pytest.raises(forebay.InvalidState):
            step.abandon()
        with pytest.raises(forebay.Cancelled):
            step.retire(wait=True)
        with pytest.raises(forebay.Closed, match="the step was retired"):
            step.retire()
        one.sequence.truncate(41)
        one.length = 41
        loop.step([(one, 0, 1)])
        # A request is aborted while its step is in flight: its pages wait for that.
        step = loop.step([(one, 1, 1)], retire=False)
        free = cache.stats().free_pages
        one.sequence.close()
        assert one.sequence.closed and cache.reap() == 1 and cache.stats().free_pages == free
        step.retire(wait=True)
        assert cache.reap() == 0 and cache.stats().free_pages > free
        with pytest.raises(forebay.Closed):
            one.sequence.length
        device.wait()
        cache.validate()


def test_two_steps_are_in_flight_and_two_micro_batches_open(make: MakeDense) -> None:
    cache = make(config_of(micro_batches=2))
    loops = [Loop(cache), Loop(cache, micro_batch=1)]
    requests = [Request(cache.open(prompt=20, promised=20), text_of(at, 64)) for at in range(2)]
    steps = [loop.step([(one, 0, 20)], retire=False) for loop, one in zip(loops, requests)]
    steps.append(loops[0].step([(requests[0], 20, 1)], retire=False))
    with pytest.raises(forebay.Busy):
        cache.prepare([(requests[0].sequence, 1, 1)])
    with pytest.raises(forebay.InvalidState):
        cache.prepare([(requests[1].sequence, 20, 1)])
    with pytest.raises(forebay.Busy):
        steps[2].retire()
    assert [step.retire().lengths.tolist() for step in (steps[0], steps[2], steps[1])] == [[0], [20], [0]]
    assert cache.stats().steps == 3 and cache.stats().steps_in_flight == 0


def test_stats_count_by_group(make: MakeDense) -> None:
    cache = make(windowed(device_pages=[30, 20], host_pages=[12, 9]))
    stats = cache.stats()
    assert stats == dense.Stats(0, 0, 4, 0, stats.free_pages, (0, 0), (0, 0), (0, 0), (12, 9), (0, 0), 0, 0, 0)
    assert stats.free_pages[0] == 29 and 0 < stats.free_pages[1] <= 19
    sequence = cache.open(prompt=30, promised=18)
    later = cache.stats()
    assert (later.sequences, later.free_sequences) == (1, 3)
    # 48 tokens and 2 rows in flight: 4 pages.
    assert later.free_pages[0] == 25 and later.free_pages[1] < stats.free_pages[1]
    step = cache.prepare([(sequence, 0, 30)])
    assert cache.stats().steps_in_flight == 1
    with step:
        pass
    assert step.retired is not None and step.retired.lengths.tolist() == [0]
    assert "1 sequence>" in repr(cache) and "retired" in repr(step) and repr(sequence).startswith("<forebay.dense.Seq")
    assert cache.fallbacks() == []


@pytest.mark.parametrize("changes", LAYOUTS, ids=str)
def test_views_are_parts_of_planes(make: MakeDense, changes: dict[str, Any]) -> None:
    """What is written by the views of all layers is in the planes, every byte once."""
    cache = make(windowed(device_pages=[12, 14], **changes))
    for number, group in enumerate(cache.config.shape.groups):
        planes = cache.planes(number)
        for plane in planes:
            plane.memory[:] = 0
        written = 0
        for layer in group.layers:
            for run in range(2):
                if not group.row_bytes[run]:
                    with pytest.raises(forebay.OutOfRange):
                        cache.view(layer, run)
                    continue
                view = cache.view(layer, run)
                assert view.shape == ((12, 14)[number], PAGE, group.row_bytes[run]) and view.flags.writeable
                view += 1
                written += view.size
        assert all((plane.memory == 1).all() for plane in planes)
        assert sum(plane.memory.size for plane in planes) == written
        one_plane = changes.get("layout") == "page_first"
        apart = changes.get("runs") != "together" and group.row_bytes[1] > 0
        assert len(planes) == (1 if one_plane else len(group.layers)) * (2 if apart else 1)
        assert {plane.layer for plane in planes} == ({None} if one_plane else set(group.layers))
        assert {plane.run for plane in planes} == ({0, 1} if apart else {None})


def test_tensors_of_steps_are_read_only_and_of_the_stated_shape(make: MakeDense) -> None:
    cache = make(windowed(batch=3, step_tokens=48, width="int32", query_rows=2))
    tensors = cache.tensors()
    assert (cache.batch, cache.step_tokens, cache.blocks) == (3, 48, -(-(128 + 2 * 2) // PAGE))
    assert [one.shape for one in tensors.tables] == [(3, cache.blocks)] * 2
    assert [one.shape for one in tensors.slots] == [(48,)] * 2
    assert (tensors.positions.shape, tensors.lengths.shape, tensors.starts.shape) == ((48,), (3,), (4,))
    flat = [*tensors.tables, *tensors.slots, tensors.positions, tensors.lengths, tensors.starts]
    assert {str(one.dtype) for one in flat} == {"int32"} and not any(one.flags.writeable for one in flat)
    assert make().tensors().slots[0].dtype == make().tensors().positions.dtype == np.int64
    # At the same addresses in every step.
    again = cache.tensors()
    assert [a.ctypes.data for a in again.tables] == [a.ctypes.data for a in tensors.tables]


def test_presets_footprints_and_pages_are_those_of_the_models() -> None:
    llama = dense.Shape.preset("llama-3.1-8b")
    # 32 layers, 8 heads of 128 values of 2 bytes.
    assert llama == dense.Shape((dense.Group(tuple(range(32)), (2048, 2048)),), 64) and llama.layers == 32
    oss = dense.Shape.preset("gpt-oss-20b", page_tokens=16)
    assert oss.page_tokens == 16 and [group.window for group in oss.groups] == [None, 128] and oss.layers == 24
    latent = dense.Shape.preset("deepseek-v3").groups[0]
    assert latent.row_bytes == (1152, 0)
    config = dense.Config(llama, sequences=8, max_tokens=4096)
    # 4,096 tokens and 2 rows in flight: 65 pages.
    assert config.pages_for(8, 4096) == (1 + 8 * 65,)
    footprint = config.footprint()
    assert footprint.pages == (1 + 8 * 65) * 64 * 32 * 4096 and footprint.host_pages == 0
    tiers = dense.Config(llama, sequences=8, max_tokens=4096, host_pages=100).footprint()
    assert tiers.host_pages >= 100 * 64 * 32 * 4096 and tiers.pages == footprint.pages
    with pytest.raises(forebay.InvalidArgument, match="name: got 'gpt-2'; expected a preset: llama-3.1-8b"):
        dense.Shape.preset("gpt-2")
    with pytest.raises(forebay.InvalidArgument, match="pages: got a change; expected a field: groups, page_tokens"):
        dense.Shape.preset("llama-3.1-8b", pages=16)


def test_every_call_of_the_header_has_a_method() -> None:
    header = (ROOT / "ffi" / "include" / "forebay.h").read_text()
    calls = set(re.findall(r"^fb_status (fb_dense_\w+)\(", header, re.MULTILINE))
    package = ROOT / "ffi" / "python" / "forebay"
    used = set()
    for file in (package / "record.py", *(package / "dense").glob("*.py")):
        used |= set(re.findall(r"lib\.(fb_dense_\w+)", file.read_text()))
    assert len(calls) > 25 and calls - used == set()


@pytest.mark.parametrize("model", [config_of, windowed])
def test_a_parked_sequence_gives_its_pages_to_another_and_comes_back(
    device: forebay.Device, model: Callable[..., dense.Config]
) -> None:
    """Its rows come back layer by layer, and a step that does not wait for a layer is refused."""
    with dense.Cache(device, model(device_pages=9, host_pages=12, bring_layers=1)) as cache:
        loop = Loop(cache)
        one, _ = request_of(cache, text_of(1, 100), 50, 40)
        loop.prompt(one, 50)
        with pytest.raises(forebay.InvalidState, match="running"):
            one.sequence.resume()
        ticket = one.sequence.park(0)
        device.wait(None)
        cache.reap()
        assert ticket.outcome == "done"
        stats = cache.stats()
        assert stats.parked == 1 and stats.parked_pages[0] == 4 and stats.bytes_down > 0
        with pytest.raises(forebay.InvalidState, match="parked"):
            one.sequence.park(0)
        other, _ = request_of(cache, text_of(2, 120), 100, 2)
        loop.prompt(other, 100)
        with pytest.raises(forebay.Exhausted, match="device pages"):
            one.sequence.resume()
        other.sequence.close()
        one.sequence.resume()
        loop.step([(one, 0, 1)])
        with pytest.raises(forebay.InvalidState, match="did not wait"):
            with cache.prepare([(one.sequence, 1, 1)]) as step:
                step.arrived(1)
                with pytest.raises(forebay.OutOfRange):
                    step.arrived(9)
        step.abandon()
        step.finish()
        assert cache.stats().parked == 0
        cache.validate()
