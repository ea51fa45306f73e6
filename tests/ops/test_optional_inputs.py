"""Inputs that a schema calls optional may be omitted, also before others: "" in the file."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import onnx
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime_state
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

import jaxonnx
from jaxonnx.registry import operators
from tests.ops import contrib_table, operator_cases
from tests.ops.case_table import run_onnxruntime

REFUSALS = (
    RuntimeError,
    *(
        kind
        for kind in vars(onnxruntime_state).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ),
)
OPTIONAL = "Optional"


@cache
def runtime_schemas():
    return {(schema.domain, schema.name): schema for schema in get_all_operator_schema()}


def optional_inputs(domain, name, version=None):
    """The positions of the optional inputs, by onnxruntime's schema or by ONNX's."""
    if version is None:
        schema = runtime_schemas()[domain, name]
    else:
        schema = onnx.defs.get_schema(name, version, domain)
    return [i for i, value in enumerate(schema.inputs) if value.option.name == OPTIONAL]


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, id=op.name)
        for op in operators()
        if op.domain == "com.microsoft" and (op.domain, op.name) in runtime_schemas()
    ],
)
def test_required_inputs_are_those_of_the_runtime(op):
    optional = optional_inputs(op.domain, op.name)
    required = {i for i, name in enumerate(op.needed) if name is not None}
    assert not required & {*optional}


def omissions(cases):
    """Each optional input that a case has, and the cases that have it."""
    found = {}
    for case, domain, version in cases:
        known = version is not None or (domain, case.op) in runtime_schemas()
        for i in optional_inputs(domain, case.op, version) if known else ():
            if i < len(case.inputs) and case.inputs[i] is not None:
                found.setdefault((domain, case.op, i), []).append(case)
    return [pytest.param(i, cases, id=f"{op}-{i}") for (_, op, i), cases in found.items()]


def without(case, position):
    inputs = list(case.inputs)
    inputs[position] = None
    return replace(case, inputs=inputs)


REFUSED = {("QGemm", 7): "y_scale", ("QMoE", 3): "fc1_scales", ("QMoE", 6): "fc2_scales"}
COARSE = {("QMoE", 11), ("QMoE", 12)}
"""With one of two zero points onnxruntime's products are of rounded activations."""
CONTRIB = [
    (case, case.domain, None) for case in contrib_table.CASES if not (case.expected or case.shared)
]


@pytest.mark.parametrize(
    ("position", "cases"),
    [p for p in omissions(CONTRIB) if (p.values[1][0].op, p.values[0]) not in COARSE],
)
def test_a_contrib_operator_without(position, cases):
    """The file loads and agrees with onnxruntime, where that takes it."""
    compared = 0
    for case in cases:
        if (case.op, position) in REFUSED:  # onnxruntime gives anything or crashes
            with pytest.raises(jaxonnx.Error, match=REFUSED[case.op, position]):
                contrib_table.run(without(case, position))
            return
        case = without(case, position)
        try:
            expected = contrib_table.onnxruntime_result(case)
        except REFUSALS:
            continue
        model, given = contrib_table.model_of(case)
        results = jaxonnx.load(model)(**given)
        results = results if isinstance(results, tuple) else (results,)
        for y, e in zip(results, expected, strict=True):
            integers = e.dtype.kind in "iu"
            tolerance = {"atol": 1} if integers else {"rtol": 1e-4, "atol": case.atol}
            np.testing.assert_allclose(np.float64(y), np.float64(e), **tolerance)
        compared += 1
    if not compared:
        pytest.skip("onnxruntime needs this input")


UNCOMPARED = {"DFT", "Dropout", "LayerNormalization"}
"""Without an input onnxruntime crashes on two of these; the third draws."""
STANDARD = [
    (case, case.domain, operator_cases.newest(case))
    for case in (param.values[0] for param in operator_cases.CASES)
    if case.domain == "" and case.op not in UNCOMPARED and onnx.defs.has(case.op, case.domain)
]


def onnxruntime_result(case):
    inputs = {f"x{i}": np.asarray(x) for i, x in enumerate(case.inputs) if x is not None}
    return run_onnxruntime(case.model(operator_cases.newest(case)), inputs)


@pytest.mark.parametrize(("position", "cases"), omissions(STANDARD))
def test_an_onnx_operator_without(position, cases):
    """The result is onnxruntime's, where that agrees with the oracle of the whole case."""
    compared = 0
    with jax.enable_x64(True):
        for case in cases:
            version, shorter = operator_cases.newest(case), without(case, position)
            try:
                operator_cases.assert_same(onnxruntime_result(case), case.wanted(version), case)
                expected = onnxruntime_result(shorter)
            except (AssertionError, *REFUSALS):
                continue
            results = shorter.function(version)(*shorter.inputs)
            operator_cases.assert_same(results, expected, case)
            compared += 1
    if not compared:
        pytest.skip("onnxruntime needs this input")
