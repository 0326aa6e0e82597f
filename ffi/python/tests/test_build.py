"""The wheel: its platform tag, and its contents."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import forebay
from conftest import ROOT, skip
from test_declarations import load


@pytest.fixture
def hook() -> ModuleType:
    if importlib.util.find_spec("hatchling") is None:
        skip("the_tag_of_the_wheel", "hatchling is not installed")
    return load("hatch_build")


def elf(machine: int, asks: bytes = b"GLIBC_2.2.5 GLIBC_2.17") -> bytes:
    """The beginning of a shared library of a little-endian 64-bit machine."""
    return b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00" + machine.to_bytes(2, "little") + bytes(44) + asks


@pytest.mark.parametrize(
    ("library", "tag"),
    [
        (elf(62), "manylinux_2_34_x86_64"),
        (elf(183), "manylinux_2_34_aarch64"),
        (elf(62, b"GLIBC_2.9 GLIBC_2.39 GLIBC_2.4"), "manylinux_2_39_x86_64"),
    ],
)
def test_the_tag_is_the_platform_of_the_library(hook: ModuleType, library: bytes, tag: str) -> None:
    assert hook.platform(library) == tag


@pytest.mark.parametrize(
    "library",
    [elf(243), elf(62)[:4] + b"\x01" + elf(62)[5:], elf(62, b""), b"MZ", b""],
    ids=["another machine", "32 bits", "another C library", "no library", "empty"],
)
def test_a_library_without_a_platform_tag_is_refused(hook: ModuleType, library: bytes) -> None:
    with pytest.raises(RuntimeError, match="the library is for"):
        hook.platform(library)


def test_the_loaded_library_has_the_tag_of_this_machine(hook: ModuleType) -> None:
    library = Path(forebay.__file__).with_name("libforebay.so").read_bytes()
    assert hook.platform(library).startswith("manylinux_2_3")


def test_the_wheel_has_its_licences_and_no_debug_information() -> None:
    try:
        files = importlib.metadata.files("forebay") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    if not any(file.name == "libforebay.so" for file in files):
        skip("the_wheel_has_its_licences_and_no_debug_information", "forebay is not installed as a wheel")
    for name in ("LICENSE-MIT", "LICENSE-APACHE"):
        found = [file for file in files if file.name == name]
        assert len(found) == 1 and "licenses" in found[0].parts
        assert found[0].read_text() == (ROOT / name).read_text()
    named = importlib.metadata.metadata("forebay").get_all("License-File") or []
    assert set(named) == {"LICENSE-MIT", "LICENSE-APACHE"}
    library = next(file for file in files if file.name == "libforebay.so")
    # Line tables are five sixths of the library.
    assert len(library.read_binary()) < 10 << 20


def test_the_compilation_is_announced_on_the_terminal(hook: ModuleType, tmp_path: Path) -> None:
    said: list[str] = []
    terminal = tmp_path / "terminal"
    hook.tell(said.append, "it compiles", terminal)
    assert said == ["it compiles"] and terminal.read_text() == "\n  it compiles\n"
    # Without a terminal nothing fails.
    hook.tell(said.append, "again", tmp_path / "no such folder" / "terminal")
    assert said == ["it compiles", "again"]


@pytest.mark.parametrize("cargo", [None, "cargo 1.80.1 (376290515 2024-07-16)", "cargo 0.9", "something else", ""])
def test_a_cargo_that_is_missing_or_too_old_is_named_before_it_runs(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cargo: str | None
) -> None:
    if cargo is not None:
        program = tmp_path / "cargo"
        program.write_text(f"#!/bin/sh\necho '{cargo}'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    with pytest.raises(RuntimeError, match=r"Rust 1\.95 or newer.*https://rustup\.rs") as refused:
        hook.build_library(said.append)
    assert (cargo or "") in str(refused.value) and not said
    (tmp_path / "cargo").write_text("#!/bin/sh\necho cargo 1.100.0\n")
    (tmp_path / "cargo").chmod(0o755)
    hook.check_cargo(ROOT)
