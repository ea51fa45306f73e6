"""A quotient is rounded once, as NumPy's is, in whatever program XLA:CPU compiles."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxonnx.lowering import divide

K = np.arange(1, 4096, dtype=np.float32)
C, D = np.float32(41), np.float32(0.7)
EXACT = K / C


def over_rows(x, y):
    return jax.vmap(divide, (0, None))(x, y)


def in_a_shard(x, y):
    part = PartitionSpec("a")
    mesh = Mesh(np.array(jax.devices()[:1]), ("a",))
    function = partial(jax.shard_map, mesh=mesh, in_specs=part, out_specs=part)
    return function(lambda x: divide(x, y))(x)


CALLS = {
    "plain": divide,
    "vmap": over_rows,
    "vmap of vmap": lambda x, y: jax.vmap(over_rows, (0, None))(x[None], y)[0],
    "vmap of the divisor": lambda x, y: jax.vmap(divide, (None, 0))(x, jnp.stack([y, y]))[1],
    "scan": lambda x, y: lax.scan(lambda y, x: (y, divide(x, y)), y, x)[1],
    "while": lambda x, y: lax.fori_loop(0, 1, lambda i, x: divide(x, y), x),
    "cond": lambda x, y: lax.cond(y > 0, divide, jnp.add, x, y * jnp.ones_like(x)),
    "remat": jax.checkpoint(divide),
    "value of a gradient": lambda x, y: jax.vjp(divide, x, y)[0],
    "value of a tangent": lambda x, y: jax.jvp(divide, (x, y), (x, y))[0],
    "shard_map": in_a_shard,
}


@pytest.mark.parametrize("name", CALLS)
def test_every_transformation_divides_exactly(name):
    function = CALLS[name]
    assert (np.asarray(jax.jit(lambda x: function(x, C))(K)) == EXACT).all()
    assert (np.asarray(jax.jit(function)(K, C)) == EXACT).all()
    assert (np.asarray(function(jnp.asarray(K), jnp.asarray(C))) == EXACT).all()
    with jax.disable_jit():
        assert (np.asarray(function(K[:3], C)) == EXACT[:3]).all()


EXPRESSIONS = {
    "a row of divisors": lambda m, x, v, c: m.divide(x[:4095].reshape(-1, 63), v[:63]),
    "a column of divisors": lambda m, x, v, c: m.divide(x[:4095].reshape(63, -1), v[:63, None]),
    "a quotient divided": lambda m, x, v, c: m.divide(m.divide(x, c), np.float32(7)),
    "a quotient as divisor": lambda m, x, v, c: m.divide(x, m.divide(v, c)),
    "a root as divisor": lambda m, x, v, c: m.divide(x, m.sqrt(v)),
    "one over a root": lambda m, x, v, c: m.divide(m.ones_like(x), m.sqrt(v)),
    "constants divided": lambda m, x, v, c: m.divide(K, c),
    "constants divided by one": lambda m, x, v, c: m.divide(m.asarray(K), C),
    "a product divided": lambda m, x, v, c: m.divide(x * D, c),
    "a quotient multiplied": lambda m, x, v, c: m.divide(x, c) * D,
    "rows repeated": lambda m, x, v, c: m.divide(m.broadcast_to(x, (5, 4095)), c),
    "columns repeated": lambda m, x, v, c: m.divide(m.broadcast_to(x[:, None], (4095, 5)), c),
    "a constant repeated": lambda m, x, v, c: m.divide(m.broadcast_to(K, (5, 4095)), C),
    "a scalar repeated": lambda m, x, v, c: m.divide(m.broadcast_to(x[2], (9,)), c),
    "both repeated": lambda m, x, v, c: m.divide(
        m.broadcast_to(x, (5, 4095)), m.broadcast_to(v, (5, 4095))
    ),
    "powers of two": lambda m, x, v, c: m.divide(x, np.float32(-8)),
    "a power of two and another": lambda m, x, v, c: m.divide(m.divide(x, 4), np.float32(7)),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_no_rule_of_xla_rewrites_a_quotient(name):
    expression, random = EXPRESSIONS[name], np.random.default_rng(0)
    v = random.uniform(0.5, 2, K.shape).astype(np.float32)
    names = ("sqrt", "ones_like", "asarray", "broadcast_to")
    with_jax = SimpleNamespace(divide=divide, **{name: getattr(jnp, name) for name in names})
    y = jax.jit(partial(expression, with_jax))(K, v, C)
    np.testing.assert_array_equal(y, expression(np, K, v, C))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_all_numbers_of_16_bits(dtype):
    """Of float16 also by numbers whose inverse it does not have."""
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    for divisor in (41, 0.075, -3, 1e-5, 7.3e-6, 6e-8, np.inf, 0):
        y = dtype(divisor)
        with np.errstate(all="ignore"):
            exact = x / y
        computed = np.asarray(jax.jit(divide)(x, y))
        assert computed.dtype == dtype
        with np.errstate(invalid="ignore"):
            wide, exact, computed = (a.astype(np.float32) for a in (x, exact, computed))
        # XLA:CPU takes numbers below the normal ones of float32 for 0
        small = [(a != 0) & (abs(a) < np.finfo(np.float32).tiny) for a in (wide, exact)]
        np.testing.assert_array_equal(
            *(np.where(small[0] | small[1], 0, a) for a in (computed, exact))
        )


def test_zeros_infinities_and_nan():
    numbers = np.float32([0, -0.0, 1, -1, 3, np.inf, -np.inf, np.nan])
    x, y = np.meshgrid(numbers, numbers)
    with np.errstate(all="ignore"):
        exact = x / y
    for computed in (jax.jit(divide)(x, y), jax.jit(lambda x: divide(x, numbers[:, None]))(x)):
        np.testing.assert_array_equal(computed, exact)
        defined = ~np.isnan(exact)
        np.testing.assert_array_equal(np.signbit(computed)[defined], np.signbit(exact)[defined])


def test_doubles():
    with jax.enable_x64(True):
        x = np.arange(1, 4096, dtype=np.float64)
        np.testing.assert_array_equal(jax.jit(divide)(x, np.float64(49)), x / 49)


def test_derivatives_are_those_of_a_quotient():
    first = jax.grad(divide, (0, 1))(3.0, 7.0)
    np.testing.assert_allclose(first, [1 / 7, -3 / 49], rtol=1e-6)
    second = jax.hessian(lambda a: divide(a[0], a[1]))(jnp.array([3.0, 7.0]))
    np.testing.assert_allclose(second, [[0, -1 / 49], [-1 / 49, 6 / 343]], rtol=1e-6)
    small = jnp.float16(7.3e-6)  # of which float16 has no inverse
    slope = jax.vjp(lambda x: divide(x, small), jnp.float16(1))[1](jnp.float16(1e-3))[0]
    np.testing.assert_allclose(slope, np.float16(1e-3) / np.float16(7.3e-6), rtol=1e-3)
