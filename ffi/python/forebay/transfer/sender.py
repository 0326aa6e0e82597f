"""The sender of a transfer: a rank of a prefill instance, and its memory."""

from __future__ import annotations

import os
import weakref
from typing import Any, NamedTuple, Sequence as Many

import numpy as np

from .._library import check_created, ffi, lib, new_text, sized, text_bytes
from ..device import give_up
from ..errors import InvalidArgument
from ..handle import BareHandle
from ..tensors import BYTES_MAX, index
from .end import TransferEnd
from .events import SenderEvent
from .side import PlanePlace, Rank, TransferOptions, TransferSide, Use, within_ms


class Computed(NamedTuple):
    """Rows of one layer of a request that are computed and written."""

    request: int
    # The layer's number in the model.
    layer: int
    # The first token, and how many.
    first: int
    tokens: int
    # Where the rows are: a byte of the sender's memory.
    origin: int
    # Of a sender that divides requests by tokens: the chunk's first token in its request, the place of that token among
    # the tokens of the batch, and tokens of the batch that each rank has. Otherwise None.
    chunk: tuple[int, int, int] | None = None


class SenderStats(NamedTuple):
    """What a sender has seen since its creation."""

    # Requests that have ended with all rows at their receivers.
    done: int
    # Requests that have ended otherwise.
    failed: int
    # Parts whose rows are held: computed, and not yet released.
    held: int
    # Runs of bytes that were told, each as often as it was told.
    runs: int
    # Runs that were told again because they had arrived with other bytes.
    again: int
    # Messages that were sent again because no answer came in time.
    repeats: int
    # Seconds of all requests that were done, from when all was computed until the receivers had it: the part of
    # transfers that computation does not hide.
    exposed: float
    # The longest of them.
    exposed_longest: float


class Lag(NamedTuple):
    """How long rows of a layer were held: from when they were computed until their memory was free again."""

    # Parts that were released.
    parts: int
    # Seconds of all of them.
    total: float
    # The longest.
    longest: float


