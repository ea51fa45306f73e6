"""Quantized networks: the integers of onnxruntime, training through rounding, files and back."""

import dataclasses
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantFormat, QuantType, calibrate, quantize_static

import jaxonnx
from jaxonnx import Quantization, demo
from jaxonnx.quantization._scheme import TYPES, WeightSite, weight_parameters
from tests.support.exact_products import avoid_saturation

DATA = Path(__file__).parents[1] / "data"
LOSS = "softmax_cross_entropy_with_integer_labels"
STATIC = DATA / "families" / "onnxruntime_static_int8.onnx"


def examples(model, count=8):
    rng = np.random.default_rng(0)
    sizes = (count, *(d if isinstance(d, int) else 6 for d in model.inputs[0].shape[1:]))
    if model.inputs[0].dtype == np.float32:
        return rng.normal(size=sizes).astype(np.float32)
    return rng.integers(0, 10, sizes).astype(model.inputs[0].dtype)


def session(proto, optimized=True):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(avoid_saturation(proto).SerializeToString(), options)


def tensors_of(proto):
    return {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}


def integers(proto):
    """The names of the values that QuantizeLinear gives."""
    return [node.output[0] for node in proto.graph.node if node.op_type == "QuantizeLinear"]


def reading_given(proto, values):
    """Let every DequantizeLinear read its integers from an input, not from the node before it."""
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    for name, value in values.items():
        kind = helper.np_dtype_to_tensor_dtype(value.dtype)
        result.graph.input.append(helper.make_tensor_value_info(f"{name}/given", kind, value.shape))
    for node in result.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in values:
            node.input[0] += "/given"
    return result


def given_inputs(values):
    return {f"{name}/given": value for name, value in values.items()}


QUICK = [("lenet.dynamo", "int8")]
DEEP = [
    ("lenet_bn.legacy", "int4"),
    ("lstm.dynamo", "int8"),
    ("mobilenet.dynamo", "int8"),
    ("resnet18.legacy", "int8"),
    ("transformer.legacy", "int4"),
    ("families/transformers_llama", "int8"),
]


@pytest.mark.parametrize(
    ("name", "scheme"), [*QUICK, *(pytest.param(*c, marks=pytest.mark.deep) for c in DEEP)]
)
def test_integers_are_those_of_onnxruntime(name, scheme):
    """Each operator gives the same integers from the same integers."""
    model = jaxonnx.load(DATA / f"{name}.onnx")
    first, *masks = model.inputs
    x = {first.name: examples(model, 2 if masks else 8)}
    x |= {value.name: np.ones(value.shape, np.int64) for value in masks}
    proto = jaxonnx.quantize(model, x, scheme).to_onnx()
    inner, outputs = integers(proto), [value.name for value in proto.graph.output]
    assert inner
    whole = np.asarray(jaxonnx.load(proto)(**x))
    for value in inner:
        kind = onnx.TensorProto.UINT8
        proto.graph.output.append(helper.make_tensor_value_info(value, kind, None))
    theirs = session(proto).run(None, x)
    given = dict(zip(inner, theirs[len(outputs) :], strict=True))
    ours = jaxonnx.load(reading_given(proto, given))(**x, **given_inputs(given))
    equal = [np.asarray(a) == b for a, b in zip(ours, theirs, strict=True)][len(outputs) :]
    assert np.concatenate([part.reshape(-1) for part in equal]).mean() >= 0.999
    # ties that are rounded the other way have consequences in the layers behind
    np.testing.assert_allclose(whole, theirs[0], atol=0.02 * np.abs(theirs[0]).max())


def test_the_saved_file_has_integer_weights_and_no_normalization(tmp_path):
    model = demo.model()
    x = demo.digits()[0][0][:64]
    quantized = jaxonnx.quantize(model, x)
    assert all(value.dtype == np.float32 for value in quantized.params.values())
    quantized.save(tmp_path / "q.onnx")
    proto = onnx.load(tmp_path / "q.onnx")
    onnx.checker.check_model(proto, full_check=True)
    types = {name: value.dtype for name, value in tensors_of(proto).items()}
    assert types["3.weight_quantized"] == np.int8
    assert types["4.bias_quantized"] == np.int32
    assert "BatchNormalization" not in {node.op_type for node in proto.graph.node}
    large = [name for name, value in tensors_of(proto).items() if value.size > 64]
    assert large
    assert all(types[name] == np.int8 for name in large)
    floats = np.asarray(model(x))
    assert np.abs(quantized(x) - floats).max() < 0.03 * np.abs(floats).max()
    np.testing.assert_allclose(
        jaxonnx.load(proto)(x), quantized(x), atol=0.02 * np.abs(floats).max()
    )


