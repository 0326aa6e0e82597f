"""forebay.transformers without torch and transformers: nothing else needs them, and it says what is missing.

Its own tests run where both are installed (`make engines ENGINE=transformers`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# None in `sys.modules` makes an import fail, so these run the same way where the packages are installed.
ABSENT = "import sys; sys.modules.update(torch=None, transformers=None)\n"


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_and_its_serving_import_neither_torch_nor_transformers() -> None:
    program = "import sys, forebay, forebay.serving; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert run(program) == "[]\n"


def test_the_adapter_says_what_to_install() -> None:
    program = ABSENT + (
        "try:\n"
        "    import forebay.transformers\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    said = run(program)
    assert "torch and transformers" in said and "pip install 'forebay[transformers]'" in said


def test_the_command_says_it_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('planted')")
    given = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "forebay.transformers", "check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=given)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "planted" in done.stderr, done.stderr
