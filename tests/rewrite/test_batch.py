"""Files exported for one batch size, and any batch."""

import jax
import numpy as np
import onnx.checker
import onnx.parser
import onnxruntime
import optax
import pytest

import jaxonnx
from tests.support.paths import DATA


@pytest.mark.deep
@pytest.mark.parametrize("name", sorted(path.stem for path in (DATA / "fixed").glob("*.onnx")))
def test_real_files_take_any_batch(name, tmp_path):
    path = DATA / "fixed" / f"{name}.onnx"
    network = name.split(".")[0]
    x = np.load(DATA / f"{network}.legacy.npz")["x"][:3]
    with pytest.raises(jaxonnx.InputError, match="batch='any'"):
        jaxonnx.load(path)(x)
    model = jaxonnx.load(path, batch="any")
    assert model.inputs[0].shape[0] == "batch"
    assert model.outputs[0].shape == ("batch", 10)
    expected = jaxonnx.load(DATA / f"{network}.dynamo.onnx")(x)
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)
    saved = tmp_path / "free.onnx"
    model.save(saved)
    onnx.checker.check_model(saved, full_check=True)
    session = onnxruntime.InferenceSession(saved, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-4, atol=1e-5)


def load(nodes, size="2,6", out="2,6", **options):
    text = (
        f'<ir_version: 9, opset_import: ["": 17]> g (float[{size}] x) => (float[{out}] y) {nodes}'
    )
    return jaxonnx.load(onnx.parser.parse_model(text), batch="any", **options)


@pytest.mark.parametrize(
    ("nodes", "out"),
    [
        # the batch as an axis of its own, in one with others, and back
        (
            """<int64[3] s = {2,2,3}, int64[2] t = {2,6}>
            { h = Reshape(x, s) y = Reshape(h, t) }""",
            (5, 6),
        ),
        ("<int64[2] s = {4,3}> { y = Reshape(x, s) }", (10, 3)),
        (
            """<int64[2] s = {4,3}, int64[3] t = {2,2,3}>
            { h = Reshape(x, s) y = Reshape(h, t) }""",
            (5, 2, 3),
        ),
        # both a number for the batch and an inferred axis, as PyTorch's current exporter writes
        ("<int64[3] s = {2,-1,2}> { y = Reshape<allowzero = 1>(x, s) }", (5, 3, 2)),
        # targets that are right already
        ("<int64[2] s = {-1,3}> { y = Reshape(x, s) }", (10, 3)),
        ("<int64[2] s = {0,-1}> { y = Reshape(x, s) }", (5, 6)),
        ("{ s = Shape(x) y = Reshape(x, s) }", (5, 6)),
        # a weight, which has no batch
        (
            """<float[6] w = {1,2,3,4,5,6}, int64[2] s = {6,1}>
            { v = Reshape(w, s) y = MatMul(x, v) }""",
            (5, 1),
        ),
        # the batch behind another axis
        (
            """<int64[2] s = {12,1}, int64[2] t = {6,2}>
            { h = Transpose(x) k = Reshape(h, s) m = Reshape(k, t) y = Transpose(m) }""",
            (5, 6),
        ),
    ],
)
def test_targets_of_reshape(nodes, out):
    model = load(nodes, out=",".join(f"d{i}" for i in range(len(out))))
    x = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    y = np.asarray(model(x))
    assert y.shape == out
    one_by_one = [np.asarray(model(x[i : i + 1])) for i in range(5)]
    np.testing.assert_allclose(np.concatenate(one_by_one), y, rtol=1e-5)


def test_tensors_of_one_example_beside_images(tmp_path):
    # a constant pad of the channels (BlazeFace), and a class token, which is trained
    nodes = """<float[1,1,2,2] z = {0,0,0,0}, float[2,1,1,1] w = {1,2}, float[1,2,3] c,
        float[3,2] v = {1,2,3,4,5,6}, int64[3] t = {1,3,4}> {
      h = Conv(x, w) p = Concat <axis = 1> (h, z) r = Reshape(p, t)
      s = Transpose <perm = [0,2,1]> (r) k = Concat <axis = -2> (c, s) y = MatMul(k, v)
    }""".replace("float[1,2,3] c", "float[1,2,3] c = {1,2,3,4,5,6}")
    model = load(nodes, size="1,1,2,2", out="1,6,2")
    x = np.random.default_rng(0).standard_normal((3, 1, 2, 2)).astype(np.float32)
    y = np.asarray(model(x))
    assert y.shape == (3, 6, 2)
    np.testing.assert_allclose(y, np.concatenate([model(row[None]) for row in x]), rtol=1e-5)
    model.save(tmp_path / "any.onnx")
    onnx.checker.check_model(tmp_path / "any.onnx", full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / "any.onnx")
    np.testing.assert_allclose(session.run(None, {"x": x})[0], y, rtol=1e-5)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (
            "<float[2,6] w = {1,2,3,4,5,6,7,8,9,10,11,12}> { y = Add(x, w) }",
            r"'y' \(Add.*fixes the batch to 2.*dynamic_shapes",
        ),
        ("<int64[2] i = {0,1}> { y = Gather(x, i) }", r"output 'y'.*\[2, 6\] whatever the batch"),
    ],
)
def test_what_fixes_the_batch_is_named(nodes, words):
    with pytest.raises(jaxonnx.InputError, match=words):
        load(nodes)