def test_training_through_four_bits_wins_back_what_rounding_costs(tmp_path):
    (x, y), (held, labels) = demo.digits()
    model = jaxonnx.train(
        demo.mlp(16), (x, y), loss=LOSS, optimizer=optax.adam(3e-3), epochs=20, head=10
    ).model
    scheme = Quantization(weights="int4")
    before = jaxonnx.evaluate(model, (held, labels), loss=LOSS)
    rounded = jaxonnx.evaluate(jaxonnx.quantize(model, x, scheme), (held, labels), loss=LOSS)
    result = jaxonnx.train(
        model, (x, y), loss=LOSS, optimizer=optax.adam(1e-3), epochs=3, quantize=scheme
    )
    assert any("rounded to int4" in note for note in result.history.notes)
    scales = [name for name in result.model.params if name.endswith("_scale_change")]
    assert len(scales) == 4  # two weights; the input, flattened or not, and the hidden layer
    weights = [name for name in scales if "weight" in name]
    assert all(np.abs(result.model.params[name]).max() > 0 for name in weights)
    metrics = {"metrics": ["accuracy"], "loss": LOSS}
    trained = jaxonnx.evaluate(result.model, (held, labels), **metrics)
    assert before["loss"] < rounded["loss"]
    assert trained["loss"] < (before["loss"] + rounded["loss"]) / 2
    result.model.save(tmp_path / "q.onnx")
    proto = onnx.load(tmp_path / "q.onnx")
    assert not [node.op_type for node in proto.graph.node if node.op_type in ("Exp", "Mul")]
    theirs = session(proto).run(None, {"x": held})[0].argmax(1)
    assert abs((theirs == labels).mean() - trained["accuracy"]) <= 0.001 + 1 / len(labels)


@pytest.mark.deep
def test_parameters_chosen_by_name_are_trained_with_all_scales():
    (x, y), _ = demo.digits()
    result = jaxonnx.train(
        demo.model(),
        (x[:64], y[:64]),
        loss=LOSS,
        optimizer=optax.sgd(0.0),
        quantize="int8",
        trainable="14.*",
    )
    names = {*result.model.params}
    assert {name for name in names if not name.endswith("_change")} == {"14.weight", "14.bias"}
    assert "x_scale_change" in names


@pytest.mark.parametrize("learn", [None, pytest.param("scales", marks=pytest.mark.deep)])
def test_a_quantized_file_goes_on_at_its_own_scales(learn):
    """A run that changes nothing gives back the same integers, also of a file of onnxruntime."""
    before = onnx.load(STATIC)
    model = jaxonnx.load(before)
    assert not model.params
    x = examples(model)
    target = np.zeros_like(model(x))
    scheme = Quantization(activations="int8", learn=learn)
    data = {"loss": "squared_error", "optimizer": optax.sgd(0.0), "quantize": scheme}
    result = jaxonnx.train(model, (x, target), **data)
    assert any("its own scales" in note for note in result.history.notes)
    after = result.model.to_onnx()
    old, new = tensors_of(before), tensors_of(after)
    # zero points of biases, which no node of the written file reads, are left out
    old = {name: x for name, x in old.items() if not name.endswith("bias_quantized_zero_point")}
    assert {*old} == {*new}
    for name, value in old.items():
        np.testing.assert_array_equal(new[name].reshape(value.shape), value, err_msg=name)
        assert new[name].dtype == value.dtype
    (theirs,) = session(after).run(None, {"x": x})
    np.testing.assert_array_equal(theirs, session(before).run(None, {"x": x})[0])


@pytest.mark.deep
def test_a_new_head_is_rounded_with_the_rest():
    (x, y), _ = demo.digits()
    same = {"loss": LOSS, "optimizer": optax.adam(1e-3), "quantize": "int8", "batch_size": 64}
    proto = jaxonnx.train(demo.model(), (x[:64], y[:64] % 7), head=7, **same).model.to_onnx()
    assert tensors_of(proto)["14.weight_quantized"].dtype == np.int8
    (theirs,) = session(proto).run(None, {proto.graph.input[0].name: x[:4]})
    assert theirs.shape == (4, 7)


