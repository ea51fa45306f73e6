"""Constants that are known by their values: windows of signals, geometric sequences."""

from typing import Any

import jax.numpy as jnp
import numpy as np

_LEAST = 4
"""The fewest numbers that a constant is known by."""
_MOST = 2**16
"""The most; longer vectors are not looked at."""
_WINDOWS = (np.hanning, np.hamming, np.blackman)
_CLOSE = 1e-3
"""The relative difference that float16 may make."""


def is_known_constant(value: Any) -> bool:
    """Check whether a tensor is a constant that no training has touched.

    It is a window (Hann, Hamming or Blackman, symmetric or periodic) or a geometric sequence, such
    as the frequencies of rotary positions (`inv_freq`) and the slopes of ALiBi, along its only axis
    of more than one element.
    """
    value = np.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating) or value.size != max(value.shape, default=0):
        return False
    if not _LEAST <= value.size <= _MOST:
        return False
    vector = value.reshape(-1).astype(np.float64)
    return bool(np.isfinite(vector).all()) and (_is_geometric(vector) or _is_window(vector))


def _is_geometric(vector: np.ndarray) -> bool:
    """Check whether each number is the one before it times the same factor, which is not one."""
    if not (vector > 0).all():
        return False
    steps = np.diff(np.log(vector))
    return bool(abs(steps[0]) > _CLOSE and np.allclose(steps, steps[0], _CLOSE, _CLOSE / 4))


def _is_window(vector: np.ndarray) -> bool:
    count = len(vector)
    found = (whole for window in _WINDOWS for whole in (window(count), window(count + 1)[:-1]))
    return any(np.allclose(vector, one, 0, _CLOSE / 4) for one in found)