@pytest.mark.parametrize(
    ("nodes", "node"),
    [
        ("{ y = Softmax <axis = 0> (x) }", "'y' .Softmax"),
        ("{ m = ReduceMax <keepdims = 0> (x) z = Sub(x, m) y = Abs(z) }", "'z' .Sub"),
        ("{ z = LpNormalization <axis = 0> (x) y = Log(z) }", "'z' .LpNormalization"),
        (
            "{ s = Size(x) d = CastLike(s, x) z = Div(x, d) y = Identity(z) }",
            "'z' .Div",
        ),
        (
            """<int64[1,1] i = {0}, float[1,6] u = {1,2,3,4,5,6}>
            { y = ScatterND(x, i, u) }""",
            "'y' .ScatterND",
        ),
    ],
)
def test_what_mixes_the_examples_is_named(nodes, node):
    # onnxruntime gives other values for two rows in one batch than for each row
    with pytest.raises(jaxonnx.InputError, match=f"node {node}.*mixes the examples of a batch"):
        load(nodes, size="1,6", out="1,6")


LOOKUPS = {
    # DistilBERT, BERT and others of transformers 5 by the older exporter and by the current one
    "Gather": "k = Identity(mask) m = Gather(mask, first)",
    "flattened": "r = Reshape(mask, all) k = Gather(r, row) m = Reshape(k, one)",
    "GatherND": "k = Identity(mask) m = GatherND(mask, pairs)",
    # the last token, of which the index is computed (Qwen2 as a classifier, CLIP's text model)
    "computed": """i = ArgMax <axis = 1> (mask) c = Concat <axis = 1> (none, i)
        p = GatherND(x, c) u = Unsqueeze(p, last) e = Expand(u, one) m = Div(e, small)""",
    "computed, flattened": """i = ArgMax <axis = 1, keepdims = 0> (mask) r = Reshape(x, all)
        k = Gather(r, i) u = Unsqueeze(k, last) e = Expand(u, one) m = Div(e, small)""",
    # relative positions of heads that are in one axis with the batch (DeBERTa-v2)
    "heads": """u = Unsqueeze(x, last) e = Expand(u, two) r = Reshape(e, heads)
        p = MatMul(r, keys) g = GatherElements <axis = 2> (p, places) k = Reshape(g, two)
        d = ReduceSum <keepdims = 0> (k, last) m = Div(d, small)""",
    # the types of RoBERTa's tokens
    "GatherElements": "k = Identity(mask) m = GatherElements <axis = 1> (types, mask)",
}


@pytest.mark.parametrize("nodes", LOOKUPS.values(), ids=LOOKUPS)
def test_constants_that_look_up_the_example(nodes, tmp_path):
    """A file for one example gives for each of a batch what onnxruntime gives for it alone."""
    text = f"""<ir_version: 9, opset_import: ["": 17]>
    g (float[1,3] x, int64[1,3] mask) => (float[1,3] y)
    <int64[1] first = {{0}}, int64[1] last = {{1}}, int64[1] all = {{-1}}, int64[2] one = {{1,3}},
     int64[1,1] none = {{0}}, int64[1,3] row = {{0,1,2}}, int64[1,3,2] pairs = {{0,0,0,1,0,2}},
     int64[1,2] types = {{5,7}}, int64[3] two = {{1,2,3}}, int64[3] heads = {{2,1,3}},
     int64[2,1,3] places = {{0,2,1,1,1,0}}, float small = {{0.001}},
     float[2,3,3] keys = {{{", ".join(map(str, range(18)))}}}> {{
        {nodes} f = Cast <to = 1> (m) s = Mul(f, small) y = Add(x, s)
    }}"""
    proto = onnx.parser.parse_model(text)
    model = jaxonnx.load(proto, batch="any")
    draw = np.random.default_rng(0)
    x, mask = draw.standard_normal((4, 3)).astype(np.float32), draw.integers(0, 2, (4, 3))
    alone = onnxruntime.InferenceSession(proto.SerializeToString())
    pairs = zip(np.split(x, 4), np.split(mask, 4), strict=True)
    expected = np.concatenate([alone.run(None, {"x": a, "mask": b})[0] for a, b in pairs])
    np.testing.assert_allclose(model(x, mask), expected, rtol=1e-6)
    model.save(tmp_path / "any.onnx")
    onnx.checker.check_model(tmp_path / "any.onnx", full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / "any.onnx")
    np.testing.assert_allclose(session.run(None, {"x": x, "mask": mask})[0], expected, rtol=1e-6)


