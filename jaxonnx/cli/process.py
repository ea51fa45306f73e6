"""What the command line sets for its own process; the library sets nothing."""

import ctypes
import sys
from pathlib import Path

import jax

_THRESHOLDS = -3, -1
"""M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of glibc's mallopt."""
_GREATEST = 2**31 - 1


def prepare(allocator: str, cache: Path | None) -> None:
    """Before the first array: how memory is kept, and where compiled programs are."""
    if allocator == "keep" and sys.platform == "linux":
        keep_pages()
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache))


def keep_pages() -> None:
    """Has glibc's allocator keep what is freed, instead of faulting the same pages in again.

    A training step frees and allocates the same large arrays each time. Other libraries of C are
    left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for threshold in _THRESHOLDS:
            mallopt(threshold, _GREATEST)
