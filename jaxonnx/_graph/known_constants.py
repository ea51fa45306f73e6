"""Recognize constants by their values: windows, sequences, sinusoids, filter banks."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

_LEAST = 4
"""The fewest numbers that a geometric sequence or a window is known by."""
_SPACED = 32
"""The fewest numbers of an arithmetic sequence: short ones are what people write into tests."""
_MOST = 2**16
"""The most numbers; longer vectors are not looked at."""
_LARGEST = 2**26
"""The most numbers of a matrix that is looked at."""
_CLOSE = 1e-3
"""The relative difference that float16 may make."""

_WINDOWS: tuple[Callable[[int], np.ndarray], ...] = (
    lambda n: np.hanning(n + 2)[1:-1],
    lambda n: np.hanning(n + 2)[1:-1] ** 0.5,
    lambda n: np.hanning(n + 2)[1:-1] ** 0.85,  # Povey
    np.hamming,
    lambda n: np.hamming(n + 1)[:-1],
    lambda n: np.blackman(n + 2)[1:-1],
)
"""Windows of n numbers without zeros at their ends, which periodic ones and padding add."""

_ROWS = 16
"""The rows of a matrix that are looked at first, and the fewest numbers that a row is known by."""
_SHORT = 5
"""The fewest numbers that a sinusoid is known by, exactly."""
_BANDS = 8
"""The fewest bands of a bank."""
_PEAK = 0.99
"""The share of a row's energy about its greatest frequency, if it is a sinusoid."""


def describe_constant(value: Any) -> str:
    """Recognize a well-known constant by its values; return its description, or "".

    Vectors (one axis longer than 1): windows (Hann, Hamming, Blackman, Gauss, Povey; symmetric or
    periodic, padded or not), geometric sequences (the frequencies of rotary embeddings, `inv_freq`;
    the slopes of ALiBi), and arithmetic sequences.
    Matrices (two such axes): rows that are sinusoids (bases of Fourier and cosine transforms, also
    windowed; tables of positions), and filter banks (nonnegative bands in order).
    Kernels (more axes): filters that are even or odd along each axis, such as blurs and Sobel's.
    """
    value = np.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return ""
    long = [n for n in value.shape if n != 1]
    if len(long) == 1 and _LEAST <= long[0] <= _MOST:
        ulp = float(jnp.finfo(value.dtype).eps)
        return _describe_vector(value.reshape(-1).astype(np.float64), ulp)
    if len(long) == 2 and min(long) >= _LEAST and value.size <= _LARGEST:
        return _describe_matrix(value.reshape(long))
    if value.ndim > 2 and value.size <= _LARGEST and _are_mirrored(value):
        return "kernels with mirror symmetry"
    return ""


def _are_mirrored(value: np.ndarray) -> bool:
    """Check whether kernels (outputs, inputs, *sizes) are even or odd along each axis.

    At least one must not be constant or have a single number, as others are even by themselves.
    """
    kernels = value.reshape(value.shape[0] * value.shape[1], *value.shape[2:])
    # the first kernel decides for most weights, without a float64 copy of all of them
    first = kernels[:1].astype(np.float64)
    if first.size < _LEAST - 1 or not np.isfinite(first).all() or not _mirror(first):
        return False
    kernels = kernels.astype(np.float64)
    if not np.isfinite(kernels).all() or not _mirror(kernels):
        return False
    flat = kernels.reshape(len(kernels), -1)
    return bool(((np.ptp(flat, 1) > 0) & (np.count_nonzero(flat, 1) > 1)).any())


def _mirror(kernels: np.ndarray) -> bool:
    """Check whether each kernel (kernels, *sizes) is even or odd along each axis."""
    near = _CLOSE**2 * np.abs(kernels).max()
    for axis in range(1, kernels.ndim):
        flipped = np.flip(kernels, axis)
        other = [*range(1, kernels.ndim)]
        even = np.abs(kernels - flipped).max(tuple(other))
        odd = np.abs(kernels + flipped).max(tuple(other))
        if not (np.minimum(even, odd) <= near).all():
            return False
    return True


def _describe_vector(vector: np.ndarray, ulp: float) -> str:
    if not np.isfinite(vector).all():
        return ""
    if _is_geometric(vector):
        return "a geometric sequence"
    if len(vector) >= _SPACED and _is_arithmetic(vector, ulp * np.abs(vector).max()):
        return "an arithmetic sequence"
    # windows may be padded with zeros, and periodic ones begin with one
    inner = np.flatnonzero(np.abs(vector) > _CLOSE**2)
    core = vector[inner[0] : inner[-1] + 1] if len(inner) else vector[:0]
    if len(core) < _LEAST - 1 or not (core > 0).all():
        return ""
    listed = any(np.allclose(core, window(len(core)), 0, _CLOSE / 4) for window in _WINDOWS)
    return "a window" if listed or _is_gaussian(core) else ""


def _is_geometric(vector: np.ndarray) -> bool:
    """Check whether each number is the one before it times the same factor, which is not one."""
    if not (vector > 0).all():
        return False
    steps = np.diff(np.log(vector))
    return bool(abs(steps[0]) > _CLOSE and np.allclose(steps, steps[0], _CLOSE, _CLOSE / 4))


