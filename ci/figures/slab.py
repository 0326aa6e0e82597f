"""The slab of the sparse pool: the regions of a layer's range of slots, with the slot ids of a small cache."""

from draw import Figure

BLOCK = 64
# A small cache on a device with mapping multiples of 4 KiB: its lanes, query rows of a step, scratch slots of a lane,
# budget blocks of a layer, and the bytes of a row.
LANES, QUERY_ROWS, SCRATCH, BLOCKS, ROW, GRAIN = 2, 2, 60, 4, 656, 4096
# By layer, the owner of each block.
OWNERS = [("layer 0", "ABA "), ("layer 1", "AABB"), ("layer n", "BA A")]
NOTES = [
    ("scratch slots", "For rows beyond the budget, for one layer of one step: the same physical memory behind every "
     "layer. Slots up to the next mapping are unused."),
    ("landing slots", "A step's new rows are written here; the next step commits the accepted ones."),
    ("blocks of 64 slots", "The budgets of the sequences A and B. The blocks of one need not be neighbours."),
]
LEFT, TOP, PITCH, HIGH = 76, 92, 54, 40
# Units of each region.
WIDE = {"scratch": 84, "unused": 66, "landing": 66, "block": 45}


def up(value, step):
    return -(-value // step) * step


def ids():
    """The first slot id of the landing slots and of the budget blocks, and the last id after them."""
    block = BLOCK * ROW
    scratch = up(up(1 + LANES * SCRATCH, BLOCK) // BLOCK * block, GRAIN)
    landing = up(scratch, block) // block
    budget = landing + up(LANES * QUERY_ROWS, BLOCK) // BLOCK
    return landing * BLOCK, budget * BLOCK, (budget + BLOCKS) * BLOCK


def edges():
    """The left edge of every region."""
    x = {"scratch": LEFT}
    x["unused"] = x["scratch"] + WIDE["scratch"]
    x["landing"] = x["unused"] + WIDE["unused"]
    x["block"] = x["landing"] + WIDE["landing"]
    return x


def axis(figure, x):
    landing, budget, _ = ids()
    marks = [(x["scratch"], "1", "scratch"), (x["landing"], str(landing), "landing")]
    marks += [(x["block"] + WIDE["block"] * i, str(budget + BLOCK * i), f"block {i}") for i in range(BLOCKS)]
    figure.text("soft", 12, TOP - 20, "slot ids")
    for place, words, cell in marks:
        figure.arrow([(place + 0.5, TOP - 12), (place + 0.5, TOP - 4)], "thin", "")
        figure.text("small", place, TOP - 20, words, cell=cell)


def layers(figure, x):
    for i, (name, owners) in enumerate(OWNERS):
        y = TOP + PITCH * i
        figure.text("name", 12, y + 25, name)
        figure.label("scratch-edge", x["scratch"], y, WIDE["scratch"] - 4, HIGH, ["scratch", "slots"], "small")
        figure.label("hollow", x["unused"] + 4, y, WIDE["unused"] - 8, HIGH, ["unused"], "soft")
        figure.label("new-edge", x["landing"], y, WIDE["landing"] - 4, HIGH, ["landing", "slots"], "small")
        for j, owner in enumerate(owners):
            kind = {"A": "device-edge", "B": "host-edge", " ": "box"}[owner]
            words = "free" if owner == " " else owner
            figure.label(kind, x["block"] + WIDE["block"] * j, y, WIDE["block"] - 4, HIGH, [words], "small")


def figure():
    landing, budget, end = ids()
    picture = Figure(
        "slab", (480, 486), "The slab of the sparse pool",
        "One range of slot ids a layer. It begins with scratch slots, the same physical memory behind every layer. "
        "Then come landing slots, at equal ids in every layer but in memory of their own, and blocks of 64 slots "
        "that the budgets of sequences are made of. In a small cache the scratch slots begin at id 1, since 0 "
        f"means none, the landing slots at {landing}, the blocks at {budget}, and the last id is {end - 1}.")
    x = edges()
    bottom = TOP + PITCH * len(OWNERS) - (PITCH - HIGH)
    picture.text("name", x["scratch"], 34, "shared")
    picture.text("name", x["landing"], 34, "each layer's own")
    picture.rect("scratch-pale", x["scratch"] - 6, 46, WIDE["scratch"] + 8, bottom - 46 + 8, 8)
    axis(picture, x)
    layers(picture, x)
    y = bottom + 40
    for name, words in NOTES:
        picture.text("strong", 12, y, name)
        y = picture.paragraph("small", 12, y + 19, 456, words) + 12
    return picture