class _Memory:
    """A sender's memory, which lives as long as an array of it."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, False)}


class _SenderHandle(BareHandle):
    """The C handle. Its thread ends with the sender, its memory when no array has it any more."""

    def __init__(self) -> None:
        super().__init__("fb_sender", lib.fb_sender_destroy, False)
        self._memory: weakref.ref[_Memory] | None = None
        self.over = False

    def lend(self, memory: _Memory) -> None:
        """Keeps the memory until `memory` ends."""
        self._memory = weakref.ref(memory)
        weakref.finalize(memory, self._returned).atexit = False

    def _returned(self) -> None:
        """Called by the garbage collector, perhaps inside another call."""
        if self.over:
            give_up(self)

    def end(self, wait: bool) -> bool:
        """Ends the thread, and the memory too if no array has it."""
        if not self.over and self.made[0] != ffi.NULL:
            if lib.fb_sender_end(self.made[0]) == lib.FB_BUSY:
                return False
        self.over = True
        if self._memory is not None and self._memory() is not None:
            return True
        return super().end(wait)


class Sender(TransferEnd[SenderEvent]):
    """A rank of a prefill instance; a context manager that closes itself.

        planes = side.parts(pages).planes
        with forebay.transfer.Sender("shm", side, forebay.transfer.Rank(1), memory_bytes, planes) as sender:
            sender.add("/run/decode.sock")
            sender.begin(request, tokens)
            sender.memory[origin : origin + rows.nbytes] = rows
            sender.computed([forebay.transfer.Computed(request, layer, 0, tokens, origin)])
            sender.finish(request)

    Calls are queued and wait for nothing. One that cannot be carried out comes out as `Refused`; one for a request that
    is over does nothing. Closing ends the thread and the connections: requests that are not over fail at their
    receivers. The memory lives on while an array of it does.

    Args:
        fabric: "tcp", or "shm" between processes of one host and user.
        side: where the ranks of this instance keep rows.
        rank: this rank.
        memory_bytes: bytes of the memory from which rows are sent, rounded up to whole pages of the system.
        planes: where the pages of each plane are, seen from an origin (`TransferSide.parts`).
        options: times, bounds and the token.
        huge_pages: on reserved huge pages, if the system has them.
        populate: allocate the memory at creation, not at the first write.
        lock: lock it, so that it is never swapped out.
        numa_node: the node that has it; None: any.

    Attributes:
        memory: the memory, as an array of bytes, zero at first. Rows are written here before `computed`, and again only
            after `Released` of their origin or `Ended` of their request. It does not say whether they still are.
        fallbacks: options of the memory that the system refused.

    Raises:
        InvalidConfig: the message names the field.
        OutOfMemory, OsRefused: no memory, sockets or thread.
    """

    memory: np.ndarray[Any, np.dtype[np.uint8]]
    fallbacks: list[str]

    def __init__(
        self,
        fabric: str,
        side: TransferSide,
        rank: Rank,
        memory_bytes: int,
        planes: Many[PlanePlace | tuple[int, int]],
        *,
        options: TransferOptions = TransferOptions(),
        huge_pages: bool = True,
        populate: bool = True,
        lock: bool = True,
        numa_node: int | None = None,
    ) -> None:
        declared, kept = side.declare()
        config, also_kept = options.declare(fabric, rank, None)
        wanted, listed = sized("fb_send_memory"), ffi.new("fb_send_plane[]", len(planes))
        for to, (offset, page_bytes) in zip(listed, planes):
            to.offset = index(offset, "offset", BYTES_MAX)
            to.page_bytes = index(page_bytes, "page_bytes", BYTES_MAX)
        wanted.bytes = index(memory_bytes, "memory_bytes", BYTES_MAX, 1)
        wanted.planes, wanted.plane_count = listed, len(planes)
        without = {lib.FB_MEMORY_SMALL_PAGES: huge_pages, lib.FB_MEMORY_LAZY: populate, lib.FB_MEMORY_UNLOCKED: lock}
        wanted.memory = sum(flag for flag, given in without.items() if not given)
        wanted.numa_node = 0 if numa_node is None else 1 + index(numa_node, "numa_node", most=0xFFFFFFFE)
        handle = _SenderHandle()

        def create(made: Any) -> None:
            text = new_text()
            status = lib.fb_sender_create(config, declared, wanted, text, len(text), made)
            check_created(status, text)

        self._start(handle, create, lib.fb_sender_poll, lib.fb_sender_descriptor)
        del kept, also_kept
        address, size = ffi.new("void **"), ffi.new("uint64_t *")
        self._call(lib.fb_sender_memory, address, size)
        memory = _Memory(int(ffi.cast("uintptr_t", address[0])), size[0])
        handle.lend(memory)
        self.memory = np.asarray(memory)
        self.fallbacks = self._fallbacks()

    def _fallbacks(self) -> list[str]:
        lines: list[str] = []
        text = new_text()
        while lib.fb_sender_fallback(self._pointer, len(lines), text, len(text)) == 0:
            lines.append(ffi.string(text).decode("utf-8", "replace"))
        return lines

    def close(self) -> None:
        """Ends the thread and all connections; idempotent. Requests that are not over fail at their receivers.

        Raises:
            Busy: another thread's call is inside it at this moment; it stays open.
        """
        super().close()
        self.__dict__.pop("memory", None)
        # Without arrays of it the memory has ended by now.

    def add(self, address: str | os.PathLike[str]) -> None:
        """Connects to the receiver at `address` (an IP address and a port, or the path of a socket), again and again
        until `remove` or the end. A process that does not listen yet is no error.

        Raises:
            InvalidConfig: no address. One that the sender may not use comes out as `Refused`.
            Closed.
        """
        self._call(lib.fb_sender_add, address_bytes(address))

    def remove(self, address: str | os.PathLike[str]) -> None:
        """Connects to the receiver at `address` no longer. A connection to it is lost.

        Raises:
            InvalidConfig, Closed: as `add`.
        """
        self._call(lib.fb_sender_remove, address_bytes(address))

    def begin(self, request: int, tokens: int, within: float | None = None) -> None:
        """A request is computed here. `request` is the number of this try at it: no other try has the same, here or at
        any receiver. If a receiver has given it up already, it ends at once. It fails if it is not over `within` so
        many seconds; None: it may take any time.

        Raises:
            InvalidArgument, Closed.
        """
        number = index(request, "request", BYTES_MAX)
        self._call(lib.fb_sender_begin, number, index(tokens, "tokens"), within_ms(within))

    def computed(self, parts: Many[Computed]) -> None:
        """Says that parts are computed and written, at most 16,384. Call it when the copies into `memory` have run, not
        before: rows are read from now on.

        Raises:
            OutOfRange: tokens that no request has.
            InvalidArgument, Closed.
        """
        listed = ffi.new("fb_computed[]", len(parts))
        for to, part in zip(listed, parts):
            to.size = ffi.sizeof("fb_computed")
            to.request = index(part.request, "request", BYTES_MAX)
            to.origin = index(part.origin, "origin", BYTES_MAX)
            to.layer, to.first = index(part.layer, "layer"), index(part.first, "first")
            to.tokens = index(part.tokens, "tokens")
            if part.chunk is not None:
                first, at, size = part.chunk
                to.chunk_first, to.chunk_at = index(first, "chunk"), index(at, "chunk")
                to.chunk_slice = index(size, "chunk", least=1)
        self._call(lib.fb_sender_computed, listed, len(parts))

    def payload(self, request: int, payload: int, data: bytes) -> None:
        """Adds a payload of a kind below 256, such as the first token, which reaches each receiver whole.

        Raises:
            OutOfRange: another kind, or more bytes than a frame holds: about 64 KiB.
            InvalidArgument, Closed.
        """
        if not isinstance(data, bytes):
            raise InvalidArgument("data", type(data).__name__, "bytes")
        number, kind = index(request, "request", BYTES_MAX), index(payload, "payload")
        self._call(lib.fb_sender_payload, number, kind, data, len(data))

    def finish(self, request: int) -> None:
        """Says that all of a request is computed. `Ended` follows when its receivers have it.

        Raises:
            InvalidArgument, Closed.
        """
        self._call(lib.fb_sender_finish, index(request, "request", BYTES_MAX))

    def abort(self, request: int) -> None:
        """Gives a request up. Its rows are free when `Ended` has come, and not before.

        Raises:
            InvalidArgument, Closed.
        """
        self._call(lib.fb_sender_abort, index(request, "request", BYTES_MAX))

    def stats(self) -> SenderStats:
        """What it has seen. Any thread may call it at any time.

        Raises:
            Closed.
        """
        found = sized("fb_sent")
        self._call(lib.fb_sender_stats, found)
        counts = (found.done, found.failed, found.held, found.runs, found.again, found.repeats)
        return SenderStats(*counts, found.exposed_ns / 1e9, found.exposed_longest_ns / 1e9)

    def lag(self, layer: int) -> Lag:
        """How long rows of a layer of the model were held; zeros if none were released.

        Raises:
            InvalidArgument, Closed.
        """
        found = sized("fb_lag")
        self._call(lib.fb_sender_lag, index(layer, "layer"), found)
        return Lag(found.count, found.total_ns / 1e9, found.longest_ns / 1e9)

    def _payload(self, use: Use, event: Any) -> bytes:
        raise NotImplementedError


def address_bytes(address: str | os.PathLike[str]) -> bytes:
    """An address as C takes it.

    Raises:
        InvalidArgument: it is none.
    """
    if not isinstance(address, (str, os.PathLike)):
        raise InvalidArgument("address", type(address).__name__, "an address and a port, or a path")
    return text_bytes(os.fsencode(address), "address")
