"""Weights from other files: `load(weights=)` and `save` in each format of the table."""

import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx.parser
import pytest
import safetensors.numpy
from onnx import TensorProto, helper, numpy_helper

import jaxonnx
from jaxonnx import demo, sparse
from jaxonnx._io import formats
from jaxonnx.errors import Error, InputError, ModelError, SparsityError

RNG = np.random.default_rng(0)


def net(dtype="float32"):
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"]),
            helper.make_node("Add", ["h", "bias"], ["y"]),
        ],
        "net",
        [helper.make_tensor_value_info("x", kind, ["n", 8])],
        [helper.make_tensor_value_info("y", kind, ["n", 4])],
        [
            numpy_helper.from_array(RNG.normal(size=shape).astype(dtype), name)
            for name, shape in (("w", (8, 4)), ("bias", (4,)))
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


def other(model):
    return model.replace(params={n: jnp.asarray(-2 * p) for n, p in model.params.items()})


def same(a, b):
    assert a.params.keys() == b.params.keys()
    assert a.state.keys() == b.state.keys()
    for name, value in {**a.params, **a.state}.items():
        back = {**b.params, **b.state}[name]
        assert back.dtype == value.dtype
        assert np.asarray(back).tobytes() == np.asarray(value).tobytes()


def plain(path, model):
    np.savez(path, **{n: np.asarray(p) for n, p in {**model.params, **model.state}.items()})


def packed(path, model):
    sparse.save(path, model.params | model.state, {}, layers=[])


WRITERS = {
    "a.safetensors": lambda path, model: model.save(path),
    "a.npz": plain,
    "packed.npz": packed,
    "a.onnx": lambda path, model: model.save(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_weights_come_back_into_the_graph_bit_for_bit(name, tmp_path):
    model = demo.model()
    WRITERS[name](tmp_path / name, other(model))
    same(jaxonnx.load(model.to_onnx(), weights=tmp_path / name), other(model))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["a.safetensors", "packed.npz", "a.onnx"])
@pytest.mark.filterwarnings("ignore:64-bit")
def test_other_types(name, dtype, tmp_path):
    first, second = net(dtype), net(dtype)
    model = jaxonnx.load(first)
    if name == "packed.npz":
        weights = {t.name: numpy_helper.to_array(t) for t in first.graph.initializer}
        sparse.save(tmp_path / name, weights, {}, layers=[])
    else:
        model.save(tmp_path / name)
    back = jaxonnx.load(second, weights=tmp_path / name)
    same(back, model)
    for ours, theirs in zip(back.to_onnx().graph.initializer, first.graph.initializer, strict=True):
        assert numpy_helper.to_array(ours).tobytes() == numpy_helper.to_array(theirs).tobytes()


def test_files_of_other_programs_and_arrays_by_name(tmp_path):
    model = jaxonnx.load(net())
    w = np.arange(32, dtype=np.float32).reshape(8, 4)
    safetensors.numpy.save_file({"w": w}, tmp_path / "a.safetensors")
    for weights in (tmp_path / "a.safetensors", str(tmp_path / "a.safetensors"), {"w": w}):
        back = jaxonnx.load(model.to_onnx(), weights=weights)
        np.testing.assert_array_equal(back.params["w"], w)
        np.testing.assert_array_equal(back.params["bias"], model.params["bias"])  # was not there
    turned = model.replace(params=model.params | {"w": np.asfortranarray(w)})
    turned.save(tmp_path / "b.safetensors")
    written = safetensors.numpy.load_file(tmp_path / "b.safetensors")
    assert {*written} == {"w", "bias"}
    np.testing.assert_array_equal(written["w"], w)


def test_packed_models_are_weights_too(tmp_path):
    model = jaxonnx.load(net())
    model = model.replace(params=sparse.prune(model.params, axes=(1, 0), select="w"))
    path = tmp_path / "a.npz"
    layers = sparse.layers(model.params, axes=(1, 0))
    sparse.save(path, model.params, {"w": model.params["w"] != 0}, layers=layers)
    same(jaxonnx.load(net(), weights=path), model)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"w": np.zeros((4, 8), "f4")}, r"'w' is float32\[4, 8\], the model's is float32\[8, 4\]"),
        ({"w": np.zeros((8, 4))}, r"'w' is float64\[8, 4\], the model's is float32\[8, 4\]"),
        ({"bais": np.zeros(4, "f4")}, "has 'bais'.* its tensors are called bias"),
        ({"zzz": np.zeros(4, "f4")}, "has 'zzz'.* its tensors are called bias, w"),
    ],
)
@pytest.mark.parametrize("name", ["a.safetensors", "a.npz", None])
def test_weights_that_do_not_fit(weights, message, name, tmp_path):
    source = weights
    if name is not None:
        source = tmp_path / name
        if name == "a.npz":
            np.savez(source, **weights)
        else:
            safetensors.numpy.save_file(weights, source)
    with pytest.raises(InputError, match=message):
        jaxonnx.load(net(), weights=source)


