"""From the committed header to what cffi reads: declarations alone, as C11 sees them.

cffi has no preprocessor. The header has few directives, generated, so they are followed here one by one; one that is
not known is an error, never passed over.
"""

from __future__ import annotations

import re

# What a C11 compiler that is no C++ compiler makes of the header's conditions.
_CONDITIONS = {
    "#ifdef __cplusplus": False,
    "#ifndef __cplusplus": True,
    "#ifndef FB_FOREBAY_H": True,
    "#if __STDC_VERSION__ >= 202311L": False,
    "#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L": False,
}
_NUMBERS = {"UINT32_MAX": "4294967295", "UINT64_MAX": "18446744073709551615"}
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_DEFINE = re.compile(r"#define (\w+)\s*(.*)")
_INTEGER = re.compile(r"(0x[0-9a-fA-F]+|\d+)[uUlL]*")


def declarations(header: str) -> str:
    """The declarations of `header` for `cffi.FFI.cdef`: no comments, no directives but integer constants.

    Raises:
        ValueError: a directive or a constant that is not understood, or conditions that do not pair.
    """
    lines: list[str] = []
    taken: list[bool] = []
    for number, raw in enumerate(_COMMENT.sub(_blank, header).splitlines(), 1):
        line = " ".join(raw.split())
        if line in _CONDITIONS:
            taken.append(_CONDITIONS[line])
        elif line in ("#else", "#endif"):
            if not taken:
                raise ValueError(f"line {number}: `{line}` without its condition")
            taken[-1] = not taken[-1]
            if line == "#endif":
                taken.pop()
        elif line.startswith("#include") or not line or not all(taken):
            continue
        elif line.startswith("#"):
            lines += _constant(line, number)
        else:
            lines.append(line)
    if taken:
        raise ValueError("a condition without its #endif")
    return "\n".join(lines) + "\n"


def abi_version(header: str) -> int:
    """FB_ABI_VERSION of `header`.

    Raises:
        ValueError: it has none.
    """
    found = re.search(r"^#define FB_ABI_VERSION (\d+)$", header, re.MULTILINE)
    if found is None:
        raise ValueError("the header has no FB_ABI_VERSION")
    return int(found.group(1))


def _blank(comment: re.Match[str]) -> str:
    """A comment's lines stay, so that numbers of lines are the header's."""
    return "\n" * comment.group().count("\n") or " "


def _constant(line: str, number: int) -> list[str]:
    found = _DEFINE.fullmatch(line)
    if found is None:
        raise ValueError(f"line {number}: `{line}` is not understood")
    name, value = found.groups()
    if not value:
        return []
    value = _NUMBERS.get(value.strip("()"), value)
    integer = _INTEGER.fullmatch(value)
    if integer is None:
        raise ValueError(f"line {number}: {name} is no integer: `{value}`")
    return [f"#define {name} {integer.group(1)}"]
