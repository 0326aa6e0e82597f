"""What enqueued work uses stays alive from before the call that hands it over until that work has ended.

An exception may occur between any two steps of the interpreter. A pending KeyboardInterrupt is raised as soon as a C
call has returned, before anything looks at its status. A program that stored a tensor only after the call would by then
have freed memory that a stream still reads or writes. So every call of the package that hands memory over follows the
same order:

| when | what happens |
|---|---|
| before the call | the cache's record has the tensor: `InFlight.held`; `CacheHandle.joins` of warm-ups and index keys |
| the call was not admitted (`Kept.refused`) | the record releases it: the call read nothing |
| any other refusal, or an exception | the record keeps it: part of the work may have been enqueued |
| the step has ended, or the ticket and the earlier ones of its sequence | the record releases it |
| a refused join was repeated, and that has ended | the record releases it |
| the sequence of a refused join was closed, and the cache has reaped it | the record releases it |

A copy of weights belongs to no step. The device has its source (`Loans`), and a word that the library marks behind the
copy, on the copy's own stream, says that it has run. Where no mark could be enqueued, a wait for the stream says so.

An object that a call makes in C has its place before the call too (`_library.cell`): a returned handle is ended with
its owner, whether or not the owner's caller has seen it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any, Callable, List

from ._library import ffi, lib

# Another call is inside the cache, or there is no such step: returned before anything is read.
NOT_LET_IN = (lib.FB_BUSY, lib.FB_CLOSED)


class Kept(List[Any]):
    """What the work of one step uses: `append` it before the call."""

    __slots__ = ()

    def refused(self, thing: object, status: int) -> None:
        """Releases what was kept for a call that returned `status`, if that status means that nothing was enqueued."""
        if status in NOT_LET_IN:
            for at in reversed(range(len(self))):
                if self[at] is thing:
                    del self[at]
                    return


class Lent:
    """What a copy outside of a step reads, and the word in which the library says that the copy has run."""

    __slots__ = ("owner", "stream", "mark", "over")

    def __init__(self, owner: object, stream: int) -> None:
        self.owner, self.stream, self.mark = owner, stream, ffi.new("uint32_t *")
        # Whether the call that enqueues the copy has ended.
        self.over = False

    def has_run(self) -> bool:
        """Whether the copy has run. This is a plain load of a word: after it the owner's memory is at most freed or
        overwritten, for which the library asks no order.
        """
        return bool(self.mark[0])


class Loans:
    """What copies outside of steps read on a device: true while a copy may still read.

    Several threads may use it, and the garbage collector inside any of its calls: each operation on a container is one
    of C's, and what another thread has removed meanwhile is passed over.
    """

    def __init__(self) -> None:
        # By stream, in the order of their marks. Before that, and where there is no mark, they are in `_unmarked`. The
        # queue of a stream that was returned stays, empty: a thread may be about to append to it.
        self._marked: dict[int, deque[Lent]] = {}
        self._unmarked: dict[Lent, None] = {}
        # Only the end of the device releases these.
        self._kept: list[Lent] = []

    def __bool__(self) -> bool:
        return bool(self._unmarked) or any(self._marked.copy().values())

    def lend(
        self, owner: object, stream: int, copy: Callable[[], int], mark: Callable[[Any], int]
    ) -> int:
        """Keeps `owner` until what `copy` enqueues has run. Returns the status of `copy`."""
        lent = Lent(owner, stream)
        try:
            self._unmarked[lent] = None
            status = copy()
            if status in NOT_LET_IN:
                self._unmarked.pop(lent, None)
            # Part of a refused copy may have been enqueued.
            elif mark(lent.mark) == 0:
                self._marked.setdefault(stream, deque()).append(lent)
                self._unmarked.pop(lent, None)
        finally:
            lent.over = True
        return status

    def release(self) -> None:
        """Releases what copies have read. Of a stream that is behind it looks at one alone."""
        for queue in list(self._marked.values()):
            # Another thread may have taken the last one, or this one.
            with contextlib.suppress(IndexError, ValueError):
                while (first := queue[0]).has_run():
                    queue.remove(first)

    def unmarked(self, stream: int | None = None) -> list[tuple[Lent, bool]]:
        """What has no mark, of a stream or of all: for `waited` and `keep`, behind a wait that has succeeded."""
        found = list(self._unmarked)
        return [(lent, lent.over) for lent in found if stream in (None, lent.stream)]

    def waited(self, unmarked: list[tuple[Lent, bool]]) -> None:
        """Releases those whose call had ended before the wait for their stream."""
        for lent, was_over in unmarked:
            if was_over:
                self._unmarked.pop(lent, None)

    def keep(self, unmarked: list[tuple[Lent, bool]]) -> None:
        """Leaves the others to the end of the device, which is closed: their calls were interrupted, or are inside."""
        for lent, _ in unmarked:
            if lent in self._unmarked:
                self._kept.append(lent)
                self._unmarked.pop(lent, None)

