"""The shape of a model's cache."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

from ._library import NULL, ffi, lib, set_field, sized, text_bytes
from .errors import InvalidArgument


@dataclass(frozen=True)
class Shape:
    """What an engine tells forebay about its model; nothing is guessed from a tensor. All sizes are bytes.

    Attributes:
        layers: layers that every decode step runs once.
        row_bytes: bytes of a row's runs (K and V, or one latent and 0). Multiples of 4.
        top_k: positions that one query row selects in one layer.
        draft_layers: additional layers that draft tokens.
        index_key_bytes: bytes of one index key on the device; 0: the model has no indexer.
        page_tokens: tokens of a page, a power of two from 16 to 1024.
        host_stride: bytes from one row to the next in host memory; 0: the row's bytes rounded up to a multiple of 64.
        device_block_align: each slot block (64 slots) is padded to a multiple of this; 0: no padding.
        lone_layers: the first layers that select for themselves, before the layers of `group_layers`.
        group_layers: layers, one after the other, that share the first one's selection; 0: every layer selects.
        selects_by_layer: instead of these two, for each layer, draft layers last, whether it selects. One that does not
            shares the selection of the layer before (a model's list of indexer types).
    """

    layers: int
    row_bytes: tuple[int, int]
    top_k: int
    draft_layers: int = 0
    index_key_bytes: int = 0
    page_tokens: int = 64
    host_stride: int = 0
    device_block_align: int = 0
    lone_layers: int = 0
    group_layers: int = 0
    selects_by_layer: tuple[bool, ...] | None = None

    @staticmethod
    def preset(name: str, **changes: Any) -> Shape:
        """A known model's shape, for example "deepseek-v3.2", with the given changes.

        Raises:
            InvalidArgument: no such preset, or changes that are no fields.
        """
        unknown = [field for field in changes if field not in _FIELDS]
        if unknown:
            raise InvalidArgument(unknown[0], "a change", f"a field: {', '.join(_FIELDS)}")
        config = sized("fb_cache_config")
        status = lib.fb_preset(text_bytes(name, "name"), NULL, 0, config)
        if status:
            known = "a preset: deepseek-v3.2, deepseek-v3, glm-5, glm-5.2, gqa-8x128, ..."
            raise InvalidArgument("name", repr(name), known)
        fields: dict[str, Any] = {name: int(getattr(config, name)) for name in _FIELDS if name != "row_bytes"}
        return replace(Shape(row_bytes=(config.row_bytes[0], config.row_bytes[1]), **fields), **changes)

    @property
    def all_layers(self) -> int:
        """Layers including draft layers: the range of `layer` arguments, draft layers last."""
        return self.layers + self.draft_layers

    def declare(self, config: Any) -> Any:
        """Writes it into an fb_cache_config. Returns what must live as long as the config."""
        for field in _FIELDS:
            value = getattr(self, field)
            if field != "row_bytes":
                set_field(config, field, value, f"shape.{field}")
                continue
            try:
                config.row_bytes[0], config.row_bytes[1] = map(operator.index, value)
            except (TypeError, ValueError, OverflowError) as error:
                raise InvalidArgument("shape.row_bytes", repr(value), "two whole numbers, of bytes") from error
        if self.selects_by_layer is None:
            return None
        given = self.selects_by_layer
        if not isinstance(given, (list, tuple)) or len(given) != self.all_layers:
            wanted = f"{self.all_layers} of True or False, one a layer, draft layers last"
            raise InvalidArgument("shape.selects_by_layer", repr(given), wanted)
        config.selects_by_layer = table = ffi.new("uint32_t[]", [int(bool(selects)) for selects in given])
        return table


_FIELDS = (
    "layers",
    "row_bytes",
    "top_k",
    "draft_layers",
    "index_key_bytes",
    "page_tokens",
    "host_stride",
    "device_block_align",
    "lone_layers",
    "group_layers",
)
