"""The Gradient operator of ai.onnx.preview.training, against jax.grad on hand-written code."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxonnx
from tests.support.paths import DATA

HEADER = '<ir_version: 10, opset_import: ["": 22, "ai.onnx.preview.training": 1, "local": 1]>'


def load(text, functions=""):
    """A model in ONNX's text format; `Gradient` stands for the operator with its domain."""
    text = f"{HEADER}\n{text}\n{functions}".replace(
        " Gradient", " ai.onnx.preview.training.Gradient"
    )
    return jaxonnx.load(onnx.parser.parse_model(text))


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def close(got, want, rtol=1e-5, atol=1e-6):
    np.testing.assert_allclose(
        np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=rtol, atol=atol
    )


# The figures of the operator's documentation: X, W --Conv--> H --Gemm--> Y, here with a MatMul in
# place of the convolution, and a Tanh, lest the derivatives be constant.
X, W, Z = normal(4, 3), normal(3, 5), normal(5, 2)
NETWORK = """
g (float[4,3] X, float[3,5] W, float[5,2] Z, float[4,5] H1, float[5,2] Z1) => ({outputs}) {{
  XW = MatMul(X, W)
  H = Tanh(XW)
  HZ = MatMul(H, Z)
  Y = Sin(HZ)
  {gradient}
}}
"""


def network(gradient, *outputs):
    text = NETWORK.format(outputs=", ".join(f"float {name}" for name in outputs), gradient=gradient)
    return load(text)(X, W, Z, normal(4, 5, seed=1), normal(5, 2, seed=2))


def f(X, W, Z):
    return jnp.sin(jnp.tanh(X @ W) @ Z).sum()


def h(H, Z):
    return jnp.sin(H @ Z).sum()


def test_several_xs_and_a_z():
    dW, dZ = network('dW, dZ = Gradient<xs=["W", "Z"], zs=["X"], y="Y">(W, Z, X)', "dW", "dZ")
    want = jax.grad(f, (1, 2))(X, W, Z)
    close(dW, want[0])
    close(dZ, want[1])


def test_constants_need_not_be_listed():
    dW = network('dW = Gradient<xs=["W"], y="Y">(W)', "dW")
    close(dW, jax.grad(f, 1)(X, W, Z))


def test_vector_y_is_summed():
    """The documentation leaves the cotangent open; ONNX's cases and every framework take ones."""
    dX = network('dX = Gradient<xs=["X"], y="XW">(X)', "dX")
    close(dX, jnp.broadcast_to(W.sum(1), (4, 3)))


def test_intermediate_x():
    dH, dZ = network('dH, dZ = Gradient<xs=["H", "Z"], y="Y">(H, Z)', "dH", "dZ")
    want = jax.grad(h, (0, 1))(jnp.tanh(X @ W), Z)
    close(dH, want[0])
    close(dZ, want[1])


def test_other_values_fed():
    """dY/dH when H = H1, dY/dZ when Z = Z1: the last figure of the documentation."""
    dH, dZ, Y = network('dH, dZ = Gradient<xs=["H", "Z"], y="Y">(H1, Z1)', "dH", "dZ", "Y")
    want = jax.grad(h, (0, 1))(normal(4, 5, seed=1), normal(5, 2, seed=2))
    close(dH, want[0])
    close(dZ, want[1])
    close(Y, jnp.sin(jnp.tanh(X @ W) @ Z))


def test_other_values_fed_to_zs():
    dH = network('dH = Gradient<xs=["H"], zs=["Z"], y="Y">(H1, Z1)', "dH")
    close(dH, jax.grad(h)(normal(4, 5, seed=1), normal(5, 2, seed=2)))


def test_fed_value_may_have_another_shape():
    text = """
    g (float[3] x, float[5] other) => (float[5] dx) {
      y = Exp(x)
      dx = Gradient<xs=["x"], y="y">(other)
    }"""
    other = normal(5)
    close(load(text)(normal(3), other), np.exp(other))


def test_skipped_outputs():
    model = onnx.parser.parse_model(
        HEADER + "g (float[2] a, float[2] b) => (float[2] db) { y = Mul(a, b)\n db = Neg(y) }"
    )
    gradient = onnx.helper.make_node(
        "Gradient", ["a", "b"], ["", "db"], domain="ai.onnx.preview.training", xs=["a", "b"], y="y"
    )
    model.graph.node[1].CopyFrom(gradient)
    a, b = normal(2), normal(2, seed=1)
    close(jaxonnx.load(model)(a, b), a)


