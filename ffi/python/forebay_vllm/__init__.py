"""The entry points by which vLLM finds forebay: `vllm.platform_plugins` and `vllm.general_plugins`.

vLLM calls both in each of its processes. They do nothing unless the environment variable `FOREBAY_VLLM` is set, which
`python -m forebay.vllm serve` and `forebay.vllm.enable` do. This module imports nothing, so a vLLM without forebay
starts as fast as before; and vLLM, which logs and ignores a plug-in that it cannot import, meets a missing library of
forebay only where it stops with that error.
"""


def platform() -> "str | None":
    """The class of vLLM's platform: forebay's kind of the CPU's where forebay is on."""
    return "forebay.vllm.platform.ForebayCpuPlatform" if _on() else None


def register() -> None:
    """Gives vLLM forebay's attention layer where forebay is on."""
    if _on():
        from forebay.vllm.layer import register

        register()


def _on() -> bool:
    import os

    return bool(os.environ.get("FOREBAY_VLLM"))
