"""Every real file on a mesh with explicit axes, on eight devices against one.

The axes of all results are known from tracing, for every file with split weights. What the compiled
programs give is compared for one file of each kind of network, whose inference is traced as well:
compiling all of them took minutes.
"""

import os
import subprocess
import sys

import pytest

from tests.support.family_table import DATA, OPEN

MESH = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp, numpy as np, optax
import jaxonnx
from jax import P

folder, *files = sys.argv[1:]
COMPILED = {"lenet_bn.dynamo.onnx": "split", "lstm.legacy.onnx": "split",
            "mobilenet.dynamo.onnx": "whole", "transformer.legacy.onnx": "split"}
mesh = jax.make_mesh((4, 2), ("data", "model"))
assert set(mesh.axis_types) == {jax.sharding.AxisType.Explicit}
assert {*COMPILED} <= {*files}
rng = np.random.default_rng(0)


def cross_entropy(outputs, y):
    logits = outputs[-1] if isinstance(outputs, tuple) else outputs
    logits = logits.mean(tuple(range(1, logits.ndim - 1)))  # of the places of a sequence
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def arguments(model):
    (value,) = model.inputs
    shape = 8, *value.shape[1:]
    whole = np.issubdtype(value.dtype, np.integer)
    x = rng.integers(0, 5, shape, np.int32) if whole else rng.normal(size=shape)
    return x.astype(jax.dtypes.canonicalize_dtype(value.dtype)), rng.integers(0, 3, 8)


def functions(model):
    def trained(params, state, x, y):
        outputs, state = model.apply_train(params, state, jax.random.key(0), x)
        return cross_entropy(outputs, y), (outputs, state)

    def applied(params, state, x, y):
        outputs = model.apply(params, x, state=state)
        return cross_entropy(outputs, y), (outputs, state)

    for function in (applied, trained):
        yield jax.jit(jax.value_and_grad(function, has_aux=True))


def split(w):
    # the last axis over "model" where it divides
    return P(*(None,) * (w.ndim - 1), "model") if w.ndim and w.shape[-1] % 2 == 0 else P()


def sharded(model, function, arguments, how):
    # the traced program and its arguments, with weights whole or split over "model"
    with jax.set_mesh(mesh):
        batch = jax.device_put(arguments, P("data"))
        params, state = jax.device_put((model.params, model.state), P())
        if how == "split":
            params = {n: jax.device_put(w, split(w)) for n, w in params.items()}
        traced = function.trace(params, state, *batch)
        specs = jax.tree.map(lambda a: a.sharding.spec, traced.out_info)
    expect = lambda tree: jax.tree.map(lambda w: jax.typeof(w).sharding.spec, tree)
    (loss, (outputs, renewed)), gradients = specs
    assert all(spec[0] == "data" for spec in jax.tree.leaves(outputs)), outputs
    assert gradients == expect(params) and renewed == expect(state)
    return traced, (params, state, *batch)


for name in files:
    model = jaxonnx.load(f"{folder}/{name}")
    model = model.with_any_batch() if name.startswith("fixed") else model
    x, y = arguments(model)
    applied, trained = functions(model)
    how = COMPILED.get(name, "split")
    print(name, how, flush=True)
    traced, values = sharded(model, trained, (x, y), how)
    if name in COMPILED:
        sharded(model, applied, (x, y), how)
        compiled = traced.lower().compile()
        if how == "whole":
            assert "all-gather" not in compiled.as_text()
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5),
                     compiled(*values), trained(model.params, model.state, x, y))
"""


@pytest.mark.deep
def test_explicit_axes_on_all_files():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "ignore", "-c", MESH, DATA, *OPEN]
    subprocess.run(command, check=True, env=environment)
