"""Products with 2:4 weights by the kernel for processors, against NumPy in double precision."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import onnx.parser
import optax
import pytest

import jaxonnx
from benchmarks.sparse.products import convolutions
from jaxonnx import _native, demo, sparse
from jaxonnx.sparse import _products
from jaxonnx.sparse._products import _cpu

SOURCE = Path(_cpu.__file__).with_name("cpu.cc")


@pytest.fixture(scope="module", autouse=True)
def kernel():
    try:
        sparse.register_products("cpu")
    except jaxonnx.SparsityError as missing:
        pytest.skip(str(missing))


@pytest.fixture
def everything(monkeypatch):
    """Let the kernel take products of any size."""
    monkeypatch.setattr(_cpu, "LEAST_ROWS", ((4, 1),))


def weight(k, n, seed=0):
    """A weight that is 2:4 along axis 0, with some groups of fewer."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(k // 4, 4, n)).astype(np.float32)
    order = np.argsort(rng.random(w.shape), axis=1)
    few = rng.random((k // 4, 1, n)) < 0.1
    return np.where(order < np.where(few, 1, 2), w, 0).reshape(k, n)


def rows(b, k, seed=1):
    return np.random.default_rng(seed).normal(size=(b, k)).astype(np.float32)


run_kernel = jax.jit(_cpu.product, static_argnames=("axis", "variant", "threads"))


def product(x, w, axis, **options):
    w = w if axis == 0 else np.ascontiguousarray(w.T)
    return np.asarray(run_kernel(x, w, axis=axis, **options))


ROWS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1025)
INPUTS = (4, 8, 12, 16, 20, 44, 48, 52, 92, 96, 100, 188, 192, 196, 252, 256, 260)
OUTPUTS = (4, 8, 12, 16, 20, 28, 32, 36, 60, 64, 68, 252, 256, 260, 516, 12, 260)
SHAPES = [
    *zip(ROWS, INPUTS, OUTPUTS, strict=True),
    *zip(ROWS[::2], INPUTS[::-2], OUTPUTS[::2], strict=True),
]
"""Rows, inputs and outputs below, at and above the edges of vectors, tiles, panels and blocks.

Vectors have 4, 8 or 16 lanes, panels 16 to 128 rows and parts of 48 to 256 inputs, blocks 512 rows
and 256 outputs.
"""


def poison(x, w):
    """Return x with an infinity or a NaN in each group, and w that masks them for even outputs."""
    bad = np.random.default_rng(2).integers(0, 4, x.shape[1] // 4) + np.arange(0, x.shape[1], 4)
    x, w = x.copy(), w.copy()
    x[:, bad] = np.nan
    x[:, bad[::2]] = np.inf
    # a group without any weight multiplies one of its inputs by 0: so there is one elsewhere
    w[bad, ::2] = 0
    other = bad // 4 * 4 + (bad + 1) % 4
    empty = ~(w.reshape(-1, 4, w.shape[1]) != 0).any(1)
    w[other] = np.where(empty, 1, w[other])
    return x, w


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("variant", _cpu.VARIANTS)
def test_each_variant_is_the_definition_on_every_size(variant, axis):
    if variant not in _cpu.variants():
        pytest.skip(f"this processor has no {variant}")
    for b, k, n in SHAPES:
        x, w = rows(b, k), weight(k, n)

        def is_near(found, x, w, what=(b, k, n)):
            x, w = x.astype(float), w.astype(float)
            assert (np.abs(found - x @ w) <= 1e-6 * np.abs(x) @ np.abs(w) + 1e-30).all(), what

        is_near(product(x, w, axis, variant=variant), x, w)
        x, w = poison(x, w)
        found = product(x, w, axis, variant=variant)
        bad = ~np.isfinite(x[0])
        is_near(found[:, ::2], np.where(bad, 0, x), w[:, ::2])
        reads = (w[bad] != 0).any(0)
        assert not np.isfinite(found[:, reads]).any(), (b, k, n)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("variant", _cpu.VARIANTS)
def test_the_bits_do_not_depend_on_the_number_of_threads(variant, axis):
    if variant not in _cpu.variants():
        pytest.skip(f"this processor has no {variant}")
    for b, k, n in [(1, 64, 1028), (129, 260, 516), (1025, 100, 300)]:
        x, w = rows(b, k), weight(k, n)
        one = product(x, w, axis, variant=variant, threads=1)
        for threads in (0, 2, 3, 5, 16, 64):  # 0 is the whole pool
            found = product(x, w, axis, variant=variant, threads=threads)
            np.testing.assert_array_equal(found, one, err_msg=f"{b} {k} {n}, {threads} threads")


@pytest.mark.parametrize("variant", _cpu.VARIANTS)
def test_few_rows_of_a_packed_weight_are_the_definition(variant):
    if variant not in _cpu.variants():
        pytest.skip(f"this processor has no {variant}")
    for b, k, n in [(1, 4, 4), (3, 36, 20), (8, 64, 64), (11, 100, 52), (5, 260, 36)]:
        x, w = rows(b, k), weight(k, n)
        for axis in (0, 1):
            packed = _cpu.pack(w if axis == 0 else w.T, axis)
            one, *others = (_cpu.packed_product(x, *packed, n, variant, t) for t in (1, 0, 2, 5))
            for other in others:
                np.testing.assert_array_equal(other, one)
            size = np.abs(x).astype(float) @ np.abs(w)
            assert (np.abs(one - x.astype(float) @ w) <= 1e-6 * size + 1e-30).all(), (b, k, n)
            bad, kept = poison(x, w)  # for even outputs, what is not finite is masked
            packed = _cpu.pack(kept if axis == 0 else kept.T, axis)
            found = np.asarray(_cpu.packed_product(bad, *packed, n, variant))
            wanted = np.where(np.isfinite(bad), bad, 0).astype(float) @ kept
            np.testing.assert_allclose(found[:, ::2], wanted[:, ::2], rtol=1e-4, atol=1e-4)
            reads = (kept[~np.isfinite(bad[0])] != 0).any(0)
            assert not np.isfinite(found[:, reads]).any(), (b, k, n)
    with pytest.raises(jaxonnx.SparsityError, match="along axis 0: a group has 4 nonzeros"):
        _cpu.pack(np.ones((8, 4), np.float32), 0)


@pytest.mark.parametrize("variant", _cpu.VARIANTS)
def test_an_input_reaches_the_outputs_that_keep_a_weight_for_it(variant):
    if variant not in _cpu.variants():
        pytest.skip(f"this processor has no {variant}")
    x, w = rows(40, 36), weight(36, 44)
    w[w == 0] = -0.0
    plain = product(x, w, 0, variant=variant)
    for poison in (np.nan, np.inf):
        for i in range(36):
            poisoned = x.copy()
            poisoned[:, i] = poison
            found = product(poisoned, w, 0, variant=variant)
            reads = w[i] != 0
            assert not np.isfinite(found[:, reads]).any()
            # a group without any weight reads one of its inputs
            empty = ~(w.reshape(9, 4, 44)[i // 4] != 0).any(0)
            np.testing.assert_array_equal(found[:, ~reads & ~empty], plain[:, ~reads & ~empty])


def test_a_weight_that_is_not_sparse_is_an_error_and_never_a_wrong_product():
    x, w = rows(64, 32), weight(32, 20)
    w[4:8, 3] = [1, 2, 3, 0]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"inputs 4 to 7 of output 3 have 3 nonz"):
        product(x, w, 0)
    w[5, 3] = np.nan  # as after a step that went wrong: the output is what a dense product gives
    found = product(x, w, 0)
    assert np.isnan(found[:, 3]).all()
    assert np.isfinite(np.delete(found, 3, axis=1)).all()


def test_sizes_that_are_no_multiples_of_four_are_dense(everything):
    for k, n in [(258, 512), (256, 514), (0, 512)]:
        params = {"w": rows(k, n)}  # which no product may take for 2:4
        x = rows(64, k)

        def multiply(params, x):
            return x @ params["w"]

        structured = sparse.sparse_products(multiply, {"w"})
        assert count(structured, params, x) == 0
        np.testing.assert_array_equal(jax.jit(structured)(params, x), jax.jit(multiply)(params, x))


def test_products_from_several_threads_at_once_are_right():
    x, w = rows(300, 256), weight(256, 512)
    wanted, wrong = product(x, w, 0), []

    def work():
        for _ in range(20):
            wrong.append((product(x, w, 0) != wanted).sum())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 80
    assert not any(wrong)


PARAMS = {"a": rows(256, 512), "b": rows(768, 512)}
X = rows(256, 256).reshape(8, 32, 256)


def network(params, x):
    hidden = jax.nn.relu(x @ params["a"])
    return jax.jit(lambda w, h: h @ w.T)(params["b"], hidden)


def loss(params, x):
    return (network(params, x) ** 2).mean()


def count(function, *args):
    return str(jax.make_jaxpr(function)(*args)).count("sparse_product")


def test_forward_and_backward_products_are_sparse_and_near_the_dense_ones():
    params = sparse.prune(PARAMS)
    gradient = jax.value_and_grad(loss, (0, 1))
    structured = sparse.sparse_products(gradient, {"a", "b"})
    assert count(structured, params, X) == 4
    assert count(sparse.sparse_products(gradient, {"b"}), params, X) == 2
    assert count(structured, params, X[:1, :8]) == 0  # too few rows to gain
    lowered = jax.jit(structured).lower(params, X).as_text()
    assert lowered.count("transpose") <= jax.jit(gradient).lower(params, X).as_text().count("trans")
    wanted = gradient(jax.tree.map(lambda w: np.float64(w), params), np.float64(X))
    found = jax.jit(structured)(params, X)

    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * np.abs(b).max())

    jax.tree.map(close, found, wanted)


@pytest.mark.deep
def test_vmap_scan_remat_and_derivatives_are_right():
    params = sparse.prune(PARAMS)
    quick = sparse.sparse_products(network, {"a", "b"})
    batches = jnp.stack([X, X + 1, 2 * X])

    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())

    wanted = jnp.stack([network(params, x) for x in batches])
    close(jax.vmap(quick, (None, 0))(params, batches), wanted)
    both = jax.tree.map(lambda w: jnp.stack([w, -w]), params)
    close(jax.vmap(quick, (0, None))(both, X)[0], wanted[0])
    close(jax.vmap(quick)(both, batches[:2])[0], wanted[0])
    close(jax.lax.map(lambda x: quick(params, x), batches), wanted)
    again = jax.checkpoint(quick)
    for function in (quick, again):
        found = jax.grad(lambda p, f=function: (f(p, X) ** 2).mean())(params)
        jax.tree.map(close, found, jax.grad(loss)(params, X))
    tangent = jax.jvp(lambda x: quick(params, x), (X,), (X,))[1]
    close(tangent, jax.jvp(lambda x: network(params, x), (X,), (X,))[1])


def test_pointwise_kernels_are_sparse_and_others_are_not():
    params = {"k": jnp.asarray(sparse.mask(rows(256, 256)) * rows(256, 256))[:, :, None, None]}

    def pointwise(params, x):
        return x @ params["k"].reshape(256, 256).T

    assert count(sparse.sparse_products(pointwise, {"k"}), params, X) == 1
    found = sparse.sparse_products(pointwise, {"k"})(params, X)
    np.testing.assert_allclose(found, pointwise(params, X), rtol=1e-4, atol=1e-4)


def test_the_forms_of_convolutions_that_are_timed_are_equal(everything):
    dense, fast = convolutions(6, 8, 12)
    x = rows(2 * 36, 8).reshape(2, 6, 6, 8)
    assert [count(function, w, x) for function, w in fast.values()] == [1, 9]
    wanted, *found = (function(w, x) for function, w in (*dense.values(), *fast.values()))
    for y in found:
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_factors_are_widened_exactly(dtype):
    params = jax.tree.map(lambda w: jnp.asarray(w, dtype), sparse.prune(PARAMS))
    x = jnp.asarray(X, dtype)
    for wanted in (None, jnp.float32):  # the result is rounded once, or not at all

        def multiply(params, x, wanted=wanted):
            return jnp.matmul(x, params["a"], preferred_element_type=wanted)

        structured = sparse.sparse_products(multiply, {"a"})
        assert count(structured, params, x) == 1
        found = jax.jit(structured)(params, x)
        wide = product(*(np.float32(a) for a in (x.reshape(-1, 256), params["a"])), 0)
        np.testing.assert_array_equal(found.reshape(-1, 512), jnp.asarray(wide, found.dtype))
        assert found.dtype == (wanted or dtype)


def test_doubles_are_dense_and_a_run_says_so(everything):
    with jax.enable_x64(True):
        double = jax.tree.map(jnp.float64, sparse.prune(PARAMS))
        structured = sparse.sparse_products(network, {"a", "b"})
        assert count(structured, double, np.float64(X)) == 0
        np.testing.assert_array_equal(
            jax.jit(structured)(double, np.float64(X)), jax.jit(network)(double, np.float64(X))
        )
        text = """<ir_version: 10, opset_import: ["": 22]>
        g (double[b,4] x) => (double[b,4] y)
        <double[4,4] w = {1,1,0,0,0,0,1,1,1,0,1,0,0,1,0,1}> { y = MatMul(x, w) }"""
        model = jaxonnx.load(onnx.parser.parse_model(text))
        told = "products stay dense: the kernel for CPU takes float32 and narrower.*, not float64"
        with pytest.warns(UserWarning, match=told):
            sparse.record(model).with_sparse_products()
        settings = {"dense": 0, "dynamic": 1, "refresh": 1, "products": "sparse"}
        with pytest.warns(UserWarning, match=told):
            jaxonnx.training.step(model, "l2_loss", optax.sgd(0.1), sparsity=settings)


def wide(**changes):
    model = demo.mlp(256)
    return model.replace(
        params={**model.params, "body_weight": jnp.asarray(rows(64, 256))} | changes
    )


SPARSITY = {"select": "body_weight", "dense": 1, "dynamic": 2, "fixed": 1}


@pytest.mark.deep
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_run_learns_with_them_as_without(precision, everything):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(256, 1, 8, 8)).astype(np.float32), rng.integers(0, 10, 256)
    runs = [
        jaxonnx.train(
            demo.mlp(256), (x, y), loss="softmax_cross_entropy_with_integer_labels",
            optimizer=optax.adam(1e-2), epochs=4, batch_size=64, seed=1, precision=precision,
            sparsity=SPARSITY | {"products": products},
        )
        for products in ("dense", "sparse")
    ]  # fmt: skip
    dense, structured = ([row["loss"] for row in run.history.epochs] for run in runs)
    np.testing.assert_allclose(structured, dense, rtol=1e-4 if precision is None else 1e-3)
    np.testing.assert_array_equal(
        *(np.asarray(run.model.params["body_weight"]) != 0 for run in runs)
    )


