"""What the command lines of the package share: options' types, and errors of one line. It imports no engine.

A program is the module that `python -m` runs, for example "forebay.vllm". A command prints a result, or one line of
error and ends with status 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from .errors import ForebayError

_T = TypeVar("_T")

UNITS = {unit: 1 << (10 * power) for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))}
UNITS.update({unit: 1000**power for power, unit in enumerate(("kB", "MB", "GB", "TB"), 1)})


def stop(program: str, message: str) -> NoReturn:
    """Ends the program with one line of error and status 2."""
    line = " ".join(message.split())
    print(f"{program}: {line}", file=sys.stderr)
    raise SystemExit(2)


def guarded(program: str, command: Callable[[], int]) -> int:
    """Runs a command; the status of the program. An error of forebay is one line."""
    # Lines appear as they are printed, even in a pipe.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        return command()
    except ForebayError as error:
        stop(program, str(error))
    except BrokenPipeError:
        # The reader has gone, so nothing can be printed, not even by Python's own flush at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line. Its `prog` begins with "python -m PROGRAM"."""

    def error(self, message: str) -> NoReturn:
        """Prints one line and ends the program with status 2."""
        stop(self.prog.removeprefix("python -m ").split()[0], message)


def many(one: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    """A type of option: several values with commas between them."""

    def read(text: str) -> list[_T]:
        return [one(part) for part in text.split(",")]

    return read


def number(least: int, most: int) -> Callable[[str], int]:
    """A type of option: a whole number from `least` to `most`."""

    def read(text: str) -> int:
        if not text.strip().isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least:,} to {most:,}")
        return int(text)

    return read


def ratio(text: str) -> float:
    """A type of option: a number above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 and at most 1")
    return value


def size(text: str) -> int:
    """A type of option: bytes, a whole number with or without a unit, for example 8GiB or 500MB."""
    digits = text.rstrip("kKMGTiB")
    unit = text[len(digits) :] or "B"
    if not digits.isdecimal() or unit not in UNITS or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes above 0, for example 8GiB or 500MB")
    return int(digits) * UNITS[unit]


def one_of(kind: str, names: Sequence[str]) -> Callable[[str], str]:
    """A type of option: one of `names`; `all` is among them where the caller allows it."""

    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {kind}; there are {', '.join(names)}")
        return text

    return read


def shown(count: float) -> str:
    """Bytes with a unit, for example "1.5 MiB"."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        del units[0]
    return f"{count:,.0f} bytes" if units[0] == "bytes" else f"{count:,.1f} {units[0]}"
