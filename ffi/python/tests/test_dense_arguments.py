"""Dense caches: errors in the caller's words. Each field of a configuration and each argument of a call is refused with
its name and the number as given; nothing has happened then."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Callable

import numpy as np
import pytest

import forebay
from dense_loop import Loop, Request, config_of, text_of, windowed
from forebay import dense
from forebay._library import lib
from test_dense import MakeDense, make  # noqa: F401 - a fixture

GROUPS: dict[str, Any] = {"layers": [0, 1, 2], "row_bytes": (32, 16)}


def shape_of(page_tokens: Any = 16, **group: Any) -> dense.Shape:
    return dense.Shape([dense.Group(**{**GROUPS, **group})], page_tokens=page_tokens)


# A change of the configuration, and what its error says.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("shape", {"shape": shape_of(17)}, r"page_tokens.*value 17"),
    ("shape", {"shape": shape_of(None)}, r"^shape.page_tokens: got None; expected a whole number"),
    ("shape", {"shape": forebay.Shape(1, (16, 0), 8)}, "^shape: got Shape; expected a dense.Shape"),
    ("shape", {"shape": dense.Shape([])}, "group_count.*given 0"),
    ("shape", {"shape": dense.Shape([dense.Group([0], (16, 0))] * 5)}, "^shape.groups: got 5 groups; .* at most 4"),
    ("shape", {"shape": dense.Shape([1])}, r"^shape.groups: got \[1\]; expected a list of Group"),
    ("shape", {"shape": shape_of(layers=[0, 2])}, "layer"),
    ("shape", {"shape": shape_of(layers=[])}, "name the group's layers"),
    ("shape", {"shape": shape_of(layers=[-1])}, r"^shape.groups\[0\].layers: got \[-1\]; expected layer numbers"),
    ("shape", {"shape": shape_of(layers=3)}, r"^shape.groups\[0\].layers: got 3; expected layer numbers"),
    ("shape", {"shape": shape_of(row_bytes=(24, 16))}, "row_bytes.*value 24"),
    ("shape", {"shape": shape_of(row_bytes=(0, 16))}, "row_bytes.*value 0"),
    ("shape", {"shape": shape_of(row_bytes=(16,))}, r"^shape.groups\[0\].row_bytes: got \(16,\); expected two whole"),
    ("shape", {"shape": shape_of(window=0)}, r"^shape.groups\[0\].window: got 0; expected a whole number from 1"),
    ("shape", {"shape": shape_of(window=-3)}, r"^shape.groups\[0\].window: got -3; expected a whole number"),
    ("shape", {"shape": shape_of(window=129)}, "window.*value 129, max_tokens 128"),
    ("sequences", {"sequences": 0}, "^sequences: got 0; expected a whole number from 1 on"),
    ("sequences", {"sequences": None}, "^sequences: got None; expected a whole number from 1 on"),
    ("max_tokens", {"max_tokens": (1 << 31) - 3}, "max_tokens.*value 2147483645"),
    ("max_tokens", {"max_tokens": 1 << 32}, r"^max_tokens: got 4294967296; expected .* from 0 to 2\^32 - 1"),
    ("batch", {"batch": 40000, "step_tokens": 40000}, "batch.*value 40000, most 32767"),
    ("step_tokens", {"step_tokens": 3}, "step_tokens.*value 3, least 4"),
    ("query_rows", {"query_rows": 2.5}, r"^query_rows: got 2.5; expected a whole number"),
    ("steps_in_flight", {"steps_in_flight": (1 << 32) - 1}, "steps_in_flight 4294967295"),
    ("bring_layers", {"bring_layers": 1, "layout": "page_first"}, "bring_layers.*value 1"),
    ("micro_batches", {"micro_batches": -1}, "^micro_batches: got -1; expected a whole number"),
    ("layout", {"layout": "rows"}, "^layout: got 'rows'; expected 'layer_first' or 'page_first'"),
    ("runs", {"runs": 1}, "^runs: got 1; expected 'apart' or 'together'"),
    ("width", {"width": "int16"}, "^width: got 'int16'; expected 'int64' or 'int32'"),
    ("save", {"save": None}, "^save: got None; expected 'published' or 'evicted'"),
    ("device_pages", {"device_pages": 1}, "device_pages.*given 1, least 2, group 0|device_pages.*given 1.*least 2"),
    ("device_pages", {"device_pages": [20, 20]}, "^device_pages: got 2 numbers; expected 1, one a group"),
    ("device_pages", {"device_pages": [0]}, "^device_pages: got 0; expected a whole number from 1 "),
    ("device_pages", {"device_pages": "many"}, "^device_pages: got 'many'; expected whole numbers from 1"),
    ("host_pages", {"host_pages": 3}, "host_pages.*given 3.*least 8"),
    ("host_pages", {"host_pages": 0}, "^host_pages: got 0; expected a whole number from 1 "),
    ("host_pages", {"host_pages": [1.5]}, "^host_pages: got 1.5; expected a whole number from 1 "),
    ("numa_node", {"numa_node": -7}, "^numa_node: got -7; expected a whole number from 0 "),
]
# Switches: anything is true or false.
SWITCHES = {"huge_pages", "populate", "lock", "overcommit"}


@pytest.mark.parametrize(("field", "changes", "says"), REFUSED, ids=lambda one: one if isinstance(one, str) else "")
def test_a_broken_rule_is_reported_with_field_and_number(field: str, changes: dict[str, Any], says: str) -> None:
    config = config_of(**changes)
    calls: list[Callable[[], object]] = [lambda: dense.Cache(forebay.HostDevice(), config), config.footprint]
    if field != "device_pages" or not says.startswith("device"):
        calls.append(lambda: config.pages_for(4, 64))
    for call in calls:
        with pytest.raises((forebay.InvalidConfig, forebay.Overflow), match=says):
            call()


def test_a_rule_of_every_field_is_broken_in_a_test() -> None:
    fields = {field.name for field in dataclasses.fields(dense.Config)}
    assert {field for field, _, _ in REFUSED} | SWITCHES == fields


def test_options_of_memory_are_those_of_the_c_interface() -> None:
    """The system of a test need not know them."""
    options = {"huge_pages": True, "populate": True, "lock": True, "overcommit": False}
    flags = (lib.FB_MEMORY_SMALL_PAGES, lib.FB_MEMORY_LAZY, lib.FB_MEMORY_UNLOCKED, lib.FB_MEMORY_OVERCOMMIT)
    for name, flag in zip(options, flags, strict=True):
        declared, _keep = config_of(**{**options, name: not options[name]}).declare()
        assert declared.memory == flag
    assert config_of(**options).declare()[0].memory == 0
    assert [config_of(numa_node=node).declare()[0].numa_node for node in (None, 0, 3)] == [0, 1, 4]


def test_memory_that_is_not_there_is_refused_with_numbers() -> None:
    with pytest.raises(forebay.OutOfMemory, match="wanted .*, free 16384"):
        dense.Cache(forebay.HostDevice(memory=1 << 14), config_of())
    # Pages of 768 MiB: more than a process has addresses for.
    huge = config_of(host_pages=1 << 20, shape=shape_of(256, row_bytes=(1 << 20, 0)), max_tokens=256)
    with pytest.raises(forebay.OutOfMemory, match=rf"wanted {(1 << 20) * 3 * 256 << 20}"):
        dense.Cache(forebay.HostDevice(), huge)


def test_what_a_sequence_lacks_is_named(make: MakeDense) -> None:  # noqa: F811
    cache = make(windowed(device_pages=[12, 40]))
    held = cache.open(prompt=100)
    with pytest.raises(forebay.Exhausted, match="device pages of a group.*wanted 7, free 4, group 0"):
        cache.open(prompt=100)
    assert cache.stats().sequences == 1
    held.close()
    several = [cache.open(prompt=1) for _ in range(4)]
    with pytest.raises(forebay.Exhausted, match="sequences"):
        cache.open(prompt=1)
    for one in several:
        one.close()
    for tokens in ({"prompt": 0}, {"prompt": 100, "promised": 29}):
        with pytest.raises(forebay.OutOfRange):
            cache.open(**tokens)
    cache.open(prompt=100, promised=28).close()


def test_wrong_arguments_are_refused_with_their_names(make: MakeDense) -> None:  # noqa: F811
    cache, stranger = make(), make()
    one = Request(cache.open(prompt=40, promised=8), text_of(1, 64))
    foreign = stranger.open(prompt=8)
    open_step = stranger.prepare([(foreign, 0, 8)])
    names = cache.names(one.ids[:40])
    Loop(cache).prompt(one, 40)
    sequence = one.sequence
    step = cache.prepare([(sequence, 0, 1)])
    step.retire()
    wrong: list[tuple[type[forebay.ForebayError], str, Callable[[], object]]] = [
        (forebay.InvalidArgument, "device: got str", lambda: dense.Cache("cuda", config_of())),  # type: ignore
        (forebay.InvalidArgument, "config: got Shape; expected a dense.Config",
         lambda: dense.Cache(cache.device, cache.config.shape)),  # type: ignore[arg-type]
        (forebay.InvalidArgument, "^prompt: got -1", lambda: cache.open(prompt=-1)),
        (forebay.InvalidArgument, "^promised: got 1.5", lambda: cache.open(prompt=1, promised=1.5)),  # type: ignore
        (forebay.InvalidArgument, "tokens: got", lambda: cache.names("prompt")),
        (forebay.InvalidArgument, "tokens: got", lambda: cache.names([-1])),
        (forebay.InvalidArgument, "salt: got str; expected bytes", lambda: cache.names([1], salt="a")),  # type: ignore
        (forebay.InvalidArgument, r"keys\[0\]: got b'a'", lambda: cache.names([1] * 16, keys=[b"a"])),
        (forebay.OutOfRange, "keys", lambda: cache.names([1] * 40, keys=[None])),
        (forebay.OutOfRange, "names", lambda: cache.names([1] * 129)),
        (forebay.InvalidArgument, "names: got list; expected Names", lambda: cache.find([1])),  # type: ignore[arg-type]
        (forebay.InvalidArgument, "names: got", lambda: cache.open_shared(None, prompt=1)),  # type: ignore[arg-type]
        (forebay.OutOfRange, "open_shared|names|prompt", lambda: cache.open_shared(names, prompt=20)),
        (forebay.InvalidArgument, "^rows: got int", lambda: cache.prepare(3)),  # type: ignore[arg-type]
        (forebay.InvalidArgument, r"^rows\[0\]: got \(1,\)", lambda: cache.prepare([(1,)])),  # type: ignore[list-item]
        (forebay.InvalidArgument, r"^rows\[1\].*of this cache",
         lambda: cache.prepare([(sequence, 0, 1), (foreign, 0, 1)])),
        (forebay.InvalidArgument, r"^rows\[0\]", lambda: cache.prepare([(sequence, -1, 1)])),
        (forebay.InvalidConfig, "twice|sequence", lambda: cache.prepare([(sequence, 0, 1), (sequence, 0, 1)])),
        (forebay.InvalidConfig, "accepted", lambda: cache.prepare([(sequence, None, 1)])),
        (forebay.InvalidArgument, r"^accepted: got .*expected int32 \[4\]",
         lambda: cache.prepare([(sequence, None, 1)], accepted=np.zeros(3, np.int32))),
        (forebay.InvalidArgument, "^accepted: got",
         lambda: cache.prepare([(sequence, None, 1)], accepted=[1])),  # type: ignore[arg-type]
        (forebay.OutOfRange, "rows", lambda: cache.prepare([])),
        (forebay.OutOfRange, "row", lambda: cache.prepare([(sequence, 0, 0)])),
        (forebay.OutOfRange, "accepted", lambda: cache.prepare([(sequence, 2, 1)])),
        (forebay.OutOfRange, "rows", lambda: cache.prepare([(sequence, 0, 65)])),
        (forebay.OutOfRange, "micro", lambda: cache.prepare([(sequence, 0, 1)], micro_batch=1)),
        (forebay.InvalidArgument, "^stream: got", lambda: cache.prepare([(sequence, 0, 1)], stream="fast")),
        (forebay.OutOfRange, "micro", lambda: cache.tensors(1)),
        (forebay.OutOfRange, "layer 3, run 0", lambda: cache.view(3)),
        (forebay.OutOfRange, "layer 0, run 2", lambda: cache.view(0, 2)),
        (forebay.InvalidArgument, "^run: got 'K'", lambda: cache.view(0, "K")),  # type: ignore[arg-type]
        (forebay.OutOfRange, "group", lambda: cache.planes(1)),
        (forebay.OutOfRange, "group", lambda: sequence.pages(1)),
        (forebay.InvalidArgument, "^limit: got -1", lambda: cache.save(-1)),
        (forebay.InvalidArgument, "^stream: got", lambda: cache.save(1, stream=object())),
        (forebay.InvalidState, "publish|names|shared", lambda: sequence.publish(0, one.ids[:40])),
        (forebay.InvalidState, "fork|truncate|rows", lambda: sequence.fork()),
        (forebay.InvalidArgument, "^accepted: got -1", lambda: sequence.park(-1)),
        (forebay.InvalidArgument, "^accepted: got 0.5", lambda: sequence.park(0.5)),  # type: ignore[arg-type]
        (forebay.OutOfRange, "accepted rows.*accepted 2, landed 1", lambda: sequence.park(2)),
        (forebay.InvalidArgument, "^stream: got", lambda: sequence.park(1, "s")),
        (forebay.InvalidArgument, "^stream: got", lambda: sequence.resume("s")),
        (forebay.InvalidState, "resume.*running", lambda: sequence.resume()),
        (forebay.InvalidArgument, "^layer: got 1.5", lambda: open_step.arrived(1.5)),  # type: ignore[arg-type]
        (forebay.InvalidArgument, "^layer: got -1", lambda: open_step.arrived(-1)),
        (forebay.OutOfRange, "layer.*layer 3, layers 3", lambda: open_step.arrived(3)),
        (forebay.InvalidArgument, "^stream: got", lambda: open_step.arrived(0, "s")),
        (forebay.InvalidArgument, "^stream: got", lambda: sequence.close("s")),
        (forebay.InvalidArgument, "^sequences: got 0.5", lambda: cache.config.pages_for(0.5, 1)),  # type: ignore
    ]  # fmt: skip
    before = cache.stats()
    for kind, says, call in wrong:
        with pytest.raises(kind, match=says) as caught:
            call()
        assert type(caught.value) is kind and len(str(caught.value)) > 10
    assert cache.stats() == before
    cache.validate()


def test_publish_names_what_does_not_fit(make: MakeDense) -> None:  # noqa: F811
    cache = make()
    ids = text_of(2, 64)
    opened = cache.open_shared(cache.names(ids[:40]), prompt=40, promised=4)
    one = Request(opened.sequence, ids)
    Loop(cache).prompt(one, 40)
    for start, tokens in ((16, ids[16:40]), (0, ids[:47])):
        with pytest.raises(forebay.OutOfRange):
            one.sequence.publish(start, tokens)
    with pytest.raises(forebay.OutOfRange):
        one.sequence.publish(0, ids[:40], keys=[None])
    assert one.sequence.publish(0, ids[:20]) == 16 and one.sequence.publish(16, ids[16:40]) == 32
    with pytest.raises(forebay.OutOfRange):
        one.sequence.publish(0, ids[:40])


def test_closed_objects_say_so(make: MakeDense) -> None:  # noqa: F811
    device = forebay.HostDevice()
    cache = make(config_of(), device)
    names = cache.names([1] * 32)
    sequence, other = cache.open(prompt=20), cache.open(prompt=20)
    step = cache.prepare([(other, 0, 4)])
    sequence.close()
    sequence.close()
    of_sequence: list[Callable[[], object]] = [
        lambda: sequence.length, sequence.pages, lambda: sequence.truncate(0), lambda: sequence.extend(prompt=30),
        sequence.fork, lambda: sequence.publish(0, [1]), lambda: cache.prepare([(sequence, 0, 1)]),
        lambda: sequence.park(0), sequence.resume,
    ]  # fmt: skip
    name = re.findall(r"0x[0-9a-f]+", repr(sequence))
    for call in of_sequence:
        with pytest.raises(forebay.Closed) as caught:
            call()
        assert re.findall(r"0x[0-9a-f]+", str(caught.value)) == name
    assert "closed" in repr(sequence) and not cache.closed
    # Closing ends the open step and the other sequence.
    cache.close()
    cache.close()
    assert cache.closed and other.closed and "closed" in repr(cache)
    of_cache: list[Callable[[], object]] = [
        cache.stats, cache.validate, cache.fallbacks, cache.reap, cache.tensors, cache.planes, lambda: cache.view(0),
        lambda: cache.open(prompt=1), lambda: cache.names([1]), lambda: cache.find(names), lambda: cache.save(1),
        lambda: cache.open_shared(names, prompt=40), lambda: other.length, step.finish, step.abandon, step.retire,
        lambda: step.arrived(0), lambda: other.park(0), other.resume,
    ]  # fmt: skip
    for call in of_cache:
        with pytest.raises(forebay.Closed, match="dense cache: closed: .*forked"):
            call()
    other.close()
    device.close()
    with pytest.raises(forebay.Closed, match="device: it was closed"):
        dense.Cache(device, config_of())
