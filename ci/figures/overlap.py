"""One layer's work on its streams, in the orders none, DA and DBA.

The edges are those of src/overlap/schedule.rs, and a test compares them (tests/overlap.rs). A work begins when its
stream is free and the work that it waits for has ended. The lengths are chosen to show what hides what; they measure
nothing.
"""

from draw import Figure

LENGTHS = {"I0": 26, "I": 88, "I1": 44, "I2": 44, "R": 24, "R1": 24, "R2": 24, "G": 130, "G1": 65, "G2": 65, "P": 48,
           "A": 84, "A0": 62, "A1": 36, "M": 20, "S": 26}
# Each work with its stream and the work that it waits for on other streams.
ORDERS = [
    ("none", "attention waits for the gather", [
        ("I0", "compute", ""), ("I", "compute", ""), ("R", "compute", ""), ("G", "compute", ""), ("P", "compute", ""),
        ("A", "compute", ""), ("S", "scatter", "P")]),
    ("DA", "P and A0 hide a part of the gather", [
        ("I0", "compute", ""), ("I", "compute", ""), ("R", "resolve", "I"), ("G", "gather", "R"), ("P", "compute", ""),
        ("S", "scatter", "P"), ("A0", "compute", "R"), ("A1", "compute", "G"), ("M", "compute", "")]),
    ("DBA", "the second half's indexer I2 hides more", [
        ("I0", "compute", ""), ("I1", "compute", ""), ("R1", "resolve", "I1"), ("G1", "gather", "R1"),
        ("I2", "compute", ""), ("R2", "resolve", "I2"), ("G2", "gather", "R2"), ("P", "compute", ""),
        ("S", "scatter", "P"), ("A0", "compute", "R2"), ("A1", "compute", "G2"), ("M", "compute", "")]),
]
# The work that the library enqueues and that an order may hide.
OURS = ("R", "R1", "R2", "G", "G1", "G2")
STREAMS = ["scatter", "compute", "resolve", "gather"]
LEFT, RIGHT, SCALE, LANE, BAR = 77, 468, 0.97, 36, 24
NOTES = [("I0", "projections, index keys"), ("I, I1, I2", "indexer: logits, top-k"), ("P", "preparation, new rows"),
         ("A0", "attention, resident rows"), ("A1", "attention, fetched rows"), ("M", "merge of A0 and A1"),
         ("R", "resolve"), ("G", "gather"), ("S", "scatter")]


def times(works):
    """The begin and end of each work."""
    free, spans = {}, {}
    for name, stream, after in works:
        start = max(free.get(stream, 0), spans[after][1] if after else 0)
        spans[name] = (start, start + LENGTHS[name])
        free[stream] = spans[name][1]
    return spans


def place(time):
    return LEFT + SCALE * time


def busy(works, spans):
    """The stretches in which the compute stream does the engine's work."""
    stretches = []
    for name, stream, _ in works:
        if stream != "compute" or name in OURS:
            continue
        start, end = spans[name]
        if stretches and stretches[-1][1] == start:
            stretches[-1] = (stretches[-1][0], end)
        else:
            stretches.append((start, end))
    return stretches


def pieces(span, cover):
    """A span in pieces: from, to, and whether the engine computes meanwhile."""
    cuts = sorted({*span, *(time for one in cover for time in one if span[0] < time < span[1])})
    for start, end in zip(cuts, cuts[1:]):
        yield start, end, any(one[0] <= start and end <= one[1] for one in cover)


def bar(figure, name, stream, span, y, cover, cell):
    """Draws a work: the engine's in one piece, R and G split into the hidden and the exposed pieces."""
    parts = list(pieces(span, cover)) if name in OURS else [(*span, True)]
    for start, end, hidden in parts:
        kind = "device-edge" if name in OURS else {"compute": "engine-edge", "scatter": "host-edge"}[stream]
        left, right = place(start) + 1, place(end) - 1
        figure.rect(kind if hidden else "miss", left, y, right - left, BAR, 3)
    start, end, hidden = parts[0]
    figure.text("small" if hidden else "on", place((start + end) / 2), y + 16.5, name, "m", cell)