@pytest.mark.deep
def test_adapters_and_sparsity_compose_with_rounding():
    (x, y), _ = demo.digits()
    same = {"loss": LOSS, "optimizer": optax.adam(1e-3), "quantize": "int8", "batch_size": 64}
    data = x[:128], y[:128]
    adapted = jaxonnx.train(demo.model(), data, lora=jaxonnx.LoRA(rank=2), **same).model
    assert tensors_of(adapted.to_onnx())["12.weight_quantized"].dtype == np.int8
    sparse = jaxonnx.train(demo.model(), data, sparsity="2:4", epochs=2, **same).model
    proof = jaxonnx.sparse.verify(sparse)
    assert {product.weight for product in proof.products} >= {"3.weight", "12.weight"}
    assert all(product.ok for product in proof.products)
    stored = tensors_of(sparse.to_onnx())["12.weight_quantized"]
    groups = (stored.reshape(64, -1, 4) != 0).sum(2), (stored.T.reshape(128, -1, 4) != 0).sum(2)
    assert max(part.max() for part in groups) <= 2


@pytest.mark.parametrize("path", ["q.onnx", "q.npz"])
def test_a_saved_file_of_sparse_integers_is_proved(path, tmp_path):
    (x, _), _ = demo.digits()
    model = demo.mlp()
    options = model.sparsity_options()  # ten classes are no multiple of four
    pruned = jaxonnx.sparse.prune(model.params, **options)
    sparse = model.replace(params=pruned).with_sparsity("2:4", **options)
    quantized = jaxonnx.quantize(sparse, x[:64])
    quantized.save(tmp_path / path)
    loaded = jaxonnx.load(tmp_path / path)
    assert not loaded.params
    proof = jaxonnx.sparse.verify(loaded)
    assert {product.weight for product in proof.products} == {"body_weight"}
    stored = tensors_of(loaded.to_onnx())
    integers = stored["body_weight_quantized"]
    assert integers.dtype == np.int8
    for axis in (0, 1):
        groups = np.moveaxis(integers, axis, -1).reshape(-1, 4)
        assert (groups != 0).sum(1).max() == 2
    if path.endswith(".npz"):
        quantized.save(tmp_path / "q.onnx")
        with np.load(tmp_path / path) as file:
            packed = [file[n].nbytes for n in file.files if "body_weight_quantized" in n]
        assert sum(packed) == integers.size * 5 // 8  # half the numbers, and two bits for each
        np.testing.assert_array_equal(loaded(x), jaxonnx.load(tmp_path / "q.onnx")(x))
    broken = loaded.to_onnx()
    for tensor in broken.graph.initializer:
        if tensor.name == "body_weight_quantized":
            dense = np.ones_like(integers)
            tensor.CopyFrom(numpy_helper.from_array(dense, tensor.name))
    with pytest.raises(jaxonnx.SparsityError, match="sums over"):
        jaxonnx.sparse.verify(jaxonnx.load(broken))


