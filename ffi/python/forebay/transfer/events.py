"""What has happened at a sender or a receiver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Union

from .._library import ffi, lib
from ..errors import ForebayError, error_of
from .side import Rank, Use


@dataclass(frozen=True)
class Met:
    """A rank of the other side has said hello."""

    link: int
    rank: Rank


@dataclass(frozen=True)
class Connected:
    """A connection is there."""

    link: int


@dataclass(frozen=True)
class Lost:
    """A connection is gone; `error` says why, if this end knows it. A sender connects again by itself."""

    link: int
    error: ForebayError | None


@dataclass(frozen=True)
class Unopened:
    """A connection did not open. A sender tries again by itself."""

    error: ForebayError


@dataclass(frozen=True)
class Refused:
    """A call was refused when it was carried out, and has changed nothing. `request`: that of the call, if it had
    one.
    """

    request: int | None
    error: ForebayError


@dataclass(frozen=True)
class Granted:
    """A receiver has given pages to a request of this sender, and wants its tokens from `first` on."""

    use: Use
    link: int
    first: int


@dataclass(frozen=True)
class Released:
    """Nothing reads the rows of a request at `origin` any more: they may be written again."""

    request: int
    origin: int


@dataclass(frozen=True)
class Ended:
    """A request is over at this sender, and nothing reads its rows any more. `error` None: its receivers have
    everything.
    """

    request: int
    error: ForebayError | None


@dataclass(frozen=True)
class Ready:
    """All rows of a layer are in the receiver's pages."""

    use: Use
    layer: int


@dataclass(frozen=True)
class Payload:
    """A payload has come."""

    use: Use
    payload: int
    data: bytes


@dataclass(frozen=True)
class Whole:
    """All rows and payloads of a use are there. Nothing is written to its pages any more."""

    use: Use


@dataclass(frozen=True)
class Failed:
    """A use will not become whole. Nothing is written to its pages any more."""

    use: Use
    error: ForebayError


@dataclass(frozen=True)
class Drained:
    """All senders of a use know that it has ended, or are gone."""

    use: Use


SenderEvent = Union[Met, Connected, Lost, Unopened, Refused, Granted, Released, Ended]
ReceiverEvent = Union[Met, Connected, Lost, Unopened, Refused, Ready, Payload, Whole, Failed, Drained]


def seen(event: Any, text: Any, payload: Callable[[Use, Any], bytes]) -> Any:
    """The event for Python, or None for nothing. `payload` reads one."""
    error = None
    if event.status:
        error = error_of(event.status, ffi.string(text).decode("utf-8", "replace"))
    use = Use(event.request, event.generation)
    rank = Rank(event.instance, event.replica, event.stage, event.lane)
    makes: dict[int, Callable[[], Any]] = {
        lib.FB_TRANSFER_NOTHING: lambda: None,
        lib.FB_TRANSFER_MET: lambda: Met(event.link, rank),
        lib.FB_TRANSFER_CONNECTED: lambda: Connected(event.link),
        lib.FB_TRANSFER_LOST: lambda: Lost(event.link, error),
        lib.FB_TRANSFER_UNOPENED: lambda: Unopened(_there(error)),
        lib.FB_TRANSFER_REFUSED: lambda: Refused(event.request if event.is_of_request else None, _there(error)),
        lib.FB_TRANSFER_GRANTED: lambda: Granted(use, event.link, event.first),
        lib.FB_TRANSFER_RELEASED: lambda: Released(event.request, event.origin),
        lib.FB_TRANSFER_ENDED: lambda: Ended(event.request, error),
        lib.FB_TRANSFER_READY: lambda: Ready(use, event.layer),
        lib.FB_TRANSFER_PAYLOAD: lambda: Payload(use, event.payload, payload(use, event)),
        lib.FB_TRANSFER_WHOLE: lambda: Whole(use),
        lib.FB_TRANSFER_FAILED: lambda: Failed(use, _there(error)),
        lib.FB_TRANSFER_DRAINED: lambda: Drained(use),
    }
    return makes[event.kind]()


def _there(error: ForebayError | None) -> ForebayError:
    return ForebayError("unknown") if error is None else error
