"""Products with 2:4 weights as calls of cuSPARSELt: which they are; nothing else changes."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxonnx
from benchmarks import gpu
from benchmarks.compiled.programs import ENVIRONMENT
from jaxonnx import demo, sparse
from jaxonnx.sparse._products import _cusparselt
from jaxonnx.training._settings.weight_layout import WeightLayout

RNG = np.random.default_rng(0)


def half(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.bfloat16)


PARAMS = {"a": half(32, 48), "b": half(64, 48), "odd": half(64, 8)}
X = half(2, 8, 32)


def loss(params, x):
    hidden = jax.nn.relu(x @ params["a"])
    hidden = jax.jit(lambda w, h: h @ w.T)(params["b"], hidden)
    return ((hidden @ params["odd"]).astype(jnp.float32) ** 2).mean()


def calls(function, *args):
    lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count(_cusparselt.TARGET)


def test_forward_and_backward_products_are_calls_on_cuda_and_dense_elsewhere():
    params = sparse.prune(PARAMS, select=["a", "b"])
    gradient = jax.grad(loss, (0, 1))
    structured = sparse.sparse_products(gradient, {"a", "b"})
    assert calls(structured, params, X) == 4  # x @ W and dy @ W.T of both
    assert calls(sparse.sparse_products(gradient, {"b"}), params, X) == 2
    assert calls(sparse.sparse_products(gradient, {"odd"}), params, X) == 0  # 8 is no multiple
    assert calls(sparse.sparse_products(gradient, {"a"}), params, X[:1]) == 0  # of rows as well
    kernel = {"k": half(16, 16, 16)}  # is no matrix
    contracted = sparse.sparse_products(lambda p, x: jnp.tensordot(x, p["k"], 1), {"k"})
    assert calls(contracted, kernel, half(16, 16)) == 0
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (params, X))
    assert calls(structured, *wide) == 0
    assert calls(gradient, params, X) == 0
    wanted, found = jax.jit(gradient)(params, X), jax.jit(structured)(params, X)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_loops_and_recomputation_stay_as_they_are():
    @jax.checkpoint
    def inner(params, x):
        return jnp.sin(x @ params["w"])

    def outer(params, x):
        turns = jax.lax.fori_loop(0, 2, lambda _, h: inner(params, h), x)
        return jax.lax.cond(turns.sum() > 0, jnp.cos, jnp.sin, turns).sum()

    params, x = {"w": half(16, 16)}, half(16, 16)
    for function in (outer, jax.grad(lambda p, x: inner(p, x).sum())):
        structured = sparse.sparse_products(function, {"w"})
        found, wanted = jax.jit(structured)(params, x), jax.jit(function)(params, x)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
        named = {e.primitive.name for e in jax.make_jaxpr(structured)(params, x).eqns}
        assert {"while", "remat2", "checkpoint", "scan"} & named


def step(**changes):
    options = {"pattern": "2:4", "select": "12.weight", "products": "cusparselt"}
    settings = {
        "loss": "softmax_cross_entropy_with_integer_labels",
        "optimizer": optax.sgd(0.1),
        "sparsity": options | {"dense": 0, "dynamic": 1, "refresh": 1},
        "precision": "bf16",
    }
    return jaxonnx.training.step(demo.model(), **settings | changes)


def test_the_last_phase_of_a_step_has_them(monkeypatch):
    monkeypatch.setattr(sparse, "register_products", lambda platform: None)
    monkeypatch.setattr(sys.modules[WeightLayout.__module__], "platform_of", lambda x: "gpu")
    one = step()
    state = jax.eval_shape(one.init)
    batch = np.zeros((16, 1, 8, 8), np.float32), np.arange(16) % 10
    assert calls(one.update, state, batch) == 2


def test_weights_are_pruned_before_they_are_packed(monkeypatch):
    """A mask that is fixed from the start is applied by the first step."""

    def marked(gradient, names):
        assert set(names) == {"12.weight"}
        return lambda params: jax.tree.map(jnp.zeros_like, gradient(params))

    monkeypatch.setattr(sparse, "register_products", lambda platform: None)
    monkeypatch.setattr(sparse, "sparse_products", marked)
    monkeypatch.setattr(sys.modules[WeightLayout.__module__], "platform_of", lambda x: "gpu")
    options = {"select": "12.weight", "products": "cusparselt", "dense": 0, "dynamic": 0}
    one = step(sparsity=options)
    update, state = jax.jit(one.update), one.init()
    batch = RNG.normal(size=(4, 1, 8, 8)).astype(np.float32), np.arange(4)
    losses = []
    for _ in range(2):
        state, (loss, _) = update(state, batch)
        losses.append(float(loss))
    assert losses[0] > 0 == losses[1]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "NVIDIA GPUs, and the run is on 'cpu': products='sparse' takes"),
        (
            {"sparsity": {"products": "fast", "dense": 0}},
            "'dense', 'sparse' or 'cusparselt', got 'fast'",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes, told):
    with pytest.raises(jaxonnx.TrainingError, match=told):
        step(**changes)


def test_what_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(sparse, "register_products", lambda platform: None)
    monkeypatch.setattr(sys.modules[WeightLayout.__module__], "platform_of", lambda x: "gpu")
    with pytest.raises(jaxonnx.TrainingError, match=r"16-bit.*precision='bf16'"):
        step(precision=None)
    options = {"pattern": "1:4", "products": "cusparselt", "dense": 0, "dynamic": 1}
    with pytest.raises(jaxonnx.TrainingError, match="transposable 2:4, not of 1:4"):
        step(sparsity=options)


def test_what_is_missing_is_named(monkeypatch):
    _cusparselt.register.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(jaxonnx.SparsityError, match=r"pip install 'jaxonnx\[sparse-cuda\]'"):
        sparse.register_products("gpu")
    monkeypatch.setattr(
        _cusparselt,
        "_find_wheels",
        lambda: ([], Path(_cusparselt.__file__).with_name("cusparselt.cc")),
    )
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(jaxonnx.SparsityError, match="no-such-compiler, which is not there"):
        sparse.register_products("gpu")
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(jaxonnx.SparsityError, match=r"cusparselt.cc does not compile with false"):
        sparse.register_products("gpu")


COMPILED = """
import jax, jax.numpy as jnp
from benchmarks.compiled.programs import compiled, device
from jaxonnx import sparse
from jaxonnx.sparse._products import _cusparselt

