"""Sparse weights in files: the record, packed files, sparse initializers, and what goes wrong."""

import ast
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxonnx
from jaxonnx import sparse
from jaxonnx.errors import InputError, ModelError, SparsityError, TrainingError

RNG = np.random.default_rng(0)
SHAPES = {"k": (16, 8, 3, 3), "w": (16, 32), "odd": (32, 10)}
TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float64": TensorProto.DOUBLE,
}
X = RNG.normal(size=(4, 8, 5, 5))


def net(dtype="float32", ir_version=10):
    """Conv, mean over the image, and two products; the last weight cannot be 2:4."""
    kind, dtype = TYPES[dtype], np.dtype(dtype)
    weights = [
        numpy_helper.from_array((RNG.normal(size=shape) / 8).astype(dtype), name)
        for name, shape in SHAPES.items()
    ]
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "w"], ["h"]),
        helper.make_node("MatMul", ["h", "odd"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", kind, ["n", 8, 5, 5])],
        [helper.make_tensor_value_info("y", kind, ["n", 10])],
        weights,
    )
    opset = [helper.make_opsetid("", 22)]
    return helper.make_model(graph, opset_imports=opset, ir_version=ir_version)


def pruned(proto=None, pattern="2:4", trainable=None, **options):
    model = jaxonnx.load(net() if proto is None else proto, trainable=trainable)
    options = {"select": ["k", "w"], **options}
    model = model.replace(
        params=sparse.prune(model.params, pattern, **model.sparsity_options(), **options)
    )
    return model.with_sparsity(pattern, **options)


def bits(array):
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def same(a, b):
    assert a.params.keys() == b.params.keys()
    for name in a.params:
        np.testing.assert_array_equal(bits(a.params[name]), bits(b.params[name]), name)
    for ours, theirs in zip(
        a.to_onnx().graph.initializer, b.to_onnx().graph.initializer, strict=True
    ):
        if ours.name == theirs.name:  # 64-bit tensors as well, which the parameters do not hold
            assert ours.SerializeToString() == theirs.SerializeToString()


FORMS = {
    "zeros": ("out.onnx", {}),
    "sparse": ("out.onnx", {"sparse": True}),
    "npz": ("out.npz", {}),
}


@pytest.mark.deep
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.filterwarnings("ignore:64-bit")
def test_every_form_comes_back_bit_for_bit(form, dtype, tmp_path):
    model = pruned(net(dtype))
    name, options = FORMS[form]
    model.save(tmp_path / name, **options)
    back = jaxonnx.load(tmp_path / name)
    same(model, back)
    assert back.sparsity == model.sparsity
    assert [layer.name for layer in back.sparsity.layers] == ["k", "w"]
    assert "2 tensors, 2:4 transposable" in str(back)
    assert back.sparsity.layers[1].axes == (1, 0)  # x @ w sums over the first axis
    sparse.verify(back)


def test_a_kept_weight_may_be_zero(tmp_path):
    model = pruned()
    w = np.array(model.params["w"])
    mask = w != 0
    kept = np.flatnonzero(mask)
    w.reshape(-1)[kept[:40]] = 0
    w.reshape(-1)[kept[40:44]] = -0.0
    model = model.replace(params=model.params | {"w": jnp.asarray(w)})
    model.save(tmp_path / "a.onnx", sparse=True)
    (stored,) = [
        s for s in onnx.load(tmp_path / "a.onnx").graph.sparse_initializer if s.values.name == "w"
    ]
    assert stored.values.dims[0] >= mask.sum()
    same(model, jaxonnx.load(tmp_path / "a.onnx"))
    model.save(tmp_path / "a.npz")
    _, packed = sparse.load(tmp_path / "a.npz")
    mask = np.asarray(sparse.unpack_mask(packed["w"]))
    assert mask.sum() == w.size // 2
    assert sparse.Pattern().holds(mask, (0, 1))
    np.testing.assert_array_equal(jaxonnx.load(tmp_path / "a.npz").params["w"], w)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("pattern", "transposable"), [("1:4", True), ("2:8", True), ("2:4", False), ("3:8", False)]
)
@pytest.mark.parametrize("form", FORMS)
def test_other_patterns(pattern, transposable, form, tmp_path):
    model = pruned(pattern=pattern, transposable=transposable)
    name, options = FORMS[form]
    model.save(tmp_path / name, **options)
    back = jaxonnx.load(tmp_path / name)
    same(model, back)
    n, m = map(int, pattern.split(":"))
    assert back.sparsity == model.sparsity
    assert {*back.sparsity.patterns} == {sparse.Pattern(n, m, transposable)}
    assert len(back.sparsity.layers) == 2
    sparse.verify(back)


