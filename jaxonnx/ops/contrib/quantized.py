"""Quantized operators of com.microsoft.

Each one dequantizes, computes in floating point and quantizes again, so that gradients go straight
through as in `jaxonnx.ops.quantize`.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxonnx._axes import Form, Matrix, Storage, matrix, packed
from jaxonnx._limits import check_size
from jaxonnx.errors import NodeError
from jaxonnx.lowering import LowRank, Packed
from jaxonnx.ops.common import INDEX, axis_of
from jaxonnx.ops.contrib.fused import DOMAIN
from jaxonnx.ops.linear import matmul
from jaxonnx.ops.quantize import (
    dequantize_linear,
    dequantize_linear_13,
    dynamic_quantize_linear,
    matmul_integer,
    quantize_linear,
    with_gradient_of,
)
from jaxonnx.ops.reduction import reduce_mean
from jaxonnx.registry import Factor, Omissible, Rounded, Through, op


def _value(x):
    return x.value if isinstance(x, Rounded) else x


@op("QuantizeLinear", since=1, domain=DOMAIN, view=True)
def quantize_linear_contrib(x, scale, zero_point=None, *, axis=None):
    return quantize_linear(x, scale, zero_point, axis=_axis(scale, axis))


@op("DequantizeLinear", since=1, domain=DOMAIN, view=True)
def dequantize_linear_contrib(x: Through, scale, zero_point=None, *, axis=None):
    return dequantize_linear(x, scale, zero_point, axis=_axis(scale, axis))


def _axis(scale, axis):
    if axis is None and scale.size != 1:
        raise NodeError(f"a scale of shape {scale.shape} needs the attribute axis")
    return axis or 0


def _binary(function):
    def apply(
        a: Through,
        a_scale,
        a_zero: Omissible,
        b: Through,
        b_scale,
        b_zero: Omissible,
        c_scale,
        c_zero=None,
    ):
        c = function(dequantize_linear(a, a_scale, a_zero), dequantize_linear(b, b_scale, b_zero))
        return quantize_linear(
            c, c_scale, np.zeros((), _value(a).dtype) if c_zero is None else c_zero
        )

    return apply


op("QLinearAdd", since=1, domain=DOMAIN)(_binary(lambda a, b: a + b))
op("QLinearMul", since=1, domain=DOMAIN)(_binary(lambda a, b: a * b))


@op("QLinearGlobalAveragePool", since=1, domain=DOMAIN)
def qlinear_global_average_pool(
    x: Through, x_scale, x_zero_point, y_scale, y_zero_point, *, channels_last=0
):
    y = dequantize_linear(x, x_scale, x_zero_point)
    axes = tuple(range(1, y.ndim - 1) if channels_last else range(2, y.ndim))
    return quantize_linear(reduce_mean(y, axes, True), y_scale, y_zero_point)


@op("QLinearConcat", since=1, domain=DOMAIN)
def qlinear_concat(y_scale, y_zero_point, *inputs, axis):
    """`inputs` are triples of values, scale and zero point."""
    parts = [dequantize_linear(*inputs[i : i + 3]) for i in range(0, len(inputs), 3)]
    return quantize_linear(jnp.concatenate(parts, axis=axis), y_scale, y_zero_point)


def _scaled_product(a, a_scale, a_zero_point, b, b_scale, b_zero_point, bias, x=None):
    """Return (a - zero point) @ (b - zero point) times both scales, plus the bias.

    The product is computed in integers, and its gradient is that of the product of the numbers
    before rounding. An adapter of b (`LowRank`) is multiplied by `x`, which is a before
    quantization, or else by the dequantized a.
    """
    one = np.ones((), np.float32)
    stored = b.w if isinstance(b, LowRank) else b
    real = matmul(
        dequantize_linear(a, one, _row(a_zero_point), axis=-1),
        dequantize_linear_13(stored, one, _row(b_zero_point), axis=-1),
    )
    exact = matmul_integer(_value(a), _value(stored), _row(a_zero_point), _row(b_zero_point))
    y = with_gradient_of(exact, real) * (a_scale * b_scale)
    if isinstance(b, LowRank):
        x = dequantize_linear(a, a_scale, _row(a_zero_point), axis=-1) if x is None else x
        y = y + b.change(x)
    return y if bias is None else y + bias


def _row(zero_point):
    """Return a zero point as a scalar or a vector; that of a matrix may be a row (1, N)."""
    if zero_point is None or zero_point.ndim > 2 or zero_point.shape[:-1] not in ((), (1,)):
        return zero_point
    return zero_point.reshape(() if zero_point.size == 1 else -1)


@op("DynamicQuantizeMatMul", since=1, domain=DOMAIN, weights={"b": matrix()}, params=("bias",))
def dynamic_quantize_matmul(a, b: Factor, b_scale, b_zero_point=None, bias=None):
    integers, a_scale, zero = dynamic_quantize_linear(a)
    return _scaled_product(integers, a_scale, zero, b, b_scale, b_zero_point, bias, x=a)


@op("MatMulIntegerToFloat", since=1, domain=DOMAIN, weights={"b": matrix()}, params=("bias",))
def matmul_integer_to_float(
    a: Through,
    b: Through | Factor,
    a_scale,
    b_scale,
    a_zero_point=None,
    b_zero_point=None,
    bias=None,
):
    return _scaled_product(a, a_scale, a_zero_point, b, b_scale, b_zero_point, bias)


def unpack_bits(packed, bits):
    """Unpack numbers of `bits` bits from the bytes of the last axis, lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (packed[..., None] >> shifts) & np.uint8(2**bits - 1)
    return numbers.reshape(*packed.shape[:-1], packed.shape[-1] * len(shifts))


