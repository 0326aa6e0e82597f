"""An engine's loop over a dense cache, in NumPy: it writes stamped rows, and attention reads them by the page tables.

A stamp says layer, run, position, and all tokens before: so a row of another sequence, of another place or of an older
text is another row. The loop knows only the tensors of the step and the views of layers, and computes for itself what
they must say.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Sequence as Many

import numpy as np

import forebay
from conftest import OnCuda, on_host
from forebay import dense

Words = np.ndarray[Any, np.dtype[np.uint32]]


def config_of(**changes: Any) -> dense.Config:
    """A small model: three layers, K of 32 and V of 16 bytes."""
    shape = dense.Shape([dense.Group([0, 1, 2], (32, 16))], page_tokens=16)
    declared: dict[str, Any] = {"shape": shape, "sequences": 4, "max_tokens": 128, "step_tokens": 64, "lock": False}
    return dense.Config(**{**declared, "huge_pages": False, "populate": False, **changes})


def windowed(**changes: Any) -> dense.Config:
    """Two groups: layers 0 and 3 read everything, layers 1 and 2 a window of 20 tokens, and have one run."""
    groups = [dense.Group([0, 3], (16, 16)), dense.Group([1, 2], (32, 0), window=20)]
    return config_of(shape=dense.Shape(groups, page_tokens=16), **changes)


def text_of(seed: int, count: int) -> list[int]:
    """Token ids."""
    ids: list[int] = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32).tolist()
    return ids


def prefixes(ids: Many[int]) -> Words:
    """For each position a number of all tokens up to it."""
    found, value = [], 7
    for token in ids:
        value = (value * 1_000_003 + token + 1) % (1 << 32)
        found.append(value)
    return np.array(found, np.uint32)


@dataclass
class Request:
    """A sequence, its text, and how many of its tokens are committed."""

    sequence: dense.Sequence
    ids: list[int]
    length: int = 0

    def publish(self) -> int:
        """Publishes all that is known."""
        start = self.sequence.length.published
        return self.sequence.publish(start, self.ids[start : self.length])


class Loop:
    """The engine of a cache."""

    def __init__(self, cache: dense.Cache, stream: Any = None, micro_batch: int = 0) -> None:
        self.cache, self.stream, self.micro_batch = cache, stream, micro_batch
        self.tokens = cache.config.shape.page_tokens
        self.tensors = cache.tensors(micro_batch)
        # (group, window), (layer, run, rows as words) of each.
        self.groups: list[tuple[int | None, list[tuple[int, int, Words]]]] = []
        for group in cache.config.shape.groups:
            runs = [run for run in range(2) if group.row_bytes[run]]
            places = [(layer, run) for layer in group.layers for run in runs]
            views = [(layer, run, host(cache.view(layer, run)).view(np.uint32)) for layer, run in places]
            self.groups.append((group.window, views))
        # Rows that attention has read and compared.
        self.compared = 0

    def step(
        self, batch: Many[tuple[Request, int, int]], *, on_device: bool = False, retire: bool = True
    ) -> dense.Step:
        """A step: (request, accepted rows of its last step, query rows). The counts may be on the device."""
        accepted = None
        if on_device:
            accepted = self.counts([taken for _, taken, _ in batch])
        rows = [(one.sequence, None if on_device else taken, width) for one, taken, width in batch]
        step = self.cache.prepare(rows, stream=self.stream, accepted=accepted, micro_batch=self.micro_batch)
        for one, taken, _ in batch:
            one.length += taken
        for layer in range(sum(len(group.layers) for group in self.cache.config.shape.groups)):
            step.arrived(layer)
        self.cache.device.wait(self.stream)
        self.compute(batch)
        step.finish()
        if retire:
            retired = step.retire(wait=True)
            assert retired.lengths.tolist() == [one.length for one, _, _ in batch]
        return step

    def counts(self, accepted: list[int]) -> Any:
        """Accepted counts on the device, one for each of the cache's batch rows."""
        given = np.zeros(self.cache.batch, np.int32)
        given[: len(accepted)] = accepted
        if self.cache.device.place == forebay.HostDevice.place:
            return given
        counts = OnCuda(self.cache.device.allocate(given.nbytes), given.shape)
        counts.host()[:] = given
        return counts

    def compute(self, batch: Many[tuple[Request, int, int]]) -> None:
        """What the kernels of all layers do: checks the step's tensors, writes the new rows, reads all visible ones."""
        starts, lengths, positions = map(host, (self.tensors.starts, self.tensors.lengths, self.tensors.positions))
        widths = [width for _, _, width in batch]
        total = sum(widths)
        assert starts[: 1 + len(batch)].tolist() == [0, *np.cumsum(widths).tolist()]
        assert lengths.tolist()[: len(batch)] == [one.length + width for one, _, width in batch]
        assert not lengths[len(batch) :].any() and not positions[total:].any()
        expected = [one.length + at for one, _, width in batch for at in range(width)]
        assert positions[:total].tolist() == expected
        for group, (window, views) in enumerate(self.groups):
            table, slots = host(self.tensors.tables[group]), host(self.tensors.slots[group])
            assert (slots[total:] == -1).all() and (slots[:total] >= self.tokens).all()
            for row, (one, _, width) in enumerate(batch):
                end, own = one.length + width, slots[starts[row] : starts[row] + width]
                first = 0 if window is None else max(one.length - window + 1, 0)
                at = np.arange(first, end)
                places = table[row, at // self.tokens].astype(np.int64) * self.tokens + at % self.tokens
                assert own.tolist() == places[one.length - first :].tolist()
                numbers = prefixes(one.ids[:end])
                for layer, run, rows in views:
                    stamps = stamp(layer, run, at, numbers[first:], rows.shape[-1])
                    rows[own // self.tokens, own % self.tokens] = stamps[one.length - first :]
                    read = rows[places // self.tokens, places % self.tokens]
                    assert np.array_equal(read, stamps), f"layer {layer}, run {run}, row {row}"
                    self.compared += len(read)

    def prompt(self, one: Request, end: int, chunk: int = 24, *, publish: bool = False) -> None:
        """Computes a prompt up to `end` in chunks, and accepts all of it. In a model with windows pages are published
        after each chunk."""
        rows = 0
        while one.length + rows < end:
            accepted, rows = rows, min(chunk, end - one.length - rows)
            self.step([(one, accepted, rows)])
            if publish:
                one.publish()
        if rows:
            one.sequence.truncate(one.length + rows, self.stream)
            one.length += rows
        self.cache.device.wait(self.stream)


def stamp(layer: int, run: int, positions: Any, numbers: Words, words: int) -> Words:
    """The rows of some positions."""
    rows = np.empty((len(positions), words), np.uint32)
    rows[:, 0::4], rows[:, 1::4] = 2 * layer + run + 1, positions[:, None]
    rows[:, 2::4], rows[:, 3::4] = numbers[:, None], 0xF0EBA
    return rows


def host(memory: Any) -> Any:
    """A tensor of the device as an array: the stand-in's memory is the host's."""
    return memory if isinstance(memory, np.ndarray) else on_host(memory)


def overwritten(memory: Any, at: int, byte: int) -> int:
    """Writes a byte of a read-only tensor of the host device, as a faulty engine would; returns what was there."""
    place = ctypes.c_uint8.from_address(int(memory.__array_interface__["data"][0]) + at)
    before, place.value = place.value, byte
    return before
