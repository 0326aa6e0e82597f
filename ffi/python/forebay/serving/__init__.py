"""What an engine's code around a cache has in common: requests by the engine's own ids, steps over batches of them.

`forebay.Cache` takes calls in an order that an engine has to keep: open, append, join, prepare, layer, scatter, finish,
retire, with the number of accepted rows in the next prepare. Every engine that embeds it writes the same bookkeeping
around them. This package is that bookkeeping. It knows neither a model nor a serving framework.

    requests = Requests(cache, ratio=0.2)
    request = requests.add("a", promised=256)
    for each chunk of the prompt, for each layer:
        request.prefill(layer, rows)
    with requests.step(["a", "b"]) as step:
        for layer in range(layers):
            step.write(layer, new_rows)
            slots = step.select(layer, top_k_indices)
            found = step.rows(layer, slots, dtype)
            # attention over `found`
            step.stored(layer)
    request.crop(length)        # rejects drafts of the step
    request.end()

A request joins at its first step, resumes there when it was parked, and counts its own accepted rows: `Request.length`
is the number of tokens that count, and what an engine crops away is rejected by the next step. docs/serving.md has a
whole engine in 60 lines.

Tensors are NumPy's or torch's, of any dtype; their bytes are what is kept. torch is used only if the program has
imported it.
"""

from .requests import Requests, ServingStats
from .request import Request
from .step import DecodeStep

__all__ = ["DecodeStep", "Request", "Requests", "ServingStats"]
