"""What `load` refuses, and how it says so; what it reads besides the ordinary."""

import contextlib
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxonnx
from tests.support.paths import DATA, ROOT

HEADER = '<ir_version: 10, opset_import: ["": 22]>'
MODEL = """
g (float[n,3] x) => (float[n,2] y) <float[3,2] w = {1,2,3,4,5,6}, float[2] b = {1,-1}> {
  y = Gemm(x, w, b)
}
"""
X = np.array([[1, 2, 3]], np.float32)


def parse(text, header=HEADER):
    proto = onnx.parser.parse_model(f"{header} {text}")
    for tensor in proto.graph.initializer:  # as exporters write them: as raw data
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    return proto


def body(nodes, header=HEADER, functions=""):
    return parse(f"g (float[n,3] x) => (y) {{ {nodes} }} {functions}", header)


def refused(source, *words, error=jaxonnx.ModelError):
    """Loading raises the error, with all the words in its message."""
    with pytest.raises(error) as caught:
        jaxonnx.load(source)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["no graph"]),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), ["not an ONNX"]),
        (b"PK\x03\x04 a zip archive of something else", ["not an ONNX"]),
        (b"<html>404: not found</html>", ["not an ONNX"]),
    ],
)
def test_not_an_onnx_file(content, words, tmp_path):
    path = tmp_path / "net.onnx"
    path.write_bytes(content)
    refused(path, *words, "net.onnx")
    refused(content, "ONNX")


def test_no_file(tmp_path):
    refused(tmp_path / "nothing.onnx", "nothing.onnx", "not a file")
    refused(tmp_path, "a folder without checkpoints", "an .onnx file")


def test_every_truncation_is_noticed(tmp_path):
    data = parse(MODEL).SerializeToString()
    for end in range(len(data)):
        refused(data[:end], error=jaxonnx.Error)


@pytest.mark.parametrize("name", ["lenet_bn.legacy", "transformer.dynamo", "sklearn_mlp"])
def test_truncated_export(name, tmp_path):
    data = (DATA / f"{name}.onnx").read_bytes()
    for end in np.linspace(0, len(data) - 1, 40).astype(int):
        refused(data[:end], error=jaxonnx.Error)
    path = tmp_path / "short.onnx"
    path.write_bytes(data[: len(data) // 2])
    refused(path, "short.onnx", "truncated")


FUZZED = """
g (float[n,3] x, bool c) => (float[n,2] y) <float[3,2] w = {1,2,3,4,5,6}, int64[1] a = {0}> {
  k = Constant <value = float[2] {1,2}> ()
  h = MatMul(x, w)
  f = local.f <s: float = 2.0> (h, k)
  y = If (c) <
    then_branch = t () => (float[n,2] t) { t = Relu(f) },
    else_branch = e () => (float[n,2] e) { e = Identity(f) }
  >
}
<domain: "local", opset_import: ["": 22]>
f <s> (p, q) => (r) {
  u = Constant <value_float: float = @s> ()
  v = Mul(p, u)
  r = Add(v, q)
}
"""


@pytest.mark.parametrize("seed", range(3))
def test_damaged_files_load_or_are_refused(seed):
    data = parse(FUZZED, '<ir_version: 10, opset_import: ["": 22, "local": 1]>').SerializeToString()
    draw = random.Random(seed)
    for _ in range(700):
        damaged = bytearray(data)
        for _ in range(draw.choice([1, 1, 2, 5])):
            damaged[draw.randrange(len(data))] = draw.randrange(256)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(jaxonnx.Error):
                jaxonnx.load(bytes(damaged))


def external(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    path = folder / "net.onnx"
    onnx.save_model(
        parse(MODEL), path, save_as_external_data=True, location="net.data", size_threshold=0
    )
    return path


def point_to(path, **entries):
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            entry.value = entries.get(entry.key, entry.value)
    path.write_bytes(proto.SerializeToString())


def test_external_data(tmp_path):
    path = external(tmp_path)
    np.testing.assert_array_equal(jaxonnx.load(path)(X), [[23, 27]])
    refused(path.read_bytes(), "'w'", "net.data", "by its path")


def test_external_data_is_not_held_open(tmp_path):
    path = external(tmp_path)
    model = jaxonnx.load(path)
    (path.parent / "net.data").write_bytes(bytes(32))
    np.testing.assert_array_equal(model(X), [[23, 27]])


def test_missing_and_short_external_data(tmp_path):
    path = external(tmp_path)
    data = path.parent / "net.data"
    data.write_bytes(data.read_bytes()[:10])
    refused(path, "'w'", "net.data", "truncated")
    data.unlink()
    refused(path, "'w'", "net.data", "does not exist")


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "", "a/../../secret", "link"])
def test_external_data_outside_the_folder(location, tmp_path):
    path = external(tmp_path)
    (tmp_path / "secret").write_bytes(bytes(1000))
    (path.parent / "link").symlink_to(tmp_path / "secret")
    point_to(path, location=location)
    refused(path, "'w'", f"'{location}'", "outside")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"offset": "-4"}, ["needs bytes"]),
        ({"length": "8"}, ["needs 24 bytes but has 8"]),
        ({"length": "many"}, ["bad external data entry"]),
        ({"offset": "1000000"}, ["truncated"]),
    ],
)
def test_bad_external_entries(entry, words, tmp_path):
    path = external(tmp_path)
    point_to(path, **entry)
    refused(path, "'w'", *words)


