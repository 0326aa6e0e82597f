"""The prefill side of `transfer.py`: a process that computes a prompt and sends its rows while it computes.

A row of a layer is a position's keys and values, as in `offloaded.py`, and its index key is a half-precision copy of
the keys. As soon as a chunk's rows of a layer are computed they are written to the sender's memory and told. The
library's thread sends them while the layer attends. Behind the last layer the indexer's selections of the last
positions follow, a payload for each layer: with these the decode side warms its slots.

With two ranks (sequence parallel) each sends the rows of its half of every chunk. In an engine each computes only
these, and gets the others' rows by collectives. Here both compute the whole prompt, and nothing else differs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from forebay import transfer
from numpy.typing import NDArray
from offloaded import BLOCK
from relay import Notice, Relay
from smollm2 import Drawn, Floats, Gguf, Model, Sizes, Weights, top_k

INSTANCE = 1
"""The prefill instance's number; the decode instance has the next one."""
REQUEST = 1
PATIENCE = 300.0
"""Seconds that an end waits for the other before it gives up. A process that dies is found at once."""
PAYLOAD = 60 << 10
"""The most bytes of a layer's selections: those of a payload."""
STEPS = 32
"""The most positions at the prompt's end whose selections are sent."""


class Failed(Exception):
    """The transfer cannot go on."""


