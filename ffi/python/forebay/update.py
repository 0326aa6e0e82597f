"""A new version of shared weights, beside the one in use: `Weights.update` begins it.

All ranks take it between the same two steps (`Weights.commit`), or none does.
"""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple

from ._library import check, ffi, lib, new_text, text_bytes
from .arrays import Tensor
from .device import Device
from .errors import InvalidArgument
from .handle import Handle, Handled
from .links import Links, milliseconds
from .tensors import BYTES_MAX, HOST, contiguous, describe, index, look



class Outcome(NamedTuple):
    """What a commit has done: on every rank the same. It is true if what was new was committed."""

    # Whether every rank has the new version, or the new replicas. Otherwise every rank keeps the old ones.
    committed: bool
    # Why it was aborted, as far as this rank knows. Otherwise empty.
    reason: str

    def __bool__(self) -> bool:
        return self.committed


class Update(Handled):
    """A new version of some layers; a context manager that closes itself.

    Its calls may be on another thread than the steps. Closing one that was not committed aborts it: the other ranks
    then abort too, and its memory is given back. Closing waits until the copies into it have run. What the device
    refuses then is left to the next `Weights.update` or other call that needs the update to be over.

    Attributes:
        version: its version.
        failed: whether the last `Weights.commit` raised after the ranks had decided. After an error without it nothing
            was decided, and the commit may be repeated; but not after Internal.
    """

    failed: bool = False

    def __init__(self, device: Device, version: int, call: Callable[[Any], object]) -> None:
        self.version, self._device = version, device
        self._make(Handle("fb_update", lib.fb_update_destroy, device._handle, device.later), call)

    def fill(self, layer: int, name: str, tensor: Tensor, stream: Any = None) -> None:
        """Does what `Weights.fill` does, for the new version, while steps go on. What it says of `stream` is true here.

        Raises:
            OutOfRange: also for a layer that the update does not name.
            InvalidState: `share` was called. Other errors: as `Weights.fill`.
        """
        fill(lib.fb_update_fill, self._pointer, self._device, (layer, name), tensor, stream)

    def share(self, links: Links, at_most: float, stream: Any = None) -> None:
        """Gives the new parts to the other ranks and takes theirs, while steps go on. Call it when every tensor of the
        layers is filled, on a thread that serves the sessions meanwhile. Blocks until the copies into the update have
        run and this rank's part is hashed, and then until all ranks have shared, for at most `at_most` seconds.

        Raises:
            InvalidState: the update is not filled or was shared before, or a rank that has come back is not attached
                again. Nothing was said to any rank, and the call may be made again.
            InvalidArgument, Busy, Closed, InvalidConfig for sessions of another group or plan, and the error of a rank
                that is lost. The same.
            InvalidConfig: a rank that updates other layers, or to a later version.
            Cancelled: a rank whose own call has failed.
            TimedOut, PeerLost: the message names the rank. After an error of the exchange the update is begun again,
                under a higher version.
        """
        on, most = self._device.stream_of(stream), milliseconds(at_most, "at_most")
        check(lib.fb_update_share(self._pointer, sessions(links), on, most), self._pointer)
        self._handle.device.loans.release()

    def verify(self, layer: int, stream: Any = None) -> None:
        """Does what `Weights.verify` does, for a layer of an update that was shared.

        Raises:
            As `Weights.verify`.
        """
        on = self._device.stream_of(stream)
        check(lib.fb_update_verify(self._pointer, index(layer, "layer"), on), self._pointer)

    def __repr__(self) -> str:
        return f"<forebay.Update to version {self.version}{', closed' if self.closed else ''}>"


def sessions(links: Links) -> Any:
    """The C handle of sessions.

    Raises:
        InvalidArgument: they are something else.
    """
    if not isinstance(links, Links):
        raise InvalidArgument("links", type(links).__name__, "the Links that Weights.meet has made")
    return links._pointer


def commit(
    call: Any, pointer: Any, device: Device, taken: Any, links: Links, border: tuple[int, float, Any]
) -> Outcome:
    """`Weights.commit` and `commit_replicas`. `border` has step, seconds and stream."""
    on, most = device.stream_of(border[2]), milliseconds(border[1], "at_most")
    step = index(border[0], "step", BYTES_MAX)
    outcome, reason = ffi.new("uint32_t *"), new_text()
    status = call(pointer, taken._pointer, sessions(links), step, on, most, outcome, reason, len(reason))
    taken.failed = outcome[0] == lib.FB_UPDATE_FAILED
    check(status, pointer)
    return Outcome(outcome[0] == lib.FB_UPDATE_COMMITTED, ffi.string(reason).decode("utf-8", "replace"))


def fill(
    call: Any, pointer: Any, device: Device, place: tuple[int, str], tensor: Tensor, stream: Any
) -> None:
    """`Weights.fill` and `Update.fill`: checks the tensor and enqueues its copy."""
    found = look(tensor, "tensor")
    given = f"{describe(found.dtype, found.shape)} in {found.device}:{found.number}"
    if (found.device, found.number) not in (tuple(device.place), tuple(HOST)):
        places = " or in ".join(dict.fromkeys([str(device.place), str(HOST)]))
        raise InvalidArgument("tensor", given, f"one in {places}")
    if not contiguous(found.shape, found.strides):
        raise InvalidArgument("tensor", f"{given} with strides {found.strides}", "a C-contiguous one")
    layer, name = index(place[0], "layer"), text_bytes(place[1], "name")
    start, count = ffi.cast("void *", found.address), math.prod(found.shape) * found.bits // 8
    on = device.stream_of(stream)
    held = (tensor, found.owner)
    check(device._handle.lend(held, lambda: call(pointer, layer, name, start, count, on), on), pointer)
