"""Nothing of vLLM is replaced at run time either, only registered; ci/engines compares the files.

vLLM runs in a process of its own, which also looks at vLLM's modules: its state would reach other tests.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import forebay
import forebay_vllm
from forebay.vllm import models
from forebay.vllm.engine import Run, serve

OURS = (Path(forebay.__file__).parent, Path(forebay_vllm.__file__).parent)
PLANTED = "vllm.v1.worker.gpu_model_runner"


def functions(module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    """The functions and methods that a module's own names lead to."""
    for name, thing in list(vars(module).items()):
        if isinstance(thing, FunctionType):
            yield name, thing
        elif inspect.isclass(thing) and thing.__module__ == module.__name__:
            for method, what in list(vars(thing).items()):
                what = getattr(what, "__func__", getattr(what, "fget", what))
                if isinstance(what, FunctionType):
                    yield f"{name}.{method}", what


def strangers() -> tuple[list[str], int]:
    """Names in vLLM's modules that lead to code of forebay, and how many modules there are."""
    modules = [(name, module) for name, module in list(sys.modules.items()) if name.split(".")[0] == "vllm"]
    found = []
    for name, module in modules:
        for function, thing in functions(module):
            path = Path(thing.__code__.co_filename)
            if any(path.is_relative_to(folder) for folder in OURS):
                found.append(f"{name}.{function}")
    return found, len(modules)


def look(folder: str) -> None:
    """In the process of vLLM: prints what is found there, and what is found once there is something to find."""
    prompts = models.prompts([24, 100])
    answers = serve(Run(folder, prompts, tokens=4, options={"ratio": 0.5})).tokens
    found, count = strangers()
    # Control: functions of forebay under the names of a function and of a method of vLLM.
    module = sys.modules[PLANTED]
    setattr(module, "planted", serve)
    setattr(getattr(module, "GPUModelRunner"), "execute_model", models.prompts)
    planted, _ = strangers()
    print(json.dumps({"answers": answers, "found": found, "count": count, "planted": planted}))


def test_no_name_of_vllm_leads_to_forebay(tmp_path: Path) -> None:
    models.save(tmp_path, num_hidden_layers=2)
    done = subprocess.run([sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    given = json.loads(done.stdout.splitlines()[-1])
    assert [len(answer) for answer in given["answers"]] == [4, 4]
    # Its configuration, scheduler, worker and model are all there.
    assert given["count"] > 300
    assert given["found"] == []
    assert sorted(given["planted"]) == [f"{PLANTED}.GPUModelRunner.execute_model", f"{PLANTED}.planted"]


if __name__ == "__main__":
    look(sys.argv[1])
