"""Parameters that only integers are computed from: frozen, and named."""

import jax
import numpy as np
import onnx.parser
import onnxruntime
import optax
import pytest

import jaxonnx

GRAPHS = {
    # from w an integer or a truth value is computed, and from v always a number
    "ArgMax": "i = ArgMax <axis = 1> (m) f = Cast <to = 1> (i) y = Add(n, f)",
    "Cast": """
        i = Cast <to = 6> (m) t = Transpose(i) s = Transpose(t)
        f = Cast <to = 1> (s) y = Add(n, f)""",
    "Where": "c = Greater(m, zero) y = Where(c, n, zero)",
    "Shape": "s = Shape(m) o = Reshape(n, s) y = Identity(o)",
    "TopK": "a, i = TopK(m, one) f = Cast <to = 1> (i) y = Add(n, f)",
    "QLinearMatMul": """
        q = QuantizeLinear(m, scale, point)
        p = QLinearMatMul(q, scale, point, codes, scale, point, scale, point)
        d = DequantizeLinear(p, scale, point) y = Add(n, d)""",
}
REACHED = {
    "TopK": "a, i = TopK(m, one) y = Add(n, a)",
    "If": """
        y = If (truth) <then_branch = g () => (float[4,3] a) { a = Add(m, n) },
                        else_branch = h () => (float[4,3] b) { b = Sub(m, n) }>""",
    "straight through": """
        q = QuantizeLinear(m, scale, point) d = DequantizeLinear(q, scale, point) y = Add(n, d)""",
}
X = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)


def network(body):
    draw = np.random.default_rng(1).standard_normal
    text = f"g (float[4,5] x) => (float[a,b] y) {{ m = MatMul(x, w) n = MatMul(x, v) {body} }}"
    proto = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> {text}')
    tensors = {"w": draw((5, 3)).astype(np.float32), "v": draw((5, 3)).astype(np.float32)}
    tensors |= {"scale": np.float32(0.1), "point": np.uint8(120), "zero": np.float32(0)}
    tensors |= {"one": np.array([1]), "truth": np.array(True)}
    tensors["codes"] = np.arange(100, 109, dtype=np.uint8).reshape(3, 3)
    used = {name for node in proto.graph.node for name in node.input} | {"truth"}
    for name in sorted(used & tensors.keys()):
        value = np.asarray(tensors[name])
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return proto


def moves(proto, name):
    """Whether a small step of a tensor changes what onnxruntime computes."""
    found = []
    for step in (0.0, 1e-5):
        changed = onnx.ModelProto()
        changed.CopyFrom(proto)
        for tensor in changed.graph.initializer:
            if tensor.name == name:
                value = onnx.numpy_helper.to_array(tensor) * np.float32(1 + step)
                tensor.CopyFrom(onnx.numpy_helper.from_array(value, name))
        session = onnxruntime.InferenceSession(changed.SerializeToString())
        found += session.run(None, {"x": X})
    return not np.array_equal(*found)


@pytest.mark.parametrize("kind", GRAPHS)
def test_what_only_integers_are_computed_from_is_frozen(kind):
    proto = network(GRAPHS[kind])
    assert (moves(proto, "w"), moves(proto, "v")) == (False, True)
    model = jaxonnx.load(proto)
    (warning,) = [text for text in model.warnings if "has a gradient" in text]
    assert "with respect to 'w'," in warning
    assert warning.endswith("and trains 'v'")
    settings = {"loss": "squared_error", "optimizer": optax.adamw(0.1), "batch_size": 4}
    data = X, np.zeros_like(model(X))
    for trainable in (None, ["w", "v"]):
        result = jaxonnx.train(model, data, trainable=trainable, **settings)
        assert any("frozen" in note and ": w; trained: v" in note for note in result.history.notes)
        np.testing.assert_array_equal(result.model.tensors["w"], model.params["w"])
        assert (np.asarray(result.model.params["v"]) != model.params["v"]).all()


@pytest.mark.parametrize("kind", REACHED)
def test_what_a_gradient_reaches_is_trained(kind):
    model = jaxonnx.load(network(REACHED[kind]))
    gradient = jax.grad(lambda params: model.apply(params, X).sum())(model.params)
    assert all(np.any(np.asarray(g) != 0) for g in gradient.values())
    assert not any("has a gradient" in text for text in model.warnings)


def test_nothing_to_train():
    model = jaxonnx.load(network("f = ArgMax <axis = 1> (m) y = Cast <to = 1> (f)"))
    with pytest.raises(jaxonnx.TrainingError, match=r"no .* gradient .*v, w.* model\.with_outputs"):
        jaxonnx.train(model, (X, X[:, :1]), loss="squared_error", optimizer=optax.sgd(0.1))
    before = model.with_outputs("m")
    data = X, np.zeros((4, 3), np.float32)
    result = jaxonnx.train(before, data, loss="squared_error", optimizer=optax.sgd(0.1))
    assert (np.asarray(result.model.params["w"]) != before.params["w"]).any()
