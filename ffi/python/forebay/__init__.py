"""The KV and latent cache of large-language-model serving.

The device holds the rows that the next step will read, pinned host memory holds all of them, and the library decides
what moves, when, and behind which computation it hides.

    device -> cache -> sequence (open, append, join) -> step (prepare, layer, scatter, retire) -> close

A cache is driven by one thread at a time: another one's call raises Busy. Calls release the interpreter's lock.
Different caches may be used by different threads. Tensors are NumPy's, torch's, or any that speak DLPack or an array
interface; nothing is copied, and what does not fit is refused before anything is written. Nothing here waits for a
device but `Device.wait`, `Step.retire(wait=True)` and closing a cache.

`forebay.flashmla` has index tensors and block tables for attention kernels, `forebay.prometheus` a collector.
"""

from ._library import version as _version
# First: the modules below name the cache, and it names them.
from .cache import Cache, Stats
from .arrays import Tensor
from .choice import Bucket, Choice, Chooser, Hysteresis, Prices, Table
from .config import Footprint, Info, footprint
from .device import CudaDevice, CudaMemory, Device, HostDevice, Stream
from .errors import (
    BadFormat,
    BadVersion,
    Busy,
    Cancelled,
    Closed,
    DeviceFailed,
    Exhausted,
    ForebayError,
    Internal,
    InvalidArgument,
    InvalidConfig,
    InvalidState,
    Io,
    OsRefused,
    OutOfMemory,
    OutOfRange,
    Overflow,
    Unsupported,
)
from .overlap import Captured, EngineCall, Layers
from .plan import Planned, plan
from .sequence import Length, Page, Sequence, Ticket
from .shape import Shape
from .step import Buffers, LayerCount, Retired, Step
from .trace import Header, RequestWriter, SelectionTrace, TraceRecorder, TraceWriter

__version__ = _version()
__all__ = [
    "BadFormat", "BadVersion", "Bucket", "Buffers", "Busy", "Cache", "Cancelled", "Captured", "Choice", "Chooser",
    "Closed", "CudaDevice", "CudaMemory", "Device", "DeviceFailed", "EngineCall", "Exhausted", "Footprint",
    "ForebayError", "Header", "HostDevice", "Hysteresis", "Info", "Internal", "InvalidArgument", "InvalidConfig",
    "InvalidState", "Io", "LayerCount", "Layers", "Length", "OsRefused", "OutOfMemory", "OutOfRange", "Overflow", "Page", "Planned",
    "Prices", "RequestWriter", "Retired", "SelectionTrace", "Sequence", "Shape", "Stats", "Step", "Stream", "Table",
    "Tensor", "Ticket", "TraceRecorder", "TraceWriter", "Unsupported", "footprint",
    "plan",
]  # fmt: skip
