"""Tensors and streams as arguments: which ones are accepted, and which ones are refused with nothing written."""

from __future__ import annotations

import pickle
from typing import Any, Callable

import numpy as np
import pytest

import forebay
from forebay._library import ffi
from conftest import LAYERS, ROW, TOP_K, empty, joined, rows_of, some, whole

Make = Callable[..., forebay.Cache]


class Dtype:
    """A dtype whose text is in torch's form."""

    def __init__(self, name: str, itemsize: int) -> None:
        self.name, self.itemsize = name, itemsize

    def __repr__(self) -> str:
        return f"torch.{self.name}"


INT32, INT64 = Dtype("int32", 4), Dtype("int64", 8)


class Where:
    def __init__(self, kind: str, index: int | None = None) -> None:
        self.type, self.index = kind, index


CPU, CUDA = Where("cpu"), Where("cuda", 1)


class Tensor:
    """A tensor in torch's form: an array under `data_ptr`."""

    def __init__(self, array: Any, dtype: Dtype = INT32, device: Where = CPU) -> None:
        self.array, self.dtype, self.device = array, dtype, device
        self.shape = array.shape

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)


class ByDlpack:
    """Gives its array by DLPack alone."""

    def __init__(self, array: Any, device: tuple[int, int] | None = None) -> None:
        self.array, self.device = array, device

    def __dlpack__(self, **given: Any) -> Any:
        given.pop("stream", None)
        return self.array.__dlpack__(**given)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device or self.array.__dlpack_device__()


class OldDlpack(ByDlpack):
    """DLPack before 1.0: no `max_version`."""

    def __dlpack__(self, stream: Any = None) -> Any:
        return self.array.__dlpack__()


class ByInterface:
    """Gives its array by the array interface alone."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


class DataInBytes:
    """Has its memory in a buffer and not at an address, like PIL."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {**array.__array_interface__, "data": array.tobytes()}


class Conjugated(Tensor):
    """A lazy conjugate: its values differ from the bytes in its memory."""

    def is_conj(self) -> bool:
        return True


class Negated(Tensor):
    def is_neg(self) -> bool:
        return True


class OnCuda:
    """An array in CuPy's form."""

    def __init__(self, array: Any) -> None:
        self.__cuda_array_interface__ = {**array.__array_interface__, "version": 3}
        self.device = Where("cuda", 0)


@pytest.mark.parametrize("wrap", [Tensor, ByDlpack, OldDlpack, ByInterface])
def test_any_object_with_a_protocol_is_accepted_and_written(make: Make, wrap: Callable[[Any], Any]) -> None:
    cache = make()
    sequence = joined(cache, bring_up="nothing")
    answers = []
    for form in (lambda array: array, wrap, wrap):
        with cache.prepare([(sequence, 0, 1)]) as step:
            slots = empty()
            step.layer(0, form(some(7, 9)), form(slots))
            whole(step, 0)
        answers.append(slots.tolist())
        sequence.truncate(40)
    assert answers[0] == answers[1] == answers[2]
    assert -77 not in answers[0][0][0]


def bad_selections() -> list[tuple[str, Any, str]]:
    good = some(1, 2)
    read_only = empty()
    read_only.flags.writeable = False
    wide = np.full((1, 1, 2 * TOP_K), -1, np.int32)
    return [
        ("dtype", good.astype(np.int64), "int64"),
        ("dtype of a tensor", Tensor(good.astype(np.int64), INT64), "int64"),
        ("unsigned", good.astype(np.uint32), "uint32"),
        ("float", good.astype(np.float32), "float32"),
        ("byte order", good.astype(">i4"), "byte order|>i4"),
        ("shape", good[0], r"\[1, 8\]"),
        ("rows", np.zeros((2, 1, TOP_K), np.int32), r"\[2, 1, 8\]"),
        ("strides", wide[:, :, ::2], "strides"),
        ("strides of a tensor", Tensor(wide[:, :, ::2]), "strides"),
        ("strides by DLPack", ByDlpack(wide[:, :, ::2]), "strides"),
        ("device of a tensor", Tensor(good, INT32, CUDA), "cuda:1"),
        ("device by an interface", OnCuda(good), "cuda:0"),
        ("device by DLPack", ByDlpack(good, (10, 0)), "DLPack|cpu"),
        ("no tensor", [1, 2], "list"),
        ("none", None, "NoneType"),
        ("unaligned", np.frombuffer(bytearray(4 * TOP_K + 1), np.int32, TOP_K, 1).reshape(1, 1, TOP_K), "aligned"),
    ]


