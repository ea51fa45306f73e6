"""Commands that start at once: forked from a process that has imported all they need."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path

from jaxonnx.cli import main

PRELOADED = [
    "pytest",
    "orbax.checkpoint",
    "tests.support.fork_server",
    "tests.io.test_save",
    "tests.fuzz.cases",
]
"""What children of any test need: one server forks them all."""
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(PRELOADED)


class Command:
    """The command `jaxonnx` in a process of its own, much like `subprocess.Popen`.

    Args:
      arguments: of the command line.
      folder: the current one of the process, which writes all output into a file there.
      prepare: what the process calls first.
    """

    def __init__(self, arguments, folder, prepare=None):
        self._said = Path(folder, "said")
        self._process = FORKS.Process(target=_run, args=(arguments, folder, prepare), daemon=True)
        self._process.start()
        self.kill, self.wait = self._process.kill, self._process.join

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def send_signal(self, number):
        if self._process.is_alive():
            os.kill(self._process.pid, number)

    def communicate(self, timeout):
        """Wait for the end; return all output."""
        self._process.join(timeout)
        assert self.returncode is not None, "it does not end"
        return self._said.read_text()


def _run(arguments, folder, prepare):
    os.chdir(folder)
    said = os.open("said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for number in (1, 2):
        os.dup2(said, number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if prepare is not None:
        prepare()
    sys.argv = ["jaxonnx", *arguments]
    sys.exit(main())
