"""The command line of `python -m forebay.transformers`: `check`, `bench` and `generate`.

A command prints a result, or one line of error and ends with status 2. Status 1: `check` found a difference, or
`bench --judge` a missed target.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ..commands import Parser, guarded, many, number, one_of, ratio
from . import bench, check, generate
from .check import DTYPES
from .models import FAMILIES
from .stop import PROGRAM

TYPES = tuple(DTYPES)
_LONGEST = 1 << 20


def parser() -> Parser:
    """The command line."""
    top = Parser(
        prog=f"python -m {PROGRAM}",
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
    return guarded(PROGRAM, lambda: run(chosen))
