"""A step in which a call was forgotten is refused by `finish`, or fails where only the device can know."""

from __future__ import annotations

from typing import Callable

import numpy as np
import pytest

import forebay
from conftest import LAYERS, TOP_K, empty, joined, some, whole

Make = Callable[..., forebay.Cache]
Call = Callable[[forebay.Step, forebay.Buffers], None]


def nothing(step: forebay.Step, buffers: forebay.Buffers) -> None:
    """Everything of layer 1 is forgotten."""


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
    # The last one: a gather can be made up for until the next layer resolves.
    called(step, forebay.Buffers(cache, some(1, 2).repeat(2, 0), empty(2)))
    return cache, sequences, step


@pytest.mark.parametrize(("called", "says"), FORGOTTEN)
def test_a_forgotten_call_is_named_and_made_up_for(make: Make, called: Call, says: str) -> None:
    cache, sequences, step = begin(make, called)
    for end in (step.finish, step.retire):
        with pytest.raises(forebay.InvalidConfig, match=says):
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
def test_a_step_with_a_forgotten_call_is_abandoned_and_a_roll_back_heals_it(
    make: Make, called: Call, says: str
) -> None:
    cache, sequences, step = begin(make, called)
    step.abandon()
    with pytest.raises(forebay.Cancelled):
        step.retire()
    with pytest.raises(forebay.ForebayError):
        cache.prepare([(sequences[0], 0, 1)])
    for sequence in sequences:
        sequence.roll_back(40)
    with cache.prepare([(sequence, 0, 1) for sequence in sequences]) as after:
        whole(after)
    cache.validate()


def test_an_exception_of_the_body_abandons_the_step_and_comes_out_as_it_is(make: Make) -> None:
    cache = make()
    sequence = joined(cache)
    with pytest.raises(KeyError, match="the engine's own"):
        with cache.prepare([(sequence, 0, 1)]) as step:
            step.layer(0, some(1), empty())
            raise KeyError("the engine's own")
    assert cache.stats().steps_in_flight == 0
    sequence.roll_back(40)
    with pytest.raises(forebay.InvalidConfig, match="a scatter was not enqueued .layer 0"):
        with cache.prepare([(sequence, 0, 1)]) as step:
            step.layer(0, some(1), empty())
    # It is open still.
    whole(step, 0)
    assert step.retire().step == 2
