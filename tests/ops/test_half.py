"""Half precision: products and sums accumulate in float32 and are rounded once."""

import re

import jax
import ml_dtypes
import numpy as np
import pytest

import jaxonnx.ops  # noqa: F401 - registers the operators
from jaxonnx.registry import lookup

random = np.random.default_rng(0)


def f(*shape):
    return random.standard_normal(shape)


def attend(*inputs):
    return lookup("", "Attention", 23)(*inputs)[0]


def of(name, opset=18, *rest, **attributes):
    """An operator as a function of its first inputs."""
    return lambda *inputs: lookup("", name, opset)(*inputs, *rest, **attributes)


ROWS = np.array([1])
CASES = {
    "Gemm": (of("Gemm", alpha=0.7, beta=0.3), f(4, 300), f(300, 5), f(5)),
    "Conv": (of("Conv"), f(1, 20, 5, 5), f(4, 20, 3, 3), f(4)),
    "ConvTranspose": (of("ConvTranspose"), f(1, 20, 3, 3), f(20, 4, 3, 3), f(4)),
    "Einsum": (of("Einsum", equation="ij,jk,kl->il"), f(3, 50), f(50, 40), f(40, 2)),
    "Attention": (attend, f(1, 4, 3, 16), f(1, 2, 40, 16), f(1, 2, 40, 16)),
    "Softmax": (of("Softmax"), f(4, 300)),
    "LogSoftmax": (of("LogSoftmax"), f(4, 300)),
    "ReduceSum": (of("ReduceSum", 18, ROWS), abs(f(4, 300))),
    "ReduceSumSquare": (of("ReduceSumSquare", 18, ROWS), 20 * f(4, 100)),
    "ReduceL2": (of("ReduceL2", 18, ROWS), 300 * f(4, 100)),
    "CumSum": (of("CumSum", 18, np.array(1)), abs(f(2, 60))),
}


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_results_are_rounded_once(dtype):
    with jax.enable_x64(True):
        inputs = {n: [x.astype(dtype) for x in xs] for n, (_, *xs) in CASES.items()}
        functions = {name: function for name, (function, *_) in CASES.items()}

        @jax.jit
        def run(inputs):
            return {name: functions[name](*xs) for name, xs in inputs.items()}

        exact = run(jax.tree.map(lambda x: x.astype(np.float64), inputs))
        for name, y in run(inputs).items():
            assert y.dtype == dtype, name
            e, y = np.asarray(exact[name]), np.asarray(y).astype(np.float64)
            unit = np.exp2(np.floor(np.log2(abs(e)))) * float(ml_dtypes.finfo(dtype).eps)
            assert (abs(y - e) <= 0.51 * unit + 1e-6).all(), name


def exactly(function, *inputs):
    """The results in float64."""
    with jax.enable_x64(True):
        results = function(*jax.tree.map(lambda x: x.astype(np.float64), inputs))
        return jax.tree.map(np.asarray, results)


def near(results, exact, tolerance):
    for y, e in zip(jax.tree.leaves(results), jax.tree.leaves(exact), strict=True):
        assert y.dtype == np.float16
        assert abs(np.asarray(y, np.float64) - e).max() < tolerance * abs(e).max()


LOGISTIC = {
    "Sigmoid": (of("Sigmoid"), lambda x: 1 / (1 + np.exp(-x))),
    "Swish": (of("Swish", 24), lambda x: x / (1 + np.exp(-x))),
    "QuickGelu": (
        lambda x: lookup("com.microsoft", "QuickGelu", 1)(x, alpha=1.5),
        lambda x: x / (1 + np.exp(-1.5 * x)),
    ),
    "Mish": (of("Mish"), lambda x: x * np.tanh(np.log1p(np.exp(x)))),
}


def test_tails_of_activations_do_not_vanish_in_float16():
    """exp(12) is above the largest float16, and 1 / (1 + exp(12)) is not below the least."""
    x = np.arange(-16, 11, 0.125).astype(np.float16)
    ys = jax.jit(lambda x: {name: function(x) for name, (function, _) in LOGISTIC.items()})(x)
    for name, (_, exact) in LOGISTIC.items():
        e, y = exact(x.astype(np.float64)), np.asarray(ys[name])
        assert y.dtype == np.float16
        unit = np.maximum(np.exp2(np.floor(np.log2(abs(e) + 1e-30)) - 10), 2.0**-24)
        assert (abs(y - e) <= 0.51 * unit).all(), name


@pytest.mark.deep
def test_gradients_are_of_half_precision_and_so_are_their_products():
    names = ("Gemm", "Conv", "ConvTranspose", "Attention")

    def loss(inputs):
        return sum((CASES[name][0](*inputs[name]) ** 2).mean() for name in names)

    gradient = jax.jit(jax.grad(loss))
    inputs = {name: [x.astype(np.float16) for x in CASES[name][1:]] for name in names}
    near(gradient(inputs), exactly(gradient, inputs), 4e-3)
    text = gradient.trace(inputs).lower(lowering_platforms=("cuda",)).as_text()
    products = re.findall(r"stablehlo\.(?:dot_general|convolution)\b.* : \((.*)\) -> ", text)
    kinds = [re.findall(r"x([a-z]+\d+)>", operands) for operands in products]
    # the image of ConvTranspose, to which a bias is added, is computed in float32
    assert kinds.count(["f16", "f16"]) == len(kinds) - 1


@pytest.mark.deep
@pytest.mark.parametrize(("name", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
def test_recurrent_layers_round_what_a_product_reads(name, gates):
    shapes = (12, 2, 8), (1, gates * 16, 8), (1, gates * 16, 16), (1, 2 * gates * 16)
    inputs = [(0.3 * f(*shape)).astype(np.float16) for shape in shapes]

    @jax.jit
    def run(*inputs):
        def loss(*inputs):
            results = of(name)(*inputs)
            return (results[0] ** 2).mean(), results

        return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(*inputs)

    slopes, results = run(*inputs)
    exact_slopes, exact = exactly(run, *inputs)
    near(results, exact, 2e-3)
    near(slopes, exact_slopes, 1e-2)


@pytest.mark.deep
def test_gradient_of_an_lstm_under_a_mesh():
    values = f(5, 4, 3), f(1, 8, 3), f(1, 8, 2)
    x, w, r = (jax.numpy.asarray(v, ml_dtypes.bfloat16) for v in values)
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    gradient = jax.grad(lambda w: of("LSTM", hidden_size=2)(x, w, r)[0].astype("float32").sum())
    expected = gradient(w)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        np.testing.assert_array_equal(gradient(w), expected)
