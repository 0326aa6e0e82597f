"""Selection traces and request traces: writing them while an engine runs, and reading selections back.

`docs/trace-format.md` describes the format of selection traces.
"""

from __future__ import annotations

import functools
import operator
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, Hashable, NamedTuple, Sequence as Many, TypeVar

import numpy as np

from ._library import cell, check, check_created, ffi, lib, new_text, path_bytes, set_field, sized, text_bytes
from .arrays import Tensor
from .errors import Closed, InvalidArgument, counted
from .tensors import HOST, index, look, words

_TEXTS = ("label", "model", "arch", "score", "mode", "text")
_TEXT_BYTES = 1 << 12
_Self = TypeVar("_Self", bound="_Writer")


class _Writer:
    """The common part of both writers; a context manager that finishes itself."""

    def __init__(self, kind: str, destroy: Any, create: Callable[[Any, int, Any], Any]) -> None:
        made, self._closer = cell(self, kind, destroy)
        reason = new_text()
        check_created(create(reason, len(reason), made), reason)
        self._pointer = made[0]

    def _open(self) -> Any:
        if not self._closer.alive:
            raise Closed("record: it was finished")
        return self._pointer

    def close(self) -> None:
        """Ends the writer without finishing, if it is not finished; idempotent. All that was recorded is in the file.
        """
        self._closer()

    def finish(self) -> int:
        """Finishes the file; returns how much was recorded."""
        raise NotImplementedError

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._closer.alive:
            self.finish()
        self.close()


