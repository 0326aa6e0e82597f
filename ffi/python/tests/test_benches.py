"""The GPU bench on tiny shapes and the stand-in driver: it measures what its figures name, and ends at a wrong row. The
tests ignore times."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import forebay
import gpu
from conftest import skip


@pytest.fixture
def driver() -> str:
    found = os.environ.get("FOREBAY_STANDIN_LIBRARY")
    if not found:
        skip("the_cuda_device_from_python", "FOREBAY_STANDIN_LIBRARY names no stand-in driver")
    return found


def test_every_group_has_figures_that_were_compared(driver: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "figures.json"
    gpu.main(["--quick", "--rounds", "2", "--driver", driver, "--json", str(file)])
    head, *figures = json.loads(file.read_text())
    assert (head["kind"], head["schema"], head["device"]) == ("bench-device", 2, "cuda:0")
    assert {figure["group"] for figure in figures} == set(gpu.GROUPS)
    for figure in figures:
        assert (figure["kind"], figure["through"]) == ("bench", "python") and figure["checked"] > 0
        assert figure["us_low"] <= figure["us"] <= figure["us_high"]
        assert ("gb_s" in figure) == (figure["group"] not in ("resolve", "step", "call"))
    said = capsys.readouterr().out
    assert "mean nothing" in said and "not met" not in said and f"{len(figures)} figures" in said
    gpu.main(["--quick", "--rounds", "1", "--only", "resolve", "--driver", driver, "--json", "-"])
    assert {entry.get("group") for entry in json.loads(capsys.readouterr().out)} == {None, "resolve"}


def test_control_a_wrong_row_count_or_residency_ends_the_bench(
    driver: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    sizes = {"lanes": 2, "tokens": 128, "slots": 48, "top_k": 32, "misses": 8}
    place = gpu.Standin(driver, 0)

    def ends(rig: gpu.Rig, says: str) -> None:
        with pytest.raises(SystemExit) as ended:
            rig.run(3, apart=False)
            rig.close()
        assert ended.value.code == 2 and says in capsys.readouterr().err

    gpu.Rig(place, **sizes).run(2, apart=True)
    rig = gpu.Rig(place, **sizes)
    rig.rows[rig.orders[1, 3], 100] ^= 1
    ends(rig, "a row is not the one that was stored")
    rig = gpu.Rig(place, **sizes)
    land = rig.land
    monkeypatch.setattr(rig, "land", lambda: land() ^ 1)
    ends(rig, "a new row is not stored as the engine wrote it")
    monkeypatch.undo()
    rig = gpu.Rig(place, **sizes)
    monkeypatch.setattr(rig.twins[0].__class__, "digest", lambda self: id(self))
    ends(rig, "residency differs")
    # Equal on both devices, but not the misses in the figure's name.
    rig = gpu.Rig(place, **sizes)
    select = rig.select

    def still() -> Any:
        select()
        return rig.orders[:, None, :32].copy()

    monkeypatch.setattr(rig, "select", still)
    ends(rig, "misses by layer")
    rig = gpu.Rig(place, **sizes)
    resolve = forebay.Step.layer

    def other(step: forebay.Step, layer: int, selection: Any, *more: Any) -> None:
        if step.cache is rig.twin:
            selection = selection[:, :, ::-1].copy() // 2
        resolve(step, layer, selection, *more)

    monkeypatch.setattr(forebay.Step, "layer", other)
    ends(rig, "not the host device's")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "gather,warp"], "warp"),
        (["--rounds", "0"], "--rounds"),
        (["--device", "-1"], "--device"),
        (["--driver", "/nowhere.so"], "--driver"),
    ],
)
def test_invalid_options_are_refused_in_one_line(arguments: list[str], says: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(arguments)
    assert ended.value.code == 2 and says in capsys.readouterr().err.splitlines()[-1]


def test_an_unwritable_file_is_reported_before_anything_is_measured(driver: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--quick", "--driver", driver, "--json", "/nowhere/figures.json"])
    told = capsys.readouterr()
    assert ended.value.code == 2 and "--json" in told.err and "gather" not in told.out


def test_without_a_gpu_and_a_driver_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("FOREBAY_STANDIN_LIBRARY", raising=False)
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--device", "255"])
    assert not ended.value.code and "nothing is measured" in capsys.readouterr().out
