"""The parts of vLLM that forebay uses are there. A version that lost one is named with it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from forebay.errors import Unsupported
from forebay.vllm import hooks


def test_this_vllm_has_every_hook() -> None:
    assert hooks.missing() == []


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda hook: hook.place)
def test_control_a_lost_hook_is_named(hook: hooks.Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name of the table is looked for: one that vLLM never had is missing."""
    changed = hook._replace(names=(*hook.names, "never_there"))
    monkeypatch.setattr(hooks, "HOOKS", (changed,))
    assert hooks.missing() == [f"{hook.place}: never_there ({hook.stability})"]
    monkeypatch.setattr(hooks, "HOOKS", (hook._replace(place=f"{hook.place}X"),))
    assert hooks.missing() == [f"{hook.place}X ({hook.stability})"]


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.vllm.platform import check_version

    check_version("0.32.7")
    with pytest.raises(Unsupported, match=r"vLLM 0\.33\.0: .* knows 0\.32\.x$"):
        check_version("0.33.0")
    lost = hooks.Hook("vllm.nowhere:thing", (), hooks.INTERNAL)
    monkeypatch.setattr(hooks, "HOOKS", (lost,))
    with pytest.raises(Unsupported, match=r"lacks vllm\.nowhere:thing \(internal\)"):
        check_version("1.0.0")


def test_the_page_lists_every_hook() -> None:
    """Its second table is that of the code, and its first one names every part."""
    page = (Path(__file__).parents[4] / "docs" / "vllm.md").read_text(encoding="utf-8")
    assert hooks.table() in page, hooks.table()
    first = page[: page.index(hooks.table())]
    for hook in hooks.HOOKS:
        name = hook.place.partition(":")[2].split(".")[0]
        assert f"`{name}" in first or f".{name}" in first, name


def test_the_page_lists_every_counter() -> None:
    from forebay.vllm.metrics import COUNTERS, GAUGES

    page = (Path(__file__).parents[4] / "docs" / "vllm.md").read_text(encoding="utf-8")
    for name, _ in (*COUNTERS.values(), *GAUGES.values()):
        assert f"`{name}`" in page, name


def test_the_code_names_every_part_of_vllm_that_it_imports() -> None:
    """An import of vLLM that the table lacks would break unnoticed."""
    known = {hook.place.partition(":")[2].split(".")[0] for hook in hooks.HOOKS}
    # What every plug-in uses.
    known |= {"LLM", "SamplingParams", "RequestOutputKind", "init_logger"}
    known |= {"get_current_vllm_config", "AttentionMetadata"}
    for path in Path(hooks.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.") and not node.level:
                assert {name.name for name in node.names} <= known, (path.name, ast.unparse(node))
