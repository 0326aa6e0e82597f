"""Engines of the tests with vLLM."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest
from forebay.vllm import engine, models
from forebay.vllm.engine import Found, Run

QUICK = bool(os.environ.get("FOREBAY_QUICK"))
# A test that the quick part leaves out.
whole = pytest.mark.skipif(QUICK, reason="not in the quick part")
# The same attention with rows in vLLM's own KV cache; every row in a slot; a part of them.
OFF, RESIDENT, SHARE = {"rows": "vllm"}, {"ratio": 1.0}, {"ratio": 0.2}
# Prompts of less than 256 tokens in chunks, so that prefills and decode steps meet in a batch.
CHUNKS = {"max_num_batched_tokens": 128, "max_num_seqs": 8}


@functools.lru_cache(maxsize=1)
def prompts() -> list[list[int]]:
    """Ten prompts of 5 to 500 tokens. Five begin alike; two repeat themselves, so that prompt lookup finds drafts."""
    chance = random.Random(5)
    (head,) = models.prompts([200], seed=9)
    made = []
    for number in range(8):
        (body,) = models.prompts([chance.choice((5, 40, 130, 300))], seed=number)
        made.append(head + body if number % 2 else body)
    return [*made, (made[2] * 3)[:400], (made[5] * 3)[:400]]


def run(model: str, options: dict[str, Any] | None, **changes: Any) -> Found:
    """An engine's answers to `prompts`; each is made once in a session."""
    return _run(model, json.dumps(options, sort_keys=True), json.dumps(changes, sort_keys=True))


def driven(model: str, script: str, options: dict[str, Any], **changes: Any) -> tuple[Found, dict[str, Any]]:
    """An engine whose process runs `script` first, which may change forebay's classes. Its `told` comes back too."""
    chosen = {"prompts": prompts(), "tokens": 40, **changes}
    arguments = {**CHUNKS, **chosen.pop("arguments", {})}
    given = Run(model, options=options, arguments=arguments, **chosen)
    program = f"{DRIVER}\n{script}\nmain(told)\n"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(asdict(given)), capture_output=True, text=True,
        timeout=600, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found, told = done.stdout.splitlines()[-2:]
    return Found(**json.loads(found)), json.loads(told)


DRIVER = """
import json, sys
from dataclasses import asdict
from forebay.vllm import engine
from forebay.vllm.pool import ForebayRows
told = {}
def main(told):
    found = engine.serve(engine.Run(**json.loads(sys.stdin.read())))
    print()
    print(json.dumps(asdict(found)))
    print(json.dumps(told))
"""


@functools.cache
def _run(model: str, options: str, changes: str) -> Found:
    given = json.loads(changes)
    arguments = {**CHUNKS, **given.pop("arguments", {})}
    chosen = {"prompts": prompts(), "tokens": 40, **given}
    return engine.start(Run(model, options=json.loads(options), arguments=arguments, **chosen))
