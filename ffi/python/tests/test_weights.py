"""Weights that ranks share: plans, fills, steps, layers made resident, new versions, and errors."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import pytest

import forebay
from forebay import sharding
from forebay._library import ffi
from forebay.links import config_of, milliseconds
from conftest import OnCuda, on_host
from ranks import BYTES, GRANULE, HALF, LAYERS, NAME, WAIT, Rank, content, each, group
from test_cuda import cuda  # noqa: F401 - a fixture

Pair = Callable[..., list[Rank]]
WHOLE = [True] * LAYERS


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Makes two ranks that have shared, and closes them."""
    made: list[Rank] = []

    def build(threads: bool = False, **changes: Any) -> list[Rank]:
        made.extend(group(tmp_path, [forebay.HostDevice(threads=threads) for _ in range(2)], **changes))
        return made[-2:]

    yield build
    for rank in made:
        rank.close()


@pytest.fixture
def alone() -> Iterator[Rank]:
    """A rank that has met no other."""
    rank = Rank(0, 2, forebay.HostDevice())
    yield rank
    rank.close()


@pytest.mark.parametrize("threads", [False, True])
def test_every_use_shows_the_whole_layer(pair: Pair, threads: bool) -> None:
    for rank in pair(threads):
        assert [rank.step(), rank.step(), rank.step()] == [WHOLE] * 3
        # Without enter a layer is not there: two buffers hold the halves of six layers.
        assert sum(rank.reads(layer) for layer in range(LAYERS)) == 2


def test_a_layer_that_is_not_left_keeps_its_buffer(pair: Pair) -> None:
    weights = pair()[0].weights
    weights.begin()
    weights.enter(0)
    weights.leave(0)
    weights.enter(1)
    weights.leave(1)
    weights.enter(2)
    with pytest.raises(forebay.InvalidState, match="layer"):
        weights.end()
    weights.abandon()
    weights.abandon()


def test_micro_batches_draft_passes_and_parts_are_of_the_configuration(pair: Pair) -> None:
    rank = pair(micro_batches=2, draft_layers=1, parts=2, copy_bytes=GRANULE)[0]
    weights = rank.weights
    streams = [rank.device.stream(), rank.device.stream()]
    assert weights.layer(0).copies == HALF // GRANULE
    for _ in range(2):
        with weights.step(2, 2, stream=streams[0]):
            for layer in [*range(LAYERS), LAYERS - 1]:
                for micro_batch, stream in enumerate(streams):
                    with weights.use(layer, stream, micro_batch=micro_batch):
                        weights.advance(stream)
                        assert rank.reads(layer)
    with pytest.raises(forebay.OutOfRange):
        weights.begin(3)


def test_steps_with_a_prefetch_find_every_layer_whole(pair: Pair) -> None:
    rank = pair(prefetch=(GRANULE, 1 << 30))[0]
    for _ in range(2):
        with rank.weights.step():
            for layer in range(LAYERS):
                with rank.weights.use(layer):
                    assert rank.reads(layer)


def test_a_plan_is_what_the_arithmetic_says() -> None:
    with forebay.HostDevice() as device:
        plan = forebay.Weights.plan(device, [{NAME: BYTES}] * LAYERS, ["*proj"], rank=0, ranks=2)
        assert plan == forebay.WeightBytes(
            resident=0, shards=LAYERS * HALF, buffers=(HALF, HALF, 0), device=(LAYERS + 2) * HALF, host=0,
            whole=LAYERS * BYTES, saved=(2 * LAYERS - LAYERS - 2) * HALF, pulled=LAYERS * HALF, granule=GRANULE,
            layers=LAYERS, sharded_layers=LAYERS, closing="even", resident_layer=None,
        )  # fmt: skip
        rank = Rank(0, 2, device)
        assert rank.weights.planned == plan and rank.weights.device_bytes == plan.device
        assert repr(rank.weights) == f"<forebay.Weights on host memory: {LAYERS} of {LAYERS} layers sharded>"
        # From the host's memory: all of it is pulled, and nothing is given.
        hosted = forebay.Weights.plan(device, [{NAME: BYTES}] * 4, [NAME], rank=0, ranks=2, source="host")
        assert (hosted.host, hosted.pulled, hosted.device) == (4 * BYTES, 4 * BYTES, 2 * BYTES)


