"""If, Loop and Scan: values, gradients, what is compiled how, and what is refused."""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import optax
import pytest

import jaxonnx
from jaxonnx.ops import control_flow


def function(text, opset=22):
    """A graph in ONNX's text format as a pure function of its inputs."""
    header = f'<ir_version: 10, opset_import: ["": {opset}]>'
    model = jaxonnx.load(onnx.parser.parse_model(f"{header} {text}"))
    return lambda *inputs: model.apply(model.params, *inputs)


def versions(name, first=1):
    schemas = onnx.defs.get_all_schemas_with_history()
    return sorted(s.since_version for s in schemas if s.name == name and s.since_version >= first)


X = np.array([0.5, -1.0, 2.0], np.float32)

BRANCHES = """
g (bool c, float[3] x) => (float[3] y) {
  y = If (c) <
    then_branch = then () => (float[3] t) { t = Mul(x, x) },
    else_branch = else () => (float[3] e) { e = Neg(x) }
  >
}
"""


@pytest.mark.parametrize("opset", versions("If"))
def test_if_of_every_version(opset):
    f = function(BRANCHES, max(opset, 7))  # Mul and Neg have no legacy attributes from 7 on
    np.testing.assert_array_equal(f(np.array(True), X), X * X)
    np.testing.assert_array_equal(f(np.array(False), X), -X)


def test_a_traced_condition_is_compiled_differentiable_and_batched():
    f = function(BRANCHES)
    gradient = jax.jit(jax.grad(lambda c, x: f(c, x).sum(), argnums=1))
    np.testing.assert_array_equal(gradient(True, X), 2 * X)
    np.testing.assert_array_equal(gradient(False, X), -np.ones(3))
    both = jax.vmap(f, (0, None))(np.array([True, False]), X)
    np.testing.assert_array_equal(both, [X * X, -X])


@pytest.mark.parametrize("count", [1, 7, 8, 9, 63, 64, 65])
def test_a_while_loop_counts_with_two_digits(count, monkeypatch):
    """One counter of 32 bits would end at 2**31 - 1: smaller digits show the same in less time."""
    monkeypatch.setattr(control_flow, "_DIGIT_BITS", 3)
    monkeypatch.setattr(control_flow, "SCAN_LIMIT", 0)
    monkeypatch.setattr(control_flow, "MASKED_LIMIT", 0)
    f = function(f"""
      g (int32 a) => (int32 n, int32 last) <int64 m = {{{count}}}> {{
        n, last = Loop (m, , a, a) <
          body = b (int64 i, bool c, int32 x, int32 y) => (bool d, int32 s, int32 t) {{
            d = Identity(c)
            one = Constant <value = int32 {{1}}> ()
            s = Add(x, one)
            t = Cast <to = 6> (i)
          }}
        >
      }}
    """)
    assert [int(value) for value in f(np.int32(0))] == [count, count - 1]


def test_branches_of_different_shapes_need_a_known_condition():
    f = function("""
      g (bool c, float[3] x) => (float y) {
        y = If (c) <
          then_branch = then () => (float[3] t) { t = Neg(x) },
          else_branch = else () => (float[1,3] e) {
            i = Constant<value_ints = [0]>()
            e = Unsqueeze(x, i)
          }
        >
      }""")
    assert f(np.array(True), X).shape == (3,)
    assert f(jnp.array(False), X).shape == (1, 3)
    with pytest.raises(jaxonnx.Error, match=r"float32\[3\].*float32\[1,3\].*must be known"):
        jax.jit(f)(True, X)


