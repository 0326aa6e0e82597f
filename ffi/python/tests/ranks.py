"""Ranks that share weights, for tests: both in this process, each with a device of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, TypeVar

import numpy as np

import forebay

LAYERS, NAME = 6, "o_proj"
# Of a layer's tensor, in the host device's granules of 4 KiB: each of two ranks has eight.
BYTES, GRANULE = 64 << 10, 4 << 10
HALF = BYTES // 2
# The most seconds that a test waits.
WAIT = 30
_Made = TypeVar("_Made")


def content(layer: int, version: int = 0) -> np.ndarray[Any, Any]:
    """A layer's tensor: each word says which it is, of which layer and version."""
    words = np.arange(BYTES // 4, dtype=np.uint32)
    return (words + (layer << 16) + (version << 24)).astype(np.uint32)


class Rank:
    """A rank: its device, its weights, and its sessions once it has met the others."""

    links: forebay.Links
    # Each layer's tensor in its window: taken once, because addresses never change.
    views: list[np.ndarray[Any, Any]]

    def __init__(self, rank: int, ranks: int, device: forebay.Device, **changes: Any) -> None:
        self.number, self.device = rank, device
        declared: dict[str, Any] = {"layers": [{NAME: BYTES}] * LAYERS, "patterns": [NAME], **changes}
        self.weights = forebay.Weights(device, rank=rank, ranks=ranks, **declared)

    def fill(self) -> Rank:
        for layer in range(LAYERS):
            self.weights.fill(layer, NAME, content(layer))
        return self

    def join(self, folder: Path) -> Rank:
        """Meets and shares."""
        self.links = self.weights.meet(folder, hello=WAIT)
        self.weights.share(self.links, WAIT)
        self.views = [self.weights.tensor(layer, NAME, dtype=np.uint32) for layer in range(LAYERS)]
        return self

    def reads(self, layer: int, version: int = 0) -> bool:
        """Whether a layer's window shows the whole tensor now."""
        return bool((self.views[layer] == content(layer, version)).all())

    def step(self, version: int = 0) -> list[bool]:
        """A step: whether each layer is whole between enter and leave."""
        found: list[bool] = []
        with self.weights.step():
            for layer in range(LAYERS):
                with self.weights.use(layer):
                    self.device.call(lambda at=layer: found.append(self.reads(at, version)))  # type: ignore[misc]
        self.device.wait()
        return found

    def close(self) -> None:
        if hasattr(self, "links"):
            self.views = []
            self.links.close()
        self.weights.close()
        self.device.close()


def each(call: Callable[..., _Made], *given: Any) -> list[_Made]:
    """Makes a call for every item at the same time, as ranks do that wait for each other."""
    with ThreadPoolExecutor(len(given[0])) as threads:
        return list(threads.map(call, *given))


def group(folder: Path, devices: list[forebay.Device], **changes: Any) -> list[Rank]:
    """Ranks that have shared, one for each device."""
    ranks = [Rank(number, len(devices), device, **changes).fill() for number, device in enumerate(devices)]
    return each(lambda rank: rank.join(folder), ranks)
