"""jaxonnx.train: one compile, statistics, and what it refuses."""

import dataclasses
import json
from functools import partial

import jax.numpy as jnp
import numpy as np
import onnxruntime
import optax
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxonnx
from tests.support.paths import DATA
from tests.support.tiny_networks import examples, mlp

LABELS = "softmax_cross_entropy_with_integer_labels"


@pytest.fixture(scope="module")
def net():
    return jaxonnx.load(DATA / "lenet_bn.legacy.onnx")


@pytest.fixture(scope="module")
def small():
    """For what has nothing to do with the network: XLA compiles it in a moment, and keeps it."""
    return jaxonnx.load(mlp())


def digits(count, seed=0):
    random = np.random.default_rng(seed)
    x = random.random((count, 1, 28, 28), np.float32)
    return x, random.integers(0, 10, count)


def train(model, data, **settings):
    settings = {"loss": LABELS, "optimizer": optax.sgd(0.05), "batch_size": 8} | settings
    return jaxonnx.train(model, data, **settings)


@pytest.mark.deep
def test_running_statistics_are_renewed_and_exported(net, tmp_path):
    x, y = digits(16)
    result = train(net, (x, y), epochs=2)
    assert {*result.model.state} == {*net.state}
    for name, before in net.state.items():
        assert not np.allclose(before, result.model.state[name])
    path = tmp_path / "trained.onnx"
    result.model.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x})
    np.testing.assert_allclose(found, result.model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.deep
def test_the_model_given_is_not_changed(net):
    before = {k: np.array(v) for k, v in {**net.params, **net.state}.items()}
    train(net, digits(16))
    for name, value in {**net.params, **net.state}.items():
        np.testing.assert_array_equal(before[name], value)


def test_short_batches_are_not_compiled_again(small):
    traced = []

    def loss(outputs, targets):
        traced.append(outputs.shape)
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets)

    result = train(small, examples(19), loss=loss, epochs=3, validation=examples(5))
    assert len(result.history.losses) == 9
    assert traced == [(8, 4)] * 5  # three checks of shapes, the step, the validation


@pytest.mark.deep
def test_the_fill_of_a_short_batch_does_not_count():
    net = jaxonnx.load(DATA / "lenet.legacy.onnx")
    x, y = digits(11)
    batches = [(x[:8], y[:8]), (x[8:], y[8:])]
    result = train(net, batches, batch_size=None, optimizer=optax.sgd(0.0))
    expected = [
        optax.softmax_cross_entropy_with_integer_labels(net(a), b).mean() for a, b in batches
    ]
    np.testing.assert_allclose(result.history.losses, expected, rtol=1e-5)


def fixed(batch: int):
    """The network of `mlp` for batches of one size."""
    proto = mlp()
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = batch
    return proto


def scalar(outputs, targets):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()


def in_a_loop(net, data, metrics, **settings):
    """The weights and the sums of validation of a loop of one's own."""
    x, y = data
    one = jaxonnx.training.step(net, optimizer=optax.sgd(0.5), metrics=metrics, **settings)
    update, evaluate = one.jit()
    state, sums = one.init(), one.sums((x[:8], y[:8]))
    for first in (0, 8, 16):
        rows = np.arange(first, first + 8)
        batch = jaxonnx.training.Batch((x[rows % 21],), y[rows % 21], np.float32(rows < 21))
        batch = one.drop_fill(batch)
        sums = evaluate(sums, state, batch)
        state, _ = update(state, batch)
    return one.view(state), one.row(sums)


FILLED = {
    "arrays": (mlp, {}),
    "a file with a fixed batch": (partial(fixed, 8), {}),
    "accumulated": (mlp, {"accumulate": 2}),
    "a stream": (mlp, {"batch_size": None}),
}
DEEP = {"examples of weight 0": (mlp, {"weights": np.arange(21) % 3 > 0})}


