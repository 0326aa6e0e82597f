"""`finish` refuses a step in which a call was forgotten; if only the device can detect it, the step fails."""

from __future__ import annotations

import ctypes
from typing import Any, Callable, Iterator

import numpy as np
import pytest

import forebay
from conftest import LAYERS, ROW, TOP_K, Driver, OnCuda, empty, joined, some, whole
from test_cuda import cuda  # noqa: F401 - a fixture

Make = Callable[..., forebay.Cache]
Call = Callable[[forebay.Step, forebay.Buffers], None]


def nothing(step: forebay.Step, buffers: forebay.Buffers) -> None:
    """Forgets every call of layer 1."""


def no_gather(step: forebay.Step, buffers: forebay.Buffers) -> None:
    step.resolve(1, buffers)
    step.scatter(1)


def no_scatter(step: forebay.Step, buffers: forebay.Buffers) -> None:
    step.layer(1, buffers)


def half(step: forebay.Step, buffers: forebay.Buffers) -> None:
    step.resolve(1, buffers, first=0, count=1)
    step.gather(1, first=0, count=1)
    step.scatter(1)


FORGOTTEN = [
    (nothing, "a resolve was not enqueued .layer 1, batch row 0"),
    (no_gather, "a gather was not enqueued .layer 1, batch row 0"),
    (no_scatter, "a scatter was not enqueued .layer 1, batch row 0"),
    (half, "a resolve was not enqueued .layer 1, batch row 1"),
]


def begin(make: Make, called: Call) -> tuple[forebay.Cache, list[forebay.Sequence], forebay.Step]:
    cache = make()
    sequences = [joined(cache, bring_up="nothing") for _ in range(2)]
    step = cache.prepare([(sequence, 0, 1) for sequence in sequences])
    none = np.full((2, 1, TOP_K), -1, np.int32)
    for layer in (0, *range(2, LAYERS)):
        step.layer(layer, none, empty(2))
        step.scatter(layer)
    # The last call: a gather can be made later until the next layer resolves.
    called(step, forebay.Buffers(cache, some(1, 2).repeat(2, 0), empty(2)))
    return cache, sequences, step


@pytest.mark.parametrize(("called", "says"), FORGOTTEN)
def test_a_forgotten_call_is_named_and_can_be_made_later(make: Make, called: Call, says: str) -> None:
    cache, sequences, step = begin(make, called)
    for end in (step.finish, step.retire):
        with pytest.raises(forebay.InvalidState, match=says):
            end()
    assert cache.stats().steps_in_flight == 1
    if called is no_gather:
        step.gather(1)
    elif called is no_scatter:
        step.scatter(1)
    else:
        step.layer(1, some(1, 2).repeat(2, 0), empty(2))
        step.scatter(1)
    assert step.retire().layers[1].misses == 4
    with cache.prepare([(sequence, 1, 1) for sequence in sequences]) as after:
        whole(after)
    cache.validate()


@pytest.mark.parametrize(("called", "says"), FORGOTTEN)
def test_a_step_with_a_forgotten_call_is_abandoned_and_truncate_repairs_the_sequence(
    make: Make, called: Call, says: str
) -> None:
    cache, sequences, step = begin(make, called)
    step.abandon()
    with pytest.raises(forebay.Cancelled):
        step.retire()
    with pytest.raises(forebay.ForebayError):
        cache.prepare([(sequences[0], 0, 1)])
    for sequence in sequences:
        sequence.truncate(40)
    with cache.prepare([(sequence, 0, 1) for sequence in sequences]) as after:
        whole(after)
    cache.validate()


