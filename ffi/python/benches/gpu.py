"""What `forebay bench` measures, through the Python package with torch on a GPU: gather and scatter, resolve, both at
once, a captured step, and what a layer call costs.

    python ffi/python/benches/gpu.py [--quick] [--rounds N] [--only GROUP,...] [--json FILE]

Times of the GPU are between two events of one stream. Work before the first event keeps the stream busy, so that it
never waits for Python. A figure is the median of the rounds, next to the machine's best in the same run: one large copy
between pinned memory and the GPU by torch, or an operation that does nothing. In every step the bench compares counts
with those of a host device and with the misses in the figure's name. In a figure's first and last step it compares the
rows at the slots with the stored rows, in the second the rows that the first scattered, and at the end digests. A
difference ends the run.

`--driver FILE` takes a driver whose device memory the host reads, the stand-in of forebay's tests, and no torch: the
same calls and comparisons on tiny shapes. Its times mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import forebay
from engines import FAR_AHEAD, Place, Standin, Torch, stop

Ids = NDArray[np.int32]
PROMISED = 8
GROUPS = ("gather", "scatter", "resolve", "resolve-gather", "step", "call")
# An engine's work in a layer, in matrix products: even numbers, because work may come in halves. A merge has none,
# because the bench measures the work that forebay exposes.
PRODUCTS = {"project": 2, "index": 6, "prepare": 4, "attend": 8, "merge": 0, "rest": 20}


@dataclass
class Figure:
    """One entry, as `forebay bench --json` has it."""

    group: str
    name: str
    parameters: dict[str, Any]
    times: list[float]
    ceiling: str
    ceiling_us: float
    payload: int | None = None
    beside: dict[str, float] = field(default_factory=dict)
    target: str | None = None
    met: bool | None = None
    checked: int = 0

    def entry(self, device: str) -> dict[str, Any]:
        """Returns the entry as JSON."""
        us = statistics.median(self.times)
        low, high = np.quantile(self.times, [0.25, 0.75])
        made = {
            "schema": 2, "forebay": forebay.__version__, "kind": "bench", "through": "python", "device": device,
            "group": self.group, "name": self.name, "parameters": self.parameters,
            "us": us, "us_low": float(low), "us_high": float(high),
            "bytes": self.payload, "gb_s": None if self.payload is None else self.payload / us / 1e3,
            "ceiling": self.ceiling, "ceiling_us": self.ceiling_us, "fraction": self.ceiling_us / us,
            "beside": self.beside, "target": self.target, "met": self.met, "checked": self.checked,
        }  # fmt: skip
        return {name: value for name, value in made.items() if value is not None}


class Rig:
    """A cache on the GPU whose sequences select windows of a shuffled context, and one on a host device with the same
    calls.

    A window moves on by `misses` positions per step. These were never selected or are long evicted, so they all miss.
    """

    def __init__(
        self, place: Place, *, lanes: int, tokens: int, slots: int, top_k: int, misses: int, query_rows: int = 1,
        layers: int = 1, row: int = 656, stride: int = 704, rows: bool = True, chosen: int | None = None,
    ) -> None:  # fmt: skip
        self.place, self.lanes, self.misses, self.query_rows = place, lanes, misses, query_rows
        self.tokens, self.top_k, self.chosen, self.turn, self.checked = tokens, top_k, chosen or top_k, 0, 0
        # The accepted rows of each sequence's last step.
        self.accepted = 0
        shape = forebay.Shape(layers=layers, row_bytes=(row, 0), top_k=top_k, host_stride=stride)
        sizes: dict[str, Any] = {"lanes": lanes, "max_tokens": tokens + PROMISED, "slots": slots}
        sizes["query_rows"] = query_rows
        self.devices: list[forebay.Device] = [place.device(), forebay.HostDevice()]
        self.cache = forebay.Cache(self.devices[0], shape, residency_only=not rows, **sizes)
        self.twin = forebay.Cache(self.devices[1], shape, residency_only=True, lock=False, populate=False, **sizes)
        chance = np.random.default_rng(1)
        self.rows = chance.integers(0, 256, (tokens, row), np.uint8) if rows else None
        self.orders = np.stack([chance.permutation(tokens) for _ in range(lanes)]).astype(np.int32)
        self.sequences = [self._open(self.cache, lane) for lane in range(lanes)]
        self.twins = [self._open(self.twin, lane) for lane in range(lanes)]
        self.slots = place.array(np.full((lanes, query_rows, top_k), -1, np.int32))
        self.devices[0].wait(place.stream)

    def _open(self, cache: forebay.Cache, lane: int) -> forebay.Sequence:
        sequence = cache.open(prompt=self.tokens, promised=PROMISED, bring_up="nothing")
        if cache is self.cache and self.rows is not None:
            for layer in range(cache.info.layers):
                sequence.append(layer, self.stamped(self.rows, lane, layer))
        else:
            sequence.append_in_place(self.tokens)
        sequence.join(self.place.stream if cache is self.cache else None)
        return sequence

    def stamped(self, rows: NDArray[np.uint8], lane: int, layer: int) -> NDArray[np.uint8]:
        """Returns the rows of a lane in a layer."""
        made = rows.copy()
        made[..., :4] = np.array([lane, layer], np.uint16).view(np.uint8)
        return made

    def select(self) -> Ids:
        """Returns the next step's selection, the same in every layer."""
        made = np.full((self.lanes, self.query_rows, self.top_k), -1, np.int32)
        for query in range(self.query_rows):
            first = self.turn * self.misses + query * self.misses // self.query_rows
            at = (first + np.arange(self.chosen)) % self.tokens
            made[:, query, : self.chosen] = self.orders[:, at]
        self.turn += 1
        return made

    def begin(self) -> forebay.Step:
        """Begins a step on the GPU."""
        rows = [(sequence, self.accepted, self.query_rows) for sequence in self.sequences]
        return self.cache.prepare(rows, query_rows=self.query_rows, stream=self.place.stream)

    def end(self, step: forebay.Step, selection: Ids) -> None:
        """Ends the step; the host device's step must have the same counts."""
        found = step.retire(wait=True)
        rows = [(twin, self.accepted, self.query_rows) for twin in self.twins]
        own, self.accepted = self.twin.prepare(rows, query_rows=self.query_rows), 0
        slots = np.empty_like(selection)
        for layer in range(self.twin.info.layers):
            own.layer(layer, selection, slots)
        if not (found.counts == own.retire().counts).all():
            stop(f"step {self.turn}: hits and misses are {found.counts.tolist()}, not the host device's")
        # A figure's bytes are computed from these misses; the first step misses all, and `calls` repeats its selection.
        if self.turn > 1 and (found.counts[:, 1] != self.lanes * self.misses).any():
            stop(f"step {self.turn}: {found.counts[:, 1].tolist()} misses by layer, not {self.lanes * self.misses}")
        self.checked += found.counts.size

    def check_rows(self, slots: Any, selection: Ids, layer: int = 0) -> None:
        """Checks that the rows at the slots are the stored ones."""
        if self.rows is None:
            return
        expected = np.stack([self.stamped(self.rows[selection[lane]], lane, layer) for lane in range(self.lanes)])
        expected[selection < 0] = 0
        if not self.place.has_rows(self.cache.slab(layer), slots, expected):
            stop(f"step {self.turn}, layer {layer}: a row is not the one that was stored")
        self.checked += selection.size

    def land(self) -> NDArray[np.uint8]:
        """Writes a step's new rows, as the engine does, to where scatter reads them."""
        rows = np.random.default_rng(2).integers(0, 256, (self.lanes, self.cache.shape.row_bytes[0]), np.uint8)
        slab, source = self.place.view(self.cache.slab(0)), self.place.array(rows)
        for lane, sequence in enumerate(self.sequences):
            block, at = divmod(sequence.landing_slot(0), 64)
            self.place.copy(slab[block][at], source[lane], self.place.stream.cuda_stream)
        # This call waits, because the source of the copy is freed here.
        self.place.numpy(source)
        return rows

    def check_landed(self, rows: NDArray[np.uint8]) -> None:
        """Checks that scattered rows are in host memory, once the step after them has accepted them."""
        for sequence, row in zip(self.sequences, rows, strict=True):
            if sequence.read_row(0, self.tokens).tobytes() != row.tobytes():
                stop(f"step {self.turn}: a new row is not stored as the engine wrote it")
        self.checked += self.lanes

    def close(self) -> int:
        """Compares digests, closes the cache, and reports how much was compared."""
        for sequence, twin in zip(self.sequences, self.twins, strict=True):
            if sequence.digest() != twin.digest():
                stop("residency differs from the host device's")
        for cache in (self.cache, self.twin):
            cache.close()
        for device in self.devices:
            device.close()
        return self.checked + self.lanes

    def run(self, rounds: int, apart: bool) -> dict[str, list[float]]:
        """Microseconds of resolve, gather and scatter, or of resolve and gather at once, in each round; steps that warm
        up first."""
        times: dict[str, list[float]] = {}
        landed = None
        for turn in range(rounds + 2):
            selection, self.accepted = self.select(), int(turn == 1 and landed is not None)
            buffers = forebay.Buffers(self.cache, self.place.array(selection), self.slots)
            step, timed = self.begin(), {}
            if apart:
                timed["resolve"] = self.place.timed(lambda: step.resolve(0, buffers))
                timed["gather"] = self.place.timed(lambda: step.gather(0))
            else:
                timed["resolve-gather"] = self.place.timed(lambda: step.layer(0, buffers))
            if turn in (0, rounds + 1):
                self.check_rows(self.slots, selection)
            if self.rows is not None:
                landed = self.land() if turn == 0 else landed
                timed["scatter"] = self.place.timed(lambda: step.scatter(0))
            self.end(step, selection)
            if turn == 1 and landed is not None:
                self.check_landed(landed)
            for name, us in timed.items():
                times.setdefault(name, []).append(us)
        return {name: several[2:] for name, several in times.items()}


