"""Models cut at inner values: features, smaller files, what is not there."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import optax
import pytest

import jaxonnx
from tests.support.paths import DATA


def onnxruntime_runs(path, x):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "outputs", "values"),
    [
        # a module, as each exporter records it; a value; a node
        ("resnet18.legacy", "layer4", ["/layer4/layer4.1/Relu_1_output_0"]),
        ("resnet18.dynamo", ["layer4"], ["relu_16"]),
        ("resnet18.dynamo", ["node_mean", "layer2"], ["mean", "relu_8"]),
        (
            "transformer.legacy",
            "encoder.layers.0.linear1",
            ["/encoder/layers.0/linear1/Add_output_0"],
        ),
        ("transformer.dynamo", ["encoder.layers.0", "logits"], ["add_152", "logits"]),
        ("lstm.legacy", ["/embedding/Gather_output_0"], ["/embedding/Gather_output_0"]),
    ],
)
def test_inner_values_as_outputs(name, outputs, values, tmp_path):
    path = tmp_path / "cut.onnx"
    model = jaxonnx.load(DATA / f"{name}.onnx", outputs=outputs)
    assert [value.name for value in model.outputs] == values
    assert all(value.dtype == np.float32 and value.shape[0] == "batch" for value in model.outputs)
    model.save(path)
    onnx.checker.check_model(path, full_check=True)
    x = np.load(DATA / f"{name}.npz")["x"]
    found = model(x)
    found = found if len(values) > 1 else [found]
    for ours, theirs in zip(found, onnxruntime_runs(path, x), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_is_not_needed_is_gone(tmp_path):
    full = jaxonnx.load(DATA / "resnet18.legacy.onnx")
    small = full.with_outputs("layer1")
    assert {name.split(".")[0] for name in small.params} == {"conv1", "bn1", "layer1"}
    assert {*small.state} < {*full.state}
    assert len(full.params) == 62  # a Model never changes
    small.save(tmp_path / "small.onnx")
    proto = onnx.load(tmp_path / "small.onnx")
    assert not any("layer2" in name for node in proto.graph.node for name in node.input)
    assert {t.name.split(".")[0] for t in proto.graph.initializer} == {"conv1", "bn1", "layer1"}
    again = jaxonnx.load(tmp_path / "small.onnx")
    assert {*again.params} == {*small.params}


SEVERAL = """
<ir_version: 9, opset_import: ["": 18, "com.microsoft": 1]>
g (float[n,3] a, float[n,4] b) => (float[n,4] y)
<float[3,4] w = {1,2,3,4,5,6,7,8,9,10,11,12}, float[4,4] v = {1,0,0,0,0,1,0,0,0,0,1,0,0,0,0,1}> {
  h = MatMul(a, w)
  kept = com.microsoft.FastGelu(h)
  left, right = Split <axis = 1, num_outputs = 2> (kept)
  c = Add(kept, b)
  y = MatMul(c, v)
}
"""


def several():
    return onnx.parser.parse_model(SEVERAL)


def test_inputs_and_types_behind_operators_that_onnx_does_not_know():
    full = jaxonnx.load(several())
    model = full.with_outputs(["right", "kept"])
    assert [value.name for value in model.inputs] == ["a"]
    assert {*model.params} == {"w"}
    assert [value.shape for value in model.outputs] == [("n", 2), ("n", 4)]
    onnx.checker.check_model(model.to_onnx())
    right, kept = model(np.ones((2, 3), np.float32))
    np.testing.assert_array_equal(right, kept[:, 2:])


def test_inputs_may_be_outputs_too():
    model = jaxonnx.load(several(), outputs=["kept", "a"])
    x = np.ones((2, 3), np.float32)
    kept, a = model(x)
    np.testing.assert_array_equal(a, x)
    session = onnxruntime.InferenceSession(model.to_onnx().SerializeToString())
    written = session.run(None, {"a": x})
    np.testing.assert_allclose(written[0], kept, rtol=1e-6)
    np.testing.assert_array_equal(written[1], x)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ("kep", ["no value, node or module 'kep'", "kept"]),
        (["right", "right"], ["different values"]),
        ([], ["different values"]),
        ("zzzzzz", ["it ends with", "y"]),
    ],
)
def test_values_that_are_not_there(outputs, words):
    with pytest.raises(jaxonnx.InputError) as caught:
        jaxonnx.load(several(), outputs=outputs)
    for word in words:
        assert word in str(caught.value)


def test_a_new_head_is_a_function_of_the_features():
    backbone = jaxonnx.load(DATA / "lenet.dynamo.onnx", outputs="features")
    params = {"backbone": backbone.params, "head": jnp.zeros((12 * 5 * 5, 3))}
    x, y = np.ones((4, 1, 28, 28), np.float32), np.arange(4) % 3

    def loss(params):
        features = backbone.apply(params["backbone"], x)
        logits = features.reshape(len(x), -1) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(value, np.log(3), rtol=1e-6)
    assert np.abs(gradient["head"]).max() > 0
