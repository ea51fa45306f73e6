"""`validate` says yes of files that are right, and no of each thing that is made wrong."""

import json
import sys

import jax
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import jaxonnx
from jaxonnx import demo, registry, validation
from jaxonnx.cli import main
from tests.support.paths import DATA


def rows(result):
    """The verdicts by the name of the check; a check with several rows holds if all of these do."""
    verdicts = {}
    for row in result.rows:
        verdicts[row.name] = verdicts.get(row.name, True) and row.ok
    return verdicts


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    path = tmp_path_factory.mktemp("network") / "net.onnx"
    demo.mlp().save(path)
    return path


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("lenet.dynamo.onnx", set()),
        pytest.param("transformer.dynamo.onnx", set(), marks=pytest.mark.deep),
        pytest.param("lenet_bn.legacy.onnx", {"state"}, marks=pytest.mark.deep),
        pytest.param("lstm.legacy.onnx", set(), marks=pytest.mark.deep),
        pytest.param("mobilenet.legacy.onnx", {"state"}, marks=pytest.mark.deep),
        pytest.param("transformers/bert", {"state", "constant"}, marks=pytest.mark.deep),
        pytest.param("llm/qwen3-optimum", {"state", "constant"}, marks=pytest.mark.deep),
        pytest.param("llm/qwen3-genai", {"state", "constant"}, marks=pytest.mark.deep),
    ],
)
def test_files_that_are_right(name, more):
    result = jaxonnx.validate(DATA / name)
    assert result.ok, str(result)
    always = {"outputs, as onnxruntime", "untouched save", "gradients", "trained"}
    always |= {"file, as onnx's checker"}
    assert rows(result).keys() >= always
    assert rows(result).keys() <= always | more
    assert rows(result)["gradients"]


def test_data_are_compared_at_several_sizes(network):
    (x, _), _ = demo.digits()
    result = jaxonnx.validate(network, x)
    assert result.ok, str(result)
    texts = [row.text.partition(":")[0] for row in result.rows if "onnxruntime" in row.name]
    assert texts[2:] == ["data 1x1x8x8", "data 3x1x8x8", "data 32x1x8x8"]
    assert "32x1x8x8" in result._repr_html_()


def change_weight(path, changed):
    proto = onnx.load(path)
    tensor = proto.graph.initializer[-1]
    array = numpy_helper.to_array(tensor).copy()
    array.flat[0] += 0.1
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save(proto, changed)
    return tensor.name


