"""vLLM engines, each in a process of its own, for `check`, `bench` and the tests.

A process each, because vLLM keeps state in its modules. An import of vLLM takes most of the time of a short run, so it
is done once: `python -m forebay.vllm.engine` imports vLLM with forebay on, or off, and then makes a child of itself for
each engine. It reads a line of JSON for each, a `Run` and the names of two files; the child writes what it says to the
first and a `Found` to the second. The answer is a line with the child's status. It ends with its standard input.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from ..errors import ForebayError
from .options import ENVIRONMENT, VLLM, Options

# Small enough to share a machine with other tests; a run may replace each.
ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    # vLLM's own operations for CPUs differ in the last bits with the shape of a batch.
    "compilation_config": {"custom_ops": ["none"]},
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 64 << 20,
    "disable_log_stats": False,
    "seed": 0,
}


class EngineFailed(ForebayError):
    """The engine's process ended with an error: its last lines."""


@dataclass
class Run:
    """What an engine does.

    Attributes:
        model: the model's folder.
        prompts: token ids.
        tokens: tokens of each answer, or one number for each.
        options: of the plug-in; None: it is off.
        arguments: of vLLM's `LLM`, beside `ARGUMENTS`.
        aborts: for a request's number, the engine step after which it is aborted.
        together: requests that are sent at the same time; 0: all.
        sampling: of vLLM's `SamplingParams`, beside the greedy ones.
        priorities: of the requests; none: all the same.
    """

    model: str
    prompts: list[list[int]]
    tokens: int | list[int] = 16
    options: dict[str, Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    aborts: dict[str, int] = field(default_factory=dict)
    together: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)
    priorities: list[int] = field(default_factory=list)


@dataclass
class Found:
    """What an engine did.

    Attributes:
        tokens: of each answer, or of its samples one after the other; None for an aborted request.
        cached: tokens of each prompt that were not computed.
        metrics: vLLM's counters and gauges by name, forebay's among them.
        seconds: from the first request to the last token.
        blocks: of vLLM's KV cache, and the bytes that vLLM allocated for it.
        kv_bytes: see blocks.
        left: after the end, forebay's free and unused pages, lanes and parked requests; empty if it is off.
    """

    tokens: list[list[int] | None]
    cached: list[int | None]
    metrics: dict[str, float]
    seconds: float
    blocks: int
    kv_bytes: int
    left: dict[str, int]


def start(run: Run, *, timeout: float = 600, threads: int = 1, plugins: str | None = None) -> Found:
    """Runs an engine in a process of its own; `plugins`: of all, the plug-ins that vLLM loads (`VLLM_PLUGINS`).

    Raises:
        EngineFailed: it ended with an error, or did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, result = Path(folder, "log"), Path(folder, "result")
        log.touch()
        parent = _parent(run.options is not None, threads, plugins)
        try:
            status = parent.order(json.dumps([asdict(run), str(log), str(result)]), timeout)
        except BaseException:
            # Also an interrupt: the engine must not go on.
            parent.kill()
            _parent.cache_clear()
            raise
        if status != 0:
            said = log.read_text(errors="replace")[-4000:]
            raise EngineFailed(f"the engine ended with status {status}: {said}")
        return Found(**json.loads(result.read_text()))


class _Parent:
    """A process that has imported vLLM, and makes engines."""

    def __init__(self, on: bool, environment: dict[str, str]) -> None:
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "forebay.vllm.engine", *(["on"] if on else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip

    def order(self, line: str, timeout: float) -> int:
        """Has an engine run, and returns its status."""
        assert self._process.stdin is not None and self._process.stdout is not None
        answer = ""
        with suppress(BrokenPipeError):
            print(line, file=self._process.stdin, flush=True)
            if not select.select([self._process.stdout], [], [], timeout)[0]:
                raise EngineFailed(f"the engine did not end within {timeout:.0f} seconds")
            answer = self._process.stdout.readline()
        if not answer:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")[-4000:]
            raise EngineFailed(f"the process that imports vLLM ended: {said}")
        return int(answer)

    def kill(self) -> None:
        """Ends it, and its engine."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@functools.cache
