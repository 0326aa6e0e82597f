"""What enqueued work uses stays alive from before the call that hands it over until that work has ended.

An exception may occur between any two steps of the interpreter. A pending KeyboardInterrupt is raised as soon as a C
call has returned, before anything looks at its status. A program that stored a tensor only after the call would by then
have freed memory that a stream still reads or writes. So every call of the package that hands memory over follows the
same order:

| when | what happens |
|---|---|
| before the call | the cache's record keeps the tensor: `InFlight.held` for a step, `CacheHandle.joins` for a warm-up |
| the call was not admitted (`Kept.refused`) | the record releases it: the call read nothing |
| any other refusal, or an exception | the record keeps it: part of the work may have been enqueued |
| the step or ticket has ended | the record releases it |
| a refused join was repeated, and that has ended | the record releases it |
| the sequence of a refused join was closed, and the cache has reaped it | the record releases it |

A copy of weights belongs to no step. The device has its source (`DeviceHandle.lend`), and a word that the library
marks behind the copy, on the copy's own stream, says that it has run.

An object that a call makes in C has its place before the call too (`_library.cell`): a returned handle is ended with
its owner, whether or not the owner's caller has seen it.
"""

from __future__ import annotations

from typing import Any, List

from ._library import lib

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