def test_an_odd_number_of_layers_has_what_is_asked_for() -> None:
    with forebay.HostDevice() as device:
        found = {
            odd: forebay.Weights.plan(device, [{NAME: BYTES}] * 5, [NAME], rank=1, ranks=2, odd=odd)
            for odd in ("cheapest", "third buffer", "first", "last")
        }
    assert (found["third buffer"].closing, found["third buffer"].buffers) == ("third buffer", (HALF, HALF, HALF))
    assert (found["first"].closing, found["first"].resident_layer) == ("resident", 0)
    assert (found["last"].resident_layer, found["last"].sharded_layers) == (4, 4)
    assert found["cheapest"].device == min(plan.device for plan in found.values())


def test_a_budget_shards_the_fewest_layers() -> None:
    layers = [{NAME: BYTES, "scale": 128}] * 8
    with forebay.HostDevice() as device:
        # Four sharded layers and two buffers take six halves, four whole layers eight.
        plan = forebay.Weights.plan(device, layers, [NAME], rank=0, ranks=2, budget=14 * HALF)
        assert (plan.sharded_layers, plan.layers, plan.device) == (4, 8, 14 * HALF)
        least = 10 * HALF
        with pytest.raises(forebay.OutOfMemory, match=str(least)):
            forebay.Weights.plan(device, layers, [NAME], rank=0, ranks=2, budget=least - 1)
    # Nothing was taken for a plan: a device without memory plans too.
    with forebay.HostDevice(memory=GRANULE) as small:
        assert forebay.Weights.plan(small, layers, [NAME], rank=0, ranks=2).device == least
        with pytest.raises(forebay.OutOfMemory):
            forebay.Weights(small, layers, [NAME], rank=0, ranks=2)


def test_every_argument_reaches_its_field() -> None:
    whole = {"rank": 1, "ranks": 4, "group": 1 << 40, "draft_layers": 1}
    chosen = {"source": "host", "odd": "last", "wrap": "behind"}
    numbers = {"budget": 5 << 40, "copy_bytes": 6 << 40, "micro_batches": 7, "parts": 8}
    config, _held = sharding.declare([{"a": (9, 16)}, {"b": 1 << 40}], ["a", "*b"], whole, chosen, numbers)
    found = {name: getattr(config, name) for name in [*whole, *chosen, *numbers]}
    assert found == {**whole, **numbers, "source": 1, "odd": 3, "wrap": 1}
    tensors = [config.tensors[at] for at in range(config.tensor_count)]
    assert [(one.layer, one.bytes, one.align) for one in tensors] == [(0, 9, 16), (1, 1 << 40, 0)]
    assert (config.layers, config.pattern_count, config.reserved) == (2, 2, 0)
    given, _path = config_of("folder", bytes(range(32)), 1, 0.0021, 3.5, 70000)
    assert (given.hello_ms, given.interval_ms, given.lost_ms, given.queue_bytes) == (1000, 3, 3500, 70000)
    assert bytes(given.geometry) == bytes(range(32)) and ffi.string(given.folder) == b"folder"
    # A time is never rounded to nothing.
    assert [milliseconds(time, "time") for time in (0, 1e-9, 2)] == [0, 1, 2000]


def test_a_layer_has_its_tensors_in_order_and_aligned(alone: Rank) -> None:
    layers = [{"a": 100, "b": (200, 1024), "c": 4}, {}, {"b": 300}]
    weights = forebay.Weights(alone.device, layers, ["a", "b*"], rank=0, ranks=1)
    for layer, name, size in ((0, "a", 100), (0, "b", 200), (2, "b", 300)):
        weights.fill(layer, name, np.full(size, layer + ord(name), np.uint8))
    window, base = weights.window(0), weights.layer(0).address
    a, b = (weights.tensor(0, name) for name in "ab")
    assert a.ctypes.data == base == window.ctypes.data and b.ctypes.data == base + 1024
    assert (window[:100] == ord("a")).all() and (window[1024:1224] == ord("b")).all()
    assert window.shape == (GRANULE,) and weights.layer(2).bytes == GRANULE
    for layer, name in ((0, "c"), (1, "a"), (3, "a"), (2, "a")):
        with pytest.raises(forebay.OutOfRange):
            weights.tensor(layer, name)
    weights.close()