def test_a_mask_of_the_first_example_for_all():
    text = """<ir_version: 9, opset_import: ["": 17]>
    g (float[1,6] x, int64[1,6] mask) => (float[1,6] y)
    <int64[1] zero = {0}, int64[1] one = {1}, float small = {0.001}> {
        m = Slice(mask, zero, one, zero) f = Cast <to = 1> (m) s = Mul(f, small) y = Add(x, s)
    }"""
    words = "'y' .Add.*mixes the examples.* differ in the input 'mask' alone give other values"
    with pytest.raises(jaxonnx.InputError, match=words):
        jaxonnx.load(onnx.parser.parse_model(text), batch="any")


def test_ranges_and_logarithms_of_a_batch():
    # NaN and infinity of random inputs stand where those of each batch do
    y = load("{ y = Log(x) }", size="1,6", out="1,6")(np.ones((3, 6), np.float32))
    np.testing.assert_array_equal(y, np.zeros((3, 6)))
    # the range of a batch is shared: onnxruntime gives the same for both rows
    model = load(
        "{ q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z) }",
        size="1,6",
        out="1,6",
    )
    x = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
    session = onnxruntime.InferenceSession(model.to_onnx().SerializeToString())
    np.testing.assert_allclose(model(x), session.run(None, {"x": x})[0], atol=1e-6)


def test_messages_have_the_axes_of_the_file():
    # images are kept with their channels last inside, where JAX speaks of other shapes
    nodes = """<float[2,1,1,1] w = {1,2}, int64[4] s = {2,2,4,7}> {
      h = Conv(x, w) z = ConstantOfShape(s) y = Add(h, z)
    }"""
    with pytest.raises(jaxonnx.InputError, match=r"\(5, 2, 4, 7\), \(2, 2, 4, 7\)"):
        load(nodes, size="2,1,4,7", out="2,2,4,7")


def test_an_axis_that_cannot_be_told_from_the_batch():
    # two batches of two are mixed: the first axis of the result is not the batch
    nodes = """<int64[3] s = {2,2,3}, int64[2] t = {4,3}> {
      a = Reshape(x, s) b = Transpose <perm = [1,0,2]> (a) c = Reshape(b, t) y = Reshape(c, s)
    }"""
    with pytest.raises(jaxonnx.InputError, match="cannot be told from other axes"):
        load(nodes, out="2,2,3")


def test_open_files_stay_as_they_are():
    path = DATA / "lenet.legacy.onnx"
    assert jaxonnx.load(path, batch="any").to_onnx() == jaxonnx.load(path).to_onnx()
    with pytest.raises(jaxonnx.InputError, match="'any' or None, got 8"):
        jaxonnx.load(path, batch=8)


@pytest.mark.parametrize(
    ("nodes", "out", "node"),
    [
        ("<int64[3] s = {1,2,3}> { y = Reshape(x, s) }", "n,2,3", "Reshape"),
        ("<float[1,2] c = {5,6}> { y = Concat <axis = 1> (c, x) }", "n,8", "Concat"),
        (
            """<int64[3] s = {0,2,3}, float[1,4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12},
            float[1,4,1] r = {1,2,3,4}, float[1,1,1] h = {0}, int64[1] first = {0}> {
                a = Reshape(x, s) b = Transpose <perm = [1,0,2]> (a)
                c, d = LSTM <hidden_size = 1> (b, w, r, , , h, h) y = Squeeze(d, first)
            }""",
            "n,1",
            "LSTM",
        ),
    ],
)
def test_a_batch_that_is_open_in_name_alone(nodes, out, node):
    """ShuffleNet with dynamic_axes=, whose channel shuffle reads x.size() as numbers."""
    text = f'<ir_version: 9, opset_import: ["": 17]> g (float[n,6] x) => (float[{out}] y) {nodes}'
    proto = onnx.parser.parse_model(text)
    x = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    closed = jaxonnx.load(proto)
    with pytest.raises(jaxonnx.NodeError, match=rf"{node}.*batch='any'\) may open"):
        closed(x)
    model = jaxonnx.load(proto, batch="any")
    expected = np.concatenate([closed(row[None]) for row in x])
    np.testing.assert_allclose(model(x), expected, rtol=1e-5, atol=1e-6)
    session = onnxruntime.InferenceSession(model.to_onnx().SerializeToString())
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.deep
def test_dropout_behind_a_target_that_changes():
    path = DATA / "fixed" / "lenet.dynamo.1.onnx"
    model = jaxonnx.load(path).with_dropout({"view": 0.5}).with_any_batch()
    expected = jaxonnx.load(path, batch="any")
    x = np.random.default_rng(0).random((3, 1, 28, 28), np.float32)
    np.testing.assert_array_equal(model(x), expected(x))
    again = jaxonnx.load(model.to_onnx())
    np.testing.assert_array_equal(again(x), expected(x))