def _is_arithmetic(vector: np.ndarray, rounding: float) -> bool:
    """Check whether each number is the one before it plus the same step, but for rounding."""
    line = np.linspace(vector[0], vector[-1], len(vector))
    step = abs(line[1] - line[0])
    return bool(step > 2 * rounding and np.abs(vector - line).max() <= step / 100 + rounding)


def _is_gaussian(vector: np.ndarray) -> bool:
    """Check whether the logarithm is a parabola that opens downwards, with its top inside."""
    if len(vector) < 2 * _LEAST or vector.min() < _CLOSE**3 * vector.max():
        return False  # the logarithms of very small numbers would dominate the fit
    place = np.arange(len(vector)) - (len(vector) - 1) / 2
    fit = np.polyfit(place, np.log(vector), 2, w=vector)
    inside = fit[0] < 0 and abs(fit[1] / (2 * fit[0])) < len(vector) / 4
    error = np.abs(np.exp(np.polyval(fit, place)) - vector).max()
    return bool(inside and error < _CLOSE / 4 * vector.max() and vector.min() < vector.max() / 2)


def _describe_matrix(matrix: np.ndarray) -> str:
    for rows in (matrix, matrix.T):
        if _are_sinusoids(rows):
            return "rows of sinusoids"
        if _is_bank(rows):
            return "a bank of filters"
    return ""


def _sample(rows: np.ndarray) -> np.ndarray:
    """Return at most `_ROWS` rows, evenly spread, in float64; they rule most weights out."""
    places = np.linspace(0, len(rows) - 1, min(len(rows), _ROWS)).astype(int)
    return rows[places].astype(np.float64)


def _are_sinusoids(rows: np.ndarray) -> bool:
    """Check whether each row that is not zero is a sinusoid, possibly under a window.

    The energy of a sinusoid lies at one frequency of its Fourier transform: without a window for
    whole periods, with a Hann window for others. At least two rows must oscillate.
    """
    if rows.shape[1] < _ROWS:
        return _recur(rows.astype(np.float64))
    if not _have_single_frequencies(_sample(rows)):
        return False
    return len(rows) <= _ROWS or _have_single_frequencies(rows.astype(np.float64))


def _recur(rows: np.ndarray) -> bool:
    """Check whether short rows are sinusoids: x[n - 1] + x[n + 1] = 2 cos(w) x[n].

    At least half of them must have a factor below 2, since straight lines satisfy it with w = 0.
    """
    top = np.abs(rows).max()
    if rows.shape[1] < _SHORT or len(rows) < _SHORT - 1 or not 0 < top < np.inf:
        return False
    middle, ends = rows[:, 1:-1], rows[:, :-2] + rows[:, 2:]
    factors = (middle * ends).sum(1) / np.maximum((middle**2).sum(1), 1e-300)
    exact = np.abs(ends - factors[:, None] * middle).max() <= _CLOSE * top
    return bool(exact and 2 * (np.abs(factors) < 2 - _CLOSE).sum() >= len(rows))


def _have_single_frequencies(rows: np.ndarray) -> bool:
    """Check whether the energy of each row lies within two bins of its strongest frequency."""
    tops = np.abs(rows).max(1, keepdims=True)
    rows = (rows / np.maximum(tops, 1e-300))[tops[:, 0] > _CLOSE * tops.max()]
    if len(rows) < 2 or not np.isfinite(rows).all():
        return False
    length = rows.shape[1]
    best, places = np.zeros(len(rows)), np.zeros(len(rows), int)
    for window in (np.ones(length), np.hanning(length + 2)[1:-1]):
        energy = np.abs(np.fft.rfft(rows * window)) ** 2
        place = energy.argmax(1)
        nearby = np.abs(np.arange(energy.shape[1]) - place[:, None]) <= 2
        share = (energy * nearby).sum(1) / energy.sum(1)
        places = np.where(share > best, place, places)
        best = np.maximum(best, share)
    return bool((best > _PEAK).all() and (places > 2).sum() >= 2)


def _is_bank(rows: np.ndarray) -> bool:
    """Check whether rows are the bands of a filter bank.

    Bands are nonnegative and contiguous, and start and end in ascending order. At least a quarter
    of them have several numbers (an identity matrix does not), and at most three fifths of all
    numbers are not zero.
    """
    some = _sample(rows)
    if not some.any() or not (some >= 0).all() or 5 * np.count_nonzero(some) > 3 * some.size:
        return False
    rows = rows.astype(np.float64)
    rows = rows[np.abs(rows).max(1) > 0]
    if len(rows) < _BANDS or not (rows >= 0).all() or not np.isfinite(rows).all():
        return False
    full = rows > 0
    starts, counts = full.argmax(1), full.sum(1)
    ends = rows.shape[1] - full[:, ::-1].argmax(1)
    whole = (ends - starts == counts).all() and (counts.mean() <= 0.6 * rows.shape[1])
    ordered = (np.diff(starts) >= 0).all() and (np.diff(ends) >= 0).all() and ends[-1] > ends[0]
    return bool(whole and ordered and 4 * (counts > 1).sum() >= len(rows))
