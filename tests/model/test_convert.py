"""Files in float16, and with a newer opset, in onnxruntime's default session."""

import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from onnx import helper, numpy_helper

import jaxonnx
from jaxonnx import demo
from tests.support.paths import DATA

pytestmark = pytest.mark.filterwarnings("ignore:.* was not compared .*NOT_IMPLEMENTED")


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


def test_nodes_without_names_are_kept_by_their_output():
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 17]> g (float[n, 2] x) => (float[n, 2] y) '
        "{ h = MatMul(x, w) y = MatMul(h, v) }"
    )
    for name, x in {"w": [[1e5, 1], [1, 1]], "v": np.eye(2)}.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.array(x, np.float32), name))
    with pytest.raises(jaxonnx.InputError, match=r"keep= takes the nodes that read them, 'h'$"):
        jaxonnx.convert(proto, "float16")
    kept = jaxonnx.convert(proto, "float16", keep=["h"])
    assert {n: x.dtype.name for n, x in kept.params.items()} == {"w": "float32", "v": "float16"}
    with pytest.raises(jaxonnx.InputError, match="keep must be names of nodes, or operators"):
        jaxonnx.convert(proto, "float16", keep=[""])


def test_tensors_that_the_file_lists_as_inputs_are_halved():
    """As in the first versions of ONNX, and in files that let a caller override weights."""
    proto = onnx.parser.parse_model(
        '<ir_version: 3, opset_import: ["" : 9]> '
        "g (float[n, 2] x, float[2, 3] w, float[3, 2] v) => (float[n, 2] y) "
        "{ h = MatMul(x, w) y = MatMul(h, v) }"
    )
    for name, shape in {"w": (2, 3), "v": (3, 2)}.items():
        weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(weight, name))
    x = np.ones((2, 2), np.float32)
    for keep, last, casts in ([], "float16", 2), (["y"], "float32", 4):
        half = jaxonnx.convert(proto, "float16", keep=keep)
        assert {n: p.dtype.name for n, p in half.params.items()} == {"w": "float16", "v": last}
        file = half.to_onnx()
        onnx.checker.check_model(file, full_check=True)
        assert [value.name for value in file.graph.input] == ["x", "w", "v"]
        assert [node.op_type for node in file.graph.node].count("Cast") == casts
        np.testing.assert_allclose(run(half, x)[0], jaxonnx.load(proto)(x), rtol=5e-3)


@pytest.mark.parametrize(
    "nodes",
    [
        "h = MatMul(x, w) y = Celu(h)",
        "h = MatMul(x, w) y = Min(h, large)",  # onnxruntime has no kernel; nor has float16 1e5
        "h = MatMul(x, w) q = QuantizeLinear(h, s, z) y = DequantizeLinear(q, s, z)",
        "q, t, o = DynamicQuantizeLinear(x) d = DequantizeLinear(q, t, o) y = MatMul(d, w)",
    ],
)
def test_operators_without_float16_in_the_opset_stay_in_float32(nodes):
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 13]> g (float[n, 2] x) => (float[n, 2] y) '
        f"{{ {nodes} }}"
    )
    tensors = {"w": np.array([[1.5, 1], [1, -2]], np.float32), "large": np.float32(1e5)}
    tensors |= {"s": np.float32(0.1), "z": np.int8(3)}
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(x), name) for name, x in tensors.items()
    )
    half = jaxonnx.convert(proto, "float16")
    assert half.tensors["w"].dtype == np.float16
    x = np.array([[0.3, -0.7], [2, 1]], np.float32)
    np.testing.assert_allclose(run(half, x)[0], run(jaxonnx.load(proto), x)[0], rtol=2e-3)


