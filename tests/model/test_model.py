"""A Model: pure functions, checked arguments, what is compiled and what is not."""

import gc
import logging
import subprocess
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import jaxonnx
from benchmarks.speed import tracing
from jaxonnx import demo
from tests.support.paths import DATA

MODEL = """
g (float[n,3] x, float[n,2] z) => (float[n,2] y)
<float[3,2] w = {1,2,3,4,5,6}, float[2] b = {1,-1}> {
  h = Gemm(x, w, b)
  y = Add(h, z)
}
"""
X = np.array([[1, 2, 3], [0, -1, 1]], np.float32)
Z = np.array([[1, 0], [0, 2]], np.float32)
Y = [[24, 27], [3, 3]]


def parse(text, opset=22, ir=10):
    return onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}]> {text}')


def load(text, opset=22, **options):
    return jaxonnx.load(parse(text, opset), **options)


def test_call_and_apply():
    model = load(MODEL)
    np.testing.assert_array_equal(model(X, Z), Y)
    np.testing.assert_array_equal(model(X, z=Z), Y)
    np.testing.assert_array_equal(model(z=Z, x=X), Y)
    np.testing.assert_array_equal(model.apply(model.params, X, Z), Y)
    np.testing.assert_array_equal(jax.jit(model.apply)(model.params, X, z=Z), Y)


def test_arrays_of_numpy_and_of_jax_share_one_compiled_function(caplog):
    model = load(MODEL)
    x, z = jnp.asarray(X), jnp.asarray(Z)  # each of them may be a program of JAX
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        model(X, Z)
        assert caplog.text.count("Finished XLA compilation") == 1  # nothing is converted outside
        np.testing.assert_array_equal(model(x, Z), Y)
        np.testing.assert_array_equal(model(x, z), Y)
    assert caplog.text.count("Finished XLA compilation") == 1


def test_an_array_may_change_once_the_call_has_returned():
    size = 1200
    model = load(f"""g (float[{size},{size}] x) => (float[{size},{size}] y) {{
      h = MatMul(x, x) k = MatMul(h, h) l = MatMul(k, k) m = MatMul(l, x) y = Add(m, x) }}""")
    memory = np.zeros(4 * size**2 + 64, np.uint8)
    start = -memory.ctypes.data % 64  # so aligned, XLA reads it where it is
    x = memory[start : start + 4 * size**2].view(np.float32).reshape(size, size)
    model(x).block_until_ready()
    x[0, 0] = 1
    y = model(x)
    x[:] = 7
    assert y[0, 0] == 2
    assert y[-1, -1] == 0


@pytest.mark.deep
def test_transformations():
    model = load(MODEL)

    def loss(params, x, z):
        return (model.apply(params, x, z) ** 2).sum()

    gradient = jax.grad(loss)(model.params, X, Z)
    np.testing.assert_allclose(gradient["w"], 2 * X.T @ np.array(Y))
    one_by_one = jax.vmap(
        lambda x, z: model.apply(model.params, x[None], z[None])[0],
    )(X, Z)
    np.testing.assert_array_equal(one_by_one, Y)
    stacked = jax.tree.map(lambda w: jnp.stack([w, 2 * w]), model.params)
    assert jax.vmap(model.apply, (0, None, None))(stacked, X, Z).shape == (2, 2, 2)
    hessian = jax.jacfwd(jax.grad(loss))(model.params, X, Z)
    np.testing.assert_allclose(hessian["b"]["b"], 2 * len(X) * np.eye(2))


