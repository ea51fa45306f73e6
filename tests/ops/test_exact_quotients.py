"""Step functions behind a division: every integer is that of onnxruntime and of NumPy.

XLA:CPU multiplies by the inverse where it can (`jaxonnx.lowering.divide`), so each test holds for
numbers whose product with the inverse is on the other side of a step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import onnx.parser
import onnxruntime
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

import jaxonnx

K = np.arange(4096, dtype=np.float32)
DIVISORS = (3, 7, 10, 41, 49, 0.05, 0.1)


def file(body, inputs="float[n] x", outputs="y", initializers="float c = {41}", **values):
    """Parse a graph; `values` replaces initializers, of which the text has rounded numbers."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => ({outputs}) '
        f"<{initializers}> {{ {body} }}"
    )
    for tensor in model.graph.initializer:
        if tensor.name in values:
            tensor.CopyFrom(numpy_helper.from_array(values[tensor.name], tensor.name))
    return model


def by_onnxruntime(model, **inputs):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, inputs)[0]


STEPS = {
    "Floor": "d = Div(x, c) y = Floor(d)",
    "Ceil": "d = Div(x, c) y = Ceil(d)",
    "Round": "d = Div(x, c) y = Round(d)",
    "Cast": "d = Div(x, c) y = Cast <to = 7> (d)",
    "remainder": "d = Div(x, c) q = Floor(d) p = Mul(q, c) y = Sub(x, p)",
    "Mod": "y = Mod <fmod = 1> (x, c)",
    "Reciprocal": "z = Add(x, c) r = Reciprocal(z) d = Div(r, c) s = Div(d, r) y = Round(s)",
    "twice": "d = Div(x, c) s = Sqrt(c) e = Div(d, s) y = Floor(e)",
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("place", ["initializer", "input"])
def test_steps_behind_div(name, place):
    constant = place == "initializer"
    for divisor in DIVISORS[:5] if name == "remainder" else DIVISORS:
        value = {"c": np.asarray(divisor, np.float32)}
        model = file(
            STEPS[name],
            "float[n] x" if constant else "float[n] x, float c",
            "int64[n] y" if name == "Cast" else "float[n] y",
            "float c = {41}" if constant else "",
            **value,
        )
        inputs = {"x": K} | ({} if constant else value)
        net = jaxonnx.load(model)
        expected = by_onnxruntime(model, **inputs)
        np.testing.assert_array_equal(net(**inputs), expected)
        np.testing.assert_array_equal(jax.jit(net.apply)(net.params, **inputs), expected)


BODIES = {
    "row": "d = Div(x, rows) y = Floor(d)",
    "If": """t = ReduceMax <keepdims = 0> (x) zero = Constant <value_float = 0.0> ()
             b = Greater(t, zero)
             d = If (b) <then_branch = h () => (q) {q = Div(x, c)},
                         else_branch = k () => (q) {q = Identity(x)}>
             y = Floor(d)""",
    "Loop": """m = Constant <value_int = 1> () b = Constant <value = bool {1}> ()
               y = Loop (m, b, x) <body = h (int64 i, bool s, float[n] v) => (s2, w)
                   {s2 = Identity(s) q = Div(v, c) w = Floor(q)}>""",
    "Scan": """y = Scan (x) <num_scan_inputs = 1, body = h (float v) => (w)
                   {q = Div(v, c) w = Floor(q)}>""",
    "dynamic": """d = Div(x, c) f = Floor(d) i = NonZero(x) g = Transpose <perm = [1, 0]> (i)
                  h = Gather(f, g) z = Constant <value_ints = [-1]> () u = Reshape(h, z)
                  v = Div(u, one) y = Floor(v)""",
    "folded": "d = Div(k, c) f = Floor(d) y = Add(f, x)",
    "function": "y = local.Part(x, c)",
}


@pytest.mark.parametrize("name", BODIES)
def test_div_in_every_kind_of_graph(name):
    x = K[1:] if name == "dynamic" else np.zeros_like(K) if name == "folded" else K
    model = file(
        BODIES[name],
        outputs="float[n] y" if name != "row" else "float[m, n] y",
        initializers="float c = {41}, float one = {1}, float[1] k = {1}, float[1] rows = {1}",
        k=K,
        rows=np.float32([[41], [7], [49]]),
    )
    if name == "function":
        part = onnx.parser.parse_function(
            '<domain: "local", opset_import: ["": 21]> Part (x, c) => (y) '
            "{ d = Div(x, c) y = Floor(d) }"
        )
        model.functions.append(part)
        model.opset_import.append(onnx.helper.make_opsetid("local", 1))
    net, expected = jaxonnx.load(model), by_onnxruntime(model, x=x)
    np.testing.assert_array_equal(net(x), expected)
    if name != "dynamic":
        np.testing.assert_array_equal(jax.jit(net.apply)(net.params, x), expected)
    if name not in ("dynamic", "If"):
        rows = jax.jit(jax.vmap(lambda x: net.apply(net.params, x)))(np.stack([x, x]))
        np.testing.assert_array_equal(rows[1], expected)


SCALES = (0.075, 0.02, 0.05, 0.0123, 0.0371, 2 / 255, 1 / 3)


@pytest.mark.parametrize("place", ["initializer", "input", "axis"])
def test_quantize_linear_rounds_halves_as_onnxruntime(place):
    for scale in SCALES:
        s = np.full((3,) if place == "axis" else (), scale, np.float32)
        x = (K * np.float32(scale / 2)).reshape(1, -1).repeat(3, 0)
        model = file(
            "y = QuantizeLinear <axis = 0> (x, s, z)",
            "float[3, n] x" + (", float s" if place == "input" else ""),
            "int16[3, n] y",
            "int16 z = {0}" + ("" if place == "input" else ", float s = {1}"),
            s=s,
            z=np.zeros(s.shape, np.int16),
        )
        inputs = {"x": x} | ({"s": s} if place == "input" else {})
        y = np.asarray(jaxonnx.load(model)(**inputs))
        np.testing.assert_array_equal(y, by_onnxruntime(model, **inputs))
        np.testing.assert_array_equal(y, np.rint(x / np.float32(scale)))


@pytest.mark.parametrize("scale", [0.075, 0.02, 3, 1e-5, 7.3e-6, 6e-8])
def test_quantize_linear_of_all_float16(scale):
    """By scales of which float16 has an inverse, and by those of which it has none."""
    s = np.float16(scale)
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    x = x[np.isfinite(x)]
    model = file(
        "y = QuantizeLinear(x, s, z)",
        "float16[n] x",
        "uint8[n] y",
        "float16 s = {1}, uint8 z = {3}",
        s=s,
    )
    with np.errstate(over="ignore"):
        expected = np.clip(np.rint(x / s).astype(np.float32) + 3, 0, 255)
    np.testing.assert_array_equal(jaxonnx.load(model)(x), expected)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=5, max_size=5))
