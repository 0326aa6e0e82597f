"""What fits a GPU, before memory is bought: `forebay plan` as a call."""

from __future__ import annotations

from typing import NamedTuple

from ._library import check_created, ffi, lib, new_text, sized
from .config import set_fields
from .errors import InvalidArgument
from .shape import Shape

_NOTES = 32


class Planned(NamedTuple):
    """A plan. Bytes unless said otherwise."""

    # Sequences, slots of each in each layer, and these as a share of the context.
    batch: int
    slots: int
    ratio: float
    # Whether rows stand in host memory; else all of them stay on the device.
    offloads: bool
    # What a reader should know, in sentences.
    notes: tuple[str, ...]
    # The most sequences with all rows on the device, and with `least_slots` slots each.
    resident_batch: int
    most_batch: int
    # What weights, activations and workspace leave of the GPU.
    available: int
    # Tokens that index keys leave room for, whatever the ratio; 0 without them.
    live_tokens: int
    # On the device.
    index_key_bytes: int
    slot_bytes: int
    landing_bytes: int
    scratch_bytes: int
    padding_bytes: int
    table_bytes: int
    # Pinned on the host.
    row_bytes: int
    step_descriptor_bytes: int
    # What `Cache` takes; 0 without offload.
    host_pages: int
    index_pages: int
    pool_slots: int
    batch_rows: int
    # On the device too: the GPU's own page tables of the pinned host memory.
    host_page_table_bytes: int


def plan(
    shape: Shape,
    *,
    gpu: int,
    context: int,
    batch: int | None = None,
    ratio: float | None = None,
    weights: int = 0,
    activations: int = 0,
    workspace: int = 0,
    host: int | None = None,
    query_rows: int = 1,
    steps_in_flight: int | None = None,
    micro_batches: int | None = None,
    least_slots: int | None = None,
    longest: int | None = None,
    grain: int | None = None,
    tables_beside: bool = False,
) -> Planned:
    """Plans sequences of `context` tokens on a GPU of `gpu` bytes.

    Args:
        batch: sequences that share it; None: as many as fit.
        ratio: slots as a share of the context; None: the largest that fits, or the one that leaves `least_slots`.
        weights, activations, workspace: bytes on it that are not the cache's.
        host: bytes of host memory; None: as many as it takes.
        query_rows, steps_in_flight, micro_batches: as of `Cache`.
        least_slots: the fewest that a sequence is left with when as many as possible are wanted; None: 6400.
        longest: tokens that the model was made for; None: not checked.
        grain: bytes of the device's mappings; None: 2 MiB.
        tables_beside: leaves residency tables, and the GPU's page tables of host memory, out of what has to fit.

    Raises:
        OutOfMemory: names what does not fit, wanted and available. InvalidConfig: a field is named.
    """
    if not isinstance(shape, Shape):
        raise InvalidArgument("shape", type(shape).__name__, "a Shape")
    model, config, answer = sized("fb_cache_config"), sized("fb_plan_config"), sized("fb_planned")
    shape.declare(model)
    config.model = model
    numbers = {
        "gpu": gpu,
        "context": context,
        "batch": batch,
        "ratio": ratio,
        "weights": weights,
        "activations": activations,
        "workspace": workspace,
        "host": host,
        "query_rows": query_rows,
        "steps_in_flight": steps_in_flight,
        "micro_batches": micro_batches,
        "least_slots": least_slots,
        "longest": longest,
        "grain": grain,
        "tables_beside": 1 if tables_beside else None,
    }
    set_fields(config, numbers, ("gpu", "context", "query_rows"))
    text = new_text()
    check_created(lib.fb_plan(config, text, len(text), answer), text)
    found = [1 << bit for bit in range(_NOTES) if answer.notes >> bit & 1]
    notes = tuple(str(ffi.string(lib.fb_plan_note_text(bit)).decode()) for bit in found)
    values = {name: getattr(answer, name) for name in Planned._fields if name not in ("notes", "offloads")}
    return Planned(notes=notes, offloads=bool(answer.offloads), **values)
