"""The plan of weights that ranks share: its arguments as C takes them, and what it takes."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence as Many, Union

from ._library import check_created, ffi, lib, new_text, sized, text_bytes
from .config import set_fields
from .device import Device
from .errors import InvalidArgument
from .overlap import several
from .tensors import BYTES_MAX, index

_SOURCES = {"peers": lib.FB_WEIGHTS_FROM_PEERS, "host": lib.FB_WEIGHTS_FROM_HOST}
_ODD = {
    "cheapest": lib.FB_ODD_CHEAPEST,
    "third buffer": lib.FB_ODD_THIRD_BUFFER,
    "first": lib.FB_ODD_RESIDENT_FIRST,
    "last": lib.FB_ODD_RESIDENT_LAST,
}
_WRAPS = {"joined": lib.FB_WRAP_JOINED, "behind": lib.FB_WRAP_BEHIND}
_CLOSINGS = {
    lib.FB_CLOSING_EVEN: "even",
    lib.FB_CLOSING_THIRD_BUFFER: "third buffer",
    lib.FB_CLOSING_RESIDENT: "resident",
}
# For each tensor of a layer its bytes, or its bytes and its alignment.
LayerTensors = Mapping[str, Union[int, "tuple[int, int]"]]


class WeightBytes(NamedTuple):
    """What a plan takes for its rank, in bytes and in whole granules, and what it decides."""

    # Layers that stay resident, whole.
    resident: int
    # The rank's own parts of sharded layers.
    shards: int
    # The buffers. One that there is not has 0.
    buffers: tuple[int, int, int]
    # All of these: what the device holds.
    device: int
    # Pinned host memory, with the source "host".
    host: int
    # The chosen tensors themselves, which a rank would hold without sharding; not rounded.
    whole: int
    # `whole` without `device`: what sharding saves. It is negative where rounding or a small model costs more.
    saved: int
    # What the rank pulls in one step.
    pulled: int
    # A granule: the device maps memory in multiples of it.
    granule: int
    # Layers with chosen tensors, resident ones included.
    layers: int
    # Layers that are sharded.
    sharded_layers: int
    # How the last layer of a step and the first one of the next are kept apart: "even" (without further means), "third
    # buffer" or "resident".
    closing: str
    # For "resident": the layer that stays resident for it. Otherwise None.
    resident_layer: int | None


def declare(
    layers: Many[LayerTensors],
    patterns: Many[str],
    whole: dict[str, int],
    chosen: dict[str, str],
    numbers: dict[str, int | None],
) -> tuple[Any, Any]:
    """An fb_weights_config, and what must live as long. `whole` has numbers that may be 0, `chosen` the words of
    choices, `numbers` those of which None is the default.

    Raises:
        InvalidArgument: a value that the field cannot hold.
    """
    config = sized("fb_weights_config")
    entries, held = _tensors(layers)
    named = enumerate(several(patterns, "patterns"))
    globs = [ffi.new("char[]", text_bytes(glob, f"patterns[{at}]")) for at, glob in named]
    table, patterns_ = ffi.new("fb_tensor[]", entries), ffi.new("char *[]", globs)
    config.tensors, config.tensor_count, config.layers = table, len(entries), len(layers)
    config.patterns, config.pattern_count = patterns_, len(globs)
    for name, value in whole.items():
        setattr(config, name, index(value, name, BYTES_MAX if name == "group" else 0xFFFFFFFF))
    for name, words in (("source", _SOURCES), ("odd", _ODD), ("wrap", _WRAPS)):
        word = chosen.get(name, next(iter(words)))
        if not isinstance(word, str) or word not in words:
            raise InvalidArgument(name, repr(word), " or ".join(map(repr, words)))
        setattr(config, name, words[word])
    set_fields(config, dict(numbers))
    return config, (held, table, globs, patterns_)


def prefetched(given: tuple[int, int] | None) -> dict[str, int | None]:
    """The fields of `prefetch`.

    Raises:
        InvalidArgument: it is no pair of numbers above 0.
    """
    if given is None:
        return {}
    if not isinstance(given, tuple) or len(given) != 2:
        raise InvalidArgument("prefetch", repr(given), "bytes and bytes per second")
    names = ("prefetch_bytes", "prefetch_rate")
    return {name: index(value, name, BYTES_MAX, 1) for name, value in zip(names, given)}


def planned(device: Device, config: Any) -> WeightBytes:
    """What weights of this configuration take on `device`.

    Raises:
        As `Weights`, but for memory that the device lacks.
    """
    if not isinstance(device, Device):
        raise InvalidArgument("device", type(device).__name__, "a HostDevice or a CudaDevice")
    answer, text = sized("fb_weights_footprint"), new_text()
    check_created(lib.fb_weights_plan(device._open(), config, text, len(text), answer), text)
    closing = _CLOSINGS[answer.closing]
    values = {name: getattr(answer, name) for name in WeightBytes._fields}
    values.update(buffers=tuple(answer.buffers), closing=closing)
    if closing != "resident":
        values["resident_layer"] = None
    return WeightBytes(**values)


def _tensors(layers: Many[LayerTensors]) -> tuple[list[dict[str, Any]], list[Any]]:
    """The entries of an array of fb_tensor, and their names."""
    entries: list[dict[str, Any]] = []
    held: list[Any] = []
    size = ffi.sizeof("fb_tensor")
    for layer, tensors in enumerate(several(layers, "layers")):
        if not isinstance(tensors, Mapping):
            raise InvalidArgument(f"layers[{layer}]", type(tensors).__name__, "names of tensors to their bytes")
        for name, given in tensors.items():
            where = f"layers[{layer}][{name!r}]"
            taken, align = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
            held.append(ffi.new("char[]", text_bytes(name, f"a name in layers[{layer}]")))
            entries.append({
                "size": size,
                "name": held[-1],
                "bytes": index(taken, where, BYTES_MAX, 1),
                "layer": layer,
                "align": 0 if align is None else index(align, where, least=1),
            })  # fmt: skip
    return entries, held
