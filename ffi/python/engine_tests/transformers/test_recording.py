"""`record=`: the file holds what the model's indexers selected, which a hook on them sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forebay
import pytest
from forebay.transformers import ForebayCache, models
from harness import forward

CONTEXT, STEPS = 60, 6


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_a_recording_holds_what_the_indexers_selected(family: str, tmp_path: Path) -> None:
    """Layers that share a selection have that of the layer before them."""
    of = models.small(family)
    seen: dict[int, list[set[int]]] = {}
    for layer, decoder in enumerate(of.model.layers):
        if decoder.self_attn.indexer is not None:

            def note(_module: Any, _given: Any, found: Any, layer: int = layer) -> None:
                if found.shape[1] == 1:
                    seen.setdefault(layer, []).append(set(found[0, 0].tolist()))

            decoder.self_attn.indexer.register_forward_hook(note)
    tokens = models.prompts(1, CONTEXT + STEPS, seed=1)
    file = tmp_path / "run.topk.zst"
    with ForebayCache(of, ratio=0.4, max_tokens=CONTEXT + STEPS, record=file) as cache:
        forward(of, tokens[:, :CONTEXT], cache)
        for at in range(CONTEXT, CONTEXT + STEPS):
            forward(of, tokens[:, at : at + 1], cache)
    trace = forebay.SelectionTrace(file)
    assert (trace.header.first_position, trace.header.steps, trace.header.k) == (CONTEXT, STEPS, 16)
    found = trace.read(0, STEPS)
    for layer in range(found.shape[1]):
        source = max(other for other in seen if other <= layer)
        for step in range(STEPS):
            assert set(found[step, layer].tolist()) - {-1} == seen[source][step]
