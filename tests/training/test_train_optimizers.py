"""Optimizers by name: optax's own numbers, and their learning rate in history, logs and bar."""

import csv
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.parser
import optax
import pytest
from onnx import numpy_helper

import jaxonnx
from jaxonnx import loggers
from jaxonnx.cli import main
from jaxonnx.training import optimizer, step
from jaxonnx.training._step.optimizers import find_vectors
from tests.support.paths import DATA
from tests.support.sweeps import sweep
from tests.support.tiny_networks import LABELS, examples, mlp, train, weights

OPTAX = {
    "adam": optax.adam,
    "adamw": optax.adamw,
    "adagrad": optax.adagrad,
    "lion": optax.lion,
    "rmsprop": optax.rmsprop,
    "sgd": optax.sgd,
}


MATRICES = {"w1": True, "b1": False, "w2": True, "b2": False}


def walk(rule, steps=6):
    """The weights after some steps, and the rates in the state."""
    w: Any = {"w": jnp.linspace(-1.0, 1.0, 7)}
    state, rates = rule.init(w), []
    for _ in range(steps):
        updates, state = rule.update(jax.tree.map(lambda x: x**2 - 3.0, w), state, w)
        w = optax.apply_updates(w, updates)
        if isinstance(state, tuple) and hasattr(state[-1], "hyperparams"):
            rates.append(float(state[-1].hyperparams["learning_rate"]))
    return np.asarray(w["w"]), rates


@pytest.mark.parametrize("name", OPTAX)
def test_updates_are_those_of_optax(name):
    ours, rates = walk(optimizer(name, 1e-2))
    np.testing.assert_array_equal(ours, walk(OPTAX[name](1e-2))[0])
    np.testing.assert_allclose(rates, 1e-2)


def test_weight_decay_and_clipping_are_those_of_optax():
    ours, _ = walk(optimizer("adam", 1e-2, weight_decay=0.1, clip=0.5))
    both = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1))
    np.testing.assert_array_equal(ours, walk(both)[0])
    ours, _ = walk(optimizer("lion", 1e-2, weight_decay=0.1))
    np.testing.assert_array_equal(ours, walk(optax.lion(1e-2, weight_decay=0.1))[0])
    ours, _ = walk(optimizer("sgd", 1e-2, clip=0.5))
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1e-2))
    np.testing.assert_array_equal(ours, walk(clipped)[0])


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"schedule": "linear"}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "linear", "warmup": 0.4}, [0, 0.5, 1, 2 / 3, 1 / 3]),
        ({"warmup": 2}, [0, 0.5, 1, 1, 1]),
        ({"schedule": "cosine"}, [(1 + np.cos(np.pi * i / 5)) / 2 for i in range(5)]),
        ({"schedule": "cosine", "warmup": 1}, [0, *((1 + np.cos(np.pi * np.arange(4) / 4)) / 2)]),
    ],
)
def test_schedules(settings, rates):
    _, found = walk(optimizer("sgd", 0.1, 5, **settings), steps=5)
    np.testing.assert_allclose(found, np.multiply(0.1, rates), rtol=1e-5, atol=1e-8)


def test_the_rate_is_in_history_logs_and_bar(tmp_path, capsys):
    calls = []
    result = train(
        optimizer=lambda steps: optimizer("adam", 1e-2, steps, schedule="linear"),
        epochs=2,
        on_log=[loggers.csv(tmp_path / "log.csv"), lambda step, metrics: calls.append(metrics)],
        progress=True,
    )
    expected = 1e-2 * (1 - np.arange(10) / 10)
    np.testing.assert_allclose(result.history.rates, expected, rtol=1e-5)
    assert [m["rate"] for m in calls if "epoch" not in m] == result.history.rates
    with (tmp_path / "log.csv").open() as file:
        rows = [float(row["rate"]) for row in csv.DictReader(file)]
    assert rows == [row["rate"] for row in result.history.epochs] == result.history.rates[4::5]
    assert "rate 0.001" in capsys.readouterr().out


def test_updates_are_counted_with_accumulate_and_in_a_step():
    asked = []

    def make(steps):
        asked.append(steps)
        return optax.sgd(0.1)

    assert not train(optimizer=make, epochs=2, accumulate=3).history.rates
    jaxonnx.training.step(mlp(), LABELS, make, epochs=3, steps_per_epoch=4)
    assert asked == [4, 12]


