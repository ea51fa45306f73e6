"""Cases of `jaxonnx/ops/generators.py`."""

import numpy as np

from tests.ops.case_table import Case
from tests.ops.cases.shape import X, ints

VALUE = np.array([[1, -2]], np.int32)


def always(value):
    return lambda *_: value


def bounds(start, limit, delta, dtype):
    return [np.array(value, dtype) for value in (start, limit, delta)]


CASES = [
    Case("Constant", [], {"value": VALUE}, expected=always(VALUE)),
    Case(
        "Constant", [], {"value_float": 0.5}, since=12, expected=always(np.float32(0.5)), id="float"
    ),
    Case(
        "Constant",
        [],
        {"value_floats": [0.5]},
        since=12,
        expected=always(np.float32([0.5])),
        id="floats",
    ),
    Case(
        "Constant",
        [],
        {"value_int": 1 << 40},
        since=12,
        expected=always(np.array(1 << 40)),
        id="int",
    ),
    Case("Constant", [], {"value_ints": [1, 2]}, since=12, expected=always(ints(1, 2)), id="ints"),
    Case("ConstantOfShape", [ints(2, 3)], since=9),
    Case("ConstantOfShape", [ints()], {"value": np.array([7])}, since=9, id="scalar"),
    Case("ConstantOfShape", [ints(0, 2)], {"value": np.array([True])}, since=9, id="empty"),
    Case("Range", bounds(3, 12, 4, np.int64), since=11),
    Case("Range", bounds(10, 4, -2, np.int32), since=11, id="down"),
    Case("Range", bounds(4, 10, -2, np.int16), since=11, id="empty"),
    Case("Range", bounds(0.5, 2, 0.25, np.float64), since=11, grad=(), id="floats"),
    Case("Range", bounds(0, 2100, 1.5, np.float16), since=27, grad=(), id="half"),
    Case("EyeLike", [X[0]], since=9, grad=()),
    Case("EyeLike", [X[0]], {"k": 1, "dtype": 7}, since=9, grad=(), id="above"),
    Case("EyeLike", [ints(1, 2)[None]], {"k": -1, "dtype": 1}, since=9, id="below"),
]
