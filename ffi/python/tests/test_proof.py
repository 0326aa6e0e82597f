"""The mechanics of the proof on every device: a model of SmolLM2's shape with few layers and random weights decodes to
the last bit as with every row resident. `test_model.py` has the real weights.

On the host device, on the stand-in driver, and with torch on a GPU, whose attention reads forebay's slabs and a tensor
with every row by the same kernels.
"""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest

import forebay
from places import Late, Standin, Torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import arrays  # noqa: E402
import engine  # noqa: E402
import smollm2  # noqa: E402
from engine import Decoder, Resident  # noqa: E402
from offloaded import BLOCK, Offloaded  # noqa: E402

LAYERS, VOCABULARY, CONTEXT, TOKENS, TOP_K, RATIO = 3, 2048, 200, 16, 32, 0.2
# As in test_model.py: split attention adds the parts of a sum in another order.
ROUNDING = 2e-4


@pytest.fixture(params=["host", "stand-in", "late stand-in", "torch"])
def place(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The place of the slots."""
    if request.param == "host":
        yield arrays.Numpy()
    elif request.param != "torch":
        late = Late() if request.param.startswith("late") else Standin()
        yield arrays.Standin(0, Path(late.library))
        late.leave()
    else:
        on_torch = Torch()
        yield arrays.Torch(0)
        on_torch.leave()


@functools.cache
def model() -> smollm2.Model:
    """The same model for all tests."""
    return smollm2.Model(smollm2.Drawn(1, smollm2.Sizes(layers=LAYERS, vocabulary=VOCABULARY)))


@functools.cache
def requests(batch: int) -> list[engine.Request]:
    """Random prompts, which have half of their tokens in common."""
    count = engine.needed(context=CONTEXT, batch=batch, promised=TOKENS)
    text = np.random.default_rng(1).integers(0, VOCABULARY, count).tolist()
    return engine.requests(model(), text, context=CONTEXT, batch=batch, promised=TOKENS)


def same_bits(one: Any, other: Any) -> bool:
    return one.shape == other.shape and np.array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize(
    ("order", "waves", "batch", "query_rows"),
    [
        ("whole", 1, 1, 1),
        ("whole", 1, 3, 2),
        ("waves", 1, 2, 2),
        ("waves", 3, 2, 2),
        ("da", 1, 2, 2),
        ("da", 3, 1, 2),
        ("dba", 1, 4, 1),
    ],
)
def test_decodes_as_with_every_row_resident(
    place: Any, order: str, waves: int, batch: int, query_rows: int
) -> None:
    asked, sizes = requests(batch), {"top_k": TOP_K, "query_rows": query_rows, "arrays": place}
    ratio = RATIO if waves == 1 else 0.08
    with Offloaded(model(), asked, ratio=ratio, order=order, attention_waves=waves, **sizes) as cache:
        # The other sequences share the first half of the prompt.
        assert [one.shared for one in cache.sequences] == [0] + [CONTEXT // 2 // BLOCK * BLOCK] * (batch - 1)
        resident = Resident(model(), asked, **sizes)
        sides = [Decoder(side, asked, query_rows=query_rows, read=True) for side in (cache, resident)]
        steps, worst = 0, 0.0
        for ours, expected in itertools.zip_longest(*sides):
            assert (ours.rows, ours.tokens) == (expected.rows, expected.tokens)
            assert order != "whole" or same_bits(ours.logits, expected.logits), f"step {steps}"
            worst, steps = max(worst, float(np.abs(ours.logits - expected.logits).max())), steps + 1
        assert sides[0].histories == sides[1].histories
        assert worst < ROUNDING and steps >= TOKENS // query_rows
        assert (cache.misses > 0).all() and (cache.hits > 0).all()
        assert waves == 1 or cache.cache.stats().scratch > 0
        # After the work that the ends of the sequences have enqueued.
        cache.device.wait(cache.streams[0])
        cache.cache.validate()


@pytest.mark.parametrize(
    ("order", "waves", "batch", "query_rows"),
    [("whole", 1, 1, 1), ("whole", 1, 3, 2), ("waves", 3, 2, 2), ("da", 1, 2, 2), ("dba", 1, 4, 1)],
)
def test_budgets_that_halve_and_grow_back_change_no_bit(
    place: Any, order: str, waves: int, batch: int, query_rows: int
) -> None:
    """Every three steps all budgets change. The steps are those of a cache whose budgets stay."""
    asked, sizes = requests(batch), {"top_k": TOP_K, "query_rows": query_rows, "arrays": place}
    ratio = RATIO if waves == 1 else 0.08

    def decode(resize_every: int) -> tuple[list[Any], int, forebay.Stats]:
        with Offloaded(
            model(), asked, ratio=ratio, order=order, attention_waves=waves, resize_every=resize_every, **sizes
        ) as cache:
            steps = list(Decoder(cache, asked, query_rows=query_rows, read=True))
            cache.device.wait(cache.streams[0])
            cache.cache.validate()
            return steps, int(cache.misses.sum()), cache.cache.stats()

    fixed, fewer, stayed = decode(0)
    resized, more, stats = decode(3)
    for number, (ours, expected) in enumerate(itertools.zip_longest(resized, fixed)):
        assert (ours.rows, ours.tokens) == (expected.rows, expected.tokens)
        assert np.abs(ours.logits - expected.logits).max() < ROUNDING
        assert order != "whole" or same_bits(ours.logits, expected.logits), f"step {number}"
    assert (stayed.resizes, stayed.moved_rows) == (0, 0)
    assert stats.resizes >= 2 * batch and stats.moved_rows > 0 and more > fewer


@pytest.mark.parametrize("layer", range(LAYERS))
def test_control_one_wrong_row_changes_the_logits(
    place: Any, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, sizes = requests(1), {"top_k": TOP_K, "arrays": place}
    with Offloaded(model(), asked, ratio=RATIO, **sizes) as cache:
        expected, ours = (Decoder(side, asked, read=True) for side in (Resident(model(), asked, **sizes), cache))
        assert same_bits(ours.step().logits, expected.step().logits)
        rows = cache.rows

        def read(at: int, slots: Any) -> Any:
            if at == layer:
                place.ready(cache.device, None)
                slot = np.array([int(place.numpy(slots).reshape(-1)[3])])
                index = (slot // BLOCK, slot % BLOCK)
                wrong = np.array(place.numpy(place.rows(cache.values[layer], *index)))
                wrong[0, 7] += 0.5
                place.put(cache.values[layer], index, wrong)
            return rows(at, slots)

        monkeypatch.setattr(cache, "rows", read)
        assert not same_bits(ours.step().logits, expected.step().logits)


def test_control_missing_gathers_are_detected(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests(1)
    with Offloaded(model(), asked, top_k=TOP_K, ratio=RATIO, order="waves", arrays=place) as cache:
        monkeypatch.setattr(forebay.Step, "gather", lambda *_, **__: None)
        with pytest.raises(forebay.InvalidState, match="a gather was not enqueued"):
            for _ in Decoder(cache, asked, read=True):
                pass


def example(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the example with random weights."""
    sizes = ["--layers", "2", "--context", "96", "--tokens", "6", "--top-k", "16", "--random-weights", "5"]
    command = [sys.executable, str(EXAMPLES / "decode.py"), *sizes, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_example_decodes_on_the_chosen_device(place: Any) -> None:
    where = ["--device", "cuda:0"] if isinstance(place, arrays.Torch) else []
    if isinstance(place, arrays.Standin):
        where = ["--device", "cuda:0", "--driver", str(place.driver)]
    ran = example(*where, "--resize-every", "2")
    # Torch may warn.
    assert ran.returncode == 0 and (not ran.stderr or isinstance(place, arrays.Torch)), ran.stderr
    assert "random weights: 2 layers" in ran.stdout and "to the last bit" in ran.stdout
    assert re.search(r"budgets changed [1-9]\d* times", ran.stdout), ran.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "gpu"], "--device"),
        (["--device", "cuda:0", "--driver", "/nowhere"], "/nowhere"),
        (["--device", "cuda:77"], "--device cuda:77"),
        (["--weights", "/nowhere"], "--random-weights"),
        (["--layers", "31"], "--layers"),
    ],
)
def test_the_example_refuses_a_missing_device(arguments: list[str], says: str) -> None:
    ran = example(*arguments)
    assert ran.returncode == 2
    assert says in ran.stderr.splitlines()[-1] and "Traceback" not in ran.stderr
