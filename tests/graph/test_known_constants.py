"""Windows and geometric sequences are not trained, though they stand where weights do."""

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

import jaxonnx
from jaxonnx._graph.known_constants import is_known_constant

CONSTANTS = {
    "inv_freq": 10000.0 ** -(np.arange(0, 16, 2) / 16),
    "alibi": 2.0 ** -np.arange(1, 9),
    "hann": np.hanning(33)[:-1],
    "symmetric hann": np.hanning(32),
    "hamming": np.hamming(24),
    "blackman": np.blackman(21)[:-1],
}


def load(vector, dtype=np.float32, **options):
    """x * vector @ w."""
    vector = np.asarray(vector).astype(dtype)
    w = np.random.default_rng(0).normal(size=(len(vector), 3)).astype(dtype)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "v"], ["a"]), helper.make_node("MatMul", ["a", "w"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", kind, ["n", len(vector)])],
        [helper.make_tensor_value_info("y", kind, ["n", 3])],
        [numpy_helper.from_array(vector, "v"), numpy_helper.from_array(w, "w")],
    )
    opsets = [helper.make_opsetid("", 20)]
    return jaxonnx.load(helper.make_model(graph, opset_imports=opsets, ir_version=9), **options)


@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_constants_are_not_trained(name, dtype):
    assert {*load(CONSTANTS[name], dtype).params} == {"w"}
    assert {*load(CONSTANTS[name], dtype, trainable="v").params} == {"v"}


@given(st.integers(0, 1000), st.integers(4, 64))
def test_learned_vectors_are_trained(seed, count):
    random = np.random.default_rng(seed)
    for vector in (np.ones(count), np.zeros(count), random.normal(size=count)):
        assert not is_known_constant(vector)
        assert not is_known_constant(vector + random.normal(size=count) * 0.02)
    assert not is_known_constant(random.normal(size=(count, count)))


def test_other_types_are_not_looked_at():
    for vector in (np.array(["a", ","] * 4, object), np.arange(8), np.ones(8, bool)):
        assert not is_known_constant(vector)


def test_a_window_that_was_trained_is_still_a_weight():
    moved = np.hanning(32) + np.random.default_rng(0).normal(size=32) * 0.01
    assert {*load(moved).params} == {"v", "w"}


def test_a_file_is_written_with_its_constants():
    model = load(CONSTANTS["inv_freq"])
    proto = model.to_onnx()
    assert {t.name for t in proto.graph.initializer} == {"v", "w"}
    onnx.checker.check_model(proto)
