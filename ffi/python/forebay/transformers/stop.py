"""How a command of `python -m forebay.transformers` ends when it is given what it cannot use."""

from __future__ import annotations

from typing import NoReturn

from .. import commands

PROGRAM = "forebay.transformers"


def stop(message: str) -> NoReturn:
    """Ends the program with one line of error and status 2."""
    commands.stop(PROGRAM, message)
