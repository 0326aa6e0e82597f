"""The translation of the header into cffi's declarations."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import cffi
import pytest

import forebay
from conftest import ROOT

HEADER = (ROOT / "ffi" / "include" / "forebay.h").read_text()


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "ffi" / "python" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


declarations = load("declarations")


def test_the_committed_header_is_read_whole() -> None:
    text = declarations.declarations(HEADER)
    ffi = cffi.FFI()
    ffi.cdef(text)
    calls = [line for line in HEADER.splitlines() if line.startswith("fb_status ")]
    named = {line.split("(")[0].split()[-1] for line in calls}
    assert len(named) > 20
    assert all(name in text for name in named)
    assert ffi.sizeof("fb_batch_row") == 16


def test_conditions_are_those_of_c11() -> None:
    text = declarations.declarations(
        "#ifndef FB_FOREBAY_H\n#define FB_FOREBAY_H\n#include <stdint.h>\n"
        "#ifdef __cplusplus\nextern \"C\" {\n#endif // __cplusplus\n"
        "#ifndef __cplusplus\n#if __STDC_VERSION__ >= 202311L\nint newer;\n#else\nint older; // said\n#endif\n#endif\n"
        "/* a\n#nothing */ #define FB_A 3\n#define FB_B UINT32_MAX\n#define FB_C 0x10\n#endif\n"
    )
    assert text == "int older;\n#define FB_A 3\n#define FB_B 4294967295\n#define FB_C 0x10\n"


@pytest.mark.parametrize(
    "header",
    ["#if ANY\n#endif\n", "#pragma once\n", '#define FB_TEXT "a"\n', "#endif\n", "#else\n", "#ifdef __cplusplus\n"],
)
def test_an_unknown_declaration_is_an_error(header: str) -> None:
    with pytest.raises(ValueError):
        declarations.declarations(header)


def test_the_loaded_library_has_the_headers_version() -> None:
    from forebay._library import lib

    assert lib.fb_abi_version() == declarations.abi_version(HEADER) == lib.FB_ABI_VERSION
    assert forebay.__version__.count(".") == 2
    with pytest.raises(ValueError):
        declarations.abi_version("")
