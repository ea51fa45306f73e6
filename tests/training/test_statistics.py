"""Running statistics of BatchNormalization that the result can be used with."""

import warnings

import jax
import numpy as np
import onnx.parser
import optax
import pytest

import jaxonnx
from jaxonnx.training import step

LABELS = "softmax_cross_entropy_with_integer_labels"


def network(momentum=0.99, batch="n"):
    """Two normalized layers, as an exporter writes a network that was never trained."""
    random = np.random.default_rng(0)

    def tensor(name, values):
        sizes = ", ".join(map(str, values.shape))
        return f"float[{sizes}] {name} = {{{', '.join(map(str, values.reshape(-1)))}}}"

    shapes = {"w1": (4, 16), "w2": (16, 16), "w3": (16, 3)}
    values = {name: random.normal(size=s) / s[0] ** 0.5 for name, s in shapes.items()}
    for i in "12":
        values |= {f"s{i}": np.ones(16), f"b{i}": np.zeros(16)}
        values |= {f"m{i}": np.zeros(16), f"v{i}": np.ones(16)}
    tensors = ", ".join(tensor(name, x) for name, x in values.items())
    norm = f"BatchNormalization <momentum = {momentum}>"
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
    net (float[{batch}, 4] x) => (float[{batch}, 3] y) <{tensors}> {{
        a1 = MatMul(x, w1)
        n1 = {norm} (a1, s1, b1, m1, v1)
        r1 = Relu(n1)
        a2 = MatMul(r1, w2)
        n2 = {norm} (a2, s2, b2, m2, v2)
        r2 = Relu(n2)
        y = MatMul(r2, w3)
    }}""")


def examples(count=256, seed=1):
    """Three classes of sensors whose zero is far from 0 and whose unit is large."""
    random = np.random.default_rng(seed)
    y = random.integers(0, 3, count)
    means = np.random.default_rng(0).normal(size=(3, 4)) * 3
    x = means[y] + random.normal(size=(count, 4))
    return (x * 20 + 300).astype(np.float32), y


def train(data, proto=None, **settings):
    settings = {"batch_size": 32, "epochs": 8, "seed": 0, "progress": False} | settings
    proto = network() if proto is None else proto
    return jaxonnx.train(proto, data, loss=LABELS, optimizer=optax.adam(1e-2), **settings)


def accuracy(model, data):
    return float((np.argmax(model(data[0]), -1) == data[1]).mean())


def test_statistics_that_cannot_have_settled_are_computed_anew():
    """64 steps of momentum 0.99 leave half of what the file began with."""
    data, fresh = examples(), examples(seed=2)
    left = train(data, statistics="batch", validation=fresh)
    assert accuracy(left.model, fresh) < 0.7
    assert not any("statistics" in note for note in left.history.notes)
    result = train(data, validation=fresh)
    assert accuracy(result.model, fresh) > 0.97
    assert result.history.epochs[-1]["validation_accuracy"] == accuracy(result.model, fresh)
    (note,) = (note for note in result.history.notes if "statistics" in note)
    assert "momentum 0.99" in note
    assert "64 steps" in note
    for name, x in left.model.params.items():  # training itself does not see them
        np.testing.assert_array_equal(result.model.params[name], x)


def test_the_statistics_are_those_of_the_data_at_the_final_weights():
    """Of the whole data, in float64: those of its first layer do not depend on batches."""
    x, y = examples()
    model = train((x, y)).model
    inner = x.astype(np.float64) @ np.asarray(model.params["w1"], np.float64)
    np.testing.assert_allclose(model.state["m1"], inner.mean(0), rtol=1e-5)
    np.testing.assert_allclose(model.state["v1"], inner.var(0), rtol=1e-4)
    # one batch of all data normalizes in training as the result does in inference
    model = train((x, y), batch_size=256, epochs=3).model
    want, _ = model.apply_train(model.params, model.state, None, x)
    np.testing.assert_allclose(model(x), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("dtype", "rtol"), [("float16", 2e-3), ("float64", 1e-12)])
def test_statistics_are_pooled_in_the_types_of_the_file_or_wider(dtype, rtol):
    x, y = examples()
    with jax.enable_x64(dtype == "float64"):
        x = x.astype(np.float64) if dtype == "float64" else x
        proto = jaxonnx.convert(network(), dtype)
        model = train((x, y), proto, epochs=1, statistics="recompute", check=False).model
        assert {value.dtype for value in model.state.values()} == {np.dtype(dtype)}
        inner = x.astype(np.float64) @ np.asarray(model.params["w1"], np.float64)
        np.testing.assert_allclose(model.state["m1"], inner.mean(0), rtol=rtol)
        np.testing.assert_allclose(model.state["v1"], inner.var(0), rtol=10 * rtol)


def test_statistics_that_have_settled_are_those_of_training():
    data = examples()
    settings = {"proto": network(momentum=0.9), "epochs": 1, "batch_size": 4}  # 64 steps
    for name, x in train(data, statistics="batch", **settings).model.state.items():
        np.testing.assert_array_equal(train(data, **settings).model.state[name], x)
    renewed = train(data, statistics="recompute", **settings)
    inner = data[0] @ np.asarray(renewed.model.params["w1"])
    np.testing.assert_allclose(renewed.model.state["m1"], inner.mean(0), rtol=1e-5)
    assert any("statistics" in note for note in renewed.history.notes)


def test_a_model_recomputes_its_statistics():
    """The call for weights of a loop of one's own, or of a run that kept running averages."""
    x, y = examples()
    left = train((x, y), statistics="batch").model
    model = left.recompute_statistics((x, y), batch_size=32)
    assert accuracy(left, (x, y)) < 0.7
    assert accuracy(model, (x, y)) > 0.97
    inner = x @ np.asarray(model.params["w1"])
    np.testing.assert_allclose(model.state["v1"], inner.var(0), rtol=1e-4)
    with pytest.raises(jaxonnx.InputError, match="no running statistics"):
        _without_norms().recompute_statistics(x)


