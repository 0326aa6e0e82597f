"""A step of a dense cache: one forward pass, from `Cache.prepare` to `retire`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import cache as _cache
from .._library import NULL, check, ffi, lib
from ..lifetime import StepBase
from ..record import InFlight
from ..tensors import index


@dataclass(frozen=True, slots=True, eq=False)
class Retired:
    """What a step did.

    Attributes:
        lengths: uint32 `[rows]`: the committed tokens of each batch row's sequence, after the step's own commit and
            without its new rows.
    """

    lengths: np.ndarray[Any, np.dtype[np.uint32]]


class Step(StepBase):
    """A step of a dense cache: open until it is finished, in flight until it is retired. `Cache.prepare` makes it.

    Between, the engine's kernels write the new rows of each layer to their slots, and attention reads the pages
    (`Cache.tensors`).

    As a context manager it abandons the step if the body raises, and finishes it otherwise. If its work has ended by
    then (always, on a host device without threads) it also retires the step, and `retired` has the result. Otherwise
    the program calls `retire`; a later call on the cache retires a forgotten step.

    Attributes:
        cache: the step's cache.
        rows: batch rows.
        retired: what the step did, once it is retired.
    """

    __slots__ = ("retired",)
    cache: _cache.Cache

    def __init__(self, cache: _cache.Cache, in_flight: InFlight, rows: int) -> None:
        super().__init__(cache, in_flight, rows)
        self.retired: Retired | None = None

    def arrived(self, layer: int, stream: Any = None) -> None:
        """Makes `stream` wait until the pages of the step's sequences are on the device in `layer` and all layers
        before it. Call it before each layer's new rows are written, on the stream that computes the layer: the last
        page comes back whole, and would overwrite them. Without `bring_layers` in the configuration `Cache.prepare` has
        waited for all layers, and this costs nothing. For a captured step call it for the last layer, before the graph
        is launched.

        Args:
            layer: the layer.
            stream: the stream that computes it; None: the one on which the step was prepared.

        Raises:
            OutOfRange: no such layer.
            InvalidState: the step is finished.
            InvalidArgument, Closed.
        """
        on = self._stream if stream is None else self.cache.device.stream_of(stream)
        check(lib.fb_dense_arrived(self._pointer, self._number, index(layer, "layer"), on), self._pointer)

    def finish(self, stream: Any = None) -> None:
        """Ends the enqueueing of the step; `stream` is ordered after everything that the engine has enqueued for it.
        Without one it is the stream on which the step was prepared.

        Raises:
            InvalidState: the step is already finished, or, with `bring_layers`, `arrived` was not called for all
                layers.
            InvalidArgument: the stream.
            Closed.
        """
        self._finish(stream)

    def retire(self, stream: Any = None, *, wait: bool = False) -> Retired:
        """Ends the step when its work has ended. An open step is finished first, on the stream on which it was
        prepared.

        Args:
            stream: the stream on which later work of its sequences is ordered.
            wait: first wait until the stream on which the step was finished has ended its work.

        Raises:
            Busy: the step is still running, or an earlier step of one of its sequences is not retired.
            DeviceFailed, Cancelled: discard the step's tokens; its sequences need `truncate` or `close`. The step has
                ended all the same. Steps that were enqueued after a failed one fail too: retire them as well, then
                truncate to at most the length that was committed before the first failed step.
            Closed: the step was already retired.
        """
        lengths = np.empty(self.rows, np.uint32)
        tokens = ffi.from_buffer("uint32_t[]", lengths, True)
        self._retire(
            stream,
            wait,
            lambda number, on: int(lib.fb_dense_retire(self._pointer, number, on, tokens, self.rows, NULL)),
        )
        self.retired = Retired(lengths)
        return self.retired
