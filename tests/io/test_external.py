"""External data: where it may lie, and what is refused, also if it changes while it is read."""

import hashlib
import multiprocessing
import os
import warnings
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxonnx
from jaxonnx._io import tensors
from jaxonnx._io.formats import read

W = np.arange(6, dtype=np.float32).reshape(3, 2) + 1
B = np.array([1, -1], np.float32)
SECRET = bytes(range(200, 248))


def network(**locations):
    """The files of a network, by their names, whose weights are where `locations` says."""
    proto = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["": 22]>
    g (float[n,3] x) => (float[n,2] y) { y = Gemm(x, w, b) }""")
    files = {}
    for name, value in (("w", W), ("b", B)):
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
        files |= moved(proto.graph.initializer[-1], locations.get(name, "net.data"), files)
    return proto.SerializeToString(), files


def moved(tensor, location, files):
    """Put the data of a tensor into a file; return that file."""
    data = files.get(location, b"")
    entries = {"location": location, "offset": len(data), "length": len(tensor.raw_data)}
    content = data + tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    return {location: content}


def written(folder, location="net.data"):
    """The path of a network whose weights lie in one file, in a folder beside a secret."""
    graph, files = network(w=location, b=location)
    folder.mkdir()
    (folder.parent / "secret").write_bytes(SECRET)
    (folder / "net.onnx").write_bytes(graph)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder / "net.onnx"


def hub(cache, files, repository="someone/net", revision="0123456789abcdef" * 2):
    """The snapshot of a repository, laid out as `huggingface_hub` does in its cache."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / revision
    for part in ("refs", "blobs"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(revision)
    for name, content in files.items():
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        pointer = snapshot / name
        pointer.parent.mkdir(parents=True, exist_ok=True)
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    return snapshot


@pytest.fixture(params=[True, False], ids=["openat", "without"])
def either(request, monkeypatch):
    """With descriptors of folders, and without them as on Windows."""
    if request.param and not tensors._BY_DESCRIPTOR:
        pytest.skip("this system has no openat")
    monkeypatch.setattr(tensors, "_BY_DESCRIPTOR", request.param)


def check(path):
    _, tensors, _ = read(path)
    np.testing.assert_array_equal(tensors["w"], W)
    np.testing.assert_array_equal(tensors["b"], B)


def refused(path, *words):
    with pytest.raises(jaxonnx.ModelError) as caught:
        read(path)
    for word in ("'w'", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "locations"),
    [
        ("model.onnx", {"w": "model.onnx_data", "b": "model.onnx_data"}),
        ("onnx/model.onnx", {"w": "model.onnx_data", "b": "model.onnx_data_1"}),
        ("onnx/model_fp16.onnx", {"w": "model_fp16.onnx_data", "b": "parts/b.bin"}),
        ("onnx/gpu/model_q4.onnx", {"w": "./model_q4.onnx_data", "b": "parts/../b.bin"}),
    ],
)
@pytest.mark.usefixtures("either")
def test_the_cache_of_the_hub(name, locations, tmp_path, monkeypatch):
    graph, files = network(**locations)
    folder = Path(name).parent
    files = {os.path.normpath(folder / at): content for at, content in files.items()}
    snapshot = hub(tmp_path, {name: graph, **files})
    check(snapshot / name)
    monkeypatch.chdir((snapshot / name).parent)
    check(Path(name).name)
    (tmp_path / "cache").symlink_to(tmp_path)
    check(tmp_path / "cache" / (snapshot / name).relative_to(tmp_path))


def test_the_layout_is_that_of_the_hub(tmp_path):
    import huggingface_hub as hub_package

    snapshot = hub(tmp_path, {"config.json": b"{}", "onnx/model.onnx": b"1"})
    for name in ("config.json", "onnx/model.onnx"):
        path = hub_package.try_to_load_from_cache("someone/net", name, cache_dir=tmp_path)
        assert path == str(snapshot / name)
    seen = hub_package.scan_cache_dir(tmp_path)
    assert not seen.warnings
    (repository,) = seen.repos
    (revision,) = repository.revisions
    names = {"config.json", "model.onnx"}
    assert {file.file_name for file in revision.files} == names
    assert {file.blob_path.parent.name for file in revision.files} == {"blobs"}


