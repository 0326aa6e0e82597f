"""An engine's loop on the CUDA device, next to the host device: with torch on a GPU, and on the stand-in driver.

The tests are the same for both: `places` has the engine's side of either. `Both` decodes there and on the host device,
and compares the rows at the slots, counts and digests. The torch tests run if torch has a GPU, the stand-in tests if
`FOREBAY_STANDIN_LIBRARY` names the stand-in. The last tests are about torch's own allocator and current stream.

Needs the package, NumPy, pytest, and `conftest.py` and `places.py` in the same folder.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import pytest

import forebay
from conftest import whole
from places import Late, Place, Standin, Torch

LAYERS, ROW, TOP_K, LANES, QUERY_ROWS = 3, 656, 64, 4, 2
# Slots of a sequence: fewer than a step may select, so that scratch slots are used too.
SLOTS, PROMPT, PROMISED, WARM = 64, 180, 160, 5
SHAPE = forebay.Shape(layers=LAYERS, row_bytes=(ROW, 0), top_k=TOP_K, page_tokens=16)


@pytest.fixture(params=[Standin, Late, Torch])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """The place of the engine's arrays."""
    made = request.param()
    yield made
    made.leave()


class Text:
    """A sequence on both devices, and the number of the write of each of its rows."""

    def __init__(self, both: tuple[Any, Any], writers: list[int]) -> None:
        self.both, self.writers = both, writers
        self.pending: list[int] = []
        self.landed = 0
        # Queried once: the values do not change, and a callback may not query its own cache.
        self.landing = [both[1].landing_slot(query) for query in range(QUERY_ROWS)]

    @property
    def length(self) -> int:
        return len(self.writers)