def test_y_independent_of_x_gives_zeros():
    dX, dZ = network('dX, dZ = Gradient<xs=["X", "Z"], y="H">(X, Z)', "dX", "dZ")
    close(dX, jax.grad(lambda X: jnp.tanh(X @ W).sum())(X))
    close(dZ, np.zeros_like(Z))


def test_y_may_be_an_x():
    dH = network('dH = Gradient<xs=["H"], y="H">(H)', "dH")
    close(dH, np.ones((4, 5)))


def test_several_gradients_on_one_graph():
    gradient = """
    dW = Gradient<xs=["W"], zs=["X", "Z"], y="Y">(W, X, Z)
    dZ = Gradient<xs=["Z"], zs=["X", "W"], y="Y">(Z, X, W)
    dH = Gradient<xs=["X"], y="H">(X)
    """
    dW, dZ, dH = network(gradient, "dW", "dZ", "dH")
    close(dW, jax.grad(f, 1)(X, W, Z))
    close(dZ, jax.grad(f, 2)(X, W, Z))
    close(dH, jax.grad(lambda X: jnp.tanh(X @ W).sum())(X))


def test_initializer_as_x():
    text = """
    g (float[3] x) => (float[3] dw) <float[3] w = {1, 2, 3}> {
      p = Mul(x, w)
      y = Exp(p)
      dw = Gradient<xs=["w"], y="y">(w)
    }"""
    x = normal(3)
    close(load(text)(x), x * np.exp(x * [1, 2, 3]))


# Higher order.

SCALAR = """
g (float a, float b, float v) => ({outputs}) {{
  sin = Sin(a)
  ab = Mul(sin, b)
  b2 = Mul(b, b)
  y = Mul(ab, b2)
  {gradient}
}}
"""


def scalar(gradient, *outputs):
    listed = ", ".join(f"float {name}" for name in outputs)
    return load(SCALAR.format(outputs=listed, gradient=gradient))(0.7, 1.3, 2.0)


def test_second_and_third_order():
    gradient = """
    ya, yb = Gradient<xs=["a", "b"], y="y">(a, b)
    yaa, yab = Gradient<xs=["a", "b"], y="ya">(a, b)
    yba, ybb = Gradient<xs=["a", "b"], y="yb">(a, b)
    yabb = Gradient<xs=["b"], zs=["a"], y="yab">(b, a)
    yaaa = Gradient<xs=["a"], y="yaa">(a)
    """
    got = scalar(gradient, "ya", "yb", "yaa", "yab", "yba", "ybb", "yabb", "yaaa")
    b, s, c = 1.3, np.sin(0.7), np.cos(0.7)
    want = (c * b**3, 3 * s * b**2, -s * b**3, 3 * c * b**2, 3 * c * b**2, 6 * s * b, 6 * c * b)
    close(got, (*want, -c * b**3))


def test_second_order_at_another_point():
    """Each Gradient is evaluated where its own inputs say, the inner one too."""
    gradient = """
    ya = Gradient<xs=["a"], y="y">(v)
    yav, yab = Gradient<xs=["v", "b"], y="ya">(v, b)
    yaa = Gradient<xs=["a"], y="ya">(a)
    """
    yav, yab, yaa = scalar(gradient, "yav", "yab", "yaa")
    close(yav, -np.sin(2.0) * 1.3**3)
    close(yab, np.cos(2.0) * 3 * 1.3**2)
    close(yaa, 0)


def test_second_order_figure():
    """d(dO/dW)/dX and d2O/dW2 of the documentation's linear model with a squared loss."""
    text = """
    g (float[4,3] X, float[3,2] W, float[4,2] L) => (float WX, float WW) {
      Y = MatMul(X, W)
      E = Sub(Y, L)
      O = Mul(E, E)
      dX, dW = Gradient<xs=["X", "W"], zs=["L"], y="O">(X, W, L)
      WX, WW = Gradient<xs=["X", "W"], zs=["L"], y="dW">(X, W, L)
    }"""
    W, L = normal(3, 2), normal(4, 2)
    WX, WW = load(text)(X, W, L)

    def dW(X, W):
        return jax.grad(lambda W: ((X @ W - L) ** 2).sum())(W).sum()

    close(WX, jax.grad(dW, 0)(X, W))
    close(WW, jax.grad(dW, 1)(X, W))