def voice_detector():
    """Weights for two sample rates, of which only one fits the size, as in silero-vad."""
    proto = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 17]> g (
      float[b, n] x, float[1, b, 3] h, float[1, b, 3] c, int64 sr
    ) => (float[b, 3] y, float[1, b, 3] hn, float[1, b, 3] cn) {
      rate = Constant<value = int64 {16000}>()
      wide = Equal(sr, rate)
      axes = Constant<value = int64[1] {0}>()
      rows = Unsqueeze(x, axes)
      y, hn, cn = If(wide) <
        then_branch = t () => (ty, th, tc) {
          ts, th, tc = LSTM<hidden_size = 3>(rows, w16, r16, b16, , h, c) ty = Squeeze(th, axes)
        },
        else_branch = e () => (ey, eh, ec) {
          es, eh, ec = LSTM<hidden_size = 3>(rows, w8, r8, b8, , h, c) ey = Squeeze(eh, axes)
        }>
    }""")
    random = np.random.default_rng(0)
    for rate, size in (("16", 8), ("8", 4)):
        for name, shape in (("w", (1, 12, size)), ("r", (1, 12, 3)), ("b", (1, 24))):
            array = random.normal(size=shape).astype(np.float32)
            proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name + rate))
    return proto


@pytest.mark.parametrize(("size", "rate"), [(8, 16000), (4, 8000)])
def test_an_if_on_a_sample_rate_evaluates_the_branch_that_fits(size, rate):
    proto = voice_detector()
    model, session = jaxonnx.load(proto), onnxruntime.InferenceSession(proto.SerializeToString())
    x = np.random.default_rng(1).normal(size=(2, size)).astype(np.float32)
    h, c = np.random.default_rng(2).normal(size=(2, 1, 2, 3)).astype(np.float32)
    expected = session.run(None, {"x": x, "h": h, "c": c, "sr": np.array(rate)})
    fixed = model.with_fixed_inputs({"sr": rate})
    apply = jax.jit(lambda params, x: model.apply(params, x, h, c, np.int64(rate)))
    for outputs in (
        *(model(x, h, c, sr) for sr in (rate, np.int64(rate), np.array(rate))),
        fixed(x, h, c),
        apply(model.params, x),
    ):
        for ours, theirs in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
    alone = model.with_fixed_inputs({"sr": rate, "h": h, "c": c})
    settings = {"loss": lambda outputs, y: ((outputs[0] - y) ** 2).mean(), "batch_size": 2}
    trained = jaxonnx.train(alone, (x, expected[0]), optimizer=optax.sgd(0.1), **settings)
    assert trained.history.epochs[-1]["loss"] < 1e-9
    exported = jaxonnx.to_onnx(lambda x: fixed(x, h, c)[0], x)
    (y,) = onnxruntime.InferenceSession(exported.SerializeToString()).run(
        None, {exported.graph.input[0].name: x}
    )
    np.testing.assert_allclose(y, expected[0], atol=1e-6)


def test_a_branch_that_cannot_be_traced_names_the_if_and_its_input():
    model = jaxonnx.load(voice_detector())
    x, state = np.zeros((2, 8), np.float32), np.zeros((1, 2, 3), np.float32)
    message = r"node 'y' \(If.*'else' branch cannot be traced.*input 'sr'.*with_fixed_inputs"
    with pytest.raises(jaxonnx.StaticError, match=message):
        jax.jit(model.apply)(model.params, x, state, state, 16000)


POWER = """
g (int64 m, float[3] x) => (float[3] y, float s) {
  c = Constant<value = bool {1}>()
  one = Constant<value_float = 1.0>()
  half = Constant<value_float = 0.5>()
  y, s = Loop (m, c, x) <
    body = b (int64 i, bool go, float[3] v) => (bool stay, float[3] w, float[3] o) {
    stay = Identity(go)
    vx = Mul(v, x)
    w = Mul(vx, half)
    o = Add(w, one)
  }>
}
"""


def power(x, m):
    carry, rows = x, []
    for _ in range(m):
        carry = carry * x * 0.5
        rows.append(carry + 1)
    return carry, jnp.stack(rows)


@pytest.mark.parametrize("opset", versions("Loop"))
def test_loop_of_every_version(opset):
    # opset 1 has no Constant<value_float>; the operator itself is the same from opset 1 on
    y, s = function(POWER, max(opset, 13))(np.array(4), X)
    want, rows = power(X, 4)
    np.testing.assert_allclose(y, want, rtol=1e-6)
    np.testing.assert_allclose(s, rows, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "nodes"),
    [
        ("int64[1]", "k = Squeeze<axes=[0]>(i) row = Gather<axis=0>(table, k)"),
        ("int64[1]", "j = Add(i, one) row = Slice(table, i, j, zero)"),
        ("int64[1]", "row = Cast<to=1>(i)"),
        ("int64", "row = Cast<to=1>(i)"),
    ],
)
@pytest.mark.parametrize("count", [3, 20])
def test_a_counter_has_the_rank_that_the_body_declares(kind, nodes, count):
    """The converters of TensorFlow wrote vectors of length one for opsets 8 to 12."""
    model = onnx.parser.parse_model(f"""<ir_version: 6, opset_import: ["": 11]>
    g (float x, int64 m) => (y)
    <int64[1] one = {{1}}, int64[1] zero = {{0}}, bool go = {{1}}> {{
      rows = Loop (m, go) <
        body = b ({kind} i, bool c) => (bool d, float[a] row) {{ d = Identity(c) {nodes} }}
      >
      y = Add(rows, x)
    }}""")
    row = model.graph.node[0].attribute[0].g.output[1]
    row.type.tensor_type.ClearField("shape")
    values = np.arange(40, dtype=np.float32).reshape(20, 2)
    model.graph.initializer.append(onnx.numpy_helper.from_array(values, "table"))
    given = {"x": np.array(1, np.float32), "m": np.array(count)}
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, given)
    y = jaxonnx.load(model)(**given)
    np.testing.assert_array_equal(y, wanted)


@pytest.mark.deep
def test_a_known_trip_count_is_a_scan_with_gradients_both_ways():
    f = function(POWER)
    program = jax.make_jaxpr(lambda x: f(np.array(5), x))(X)
    assert [e.primitive.name for e in program.eqns].count("scan") == 1
    for got, want in (
        (jax.jacrev(lambda x: f(np.array(5), x)[1])(X), jax.jacrev(lambda x: power(x, 5)[1])(X)),
        (jax.jacfwd(lambda x: f(np.array(5), x)[0])(X), jax.jacfwd(lambda x: power(x, 5)[0])(X)),
        (
            jax.hessian(lambda x: f(np.array(5), x)[0].sum())(X),
            jax.hessian(lambda x: power(x, 5)[0].sum())(X),
        ),
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4)
    rows = np.stack([X, 2 * X])
    for got, want in zip(
        jax.vmap(lambda x: f(np.array(5), x))(rows),
        jax.vmap(lambda x: power(x, 5))(rows),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_thousand_steps_compile_in_seconds():
    f = function(POWER)
    scale = 1 + time.time() % 1  # a program that is in no cache
    loss = jax.jit(jax.grad(lambda x: scale * f(np.array(1000), x)[0].sum()))
    start = time.perf_counter()
    gradient = loss(np.ones(3, np.float32) * 2)
    assert time.perf_counter() - start < 10
    np.testing.assert_allclose(gradient, np.full(3, 1001 * scale), rtol=1e-4)


@pytest.mark.parametrize("m", [0, -1])
def test_no_iteration_gives_empty_scan_outputs(m):
    y, s = function(POWER)(np.array(m), X)
    np.testing.assert_array_equal(y, X)
    assert s.shape == (0, 3)
    assert s.dtype == np.float32
    y, s = jax.jit(lambda x: function(POWER)(np.array(m), x))(X)
    assert s.shape == (0, 3)


def test_a_traced_trip_count_cannot_size_a_scan_output():
    y, _ = function(POWER)(jnp.array(3), X)  # concrete: runs
    np.testing.assert_allclose(y, power(X, 3)[0], rtol=1e-6)
    with pytest.raises(jaxonnx.Error, match="length of a scan output"):
        jax.jit(function(POWER))(3, X)


PREFIXES = """
g (float[3] x) => (float[3] y, float s) {
  m = Constant<value_int = 3>()
  c = Constant<value = bool {1}>()
  zero = Constant<value_ints = [0]>()
  one = Constant<value_int = 1>()
  y, s = Loop (m, c, x) <
    body = b (int64 i, bool go, float[3] v) => (bool stay, float[3] w, float[1] o) {
    stay = Identity(go)
    j = Add(i, one)
    end = Unsqueeze(j, zero)
    part = Slice(v, zero, end)
    o = ReduceSum<keepdims = 1>(part)
    w = Identity(v)
  }>
}
"""


def test_a_body_that_needs_its_counter_is_unrolled():
    f = jax.jit(function(PREFIXES))
    np.testing.assert_allclose(f(X)[1], np.cumsum(X)[:, None], rtol=1e-6)
    gradient = jax.grad(lambda x: f(x)[1].sum())(X)
    np.testing.assert_array_equal(gradient, [3, 2, 1])


UNROLLED = """
g (float[k] x) => (float[n] y) {
  m = Constant<value_int = COUNT>()
  c = Constant<value = bool {1}>()
  y = Loop (m, c, x) <body = b (int64 i, bool go, float[a] v) => (bool stay, float[b] w) {
    stay = Identity(go)
    w = Concat<axis = 0>(v, x)
  }>
}
"""


def unrolled(count):
    text = UNROLLED.replace("COUNT", str(count))
    header = '<ir_version: 10, opset_import: ["": 22]>'
    return jaxonnx.load(onnx.parser.parse_model(f"{header} {text}"))


def test_many_iterations_in_one_program_are_said_once():
    model = unrolled(20)
    before = model.warnings
    words = r"'y' \(Loop, opset 22\) is unrolled.*carried values change.*20 iterations"
    with pytest.warns(UserWarning, match=words) as caught:
        assert model(X).shape == (63,)
    assert len(caught) == 1
    (note,) = model.warnings
    assert not before
    assert re.search(words, note)
    model(np.ones(5, np.float32))  # compiled again; warnings are errors here
    jax.jit(model.apply)(model.params, X)
    assert model.replace(params=model.params).warnings == (note,)
    assert "is unrolled" in str(model)


def test_few_or_known_iterations_are_not_worth_a_word():
    model = unrolled(16)
    model(X)
    assert not model.warnings
    known = unrolled(20)
    known.apply(known.params, X)  # op by op: nothing is compiled
    assert not known.warnings


GROWING = """
g (float[k] x) => (float[n] y) {
  m = Constant<value_int = 3>()
  c = Constant<value = bool {1}>()
  y = Loop (m, c, x) <body = b (int64 i, bool go, float[a] v) => (bool stay, float[b] w) {
    stay = Identity(go)
    w = Concat<axis = 0>(v, x)
  }>
}
"""


def test_carried_values_may_change_shape():
    y, back = jax.vjp(jax.jit(function(GROWING)), X)
    np.testing.assert_array_equal(y, np.tile(X, 4))
    np.testing.assert_array_equal(back(jnp.ones(12, np.float32))[0], [4, 4, 4])


SHAPE = """
g (float[3] x) => (float[n] y) {
  m = Constant<value_int = 4>()
  c = Constant<value = bool {1}>()
  one = Constant<value_ints = [1]>()
  n = Loop (m, c, one) <body = b (int64 i, bool go, int64[1] v) => (bool stay, int64[1] w) {
    stay = Identity(go)
    w = Add(v, v)
  }>
  s = ReduceSum<keepdims = 1>(x)
  y = Expand(s, n)
}
"""


def test_a_loop_over_known_values_stays_known():
    assert jax.jit(function(SHAPE))(X).shape == (16,)


HALVE = """
g (float x) => (float y) {{
  {m}
  c = Constant<value = bool {{1}}>()
  half = Constant<value_float = 0.5>()
  one = Constant<value_float = 1.0>()
  y = Loop ({name}, c, x) <body = b (int64 i, bool go, float v) => (bool stay, float w) {{
    w = Mul(v, half)
    stay = Greater(w, one)
  }}>
}}
"""
BOUNDED = HALVE.format(m="m = Constant<value_int = 50>()", name="m")
UNBOUNDED = HALVE.format(m="", name="")
ENDLESS = HALVE.format(m=f"m = Constant<value_int = {2**63 - 1}>()", name="m")


@pytest.mark.parametrize("text", [BOUNDED, UNBOUNDED, ENDLESS])
def test_a_condition_computed_in_the_body_ends_the_loop(text):
    f = function(text)
    for run in (f, jax.jit(f)):
        for x, steps in ((100.0, 7), (0.5, 1), (3.0, 2)):
            np.testing.assert_allclose(run(np.float32(x)), x / 2**steps, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(f)(np.array([100.0, 3.0], np.float32)), [100 / 128, 0.75])
    assert jax.jvp(f, (jnp.float32(100.0),), (jnp.float32(1.0),))[1] == 1 / 128
    assert jax.jvp(jax.grad(function(BOUNDED)), (jnp.float32(100.0),), (jnp.float32(1.0),))[1] == 0


def test_reverse_mode_needs_a_bounded_loop():
    assert jax.grad(function(BOUNDED))(jnp.float32(100.0)) == 1 / 128
    assert jax.jit(jax.grad(function(BOUNDED)))(jnp.float32(3.0)) == 1 / 4
    for text in (UNBOUNDED, ENDLESS):
        for transform in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))):
            with pytest.raises(jaxonnx.Error, match="known trip count"):
                transform(function(text))(jnp.float32(100.0))


COLLECT = """
g (float x) => (float y, float s) {
  m = Constant<value_int = 50>()
  c = Constant<value = bool {1}>()
  half = Constant<value_float = 0.5>()
  one = Constant<value_float = 1.0>()
  y, s = Loop (m, c, x) <body = b (int64 i, bool go, float v) => (bool stay, float w, float o) {
    w = Mul(v, half)
    stay = Greater(w, one)
    o = Identity(w)
  }>
}
"""


def test_scan_outputs_until_a_condition_fails_need_concrete_values():
    f = function(COLLECT)
    y, s = f(jnp.float32(8.0))
    assert y == 1
    np.testing.assert_array_equal(s, [4, 2, 1])
    with pytest.raises(jaxonnx.Error, match="cannot be compiled"):
        jax.jit(f)(np.float32(8.0))


def test_a_condition_counts_only_where_the_node_has_one():
    """The table of operating modes in the specification; without both, as in onnxruntime."""
    text = HALVE.replace(", c, x)", ", , x)")
    bounded = function(text.format(m="m = Constant<value_int = 5>()", name="m"))
    assert bounded(np.float32(1.0)) == 1 / 32
    endless = function(text.format(m="", name=""))
    assert endless(np.float32(8.0)) == jax.jit(endless)(np.float32(8.0)) == 1


def test_an_initially_false_condition_runs_nothing():
    text = """
      g (bool c, float x) => (float y) {
        half = Constant<value_float = 0.5>()
        y = Loop (, c, x) <body = b (int64 i, bool go, float v) => (bool stay, float w) {
          w = Mul(v, half)
          stay = Greater(w, half)
        }>
      }"""
    for run in (function(text), jax.jit(function(text))):
        assert run(np.array(False), np.float32(4.0)) == 4
        assert run(np.array(True), np.float32(4.0)) == 0.5


NESTED = """
g (float[3] x) => (float[3] y) {
  three = Constant<value_int = 3>()
  two = Constant<value_int = 2>()
  zero = Constant<value_int = 0>()
  c = Constant<value = bool {1}>()
  y = Loop (three, c, x) <body = outer (int64 i, bool go, float[3] v) => (bool stay, float[3] w) {
    stay = Identity(go)
    r = Mod(i, two)
    even = Equal(r, zero)
    w = If (even) <
      then_branch = then () => (float[3] t) {
        t = Loop (two, c, v) <body = inner (int64 j, bool g2, float[3] a) => (bool s2, float[3] b) {
          s2 = Identity(g2)
          ax = Mul(a, x)
          b = Add(ax, v)
        }>
      },
      else_branch = else () => (float[3] e) { e = Sin(v) }
    >
  }>
}
"""


def nested(x):
    v = x
    for i in range(3):
        if i % 2 == 0:
            a = v
            for _ in range(2):
                a = a * x + v
            v = a
        else:
            v = jnp.sin(v)
    return v


def test_nesting_and_outer_values():
    f = jax.jit(function(NESTED))
    np.testing.assert_allclose(f(X), nested(X), rtol=1e-5)
    jacobian = jax.jacrev(f)(X)
    np.testing.assert_allclose(jacobian, jax.jacrev(nested)(X), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax.jacfwd(f)(X), jacobian, rtol=1e-4, atol=1e-5)


def test_iterations_draw_different_random_numbers():
    f = function("""
      g (float[3] x) => (float[3] y, float s) {
        m = Constant<value_int = 3>()
        c = Constant<value = bool {1}>()
        y, s = Loop (m, c, x) <
          body = b (int64 i, bool go, float[3] v) => (bool stay, float[3] w, float[3] o) {
          stay = Identity(go)
          w = Identity(v)
          o = RandomNormalLike(v)
        }>
      }""")
    rows = np.asarray(jax.jit(f)(X)[1])
    assert len({tuple(row) for row in rows}) == 3


SCAN = """
g (float[2] h, float[2,n] x, float[m,2] u) => (float[2] last, float[2,n] y, float[m,2] z) {
  last, y, z = Scan <num_scan_inputs = 2,
    scan_input_axes = [-1, 0], scan_input_directions = [1, 0],
    scan_output_axes = [1, 0], scan_output_directions = [0, 1],
    body = b (float[2] a, float[2] p, float[2] q) => (float[2] n, float[2] o1, float[2] o2) {
      ap = Mul(a, p)
      n = Add(ap, q)
      o1 = Sin(n)
      o2 = Identity(p)
    }> (h, x, u)
}
"""


def scan(h, x, u):
    first, second = [], []
    for t in range(x.shape[1]):
        p = x[:, x.shape[1] - 1 - t]
        h = h * p + u[t]
        first.append(jnp.sin(h))
        second.insert(0, p)
    return h, jnp.stack(first, axis=1), jnp.stack(second)


@pytest.mark.deep
@pytest.mark.parametrize("opset", versions("Scan", first=9))
def test_scan_along_axes_and_directions_of_every_version(opset):
    rng = np.random.default_rng(0)
    values = [rng.normal(size=s).astype(np.float32) for s in ((2,), (2, 4), (4, 2))]
    f = function(SCAN, opset)
    for run in (f, jax.jit(f)):
        for got, want in zip(run(*values), scan(*values), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)
    if opset == 25:
        rows = [np.stack([x, x[::-1]]) for x in values]
        for got, want in zip(jax.vmap(f)(*rows), jax.vmap(scan)(*rows), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)
        for k in range(3):
            got = jax.jacrev(f, argnums=(0, 1, 2))(*values)[k]
            want = jax.jacrev(scan, argnums=(0, 1, 2))(*values)[k]
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want
            )


def test_scan_of_nothing():
    shapes = ((2,), (2, 0), (0, 2))
    last, y, z = function(SCAN)(*(np.zeros(s, np.float32) for s in shapes))
    assert (last.shape, y.shape, z.shape) == ((2,), (2, 0), (0, 2))
    with pytest.raises(jaxonnx.Error, match="one length"):
        function(SCAN)(*(np.zeros(s, np.float32) for s in ((2,), (2, 3), (4, 2))))


@pytest.mark.parametrize(
    "name",
    ["scan_input_axes", "scan_output_axes", "scan_input_directions", "scan_output_directions"],
)
def test_scan_has_a_number_for_each_tensor(name):
    text = re.sub(rf"{name} = \[(-?\d), \d\]", rf"{name} = [\1, 0, 0]", SCAN)
    with pytest.raises(jaxonnx.Error, match=f"{name} has 3 entries for 2 tensors"):
        function(text)(*(np.zeros(s, np.float32) for s in ((2,), (2, 4), (4, 2))))


BATCHED = """
g (int64[2] n, float[2,1] h, float[2,4,1] x) => (float[2,1] last, float[2,4,1] y) {
  last, y = Scan <num_scan_inputs = 1, DIRECTIONS
    body = b (float[1] a, float[1] p) => (float[1] s, float[1] o) {
      s = Add(a, p)
      o = Identity(s)
    }> (LENGTHS, h, x)
}
"""


def test_batched_scan_of_opset_8():
    h, x = np.array([[1.0], [2]], np.float32), np.arange(8, dtype=np.float32).reshape(2, 4, 1)
    n = np.array([2, 4])
    f = function(BATCHED.replace("DIRECTIONS", "").replace("LENGTHS", "n"), 8)
    last, y = jax.jit(f)(n, h, x)
    np.testing.assert_array_equal(last, [[2], [24]])
    np.testing.assert_array_equal(y[:, :, 0], [[1, 2, 0, 0], [6, 11, 17, 24]])
    gradient = jax.grad(lambda x: f(n, h, x)[0].sum())(x)
    np.testing.assert_array_equal(gradient[:, :, 0], [[1, 1, 0, 0], [1, 1, 1, 1]])
    text = BATCHED.replace("DIRECTIONS", "directions = [1],")
    backward = function(text.replace("LENGTHS", ""), 8)
    np.testing.assert_array_equal(backward(n, h, x)[1][:, :, 0], [[4, 6, 7, 7], [9, 15, 20, 24]])
    backward = function(text.replace("LENGTHS", "n"), 8)  # as onnxruntime: from its own end
    np.testing.assert_array_equal(backward(n, h, x)[1][:, :, 0], [[2, 2, 0, 0], [9, 15, 20, 24]])


def test_loops_without_carried_values_and_bodies_with_defaults():
    """A for-loop may list an omitted condition last; what a body is given replaces a default."""
    y, z = function("""
    g (float[2] x) => (float[n] y, float[2] z) <int64 count = {3}> {
      y = Loop(count, "") <body = a (int64 i, bool on) => (bool go, float s) {
          go = Identity(on)
          s = Cast <to = 1> (i)
      }>
      z = Loop(count, "", x) <body = b (int64 j, bool yes, float[2] v) => (bool also, float[2] w)
        <float[2] v = {5, 6}> {
          also = Identity(yes)
          w = Add(v, x)
      }>
    }""")(X[:2])
    np.testing.assert_array_equal(y, [0, 1, 2])
    np.testing.assert_array_equal(z, 4 * X[:2])


def test_no_iterations_of_a_body_whose_outputs_have_no_types():
    """The condition of the fuzzer's loops: the axis is known outside of jit only."""
    model = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["": 18]> g (float[3, 2] x, int64[1] axes) => (y)
        <int64 count = {0}> {
          y = Loop (count, "") <body = b (int64 i, bool go) => (bool go, s) {
            s = ReduceL2 <keepdims = 0> (x, axes)
          }>
        }
        """
    )
    model.graph.node[0].attribute[0].g.output[1].ClearField("type")
    f = jaxonnx.load(model)
    x = np.zeros((3, 2), np.float32)
    assert f(x, np.array([0])).shape == (0, 2)
    with pytest.raises(jaxonnx.Error, match="axis 7 is out of range"):
        f(x, np.array([7]))


def test_a_body_takes_what_the_loop_has_though_it_has_no_iterations():
    body = """body = b (int64 i, bool go) => (bool go, s) { s = Abs (x) }"""
    f = function(f"g (float[3] x) => (y) <int64 m = {{0}}> {{ y = Loop (m, , x) <{body}> }}")
    with pytest.raises(jaxonnx.Error, match="the body 'b' takes 2 inputs, and was given 3"):
        f(X)
    body = """body = b (r) => (s) { s = Abs (r) }"""
    f = function(f"g (h, x) => (y, z) {{ y, z = Scan <num_scan_inputs = 1, {body}> (h, x) }}")
    with pytest.raises(jaxonnx.Error, match="the body 'b' takes 1 inputs, and was given 2"):
        f(X, X[:0])


@pytest.mark.parametrize("count", [0, 2])
def test_a_sequence_is_no_scan_output(count):
    body = "body = b (int64 i, bool go) => (bool go, s) { s = SequenceConstruct (x, x) }"
    count = f"<int64 m = {{{count}}}, bool t = {{1}}>"
    f = function(f"g (float[3] x) => (y) {count} {{ y = Loop (m, t) <{body}> }}")
    with pytest.raises(jaxonnx.Error, match="the scan output 's' is not a tensor"):
        f(X)
