"""The kernel for the loops of LSTM and GRU, against onnxruntime, NumPy and the plain form."""

import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

import jaxonnx
from jaxonnx import lowering
from jaxonnx.lowering import _recurrence, _recurrence_kernel
from jaxonnx.ops import rnn
from jaxonnx.training._settings.precision import round_products
from tests.support.sweeps import sweep

lstm, gru = rnn.lstm, partial(rnn.gru, linear_before_reset=1)
CALL = "custom_call @jaxonnx_recurrence"
SIZES = [(5, 1, 3, 1), (4, 2, 1, 3), (3, 7, 5, 8), (4, 33, 4, 17), (3, 5, 70, 64), (3, 101, 2, 100)]
"""Steps, batch, features and hidden units: below, at and above the tiles of each variant."""


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Let the kernel compute loops of any size."""
    monkeypatch.setattr(_recurrence_kernel, "LEAST", 0)
    monkeypatch.setattr(_recurrence_kernel, "FEW", 0)
    if not _recurrence_kernel.is_ready():
        pytest.skip("there is no C++ compiler")


@pytest.fixture
def plainly(monkeypatch):
    """Return a function that computes by the plain form in float64."""

    def run(function, *arguments):
        with jax.enable_x64(True), monkeypatch.context() as context:
            context.setattr(_recurrence_kernel, "is_ready", lambda: False)
            wide = jax.tree.map(lambda x: np.asarray(x, np.float64), arguments)
            return jax.jit(lambda *args: function(*args))(*wide)

    return run


def arguments(operator, steps, batch, features, hidden, ways=1, seed=0):
    """The inputs of an operator: x, w, r, b and the initial states."""
    draw = np.random.default_rng(seed).normal
    gates, states = (4, 2) if operator is lstm else (3, 1)
    shapes = (ways, gates * hidden, features), (ways, gates * hidden, hidden)
    values = [draw(size=(steps, batch, features))]
    values += [draw(size=shape) / shape[-1] ** 0.5 for shape in shapes]
    values += [draw(size=(ways, 2 * gates * hidden)) * 0.3]
    values += [draw(size=(ways, batch, hidden)) for _ in range(states)]
    return [x.astype(np.float32) for x in values]


def run(operator, x, w, r, b, *states, lengths=None, **attributes):
    return operator(x, w, r, b, lengths, *states, **attributes)


def close(actual, expected, tolerance=1e-5):
    """Compare each array with another, relative to the largest of its numbers."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, np.abs(b).max(initial=0))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


def file(kind, values, lengths, direction, layout):
    """An ONNX file of one operator whose weights are initializers."""
    x, w, r, b, *states = values
    weights = {"w": w, "r": r, "b": b}
    if layout:
        x, *states = (a.swapaxes(0, 1) for a in (x, *states))
    feeds = {"x": x, "lengths": lengths, **dict(zip("hc", states, strict=False))}
    outputs = ["Y", "Y_h", "Y_c"][: 1 + len(states)]
    extra = {"linear_before_reset": 1} if kind == "GRU" else {}
    node = helper.make_node(
        kind,
        ["x", "w", "r", "b", "lengths", "h", "c"][: 5 + len(states)],
        outputs,
        hidden_size=r.shape[-1],
        direction=direction,
        layout=layout,
        **extra,
    )
    types = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int32): TensorProto.INT32}
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(n, types[v.dtype], v.shape) for n, v in feeds.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
        [helper.make_tensor(n, TensorProto.FLOAT, v.shape, v.ravel()) for n, v in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8), feeds


@pytest.mark.parametrize(
    ("kind", "operator", "direction"),
    sweep(
        [
            (kind, operator, direction)
            for kind, operator in (("LSTM", lstm), ("GRU", gru))
            for direction in ("forward", "reverse", "bidirectional")
        ],
        *(1, 2, 3),
    ),
)
def test_files_compute_what_onnxruntime_does(kind, operator, direction):
    for size in SIZES:
        values = arguments(operator, *size, ways=2 if direction == "bidirectional" else 1)
        lengths = np.arange(size[1], dtype=np.int32) % size[0] + 1
        proto, feeds = file(kind, values, lengths, direction, 0)
        session = onnxruntime.InferenceSession(proto.SerializeToString())
        expected = session.run(None, feeds)
        close(jaxonnx.load(proto)(**feeds), expected, 3e-6)
        if size not in (SIZES[1], SIZES[4]):
            continue
        # onnxruntime has no layout=1: the same numbers, transposed around the same kernel
        proto, feeds = file(kind, values, lengths, direction, 1)
        y, *states = jaxonnx.load(proto)(**feeds)
        close([y.transpose(1, 2, 0, 3)] + [s.swapaxes(0, 1) for s in states], expected, 3e-6)


