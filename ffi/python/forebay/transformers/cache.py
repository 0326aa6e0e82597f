"""A cache for transformers whose rows are in forebay: it goes where a `transformers.Cache` goes.

The layers that select (`families`) are `SparseLayer`s without any tensor of their own, and all of them use one `Batch`.
Every other layer is what transformers' own `DynamicCache` would have there.
"""

from __future__ import annotations

import os
import weakref
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import torch
import transformers
from transformers.cache_utils import CacheLayerMixin

from ..cache import Cache, Stats
from ..device import Device
from ..errors import InvalidArgument, InvalidState, Unsupported
from ..serving import Request, Requests
from ..tensors import index
from .attention import ATTENTION, enter, leave
from .batch import Batch, LayerMisses, Limits, slots_of
from .families import check_version, layout

_STATIC = ("static", "offloaded_static", "hybrid", "sliding_window")


class Memory(NamedTuple):
    """Bytes of a cache. Those of forebay's own memory are as on a GPU."""

    # Device: slots of the sparse layers, with landing and scratch slots. They do not grow with the context.
    slots: int
    # Device: their tables, and what whole mappings of 2 MiB leave unused.
    tables: int
    # Device: the rows that one layer attends to in a decode pass. All layers use the same memory.
    gathered: int
    # Device: index keys of the sparse layers, as far as memory is taken for them.
    index_keys: int
    # Device: the layers that stay in transformers' own tensors.
    stock: int
    # Host: rows of the total pool, for `batch` rows of `max_tokens`.
    host: int
    # What `DynamicCache` would hold on the device at the present length: rows, index keys, and the stock layers.
    dense: int
    # Device, for the time of a layer: the largest prefill pass so far, with the softmax and the indexer's scores. By a
    # formula, not measured: docs/transformers.md.
    prefill_peak: int

    @property
    def device(self) -> int:
        """What stays on the device between passes."""
        return self.slots + self.tables + self.gathered + self.index_keys + self.stock


