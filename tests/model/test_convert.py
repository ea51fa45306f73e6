"""Files in half precision, and with a newer opset, in onnxruntime's default session."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import jaxonnx
from jaxonnx import demo
from tests.support.paths import DATA


def run(model, x):
    """The outputs of onnxruntime's default session."""
    session = onnxruntime.InferenceSession(model.to_onnx().SerializeToString())
    return session.run(None, {session.get_inputs()[0].name: x})


def test_float16_halves_the_file_and_gives_the_same_classes(tmp_path):
    model, x = demo.model(), demo.digits()[1][0][:64]
    half = jaxonnx.convert(model, "float16")
    assert {value.dtype.name for value in half.params.values()} == {"float16"}
    assert half.params.keys() == model.params.keys()
    (y,) = run(half, x)
    assert y.dtype == np.float32
    floats = np.asarray(model(x))
    np.testing.assert_allclose(y, floats, atol=2e-3 * np.abs(floats).max())
    np.testing.assert_allclose(y, half(x), atol=2e-3 * np.abs(floats).max())
    for name, net in ("float32", model), ("float16", half):
        net.save(tmp_path / name)
    sizes = [(tmp_path / name).stat().st_size for name in ("float32", "float16")]
    assert sizes[1] < 0.7 * sizes[0]


def test_inputs_and_outputs_may_be_half_too():
    half = jaxonnx.convert(demo.mlp(), "float16", keep_inputs=False)
    x = demo.digits()[1][0][:8].astype(np.float16)
    (y,) = run(half, x)
    assert y.dtype == np.float16
    np.testing.assert_allclose(y, half(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["operator", "node"])
def test_what_is_kept_stays_in_float32(kind):
    model = demo.mlp()
    node = next(n for n in model.proto.graph.node if n.op_type in ("Gemm", "MatMul"))
    name = node.op_type if kind == "operator" else node.name
    half = jaxonnx.convert(model, "float16", keep=[name])
    types = {name: value.dtype.name for name, value in half.params.items()}
    weight = next(n for n in node.input if n in types)
    assert types[weight] == "float32"
    assert ("float16" in types.values()) == (kind == "node")


def test_parameters_that_were_not_trained_are_not_afterwards():
    model = demo.mlp().with_trainable("body_*")
    assert jaxonnx.convert(model, "float16").params.keys() == model.params.keys()


def test_numbers_beyond_float16_are_refused_unless_kept():
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 17]> g (float[n, 2] x) => (float[n, 2] y) '
        "{ [big] y = MatMul(x, w) }"
    )
    w = np.array([[1e5, 1], [1, 1]], np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(w, "w"))
    with pytest.raises(jaxonnx.InputError, match="numbers of 'w' are beyond 65,504"):
        jaxonnx.convert(proto, "float16")
    kept = jaxonnx.convert(proto, "float16", keep=["big"])
    assert kept.params["w"].dtype == np.float32


def test_wrong_arguments():
    with pytest.raises(jaxonnx.InputError, match="keep must be names of nodes, or operators"):
        jaxonnx.convert(demo.mlp(), "float16", keep=["Softmax"])
    with pytest.raises(jaxonnx.InputError, match="type must be 'float16' or None"):
        jaxonnx.convert(demo.mlp(), "bfloat16")
    with pytest.raises(jaxonnx.InputError, match="opset must be an integer"):
        jaxonnx.convert(demo.mlp(), opset=7)


def test_opsets_rise_with_subgraphs_functions_and_softmax():
    """Softmax flattened its input before opset 13; functions and branches are converted, too."""
    proto = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["" : 11, "loc" : 1]>
        g (float[2, 3, 4] x, bool c) => (float[2, 3, 4] y) {
            a = Softmax<axis = 1>(x)
            b = loc.double(a)
            y = If (c) <
                then_branch = t () => (float[2, 3, 4] p) { p = Softmax<axis = 1>(b) },
                else_branch = e () => (float[2, 3, 4] q) {
                    u = Unsqueeze<axes = [0]>(b)
                    q = Squeeze<axes = [0]>(u)
                }
            >
        }
        <domain: "loc", opset_import: ["" : 11]> double (v) => (w) { w = Add(v, v) }
        """
    )
    model = jaxonnx.load(proto)
    newer = jaxonnx.convert(model, opset=21)
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    session = onnxruntime.InferenceSession(newer.to_onnx().SerializeToString())
    for c in (True, False):
        expected = np.asarray(model(x, np.array(c)))
        (y,) = session.run(None, {"x": x, "c": np.array(c)})
        np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_a_hardmax_that_the_converter_would_change_is_refused():
    """ONNX's converter keeps the node, which is the greatest of another axis since opset 13."""
    text = """
        <ir_version: 8, opset_import: ["" : 11]>
        g (float[2, 3, 4] x) => (float[2, 3, 4] y) { y = Hardmax<axis = AXIS>(x) }
    """
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    proto = onnx.parser.parse_model(text.replace("AXIS", "-1"))
    np.testing.assert_array_equal(
        run(jaxonnx.convert(proto, opset=17), x), run(jaxonnx.load(proto), x)
    )
    proto = onnx.parser.parse_model(text.replace("AXIS", "1"))
    with pytest.raises(jaxonnx.InputError, match="opset 13 gave Hardmax another meaning"):
        jaxonnx.convert(proto, opset=17)
    assert jaxonnx.convert(proto, opset=12).proto.opset_import[0].version == 12


def test_half_precision_of_an_exported_transformer():
    model = jaxonnx.load(DATA / "families" / "transformers_albert.onnx")
    half = jaxonnx.convert(model, "float16")
    tokens = np.random.default_rng(0).integers(0, 8, (2, 6))
    inputs = [np.ones_like(tokens) if "mask" in v.name else tokens for v in model.inputs]
    floats, halves = (np.asarray(net(*inputs)) for net in (model, half))
    assert np.square(halves - floats).mean() < 1e-4 * floats.var()
