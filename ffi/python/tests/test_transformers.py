"""forebay.transformers without torch and transformers: nothing else needs them, and it says what is missing.

Its own tests run where both are installed (`make engines ENGINE=transformers`).
"""

from __future__ import annotations

import subprocess
import sys

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