def test_an_exception_of_the_body_abandons_the_step_and_is_raised_unchanged(make: Make) -> None:
    cache = make()
    sequence = joined(cache)
    with pytest.raises(KeyError, match="the engine's own"):
        with cache.prepare([(sequence, 0, 1)]) as step:
            step.layer(0, some(1), empty())
            raise KeyError("the engine's own")
    assert cache.stats().steps_in_flight == 0
    sequence.truncate(40)
    with pytest.raises(forebay.InvalidState, match="a scatter was not enqueued .layer 0"):
        with cache.prepare([(sequence, 0, 1)]) as step:
            step.layer(0, some(1), empty())
    # It is still open.
    whole(step, 0)
    assert step.retire().step == 2


# The draft layer, which is the last of three; the query rows of a step; the attention waves.
DRAFT, QUERY, WAVES = LAYERS - 1, 2, 2
Made = tuple[str, dict[str, Any]]


class Rig:
    """Two sequences of a model with a draft layer. On CUDA all work is on one stream."""

    def __init__(self, make: Make, device: forebay.Device, **changes: Any) -> None:
        self.device = device
        shape = forebay.Shape(layers=DRAFT, draft_layers=1, row_bytes=(ROW, 0), top_k=TOP_K, page_tokens=16)
        self.cache = make(device, shape=shape, query_rows=QUERY, huge_pages=False, **changes)
        self.sequences = [joined(self.cache, 40, 64, bring_up="nothing") for _ in range(2)]
        self.stream: Any = device.stream() if isinstance(device, forebay.CudaDevice) else None
        parts = 1 + self.cache.info.attention_waves
        selection, slots = self.words(2, QUERY, TOP_K), self.words(2, QUERY, TOP_K)
        lists, counts = self.words(parts, 2, QUERY, TOP_K), self.words(parts, 2, QUERY)
        self.host(selection)[:] = np.arange(TOP_K)
        self.buffers = forebay.Buffers(self.cache, selection, slots, lists, counts)
        self.layers = forebay.Layers(self.buffers, compute=self.stream, batch=2)

    def words(self, *shape: int) -> Any:
        if isinstance(self.device, forebay.CudaDevice):
            return OnCuda(self.device.allocate(4 * int(np.prod(shape))), shape)
        return np.full(shape, -1, np.int32)

    @staticmethod
    def host(words: Any) -> Any:
        return words.host() if isinstance(words, OnCuda) else words

    def prepare(self, *widths: int) -> forebay.Step:
        rows = [(sequence, 0, width) for sequence, width in zip(self.sequences, widths or (QUERY, QUERY))]
        return self.cache.prepare(rows, query_rows=QUERY, stream=self.stream)

    def make(self, step: forebay.Step, made: Made) -> None:
        call, of = made
        getattr(step, call)(*([of["layer"], self.buffers] if call == "resolve" else [of["layer"]]), **{
            name: value for name, value in of.items() if name != "layer"
        })

    def refused(self, step: forebay.Step, says: str) -> None:
        """Checks that every finishing call refuses the step, twice, and that the step does not end."""
        for end in (step.finish, step.retire):
            with pytest.raises(forebay.InvalidState, match=f"{says}.*; enqueue it, or abandon the step"):
                end()
        assert self.cache.stats().steps_in_flight == 1

    def give_up(self, step: forebay.Step) -> None:
        step.abandon()
        with pytest.raises(forebay.Cancelled, match="truncate its sequences"):
            step.retire(wait=True)
        self.repaired()

    def repaired(self) -> None:
        """Checks that a step of a failed sequence is refused, and truncates the sequences, which repairs them."""
        with pytest.raises(forebay.InvalidState, match="a step of the sequence failed"):
            self.cache.prepare([(self.sequences[0], 0, 1)], stream=self.stream)
        for sequence in self.sequences:
            sequence.truncate(sequence.length.committed, self.stream)
        self.device.wait(self.stream)


def due(halves: bool) -> Iterator[list[Made]]:
    """The calls that a step requires, by parts: layers whole or in halves of the batch, draft layers by draft pass."""
    for layer in range(LAYERS):
        for draft_pass in range(QUERY) if layer == DRAFT else (None,):
            for rows in ({"first": 0, "count": 1}, {"first": 1, "count": 1}) if halves else ({},):
                of = {"layer": layer, "draft_pass": draft_pass, **rows}
                gathers: list[Made] = [("gather", {**of, "attention_wave": number}) for number in range(WAVES)]
                yield [("resolve", of), *gathers, ("scatter", of)]


