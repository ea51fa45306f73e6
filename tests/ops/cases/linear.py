"""MatMul, Gemm, Det."""

import numpy as np

from tests.ops.case_table import Case

rng = np.random.default_rng(0)


def f(*shape):
    return rng.normal(size=shape).astype(np.float32)


def i(*shape):
    return rng.integers(-9, 9, shape).astype(np.int32)


CASES = [
    Case("MatMul", [f(2, 3), f(3, 4)]),
    Case("MatMul", [f(3), f(3)], id="vectors"),
    Case("MatMul", [f(3), f(2, 3, 4)], id="vector_on_stack"),
    Case("MatMul", [f(2, 3, 4), f(4)], id="stack_on_vector"),
    Case("MatMul", [f(2, 3, 4), f(4, 5)], id="stack_on_matrix"),
    Case("MatMul", [f(2, 1, 3, 4), f(5, 4, 2)], id="broadcast"),
    Case("MatMul", [f(2, 0), f(0, 3)], id="empty_sum"),
    Case("MatMul", [i(2, 3), i(3, 4)], since=9, id="int32"),
    Case(
        "Gemm",
        [f(2, 3), f(3, 4), f(2, 4)],
        {"alpha": 0.5, "beta": 2.0},
        expected=lambda a, b, c: 0.5 * a @ b + 2 * c,
    ),
    Case(
        "Gemm",
        [f(3, 2), f(4, 3), f(2, 4)],
        {"transA": 1, "transB": 1},
        expected=lambda a, b, c: a.T @ b.T + c,
        id="transposed",
    ),
    Case(
        "Gemm",
        [f(2, 3), f(3, 4), f(4)],
        {"broadcast": 1, "beta": 0.5},
        until=6,
        expected=lambda a, b, c: a @ b + 0.5 * c,
        id="broadcast",
    ),
    Case("Gemm", [f(2, 3), f(3, 4), f(4)], {"beta": 0.5}, since=7, id="row"),
    Case("Gemm", [f(2, 3), f(3, 4), f(2, 1)], {"transA": 0}, since=7, id="column"),
    Case("Gemm", [f(2, 3), f(3, 4), f(1)], {"beta": 0.0}, since=7, id="beta_zero"),
    Case("Gemm", [f(2, 3), f(3, 4)], {"alpha": 1.5}, since=11, id="without_c"),
    Case("Gemm", [i(2, 3), i(3, 4), i(4)], since=9, id="int32"),
    Case("Det", [f(2, 2)]),
    Case("Det", [f(2, 4, 4)], id="stack"),
]