@pytest.mark.parametrize(
    "case", [*FILLED, *(pytest.param(x, marks=pytest.mark.deep) for x in DEEP)]
)
def test_a_scalar_mean_is_that_of_the_examples_that_count(case):
    """It was the mean of all, with those that fill the last batch."""
    network, settings = (FILLED | DEEP)[case]
    settings = {
        "optimizer": optax.sgd(0.5),
        "batch_size": 8,
        "epochs": 2,
        **settings,
    }
    x, y = examples(21)
    weights = settings.pop("weights", np.ones(21)).astype(np.float32)
    data = (x, y, weights)
    if settings["batch_size"] is None:
        data = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 21, 8)]
    results = []
    for loss in (LABELS, scalar):
        result = jaxonnx.train(network(), data, validation=(x, y, weights), loss=loss, **settings)
        row = jaxonnx.evaluate(network(), (x, y, weights), loss=loss, batch_size=8)
        results.append((result.model.params, result.history.losses, result.history.epochs, row))
    (params, losses, rows, row), (*now, now_row) = results
    for name, expected in params.items():
        np.testing.assert_allclose(now[0][name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(now[1], losses, rtol=1e-5)
    for name in ("loss", "validation_loss"):
        np.testing.assert_allclose([r[name] for r in now[2]], [r[name] for r in rows], rtol=1e-5)
    assert now_row["loss"] == pytest.approx(row["loss"], rel=1e-5)


@pytest.mark.deep
@pytest.mark.parametrize("network", [mlp, partial(fixed, 8)], ids=["open", "fixed"])
def test_a_scalar_in_a_loop_of_ones_own(network):
    data = examples(21)
    (params, row), (others, other) = (
        in_a_loop(network(), data, [accuracy], loss=loss) for loss in (LABELS, scalar)
    )
    for name, expected in params.items():
        np.testing.assert_allclose(others[name], expected, rtol=1e-5, atol=1e-6)
    assert other == pytest.approx(row, rel=1e-5)


def accuracy(outputs, targets):
    return (outputs.argmax(-1) == targets).mean()


def test_a_scalar_of_a_batch_with_fill_is_not_a_number():
    x, y = examples(8)
    one = jaxonnx.training.step(mlp(), scalar, optax.sgd(0.5))
    _, (value, finite) = one.update(one.init(), (x, y, np.float32([1] * 5 + [0] * 3)))
    assert (np.isnan(value), finite) == (True, 0)
    _, (_, finite) = one.update(one.init(), (x, y, np.full(8, 2, np.float32)))
    assert finite


def test_examples_of_weight_0_within_a_batch_of_fixed_size_are_refused():
    x, y = examples(16)
    weight = np.float32([1, 0] * 8)
    with pytest.raises(jaxonnx.TrainingError, match="or leave these examples out of the data"):
        jaxonnx.train(fixed(8), (x, y, weight), loss=scalar, batch_size=8)


def test_inputs_by_name_and_targets_in_lists(small):
    x, y = examples(16)
    plain = train(small, (x, y)).history.losses
    assert train(small, ({"x": x}, y.tolist())).history.losses == plain
    assert train(small, ((x,), y)).history.losses == plain


@pytest.mark.deep
def test_order_depends_on_seed_and_epoch_only(net):
    def losses(seed):
        settings = {"optimizer": optax.sgd(0.0), "epochs": 2, "seed": seed}
        return train(net, digits(24), **settings).history.losses

    one, same, other = map(losses, (1, 1, 2))
    assert one == same
    assert one != other
    assert one[:3] != one[3:]


def test_seeds_have_64_bits(small):
    """JAX reads 32 of them."""
    x, y = examples(8)
    settings = {"optimizer": optax.sgd(0.0), "head": 4, "epochs": 1}
    losses = [
        train(small, (x, y % 4), seed=seed, **settings).history.losses[0] for seed in (1, 2**32 + 1)
    ]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def test_validation_and_history(small):
    data = examples(16)
    result = train(small, data, epochs=2, validation=data)
    last = result.history.epochs[-1]
    assert (last["epoch"], last["step"]) == (2, 4)
    logits = result.model(data[0])
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, data[1]).mean()
    np.testing.assert_allclose(last["validation_loss"], expected, rtol=1e-5)
    accuracy = (logits.argmax(-1) == data[1]).mean()
    np.testing.assert_allclose(last["validation_accuracy"], accuracy, rtol=1e-6)
    assert json.loads(json.dumps(dataclasses.asdict(result.history)))["losses"]
    result.history.plot()


def test_a_result_says_what_changed(net):
    result = train(net, digits(16), trainable=[r"classifier\.4\..*"])
    assert repr(result) == str(result)  # the end of a cell shows it
    assert "2 of 2 trained tensors changed (250 parameters)" in str(result)
    assert "4 running statistics updated" in str(result)


def test_trainable_freezes_the_rest(net):
    chosen = {"features.0.weight", *(name for name in net.params if "classifier" in name)}
    model = train(net, digits(8), trainable=["classifier\\..*", "features.0.weight"]).model
    assert {*model.params} == chosen
    for name, before in net.params.items():
        after = {**model.params, **model.state}[name]
        assert np.array_equal(before, after) == (name not in chosen)
    kernels = train(net, digits(8), trainable=lambda name, value: value.ndim == 4).model
    assert {*kernels.params} == {"features.0.weight", "features.4.weight"}


def test_sparse(net):
    result = train(net, digits(24), epochs=6, sparsity="2:4")
    weight = np.asarray(result.model.params["classifier.0.weight"])
    for axis in (weight, weight.T):
        assert ((axis.reshape(-1, 4) != 0).sum(1) <= 2).all()
    rows = result.history.epochs
    assert [row["phase"] for row in rows] == [1, 2, 2, 2, 3, 3]
    assert rows[0]["sparsity"] == 0
    assert all(row["sparsity"] == 0.5 for row in rows[1:])
    assert 0.6 < rows[1]["kept"] < 1
    layers = [layer.name for layer in result.model.sparsity.layers]
    assert rows[1]["flip_rate/classifier.0.weight"] == 0  # there was no mask before
    assert {name for name in rows[2] if "/" in name} == {f"flip_rate/{name}" for name in layers}
    rates = [rows[2][f"flip_rate/{name}"] for name in layers]
    assert min(rates) <= rows[2]["flip_rate"] <= max(rates)
    with pytest.raises(jaxonnx.TrainingError, match="number of batches"):
        train(net, iter([]), batch_size=None, sparsity="2:4")


def test_only_factors_of_dense_products_become_sparse():
    def sparse_and_dense(name):
        model = jaxonnx.load(DATA / f"{name}.legacy.onnx")
        layers = jaxonnx.sparse.layers(model.params, **model.sparsity_options())
        return {x.name: x.axes for x in layers if x.axes}, {x.name: x.reason for x in layers}

    recurrent, reasons = sparse_and_dense("lstm")
    assert {*recurrent.values()} == {(1, 2)}
    assert len(recurrent) == 4
    assert "Gather" in reasons["embedding.weight"]
    _, reasons = sparse_and_dense("mobilenet")
    assert reasons["features.3.conv.3.weight"] == "a grouped convolution"
    assert reasons["features.3.conv.0.weight"] == ""


def test_progress_is_shown_on_request_only(small, capsys, monkeypatch):
    """Of a run that takes seconds; a long one, or a loaded machine, gives a line now and then."""
    monkeypatch.setattr("jaxonnx.training._loop.reporter._SECONDS_OF_LINES", np.inf)
    train(small, examples(8))
    assert not capsys.readouterr().out
    train(small, examples(8), progress=True)
    assert "epoch 1/1" in capsys.readouterr().out


@pytest.mark.parametrize("bad", [np.nan, pytest.param(np.inf, marks=pytest.mark.deep)])
def test_a_loss_that_is_not_finite_stops_at_the_last_good_weights(net, bad):
    x, y = digits(8 * 20)
    x[8 * 5] = bad
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, len(x), 8)]
    settings = {"batch_size": None, "statistics": "batch"}  # the averages at the last good step
    with pytest.warns(UserWarning, match="nan, is not finite at step 6"):
        result = train(net, batches, **settings)
    assert len(result.history.losses) == 6
    assert "at step 6" in result.history.stopped
    good = train(net, batches[:5], **settings)
    for name, value in {**good.model.params, **good.model.state}.items():
        np.testing.assert_array_equal({**result.model.params, **result.model.state}[name], value)


