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


def test_the_listing_of_a_dense_model_prints_the_output_of_its_section() -> None:
    page = (ROOT / "docs" / "integration.md").read_text()
    section = page.partition("\n## Dense models\n")[2]
    printed = section.partition("```text\n")[2].partition("```")[0].strip()
    listing = ROOT / "examples" / "integration" / "dense.py"
    ran = subprocess.run([sys.executable, listing], check=True, stdout=subprocess.PIPE, text=True)
    assert ran.stdout.strip() == printed and printed


def test_the_listing_of_sharded_weights_prints_the_table_of_the_page() -> None:
    page = (ROOT / "docs" / "weights.md").read_text()
    head, _, rest = page.partition("```text\nrank  resident")
    printed = "rank  resident" + rest.partition("\n```")[0]
    listing = ROOT / "examples" / "integration" / "weights.py"
    ran = subprocess.run([sys.executable, listing], check=True, stdout=subprocess.PIPE, text=True)
    assert head and ran.stdout == printed + "\n"
    # Six layers of 256 KiB: each rank has half of them, and two buffers for the other half of a layer.
    half = 128 << 10
    held = ["0", str(6 * half), str(2 * half), str(12 * half - 8 * half)]
    assert [line.split()[1:] for line in printed.splitlines()[1:]] == [held] * 2


def test_the_readme_runs() -> None:
    page = (ROOT / "ffi" / "python" / "README.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]
    ran = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    assert ran.stdout.startswith("Retired(step=1, hits=0, misses=16")
