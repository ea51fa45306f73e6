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


def run_file(model, *arrays):
    """The outputs of onnxruntime's default session, in a tuple."""
    proto = model.to_onnx()
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    return tuple(session.run(None, dict(zip((v.name for v in model.inputs), arrays, strict=True))))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lenet.legacy", "features"),
        ("lenet_bn.dynamo", "features"),
        ("transformer.legacy", "encoder.layers.0"),
        ("lstm.legacy", "embedding"),
    ],
)
def test_both_parts_of_a_split_network_run_alone(name, value):
    model, x = jaxonnx.load(DATA / f"{name}.onnx"), np.load(DATA / f"{name}.npz")["x"]
    head, tail = model.split(value)
    assert [v.name for v in tail.inputs] == [v.name for v in head.outputs]
    assert [v.name for v in tail.outputs] == [v.name for v in model.outputs]
    assert {*head.params} | {*tail.params} == {*model.params}
    assert {*head.params}.isdisjoint(tail.params)
    assert {*head.state} | {*tail.state} == {*model.state}
    (expected,) = run_file(model, x)
    (features,) = run_file(head, x)
    np.testing.assert_allclose(features, head(x), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(run_file(tail, features)[0], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(tail(head(x)), expected, rtol=1e-4, atol=1e-4)
    # a derivative with respect to the features, as Grad-CAM takes it
    gradient = jax.jit(jax.grad(lambda f: tail.apply(tail.params, f).ravel()[0]))(head(x))
    assert gradient.shape == features.shape
    assert float(jnp.abs(gradient).max()) > 0


def test_a_network_begins_at_several_values_in_their_order():
    model = jaxonnx.load(several())
    tail = model.with_inputs(["b", "kept"])
    assert [value.name for value in tail.inputs] == ["b", "kept"]
    assert {*tail.params} == {"v"}
    a, b = np.ones((2, 3), np.float32), np.ones((2, 4), np.float32)
    kept = model.with_outputs("kept")(a)
    np.testing.assert_allclose(tail(b, kept), model(a, b), rtol=1e-6)
    both = model.with_outputs(["right", "kept"]).split("kept")[1]
    np.testing.assert_array_equal(run_file(both, np.asarray(kept))[0], kept[:, 2:])
    np.testing.assert_array_equal(both(kept)[1], kept)  # an output that is an input


def test_a_node_stays_for_those_of_its_outputs_that_are_not_given():
    proto = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 18]>
    g (float[n,4] x) => (float[n,2] y) {
      left, right = Split <axis = 1, num_outputs = 2> (x)
      y = Sub(left, right)
    }""")
    tail = jaxonnx.load(proto).with_inputs(["left", "x"])
    x, left = np.arange(4, dtype=np.float32)[None], np.float32([[7, 9]])
    np.testing.assert_array_equal(tail(left, x), [[5, 6]])
    np.testing.assert_array_equal(run_file(tail, left, x)[0], [[5, 6]])


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ("kept", r"depend on b besides kept.*\['kept', 'b'\]"),
        (["kept", "b", "a"], "do not depend on a"),
        ("kep", "no value, node or module 'kep'.*kept"),
        (["c", "c"], "different values"),
        ([], "different values"),
        (3, "a string or a list of strings"),
    ],
)
def test_values_at_which_no_network_begins(inputs, words):
    with pytest.raises(jaxonnx.InputError, match=words):
        jaxonnx.load(several()).with_inputs(inputs)


def test_a_value_within_a_branch_is_no_input():
    proto = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 18]>
    g (float[2] x, bool c) => (float[2] y) {
      y = If (c) <
        then_branch = t () => (float[2] z) { inner = Neg(x) z = Neg(inner) },
        else_branch = e () => (float[2] w) { w = Neg(x) }
      >
    }""")
    with pytest.raises(jaxonnx.InputError, match="no value, node or module 'inner'"):
        jaxonnx.load(proto).split("inner")
