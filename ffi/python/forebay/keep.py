"""What enqueued work names is kept from before the call that hands it over until that work has ended.

An exception may come between any two steps of the interpreter. A KeyboardInterrupt that is pending is raised as soon as
a call of C has returned, before its status is looked at: who holds a tensor only behind the call has freed by then what
a stream still reads or writes. So the order is the same for every call of the package that hands memory over:

| when | what |
|---|---|
| before the call | the cache's record keeps it: `InFlight.held` for a step, `CacheHandle.joins` for a warm-up |
| the call was not let in (`Kept.refused`) | it is given back: nobody has looked at it |
| any other refusal, or an exception | it stays: some of the work may have been enqueued |
| the step or ticket has ended | it goes |
| a join has ended that was tried again, or a refused one's sequence was closed and reaped | it goes |

What a call makes in C has its place before the call too (`_library.cell`): a handle that came is ended with its
owner, whether or not the owner's caller has seen it.
"""

from __future__ import annotations

from typing import Any, List

from ._library import lib

# Another call is inside the cache, or there is no such step: answered before anything is looked at.
_NOT_LET_IN = (lib.FB_BUSY, lib.FB_CLOSED)


class Kept(List[Any]):
    """What the work of one step names: `append` it before the call."""

    __slots__ = ()

    def refused(self, thing: object, status: int) -> None:
        """Gives back what was kept for a call that answered `status`, if that says that nothing was enqueued."""
        if status in _NOT_LET_IN:
            for at in reversed(range(len(self))):
                if self[at] is thing:
                    del self[at]
                    return
