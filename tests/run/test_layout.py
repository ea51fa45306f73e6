"""Images are kept with their channels last between operators, and nobody can tell."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import jaxonnx
from jaxonnx import demo
from jaxonnx._run.call_form import prepare_tensors
from jaxonnx.lowering import StoredArray

rng = np.random.default_rng(0)


def network(*nodes, outputs=("y",), rank=4, **weights):
    """`c` is a convolution of the input x (2, 3, 5, 6); the nodes go on from it."""
    size, kernel = ([5, 6], [2, 2]) if rank == 4 else ([6], [2])
    weights["w"] = rng.normal(size=(4, 3, *kernel))
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["c"]), *nodes],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, *size])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [
            numpy_helper.from_array(v.astype(np.float32) if v.dtype == float else v, n)
            for n, v in weights.items()
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def node(kind, *names, **attributes):
    *inputs, output = names
    return helper.make_node(kind, inputs, [output], **attributes)


CHAINS = {
    "scalar": network(node("Mul", "c", "s", "y"), s=np.array(2.0)),
    "last axis": network(node("Add", "row", "c", "y"), row=rng.normal(size=5)),
    "channels": network(node("PRelu", "c", "a", "y"), a=rng.normal(size=(4, 1, 1))),
    "of rank five": network(node("Add", "c", "v", "y"), v=rng.normal(size=(2, 1, 4, 1, 1))),
    "line": network(node("Relu", "c", "r"), node("Add", "r", "v", "y"), rank=3, v=np.ones((4, 1))),
    "axes": network(
        node("Concat", "c", "c", "two", axis=1),
        node("Concat", "two", "two", "four", axis=-2),
        node("Concat", "four", "four", "eight", axis=3),
        node("Concat", "eight", "eight", "y", axis=0),
    ),
    "softmax": network(node("Softmax", "c", "a", axis=1), node("Softmax", "a", "y", axis=-1)),
    "order matters": network(
        node("Relu", "c", "r"), node("Reshape", "r", "to", "y"), to=np.array([2, -1])
    ),
    "pools": network(
        node("MaxPool", "c", "a", kernel_shape=[2, 2]),
        node("AveragePool", "a", "b", kernel_shape=[2, 2], pads=[1, 0, 0, 1]),
        node("GlobalAveragePool", "b", "y"),
    ),
    "both orders": network(
        node("Sigmoid", "c", "a"),
        node("Transpose", "a", "t", perm=[0, 1, 3, 2]),
        node("Relu", "a", "y"),
        outputs=("t", "y", "c"),
    ),
    "rounding by channel": network(
        node("QuantizeLinear", "c", "scale", "zero", "q", axis=-3),
        node("DequantizeLinear", "q", "scale", "zero", "d", axis=1),
        node("Relu", "d", "y"),
        scale=rng.uniform(0.1, 0.2, 4),
        zero=rng.integers(100, 150, 4).astype(np.uint8),
    ),
    "rounding by row": network(
        node("QuantizeLinear", "c", "scale", "zero", "q", axis=2),
        node("DequantizeLinear", "q", "scale", "zero", "y", axis=2),
        scale=rng.uniform(0.1, 0.2, 4),
        zero=np.zeros(4, np.int8),
        outputs=("q", "y"),
    ),
    "a condition": network(
        node("Greater", "c", "s", "above"), node("Where", "above", "c", "s", "y"), s=np.array(0.5)
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", CHAINS)
def test_every_order_gives_what_the_specification_says(name):
    file = CHAINS[name]
    x = rng.normal(size=[d.dim_value for d in file.graph.input[0].type.tensor_type.shape.dim])
    x = x.astype(np.float32)
    expected = ReferenceEvaluator(file).run(None, {"x": x})
    model = jaxonnx.load(file)
    found = model(x)
    found = found if isinstance(found, tuple) else (found,)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    stacked = jax.vmap(lambda x: model.apply(model.params, x))(np.stack([x, x]))
    for a, b in zip(jax.tree.leaves(stacked), expected, strict=True):
        np.testing.assert_allclose(a[1], b, rtol=1e-5, atol=1e-5)


def test_a_chain_changes_the_order_twice():
    ones, zeros = np.ones(4), np.zeros(4)
    file = network(
        helper.make_node("BatchNormalization", ["c", "ones", "zeros", "zeros", "ones"], ["b"]),
        node("Relu", "b", "r"),
        node("Conv", "r", "w2", "d", pads=[1, 1, 1, 1]),
        node("Add", "d", "r", "a"),
        node("Clip", "a", "low", "high", "y"),
        ones=ones,
        zeros=zeros,
        w2=rng.normal(size=(4, 4, 3, 3)),
        low=np.array(0.0),
        high=np.array(6.0),
    )
    model = jaxonnx.load(file)
    x = np.zeros((2, 3, 5, 6), np.float32)
    lowered = jax.jit(model.apply).trace(model.params, x).lower(lowering_platforms=("cuda",))
    images = re.findall(r"stablehlo.transpose .*: \(tensor<2x", lowered.as_text())
    assert len(images) == 2


def rounded_network():
    return network(
        node("QuantizeLinear", "c", "s", "z", "q", axis=1),
        node("DequantizeLinear", "q", "s", "z", "d", axis=1),
        node("Relu", "d", "r"),
        node("QuantizeLinear", "w2", "s2", "z2", "w2q", axis=0),
        node("DequantizeLinear", "w2q", "s2", "z2", "w2d", axis=0),
        node("Conv", "r", "w2d", "y", pads=[1, 1, 1, 1]),
        w2=rng.normal(size=(8, 4, 3, 3)),
        s=np.array([0.01, 0.02, 0.03, 0.04]),
        z=np.array([120, 0, 130, 128], np.uint8),
        s2=rng.uniform(0.005, 0.02, 8),
        z2=np.zeros(8, np.int8),
    )


def test_gradients_through_rounding_have_images_and_kernels_in_their_order():
    """The oracle is the straight-through estimator, written for arrays in ONNX's order."""
    file = rounded_network()
    tensors = {t.name: numpy_helper.to_array(t) for t in file.graph.initializer}
    model = jaxonnx.load(file).with_trainable(["w", "w2"])
    x = rng.normal(size=(2, 3, 5, 6)).astype(np.float32)
    y_bar = rng.normal(size=(2, 8, 4, 5)).astype(np.float32)

    def rounded(x, s, z, axis):
        s, z = (t.reshape([-1 if i == axis else 1 for i in range(4)]) for t in (s, z))
        info = np.iinfo(z.dtype)
        nearest = jnp.rint(x / s) + z
        inside = (nearest >= info.min) & (nearest <= info.max)
        value = (jnp.clip(nearest, info.min, info.max) - z) * s
        real = jnp.where(inside, x, 0)
        return real + jax.lax.stop_gradient(value - real)

    def expected(weights, x):
        c = jax.lax.conv(x, weights["w"], (1, 1), "VALID")
        r = jax.nn.relu(rounded(c, tensors["s"], tensors["z"], 1))
        w2 = rounded(weights["w2"], tensors["s2"], tensors["z2"], 0)
        return (jax.lax.conv(r, w2, (1, 1), "SAME") * y_bar).sum()

    def found(weights, x):
        return (model.apply_train(weights, model.state, None, x)[0] * y_bar).sum()

    wanted = jax.jit(jax.grad(expected, (0, 1)))({n: tensors[n] for n in ("w", "w2")}, x)
    given = jaxonnx.kernels_first(model.params)
    assert {name: type(value).__name__ for name, value in given.items()} == {
        "w": "KernelFirst",
        "w2": "KernelFirst",
    }
    for params in (model.params, given):
        weights, images = jax.jit(jax.grad(found, (0, 1)))(params, x)
        np.testing.assert_allclose(images, wanted[1], rtol=1e-4, atol=1e-4)
        for name, gradient in weights.items():
            gradient = gradient if isinstance(gradient, jax.Array) else gradient.to_array()
            np.testing.assert_allclose(gradient, wanted[0][name], rtol=1e-4, atol=1e-4)


