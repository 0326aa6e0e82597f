"""The states of a sequence (src/cache/record.rs) and of a page (src/total, src/cache/prefix.rs): what moves them on.

A text of a move names it for tests: `move FROM CALL TO`, states and a call of the cache."""

from draw import Figure


def state(figure, x, y, w, name, about="", hue="device"):
    """A state, 44 units high."""
    lines = [("name", name)] + ([("soft", about)] if about else [])
    figure.label(f"{hue}-card", x, y, w, 44, lines, cell="state")


def arriving(figure):
    """The way of a sequence that a transfer fills, to a filling one or to one that warms up layer by layer."""
    figure.arrow([(222, 18), (222, 88)])
    figure.text("small", 232, 34, "arrive", cell="move free arrive arriving")
    state(figure, 164, 92, 116, "arriving", "pages alone")
    figure.arrow([(280, 104), (296, 104), (296, 124), (283, 124)], "thin", "thinhead")
    for i, call in enumerate(["append", "extend", "truncate"]):
        figure.text("small", 304, 102 + 16 * i, call, cell=f"move arriving {call} arriving")
    figure.arrow([(164, 114), (104, 114), (104, 188)])
    figure.text("small", 112, 156, "join, with a lane and slots;", cell="move arriving join filling")
    figure.text("small", 112, 172, "join_early too", cell="move arriving join_early filling")
    figure.arrow([(28, 214), (17, 214), (17, 540), (26, 540)])
    figure.text("small", 26, 508, "join_early", cell="move filling join_early warming")
    state(figure, 28, 530, 100, "warming", "layer by layer")
    figure.arrow([(66, 574), (66, 594), (98, 594), (98, 577)], "thin", "thinhead")
    figure.text("small", 28, 611, "append", cell="move warming append warming")
    figure.text("small", 28, 627, "warm_layer", cell="move warming warm_layer warming")
    figure.arrow([(128, 544), (140, 544), (140, 440), (212, 440)])
    figure.text("small", 148, 464, "nothing left", cell="move warming warm_layer running")


def entry(figure):
    """From the opening to decoding, and the way round for a parked sequence."""
    figure.arrow([(60, 18), (60, 188)])
    figure.text("small", 70, 34, "open, open_shared", cell="move free open filling")
    state(figure, 28, 192, 116, "filling", "the prompt")
    figure.arrow([(74, 236), (74, 256), (104, 256), (104, 239)], "thin", "thinhead")
    for i, call in enumerate(["append", "extend", "truncate"]):
        figure.text("small", 64, 274 + 16 * i, call, cell=f"move filling {call} filling")
    figure.arrow([(46, 236), (46, 400)])
    figure.text("small", 54, 370, "join, in parts", cell="move filling join joining")
    state(figure, 28, 404, 100, "joining", "warm-up")
    figure.arrow([(66, 448), (66, 468), (106, 468), (106, 451)], "thin", "thinhead")
    figure.text("small", 86, 485, "join_more", "m", "move joining join_more joining")
    figure.arrow([(128, 426), (212, 426)])
    figure.text("small", 171, 418, "nothing left", "m", "move joining join_more running")
    figure.arrow([(144, 224), (180, 224), (180, 384), (226, 384), (226, 400)])
    figure.text("small", 172, 336, "join, at once", "e", "move filling join running")
    figure.arrow([(144, 204), (226, 204)])
    figure.text("small", 186, 196, "park", "m", "move filling park parked")
    state(figure, 230, 192, 116, "parked", "no lane, no slots")
    figure.arrow([(346, 204), (362, 204), (362, 224), (349, 224)], "thin", "thinhead")
    for i, call in enumerate(["append", "extend", "truncate"]):
        figure.text("small", 370, 202 + 16 * i, call, cell=f"move parked {call} parked")
    figure.arrow([(250, 236), (250, 400)])
    figure.text("small", 258, 280, "resume", cell="move parked resume running")
    figure.arrow([(326, 404), (326, 240)])
    figure.text("small", 318, 320, "park", "e", "move running park parked")


def decoding(figure):
    """Steps, forks, and what goes wrong."""
    state(figure, 216, 404, 238, "running", "in its lane")
    figure.arrow([(366, 404), (366, 384), (406, 384), (406, 401)], "thin", "thinhead")
    figure.text("small", 386, 344, "resize,", "m", "move running resize running")
    figure.text("small", 386, 360, "or a step:", "m")
    figure.text("small", 386, 376, "prepare … retire", "m", "move running prepare running")
    figure.arrow([(444, 404), (444, 56)])
    figure.text("small", 436, 300, "fork", "e", "move running fork running")
    figure.label("hollow", 344, 14, 120, 38, [("small", "child, running")])
    figure.arrow([(262, 448), (262, 526)], "miss-line", "miss")
    figure.text("small", 254, 488, "truncate,", "e", "move running truncate truncating")
    figure.text("small", 254, 505, "refused half-way", "e")
    state(figure, 176, 530, 124, "truncating", hue="miss")
    figure.arrow([(300, 552), (318, 552), (318, 452)])
    figure.text("small", 326, 488, "again", cell="move truncating truncate running")
    figure.arrow([(376, 530), (376, 452)])
    figure.text("small", 383, 488, "truncate", cell="move failed truncate running")
    figure.arrow([(444, 448), (444, 526)], "miss-line", "miss")
    state(figure, 346, 530, 110, "failed", "a step failed", "miss")


def ending(figure):
    """From the close on."""
    figure.text("soft", 316, 630, "open: the handle is valid", "m")
    figure.arrow([(86, 652), (86, 698)])
    figure.text("small", 98, 681, "close or abort, in any of these states")
    state(figure, 28, 702, 116, "closing", hue="host")
    figure.arrow([(144, 724), (290, 724)])
    figure.text("small", 216, 716, "last step retired,", "m")
    figure.text("small", 216, 742, "last ticket ended", "m")
    state(figure, 294, 702, 174, "free", "pages, slots, lane", "host")


def sequence():
    picture = Figure(
        "sequence", (480, 766), "The states of a sequence",
        "open and open_shared begin a sequence, which is filling while its prompt is appended; extend admits more "
        "tokens, and truncate shortens the prompt. arrive begins one that a transfer fills: it is arriving, with pages "
        "and no lane, and a join takes the lane and slots first. join enters a sequence into "
        "its lane: at once, or joining by join_more until nothing of its warm-up is left. join_early does so before "
        "its prompt is complete: it is warming while rows are appended, until warm_layer has loaded every layer. Then "
        "it is running: it "
        "takes part in steps, from prepare to retire, can get another budget between them by resize, and can be "
        "forked; the child is running. park takes its lane and slots away: parked, it is a prompt that can be "
        "appended to, extended and truncated, until resume makes it running again. A filling sequence can be parked "
        "too. A step that fails "
        "makes it failed. A truncate that the device refuses half-way makes it truncating. truncate brings both "
        "back to running, and leaves a running one as it is. close or abort ends it in any of these states: it is "
        "closing until the last step that names it is retired and its last ticket has ended. Then its pages, slots "
        "and lane are free, but for pages that an abort withholds.")
    picture.rect("device-pale", 12, 66, 456, 586, 10)
    for part in (arriving, entry, decoding, ending):
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
