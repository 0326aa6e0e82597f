"""`forebay.serving`: an engine at random against lists of rows, and each rule by itself."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

import forebay
from conftest import LAYERS, ROOT, ROW, TOP_K, rows_of
from forebay.serving import DecodeStep, Request, Requests
from serving_machine import Arrays, Machine

Make = Callable[..., forebay.Cache]
SHAPES = {
    "one run": forebay.Shape(layers=LAYERS, row_bytes=(ROW, 0), top_k=TOP_K, index_key_bytes=4, page_tokens=16),
    "two runs": forebay.Shape(layers=2, row_bytes=(8, ROW), top_k=TOP_K, page_tokens=16),
    "groups": forebay.Shape(
        layers=5, row_bytes=(ROW, 0), top_k=TOP_K, page_tokens=16, index_key_bytes=8, lone_layers=1, group_layers=2
    ),
    "padded blocks": forebay.Shape(layers=2, row_bytes=(20, 0), top_k=TOP_K, page_tokens=16, device_block_align=512),
}
SIZES: dict[str, Any] = {"lanes": 4, "max_tokens": 160, "slots": 16, "query_rows": 3, "parked": 3}


def filled(requests: Requests, id: Any, prompt: int = 40, **options: Any) -> Request:
    """A request with its prompt."""
    request = requests.add(id, **{"promised": 32, **options})
    for layer in range(requests.cache.info.layers):
        request.prefill(layer, rows_of(layer, 0, prompt))
    return request


def run(requests: Requests, ids: Any, query_rows: int = 1, select: Any = None) -> DecodeStep:
    """A step that selects the first positions, or `select`, and writes zeros."""
    with requests.step(ids, query_rows=query_rows) as step:
        shape = (step.batch, step.query_rows)
        chosen = np.arange(TOP_K, dtype=np.int32) if select is None else select
        for layer in range(requests.cache.info.layers):
            step.write(layer, np.zeros((*shape, ROW), np.uint8))
            step.select(layer, np.broadcast_to(chosen, (*shape, chosen.shape[-1])))
    return step


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_an_engine_at_random_reads_the_rows_that_it_wrote(make: Make, kind: str, seed: int) -> None:
    machine = Machine(make(shape=SHAPES[kind], **SIZES), Arrays(), seed)
    machine.run(300)
    assert machine.compared > 1000 and set(machine.calls) >= {"add", "prefill", "step", "crop", "park", "fork", "fail"}


def test_an_engine_at_random_on_streams_that_are_threads(make: Make) -> None:
    with forebay.HostDevice(threads=True) as device:
        machine = Machine(make(device, **SIZES), Arrays(), 1)
        machine.run(200)
        assert machine.compared > 500


def flipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte of each prompt row changes on its way into the total pool."""
    append = forebay.Sequence.append
    changed = np.zeros(ROW, np.uint8)
    changed[5] = 1
    monkeypatch.setattr(
        forebay.Sequence, "append", lambda self, layer, rows: append(self, layer, rows.view(np.uint8) ^ changed)
    )


def one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crop keeps one row too many."""
    crop = Request.crop
    monkeypatch.setattr(Request, "crop", lambda self, length: crop(self, min(length + 1, self.length)))


def not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library hears of one accepted row less, and the next step therefore of a shorter request."""
    accepted = Request._accepted
    monkeypatch.setattr(Request, "_accepted", lambda self, width: max(accepted(self, width) - 1, 0))


