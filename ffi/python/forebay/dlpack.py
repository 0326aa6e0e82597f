"""Reads the address of a DLPack tensor without consuming it, and exports memory of a CUDA device as a DLPack tensor.

A capsule that is read stays its owner's: as long as it is held and not consumed, its tensor lives, and when it is
deleted its producer frees what it made for it. An exported capsule is made by NumPy and marked as CUDA memory: NumPy
keeps the memory for it until its consumer releases it. Layouts: DLPack 1.0's `dlpack.h` (DLTensor, DLManagedTensor,
DLManagedTensorVersioned).
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

CUDA = 2
_TYPES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
# kDLCPU, kDLCUDA, kDLCUDAHost (pinned, which the host reads), kDLCUDAManaged.
_DEVICES = {1: "cpu", CUDA: "cuda", 3: "cpu", 13: "cuda"}
_READ_ONLY = 1
_UNORDERED = -1


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("number", ctypes.c_int32)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Version(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("version", _Version),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype, _name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class Placed(NamedTuple):
    """The address and properties of a tensor."""

    address: int
    shape: tuple[int, ...]
    # Strides in elements.
    strides: tuple[int, ...]
    dtype: str
    bits: int
    device: str
    number: int
    readonly: bool
    owner: object


def read(value: Any) -> Placed:
    """Asks `value` for its tensor, without ordering: the caller has ordered it.

    Raises:
        ValueError: the result is no DLPack tensor that this module understands.
    """
    kind, number = value.__dlpack_device__()
    ordered = {"stream": _UNORDERED} if _DEVICES.get(int(kind)) == "cuda" else {}
    try:
        capsule = value.__dlpack__(max_version=(1, 0), **ordered)
    except TypeError:
        capsule = value.__dlpack__(**ordered)
    tensor, readonly = _inside(capsule)
    if int(kind) not in _DEVICES or tensor.dtype.lanes != 1 or tensor.dtype.code not in _TYPES:
        raise ValueError(f"a DLPack tensor of device {int(kind)}, type {tensor.dtype.code} x {tensor.dtype.lanes}")
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim)) if tensor.strides else packed(shape)
    code, bits = _TYPES[tensor.dtype.code], int(tensor.dtype.bits)
    return Placed(
        (tensor.data or 0) + tensor.byte_offset,
        shape,
        strides,
        "bool" if code == "bool" else f"{code}{bits}",
        bits,
        _DEVICES[int(kind)],
        int(number) if _DEVICES[int(kind)] == "cuda" else 0,
        readonly,
        (value, capsule),
    )


def on_cuda(array: np.ndarray[Any, Any], number: int, readonly: bool = False) -> Any:
    """A capsule of an array at an address of CUDA device `number`. NumPy does not read the array for it. `readonly`:
    one of DLPack 1.0 that says so, where NumPy makes such capsules (2.1 and newer).
    """
    try:
        capsule = array.__dlpack__(max_version=(1, 0)) if readonly else array.__dlpack__()
    except TypeError:
        capsule = array.__dlpack__()
    name = _name_of(capsule)
    if readonly and name == b"dltensor_versioned":
        _Versioned.from_address(_pointer_of(capsule, name)).flags |= _READ_ONLY
    tensor, _ = _inside(capsule)
    tensor.device.kind, tensor.device.number = CUDA, number
    return capsule


def _inside(capsule: Any) -> tuple[_Tensor, bool]:
    """The tensor inside a capsule, and whether it is read-only.

    Raises:
        ValueError: it is no such capsule.
    """
    name = _name_of(capsule)
    if name == b"dltensor_versioned":
        versioned = _Versioned.from_address(_pointer_of(capsule, name))
        if versioned.version.major != 1:
            raise ValueError(f"a DLPack tensor of version {versioned.version.major}")
        return versioned.tensor, bool(versioned.flags & _READ_ONLY)
    if name == b"dltensor":
        # The tensor is the first field of DLManagedTensor.
        return _Tensor.from_address(_pointer_of(capsule, name)), False
    raise ValueError(f"a capsule named {name!r}")


def packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a tensor without gaps."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)
