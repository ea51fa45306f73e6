"""Initializers that an exporter made one because they were equal before training."""

import numpy as np
import onnx.parser
import onnxruntime
import optax
import pytest

import jaxonnx
from tests.support.paths import DATA

FILE = DATA / "untrained.dynamo.onnx"
with np.load(DATA / "untrained.dynamo.npz") as stored:
    BATCH = stored["x"], stored["y"]
    RATE = float(stored["lr"])
    END = {name[4:]: stored[name] for name in stored if name.startswith("end:")}


def train(model, **settings):
    def loss(outputs, targets):
        return ((outputs - targets) ** 2).mean()

    settings = {"optimizer": optax.sgd(RATE), "batch_size": 8, "statistics": "batch"} | settings
    return jaxonnx.train(model, BATCH, loss=loss, **settings).model


def arrays(proto):
    return {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}


def test_a_step_of_an_untrained_network_is_pytorchs(tmp_path):
    net = jaxonnx.load(FILE)
    assert {*net.state} == {name for name in END if "running" in name}
    assert {*net.params} == END.keys() - net.state.keys()
    assert "bn2.bias" in str(net)
    after = train(net)
    for name, value in END.items():
        found = after.tensors[name]
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-5, err_msg=name)
    after.save(tmp_path / "out.onnx")
    written = onnx.load(tmp_path / "out.onnx")
    assert arrays(written).keys() >= END.keys()
    assert not [node for node in written.graph.node if node.op_type == "Identity"]
    session = onnxruntime.InferenceSession(tmp_path / "out.onnx")
    (expected,) = session.run(None, {"x": BATCH[0]})
    np.testing.assert_allclose(after(BATCH[0]), expected, rtol=1e-4, atol=1e-5)
    again = jaxonnx.load(tmp_path / "out.onnx")
    assert (again.params.keys(), again.state.keys()) == (after.params.keys(), after.state.keys())


def test_an_untouched_file_keeps_its_bits(tmp_path):
    net = jaxonnx.load(FILE)
    net.save(tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx").read_bytes() == FILE.read_bytes()
    moved = net.replace(params={**net.params, "ln.bias": net.params["ln.bias"] + 1})
    written = arrays(moved.to_onnx())
    assert [*written] == [*arrays(onnx.load(FILE)), "ln.bias"]


def test_tied_gives_what_the_file_says():
    net = jaxonnx.load(FILE, tied=".*")
    assert "bn2.weight" not in net.params
    assert "'bn1.weight' and " in str(net)
    assert {*net.state} == {name for name in END if "running" in name}
    assert [*net.with_trainable("ln.weight").params] == ["bn1.weight"]
    assert net.to_onnx() == onnx.load(FILE)


def test_weights_and_checkpoints_have_each_of_them(tmp_path):
    after = train(jaxonnx.load(FILE), checkpoint_dir=tmp_path / "run")
    after.save(tmp_path / "trained.onnx")
    after.save(tmp_path / "trained.safetensors")
    for again in (
        jaxonnx.load(tmp_path / "run"),
        jaxonnx.load(FILE, weights=tmp_path / "trained.onnx"),
        jaxonnx.load(FILE, weights=tmp_path / "trained.safetensors"),
        jaxonnx.load(FILE, weights={**after.params, **after.state}),
    ):
        for name in END:
            np.testing.assert_array_equal(again.tensors[name], after.tensors[name])
    back = jaxonnx.load(tmp_path / "trained.onnx", weights=FILE)
    np.testing.assert_array_equal(back.tensors["ln.weight"], np.ones(4))
    with pytest.warns(UserWarning, match="'ln.bias'"):
        jaxonnx.load(FILE, weights={"bn1.bias": np.full(4, 2, np.float32)})


def test_a_changed_network_is_saved_with_them():
    net = train(jaxonnx.load(FILE))
    hidden = net.with_outputs(["layer_norm"])
    session = onnxruntime.InferenceSession(hidden.to_onnx().SerializeToString())
    (expected,) = session.run(None, {"x": BATCH[0]})
    np.testing.assert_allclose(hidden(BATCH[0]), expected, rtol=1e-4, atol=1e-5)
    fresh = jaxonnx.load(FILE).with_outputs(["layer_norm"]).to_onnx()
    assert not [node for node in fresh.graph.node if node.op_type == "Identity"]
    jaxonnx.load(jaxonnx.load(FILE).with_head(3).to_onnx())(BATCH[0])
    int8 = jaxonnx.quantize(jaxonnx.load(FILE), [BATCH[:1]], "int8")
    jaxonnx.load(int8.to_onnx())(BATCH[0])


def record(node, *scopes):
    """Record the modules of a node as PyTorch's current exporter does."""
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(["", *scopes, "aten"]))


