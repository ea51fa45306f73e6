"""Values that both the main graph and the body of a Loop, a Scan or an If read."""

import itertools

import numpy as np
import onnx
import optax
import pytest
from onnx import helper, numpy_helper

import jaxonnx
from jaxonnx import Quantization
from tests.support.sessions import outputs_everywhere
from tests.support.sweeps import sweep

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8, 3, 8)).astype(np.float32)
FLOAT, INT64, BOOL = (getattr(onnx.TensorProto, name) for name in ("FLOAT", "INT64", "BOOL"))


def value(name, shape=None, kind=FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def node(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs.split(), outputs.split(), **attributes)


def loop(captured):
    step = [node("MatMul", f"state {captured}", "product"), node("Tanh", "product", "next")]
    nodes = [*step, node("Identity", "more", "goes_on")]
    inputs = [value("i", [], INT64), value("more", [], BOOL), value("state")]
    body = helper.make_graph(nodes, "body", inputs, [value("goes_on", [], BOOL), value("next")])
    return [helper.make_node("Loop", ["count", "", "first"], ["last"], body=body)]


def scan(captured):
    step = [node("MatMul", f"state {captured}", "product"), node("Add", "product part", "next")]
    body = helper.make_graph(step, "body", [value("state"), value("part")], [value("next")])
    return [node("Scan", "first steps", "last", body=body, num_scan_inputs=1)]


def branch(captured):
    nodes = [node("MatMul", f"first {captured}", "product")]
    then = helper.make_graph(nodes, "then", [], [value("product")])
    nodes = [node("Tanh", "first", "otherwise")]
    otherwise = helper.make_graph(nodes, "otherwise", [], [value("otherwise")])
    return [
        node("ReduceSum", "x", "sum", keepdims=0),
        node("Equal", "sum sum", "is_number"),
        node("If", "is_number", "last", then_branch=then, else_branch=otherwise),
    ]


def network(inner, first, **more):
    """Return a graph of a first layer, `inner`, which reads and captures values, and a last one."""
    tensors = {"w": RANDOM.normal(size=(8, 8)), "v": RANDOM.normal(size=(8, 4)), **more}
    tensors = {name: x.astype(np.float32) * 0.4 for name, x in tensors.items()}
    tensors |= {"zero": np.array(0), "count": np.array(3)}
    nodes = [
        node("Transpose", "x", "steps", perm=[1, 0, 2]),
        node("Gather", "steps zero", "x0"),
        *(node(*parts) for parts in first),
        *inner,
        node("MatMul", "last v", "y"),
    ]
    tensors = [numpy_helper.from_array(x, name) for name, x in tensors.items()]
    graph = helper.make_graph(nodes, "net", [value("x", ["N", 3, 8])], [value("y")], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


INT4 = Quantization(weights="int4", activations=None)
WAYS = {
    "int8": lambda model: jaxonnx.quantize(model, X, "int8"),
    "int4": lambda model: jaxonnx.quantize(model, X, INT4),
    "GPTQ": lambda model: jaxonnx.quantize(model, X, INT4, method="gptq"),
    "AWQ": lambda model: jaxonnx.quantize(model, X, INT4, method="awq"),
    "trained": lambda model: (
        jaxonnx.train(
            model,
            (X, np.zeros((8, 4), np.float32)),
            loss="squared_error",
            optimizer=optax.sgd(1e-3),
            quantize="int8",
            progress=False,
        ).model
    ),
}


@pytest.mark.parametrize(
    ("inner", "way"), sweep(itertools.product([loop, scan, branch], WAYS), 0, 2, 3, 4, 5, 9, 10, 11)
)
def test_a_weight_is_rounded_for_the_body_that_captures_it(inner, way):
    proto = network(inner("w"), [("MatMul", "x0 w", "first")])
    model = WAYS[way](jaxonnx.load(proto))
    saved = model.to_onnx()
    assert "w" not in {tensor.name for tensor in saved.graph.initializer}
    # onnxruntime's MatMulNBits rounds its input to 8 bits
    tolerance = 1e-5 if way in ("int8", "trained") else 2e-2
    outputs = [*outputs_everywhere(saved, {"x": X})]
    size = np.abs(outputs[0]).max()
    for output in outputs:
        np.testing.assert_allclose(output, model(X), atol=tolerance * size)


def test_a_relu_that_a_branch_captures_stays():
    """Alone in front of QuantizeLinear it would be idle, and left out of the saved file."""
    *condition, choice = branch("u")
    choice.output[0] = "chosen"
    inner = [*condition, choice, node("Add", "chosen other", "last")]
    first = [
        ("MatMul", "x0 w", "before"),
        ("Relu", "before", "first"),
        ("MatMul", "first u", "other"),
    ]
    proto = network(inner, first, u=RANDOM.normal(size=(8, 8)))
    model = jaxonnx.quantize(jaxonnx.load(proto), X, Quantization(calibration="minmax"))
    for output in outputs_everywhere(model.to_onnx(), {"x": X}):
        np.testing.assert_allclose(output, model(X), atol=1e-5)


def test_adapters_as_nodes_reach_the_body(tmp_path):
    model = jaxonnx.load(network(scan("w"), [("MatMul", "x0 w", "first")]))
    result = jaxonnx.train(
        model,
        (X, np.zeros((8, 4), np.float32)),
        loss="squared_error",
        optimizer=optax.sgd(1e-2),
        lora=jaxonnx.LoRA(rank=2),
        progress=False,
    )
    adapted = result.lora.attach(model)
    adapted.save(tmp_path / "net.onnx", adapters="nodes")
    for output in outputs_everywhere(onnx.load(tmp_path / "net.onnx"), {"x": X}):
        np.testing.assert_allclose(output, adapted(X), atol=1e-5)
