"""Cases of comparisons, logic and bits in `jaxonnx/ops/elementwise.py`."""

import numpy as np

from tests.ops.case_table import Case
from tests.ops.cases.elementwise import limited

A = np.array([[0.5, -1, 2], [3, 0.5, -2]], np.float32)
B = np.array([0.5, 1, -2], np.float32)
INTEGERS = np.array([[1, -5, 3], [4, 0, 2]])
BITS = np.array([0b1100, 0b1010, 0b1111], np.uint8)
OTHER_BITS = np.array([[0b0101], [0b0110]], np.uint8)
INFINITE = np.array([1, np.inf, -np.inf, np.nan], np.float32)

LOGICAL = {"And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor}
COMPARED = {"Greater": np.greater, "Less": np.less}

CUBE = np.arange(24).reshape(2, 3, 4)

CASES = [
    *(Case(name, [A > 0, B > 0], since=7) for name in LOGICAL),
    *(case for n, f in LOGICAL.items() for case in limited(n, f, CUBE % 2 > 0, CUBE % 3 > 0)),
    *(Case(name, [A, B], since=7, grad=()) for name in COMPARED),
    *(Case(name, [INTEGERS, INTEGERS[::-1]], since=9, id="integers") for name in COMPARED),
    *(
        case
        for n, f in COMPARED.items()
        for case in limited(n, f, np.float32(CUBE % 5), np.float32(CUBE % 3), grad=())
    ),
    Case("Equal", [INTEGERS, INTEGERS[:1]], since=7, id="integers"),
    Case("Equal", [A, B], since=11, grad=()),
    *limited("Equal", np.equal, CUBE % 5, CUBE % 3),
    *(Case(name, [A, B], grad=()) for name in ("GreaterOrEqual", "LessOrEqual")),
    Case("Not", [A > 0]),
    *(Case(f"Bitwise{name}", [BITS, OTHER_BITS]) for name in ("And", "Or", "Xor")),
    Case("BitwiseNot", [BITS]),
    Case("BitwiseNot", [INTEGERS], id="signed"),
    Case("BitShift", [BITS, np.array([1, 2, 3], np.uint8)], {"direction": "LEFT"}, id="left"),
    Case("BitShift", [BITS, np.array([1, 2, 3], np.uint8)], {"direction": "RIGHT"}, id="right"),
    Case("BitShift", [INTEGERS, np.array([1])], {"direction": "RIGHT"}, since=28, id="signed"),
    Case("IsInf", [INFINITE], grad=()),
    Case("IsInf", [INFINITE], {"detect_negative": 0}, grad=(), id="positive"),
    Case("IsInf", [INFINITE], {"detect_positive": 0}, grad=(), id="negative"),
    Case("IsNaN", [INFINITE], grad=()),
]
