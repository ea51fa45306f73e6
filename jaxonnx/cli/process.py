"""Settings of the command line's own process; the library sets none."""

import ctypes
import sys

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
