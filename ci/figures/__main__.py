"""Draws the pictures of the documentation, docs/images/*.svg; `make figures` runs it.

    python3 ci/figures            writes them
    python3 ci/figures --check    fails if one differs from what is drawn here

Needs Python 3.11 and nothing else.
"""

import argparse
import pathlib
import sys
from xml.etree import ElementTree

import dense
import lives
import overlap
import pools
import rule
import slab
import transfer
from draw import ROOT, Fault

FIGURES = [pools.figure, dense.figure, slab.figure, overlap.figure, lives.sequence, lives.page, rule.figure,
           transfer.frames, transfer.states]


def drawn():
    """Each picture's name and text."""
    for draw in FIGURES:
        figure = draw()
        text = figure.finish()
        ElementTree.fromstring(text)
        yield f"{figure.name}.svg", text


def main():
    parser = argparse.ArgumentParser(description="Draws the pictures of the documentation.")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--to", type=pathlib.Path, default=ROOT / "docs/images", help="the folder of the pictures")
    options = parser.parse_args()
    figures = dict(drawn())
    if not options.check:
        for name, text in figures.items():
            (options.to / name).write_text(text)
        return
    there = {path.name: path.read_text() for path in options.to.glob("*.svg")}
    stale = sorted(name for name in figures | there if figures.get(name) != there.get(name))
    if stale:
        raise Fault(f"not what ci/figures draws: {', '.join(stale)}; run make figures")


if __name__ == "__main__":
    try:
        main()
    except Fault as fault:
        sys.exit(f"ci/figures: {fault}")