@pytest.mark.parametrize("kind", ["int8", "uint8", "int4"])
def test_quantized_files_keep_the_record_of_sparse_weights(kind, tmp_path):
    """Of the tensors whose integers less zero points are 2:4, and of no others."""
    (x, _), _ = demo.digits()
    model = demo.mlp()
    options = model.sparsity_options()
    pruned = jaxonnx.sparse.prune(model.params, **options)
    sparse = model.replace(params=pruned).with_sparsity("2:4", **options, method="mine")
    jaxonnx.quantize(sparse, x[:64], jaxonnx.Quantization(weights=kind)).save(tmp_path / "q.onnx")
    loaded = jaxonnx.load(tmp_path / "q.onnx")
    loaded.save(tmp_path / "again.onnx")
    floats = jaxonnx.load(tmp_path / "q.onnx", dequantize=True)
    trainable = loaded.with_float_weights()
    for net in (loaded, jaxonnx.load(tmp_path / "again.onnx"), floats, trainable):
        (layer,) = net.sparsity.layers
        assert (str(layer.pattern), net.sparsity.method) == ("2:4 transposable", "mine")
        numbers = np.asarray(net.tensors[layer.name], np.float32)
        if layer.name == "body_weight_quantized":
            point = np.asarray(net.tensors["body_weight_zero_point"], np.float32)
            numbers = numbers - point[:, None] if layer.axes[0] == 0 else numbers - point
        for axis in layer.axes:
            groups = np.moveaxis(numbers, axis, -1).reshape(-1, 4)
            assert (groups != 0).sum(1).max() == 2
    assert "2:4 transposable by mine, recorded in the file" in " ".join(str(loaded).split())
    adapted = jaxonnx.train(
        loaded,
        (x[:64], np.zeros((64, 10), np.float32)),
        lora=jaxonnx.LoRA(rank=2),
        loss="squared_error",
        optimizer=optax.adam(1e-2),
    ).model
    adapted.save(tmp_path / "adapted.onnx")  # beside weights that stay as they are
    assert jaxonnx.load(tmp_path / "adapted.onnx").sparsity.layers == loaded.sparsity.layers
    dense = tensors_of(loaded.to_onnx())["body_weight_quantized"]
    dense = np.where(np.arange(dense.shape[1]) < 4, dense.max(), dense).astype(dense.dtype)
    constants = {**loaded.program.constants, "body_weight_quantized": dense}
    program = dataclasses.replace(loaded.program, constants=constants)
    changed = dataclasses.replace(loaded, program=program)
    assert jaxonnx.load(changed.to_onnx()).sparsity is None


def test_a_dequantized_file_has_no_record_of_rounding_and_is_quantized_again(tmp_path):
    (x, _), _ = demo.digits()
    jaxonnx.quantize(demo.mlp(), x[:64]).save(tmp_path / "q.onnx")
    floats = jaxonnx.load(tmp_path / "q.onnx", dequantize=True)
    assert "jaxonnx.quantization" not in {e.key for e in floats.to_onnx().metadata_props}
    again = jaxonnx.quantize(floats, x[:64])
    again.save(tmp_path / "again.onnx")
    saved = onnx.load(tmp_path / "again.onnx")
    (y,) = session(saved).run(None, {saved.graph.input[0].name: x[:64]})
    np.testing.assert_allclose(again(x[:64]), y, rtol=0, atol=1e-3 * np.abs(y).max())
    error = np.abs(y - np.asarray(floats(x[:64]))).max()
    assert 0 < error < 0.05 * np.abs(y).max()
    assert sum(w.dtype == np.int8 and w.ndim == 2 for w in tensors_of(saved).values()) == 2


@given(
    st.integers(0, 2**32 - 1), st.sampled_from(["int8", "int4"]), st.booleans(), st.integers(-6, 6)
)
@settings(max_examples=30, deadline=None)
def test_scales_of_weights_have_no_more_error_than_those_of_the_extremes(
    seed, weights, per_channel, exponent
):
    rng = np.random.default_rng(seed)
    w = (rng.standard_t(2, (4, 8)) * 10.0**exponent).astype(np.float32)
    scheme = Quantization(weights=weights, per_channel=per_channel)
    scale, zero_point, axis, _ = weight_parameters(w, WeightSite("w", 0, 1, True), scheme)
    assert not zero_point.any()
    assert (axis == 0) == per_channel
    least, most = (-8, 7) if weights == "int4" else (-128, 127)
    along = 1 if per_channel else None

    def error(scale):
        scale = scale.reshape(-1, 1)
        return np.square(np.clip(np.rint(w / scale), least, most) * scale - w).sum(along)

    plain = np.abs(w).max(along, keepdims=True) / np.float32(most)
    assert np.all(error(scale) <= error(plain) * (1 + 1e-5))