def gaps(figure, cover, y, last):
    """Marks where the compute stream waits, and the time that an order saves against none."""
    for (_, start), (end, _) in zip(cover, cover[1:]):
        figure.rect("hollow", place(start) + 1, y, place(end) - place(start) - 2, BAR, 3)
        figure.text("soft", place((start + end) / 2), y + 16.5, "waits", "m")
    end = cover[-1][1]
    if end < last:
        middle, half = place((end + last) / 2), 24
        figure.arrow([(middle + half, y + 12), (place(last), y + 12)], "thin", "")
        figure.arrow([(middle - half, y + 12), (place(end) + 4, y + 12)], "thin", "thinhead")
        figure.arrow([(place(last), y + 2), (place(last), y + BAR - 2)], "thin", "")
        figure.text("soft", middle, y + 16.5, "saved", "m")


def edges(figure, works, spans, rows):
    streams = {name: stream for name, stream, _ in works}
    for name, stream, after in works:
        if not after:
            continue
        up = rows[stream] < rows[streams[after]]
        x, to = place(spans[after][1]), place(spans[name][0])
        start, end = (rows[streams[after]] - 1, rows[stream] + BAR + 2) if up else (
            rows[streams[after]] + BAR + 1, rows[stream] - 2)
        # The arrow to a work that begins later ends at the nearer edge of its lane.
        bend = end + 6 if up else end - 6
        points = [(x - 2, start), (x - 2, bend), (to + 3, bend), (to + 3, end)]
        figure.arrow(points if to - x > 6 else [(x, start), (x, end)], "thin", "thinhead")


def order(figure, top, last, name, about, works):
    """Draws one order next to the end of none; returns its lower edge."""
    spans = times(works)
    used = {stream for _, stream, _ in works}
    streams = [stream for stream in STREAMS if stream in used]
    rows = {stream: top + 22 + LANE * i for i, stream in enumerate(streams)}
    figure.text("name", 12, top + 4, name)
    figure.text("soft", LEFT, top + 4, about)
    for stream, y in rows.items():
        figure.text("soft", 12, y + 17, stream)
        figure.out.append(f'<path class="rule" d="M{LEFT} {y + BAR + 4}H{RIGHT}"/>')
    cover = busy(works, spans)
    for work, stream, after in works:
        start, end = spans[work]
        bar(figure, work, stream, (start, end), rows[stream], cover, f"{name} {work} {stream} {start} {end} {after}")
    edges(figure, works, spans, rows)
    if name != "none":
        gaps(figure, cover, rows["compute"], last)
    return top + 16 + LANE * len(streams)


def figure():
    picture = Figure(
        "overlap", (480, 674), "A layer's work in the orders none, DA and DBA",
        "Three timelines of one layer. none: I0, I, R, G, P and A follow each other on one stream, so resolve and "
        "gather are exposed. DA: the gather runs beside P and A0, and its rest is exposed. DBA: the gather of the "
        "first half of the batch also runs beside the indexer of the second half, I2. Scatter runs beside "
        "attention in all three.")
    last = times(ORDERS[0][2])["A"][1]
    top = 30
    for one in ORDERS:
        top = order(picture, top, last, *one) + 26
    top += 4
    picture.rect("device-edge", 12, top - 12, 16, 14, 3)
    picture.text("small", 36, top, "hidden")
    picture.rect("miss", 104, top - 12, 16, 14, 3)
    picture.text("small", 128, top, "exposed: the engine waits")
    picture.text("soft", 12, top + 24, "The lengths are chosen to show the order. They are not measured.")
    for i, (name, what) in enumerate(NOTES):
        x, y = [12, 288][i // 5], top + 54 + 20 * (i % 5)
        picture.text("strong", x, y, name)
        picture.text("small", x + [76, 28][i // 5], y, what)
    return picture
