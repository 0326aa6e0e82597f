"""Torch's own tensors and streams, if torch is installed."""

from __future__ import annotations

from typing import Any, Callable

import pytest

import forebay
from conftest import LAYERS, empty, joined, rows_of, skip, some, whole

Make = Callable[..., forebay.Cache]


@pytest.fixture
def torch() -> Any:
    try:
        import torch as found
    except ImportError:
        skip("torch_tensors", "torch is not installed")
    return found


def test_torch_tensors_are_accepted_and_written(make: Make, torch: Any) -> None:
    cache = make()
    with cache.open(prompt=40, bring_up="nothing") as sequence:
        for layer in range(LAYERS):
            sequence.append(layer, torch.from_numpy(rows_of(layer, 0, 40)).view(torch.bfloat16))
        sequence.join()
        slots, plain = torch.full((1, 1, 8), -77, dtype=torch.int32), empty()
        with cache.prepare([(sequence, 0, 1)]) as step:
            step.layer(0, torch.from_numpy(some(7, 9)), slots)
            step.layer(0, some(7, 9), plain)
            buffers = forebay.Buffers(cache, torch.from_numpy(some(7, 9)), slots)
            step.layer(1, buffers)
            whole(step, 0, 1)
        assert (slots.numpy() == plain).all()
        slab = torch.from_numpy(cache.slab(0))
        slot = int(slots[0, 0, 1])
        assert slab[slot // 64, slot % 64].numpy().tobytes() == rows_of(0, 9, 1).tobytes()


def test_tensors_that_do_not_fit_are_refused(make: Make, torch: Any) -> None:
    cache = make()
    sequence = joined(cache)
    good, slots = torch.from_numpy(some(1)), torch.from_numpy(empty())
    with cache.prepare([(sequence, 0, 1)]) as step:
        for wrong, says in (
            (good.long(), "int64"),
            (good[0], r"\[1, 8\]"),
            (good.repeat(1, 1, 2)[:, :, ::2], "strides"),
            (good.to("meta"), "meta|memory"),
            (good.to_sparse(), "sparse|dense|Tensor"),
            (good.float(), "float32"),
        ):
            with pytest.raises(forebay.InvalidArgument, match=says):
                step.layer(0, wrong, slots)
            with pytest.raises(forebay.InvalidArgument):
                step.layer(0, good, wrong)
        assert (slots == -77).all()
        whole(step)


def test_weights_are_filled_from_tensors_and_seen_as_tensors(torch: Any) -> None:
    tensors = [torch.arange(2048, dtype=torch.float32).add(layer).to(torch.bfloat16).view(32, 64) for layer in range(2)]
    with forebay.HostDevice() as device:
        with forebay.Weights(device, [{"o_proj": 4096}] * 2, ["o_proj"], rank=0, ranks=1) as weights:
            for layer, tensor in enumerate(tensors):
                weights.fill(layer, "o_proj", tensor)
            views = [torch.from_dlpack(weights.tensor(layer, "o_proj", (32, 128))) for layer in range(2)]
            with pytest.raises(forebay.InvalidArgument, match=r"bfloat16 \[32, 64\] in meta:0; expected one in host"):
                weights.fill(0, "o_proj", tensors[0].to("meta"))
            with pytest.raises(forebay.OutOfRange):
                weights.fill(0, "o_proj", tensors[0].float())
            with pytest.raises(forebay.InvalidArgument, match="strides"):
                weights.fill(0, "o_proj", tensors[0].T)
    # The views outlive weights and device, without a copy.
    for view, tensor in zip(views, tensors):
        assert torch.equal(view.view(torch.bfloat16), tensor)
