"""A small inference engine: top-k sparse decode of SmolLM2, several sequences a step, with drafts.

`Forward` is a step's arithmetic, cut into pieces between which forebay works. A cache drives it. `Resident`, in this
file, keeps every row in plain arrays. `offloaded.Offloaded` keeps them in forebay and shows how to embed it. `Decoder`
drafts, verifies and counts tokens, and works with either cache.

`arrays` decides where rows are and what attends to them, NumPy or torch on a GPU, the same for both caches. Bitwise
comparisons run in one process: with the same shapes and number of threads, a matrix product of the same numbers has the
same bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from arrays import Array, Arrays, Numpy
from smollm2 import Floats, Halves, Ids, Model, Prompt, merge, top_k

LOOKUP = 3
"""The longest n-gram by which a draft is looked up, in tokens."""
SPARE = 16
"""Tokens of a text beyond the promised ones, because a last step may give more. It bounds the query rows."""


@dataclass(frozen=True)
class Request:
    """A request: the rows of all prompt tokens but the last one, which the first step takes in."""

    tokens: Sequence[int]
    prompt: Prompt
    promised: int  # tokens it may decode
    follow: Sequence[int] = ()  # how the text continues, if it is read instead of written


def requests(
    model: Model, text: Sequence[int], *, context: int, batch: int, promised: int, warm_up: int = 32
) -> list[Request]:
    """Prefilled prompts of ``context`` tokens from a text. If there are several, they share their first half, computed
    once.

    Args:
        model: prefills the prompts.
        text: token ids, at least `needed` of them.
        context: tokens of each prompt.
        batch: the number of prompts.
        promised: tokens that each may decode.
        warm_up: the number of last positions whose queries are kept.
    """
    shared = context // 2 if batch > 1 else 0
    begin = model.prefill(text[:shared])
    made = []
    for number in range(batch):
        own = shared + number * (context - shared)
        end = own + context - shared
        tokens = [*text[:shared], *text[own:end]]
        # The first step takes the last token and computes its row.
        prompt = model.prefill(tokens[:-1], past=begin, last=min(warm_up, context - 1))
        made.append(Request(tokens, prompt, promised, text[end : end + promised + SPARE]))
    return made


def needed(*, context: int, batch: int, promised: int) -> int:
    """The number of text tokens that `requests` takes."""
    shared = context // 2 if batch > 1 else 0
    return shared + batch * (context - shared) + promised + SPARE


def english() -> str:
    """English prose that every Python has: chapters of the language reference, which Python's help prints."""
    topics = importlib.import_module("pydoc_data.topics").topics
    return "\n".join(topics[name] for name in sorted(topics, key=lambda name: (-len(topics[name]), name)))


class Cache(Protocol):
    """Keeps the rows of sequences. A sequence is a number from 0 in the order of opening."""

    def step(self, rows: Sequence[int], accepted: Sequence[int], tokens: Ids) -> Floats:
        """Decodes query rows ``tokens`` ``[n, q]`` of the sequences ``rows``; returns logits ``[n, q, vocabulary]``.

        ``accepted`` is the number of accepted query rows of each sequence's last step; the others are dropped.
        """

    def end(self, row: int) -> None:
        """Ends a sequence that has all its tokens."""


class Store(Protocol):
    """The part of a cache that `Forward` uses inside a layer. Batch rows are numbered as in the step."""

    arrays: Arrays

    def put_index_keys(self, layer: int, keys: Halves) -> None:
        """Stores the index keys of the step's query rows: ``[n, q, kv_width]``."""

    def index_keys(self, layer: int, row: int, count: int) -> Halves:
        """The index keys of a sequence's first ``count`` positions."""

    def put_rows(self, layer: int, keys: Floats, values: Floats) -> None:
        """Stores the keys and values of the step's query rows: ``[n, q, kv_width]`` each."""

    def rows(self, layer: int, slots: Array) -> tuple[Array, Array]:
        """Keys and values at ``[n, q, k]`` slots, as ``[n * q, k, kv_width]``; anything where a slot is -1."""