def with_weight(**fields):
    proto = parse(MODEL)
    weight = proto.graph.initializer[0]
    weight.CopyFrom(numpy_helper.from_array(np.ones((3, 2), np.float32), "w"))
    for key, value in fields.items():
        if key == "dims":
            weight.dims[:] = value
        else:
            setattr(weight, key, value)
    return proto


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dims": [3, -2]}, ["negative dimension", "[3, -2]"]),
        ({"dims": [3, 4]}, ["needs 48 bytes but has 24"]),
        ({"raw_data": bytes(25)}, ["needs 24 bytes but has 25"]),
        ({"raw_data": b""}, ["needs 24 bytes but has 0"]),
        ({"data_type": 99}, ["element type 99"]),
        ({"data_type": TensorProto.INT4}, ["needs 3 bytes but has 24"]),
        ({"name": "b"}, ["2 initializers named 'b'"]),
    ],
)
def test_bad_tensors(fields, words):
    refused(with_weight(**fields), f"'{fields.get('name', 'w')}'", *words)


def test_all_unknown_operators_at_once():
    proto = body("a = Foo(x) b = my.Bar(a) c = Foo(b) y = other.Baz(c)", HEADER)
    proto.opset_import.append(helper.make_opsetid("my", 1))
    proto.graph.node[0].name = "first"
    refused(
        proto,
        "ai.onnx.Foo (opset 22): 'first', 'c'",
        "my.Bar (opset 1): 'b'",
        "other.Baz (domain 'other' is not imported): 'y'",
        error=jaxonnx.UnsupportedError,
    )


def test_operator_newer_than_the_opset():
    proto = body("y = Gelu(x)", '<ir_version: 8, opset_import: ["": 17]>')
    refused(proto, "Gelu (opset 17)", error=jaxonnx.UnsupportedError)


def test_nodes_are_sorted_as_onnxruntime_does():
    """In the main graph, whose subgraphs read from it too."""
    proto = parse("""
    g (float[2] x, bool c) => (float[2] y) {
      y = If(c) <
        then_branch = a () => (float[2] t) { s = Neg(z) t = Add(s, x) },
        else_branch = b () => (float[2] e) { e = Identity(z) }
      >
      z = Relu(x)
    }""")
    before = proto.SerializeToString()
    model = jaxonnx.load(proto)
    assert proto.SerializeToString() == before
    x = np.array([1, -2], np.float32)
    for c in (True, False):
        given = {"x": x, "c": np.array(c)}
        (expected,) = onnxruntime.InferenceSession(before).run(None, given)
        np.testing.assert_array_equal(model(**given), expected)
    saved = model.to_onnx()
    onnx.checker.check_model(saved, full_check=True)
    assert [node.op_type for node in saved.graph.node] == ["Relu", "If"]


