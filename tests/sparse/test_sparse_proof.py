"""`verify` proves the contraction axes from the jaxpr; `pack` stores the weights without loss."""

import logging
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxonnx import sparse
from jaxonnx.errors import SparsityError
from jaxonnx.lowering import divide
from jaxonnx.sparse._pattern import default_axes
from jaxonnx.sparse._walk import Walk

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(8, 12)), jnp.float32)  # (in, out) of x @ w
K = jnp.asarray(RNG.normal(size=(8, 4, 3, 3)), jnp.float32)
X = jax.ShapeDtypeStruct((2, 8), jnp.float32)
IMAGE = jax.ShapeDtypeStruct((2, 4, 6, 6), jnp.float32)


def conv(image, kernel, groups=1):
    return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", feature_group_count=groups)


def im2col(image, kernel):
    patches = jax.lax.conv_general_dilated_patches(image, (3, 3), (1, 1), "SAME")
    return jnp.einsum("ok,bkhw->bohw", kernel.reshape(8, -1), patches)


def shifted(image, kernel):
    wide = jnp.pad(image, ((0, 0), (0, 0), (1, 1), (1, 1)))
    return sum(
        jnp.einsum("oi,bihw->bohw", kernel[:, :, i, j], wide[:, :, i : i + 6, j : j + 6])
        for i in range(3)
        for j in range(3)
    )