@pytest.mark.usefixtures("either")
def test_links_of_the_hub_end_in_its_blobs(tmp_path):
    graph, files = network()
    (tmp_path / "secret").write_bytes(SECRET)
    snapshot = hub(tmp_path / "cache", {"net.onnx": graph, **files})
    other = hub(tmp_path / "cache", {"net.data": SECRET}, "someone/other")
    link = snapshot / "net.data"
    for target in (
        "../../refs/main",
        "../../../models--someone--other/snapshots/" + other.name + "/net.data",
        "../../../../secret",
        tmp_path / "secret",
        "/etc/hostname",
        "net.data",
    ):
        link.unlink()
        link.symlink_to(target)
        refused(snapshot / "net.onnx", "'net.data'", "outside")
    blob = snapshot.parent.parent / "blobs" / "b"
    blob.symlink_to(tmp_path / "secret")
    link.unlink()
    link.symlink_to("../../blobs/b")
    refused(snapshot / "net.onnx", "'net.data'", "outside")
    link.unlink()
    refused(snapshot / "net.onnx", "'net.data'", "does not exist", "huggingface_hub")


@pytest.mark.usefixtures("either")
def test_links_within_the_folder(tmp_path):
    path = written(tmp_path / "model", "parts/net.data")
    parts = path.parent / "parts"
    parts.rename(path.parent / "v2")
    for target in ("v2", path.parent / "v2"):
        parts.symlink_to(target)
        check(path)
        parts.unlink()
    parts.mkdir()
    (parts / "net.data").symlink_to("../v2/net.data")
    check(path)


@pytest.mark.usefixtures("either")
def test_a_link_to_the_model(tmp_path):
    path = written(tmp_path / "model")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "net.onnx").symlink_to(path)
    check(elsewhere / "net.onnx")
    (path.parent / "net.data").rename(elsewhere / "net.data")
    check(elsewhere / "net.onnx")


def hard_link(path, secret):
    os.link(secret, path)


def pipe(path, secret):
    os.mkfifo(path)


def folder(path, secret):
    path.mkdir()


def circle(path, secret):
    path.symlink_to("b")
    path.with_name("b").symlink_to(path.name)


def outer(path, secret):
    path.symlink_to("../secret")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (hard_link, "2 names (hard links)"),
        (pipe, "not a regular file"),
        (folder, "not a regular file"),
        (circle, "outside"),
        (outer, "outside"),
    ],
)
@pytest.mark.usefixtures("either")
def test_what_is_no_file_of_the_model(make, words, tmp_path):
    path = written(tmp_path / "model")
    data = path.parent / "net.data"
    data.unlink()
    make(data, tmp_path / "secret")
    refused(path, "'net.data'", words)


@pytest.mark.parametrize(
    "location",
    [
        "../secret",
        "/etc/hostname",
        "",
        ".",
        "a/../../secret",
        "a\0b",
        "sub/../../secret",
        "x" * 300,
    ],
)
@pytest.mark.usefixtures("either")
def test_locations(location, tmp_path):
    path = written(tmp_path / "model")
    (path.parent / "sub").symlink_to(tmp_path)
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        tensor.external_data[0].value = location
    path.write_bytes(proto.SerializeToString())
    refused(path, f"'{location}'", "does not exist" if len(location) > 255 else "outside")


@pytest.mark.usefixtures("either")
def test_a_linked_folder(tmp_path):
    path = written(tmp_path / "model", "sub/secret")
    (path.parent / "sub").rename(tmp_path / "sub")
    (path.parent / "sub").symlink_to("..")
    refused(path, "'sub/secret'", "outside")


