"""The choice of masks: the 90 templates, general N:M, one axis, and their storage as bits."""

import functools
import importlib
import itertools
import os
import subprocess
import sys

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxonnx import sparse
from jaxonnx.errors import SparsityError
from jaxonnx.sparse import _nm as nm
from jaxonnx.sparse import _pattern as masks
from jaxonnx.sparse._pattern import parse
from tests.support.lazy_cases import Module

optimize = Module("scipy.optimize")

templates = importlib.import_module("jaxonnx.sparse._templates")


def template_codes():
    """The 90 templates as `uint16[90]` codes, descending."""
    return templates.templates() @ (1 << np.arange(15, -1, -1)).astype(np.uint16)


def codes_by_definition(w, axes=(-2, -1)):
    """Argmax over |w| @ templates.T, in exact integers, the first index on ties."""
    cells = jnp.stack(templates._cells(w, axes), axis=-1)
    _, exponent = jnp.frexp(jnp.max(cells, axis=-1, keepdims=True))
    units = jnp.ldexp(cells, 28 - jnp.maximum(exponent, -99)).astype(jnp.int32)
    scores = units @ templates.templates().T.astype(np.int32)
    return jnp.asarray(template_codes())[jnp.argmax(scores, axis=-1)]


search = jax.jit(templates.codes, static_argnums=1)
define = jax.jit(codes_by_definition, static_argnums=1)


def blocks(x, m=4):
    """[blocks, m, m] of a matrix."""
    r, c = x.shape[0] // m, x.shape[1] // m
    return x.reshape(r, m, c, m).transpose(0, 2, 1, 3).reshape(-1, m, m)


def test_the_templates_are_all_with_two_ones_in_rows_and_columns_in_descending_order():
    every = [np.array(bits).reshape(4, 4) for bits in itertools.product((1, 0), repeat=16)]
    wanted = [t.ravel() for t in every if (t.sum(0) == 2).all() and (t.sum(1) == 2).all()]
    assert sparse.templates().shape == (90, 16)
    np.testing.assert_array_equal(sparse.templates(), wanted)
    words = [int("".join(map(str, t)), 2) for t in wanted]
    np.testing.assert_array_equal(template_codes(), words)
    with pytest.raises(ValueError):
        sparse.templates()[0, 0] = 0


WEIGHTS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "heavy-tailed": lambda rng, shape: rng.standard_cauchy(shape),
    "ten orders of magnitude": lambda rng, shape: rng.lognormal(0, 5, shape),
    "integers with ties": lambda rng, shape: rng.integers(-2, 3, shape),
    "binary": lambda rng, shape: rng.integers(0, 2, shape),
    "zero": lambda rng, shape: np.zeros(shape),
    "tiny": lambda rng, shape: rng.normal(size=shape) * 1e-36,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_the_fast_search_is_the_definition_bit_for_bit(kind, dtype):
    w = WEIGHTS[kind](np.random.default_rng(0), (256, 256))
    w = jnp.asarray(np.clip(w, -6e4, 6e4), jnp.dtype(dtype))
    np.testing.assert_array_equal(search(w, (0, 1)), define(w, (0, 1)))


@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "integers with ties", "binary", "zero"])
def test_the_definition_is_the_first_best_template_in_double_precision(kind):
    w = WEIGHTS[kind](np.random.default_rng(1), (256, 256)).astype(np.float32)
    scores = blocks(np.abs(w.astype(float))).reshape(-1, 16) @ sparse.templates().T.astype(float)
    best = template_codes()[scores.argmax(1)]
    np.testing.assert_array_equal(np.ravel(search(w, (0, 1))), best)


@settings(deadline=None, max_examples=40)
@given(hnp.arrays(np.float32, (4, 8), elements=st.floats(-100, 100, width=32)))
def test_any_weights_get_a_best_template(w):
    mask = np.asarray(sparse.mask(w))
    assert (blocks(mask).sum(1) == 2).all()
    assert (blocks(mask).sum(2) == 2).all()
    np.testing.assert_array_equal(search(w, (0, 1)), define(w, (0, 1)))


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_convolutions_batches_vmap_and_either_order_of_the_axes_agree(dtype):
    rng = np.random.default_rng(2)
    kernel = jnp.asarray(rng.normal(size=(8, 12, 3, 2)).astype(dtype))
    mask = sparse.mask(kernel)
    for i, j in np.ndindex(3, 2):
        np.testing.assert_array_equal(mask[:, :, i, j], sparse.mask(kernel[:, :, i, j]))
    np.testing.assert_array_equal(mask, sparse.mask(kernel, axes=(-4, -3)))
    hwio = kernel.transpose(2, 3, 1, 0)
    np.testing.assert_array_equal(
        sparse.mask(hwio, axes=(-1, -2)), np.transpose(mask, (2, 3, 1, 0))
    )
    batch = jnp.asarray(rng.normal(size=(3, 8, 8)).astype(dtype))
    each = jnp.stack([sparse.mask(w) for w in batch])
    np.testing.assert_array_equal(sparse.mask(batch, axes=(-2, -1)), each)
    np.testing.assert_array_equal(jax.jit(jax.vmap(sparse.mask))(batch), each)


