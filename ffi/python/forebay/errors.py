"""Exceptions: one class for each kind of error of the library, and one for arguments that the package itself checks.

Each exception has `kind` (the name of its class), `status` (the C interface's number of the kind) and a message. The
message says what failed, where, and what to do.
"""

from __future__ import annotations


class ForebayError(Exception):
    """The base class of all errors. The class itself is used for a status that this version does not have."""

    status: int = 0

    @property
    def kind(self) -> str:
        """The name of the kind, for example "Exhausted"."""
        return type(self).__name__


class InvalidConfig(ForebayError, ValueError):
    """A configuration value is invalid, alone or in combination with another."""

    status = 1


class InvalidArgument(InvalidConfig, TypeError):
    """An argument has another type, dtype, shape, layout, device or stream than expected. The call has done nothing.

    Attributes:
        argument: the argument's name.
    """

    def __init__(self, argument: str, given: str, expected: str) -> None:
        super().__init__(f"{argument}: got {given}; expected {expected}")
        self.argument = argument

    def __reduce__(self) -> tuple[object, ...]:
        return (_again, (type(self), self.args, self.__dict__))


def _again(kind: type[InvalidArgument], args: tuple[object, ...], state: dict[str, object]) -> InvalidArgument:
    """Called by pickle: the message is already complete."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def counted(count: int, one: str, more: str | None = None) -> str:
    """For example "1 row", "2 rows"."""
    return f"{count} {one if count == 1 else more or one + 's'}"


class Overflow(ForebayError, OverflowError):
    """A size or product does not fit its type."""

    status = 2


class OutOfMemory(ForebayError, MemoryError):
    """The operating system or the device has no more memory."""

    status = 3


class OsRefused(ForebayError):
    """The operating system refused a call."""

    status = 4


class Exhausted(ForebayError):
    """A pool whose size was fixed at creation has too little left."""

    status = 5


class Busy(ForebayError):
    """Work in flight or another thread is using the object. Call again when it has ended."""

    status = 6


class Closed(ForebayError):
    """The cache, device, sequence or step has ended, or belongs to the process from which this one was forked."""

    status = 7


class OutOfRange(ForebayError, ValueError):
    """A position, layer, slot or count is outside the configured range."""

    status = 8


class DeviceFailed(ForebayError):
    """The device failed, or a step's selections were invalid. Discard the tokens of that step."""

    status = 9


class BadFormat(ForebayError):
    """A file does not follow its format."""

    status = 10


class BadVersion(ForebayError):
    """This build does not read this version of the format."""

    status = 11


class Io(ForebayError, OSError):
    """Reading or writing a file failed."""

    status = 12


class Cancelled(ForebayError):
    """A step was abandoned, or the work of a ticket never ran."""

    status = 13


class Internal(ForebayError):
    """The library broke one of its own rules. This is always a defect of forebay."""

    status = 14


class InvalidState(ForebayError, RuntimeError):
    """The call does not fit the current state of the sequence, step or stream."""

    status = 15


class Unsupported(ForebayError, RuntimeError):
    """The device, its driver, or this build lacks the requested feature."""

    status = 16


class PeerLost(ForebayError, ConnectionError):
    """Another process of the group has ended, or no sign of life has come from it in time."""

    status = 17


class TimedOut(ForebayError, TimeoutError):
    """A deadline passed before the call was done."""

    status = 18


class Corrupt(ForebayError):
    """Bytes do not have the digest that was stated for them."""

    status = 19


KINDS: dict[int, type[ForebayError]] = {
    kind.status: kind
    for kind in (
        InvalidConfig,
        Overflow,
        OutOfMemory,
        OsRefused,
        Exhausted,
        Busy,
        Closed,
        OutOfRange,
        DeviceFailed,
        BadFormat,
        BadVersion,
        Io,
        Cancelled,
        Internal,
        InvalidState,
        Unsupported,
        PeerLost,
        TimedOut,
        Corrupt,
    )
}


def error_of(status: int, message: str) -> ForebayError:
    """The exception for a status of the C interface other than 0."""
    kind = KINDS.get(status, ForebayError)
    error = kind(message)
    error.status = status
    return error
