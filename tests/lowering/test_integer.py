"""Products of 8-bit integers are exact, in either formulation."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxonnx.lowering import KernelFirst, _integer, integer_convolution, integer_product
from jaxonnx.ops.pool import place_windows
from tests.support.sweeps import sweep

TYPES = (np.int8, np.uint8)


@pytest.fixture(params=[True, False], ids=["int8", "float32"])
def formulation(request, monkeypatch):
    monkeypatch.setattr(_integer, "FAST_INT8", request.param)


def draw(random, dtype, *shape):
    info = np.iinfo(dtype)
    return random.integers(info.min, info.max + 1, shape, dtype=dtype)


@pytest.mark.parametrize("rows", sweep([1, 2, 17], 0))
@pytest.mark.usefixtures("formulation")
def test_products_equal_those_of_int64(rows):
    random = np.random.default_rng(0)
    for left, right, points in itertools.product(TYPES, TYPES, ("none", "one", "many")):
        a, b = draw(random, left, rows, 1500), draw(random, right, 1500, 9)
        zeros: list = [None, None]
        if points != "none":
            shapes = ((), ()) if points == "one" else ((rows, 1), (9,))
            zeros = [draw(random, x, *s) for x, s in zip((left, right), shapes, strict=True)]
        wide = [
            x.astype(np.int64) - (0 if zero is None else zero.astype(np.int64))
            for x, zero in zip((a, b), zeros, strict=True)
        ]
        y = jax.jit(lambda *operands: integer_product(*operands))(a, b, *zeros)
        assert y.dtype == jnp.int32
        np.testing.assert_array_equal(y, wide[0] @ wide[1])


@pytest.mark.usefixtures("formulation")
def test_the_largest_sums_are_exact():
    """All products of -128 by -128 add up to more than float32 has integers for."""
    for k in (1, 1024, 1025, 20000):
        a, b = np.full((3, k), -128, np.int8), np.full((k, 5), -128, np.int8)
        b[-1] = 127  # an odd sum, so that nothing is a multiple of a power of two
        a[-1, -1] = 1
        y = jax.jit(integer_product)(a, b)
        np.testing.assert_array_equal(y, a.astype(np.int64) @ b.astype(np.int64))


def convolve(x, w, window, groups):
    """Convolve int64 images (N, C, H, W), window by window."""
    x = np.pad(x, ((0, 0), (0, 0), *window.pads))
    y = np.zeros((len(x), len(w), *window.out), np.int64)
    per_group, outputs = w.shape[1], len(w) // groups
    for m, i, j in np.ndindex(len(w), *window.out):
        (a, b), (s, t), (d, e) = (i, j), window.strides, window.dilations
        rows = slice(a * s, a * s + (window.kernel[0] - 1) * d + 1, d)
        columns = slice(b * t, b * t + (window.kernel[1] - 1) * e + 1, e)
        first = m // outputs * per_group
        part = x[:, first : first + per_group, rows, columns]
        y[:, m, i, j] = (part * w[m]).sum((1, 2, 3))
    return y


@pytest.mark.parametrize(("groups", "outputs"), [(1, 5), (2, 6), (4, 4)])
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ((3, 3), {"pads": [1, 0, 2, 1], "strides": [2, 1]}),
        ((1, 1), {"strides": [2, 2]}),
        ((2, 3), {"dilations": [2, 1], "auto_pad": "SAME_UPPER"}),
        ((7, 7), {"pads": [3, 3, 3, 3]}),
    ],
)
@pytest.mark.usefixtures("formulation")
def test_convolutions_equal_those_of_int64(kernel, options, groups, outputs):
    random = np.random.default_rng(1)
    x, x_zero = draw(random, np.uint8, 2, 4, 7, 6), np.uint8(131)
    w, w_zero = draw(random, np.int8, outputs, 4 // groups, *kernel), draw(random, np.int8, outputs)
    window = place_windows(x.shape[2:], kernel, **options)
    wide = x.astype(np.int64) - x_zero, w.astype(np.int64) - w_zero.reshape(-1, 1, 1, 1)
    expected = convolve(*wide, window, groups)

    @jax.jit
    def convolved(x, w, x_zero, w_zero):
        first = KernelFirst(w.transpose(2, 3, 1, 0))
        last = jnp.moveaxis(x, 1, -1)
        y = integer_convolution(last, first, window, groups, x_zero, w_zero, channels=-1)
        return integer_convolution(x, w, window, groups, x_zero, w_zero), y

    plain, last = convolved(x, w, x_zero, w_zero)
    np.testing.assert_array_equal(plain, expected)
    np.testing.assert_array_equal(np.moveaxis(last, -1, 1), expected)