@pytest.mark.parametrize(
    ("arguments", "named", "words"),
    [
        ((X,), {}, ["input 'z' is missing", "x: float32[n, 3]"]),
        ((X, Z, Z), {}, ["takes 2 inputs, 3 were given"]),
        ((X, Z), {"q": Z}, ["no input 'q'"]),
        ((X, Z), {"x": X}, ["'x' was given twice"]),
        ((X[0], Z), {}, ["x: float32[n, 3]", "rank 2", "[3]"]),
        ((X[:, :2], Z), {}, ["size 3 along axis 1", "[2, 2]"]),
        ((X, Z[:1]), {}, ["'z' has size 1", "'n' was 2", "input 'x'"]),
        ((X.astype(np.float16), Z), {}, ["float16", ".astype('float32')", "nothing silently"]),
        ((X.astype(np.int32), Z), {}, ["int32"]),
        (("text", Z), {}, ["'x' must be an array, got str"]),
        (([[1, 2, 3], [4]], Z), {}, ["x: float32[n, 3]"]),
    ],
)
def test_arguments_that_do_not_fit(arguments, named, words):
    model = load(MODEL)
    for call in (model, lambda *a, **k: model.apply(model.params, *a, **k)):
        with pytest.raises(jaxonnx.InputError) as caught:
            call(*arguments, **named)
        for word in words:
            assert word in str(caught.value)


@pytest.mark.parametrize("open_dimension", [-1, -7, "", "?", "-1"])
def test_an_open_dimension_without_a_name_is_one_of_its_own(open_dimension):
    proto = parse("""g (float[a,3] x, float[b,2] z) => (float[a,3] y, float[b,2] t) {
      y = Relu(x) t = Relu(z) }""")
    for value in (*proto.graph.input, *proto.graph.output):
        dim = value.type.tensor_type.shape.dim[0]
        if isinstance(open_dimension, int):
            dim.dim_value = open_dimension
        else:
            dim.dim_param = open_dimension
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    model = jaxonnx.load(proto)
    assert [value.shape for value in model.inputs] == [(None, 3), (None, 2)]
    assert "x: float32[?, 3]" in str(model)
    for x, z in ((X, Z), (X[:1], Z)):
        expected = session.run(None, {"x": x, "z": z})
        for result, array in zip(model(x, z), expected, strict=True):
            np.testing.assert_array_equal(result, array)
    assert model.to_onnx().graph.input == proto.graph.input


def test_replace():
    model = load(MODEL)
    doubled = model.replace(params={k: 2 * v for k, v in model.params.items()})
    np.testing.assert_array_equal(model(X, Z), Y)
    np.testing.assert_array_equal(doubled(X, 0 * Z), 2 * np.array(model(X, 0 * Z)))
    with pytest.raises(AttributeError):
        model.params = {}
    with pytest.raises(jaxonnx.InputError, match=r"differ: b"):
        model.replace(params={"w": model.params["w"]})
    with pytest.raises(jaxonnx.InputError, match=r"'b' has shape \[3\], the model's is \[2\]"):
        model.replace(params={**model.params, "b": jnp.zeros(3)})
    with pytest.raises(jaxonnx.InputError, match="state"):
        model.replace(state={"mean": jnp.zeros(3)})
    half = {name: value.astype("float16") for name, value in model.params.items()}
    with pytest.raises(jaxonnx.InputError, match=r"'w' is float16, the .* \.astype\('float32'\)"):
        model.replace(params=half)  # the nodes that read it take float32 alone


def test_an_input_with_a_default_is_given_by_name():
    proto = parse(MODEL)
    proto.graph.input.append(helper.make_tensor_value_info("b", onnx.TensorProto.FLOAT, [2]))
    model = jaxonnx.load(proto)
    assert [value.name for value in model.inputs] == ["x", "z"]
    np.testing.assert_array_equal(model(X, Z), Y)
    np.testing.assert_array_equal(model(X, Z, b=np.float32([0, 0])), np.array(Y) - [1, -1])


WIDE = "g (float[n] x) => (int64[n] i, float[n] y) { i = Cast <to = 7> (x)  y = Neg(x) }"


def test_64_bit_outputs_are_announced():
    with pytest.warns(UserWarning, match=r"64-bit outputs \(i\).*jax_enable_x64"):
        model = load(WIDE)
    assert model(X[0])[0].dtype == np.int32
    with jax.enable_x64(True):
        assert load(WIDE)(X[0])[0].dtype == np.int64


def test_known_values_keep_64_bits():
    model = load("""
        g (float[n] x) => (float[m] y)
        <int64[1] from = {1}, int64[1] to = {9223372036854775807}> { y = Slice(x, from, to) }
    """)
    np.testing.assert_array_equal(model(X[0]), X[0, 1:])


