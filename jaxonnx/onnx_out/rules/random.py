"""Random bits, exactly JAX's: threefry, by additions and bitwise operators."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxonnx.onnx_out._rule_table import Refusal, composed, primitive
from jaxonnx.onnx_out.rules.special import mulhi

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
    """Return JAX's implementation of the PRNG of keys."""
    return avals[0].dtype._impl


@primitive("random_seed")
def random_seed(g, seeds, *, impl):
    return g.run(_map_keys(impl.seed, seeds.ndim), seeds)


@primitive("random_bits")
def random_bits(g, keys, *, avals, bit_width, shape):
    impl = _implementation(avals)
    draw = _map_keys(lambda key: impl.random_bits(key, bit_width, shape), avals[0].ndim)
    return g.run(draw, keys)


@primitive("random_split")
def random_split(g, keys, *, avals, shape):
    impl = _implementation(avals)
    return g.run(_map_keys(lambda key: impl.split(key, shape), avals[0].ndim), keys)


@primitive("random_fold_in")
def random_fold_in(g, keys, data, *, avals):
    impl = _implementation(avals)
    function = impl.fold_in
    ndim = max(aval.ndim for aval in avals)
    if any(aval.ndim not in (0, ndim) for aval in avals):
        raise Refusal("keys and data of several ranks")
    axes = tuple(0 if aval.ndim else None for aval in avals)  # scalars are not mapped
    for _ in range(ndim):
        function = jax.vmap(function, axes)
    return g.run(function, keys, data)


def _map_keys(function, ndim):
    """Map a function of one key over an array of keys with `ndim` axes."""
    for _ in range(ndim):
        function = jax.vmap(function)
    return function


@primitive("rng_bit_generator")
def rng_bit_generator(g, state, *, shape, dtype, algorithm):
    """Write the bits of threefry, or of Philox: XLA's default on CPU and GPU."""
    drawn = _threefry if algorithm == lax.RandomAlgorithm.RNG_THREE_FRY else _philox

    def generated(state):
        words, wide = state, state.dtype == np.uint64
        if wide:  # halves of 32 bits, the lower one first
            words = jnp.stack([state & 0xFFFFFFFF, state >> 32], -1).reshape(-1).astype(jnp.uint32)
        end, bits = drawn(words, tuple(shape), np.dtype(dtype))
        return _join_words(end) if wide else end, bits.reshape(shape)

    return g.run(generated, state)


def _join_words(words):
    """Join halves, the lower one first, to 64-bit integers."""
    return words[::2].astype(np.uint64) | (words[1::2].astype(np.uint64) << 32)


def _counts(words, count):
    """Return a multiword counter after 0, 1, ..., `count` increments.

    Args:
      words: the uint32 words of its start, the lowest first.

    Returns:
      For each word uint32[count + 1]; the last entry is the counter after all increments.
    """
    step, counter = lax.iota(jnp.uint32, count + 1), []
    for word in words:
        total = word + step
        step = (total < word).astype(jnp.uint32)  # the carry: an unsigned sum that wrapped
        counter.append(total)
    return counter


def _threefry(words, shape, dtype):
    """Draw random bits by threefry from a state of a key and a counter, as XLA does.

    A 64-bit number is both words of a count. Narrower numbers are the two words of a count next to
    each other, along the first axis of even size, or else along the first of the longest axes.

    Returns:
      The new state, uint32[4], and the bits.
    """
    wide, whole = dtype.itemsize == 8, shape or (1,)
    even = [axis for axis, size in enumerate(whole) if size % 2 == 0]
    axis = even[0] if even else whole.index(max(whole))
    size = whole[axis]
    half = whole if wide else (*whole[:axis], -(-size // 2), *whole[axis + 1 :])
    low, high = _counts(words[2:], int(np.prod(half)))
    first, second = threefry2x32(words[0], words[1], low[:-1], high[:-1])
    end = jnp.stack([words[0], words[1], low[-1], high[-1]])
    if wide:
        return end, _join_words(jnp.stack([first, second], -1).reshape(-1))
    pairs = jnp.stack([x.reshape(half) for x in (first, second)], axis + 1)
    bits = pairs.reshape(*half[:axis], -1, *half[axis + 1 :]).astype(dtype)
    return end, lax.slice_in_dim(bits, 0, size, axis=axis)


def _philox(words, shape, dtype):
    """Draw random bits by Philox4x32-10 of Salmon et al., as XLA does.

    The key is also the upper half of the counter, and each count gives four words.

    Returns:
      The new state, uint32[4], and the bits.
    """
    wide = dtype.itemsize == 8
    size = int(np.prod(shape)) * (1 + wide)
    counter = _counts((words[2], words[3], words[0], words[1]), -(-size // 4))
    end = jnp.stack([words[0], words[1], counter[0][-1], counter[1][-1]])
    (k0, k1), (x0, x1, x2, x3) = words[:2], (word[:-1] for word in counter)
    for _ in range(10):
        (high, low), (upper, lower) = _product(x0, 0xD2511F53), _product(x2, 0xCD9E8D57)
        x0, x1, x2, x3 = upper ^ x1 ^ k0, lower, high ^ x3 ^ k1, low
        k0, k1 = k0 + jnp.uint32(0x9E3779B9), k1 + jnp.uint32(0xBB67AE85)
    bits = jnp.stack([x0, x1, x2, x3], -1).reshape(-1)[:size]
    return end, _join_words(bits) if wide else bits.astype(dtype)


def _product(x, factor):
    """Return the upper and the lower 32 bits of a product with a constant."""
    factor = jnp.full_like(x, factor)
    return mulhi(x, factor), x * factor
