"""`python -m forebay.transformers`: results, and bad input as one line with status 2."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import forebay
import pytest
import torch
import transformers
from forebay.transformers import ForebayCache, bench, check, command, models
from harness import FAMILIES, QUICK, model, save


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of error of a command line that is refused."""
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    return said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["decode"], "decode"),
        ([], "COMMAND"),
        (["check", "--model", "llama"], "'llama' is not a model"),
        (["check", "--ratio", "0.1,2"], "'2' is not above 0"),
        (["check", "--ratio", "nan"], "'nan' is not above 0"),
        (["check", "--batch", "9"], "'9' is not a whole number from 1 to 8"),
        (["check", "--dtype", "fp8"], "'fp8' is not a type"),
        (["bench", "--context", "a lot"], "'a lot' is not a whole number"),
        (["bench", "--context", ""], "'' is not a whole number"),
        (["generate", "--model", "."], "--prompt"),
        (["generate", "--model", "/nowhere", "--prompt", "Hi"], "'/nowhere' is not a folder"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(arguments, capsys)


def test_check_prints_a_line_for_each_run(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--model", "glm_moe_dsa,hy_v4", "--ratio", "0.3,1", "--batch", "1,2", "--context", "64", "--tokens", "6"]
    assert command.main(["check", *chosen]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * 2 * 2 * 2
    assert "every run is equal" in lines[-1]
    assert all(re.search(r"(yes +yes|yes +-) +\d+\.\d% +yes$", line) for line in lines[1:-1]), lines


def test_check_tells_a_difference(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "same_bits", lambda one, other: False)
    assert command.main(["check", "--model", "axk2", "--ratio", "0.5", "--batch", "1", "--tokens", "3"]) == 1
    assert "2 runs failed" in capsys.readouterr().out


def test_bench_prints_both_steps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(models, "SMALL", models.TINY)
    monkeypatch.setattr(bench, "CHUNK", 64)
    assert command.main(["bench", "--context", "64,128", "--steps", "2", "--threads", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tiny" not in lines[0] and "deepseek_v32" in lines[0]
    assert [line.split()[0] for line in lines[2:4]] == ["64", "128"]
    assert re.search(r"A step at 128 tokens takes \d+\.\d\d times one at 64\.", lines[-1])


@pytest.mark.parametrize("family", FAMILIES[::2] if QUICK else FAMILIES)
def test_generate_continues_a_text(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text of the stock model, then misses by layer and bytes."""
    save(family, tmp_path)
    capsys.readouterr()
    prompt = models.prompts(1, 40, seed=4)
    text = " ".join(f"w{word}" for word in prompt[0].tolist())
    chosen = ["--model", str(tmp_path), "--prompt", text, "--ratio", "0.4", "--tokens", "12", "--chunk", "16"]
    assert command.main(["generate", *chosen]) == 0
    said = capsys.readouterr().out
    given = check.Prompt(prompt, torch.ones_like(prompt))
    assert " ".join(f"w{word}" for word in check.decode(model(family), given, 12).tokens[0].tolist()) in said
    assert "12 tokens after a prompt of 40" in said
    assert re.search(r"^ +0 +[\d,]+ +[\d,]+ +\d+\.\d%$", said, re.MULTILINE)
    assert re.search(r"^Rows: [\d.]+ KiB in host memory, [\d.]+ KiB in slots on the device\.$", said, re.MULTILINE)
    assert re.search(r"tables [\d.]+ [KM]iB, index keys [\d.]+ KiB", said)


def test_generate_refuses_what_it_cannot_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["generate", "--model", str(tmp_path), "--prompt", "w1 w2"]
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in refused(options, capsys)
    transformers.LlamaConfig().save_pretrained(tmp_path)
    assert "'llama'" in refused(options, capsys)
    models.configuration("axk2").save_pretrained(tmp_path)
    assert "--model" in refused(options, capsys)
    save("deepseek_v32", tmp_path)
    capsys.readouterr()
    assert "--prompt" in refused([*options[:-1], ""], capsys)
    assert "the model was made for" in refused([*options, "--tokens", "20000"], capsys)


def test_generate_ignores_what_the_folder_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beams and no cache in generation_config.json; what generate itself refuses is one line."""
    save("axk2", tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text('{"num_beams": 4, "use_cache": false, "pad_token_id": 0}')
    options = ["generate", "--model", str(tmp_path), "--prompt", "w1 w2 w3", "--tokens", "3", "--ratio", "1"]
    assert command.main(options) == 0
    assert "3 tokens after a prompt of 3" in capsys.readouterr().out
    file.write_text('{"cache_implementation": "offloaded", "pad_token_id": 0}')
    with pytest.raises(SystemExit) as ended:
        command.main(options)
    assert ended.value.code == 2
    assert "it cannot generate" in capsys.readouterr().err


def test_an_error_of_forebay_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_chosen: object) -> int:
        raise forebay.InvalidState("planted")

    monkeypatch.setattr(check, "run", fail)
    assert "planted" in refused(["check"], capsys)


def test_check_counts_a_broken_invariant(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_cache: ForebayCache) -> None:
        raise forebay.Internal("planted")

    monkeypatch.setattr(ForebayCache, "validate", fail)
    chosen = ["--model", "axk2", "--ratio", "0.5", "--batch", "1", "--dtype", "fp32", "--tokens", "3"]
    assert command.main(["check", *chosen]) == 1
    said = capsys.readouterr()
    assert "planted" in said.err
    assert re.search(r"yes +yes +\d+\.\d% +NO$", said.out, re.MULTILINE) and "1 runs failed" in said.out


def test_a_family_that_transformers_lacks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(models._CLASSES, "dots3_note", "NoSuchClass")
    assert "dots3_note: not in this transformers" in refused(["bench", "--model", "dots3_note"], capsys)
    chosen = ["--ratio", "0.5", "--batch", "1", "--dtype", "fp32", "--context", "24", "--tokens", "2"]
    assert command.main(["check", *chosen]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(models.FAMILIES) + 1
    assert re.search(r"^dots3_note +not in this transformers$", lines[-2])


def test_bench_judges(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.judge(bench.GROWS, bench.FASTER) == 0
    assert bench.judge(bench.GROWS + 0.1, bench.FASTER) == 1
    assert bench.judge(bench.GROWS, bench.FASTER - 1) == 1
    assert "11.0 times faster than stock" in capsys.readouterr().out
    assert "--judge" in refused(["bench", "--judge", "--no-stock"], capsys)
    assert "--judge" in refused(["bench", "--judge", "--context", "2048"], capsys)


def test_the_module_is_a_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["forebay.transformers", "check", "--ratio", "7"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("forebay.transformers", run_name="__main__")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "'7'" in said
