"""The page about embedding shows programs that run: here the one in Python; all print the same line."""

from __future__ import annotations

import subprocess
import sys

from conftest import ROOT


def test_the_listing_prints_what_the_page_says() -> None:
    page = (ROOT / "docs" / "integration.md").read_text()
    printed = page.partition("```text\n")[2].partition("```")[0].strip()
    listing = ROOT / "examples" / "integration" / "decode.py"
    ran = subprocess.run([sys.executable, listing], check=True, stdout=subprocess.PIPE, text=True)
    assert ran.stdout.strip() == printed and printed
