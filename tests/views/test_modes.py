"""What training does to statistics and Dropout, and how that is chosen."""

import jax
import numpy as np
import onnx.parser
import optax
import pytest

import jaxonnx
from tests.support.paths import DATA


@pytest.fixture(scope="module")
def net():
    return jaxonnx.load(DATA / "lenet_bn.legacy.onnx")


@pytest.fixture(scope="module")
def x():
    return np.load(DATA / "lenet_bn.legacy.npz")["x"]


@pytest.mark.deep
def test_frozen_statistics(net, x):
    frozen = net.with_statistics("frozen")

    def loss(params, model):
        outputs, state = model.apply_train(params, net.state, None, x)
        return (outputs**2).sum(), state

    gradient, state = jax.grad(loss, has_aux=True)(net.params, frozen)
    for name, value in net.state.items():
        np.testing.assert_array_equal(state[name], value)
    expected = jax.grad(lambda p: (net.apply(p, x) ** 2).sum())(net.params)
    for name, value in expected.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(gradient[name], value, rtol=1e-3, atol=1e-4 * scale)
    assert np.abs(gradient["features.1.weight"]).max() > 0  # scale and bias are trained
    _, renewed = loss(net.params, frozen.with_statistics("batch"))
    assert not np.array_equal(
        renewed["features.1.running_mean"], net.state["features.1.running_mean"]
    )
    # the choice is kept by other changes of the model
    kept = frozen.with_trainable("classifier.*").with_outputs("features")
    _, state = kept.apply_train(kept.params, kept.state, None, x)
    assert all(np.array_equal(state[name], value) for name, value in kept.state.items())
    with pytest.raises(jaxonnx.InputError, match="'batch' or 'frozen', got 'running'"):
        net.with_statistics("running")


def test_frozen_statistics_inside_functions_and_bodies():
    proto = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 17, "f": 1]>
    g (float[n,2] x, bool c) => (float[n,2] z)
    <float[2] s = {1,2}, float[2] b = {0,0}, float[2] m = {3,4}, float[2] v = {1,1}> {
      y = f.norm(x, s, b, m, v)
      z = If (c) <
        then_branch = t () => (float[n,2] p) { p = BatchNormalization(y, s, b, m, v) },
        else_branch = e () => (float[n,2] q) { q = Identity(y) }
      >
    }
    <domain: "f", opset_import: ["": 17]> norm (x, s, b, m, v) => (y) {
      y = BatchNormalization(x, s, b, m, v)
    }
    """)
    model = jaxonnx.load(proto)
    x, yes = np.ones((2, 2), np.float32), np.array(True)
    with pytest.raises(jaxonnx.NodeError, match="statistics='frozen'"):
        model.apply_train(model.params, model.state, None, x, yes)
    frozen = model.with_statistics("frozen")
    z, _ = frozen.apply_train(frozen.params, frozen.state, None, x, yes)
    np.testing.assert_allclose(z, model(x, yes), rtol=1e-6)


DROPPED = """
<ir_version: 8, opset_import: ["": OPSET]>
g (float[n] x) => (float[n] y) { h = Neg(x) d = DROPOUT y = Neg(d) }
"""


def dropped(opset):
    node = "Dropout(h)" if opset >= 12 else "Dropout <ratio = 0.5> (h)"
    text = DROPPED.replace("OPSET", str(opset)).replace("DROPOUT", node)
    return jaxonnx.load(onnx.parser.parse_model(text))


@pytest.mark.parametrize("opset", [7, 10, 13])
@pytest.mark.parametrize("ratio", [0.25, {"d": 0.25}, 0])
def test_the_ratio_of_dropout_nodes(opset, ratio):
    model = dropped(opset)
    changed = model.with_dropout(ratio)
    x, key = np.ones(1000, np.float32), jax.random.key(0)
    y, _ = changed.apply_train({}, {}, key, x)
    expected = np.array([1]) if ratio == 0 else np.float32([0, 4 / 3])
    np.testing.assert_allclose(np.unique(y), expected, rtol=1e-6)
    if ratio:
        assert 0.2 < np.mean(np.asarray(y) == 0) < 0.3
    np.testing.assert_array_equal(changed(x), x)
    y, _ = model.apply_train({}, {}, key, x)
    np.testing.assert_allclose(np.unique(y), [0, 2])
    assert changed.to_onnx() == model.to_onnx()


@pytest.mark.deep
def test_dropout_where_the_exporter_left_none(net, x):
    with pytest.raises(jaxonnx.InputError, match=r"no Dropout node.*dropout=\{'name': 0.1\}"):
        net.with_dropout(0.1)
    model = net.with_dropout({"classifier.1": 0.5, "features": 0.25})
    np.testing.assert_array_equal(model(x), net(x))
    assert model.to_onnx() == net.to_onnx()
    keys = jax.random.split(jax.random.key(0))
    outputs = [model.apply_train(net.params, net.state, key, x)[0] for key in (*keys, keys[0])]
    np.testing.assert_array_equal(outputs[0], outputs[2])
    assert not np.allclose(outputs[0], outputs[1])
    hidden = model.with_outputs(["classifier.1", "features"])
    values, _ = hidden.apply_train(hidden.params, hidden.state, keys[0], x)
    for value, ratio in zip(values, (0.5, 0.25), strict=True):
        assert abs(np.mean(np.asarray(value) == 0) - ratio) < 0.1


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        ({"classifier.1": 1.0}, r"\[0, 1\), got 1.0"),
        ({"classifier.1": "0.1"}, r"\[0, 1\), got '0.1'"),
        ({"clasifier": 0.1}, "no value, node or module 'clasifier'.*classifier"),
    ],
)
def test_dropout_that_does_not_fit(net, ratio, words):
    with pytest.raises(jaxonnx.InputError, match=words):
        net.with_dropout(ratio)


@pytest.mark.deep
def test_training_with_frozen_statistics_and_dropout(net, x):
    settings = {"loss": "squared_error", "optimizer": optax.sgd(0.01), "batch_size": 4}
    y = np.zeros((len(x), 10), np.float32)
    result = jaxonnx.train(
        net, (x, y), statistics="frozen", dropout={"classifier.1": 0.5}, **settings
    )
    for name, value in net.state.items():
        np.testing.assert_array_equal(result.model.state[name], value)
    same = jaxonnx.train(net, (x, y), statistics="frozen", **settings)
    assert result.history.losses != same.history.losses
    assert result.changes["features.1.weight"] > 0