class Forward:
    """One step's arithmetic in pieces, named as forebay names an engine's work."""

    def __init__(self, model: Model, store: Store, lengths: Ids, tokens: Ids, k: int) -> None:
        self.model, self.store, self.k = model, store, k
        self.shape = tokens.shape
        self.positions: Ids = (lengths[:, None] + np.arange(tokens.shape[1])).astype(np.int32)
        self.hidden = model.embed(tokens.reshape(-1))
        self.queries = self.keys = self.values = np.empty(0, np.float32)
        self.parts: list[tuple[Floats, Floats]] = []

    def project(self, layer: int) -> None:
        """Computes queries, keys and values of the step's rows, and stores their index keys."""
        flat = self.positions.reshape(-1)
        self.queries, self.keys, self.values = self.model.project(layer, self.hidden, flat)
        self.store.put_index_keys(layer, self._by_row(self.keys).astype(np.float16))

    def index(self, layer: int, selection: Array, first: int = 0, count: int | None = None) -> None:
        """Selects the positions that each query row reads: ``[n, q, k]``. A row sees earlier positions and its own.

        ``first`` and ``count`` name the batch rows; by default all.
        """
        queries = self.queries.reshape(*self.shape, *self.queries.shape[1:])
        for row in range(first, self.shape[0] if count is None else first + count):
            visible = self.positions[row] + 1
            keys = self.store.index_keys(layer, row, int(visible[-1]))
            self.store.arrays.put(selection, row, top_k(queries[row], keys, visible, self.k))

    def prepare(self, layer: int) -> None:
        """Stores the step's new rows, which its attention may select."""
        self.store.put_rows(layer, self._by_row(self.keys), self._by_row(self.values))

    def attend(self, layer: int, slots: Array) -> None:
        """Attends to the rows at some slots: all selected rows, or one list of split attention."""
        keys, values = self.store.rows(layer, slots)
        valid = slots.reshape(-1, slots.shape[-1]) >= 0
        self.parts.append(self.store.arrays.attend(self.queries, keys, values, valid))

    def rest(self, layer: int) -> None:
        """Merges the results of split attention, if there are several, and ends the layer."""
        attended = self.parts[0][0] if len(self.parts) == 1 else merge(self.parts)
        self.hidden = self.model.rest(layer, self.hidden, attended)
        self.parts = []

    def logits(self) -> Floats:
        """``[n, q, vocabulary]``, after the last layer."""
        return self.model.logits(self.hidden).reshape(*self.shape, -1)

    def _by_row(self, values: Floats) -> Floats:
        return values.reshape(*self.shape, -1)


class Resident:
    """Every row of every sequence in plain arrays, as in an engine without forebay."""

    def __init__(
        self,
        model: Model,
        requests: Sequence[Request],
        *,
        top_k: int,
        query_rows: int = 1,
        arrays: Arrays | None = None,
    ) -> None:
        self.model, self.k = model, top_k
        self.arrays: Arrays = arrays or Numpy()
        longest = max(request.prompt.keys.shape[1] + request.promised for request in requests) + query_rows
        shape = (model.layers, len(requests), longest, model.kv_width)
        self.all_keys, self.all_values = self.arrays.zeros(shape), self.arrays.zeros(shape)
        self.all_index_keys = np.zeros(shape, np.float16)
        self.lengths = np.array([request.prompt.keys.shape[1] for request in requests], np.int32)
        for number, (request, length) in enumerate(zip(requests, self.lengths, strict=True)):
            own = (slice(None), number, slice(length))
            self.arrays.put(self.all_keys, own, request.prompt.keys)
            self.arrays.put(self.all_values, own, request.prompt.values)
            self.all_index_keys[:, number, :length] = request.prompt.keys
        self.batch = np.arange(0)
        self.positions: Ids = np.empty(0, np.int32)

    def step(self, rows: Sequence[int], accepted: Sequence[int], tokens: Ids) -> Floats:
        """See `Cache`."""
        self.batch = np.asarray(rows)
        self.lengths[self.batch] += np.asarray(accepted, np.int32)
        forward = Forward(self.model, self, self.lengths[self.batch], tokens, self.k)
        self.positions = forward.positions
        selection: Ids = np.empty((*tokens.shape, self.k), np.int32)
        for layer in range(self.model.layers):
            forward.project(layer)
            forward.index(layer, selection)
            forward.prepare(layer)
            forward.attend(layer, self.arrays.own(selection))  # A position is its own slot.
            forward.rest(layer)
        return forward.logits()

    def end(self, row: int) -> None:
        """See `Cache`. All sequences share the arrays."""

    def put_index_keys(self, layer: int, keys: Halves) -> None:
        """See `Store`."""
        self.all_index_keys[layer, self.batch[:, None], self.positions] = keys

    def index_keys(self, layer: int, row: int, count: int) -> Halves:
        """See `Store`."""
        return self.all_index_keys[layer, self.batch[row], :count]

    def put_rows(self, layer: int, keys: Floats, values: Floats) -> None:
        """See `Store`."""
        at = (self.batch[:, None], self.positions)
        self.arrays.put(self.all_keys[layer], at, keys)
        self.arrays.put(self.all_values[layer], at, values)

    def rows(self, layer: int, slots: Array) -> tuple[Array, Array]:
        """See `Store`."""
        at = (self.batch[:, None, None], slots.clip(min=0))
        shape = (-1, slots.shape[-1], self.model.kv_width)
        keys, values = (self.arrays.rows(run[layer], *at) for run in (self.all_keys, self.all_values))
        return keys.reshape(shape), values.reshape(shape)


