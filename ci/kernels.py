"""Compiles the CUDA kernels by NVRTC, and reports what each costs; ci/kernels runs it.

The output has the same bytes for the same sources and compilers on every machine: the compiler gets sources by name and
text, never by path, and the output has no lines or times. The manifest next to the output lists the sources it was made
of, so that a plain test (tests/embedded.rs) detects a source that was edited and not compiled. It also lists what each
kernel takes in each architecture. Its format is that of `sha256sum --check`.
"""

import argparse
import ctypes
import hashlib
import pathlib
import re
import subprocess
import sys

KERNELS = pathlib.Path("src/device/cuda/kernels")
MAIN = "forebay.cu"
ARCHITECTURES = ["80", "90", "100", "120"]
# PTX for every device that none of the cubins runs on.
PTX = "80"
OPTIONS = ["--std=c++17", "--ptxas-options=-v"]
MANIFEST = "manifest.txt"
HEAD = """\
# Written by ci/kernels. The sources and what was made of them, as `sha256sum --check` reads it, here:
"""


class Failed(Exception):
    """The problems, one per line."""


class Compiler:
    """One NVRTC."""

    def __init__(self, folder):
        library = folder / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
        self.nvrtc = ctypes.CDLL(str(library.resolve()))
        pinned = (folder / "requirements.txt").read_text()
        self.version = re.search(r"^nvidia-cuda-nvrtc-cu12==(\S+)", pinned, re.M)[1]

    def call(self, name, *arguments):
        result = getattr(self.nvrtc, name)(*arguments)
        if result != 0:
            raise Failed(f"{name} of NVRTC {self.version} returned {result}")

    def text(self, program, what):
        """Returns what NVRTC has of a program: its log, its PTX or its cubin."""
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def compile(self, sources, target):
        """Returns the cubin (sm_NN) or PTX (compute_NN), and ptxas's output."""
        headers = {name: text for name, text in sources.items() if name != MAIN}
        strings = lambda values: (ctypes.c_char_p * len(values))(*values)
        program = ctypes.c_void_p()
        self.call("nvrtcCreateProgram", ctypes.byref(program), sources[MAIN], MAIN.encode(), len(headers),
                  strings(list(headers.values())), strings([name.encode() for name in headers]))
        options = [option.encode() for option in [f"--gpu-architecture={target}", *OPTIONS]]
        failed = self.nvrtc.nvrtcCompileProgram(program, len(options), strings(options))
        log = self.text(program, "ProgramLog").decode().rstrip("\0")
        said = [line for line in log.splitlines() if not line.startswith("ptxas ") and line.strip()]
        if failed or said:
            raise Failed(f"NVRTC {self.version} about {target}:\n" + "\n".join(said))
        made = self.text(program, "PTX" if target.startswith("compute") else "CUBIN")
        self.call("nvrtcDestroyProgram", ctypes.byref(program))
        return made.rstrip(b"\0") if target.startswith("compute") else made, log


def costs(log):
    """By kernel: registers, bytes of stack, spilled bytes, bytes of static shared memory, as ptxas reports them."""
    found = {}
    for part in log.split("Compiling entry function ")[1:]:
        name = re.match(r"'(\w+)'", part)[1]
        # The output has several entries of a kind if functions were not inlined.
        most = lambda pattern: max(map(int, re.findall(pattern, part)), default=0)
        found[name] = {
            "registers": most(r"Used (\d+) registers"),
            "stack": most(r"(\d+) bytes stack frame"),
            "spills": most(r"(\d+) bytes spill"),
            "shared": most(r"(\d+) bytes smem"),
        }
    return found


def limits(cuobjdump, cubin):
    """By kernel: registers, and the most threads of a block, from a cubin's file."""
    run = lambda what: subprocess.run([cuobjdump, what, cubin], check=True, capture_output=True, text=True).stdout
    registers = dict(re.findall(r"Function (\w+):\s+REG:(\d+)", run("-res-usage")))
    threads = {}
    for part in re.split(r"^\.nv\.info\.", run("-elf"), flags=re.M)[1:]:
        most = re.search(r"EIATTR_MAX_THREADS\s+Format:\s+\w+\s+Value:\s+(0x\w+) 0x1 0x1", part)
        threads[part.split()[0]] = int(most[1], 16) if most else 0
    return {name: (int(count), threads.get(name, 0)) for name, count in registers.items()}


def read_sources(folder):
    """The text of every source, by its name relative to the folder."""
    files = [file for ending in ("cu", "cuh", "h") for file in folder.glob(f"*.{ending}")]
    sources = {file.name: file.read_bytes() for file in sorted(files)}
    if MAIN not in sources:
        raise Failed(f"no {folder / MAIN}")
    return sources


