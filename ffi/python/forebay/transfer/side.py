"""Where instances keep rows, who their ranks are, and how these meet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Sequence as Many

from .._library import NULL, check_created, ffi, lib, new_text, sized, text_bytes
from ..errors import InvalidArgument
from ..links import milliseconds
from ..tensors import BYTES_MAX, index

_SPLITS = {"heads": lib.FB_TRANSFER_SPLIT_HEADS, "tokens": lib.FB_TRANSFER_SPLIT_TOKENS}
_FABRICS = {"tcp": lib.FB_TRANSFER_TCP, "shm": lib.FB_TRANSFER_SHM}


class Rank(NamedTuple):
    """A rank of an instance."""

    # A number that the instance's ranks share and no other instance has. One that starts again has another one.
    instance: int
    # The replica (data parallel attention).
    replica: int = 0
    # The pipeline stage.
    stage: int = 0
    # The place in the stage.
    lane: int = 0


class Use(NamedTuple):
    """A use of a receiver's pages, from `Receiver.grant` to `Whole` or `Failed`."""

    # The number of this try at the request.
    request: int
    # Above those of all uses before.
    generation: int


@dataclass(frozen=True)
class Component:
    """What every token has under one name in a layer: latents, rope keys, index keys, K or V.

    Attributes:
        name: the name, which both sides use.
        dtype: the type of the numbers, which both sides call the same. Rows are never converted.
        head_bytes: bytes of one head of a token.
        heads: KV heads of the model; 1 for what all heads share, such as MLA's latents and index keys.
    """

    name: str
    dtype: str
    head_bytes: int
    heads: int = 1


@dataclass(frozen=True)
class ComponentPlace:
    """Where a component of a layer is in the pages of a rank: head `h` of the rank's own heads of the page's token `t`
    is at byte `offset + t * token_stride + h * head_stride` of the page.

    Attributes:
        layer: the layer's number in the model.
        component: the component, by its place in `TransferSide.components`.
        plane: the plane, by its place among those of the stage.
        token_stride: bytes from a token to the next one.
        offset: the first byte of the page's first token.
        head_stride: bytes from a head to the next one; None: heads follow each other.
        stage: the pipeline stage that has the layer.
    """

    layer: int
    component: int
    plane: int
    token_stride: int
    offset: int = 0
    head_stride: int | None = None
    stage: int = 0


class PlanePlace(NamedTuple):
    """Where the pages of a plane are in a sender's memory."""

    # Bytes from an origin to the plane's page 0.
    offset: int
    # Bytes from a page to the next one.
    page_bytes: int


class Parts(NamedTuple):
    """A sender's memory, divided into parts that have the rows of one layer each."""

    # Where the planes are, seen from the beginning of a part.
    planes: list[PlanePlace]
    # Bytes of a part.
    bytes: int