def test_a_step_has_them_in_its_sparse_phases_only(everything):
    step = jaxonnx.training.step(
        demo.mlp(256), loss="softmax_cross_entropy_with_integer_labels",
        optimizer=optax.sgd(0.1), sparsity=SPARSITY | {"refresh": 1, "products": "sparse"},
    )  # fmt: skip
    batch = np.zeros((64, 1, 8, 8), np.float32), np.arange(64) % 10
    program = jax.make_jaxpr(step.update)(step.init(), batch)
    (choice,) = (
        e for e in program.eqns if e.primitive.name == "cond" and "sparse_product" in str(e.params)
    )
    dense, structured = (str(branch) for branch in choice.params["branches"])
    assert "sparse_product" not in dense
    assert structured.count("sparse_product") == 1  # its input is the data, which has no gradient


def test_a_step_sees_a_loss_that_is_not_finite(everything):
    step = jaxonnx.training.step(
        demo.mlp(256), loss="softmax_cross_entropy_with_integer_labels",
        optimizer=optax.sgd(0.1),
        sparsity={"select": "body_weight", "dense": 0, "dynamic": 0, "products": "sparse"},
    )  # fmt: skip
    update, state = jax.jit(step.update), step.init()
    x = rows(64, 64).reshape(64, 1, 8, 8)
    state, (_, good) = update(state, (x, np.arange(64) % 10))
    assert good
    x[3, 0, 2, 1] = np.nan
    assert not update(state, (x, np.arange(64) % 10))[1][1]