def _parent(on: bool, threads: int, plugins: str | None) -> _Parent:
    """The process that makes engines with forebay on, or off."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "WARNING"}
    environment.pop(ENVIRONMENT, None)
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    return _Parent(on, environment)


def forget() -> None:
    """Later engines have the environment of then."""
    _parent.cache_clear()


def serve(run: Run) -> Found:
    """Runs an engine in this process."""
    # Engine, scheduler and worker in this process: its errors are raised here.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if run.options is not None:
        Options(**run.options).set()
    from vllm import LLM

    held = LLM(run.model, **{**ARGUMENTS, **run.arguments})
    engine = held.llm_engine
    counts = run.tokens if isinstance(run.tokens, list) else [run.tokens] * len(run.prompts)
    outputs: dict[str, Any] = {}
    began = time.perf_counter()
    size = run.together or len(run.prompts)
    for first in range(0, len(run.prompts), size):
        numbers = range(first, min(first + size, len(run.prompts)))
        outputs.update(_answer(engine, run, {str(number): counts[number] for number in numbers}))
    seconds = time.perf_counter() - began
    metrics = {one.name: one.value for one in held.get_metrics() if hasattr(one, "value")}
    blocks, bytes_ = _kv_cache(engine)
    given = [outputs.get(str(number)) for number in range(len(run.prompts))]
    return Found(
        [None if one is None else [token for each in one.outputs for token in each.token_ids] for one in given],
        [None if one is None else one.num_cached_tokens for one in given],
        metrics,
        seconds,
        blocks,
        bytes_,
        _left(engine),
    )


def _answer(engine: Any, run: Run, counts: dict[str, int]) -> dict[str, Any]:
    """Sends requests and steps the engine until all are answered."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    fixed = {"temperature": 0, "ignore_eos": True, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
    for id, count in counts.items():
        chosen = {**fixed, "max_tokens": count, **run.sampling}
        priority = run.priorities[int(id)] if run.priorities else 0
        prompt = {"prompt_token_ids": run.prompts[int(id)]}
        engine.add_request(id, prompt, SamplingParams(**chosen), priority=priority)
    found, steps = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = output
        steps += 1
        due = [id for id in counts if run.aborts.get(id) == steps]
        if due:
            engine.abort_request(due)
    return {id: one for id, one in found.items() if id not in run.aborts}


def _kv_cache(engine: Any) -> tuple[int, int]:
    """Blocks of vLLM's KV cache, and its bytes."""
    runner = engine.model_executor.driver_worker.worker.model_runner
    caches = [cache for cache in runner.kv_caches if hasattr(cache, "nbytes")]
    return int(runner.kv_cache_config.num_blocks), sum(cache.nbytes for cache in caches)


def _left(engine: Any) -> dict[str, int]:
    """What forebay's pools hold after the last request."""
    from .pool import ForebayRows
    from .worker import model_of

    model = model_of(engine.vllm_config)
    if model is None or not isinstance(model.store, ForebayRows):
        return {}
    model.store.cache.validate()
    stats = model.store.cache.stats()
    names = ("sequences", "free_host_pages", "unused_pages", "free_lanes", "free_slots", "parked")
    return {name: getattr(stats, name) for name in names}


def main() -> None:
    """The program: imports vLLM, and makes a child for each line."""
    if sys.argv[1:] == ["on"]:
        # Any options: vLLM chooses its platform by them while it is imported. Each child sets its own.
        Options(rows=VLLM).set()
    # vLLM may print.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in ("vllm", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.deepseek_v2"):
        import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _engine(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


def _engine(run: dict[str, Any], log: str, result: str) -> NoReturn:
    """A child: one engine."""
    status = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        Path(result).write_text(json.dumps(asdict(serve(Run(**run)))))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
