"""The decode loop of docs/integration.md, in Python: two sequences, four layers, one draft per step."""

from __future__ import annotations

import numpy as np

import forebay

LAYERS, TOP_K, PROMPT, STEPS, QUERY = 4, 64, 1000, 100, 2


def select(number: int, at: int) -> list[int]:
    """The engine's indexer: a query row at `at` selects itself, the row before it, and some of the prompt."""
    return [at, at - 1, *(3 * (i + number) % PROMPT for i in range(2, TOP_K))]


def open_sequence(cache: forebay.Cache) -> forebay.Sequence:
    """A request: admitted for all that it may become, filled layer by layer, entered into the batch."""
    sequence = cache.open(prompt=PROMPT, promised=300, slots=256, bring_up="nothing")
    for layer in range(LAYERS):
        first = (31 * layer + np.arange(PROMPT)).astype(np.uint8)
        sequence.append(layer, np.repeat(first[:, None], cache.info.row_bytes, axis=1))
    sequence.join()
    return sequence


def decode() -> str:
    """Decodes, and returns a line with the counts."""
    # Once: everything is taken here, and nothing later.
    shape = forebay.Shape.preset("deepseek-v3.2", layers=LAYERS, top_k=TOP_K)
    with (
        forebay.HostDevice() as device,
        forebay.Cache(
            device, shape, lanes=2, max_tokens=2048, slots=256, query_rows=QUERY,
            huge_pages=False, populate=False, lock=False,
        ) as cache,
    ):
        sequences = [open_sequence(cache), open_sequence(cache)]
        slabs = [cache.slab(layer) for layer in range(LAYERS)]
        selection, slots = np.empty((2, 2, QUERY, TOP_K), dtype=np.int32)
        hits = misses = total = 0
        lengths = [PROMPT, PROMPT]
        for number in range(STEPS):
            # Which sequences decode, and how many rows of their last step were accepted: the draft or not.
            accepted = [0 if number == 0 else 1 + (number + s) % 2 for s in range(2)]
            lengths = [length + more for length, more in zip(lengths, accepted)]
            step = cache.prepare([(sequences[s], accepted[s], QUERY) for s in range(2)])
            for layer in range(LAYERS):
                # I: the engine's top-k writes the selection. R and G: slots, and what is missing.
                selection[:] = [[select(number, length + query) for query in range(QUERY)] for length in lengths]
                step.layer(layer, selection, slots)
                # P: the engine writes the new rows to their landing slots.
                for sequence in sequences:
                    for query in range(QUERY):
                        slot = sequence.landing_slot(query)
                        slabs[layer][slot // 64, slot % 64] = (number + query) % 256
                # A: reads the slots, here the first byte of each. S: the new rows go to host memory.
                total += int(slabs[layer][slots // 64, slots % 64, 0].sum())
                step.scatter(layer)
            step.finish()
            # When the step has ended: the counters, and the word that its tokens may be used.
            retired = step.retire()
            hits += retired.hits
            misses += retired.misses
        for sequence in sequences:
            sequence.close()
    return f"{STEPS} steps, {hits} hits, {misses} misses, sum {total}"


if __name__ == "__main__":
    print(decode())