def pack_bits(numbers, bits):
    """Pack numbers into bytes along the last axis: the inverse of `unpack_bits`."""
    parts = numbers.astype(np.uint8).reshape(*numbers.shape[:-1], -1, 8 // bits)
    return np.bitwise_or.reduce(parts << np.arange(0, 8, bits, dtype=np.uint8), axis=-1)


@dataclass(frozen=True)
class _NBits:
    """The `unpack` function of MatMulNBits for `lowering.Packed`.

    Attributes:
      columns: of the matrix; rows may be padded beyond them.
      bits: of a number.
      block: the numbers of a row that share a scale.
      zeros: whether there are zero points.
      dtype: of the result.
    """

    columns: int
    bits: int
    block: int
    zeros: bool
    dtype: np.dtype

    def __call__(self, packed, scale, *others):
        # `others` are the zero points, if there are any, and then `g_idx`, the block of each column
        zero, block = others[0] if self.zeros else None, others[self.zeros :]
        count = scale.shape[1]
        if zero is None:
            zero = np.full((1, count), 2 ** (self.bits - 1), self.dtype)
        elif zero.dtype == np.uint8:
            zero = unpack_bits(zero, self.bits)[:, :count]
        values = unpack_bits(packed, self.bits).astype(self.dtype)
        zero, scale = zero.astype(self.dtype), scale.astype(self.dtype)
        if block:
            zero, scale = (jnp.take(x, block[0], axis=1) for x in (zero, scale))
            return (values[:, : self.columns] - zero) * scale
        values = values.reshape(-1, count, self.block)
        rows = ((values - zero[..., None]) * scale[..., None]).reshape(len(packed), -1)
        return rows[:, : self.columns]


@op(
    "MatMulNBits",
    since=1,
    domain=DOMAIN,
    weights={"b": packed(type=lambda attributes: f"int{attributes.get('bits', 4)}")},
    params=("bias",),
)
def matmul_n_bits(
    a,
    b: Factor,
    scales,
    zero_points=None,
    g_idx=None,
    bias=None,
    *,
    K,
    N,
    accuracy_level=0,
    bits=4,
    block_size,
    weight_prepacked=0,
):
    """A ((Q - zero point) * scale)', where Q (N, K) is packed along K and scales stand per block.

    `accuracy_level` only allows coarser arithmetic, which is not used.
    """
    if weight_prepacked or bits not in (2, 4, 8):
        raise NodeError(f"weights must not be prepacked and have 2, 4 or 8 bits, not {bits}")
    stored = b.w if isinstance(b, LowRank) else b
    blocks = -(-K // block_size)
    check_size((N, K), a.dtype)
    check_size((K,), INDEX, host=True)
    groups = [stored.reshape(N, -1), scales.reshape(N, blocks)]
    if zero_points is not None:
        groups.append(zero_points.reshape(N, -1))
    unpack = _NBits(K, bits, block_size, zero_points is not None, np.dtype(a.dtype))
    shared = () if g_idx is None else (g_idx,)
    weight: Any = Packed((*groups,), shared, unpack, (N, K), unpack.dtype)
    y = matmul(a, _add_change(b, weight).T)
    return y if bias is None else y + bias


def _add_change(b, weight):
    """Attach the adapter of the stored weight `b`, if it has one, to the unpacked weight."""
    return replace(b, w=weight) if isinstance(b, LowRank) else weight


# the 4-bit types of bitsandbytes: the values of the codes 0 to 15
_FP4 = [0, 0.0625 / 12, 8 / 12, 1, 4 / 12, 6 / 12, 2 / 12, 3 / 12]
BNB4 = (
    np.array(_FP4 + [-x for x in _FP4], np.float32),
    np.array(
        # quantiles of the normal distribution (QLoRA, arXiv 2305.14314, appendix E)
        [
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
            *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
            *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
            *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
        ],
        np.float32,
    ),
)


@dataclass(frozen=True)
class _Bnb4:
    """The `unpack` function of MatMulBnb4 for `lowering.Packed`.

    A byte has two codes, the first in its high bits. Scales are for blocks of the flattened matrix.

    Attributes:
      columns: of the matrix.
      block: the consecutive numbers that share a scale.
      type: the index into `BNB4`.
      dtype: of the result.
    """

    columns: int
    block: int
    type: int
    dtype: np.dtype

    def __call__(self, packed, scale):
        codes = unpack_bits(packed.reshape(-1), 4).reshape(-1, 2)[:, ::-1].reshape(-1)
        size = len(codes) // self.columns * self.columns
        scale = jnp.repeat(scale.reshape(-1), self.block)[:size]
        numbers = jnp.asarray(BNB4[self.type], self.dtype)[codes[:size]] * scale
        return numbers.reshape(-1, self.columns)


@op(
    "MatMulBnb4",
    since=1,
    domain=DOMAIN,
    weights={
        "b": packed(
            type=lambda attributes: ("fp4", "nf4")[attributes["quant_type"] % 2],
            transpose="transB",
        )
    },
)
def matmul_bnb4(a, b: Factor, absmax, *, K, N, block_size, quant_type, training_mode=0, transB=1):
    """A W' (or A W) with W (N, K) of 4 bits, the first in the high ones, scaled per block."""
    stored = b.w if isinstance(b, LowRank) else b
    unpack = _Bnb4(K, min(block_size, N * K), quant_type, np.dtype(a.dtype))
    if K % 2 == 0 and K % block_size == 0:
        groups = stored.reshape(N, -1), absmax.reshape(N, -1)
        weight: Any = Packed(groups, (), unpack, (N, K), unpack.dtype)
    else:  # blocks go on from row to row
        weight = unpack(stored, absmax)[:N]
    weight = _add_change(b, weight)
    return matmul(a, weight.T if transB else weight)


def _quantized_table() -> Form:
    """Declare the rows of a matrix along its first axis; bytes may hold several numbers."""

    def axes(rank, attributes, position=0):
        first = attributes.get("gather_axis", 0) % rank == 0
        return Matrix(1, 0, lookup=True) if rank == 2 and first else None

    def storage(shape, dtype, attributes):
        bits = attributes.get("bits", 4)
        several = 8 // bits if dtype == np.uint8 else 1
        kind = f"int{bits}" if dtype == np.uint8 else str(dtype)
        return Storage((shape[0], shape[1] * several), kind, attributes.get("block_size", 128))

    return Form(axes, ("gather_axis", "bits", "block_size"), storage)


@op("GatherBlockQuantized", since=1, domain=DOMAIN, weights={"data": _quantized_table()})
def gather_block_quantized(
    data: Factor,
    indices,
    scales,
    zero_points=None,
    *,
    bits=4,
    block_size=128,
    gather_axis=0,
    quantize_axis=1,
):
    """Gather of (data - zero point) * scale, whose scales stand per block of `quantize_axis`.

    Bytes hold numbers of `bits` bits along the last axis, unsigned ones, 2^(bits - 1) for zero. An
    index out of range gives zeros.
    """
    axis, along = axis_of(gather_axis, data.ndim), axis_of(quantize_axis, data.ndim)
    indices = jnp.asarray(indices)
    if isinstance(data, LowRank):
        rows = jnp.take(data.a, indices, 0, mode="fill", fill_value=0) @ data.b
        options = {"bits": bits, "block_size": block_size, "quantize_axis": quantize_axis}
        y = gather_block_quantized(data.w, indices, scales, zero_points, **options)
        return y + rows.astype(y.dtype)

    def read(x):
        return jnp.take(x, indices, axis, mode="fill", fill_value=0)

    early = axis != along and axis != data.ndim - 1  # only what is read becomes floating point
    if early:
        data, scales = read(data), read(scales)
        zero_points = None if zero_points is None else read(zero_points)
        along += indices.ndim - 1 if along > axis else 0
    packed = data.dtype == np.uint8

    def whole(x):
        return unpack_bits(x, bits) if packed and bits < 8 else x

    values = whole(data).astype(scales.dtype)
    if zero_points is not None:
        zero = whole(zero_points).astype(scales.dtype)[tuple(map(slice, scales.shape))]
    else:
        zero = jnp.full(scales.shape, 2 ** (bits - 1) if packed else 0, scales.dtype)
    block = min(block_size or values.shape[along], values.shape[along])

    def spread(x):
        x = jnp.repeat(x, block, along)
        return jnp.take(x, np.arange(values.shape[along]), along)

    y = (values - spread(zero)) * spread(scales)
    return y if early else read(y)
