"""The programs on the pages run. Those on the page about embedding print the same line in every language."""

from __future__ import annotations

import subprocess
import sys

from conftest import ROOT


def test_the_listing_prints_the_output_of_the_page() -> None:
    page = (ROOT / "docs" / "integration.md").read_text()
    printed = page.partition("```text\n")[2].partition("```")[0].strip()
    listing = ROOT / "examples" / "integration" / "decode.py"
    ran = subprocess.run([sys.executable, listing], check=True, stdout=subprocess.PIPE, text=True)
    assert ran.stdout.strip() == printed and printed


def test_the_readme_runs() -> None:
    page = (ROOT / "ffi" / "python" / "README.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]
    ran = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    assert ran.stdout.startswith("Retired(step=1, hits=0, misses=16")
