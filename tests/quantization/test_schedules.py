"""Ranges that follow the data in training, and rounding that begins after some epochs."""

import re
from pathlib import Path

import jax
import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from onnx import numpy_helper

import jaxonnx
from jaxonnx import Quantization, demo
from tests.support.exact_products import avoid_saturation

STATIC = Path(__file__).parents[1] / "data" / "families" / "onnxruntime_static_int8.onnx"
LOSS = "softmax_cross_entropy_with_integer_labels"

TWO_LAYERS = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[n, 4] x) => (float[n, 3] y) <float[4, 5] w, float[5, 3] v> {
  h = MatMul(x, w)
  r = Relu(h)
  y = MatMul(r, v)
}"""


def two_layers():
    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model(TWO_LAYERS)
    del proto.graph.initializer[:]
    for name, shape in (("w", (4, 5)), ("v", (5, 3))):
        value = rng.normal(size=shape).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    return jaxonnx.load(proto)


def batches(_=0):
    """Four batches, each with a range of its own."""
    rng = np.random.default_rng(1)
    widths = (1, 3, 2, 5)
    found = [(rng.normal(k, k, (8, 4)), rng.integers(0, 3, 8)) for k in widths]
    return [(x.astype(np.float32), y) for x, y in found]


def train(scheme, data=None, **options):
    options = {"loss": LOSS, "optimizer": optax.sgd(1e-2), "epochs": 2, **options}
    data = batches() if data is None else data
    return jaxonnx.train(two_layers(), data, quantize=scheme, progress=False, **options)


def tensors_of(proto):
    return {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}


def run(proto, x):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(avoid_saturation(proto).SerializeToString(), options)
    return session.run(None, {session.get_inputs()[0].name: x})[0]


@pytest.mark.parametrize("activations", ["uint8", "int8"])
def test_a_range_is_the_moving_average_of_those_of_the_batches_until_it_is_frozen(activations):
    """By the definition, in NumPy, of the input, whose batches no weight changes."""
    scheme = Quantization(
        activations=activations, calibration="minmax", learn="ranges", decay=0.75, freeze=0.75
    )
    data = [*batches(), *reversed(batches())]
    result = train(scheme, data, epochs=1)
    assert any("2 ranges follow the data until step 6" in note for note in result.history.notes)
    whole = np.concatenate([x for x, _ in data])
    low, high = min(whole.min(), 0), max(whole.max(), 0)
    if activations != "uint8":  # around 0
        high = max(-low, high)
        low = -high
    for x, _ in data[:6]:
        low = 0.75 * low + 0.25 * min(x.min(), 0)
        high = 0.75 * high + 0.25 * max(x.max(), 0)
    stored = tensors_of(result.model.to_onnx())
    scale, zero_point = stored["x_scale"], stored["x_zero_point"]
    if activations == "uint8":
        np.testing.assert_allclose(scale, (high - low) / 255, rtol=1e-5)
        assert abs(-low / scale - zero_point) < 0.501
        assert zero_point.dtype == np.uint8
    else:
        limits = np.iinfo(activations)
        np.testing.assert_allclose(scale, max(-low, high) / limits.max, rtol=1e-5)
        assert zero_point == 0
        assert zero_point.dtype == limits.dtype


def test_the_file_has_rounding_alone_and_onnxruntime_computes_what_evaluate_does(tmp_path):
    (x, y), held = demo.digits()
    result = jaxonnx.train(
        demo.mlp(16),
        (x[:256], y[:256]),
        loss=LOSS,
        optimizer=optax.adam(3e-3),
        quantize=Quantization(weights="int4", learn="ranges", start=0.5),
        validation=held,
        progress=False,
        head=10,
    )
    result.model.save(tmp_path / "q.onnx")
    proto = onnx.load(tmp_path / "q.onnx")
    onnx.checker.check_model(proto, full_check=True)
    assert {entry.domain for entry in proto.opset_import} == {""}
    kinds = {node.op_type for node in proto.graph.node}
    assert kinds == {"QuantizeLinear", "DequantizeLinear", "Flatten", "Gemm"}
    found = jaxonnx.evaluate(proto, held, loss=LOSS, metrics=["accuracy"])
    last = result.history.epochs[-1]
    np.testing.assert_allclose(found["loss"], last["validation_loss"], rtol=1e-4)
    assert abs(found["accuracy"] - last["validation_accuracy"]) <= 1 / len(held[1])
    theirs = run(proto, held[0])
    np.testing.assert_allclose(theirs, result.model(held[0]), atol=0.02 * np.abs(theirs).max())


def test_steps_before_the_start_are_those_of_the_float_network():
    """Validation is of the rounded one, which the run would save."""
    scheme = Quantization(weights="int4", learn="ranges", start=1.25)
    result = train(scheme, validation=batches())
    floats = train(None, validation=batches())
    losses = [run.history.epochs[0]["validation_loss"] for run in (result, floats)]
    assert abs(losses[0] - losses[1]) > 1e-4
    assert any("rounding begins at step 6" in note for note in result.history.notes)
    np.testing.assert_allclose(result.history.losses[:5], floats.history.losses[:5], rtol=1e-6)
    assert abs(result.history.losses[5] - floats.history.losses[5]) > 1e-4


@pytest.mark.deep
def test_an_interrupted_run_goes_on_at_its_step(tmp_path):
    """The file of its folder has the ranges and weights of the checkpoint."""
    scheme = Quantization(learn="ranges", freeze=0.75, start=0.75)
    data = tuple(np.concatenate(parts) for parts in zip(*batches(), strict=True))
    settings = {"batch_size": 8, "epochs": 4, "patience": 9, "validation": data}
    whole = train(scheme, data, **settings).model

    def stop(step, _):
        if step == 6:
            raise ConnectionError

    folder = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    with pytest.raises(ConnectionError):
        train(scheme, data, on_log=stop, **settings, **folder)
    taken = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert 4 < max(taken) < 12  # rounding has begun, ranges move
    rest = train(scheme, data, resume=True, **settings, **folder).model
    assert {*rest.state} == {*whole.state}
    found = {**rest.params, **rest.state}
    for name, value in {**whole.params, **whole.state}.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    x = data[0]
    loaded = jaxonnx.load(tmp_path)
    np.testing.assert_allclose(loaded(x), rest(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(run(loaded.to_onnx(), x), run(rest.to_onnx(), x))


def test_values_with_the_same_numbers_have_one_scale():
    """As onnxruntime's quantizer has it; so that a maximum is taken of integers."""
    x = demo.digits()[0][0][:64]
    model = jaxonnx.quantize(demo.model(), x)
    scales = {n.input[0]: n.input[1] for n in model.proto.graph.node if "Quantize" in n.op_type}
    pools = [node for node in model.proto.graph.node if node.op_type == "MaxPool"]
    assert pools
    for node in pools:
        source = next(n for n in model.proto.graph.node if n.output[0] == node.input[0])
        assert source.input[1] == scales[node.output[0]]


