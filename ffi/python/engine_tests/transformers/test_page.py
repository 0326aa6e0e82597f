"""The examples of docs/transformers.md print what the page says, and its five lines and those of README.md run."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import torch
from forebay.transformers import check, models
from harness import model, save

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "docs" / "transformers.md"


def test_the_examples_print_what_the_page_says() -> None:
    """One after the other, in one program. A percentage may differ by one: another processor rounds sums otherwise,
    and selects another of two nearly equal positions."""
    blocks = re.findall(r"^```python\n(.*?)^```\n```text\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for program, said in blocks:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(program, str(PAGE), "exec"), names)
        assert re.sub(r"\d+%", "%", out.getvalue()) == re.sub(r"\d+%", "%", said)
        shares = [[int(share) for share in re.findall(r"(\d+)%", text)] for text in (out.getvalue(), said)]
        assert all(abs(one - other) <= 1 for one, other in zip(*shares, strict=True)), out.getvalue()


def test_the_five_lines_run(tmp_path: Path) -> None:
    """With a small model in a folder. README.md has the same lines."""
    (lines,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert lines.count("\n") == 5
    assert lines in (ROOT / "README.md").read_text()
    tokenizer = save("deepseek_v32", tmp_path)
    prompt = models.prompts(1, 60, seed=1)
    text = " ".join(f"w{word}" for word in prompt[0].tolist())
    names: dict[str, Any] = {"folder": tmp_path, "tokenizer": tokenizer, "text": text}
    exec(compile(lines.replace("model.generate", "made = model.generate"), str(PAGE), "exec"), names)
    given = check.Prompt(prompt, torch.ones_like(prompt))
    assert torch.equal(names["made"][:, 60:], check.decode(model("deepseek_v32"), given, 256).tokens)
    names["cache"].close()
