"""Checked arguments: a caller's tensor becomes an address, and numbers are checked.

The package accepts tensors without copying them: NumPy arrays, torch tensors and similar objects (`data_ptr`, `dtype`,
`shape`, `stride`, `device`), objects with `__array_interface__` or `__cuda_array_interface__`, and DLPack. It imports
only NumPy for this. A NumPy array or torch tensor of the expected dtype, shape and device takes a short path. Any other
value is inspected fully, and a rejection says what it is and what was expected.

On CUDA this module orders nothing: the caller has ordered the stream after the work that writes the tensor, as for a
kernel of the engine. DLPack producers are told to order nothing; the array interface's "stream" is ignored.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple, NoReturn

import numpy as np

from . import dlpack
from ._library import ffi
from .dlpack import Placed, packed
from .errors import InvalidArgument


class Place(NamedTuple):
    """A memory: the host's, or a CUDA device's."""

    device: str
    number: int

    def __str__(self) -> str:
        return "host memory" if self.device == "cpu" else f"{self.device}:{self.number}"


HOST = Place("cpu", 0)
_WORD = np.dtype(np.int32)
_INDEX_MAX = 0xFFFFFFFF
BYTES_MAX = 0xFFFFFFFFFFFFFFFF
_from_buffer, _cast = ffi.from_buffer, ffi.cast
# Types, parsed once.
_WORDS, _WORD_POINTER = ffi.typeof("int32_t[]"), ffi.typeof("int32_t *")
_NUMPY_ERRORS = (BufferError, ValueError, TypeError)
# The meaning of torch's dtype and device objects, looked up once each: (name, bits), Place.
_dtypes: dict[Any, tuple[str, int]] = {}
_places: dict[Any, Place] = {}


def index(value: Any, name: str, most: int = _INDEX_MAX, least: int = 0) -> int:
    """A number from `least` to `most`; by default what C's uint32_t holds.

    Raises:
        InvalidArgument: it is no such number.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if least <= number <= most:
        return number
    raise InvalidArgument(name, repr(value), f"a whole number from {least} to 2^{most.bit_length()} - 1")


def words(value: Any, name: str, shape: tuple[int, ...], place: Place, writable: bool) -> Any:
    """The address, as `int32_t *`, of an int32 tensor of `shape` in `place`, C-contiguous. Temporary objects live as
    long as the result; the caller keeps `value` alive.

    Raises:
        InvalidArgument: it is something else.
    """
    kind = type(value)
    if kind is np.ndarray:
        if place is HOST and value.dtype == _WORD and value.shape == shape and value.flags.aligned:
            try:
                return _from_buffer(_WORDS, value, writable)
            except _NUMPY_ERRORS:
                pass
    elif hasattr(kind, "data_ptr"):
        try:
            fits = (
                value.shape == shape
                and _dtypes[value.dtype][0] == "int32"
                and _places[value.device] == place
                and value.is_contiguous()
            )
        except (KeyError, TypeError, AttributeError):
            fits = False
        if fits and (address := value.data_ptr()):
            return _cast(_WORD_POINTER, address)
    found = checked(value, name, "int32", shape, place, writable)
    return ffi.gc(_cast(_WORD_POINTER, found.address), functools.partial(_let_go, found.owner))


def _let_go(owner: object, _address: Any) -> None:
    """Called at the end of an address, which has kept `owner`."""


