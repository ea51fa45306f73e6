"""Runs that are measured in steps: their end, validations within epochs, the best of these."""

import numpy as np
import onnx
import optax
import pytest

import jaxonnx
from jaxonnx.cli import main
from jaxonnx.training import Settings
from jaxonnx.training._loop.stopping import Monitor, PatienceEnded
from tests.support.tiny_networks import examples, mlp, same, train
from tests.training.test_long_runs import batches, cut_off, steps_in

HELD_OUT = examples(16, seed=2)
EVERY_TWO = {"validation": HELD_OUT, "validate_every": 2, "ema": 0.9}


def rows(result):
    """The rows of the history, without the time that they took."""
    return [{**row, "seconds": 0} for row in result.history.epochs]


def places(result):
    return [(row["epoch"], row["step"]) for row in result.history.epochs]


def test_max_steps_ends_a_run_within_an_epoch_or_after_several():
    assert places(train(max_steps=3)) == [(1, 3)]
    assert places(train(max_steps=12)) == [(1, 5), (2, 10), (3, 12)]
    assert places(train(max_steps=10)) == [(1, 5), (2, 10)]
    assert places(train(max_steps=12, epochs=2)) == [(1, 5), (2, 10)]
    stream = train(data=lambda epoch: iter(batches(epoch)), max_steps=7)
    assert places(stream) == [(1, 5), (2, 7)]
    first = train(data=batches, epochs=2).history.losses
    np.testing.assert_array_equal(stream.history.losses, first[:7])
    assert not stream.history.stopped


def test_a_schedule_and_phases_end_with_max_steps():
    settings = {"optimizer": "sgd", "learning_rate": 0.1, "schedule": "linear"}
    expected = 0.1 * (1 - np.arange(8) / 8)
    np.testing.assert_allclose(train(max_steps=8, **settings).history.rates, expected, rtol=1e-5)
    stream = train(data=lambda epoch: iter(batches(epoch)), max_steps=8, **settings)
    np.testing.assert_allclose(stream.history.rates, expected, rtol=1e-5)
    sparse = train(max_steps=13, sparsity="2:4")
    assert sparse.history.phases == [1, 2, 3]


@pytest.mark.parametrize("after", [2, pytest.param(3, marks=pytest.mark.deep)])
def test_a_run_with_validations_within_epochs_resumes(after, tmp_path):
    settings = {**EVERY_TWO, "max_steps": 13, "patience": 20, "accumulate": 2}
    whole = train(data=batches, **settings)
    assert places(whole) == [(1, 2), (1, 4), (2, 6), (2, 8), (2, 10), (3, 12), (3, 13)]
    cut_off(after, checkpoint_dir=tmp_path, **{**settings, "max_steps": None})
    with pytest.raises(jaxonnx.TrainingError, match="pass resume=True"):
        train(data=batches, checkpoint_dir=tmp_path, **settings)
    rest = train(data=batches, checkpoint_dir=tmp_path, resume=True, **settings)
    assert same(whole, rest)
    assert rows(whole) == rows(rest)
    again = train(data=batches, checkpoint_dir=tmp_path, resume=True, **settings)
    assert same(whole, again)
    assert rows(whole) == rows(again)


def test_a_run_goes_on_from_where_max_steps_ended_it(tmp_path):
    settings = {"checkpoint_every": 2, "checkpoint_dir": tmp_path}
    train(data=batches, max_steps=7, **settings)
    assert steps_in(tmp_path)[-1] == 7
    rest = train(data=batches, max_steps=14, resume=True, **settings)
    whole = train(data=batches, max_steps=14)
    assert same(whole, rest)
    assert rest.history.losses == whole.history.losses
    with pytest.raises(jaxonnx.TrainingError, match="has validate_every=None"):
        train(data=batches, max_steps=15, resume=True, **settings, **EVERY_TWO | {"ema": None})


