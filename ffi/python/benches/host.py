"""The cost of a step's own calls through Python, on the CUDA device over a driver whose calls do nothing
(benches/support/idle.c, which the bench `host` uses too): 61 layers, batch 160, two query rows.

    python ffi/python/benches/host.py

No kernel runs and no driver works, so the bench measures the package and the library only: prepare, finish and retire
of a step; a layer's calls of two micro-batches of 80; all layers in one call, with an engine that does nothing.
"""

from __future__ import annotations

import gc
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

import numpy as np

import forebay

LAYERS, QUERY_ROWS, TOP_K, TOKENS = 61, 2, 2048, 128
RUNS = 300


class OnDevice:
    """Memory that the idle driver uses as the device's; no kernel reads it."""

    def __init__(self, *shape: int) -> None:
        self.shape, self._memory = shape, np.zeros(shape, np.int32)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        address = self._memory.ctypes.data
        return {"version": 3, "shape": self.shape, "typestr": "<i4", "data": (address, False)}


def nothing(call: forebay.EngineCall) -> None:
    """The engine's work: none."""


class Rig:
    """Micro-batches of decoding sequences."""

    def __init__(self, driver: str, batch: int, micro_batches: int) -> None:
        self.device = forebay.CudaDevice(0, library=driver)
        shape = forebay.Shape(layers=LAYERS, row_bytes=(656, 0), top_k=TOP_K, host_stride=704)
        lanes = batch * micro_batches
        self.cache = forebay.Cache(
            self.device, shape, lanes=lanes, max_tokens=TOKENS, slots=64, query_rows=QUERY_ROWS, batch=batch,
            micro_batches=micro_batches, lock=False, populate=False, huge_pages=False, overcommit=True,
        )  # fmt: skip
        self.rows: list[list[Any]] = []
        self.compute: list[forebay.Stream] = []
        self.layers: list[forebay.Layers] = []
        self.buffers: list[forebay.Buffers] = []
        for _ in range(micro_batches):
            sequences = [
                self.cache.open(prompt=64, promised=TOKENS - 64, slots=64, bring_up="nothing") for _ in range(batch)
            ]
            for sequence in sequences:
                sequence.append_in_place(64)
                sequence.join()
            self.rows.append([(sequence, 0, QUERY_ROWS) for sequence in sequences])
            whole = (batch, QUERY_ROWS, TOP_K)
            buffers = forebay.Buffers(
                self.cache, OnDevice(*whole), OnDevice(*whole), OnDevice(2, *whole), OnDevice(2, *whole[:2])
            )
            self.buffers.append(buffers)
            compute, resolve, gather, scatter = (self.device.stream() for _ in range(4))
            self.compute.append(compute)
            self.layers.append(
                forebay.Layers(
                    buffers, compute=compute, resolve=resolve, gather=gather, scatter=scatter, half=batch // 2
                )
            )

    def begin(self) -> list[forebay.Step]:
        """Prepares a step of each micro-batch."""
        return [
            self.cache.prepare(rows, query_rows=QUERY_ROWS, micro_batch=at, stream=self.compute[at])
            for at, rows in enumerate(self.rows)
        ]

    def called(self, steps: list[forebay.Step]) -> None:
        """Enqueues all layers, by one call for R and G and one for S each."""
        for layer in range(LAYERS):
            for step, buffers in zip(steps, self.buffers):
                step.layer(layer, buffers)
                step.scatter(layer)

    def overlapped(self, order: str) -> Callable[[list[forebay.Step]], None]:
        """Enqueues all layers in one call, in an order."""
        by_layer = [order] * LAYERS
        return lambda steps: self.cache.overlap_steps(steps, self.layers, by_layer, nothing)

    def end(self, steps: list[forebay.Step]) -> None:
        """Finishes and retires the steps."""
        for step in steps:
            step.finish()
        for step in steps:
            step.retire()


def median(seconds: list[float]) -> float:
    return 1e6 * sorted(seconds)[len(seconds) // 2]


def measure(rig: Rig, layers: Callable[[list[forebay.Step]], None]) -> tuple[float, float]:
    """Returns the microseconds of a step's own calls, and of its layers: medians."""
    own, between = [], []
    for _ in range(RUNS):
        began = time.perf_counter()
        steps = rig.begin()
        prepared = time.perf_counter()
        layers(steps)
        enqueued = time.perf_counter()
        rig.end(steps)
        own.append(time.perf_counter() - enqueued + prepared - began)
        between.append(enqueued - prepared)
        rig.rows = [[(sequence, 1, width) for sequence, _, width in rows] for rows in rig.rows]
    return median(own), median(between)


def main() -> None:
    """Prints one line per figure."""
    source = Path(__file__).resolve().parents[3] / "benches" / "support" / "idle.c"
    with tempfile.TemporaryDirectory() as folder:
        driver = str(Path(folder) / "libidle.so")
        subprocess.run(["cc", "-std=gnu11", "-O2", "-shared", "-fPIC", "-o", driver, str(source)], check=True)
        one, two = Rig(driver, 160, 1), Rig(driver, 80, 2)
        gc.collect()
        gc.disable()
        step, _ = measure(one, one.called)
        print(f"prepare, finish and retire, batch 160: {step:.1f} us")
        ways: list[tuple[str, Callable[[list[forebay.Step]], None]]] = [
            ("a call for R and G, a call for S", two.called)
        ]
        ways += [(f"order {order}, one call for all layers", two.overlapped(order)) for order in ("none", "da", "dba")]
        for name, layers in ways:
            _, took = measure(two, layers)
            print(f"a layer of two micro-batches of 80, {name}: {took / LAYERS:.2f} us")


if __name__ == "__main__":
    main()
