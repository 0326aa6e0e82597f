"""A whole engine in 60 lines: tokens are bytes, attention is top-k, a fifth of the rows of each request have slots."""

import forebay
import numpy as np
from forebay.serving import DecodeStep, Request, Requests
from numpy.typing import NDArray

Floats = NDArray[np.float32]
LAYERS, WIDTH, TOP_K, CHUNK, NEW = 3, 32, 16, 64, 40
CHANCE = np.random.default_rng(20)
EMBEDDING = CHANCE.standard_normal((256, WIDTH), np.float32)
# For each layer, what makes a token's row, and its query, from the state.
ROW, QUERY = CHANCE.standard_normal((2, LAYERS, WIDTH, WIDTH), np.float32) / np.float32(WIDTH**0.5)


def attend(query: Floats, rows: Floats, valid: NDArray[np.bool_]) -> Floats:
    scores = np.where(valid, np.einsum("nw,nkw->nk", query, rows), np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(np.einsum("nk,nkw->nw", weights / weights.sum(axis=1, keepdims=True), rows), np.float32)


def prefill(request: Request, tokens: bytes) -> None:
    for start in range(0, len(tokens), CHUNK):
        state = EMBEDDING[list(tokens[start : start + CHUNK])]
        for layer in range(LAYERS):
            request.prefill(layer, state @ ROW[layer])
            request.put_index_keys(layer, state @ ROW[layer], start)
            rows = request.read(layer, dtype=np.float32)  # All rows so far, from host memory.
            sees = np.arange(len(rows)) <= start + np.arange(len(state))[:, None]
            state = state + attend(state @ QUERY[layer], np.broadcast_to(rows, (len(state), *rows.shape)), sees)


def top_k(step: DecodeStep, layer: int, query: Floats) -> NDArray[np.int64]:
    chosen = np.full((step.batch, 1, TOP_K), -1)
    for row, request in enumerate(step.requests):
        keys = request.index_keys(layer, end=int(step.starts[row]) + 1, dtype=np.float32)
        chosen[row, 0, : len(keys)] = np.argsort(-(keys @ query[row]), kind="stable")[:TOP_K]
    return chosen


def decode(requests: Requests, ids: list[str], tokens: list[int]) -> list[int]:
    state = EMBEDDING[tokens]
    with requests.step(ids) as step:
        for layer in range(LAYERS):
            new, query = state @ ROW[layer], state @ QUERY[layer]
            step.write(layer, new[:, None])
            step.put_index_keys(layer, new[:, None])
            slots = step.select(layer, top_k(step, layer, query))
            state = state + attend(query, step.rows(layer, slots, np.float32)[:, 0], slots[:, 0] >= 0)
            step.stored(layer)
    return [int(token) for token in ((state - EMBEDDING[tokens]) @ EMBEDDING.T).argmax(axis=1)]


shape = forebay.Shape(layers=LAYERS, row_bytes=(4 * WIDTH, 0), top_k=TOP_K, index_key_bytes=4 * WIDTH)
cache = forebay.Cache(forebay.HostDevice(), shape, lanes=2, max_tokens=1024, slots=64, pool_slots=512)
prompts = {"a": CHANCE.bytes(500), "b": CHANCE.bytes(300)}
with Requests(cache, ratio=0.2) as requests:
    for id, prompt in prompts.items():
        prefill(requests.add(id, promised=NEW), prompt[:-1])
    texts = [[prompt[-1]] for prompt in prompts.values()]
    for _ in range(NEW):
        for text, token in zip(texts, decode(requests, list(prompts), [text[-1] for text in texts])):
            text.append(token)
    hits, misses, _ = requests.stats().layers.sum(axis=0)
print(*(bytes(text[1:]).hex() for text in texts), sep="\n")
print(f"{hits} selected rows had slots, {misses} were fetched")
