"""Packs a part of SmolLM2 for a machine with neither network nor packages that read GGUF: its first layers, still
quantised, and a text with the words that occur in it.

    pack.py OUT.npz [--layers 18] [--tokens 20000]
    decode.py --weights OUT.npz --device cuda:0

18 of 30 layers take 40 MB. Their text makes no sense, but their rows and selections are those of real weights, and the
two runs of decode.py compare them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the file."""
    from engine import english
    from smollm2 import Gguf, tokenizer, weights_path

    parser = argparse.ArgumentParser(prog="pack.py", description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("out", type=Path, metavar="OUT.npz")
    parser.add_argument("--layers", type=int, default=18, metavar="N", help="the first N of 30 (default: 18)")
    parser.add_argument("--tokens", type=int, default=20000, metavar="N", help="of the text (default: 20000)")
    chosen = parser.parse_args(arguments)
    if not 1 <= chosen.layers <= 30:
        parser.error(f"--layers: {chosen.layers} is not from 1 to 30")
    if not 64 <= chosen.tokens <= 100000:
        parser.error(f"--tokens: {chosen.tokens} is not from 64 to 100000")
    if chosen.out.suffix != ".npz":
        parser.error(f"OUT.npz: {chosen.out} is not called so")
    try:
        path = weights_path()
    except FileNotFoundError as error:
        parser.error(str(error))
    weights, words = Gguf(path), tokenizer(path)
    text = words.encode(english()).ids[: chosen.tokens]
    # A token's number is its index among the tokens that occur.
    known, numbered = np.unique(np.array(text, np.int32), return_inverse=True)
    sizes = dataclasses.replace(weights.sizes, layers=chosen.layers, vocabulary=len(known))
    packed: dict[str, Any] = {}
    for name, tensor in weights.stored.items():
        name = name.removesuffix(".weight")
        if name.startswith("blk.") and int(name.split(".")[1]) >= chosen.layers:
            continue
        data = np.array(tensor.data)
        packed[f"{tensor.tensor_type.name}/{name}"] = data[known] if name == "token_embd" else data
    about = {"sizes": dataclasses.asdict(sizes), "words": [words.decode([int(token)]) for token in known]}
    packed["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    packed["text"] = numbered.astype(np.int32)
    np.savez_compressed(chosen.out, **packed)
    size = chosen.out.stat().st_size
    print(f"{chosen.out}: {chosen.layers} layers, {len(known):,} words, {size / 1e6:.1f} MB", file=sys.stderr)


if __name__ == "__main__":
    main()
