"""The cost of a layer call through C and through Python, for a whole batch, in one run.

    python ffi/python/benches/calls.py

The C figure is the same work through one call for all layers (`Step.layers`, in which the library loops), divided by
the number of layers: the difference is Python's. The resolve has few positions, so the bench measures the call itself.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Callable

import numpy as np

import forebay

LAYERS, ROWS, TOP_K = 61, 16, 64
# The steps of a repetition, and the repetitions, of which the bench prints the best.
STEPS, RUNS = (2, 1) if "--short" in sys.argv else (5, 100)


def spent(run: Callable[[Any], None], cache: forebay.Cache, sequences: list[Any], first: bool) -> float:
    """Returns the seconds of a layer call, over a few steps."""
    spent = 0.0
    for at in range(STEPS):
        step = cache.prepare([(sequence, 0 if first and at == 0 else 1, 1) for sequence in sequences])
        began = time.perf_counter()
        run(step)
        spent += time.perf_counter() - began
        step.retire()
    return spent / STEPS / LAYERS


def main() -> None:
    """Prints one line for each way."""
    shape = forebay.Shape(layers=LAYERS, row_bytes=(656, 0), top_k=TOP_K)
    promised = 4 * STEPS * (RUNS + 1)
    selection = np.full((LAYERS, ROWS, 1, TOP_K), -1, np.int32)
    selection[..., :4] = np.arange(4)
    slots = np.empty_like(selection)
    with (
        forebay.HostDevice() as device,
        forebay.Cache(
            device, shape, lanes=ROWS, max_tokens=128 + promised, slots=128, residency_only=True, lock=False,
            populate=False, huge_pages=False,
        ) as cache,
    ):  # fmt: skip
        sequences = [cache.open(prompt=64, promised=promised, bring_up="nothing") for _ in range(ROWS)]
        for sequence in sequences:
            sequence.append_in_place(64)
            sequence.join()
        one, answer = selection[0].copy(), slots[0].copy()
        buffers = forebay.Buffers(cache, one, answer)

        def by_numpy(step: forebay.Step) -> None:
            for layer in range(LAYERS):
                step.layer(layer, one, answer)

        def by_buffers(step: forebay.Step) -> None:
            for layer in range(LAYERS):
                step.layer(layer, buffers)

        ways: list[tuple[str, Callable[[Any], None]]] = [
            ("all layers in one call, as C calls it", lambda step: step.layers(selection, slots)),
            ("NumPy arrays, checked each time", by_numpy),
            ("Buffers, checked once", by_buffers),
        ]
        if "--torch" in sys.argv:
            import torch

            tensors = torch.from_numpy(one), torch.from_numpy(answer)

            def by_torch(step: forebay.Step) -> None:
                for layer in range(LAYERS):
                    step.layer(layer, *tensors)

            ways.append(("torch tensors, checked each time", by_torch))
        # In turn, so that other load of the machine affects all alike.
        best = [float("inf")] * len(ways)
        for turn in range(RUNS):
            for at, (_, run) in enumerate(ways):
                best[at] = min(best[at], spent(run, cache, sequences, turn == 0 and at == 0))
        for (name, _), seconds in zip(ways, best):
            print(f"{name}: {1e6 * seconds:.2f} us a layer, {1e6 * (seconds - best[0]):+.2f} us")


if __name__ == "__main__":
    main()
