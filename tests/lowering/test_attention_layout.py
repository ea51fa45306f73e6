"""Products around attention with their heads as axes: the same values and gradients, no copies."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxonnx
from benchmarks.layers.onnx_file import write
from benchmarks.networks import Network
from benchmarks.systems import train_step
from jaxonnx.lowering._attention_layout import separate_heads

rng = np.random.default_rng(0)
BATCH, LENGTH, HEADS, DEPTH = 2, 3, 4, 5
SIZE = HEADS * DEPTH


def attention(params, x):
    """Compute as graphs do: rows, one product for query, key and value, heads split and merged."""
    both, bias, out, scale = params
    rows = (jax.nn.relu(x) * scale).reshape(-1, SIZE)
    mixed = bias + (rows @ both).reshape(BATCH, LENGTH, 3 * SIZE)
    parts = (mixed[..., i * SIZE : (i + 1) * SIZE] for i in range(3))
    q, k, v = (p.reshape(BATCH, LENGTH, HEADS, DEPTH).swapaxes(1, 2) for p in parts)
    y = jax.nn.softmax(q @ k.mT) @ v
    y = y.swapaxes(1, 2).reshape(BATCH, LENGTH, SIZE).reshape(-1, SIZE) @ out
    return y.reshape(x.shape), mixed[..., 1:3], (rows @ both)[:, ::2], rows


PARAMS = tuple(
    rng.normal(size=shape).astype(np.float32)
    for shape in [(SIZE, 3 * SIZE), (3 * SIZE,), (SIZE, SIZE), (SIZE,)]
)
X = rng.normal(size=(BATCH, LENGTH, SIZE)).astype(np.float32)


def changed(jaxpr):
    """Return the shapes between which a program splits or merges heads of an array."""
    pairs = {
        (e.invars[0].aval.shape, e.outvars[0].aval.shape)
        for e in jaxpr.eqns
        if e.primitive.name == "reshape"
    }
    apart = BATCH, LENGTH, HEADS, DEPTH
    return {pair for pair in pairs if apart in pair}


def test_heads_apart_are_the_same_function_without_reshapes_of_arrays():
    def loss(function):
        return lambda params, x: sum(jnp.sum(jnp.sin(y)) for y in function(params, x))

    for wanted, found in zip(
        attention(PARAMS, X), separate_heads(attention)(PARAMS, X), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    gradients = (
        jax.jit(jax.grad(loss(f)))(PARAMS, X) for f in (attention, separate_heads(attention))
    )
    for wanted, found in zip(*gradients, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert len(changed(jax.make_jaxpr(attention)(PARAMS, X).jaxpr)) == 2
    assert not changed(jax.make_jaxpr(separate_heads(attention))(PARAMS, X).jaxpr)


def test_a_step_for_tpu_has_heads_apart_and_trains_the_same(tmp_path):
    def build(layers, tokens):
        x = layers.embed(tokens, 11, 8)
        x = x + layers.attention(layers.layer_norm(x), 2)
        return layers.dense(layers.sequence_mean(x), 3)

    write(Network(build, (2, 4), 3, tokens=11), tmp_path / "net.onnx")
    model = jaxonnx.load(tmp_path / "net.onnx")
    x, y = rng.integers(0, 11, (2, 4)).astype(np.int32), np.array([0, 2], np.int32)
    losses, products = {}, {}
    for platform in ("cpu", "tpu"):
        update, _, *rest = train_step(model, x, y, platform=platform)
        state = train_step(model, x, y)[1]
        products[platform] = str(jax.make_jaxpr(update)(state, *rest)).count("f32[8,2,4]")
        for _ in range(3):
            state, seen = jax.jit(update)(state, *rest)
        losses[platform] = seen[0]
    np.testing.assert_allclose(losses["tpu"], losses["cpu"], rtol=1e-5)
    assert products["tpu"] > products["cpu"] == 0
