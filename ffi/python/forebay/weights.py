"""Weights that the data-parallel ranks of a host share: each keeps a part, and pulls the others' while layers compute.

    device -> weights -> fill every tensor -> meet -> share -> steps (begin, enter, leave, end) -> close

Several objects, because a thread that serves sessions or fills a new version must not stop the one that steps:
`Weights`, `Links` (the sessions with the other ranks), `Update` (a new version beside the one in use) and `Replication`
(a change of the copies of hot ranges). One thread at a time uses each of them: another thread's call raises Busy. Calls
that wait release the interpreter's lock.

A window is a layer's shared weights, as the engine uses them. It may only be read, from `enter` to `leave`, and always
while its layer is resident. Its address never changes. A view of it keeps the device alive, and with it the memory,
also when the weights are closed: it then shows what was there last, or what later pulls of that buffer wrote.

Copies of `fill` run later on a device that works later. The package keeps the tensor until then, whatever happens to
the weights (`forebay.keep`): behind the copy, on its stream, the library marks a word. That needs no lock of the
interpreter, so code that holds it may wait for the stream. The tensor is released by the next call of `fill`,
`Device.wait`, `meet`, `Update.share` or `close`; after an error of `fill`, by `Device.wait` for its stream or the
device's `close`. A stream that is being captured is refused.
"""

from __future__ import annotations

import contextlib
import math
import os
from typing import Any, Callable, Iterator, NamedTuple, Sequence as Many

import numpy as np

from . import update as _update
from ._library import NULL, check, check_created, ffi, lib, new_text, sized, text_bytes
from .arrays import Tensor
from .device import Device, ending
from .errors import ForebayError, InvalidArgument
from .handle import Handle
from .links import Links, config_of, milliseconds
from .overlap import several
from .replicas import WithReplicas
from .sharding import LayerTensors, WeightBytes, declare, planned, prefetched
from .tensors import BYTES_MAX, index
from .update import Outcome, Update, commit, sessions

_BYTES = np.dtype(np.uint8)


class LayerWeights(NamedTuple):
    """A layer of shared weights."""

    # The address of its window on the device.
    address: int
    # Bytes of the window, in whole granules.
    bytes: int
    # Bytes that a pull of the layer moves; 0 for one that the plan keeps resident.
    pulled: int
    # The number of copies that a pull has.
    copies: int
    # The version of its weights: 0 until an update of it was committed.
    version: int
    # Whether the plan shards it.
    is_sharded: bool
    # Whether it is whole without a pull: by the plan, or because it was made resident.
    is_resident: bool
    # The buffer that it is pulled into, from 0. For a layer that the plan keeps resident 0.
    buffer: int