def channels_last(image, kernel):
    return jax.lax.conv_general_dilated(
        image.transpose(0, 2, 3, 1), kernel.transpose(2, 3, 1, 0), (2, 2), "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip


def products(function, params, *inputs, **options):
    report = sparse.layers(params)
    return sparse.verify(function, params, *inputs, layers=report, **options).products


PROGRAMS = {
    "product": (lambda p, x: jnp.tanh(x @ p["w"]), W, X),
    "transposed": (lambda p, x: x @ p["w"].T.T, W, X),
    "einsum of a reshaped weight": (
        lambda p, x: jnp.einsum("bi,ihd->bhd", x, p["w"].reshape(8, 3, 4)), W, X,
    ),
    "jit": (lambda p, x: jax.jit(lambda a, b: a @ b)(x, p["w"]), W, X),
    "checkpoint": (lambda p, x: jax.checkpoint(lambda a, b: jnp.sin(a @ b))(x, p["w"]), W, X),
    "vmap": (lambda p, x: jax.vmap(lambda v: v @ p["w"])(x), W, X),
    "scan": (
        lambda p, x: jax.lax.scan(lambda c, _: (jnp.tanh(c @ p["w"] @ p["w"].T), c), x, None, 3)[0],
        W, X,
    ),
    "scan over weights": (
        lambda p, x: jax.lax.scan(
            lambda c, w: (c + x @ w, None),
            jnp.zeros((2, 12)),
            jax.lax.scan(lambda c, w: (c, w * 2), 0, jnp.stack([p["w"], p["w"]]))[1],
        )[0],
        W, X,
    ),
    "unstacked": (
        lambda p, x: sum(
            map(jnp.matmul, jnp.split(x, 2, 1), jnp.unstack(p["w"].reshape(2, 4, 12)))
        ),
        W, X,
    ),
    "while": (lambda p, x: jax.lax.fori_loop(0, 3, lambda _, c: c @ p["w"] @ p["w"].T, x), W, X),
    "cond": (
        lambda p, x: jax.lax.cond(x.sum() > 0, lambda: x @ p["w"], lambda: -x @ p["w"]), W, X,
    ),
    "scaled, cast and masked": (
        lambda p, x: x @ (jnp.where(jnp.arange(12) > 3, 2 * p["w"], 0).astype(jnp.float16)), W, X,
    ),
    "halves": (lambda p, x: x @ jnp.concatenate(jnp.split(p["w"], 3, axis=1)[::-1], 1), W, X),
    "convolution": (lambda p, x: conv(x, p["w"]), K, IMAGE),
    "im2col": (lambda p, x: im2col(x, p["w"]), K, IMAGE),
    "shifted products": (lambda p, x: shifted(x, p["w"]), K, IMAGE),
    "channels last": (lambda p, x: channels_last(x, p["w"]), K, IMAGE),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_products_written_in_any_way_are_found_and_proved(name):
    function, w, x = PROGRAMS[name]
    pruned = sparse.prune({"w": w})
    found = products(function, pruned, x)
    assert {p.part for p in found} == {"forward", "backward"}
    assert all(p.ok and p.weight == "w" for p in found)
    if w is K:
        assert {p.sums for p in found if p.part == "forward"} == {"axis 1"}
        assert "axis 0" in {p.sums for p in found if p.part == "backward"}
    with pytest.raises(SparsityError, match="groups too full"):
        products(function, {"w": w}, x)


@pytest.mark.parametrize("name", ["product", "convolution", "im2col", "channels last"])
def test_a_one_axis_mask_is_proved_forward_and_fails_backward(name):
    function, w, x = PROGRAMS[name]
    axes = (1, 0) if w is W else (0, 1)
    pruned = sparse.prune({"w": w}, transposable=False, axes=axes)
    report = sparse.layers(pruned, axes=axes)
    proof = sparse.verify(function, pruned, x, layers=report, transposable=False)
    assert [p.part for p in proof.products] == ["forward"]
    with pytest.raises(SparsityError) as failure:
        sparse.verify(function, pruned, x, layers=report)
    assert "backward" in str(failure.value)
    assert "groups too full" in str(failure.value)
    assert "(forward)" not in str(failure.value)


def test_what_is_no_proof_fails():
    pruned = sparse.prune({"w": W})
    with pytest.raises(SparsityError, match="w: found in no product"):
        products(lambda p, x: x @ (p["w"] + 1e-3), pruned, X)
    with pytest.raises(SparsityError, match="w: found in no product"):
        products(lambda p, x: x * p["w"].sum(), pruned, X)
    with pytest.raises(SparsityError, match="no whole groups"):
        products(lambda p, x: x[:, :6] @ p["w"][:6], pruned, X)
    with pytest.raises(SparsityError, match="no whole groups"):
        products(lambda p, x: x.T[:1] @ p["w"].reshape(2, 48), pruned, X)
    with pytest.raises(SparsityError, match="no whole groups"):  # half of a group, twice
        products(lambda p, x: x @ jnp.concatenate([p["w"][:2], p["w"][:2], p["w"][4:]]), pruned, X)
    with pytest.raises(SparsityError, match="no 'v'"):
        sparse.verify(lambda p, x: x, pruned, X, layers=sparse.layers({"v": W}))
    with pytest.raises(SparsityError, match="nothing to verify"):
        sparse.verify(lambda p, x: x, pruned, X, layers=[])
    with pytest.raises(SparsityError, match="nothing is sparse: no weight has the zeros of 2:4"):
        sparse.verify(lambda p, x: x @ p["w"] + p["b"], {"w": W, "b": jnp.zeros(12)}, X)


MOVES = {
    "broadcast_in_dim": lambda x: jax.lax.broadcast_in_dim(x, (5, 8, 2, 12), (1, 3)),
    "copy": jnp.copy,
    "optimization_barrier": jax.lax.optimization_barrier,
    "reshape": lambda x: x.reshape(3, 2, 16),
    "rev": lambda x: jax.lax.rev(x, (1,)),
    "slice": lambda x: x[1:7:2, 3:],
    "split": lambda x: jax.lax.split(x, (2, 5, 5), 1),
    "squeeze": lambda x: jax.lax.squeeze(x.reshape(8, 1, 12, 1), (1, 3)),
    "tile": lambda x: jax.lax.tile(x, (2, 3)),
    "transpose": lambda x: x.reshape(2, 4, 12).transpose(2, 0, 1),
    "unstack": lambda x: jnp.unstack(x, axis=1),
    "pad": lambda x: jax.lax.pad(x, jnp.int32(0), [(1, -2, 1), (0, 3, 0)]),
}


@pytest.mark.parametrize("name", MOVES)
def test_numbers_move_as_the_values_of_jax(name):
    numbers = np.arange(1, 97, dtype=np.int32).reshape(8, 12)
    program, wanted = jax.make_jaxpr(MOVES[name])(numbers), jax.tree.leaves(MOVES[name](numbers))
    assert name in str(program)
    found = Walk(elements=None)(program, [numbers])
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.where(one == -1, 0, one), other)


def test_a_proof_compiles_nothing(caplog):
    """Of a large network, compiling would take most of the time."""
    pruned = sparse.prune({"w": K})
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for function in (im2col, channels_last):
            assert products(lambda p, x, f=function: f(x, p["w"]), pruned, IMAGE)
        assert "Compiling" not in caplog.text
        jax.jit(lambda x: x + 1)(np.ones(37))
        assert "Compiling" in caplog.text


def test_a_model_verifies_by_itself():
    class Model:
        params = sparse.prune({"w": W, "dense": jnp.ones((12, 4))}, select="w")
        inputs = (SimpleNamespace(shape=("batch", 8), dtype=np.dtype("float32")),)

        def apply(self, params, x):
            return x @ params["w"] @ params["dense"]

    assert {p.weight for p in sparse.verify(Model()).products} == {"w"}
    model = Model()
    model.params = sparse.prune(model.params | {"w": W}, select="w", transposable=False)
    with pytest.raises(SparsityError, match="w: dot_general"):
        sparse.verify(model)


def test_a_product_out_of_sight_fails():
    pruned = sparse.prune({"w": W})
    shape = jax.ShapeDtypeStruct((2, 12), jnp.float32)
    hidden = jax.ffi.ffi_call("some_product", shape)
    with pytest.raises(SparsityError, match=r"ffi_call \(forward\) sums over out of sight"):
        sparse.verify(
            lambda p, x: hidden(x, p["w"]), pruned, X, layers=sparse.layers(pruned),
            transposable=False,
        )  # fmt: skip


def test_several_weights_and_integer_inputs_give_one_table():
    params = sparse.prune({"a": W, "b": W.T, "k": K, "bias": jnp.ones(12)})

    def function(p, tokens, x, image):
        merged = jnp.concatenate([p["a"], p["b"].T], axis=1)  # as in one product for q, k and v
        y = jax.nn.one_hot(tokens, 8) @ p["a"] + x @ merged[:, :12] + p["bias"]
        return y, conv(image, p["k"])

    tokens = jax.ShapeDtypeStruct((2,), jnp.int32)
    report = sparse.layers(params)
    with pytest.raises(SparsityError, match="b: found in no product"):
        sparse.verify(function, params, tokens, X, IMAGE, layers=report)
    table = str(
        sparse.verify(
            lambda p, *x: (function(p, *x), x[1] @ p["b"].T), params, tokens, X, IMAGE,
            layers=report,
        )
    ).splitlines()  # fmt: skip
    assert table[0].split() == ["weight", "product", "pass", "sums", "over", "times"]
    assert {line.split()[0] for line in table[1:]} == {"a", "b", "k"}
    assert all("2:4 transposable" in line for line in table[1:])


@cache
def masked(pattern, shape):
    w = jnp.asarray(RNG.normal(size=shape), jnp.float32)
    mask = sparse.mask(w, pattern)
    return jnp.where(mask, w, 0), mask


@pytest.mark.deep
@pytest.mark.parametrize(
    ("pattern", "dtype"),
    [
        ("1:4", np.float32),
        ("2:4", ml_dtypes.bfloat16),
        ("4:8", np.float32),
        ("8:16", np.float16),
        ("3:5", np.float32),
    ],
)
def test_packing_loses_nothing_along_either_axis(pattern, dtype):
    m = int(pattern.split(":")[1])
    for shape in ((2 * m, m), (m, 2 * m, 3, 1)):
        w, mask = masked(pattern, shape)
        w = w.astype(dtype)
        for axis in default_axes(w.ndim):
            packed = sparse.pack(w, mask, pattern, axis=axis)
            back = jax.jit(sparse.unpack)(packed)
            assert back.dtype == w.dtype
            assert back.tobytes() == w.tobytes()
            np.testing.assert_array_equal(sparse.unpack_mask(packed), mask)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**31), zeros=st.integers(0, 8))
