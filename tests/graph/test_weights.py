"""What the axes of weights mean: declared by operators, read alike by all that asks for it."""

import jax
import numpy as np
import onnx.parser
import optax
import pytest
from onnx import helper

import jaxonnx
from jaxonnx import registry, sparse
from jaxonnx._graph.uses import weights
from jaxonnx._weights import Matrix, convolution, einsum, matrix, table
from jaxonnx.lora import Adapters
from jaxonnx.registry import op
from tests.support.paths import DATA

KEY = jax.random.key(0)
OPSETS = '"": 17, "com.microsoft": 1, "local": 1, "test": 1'
FILES = sorted(path.relative_to(DATA) for path in DATA.rglob("*.onnx"))
WEIGHTLESS = {
    *("catboost", "lightgbm", "sklearn_forest", "sklearn_neighbours", "sklearn_svm", "xgboost"),
    "onnxruntime_static_int8",
    "eval_model",
    "norms",
}
"""Files of trees, examples and integers, of weights that are inputs, or that norms divide."""
TABLES = {"relative"}
"""Parameters that are drawn but are no factors: a normalization reads their rows."""


def load(nodes, functions="", **shapes):
    """A model of these nodes, with random weights of these shapes."""
    proto = onnx.parser.parse_model(
        f"<ir_version: 9, opset_import: [{OPSETS}]> g (float[n,8] x) => (float[n,m] y) "
        f"{{ {nodes} }} {functions}"
    )
    draw = np.random.default_rng(0)
    for name, shape in shapes.items():
        value = draw.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return jaxonnx.load(proto)


def sparse_axes(model):
    """(output, input) axes of what can be sparse, and why the rest stays dense."""
    options = model.sparsity_options()
    axes, reasons = {}, dict(options["exclude"])
    for name, value in model.params.items():
        if name not in reasons and np.ndim(value) > 1:
            axes[name] = tuple(axis % np.ndim(value) for axis in options["axes"](name, value))
    return axes, reasons


def adapted_axes(model):
    """What LoRA holds the axes of each weight to be."""
    adapted = jaxonnx.LoRA(1, where=".*").attach(model, KEY)
    return dict(Adapters.of(adapted).layouts)


class Drawn(Exception):
    """Raised where a weight would be drawn, with the shape of what is asked for."""


def fans(model, *names):
    """The inputs and outputs of the first weight that `reinitialize` asks an initializer for."""

    def initializer(key, shape, dtype):
        raise Drawn(shape)

    try:
        model.reinitialize(KEY, names, initializer)
    except Drawn as drawn:
        (shape,) = drawn.args
        receptive = np.prod(shape[:-2], dtype=int)
        return int(shape[-2] * receptive), int(shape[-1] * receptive)
    return None


def written_std(model, name):
    """The standard deviation that `add_training(init="he")` writes for one weight."""
    proto = jaxonnx.add_training(
        model,
        loss="squared_error",
        optimizer=jaxonnx.optim.momentum(0.1),
        trainable=[name],
        init="he",
    )
    (node,) = [
        node
        for node in proto.training_info[0].initialization.node
        if node.output[0] == proto.training_info[0].initialization_binding[-1].value
    ]
    scales = [a.f for a in node.attribute if a.name == "scale"]
    return scales[0] if scales else None


# One decorator is all that a new operator with a matrix weight needs.


@pytest.fixture
def twisted():
    """An operator y = x (w' or w) + b of a domain of this test."""

    @op("Twisted", since=1, domain="test", weights={"w": matrix(transpose="turned")}, params=("b",))
    def twisted(x, w, b=None, *, turned=0):
        y = x @ (w.T if turned else w)
        return y if b is None else y + b

    yield twisted
    del registry._OPS["test", "Twisted"]


