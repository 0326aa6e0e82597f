"""`generate`: a model in a folder continues a text, with a share of its rows in slots.

The text appears as it is decoded. Then follow the misses of each layer and the memory: what the device holds, what it
would hold with every row there, and what the host holds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from . import ATTENTION, FAMILIES, ForebayCache, register
from .check import DTYPES
from .command import stop

_MIB = 1 << 20


def run(chosen: argparse.Namespace) -> int:
    """Loads the model, decodes, and prints the text and the figures."""
    model, tokenizer = load(chosen)
    given = tokenizer(chosen.prompt, return_tensors="pt")
    length = given["input_ids"].shape[1]
    if length == 0:
        stop("--prompt: the text has no tokens")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and length + chosen.tokens > limit:
        stop(f"--prompt, --tokens: {length + chosen.tokens:,} tokens together; the model was made for {limit:,}")
    with ForebayCache(model.config, ratio=chosen.ratio, max_tokens=length + chosen.tokens) as cache:
        began = time.perf_counter()
        made = model.generate(
            **given,
            past_key_values=cache,
            max_new_tokens=chosen.tokens,
            prefill_chunk_size=chosen.chunk,
            do_sample=False,
            streamer=transformers.TextStreamer(tokenizer, skip_prompt=True),
        )
        seconds = time.perf_counter() - began
        report(cache, made.shape[1] - length, length, seconds)
    return 0


def load(chosen: argparse.Namespace) -> tuple[Any, Any]:
    """The model and the tokenizer of the folder; ends the program with one line if it cannot be used."""
    folder = Path(chosen.model)
    if not (folder / "config.json").is_file():
        stop(f"--model: {chosen.model!r} is not a folder with a model's config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        stop(f"--model: the configuration cannot be read: {error}")
    if config.model_type not in FAMILIES:
        stop(f"--model: forebay does not know models of type {config.model_type!r}; there are {', '.join(FAMILIES)}")
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is None:
        stop(f"--model: the configuration names no class of transformers: {config.architectures}")
    register()
    dtype = "auto" if chosen.dtype == "auto" else DTYPES[chosen.dtype]
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": ATTENTION, "local_files_only": True}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = kind.from_pretrained(folder, **options)
    except (OSError, ValueError, RuntimeError) as error:
        stop(f"--model: it cannot be loaded: {error}")
    return model.eval(), tokenizer


def report(cache: Any, decoded: int, length: int, seconds: float) -> None:
    """Prints the figures of a run."""
    print(f"\n{decoded:,} tokens after a prompt of {length:,} in {seconds:.1f} s.")
    print(f"{'layer':>5} {'selected':>9} {'missed':>8} {'':>6}")
    for layer in cache.counts():
        selected = layer.hits + layer.misses
        print(f"{layer.layer:>5} {selected:>9,} {layer.misses:>8,} {layer.misses / max(1, selected):>6.1%}")
    memory = cache.memory()
    print(
        f"On the device {memory.device / _MIB:.1f} MiB, instead of {memory.dense / _MIB:.1f} MiB with every row there; "
        f"in host memory {memory.host / _MIB:.1f} MiB."
    )