def test_rounding_does_not_change_the_order():
    model = jaxonnx.load(rounded_network()).with_trainable(["w", "w2"])
    x = np.zeros((2, 3, 5, 6), np.float32)
    params = jaxonnx.kernels_first(model.params)
    lowered = jax.jit(model.apply).trace(params, x).lower(lowering_platforms=("cuda",))
    turned = re.findall(r"stablehlo.transpose ", lowered.as_text())
    assert len(turned) == 2  # the input and the output


def test_a_compiled_call_has_kernels_first_and_nothing_else():
    shared = network(
        node("Mul", "c", "s", "d"),
        node("Conv", "d", "k", "e"),
        node("Add", "e", "k", "y"),
        s=np.array(2.0),
        k=rng.normal(size=(4, 4, 1, 1)),
    )
    cases = (demo.model(), ["0.weight", "3.weight", "7.weight"]), (jaxonnx.load(shared), ["w"])
    for model, turned in cases:
        given = prepare_tensors(model.program, model.params)
        assert [n for n, x in given.items() if not isinstance(x, jax.Array)] == turned


def test_an_axis_that_images_do_not_have_is_refused():
    model = jaxonnx.load(network(node("Concat", "c", "c", "y", axis=-5)))
    with pytest.raises(jaxonnx.NodeError, match=r"(?s)Concat.*axis -5"):
        model(np.zeros((2, 3, 5, 6), np.float32))


class Doubled(StoredArray):
    """An array that is twice the stored one."""

    value: Any

    def to_array(self):
        return 2 * self.value


def test_a_new_form_is_one_class():
    """Operators that do not declare it get the plain array, and gradients have its form."""
    model = jaxonnx.load(network(node("Relu", "c", "r"), node("Mul", "r", "v", "y"), v=np.ones(5)))
    x = rng.normal(size=(2, 3, 5, 6)).astype(np.float32)
    model = model.replace(params={n: w + 1 for n, w in model.params.items()})
    stored = {name: Doubled(w / 2) for name, w in model.params.items()}

    def loss(params):
        return (model.apply(params, x) ** 2).sum()

    np.testing.assert_array_equal(jax.jit(loss)(stored), jax.jit(loss)(model.params))
    wanted = jax.grad(loss)(model.params)
    for name, gradient in jax.grad(loss)(stored).items():
        np.testing.assert_allclose(gradient.value, 2 * wanted[name], rtol=1e-5)
