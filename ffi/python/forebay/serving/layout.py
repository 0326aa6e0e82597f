"""Where a request's tokens are: in pages of the total pool and of index keys, and which layers select."""

from __future__ import annotations

from typing import Any, Iterator

import numpy as np

from ..shape import Shape

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]


def leaders(shape: Shape) -> list[int]:
    """For each layer, draft layers last, the layer whose selection it uses: itself, or the first of its index group."""
    count = shape.all_layers
    if shape.selects_by_layer is not None:
        found: list[int] = []
        for layer, selects in enumerate(shape.selects_by_layer):
            found.append(layer if selects or layer == 0 else found[-1])
        return found
    size, first = max(shape.group_layers, 1), shape.lone_layers
    grouped = range(first, shape.layers) if size > 1 else range(0)
    return [layer - (layer - first) % size if layer in grouped else layer for layer in range(count)]


def stretches(pages: Numbers, page_tokens: int, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The tokens `start` to `end` as stretches without a gap in the pool: (first row in the pool, first token, tokens).

    A sequence mostly takes its pages one after the other, so there are few.
    """
    if end <= start:
        return
    first = start // page_tokens
    used = pages[first : -(-end // page_tokens)]
    breaks = np.flatnonzero(np.diff(used) != 1) + 1
    for begin, stop in zip([0, *breaks.tolist()], [*breaks.tolist(), len(used)]):
        token = max((first + begin) * page_tokens, start)
        count = min((first + stop) * page_tokens, end) - token
        yield int(used[begin]) * page_tokens + token - (first + begin) * page_tokens, token, count


def read(pool: Bytes, pages: Numbers, start: int, end: int, out: Bytes) -> None:
    """Copies the rows of tokens `start` to `end` from a layer's pool `[pages, page tokens, stride]` to `out`."""
    tokens, stride = pool.shape[1:]
    flat, width = pool.reshape(-1, stride), out.shape[1]
    for row, token, count in stretches(pages, tokens, start, end):
        out[token - start : token - start + count] = flat[row : row + count, :width]


def places(pages: Numbers, page_tokens: int, positions: Numbers) -> Numbers:
    """The rows of a pool or of index keys at which tokens are, counted in tokens from its start."""
    found: Numbers = pages[positions // page_tokens] * page_tokens + positions % page_tokens
    return found