def missing(made: Made, widths: tuple[int, ...]) -> str | None:
    """The error of finish without this call; None if no batch row has that query row."""
    call, of = made
    query = of["draft_pass"] or 0
    first, count = of.get("first", 0), of.get("count", 2)
    rows = [row for row in range(first, first + count) if query < widths[row]]
    place = f"layer {of['layer']}, batch row {rows[0]}, query row {query}" if rows else ""
    place += f", wave {of['attention_wave']}\\)" if call == "gather" else "\\)"
    return f"a {call} was not enqueued .{place}" if rows else None


@pytest.fixture(params=["host", "threads", "cuda"])
def device(request: pytest.FixtureRequest) -> forebay.Device:
    if request.param == "cuda":
        found: forebay.CudaDevice = request.getfixturevalue("cuda")
        return found
    return forebay.HostDevice(threads=request.param == "threads")


@pytest.mark.parametrize("halves", [False, True])
def test_each_forgotten_call_of_a_drafting_model_is_detected(make: Make, device: forebay.Device, halves: bool) -> None:
    """In two attention waves, with a narrower batch row: calls for query rows that it lacks are not required."""
    rig = Rig(make, device, slots=TOP_K, attention_waves=WAVES)
    assert rig.cache.info.attention_waves == WAVES
    # A gather that had nothing to fetch can be made later at any time.
    rig.host(rig.buffers.selection)[:] = -1
    refusals = 0
    for widths in ((QUERY, 1), (1, QUERY)):
        for part in due(halves):
            for at in range(len(part)):
                step = rig.prepare(*widths)
                # A gather counts only after the previous wave's gather and after its resolve.
                kept = part[:at] + [call for call in part[at + 1 :] if call[0] == "scatter"]
                for other in due(halves):
                    for call in kept if other == part else other:
                        rig.make(step, call)
                says = missing(part[at], widths)
                if says is not None:
                    refusals += 1
                    rig.refused(step, says)
                    if at % 2:
                        rig.give_up(step)
                        continue
                    # After another resolve it needs its own resolve again.
                    for call in part[-1:] if part[at][0] == "scatter" else part[:-1]:
                        rig.make(step, call)
                assert step.retire(wait=True).step > 0
    # 4 calls for each part; in halves the narrow row has no second draft pass.
    assert refusals == 2 * 4 * (4 if not halves else 7)
    rig.cache.validate()


@pytest.mark.parametrize("order", ["none", "da", "dba"])
def test_a_draft_pass_and_a_layer_missing_from_the_schedule_are_named(
    make: Make, device: forebay.Device, order: str
) -> None:
    rig = Rig(make, device)

    def nothing(_call: forebay.EngineCall) -> None:
        pass

    def layer(step: forebay.Step, number: int, draft_pass: int | None = None) -> None:
        rig.cache.overlap(step, number, order, rig.layers, nothing, draft_pass=draft_pass)

    for passes in range(QUERY + 1):
        step = rig.prepare()
        rig.cache.overlap_steps([step], [rig.layers], [order] * LAYERS, nothing, draft_passes=passes)
        for draft_pass in range(passes, QUERY):
            rig.refused(step, f"a resolve was not enqueued .layer {DRAFT}, batch row 0, query row {draft_pass}")
            layer(step, DRAFT, draft_pass)
        step.retire(wait=True)
    for without in range(DRAFT):
        step = rig.prepare()
        for number in range(DRAFT):
            if number != without:
                layer(step, number)
        for draft_pass in range(QUERY):
            layer(step, DRAFT, draft_pass)
        rig.refused(step, f"a resolve was not enqueued .layer {without}, batch row 0, query row 0")
        if without == 0:
            layer(step, without)
            step.retire(wait=True)
        else:
            rig.give_up(step)
    rig.cache.validate()


