"""Fourier transforms, windows and the mel scale."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx._constraints import Positive
from jaxonnx._limits import check_size
from jaxonnx.errors import NodeError
from jaxonnx.ops.common import axis_of, canonical, element_dtype
from jaxonnx.registry import Static, op


def _dft(x, length, axis, inverse, onesided):
    """Compute the DFT along `axis` of x (..., 1 or 2).

    The last axis of the result is the complex pair, or 1 for the real result of a onesided inverse.
    Where x64 is on, the transform is in float64: in single precision its rounding errors depend on
    the version of XLA and exceed the 1e-7 that ONNX's suite allows where a result is zero.
    """
    axis = axis_of(axis, x.ndim)
    if axis == x.ndim - 1 or x.shape[-1] not in (1, 2):
        raise NodeError(
            f"the last axis of shape {x.shape} must be 1 (real) or 2 (complex) and not transformed"
        )
    if length is not None:
        length = int(length.item())
    else:
        length = 2 * (x.shape[axis] - 1) if inverse and onesided else x.shape[axis]
    if length < 1:
        raise NodeError(f"the length of the transform must be positive, got {length}")
    check_size((*x.shape[:axis], length, *x.shape[axis + 1 : -1], 2), x.dtype)
    real = x.shape[-1] == 1
    wide = x.astype(canonical(np.float64))
    signal = wide[..., 0] if real else lax.complex(wide[..., 0], wide[..., 1])
    if inverse and onesided:
        return jnp.fft.irfft(signal, length, axis)[..., None].astype(x.dtype)
    if inverse:
        y = jnp.fft.ifft(signal, length, axis)
    elif onesided and real:
        y = jnp.fft.rfft(signal, length, axis)
    else:
        y = jnp.fft.fft(signal, length, axis)
        if onesided:
            y = lax.slice_in_dim(y, 0, length // 2 + 1, axis=axis)
    return jnp.stack([y.real, y.imag], axis=-1).astype(x.dtype)


def _check_parts(x, inverse, onesided):
    parts = 2 if inverse else 1
    if onesided and x.shape[-1] != parts:
        raise NodeError(
            f"the last axis of shape {x.shape} must be {parts} for this onesided transform"
        )


@op("DFT", since=17)
def dft_17(x, dft_length: Static | None = None, *, axis=1, inverse=0, onesided=0):
    _check_parts(x, inverse, onesided)
    return _dft(x, dft_length, axis, inverse, onesided)


@op("DFT", since=20)
def dft(x, dft_length: Static | None = None, axis: Static | None = None, *, inverse=0, onesided=0):
    _check_parts(x, inverse, onesided)
    return _dft(x, dft_length, -2 if axis is None else int(axis.item()), inverse, onesided)


@op("STFT", since=17)
def stft(
    signal, frame_step: Static, window=None, frame_length: Static | None = None, *, onesided=1
):
    """signal (batch, length, 1 or 2) to (batch, frames, bins, 2); no padding at the ends.

    A real signal may lack the last axis, as PyTorch writes it and onnxruntime takes it.
    """
    signal = signal[..., None] if signal.ndim == 2 else signal
    step = int(frame_step.item())
    if frame_length is not None:
        length = int(frame_length.item())
    else:
        length = signal.shape[1] if window is None else window.shape[0]
    if window is not None and window.shape != (length,):
        raise NodeError(f"window has shape {window.shape}, but the frame length is {length}")
    if step < 1 or not 1 <= length <= signal.shape[1]:
        raise NodeError(f"frames of {length}, {step} apart, do not fit {signal.shape[1]} samples")
    frames = (signal.shape[1] - length) // step + 1
    check_size((frames, length), np.int64, host=True)
    index = step * np.arange(frames)[:, None] + np.arange(length)
    framed = jnp.take(signal, index, axis=1)
    if window is not None:
        framed = framed * window[:, None]
    return _dft(framed, None, -2, False, onesided)


def _window(size, periodic, output_datatype, coefficients):
    """Compute sum_k (-1)^k a_k cos(2 pi k n / N) with N = size, or size - 1 if symmetric.

    A symmetric window of one sample, where the formula divides by zero, is 1 as SciPy has it.
    """
    size = int(size.item())
    check_size([size], np.float64, host=True)
    n = np.arange(size) / max(size if periodic else size - 1, 1)
    terms = [(-1) ** k * a * np.cos(2 * np.pi * k * n) for k, a in enumerate(coefficients)]
    w = np.sum(terms, axis=0) if size > 1 or periodic else np.ones(size)
    return w.astype(element_dtype(output_datatype))


@op("HannWindow", since=17)
def hann_window(size: Static | Positive, *, output_datatype=1, periodic=1):
    return _window(size, periodic, output_datatype, (0.5, 0.5))


@op("HammingWindow", since=17)
def hamming_window(size: Static | Positive, *, output_datatype=1, periodic=1):
    return _window(size, periodic, output_datatype, (25 / 46, 21 / 46))


@op("BlackmanWindow", since=17)
def blackman_window(size: Static | Positive, *, output_datatype=1, periodic=1):
    return _window(size, periodic, output_datatype, (0.42, 0.5, 0.08))


@op("MelWeightMatrix", since=17)
def mel_weight_matrix(
    num_mel_bins: Static,
    dft_length: Static,
    sample_rate: Static,
    lower_edge_hertz: Static,
    upper_edge_hertz: Static,
    *,
    output_datatype=1,
):
    """Triangles of height 1 between bins that are equidistant on mel(f) = 2595 log10(1 + f/700).

    The distance is the range over num_mel_bins + 2, as in onnxruntime and ONNX's reference.
    """
    count, length, rate = (int(v.item()) for v in (num_mel_bins, dft_length, sample_rate))
    edges = np.array([lower_edge_hertz.item(), upper_edge_hertz.item()], np.float64)
    if min(count, length, rate - 1) < 0 or not ((edges >= 0) & (edges < np.inf)).all():
        raise NodeError(
            f"no bank has {count} filters from {edges.tolist()} Hz "
            f"for {length} samples at {rate} Hz"
        )
    check_size((count + 2, length // 2 + 1), np.float64, host=True)
    low, high = 2595 * np.log10(1 + edges / 700)
    mels = low + np.arange(count + 2) * (high - low) / (count + 2)
    hertz = 700 * (10 ** (mels / 2595) - 1)
    corner = ((length + 1) * hertz // rate).astype(int)
    if corner.max(initial=0) > length // 2:
        raise NodeError(
            f"the edges {edges.tolist()} Hz at a rate of {rate} Hz lie beyond the "
            f"{length // 2 + 1} bins of a transform of {length} samples"
        )
    left, centre, right = corner[:-2], corner[1:-1], corner[2:]
    j = np.arange(length // 2 + 1)[:, None]
    rise = np.where(centre > left, (j - left) / np.maximum(centre - left, 1), 1)
    fall = (right - j) / np.maximum(right - centre, 1)
    rising, falling = (left <= j) & (j <= centre), (centre < j) & (j < right)
    return np.select([rising, falling], [rise, fall]).astype(element_dtype(output_datatype))