def test_a_padded_sequence_of_no_steps_keeps_its_state():
    x, w, r, b, *states = arguments(lstm, 3, 2, 4, 5)
    lengths = np.array([0, 2], np.int32)
    y, h, c = jax.jit(lambda x: run(lstm, x, w, r, b, *states, lengths=lengths))(x)
    np.testing.assert_array_equal(y[:, 0, 0], 0)
    np.testing.assert_array_equal((h[0, 0], c[0, 0]), (states[0][0, 0], states[1][0, 0]))


def losses(operator, **options):
    """A scalar function of all inputs that depends on all outputs."""
    return lambda *values: sum(jnp.sum(jnp.sin(y)) for y in run(operator, *values, **options))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("operator", [lstm, gru], ids=["lstm", "gru"])
def test_gradients_are_those_of_the_plain_form_in_float64(operator, direction, plainly):
    # the order of the steps does not depend on the sizes
    for size in SIZES[1::2] if direction == "forward" else SIZES[3:4]:
        values = arguments(operator, *size)
        every = tuple(range(len(values)))
        lengths = (np.arange(size[1]) % size[0] + 1).astype(np.int32)
        gradients = [
            jax.grad(losses(operator, direction=direction, **options), every)
            for options in ({}, {"lengths": lengths})
        ]
        both = lambda *v: [gradient(*v) for gradient in gradients]  # noqa: B023, E731
        compiled = jax.jit(both)
        assert compiled.lower(*values).as_text().count(CALL) == 4
        close(compiled(*values), plainly(both, *values))


@pytest.mark.parametrize("operator", [lstm, gru], ids=["lstm", "gru"])
def test_gradients_are_central_differences(operator):
    values = arguments(operator, 4, 3, 5, 9, seed=3)
    loss = jax.jit(losses(operator))
    gradients = jax.jit(jax.grad(losses(operator), tuple(range(len(values)))))(*values)
    draw = np.random.default_rng(1).normal
    for i, gradient in enumerate(gradients):
        along, step = draw(size=values[i].shape).astype(np.float32), np.float32(1e-2)
        ends = [loss(*values[:i], values[i] + s * along, *values[i + 1 :]) for s in (step, -step)]
        expected = (float(ends[0]) - float(ends[1])) / (2 * float(step))
        np.testing.assert_allclose(np.sum(gradient * along), expected, rtol=1e-2, atol=1e-2)


@pytest.fixture(params=[0, 1, 2])
def variant(request):
    """A set of instructions that this processor has."""
    x, w, r, b, *states = (a[0] for a in arguments(lstm, 1, 1, 1, 1))
    operands = r, None, x[None], w, b[:4], tuple(states)
    options = {"cell": rnn.LSTM, "reverse": False, "keeps": False, "variant": request.param}
    try:
        jax.block_until_ready(_recurrence_kernel.forward(*operands, **options))
    except jax.errors.JaxRuntimeError as error:
        pytest.skip(str(error))
    return request.param


@pytest.mark.parametrize("operator", [lstm, gru], ids=["lstm", "gru"])
def test_variants_agree_and_threads_change_no_bit(operator, variant):
    """Of the instructions of a processor, and of the part of the batch that a thread takes."""
    cell = rnn.LSTM if operator is lstm else rnn.GRU
    for size in SIZES[-3:]:
        x, w, r, b, *states = arguments(operator, *size)
        states = tuple(s[0] for s in states)
        bias = jnp.resize(b[0], 4 * size[3])
        like = {"cell": cell, "reverse": False}
        forward = partial(_recurrence_kernel.forward, **like, keeps=True)
        operands = r[0], None, x, w[0], bias, states
        expected = jax.jit(partial(_recurrence._forward, **like, keeps=True))(*operands)
        results = [forward(*operands, variant=variant, threads=n) for n in (1, 3, 64)]
        close(results[0], expected, 3e-6)
        back = partial(_recurrence_kernel.back, **like)
        operands = r[0], None, expected[0], states, expected[2]
        cotangents = jax.jit(partial(_recurrence._back, **like))(*operands)
        results += [back(*operands, variant=variant, threads=n) for n in (1, 3, 64)]
        close(results[3], cotangents, 1e-5)
        for result in results[1:3]:
            jax.tree.map(np.testing.assert_array_equal, result, results[0])
        for result in results[4:]:
            jax.tree.map(np.testing.assert_array_equal, result, results[3])


