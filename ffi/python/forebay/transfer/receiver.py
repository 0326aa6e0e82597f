"""The receiver of a transfer: a rank of a decode instance, whose pages are the engine's memory."""

from __future__ import annotations

import itertools
import os
import threading
from typing import Any, NamedTuple, Sequence as Many, Union

from .._library import check_created, ffi, lib, new_text, sized
from ..arrays import Tensor
from ..errors import InvalidArgument
from ..handle import BareHandle
from ..tensors import BYTES_MAX, HOST, contiguous, describe, index, look
from .end import TransferEnd
from .events import ReceiverEvent
from .sender import address_bytes
from .side import Rank, TransferOptions, TransferSide, Use, within_ms

_ADDRESS_BYTES = 4096


class HostPages(NamedTuple):
    """Pages in host memory that no array names, such as the rows of a cache. The caller keeps the memory until the
    receiver was closed.
    """

    # Page 0.
    address: int
    # The bytes of all pages.
    bytes: int
    # Bytes from a page to the next one.
    page_bytes: int


Pages = Union[Tensor, HostPages]


class ReceiverStats(NamedTuple):
    """What a receiver has seen since its creation."""

    # Uses that became whole.
    whole: int
    # Uses that failed or were aborted.
    failed: int
    # Runs of bytes that were stored.
    runs: int
    # Their bytes.
    bytes: int
    # Runs that arrived with other bytes than their digests say, or could not be read.
    wrong: int


class _ReceiverHandle(BareHandle):
    """The C handle, which keeps the pages until its end."""

    def __init__(self, pages: list[Any]) -> None:
        super().__init__("fb_receiver", lib.fb_receiver_destroy, False)
        self.pages = pages


