"""The fast formulations against the plain ones: all contractions, gradients, batches, dtypes."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jaxonnx import lowering
from jaxonnx.lowering import _conv, _pool
from jaxonnx.lowering._contract import contract
from jaxonnx.lowering._conv import Conv
from jaxonnx.lowering._pool import Sum
from jaxonnx.lowering._taps import UNROLLED, Taps
from jaxonnx.ops.pool import place_windows
from tests.support import central_differences

rng = np.random.default_rng(0)

# batch, input and output channels, image, kernel, stride, dilation, pads, groups
CONVOLUTIONS = {
    "general": (2, 40, 5, (6, 7), (3, 2), (1, 2), (2, 1), (1, 0, 2, 1), 1),
    "Winograd": (2, 48, 64, (7, 9), (3, 3), (1, 1), (1, 1), (1, 0, 2, 1), 1),
    "Winograd, wide pads": (1, 64, 48, (8, 9), (3, 3), (1, 1), (1, 1), (3, 0, 4, 1), 1),
    "pointwise": (2, 3, 5, (4, 5), (1, 1), (1, 1), (1, 1), (0,) * 4, 1),
    "pointwise, stride": (2, 3, 5, (4, 5), (1, 1), (2, 3), (1, 1), (0,) * 4, 1),
    "image below kernel": (4, 64, 64, (2, 2), (3, 3), (1, 1), (1, 1), (1,) * 4, 1),
    "image below kernel, large": (8, 128, 128, (2, 2), (3, 3), (1, 1), (1, 1), (1,) * 4, 1),
    "image below kernel, tiny": (2, 3, 4, (2, 2), (3, 3), (1, 1), (1, 1), (1,) * 4, 1),
    "image below a large kernel": (2, 40, 9, (4, 4), (5, 5), (1, 1), (1, 1), (2,) * 4, 1),
    "output below kernel": (4, 64, 64, (4, 4), (3, 3), (2, 2), (1, 1), (1,) * 4, 1),
    "few inputs": (2, 3, 4, (7, 6), (3, 3), (2, 1), (1, 1), (1,) * 4, 1),
    "grouped": (2, 12, 8, (6, 6), (3, 3), (1, 1), (1, 1), (1,) * 4, 4),
    "grouped, wide": (1, 72, 4, (4, 4), (2, 2), (1, 1), (1, 1), (0,) * 4, 2),
    "depthwise": (3, 4, 4, (6, 7), (3, 3), (1, 1), (1, 1), (1,) * 4, 4),
    "depthwise, stride": (3, 4, 4, (6, 7), (3, 2), (2, 3), (1, 1), (1, 0, 2, 1), 4),
    "depthwise, dilation": (3, 4, 4, (8, 7), (3, 2), (2, 1), (2, 3), (1, 0, 2, 1), 4),
    "depthwise, stride above kernel": (2, 4, 4, (7, 7), (2, 2), (3, 3), (1, 1), (0,) * 4, 4),
    "depthwise, line": (2, 4, 4, (9,), (4,), (2,), (1,), (3, 1), 4),
    "few inputs and outputs": (2, 3, 4, (7, 6), (3, 3), (2, 1), (1, 2), (1, 0, 2, 1), 1),
    "patches": (2, 20, 9, (6, 40), (3, 20), (3, 20), (1, 1), (0,) * 4, 1),
    "patches, many": (2, 20, 24, (36, 40), (4, 4), (4, 4), (1, 1), (0,) * 4, 1),
    "patches, overlapping": (2, 4, 64, (6, 72), (4, 20), (3, 7), (1, 1), (0, 3, 1, 2), 1),
    "one window, apart": (4, 40, 20, (12, 13), (6, 6), (1, 1), (2, 2), (0,) * 4, 1),
    "kernel above image": (4, 48, 16, (7, 30), (2, 33), (1, 1), (2, 1), (1, 17, 0, 16), 1),
    "kernel above image, stride": (
        4,
        16,
        48,
        (12, 70),
        (1, 102),
        (2, 3),
        (1, 1),
        (0, 50, 0, 50),
        1,
    ),
    "depthwise, long": (2, 4, 4, (50,), (37,), (1,), (1,), (18, 17), 4),
    "depthwise, large": (2, 4, 4, (14, 15), (7, 9), (2, 1), (1, 2), (3, 8, 4, 7), 4),
    "depthwise, wide stride": (2, 4, 4, (90,), (40,), (41,), (1,), (0, 0), 4),
}


def arrays(n, c, m, size, kernel, strides, dilations, pads, groups):
    windows = place_windows(size, kernel, strides=strides, dilations=dilations, pads=pads)
    shapes = (n, *size, c), (m, c // groups, *kernel), (n, *windows.out, m)
    rng = np.random.default_rng(0)  # the same for a case, whichever tests run before it
    return Conv(size, *windows, groups=groups), [
        rng.normal(size=s).astype(np.float32) for s in shapes
    ]


@pytest.mark.deep
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_contractions_of_convolutions(name):
    """Each of the three arrays from the other two, in one program."""
    form, values = arrays(*CONVOLUTIONS[name])
    other = dataclasses.replace(form, turned=True)
    turn = (*range(2, values[1].ndim), 1, 0)

    def results(x, w, y):
        for out in range(3):
            u, v = (a for i, a in enumerate((x, w, y)) if i != out)
            plain = form.plain(out, u, v)
            yield plain, form.fast(out, u, v), contract(form, out, u, v)
            u, v = (a for i, a in enumerate((x, w.transpose(turn), y)) if i != out)
            plain = plain.transpose(turn) if out == 1 else plain
            yield plain, other.plain(out, u, v), other.fast(out, u, v)

    found = jax.jit(lambda *values: list(results(*values)))(*values)
    for out, (expected, *actual) in enumerate(found):
        assert out % 2 or expected.shape == values[out // 2].shape
        for result in actual:
            np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.deep
@pytest.mark.parametrize("out", range(3))
def test_winograd_rounds_like_the_plain_form(out):
    form, values = arrays(2, 64, 64, (14, 14), (3, 3), (1, 1), (1, 1), (1,) * 4, 1)
    assert form._few_multiplications(out, 2, 64, 64, beside=False)
    u, v = (a for i, a in enumerate(values) if i != out)
    with jax.enable_x64(True):
        exact = np.asarray(form.plain(out, *(jnp.asarray(a, np.float64) for a in (u, v))))
    fast, plain = (np.abs(f(out, u, v) - exact).max() for f in (form.fast, form.plain))
    assert fast < min(2 * plain, 2e-6 * np.abs(exact).max())


@pytest.mark.deep
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_export_for_any_batch(name):
    form, (x, w, y) = arrays(*CONVOLUTIONS[name])
    (n,) = export.symbolic_shape("n")
    for out in range(3):
        given = [
            a if i == 1 else jax.ShapeDtypeStruct((n, *a.shape[1:]), a.dtype)
            for i, a in enumerate((x, w, y))
            if i != out
        ]
        program = export.export(jax.jit(partial(contract, form, out)), platforms=("cpu",))(*given)
        assert program.out_avals[0].shape == (
            w.shape if out == 1 else (n, *(x, w, y)[out].shape[1:])
        )


DIFFERENTIATED = ["grouped", "depthwise, stride", "image below kernel", "Winograd"]


@pytest.mark.deep
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_derivatives_of_all_orders_and_batches(name):
    form, (x, w, y) = arrays(*CONVOLUTIONS[name])
    w = w / np.sqrt(w[0].size, dtype=w.dtype)  # or tanh is flat, and its derivative mere rounding

    @jax.jit
    def forward(x, w):
        return jnp.tanh(contract(form, 2, x, w))

    with jax.enable_x64(True):
        doubles = [a.astype(np.float64) for a in (x, w)]
        central_differences.check(lambda *a: [forward(*a)], doubles, 2, rtol=1e-3, atol=1e-4)
    gradient = jax.grad(lambda x, w: (forward(x, w) * y).sum(), (0, 1))
    batches = (0, None), (None, 0), (0, 0)

    @jax.jit
    def gradients(xs, ws):
        """Of batches, and of each pair of what they have."""
        pick = lambda a, axis: a if axis == 0 else a[0]  # noqa: E731
        batched = [jax.vmap(gradient, b)(*map(pick, (xs, ws), b)) for b in batches]
        return batched, [[gradient(x, w) for w in ws] for x in xs]

    batched, single = gradients(np.stack([x, 2 * x]), np.stack([w, -w / 2]))
    for (of_x, of_w), pair in zip(batches, batched, strict=True):
        for i in range(2):
            expected = single[i if of_x == 0 else 0][i if of_w == 0 else 0]
            for a, b in zip(pair, expected, strict=True):
                np.testing.assert_allclose(a[i], b, rtol=1e-3, atol=1e-4)


def test_gradient_for_shared_weights_is_one_contraction():
    """No gradient per example is made when a batched function is differentiated."""
    form, (x, w, _) = arrays(*CONVOLUTIONS["general"])
    xs = np.stack([x] * 8)

    def loss(w):
        return jax.vmap(lambda x: contract(form, 2, x, w))(xs).sum()

    expected = 8 * jax.grad(lambda w: contract(form, 2, x, w).sum())(w)
    np.testing.assert_allclose(jax.grad(loss)(w), expected, rtol=1e-3, atol=1e-3)
    text = jax.jit(jax.grad(loss)).lower(w).as_text()
    assert "x".join(map(str, (8, *w.shape))) not in text


# kernels whose elements, or steps, a program must not have one by one
LONG = {
    "patches": (1, 1, 36, (1, 44032), (1, 256), (1, 256), (1, 1), (0,) * 4, 1),
    "patches of images": (1, 3, 192, (224, 224), (16, 16), (16, 16), (1, 1), (0,) * 4, 1),
    "kernel above image": (4, 32, 32, (100,), (128,), (1,), (1,), (64, 63), 1),
    "few windows": (4, 32, 32, (140,), (130,), (1,), (1,), (0, 0), 1),
    "few windows, dilation": (4, 32, 32, (270,), (130,), (1,), (2,), (0, 0), 1),
    "depthwise": (1, 64, 64, (56, 56), (31, 31), (1, 1), (1, 1), (15,) * 4, 64),
    "depthwise line": (1, 64, 64, (2000,), (1024,), (1,), (2,), (512, 511), 64),
    "depthwise, wide stride": (1, 64, 64, (5000,), (7,), (999,), (1,), (0, 0), 64),
}


def slices(text):
    """How many slices, and their transposes, a program has."""
    return len(re.findall(r"= (?:slice|pad)\[", text))


@pytest.mark.parametrize("name", LONG)
def test_long_kernels_are_not_unrolled(name):
    form, values = arrays(*LONG[name])
    for turned in (False, True):
        rule = dataclasses.replace(form, turned=turned)
        x, w, y = values
        w = w.transpose(*range(2, w.ndim), 1, 0) if turned else w
        for out in range(3):
            given = [a for i, a in enumerate((x, w, y)) if i != out]
            for function in (rule.fast, rule.map_weights):
                program = jax.make_jaxpr(partial(function, out))(*given)
                assert slices(str(program)) < 2 * UNROLLED


@pytest.mark.parametrize(("size", "step"), [(98, 98), (97, 1), (512, 256)])
def test_long_windows_of_pools_are_not_unrolled(size, step):
    windows = place_windows((1024, 1), (size, 1), strides=(step, 1))
    x = np.zeros((2, 3, 1024, 1), np.float32)
    for pool in (lowering.max_pool, lowering.window_sum):
        gradient = jax.jit(jax.grad(lambda x, pool=pool: pool(x, windows).sum()))
        program = gradient.trace(x).lower(lowering_platforms=("cpu",)).as_text()
        assert len(re.findall(r"stablehlo\.(?:slice|pad)", program)) < 6 * UNROLLED
    program = jax.make_jaxpr(lambda x: lowering.first_winner(x, windows))(x)
    assert slices(str(program)) < 4 * UNROLLED


@pytest.mark.parametrize("outputs", [16, 64])
def test_an_image_of_few_channels_is_read_in_place(outputs):
    """Windows laid side by side would be nine times the image, and for 16 results three of them."""
    form, (x, w, y) = arrays(1, 3, outputs, (128, 128), (3, 3), (1, 1), (1, 1), (1,) * 4, 1)
    program = jax.make_jaxpr(partial(form.fast, 2))(x, w)
    sizes = [v.aval.size for e in program.jaxpr.eqns for v in e.outvars]
    assert max(sizes) <= max(y.size, 130 * 130 * 3)


@pytest.mark.deep
def test_long_windows_of_pools():
    """The loops over pieces of a window, and long windows side by side, by NumPy."""
    x = rng.integers(0, 5, (2, 3, 150)).astype(np.float32)  # many ties
    for size, step, pad in ((70, 70, 0), (70, 1, 0), (66, 3, 20), (150, 1, 0)):
        windows = place_windows((150,), (size,), strides=(step,), pads=(pad, pad))
        pooled, pull = jax.vjp(lambda x, windows=windows: lowering.max_pool(x, windows), x)
        y = rng.normal(size=pooled.shape).astype(np.float32)
        np.testing.assert_allclose(pull(y)[0], first_wins(x, y, windows), rtol=1e-5, atol=1e-6)
        around = np.pad(x, ((0, 0), (0, 0), (pad, pad)), constant_values=-np.inf)
        parts = np.lib.stride_tricks.sliding_window_view(around, size, 2)[..., ::step, :]
        np.testing.assert_array_equal(pooled, parts.max(-1))
        np.testing.assert_array_equal(lowering.first_winner(x, windows), parts.argmax(-1))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_half_precision_accumulates_in_float32(dtype):
    ones = np.ones((1, 512, 4, 4), dtype)
    w = np.full((1, 512, 3, 3), 1 / 64, dtype)
    windows = place_windows((4, 4), (3, 3), pads=(1,) * 4)
    y = lowering.convolution(ones, w, windows, 1)
    assert y.dtype == dtype
    assert y[0, 0, 1, 1] == 512 * 9 / 64


@pytest.mark.deep
@pytest.mark.parametrize(
    ("size", "kernel", "strides", "dilations", "pads"),
    [
        ((6, 7), (2, 2), (2, 2), (1, 1), (0,) * 4),
        ((6, 7), (3, 3), (2, 1), (1, 1), (1,) * 4),
        ((9, 8), (2, 3), (3, 2), (2, 1), (1, 0, 0, 1)),
        ((9, 8), (5, 5), (2, 2), (1, 1), (2,) * 4),
        ((9,), (3,), (4,), (1,), (0, 0)),
    ],
)
def test_pooling(size, kernel, strides, dilations, pads):
    windows = place_windows(size, kernel, strides=strides, dilations=dilations, pads=pads)
    x = rng.integers(0, 5, (2, 3, *size)).astype(np.float32)  # many ties
    form = Sum(Taps(size, *windows, lead=2))
    y = rng.normal(size=(2, 3, *windows.out)).astype(np.float32)
    one = np.ones((), np.float32)
    np.testing.assert_allclose(form.fast(2, one, x), form.plain(2, one, x), rtol=1e-6)
    np.testing.assert_allclose(form.fast(1, one, y), form.plain(1, one, y), rtol=1e-5, atol=1e-6)
    pooled, pull = jax.vjp(lambda x: lowering.max_pool(x, windows), x)
    wanted = first_wins(x, y, windows)
    np.testing.assert_allclose(pull(y)[0], wanted, rtol=1e-5, atol=1e-6)
    assert pooled.shape == y.shape
    if max(dilations) == 1:
        on_tpu, pull = jax.vjp(lambda x: _pool._reduce_max(x, Taps(size, *windows, lead=2)), x)
        np.testing.assert_array_equal(on_tpu, pooled)
        np.testing.assert_allclose(pull(y)[0], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kernel", "dilation"), [(2, 1), (5, 1), (2, 2)])
def test_a_tpu_pools_by_its_instructions(kernel, dilation):
    windows = place_windows((9, 9), (kernel,) * 2, strides=(2, 2), dilations=(dilation,) * 2)
    x = np.zeros((2, 9, 9, 3), np.float32)
    pool = jax.value_and_grad(lambda x: lowering.max_pool(x, windows, -1).sum())
    traced = jax.jit(pool).trace(x)
    texts = [traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda", "tpu")]
    counts = [(t.count("reduce_window"), t.count("select_and_scatter")) for t in texts]
    passes = 0 if dilation > 1 else 1 if kernel == 2 else 2  # of large windows one for each axis
    assert counts == [(0, 0), (0, 0), (passes, passes)]


def first_wins(x, y, windows):
    """The gradient of max pooling written as loops."""
    dx = np.zeros_like(x)
    for place in np.ndindex(*windows.out):
        start = [
            p * s - b for p, s, (b, _) in zip(place, windows.strides, windows.pads, strict=True)
        ]
        inside = []
        for tap in np.ndindex(*windows.kernel):
            at = tuple(b + t * d for b, t, d in zip(start, tap, windows.dilations, strict=True))
            if all(0 <= a < n for a, n in zip(at, x.shape[2:], strict=True)):
                inside.append(at)
        values = np.stack([x[(..., *at)] for at in inside])
        for index in np.ndindex(x.shape[:2]):
            best = inside[int(values[(slice(None), *index)].argmax())]
            dx[(*index, *best)] += y[(*index, *place)]
    return dx


def test_first_max_with_ties():
    x = jnp.array([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
    np.testing.assert_array_equal(
        jax.grad(lambda x: lowering.first_max(x, 1).sum())(x), [[0, 1, 0], [1, 0, 0]]
    )


def test_only_cpu_leaves_the_plain_form():
    form, (x, w, _) = arrays(*CONVOLUTIONS["depthwise, stride"])
    gradient = jax.jit(jax.grad(lambda x, w: contract(form, 2, x, w).sum(), (0, 1)))
    counts = {
        platform: gradient.trace(x, w)
        .lower(lowering_platforms=(platform,))
        .as_text()
        .count("stablehlo.convolution")
        for platform in ("cpu", "cuda", "tpu")
    }
    assert counts == {"cpu": 0, "cuda": 2, "tpu": 2}


def test_operation_by_operation():
    form, values = arrays(*CONVOLUTIONS["few inputs"])
    with jax.disable_jit():
        y = contract(form, 2, *values[:2])
    np.testing.assert_allclose(y, form.plain(2, *values[:2]), rtol=1e-5, atol=1e-5)


@pytest.mark.deep
def test_bounds_are_fitted(monkeypatch, capsys):
    """`benchmarks.speed.lowerings --fit` measures other bounds and keeps the present ones."""
    from benchmarks.speed import fit, lowerings

    shapes = ((1, 2, 4, 4, 3, 1, 1), (1, 1, 4, 4, 3, 1, 1))
    bound = fit.Bound(_conv, "NARROW", (8, 32), "convolution", shapes)
    monkeypatch.setattr(fit, "BOUNDS", (bound,))
    before = bound.now
    fit.fit({"convolution": lowerings.convolution}, rounds=1)
    assert "8: " in capsys.readouterr().out
    assert bound.now == before
