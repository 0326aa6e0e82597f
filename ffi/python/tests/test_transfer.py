"""Transfers between a sender and a receiver of one process, over both fabrics. Bytes are computed here, one by one; the
receiver's pages have canaries wherever no use has its rows.
"""

from __future__ import annotations

import asyncio
import gc
import os
import selectors
import threading
import time
import weakref
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import pytest

import forebay
from forebay import transfer
from forebay.device import alive
from forebay.transfer import Rank, TransferOptions, TransferSide
from test_helpers import needs_prometheus

LAYERS, ROW, KEY, PAGE, TOKENS, PAGES = 2, 40, 12, 16, 40, 9
SIDE = TransferSide.single(LAYERS, ROW, PAGE, index_key_bytes=KEY)
PARTS = SIDE.parts(-(-TOKENS // PAGE))
CANARY, SOON = 0xEE, 30.0
OPTIONS = TransferOptions(token=b"0123456789abcdef", bulk_tokens=1)
FABRICS = ["tcp", "shm"]


def rows(request: int, layer: int, component: int) -> Any:
    """The rows of a layer, as prefill computes them: [tokens, bytes]."""
    size = (ROW, KEY)[component]
    token, at = np.meshgrid(np.arange(TOKENS), np.arange(size), indexing="ij")
    return (request * 89 + layer * 31 + 7 * component + token * 13 + at * 5).astype(np.uint8)


class Pair:
    """A sender and a receiver that have met."""

    def __init__(self, fabric: str, at: str, sends: TransferOptions = OPTIONS, meets: bool = True) -> None:
        self.planes = [np.full((PAGES, size), CANARY, np.uint8) for size in SIDE.page_bytes[0]]
        self.receiver = transfer.Receiver(fabric, at, SIDE, Rank(2), self.planes, options=OPTIONS)
        size = 4 * LAYERS * PARTS.bytes
        given: dict[str, Any] = {"options": sends, "lock": False, "huge_pages": False}
        self.sender = transfer.Sender(fabric, SIDE, Rank(1), size, PARTS.planes, **given)
        self.sender.add(self.receiver.address)
        self.sent: list[Any] = []
        self.received: list[Any] = []
        if meets:
            self.until(lambda: any(isinstance(event, transfer.Met) for event in self.received))

    def take(self) -> None:
        while (sent := self.sender.poll()) is not None:
            self.sent.append(sent)
        while (received := self.receiver.poll(0.001)) is not None:
            self.received.append(received)

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + SOON
        while not holds():
            assert time.monotonic() < end, (self.sent, self.received)
            self.take()

    def compute(self, request: int) -> None:
        """Writes and tells all layers, and finishes."""
        for layer in range(LAYERS):
            origin = (request % 4 * LAYERS + layer) * PARTS.bytes
            for component in range(2):
                start = origin + PARTS.planes[2 * layer + component].offset
                made = rows(request, layer, component)
                self.sender.memory[start : start + made.size] = made.reshape(-1)
            self.sender.computed([transfer.Computed(request, layer, 0, TOKENS, origin)])
        self.sender.finish(request)

    def check(self, uses: dict[int, tuple[list[int], int]]) -> None:
        """The pages have the rows of these requests from a token on, and canaries elsewhere."""
        for plane, found in enumerate(self.planes):
            wanted = np.full_like(found, CANARY)
            for request, (pages, first) in uses.items():
                layer, component = divmod(plane, 2)
                for token, row in enumerate(rows(request, layer, component)):
                    if token >= first:
                        at = token % PAGE * row.size
                        wanted[pages[token // PAGE], at : at + row.size] = row
            assert (found == wanted).all(), plane

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(fabric: str, **changes: Any) -> Pair:
        at = "127.0.0.1:0" if fabric == "tcp" else str(tmp_path / f"at{len(made)}")
        made.append(Pair(fabric, at, **changes))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def of(events: list[Any], kind: type[Any], request: int) -> list[Any]:
    """The events of a kind and a request."""
    same = [event for event in events if isinstance(event, kind)]
    return [event for event in same if getattr(event, "request", None) == request or event_request(event) == request]


def event_request(event: Any) -> int | None:
    return event.use.request if hasattr(event, "use") else None


@pytest.mark.parametrize("fabric", FABRICS)
def test_rows_arrive_in_their_pages_and_nowhere_else(pairs: Callable[..., Pair], fabric: str) -> None:
    pair = pairs(fabric)
    uses: dict[int, tuple[list[int], int]] = {}
    for request, pages, first in ((1, [5, 2, 7], 0), (2, [0, 8, 3], 20)):
        use = pair.receiver.grant(request, TOKENS, pages, (1, 0), first=first, payloads=[7], within=60)
        pair.sender.begin(request, TOKENS, within=60)
        pair.sender.payload(request, 7, b"first token")
        pair.compute(request)
        pair.until(lambda: bool(of(pair.received, transfer.Drained, request)))
        pair.until(lambda: bool(of(pair.sent, transfer.Ended, request)))
        assert of(pair.sent, transfer.Ended, request) == [transfer.Ended(request, None)]
        assert of(pair.received, transfer.Payload, request) == [transfer.Payload(use, 7, b"first token")]
        assert {event.layer for event in of(pair.received, transfer.Ready, request)} == set(range(LAYERS))
        assert [event.first for event in of(pair.sent, transfer.Granted, request)] == [first]
        assert len(of(pair.sent, transfer.Released, request)) == LAYERS
        assert transfer.Whole(use) in pair.received
        uses[request] = (pages, first)
        pair.check(uses)
    sent, received = pair.sender.stats(), pair.receiver.stats()
    assert (sent.done, sent.failed, sent.held, sent.again) == (2, 0, 0, 0)
    assert 0 < sent.exposed_longest <= sent.exposed
    assert (received.whole, received.failed, received.wrong) == (2, 0, 0)
    assert received.bytes == (TOKENS + TOKENS - 20) * LAYERS * (ROW + KEY)
    lag = pair.sender.lag(1)
    assert lag.parts == 2 and 0 < lag.longest <= lag.total
    assert pair.sender.lag(77) == transfer.Lag(0, 0, 0)


@pytest.mark.parametrize("fabric", FABRICS)
def test_an_abort_of_either_side_ends_both(pairs: Callable[..., Pair], fabric: str) -> None:
    pair = pairs(fabric)
    for request in (1, 2):
        use = pair.receiver.grant(request, TOKENS, [1, 2, 3], (1, 0))
        pair.sender.begin(request, TOKENS)
        if request == 1:
            pair.receiver.abort(use)
        else:
            pair.sender.abort(request)
        pair.until(lambda: bool(of(pair.received, transfer.Failed, request) and of(pair.sent, transfer.Ended, request)))
        (failed,), (ended,) = of(pair.received, transfer.Failed, request), of(pair.sent, transfer.Ended, request)
        assert isinstance(failed.error, forebay.Cancelled) and isinstance(ended.error, forebay.Cancelled)
        assert "gave the request up" in str(ended.error)
        # A call for what has ended does nothing.
        pair.receiver.abort(use)
        pair.sender.abort(request)
    pair.check({})


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_lost_sender_fails_its_requests(pairs: Callable[..., Pair], fabric: str) -> None:
    pair = pairs(fabric)
    use = pair.receiver.grant(1, TOKENS, [1, 2, 3], (1, 0))
    pair.sender.begin(1, TOKENS)
    pair.until(lambda: bool(of(pair.sent, transfer.Granted, 1)))
    pair.sender.close()
    end = time.monotonic() + SOON
    while not of(pair.received, transfer.Failed, 1) and time.monotonic() < end:
        if (event := pair.receiver.poll(1)) is not None:
            pair.received.append(event)
    (failed,) = of(pair.received, transfer.Failed, 1)
    assert failed.use == use and isinstance(failed.error, forebay.PeerLost)
    assert any(isinstance(event, transfer.Lost) for event in pair.received)
    pair.check({})


@pytest.mark.parametrize("fabric", FABRICS)
def test_another_token_opens_no_connection(pairs: Callable[..., Pair], fabric: str) -> None:
    pair = pairs(fabric, sends=TransferOptions(token=b"f" * 16), meets=False)
    pair.until(lambda: any(isinstance(event, transfer.Unopened) for event in pair.received))
    assert not any(isinstance(event, transfer.Met) for event in pair.received + pair.sent)
    (why, *_rest) = [event for event in pair.received if isinstance(event, transfer.Unopened)]
    assert why.error.status and str(why.error)
    assert "fff" not in repr(TransferOptions(token=b"f" * 16))


def test_what_is_refused_names_its_request(pairs: Callable[..., Pair]) -> None:
    pair = pairs("shm")
    pair.sender.begin(5, 0)
    pair.until(lambda: bool(of(pair.sent, transfer.Refused, 5)))
    (refused,) = of(pair.sent, transfer.Refused, 5)
    assert isinstance(refused.error, forebay.OutOfRange)
    pair.receiver.grant(6, TOKENS, [1, 2, 3], (99, 0))
    pair.until(lambda: bool(of(pair.received, transfer.Failed, 6)))
    (failed,) = of(pair.received, transfer.Failed, 6)
    assert isinstance(failed.error, forebay.InvalidState)
    for pages in ([1, 2], [1, 2, PAGES]):
        with pytest.raises(forebay.OutOfRange):
            pair.receiver.grant(7, TOKENS, pages, (1, 0))
    use = pair.receiver.grant(8, TOKENS, [1, 2, 3], (1, 0))
    with pytest.raises(forebay.InvalidState, match="a page that is in use already"):
        pair.receiver.grant(9, TOKENS, [4, 5, 3], (1, 0))
    pair.receiver.abort(use)
    with pytest.raises(forebay.OutOfRange):
        pair.sender.payload(7, 1, bytes(1 << 20))
    assert pair.sender.fallbacks == []
    pair.check({})


@pytest.mark.parametrize("fabric", FABRICS)
def test_events_come_to_tasks_of_an_event_loop(pairs: Callable[..., Pair], fabric: str) -> None:
    pair = pairs(fabric)

    async def receive(use: transfer.Use) -> list[Any]:
        seen: list[Any] = []
        async for event in pair.receiver:
            seen.append(event)
            if event == transfer.Drained(use):
                break
        return seen

    async def send(request: int) -> Any:
        while True:
            event = await pair.sender.next()
            if isinstance(event, transfer.Granted):
                pair.compute(request)
            if isinstance(event, transfer.Ended):
                return event

    async def both() -> None:
        use = pair.receiver.grant(1, TOKENS, [3, 1, 2], (1, 0))
        # Both wait before anything can happen.
        tasks = [asyncio.ensure_future(receive(use)), asyncio.ensure_future(send(1))]
        await asyncio.sleep(0)
        pair.sender.begin(1, TOKENS)
        received, ended = await asyncio.wait_for(asyncio.gather(*tasks), SOON)
        assert transfer.Whole(use) in received and ended == transfer.Ended(1, None)
        # Closing ends a loop over events, and a wait for one.
        waits = asyncio.ensure_future(pair.sender.next())
        loops = asyncio.ensure_future(receive(use))
        await asyncio.sleep(0.01)
        pair.close()
        assert not any(isinstance(event, transfer.Ready) for event in await asyncio.wait_for(loops, SOON))
        with pytest.raises(forebay.Closed):
            await asyncio.wait_for(waits, SOON)

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(both())
    assert len(os.listdir("/proc/self/fd")) < before
    pair.check({1: ([3, 1, 2], 0)})


def test_a_cancelled_wait_leaves_no_descriptor_and_loses_no_event(pairs: Callable[..., Pair]) -> None:
    pair = pairs("shm")
    pair.take()

    async def cancelled() -> None:
        before = len(os.listdir("/proc/self/fd"))
        waits = asyncio.ensure_future(pair.receiver.next())
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert len(os.listdir("/proc/self/fd")) == before
        use = pair.receiver.grant(1, TOKENS, [3, 1, 2], (99, 0))
        event = await asyncio.wait_for(pair.receiver.next(), SOON)
        assert isinstance(event, transfer.Failed) and event.use == use

    asyncio.run(cancelled())


def test_the_descriptor_fits_selectors(pairs: Callable[..., Pair]) -> None:
    pair = pairs("shm")
    pair.take()
    with selectors.DefaultSelector() as selector:
        selector.register(pair.receiver, selectors.EVENT_READ)
        assert selector.select(0) == []
        pair.receiver.grant(1, TOKENS, [3, 1, 2], (99, 0))
        assert selector.select(SOON)
    assert isinstance(pair.receiver.poll(), transfer.Failed)
    assert pair.receiver.poll() is None
    assert pair.receiver.poll(0.01) is None


def test_a_thread_waits_while_another_calls_and_closes(pairs: Callable[..., Pair]) -> None:
    pair = pairs("shm")
    pair.take()
    found: list[Any] = []

    def waits() -> None:
        try:
            while True:
                found.append(pair.receiver.poll(None))
        except forebay.Closed as error:
            found.append(error)

    thread = threading.Thread(target=waits)
    thread.start()
    end = time.monotonic() + SOON
    for request in range(1, 50):
        pair.receiver.grant(request, TOKENS, [1, 2, 3], (99, 0))
        assert pair.receiver.stats().whole == 0
        # Its pages are in use until the thread has taken its end.
        while len(found) < request and time.monotonic() < end:
            time.sleep(0.001)
    while True:
        try:
            pair.receiver.close()
            break
        except forebay.Busy:
            # The thread looks at this moment.
            assert time.monotonic() < end
    thread.join(SOON)
    assert not thread.is_alive()
    assert [event.use.request for event in found[:-1]] == list(range(1, 50))
    assert isinstance(found[-1], forebay.Closed)


def test_closing_in_any_order_and_what_is_left_of_the_memory(pairs: Callable[..., Pair]) -> None:
    before = set(alive)
    for first in ("sender", "receiver"):
        pair = pairs("shm")
        kept = pair.sender.memory[5:20]
        kept[:] = 3
        getattr(pair, first).close()
        pair.close()
        pair.close()
        assert pair.sender.closed and pair.receiver.closed and "closed" in repr(pair.sender)
        # The memory is there while an array of it is.
        kept[:] += 1
        assert (kept == 4).all() and len(set(alive) - before) == 1
        del kept
        gc.collect()
        assert set(alive) <= before
        for call in (pair.sender.stats, pair.receiver.stats, pair.sender.poll, pair.receiver.fileno):
            with pytest.raises(forebay.Closed):
                call()
        with pytest.raises(AttributeError):
            pair.sender.memory


def test_a_forgotten_receiver_keeps_its_pages_until_its_thread_has_ended(tmp_path: Path) -> None:
    planes = [np.full((PAGES, size), CANARY, np.uint8) for size in SIDE.page_bytes[0]]
    pages = weakref.ref(planes[0])
    receiver = transfer.Receiver("shm", tmp_path / "at", SIDE, Rank(2), planes)
    assert receiver.address == str(tmp_path / "at")
    del planes
    gc.collect()
    assert pages() is not None
    forgotten = weakref.ref(receiver)
    del receiver
    gc.collect()
    assert forgotten() is None and pages() is None and not (tmp_path / "at").exists()


def test_arguments_are_checked_by_name(tmp_path: Path) -> None:
    at = str(tmp_path / "at")
    planes = [np.zeros((PAGES, size), np.uint8) for size in SIDE.page_bytes[0]]

    def receiver(*changed: Any, **options: Any) -> Any:
        given = [*planes[: len(planes) - len(changed)], *changed]
        return transfer.Receiver("shm", at, SIDE, Rank(2), given, options=TransferOptions(**options))

    frozen = planes[3].copy()
    frozen.flags.writeable = False
    for wrong, says in ((frozen, "writable"), (planes[3][:, ::2], "contiguous"), (5, "planes"), (np.array(3), "first")):
        with pytest.raises(forebay.InvalidArgument, match=says):
            receiver(wrong)
    with pytest.raises(forebay.InvalidConfig, match="page_bytes of a plane"):
        receiver(np.zeros((PAGES, 3), np.uint8))
    with pytest.raises(forebay.InvalidConfig, match="plane_count"):
        transfer.Receiver("shm", at, SIDE, Rank(2), planes[1:])
    for name, value in (("token", "text"), ("alive", 0), ("lost", -1), ("links", 0), ("bytes_per_second", 0)):
        with pytest.raises(forebay.InvalidArgument, match=name):
            receiver(**{name: value})
    with pytest.raises(forebay.InvalidConfig, match="guessed"):
        receiver(token=b"short")
    with pytest.raises(forebay.InvalidArgument, match="fabric"):
        transfer.Receiver("rdma", at, SIDE, Rank(2), planes)
    with pytest.raises(forebay.InvalidArgument, match="split"):
        side = TransferSide(SIDE.components, SIDE.places, SIDE.page_bytes, PAGE, split="rows")
        transfer.Receiver("shm", at, side, Rank(2), planes)
    with pytest.raises(forebay.InvalidConfig, match="without a token"):
        transfer.Receiver("tcp", "0.0.0.0:0", SIDE, Rank(2), planes)
    with pytest.raises(forebay.InvalidArgument, match="address"):
        transfer.Receiver("tcp", 7, SIDE, Rank(2), planes)  # type: ignore[arg-type]
    with receiver() as first:
        with pytest.raises(forebay.Busy):
            receiver()
        with pytest.raises(forebay.InvalidArgument, match="at_most"):
            first.poll(-1)
        with pytest.raises(forebay.InvalidArgument, match="within"):
            first.grant(1, TOKENS, [1, 2, 3], (1, 0), within=0)
    with pytest.raises(forebay.InvalidArgument, match="memory_bytes"):
        transfer.Sender("shm", SIDE, Rank(1), 0, PARTS.planes)


def test_pages_by_address_are_those_of_the_engine(tmp_path: Path) -> None:
    memory = np.full(4096, CANARY, np.uint8)
    side = TransferSide.single([3], 8, 16, row_stride=16)
    pages = transfer.HostPages(memory.ctypes.data + 64, 2 * 300, 300)
    with transfer.Receiver("shm", tmp_path / "at", side, Rank(2), [pages]) as receiver, transfer.Sender(
        "shm", side, Rank(1), 4096, side.parts(1).planes, lock=False
    ) as sender:
        sender.add(receiver.address)
        while not isinstance(receiver.poll(SOON), transfer.Met):
            pass
        receiver.grant(1, 16, [1], (1, 0))
        sender.memory[:256] = np.arange(256)
        sender.begin(1, 16)
        sender.computed([transfer.Computed(1, 3, 0, 16, 0)])
        sender.finish(1)
        while not isinstance(event := receiver.poll(SOON), (transfer.Whole, transfer.Failed)):
            assert event is not None
        assert isinstance(event, transfer.Whole)
    wanted = np.full(4096, CANARY, np.uint8)
    for token in range(16):
        at = 64 + 300 + 16 * token
        wanted[at : at + 8] = np.arange(16 * token, 16 * token + 8)
    assert (memory == wanted).all()


def test_a_plan_says_whether_two_sides_fit() -> None:
    assert transfer.transfer_bytes(SIDE, SIDE, 100) == 100 * LAYERS * (ROW + KEY)
    # Another page size and other strides fit.
    assert transfer.transfer_bytes(SIDE, TransferSide.single(LAYERS, ROW, 64, row_stride=64), 1) == LAYERS * ROW
    with pytest.raises(forebay.InvalidConfig):
        transfer.transfer_bytes(SIDE, TransferSide.single(LAYERS, ROW + 4, PAGE), 1)
    with pytest.raises(forebay.InvalidConfig):
        transfer.transfer_bytes(SIDE, TransferSide.single(LAYERS + 1, ROW, PAGE), 1)


def test_a_collector_asks_ends_at_a_scrape(pairs: Callable[..., Pair]) -> None:
    needs_prometheus("a_collector_asks_ends_at_a_scrape")
    import prometheus_client

    from forebay.prometheus import TransferCollector

    registry = prometheus_client.CollectorRegistry()
    collector = TransferCollector(registry)
    pair = pairs("shm")
    collector.add_sender("prefill", pair.sender, range(LAYERS))
    collector.add_receiver("decode", pair.receiver)
    value = registry.get_sample_value
    assert value("forebay_sender_done_total", {"end": "prefill"}) == 0
    use = pair.receiver.grant(1, TOKENS, [3, 1, 2], (1, 0))
    pair.sender.begin(1, TOKENS)
    pair.compute(1)
    pair.until(lambda: bool(transfer.Drained(use) in pair.received and of(pair.sent, transfer.Ended, 1)))
    assert value("forebay_sender_done_total", {"end": "prefill"}) == 1
    assert value("forebay_sender_held", {"end": "prefill"}) == 0
    assert value("forebay_sender_lag_parts_total", {"end": "prefill", "layer": "1"}) == 1
    assert value("forebay_receiver_bytes_total", {"end": "decode"}) == TOKENS * LAYERS * (ROW + KEY)
    # A closed end is left out, and one that was removed.
    pair.sender.close()
    assert value("forebay_sender_done_total", {"end": "prefill"}) is None
    assert value("forebay_receiver_whole_total", {"end": "decode"}) == 1
    collector.remove("decode")
    assert value("forebay_receiver_whole_total", {"end": "decode"}) is None
