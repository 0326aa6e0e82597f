"""A KeyboardInterrupt at every point of the calls of shared weights: no tensor is freed that a copy still reads, no
handle is lost, and the next step begins."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

import forebay
from forebay.device import DeviceHandle, alive, end_left
from ranks import LAYERS, NAME, group
from test_interrupts import CANARY, Ground, interrupt, no_collector  # noqa: F401 - a fixture
from test_ownership import Gate

WORDS, FILL = 64, 7


def fill_at_each_point(folder: Path) -> int:
    """Interrupts a fill once at each point, behind work that holds the stream. Returns the number of points, and raises
    if the copy has read other bytes than the tensor's."""
    at = 0
    while True:
        ground, device = Ground(), forebay.HostDevice(threads=True)
        weights = forebay.Weights(device, [{NAME: 4 * WORDS}], [NAME], rank=0, ranks=1)
        gate = Gate(device, None)
        raised, _ = interrupt(lambda: weights.fill(0, NAME, ground.array((WORDS,), FILL)), at)
        _late.clear()
        gate.open()
        try:
            links = weights.meet(folder)
        except forebay.InvalidState:
            # The fill was not made, or has not said so.
            assert raised
        else:
            found = weights.tensor(0, NAME, dtype=np.int32)
            assert (found == FILL).all(), "the copy read other bytes"
            links.close()
        weights.close()
        device.close()
        ground.check()
        if not raised:
            assert ground.freed == [(0, 4 * WORDS)]
            return at
        at += 1


def open_handles() -> set[Any]:
    """The handles that have not ended, though nothing uses them or keeps them from their end."""
    gc.collect()
    end_left()
    return set(alive)


def test_an_interrupt_anywhere_frees_no_tensor_that_a_copy_reads(tmp_path: Path) -> None:
    before = open_handles()
    assert fill_at_each_point(tmp_path) > 20
    assert open_handles() <= before, "a handle was lost"


# What a package would hold meanwhile if it kept tensors only after the call.
_late: list[Any] = []


def test_control_a_tensor_that_is_held_only_after_the_call_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lend(_handle: DeviceHandle, owner: object, copy: Callable[[], int], _on: Any) -> int:
        status = copy()
        _late.append(owner)
        return status

    monkeypatch.setattr(DeviceHandle, "lend", lend)
    with pytest.raises(AssertionError, match="the copy read other bytes"):
        fill_at_each_point(tmp_path)
    assert CANARY != FILL


def lives(folder: Path) -> None:
    """Makes each object, and ends it."""
    tensor = np.zeros(WORDS, np.int32)
    with (
        forebay.HostDevice() as device,
        forebay.Weights(device, [{NAME: 4 * WORDS}], [NAME], rank=0, ranks=1) as weights,
    ):
        weights.fill(0, NAME, tensor)
        with weights.meet(folder) as links:
            weights.share(links, 1)
            with weights.update(1, [0], 1 << 30) as update:
                update.fill(0, NAME, tensor)
            # One rank has no replica.
            with weights.replicate(1, [], 1 << 30) as change:
                change.advance(1)
                assert weights.replicas == ()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_anywhere_loses_no_handle(tmp_path: Path) -> None:
    before, at, raised = open_handles(), 0, True
    while raised:
        raised, _ = interrupt(lambda: lives(tmp_path), at)
        # A collection at each point would take long.
        assert set(alive) <= before or open_handles() <= before, f"a handle was lost at point {at}"
        at += 1
    assert at > 100


def test_the_next_step_begins_after_an_interrupt_anywhere(tmp_path: Path) -> None:
    ranks = group(tmp_path, [forebay.HostDevice() for _ in range(2)])
    rank, at, raised = ranks[0], 0, True

    def step() -> None:
        with rank.weights.step():
            for layer in range(LAYERS):
                with rank.weights.use(layer):
                    continue

    while raised:
        raised, _ = interrupt(step, at)
        # As the program goes on: it makes no call for the step that was interrupted.
        assert rank.step() == [True] * LAYERS, f"after an interrupt at point {at}"
        at += 1
    assert at > 50
    for one in ranks:
        one.close()
