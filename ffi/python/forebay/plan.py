"""The planner: what fits on a GPU, before a cache is made. It is `forebay plan` as a call."""

from __future__ import annotations

from typing import NamedTuple

from ._library import check_created, ffi, lib, new_text, sized
from .config import set_fields
from .errors import InvalidArgument
from .shape import Shape

_NOTES = 32


class Planned(NamedTuple):
    """A plan. Sizes are bytes."""

    # The number of sequences.
    batch: int
    # Slots of each sequence in each layer.
    slots: int
    # Slots as a fraction of the context.
    ratio: float
    # Whether rows are in host memory; otherwise all of them stay on the device.
    offloads: bool
    # Notes about the plan, in sentences.
    notes: tuple[str, ...]
    # The largest batch with all rows on the device.
    resident_batch: int
    # The largest batch with `least_slots` slots for each sequence, or `resident_batch` if that is more.
    most_batch: int
    # Bytes of the GPU that remain after weights, activations and workspace.
    available: int
    # The most tokens, of all open sequences together, whose index keys fit in `available` if no row takes any of it;
    # 0 without index keys.
    live_tokens: int
    # Device: index keys.
    index_key_bytes: int
    # Device: the slots that budgets are made of.
    slot_bytes: int
    # Device: landing slots.
    landing_bytes: int
    # Device: scratch slots.
    scratch_bytes: int
    # Device: bytes that whole mappings leave unused.
    padding_bytes: int
    # Device: residency tables, page tables, lists of fetches and step descriptors.
    table_bytes: int
    # Pinned host memory: rows.
    row_bytes: int
    # Pinned host memory: step descriptors.
    step_descriptor_bytes: int
    # For `Cache`: pages of the total pool; 0 without offload.
    host_pages: int
    # For `Cache`: pages of index keys; 0 without offload.
    index_pages: int
    # For `Cache`: slots of each layer's pool; 0 without offload.
    pool_slots: int
    # For `Cache`: batch rows of one micro-batch; 0 without offload.
    batch_rows: int
    # Device: the GPU's own page tables of the pinned host memory.
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
        batch: sequences on the GPU at the same time; None: as many as fit.
        ratio: slots as a fraction of the context; None: the largest that fits, or, if `batch` is None, the one that
            leaves `least_slots`.
        weights, activations, workspace: bytes of the GPU that are not the cache's.
        host: bytes of host memory; None: as many as the plan needs.
        query_rows, steps_in_flight, micro_batches: as in `Cache`.
        least_slots: the fewest slots of a sequence when the plan fits as many sequences as possible; None: 6400.
        longest: tokens of the longest sequence that the model supports; None: not checked.
        grain: bytes of the device's mapping granularity; None: 2 MiB.
        tables_beside: leaves residency tables, and the GPU's page tables of host memory, out of the sum that has to
            fit.

    Raises:
        OutOfMemory: names what does not fit, with the wanted and the available bytes.
        InvalidConfig: the message names the field.
    """
    if not isinstance(shape, Shape):
        raise InvalidArgument("shape", type(shape).__name__, "a Shape")
    model, config, answer = sized("fb_cache_config"), sized("fb_plan_config"), sized("fb_planned")
    if shape.selects_by_layer is not None:
        raise InvalidArgument("shape.selects_by_layer", "given", "None in a plan, which takes group_layers")
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