class Weights(WithReplicas):
    """One rank's weights, of which other ranks hold parts; a context manager that closes itself.

    All ranks pass the same, but for `device` and `rank`. Closing waits for nothing: pulls that were enqueued still run.
    All addresses stay valid, and their memory stays taken, until the device ends; to replace weights, make another
    device.

    Args:
        device: the device of the windows.
        layers: for each layer of the model, draft layers last, its tensors as the engine uses them: name to bytes, or
            to bytes and alignment (a power of two; otherwise 256). They lie in the window in this order. A layer may
            have none.
        patterns: globs of names, in which `*` stands for any characters, also dots. Each tensor that one of them
            matches is shared. Each has to match a tensor.
        rank, ranks: this rank in its group, and the ranks of the group: those of one host that hold the same bytes.
        group: which group of the host this is. Groups have different bytes: the tensor-parallel rank.
        budget: the most bytes that the chosen tensors may take on a rank's device, buffers included. The fewest layers
            are sharded that satisfy it; None: all are.
        source: where pulled bytes come from: "peers", the device memory of the other ranks, or "host", the rank's own
            pinned memory.
        odd: what becomes of an odd number of layers: "cheapest", "third buffer", or the layer that stays resident,
            "first" or "last".
        copy_bytes: the most bytes of one copy of a pull; None: 2 MiB.
        draft_layers: the last layers, which run once for each draft pass.
        micro_batches: the most micro-batches of a step; None: 1.
        parts: parts of a pull (`advance`); None: 1.
        wrap: how a captured step ends: "joined", with the pulls of the next step's first layers in its graph, or
            "behind", with these pulls behind the launch.
        prefetch: bytes, and bytes per second: when a layer is left, the first bytes of the next layer's window that are
            brought into the device's L2 at that rate, on a stream of its own; None: nothing is.

    Raises:
        InvalidArgument, InvalidConfig: the message names the value.
        OutOfRange: a rank outside its group.
        OutOfMemory: a budget that no number of sharded layers satisfies, with the least bytes; or the device has no
            more memory, and is as it was.

    Attributes:
        device: as given.
        planned: what the weights take.
    """

    def __init__(
        self,
        device: Device,
        layers: Many[LayerTensors],
        patterns: Many[str],
        *,
        rank: int,
        ranks: int,
        group: int = 0,
        budget: int | None = None,
        source: str = "peers",
        odd: str = "cheapest",
        copy_bytes: int | None = None,
        draft_layers: int = 0,
        micro_batches: int | None = None,
        parts: int | None = None,
        wrap: str = "joined",
        prefetch: tuple[int, int] | None = None,
    ) -> None:
        whole = {"rank": rank, "ranks": ranks, "group": group, "draft_layers": draft_layers}
        chosen = {"source": source, "odd": odd, "wrap": wrap}
        numbers = {"budget": budget, "copy_bytes": copy_bytes, "micro_batches": micro_batches, "parts": parts}
        numbers.update(prefetched(prefetch))
        config, _held = declare(layers, patterns, whole, chosen, numbers)
        self.planned: WeightBytes = planned(device, config)
        self.device = device

        def create(made: Any) -> None:
            text = new_text()
            check_created(lib.fb_weights_create(device._open(), config, text, len(text), made), text)

        self._make(Handle("fb_weights", lib.fb_weights_destroy, device._handle, False), create)

    @staticmethod
    def plan(
        device: Device,
        layers: Many[LayerTensors],
        patterns: Many[str],
        *,
        rank: int,
        ranks: int,
        group: int = 0,
        budget: int | None = None,
        source: str = "peers",
        odd: str = "cheapest",
    ) -> WeightBytes:
        """Computes what weights of these arguments take on `device` for their rank. Takes nothing.

        Raises:
            As the class, but for memory that the device lacks.
        """
        whole = {"rank": rank, "ranks": ranks, "group": group}
        config, _held = declare(layers, patterns, whole, {"source": source, "odd": odd}, {"budget": budget})
        return planned(device, config)

    def fill(self, layer: int, name: str, tensor: Tensor, stream: Any = None) -> None:
        """Enqueues the copy of this rank's part of a tensor, which is given whole. Every tensor that the patterns chose
        has to be filled; it counts as filled when its copy is enqueued.

        Args:
            layer, name: the tensor.
            tensor: its bytes, in any shape and dtype, C-contiguous, on the device or in host memory. Nothing may change
                them until the copy has run; until then they are kept.
            stream: see the device; not one that is being captured. `meet` waits for one stream alone:
                fill on that one, or order it behind the others (`Device.order`).

        Raises:
            InvalidArgument: something else than such a tensor.
            OutOfRange: a layer or tensor that was not chosen, or other bytes than planned.
            InvalidState: the parts were shared. `update` is for a new version.
            Busy, Closed.
        """
        _update.fill(lib.fb_weights_fill, self._pointer, self.device, (layer, name), tensor, stream)

    def meet(
        self,
        folder: str | os.PathLike[str],
        *,
        geometry: bytes | None = None,
        hello: float | None = None,
        interval: float | None = None,
        lost: float | None = None,
        queue_bytes: int | None = None,
        stream: Any = None,
    ) -> Links:
        """Meets the other ranks of the group in a folder: they say who they are, and compare plan, geometry and
        content. Blocks until the copies on `stream` have run, this rank's part was hashed, and all ranks are there.

        Args:
            folder: a folder that all ranks of the host can write; its path is short.
            geometry: 32 bytes, a digest of what the checkpoint is at the group's start, such as the hashes of its
                files; None: zeros. Ranks with different ones refuse each other. It stays the same as long as the group
                lives, also for a rank that comes back and after new weights were committed.
            hello: how long to wait for all ranks; None: 600 seconds.
            interval: after how many seconds without a message a rank says that it is alive; None: 1.
            lost: after how many seconds without a sign of life a rank counts as lost, at least two intervals; None: 10.
            queue_bytes: the most bytes that wait to be sent to one rank, at least 65,536; None: 1 MiB.
            stream: the stream on which the weights were filled.

        Raises:
            InvalidState: a tensor is not filled, or the parts were shared.
            TimedOut: with the lowest rank that did not come.
            InvalidConfig: ranks that differ, or times that contradict each other.
            Busy: a second process of this rank; or another call is inside.
            Io: a folder that takes no socket.
            InvalidArgument, Closed. After an error the weights are filled as before, and the call may be repeated.
        """
        config, _held = config_of(folder, geometry, hello, interval, lost, queue_bytes)
        on = self.device.stream_of(stream)
        made = Links(
            self._handle.device,
            lambda made: check(lib.fb_links_meet(self._pointer, config, on, made), self._pointer),
        )
        self._handle.device.loans.release()
        return made

    def share(self, links: Links, at_most: float, stream: Any = None) -> None:
        """Gives this rank's parts to all other ranks and takes theirs. All ranks call it, each for at most `at_most`
        seconds. From then on the weights serve steps, and cannot be filled any more. With the source "host", or in a
        group of one rank, nothing is exchanged.

        Raises:
            TimedOut, PeerLost, BadFormat, Corrupt: the message names the rank. If a rank is lost meanwhile, the call
                exchanges the parts of all others and then raises that rank's error; `Links.readmit` and `reattach` do
                the rest. After TimedOut the weights cannot be shared any more: all ranks close sessions, weights and
                device, and begin anew.
            InvalidState: a tensor is not filled, or the parts were shared before.
            InvalidConfig: sessions of other weights.
            InvalidArgument, Busy, Closed.
        """
        on, most = self.device.stream_of(stream), milliseconds(at_most, "at_most")
        check(lib.fb_weights_share(self._pointer, sessions(links), on, most), self._pointer)

    def verify(self, layer: int, stream: Any = None) -> None:
        """Reads the parts of one layer that the other ranks gave, and compares them with what these ranks said that
        they filled. Steps go on meanwhile. Blocks for as long as reading takes and serves no session, so poll between
        two layers.

        Raises:
            Corrupt: the message names rank and layer.
            InvalidState: the layer's parts are missing.
            OutOfRange, InvalidArgument, Busy, Closed.
        """
        on = self.device.stream_of(stream)
        check(lib.fb_weights_verify(self._pointer, index(layer, "layer"), on), self._pointer)

    def layer(self, layer: int) -> LayerWeights:
        """Describes a layer: its window, and how it is kept.

        Raises:
            OutOfRange: nothing of this layer was chosen.
            InvalidState: a tensor is not filled, or the part of another rank is missing.
            InvalidArgument, Busy, Closed.
        """
        found = sized("fb_layer_weights")
        check(lib.fb_weights_layer(self._pointer, index(layer, "layer"), found), self._pointer)
        return LayerWeights(
            _address(found.address), found.bytes, found.pulled, found.copies, found.version, bool(found.is_sharded),
            bool(found.is_resident), found.buffer,
        )  # fmt: skip

    def window(self, layer: int) -> Any:
        """A layer's window, with all its chosen tensors: uint8. On the host device it is a read-only NumPy view; on
        CUDA it is a `CudaMemory`, of which `torch.from_dlpack` and `cupy.asarray` take views. See the module for how
        long it lives and when it may be read.

        Raises:
            As `layer`.
        """
        found = self.layer(layer)
        return self.device.view(found.address, (found.bytes,), readonly=True)

    def tensor(self, layer: int, name: str, shape: tuple[int, ...] | None = None, dtype: Any = _BYTES) -> Any:
        """One tensor in its layer's window: a view as `window`.

        Args:
            layer, name: the tensor.
            shape: its extents; None: one axis.
            dtype: NumPy's. For a type that NumPy lacks, such as bfloat16, take bytes and let torch view them:
                `torch.from_dlpack(weights.tensor(0, "o_proj", (rows, 2 * columns))).view(torch.bfloat16)`.

        Raises:
            InvalidArgument: shape and dtype are not of the tensor's bytes.
            OutOfRange: the tensor was not chosen. Other errors: as `layer`.
        """
        at, count = ffi.new("void **"), ffi.new("uint64_t *")
        which = index(layer, "layer")
        check(lib.fb_weights_tensor(self._pointer, which, text_bytes(name, "name"), at, count), self._pointer)
        kind, extents = _as(shape, dtype, int(count[0]))
        return self.device.view(_address(at[0]), extents, None, kind, readonly=True)

    @property
    def device_bytes(self) -> int:
        """The bytes of device memory that the weights take at present: the plan's, those of layers that were made
        resident, and those of replicas.

        Raises:
            Busy, Closed.
        """
        taken = ffi.new("uint64_t *")
        check(lib.fb_weights_bytes(self._pointer, taken), self._pointer)
        return int(taken[0])

    def begin(self, micro_batches: int = 1, draft_passes: int = 0) -> None:
        """Begins a step, and enqueues the pulls of the first layers that are missing. Call it before the first layer,
        and before a capture begins.

        Raises:
            Busy: a step is open.
            InvalidState: the parts were not shared.
            OutOfRange: no micro-batch, or more than the weights were made for.
            PeerLost: a layer is pulled from a rank that was lost; the message names both.
            The error of a layer whose memory could not be mapped.
            InvalidArgument, Closed.
        """
        several_, passes = index(micro_batches, "micro_batches"), index(draft_passes, "draft_passes")
        check(lib.fb_weights_begin(self._pointer, several_, passes), self._pointer)

    def enter(self, layer: int, stream: Any = None, *, micro_batch: int = 0) -> None:
        """A micro-batch's use of a layer begins: the work that is enqueued on `stream` from here on finds the layer
        whole. Sharded layers are entered in their order, each once, then the draft layers in each draft pass; with
        several micro-batches, each layer by all of them in turn. Nothing happens for a layer that is not sharded.

        Raises:
            InvalidState: a layer out of order, without a step, or on another stream than before.
            OutOfRange: no such layer or micro-batch. After an error call `abandon`.
            InvalidArgument, Busy, Closed.
        """
        on, which = self.device.stream_of(stream), index(layer, "layer")
        check(lib.fb_weights_enter(self._pointer, which, index(micro_batch, "micro_batch"), on), self._pointer)

    def leave(self, layer: int, stream: Any = None, *, micro_batch: int = 0) -> None:
        """A micro-batch's use of a layer ends with the work that is enqueued on `stream` now: behind the output
        projection, not behind the experts. When the last micro-batch has left the layer, the pull of the buffer's next
        layer begins.

        Raises:
            InvalidState: the layer was not entered.
            PeerLost: the message names the next layer and the rank. After an error call `abandon`.
            OutOfRange, InvalidArgument, Busy, Closed.
        """
        on, which = self.device.stream_of(stream), index(layer, "layer")
        check(lib.fb_weights_leave(self._pointer, which, index(micro_batch, "micro_batch"), on), self._pointer)

    def advance(self, stream: Any = None) -> None:
        """Enqueues a further part of each pull that is cut into `parts`, behind the work that `stream` has now: for an
        engine whose collectives need the link, behind a collective.

        Raises:
            InvalidArgument, InvalidState, Busy, Closed.
        """
        check(lib.fb_weights_advance(self._pointer, self.device.stream_of(stream)), self._pointer)

    def end(self, stream: Any = None) -> None:
        """Ends a step whose layers are all enqueued. In a capture, `stream` is the one on which the capture began.

        Raises:
            InvalidState: no step, or a layer that a micro-batch has not left.
            InvalidArgument, Busy, Closed.
        """
        check(lib.fb_weights_end(self._pointer, self.device.stream_of(stream)), self._pointer)

    def abandon(self) -> None:
        """Abandons an open step, as after an error. What was enqueued runs; the next `begin` pulls the first layers
        again, behind it. Discard a capture first. Without an open step nothing happens.

        Raises:
            InvalidState: the parts were not shared.
            Busy, Closed.
        """
        check(lib.fb_weights_abandon(self._pointer), self._pointer)

    @contextlib.contextmanager
    def step(self, micro_batches: int = 1, draft_passes: int = 0, *, stream: Any = None) -> Iterator[None]:
        """A step as a context: `begin`, then `end` on `stream`. It abandons the step if anything raises.

        Raises:
            As `begin` and `end`.
        """
        others = False
        try:
            try:
                self.begin(micro_batches, draft_passes)
            except Exception:
                # Nothing has begun. A step that is open is another one, which goes on.
                others = True
                raise
            yield
            self.end(stream)
        except BaseException:
            if not others:
                with contextlib.suppress(ForebayError):
                    self.abandon()
            raise

    @contextlib.contextmanager
    def use(self, layer: int, stream: Any = None, *, micro_batch: int = 0) -> Iterator[None]:
        """A use of a layer as a context: `enter`, then `leave` unless the body raises.

        Raises:
            As `enter` and `leave`.
        """
        self.enter(layer, stream, micro_batch=micro_batch)
        yield
        self.leave(layer, stream, micro_batch=micro_batch)

    def launch(self, launch: Callable[[int], object], stream: Any = None) -> None:
        """Launches a graph that contains a captured step of these weights: `launch` enqueues it on the stream whose
        address in the C interface it gets. The launch is ordered after the pulls before it, and the pulls behind it
        after the launch.

        Raises:
            InvalidArgument: `launch` is not callable, or the stream.
            Busy: a step is open. `launch` itself must not call these weights: such a call raises Busy.
            PeerLost: before anything is launched, as `begin`; other errors are those of `begin`.
            An exception of `launch` passes through this call; no step is open then.
        """
        if not callable(launch):
            raise InvalidArgument("launch", type(launch).__name__, "a callable that takes a stream's address")
        raised: list[BaseException] = []

        def called(_data: Any, on: Any) -> int:
            if ending:
                return int(lib.FB_CANCELLED)
            launch(_address(on))
            return 0

        def keep(_kind: object, error: BaseException, _trace: object) -> None:
            raised.append(error)

        callback = ffi.callback("fb_launch_graph", called, error=lib.FB_CANCELLED, onerror=keep)
        status = lib.fb_weights_launch(self._pointer, self.device.stream_of(stream), callback, NULL)
        try:
            if raised:
                raise raised[0]
        finally:
            # Its traceback refers to this frame, and so to all objects of the caller.
            raised.clear()
        check(status, self._pointer)

    def lost(self, rank: int) -> None:
        """Tells the weights that a rank was lost (`LinkEvent`): its memory stays mapped, and nothing else tells. From
        then on a call that would pull a layer from it raises PeerLost, and layers that are resident go on. Abandon an
        open step. Then wait for the rank's new process (`Links.readmit`, `reattach`), or make every layer resident;
        `reroute` reads replicas instead, where there are such.

        Raises:
            OutOfRange: one's own rank, or one that the group does not have.
            InvalidArgument, Busy, Closed.
        """
        check(lib.fb_weights_lost(self._pointer, index(rank, "rank")), self._pointer)

    def reattach(self, links: Links, rank: int, at_most: float) -> None:
        """Takes a rank in that has come back (`Links.readmit`): gives it this rank's parts, takes its parts, and maps
        them at the addresses of its last process's. Between steps, when all steps have run that pull from the rank.
        Blocks for at most `at_most` seconds; let that be at least the `hello` of `meet`, because the rank may still
        wait for another one that comes back. `Links.poll` is refused until then. Several ranks are taken one after
        another, the lowest first. Replicas are dropped, because the rank has none: those that it held or owned, and all
        once no other rank is lost or waits to be attached.

        Raises:
            Busy: a step is open, or a change of replicas is there.
            InvalidState: the rank was never lost.
            PeerLost, or another error with which the rank was lost: it has not come back.
            Corrupt: a part that is not the one of before. After an error of the exchange the rank is lost again, and
                can come back again.
            OutOfRange, InvalidArgument, TimedOut, Closed.
        """
        most = milliseconds(at_most, "at_most")
        check(
            lib.fb_weights_reattach(self._pointer, sessions(links), index(rank, "rank"), most), self._pointer
        )

    def make_resident(self, layer: int, stream: Any = None) -> None:
        """Makes a sharded layer resident, between steps: it gets memory of its own, which is mapped at its addresses.
        Steps find it whole without a pull; graphs pull it all the same. `stream` is ordered after all steps that used
        the layer, and nothing else uses its window. Blocks until the work on `stream` has run. It reads the memory of a
        rank that was lost, too: the way to go on without that rank.

        Raises:
            Busy: a step is open, or `stream` is being captured.
            OutOfMemory: the device has no memory for it; the layer is sharded as before.
            OutOfRange, InvalidState, InvalidArgument, Closed.
        """
        on = self.device.stream_of(stream)
        check(lib.fb_weights_make_resident(self._pointer, index(layer, "layer"), on), self._pointer)

    def make_sharded(self, layer: int) -> None:
        """Makes a layer that was made resident sharded again, between steps, when all steps that used it have run, and
        gives its memory back. Blocks. Nothing happens to other layers.

        Raises:
            Busy: a step is open.
            PeerLost: the layer would need a rank that was lost.
            OutOfRange, InvalidState, InvalidArgument, Closed.
        """
        check(lib.fb_weights_make_sharded(self._pointer, index(layer, "layer")), self._pointer)

    def shrink(self, most: int) -> int:
        """Makes layers sharded until the weights take at most `most` bytes of device memory, between steps, when all
        steps that used them have run. Blocks.

        Returns:
            What they take then.

        Raises:
            OutOfMemory: the plan takes more, with the least bytes; nothing changes.
            Busy: a step is open.
            Errors of a layer are those of `make_sharded`; layers before it stay sharded.
        """
        taken = ffi.new("uint64_t *")
        check(lib.fb_weights_shrink(self._pointer, index(most, "most", BYTES_MAX), taken), self._pointer)
        return int(taken[0])

    def grow(self, most: int, stream: Any = None) -> int:
        """Makes layers resident, in one order, as long as the weights take at most `most` bytes of device memory; a
        layer that does not fit is left out. Between steps, as `make_resident`. Blocks.

        Returns:
            What they take then.

        Raises:
            Busy: a step is open.
            Errors of a layer are those of `make_resident`; layers before it stay resident.
        """
        on, taken = self.device.stream_of(stream), ffi.new("uint64_t *")
        check(lib.fb_weights_grow(self._pointer, index(most, "most", BYTES_MAX), on, taken), self._pointer)
        return int(taken[0])

    def update(self, version: int, layers: Many[int], at_most: int) -> Update:
        """Begins an update of `layers`: takes the memory of this rank's new parts, and nothing else changes. Steps go
        on with the old version. All ranks begin it with the same version and layers.

        Args:
            version: above all that were begun before, also those that failed.
            layers: their numbers, each once.
            at_most: the most bytes of device memory that the update may take.

        Raises:
            OutOfMemory: it needs more; the message has how many.
            InvalidState: the parts were not shared.
            Busy: another update of these weights, or a change of their replicas, is there: close it first, unless it
                was committed or aborted.
            Unsupported: weights with the source "host".
            InvalidConfig: no layers, or one twice.
            OutOfRange: no such layer, or a version that is not above the others.
            DeviceFailed: also where an update or a change that was closed could not give its memory back. The call may
                be repeated.
            InvalidArgument, Closed.
        """
        numbers = [index(layer, f"layers[{at}]") for at, layer in enumerate(several(layers, "layers"))]
        given, count, most = ffi.new("uint32_t[]", numbers), len(numbers), index(at_most, "at_most", BYTES_MAX)
        which = index(version, "version")

        def create(made: Any) -> None:
            check(lib.fb_update_create(self._pointer, which, given, count, most, made), self._pointer)

        return Update(self.device, which, create)

    def commit(self, update: Update, links: Links, step: int, at_most: float, stream: Any = None) -> Outcome:
        """Takes the new version, at a border between two steps at which all ranks do, or at which none does: then the
        old version stays, on every rank. Waits until all ranks are there. Addresses and captured graphs hold; replicas
        of the layers are dropped on all ranks. Close the update afterwards.

        Args:
            update: an update that was shared.
            links: the sessions.
            step: a number of the border, the same on all ranks.
            at_most: the most seconds to wait.
            stream: one that is ordered after all steps; nothing else uses a window.

        Raises:
            Busy: a step is open, or `stream` is being captured. Nothing is decided, and the call may be repeated.
            InvalidState: the update was not shared, is over, or is of other weights or sessions. The same.
            InvalidArgument, Closed. The same.
            Any other error: `update.failed` tells whether the ranks have decided. If not, the call may be repeated. If
                so, a layer whose new memory cannot be mapped raises the error from then on (`layer`), no step begins,
                and this process is ended and started again with the new weights. If every layer of the update has its
                version, only old memory could not be given back, and steps go on. After Internal `update.failed` tells
                nothing, and the weights can only be closed.
        """
        if not isinstance(update, Update):
            raise InvalidArgument("update", type(update).__name__, "an Update")
        return commit(lib.fb_weights_commit, self._pointer, self.device, update, links, (step, at_most, stream))

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.planned.sharded_layers} of {self.planned.layers} layers sharded"
        return f"<forebay.Weights on {self.device.place}: {state}>"


def _address(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))


def _as(shape: Any, dtype: Any, count: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The dtype and the extents of a tensor of `count` bytes.

    Raises:
        InvalidArgument: they are not of so many bytes.
    """
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise InvalidArgument("dtype", repr(dtype), "a dtype of NumPy's") from error
    if kind.kind not in "biufc" or kind.subdtype is not None:
        raise InvalidArgument("dtype", repr(dtype), "a dtype of numbers")
    axes = (count // kind.itemsize,) if shape is None else several(shape, "shape")
    extents = tuple(index(extent, "shape", BYTES_MAX) for extent in axes)
    if math.prod(extents) * kind.itemsize != count:
        raise InvalidArgument("shape", f"{kind.name} {list(extents)}", f"one of {count} bytes")
    return kind, extents
