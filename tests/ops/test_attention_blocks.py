"""Attention in blocks of queries: what the scores of all at once give, in less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxonnx.ops import attention
from jaxonnx.ops.attention import Window, attend, attend_to_first

BATCH, HEADS, KV_HEADS, STEPS, KEYS, SIZE = 2, 4, 2, 22, 25, 8


@pytest.fixture
def blocks(monkeypatch):
    """Blocks of 5 queries, the last of them padded."""
    monkeypatch.setattr(attention, "WHOLE", 0)
    monkeypatch.setattr(attention, "BLOCK", 5 * BATCH * HEADS * KEYS * 4)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


Q = numbers(BATCH, HEADS, STEPS, SIZE)
K, V = numbers(BATCH, KV_HEADS, KEYS, SIZE, seed=1), numbers(BATCH, KV_HEADS, KEYS, 6, seed=2)
LATE = Window(np.arange(STEPS) + 3, np.arange(KEYS), right=0)
EACH = Window(np.arange(STEPS) + np.array([[3], [0]]), np.arange(KEYS), left=4, right=0)
CASES = {
    "causal": {"window": LATE},
    "window_of_each": {"window": EACH, "cap": 2.0, "scale": 0.4},
    "bias": {"masks": (numbers(BATCH, 1, STEPS, KEYS), None), "sink": numbers(HEADS)},
    "padding": {"masks": (np.arange(KEYS) < np.array([KEYS, 9])[:, None, None, None],)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_blocks_give_what_all_at_once_gives(case, dtype, request):
    keywords = dict(CASES[case])
    masks = keywords.pop("masks", ())
    floats = [m for m in masks if m is not None and m.dtype == np.float32]

    def loss(q, k, v, floats):
        given = (*floats, *masks[len(floats) :])
        y = attend(q, k, v, given, **keywords)
        return jnp.sin(y.astype(np.float32)).sum(), y

    values = [jnp.asarray(x, dtype) for x in (Q, K, V)]
    step = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)
    (_, whole), wanted = jax.jit(step)(*values, floats)
    request.getfixturevalue("blocks")
    assert "scan" in str(jax.make_jaxpr(loss)(*values, floats))
    (_, y), found = jax.jit(lambda *args: step(*args))(*values, floats)
    rtol = 1e-5 if dtype == np.float32 else 2e-2
    for x, e in zip(jax.tree.leaves((y, found)), jax.tree.leaves((whole, wanted)), strict=True):
        x, e = np.asarray(x, np.float32), np.asarray(e, np.float32)
        np.testing.assert_allclose(x, e, rtol=rtol, atol=rtol * np.abs(e).max())


def test_gradients_of_a_long_sequence_take_less_memory_than_its_scores():
    heads, steps = 4, 4096
    shape = jax.ShapeDtypeStruct((1, heads, steps, 16), np.float32)
    window = Window(jnp.arange(steps), jnp.arange(steps), right=0)

    def loss(q, k, v):
        return jnp.sin(attend(q, k, v, window=window)).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < heads * steps * steps * 4 / 2


def test_gradients_keep_one_array_of_queries_and_keys():
    size = 4 * 256 * 256 * 4
    x = jax.ShapeDtypeStruct((1, 4, 256, 8), jnp.float32)

    def memory(layers):
        def loss(x):
            for _ in range(layers):
                x = attend(x, jnp.sin(x), x, window=Window(np.arange(256), np.arange(256), right=0))
            return x.sum()

        return jax.jit(jax.grad(loss)).lower(x).compile().memory_analysis().temp_size_in_bytes

    assert memory(6) - memory(2) < 4 * 1.5 * size


@pytest.mark.parametrize("steps", ["1", "s"])
def test_sizes_may_be_symbolic_with_a_cache(steps):
    """`jax.export` of a decoder with caches: sizes that cannot be compared."""
    batch, new, keys = jax.export.symbolic_shape(f"b, {steps}, p + {steps}")
    q = jax.ShapeDtypeStruct((batch, 4, new, 8), np.float32)
    k = jax.ShapeDtypeStruct((batch, 2, keys, 8), np.float32)
    exported = jax.export.export(jax.jit(attend))(q, k, k)
    count = 1 if steps == "1" else 3
    arrays = numbers(2, 4, count, 8), numbers(2, 2, 20, 8, seed=1), numbers(2, 2, 20, 8, seed=2)
    np.testing.assert_allclose(exported.call(*arrays), attend(*arrays), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"scale": 0.5, "cap": 2.0}, {"sink": numbers(4)}, {"left": 30, "sink": numbers(4)}],
    ids=["", "cap", "sink", "window"],
)
def test_attention_to_the_filled_part_of_a_cache(steps, options):
    """Samples have different numbers of keys; the room is no multiple of a block of them."""
    room = 700
    q, k, v = (numbers(2, n, m, 8, seed=n + m) for n, m in ((4, steps), (2, room), (2, room)))
    keywords = dict(options)
    left = keywords.pop("left", -1)

    @jax.jit
    def compute(counts, v):
        queries = (counts - steps)[:, None] + np.arange(steps)
        keys = jnp.where(np.arange(room) < counts[:, None], np.arange(room), -1)
        window = Window(queries, keys, left, 0)
        y = attend_to_first(counts.max(), q, k, v, window, **keywords)
        return y, attend(q, k, v, (), window, **keywords)

    unread = v.copy()
    unread[:, :, 512:] = np.nan  # the third block, which overlaps the second one
    for counts in np.array([(5, 3), (300, 40), (500, 700)]):
        y, expected = compute(counts, v)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
        if counts.max() <= 512:
            np.testing.assert_array_equal(compute(counts, unread)[0], y)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_filled_part_in_half_precision(dtype):
    """The softmax and its sums are in float32: weighted sums of large values do not overflow."""
    q, k = (numbers(1, n, m, 8, seed=n).astype(dtype) for n, m in ((2, 1), (1, 700)))
    v = jax.numpy.full((1, 1, 700, 8), 1000, dtype)
    keys = np.where(np.arange(700) < 300, np.arange(700), -1)
    y = attend_to_first(np.int32(300), q, k, v, Window(np.array([299]), keys, -1, 0))
    assert y.dtype == dtype
    np.testing.assert_array_equal(np.float32(y), 1000)
