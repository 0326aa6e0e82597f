"""`generate`: a model in a folder continues a text, with a share of its rows in slots.

The text appears as it is decoded. Then follow the misses of each layer and the memory: rows in slots and in host
memory, and what else the device holds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import transformers

from ..commands import shown
from ..errors import ForebayError
from . import ATTENTION, ForebayCache, register
from .check import DTYPES
from .stop import stop


def run(chosen: argparse.Namespace) -> int:
    """Loads the model, decodes, and prints the text and the figures."""
    # Its bars would be lines of their own beside the text, and beside an error.
    transformers.utils.logging.disable_progress_bar()
    config = configuration(chosen.model)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(chosen.model, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        stop(f"--model: its tokenizer cannot be loaded: {error}")
    given = tokenizer(chosen.prompt, return_tensors="pt")
    length = given["input_ids"].shape[1]
    if length == 0:
        stop("--prompt: the text has no tokens")
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and length + chosen.tokens > limit:
        stop(f"--prompt, --tokens: {length + chosen.tokens:,} tokens together; the model was made for {limit:,}")
    model = load(chosen, config)
    with ForebayCache(model, ratio=chosen.ratio, max_tokens=length + chosen.tokens) as cache:
        began = time.perf_counter()
        try:
            # What the folder's generation_config.json could set otherwise, and one streamed text does not have.
            made = model.generate(
                input_ids=given["input_ids"],
                attention_mask=given["attention_mask"],
                past_key_values=cache,
                max_new_tokens=chosen.tokens,
                prefill_chunk_size=chosen.chunk,
                do_sample=False,
                num_beams=1,
                use_cache=True,
                streamer=transformers.TextStreamer(tokenizer, skip_prompt=True),
            )
        except ValueError as error:
            stop(f"--model: it cannot generate: {error}")
        seconds = time.perf_counter() - began
        report(cache, made.shape[1] - length, length, seconds)
    return 0


def configuration(model: str) -> Any:
    """The configuration in a folder; ends the program with one line if forebay cannot serve it."""
    if not (Path(model) / "config.json").is_file():
        stop(f"--model: {model!r} is not a folder with a model's config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        stop(f"--model: the configuration cannot be read: {error}")
    try:
        register()
        ForebayCache(config, ratio=1, max_tokens=1).close()
    except ForebayError as error:
        stop(f"--model: {error}")
    return config


def load(chosen: argparse.Namespace, config: Any) -> Any:
    """The model in the folder; ends the program with one line if it cannot be loaded."""
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is None:
        stop(f"--model: the configuration names no class of transformers: {config.architectures}")
    dtype = "auto" if chosen.dtype == "auto" else DTYPES[chosen.dtype]
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": ATTENTION, "local_files_only": True}
    try:
        return kind.from_pretrained(chosen.model, **options).eval()
    except (OSError, ValueError, RuntimeError) as error:
        stop(f"--model: it cannot be loaded: {error}")


def report(cache: Any, decoded: int, length: int, seconds: float) -> None:
    """Prints the figures of a run."""
    print(f"\n{decoded:,} tokens after a prompt of {length:,} in {seconds:.1f} s.")
    print(f"{'layer':>5} {'selected':>9} {'missed':>8} {'':>6}")
    for layer in cache.counts():
        selected = layer.hits + layer.misses
        print(f"{layer.layer:>5} {selected:>9,} {layer.misses:>8,} {layer.misses / max(1, selected):>6.1%}")
    memory = cache.memory()
    print(f"Rows: {shown(memory.host)} in host memory, {shown(memory.slots)} in slots on the device.")
    parts = {"tables": memory.tables, "index keys": memory.index_keys, "gathered rows": memory.gathered}
    if memory.stock:
        parts["layers with a window"] = memory.stock
    also = ", ".join(f"{name} {shown(count)}" for name, count in parts.items())
    print(f"Also on the device: {also}. In all {shown(memory.device)}; transformers' own cache: {shown(memory.dense)}.")
