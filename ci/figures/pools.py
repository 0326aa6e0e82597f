"""The two pools, and the way of one row through them."""

from draw import Figure

# The tops of the lanes and of the words below.
HOST, DEVICE, ENGINE, WORDS = 12, 172, 328, 436
STEPS = [
    ("append", "prefill stores each row in its page"),
    ("join", "a warm-up brings the first rows to slots"),
    ("resolve", "looks the top-k indices up: hit or miss"),
    ("gather", "fetches the missed rows from their pages"),
    ("attention", "reads its rows in the slots"),
    ("scatter", "stores the step's new rows in their page"),
    ("commit", "copies the accepted rows to slots"),
    ("eviction", "reuses a slot; nothing is written back"),
]


def cells(figure, x, y, pitch, high, kinds):
    for i, kind in enumerate(kinds):
        figure.rect(kind, x + pitch * i, y, pitch - 2, high, 2)


def host(figure):
    figure.rect("host-pale", 12, HOST, 456, 104, 8)
    figure.text("name", 24, HOST + 25, "Total pool")
    figure.text("soft", 114, HOST + 25, "every row, in pinned host memory")
    full = ["host"] * 14
    for i, page in enumerate([full, full[:4] + ["miss"] + full[5:], full[:6] + ["new"] + ["empty"] * 7]):
        figure.rect("box", 24 + 148 * i, HOST + 38, 136, 38)
        cells(figure, 32 + 148 * i, HOST + 46, 8.7, 22, page)
    figure.text("small", 58, HOST + 94, "64 tokens")
    figure.text("small", 399, HOST + 94, "new row")


def device(figure):
    figure.rect("device-pale", 12, DEVICE, 456, 106, 8)
    figure.label("box", 76, DEVICE + 12, 76, 44, ["resolve"])
    figure.rect("box", 190, DEVICE + 12, 134, 44)
    cells(figure, 198, DEVICE + 20, 24, 28, ["miss", "device", "device", "device", "device"])
    figure.rect("box", 372, DEVICE + 12, 86, 44)
    cells(figure, 380, DEVICE + 20, 24, 28, ["new", "empty", "empty"])
    figure.text("small", 268, DEVICE + 73, "slots")
    figure.text("small", 424, DEVICE + 73, "landing slots", "e")
    figure.text("name", 123, DEVICE + 96, "Sparse pool")
    figure.text("soft", 266, DEVICE + 96, "few rows, on the device")


def engine(figure):
    figure.rect("engine-pale", 12, ENGINE, 456, 80, 8)
    for x, wide, words in [(20, 58, "prefill"), (84, 60, "top-k"), (206, 104, "attention"), (384, 76, "new rows")]:
        figure.label("box", x, ENGINE + 12, wide, 36, [words])
    figure.text("name", 24, ENGINE + 68, "Engine")
    figure.text("soft", 87, ENGINE + 68, "its kernels and projections")


def ways(figure):
    page, box, under, work = HOST + 80, DEVICE + 9, DEVICE + 59, ENGINE + 12
    upper, lower = (HOST + 104 + DEVICE) / 2, (DEVICE + 106 + ENGINE) / 2
    figure.arrow([(48, work), (48, page)])
    figure.badge(1, 48, upper)
    figure.text("small", 63, upper + 5, "append")
    figure.arrow([(114, work), (114, under)])
    figure.badge(3, 152, DEVICE + 12)
    figure.arrow([(152, DEVICE + 34), (186, DEVICE + 34)])
    figure.text("small", 170, DEVICE + 28, "hit", "m")
    figure.arrow([(130, DEVICE + 12), (130, upper), (199, upper)], "miss-line", "miss")
    figure.text("small", 139, upper - 7, "miss")
    figure.arrow([(209, page), (209, box)], "miss-line", "miss")
    figure.badge(4, 209, upper)
    figure.text("small", 224, upper + 5, "gather")
    figure.arrow([(305, page), (305, box)])
    figure.badge(2, 305, upper)
    figure.text("small", 319, upper + 5, "warm-up")
    figure.arrow([(391, DEVICE + 20), (391, page)], "new-line", "new")
    figure.badge(6, 391, upper)
    figure.text("small", 405, upper + 5, "scatter")
    figure.arrow([(372, DEVICE + 34), (328, DEVICE + 34)], "new-line", "new")
    figure.badge(7, 350, DEVICE + 34)
    figure.arrow([(258, DEVICE + 56), (258, work - 3)])
    figure.badge(5, 258, lower)
    figure.text("small", 273, lower + 5, "reads")
    figure.arrow([(432, work), (432, under)])
    figure.text("small", 424, lower + 5, "writes", "e")
    figure.badge(8, 209, DEVICE + 68)


def figure():
    picture = Figure(
        "pools", (480, WORDS + 190), "The two pools and the way of one row",
        "Three lanes. Above, the total pool in pinned host memory: every row, in pages of 64 tokens. In the middle, "
        "the sparse pool on the device: few rows, in slots. Below, the engine's kernels. "
        + " ".join(f"{i}: {name}, {what}." for i, (name, what) in enumerate(STEPS, 1)))
    for part in (host, device, engine, ways):
        part(picture)
    for i, (name, what) in enumerate(STEPS):
        y = WORDS + 24 * i
        picture.badge(i + 1, 32, y - 5)
        picture.text("strong", 52, y, name)
        picture.text("small", 136, y, what)
    return picture
