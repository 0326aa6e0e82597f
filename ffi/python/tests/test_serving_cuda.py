"""`forebay.serving` on the CUDA device of the stand-in driver: the engine at random of test_serving.py.

torch has no part in it: `Memory` does for the stand-in's memory what `forebay.serving.tensors.Torch` does for a GPU's.
Its writes are copies in the order of the stream, which run late with `Late`.
"""

from __future__ import annotations

import ctypes
from typing import Any, Iterator

import numpy as np
import pytest

import forebay
from conftest import LAYERS, ROW, TOP_K
from forebay.serving import tensors as libraries
from forebay.tensors import Place
from places import Held, Late, Standin
from serving_machine import Machine

SHAPE = forebay.Shape(layers=LAYERS, row_bytes=(ROW, 0), top_k=TOP_K, index_key_bytes=4, page_tokens=16)
SIZES: dict[str, Any] = {"lanes": 4, "max_tokens": 160, "slots": 16, "query_rows": 3, "parked": 3, "lock": False}


class Rows(Held):
    """Rows of the cache's memory, of which parts may be taken."""

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, int):
            return super().__getitem__(at)
        taken, width = range(self.shape[0])[at], self.shape[1]
        return Held(self.address + taken.start * width, (len(taken), width), np.uint8, self)


class Arena:
    """An engine's arrays on the stand-in, which live to the test's end, because copies that run late read them."""

    def __init__(self, place: Standin) -> None:
        self.place = place
        self.made: list[Held] = []

    def array(self, values: np.ndarray[Any, Any]) -> Held:
        self.made.append(self.place.array(np.ascontiguousarray(values)))
        return self.made[-1]

    def read(self, array: Any) -> np.ndarray[Any, Any]:
        return self.place.read(array)

    def copy(self, to: Any, source: Any) -> None:
        self.place.copy(to, source, 0)

    def free(self) -> None:
        self.place.driver("cuCtxSynchronize")
        for array in self.made:
            self.place.driver("cuMemFree_v2", ctypes.c_uint64(array.address))


class Memory(libraries.Numpy):
    """Tensors in the stand-in's device memory."""

    name = "stand-in"

    def __init__(self, arena: Arena) -> None:
        self.on = arena

    def owns(self, value: Any) -> bool:
        return isinstance(value, Held)

    def place(self, value: Any) -> Place:
        return Place("cuda", 0)

    def bytes_of(self, rows: Any, count: int) -> Any:
        return Held(rows.address, (count, rows.nbytes // max(count, 1)), np.uint8, rows)

    def to_host(self, rows: Any) -> Any:
        return self.on.read(rows)

    def to_numpy(self, words: Any) -> Any:
        return self.on.read(words)

    def to_device(self, values: Any, place: Any) -> Any:
        return self.on.array(values)

    def words(self, shape: tuple[int, ...], place: Any) -> Any:
        return self.on.array(np.full(shape, -1, np.int32))

    def part(self, words: Any, shape: tuple[int, ...]) -> Any:
        return Held(words.address, shape, words.dtype, words)

    def fill(self, words: Any, selection: Any) -> None:
        padded = np.full(words.shape, -1, np.int32)
        super().fill(padded, selection.host())
        self.on.copy(words, self.on.array(padded))

    def view(self, memory: Any, dtype: Any) -> Any:
        width = memory.shape[-1]
        return Rows(memory.address, (int(np.prod(memory.shape)) // width, width), np.uint8, memory)

    def put(self, slab: Any, places: Any, rows: Any) -> None:
        for row, place in enumerate(self.on.read(places).tolist()):
            self.on.copy(slab[place], rows[row])

    def take(self, slab: Any, slots: Any, out: Any) -> Any:
        return np.take(self.on.read(slab), self.on.read(slots), axis=0, mode="clip")

    def used(self, rows: Any, query_rows: int, widths: list[int]) -> Any:
        found = super().used(rows.host(), query_rows, widths)
        return self.on.array(found)


class Kit:
    """An engine's tensors on the stand-in; its prompts are in host memory now and then."""

    def __init__(self, arena: Arena) -> None:
        self.arena, self.prompts = arena, 0

    def tensor(self, values: np.ndarray[Any, Any]) -> Any:
        return self.arena.array(values)

    selection = tensor

    def prompt(self, values: np.ndarray[Any, Any]) -> Any:
        self.prompts += 1
        return values if self.prompts % 2 else self.tensor(values)

    def numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        return self.arena.read(tensor) if isinstance(tensor, Held) else np.array(tensor)


@pytest.fixture(params=[Standin, Late])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    """The stand-in's memory, whose tensors the package knows meanwhile."""
    place = request.param()
    made = Arena(place)
    libraries.LIBRARIES.append(Memory(made))
    yield made
    libraries.LIBRARIES.pop()
    made.free()
    place.leave()


@pytest.mark.parametrize("seed", range(2))
def test_an_engine_at_random_on_cuda(arena: Arena, seed: int) -> None:
    with forebay.Cache(arena.place.device(), SHAPE, **SIZES) as cache:
        machine = Machine(cache, Kit(arena), seed)
        machine.run(90)
        assert machine.compared > 100
