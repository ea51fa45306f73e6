"""Checkpoints inside epochs, early stopping, averages, accumulation, NaN, Ctrl-C, full disks."""

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxonnx
from jaxonnx._io import checkpoints
from tests.support.tiny_networks import examples, mlp, same, train, weights


def steps_in(folder):
    return sorted(int(path.name) for path in Path(folder).iterdir() if path.name.isdigit())


def cut_off(after, **settings):
    """A run that an error of its data ends before batch `after` of the second epoch."""
    x, y = examples()

    def data(epoch):
        for i in range(5):
            if (epoch, i) == (1, after):
                raise ConnectionError
            rows = slice(8 * i, 8 * i + 8)
            yield x[rows], y[rows]

    with pytest.raises(ConnectionError):
        train(data=data, epochs=3, **settings)


def batches(epoch):
    x, y = examples()
    return [(x[i : i + 8], y[i : i + 8]) for i in range(0, 40, 8)]


@pytest.mark.deep
def test_a_run_resumes_inside_an_epoch(tmp_path):
    settings = {
        "checkpoint_every": 2,
        "accumulate": 3,
        "ema": 0.9,
        "patience": 9,
        "optimizer": optax.chain(optax.add_noise(0.01, 0.5, key=0), optax.adam(1e-2)),
    }
    whole = train(data=batches, epochs=3, checkpoint_dir=tmp_path / "whole", **settings)
    cut_off(4, checkpoint_dir=tmp_path / "run", **settings)
    assert steps_in(tmp_path / "run")[-1] == 8
    again = {"checkpoint_dir": tmp_path / "run", "resume": True, **settings}
    rest = train(data=batches, epochs=3, **again)
    assert same(whole, rest)
    assert rest.history.losses == whole.history.losses
    for one, other in zip(whole.history.epochs, rest.history.epochs, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.deep
def test_the_last_three_checkpoints_and_the_best_are_kept(tmp_path):
    settings = {"optimizer": optax.sgd(-0.1), "checkpoint_dir": tmp_path}  # it gets ever worse
    train(epochs=5, **settings)
    assert steps_in(tmp_path) == [5, 15, 20, 25]
    train(epochs=7, **settings, resume=True)
    assert steps_in(tmp_path) == [5, 25, 30, 35]
    train(epochs=7, checkpoint_dir=tmp_path / "steps", checkpoint_every=4)
    assert steps_in(tmp_path / "steps") == [30, 32, 35]


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path):
    whole = train(epochs=3)
    train(epochs=2, checkpoint_dir=tmp_path / "run")
    files = "metrics/metrics", "about/metadata", "leaves/_METADATA", "leaves/d/*", "leaves/*.ocdbt"
    for number, where in enumerate(files):
        folder = shutil.copytree(tmp_path / "run", tmp_path / str(number))
        (file,) = (folder / "10").glob(where)
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        with pytest.warns(UserWarning, match="of step 10 .* cannot be read .* the previous one"):
            rest = train(epochs=3, checkpoint_dir=folder, resume=True)
        assert same(whole, rest), where
        assert steps_in(folder) == [5, 10, 15]
        assert (folder / "unreadable.10").is_dir()


def test_numbers_that_changed_on_disk_are_noticed(tmp_path, monkeypatch):
    train(epochs=2, checkpoint_dir=tmp_path)
    crc = checkpoints.crc
    reads = itertools.count()
    monkeypatch.setattr(checkpoints, "crc", lambda x: crc(x) + (next(reads) == 0))
    with pytest.warns(UserWarning, match="a checksum differs"):
        rest = train(epochs=3, checkpoint_dir=tmp_path, resume=True)
    assert same(train(epochs=3), rest)


def test_without_a_readable_checkpoint_nothing_starts_anew(tmp_path):
    train(epochs=1, checkpoint_dir=tmp_path)
    (tmp_path / "5" / "about" / "metadata").write_text("{")
    with (
        pytest.warns(UserWarning, match="cannot be read"),
        pytest.raises(jaxonnx.TrainingError, match="no checkpoint in"),
    ):
        train(epochs=2, checkpoint_dir=tmp_path, resume=True)


@pytest.mark.deep
def test_another_run_does_not_resume(tmp_path):
    train(checkpoint_dir=tmp_path)
    for changed, message in (
        ({"seed": 1}, "has seed=0, and seed=1 would not continue it"),
        ({"batch_size": 4}, "has batch_size=8"),
        ({"ema": 0.5}, "has ema=None"),
        ({"optimizer": optax.sgd(0.1)}, "of another run"),
    ):
        with pytest.raises(jaxonnx.TrainingError, match=message):
            train(epochs=2, checkpoint_dir=tmp_path, resume=True, **changed)
    assert same(train(epochs=2), train(epochs=2, checkpoint_dir=tmp_path, resume=True))


