"""Replays a selection trace from Python and by `forebay replay`, with the same options, in one run.

    python ffi/python/benches/replay.py target/release/forebay data/demo.topk.zst

Counts must equal the command's, and throughput must reach 70% of its. The bench does not measure the reading of the
trace: the command's time is the time that further sizes add to its run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

import forebay

# The settings of rows that the command uses by default: sizes do not matter, because no row moves.
ROW_BYTES = (656, 0)
# The runs of each side, and the sizes in addition to the first.
RUNS, FURTHER = 5, 8


class Outcome(NamedTuple):
    """The result of a replay."""

    # By layer, the sum over all steps.
    hits: list[int]
    misses: list[int]
    steps: int
    # The seconds of the decode steps.
    seconds: float


def slots_of(share: float, decode_start: int) -> int:
    """Returns the slots of a sequence in each layer, by the definition of `--prompt-share`."""
    return int(share * decode_start + 0.5)


def replay(trace: forebay.SelectionTrace, *, slots: int, warmup: int = 32, mtp: int = 1) -> Outcome:
    """Replays a trace through the production code, cold except for the last `warmup` prompt positions."""
    header = trace.header
    steps = (header.steps - header.warm_steps) // mtp
    warmup = min(warmup, header.warm_steps)
    slots = min(slots, header.decode_start + steps * mtp)
    shape = forebay.Shape(layers=header.layers, row_bytes=ROW_BYTES, top_k=header.k)
    counts = np.zeros((header.layers, 2), np.int64)
    with (
        forebay.HostDevice() as device,
        forebay.Cache(
            device,
            shape,
            lanes=1,
            max_tokens=header.decode_start + (steps + 1) * mtp,
            slots=slots,
            query_rows=mtp,
            steps_in_flight=1,
            residency_only=True,
            huge_pages=False,
            populate=False,
            lock=False,
        ) as cache,
        cache.open(prompt=header.decode_start, promised=steps * mtp, slots=slots, bring_up="nothing") as sequence,
    ):
        sequence.append_in_place(header.decode_start)
        warm = trace.read(header.warm_steps - warmup, warmup).transpose(1, 0, 2)
        sequence.join(warm_up=np.ascontiguousarray(warm) if warmup else None)
        selection = np.empty((header.layers, 1, mtp, header.k), np.int32)
        answer = np.empty_like(selection)
        read = np.empty((mtp, header.layers, header.k), np.int32)
        began = time.perf_counter()
        for group in range(steps):
            step = cache.prepare([(sequence, mtp if group else 0, mtp)])
            trace.read(header.warm_steps + group * mtp, mtp, read)
            selection[:, 0] = read.transpose(1, 0, 2)
            step.layers(selection, answer)
            retired = step.retire()
            counts += retired.counts[:, :2]
        seconds = time.perf_counter() - began
    return Outcome(counts[:, 0].tolist(), counts[:, 1].tolist(), steps, seconds)


def by_command(command: str, trace: str, shares: list[float], mtp: int) -> tuple[list[list[int]], float]:
    """Returns the command's hits, then misses by layer of the first size, and the seconds of the whole run."""
    listed = ",".join(f"{share:.4f}" for share in shares)
    arguments = [command, "replay", trace, "--prompt-share", listed, "--mtp", str(mtp), "--json", "-"]
    began = time.perf_counter()
    ran = subprocess.run(arguments, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    layers = json.loads(ran.stdout)[0]["per_layer"]
    return [[layer[count] for layer in layers] for count in ("hits", "misses")], seconds


def main() -> None:
    """Prints one line per setting. Both sides run on one processor; the best run of each counts."""
    command, path = sys.argv[1], sys.argv[2]
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    trace = forebay.SelectionTrace(path)
    print(f"{Path(path).name}: {trace.header.layers} layers, k {trace.header.k}")
    for share, mtp in ((0.1, 1), (0.2, 2), (0.3, 4)):
        slots = slots_of(share, trace.header.decode_start)
        # Further sizes add replay time only: the start and the reading are the same.
        more = [share + 0.0002 * at for at in range(1 + FURTHER)]
        python, one, several = [], [], []
        for _ in range(RUNS):
            outcome = replay(trace, slots=slots, mtp=mtp)
            python.append(outcome.seconds)
            counts, seconds = by_command(command, path, more[:1], mtp)
            one.append(seconds)
            several.append(by_command(command, path, more, mtp)[1])
            if counts != [outcome.hits, outcome.misses]:
                raise SystemExit(f"prompt share {share} mtp {mtp}: counts differ")
        rust = (min(several) - min(one)) / FURTHER
        found = min(python)
        print(
            f"prompt share {share} mtp {mtp}: counts equal; Python {outcome.steps / found:.0f} steps/s, "
            f"command {outcome.steps / rust:.0f} steps/s: {100 * rust / found:.0f}%"
        )


if __name__ == "__main__":
    main()
