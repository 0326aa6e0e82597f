"""How an engine shards its attention weights with forebay: SmolLM2 over several processes, the ranks of a host.

Each rank decodes texts of its own (data parallelism). It keeps 1/n of every layer's attention weights and pulls the
other parts while earlier layers compute. `Sharded` is what an engine writes: it fills windows with its tensors and
calls `begin`, `enter`, `leave` and `end`. Its K/V rows are in forebay as well (`offloaded.py`), on the same device.

`run` is one rank, from its weights to a comparison with whole weights and resident rows: the logits of every step, to
the last bit. `ranks.py` starts the processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forebay
import numpy as np
from arrays import Arrays, Numpy, arrays
from engine import Decoder, Request, Resident, requests
from offloaded import Offloaded
from smollm2 import Floats, Ids, Model, Stored
from smollm2 import Weights as Source

NAMES = ("qkv_proj", "o_proj")
"""The tensors of a layer that are sharded: those that `Model.project` and `Model.output` read."""
PATIENCE = 120
"""Seconds that ranks wait for each other while they start."""
WAIT = 0.2
"""Seconds between two looks at the sessions."""


class Failed(Exception):
    """A rank cannot go on, or has decoded something else than whole weights do."""


@dataclass(frozen=True)
class Job:
    """What all ranks are told."""

    ranks: int
    context: int
    tokens: int
    batch: int
    top_k: int
    weights: str
    texts: list[list[int]]
    device: str
    driver: str | None
    flip: int | None  # for tests: a rank that fills one wrong bit


class Threads(Numpy):
    """Rows in host memory, which the device's threads write beside the engine: it waits before it looks."""

    def ready(self, device: forebay.Device, stream: Any) -> None:
        """See `Arrays`."""
        device.wait(stream)