def test_inputs_may_be_called_as_arguments_are():
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[n, 3] rng, float[3] params, float[3] state, float[3] model) => (float[n, 3] y)
    <float[3] w = {0.5, -1.5, 2}> {
    c = Mul (rng, w) a = Mul (c, params) b = Add (a, state) y = Sub (b, model) }"""
    result = jaxonnx.validate(onnx.parser.parse_model(text))
    assert result.ok, result


def test_another_file_with_a_changed_weight(network, tmp_path):
    changed = tmp_path / "changed.onnx"
    name = change_weight(network, changed)
    result = jaxonnx.validate(network, against=changed)
    assert not result.ok
    assert rows(result)["outputs, as onnxruntime"]
    assert not rows(result)["outputs, as the other"]
    (reader,) = (node for node in onnx.load(network).graph.node if name in node.input)
    assert f"the first value that differs is '{reader.output[0]}', of Gemm" in str(
        result.rows[-1].text
    )
    assert jaxonnx.validate(network, against=changed, tolerance=0.5).ok
    assert jaxonnx.validate(network, against=network).ok


def replace(monkeypatch, name, function):
    """Let an operator compute something else."""
    monkeypatch.setitem(vars(registry.lookup("", name, 17)), "function", function)


def test_an_operator_that_is_slightly_wrong(network, monkeypatch):
    replace(monkeypatch, "Relu", lambda x: jax.nn.leaky_relu(x, 1e-3))
    result = jaxonnx.validate(network)
    (relu, *_) = (node for node in onnx.load(network).graph.node if node.op_type == "Relu")
    assert f"the first value that differs is '{relu.output[0]}', of Relu" in result.rows[0].text
    result = rows(result)
    assert not result.pop("outputs, as onnxruntime")
    assert all(ok is not False for ok in result.values())


def test_a_gradient_that_is_slightly_wrong(network, monkeypatch):
    @jax.custom_jvp
    def relu(x):
        return jax.nn.relu(x)

    relu.defjvp(lambda x, t: (relu(x[0]), 1.15 * jax.numpy.where(x[0] > 0, t[0], 0)))
    replace(monkeypatch, "Relu", lambda x: relu(x))
    result = jaxonnx.validate(network)
    assert not rows(result)["gradients"], str(result)
    assert rows(result)["outputs, as onnxruntime"]


def test_a_save_that_changes_bits(network, tmp_path):
    changed = tmp_path / "changed.onnx"
    assert validation.find_changes(network, network) == []
    name = change_weight(network, changed)
    assert validation.find_changes(network, changed) == [f"tensor '{name}' has other bits"]
    proto = onnx.load(network)
    next(n for n in proto.graph.node if n.op_type == "Relu").op_type = "Tanh"
    assert validation.find_changes(network, proto) == ["a node Relu is missing or changed"]


def test_integers_are_those_of_onnxruntime(monkeypatch):
    (x, _), _ = demo.digits()
    model = jaxonnx.quantize(demo.mlp(), x[:64], jaxonnx.Quantization(reduce_range=True))
    right = rows(jaxonnx.validate(model, x))
    assert right["integers, as onnxruntime"]
    assert right["gradients"] is None  # straight-through
    op = registry.lookup("", "QuantizeLinear", 17)
    function = op.function

    def quantize(x, scale, *rest, **named):
        return function(x, 1.02 * scale, *rest, **named)

    replace(monkeypatch, "QuantizeLinear", quantize)
    assert not rows(jaxonnx.validate(model, x))["integers, as onnxruntime"]


def test_sparsity_is_proved(tmp_path):
    model = demo.mlp()
    weight = "body_weight"
    dense = np.asarray(model.params[weight])
    pruned = {**model.params, weight: jax.numpy.where(jaxonnx.sparse.mask(dense), dense, 0)}
    path = tmp_path / "sparse.onnx"
    model.replace(params=pruned).with_sparsity(select=weight).save(path)
    assert rows(jaxonnx.validate(path))["sparsity"]
    proto = onnx.load(path)
    (tensor,) = (t for t in proto.graph.initializer if t.name == weight)
    tensor.CopyFrom(numpy_helper.from_array(dense, weight))
    result = rows(jaxonnx.validate(proto))
    assert not result["sparsity"]


def test_what_the_checker_of_onnx_refuses_is_told():
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x) => (float[n, 4] y)
        { y = Tanh(x) }"""
    proto = onnx.parser.parse_model(text)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    result = jaxonnx.validate(proto)
    (row,) = (row for row in result.rows if "checker" in row.name)
    assert result.ok
    assert row.ok is None
    assert "refuses it: Field 'shape' of 'type' is required" in row.text


def test_without_onnxruntime_nothing_is_proved(network, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    result = jaxonnx.validate(network)
    assert not result.ok
    assert "onnxruntime is not installed" in result.rows[0].text


def test_the_command(network, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (x, _), _ = demo.digits()
    np.savez("data.npz", x=x[:8])
    assert main(["validate", str(network), "--data", "data.npz", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"]
    assert {row["name"] for row in said["rows"]} >= {"gradients", "untouched save"}
    change_weight(network, "changed.onnx")
    assert main(["validate", str(network), "--against", "changed.onnx"]) == 1
    assert "first value" in capsys.readouterr().out


OPEN = """<ir_version: 8, opset_import: ["": 17]>
g (float[n, 3, h, w] x) => (float[n, 3, h, w] y) { y = Reshape (x, s) }"""


def test_sizes_that_a_file_does_not_take(tmp_path):
    text = OPEN.replace("{ y", "<int64[4] s = {-1, 3, 24, 24}> { y")
    onnx.save(onnx.parser.parse_model(text), tmp_path / "net.onnx")
    result = jaxonnx.validate(tmp_path / "net.onnx")
    assert not result.ok
    assert "sizes of open dimensions" in result.rows[0].text
    assert jaxonnx.validate(tmp_path / "net.onnx", sizes={"h": 24, "w": 24}).ok


def test_pictures_whose_channels_are_last(tmp_path):
    """As Keras has them: four numbers are added to the places of a picture of even sides."""
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[n, h, w, 3] x) => (float[n, 3, h, w] y)
    <float[1, 1, 1, 2, 1, 2] four = {1, 2, 3, 4}, int64[6] parts = {0, 3, 32, 2, -1, 2}> {
        first = Transpose <perm = [0, 3, 1, 2]> (x)
        square = Reshape (first, parts)
        sum = Add (square, four)
        shape = Shape (first)
        y = Reshape (sum, shape)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "net.onnx")
    result = jaxonnx.validate(tmp_path / "net.onnx")
    assert result.ok, str(result)
    assert "1x64x64x3" in result.rows[0].text
