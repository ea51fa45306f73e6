"""Scattering: gradients at shared places, zeros and ties; indices that are not known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.gradient_points import operator

PLACES = np.array([[0, 0, 1, 1, -1]])


def gradients(reduction, x, updates):
    """The result of scattering to `PLACES` and the gradients of its sum."""

    def f(x, updates):
        y = operator("ScatterElements")(x, PLACES, updates, axis=1, reduction=reduction)
        return y.sum(), y

    (_, y), by = jax.value_and_grad(f, (0, 1), has_aux=True)(
        jnp.float32([x]), jnp.float32([updates])
    )
    return y[0].tolist(), by[0][0].tolist(), by[1][0].tolist()


@pytest.mark.deep
def test_products_with_a_zero_have_gradients():
    """y0 = 2 u0 u1, y1 = 3 u2 u3 with u2 = 0, y2 = 0 u4."""
    y, by_x, by_updates = gradients("mul", [2, 3, 0], [5, 7, 0, 4, 6])
    assert y == [70, 0, 0]
    assert by_x == [35, 0, 6]
    assert by_updates == [14, 10, 12, 0, 0]


@pytest.mark.deep
def test_products_with_two_zeros_have_second_derivatives():
    def f(u):
        x = jnp.ones(1)
        return operator("ScatterND")(x, np.zeros((3, 1), int), u, reduction="mul").sum()

    hessian = jax.hessian(f)(jnp.array([0.0, 0.0, 3.0]))
    np.testing.assert_allclose(hessian, [[0, 3, 0], [3, 0, 0], [0, 0, 0]])


def test_ties_of_a_maximum_share_the_gradient():
    """As `torch.scatter_reduce(..., 'amax')` has it."""
    y, by_x, by_updates = gradients("max", [2, 3, 1], [2, 2, 1, 4, 0])
    assert y == [2, 4, 1]
    np.testing.assert_allclose(by_x, [1 / 3, 0, 1], rtol=1e-6)
    np.testing.assert_allclose(by_updates, [1 / 3, 1 / 3, 0, 1, 0], rtol=1e-6)


def test_unknown_indices_out_of_range_read_nan_and_write_nothing():
    x = jnp.array([1.0, 2.0, 3.0])

    @jax.jit
    def f(i):
        return (
            operator("Gather")(x, i),
            operator("GatherElements")(x, i),
            operator("GatherND")(x, i[:, None]),
            operator("ScatterElements")(x, i, jnp.full(3, 9.0)),
            operator("ScatterND")(x, i[:, None], jnp.full(3, 9.0), reduction="mul"),
        )

    *gathered, put, product = f(np.array([-1, 3, -4]))
    for y in gathered:
        np.testing.assert_array_equal(y, [3, np.nan, np.nan])
    np.testing.assert_array_equal(put, [1, 2, 9])
    np.testing.assert_array_equal(product, [1, 2, 27])


def test_scattering_nothing():
    x, none = jnp.ones((2, 3)), np.zeros((0, 3))
    for reduction in "none", "add", "mul", "max", "min":
        y = operator("ScatterElements")(x, none.astype(int), jnp.asarray(none), reduction=reduction)
        np.testing.assert_array_equal(y, x)


def test_compress_of_a_traced_tensor_has_a_gradient():
    condition = np.array([True, False, True])
    gradient = jax.grad(lambda x: (operator("Compress")(x, condition) ** 2).sum())(jnp.arange(3.0))
    np.testing.assert_array_equal(gradient, [0, 0, 4])
