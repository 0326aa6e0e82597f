"""What the plug-in is told. vLLM starts processes of its own, so options travel in an environment variable."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import InvalidArgument
from ..tensors import index

ENVIRONMENT = "FOREBAY_VLLM"
# Types of models whose answers were compared with transformers'.
MODELS = ("deepseek_v32",)
# Where the rows are: in forebay's pools, or in vLLM's own KV cache, to compare with.
FOREBAY, VLLM = "forebay", "vllm"


@dataclass(frozen=True)
class Options:
    """The options of the plug-in.

    Attributes:
        ratio: slots of a request in each layer, as a share of the tokens that it has so far.
        slots: instead of that, slots of a request in each layer.
        host_memory: bytes of the total pool. None: the rows of all tokens that vLLM's blocks count. More of it keeps
            preempted requests and shared prefixes longer; index keys on the device grow with it.
        rows: "forebay", or "vllm": rows and index keys stay in vLLM's own KV cache, with the same attention. That is
            forebay off, for comparisons: stock vLLM has no sparse attention on a CPU.
        record: a file for the selections of the first request, and for each other one a file with its number; see
            `forebay.serving.Requests`.
        validate: checks forebay's invariants after every step. Slow, for tests.
        required: refuses a model without sparse attention. Otherwise that runs as without forebay.
    """

    ratio: float | None = None
    slots: int | None = None
    host_memory: int | None = None
    rows: str = FOREBAY
    record: str | None = None
    validate: bool = False
    required: bool = False

    def __post_init__(self) -> None:
        if self.rows not in (FOREBAY, VLLM):
            raise InvalidArgument("rows", repr(self.rows), f'"{FOREBAY}" or "{VLLM}"')
        if self.rows == FOREBAY and (self.ratio is None) == (self.slots is None):
            given = "neither ratio nor slots" if self.ratio is None else "both ratio and slots"
            raise InvalidArgument("ratio", given, "one of them")
        if self.ratio is not None:
            number = isinstance(self.ratio, (int, float)) and not isinstance(self.ratio, bool)
            if not number or not 0 < self.ratio <= 1:
                raise InvalidArgument("ratio", repr(self.ratio), "a number above 0 and at most 1")
        for name in ("slots", "host_memory"):
            if getattr(self, name) is not None:
                index(getattr(self, name), name, least=1)

    def set(self) -> None:
        """Turns the plug-in on, in this process and in those that it starts.

        Raises:
            InvalidArgument: `VLLM_PLUGINS` names the plug-ins that vLLM loads, and forebay is not among them.
        """
        plugins = os.environ.get("VLLM_PLUGINS")
        if plugins is not None and "forebay" not in plugins.split(","):
            raise InvalidArgument("VLLM_PLUGINS", repr(plugins), "a list with forebay, or not set")
        os.environ[ENVIRONMENT] = json.dumps({name: value for name, value in asdict(self).items() if value is not None})

    @staticmethod
    def read() -> Options:
        """The options of this process.

        Raises:
            InvalidArgument: the environment variable is no such object.
        """
        text = os.environ.get(ENVIRONMENT, "")
        try:
            given: Any = json.loads(text)
        except ValueError:
            given = None
        names = {field.name for field in fields(Options)}
        if not isinstance(given, dict) or not names.issuperset(given):
            expected = f"a JSON object with some of {', '.join(sorted(names))}"
            raise InvalidArgument(ENVIRONMENT, repr(text), expected)
        return Options(**given)