def test_a_kept_weight_may_be_zero(seed, zeros):
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(8, 8)).astype(np.float32)
    mask = np.asarray(sparse.mask(w))
    w[~mask] = 0
    w.ravel()[rng.choice(np.flatnonzero(mask), zeros, replace=False)] = 0
    packed = sparse.pack(w, mask)
    np.testing.assert_array_equal(sparse.unpack(packed), w)
    np.testing.assert_array_equal(sparse.unpack_mask(packed), mask)
    np.testing.assert_array_equal(sparse.unpack(sparse.pack(w)), w)  # by its nonzeros


def test_packed_sizes_are_those_of_the_hardware_format():
    w = np.asarray(sparse.prune({"w": jnp.asarray(RNG.normal(size=(64, 64)), jnp.float32)})["w"])
    assert sparse.pack(w).nbytes / w.nbytes == 0.53125
    half = w.astype(ml_dtypes.bfloat16)
    assert sparse.pack(half).nbytes / half.nbytes == 0.5625


@pytest.mark.parametrize(
    ("w", "options", "message"),
    [
        (np.ones((4, 4)), {}, "keeps 4 of 4, not at most 2"),
        (np.ones((4, 4)), {"mask": np.eye(4)}, "not zero outside its mask"),
        (np.ones((4, 4)), {"mask": np.ones(4)}, "mask of shape"),
        (np.zeros((4, 6)), {}, "axis 1 of the weight must be a multiple of 4"),
    ],
)
def test_weights_that_cannot_be_packed_are_refused(w, options, message):
    with pytest.raises(SparsityError, match=message):
        sparse.pack(w, **options)