class Producer:
    """An object with DLPack alone."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def test_a_tensor_of_any_kind_fills(pair: Pair, tmp_path: Path) -> None:
    def kinds(device: forebay.Device) -> list[Any]:
        own = device.allocate(BYTES)
        own[:] = content(4).view(np.uint8)
        readonly = content(5).view(np.float32)
        readonly.flags.writeable = False
        return [
            content(0), content(1).view(np.uint8).reshape(8, -1, 2), Producer(content(2).view(np.int64)),
            memoryview(content(3)) and np.asarray(memoryview(content(3))), own, readonly,
        ]  # fmt: skip

    ranks = [Rank(number, 2, forebay.HostDevice()) for number in range(2)]
    for rank in ranks:
        for layer, tensor in enumerate(kinds(rank.device)):
            rank.weights.fill(layer, NAME, tensor)
    for rank in each(lambda rank: rank.join(tmp_path), ranks):
        assert rank.step() == WHOLE
        rank.weights.verify(3)
        rank.close()


def test_a_tensor_that_does_not_fit_is_refused(alone: Rank) -> None:
    weights, good = alone.weights, content(0)
    refused: list[tuple[Any, str]] = [
        (good.view(np.uint8)[::2], "strides"),
        (good.reshape(2, -1).T, "strides"),
        ([1, 2], "tensor: got list"),
        (good.astype(object), "numbers"),
        (good.astype(">u4"), "byte order"),
    ]
    for tensor, says in refused:
        with pytest.raises(forebay.InvalidArgument, match=says):
            weights.fill(0, NAME, tensor)
    elsewhere = forebay.CudaMemory(alone.device._handle, 4096, forebay.tensors.Place("cuda", 0), (BYTES,), None)
    with pytest.raises(forebay.InvalidArgument, match=r"cuda:0; expected one in host memory$"):
        weights.fill(0, NAME, elsewhere)
    for layer, name, tensor in ((0, NAME, good[:-1]), (0, "q_proj", good), (LAYERS, NAME, good)):
        with pytest.raises(forebay.OutOfRange):
            weights.fill(layer, name, tensor)
    with pytest.raises(forebay.InvalidArgument, match="name: "):
        weights.fill(0, "a\0b", good)
    weights.fill(0, NAME, good)


def test_a_view_has_the_shape_and_dtype_that_were_asked_for(pair: Pair) -> None:
    weights = pair()[0].weights
    weights.make_resident(1)
    view = weights.tensor(1, NAME, (16, BYTES // 64), np.float32)
    assert view.shape == (16, BYTES // 64) and view.dtype == np.float32
    assert (view.reshape(-1).view(np.uint32) == content(1)).all()
    assert weights.tensor(1, NAME).shape == (BYTES,)
    for shape, dtype, says in (
        ((16, 16), np.float32, r"shape: got float32 \[16, 16\]; expected one of 65536 bytes"),
        (None, "bfloat17", "dtype: got 'bfloat17'"),
        (None, object, "dtype: "),
        (None, np.dtype((np.float32, (2,))), "dtype: "),
        (None, "datetime64[s]", "dtype: "),
        ((-1, 16), np.uint8, "shape: got -1"),
        (16, np.uint8, "shape: got int"),
    ):
        with pytest.raises(forebay.InvalidArgument, match=says):
            weights.tensor(1, NAME, shape, dtype)  # type: ignore[arg-type]


def test_a_window_is_read_only(pair: Pair) -> None:
    weights = pair()[0].weights
    for view in (weights.window(0), weights.tensor(0, NAME)):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        with pytest.raises(ValueError):
            view.flags.writeable = True
        with pytest.raises(ValueError):
            np.from_dlpack(view)[0] = 1


def test_layers_become_resident_and_sharded_again(pair: Pair) -> None:
    rank, _ = pair()
    weights, plan = rank.weights, rank.weights.planned.device
    assert [weights.layer(layer).is_resident for layer in range(LAYERS)] == [False] * LAYERS
    weights.make_resident(3)
    weights.make_resident(3)
    layer = weights.layer(3)
    assert layer.is_resident and layer.is_sharded and layer.pulled == HALF and layer.version == 0
    # It is there without a step, and its pulls leave it alone.
    assert rank.reads(3) and weights.device_bytes == plan + HALF
    assert rank.step() == WHOLE and rank.reads(3)
    # All of them: two halves more are left out of the bound.
    assert weights.grow(plan + 3 * HALF + 1) == plan + 3 * HALF == weights.device_bytes
    assert sum(weights.layer(layer).is_resident for layer in range(LAYERS)) == 3 and rank.step() == WHOLE
    assert weights.shrink(plan + 2 * HALF) == plan + 2 * HALF
    with pytest.raises(forebay.OutOfMemory, match=str(plan)):
        weights.shrink(plan - 1)
    assert weights.device_bytes == plan + 2 * HALF
    weights.make_sharded(3)
    assert weights.shrink(plan) == plan and rank.step() == WHOLE
    assert not any(weights.layer(layer).is_resident for layer in range(LAYERS))
    with weights.step():
        for call in (lambda: weights.make_resident(0), lambda: weights.shrink(plan), lambda: weights.grow(plan)):
            with pytest.raises(forebay.Busy):
                call()
        for layer_ in range(LAYERS):
            with weights.use(layer_):
                continue


def update(rank: Rank, version: int, layers: list[int], fill: bool = True) -> forebay.Update:
    """An update with new contents."""
    made = rank.weights.update(version, layers, 1 << 30)
    for layer in layers if fill else ():
        made.fill(layer, NAME, content(layer, version))
    return made


def test_a_new_version_is_taken_by_all_ranks(pair: Pair) -> None:
    ranks = pair(threads=True)
    updates = [update(rank, 1, [1, 4]) for rank in ranks]
    assert [rank.step() for rank in ranks] == [WHOLE] * 2
    each(lambda one, rank: one.share(rank.links, WAIT), updates, ranks)
    updates[0].verify(4)
    assert repr(updates[0]) == "<forebay.Update to version 1>" and updates[0].version == 1
    done = each(lambda one, rank: rank.weights.commit(one, rank.links, 7, WAIT), updates, ranks)
    assert done == [(True, "")] * 2 and all(done)
    for one in updates:
        one.close()
        one.close()
    for rank in ranks:
        assert [rank.weights.layer(layer).version for layer in range(LAYERS)] == [0, 1, 0, 0, 1, 0]
        with rank.weights.step():
            for layer in range(LAYERS):
                with rank.weights.use(layer):
                    rank.device.wait()
                    assert rank.reads(layer, int(layer in (1, 4)))


@pytest.mark.parametrize("why", ["another border", "closed"])
def test_a_version_that_one_rank_does_not_take_is_taken_by_none(pair: Pair, why: str) -> None:
    ranks = pair()
    updates = [update(rank, 1, [2]) for rank in ranks]
    each(lambda one, rank: one.share(rank.links, WAIT), updates, ranks)
    if why == "closed":
        updates[1].close()
        done = [ranks[0].weights.commit(updates[0], ranks[0].links, 1, WAIT)]
    else:
        done = each(lambda one, rank: rank.weights.commit(one, rank.links, rank.number, WAIT), updates, ranks)
    assert not any(done) and all(not one.committed for one in done) and any(one.reason for one in done)
    for one in updates:
        one.close()
    assert [rank.step() for rank in ranks] == [WHOLE] * 2
    assert ranks[0].weights.layer(2).version == 0
    # A higher version is begun again, and taken.
    updates = [update(rank, 2, [2]) for rank in ranks]
    each(lambda one, rank: one.share(rank.links, WAIT), updates, ranks)
    assert all(each(lambda one, rank: rank.weights.commit(one, rank.links, 9, WAIT), updates, ranks))
    for one in updates:
        one.close()


def test_errors_of_an_update(pair: Pair) -> None:
    rank, other = pair()
    weights, links = rank.weights, rank.links
    for layers, error in (([], forebay.InvalidConfig), ([1, 1], forebay.InvalidConfig), ([9], forebay.OutOfRange)):
        with pytest.raises(error):
            weights.update(1, layers, 1 << 30)
    with pytest.raises(forebay.OutOfRange, match="version"):
        weights.update(0, [1], 1 << 30)
    # The new half, and once a granule.
    with pytest.raises(forebay.OutOfMemory, match=str(HALF + GRANULE)):
        weights.update(1, [1], HALF + GRANULE - 1)
    with update(rank, 1, [1], fill=False) as one:
        with pytest.raises(forebay.Busy):
            weights.update(2, [1], 1 << 30)
        with pytest.raises(forebay.OutOfRange):
            one.fill(2, NAME, content(2))
        for call in (lambda: one.share(links, 1), lambda: weights.commit(one, links, 1, 1)):
            with pytest.raises(forebay.InvalidState):
                call()
        # Nothing was decided.
        assert not one.failed
        with pytest.raises(forebay.InvalidArgument, match="links: got Weights"):
            one.share(weights, 1)  # type: ignore[arg-type]
        one.fill(1, NAME, content(1, 1))
        with pytest.raises(forebay.InvalidState):
            other.weights.commit(one, links, 1, 1)
    with pytest.raises(forebay.Closed):
        one.verify(1)
    assert repr(one).endswith(", closed>")
    # One that was forgotten is no longer in the way.
    update(rank, 3, [1])
    weights.update(4, [1], 1 << 30).close()


def test_calls_before_and_after_the_parts_are_shared(alone: Rank, pair: Pair, tmp_path: Path) -> None:
    early = alone.weights
    for call in (early.begin, early.abandon, early.end, lambda: early.enter(0), lambda: early.update(1, [0], 1),
                 lambda: early.make_resident(0), lambda: early.window(0), lambda: early.meet(tmp_path, hello=0.1)):
        with pytest.raises(forebay.InvalidState):
            call()
    alone.fill()
    with pytest.raises(forebay.TimedOut, match=r"rank 1"):
        early.meet(tmp_path, hello=0.1)
    rank, _ = pair()
    for call in (lambda: rank.fill(), lambda: rank.weights.share(rank.links, 1),
                 lambda: rank.weights.meet(tmp_path, hello=0.1)):
        with pytest.raises(forebay.InvalidState):
            call()


def test_ranks_that_differ_refuse_each_other(tmp_path: Path) -> None:
    ranks = [Rank(number, 2, forebay.HostDevice()).fill() for number in range(2)]

    def meet(rank: Rank) -> type[BaseException] | None:
        try:
            rank.weights.meet(tmp_path, geometry=bytes([rank.number] * 32), hello=WAIT).close()
        except forebay.ForebayError as error:
            return type(error)
        return None

    assert forebay.InvalidConfig in each(meet, ranks)
    # They are filled as before, and can meet again.
    for rank in each(lambda rank: rank.join(tmp_path), ranks):
        assert rank.step() == WHOLE
        rank.close()


def test_arguments_of_a_wrong_kind_are_named(alone: Rank, pair: Pair, tmp_path: Path) -> None:
    device, layers = alone.device, [{NAME: BYTES}] * 2
    links = pair()[0].links

    def made(**changes: Any) -> Callable[[], object]:
        given = {"device": device, "layers": layers, "patterns": [NAME], "rank": 0, "ranks": 2, **changes}
        return lambda: forebay.Weights(**given)

    wrong: list[tuple[str, Callable[[], object]]] = [
        ("device: got str", made(device="cuda")),
        ("layers: got int", made(layers=2)),
        (r"layers\[1\]: got list", made(layers=[{NAME: 4}, [NAME]])),
        (r"layers\[0\]\['o_proj'\]: got 0", made(layers=[{NAME: 0}])),
        (r"layers\[0\]\['o_proj'\]: got 'x'", made(layers=[{NAME: "x"}])),
        (r"layers\[0\]\['o_proj'\]: got 0; expected a whole number from 1", made(layers=[{NAME: (4, 0)}])),
        (r"a name in layers\[0\]: got int", made(layers=[{7: 4}])),
        ("patterns: got str", made(patterns=NAME)),
        (r"patterns\[0\]: got int", made(patterns=[3])),
        ("rank: got -1", made(rank=-1)),
        ("ranks: got 1.5", made(ranks=1.5)),
        ("group: got None", made(group=None)),
        ("draft_layers: got 'a'", made(draft_layers="a")),
        ("source: got 'disk'; expected 'peers' or 'host'", made(source="disk")),
        ("odd: got 3; expected 'cheapest' or 'third buffer' or 'first' or 'last'", made(odd=3)),
        ("wrap: got 'x'; expected 'joined' or 'behind'", made(wrap="x")),
        ("budget: got 0; expected a whole number from 1 on", made(budget=0)),
        ("copy_bytes: got -4", made(copy_bytes=-4)),
        ("micro_batches: got 0", made(micro_batches=0)),
        ("parts: got 'two'", made(parts="two")),
        ("prefetch: got 5; expected bytes and bytes per second", made(prefetch=5)),
        ("prefetch_rate: got 0", made(prefetch=(4096, 0))),
        ("geometry: got b'a'; expected 32 bytes", lambda: alone.weights.meet(tmp_path, geometry=b"a")),
        ("hello: got 0; expected seconds above 0", lambda: alone.weights.meet(tmp_path, hello=0)),
        ("lost: got -1; expected seconds from 0 to 4294967", lambda: alone.weights.meet(tmp_path, lost=-1)),
        ("interval: got nan", lambda: alone.weights.meet(tmp_path, interval=float("nan"))),
        ("queue_bytes: got 0", lambda: alone.weights.meet(tmp_path, queue_bytes=0)),
        ("path: got ", lambda: alone.weights.meet(None)),  # type: ignore[arg-type]
        ("at_most: got 'soon'", lambda: links.poll("soon")),  # type: ignore[arg-type]
        ("at_most: got inf", lambda: links.readmit(float("inf"))),
        ("links: got None", lambda: alone.weights.share(None, 1)),  # type: ignore[arg-type]
        ("update: got None", lambda: alone.weights.commit(None, links, 1, 1)),  # type: ignore[arg-type]
        ("launch: got int", lambda: alone.weights.launch(3)),  # type: ignore[arg-type]
        ("layer: got 'a'", lambda: alone.weights.layer("a")),  # type: ignore[arg-type]
        (r"layers\[1\]: got 'b'", lambda: alone.weights.update(1, [0, "b"], 1)),  # type: ignore[list-item]
        ("stream: got int 77", lambda: alone.weights.enter(0, 77)),
    ]
    for says, call in wrong:
        with pytest.raises(forebay.InvalidArgument, match=f"^{says}"):
            call()
    refused: list[tuple[str, type[BaseException], Callable[[], object]]] = [
        ("rank", forebay.OutOfRange, made(rank=2)),
        ("q_proj", forebay.InvalidConfig, made(patterns=["q_proj"])),
        ("micro_batches", forebay.InvalidConfig, made(micro_batches=1025)),
        ("draft_layers", forebay.InvalidConfig, made(draft_layers=3)),
        ("ali", forebay.InvalidConfig, made(layers=[{NAME: (4, 3)}])),
    ]
    for says, kind, call in refused:
        with pytest.raises(kind, match=says):
            call()
    with pytest.raises(forebay.OutOfRange):
        alone.weights.lost(0)


def test_a_step_whose_body_raises_is_abandoned(pair: Pair) -> None:
    rank, _ = pair()
    with pytest.raises(KeyError), rank.weights.step():
        with rank.weights.use(0):
            raise KeyError
    assert rank.step() == WHOLE
    # So is one that lacks a layer's end.
    with pytest.raises(forebay.InvalidState), rank.weights.step():
        rank.weights.enter(0)
    with rank.weights.step():
        with pytest.raises(forebay.Busy):
            rank.weights.begin()
        for wrong in (1, "x"):
            with pytest.raises((forebay.Busy, forebay.InvalidArgument)), rank.weights.step(wrong):
                raise AssertionError
        for layer in range(LAYERS):
            with rank.weights.use(layer):
                continue
    with pytest.raises(forebay.InvalidState):
        rank.weights.end()
    assert rank.step() == WHOLE


def test_a_launch_gets_the_stream_and_its_exception_passes_through(pair: Pair) -> None:
    rank, _ = pair()
    stream = rank.device.stream()
    got: list[Any] = []

    def launch(on: int) -> None:
        with pytest.raises(forebay.Busy):
            rank.weights.device_bytes  # noqa: B018 - a call
        got.append(on)

    rank.weights.launch(launch, stream)
    assert got == [stream.address]
    with pytest.raises(ZeroDivisionError):
        rank.weights.launch(lambda _on: 1 / 0, stream)
    with pytest.raises(KeyboardInterrupt):
        rank.weights.launch(lambda _on: interrupt(), stream)
    rank.weights.launch(launch, stream)
    assert len(got) == 2 and rank.step() == WHOLE


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_thread_serves_the_sessions_while_another_steps(pair: Pair) -> None:
    rank, other = pair()
    stop, seen = threading.Event(), []

    def serve() -> None:
        while not stop.is_set():
            seen.append(rank.links.poll(0.02).kind)

    server = threading.Thread(target=serve)
    server.start()
    assert [rank.step() for _ in range(50)] == [WHOLE] * 50
    stop.set()
    server.join()
    assert set(seen) == {"nothing"} and seen
    assert each(end, [rank, other]) == [[("ended", 1, None, True)], [("ended", 0, None, True)]]


def end(rank: Rank) -> list[forebay.LinkEvent]:
    """Ends the sessions in order. Returns what is said until they are over."""
    rank.links.end()
    events = [rank.links.poll(WAIT)]
    while not events[-1].is_over:
        events.append(rank.links.poll(WAIT))
    return events


def test_two_threads_do_not_use_the_sessions_at_once(pair: Pair) -> None:
    rank, other = pair()
    seen: list[Any] = []

    def poll() -> None:
        while not seen:
            try:
                event = rank.links.poll(WAIT)
                seen.append((event.kind, type(event.error)))
            except forebay.Busy:
                continue

    polls = threading.Thread(target=poll)
    polls.start()
    said = ""
    while not said:
        assert polls.is_alive()
        try:
            rank.links.poll()
            # The other thread's call comes between two of these.
            time.sleep(0.001)
        except forebay.Busy as error:
            said = str(error)
    assert re.match("links: .*call when it has returned", said)
    # Closing is refused too, and so is a call of the weights that needs the sessions.
    with pytest.raises(forebay.Busy, match="links: "):
        rank.links.close()
    with pytest.raises(forebay.Busy, match="fb_links"):
        rank.weights.reattach(rank.links, 1, 0)
    assert not rank.links.closed
    # The other rank's end, which is not in order, is the event for which the thread waits.
    other.links.close()
    polls.join()
    assert seen == [("lost", forebay.PeerLost)]


def test_windows_on_cuda_are_described_as_what_they_are(cuda: forebay.CudaDevice) -> None:  # noqa: F811
    size = 4 << 20
    with forebay.Weights(cuda, [{NAME: size}] * 2, [NAME], rank=0, ranks=1) as weights:
        own = OnCuda(cuda.allocate(size), (size // 4,))
        for layer in range(2):
            cuda.wait()
            own.host()[:] = np.arange(size // 4) + layer
            weights.fill(layer, NAME, own)
        with pytest.raises(forebay.InvalidArgument, match="in cuda:1; expected one in cuda:0 or in host memory$"):
            weights.fill(1, NAME, forebay.CudaMemory(cuda._handle, 4096, forebay.tensors.Place("cuda", 1), (4,), None))
        cuda.wait()
        view = weights.tensor(1, NAME, (16, size // 64), np.float32)
        assert isinstance(view, forebay.CudaMemory) and view.readonly and view.place == cuda.place
        assert view.__cuda_array_interface__["data"] == (view.address, True)
        assert view.__cuda_array_interface__["typestr"] == "<f4"
        assert (on_host(view).reshape(-1).view(np.int32) == np.arange(size // 4) + 1).all()
        # DLPack 1.0 says that it may only be read; older consumers, which cannot be told, get it too.
        placed = forebay.dlpack.read(view)
        assert (placed.address, placed.shape, placed.dtype) == (view.address, view.shape, "float32")
        assert (placed.device, placed.number, placed.readonly) == ("cuda", 0, True)
        capsule = view.__dlpack__()
        tensor, readonly = forebay.dlpack._inside(capsule)
        assert not readonly and (tensor.device.kind, tensor.data) == (forebay.dlpack.CUDA, view.address)
        assert not forebay.dlpack.read(cuda.allocate(64)).readonly
    with pytest.raises(forebay.InvalidArgument):
        forebay.tensors.checked(view, "slots", None, (16, size // 64), cuda.place, True)
