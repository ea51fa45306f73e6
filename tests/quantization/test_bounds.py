"""What `max_loss` keeps in more bits, judged by onnxruntime with the saved files."""

import re

import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxonnx
from jaxonnx.cli import main

RNG = np.random.default_rng(0)
X = RNG.normal(size=(600, 16)).astype(np.float32)


def network(outlier, name="w2"):
    """A network of three layers, the second of which reads one channel of `outlier`."""
    w1, w2, w3 = (RNG.normal(size=(16, 16)).astype(np.float32) for _ in range(3))
    w2 = np.where(np.arange(16)[:, None] == 0, 0, w2).astype(np.float32)
    b1 = np.where(np.arange(16) == 0, outlier, 0).astype(np.float32)
    weights = {"w1": w1 / 4, "b1": b1, name: w2 / 4, "w3": w3[:, :5]}
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], "first"),
        helper.make_node("MatMul", ["h", name], ["m"], "second"),
        helper.make_node("Relu", ["m"], ["r"]),
        helper.make_node("MatMul", ["r", "w3"], ["y"], "third"),
    ]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size])
        for name, size in (("x", 16), ("y", 5))
    ]
    tensors = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def run(file, x=X):
    return onnxruntime.InferenceSession(file).run(None, {"x": x})[0]


SMALL, LARGE = network(600), network(1e7)
LABELS = run(SMALL.SerializeToString()).argmax(1)
"""What the network itself says: its accuracy is 1, with either channel."""


def accuracy(model, path, x=X, labels=LABELS):
    model.save(path)
    return (run(str(path), x).argmax(1) == labels).mean()


def test_the_activation_that_rounding_ruins_stays(tmp_path):
    """Of six tensors, the weights of three layers and what they read, only those of the second.

    With its weight in 8 bits, onnxruntime would round the activation to int8 by itself.
    """
    plain = accuracy(jaxonnx.quantize(SMALL, X), tmp_path / "plain.onnx")
    assert plain < 0.7
    model = jaxonnx.quantize(SMALL, (X, LABELS), max_loss=0.02, metric="accuracy", validation=0.5)
    found = model.sensitivity
    assert found.wider_types == {"h": "uint16", "w2": "int16"}
    assert found.ranking[0] == "h"
    assert found.trials[0].loss > 0.2
    assert found.trials[-1].loss <= 0.02
    assert accuracy(model, tmp_path / "bound.onnx") >= 0.98
    table = str(found).splitlines()
    assert re.fullmatch(r"h +16 +\S+ +\S+ +uint16", table[1])
    assert re.fullmatch(rf"{len(found.trials)} +\S+ +[\d,]+ +2 of 6", table[-1])


def test_a_bound_of_zero_keeps_floating_point_where_16_bits_do_not_do(tmp_path):
    labels = run(LARGE.SerializeToString()).argmax(1)
    data = X, labels
    model = jaxonnx.quantize(LARGE, data, max_loss=0, metric="accuracy", validation=data)
    assert model.sensitivity.wider_types["h"] == "float32"
    assert accuracy(model, tmp_path / "bound.onnx", X, labels) == 1
    assert "QuantizeLinear" in {node.op_type for node in model.to_onnx().graph.node}


def test_a_bound_that_only_floating_point_meets_is_an_error():
    """The default metric is the squared change of the outputs, here of all but one activation."""
    with pytest.raises(jaxonnx.InputError, match="is met in floating point only") as caught:
        jaxonnx.quantize(SMALL, X[:64], max_loss=0)
    message = str(caught.value)
    best = float(re.search(r"tried loses ([\d.e-]+)", message)[1])
    rows = [line.split() for line in message.split("bytes")[-1].splitlines()[1:]]
    assert 0 < best == min(float(row[1]) for row in rows if float(row[1]))
    assert len(rows) > 6


