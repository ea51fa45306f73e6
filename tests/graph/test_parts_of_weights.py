"""Weights in parts, joined and repeated: Slice, Split, Concat, Gather of constants, Expand."""

import jax
import numpy as np
import onnx.parser
import onnxruntime
import optax
import pytest

import jaxonnx
from jaxonnx import sparse
from jaxonnx._weights import Matrix
from jaxonnx.lora import Adapters
from tests.support.paths import DATA

KEY = jax.random.key(0)


def load(nodes, inputs="float[n,8] x", **tensors):
    """A model of these nodes, with random tensors of these shapes, or these values."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 17]>
        g ({inputs}) => (float[n,m] y) {{ {nodes} }}"""
    )
    draw = np.random.default_rng(0)
    for name, value in tensors.items():
        value = draw.standard_normal(value) if isinstance(value, list) else value
        value = np.asarray(value, np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return jaxonnx.load(proto)


def adapted_axes(model):
    return dict(Adapters.of(jaxonnx.LoRA(1, where=".*").attach(model, KEY)).layouts)


@pytest.mark.deep
@pytest.mark.parametrize("network", ["recurrent", "attention"])
def test_exports_without_constant_folding_train_every_weight(network):
    model = jaxonnx.load(DATA / f"unfolded.{network}.onnx")
    golden = dict(np.load(DATA / f"unfolded.{network}.npz"))
    x, y = golden.pop("x"), golden.pop("y")
    wanted = {name.removeprefix("grad:"): value for name, value in golden.items()}
    assert {*model.params} == wanted.keys()
    gradient = jax.jit(jax.value_and_grad(lambda p: (model.apply(p, x) ** 2).mean()))
    value, gradients = gradient(model.params)
    np.testing.assert_allclose(value, (y**2).mean(), rtol=1e-5)
    for name, expected in wanted.items():
        np.testing.assert_allclose(gradients[name], expected, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.deep
def test_axes_of_weights_in_parts():
    recurrent = adapted_axes(jaxonnx.load(DATA / "unfolded.recurrent.onnx"))
    assert recurrent["lstm.weight_hh_l0_reverse"] == Matrix(0, 1)
    assert recurrent["gru.weight_ih_l0"] == Matrix(0, 1)
    attention = jaxonnx.load(DATA / "unfolded.attention.onnx")
    axes = adapted_axes(attention)
    assert axes["cross.in_proj_weight"] == Matrix(0, 1)
    assert axes["experts"] == Matrix(2, 1, batch=(0,))
    reasons = attention.sparsity_options()["exclude"]
    assert reasons["cross.in_proj_weight"] == "taken apart or joined before input 1 of MatMul"
    assert "taken apart" in reasons["experts"]
    assert "cross.out_proj.weight" not in reasons
    layers = attention.summary().layers  # the products have the weights, not what takes parts
    counts = {layer.operator for layer in layers if layer.parameters}
    assert counts == {"Concat", "Add", "Mul", "MatMul", "Gemm"}


@pytest.mark.deep
def test_parts_train_with_adapters_sparsity_and_anew():
    model = jaxonnx.load(DATA / "unfolded.attention.onnx")
    x = np.random.default_rng(0).standard_normal((4, 4, 8)).astype(np.float32)
    settings = {"loss": "squared_error", "optimizer": optax.sgd(0.1), "batch_size": 4}
    data = x, np.ones((4, 2), np.float32)
    run = jaxonnx.train(model, data, epochs=2, sparsity="2:4", **settings)
    zeros = {name: float(np.mean(np.asarray(w) == 0)) for name, w in run.model.params.items()}
    assert {name for name, share in zeros.items() if share == 0.5} == {"cross.out_proj.weight"}
    for name in ("cls_token", "cross.in_proj_weight", "cross.in_proj_bias", "experts"):
        assert not np.array_equal(run.model.params[name], model.params[name])
    sparse.verify(run.model)
    session = onnxruntime.InferenceSession(run.model.to_onnx().SerializeToString())
    np.testing.assert_allclose(session.run(None, {"x": x})[0], run.model(x), rtol=1e-4, atol=1e-5)
    adapted = jaxonnx.train(
        model, data, epochs=1, lora=jaxonnx.LoRA(2, where="cross.in_proj_weight"), **settings
    )
    change = adapted.model.params["cross.in_proj_weight"] - model.params["cross.in_proj_weight"]
    first, _, third, *_ = np.linalg.svd(change, compute_uv=False)
    assert 0 < third + first < 1.01 * first  # of rank two, but for rounding
    new = model.reinitialize(KEY, "cls_token|cross.*").params
    np.testing.assert_array_equal(new["cls_token"], 0)
    np.testing.assert_array_equal(new["cross.in_proj_bias"], 0)
    assert np.std(new["cross.in_proj_weight"]) > 0.1


def test_parts_of_kernels_are_stored_as_in_the_file():
    nodes = """a = Constant <value_ints = [0, 4, 2, 2]> () i = Reshape(x, a)
    p, q = Split <axis = 1> (w) v = Concat <axis = 1> (q, p)
    c = Conv(i, v, b) y = Flatten(c)"""
    model = load(nodes, "float[n,16] x", w=[4, 4, 1, 1], b=[4])
    assert [*model.params] == ["w", "b"]
    assert adapted_axes(model)["w"] == Matrix(0, 1, kernel=(2, 3))
    x = np.random.default_rng(0).standard_normal((2, 16)).astype(np.float32)
    w = np.asarray(model.params["w"])[:, [2, 3, 0, 1], 0, 0]
    expected = np.einsum("oc,nchw->nohw", w, x.reshape(2, 4, 2, 2)).reshape(2, -1)
    expected += np.repeat(np.asarray(model.params["b"]), 4)
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("nodes", "tensors", "trained"),
    [
        ("b, c = Split(w) d = Add(x, b) y = Mul(d, c)", {"w": np.zeros(16)}, ["w"]),
        # a table or mask stays one, whatever part of it is added
        ("b, c = Split(w) d = Add(x, b) y = Mul(d, c)", {"w": [16, 8]}, []),
        # frequencies, repeated for a product that sums over an axis they do not have
        (
            """u = Constant <value = int64[1] {1}> () f = Unsqueeze(w, u)
            s = Constant <value = int64[3] {3, 4, 1}> () e = Expand(f, s)
            a = Constant <value = int64[3] {3, 1, -1}> () r = Reshape(x, a)
            p = MatMul(e, r) y = Flatten(p)""",
            {"w": [4]},
            [],
        ),
        # a weight for each of a batch
        (
            """s = Constant <value = int64[3] {3, 8, 4}> () e = Expand(w, s)
            a = Constant <value = int64[3] {3, -1, 8}> () r = Reshape(x, a)
            p = MatMul(r, e) y = Flatten(p)""",
            {"w": [8, 4]},
            ["w"],
        ),
        # an index that depends on the input reads rows; what it reads is no weight of the product
        (
            "i = Cast <to = 7> (x) g = Gather(w, i) h = MatMul(g, v) y = Flatten(h)",
            {"w": [8, 8], "v": [8, 4]},
            ["w", "v"],
        ),
        # one constant index takes a part: where data meet it, a detector's anchors are no weights
        (
            """i = Constant <value = int64 {1}> () g = Gather(w, i) k = MatMul(x, v)
            s = Constant <value = int64[3] {-1, 2, 2}> () r = Reshape(k, s)
            m = Mul(r, g) y = Flatten(m)""",
            {"w": np.array([[[10, 13], [16, 30]], [[30, 61], [62, 45]]]), "v": [8, 4]},
            ["v"],
        ),
        (
            """i = Constant <value = int64 {1}> () g = Gather(w, i) k = MatMul(x, v)
            s = Constant <value = int64[3] {-1, 2, 2}> () r = Reshape(k, s)
            m = Mul(r, g) y = Flatten(m)""",
            {"w": [2, 2, 2], "v": [8, 4]},
            ["w", "v"],
        ),
        # zeros or coordinates beside data are padding
        ("y = Concat <axis = 1> (x, w)", {"w": [3, 4]}, []),
    ],
)
def test_what_counts_as_a_weight_behind_parts(nodes, tensors, trained):
    assert [*load(nodes, **tensors).params] == trained


SEQUENCE = "float[n,3,8] x"


@pytest.mark.parametrize(
    ("nodes", "value", "trained"),
    [
        ("c = Concat <axis = 1> (w, x)", np.arange(8.0).reshape(1, 1, 8), True),
        ("c = Concat <axis = 1> (w, x)", np.zeros((1, 1, 8)), False),  # padding
        ("c = Concat <axis = 1> (w, x)", np.random.default_rng(0).normal(size=(1, 4, 8)), True),
        ("c = Concat <axis = -1> (w, x)", np.random.default_rng(0).normal(size=(1, 3, 8)), False),
        (
            """s = Shape <start = 0, end = 1> (x) o = Constant <value = int64[2] {1, 8}> ()
            t = Concat <axis = 0> (s, o) e = Expand(w, t) c = Concat <axis = 1> (e, x)""",
            np.zeros((1, 1, 8)),  # as they start
            True,
        ),
    ],
)
def test_class_tokens(nodes, value, trained):
    model = load(f"{nodes} y = Flatten(c)", SEQUENCE, w=value)
    assert [*model.params] == (["w"] if trained else [])


def test_print_says_what_may_be_learned_and_lists_small_tensors():
    model = load("y = Add(x, position)", position=[2, 8])
    text = " ".join(str(model).split())
    assert "'position' (at Add): not trained, because it is not at a weight input" in text
    assert "position │ 2x8 │ float32 │ no" in text  # 64 bytes, a constant of the program
    model = jaxonnx.load(DATA / "unfolded.attention.onnx")
    assert "position │ 1x5x8 │ float32 │ yes" in " ".join(str(model).split())
    chosen = str(model.with_trainable("position"))
    assert "learned?" not in chosen  # the others are frozen by choice
    masked = load(
        "m = Add(x, mask) y = Add(m, count)",
        mask=np.triu(np.ones((8, 8))),
        count=np.arange(16.0).reshape(2, 8),
    )
    assert "learned?" not in str(masked)