def test_blocks_have_a_scale_for_each_group_of_inputs():
    model, x = demo.mlp(), demo.digits()[0][0][:32]
    scheme = Quantization(weights="int4", activations=None, block=16)
    proto = jaxonnx.quantize(model, x, scheme).to_onnx()
    assert proto.opset_import[0].version >= 21
    scales = {n: v.shape for n, v in tensors_of(proto).items() if n.endswith("weight_scale")}
    assert scales == {"body_weight_scale": (4, 32), "head_weight_scale": (2, 10)}
    # optimized, onnxruntime rounds the activations of such products, too
    (theirs,) = session(proto, optimized=False).run(None, {"x": x})
    np.testing.assert_allclose(theirs, jaxonnx.load(proto)(x), rtol=1e-5, atol=1e-5)
    (optimized,) = session(proto).run(None, {"x": x})
    np.testing.assert_allclose(optimized, theirs, atol=0.02 * np.abs(theirs).max())


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Quantization(weights="int3"), "weights must be 'int8', 'uint8'"),
        (lambda: Quantization(weights="fp4"), "has no DequantizeLinear of fp4"),
        (lambda: Quantization.of("int9"), "'int2' or a jaxonnx.Quantization, got 'int9'"),
        (lambda: Quantization(dialect="tensorrt"), "TensorRT takes activations of int8"),
        (lambda: Quantization(dialect="qnn", activations="int8"), "QNN takes activations of uint8"),
        (lambda: Quantization(activations="fp8"), "onnxruntime takes activations of uint8 or int8"),
        (lambda: Quantization(weights="int2"), "int2 weights need floating-point activations"),
        (
            lambda: Quantization(weights="int4", reduce_range=True),
            "reduce_range needs weights of 8 bits",
        ),
        (
            lambda: train_digits(Quantization(reduce_range=True)),
            "reduce_range is for jaxonnx.quant",
        ),
        (lambda: Quantization(block=1), "at least 2"),
        (lambda: quantize_digits(skip=".*"), "there is no float32 weight"),
        (lambda: quantize_digits(where="nothing"), "where='nothing' matches no weight"),
        (lambda: quantize_digits(block=48), "blocks of 48 do not divide"),
        (lambda: jaxonnx.quantize(demo.model(), nan()), "'x' is not finite for some example"),
        (lambda: jaxonnx.quantize(STATIC, nan(28)), "the model is quantized already"),
        (
            lambda: jaxonnx.quantize(demo.mlp(), [], method="up"),
            "method must be 'gptq', 'awq' or None",
        ),
        (lambda: jaxonnx.sensitivity(demo.mlp(), nan()[:1], ("int3",)), "got 'int3'"),
        (
            lambda: train_static("int4"),
            "names weights of int4 and activations of uint8, but the file is quantized already, to "
            "weights of int8 and activations of int8",
        ),
        (lambda: train_static(Quantization()), "names weights of int8 and activations of uint8,"),
        (
            lambda: train_static(Quantization(activations=None)),
            "names weights of int8 and activations of floating point",
        ),
        (
            lambda: train_static(Quantization(activations="int8", block=2)),
            "names weights of int8 in blocks of 2",
        ),
        (
            lambda: jaxonnx.training.step(demo.model(), LOSS, optax.sgd(0.1), quantize="int8"),
            "a step has no data to measure ranges on",
        ),
    ],
)
def test_what_cannot_be_quantized_is_refused(made, message):
    with pytest.raises(jaxonnx.InputError, match=re.escape(message)):
        made()


def quantize_digits(**options):
    return jaxonnx.quantize(demo.model(), demo.digits()[0][0][:32], Quantization(**options))


def train_digits(scheme):
    data = demo.digits()[0]
    jaxonnx.train(demo.model(), data, loss=LOSS, quantize=scheme)


def train_static(scheme):
    x = np.zeros((4, 1, 28, 28), np.float32)
    target = np.zeros((4, 10), np.float32)
    jaxonnx.train(STATIC, (x, target), loss="squared_error", quantize=scheme)


def nan(size=8):
    return np.full((4, 1, size, size), np.nan, np.float32)


