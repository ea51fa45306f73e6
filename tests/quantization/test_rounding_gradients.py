"""Gradients of QuantizeLinear and DequantizeLinear that share a scale, which are fused."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxonnx

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 8)).astype(np.float32)
X[0] = [-2.0625, -1.9375, 1.8125, 1.9375, 2.0625, 0.0625, -0.0625, 9]  # halves of a step, and ends
CASES = {
    "uint8": (np.uint8, 0.0125, 128, {}),
    "asymmetric": (np.uint8, 0.01, 3, {}),
    "int8, channels": (np.int8, RNG.uniform(0.01, 0.02, 8), 0, {"axis": 1}),
    "int16": (np.int16, 2.0**-13, 0, {}),
    "int4, halves": (ml_dtypes.int4, 0.125, 0, {}),
    "uint4, odd": (ml_dtypes.uint4, 0.125, 7, {}),
    "int4, blocks": (
        ml_dtypes.int4,
        RNG.uniform(0.1, 0.3, (6, 2)),
        0,
        {"axis": 1, "block_size": 4},
    ),
    "fp8": (ml_dtypes.float8_e4m3fn, 2.0**-8, 0, {}),
}


def network(name, shared):
    """A pair; with one scale for both operators, or one for each."""
    dtype, scale, point, attributes = CASES[name]
    scale = np.asarray(scale, np.float32)
    point = np.full(scale.shape, point, dtype)
    second = "s" if shared else "s2"
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], **attributes),
        helper.make_node("DequantizeLinear", ["q", second, "z"], ["y"], **attributes),
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [6, 8]) for n in "xy"]
    tensors = {"s": scale, "s2": scale, "z": point}
    stored = [numpy_helper.from_array(tensors[n], n) for n in dict.fromkeys(("s", second, "z"))]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def gradients(name, shared, weight):
    model = jaxonnx.load(network(name, shared)).with_trainable(["s"] if shared else ["s", "s2"])

    def loss(params, x):
        return (model.apply(params, x) * weight).sum()

    of_scales, of_x = jax.jit(jax.grad(loss, (0, 1)))(model.params, jnp.asarray(X))
    return sum(map(np.asarray, of_scales.values())), np.asarray(of_x), np.asarray(model(X))


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_separate_operators_and_of_the_formula(name):
    """dy/ds is the code, less x / s where it does not saturate (arXiv:1902.08153), in float64."""
    weight = RNG.normal(size=X.shape).astype(np.float32)
    of_scale, of_x, y = gradients(name, True, weight)
    separate = gradients(name, False, weight)
    np.testing.assert_array_equal(y, separate[2])
    np.testing.assert_allclose(of_x, separate[1], rtol=1e-6)
    dtype, scale, point, attributes = CASES[name]
    s = np.float64(np.asarray(scale, np.float32))
    s = np.repeat(s, 4, 1) if "block_size" in attributes else s
    info = ml_dtypes.finfo(dtype) if name == "fp8" else ml_dtypes.iinfo(dtype)
    ratio = X / s
    nearest = (ratio if name == "fp8" else np.rint(ratio)) + point
    inside = (nearest >= float(info.min)) & (nearest <= float(info.max))
    np.testing.assert_allclose(of_x, np.where(inside, weight, 0), rtol=1e-6)
    terms = weight * (y / s - np.where(inside, ratio, 0))
    if "block_size" in attributes:
        expected = terms.reshape(6, 2, 4).sum(2)
    else:
        expected = terms.sum(0) if "axis" in attributes else terms.sum()
    assert 0 < inside.mean() < 1 or name in ("int16", "fp8")
    np.testing.assert_allclose(of_scale, expected, rtol=1e-4, atol=1e-4 * np.abs(terms).max())
    loose = 3e-5 * np.abs(weight * X / s).max()  # two sums of numbers up to 127 almost cancel there
    np.testing.assert_allclose(of_scale, separate[0], rtol=1e-3, atol=loose)


def test_a_step_divides_each_rounded_number_once():
    """What would be kept of x / s for the gradient, by the operations of the compiled step."""
    model = jaxonnx.load(network("uint8", True)).with_trainable(["s"])

    def loss(params, x):
        return jnp.square(model.apply(params, x)).sum()

    program = jax.jit(jax.grad(loss, (0, 1))).lower(model.params, jnp.asarray(X)).as_text()
    divisions = [line for line in program.splitlines() if "divide" in line and "6x8" in line]
    assert len(divisions) == 1
    assert np.isfinite(jax.jvp(lambda x: model.apply(model.params, x), (X,), (X,))[1]).all()


@pytest.mark.parametrize("shared", [True, False])
def test_numbers_that_only_move_are_rounded_once(shared):
    """Rounding again by the same scale changes nothing; equal tensors are trained apart."""
    names = ("s", "z") if shared else ("s2", "z2")
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("Transpose", ["d"], ["t"], perm=[1, 0]),
        helper.make_node("QuantizeLinear", ["t", *names], ["q2"]),
        helper.make_node("DequantizeLinear", ["q2", *names], ["y"]),
    ]
    ends = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, shape)
        for n, shape in (("x", [6, 8]), ("y", [8, 6]))
    ]
    values = {"s": np.float32(0.0125), "z": np.uint8(128)}
    values |= {f"{name}2": value for name, value in values.items()}
    stored = [numpy_helper.from_array(np.asarray(values[n]), n) for n in {"s", "z", *names}]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], stored)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    model = jaxonnx.load(proto).with_trainable({"s", names[0]})
    weight = np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32)

    def loss(params, x):
        return (model.apply(params, x) * weight).sum()

    program = jax.jit(jax.grad(loss, (0, 1))).lower(model.params, jnp.asarray(X)).as_text()
    divisions = [x for x in program.splitlines() if "divide" in x and ("6x8" in x or "8x6" in x)]
    assert len(divisions) == (1 if shared else 2)
    of_scales, of_x = jax.jit(jax.grad(loss, (0, 1)))(model.params, jnp.asarray(X))
    alone = gradients("uint8", True, weight.T)
    np.testing.assert_array_equal(np.asarray(model(X)), alone[2].T)
    np.testing.assert_array_equal(of_x, alone[1])
    np.testing.assert_allclose(sum(of_scales.values()), alone[0], rtol=1e-6)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], model(X))
    assert model.to_onnx().graph.node == proto.graph.node  # as runtimes need them


@pytest.mark.parametrize("channels", [False, True])
def test_gradients_pass_integers_that_move(channels):
    """Integers between the two operators are transposed and reshaped; also with channel scales."""
    scale = RNG.uniform(0.01, 0.02, 8).astype(np.float32) if channels else np.float32(0.0125)
    point = np.zeros(np.shape(scale), np.int8)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], axis=1),
        helper.make_node("Transpose", ["q"], ["t"], perm=[1, 0]),
        helper.make_node("Unsqueeze", ["t", "last"], ["u"]),
        helper.make_node("Reshape", ["u", "shape"], ["r"]),
        helper.make_node("DequantizeLinear", ["r", "s", "z"], ["y"], axis=0),
    ]
    ends = [
        helper.make_tensor_value_info("x", 1, [6, 8]),
        helper.make_tensor_value_info("y", 1, None),
    ]
    tensors = {"s": scale, "z": point, "last": np.array([2]), "shape": np.array([8, 3, 2])}
    stored = [numpy_helper.from_array(np.asarray(x), n) for n, x in tensors.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], stored)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    model = jaxonnx.load(proto).with_trainable(["s"])
    weight = RNG.normal(size=(8, 3, 2)).astype(np.float32)

    def loss(params, x):
        return (model.apply(params, x) * weight).sum()

    of_scale, of_x = jax.jit(jax.grad(loss, (0, 1)))(model.params, jnp.asarray(X))
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], model(X))
    s, w = np.float64(scale), weight.reshape(8, 6).T
    inside = (np.rint(X / s) >= -128) & (np.rint(X / s) <= 127)
    np.testing.assert_allclose(of_x, np.where(inside, w, 0))
    y = np.clip(np.rint(X / s), -128, 127)
    terms = w * (y - np.where(inside, X / s, 0))
    expected = terms.sum(0) if channels else terms.sum()
    np.testing.assert_allclose(of_scale["s"], expected, rtol=1e-4, atol=1e-4)
