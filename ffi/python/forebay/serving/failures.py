"""Errors in an engine's words: they name its request."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Hashable, Iterator, Sequence as Many

from ..errors import ForebayError

# A batch may have hundreds of rows.
_NAMED_MOST = 8
# The attribute of an error that names its request.
_NAMED = "_names_a_request"


@contextmanager
def naming(id: Hashable) -> Iterator[None]:
    """Names the request in the errors of a block."""
    try:
        yield
    except ForebayError as error:
        if not vars(error).get(_NAMED):
            prefix(error, f"request {id!r}: ")
        raise


@contextmanager
def naming_batch(ids: Many[Hashable]) -> Iterator[None]:
    """Names the requests of a batch, whose rows the library counts from 0."""
    try:
        yield
    except ForebayError as error:
        if not vars(error).get(_NAMED):
            named = ", ".join(repr(id) for id in ids[:_NAMED_MOST])
            more = ", ..." if len(ids) > _NAMED_MOST else ""
            prefix(error, f"step of requests {named}{more}: ")
        raise


def prefix(error: ForebayError, text: str) -> None:
    """Puts `text` before an error's message, once."""
    vars(error)[_NAMED] = True
    said = str(error.args[0]) if error.args else ""
    if not said.startswith(text):
        error.args = (text + said, *error.args[1:])