def test_more_epochs_are_another_schedule(tmp_path):
    """A cosine over ten updates is at half its rate where that over five was at zero."""
    settings = {"optimizer": "sgd", "schedule": "cosine", "checkpoint_dir": tmp_path}
    train(**settings)
    same = train(**settings, resume=True)
    assert not any("schedule" in note for note in same.history.notes)
    result = train(**settings, resume=True, epochs=2)
    (note,) = (note for note in result.history.notes if "schedule" in note)
    assert "was made for 5 updates, whose learning rate ended at 9.55e-05, and" in note
    assert "this one is for 10" in note
    rates = result.history.rates[4:6]
    np.testing.assert_allclose(rates, [9.55e-5, 5e-4], rtol=1e-3)


@pytest.mark.deep
def test_more_epochs_share_out_other_phases_of_sparsity(tmp_path):
    """The mask of one epoch is fixed behind it, that of four is still to change."""
    settings = {"sparsity": "2:4", "checkpoint_dir": tmp_path}
    train(**settings)
    result = train(**settings, resume=True, epochs=4)
    assert [row["phase"] for row in result.history.epochs] == [3, 2, 3, 3]
    (note,) = (note for note in result.history.notes if "shared out" in note)
    assert "0 dense and 1 dynamic, now 1 and 2" in note
    lengths = {"pattern": "2:4", "dense": 0, "dynamic": 1}
    settings |= {"sparsity": lengths, "checkpoint_dir": tmp_path / "lengths"}
    train(**settings)
    result = train(**settings, resume=True, epochs=4)
    assert [row["phase"] for row in result.history.epochs] == [3, 3, 3, 3]
    assert not any("shared out" in note for note in result.history.notes)


def test_a_rate_that_the_user_injects_is_seen():
    rule = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
    result = train(optimizer=optax.chain(optax.clip(1.0), rule), accumulate=2)
    np.testing.assert_allclose(result.history.rates, 0.25)
    assert str(result.history).endswith(", rate 0.25")  # once, because it is constant


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "adamm"}, "optimizer must be 'adam', "),
        ({"schedule": "cos"}, "schedule must be 'constant', 'linear' or 'cosine'"),
        ({"rate": 0}, "rate must be a finite number above 0"),
        ({"warmup": -1}, "warmup must be a finite number of at least 0"),
        ({"clip": 0.0}, "clip must be"),
        ({"weight_decay": "0.1"}, "weight_decay must be"),
        ({"schedule": "cosine"}, "'cosine' needs steps="),
        ({"warmup": 0.5}, "warmup=0.5 needs steps="),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(jaxonnx.TrainingError, match=message):
        optimizer(**settings)


def test_functions_that_are_refused():
    for wrong in (optax.adam, lambda n: optax.sgd(0.1)):
        with pytest.raises(jaxonnx.TrainingError, match="or a function of steps"):
            train(optimizer=wrong)
    unknown = {"data": lambda epoch: [examples(8)], "optimizer": lambda steps: optax.sgd(0.1)}
    with pytest.raises(jaxonnx.TrainingError, match="whose number is not known"):
        train(**unknown)


# What goes without saying, and names.


def test_labels_choose_loss_and_optimizer_as_the_command_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = examples()
    onnx.save(mlp(), "net.onnx")
    np.savez("data.npz", x=x, y=y)
    assert main(["train", "net.onnx", "data.npz", "-o", "out.onnx", "--batch-size", "8"]) == 0
    result = jaxonnx.train("net.onnx", "data.npz", batch_size=8)
    for name, value in jaxonnx.load("out.onnx").params.items():
        np.testing.assert_array_equal(result.model.params[name], value)
    assert "loss: softmax cross entropy" in result.history.notes[0]
    assert "optimizer: Adam, learning rate 0.001" in result.history.notes[1]
    assert "optimizer: Adam" in str(result)