def test_gates_err_by_at_most_two_units_in_the_last_place(variant):
    """A step of an LSTM gives sigmoid(i) * 1, one of a GRU without update gives tanh(h)."""
    x = np.concatenate([np.linspace(-86, 86, 20001), np.geomspace(1e-30, 1, 5000)])
    x = np.concatenate([x, -x]).astype(np.float32)[None, :, None]
    wide = x[0].astype(np.float64)
    zero, r, one = np.zeros((x.shape[1], 1), np.float32), np.zeros((4, 1), np.float32), np.float32

    def step(cell, w, r, bias, states):
        options = {"reverse": False, "keeps": False, "variant": variant}
        w, bias = np.array(w, np.float32)[:, None], np.array(bias, np.float32)
        return _recurrence_kernel.forward(r, None, x, w, bias, states, cell=cell, **options)

    sigmoid = step(rnn.LSTM, [1, 0, 0, 0], r, [0, 0, -100, 50], (zero, zero))[1][1]
    tanh = step(rnn.GRU, [0, 0, 1], r[:3], [-100, 0, 0, 0], (zero,))[0][0]
    for actual, exact in ((sigmoid, 1 / (1 + np.exp(-wide))), (tanh, np.tanh(wide))):
        unit = np.spacing(np.abs(exact).astype(one)).astype(np.float64)
        assert np.abs((np.asarray(actual) - exact) / unit).max() <= 2


@pytest.mark.parametrize("operator", [lstm, gru], ids=["lstm", "gru"])
def test_nan_and_infinity_stay_in_their_rows(operator, plainly):
    x, w, r, b, *states = arguments(operator, 4, 9, 3, 20)
    x[1, 2, 0], x[2, 5, 1], x[2, 6, 1] = np.nan, np.inf, -np.inf
    function = lambda x: run(operator, x, w, r, b, *states)  # noqa: E731
    results, expected = jax.jit(function)(x), plainly(function, x)
    for a, b in zip(results, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    assert np.isnan(results[0][1:, 0, 2]).all()
    assert not np.isnan(np.delete(results[0], 2, axis=2)).any()


@pytest.mark.parametrize(
    "operator", [lstm, pytest.param(gru, marks=pytest.mark.deep)], ids=["lstm", "gru"]
)
def test_transformations_are_those_of_the_plain_form(operator, plainly):
    values = arguments(operator, 4, 3, 2, 5)
    loss = losses(operator)
    every = tuple(range(len(values)))
    gradient = jax.grad(loss, every)
    product = lambda *v: sum(map(jnp.vdot, gradient(*v), v))  # noqa: E731
    several = [np.stack([x, -x]) for x in values]
    functions = {
        "eager": (lambda *v: run(operator, *v), values),
        "vmap": (lambda *v: jax.vmap(gradient)(*v), several),
        "jvp": (lambda *v: jax.jvp(loss, v, v), values),
        "grad of grad": (lambda *v: jax.grad(product, every)(*v), values),
        "remat": (lambda *v: jax.grad(jax.checkpoint(loss), every)(*v), values),
        "scan": (lambda *v: jax.lax.map(lambda x: (loss(*x), gradient(*x)), v), several),
        "frozen": (lambda *v: jax.grad(loss, 1)(*v), values),
    }  # fmt: skip
    for name, (function, inputs) in functions.items():
        call = function if name == "eager" else jax.jit(function)
        close(call(*inputs), plainly(function, *inputs), 2e-5)
    expected = plainly(gradient, *values)
    with jax.disable_jit():
        close(gradient(*values), expected)
    for name in ("scan", "remat", "frozen"):
        function, inputs = functions[name]
        assert jax.jit(function).lower(*inputs).as_text().count(CALL) >= 2


def test_other_recurrences_have_no_kernel():
    values = arguments(lstm, 3, 2, 4, 8)
    for options in ({"clip": 3.0}, {"input_forget": 1}, {"activations": ["Tanh"] * 3}):
        text = jax.jit(partial(run, lstm, **options)).lower(*values).as_text()
        assert CALL not in text
    p = np.ones((1, 24), np.float32)
    assert CALL not in jax.jit(partial(run, lstm, p=p)).lower(*values).as_text()
    values = arguments(gru, 3, 2, 4, 8)
    reset_first = jax.jit(partial(run, gru, linear_before_reset=0))
    assert CALL not in reset_first.lower(*values).as_text()
    half = [x.astype(jnp.bfloat16) for x in values]
    assert CALL not in jax.jit(partial(run, gru)).lower(*half).as_text()
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) for x in values]
        assert CALL not in jax.jit(partial(run, gru)).lower(*wide).as_text()
    compiled = jax.jit(partial(run, gru))
    assert compiled.lower(*values).as_text().count(CALL) == 1
    assert CALL not in compiled.trace(*values).lower(lowering_platforms=("tpu",)).as_text()
    empty = [values[0][:0], *values[1:]]
    assert CALL not in compiled.lower(*empty).as_text()