def test_hessian_vector_product():
    gradient = """
    g = Gradient<xs=["Z"], y="Y">(Z)
    gv = Mul(g, Z1)
    Hv = Gradient<xs=["Z"], zs=["Z1"], y="gv">(Z, Z1)
    """
    Hv = network(gradient, "Hv")
    v = normal(5, 2, seed=2)
    hessian = jax.hessian(f, 2)(X, W, Z)
    close(Hv, jnp.einsum("abcd,cd->ab", hessian, v))


# Control flow and functions.


@pytest.mark.parametrize("positive", [True, False])
def test_gradient_inside_if(positive):
    text = """
    g (float[3] x, bool c) => (float[3] d) {
      s = Sin(x)
      d = If(c) <
        then_branch = g1 () => (float[3] d1) {
          y1 = Mul(s, x)
          d1 = Gradient<xs=["x"], y="y1">(x)
        },
        else_branch = g2 () => (float[3] d2) { d2 = Gradient<xs=["s"], y="s">(s) }
      >
    }"""
    x = normal(3)
    want = np.cos(x) * x + np.sin(x) if positive else np.ones(3)
    close(load(text)(x, positive), want)


def test_gradient_inside_loop():
    """Three steps of gradient descent on (x - 1)^4, the loop in the graph."""
    text = """
    g (float x) => (float last, float[3] path) {
      M = Constant<value_int = 3>()
      cond = Constant<value = bool {1}>()
      one = Constant<value_float = 1.0>()
      rate = Constant<value_float = 0.1>()
      last, path = Loop(M, cond, x) <
          body = b (int64 i, bool c, float w) => (bool c1, float w1, float p) {
        c1 = Identity(c)
        e = Sub(w, one)
        e2 = Mul(e, e)
        loss = Mul(e2, e2)
        dw = Gradient<xs=["w"], y="loss">(w)
        rdw = Mul(rate, dw)
        w1 = Sub(w, rdw)
        p = Identity(w1)
      }>
    }"""
    last, path = load(text)(np.float32(2))
    w, want = 2.0, []
    for _ in range(3):
        w = w - 0.1 * 4 * (w - 1) ** 3
        want.append(w)
    close(path, want)
    close(last, w)


def test_gradient_inside_scan():
    text = """
    g (float[4,3] xs, float[3] w) => (float[3] total, float[4,3] d) {
      total, d = Scan(w, xs) <num_scan_inputs = 1,
          body = b (float[3] s, float[3] x) => (float[3] s1, float[3] dx) {
        wx = Mul(w, x)
        y = Sin(wx)
        dx = Gradient<xs=["x"], y="y">(x)
        s1 = Add(s, dx)
      }>
    }"""
    xs, w = normal(4, 3), normal(3)
    total, d = load(text)(xs, w)
    close(d, w * np.cos(w * xs))
    close(total, w + (w * np.cos(w * xs)).sum(0))


def test_gradient_inside_a_function():
    functions = """
    <opset_import: ["": 22, "ai.onnx.preview.training": 1], domain: "local">
    Derivative (x) => (dx) {
      s = Sin(x)
      y = Mul(s, x)
      dx = Gradient<xs=["x"], y="y">(x)
    }"""
    text = """
    g (float[3] z) => (float[3] dx, float[3] dz) {
      x = Exp(z)
      dx = local.Derivative(x)
      dz = Gradient<xs=["z"], y="dx">(z)
    }"""
    z = normal(3)
    dx, dz = load(text, functions)(z)
    x = np.exp(z)
    close(dx, np.sin(x) + x * np.cos(x))
    close(dz, (2 * np.cos(x) - x * np.sin(x)) * x)