def build(kernels, tools, out):
    """Compiles everything into `out`; returns the manifest's text and the costs by kernel and architecture."""
    sources = read_sources(kernels)
    compiler, old = Compiler(tools / "cubin"), Compiler(tools / "ptx")
    out.mkdir(parents=True, exist_ok=True)
    made, table = {}, []
    for architecture in ARCHITECTURES:
        name = f"forebay_sm{architecture}.cubin"
        made[name], log = compiler.compile(sources, f"sm_{architecture}")
        (out / name).write_bytes(made[name])
        found, file = costs(log), limits(tools / "cubin/nvidia/cu13/bin/cuobjdump", out / name)
        for kernel, cost in sorted(found.items()):
            registers, cost["threads"] = file.get(kernel, (0, 0))
            if registers != cost["registers"]:
                raise Failed(f"{name}: {kernel} has {registers} registers, but ptxas reported {cost['registers']}")
            table.append((kernel, architecture, cost))
    made["forebay.ptx"], _ = old.compile(sources, f"compute_{PTX}")
    (out / "forebay.ptx").write_bytes(made["forebay.ptx"])
    text = manifest(sources, made, table, [compiler.version, old.version])
    (out / MANIFEST).write_text(text)
    return text, table


def manifest(sources, made, table, versions):
    """See the module's head."""
    lines = [f"{hashlib.sha256(text).hexdigest()}  ../{name}" for name, text in sorted(sources.items())]
    lines += [f"{hashlib.sha256(data).hexdigest()}  {name}" for name, data in sorted(made.items())]
    lines += ["#", f"# cubins: NVRTC {versions[0]}, PTX: NVRTC {versions[1]}, {' '.join(OPTIONS)}", "#"]
    lines += ["# kernel                    sm  registers  stack  spills  shared  threads"]
    for kernel, architecture, cost in sorted(table, key=lambda row: (row[0], int(row[1]))):
        lines.append(f"# {kernel:<24} {architecture:>4} {cost['registers']:>10} {cost['stack']:>6} "
                     f"{cost['spills']:>7} {cost['shared']:>7} {cost['threads']:>8}")
    return HEAD + "\n".join(lines) + "\n"


def over_bounds(table, bounds):
    """The costs that exceed their bounds, one per line."""
    rows = [line.split() for line in bounds.splitlines() if line.strip() and not line.startswith("#")]
    known = {name: tuple(map(int, numbers)) for name, *numbers in rows}
    kernels = {kernel for kernel, _, _ in table}
    faults = [f"{name}: has bounds, and is no kernel" for name in known if name not in kernels | {"*"}]
    for kernel, architecture, cost in table:
        registers, shared, threads = known.get(kernel, known["*"])
        at = f"{kernel}, sm_{architecture}"
        if cost["spills"] or cost["stack"]:
            faults.append(f"{at}: spills {cost['spills']} bytes, stack {cost['stack']} bytes; none is allowed")
        if cost["registers"] > registers:
            faults.append(f"{at}: {cost['registers']} registers, at most {registers}")
        if cost["shared"] > shared:
            faults.append(f"{at}: {cost['shared']} bytes of static shared memory, at most {shared}")
        if cost["threads"] < threads:
            faults.append(f"{at}: blocks of {cost['threads']} threads, at least {threads} wanted")
    return faults


def differences(embedded, fresh):
    """The files that differ between two folders or are in one of them only."""
    names = {file.name for folder in (embedded, fresh) if folder.is_dir() for file in folder.iterdir()}
    read = lambda file: file.read_bytes() if file.is_file() else None
    return sorted(name for name in names if read(embedded / name) != read(fresh / name))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tools", type=pathlib.Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--kernels", type=pathlib.Path, default=KERNELS)
    parser.add_argument("--bounds", type=pathlib.Path, default=pathlib.Path("ci/kernels-bounds.txt"))
    arguments = parser.parse_args()
    built = arguments.kernels / "built"
    out = arguments.tools / "fresh" if arguments.check else built
    for old in out.glob("*"):
        old.unlink()
    _, table = build(arguments.kernels, arguments.tools, out)
    faults = over_bounds(table, arguments.bounds.read_text())
    if arguments.check:
        faults += [f"{built / name}: not what the sources make; run ci/kernels" for name in differences(built, out)]
    if faults:
        raise Failed("\n".join(faults))
    count = len({kernel for kernel, _, _ in table})
    print(f"within their bounds: {count} kernels for sm_{', sm_'.join(ARCHITECTURES)} and as PTX")


if __name__ == "__main__":
    try:
        main()
    except Failed as failed:
        sys.exit("\n".join(f"ci/kernels: {line}" for line in str(failed).splitlines()))
