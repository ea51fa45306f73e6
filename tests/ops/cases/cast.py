"""Cases of `jaxonnx/ops/cast.py`."""

import ml_dtypes
import numpy as np
from onnx import TensorProto

from tests.ops.case_table import Case

X = np.array([[0.5, -1.75], [2.25, -3]], np.float32)
EDGES = np.array([0, 0.1, 447, 465, 1e6, -1e6, np.nan, np.inf, -np.inf], np.float32)
FLOAT8 = ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ")
POWERS = np.array([0.124, 0.25, 1.1, 1.5, 2, 3.1], np.float32)


def to(name, **attributes):
    return {"to": TensorProto.DataType.Value(name), **attributes}


def as_type(dtype):
    return lambda x, *_: x.astype(dtype)


def powers(*exponents):
    return lambda x: np.exp2(exponents).astype(ml_dtypes.float8_e8m0fnu)


CASES = [
    Case("Cast", [X], {"to": "DOUBLE"}, until=5, expected=as_type(np.float64)),
    Case("Cast", [X], {"to": "INT32"}, until=5, expected=as_type(np.int32), grad=(), id="int32"),
    Case("Cast", [X], to("DOUBLE"), since=6, expected=as_type(np.float64)),
    Case("Cast", [X], to("FLOAT16"), since=6, expected=as_type(np.float16), grad=(), id="half"),
    Case("Cast", [X], to("INT64"), since=6, expected=as_type(np.int64), grad=(), id="int64"),
    Case("Cast", [X], to("BOOL"), since=6, expected=as_type(bool), grad=(), id="bool"),
    Case(
        "Cast",
        [np.array([200, -129, 3])],
        to("INT8"),
        since=6,
        expected=as_type(np.int8),
        id="wrapped",
    ),
    Case("Cast", [X], to("BFLOAT16"), since=13, grad=(), id="bfloat16"),
    Case("Cast", [X], to("INT4"), since=21, grad=(), id="int4"),
    Case("Cast", [X], to("FLOAT4E2M1"), since=23, grad=(), id="float4"),
    Case(
        "Cast",
        [np.array([5, -3, 1])],
        to("UINT2"),
        since=25,
        expected=as_type(ml_dtypes.uint2),
        id="uint2",
    ),
    *(Case("Cast", [EDGES], to(name), since=19, grad=(), id=name) for name in FLOAT8),
    *(
        Case("Cast", [EDGES], to(name, saturate=0), since=19, grad=(), id=f"{name}-plain")
        for name in FLOAT8
    ),
    *(
        Case(
            "Cast",
            [POWERS],
            to("FLOAT8E8M0", round_mode=mode),
            since=24,
            expected=powers(*exponents),
            grad=(),
            id=mode,
        )
        for mode, exponents in {
            "up": (-3, -2, 1, 1, 1, 2),
            "down": (-4, -2, 0, 0, 1, 1),
            "nearest": (-3, -2, 0, 1, 1, 2),
        }.items()
    ),
    Case("CastLike", [X, np.zeros(1)], since=15, expected=as_type(np.float64), grad=(0,)),
    Case("BitCast", [X], to("INT32"), since=26, grad=()),
    Case("BitCast", [np.array([-1, 3], np.int8)], to("UINT8"), since=26, id="sign"),
]
