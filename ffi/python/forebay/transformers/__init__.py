"""forebay in transformers: models with sparse attention decode with a part of their cache on the device.

    import forebay.transformers
    forebay.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="forebay")
    cache = forebay.transformers.ForebayCache(model.config, ratio=0.2, max_tokens=8192)
    model.generate(**inputs, past_key_values=cache)

Nothing in transformers is patched: the cache is a `transformers.Cache`, and "forebay" is an attention implementation
that transformers is told of. A decode step attends to the rows that the model's indexer selects, wherever they are; the
logits do not depend on how many of them are in slots. docs/transformers.md shows it.

This package imports torch and transformers; `forebay` alone does not. CUDA tensors take the same way over a
`CudaDevice` and torch's current stream, which has not run on a GPU yet.
"""

import sys as _sys

from ..errors import Unsupported as _Unsupported
from .stop import stop as _stop

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401

    from .families import FAMILIES, Family, check_version

    # Before the modules that import what an older transformers lacks.
    check_version()
except (ImportError, _Unsupported) as _missing:
    _why = str(_missing)
    if isinstance(_missing, ImportError):
        _why = f"forebay.transformers needs torch and transformers: pip install 'forebay[transformers]' ({_missing})"
    # As a program (Python imports the package before `__main__`), one line and no traceback.
    if _sys.argv[:1] == ["-m"] and __name__ in _sys.orig_argv:
        _stop(_why)
    if isinstance(_missing, ImportError):
        raise ImportError(_why) from _missing
    raise

from .attention import ATTENTION, register_names  # noqa: E402
from .batch import LayerMisses  # noqa: E402
from .cache import ForebayCache, Memory  # noqa: E402

__all__ = ["ATTENTION", "FAMILIES", "Family", "ForebayCache", "LayerMisses", "Memory", "register"]


def register() -> None:
    """Makes the attention implementation "forebay" known to transformers; idempotent. Call it before a model is made
    with `attn_implementation="forebay"`.

    Raises:
        Unsupported: transformers is older than 5.18.
    """
    check_version()
    register_names()
