"""`forebay.serving` with torch's tensors on a host device: the engine at random of ffi/python/tests, and torch's own
matters. It needs torch, which the environment of the package's other tests does not have.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import forebay  # noqa: E402
from forebay.serving import Requests  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from serving_machine import Machine  # noqa: E402

SIZES: dict[str, Any] = {"lanes": 4, "max_tokens": 160, "slots": 16, "query_rows": 3, "parked": 3, "lock": False}
SHAPES = {
    "one run": forebay.Shape(layers=3, row_bytes=(16, 0), top_k=8, index_key_bytes=8, page_tokens=16),
    "two runs": forebay.Shape(layers=2, row_bytes=(8, 16), top_k=8, page_tokens=16),
    "padded blocks": forebay.Shape(layers=2, row_bytes=(20, 0), top_k=8, page_tokens=16, device_block_align=512),
}
DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn]


class Tensors:
    """Rows of a dtype, from an engine that computes gradients and has gaps in its tensors."""

    def __init__(self, dtype: Any) -> None:
        self.dtype, self.made = dtype, 0

    def tensor(self, values: np.ndarray[Any, Any]) -> Any:
        rows = torch.from_numpy(np.array(values).view(np.uint8)).view(self.dtype)
        self.made += 1
        if self.made % 3 == 0:
            wide = torch.zeros(*rows.shape[:-1], 2 * rows.shape[-1], dtype=torch.uint8).to(self.dtype)
            wide[..., : rows.shape[-1]] = rows
            rows = wide[..., : rows.shape[-1]]
        return rows.requires_grad_() if self.dtype is torch.float32 else rows

    prompt = tensor

    def selection(self, values: np.ndarray[Any, Any]) -> Any:
        return torch.from_numpy(values)

    def numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = tensor.detach().numpy().copy()
        return found


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [False, True], ids=["one thread", "streams are threads"])
def test_an_engine_at_random_with_torch(kind: str, dtype: Any, threads: bool) -> None:
    with (
        forebay.HostDevice(threads=threads) as device,
        forebay.Cache(device, SHAPES[kind], **SIZES) as cache,
    ):
        machine = Machine(cache, Tensors(dtype), 2)
        machine.run(150)
        assert machine.compared > 500


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_torchs_and_of_the_dtype_that_was_asked_for(dtype: Any) -> None:
    with forebay.HostDevice() as device, forebay.Cache(device, SHAPES["one run"], **SIZES) as cache:
        requests = Requests(cache, ratio=0.5)
        request = requests.add("a", promised=20)
        bits = torch.arange(40 * 16, dtype=torch.int64).mul(7).remainder(251).to(torch.uint8).view(40, 16)
        rows = bits.view(dtype)
        for layer in range(3):
            request.prefill(layer, rows)
            assert torch.equal(request.read(layer, dtype=dtype).view(torch.uint8), bits)
        out = torch.empty(30, rows.shape[1], dtype=dtype)
        assert request.read(1, 5, 35, out=out) is out and torch.equal(out.view(torch.uint8), bits[5:35])
        request.put_index_keys(0, rows.view(torch.uint8)[:, :8])
        keys = request.index_keys(0, dtype=dtype)
        assert keys.dtype == dtype and torch.equal(keys.view(torch.uint8), bits[:, :8])
        chosen = torch.tensor([[[3, 40, -1, 7], [41, 40, 0, -1]]])
        with requests.step(["a"], query_rows=2) as step:
            for layer in range(3):
                step.write(layer, rows[:2][None])
                slots = step.select(layer, chosen)
                assert slots.dtype == torch.int32 and slots.shape == (1, 2, 8) and (slots[..., 4:] == -1).all()
                found = step.rows(layer, slots, dtype)
                assert found.dtype == dtype and found.shape == (1, 2, 8, rows.shape[1])
                wanted = torch.cat([bits, bits[:2]])[chosen.clamp(min=0)]
                seen = found[:, :, :4].contiguous().view(torch.uint8)
                assert torch.equal(seen[chosen >= 0], wanted[chosen >= 0])
                slab = requests.slab(layer, dtype)
                assert torch.equal(slab[slots[0, 0, :2].long()].view(torch.uint8), found[0, 0, :2].view(torch.uint8))
                gaps = torch.empty(1, 2, 8, 2 * rows.shape[1], dtype=torch.uint8).to(dtype)[..., ::2]
                assert step.rows(layer, slots, dtype, out=gaps) is gaps
                assert torch.equal(gaps.contiguous().view(torch.uint8), found.view(torch.uint8))


def test_a_step_in_inference_mode_and_one_outside() -> None:
    with forebay.HostDevice() as device, forebay.Cache(device, SHAPES["one run"], **SIZES) as cache:
        requests = Requests(cache, ratio=0.5)
        request = requests.add("a", promised=20)
        for turn in range(3):
            with torch.inference_mode(turn == 0):
                new = torch.full((1, 1, 8), turn, dtype=torch.bfloat16)
                for layer in range(3 if turn == 0 else 0):
                    request.prefill(layer, new.expand(1, 10, 8)[0])
                with requests.step(["a"]) as step:
                    for layer in range(3):
                        step.write(layer, new)
                        slots = step.select(layer, torch.full((1, 1, 1), 10 + turn))
                        assert (step.rows(layer, slots, torch.bfloat16)[0, 0, 0] == turn).all()
        assert request.length == 13


def test_errors_name_torchs_tensors() -> None:
    with forebay.HostDevice() as device, forebay.Cache(device, SHAPES["one run"], **SIZES) as cache:
        requests = Requests(cache, ratio=0.5)
        request = requests.add("a", promised=20)
        for layer in range(3):
            request.prefill(layer, torch.zeros(10, 8, dtype=torch.bfloat16))
        with pytest.raises(forebay.InvalidArgument, match="'a': rows: got float16; expected bfloat16"):
            request.prefill(0, torch.zeros(1, 8, dtype=torch.float16))
        with pytest.raises(forebay.InvalidArgument, match=r"'a': rows: got bfloat16 \[1, 9\], rows of 18 bytes"):
            request.prefill(0, torch.zeros(1, 9, dtype=torch.bfloat16))
        with pytest.raises(forebay.InvalidArgument, match="torch tensor in meta:0; expected one in host memory"):
            requests.step(["a"]).write(0, torch.zeros(1, 1, 8, dtype=torch.bfloat16, device="meta"))
        requests._open.abandon()  # type: ignore[union-attr]
        request.crop(10)
        with requests.step(["a"]) as step:
            with pytest.raises(forebay.OutOfRange, match="'a': layer 2: query row 0 selects position 11"):
                step.select(2, torch.full((1, 1, 8), 11))
            with pytest.raises(forebay.InvalidArgument, match="selection: got float32"):
                step.select(2, torch.zeros(1, 1, 8))
            step.abandon()
