"""Ctrl-C while the command line is being imported, before it can handle that itself.

Importing JAX and ONNX takes a second or two, in which a KeyboardInterrupt would be a traceback.
"""

import os
import signal
import sys
import threading
from types import FrameType

INTERRUPTED = 130
"""The exit status of a command that was interrupted and leaves nothing."""


def is_command() -> bool:
    """Return whether this process is the command `jaxonnx`, or `python -m jaxonnx`."""
    if sys.argv[:1] == ["-m"]:  # as Python has it while it imports the package
        place = sys.orig_argv.index("-m") + 1
        return sys.orig_argv[place : place + 1] == ["jaxonnx"]
    name, _ = os.path.splitext(os.path.basename(sys.argv[0] if sys.argv else ""))
    return name == "jaxonnx"


def leave(number: int, frame: FrameType | None) -> None:
    """End the process at once: nothing has begun."""
    os.write(2, b"jaxonnx: interrupted\n")
    os._exit(INTERRUPTED)


def listen() -> None:
    """Let Ctrl-C end the process quietly, if it is the command's and nobody else listens."""
    mine = is_command() and threading.current_thread() is threading.main_thread()
    if mine and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


listen()
