"""Boxes, texts and arrows for the pictures, and the rules that a picture must keep.

A picture measures its texts by the widths of DejaVu Sans, the widest face that a reader's system is likely to use, so
that what fits here fits everywhere. A finished picture rejects a text that leaves its box or the picture, texts that
overlap, and a line through a text. Colours are the report's (style.css below cli/src), as classes: one file serves
light and dark. This module does not depend on what is drawn.
"""

import math
import pathlib
import re
from xml.sax.saxutils import escape, quoteattr

ROOT = pathlib.Path(__file__).resolve().parents[2]

# The widths in thousandths of the size, from the space on: DejaVu Sans, then its bold face.
REGULAR = [318, 401, 460, 838, 636, 950, 780, 275, 390, 390, 500, 838, 318, 361, 318, 337, 636, 636, 636, 636, 636, 636,
           636, 636, 636, 636, 337, 337, 838, 838, 838, 531, 1000, 684, 686, 698, 770, 632, 575, 775, 752, 295, 295,
           656, 557, 863, 748, 787, 603, 787, 695, 635, 611, 732, 684, 989, 685, 611, 685, 390, 337, 390, 838, 500, 500,
           613, 635, 550, 635, 615, 352, 635, 634, 278, 278, 579, 278, 974, 634, 612, 635, 635, 411, 521, 392, 634, 592,
           818, 592, 592, 525, 636, 337, 636, 838]
BOLD = [348, 456, 521, 838, 696, 1002, 872, 306, 457, 457, 523, 838, 380, 415, 380, 365, 696, 696, 696, 696, 696, 696,
        696, 696, 696, 696, 400, 400, 838, 838, 838, 580, 1000, 774, 762, 734, 830, 683, 683, 821, 837, 372, 372, 775,
        637, 995, 837, 850, 733, 850, 770, 720, 682, 812, 774, 1103, 771, 724, 725, 457, 365, 457, 838, 500, 500, 675,
        716, 593, 716, 678, 435, 716, 712, 343, 343, 665, 343, 1042, 712, 687, 716, 716, 493, 595, 478, 712, 652, 924,
        645, 652, 582, 712, 365, 712, 838]
# The same in both faces.
OTHERS = {"…": 1000, "→": 838}

# A text's class: its size, and whether it is bold.
SIZES = {"": (14, False), "name": (14, True), "small": (13, False), "soft": (13, False), "on": (13, True),
         "badge": (12.5, True), "strong": (13, True)}
ASCENT, DESCENT = 0.76, 0.24

STYLE = """\
text { font: 14px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: var(--ink); }
.small, .soft { font-size: 13px; } .soft { fill: var(--soft); } .name { font-weight: 650; }
.on { font-size: 13px; font-weight: 650; fill: var(--card); } .strong { font-size: 13px; font-weight: 650; }
.badge { font-size: 12.5px; font-weight: 650; fill: var(--card); }
.m { text-anchor: middle; } .e { text-anchor: end; }
.paper { fill: var(--card); stroke: var(--edge); } .box { fill: var(--card); stroke: var(--soft); stroke-width: 1.3; }
.hollow { fill: none; stroke: var(--soft); stroke-dasharray: 3 3; }
.empty { fill: none; stroke: var(--soft); stroke-opacity: .5; }
.line { fill: none; stroke: var(--ink); stroke-width: 1.5; stroke-linejoin: round; } .head { fill: var(--ink); }
.thin { fill: none; stroke: var(--soft); stroke-width: 1.2; stroke-linejoin: round; } .thinhead { fill: var(--soft); }
.rule { fill: none; stroke: var(--edge); } .dot { fill: var(--strong); }
"""
# The elements with a colour of their own: each one's variable in the report's style.
HUES = {"host": "lru", "device": "tokens", "engine": "project", "miss": "optimum", "new": "cold", "scratch": "s3"}


class Fault(Exception):
    """The problem of a picture, in one line."""


def width(words, size=14, bold=False):
    """The width of a text."""
    table = BOLD if bold else REGULAR
    return sum(OTHERS[c] if c in OTHERS else table[ord(c) - 32] for c in words) * size / 1000


def at(value):
    """A coordinate with at most one decimal."""
    return f"{round(value, 1):g}"


def wrap(words, room, size=13):
    """Breaks a text into lines that are at most `room` wide."""
    lines = [""]
    for word in words.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and width(longer, size) > room:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def palette():
    """The report's light and dark colours, as far as the pictures use them."""
    (sheet,) = (ROOT / "cli/src").rglob("style.css")
    text = sheet.read_text()
    used = ["card", "edge", "ink", "soft", "strong", *HUES.values()]
    light, dark = re.findall(r":root \{(.*?)\}", text, re.S)[:2]
    sets = [dict(re.findall(r"--([\w-]+): (#\w+);", block)) for block in (light, dark)]
    return [" ".join(f"--{name}: {colours[name]};" for name in used) for colours in sets]