class TraceWriter(_Writer):
    """Records the selections of one sequence, position by position, into a file that must not exist.

    Args:
        path: the file.
        layers: the number of recorded layers.
        k: positions that one query selects.
        first_position: the position of the first recorded step.
        decode_start: the position of the first decode step; None: `first_position`.
        context: tokens of the longest context; None: as many as were recorded.
        layer_ids: the model's own numbers of the layers, ascending; None: 0, 1, 2 and so on.
        shares: for each layer the index of the layer whose selection it uses; None: every layer selects for itself.
        label, model, arch, score, mode, text: descriptions that readers show.
        group_steps, group_bytes: when groups are written; None: 64 steps, 256 KiB.

    Raises:
        Io: the file exists, or cannot be created.
        InvalidConfig, OutOfRange: the message names the field.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        layers: int,
        k: int,
        first_position: int = 0,
        decode_start: int | None = None,
        context: int | None = None,
        layer_ids: Many[int] | None = None,
        shares: Many[int] | None = None,
        label: str = "",
        model: str = "",
        arch: str = "",
        score: str = "",
        mode: str = "",
        text: str = "",
        group_steps: int | None = None,
        group_bytes: int | None = None,
    ) -> None:
        config = sized("fb_trace_config")
        held: list[Any] = []
        given = {
            "layers": layers,
            "k": k,
            "first_position": first_position,
            "decode_start": first_position if decode_start is None else decode_start,
            "context": context,
            "group_steps": group_steps,
            "group_bytes": group_bytes,
        }
        for name, value in given.items():
            if value is not None:
                set_field(config, name, value)
        for name, numbers in (("layer_ids", layer_ids), ("shares", shares)):
            if numbers is not None:
                if not hasattr(numbers, "__len__") or len(numbers) != layers:
                    raise InvalidArgument(name, repr(numbers), f"{counted(layers, 'number')}, one a layer")
                held.append(_numbers("uint32_t[]", numbers, name))
                setattr(config, name, held[-1])
        for name, said in zip(_TEXTS, (label, model, arch, score, mode, text)):
            if said:
                held.append(ffi.new("char[]", text_bytes(said, name)))
                setattr(config, name, held[-1])
        named = path_bytes(path)
        super().__init__("fb_trace **", lib.fb_trace_destroy, functools.partial(lib.fb_trace_create, named, config))
        self._shape = (len(_own(layers, shares)), k)

    def record(self, position: int, selected: Tensor) -> None:
        """Records the selection of the query at `position`, once it is accepted. Record the positions in order.

        Args:
            selected: int32 `[layers with sets of their own, k]` in host memory, in any order, -1 for none.

        Raises:
            OutOfRange: a position out of order, or invalid sets: nothing is recorded.
        """
        pointer, numbers = self._open(), words(selected, "selected", self._shape, HOST, False)
        at, count = index(position, "position"), self._shape[0] * self._shape[1]
        check(lib.fb_trace_record(pointer, at, numbers, count), pointer)

    def flush(self) -> None:
        """Writes the buffered steps: they survive the process.

        Raises:
            Io: the file cannot be written.
            Closed: the recording was finished.
        """
        check(lib.fb_trace_flush(self._open()), self._pointer)

    def sync(self) -> None:
        """Flushes, and syncs the file to disk.

        Raises:
            As `flush`.
        """
        check(lib.fb_trace_sync(self._open()), self._pointer)

    def finish(self) -> int:
        """Writes the end and syncs the file; returns the number of recorded steps.

        Raises:
            As `flush`; the writer is closed all the same.
        """
        pointer, steps = self._open(), ffi.new("uint32_t *")
        status = lib.fb_trace_finish(pointer, steps)
        try:
            check(status, pointer)
        finally:
            self.close()
        return int(steps[0])


class RequestWriter(_Writer):
    """Records requests as they arrive, as lines of Mooncake's format for request traces.

    Args:
        path: the file, which must not exist.
        block_tokens: tokens of a block.
    """

    def __init__(self, path: str | os.PathLike[str], *, block_tokens: int) -> None:
        named, tokens = path_bytes(path), index(block_tokens, "block_tokens")
        create = functools.partial(lib.fb_requests_create, named, tokens)
        super().__init__("fb_requests **", lib.fb_requests_destroy, create)

    def record(self, *, milliseconds: int, input_tokens: int, blocks: Many[int], output_tokens: int = 0) -> None:
        """Records one request. Record requests in the order of their arrival.

        Args:
            milliseconds: the arrival since the start of the recording.
            input_tokens: tokens of the prompt.
            blocks: ids of the prompt's blocks from its beginning; an id identifies the block and everything before it.
            output_tokens: generated tokens; 0 if the number is not known yet.

        Raises:
            OutOfRange: an arrival before the previous one, more blocks than the prompt has, or a repeated block:
                nothing is recorded.
            InvalidArgument: names the value that is no number.
            Io, Closed: as `flush`.
        """
        pointer, arrival = self._open(), sized("fb_arrival")
        for name, value in (
            ("milliseconds", milliseconds),
            ("input_tokens", input_tokens),
            ("output_tokens", output_tokens),
        ):
            set_field(arrival, name, value)
        ids = _numbers("uint64_t[]", blocks, "blocks")
        arrival.blocks, arrival.block_count = ids, len(ids)
        check(lib.fb_requests_record(pointer, arrival), pointer)

    def flush(self) -> None:
        """Writes the buffered lines: they survive the process.

        Raises:
            Io: the file cannot be written.
            Closed: the trace was finished.
        """
        check(lib.fb_requests_flush(self._open()), self._pointer)

    def sync(self) -> None:
        """Flushes, and syncs the file to disk.

        Raises:
            As `flush`.
        """
        check(lib.fb_requests_sync(self._open()), self._pointer)

    def finish(self) -> int:
        """Syncs the file; returns the number of recorded requests.

        Raises:
            As `flush`; the writer is closed all the same.
        """
        pointer, count = self._open(), ffi.new("uint64_t *")
        status = lib.fb_requests_finish(pointer, count)
        try:
            check(status, pointer)
        finally:
            self.close()
        return int(count[0])


class Header(NamedTuple):
    """The numbers in a selection trace's header."""

    # The number of recorded layers.
    layers: int
    # Positions that one query selects. It selects fewer while the context is shorter.
    k: int
    # The number of recorded positions, including those of the prompt.
    steps: int
    # The number of leading steps that belong to the prompt.
    warm_steps: int
    # The position of the query of step 0.
    first_position: int
    # The position of the first decode step.
    decode_start: int
    # Tokens of the context.
    context: int
    # 1 for a recording that was not finished.
    unfinished: int
    # In an unfinished recording: the bytes after its last complete group, which the reader dropped.
    left_off_bytes: int
    # The number of selected positions in all steps and layers together.
    members: int