def test_rows_within_epochs_are_what_evaluate_says():
    result = train(validation=HELD_OUT, validate_every=3, epochs=2)
    assert places(result) == [(1, 3), (2, 6), (2, 9), (2, 10)]
    losses, each = result.history.losses, (slice(3), slice(3, 6), slice(6, 9), slice(9, 10))
    for row, part in zip(result.history.epochs, each, strict=True):
        assert row["loss"] == pytest.approx(np.mean(losses[part]), rel=1e-6)
    loss = "softmax_cross_entropy_with_integer_labels"
    wanted = jaxonnx.evaluate(result.model, HELD_OUT, loss=loss)["loss"]
    assert result.history.epochs[-1]["validation_loss"] == pytest.approx(wanted, rel=1e-5)
    assert str(result.history).startswith("2 epochs, 10 steps, ")
    assert result.history.plot().get_lines()


def test_the_initial_weights_are_validated_and_may_be_the_best():
    model = mlp()
    worse = {"optimizer": optax.sgd(-0.1), "validation": HELD_OUT, "validate_first": True}
    result = train(model, epochs=2, patience=5, **worse)
    loss = "softmax_cross_entropy_with_integer_labels"
    first, *others = result.history.epochs
    wanted = jaxonnx.evaluate(model, HELD_OUT, loss=loss)["loss"]
    assert first["validation_loss"] == pytest.approx(wanted, rel=1e-5)
    assert (first["epoch"], first["step"], "loss" in first) == (0, 0, False)
    assert all("loss" in row for row in others)
    assert (result.history.best, result.history.best_step) == (0, 0)
    for name, value in jaxonnx.load(model).params.items():
        np.testing.assert_array_equal(result.model.params[name], value)
    assert f"validation_loss {wanted:.4g} -> " in str(result.history)


def test_small_improvements_count_once_they_add_up():
    """As by Keras's `min_delta`; the best weights are those of the best value."""
    monitor = Monitor(Settings(patience=3, min_improvement=0.1), ["loss"])
    rows: list = []
    for epoch, value in enumerate([1.0, 0.95, 0.91, 0.89, 0.85, 0.84], 1):
        rows.append({"epoch": epoch, "step": epoch, "loss": value})
        monitor.record(rows)
        monitor.check()
    rows.append({"epoch": 7, "step": 7, "loss": 0.83})
    monitor.record(rows)
    with pytest.raises(PatienceEnded, match=r"0\.89 in epoch 4, and not better by 0\.1 in the 3"):
        monitor.check()
    assert monitor.best is rows[-1]
    result = train(epochs=9, patience=2, min_improvement=10.0)
    assert places(result) == [(1, 5), (2, 10), (3, 15)]
    assert same(result, train(epochs=3))


def test_the_best_checkpoints_are_kept(tmp_path):
    worse = {"optimizer": optax.sgd(-0.1), "checkpoint_dir": tmp_path, "keep_best": 2}
    result = train(**worse, **EVERY_TWO | {"ema": None}, max_steps=13)
    assert steps_in(tmp_path) == [2, 4, 10, 12, 13]
    best = jaxonnx.load(tmp_path, checkpoint="best")
    assert result.history.best_step == 2
    assert not np.array_equal(best.params["w1"], result.model.params["w1"])


def test_the_command_takes_them_all(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    x, y = examples()
    onnx.save(mlp(), "net.onnx")
    np.savez("data.npz", x=x, y=y)
    line = "train net.onnx data.npz -o out.onnx --batch-size 8 --max-steps 7 --validation 0.2"
    more = "--validate-every 3 --validate-first --patience 9 --min-improvement 0.01"
    assert main(f"{line} {more} --checkpoints kept --keep-best 2 --warmup 0.5".split()) == 0
    assert "2 epochs, 7 steps" in capsys.readouterr().out
    assert len(steps_in("kept")) > 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": 0}, "max_steps must be an integer of at least 1"),
        ({"validate_every": 2}, "validate_every needs validation data"),
        ({"validate_first": True}, "validate_first needs validation data"),
        ({"min_improvement": 0.1}, "min_improvement goes with patience="),
        ({"min_improvement": -1, "patience": 1}, "min_improvement must be a finite number"),
        ({"keep_best": 3}, "keep_best needs a checkpoint_dir"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(jaxonnx.TrainingError, match=message):
        train(**settings)
