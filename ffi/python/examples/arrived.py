"""The decode side of `transfer.py`: a cache whose sequence arrives from another process.

`Arrived` is `offloaded.Offloaded` with another way in. The transfer writes rows directly to the sequence's pages of the
total pool, and index keys to pages of the host with the same numbers. When a layer is ready its rows are appended in
place and its index keys copied to the device. When all is there the sequence joins, warmed by the selections that came.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import forebay
import numpy as np
from engine import Request
from forebay import transfer
from numpy.typing import NDArray
from offloaded import BLOCK, Offloaded
from prefill import INSTANCE, PATIENCE, REQUEST, Failed, Job, side
from smollm2 import Floats, Model, Prompt

TURN = 0.5
"""Seconds between two looks at the sending processes."""


@dataclass(frozen=True)
class Meeting:
    """How the decode side meets the prefill side."""

    job: Job
    address: str  # where it listens
    listening: Callable[[str], None]  # called with the address, with the port that the system chose
    look: Callable[[], None]  # raises if a sending process has failed


def empty(model: Model, tokens: int) -> Prompt:
    """A prompt whose rows are not here."""
    nothing: Floats = np.empty((model.layers, tokens, 0), np.float32)
    queries: Floats = np.empty((model.layers, 0, model.heads, model.head), np.float32)
    return Prompt(nothing, nothing, np.empty((tokens, 0), np.float32), queries)


class Arrived(Offloaded):
    """A cache with one sequence, whose prompt another process has computed.

    Attributes:
        received: what the receiver has seen.
        first, whole: when the first layer was ready, and everything there; seconds of `time.monotonic`.
    """

    received: transfer.ReceiverStats

    def __init__(
        self, model: Model, request: Request, meeting: Meeting, *, top_k: int, query_rows: int, ratio: float
    ) -> None:
        """Takes all memory, and waits for the transfer.

        Raises:
            Failed: it has failed.
        """
        self.meeting, self.first, self.whole = meeting, 0.0, 0.0
        super().__init__(model, [request], top_k=top_k, query_rows=query_rows, ratio=ratio, arriving=1)

    def _open(self, request: Request, ratio: float) -> forebay.Sequence:
        """See `Offloaded`: admits the request, takes what arrives, and joins."""
        length = request.prompt.keys.shape[1]
        tokens = np.asarray(request.tokens[:length], np.uint32)
        sequence = self.cache.arrive(
            prompt=length, promised=request.promised, ratio=ratio, bring_up="nothing", tokens=tokens
        )
        pages = sequence.pages()
        self.pages.append(np.array([page.index_keys for page in pages], np.intp))
        selections = self._receive(sequence, [page.host for page in pages], length)
        sequence.join(warm_up=selections)
        self.device.wait()
        sequence.publish(0, tokens)
        return sequence

    def _receive(self, sequence: forebay.Sequence, pages: list[int], length: int) -> NDArray[np.int32]:
        """Takes layers as they become ready; returns the selections. A use names a page once for all planes, so the
        planes of index keys have as many pages as the total pool. The cache has no other sequence, so no page of this
        one is there already.
        """
        job, layers = self.meeting.job, range(self.model.layers)
        rows = [self.cache.rows(layer) for layer in layers]
        keys = [np.zeros((len(rows[0]), BLOCK * 2 * self.model.kv_width), np.uint8) for _ in layers]
        planes = [plane for pair in zip(rows, keys, strict=True) for plane in pair]
        own = side(self.model, stride=self.cache.info.host_stride)
        steps = {}
        with transfer.Receiver(
            job.fabric, self.meeting.address, own, transfer.Rank(INSTANCE + 1), planes, options=job.options()
        ) as receiver:
            self.meeting.listening(receiver.address)
            self._meet(receiver)
            receiver.grant(REQUEST, length, pages, (INSTANCE, 0), payloads=layers, within=PATIENCE)
            while not isinstance(event := self._next(receiver), transfer.Whole):
                if isinstance(event, transfer.Ready):
                    self.first = self.first or time.monotonic()
                    sequence.append_layer_in_place(event.layer, length)
                    found = keys[event.layer][pages].reshape(-1, 2 * self.model.kv_width)
                    sequence.place_index_keys(event.layer, 0, found[:length])
                elif isinstance(event, transfer.Payload):
                    steps[event.payload] = np.frombuffer(event.data, np.int32).reshape(-1, self.k)
                elif isinstance(event, transfer.Failed):
                    raise Failed(str(event.error))
            self.whole = time.monotonic()
            # The senders know it then, so closing leaves none of them without an answer.
            while not isinstance(self._next(receiver), transfer.Drained):
                pass
            self.received = receiver.stats()
        return np.stack([steps[layer] for layer in layers])

    def _meet(self, receiver: transfer.Receiver) -> None:
        """Waits for all ranks of the prefill side."""
        met: set[transfer.Rank] = set()
        while len(met) < self.meeting.job.ranks:
            if isinstance(event := self._next(receiver), transfer.Met):
                met.add(event.rank)

    def _next(self, receiver: transfer.Receiver) -> transfer.ReceiverEvent:
        """The next event.

        Raises:
            Failed: a sending process has, or none came for long.
        """
        until = time.monotonic() + PATIENCE
        while (event := receiver.poll(TURN)) is None:
            self.meeting.look()
            if time.monotonic() > until:
                raise Failed(f"no news from the prefill side in {PATIENCE:.0f} s")
        return event

    def rows_of(self, layer: int) -> NDArray[np.float32]:
        """The prompt's rows of a layer in the total pool: ``[n, 2 * kv_width]``."""
        pages = [page.host for page in self.sequences[0].pages()]
        found = self.cache.rows(layer)[pages, :, : 8 * self.model.kv_width]
        rows: NDArray[np.float32] = np.ascontiguousarray(found).view(np.float32)
        return rows.reshape(-1, 2 * self.model.kv_width)

    def index_keys_of(self, layer: int) -> NDArray[np.float16]:
        """The prompt's index keys of a layer on the device: ``[n, kv_width]``."""
        found = self.arrays.rows(self.key_pages[layer], self.pages[0], slice(None))
        keys: NDArray[np.float16] = self.arrays.numpy(found)
        return keys.reshape(-1, self.model.kv_width)