sparse.register_products("gpu")  # it compiles, is linked, and JAX takes it
params = {name: jnp.zeros((1024, 1024), jnp.bfloat16) for name in "ab"}

def loss(params, x):
    return (jax.nn.relu(x @ params["a"]) @ params["b"]).astype(jnp.float32).sum()

gradient = sparse.sparse_products(jax.grad(loss), {"a", "b"})
text = compiled(gradient, device("h100"), params, jnp.zeros((512, 1024), jnp.bfloat16)).as_text()
print(sum(_cusparselt.TARGET in line and "custom-call(" in line for line in text.splitlines()))
"""


@pytest.mark.compiled
def test_the_call_is_compiled_linked_and_in_the_program_of_an_h100():
    pytest.importorskip("jax_cuda13_plugin")
    try:
        _cusparselt._find_wheels()
    except jaxonnx.SparsityError as missing:
        pytest.skip(str(missing))
    run = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[-1] == "2"  # x @ W, of which only the first is needed, and dy @ W.T


@pytest.mark.gpu
def test_products_are_those_of_dense_weights():
    sparse.register_products()
    params = sparse.prune(PARAMS, select=["a", "b"])
    gradient = jax.value_and_grad(loss, (0, 1))
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(gradient)(*jax.tree.map(lambda x: x.astype(jnp.float32), (params, X)))
    found = jax.jit(sparse.sparse_products(gradient, {"a", "b"}))(params, X)

    def close(a, b):
        a, b = np.asarray(a, np.float32), np.asarray(b)
        assert np.abs(a - b).max() <= 0.02 * np.abs(b).max()  # of numbers with 8 bits

    jax.tree.map(close, found, wanted)


@pytest.mark.gpu
def test_a_run_learns_with_them_as_without():
    x, y = RNG.normal(size=(64, 1, 8, 8)).astype(np.float32), np.arange(64) % 10
    schedule = {"select": "12.weight", "dense": 1, "dynamic": 1, "fixed": 3}
    runs = [
        jaxonnx.train(
            demo.model(), (x, y), loss="softmax_cross_entropy_with_integer_labels",
            optimizer=optax.adam(1e-2), epochs=5, batch_size=16, precision="bf16",
            sparsity=schedule | {"products": products},
        )
        for products in ("dense", "cusparselt")
    ]  # fmt: skip
    dense, structured = (run.history.epochs for run in runs)
    np.testing.assert_allclose(*([row["loss"] for row in x] for x in (structured, dense)), 0.05)


@pytest.mark.gpu
def test_masks_and_gradients_are_those_of_a_processor():
    w, model = RNG.normal(size=(256, 512)).astype(np.float32), demo.model()
    x = RNG.normal(size=(16, 1, 8, 8)).astype(np.float32)

    def gradient(x):
        return jax.grad(lambda params: (model.apply(params, x) ** 2).mean())(model.params)

    found = sparse.mask(w), sparse.mask(w, transposable=False), sparse.mask(w, "4:8")
    with jax.default_matmul_precision("highest"):
        slopes = jax.jit(gradient)(x)
    with jax.default_device(jax.devices("cpu")[0]):
        model = demo.model()
        wanted = sparse.mask(w), sparse.mask(w, transposable=False), sparse.mask(w, "4:8")
        expected = jax.jit(gradient)(x)
    jax.tree.map(np.testing.assert_array_equal, found[:2], wanted[:2])
    kept = [float((np.abs(w) * np.asarray(mask)).sum()) for mask in (found[2], wanted[2])]
    assert kept[0] == pytest.approx(kept[1], rel=1e-3)  # ties and roundings may differ
    for name, slope in slopes.items():
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(slope, expected[name], rtol=1e-3, atol=1e-4 * scale)


def test_parts_that_wait_for_a_gpu_are_ended_in_time_and_kept(monkeypatch, tmp_path, capsys):
    parts = gpu.list_parts(tmp_path / "gpu.txt")
    assert sum(minutes for minutes, _ in parts.values()) == pytest.approx(8)
    assert __file__ in parts["tests"][1]
    child = "import subprocess, sys; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    parts = {"quick": (1, ["-c", "print('done')"]), "slow": (1, ["-c", child])}
    parts |= {"wrong": (1, ["-c", "1 / 0"]), "last": (1, ["-c", "print('also done')"])}
    monkeypatch.setattr(gpu, "list_parts", lambda out: parts)
    monkeypatch.setenv("OUT", str(tmp_path))
    out = tmp_path / "gpu.txt"
    gpu.main(["--minutes", str(6 / 60)])
    assert "== quick: exit status 0" in out.read_text()
    assert "done" in out.read_text()
    slow = out.read_text().split("== slow: ended after ")[1]
    assert "begun" in slow
    assert "== wrong: exit status 1" in slow
    assert "ZeroDivisionError" in slow
    assert "== last: exit status 0" in slow
    assert "also done" in slow
    assert out.read_text() == capsys.readouterr().out
    gpu.main(["--minutes", str(6 / 60), "--parts", "last"])
    assert "quick" not in out.read_text()
