"""Functions that a model carries: attributes, overloads, nesting, and weights passed through."""

import jax
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import optax
import pytest

import jaxonnx

HEADER = '<ir_version: 10, opset_import: ["": 22, "l": 1]>'
X = np.array([[1, -2, 3]], np.float32)


def parse(graph, *functions):
    text = "".join(f'<domain: "l", opset_import: ["": 22, "l": 1]> {f}' for f in functions)
    return onnx.parser.parse_model(f"{HEADER} {graph} {text}")


def graph(nodes, weights=""):
    return f"g (float[n,3] x) => (float[n,k] y) {weights} {{ {nodes} }}"


SCALE = "f <s> (a) => (b) { c = Constant <value_float: float = @s> ()  b = Mul(a, c) }"
DEFAULT = (
    "f <s: float = 3.0> (a) => (b) { c = Constant <value_float: float = @s> ()  b = Mul(a, c) }"
)
CASES = {
    "attribute": (graph("y = l.f <s = 2.0> (x)"), [SCALE], 2 * X),
    "default": (graph("y = l.f (x)"), [DEFAULT], 3 * X),
    "default overridden": (graph("y = l.f <s = 2.0> (x)"), [DEFAULT], 2 * X),
    "two calls": (graph("z = l.f <s = 2.0> (x)  y = l.f <s = 5.0> (z)"), [SCALE], 10 * X),
    "nested": (
        graph("y = l.g <t = 2.0> (x)"),
        [SCALE, "g <t> (a) => (b) { c = l.f <s: float = @t> (a)  b = l.f <s: float = @t> (c) }"],
        4 * X,
    ),
    "an omitted attribute takes the operator's default": (
        graph("y = l.f (x)"),
        ["f <slope> (a) => (b) { b = LeakyRelu <alpha: float = @slope> (a) }"],
        np.array([[1, -0.02, 3]], np.float32),
    ),
    "one attribute used twice": (
        graph("y = l.f <v = 2.0> (x)"),
        ["f <v> (a) => (b) { b = HardSigmoid <alpha: float = @v, beta: float = @v> (a) }"],
        np.clip(2 * X + 2, 0, 1),
    ),
    "an attribute inside a subgraph": (
        graph("y = l.f <s = 2.0> (x)"),
        [
            """f <s> (a) => (b) {
              c = Constant <value_int = 1> ()
              d = Cast <to = 9> (c)
              b = If (d) <
                then_branch = t () => (t) {
                  k = Constant <value_float: float = @s> ()
                  t = Mul(a, k)
                },
                else_branch = e () => (e) { e = Identity(a) }
              >
            }"""
        ],
        2 * X,
    ),
    "several outputs": (
        graph("u, v = l.f (x)  y = Sub(u, v)"),
        ["f (a) => (b, c) { b = Neg(a)  c = Abs(a) }"],
        -X - np.abs(X),
    ),
    "own names": (
        graph("b = Neg(x)  c = l.f(b)  y = l.f(c)"),
        ["f (a) => (b) { c = Neg(a)  b = Exp(c) }"],
        np.exp(-np.exp(X)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_calls(name):
    text, functions, expected = CASES[name]
    model = jaxonnx.load(parse(text, *functions))
    np.testing.assert_allclose(model(X), expected, rtol=1e-6)
    again = jaxonnx.load(model.to_onnx())
    np.testing.assert_allclose(again(X), expected, rtol=1e-6)


def test_an_optional_input():
    proto = parse(
        graph('u = l.f(x, x)  v = l.f(x)  w = l.f(x, "")  z = Add(u, v)  y = Add(z, w)'),
        "f (a, low) => (b) { b = Clip(a, low) }",
    )
    np.testing.assert_allclose(jaxonnx.load(proto)(X), 3 * X)


def test_overloads():
    proto = parse(graph("u = l.f(x)  y = l.f(u)"), "f (a) => (b) { b = Neg(a) }")
    other = onnx.FunctionProto()
    other.CopyFrom(proto.functions[0])
    other.overload = "second"
    other.node[0].op_type = "Exp"
    proto.functions.append(other)
    proto.graph.node[1].overload = "second"
    np.testing.assert_allclose(jaxonnx.load(proto)(X), np.exp(-X), rtol=1e-6)


def test_an_overload_may_call_another():
    proto = parse(graph("y = l.f(x)"), "f (a) => (b) { b = l.f(a) }")
    other = onnx.FunctionProto()
    other.CopyFrom(proto.functions[0])
    other.overload = "second"
    other.node[0].domain, other.node[0].op_type = "", "Exp"
    proto.functions[0].node[0].overload = "second"
    proto.functions.append(other)
    np.testing.assert_allclose(jaxonnx.load(proto)(X), np.exp(X), rtol=1e-6)


def test_weights_keep_their_roles_through_functions(tmp_path):
    proto = parse(
        graph(
            "h = l.layer(x, w, b)  y = Div(h, two)",
            "<float[3,2] w = {1,2,3,4,5,6}, float[2] b = {1,-1}, float[1] two = {2}>",
        ),
        "layer (a, w, b) => (c) { t = Transpose(w)  c = l.linear(a, t, b) }",
        "linear (a, w, b) => (c) { c = Gemm <transB = 1> (a, w, b) }",
    )
    model = jaxonnx.load(proto)
    assert set(model.params) == {"w", "b"}
    changed = model.replace(params={k: v + 1 for k, v in model.params.items()})
    changed.save(tmp_path / "saved.onnx")
    session = onnxruntime.InferenceSession(
        tmp_path / "saved.onnx", providers=["CPUExecutionProvider"]
    )
    np.testing.assert_allclose(session.run(None, {"x": X})[0], changed(X), rtol=1e-5)


def test_errors_inside_a_function_name_the_call():
    proto = parse(
        graph("y = l.f(x)"),
        "f (a) => (b) { c = Constant <value_ints = [7]> ()  b = Reshape(a, c) }",
    )
    with pytest.raises(jaxonnx.NodeError, match=r"'b' \(Reshape"):
        jaxonnx.load(proto)(X)


LAYER = """f (a) => (b) {
  w = Constant <value: tensor = float[3,3] {1, 2, 3, 4, 5, 6, 7, 8, 9}> ()
  v = Constant <value: tensor = float[3] {1, -1, 0}> ()
  s = Constant <value: tensor = float {0.5}> ()
  h = MatMul(a, w)
  g = Add(h, v)
  b = Mul(g, s)
}"""


@pytest.mark.parametrize(
    ("nodes", "functions", "calls"),
    [
        ("y = l.f (x)", [LAYER], 1),
        ("z = l.f (x)  y = l.f (z)", [LAYER], 2),  # one weight, used twice
        ("y = l.g (x)", [LAYER, "g (p) => (q) { w = l.f (p)  q = l.f (w) }"], 2),
    ],
)
def test_weights_in_constants_of_functions_are_trained_and_saved(nodes, functions, calls, tmp_path):
    proto = parse(graph(nodes), *functions)
    model = jaxonnx.load(proto)
    assert {*model.params} == {"l.f/w", "l.f/v"}
    w, v = np.arange(1, 10, dtype=np.float32).reshape(3, 3), np.float32([1, -1, 0])

    def network(w, v):
        y = X
        for _ in range(calls):
            y = (y @ w + v) * 0.5
        return y

    np.testing.assert_allclose(model(X), network(w, v))
    gradient = jax.grad(lambda p: model.apply(p, X).sum())(model.params)
    expected = jax.grad(lambda w: network(w, v).sum())(w)
    np.testing.assert_allclose(gradient["l.f/w"], expected, rtol=1e-5)

    changed = model.replace(
        params={"l.f/w": 2 * model.params["l.f/w"], "l.f/v": model.params["l.f/v"]}
    )
    path = tmp_path / "changed.onnx"
    changed.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": X})[0], network(2 * w, v), rtol=1e-5)
    adapted = jaxonnx.LoRA(1).attach(model, jax.random.key(0))
    assert {*adapted.params} == {"l.f/w.lora_A", "l.f/w.lora_B"}


def test_functions_that_are_cut_off_are_dropped():
    proto = parse(graph("h = Neg(x)  y = l.f (h)"), LAYER)
    model = jaxonnx.load(proto, outputs="h")
    assert not model.params
    assert not model.to_onnx().functions
    assert len(jaxonnx.load(proto, outputs="y").to_onnx().functions) == 1


def test_statistics_in_constants_of_functions_are_renewed():
    function = """f (a) => (b) {
      s = Constant <value: tensor = float[3] {1, 2, 3}> ()
      m = Constant <value: tensor = float[3] {0, 0, 0}> ()
      n = Constant <value: tensor = float[3] {0, 1, 0}> ()
      v = Constant <value: tensor = float[3] {1, 1, 1}> ()
      b = BatchNormalization (a, s, m, n, v)
    }"""
    model = jaxonnx.load(parse(graph("y = l.f (x)"), function))
    assert {*model.params} == {"l.f/s", "l.f/m"}
    assert {*model.state} == {"l.f/n", "l.f/v"}
    x = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    _, state = model.apply_train(model.params, model.state, None, x)
    mean = 0.9 * np.array([0, 1, 0]) + 0.1 * x.mean(0)
    np.testing.assert_allclose(state["l.f/n"], mean, rtol=1e-5, atol=1e-6)
    assert "l.f/v" not in model.with_trainable(".*").params
    data = x, x
    settings = {"optimizer": optax.sgd(0.1), "batch_size": 8, "statistics": "batch"}
    run = jaxonnx.train(model, data, loss="squared_error", **settings)
    np.testing.assert_allclose(run.model.state["l.f/n"], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inner", ["s", "x", "elsewhere"])
def test_a_size_that_a_function_reads_is_an_input_of_the_caller(inner):
    """Whatever the function calls it, the caller's name for it may be another tensor's there."""
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21, "f": 1]>
        g (float[n] x, int64[1] size) => (float[m, n] y) {{ y = f.repeated(size, x) }}
        <domain: "f", opset_import: ["": 21]> repeated ({inner}, v) => (y) {{
            one = Constant<value = int64[1] {{1}}>()
            shape = Concat<axis = 0>({inner}, one)
            y = Expand(v, shape)
        }}""")
    model = jaxonnx.load(proto)
    arguments = np.arange(4, dtype=np.float32), np.array([1])
    with pytest.raises(jaxonnx.StaticError, match="computed from input 'size'") as raised:
        jax.eval_shape(model.apply, model.params, *arguments)
    assert raised.value.inputs == ("size",)
    for size in (2, 3):
        y = model(np.arange(4, dtype=np.float32), np.array([size]))
        np.testing.assert_array_equal(y, np.tile(np.arange(4, dtype=np.float32), (size, 1)))


def test_a_size_that_a_function_computes_from_a_weight_too_is_told_with_it():
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21, "f": 1]>
        g (float[n] x, int64[1] size) => (float[m, n] y) <float[1] w = {2}> {
            y = f.repeated(size, x, w)
        }
        <domain: "f", opset_import: ["": 21]> repeated (s, v, weight) => (y) {
            one = Constant<value = int64[1] {1}>()
            whole = Cast<to = 7>(weight)
            count = Add(s, whole)
            shape = Concat<axis = 0>(count, one)
            y = Expand(v, shape)
        }""")
    model = jaxonnx.load(proto)
    arguments = np.arange(4, dtype=np.float32), np.array([1])
    with pytest.raises(jaxonnx.StaticError, match="from input 'size', tensor 'w'") as raised:
        jax.eval_shape(model.apply, model.params, *arguments)
    assert raised.value.inputs == ()