class Receiver(TransferEnd[ReceiverEvent]):
    """A rank of a decode instance; a context manager that closes itself.

        planes = [numpy.zeros((pages, size), numpy.uint8) for size in side.page_bytes[0]]
        with forebay.transfer.Receiver("shm", "/run/decode.sock", side, forebay.transfer.Rank(2), planes) as receiver:
            use = receiver.grant(request, tokens, pages=[3, 1], sender=(1, 0))
            async for event in receiver:
                ...

    Rows are checked, and then written by the library's thread: to the pages of a use only, and only until `Whole` or
    `Failed` has come for it. One of them always comes. Then, or when the receiver was closed, the pages are the
    program's again. The receiver keeps the arrays alive until then.

    Args:
        fabric: "tcp", or "shm" between processes of one host and user.
        address: where it listens: an IP address and a port ("127.0.0.1:0": the system chooses the port), or the path of
            a socket.
        side: where the ranks of this instance keep rows.
        rank: this rank.
        planes: the planes of the rank's stage: for each a C-contiguous, writable tensor of the host whose first
            dimension is its pages, or `HostPages`.
        options: times, bounds and the token.

    Attributes:
        address: where it listens, with the port that the system chose.

    Raises:
        InvalidConfig: the message names the field; also for an address of a network without a token.
        Busy: another process listens there.
        OsRefused: no sockets, or no thread.
    """

    address: str

    def __init__(
        self,
        fabric: str,
        address: str | os.PathLike[str],
        side: TransferSide,
        rank: Rank,
        planes: Many[Pages],
        *,
        options: TransferOptions = TransferOptions(),
    ) -> None:
        declared, kept = side.declare()
        config, also_kept = options.declare(fabric, rank, address_bytes(address))
        listed = ffi.new("fb_receive_plane[]", len(planes))
        owners = [_declare(to, plane, f"planes[{at}]") for at, (to, plane) in enumerate(zip(listed, planes))]

        def create(made: Any) -> None:
            text = new_text()
            status = lib.fb_receiver_create(config, declared, listed, len(planes), text, len(text), made)
            check_created(status, text)

        self._start(_ReceiverHandle(owners), create, lib.fb_receiver_poll, lib.fb_receiver_descriptor)
        del kept, also_kept
        self._generations = itertools.count(1)
        self._granting = threading.Lock()
        text = ffi.new("char[]", _ADDRESS_BYTES)
        self._call(lib.fb_receiver_address, text, len(text))
        self.address = os.fsdecode(ffi.string(text))

    def grant(
        self,
        request: int,
        tokens: int,
        pages: Many[int],
        sender: tuple[int, int],
        *,
        first: int = 0,
        payloads: Many[int] = (),
        within: float | None = None,
        generation: int | None = None,
    ) -> Use:
        """Wants a request: gives pages to it, and asks the sender's ranks for its rows. Call it when `Met` has come for
        all of these ranks: without them it fails.

        Args:
            request: the number of this try at the request, as the sender has it.
            tokens: tokens of the prompt.
            pages: a page for each `page_tokens` tokens, in the prompt's order; page `pages[i]` of every plane gets the
                rows of these tokens. A page that is written is in no other use. Pages that have only rows
                before `first` may be those of several uses.
            sender: the sending instance, and its replica.
            first: the first token that is wanted; the rows before it are there, and are not written.
            payloads: the kinds of payloads that belong to it, each once.
            within: seconds after which it fails; None: it may take any time.
            generation: with `request` the name of the use, above those of all before; None: the receiver counts. A
                program passes it for all uses or for none.

        Raises:
            OutOfRange: too few pages, or one that a plane does not have. Nothing has changed.
            InvalidState: a generation that is not above those of all grants before, or a page that another use has.
            InvalidArgument, Closed. Everything else that is wrong comes out as `Failed`.
        """
        wanted = sized("fb_wanted")
        instance, replica = sender
        wanted.instance, wanted.replica = index(instance, "sender", BYTES_MAX), index(replica, "sender")
        wanted.tokens, wanted.first = index(tokens, "tokens"), index(first, "first")
        wanted.within_ms = within_ms(within)
        kinds = ffi.new("uint8_t[]", [index(kind, "payloads", most=255) for kind in payloads])
        wanted.payloads, wanted.payload_count = kinds, len(kinds)
        listed = ffi.new("uint32_t[]", [index(page, "pages") for page in pages])
        # Grants of several threads have to be called in the order of their generations.
        with self._granting:
            number = next(self._generations) if generation is None else generation
            use = Use(index(request, "request", BYTES_MAX), index(number, "generation", BYTES_MAX))
            wanted.request, wanted.generation = use
            self._call(lib.fb_receiver_grant, wanted, listed, len(listed))
        return use

    def abort(self, use: Use) -> None:
        """Gives a use up. Its pages are the program's again when `Failed` or `Whole` has come, and not before. One that
        has ended meanwhile is no error.

        Raises:
            InvalidArgument, Closed.
        """
        request, generation = use
        numbers = index(request, "request", BYTES_MAX), index(generation, "generation", BYTES_MAX)
        self._call(lib.fb_receiver_abort, *numbers)

    def stats(self) -> ReceiverStats:
        """What it has seen. Any thread may call it at any time.

        Raises:
            Closed.
        """
        found = sized("fb_received")
        self._call(lib.fb_receiver_stats, found)
        return ReceiverStats(*(int(getattr(found, name)) for name in ReceiverStats._fields))

    def _payload(self, use: Use, event: Any) -> bytes:
        room = ffi.new("uint8_t[]", max(1, event.payload_bytes))
        self._call(lib.fb_receiver_payload, *use, event.payload, room, event.payload_bytes)
        return bytes(ffi.buffer(room, event.payload_bytes))


def _declare(to: Any, plane: Pages, name: str) -> Any:
    """Writes a plane; returns what must live as long as its pages may be written."""
    if isinstance(plane, HostPages):
        address, size, page_bytes = plane
        to.address = ffi.cast("void *", index(address, name, BYTES_MAX, 1))
        to.bytes, to.page_bytes = index(size, name, BYTES_MAX), index(page_bytes, name, BYTES_MAX, 1)
        return plane
    found = look(plane, name)
    given = f"{describe(found.dtype, found.shape)} in {found.device}"
    if (found.device, found.number) != tuple(HOST) or found.readonly or not contiguous(found.shape, found.strides):
        raise InvalidArgument(name, given, "a writable tensor of the host, C-contiguous")
    if not found.shape or 0 in found.shape:
        raise InvalidArgument(name, given, "a tensor whose first dimension is its pages")
    size = found.bits // 8
    for extent in found.shape:
        size *= extent
    to.address = ffi.cast("void *", found.address)
    to.bytes, to.page_bytes = size, size // found.shape[0]
    return (plane, found.owner)