@dataclass(frozen=True)
class Job:
    """What all processes are told."""

    fabric: str
    folder: str
    ranks: int
    prompt: list[int]  # the tokens whose rows are sent
    chunk: int
    top_k: int
    seed: int | None  # of random weights
    layers: int  # of random weights
    weights: str | None  # a GGUF file
    fault: str | None
    token: str = field(repr=False)

    def source(self) -> Weights:
        """The weights, the same in all processes."""
        if self.seed is not None:
            return Drawn(self.seed, Sizes(layers=self.layers))
        return Gguf(Path(self.weights or ""))

    def steps(self) -> int:
        """The positions whose selections are sent."""
        return min(STEPS, len(self.prompt), max(PAYLOAD // (4 * self.top_k), 1))

    def options(self, **own: Any) -> transfer.TransferOptions:
        """An end's options."""
        return transfer.TransferOptions(token=bytes.fromhex(self.token), **own)


@dataclass(frozen=True)
class Line:
    """What a rank has seen."""

    seconds: float  # of the prefill
    runs: int
    again: int
    exposed: float


def side(model: Model, *, ranks: int = 1, stride: int | None = None) -> transfer.TransferSide:
    """Where rows and index keys are in pages of either side. ``stride``: bytes from a row to the next one."""
    whole = transfer.TransferSide.single(
        model.layers, 8 * model.kv_width, BLOCK, index_key_bytes=2 * model.kv_width, row_stride=stride
    )
    split = "tokens" if ranks > 1 else "heads"
    return transfer.TransferSide(whole.components, whole.places, whole.page_bytes, BLOCK, width=ranks, split=split)


class Rows:
    """The places of a rank's rows in the sender's memory, for the whole prompt: nothing is overwritten. A server reuses
    the memory of a part when `forebay.transfer.Released` has come for it.
    """

    def __init__(self, model: Model, job: Job, rank: int) -> None:
        self.job, self.rank, self.layers, self.width = job, rank, model.layers, model.kv_width
        self.slice = -(-job.chunk // job.ranks)
        tokens = len(job.prompt) if job.ranks == 1 else self.slice
        self.parts = side(model, ranks=job.ranks).parts(-(-tokens // BLOCK))
        chunks = 1 if job.ranks == 1 else -(-len(job.prompt) // job.chunk)
        self.bytes = chunks * model.layers * self.parts.bytes

    def origin(self, layer: int, first: int) -> int:
        """Where a chunk's part of a layer is. One rank has all chunks' rows of a layer in the pages of the prompt; of
        several, each has the rows of its slice in pages of the chunk.
        """
        chunk = 0 if self.job.ranks == 1 else first // self.job.chunk
        return (chunk * self.layers + layer) * self.parts.bytes

    def own(self, first: int, end: int) -> range:
        """This rank's tokens of a chunk."""
        if self.job.ranks == 1:
            return range(first, end)
        begin = first + self.rank * self.slice
        return range(min(begin, end), min(begin + self.slice, end))

    def views(self, memory: NDArray[np.uint8], layer: int, first: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The rows ``[n, 2 * kv_width]`` and index keys ``[n, kv_width]`` from the first own token of a chunk on."""
        begin = first if self.job.ranks == 1 else 0
        made = []
        for at, (kind, width) in enumerate(((np.float32, 2 * self.width), (np.float16, self.width))):
            plane = self.parts.planes[2 * layer + at]
            start = self.origin(layer, first) + plane.offset
            # The index keys' plane follows that of the rows.
            size = self.parts.bytes - plane.offset if at else self.parts.planes[2 * layer + 1].offset
            made.append(memory[start : start + size].view(kind).reshape(-1, width)[begin:])
        return made[0], made[1]


class Prefill:
    """A rank: computes the prompt, writes rows and tells them."""

    def __init__(self, model: Model, job: Job, rank: int) -> None:
        self.model, self.job, self.rows = model, job, Rows(model, job, rank)
        # A short prompt is told layer by layer too. A damaged run is told again when it is mended, and not before.
        times = {"resend": PATIENCE, "patience": 2 * PATIENCE} if job.fault else {}
        self.sender = transfer.Sender(
            job.fabric,
            side(model, ranks=job.ranks),
            transfer.Rank(INSTANCE, lane=rank),
            self.rows.bytes,
            self.rows.parts.planes,
            options=job.options(bulk_tokens=1, **times),
            lock=False,
        )
        self.relay: Relay | None = None
        if job.fault and rank == 0:
            self.relay = Relay(job.fabric, Path(job.folder) / "relay", self._flip)

    def connect(self, address: str) -> None:
        """Connects to the decode side, with a fault by way of the relay."""
        self.sender.add(self.relay.connect(address) if self.relay else address)

    def _flip(self, notice: Notice) -> None:
        """Flips a bit of the first row of a part; again, and the row is right."""
        rows, _ = self.rows.views(self.sender.memory, notice.layer, notice.first)
        rows.view(np.uint8)[0, 0] ^= 1

    def _computed(self, layer: int, first: int, keys: Floats, values: Floats) -> None:
        """Writes a chunk's rows of a layer, and tells them."""
        own = self.rows.own(first, first + len(keys))
        rows, index_keys = self.rows.views(self.sender.memory, layer, first)
        seen = slice(own.start - first, own.stop - first)
        rows[: len(own)] = np.concatenate([keys[seen], values[seen]], axis=1)
        index_keys[: len(own)] = keys[seen].astype(np.float16)
        chunk = (first, 0, self.rows.slice) if self.job.ranks > 1 else None
        part = transfer.Computed(REQUEST, layer, first, len(keys), self.rows.origin(layer, first), chunk)
        self.sender.computed([part])

    def run(self) -> Line:
        """Computes and sends; returns when the decode side has everything.

        Raises:
            Failed: it has not.
        """
        prompt, steps, started = self.job.prompt, self.job.steps(), time.monotonic()
        self.sender.begin(REQUEST, len(prompt), within=PATIENCE)
        made = self.model.prefill(prompt, last=steps, chunk=self.job.chunk, computed=self._computed)
        for layer, selection in enumerate(selections(made.queries, made.keys, self.job.top_k)):
            self.sender.payload(REQUEST, layer, selection.tobytes())
        self.sender.finish(REQUEST)
        seconds = time.monotonic() - started
        while not isinstance(event := self.sender.poll(None), transfer.Ended):
            if isinstance(event, transfer.Refused):
                raise Failed(str(event.error))
        if event.error is not None:
            raise Failed(str(event.error))
        stats = self.sender.stats()
        return Line(seconds, stats.runs, stats.again, stats.exposed)

    def close(self) -> None:
        """Ends the sender, and then the relay."""
        self.sender.close()
        if self.relay:
            self.relay.close()


def selections(queries: Floats, keys: Floats, k: int) -> NDArray[np.int32]:
    """What the indexer selects for a prompt's last positions, oldest first: ``[layers, steps, k]``."""
    steps, length = queries.shape[1], keys.shape[1]
    visible = np.arange(length - steps, length, dtype=np.int32) + 1
    halves = keys.astype(np.float16)
    return np.stack([top_k(queries[layer], halves[layer], visible, k) for layer in range(len(keys))])


def with_parent() -> None:
    """Ends this process when its parent has gone: the other end of its input is closed then."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def child(job: Job, rank: int) -> Line:
    """The process of a rank. Its input has the decode side's address.

    Raises:
        Failed: the transfer has failed.
    """
    model = Model(job.source())
    address = sys.stdin.readline().strip()
    if not address:
        raise Failed("the decode side has gone")
    with_parent()
    prefill = Prefill(model, job, rank)
    try:
        prefill.connect(address)
        return prefill.run()
    finally:
        prefill.close()


def read_job(path: Path) -> Job:
    """The job that the parent has written."""
    return Job(**json.loads(path.read_text("utf-8")))