@dataclass(frozen=True)
class Run:
    """The options, and the machine's best rates."""

    place: Place
    ceilings: dict[str, float]
    rounds: int
    quick: bool


def moves(run: Run) -> Iterable[Figure]:
    """Measures a gather of rows that all miss, and a scatter of a batch's new rows."""
    top_k, tokens = (32, 128) if run.quick else (2048, 8192)
    few = [(1, 64), (1, 512), (1, 2048), (2, 2048), (8, 2048), (32, 2048)]
    for row, stride in ((656, 704), (656, 656), (1152, 1152)):
        for lanes, chosen in [(1, 8), (3, top_k)] if run.quick else [*few, (160, 512)] if row < stride else few:
            rig = Rig(
                run.place, lanes=lanes, tokens=tokens, slots=top_k, top_k=top_k, misses=chosen, chosen=chosen,
                row=row, stride=stride,
            )  # fmt: skip
            times = rig.run(run.rounds, apart=True)
            checked = rig.close()
            for group, ceiling, count in (("gather", "copy_up", chosen), ("scatter", "copy_down", 1)):
                payload = lanes * count * row
                parameters = {"rows": lanes * count, "row_bytes": row, "stride": stride}
                figure = Figure(
                    group, "scattered rows", parameters, times[group], ceiling,
                    payload / run.ceilings[ceiling] * 1e6, payload, checked=checked,
                )  # fmt: skip
                if group == "gather" and figure.parameters["rows"] >= 4096 and (row, stride) == (656, 704):
                    figure.target = "above 37 GB/s"
                    figure.met = payload / statistics.median(figure.times) / 1e3 > 37
                yield figure


