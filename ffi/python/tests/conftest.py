"""Fixtures of the tests: small caches, skips as in docs/testing.md, and an engine's calls on the stand-in driver."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any, Callable, Iterator, NoReturn

# Set before NumPy is imported: BLAS threads that wait for each other are slow next to other programs.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import pytest  # noqa: E402

import forebay  # noqa: E402

# The checkout's root. Where only the package's tests are installed, there may be none.
ROOT = Path(__file__).resolve().parent.joinpath("../../..").resolve()
# The same replay as the bench's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benches"))

LAYERS, ROW, TOP_K = 3, 16, 8


def skip(name: str, why: str) -> NoReturn:
    """Skips the test, with the same line as `tests/support/skip.rs`."""
    line = f"SKIP: {name}: {why}\n"
    sys.stderr.write(line)
    if path := os.environ.get("FOREBAY_SKIPS"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(line)
    pytest.skip(why)


def row_of(layer: int, position: int, generation: int = 0) -> np.ndarray[Any, Any]:
    """A row whose bytes identify it."""
    row = np.zeros(ROW, np.uint8)
    row.view(np.uint32)[:] = (layer, position, generation, 0xF0EBA)
    return row


def rows_of(layer: int, first: int, count: int) -> np.ndarray[Any, Any]:
    """Rows of positions from `first` on."""
    return np.stack([row_of(layer, position) for position in range(first, first + count)])


@pytest.fixture
def shape() -> forebay.Shape:
    """A small model, with index keys."""
    return forebay.Shape(layers=LAYERS, row_bytes=(ROW, 0), top_k=TOP_K, index_key_bytes=4, page_tokens=16)


@pytest.fixture
def make(shape: forebay.Shape) -> Iterator[Callable[..., forebay.Cache]]:
    """Makes caches of the small model, each on its own device, and closes them."""
    made: list[Any] = []

    def build(device: forebay.Device | None = None, **changes: Any) -> forebay.Cache:
        device = device or forebay.HostDevice()
        declared: dict[str, Any] = {"lanes": 4, "max_tokens": 128, "slots": 16, "query_rows": 2, "lock": False}
        cache = forebay.Cache(device, changes.pop("shape", shape), **{**declared, **changes})
        made.extend((cache, device))
        return cache

    yield build
    for one in made:
        one.close()


def joined(cache: forebay.Cache, prompt: int = 40, promised: int = 16, **changes: Any) -> forebay.Sequence:
    """A sequence that has joined with its prompt."""
    sequence = cache.open(prompt=prompt, promised=promised, **changes)
    for layer in range(cache.info.layers):
        sequence.append(layer, rows_of(layer, 0, prompt))
    sequence.join()
    return sequence


def some(*positions: int) -> np.ndarray[Any, Any]:
    """A selection of one row and one query row."""
    selection = np.full((1, 1, TOP_K), -1, np.int32)
    selection[0, 0, : len(positions)] = positions
    return selection


def empty(rows: int = 1, query_rows: int = 1) -> np.ndarray[Any, Any]:
    """Room for slots, filled with a value that the library never writes."""
    return np.full((rows, query_rows, TOP_K), -77, np.int32)


def whole(step: forebay.Step, *called: int, into: tuple[Any, Any] | None = None) -> None:
    """Makes the calls that a step still requires: layers not in `called` select nothing, and all layers store the
    contents of their landing slots. `into`: an empty selection, and slots, for memory other than the host's."""
    for layer in range(step.cache.info.layers):
        if layer not in called:
            words = (step.rows, step.query_rows, step.cache.info.top_k)
            step.layer(layer, *(into or (np.full(words, -1, np.int32), np.empty(words, np.int32))))
        step.scatter(layer)


class OnCuda:
    """Device memory as an int32 tensor, in the form of CuPy. The stand-in's memory is the host's."""

    def __init__(self, memory: forebay.CudaMemory, shape: tuple[int, ...]) -> None:
        self.memory, self.shape = memory, shape
        self.device = memory.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": self.shape, "typestr": "<i4", "data": (self.memory.address, False)}

    def host(self) -> Any:
        return on_host(self.memory).view(np.int32).reshape(self.shape)


class OnHost:
    """The stand-in's memory, as the host memory that it is."""

    def __init__(self, memory: forebay.CudaMemory) -> None:
        self.__array_interface__ = {**memory.interface()}
        self.memory = memory


def on_host(memory: forebay.CudaMemory) -> Any:
    """The stand-in's memory as an array."""
    return np.asarray(OnHost(memory))


class Driver:
    """The driver calls of an engine: the stand-in's own functions, in the primary context."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(os.environ["FOREBAY_STANDIN_LIBRARY"])
        context = ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self("cuCtxPushCurrent_v2", context)

    def __call__(self, name: str, *arguments: Any) -> None:
        assert getattr(self.library, name)(*arguments) == 0, name

    def leave(self) -> None:
        self("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        self("cuDevicePrimaryCtxRelease_v2", 0)
