"""Quantized operators of com.microsoft.

Each one dequantizes, computes in floating point and quantizes again, so that gradients go straight
through as in `jaxonnx.ops.quantize`.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx import lowering
from jaxonnx._limits import check_size
from jaxonnx._weights import (
    Form,
    InBytes,
    Matrix,
    Quantized,
    Storage,
    matrix,
    pack_bits,
    packed,
    unpack_bits,
    with_scales,
)
from jaxonnx.errors import NodeError
from jaxonnx.ops.common import INDEX, axis_of
from jaxonnx.ops.contrib.fused import DOMAIN
from jaxonnx.ops.linear import matmul
from jaxonnx.ops.quantize import (
    ALONG_AXIS,
    dequantize_linear,
    dequantize_linear_13,
    dynamic_quantize_linear,
    matmul_integer,
    quantize_linear,
)
from jaxonnx.ops.reduction import reduce_mean
from jaxonnx.registry import Omissible, op, xp


@op("QuantizeLinear", since=1, domain=DOMAIN, view="same axes")
def quantize_linear_contrib(x, scale, zero_point=None, *, axis=None):
    return quantize_linear(x, scale, zero_point, axis=_axis(scale, axis))


@op(
    "DequantizeLinear",
    since=1,
    domain=DOMAIN,
    quantized={"x": ALONG_AXIS},
    view="same axes",
    accepts={"x": lowering.RoundedArray},
)
def dequantize_linear_contrib(x, scale, zero_point=None, *, axis=None):
    return dequantize_linear(x, scale, zero_point, axis=_axis(scale, axis))


def _axis(scale, axis):
    if axis is None and scale.size != 1:
        raise NodeError(f"a scale of shape {scale.shape} needs the attribute axis")
    return axis or 0


def _binary(function):
    def apply(
        a,
        a_scale,
        a_zero_point: Omissible,
        b,
        b_scale,
        b_zero_point: Omissible,
        c_scale,
        c_zero=None,
    ):
        c_zero = np.zeros((), a.dtype) if c_zero is None else c_zero
        a = dequantize_linear(a, a_scale, a_zero_point)
        b = dequantize_linear(b, b_scale, b_zero_point)
        return quantize_linear(function(a, b), c_scale, c_zero)

    return apply


_pair = partial(
    op,
    since=1,
    domain=DOMAIN,
    quantized=with_scales("a", "b"),
    result="c_scale",
    accepts={"a": lowering.RoundedArray, "b": lowering.RoundedArray},
)
_pair("QLinearAdd", like="Add")(_binary(lambda a, b: a + b))
_pair("QLinearMul", like="Mul")(_binary(lambda a, b: a * b))


@op(
    "QLinearGlobalAveragePool",
    since=1,
    domain=DOMAIN,
    like="GlobalAveragePool",
    quantized=with_scales("x"),
    result="y_scale",
    accepts={"x": lowering.RoundedArray},
)
def qlinear_global_average_pool(
    x, x_scale, x_zero_point, y_scale, y_zero_point, *, channels_last=0
):
    y = dequantize_linear(x, x_scale, x_zero_point)
    axes = tuple(range(1, y.ndim - 1) if channels_last else range(2, y.ndim))
    return quantize_linear(reduce_mean(y, axes, True), y_scale, y_zero_point)


@op(
    "QLinearConcat",
    since=1,
    domain=DOMAIN,
    like="Concat",
    quantized={"inputs": Quantized()},
    result="y_scale",
)
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
    unit, (stored, changed) = np.ones((), np.float32), lowering.split_change(b)
    real = matmul(
        dequantize_linear(a, unit, _row(a_zero_point), axis=-1),
        dequantize_linear_13(stored, unit, _row(b_zero_point), axis=-1),
    )
    exact = matmul_integer(
        lowering.to_array(a), lowering.to_array(stored), _row(a_zero_point), _row(b_zero_point)
    )
    y = lowering.with_gradient_of(exact, real) * (a_scale * b_scale)
    if changed is not None:
        x = dequantize_linear(a, a_scale, _row(a_zero_point), axis=-1) if x is None else x
        y = y + changed.change(x)
    return y if bias is None else y + bias


def _row(zero_point):
    """Return a zero point as a scalar or a vector; that of a matrix may be a row (1, N)."""
    if zero_point is None or zero_point.ndim > 2 or zero_point.shape[:-1] not in ((), (1,)):
        return zero_point
    return zero_point.reshape(() if zero_point.size == 1 else -1)


@op(
    "DynamicQuantizeMatMul",
    since=1,
    domain=DOMAIN,
    like="MatMul",
    quantized=with_scales("b"),
    bias="bias",
    weights={"b": matrix()},
    params=("bias",),
    accepts={"b": lowering.LowRank},
)
def dynamic_quantize_matmul(a, b, b_scale, b_zero_point=None, bias=None):
    integers, a_scale, zero = dynamic_quantize_linear(a)
    return _scaled_product(integers, a_scale, zero, b, b_scale, b_zero_point, bias, x=a)


@op(
    "MatMulIntegerToFloat",
    since=1,
    domain=DOMAIN,
    like="MatMul",
    quantized=with_scales("a", "b"),
    bias="bias",
    weights={"b": matrix()},
    params=("bias",),
    accepts={"a": lowering.RoundedArray, "b": lowering.RoundedArray | lowering.LowRank},
)
def matmul_integer_to_float(
    a, b, a_scale, b_scale, a_zero_point=None, b_zero_point=None, bias=None
):
    return _scaled_product(a, a_scale, a_zero_point, b, b_scale, b_zero_point, bias)


@dataclass(frozen=True)
class _Rows:
    """The `unpack` function of MatMulNBits for `lowering.Packed`.

    Attributes:
      storage: of the matrix; rows may be padded beyond its columns.
      zeros: whether there are zero points.
      dtype: of the result.
    """

    storage: InBytes
    zeros: bool
    dtype: np.dtype

    @property
    def block(self):
        """The codes of 4 bits that share a scale, for a kernel; 0 for other codes and types."""
        return self.storage.block if (self.storage.bits, self.dtype) == (4, np.float32) else 0

    @property
    def middle(self):
        return self.storage.middle

    def read_zeros(self, scale, zero):
        """Return the zero point of each block."""
        zero = self.storage.unpack(zero, scale.shape) if zero.dtype == np.uint8 else zero
        return zero.astype(self.dtype)

    def __call__(self, packed, scale, *others):
        # `others` are the zero points, if there are any, and then `g_idx`, the block of each column
        zero, groups = np.full((1, 1), self.middle, self.dtype), others[self.zeros :]
        (rows, count), columns = scale.shape, self.storage.shape[1]
        zero = self.read_zeros(scale, others[0]) if self.zeros else zero.repeat(count, 1)
        scale = scale.astype(self.dtype)
        if groups:
            values = self.storage.unpack(packed, (rows, columns)).astype(self.dtype)
            zero, scale = (jnp.take(x, groups[0], axis=1) for x in (zero, scale))
            return (values - zero) * scale
        values = self.storage.unpack(packed, (rows, count * self.storage.block))
        values = values.astype(self.dtype).reshape(rows, count, -1)
        return ((values - zero[..., None]) * scale[..., None]).reshape(rows, -1)[:, :columns]


def _n_bits(shape, dtype, attributes):
    size = attributes["N"], attributes["K"]
    return InBytes.of(size, attributes.get("bits", 4), attributes["block_size"], axis=1)


@op(
    "MatMulNBits",
    since=1,
    domain=DOMAIN,
    like="MatMul",
    quantized={
        "b": Quantized("scales", "zero_points", "g_idx", _n_bits, repacked=True, float_zeros=True)
    },
    bias="bias",
    weights={"b": packed()},
    params=("bias",),
    accepts={"b": lowering.LowRank},
)
def matmul_n_bits(
    a,
    b,
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
    check_size((N, K), a.dtype)
    check_size((K,), INDEX, host=True)
    groups = [scales.reshape(N, -(-K // block_size))]
    if zero_points is not None:
        groups.append(zero_points.reshape(N, -1))
    storage = InBytes.of((N, K), bits, block_size, axis=1)
    unpack = _Rows(storage, zero_points is not None, np.dtype(a.dtype))
    shared = () if g_idx is None else (g_idx,)
    matrix = jax.ShapeDtypeStruct((N, K), unpack.dtype)

    def pack(b):
        return lowering.Packed((b.reshape(N, -1), *groups), shared, unpack, matrix)

    y = matmul(a, lowering.map_changed(pack, b).T)
    return y if bias is None else y + bias


# the 4-bit types of bitsandbytes: the values of the codes 0 to 15
_FP4 = [0, 0.0625 / 12, 8 / 12, 1, 4 / 12, 6 / 12, 2 / 12, 3 / 12]
_TABLES = (
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
class _Bnb4(Storage):
    """Codes of two in a byte, the first in its high bits, that stand for the numbers of a table."""

    @property
    def table(self):
        return _TABLES[self.type == "nf4"]

    @property
    def levels(self):
        return np.unique(self.table)

    def unpack(self, x, shape):
        codes = self._codes(x)[: math.prod(shape)].reshape(shape)
        return xp(codes).asarray(self.table)[codes]

    def pack(self, numbers, x):
        order, np_ = np.argsort(self.table, kind="stable"), xp(x)
        nearest = np_.searchsorted(self.table[order], numbers.reshape(-1))
        codes = np_.asarray(order)[nearest]
        whole = np_.concatenate([codes, self._codes(x)[codes.size :]]).reshape(-1, 2)
        return pack_bits(whole[:, ::-1].reshape(-1), 4).reshape(x.shape)

    def _codes(self, x):
        return unpack_bits(x.reshape(-1), 4).reshape(-1, 2)[:, ::-1].reshape(-1)


@dataclass(frozen=True)
class _BnbRows:
    """The `unpack` function of MatMulBnb4 for `lowering.Packed`; blocks are of the flat matrix."""

    storage: _Bnb4
    columns: int
    dtype: np.dtype

    def __call__(self, packed, scale):
        shape = packed.size * 2 // self.columns, self.columns
        scale = jnp.repeat(scale.reshape(-1), self.storage.block)[: math.prod(shape)]
        return self.storage.unpack(packed, shape).astype(self.dtype) * scale.reshape(shape)


def _bnb4(shape, dtype, attributes):
    kind = ("fp4", "nf4")[attributes["quant_type"] % 2]
    return _Bnb4((attributes["N"], attributes["K"]), kind, attributes["block_size"])


@op(
    "MatMulBnb4",
    since=1,
    domain=DOMAIN,
    like="MatMul",
    quantized={"b": Quantized("absmax", storage=_bnb4, repacked=True)},
    weights={"b": packed(transpose="transB")},
    accepts={"b": lowering.LowRank},
)
def matmul_bnb4(a, b, absmax, *, K, N, block_size, quant_type, training_mode=0, transB=1):
    """A W' (or A W) with W (N, K) of 4 bits, the first in the high ones, scaled per block."""
    storage = _Bnb4((N, K), ("fp4", "nf4")[quant_type], min(block_size, N * K))
    unpack = _BnbRows(storage, K, np.dtype(a.dtype))
    matrix = jax.ShapeDtypeStruct((N, K), unpack.dtype)

    def pack(b):
        if K % 2 or K % block_size:  # blocks go on from row to row
            return unpack(b, absmax)[:N]
        return lowering.Packed((b.reshape(N, -1), absmax.reshape(N, -1)), (), unpack, matrix)

    weight = lowering.map_changed(pack, b)
    return matmul(a, weight.T if transB else weight)


def _rows_of_table() -> Form:
    """Declare the rows of a matrix along its first axis."""

    def axes(rank, attributes, position=0):
        first = attributes.get("gather_axis", 0) % rank == 0
        return Matrix(1, 0, lookup=True) if rank == 2 and first else None

    return Form(axes, ("gather_axis",), rows="gather_axis")


def _table(shape, dtype, attributes):
    block, bits = attributes.get("block_size", 128), attributes.get("bits", 4)
    axis = attributes.get("quantize_axis", 1) % len(shape)
    if dtype != np.uint8:
        return Storage(shape, str(dtype), block, axis)
    return InBytes.of((*shape[:-1], shape[-1] * (8 // bits)), bits, block, axis)


@op(
    "GatherBlockQuantized",
    since=1,
    domain=DOMAIN,
    like="Gather",
    quantized={"data": Quantized("scales", "zero_points", "", _table, True, scalable=False)},
    weights={"data": _rows_of_table()},
    accepts={"data": lowering.LowRank},
)
def gather_block_quantized(
    data,
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
    data, changed = lowering.split_change(data)

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
    y = y if early else read(y)
    return y if changed is None else y + changed.change_rows(indices).astype(y.dtype)
