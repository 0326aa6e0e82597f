"""forebay: the KV and latent cache of large-language-model serving.

The device holds the rows that the next step is likely to read, pinned host memory holds all of them, and the library
decides what moves and when, by exact LRU, step by step. It hides the copies behind computation.

    device -> cache -> sequence (open, append, join) -> step (prepare, layer, scatter, retire) -> close

One thread at a time drives a cache: another thread's call raises Busy. Calls release the interpreter's lock. Different
threads may use different caches. A tensor is NumPy's, torch's, or any object with DLPack or an array interface. The
package copies no tensor, and rejects a tensor that does not fit before it writes anything. Only `Device.wait`,
`Step.retire(wait=True)` and closing a cache wait for a device.

`Weights` are what the data-parallel ranks of a host share: each keeps a part, and pulls the others' while layers
compute. Their calls that meet other ranks, share, verify, commit or move memory wait, and say so; those of a step do
not.

`forebay.dense` is the cache of models without sparse attention, whose attention reads every row.

`forebay.transfer` moves a prompt's rows from a prefill instance to a decode instance, layer by layer.

`forebay.flashmla` makes index tensors and block tables for attention kernels; `forebay.prometheus` is a collector.
"""

from ._library import version as _version
# First, because the modules below and the cache import each other.
from .cache import Cache, Stats
from .arrays import Tensor
from .choice import Bucket, Choice, Chooser, Hysteresis, Prices, Table
from .config import Footprint, Info, Share, footprint
from .device import CudaDevice, CudaMemory, Device, HostDevice, Stream
from .errors import (
    BadFormat,
    BadVersion,
    Busy,
    Cancelled,
    Closed,
    Corrupt,
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
    PeerLost,
    TimedOut,
    Unsupported,
)
from .links import LinkEvent, Links
from .overlap import Captured, EngineCall, Layers
from .plan import Planned, plan
from .record import Withheld
from .replicas import Replica, Replication
from .sequence import Length, Page, Sequence, Ticket
from .shape import Shape
from .sharding import WeightBytes
from .step import Buffers, LayerCount, Retired, Step
from .trace import Header, RequestWriter, SelectionTrace, TraceRecorder, TraceWriter
from .update import Outcome, Update
from .weights import LayerWeights, Weights
# Last, because it uses modules of above.
from . import dense, transfer
from .transfer import Receiver, Sender

__version__ = _version()
__all__ = [
    "BadFormat", "BadVersion", "Bucket", "Buffers", "Busy", "Cache", "Cancelled", "Captured", "Choice", "Chooser",
    "Closed", "Corrupt", "CudaDevice", "CudaMemory", "Device", "DeviceFailed", "EngineCall", "Exhausted", "Footprint",
    "ForebayError", "Header", "HostDevice", "Hysteresis", "Info", "Internal", "InvalidArgument", "InvalidConfig",
    "InvalidState", "Io", "LayerCount", "LayerWeights", "Layers", "Length", "LinkEvent", "Links", "OsRefused",
    "OutOfMemory", "OutOfRange", "Outcome", "Overflow", "Page", "PeerLost", "Planned", "Prices", "Receiver", "Replica",
    "Replication", "RequestWriter", "Retired", "SelectionTrace", "Sender", "Sequence", "Shape", "Share", "Stats",
    "Step", "Stream", "Table", "Tensor", "Ticket", "TimedOut", "TraceRecorder", "TraceWriter", "Unsupported", "Update",
    "WeightBytes", "Weights", "Withheld", "dense", "footprint", "plan", "transfer",
]  # fmt: skip