def test_other_runtimes_take_the_files(tmp_path):
    model = pruned()
    x = X.astype(np.float32)
    for form in ("zeros", "sparse"):
        _, options = FORMS[form]
        path = tmp_path / f"{form}.onnx"
        model.save(path, **options)
        onnx.checker.check_model(onnx.load(path))
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        np.testing.assert_allclose(session.run(None, {"x": x})[0], model(x), rtol=1e-4, atol=1e-6)
    assert [s.values.name for s in onnx.load(path).graph.sparse_initializer] == ["k", "w"]


def test_the_record_is_one_entry_of_the_metadata():
    proto = net()
    proto.metadata_props.add(key="author", value="someone")
    entries = {e.key: e.value for e in pruned(proto).to_onnx().metadata_props}
    assert entries.keys() == {"author", "jaxonnx.sparsity"}
    pattern = {"pattern": "2:4", "transposable": True}
    assert json.loads(entries["jaxonnx.sparsity"]) == {
        "method": "",
        "weights": {"k": pattern | {"axes": [0, 1]}, "w": pattern | {"axes": [1, 0]}},
    }


def test_the_record_never_claims_what_is_not_so():
    model = pruned()
    dense = jaxonnx.load(net()).params["w"]
    model = model.replace(params=model.params | {"w": dense})
    with pytest.raises(SparsityError, match="w: dot_general"):
        sparse.verify(model)
    back = jaxonnx.load(model.to_onnx())
    assert [layer.name for layer in back.sparsity.layers] == ["k"]


def test_packed_weights_run_without_being_unpacked_first(tmp_path):
    model = pruned()
    model.save(tmp_path / "a.npz")
    arrays, packed = sparse.load(tmp_path / "a.npz")
    assert {*packed} == {"k", "w"}
    assert packed["w"].nbytes / model.params["w"].nbytes == 0.53125
    params = {name: packed.get(name, arrays.get(name)) for name in model.params}
    run = jax.jit(lambda params, x: model.apply(sparse.unpack(params), x))
    x = X.astype(np.float32)
    np.testing.assert_allclose(run(params, x), model(x), rtol=1e-5, atol=1e-6)
    same(model, model.replace(params=sparse.unpack(params)))


def train(model, **options):
    data = (X.astype(np.float32), np.arange(4))
    loss = "softmax_cross_entropy_with_integer_labels"
    optimizer = optax.sgd(0.1, momentum=0.9)
    return jaxonnx.train(model, data, loss=loss, optimizer=optimizer, batch_size=2, **options).model


@pytest.mark.deep
def test_training_records_what_it_makes_sparse(tmp_path):
    phases = {"dense": 1, "dynamic": 1, "fixed": 1, "select": ["k", "w"]}
    model = train(net(), epochs=3, sparsity=phases)
    model.save(tmp_path / "a.onnx")
    assert [layer.name for layer in jaxonnx.load(tmp_path / "a.onnx").sparsity.layers] == ["k", "w"]
    sparse.verify(model)
    again = train(model, epochs=1, sparsity={"dynamic": 0, "select": "w"})
    assert [layer.name for layer in again.sparsity.layers] == ["w"]
    with pytest.warns(UserWarning, match="2 weights that the file records as 2:4"):
        assert train(model, epochs=1).sparsity is None


