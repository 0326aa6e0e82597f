"""Copies of hot ranges of shared weights: `Weights.replicate` begins a change of their set.

All ranks take it between the same two steps (`Weights.commit_replicas`), or none does.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence as Many

from ._library import check, ffi, lib, text_bytes
from .device import Device, DeviceHandle
from .errors import InvalidArgument
from .handle import Handle, Handled
from .links import Links, milliseconds
from .overlap import several
from .tensors import BYTES_MAX, index
from .update import Outcome, commit, sessions



class Replica(NamedTuple):
    """A copy of a tensor of a sharded layer, on a rank that does not own all of it."""

    layer: int
    # The tensor's name.
    tensor: str
    # The rank that holds the copy.
    rank: int


class Replication(Handled):
    """A change of the replicas; a context manager that closes itself.

    Its calls may be on another thread than the steps. Closing one that was not committed gives it up, as `abort`. It
    waits until the copies into it have run.

    Attributes:
        number: its number.
        failed: whether the last `Weights.commit_replicas` raised after the ranks had decided. After an error without it
            nothing was decided, and the commit may be repeated; but not after Internal.
    """

    failed: bool = False

    def __init__(self, device: Device, number: int, call: Callable[[Any], object]) -> None:
        self.number, self._device = number, device
        self._make(Handle("fb_replication", lib.fb_replication_destroy, device._handle, device.later), call)

    def advance(self, most: int, stream: Any = None) -> int:
        """Enqueues copies of at most `most` bytes into the replicas that this rank gains. Call it once a step, with as
        many bytes as the link has room for, until none are left. The copies need no order with a step's work, so a
        stream of their own lets them run beside it.

        Returns:
            How many bytes are left.

        Raises:
            InvalidState: `share` was called, or the change is over.
            Busy: `stream` is being captured.
            DeviceFailed: what was not enqueued is left to be copied.
            InvalidArgument, Closed.
        """
        on, left = self._device.stream_of(stream), ffi.new("uint64_t *")
        check(lib.fb_replication_advance(self._pointer, index(most, "most", BYTES_MAX), on, left), self._pointer)
        return int(left[0])

    @property
    def left(self) -> int:
        """How many bytes this rank has still to copy before it can share: 0 if it gains no replica.

        Raises:
            Busy, Closed.
        """
        left = ffi.new("uint64_t *")
        check(lib.fb_replication_left(self._pointer, left), self._pointer)
        return int(left[0])

    def share(self, links: Links, at_most: float, stream: Any = None) -> None:
        """Gives the replicas that this rank gains to the other ranks and takes theirs, while steps go on. All ranks
        call it, also those that gain none, when nothing is left to be copied, on a thread that serves the sessions
        meanwhile. Owners and holders hash what they have, and both have to agree. Blocks until the copies have run and
        this rank has hashed, and then until all ranks have shared, for at most `at_most` seconds.

        Raises:
            InvalidState: bytes are left to be copied, it was shared before, or a rank that has come back is not
                attached again. Nothing was said to any rank, and the call may be made again.
            InvalidArgument, Busy, Closed, InvalidConfig for sessions of another group or plan, and the error of a rank
                that is lost. The same.
            Corrupt: a replica that is not what its owner has; the message names rank and layer.
            InvalidConfig: a rank that has other replicas, or wants others. If it was called with the same, call
                `Weights.drop_replicas` on all ranks.
            Cancelled: a rank whose own call has failed.
            TimedOut, PeerLost: the message names the rank. After an error of the exchange the change is begun again,
                under a higher number.
        """
        on, most = self._device.stream_of(stream), milliseconds(at_most, "at_most")
        check(lib.fb_replication_share(self._pointer, sessions(links), on, most), self._pointer)

    def abort(self) -> None:
        """Gives the change up: the other ranks then abort it too, unless all have committed already, and its memory is
        given back. Blocks until the copies into it have run. Nothing happens to a change that is over. After an error
        of the device it may keep its memory, and `Weights.replicate` raises Busy: call it again. If the change is
        closed instead, the next call that raises Busy while a change is there first does what is left, or raises the
        device's error.

        Raises:
            DeviceFailed: the device's error.
            Busy, Closed.
        """
        check(lib.fb_replication_abort(self._pointer), self._pointer)

    def __repr__(self) -> str:
        return f"<forebay.Replication {self.number}{', closed' if self.closed else ''}>"


class WithReplicas(Handled):
    """What `Weights` do with replicas."""

    device: Device

    def replicate(
        self, number: int, replicas: Many[Replica | tuple[int, str, int]], at_most: int
    ) -> Replication:
        """Begins a change of the copies of hot ranges: takes the memory of the replicas that this rank gains, and
        nothing else changes. Steps go on. All ranks begin it with the same number and replicas.

        Args:
            number: above all that were begun before, also those that failed. Versions of updates count apart.
            replicas: all that there are to be after it: layer, tensor and rank of each. Those that are there and are
                named stay.
            at_most: the most bytes of device memory that the change may take.

        Raises:
            OutOfMemory: it needs more; the message has how many.
            OutOfRange: a layer or tensor that was not chosen, a rank that the group does not have, or a number that is
                not above the others.
            InvalidConfig: a replica that is named twice, or of which no whole granule is another rank's.
            InvalidState: the parts were not shared.
            Busy: an update or another change of these weights is there: close it first, unless it was committed or
                aborted.
            Unsupported: weights with the source "host", or a driver older than CUDA 13.
            The error of a layer that cannot be used.
            DeviceFailed: also where one that was closed could not give its memory back. The call may be repeated.
            InvalidArgument, Closed.
        """
        given, count, _held = _declare(replicas)
        which, most = index(number, "number"), index(at_most, "at_most", BYTES_MAX)

        def create(made: Any) -> None:
            check(lib.fb_replication_create(self._pointer, which, given, count, most, made), self._pointer)

        return Replication(self.device, which, create)

    def commit_replicas(
        self, change: Replication, links: Links, step: int, at_most: float, stream: Any = None
    ) -> Outcome:
        """Takes a change of the replicas, at a border between two steps at which all ranks do, or at which none does:
        then the old ones stay, on every rank. Otherwise as `commit`, arguments and errors too; `change.failed` tells
        what `update.failed` does. No byte of a layer changes, so the next step pulls nothing anew. If no layer raises
        after an error, only memory of replicas that are gone could not be given back, and steps go on.

        Raises:
            As `commit`.
        """
        if not isinstance(change, Replication):
            raise InvalidArgument("change", type(change).__name__, "a Replication")
        call, border = lib.fb_weights_commit_replicas, (step, at_most, stream)
        return commit(call, self._pointer, self.device, change, links, border)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The replicas that ranks hold for each other at present, in the order of layers, tensors and ranks.

        Raises:
            Busy, Closed.
        """
        return _there(self._pointer, self._handle.device)

    def drop_replicas(self) -> None:
        """Gives up all replicas, on this rank alone, between steps, and gives the memory of its own back. Blocks until
        the pulls that were enqueued have run; no other work uses a window. The device has the memory again when no
        rank reads it any more. For ranks of which one has replicas that another has not, and for a group that needs
        the memory: before the next change all ranks do so.

        Raises:
            Busy: a step is open, or a change is there.
            InvalidState: the parts were not shared.
            DeviceFailed: the message names the first layer that keeps its replicas; others are dropped. Where the
                device has failed, every later call for such a layer raises that error.
            Closed.
        """
        check(lib.fb_weights_drop_replicas(self._pointer), self._pointer)

    def reroute(self) -> None:
        """Reads around the ranks that were lost (`lost`), on this rank alone, between steps: where another rank has
        the same bytes, pulls read them there from now on. A layer that still needs a lost rank raises PeerLost as
        before. Blocks until the pulls that were enqueued have run; no other work uses a window.

        Raises:
            Busy: a step is open, or a change is there.
            InvalidState: the parts were not shared.
            DeviceFailed: each part is read where it was or where it is anew; the bytes are the same. Where the device
                has failed, every later call for the layer raises that error.
            Closed.
        """
        check(lib.fb_weights_reroute(self._pointer), self._pointer)


