"""Reductions where tables of random cases do not reach.

Gradients are those of PyTorch 2.13 at the same points unless a comment says otherwise.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxonnx.errors import NodeError
from jaxonnx.registry import operators
from tests.support.gradient_points import assert_point, operator

inf = np.inf

EMPTY = {
    "ReduceL1": 0,
    "ReduceL2": 0,
    "ReduceLogSum": -inf,
    "ReduceLogSumExp": -inf,
    "ReduceMax": -inf,
    "ReduceMin": inf,
    "ReduceProd": 1,
    "ReduceSum": 0,
    "ReduceSumSquare": 0,
}


@pytest.mark.parametrize(
    ("name", "x", "value", "gradient"),
    [
        ("ReduceL1", [0, 0], 0, [0, 0]),
        ("ReduceL2", [0, 0], 0, [0, 0]),
        ("ReduceMax", [1, 2, 2], 2, [0, 0.5, 0.5]),
        ("ReduceMin", [1, 1, 2], 1, [0.5, 0.5, 0]),
        ("ReduceProd", [0, 2, 3], 0, [6, 0, 0]),
        ("ReduceProd", [0, 0, 3], 0, [0, 0, 0]),
        # PyTorch has NaN for the gradient of the first: nothing flows into masked rows here
        ("ReduceLogSumExp", [-inf, -inf], -inf, [0, 0]),
        ("ReduceLogSumExp", [-inf, 0], 0, [0, 1]),
        ("ReduceLogSumExp", [1000, 1000], 1000.6931, [0.5, 0.5]),
    ],
)
def test_gradient_at_awkward_points(name, x, value, gradient):
    assert_point(name, [x], value, gradient, keepdims=0)


def test_norm_of_a_zero_vector_in_second_order():
    f = jax.hessian(lambda x: operator("ReduceL2")(x, keepdims=0))
    np.testing.assert_array_equal(f(np.zeros(2, np.float32)), np.zeros((2, 2)))


def test_cumulative_product_through_zero():
    x, axis = [2, 0, 3], np.array(0)
    assert_point("CumProd", [x], [2, 0, 0], [1, 8, 0], static=[axis])


def test_top_k_gradient_goes_to_the_chosen():
    assert_point("TopK", [[1, 3, 2]], [3, 2], [0, 1, 1], static=[np.array([2])])
    assert_point("TopK", [[1, 3, 2]], [1, 2], [1, 0, 1], static=[np.array([2])], largest=0)


@pytest.mark.parametrize("name", EMPTY)
def test_reduction_of_nothing(name):
    x, axes = jnp.zeros((2, 0, 3)), np.array([1])
    np.testing.assert_array_equal(operator(name)(x, axes), np.full((2, 1, 3), EMPTY[name]))
    assert jax.grad(lambda x: operator(name)(x, axes).sum())(x).shape == x.shape


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.bool_])
def test_extremum_of_nothing_in_integers(place, dtype):
    x, axes = place(np.zeros((0, 2), dtype)), np.array([0])
    low, high = (False, True) if dtype == np.bool_ else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    for name, value in (("ReduceMax", low), ("ReduceMin", high)):
        result = operator(name)(x, axes)
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, [[value, value]])


@pytest.mark.parametrize("name", [o.name for o in operators() if o.name.startswith("Reduce")])
@pytest.mark.parametrize("place", [np.asarray, jnp.asarray])
def test_integers_keep_their_type(name, place):
    x = place(np.array([[1, 2], [3, 4]], np.int32))
    assert operator(name)(x, np.array([0])).dtype == np.int32


@pytest.mark.parametrize("axes", [[2], [-3], [0, -2]])
def test_axes_are_checked(axes):
    x = np.ones((2, 3), np.float32)
    with pytest.raises(NodeError, match=r"ax[ie]s"):
        operator("ReduceMax", 11)(x, axes=axes)
    with pytest.raises(NodeError, match=r"ax[ie]s"):
        operator("ReduceMax", 18)(x, np.array(axes))


def test_an_equation_has_letters_only():
    einsum = operator("Einsum", 12)
    assert einsum(np.ones((2, 3), np.float32), equation=" ...A b-> ...A ").shape == (2,)
    for equation in ("ij0->ij", "ij\0->ij", "ié->i"):
        with pytest.raises(NodeError, match="which is not a letter"):
            einsum(np.ones((2, 3, 1)), equation=equation)


def test_sums_of_half_precision_do_not_stall():
    # float16 cannot count beyond 2048 in steps of 1
    for x in (np.ones(5000, np.float16), jnp.ones(5000, np.float16)):
        assert operator("ReduceSum")(x) == 5000
        assert operator("ReduceMean")(x) == 1


def test_smallest_of_the_least_integer():
    x = np.array([1, -128, 127], np.int8)
    values, indices = operator("TopK")(x, np.array([2]), largest=0)
    assert values.tolist() == [-128, 1]
    assert indices.tolist() == [1, 0]
    values, _ = operator("TopK")(x.view(np.uint8), np.array([2]), largest=0)
    assert values.tolist() == [1, 127]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    ("largest", "expected"), [(1, [2, 0, 1, 3, 4, 5]), (0, [5, 0, 1, 3, 4, 2])]
)
def test_zeros_of_both_signs_are_equal(dtype, largest, expected):
    x = np.array([-0.0, 0.0, 1.0, -0.0, 0.0, -1.0], dtype)
    values, indices = operator("TopK")(x, np.array([6]), largest=largest)
    assert indices.tolist() == expected  # of onnxruntime
    np.testing.assert_array_equal(np.signbit(values), np.signbit(x[expected]))


@pytest.mark.parametrize(("largest", "expected"), [(1, [1, 3, 2, 0]), (0, [0, 2, 1, 3])])
def test_nan_of_either_sign_is_greatest(largest, expected):
    x = np.array([1.0, -np.nan, 2.0, np.nan], np.float32)
    _, indices = operator("TopK")(x, np.array([4]), largest=largest)
    assert indices.tolist() == expected  # of np.argsort, and of onnxruntime


def test_first_and_last_of_equal_extrema():
    for x in (np.array([[1, 2, 2], [2, 2, 1]]), jnp.array([[1, 2, 2], [2, 2, 1]])):
        f = operator("ArgMax")
        assert f(x, axis=1, keepdims=0).tolist() == [1, 0]
        assert f(x, axis=1, keepdims=0, select_last_index=1).tolist() == [2, 1]
        assert f(x, axis=-1, keepdims=0, select_last_index=1).tolist() == [2, 1]
