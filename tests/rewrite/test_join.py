"""A model behind another one, in one file."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import optax
import pytest

import jaxonnx
from jaxonnx import demo
from tests.support.paths import DATA

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def load(text, opset=18, **options):
    proto = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}]> {text}')
    return jaxonnx.load(proto, **options)


def first(**options):
    return load(
        """g (float[n,3] x) => (float[n,2] y)
        <float[3,2] w = {1,2,3,4,5,6}, float[2] b = {1,-1}> {
          [layer] h = MatMul(x, w)
          y = Add(h, b)
        }""",
        **options,
    )


def second(**options):
    return load(
        """g (float[m,2] x) => (float[m,2] y, float[m,2] r)
        <float[2,2] w = {1,-1,0.5,2}, float[2] s = {1, 1}, float[2] b = {0, 0.5},
         float[2] mean = {0.1, 0.2}, float[2] var = {1, 2}> {
          v = Constant<value = float[2,2] {1, 2, 3, 4}>()
          three = Constant<value = int64[1] {3}>()
          h = MatMul(x, w)
          [layer] n = BatchNormalization(h, s, b, mean, var)
          r = Relu(n)
          y = MatMul(r, v)
        }""",
        **options,
    )


def run(model, x):
    proto = model.to_onnx()
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    return session.run(None, {session.get_inputs()[0].name: x})


def test_both_networks_keep_their_nodes_and_the_names_of_their_tensors():
    a, b = first(), second()
    whole = a.then(b)
    assert {*whole.params} == {"w", "b", "w_2", "s", "b_2", "v"}
    assert {*whole.state} == {"mean", "var"}
    np.testing.assert_array_equal(whole.params["w"], a.params["w"])
    np.testing.assert_array_equal(whole.params["w_2"], b.params["w"])
    assert [n.op_type for n in whole.proto.graph.node if n.op_type != "Constant"] == [
        *("MatMul", "Add", "MatMul", "BatchNormalization", "Relu", "MatMul")
    ]
    assert [value.shape for value in whole.outputs] == [("n", 2), ("n", 2)]
    (middle,) = run(a, X)
    expected = run(b, middle)
    for outputs in run(whole, X), whole(X):
        for output, value in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(output, value, rtol=1e-5, atol=1e-5)
    renamed = a.then(b, outputs=["scores", "rest"])
    assert [value.name for value in renamed.outputs] == ["scores", "rest"]
    np.testing.assert_allclose(run(renamed, X)[0], expected[0], rtol=1e-5, atol=1e-5)


def test_a_joined_network_trains_as_the_two_do():
    a, b = first(), second()
    whole = a.then(b)
    (y, _), state = whole.apply_train(whole.params, whole.state, None, X)
    middle, _ = a.apply_train(a.params, a.state, None, X)
    (expected, _), renewed = b.apply_train(b.params, b.state, None, middle)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state["mean"], renewed["mean"], rtol=1e-5)
    loss = lambda outputs, targets: ((outputs[0] - targets) ** 2).mean()  # noqa: E731
    settings = {"loss": loss, "optimizer": optax.sgd(0.01), "epochs": 2, "batch_size": 4}
    result = jaxonnx.train(whole, (X, np.zeros((4, 2), np.float32)), **settings)
    assert result.history.epochs[-1]["loss"] < result.history.epochs[0]["loss"]
    assert {*result.model.with_outputs("r").params} == {"w", "b", "w_2", "s", "b_2"}


def test_frozen_parts_of_the_second_network_stay_frozen():
    whole = first().then(second(trainable=["v"]))
    assert {*whole.params} == {"w", "b", "v"}


def test_real_networks_are_joined():
    model, x = demo.model(), np.asarray(demo.digits()[1][0][:4])
    head, tail = model.split("9")
    whole = head.then(tail)
    assert {*whole.params} == {*model.params}
    np.testing.assert_allclose(run(whole, x)[0], model(x), rtol=1e-4, atol=1e-4)
    gradients = [
        jax.jit(jax.grad(lambda p, net=net: net.apply(p, x).sum()))(net.params)
        for net in (model, whole)
    ]
    for name, gradient in gradients[0].items():
        np.testing.assert_allclose(gradients[1][name], gradient, rtol=1e-3, atol=1e-3)
    head, tail = jaxonnx.load(DATA / "lstm.legacy.onnx").split("embedding")
    tokens = np.load(DATA / "lstm.legacy.npz")["x"]
    np.testing.assert_allclose(
        run(head.then(tail), tokens)[0], tail(head(tokens)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            lambda: second(opset=17),
            r"opsets 18 and 17 of ai.onnx: jaxonnx.convert\(model, opset=18\)",
        ),
        (first, r"outputs y: float32\[n, 2\] do not fit the inputs x: float32\[n, 3\]"),
        (
            lambda: first().with_fixed_inputs({"x": X}),
            "do not fit the inputs nothing|views",
        ),
        (lambda: second().with_batch_axis(), r"views \(BatchAxis\)|do not fit"),
    ],
)
def test_networks_that_do_not_fit_are_refused(model, words):
    with pytest.raises(jaxonnx.InputError, match=words):
        first().then(model())
    with pytest.raises(jaxonnx.InputError, match="outputs= must be 2 names"):
        first().then(second(), outputs=["y", "scores"])


def test_networks_of_another_opset_are_converted():
    old = second(opset=17)
    whole = first().then(jaxonnx.convert(old, opset=18))
    expected = old(jnp.asarray(first()(X)))[0]
    np.testing.assert_allclose(run(whole, X)[0], expected, rtol=1e-5, atol=1e-5)