@pytest.mark.parametrize("positive", [True, False])
def test_y_through_if(positive):
    text = """
    g (float[3] x, bool c) => (float[3] d) {
      s = Sin(x)
      y = If(c) <
        then_branch = g1 () => (float[3] y1) { y1 = Mul(s, x) },
        else_branch = g2 () => (float[3] y2) { y2 = Exp(s) }
      >
      d = Gradient<xs=["x"], y="y">(x)
    }"""
    x = normal(3)
    s, c = np.sin(x), np.cos(x)
    close(load(text)(x, positive), c * x + s if positive else np.exp(s) * c)


def test_y_through_loop():
    """y = x multiplied three times by sin(w): w is captured by the body."""
    text = """
    g (float x, float w) => (float dx, float dw) {
      M = Constant<value_int = 3>()
      cond = Constant<value = bool {1}>()
      s = Sin(w)
      y = Loop(M, cond, x) <body = b (int64 i, bool c, float v) => (bool c1, float v1) {
        c1 = Identity(c)
        v1 = Mul(v, s)
      }>
      dx, dw = Gradient<xs=["x", "w"], y="y">(x, w)
    }"""
    dx, dw = load(text)(np.float32(1.5), np.float32(0.7))
    s, c = np.sin(0.7), np.cos(0.7)
    close(dx, s**3)
    close(dw, 1.5 * 3 * s**2 * c)


def test_y_through_scan():
    text = """
    g (float[4,3] xs, float[3] w) => (float[4,3] dxs, float[3] dw) {
      y, all = Scan(w, xs) <num_scan_inputs = 1,
          body = b (float[3] s, float[3] x) => (float[3] s1, float[3] o) {
        sx = Mul(s, x)
        s1 = Sin(sx)
        o = Mul(s1, w)
      }>
      dxs, dw = Gradient<xs=["xs", "w"], y="all">(xs, w)
    }"""
    xs, w = normal(4, 3), normal(3)

    def total(xs, w):
        s, result = w, 0.0
        for x in xs:
            s = jnp.sin(s * x)
            result += (s * w).sum()
        return result

    got = load(text)(xs, w)
    for a, b in zip(got, jax.grad(total, (0, 1))(xs, w), strict=True):
        close(a, b)


def test_second_order_through_a_gradient_inside_if():
    """The branch reads y, and e behind it, by an attribute only; the outer Gradient must know."""
    text = """
    g (float[3] x, bool c) => (float[3] d2) {
      s = Sin(x)
      e = Exp(x)
      y = Mul(s, e)
      d = If(c) <
        then_branch = g1 () => (float[3] d1) { d1 = Gradient<xs=["s"], y="y">(s) },
        else_branch = g2 () => (float[3] e1) { e1 = Identity(x) }
      >
      dd = Mul(d, d)
      d2 = Gradient<xs=["x"], y="dd">(x)
    }"""
    x = normal(3)
    close(load(text)(x, True), 2 * np.exp(2 * x))


# Operators with two behaviours.


@pytest.mark.deep
def test_y_through_batch_normalization_in_training():
    text = """
    g (float[6,2] x, float[2] scale, float[2] bias) => (float[6,2] dx, float[2] dscale)
    <float[2] mean = {0, 0}, float[2] var = {1, 1}> {
      n, m, v = BatchNormalization<training_mode = 1, epsilon = 0.001>(x, scale, bias, mean, var)
      y = Exp(n)
      dx, dscale = Gradient<xs=["x", "scale"], y="y">(x, scale)
    }"""
    x, scale, bias = normal(6, 2), normal(2), normal(2, seed=1)

    def y(x, scale):
        n = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 0.001)
        return jnp.exp(n * scale + bias).sum()

    model = load(text)
    got, state = model.apply_train(model.params, model.state, None, x, scale, bias)
    close(state["mean"], 0.1 * x.mean(0))  # renewed once, by the node itself
    for a, b in zip(got, jax.grad(y, (0, 1))(x, scale), strict=True):
        close(a, b, rtol=1e-4, atol=1e-5)


def test_dropout_drops_the_same_in_the_gradient():
    text = """
    g (float[64] x) => (float[64] y, float[64] dx) <float ratio = {0.5}, bool training = {1}> {
      d = Dropout<seed = 7>(x, ratio, training)
      y = Sin(d)
      dx = Gradient<xs=["x"], y="y">(x)
    }"""
    x = normal(64)
    model = load(text)
    (y, dx), _ = model.apply_train({}, model.state, jax.random.key(0), x)
    kept = np.asarray(y) != 0
    assert 0 < kept.sum() < 64
    close(dx, np.where(kept, 2 * np.cos(2 * x), 0), rtol=1e-4)


