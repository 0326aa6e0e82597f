"""The annotations: `typing.get_type_hints` resolves all of them, and a checker refuses objects that are no tensors."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import site
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

import forebay
from conftest import skip


def annotated() -> list[Any]:
    """Every class, method and function that the package defines."""
    found: list[Any] = []
    for info in pkgutil.walk_packages(forebay.__path__, "forebay."):
        # These need torch, and transformers or vLLM: the engines' tests import them (`make engines`).
        engines = ("forebay.transformers", "forebay.vllm")
        if info.name in ("forebay._ffi", "forebay.libforebay") or info.name.startswith(engines):
            continue
        for one in vars(importlib.import_module(info.name)).values():
            if getattr(one, "__module__", "") != info.name:
                continue
            found += [one] if inspect.isfunction(one) or inspect.isclass(one) else []
            members = vars(one).values() if inspect.isclass(one) else ()
            found += [getattr(member, "__func__", member) for member in members if callable(member)]
    return [one for one in found if inspect.isfunction(one) or inspect.isclass(one)]


@pytest.mark.parametrize("one", annotated(), ids=lambda one: f"{one.__module__}.{one.__qualname__}")
def test_type_hints_resolve(one: Any) -> None:
    typing.get_type_hints(one)


PROGRAM = """
import forebay
import numpy as np

def enter(device: forebay.HostDevice, cache: forebay.Cache, step: forebay.Step, array: np.ndarray) -> None:
    step.layer(0, array, array)
    step.layer(0, forebay.Buffers(cache, array, array))
    with device as same:
        reveal_type(same)
    step.layer(0, 5)
    step.layers(array, "slots")
    cache.prepare([], accepted=[1])
"""


def test_a_type_checker_refuses_objects_that_are_no_tensors(tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        skip("a_type_checker_refuses_objects_that_are_no_tensors", "mypy is not installed")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--no-incremental", str(program)]
    # From another folder, without the package's own settings, as in a user's check.
    package = str(Path(forebay.__file__).parents[1])
    # mypy finds installed packages by itself, and accepts no path to them.
    environment = {"PATH": "/usr/bin:/bin"} | ({} if package in site.getsitepackages() else {"MYPYPATH": package})
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    refused = [line for line in ran.stdout.splitlines() if ": error:" in line and "program.py" in line]
    assert [line.split(":")[1] for line in refused] == ["10", "11", "12"], ran.stdout + ran.stderr
    assert 'Revealed type is "forebay.device.HostDevice"' in ran.stdout
