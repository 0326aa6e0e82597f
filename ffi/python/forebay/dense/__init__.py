"""The KV cache of models whose attention reads every row, or every row of a sliding window.

The device holds all rows of open sequences, in pages, and attention finds them by page tables, as every paged kernel
does. Pages that no sequence uses any more stay where later requests find them by their prefix: on the device, and, when
their memory is needed, in host memory, from where they come back.

    Config -> Cache -> names, open_shared -> step (prepare, the engine's kernels, finish, retire) -> publish -> close

    tensors    what a step's kernels read: page tables, slots of the new rows, positions, lengths (`Cache.tensors`)
    views      the rows of a layer, `[pages, page_tokens, row bytes]` (`Cache.view`)

A prompt is computed in steps like a decoded token: a batch row with many query rows is a chunk of it. Sizes are bytes
or tokens, as each name says. Threads, tensors, streams, errors and forgotten objects are as in `forebay`; docs/dense.md
has the rules.
"""

from .cache import Cache, Plane, Stats, Tensors
from .config import Config, Footprint
from .sequence import Found, HostPage, Length, Names, Opened, Sequence
from .shape import Group, Shape
from .step import Retired, Step

__all__ = [
    "Cache", "Config", "Footprint", "Found", "Group", "HostPage", "Length", "Names", "Opened", "Plane", "Retired",
    "Sequence", "Shape", "Stats", "Step", "Tensors",
]  # fmt: skip