BRANCH = """g (float[2] x, bool c) => (float[2] z) {
  h = Mul(x, x)
  y = If (c) <
    then_branch = a () => (float[2] i) {
      k = Neg(h)
      i = If (c) <then_branch = p () => (float[2] k) {}, else_branch = q () => (float[2] h) {}>
    },
    else_branch = b () => (float[2] x) {}
  >
  z = Mul(y, x)
}"""
CARRIED = """g (float[2] x, int64 n) => (float[2] y, float[m,2] z) {
  h = Mul(x, x)
  go = Constant<value_int=1>()
  t = Cast<to=9>(go)
  y, s, z = Loop (n, t, x, x) <
    body = b (int64 i, bool c, float[2] u, float[2] v)
      => (bool t, float[2] h, float[2] w, float[2] h) { w = Add(u, v) }
  >
}"""


@pytest.mark.parametrize(
    ("text", "feeds"),
    [
        (BRANCH, {"x": np.array([1, -2], np.float32), "c": np.array(True)}),
        (BRANCH, {"x": np.array([1, -2], np.float32), "c": np.array(False)}),
        (CARRIED, {"x": np.array([1, -2], np.float32), "n": np.array(3)}),
    ],
)
def test_subgraphs_return_copies_of_outer_values(text, feeds):
    """As PyTorch wrote branches of If; onnxruntime and the checker refuse such files."""
    proto = parse(text)
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail):
        onnxruntime.InferenceSession(proto.SerializeToString())
    with pytest.warns(UserWarning, match=r"return values of a graph around them: .*\bh\b"):
        model = jaxonnx.load(proto)
    saved = model.to_onnx()
    onnx.checker.check_model(saved, full_check=True)
    results = model(**feeds)
    expected = onnxruntime.InferenceSession(saved.SerializeToString()).run(None, feeds)
    reference = onnx.reference.ReferenceEvaluator(proto).run(["y"] if "n" in feeds else None, feeds)
    results = results if isinstance(results, tuple) else (results,)
    for result, theirs in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, theirs)
    np.testing.assert_array_equal(results[0], reference[0])


def test_operators_of_onnxruntime_need_no_import():
    nodes = "h = com.microsoft.Gelu(x) y = com.microsoft.FusedMatMul<transB=1>(h, x)"
    proto = parse(f"g (float[n,3] x) => (float[n,n] y) {{ {nodes} }}")
    (wanted,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": X})
    with pytest.warns(UserWarning, match="without an import: version 1 is meant"):
        model = jaxonnx.load(proto)
    np.testing.assert_allclose(model(X), wanted, rtol=1e-6)
    saved = model.to_onnx()
    onnx.checker.check_model(saved, full_check=True)
    assert {entry.domain: entry.version for entry in saved.opset_import}["com.microsoft"] == 1
    np.testing.assert_allclose(jaxonnx.load(saved)(X), wanted, rtol=1e-6)  # without a warning


@pytest.mark.parametrize("values", [(2, 2), (2, 3, 5)])
def test_the_last_of_several_constants_of_one_name_counts(values):
    """Onnxruntime's export of GPT-2 has eight such pairs."""
    last = f"x{len(values)}"
    lines = [
        f"c = Constant<value_float={value}.0>() x{i + 1} = Mul(x{i}, c)"
        for i, value in enumerate(values)
    ]
    proto = parse(f"""g (float[2] x0, bool go) => (float[2] y) {{
      {" ".join(lines)}
      y = If (go) <
        then_branch = t () => (float[2] z) {{ z = Add({last}, c) }},
        else_branch = e () => (float[2] u) {{ u = Neg({last}) }}
      >
    }}""")
    given = {"x0": np.ones(2, np.float32), "go": np.array(True)}
    (wanted,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, given)
    with pytest.warns(UserWarning, match="define .c.: the last one counts"):
        model = jaxonnx.load(proto)
    np.testing.assert_array_equal(model(**given), wanted)
    saved = model.to_onnx()
    onnx.checker.check_model(saved, full_check=True)
    (again,) = onnxruntime.InferenceSession(saved.SerializeToString()).run(None, given)
    np.testing.assert_array_equal(again, wanted)


@pytest.mark.parametrize(
    "nodes",
    [
        "y = MatMul(x, w)",
        "h = Relu(x) s = Shape(h) t = Reshape(h, s) y = MatMul(t, w)",
        "h = Cast<to=10>(x) f = CastLike(h, x) y = MatMul(f, w)",
        "h = local.f(x) y = MatMul(h, w)",
        "y = local.g(x, w)",
        "h = Less(x, x) i = Where(h, x, x) y = Gemm(i, w)",
        """k = Constant<value = int64 {2}>() go = Constant<value = bool {1}>()
        y = Loop(k, go, x) <body = b (int64 i, bool c, float[n,3] a) => (bool d, float[n,3] r) {
          d = Identity(c) r = MatMul(x, w)
        }>""",
    ],
)
def test_types_of_tensors_fit_their_uses(nodes):
    """ONNX's checker and onnxruntime refuse such files; a float16 weight in float32 code is one."""
    functions = """
    <domain: "local", opset_import: ["": 22]> f (a) => (b) { b = Tanh(a) }
    <domain: "local", opset_import: ["": 22]> g (a, b) => (c) { d = Neg(a) c = MatMul(d, b) }
    """
    header = HEADER[:-2] + ', "local": 1]>'
    proto = parse(f"g (float[n,3] x) => (float[n,3] y) {{ {nodes} }} {functions}", header)
    for dtype in (np.float32, np.float16):
        weight = numpy_helper.from_array(np.eye(3, dtype=dtype), "w")
        del proto.graph.initializer[:]
        proto.graph.initializer.append(weight)
        data = proto.SerializeToString()
        if dtype == np.float32:
            (wanted,) = onnxruntime.InferenceSession(data).run(None, {"x": X})
            np.testing.assert_allclose(jaxonnx.load(proto)(X), wanted, rtol=1e-6)
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail):
        onnxruntime.InferenceSession(data)
    refused(proto, "(float16), with", "(float); their types must be the same", "insert a Cast")


