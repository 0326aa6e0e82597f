"""The states of a sequence (src/cache/record.rs) and of a page (src/total, src/cache/prefix.rs): what moves them on.

A text of a move names it for tests: `move FROM CALL TO`, states and a call of the cache."""

from draw import Figure


def state(figure, x, y, w, name, about="", hue="device"):
    """A state, 44 units high."""
    lines = [("name", name)] + ([("soft", about)] if about else [])
    figure.label(f"{hue}-card", x, y, w, 44, lines, cell="state")


def entry(figure):
    """From the opening to decoding."""
    figure.arrow([(86, 18), (86, 88)])
    figure.text("small", 98, 34, "open, open_shared", cell="move free open filling")
    state(figure, 28, 92, 116, "filling", "the prompt")
    figure.arrow([(100, 136), (100, 156), (130, 156), (130, 139)], "thin", "thinhead")
    figure.text("small", 138, 160, "append", cell="move filling append filling")
    figure.arrow([(50, 136), (50, 200)])
    figure.text("small", 58, 188, "join, in parts", cell="move filling join joining")
    state(figure, 28, 204, 116, "joining", "warm-up")
    figure.arrow([(66, 248), (66, 268), (106, 268), (106, 251)], "thin", "thinhead")
    figure.text("small", 86, 285, "join_more", "m", "move joining join_more joining")
    figure.arrow([(144, 226), (242, 226)])
    figure.text("small", 194, 218, "nothing left", "m", "move joining join_more running")
    figure.arrow([(144, 114), (266, 114), (266, 200)])
    figure.text("small", 205, 106, "join, at once", "m", "move filling join running")


def decoding(figure):
    """Steps, forks, and what goes wrong."""
    state(figure, 246, 204, 204, "running", "in its lane")
    figure.arrow([(330, 204), (330, 184), (370, 184), (370, 201)], "thin", "thinhead")
    figure.text("small", 348, 144, "resize,", "m", "move running resize running")
    figure.text("small", 348, 160, "or a step:", "m")
    figure.text("small", 348, 176, "prepare … retire", "m", "move running prepare running")
    figure.arrow([(432, 204), (432, 56)])
    figure.text("small", 424, 106, "fork", "e", "move running fork running")
    figure.label("hollow", 344, 14, 120, 38, [("small", "child, running")])
    figure.arrow([(262, 248), (262, 326)], "miss-line", "miss")
    figure.text("small", 254, 288, "truncate,", "e", "move running truncate truncating")
    figure.text("small", 254, 305, "refused half-way", "e")
    state(figure, 176, 330, 124, "truncating", hue="miss")
    figure.arrow([(300, 352), (318, 352), (318, 252)])
    figure.text("small", 326, 288, "again", cell="move truncating truncate running")
    figure.arrow([(376, 330), (376, 252)])
    figure.text("small", 383, 288, "truncate", cell="move failed truncate running")
    figure.arrow([(444, 248), (444, 326)], "miss-line", "miss")
    state(figure, 346, 330, 110, "failed", "a step failed", "miss")


def ending(figure):
    """From the close on."""
    figure.text("soft", 24, 362, "open: the")
    figure.text("soft", 24, 379, "handle is valid")
    figure.arrow([(86, 390), (86, 436)])
    figure.text("small", 98, 419, "close, in any of these states")
    state(figure, 28, 440, 116, "closing", hue="host")
    figure.arrow([(144, 462), (290, 462)])
    figure.text("small", 216, 454, "last step retired,", "m")
    figure.text("small", 216, 480, "last ticket ended", "m")
    state(figure, 294, 440, 174, "free", "pages, slots, lane", "host")


def sequence():
    picture = Figure(
        "sequence", (480, 504), "The states of a sequence",
        "open and open_shared begin a sequence, which is filling while its prompt is appended. join enters it into "
        "its lane: at once, or joining by join_more until nothing of its warm-up is left. Then it is running: it "
        "takes part in steps, from prepare to retire, can get another budget between them by resize, and can be "
        "forked; the child is running. A step that fails "
        "makes it failed. A truncate that the device refuses half-way makes it truncating. truncate brings both "
        "back to running, and leaves a running one as it is. close ends it in any of these states: it is closing "
        "until the last step that names it is retired and its last ticket has ended. Then its pages, slots and "
        "lane are free.")
    picture.rect("device-pale", 12, 66, 456, 324, 10)
    for part in (entry, decoding, ending):
        part(picture)
    return picture


def growing(figure):
    """From free to full, and the way back without a block hash."""
    state(figure, 16, 100, 104, "free", "no owner", "host")
    figure.arrow([(120, 122), (176, 122)])
    figure.text("small", 150, 90, "admission", "m")
    state(figure, 180, 100, 100, "reserved", "one owner")
    figure.arrow([(280, 122), (336, 122)])
    figure.text("small", 308, 90, "first row", "m")
    state(figure, 340, 100, 104, "filling", "one owner")
    figure.arrow([(350, 144), (350, 164), (380, 164), (380, 147)], "thin", "thinhead")
    figure.text("small", 344, 174, "append, scatter", "e")
    figure.arrow([(400, 144), (400, 216)])
    figure.text("small", 392, 206, "64 rows", "e")
    state(figure, 340, 220, 104, "full", "forks share it")
    figure.arrow([(230, 100), (230, 60)], "line", "")
    figure.arrow([(392, 100), (392, 60), (68, 60), (68, 96)])
    figure.text("small", 150, 52, "close", "m")
    figure.arrow([(340, 242), (96, 242), (96, 148)])
    figure.text("small", 218, 234, "close, not published", "m")


def sharing(figure):
    """With a block hash."""
    figure.arrow([(376, 264), (376, 336)])
    figure.text("small", 368, 306, "publish: a block hash", "e")
    state(figure, 324, 340, 124, "published", "index and users", "new")
    figure.arrow([(448, 362), (460, 362), (460, 122), (448, 122)])
    figure.text("small", 452, 306, "truncate", "e")
    figure.arrow([(366, 384), (366, 404), (406, 404), (406, 387)], "thin", "thinhead")
    figure.text("small", 386, 421, "open_shared, fork", "m")
    figure.arrow([(324, 352), (236, 352)])
    figure.text("small", 280, 327, "last user", "m")
    figure.text("small", 280, 343, "closed", "m")
    figure.arrow([(232, 372), (320, 372)])
    figure.text("small", 276, 401, "open_shared", "m")
    state(figure, 108, 340, 124, "kept, unused", "index alone", "scratch")
    figure.arrow([(108, 362), (44, 362), (44, 148)])
    for i, words in enumerate(["evicted:", "longest", "unused first"]):
        figure.text("small", 52, 288 + 17 * i, words)


def page():
    picture = Figure(
        "page", (480, 438), "The life of a page",
        "A page of 64 tokens, with its index keys. It is free until an admission reserves it for a sequence, "
        "before anything is stored in it. append and scatter fill it with rows; with 64 rows it is full, and forks "
        "share it. publish gives it a block hash: the index owns it as well, and open_shared and fork add users. "
        "When its last user is closed it is kept, unused, and open_shared may find it again. When an admission "
        "needs room, the page that was unused longest is evicted and is free. A truncate takes the block hash back "
        "where its sequence is the only user, and gives the sequence a page of its own where there are others. A "
        "page that was never published is free when its sequence is closed.")
    picture.text("name", 16, 28, "A page: 64 tokens, their rows and index keys")
    growing(picture)
    sharing(picture)
    return picture