def rule(run: Run) -> Iterable[Figure]:
    """Measures resolve alone, of rows without bytes."""
    if run.quick:
        cases, top_k, tokens = [(1, 1, 48, 0.134), (3, 2, 80, 0.3)], 32, 256
    else:
        cases, top_k, tokens = [], 2048, 32768
        cases += [(lanes, 1, 6881, 0.134) for lanes in (1, 8, 32, 64, 160)]
        cases += [(160, 2, 6881, 0.134), (160, 4, 6881, 0.134), (32, 1, 4096, 0.3), (32, 1, 13107, 0.067)]
    targets = {(160, 1, 6881, 0.134): 15.0, (160, 2, 6881, 0.134): 25.0}
    for lanes, query_rows, slots, share in cases:
        misses = round(share * top_k)
        sizes: dict[str, Any] = {"lanes": lanes, "tokens": tokens, "slots": slots, "top_k": top_k, "misses": misses}
        rig = Rig(run.place, query_rows=query_rows, rows=False, **sizes)
        times = rig.run(run.rounds, apart=True)
        parameters = {"batch": lanes, "query_rows": query_rows, "budget": slots, "misses": share}
        figure = Figure(
            "resolve", "one layer", parameters, times["resolve"], "launch", run.ceilings["launch_us"],
            checked=rig.close(),
        )  # fmt: skip
        if wanted := targets.get((lanes, query_rows, slots, share)):
            figure.target, figure.met = f"under {wanted:.0f} us", statistics.median(figure.times) < wanted
        yield figure


