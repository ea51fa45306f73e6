"""Files of other quantizers: trained at their own scales, and written with the same operators."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

import jaxonnx
from tests.support.exact_products import avoid_saturation

X = np.random.default_rng(0).normal(size=(4, 4, 8, 8)).astype(np.float32)
SETTINGS = {"loss": "squared_error", "quantize": "int8", "epochs": 2, "batch_size": 4}
UINT8, INT8 = QuantType.QUInt8, QuantType.QInt8
SYMMETRIC = {"ActivationSymmetric": True, "WeightSymmetric": True}
STATIC = {
    "operators": {"quant_format": QuantFormat.QOperator, "activation_type": UINT8},
    "symmetric int8": {"activation_type": INT8, "extra_options": SYMMETRIC},
    "uint16 activations": {"activation_type": QuantType.QUInt16},
    "int16 activations": {"activation_type": QuantType.QInt16, "extra_options": SYMMETRIC},
    "com.microsoft": {"activation_type": UINT8, "extra_options": {"UseQDQContribOps": True}},
}
"""Options of onnxruntime's `quantize_static`, beside one scale for each channel."""


FILES = Path(__file__).parent / "files"
"""What `make_files` writes."""
TOOLS = ("pt2e", "nncf", "brevitas")
FAST = ("operators", "symmetric int8", "brevitas")
"""Of each way in which a file has its integers, one."""


class Reader(CalibrationDataReader):
    def __init__(self):
        self.batches = iter([{"x": X}])

    def get_next(self):
        return next(self.batches, None)


def file_of(nodes, tensors):
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", 1, ["N", *X.shape[1:]])],
        [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def float_file():
    random = np.random.default_rng(1)
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["v1"]),
        helper.make_node("Relu", ["v1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["v2"]),
        helper.make_node("Flatten", ["v2"], ["v3"]),
        helper.make_node("MatMul", ["v3", "w3"], ["y"]),
    ]
    shapes = {"w1": (8, 4, 1, 1), "b1": (8,), "w2": (2, 8, 1, 1), "w3": (128, 3)}
    return file_of(nodes, {n: 0.3 * random.normal(size=s).astype("f") for n, s in shapes.items()})


def fake_quantized_file(clip):
    """Weights in floating point, QuantizeLinear, DequantizeLinear, as NNCF and PyTorch export them.

    Brevitas has a Clip of the integers between the two.
    """
    tensors = {t.name: numpy_helper.to_array(t) for t in float_file().graph.initializer}
    nodes = []

    def round_tensor(name, scale, axis=None):
        options = {} if axis is None else {"axis": axis}
        tensors[f"{name}/s"] = np.asarray(scale, np.float32)
        tensors[f"{name}/z"] = np.zeros(np.shape(scale), np.int8)
        pair = [f"{name}/s", f"{name}/z"]
        nodes.append(helper.make_node("QuantizeLinear", [name, *pair], [f"{name}/q"], **options))
        result = f"{name}/q"
        if clip:
            tensors.update({"least": np.int8(-7), "most": np.int8(7)})
            result = f"{name}/c"
            nodes.append(helper.make_node("Clip", [f"{name}/q", "least", "most"], [result]))
        nodes.append(
            helper.make_node("DequantizeLinear", [result, *pair], [f"{name}/d"], **options)
        )
        return f"{name}/d"

    for node in float_file().graph.node:
        if node.op_type in ("Conv", "MatMul"):
            axis = 0 if node.op_type == "Conv" else 1
            w = tensors[node.input[1]]
            most = np.abs(w).max(axis=tuple({*range(w.ndim)} - {axis}))
            node.input[1] = round_tensor(node.input[1], most / (7 if clip else 127), axis)
            node.input[0] = round_tensor(node.input[0], 0.03)
        nodes.append(node)
    return file_of(nodes, tensors)


def static_file(folder, name):
    onnx.save(float_file(), folder / "float.onnx")
    paths = folder / "float.onnx", folder / "q.onnx"
    quantize_static(*paths, Reader(), per_channel=True, weight_type=INT8, **STATIC[name])
    return onnx.load(folder / "q.onnx")


def describe(proto):
    """The nodes but for their order and zero points of biases, and the tensors."""
    nodes = [(n.op_type, n.domain, [*n.input][:2], [*n.output]) for n in proto.graph.node]
    return sorted(nodes), {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}


def file_of_others(name, folder):
    if name in TOOLS:
        return onnx.load(FILES / f"{name}.onnx")
    return fake_quantized_file(False) if name == "float weights" else static_file(folder, name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.deep] * (name not in FAST))
        for name in (*STATIC, "float weights", *TOOLS)
    ],
)
def test_a_file_of_others_is_trained_at_its_own_scales(name, tmp_path):
    before = file_of_others(name, tmp_path)
    targets = np.zeros((4, 3), np.float32)
    same = jaxonnx.train(before, (X, targets), optimizer=optax.sgd(0.0), **SETTINGS)
    nodes, tensors = describe(before)
    assert describe(same.model.to_onnx())[0] == nodes
    for tensor, value in describe(same.model.to_onnx())[1].items():
        np.testing.assert_array_equal(value, tensors[tensor])
    assert any(
        "3 of its tensors are trained" in note or "4 of" in note for note in same.history.notes
    )
    optimizer = optax.adam(1e-3 if name in TOOLS else 1e-2)
    result = jaxonnx.train(before, (X, targets), optimizer=optimizer, **SETTINGS)
    after = result.model.to_onnx()
    assert describe(after)[0] == nodes
    inputs = {part for node in after.graph.node for part in node.input}
    assert {tensor.name for tensor in after.graph.initializer} <= inputs
    changed = {n for n, x in describe(after)[1].items() if not np.array_equal(x, tensors[n])}
    assert sum(tensors[n].ndim > 1 for n in changed) == 3
    first, last = (row["loss"] for row in result.history.epochs)
    assert last < first
    options = onnxruntime.SessionOptions()
    if "16" in name:  # optimized, onnxruntime rounds activations of 16 bits to 8 before a MatMul
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(avoid_saturation(after).SerializeToString(), options)
    (theirs,) = session.run(None, {"x": X})
    np.testing.assert_allclose(result.model(X), theirs, atol=0.02 * np.abs(theirs).max())