def test_ranges_of_a_quantized_file_move_and_it_keeps_its_form():
    """Ranges of several values, among which are others' numbers, stay as they are."""
    before = onnx.load(STATIC)
    model = jaxonnx.load(before)
    x = np.random.default_rng(0).normal(0, 3, (8, *model.inputs[0].shape[1:])).astype(np.float32)
    scheme = Quantization(activations="int8", learn="ranges", decay=0.0, freeze=1, symmetric=False)
    data = {"optimizer": optax.sgd(0.0), "loss": "squared_error", "batch_size": 8}
    result = jaxonnx.train(model, (x, np.zeros_like(model(x))), quantize=scheme, **data)
    after = result.model.to_onnx()
    old, new = tensors_of(before), tensors_of(after)
    # zero points of biases, which no node of the written file reads, are left out
    assert {name for name in old if not name.endswith(".bias_quantized_zero_point")} == {*new}
    kinds = (sorted(n.op_type for n in proto.graph.node) for proto in (before, after))
    assert next(kinds) == next(kinds)
    first = next(node for node in before.graph.node if node.op_type == "QuantizeLinear")
    low, high = min(x.min(), 0), max(x.max(), 0)
    np.testing.assert_allclose(new[first.input[1]], (high - low) / 255, rtol=1e-5)
    moved = [n for n in new if n.endswith("_scale") and not np.array_equal(old[n], new[n])]
    assert len(moved) > 2
    theirs = run(after, x)
    np.testing.assert_allclose(result.model(x), theirs, atol=0.02 * np.abs(theirs).max())


def test_ranges_move_on_several_devices_as_on_one():
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    scheme = Quantization(learn="ranges", start=0.5)
    one, other = train(scheme).model, train(scheme, mesh=mesh).model
    x, _ = batches()[0]
    np.testing.assert_allclose(other(x), one(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda: Quantization(learn="ranges", activations=None),
            "needs activations=, which is None",
        ),
        (lambda: Quantization(learn="ranges", decay=1), "from 0 to below 1, got 1"),
        (lambda: Quantization(learn="ranges", freeze=0), "above 0, up to 1, got 0"),
        (lambda: Quantization(start=-1), "at least 0, got -1"),
        (lambda: Quantization(freeze=0.2), "decay and freeze need learn='ranges'"),
        (
            lambda: train(Quantization(start=2)),
            "the run has 2 epochs, so that rounding would never begin",
        ),
        (
            lambda: train(Quantization(learn="ranges"), batches),
            "need the number of steps of the run",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(made, message):
    with pytest.raises(jaxonnx.InputError, match=re.escape(message)):
        made()


@pytest.mark.deep
def test_a_schedule_composes_with_adapters_and_sparsity():
    (x, y), _ = demo.digits()
    scheme = Quantization(learn="ranges", start=0.5)
    same = {"loss": LOSS, "optimizer": optax.adam(1e-3), "quantize": scheme, "batch_size": 64}
    data = x[:128], y[:128]
    adapted = jaxonnx.train(demo.model(), data, lora=jaxonnx.LoRA(rank=2), **same).model
    sparse = jaxonnx.train(demo.model(), data, sparsity="2:4", epochs=2, **same).model
    assert all(product.ok for product in jaxonnx.sparse.verify(sparse).products)
    for model in (adapted, sparse):
        proto = model.to_onnx()
        assert tensors_of(proto)["12.weight_quantized"].dtype == np.int8
        theirs = run(proto, x[:64])
        np.testing.assert_allclose(theirs, model(x[:64]), atol=0.02 * np.abs(theirs).max())
