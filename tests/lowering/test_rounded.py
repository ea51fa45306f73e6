"""Products of rounded factors on CPU, beside NumPy's products of the rounded factors in float64."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import lax
from onnx import TensorProto, helper, numpy_helper

import jaxonnx
from jaxonnx.lowering import _compile, _conv, _rounded, contract, jit
from jaxonnx.lowering._conv import Conv
from jaxonnx.ops.pool import place_windows
from jaxonnx.training._settings.precision import round_products
from tests.support.sweeps import sweep

has_units_for_onednn = pytest.mark.skipif(
    not (_compile.compiler_options("cpu") and _rounded.has_units(jnp.bfloat16)),
    reason="no oneDNN, or no units for bfloat16",
)

LEAST = {"rtol": 1e-5, "atol": 1e-4}
"""A sum of float32 products of 16-bit numbers, in any order."""


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def rounded(x, dtype=ml_dtypes.bfloat16):
    return x.astype(dtype).astype(np.float64)


@pytest.fixture(params=[True, False], ids=["units", "no units"])
def units(request, monkeypatch):
    """Take a processor to have units for bfloat16, or to have none; both run on every processor."""
    monkeypatch.setattr(_rounded, "has_units", lambda dtype: request.param)
    return request.param


@pytest.mark.parametrize("axes", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "fp16"])
def test_products_of_matrices(axes, dtype, units):
    rows, terms, columns = 66, 128, 130
    a = normal(terms, rows) if axes[0] == 0 else normal(rows, terms)
    b = normal(terms, columns, seed=1) if axes[1] == 0 else normal(columns, terms, seed=1)
    exact = np.tensordot(rounded(a, dtype), rounded(b, dtype), axes)

    def plain(a, b):
        return lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())))

    uses = {
        "as it is": (plain, [exact]),
        "transposed": (lambda a, b: plain(a, b).T, [exact.T]),
        "both": (lambda a, b: (plain(a, b), plain(a, b).T), [exact, exact.T]),
    }
    for use, (function, right) in uses.items():
        results = jax.tree.leaves(jax.jit(round_products(function, dtype))(a, b))
        for result, expected in zip(results, right, strict=True):
            np.testing.assert_allclose(result, expected, **LEAST, err_msg=use)


@pytest.mark.parametrize("terms", [1, 2, 31, 32, 63, 64, 1023, 1024])
def test_sizes_around_the_bounds(terms, units):
    """Small or odd products are left in float32 where there are units; all are right."""
    a, b = normal(terms, 64), normal(terms, 64, seed=1)
    run = round_products(lambda a, b: a.T @ b, jnp.bfloat16)
    result = jax.jit(run)(a, b)
    error = abs(result - a.T.astype(np.float64) @ b)
    assert (error < 2.0**-7 * (abs(a).T @ abs(b)) + 1e-5).all()


def test_batches_of_products(units):
    p, v = normal(2, 3, 128, 128), normal(2, 3, 128, 64)
    run = round_products(lambda p, v: jnp.einsum("bhts,bhtd->bhsd", p, v), jnp.bfloat16)
    exact = np.einsum("bhts,bhtd->bhsd", rounded(p), rounded(v))
    np.testing.assert_allclose(jax.jit(run)(p, v), exact, **LEAST)


def test_several_axes_of_terms(units):
    x, y = normal(4, 32, 64), normal(4, 32, 160)
    run = round_products(lambda x, y: jnp.tensordot(x, y, ((0, 1), (0, 1))), jnp.bfloat16)
    exact = np.tensordot(rounded(x), rounded(y), ((0, 1), (0, 1)))
    np.testing.assert_allclose(jax.jit(run)(x, y), exact, **LEAST)


def test_nan_and_infinity_stay_where_they_are(units):
    a, b = normal(128, 96), normal(128, 96, seed=1)
    a[3, 5], a[7, 9] = np.nan, np.inf
    result = jax.jit(round_products(lambda a, b: a.T @ b, jnp.bfloat16))(a, b)
    assert np.isnan(result[5]).all()
    assert np.isinf(result[9]).all()
    assert np.isfinite(np.delete(result, [5, 9], 0)).all()


def test_under_vmap_and_scan(units):
    a, b = normal(3, 128, 64), normal(128, 160)
    exact = np.stack([rounded(x).T @ rounded(b) for x in a])
    run = round_products(lambda a, b: a.T @ b, jnp.bfloat16)
    np.testing.assert_allclose(jax.jit(jax.vmap(run, (0, None)))(a, b), exact, **LEAST)
    loop = round_products(lambda a, b: lax.map(lambda x: x.T @ b, a), jnp.bfloat16)
    np.testing.assert_allclose(jax.jit(loop)(a, b), exact, **LEAST)


@pytest.mark.parametrize(
    ("window", "out", "turned"),
    sweep(
        itertools.product(
            # pointwise, pointwise and strided, strided, by Winograd's algorithm
            [(1, 1, 0), (1, 2, 0), (3, 2, 1), (3, 1, 1)],
            [0, 1, 2],
            [False, True],
        ),
        *range(0, 24, 5),
    ),
)
def test_convolutions(window, out, turned, units):
    kernel, stride, pads = window
    c, m, size = 32, 64, 16
    windows = place_windows((size,) * 2, (kernel,) * 2, strides=(stride,) * 2, pads=[pads] * 4)
    form = Conv((size,) * 2, *windows, groups=1, turned=turned)
    weight = (kernel, kernel, c, m) if turned else (m, c, kernel, kernel)
    arrays = normal(4, size, size, c), normal(*weight), normal(4, *windows.out, m)
    arguments = [a for i, a in enumerate(arrays) if i != out]
    result = jax.jit(lambda u, v: _rounded.RoundedForm(form, jnp.bfloat16).on_cpu(out, u, v))(
        *arguments
    )
    with jax.enable_x64(True):
        exact = np.asarray(form.plain(out, *(jnp.asarray(a, np.float64) for a in arguments)))
    assert result.dtype == jnp.float32
    assert np.linalg.norm(result - exact) < 2.0**-7 * np.linalg.norm(exact)


@has_units_for_onednn
@pytest.mark.parametrize(
    "subscripts",
    ["mk,kn->mn", "mn,kn->mk", "mk,mn->kn", "mk,mn->nk", "bhmk,bhkn->bhmn", "bmk,bkn->bnm"],
)
def test_products_by_onednn(subscripts):
    """They round their results as well, of sums in float32."""
    sizes = {"b": 2, "h": 3, "m": 256, "k": 130, "n": 512}
    first, second = subscripts.split("->")[0].split(",")
    a, b = normal(*(sizes[c] for c in first)), normal(*(sizes[c] for c in second), seed=1)
    run = jit(round_products(lambda a, b: jnp.einsum(subscripts, a, b), jnp.bfloat16), onednn=True)
    exact = np.einsum(subscripts, rounded(a), rounded(b))
    result = run(a, b)
    np.testing.assert_array_less(abs(result - exact), 2.0**-8 * abs(exact) + 1e-4)
    axis = first.index("m") if "m" in subscripts.split("->")[1] else first.index("k")
    place = [0] * a.ndim
    place[axis] = 7
    a[tuple(place)] = np.nan
    infected = np.isnan(np.einsum(subscripts, a, b))
    np.testing.assert_array_equal(np.isnan(run(a, b)), infected)


@has_units_for_onednn
@pytest.mark.parametrize(
    ("window", "out", "turned"),
    sweep(
        itertools.product(
            # pointwise, pointwise and strided, strided, 3x3, products of taps, 5x5
            [
                *((1, 1, 0, 64), (1, 2, 0, 64), (3, 2, 1, 64)),
                *((3, 1, 1, 64), (3, 1, 1, 2048), (5, 3, 2, 64)),
            ],
            [0, 1, 2],
            [False, True],
        ),
        *range(0, 36, 5),
    ),
)
def test_convolutions_by_onednn(window, out, turned, monkeypatch):
    kernel, stride, pads, outputs = window
    monkeypatch.setattr(_conv, "WORK_OF_ONEDNN", 1)
    c, size = 32, 32
    windows = place_windows((size,) * 2, (kernel,) * 2, strides=(stride,) * 2, pads=[pads] * 4)
    form = Conv((size,) * 2, *windows, groups=1, turned=turned)
    weight = (kernel, kernel, c, outputs) if turned else (outputs, c, kernel, kernel)
    arrays = normal(4, size, size, c), normal(*weight), normal(4, *windows.out, outputs)
    arguments = [a for i, a in enumerate(arrays) if i != out]
    contracted = partial(contract, _rounded.RoundedForm(form, jnp.bfloat16), out)
    compiled = jit(contracted, onednn=True)
    result = compiled(*arguments)
    with jax.enable_x64(True):
        exact = np.asarray(form.plain(out, *(jnp.asarray(rounded(a)) for a in arguments)))
    assert result.dtype == jnp.float32
    np.testing.assert_array_less(abs(result - exact), 2.0**-8 * abs(exact) + 1e-3)
    text = compiled.lower(compiled.trace(*arguments)).compile().as_text()
    assert "__onednn$" in text or kernel == 1


@pytest.mark.skipif(not _rounded.has_units(jnp.bfloat16), reason="no units for bfloat16")
@pytest.mark.parametrize("subscripts", ["mk,kn->mn", "mn,kn->mk", "mk,mn->kn", "mk,mn->nk"])
def test_xla_widens_no_product(subscripts):
    sizes = {"m": 256, "k": 128, "n": 512}
    a, b = (normal(*(sizes[c] for c in part)) for part in subscripts[:5].split(","))
    run = round_products(lambda a, b: jnp.einsum(subscripts, a, b), jnp.bfloat16)
    text = jax.jit(run).lower(a, b).compile().as_text()
    (dot,) = (line for line in text.splitlines() if " dot(" in line)
    factors = dot[dot.index(" dot(") + 5 :].split(")")[0].split(", ")
    for factor in (name.split()[-1] for name in factors):
        (made,) = {line.split(" = ")[1][:4] for line in text.splitlines() if f"{factor} = " in line}
        assert made == "bf16", dot


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_network_that_transposes_a_product(precision, units):
    """XLA:CPU folds the transposition into the product, which then has no kernel."""
    w, v = (numpy_helper.from_array(normal(*s), n) for s, n in (((32, 48), "w"), ((48, 3), "v")))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("Transpose", ["y"], ["z"], perm=[1, 0]),
        helper.make_node("Tanh", ["z"], ["t"]),
        helper.make_node("Gemm", ["t", "v"], ["out"], transA=1),
    ]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size])
        for name, size in (("x", 32), ("out", 3))
    ]
    graph = helper.make_graph(nodes, "transposed", ends[:1], ends[1:], [w, v])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    x, y = normal(64, 32), np.arange(64) % 3
    settings = {"epochs": 2, "batch_size": 64, "optimizer": optax.sgd(0.01), "seed": 0}
    losses = [
        [e["loss"] for e in jaxonnx.train(model, (x, y), **settings, precision=p).history.epochs]
        for p in (None, precision)
    ]
    np.testing.assert_allclose(*losses, rtol=2e-2)


@pytest.mark.parametrize("product", ["Gemm", "MatMul", "Einsum"])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_maximum_of_a_product_and_zero_keeps_nan(product, precision):
    """oneDNN, which takes a product with a transposed factor, would apply it and return zero."""
    rows, terms, columns = 4096, 301, 64
    w = np.random.default_rng(0).normal(size=(terms, columns)).astype(np.float32)
    x = np.random.default_rng(1).normal(size=(terms, rows)).astype(np.float32)
    x[5, 3] = np.nan
    attributes = {"Gemm": {"transA": 1}, "MatMul": {}, "Einsum": {"equation": "km,kn->mn"}}
    nodes = [helper.make_node("Conv", ["image", "kernel"], ["convolved"])]
    nodes += [helper.make_node("Transpose", ["x"], ["turned"])] * (product == "MatMul")
    first = "turned" if product == "MatMul" else "x"
    nodes += [
        helper.make_node(product, [first, "w"], ["y"], **attributes[product]),
        helper.make_node("Max", ["y", "zero"], ["z"]),
    ]
    ends = [("x", [terms, rows]), ("image", [1, 1, 4, 4]), ("z", [rows, columns])]
    ends += [("convolved", [1, 1, 2, 2])]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in ends]
    tensors = {"w": w, "kernel": np.ones((1, 1, 3, 3)), "zero": np.zeros(())}
    graph = helper.make_graph(
        nodes,
        "g",
        values[:2],
        values[2:],
        [numpy_helper.from_array(v.astype(np.float32), n) for n, v in tensors.items()],
    )
    model = jaxonnx.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))

    def run(params, x, image):
        return model.apply(params, x, image, state=model.state)[0]

    rounded = None if precision is None else jnp.bfloat16
    function = run if rounded is None else round_products(run, rounded)
    compiled = model.program.jit(function, rounded)
    z = compiled(model.params, x, np.zeros((1, 1, 4, 4), np.float32))
    np.testing.assert_array_equal(np.isnan(z), np.arange(rows)[:, None] == np.full(columns, 3))
