"""The shape of a dense model: groups of layers that are alike, and the tokens of a page."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, Sequence as Many

from .._library import ffi, lib, new_text, set_field, sized, text_bytes
from ..errors import InvalidArgument, counted

GROUPS_MAX = int(lib.FB_DENSE_GROUPS_MAX)
# More layers than any preset has.
_LAYERS_ROOM = 1024
_FIELDS = ("groups", "page_tokens")


@dataclass(frozen=True)
class Group:
    """Layers with rows of the same size and the same kind of attention. They share page tables.

    Attributes:
        layers: the model's layer numbers, ascending.
        row_bytes: bytes of a token's K and of its V in one layer: multiples of 16, at most 1 MiB each. An MLA latent is
            one run: its bytes and 0. On a rank of tensor parallelism these are the bytes of the rank's own heads.
        window: tokens that a query reads, itself included, in layers with a sliding window; None: all tokens before it.
    """

    layers: Many[int]
    row_bytes: tuple[int, int]
    window: int | None = None


@dataclass(frozen=True)
class Shape:
    """What an engine tells forebay about its model; nothing is guessed from a tensor.

    Attributes:
        groups: 1 to 4. Each layer of the model, from 0 on, is in exactly one.
        page_tokens: tokens of a page: 16, 32, 64, 128 or 256. Kernels take some of them only.
    """

    groups: Many[Group]
    page_tokens: int = 64

    @staticmethod
    def preset(name: str, **changes: Any) -> Shape:
        """A published model's shape, for example "llama-3.1-8b", with the given changes: the whole model in BF16, with
        pages of 64 tokens. A rank of tensor parallelism divides `row_bytes`, except those of an MLA latent.

        Raises:
            InvalidArgument: no such preset, or changes that are no fields.
        """
        unknown = [field for field in changes if field not in _FIELDS]
        if unknown:
            raise InvalidArgument(unknown[0], "a change", f"a field: {', '.join(_FIELDS)}")
        config, layers, text = sized("fb_dense_config"), ffi.new("uint32_t[]", _LAYERS_ROOM), new_text()
        if lib.fb_dense_preset(text_bytes(name, "name"), text, len(text), layers, _LAYERS_ROOM, config):
            known = "a preset: llama-3.1-8b, qwen3-32b, gemma-3-27b, gpt-oss-20b, deepseek-v3, smollm2-135m, ..."
            raise InvalidArgument("name", repr(name), known)
        groups = tuple(_group(config.groups[at]) for at in range(config.group_count))
        return replace(Shape(groups, int(config.page_tokens)), **changes)

    @property
    def layers(self) -> int:
        """Layers of all groups."""
        return sum(len(group.layers) for group in self.groups)

    def declare(self, config: Any) -> list[Any]:
        """Writes it into an fb_dense_config. Returns what must live as long as the config."""
        set_field(config, "page_tokens", self.page_tokens, "shape.page_tokens")
        groups = self.groups
        if not isinstance(groups, (list, tuple)) or not all(type(group) is Group for group in groups):
            raise InvalidArgument("shape.groups", repr(groups), "a list of Group")
        if len(groups) > GROUPS_MAX:
            raise InvalidArgument("shape.groups", counted(len(groups), "group"), f"at most {GROUPS_MAX}")
        config.group_count = len(groups)
        return [_declare(group, config.groups + at, f"shape.groups[{at}]") for at, group in enumerate(groups)]


def _group(group: Any) -> Group:
    layers = tuple(int(group.layers[at]) for at in range(group.layer_count))
    return Group(layers, (int(group.row_bytes[0]), int(group.row_bytes[1])), int(group.window) or None)


def _declare(group: Group, to: Any, name: str) -> Any:
    """Writes a group. Returns its layers, as C takes them."""
    try:
        layers = ffi.new("uint32_t[]", [operator.index(layer) for layer in group.layers])
    except (TypeError, OverflowError) as error:
        raise InvalidArgument(f"{name}.layers", repr(group.layers), "layer numbers") from error
    to.layers, to.layer_count = layers, len(layers)
    try:
        to.row_bytes[0], to.row_bytes[1] = map(operator.index, group.row_bytes)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"{name}.row_bytes", repr(group.row_bytes), "two whole numbers, of bytes") from error
    if group.window is not None:
        set_field(to, "window", group.window, f"{name}.window")
        if to.window == 0:
            raise InvalidArgument(f"{name}.window", "0", "a whole number from 1 on, or None for all tokens")
    return layers
