"""Conversion between element types.

Where the specification leaves a conversion undefined, a known value and a traced one still
agree: floating point to an integer truncates towards zero, NaN gives 0; 32- and 64-bit targets
saturate, and narrower ones keep the low bits of the 32-bit result.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
from jax import lax

from jaxonnx._limits import SIX_BITS, check_size, check_time
from jaxonnx.errors import NodeError
from jaxonnx.ops.common import canonical, concrete, element_dtype
from jaxonnx.registry import is_known, op, symbolic, xp

_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_FLOAT8 = tuple(
    np.dtype(name)
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
)


def convert(x, dtype, saturate=1, round_mode="up"):
    """Convert `x` to `dtype` by the rules of Cast; strings only where `x` is known."""
    dtype = np.dtype(dtype)
    if object in (dtype, x.dtype):  # strings
        x = x if symbolic(x) else concrete(x, "a cast to strings")
        if dtype == x.dtype or symbolic(x):
            return x
        check_size(x.shape, object, host=True)
        if x.dtype == object:
            numbers = [_number(text, dtype) for text in _each(x)]
            return convert(np.array(numbers).reshape(x.shape), dtype)
        return np.array([_text(value) for value in _each(x)], object).reshape(x.shape)
    if not is_known(x):
        dtype = canonical(dtype)
        if not {dtype, x.dtype}.isdisjoint(SIX_BITS):
            raise NodeError("XLA has no 6-bit floating-point types: such a value must be known")
    if x.dtype == dtype:
        return x
    if dtype == _E8M0:
        return _to_e8m0(x, saturate, round_mode)
    if dtype in _FLOAT8 and saturate:
        limits = ml_dtypes.finfo(dtype)
        # In float32 at least: the limits of a float8 need not exist in a narrower integer type.
        wide = x if _is_float(x.dtype) and x.dtype.itemsize > 1 else x.astype(np.float32)
        low, high = (wide.dtype.type(limit) for limit in (limits.min, limits.max))
        return xp(x).clip(wide, low, high).astype(dtype)
    if _is_float(x.dtype) and jnp.issubdtype(dtype, jnp.integer):
        return _truncate(x, dtype)
    if not is_known(x):
        return lax.convert_element_type(x, dtype)
    with np.errstate(all="ignore"):
        return x.astype(dtype)


def _is_float(dtype):
    return jnp.issubdtype(dtype, jnp.floating)


def _truncate(x, dtype):
    """Convert floating point to an integer type, as the docstring of the module says."""
    wide = dtype if dtype.itemsize >= 4 else np.dtype(np.int32)
    if not is_known(x):
        return lax.convert_element_type(lax.convert_element_type(x, wide), dtype)
    limits = np.iinfo(wide)
    x = np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf)
    with np.errstate(invalid="ignore"):
        inside = np.trunc(x).astype(wide)
    inside = np.where(x >= limits.max, limits.max, np.where(x <= limits.min, limits.min, inside))
    return inside.astype(wide).astype(dtype)


def _to_e8m0(x, saturate, round_mode):
    """Round the magnitude of `x` to a power of two 2^(e - 127), stored as e; 255 is NaN.

    0 and numbers below the range give the least power; `nearest` rounds ties up. Without
    saturation, numbers outside of the range of the type are NaN.
    """
    threshold = {"up": 1, "nearest": 1 << 22, "down": 1 << 23}.get(round_mode)
    if threshold is None:
        raise NodeError(f"round_mode must be up, down or nearest, got {round_mode!r}")
    np_ = xp(x)
    x = convert(x, np.float32)
    bits = x.view(np.uint32)
    exponent, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    rounded = exponent + ((fraction >= threshold) & (exponent < 0xFF)).astype(np.uint32)
    if saturate:
        rounded = np_.where(np_.isnan(x), 0xFF, np_.minimum(rounded, 0xFE))
    else:
        rounded = np_.where(bits & 0x7FFFFFFF == 0, 0xFF, np_.minimum(rounded, 0xFF))
    return rounded.astype(np.uint8).view(_E8M0)


def _each(x) -> Iterator[Any]:
    for value in x.reshape(-1):
        check_time()
        yield value


def _text(value) -> str:
    """Format a number plainly, with the fewest digits that identify it; INF, -INF and NaN."""
    if not _is_float(np.dtype(type(value))):
        return str(int(value))
    if np.isnan(value):
        return "NaN"
    if np.isinf(value):
        return "INF" if value > 0 else "-INF"
    value = value if isinstance(value, np.floating) else np.float32(value)
    return np.format_float_positional(value, trim="-")


def _number(text: str, dtype):
    try:
        if jnp.issubdtype(dtype, jnp.integer):
            try:
                return np.int64(int(text)) if dtype != np.uint64 else np.uint64(int(text))
            except ValueError:
                pass
        return float(text)
    except (ValueError, OverflowError) as error:
        raise NodeError(f"{text!r} is not a number that {dtype} can hold") from error


@op("Cast", since=1, view="same axes")
def cast_1(x, *, to):
    try:
        return convert(x, element_dtype(onnx.TensorProto.DataType.Value(to)))
    except ValueError:
        raise NodeError(f"{to!r} is not the name of a tensor element type") from None


@op("Cast", since=6, view="same axes")
def cast(x, *, to, saturate=1, round_mode="up"):
    """The values as another type; `saturate` concerns float8 targets, `round_mode` float8e8m0."""
    return convert(x, element_dtype(to), saturate, round_mode)


@op("CastLike", since=15, view="same axes")
def cast_like(x, target_type, *, saturate=1, round_mode="up"):
    return convert(x, target_type.dtype, saturate, round_mode)


@op("BitCast", since=26)
def bit_cast(x, *, to):
    """The same bits as another type of the same width."""
    dtype = element_dtype(to)
    if not is_known(x) and canonical(dtype) != dtype:
        raise NodeError(f"the bits of {dtype} exist only with jax_enable_x64")
    if object in (dtype, x.dtype) or _bits(dtype) != _bits(x.dtype):
        raise NodeError(f"{x.dtype} and {dtype} do not have the same width")
    return x.view(dtype)


def _bits(dtype) -> int:
    if jnp.issubdtype(dtype, jnp.integer):
        return int(ml_dtypes.iinfo(dtype).bits)
    if _is_float(dtype):
        return int(ml_dtypes.finfo(dtype).bits)
    return 8 * dtype.itemsize
