"""Recordings of what real requests select, for `forebay replay` and `forebay simulate`.

One file holds one request, because a recording follows one sequence. The first recorded request has the given path, a
later one the same with its number before the ending: `run.topk.zst`, `run-1.topk.zst`, `run-2.topk.zst`. A request that
is cropped to before its last recorded position goes on in a file of its own. A selection is recorded once its row is
accepted, so a rejected draft leaves nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ForebayError, Io
from ..trace import TraceWriter

_ENDINGS = (".topk.zst", ".topk")
Selected = np.ndarray[Any, np.dtype[np.int32]]


class Recorder:
    """Writes the files of one `Requests`."""

    def __init__(self, path: str | os.PathLike[str], layers: int, k: int, leaders: list[int]) -> None:
        self._path, self._files = Path(path), 0
        if self._path.exists():
            raise Io(f"record: {self._path} exists; a recording never overwrites a file")
        shares = None if leaders == list(range(layers)) else leaders
        self._declared: dict[str, Any] = {"layers": layers, "k": k, "shares": shares, "mode": "decode"}

    def begin(self, name: str, position: int) -> TraceWriter:
        """Begins the next file, whose first query is at `position`."""
        number, self._files = self._files, self._files + 1
        path = self._path
        if number:
            ending = next((end for end in _ENDINGS if path.name.endswith(end)), path.suffix)
            path = path.with_name(f"{path.name[: len(path.name) - len(ending)]}-{number}{ending}")
        return TraceWriter(path, first_position=position, label=name, **self._declared)


class Recording:
    """The recording of one request: the selections of its last step, until it is known how many rows count."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name
        self._writer: TraceWriter | None = None
        self._next = 0
        self._first, self._pending = 0, np.empty((0, 0, 0), np.int32)

    def step(self, first: int, selected: Selected) -> None:
        """Notes a finished step: the position of its first query row, and `[query rows, index groups, k]`."""
        self._first, self._pending = first, selected

    def accept(self, length: int) -> None:
        """Records the rows of the noted step below `length`."""
        pending, self._pending = self._pending, np.empty((0, 0, 0), np.int32)
        for row in range(min(length - self._first, len(pending))):
            position = self._first + row
            if self._writer is None or position != self._next:
                self.finish()
                self._writer = self._recorder.begin(self._name, position)
            try:
                self._writer.record(position, np.ascontiguousarray(pending[row]))
            except ForebayError as error:
                error.args = (f"recording of request {self._name}: {error.args[0]}", *error.args[1:])
                raise
            self._next = position + 1

    def finish(self) -> None:
        """Finishes its file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.finish()
