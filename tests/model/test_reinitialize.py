"""Weights drawn anew: fans by layout, vectors and statistics by role."""

import jax
import numpy as np
import onnx.parser
import pytest

import jaxonnx
from tests.support.paths import DATA

KEY = jax.random.key(0)


def test_the_head_starts_anew():
    model = jaxonnx.load(DATA / "lenet_bn.legacy.onnx")
    new = model.reinitialize(KEY, ["classifier.4.*", "features.1.*"])
    changed = {
        name
        for name, value in {**model.params, **model.state}.items()
        if not np.array_equal(value, {**new.params, **new.state}[name])
    }
    ends = ("weight", "bias", "running_mean", "running_var")
    assert changed == {"classifier.4.weight", "classifier.4.bias"} | {
        f"features.1.{e}" for e in ends
    }
    np.testing.assert_array_equal(new.params["classifier.4.bias"], 0)
    np.testing.assert_array_equal(new.params["features.1.weight"], 1)
    np.testing.assert_array_equal(new.state["features.1.running_mean"], 0)
    np.testing.assert_array_equal(new.state["features.1.running_var"], 1)
    again = model.reinitialize(KEY, ["classifier.4.*", "features.1.*"])
    np.testing.assert_array_equal(
        again.params["classifier.4.weight"], new.params["classifier.4.weight"]
    )


@pytest.mark.parametrize(
    ("node", "shape", "inputs"),
    [
        ("y = MatMul(x, w)", (400, 30), 400),
        ("y = Gemm <transB = 1> (x, w)", (30, 400), 400),
        ("t = Transpose(w) y = MatMul(x, t)", (30, 400), 400),
        ("y = Conv(x, w)", (30, 40, 3, 3), 360),
        ("y = ConvTranspose(x, w)", (40, 30, 3, 3), 360),
        ("i = Cast <to = 7> (x) y = Gather(w, i)", (30, 400), 400),
        ("y, h = LSTM <hidden_size = 8> (x, w, r)", (1, 32, 300), 300),
    ],
)
def test_variances_follow_the_layout(node, shape, inputs):
    proto = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 17]> g (float x) => (float y) {{ {node} }}'
    )
    for name, size in (("w", shape), ("r", (1, 32, 8))):
        value = np.zeros(size, np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    model = jaxonnx.load(proto)
    new = model.reinitialize(KEY, "w", jax.nn.initializers.lecun_normal())
    w = np.asarray(new.params["w"])
    assert w.shape == shape
    np.testing.assert_allclose(w.std(), inputs**-0.5, rtol=0.1)
    other = model.reinitialize(KEY, "w", jax.nn.initializers.constant(2.0))
    np.testing.assert_array_equal(other.params["w"], 2)


@pytest.mark.deep
def test_what_is_not_there():
    model = jaxonnx.load(DATA / "lenet.legacy.onnx")
    with pytest.raises(
        jaxonnx.InputError, match=r"names='clasifier.4.weight'.*classifier.4.weight"
    ):
        model.reinitialize(KEY, "clasifier.4.weight")
    with pytest.raises(jaxonnx.InputError, match="merge_adapters"):
        jaxonnx.LoRA(2).attach(model, KEY).reinitialize(KEY, ".*")
