"""`jaxonnx.training.step`: the step that `train` loops over, in loops of one's own; and that of a
file that carries its training, which has all that a run has."""

import inspect
import re
from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxonnx
from jaxonnx.training import Batch, State, Step, step
from jaxonnx.training._settings import Settings
from tests.support.tiny_networks import LABELS, examples, mlp, train, weights


def batches(epoch=0):
    x, y = examples()
    return [(x[i : i + 8], y[i : i + 8]) for i in range(0, 40, 8)]


def full(pair):
    return Batch((pair[0],), pair[1], np.ones(len(pair[0]), np.float32))


def looped(one: Step, count=5) -> State:
    update, _ = one.jit()
    state = one.init()
    for pair in (batches() * count)[:count]:
        state, _ = update(state, full(pair))
    return one.flush(state)[0]


def test_train_is_a_function_and_the_package_has_the_rest():
    given = [*inspect.signature(jaxonnx.train).parameters][2:]
    assert given == [field.name for field in fields(Settings)]
    assert "patience:" in inspect.getdoc(jaxonnx.train)
    assert inspect.isfunction(jaxonnx.train)
    assert jaxonnx.training.step is step


@pytest.mark.deep
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": optax.adam(1e-2), "accumulate": 2, "ema": 0.9, "seed": 3},
        {"optimizer": optax.sgd(0.1), "trainable": ["w2", "b2"]},
        {"optimizer": optax.adam(1e-2), "lora": jaxonnx.LoRA(rank=2)},
    ],
    ids=["average", "head", "lora"],
)
def test_a_loop_of_ones_own_is_a_run(settings):
    result = train(mlp(dropout=True), data=batches, **settings)
    one = step(mlp(dropout=True), LABELS, **settings)
    state = looped(one)
    trained = one.to_model(one.view(state), state.state).merge_adapters()
    assert all(
        np.asarray(trained.params[name]).tobytes() == value.tobytes()
        for name, value in weights(result).items()
    )


@pytest.mark.deep
def test_sparsity_in_steps():
    phases = {"dense": 1, "dynamic": 2}
    result = train(data=batches(), epochs=4, sparsity=phases)
    one = step(mlp(), LABELS, optax.adam(1e-2), sparsity=phases, steps_per_epoch=5, epochs=4)
    trained = one.to_model(one.view(looped(one, 20)), {})
    assert np.count_nonzero(trained.params["w1"]) == 64
    for name, value in weights(result).items():
        np.testing.assert_array_equal(trained.params[name], value)
    with pytest.raises(jaxonnx.TrainingError, match="needs the lengths of its phases"):
        step(mlp(), LABELS, optax.sgd(0.1), sparsity="2:4")