NORMALIZED = """
g (float[n,2,3] x) => (float[n,2,3] y)
<float[2] s = {1,2}, float[2] b = {0,1}, float[2] m = {1,-1}, float[2] v = {4,1}> {
  %s
}
"""
FORMS = {
    "inference": (15, "y = BatchNormalization <epsilon = 0.0> (x, s, b, m, v)"),
    "training_mode": (
        15,
        "y, m1, v1 = BatchNormalization <epsilon = 0.0, training_mode = 1> (x, s, b, m, v)",
    ),
    "five outputs": (
        9,
        "y, m1, v1, m2, v2 = BatchNormalization <epsilon = 0.0> (x, s, b, m, v)",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_batch_normalization_in_every_form(form, tmp_path):
    opset, node = FORMS[form]
    x = np.random.default_rng(0).standard_normal((4, 2, 3)).astype(np.float32)
    model = load(NORMALIZED % node, opset)
    assert set(model.params) == {"s", "b"}
    assert set(model.state) == {"m", "v"}
    scale, bias = np.array([[1], [2]]), np.array([[0], [1]])
    running = (x - [[1], [-1]]) / np.sqrt([[4], [1]]) * scale + bias
    np.testing.assert_allclose(model(x), running, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(model.apply(model.params, x), running, rtol=1e-5, atol=1e-5)

    mean, var = x.mean((0, 2)), x.var((0, 2))
    y, state = model.apply_train(model.params, model.state, None, x)
    expected = (x - mean[:, None]) / np.sqrt(var[:, None]) * scale + bias
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state["m"], 0.9 * np.array([1, -1]) + 0.1 * mean, rtol=1e-5)
    assert not np.allclose(state["v"], model.state["v"])
    np.testing.assert_array_equal(model.state["m"], [1, -1])

    path = tmp_path / "saved.onnx"
    renewed = model.replace(state=state)
    renewed.save(path)
    onnx.checker.check_model(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x})[0], renewed(x), rtol=1e-4, atol=1e-5)


DROPPED = (
    "g (float[n] x) => (float[n] y) <float r = {0.5}, bool t = {1}> { y%s = Dropout(x, r, t) }"
)


@pytest.mark.parametrize("mask", ["", ", mask"])
def test_dropout_exported_in_training_mode(mask, tmp_path):
    model = load(DROPPED % mask, 13)
    assert any("exported in training mode" in warning for warning in model.warnings)
    x = np.ones(1000, np.float32)
    np.testing.assert_array_equal(model(x), x)
    keys = jax.random.split(jax.random.key(0))
    y, again, other = (
        model.apply_train(model.params, model.state, key, x)[0] for key in (*keys[:1], *keys)
    )
    np.testing.assert_array_equal(y, again)
    assert set(np.unique(y)) == {0, 2}
    assert 400 < np.count_nonzero(y) < 600
    assert not np.array_equal(y, other)
    path = tmp_path / "saved.onnx"
    model.save(path)
    onnx.checker.check_model(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], x)


SHAPED = """
g (float[n] x, int64[2] shape) => (float[a,b] y) {
  double = Neg(shape)
  again = Neg(double)
  y = Reshape(x, again)
}
"""


def test_a_value_that_must_be_known_names_its_origin():
    model = load(SHAPED)
    x, shape = np.arange(6, dtype=np.float32), np.array([2, 3])
    assert model.apply({}, x, shape).shape == (2, 3)
    assert jax.jit(lambda x: model.apply({}, x, shape))(x).shape == (2, 3)
    with pytest.raises(jaxonnx.StaticError) as caught:
        jax.jit(model.apply)({}, x, jnp.asarray(shape))
    for word in ("'y' (Reshape", "input 1 ('again')", "input 'shape'", "NumPy array"):
        assert word in str(caught.value)
    assert model(x, shape).shape == (2, 3)


DYNAMIC = """
g (float[n,3] x) => (float[m] y) <float[3,4] w, float[1] zero = {0}> {
  h = MatMul(x, w)
  r = Tanh(h)
  c = Greater(r, zero)
  i = NonZero(c)
  t = Transpose(i)
  k = GatherND(r, t)
  y = Exp(k)
}
"""