def test_a_finished_run_resumes_to_its_result(tmp_path):
    settings = {"epochs": 2, "checkpoint_dir": tmp_path, "resume": True}
    assert same(train(**settings), train(**settings))


@pytest.mark.deep
def test_the_best_of_a_resumed_run_is_kept_on(tmp_path):
    settings = {
        "checkpoint_dir": tmp_path,
        "validation": examples(16),
        "patience": 100,
        "optimizer": optax.sgd(-0.05),  # every epoch is worse than the first
    }
    train(epochs=2, **settings)
    result = train(epochs=4, resume=True, **settings)
    assert result.history.best == 1
    first = train(epochs=1, **{**settings, "checkpoint_dir": None})
    assert same(result, first)


def test_a_run_without_patience_has_no_best_weights(tmp_path):
    settings = {"validation": examples(16), "checkpoint_dir": tmp_path}
    train(epochs=1, **settings)
    with pytest.raises(jaxonnx.TrainingError, match="has patience=None, and patience=2 would not"):
        train(epochs=2, resume=True, patience=2, **settings)
    settings = {"validation": examples(16), "checkpoint_dir": tmp_path / "patient", "patience": 2}
    train(epochs=1, **settings)
    with pytest.raises(jaxonnx.TrainingError, match="has patience=2, and patience=None would not"):
        train(epochs=2, resume=True, **{**settings, "patience": None})
    assert len(train(epochs=2, resume=True, **{**settings, "patience": 5}).history.epochs) == 2


def test_a_monitor_that_is_never_a_number_is_reported():
    def share(outputs, targets):
        chosen = outputs.argmax(1) == 99
        return (chosen & (targets == 99)).sum() / chosen.sum()

    settings = {"metrics": share, "monitor": ("validation_share", "max"), "patience": 1}
    with pytest.warns(UserWarning, match="validation_share, .* was NaN in all of 3 rows"):
        result = train(epochs=3, validation=examples(16), **settings)
    assert result.history.stopped is None
    assert "no epoch is the best" in result.history.notes[-1]


def test_patience_gives_the_best_epoch(tmp_path):
    # the labels of validation are shuffled: it gets worse the better the training goes
    x, y = examples(16, seed=2)
    settings = {
        "validation": (x, np.roll(y, 1)),
        "optimizer": optax.adam(0.1),
        "epochs": 30,
        "patience": 3,
    }
    result = train(**settings)
    rows = result.history.epochs
    values = [row["validation_loss"] for row in rows]
    best = int(np.argmin(values))
    assert len(rows) == best + 4 < 30
    assert result.history.early
    assert f"the weights are those of epoch {best + 1}, the best" in result.history.stopped
    found = optax.softmax_cross_entropy_with_integer_labels(result.model(x), np.roll(y, 1)).mean()
    np.testing.assert_allclose(found, values[best], rtol=1e-5)
    # resumed it has spent its patience already
    kept = train(**settings, checkpoint_dir=tmp_path)
    again = train(**settings, checkpoint_dir=tmp_path, resume=True)
    assert same(kept, again)
    assert again.history.stopped == kept.history.stopped
    assert len(again.history.epochs) == len(rows)


def test_monitor_knows_which_way():
    def rows(name, direction, **settings):
        monitored = {"monitor": (name, direction) if direction else name, "patience": 1}
        still = {"optimizer": optax.sgd(0.0), "epochs": 4, "validation": examples()}
        return len(train(**still, **monitored, **settings).history.epochs)

    # nothing changes, so nothing becomes better
    assert rows("validation_loss", None) == rows("validation_accuracy", None) == 2
    assert rows("validation_accuracy", "max") == 2

    def surprise(outputs, targets):
        return jnp.exp(optax.softmax_cross_entropy_with_integer_labels(outputs, targets))

    with pytest.raises(jaxonnx.TrainingError, match="whether smaller is better"):
        rows("validation_surprise", None, metrics=surprise)
    assert rows("validation_surprise", "min", metrics=surprise) == 2