@dataclass(frozen=True)
class TransferSide:
    """Where an instance keeps the rows of a request. All of its ranks pass the same.

    A plane is a list of pages; a page is one number in all planes of a rank.

    Attributes:
        components: what tokens have. The other side may list it in another order.
        places: where it is, in any order.
        page_bytes: for each stage, for each of its planes, the bytes of a page.
        page_tokens: tokens of a page.
        width: ranks of a stage.
        split: how they divide a request: "heads" (tensor parallel), or "tokens" (sequence parallel; senders only).
        replicas: independent copies of all of this, each with requests of its own (data parallel attention).
    """

    components: Many[Component]
    places: Many[ComponentPlace]
    page_bytes: Many[Many[int]]
    page_tokens: int
    width: int = 1
    split: str = "heads"
    replicas: int = 1

    @classmethod
    def single(
        cls,
        layers: int | Many[int],
        row_bytes: int,
        page_tokens: int,
        *,
        index_key_bytes: int = 0,
        dtype: str = "bytes",
        row_stride: int | None = None,
    ) -> TransferSide:
        """The common case of one rank: each layer has a plane of rows, and with `index_key_bytes` one of index keys
        behind it.

        Args:
            layers: how many, or their numbers in the model.
            row_bytes: bytes of a row; `dtype` is the type of its numbers.
            page_tokens: tokens of a page.
            index_key_bytes: bytes of an index key; 0: there are none.
            row_stride: bytes from a row to the next one; None: rows follow each other.
        """
        numbers = range(index(layers, "layers")) if isinstance(layers, int) else tuple(layers)
        sizes = [("rows", row_bytes, row_stride or row_bytes)]
        if index_key_bytes:
            sizes.append(("index_keys", index_key_bytes, index_key_bytes))
        places: list[ComponentPlace] = []
        planes: list[int] = []
        for layer in numbers:
            for component, (_name, _bytes, stride) in enumerate(sizes):
                places.append(ComponentPlace(layer, component, len(planes), stride))
                planes.append(page_tokens * stride)
        components = [Component(name, dtype, size) for name, size, _stride in sizes]
        return cls(components, places, [planes], page_tokens)

    def parts(self, pages: int, stage: int = 0) -> Parts:
        """A division of a sender's memory into parts: each has the rows of one layer and of `pages` pages, its planes
        one after another. Parts begin anywhere.
        """
        pages = index(pages, "pages", least=1)
        sizes = self.page_bytes[index(stage, "stage", most=len(self.page_bytes) - 1)]
        offsets: dict[int, int] = {}
        ends: dict[int, int] = {}
        for place in self.places:
            if place.stage == stage and place.plane not in offsets:
                offset = ends.get(place.layer, 0)
                offsets[place.plane] = offset
                ends[place.layer] = offset + pages * sizes[place.plane]
        planes = [PlanePlace(offsets.get(plane, 0), size) for plane, size in enumerate(sizes)]
        return Parts(planes, max(ends.values(), default=0))

    def declare(self) -> tuple[Any, Any]:
        """An fb_transfer_side, and what must live as long.

        Raises:
            InvalidArgument: a value that a field cannot hold.
        """
        made = sized("fb_transfer_side")
        kept: list[Any] = []

        def text(value: str, name: str) -> Any:
            kept.append(ffi.new("char[]", text_bytes(value, name)))
            return kept[-1]

        components = ffi.new("fb_transfer_component[]", len(self.components))
        for to, component in zip(components, self.components):
            to.name, to.dtype = text(component.name, "name"), text(component.dtype, "dtype")
            to.heads = index(component.heads, "heads")
            to.head_bytes = index(component.head_bytes, "head_bytes")
        places = ffi.new("fb_transfer_place[]", len(self.places))
        for to, place in zip(places, self.places):
            for name in ("stage", "layer", "component", "plane"):
                setattr(to, name, index(getattr(place, name), name))
            head_stride = place.head_stride
            if head_stride is None:
                head_stride = self.components[place.component].head_bytes if self.components[place.component:] else 0
            to.offset = index(place.offset, "offset", BYTES_MAX)
            to.token_stride = index(place.token_stride, "token_stride", BYTES_MAX)
            to.head_stride = index(head_stride, "head_stride", BYTES_MAX)
        sizes = [index(size, "page_bytes", BYTES_MAX) for stage in self.page_bytes for size in stage]
        page_bytes, stages = ffi.new("uint64_t[]", sizes), ffi.new("uint32_t[]", [len(s) for s in self.page_bytes])
        made.components, made.places, made.page_bytes = components, places, page_bytes
        made.stage_planes = stages
        made.component_count, made.place_count, made.plane_count = len(components), len(places), len(sizes)
        made.stages = index(len(self.page_bytes), "page_bytes", least=1)
        made.page_tokens = index(self.page_tokens, "page_tokens", least=1)
        made.width, made.replicas = index(self.width, "width", least=1), index(self.replicas, "replicas", least=1)
        made.split = choice(self.split, _SPLITS, "split")
        return made, (kept, components, places, page_bytes, stages)