@pytest.mark.parametrize("name", ["a.safetensors", "a.npz"])
def test_damaged_files(name, tmp_path):
    path = tmp_path / name
    WRITERS[name](path, jaxonnx.load(net()))
    data = path.read_bytes()
    for length in (0, 10, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ModelError, match=name):
            jaxonnx.load(net(), weights=path)
    with pytest.raises(ModelError, match="is not a file; give the path of a file of weights"):
        jaxonnx.load(net(), weights=tmp_path / "none.npz")


def test_a_damaged_packed_file_of_weights(tmp_path):
    path = tmp_path / "a.npz"
    packed(path, jaxonnx.load(net()))
    arrays = dict(np.load(path))
    np.savez(path, **{name: x for name, x in arrays.items() if name != "values:w"})
    with pytest.raises(SparsityError, match=r"a\.npz"):
        jaxonnx.load(net(), weights=path)


def test_weights_alone_are_no_model(tmp_path):
    path = tmp_path / "a.safetensors"
    jaxonnx.load(net()).save(path)
    with pytest.raises(ModelError, match=r"no graph: .*load\('net.onnx', weights='.*a.safetens"):
        jaxonnx.load(path)


def test_what_a_file_of_weights_cannot_hold(tmp_path):
    model, path = jaxonnx.load(net()), tmp_path / "a.safetensors"
    path.write_bytes(b"before")
    for options in ({"external_data": True}, {"sparse": True}):
        with pytest.raises(InputError, match="safetensors file has neither external data nor"):
            model.save(path, **options)
    fours = np.zeros((8, 4), ml_dtypes.int4)
    with pytest.raises(InputError, match="safetensors cannot hold"):
        formats.save(path, model.to_onnx, lambda: {"w": fours})
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"before"


def test_without_the_package(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "safetensors"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(Error, match=r"pip install 'jaxonnx\[safetensors\]'"):
        jaxonnx.load(net()).save(tmp_path / "a.safetensors")


def test_integers_are_weights_of_a_quantized_file_before_they_are_dequantized():
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "scale"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [
            numpy_helper.from_array(np.eye(2, dtype=np.int8), "q"),
            numpy_helper.from_array(np.float32(0.5), "scale"),
        ],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    q = np.array([[1, 2], [3, 4]], np.int8)
    model = jaxonnx.load(proto, dequantize=True, weights={"q": q})
    np.testing.assert_array_equal(model.params["w"], q / 2)


def test_a_model_without_weights_has_none_to_replace():
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[n] y) { y = Abs(x) }'
    with pytest.raises(jaxonnx.InputError, match="has 'w', and the model has no weights that"):
        jaxonnx.load(onnx.parser.parse_model(text), weights={"w": np.zeros(4, "f4")})
