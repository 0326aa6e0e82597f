"""`forebay.serving`: an engine at random against lists of rows, and each rule by itself."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

import forebay
from conftest import LAYERS, ROW, TOP_K, OnCuda, on_host, rows_of, skip
from forebay.serving import Request, Requests
from forebay.serving import tensors as libraries
from serving_machine import Arrays, Machine

Make = Callable[..., forebay.Cache]
SHAPES = {
    "one run": forebay.Shape(layers=LAYERS, row_bytes=(ROW, 0), top_k=TOP_K, index_key_bytes=4, page_tokens=16),
    "two runs": forebay.Shape(layers=2, row_bytes=(8, ROW), top_k=TOP_K, page_tokens=16),
    "groups": forebay.Shape(layers=5, row_bytes=(ROW, 0), top_k=TOP_K, page_tokens=16, lone_layers=1, group_layers=2),
    "padded blocks": forebay.Shape(layers=2, row_bytes=(20, 0), top_k=TOP_K, page_tokens=16, device_block_align=512),
}
SIZES: dict[str, Any] = {"lanes": 4, "max_tokens": 160, "slots": 16, "query_rows": 3, "parked": 3}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_an_engine_at_random_reads_the_rows_that_it_wrote(make: Make, kind: str, seed: int) -> None:
    machine = Machine(make(shape=SHAPES[kind], **SIZES), Arrays(), seed)
    machine.run(300)
    assert machine.compared > 1000 and set(machine.calls) >= {"add", "prefill", "step", "crop", "park", "fork", "fail"}


def test_an_engine_at_random_on_streams_that_are_threads(make: Make) -> None:
    with forebay.HostDevice(threads=True) as device:
        machine = Machine(make(device, **SIZES), Arrays(), 1)
        machine.run(200)
        assert machine.compared > 500
