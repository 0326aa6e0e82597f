"""The rows in forebay's pages are those that the model computed, and wrong ones change tokens."""

from __future__ import annotations

from harness import OFF, RESIDENT, SHARE, driven, run, whole

# Keeps what every layer writes, by request, layer and position, and compares it with the pages before a request ends.
COMPARED = """
import torch
written, told["rows"], told["wrong"], told["shared"] = {}, 0, 0, 0
write, end = ForebayRows.write, ForebayRows.end

def keep(self, layer, rows, keys):
    for row in (*self._batch.prefills, *self._batch.decodes):
        for at in range(row.width):
            written[row.id, layer, row.start + at] = rows[row.first + at].clone()
    write(self, layer, rows, keys)

def compare(self, id, tokens):
    if id in self.requests:
        request = self.requests[id]
        for layer in range(self.cache.info.layers):
            kept = request.read(layer, dtype=torch.float32)
            for at, row in enumerate(kept):
                expected = written.get((id, layer, at))
                told["shared" if expected is None else "rows"] += 1
                told["wrong"] += expected is not None and not torch.equal(row, expected)
    end(self, id, tokens)

ForebayRows.write, ForebayRows.end = keep, compare
"""
# The pages of the first prompt are given to every later one of the same length or more.
WRONG_PROMPT = """
first = []
def with_first(call):
    def changed(self, id, prompt, *others):
        first[:] = first or prompt
        beginning = first[:len(prompt) - 1]
        return call(self, id, [*beginning, *prompt[len(beginning):]], *others)
    return changed

ForebayRows.find, ForebayRows.admit = with_first(ForebayRows.find), with_first(ForebayRows.admit)
"""
PLENTY = {"validate": True, "host_memory": 64 << 20}


def test_every_row_is_the_one_that_was_computed(repeating: str) -> None:
    """In every layer, of prompts, answers, accepted drafts and preempted requests."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    arguments = {"num_gpu_blocks_override": 20, "speculative_config": drafts}
    found, told = driven(repeating, COMPARED, {**SHARE, **PLENTY}, tokens=90, arguments=arguments)
    resident = run(repeating, {**RESIDENT, **PLENTY}, tokens=90, arguments=arguments)
    assert found.tokens == resident.tokens
    assert told["wrong"] == 0
    assert found.metrics["vllm:spec_decode_num_accepted_tokens"] > 100
    assert found.metrics["vllm:forebay_resumed"] > 0
    tokens = sum(found.cached) * 4
    assert told["shared"] == tokens > 0
    assert told["rows"] > 4 * (1500 + 10 * 89) - tokens


@whole
def test_control_a_row_that_differs_is_counted(model: str) -> None:
    spoiled = COMPARED + """
def spoil(self, id, tokens):
    if id in self.requests:
        pages = self.requests[id]._page_table()[0]
        self.cache.rows(2)[pages[0], 0, 5] ^= 1
    compare(self, id, tokens)
ForebayRows.end = spoil
"""
    _, told = driven(model, spoiled, {**SHARE, **PLENTY}, together=1)
    assert told["wrong"] >= 1


@whole
def test_control_the_rows_of_another_prompt_change_tokens(model: str) -> None:
    """A prompt that is looked up under another one's tokens finds that one's rows."""
    found, _ = driven(model, WRONG_PROMPT, SHARE, together=1)
    assert sum(found.cached) > 500
    assert found.tokens != run(model, OFF, together=1).tokens
