"""JAX's flag against arrays of fewer axes, `jax_numpy_rank_promotion`, which users set."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxonnx
from jaxonnx import losses
from tests.support.paths import DATA, ROOT

DIGITS, LLM = ROOT / "jaxonnx" / "assets" / "digits_cnn.onnx", DATA / "llm"
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(8, 1, 8, 8)).astype(np.float32)
TOKENS = RNG.integers(3, 60, (2, 6))
SETTINGS = {"epochs": 1, "batch_size": 4, "progress": False}


def classify():
    model = jaxonnx.load(DIGITS)
    gradient = jax.jit(jax.grad(lambda p: model.apply(p, IMAGES).var()))(model.params)
    return [model(IMAGES), *gradient.values()]


def train_classifier():
    loss = losses.cross_entropy(weight=np.linspace(1, 2, 10))
    settings = {**SETTINGS, "label_smoothing": 0.1, "ema": 0.9, "validation": 0.25}
    model = jaxonnx.load(DIGITS)
    data = IMAGES, np.eye(10, dtype=np.float32)[np.arange(8)]
    squares = jaxonnx.evaluate(model, data, loss="squared_error", metrics="r2")
    result = jaxonnx.train(model, (IMAGES, np.arange(8)), loss=loss, **settings)
    return [*squares.values(), *result.history.losses]


def adapt_decoder():
    model = jaxonnx.load(LLM / "qwen3-genai")
    lora = jaxonnx.LoRA(rank=2, where="attention")
    result = jaxonnx.train(model, {"input_ids": TOKENS}, loss="causal_lm", lora=lora, **SETTINGS)
    return [*result.history.losses, model.generate(TOKENS[0], max_new_tokens=3)]


def differentiate_experts():
    model = jaxonnx.load(LLM / "builder" / "gpt_oss.onnx").without_cache()

    def loss(params):
        logits = model.apply(params, TOKENS, np.ones_like(TOKENS))
        return (logits[0] if isinstance(logits, tuple) else logits).var()

    return [*jax.jit(jax.grad(loss))(model.params).values()]


@pytest.mark.parametrize(
    "compute", [classify, train_classifier, adapt_decoder, differentiate_experts]
)
def test_operators_and_losses_broadcast_under_the_flag(compute):
    expected = compute()
    with jax.numpy_rank_promotion("raise"):
        results = compute()
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-5, atol=1e-6)


def test_the_flag_holds_in_losses_of_users():
    def loss(outputs, targets):
        return ((outputs - jnp.ones(10)) ** 2).mean(-1)

    model, data = jaxonnx.load(DIGITS), (IMAGES, np.arange(8))
    settings = {**SETTINGS, "loss": loss, "optimizer": optax.sgd(0.1)}
    assert jaxonnx.train(model, data, **settings).history.losses
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank_promotion"):
        jaxonnx.train(model, data, **settings)
