"""The command line of `python -m forebay.transformers`: `check`, `bench` and `generate`.

A command prints a result, or one line of error and ends with status 2. Status 1: `check` found a difference, or
`bench --judge` a missed target.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from ..errors import ForebayError
from . import bench, check, generate
from .check import DTYPES
from .models import FAMILIES
from .stop import stop

_T = TypeVar("_T")

TYPES = tuple(DTYPES)
_LONGEST = 1 << 20


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Prints one line and ends the program with status 2."""
        stop(message)


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


def one_of(kind: str, names: Sequence[str]) -> Callable[[str], str]:
    """A type of option: one of `names`; `all` is among them where the caller allows it."""

    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {kind}; there are {', '.join(names)}")
        return text

    return read


def parser() -> Parser:
    """The command line."""
    top = Parser(
        prog="python -m forebay.transformers",
        description="Models of transformers whose cache keeps all rows in host memory and a share of them in slots.",
        allow_abbrev=False,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    shown: dict[str, Any] = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter, "allow_abbrev": False}

    add = commands.add_parser(
        "check", help="compares small models of each family with all rows resident", **shown
    ).add_argument
    family = one_of("model", ("all", *FAMILIES))
    add("--model", type=many(family), default=["all"], metavar="NAMES", help="families, or all")
    add("--ratio", type=many(ratio), default=[0.1, 0.3, 1.0], metavar="LIST", help="slots as a share of the tokens")
    add("--batch", type=many(number(1, 8)), default=[1, 4], metavar="LIST", help="sequences decoded together")
    add("--dtype", type=many(one_of("type", TYPES)), default=list(TYPES), metavar="LIST", help="types of the rows")
    add("--context", type=number(2, 1 << 13), default=160, metavar="N", help="tokens of the longest prompt")
    add("--tokens", type=number(2, 1 << 12), default=24, metavar="N", help="tokens to decode")
    add("--seed", type=number(0, 1 << 62), default=0, metavar="N", help="of weights and prompts")

    add = commands.add_parser("bench", help="times a decode step beside the stock model's", **shown).add_argument
    add("--model", type=one_of("model", FAMILIES), default=FAMILIES[0], metavar="NAME", help="a family")
    add("--context", type=many(number(16, 1 << 16)), default=[2048, 8192], metavar="LIST", help="tokens of the prompt")
    add("--ratio", type=ratio, default=0.2, help="slots as a share of the tokens")
    add("--batch", type=number(1, 8), default=1, metavar="N", help="sequences decoded together")
    add("--dtype", type=one_of("type", TYPES), default="fp32", help="type of the rows")
    add("--steps", type=number(1, 1000), default=16, metavar="N", help="decode steps that are timed")
    add("--threads", type=number(1, 256), default=1, metavar="N", help="threads of torch")
    add("--no-stock", action="store_true", help="leaves out the stock model, which takes most of the time")
    add("--judge", action="store_true", help="compares with the targets; status 1 if one is missed")

    add = commands.add_parser("generate", help="continues a text with a model in a folder", **shown).add_argument
    add("--model", required=True, metavar="DIR", help="folder of the model and its tokenizer")
    add("--prompt", required=True, metavar="TEXT", help="the text to continue")
    add("--ratio", type=ratio, default=0.2, help="slots as a share of the tokens")
    add("--tokens", type=number(1, _LONGEST), default=128, metavar="N", help="the most tokens to decode")
    add("--dtype", type=one_of("type", ("auto", *TYPES)), default="auto", help="type of weights and rows")
    add("--chunk", type=number(1, _LONGEST), default=1024, metavar="N", help="tokens of a chunk of the prefill")
    return top


def run(chosen: argparse.Namespace) -> int:
    """Runs a command; the status of the program."""
    commands = {"check": check.run, "bench": bench.run, "generate": generate.run}
    return commands[chosen.command](chosen)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the command line and runs it."""
    chosen = parser().parse_args(arguments)
    # Lines appear as they are printed, even in a pipe.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        return run(chosen)
    except ForebayError as error:
        stop(str(error))
    except BrokenPipeError:
        # The reader has gone, so nothing can be printed, not even by Python's own flush at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