def test_the_mask_of_the_transpose_keeps_as_much():
    w = np.random.default_rng(3).normal(size=(64, 32)).astype(np.float32)
    a, b = (np.asarray(sparse.mask(x), bool) for x in (w, w.T))
    np.testing.assert_array_equal(a, b.T)


SHARDED = """
import jax, numpy as np, optax
from jaxonnx import sparse

w = np.random.default_rng(4).normal(size=(16, 24)).astype(np.float32)
jitted = jax.jit(sparse.mask, static_argnums=1)
finds = [(sparse.mask, "2:4"), (jitted, "2:4"), (jitted, "2:8")]
wanted = {pattern: jitted(w, pattern) for pattern in ("2:4", "2:8")}
inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
schedules = {"dense": 1, "dynamic": 2, "moments": "zero"}, {"dense": 0, "dynamic": None}
updates = [sparse.three_phase(inner, refresh=1, **schedule) for schedule in schedules]
updates = [(tx, jax.jit(tx.update)) for tx in updates]


def trained(tx, update, x):
    state = tx.init(x)
    for _ in range(4):
        changes, state = update(x, state, x)
        x = optax.apply_updates(x, changes)
    return x["w"], sparse.state_masks(state)["w"]


alone = [trained(*pair, {"w": w}) for pair in updates]
Explicit = jax.sharding.AxisType.Explicit
for kind in (jax.sharding.AxisType.Auto, Explicit):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
    shard = jax.NamedSharding(mesh, jax.P("x", "y"))
    put = jax.device_put(w, shard)
    for find, pattern in finds:
        mask = find(put, pattern)
        np.testing.assert_array_equal(mask, wanted[pattern])
        if kind == Explicit:
            assert jax.typeof(mask).sharding.spec == shard.spec, mask.sharding
    # `train` has axes of its own that are automatic: tests/mesh/sharded_run.py
    for pair, (whole, mask) in zip(updates if kind == Explicit else (), alone):
        sharded, sharded_mask = trained(*pair, {"w": put})
        np.testing.assert_allclose(whole, sharded, rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(mask, sharded_mask)
        assert sharded.sharding.is_equivalent_to(shard, 2)
"""


@pytest.mark.deep
def test_sharded_weights_get_the_same_masks_and_training():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", SHARDED]
    subprocess.run(command, check=True, env={**os.environ, **flags})


@functools.cache
def constraints(m):
    rows = np.kron(np.eye(m), np.ones((1, m)))
    columns = np.kron(np.ones((1, m)), np.eye(m))
    return np.vstack([rows, columns])


def optimum(block, n):
    """The greatest sum of a transposable mask, exactly: the constraints are totally unimodular."""
    m = len(block)
    found = optimize.linprog(
        -block.ravel(), A_eq=constraints(m), b_eq=np.full(2 * m, n), bounds=(0, 1)
    )
    return -found.fun


