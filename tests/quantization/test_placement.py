"""Where `quantize` rounds: as onnxruntime needs it to compute with integers from end to end."""

import warnings
from collections import Counter

import jax
import numpy as np
import onnx
import onnx.inliner
import onnxruntime
import optax
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

import jaxonnx
from tests.support.exact_products import avoid_saturation
from tests.support.sweeps import sweep

X = np.random.default_rng(0).normal(size=(4, 4, 8, 8)).astype(np.float32)


def whole(*values):
    return np.array(values, np.int64)


class Net:
    """Builds a network between convolutions."""

    def __init__(self):
        self.nodes, self.tensors = [], []
        self.random = np.random.default_rng(1)

    def add(self, op, *inputs, outputs=1, **attributes):
        names = [f"v{len(self.nodes)}{'.' * i}" for i in range(outputs)]
        inputs = [x if isinstance(x, str) else self.tensor(x) for x in inputs]
        self.nodes.append(helper.make_node(op, inputs, names, **attributes))
        return names[0] if outputs == 1 else names

    def tensor(self, value):
        name = f"w{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def conv(self, x, inputs, features, relu=True):
        w = self.random.normal(size=(features, inputs, 1, 1)).astype(np.float32)
        x = self.add("Conv", x, w, kernel_shape=[1, 1])
        return self.add("Relu", x) if relu else x

    def finish(self, x):
        graph = helper.make_graph(
            self.nodes,
            "net",
            [helper.make_tensor_value_info("x", 1, ["N", *X.shape[1:]])],
            [helper.make_tensor_value_info(x, 1, None)],
            self.tensors,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def optimized_kinds(proto, folder):
    """Count the operators of the graph that onnxruntime's default session runs."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(proto.SerializeToString(), options)
    return Counter(node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node)


def run(proto, x):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(avoid_saturation(proto).SerializeToString(), options)
    return session.run(None, {"x": x})[0]


def halves(net, x):
    parts = net.add("Split", x, whole(4, 4), outputs=2, axis=1)
    return net.add("Concat", *reversed(parts), axis=1)


MOVED = {
    "Resize": lambda net, x: net.add("Resize", x, "", np.float32([1, 1, 2, 2]), mode="nearest"),
    "Slice": lambda net, x: net.add("Slice", x, whole(1), whole(7), whole(2)),
    "Gather": lambda net, x: net.add("Gather", x, whole(*range(7, -1, -1)), axis=1),
    "Split": halves,
    "Expand": lambda net, x: net.add("Expand", x, whole(2, 1, 8, 1, 1)),
    "Tile": lambda net, x: net.add("Tile", x, whole(1, 1, 2, 1)),
    "Transpose": lambda net, x: net.add("Transpose", x, perm=[0, 1, 3, 2]),
    "MaxPool": lambda net, x: net.add("MaxPool", x, kernel_shape=[2, 2]),
    "Sigmoid": lambda net, x: net.add("Mul", x, net.add("Sigmoid", x)),
}


def network(name):
    net = Net()
    x = net.conv("x", 4, 8, relu=name != "Sigmoid")
    x = MOVED[name](net, x)
    if name == "Expand":
        x = net.add("Reshape", x, whole(-1, 8, 8, 8))
    return net.finish(net.add("GlobalMaxPool", net.conv(net.conv(x, 8, 8), 8, 3, relu=False)))


@pytest.mark.parametrize("name", sweep(MOVED, "Split", "Expand", "Transpose", "MaxPool", "Sigmoid"))
def test_onnxruntime_computes_with_integers_between_convolutions(name, tmp_path):
    proto = network(name)
    after = jaxonnx.quantize(proto, X, jaxonnx.Quantization(calibration="minmax")).to_onnx()
    kinds = optimized_kinds(after, tmp_path)
    assert kinds["QLinearConv"] == 3
    # of the result of the last Conv, whose maxima are taken in floating point
    assert kinds["DequantizeLinear"] == kinds["QuantizeLinear"] == 1, kinds
    expected = run(proto, X)
    np.testing.assert_allclose(run(after, X), expected, atol=0.05 * np.abs(expected).max())
    if name == "Sigmoid":
        return
    used = {n.output[0]: n.input[1] for n in after.graph.node if n.op_type == "QuantizeLinear"}
    (node,) = (n for n in after.graph.node if n.op_type == name)
    scales = {n.input[0]: n.input[1] for n in after.graph.node if n.op_type == "QuantizeLinear"}
    before = next(n.input[0] for n in after.graph.node if node.input[0] in n.output)
    assert {used[before]} == {scales[output] for output in node.output}


def test_sums_that_are_read_in_floating_point_are_not_rounded():
    """Rounding them would only add conversions: a LayerNormalization has no integer kernel."""
    net = Net()
    x = net.add("Reshape", "x", whole(0, 0, -1))
    for _ in range(2):
        y = net.add("LayerNormalization", x, np.ones(64, "f"), np.zeros(64, "f"))
        x = net.add("Add", x, net.add("MatMul", y, net.random.normal(size=(64, 64)).astype("f")))
    after = jaxonnx.quantize(net.finish(x), X).to_onnx()
    producers = {name: n.op_type for n in after.graph.node for name in n.output}
    quantized = [n.input[0] for n in after.graph.node if n.op_type == "QuantizeLinear"]
    assert [producers.get(name) for name in quantized] == ["LayerNormalization"] * 2
    expected = run(net.finish(x), X)
    np.testing.assert_allclose(run(after, X), expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("pad", "shares"), [({}, True), ({"value": 1.0}, False), ({"mode": "reflect"}, True)]
)
def test_a_padding_shares_its_scale_if_it_adds_no_number(pad, shares):
    net = Net()
    values = [np.float32(pad["value"])] if "value" in pad else []
    pads = whole(0, 0, 1, 1, 0, 0, 1, 1)
    x = net.add("Pad", net.conv("x", 4, 8), pads, *values, mode=pad.get("mode", "constant"))
    after = jaxonnx.quantize(net.finish(net.conv(x, 8, 2)), X).to_onnx()
    scales = {n.input[0]: n.input[1] for n in after.graph.node if n.op_type == "QuantizeLinear"}
    assert (scales["v0"] == scales["v2"]) == shares


@pytest.mark.parametrize("learn", ["scales", "ranges"])
def test_training_keeps_shared_scales_shared(learn):
    net = Net()
    x = halves(net, MOVED["Resize"](net, net.conv("x", 4, 8)))
    proto = net.finish(net.add("GlobalAveragePool", net.conv(x, 8, 3, relu=False)))
    scheme = jaxonnx.Quantization(learn=learn)
    model = jaxonnx.quantize(proto, X, scheme)
    result = jaxonnx.train(
        model,
        (2 * X, np.ones((4, 3, 1, 1), np.float32)),
        loss="squared_error",
        optimizer=optax.adam(1e-2),
        quantize=scheme,
        epochs=2,
        batch_size=2,
    )
    after = result.model.to_onnx()
    scales = {n.input[0]: n.input[1] for n in after.graph.node if n.op_type == "QuantizeLinear"}
    assert len({scales[name] for name in ("v0", "v2", "v3", "v3.")}) == 1
    old, new = (
        {t.name: numpy_helper.to_array(t) for t in p.graph.initializer}
        for p in (model.to_onnx(), after)
    )
    assert old[scales["v0"]] != new[scales["v0"]]
    expected = np.asarray(result.model(X))
    np.testing.assert_allclose(run(after, X), expected, atol=0.02 * np.abs(expected).max())


class Reader(CalibrationDataReader):
    def __init__(self):
        self.batches = iter([{"x": X}])

    def get_next(self):
        return next(self.batches, None)


def test_operators_that_move_integers_are_trained_and_written_again(tmp_path):
    """Resize, Split and Slice of onnxruntime's QOperator files, which read and write uint8."""
    net = Net()
    x = MOVED["Slice"](net, halves(net, MOVED["Resize"](net, net.conv("x", 4, 8, relu=False))))
    onnx.save(net.finish(net.conv(x, 8, 3, relu=False)), tmp_path / "float.onnx")
    options = {"quant_format": QuantFormat.QOperator, "activation_type": QuantType.QUInt8}
    paths = tmp_path / "float.onnx", tmp_path / "q.onnx"
    quantize_static(*paths, Reader(), per_channel=True, **options)
    before = onnx.load(tmp_path / "q.onnx")
    kinds = Counter(node.op_type for node in before.graph.node)
    assert kinds["QLinearConv"] == 2
    model = jaxonnx.load(before)
    trained = jaxonnx.train(
        model,
        (X, np.zeros_like(model(X))),
        loss="squared_error",
        optimizer=optax.adam(1e-2),
        quantize="int8",
        epochs=2,
        batch_size=4,
    )
    first, last = (row["loss"] for row in trained.history.epochs)
    assert last < first
    after = trained.model.to_onnx()
    onnx.checker.check_model(after)
    assert Counter(node.op_type for node in after.graph.node) == kinds
    old, new = (
        {t.name: numpy_helper.to_array(t) for t in p.graph.initializer} for p in (before, after)
    )
    changed = {n for n in old if not np.array_equal(old[n], new[n])}
    assert sum(old[n].dtype == np.int8 for n in changed) == 2  # both weights, through the moves
    expected = np.asarray(trained.model(X))
    np.testing.assert_allclose(run(after, X), expected, atol=0.05 * np.abs(expected).max())


@pytest.mark.parametrize("high", [None, 6.0, 1.0])
def test_activations_that_the_range_makes_idle_are_left_out_of_the_file(high):
    """A Relu always, a Clip unless training has made the range of the integers wider."""
    net = Net()
    x = net.conv("x", 4, 8, relu=high is None)
    if high is not None:
        x = net.add("Clip", x, np.float32(0), np.float32(high))
    model = jaxonnx.quantize(net.finish(net.conv(x, 8, 2, relu=False)), X)
    wide = model.with_trainable(["w.", "v1_scale"])
    wide = wide.replace(params={**wide.params, "v1_scale": 2 * wide.params["v1_scale"]})
    for case, left in ((model, []), (wide, [] if high is None else ["Clip"])):
        after = case.to_onnx()
        onnx.checker.check_model(after)
        kinds = [node.op_type for node in after.graph.node]
        assert [kind for kind in kinds if kind in ("Clip", "Relu")] == left
        expected = np.asarray(case(X))
        np.testing.assert_allclose(run(after, X), expected, atol=0.02 * np.abs(expected).max())
    again = jaxonnx.load(model.to_onnx())
    assert again.to_onnx() == model.to_onnx()


def test_moving_ranges_keep_the_limits_of_activations_that_a_file_lacks():
    """Without its Relu, a Conv has negative numbers, which no range may begin to hold."""
    net = Net()
    x = net.conv(net.conv("x", 4, 8), 8, 2, relu=False)
    proto = net.finish(net.add("GlobalAveragePool", x))
    saved = jaxonnx.quantize(proto, X).to_onnx()
    assert "Relu" not in {node.op_type for node in saved.graph.node}
    targets = np.ones((4, 2, 1, 1), np.float32)
    result = jaxonnx.train(
        saved,
        (X, targets),
        loss="squared_error",
        optimizer=optax.sgd(0.0),
        quantize=jaxonnx.Quantization(learn="ranges", start=1),
        epochs=2,
        batch_size=4,
    )
    point = next(n.input[2] for n in result.model.to_onnx().graph.node if n.input[0] == "v0")
    stored = {t.name: numpy_helper.to_array(t) for t in result.model.to_onnx().graph.initializer}
    assert stored[point] == 0
    expected = np.square(run(proto, X) - targets).mean()
    first, second = (row["loss"] for row in result.history.epochs)
    np.testing.assert_allclose(first, expected, rtol=0.02)  # with the integer weights' numbers
    np.testing.assert_allclose(second, expected, rtol=0.05)


def test_a_network_without_quantized_activations_is_trained_by_its_scheme():
    """Of recurrences only the weights are rounded, whatever the scheme says of activations."""
    net, random = Net(), np.random.default_rng(0)
    x = net.add("Reshape", "x", whole(0, 8, 32))
    w, r = (random.normal(size=(1, 12, n)).astype("f") for n in (32, 4))
    proto = net.finish(net.add("GRU", x, w, r, hidden_size=4))
    scheme = jaxonnx.Quantization()
    model = jaxonnx.quantize(proto, X, scheme)
    targets = np.asarray(model(X))
    settings = {"loss": "squared_error", "optimizer": optax.sgd(0.1), "epochs": 1}
    assert jaxonnx.train(model, (X, targets), quantize=scheme, batch_size=4, **settings)
    weights = jaxonnx.quantize(network("Slice"), X, jaxonnx.Quantization(activations=None))
    data = X, np.asarray(weights(X))
    with pytest.raises(jaxonnx.InputError, match="activations of floating point"):
        jaxonnx.train(weights, data, quantize=scheme, batch_size=4, **settings)


@pytest.mark.parametrize("kind", ["float16", "float64"])
@pytest.mark.parametrize("wide", [False, True])
def test_networks_of_another_type_than_float32_name_the_way_out(kind, wide):
    """Also without JAX's 64-bit types, where a network in float64 is computed in float32."""
    declared = {"float16": "float16", "float64": "double"}[kind]
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> '
        f"g ({declared}[n, 4] x) => ({declared}[n, 3] y) {{ y = MatMul(x, w) }}"
    )
    w = np.random.default_rng(0).normal(size=(4, 3)).astype(kind)
    proto.graph.initializer.append(numpy_helper.from_array(w, "w"))
    with jax.enable_x64(wide), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of 64-bit outputs
        model, x = jaxonnx.load(proto), np.ones((8, 4), kind)
        cure = "convert.model, 'float32'" if kind == "float16" else "export it again in float32"
        for act in (
            lambda: jaxonnx.quantize(model, x, "int8"),
            lambda: jaxonnx.quantize(model, x, "int4", method="gptq"),
            lambda: jaxonnx.sensitivity(model, x, ("int8",)),
            lambda: jaxonnx.train(model, (x, x[:, :3]), loss="squared_error", quantize="int8"),
        ):
            with pytest.raises(jaxonnx.InputError, match=f"'w' is.*{cure}"):
                act()


def test_weights_that_functions_multiply_by_name_the_way_out():
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
        g (float[n, 4] x) => (float[n, 4] y) { y = local.block(x, w) }
        <opset_import: ["" : 21], domain: "local">
        block (x, w) => (y) { h = MatMul(x, w) \n y = Tanh(h) }"""
    )
    w = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(w, "w"))
    x = np.ones((8, 4), np.float32)
    with pytest.raises(jaxonnx.InputError, match=r"block.*'w'.*inline_local_functions"):
        jaxonnx.quantize(proto, x, "int8")
    jaxonnx.quantize(onnx.inliner.inline_local_functions(proto), x, "int8")
