"""The loop of a dense model of docs/integration.md, in Python: a prompt in chunks, then steps that decode a token. A
second request with the same prompt finds its pages."""

from __future__ import annotations

import numpy as np

import forebay
from forebay import dense

LAYERS, RUN, PAGE, PROMPT, CHUNK, STEPS = 4, 256, 16, 1000, 256, 100
IDS = [at * 7 % 251 for at in range(PROMPT + STEPS)]


class Engine:
    """The engine's kernels, over tensors that it asks for once."""

    def __init__(self, cache: dense.Cache) -> None:
        self.cache, self.tensors = cache, cache.tensors()
        # K and V of each layer, [pages, page tokens, bytes of a row].
        self.views = [[cache.view(layer, run) for run in range(2)] for layer in range(LAYERS)]

    def write_rows(self, layer: int, rows: int) -> None:
        """The projections: the byte of each new row is the token's id."""
        slots, positions = self.tensors.slots[0][:rows], self.tensors.positions[:rows]
        for view in self.views[layer]:
            view[slots // PAGE, slots % PAGE] = np.array(IDS, np.uint8)[positions][:, None]

    def attend(self, layer: int) -> int:
        """Attention: reads the rows of the only batch row by its page table, here the first byte of each."""
        at = np.arange(self.tensors.lengths[0])
        pages = self.tensors.tables[0][0, at // PAGE]
        return int(self.views[layer][0][pages, at % PAGE, 0].sum())

    def step(self, sequence: dense.Sequence, accepted: int, rows: int) -> int:
        """One step of one sequence: `rows` query rows, after `accepted` of the last step's."""
        total = 0
        step = self.cache.prepare([(sequence, accepted, rows)])
        for layer in range(LAYERS):
            # P: the engine writes the new rows to their slots. A: attention reads the pages.
            self.write_rows(layer, rows)
            total += self.attend(layer)
        step.finish()
        # When the step has ended: the committed length, and the word that its tokens may be used.
        step.retire()
        return total

    def serve(self) -> tuple[int, int]:
        """A request: opens, computes what is not there, decodes, publishes, closes."""
        # The last token is computed again, for its logits.
        names = self.cache.names(IDS[: PROMPT - 1], salt=b"tenant")
        sequence, found, _ticket = self.cache.open_shared(names, prompt=PROMPT, promised=STEPS)
        total, rows, at = 0, 0, found.tokens
        while at < PROMPT:
            accepted, rows = rows, min(CHUNK, PROMPT - at)
            total += self.step(sequence, accepted, rows)
            at += rows
        for number in range(STEPS):
            total += self.step(sequence, rows if number == 0 else 1, 1)
        # Full pages whose rows are accepted are found by later requests.
        sequence.publish(found.tokens, IDS[found.tokens :])
        sequence.close()
        return found.tokens, total


def decode() -> str:
    """Serves two requests, and returns a line with what was found and read."""
    # Once: everything is taken here, and nothing later.
    shape = dense.Shape([dense.Group(range(LAYERS), (RUN, RUN))], page_tokens=PAGE)
    config = dense.Config(shape, sequences=4, max_tokens=PROMPT + STEPS, lock=False)
    with forebay.HostDevice() as device, dense.Cache(device, config) as cache:
        engine = Engine(cache)
        (first, one), (second, two) = engine.serve(), engine.serve()
    return f"{first} and {second} tokens found, sums {one} and {two}"


if __name__ == "__main__":
    print(decode())
