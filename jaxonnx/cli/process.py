"""Settings of the command line's own process; the library sets none."""

import ctypes
import os
import signal
import sys
from typing import NoReturn

_SETTINGS = {
    -8: 1,  # M_ARENA_MAX: one arena, because those of threads give memory back in pieces of 64 MB
    -3: 2**31 - 1,  # M_MMAP_THRESHOLD: large arrays are not mapped and unmapped one by one
    -2: 2**26,  # M_TOP_PAD: memory is taken in steps of 64 MB
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD: and kept
}


def keep_pages() -> None:
    """Make glibc's allocator keep freed memory, instead of faulting the same pages in again.

    A training step frees and allocates the same large arrays each time. Call it before the first
    array is made; with a C library other than glibc it does nothing. The environment variable
    GLIBC_TUNABLES can do the same for a program of your own.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for setting, value in _SETTINGS.items():
            mallopt(setting, value)


def ignore_interrupts() -> None:
    """Ignore Ctrl-C from now on: all is done, and the end of Python would show a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def end(status: int) -> NoReturn:
    """End the process without the end of Python, which aborts where libraries have threads at work.

    After an interrupt they may have.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
