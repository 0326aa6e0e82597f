"""An engine at random over `forebay.serving`, beside an oracle: for each request the list of its rows, in plain Python.

Every row that a step or a read returns is compared with the oracle's, byte by byte. At the end all requests end, and
the cache's gauges are those of the start.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

import forebay
from forebay.serving import Request, Requests

NAMES = "abcdefghij"


class Kit(Protocol):
    """The tensors of an engine."""

    def tensor(self, values: np.ndarray[Any, Any]) -> Any:
        """Rows, int32 `[..., words]`, as a tensor on the cache's device."""

    def selection(self, values: np.ndarray[Any, Any]) -> Any:
        """A selection as a tensor on the cache's device."""

    def prompt(self, values: np.ndarray[Any, Any]) -> Any:
        """Rows of a prompt as a tensor."""

    def numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        """A copy of a tensor."""


class Arrays:
    """NumPy on a host device."""

    def tensor(self, values: np.ndarray[Any, Any]) -> Any:
        """See `Kit`."""
        return values

    def selection(self, values: np.ndarray[Any, Any]) -> Any:
        """See `Kit`."""
        return values

    def prompt(self, values: np.ndarray[Any, Any]) -> Any:
        """See `Kit`."""
        return values

    def numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        """See `Kit`."""
        return np.array(tensor)


class Boom(Exception):
    """What an engine's layer raises."""


@dataclass
class Twin:
    """A request as the oracle has it: the rows of each layer."""

    rows: list[list[bytes]]
    # Prompt rows of the present chunk that a layer has not yet.
    due: dict[int, list[bytes]] = field(default_factory=dict)
    owner: Any = None

    @property
    def length(self) -> int:
        return max(len(rows) + len(self.due.get(layer, [])) for layer, rows in enumerate(self.rows))


class Owner:
    """What an engine holds for a request."""


