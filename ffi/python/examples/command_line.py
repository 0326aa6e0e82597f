"""What the command lines of `decode.py` and `ranks.py` have in common: options of the same meaning, checked alike."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

LONGEST = 8192
"""The longest context that the model was trained for, in tokens."""
BOUNDS = (
    ("tokens", 1, LONGEST),
    ("context", 16, LONGEST),
    ("batch", 1, 16),
    ("top_k", 1, LONGEST),
    ("layers", 1, 30),
    ("random_weights", 0, 2**63),
)
"""The numbers that both programs have, with the least and the most of each."""


def parser_of(name: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options whose text is the same in both programs."""
    parser = argparse.ArgumentParser(
        prog=name,
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    option = parser.add_argument
    option("--random-weights", type=int, metavar="SEED", help="random weights and tokens, from this seed")
    return parser


def check(parser: argparse.ArgumentParser, chosen: argparse.Namespace, own: Sequence[tuple[str, int, int]]) -> None:
    """Checks the numbers that both programs have and the program's own, and which options go together. An invalid one
    ends the program with one sentence and status 2.
    """
    for name, least, most in (*BOUNDS, *own):
        value = getattr(chosen, name)
        if value is not None and not least <= value <= most:
            parser.error(f"--{name.replace('_', '-')}: {value} is not from {least} to {most}")
    if not re.fullmatch(r"host|cuda:[0-9]{1,3}", chosen.device):
        parser.error(f"--device: {chosen.device!r} is neither host nor cuda:N")
    if chosen.random_weights is not None and chosen.weights is not None:
        parser.error("--random-weights: not together with --weights")
    if chosen.context + chosen.tokens > LONGEST:
        parser.error(f"--context and --tokens: {chosen.context + chosen.tokens} together; the model sees {LONGEST}")