def another_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads the slot beside."""
    rows = DecodeStep.rows
    monkeypatch.setattr(DecodeStep, "rows", lambda self, layer, slots: rows(self, layer, np.maximum(slots - 1, 0)))


def not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """New rows go to the total pool before they are written."""
    write = DecodeStep.write

    def early(self: DecodeStep, layer: int, rows: Any) -> None:
        self._written[layer] = True
        self.stored(layer)
        write(self, layer, rows)

    monkeypatch.setattr(DecodeStep, "write", early)


@pytest.mark.parametrize("fault", [flipped, one_too_many, not_told, another_slot, not_stored])
def test_the_engine_at_random_notices(make: Make, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, forebay.ForebayError)):
        Machine(make(**SIZES), Arrays(), 0).run(300)


def test_errors_name_the_request(make: Make) -> None:
    cache = make(**{**SIZES, "lanes": 2, "batch": 2, "parked": 1})
    requests = Requests(cache, ratio=0.5)
    first = filled(requests, "first")
    filled(requests, ("second", 2), promised=20)
    row = np.zeros((1, 1, ROW), np.uint8)
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: requests["third"], forebay.InvalidArgument, "'third'.*added and has not ended"),
        (lambda: requests.end("third"), forebay.InvalidArgument, "'third'"),
        (lambda: requests[[1]], forebay.InvalidArgument, "id"),
        (lambda: requests.add("first"), forebay.InvalidArgument, "'first'.*no request has"),
        (lambda: requests.add([1]), forebay.InvalidArgument, "hashable"),
        (lambda: requests.add("third", owner=5), forebay.InvalidArgument, "owner: got int"),
        (lambda: requests.add("third"), forebay.Exhausted, "'third'.*lanes"),
        (lambda: requests.add("third", prompt=100, promised=61), forebay.OutOfRange, "'third'.*100.*61.*160"),
        (lambda: requests.step(["third"]), forebay.InvalidArgument, "'third'"),
        (lambda: requests.step([]), forebay.OutOfRange, "0 requests.*1 to 2"),
        (lambda: requests.step(["first"] * 3), forebay.OutOfRange, "3 requests.*1 to 2"),
        (lambda: requests.step(["first"] * 2), forebay.InvalidArgument, "'first' twice"),
        (lambda: requests.step("first"), forebay.InvalidArgument, "a list of ids"),
        (lambda: requests.step([("first", 4)]), forebay.OutOfRange, "'first'.*4 query rows.*3"),
        (lambda: requests.step([("first", 0)]), forebay.InvalidArgument, "query_rows"),
        (lambda: first.crop(41), forebay.OutOfRange, "'first'.*41.*only 40"),
        (lambda: first.read(0, 0, 41), forebay.OutOfRange, "'first'.*0 to 41.*has 40"),
        (lambda: first.read(0, out=np.empty((40, 3))), forebay.InvalidArgument, "'first'.*40 rows of 16"),
        (lambda: first.prefill(0, rows_of(0, 0, 99)), forebay.OutOfRange, "'first'.*139 tokens and 32.*160"),
        (lambda: first.prefill(0, np.zeros((3, 5), np.uint8)), forebay.InvalidArgument, "'first'.*5 bytes.*16 bytes"),
        (lambda: first.prefill(0, np.zeros((3, 4), "f4")), forebay.InvalidArgument, "'first'.*float32.*uint8"),
        (lambda: first.prefill(0, np.empty((3, 2), object)), forebay.InvalidArgument, "'first'.*object"),
        (lambda: first.prefill(0, np.ma.masked_all((3, ROW), "u1")), forebay.InvalidArgument, "'first'.*MaskedArray"),
        (lambda: first.prefill(9, row[0]), forebay.InvalidArgument, "'first'.*layer"),
        (lambda: first.prefill(0, [1, 2]), forebay.InvalidArgument, "'first'.*NumPy array or a torch tensor"),
        (lambda: Requests(cache, ratio=0.1, slots=3), forebay.InvalidArgument, "slots"),
        (lambda: Requests(5), forebay.InvalidArgument, "cache"),  # type: ignore[arg-type]
    ]
    for call, kind, said in cases:
        with pytest.raises(kind, match=said):
            call()
    assert (first.state, first.length, len(requests)) == ("filling", 40, 2)
    first.prefill(0, row[0])
    with pytest.raises(forebay.InvalidState, match="'first'.*layer 1 has 40 of 41 prompt rows"):
        requests.step(["first"])
    first.crop(40)
    run(requests, ["first", (("second", 2), 2)])
    assert [requests[id].length for id in requests] == [41, 42]
    first.end()
    first.end()
    with pytest.raises(forebay.Closed, match="'first'.*was ended"):
        first.crop(1)
    # The id is free again.
    assert filled(requests, "first") is requests["first"] is not first
    requests.close()
    assert cache.stats().sequences == 0


def test_errors_of_a_step_name_the_request_and_leave_it_usable(make: Make) -> None:
    requests = Requests(make(**SIZES), ratio=0.5)
    filled(requests, "a")
    filled(requests, "b")
    row, chosen = np.zeros((2, 1, ROW), np.uint8), np.zeros((2, 1, TOP_K), np.int32)
    beyond = chosen.copy()
    beyond[1, 0, 3] = 41
    step = requests.step(["a", "b"])
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: requests.step(["a"]), forebay.InvalidState, "a step is open"),
        (lambda: requests["a"].crop(3), forebay.InvalidState, "'a'.*open step"),
        (lambda: requests["b"].park(), forebay.InvalidState, "'b'.*open step"),
        (lambda: step.write(0, row[:1]), forebay.InvalidArgument, r"rows: got uint8 \[1, 1, 16\].*\[2, 1, ...\]"),
        (lambda: step.write(0, row.view(np.float64)), forebay.InvalidArgument, "float64.*uint8"),
        (lambda: step.select(0, chosen[:, :, :1].astype("f4")), forebay.InvalidArgument, "float32.*int32 or int64"),
        (lambda: step.select(0, np.zeros((2, 1, 9), "i4")), forebay.InvalidArgument, "9 positions.*at most 8"),
        (lambda: step.select(1, beyond), forebay.OutOfRange, "'b'.*layer 1.*position 41.*41 tokens"),
        (lambda: step.select(1), forebay.InvalidArgument, "selection"),
        (lambda: step.stored(1), forebay.InvalidState, "layer 1 was not written"),
        (lambda: step.rows(0, chosen.astype("f4")), forebay.InvalidArgument, "slots: got float32"),
        (lambda: step.rows(0, chosen, out=np.empty((2, 1, 8, 15), "u1")), forebay.InvalidArgument, "out.*8, 15.*8, 16"),
        (lambda: step.rows(0, chosen, "f4", out=np.empty((2, 1, 8, 4))), forebay.InvalidArgument, "float64.*float32"),
        (lambda: step.rows(0, chosen, np.dtype("V7")), forebay.InvalidArgument, "dtype.*16 bytes"),
    ]
    for call, kind, said in cases:
        with pytest.raises(kind, match=said):
            call()
    step.write(0, row)
    with pytest.raises(forebay.InvalidState, match="layer 1 was not written"):
        step.finish()
    with pytest.raises(forebay.InvalidState, match="the step is finished"):
        step.write(1, row)
    with pytest.raises(forebay.InvalidState, match="'a'.*crop it, to at most 40 tokens"):
        requests.step(["a"])
    requests["a"].crop(39)
    requests["b"].crop(40)
    run(requests, ["a", "b"])
    assert (requests["a"].length, requests["b"].length) == (40, 41)


def test_a_step_without_all_of_its_calls_names_its_requests(make: Make) -> None:
    requests = Requests(make(**SIZES), ratio=0.5)
    filled(requests, "a")
    step = requests.step(["a"])
    for layer in range(LAYERS):
        step.write(layer, np.zeros((1, 1, ROW), np.uint8))
    with pytest.raises(forebay.InvalidState, match="step of requests 'a': .*layer 0"):
        step.finish()
    assert requests["a"].state == "failed"


def test_requests_that_the_engine_forgets_are_ended(make: Make) -> None:
    class Owner:
        pass

    cache = make(**SIZES)
    requests = Requests(cache, ratio=0.3, forget_after=3)
    owner = Owner()
    filled(requests, "owned", owner=owner)
    owned = requests["owned"]
    for id in "kept", "left":
        filled(requests, id)
    run(requests, ["kept", "left"])
    parked = filled(requests, "parked")
    run(requests, ["parked"])
    parked.park()
    for _ in range(2):
        run(requests, ["kept"])
    assert "left" in requests
    left = requests["left"]
    run(requests, ["kept"])
    assert "left" not in requests and "owned" in requests and "parked" in requests
    with pytest.raises(forebay.Closed, match="'left'.*none of the last 3 steps"):
        left.crop(1)
    del owner
    assert requests.stats().forgotten == 2 and "owned" not in requests
    with pytest.raises(forebay.Closed, match="'owned'.*owner was collected"):
        owned.crop(1)
    # One that ended before is not forgotten.
    owner = Owner()
    ended = filled(requests, "ended", owner=owner)
    ended.end()
    del owner
    assert requests.stats().forgotten == 2
    # Another request with this id has nothing to do with the old owner.
    filled(requests, "owned")
    assert requests.stats()[:5] == (1, 1, 1, 5, 2)


def test_a_parked_request_gives_its_lane_to_others_and_loses_no_row(make: Make) -> None:
    cache = make(**{**SIZES, "lanes": 1, "parked": 1})
    requests = Requests(cache, ratio=0.5)
    first = filled(requests, "first")
    run(requests, ["first"], query_rows=3)
    first.crop(42)
    with pytest.raises(forebay.Exhausted, match="'second'"):
        requests.add("second")
    first.park()
    assert first.state == "parked" and requests.stats().parked == 1
    second = filled(requests, "second")
    run(requests, ["second"])
    with pytest.raises(forebay.Exhausted, match="'first'.*lanes"):
        requests.step(["first"])
    assert first.state == "parked" and second.length == 41
    second.end()
    # The next turn: its prompt goes on where the last step ended.
    for layer in range(LAYERS):
        first.prefill(layer, rows_of(layer, 42, 10))
    step = run(requests, ["first"])
    assert first.length == 53 and step.starts.tolist() == [52]
    assert first.read(1, 42, 52).tobytes() == rows_of(1, 42, 10).tobytes()
    # Warmed by what it selected before it was parked: the same positions miss nowhere.
    assert step.retired is not None and step.retired.misses == 0


def test_a_request_begins_with_what_its_prompt_selected_last(make: Make) -> None:
    found = []
    for warm in False, True:
        requests = Requests(make(**SIZES), slots=16)
        request = filled(requests, "a")
        chosen = np.arange(3, 11)
        for layer in range(LAYERS if warm else 0):
            request.warm_up(layer, np.stack([chosen - 3, chosen]))
        step = run(requests, ["a"], select=chosen)
        assert step.retired is not None
        found.append((step.retired.hits, step.retired.misses))
        with pytest.raises(forebay.InvalidState, match="'a'.*warm_up: it has joined"):
            request.warm_up(0, chosen[None])
    assert found == [(0, LAYERS * TOP_K), (LAYERS * TOP_K, 0)]


def test_prompts_with_the_same_beginning_share_pages(make: Make) -> None:
    requests = Requests(make(**SIZES), ratio=0.5)
    tokens = np.arange(40, dtype=np.uint32)
    first = filled(requests, "first", tokens=tokens)
    assert (first.shared, first.publish(tokens)) == (0, 32)
    second = requests.add("second", promised=8, tokens=tokens)
    assert (second.shared, second.length, second.filled(1)) == (32, 32, 32)
    for layer in range(LAYERS):
        second.prefill(layer, rows_of(layer, 32, 8))
        assert second.read(layer).tobytes() == rows_of(layer, 0, 40).tobytes()
    run(requests, ["first", "second"])
    with pytest.raises(forebay.InvalidState, match="'third'"):
        filled(requests, "third").publish(tokens)


def test_index_keys_are_in_the_caches_pages(make: Make) -> None:
    cache = make(**SIZES)
    requests = Requests(cache, ratio=0.5)
    other, request = (requests.add(id, promised=0) for id in ("other", "a"))
    keys = np.random.default_rng(1).integers(0, 255, (44, 4)).astype(np.uint8)
    for start in 0, 16, 32:
        for layer in range(LAYERS):
            request.prefill(layer, rows_of(layer, start, min(16, 40 - start)))
        # Another one takes pages in between, so that the pages do not follow each other.
        other.prefill(0, rows_of(0, start, 16))
        request.put_index_keys(2, keys[start : min(start + 16, 40)], start)
    with requests.step([("a", 2)]) as step:
        step.put_index_keys(2, np.stack([keys[40:43]])[:, :2].copy().view(np.float32))
        assert request.index_keys(2, end=42).tobytes() == keys[:42].tobytes()
        assert request.index_keys(2, 3, 17, dtype=np.float32).tobytes() == keys[3:17].tobytes()
        assert request.index_keys(0, end=42).tobytes() != keys[:42].tobytes()
        pages = [page.index_keys for page in request._sequence.pages()]
        assert max(np.diff(pages)) > 1
        assert request.index_keys(2, 5, 5).shape == (0, 4)
        step.abandon()
    for call, said in (
        (lambda: request.put_index_keys(3, keys), "group"),
        (lambda: request.put_index_keys(0, keys[:, :3].copy()), "3 bytes.*4 bytes"),
        (lambda: request.put_index_keys(0, keys, 400), "pages are admitted"),
        (lambda: request.index_keys(0, 0, 400), "pages are admitted"),
    ):
        with pytest.raises(forebay.ForebayError, match=f"'a'.*{said}"):
            call()


def test_layers_that_share_a_selection(make: Make) -> None:
    requests = Requests(make(shape=SHAPES["groups"], **SIZES), ratio=0.5)
    request = requests.add("a", promised=8)
    rows = [np.random.default_rng(layer).integers(0, 255, (40, ROW)).astype(np.uint8) for layer in range(5)]
    for layer in range(5):
        request.prefill(layer, rows[layer])
    chosen = np.arange(TOP_K).reshape(1, 1, -1)
    with requests.step(["a"]) as step:
        with pytest.raises(forebay.InvalidState, match="layer 1, which selects for layer 2"):
            step.select(2)
        for layer, leads in enumerate([True, True, False, True, False]):
            step.write(layer, np.zeros((1, 1, ROW), np.uint8))
            slots = step.select(layer, chosen + layer if leads else None)
            first = layer if leads else layer - 1
            assert (step.rows(layer, slots)[0, 0] == rows[layer][first : first + TOP_K]).all()
            assert (requests.slab(layer, np.uint16)[slots[0, 0]].view("u1") == step.rows(layer, slots)[0, 0]).all()
        with pytest.raises(forebay.InvalidArgument, match="layer 3 selects for layer 4"):
            step.select(4, chosen)
    with pytest.raises(forebay.InvalidArgument, match="layer 1, which selects for it"):
        request.warm_up(2, chosen[0])


def test_rows_of_two_runs_and_into_given_memory(make: Make) -> None:
    requests = Requests(make(shape=SHAPES["two runs"], **SIZES), ratio=0.5)
    request = requests.add("a", promised=8)
    rows = np.random.default_rng(1).integers(0, 255, (40, 24)).astype(np.uint8)
    for layer in range(2):
        # Every other row of a larger array: copied, because the library takes rows without gaps.
        request.prefill(layer, np.repeat(rows, 2, axis=0)[::2])
    chosen = np.arange(TOP_K).reshape(1, 1, -1)
    with requests.step(["a"]) as step:
        for layer in range(2):
            step.write(layer, rows[None, :1])
            slots = step.select(layer, chosen)
            assert (step.rows(layer, slots)[0, 0] == rows[:TOP_K]).all()
            assert (step.rows(layer, slots, run=0)[0, 0] == rows[:TOP_K, :8]).all()
            at = slots[0, 0] // 64, slots[0, 0] % 64
            assert (requests.slab(layer, run=1)[at] == rows[:TOP_K, 8:]).all()
            out = np.empty((1, 1, TOP_K, 8), np.uint16)
            assert step.rows(layer, slots, np.uint16, run=1, out=out) is out
            assert (out[0, 0].view(np.uint8) == rows[:TOP_K, 8:]).all()
            assert (step.rows(layer, slots, np.uint64)[0, 0].view(np.uint8) == rows[:TOP_K]).all()
    with pytest.raises(forebay.InvalidState, match="'a'.*index_key_bytes"):
        request.put_index_keys(0, rows)
    out = np.empty((38, 3), np.uint64)
    assert request.read(1, 1, 39, out=out) is out and out.tobytes() == rows[1:39].tobytes()


def test_a_request_decodes_what_it_was_promised_and_no_more(make: Make) -> None:
    requests = Requests(make(**SIZES), ratio=0.5)
    request = filled(requests, "a", promised=2)
    with pytest.raises(forebay.OutOfRange, match=r"'a': 1 row at 48 tokens: it was admitted for 42; promise it more"):
        for _ in range(20):
            run(requests, ["a"])
    # The library keeps room for the drafts of the steps in flight.
    assert request.length == 48 and request.state == "running"
    request.promise(20)
    assert request.state == "parked"
    for _ in range(20):
        run(requests, ["a"])
    assert request.length == 68
    with pytest.raises(forebay.OutOfRange, match="'a': 68 tokens and 93 promised: the cache admits 160"):
        request.promise(93)
    request.prefill(0, np.empty((0, ROW), np.uint8))
    assert request.length == 68


def test_more_steps_than_may_be_in_flight_wait(make: Make) -> None:
    with forebay.HostDevice(threads=True) as device:
        requests = Requests(make(device, **SIZES), ratio=0.5)
        filled(requests, "a")
        # On a GPU nothing in a step waits.
        requests._ready = lambda: None  # type: ignore[method-assign]
        run(requests, ["a"])
        requests.retire()
        gate = threading.Event()
        device.call(gate.wait)
        for _ in range(2):
            run(requests, ["a"])
        assert len(requests._flying) == 2 and requests["a"].length == 43
        threading.Timer(0.05, gate.set).start()
        run(requests, ["a"])
        requests.retire()
        assert len(requests._flying) == 0 and requests.cache.stats().steps == 4
        requests.close()


def test_a_request_may_be_cropped_to_nothing(make: Make) -> None:
    requests = Requests(make(**SIZES), ratio=0.5)
    request = filled(requests, "a")
    for state in ("filling", "running"):
        request.crop(0)
        assert (request.state, request.length) == (state, 0)
        for layer in range(LAYERS):
            request.prefill(layer, rows_of(layer, 5, 30))
        assert request.read(1).tobytes() == rows_of(1, 5, 30).tobytes()
        run(requests, ["a"])
    request.crop(0)
    run(requests, ["a"], select=np.array([0]))
    assert request.length == 1 and request.read(0).tobytes() == bytes(ROW)
    requests.cache.validate()


def test_a_fork_keeps_its_rows_whatever_the_other_does(make: Make) -> None:
    requests = Requests(make(**SIZES), ratio=0.5)
    first = filled(requests, "first")
    second = first.fork("second")
    before = [rows_of(layer, 0, 40).tobytes() for layer in range(LAYERS)]
    assert [first.read(layer).tobytes() for layer in range(LAYERS)] == before
    # Into its last page, of which the second has a copy.
    first.park()
    first.crop(35)
    assert first.state == "parked"
    # Into a page that both have: it is replaced before it is written.
    first.crop(20)
    run(requests, ["first"], query_rows=3)
    assert [second.read(layer).tobytes() for layer in range(LAYERS)] == before
    for layer in range(LAYERS):
        assert first.read(layer).tobytes() == rows_of(layer, 0, 20).tobytes() + bytes(3 * ROW)
    second.crop(35)
    third = second.fork("third")
    second.park()
    second.crop(17)
    run(requests, ["second", "third"])
    assert [request.length for request in (second, third)] == [18, 36]
    assert third.read(2, 0, 35).tobytes() == rows_of(2, 0, 35).tobytes()


def test_a_read_waits_for_the_requests_own_work(make: Make) -> None:
    with forebay.HostDevice(threads=True) as device:
        requests = Requests(make(device, **SIZES), ratio=0.5)
        first = filled(requests, "first")
        wait = device.wait

        def late(stream: Any = None) -> None:
            wait(stream)
            device.call(lambda: time.sleep(0.05))

        # Whatever is enqueued after a wait runs late.
        device.wait = late  # type: ignore[method-assign]
        # The join too, so that the fork has to wait for it.
        device.call(lambda: time.sleep(0.05))
        second = first.fork("second")
        assert second.read(1).tobytes() == rows_of(1, 0, 40).tobytes()
        run(requests, ["second"])
        assert second.read(1, 40).tobytes() == bytes(ROW)
        # Without work of its own nothing waits.
        device.wait = None  # type: ignore[method-assign,assignment]
        assert second.read(1, 40).tobytes() == bytes(ROW)
        del device.wait
        requests.close()


def test_steps_reuse_their_buffers(make: Make) -> None:
    requests = Requests(make(**SIZES), ratio=0.5)
    filled(requests, "a")
    addresses = set()
    for _ in range(4):
        with requests.step(["a"]) as step:
            for layer in range(LAYERS):
                step.write(layer, np.zeros((1, 1, ROW), np.uint8))
                addresses.add(step.select(layer, np.zeros((1, 1, 1), np.int32)).ctypes.data)
    assert len(addresses) == 1 and len(requests._works) == 1


def test_recordings_have_the_selections_of_the_rows_that_count(make: Make, tmp_path: Path) -> None:
    import replay

    chance = np.random.default_rng(1)
    with Requests(make(**SIZES), ratio=0.5, record=tmp_path / "run.topk.zst") as requests:
        for id in "ab":
            filled(requests, id)
        wanted: list[np.ndarray[Any, Any]] = []
        for turn in range(6):
            sets = [[chance.choice(40 + turn, TOP_K, replace=False) for _ in range(2)] for _ in range(LAYERS)]
            with requests.step(["a", "b"], query_rows=2) as step:
                for layer in range(LAYERS):
                    step.write(layer, np.zeros((2, 2, ROW), np.uint8))
                    step.select(layer, np.broadcast_to(sets[layer], (2, 2, TOP_K)))
            # One of the two rows is rejected.
            for id in "ab":
                requests[id].crop(requests[id].length - 1)
            wanted.append(np.sort(np.stack(sets)[:, 0], axis=1))
        # Three of a's rows are given up: its recording goes on in another file.
        requests["a"].crop(43)
        run(requests, ["a"])
    with pytest.raises(forebay.Io, match="run.topk.zst exists"):
        Requests(make(**SIZES), record=tmp_path / "run.topk.zst")
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["run-1.topk.zst", "run-2.topk.zst", "run.topk.zst"]
    # The last step's row of a was given up before another step accepted it.
    for name, label, steps in (("run.topk.zst", "a", 5), ("run-1.topk.zst", "b", 6)):
        trace = forebay.SelectionTrace(tmp_path / name)
        assert (trace.header.first_position, trace.header.steps, trace.header.unfinished) == (40, steps, 0)
        assert trace.text("label") == label and (trace.read(0, steps) == np.stack(wanted[:steps])).all()
        assert sum(replay.replay(trace, slots=16, mtp=1).misses) > 0
    assert forebay.SelectionTrace(tmp_path / "run-2.topk.zst").header.first_position == 43


def test_a_step_that_fails_late_is_told_once(make: Make) -> None:
    with forebay.HostDevice(threads=True) as device:
        requests = Requests(make(device, **SIZES), ratio=0.5)
        filled(requests, "a")
        filled(requests, "b")
        step = requests.step(["a"])
        # As on a GPU, where no call looks at the positions before.
        step._limits = None
        for layer in range(LAYERS):
            step.write(layer, np.zeros((1, 1, ROW), np.uint8))
            step.select(layer, np.full((1, 1, TOP_K), 99, np.int32))
        with pytest.raises(forebay.DeviceFailed, match="step of requests 'a': .*99"):
            step.finish()
            requests.retire()
        assert (requests["a"].state, requests["a"].length) == ("failed", 40)
        requests.retire()
        requests["a"].crop(40)
        run(requests, ["a", "b"])
        requests.retire()
        assert requests["a"].length == 41
        requests.close()


def test_a_request_may_end_in_an_open_step(make: Make) -> None:
    requests = Requests(make(**SIZES), ratio=0.5)
    for id in "ab":
        filled(requests, id)
    with requests.step(["a", "b"]) as step:
        for layer in range(LAYERS):
            step.write(layer, np.zeros((2, 1, ROW), np.uint8))
            step.select(layer, np.zeros((2, 1, 1), np.int32))
            if layer == 1:
                requests.end("a")
    assert requests["b"].length == 41 and requests.cache.stats().sequences == 1


def test_torch_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    program = "import sys; sys.path.insert(0, sys.argv[1]); import forebay.serving; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program, tmp_path], check=True, stdout=subprocess.PIPE, text=True)
    assert ran.stdout.strip() == "False"


def test_the_bench_of_serving_runs() -> None:
    script = ROOT / "ffi" / "python" / "benches" / "serving.py"
    ran = subprocess.run([sys.executable, script, "--short"], check=True, stdout=subprocess.PIPE, text=True)
    assert ran.stdout.count(" us, stored ") == 2


def test_the_toy_engine_prints_what_the_page_says() -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    listing = ROOT / "ffi" / "python" / "examples" / "toy_engine.py"
    assert page.partition("```python\n")[2].partition("```")[0] == listing.read_text()
    printed = page.partition("```text\n")[2].partition("```")[0]
    ran = subprocess.run([sys.executable, listing], check=True, stdout=subprocess.PIPE, text=True)
    assert ran.stdout == printed
    # With a slot for every row it generates the same.
    whole = listing.read_text().replace("ratio=0.2", "ratio=1.0").replace("pool_slots=512", "pool_slots=2048")
    ran = subprocess.run([sys.executable, "-c", whole], check=True, stdout=subprocess.PIPE, text=True)
    assert ran.stdout.splitlines()[:2] == printed.splitlines()[:2] and " 0 were fetched" in ran.stdout