def test_a_capture_that_was_not_launched_or_lacks_draft_passes_fails_its_step(
    make: Make,
    cuda: forebay.CudaDevice,  # noqa: F811
) -> None:
    rig = Rig(make, cuda)

    def capture(draft_passes: int) -> forebay.Captured:
        orders = ["none"] * LAYERS
        return rig.cache.capture(
            [rig.layers], query_rows=QUERY, by_layer=orders, enqueue=lambda _: None, draft_passes=draft_passes
        )

    for passes in range(QUERY + 1):
        captured = capture(passes)
        for completed in (True, False):
            step = rig.prepare()
            rig.refused(step, "a resolve was not enqueued .layer 0, batch row 0, query row 0")
            captured.launch([step])
            for draft_pass in range(passes, QUERY):
                first = draft_pass if completed else passes
                rig.refused(step, f"a resolve was not enqueued .layer {DRAFT}, batch row 0, query row {first}")
                if completed:
                    rig.cache.overlap(step, DRAFT, "none", rig.layers, lambda _: None, draft_pass=draft_pass)
            if completed or passes == QUERY:
                step.retire(wait=True)
            else:
                rig.give_up(step)
        captured.close()
    rig.cache.validate()


class Pieces:
    """An engine that captures its layers in its own graphs: one, or one for each layer and each draft pass."""

    def __init__(self, rig: Rig, pieces: bool) -> None:
        self.driver, self.pieces, self.stream = Driver(), pieces, ctypes.c_void_p(rig.stream.address)
        self.made: list[tuple[ctypes.c_void_p, ctypes.c_void_p]] = []
        self.begin()
        self.captured = rig.cache.capture(
            [rig.layers], query_rows=QUERY, by_layer=["none"] * LAYERS, enqueue=self, draft_passes=QUERY, into=True
        )
        self.end()

    def begin(self) -> None:
        self.driver("cuStreamBeginCapture_v2", self.stream, 1)

    def end(self) -> None:
        graph, exec_ = ctypes.c_void_p(), ctypes.c_void_p()
        self.driver("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        self.driver("cuGraphInstantiateWithFlags", ctypes.byref(exec_), graph, ctypes.c_ulonglong(0))
        self.made.append((graph, exec_))

    def __call__(self, call: forebay.EngineCall) -> None:
        if self.pieces and call.work == "project" and (call.layer, call.first_query_row) != (0, 0):
            self.end()
            self.begin()

    def launch(self, without: int) -> None:
        for at, (_graph, exec_) in enumerate(self.made):
            if at != without:
                self.driver("cuGraphLaunch", exec_, self.stream)

    def close(self) -> None:
        self.captured.close()
        for graph, exec_ in self.made:
            self.driver("cuGraphExecDestroy", exec_)
            self.driver("cuGraphDestroy", graph)
        self.driver.leave()


@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_graph_of_the_engine_that_was_not_launched_fails_its_step(
    make: Make,
    cuda: forebay.CudaDevice,  # noqa: F811
    in_pieces: bool,
) -> None:
    rig = Rig(make, cuda)
    engine = Pieces(rig, in_pieces)
    assert len(engine.made) == (DRAFT + QUERY if in_pieces else 1)
    for without in range(len(engine.made) + 1):
        step = rig.prepare()
        engine.launch(without)
        engine.captured.launched([step])
        if without == len(engine.made):
            assert step.retire(wait=True).step > 0
            continue
        layer, query = min(without, DRAFT), max(without - DRAFT, 0)
        says = f"a query row was never resolved .batch row 0, layer {layer}, value {query}.; truncate its sequences"
        with pytest.raises(forebay.DeviceFailed, match=says):
            step.retire(wait=True)
        rig.repaired()
    engine.close()
    rig.cache.validate()