def dynamic():
    proto = parse(DYNAMIC)
    w = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(w, "w"))
    return proto, w


def test_the_part_before_a_dynamic_node_is_compiled():
    proto, w = dynamic()
    model = jaxonnx.load(proto)
    for count in (2, 5):
        x = np.random.default_rng(count).standard_normal((count, 3)).astype(np.float32)
        r = np.tanh(x @ w)
        np.testing.assert_allclose(model(x), np.exp(r[r > 0]), rtol=1e-5)
    (parts,) = model.program._plan.parts.values()
    assert set(parts.boundary) == {"c", "r"}
    assert [node.op.name for node in parts.rest.nodes if node.op.dynamic] == ["NonZero"]
    assert (
        "tanh"
        in parts.compiled.alone.lower(
            model.params, model.state, None, {"x": x}, training=False
        ).as_text()
    )
    with pytest.raises(jaxonnx.StaticError, match=r"NonZero.*input 'x'"):
        jax.jit(model.apply)(model.params, x)


DETECTOR = """
g (float[1,3,16,16] image) => (int64[k,3] chosen, float[k,4] found)
<float[6,3,4,4] kernel, float[4,2,1,1] box, float[1,1] unused, int64[3] flat = {1,-1,4},
 int64[3] classes = {1,2,-1}, int64 most = {5}, float overlap = {0.3}, float least = {0.0},
 int64[2] ends = {2,4}, int64[1] last = {2}, int64[1] after = {3}, int64[1] axis = {1}> {
  features = Conv <strides = [4,4]> (image, kernel)
  positive = Relu(features)
  places, rest = Split <axis = 1> (positive, ends)
  split = Transpose <perm = [0,2,3,1]> (rest)
  boxes = Reshape(split, flat)
  scores = Reshape(places, classes)
  chosen = NonMaxSuppression(boxes, scores, most, overlap, least)
  indices = Slice(chosen, last, after, axis)
  row = Squeeze(boxes)
  flatter = Squeeze(indices, axis)
  found = Gather(row, flatter)
}
"""


def test_a_detector():
    proto = parse(DETECTOR)
    draw = np.random.default_rng(0)
    for name, shape in (("kernel", (6, 3, 4, 4)), ("box", (4, 2, 1, 1)), ("unused", (1, 1))):
        value = draw.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    image = draw.standard_normal((1, 3, 16, 16)).astype(np.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "64-bit outputs")
        model = jaxonnx.load(proto)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    chosen, found = session.run(None, {"image": image})
    assert len(chosen)
    np.testing.assert_array_equal(model(image)[0], chosen)
    np.testing.assert_allclose(model(image)[1], found, rtol=1e-4, atol=1e-5)
    (parts,) = model.program._plan.parts.values()
    assert set(parts.boundary) == {"boxes", "scores", "row"}


def constants(text):
    """The longest constant in a lowered program, in characters."""
    return max((len(line) for line in text.splitlines() if "constant" in line), default=0)


@pytest.mark.parametrize("trainable", [None, ["w"]])
def test_no_large_constant_is_compiled_in(trainable):
    proto = parse("""
    g (float[n,64] x) => (float[n,64] y) {
      k = Constant <value_int = 1> ()
      h = MatMul(x, w)
      m = Add(h, mask)
      r = Gather <axis = 1> (m, order)
      y = Add(r, added)
    }""")
    draw = np.random.default_rng(0)
    for name, value in {
        "w": draw.standard_normal((64, 64)).astype(np.float32),
        "mask": draw.standard_normal((1, 64)).astype(np.float32),
        "order": np.resize(np.arange(64, dtype=np.int64), 64),
    }.items():
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    big = numpy_helper.from_array(draw.standard_normal((64, 64)).astype(np.float32))
    proto.graph.node.insert(0, helper.make_node("Constant", [], ["added"], value=big))
    model = jaxonnx.load(proto, trainable=trainable)
    x = np.ones((64, 64), np.float32)
    model(x)
    (parts,) = model.program._plan.parts.values()
    lowered = parts.compiled.alone.lower(model.params, model.state, None, {"x": x}, training=False)
    assert constants(lowered.as_text()) < 2000
    with_state = jax.jit(lambda p, s, x: model.apply(p, x, state=s))
    assert constants(with_state.lower(model.params, model.state, x).as_text()) < 2000