# Types.


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float", "double"])
def test_types(dtype):
    text = f"""
    g ({dtype}[5] x) => ({dtype}[5] dx) {{
      s = Sin(x)
      y = Mul(s, x)
      dx = Gradient<xs=["x"], y="y">(x)
    }}"""
    kind = {"float16": jnp.float16, "bfloat16": jnp.bfloat16, "float": jnp.float32}.get(dtype)
    with jax.enable_x64(True):
        x = normal(5, dtype=np.float64).astype(kind or np.float64)
        dx = load(text)(x)
    assert dx.dtype == x.dtype
    x = x.astype(np.float64)
    rtol = {"float16": 1e-2, "bfloat16": 5e-2, "float": 1e-6, "double": 1e-14}[dtype]
    close(dx, np.sin(x) + x * np.cos(x), rtol, rtol)


def test_integer_z_shapes_the_graph():
    """A z that is known stays known: shape arithmetic works beyond the cut."""
    text = """
    g (float[6] x) => (float[6] dx) <int64[2] shape = {2, 3}> {
      r = Reshape(x, shape)
      y = Sin(r)
      dx = Gradient<xs=["x"], zs=["shape"], y="y">(x, shape)
    }"""
    x = normal(6)
    close(load(text)(x), np.cos(x))


@pytest.mark.deep
@pytest.mark.parametrize("file", ["lenet.dynamo.onnx"])
def test_gradients_share_the_forward_pass(file):
    """The compiled FLOPs of the outputs and one Gradient per parameter are value_and_grad's."""
    model = jaxonnx.load(DATA / file)
    proto = model.to_onnx()
    proto.opset_import.add(domain="ai.onnx.preview.training", version=1)
    integer = onnx.TensorProto.INT64
    proto.graph.input.append(onnx.helper.make_tensor_value_info("t", integer, ["batch"]))
    loss = onnx.helper.make_node("SoftmaxCrossEntropyLoss", ["logits", "t"], ["loss"])
    proto.graph.node.append(loss)
    for name in model.params:
        settings = {"domain": "ai.onnx.preview.training", "xs": [name], "zs": ["x"], "y": "loss"}
        node = onnx.helper.make_node("Gradient", [name, "x"], [f"d{name}"], **settings)
        proto.graph.node.append(node)
        shape = model.params[name].shape
        value = onnx.helper.make_tensor_value_info(f"d{name}", onnx.TensorProto.FLOAT, shape)
        proto.graph.output.append(value)
    extended = jaxonnx.load(proto)
    x = np.arange(8 * np.prod(model.inputs[0].shape[1:])) % 13
    x = jnp.asarray(x.reshape(8, *model.inputs[0].shape[1:]).astype(model.inputs[0].dtype))
    t = jnp.arange(8)

    def by_hand(params):
        def objective(params):
            logits = model.apply(params, x)
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), t[:, None], 1)
            return -picked.mean(), logits

        return jax.value_and_grad(objective, has_aux=True)(params)

    by_graph, by_hand = (
        jax.jit(function).lower(model.params).compile()
        for function in (lambda params: extended.apply(params, x, t), by_hand)
    )
    flops = (program.cost_analysis()["flops"] for program in (by_graph, by_hand))
    np.testing.assert_allclose(*flops, rtol=0.01)
    outputs = by_graph(model.params)
    (_, logits), gradients = by_hand(model.params)
    close(outputs[0], logits, rtol=1e-4, atol=1e-5)
    for name, got in zip(model.params, outputs[1:], strict=True):
        close(got, gradients[name], rtol=1e-4, atol=1e-5)


# A property: Gradient is what finite differences say, on random graphs of smooth operators.

UNARY = ("Sin", "Cos", "Tanh", "Sigmoid", "Exp", "Erf", "Softplus", "Atan", "Asinh", "Neg", "Mish")
UNARY += ("Gelu", "Softmax", "LogSoftmax", "Identity")
BINARY = ("Add", "Sub", "Mul", "Mean", "MatMul")


