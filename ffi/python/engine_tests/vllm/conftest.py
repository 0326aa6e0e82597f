"""What the tests with vLLM share: run by ci/engines in an environment with vLLM. Each engine is a process of its own.

FOREBAY_QUICK=1 (`make engines QUICK=1`) runs a part: fewer engines.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from forebay.vllm import models

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small DeepSeek-V3.2 in fp32."""
    folder = tmp_path_factory.mktemp("models") / "fp32"
    models.save(folder)
    return str(folder)


@pytest.fixture(scope="session")
def repeating(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small model whose answers repeat themselves, so that drafts by prompt lookup are accepted."""
    folder = tmp_path_factory.mktemp("models") / "repeating"
    models.save(folder, layers=0.0003)
    return str(folder)


def pytest_report_header() -> str:
    return "a part of the tests (FOREBAY_QUICK)" if os.environ.get("FOREBAY_QUICK") else "all tests"
