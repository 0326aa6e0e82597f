"""Nothing of transformers is replaced at run time either; ci/engines compares the files."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import forebay
import pytest
from forebay.transformers import ForebayCache, models
from harness import FAMILIES, forward, model

OURS = Path(forebay.__file__).parent


def functions(module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    """The functions and methods that a module's own names lead to."""
    for name, thing in vars(module).items():
        if isinstance(thing, FunctionType):
            yield name, thing
        elif inspect.isclass(thing) and thing.__module__ == module.__name__:
            for method, what in vars(thing).items():
                if isinstance(what, FunctionType):
                    yield f"{name}.{method}", what


def strangers() -> list[str]:
    """Names in transformers' modules that lead to code outside of transformers, torch and Python's own."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and (".models." in name or name.count(".") <= 2):
            for function, thing in functions(module):
                if Path(thing.__code__.co_filename).is_relative_to(OURS):
                    found.append(f"{name}.{function}")
    return found


def test_no_name_of_transformers_leads_to_forebay(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in FAMILIES:
        with ForebayCache(model(family).config, ratio=0.5, max_tokens=32) as cache:
            forward(model(family), models.prompts(1, 24), cache)
            forward(model(family), models.prompts(1, 1), cache)
    assert strangers() == []
    # Control: a function of forebay under a name of a model's module.
    module = sys.modules["transformers.models.deepseek_v32.modeling_deepseek_v32"]
    monkeypatch.setattr(module, "rotate_half", models.prompts)
    assert strangers() == [f"{module.__name__}.rotate_half"]
