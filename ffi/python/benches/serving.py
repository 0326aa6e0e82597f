"""What `forebay.serving` costs a step on the host device, call by call: the least of many steps, in microseconds.

    benches/serving.py            NumPy
    benches/serving.py --torch    torch on one thread, with bfloat16 rows

Each request selects the same positions in every step, so that after the first step nothing is fetched. The small rows
show the calls, the others the copies too.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections import defaultdict
from typing import Any

import forebay
import numpy as np
from forebay.serving import Requests

LAYERS = 4
# Requests, positions that each selects, bytes of a row, tokens of a prompt.
SETTINGS = [(1, 8, 16, 512), (8, 8, 16, 512), (1, 2048, 1152, 8192), (8, 2048, 1152, 8192)]


def measure(batch: int, k: int, width: int, context: int, steps: int, torch: Any) -> dict[str, float]:
    """The least time of each call, in seconds."""
    shape = forebay.Shape(layers=LAYERS, row_bytes=(width, 0), top_k=k)
    chance = np.random.default_rng(1)
    chosen: Any = np.stack([chance.choice(context, k, replace=False) for _ in range(batch)])[:, None]
    prompt, new, dtype = np.zeros((context, width), np.uint8), np.zeros((batch, 1, width), np.uint8), np.dtype("u2")
    if torch is not None:
        torch.set_num_threads(1)
        chosen, new, dtype = torch.from_numpy(chosen), torch.from_numpy(new), torch.bfloat16
    taken: dict[str, list[float]] = defaultdict(list)
    with (
        forebay.HostDevice() as device,
        forebay.Cache(device, shape, lanes=batch, max_tokens=context + steps, slots=context // 2, lock=False) as cache,
    ):
        requests = Requests(cache)
        for id in range(batch):
            request = requests.add(id, prompt=context, promised=steps)
            for layer in range(LAYERS):
                request.prefill(layer, prompt)
        for _ in range(steps):
            times = [time.perf_counter()]
            step = requests.step(range(batch))
            times.append(time.perf_counter())
            for layer in range(LAYERS):
                step.write(layer, new)
                times.append(time.perf_counter())
                slots = step.select(layer, chosen)
                times.append(time.perf_counter())
                step.rows(layer, slots, dtype)
                times.append(time.perf_counter())
                step.stored(layer)
                times.append(time.perf_counter())
            step.finish()
            times.append(time.perf_counter())
            calls = ["step", *["write", "select", "rows", "stored"] * LAYERS, "finish"]
            for call, seconds in zip(calls, np.diff(times).tolist()):
                taken[call].append(seconds)
    return {call: min(seconds) for call, seconds in taken.items()}


def main() -> None:
    """Prints one line for each setting."""
    torch: Any = importlib.import_module("torch") if "--torch" in sys.argv else None
    short = "--short" in sys.argv
    for setting in SETTINGS[:2] if short else SETTINGS:
        found = measure(*setting, steps=5 if short else 100, torch=torch)
        print(
            "batch {}, k {}, rows of {} bytes: ".format(*setting)
            + ", ".join(f"{call} {1e6 * seconds:.0f} us" for call, seconds in found.items())
        )


if __name__ == "__main__":
    main()
