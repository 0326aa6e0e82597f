"""Makes the wheel whole: libforebay.so by cargo, and the module of declarations by cffi.

cffi's ABI mode needs no C compiler and gives one wheel for all Pythons. A wheel is built from a checkout: the library's
sources are two folders up. An editable install has both files beside the package's sources.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).resolve().parent
# The oldest C library that forebay is for.
GLIBC_LEAST = 34
# Machines as the ELF header numbers them and as wheels call them.
MACHINES = {62: "x86_64", 183: "aarch64"}


class NativeHook(BuildHookInterface[Any]):
    """Called by hatchling before it packs a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds both files and says where they go in the wheel, and which machines the wheel is for."""
        library = build_library(self.app.display_info)
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


def build_library(say: Callable[[str], None]) -> Path:
    """The library, built; cargo says where it is. `say` tells the user what is going on.

    Raises:
        RuntimeError: no cargo, one that is too old, no checkout, or the build failed.
    """
    root = HERE.parent.parent
    if not (root / "ffi" / "Cargo.toml").is_file():
        raise RuntimeError("forebay is built from a checkout of its repository: pip install ./ffi/python")
    check_cargo(root)
    # 7.5 minutes were measured from nothing, on 2 cores that other builds shared.
    took = "minutes the first time (7.5 on 2 busy cores), seconds afterwards"
    tell(say, f"forebay: cargo compiles the Rust library libforebay.so: {took}")
    command = ["cargo", "rustc", "--release", "--locked", "-p", "forebay-ffi", "--lib", "--crate-type", "cdylib"]
    command += ["--message-format=json-render-diagnostics"]
    try:
        built = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=True)
    except subprocess.CalledProcessError:
        raise RuntimeError("the build of libforebay.so failed: see above") from None
    for line in built.stdout.splitlines():
        for file in json.loads(line).get("filenames", []):
            if Path(file).name == "libforebay.so":
                return Path(file)
    raise RuntimeError("cargo built no libforebay.so")


def tell(say: Callable[[str], None], line: str, terminal: Path = Path("/dev/tty")) -> None:
    """Says `line` to the user. pip keeps what a build prints to itself unless it is run with -v, so a user at a
    terminal would watch a wheel turn for minutes: there the line goes."""
    say(line)
    if sys.stderr.isatty():
        return
    try:
        with terminal.open("a") as out:
            out.write(f"\n  {line}\n")
    except OSError:
        # The terminal is gone: no progress is shown.
        pass


def check_cargo(root: Path) -> None:
    """Looks whether cargo is there and new enough, before it compiles for minutes.

    Raises:
        RuntimeError: it is not, with what to do.
    """
    manifest = (root / "Cargo.toml").read_text()
    wanted = re.search(r'^rust-version = "(\d+)\.(\d+)"', manifest, re.MULTILINE)
    if wanted is None:
        raise RuntimeError("Cargo.toml does not say which Rust it needs")
    needs = f"forebay is compiled by cargo of Rust {'.'.join(wanted.groups())} or newer"
    install = "install it from https://rustup.rs, then run pip again"
    try:
        said = subprocess.run(["cargo", "--version"], cwd=root, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise RuntimeError(f"{needs}, and no cargo runs here: {install}") from None
    found = re.match(r"cargo (\d+)\.(\d+)", said)
    if found is None or tuple(map(int, found.groups())) < tuple(map(int, wanted.groups())):
        raise RuntimeError(f"{needs}, and here is {said.strip() or 'one of unknown version'}: {install}")


def platform(library: bytes) -> str:
    """The wheel's platform tag, from what `library` says: its machine, and the newest symbol version of the C library
    that it asks for.

    Raises:
        RuntimeError: no shared library of a 64-bit Linux machine that wheels are for, or one for another C library.
    """
    machine = MACHINES.get(int.from_bytes(library[18:20], "little"))
    if library[:6] != b"\x7fELF\x02\x01" or machine is None:
        raise RuntimeError(f"the library is for none of the machines {', '.join(MACHINES.values())}")
    asked = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library)]
    if not asked:
        raise RuntimeError("the library is for another C library than glibc: no wheel can say for which")
    return f"manylinux_2_{max([GLIBC_LEAST, *asked])}_{machine}"


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
