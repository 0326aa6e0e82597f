"""What a layer call costs through C and through Python, for a whole batch, in one run.

    python ffi/python/benches/calls.py

The C figure is the same work through one call for all layers (`Step.layers`, in which the library loops), divided by
the layers: what is left beside it is Python's. The resolve is of few positions, so that the call is what is measured.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Callable

import numpy as np

import forebay

LAYERS, ROWS, TOP_K = 61, 16, 64
STEPS = 200
# Repetitions, of which the best is shown.
RUNS = 5


def best(run: Callable[[Any], None], cache: forebay.Cache, rows: list[Any]) -> float:
    """Seconds a layer call."""
    found = float("inf")
    for _ in range(RUNS):
        spent = 0.0
        for _ in range(STEPS):
            step = cache.prepare(rows)
            began = time.perf_counter()
            run(step)
            spent += time.perf_counter() - began
            step.retire()
            rows = [(sequence, 1, 1) for sequence, _, _ in rows]
        found = min(found, spent / STEPS / LAYERS)
    return found


def main() -> None:
    """Prints a line for each way."""
    shape = forebay.Shape(layers=LAYERS, row_bytes=(656, 0), top_k=TOP_K)
    promised = 8 * STEPS * (RUNS + 1)
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
        rows = [(sequence, 0, 1) for sequence in sequences]
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
        base = None
        for name, run in ways:
            seconds = best(run, cache, rows)
            rows = [(sequence, 1, 1) for sequence in sequences]
            base = seconds if base is None else base
            print(f"{name}: {1e6 * seconds:.2f} us a layer, {1e6 * (seconds - base):+.2f} us")


if __name__ == "__main__":
    main()
