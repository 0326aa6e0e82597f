"""The rule by an example: exact LRU, step by step. Its numbers are computed here, by a list; a test runs the library's
rule over the same rows and reads the picture (tests/figures.rs)."""

from draw import Figure

ROWS, BUDGET = 6, 3
BEFORE = [0, 1, 2]
STEPS = [[4, 1], [3, 2], [5, 0]]
# The left edge of each column.
COLUMNS = {"indices": 72, "hits": 146, "misses": 216, "victims": 290, "order": 368}
CHIP, PITCH, TOP, HIGH = 28, 31, 92, 52


def steps():
    """Each step's top-k indices, hits, misses, victims, and the order after it, from oldest to newest."""
    order = BEFORE
    for indices in STEPS:
        hits = sorted(row for row in indices if row in order)
        misses = sorted(row for row in indices if row not in order)
        assert len(hits + misses) <= BUDGET
        line = [row for row in order if row not in indices] + sorted(indices)
        victims, order = line[:-BUDGET], line[-BUDGET:]
        yield {"indices": indices, "hits": hits, "misses": misses, "victims": victims, "order": order}


def chips(figure, y, step, column, rows, kind):
    """Draws rows as chips, or "none"."""
    x = COLUMNS[column]
    for i, row in enumerate(rows):
        figure.label(kind(row), x + PITCH * i, y, CHIP, CHIP, [str(row)], "strong", f"{step} {column}")
    if not rows:
        figure.text("soft", x + 2, y + 19, "none")


def line(figure, y, step, told):
    """One step's row of the table."""
    kinds = {row: "device-card" for row in told["hits"]} | {row: "miss-card" for row in told["misses"]}
    for column, rows in told.items():
        kind = {"indices": lambda row: "box", "victims": lambda row: "hollow"}.get(
            column, lambda row: kinds.get(row, "box"))
        chips(figure, y, step, column, rows, kind)


def figure():
    told = list(steps())
    words = []
    for i, step in enumerate(told, 1):
        rows = {column: ", ".join(map(str, rows)) or "none" for column, rows in step.items()}
        words.append(f"Step {i}: top-k indices {rows['indices']}; hits {rows['hits']}; misses {rows['misses']}; "
                     f"victims {rows['victims']}; order {rows['order']}.")
    picture = Figure(
        "rule", (480, 370), "Exact LRU, step by step",
        f"Six rows, a budget of {BUDGET} slots, {len(STEPS)} steps. Resident before, from oldest to newest: "
        f"{', '.join(map(str, BEFORE))}. {' '.join(words)}")
    heads = {"indices": ("top-k", "indices"), "hits": ("hits", "resident"), "misses": ("misses", "fetched"),
             "victims": ("victims", "evicted"), "order": ("order after", "old → new")}
    for column, (name, about) in heads.items():
        picture.text("name", COLUMNS[column], 34, name)
        picture.text("name" if column == "indices" else "soft", COLUMNS[column], 52, about)
    picture.rect("device-pale", COLUMNS["order"] - 8, TOP - 25, PITCH * BUDGET + 13, HIGH * 4 - 4, 8)
    picture.text("name", 12, TOP + 4, "before")
    chips(picture, TOP - 15, "before", "order", BEFORE, lambda row: "box")
    for i, step in enumerate(told, 1):
        y = TOP - 15 + HIGH * i
        picture.out.append(f'<path class="rule" d="M12 {y - 12}H{COLUMNS["order"] - 14}"/>')
        picture.text("name", 12, y + 19, f"step {i}")
        line(picture, y, str(i), step)
    said = ("The order after a step: rows that it did not select, as they were; then the rows that it selected, hit or "
            "fetched, by ascending position; then its accepted new rows, of which the example has none. "
            f"The newest {BUDGET} stay, the others are the victims.")
    picture.paragraph("small", 12, TOP + HIGH * 4 - 1, 456, said)
    return picture
