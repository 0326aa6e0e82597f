"""Two ranks share the weights of six layers: the program of examples/sharded_weights.rs, in Python.

Each rank keeps half of every sharded layer, and pulls the other half while earlier layers compute. The program prints
what a rank holds and compares every use with the whole weights. The ranks are threads here, each with a device of its
own; the same calls serve processes of a host, which meet in a folder.
"""

from __future__ import annotations

import functools
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import forebay

RANKS, LAYERS = 2, 6
# Bytes of one layer's output projection.
BYTES = 256 << 10
NAME = "o_proj"


def whole(layer: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The weights of a layer, whole, as each rank would load them."""
    return ((np.arange(BYTES) // 7 + 31 * layer) % 256).astype(np.uint8)


def project(layer: int, window: np.ndarray[Any, Any], same: list[bool]) -> None:
    """The engine's work, which reads the layer's window."""
    same.append(bool((window == whole(layer)).all()))


def run(rank: int, folder: str) -> str:
    """One rank: plan, windows, fill, share, and two steps. Returns its line of the table."""
    layers = [{NAME: BYTES}] * LAYERS
    with (
        forebay.HostDevice() as device,
        forebay.Weights(device, layers, [NAME], rank=rank, ranks=RANKS) as weights,
    ):
        # The engine has each tensor whole for a moment, and the windows keep this rank's part of it.
        for layer in range(LAYERS):
            weights.fill(layer, NAME, whole(layer))
        # The ranks say who they are, compare their plans, and give each other their parts.
        with weights.meet(folder) as links:
            weights.share(links, at_most=30)
            windows = [weights.tensor(layer, NAME) for layer in range(LAYERS)]
            compute = device.stream()
            same: list[bool] = []
            for _ in range(2):
                with weights.step(stream=compute):
                    for layer in range(LAYERS):
                        with weights.use(layer, compute):
                            compute.call(functools.partial(project, layer, windows[layer], same))
                        # Behind it come the experts.
            compute.wait()
            if same != [True] * (2 * LAYERS):
                raise RuntimeError("a window showed other weights")
            links.end()
            while not links.poll(at_most=1).is_over:
                continue
        held = weights.planned
        return f"{rank:>4} {held.resident:>9} {held.shards:>9} {sum(held.buffers):>9} {held.saved:>9}"


def table() -> str:
    """The table of both ranks."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(RANKS) as ranks:
        lines = list(ranks.map(run, range(RANKS), [folder] * RANKS))
    head = f"rank  resident     parts   buffers     saved   (bytes of {LAYERS * BYTES})"
    return "\n".join([head, *lines])


if __name__ == "__main__":
    print(table())
