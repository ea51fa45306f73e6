"""What the tables of cases do not hold: singular matrices, BLAS's beta, wrong shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxonnx.ops  # noqa: F401 - registers the operators
from jaxonnx.errors import NodeError
from jaxonnx.registry import lookup

gemm, gemm_1 = (lookup("", "Gemm", opset) for opset in (13, 6))
det = lookup("", "Det", 22)
matmul = lookup("", "MatMul", 13)


def test_beta_zero_does_not_read_c():
    a = np.eye(2, dtype=np.float32)
    y = gemm(a, a, np.full((2, 2), np.nan, np.float32), beta=0.0)
    np.testing.assert_array_equal(y, a)


def test_gemm_of_integers_stays_integer():
    a = np.ones((2, 2), np.int32)
    y = gemm(a, a, a, alpha=2.0, beta=3.0)
    assert y.dtype == np.int32
    np.testing.assert_array_equal(y, np.full((2, 2), 7))


def test_gemm_refuses_wrong_shapes():
    a = np.ones((2, 3), np.float32)
    with pytest.raises(NodeError, match="broadcast is 0"):
        gemm_1(a, a.T, np.ones(2, np.float32))
    with pytest.raises(NodeError, match="does not broadcast"):
        gemm(a, a.T, np.ones((4, 2, 2), np.float32))
    with pytest.raises(NodeError, match=r"a has shape .* must be \(_, _\)"):
        gemm(a[None], a.T)


def test_stack_times_matrix_is_one_product():
    shapes = jax.make_jaxpr(matmul)(jnp.ones((2, 3, 4)), jnp.ones((4, 5)))
    (product,) = [e for e in shapes.eqns if e.primitive.name == "dot_general"]
    assert product.outvars[0].aval.shape == (6, 5)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_det_of_singular_matrices_has_a_gradient(rank):
    x = np.diag([2.0] * rank + [0.0] * (4 - rank)).astype(np.float32)
    cofactors = np.zeros((4, 4))
    if rank == 3:
        cofactors[3, 3] = 8
    np.testing.assert_allclose(jax.grad(det)(x), cofactors, atol=1e-6)


def test_det_of_nothing():
    x = jnp.zeros((2, 0, 0))
    np.testing.assert_array_equal(det(x), [1, 1])
    assert jax.grad(lambda x: det(x).sum())(x).shape == x.shape


def test_determinants_are_of_square_matrices():
    assert det(np.zeros((3, 0, 0), np.float32)).tolist() == [1, 1, 1]
    for shape in ((3, 2, 0), (2,)):
        with pytest.raises(NodeError, match=r"must be \(\*N, M, M\)"):
            det(np.zeros(shape, np.float32))