def test_weights_that_blocks_do_not_divide_stay(tmp_path):
    """Blocks of 6 divide none of 16 inputs; activations in floats leave no type without blocks."""
    wide = RNG.normal(size=(16, 12)).astype(np.float32)
    narrow = RNG.normal(size=(12, 5)).astype(np.float32)
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 21]>
        g (float[n,16] x) => (float[n,5] y) { h = MatMul(x, wide) y = MatMul(h, narrow) }""")
    for name, value in (("wide", wide), ("narrow", narrow)):
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    scheme = jaxonnx.Quantization(weights="int4", activations=None, block=6)
    with pytest.raises(jaxonnx.InputError, match=r"'wide' has 16 inputs, .*pass max_loss="):
        jaxonnx.quantize(proto, X, scheme)
    model = jaxonnx.quantize(proto, X, scheme, max_loss=0.05)
    stored = {tensor.name for tensor in model.to_onnx().graph.initializer}
    assert {"wide", "narrow_quantized"} <= stored
    assert [*model.sensitivity.errors["narrow"]] == ["int4", "int8", "int16"]
    assert "wide" in str(model.sensitivity)
    model.save(tmp_path / "small.onnx")
    exact = X @ wide @ narrow
    assert np.square(run(str(tmp_path / "small.onnx")) - exact).sum() < 0.05 * (exact**2).sum()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_loss": -0.1}, "max_loss must be a finite number of at least 0, got -0.1"),
        ({"metric": "accuracy"}, "metric and validation go with max_loss"),
        ({"max_loss": 0.1, "metric": "acuracy"}, "there is no metric 'acuracy'"),
        ({"max_loss": 0.1, "metric": "confusion_matrix"}, "is a table"),
        ({"max_loss": 0.1, "metric": "accuracy", "data": X}, "pass validation data"),
        ({"max_loss": 0.1, "metric": "accuracy", "data": X, "validation": X}, "targets"),
        (
            {"max_loss": 0.1, "metric": "accuracy", "data": [(X, LABELS)] * 3},
            "pass validation data",
        ),
        (
            {"max_loss": 0.1, "scheme": jaxonnx.Quantization(reduce_range=True)},
            "chooses among integer types",
        ),
    ],
)
def test_what_a_bound_lacks_is_said(arguments, message):
    arguments = {"data": (X, LABELS), **arguments}
    with pytest.raises(jaxonnx.Error, match=message):
        jaxonnx.quantize(SMALL, **arguments)


def test_a_function_and_a_loss_are_metrics(tmp_path):
    """Each function sees outputs and targets, and smaller is better."""
    loss = "softmax_cross_entropy_with_integer_labels"
    exact = optax.losses.softmax_cross_entropy_with_integer_labels(
        run(SMALL.SerializeToString()), LABELS
    )

    def errors(outputs, targets):
        return (outputs.argmax(1) != targets).astype(float)

    for metric in (loss, errors):
        data = X, LABELS
        model = jaxonnx.quantize(SMALL, data, max_loss=0.05, metric=metric, validation=data)
        model.save(tmp_path / "q.onnx")
        theirs = run(str(tmp_path / "q.onnx"))
        if metric is loss:
            lost = optax.losses.softmax_cross_entropy_with_integer_labels(theirs, LABELS) - exact
        else:
            lost = theirs.argmax(1) != LABELS
        assert lost.mean() <= 0.05
        np.testing.assert_allclose(lost.mean(), model.sensitivity.trials[-1].loss, atol=0.01)


def test_training_starts_within_the_bound():
    scheme = jaxonnx.Quantization(max_loss=0.05)
    result = jaxonnx.train(
        SMALL,
        (X, LABELS),
        loss="softmax_cross_entropy_with_integer_labels",
        optimizer=optax.sgd(0.0),
        epochs=1,
        quantize=scheme,
        validation=(X, LABELS),
        validate_first=True,
    )
    (note,) = (n for n in result.history.notes if "weights are rounded" in n)
    assert re.search(r"2 tensors have more bits .* changes the loss by \S+, at most 0.05", note)
    assert result.model.sensitivity.wider_types == {"h": "uint16", "w2": "int16"}
    lost = optax.losses.softmax_cross_entropy_with_integer_labels
    before, after = run(SMALL.SerializeToString()), run(result.model.to_onnx().SerializeToString())
    assert (lost(after, LABELS) - lost(before, LABELS)).mean() <= 0.05
    with pytest.raises(jaxonnx.InputError, match="no data to measure ranges on"):
        jaxonnx.training.step(SMALL, "squared_error", optax.sgd(0.1), quantize=scheme)


def test_the_error_of_an_activation_is_that_of_a_file_which_rounds_only_it():
    found = jaxonnx.sensitivity(SMALL, X[:128], ("int8",), activations=("uint8", "uint16"))
    assert found.types == ("int8", "uint8", "uint16")
    assert [*found.errors] == ["w1", "w2", "w3", "x", "h", "r"]
    whole = jaxonnx.quantize(SMALL, X[:128]).to_onnx()
    stored = {t.name: t for t in whole.graph.initializer}
    file = type(SMALL)()
    file.CopyFrom(SMALL)
    file.graph.initializer.extend([stored["h_scale"], stored["h_zero_point"]])
    for node in file.graph.node:
        if node.name == "second":
            node.input[0] = "d"
    parameters = ["h_scale", "h_zero_point"]
    file.graph.node.insert(1, helper.make_node("QuantizeLinear", ["h", *parameters], ["q"]))
    file.graph.node.insert(2, helper.make_node("DequantizeLinear", ["q", *parameters], ["d"]))
    before, after = (run(f.SerializeToString(), X[:128]) for f in (SMALL, file))
    error = np.square(after - before).sum() / np.square(before).sum()
    np.testing.assert_allclose(found.errors["h"]["uint8"], error, rtol=1e-3)
    assert found.errors["h"]["uint16"] < 1e-3 * error
    axes = found.plot()
    assert len(axes.get_yticklabels()) == 6


def test_the_command_line_takes_a_bound(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.onnx").write_bytes(SMALL.SerializeToString())
    np.savez("data.npz", x=X, y=LABELS)
    command = "quantize net.onnx --data data.npz -o q.onnx --max-loss 0.02 --metric accuracy"
    assert main(f"{command} --validation data.npz".split()) == 0
    assert re.search(r"h +16 .* uint16\n", capsys.readouterr().out)
    assert (run("q.onnx").argmax(1) == LABELS).mean() >= 0.98
