"""Random bits, exactly JAX's: threefry, by additions and bitwise operators."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx.onnx_out._table import Refusal, composed, primitive

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


@composed("threefry2x32")
def threefry2x32(k0, k1, x0, x1):
    """Follow Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), 20 rounds."""
    keys = k0, k1, k0 ^ k1 ^ jnp.uint32(0x1BD11BDA)
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for block in range(5):
        for turn in ROTATIONS[block % 2]:
            x0 = x0 + x1
            left = lax.shift_left(x1, jnp.full_like(x1, turn))
            x1 = x0 ^ (left | lax.shift_right_logical(x1, jnp.full_like(x1, 32 - turn)))
        x0 = x0 + keys[(block + 1) % 3]
        x1 = x1 + keys[(block + 2) % 3] + jnp.uint32(block + 1)
    return x0, x1


@composed("iota_2x32_shape")
def iota_2x32_shape(*, shape):
    low = lax.iota(jnp.uint32, int(np.prod(shape))).reshape(shape)
    return jnp.zeros_like(low), low


def _implementation(avals):
    return avals[0].dtype._impl


@primitive("random_seed")
def random_seed(g, seeds, *, impl):
    return g.run(_over(impl.seed, seeds.ndim), seeds)


@primitive("random_bits")
def random_bits(g, keys, *, avals, bit_width, shape):
    impl = _implementation(avals)
    return g.run(_over(lambda key: impl.random_bits(key, bit_width, shape), avals[0].ndim), keys)


@primitive("random_split")
def random_split(g, keys, *, avals, shape):
    impl = _implementation(avals)
    return g.run(_over(lambda key: impl.split(key, shape), avals[0].ndim), keys)


@primitive("random_fold_in")
def random_fold_in(g, keys, data, *, avals):
    impl = _implementation(avals)
    function = impl.fold_in
    for keyed, mapped in _axes(avals):
        function = jax.vmap(function, (keyed, mapped))
    return g.run(function, keys, data)


def _axes(avals):
    ndim = max(aval.ndim for aval in avals)
    if any(aval.ndim not in (0, ndim) for aval in avals):
        raise Refusal("keys and data of several ranks")
    return [tuple(0 if aval.ndim else None for aval in avals)] * ndim


def _over(function, ndim):
    """Map a function of one key over keys of more axes."""
    for _ in range(ndim):
        function = jax.vmap(function)
    return function


@primitive("rng_bit_generator")
def rng_bit_generator(g, *operands, **_):
    raise Refusal(
        "its numbers are each platform's own; keys of threefry (`jax.random.key(0)`) are exact"
    )