def test_without_a_compiler_the_plain_form_runs(monkeypatch, tmp_path):
    values = arguments(lstm, 3, 2, 4, 8)
    expected = jax.jit(jax.grad(losses(lstm), 1))(*values)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    is_ready = _recurrence_kernel.is_ready.__wrapped__
    assert not is_ready()
    monkeypatch.setattr(_recurrence_kernel, "is_ready", is_ready)
    plain = jax.jit(jax.grad(losses(lstm), 1))
    assert CALL not in plain.lower(*values).as_text()
    close(plain(*values), expected)


def test_what_is_exported_has_no_kernel(plainly):
    values = arguments(gru, 3, 2, 4, 8)
    gradient = jax.grad(losses(gru), (1, 2))
    exported = jax.export.export(jax.jit(gradient))(*values)
    assert "custom_call @jaxonnx" not in exported.mlir_module()
    expected = plainly(gradient, *values)
    close(jax.export.deserialize(exported.serialize()).call(*values), expected)
    proto = jaxonnx.to_onnx(gradient, *values)
    assert {node.domain for node in proto.graph.node} == {""}
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    names = [i.name for i in session.get_inputs()]
    close(session.run(None, dict(zip(names, values, strict=True))), expected)


def test_mixed_precision_sees_the_products():
    values = arguments(lstm, 3, 2, 4, 8)
    program = jax.make_jaxpr(round_products(jax.grad(losses(lstm), (1, 2)), jnp.bfloat16))(*values)
    text = str(program)
    assert not [p.name for p in lowering.LOOPS if f" {p.name}[" in text]
    assert "Rounded" in text


@pytest.mark.deep
def test_meshes_have_the_plain_form():
    program = """if True:
        import jax, numpy as np
        import jaxonnx.ops
        from jaxonnx.lowering import _recurrence_kernel
        from jaxonnx.ops import rnn
        _recurrence_kernel.LEAST = _recurrence_kernel.FEW = 0
        mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        draw = lambda *shape: np.random.default_rng(0).normal(size=shape).astype("f") / 4
        x, w, r = draw(5, 4, 3), draw(1, 32, 3), draw(1, 32, 8)
        run = lambda x, w, r: jax.value_and_grad(
            lambda r: (rnn.lstm(x, w, r)[0] ** 2).sum())(r)
        expected = jax.jit(run)(x, w, r)
        rows = jax.device_put(x, jax.NamedSharding(mesh, jax.P(None, "d")))
        assert "custom_call @jaxonnx" not in jax.jit(run).lower(rows, w, r).as_text()
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4),
                     jax.jit(run)(rows, w, r), expected)
        def summed(x):
            return jax.tree.map(lambda a: jax.lax.psum(a, "d"), run(x, w, r))
        split = jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=jax.P(None, "d"),
                                      out_specs=jax.P(), check_vma=False))
        assert "custom_call @jaxonnx" not in split.lower(rows).as_text()
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4),
                     split(rows), expected)
    """
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | flags, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
