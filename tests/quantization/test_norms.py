"""BatchNormalization in quantization-aware training, and in the file that it becomes."""

import numpy as np
import onnx
import optax
import pytest

import jaxonnx
from jaxonnx import Quantization, demo
from tests.support.sessions import outputs_everywhere
from tests.support.sweeps import sweep

LOSS = "softmax_cross_entropy_with_integer_labels"


def train(model, quantize, **options):
    (x, y), _ = demo.digits()
    settings = {"loss": LOSS, "optimizer": optax.adam(1e-2), "progress": False, **options}
    return jaxonnx.train(model, (x[:320], y[:320]), quantize=quantize, **settings).model, x[:64]


def with_scales_of_both_signs(model):
    """Return the demo network with channels whose normalization has a negative scale."""
    params = {**model.params}
    rng = np.random.default_rng(0)
    for name in ("1.weight", "4.weight", "8.weight"):
        params[name] = params[name] * rng.normal(size=params[name].shape).astype(np.float32)
    return model.replace(params=params)


def operators(model_or_proto):
    proto = getattr(model_or_proto, "proto", model_or_proto)
    return [node.op_type for node in proto.graph.node]


def tensors_of(proto):
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


@pytest.mark.parametrize(
    "weights", ["int8", *(pytest.param(w, marks=pytest.mark.deep) for w in ("uint8", "int4"))]
)
def test_the_factor_of_a_normalization_is_in_the_scales_of_the_saved_weights(weights):
    """The integers are those that were trained; onnxruntime's outputs are the trained model's."""
    start = with_scales_of_both_signs(demo.model())
    model, x = train(start, Quantization(weights=weights))
    assert operators(model).count("BatchNormalization") == 3
    proto = model.to_onnx()
    onnx.checker.check_model(proto, full_check=True)
    assert not {"BatchNormalization", "Exp", "Mul"} & {*operators(proto)}
    tensors = tensors_of(proto)
    assert not {"1.weight", "1.running_mean", "4.running_var"} & {*tensors}

    w, change = (np.asarray(model.params[n]) for n in ("3.weight", "3.weight_scale_change"))
    scale = np.asarray(model.tensors["3.weight_scale_initial"]) * np.exp(change)
    gamma, var = np.asarray(model.params["4.weight"]), np.asarray(model.state["4.running_var"])
    factor = gamma / np.sqrt(var + np.float32(1e-5))
    np.testing.assert_allclose(tensors["3.weight_scale"], scale * np.abs(factor), rtol=1e-5)
    info = {"int8": (-128, 127), "uint8": (-128, 127), "int4": (-8, 7)}[weights]
    expected = np.clip(np.rint(w / scale[:, None, None, None]), *info)
    expected *= np.sign(factor)[:, None, None, None]  # of those that changed sign in training
    point = tensors["3.weight_zero_point"].astype(np.float32)[:, None, None, None]
    stored = tensors["3.weight_quantized"].astype(np.float32) - point
    assert (np.abs(stored - expected) > 0).mean() < 0.002  # ties, and 127 for -(-128)

    for theirs in outputs_everywhere(proto, {proto.graph.input[0].name: x}):
        np.testing.assert_allclose(model(x), theirs, atol=0.02 * np.abs(theirs).max())


def test_a_scale_of_zero_leaves_integers_of_zero():
    model = demo.model()
    params = {**model.params, "4.weight": model.params["4.weight"].at[3].set(0.0)}
    model, _ = train(model.replace(params=params), "int8", optimizer=optax.sgd(0.0))
    tensors = tensors_of(model.to_onnx())
    assert not tensors["3.weight_quantized"][3].any()
    assert all(np.isfinite(value.astype(np.float32)).all() for value in tensors.values())


def test_negative_scales_are_flipped_before_training():
    start = with_scales_of_both_signs(demo.model())
    model, x = train(start, Quantization(learn=None), optimizer=optax.sgd(0.0), statistics="frozen")
    assert (start.params["4.weight"] < 0).any()
    assert (model.params["4.weight"] >= 0).all()
    np.testing.assert_array_equal(
        np.abs(model.params["3.weight"]), np.abs(start.params["3.weight"])
    )
    expected = np.asarray(start(x))
    np.testing.assert_allclose(model(x), expected, atol=0.05 * np.abs(expected).max())


@pytest.mark.deep
def test_statistics_follow_the_rounded_network():
    model = demo.model()
    before = np.asarray(model.state["1.running_mean"])
    trained, _ = train(model, Quantization(learn=None), optimizer=optax.sgd(0.0))
    assert np.abs(np.asarray(trained.state["1.running_mean"]) - before).max() > 0
    frozen, _ = train(model, Quantization(learn=None), statistics="frozen")
    np.testing.assert_array_equal(frozen.state["1.running_mean"], before)


@pytest.mark.deep
def test_one_scale_for_a_weight_cannot_take_in_factors_of_channels():
    model, x = train(demo.model(), Quantization(per_channel=False))
    assert "BatchNormalization" not in operators(model)
    saved = jaxonnx.load(model.to_onnx())
    np.testing.assert_allclose(saved(x), model(x), atol=0.02 * np.abs(model(x)).max())


@pytest.fixture(scope="module")
def trained():
    return train(demo.model(), "int8")


@pytest.mark.parametrize(
    "outputs",
    sweep(
        [
            ["/5/Relu_output_0"],
            ["/4/BatchNormalization_output_0"],
            ["/3/Conv_output_0"],
            ["/3/Conv_output_0", "logits"],
        ],
        *(0, 3),
    ),
)
def test_selected_outputs_are_saved(trained, outputs):
    """A convolution whose result is an output keeps its normalization behind it."""
    model, x = trained
    part = model.with_outputs(outputs)
    proto = part.to_onnx()
    onnx.checker.check_model(proto, full_check=True)
    assert ("BatchNormalization" in operators(proto)) == (len(outputs) == 2)
    before, after = part(x), jaxonnx.load(proto)(x)
    pairs = zip(before, after, strict=True) if len(outputs) == 2 else [(before, after)]
    for ours, saved in pairs:
        np.testing.assert_allclose(saved, ours, atol=0.02 * np.abs(ours).max())


def test_selected_outputs_of_a_calibrated_model_are_saved():
    (x, _), _ = demo.digits()
    part = jaxonnx.quantize(demo.model(), x[:64]).with_outputs(["/5/Relu_output_0"])
    ours = np.asarray(part(x[:64]))
    saved = jaxonnx.load(part.to_onnx())(x[:64])
    np.testing.assert_allclose(saved, ours, atol=0.02 * np.abs(ours).max())
