"""What cannot work is refused when vLLM starts, in the user's words."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forebay
import pytest
from forebay.errors import InvalidArgument, Unsupported
from forebay.vllm import engine, enable, models
from forebay.vllm.engine import EngineFailed, Run
from forebay.vllm.options import ENVIRONMENT, Options
from harness import OFF, SHARE, whole


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "ratio"),
        ({"ratio": 0.2, "slots": 5}, "both ratio and slots"),
        ({"ratio": 0}, "ratio"),
        ({"ratio": 1.5}, "at most 1"),
        ({"ratio": "much"}, "ratio"),
        ({"ratio": True}, "ratio"),
        ({"slots": 0}, "slots"),
        ({"ratio": 0.2, "host_memory": -1}, "host_memory"),
        ({"rows": "elsewhere"}, "rows"),
    ],
)
def test_options_are_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Options(**given)


@pytest.mark.parametrize("text", ["", "0.2", "[]", "{", '{"share": 1}', '{"ratio": 2}'])
def test_an_environment_of_another_kind(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, text)
    with pytest.raises(InvalidArgument):
        Options.read()


def test_options_reach_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "")
    enable(slots=100, host_memory=5)
    assert Options.read() == Options(slots=100, host_memory=5)


@pytest.mark.parametrize("plugins", ["", "lora_filesystem_resolver"])
def test_vllm_must_load_it(plugins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    with pytest.raises(InvalidArgument, match="VLLM_PLUGINS"):
        enable(ratio=0.5)
    monkeypatch.setenv("VLLM_PLUGINS", f"{plugins},forebay")
    monkeypatch.setenv(ENVIRONMENT, "")
    enable(ratio=0.5)
    assert Options.read().ratio == 0.5


def kind(name: str) -> Any:
    return SimpleNamespace(model_type=name)


def parallel(**sizes: int) -> Any:
    return SimpleNamespace(distributed_executor_backend=None, **sizes)


def config(**changes: Any) -> Any:
    """vLLM's configuration, as far as the platform reads it."""
    made = {
        "model_config": SimpleNamespace(hf_text_config=kind("deepseek_v32"), dtype="torch.bfloat16"),
        "parallel_config": SimpleNamespace(tensor_parallel_size=1, distributed_executor_backend=None),
        "speculative_config": None,
        "kv_transfer_config": None,
        "lora_config": None,
        "cache_config": SimpleNamespace(cache_dtype="auto", user_specified_block_size=False, block_size=None),
    }
    return SimpleNamespace(**{**made, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_config": SimpleNamespace(hf_text_config=kind("glm_moe_dsa"))}, "'glm_moe_dsa'"),
        ({"parallel_config": SimpleNamespace(tensor_parallel_size=2)}, "tensor_parallel_size=2"),
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "pipeline_parallel_size=2"),
        ({"parallel_config": SimpleNamespace(distributed_executor_backend="mp")}, "'mp'"),
        ({"speculative_config": SimpleNamespace(method="mtp")}, "'mtp'"),
        ({"kv_transfer_config": SimpleNamespace(kv_connector="NixlConnector")}, "NixlConnector"),
        ({"lora_config": object()}, "LoRA"),
        ({"parallel_config": parallel(decode_context_parallel_size=2)}, "decode_context_parallel_size=2"),
        ({"parallel_config": parallel(prefill_context_parallel_size=2)}, "prefill_context_parallel_size=2"),
        ({"parallel_config": parallel(data_parallel_size=2)}, "data_parallel_size=2"),
        ({"model_config": SimpleNamespace(hf_text_config=kind("deepseek_v32"), dtype="x", enable_prompt_embeds=True)},
         "enable_prompt_embeds"),
        ({"cache_config": SimpleNamespace(cache_dtype="fp8", user_specified_block_size=False)}, "'fp8'"),
        (
            {"cache_config": SimpleNamespace(cache_dtype="auto", user_specified_block_size=True, block_size=48)},
            "power of two",
        ),
    ],
)
def test_configurations_are_refused(changes: dict[str, Any], words: str) -> None:
    from forebay.vllm.platform import _check

    _check(config())
    with pytest.raises((Unsupported, InvalidArgument), match=words):
        _check(config(**changes))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 with forebay"),
        pytest.param({"num_gpu_blocks_override": 5000}, "num_gpu_blocks_override: 5000 blocks, and", marks=whole),
        pytest.param(
            {"kv_cache_memory_bytes": 4 << 20}, "do not hold the slots and index keys of one request", marks=whole
        ),
    ],
)
def test_an_engine_ends_at_its_start(model: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineFailed, match=words):
        engine.start(Run(model, models.prompts([20]), options=SHARE, arguments=arguments))


@whole
@pytest.mark.parametrize(("options", "words"), [({**SHARE, "host_memory": 1 << 16}, "host_memory")])
def test_a_total_pool_that_is_too_small(model: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineFailed, match=words):
        engine.start(Run(model, models.prompts([20]), options=options))


@whole
def test_the_other_model_runner(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    engine.forget()
    with pytest.raises(EngineFailed, match="VLLM_USE_V2_MODEL_RUNNER=1 with forebay"):
        engine.start(Run(model, models.prompts([20]), options=SHARE))
    engine.forget()


def test_a_plug_in_without_its_library(model: str, tmp_path: Path) -> None:
    """A broken installation: vLLM would go on without a plug-in that it cannot import. It must not."""
    import forebay_vllm

    for package in (forebay, forebay_vllm):
        folder = Path(package.__file__ or "").parent
        shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("libforebay.so", "__pycache__"))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, ENVIRONMENT: '{"ratio": 0.2}'}
    script = f"from vllm import LLM; LLM({model!r}, skip_tokenizer_init=True)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    assert "libforebay" in done.stderr
    assert "Sparse Attention" not in done.stderr


def test_rows_in_vllms_cache_need_no_ratio() -> None:
    assert Options(**OFF).ratio is None
