"""The loop of a dense model of docs/integration.md, in Python: a prompt in chunks, then steps that decode a token. A
second request with the same prompt finds its pages. In the middle of each another request is urgent, and the device is
full: the running one is parked on the host, and comes back layer by layer. On this device, which works inline, the
copies have ended when `resume` returns; on a GPU they run beside the layers."""

from __future__ import annotations

import numpy as np

import forebay
from forebay import dense

LAYERS, RUN, PAGE, PROMPT, CHUNK, STEPS = 4, 256, 16, 1000, 256, 100
IDS = [at * 7 % 251 for at in range(PROMPT + STEPS)]
# Pages of the device and of the host: those of one request, with its rows in flight, and a few more.
PAGES = len(IDS) // PAGE + 12


class Engine:
    """The engine's kernels, over tensors that it asks for once."""

    def __init__(self, cache: dense.Cache) -> None:
        self.cache, self.tensors = cache, cache.tensors()
        # K and V of each layer, [pages, page tokens, bytes of a row].
        self.views = [[cache.view(layer, run) for run in range(2)] for layer in range(LAYERS)]

    def write_rows(self, layer: int, ids: list[int], rows: int) -> None:
        """The projections: the byte of each new row is the token's id."""
        slots, positions = self.tensors.slots[0][:rows], self.tensors.positions[:rows]
        for view in self.views[layer]:
            view[slots // PAGE, slots % PAGE] = np.array(ids, np.uint8)[positions][:, None]

    def attend(self, layer: int) -> int:
        """Attention: reads the rows of the only batch row by its page table, here the first byte of each."""
        at = np.arange(self.tensors.lengths[0])
        pages = self.tensors.tables[0][0, at // PAGE]
        return int(self.views[layer][0][pages, at % PAGE, 0].sum())

    def step(self, sequence: dense.Sequence, accepted: int, rows: int, ids: list[int] = IDS) -> int:
        """One step of one sequence: `rows` query rows, after `accepted` of the last step's."""
        total = 0
        step = self.cache.prepare([(sequence, accepted, rows)])
        for layer in range(LAYERS):
            # Before new rows are written: the pages that come back from the host are there.
            step.arrived(layer)
            # P: the engine writes the new rows to their slots. A: attention reads the pages.
            self.write_rows(layer, ids, rows)
            total += self.attend(layer)
        step.finish()
        # When the step has ended: the committed length, and the word that its tokens may be used.
        step.retire()
        return total

    def preempt(self, running: dense.Sequence, accepted: int) -> int:
        """Another request is urgent. If the device is full, the running one waits on the host until it has ended.
        Returns how many rows its next step accepts: none after a parking, which has accepted the last ones."""
        parks = False
        try:
            urgent = self.cache.open(prompt=CHUNK, promised=1)
        except forebay.Exhausted:
            parks = True
            running.park(accepted)
            urgent = self.cache.open(prompt=CHUNK, promised=1)
        self.step(urgent, 0, CHUNK, IDS[1:])
        self.step(urgent, CHUNK, 1, IDS[1:])
        urgent.close()
        if parks:
            running.resume()
        return 0 if parks else accepted

    def serve(self) -> tuple[int, int]:
        """A request: opens, computes what is not there, decodes, publishes, closes."""
        # The last token is computed again, for its logits.
        names = self.cache.names(IDS[: PROMPT - 1], salt=b"tenant")
        sequence, found, _ticket = self.cache.open_shared(names, prompt=PROMPT, promised=STEPS)
        total, accepted, at = 0, 0, found.tokens
        while at < PROMPT:
            rows = min(CHUNK, PROMPT - at)
            total += self.step(sequence, accepted, rows)
            at, accepted = at + rows, rows
        for number in range(STEPS):
            if number == STEPS // 2:
                accepted = self.preempt(sequence, accepted)
            total += self.step(sequence, accepted, 1)
            accepted = 1
        # Full pages whose rows are accepted are found by later requests.
        sequence.publish(found.tokens, IDS[found.tokens :])
        # They go to the host too, at most so many bytes in a call: what is there costs a parking no copy.
        self.cache.save(1 << 20)
        sequence.close()
        return found.tokens, total


def decode() -> str:
    """Serves two requests, and returns a line with what was found and read."""
    # Once: everything is taken here, and nothing later.
    shape = dense.Shape([dense.Group(range(LAYERS), (RUN, RUN))], page_tokens=PAGE)
    config = dense.Config(
        shape, sequences=4, max_tokens=len(IDS), device_pages=PAGES, host_pages=PAGES, bring_layers=1, lock=False
    )
    with forebay.HostDevice() as device, dense.Cache(device, config) as cache:
        engine = Engine(cache)
        (first, one), (second, two) = engine.serve(), engine.serve()
    return f"{first} and {second} tokens found, sums {one} and {two}"


if __name__ == "__main__":
    print(decode())
