"""Arguments of FlashMLA's sparse decode, and block tables.

From FlashMLA (its README and interface, as of 2026-04): `indices` is int32 `[batch, seq_q, topk]`, -1 for none, and an
index is block x page size + offset; the cache is `[blocks, 64, 1, row]`; on SM90 topk is a multiple of 64, and the FP8
row is exactly 656 bytes. From forebay: a slab is `[blocks, 64, row]` and slot s is at block s // 64, offset s % 64. So
a step's `slots` are FlashMLA's indices without any conversion.

Block tables are for kernels that read index keys by pages (DeepGEMM's paged MQA logits and similar ones).
"""

from __future__ import annotations

from typing import Any, Sequence as Many

import numpy as np

from ._library import NULL, check, ffi, lib
from .cache import Cache
from .config import SLOT_BLOCK
from .errors import InvalidArgument, counted
from .sequence import Sequence
from .step import Buffers
from .tensors import describe, index, look

# Bytes of rows that FlashMLA's sparse decode reads: FP8 with scales, and BF16.
ROW_BYTES = (656, 1152)
TOPK_MULTIPLE = 64


def indices(slots: Any) -> Any:
    """FlashMLA's `indices` from a step's `slots`: the same tensor, checked.

    Args:
        slots: int32 `[rows, query rows, top_k]`, as `Step.layer` fills it.

    Raises:
        InvalidArgument: not int32, not three axes, or a top_k that is no multiple of 64. Then give the cache a shape
            with such a `top_k`, and fill selections with -1.
    """
    found = look(slots, "slots")
    if found.dtype != "int32" or len(found.shape) != 3 or found.shape[2] % TOPK_MULTIPLE:
        expected = f"int32 [rows, query rows, a multiple of {TOPK_MULTIPLE}]"
        raise InvalidArgument("slots", describe(found.dtype, found.shape), expected)
    return slots


def split_indices(buffers: Buffers, which: int) -> Any:
    """FlashMLA's `indices` for one index list of split attention: index list 0 has the resident rows, index list 1 + w
    those of attention wave w.

    The kernel runs the full width and gives no meaning to a row without a valid index (its LSE is +inf): take a row's
    validity from `buffers.counts[which]` when the results are merged.

    Raises:
        InvalidArgument: buffers without lists, or no such list.
    """
    if buffers.lists is None or not 0 <= index(which, "which") <= buffers.cache.info.attention_waves:
        expected = f"0 to {buffers.cache.info.attention_waves}, of buffers with lists"
        raise InvalidArgument("which", repr(which), expected)
    return indices(buffers.lists[which])


def kv_cache(cache: Cache, layer: int) -> Any:
    """A layer's slab as FlashMLA takes it: uint8 `[blocks, 64, 1, row bytes]`, a view as of `Cache.slab`. It stays the
    same for the cache's life, so take it once.

    On CUDA: `torch.from_dlpack(kv_cache(cache, layer)).view(torch.float8_e4m3fn)`, or `torch.bfloat16` for rows of 1152
    bytes.

    Raises:
        InvalidArgument: rows of other sizes, in two runs, or padded blocks.
    """
    widths, info = cache.shape.row_bytes, cache.info
    if widths[0] not in ROW_BYTES or widths[1] or info.block_bytes != SLOT_BLOCK * widths[0]:
        given = f"rows of {widths} bytes, blocks of {info.block_bytes}"
        raise InvalidArgument("cache", given, f"rows of {' or '.join(map(str, ROW_BYTES))} bytes in one run, unpadded")
    slab = look(cache.slab(layer), "slab")
    shape = (slab.shape[0], SLOT_BLOCK, 1, widths[0])
    return cache.device.view(slab.address, shape)


def block_table(
    sequences: Many[Sequence], *, pages: int | None = None, fill: int = 0, out: Any = None
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The index-key pages of sequences: int32 `[sequences, pages]`, where page p of a sequence has the tokens from p x
    page_tokens on.

    A sequence has all its pages from the start. So the table changes when a sequence is opened or truncated, not from
    step to step, and an engine makes it when its batch changes.

    Args:
        sequences: the batch's sequences, in its order.
        pages: width; None: that of the longest sequence.
        fill: the value after a sequence's last page. 0 is a page that may be read and is not used.
        out: the destination, int32 of that shape or wider; additional columns are filled.

    Raises:
        InvalidArgument: a sequence with more pages than the width, or an `out` that does not fit.
    """
    rows = [_index_pages(sequence, f"sequences[{at}]") for at, sequence in enumerate(sequences)]
    longest = max((len(row) for row in rows), default=0)
    width = longest if pages is None else index(pages, "pages")
    if out is None:
        out = np.empty((len(rows), width), np.int32)
    elif not isinstance(out, np.ndarray) or out.dtype != np.int32 or out.ndim != 2 or not out.flags.writeable:
        raise InvalidArgument("out", type(out).__name__, f"a writable int32 array [{len(rows)}, {width}]")
    if longest > out.shape[1] or longest > width or len(rows) > out.shape[0]:
        given = f"int32 {list(out.shape)}, pages {width}"
        room = f"room for {counted(len(rows), 'sequence')} of {counted(longest, 'page')}"
        raise InvalidArgument("pages", given, room)
    out[:] = fill
    for at, row in enumerate(rows):
        out[at, : len(row)] = row
    return np.asarray(out)


def _index_pages(sequence: Sequence, name: str) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """A sequence's pages of index keys, without an object for each."""
    if not isinstance(sequence, Sequence):
        raise InvalidArgument(name, type(sequence).__name__, "a Sequence")
    count = ffi.new("uint32_t *")
    check(lib.fb_pages(sequence._pointer, sequence._number, NULL, 0, count), sequence._pointer)
    pages = np.empty((count[0], 2), np.uint32)
    room = ffi.from_buffer("fb_page[]", pages, True)
    check(lib.fb_pages(sequence._pointer, sequence._number, room, count[0], count), sequence._pointer)
    return pages[: count[0], 1]
