"""Cases of `jaxonnx/ops/quantize.py`; the gradients are in `tests/ops/test_quantize.py`."""

import ml_dtypes
import numpy as np
from onnx import TensorProto

from tests.ops.case_table import Case

X = np.array([[0.24, -12.8, 100, -5.26], [1.25, 0.05, 30, -31], [7, 0.15, -0.25, 3]], np.float32)
SCALE, ZERO = np.array(0.1, np.float32), np.array(3, np.int8)
ROWS, ROW_ZEROS = np.array([0.1, 0.5, 2], np.float32), np.array([1, -2, 0], np.int8)
BLOCKS = np.array([[0.1, 1], [0.5, 0.2], [2, 1]], np.float32)
BLOCK_ZEROS = np.array([[1, -1], [0, 3], [2, 0]], np.int8)
Q = np.array([[0, 3, 127, -128], [1, -5, 8, 20], [4, 100, -100, 7]], np.int8)
A = np.array([[1, 200, 3], [40, 5, 255]], np.uint8)
B = np.array([[1, -20], [127, 4], [-128, 60]], np.int8)
U, V = np.array(2, np.uint8), np.array(-3, np.int8)
S, T, R = (np.array(v, np.float32) for v in (0.02, 0.3, 0.25))
HALF = np.float16


def code(name):
    return TensorProto.DataType.Value(name)


def quantize(low, high, dtype):
    def expected(x, scale, zero):
        return np.clip(np.rint(x / scale) + zero.astype(np.float32), low, high).astype(dtype)

    return expected


def dequantize(x, scale, zero):
    return (x.astype(np.float32) - zero) * scale


CASES = [
    Case("QuantizeLinear", [X, SCALE, ZERO], expected=quantize(-128, 127, np.int8), grad=()),
    Case("QuantizeLinear", [X, SCALE], grad=(), id="unsigned"),
    Case("QuantizeLinear", [X, ROWS, ROW_ZEROS], {"axis": 0}, since=13, grad=(), id="axis"),
    Case("QuantizeLinear", [X, SCALE, ZERO.astype(np.int16)], since=21, grad=(), id="int16"),
    Case(
        "QuantizeLinear",
        [X, ROWS, np.zeros(3, ml_dtypes.int4)],
        {"axis": 0},
        since=21,
        grad=(),
        id="int4",
    ),
    Case("QuantizeLinear", [X, SCALE, np.array(1, ml_dtypes.uint2)], since=25, grad=(), id="uint2"),
    Case(
        "QuantizeLinear",
        [X, SCALE, np.zeros((), ml_dtypes.float8_e4m3fn)],
        since=19,
        grad=(),
        id="float8",
    ),
    Case(
        "QuantizeLinear",
        [X, SCALE],
        {"output_dtype": code("FLOAT4E2M1")},
        since=23,
        grad=(),
        id="float4",
    ),
    Case(
        "QuantizeLinear",
        [X, BLOCKS, BLOCK_ZEROS],
        {"axis": 1, "block_size": 2},
        since=21,
        grad=(),
        id="blocks",
    ),
    Case(
        "QuantizeLinear",
        [X[:, :3], BLOCKS, BLOCK_ZEROS],
        {"axis": -1, "block_size": 2},
        since=21,
        grad=(),
        id="partial",
    ),
    Case(
        "QuantizeLinear",
        [X, SCALE.astype(HALF), ZERO],
        {"precision": code("FLOAT")},
        since=23,
        expected=lambda x, s, z: quantize(-128, 127, np.int8)(x, s.astype(np.float32), z),
        grad=(),
        id="precision",
    ),
    Case("DequantizeLinear", [Q, SCALE, ZERO], expected=dequantize),
    Case("DequantizeLinear", [Q, SCALE], expected=lambda x, s: x * s, id="symmetric"),
    Case(
        "DequantizeLinear",
        [Q.astype(np.int32), SCALE],
        expected=lambda x, s: np.float32(x) * s,
        id="int32",
    ),
    Case(
        "DequantizeLinear",
        [Q, ROWS, ROW_ZEROS],
        {"axis": 0},
        since=13,
        expected=lambda x, s, z: dequantize(x, s[:, None], z[:, None]),
        id="axis",
    ),
    Case("DequantizeLinear", [Q, BLOCKS, BLOCK_ZEROS], {"block_size": 2}, since=21, id="blocks"),
    Case("DequantizeLinear", [Q.astype(ml_dtypes.int4), SCALE], since=21, id="int4"),
    Case(
        "DequantizeLinear", [Q.astype(ml_dtypes.float8_e5m2), SCALE], since=19, grad=(), id="float8"
    ),
    Case(
        "DequantizeLinear",
        [Q, SCALE],
        {"output_dtype": code("FLOAT16")},
        since=23,
        grad=(),
        id="half",
    ),
    Case("DynamicQuantizeLinear", [X], outputs=3, since=11, grad=()),
    Case("DynamicQuantizeLinear", [X * 0], outputs=3, since=11, grad=(), id="zeros"),
    Case("DynamicQuantizeLinear", [abs(X)], outputs=3, since=11, grad=(), id="positive"),
    Case("MatMulInteger", [A, B], since=10),
    Case("MatMulInteger", [A, B, U, V], since=10, id="zeros"),
    Case(
        "MatMulInteger",
        [A, B, np.array([1, 7], np.uint8), np.array([-3, 2], np.int8)],
        since=10,
        expected=lambda a, b, u, v: np.int32(a - np.int32(u)[:, None]) @ (b - np.int32(v)),
        id="vectors",
    ),
    Case("QLinearMatMul", [A, S, U, B, T, V, R, U], since=10, expected="reference", grad=()),
    Case(
        "QLinearMatMul",
        [A, np.array([0.02, 0.5], np.float32), U.repeat(2), B, T, V, R, V],
        since=10,
        expected=lambda a, s, u, b, t, v, r, w: _requantized(a, s, u, b, t, v, r, w),
        grad=(),
        id="rows",
    ),
]


def _requantized(a, s, u, b, t, v, r, w):
    exact = (a - np.int32(u)[:, None]) @ (b - np.int32(v)) * np.float64(s)[:, None] * t / r
    return np.clip(np.rint(exact) + w, -128, 127).astype(np.int8)
