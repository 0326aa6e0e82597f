"""Exceptions: one class for each kind of error of the library, and one for arguments that Python checks.

Every one has `kind` (its class's name), `status` (the C interface's number of the kind) and its message, which says
what failed, at which place, and what to do.
"""

from __future__ import annotations


class ForebayError(Exception):
    """The base of all; itself, a status that this version does not know."""

    status: int = 0

    @property
    def kind(self) -> str:
        """The name of the kind, e.g. "Exhausted"."""
        return type(self).__name__


class InvalidConfig(ForebayError, ValueError):
    """A declared value makes no sense, alone or beside another."""

    status = 1


class InvalidArgument(InvalidConfig, TypeError):
    """An argument has another type, dtype, shape, layout, device or stream than expected. Nothing was done.

    Attributes:
        argument: the argument's name.
    """

    def __init__(self, argument: str, given: str, expected: str) -> None:
        super().__init__(f"{argument}: got {given}; expected {expected}")
        self.argument = argument

    def __reduce__(self) -> tuple[object, ...]:
        return (_again, (type(self), self.args, self.__dict__))


def _again(kind: type[InvalidArgument], args: tuple[object, ...], state: dict[str, object]) -> InvalidArgument:
    """What pickle calls: the message is made already."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def counted(count: int, one: str, more: str | None = None) -> str:
    """"1 row", "2 rows"."""
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
    """A pool sized at creation has too little left."""

    status = 5


class Busy(ForebayError):
    """The thing is in use, by work in flight or by another thread; ask again when that has ended."""

    status = 6


class Closed(ForebayError):
    """The cache, device, sequence or step has ended, or belongs to the process that this one was forked from."""

    status = 7


class OutOfRange(ForebayError, ValueError):
    """A position, layer, slot or count lies outside what was declared."""

    status = 8


class DeviceFailed(ForebayError):
    """The device failed, or a step's selections were wrong: do not publish its tokens."""

    status = 9


class BadFormat(ForebayError):
    """A file is not what its format demands."""

    status = 10


class BadVersion(ForebayError):
    """A version that this build does not read."""

    status = 11


class Io(ForebayError, OSError):
    """Reading or writing a file failed."""

    status = 12


class Cancelled(ForebayError):
    """The work was cancelled before it ended, or a step was not enqueued whole."""

    status = 13


class Internal(ForebayError):
    """The library broke one of its own rules: always a defect of forebay."""

    status = 14


class InvalidState(ForebayError, RuntimeError):
    """The call does not fit the state of the sequence, step or stream that it names."""

    status = 15


class Unsupported(ForebayError, RuntimeError):
    """The device, or its driver, does not have what was asked for."""

    status = 16


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
    )
}


def error_of(status: int, message: str) -> ForebayError:
    """The exception for a status of the C interface that is not 0."""
    kind = KINDS.get(status, ForebayError)
    error = kind(message)
    error.status = status
    return error