@pytest.mark.deep
def test_pairs_dicts_scan_and_params_of_ones_own():
    one = step(mlp(), LABELS, optax.sgd(0.1))
    mine = {name: x + 1 for name, x in one.model.params.items()}
    x, y = (jnp.stack(arrays) for arrays in zip(*batches(), strict=True))
    state, seen = jax.jit(lambda s: jax.lax.scan(one.update, s, (x, y)))(one.init(mine))
    other = one.init(mine)
    for xs, ys in batches():
        other, (loss, finite) = one.update(other, {"x": xs, "y": ys})
    assert finite == 1
    np.testing.assert_allclose(seen[-1, 0], loss, rtol=1e-5)
    for name, value in one.view(state).items():
        np.testing.assert_allclose(value, other.params[name], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(mine[name], one.model.params[name] + 1)  # not donated


def test_evaluation_sums_up():
    one = step(mlp(), LABELS, optax.sgd(0.1), metrics=["accuracy", "top_2"])
    (first, *_), (x, y) = batches(), examples()
    sums, state, evaluate = one.sums(first), one.init(), jax.jit(one.evaluate)
    for batch in batches():
        sums = evaluate(sums, state, batch)
    logits = one.model(x)
    row = one.row(sums)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    np.testing.assert_allclose(row["validation_loss"], losses.mean(), rtol=1e-5)
    assert row["validation_accuracy"] == pytest.approx((logits.argmax(1) == y).mean())
    assert row["validation_top_2"] >= row["validation_accuracy"]


def test_what_is_frozen_is_an_argument():
    one = step(mlp(), LABELS, optax.sgd(0.1), trainable=["w2", "b2"])
    assert {*one.frozen} == {"w1", "b1"}
    arguments = one.init(), full(batches()[0]), one.frozen
    texts = [jax.jit(one.update).lower(*arguments[:n]).as_text() for n in (2, 3)]
    assert [bool(re.search(r'dense<("0x|\[)', text)) for text in texts] == [True, False]


def test_a_compiled_step_passes_what_is_frozen_and_donates_its_state():
    one = step(mlp(), LABELS, optax.sgd(0.1), trainable=["w2", "b2"])
    (first, second, *_), (update, evaluate) = batches(), one.jit()
    before = one.init()
    state, (loss, finite) = update(before, first)
    assert before.params["w2"].is_deleted()
    assert not one.frozen["w1"].is_deleted()
    expected, seen = jax.jit(one.update)(one.init(), full(first))
    np.testing.assert_allclose([loss, finite], seen, rtol=1e-6)
    np.testing.assert_allclose(state.params["w2"], expected.params["w2"], rtol=1e-5)
    sums = evaluate(one.sums(first), state, second)
    np.testing.assert_allclose(
        jax.tree.leaves(sums),
        jax.tree.leaves(jax.jit(one.evaluate)(one.sums(first), state, second)),
        rtol=1e-5,
    )
    (call,) = jax.make_jaxpr(update)(state, first).eqns
    kept = {x.shape for x in call.params["jaxpr"].consts}  # constants of what is compiled
    assert kept.isdisjoint(x.shape for x in one.frozen.values())


def test_a_state_may_carry_more():
    @jax.tree_util.register_dataclass
    @dataclass(frozen=True)
    class Counted(State):
        seconds: jax.Array

    one = step(mlp(), LABELS, optax.sgd(0.1))
    state = Counted(**vars(one.init()), seconds=jnp.float32(3))
    state, _ = jax.jit(one.update)(state, batches()[0])
    assert isinstance(state, Counted)
    assert (state.seconds, state.count) == (3, 1)


@pytest.mark.deep
@pytest.mark.parametrize("nan", ["stop", "skip"])
def test_a_step_that_is_not_finite_changes_nothing(nan):
    one = step(mlp(), LABELS, optax.sgd(0.1), nan=nan)
    x, y = batches()[0]
    state, (_, finite) = one.update(one.init(), (x * np.nan, y))
    assert not finite
    jax.tree.map(np.testing.assert_array_equal, state.params, one.model.params)
    state, (loss, finite) = one.update(state, (x, y))
    assert np.isfinite(loss)
    assert finite == (nan == "skip")
    assert (state.count, state.taken) == ((2, 1) if nan == "skip" else (0, 0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "adan"}, "must be a name .adam, adamw"),
        ({"ema": 2.0}, "ema must be"),
        ({"lora": "3"}, "lora must be a jaxonnx.LoRA"),
        ({"lora": jaxonnx.LoRA(), "sparsity": "2:4"}, "merge the adapters"),
        ({"epochs": 0}, "epochs must be an integer"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(jaxonnx.TrainingError, match=message):
        step(mlp(), **{"loss": LABELS, "optimizer": optax.sgd(0.1), **settings})


# The step of a file that carries its training.


def carrying(rate=1e-2):
    return jaxonnx.add_training(mlp(), loss=LABELS, optimizer=jaxonnx.optim.adam(rate))


def follow(data=batches, rate=1e-2, **settings):
    return jaxonnx.train(carrying(rate), data, **settings)


def variables(result):
    return {name: np.asarray(x) for name, x in result.model.training.state.items()}


def equal(one, other):
    a, b = variables(one), variables(other)
    return {*a} == {*b} and all(a[name].tobytes() == b[name].tobytes() for name in a)


def bad_at(*places):
    """Batches, some of which hold a number that is none."""

    def data(epoch):
        for i, (x, y) in enumerate(batches()):
            yield (x * np.nan if (epoch, i) in places else x), y

    return data


@pytest.mark.deep
def test_the_algorithm_of_a_file_resumes_bit_for_bit(tmp_path):
    def cut_off(epoch):
        for i, pair in enumerate(batches()):
            if (epoch, i) == (1, 4):
                raise ConnectionError
            yield pair

    settings = {"epochs": 3, "patience": 9, "validation": examples(24)}
    whole = follow(checkpoint_dir=tmp_path / "whole", **settings)
    run = {"checkpoint_dir": tmp_path / "run", **settings}
    with pytest.raises(ConnectionError):
        follow(cut_off, **run)
    rest = follow(**run, resume=True)
    assert variables(rest)["T"] == 15
    assert equal(whole, rest)
    assert rest.history.losses == whole.history.losses
    np.testing.assert_array_equal(rest.model.params["w1"], variables(rest)["w1"])


def test_the_algorithm_of_a_file_stops_when_patience_runs_out():
    settings = {"patience": 1, "validation": examples(24)}
    result = follow(rate=-1.0, epochs=6, **settings)  # it gets ever worse
    assert result.history.early
    assert "epoch 1, the best" in result.history.stopped
    assert len(result.history.epochs) == 2
    assert equal(result, follow(rate=-1.0, epochs=1))


def test_the_algorithm_of_a_file_has_metrics():
    x, y = examples(24)
    result = follow(epochs=2, validation=(x, y), metrics=["accuracy", "top_2"], batch_size=None)
    logits = np.asarray(result.model(x))
    row = result.history.epochs[-1]
    assert row["validation_accuracy"] == pytest.approx((logits.argmax(1) == y).mean())
    assert row["validation_top_2"] >= row["validation_accuracy"]


def test_the_algorithm_of_a_file_skips_what_is_not_finite():
    result = follow(bad_at((0, 2)), epochs=1, nan="skip")
    assert [event["event"] for event in result.history.events] == ["skipped"]
    rest = [pair for i, pair in enumerate(batches()) if i != 2]
    assert equal(result, follow(rest, nan="skip"))
    assert variables(result)["T"] == 4


def test_the_algorithm_of_a_file_rolls_back():
    result = follow(bad_at((1, 4)), epochs=2, nan="rollback")
    assert [(e["event"], e["to"]) for e in result.history.events] == [("rolled back", 5)]
    assert equal(result, follow(epochs=1))


def test_the_step_of_a_file_in_a_loop_of_ones_own():
    one = step(carrying())
    trained = one.to_model(one.view(looped(one)), {})
    jax.tree.map(
        np.testing.assert_array_equal, trained.training.state, follow().model.training.state
    )
    with pytest.raises(jaxonnx.TrainingError, match="ema: such settings go with loss="):
        step(carrying(), ema=0.9)


def test_a_gradient_that_is_not_finite_is_noticed_in_the_variables():
    """The loss is finite where the gradient is not; a variable that was infinite may stay so."""
    from jaxonnx.training._step import stays_finite

    old = {"w": jnp.ones(2), "best": jnp.array(jnp.inf), "T": jnp.int32(1)}
    assert stays_finite(old, {**old, "w": jnp.array([1.0, 3e38])})
    assert not stays_finite(old, {**old, "w": jnp.array([1.0, jnp.inf])})
    assert stays_finite(old, {**old, "best": jnp.array(3.0)})
