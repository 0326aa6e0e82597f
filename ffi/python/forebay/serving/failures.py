"""Errors in an engine's words: they name its request."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Iterator, Sequence as Many

from ..errors import ForebayError

if TYPE_CHECKING:
    from .request import Request

# A batch may have hundreds of rows.
_NAMED_MOST = 8


@contextmanager
def naming(request: Request) -> Iterator[None]:
    """Names the request in the errors of a block."""
    try:
        yield
    except ForebayError as error:
        prefix(error, f"request {request.id!r}: ")
        raise


@contextmanager
def naming_batch(requests: Many[Request]) -> Iterator[None]:
    """Names the requests of a batch, whose rows the library counts from 0."""
    try:
        yield
    except ForebayError as error:
        if "request" not in str(error):
            named = ", ".join(repr(request.id) for request in requests[:_NAMED_MOST])
            more = ", ..." if len(requests) > _NAMED_MOST else ""
            prefix(error, f"step of requests {named}{more}: ")
        raise


def prefix(error: ForebayError, text: str) -> None:
    """Puts `text` before an error's message, once."""
    said = str(error.args[0]) if error.args else ""
    if not said.startswith(text):
        error.args = (text + said, *error.args[1:])