@pytest.mark.usefixtures("twisted")
def test_one_decorator_makes_an_operator_with_a_matrix_weight():
    model = load("y = test.Twisted <turned = 1> (x, w, b)", w=[16, 8], b=[16])
    assert [*model.params] == ["w", "b"]  # its role
    assert adapted_axes(model) == {"w": Matrix(0, 1)}
    assert fans(model, "w") == (8, 16)
    np.testing.assert_allclose(written_std(model, "w"), (2 / 8) ** 0.5, rtol=1e-6)
    assert sparse_axes(model)[0] == {"w": (0, 1)}
    summary = model.summary()
    assert summary.matrices == {"w": (16, 8)}
    assert [(x.operator, x.parameters) for x in summary.layers] == [("Twisted", 16 * 8 + 16)]
    np.testing.assert_array_equal(model.reinitialize(KEY, "b").params["b"], 0)


def test_what_is_declared_must_exist():
    with pytest.raises(ValueError, match="'v'"):

        @op("Wrong", since=1, domain="test", weights={"v": matrix()})
        def wrong(x, w):
            return x @ w

    with pytest.raises(ValueError, match="'transW'"):

        @op("Wrong", since=1, domain="test", weights={"w": matrix(transpose="transW")})
        def wrong_too(x, w):
            return x @ w

    assert ("test", "Wrong") not in registry._OPS


# Forms.


@pytest.mark.parametrize(
    ("form", "rank", "attributes", "expected"),
    [
        (matrix(), 2, {}, Matrix(1, 0)),
        (matrix(transpose="t"), 2, {"t": 1}, Matrix(0, 1)),
        (matrix(first=True), 2, {}, Matrix(0, 1)),
        (matrix(first=True, transpose="t"), 2, {"t": 1}, Matrix(1, 0)),
        (matrix(), 3, {}, Matrix(2, 1, batch=(0,))),
        # the first axis goes behind the batch before the last two are exchanged
        (matrix(batch="m"), 3, {"m": 1}, Matrix(2, 0, batch=(1,))),
        (matrix(transpose="t", batch="m"), 4, {"t": 1, "m": 1}, Matrix(0, 3, batch=(1, 2))),
        (matrix(), 1, {}, None),
        (convolution(), 4, {}, Matrix(0, 1, (2, 3))),
        (convolution(), 3, {"group": 2}, Matrix(0, 1, (2,), grouped=True)),
        (convolution(transposed=True), 3, {}, Matrix(1, 0, (2,))),
        (convolution(depthwise=True), 3, {}, Matrix(0, 1, (2,), grouped=True)),
        (table("axis"), 2, {}, Matrix(1, 0, lookup=True)),
        (table("axis"), 2, {"axis": -1}, Matrix(0, 1, lookup=True)),
        (table(), 3, {}, None),
    ],
)
def test_forms(form, rank, attributes, expected):
    assert form.axes(rank, attributes) == expected


@pytest.mark.parametrize(
    ("equation", "position", "expected"),
    [
        ("bi,oi->bo", 1, Matrix(0, 1)),
        ("io, ...i -> ...o", 0, Matrix(1, 0)),
        ("bsi,io", 1, Matrix(1, 0)),
        ("ebi,eoi->ebo", 1, Matrix(1, 2, batch=(0,))),
        ("bi,ij,jo->bo", 1, None),  # both are summed
        ("bi,iho->bho", 1, None),  # two axes of outputs
        ("bi,ii->bi", 1, None),  # a diagonal
        ("bi,oi->b", 1, None),  # a sum of the outputs
        ("io->oi", 0, None),
        ("b,o->bo", 1, None),
    ],
)
def test_factors_of_einsum(equation, position, expected):
    rank = len(equation.partition("->")[0].split(",")[position].strip())
    assert einsum("equation").axes(rank, {"equation": equation}, position) == expected


def test_weights_of_einsum_are_sparse_along_the_sum():
    model = load(
        'h = Einsum <equation = "bi,oi->bo"> (x, w) y = MatMul(h, v)', w=[16, 8], v=[16, 4]
    )
    assert sparse_axes(model)[0] == {"w": (0, 1), "v": (1, 0)}
    assert adapted_axes(model) == {"w": Matrix(0, 1), "v": Matrix(1, 0)}
    assert fans(model, "w") == (8, 16)
    pruned = sparse.prune(model.params, **model.sparsity_options())
    sparse.verify(model.replace(params=pruned).with_sparsity())


# Fused operators.

