"""The parts of vLLM that forebay uses are there. A version that lost one is named with it."""

from __future__ import annotations

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


def test_the_page_names_every_hook() -> None:
    page = (Path(__file__).parents[4] / "docs" / "vllm.md").read_text(encoding="utf-8")
    for hook in hooks.HOOKS:
        name = hook.place.partition(":")[2].removesuffix(".__init__")
        assert f"`{name.split('.')[0]}" in page, name