@pytest.mark.deep
def test_training_with_any_batch():
    model = jaxonnx.load(DATA / "fixed" / "lenet.dynamo.1.onnx", batch="any")
    x = np.random.default_rng(0).random((8, 1, 28, 28), np.float32)
    settings = {"loss": "squared_error", "optimizer": optax.sgd(0.1), "batch_size": 4}
    result = jaxonnx.train(model, (x, np.zeros((8, 10), np.float32)), epochs=2, **settings)
    assert result.history.epochs[1]["loss"] < result.history.epochs[0]["loss"]


def test_the_channels_of_one_image_are_no_batch():
    """A detector of torchvision takes one image, which a node puts into a batch of its own."""
    w = ", ".join(["1"] * 54)
    text = f"""<ir_version: 9, opset_import: ["": 17]>
    g (float[3, 16, 16] x) => (float[1, 2, 14, 14] y)
    <int64[1] first = {{0}}, float[2, 3, 3, 3] w = {{{w}}}> {{
        b = Unsqueeze(x, first)
        y = Conv(b, w)
    }}"""
    words = r"'x' \[3, 16, 16\] one image of 3 channels, without a batch\? Then model.with_batch"
    proto = onnx.parser.parse_model(text)
    with pytest.raises(jaxonnx.InputError, match=words):
        jaxonnx.load(proto, batch="any")
    x = np.zeros((8, 3, 16, 16), np.float32)
    # data with one axis more say the same, and are mapped
    assert jaxonnx.load(proto).predict(x, batch_size=5).shape == (8, 1, 2, 14, 14)
    assert jax.vmap(jaxonnx.load(proto))(x).shape == (8, 1, 2, 14, 14)


KERNEL = ", ".join(f"{x:.2f}" for x in np.random.default_rng(1).normal(size=108))


@pytest.mark.parametrize("batch", ["1", "n"])
@pytest.mark.parametrize(
    ("shape", "nodes", "out"),
    [
        (
            "3,h,w",
            f"""<float[4,3,3,3] k = {{{KERNEL}}},
            int64[5] s = {{1,2,2,-1,1}}, int64[3] t = {{1,4,-1}}> {{
                a = Conv <strides = [2,2]> (x, k) b = Reshape(a, s)
                c = Transpose <perm = [0,2,1,3,4]> (b) y = Reshape(c, t) }}""",
            "4,p",
        ),
        ("t,4", "<int64[4] s = {1,-1,2,2}> { y = Reshape<allowzero = 1>(x, s) }", "t,2,2"),
        ("1,t", "<int64[2] s = {1,-1}> { y = Reshape(x, s) }", "t"),
    ],
    ids=["picture", "text", "wave"],
)
def test_other_axes_may_be_open_too(batch, shape, nodes, out):
    """They were refused, or left as they are where the batch is open in name alone."""
    proto = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 17]>
        g (float[{batch},{shape}] x) => (float[{batch},{out}] y) {nodes}""")
    random = np.random.default_rng(0)
    model, closed = jaxonnx.load(proto, batch="any"), jaxonnx.load(proto)
    session = onnxruntime.InferenceSession(model.to_onnx().SerializeToString())
    for sizes in ({"h": 19, "w": 24, "t": 5}, {"h": 40, "w": 33, "t": 8}):
        rest = [int(sizes.get(size, size)) for size in shape.split(",")]
        x = random.standard_normal((3, *rest)).astype(np.float32)
        expected = np.concatenate([closed(row[None]) for row in x])
        np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-4, atol=1e-5)


def test_what_mixes_the_batch_with_open_axes_is_refused():
    """The target of Reshape has the batch as a number, and the length of the input."""
    nodes = """<int64[2] b = {1,2}, int64[1] one = {1}, int64[1] two = {2}> {
        s = Shape(x) t = Slice(s, one, two) u = Concat <axis = 0> (b, t)
        y = Reshape(x, u) }"""
    with pytest.raises(jaxonnx.InputError, match="of 'y' fixes the batch, and depends on other"):
        load(nodes, size="1,t,2", out="1,2,t")
