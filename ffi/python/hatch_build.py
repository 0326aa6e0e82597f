"""Makes the wheel whole: libforebay.so by cargo, and the module of declarations by cffi.

cffi's ABI mode needs no C compiler and gives one wheel for all Pythons. A wheel is built from a checkout: the library's
sources stand two folders up. An editable install has both files beside the package's sources.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).resolve().parent
# The oldest C library that forebay is for.
GLIBC_LEAST = 34


class NativeHook(BuildHookInterface[Any]):
    """Called by hatchling before it packs a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds both files and says where in the wheel they stand, and for which machines it is."""
        library = build_library()
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform(library.read_bytes())}"
        if version == "editable":
            folder = HERE / "forebay"
            (folder / "libforebay.so").unlink(missing_ok=True)
            (folder / "libforebay.so").write_bytes(library.read_bytes())
            write_module(folder / "_ffi.py")
            return
        folder = library.parent / "python"
        folder.mkdir(exist_ok=True)
        write_module(folder / "_ffi.py")
        build_data["force_include"][str(folder / "_ffi.py")] = "forebay/_ffi.py"
        build_data["force_include"][str(library)] = "forebay/libforebay.so"


def build_library() -> Path:
    """The library, built; cargo says where it is.

    Raises:
        RuntimeError: no cargo, no checkout, or the build failed.
    """
    root = HERE.parent.parent
    if not (root / "ffi" / "Cargo.toml").is_file():
        raise RuntimeError("forebay is built from a checkout of its repository: pip install ./ffi/python")
    command = ["cargo", "build", "--release", "--locked", "-p", "forebay-ffi"]
    try:
        built = subprocess.run(
            [*command, "--message-format=json-render-diagnostics"], cwd=root, stdout=subprocess.PIPE, check=True
        )
    except FileNotFoundError:
        raise RuntimeError("cargo is not there: install Rust 1.95 or newer") from None
    except subprocess.CalledProcessError:
        raise RuntimeError("the build of libforebay.so failed: see above") from None
    for line in built.stdout.splitlines():
        for file in json.loads(line).get("filenames", []):
            if Path(file).name == "libforebay.so":
                return Path(file)
    raise RuntimeError("cargo built no libforebay.so")


def platform(library: bytes) -> str:
    """The wheel's platform tag, from the newest symbol version of the C library that `library` asks for."""
    asked = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library)]
    return f"manylinux_2_{max([GLIBC_LEAST, *asked])}_x86_64"


def write_module(path: Path) -> None:
    """The module with the declarations of the committed header.

    Raises:
        ValueError: the header is not understood.
    """
    # pip builds where no other cffi than the build's own is.
    import cffi

    spec = importlib.util.spec_from_file_location("declarations", HERE / "declarations.py")
    if spec is None or spec.loader is None:
        raise RuntimeError("declarations.py is not there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    header = (HERE.parent / "include" / "forebay.h").read_text()
    builder = cffi.FFI()
    builder.set_source("forebay._ffi", None)
    builder.cdef(module.declarations(header))
    builder.emit_python_code(str(path))