class Machine:
    """Runs operations at random. `calls` counts those that did something."""

    def __init__(self, cache: forebay.Cache, kit: Kit, seed: int, *, parks: bool = True, **options: Any) -> None:
        self.cache, self.kit, self.chance, self.parks = cache, kit, random.Random(seed), parks
        self.layers, self.width, self.k = cache.info.layers, cache.info.row_bytes, cache.info.top_k
        # An index key is the first bytes of the row that the layer has for the token.
        self.key_words = cache.info.index_key_bytes // 4
        self.start = cache.stats()
        self.requests = Requests(cache, **{"ratio": 0.4, **options})
        self.twins: dict[str, Twin] = {}
        self.calls: dict[str, int] = {}
        self.compared = 0

    def run(self, turns: int) -> None:
        """Runs `turns` operations, and ends everything."""
        weights: dict[Callable[[], bool], int] = {
            self.add: 6, self.prefill: 14, self.step: 30, self.crop: 8, self.park: 4, self.resume: 2, self.fork: 3,
            self.end: 3, self.lose: 1, self.fail: 3, self.read: 8,
        }  # fmt: skip
        for turn in range(turns):
            (call,) = self.chance.choices(list(weights), list(weights.values()))
            if call():
                self.calls[call.__name__] = self.calls.get(call.__name__, 0) + 1
            self.check(turn % 8 == 0)
        self.check(True)
        for name in list(self.twins):
            self.requests.end(name)
        self.twins.clear()
        self.requests.retire()
        self.cache.reap()
        self.cache.validate()
        gauges = ("sequences", "steps_in_flight", "free_host_pages", "free_index_pages", "free_slots", "free_lanes")
        now = self.cache.stats()
        assert all(getattr(now, name) == getattr(self.start, name) for name in gauges), now

    def check(self, whole: bool) -> None:
        """The lengths of all requests, and the cache's own checks if `whole`."""
        assert sorted(self.requests) == sorted(self.twins)
        for name, twin in self.twins.items():
            assert self.requests[name].length == twin.length, (name, self.requests[name], twin.length)
        if whole:
            self.requests.retire()
            self.cache.validate()

    def one(self, fits: Callable[[Request, Twin], bool]) -> tuple[str, Request, Twin] | None:
        """A request that fits."""
        found = [name for name, twin in self.twins.items() if fits(self.requests[name], twin)]
        name = self.chance.choice(found) if found else None
        return None if name is None else (name, self.requests[name], self.twins[name])

    def fresh(self, count: int) -> list[bytes]:
        return [self.chance.randbytes(self.width) for _ in range(count)]

    def array(self, rows: list[bytes]) -> np.ndarray[Any, Any]:
        """Rows as int32 `[count, words]`."""
        return np.frombuffer(b"".join(rows), np.int32).reshape(len(rows), -1)

    def attempt(self, call: Callable[[], Any]) -> bool:
        """Whether a call that may find a pool exhausted has succeeded."""
        try:
            call()
        except forebay.Exhausted as error:
            assert "request" in str(error)
            return False
        return True

    def add(self) -> bool:
        """A new request, whose prompt's length is known or not."""
        unused = [name for name in NAMES if name not in self.twins]
        if not unused:
            return False
        name, owner = self.chance.choice(unused), Owner()
        prompt = self.chance.choice([0, 0, self.chance.randrange(1, 40)])
        promised = self.chance.choice([None, 60])
        if not self.attempt(lambda: self.requests.add(name, prompt=prompt, promised=promised, owner=owner)):
            return False
        self.twins[name] = Twin([[] for _ in range(self.layers)], owner=owner)
        return self.chunk(name, self.requests[name], self.twins[name], max(prompt, 1))

    def chunk(self, name: str, request: Request, twin: Twin, count: int) -> bool:
        """A chunk of a prompt, for all layers or for some of them."""
        layers = list(range(self.layers))
        self.chance.shuffle(layers)
        twin_before = twin.length
        new = {layer: self.fresh(count) for layer in layers}
        for at, layer in enumerate(layers):
            if at and self.chance.random() < 0.05:
                break
            rows = self.kit.prompt(self.array(new[layer]))
            if at:
                request.prefill(layer, rows)
            elif not self.attempt(lambda: request.prefill(layer, rows)):
                assert request.length == twin_before
                return False
            self.put_keys(request, layer, len(twin.rows[layer]), new[layer])
            twin.rows[layer] += new.pop(layer)
        twin.due = new
        return True

    def put_keys(self, request: Request, layer: int, start: int, rows: list[bytes]) -> None:
        """Index keys of new prompt rows."""
        groups = self.requests.groups
        if self.key_words and layer in groups:
            keys = self.kit.tensor(self.array(rows)[:, : self.key_words])
            request.put_index_keys(groups.index(layer), keys, start)

    def prefill(self) -> bool:
        """The next chunk: of a prompt, of a running request's next turn, or what some layers miss."""
        most = self.cache.info.max_tokens
        states = ("filling", "parked", "running") if self.parks else ("filling",)
        found = self.one(lambda request, twin: request.state in states and twin.length < most - 90)
        if found is None:
            return False
        name, request, twin = found
        if twin.due:
            for layer, rows in twin.due.items():
                request.prefill(layer, self.kit.prompt(self.array(rows)))
                self.put_keys(request, layer, len(twin.rows[layer]), rows)
                twin.rows[layer] += rows
            twin.due = {}
            return True
        return self.chunk(name, request, twin, self.chance.randrange(1, 24))

    def ready(self, request: Request, twin: Twin) -> bool:
        """Whether a request may take part in a step."""
        room = twin.length + self.cache.query_rows <= min(request._admitted, self.cache.info.max_tokens)
        return not twin.due and twin.length >= max(request._prompt, 1) and request.state != "failed" and room

    def batch(self) -> list[tuple[str, int]]:
        names = [name for name, twin in self.twins.items() if self.ready(self.requests[name], twin)]
        self.chance.shuffle(names)
        uniform = self.chance.choice([0, 1, self.cache.query_rows])
        widths = [uniform or self.chance.randrange(1, self.cache.query_rows + 1) for _ in names]
        return list(zip(names, widths))[: self.chance.randrange(1, self.cache.batch + 1)]

    def step(self) -> bool:
        """A step, and the crop of its rejected rows."""
        batch = self.batch()
        if not batch or not self.attempt(lambda: self.decode(batch, None)):
            return False
        for name, width in batch:
            twin = self.twins[name]
            if self.chance.random() < 0.5:
                self.cropped(name, twin.length - self.chance.randrange(width + 1))
        return True

    def fail(self) -> bool:
        """A step in which a layer raises; its requests are cropped, some further than they need."""
        batch = self.batch()
        before = {name: self.twins[name].length for name, _ in batch}
        if not batch:
            return False
        try:
            if not self.attempt(lambda: self.decode(batch, self.chance.randrange(self.layers))):
                return False
        except Boom:
            pass
        for name, _ in batch:
            request = self.requests[name]
            assert request.state == "failed" and request.length == before[name]
            try:
                self.requests.step([name])
                raise AssertionError("a failed request took part in a step")
            except forebay.InvalidState as error:
                assert repr(name) in str(error)
            self.cropped(name, max(before[name] - self.chance.choice([0, 0, 3]), 1))
        return True

    def decode(self, batch: list[tuple[str, int]], fails_in: int | None) -> None:
        """A step, with every selected row compared."""
        query_rows = max(width for _, width in batch)
        with self.requests.step(batch) as step:
            new: list[list[list[bytes]]] = []
            for layer in range(self.layers):
                if layer == fails_in:
                    raise Boom
                new.append([self.fresh(width) for _, width in batch])
                self.layer(step, layer, batch, query_rows, new[layer])
        for row, (name, _) in enumerate(batch):
            for layer in range(self.layers):
                self.twins[name].rows[layer] += new[layer][row]

    def layer(self, step: Any, layer: int, batch: Any, query_rows: int, new: list[list[bytes]]) -> None:
        unused = [bytes(self.width)]
        padded = [self.array(rows + unused * (query_rows - len(rows))) for rows in new]
        if self.requests._layers[layer] == layer:
            self.selected = self.choose(batch, query_rows)
            if self.key_words:
                keys = np.ascontiguousarray(np.stack(padded)[:, :, : self.key_words])
                step.put_index_keys(self.requests.groups.index(layer), self.kit.tensor(keys))
        given = self.selected if self.requests._layers[layer] == layer else None
        write_first = self.chance.random() < 0.7
        if write_first:
            step.write(layer, self.kit.tensor(np.stack(padded)))
        slots = step.select(layer) if given is None else step.select(layer, self.kit.selection(given))
        if not write_first:
            step.write(layer, self.kit.tensor(np.stack(padded)))
        found = self.kit.numpy(step.rows(layer, slots)).view(np.uint8).reshape(len(batch), query_rows, self.k, -1)
        taken = self.kit.numpy(slots).reshape(found.shape[:3])
        for row, (name, width) in enumerate(batch):
            rows = self.twins[name].rows[layer] + new[row]
            for at in range(query_rows):
                for place in range(self.k):
                    position = int(self.selected[row, at, place]) if place < self.selected.shape[2] else -1
                    if position < 0 or at >= width:
                        assert taken[row, at, place] == -1
                        continue
                    assert found[row, at, place].tobytes() == rows[position], (name, layer, at, position)
                    self.compared += 1
        if self.chance.random() < 0.8:
            step.stored(layer)

    def choose(self, batch: list[tuple[str, int]], query_rows: int) -> np.ndarray[Any, Any]:
        """A selection at random, within what each query row sees, with fewer positions now and then."""
        k = self.chance.choice([self.k, self.k, self.k - 3])
        chosen = np.full((len(batch), query_rows, k), -1, self.chance.choice([np.int32, np.int64]))
        for row, (name, width) in enumerate(batch):
            for at in range(width):
                sees = self.twins[name].length + at + 1
                count = min(self.chance.choice([k, k, k // 2]), sees)
                chosen[row, at, :count] = self.chance.sample(range(sees), count)
            # What an engine leaves in rows that it does not use.
            chosen[row, width:] = 1 << 20
        return chosen

    def cropped(self, name: str, length: int) -> None:
        request, twin = self.requests[name], self.twins[name]
        if not self.attempt(lambda: request.crop(length)):
            # A page that a fork shares is replaced, which needs a page, and a lane.
            assert request.state != "running" and length <= request.length
            length = request.length
        for layer, rows in enumerate(twin.rows):
            del rows[length:]
            if layer in twin.due:
                del twin.due[layer][max(length - len(rows), 0) :]
        twin.due = {layer: rows for layer, rows in twin.due.items() if rows}

    def crop(self) -> bool:
        """A crop further back, of a prompt too."""
        found = self.one(lambda request, twin: twin.length > 1)
        if found is None:
            return False
        name, _, twin = found
        self.cropped(name, max(twin.length - self.chance.choice([1, 2, 5, 30]), 1))
        return True

    def park(self) -> bool:
        found = self.one(lambda request, twin: self.parks and request.state != "failed")
        return found is not None and self.attempt(found[1].park)

    def resume(self) -> bool:
        found = self.one(lambda request, twin: self.ready(request, twin) and request.state == "parked")
        return found is not None and self.attempt(found[1].resume)

    def fork(self) -> bool:
        """A copy, which goes on by itself."""
        unused = [name for name in NAMES if name not in self.twins]
        found = self.one(self.ready)
        if not unused or found is None:
            return False
        name, owner = self.chance.choice(unused), Owner()
        if not self.attempt(lambda: found[1].fork(name, owner=owner)):
            return False
        self.twins[name] = Twin([list(rows) for rows in found[2].rows], owner=owner)
        return True

    def end(self) -> bool:
        found = self.one(lambda request, twin: True)
        if found is None:
            return False
        self.requests.end(found[0])
        del self.twins[found[0]]
        return True

    def lose(self) -> bool:
        """The engine forgets a request: the next call ends it."""
        found = self.one(lambda request, twin: True)
        if found is None:
            return False
        del self.twins[found[0]]
        del found
        self.requests.stats()
        return True

    def read(self) -> bool:
        """Rows of the total pool."""
        found = self.one(lambda request, twin: twin.length > 0)
        if found is None:
            return False
        _, request, twin = found
        layer = self.chance.randrange(self.layers)
        rows = twin.rows[layer]
        start = self.chance.randrange(len(rows) + 1)
        end = self.chance.randrange(start, len(rows) + 1)
        assert request.read(layer, start, end).tobytes() == b"".join(rows[start:end])
        self.compared += end - start
        groups = self.requests.groups
        if self.key_words and layer in groups and request.state != "failed":
            found_keys = request.index_keys(groups.index(layer), start, end)
            keys = found_keys if isinstance(found_keys, np.ndarray) else self.kit.numpy(found_keys)
            assert keys.tobytes() == b"".join(row[: 4 * self.key_words] for row in rows[start:end])
        return True
