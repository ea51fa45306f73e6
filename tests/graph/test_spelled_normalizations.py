"""Normalizations that converters and older exports spell out: what is trained in each."""

import jax
import numpy as np
import onnx.parser
import onnxruntime
import pytest

import jaxonnx

RNG = np.random.default_rng(0)


def file(nodes, shape, **tensors):
    proto = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 17]>
        g (float[{shape}] x) => (float[{shape}] y)
        <float[1] eps = {{0.001}}, float one = {{1}}, float two = {{2}}, float minus = {{-0.5}}>
        {{ {nodes} }}"""
    )
    for name, value in tensors.items():
        value = RNG.uniform(0.5, 1.5, value) if isinstance(value, tuple) else value
        value = np.asarray(value, np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return proto


DEVIATION = """m = ReduceMean <axes = AXES> (x) c = Sub(x, m) q = Mul(c, c)
v = ReduceMean <axes = AXES> (q) e = Add(v, eps) s = Sqrt(e)"""
CASES = {
    # tf.nn.batch_normalization over moments, as tf2onnx writes it
    "converted": (
        DEVIATION + " i = Reciprocal(s) g = Mul(i, gamma) a = Mul(x, g) b = Mul(m, g) "
        "o = Sub(beta, b) y = Add(a, o)",
        {"gamma", "beta"},
    ),
    "quotient": (
        DEVIATION + " d = Div(c, s) a = Mul(gamma, d) y = Add(beta, a)",
        {"gamma", "beta"},
    ),
    "power": (
        "m = ReduceMean <axes = AXES> (x) q = Pow(x, two) r = ReduceMean <axes = AXES> (q) "
        "mm = Mul(m, m) v = Sub(r, mm) w = Relu(v) e = Add(w, eps) i = Pow(e, minus) "
        "c = Sub(x, m) g = Mul(i, gamma) a = Mul(c, g) y = Add(a, beta)",
        {"gamma", "beta"},
    ),
    "root mean square": (
        "q = Mul(x, x) v = ReduceMean <axes = AXES> (q) e = Add(v, eps) s = Sqrt(e) "
        "i = Div(one, s) n = Mul(x, i) a = Mul(n, gamma) y = Identity(a)",
        {"gamma"},
    ),
    "without a scale": (
        DEVIATION + " i = Reciprocal(s) a = Mul(x, i) b = Mul(m, i) o = Sub(beta, b) y = Add(a, o)",
        {"beta"},
    ),
}


@pytest.mark.parametrize("shape", [(16,), (33, 16)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_scale_and_bias_are_trained(case, shape):
    nodes, trained = CASES[case]
    axes = [-1, -2][: len(shape)]
    proto = file(nodes.replace("AXES", str(axes)), "n,33,16", **dict.fromkeys(trained, shape))
    model = jaxonnx.load(proto)
    assert {*model.params} == trained
    x = RNG.normal(size=(2, 33, 16)).astype(np.float32)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    (expected,) = session.run(None, {"x": x})
    with jax.disable_jit():
        np.testing.assert_allclose(model.apply(model.params, x), expected, rtol=1e-4, atol=1e-4)
    new = model.reinitialize(jax.random.key(0), ".*").params
    for name, value in new.items():
        np.testing.assert_array_equal(value, {"gamma": 1, "beta": 0}[name])


STORED = "e = Add(var, eps) s = Sqrt(e) i = Reciprocal(s) "


@pytest.mark.parametrize(
    ("nodes", "trained"),
    [
        (
            STORED + "g = Mul(i, gamma) a = Mul(x, g) b = Mul(mean, g) o = Sub(beta, b) "
            "y = Add(a, o)",
            {"gamma", "beta"},
        ),
        (STORED + "a = Mul(x, i) b = Mul(mean, i) o = Sub(beta, b) y = Add(a, o)", {"beta"}),
        (
            STORED + "c = Sub(x, mean) n = Mul(c, i) a = Mul(n, gamma) y = Add(a, beta)",
            {"gamma", "beta"},
        ),
        ("e = Add(var, eps) s = Sqrt(e) c = Sub(x, mean) a = Div(c, s) y = Add(a, beta)", {"beta"}),
    ],
)
def test_stored_statistics_are_not_trained(nodes, trained):
    tensors = {name for name in ("gamma", "beta", "mean", "var") if name in nodes}
    model = jaxonnx.load(file(nodes, "n,4", **dict.fromkeys(tensors, (4,))))
    assert {*model.params} == trained
    assert {*model.program.constants} >= tensors - trained


@pytest.mark.parametrize(
    ("nodes", "tensors", "trained"),
    [
        ("y = Sub(beta, x)", {"beta": (4,)}, {"beta"}),
        ("y = Sub(x, mean)", {"mean": (4,)}, set()),  # of the data
        # a rotary table behind a normalization over the last axis alone
        (
            "q = Mul(x, x) v = ReduceMean <axes = [-1]> (q) s = Sqrt(v) n = Div(x, s) "
            "a = Mul(n, gamma) y = Mul(a, cos)",
            {"gamma": (4,), "cos": (3, 4)},
            {"gamma"},
        ),
        ("s = Sqrt(d) y = Div(x, s)", {"d": 64.0}, set()),
        ("m = ReduceMean <axes = [-1, -2]> (x) c = Sub(x, m) y = Add(c, w)", {"w": (3, 4)}, set()),
    ],
)
def test_what_is_no_normalization(nodes, tensors, trained):
    model = jaxonnx.load(file(nodes, "3,4", **tensors))
    assert {*model.params} == trained