class _Inside:
    """Lives as long as a call reads what is the device's."""


def _declare(replicas: Many[Replica | tuple[int, str, int]]) -> tuple[Any, int, list[Any]]:
    """An array of fb_replica, its length, and what must live as long.

    Raises:
        InvalidArgument: an entry is no replica.
    """
    held: list[Any] = []
    entries: list[dict[str, Any]] = []
    for at, given in enumerate(several(replicas, "replicas")):
        where = f"replicas[{at}]"
        if not isinstance(given, tuple) or len(given) != 3:
            raise InvalidArgument(where, type(given).__name__, "a layer, a tensor's name and a rank")
        layer, tensor, rank = given
        held.append(ffi.new("char[]", text_bytes(tensor, f"the tensor of {where}")))
        numbers = {"layer": index(layer, f"the layer of {where}"), "rank": index(rank, f"the rank of {where}")}
        entries.append({"tensor": held[-1], **numbers})
    return ffi.new("fb_replica[]", entries), len(entries), held


def _there(weights: Any, device: DeviceHandle) -> tuple[Replica, ...]:
    """The replicas of weights, given as their C handle.

    Raises:
        Busy, Closed.
    """
    # Another thread may close weights and device meanwhile. The names live as long as the device.
    inside = _Inside()
    device.read_by(inside)
    try:
        count = ffi.new("uint32_t *")
        check(lib.fb_weights_replicas(weights, ffi.NULL, 0, count), weights)
        while True:
            room = count[0]
            places = ffi.new("fb_replica[]", room)
            check(lib.fb_weights_replicas(weights, places, room, count), weights)
            # Another thread may have committed more between the two calls.
            if count[0] <= room:
                found = (places[at] for at in range(count[0]))
                return tuple(Replica(one.layer, ffi.string(one.tensor).decode(), one.rank) for one in found)
    finally:
        # An exception's traceback would keep it, and with it the device.
        del inside
