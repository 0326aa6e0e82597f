"""A request's frames (docs/transfer.md), and its states at both ends (src/transfer/receiver, src/transfer/sender)."""

from draw import Figure


def ends(figure, bottom):
    """The two ranks and the lines of their time."""
    figure.label("engine-card", 16, 16, 150, 44, [("name", "prefill rank"), ("soft", "the sender")])
    figure.label("device-card", 314, 16, 150, 44, [("name", "decode rank"), ("soft", "the receiver")])
    for x in (91, 389):
        figure.arrow([(x, 60), (x, bottom)], "thin", "")


def message(figure, y, words, to_receiver, kind="line", head="head"):
    """A frame between the two lines, with its name above it."""
    points = [(91, y), (389, y)] if to_receiver else [(389, y), (91, y)]
    figure.arrow(points, kind, head)
    figure.text("small", 240, y - 7, words, "m")


def frames():
    picture = Figure(
        "transfer", (480, 560), "The frames of a request",
        "Both ranks say hello with their sides. The receiver grants: pages for a request. The sender answers that "
        "the grant is known. For each layer, as soon as it is computed, the sender tells a notice with a digest of "
        "each run. The receiver fetches the rows, checks and stores them, and answers which runs failed. These are "
        "told again alone. A payload brings the first token. When all rows and payloads are there the receiver says "
        "end, done, and the sender says drained when nothing is in flight any more.")
    ends(picture, 544)
    message(picture, 92, "hello: rank, side", True)
    message(picture, 120, "hello: rank, window, side", False)
    message(picture, 162, "grant: fence, tokens, first wanted", False)
    message(picture, 190, "known", True)
    picture.rect("device-pale", 24, 208, 432, 172, 8)
    picture.text("soft", 240, 228, "each layer, while the next is computed", "m")
    message(picture, 262, "notice: parts, origins, digests", True)
    message(picture, 294, "rows: fetched, checked, stored", True, "host-line", "host")
    message(picture, 326, "answer: runs that failed", False)
    message(picture, 358, "notice: those runs again", True, "miss-line", "miss")
    message(picture, 410, "payload: first token, ages", True)
    message(picture, 438, "answer", False)
    message(picture, 480, "end: done", False)
    message(picture, 508, "drained: nothing lands any more", True)
    return picture


def state(figure, x, y, w, name, about, hue="device"):
    figure.label(f"{hue}-card", x, y, w, 44, [("name", name), ("soft", about)], cell="state")


def receiver(figure):
    figure.text("name", 16, 28, "A use of pages at a receiver")
    figure.arrow([(76, 42), (76, 76)])
    figure.text("small", 84, 62, "grant")
    state(figure, 16, 80, 136, "arriving", "rows come")
    figure.arrow([(152, 92), (300, 92)])
    figure.text("small", 226, 84, "all rows, payloads", "m")
    state(figure, 304, 80, 160, "whole", "says end: done", "new")
    figure.arrow([(76, 124), (76, 186)], "miss-line", "miss")
    figure.text("small", 84, 144, "abort, failed, deadline,")
    figure.text("small", 84, 160, "a connection lost")
    state(figure, 16, 190, 136, "ended", "says end: reason", "miss")
    figure.arrow([(384, 124), (384, 186)])
    figure.text("small", 376, 152, "all ranks: drained,", "e")
    figure.text("small", 376, 168, "or gone", "e")
    state(figure, 304, 190, 160, "over", "nothing is owed", "host")
    figure.arrow([(152, 212), (300, 212)])
    figure.text("small", 226, 204, "the same", "m")
    figure.paragraph("soft", 16, 262, 448,
                     "Landing pages are free when every writer has said drained for this fence, or can no longer "
                     "write.")


def sender(figure):
    figure.text("name", 16, 322, "A request at a sender")
    figure.arrow([(76, 336), (76, 370)])
    figure.text("small", 84, 356, "begin")
    state(figure, 16, 374, 136, "begun", "parts are held")
    figure.arrow([(152, 396), (300, 396)])
    figure.text("small", 226, 388, "grants", "m")
    state(figure, 304, 374, 160, "telling", "notices, repairs", "engine")
    figure.arrow([(76, 418), (76, 480)], "miss-line", "miss")
    figure.text("small", 84, 436, "abort, deadline")
    figure.arrow([(320, 418), (320, 460), (132, 460), (132, 480)], "miss-line", "miss")
    figure.text("small", 232, 453, "these, corrupt, peer lost", "m")
    state(figure, 16, 484, 136, "failing", "says failed", "miss")
    figure.arrow([(400, 418), (400, 480)])
    figure.text("small", 408, 448, "finish,")
    figure.text("small", 408, 464, "all ends")
    state(figure, 304, 484, 160, "over", "all rows released", "host")
    figure.arrow([(152, 506), (300, 506)])
    figure.text("small", 226, 498, "all ends, drained", "m")


def states():
    picture = Figure(
        "transfer-states", (480, 546), "The states of a transfer at its two ends",
        "At a receiver a grant begins a use of pages: it is arriving while rows come, and whole with all rows and "
        "payloads; then the receiver says end, done. An abort, a failure, a deadline or a lost connection ends it "
        "before, with a reason. It is over when all ranks of the sender have said drained or are gone. Its landing "
        "pages are free when every writer has said drained for its fence, or can no longer write. At a sender begin "
        "makes a request whose parts are held until there are grants; then it is telling notices and repairs. An "
        "abort, a deadline, runs that stay corrupt and a lost connection make it failing: it says failed until the "
        "receivers have said end. It is over when it is finished or failed, all receivers have said end, and nothing "
        "is being written; all its rows are released by then.")
    receiver(picture)
    sender(picture)
    return picture
