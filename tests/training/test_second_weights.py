"""Runs that keep two sets of weights: the one to evaluate is validated, saved and returned."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jaxonnx
from jaxonnx import sparse
from tests.support.tiny_networks import LABELS, examples, mlp, train, weights
from tests.training import test_statistics as normalized

BATCHES = [tuple(x[i : i + 8] for x in examples()) for i in range(0, 40, 8)]
SCHEDULE_FREE = contrib.schedule_free_adamw(1e-2, warmup_steps=2)
SAM = contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.1)), 3)
LOOKAHEAD = optax.lookahead(optax.sgd(0.1), sync_period=3, slow_step_size=0.5)


def walk(rule, params, steps=5, read=lambda params: params):
    """The parameters and the optimizer's state of a loop as optax documents it."""
    model = jaxonnx.load(mlp())

    @jax.jit
    def update(params, state, x, y):
        def loss(params):
            logits, _ = model.apply_train(params, model.state, jax.random.key(0), x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        updates, state = rule.update(jax.grad(loss)(read(params)), state, params)
        return optax.apply_updates(params, updates), state

    state = rule.init(params)
    for x, y in BATCHES[:steps]:
        params, state = update(params, state, x, y)
    return params, state


def of_schedule_free():
    params, state = walk(SCHEDULE_FREE, dict(jaxonnx.load(mlp()).params))
    return params, contrib.schedule_free_eval_params(state, params)


def of_lookahead():
    both = optax.LookaheadParams.init_synced(dict(jaxonnx.load(mlp()).params))
    both, _ = walk(LOOKAHEAD, both, read=lambda params: params.fast)
    return both.fast, both.slow


def of_sam():
    """The weights before an adversarial step: with five batches those after three."""
    params = dict(jaxonnx.load(mlp()).params)
    return walk(SAM, params)[0], walk(SAM, params, 3)[0]


KINDS = {
    "schedule_free": (SCHEDULE_FREE, of_schedule_free),
    "lookahead": (LOOKAHEAD, of_lookahead),
    "sam": (SAM, of_sam),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_to_evaluate_are_validated_kept_and_returned(kind, tmp_path):
    rule, expected = KINDS[kind]
    trained, seen = expected()
    settings = {"optimizer": rule, "data": BATCHES, "validation": examples(), "patience": 3}
    result = train(**settings, checkpoint_dir=tmp_path)
    for name, value in seen.items():
        np.testing.assert_allclose(weights(result)[name], value, rtol=1e-5, atol=1e-6)
        assert np.abs(trained[name] - value).max() > 1e-4  # what was returned before
    stored = jaxonnx.load(tmp_path).params
    for name, value in result.model.params.items():
        np.testing.assert_array_equal(stored[name], value)
    loss = jaxonnx.evaluate(result.model, examples(), loss=LABELS)["loss"]
    np.testing.assert_allclose(result.history.epochs[-1]["validation_loss"], loss, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_runs_resume_bit_for_bit(kind, tmp_path):
    settings = {"optimizer": KINDS[kind][0], "data": BATCHES}
    whole = train(**settings, epochs=2)
    train(**settings, checkpoint_dir=tmp_path)
    resumed = train(**settings, epochs=2, checkpoint_dir=tmp_path, resume=True)
    for name, value in weights(whole).items():
        np.testing.assert_array_equal(weights(resumed)[name], value)


def test_some_of_the_parameters_have_second_weights():
    labels = {"w1": "free", "b1": "free", "w2": "plain", "b2": "plain"}
    rule = optax.multi_transform({"free": SCHEDULE_FREE, "plain": optax.sgd(0.1)}, labels)
    trained, state = walk(rule, dict(jaxonnx.load(mlp()).params))
    z = state.inner_states["free"].inner_state.z
    result = weights(train(optimizer=rule, data=BATCHES))
    for name in ("w1", "b1"):
        expected = (trained[name] - 0.1 * z[name]) / 0.9
        np.testing.assert_allclose(result[name], expected, rtol=1e-4, atol=1e-6)
    for name in ("w2", "b2"):
        np.testing.assert_allclose(result[name], trained[name], rtol=1e-5, atol=1e-6)


def test_a_moving_average_is_of_the_weights_to_evaluate():
    params = dict(jaxonnx.load(mlp()).params)
    average = params
    for steps in range(1, 6):
        y, state = walk(SCHEDULE_FREE, params, steps)
        x = contrib.schedule_free_eval_params(state, y)
        average = jax.tree.map(lambda a, b: 0.5 * a + 0.5 * b, average, x)
    result = weights(train(optimizer=SCHEDULE_FREE, data=BATCHES, ema=0.5))
    for name, value in average.items():
        np.testing.assert_allclose(result[name], value, rtol=1e-4, atol=1e-6)


def test_sparse_weights_stay_sparse():
    result = train(optimizer=SCHEDULE_FREE, epochs=3, sparsity={"dense": 1, "dynamic": 1})
    for name in ("w1", "w2"):
        assert (np.count_nonzero(weights(result)[name].reshape(-1, 4), 1) <= 2).all()
    sparse.verify(result.model)


@pytest.mark.parametrize("second", [{"ema": 0.98}, {"optimizer": SCHEDULE_FREE}])
def test_running_statistics_are_those_of_the_weights_to_evaluate(second):
    """Momentum 0.5 settles at once: on the trained weights, which are not those of the model."""
    x, y = normalized.examples()
    settings = {"loss": LABELS, "optimizer": optax.adam(1e-2), "batch_size": 32, "epochs": 8}
    result = jaxonnx.train(
        normalized.network(momentum=0.5), (x, y), validation=(x, y), **settings | second
    )
    inner = x.astype(np.float64) @ np.asarray(result.model.params["w1"], np.float64)
    np.testing.assert_allclose(result.model.state["m1"], inner.mean(0), rtol=1e-5)
    np.testing.assert_allclose(result.model.state["v1"], inner.var(0), rtol=1e-4)
    accuracy = normalized.accuracy(result.model, (x, y))
    assert accuracy > 0.95
    np.testing.assert_allclose(result.history.epochs[-1]["validation_accuracy"], accuracy)
    (note,) = (note for note in result.history.notes if "statistics" in note)
    assert "the weights that were trained are not those of the model" in note


def test_weights_without_names_are_refused():
    with pytest.raises(jaxonnx.TrainingError, match=r"optax\.flatten"):
        train(optimizer=optax.flatten(SCHEDULE_FREE))
    assert train(optimizer=jnp and contrib.schedule_free(optax.flatten(optax.sgd(0.1)), 0.1))