def _without_norms():
    return jaxonnx.load(
        onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
    net (float[n, 4] x) => (float[n, 1] y) <float[4, 1] w = {1, 2, 3, 4}> { y = MatMul(x, w) }""")
    )


def test_frozen_statistics_stay():
    result = train(examples(), statistics="frozen")
    for name, x in jaxonnx.load(network()).state.items():
        np.testing.assert_array_equal(result.model.state[name], x)


def test_an_iterator_that_is_spent_is_said():
    x, y = examples()
    batches = ((x[i : i + 32], y[i : i + 32]) for i in range(0, 256, 32))
    result = train(batches, epochs=1, batch_size=None)
    (note,) = (note for note in result.history.notes if "statistics" in note)
    assert "recompute_statistics" in note


def test_a_run_that_resumes_has_the_same_statistics(tmp_path):
    data = examples()
    whole = train(data, epochs=4)
    train(data, epochs=2, checkpoint_dir=tmp_path)
    resumed = train(data, epochs=4, checkpoint_dir=tmp_path, resume=True)
    for name, x in whole.model.state.items():
        np.testing.assert_array_equal(resumed.model.state[name], x)
    assert len([n for n in resumed.history.notes if "statistics" in n]) == 1


def test_one_number_for_each_channel_is_warned_of():
    """As PyTorch refuses it: the output is the bias, whatever the input."""
    x, y = examples(8)
    with pytest.warns(UserWarning, match=r"(?s)one value per channel.*statistics='frozen'"):
        train((x, y), network(batch="1"), batch_size=1, epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train((x, y), network(batch="1"), batch_size=1, epochs=1, statistics="frozen")


def test_a_step_has_no_data_to_compute_them_from():
    with pytest.raises(jaxonnx.TrainingError, match="recompute_statistics"):
        step(network(), LABELS, optax.sgd(0.1), statistics="recompute")


def test_what_fills_up_the_last_batch_does_not_count():
    """The moments of the first layer are those of all examples, whatever the size of batches."""
    model = jaxonnx.load(network())
    x = np.random.default_rng(1).normal(size=(40, 4)).astype(np.float32)
    state = model.recompute_statistics(x, batch_size=32).state
    first = x @ np.asarray(model.params["w1"])
    np.testing.assert_allclose(state["m1"], first.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(state["v1"], first.var(0), rtol=1e-4)