def checked(
    value: Any,
    name: str,
    dtype: str | None,
    shape: tuple[int | None, ...],
    place: Place,
    writable: bool,
) -> Placed:
    """Inspects a tensor fully. `dtype` None accepts any; None in `shape` accepts any extent.

    Raises:
        InvalidArgument: the tensor differs from the expectation; the message says what it is.
    """
    found = look(value, name)
    expected = f"{describe(dtype, shape)}, C-contiguous, in {place}{', writable' if writable else ''}"

    def refuse(why: str) -> NoReturn:
        given = f"{describe(found.dtype, found.shape)} in {Place(found.device, found.number)}"
        raise InvalidArgument(name, f"{given} ({why})", expected)

    if dtype is not None and found.dtype != dtype:
        refuse(f"its dtype is not {dtype}; convert it, a copy is never made silently")
    fits = len(found.shape) == len(shape) and all(b is None or a == b for a, b in zip(found.shape, shape))
    if not fits:
        refuse("its shape is another")
    if (found.device, found.number) != tuple(place):
        refuse("it is in another memory")
    if not contiguous(found.shape, found.strides):
        refuse(f"its strides are {found.strides} elements, not {packed(found.shape)}")
    if writable and found.readonly:
        refuse("it is read-only")
    if found.bits >= 8 and found.address % min(found.bits // 8, 8):
        refuse("its address is not aligned")
    if found.address == 0 and 0 not in found.shape:
        refuse("it has no memory")
    return found


def contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements follow one another without gaps. Axes of one element have any stride."""
    if 0 in shape:
        return True
    return all(extent == 1 or a == b for extent, a, b in zip(shape, strides, packed(shape)))


def describe(dtype: str | None, shape: tuple[int | None, ...]) -> str:
    """E.g. `int32 [4, 1, 2048]`."""
    extents = ", ".join("*" if extent is None else str(extent) for extent in shape)
    return f"{dtype or 'any dtype'} [{extents}]"


def look(value: Any, name: str) -> Placed:
    """The address and properties of a tensor.

    Raises:
        InvalidArgument: it is no tensor.
    """
    if isinstance(value, np.ndarray):
        if hasattr(value, "mask"):
            raise InvalidArgument(name, f"{type(value).__name__} with a mask", "an array without one")
        return _numpy(value, name)
    if hasattr(value, "data_ptr"):
        return _torch(value, name)
    if (interface := getattr(value, "__cuda_array_interface__", None)) is not None:
        return _cuda(value, interface, name)
    if (interface := getattr(value, "__array_interface__", None)) is not None:
        return _host(value, interface, name)
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        try:
            return dlpack.read(value)
        except (ValueError, BufferError, RuntimeError, TypeError) as error:
            raise InvalidArgument(name, f"{type(value).__name__} ({error})", "a tensor") from error
    expected = "a NumPy array, a torch tensor, or an object with DLPack or an array interface"
    raise InvalidArgument(name, type(value).__name__, expected)


def _numpy(value: np.ndarray[Any, Any], name: str) -> Placed:
    if value.dtype.hasobject or not value.dtype.isnative:
        raise InvalidArgument(name, f"an array of {value.dtype.str}", "numbers in this machine's byte order")
    item = value.dtype.itemsize
    return Placed(
        value.ctypes.data,
        value.shape,
        tuple(stride // max(item, 1) if stride % max(item, 1) == 0 else -1 for stride in value.strides),
        value.dtype.name,
        8 * item,
        "cpu",
        0,
        not value.flags.writeable,
        value,
    )


def _torch(value: Any, name: str) -> Placed:
    try:
        shape = tuple(int(extent) for extent in value.shape)
        strides = tuple(int(stride) for stride in value.stride())
        dtype, place = _dtypes.get(value.dtype), _places.get(value.device)
        if dtype is None:
            dtype = _dtypes[value.dtype] = _dtype_of(value)
        if place is None:
            place = _places[value.device] = _place_of(value.device)
        address = int(value.data_ptr())
        # torch conjugates and negates when the tensor is read, and does not change its memory.
        lazy = [how for how in ("is_conj", "is_neg") if hasattr(value, how) and getattr(value, how)()]
    except (AttributeError, TypeError, RuntimeError) as error:
        raise InvalidArgument(name, f"{type(value).__name__} ({error})", "a dense tensor with memory") from error
    if lazy:
        raise InvalidArgument(name, f"a tensor that {lazy[0]}()", "one whose memory has its values: resolve it first")
    return Placed(address, shape, strides, dtype[0], dtype[1], place.device, place.number, False, value)


def _dtype_of(value: Any) -> tuple[str, int]:
    """torch.int32 reads "int32"; torch.float8_e4m3fn as it is called."""
    name = str(value.dtype).rpartition(".")[2]
    item = getattr(value.dtype, "itemsize", None) or value.element_size()
    return name, 8 * int(item)


def _place_of(device: Any) -> Place:
    kind = str(getattr(device, "type", device)).partition(":")[0]
    return HOST if kind == "cpu" else Place(kind, int(getattr(device, "index", None) or 0))


def _host(value: Any, interface: Any, name: str) -> Placed:
    """The array interface of host memory, as NumPy reads it."""
    try:
        masked = interface.get("mask") is not None
        array = np.asarray(value)
    except Exception as error:
        raise InvalidArgument(name, f"{type(value).__name__} ({error!r})", "an array interface of version 3") from error
    if masked:
        raise InvalidArgument(name, f"{type(value).__name__} with a mask", "an array without one")
    return _numpy(array, name)._replace(owner=(value, interface, array))


def _cuda(value: Any, interface: Any, name: str) -> Placed:
    """The array interface of CUDA memory, version 3, of Numba and CuPy."""
    try:
        dtype = np.dtype(interface["typestr"])
        shape = tuple(int(extent) for extent in interface["shape"])
        address, readonly = interface["data"]
        address, readonly = int(address), bool(readonly)
        given = interface.get("strides")
        masked = interface.get("mask") is not None
        item = max(dtype.itemsize, 1)
        strides = packed(shape) if given is None else tuple(s // item if s % item == 0 else -1 for s in given)
    except Exception as error:
        raise InvalidArgument(name, f"{type(value).__name__} ({error!r})", "an array interface of version 3") from error
    if not dtype.isnative or masked:
        given = "with a mask" if masked else f"of {dtype.str}"
        raise InvalidArgument(name, f"an array {given}", "numbers in this machine's byte order, without a mask")
    number = _number_of(value)
    return Placed(address, shape, strides, dtype.name, 8 * item, "cuda", number, readonly, (value, interface))


def _number_of(value: Any) -> int:
    """The device of an array-interface object. The interface does not name it; objects do, in one of these ways."""
    if hasattr(value, "__dlpack_device__"):
        return int(value.__dlpack_device__()[1])
    device = getattr(value, "device", 0)
    return int(getattr(device, "id", getattr(device, "index", device)) or 0)
