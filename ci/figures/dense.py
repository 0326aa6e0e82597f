"""A dense model: pages on the device, and copies of published pages in host memory."""

from draw import Figure

DEVICE, HOST = 12, 312
PAGE, LEFT = 72, 28


def device(figure):
    figure.rect("device-pale", 12, DEVICE, 616, 236, 8)
    figure.text("name", 24, DEVICE + 26, "Device")
    figure.text("soft", 82, DEVICE + 26, "all rows of the open sequences, in pages")
    figure.text("small", 24, DEVICE + 62, "page tables")
    for row, (name, pages) in enumerate([("A", "125"), ("B", "127")]):
        y = DEVICE + 46 + 28 * row
        figure.text("name", 116, y + 16, name, "m")
        for i, page in enumerate(pages):
            figure.label("box", 130 + 32 * i, y, 30, 22, [page])
    figure.text("soft", 248, DEVICE + 62, "attention reads them at fixed addresses;")
    figure.text("soft", 248, DEVICE + 90, "a step's kernel writes what changed")
    kinds = ["device-edge", "device-edge", "hollow", "device-edge", "box", "hollow", "box", "hollow"]
    words = ["shared", "shared", "free", "unused", "A's own", "free", "B's own", "free"]
    for i, (kind, word) in enumerate(zip(kinds, words)):
        figure.label(kind, LEFT + PAGE * i, DEVICE + 122, 56, 40, [str(i + 1)])
        figure.text("soft", LEFT + PAGE * i + 28, DEVICE + 182, word, "m")
    figure.text("small", 24, DEVICE + 216,
                "Opening a sequence takes every page that it will need, so no step runs out.")


def host(figure):
    figure.rect("host-pale", 12, HOST, 616, 96, 8)
    for i, page in enumerate(["1", "2", "4", "9", "10", "11"]):
        figure.label("host-edge", LEFT + PAGE * i, HOST + 14, 56, 40, [page])
    figure.text("name", 24, HOST + 82, "Host memory")
    figure.text("soft", 136, HOST + 82, "copies of published pages, more than the device has room for")


def ways(figure):
    down, up = LEFT + PAGE + 28, LEFT + 4 * PAGE + 28
    figure.arrow([(down, DEVICE + 240), (down, HOST + 10)])
    figure.text("small", down + 14, DEVICE + 262, "saved in the background,")
    figure.text("small", down + 14, DEVICE + 282, "or when its page is taken")
    figure.arrow([(up, HOST - 2), (up, DEVICE + 240)])
    figure.text("small", up + 14, DEVICE + 262, "comes back when a prompt")
    figure.text("small", up + 14, DEVICE + 282, "begins with it")


def figure():
    picture = Figure(
        "dense", (640, HOST + 108), "A dense model: pages on the device, and a second tier in host memory",
        "Above, the device: the page tables of two sequences, A and B, and eight pages. Pages 1 and 2 are a prefix "
        "that both share; pages 5 and 7 are their own; page 4 is published and unused; the others are free. Below, "
        "host memory: copies of pages 1, 2 and 4, and of pages 9 to 11, which the device has no room for. A page goes "
        "down when it is saved, and comes up when a prompt begins with it.")
    for part in (device, host, ways):
        part(picture)
    return picture