@pytest.mark.parametrize("transposable", [True, False])
def test_dense_training_of_a_recorded_file_says_how_to_keep_its_zeros(transposable):
    model = pruned(transposable=transposable)
    with pytest.warns(UserWarning, match="'k', 'w'. lose zeros and record") as caught:
        assert train(model, epochs=1).sparsity is None
    remedy = re.search(r"sparsity=({.*}) keeps them", str(caught[0].message))
    kept = train(model, epochs=1, sparsity={**ast.literal_eval(remedy[1]), "select": ["k", "w"]})
    assert kept.sparsity.layers == model.sparsity.layers
    for name in ("k", "w"):
        zeros = np.asarray(model.params[name]) == 0
        np.testing.assert_array_equal(np.asarray(kept.params[name]) == 0, zeros)
        assert np.any(kept.params[name] != model.params[name])
    with pytest.warns(UserWarning, match="weights with zeros, as of pruning"):
        train(model.with_sparsity(None), epochs=1)


PRODUCTS = {
    "MatMul(x, w)": (("x", "w"), {}, (8, 16)),
    "MatMul(w, x)": (("w", "x"), {}, (16, 8)),
    "MatMul(x, turned)": (("x", "turned"), {}, (16, 8)),
    "Gemm(x, w)": (("x", "w"), {}, (8, 16)),
    "Gemm(x, w) of w.T": (("x", "w"), {"transB": 1}, (16, 8)),
    "Gemm(w, x) of w.T": (("w", "x"), {"transA": 1}, (8, 16)),
    "ConvTranspose(x, w)": (("x", "w"), {}, (8, 16, 2, 2)),
    "Conv(x, w)": (("x", "w"), {}, (16, 8, 2, 2)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_one_axis_weights_are_sparse_along_the_sum(name):
    inputs, attributes, shape = PRODUCTS[name]
    nodes = [
        helper.make_node("Transpose", ["w"], ["turned"]),
        helper.make_node(name.split("(")[0], inputs, ["y"], **attributes),
    ]
    kind = TensorProto.FLOAT
    graph = helper.make_graph(
        nodes[inputs[1] != "turned" :],
        "net",
        [helper.make_tensor_value_info("x", kind, [8] * len(shape))],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(RNG.normal(size=shape).astype(np.float32), "w")],
    )
    opset = [helper.make_opsetid("", 22)]
    proto = helper.make_model(graph, opset_imports=opset, ir_version=10)
    model = pruned(proto, trainable="w", transposable=False, select=None)
    assert model.params["w"].shape[model.sparsity.layers[0].axes[1]] == 8
    sparse.verify(model)


@pytest.mark.parametrize(
    ("sparsity", "error", "message"),
    [
        (
            {"dense": 2, "dynamic": 1},
            TrainingError,
            "a dense phase of 2 epochs, 4 steps, leaves no",
        ),
        ({"dense": 0, "dynamic": 0, "fixed": 0}, SparsityError, "no phase"),
        ({"select": "odd"}, SparsityError, "10 is not a multiple of 4"),
        ({"select": "nothing"}, SparsityError, "selects no parameter"),
        ({"select": []}, SparsityError, "not selected"),
        ({"pattern": "4:2"}, SparsityError, "N:M"),
    ],
)
def test_what_cannot_be_sparse_is_said(sparsity, error, message):
    with pytest.raises(error, match=message):
        train(net(), epochs=2, sparsity=sparsity)


def test_what_cannot_be_saved_leaves_nothing(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(b"before")
    dense = jaxonnx.load(net())
    with pytest.raises(SparsityError, match=r"recorded as sparse: .*sparse\.record\(model\)"):
        dense.save(path)
    with pytest.raises(SparsityError, match="no weights that are recorded as sparse"):
        dense.save(tmp_path / "a.onnx", sparse=True)
    with pytest.raises(InputError, match="neither external data nor"):
        pruned().save(path, external_data=True)
    old = pruned(net(ir_version=4))
    with pytest.raises(SparsityError, match="IR version 6"):
        old.save(tmp_path / "a.onnx", sparse=True)
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]
    assert path.read_bytes() == b"before"


def test_damaged_packed_files(tmp_path):
    path, damaged = tmp_path / "a.npz", tmp_path / "b.npz"
    pruned().save(path)
    data = path.read_bytes()
    for length in (0, 10, 1000, len(data) // 2, len(data) - 30, len(data) - 1):
        damaged.write_bytes(data[:length])
        with pytest.raises(SparsityError, match=r"b\.npz"):
            jaxonnx.load(damaged)
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 255
    damaged.write_bytes(flipped)
    with pytest.raises(SparsityError, match=r"b\.npz"):
        jaxonnx.load(damaged)
    np.savez(damaged, x=np.zeros(3))
    with pytest.raises(SparsityError, match=r"b\.npz"):
        jaxonnx.load(damaged)
    with pytest.raises(ModelError, match=r"none\.npz"):
        jaxonnx.load(tmp_path / "none.npz")


def test_packed_files_without_a_graph(tmp_path):
    model, path = pruned(), tmp_path / "a.npz"
    masks = {name: model.params[name] != 0 for name in ("k", "w")}
    report = sparse.layers(model.params, select=["k", "w"])
    sparse.save(path, model.params, masks, layers=report)
    with pytest.raises(ModelError, match="weights, but no graph"):
        jaxonnx.load(path)
    dense, packed = sparse.load(path)
    same(model, model.replace(params=sparse.unpack(dense | packed)))
    sparse.save(path, {"jaxonnx.graph": np.arange(9, dtype=np.uint8)}, {}, layers=report)
    with pytest.raises(ModelError, match="damaged"):
        jaxonnx.load(path)


def test_records_of_weights_that_are_not_there():
    proto = net()
    pattern = {"pattern": "2:4", "transposable": True}
    value = {"weights": {n: pattern | {"axes": a} for n, a in (("z", [0, 1]), ("w", [0, 5]))}}
    proto.metadata_props.add(key="jaxonnx.sparsity", value=json.dumps(value))
    assert not jaxonnx.load(proto).to_onnx().metadata_props


def test_bfloat16_is_what_it_was(tmp_path):
    model = pruned(net("bfloat16"))
    model.save(tmp_path / "a.npz")
    assert jaxonnx.load(tmp_path / "a.npz").params["w"].dtype == ml_dtypes.bfloat16


def test_what_is_sparse_already_is_recorded(tmp_path):
    model = pruned().with_sparsity(None)
    with pytest.warns(UserWarning, match=r"'k' and 1 more have 2:4 zeros.*sparse\.record\(model\)"):
        model.save(tmp_path / "a.onnx")
    model.save(tmp_path / "a.safetensors")
    with pytest.raises(SparsityError, match=r"sparse\.record\(model\)"):
        model.save(tmp_path / "a.npz")
    again = sparse.record(model)
    assert {layer.name for layer in again.sparsity.layers} == {"k", "w"}
    again.save(tmp_path / "a.onnx")  # a warning would be an error
    again.save(tmp_path / "a.npz")
    same(jaxonnx.load(tmp_path / "a.npz"), model)
    assert {layer.name for layer in sparse.record(model, select="w").sparsity.layers} == {"w"}
    dense = model.replace(params={**model.params, "k": model.params["k"] + 1})
    assert {layer.name for layer in sparse.record(dense).sparsity.layers} == {"w"}
    with pytest.raises(SparsityError, match=r"^k: not 2:4 transposable; sparse\.prune"):
        sparse.record(dense, select=["k", "w"])
    with pytest.raises(SparsityError, match=r"^k: not 1:4 transposable, w: not 1:4 transposable"):
        sparse.record(model, "1:4")
    one = pruned(pattern=sparse.Pattern(transposable=False)).with_sparsity(None)
    with pytest.warns(UserWarning, match="2:4 zeros"):
        one.save(tmp_path / "a.onnx")
    assert str(sparse.record(one, transposable=False).sparsity) == "2:4 one-axis"
    zero = model.replace(params={name: x * 0 for name, x in model.params.items()})
    zero.save(tmp_path / "a.onnx")  # starts from zero are not sparsity
