"""Python calls on a device's streams, and what becomes of one while another thread closes the device."""

from __future__ import annotations

from typing import Any, Callable

from ._library import ffi

# What becomes of a call.
RUNS, DROPPED = "it runs", "it was never enqueued, or does nothing"


class Call:
    """A call on a stream, and what becomes of it. The thread that has enqueued it and the one that runs it say that it
    runs; one that closes the device and finds no call enqueued drops it. The first of them decides.
    """

    __slots__ = ("work", "stream", "_decided")

    def __init__(self, work: Callable[[], object], stream: int) -> None:
        self.work, self.stream = work, stream
        # One entry at most: setting a default is atomic.
        self._decided: dict[None, str] = {}

    def decide(self, what: str) -> bool:
        """Decides unless it is decided. Returns whether it is decided so."""
        return self._decided.setdefault(None, what) is what


def caller(calls: dict[int, Call], failed: dict[int, list[BaseException]]) -> Any:
    """The C function that runs one of `calls`. It refers to no device: after a device has ended it has nothing to run.
    """

    def run(key: Any) -> None:
        number = int(ffi.cast("uintptr_t", key))
        call = calls.get(number)
        if call is None or not call.decide(RUNS):
            # Dropped: the thread that has enqueued it raises.
            return
        try:
            call.work()
        except BaseException as error:  # noqa: B036 - it comes out of wait
            failed.setdefault(call.stream, []).append(error)
        finally:
            calls.pop(number, None)

    return ffi.callback("void(void *)", run)
