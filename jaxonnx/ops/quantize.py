"""Linear quantization and the integer matrix products.

Gradients go straight through quantization: DequantizeLinear of QuantizeLinear has the derivative of
x within the range of the quantized type and none where it saturates, and by the scale that of
"Learned Step Size Quantization" (https://arxiv.org/abs/1902.08153).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from jaxonnx import lowering
from jaxonnx._constraints import NotNegative
from jaxonnx._weights import Quantized, along, with_scales
from jaxonnx.errors import NodeError
from jaxonnx.ops.cast import convert
from jaxonnx.ops.common import axis_of, divide, element_dtype
from jaxonnx.registry import PerAxis, is_known, op, xp

ALONG_AXIS = Quantized(
    "scale", "zero_point", storage=along(lambda attributes: attributes.get("axis", 1))
)
"""Codes with scales along the attribute `axis`."""


def _zero_point(value, x, axis, block_size) -> Any:
    """Reshape a zero point to broadcast to `x`; None if it is known to be 0 everywhere."""
    value = _granular(value, x, axis, block_size)
    return None if value is not None and is_known(value) and not value.any() else value


def _granular(value, x, axis, block_size) -> Any:
    """Reshape a scale or zero point to broadcast to `x`: per tensor, axis or block."""
    if value is None:
        return None
    if value.size == 1:
        return value.reshape(())
    axis = axis_of(axis, x.ndim)
    if not block_size:
        if value.shape != (x.shape[axis],):
            raise NodeError(
                f"scale or zero point {value.shape} does not fit axis {axis} of {x.shape}"
            )
        return value.reshape((-1,) + (1,) * (x.ndim - 1 - axis))
    blocks = tuple(-(-n // block_size) if i == axis else n for i, n in enumerate(x.shape))
    if value.shape != blocks:
        raise NodeError(f"scale or zero point {value.shape} must be {blocks}, one per block")
    repeats = min(block_size, x.shape[axis])
    return xp(value).repeat(value, repeats, axis)[tuple(map(slice, x.shape))]


def _is_integer(dtype):
    return jnp.issubdtype(dtype, jnp.integer)


def quantize(ratio, zero_point, dtype, saturate=1):
    """Round `ratio` (x / scale), halves to even, shift it, and saturate it to `dtype`."""
    if not _is_integer(dtype):
        shifted = ratio if zero_point is None else ratio + zero_point.astype(ratio.dtype)
        return convert(shifted, dtype, saturate)
    return convert(_nearest(ratio, zero_point, dtype), dtype)


def _nearest(ratio, zero_point, dtype):
    """Return the codes of an integer type as float32, in which they are computed."""
    np_, limits = xp(ratio, zero_point), ml_dtypes.iinfo(dtype)
    # Wide enough for 16-bit results: rounding comes before the shift.
    rounded = np_.rint(ratio).astype(np.float32)
    if zero_point is not None:
        rounded = rounded + zero_point.astype(np.float32)
    return np_.clip(rounded, np.float32(limits.min), np.float32(limits.max))


def _straight_through(value, ratio, zero_point, *source):
    """Pair a quantized value with the numbers before rounding, for straight-through gradients.

    Numbers that saturated are replaced by a constant, so that their gradient is 0.

    Args:
      value: the quantized array.
      ratio: x / scale.
      zero_point: broadcasts to it, or None.
      source: x and scale, where DequantizeLinear may fuse the gradients (`_round_trip`).
    """
    if is_known(value):
        return value
    is_integer = _is_integer(value.dtype)
    limits = ml_dtypes.iinfo(value.dtype) if is_integer else ml_dtypes.finfo(value.dtype)
    shift = 0 if zero_point is None else zero_point.astype(np.float32)
    ratio = ratio.astype(np.float32)
    nearest = (jnp.rint(ratio) if is_integer else ratio) + shift
    inside = (nearest >= np.float32(limits.min)) & (nearest <= np.float32(limits.max))
    return lowering.RoundedArray(value, jnp.where(inside, ratio + shift, 0), *source)


@op(
    "QuantizeLinear",
    since=10,
    view="same axes",
    shapes="scale #1",
    without=("axis", "saturate", "block_size", "output_dtype", "precision"),
)
@op("QuantizeLinear", since=13, view="same axes")
def quantize_linear(
    x,
    scale: PerAxis,
    zero_point: PerAxis = None,
    *,
    axis=1,
    saturate=1,
    block_size: NotNegative = 0,
    output_dtype=0,
    precision=0,
):
    """saturate(round(x / scale) + zero_point), divided in `precision` or the type of `scale`."""
    dtype = element_dtype(output_dtype) if output_dtype else np.dtype(np.uint8)
    if zero_point is not None:
        if output_dtype and dtype != zero_point.dtype:
            raise NodeError(f"output_dtype {dtype} contradicts the zero point's {zero_point.dtype}")
        dtype = zero_point.dtype
    wide = element_dtype(precision) if precision else scale.dtype  # what the scale divides in
    if not precision and (wide.itemsize == 1 or _is_integer(wide)):
        wide = np.dtype(np.float32)
    if not jnp.issubdtype(wide, jnp.floating):
        raise NodeError(f"precision must be of a floating-point type, got {wide}")
    as_stored, scale = scale, _granular(scale, x, axis, block_size).astype(wide)
    zero_point = _zero_point(zero_point, x, axis, block_size)
    ratio = divide(x.astype(wide), scale)
    codes = quantize(ratio, zero_point, dtype, saturate)
    source = ()
    if x.dtype == as_stored.dtype == np.float32:
        # float32 codes spare a pass over integers
        exact = _nearest(ratio, zero_point, dtype) if _is_integer(dtype) else codes
        source = (x, as_stored, exact)
    return _straight_through(codes, ratio, zero_point, *source)


@op(
    "DequantizeLinear",
    since=13,
    quantized={"x": ALONG_AXIS},
    view="same axes",
    accepts={"x": lowering.RoundedArray | lowering.LowRank | lowering.ChangedWeight},
)
def dequantize_linear_13(
    x,
    scale: PerAxis,
    zero_point: PerAxis = None,
    *,
    axis=1,
    block_size: NotNegative = 0,
    output_dtype=0,
):
    """`dequantize_linear`; of a large matrix, products read a few rows at a time."""
    options = {"axis": axis, "block_size": block_size, "output_dtype": output_dtype}

    def dequantize(x):
        packed = _pack_matrix(x, scale, zero_point, **options)
        return dequantize_linear(x, scale, zero_point, **options) if packed is None else packed

    return lowering.map_changed(dequantize, x)


@dataclass(frozen=True)
class _Rows:
    """DequantizeLinear of some rows of a matrix: an `unpack` function of `lowering.Packed`."""

    options: tuple[tuple[str, int], ...]

    def __call__(self, x, scale, zero_point=None):
        x = x.reshape(-1, x.shape[-1])  # with blocks along rows x is (blocks, block, columns)
        return dequantize_linear(x, scale, zero_point, **dict(self.options))


def _pack_matrix(x, scale, zero_point, **options) -> lowering.Packed | None:
    """Return a large matrix as a `Packed`, which products dequantize a few rows at a time.

    None for anything else, which is dequantized as a whole.
    """
    if not isinstance(x, jax.Array) or x.ndim != 2 or x.dtype.itemsize > 2:
        return None
    whole = all(isinstance(n, int) for n in x.shape)
    dtype = element_dtype(options["output_dtype"]) if options["output_dtype"] else scale.dtype
    if not whole or x.size * dtype.itemsize <= lowering.SMALL:
        return None
    block, axis, shape = options["block_size"], axis_of(options["axis"], 2), x.shape
    groups, shared = [x], []
    for value in (scale, zero_point):
        if value is None:
            continue
        by_row = value.size > 1 and (bool(block) or axis == 0)
        fits = value.shape == tuple(
            (-(-n // block) if block else n) if i == axis else n
            for i, n in enumerate(shape)
            if block or i == axis
        )
        if (value.size > 1 and not fits) or (by_row and shared):
            return None  # `dequantize_linear` raises the error
        (groups if by_row else shared).append(value)
    if block and axis == 0 and len(groups) > 1:
        if shape[0] % block:
            return None
        groups[0] = x.reshape(-1, block, shape[1])
    unpack = _Rows((*options.items(),))
    return lowering.Packed((*groups,), (*shared,), unpack, jax.ShapeDtypeStruct(shape, dtype))


@op(
    "DequantizeLinear",
    since=10,
    quantized={"x": ALONG_AXIS},
    view="same axes",
    shapes="scale #1",
    accepts={"x": lowering.RoundedArray},
    without=("axis", "block_size", "output_dtype"),
)
def dequantize_linear(
    x,
    scale: PerAxis,
    zero_point: PerAxis = None,
    *,
    axis=1,
    block_size=0,
    output_dtype=0,
):
    """(x - zero_point) * scale in the type of the result: `output_dtype` or that of `scale`."""
    dtype = element_dtype(output_dtype) if output_dtype else scale.dtype
    fused = isinstance(x, lowering.RoundedArray) and x.scale is scale and dtype == np.float32
    rounded, y, x = x, lowering.to_float32(x), lowering.to_array(x)
    wide = np.float64 if scale.dtype == np.float64 else np.float32
    scale = _granular(scale, x, axis, block_size).astype(wide)
    if zero_point is not None:
        if zero_point.dtype != x.dtype:
            raise NodeError(f"the zero point is {zero_point.dtype}, but the input {x.dtype}")
        zero_point = _zero_point(zero_point, x, axis, block_size)
        y = y if zero_point is None else y - convert(zero_point, np.float32)
    if fused:
        shift = np.float32(0) if zero_point is None else convert(zero_point, np.float32)
        return _round_trip(x.dtype, rounded.codes, rounded.source, scale, shift)
    return convert(y * scale, dtype)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _round_trip(dtype, codes, x, scale, zero_point):
    """DequantizeLinear of codes of a type, with the gradients of rounding `x` to them.

    They are computed from x and the result, which a step keeps anyway. Quotients by the scale would
    be kept for them as well, since XLA repeats cheap operations in each reader, but no division.
    """
    # without a barrier XLA fuses the rounding into loops over the taps of a convolution, and
    # repeats it for each
    return lax.optimization_barrier((codes.astype(np.float32) - zero_point) * scale)


@_round_trip.defjvp
def _round_trip_jvp(dtype, primals, tangents):
    _, x, scale, zero_point = primals
    y = _round_trip(dtype, *primals)
    is_integer, inverse = _is_integer(dtype), 1 / scale
    limits = ml_dtypes.iinfo(dtype) if is_integer else ml_dtypes.finfo(dtype)
    ratio = x * inverse
    nearest = (jnp.rint(ratio) if is_integer else ratio) + zero_point
    inside = (nearest >= np.float32(limits.min)) & (nearest <= np.float32(limits.max))
    change = tangents[2] * inverse
    # transposed, the sum over the changes reads the gradient of x instead of a selection of its own
    return y, y * change + jnp.where(inside, tangents[1] - x * change, 0)


@op("DynamicQuantizeLinear", since=11)
def dynamic_quantize_linear(x):
    """float32 -> (uint8 values, scale, zero point) for the range of `x`, widened to hold 0."""
    np_ = xp(x)
    low, high = np_.minimum(x.min(), np.float32(0)), np_.maximum(x.max(), np.float32(0))
    width = np_.where(high == low, np.float32(1), high - low)
    scale = divide(width, np.float32(255))
    shift = np_.clip(divide(-low, scale), np.float32(0), np.float32(255))
    zero_point, ratio = np_.rint(shift).astype(np.uint8), divide(x, scale)
    y = quantize(ratio, zero_point, np.dtype(np.uint8))
    return _straight_through(y, ratio, zero_point), scale, zero_point


def _rows(value, column):
    return value.reshape(-1, 1) if value.ndim == 1 and value.size > 1 and not column else value


@op("MatMulInteger", since=10, like="MatMul")
def matmul_integer(a, b, a_zero_point=None, b_zero_point=None):
    """`numpy.matmul` of 8-bit matrices less their zero points, accumulated in int32."""
    zeros = [
        None if zero is None or (is_known(zero) and not zero.any()) else _rows(zero, column)
        for zero, column in ((a_zero_point, False), (b_zero_point, True))
    ]
    return lowering.integer_product(a, b, *zeros)


@op(
    "QLinearMatMul",
    since=10,
    like="MatMul",
    quantized=with_scales("a", "b"),
    result="y_scale",
    shapes="a_scale #a, a_zero_point #a, b_scale #b, b_zero_point #b, y_scale #y, y_zero_point #y",
)
def qlinear_matmul(a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point):
    """The product of two quantized matrices, quantized again; exact up to the last rounding."""
    product = matmul_integer(a, b, a_zero_point, b_zero_point).astype(np.float32)
    scales = _rows(a_scale, False).astype(np.float32), b_scale.astype(np.float32)
    factor = divide(scales[0] * scales[1], _rows(y_scale, False).astype(np.float32))
    return quantize(product * factor, _rows(y_zero_point, False), y_zero_point.dtype)