def transfer_bytes(sender: TransferSide, receiver: TransferSide, tokens: int) -> int:
    """Checks that rows can go from one side to the other, and returns the bytes that `tokens` tokens take on all ranks
    of one replica of the receiver.

    Raises:
        InvalidConfig: what is wrong in a side, or differs.
        Unsupported: a receiver that divides requests by tokens.
    """
    (first, kept), (second, also_kept) = sender.declare(), receiver.declare()
    text, found = new_text(), ffi.new("uint64_t *")
    check_created(lib.fb_transfer_plan(first, second, index(tokens, "tokens"), text, len(text), found), text)
    del kept, also_kept
    return int(found[0])


@dataclass(frozen=True)
class TransferOptions:
    """Times and bounds of an end, each None for the library's default. Both ends of a connection need the same token;
    all else each end decides for itself.

    Attributes:
        token: a secret that both sides have, of at least 16 random bytes (`secrets.token_bytes`). Without one only
            addresses of this host are taken. It says who opens a connection, and hides nothing.
        alive: seconds without another byte to send after which a sign of life is sent.
        lost: seconds without a byte from the other end after which a connection is lost; more than the other's `alive`.
        opening: seconds that an opening may take.
        resend: seconds after which a message that was not answered is sent again, each time after twice as long.
        patience: seconds after which a connection is closed on which nothing comes, although something is owed.
        links: the most open connections.
        queue_bytes: the most bytes that wait to be sent on a connection, rows included.
        rows_max: receivers: the most bytes of rows behind a frame over TCP.
        requests: the most requests at a time.
        notice_bytes: senders: the most bytes of rows that one notice tells.
        bulk_tokens: senders: prompts of at most so many tokens are told at once when they are finished.
        bytes_per_second: senders: the most bytes of rows a second that are told for the first time.
    """

    token: bytes | None = field(default=None, repr=False)
    alive: float | None = None
    lost: float | None = None
    opening: float | None = None
    resend: float | None = None
    patience: float | None = None
    links: int | None = None
    queue_bytes: int | None = None
    rows_max: int | None = None
    requests: int | None = None
    notice_bytes: int | None = None
    bulk_tokens: int | None = None
    bytes_per_second: int | None = None

    def declare(self, fabric: str, rank: Rank, address: bytes | None) -> tuple[Any, Any]:
        """An fb_transfer_config, and what must live as long.

        Raises:
            InvalidArgument: a value that a field cannot hold. A 0 would be the default in C, so it is refused.
        """
        made = sized("fb_transfer_config")
        made.fabric = choice(fabric, _FABRICS, "fabric")
        made.instance = index(rank.instance, "instance", BYTES_MAX)
        for name in ("replica", "stage", "lane"):
            setattr(made, name, index(getattr(rank, name), name))
        kept = (NULL if address is None else ffi.new("char[]", address), self._token())
        made.address, made.token = kept
        made.token_bytes = 0 if self.token is None else len(self.token)
        for name in ("alive", "lost", "opening", "resend", "patience"):
            if (seconds := getattr(self, name)) is not None:
                if (count := milliseconds(seconds, name)) == 0:
                    raise InvalidArgument(name, repr(seconds), "seconds above 0")
                setattr(made, f"{name}_ms", count)
        for name in ("links", "queue_bytes", "rows_max", "requests", "notice_bytes", "bulk_tokens"):
            if (number := getattr(self, name)) is not None:
                setattr(made, name, index(number, name, least=1))
        if self.bytes_per_second is not None:
            made.bytes_per_second = index(self.bytes_per_second, "bytes_per_second", BYTES_MAX, 1)
        return made, kept

    def _token(self) -> Any:
        if self.token is None:
            return NULL
        if not isinstance(self.token, bytes):
            raise InvalidArgument("token", type(self.token).__name__, "bytes")
        return ffi.new("uint8_t[]", self.token)


def choice(value: Any, known: dict[str, int], name: str) -> int:
    """The number of a word.

    Raises:
        InvalidArgument: it is no such word.
    """
    if not isinstance(value, str) or value not in known:
        raise InvalidArgument(name, repr(value), " or ".join(map(repr, known)))
    return known[value]


def within_ms(seconds: float | None) -> int:
    """A deadline as C takes it."""
    if seconds is None:
        return 0
    if (count := milliseconds(seconds, "within")) == 0:
        raise InvalidArgument("within", repr(seconds), "seconds above 0, or None")
    return count
