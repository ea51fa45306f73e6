"""What is computed again for the gradient is the same, and takes less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxonnx
from benchmarks.layers.onnx_file import write
from benchmarks.networks import Network
from jaxonnx._run.scope import find_cuts

rng = np.random.default_rng(0)


def residual(layers, x):
    for _ in range(6):
        y = layers.relu(layers.batch_norm(layers.conv(x, 4, 3, pad=1)))
        x = layers.relu(layers.batch_norm(layers.conv(y, 4, 3, pad=1)) + x)
    return layers.dense(layers.spatial_mean(x), 3)


def encoder(layers, tokens):
    x = layers.embed(tokens, 50, 32)
    for _ in range(4):
        x = x + layers.attention(layers.layer_norm(x), 4)
        x = x + layers.dense(layers.gelu(layers.dense(layers.layer_norm(x), 128)), 32)
    return layers.dense(layers.sequence_mean(x), 3)


def lstm(layers, x):
    return layers.dense(layers.lstm(x, 8), 3)


NETWORKS = {
    "residual": Network(residual, (8, 4, 16, 16), 3),
    "encoder": Network(encoder, (8, 32), 3, tokens=50),
    "lstm": Network(lstm, (4, 6, 5), 3),
}


def load(name, tmp_path):
    network = NETWORKS[name]
    write(network, tmp_path / "net.onnx")
    x = rng.normal(size=network.shape).astype(np.float32)
    if network.tokens:
        x = rng.integers(0, network.tokens, network.shape).astype(np.int32)
    return jaxonnx.load(tmp_path / "net.onnx"), x


def step(model):
    def loss(params, state, x):
        y, state = model.apply_train(params, state, jax.random.key(1), x)
        return (y**2).sum(), state

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.deep
@pytest.mark.parametrize("name", NETWORKS)
def test_the_same_gradients_and_statistics(name, tmp_path):
    model, x = load(name, tmp_path)
    if name == "residual":
        model = model.with_dropout({model.graph.nodes[5].outputs[0]: 0.5})
    again = model.with_remat()
    assert again.program.train(again.graph).recomputes
    assert find_cuts(again.graph)
    one, other = (step(m)(m.params, m.state, x) for m in (model, again))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    batches = jax.vmap(step(again), (None, None, 0))(model.params, model.state, jnp.stack([x, x]))
    np.testing.assert_allclose(batches[0][0][1], one[0][0], rtol=1e-4)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["residual", "encoder"])
def test_less_memory_at_the_price_of_a_forward_pass(name, tmp_path):
    model, x = load(name, tmp_path)
    compiled = [
        step(m).lower(model.params, model.state, x).compile() for m in (model, model.with_remat())
    ]
    memory, again = (c.memory_analysis().temp_size_in_bytes for c in compiled)
    assert again < 0.7 * memory
    flops, more = (c.cost_analysis()["flops"] for c in compiled)
    assert flops < more < 1.4 * flops


@pytest.mark.deep
def test_a_run(tmp_path):
    model, x = load("residual", tmp_path)
    y = rng.integers(0, 3, len(x))

    def run(**options):
        return jaxonnx.train(
            model,
            (x, y),
            loss="softmax_cross_entropy_with_integer_labels",
            optimizer=optax.sgd(1e-2),
            epochs=2,
            progress=False,
            **options,
        ).model

    kept = run().params
    for name, value in run(remat=True).params.items():
        np.testing.assert_allclose(value, kept[name], rtol=1e-3, atol=1e-5)
    with pytest.raises(jaxonnx.TrainingError, match="remat must be True or False"):
        run(remat="dots")
