"""The command line: thin commands over the functions of the package."""

import sys
from collections.abc import Sequence

from jaxonnx.cli import process


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
      arguments: those of the command line; None means those of this process.

    Returns:
      The exit status: 0 if all is done, 1 if the run stopped before its end or failed after it had
      begun, 2 if it was refused, 130 if it was interrupted.

    Raises:
      SystemExit: with status 2 for flags or a configuration that do not fit, 0 for `--help`.
    """
    if arguments is None:
        process.exit_on_interrupt()
    # Ctrl-C ends these imports, too: flags take a tenth of a second, JAX and ONNX one or two
    from jaxonnx.cli._parser import parse

    options = parse(sys.argv[1:] if arguments is None else arguments)
    from jaxonnx.cli._commands import run_command

    return run_command(options, own_process=arguments is None)