@pytest.mark.parametrize("casts", [True, False], ids=["casts", "plain"])
def test_scales_in_constant_nodes_are_trained(casts, tmp_path):
    """pytorch#143497: converted modules, whose pairs have a Cast between and constants of each."""
    before = static_file(tmp_path, "symmetric int8")
    tensors = {t.name: t for t in before.graph.initializer}
    nodes = []
    for node in before.graph.node:
        for i, name in enumerate(node.input):
            if name in tensors:
                node.input[i] = constant = f"/{node.output[0]}/Constant_{i}_output_0"
                nodes.append(helper.make_node("Constant", [], [constant], value=tensors[name]))
        nodes.append(node)
        if node.op_type == "QuantizeLinear" and casts:
            result = node.output[0]
            node.output[0] = f"{result}/before"
            nodes.append(helper.make_node("Cast", [node.output[0]], [result], to=INT8.tensor_type))
    del before.graph.node[:], before.graph.initializer[:]
    before.graph.node.extend(nodes)
    onnx.checker.check_model(before)

    def run(proto):
        session = onnxruntime.InferenceSession(avoid_saturation(proto).SerializeToString())
        return session.run(None, {"x": X})[0]

    def count(proto):
        return sorted(node.op_type for node in proto.graph.node if node.op_type[0] != "C")

    targets = np.zeros((4, 3), np.float32)
    same = jaxonnx.train(before, (X, targets), optimizer=optax.sgd(0.0), **SETTINGS)
    assert count(same.model.to_onnx()) == count(before)
    np.testing.assert_array_equal(run(same.model.to_onnx()), run(before))
    result = jaxonnx.train(before, (X, targets), optimizer=optax.adam(1e-2), **SETTINGS)
    first, last = (row["loss"] for row in result.history.epochs)
    assert last < first
    result.model.save(tmp_path / "trained.onnx")
    file = onnx.load(tmp_path / "trained.onnx")
    np.testing.assert_allclose(result.model(X), run(file), atol=0.02 * np.abs(run(file)).max())
    pairs = {n.output[0]: n.input[1] for n in file.graph.node if n.op_type == "QuantizeLinear"}
    scales = {n.input[0]: n.input[1] for n in file.graph.node if n.op_type == "DequantizeLinear"}
    assert {name: scales[name] for name in pairs} == pairs  # one scale for both
    values = {t.name: numpy_helper.to_array(t) for t in file.graph.initializer}
    initial = {numpy_helper.to_array(t).tobytes() for t in tensors.values()}
    assert all(values[name].tobytes() not in initial for name in pairs.values())


def test_files_without_scales_to_train_are_refused(tmp_path):
    onnx.save(float_file(), tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "q.onnx", weight_type=UINT8)
    cases = (
        (onnx.load(tmp_path / "q.onnx"), "dynamically"),
        (fake_quantized_file(True), "Brevitas"),
        (onnx.load(FILES / "brevitas_int4.onnx"), "Clip.*Brevitas"),
    )
    for proto, message in cases:
        with pytest.raises(jaxonnx.InputError, match=message):
            jaxonnx.train(proto, (X, np.zeros((4, 3), "f")), optimizer=optax.sgd(0.1), **SETTINGS)
        onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": X})