@pytest.mark.deep
def test_a_gradient_that_is_not_finite_stops_as_well(net):
    with pytest.warns(UserWarning, match="the gradient or the update is not finite at step 1"):
        result = train(net, digits(8), loss=lambda outputs, targets: jnp.sqrt(outputs * 0).sum(1))
    for name, value in net.params.items():
        np.testing.assert_array_equal(result.model.params[name], value)


@pytest.mark.deep
def test_a_resumed_run_is_the_uninterrupted_one(net, tmp_path):
    settings = {"optimizer": optax.adam(1e-3), "sparsity": {"dense": 1}}
    whole = train(net, digits(20), epochs=3, **settings)
    train(net, digits(20), epochs=2, checkpoint_dir=tmp_path, **settings)
    with pytest.raises(jaxonnx.TrainingError, match="pass resume=True"):
        train(net, digits(20), epochs=3, checkpoint_dir=tmp_path, **settings)
    rest = train(net, digits(20), epochs=3, checkpoint_dir=tmp_path, resume=True, **settings)
    assert rest.history.losses == whole.history.losses
    assert [row["epoch"] for row in rest.history.epochs] == [1, 2, 3]
    for kind in ("params", "state"):
        for name, value in getattr(whole.model, kind).items():
            np.testing.assert_array_equal(value, getattr(rest.model, kind)[name])
    with pytest.raises(jaxonnx.TrainingError, match=r"has sparsity=.* would not continue it"):
        train(net, digits(20), checkpoint_dir=tmp_path, resume=True)