@pytest.mark.deep
def test_accumulated_batches_are_one_large_batch():
    order = {"data": lambda epoch: batches(0)[:4], "optimizer": optax.adam(1e-2)}
    small = train(**order, epochs=4, accumulate=4)
    x, y = examples()
    large = train(data=lambda epoch: [(x[:32], y[:32])], optimizer=optax.adam(1e-2), epochs=4)
    for name, value in weights(large).items():
        np.testing.assert_allclose(weights(small)[name], value, rtol=1e-4, atol=1e-6)
    assert len(small.history.losses) == 16


@pytest.mark.deep
def test_accumulation_leaves_the_phases_whole_epochs():
    result = train(epochs=6, accumulate=2, sparsity="2:4")
    assert [row["phase"] for row in result.history.epochs] == [1, 2, 2, 2, 3, 3]
    for name in ("w1", "w2"):
        found = weights(result)[name]
        assert (np.count_nonzero(found.reshape(-1, 4), 1) <= 2).all()


@pytest.mark.deep
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_average_is_what_is_validated_and_given(accumulate):
    kept = 0.8
    seen = []

    def remember():
        def update(updates, state, params=None):
            jax.debug.callback(lambda x: seen.append(np.array(x)), params["b2"], ordered=True)
            return updates, state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update)

    data = examples(32)
    result = train(
        data=data,
        epochs=2,
        ema=kept,
        accumulate=accumulate,
        validation=data,
        optimizer=optax.chain(remember(), optax.sgd(0.1)),
    )
    plain = train(data=data, epochs=2, accumulate=accumulate, optimizer=optax.sgd(0.1))
    jax.effects_barrier()
    trail = [*seen[1:], weights(plain)["b2"]]
    average = seen[0]
    for params in trail[accumulate - 1 :: accumulate]:
        average = kept * average + (1 - kept) * params
    np.testing.assert_allclose(weights(result)["b2"], average, rtol=1e-5)
    loss = optax.softmax_cross_entropy_with_integer_labels(result.model(data[0]), data[1]).mean()
    np.testing.assert_allclose(result.history.epochs[-1]["validation_loss"], loss, rtol=1e-5)


@pytest.mark.deep
def test_averages_of_sparse_weights_are_sparse():
    result = train(epochs=4, ema=0.9, sparsity={"dense": 1, "dynamic": 2})
    assert result.model.sparsity is not None
    for name in ("w1", "w2"):
        found = weights(result)[name]
        assert (np.count_nonzero(found.reshape(-1, 4), 1) <= 2).all()
        assert (np.count_nonzero(found.T.reshape(-1, 4), 1) <= 2).all()


def bad_at(*places):
    """Batches in which an epoch's examples with these numbers are NaN."""

    def data(epoch):
        found = batches(epoch)
        for where in places:
            if where[0] == epoch:
                x, y = found[where[1]]
                found[where[1]] = (np.where(np.arange(8)[:, None] == 2, np.nan, x), y)
        return [(x.astype(np.float32), y) for x, y in found]

    return data


def test_a_step_that_is_not_finite_is_skipped():
    result = train(data=bad_at((0, 1), (1, 3)), epochs=3, nan="skip")
    assert [(e["step"], e["event"]) for e in result.history.events] == [
        (2, "skipped"),
        (9, "skipped"),
    ]
    assert result.history.stopped is None
    assert len(result.history.losses) == 15
    assert np.isfinite(result.history.epochs[0]["loss"])
    without = train(
        data=lambda epoch: [
            b for i, b in enumerate(batches(0)) if (epoch, i) not in {(0, 1), (1, 3)}
        ],
        epochs=3,
    )
    assert same(result, without)
    assert "2 times skipped" in str(result)
    json.dumps(result.history.events)


def test_a_run_that_is_never_finite_stops():
    everywhere = bad_at(*itertools.product(range(9), range(5)))
    with pytest.warns(UserWarning, match="nan, is not finite in 10 steps one after the other"):
        result = train(data=everywhere, epochs=9, nan="skip")
    assert len(result.history.losses) == 10
    with pytest.warns(UserWarning, match="after 3 returns to the weights of step"):
        result = train(data=everywhere, epochs=9, nan="rollback")
    assert [e["event"] for e in result.history.events] == ["rolled back"] * 3
    for name, value in jaxonnx.load(mlp()).params.items():
        np.testing.assert_array_equal(weights(result)[name], value)


def test_rollback_takes_the_weights_of_the_last_epoch():
    result = train(data=bad_at((1, 4)), epochs=2, nan="rollback")
    assert result.history.events == [
        {"step": 10, "event": "rolled back", "why": "the loss, nan, is not finite", "to": 5}
    ]
    assert same(result, train(data=batches, epochs=1))


