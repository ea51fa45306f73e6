"""Networks as real exporters write them (tests/data): outputs, gradients, saving."""

import warnings
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from onnx import numpy_helper

import jaxonnx
from tests.support.paths import DATA

GOLDEN = [path for path in DATA.glob("*.*.onnx") if path.with_suffix(".npz").exists()]
TORCH = sorted(path.name.removesuffix(".onnx") for path in GOLDEN)
ALL = [*TORCH, "sklearn_mlp", "external/lenet"]


@cache
def load(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "64-bit outputs")  # scikit-learn's labels
        return jaxonnx.load(DATA / f"{name}.onnx")


@cache
def goldens(name):
    path = DATA / f"{'lenet.dynamo' if name == 'external/lenet' else name}.npz"
    with np.load(path) as file:
        return dict(file)


def run_onnxruntime(source, x):
    session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})


def outputs(model, x):
    result = model(x)
    return result if isinstance(result, tuple) else (result,)


def assert_close(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.deep
@pytest.mark.parametrize("name", ALL)
def test_outputs_agree_with_onnxruntime(name):
    x = goldens(name)["x"]
    x = x[np.arange((1, 3, 8)[ALL.index(name) % 3]) % len(x)]
    assert_close(outputs(load(name), x), run_onnxruntime(DATA / f"{name}.onnx", x))


def mean_loss(name, result, y):
    if name == "sklearn_mlp":
        _, probabilities = result
        return -jnp.log(jnp.take_along_axis(probabilities, y[:, None], 1)).mean()
    return optax.softmax_cross_entropy_with_integer_labels(result, y).mean()


# the unfolded ones have gradients of a sum (test_views.py), the untrained one a whole step
# (test_shared_initializers.py)
@pytest.mark.deep
@pytest.mark.parametrize("name", [n for n in ALL if not n.startswith(("unfolded", "untrained"))])
def test_loss_and_every_gradient_agree_with_pytorch(name):
    golden = goldens(name)
    expected = {k.removeprefix("grad:"): v for k, v in golden.items() if k.startswith("grad:")}
    assert {*load(name).params} == {*expected}
    model = load(name).with_trainable(expected)
    x, y = golden["x"], golden["y"].astype(np.int32)

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradients(params):
        return mean_loss(name, model.apply(params, x), y)

    loss, gradients = loss_and_gradients(model.params)
    np.testing.assert_allclose(loss, golden["loss"], rtol=1e-4)
    assert {*gradients} == {*expected}
    for key, gradient in gradients.items():
        # elements that cancel to almost nothing have the rounding error of their summands
        atol = 1e-5 * np.abs(expected[key]).max()
        np.testing.assert_allclose(gradient, expected[key], rtol=1e-3, atol=atol, err_msg=key)


@pytest.mark.deep
@pytest.mark.parametrize("name", [name for name in ALL if "dynamo" not in name])
def test_saved_with_new_weights(name, tmp_path):
    model, x = load(name), goldens(name)["x"]
    params = {k: 1.25 * np.asarray(v) + 0.01 for k, v in model.params.items()}
    changed = model.replace(params=params)
    path = tmp_path / "changed.onnx"
    changed.save(path)
    onnx.checker.check_model(path, full_check=True)
    found = run_onnxruntime(path, x)
    assert_close(outputs(changed, x), found)
    assert_close(outputs(load(path.with_suffix("")), x), found)
    assert not np.allclose(found[-1], outputs(model, x)[-1])


@pytest.mark.parametrize("name", ALL)
def test_unchanged_round_trip_is_bit_for_bit(name, tmp_path):
    path = tmp_path / "same.onnx"
    load(name).save(path)
    before, after = (
        {t.name: numpy_helper.to_array(t) for t in onnx.load(p).graph.initializer}
        for p in (DATA / f"{name}.onnx", path)
    )
    assert {*before} <= {*after}
    for key, value in before.items():
        assert value.dtype == after[key].dtype
        assert value.shape == after[key].shape
        assert value.tobytes() == after[key].tobytes(), key


def test_equal_tensors_that_the_exporter_merged_are_trained_apart():
    model = load("resnet18.legacy")
    names = {t.name for t in onnx.load(DATA / "resnet18.legacy.onnx").graph.initializer}
    merged = {*model.params, *model.state} - names
    assert len(merged) == 72
    assert {"layer4.1.bn2.bias", "layer4.1.bn2.weight"} <= {*model.params}
    assert {"layer4.1.bn2.running_mean", "layer4.1.bn2.running_var"} <= {*model.state}
