"""How a command of `python -m forebay.transformers` ends when it is given what it cannot use."""

from __future__ import annotations

import sys
from typing import NoReturn


def stop(message: str) -> NoReturn:
    """Ends the program with one line of error and status 2."""
    line = " ".join(message.split())
    print(f"forebay.transformers: {line}", file=sys.stderr)
    raise SystemExit(2)