FUSED = {
    "FusedGemm": (
        'h = com.microsoft.FusedGemm <transB = 1, activation = "Relu"> (x, w, b)',
        {"w": [16, 8], "b": [16]},
        (0, 1),
    ),
    "FusedMatMul": ("h = com.microsoft.FusedMatMul <alpha = 0.5> (x, w)", {"w": [8, 16]}, (1, 0)),
    "FusedMatMul, transB": (
        "h = com.microsoft.FusedMatMul <transB = 1> (x, w)",
        {"w": [16, 8]},
        (0, 1),
    ),
    "FusedConv": (
        """s = Constant <value_ints = [-1, 8, 1, 1]> ()
        i = Reshape(x, s)
        c = com.microsoft.FusedConv <activation = "Relu"> (i, w, b)
        h = Flatten(c)""",
        {"w": [16, 8, 1, 1], "b": [16]},
        (0, 1),
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", FUSED)
def test_weights_of_fused_operators_are_trained_sparse(name):
    nodes, shapes, axes = FUSED[name]
    model = load(f"{nodes} y = MatMul(h, v)", v=[16, 4], **shapes)
    assert sparse_axes(model)[0] == {"w": axes, "v": (1, 0)}
    draw = np.random.default_rng(0)
    x, t = (draw.standard_normal((32, n)).astype(np.float32) for n in (8, 4))
    trained = jaxonnx.train(
        model,
        (x, t),
        loss="squared_error",
        optimizer=optax.sgd(1e-3),
        epochs=2,
        batch_size=16,
        sparsity="2:4",
    ).model
    assert trained.sparsity is not None
    assert {layer.name: layer.axes for layer in trained.sparsity.layers} == {"w": axes, "v": (1, 0)}
    assert np.mean(np.asarray(trained.params["w"]) == 0) == 0.5
    sparse.verify(trained)


def test_axes_that_a_fused_product_moves():
    model = load(
        """b = Constant <value_ints = [2, -1, 8]> ()
        r = Reshape(x, b)
        y = com.microsoft.FusedMatMul <transBatchB = 1> (r, w)""",
        w=[8, 2, 4],
    )
    assert adapted_axes(model) == {"w": Matrix(2, 0, batch=(1,))}
    assert fans(model, "w") == (8, 4)
    assert sparse_axes(model)[0] == {"w": (2, 0)}


def test_the_packed_weight_of_attention():
    model = load(
        """b = Constant <value_ints = [1, -1, 8]> ()
        r = Reshape(x, b)
        y, z = com.microsoft.Attention <num_heads = 2> (r, w, b3)""",
        w=[8, 24],
        b3=[24],
    )
    assert adapted_axes(model) == {"w": Matrix(1, 0)}
    assert sparse_axes(model)[0] == {"w": (1, 0)}


# Functions, subgraphs and views.

LINEAR = """
<domain: "local", opset_import: ["": 17]>
linear (a, w, b) => (c) { c = Gemm <transB = 1> (a, w, b) }
"""
HOLDER = """
<domain: "local", opset_import: ["": 17]>
holder (a) => (c) {
  u = Constant <value = float[2,8] {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}> ()
  c = Gemm <transB = 1> (a, u)
}
"""


def test_weights_of_functions_have_their_own_axes():
    model = load("y = local.linear(x, w, b)", LINEAR, w=[16, 8], b=[16])
    assert sparse_axes(model) == (
        {"w": (0, 1)},
        {"b": "input 2 of Gemm, no factor of a matrix product"},
    )
    assert adapted_axes(model) == {"w": Matrix(0, 1)}
    assert fans(model, "w") == (8, 16)
    np.testing.assert_allclose(written_std(model, "w"), (2 / 8) ** 0.5, rtol=1e-6)


def test_weights_lifted_out_of_functions_have_their_true_axes():
    model = load("t = Transpose(w) h = MatMul(x, t) y = local.holder(h)", HOLDER, w=[8, 8])
    (name,) = model.params.keys() - {"w"}
    # of one axis, the pattern stands along what is summed over
    assert sparse_axes(model)[0] == {"w": (0, 1), name: (0, 1)}
    turned = HOLDER.replace("<transB = 1> ", "").replace("float[2,8]", "float[8,2]")
    model = load("y = local.holder(x)", turned)
    (name,) = model.params
    assert sparse_axes(model)[0] == {name: (1, 0)}
    assert model.summary().matrices == {name: (2, 8)}
    assert [layer.parameters for layer in model.summary().layers] == [16]


BRANCHES = """
k = Constant <value = bool {1}> ()
y = If (k) <
  then_branch = g1 () => (float[n,m] p) { p = PRODUCT },
  else_branch = g2 () => (float[n,m] q) { q = Identity(x) }
>
"""


@pytest.mark.parametrize("product", ["MatMul(x, w)", "Gemm(x, w)"])
def test_weights_that_a_subgraph_captures_have_their_true_axes(product):
    model = load(BRANCHES.replace("PRODUCT", product), w=[8, 4])
    assert sparse_axes(model)[0] == {"w": (1, 0)}
    assert fans(model, "w") == (8, 4)
    assert adapted_axes(model) == {"w": Matrix(1, 0)}


@pytest.mark.parametrize(
    ("view", "shape", "expected"),
    [
        ("s = Constant <value = int64[2] {8, -1}> () v = Reshape(w, s)", [8, 4], Matrix(1, 0)),
        (
            "s = Constant <value = int64[2] {0, -1}> () v = Reshape(w, s)",
            [8, 1, 4],
            Matrix(2, 0, (1,)),
        ),
        ("v = Squeeze(w)", [1, 8, 4], Matrix(2, 1, (0,))),
        ("f = Flatten(w) v = Transpose(f)", [4, 8, 1], Matrix(0, 1, (2,))),
    ],
)
def test_axes_of_length_one_may_come_and_go(view, shape, expected):
    model = load(f"{view} y = MatMul(x, v)", w=shape)
    assert adapted_axes(model) == {"w": expected}
    assert sparse_axes(model)[0] == {"w": (expected.output, expected.input)}
    assert fans(model, "w") == (8, 4)


@pytest.mark.parametrize(
    "shape",
    [
        "Constant <value = int64[2] {8, 4}> ()",
        "Constant <value = int64[2] {3, -1}> ()",  # an error of the file, which runs until there
        "Shape(x)",
    ],
)
def test_the_axes_of_a_weight_that_a_reshape_mixes_are_not_known(shape):
    model = load(f"s = {shape} v = Reshape(w, s) y = MatMul(x, v)", w=[4, 8])
    assert sparse_axes(model) == (
        {},
        {"w": "reshaped before input 1 of MatMul, so that its axes are not known"},
    )
    with pytest.raises(jaxonnx.InputError, match="w"):
        adapted_axes(model)


# First values.


@pytest.mark.deep
def test_what_vectors_and_tables_start_from():
    """Every one of these started at 0, or at 1 where it was the embedding, which nothing can."""
    shapes = {"words": [16, 8], "places": [4, 8], "kinds": [2, 8], "gamma": [8], "beta": [8]}
    nodes = """
    i = Cast <to = 6> (x)
    e, m = com.microsoft.EmbedLayerNormalization (i, i, words, places, kinds, gamma, beta)
    h = Mul(e, scale) a = Add(h, shift) p = PRelu(a, slope)
    s = Constant <value_ints = [-1, 64]> () y = Reshape(p, s)
    """
    model = load(nodes, scale=[8], shift=[8], slope=[8], **shapes)
    new = model.reinitialize(KEY, ".*").params
    constants = {"gamma": 1, "beta": 0, "scale": 1, "shift": 0, "slope": 0.25}
    for name, value in constants.items():
        np.testing.assert_array_equal(new[name], value, err_msg=name)
    for name in ("words", "places", "kinds"):
        assert fans(model, name) == (8, shapes[name][0])
    proto = jaxonnx.add_training(
        model, loss="squared_error", optimizer=jaxonnx.optim.momentum(0.1), init="he"
    )
    state = jaxonnx.load(proto).training.init(KEY)
    for name, value in constants.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)


def test_a_matrix_with_one_output_is_drawn():
    model = load("y = MatMul(x, w)", w=[8, 1])
    assert np.all(model.reinitialize(KEY, "w").params["w"] != 0)


# Every file.


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:.*the embedding and the output layer are one weight")
@pytest.mark.filterwarnings("ignore:this seems to be an eval_model.onnx")
@pytest.mark.parametrize("file", FILES, ids=str)
def test_all_agree_on_every_weight(file):
    """LoRA, first values, sparsity, the written initialization and the summary: the same axes."""
    model = jaxonnx.load(DATA / file)
    if file.stem in WEIGHTLESS:
        with pytest.raises(jaxonnx.InputError, match="there are none"):
            adapted_axes(model)
        return
    stored = {n for n, w in weights(model.graph, model.tensors).items() if w.storage}
    held = {
        *model.params,
        *model.state,
    } - stored  # for those, tests/lowering/test_packed.py
    adapted = {name: place for name, place in adapted_axes(model).items() if name in held}
    axes, reasons = sparse_axes(model)
    matrices = {n: sizes for n, sizes in model.summary().matrices.items() if n not in stored}
    assert matrices.keys() == adapted.keys()
    vectors = sorted(model.params.keys() - adapted.keys() - TABLES)
    assert not vectors or fans(model, *vectors) is None, "biases and scales start from numbers"
    assert not axes.keys() & {*vectors}
    drawn = set()
    for name, place in adapted.items():
        shape = model.tensors[name].shape
        assert matrices[name] == place.sizes(shape)
        if (place, shape) not in drawn:  # as the layers before have it
            assert fans(model, name) == place.fans(shape)
            drawn.add((place, shape))
        assert sorted(place.order) == [*range(len(shape))]
        if name in axes:
            assert axes[name] == (place.output, place.input)
            assert not place.lookup
            assert not place.grouped
        elif name in model.params:
            dense = ("no factor", "taken apart or joined")
            assert place.lookup or place.grouped or any(why in reasons[name] for why in dense)


def test_scales_of_packed_weights_are_not_trained_by_default():
    """They belong to integers that are not trained; a float zero point and `absmax` as well."""
    random = np.random.default_rng(0)
    tensors = {
        "b": random.integers(0, 256, (16, 1, 16)).astype(np.uint8),
        "scales": random.uniform(0.01, 0.02, (16, 1)).astype(np.float32),
        "zero": random.uniform(7, 8, (16, 1)).astype(np.float32),
        "bias": random.normal(size=16).astype(np.float32),
        "codes": random.integers(0, 256, (128,)).astype(np.uint8),
        "absmax": random.uniform(size=16).astype(np.float32),
        "table": random.integers(0, 256, (32, 16)).astype(np.uint8),
        "steps": random.uniform(size=(32, 1)).astype(np.float32),
        "ids": np.arange(3),
    }
    make, domain = helper.make_node, {"domain": "com.microsoft"}
    node = make(
        "MatMulNBits",
        ["x", "b", "scales", "zero", "", "bias"],
        ["h"],
        K=32,
        N=16,
        block_size=32,
        **domain,
    )
    other = make(
        "MatMulBnb4",
        ["h", "codes", "absmax"],
        ["y"],
        K=16,
        N=16,
        block_size=16,
        quant_type=1,
        **domain,
    )
    rows = make("GatherBlockQuantized", ["table", "ids", "steps"], ["z"], block_size=32, **domain)
    graph = helper.make_graph(
        [node, other, rows],
        "packed",
        [helper.make_tensor_value_info("x", 1, ["n", 32])],
        [helper.make_tensor_value_info(n, 1, None) for n in ("y", "z")],
        [onnx.numpy_helper.from_array(x, n) for n, x in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    model = jaxonnx.load(proto)
    assert {*model.params} == {"bias"}
    chosen = jaxonnx.load(proto, trainable=["scales", "absmax"])
    assert {*chosen.params} == {"scales", "absmax"}
    loss = lambda p: chosen.apply(p, np.ones((2, 32), np.float32))[0].sum()  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(chosen.params)
    assert all(np.abs(g).max() > 0 for g in gradient.values())
