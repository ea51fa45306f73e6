"""Programs compiled with oneDNN: the same numbers as without, NaN among them."""

import itertools
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
import pytest

import jaxonnx
from jaxonnx.lowering import _compile, _conv, contract, has_units, jit

has_onednn = pytest.mark.skipif(
    not _compile.compiler_options("cpu"), reason="XLA of this JAX has no oneDNN"
)


def text(function, *args) -> str:
    function = function if isinstance(function, jit) else jit(function, onednn=True)
    return function.lower(function.trace(*args)).compile().as_text()


def form(size, kernel, stride=1, dilation=1, pads=(0, 0), groups=1, turned=False) -> _conv.Conv:
    span = [(k - 1) * dilation + 1 for k in kernel]
    out = tuple((n + sum(pads) - s) // stride + 1 for n, s in zip(size, span, strict=True))
    rank = len(size)
    return _conv.Conv(
        size, kernel, (stride,) * rank, (dilation,) * rank, (pads,) * rank, out, groups, turned
    )


FORMS = [
    form((9, 8), (3, 3), pads=(1, 1)),
    form((9, 8), (3, 3), pads=(1, 1), turned=True),
    form((7, 11), (3, 3), stride=2, pads=(1, 1), turned=True),
    form((12, 13), (5, 5), stride=2, pads=(2, 1)),
    form((12, 13), (3, 3), stride=3, turned=True),  # taps that some phases lack
    form((12, 13), (2, 2), stride=3),  # a phase without taps
    form((12, 13), (3, 3), stride=2, pads=(0, 0), turned=True),  # pixels that no window reads
    form((9, 8), (3, 3), dilation=2, pads=(2, 0)),
    form((9, 8), (3, 3), stride=2, dilation=2, pads=(2, 2)),
    form((9, 8), (3, 3), pads=(3, 3)),  # the gradient crops
    form((9, 8), (3, 3), pads=(1, 1), groups=2),
    form((9, 8), (3, 3), pads=(1, 1), groups=2, turned=True),
    form((9, 8), (3, 3), pads=(1, 1), groups=6, turned=True),
    form((9, 8), (3, 3), stride=2, pads=(1, 1), groups=6),
    form((24,), (5,), pads=(2, 2), groups=6),
    form((24,), (3,), stride=2, pads=(1, 1), turned=True),
]


@pytest.mark.parametrize("out", range(3), ids=["images", "weight", "result"])
@pytest.mark.parametrize("conv", FORMS, ids=map(str, range(len(FORMS))))
def test_a_convolution_beside_onednn_is_that_of_lax(conv, out, monkeypatch):
    for name in ("WORK_OF_ONEDNN", "WORK_OF_TAP", "SLOW_WORK"):
        monkeypatch.setattr(_conv, name, 1)
    rng = np.random.default_rng(0)
    shapes = (3, *conv.size, 6), conv._weight(12 if conv.groups == 2 else 6, 6), (3, *conv.out)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in shapes[:2])
    y = rng.normal(size=(*shapes[2], conv._channels(w)[0])).astype(np.float32)
    args = [a for number, a in enumerate((x, w, y)) if number != out]
    expected = jax.jit(partial(conv.plain, out))(*args)
    found = jit(partial(contract, conv, out), onednn=True)(*args)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found / scale, expected / scale, atol=2e-6)


@has_onednn
def test_a_large_convolution_and_its_gradients_are_of_onednn():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 56, 56, 64)), rng.normal(size=(64, 64, 3, 3))
    conv = form((56, 56), (3, 3), pads=(1, 1))
    x, w = x.astype(np.float32), w.astype(np.float32)
    assert "__onednn$convolution" in text(partial(contract, conv, 2), x, w)
    assert "__onednn$convolution" in text(partial(contract, conv, 0), w, x)
    for out, args in ((2, (x, w)), (0, (w, x))):  # a program of the user's own has no oneDNN
        alone = jax.jit(partial(contract, conv, out)).lower(*args).as_text()
        assert "tensor<2x1x56x56x64xf32>" not in alone


@has_onednn
def test_products_are_of_onednn_where_it_is_asked_for():
    x = np.ones((4096, 512), np.float32)
    assert "__onednn$matmul" in text(lambda x: x.T @ x, x)
    assert "__onednn" not in text(jit(lambda x: x.T @ x), x)


ACTIVATED = """<ir_version: 8, opset_import: ["": 17]>
g (float[N, 16, {size}] x, float[16, {inputs}, {kernel}] w, float[16] b) => (y) {{
    zero = Constant <value = float {{0}}> ()
    six = Constant <value = float {{6}}> ()
    c = Conv <pads = [{pads}], group = {groups}> (x, w, b)
    y = {activation}
}}"""


