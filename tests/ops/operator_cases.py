"""All cases of operators, and functions of their inputs."""

import importlib
import pkgutil

import numpy as np
import pytest

import tests.ops.cases

CASES = [
    pytest.param(case, id=f"{module.name}-{case.op}-{i}{case.id and '-' + case.id}")
    for module in pkgutil.iter_modules(tests.ops.cases.__path__)
    for i, case in enumerate(importlib.import_module(f"tests.ops.cases.{module.name}").CASES)
]


def assert_same(actual, expected, case):
    assert len(actual) >= len(expected)
    for a, b in zip(actual, expected, strict=False):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if b.dtype == object or b.dtype.kind not in "fVc":
            np.testing.assert_array_equal(a, b)
        else:
            wide = np.float64 if b.dtype.kind != "c" else np.complex128
            np.testing.assert_allclose(a.astype(wide), b.astype(wide), case.rtol, case.atol)


def newest(case):
    return case.versions()[-1]


def compilable(case):
    return case.jit and not case.operator(newest(case)).dynamic


def traced(case, version):
    """The positions of the inputs that can be traced."""
    static = case.operator(version).static
    return [
        i
        for i, value in enumerate(case.inputs)
        if isinstance(value, np.ndarray) and value.dtype != object and i not in static
    ]


def partial(function, inputs, positions):
    """`function` of the inputs at `positions`, the others given."""

    def call(*values):
        given = list(inputs)
        for i, value in zip(positions, values, strict=True):
            given[i] = value
        return function(*given)

    return call
