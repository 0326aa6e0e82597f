"""`python -m forebay.vllm`: `check` and `bench` with real engines, the served endpoint, and bad input as one line."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forebay.vllm import bench, check, command, engine, models, pool
from forebay.vllm.options import ENVIRONMENT, Options
from harness import whole
from test_trace import BLOCK, requests
from test_trace import prompts as trace_prompts

FOUND = engine.Found([[1], [2]], [0, 0], {}, 1.0, 90, 1 << 20, {})


@pytest.fixture(autouse=True)
def _off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `serve` sets ends with its test."""
    monkeypatch.setenv(ENVIRONMENT, "")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model."""
    return check.small_model(tmp_path_factory.mktemp("served"), "fp32")


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of error of a command line that is refused."""
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("forebay.vllm: ") and said.err.count("\n") == 1, said.err
    return said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["decode"], "decode"),
        (["check", "--ratio", "0.1,2"], "'2' is not above 0"),
        (["check", "--ratio", ""], "'' is not above 0"),
        (["check", "--requests", "0"], "'0' is not a whole number from 1 to 256"),
        (["check", "--drafts", "17"], "'17' is not a whole number"),
        (["check", "--dtype", "fp8"], "'fp8' is not a type"),
        (["check", "--model", "/nowhere"], "'/nowhere' is not a folder"),
        (["bench", "--memory", "1.5GiB"], "'1.5GiB' is not a number of bytes"),
        (["bench", "--memory", "0"], "'0' is not a number of bytes"),
        (["bench", "--memory", "8Gi"], "'8Gi' is not a number of bytes"),
        (["bench", "--ratio", "nan"], "'nan' is not above 0"),
        (["bench", "--requests", "many"], "'many' is not a whole number"),
        (["serve", "model"], "neither --forebay-ratio nor --forebay-slots"),
        (["serve", "model", "--forebay-ratio", "0.2", "--forebay-slots", "9"], "both"),
        (["serve", "model", "--forebay-ratio", "7"], "'7' is not above 0"),
        (["serve", "model", "--forebay-ratio"], "expected one argument"),
        (["serve", "model", "--forebay-slots=0"], "'0' is not a whole number from 1"),
        (["serve", "model", "--forebay-host-memory", "much"], "'much' is not a number of bytes"),
        (["serve", "model", "--forebay-record", "/nowhere/x"], "'/nowhere/x' is not a file"),
        (["serve", "model", "--forebay-record", "/tmp"], "'/tmp' is not a file"),
        (["serve", "model", "--forebay-rows", "disk"], "'disk' is not a place"),
        (["serve", "model", "--forebay-rati", "0.2"], "--forebay-rati"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(arguments, capsys)


@pytest.mark.parametrize("name", ["check", "bench"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not a JSON object"),
        ("[]", "is not a JSON object"),
        ("[" * 1000, "is not a JSON object"),
        ("\xff", "is not a JSON object"),
        ("{}", "a model of type None"),
        ('{"model_type": "llama"}', "a model of type 'llama'; forebay.vllm knows deepseek_v32"),
        ('{"model_type": []}', "a model of type []"),
    ],
)
def test_models_that_are_refused(
    name: str, text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before an engine starts."""
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--model", str(tmp_path)])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.err.count("\n") == 1 and words in said.err


def test_words_of_forebay_are_taken_out_of_the_command_line() -> None:
    words = ["m", "--forebay-ratio", "0.2", "--port", "1", "--forebay_slots=3", "--forebay-validate", "-O", "--a={}"]
    ours, theirs = command.divide(words)
    assert ours == ["--forebay-ratio", "0.2", "--forebay-slots=3", "--forebay-validate"]
    assert theirs == ["m", "--port", "1", "-O", "--a={}"]


def test_every_option_of_the_plug_in_is_a_flag() -> None:
    chosen = command.serve_parser().parse_args([])
    assert {name.removeprefix("forebay_") for name in vars(chosen)} == set(Options.__dataclass_fields__) - {"required"}


@pytest.mark.parametrize("arguments", [["serve", "m", "--forebay-slots", "8"], ["check"], ["bench"]])
def test_without_a_vllm_that_it_knows(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from forebay.vllm import platform

    known = platform.check_version
    stub = SimpleNamespace(check_version=lambda: known("0.31.2"))
    monkeypatch.setitem(sys.modules, "forebay.vllm.platform", stub)
    assert "vLLM 0.31.2" in refused(arguments, capsys)
    # What an import of another vLLM may lack.
    monkeypatch.setitem(sys.modules, "forebay.vllm.platform", SimpleNamespace())
    assert "this vLLM cannot be used" in refused(arguments, capsys)
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert "there is no vLLM" in refused(arguments, capsys)


def test_serve_turns_forebay_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.vllm import serve

    given: list[list[str]] = []
    monkeypatch.setattr(serve, "run", lambda words: given.append(words) or 0)
    words = ["m", "--forebay-ratio=0.3", "--forebay-host-memory", "2GiB", "--seed", "3"]
    assert command.main(["serve", *words]) == 0
    assert given == [["m", "--seed", "3"]]
    assert Options.read() == Options(ratio=0.3, host_memory=2 << 30, required=True)


def test_the_module_is_a_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["forebay.vllm", "check", "--ratio", "7"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("forebay.vllm", run_name="__main__")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "'7'" in said


@whole
def test_help_shows_both_programs_options() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "forebay.vllm", "serve", "--help=max-model-len"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert 0 < done.stdout.index("--forebay-ratio") < done.stdout.index("--max-model-len")


@whole
def test_check_compares_engines(capsys: pytest.CaptureFixture[str]) -> None:
    """Forebay off, all rows in slots, a share of them, and with preemptions."""
    ratios = ["0.1", "0.5"]
    assert command.main(["check", "--ratio", ",".join(ratios)]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [re.split(r"  +", line) for line in lines[2:-1]]
    few = ["ratio 1, few blocks", f"ratio {ratios[0]}, few blocks"]
    assert [line[0] for line in shown] == ["forebay off", "ratio 1", *(f"ratio {ratio}" for ratio in ratios), *few]
    assert [line[1] for line in shown] == ["-", "equal", *("equal" for _ in ratios), "-", "equal"]
    assert [line[2] for line in shown[:2]] == ["-", "0.0%"]
    assert all(float(line[2].rstrip("%")) > 5 for line in (*shown[2:-2], shown[-1])), lines
    # vLLM allocates a byte for each token of a block.
    assert "MiB" in shown[0][4]
    assert all(line[4] in (f"{int(line[3]) * 64 / 1024:,.1f} KiB", f"{int(line[3]) * 64} bytes") for line in shown[1:])
    assert all(line[5] == "0" for line in shown[:-2])
    assert all(int(line[5]) >= int(line[6]) > 0 for line in shown[-2:]), lines
    # Two blocks of the last prompt.
    assert all(line[7] == "128" for line in shown[:-2]), lines
    assert lines[-1].startswith("All tokens are equal")


@whole
def test_check_compares_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["check", "--ratio", "0.3", "--requests", "4", "--drafts", "2", "--dtype", "bf16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 3 + 2 + 1
    drafted = [re.split(r"  +", line)[8] for line in lines[2:-1]]
    assert all(re.fullmatch(r"\d+/[1-9]\d*", one) for one in drafted), lines


def test_check_tells_a_difference(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def start(run: engine.Run) -> engine.Found:
        if run.options == {"ratio": 0.5}:
            raise engine.EngineFailed("planted")
        tokens = [[1], [3]] if "num_gpu_blocks_override" in run.arguments else FOUND.tokens
        return replace(FOUND, tokens=tokens)

    monkeypatch.setattr(check, "start", start)
    assert command.main(["check", "--ratio", "0.5"]) == 1
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert [re.split(r"  +", line)[:2] for line in lines[2:-1]] == [
        ["forebay off", "-"], ["ratio 1", "equal"], ["ratio 0.5", "FAILED"], ["ratio 1, few blocks", "-"],
        ["ratio 0.5, few blocks", "equal"],
    ]  # fmt: skip
    assert lines[-1].startswith("1 engines differ or failed")
    assert "planted" in said.err
    monkeypatch.setattr(
        check,
        "start",
        lambda run: replace(FOUND, tokens=FOUND.tokens if run.options == {"rows": "vllm"} else [[1], [3]]),
    )
    assert command.main(["check", "--ratio", "0.5"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [re.split(r"  +", line)[1] for line in lines[2:-1]] == ["-", "DIFFER", "DIFFER", "-", "equal"]


@whole
def test_bench_compares_speed_and_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """More requests fit, and the reported bytes are those of the cache that the engine has made."""
    runs: list[tuple[engine.Run, engine.Found]] = []

    def start(run: engine.Run, **options: Any) -> engine.Found:
        runs.append((run, engine.start(run, **options)))
        return runs[-1][1]

    monkeypatch.setattr(bench, "start", start)
    chosen = ["--requests", "3", "--context", "200", "--tokens", "8", "--repeats", "1", "--memory", "64MiB"]
    assert command.main(["bench", *chosen]) == 0
    said = capsys.readouterr().out
    (off, without), (on, having) = runs
    assert (off.options, on.options) == ({"rows": "vllm"}, {"ratio": 0.2}) and off.arguments == on.arguments
    assert without.tokens == having.tokens and "all requests at once, and give the same tokens" in said
    fits = re.search(r"^requests of 208 tokens that fit +(\d+) +(\d+)$", said, re.MULTILINE)
    assert fits and int(fits[1]) == without.blocks // 4 and int(fits[2]) == having.blocks // 4
    assert int(fits[2]) > int(fits[1])
    assert "no memory is saved here" in said


def test_the_bytes_that_bench_reports_fit_the_memory(model: Path) -> None:
    """One block more would not fit."""
    config = json.loads((model / "config.json").read_text())
    chosen = command.parser().parse_args(["bench", "--context", "500", "--tokens", "12"])
    shape, limits = bench.declared(config, chosen)
    blocks = pool.fit(shape, limits, Options(ratio=0.2), chosen.memory).blocks
    device = [
        sum(count for name, count in bench.memory(config, chosen, number).items() if "device" in name)
        for number in (blocks, blocks + 1)
    ]
    assert device[0] <= chosen.memory < device[1]


def free_port() -> int:
    """A port of 127.0.0.1 that is free now."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


class Server:
    """`serve` as a process, the first of a session of its own."""

    def __init__(self, model: Path, port: int, log: Path) -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", log
        words = [
            str(model), "--forebay-ratio", "0.2", "--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init",
            "--dtype", "float32", "--max-model-len", "512", "--block-size", str(BLOCK), "--max-num-seqs", "4",
            "--kv-cache-memory-bytes", str(64 << 20), "--served-model-name", "small", "--shutdown-timeout", "60",
            "--compilation-config", '{"custom_ops": ["none"]}',
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop(ENVIRONMENT)
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "forebay.vllm", "serve", *words],
                stdout=out, stderr=out, env=environment, start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        """Waits until it answers."""
        limit = time.monotonic() + 300
        while not self.healthy():
            said = self.log.read_text()
            ended = self.process.poll() is not None or "EngineDeadError" in said or time.monotonic() > limit
            assert not ended, said[-4000:]
            time.sleep(0.5)

    def healthy(self) -> bool:
        """Whether it answers."""
        try:
            return bool(self.get("/health") is not None)
        except OSError:
            return False

    def get(self, path: str) -> str:
        """A page."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return str(answer.read().decode())

    def complete(self, prompt: list[int], tokens: int) -> list[int]:
        """The token ids of an answer."""
        asked = {
            "model": "small", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "detokenize": False,
        }  # fmt: skip
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return list(json.loads(answer.read())["choices"][0]["token_ids"])

    def counter(self, name: str) -> float:
        """A value of /metrics."""
        found = re.search(rf"^{re.escape(name)}\{{.*\}} (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found, name
        return float(found[1])

    def members(self) -> list[int]:
        """The processes of its session that have not ended."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state, _parent, _group, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(session) == self.process.pid and state != "Z":
                found.append(int(folder.name))
        return found

    def end(self, number: signal.Signals) -> int:
        """Sends a signal, to the whole group if it is SIGKILL. Returns the status when all its processes have
        ended."""
        if number == signal.SIGKILL:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        status = self.process.wait(120)
        limit = time.monotonic() + 30
        while self.members():
            assert time.monotonic() < limit, self.members()
            time.sleep(0.1)
        return status


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """The servers that a test started; those that still run are ended."""
    started: list[Server] = []
    yield started
    for one in started:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait(60)


def shared_memory() -> int:
    """Bytes of shared memory of the machine, those on huge pages among them. A memfd is among them as long as a process
    holds it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    huge = (found["HugePages_Total"] - found["HugePages_Free"]) * found["Hugepagesize"]
    return (found["Shmem"] + huge) << 10


def check_given_back(before: int) -> None:
    """A process that was killed gives its memory back when its last thread has ended, a little after the first."""
    limit = time.monotonic() + 30
    while shared_memory() > before + (16 << 20):
        assert time.monotonic() < limit, (before, shared_memory())
        time.sleep(0.1)


def leading_hits(asked: list[list[int]]) -> int:
    """Tokens of prompts whose blocks an earlier prompt has had in the same places."""
    seen, hits = set(), 0
    for prompt in asked:
        chains = [tuple(prompt[:end]) for end in range(BLOCK, len(prompt), BLOCK)]
        hits += BLOCK * sum(chain in seen for chain in chains)
        seen.update(chains)
    return hits


@whole
def test_the_served_endpoint(model: Path, tmp_path: Path, servers: list[Server]) -> None:
    """Requests of the recorded trace, one at a time: their answers and the counters. Killed in the middle of one and
    started again on the same port, it gives the same answers. Then it is ended. No process and no shared memory is
    left."""
    port, before, count = free_port(), shared_memory(), 20
    asked = list(zip(trace_prompts(), (one["output_length"] for one in requests())))[:count]
    server = Server(model, port, tmp_path / "first.log")
    servers.append(server)
    server.wait()
    assert shared_memory() > before + (32 << 20)
    half = asked[: count // 2]
    tokens = [server.complete(*one) for one in half]
    assert [len(answer) for answer in tokens] == [length for _, length in half]
    assert len({token for answer in tokens for token in answer}) > count
    assert server.complete(*half[0]) == tokens[0]
    hits = leading_hits([prompt for prompt, _ in (*half, half[0])])
    assert server.counter("vllm:forebay_prefix_hits_total") == hits > 100
    assert server.counter("vllm:external_prefix_cache_hits_total") == hits
    assert server.counter("vllm:forebay_row_misses_total") > 100
    assert server.counter("vllm:forebay_row_hits_total") > 10
    assert server.counter("vllm:forebay_free_host_pages") > 0
    assert len(server.members()) > 1
    sent = threading.Thread(target=lambda: pytest.raises(OSError, server.complete, half[1][0], 100))
    sent.start()
    while server.counter("vllm:num_requests_running") != 1:
        time.sleep(0.02)
    assert server.end(signal.SIGKILL) == -signal.SIGKILL
    sent.join(60)
    assert not sent.is_alive()
    check_given_back(before)

    server = Server(model, port, tmp_path / "second.log")
    servers.append(server)
    server.wait()
    assert [server.complete(*one) for one in asked][: count // 2] == tokens
    assert server.end(signal.SIGTERM) == 0
    # The engine's process ended by itself, and gave forebay's memory back.
    said = server.log.read_text()
    assert "EngineCore: exiting busy loop" in said and "force killing" not in said, said[-4000:]
    assert "encountered a fatal error" not in said and "ForebayError" not in said, said[-4000:]
    with pytest.raises(urllib.error.URLError):
        server.get("/health")
    check_given_back(before)


def serve_refuses(model: Path, *words: str) -> str:
    """The last line of a server that ends at its start, and not at the first request."""
    given = [str(model), "--forebay-ratio", "0.2", "--skip-tokenizer-init", *words]
    done = subprocess.run(
        [sys.executable, "-m", "forebay.vllm", "serve", *given], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    return done.stderr.splitlines()[-1]


@whole
def test_a_configuration_that_serve_refuses(model: Path) -> None:
    assert "tensor_parallel_size=2 with forebay" in serve_refuses(model, "--tensor-parallel-size", "2")


@whole
def test_serve_refuses_a_model_without_sparse_attention(tmp_path: Path) -> None:
    models.save_dense(tmp_path)
    assert "'deepseek_v3' with forebay: it has no sparse attention" in serve_refuses(tmp_path)