@dataclass(frozen=True)
class Decoded:
    """The result of a step."""

    rows: tuple[int, ...]  # the sequences that took part
    tokens: tuple[tuple[int, ...], ...]  # the new tokens of each, one at least
    rejected: int  # drafts, of all rows
    logits: Floats  # [n, q, vocabulary]


class Decoder:
    """Decodes requests in one batch, one token and ``query_rows - 1`` drafts of each sequence a step.

    A draft is the token that followed the last occurrence of the same few tokens. It is accepted if the model itself
    predicts it. Sequences that have all their tokens leave the batch.
    """

    def __init__(
        self,
        cache: Cache,
        requests: Sequence[Request],
        *,
        query_rows: int = 1,
        read: bool = False,
    ) -> None:
        """Takes ``requests`` in the order in which the cache has opened them.

        Args:
            cache: keeps the rows.
            query_rows: 1 + drafts.
            read: takes the tokens that follow a request's text, so that a text is read instead of written; otherwise
                the likeliest tokens.
        """
        self.cache, self.query_rows = cache, query_rows
        self.follow = [request.follow for request in requests] if read else None
        self.histories = [list(request.tokens) for request in requests]
        self.starts = [len(request.tokens) for request in requests]
        self.left = [request.promised for request in requests]
        self.accepted = [0] * len(requests)
        self.lookups = [Lookup(history) for history in self.histories]

    def __iter__(self) -> Iterator[Decoded]:
        """Steps until every sequence has its tokens."""
        while any(self.left):
            yield self.step()

    def step(self) -> Decoded:
        """Runs one step of the sequences that still need tokens."""
        rows = [row for row, left in enumerate(self.left) if left]
        tokens = np.array([self._query(row) for row in rows], np.int32)
        logits = self.cache.step(rows, [self.accepted[row] for row in rows], tokens)
        fresh = [self._verify(row, tokens[at, 1:], logits[at]) for at, row in enumerate(rows)]
        rejected = 0
        for row, new in zip(rows, fresh, strict=True):
            rejected += self.query_rows - len(new)
            self.accepted[row] = len(new)
            # The last step may find one token more than needed.
            self.left[row] -= min(len(new), self.left[row])
            self.histories[row] += new
            self.lookups[row].extend()
            if not self.left[row]:
                self.cache.end(row)
        return Decoded(tuple(rows), tuple(tuple(new) for new in fresh), rejected, logits)

    def _query(self, row: int) -> list[int]:
        """A sequence's last token and its drafts."""
        return [self.histories[row][-1], *self.lookups[row].draft(self.query_rows - 1)]

    def _verify(self, row: int, drafts: Ids, logits: Floats) -> list[int]:
        """The new tokens of a row: the model's tokens up to its first disagreement with the drafts."""
        new: list[int] = []
        for at, answer in enumerate(logits):
            new.append(self._next(row, len(new), answer))
            if at == len(drafts) or new[-1] != drafts[at]:
                break
        return new

    def _next(self, row: int, ahead: int, logits: Floats) -> int:
        if self.follow is None:
            return int(logits.argmax())
        done = len(self.histories[row]) - self.starts[row]
        return int(self.follow[row][done + ahead])


class Lookup:
    """The last place of each short token sequence in a history. It gives drafts at no cost, which are good where a text
    repeats itself.
    """

    def __init__(self, history: list[int]) -> None:
        self.history = history
        self.seen: dict[tuple[int, ...], int] = {}
        self.done = 0
        self.extend()

    def extend(self) -> None:
        """Adds the tokens that were appended to the history. Its last tokens have no follower yet."""
        for end in range(max(self.done, 1), len(self.history)):
            for length in range(1, min(LOOKUP, end) + 1):
                self.seen[tuple(self.history[end - length : end])] = end
        self.done = len(self.history)

    def draft(self, count: int) -> list[int]:
        """``count`` tokens; the last token repeated where no sequence is found."""
        for length in range(min(LOOKUP, len(self.history)), 0, -1):
            at = self.seen.get(tuple(self.history[-length:]))
            if at is not None:
                found = self.history[at : at + count]
                return found + [self.history[-1]] * (count - len(found))
        return [self.history[-1]] * count