def test_too_new():
    proto = parse(MODEL)
    proto.opset_import[0].version = 999
    refused(proto, "opset 999", "upgrade onnx", error=jaxonnx.UnsupportedError)
    proto = parse(MODEL)
    proto.ir_version = 99
    refused(proto, "IR version 99", "upgrade onnx", error=jaxonnx.UnsupportedError)
    proto = parse(MODEL)
    del proto.opset_import[:]
    refused(proto, "opset_import")


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ("z = Relu(y) y = Relu(z)", ["'z' (Relu", "'y'", "acyclic"]),
        ("y = Relu(y)", ["reads 'y'", "acyclic"]),
        ("y = Relu(missing)", ["reads 'missing'"]),
        ("y = Relu(x) y = Neg(x)", ["(Neg", "defines 'y'", "already"]),
        ("x = Relu(x) y = Relu(x)", ["defines 'x'"]),
        ("y, y = Dropout(x)", ["defines 'y'"]),
        ("z = Relu(x)", ["output 'y' is never computed"]),
        ("y = Add(x)", ["'y' (Add", "lacks input 1 (B)"]),
        ('y = Add("", x)', ["lacks input 0 (A)"]),
        ("y = Relu(x, x)", ["2 inputs", "at most 1"]),
        ("y, z = Relu(x)", ["2 outputs", "at most 1"]),
        ("y = Concat <axis = 0> ()", ["0 inputs", "at least 1"]),
        ("y = Concat(x, x)", ["required attributes ['axis']"]),
        ("y = Cast(x)", ["required attributes ['to']"]),
        ("y = Relu <slope = 1> (x)", ["unknown attributes ['slope']", "Relu has none"]),
        ("y = Softmax <axis = 1.5> (x)", ["'axis' is FLOAT, it must be INT"]),
        ("y = Gemm <alpha = 2> (x, x)", ["'alpha' is INT, it must be FLOAT"]),
        ('y = Transpose <perm = "10"> (x)', ["'perm' is STRING, it must be INTS"]),
        ("y = Softmax <axis = 1, axis = 0> (x)", ["attribute 'axis' twice"]),
        ("y = Softmax <axis: int = @a> (x)", ["'axis' refers to 'a'"]),
    ],
)
def test_malformed_graphs(nodes, words):
    refused(body(nodes), *words)


def test_duplicate_inputs():
    proto = parse("g (float[1] x, float[1] x) => (float[1] y) { y = Relu(x) }")
    refused(proto, "2 inputs named 'x'")


CALLS = '<ir_version: 10, opset_import: ["": 22, "l": 1]>'