def style():
    """The style sheet that every picture carries."""
    light, dark = palette()
    rules = [f"svg {{ {light} }}", f"@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}", STYLE.rstrip()]
    for name, hue in HUES.items():
        hue = f"var(--{hue})"
        rules.append(f".{name} {{ fill: {hue}; }}")
        rules.append(f".{name}-pale {{ fill: {hue}; fill-opacity: .13; }}")
        rules.append(f".{name}-edge {{ fill: {hue}; fill-opacity: .13; stroke: {hue}; stroke-width: 1.3; }}")
        rules.append(f".{name}-card {{ fill: var(--card); stroke: {hue}; stroke-width: 1.6; }}")
        rules.append(f".{name}-line {{ fill: none; stroke: {hue}; stroke-width: 1.8; stroke-linejoin: round; }}")
    return "\n".join(rules)


class Figure:
    """A picture in the making, from its upper left corner."""

    def __init__(self, name, size, title, description):
        self.name, self.title, self.description = name, title, description
        self.width, self.height = size
        self.out, self.texts, self.lines = [], [], []
        self.rect("paper", 0.5, 0.5, self.width - 1, self.height - 1, 10)

    def fault(self, what):
        raise Fault(f"{self.name}: {what}")

    def rect(self, kind, x, y, w, h, r=5):
        self.out.append(f'<rect class="{kind}" x="{at(x)}" y="{at(y)}" width="{at(w)}" height="{at(h)}" rx="{at(r)}"/>')

    def text(self, kind, x, y, words, anchor="", cell=""):
        """A text on the base line y. `cell` says what the text is, for tests that read it."""
        size, bold = SIZES[kind]
        wide = width(words, size, bold)
        left = x - {"": 0, "m": wide / 2, "e": wide}[anchor]
        self.texts.append((kind, words, (left, y - ASCENT * size, left + wide, y + DESCENT * size)))
        classes = " ".join(filter(None, [kind, anchor]))
        classes = f' class="{classes}"' if classes else ""
        cell = f" data-cell={quoteattr(cell)}" if cell else ""
        self.out.append(f'<text{classes}{cell} x="{at(x)}" y="{at(y)}">{escape(words)}</text>')

    def label(self, kind, x, y, w, h, lines, text="", cell=""):
        """A box with lines of text in its middle; the first may be set apart as `(class, words)`."""
        self.rect(kind, x, y, w, h)
        lines = [line if isinstance(line, tuple) else (text, line) for line in lines]
        high = sum(SIZES[one][0] * 1.3 for one, _ in lines)
        top = y + (h - high) / 2
        for one, words in lines:
            size, bold = SIZES[one]
            if width(words, size, bold) > w - 6:
                self.fault(f"{words!r} is wider than its box")
            top += size * 1.3
            self.text(one, x + w / 2, top - size * 0.32, words, "m", cell)

    def paragraph(self, kind, x, y, room, words, step=18):
        """A text over several lines; returns the base line after it."""
        for line in wrap(words, room, SIZES[kind][0]):
            self.text(kind, x, y, line)
            y += step
        return y

    def badge(self, number, x, y):
        self.out.append(f'<circle class="dot" cx="{at(x)}" cy="{at(y)}" r="10"/>')
        self.text("badge", x, y + 4.5, str(number), "m")

    def arrow(self, points, kind="line", head="head"):
        """A line through points, with a head at its end unless `head` is empty."""
        self.lines.extend(zip(points, points[1:]))
        (x0, y0), (x, y) = points[-2:]
        length = math.hypot(x - x0, y - y0)
        dx, dy = (x - x0) / length, (y - y0) / length
        long, half = (8, 4) if head == "head" else (7, 3.4)
        ends = points[:-1] + [(x - dx * (long - 1), y - dy * (long - 1)) if head else (x, y)]
        path = "L".join(f"{at(x)} {at(y)}" for x, y in ends)
        self.out.append(f'<path class="{kind}" d="M{path}"/>')
        if head:
            back, side = (x - dx * long, y - dy * long), (-dy * half, dx * half)
            corners = [(x, y), (back[0] + side[0], back[1] + side[1]), (back[0] - side[0], back[1] - side[1])]
            path = "L".join(f"{at(x)} {at(y)}" for x, y in corners)
            self.out.append(f'<path class="{head}" d="M{path}Z"/>')

    def check(self):
        """Checks the rules of the module's head."""
        for i, (kind, words, (left, top, right, bottom)) in enumerate(self.texts):
            if left < 8 or right > self.width - 8 or top < 4 or bottom > self.height - 6:
                self.fault(f"{words!r} leaves the picture")
            for _, other, box in self.texts[i + 1:]:
                if left < box[2] + 3 and box[0] < right + 3 and top < box[3] and box[1] < bottom:
                    self.fault(f"{words!r} and {other!r} overlap")
            # A badge covers the line that it sits on.
            for a, b in self.lines if kind != "badge" else []:
                across = min(a[0], b[0]) < right + 2 and max(a[0], b[0]) > left - 2
                if across and min(a[1], b[1]) < bottom and max(a[1], b[1]) > top + 1:
                    self.fault(f"a line goes through {words!r}")

    def finish(self):
        """The file's text."""
        self.check()
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
                f'viewBox="0 0 {self.width} {self.height}" role="img" aria-labelledby="title description">')
        words = [f'<title id="title">{escape(self.title)}</title>',
                 f'<desc id="description">{escape(self.description)}</desc>']
        return "\n".join([head, *words, f"<style>\n{style()}\n</style>", *self.out, "</svg>", ""])
