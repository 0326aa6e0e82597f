"""Without FOREBAY_VLLM vLLM is what it was; models without sparse attention are vLLM's own with it too."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from forebay.vllm import engine, models
from forebay.vllm.engine import EngineFailed, Run
from harness import SHARE, whole

def test_the_entry_points_import_nothing() -> None:
    """vLLM calls them in each of its processes: they may cost nothing where forebay is off."""
    for group in ("vllm.platform_plugins", "vllm.general_plugins"):
        (found,) = entry_points(group=group, name="forebay")
        script = (
            f"import sys; before = set(sys.modules); import {found.module} as it; assert it.{found.attr}() is None; "
            "print(sorted(set(sys.modules) - before))"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "['forebay_vllm']"


def test_stock_vllm_still_refuses_sparse_attention(model: str) -> None:
    """The control of every other test: without forebay there is no answer to compare with."""
    with pytest.raises(EngineFailed, match="Sparse Attention is not supported on CPU"):
        engine.start(Run(model, models.prompts([20])))


@whole
@pytest.mark.parametrize("options", [None, SHARE], ids=["off", "on"])
def test_a_model_without_sparse_attention_is_vllms(options: dict[str, float] | None, latent: str) -> None:
    """Its outputs, and its KV cache, are those of a vLLM that does not know of forebay."""
    given = Run(latent, models.prompts([40, 7, 90]), options=options)
    stock = engine.start(Run(latent, given.prompts), plugins="")
    found = engine.start(given)
    assert (found.tokens, found.kv_bytes, found.blocks) == (stock.tokens, stock.kv_bytes, stock.blocks)
    assert found.left == {}
    assert not any("forebay" in name for name in found.metrics)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A DeepSeek-V3, which has MLA and no indexer."""
    folder: Path = tmp_path_factory.mktemp("latent")
    models.save_dense(folder)
    return str(folder)
