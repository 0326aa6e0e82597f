"""The loaded library: its functions, the version check, and errors read from handles."""

from __future__ import annotations

import operator
import os
import sys
import weakref
from pathlib import Path
from typing import Any, NoReturn

from . import errors

# The interpreter's lock makes single operations on lists and dicts atomic, and the package uses no other lock for them.
if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "forebay needs the interpreter's lock: a free-threaded Python is not supported; use the ordinary build, or"
        " start it with PYTHON_GIL=1"
    )

try:
    from ._ffi import ffi as ffi
except ModuleNotFoundError as missing:
    raise ImportError("forebay is not built: install it by `pip install ./ffi/python`") from missing

_TEXT_BYTES = 512
# Types and sizes of structs, looked up once each.
_sized: dict[str, tuple[Any, int]] = {}


def _load() -> Any:
    path = Path(__file__).with_name("libforebay.so")
    try:
        library = ffi.dlopen(str(path))
    except OSError as error:
        raise ImportError(f"{path} cannot be loaded: {error}") from error
    found, wanted = library.fb_abi_version(), library.FB_ABI_VERSION
    if found != wanted:
        raise ImportError(
            f"{path} has version {found} of its interface, this package is for version {wanted}: install it again"
        )
    return library


lib: Any = _load()
NULL: Any = ffi.NULL
_error_text = lib.fb_error_text


def fail(status: int, handle: Any) -> NoReturn:
    """Raises the error of the last failed call on `handle`."""
    text = ffi.new("char[]", _TEXT_BYTES)
    message = ""
    if _error_text(handle, text, _TEXT_BYTES) == 0:
        message = ffi.string(text).decode("utf-8", "replace")
    raise errors.error_of(status, message or _refusal(status, handle))


def _refusal(status: int, handle: Any) -> str:
    """The message for a handle that refused a call, which leaves no text."""
    name = ffi.typeof(handle).item.cname.rpartition("fb_")[2]
    name = "dense cache" if name == "dense" else name
    why = {
        lib.FB_CLOSED: "it was closed, or belongs to the process that this one was forked from: make a new one",
        lib.FB_BUSY: "another call is inside it, of another thread or around this callback; call when it has returned",
    }
    return f"{name}: {status_text(status)}" + (f": {why[status]}" if status in why else "")


def check(status: int, handle: Any) -> None:
    """Raises unless `status` is FB_OK."""
    if status:
        fail(status, handle)


def check_created(status: int, text: Any) -> None:
    """Raises unless `status` is FB_OK, with the reason that a creation wrote to `text`."""
    if status:
        message = ffi.string(text).decode("utf-8", "replace")
        raise errors.error_of(status, message or status_text(status))


def new_text() -> Any:
    """Room for the reason of a failed creation."""
    return ffi.new("char[]", _TEXT_BYTES)


def cell(owner: object, kind: str, destroy: Any) -> tuple[Any, Any]:
    """The destination of a handle that a call makes, and its finalizer. The handle ends with `owner`, even if an
    exception occurred after the call and no code has seen the handle.
    """
    made = ffi.new(kind)
    return made, weakref.finalize(owner, _end_cell, made, destroy)


def _end_cell(made: Any, destroy: Any) -> None:
    if made[0] != NULL:
        destroy(made[0])


def status_text(status: int) -> str:
    """A status in words."""
    return str(ffi.string(lib.fb_status_text(status)).decode())


def sized(name: str) -> Any:
    """A struct that begins with its size; all other fields are zero."""
    known = _sized.get(name)
    if known is None:
        known = _sized[name] = (ffi.typeof(f"{name} *"), ffi.sizeof(name))
    made = ffi.new(known[0])
    made.size = known[1]
    return made


def set_field(config: Any, name: str, value: Any, argument: str | None = None) -> bool:
    """Writes a number into a struct. Returns whether the field takes whole numbers only.

    Raises:
        InvalidArgument: a value that the field cannot hold.
    """
    kind = dict(ffi.typeof(config).item.fields)[name].type
    whole = kind.kind == "primitive" and kind.cname not in ("double", "float")
    try:
        setattr(config, name, operator.index(value) if whole else value)
    except (TypeError, OverflowError) as error:
        held = f"a whole number from 0 to 2^{8 * ffi.sizeof(kind)} - 1" if whole else "a number"
        raise errors.InvalidArgument(argument or name, repr(value), held) from error
    return whole


def path_bytes(path: str | os.PathLike[str]) -> bytes:
    """A path as C takes it.

    Raises:
        InvalidArgument: it is no path.
    """
    try:
        given = os.fsencode(path)
    except TypeError as error:
        raise errors.InvalidArgument("path", type(path).__name__, "a path") from error
    except UnicodeEncodeError as error:
        raise errors.InvalidArgument("path", repr(path), "characters that a file's name may have") from error
    return text_bytes(given, "path")


def text_bytes(text: str | bytes, name: str) -> bytes:
    """A text as C takes it, which must have no zero byte.

    Raises:
        InvalidArgument: it is no text, or has such a byte.
    """
    if not isinstance(text, (str, bytes)):
        raise errors.InvalidArgument(name, type(text).__name__, "a text")
    try:
        given = text.encode() if isinstance(text, str) else text
    except UnicodeEncodeError as error:
        raise errors.InvalidArgument(name, repr(text), "a text without lone surrogates") from error
    if b"\0" in given:
        raise errors.InvalidArgument(name, repr(text), "no zero byte in it")
    return given


def version() -> str:
    """The version of the loaded library."""
    return str(ffi.string(lib.fb_version()).decode())