SCHEMES = {
    "average": (Quantization(calibration="average"), 0.03),
    "7 bits": (Quantization(reduce_range=True), 0.03),
    "uint8": (Quantization(weights="uint8"), 0.03),
    "fp8": (Quantization(weights="fp8", dialect="tensorrt", activations="fp8"), 0.1),
    "blocks": (Quantization(weights="uint4", block=16), 0.3),
    "2 bits": (Quantization(weights="int2", activations=None), 1.5),
    "qnn": (Quantization(dialect="qnn", activations="uint16"), 0.1),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_schemes_are_near_the_network_and_onnxruntime_computes_the_same(name):
    scheme, distance = SCHEMES[name]
    model, x = demo.model(), demo.digits()[0][0][:64]
    proto = jaxonnx.quantize(model, x, scheme).to_onnx()
    onnx.checker.check_model(proto, full_check=True)
    assert proto.opset_import[0].version >= scheme.opset
    stored = tensors_of(proto)["12.weight_quantized"]
    least, most = scheme.weight_limits
    numbers = stored.astype(np.float32) - TYPES[scheme.weights].middle
    assert stored.dtype == TYPES[scheme.weights].dtype
    assert least <= numbers.min() < 0 < numbers.max() <= most
    floats = np.asarray(model(x))
    mine = np.asarray(jaxonnx.load(proto)(x))
    assert np.abs(mine - floats).max() < distance * np.abs(floats).max()
    (theirs,) = session(proto, optimized=scheme.activations != "fp8").run(None, {"x": x})
    np.testing.assert_allclose(mine, theirs, atol=0.02 * np.abs(theirs).max())


def test_qnn_has_scales_at_each_value_of_floats():
    """As onnxruntime's own quantizer for QNN has them, but for what only moves numbers."""
    model, x = demo.model(), demo.digits()[0][0][:64]
    proto = jaxonnx.quantize(model, x, Quantization(dialect="qnn")).to_onnx()
    rounded = {n.output[0] for n in proto.graph.node if n.op_type == "DequantizeLinear"}
    for node in proto.graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            known = tensors_of(proto)
            assert all(n in rounded or known[n].dtype == np.int64 for n in node.input), node
    assert proto.graph.output[0].name in rounded
    scales = {n: value.ndim for n, value in tensors_of(proto).items() if n.endswith("_scale")}
    assert scales["0.weight_scale"] == 1
    assert scales["12.weight_scale"] == 0


def test_sensitivity_is_what_the_file_costs_whose_only_integers_are_of_one_weight():
    """onnxruntime gives the same error, of a file in which nothing else is rounded."""
    model, x = demo.mlp(), demo.digits()[0][0][:64]
    found = jaxonnx.sensitivity(model, x, ("int8", "int4", "2:4"))
    assert found.types == ("int8", "int4", "2:4")
    (floats,) = session(model.to_onnx()).run(None, {"x": x})
    for name, errors in found.errors.items():
        assert errors["int8"] < errors["int4"] < 1
        scheme = Quantization(weights="int4", activations=None, where=name)
        proto = jaxonnx.quantize(model, x, scheme).to_onnx()
        (theirs,) = session(proto, optimized=False).run(None, {"x": x})
        error = np.square(theirs - floats).sum() / np.square(floats).sum()
        np.testing.assert_allclose(errors["int4"], error, rtol=1e-3)
        (optimized,) = session(proto).run(None, {"x": x})
        np.testing.assert_allclose(optimized, theirs, atol=0.02 * np.abs(theirs).max())
    assert found.errors["head_weight"]["2:4"] == np.inf  # ten classes
    assert str(found).splitlines()[1].startswith(found.ranking[0])
    assert len(found.plot().patches) == 6


def test_calibration_needs_data():
    with pytest.raises(jaxonnx.TrainingError, match="no examples"):
        jaxonnx.quantize(demo.model(), [])


def test_a_run_with_a_scheme_resumes(tmp_path):
    (x, y), _ = demo.digits()
    scheme = Quantization(weights="int4", skip=[re.compile("head.*")])
    same = {"loss": LOSS, "optimizer": optax.adam(1e-3), "quantize": scheme, "batch_size": 64}
    data = x[:128], y[:128]
    jaxonnx.train(demo.mlp(), data, epochs=1, checkpoint_dir=tmp_path, **same)
    again = jaxonnx.train(
        demo.mlp(), data, epochs=2, checkpoint_dir=tmp_path, resume=True, **same
    ).model
    whole = jaxonnx.train(demo.mlp(), data, epochs=2, **same).model
    for name, value in whole.params.items():
        np.testing.assert_array_equal(again.params[name], value)
    other = same | {"quantize": "int8"}
    with pytest.raises(jaxonnx.TrainingError, match="would not continue it"):
        jaxonnx.train(demo.mlp(), data, epochs=2, checkpoint_dir=tmp_path, resume=True, **other)


SHARED = """
<ir_version: 10, opset_import: ["" : 17]>
g (float[n, 4] x) => (float[n, 4] y) <
  int8[4, 4] w = {-1, 2, -3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, float s = {0.5},
  float sx = {0.25}, uint8 z = {128}, int32[4] b = {1, 2, 3, 4}, int32[4] c = {5, 6, 7, 8},
  float sb = {0.125}
> {
  q = QuantizeLinear(x, sx, z)
  d = DequantizeLinear(q, sx, z)
  w1 = DequantizeLinear(w, s)
  b1 = DequantizeLinear(b, sb)
  h = Gemm(d, w1, b1)
  hq = QuantizeLinear(h, sx, z)
  hd = DequantizeLinear(hq, sx, z)
  w2 = DequantizeLinear(w, s)
  c1 = DequantizeLinear(c, sb)
  y = Gemm(hd, w2, c1)
}"""


def test_integers_and_scales_that_several_nodes_read_are_trained_as_one():
    before = onnx.parser.parse_model(SHARED)
    x = np.float32(np.random.default_rng(0).normal(size=(8, 4)))
    settings = {"loss": "squared_error", "optimizer": optax.sgd(0.0), "quantize": "int8"}
    result = jaxonnx.train(jaxonnx.load(before), (x, x), **settings)
    assert any("(int8)" in note for note in result.history.notes)
    after = result.model.to_onnx()
    onnx.checker.check_model(after, full_check=True)
    assert {*tensors_of(before)} == {*tensors_of(after)}
    (theirs,) = session(after).run(None, {"x": x})
    np.testing.assert_array_equal(theirs, session(before).run(None, {"x": x})[0])


def test_a_name_of_a_scale_may_be_taken():
    model = demo.mlp()
    proto = model.to_onnx()
    for node in proto.graph.node:  # a value has the name that the scale of the input would get
        for names in (node.input, node.output):
            names[:] = ["x_scale" if name == "pixels" else name for name in names]
    x = demo.digits()[0][0][:16]
    after = jaxonnx.quantize(proto, x).to_onnx()
    (theirs,) = session(after, optimized=False).run(None, {"x": x})
    np.testing.assert_allclose(theirs, jaxonnx.load(after)(x), rtol=1e-5, atol=1e-5)
    (optimized,) = session(after).run(None, {"x": x})
    np.testing.assert_allclose(optimized, theirs, atol=0.02 * np.abs(theirs).max())


class Reader(calibrate.CalibrationDataReader):
    """One batch, as onnxruntime's calibration reads it."""

    def __init__(self, name, x):
        self.batches = iter([{name: x}])

    def get_next(self):
        return next(self.batches, None)


def qoperator_file(name, folder, x):
    model = jaxonnx.load(DATA / f"{name}.onnx")
    model.save(folder / "float.onnx")
    quantize_static(
        folder / "float.onnx",
        folder / "q.onnx",
        Reader(model.inputs[0].name, x(model)),
        quant_format=QuantFormat.QOperator,
        per_channel=True,
        activation_type=QuantType.QUInt8,
    )
    return onnx.load(folder / "q.onnx")


QLINEAR = {
    "lenet.legacy": {"QLinearConv", "QGemm", "MaxPool"},
    "transformer.legacy": {"QLinearMatMul", "QLinearAdd"},
}


@pytest.mark.parametrize(
    "name", [*QLINEAR][:1] + [pytest.param(n, marks=pytest.mark.deep) for n in [*QLINEAR][1:]]
)
def test_operators_on_integers_are_trained_and_written_again(name, tmp_path):
    """Weights of QLinearConv and its like get gradients; a run without steps changes no number."""
    before = qoperator_file(name, tmp_path, examples)
    assert {node.op_type for node in before.graph.node} >= QLINEAR[name]
    model = jaxonnx.load(before)
    x = examples(model)
    settings = {"loss": "squared_error", "quantize": "int8", "batch_size": 8}
    data = x, np.zeros_like(model(x))
    same = jaxonnx.train(model, data, optimizer=optax.sgd(0.0), **settings).model.to_onnx()
    one, two = (
        [(n.op_type, n.domain, [*n.input], [*n.output]) for n in proto.graph.node if n.input]
        for proto in (before, same)
    )
    ties = "Identity", "Constant"  # statistics that were equal have moved apart
    one, two = (sorted(node for node in nodes if node[0] not in ties) for nodes in (one, two))
    assert one == two
    old, new = tensors_of(before), tensors_of(same)
    assert {*old} <= {*new}
    for tensor, value in old.items():
        if "running" not in tensor:
            np.testing.assert_array_equal(new[tensor].reshape(value.shape), value, err_msg=tensor)
            assert new[tensor].dtype == value.dtype
    result = jaxonnx.train(model, data, optimizer=optax.adam(1e-3), epochs=3, **settings)
    weights = [value for value in result.model.params.values() if value.ndim > 1]
    assert len(weights) > 1
    losses = [row["loss"] for row in result.history.epochs]
    assert losses[-1] < losses[0]
    after = result.model.to_onnx()
    onnx.checker.check_model(after)
    changed = [n for n, value in old.items() if not np.array_equal(value, tensors_of(after)[n])]
    assert any(old[n].dtype == np.int8 for n in changed)
    (theirs,) = session(after).run(None, {model.inputs[0].name: x})
    np.testing.assert_allclose(result.model(x), theirs, atol=0.05 * np.abs(theirs).max())


def test_a_picture_of_sensitivity_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = jaxonnx.Sensitivity({"w": {"int8": 0.5}}, {"w": 4})
    with pytest.raises(jaxonnx.Error, match=r"matplotlib: pip install 'jaxonnx\[plot\]'"):
        found.plot()


@pytest.mark.parametrize("opset", [17, 18])
def test_functions_are_inlined_where_the_opset_is_raised(opset):
    """onnx.version_converter drops them; their weights are trained under their inner names."""
    w = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    x = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)
    nodes = [
        helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(w)),
        helper.make_node("MatMul", ["a", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["c"]),
    ]
    layer = helper.make_function("f", "F", ["a"], ["c"], nodes, [helper.make_opsetid("", opset)])
    nodes = [
        helper.make_node("F", ["x"], ["z"], domain="f"),
        helper.make_node("MatMul", ["z", "v"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 8]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [numpy_helper.from_array(w, "v")])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    proto = helper.make_model(graph, functions=[layer], opset_imports=opsets, ir_version=8)
    (floats,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    scheme = Quantization(weights="int4", activations=None, block=4)
    model = jaxonnx.quantize(proto, x, scheme)
    assert len(model.params) == 2
    (theirs,) = session(model.to_onnx(), optimized=False).run(None, {"x": x})
    np.testing.assert_allclose(model(x), theirs, rtol=1e-5, atol=1e-5)
    assert np.abs(theirs - floats).max() < 0.15 * np.abs(floats).max()


@pytest.mark.parametrize("calibration", ["percentile", "mse"])
def test_a_calibration_that_clips_what_matters_warns(calibration):
    """The errors of the message are those of onnxruntime with both files."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1024, 32)).astype(np.float32)
    x[0, 0] = 2000  # one number, but most of the outputs' squares
    weights = rng.normal(size=(32, 8)).astype(np.float32)
    if calibration == "mse":  # a small error of x, and a large one of what the product takes of it
        x[:, 0] = np.where(np.arange(1024) < 1, 7, 0)
        weights[1:] *= 0.01
    w = numpy_helper.from_array(weights, "w")
    ends = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", size])
        for name, size in (("x", 32), ("y", 8))
    ]
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], [w])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (floats,) = session(proto).run(None, {"x": x})
    errors = []
    for name in (calibration, "minmax"):
        scheme = Quantization(calibration=name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            file = jaxonnx.quantize(proto, x, scheme, batch_size=1024).to_onnx()
        (theirs,) = session(file).run(None, {"x": x})
        errors.append(np.sqrt(np.square(theirs - floats).sum() / np.square(floats).sum()))
        said = [str(one.message) for one in caught]
        assert len(said) == (name == calibration)
        if said:
            message = said[0]
    percents = [float(number) / 100 for number in re.findall(r"([\d.]+)%", message)[:2]]
    np.testing.assert_allclose(percents, errors, rtol=0.02, atol=1e-4)
    assert f"calibration={calibration!r}" in message
    assert re.search(r"most through the ranges of 'x' \([\d.]+% of its numbers clipped\):", message)
    assert errors[0] > (1.5 if calibration == "mse" else 4) * errors[1]
    if calibration != "mse":  # trained, it is compared before the first step
        settings = {"loss": "squared_error", "optimizer": optax.sgd(0.0), "batch_size": 1024}
        scheme = Quantization(calibration=calibration)
        with pytest.warns(UserWarning, match=f"calibration='{calibration}' changes the outputs"):
            jaxonnx.train(proto, (x, floats), epochs=1, quantize=scheme, **settings)


def test_an_argument_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'equalize'"):
        jaxonnx.quantize(demo.mlp(), np.zeros((4, 1, 8, 8), np.float32), equalize=True)  # pyright: ignore[reportCallIssue]