def function(name, nodes, signature="(a) => (b)"):
    return f'<domain: "l", opset_import: ["": 22, "l": 1]> {name} {signature} {{ {nodes} }}'


@pytest.mark.parametrize(
    ("call", "functions", "words"),
    [
        ("y = l.f(x)", function("f", "b = l.f(a)"), ["'l.f' calls itself", "recursion"]),
        (
            "y = l.f(x)",
            function("f", "b = l.g(a)") + function("g", "b = l.f(a)"),
            ["calls itself"],
        ),
        ("y = l.f(x, x)", function("f", "b = Relu(a)"), ["2 inputs", "'l.f' has 1"]),
        ("y, z = l.f(x)", function("f", "b = Relu(a)"), ["2 outputs", "'l.f' has 1"]),
        ("y = l.f <s = 1> (x)", function("f", "b = Relu(a)"), ["unknown attributes ['s']"]),
        ("y = l.f(x)", function("f", "c = Relu(a)"), ["'l.f': output 'b' is never computed"]),
        ("y = l.f(x)", function("f", "b = Relu(x)"), ["reads 'x'"]),
        ("y = l.f(x)", function("f", "b = Relu(a)") * 2, ["'l.f' is defined twice"]),
    ],
)
def test_malformed_functions(call, functions, words):
    refused(body(call, CALLS, functions), *words)


def test_unknown_operators_in_functions_are_named():
    proto = body("y = l.f(x)", CALLS, function("f", "b = Foo(a)"))
    refused(proto, "ai.onnx.Foo (opset 22): 'b'", error=jaxonnx.UnsupportedError)


ELEMENTS = [
    kind
    for kind in TensorProto.DataType.values()
    if kind not in (TensorProto.UNDEFINED, TensorProto.STRING)
]


@pytest.mark.parametrize("kind", ELEMENTS, ids=TensorProto.DataType.Name)
@pytest.mark.parametrize("size", [7, 5000])
def test_every_element_type_survives_bit_for_bit(kind, size, tmp_path):
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind))
    draw = np.random.default_rng(kind)
    value = draw.standard_normal(size).astype(dtype)
    if dtype.kind in "iu" and dtype.itemsize == 8:  # no 32-bit type holds these
        value = draw.integers(2**53, 2**62, size).astype(dtype)
    node = helper.make_node("Identity", ["w"], ["y"])
    graph = helper.make_graph(
        [node],
        "g",
        [],
        [helper.make_tensor_value_info("y", kind, [size])],
        [numpy_helper.from_array(value, "w")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 26)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "64-bit outputs")
        model = jaxonnx.load(proto)
        for again in (model.to_onnx(), jaxonnx.load(model.to_onnx()).to_onnx()):
            (tensor,) = (t for t in again.graph.initializer if t.name == "w")
            assert tensor.data_type == kind
            assert numpy_helper.to_array(tensor).tobytes() == value.tobytes()
        model.save(tmp_path / "saved.onnx", external_data=True)
        saved = jaxonnx.load(tmp_path / "saved.onnx").to_onnx()
    assert numpy_helper.to_array(saved.graph.initializer[0]).tobytes() == value.tobytes()


@pytest.mark.parametrize("version", range(3, onnx.IR_VERSION + 1))
def test_ir_versions(version):
    proto = parse(MODEL, f'<ir_version: {version}, opset_import: ["": 8]>')
    if version == 3:  # demands that initializers are inputs too
        for tensor in proto.graph.initializer:
            proto.graph.input.append(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
    model = jaxonnx.load(proto)
    assert [value.name for value in model.inputs] == ["x"]
    assert set(model.params) == {"w", "b"}
    np.testing.assert_array_equal(model(X), [[23, 27]])


def test_sparse_initializer():
    proto = parse(MODEL)
    del proto.graph.initializer[0]
    values = numpy_helper.from_array(np.array([5, 7], np.float32), "w")
    for indices in (np.array([1, 4]), np.array([[0, 1], [2, 0]])):
        sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(indices), [3, 2])
        del proto.graph.sparse_initializer[:]
        proto.graph.sparse_initializer.append(sparse)
        model = jaxonnx.load(proto)
        np.testing.assert_array_equal(model.params["w"], [[0, 5], [0, 0], [7, 0]])
        np.testing.assert_array_equal(jaxonnx.load(model.to_onnx())(X), model(X))
    sparse.dims[:] = [1, 2]
    del proto.graph.sparse_initializer[:]
    proto.graph.sparse_initializer.append(sparse)
    refused(proto, "sparse tensor 'w'")