PATTERNS = [(1, 4), (3, 4), (2, 5), (2, 8), (4, 8), (8, 16), (16, 32)]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("n", "m", "kind"),
    [(*pattern, ("normal", "heavy-tailed")[i % 2]) for i, pattern in enumerate(PATTERNS)],
)
def test_every_block_of_a_transposable_n_m_mask_is_near_the_optimum(n, m, kind):
    w = WEIGHTS[kind](np.random.default_rng(5), (2 * m, max(2, 64 // m) * m)).astype(np.float32)
    mask = blocks(np.asarray(sparse.mask(w, f"{n}:{m}")), m)
    assert (mask.sum(1) == n).all()
    assert (mask.sum(2) == n).all()
    size = blocks(np.abs(w), m)
    share = [(b * keep).sum() / optimum(b, n) for b, keep in zip(size, mask, strict=True)]
    assert np.min(share) >= (1 - 1e-5 if m <= 8 else 0.999)


@pytest.mark.parametrize("kind", ["zero", "binary", "integers with ties"])
def test_transposable_n_m_masks_are_complete_with_ties(kind):
    w = WEIGHTS[kind](np.random.default_rng(6), (16, 16)).astype(np.float32)
    mask = blocks(np.asarray(sparse.mask(w, "3:8")), 8)
    assert (mask.sum(1) == 3).all()
    assert (mask.sum(2) == 3).all()


@pytest.mark.parametrize("pattern", ["1:4", "2:4", "4:8", "3:5"])
def test_one_axis_masks_keep_the_largest_along_the_input_axis(pattern):
    n, m = map(int, pattern.split(":"))
    w = np.random.default_rng(7).integers(-4, 5, (6, 4 * m)).astype(np.float32)
    mask = np.asarray(sparse.mask(w, pattern, transposable=False))
    groups, kept = np.abs(w).reshape(6, -1, m), mask.reshape(6, -1, m)
    best = np.argsort(-groups, axis=-1, kind="stable")[..., :n]
    wanted = np.zeros_like(kept)
    np.put_along_axis(wanted, best, True, -1)
    np.testing.assert_array_equal(kept, wanted)
    other = sparse.mask(w.T, pattern, transposable=False, axes=(1, 0))
    np.testing.assert_array_equal(np.transpose(other), mask)


@pytest.mark.deep
@pytest.mark.parametrize("pattern", ["2:4", "4:8"])
def test_nan_and_infinity_are_errors_outside_jit_and_valid_masks_inside(pattern):
    w = np.random.default_rng(8).normal(size=(8, 16)).astype(np.float32)
    w[1, 2], w[5, 5], w[6, 1] = np.nan, np.inf, -np.inf
    with pytest.raises(SparsityError, match="NaN"):
        sparse.mask(w, pattern)
    mask = np.asarray(jax.jit(sparse.mask, static_argnums=1)(w, pattern))
    parsed = parse(pattern)
    assert (blocks(mask, parsed.m).sum(1) == parsed.n).all()
    assert (blocks(mask, parsed.m).sum(2) == parsed.n).all()
    # blocks without them are as they would be alone
    finite = np.isfinite(blocks(w, parsed.m)).all((1, 2))
    alone = blocks(np.asarray(sparse.mask(np.nan_to_num(w, posinf=0, neginf=0), pattern)), parsed.m)
    np.testing.assert_array_equal(blocks(mask, parsed.m)[finite], alone[finite])


@pytest.mark.parametrize(
    ("w", "options", "message"),
    [
        (np.ones((4, 6)), {}, "input axis of 6 is not a multiple of 4"),
        (np.ones((6, 4)), {}, "output axis of 6 is not a multiple of 4"),
        (np.ones((0, 4)), {}, "output axis of 0"),
        (np.ones(8), {}, "must be a floating-point matrix"),
        (np.ones((4, 4), int), {}, "must be a floating-point matrix"),
        (np.ones((4, 4)), {"axes": (0, 0)}, "do not name two axes"),
        (np.ones((4, 4)), {"axes": (0, 2)}, "do not name two axes"),
        (np.ones((4, 4)), {"pattern": "4:2"}, "not of the form zeros or N:M"),
        (np.ones((4, 4)), {"pattern": "2/4"}, "not of the form zeros or N:M"),
        (np.ones((64, 64)), {"pattern": "2:64"}, "not of the form zeros or N:M"),
    ],
)
def test_weights_that_do_not_fit_are_refused_in_words(w, options, message):
    with pytest.raises(SparsityError, match=message):
        sparse.mask(w, **options)


@pytest.mark.deep
@settings(deadline=None, max_examples=25)
@given(
    hnp.arrays(
        bool,
        st.sampled_from([(1,), (8,), (9,), (3, 5), (4, 6), (16, 130), (2, 3, 5), (4, 4, 3, 3)]),
    )
)
def test_masks_survive_as_bits(mask):
    bits = masks.to_bits(jnp.asarray(mask))
    assert bits.dtype == np.uint8
    assert bits.size == -(-mask.size // 8)
    planes = np.resize(np.append(mask, [False] * 7), 8 * bits.size).reshape(8, -1)
    np.testing.assert_array_equal(bits, np.packbits(planes, 0, "little")[0])
    np.testing.assert_array_equal(masks.from_bits(bits, mask.shape), mask)


def test_group_sums_and_pattern_check():
    mask = np.asarray(sparse.mask(np.random.default_rng(9).normal(size=(8, 8)), transposable=False))
    np.testing.assert_array_equal(nm.group_sums(mask, 4, 1), np.full((8, 2), 2))
    assert parse("2:4", transposable=False).holds(mask, (0, 1))
    assert not parse("2:4").holds(mask, (0, 1))