@pytest.mark.deep
def test_rollback_resumes_like_the_uninterrupted_run(tmp_path):
    settings = {"nan": "rollback", "checkpoint_every": 2, "epochs": 3}
    bad = bad_at((1, 1), (2, 3))
    whole = train(data=bad, **settings, checkpoint_dir=tmp_path / "whole")
    assert len(whole.history.events) == 2
    train(data=bad, **(settings | {"epochs": 1}), checkpoint_dir=tmp_path / "run")
    rest = train(data=bad, **settings, checkpoint_dir=tmp_path / "run", resume=True)
    assert same(whole, rest)
    assert whole.history.events == rest.history.events


def interrupting(step):
    """A hook that presses Ctrl-C once that step is told."""

    def press(now, metrics):
        if now == step and "epoch" not in metrics:
            signal.raise_signal(signal.SIGINT)

    return press


@pytest.fixture
def listening():
    """Ctrl-C does what it does in a terminal, also where tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.deep
@pytest.mark.usefixtures("listening")
def test_ctrl_c_gives_the_result_and_a_checkpoint(tmp_path):
    settings = {"epochs": 6, "checkpoint_dir": tmp_path}
    with pytest.warns(UserWarning, match="interrupted; the weights are those of step") as caught:
        result = train(**settings, on_log=interrupting(4))
    done = len(result.history.losses)
    assert 4 <= done < 20
    assert f"the last checkpoint is that of step {done} in '{tmp_path}'" in str(caught[0].message)
    assert same(train(**settings, resume=True), train(epochs=6))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.warns(UserWarning, match="interrupted; the weights are those of step"):
        train(epochs=6, on_log=interrupting(4))


def test_a_keyboard_interrupt_of_the_data_gives_the_result():
    def data(epoch):
        yield from batches(0)[:3]
        raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="interrupted at once; the weights are those of step 3"):
        result = train(data=data)
    assert same(result, train(data=lambda epoch: batches(0)[:3]))


@pytest.mark.usefixtures("listening")
def test_ctrl_c_again_while_hooks_are_told_of_the_last_steps_gives_the_result():
    def data(epoch):
        yield from batches(0)[:2]
        signal.raise_signal(signal.SIGINT)
        yield from batches(0)[2:]

    def again(step, metrics):
        signal.raise_signal(signal.SIGINT)

    with pytest.warns(UserWarning, match="interrupted at once; the weights are those of step 3"):
        result = train(data=data, on_log=again)
    assert same(result, train(data=lambda epoch: batches(0)[:3]))


def full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.deep
def test_a_full_disk_leaves_the_result_and_the_last_checkpoint(tmp_path, monkeypatch):
    from orbax.checkpoint import CheckpointManager

    save = CheckpointManager.save
    monkeypatch.setattr(
        CheckpointManager,
        "save",
        lambda self, step, **given: full() if step > 5 else save(self, step, **given),
    )
    message = "step 10 .No space left on device.; the weights are those of step 10; .* step 5 in"
    with pytest.warns(UserWarning, match=message):
        result = train(epochs=6, checkpoint_dir=tmp_path)
    assert same(result, train(epochs=2))
    monkeypatch.setattr(CheckpointManager, "save", save)
    assert same(train(epochs=6, checkpoint_dir=tmp_path, resume=True), train(epochs=6))


LIMITED = """
import resource, sys, warnings
from tests.support.tiny_networks import train
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
warnings.simplefilter("ignore")
print(train(epochs=6, checkpoint_dir=sys.argv[1]).history.stopped)
"""


@pytest.mark.deep
def test_files_that_cannot_grow_end_the_run(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert "a checkpoint could not be written at step" in done.stdout, done.stderr
    assert os.strerror(errno.EFBIG) in done.stdout
    assert "ERROR:absl" not in done.stderr  # which Orbax logs with tracebacks
    assert f"there is no checkpoint in '{tmp_path}'" in done.stdout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accumulate": 0}, "accumulate must be an integer of at least 1, got 0"),
        ({"accumulate": 2.0}, "accumulate must be an integer"),
        ({"ema": 1}, "between 0 and 1, like 0.999, got 1"),
        ({"ema": 99.9}, "got 99.9"),
        ({"nan": "ignore"}, "nan must be 'stop', 'skip' or 'rollback', got 'ignore'"),
        ({"precision": "fp8"}, "precision must be 'bf16', 'fp16' or None, got 'fp8'"),
        ({"patience": 0}, "patience must be an integer of at least 1"),
        ({"monitor": "loss"}, "neither is given"),
        (
            {"monitor": "validation_loss", "patience": 1},
            "available: loss; pass validation= for validation metrics",
        ),
        # what is no metric of the run needs no direction
        ({"monitor": "validation_acc", "patience": 1}, "'validation_acc' is not a metric of this"),
        ({"monitor": ("acc", "max"), "patience": 1}, "'acc' is not a metric of this run"),
        ({"monitor": 3, "patience": 1}, "monitor must be a name"),
        ({"monitor": ("loss", "least"), "patience": 1}, "monitor must be a name"),
        ({"checkpoint_every": 3}, "needs a checkpoint_dir"),
        ({"checkpoint_every": 0, "checkpoint_dir": "x"}, "checkpoint_every must be an integer"),
        ({"checkpoint_dir": 3}, "checkpoint_dir must be the path of a folder, got 3"),
        (
            {"resume": "yes", "checkpoint_dir": "x"},
            "resume must be True or False or .anyway. .*, got 'yes'",
        ),
        ({"progress": "bar"}, "progress must be True or False"),
        ({"on_log": "log.csv"}, "on_log must be a function .* got 'log.csv'"),
        ({"on_log": [print, 3]}, "on_log must be a function .* got .* 3]"),
        ({"optimizer": "adamm"}, "adam, .* got 'adamm'"),
        ({"optimizer": optax.adam}, "optax transformation, like .* got a value of type function"),
        ({"epochs": 1.5}, "epochs must be an integer of at least 1, got 1.5"),
        ({"epochs": True}, "epochs must be an integer"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"seed": "0"}, "seed must be an integer"),
    ],
)
def test_bad_settings(settings, message, monkeypatch):
    monkeypatch.setattr(jax, "jit", lambda *_, **__: pytest.fail("compiled"))
    with pytest.raises(jaxonnx.TrainingError, match=message):
        train(jaxonnx.load(mlp()), **settings)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(jaxonnx.TrainingError, match=r"cannot be written \(Not a directory\)"):
        train(checkpoint_dir=tmp_path / "file" / "run")


def test_refused_data_closes_the_checkpoints(tmp_path):
    from orbax.checkpoint import CheckpointManager

    closed = []
    close = CheckpointManager.close
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointManager, "close", lambda self: (closed.append(1), close(self)))
        with pytest.raises(jaxonnx.TrainingError, match="labels"):
            train(data=(examples()[0], examples()[1] + 9), checkpoint_dir=tmp_path)
    assert closed


@pytest.mark.deep
def test_what_is_not_trained_is_not_stored_but_compared(tmp_path):
    settings = {"trainable": ["w2", "b2"], "checkpoint_dir": tmp_path, "resume": True}
    train(epochs=1, **settings)
    told = json.loads((tmp_path / "5" / "about" / "metadata").read_text())
    told = json.loads(told["about"])
    assert [line.partition(" ")[0] for line in told["fixed"]] == ["w1", "b1"]
    assert not any("w1" in line for line in told["leaves"])
    rest = train(epochs=2, **settings)
    assert same(rest, train(epochs=2, trainable=["w2", "b2"]))
    np.testing.assert_array_equal(rest.model.state["w1"], jaxonnx.load(mlp()).params["w1"])
    other = jaxonnx.load(mlp())
    other = other.replace(params=other.params | {"w1": other.params["w1"] + 1})
    with pytest.raises(jaxonnx.TrainingError, match="of another run"):
        train(other, epochs=2, **settings)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"class_weights": {1: 3.0}}, r"class_weights=\{'1': 2\.0\}, and class_weights=\{'1': 3"),
        ({"dropout": {"h": 0.5}}, r"dropout=\{'h': 0\.25\}, and dropout=\{'h': 0\.5\} would not"),
        ({"dropout": None}, r"dropout=\{'h': 0\.25\}, and dropout=None would not"),
        ({"statistics": "frozen"}, "statistics=None, and statistics=frozen would not"),
    ],
)
def test_a_resumed_run_has_the_weights_of_classes_dropout_and_statistics(
    changed, message, tmp_path
):
    """They change each step and none of the arrays that a checkpoint compares."""
    settings = {"class_weights": {1: 2.0}, "dropout": {"h": 0.25}, "checkpoint_dir": tmp_path}
    train(**settings)
    with pytest.raises(jaxonnx.TrainingError, match=message):
        train(epochs=2, resume=True, **settings | changed)
    assert train(epochs=2, resume=True, **settings).history.epochs[-1]["epoch"] == 2