class SparseLayer(CacheLayerMixin):
    """A layer whose rows are in forebay. What concerns all layers at once (crop, beams, reset) `ForebayCache` does."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, batch: Batch, number: int) -> None:
        super().__init__()
        self._batch, self._number = batch, number

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Nothing: forebay's cache is made when the first rows come."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Takes a layer's new rows and returns those that the model expands: see `forebay.transformers.batch`."""
        found = self._batch.update(self._number, key_states, value_states)
        enter(self._batch)
        self.is_initialized = True
        return found

    def update_indexer(self, indexer_key_states: Any) -> Any:
        """Takes a layer's new index keys and returns those of the context."""
        return self._batch.update_indexer(self._number, indexer_key_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The context's tokens, and its first."""
        return self._batch.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens of a batch row."""
        return self._batch.length

    def get_max_length(self) -> int:
        """The most tokens of a batch row."""
        return self._batch.limits.max_tokens


class ForebayCache(transformers.Cache):
    """The cache of a model whose rows are in host memory, with slots for some of them on the device.

        forebay.transformers.register()
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="forebay")
        cache = ForebayCache(model.config, ratio=0.2, max_tokens=8192)
        model.generate(**inputs, past_key_values=cache)

    Memory is taken at the first forward pass, whose rows say their dtype and device, for `batch` rows of `max_tokens`.
    A context manager that closes itself. It is for inference: a pass whose rows require gradients is refused, since no
    gradient would come back from the pool.

    Args:
        config: the model's config, or the model.
        max_tokens: tokens of the longest batch row: padding, prompt, answers and drafts.
        ratio: slots of a batch row in each layer, as a share of `max_tokens`. Give it or `slots`, not both.
        slots: slots of a batch row in each layer.
        batch: the most batch rows; every beam is one.
        drafts: the most drafted tokens that one pass checks (`prompt_lookup_num_tokens`, an assistant's). A pass with
            more tokens is computed as a prefill.
        device: forebay's device. None: a `HostDevice` for tensors on the CPU, a `CudaDevice` for tensors on a GPU,
            which ends with the cache. Memory of a device that you give stays with it for its next cache, after
            `close` too, until you close the device.
        record: a file for what the first batch row selects (`forebay replay` reads it); others get files beside it.
        overcommit: takes more host memory than the machine reports as available.

    Raises:
        Unsupported: transformers is too old, the model's family is not known, or it is compiled or has a static cache.
        InvalidArgument: a value of another kind.

    Attributes:
        requests: the requests of `forebay.serving`; None before the first pass.
        forebay: the `forebay.Cache`; None before the first pass.
    """

    def __init__(
        self,
        config: Any,
        *,
        max_tokens: int,
        ratio: float | None = None,
        slots: int | None = None,
        batch: int = 1,
        drafts: int = 0,
        device: Device | None = None,
        record: str | os.PathLike[str] | None = None,
        overcommit: bool = False,
    ) -> None:
        check_version()
        config = _config_of(config)
        found = layout(config)
        if device is not None and not isinstance(device, Device):
            raise InvalidArgument("device", type(device).__name__, "a forebay.HostDevice or CudaDevice, or None")
        if record is not None and not isinstance(record, (str, os.PathLike)):
            raise InvalidArgument("record", type(record).__name__, "a path")
        most = index(max_tokens, "max_tokens", least=1)
        if index(drafts, "drafts") >= most:
            raise InvalidArgument("drafts", repr(drafts), f"fewer than max_tokens, which is {most}")
        limits = Limits(
            most,
            slots_of(ratio, slots, most),
            index(batch, "batch", least=1),
            index(drafts, "drafts"),
            record,
            bool(overcommit),
        )
        self._batch, self._config = Batch(found, limits, device), config
        layers = transformers.DynamicCache(config=config).layers
        for number, one in enumerate(found.sparse):
            layers[one.layer] = SparseLayer(self._batch, number)
        # By the layer's number in the model.
        self._stock = {at: layer for at, layer in enumerate(layers) if not isinstance(layer, SparseLayer)}
        super().__init__(layers=layers)
        # The memory goes with the cache, though its layers may live on.
        self._closer = weakref.finalize(self, self._batch.close)
        self._closer.atexit = False

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Takes a layer's new rows. See `transformers.Cache.update`."""
        if torch.compiler.is_compiling():
            _refuse_compiled()
        # Before the model's first layer takes its rows, wherever that keeps them; and before forebay does.
        if layer_idx in (0, self._batch.layout.sparse[0].layer):
            if self._batch.passing is None:
                self._check_model(layer_idx, int(key_states.shape[2]))
            self._batch.admit(key_states)
        found: tuple[Any, Any] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return found

    def _check_model(self, first: int, width: int) -> None:
        """Before a pass of `width` tokens: the model attends by forebay, and its other layers have as many tokens."""
        text = self._config.get_text_config(decoder=True)
        how = text._attn_implementation
        if how not in (None, ATTENTION):
            raise InvalidState(f"the model attends by {how!r}: call model.set_attn_implementation({ATTENTION!r})")
        for at, layer in self._stock.items():
            have, wanted = layer.get_seq_length(), self._batch.length + (width if at < first else 0)
            if have != wanted:
                self._batch.refuse(f"an earlier forward pass ended early: layer {at} has {have} tokens, not {wanted}")

    @property
    def forebay(self) -> Cache | None:
        """See the class."""
        return self._batch.cache

    @property
    def requests(self) -> Requests | None:
        """See the class."""
        return self._batch.requests

    @property
    def rows(self) -> tuple[Request, ...]:
        """The request of each batch row."""
        return self._batch.rows

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens. See `transformers.Cache.crop`."""
        tokens_to_remove = int(tokens_to_remove)
        if tokens_to_remove > 0:
            raise InvalidArgument("tokens_to_remove", repr(tokens_to_remove), "0, or minus the tokens to remove")
        # A layer with a window refuses if it does not record its past; nothing has changed then.
        for layer in self._stock.values():
            layer.crop(tokens_to_remove)
        self._batch.crop(-tokens_to_remove)

    def reset(self) -> None:
        """Ends all batch rows. The cache is empty then, and usable after any error."""
        leave(self._batch)
        self._batch.reset()
        for layer in self._stock.values():
            layer.reset()

    def reorder_cache(self, beam_idx: Any) -> None:
        """Makes batch row i a copy of row `beam_idx[i]`: beam search. Copies are forks, which share full pages."""
        self._batch.rearrange(beam_idx.tolist())
        for layer in self._stock.values():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Makes `repeats` copies of every batch row, one after the other."""
        rows = range(len(self._batch.rows))
        self._batch.rearrange([row for row in rows for _ in range(repeats)])
        for layer in self._stock.values():
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Any) -> None:
        """Keeps the batch rows of `indices`, in this order: row numbers, or a mask of booleans.

        Raises:
            InvalidArgument: a mask of another length, no such row, or more rows than the cache was made for.
        """
        rows = range(len(self._batch.rows))
        if indices.dtype == torch.bool:
            if tuple(indices.shape) != (len(rows),):
                raise InvalidArgument("indices", f"a mask of {tuple(indices.shape)}", f"one of ({len(rows)},)")
            chosen = [row for row, kept in zip(rows, indices.tolist()) if kept]
        else:
            chosen = [row % max(len(rows), 1) for row in indices.tolist()]
        self._batch.rearrange(chosen)
        for layer in self._stock.values():
            layer.batch_select_indices(indices)

    def early_initialization(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: torch.export takes a cache apart into tensors."""
        raise Unsupported("torch.export: a ForebayCache has no tensors that a graph could hold")

    def stats(self) -> Stats | None:
        """The statistics of forebay's cache; None before the first pass."""
        return None if self.forebay is None else self.forebay.stats()

    def counts(self) -> list[LayerMisses]:
        """What decode steps did in each sparse layer since the cache was made or reset."""
        return self._batch.counts()

    def memory(self) -> Memory:
        """The bytes of the cache now."""
        batch, found = self._batch, self._batch.footprint()
        slots = tables = host = 0
        if found is not None:
            slots, tables = found.slots + found.landing + found.scratch, found.tables + found.padding
            host = found.rows
        keys, used = batch.key_bytes(), batch.key_bytes(used=True)
        stock = sum(_bytes_of(layer) for layer in self._stock.values())
        dense = batch.dense_bytes() + used + stock
        return Memory(slots, tables, batch.buffer_bytes(), keys, stock, host, dense, batch.prefill_peak)

    def validate(self) -> None:
        """Checks every invariant of forebay's cache, for tests, between passes.

        Raises:
            Internal: names the broken invariant.
        """
        if self.forebay is not None:
            self.forebay.validate()

    def close(self) -> None:
        """Ends all batch rows, and forebay's cache; idempotent. The memory of a device that was given (`device=`) stays
        with that device."""
        leave(self._batch)
        self._closer()

    def __enter__(self) -> ForebayCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __copy__(self) -> NoReturn:
        raise Unsupported("copy of a ForebayCache: it owns its rows' memory; batch_repeat_interleave forks batch rows")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise Unsupported("pickling a ForebayCache: its rows are in memory of this process")


def _config_of(given: Any) -> Any:
    """The config of a model, or the config itself.

    Raises:
        Unsupported: the model is compiled, or generates with a static cache.
    """
    if isinstance(given, transformers.Cache):
        static = "a static cache is for compiled models, and forebay's rows move by calls that no graph contains"
        why = static if "Static" in type(given).__name__ else "a cache has its own rows"
        raise InvalidArgument("config", f"a {type(given).__name__}", f"a model's config: {why}")
    if hasattr(given, "_orig_mod") or getattr(given, "_compiled_call_impl", None) is not None:
        _compiled()
    generation = getattr(given, "generation_config", None)
    how = getattr(generation, "cache_implementation", None)
    if how in _STATIC:
        raise Unsupported(f"cache_implementation={how!r}: generate would compile; set it to None")
    return given.config if hasattr(given, "forward") and hasattr(given, "config") else given


def _compiled() -> NoReturn:
    raise Unsupported("torch.compile: a ForebayCache moves rows by calls that no graph contains; use the plain model")


# Called by a compiled model: it must not be compiled itself, to be able to raise.
_refuse_compiled = torch.compiler.disable(_compiled)


def _bytes_of(layer: Any) -> int:
    """Bytes of a layer of transformers."""
    tensors = (layer.keys, layer.values)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
