"""What the tests with transformers share: run by ci/engines in an environment with torch and transformers.

FOREBAY_QUICK=1 (`make engines QUICK=1`) runs a part: fewer batches, ratios and seeds, each kind of layer and each kind
of test.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

# The results are compared bit by bit, and the order of a sum depends on the number of threads.
torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _frozen() -> None:
    """What the imports made stays: without it each collection takes a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Each test begins with the same random numbers, and leaves no cache behind."""
    torch.manual_seed(0)
    yield
    gc.collect()


def pytest_report_header() -> str:
    return "a part of the tests (FOREBAY_QUICK)" if os.environ.get("FOREBAY_QUICK") else "all tests"