def test_wrong_arguments():
    with pytest.raises(jaxonnx.InputError, match="keep must be names of nodes, or operators"):
        jaxonnx.convert(demo.mlp(), "float16", keep=["Softmax"])
    with pytest.raises(
        jaxonnx.InputError, match="type must be 'float16', 'float32', 'float64' or None"
    ):
        jaxonnx.convert(demo.mlp(), "float8")
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
            n = Constant<value = int64 {2}>()
            l = Loop (n, , b) <body = body (int64 i, bool k, float[2, 3, 4] u)
                => (bool k_out, float[2, 3, 4] v) {
                    k_out = Identity(k)
                    v = LogSoftmax<axis = 1>(u)
                }>
            y = If (c) <
                then_branch = t () => (float[2, 3, 4] p) { p = Softmax<axis = 1>(l) },
                else_branch = e () => (float[2, 3, 4] q) {
                    u = Unsqueeze<axes = [0]>(l)
                    q = Squeeze<axes = [0]>(u)
                }
            >
        }
        <domain: "loc", opset_import: ["" : 11]> double (v) => (w) {
            s = LogSoftmax<axis = 1>(v)
            w = Add(s, s)
        }
        """
    )
    model = jaxonnx.load(proto)
    newer = jaxonnx.convert(model, opset=21)
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    old, new = (
        onnxruntime.InferenceSession(file.SerializeToString()) for file in (proto, newer.to_onnx())
    )
    for c in (True, False):
        (expected,), (y,) = (s.run(None, {"x": x, "c": np.array(c)}) for s in (old, new))
        np.testing.assert_allclose(y, expected, rtol=1e-5)
        np.testing.assert_allclose(model(x, np.array(c)), expected, rtol=1e-5)


@pytest.mark.parametrize(("type", "opset"), [(None, 21), ("float16", None)])
def test_a_training_graph_is_left_out(type, opset):
    loss = "softmax_cross_entropy_with_integer_labels"
    file = jaxonnx.add_training(demo.mlp(), loss=loss, optimizer=jaxonnx.optim.adam(1e-2))
    with pytest.warns(UserWarning, match="the training graph of the file is left out"):
        assert not jaxonnx.convert(file, type, opset=opset).proto.training_info


def test_operators_of_onnxruntime_in_the_default_domain_stay():
    """Its builder writes them there, and ONNX's converter has no schema of them."""
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 8] x, bool c) => (float[n, 8] y) <float[8] s> {
            h = SimplifiedLayerNormalization<axis = -1, epsilon = 0.001>(x, s)
            y = If(c) <then_branch = t () => (float[n, 8] a) {
                a = SimplifiedLayerNormalization<axis = -1>(h, s) }, else_branch = e () =>
                (float[n, 8] b) { b = Neg(h) }>
        }"""
    )
    scale = np.linspace(0.5, 2, 8, dtype=np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(scale, "s"))
    converted = jaxonnx.convert(proto, opset=25).to_onnx()
    assert [(x.domain, x.version) for x in converted.opset_import] == [("", 25)]
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    before, after = (
        onnxruntime.InferenceSession(p.SerializeToString()) for p in (proto, converted)
    )
    for c in True, False:
        inputs = {"x": x, "c": np.array(c)}
        np.testing.assert_array_equal(before.run(None, inputs), after.run(None, inputs))


def test_half_precision_of_an_exported_transformer():
    model = jaxonnx.load(DATA / "families" / "transformers_albert.onnx")
    half = jaxonnx.convert(model, "float16")
    tokens = np.random.default_rng(0).integers(0, 8, (2, 6))
    inputs = [np.ones_like(tokens) if "mask" in v.name else tokens for v in model.inputs]
    floats, halves = (np.asarray(net(*inputs)) for net in (model, half))
    assert np.square(halves - floats).mean() < 1e-4 * floats.var()


def test_caches_of_a_decoder_are_float16(tmp_path):
    """As the files of onnxruntime-genai have them; a session reads what training starts from."""
    model = jaxonnx.load(DATA / "llm" / "builder" / "llama.onnx")
    half = jaxonnx.convert(model, "float16")
    assert {v.dtype.name for v in half.inputs if "past" in v.name} == {"float16"}
    assert half.outputs[0].dtype == np.float32
    half.save(tmp_path / "half.onnx")
    half = jaxonnx.load(tmp_path / "half.onnx").without_cache()
    ids = np.array([[5, 9, 60, 33]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    session = onnxruntime.InferenceSession(tmp_path / "half.onnx")
    caches = {
        v.name: np.zeros((1, 1, 0, 16), np.float16)
        for v in session.get_inputs()
        if "past" in v.name
    }
    (logits,) = session.run(["logits"], feeds | caches)
    np.testing.assert_allclose(half(**feeds), logits, atol=5e-3 * np.abs(logits).max())
    data = {"input_ids": [*ids] * 2}
    one, two = (
        jaxonnx.train(net, data, loss="causal_lm", optimizer=optax.sgd(0.0)).history.losses
        for net in (half, model)
    )
    assert one == pytest.approx(two, rel=1e-3)


def masked(random):
    """A file as PyTorch exports it before `torch.nn.utils.prune.remove`."""
    shapes = {"1.weight_orig": (16, 8), "2.weight_orig": (4, 16)}
    tensors = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name in shapes:
        mask = (np.abs(tensors[name]) > 0.5).astype(np.float32)
        tensors[name.replace("orig", "mask")] = mask
    nodes = [
        helper.make_node("Mul", ["1.weight_orig", "1.weight_mask"], ["1.weight"]),
        helper.make_node("Gemm", ["x", "1.weight"], ["h"], transB=1),
        helper.make_node("Mul", ["2.weight_mask", "2.weight_orig"], ["2.weight"]),
        helper.make_node("Transpose", ["2.weight"], ["t"]),
        helper.make_node("MatMul", ["h", "t"], ["y"]),
    ]
    ends = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", size])
        for name, size in (("x", 8), ("y", 4))
    ]
    stored = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_masks_of_pruning_are_folded_on_request():
    random = np.random.default_rng(0)
    proto, x = masked(random), random.normal(size=(16, 8)).astype(np.float32)
    data = (x, np.zeros((16, 4), np.float32))
    settings = {"loss": "squared_error", "optimizer": optax.sgd(1e-3), "progress": False}
    ways = (
        lambda model: jaxonnx.quantize(model, x),
        lambda model: jaxonnx.train(model, data, lora=jaxonnx.LoRA(rank=2), **settings),
        lambda model: jaxonnx.train(model, data, sparsity="2:4", epochs=3, **settings),
    )
    for way in ways:
        with pytest.raises(jaxonnx.Error, match=r"'?1.weight_orig.*pruning mask.*fold_masks=True"):
            way(jaxonnx.load(proto))
    folded = jaxonnx.convert(proto, fold_masks=True)
    file = folded.to_onnx()
    onnx.checker.check_model(file, full_check=True)
    assert {tensor.name for tensor in file.graph.initializer} == {"1.weight", "2.weight"}
    assert {*folded.params} == {"1.weight", "2.weight"}
    before, after = (
        onnxruntime.InferenceSession(p.SerializeToString()).run(None, {"x": x})[0]
        for p in (proto, file)
    )
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)
    quantize, adapt, sparsify = ways
    quantize(folded)
    with pytest.warns(match="2 weights with zeros.*become dense where adapters are merged"):
        adapt(folded)
    sparsify(folded)
    with pytest.raises(jaxonnx.InputError, match="multiplies no weight by a mask"):
        jaxonnx.convert(folded, fold_masks=True)


def linear(operator, dtype, outputs, **attributes):
    """A linear model of three features, with random numbers."""
    random = np.random.default_rng(0)
    rows = attributes.pop("rows")
    attributes["coefficients"] = random.normal(size=3 * rows).astype(np.float32).tolist()
    attributes["intercepts"] = random.normal(size=rows).astype(np.float32).tolist()
    node = helper.make_node(operator, ["x"], outputs, name="fit", domain="ai.onnx.ml", **attributes)
    kind = (
        onnx.TensorProto.STRING if "classlabels_strings" in attributes else onnx.TensorProto.INT64
    )
    ends = [helper.make_tensor_value_info(outputs[-1], onnx.TensorProto.FLOAT, ["n", None])]
    if outputs[1:]:
        ends.insert(0, helper.make_tensor_value_info(outputs[0], kind, ["n"]))
    x = helper.make_tensor_value_info("x", dtype, ["n", 3])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)]
    graph = helper.make_graph([node], "g", [x], ends)
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


INTEGERS, WORDS = {"classlabels_ints": [4, 2, 7]}, {"classlabels_strings": ["a", "b", "c"]}
LINEAR = {
    "one target": ("LinearRegressor", {"rows": 1}),
    "two targets": ("LinearRegressor", {"rows": 2, "targets": 2, "post_transform": "LOGISTIC"}),
    "softmax": ("LinearClassifier", {"rows": 3, **INTEGERS, "post_transform": "SOFTMAX"}),
    "words": ("LinearClassifier", {"rows": 3, **WORDS, "post_transform": "LOGISTIC"}),
    "plain": ("LinearClassifier", {"rows": 3, **WORDS}),
    "binary": ("LinearClassifier", {"rows": 1, "classlabels_ints": [4, 2]}),
    "binary, logistic": (
        "LinearClassifier",
        {"rows": 1, "classlabels_strings": ["n", "p"], "post_transform": "LOGISTIC"},
    ),
    "two rows": ("LinearClassifier", {"rows": 2, "classlabels_ints": [0, 1]}),
}


@pytest.mark.parametrize("kind", ["FLOAT", "DOUBLE", "INT64"])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_models_become_products_on_request(name, kind):
    operator, attributes = LINEAR[name]
    dtype = onnx.TensorProto.DataType.Value(kind)
    outputs = ["scores"] if operator == "LinearRegressor" else ["label", "scores"]
    proto = linear(operator, dtype, outputs, **attributes)
    model = jaxonnx.convert(proto, linear_as_gemm=True)
    rows = attributes["rows"]
    shapes = {name: x.shape for name, x in model.params.items()}
    assert shapes == {"fit.weight": (rows, 3), "fit.bias": (rows,)}
    file = model.to_onnx()
    onnx.checker.check_model(file, full_check=True)
    x = np.random.default_rng(1).normal(0, 3, (32, 3))
    x = x.astype(helper.tensor_dtype_to_np_dtype(dtype))
    oracle, known = proto, x
    if operator == "LinearRegressor":  # of which onnxruntime takes float32 alone
        oracle, known = linear(operator, 1, outputs, **attributes), x.astype(np.float32)
    before, after = (
        onnxruntime.InferenceSession(p.SerializeToString()).run(None, {"x": values})
        for p, values in ((oracle, known), (file, x))
    )
    for old, new in zip(before, after, strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
        if old.dtype == np.float32:
            np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)
        else:
            assert new.tolist() == old.tolist()


def test_a_linear_model_is_trained_as_a_product(tmp_path):
    """Labels that it gets wrong at first; what it calls classes stays in the file."""
    proto = linear("LinearClassifier", 1, ["label", "scores"], rows=3, **WORDS)
    assert not jaxonnx.load(proto).params
    model = jaxonnx.convert(proto, linear_as_gemm=True)
    x = np.random.default_rng(2).normal(size=(64, 3)).astype(np.float32)
    labels = x.argmin(1)
    result = jaxonnx.train(
        model.with_outputs(["scores"]), (x, labels), epochs=40, optimizer=optax.adam(0.1),
        loss="softmax_cross_entropy_with_integer_labels", batch_size=64,
    )  # fmt: skip
    trained = model.replace(params=result.model.params)
    trained.save(tmp_path / "net.onnx")
    found, _ = onnxruntime.InferenceSession(tmp_path / "net.onnx").run(None, {"x": x})
    assert np.mean(found == np.array(["a", "b", "c"])[labels]) > 0.9


@pytest.mark.parametrize(
    ("operator", "attributes", "message"),
    [
        ("LinearRegressor", {"post_transform": "PROBIT"}, "PROBIT of 1 scores"),
        ("LinearRegressor", {"post_transform": "LOGISTIC"}, "LOGISTIC of 1 scores"),
        ("LinearRegressor", {"targets": 2}, "3 coefficients and 1 intercepts for 2 scores"),
        ("LinearClassifier", {"classlabels_ints": [1, 2], "post_transform": "SOFTMAX"}, "SOFTMAX"),
    ],
)
def test_linear_models_without_an_equal_are_refused(operator, attributes, message):
    outputs = ["scores"] if operator == "LinearRegressor" else ["label", "scores"]
    proto = linear(operator, 1, outputs, rows=1, **attributes)
    with pytest.raises(jaxonnx.InputError, match=f"{operator} 'fit' has .*{message}"):
        jaxonnx.convert(proto, linear_as_gemm=True)
    with pytest.raises(jaxonnx.InputError, match="no LinearRegressor or LinearClassifier"):
        jaxonnx.convert(demo.model(), linear_as_gemm=True)


def test_a_file_of_trees_alone_gets_an_opset():
    proto = onnx.load(DATA / "families" / "xgboost.onnx")
    assert {entry.domain for entry in proto.opset_import} == {"ai.onnx.ml"}
    model = jaxonnx.convert(proto, opset=15)
    x = np.random.default_rng(0).normal(size=(5, model.inputs[0].shape[1])).astype(np.float32)
    double = model.then(lambda *values: values[-1] * 2)
    np.testing.assert_allclose(run(double, x)[0], 2 * run(model, x)[-1], rtol=1e-6)


INNER = {
    "constants of a body": """
        n (float[2, 3, 4, 4] x, bool c) => (float[2, 3, H, W] y) <float[1] w = {0.3}> {
            y = If (c) <then_branch = a () => (float[2, 3, H, W] t) {
                k = Constant <value = float[4] {1.0, 1.0, 2.0, 2.0}> ()
                r = Resize <mode = "linear"> (x, , k)
                t = Mul(r, w)
            }, else_branch = b () => (float[2, 3, H, W] e) {
                k = Constant <value = float[4] {1.0, 1.0, 3.0, 3.0}> ()
                r = Add(x, w)
                e = Resize <mode = "nearest"> (r, , k)
            }> }""",
    "operators that stay": """
        n (float[2, 3, 4, 4] x, bool c) => (float[2, 3, 4, 4] y, float[3, 2, 3, 4, 4] all)
        <float[1] w = {0.3}> {
            trip = Constant <value = int64 {3}> ()
            h, all = Loop (trip, c, x) <body = body (int64 i, bool g, float[2, 3, 4, 4] h)
                => (bool more, float[2, 3, 4, 4] next, float[2, 3, 4, 4] s) {
                more = Identity(g)
                k = Constant <value_float = 1.5> ()
                m = Mul(h, w)
                next = Min(m, k)
                s = Max(next, x)
            }>
            y = If (c) <then_branch = a () => (float[2, 3, 4, 4] t) { m = Shape(x)
                q = Max(m, m) f = Cast <to = 1> (q) s = ReduceSum <keepdims = 0> (f) t = Add(h, s)
            }, else_branch = b () => (float[2, 3, 4, 4] e) { m = Mul(h, w) e = Max(m, x) }> }""",
    "functions": """
        n (float[2, 3, 4, 4] x, bool c) => (float[2, 3, 4, 4] y) <float[1] w = {0.3}> {
            h = local.f(x, w, c)
            y = local.f(h, w, c)
        }
        <opset_import: ["": 18], domain: "local">
        f (v, w, c) => (r) {
            k = Constant <value_floats = [0.5]> ()
            s = Add(v, k)
            r = If (c) <then_branch = a () => (t) {
                three = Constant <value = float {3.0}> ()
                t = Mul(s, three)
            }, else_branch = b () => (e) { e = Max(s, w) }> }""",
}


@pytest.mark.parametrize("keep_inputs", [True, False])
@pytest.mark.parametrize("case", INNER)
def test_float16_of_bodies_and_functions(case, keep_inputs):
    header = '<ir_version: 8, opset_import: ["": 18, "local": 1]>'
    proto = onnx.parser.parse_model(header + INNER[case])
    half = jaxonnx.convert(proto, "float16", keep_inputs=keep_inputs)
    assert {str(x.dtype) for x in half.params.values()} <= {"float16"}
    onnx.checker.check_model(half.to_onnx(), full_check=True)
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 4)).astype(np.float32)
    like = x.astype(np.float32 if keep_inputs else np.float16)
    for chosen in (True, False):
        session = onnxruntime.InferenceSession(proto.SerializeToString())
        expected = session.run(None, {"x": x, "c": np.array(chosen)})
        session = onnxruntime.InferenceSession(half.to_onnx().SerializeToString())
        written = session.run(None, {"x": like, "c": np.array(chosen)})
        results = half(like, np.array(chosen))
        results = results if isinstance(results, tuple) else (results,)
        for a, b, c in zip(expected, written, results, strict=True):
            np.testing.assert_allclose(b.astype(np.float32), a, rtol=2e-3, atol=5e-3)
            np.testing.assert_allclose(np.asarray(c, np.float32), a, rtol=2e-3, atol=5e-3)
