"""Settings of the command line's own process; the library sets none."""

import ctypes
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
"""The exit status of a command that was interrupted before it had a result."""

_SETTINGS = {
    -8: 1,  # M_ARENA_MAX: one arena, because those of threads give memory back in pieces of 64 MB
    -3: 2**31 - 1,  # M_MMAP_THRESHOLD: large arrays are not mapped and unmapped one by one
    -2: 2**26,  # M_TOP_PAD: memory is taken in steps of 64 MB
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD: and kept
}

PROGRAMS = 1 << 30
"""Bytes of compiled programs that are kept for later processes."""


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


def keep_programs(folder: Path | None = None) -> None:
    """Make JAX keep compiled programs for later processes.

    Without a folder, and if JAX was not given one, they are kept in `jaxonnx` below the user's
    folder for caches, which is $XDG_CACHE_HOME or ~/.cache. There the programs that were not read
    for longest are deleted first, down to `PROGRAMS` bytes. JAX before 0.12, which takes a
    processor that it compiled for itself for another, and says so at length, then keeps none.
    """
    import jax

    if folder is None:
        if jax.config.jax_compilation_cache_dir is not None or jax.__version_info__ < (0, 12):
            return
        home = os.environ.get("XDG_CACHE_HOME") or Path("~", ".cache")
        try:
            folder = Path(home, "jaxonnx").expanduser()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # delete the files that were not read for longest, until few enough bytes stay
            files = [(file.stat(), file) for file in folder.iterdir()]
            total = sum(info.st_size for info, _ in files)
            for info, file in sorted(files, key=lambda x: max(x[0].st_atime, x[0].st_mtime)):
                if total <= PROGRAMS:
                    break
                file.unlink(missing_ok=True)
                total -= info.st_size
        except (OSError, RuntimeError):  # a user without a home, or one that cannot be written
            return
        if not os.access(folder, os.W_OK):  # JAX would warn of each program
            return
        # most programs of a small network compile in less than JAX's default, a second
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_compilation_cache_dir", str(folder))


def exit_interrupted(number: int, frame: FrameType | None) -> None:
    """Handle SIGINT: end the process at once, because nothing has begun."""
    os.write(2, b"jaxonnx: interrupted\n")
    os._exit(INTERRUPTED)


def exit_on_interrupt() -> None:
    """Let Ctrl-C end the process with one line, unless somebody else handles it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_interrupted)


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