class SelectionTrace:
    """A selection trace or recording, compressed or not, fully in memory. Any number of threads may read it.

    Args:
        path: the file.

    Raises:
        Io, BadFormat, BadVersion: the message names the file and the place in it.

    Attributes:
        header: the numbers in its header.
        layer_ids: the model's own numbers of its layers.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        reason, (made, _end) = new_text(), cell(self, "fb_selections **", lib.fb_selections_destroy)
        check_created(lib.fb_selections_open(path_bytes(path), reason, len(reason), made), reason)
        self._pointer = made[0]
        header = sized("fb_trace_header")
        check(lib.fb_selections_header(self._pointer, header), self._pointer)
        self.header = Header(*(int(getattr(header, name)) for name in Header._fields))
        ids, count = ffi.new("uint32_t[]", self.header.layers), ffi.new("uint32_t *")
        status = lib.fb_selections_layer_ids(self._pointer, ids, self.header.layers, count)
        check(status, self._pointer)
        self.layer_ids = [int(ids[at]) for at in range(count[0])]

    def text(self, which: str) -> str:
        """One of its texts: "label", "model", "arch", "score", "mode" or "text".

        Raises:
            InvalidArgument: another name.
        """
        if not isinstance(which, str) or which not in _TEXTS:
            raise InvalidArgument("which", repr(which), " or ".join(map(repr, _TEXTS)))
        text = ffi.new("char[]", _TEXT_BYTES)
        check(lib.fb_selections_text(self._pointer, _TEXTS.index(which), text, _TEXT_BYTES), self._pointer)
        return str(ffi.string(text).decode("utf-8", "replace"))

    def read(self, first_step: int, steps: int, out: Tensor | None = None) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The selections of `steps` steps: int32 `[steps, layers, k]`, ascending in each set, then -1.

        Args:
            out: the destination; None: a new array.

        Raises:
            InvalidArgument: steps that the trace does not have.
        """
        first_step, steps = _whole(first_step, "first_step"), _whole(steps, "steps")
        if steps < 0 or first_step < 0 or first_step + steps > self.header.steps:
            given = f"steps {first_step} to {first_step + steps}"
            raise InvalidArgument("first_step", given, f"steps within 0 to {self.header.steps}")
        shape = (steps, self.header.layers, self.header.k)
        found: Any = np.empty(shape, np.int32) if out is None else out
        if steps:
            numbers = words(found, "out", shape, HOST, True)
            check(lib.fb_selections_read(self._pointer, first_step, steps, numbers), self._pointer)
        return np.asarray(found)