def test_calls_of_a_model_use_them_and_verify_says_so(everything):
    model = wide()
    options = {"select": "body_weight", **model.sparsity_options()}
    model = sparse.record(model.replace(params=sparse.prune(model.params, **options)))
    quick = model.with_sparse_products()
    x = rows(96, 64).reshape(96, 1, 8, 8)
    assert count(quick.apply, quick.params, x) == 1
    np.testing.assert_allclose(quick(x), model(x), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(quick.predict(x), model.predict(x), rtol=1e-4, atol=1e-4)
    products = {p.primitive for p in sparse.verify(quick).products if p.part == "forward"}
    assert products == {"sparse_product"}
    products = {p.primitive for p in sparse.verify(model).products if p.part == "forward"}
    assert products == {"dot_general"}
    assert jaxonnx.load(quick.to_onnx())(x).shape == (96, 10)
    with pytest.raises(jaxonnx.SparsityError, match=r"it records none: sparse\.record\(model\)"):
        demo.mlp().with_sparse_products()


def test_few_rows_of_calls_read_packed_weights(everything, monkeypatch):
    monkeypatch.setattr(_cpu, "FEW_SIZE", 4)
    model = wide()
    options = {"select": "body_weight", **model.sparsity_options()}
    model = sparse.record(model.replace(params=sparse.prune(model.params, **options)))
    quick = model.with_sparse_products()
    for count_of_rows in (1, 8, 9):
        x = rows(count_of_rows, 64).reshape(-1, 1, 8, 8)
        np.testing.assert_allclose(quick(x), model(x), rtol=1e-4, atol=1e-4)
    kept = quick._call_form
    assert kept.params["body_weight"].values.shape == (16, 16, 2, 16)
    program = jax.jit(quick.program, static_argnums=4).trace(
        kept.params, kept.state, None, {"x": rows(2, 64).reshape(-1, 1, 8, 8)}, False
    )
    assert "jaxonnx_packed_product" in program.lower().as_text()
    x = rows(3, 64).reshape(-1, 1, 8, 8)
    gradients = [jax.grad(lambda x, m=m: (m(x) ** 2).sum())(x) for m in (quick, model)]
    np.testing.assert_allclose(*gradients, rtol=1e-3, atol=1e-3)
    many = jax.vmap(lambda x: quick(x))(x[:, None])
    np.testing.assert_allclose(many[:, 0], model(x), rtol=1e-4, atol=1e-4)


def test_products_that_are_not_compiled_take_packed_weights(everything, monkeypatch):
    monkeypatch.setattr(_cpu, "FEW_SIZE", 4)
    w, x = weight(64, 32), rows(2, 64)
    run = sparse.sparse_products(lambda params, x: x @ params["w"], {"w"})
    for params in ({"w": jnp.asarray(w)}, {"w": sparse.pack_matrix(jnp.asarray(w), 0)}):
        np.testing.assert_allclose(run(params, x), x @ w, rtol=1e-4, atol=1e-4)
    model = sparse.record(wide(body_weight=sparse.prune({"w": rows(64, 256)})["w"]))
    dense = model.replace(params=model.params | {"body_weight": jnp.ones((64, 256))})
    with pytest.raises(jaxonnx.SparsityError, match="not 2:4 along axis 0: a group has 4 nonz"):
        dense.with_sparse_products()(rows(2, 64).reshape(-1, 1, 8, 8))


@pytest.mark.deep
def test_rows_of_a_mesh_are_right(everything):
    program = """if True:
        import jax, numpy as np
        from jaxonnx import sparse
        from jaxonnx.sparse._products import _cpu
        _cpu.LEAST_ROWS = ((4, 1),)
        sparse.register_products()
        mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        w = sparse.prune({"w": np.random.default_rng(0).normal(size=(64, 32)).astype("f")})
        x = np.random.default_rng(1).normal(size=(32, 64)).astype("f")
        run = sparse.sparse_products(lambda p, x: x @ p["w"], {"w"})
        rows = jax.device_put(x, jax.NamedSharding(mesh, jax.P("d")))
        text = jax.jit(run).lower(w, rows).as_text()
        print(text.count("custom_call @jaxonnx"))
        np.testing.assert_allclose(jax.jit(run)(w, rows), x @ w["w"], 1e-4, 1e-4)
        split = jax.shard_map(lambda x: run(w, x), mesh=mesh, in_specs=jax.P("d"),
                              out_specs=jax.P("d"))
        print(jax.jit(split).lower(rows).as_text().count("custom_call @jaxonnx"))
        np.testing.assert_allclose(jax.jit(split)(rows), x @ w["w"], 1e-4, 1e-4)
    """
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | flags, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["0", "1"]  # split by XLA: dense; by `shard_map`: sparse


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jaxonnx"


def test_a_compiled_kernel_is_found_again_and_its_sources_are_its_name(cache, monkeypatch):
    monkeypatch.setattr(_native, "compile_library", lambda *args: args[-1].write_text("made"))
    first = _native.cached_library(SOURCE, ["-O1"])
    assert [*cache.iterdir()] == [first]
    monkeypatch.setattr(_native, "compile_library", None)
    assert _native.cached_library(SOURCE, ["-O1"]) == first
    monkeypatch.setattr(_native, "compile_library", lambda *args: args[-1].write_text("made"))
    others = [
        _native.cached_library(SOURCE, ["-O2"]),
        _native.cached_library(SOURCE, ["-O1"], [SOURCE.with_name("kernel.inc")]),
    ]
    monkeypatch.setenv("CXX", "other-compiler")
    others.append(_native.cached_library(SOURCE, ["-O1"]))
    assert len({first, *others}) == 4


def test_without_a_compiler_the_way_out_is_named_and_products_are_dense(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    for thing in (_cpu.register, _cpu._library):
        thing.cache_clear()
    with pytest.raises(jaxonnx.SparsityError, match=r"no-such-compiler, .*jaxonnx\[sparse-cpu\]"):
        sparse.register_products("cpu")
    with pytest.warns(UserWarning, match="products stay dense: .*no-such-compiler"):
        assert not _products.prepare_products([jnp.ones(4)], "cpu")
    assert not [*cache.iterdir()]


def test_a_compiler_that_fails_is_quoted(cache, monkeypatch, tmp_path):
    compiler = tmp_path / "c++"
    said = "a note", "x.h:1: fatal error: no such file", "x.h:2: error: a second one"
    lines = "".join(f"echo '{line}' >&2\n" for line in said)
    compiler.write_text(f"#!/bin/sh\n{lines}exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(_native.CompilerError, match=r"cpu\.cc does not compile .*no such file$"):
        _native.cached_library(SOURCE, [])


def test_a_kernel_that_cannot_be_loaded_is_named(cache, monkeypatch):
    monkeypatch.setattr(_native, "compile_library", lambda *args: args[-1].write_text("made"))
    _cpu._library.cache_clear()
    with pytest.raises(jaxonnx.SparsityError, match=r"cannot be loaded .* XDG_CACHE_HOME"):
        _cpu._library()


def test_a_compiler_that_is_no_program_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path))
    with pytest.raises(_native.CompilerError, match=r"does not start \(Permission denied"):
        _native.compile_library(SOURCE, [], tmp_path / "made.so")


@pytest.mark.parametrize("cache", ["file", None], ids=["a file", "no home"])
def test_a_cache_that_cannot_be_written_is_told(monkeypatch, tmp_path, cache):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    if cache is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr("os.path.expanduser", str)
    monkeypatch.setattr(_native, "compile_library", lambda *args: args[-1].write_text("made"))
    with pytest.warns(UserWarning, match="cannot be written"):
        assert _native.cached_library(SOURCE, []).read_text() == "made"


@pytest.mark.deep
def test_the_compiler_of_ziglang_compiles_it(monkeypatch, tmp_path):
    pytest.importorskip("ziglang")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    folders = os.environ["PATH"].split(os.pathsep)
    without = [f for f in folders if not Path(f, "c++").exists()]
    monkeypatch.setenv("PATH", os.pathsep.join(without))
    assert shutil.which("c++") is None
    assert _native._compiler()[1:] == ["-m", "ziglang", "c++"]
    assert (
        _native.cached_library(SOURCE, _native.OPTIONS, [SOURCE.with_name("kernel.inc")])
        .stat()
        .st_size
        > 1000
    )
