"""Resize and GridSample where the tables of cases do not look."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxonnx.ops  # noqa: F401 - registers the operators
from jaxonnx.errors import NodeError
from jaxonnx.registry import lookup

resize = lookup("", "Resize", 19)
grid_sample = lookup("", "GridSample", 22)
X = np.arange(12, dtype=np.float32).reshape(1, 1, 3, 4)


def test_an_infinite_pixel_stays_where_it_is():
    x = X.copy()
    x[0, 0, 0, 0] = np.inf
    y = np.asarray(resize(x, None, np.array([1, 1, 2, 2], np.float32), mode="linear"))
    assert np.isfinite(y[0, 0, 3:]).all()
    assert np.isfinite(y[0, 0, :, 3:]).all()


def test_the_output_has_the_size_that_float32_arithmetic_gives():
    x = np.ones((10,), np.float32)
    assert resize(x, None, np.array([0.7], np.float32)).shape == (7,)


def test_enlarging_by_whole_numbers_needs_no_gather():
    scales = np.array([1, 1, 2, 3], np.float32)
    program = jax.make_jaxpr(lambda x: resize(x, None, scales))(X)
    assert "gather" not in str(program)
    np.testing.assert_array_equal(resize(X, None, scales), X.repeat(2, 2).repeat(3, 3))


def test_gradients_need_no_scatter():
    scales = np.array([1, 1, 1.5, 2], np.float32)

    def total(x):
        return jnp.sum(resize(x, None, scales, mode="cubic") ** 2)

    assert "scatter" not in str(jax.make_jaxpr(jax.grad(total))(X))


def test_integers_are_rounded():
    x = np.array([0, 255], np.uint8)
    y = resize(x, None, np.array([2], np.float32), mode="linear")
    assert y.dtype == np.uint8
    np.testing.assert_array_equal(y, [0, 64, 191, 255])


def test_refusals():
    one = np.ones(4, np.float32)
    with pytest.raises(NodeError, match="exactly one"):
        resize(X)
    with pytest.raises(NodeError, match="exactly one"):
        resize(X, None, one, np.array([1, 1, 3, 4]))
    with pytest.raises(NodeError, match="2 scales or sizes"):
        resize(X, None, one[:2])
    with pytest.raises(NodeError, match=r"must be positive: \[1, 1, 0, 4\]"):
        resize(X, None, None, np.array([1, 1, 0, 4]))
    assert resize(X[:0], None, None, np.array([0, 1, 3, 4])).shape == (0, 1, 3, 4)
    with pytest.raises(NodeError, match="cannot have sizes"):
        resize(X[:0], None, None, np.array([1, 1, 3, 4]))
    with pytest.raises(NodeError, match=r"mode must be .*got 'area'"):
        resize(X, None, one, mode="area")
    with pytest.raises(NodeError, match="nearest_mode"):
        resize(X, None, 2 * one, nearest_mode="up")
    with pytest.raises(NodeError, match="coordinate_transformation_mode"):
        resize(X, None, 2 * one, coordinate_transformation_mode="corners")
    with pytest.raises(NodeError, match="roi"):
        resize(X, None, 2 * one, coordinate_transformation_mode="tf_crop_and_resize")
    grid = lookup("", "AffineGrid", 20)
    with pytest.raises(NodeError, match="does not fit 1 images"):
        grid(np.zeros((2, 2, 3), np.float32), np.array([1, 1, 2, 2]))
    with pytest.raises(NodeError, match="does not fit"):
        grid_sample(X, np.zeros((1, 2, 2, 3), np.float32))


def test_bicubic_sampling_at_the_border_is_that_of_pytorch():
    grid = np.array([[[[-1.2, -1.1], [1.3, 0.9], [0.1, -1.05]]]], np.float32)
    y = grid_sample(X, grid, mode="cubic", padding_mode="border", align_corners=1)
    # torch.nn.functional.grid_sample of PyTorch 2.13 with the same settings
    expected = [-0.3532496988773346, 10.801095962524414, 1.4805010557174683]
    np.testing.assert_allclose(y[0, 0, 0], expected, rtol=1e-5, atol=1e-6)