@st.composite
def smooth_graphs(draw):
    """Twenty operators on 3x3 matrices a and b, each on earlier values, and the last value."""
    values, lines = ["a", "b"], []
    for i in range(20):
        operator = draw(st.sampled_from(UNARY + BINARY))
        inputs = [draw(st.sampled_from(values)) for _ in range(1 + (operator in BINARY))]
        # A tanh behind each keeps exponentials of products in the range of finite differences.
        lines.append(f"u{i} = {operator}({', '.join(inputs)})")
        lines.append(f"v{i} = Tanh(u{i})")
        values.append(f"v{i}")
    return "\n".join(lines), values[-1]


@pytest.mark.deep
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(smooth_graphs())
def test_random_graphs_against_finite_differences(graph):
    lines, y = graph
    text = f"""
    g (double[3,3] a, double[3,3] b) => (double[3,3] {y}, double[3,3] da, double[3,3] db) {{
      {lines}
      da, db = Gradient<xs = ["a", "b"], y = "{y}">(a, b)
    }}"""

    @jax.jit
    def both_ways(a, b):
        def along(da, db):
            forward, backward = (model.apply({}, a + s * da, b + s * db)[0] for s in (1, -1))
            return (forward - backward).sum() / 2e-5

        steps = 1e-5 * jnp.eye(9).reshape(9, 3, 3)
        none = jnp.zeros((3, 3))
        by_a = jax.vmap(along, (0, None))(steps, none)
        by_b = jax.vmap(along, (None, 0))(none, steps)
        return model.apply({}, a, b)[1:], (by_a.reshape(3, 3), by_b.reshape(3, 3))

    with jax.enable_x64(True):
        model = load(text)
        gradients, differences = both_ways(*(normal(3, 3, seed=i, dtype=float) for i in range(2)))
    for got, want in zip(gradients, differences, strict=True):
        close(got, want, rtol=1e-6, atol=1e-8)


# Errors.


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        ('d = Gradient<xs=["i"], y="y">(i)', "'i' in xs has type int32"),
        ('d = Gradient<xs=["x"], y="j">(x)', "y, 'j', has type int32"),
        ('d = Gradient<xs=["x"], y="nothing">(x)', "'nothing'"),
        ('d = Gradient<xs=["nothing"], y="y">(x)', "'nothing'"),
        ('d = Gradient<xs=["x"], zs=["nothing"], y="y">(x, x)', "'nothing'"),
        ('d = Gradient<xs=["x", "s"], y="y">(x, s)', "'s' in xs and zs is computed from"),
        ('d = Gradient<xs=["s"], zs=["x"], y="y">(s, x)', "'s' in xs and zs is computed from"),
        ('d = Gradient<xs=["x", "x"], y="y">(x, x)', "'x' stands twice in xs and zs"),
        ('d = Gradient<xs=["x"], zs=["i"], y="y">(x)', "xs and zs name 2 tensors, but 1"),
        ('d = Gradient<xs=["x"], y="y">(x, x)', "xs and zs name 1 tensors, but 2"),
        ('d, e = Gradient<xs=["x"], y="y">(x)', "xs names 1 tensors"),
        ('d = Gradient<y="y">(x)', r"lacks the required attributes \['xs'\]"),
    ],
)
def test_errors_name_the_attribute(gradient, message):
    text = f"""
    g (float[3] x, int32[3] i) => (float[3] d) {{
      s = Sin(x)
      j = Neg(i)
      y = Mul(s, x)
      {gradient}
    }}"""
    with pytest.raises(jaxonnx.Error, match=message):
        load(text)(normal(3), np.arange(3, dtype=np.int32))


@pytest.mark.parametrize("inputs", [["", "x"], ["x", ""]])
def test_missing_input(inputs):
    model = onnx.parser.parse_model(
        HEADER + "g (float[2] x, float[2] z) => (float[2] d) { y = Mul(x, z)\n d = Neg(y) }"
    )
    gradient = onnx.helper.make_node(
        "Gradient", inputs, ["d"], domain="ai.onnx.preview.training", xs=["x"], zs=["z"], y="y"
    )
    model.graph.node[1].CopyFrom(gradient)
    with pytest.raises(jaxonnx.Error, match="xs and zs name 2 tensors, but 1 inputs are given"):
        jaxonnx.load(model)(normal(2), normal(2))
