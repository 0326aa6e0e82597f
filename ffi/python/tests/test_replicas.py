"""Copies of hot ranges of weights that ranks share: changes of their set, ranks that are lost, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

import forebay
from forebay._library import lib
from forebay.device import alive
from forebay.update import commit
from ranks import GRANULE, HALF, LAYERS, NAME, WAIT, Rank, content, each, group

Made = Callable[..., list[Rank]]
WHOLE = [True] * LAYERS
MOST = 1 << 30


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Made]:
    """Makes ranks that have shared, and closes them."""
    made: list[Rank] = []

    def build(count: int = 2, threads: bool = False) -> list[Rank]:
        made.extend(group(tmp_path, [forebay.HostDevice(threads=threads) for _ in range(count)]))
        return made[-count:]

    yield build
    for rank in made:
        rank.close()


def shared(rank: Rank, number: int, replicas: list[Any]) -> forebay.Replication:
    change = rank.weights.replicate(number, replicas, MOST)
    while change.advance(5 * GRANULE):
        continue
    change.share(rank.links, WAIT)
    return change


def taken(all_ranks: list[Rank], number: int, replicas: list[Any]) -> None:
    """A change that all ranks take."""

    def take(rank: Rank) -> forebay.Outcome:
        with shared(rank, number, replicas) as change:
            return rank.weights.commit_replicas(change, rank.links, number, WAIT)

    assert each(take, all_ranks) == [(True, "")] * len(all_ranks)


@pytest.mark.parametrize("threads", [False, True])
def test_new_replicas_are_taken_by_all_ranks(ranks: Made, threads: bool) -> None:
    pair = ranks(threads=threads)
    wanted = [(4, NAME, 0), forebay.Replica(1, NAME, 1), (3, NAME, 0)]
    changes = [rank.weights.replicate(7, wanted, MOST) for rank in pair]
    # The other rank's half of each.
    assert [change.left for change in changes] == [2 * HALF, HALF]
    assert [change.number for change in changes] == [7, 7] and repr(changes[0]) == "<forebay.Replication 7>"
    streams = [rank.device.stream() for rank in pair]
    for change, rank, stream in zip(changes, pair, streams):
        left = change.left
        while left:
            left = max(left - 3 * GRANULE, 0)
            assert change.advance(3 * GRANULE, stream) == left == change.left
            assert rank.step() == WHOLE
    plan = pair[0].weights.planned.device
    each(lambda change, rank, stream: change.share(rank.links, WAIT, stream), changes, pair, streams)
    assert [(rank.weights.replicas, rank.weights.device_bytes) for rank in pair] == [((), plan)] * 2
    done = each(lambda change, rank: rank.weights.commit_replicas(change, rank.links, 7, WAIT), changes, pair)
    assert done == [(True, "")] * 2 and all(done) and not changes[0].failed
    for change in changes:
        change.abort()
        change.close()
        change.close()
    assert [rank.weights.replicas for rank in pair] == [((1, NAME, 1), (3, NAME, 0), (4, NAME, 0))] * 2
    assert pair[0].weights.replicas[0] == forebay.Replica(layer=1, tensor=NAME, rank=1)
    assert [rank.weights.device_bytes - plan for rank in pair] == [2 * HALF, HALF]
    assert [rank.step() for rank in pair for _ in range(2)] == [WHOLE] * 4
    # What is not named is given back.
    taken(pair, 8, [(3, NAME, 0)])
    assert [rank.weights.device_bytes - plan for rank in pair] == [HALF, 0]
    assert [rank.step() for rank in pair] == [WHOLE] * 2


@pytest.mark.parametrize("why", ["another border", "closed", "aborted"])
def test_replicas_that_one_rank_does_not_take_are_taken_by_none(ranks: Made, why: str) -> None:
    pair = ranks()
    taken(pair, 1, [(0, NAME, 0)])
    changes = each(lambda rank: shared(rank, 2, [(2, NAME, 0), (2, NAME, 1)]), pair)
    if why == "another border":
        done = each(
            lambda one, rank: rank.weights.commit_replicas(one, rank.links, rank.number, WAIT), changes, pair
        )
    else:
        changes[1].close() if why == "closed" else changes[1].abort()
        done = [pair[0].weights.commit_replicas(changes[0], pair[0].links, 1, WAIT)]
    assert not any(done) and any(one.reason for one in done)
    for change in changes:
        change.close()
    assert [rank.weights.replicas for rank in pair] == [((0, NAME, 0),)] * 2
    assert [rank.step() for rank in pair] == [WHOLE] * 2
    taken(pair, 3, [(2, NAME, 1)])


def test_replicas_are_dropped_without_the_others(ranks: Made) -> None:
    pair = ranks()
    rank, other = pair
    taken(pair, 1, [(1, NAME, 0), (2, NAME, 1)])
    rank.weights.drop_replicas()
    assert (rank.weights.replicas, rank.weights.device_bytes) == ((), rank.weights.planned.device)
    assert len(other.weights.replicas) == 2 and [one.step() for one in pair] == [WHOLE] * 2

    def differs(one: Rank) -> type[BaseException]:
        with one.weights.replicate(2, [], MOST) as change:
            with pytest.raises((forebay.InvalidConfig, forebay.Cancelled)) as said:
                change.share(one.links, WAIT)
        return said.type

    # A rank with other replicas is refused, until all have dropped them.
    assert forebay.InvalidConfig in each(differs, pair)
    for one in pair:
        one.weights.drop_replicas()
    taken(pair, 3, [(1, NAME, 0)])

    def renew(one: Rank) -> forebay.Outcome:
        with one.weights.update(1, [1], MOST) as update:
            update.fill(1, NAME, content(1))
            update.share(one.links, WAIT)
            return one.weights.commit(update, one.links, 4, WAIT)

    # A new version of the layer has none.
    assert all(each(renew, pair)) and [one.weights.replicas for one in pair] == [(), ()]
    assert [one.step() for one in pair] == [WHOLE] * 2


def test_names_of_replicas_outlive_weights_that_another_thread_closes(
    ranks: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = ranks()
    taken(pair, 1, [(1, NAME, 0), (2, NAME, 1)])
    rank = pair[0]

    class Closing:
        """The library, but behind a call that lists replicas all else of the rank has been closed."""

        def __getattr__(self, name: str) -> Any:
            return getattr(lib, name)

        def fb_weights_replicas(self, weights: Any, places: Any, room: int, count: Any) -> int:
            status = int(lib.fb_weights_replicas(weights, places, room, count))
            if room:
                rank.close()
            return status

    monkeypatch.setattr("forebay.replicas.lib", Closing())
    device = rank.device._handle
    assert rank.weights.replicas == ((1, NAME, 0), (2, NAME, 1))
    assert rank.weights.closed and rank.device.closed
    # The device was still there behind the call. The next one ends it.
    assert device in alive
    forebay.HostDevice().close()
    assert device not in alive


def test_a_rank_that_was_lost_is_read_around(ranks: Made) -> None:
    lost, holder, other = three = ranks(3)
    taken(three, 1, [(layer, NAME, holder.number) for layer in range(LAYERS)])
    lost.links.close()
    for rank in (holder, other):
        event = rank.links.poll(WAIT)
        assert (event.kind, event.rank) == ("lost", lost.number)
        rank.weights.lost(lost.number)
    # The holder has a copy of all that the rank owned. The other one has none, and reads some of it at its owner.
    assert holder.step() == WHOLE
    with pytest.raises(forebay.PeerLost):
        other.step()
    for rank in (holder, other):
        rank.weights.reroute()
        assert [rank.step(), rank.step()] == [WHOLE] * 2


def test_a_commit_that_raises_after_the_decision_says_so(ranks: Made) -> None:
    rank = ranks()[0]
    for outcome, failed in ((lib.FB_UPDATE_FAILED, True), (lib.FB_UPDATE_OPEN, False)):

        def commits(*given: Any) -> int:
            given[6][0] = outcome
            return int(lib.FB_DEVICE_FAILED)

        with rank.weights.replicate(2 - failed, [], MOST) as change, pytest.raises(forebay.DeviceFailed):
            commit(commits, rank.weights._pointer, rank.device, change, rank.links, (1, WAIT, None))
        assert change.failed == failed


def test_errors_of_a_change(ranks: Made, tmp_path: Path) -> None:
    rank, other = ranks()
    weights, links = rank.weights, rank.links
    one = (1, NAME, 0)
    refused: list[tuple[tuple[int, list[Any], int], type[BaseException], str]] = [
        ((0, [one], MOST), forebay.OutOfRange, "number 0"),
        ((1, [one, one], MOST), forebay.InvalidConfig, "twice"),
        ((1, [(LAYERS, NAME, 0)], MOST), forebay.OutOfRange, f"layer {LAYERS}"),
        ((1, [(1, "q_proj", 0)], MOST), forebay.OutOfRange, "q_proj"),
        ((1, [(1, NAME, 2)], MOST), forebay.OutOfRange, "rank 2"),
        # The half, and once a granule.
        ((1, [one], HALF + GRANULE - 1), forebay.OutOfMemory, str(HALF + GRANULE)),
        ((1, [(1, NAME)], MOST), forebay.InvalidArgument, r"^replicas\[0\]: got tuple"),
        ((1, [one, 7], MOST), forebay.InvalidArgument, r"^replicas\[1\]: got int"),
        ((1, [("a", NAME, 0)], MOST), forebay.InvalidArgument, r"^the layer of replicas\[0\]: got 'a'"),
        ((1, [(1, 3, 0)], MOST), forebay.InvalidArgument, r"^the tensor of replicas\[0\]: got int"),
        ((1, [(1, "a\0b", 0)], MOST), forebay.InvalidArgument, r"^the tensor of replicas\[0\]: "),
        ((1, [(1, NAME, -1)], MOST), forebay.InvalidArgument, r"^the rank of replicas\[0\]: got -1"),
        ((-1, [one], MOST), forebay.InvalidArgument, "^number: got -1"),
        ((1, NAME, MOST), forebay.InvalidArgument, "^replicas: got str"),  # type: ignore[list-item]
        ((1, [one], -1), forebay.InvalidArgument, "^at_most: got -1"),
    ]
    for given, error, says in refused:
        with pytest.raises(error, match=says):
            weights.replicate(*given)
    call: Callable[[], object]
    with weights.replicate(1, [one], MOST) as change:
        for call in (
            lambda: weights.replicate(2, [], MOST), lambda: weights.update(1, [1], MOST), weights.drop_replicas,
            weights.reroute,
        ):  # fmt: skip
            with pytest.raises(forebay.Busy):
                call()
        for call in (lambda: change.share(links, 1), lambda: weights.commit_replicas(change, links, 1, 1)):
            with pytest.raises(forebay.InvalidState):
                call()
        # Nothing was decided.
        assert not change.failed
        wrong: list[tuple[str, Callable[[], object]]] = [
            ("links: got Weights", lambda: change.share(weights, 1)),  # type: ignore[arg-type]
            ("at_most: got -1", lambda: change.share(links, -1)),
            ("most: got -1", lambda: change.advance(-1)),
            ("stream: got int 77", lambda: change.advance(1, 77)),
            ("change: got None", lambda: weights.commit_replicas(None, links, 1, 1)),  # type: ignore[arg-type]
            ("step: got 'a'", lambda: weights.commit_replicas(change, links, "a", 1)),  # type: ignore[arg-type]
        ]
        for says, bad in wrong:
            with pytest.raises(forebay.InvalidArgument, match=f"^{says}"):
                bad()
        with weights.step():
            for call in (weights.drop_replicas, weights.reroute,
                         lambda: weights.commit_replicas(change, links, 1, 1)):  # fmt: skip
                with pytest.raises(forebay.Busy):
                    call()
            for layer in range(LAYERS):
                with weights.use(layer):
                    continue
        with pytest.raises(forebay.InvalidState):
            other.weights.commit_replicas(change, links, 1, 1)
        assert change.advance(MOST) == 0
        change.abort()
        with pytest.raises(forebay.InvalidState):
            change.advance(1)
    with pytest.raises(forebay.Closed):
        change.left  # noqa: B018 - a call
    assert repr(change) == "<forebay.Replication 1, closed>"
    # One that was forgotten is no longer in the way.
    weights.replicate(3, [one], MOST)
    weights.replicate(4, [one], MOST).close()
    early = Rank(0, 2, forebay.HostDevice())
    for call in (lambda: early.weights.replicate(1, [one], MOST), early.weights.drop_replicas, early.weights.reroute):
        with pytest.raises(forebay.InvalidState, match="not shared"):
            call()
    assert early.weights.replicas == ()
    early.close()
    with forebay.HostDevice() as device:
        hosted = Rank(0, 1, device, source="host").fill()
        (tmp_path / "hosted").mkdir()
        hosted.join(tmp_path / "hosted")
        with pytest.raises(forebay.Unsupported):
            hosted.weights.replicate(1, [], MOST)
        hosted.close()