def load(nodes, modules, **tensors):
    """Load a file of these nodes, of which the first are in these modules, and weights w and v."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 21]>
        g (float[n, 4] x) => (float[n, 4] y) {{ {nodes} }}"""
    )
    for node, module in zip(proto.graph.node, modules, strict=False):
        if module.startswith("/"):
            node.name = module
        elif module:
            record(node, module)
    random = np.random.default_rng(0)
    tensors = {name: random.normal(size=(4, 4)) for name in "wv"} | tensors
    for name, value in tensors.items():
        value = value if value.dtype == np.int8 else value.astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    net = jaxonnx.load(proto)
    assert net.to_onnx().SerializeToString() == proto.SerializeToString()
    return net


LAYERS = "h = Gemm(x, w, c) y = Gemm(h, v, c)"
ZEROS, VARIED = np.zeros(4), np.arange(4) ** 2


@pytest.mark.parametrize(
    ("modules", "c", "expected"),
    [
        (("a", "b"), ZEROS, {"c", "b.bias"}),
        (("a", "b"), VARIED, {"c"}),  # shared on purpose
        (("a", "a"), ZEROS, {"c"}),  # one module, called twice
        (("/a/Gemm", "/a_1/Gemm"), ZEROS, {"c"}),  # the same by the older exporter
        (("", ""), ZEROS, {"c"}),  # nothing tells two modules
    ],
)
def test_a_bias_of_two_modules(modules, c, expected):
    net = load(LAYERS, modules, c=c)
    assert {*net.params} - {"w", "v"} == expected


def test_numbered_tensors_stay_numbered_and_have_aliases():
    nodes = "h = Gemm(x, w, val_7) y = Gemm(h, v, val_7)"
    net = load(nodes, ("a", "b"), val_7=ZEROS)
    assert {*net.params} == {"w", "v", "val_7", "val_1"}
    assert net.aliases == {"val_7": "a.bias", "val_1": "b.bias"}


def test_fillers_of_bare_normalizations_stay_constants():
    nodes = """a = LayerNormalization(x, val_3) b = LayerNormalization(a, val_3)
    h = Gemm(b, w) y = Gemm(h, v)"""
    assert {*load(nodes, ("a", "b"), val_3=np.ones(4)).params} == {"w", "v"}


def test_a_statistic_is_no_weight_even_where_no_module_is_known():
    nodes = """h = BatchNormalization(x, ones, c, c, ones) a = Gemm(h, w, c) y = Gemm(a, v)"""
    net = load(nodes, (), ones=np.ones(4), c=ZEROS)
    assert {*net.params} == {"w", "v", "ones", "c"}
    assert {*net.state} == {"c.running_mean", "ones.running_var"}


def test_buffers_scales_and_what_is_no_weight_stay_as_they_are():
    codes = np.eye(4, dtype=np.int8)
    nodes = """p = DequantizeLinear<axis = 0>(q, s, z) h = MatMul(x, p)
    o = DequantizeLinear<axis = 0>(r, s, z) i = MatMul(h, o) y = Gemm(i, w)"""
    zeros = np.zeros(4, np.int8)
    net = load(nodes, "aabbc", q=codes, r=codes, s=np.full(4, 0.5), z=zeros)
    assert {*net.tensors} == {"w", "v", "q", "r", "s", "z"}
    nodes = "a = Mul(x, std) b = Mul(a, std) h = Gemm(b, w) y = Gemm(h, v)"
    assert {*load(nodes, ("a", "b"), std=np.full(4, 2.0)).params} == {"w", "v"}


def test_a_branch_reads_its_own():
    nodes = """h = Gemm(x, w, c) t = ReduceSum<keepdims = 0>(x) zero = Constant<value_float = 0.0>()
    f = Greater(t, zero) y = If(f) <
      then_branch = one () => (float[n, 4] p) { p = Gemm(h, v, c) },
      else_branch = two () => (float[n, 4] q) { q = Gemm(h, v, c) }>"""
    proto = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 21]>
        g (float[n, 4] x) => (float[n, 4] y) {{ {nodes} }}""")
    record(proto.graph.node[0], "a")
    for attribute in proto.graph.node[-1].attribute:
        record(attribute.g.node[0], "b", f"b.{attribute.g.name}")
    for name, value in {"w": np.eye(4), "v": np.eye(4) * VARIED, "c": ZEROS}.items():
        tensor = onnx.numpy_helper.from_array(value.astype(np.float32), name)
        proto.graph.initializer.append(tensor)
    net = jaxonnx.load(proto)
    assert {*net.params} == {"w", "v", "c", "b.one.bias", "b.two.bias"}
    assert net.to_onnx() == proto
    changed = net.replace(params={**net.params, "b.one.bias": np.ones(4, np.float32)})
    x = np.ones((2, 4), np.float32)
    session = onnxruntime.InferenceSession(changed.to_onnx().SerializeToString())
    np.testing.assert_allclose(session.run(None, {"x": x})[0], changed(x))
    np.testing.assert_allclose(changed(x), net(x) + 1)