@pytest.mark.parametrize("argument", ["selection", "slots"])
@pytest.mark.parametrize(
    ("what", "wrong", "says"), bad_selections(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_wrong_tensor_is_named_and_nothing_is_written(
    make: Make, argument: str, what: str, wrong: Any, says: str
) -> None:
    cache = make()
    sequence = joined(cache)
    step = cache.prepare([(sequence, 0, 1)])
    good = some(1, 2)
    slots = empty()
    given = {"selection": good, "slots": slots, argument: wrong}
    with pytest.raises(forebay.InvalidArgument, match=says) as caught:
        step.layer(0, **given)
    assert caught.value.argument == argument
    assert str(caught.value).startswith(f"{argument}: got ") and "expected" in str(caught.value)
    assert isinstance(caught.value, (TypeError, ValueError)) and caught.value.status == 1
    assert (slots == -77).all()
    # The step continues as if the call had not been made.
    step.layer(0, good, slots)
    whole(step, 0)
    assert step.retire().hits + step.retired.misses == 2  # type: ignore[union-attr]


def test_a_read_only_output_is_refused(make: Make) -> None:
    cache = make()
    sequence = joined(cache)
    step = cache.prepare([(sequence, 0, 1)])
    slots = empty()
    slots.flags.writeable = False
    with pytest.raises(forebay.InvalidArgument, match="read-only"):
        step.layer(0, some(1), slots)
    with pytest.raises(forebay.InvalidArgument, match="read-only"):
        step.layer(0, some(1), ByDlpack(slots))
    assert (slots == -77).all()
    # A selection is only read.
    selection = some(1)
    selection.flags.writeable = False
    step.layer(0, selection, empty())
    whole(step, 0)
    step.retire()


def test_buffers_are_checked_once(make: Make) -> None:
    cache = make()
    other = make()
    sequence = joined(cache)
    with pytest.raises(forebay.InvalidArgument, match="selection"):
        forebay.Buffers(cache, np.zeros((5, 1, TOP_K), np.int32), empty())
    with pytest.raises(forebay.InvalidArgument, match="slots"):
        forebay.Buffers(cache, some(1), empty(2))
    with pytest.raises(forebay.InvalidArgument, match="lists"):
        forebay.Buffers(cache, some(1), empty(), lists=empty())
    with pytest.raises(forebay.InvalidArgument, match="counts"):
        forebay.Buffers(cache, some(1), empty(), np.zeros((2, 1, 1, TOP_K), np.int32), np.zeros((2, 1), np.int32))
    with cache.prepare([(sequence, 0, 1)]) as step:
        wide = forebay.Buffers(cache, some(1, 2).repeat(2, 1), empty(1, 2))
        for buffers in (forebay.Buffers(other, some(1), empty()), wide):
            with pytest.raises(forebay.InvalidArgument, match="buffers"):
                step.layer(0, buffers)
        with pytest.raises(forebay.InvalidArgument, match="buffers"):
            step.resolve(0, None)  # type: ignore[arg-type]
        whole(step)


def test_rows_are_checked_by_their_bytes(make: Make) -> None:
    cache = make()
    with cache.open(prompt=20) as sequence:
        good = rows_of(0, 0, 20)
        for wrong, says in (
            (good[:, :-4], "12 bytes"),
            (good.ravel(), "rows of"),
            (good[:, ::-1], "strides"),
            (good.astype(np.float64), "128 bytes"),
            (Tensor(good, Dtype("uint8", 1), CUDA), "cuda:1"),
            ("rows", "str"),
        ):
            with pytest.raises(forebay.InvalidArgument, match=says) as caught:
                sequence.append(0, wrong)
            assert caught.value.argument == "rows"
        assert sequence.length.committed == 0
        with pytest.raises(forebay.OutOfRange):
            sequence.append(0, rows_of(0, 0, 21))
        with pytest.raises(forebay.OutOfRange):
            sequence.append(LAYERS, good)
        sequence.append(0, good.view(np.float16).reshape(20, 2, ROW // 4))
        sequence.append(1, Tensor(good, Dtype("uint8", 1)))
        sequence.append(2, good)
        sequence.join()
        with pytest.raises(forebay.InvalidState):
            sequence.append(0, good[:1])
        with pytest.raises(forebay.OutOfRange):
            sequence.read_row(0, 1000)
        with pytest.raises(forebay.InvalidArgument, match="position"):
            sequence.read_row(0, -1)
        with pytest.raises(forebay.OutOfRange):
            sequence.read_row(LAYERS, 0)
        with pytest.raises(forebay.OutOfRange):
            sequence.landing_slot(2)


def test_streams_of_another_kind_are_refused(make: Make) -> None:
    cache, other = make(), make()
    own, foreign = cache.device.stream(), other.device.stream()
    sequence = joined(cache)

    class TorchStream:
        cuda_stream, device = 0x1234, Where("cuda", 0)

    for wrong in (foreign, TorchStream(), 0x1234, "stream", 1.5):
        with pytest.raises(forebay.InvalidArgument, match="stream") as caught:
            cache.prepare([(sequence, 0, 1)], stream=wrong)
        assert caught.value.argument == "stream"
    step = cache.prepare([(sequence, 0, 1)], stream=own)
    for call in (step.scatter, step.finish, step.retire):
        with pytest.raises(forebay.InvalidArgument, match="stream"):
            call(*([0] if call == step.scatter else []), stream=foreign)
    step.layer(0, some(1), empty(), own.address)
    whole(step, 0)
    step.retire()
    own.wait()
    assert cache.stats().steps_in_flight == 0


@pytest.mark.parametrize("wrong", [-1, 1 << 32, 1.5, "1", None])
def test_an_argument_that_is_no_number_is_named(make: Make, wrong: Any) -> None:
    cache = make()
    sequence = joined(cache)
    step = cache.prepare([(sequence, 0, 1)])
    slots = empty()
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("layer", lambda: step.layer(wrong, some(1), slots)),
        ("layer", lambda: step.layer(wrong, forebay.Buffers(cache, some(1), slots))),
        ("layer", lambda: step.scatter(wrong)),
        ("layer", lambda: step.gather(wrong)),
        ("first", lambda: step.gather(0, first=wrong)),
        ("attention_wave", lambda: step.gather(0, attention_wave=wrong)),
        ("layer", lambda: cache.slab(wrong)),
        ("layer", lambda: cache.index_keys(wrong)),
        ("layer", lambda: sequence.append(wrong, rows_of(0, 0, 1))),
        ("count", lambda: sequence.append_in_place(wrong)),
        ("length", lambda: sequence.truncate(wrong)),
        ("prompt", lambda: sequence.extend(prompt=wrong)),
        ("promised", lambda: sequence.extend(prompt=40, promised=wrong)),
        ("accepted", lambda: sequence.park(wrong)),
        ("start", lambda: sequence.publish(wrong, [])),
        ("query_row", lambda: sequence.landing_slot(wrong)),
        ("layer", lambda: sequence.read_row(wrong, 0)),
        ("position", lambda: sequence.read_row(0, wrong)),
    ]
    for name, call in calls:
        with pytest.raises(forebay.InvalidArgument) as caught:
            call()
        assert caught.value.argument == name
    assert (slots == -77).all()
    for call in (lambda: step.layer(LAYERS, some(1), slots), lambda: cache.slab(LAYERS)):
        with pytest.raises(forebay.OutOfRange, match="layer"):
            call()
    step.layer(np.int64(0), some(1), slots)  # type: ignore[arg-type]
    whole(step, 0)
    step.retire()


def test_batch_rows_are_packed_as_the_library_declares_them(make: Make) -> None:
    cache = make()
    one, two = joined(cache), joined(cache)
    given: Any = [(one, 3, 1), (two, None, np.int64(2)), (one, np.uint8(0), True)]
    packed, checked = cache._packed(given), cache._checked(given)
    assert packed is not None and packed[1] == checked[1] == 2
    assert bytes(ffi.buffer(packed[0])) == bytes(ffi.buffer(checked[0]))
    for wrong in ([(one, 1.5, 1)], [(one, 0, -1)], [(one, 0, 1 << 32)], [(one, 0)], [(make(), 0, 1)]):
        assert cache._packed(wrong) is None  # type: ignore[arg-type]


def test_bad_batch_rows_are_named(make: Make) -> None:
    cache, other = make(), make()
    sequence, foreign = joined(cache), joined(other)
    for rows, says in (
        ([(foreign, 0, 1)], r"rows\[0\]"),
        ([(sequence, 0, 1), (sequence,)], r"rows\[1\]"),
        ([(sequence, -1, 1)], r"rows\[0\]"),
        ([(sequence, 0, "1")], r"rows\[0\]"),
        ([None], r"rows\[0\]"),
    ):
        with pytest.raises(forebay.InvalidArgument, match=says):
            cache.prepare(rows)  # type: ignore[arg-type]
    with pytest.raises(forebay.OutOfRange):
        cache.prepare([(sequence, 0, 3)])
    with pytest.raises(forebay.InvalidConfig):
        cache.prepare([(sequence, 0, 1)] * 2)
    assert cache.stats().steps_in_flight == 0


def test_errors_survive_pickling_and_know_their_kind() -> None:
    error = forebay.InvalidArgument("slots", "a list", "a tensor")
    again = pickle.loads(pickle.dumps(error))
    assert (again.argument, str(again), again.kind) == ("slots", str(error), "InvalidArgument")
    assert issubclass(forebay.OutOfMemory, MemoryError) and issubclass(forebay.Io, OSError)
    types = [kind for kind in vars(forebay).values() if isinstance(kind, type)]
    kinds = [kind for kind in types if issubclass(kind, forebay.ForebayError)]
    from forebay._library import lib, status_text
    from forebay.errors import KINDS

    assert len(kinds) == len(KINDS) + 2
    for status, kind in KINDS.items():
        upper = "".join(f"_{c}" if c.isupper() else c.upper() for c in kind.__name__).lstrip("_")
        assert getattr(lib, f"FB_{upper}") == status, upper
        assert status_text(status)


def test_rows_whose_memory_is_a_buffer_are_read_there(make: Make) -> None:
    cache = make()
    sequence = cache.open(prompt=4)
    rows = rows_of(0, 0, 4)
    sequence.append(0, DataInBytes(rows))
    assert (sequence.read_row(0, 3) == rows[3]).all()
    with pytest.raises(forebay.InvalidArgument, match="slots.*read-only"):
        forebay.Buffers(cache, some(1), DataInBytes(empty()))


def test_strides_and_access_given_only_by_a_protocol_are_respected(make: Make) -> None:
    cache = make()
    sequence = cache.open(prompt=4)
    rows = rows_of(0, 0, 8)
    with pytest.raises(forebay.InvalidArgument, match="strides"):
        sequence.append(0, ByInterface(rows[::2]))
    frozen = empty()
    frozen.flags.writeable = False
    with pytest.raises(forebay.InvalidArgument, match="read-only"):
        forebay.Buffers(cache, some(1), ByInterface(frozen))

    class Behind(ByDlpack):
        """Its rows begin after the address."""

        def __dlpack__(self, **given: Any) -> Any:
            from forebay import dlpack

            capsule = super().__dlpack__(**given)
            name = dlpack._name_of(capsule)
            tensor = dlpack._Versioned.from_address(dlpack._pointer_of(capsule, name)).tensor
            tensor.data, tensor.byte_offset = tensor.data - 4 * ROW, 4 * ROW
            return capsule

    sequence.append(0, Behind(rows[4:]))
    assert (sequence.read_row(0, 0) == rows[4]).all()


def test_tensors_with_lazy_or_scattered_values_are_refused(make: Make) -> None:
    cache = make()
    sequence = cache.open(prompt=4)
    rows = rows_of(0, 0, 4)
    floats = Dtype("uint8", 1)
    for value, why in (
        (Conjugated(rows, floats), "is_conj"),
        (Negated(rows, floats), "is_neg"),
        (np.ma.masked_array(rows, mask=False), "mask"),
    ):
        with pytest.raises(forebay.InvalidArgument, match=why):
            sequence.append(0, value)
    sequence.append(0, Tensor(rows, floats))


def test_a_dlpack_producer_on_cuda_is_asked_not_to_synchronise() -> None:
    from forebay.tensors import look

    asked: list[dict[str, Any]] = []

    class Cuda(ByDlpack):
        def __dlpack__(self, **given: Any) -> Any:
            asked.append(given)
            return super().__dlpack__(**given)

    assert look(Cuda(some(1), (2, 1)), "selection").number == 1
    assert [given["stream"] for given in asked] == [-1]


def test_buffers_accept_objects_without_a_shape(make: Make) -> None:
    buffers = forebay.Buffers(make(), ByDlpack(some(1)), ByDlpack(empty()))
    assert (buffers.rows, buffers.query_rows) == (1, 1)


@pytest.mark.parametrize("threads", [False, True])
def test_bad_numbers_salts_and_callables_are_named(make: Make, threads: bool) -> None:
    device = forebay.HostDevice(threads=threads)
    cache = make(device)
    sequence = joined(cache)
    device.wait()
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("rows", lambda: cache.prepare(5)),  # type: ignore[arg-type]
        (r"rows\[0\]", lambda: cache.prepare([(sequence, np.float32(1.9), 1)])),  # type: ignore[list-item]
        ("prompt", lambda: cache.open(prompt=np.float32(1.9))),  # type: ignore[arg-type]
        ("promised", lambda: cache.open(prompt=1, promised=-1)),
        ("salt", lambda: cache.open(prompt=4, tokens=[1, 2], salt="tenant")),  # type: ignore[arg-type]
        ("salt", lambda: cache.find_shared([1, 2], salt=bytearray(b"tenant"))),  # type: ignore[arg-type]
        ("keys", lambda: cache.find_shared([1, 2], keys=5)),  # type: ignore[arg-type]
        ("bytes_a_call", lambda: sequence.join(bytes_a_call=-1)),
        ("start", lambda: sequence.publish(-1, [1])),
        ("left", lambda: cache.watch(3)),  # type: ignore[arg-type]
        ("work", lambda: device.call(3)),  # type: ignore[arg-type]
        ("shape", lambda: device.allocate(-1)),
        ("shape", lambda: device.allocate("x")),  # type: ignore[arg-type]
        ("memory", lambda: forebay.HostDevice(memory=-1)),
        ("memory", lambda: forebay.HostDevice(memory="x")),  # type: ignore[arg-type]
        ("stream", lambda: device.return_stream(None)),
        ("stream", lambda: device.return_stream(device.stream())),
    ]
    for name, call in wrong:
        with pytest.raises(forebay.InvalidArgument, match=f"^{name}: "):
            call()
    cache.open(prompt=4, slots=np.int64(16)).close()  # type: ignore[arg-type]
