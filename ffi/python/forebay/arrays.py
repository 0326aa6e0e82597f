"""The type of tensors for a type checker: any of the kinds that `forebay.tensors` reads."""

from __future__ import annotations

from typing import Any, Protocol, Union

import numpy as np


class HasDlpack(Protocol):
    """DLPack, as the array API defines it."""

    def __dlpack__(self) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


class HasArrayInterface(Protocol):
    """NumPy's array interface, version 3."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


class HasCudaArrayInterface(Protocol):
    """Numba's array interface for CUDA, version 3."""

    @property
    def __cuda_array_interface__(self) -> Any: ...


class HasDataPointer(Protocol):
    """An object with the interface of a torch tensor."""

    dtype: Any
    shape: Any
    device: Any

    def data_ptr(self) -> int: ...

    def stride(self) -> Any: ...


Tensor = Union["np.ndarray[Any, Any]", HasDlpack, HasArrayInterface, HasCudaArrayInterface, HasDataPointer]