@pytest.mark.parametrize(
    ("count", "indices"),
    [(1, [0, 1, 2]), (1, [-1]), (1, [6]), (2, [4, 1]), (2, [1, 1]), (2, [[0, 1]]), (1, [[0, 2]])],
)
def test_sparse_initializers_that_the_checker_refuses(count, indices):
    proto = parse(MODEL)
    del proto.graph.initializer[0]
    values = numpy_helper.from_array(np.ones(count, np.float32), "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array(indices)), [3, 2])
    proto.graph.sparse_initializer.append(sparse)
    with pytest.raises(onnx.checker.ValidationError):
        onnx.checker.check_sparse_tensor(sparse)
    refused(proto, "sparse tensor 'w'", "indices")


def test_the_given_proto_stays_as_it_is():
    proto = parse(MODEL)
    before = proto.SerializeToString()
    jaxonnx.load(proto)
    assert proto.SerializeToString() == before


LOADING = """
import sys
import jax
import jaxonnx
from benchmarks.worker import resident

jax.block_until_ready(jax.numpy.ones(3))
before = resident("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
model = jaxonnx.load(sys.argv[1])
print(resident("VmRSS") - before, resident("VmHWM") - before)
"""


@pytest.mark.deep
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak")
def test_a_large_file_is_in_memory_once(tmp_path):
    """The peak is that of protobuf: the bytes of the file and the parsed message."""
    w = np.zeros((5000, 5000), np.float32)
    proto = parse("g (float[n,5000] x) => (float[n,5000] y) { y = MatMul(x, w) }")
    proto.graph.initializer.append(numpy_helper.from_array(w, "w"))
    onnx.save(proto, tmp_path / "net.onnx")
    root = ROOT
    command = [sys.executable, "-c", LOADING, str(tmp_path / "net.onnx")]
    done = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True)
    after, peak = map(int, done.stdout.split())
    assert after < 1.4 * w.nbytes
    assert peak < 2.5 * w.nbytes


SPLITTING = """
import resource
import sys
import jax
import numpy as np
import jaxonnx

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("data",))
jax.block_until_ready(jax.device_put(np.ones(8), jax.NamedSharding(mesh, jax.P("data"))))
with open("/proc/self/status") as file:
    (taken,) = (int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))
limit = taken + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
model = jaxonnx.load(sys.argv[1], mesh=mesh, sharding="fsdp")
for shard in jax.block_until_ready(model.params["w"]).addressable_shards:
    assert shard.data.nbytes == model.params["w"].nbytes / 8
"""


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="Linux limits what a process allocates")
def test_a_large_file_is_never_whole_beside_its_parts(tmp_path):
    """All that is allocated while external data is read into parts is less than two copies."""
    proto = parse("g (float[n,8192] x) => (float[n,8192] y) { y = MatMul(x, w) }")
    size = 4 * 8192 * 8192
    w = proto.graph.initializer.add(
        name="w", data_type=TensorProto.FLOAT, dims=[8192, 8192], data_location=TensorProto.EXTERNAL
    )
    for key, value in {"location": "w.bin", "length": str(size)}.items():
        w.external_data.add(key=key, value=value)
    (tmp_path / "net.onnx").write_bytes(proto.SerializeToString())
    with open(tmp_path / "w.bin", "wb") as file:
        file.truncate(size)  # which takes no place on the disk
    command = [sys.executable, "-W", "ignore", "-c", SPLITTING, str(tmp_path / "net.onnx")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    root = ROOT
    subprocess.run([*command, str(3 * size // 2)], cwd=root, check=True, env=environment)


def test_a_constant_with_two_values_is_refused():
    """One of them was taken, which onnxruntime and onnx.reference do not agree on."""
    model = onnx.parser.parse_model(
        """
        <ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) {
          c = Constant <value_float = 0.5, value = float[2] {1, 2}> ()
          y = Mul (x, c)
        }
        """
    )
    with pytest.raises(jaxonnx.Error, match="exactly one attribute"):
        jaxonnx.load(model)(np.ones(2, np.float32))
