"""Rows in vLLM's own KV cache: what a run without forebay does.

Each layer has a paged tensor of vLLM, whose entries are a row and an index key. vLLM's block tables say where a
request's tokens are. Nothing of forebay takes part, so this is both what forebay's results are compared with, and the
other side of a comparison of memory.
"""

from __future__ import annotations

from typing import Any, Sequence as Many

import torch

from .batch import Batch, BatchRow


class ResidentRows:
    """A `Store` over vLLM's tensors of the layers (`kv_cache`), `[blocks, tokens of a block, values]`."""

    def __init__(self, layers: Many[Any]) -> None:
        self._layers, self._width = layers, layers[0].width
        self._batch: Any = None
        self._metadata: Any = None
        self._selection: Any = None

    def prompt(self, id: str) -> int | None:
        """See `Store`."""
        return None

    def begin(self, batch: Batch) -> None:
        """Begins a pass, whose metadata is that of the first layer."""
        self._batch, self._metadata = batch, self._layers[0].metadata
        rows = [*batch.prefills, *batch.decodes]
        self._table = {row.id: self._metadata.block_table[row.number] for row in rows}

    def write(self, layer: int, rows: Any, keys: Any) -> None:
        """See `Store`."""
        flat = self._flat(layer)
        places = self._metadata.slot_mapping[: len(rows)]
        flat[places, : self._width] = rows
        if keys is not None:
            flat[places, self._width :] = keys

    def keys(self, layer: int, row: BatchRow) -> Any:
        """See `Store`."""
        return self._flat(layer)[self._places(row, torch.arange(row.end)), self._width :]

    def context(self, layer: int, row: BatchRow) -> Any:
        """See `Store`."""
        return self._flat(layer)[self._places(row, torch.arange(row.end)), : self._width]

    def selected(self, layer: int, row: BatchRow, selection: Any) -> None:
        """Nothing: all rows are resident."""

    def gather(self, layer: int, selection: Any) -> tuple[Any, Any]:
        """See `Store`."""
        if selection is None:
            selection = self._selection
        self._selection = selection
        places = [
            self._places(row, chosen.clamp(min=0)) for row, chosen in zip(self._batch.decodes, selection)
        ]
        return self._flat(layer)[torch.stack(places), : self._width], selection >= 0

    def attended(self, layer: int) -> None:
        """Nothing."""

    def _flat(self, layer: int) -> Any:
        return self._layers[layer].kv_cache.flatten(0, 1)

    def _places(self, row: BatchRow, positions: Any) -> Any:
        size = self._layers[0].kv_cache.shape[1]
        return self._table[row.id][positions // size].long() * size + positions % size
