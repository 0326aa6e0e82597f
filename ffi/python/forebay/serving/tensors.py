"""The tensor libraries of `forebay.serving`: what it does with an engine's tensors, for NumPy and for torch.

A row is bytes to the cache, so a tensor of any dtype is used as its bytes: torch's bfloat16 and float8 too, which NumPy
does not have. Results are of the library whose tensor the call was given.

    library   the cache's device           reads and writes slabs by
    NumPy     a host device                views
    torch     a host device                torch.from_numpy: views
    torch     a CUDA device (not run yet)  torch.from_dlpack: views, in the order of torch's stream

Reading rows is one gather for a whole batch; nothing here loops over rows.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Protocol

import numpy as np

from ..errors import InvalidArgument
from ..tensors import HOST, Place

Array = Any
"""A tensor of one of the libraries."""
INTEGERS = ("int32", "int64")
"""Dtypes of a selection."""


class Library(Protocol):
    """The operations that differ between tensor libraries. Slots and places are integer tensors of the library."""

    name: str

    def owns(self, value: Any) -> bool:
        """Whether `value` is a tensor of this library."""

    def place(self, value: Array) -> Place:
        """The memory of a tensor."""

    def item(self, dtype: Any) -> tuple[str, int]:
        """The name of a dtype, the same in every library, and its bytes."""

    def bytes_of(self, rows: Array, count: int) -> Array:
        """The rows as uint8 `[count, bytes]`, C-contiguous; a copy only if they are not."""

    def to_host(self, rows: Array) -> Array:
        """The rows in host memory."""

    def to_device(self, values: np.ndarray[Any, Any], place: Place) -> Array:
        """Numbers of the host as a tensor in `place`."""

    def words(self, shape: tuple[int, ...], place: Place) -> Array:
        """An int32 tensor, -1 everywhere."""

    def part(self, words: Array, shape: tuple[int, ...]) -> Array:
        """The beginning of a tensor of one axis, as a tensor of `shape` in the same memory."""

    def fill(self, words: Array, selection: Array) -> None:
        """Writes a selection, which may be narrower, into `words`, with -1 beyond."""

    def beyond(self, selection: Array, limits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Which query rows `[batch, query rows]` select a position below -1, or at or beyond their limit."""

    def view(self, memory: Any, dtype: Any) -> Array:
        """Memory of the cache as numbers."""

    def put(self, slab: Array, places: Array, rows: Array) -> None:
        """Writes rows of bytes to slots of a slab of bytes."""

    def take(self, slab: Array, slots: Array, out: Array | None) -> Array:
        """The rows at slots, `[*slots.shape, width]`; slot 0's where a slot is -1."""

    def used(self, rows: Array, query_rows: int, widths: list[int]) -> Array:
        """Of rows `[batch x query rows, bytes]` those that are in use: the first `widths` of each batch row."""

    def join(self, parts: list[Array], out: Array | None) -> Array:
        """Tensors side by side, along the last axis."""

    def to_numpy(self, words: Array) -> np.ndarray[Any, Any]:
        """Numbers in host memory."""

    def host_bytes(self, out: Array, count: int) -> np.ndarray[Any, Any]:
        """A destination in host memory as `[count, bytes]`, without a copy."""

    def of_numpy(self, rows: np.ndarray[Any, Any], dtype: Any) -> Array:
        """Bytes in host memory as numbers of a dtype of the library."""