@pytest.mark.parametrize(
    ("settings", "theirs"),
    sweep(
        [
            ({"optimizer": "sgd", "learning_rate": 0.1}, optax.sgd(0.1)),
            ({"optimizer": "adamw"}, optax.adamw(1e-3, mask=MATRICES)),
            (
                {"optimizer": "sgd", "learning_rate": 0.1, "weight_decay": 0.1, "clip": 0.5},
                optax.chain(
                    optax.clip_by_global_norm(0.5),
                    optax.add_decayed_weights(0.1, mask=MATRICES),
                    optax.sgd(0.1),
                ),
            ),
            (
                {"schedule": "linear", "warmup": 0.4, "learning_rate": 0.1},
                optax.adam(
                    optax.join_schedules(
                        [optax.linear_schedule(0, 0.1, 2), optax.linear_schedule(0.1, 0, 3)], [2]
                    )
                ),
            ),
            ({"learning_rate": 1e-2}, optax.adam(1e-2)),
            (
                {"learning_rate": optax.linear_schedule(0.1, 0.2, 3)},
                optax.adam(optax.linear_schedule(0.1, 0.2, 3)),
            ),
        ],
        *(1, 2, 3),
    ),
)
def test_optimizers_by_name_are_those_of_optax(settings, theirs):
    ours = weights(train(**{"optimizer": None} | settings))
    for name, value in weights(train(optimizer=theirs)).items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-7)
    one = step(mlp(), LABELS, **settings, epochs=1, steps_per_epoch=5)
    assert len(jax.jit(one.update)(one.init(), (examples(8)))) == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": "adamm"}, r"a name \(adam, adamw, adagrad, lion, rmsprop, sgd\)"),
        ({"learning_rate": 0.1}, "learning_rate goes with an optimizer by name"),
        (
            {"optimizer": "sgd", "learning_rate": optax.constant_schedule(0.1), "warmup": 2},
            "rate is a schedule: leave",
        ),
        ({"optimizer": "sgd", "learning_rate": -1.0}, "rate must be a finite number above"),
        ({"loss": None, "data": (examples()[0], examples()[0][:, :4])}, "loss='squared_error'"),
    ],
)
def test_what_cannot_be_chosen(settings, words):
    with pytest.raises(jaxonnx.TrainingError, match=words):
        train(**settings)


@pytest.mark.parametrize(
    "path",
    ["llm/qwen3-genai/model.onnx", "lstm.legacy.onnx", "transformer.dynamo.onnx"],
)
def test_weights_decay_that_decay_in_transformers(path):
    """By the patterns of `Trainer.get_decay_parameter_names`, where a file keeps PyTorch's names.

    Exporters number the matrices and biases of recurrent layers: the latter have two axes.
    """
    spared = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm|_norm(?:$|\.)|^onnx::LSTM_(281|305)$")
    model = jaxonnx.load(DATA / path)
    names = {name for name in model.params if not spared.search(name)}
    assert find_vectors(model) == model.params.keys() - names
    assert len(names) > 3


STACKED = """
<ir_version: 8, opset_import: ["" : 17]>
network (float[n, 6] x) => (float[n, 6] y) {
  scale0 = Gather(scale, first)
  normal0 = LayerNormalization(x, scale0)
  weight0 = Gather(weight, first)
  product0 = MatMul(normal0, weight0)
  bias0, bias1 = Split<axis = 0>(bias)
  vector0 = Squeeze(bias0, axis)
  sum0 = Add(product0, vector0)
  scale1 = Gather(scale, last)
  normal1 = LayerNormalization(sum0, scale1)
  weight1 = Gather(weight, last)
  product1 = MatMul(normal1, weight1)
  vector1 = Squeeze(bias1, axis)
  sum1 = Add(product1, vector1)
  type0 = Gather(types, first)
  y = Add(sum1, type0)
}
"""


def test_stacked_biases_and_norms_do_not_decay():
    """As in JAX's layers under `vmap`, whose scales and biases have two axes; a table stays one."""
    proto = onnx.parser.parse_model(STACKED)
    shapes = {"scale": (2, 6), "weight": (2, 6, 6), "bias": (2, 6), "types": (2, 6)}
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=shape).astype("f") for name, shape in shapes.items()}
    known = {"first": np.int64(0), "last": np.int64(1), "axis": np.array([0])}
    for name, value in {**tensors, **known}.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    model = jaxonnx.load(proto)
    assert find_vectors(model) == {"scale", "bias"}
    fresh = model.reinitialize(jax.random.key(0), ".*").params
    np.testing.assert_array_equal(fresh["scale"], np.ones((2, 6)))
    np.testing.assert_array_equal(fresh["bias"], np.zeros((2, 6)))
    assert np.std(fresh["types"]) > 0


def test_one_number_an_example_has_no_loss_by_default():
    model = jaxonnx.load(mlp()).with_head(1)
    x, _ = examples()
    with pytest.raises(jaxonnx.TrainingError, match="say which loss"):
        jaxonnx.train(model, (x, x[:, :1]))
    saved = jaxonnx.load(model.to_onnx())
    with pytest.raises(jaxonnx.TrainingError, match="pass loss=: the output 'y' has one value"):
        jaxonnx.train(saved, (x, x[:, :1]))