@pytest.mark.parametrize("activation", ["Relu(c)", "Clip(c, zero, six)", "LeakyRelu(c)"])
@pytest.mark.parametrize(("rank", "groups"), [*itertools.product((1, 2, 3), (1, 16))])
def test_nan_passes_an_activation_behind_a_convolution(rank, groups, activation, monkeypatch):
    monkeypatch.setattr(_conv, "WORK_OF_ONEDNN", 1)
    source = ACTIVATED.format(
        size=", ".join(["9"] * rank),
        inputs=16 // groups,
        kernel=", ".join(["3"] * rank),
        pads=", ".join(["1"] * 2 * rank),
        groups=groups,
        activation=activation,
    )
    rng = np.random.default_rng(0)
    shapes = (2, 16, *[9] * rank), (16, 16 // groups, *[3] * rank), (16,)
    x, w, b = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    model = jaxonnx.load(onnx.parser.parse_model(source))
    plain = np.array(model(x, w, b))
    assert np.isfinite(plain).all()
    x[(1, 3, *[4] * rank)] = np.nan
    found = np.asarray(model(x, w, b))
    reached = 3**rank * (16 if groups == 1 else 1)
    assert np.isnan(found).sum() == reached
    np.testing.assert_array_equal(found[0], plain[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_casts_to_fewer_bits_and_back_round(dtype):
    x = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
    rounded = x.astype(dtype).astype(np.float32)
    found = jit(lambda x: x.astype(dtype).astype(jnp.float32) * 1.0, onednn=True)(x)
    np.testing.assert_array_equal(found, rounded)
    product = jit(lambda x: x.T @ x.astype(dtype).astype(jnp.float32), onednn=True)(x)
    np.testing.assert_allclose(product, x.T @ rounded, atol=1e-3)


@pytest.mark.parametrize("table", ["OPTIONS", "FOR_UNITS"])
def test_an_option_that_a_release_does_not_know_is_left_out(table, monkeypatch):
    rest = {} if table == "OPTIONS" else _compile.compiler_options("cpu")
    monkeypatch.setattr(_compile, table, {"cpu": {"xla_cpu_no_such_option": True}})
    _compile.compiler_options.cache_clear()
    try:
        with pytest.warns(UserWarning, match="does not know .*: xla_cpu_no_such_option"):
            assert _compile.compiler_options("cpu", True) == rest
        double = jit(lambda x: 2 * x, onednn=True, units=True)
        np.testing.assert_array_equal(double(np.arange(3)), [0, 2, 4])
    finally:
        _compile.compiler_options.cache_clear()


def test_a_call_within_another_program_is_part_of_it():
    @partial(jit, onednn=True)
    def double(x):
        return 2 * x

    x = jnp.arange(3.0)
    np.testing.assert_array_equal(double(x), [0, 2, 4])
    np.testing.assert_array_equal(jax.jit(lambda x: double(x) + 1)(x), [1, 3, 5])
    np.testing.assert_array_equal(jax.jit(lambda y: y + double(x))(x), [0, 3, 6])
    np.testing.assert_array_equal(jit(lambda x: double(x) + 1, onednn=True)(x), [1, 3, 5])
    np.testing.assert_array_equal(jax.vmap(double)(x), [0, 2, 4])
    assert jax.grad(double)(1.0) == 2
    assert jax.jit(jax.grad(double))(1.0) == 2


def test_errors_are_those_of_the_function():
    @partial(jit, onednn=True)
    def fails(x):
        raise ValueError("what it says")

    with pytest.raises(ValueError, match="what it says"):
        fails(1)
    with pytest.raises(ValueError, match="what it says"):
        jax.jit(fails)(1)


@has_onednn
@pytest.mark.parametrize(
    ("precision", "products", "onednn"),
    [
        (None, 0, True),
        (None, 1, True),
        (None, 2, False),
        ("bf16", 0, has_units(jnp.bfloat16)),
        ("bf16", 2, has_units(jnp.bfloat16)),
        ("fp16", 0, False),
    ],
)
def test_networks_that_are_compiled_with_onednn(precision, products, onednn):
    """Those of convolutions, and where products are rounded those for which there are units."""
    dense = [f"d{i + 1} = MatMul(d{i}, m)\n" for i in range(products)]
    nodes = "y = Conv <pads = [1, 1, 1, 1]> (x, w)\n z = GlobalAveragePool(y)\n d0 = Flatten(z)\n"
    nodes += "".join(dense) + f"f = Identity(d{products})"
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N, 64, 32, 32] x) => (float[N, 64] f)'
        f" {{ {nodes} }}"
    )
    w = np.random.default_rng(0).normal(size=(64, 64, 3, 3)).astype(np.float32)
    m = np.eye(64, dtype=np.float32)
    for name, value in (("w", w), ("m", m)):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    loss = "softmax_cross_entropy_with_integer_labels"
    step = jaxonnx.training.step(jaxonnx.load(proto), loss, optax.sgd(0.1), precision=precision)
    batch = np.ones((8, 64, 32, 32), np.float32), np.arange(8)
    compiled = text(step.compile(step.update), step.init(), batch)
    assert ("__onednn" in compiled) == onednn


@pytest.mark.skipif(
    jax.config.jax_compilation_cache_dir is None, reason="JAX keeps no compiled programs"
)
def test_a_run_does_not_warn_of_a_program_that_is_not_stored():
    """XLA stores none with calls of oneDNN, of which JAX says that memory is out."""
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 1, 8, 8] x) => (float[N, 2] f) <float[2, 1, 3, 3] w = {
            0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8}>
        { y = Conv(x, w)  z = GlobalAveragePool(y)  f = Flatten(z) }""")
    data = np.ones((8, 1, 8, 8), np.float32), np.arange(8) % 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jaxonnx.train(proto, data, optimizer="sgd", batch_size=8, progress=False)
    assert not [w for w in caught if "compilation cache" in str(w.message)]
