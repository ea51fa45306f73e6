"""Ranges of activations on data that say little of them, and what is said of it."""

import re
import warnings

import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

import jaxonnx
from tests.support.pictures import net

RNG = np.random.default_rng(0)
W = RNG.normal(size=(3, 8, 8)).astype(np.float32)


def network():
    """Two branches, of `x` and of what is positive of `z`; their sum is rounded."""
    tensors = {"w0": W[0], "w1": W[1], "w2": W[2]}
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"]),
        helper.make_node("Relu", ["z"], ["r"]),
        helper.make_node("MatMul", ["r", "w1"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("MatMul", ["c", "w2"], ["y"]),
    ]
    return model_of(nodes, tensors, ["y"], ["x", "z"])


def model_of(nodes, tensors, outputs, inputs=("x",)):
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8]) for name in names]
        for names in (inputs, outputs)
    ]
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in tensors.items()]
    graph = helper.make_graph(nodes, "g", *ends, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def run(proto, x, **more):
    return onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x, **more})


def distance(one, two):
    return np.sqrt(np.square(one - two).sum() / np.square(two).sum())


def test_what_no_row_reaches_stays_in_floating_point():
    """Rows that reach it, and with it leave no other range, lose as little as others."""
    x = RNG.uniform(-4, 4, (256, 8)).astype(np.float32)
    z = RNG.uniform(0, 0.3, (256, 8)).astype(np.float32)
    with pytest.warns(UserWarning, match=r"^'r', 'b': 0 in all calibration data.*pass examples"):
        file = jaxonnx.quantize(network(), (x, -z)).to_onnx()
    rounded = {n.input[0] for n in file.graph.node if n.op_type == "QuantizeLinear"}
    assert rounded == {"x", "c"}
    lost = [distance(run(file, x, z=v)[0], run(network(), x, z=v)[0]) for v in (-z, z)]
    assert lost[1] < 1.2 * lost[0] < 0.02


@pytest.mark.parametrize("calibration", ["minmax", "average", "percentile", "mse"])
@pytest.mark.parametrize("rows", ["one", "constant", "zeros"])
def test_little_data_gives_ranges(calibration, rows):
    x = RNG.uniform(-1, 3, (64, 8)).astype(np.float32)
    x = {"one": x[:1], "constant": np.full((8, 8), 1.5, np.float32), "zeros": 0 * x}[rows]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*0 in all calibration data")
        model = jaxonnx.quantize(network(), (x, x), jaxonnx.Quantization(calibration=calibration))
    (floats,), (theirs,) = run(network(), x, z=x), run(model.to_onnx(), x, z=x)
    np.testing.assert_allclose(theirs, floats, atol=0.02 * np.abs(floats).max())
    onnx.checker.check_model(model.to_onnx())


def test_data_in_one_piece_give_ranges_in_any_order(tmp_path):
    """pytorch#45185: a folder of images has the classes one behind the other."""
    scheme = jaxonnx.Quantization(calibration="minmax")

    def scale(model, data, **options):
        file = jaxonnx.quantize(model, data, scheme, batches=4, **options).to_onnx()
        tensors = {t.name: numpy_helper.to_array(t) for t in file.graph.initializer}
        node = next(node for node in file.graph.node if node.op_type == "QuantizeLinear")
        return tensors[node.input[1]]

    model = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": W[0]}, ["y"])
    x = np.repeat(np.float32([[0.1], [0.1], [1], [1]]), 32, 0) * np.ones(8, np.float32)
    np.testing.assert_allclose(scale(model, x, batch_size=4), 1 / 255, rtol=1e-6)
    np.testing.assert_allclose(scale(model, [*np.split(x, 32)]), 0.1 / 255, rtol=1e-6)
    for light in (51, 255):
        (tmp_path / f"{light}").mkdir()
        for i in range(32):
            Image.new("L", (2, 4), light).save(tmp_path / f"{light}" / f"{i}.png")
    pictures = net(["n", 1, 4, 2], 2)
    options = {"batch_size": 4, "preprocess": {"mean": 0.0, "std": 1.0}}
    np.testing.assert_allclose(scale(pictures, str(tmp_path), **options), 1 / 255, rtol=1e-6)


def clipped():
    """A large output and a small one, of which only the small one loses when `x` is clipped."""
    large = np.where(np.arange(8)[:, None] == 0, 0, 1000 * W[0]).astype(np.float32)
    small = np.where(np.arange(8)[:, None] == 0, W[1], 0).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", w], [f"y{w}"]) for w in ("large", "small")]
    x = RNG.normal(size=(4096, 8)).astype(np.float32)
    x[:, 0] = np.where(np.arange(4096) % 2048 == 0, 7, 0)
    return model_of(nodes, {"large": large, "small": small}, ["ylarge", "ysmall"]), x


def test_each_output_is_compared_and_the_clipped_share_is_said():
    """Errors and share are those of the saved file in onnxruntime."""
    proto, x = clipped()
    scheme = jaxonnx.Quantization(calibration="percentile")
    with pytest.warns(UserWarning, match="changes the output 'ysmall' on") as caught:
        file = jaxonnx.quantize(proto, x, scheme, batch_size=2048).to_onnx()
    (message,) = (str(one.message) for one in caught)
    error = np.mean([distance(run(file, p)[1], run(proto, p)[1]) for p in np.split(x, 2)])
    percents = [float(number) / 100 for number in re.findall(r"([\d.]+)%", message)]
    np.testing.assert_allclose(percents[0], error, rtol=0.02)
    stored = {t.name: numpy_helper.to_array(t) for t in file.graph.initializer}
    scale, point = stored["x_scale"], float(stored["x_zero_point"])
    share = np.mean((x / scale + point < -0.5) | (x / scale + point > 255.5))
    np.testing.assert_allclose(percents[-1], share, atol=1e-4)
    assert 0 < share < 0.01


def test_training_notes_the_clipped_share():
    proto, x = clipped()
    targets = dict(zip(("ylarge", "ysmall"), run(proto, x), strict=True))
    losses = dict.fromkeys(targets, "squared_error")
    scheme = jaxonnx.Quantization(calibration="percentile")
    with pytest.warns(UserWarning, match="changes the output 'ysmall' on"):
        result = jaxonnx.train(
            *(proto, (x, targets)),
            loss=losses,
            optimizer=optax.sgd(0.0),
            quantize=scheme,
            batch_size=2048,
        )
    (note,) = (n for n in result.history.notes if "weights are rounded" in n)
    assert re.search(
        r"the ranges clip at most 0\.\d\d% of the numbers of an activation \('x'\)", note
    )
