"""A sequence of a dense cache, from its opening to its end, and the names of prompts."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import cache as _cache
from .._library import NULL, cell, check, ffi, lib, sized
from ..arrays import Tensor
from ..lifetime import SequenceBase
from ..sequence import Ticket, TokenKeys, salt_of, tokens_of
from ..tensors import BYTES_MAX, HOST, checked, index, look


class Length(NamedTuple):
    """The lengths of a sequence, in tokens."""

    # Committed, as far as the host can see from retired steps.
    committed: int
    # Rows that the last retired step wrote after them, neither accepted nor rejected yet.
    landed: int
    # Tokens of the sequence's published pages.
    published: int
    # Whether it is arriving (`Cache.arrive`): it has pages, and takes part in no step.
    arriving: bool = False
    # Prompt rows that every layer has while it is arriving; otherwise `committed`.
    filled: int = 0


class HostPage(NamedTuple):
    """A host page of a sequence that arrives."""

    # The page has the rows of positions from `block * page_tokens` on.
    block: int
    # The number of the page in the host's tier (`Cache.host_view`).
    page: int


class Found(NamedTuple):
    """How much of a prompt is there, in tokens."""

    # Leading tokens whose pages are published and in a tier, in whole pages.
    tokens: int
    # Those of them whose pages are in the host's tier alone in some group, and have to come back.
    host_tokens: int


class Names:
    """The block hashes of a prompt's full pages: `Cache.names`. They belong to no thread, and outlive their cache, in
    which alone they find something. Hashing takes longer than finding, so a queue or a router keeps them.
    """

    def __init__(self, cache: _cache.Cache, tokens: Any, keys: TokenKeys, salt: bytes) -> None:
        named, _keep = tokens_of(tokens, keys)
        salt = salt_of(salt)
        self._made, self._end = cell(self, "fb_dense_names **", lib.fb_dense_names_destroy)
        check(lib.fb_dense_names_create(cache._pointer, salt, len(salt), named, self._made), cache._pointer)


class Opened(NamedTuple):
    """A sequence that `Cache.open_shared` or `Cache.arrive` has opened."""

    sequence: Sequence
    # The tokens that it has already. Its first step continues after them.
    found: Found
    # Done when all pages have come back. Steps need no host to wait for it: they do on the device. A transfer does: of
    # an arriving sequence it is done when nothing uses the pages any more, and only then may one write to them.
    ticket: Ticket


class Sequence(SequenceBase):
    """A sequence of a dense cache; a context manager that closes itself. `Cache.open`, `Cache.open_shared`,
    `Cache.arrive` and `fork` make it.

    Attributes:
        cache: the sequence's cache.
    """

    cache: _cache.Cache

    def extend(self, *, prompt: int, promised: int = 0) -> None:
        """Admits more tokens. Steps in flight go on.

        Args:
            prompt: tokens of the prompt in all, not fewer than before.
            promised: tokens that it may decode after them. The sum may not become smaller either.

        Raises:
            Exhausted: names the pages that are too few, with their group.
            OutOfRange: fewer tokens than before, or more than the configuration's `max_tokens`.
            InvalidState: a step of the sequence failed.
            InvalidArgument, Closed. After all of these nothing has changed.
        """
        self.cache._record.make_up()
        tokens = index(prompt, "prompt"), index(promised, "promised")
        check(lib.fb_dense_extend(self._pointer, self._number, *tokens), self._pointer)

    def fork(self, *, promised: int = 0, stream: Any = None) -> tuple[Sequence, Ticket]:
        """Opens a sequence that begins as a copy of this one, whose committed tokens are its prompt.

        The two share full pages; the partial page is copied on `stream`. The child may take part in steps at once: they
        wait for the copy on the device, and the ticket reports its end.

        Args:
            promised: tokens that the child may decode after its prompt.
            stream: see the device.

        Raises:
            Busy: work of this sequence is in flight.
            InvalidState: it is parked, a step of it failed, or it has rows that are neither accepted nor rejected
                (`truncate` it to the intended length).
            Exhausted: as `Cache.open`; nothing is taken.
            DeviceFailed: the last copy of this sequence failed.
            InvalidArgument, OutOfRange, Closed.
        """
        self.cache._record.make_up()
        tokens = index(promised, "promised")
        on, ticket = self.cache.device.stream_of(stream), Ticket()
        child = self.cache._opened(
            lambda number: int(lib.fb_dense_fork(self._pointer, self._number, tokens, on, number, ticket._made)),
            lambda number: Sequence(self.cache, number),
        )
        return child, ticket

    def truncate(self, length: int, stream: Any = None) -> Ticket:
        """Truncates the sequence to `length` tokens.

        Landed rows below the length are accepted, except those of a failed step; landed rows from it on are rejected.
        Pages that other sequences share from the length on are replaced, and `stream` copies the rows of the first of
        them that remain. After the call a sequence whose step failed may take part in steps again.

        Raises:
            InvalidState: it is parked.
            Busy: work of the sequence is in flight.
            OutOfRange: a length beyond the committed and landed rows, or one whose sliding window was given back.
            Exhausted: shared pages cannot be replaced.
            InvalidArgument, Closed. After all of these nothing has changed.
            DeviceFailed: call it again with the same length or a smaller one; until then the sequence can only be
                closed.
        """
        self.cache._record.make_up()
        ticket, on, kept = Ticket(), self.cache.device.stream_of(stream), index(length, "length")
        check(lib.fb_dense_truncate(self._pointer, self._number, kept, on, ticket._made), self._pointer)
        return ticket

    def park(self, accepted: int, stream: Any = None) -> Ticket:
        """Parks the sequence, for example to preempt it: its rows go to the host's tier, and its device pages are free
        for others when the call returns. `resume` brings it back without computing a row again. Until then it can be
        extended and closed.

        Args:
            accepted: how many rows of its last step count, as in `Cache.prepare`; the others are rejected.
            stream: copies the pages that have no copy on the host yet. It is ordered after the engine's own work on the
                sequence. It should be a stream of copies, not of steps: it waits for all copies to the host that were
                enqueued before.

        Returns:
            The ticket of these copies. Nothing needs to wait for it.

        Raises:
            Exhausted: names the host pages that are too few, with their group.
            Busy: work of the sequence is in flight.
            InvalidState: it is parked, or its step failed (`truncate` it first).
            OutOfRange: more accepted rows than landed, or a length whose sliding window was given back: accept all rows
                of a prompt's chunk.
            InvalidArgument, Closed. After all of these nothing has changed.
            DeviceFailed: a copy of the sequence failed. If the device refuses the call half-way, call it again, on
                a stream that is ordered as the first: it goes on where it stopped, and until then the sequence may be
                parked or not.
        """
        self.cache._record.make_up()
        ticket, on, count = Ticket(), self.cache.device.stream_of(stream), index(accepted, "accepted")
        check(lib.fb_dense_park(self._pointer, self._number, count, on, ticket._made), self._pointer)
        return ticket

    def resume(self, stream: Any = None) -> Ticket:
        """Resumes a parked sequence: takes the device pages that it will need, and brings its rows back on `stream`.
        Its steps wait for them on the device; it may enter any micro-batch.

        Returns:
            A ticket that ends when all of its pages are there.

        Raises:
            Exhausted: names the device pages that are too few, with their group.
            InvalidState: the sequence is not parked.
            InvalidArgument, Closed. After all of these nothing has changed.
            DeviceFailed: it stays parked, and keeps the device pages that it has taken: resume it again, or close it.
        """
        self.cache._record.make_up()
        ticket, on = Ticket(), self.cache.device.stream_of(stream)
        check(lib.fb_dense_resume(self._pointer, self._number, on, ticket._made), self._pointer)
        return ticket

    def publish(self, start: int, tokens: Any, *, keys: TokenKeys = None) -> int:
        """Publishes full pages after the first `start` tokens, so that other sequences find them by block hash: those
        whose rows are accepted and whose steps are retired. Call it again after more steps; in a model with sliding
        windows after each chunk of a prompt, because pages before the window are gone.

        Args:
            start: `length.published`.
            tokens: the token ids from there on, as far as they are known.
            keys: as in `Cache.names`.

        Returns:
            Tokens of the sequence's published pages.

        Raises:
            OutOfRange: `start` is not `length.published`, `tokens` exceed what was admitted, or the keys are neither
                none nor one for each full page.
            InvalidState: `Cache.open` opened the sequence without names, it is parked, or its step failed.
            Busy: a copy of its pages is in flight. Steps in flight do not matter.
            DeviceFailed: its last copy failed.
            InvalidArgument, Closed.
        """
        named, _keep = tokens_of(tokens, keys)
        published = ffi.new("uint32_t *")
        first = index(start, "start")
        check(lib.fb_dense_publish(self._pointer, self._number, first, named, published), self._pointer)
        return int(published[0])

    @property
    def length(self) -> Length:
        """The lengths of the sequence, as far as the host has them.

        Raises:
            Closed.
        """
        length = sized("fb_dense_sequence_length")
        check(lib.fb_dense_length(self._pointer, self._number, length), self._pointer)
        numbers = int(length.committed), int(length.landed), int(length.published)
        return Length(*numbers, bool(length.arriving), int(length.filled))

    def store(self, layer: int, run: int, block: int, data: Tensor, *, offset: int = 0) -> None:
        """Copies bytes of a sequence that arrives through the host to a host page: to byte `offset` of what block
        `block` has of a run of a layer. What comes before a sliding window is dropped. `append_layer_in_place` says
        when rows are whole.

        Args:
            layer: the layer.
            run: 0 is K or the latent, 1 is V.
            block: the rows of positions from `block * page_tokens` on.
            data: of any dtype and shape, in host memory, C-contiguous.
            offset: with rows one after the other, token `t` of the block begins at `t` times the row's bytes.

        Raises:
            InvalidState: it does not arrive through the host, or the layer has all rows.
            Busy: the ticket of the arrival is not done.
            OutOfRange: no such layer or run, a block that is shared or behind the prompt, or bytes beyond the block.
            DeviceFailed: the work of the arrival failed.
            InvalidArgument, Closed. An error writes nothing.
        """
        found = look(data, "data")
        found = checked(data, "data", None, found.shape, HOST, False)
        size = found.bits // 8
        for extent in found.shape:
            size *= extent
        place = index(layer, "layer"), index(run, "run"), index(block, "block"), index(offset, "offset", BYTES_MAX)
        address = ffi.cast("void *", found.address)
        check(lib.fb_dense_store(self._pointer, self._number, *place, address, size), self._pointer)

    def append_layer_in_place(self, layer: int, count: int) -> None:
        """Declares that `count` more rows of a layer are in place, in the order of their tokens: in the device pages
        (`pages`) of a sequence that arrives, or in its host pages. Rows before a sliding window count too. Work on
        streams that writes such rows need not have ended, but the stream of `join` is ordered after it.

        Raises:
            InvalidState: it is not arriving.
            OutOfRange: no such layer, or rows beyond the prompt.
            Busy, DeviceFailed: through the host, as `store`.
            InvalidArgument, Closed.
        """
        which, rows = index(layer, "layer"), index(count, "count")
        check(lib.fb_dense_append_layer_in_place(self._pointer, self._number, which, rows), self._pointer)

    def bring_layer(self, layer: int, stream: Any = None) -> None:
        """Brings a layer that has all rows up, from the host pages of a sequence that arrives through them. Layers may
        go up in any order, and `join` brings those that are left.

        Args:
            layer: the layer.
            stream: one of copies; see the device.

        Raises:
            InvalidState: it does not arrive through the host, or the layer lacks rows or was brought before.
            OutOfRange: no such layer.
            DeviceFailed: an earlier copy failed; or the device refuses the call half-way: call it again.
            InvalidArgument, Closed.
        """
        which, on = index(layer, "layer"), self.cache.device.stream_of(stream)
        check(lib.fb_dense_bring_layer(self._pointer, self._number, which, on), self._pointer)

    def join(self, stream: Any = None) -> Ticket:
        """Ends the arrival of a sequence whose layers have all rows: it may take part in steps from now on, in any
        micro-batch. They wait on the device for what still comes up. While a writer may still write to its pages, do
        not join, but `abort`.

        Args:
            stream: see the device. If the transfer writes to device pages, it is ordered after the work on streams that
                wrote them.

        Returns:
            A ticket that ends when all rows are there.

        Raises:
            InvalidState: it is not arriving, or a layer lacks rows.
            DeviceFailed: the work of the arrival failed; or the device refuses the call half-way: call it again.
            InvalidArgument, Closed.
        """
        self.cache._record.make_up()
        ticket, on = Ticket(), self.cache.device.stream_of(stream)
        check(lib.fb_dense_join(self._pointer, self._number, on, ticket._made), self._pointer)
        return ticket

    def host_pages(self, group: int = 0) -> list[HostPage]:
        """The host pages of a sequence that arrives through them, in the order of their blocks; none for one whose
        transfer writes to device pages. One that writes to them by itself waits for the ticket of the arrival first.

        Raises:
            OutOfRange: no such group.
            InvalidArgument, Closed.
        """
        which, count = index(group, "group"), ffi.new("uint32_t *")
        check(lib.fb_dense_host_pages(self._pointer, self._number, which, NULL, 0, count), self._pointer)
        pages = ffi.new("fb_dense_host_page[]", max(count[0], 1))
        check(lib.fb_dense_host_pages(self._pointer, self._number, which, pages, count[0], count), self._pointer)
        return [HostPage(int(pages[at].block), int(pages[at].page)) for at in range(count[0])]

    def pages(self, group: int = 0) -> list[int]:
        """The sequence's device pages in a group, in token order: number `b` has the rows of positions from `b *
        page_tokens` on. Pages before a sliding window are 0, the null page. A parked sequence has none.

        Raises:
            OutOfRange: no such group.
            InvalidArgument, Closed.
        """
        which, count = index(group, "group"), ffi.new("uint32_t *")
        check(lib.fb_dense_pages(self._pointer, self._number, which, NULL, 0, count), self._pointer)
        pages = ffi.new("uint32_t[]", max(count[0], 1))
        check(lib.fb_dense_pages(self._pointer, self._number, which, pages, count[0], count), self._pointer)
        return [int(pages[at]) for at in range(count[0])]
