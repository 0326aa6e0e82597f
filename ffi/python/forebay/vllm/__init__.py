"""forebay in vLLM: models with sparse attention serve with a part of their rows on the device.

    python -m forebay.vllm serve MODEL --forebay-ratio 0.2

or, in a program that uses vLLM's `LLM`, before it is imported:

    import forebay.vllm
    forebay.vllm.enable(ratio=0.2)
    from vllm import LLM

vLLM is not changed: it finds forebay by its entry points (`forebay_vllm`). docs/vllm.md says which models and options
work, and which of vLLM's internals it uses. This module imports neither torch nor vLLM.
"""

from __future__ import annotations

from typing import Any

from .options import Options

__all__ = ["Options", "enable"]


def enable(**options: Any) -> None:
    """Turns forebay on for vLLM engines that this process, or one that it starts, makes from now on.

    Args:
        options: the fields of `Options`: `ratio` or `slots`, and others.

    Raises:
        InvalidArgument: an option of another kind.
    """
    Options(**options).set()
