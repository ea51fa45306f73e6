"""precision="bf16": products of bfloat16 numbers, and nothing else, in a float32 program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxonnx
from jaxonnx.training._settings.precision import round_products
from tests.support.paths import DATA
from tests.support.tiny_networks import examples, train, weights


def gradients(name):
    """The gradient of a loss, its arguments, and the same gradient in bfloat16."""
    model = jaxonnx.load(DATA / f"{name}.legacy.onnx")
    random = np.random.default_rng(0)
    inputs = [
        random.integers(0, 5, [2 if isinstance(n, str) else n for n in value.shape or ()])
        if np.issubdtype(value.dtype, np.integer)
        else random.normal(size=[2 if isinstance(n, str) else n for n in value.shape or ()])
        for value in model.inputs
    ]
    inputs = [np.asarray(x, v.dtype) for x, v in zip(inputs, model.inputs, strict=True)]

    def loss(params, state):
        outputs, _ = model.apply_train(params, state, jax.random.key(0), *inputs)
        return sum((x**2).mean() for x in jax.tree.leaves(outputs))

    function = jax.value_and_grad(loss)
    return function, (model.params, model.state), round_products(function, jnp.bfloat16)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["lenet", "transformer"])
def test_gradients_are_close_and_their_products_in_bfloat16(name):
    function, args, rounded = gradients(name)
    loss, exact = jax.jit(function)(*args)
    near, found = jax.jit(rounded)(*args)
    np.testing.assert_allclose(near, loss, rtol=1e-2)
    for key, value in exact.items():
        assert found[key].dtype == value.dtype == jnp.float32
        assert jnp.linalg.norm(found[key] - value) < 0.1 * jnp.linalg.norm(value), key
    programs = [jax.jit(f).trace(*args) for f in (function, rounded)]
    for platform in ("tpu", "cuda"):
        plain, text = (p.lower(lowering_platforms=(platform,)).as_text() for p in programs)
        assert "bf16" not in plain
        pattern = r"stablehlo\.(dot_general|convolution)\b.* : \((.*)\) -> .*x([a-z]+\d+)>"
        products = re.findall(pattern, text)
        assert len(products) == len(re.findall(pattern, plain)) > 0
        for kind, operands, result in products:
            assert re.findall(r"x([a-z]+\d+)>", operands) == ["bf16", "bf16"]
            # a unit adds in float32 in any case; a convolution's sum is rounded once, as PyTorch's
            assert result == {"dot_general": "f32", "convolution": "bf16"}[kind]
        for operator in ("exponential", "rsqrt", "log", "tanh", "reduce_sum"):
            assert not re.search(rf"stablehlo\.{operator} .*bf16", text)


@pytest.mark.deep
def test_training_converges_alike_with_float32_weights():
    data = examples(160)
    settings = {"epochs": 5, "optimizer": optax.adam(3e-2), "validation": examples(80, seed=3)}
    exact, near = train(data=data, **settings), train(data=data, **settings, precision="bf16")
    one, other = (r.history.epochs[-1] for r in (exact, near))
    assert other["loss"] < 0.5 * near.history.epochs[0]["loss"]
    assert other["validation_loss"] == pytest.approx(one["validation_loss"], rel=0.05)
    assert {x.dtype for x in weights(near).values()} == {np.dtype(np.float32)}
    # more than rounding the weights would leave of a float32 number
    assert any((x.view(np.uint32) & 0xFFFF).any() for x in weights(near).values())
    loss = optax.softmax_cross_entropy_with_integer_labels(
        near.model(settings["validation"][0]), settings["validation"][1]
    ).mean()
    np.testing.assert_allclose(other["validation_loss"], loss, rtol=1e-6)


def test_products_of_other_types_stay():
    def function(x, n):
        return x @ x, n @ n

    def types(x, n):
        program = jax.jit(round_products(function, jnp.bfloat16)).trace(x, n)
        text = program.lower(lowering_platforms=("tpu",)).as_text()
        return re.findall(r"dot_general.* : \(tensor<2x2x(\w+)>", text)

    n = np.ones((2, 2), np.int32)
    assert types(np.ones((2, 2), np.float32), n) == ["bf16", "i32"]
    assert types(np.ones((2, 2), np.float16), n) == ["f16", "i32"]


def test_branches_and_loops():
    def function(x):
        y = jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x)
        y, _ = jax.lax.scan(lambda y, _: (y @ x, None), y, length=2)
        y = jax.lax.while_loop(lambda y: jnp.abs(y).max() < 9, lambda y: y @ x + 1, y)
        return jax.checkpoint(lambda y: jnp.tanh(y @ x))(y)

    x = np.random.default_rng(0).random((3, 3), np.float32)
    program = jax.jit(round_products(function, jnp.bfloat16)).trace(x)
    text = program.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.dot_general") == 4
    assert len(re.findall(r"dot_general.* : \(tensor<3x3xbf16>, tensor<3x3xbf16>\)", text)) == 4
    np.testing.assert_allclose(
        jax.jit(round_products(function, jnp.bfloat16))(x), function(x), rtol=0.05
    )


@pytest.mark.parametrize(
    ("units", "expected"), [(True, "has units for"), (False, "steps take longer than in float32")]
)
def test_a_run_says_whether_its_processor_has_units(monkeypatch, units, expected):
    monkeypatch.setattr("jaxonnx.training._settings.precision.has_units", lambda dtype: units)
    result = train(data=examples(8), optimizer=optax.sgd(0.1), precision="bf16")
    (note,) = (note for note in result.history.notes if "precision" in note)
    assert expected in note
    assert "jaxonnx.training.preview" in note
    assert note in str(result)