class Both:
    """A cache on the CUDA device and one on the host device, which run the same steps."""

    def __init__(self, place: Place, **changes: Any) -> None:
        self.place = place
        self.host, self.gpu = forebay.HostDevice(), place.device()
        declared: dict[str, Any] = {"lanes": LANES, "max_tokens": PROMPT + PROMISED, "slots": SLOTS, "lock": False}
        declared |= {"query_rows": QUERY_ROWS, **changes}
        self.caches = [forebay.Cache(device, SHAPE, **declared) for device in (self.host, self.gpu)]
        self.slabs = [place.view(self.caches[1].slab(layer)) for layer in range(LAYERS)]
        self.host_slabs = [self.caches[0].slab(layer).reshape(-1, ROW) for layer in range(LAYERS)]
        self.stream = place.stream()
        whole = (LANES, QUERY_ROWS, TOP_K)
        none = np.full(whole, -1, np.int32)
        self.selected, self.resolved = place.array(np.stack([none] * LAYERS)), place.array(np.stack([none] * LAYERS))
        self.fresh = place.array(np.zeros((LAYERS, LANES, QUERY_ROWS, ROW), np.uint8))
        self.seen = place.array(np.zeros((LAYERS, *self.slabs[0].shape), np.uint8))
        self.written = 0

    def nothing(self, query_rows: int = 1) -> tuple[Any, Any]:
        """An empty selection of one batch row, and room for its slots."""
        none = np.full((1, query_rows, TOP_K), -1, np.int32)
        return self.place.array(none), self.place.array(none)

    def rows(self, layer: int, positions: Any, writers: Any) -> np.ndarray[Any, Any]:
        """Rows whose bytes identify them and their write; zeros for position -1."""
        positions, writers = np.asarray(positions), np.asarray(writers)
        keys = ((writers * LAYERS + layer) * 1024 + positions).astype(np.uint32)
        made: np.ndarray[Any, Any] = keys[..., None] * np.uint32(2654435761) + np.arange(ROW // 4, dtype=np.uint32)
        return np.where(positions[..., None] < 0, 0, made).astype(np.uint32).view(np.uint8)

    def open(self, warm_up: bool = False, bring_up: str = "nothing") -> Text:
        """A sequence with its prompt, maybe with a warm-up."""
        self.written += 1
        writers = [self.written] * PROMPT
        warm = np.sort(np.random.default_rng(7).integers(0, PROMPT, (LAYERS, WARM, TOP_K)), -1).astype(np.int32)
        both = [cache.open(prompt=PROMPT, promised=PROMISED, bring_up=bring_up) for cache in self.caches]
        for sequence, given in zip(both, (warm, self.place.array(warm))):
            for layer in range(LAYERS):
                sequence.append(layer, self.rows(layer, range(PROMPT), writers))
            on = self.stream if sequence is both[1] else None
            sequence.join(on, warm_up=given if warm_up else None)
        return Text((both[0], both[1]), writers)

    def begin(self, texts: list[Text], accepted: list[int], widths: list[int]) -> tuple[Any, Any]:
        """Prepares both steps; the new rows of each sequence are in `fresh`."""
        self.written += 1
        for text, count in zip(texts, accepted):
            text.writers += text.pending[:count] if text.landed else []
            text.pending = [self.written] * QUERY_ROWS
        rows = np.zeros((LAYERS, LANES, QUERY_ROWS, ROW), np.uint8)
        for at, text in enumerate(texts):
            for layer in range(LAYERS):
                new = range(text.length, text.length + QUERY_ROWS)
                rows[layer, at] = self.rows(layer, new, [self.written] * QUERY_ROWS)
            text.landed = widths[at]
        self.place.write(self.fresh, rows)
        self.new_rows = rows
        host, gpu = (
            cache.prepare(
                [(text.both[side], count, width) for text, count, width in zip(texts, accepted, widths)],
                query_rows=QUERY_ROWS,
                stream=(None, self.stream)[side],
            )
            for side, cache in enumerate(self.caches)
        )
        return host, gpu

    def choose(self, chance: random.Random, texts: list[Text], widths: list[int]) -> np.ndarray[Any, Any]:
        """Selections of each layer; a query row sees the rows before it and its own."""
        selections = np.full((LAYERS, len(texts), QUERY_ROWS, TOP_K), -1, np.int32)
        for layer in range(LAYERS):
            for at, text in enumerate(texts):
                likely = chance.sample(range(text.length), 130)
                for query in range(widths[at]):
                    own = chance.sample(likely, chance.randint(20, TOP_K - 2)) + [text.length + query]
                    selections[layer, at, query, : len(own)] = own
        return selections

    def expected(self, layer: int, texts: list[Text], selections: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The rows that a layer's attention must read."""
        writers = np.zeros_like(selections)
        for at, text in enumerate(texts):
            known = np.array(text.writers + text.pending, np.int64)
            writers[at] = known[np.maximum(selections[at], 0)]
        return self.rows(layer, selections, writers)

    def on_host(self, step: Any, texts: list[Text], widths: list[int], selections: np.ndarray[Any, Any]) -> Any:
        """Runs the host device's step, checks the rows, and returns the slots of every layer."""
        host_slots = np.full_like(selections, -77)
        for layer in range(LAYERS):
            step.layer(layer, selections[layer], host_slots[layer])
            for at, text in enumerate(texts):
                for query in range(widths[at]):
                    self.host_slabs[layer][text.both[0].landing_slot(query)] = self.new_rows[layer, at, query]
            step.scatter(layer)
            found = self.host_slabs[layer][np.maximum(host_slots[layer], 0)]
            rows = np.where(host_slots[layer][..., None] < 0, 0, found)
            assert np.array_equal(rows, self.expected(layer, texts, selections[layer]))
        return host_slots

    def land(self, layer: int, texts: list[Text], widths: list[int], stream: int) -> None:
        """Copies the new rows to their landing slots."""
        for at, text in enumerate(texts):
            for query in range(widths[at]):
                slot = text.landing[query]
                self.place.copy(self.slabs[layer][slot // 64][slot % 64], self.fresh[layer][at][query], stream)

    def on_gpu(self, step: Any, texts: list[Text], widths: list[int], selections: np.ndarray[Any, Any]) -> None:
        """Enqueues the CUDA device's whole step, with a copy of the slab where attention would read it."""
        raw = self.stream.cuda_stream
        whole = self.place.array(selections)
        slots = [self.place.array(np.full_like(selections[0], -77)) for _ in range(LAYERS)]
        for layer in range(LAYERS):
            step.layer(layer, whole[layer], slots[layer])
            self.land(layer, texts, widths, raw)
            self.place.copy(self.seen[layer], self.slabs[layer], raw)
            step.scatter(layer, stream=raw)
        self.answers = slots

    def end(self, host: Any, gpu: Any, texts: list[Text]) -> Any:
        """Retires both steps, and compares counts and lengths."""
        own, other = host.retire(), gpu.retire(wait=True)
        assert (own.counts == other.counts).all() and (own.lengths == other.lengths).all()
        assert own.lengths.tolist() == [text.length for text in texts]
        return own

    def step(self, chance: random.Random, texts: list[Text]) -> Any:
        """Runs a step of some sequences, with drafts of which some are rejected."""
        accepted = [chance.randint(0, text.landed) for text in texts]
        widths = [chance.randint(1, QUERY_ROWS) for _ in texts]
        host, gpu = self.begin(texts, accepted, widths)
        selections = self.choose(chance, texts, widths)
        host_slots = self.on_host(host, texts, widths, selections)
        self.on_gpu(gpu, texts, widths, selections)
        found = self.end(host, gpu, texts)
        for layer in range(LAYERS):
            # Slot numbers are the device's own, because its slab has other gaps; the rows in the slots are equal.
            assert ((self.place.read(self.answers[layer]) < 0) == (host_slots[layer] < 0)).all()
            expected = self.expected(layer, texts, selections[layer])
            assert self.place.has_rows(self.seen[layer], self.answers[layer], expected)
        return found

    def truncate(self, text: Text, length: int) -> None:
        """Truncates a sequence."""
        text.writers += text.pending[: text.landed] if text.landed else []
        del text.writers[length:]
        text.landed = 0
        for side, sequence in enumerate(text.both):
            sequence.truncate(length, (None, self.stream)[side])
        # A fork and a digest are refused while the step runs.
        self.gpu.wait(self.stream)

    def fork(self, text: Text) -> Text:
        """Forks a sequence."""
        room = {"promised": PROMPT + PROMISED - text.length - QUERY_ROWS, "slots": SLOTS, "bring_up": "nothing"}
        both = [one.fork(stream=(None, self.stream)[side], **room)[0] for side, one in enumerate(text.both)]
        return Text((both[0], both[1]), list(text.writers))

    def check(self, texts: list[Text]) -> None:
        """Checks digests, every row in host memory, and every invariant."""
        for cache in self.caches:
            cache.validate()
        for text in texts:
            assert text.both[0].digest() == text.both[1].digest()
            for layer in range(LAYERS):
                expected = self.rows(layer, range(text.length), text.writers)
                for position in range(text.length):
                    for sequence in text.both:
                        assert sequence.read_row(layer, position).tobytes() == expected[position].tobytes()

    def close(self) -> None:
        self.slabs = []
        for cache in self.caches:
            cache.close()


@pytest.mark.parametrize("seed", range(3))
def test_random_runs_equal_those_on_the_host_device(place: Place, seed: int) -> None:
    chance, both = random.Random(seed), Both(place)
    texts = [both.open(warm_up=number == 1) for number in range(3)]
    hits = misses = scratch = 0
    for turn in range(14):
        found = both.step(chance, texts)
        hits, misses, scratch = hits + found.hits, misses + found.misses, scratch + int(found.counts[:, 2].sum())
        if turn == 4:
            both.truncate(texts[0], chance.randint(PROMPT - 30, texts[0].length))
        if turn == 7:
            both.truncate(texts[2], texts[2].length)
            texts.append(both.fork(texts[2]))
        if turn == 10:
            for side, sequence in enumerate(texts.pop(0).both):
                sequence.close((None, both.stream)[side])
            texts.insert(0, both.open(warm_up=True))
    assert hits > 0 < misses and scratch > 0
    for text in texts:
        both.truncate(text, text.length)
    both.check(texts)
    both.close()


def capture(both: Both, texts: list[Text], order: str, width: int, place: Place) -> tuple[Any, Callable[[], None]]:
    """Captures all layers inside a capture of the engine's, whose own work is copies."""
    rows, whole = len(texts), (len(texts), width, TOP_K)
    selection, slots, lists, counts = (
        place.array(np.full(shape, -1, np.int32)) for shape in (whole, whole, (2, *whole), (2, rows, width))
    )
    buffers = forebay.Buffers(both.caches[1], selection, slots, lists, counts)
    streams = {name: place.stream() for name in ("resolve", "gather", "scatter")}
    layers = forebay.Layers(buffers, compute=both.stream, **streams, batch=rows, half=rows // 2)
    widths = [width] * rows

    def enqueue(call: forebay.EngineCall) -> None:
        if call.work == "index":
            for row in range(call.first, call.first + call.count):
                for query in range(width):
                    place.copy(selection[row][query], both.selected[call.layer][row][query], call.stream)
        elif call.work == "prepare":
            both.land(call.layer, texts, widths, call.stream)
        elif call.work == "attend" and call.attended != "resident":
            place.copy(both.seen[call.layer], both.slabs[call.layer], call.stream)
            for row in range(rows):
                for query in range(width):
                    place.copy(both.resolved[call.layer][row][query], slots[row][query], call.stream)

    with place.capture(both.stream) as replay:
        captured = both.caches[1].capture(
            [layers], query_rows=width, by_layer=[order] * LAYERS, enqueue=enqueue, into=True
        )
    return captured, replay[0]


@pytest.mark.parametrize("order", ["none", "da", "dba"])
def test_steps_that_the_engine_captures_equal_those_on_the_host_device(place: Place, order: str) -> None:
    chance, both = random.Random(5), Both(place)
    texts, width = [both.open(), both.open(warm_up=True)], QUERY_ROWS
    captured, replay = capture(both, texts, order, width, place)
    padding = np.full((LAYERS, LANES - len(texts), QUERY_ROWS, TOP_K), -1, np.int32)
    for _ in range(6):
        accepted, widths = [chance.randint(0, text.landed) for text in texts], [width] * len(texts)
        host, gpu = both.begin(texts, accepted, widths)
        selections = both.choose(chance, texts, widths)
        host_slots = both.on_host(host, texts, widths, selections)
        place.write(both.selected, np.concatenate([selections, padding], axis=1))
        place.write(both.resolved, np.full_like(place.read(both.resolved), -77))
        with pytest.raises(forebay.InvalidState):
            captured.launch([gpu])
        replay()
        captured.launched([gpu])
        both.end(host, gpu, texts)
        answers = place.read(both.resolved)
        for layer in range(LAYERS):
            assert ((answers[layer][: len(texts)] < 0) == (host_slots[layer] < 0)).all()
            rows = np.zeros((LANES, QUERY_ROWS, TOP_K, ROW), np.uint8)
            rows[: len(texts)] = both.expected(layer, texts, selections[layer])
            answers[layer][len(texts) :] = -1
            slots = place.array(answers[layer])
            assert place.has_rows(both.seen[layer], slots, rows)
    for text in texts:
        both.truncate(text, text.length)
    both.check(texts)
    captured.close()
    both.close()


def test_streams_of_the_engine_are_accepted_in_any_form_and_released(place: Place) -> None:
    chance, both = random.Random(2), Both(place)
    text = both.open()
    for bare in (False, True):
        stream = place.stream()
        raw = stream.cuda_stream if bare else stream
        host, gpu = (
            cache.prepare([(text.both[side], 0, 1)], query_rows=1, stream=(None, raw)[side])
            for side, cache in enumerate(both.caches)
        )
        selection = np.full((1, 1, TOP_K), -1, np.int32)
        selection[0, 0, :20] = chance.sample(range(PROMPT), 20)
        host_slots, answer = np.full_like(selection, -1), place.array(np.full_like(selection, -77))
        host.layer(0, selection, host_slots)
        # The selection comes by DLPack alone, and the slots are written by it.
        gpu.layer(0, place.dlpack(place.array(selection)), place.dlpack(answer))
        whole(host, 0)
        whole(gpu, 0, into=both.nothing())
        assert gpu._stream == both.gpu.stream_of(raw) != both.gpu.stream_of(both.stream)
        host.retire(), gpu.retire(wait=True)
        assert ((place.read(answer) < 0) == (host_slots < 0)).all()
        assert place.has_rows(both.slabs[0], answer, both.rows(0, selection, np.full_like(selection, 1)))
        both.gpu.return_stream(raw)
        with pytest.raises(forebay.InvalidArgument, match="stream"):
            both.gpu.return_stream(raw)
        place.end(stream)
    both.close()


def test_two_streams_are_ordered_and_a_third_reads(place: Place) -> None:
    both = Both(place)
    text, fetch, side = both.open(), place.stream(), place.stream()
    selection = np.full((1, 1, TOP_K), -1, np.int32)
    selection[0, 0, :30] = range(50, 80)
    step = both.caches[1].prepare([(text.both[1], 0, 1)], stream=both.stream)
    answer, seen = place.array(np.full_like(selection, -77)), place.array(np.zeros(both.slabs[0].shape, np.uint8))
    buffers = forebay.Buffers(both.caches[1], place.array(selection), answer)
    step.resolve(0, buffers)
    both.gpu.order(both.stream, fetch)
    step.gather(0, stream=fetch)
    both.gpu.order(fetch, side)
    place.copy(seen, both.slabs[0], side.cuda_stream)
    both.gpu.order(side, both.stream)
    whole(step, 0, into=both.nothing())
    step.retire(wait=True)
    assert place.has_rows(seen, answer, both.rows(0, selection, np.full_like(selection, 1)))
    both.close()


def test_device_memory_becomes_a_tensor_by_dlpack_and_by_the_array_interface(place: Place) -> None:
    both = Both(place)
    slab = both.caches[1].slab(1)
    assert slab.__dlpack_device__() == (2, 0) and slab.shape[1:] == (64, ROW)
    found = forebay.dlpack.read(slab)
    assert (found.address, found.shape, found.dtype, found.device) == (slab.address, slab.shape, "uint8", "cuda")
    for refused in ({"copy": True}, {"dl_device": (1, 0)}):
        with pytest.raises(BufferError, match="cuda:0"):
            slab.__dlpack__(**refused)
    # An engine writes through one view and reads through another.
    view = place.view(slab)
    place.write(view[2][5], np.arange(ROW, dtype=np.uint32).astype(np.uint8))
    again = place.view(both.caches[1].slab(1))
    assert (place.read(again[2][5]) == np.arange(ROW, dtype=np.uint32).astype(np.uint8)).all()
    # Rows in two runs have gaps.
    shape = forebay.Shape(layers=1, row_bytes=(32, 16), top_k=8, page_tokens=16)
    with forebay.Cache(place.device(), shape, lanes=1, max_tokens=64, slots=16, lock=False) as cache:
        first, second = cache.slab(0), cache.slab(0, run=1)
        runs = [forebay.dlpack.read(run) for run in (first, second)]
        assert [run.strides for run in runs] == [(64 * 48, 32, 1), (64 * 48, 16, 1)]
        assert runs[1].address - runs[0].address == 64 * 32
    both.close()
    # A view keeps the memory alive, even if it is closed.
    assert place.read(again[2][5])[7] == 7


WEIGHTS, WEIGHT_BYTES = 4, 4 << 20


def weights_of(layer: int) -> np.ndarray[Any, Any]:
    """A layer's tensor, in which each word has its own value."""
    return (np.arange(WEIGHT_BYTES // 4) + (layer << 24)).astype(np.int32)


def shared(place: Place, folder: Path) -> list[forebay.Weights]:
    """Two ranks on the GPU, which share four layers. Each was filled from arrays that are gone."""
    layers = [{"o_proj": WEIGHT_BYTES}] * WEIGHTS
    ranks = [forebay.Weights(place.device(), layers, ["o_proj"], rank=rank, ranks=2) for rank in range(2)]
    for weights in ranks:
        for layer in range(WEIGHTS):
            weights.fill(layer, "o_proj", place.array(weights_of(layer)))

    def join(weights: forebay.Weights) -> None:
        with weights.meet(folder) as links:
            weights.share(links, 60)
            # The other rank may still need an answer.
            links.end()
            while not links.poll(60).is_over:
                continue

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(join, ranks))
    assert not any(weights.device._handle.loans for weights in ranks)
    return ranks


@pytest.mark.parametrize("captured", [False, True])
def test_ranks_pull_each_others_weights_behind_the_engines_work(place: Place, tmp_path: Path, captured: bool) -> None:
    for weights in shared(place, tmp_path):
        stream = place.stream()
        views = [place.view(weights.tensor(layer, "o_proj")) for layer in range(WEIGHTS)]
        nothing = np.zeros(WEIGHT_BYTES, np.uint8)
        seen = [place.array(nothing) for _ in range(WEIGHTS)]

        def uses() -> None:
            for layer in range(WEIGHTS):
                with weights.use(layer, stream):  # noqa: B023 - called in this turn
                    place.copy(seen[layer], views[layer], stream.cuda_stream)  # noqa: B023 - the same

        replay: list[Callable[[], None]] = []
        if captured:
            # Before the capture, which has the pulls of all other layers.
            weights.begin()
            with place.capture(stream) as replay:
                uses()
                weights.end(stream)
        for _ in range(3):
            if captured:
                weights.launch(lambda _on: replay[0](), stream)  # noqa: B023 - the same
            else:
                with weights.step(stream=stream):
                    uses()
            for layer, one in enumerate(seen):
                assert (place.read(one).view(np.int32) == weights_of(layer)).all(), layer
                place.write(one, nothing)
        weights.close()
        place.end(stream)


def test_a_position_beyond_the_length_fails_the_step_and_truncate_repairs_the_sequence(place: Place) -> None:
    chance, both = random.Random(4), Both(place)
    text = both.open()
    both.step(chance, [text])
    both.truncate(text, text.length)
    selection = np.full((1, QUERY_ROWS, TOP_K), -1, np.int32)
    selection[0, 0, :3] = (1, 2, text.length + 40)
    wrong = both.caches[1].prepare([(text.both[1], 0, QUERY_ROWS)], stream=both.stream)
    wrong.layer(1, place.array(selection), place.array(np.full_like(selection, -77)))
    whole(wrong, 1, into=both.nothing(QUERY_ROWS))
    with pytest.raises(forebay.DeviceFailed, match=str(text.length + 40)):
        wrong.retire(wait=True)
    with pytest.raises(forebay.ForebayError):
        both.caches[1].prepare([(text.both[1], 0, 1)], stream=both.stream)
    text.both[1].truncate(text.length, both.stream)
    # The host device did not run this step: resident rows differ from here on, but the rows read do not.
    host, gpu = both.begin([text], [0], [1])
    selections = both.choose(chance, [text], [1])
    both.on_host(host, [text], [1], selections)
    both.on_gpu(gpu, [text], [1], selections)
    host.retire(), gpu.retire(wait=True)
    for layer in range(LAYERS):
        assert place.has_rows(both.seen[layer], both.answers[layer], both.expected(layer, [text], selections[layer]))
    both.close()


def test_tensors_that_do_not_fit_are_refused_and_nothing_is_written(place: Place) -> None:
    both = Both(place)
    text = both.open()
    good, slots = (place.array(np.full((1, 1, TOP_K), value, np.int32)) for value in (-1, -77))
    step = both.caches[1].prepare([(text.both[1], 0, 1)], stream=both.stream)
    elsewhere = types.SimpleNamespace(__cuda_array_interface__=None, device=1)
    elsewhere.__cuda_array_interface__ = {
        "version": 3, "shape": (1, 1, TOP_K), "typestr": "<i4", "data": (1 << 20, False),
    }  # fmt: skip
    gaps = types.SimpleNamespace(__cuda_array_interface__=None, device=0)
    gaps.__cuda_array_interface__ = {**elsewhere.__cuda_array_interface__, "strides": (512, 512, 8)}
    for wrong, says in (
        (np.full((1, 1, TOP_K), -1, np.int32), "host memory.*cuda:0"),
        (elsewhere, "cuda:1.*cuda:0"),
        (gaps, "strides"),
        (place.array(np.full((1, 1, TOP_K), -1, np.int64)), "int64"),
        (place.array(np.full((1, 1, TOP_K // 2), -1, np.int32)), r"\[1, 1, 32\]"),
    ):
        for pair in ((wrong, slots), (good, wrong)):
            with pytest.raises(forebay.InvalidArgument, match=says):
                step.layer(0, pair[0], pair[1], both.stream)
    with pytest.raises(forebay.InvalidArgument, match="warm_up"):
        text.both[1].join(both.stream, warm_up=np.zeros((LAYERS, 1, TOP_K), np.int32))
    for wrong_stream in ("stream", types.SimpleNamespace(cuda_stream=8, device=types.SimpleNamespace(index=1))):
        with pytest.raises(forebay.InvalidArgument, match="stream"):
            step.scatter(0, stream=wrong_stream)
    whole(step, into=both.nothing())
    step.retire(wait=True)
    assert (place.read(slots) == -77).all()
    both.close()


def test_every_call_restores_the_callers_context(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, both = random.Random(3), Both(place)
    calls = 0

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def then(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            before = place.state()
            answer = call(*arguments, **named)
            calls += 1
            assert place.state() == before
            return answer

        return then

    for kind, names in (
        (forebay.Device, ("call", "order", "wait", "allocate", "stream")),
        (forebay.Cache, ("open", "prepare", "slab", "stats", "validate", "capture", "reap", "rows")),
        (forebay.Sequence, ("append", "join", "truncate", "fork", "digest", "close", "landing_slot", "read_row")),
        (forebay.Step, ("layer", "resolve", "gather", "scatter", "finish", "retire")),
    ):
        for name in names:
            monkeypatch.setattr(kind, name, watched(getattr(kind, name)))
    text = both.open(warm_up=True)
    for _ in range(2):
        both.step(chance, [text])
    captured, replay = capture(both, [text, both.open()], "none", 1, place)
    both.truncate(text, text.length)
    other = both.fork(text)
    both.gpu.order(both.gpu.stream(), both.stream)
    both.gpu.wait(both.stream)
    both.gpu.allocate(64)
    both.check([text, other])
    assert calls > 50
    before = place.state()
    captured.close()
    assert place.state() == before
    both.close()
    assert place.state() == before


LAST = """
    import numpy as np
    import forebay
    from test_gpu import Both, TOP_K
    both = Both(place)
    text = both.open()
    selection = np.full((1, 1, TOP_K), -1, np.int32)
    selection[0, 0, :20] = range(20)
    step = both.caches[1].prepare([(text.both[1], 0, 1)], stream=both.stream)
    for layer in range(3):
        step.layer(layer, place.array(selection), place.array(selection))
        step.scatter(layer)
    kept = place.view(both.caches[1].slab(0))
    {end}
    print("at the end", flush=True)
"""


@pytest.mark.parametrize("end", ["step.finish()", "del both, text", "del step", "both.gpu.close()"])
def test_the_interpreter_ends_with_work_in_flight(place: Place, end: str) -> None:
    tests = os.path.dirname(os.path.abspath(__file__))
    script = "import sys\n" + textwrap.dedent(place.SCRIPT).format(tests=tests) + textwrap.dedent(LAST).format(end=end)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "at the end\n"), ran.stderr


@pytest.fixture
def on_torch() -> Iterator[Torch]:
    """Torch, for tests that only torch can run."""
    made = Torch()
    yield made
    made.leave()


def test_torchs_allocator_does_not_count_forebays_memory(on_torch: Torch) -> None:
    torch = on_torch.torch

    def taken() -> Any:
        return torch.cuda.memory_stats(0), torch.cuda.memory_allocated(0), torch.cuda.memory_reserved(0)

    selection = on_torch.array(np.full((1, 1, TOP_K), 3, np.int32))
    slots = torch.empty_like(selection)
    stream = on_torch.stream()
    torch.cuda.synchronize()
    before, free = taken(), torch.cuda.mem_get_info(0)[0]
    device = on_torch.device()
    cache = forebay.Cache(device, SHAPE, lanes=4, max_tokens=4096, slots=2048, lock=False)
    assert taken() == before and torch.cuda.mem_get_info(0)[0] < free - cache.info.layers * 4 * 2048 * ROW
    with cache.open(prompt=16, promised=16) as sequence:
        for layer in range(LAYERS):
            sequence.append(layer, np.zeros((16, ROW), np.uint8))
        sequence.join(stream)
        for turn in range(4):
            with cache.prepare([(sequence, min(turn, 1), 1)], stream=stream) as step:
                for layer in range(LAYERS):
                    step.layer(layer, selection, slots)
                    step.scatter(layer)
            if step.retired is None:
                step.retire(wait=True)
    assert taken() == before
    # To torch's allocator a view is no allocation, whichever way made it.
    views = [torch.from_dlpack(cache.slab(0)), torch.as_tensor(cache.slab(0), device="cuda:0")]
    assert taken() == before
    assert {view.data_ptr() for view in views} == {cache.slab(0).address}
    pools = torch.cuda.memory_snapshot()
    for block in pools:
        assert not block["address"] <= cache.slab(0).address < block["address"] + block["total_size"]
    cache.close()
    torch.cuda.empty_cache()
    # Emptying torch's pool takes nothing from a view.
    assert int(views[0].sum()) == int(views[1].sum())


def test_a_tensor_that_a_step_reads_is_not_reused_by_the_allocator(on_torch: Torch) -> None:
    torch, both = on_torch.torch, Both(on_torch)
    text = both.open()
    step = both.caches[1].prepare([(text.both[1], 0, 1)], stream=both.stream)
    selection = torch.full((1, 1, TOP_K), 5, dtype=torch.int32, device="cuda:0")
    slots = torch.empty_like(selection)
    addresses = {selection.data_ptr(), slots.data_ptr()}
    torch.cuda.synchronize()
    step.layer(0, selection, slots)
    del selection, slots
    others = [torch.empty((1, 1, TOP_K), dtype=torch.int32, device="cuda:0") for _ in range(64)]
    assert not addresses & {other.data_ptr() for other in others}
    whole(step, 0, into=both.nothing())
    step.retire(wait=True)
    both.close()


def test_torchs_current_stream_is_the_default(on_torch: Torch) -> None:
    torch, both = on_torch.torch, Both(on_torch)
    text, stream = both.open(), on_torch.stream()
    stream.wait_stream(torch.cuda.current_stream())
    selection = np.full((1, 1, TOP_K), -1, np.int32)
    selection[0, 0, :9] = range(9)
    with torch.cuda.stream(stream):
        asked, slots = on_torch.array(selection), on_torch.array(selection)
        # Torch's own work precedes it on the same stream; nothing else orders the two.
        wide = torch.zeros((2048, 2048), device="cuda:0")
        for _ in range(20):
            wide = wide @ wide
        asked += wide[:1, :TOP_K].to(torch.int32)
        step = both.caches[1].prepare([(text.both[1], 0, 1)])
        step.layer(0, asked, slots)
        rows = both.slabs[0].reshape(-1, ROW)[slots[0, 0, :9].long()].clone()
        whole(step, 0, into=both.nothing())
        step.finish()
    assert step._stream == both.gpu.stream_of(stream)
    step.retire(wait=True)
    torch.cuda.synchronize()
    assert rows.cpu().numpy().tobytes() == both.rows(0, range(9), [1] * 9).tobytes()
    both.close()
