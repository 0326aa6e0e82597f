"""The batch of one forward pass of vLLM, and where its rows are kept."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, Sequence as Many

import torch


class BatchRow(NamedTuple):
    """A request's part of a pass."""

    # vLLM's id of the request.
    id: str
    # Its number in vLLM's batch.
    number: int
    # Its first token in the pass's flat list of tokens, and their number.
    first: int
    width: int
    # The first token's position: tokens of the request before it.
    start: int
    # Tokens that it computes as a prompt.
    prompt: int

    @property
    def end(self) -> int:
        """Tokens of the request after the pass."""
        return self.start + self.width


class Batch:
    """The requests of a pass, those that prefill and those that decode.

    A request decodes if its tokens are beyond its prompt and not more than a decode step has. A request that was
    preempted and computes its answer again comes with more at once, and prefills.

    Attributes:
        prefills, decodes: the requests.
        at: int64 `[decodes, query rows]`: the decoding tokens in the flat list; a request with fewer repeats its last.
        used: bool, the same extents: which of them are tokens of their own.
    """

    def __init__(self, rows: Many[BatchRow], most: int) -> None:
        self.decodes = [row for row in rows if row.start >= row.prompt and row.width <= most]
        self.prefills = [row for row in rows if row not in self.decodes]
        widest = max((row.width for row in self.decodes), default=0)
        places = torch.arange(widest).expand(len(self.decodes), widest)
        widths = torch.tensor([row.width for row in self.decodes], dtype=torch.int64)[:, None]
        first = torch.tensor([row.first for row in self.decodes], dtype=torch.int64)[:, None]
        self.used = places < widths
        self.at = first + torch.minimum(places, widths - 1)


class Store(Protocol):
    """Where rows and index keys are kept. Layers are counted from 0; calls come layer after layer."""

    def prompt(self, id: str) -> int | None:
        """The tokens that a request computes as a prompt; None: as many as vLLM says."""

    def begin(self, batch: Batch) -> None:
        """Begins a pass."""

    def write(self, layer: int, rows: Any, keys: Any) -> None:
        """Keeps a layer's new rows, `[tokens, row]`, and index keys, `[tokens, values]`, or None in a layer that
        another one selects for."""

    def keys(self, layer: int, row: BatchRow) -> Any:
        """The index keys of a request after the pass's tokens, `[row.end, values]`."""

    def context(self, layer: int, row: BatchRow) -> Any:
        """The rows of a request that prefills, those of the pass included: `[row.end, values]`."""

    def selected(self, layer: int, row: BatchRow, selection: Any) -> None:
        """Tells what the last tokens of a prompt selected, int64 `[tokens, k]`."""

    def gather(self, layer: int, selection: Any) -> tuple[Any, Any]:
        """The rows that decoding tokens selected.

        Args:
            layer: the layer.
            selection: int64 `[decodes, query rows, k]`, -1 for none; None in a layer that another one selects for.

        Returns:
            `[decodes, query rows, k, values]`, and whether each was selected.
        """

    def attended(self, layer: int) -> None:
        """Tells that a layer is done."""