def both(run: Run) -> Iterable[Figure]:
    """Measures resolve and gather together, as a layer runs them."""
    cases, top_k, tokens, slots = [(1, 410), (8, 190), (100, 410)], 2048, 16384, 6881
    if run.quick:
        cases, top_k, tokens, slots = [(1, 6), (3, 6)], 32, 192, 80
    for lanes, misses in cases:
        rig = Rig(run.place, lanes=lanes, tokens=tokens, slots=slots, top_k=top_k, misses=misses)
        times = rig.run(run.rounds, apart=False)["resolve-gather"]
        payload, parameters = lanes * misses * 656, {"batch": lanes, "misses": misses, "budget": slots}
        least = payload / run.ceilings["copy_up"] * 1e6
        figure = Figure("resolve-gather", "one layer", parameters, times, "copy_up", least, payload)
        figure.checked = rig.close()
        if (lanes, misses) == (1, 410):
            figure.target, figure.met = "under 15 us", statistics.median(times) < 15
        yield figure


class Captured:
    """All layers of a step, captured by the engine with its own work around forebay's."""

    def __init__(self, place: Place, rig: Rig, scale: int) -> None:
        self.place, self.rig, self.scale = place, rig, scale
        whole = (rig.lanes, rig.query_rows, rig.top_k)
        shapes = (whole, whole, (2, *whole), (2, *whole[:2]))
        self.selection, self.slots, *parts = (place.array(np.full(shape, -1, np.int32)) for shape in shapes)
        self.asked = place.array(np.full(whole, -1, np.int32))
        self.buffers = forebay.Buffers(rig.cache, self.selection, self.slots, *parts)
        # The device's own streams, which have priority when the engine's work fills all multiprocessors.
        self.streams: dict[str, Any] = {name: rig.devices[0].stream() for name in ("resolve", "gather", "scatter")}

    def enqueue(self, call: forebay.EngineCall) -> None:
        """Enqueues the engine's part of a layer."""
        products = PRODUCTS[call.work] * self.scale * call.count // self.rig.lanes
        # Split attention takes as long as attention in one call.
        self.place.compute(products // (1 if call.attended in (None, "all") else 2), call.stream)
        if call.work == "index":
            for row in range(call.first, call.first + call.count):
                self.place.copy(self.selection[row], self.asked[row], call.stream)

    def alone(self) -> Callable[[], None]:
        """Captures the engine's work without forebay's, the least that a step can take; returns its replay."""
        stream, lanes = self.place.stream.cuda_stream, self.rig.lanes

        def work() -> None:
            for layer in range(self.rig.cache.info.layers):
                for name in ("project", "index", "prepare", "attend", "rest"):
                    attended = "all" if name == "attend" else None
                    self.enqueue(forebay.EngineCall(name, attended, 0, 0, layer, 0, lanes, 0, 1, stream))

        return self.place.captured(work)[1]

    def times(self, order: str, alone: Callable[[], None], rounds: int) -> tuple[list[float], list[float]]:
        """Microseconds of each replay, for a step of its own, and of the engine's work alone in turn with it: a GPU's
        clock is not the same for long."""
        sizes = {"batch": self.rig.lanes, "half": self.rig.lanes // 2}
        layers = forebay.Layers(self.buffers, compute=self.place.stream, **self.streams, **sizes)
        by_layer = [order] * self.rig.cache.info.layers
        captured, replay = self.place.captured(
            lambda: self.rig.cache.capture(
                [layers], query_rows=self.rig.query_rows, by_layer=by_layer, enqueue=self.enqueue, into=True
            )
        )
        found, least = [], []
        for turn in range(rounds + 2):
            least.append(self.place.timed(alone, FAR_AHEAD))
            selection = self.rig.select()
            self.place.copy(self.asked, self.place.array(selection), self.place.stream.cuda_stream)
            step = self.rig.begin()
            found.append(self.place.timed(replay, FAR_AHEAD))
            captured.launched([step])
            if turn == rounds + 1:
                self.rig.check_rows(self.slots, selection, len(by_layer) - 1)
            self.rig.end(step, selection)
        captured.close()
        return found[2:], least[2:]


def steps(run: Run) -> Iterable[Figure]:
    """Measures a captured step: the engine's work alone, and the step in each order."""
    # A layer moves as many bytes in its time as in ESS's measurement (160 x 190 rows in 100 ms / 61), with fewer
    # sequences.
    lanes, layers, top_k, tokens, slots, misses, layer_us = 16, 61, 2048, 8192, 4096, 520, 450.0
    if run.quick:
        lanes, layers, top_k, tokens, slots, misses = 2, 3, 32, 192, 80, 6
    rig = Rig(run.place, lanes=lanes, layers=layers, tokens=tokens, slots=slots, top_k=top_k, misses=misses)
    products = sum(PRODUCTS.values())
    scale = max(round(layer_us / products / run.ceilings["product_us"]), 1) if run.place.means_something else 1
    captured = Captured(run.place, rig, scale)
    alone = captured.alone()
    found = {order: captured.times(order, alone, run.rounds) for order in ("none", "da", "dba")}
    none, checked = statistics.median(found["none"][0]), rig.close()
    for order, (times, engine) in found.items():
        us, least = statistics.median(times), statistics.median(engine)
        parameters = {"order": order, "layers": layers, "batch": lanes, "misses": misses, "budget": slots}
        figure = Figure("step", "captured step", parameters, times, "engine alone", least, checked=checked)
        figure.beside = {"exposed_us_a_layer": (us - least) / layers, "none_us": none}
        if order != "none" and not run.quick:
            figure.target, figure.met = "at most 1.5% exposed", us <= least * 1.015
        yield figure


def calls(run: Run) -> Iterable[Figure]:
    """Measures the host time of a layer call, for a whole batch on a GPU's stream."""
    lanes, layers = (2, 4) if run.quick else (16, 61)
    rig = Rig(run.place, lanes=lanes, layers=layers, tokens=128, slots=128, top_k=64, misses=4, chosen=16, rows=False)
    selection = rig.select()
    several = run.place.array(np.stack([selection] * layers))
    answers = run.place.array(np.stack([selection] * layers))
    asked, answer = several[0], answers[0]
    buffers = forebay.Buffers(rig.cache, asked, answer)

    def by_buffers(step: forebay.Step) -> None:
        for layer in range(layers):
            step.layer(layer, buffers)

    def by_tensors(step: forebay.Step) -> None:
        for layer in range(layers):
            step.layer(layer, asked, answer)

    ways: dict[str, Callable[[forebay.Step], object]] = {
        "all layers in one call": lambda step: step.layers(several, answers),
        "Buffers, checked once": by_buffers,
        "tensors, checked each time": by_tensors,
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(run.rounds + 2):
        for name, way in ways.items():
            step = rig.begin()
            began = time.perf_counter()
            way(step)
            found[name].append((time.perf_counter() - began) * 1e6 / layers)
            rig.end(step, selection)
    checked = rig.close()
    one = statistics.median(found["all layers in one call"][2:])
    for name, times in found.items():
        parameters = {"batch": lanes, "layers": layers}
        figure = Figure("call", name, parameters, times[2:], "all layers in one call", one, checked=checked)
        if name != "all layers in one call":
            more = statistics.median(figure.times) - one
            figure.beside = {"more_us": more}
            if not run.quick:
                figure.target, figure.met = "at most 5 us more", more <= 5
        yield figure


PARTS = {
    moves: {"gather", "scatter"}, rule: {"resolve"}, both: {"resolve-gather"}, steps: {"step"}, calls: {"call"},
}  # fmt: skip


def place_of(chosen: argparse.Namespace) -> Place:
    """Returns the device to measure."""
    if chosen.driver is None:
        try:
            import torch
        except ImportError:
            torch = None
        if torch is not None and chosen.device < torch.cuda.device_count():
            return Torch(torch, chosen.device, chosen.gather_blocks)
        chosen.driver = os.environ.get("FOREBAY_STANDIN_LIBRARY")
        if chosen.driver is None:
            print(f"nothing is measured: torch has no GPU {chosen.device} here, and no --driver is named")
            raise SystemExit(0)
    return Standin(chosen.driver, chosen.device, chosen.gather_blocks)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="gpu.py", description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument("--rounds", type=int, default=None, metavar="N", help="steps of each figure (default: 20)")
    parser.add_argument("--only", default=",".join(GROUPS), metavar="GROUP,...", help=", ".join(GROUPS))
    parser.add_argument("--json", default=None, metavar="FILE", help="a list of entries; - is standard output")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="the GPU's number")
    parser.add_argument("--gather-blocks", type=int, metavar="N", help="thread blocks of a gather")
    parser.add_argument("--driver", default=None, metavar="FILE", help="a stand-in driver, in torch's place")
    chosen = parser.parse_args(arguments)
    chosen.only = chosen.only.split(",")
    if unknown := set(chosen.only) - set(GROUPS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(GROUPS)}")
    if chosen.rounds is not None and not 1 <= chosen.rounds <= 10000:
        parser.error(f"--rounds: {chosen.rounds} is not from 1 to 10000")
    if chosen.gather_blocks is not None and not 1 <= chosen.gather_blocks <= 4096:
        parser.error(f"--gather-blocks: {chosen.gather_blocks} is not from 1 to 4096")
    if not 0 <= chosen.device < 256:
        parser.error(f"--device: {chosen.device} is not from 0 to 255")
    return chosen


def line(entry: dict[str, Any], means_something: bool) -> str:
    """Returns an entry as text for the screen."""
    told = ", ".join(f"{name} {value}" for name, value in entry["parameters"].items())
    rate = f", {entry['gb_s']:.1f} GB/s" if "gb_s" in entry else ""
    said = f"{entry['group']:14} {entry['name']}, {told}: {entry['us']:.1f} us"
    said += f" ({entry['us_low']:.1f} to {entry['us_high']:.1f}){rate}"
    said += f"; {100 * entry['fraction']:.0f}% of {entry['ceiling']}"
    if "target" not in entry or not means_something:
        return said
    return f"{said}; {entry['target']}: {'met' if entry['met'] else 'not met'}"


def save(path: str | None, entries: list[dict[str, Any]]) -> None:
    """Writes the entries so far, because a run may be cut off."""
    if path is not None and path != "-":
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump(entries, file, indent=1)
        except OSError as error:
            stop(f"--json: {error}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line for each figure."""
    chosen = options(arguments)
    place = place_of(chosen)
    quick = chosen.quick or not place.means_something
    rounds = chosen.rounds or (3 if quick else 20)
    ceilings = place.ceilings((1 << 20) if quick else (256 << 20), 3 if quick else 10)
    run, out = Run(place, ceilings, rounds, quick), sys.stderr if chosen.json == "-" else sys.stdout
    device = f"cuda:{chosen.device}"
    head: dict[str, Any] = {
        "schema": 2, "forebay": forebay.__version__, "kind": "bench-device", "through": "python",
        "device": device, "name": place.name, "rounds": rounds, "quick": quick, "ceilings": ceilings,
    }  # fmt: skip
    entries = [head]
    up, down = (ceilings[name] / 1e9 for name in ("copy_up", "copy_down"))
    print(f"{place.name}: up {up:.1f} GB/s, down {down:.1f} GB/s", file=out)
    if not place.means_something:
        print("A stand-in driver: the times below mean nothing.", file=out)
    save(chosen.json, entries)
    asked = [part for part, groups in PARTS.items() if groups & set(chosen.only)]
    for figure in itertools.chain.from_iterable(part(run) for part in asked):
        if figure.group in chosen.only:
            entries.append(figure.entry(device))
            print(line(entries[-1], place.means_something), file=out, flush=True)
            save(chosen.json, entries)
    checked = sum(entry.get("checked", 0) for entry in entries)
    if chosen.json == "-":
        print(json.dumps(entries, indent=1))
    note = "" if place.means_something else "; times mean nothing"
    print(f"{len(entries) - 1} figures, {checked:,} comparisons with what they must be{note}", file=out)


if __name__ == "__main__":
    main()