class Numpy:
    """NumPy arrays, on a host device."""

    name = "numpy"

    def owns(self, value: Any) -> bool:
        """See `Library`."""
        return isinstance(value, np.ndarray) and not hasattr(value, "mask")

    def place(self, value: Array) -> Place:
        """See `Library`."""
        return HOST

    def item(self, dtype: Any) -> tuple[str, int]:
        """See `Library`."""
        if dtype.hasobject:
            raise InvalidArgument("dtype", str(dtype), "one of numbers")
        return dtype.name, dtype.itemsize

    def bytes_of(self, rows: Array, count: int) -> Array:
        """See `Library`."""
        return np.ascontiguousarray(rows).reshape(count, -1).view(np.uint8)

    def to_host(self, rows: Array) -> Array:
        """See `Library`."""
        return rows

    def to_device(self, values: np.ndarray[Any, Any], place: Place) -> Array:
        """See `Library`."""
        return values

    def words(self, shape: tuple[int, ...], place: Place) -> Array:
        """See `Library`."""
        return np.full(shape, -1, np.int32)

    def part(self, words: Array, shape: tuple[int, ...]) -> Array:
        """See `Library`."""
        return words[: math.prod(shape)].reshape(shape)

    def fill(self, words: Array, selection: Array) -> None:
        """See `Library`."""
        narrow = selection.shape[2]
        words[:, :, :narrow] = selection
        words[:, :, narrow:] = -1

    def beyond(self, selection: Array, limits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """See `Library`."""
        beyond: np.ndarray[Any, Any] = selection.max(axis=2, initial=-1) >= limits
        beyond |= selection.min(axis=2, initial=-1) < -1
        return beyond

    def view(self, memory: Any, dtype: Any) -> Array:
        """See `Library`."""
        return _flat(memory).view(np.uint8 if dtype is None else dtype)

    def put(self, slab: Array, places: Array, rows: Array) -> None:
        """See `Library`."""
        slab[places if slab.ndim == 2 else (places >> 6, places & 63)] = rows

    def take(self, slab: Array, slots: Array, out: Array | None) -> Array:
        """See `Library`."""
        if slab.ndim == 2:
            # Clipping makes 0 of -1.
            taken: Array = np.take(slab, slots, axis=0, out=out, mode="clip")
            return taken
        at = np.maximum(slots, 0)
        found = slab[at >> 6, at & 63]
        if out is None:
            return found
        out[...] = found
        return out

    def used(self, rows: Array, query_rows: int, widths: list[int]) -> Array:
        """See `Library`."""
        return rows[np.concatenate(_used(query_rows, widths))]

    def join(self, parts: list[Array], out: Array | None) -> Array:
        """See `Library`."""
        return np.concatenate(parts, axis=-1, out=out)

    def to_numpy(self, words: Array) -> np.ndarray[Any, Any]:
        """See `Library`."""
        return np.asarray(words)

    def host_bytes(self, out: Array, count: int) -> np.ndarray[Any, Any]:
        """See `Library`."""
        if not out.flags.c_contiguous:
            raise InvalidArgument("out", "an array with gaps", "a C-contiguous one")
        found: np.ndarray[Any, Any] = out.reshape(max(count, 1), -1)[:count].view(np.uint8)
        return found

    def of_numpy(self, rows: np.ndarray[Any, Any], dtype: Any) -> Array:
        """See `Library`."""
        return rows if dtype is None else rows.view(dtype)


class Torch:
    """torch tensors: in host memory on a host device, and on the GPU of a CUDA device."""

    name = "torch"

    @property
    def torch(self) -> Any:
        """The module, if the program has imported it."""
        return sys.modules.get("torch")

    def owns(self, value: Any) -> bool:
        """See `Library`."""
        torch = self.torch
        return torch is not None and isinstance(value, torch.Tensor)

    def place(self, value: Array) -> Place:
        """See `Library`."""
        kind, number = value.device.type, value.device.index
        return HOST if kind == "cpu" else Place(kind, number or 0)

    def item(self, dtype: Any) -> tuple[str, int]:
        """See `Library`."""
        return str(dtype).rpartition(".")[2], self.torch.empty(0, dtype=dtype).element_size()

    def bytes_of(self, rows: Array, count: int) -> Array:
        """See `Library`."""
        return rows.detach().contiguous().view(count, -1).view(self.torch.uint8)

    def to_host(self, rows: Array) -> Array:
        """See `Library`: from a GPU a copy, which waits for the work that writes the rows."""
        return rows.cpu()

    def to_device(self, values: np.ndarray[Any, Any], place: Place) -> Array:
        """See `Library`."""
        return self.torch.from_numpy(values).to(_torch_device(place))

    def words(self, shape: tuple[int, ...], place: Place) -> Array:
        """See `Library`."""
        # Made in inference mode, they could not be written outside of it later.
        with self.torch.inference_mode(False):
            return self.torch.full(shape, -1, dtype=self.torch.int32, device=_torch_device(place))

    def part(self, words: Array, shape: tuple[int, ...]) -> Array:
        """See `Library`."""
        return words[: math.prod(shape)].view(shape)

    def fill(self, words: Array, selection: Array) -> None:
        """See `Library`."""
        narrow = selection.shape[2]
        if selection.dtype is self.torch.int64:
            # A position that int32 cannot have stays one that no request has.
            selection = selection.clamp(-(1 << 31), (1 << 31) - 1)
        words[:, :, :narrow].copy_(selection)
        if narrow < words.shape[2]:
            words[:, :, narrow:].fill_(-1)

    def beyond(self, selection: Array, limits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """See `Library`."""
        if selection.shape[2] == 0:
            return np.zeros(limits.shape, np.bool_)
        beyond: np.ndarray[Any, Any] = np.greater_equal(selection.amax(dim=2).numpy(), limits)
        beyond |= selection.amin(dim=2).numpy() < -1
        return beyond

    def view(self, memory: Any, dtype: Any) -> Array:
        """See `Library`."""
        torch = self.torch
        with torch.inference_mode(False):
            if isinstance(memory, np.ndarray):
                found = torch.from_numpy(_flat(memory))
            else:
                found = torch.from_dlpack(memory)
                found = found.flatten(0, 1) if found.is_contiguous() else found
            return found if dtype is None else found.view(dtype)

    def put(self, slab: Array, places: Array, rows: Array) -> None:
        """See `Library`."""
        if slab.ndim == 2:
            slab.index_copy_(0, places, rows)
        else:
            slab[places >> 6, places & 63] = rows

    def take(self, slab: Array, slots: Array, out: Array | None) -> Array:
        """See `Library`."""
        at, shape = slots.clamp(min=0).reshape(-1), (*slots.shape, slab.shape[-1])
        if slab.ndim == 2 and out is not None and out.is_contiguous():
            self.torch.index_select(slab, 0, at, out=out.view(-1, slab.shape[-1]))
            return out
        found = self.torch.index_select(slab, 0, at) if slab.ndim == 2 else slab[at >> 6, at & 63]
        return found.view(shape) if out is None else out.copy_(found.view(shape))

    def used(self, rows: Array, query_rows: int, widths: list[int]) -> Array:
        """See `Library`."""
        return self.torch.cat([rows[int(at[0]) : int(at[-1]) + 1] for at in _used(query_rows, widths)])

    def join(self, parts: list[Array], out: Array | None) -> Array:
        """See `Library`."""
        return self.torch.cat(parts, dim=-1, out=out)

    def to_numpy(self, words: Array) -> np.ndarray[Any, Any]:
        """See `Library`."""
        found: np.ndarray[Any, Any] = words.cpu().numpy()
        return found

    def host_bytes(self, out: Array, count: int) -> np.ndarray[Any, Any]:
        """See `Library`."""
        if not out.is_contiguous():
            raise InvalidArgument("out", "a tensor with gaps", "a contiguous one")
        found: np.ndarray[Any, Any] = out.detach().view(max(count, 1), -1)[:count].view(self.torch.uint8).numpy()
        return found

    def of_numpy(self, rows: np.ndarray[Any, Any], dtype: Any) -> Array:
        """See `Library`."""
        found = self.torch.from_numpy(rows)
        return found if dtype is None else found.view(dtype)


NUMPY, TORCH = Numpy(), Torch()
LIBRARIES: list[Library] = [NUMPY, TORCH]
_items: dict[Any, tuple[str, int]] = {}


def library_of(value: Any, name: str, place: Place | None = None) -> Library:
    """The library of a tensor, which has to be in `place` if that is given.

    Raises:
        InvalidArgument: it is none of theirs, or in another memory.
    """
    for library in LIBRARIES:
        if library.owns(value):
            break
    else:
        raise InvalidArgument(name, type(value).__name__, "a NumPy array or a torch tensor")
    if place is not None:
        found = library.place(value)
        if found != place:
            raise InvalidArgument(name, f"a {library.name} tensor in {found}", f"one in {place}, where the cache is")
    return library


def item_of(library: Library, value: Any) -> tuple[str, int]:
    """The name of a tensor's dtype, and its bytes. A step asks for each of its tensors."""
    dtype = value.dtype
    found = _items.get(dtype)
    if found is None:
        found = _items[dtype] = library.item(dtype)
    return found


def check_divides(library: Library, dtype: Any, width: int) -> None:
    """Refuses a dtype of which rows of `width` bytes are no whole number; None is bytes."""
    try:
        size = 1 if dtype is None else library.item(np.dtype(dtype) if library is NUMPY else dtype)[1]
    except TypeError:
        size = 0
    if not size or width % size:
        raise InvalidArgument("dtype", str(dtype), f"one whose size divides rows of {width} bytes")


def library_of_dtype(dtype: Any, place: Place = HOST) -> Library:
    """The library of a dtype for memory in `place`; for None, NumPy in host memory and the last one elsewhere."""
    torch = TORCH.torch
    if torch is not None and isinstance(dtype, torch.dtype):
        return TORCH
    if place != HOST and dtype is not None:
        raise InvalidArgument("dtype", repr(dtype), f"a dtype of torch, for memory in {place}")
    return NUMPY if place == HOST else LIBRARIES[-1]


def _used(query_rows: int, widths: list[int]) -> list[np.ndarray[Any, Any]]:
    return [np.arange(row * query_rows, row * query_rows + width) for row, width in enumerate(widths)]


def _flat(slab: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A slab as `[slots, bytes]`, or as it is where blocks have gaps."""
    return slab.reshape(-1, slab.shape[-1]) if slab.flags.c_contiguous else slab


def _torch_device(place: Place) -> str:
    return "cpu" if place is HOST else f"{place.device}:{place.number}"
