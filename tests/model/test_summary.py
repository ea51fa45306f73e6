"""model.summary(): the layers of a network as a table."""

from collections import Counter

import jax
import numpy as np
import onnx.parser
import pytest

import jaxonnx
from jaxonnx._graph import roles
from tests.support.paths import DATA


def load(name, **options):
    return jaxonnx.load(DATA / f"{name}.onnx", **options)


def test_layers():
    model = load("lenet_bn.legacy", trainable=["classifier.*", "features.1.weight"])
    summary = model.with_statistics("frozen").summary()
    layers = {layer.name: layer for layer in summary.layers}
    assert layers["features.0"] == ("features.0", "Conv", ("batch", 6, 28, 28), 156, 0, "")
    normalization = layers["features.1"]
    assert normalization[3:] == (24, 6, "frozen statistics")
    assert layers["features.7"][2:] == (("batch", 12, 5, 5), 0, 0, "")
    assert layers["classifier.4"][1:] == ("Gemm", ("batch", 10), 250, 250, "")
    assert summary.trained == sum(v.size for v in model.params.values())
    assert summary.frozen == sum(v.size for v in model.state.values())
    text = str(summary)
    assert "\nfeatures.0    Conv                batch, 6, 28, 28          156  no\n" in text
    assert "10,680 parameters trained, 2,034 frozen, 49.7 KiB" in text
    assert "features.1" in summary._repr_html_()


@pytest.mark.parametrize(
    "name", ["transformer.legacy", "transformer.dynamo", "resnet18.dynamo", "lstm.legacy"]
)
def test_the_numbers_add_up(name):
    model = load(name)
    summary = model.summary()
    # shape arithmetic, constants and views are no layers
    assert all(layer.shape is not None for layer in summary.layers)
    assert not {"Shape", "Reshape", "Transpose", "Constant"} & {x.operator for x in summary.layers}
    assert sum(layer.trained for layer in summary.layers) == summary.trained
    assert summary.layers[-1].shape == ("batch", 10)


def test_adapters_and_shared_weights():
    proto = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 17]>
    g (float[n,4] x) => (float[n,4] y) { h = MatMul(x, w) r = Relu(h) y = MatMul(r, w) }
    """)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    adapted = jaxonnx.LoRA(1).attach(jaxonnx.load(proto), jax.random.key(0))
    first, _, last = adapted.summary().layers
    assert first == ("h", "MatMul", ("n", 4), 16, 8, "adapters of rank 1")
    assert last[3:] == (0, 0, "adapters of rank 1; shares w")


def test_shapes_that_depend_on_values():
    proto = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 17]>
    g (float[n,4] x) => (float[k,1] y) { h = Relu(x) t = NonZero(h) c = Transpose(t)
      g = GatherND(h, c) i = Unsqueeze(g, one) y = Exp(i) }
    """)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "one"))
    layers = {layer.name: layer for layer in jaxonnx.load(proto).summary().layers}
    assert layers["h"].shape == ("n", 4)
    assert layers["y"].operator == "Exp"


def test_dropout():
    model = load("mobilenet.legacy")
    assert "left out" in model.warnings[0]
    place = "/ReduceMean_output_0"
    dropped = model.with_dropout({place: 0.2})
    assert not dropped.warnings[1:]
    assert "random operators" in dropped.warnings[0]
    before, dropout, _ = dropped.summary().layers[-3:]
    assert before[:3] == ("/ReduceMean", "ReduceMean", ("batch", 40))
    assert dropout[1:] == ("Dropout", ("batch", 40), 0, 0, "0.2 added for training")


def test_dimensions_keep_their_names():
    proto = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 17]>
    g (float[batch,sequence,other] x) => (float[b,s,o] y) { h = Relu(x)
      t = Transpose <perm = [0, 2, 1]> (h) c = Concat <axis = 1> (t, t) y = Exp(c) }
    """)
    layers = jaxonnx.load(proto).summary().layers
    assert layers[0].shape == ("batch", "sequence", "other")
    assert layers[-1].shape == ("batch", "2*other", "sequence")
    # many names, and an axis without one
    proto = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 17]>
    g (float[batch,a,b,c,d] x, float[batch,?] z) => (float[n,i,j,k,l] y, float[n,m] v) {
      y = Exp(x) v = Exp(z) }
    """)
    layers = jaxonnx.load(proto).summary().layers
    assert layers[0].shape == ("batch", "a", "b", "c", "d")
    assert layers[1].shape == ("batch", None)
    # two names of one size: the evaluation falls back to equal ones
    proto = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 17]>
    g (float[batch,sequence] x, float[batch,length] m) => (float[b,s] y) {
      s = Add(x, m) y = Exp(s) }
    """)
    assert jaxonnx.load(proto).summary().layers[-1].shape == ("batch", "sequence")


def test_a_model_is_printed_after_one_walk(monkeypatch):
    walks = Counter()
    for name in ("uses", "normalizations"):
        walk = getattr(roles, name)
        monkeypatch.setattr(
            roles, name, lambda *args, of=name, walk=walk: (walks.update([of]), walk(*args))[1]
        )
    model = load("transformer.legacy")
    walks.clear()
    str(model)
    assert walks == {"uses": 1, "normalizations": 1}
