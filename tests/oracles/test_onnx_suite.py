"""ONNX's own backend suite, through ONNX's own runner (x64 on, the tolerances of the cases)."""

import os
import re
import warnings
from unittest import mock

import numpy as np
import onnx.backend.test
import pytest
from onnx.backend.test.case.model import collect_testcases
from onnx.reference.ops import op_pool_common

from jaxonnx import backend
from jaxonnx.backend import JaxBackend, Rep
from tests.support import lazy_cases

EXCLUDED = {
    # Random results: no implementation can give the recorded numbers.
    "test_bernoulli_cpu": "random",
    "test_bernoulli_expanded_cpu": "random",
    "test_bernoulli_double_cpu": "random",
    "test_bernoulli_double_expanded_cpu": "random",
    "test_bernoulli_seed_cpu": "random",
    "test_bernoulli_seed_expanded_cpu": "random",
    "test_training_dropout_cpu": "the mask of NumPy's legacy generator",
    "test_training_dropout_default_cpu": "the mask of NumPy's legacy generator",
    "test_training_dropout_mask_cpu": "the mask of NumPy's legacy generator",
    "test_training_dropout_default_mask_cpu": "the mask of NumPy's legacy generator",
    # onnx/onnx#2398: the recorded data contradicts the specification and every runtime.
    "test_maxunpool_export_with_output_shape_cpu": "wrong data",
}


class Runner(onnx.backend.test.BackendTest):
    """ONNX's runner, which takes `len()` of a tensor in a sequence: one of rank 0 has none."""

    @classmethod
    def assert_similar_outputs(cls, ref_outputs, outputs, rtol, atol, model_dir=None):
        if isinstance(outputs, np.ndarray):
            ref_outputs, outputs = [ref_outputs], [outputs]
        super().assert_similar_outputs(ref_outputs, outputs, rtol, atol, model_dir)


UNCOMPILED = re.compile(
    # Results whose shape depends on values, or that are no arrays.
    "test_(nonmaxsuppression|unique|nonzero|compress|image_decoder|sequence|split_to_sequence|string|"
    "strnorm|regex|equal_string|ai_onnx_ml_label_encoder|identity_(opt|sequence)|if_(opt|seq)|"
    "optional|loop1[136])|StringNormalizer"
)


class CompiledBackend(JaxBackend):
    """The backend, which must compile a whole case with its inputs traced.

    Inputs that fix shapes are known, as they are in `jaxonnx._run.program`.
    """

    @classmethod
    def prepare(cls, model, device="CPU", **kwargs):
        return CompiledRep(super().prepare(model, device, **kwargs).model)


class CompiledRep(Rep):
    def run(self, inputs, **kwargs):
        outputs = super().run(inputs, **kwargs)
        name = self.model.proto.graph.name
        assert self.model.program.compiled or UNCOMPILED.match(name), f"{name} is not compiled"
        return outputs


def _later(padded, x_shape, kernel, strides, out_shape, *args, **kwargs):
    """Let the loops over windows, half of the time that the suite's data takes, wait for a test."""

    def compute():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _pool(padded, x_shape, kernel, strides, out_shape, *args, **kwargs)

    return lazy_cases.Array((*x_shape[:2], *out_shape), padded.dtype, compute)


_pool = op_pool_common.pool
_ifft = np.fft.ifft
with (
    warnings.catch_warnings(),
    mock.patch.object(op_pool_common, "pool", _later),
    # NumPy 2 transforms complex64 in single precision: 1.9e-7 where the result is zero.
    mock.patch.object(np.fft, "ifft", lambda x, axis: _ifft(x.astype(np.complex128), axis=axis)),
):
    # The suite computes its own data with NumPy, which warns of overflow and the like.
    warnings.simplefilter("ignore")
    runner = Runner(CompiledBackend, __name__)
for _name in EXCLUDED:
    runner.exclude(f"^{_name}$")

_cases = runner.enable_report().test_cases
for _name, _case in _cases.items():
    for _test in dir(_case):
        if _test.endswith("_cuda") and os.environ.get("JAXONNX_DEVICE", "cpu") == "cpu":
            delattr(_case, _test)
            continue
        # the same operators once more: what functions expand to, and networks of many layers
        if "expanded" in _test or (("Real" in _name or "Converted" in _name) and "test_" in _test):
            setattr(_case, _test, pytest.mark.deep(getattr(_case, _test)))
globals().update(_cases)
_names = {name for case in _cases.values() for name in dir(case)}
UNWRITTEN = [case for case in collect_testcases() if f"{case.name}_cpu" not in _names]
"""Models of the suite that the runner, which reads models from disk, does not have."""


@pytest.mark.parametrize("case", UNWRITTEN, ids=lambda case: case.name)
def test_models_that_are_not_on_disk(case):
    rep = CompiledBackend.prepare(case.model)
    for inputs, outputs in case.data_sets:
        Runner.assert_similar_outputs(outputs, rep.run(inputs), case.rtol, case.atol)


def test_every_exclusion_names_a_case():
    assert _names.issuperset(EXCLUDED)


@pytest.mark.deep
def test_the_command_counts_cases(capsys):
    backend.main(["^test_relu_cpu$", "^test_bernoulli_cpu$"])  # the latter is random
    rows = capsys.readouterr().out.split("\n")
    assert "OnnxBackendNodeModelTest".ljust(38) + "       1       1       0" in rows
    assert "test_bernoulli_cpu" in rows
