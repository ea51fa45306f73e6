"""Changes of a graph: the model that has one is the model of the file that it saves."""

import jax
import numpy as np
import onnx.parser
import pytest

import jaxonnx
from jaxonnx import formats
from jaxonnx.quantization import dequantize_weights
from jaxonnx.views import Dropout
from tests.support.paths import DATA

RANDOM = """
<ir_version: 9, opset_import: ["": 17, "f": 1]>
g (float[2,6] x, bool c) => (float[2,3] y)
<float[6,3] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8,9}, float[3] b = {1,2,3}, int64[2] s = {2,3}> {
  unused = Exp(x)
  h = f.linear(x, w)
  d = Dropout(h)
  r = If (c) <
    then_branch = t () => (float[n,3] p) { p = Add(d, b) },
    else_branch = e () => (float[n,3] q) {
      k = Constant <value = float[3] {4,5,6}> () q = Mul(d, k)
    }
  >
  v = Reshape(r, s)
  noise = RandomNormalLike(v)
  y = Add(v, noise)
}
<domain: "f", opset_import: ["": 17]> linear (x, w) => (y) { y = MatMul(x, w) }
"""


def described(graph):
    """A bound graph in plain values."""

    def one(node):
        inner = {
            name: [described(g) for g in (value if isinstance(value, list) else [value])]
            for name, value in node.graphs.items()
        }
        body = None if node.body is None else described(node.body)
        return node.op.name, node.inputs, node.outputs, node.reads, node.index, inner, body

    return graph.inputs, graph.outputs, {*graph.weights}, [one(node) for node in graph.nodes]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.with_outputs(["v", "d"]),
        lambda model: model.with_any_batch(),
        lambda model: model.with_any_batch().with_outputs("r"),
        lambda model: model.with_dropout({"v": 0.5}).with_remat().with_any_batch(),
    ],
)
def test_a_changed_model_is_the_model_of_its_file(change):
    model = jaxonnx.load(onnx.parser.parse_model(RANDOM)).with_trainable("w")
    before = model.proto.SerializeToString()
    changed = change(model)
    assert model.proto.SerializeToString() == before  # a rewrite copies
    again = jaxonnx.load(changed.to_onnx()).with_trainable("w")
    assert described(changed.graph) == described(again.graph)
    assert ({*changed.params}, {*changed.state}) == ({"w"}, {*again.state})
    x, key = np.ones((2, 6), np.float32), jax.random.key(0)
    inputs = (x, True) if len(changed.inputs) == 2 else (x,)
    jax.tree.map(np.testing.assert_array_equal, changed(*inputs, rng=key), again(*inputs, rng=key))


@pytest.mark.deep
def test_what_training_sees_is_kept_by_rewrites():
    net = jaxonnx.load(DATA / "lenet_bn.legacy.onnx")
    model = net.with_dropout({"features": 0.5}).with_statistics("frozen").with_remat()
    cut = model.with_outputs("classifier.1")
    assert cut.program.views == model.program.views
    assert model.to_onnx() == net.to_onnx()
    x = np.load(DATA / "lenet_bn.legacy.npz")["x"]
    both = model.with_outputs(["classifier.1", "features"])
    key = jax.random.key(0)
    alone, _ = cut.apply_train(cut.params, cut.state, key, x)
    (inner, features), _ = both.apply_train(both.params, both.state, key, x)
    np.testing.assert_allclose(inner, alone, rtol=1e-5)  # one name, one draw, in any cut
    assert np.mean(np.asarray(features) == 0) > 0.4


def test_ratios_are_replaced_one_by_one_or_all():
    proto = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 17]> '
        "g (float[n] x) => (float[n] y) { h = Neg(x) d = Dropout(h) y = Neg(d) }"
    )
    model = jaxonnx.load(proto).with_dropout({"h": 0.25}).with_dropout({"d": 0.5})
    assert model.program.find(Dropout).ratios == {"h": 0.25, "d": 0.5}
    model = model.with_dropout({"h": 0.75})
    assert model.program.find(Dropout).ratios == {"h": 0.75, "d": 0.5}
    model = model.with_dropout(0)
    x = np.ones(100, np.float32)
    np.testing.assert_array_equal(model.apply_train({}, {}, jax.random.key(0), x)[0], x)


def test_names_of_the_main_graph_mean_nothing_in_functions():
    proto = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 17, "f": 1]>
    g (float[n] x) => (float[n] y) { h = f.twice(x) y = Neg(h) }
    <domain: "f", opset_import: ["": 17]> twice (x) => (y) { h = Neg(x) y = Neg(h) }
    """)
    model = jaxonnx.load(proto).with_dropout({"h": 0.5})
    y, _ = model.apply_train({}, {}, jax.random.key(0), np.ones(1000, np.float32))
    np.testing.assert_array_equal(np.unique(y), [-2, 0])  # dropped once, not twice


def test_dequantize_leaves_its_source():
    source = jaxonnx.load(
        onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 17]>
        g (float[n,2] x) => (float[n,2] y) <int8[2,2] q = {1,2,3,4}, float s = {0.5}> {
          w = DequantizeLinear(q, s) y = MatMul(x, w)
        }""")
    )
    proto, tensors = source.proto, source.tensors
    before = proto.SerializeToString(), {*tensors}
    changed, values, _ = dequantize_weights(formats.File(proto, tensors))
    assert (proto.SerializeToString(), {*tensors}) == before
    assert {t.name for t in changed.graph.initializer} == {*values} == {"w"}
    np.testing.assert_array_equal(values["w"], [[0.5, 1], [1.5, 2]])
