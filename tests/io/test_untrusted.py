"""Files that nobody vouches for: each reader answers with an error of ours, and soon."""

import io
import json
import struct
import zipfile

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxonnx
from jaxonnx import _files, sparse
from jaxonnx.cli import main
from tests.support import tiny_networks

KEY = "jaxonnx.sparsity"
DEEP = "[" * 100_000
NET = tiny_networks.mlp()


def npy(header, data=b""):
    """An array of NumPy with any text as its header."""
    header = header.encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def described(shape, dtype="<f4"):
    return f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}}}\n"


def archive(content, compression=zipfile.ZIP_STORED, name="w.npy"):
    """An .npz file with an array that is in order, and one that is not."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as members:
        members.writestr("x.npy", npy(described((1,)), bytes(4)))
        members.writestr(name, content)
    return file.getvalue()


def patched(data, local, central, value):
    """An archive with other bytes in the header of its last member, and in the list of them."""
    result = bytearray(data)
    for mark, offset in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        at = data.rindex(mark) + offset
        result[at : at + 2] = struct.pack("<H", value)
    return bytes(result)


def damaged_stream():
    draw = np.random.default_rng(0).integers(0, 9, 4000).astype(np.float32)
    data = bytearray(archive(npy(described((4000,)), draw.tobytes()), zipfile.ZIP_DEFLATED))
    for at in range(data.rindex(b"PK\x03\x04") + 300, data.rindex(b"PK\x03\x04") + 400):
        data[at] ^= 255
    return bytes(data)


PLAIN = npy(described((3,)), bytes(12))
ARCHIVES = {
    "2**60 elements": (archive(npy(described((2**60,)))), "takes 4,611"),
    "2**124 elements": (archive(npy(described((2**62, 2**62)))), "takes"),
    "a negative size": (archive(npy(described((-1,)))), "takes -4"),
    "more than there is": (
        archive(npy(described((9,)), bytes(12))),
        "takes 36 bytes, there are 12",
    ),
    "a bomb": (archive(npy(described((2**21,)), bytes(2**23)), zipfile.ZIP_DEFLATED), "memory"),
    "compression": (patched(archive(PLAIN), 8, 10, 99), "compression"),
    "encryption": (patched(archive(PLAIN), 6, 8, 1), "encrypted"),
    "zlib": (damaged_stream(), "zlib|error|BadZip"),
    "a header that ends": (archive(npy("{'descr': (\n")), "header|EOF|parse"),
    "pickles": (archive(npy(described((1,), "|O"), b"\x80\x04N.")), "pickle"),
    "a header cut off": (archive(b"\x93NUMPY\x01\x00\xff"), "EOF|expected"),
    "another version": (archive(b"\x93NUMPY\x09\x09" + bytes(99)), "version"),
}


READERS = {
    "a packed model": jaxonnx.load,
    "weights": lambda path: jaxonnx.load(NET, weights=path),
    "sparse.load": sparse.load,
    "adapters": jaxonnx.Adapters.load,
    "data": lambda path: jaxonnx.load(NET).predict(path),
}


@pytest.mark.parametrize("reader", READERS)
def test_archives(reader, tmp_path, monkeypatch):
    """One after the other, as each takes less than it would to start a test."""
    monkeypatch.setattr(_files, "memory", lambda: 2**22)
    path = tmp_path / "a.npz"
    for name, (data, words) in ARCHIVES.items():
        path.write_bytes(data)
        with pytest.raises(jaxonnx.Error, match=rf"a\.npz.*({words})") as caught:
            READERS[reader](path)
        if name != "a bomb":
            assert "'w'" in str(caught.value)


def test_the_command_line(tmp_path, capsys):
    path = tmp_path / "a.npz"
    path.write_bytes(ARCHIVES["2**60 elements"][0])
    model = tmp_path / "net.onnx"
    model.write_bytes(NET.SerializeToString())
    assert main(["run", str(model), str(path), "-o", str(tmp_path / "out.npz")]) == 2
    assert "the array 'w'" in capsys.readouterr().err


def test_one_array_is_no_archive(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((4, 8), np.float32))
    with pytest.raises(jaxonnx.TrainingError, match=r"'.*x\.npy' .*it must be an \.npz file"):
        tiny_networks.train(data=tmp_path / "x.npy")


def test_lines_that_are_not_json(tmp_path):
    path = tmp_path / "x.jsonl"
    for line in (DEEP, "{", "3", '{"x": 1}\n{"y": 1}', '{"x": 1' + "0" * 5000 + "}", "\0"):
        path.write_text(line)
        with pytest.raises(jaxonnx.TrainingError, match=r"x\.jsonl' cannot be read"):
            jaxonnx.load(NET).predict(path)
    path.write_bytes(b'{"x": "\xff"}')
    with pytest.raises(jaxonnx.TrainingError, match=r"x\.jsonl' cannot be read"):
        jaxonnx.load(NET).predict(path)


def test_flipped_bits(tmp_path):
    """As the fuzzer does it: what is read is right, or an error of ours."""
    values = {name: numpy_helper.to_array(t) for name, t in named(NET).items()}
    path = tmp_path / "a.npz"
    np.savez_compressed(path, **values)
    data, draw = path.read_bytes(), np.random.default_rng(0)
    for _ in range(300):
        flipped = bytearray(data)
        flipped[draw.integers(len(data))] ^= 1 << draw.integers(8)
        path.write_bytes(flipped)
        try:
            read = _files.read_arrays(path, "a.npz", jaxonnx.ModelError)
        except jaxonnx.ModelError:
            continue
        for name in read.keys() & values.keys():
            np.testing.assert_array_equal(read[name], values[name])


def named(proto):
    return {tensor.name: tensor for tensor in proto.graph.initializer}


ENTRY = {"dtype": "float32", "shape": [2, 4], "axis": 1, "pattern": "2:4", "transposable": False}
ENTRIES = [
    {"axis": 99},
    {"axis": -1},
    {"axis": "1"},
    {"axis": True},
    {"axis": None},
    {"shape": [4]},
    {"shape": []},
    {"shape": 8},
    {"shape": "24"},
    {"shape": [2, -4]},
    {"shape": [2**62, 2**62, 4]},
    {"shape": [2.0, 4.0]},
    {"dtype": "object"},
    {"dtype": "<U1"},
    {"dtype": "nothing"},
    {"dtype": 3},
    {"pattern": 3},
    {"pattern": "2:5"},
    {"pattern": "9" * 5000 + ":4"},
    {"pattern": None},
]


def test_indices_of_packed_files(tmp_path):
    path = tmp_path / "a.npz"
    packed = sparse.pack(np.array([[1, 2, 0, 0], [0, 0, 3, 4]], np.float32), axis=1)
    arrays = {"values:w": packed.values, "indices:w": packed.indices}
    texts = [DEEP, "[]", "{}", "3", "null", '{"w": 3}', '{"w": {}}', "{", "\0"]
    texts += [json.dumps({"w": ENTRY | change}) for change in ENTRIES]
    for text in texts:
        np.savez(path, **arrays, __packed__=np.frombuffer(text.encode(), np.uint8))
        with pytest.raises(jaxonnx.SparsityError):
            sparse.load(path)
    np.savez(path, **arrays, __packed__=np.frombuffer(json.dumps({"w": ENTRY}).encode(), np.uint8))
    np.testing.assert_array_equal(sparse.unpack(sparse.load(path)[1]["w"]), sparse.unpack(packed))


@pytest.fixture(scope="module")
def adapters():
    values = {"w1.lora_A": np.ones((2, 8), np.float32), "w1.lora_B": np.ones((16, 2), np.float32)}
    layout = {"output": 1, "input": 0, "kernel": [], "batch": [], "lookup": False}
    return values, {"rank": 2, "alpha": 2.0, "layouts": {"w1": layout}}


def lora(path, values, about):
    text = about if isinstance(about, str) else json.dumps(about)
    arrays = {**values, "jaxonnx.lora": np.frombuffer(text.encode(), np.uint8)}
    sparse.save(path, arrays, {}, layers=())
    return jaxonnx.Adapters.load(path)


WRONG = [
    *({"rank": rank} for rank in (0, -1, 7, 2.5, "2", True, None, float("inf"), [2])),
    *({"alpha": alpha} for alpha in (0, -1, float("nan"), float("inf"), "a", None)),
    *({"layouts": layouts} for layouts in (3, [], {"w1": {}}, {"w1": 3}, {"other": {}})),
]
LAYOUTS = [
    *({"output": at} for at in (99, -1, 0, "1", None, 1.0, [1])),
    *({"kernel": at} for at in ([5], [1], 3, ["a"], None)),
    *({"batch": at} for at in ([5], 3, [[0]])),
]
ARRAYS = [
    {"w1.lora_A": np.float32(1)},
    {"w1.lora_B": np.float32(1)},
    {"w1.lora_A": np.ones((3, 8), np.float32)},
    {"w1.lora_B": np.ones((16, 3), np.float32)},
    {"w1.lora_B": np.ones((1, 16, 2), np.float32)},
    {"w1.lora_A": np.full((2, 8), np.nan, np.float32)},
    {"w1.lora_B": np.full((16, 2), np.inf, np.float32)},
    {"b1": np.full(16, np.nan, np.float32)},
]


def test_adapters(adapters, tmp_path):
    values, about = adapters
    path = tmp_path / "a.npz"
    layout = about["layouts"]["w1"]
    assert lora(path, values, about).attach(jaxonnx.load(NET)).params.keys() == values.keys()
    texts = [about | change for change in WRONG]
    texts += [about | {"layouts": {"w1": layout | change}} for change in LAYOUTS]
    for text in [DEEP, "[]", "3", *texts]:
        with pytest.raises(jaxonnx.ModelError, match=r"a\.npz' holds no adapters"):
            lora(path, values, text)
    for change in ARRAYS:
        with pytest.raises(jaxonnx.ModelError, match=r"a\.npz' holds no adapters"):
            lora(path, values | change, about)


def test_adapters_of_other_shapes(adapters, tmp_path):
    values, about = adapters
    layout = about["layouts"]["w1"]
    whole = lora(tmp_path / "a.npz", values, about)
    for change in ({"output": 2, "batch": [1]}, {"kernel": [2]}):
        other = lora(tmp_path / "b.npz", values, about | {"layouts": {"w1": layout | change}})
        with pytest.raises(jaxonnx.InputError, match=r"another model.*'w1'"):
            other.apply(jaxonnx.load(NET))
    wide = {**values, "w1.lora_A": np.ones((2, 9), np.float32)}
    with pytest.raises(jaxonnx.InputError, match=r"another model.*'w1'"):
        lora(tmp_path / "b.npz", wide, about).attach(jaxonnx.load(NET))
    with pytest.raises(jaxonnx.InputError, match="are not of rank 3"):
        jaxonnx.Adapters(3, 2.0, whole.layouts, whole.values)


RECORDS = [
    DEEP,
    "2:4",
    "{}",
    "[]",
    '{"weights": 2}',
    '{"weights": {"w1": {"pattern": "2:4"}}}',
    *(
        f'{{"weights": {{"w1": {{"pattern": {pattern}, "transposable": true, "axes": {axes}}}}}}}'
        for pattern, axes in (
            ('"2:4"', "[0]"),
            ('"2:4"', "[0, -5]"),
            ('"2:4"', "[0, 0]"),
            ('"2:4"', '["a", "b"]'),
            ('"2:4"', "[0, 1e999]"),
            ("{}", "[0, 1]"),
            ('"5:4"', "[0, 1]"),
        )
    ),
]


def test_records(tmp_path):
    """A malformed one is told, and nothing but the record is the worse for it."""
    for value in RECORDS:
        proto = onnx.ModelProto()
        proto.CopyFrom(NET)
        proto.metadata_props.add(key=KEY, value=value)
        with pytest.warns(UserWarning, match=rf"'{KEY}' is malformed.*with_sparsity\(None\)"):
            model = jaxonnx.load(proto)
        assert model.sparsity is None
        assert "is malformed" in " ".join(str(model).split())
        model.save(tmp_path / "a.onnx")
        assert onnx.load(tmp_path / "a.onnx").metadata_props[0].value == value
        assert model.with_head(3).proto.metadata_props[0].value == value
        with pytest.raises(jaxonnx.Error, match="malformed"):
            model.save(tmp_path / "a.npz")
        dropped = model.with_sparsity(None)
        assert not dropped.warnings
        assert not dropped.to_onnx().metadata_props


def changed(change):
    proto = onnx.ModelProto()
    proto.CopyFrom(NET)
    change(proto)
    return proto


def opset(domain, version):
    return changed(lambda p: p.opset_import.add(domain=domain, version=version))


def of_function(version):
    function = helper.make_function(
        "own", "f", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])],
        [helper.make_opsetid("", version)],
    )  # fmt: skip
    return changed(lambda p: p.functions.append(function))


def tensor(dims):
    def change(proto):
        proto.graph.initializer[0].CopyFrom(
            TensorProto(name="w1", data_type=1, dims=dims, raw_data=b"")
        )

    return changed(change)


def test_sources(tmp_path):
    """By the error, and the words of its message."""
    loop = tmp_path / "loop.onnx"
    loop.symlink_to(loop)
    kinds = jaxonnx.InputError, jaxonnx.ModelError, jaxonnx.UnsupportedError
    wrong, malformed, unknown = kinds
    for source, error, words in (
        (None, wrong, "not of type NoneType"),
        (3, wrong, "not of type int"),
        (io.BytesIO(), wrong, "not of type BytesIO"),
        ("a\0b", malformed, "is not a file"),
        (loop, malformed, "is not a file"),
        (tensor([2**62, 2**62, 0]), jaxonnx.LimitError, "'w1'"),
        (tensor([0] * 100), malformed, "'w1'"),
        (opset("ai.onnx.ml", 99), unknown, "opset 99 of ai.onnx.ml"),
        (opset("ai.onnx.preview.training", 2), unknown, "opset 2 of ai.onnx.preview"),
        (opset("mine", 2**40), malformed, "opset 1099511627776 of mine, which cannot be"),
        (opset("mine", -1), malformed, "opset -1 of mine"),
        (of_function(999), unknown, "opset 999"),
    ):
        with pytest.raises(error, match=words):
            jaxonnx.load(source)
    for arguments in ({"trainable": 3}, {"trainable": [3]}, {"outputs": 3}, {"tied": 3}):
        with pytest.raises(wrong, match=next(iter(arguments))):
            jaxonnx.load(NET, **arguments)
    with pytest.raises(wrong, match="weights must be a string, a path, a dict or None, got 3"):
        jaxonnx.load(NET, weights=3)
    with pytest.raises(wrong, match="NUL"):
        jaxonnx.load(NET).save(tmp_path / "a\0b.onnx")


TEXTS = """
<ir_version: 10, opset_import: ["": 22, "DOMAIN__": 1], producer_name: "PRODUCER">
GRAPH___ (float[DIMENSION,4] INPUT___) => (float[m,2] OUTPUT__)
<float[4,2] WEIGHT__ = {1,2,3,4,1,2,3,4}> {
  [NODE____] VALUE___ = MatMul(INPUT___, WEIGHT__)
  OUTPUT__ = DOMAIN__.FUNCTION <ATTRIBUT = 1> (VALUE___)
}
<domain: "DOMAIN__", opset_import: ["": 22]>
FUNCTION <ATTRIBUT> (LOCAL___) => (RESULT__) {
  RESULT__ = Softmax <axis: int = @ATTRIBUT> (LOCAL___)
}
"""
NAMES = (
    *("DOMAIN__", "DIMENSION", "INPUT___", "OUTPUT__", "WEIGHT__", "NODE____", "VALUE___"),
    *("FUNCTION", "ATTRIBUT", "LOCAL___", "RESULT__"),
)
METADATA = (
    "pkg.torch.onnx.name_scopes",
    "pkg.torch.onnx.fx_node",
    "pkg.torch.onnx.class_hierarchy",
    "namespace",
)


def test_names_that_are_not_utf_8(capsys, tmp_path):
    proto = onnx.parser.parse_model(TEXTS)
    for node in proto.graph.node:
        for key in METADATA:
            node.metadata_props.add(key=key, value="METADATA")
    proto.metadata_props.add(key="Image.BitmapPixelFormat", value="METADATA")
    proto.graph.doc_string = "METADATA"
    data = proto.SerializeToString()
    jaxonnx.load(data)
    for name in NAMES:
        assert name.encode() in data
        with pytest.raises(jaxonnx.ModelError, match=r"the name b'\\xff.*not UTF-8"):
            jaxonnx.load(data.replace(name.encode(), b"\xff\xfe" + name.encode()[2:]))
    for name in ("PRODUCER", "GRAPH___", "METADATA"):  # what is only shown
        path = tmp_path / "net.onnx"
        path.write_bytes(data.replace(name.encode(), b"\xff\xfe" + name.encode()[2:]))
        model = jaxonnx.load(path)
        assert "OUTPUT__" in str(model) + str(model.summary())
        assert main(["info", str(path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["inputs"]
        assert model.to_onnx().SerializeToString().count(b"\xff\xfe") > 0


def test_scopes_that_are_not_python():
    for value in (DEEP, "(" * 1000, "[3, None, 'a', 4]", "{}", "\0"):
        proto = onnx.ModelProto()
        proto.CopyFrom(NET)
        proto.graph.node[0].metadata_props.add(key=METADATA[0], value=value)
        assert str(jaxonnx.load(proto))


def test_pictures_that_the_file_describes_wrongly():
    from jaxonnx._data import images

    for value in (
        DEEP,
        '{"scale": "1"}',
        '{"mean": ["a"]}',
        '{"std": [[1]]}',
        '{"order": 3}',
        '{"size": [1, 2, 3]}',
        '{"size": [1.5, 2]}',
        '{"crop": null}',
    ):
        proto = onnx.ModelProto()
        proto.CopyFrom(NET)
        proto.metadata_props.add(key=images.KEY, value=value)
        with pytest.raises(jaxonnx.ModelError, match="malformed"):
            images.preparation(jaxonnx.load(proto))


def test_arguments_of_a_call():
    model = jaxonnx.load(NET)
    masked = np.ma.masked_array(np.ones((2, 8), np.float32), mask=False)
    with pytest.raises(jaxonnx.InputError, match=r"masked array.*\.filled"):
        model(masked)
    strings = jaxonnx.load(
        onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 22]>
        g (string[n] x) => (string[n] y) {
          y = StringNormalizer <case_change_action = "UPPER"> (x)
        }""")
    )
    kinds = (None, object, np.dtypes.StringDType())
    for given in (["a", "b"], ("a", "b"), *(np.array(["a", "b"], kind) for kind in kinds)):
        assert strings(given).tolist() == ["A", "B"]
    for given in ([1, 2], [["a"], ["b", "c"]], np.ones(2), np.array([b"a"]), 3, None, [None]):
        with pytest.raises(jaxonnx.InputError, match="takes strings"):
            strings(given)


def test_safetensors(tmp_path):
    path = tmp_path / "a.safetensors"
    for header in (
        '{"w": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}',  # not NumPy's
        '{"w": {"dtype": "F32", "shape": [4611686018427387904], "data_offsets": [0, 1]}}',
        '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 99]}}',
        '{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 1]}}',
        DEEP,
    ):
        path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(1))
        with pytest.raises(jaxonnx.ModelError, match=r"a\.safetensors"):
            jaxonnx.load(NET, weights=path)
    path.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(jaxonnx.ModelError, match=r"a\.safetensors"):
        jaxonnx.load(NET, weights=path)