class Sharded(Model):
    """A model whose attention weights are windows of `forebay.Weights`."""

    def __init__(self, source: Source, place: Arrays, device: forebay.Device, job: Job, rank: int) -> None:
        """Takes all weights, of attention's matrices this rank's parts.

        Args:
            source: the whole model.
            place: the arrays of the device.
            device: where the weights are.
            job: the group and what it does.
            rank: this process's rank.
        """
        sizes = source.sizes
        joined = sizes.width + 2 * sizes.kv_heads * (sizes.width // sizes.heads)
        shapes = dict(zip(NAMES, ((joined, sizes.width), (sizes.width, sizes.width)), strict=True))
        tensors = [{name: 4 * rows * columns for name, (rows, columns) in shapes.items()}] * sizes.layers
        self.place, self.device, self.stream = place, device, place.stream(device)
        self.flips = job.flip == rank
        # The engine has each tensor whole here for a moment.
        self.staged = {name: place.numbers(device, shape) for name, shape in shapes.items()}
        self.shapes, others = shapes, memory_files()
        self.windows = forebay.Weights(device, tensors, NAMES, rank=rank, ranks=job.ranks)
        super().__init__(source)
        self.files = memory_files().keys() - others.keys()
        self.waited = 0.0

    def attention(self, source: Source, number: int) -> tuple[Floats, Floats]:
        """See `Model`: fills a layer's window. Its addresses are there when the other ranks have shared theirs."""
        for name, whole in zip(NAMES, super().attention(source, number), strict=True):
            given, seen = self.staged[name]
            bits = whole.view(np.int32)
            if self.flips and (number, name) == (0, NAMES[-1]):
                bits[-1, -1] ^= -1 << 31
            self.place.put(seen, slice(None), bits)
            self.windows.fill(number, name, given, self.stream)
            self.device.wait(self.stream)
        nothing = np.empty(0, np.float32)
        return nothing, nothing

    def share(self, folder: Path) -> forebay.Links:
        """Meets the other ranks in a folder and gives them this rank's parts."""
        links = self.windows.meet(folder, hello=PATIENCE, stream=self.stream)
        self.windows.share(links, PATIENCE, self.stream)
        return links

    def project(self, layer: int, hidden: Floats, positions: Ids) -> tuple[Floats, Floats, Floats]:
        """See `Model`. The layer's weights are read from here to the end of `output`."""
        started = time.perf_counter()
        if layer == 0:
            self.windows.begin()
        self.windows.enter(layer, self.stream)
        self.device.wait(self.stream)
        self.waited += time.perf_counter() - started
        joined, output = (self._window(layer, name) for name in NAMES)
        self.blocks[layer] = dataclasses.replace(self.blocks[layer], queries_keys_values=joined, output=output)
        return super().project(layer, hidden, positions)

    def output(self, layer: int, hidden: Floats, attended: Floats) -> Floats:
        """See `Model`. The pull of the next layer of this buffer begins behind it."""
        added = super().output(layer, hidden, attended)
        self.windows.leave(layer, self.stream)
        if layer == self.layers - 1:
            self.windows.end(self.stream)
        return added

    def _window(self, layer: int, name: str) -> Floats:
        """A tensor's numbers; on the host no copy."""
        seen = self.place.view(self.windows.tensor(layer, name), np.float32)
        numbers: Floats = self.place.numpy(seen.reshape(self.shapes[name]))
        return numbers

    def memory(self) -> int | None:
        """Bytes that the system has given to this process's weights; None where no file shows it, as on a GPU."""
        now = memory_files()
        return sum(now[file] for file in self.files) if self.files else None


def memory_files() -> dict[int, int]:
    """The files in memory that this process has open, and the bytes that they take."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        # The listing's own descriptor is closed by now.
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:"):
                about = os.stat(f"/proc/self/fd/{descriptor}")
                found[about.st_ino] = 512 * about.st_blocks
    return found


class Served:
    """Serves the sessions on a thread of its own, so that no rank takes this one for dead while it computes."""

    def __init__(self, links: forebay.Links) -> None:
        self.links, self.done = links, False
        self.failed: Exception | None = None
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        try:
            # The sessions of a group of one are over from the beginning.
            while not self.done and not self._next(WAIT):
                pass
        except (Failed, forebay.ForebayError) as error:
            self.failed = error

    def _next(self, at_most: float) -> bool:
        """Waits for an event; whether all sessions are over."""
        event = self.links.poll(at_most)
        if event.kind == "lost":
            raise Failed(f"rank {event.rank} was lost: {event.error}")
        return event.is_over

    def check(self) -> None:
        """Raises what has ended the thread, such as the loss of another rank."""
        if self.failed is not None:
            raise self.failed

    def close(self) -> None:
        """Says that this rank is done, and waits until the others are."""
        self.done = True
        self.thread.join()
        self.check()
        self.links.end()
        until = time.monotonic() + PATIENCE
        while not self._next(WAIT):
            if time.monotonic() > until:
                raise Failed(f"other ranks are not done after {PATIENCE} s")
        self.links.close()


@dataclass(frozen=True)
class Line:
    """What a rank reports; bytes, and seconds a step."""

    resident: int
    shared: int
    buffers: int
    planned: int
    memory: int | None
    saved: int
    exposed: float
    step: float
    steps: int


def run(job: Job, rank: int, folder: Path) -> Line:
    """One rank, from the weights to the comparison."""
    source = Stored(Path(job.weights))
    # Pulls run on threads, so that they hide behind computation.
    on_host = job.device == "host"
    place = Threads() if on_host else arrays(job.device, Path(job.driver) if job.driver else None)
    with place.device(True) as device:
        model = Sharded(source, place, device, job, rank)
        served = Served(model.share(folder))
        asked = prompts(model, job, rank)
        with Offloaded(model, asked, top_k=job.top_k, arrays=place, device=device) as cache:
            logits, started = [], time.perf_counter()
            model.waited = 0.0
            for step in Decoder(cache, asked):
                served.check()
                logits.append(step.logits)
            seconds = time.perf_counter() - started
        exposed, steps, planned = model.waited, len(logits), model.windows.planned
        # Work that writes buffers has ended, so the system has given all memory by now.
        memory = model.memory()
        if not model.flips:
            compare(Model(source), place, job, rank, logits)
        served.close()
        model.windows.close()
    return Line(
        resident=planned.resident,
        shared=planned.shards,
        buffers=sum(planned.buffers),
        planned=planned.device,
        memory=memory,
        saved=planned.saved,
        exposed=exposed / steps,
        step=seconds / steps,
        steps=steps,
    )


def prompts(model: Model, job: Job, rank: int) -> list[Request]:
    """A rank's requests, prefilled by `model`."""
    return requests(model, job.texts[rank], context=job.context, batch=job.batch, promised=job.tokens)


def compare(whole: Model, place: Arrays, job: Job, rank: int, logits: Sequence[Floats]) -> None:
    """Decodes the same with whole weights and every row resident.

    Raises:
        Failed: a bit of a logit differs.
    """
    asked = prompts(whole, job, rank)
    resident = Decoder(Resident(whole, asked, top_k=job.top_k, arrays=place), asked)
    for number, (own, wanted) in enumerate(zip(logits, resident, strict=True)):
        if not np.array_equal(own.view(np.uint32), wanted.logits.view(np.uint32)):
            raise Failed(f"step {number + 1}: the logits differ from those of whole weights")