class TraceRecorder:
    """Records the selections of a batch, one file for each sequence.

    In each step call `select` with each layer's selection, and `accept` once the accepted rows are known. Only accepted
    positions are recorded, so a rejected draft leaves nothing. A layer that uses another's selection is not recorded
    and needs no `select`.

    Args:
        folder: the folder of the files `<name>.topk`, which must not exist.
        layers, k: of the selections.
        batch, query_rows: the most of each.
        shares: as in `TraceWriter`.
        describe: further arguments of each `TraceWriter`.

    Raises:
        InvalidArgument: names the value that is no number.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        layers: int,
        k: int,
        batch: int,
        query_rows: int = 1,
        shares: Many[int] | None = None,
        **describe: Any,
    ) -> None:
        self.folder = Path(folder)
        self._declared: dict[str, Any] = {"layers": layers, "k": k, "shares": shares, **describe}
        self._writers: dict[Hashable, TraceWriter] = {}
        given = {"batch": batch, "query_rows": query_rows, "layers": layers, "k": k}
        self._selected = np.full([index(value, name) for name, value in given.items()], -1, np.int32)
        if shares is not None and len(shares) != layers:
            raise InvalidArgument("shares", repr(shares), f"{counted(layers, 'number')}, one a layer")
        self._own = _own(layers, shares)
        # For each layer the rows and query rows of its selection in this step.
        self._told = np.zeros((layers, 2), np.intp)

    def start(self, name: Hashable, first_position: int) -> Path:
        """Begins a sequence's file, whose first recorded query is at `first_position`; returns its path.

        Raises:
            InvalidArgument: a name that is in use, or that cannot be a file's name.
            Io: the file exists, or cannot be created.
        """
        file = f"{name}.topk"
        if name in self._writers or "/" in file:
            raise InvalidArgument("name", repr(name), "a file's name, not in use")
        path = self.folder / file
        self._writers[name] = TraceWriter(path, first_position=first_position, **self._declared)
        return path

    def select(self, layer: int, selection: Tensor) -> None:
        """Copies the selection of a layer of this step: int32 `[rows, query rows, k]` or `[rows, k]`, in host memory,
        -1 for none.

        Raises:
            InvalidArgument: no such layer, or a tensor of another dtype, shape, layout or device.
        """
        batch, query_rows, layers, k = self._selected.shape
        shape = look(selection, "selection").shape
        whole = shape if len(shape) != 2 else (shape[0], 1, shape[1])
        if index(layer, "layer") >= layers:
            raise InvalidArgument("layer", repr(layer), f"0 to {layers - 1}")
        if len(whole) != 3 or whole[0] > batch or whole[1] > query_rows or whole[2] != k:
            expected = f"int32 [rows up to {batch}, query rows up to {query_rows}, {k}]"
            raise InvalidArgument("selection", f"{type(selection).__name__} {list(shape)}", expected)
        address = words(selection, "selection", shape, HOST, False)
        numbers = np.frombuffer(ffi.buffer(address, 4 * int(np.prod(shape))), np.int32)
        self._selected[: whole[0], : whole[1], layer] = numbers.reshape(whole)
        self._told[layer] = whole[:2]

    def accept(self, rows: Many[tuple[Hashable, int, int] | None]) -> None:
        """Records the step. Each batch row has the sequence's name, the position of its first query row, and the number
        of its accepted query rows; None for a row that is not recorded.

        Raises:
            InvalidArgument: a malformed row, or one without a selection of every layer since the last `accept`: nothing
                is recorded.
            OutOfRange: a position out of order, or invalid sets.
        """
        if len(rows) > self._selected.shape[0]:
            raise InvalidArgument("rows", counted(len(rows), "row"), f"at most {self._selected.shape[0]}")
        kept = [(row, *self._row(row, accepted)) for row, accepted in enumerate(rows) if accepted is not None]
        for row, writer, position, count in kept:
            for query_row in range(count):
                writer.record(position + query_row, np.ascontiguousarray(self._selected[row, query_row, self._own]))
        self._told[:] = 0

    def _row(self, row: int, accepted: tuple[Hashable, int, int]) -> tuple[TraceWriter, int, int]:
        """A row of `accept`, checked."""
        try:
            name, position, count = accepted
            writer = self._writers[name]
        except (TypeError, ValueError, KeyError):
            raise self._wrong(row, accepted) from None
        if index(count, f"rows[{row}]") > self._selected.shape[1]:
            raise self._wrong(row, accepted)
        for layer in self._own if count else ():
            rows, query_rows = self._told[layer].tolist()
            if row >= rows or count > query_rows:
                given = f"layer {layer} selected for {counted(rows, 'row')} of {counted(query_rows, 'query row')}"
                wide = f"a selection for its {counted(count, 'query row')}, in every step"
                raise InvalidArgument(f"rows[{row}]", given, wide)
        return writer, index(position, f"rows[{row}]"), count

    @staticmethod
    def _wrong(row: int, accepted: object) -> InvalidArgument:
        return InvalidArgument(f"rows[{row}]", repr(accepted), "(a started name, position, accepted rows)")

    def finish(self, name: Hashable) -> int:
        """Finishes a sequence's file; returns the number of its positions."""
        writer = self._writers.pop(name, None)
        if writer is None:
            raise InvalidArgument("name", repr(name), "one that was started")
        return writer.finish()

    def close(self) -> None:
        """Finishes all files."""
        for name in tuple(self._writers):
            self.finish(name)

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _own(layers: int, shares: Many[int] | None) -> list[int]:
    """The layers with sets of their own, which are recorded."""
    return [layer for layer in range(layers) if shares is None or shares[layer] == layer]


def _whole(value: int, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise InvalidArgument(name, repr(value), "a whole number") from error


def _numbers(kind: str, values: Many[int], name: str) -> Any:
    """Numbers as C has them."""
    try:
        return ffi.new(kind, [operator.index(value) for value in values])
    except (OverflowError, TypeError) as error:
        raise InvalidArgument(name, repr(values), f"whole numbers that {kind[:-2]} holds") from error