def broken_batches():
    x, y = digits(16)
    yield x[:8], y[:8]
    yield x[8:, :, :14], y[8:]


X, Y = digits(16)
BAD = {
    "lengths": ((X, Y[:-1]), {}, "input 'x' 16, the targets 15"),
    "empty": ((X[:0], Y[:0]), {}, "no examples"),
    "label": ((X, np.where(np.arange(16) == 3, 10, Y)), {}, r"0 \.\.\. 9, the first is 10 at 3"),
    "negative label": ((X, Y - 20), {}, "16 labels"),
    "float labels": ((X, Y.astype(np.float32)), {}, "integer labels"),
    "one-hot": ((X, np.eye(10)[Y].astype(int)), {}, r"targets of shape \(8,\)"),
    "rank": ((X[:, 0], Y), {}, "input x: .* rank 4"),
    "name": (({"images": X}, Y), {}, "images"),
    "number": (((X, X), Y), {}, "2 inputs"),
    "loss": ((X, Y), {"loss": "softmax_crossentropy"}, "softmax_cross_entropy"),
    "shape of the loss": ((X, Y), {"loss": lambda o, t: o.T}, "8 examples"),
    "batch size": ((X, Y), {"batch_size": 0}, "batch_size"),
    "batch size of batches": ([(X, Y)], {}, "batches have their own size"),
    "epochs": ((X, Y), {"epochs": 0}, "epochs"),
    "trainable": ((X, Y), {"trainable": "conv9"}, "'conv9' matches no"),
    "nothing to train": ((X, Y), {"trainable": lambda name, value: False}, "no parameter"),
    "iterator": (iter([(X, Y)]), {"epochs": 2, "batch_size": None}, "an iterator serves one epoch"),
    "batch": (broken_batches(), {"batch_size": None}, "batch 2 of data in epoch 1"),
    "checkpoints": ((X, Y), {"checkpoint_dir": "/dev/null/run"}, "cannot be written"),
    "nothing to resume": ((X, Y), {"resume": True}, "checkpoint_dir"),
    "no data": (3, {}, "pair"),
    "no file": ("digits.npz", {}, "cannot be read"),
    "validation": ((X, Y), {"validation": (X, Y + 5)}, "validation"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(net, case):
    data, settings, message = BAD[case]
    with pytest.raises(jaxonnx.Error, match=message):
        train(net, data, **settings)


@pytest.mark.deep
def test_dropout_drops_in_training_only():
    nodes = [
        helper.make_node("Dropout", ["x"], ["kept"]),
        helper.make_node("MatMul", ["kept", "w"], ["y"]),
    ]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])
        for name, size in (("x", 64), ("y", 1))
    ]
    w = numpy_helper.from_array(np.full((64, 1), 1 / 64, np.float32), "w")
    graph = helper.make_graph(nodes, "dropout", values[:1], values[1:], [w])
    net = jaxonnx.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    ones = np.ones((8, 64), np.float32), np.ones((8, 1), np.float32)

    def run(seed):
        still = {"loss": "squared_error", "optimizer": optax.sgd(0.0), "seed": seed}
        return train(net, ones, epochs=3, validation=ones, **still).history

    losses = run(0).losses
    assert len(set(losses)) == 3
    assert min(losses) > 1e-3
    assert losses == run(0).losses != run(1).losses
    assert all(row["validation_loss"] < 1e-6 for row in run(0).epochs)


@pytest.mark.parametrize(
    ("limits", "rows", "steps"),
    [({"max_steps": 100}, 1, 3), ({"steps_per_epoch": 2, "epochs": 5}, 1, 3)],
    ids=["max_steps", "steps_per_epoch"],
)
def test_an_iterator_that_ends_before_the_run_leaves_a_trained_model(net, limits, rows, steps):
    batches = [(X, Y), (X[::-1], Y[::-1]), (X, Y)]
    with pytest.warns(UserWarning, match="an iterator serves one epoch"):
        result = train(net, iter(batches), batch_size=None, **limits)
    assert f"step {steps}" in result.history.stopped
    assert len(result.history.epochs) == rows
    expected = train(net, batches, batch_size=None, epochs=1)
    for name, value in expected.model.params.items():
        np.testing.assert_array_equal(result.model.params[name], value)


def test_an_iterator_for_several_epochs_is_refused_before_it_is_read(net):
    drawn = []

    def draw():
        for _ in range(3):
            drawn.append(1)
            yield X, Y

    with pytest.raises(jaxonnx.TrainingError, match="epochs=2: an iterator serves one epoch"):
        train(net, draw(), epochs=2, batch_size=None)
    assert len(drawn) <= 1