@pytest.mark.deep
def test_an_optimised_file_runs_and_trains(tmp_path, caplog):
    from onnxruntime.transformers import optimizer

    path, fused = tmp_path / "plain.onnx", tmp_path / "fused.onnx"
    onnx.save(tracing.transformer(layers=2, width=32, words=20), path)
    with caplog.at_level(logging.ERROR), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimised = optimizer.optimize_model(str(path), "bert", 4, 32, opt_level=0)
        optimised.save_model_to_file(str(fused))
    operators = {node.op_type for node in onnx.load(fused).graph.node}
    assert {"Attention", "SkipLayerNormalization", "BiasGelu"} <= operators
    tokens = np.random.default_rng(0).integers(0, 20, (2, 5))
    plain, model = jaxonnx.load(path), jaxonnx.load(fused)
    session = onnxruntime.InferenceSession(fused, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(
        model(tokens), session.run(None, {"tokens": tokens})[0], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(model(tokens), plain(tokens), rtol=1e-4, atol=1e-5)

    def loss(params, of):
        return jnp.abs(of.apply(params, tokens)).mean()

    gradients = jax.jit(jax.grad(loss), static_argnums=1)
    gradient, reference = gradients(model.params, model), gradients(plain.params, plain)
    # however the optimizer of this onnxruntime packs them, the learned numbers are the same ones
    assert sum(x.size for x in gradient.values()) == sum(x.size for x in reference.values())
    for name, value in gradient.items():
        assert np.isfinite(value).all()
        assert np.abs(value).max() > 0, name
        if name in reference:
            np.testing.assert_allclose(value, reference[name], rtol=1e-3, atol=1e-5)


def test_three_thousand_nodes_load_and_trace_in_seconds():
    proto = tracing.transformer()
    assert len(proto.graph.node) > 3000
    data, tokens = proto.SerializeToString(), np.zeros((2, 7), np.int32)
    start = time.process_time()
    model = jaxonnx.load(data)
    jaxpr = jax.make_jaxpr(model.apply)(model.params, tokens)
    assert time.process_time() - start < 2
    assert not any(eqn.primitive.name in ("gather", "concatenate") for eqn in jaxpr.eqns[5:])


@pytest.mark.deep
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("external", [False, True])
def test_weights_lie_in_memory_once(external):
    steady, _ = tracing.measure_memory(external)
    assert steady < 1.3


def test_loading_leaves_no_cycle_of_references():
    """One that holds the tensors keeps their bytes until Python looks for cycles."""
    data = tracing.transformer(layers=1, width=16).SerializeToString()
    gc.collect()
    gc.disable()
    try:
        gc.set_debug(gc.DEBUG_SAVEALL)
        model = jaxonnx.load(data)
        gc.collect()
        found = [x for x in gc.garbage if str(getattr(x, "__module__", "")).startswith("jaxonnx")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert model.params
    assert not found


@pytest.mark.deep
def test_importing_and_loading_change_nothing_global():
    code = """
import jax, sys, warnings, numpy
jax.numpy.ones(1)
before = dict(jax.config.values), warnings.filters[:], numpy.geterr()
import jaxonnx
heavy = {"onnxruntime", "matplotlib", "sklearn", "torch", "orbax", "flax", "PIL"} & set(sys.modules)
assert not heavy, heavy
model = jaxonnx.load(sys.argv[1])
model(numpy.ones((1, *model.inputs[0].shape[1:]), "float32"))
assert before[0] == dict(jax.config.values)
assert before[2] == numpy.geterr()
assert before[1] == warnings.filters
"""
    path = "tests/data/lenet.legacy.onnx"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert not done.returncode, done.stderr


def test_expressions_choose_no_running_statistics():
    model = jaxonnx.load(DATA / "lenet_bn.legacy.onnx").with_trainable("features.*")
    assert {name.split(".")[-1] for name in model.params} == {"weight", "bias"}
    assert "features.1.running_mean" in model.state
    exact = model.with_trainable(["features.1.running_mean"])
    assert {*exact.params} == {"features.1.running_mean"}
    with pytest.raises(jaxonnx.InputError, match="matches no floating-point tensor"):
        model.with_trainable("*")


def test_what_is_said_of_many_nodes_is_short():
    """A file in training mode with 60 BatchNormalizations had as many lines of warning."""
    nodes = "\n".join(
        f"[bn{i}] x{i + 1}, m{i}, v{i} = BatchNormalization <training_mode = 1> (x{i}, s, b, m, v)"
        for i in range(60)
    )
    ones, zeros = "{1, 1}", "{0, 0}"
    model = jaxonnx.load(
        onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        net (float[n, 2] x0) => (float[n, 2] x60)
        <float[2] s = {ones}, float[2] b = {zeros}, float[2] m = {zeros}, float[2] v = {ones}>
        {{ {nodes} }}""")
    )
    (warning,) = (text for text in model.warnings if "training mode" in text)
    assert "'bn2' and 57 more; apply and save" in warning
    assert len(str(model).splitlines()) < 20


@pytest.mark.parametrize("dtype", [np.float64, jnp.bfloat16, np.float16, np.int32])
def test_apply_refuses_parameters_of_another_dtype(dtype):
    model = demo.model()
    x, name = jnp.zeros((2, 1, 8, 8)), next(iter(model.params))
    params = {**model.params, name: np.asarray(model.params[name]).astype(dtype)}
    match = rf"'{name}' is {np.dtype(dtype)}, the model's is float32.*astype\('float32'\)"
    for call in (
        lambda: model.apply(params, x),
        lambda: jax.eval_shape(lambda x: model.apply(params, x), x),
        lambda: model.apply_train(params, model.state, jax.random.key(0), x),
    ):
        with pytest.raises(jaxonnx.InputError, match=match):
            call()


def test_apply_refuses_parameters_that_the_model_lacks():
    model, x = demo.model(), jnp.zeros((2, 1, 8, 8))
    with pytest.raises(jaxonnx.InputError, match=r"params has 'other', which the model lacks"):
        model.apply({**model.params, "other": x}, x)
    # tensors of the state may stand among the parameters, as for a derivative with respect to them
    model.apply({**model.state, **model.params}, x, state={})


def test_apply_takes_traced_parameters():
    model, x = demo.model(), jnp.zeros((2, 1, 8, 8))
    twice = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), model.params)
    assert jax.jit(jax.vmap(lambda p: model.apply(p, x)))(twice).shape == (2, 2, 10)
    gradients = jax.jit(jax.grad(lambda p: model.apply(p, x).sum()))(model.params)
    jax.jit(lambda *p: jax.jvp(lambda p: model.apply(p, x), *p))((model.params,), (gradients,))


TWO = """
g (float[n,3] x) => (float[n,2] score, float[n,3] twice)
<float[3,2] w = {1,2,3,4,5,6}> { score = MatMul(x, w)  twice = Add(x, x) }
"""


def test_outputs_have_names():
    model = load(TWO)
    apply = jax.jit(lambda params, x: model.name_outputs(model.apply(params, x)))
    session = onnxruntime.InferenceSession(model.to_onnx().SerializeToString())
    expected = dict(zip(("score", "twice"), session.run(None, {"x": X}), strict=True))
    trained, _ = model.apply_train(model.params, model.state, None, X)
    for outputs in (
        model.name_outputs(model(X)),
        apply(model.params, X),
        model.name_outputs(trained),
        jax.vmap(lambda x: apply(model.params, x[None]))(X),
    ):
        assert [*outputs] == ["score", "twice"]
        for name, value in expected.items():
            np.testing.assert_array_equal(np.reshape(outputs[name], value.shape), value)
    assert [*load(MODEL).name_outputs(load(MODEL)(X, Z))] == ["y"]
    with pytest.raises(jaxonnx.InputError, match=r"outputs must be .*score: .*twice: "):
        model.name_outputs(model(X)[0])