@pytest.mark.skipif(not tensors._BY_DESCRIPTOR, reason="this system has no openat")
@pytest.mark.parametrize("name", ["net.data", "sub"])
def test_what_is_exchanged_in_between(name, tmp_path, monkeypatch):
    """A link takes the place of a file, or of its folder, after it was seen to be none."""
    path = written(tmp_path / "model", "sub/net.data")
    (tmp_path / "net.data").write_bytes(SECRET)
    seen = tensors._link

    def exchanged(part, descriptor):
        target = seen(part, descriptor)
        place = path.parent / "sub" / "net.data" if name == "net.data" else path.parent / "sub"
        if part == name and not place.is_symlink():
            place.rename(tmp_path / "old")
            place.symlink_to(tmp_path / ("net.data" if name == "net.data" else "."))
        return target

    monkeypatch.setattr(tensors, "_link", exchanged)
    refused(path, "'sub/net.data'")


def swap(folder, secret, count):
    data, content = folder / "net.data", (folder / "net.data").read_bytes()
    for _ in range(count // 2):
        (folder / "link").symlink_to(secret)
        os.replace(folder / "link", data)
        (folder / "file").write_bytes(content)
        os.replace(folder / "file", data)


@pytest.mark.deep
def test_swapped_30_000_times(tmp_path):
    path = written(tmp_path / "model")
    swapper = multiprocessing.get_context("spawn").Process(
        target=swap, args=(path.parent, tmp_path / "secret", 30_000), daemon=True
    )
    swapper.start()
    loads = refusals = 0
    while swapper.is_alive():
        try:
            check(path)
            loads += 1
        except jaxonnx.ModelError:
            refusals += 1
    assert swapper.exitcode == 0
    assert loads > 30
    assert refusals > 30


EVERYWHERE = """
<ir_version: 10, opset_import: ["": 22, "own": 1]>
g (float[2] x) => (float[2] y) {
  two = Constant <value = int64[1] {2}> ()
  filled = ConstantOfShape <value = float[1] {3}> (two)
  called = own.f (filled)
  yes = Constant <value = bool {1}> ()
  added = If (yes) <
    then_branch = one () => (float[2] a) {
      k = Constant <value = float[2] {1, 2}> ()
      a = Add(called, k)
    },
    else_branch = other () => (float[2] b) {
      k = Constant <value = float[2] {5, 6}> ()
      b = Add(called, k)
    }
  >
  y = Add(added, x)
}
<domain: "own", opset_import: ["": 22]>
f (a) => (b) { s = Constant <value = float {4}> ()  b = Mul(a, s) }
"""


def attributes(nodes):
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            if attribute.HasField("g"):
                yield from attributes(attribute.g.node)


def test_external_data_wherever_a_tensor_may_be(tmp_path):
    proto = onnx.parser.parse_model(EVERYWHERE)
    values = numpy_helper.from_array(np.array([7], np.float32), "sparse")
    sparse = helper.make_sparse_tensor(
        values, numpy_helper.from_array(np.array([1]), "places"), [2]
    )
    proto.graph.sparse_initializer.append(sparse)
    proto.graph.node.add(op_type="Add", input=["added", "sparse"], output=["more"])
    proto.graph.node[-2].input[0] = "more"
    nodes = [*proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend([*nodes[:-2], nodes[-1], nodes[-2]])
    inline = jaxonnx.load(proto)
    files = {}
    sparse = proto.graph.sparse_initializer[0]
    for tensor in (
        *attributes(proto.graph.node),
        *attributes(proto.functions[0].node),
        *(sparse.values, sparse.indices),
    ):
        if not tensor.raw_data:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
        files |= moved(tensor, "all.data", files)
    path = tmp_path / "net.onnx"
    path.write_bytes(proto.SerializeToString())
    (tmp_path / "all.data").write_bytes(files["all.data"])
    x = np.ones(2, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = jaxonnx.load(path)
    np.testing.assert_array_equal(loaded(x), [14, 22])
    np.testing.assert_array_equal(inline(x), loaded(x))
    loaded.save(tmp_path / "whole.onnx")
    (tmp_path / "all.data").unlink()
    np.testing.assert_array_equal(jaxonnx.load(tmp_path / "whole.onnx")(x), [14, 22])
