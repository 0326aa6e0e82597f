"""How an engine embeds forebay.dense: SmolLM2 with dense attention, all of its K/V rows in pages of the device.

A step is any mix of chunks of prompts and of sequences that decode a token. forebay says where each new row goes and
where the rows of each sequence are; the engine writes and reads them there. Full pages are published after each step
and copied to host memory, if the cache has pages there: no faster than steps fill them. A later prompt with the same
beginning continues after them, also if they are in host memory alone by then.

Each batch row is computed by itself, and chunks of every prompt end at the same positions. So a token's bits depend on
its text alone, and not on the batch, on what was shared, or on where the rows have been: they are those of
`Model.prefill`, which keeps its rows in plain arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
from arrays import Array, Arrays, Numpy
from forebay import dense
from smollm2 import Floats, Ids, Model

PAGE = 64
"""Tokens of a page, and the most of a chunk."""


@dataclass
class Reading:
    """A request: its sequence, its text so far, the leading tokens that it found, and how far it is computed."""

    sequence: dense.Sequence
    tokens: list[int]
    found: dense.Found
    length: int  # committed
    pending: int = 0  # rows of the last step

    @property
    def rows(self) -> int:
        """Query rows of the next step: up to the end of a page of the prompt, or a decoded token."""
        start = self.length + self.pending
        return min(PAGE - start % PAGE, len(self.tokens) - start)


class Paged:
    """An engine that keeps its rows in forebay's pages. Use it in a ``with``, whose end closes everything."""

    def __init__(
        self,
        model: Model,
        *,
        sequences: int,
        max_tokens: int,
        device_pages: int | None = None,
        host_pages: int | None = None,
        layout: str = "layer_first",
        runs: str = "apart",
        arrays: Arrays | None = None,
    ) -> None:
        """Takes all memory.

        Args:
            model: the model whose rows are kept.
            sequences: the most requests at the same time.
            max_tokens: tokens of the longest one.
            device_pages, host_pages, layout, runs: of the cache's configuration. With host pages there is a second
                tier, which fills by itself.
            arrays: the device's arrays; None: the host device's.
        """
        self.arrays: Arrays = arrays or Numpy()
        self.model = model
        run = 4 * model.kv_width
        shape = dense.Shape([dense.Group(range(model.layers), (run, run))], page_tokens=PAGE)
        config = dense.Config(
            shape, sequences, max_tokens, device_pages=device_pages, host_pages=host_pages, layout=layout, runs=runs,
            step_tokens=PAGE * sequences,
        )  # fmt: skip
        self.device = self.arrays.device(False)
        self.cache = dense.Cache(self.device, config)
        # Copies to the host have a stream of their own. After each step at most so many bytes: a page of each request.
        self.copies = self.arrays.stream(self.device)
        self.copied_bytes = sequences * PAGE * model.layers * 2 * run
        view, layers = self.arrays.view, range(model.layers)
        self.keys = [view(self.cache.view(layer, 0), np.float32) for layer in layers]
        self.values = [view(self.cache.view(layer, 1), np.float32) for layer in layers]
        # At these addresses in every step.
        tensors = self.cache.tensors()
        self.table = view(tensors.tables[0], np.int32)
        self.slots = view(tensors.slots[0], np.int64)

    def open(self, tokens: Sequence[int], promised: int, salt: bytes = b"") -> Reading:
        """Admits a request, which may decode ``promised`` tokens. The last token's row is computed in any case, for its
        logits.

        Raises:
            forebay.Exhausted: names what is missing; nothing is taken.
        """
        names = self.cache.names(tokens[:-1], salt=salt)
        sequence, found, _ticket = self.cache.open_shared(names, prompt=len(tokens), promised=promised)
        return Reading(sequence, list(tokens), found, found.tokens)

    def step(self, batch: Sequence[Reading]) -> list[Floats]:
        """Computes the next chunk or token of each request. Returns the logits behind it, ``[1, vocabulary]`` each."""
        rows = [(one.sequence, one.pending, one.rows) for one in batch]
        step = self.cache.prepare(rows)
        starts = [one.length + one.pending for one in batch]
        # The begin has filled the tensors when the host reads them.
        self.arrays.ready(self.device, None)
        table, slots = self.arrays.numpy(self.table), self.arrays.numpy(self.slots)
        parts, first = [], 0
        for number, (one, start, (_, _, count)) in enumerate(zip(batch, starts, rows)):
            parts.append(Part(self, one.tokens[start : start + count], start, slots[first:], table[number]))
            first += count
        for layer in range(self.model.layers):
            for part in parts:
                part.layer(layer)
        step.finish()
        step.retire(wait=True)
        for one, start, (_, _, count) in zip(batch, starts, rows):
            one.length, one.pending = start, count
            self.publish(one)
        # Without pages on the host it copies nothing.
        self.cache.save(self.copied_bytes, self.copies)
        return [self.model.logits(part.hidden[-1:]) for part in parts]

    def publish(self, one: Reading) -> None:
        """Lets later requests find the full pages that are committed."""
        length = one.sequence.length
        one.sequence.publish(length.published, one.tokens[length.published : length.committed])

    def read(self, one: Reading, count: int) -> list[Floats]:
        """Computes a request alone, and decodes ``count`` tokens, the likeliest each time. Returns their logits."""
        logits: list[Floats] = []
        while len(logits) < count:
            while one.rows:
                found = self.step([one])
            logits += found
            one.tokens.append(int(found[0].argmax()))
        return logits

    def end(self, one: Reading) -> None:
        """Ends a request. Its published pages stay."""
        one.sequence.close()

    def close(self) -> None:
        """Closes the cache and its device."""
        self.cache.close()
        self.device.close()

    def __enter__(self) -> Paged:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Part:
    """One batch row of a step: a chunk of a prompt, or a token."""

    def __init__(self, engine: Paged, tokens: Sequence[int], start: int, slots: Array, table: Array) -> None:
        self.engine, self.hidden = engine, engine.model.embed(tokens)
        end = start + len(tokens)
        self.positions: Ids = np.arange(start, end, dtype=np.int32)
        # Where the new rows go, and where all rows are: page, and place in it.
        self.new = np.divmod(slots[: len(tokens)], PAGE)
        page, self.place = np.divmod(np.arange(end), PAGE)
        self.page = table[page]

    def layer(self, layer: int) -> None:
        """Projection, the new rows to their slots, attention over the page table, and the rest of the layer."""
        engine, arrays = self.engine, self.engine.arrays
        queries, keys, values = engine.model.project(layer, self.hidden, self.positions)
        arrays.put(engine.keys[layer], self.new, keys)
        arrays.put(engine.values[layer], self.new, values)
        both = engine.keys[layer], engine.values[layer]
        keys, values = (arrays.numpy(arrays.rows(run, self.page, self.place)) for run in both)
        attended = engine.model.dense(queries, keys, values, self.positions)
        self.hidden = engine.model.rest(layer, self.hidden, attended)