def test_dynamic_quantize_linear(numbers):
    x = np.float32([*numbers, 0])
    x[np.abs(x) < 1e-30] = 0  # XLA flushes what is smaller
    outputs = "uint8[6] y, float s, uint8 z"
    model = file("y, s, z = DynamicQuantizeLinear(x)", "float[6] x", outputs, "")
    session = onnxruntime.InferenceSession(model.SerializeToString())
    if x.any():
        for mine, theirs in zip(DYNAMIC(x), session.run(None, {"x": x}), strict=True):
            np.testing.assert_array_equal(mine, theirs)


DYNAMIC = jaxonnx.load(
    file("y, s, z = DynamicQuantizeLinear(x)", "float[6] x", "uint8[6] y, float s, uint8 z", "")
)


@pytest.mark.parametrize("kind", ["ReduceMean", "Mean", "GlobalAveragePool", "AveragePool"])
def test_means_of_whole_numbers_are_whole(kind):
    n = 41
    whole = np.arange(1, 200, dtype=np.float32).reshape(-1, 1, 1) * np.ones(n, np.float32)
    body = {
        "ReduceMean": "d = ReduceMean <keepdims = 0> (x, axes)",
        "Mean": f"d = Mean({', '.join(['x'] * n)})",
        "GlobalAveragePool": "d = GlobalAveragePool(x)",
        "AveragePool": f"d = AveragePool <kernel_shape = [{n}]> (x)",
    }
    model = file(
        f"{body[kind]} y = Floor(d)",
        f"float[199, 1, {n}] x",
        "float[...] y".replace("[...]", "[k, l]" if kind == "ReduceMean" else "[k, l, m]"),
        "int64[1] axes = {2}",
    )
    y = np.asarray(jaxonnx.load(model)(whole))
    if kind != "Mean":  # which onnxruntime multiplies by 1 / n
        np.testing.assert_array_equal(y, by_onnxruntime(model, x=whole))
    np.testing.assert_array_equal(y.ravel()[:: y.size // 199], np.arange(1, 200))


TRAINED = {
    "Floor": ("d = Div(x, c) f = Floor(d)", K[41::41], lambda x: np.floor(x / np.float32(41))),
    "QuantizeLinear": (
        "q = QuantizeLinear(x, s, z) f = DequantizeLinear(q, one, z)",
        K[:400] * np.float32(0.0375),
        lambda x: np.rint(x / np.float32(0.075)),
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_step_of_training_divides_exactly(name):
    """The gradient of a factor behind the steps is their sum."""
    body, x, steps = TRAINED[name]
    model = file(
        f"{body} y = Mul(f, w)",
        "float[n, 1] x",
        "float[n, 1] y",
        "float[1] w = {1}, float c = {41}, float one = {1}, float s = {1}, int16 z = {0}",
        s=np.float32(0.075),
    )
    net = jaxonnx.load(model).with_trainable(["w"])
    x = x.reshape(-1, 1)
    result = jaxonnx.train(
        net,
        (x, np.zeros(len(x), np.float32)),
        loss=lambda y, target: y[:, 0],
        optimizer=optax.sgd(2.0**-10),
        epochs=1,
        batch_size=len(x),
    )
    change = 1 - np.asarray(result.model.params["w"], np.float64)
    np.testing.assert_allclose(change * 1024 * len(x), steps(x).sum(), atol=0.2)


def test_an_exported_quotient_is_a_div():
    net = jaxonnx.load(file("d = Div(x, c) y = Floor(d)", "float[5] x", "float[5] y"))
    for function in (lambda x: net.apply({}, x), jax.grad(lambda x: (net.apply({}, x) + x).sum())):
        names = {n.op_type for n in jaxonnx.to_onnx(function, jnp.ones(5)).graph.node}
        assert not names & {"Where", "Equal", "IsNaN", "Not"}
    quotient = jaxonnx.load(file("y = Div(x, c)", "float[5] x", "float[5] y"))
    exported = jaxonnx.to_onnx(lambda x: quotient.apply({}, x), jnp.ones(5))
    assert [n.op_type for n in exported.graph.node] == ["Div"]
