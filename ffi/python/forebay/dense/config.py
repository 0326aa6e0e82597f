"""The configuration of a dense cache, what it takes, and how many of its pages sequences need."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple, Sequence as Many

from .._library import check_created, ffi, lib, new_text, sized
from ..config import set_fields
from ..errors import InvalidArgument, counted
from ..tensors import index
from .shape import GROUPS_MAX, Shape

_CHOICES = {
    "layout": {"layer_first": lib.FB_DENSE_LAYER_FIRST, "page_first": lib.FB_DENSE_PAGE_FIRST},
    "runs": {"apart": lib.FB_DENSE_RUNS_APART, "together": lib.FB_DENSE_RUNS_TOGETHER},
    "width": {"int64": lib.FB_DENSE_I64, "int32": lib.FB_DENSE_I32},
    "save": {"published": lib.FB_DENSE_SAVE_PUBLISHED, "evicted": lib.FB_DENSE_SAVE_EVICTED},
}
_REQUIRED = ("sequences", "max_tokens")
_OPTIONAL = ("batch", "step_tokens", "query_rows", "steps_in_flight", "micro_batches", "bring_layers")
_PAGES = "whole numbers from 1 to 2^32 - 1"


class Footprint(NamedTuple):
    """Bytes of a dense cache, by purpose."""

    # Device: the pages of all groups, the null pages included.
    pages: int
    # Device: the page tables of the steps' batch rows, and two words for each sequence.
    tables: int
    # Device: the other tensors of steps: slots, positions, lengths and starts.
    tensors: int
    # Device: a GPU's own page tables for the registered host memory, 8 bytes for each 4 KiB.
    host_page_tables: int
    # Host: the page tables of all sequences, pinned.
    host_tables: int
    # Host: the pinned ring of step descriptors and reports.
    step_descriptors: int
    # Host: the pages of the host's tier, pinned.
    host_pages: int


@dataclass(frozen=True)
class Config:
    """The configuration of a dense cache. No part of a cache grows later.

    Attributes:
        shape: the model's shape.
        sequences: the most sequences that may be open at once.
        max_tokens: tokens of the longest sequence: prompt plus promised tokens.
        layout: "layer_first" (each layer has its own memory) or "page_first" (a page has the rows of all layers of its
            group side by side, so it moves in one piece).
        runs: "apart" (K and V are two tensors) or "together" (one tensor: in a page first K of all tokens, then V).
        width: the integers of slots and positions, "int64" or "int32".
        save: when a published page is copied to the host's tier: "published" (by `Cache.save`) or "evicted" (when its
            device page goes to others).
        device_pages: device pages of each group, its null page included; one number: for every group; None: as many as
            `pages_for` gives for `sequences` and `max_tokens`.
        host_pages: host pages of each group: the second tier, which keeps published pages that the device has no room
            for, and the rows of parked sequences; one number: for every group; None: no such tier, and
            `Sequence.park` is always Exhausted.
        batch: the most batch rows of a step; None: `sequences`, at most 32,767.
        step_tokens: the most query rows of a step, of all batch rows together (vLLM: max_num_batched_tokens): at least
            `batch` x `query_rows`; None: 2048, or `batch` x `query_rows` if that is more.
        query_rows: query rows that a decoding sequence may have in a step: 1 + drafts. A batch row with more is a chunk
            of a prompt, and none of its rows can be rejected. None: 1.
        steps_in_flight: the most steps of one sequence in flight; None: 2.
        micro_batches: micro-batches that may each have a step open at the same time; None: 1.
        bring_layers: layers whose pages come back from the host together. A step may then compute its first layers
            while the pages of later ones still come: it must call `Step.arrived` before it writes a layer's new rows.
            None: all layers, for which `Cache.prepare` waits. Not with "page_first", where a page comes back in one
            piece.
        huge_pages, populate: how the host's tier takes its memory. `Cache.fallbacks` lists the options that the system
            refused.
        lock: the same, for the page tables and step descriptors too.
        overcommit: takes host memory though the machine reports less as available.
        numa_node: the NUMA node of the host's tier; None: any.
    """

    shape: Shape
    sequences: int
    max_tokens: int
    layout: str = "layer_first"
    runs: str = "apart"
    width: str = "int64"
    save: str = "published"
    device_pages: int | Many[int] | None = None
    host_pages: int | Many[int] | None = None
    batch: int | None = None
    step_tokens: int | None = None
    query_rows: int | None = None
    steps_in_flight: int | None = None
    micro_batches: int | None = None
    bring_layers: int | None = None
    huge_pages: bool = True
    populate: bool = True
    lock: bool = True
    overcommit: bool = False
    numa_node: int | None = None

    def pages_for(self, sequences: int, tokens: int) -> tuple[int, ...]:
        """The device pages of each group with which `sequences` sequences of `tokens` tokens fit: the null page, each
        sequence's pages with its rows in flight, and for groups with a window the pages of prompt chunks in flight.
        `device_pages` of this configuration do not matter.

        Raises:
            InvalidConfig, Overflow: the message names the field.
        """
        config, _keep = self.declare()
        pages, reason = ffi.new("uint32_t[]", GROUPS_MAX), new_text()
        wanted = index(sequences, "sequences"), index(tokens, "tokens")
        check_created(lib.fb_dense_pages_for(config, *wanted, reason, len(reason), pages), reason)
        return tuple(int(pages[at]) for at in range(config.group_count))

    def footprint(self) -> Footprint:
        """Computes what a `Cache` of this configuration takes, in bytes. Takes nothing.

        Raises:
            InvalidConfig, Overflow: the message names the field.
        """
        config, _keep = self.declare()
        answer, reason = sized("fb_dense_cache_footprint"), new_text()
        check_created(lib.fb_dense_footprint(config, reason, len(reason), answer), reason)
        return Footprint(*(int(getattr(answer, name)) for name in Footprint._fields))

    def declare(self) -> tuple[Any, Any]:
        """An fb_dense_config, and what must live as long.

        Raises:
            InvalidArgument: a value that a field cannot hold.
        """
        if not isinstance(self.shape, Shape):
            raise InvalidArgument("shape", type(self.shape).__name__, "a dense.Shape")
        config = sized("fb_dense_config")
        keep = self.shape.declare(config)
        set_fields(config, {name: getattr(self, name) for name in (*_REQUIRED, *_OPTIONAL)}, _REQUIRED)
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in choices:
                raise InvalidArgument(name, repr(value), " or ".join(map(repr, choices)))
            setattr(config, name, choices[value])
        for name in ("device_pages", "host_pages"):
            for at, pages in enumerate(_by_group(getattr(self, name), config.group_count, name)):
                getattr(config, name)[at] = pages
        if self.numa_node is not None:
            config.numa_node = index(self.numa_node, "numa_node", 0xFFFFFFFE) + 1
        config.memory = (
            (0 if self.huge_pages else lib.FB_MEMORY_SMALL_PAGES)
            | (0 if self.populate else lib.FB_MEMORY_LAZY)
            | (0 if self.lock else lib.FB_MEMORY_UNLOCKED)
            | (lib.FB_MEMORY_OVERCOMMIT if self.overcommit else 0)
        )
        return config, keep


def _by_group(value: Any, groups: int, name: str) -> list[int]:
    """One number for each group; none for the default.

    Raises:
        InvalidArgument: it is something else.
    """
    if value is None:
        return []
    try:
        given = [operator.index(value)] * groups
    except TypeError:
        if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
            raise InvalidArgument(name, repr(value), _PAGES) from None
        if len(value) != groups:
            raise InvalidArgument(name, counted(len(value), "number"), f"{groups}, one a group") from None
        given = list(value)
    return [index(pages, name, least=1) for pages in given]