@pytest.fixture
def saved(tmp_path):
    params = {"a/w": W, "k": K.astype(jnp.bfloat16), "file": jnp.ones(5), "n": jnp.arange(3)}
    params = sparse.prune(params)
    report = sparse.layers(params)
    kept = {x.name: params[x.name] != 0 for x in report if not x.reason}
    path = tmp_path / "packed.npz"
    sparse.save(path, params, kept, layers=report)
    return path, params


def test_files_hold_everything_and_are_smaller(saved, tmp_path):
    path, params = saved
    dense, packed = sparse.load(path)
    assert set(packed) == {"a/w", "k"}
    for name, x in params.items():
        back = sparse.unpack(packed[name]) if name in packed else dense[name]
        assert back.dtype == x.dtype
        np.testing.assert_array_equal(back, x)
    with np.load(path) as plain:
        assert plain["values:a/w"].shape == (8, 3, 2)
    with pytest.raises(SparsityError, match="no such sparse weight"):
        sparse.save(tmp_path / "x.npz", params, {"n": 1}, layers=sparse.layers(params))
    assert [p.name for p in tmp_path.iterdir()] == ["packed.npz"]


def test_damaged_files_are_refused(saved, tmp_path):
    path, _ = saved
    content = path.read_bytes()
    for size in (0, 10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(SparsityError, match="damaged"):
            sparse.load(path)
    path.write_bytes(content)
    with np.load(path) as file:
        arrays = dict(file.items())
    broken = {
        "do not fill": arrays | {"values:a/w": arrays["values:a/w"][:4]},
        "bytes of indices": arrays | {"indices:a/w": arrays["indices:a/w"][:-1]},
        "different places": arrays | {"indices:a/w": 0 * arrays["indices:a/w"]},
        "does not name": arrays | {"extra": np.ones(1)},
        "damaged": {k: v for k, v in arrays.items() if k != "values:n"},
    }
    for message, some in broken.items():
        np.savez(path, **some)
        with pytest.raises(SparsityError, match=message):
            sparse.load(path)
    with pytest.raises(FileNotFoundError):
        sparse.load(tmp_path / "none.npz")


def test_a_quotient_by_a_scale_keeps_the_zeros():
    pruned = sparse.prune({"w": W})
    assert products(lambda p, x: x @ divide(p["w"], jnp.float32(3)), pruned, X)
