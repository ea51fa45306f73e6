"""A format that nobody here has seen is one class, and what lies beside the graph another."""

import json
import zipfile

import numpy as np
import onnx.parser
import optax
import pytest

import jaxonnx
from jaxonnx import formats
from jaxonnx.cli import main

NETWORK = """<ir_version: 8, opset_import: ["": 17]>
    g (float[n, 3] x) => (float[n, 2] y)
    <float[3, 4] first = {1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6},
     float[4, 2] second = {1, -1, 0, 1, 1, 0, -1, 1}>
    { h = MatMul(x, first) y = MatMul(h, second) }"""
X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
LABELS = {"classes": ["left", "right"], "frozen": ["first"]}
SETTINGS = {"loss": "squared_error", "optimizer": optax.sgd(1e-3), "batch_size": 4}


class Labels(formats.Companion):
    """What a bundle says of its graph."""

    def __init__(self, name, about):
        self.name, self.about = name, about

    def freezes(self, name):
        return name in self.about["frozen"]

    def accepts(self, path):
        return str(path).endswith(".bundle")

    def save(self, path, graph, classes=()):
        about = self.about | ({"classes": [*classes]} if classes else {})
        write_bundle(path, {self.name: graph()}, about)


@formats.register
class Bundle(formats.Format):
    """A .zip of graphs, and labels.json for all of them."""

    form = "a bundle"
    suffix = ".bundle"
    choice = "variant"

    def find(self, source, choice):
        if (path := super().find(source, choice)) is None:
            return None
        with zipfile.ZipFile(path) as bundle:
            names = [name for name in bundle.namelist() if name.endswith(".onnx")]
        names = [name for name in names if choice in (None, name.removesuffix(".onnx"))]
        if len(names) != 1:
            raise jaxonnx.InputError(f"'{path}' has {len(names)} such graphs")
        return path, names[0]

    def read(self, place):
        path, name = place
        with zipfile.ZipFile(path) as bundle:
            proto = onnx.load_model_from_string(bundle.read(name))
            about = json.loads(bundle.read("labels.json"))
        return formats.read_proto(proto, f"'{name}' in '{path}'", companion=Labels(name, about))

    def write(self, path, graph, weights, **options):
        write_bundle(path, {"net.onnx": graph()}, {"classes": [], "frozen": []})


@formats.register
class Raw(formats.Format):
    """The numbers of `second`, without a graph."""

    suffix = ".f32"
    has_graph = False

    def read_weights(self, place):
        return {"second": np.fromfile(place, np.float32).reshape(4, 2)}

    def write(self, path, graph, weights, **options):
        weights()["second"].tofile(path)


def write_bundle(path, protos, about):
    with zipfile.ZipFile(path, "w") as bundle:
        for name, proto in protos.items():
            bundle.writestr(name, proto.SerializeToString())
        bundle.writestr("labels.json", json.dumps(about))


def plain():
    return jaxonnx.load(onnx.parser.parse_model(NETWORK))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "net.bundle"
    proto = onnx.parser.parse_model(NETWORK)
    small = onnx.parser.parse_model(NETWORK.replace("MatMul(h, second)", "Gemm(h, second)"))
    write_bundle(path, {"net.onnx": proto, "small.onnx": small}, LABELS)
    return path


def read_labels(path):
    with zipfile.ZipFile(path) as bundle:
        return bundle.namelist(), json.loads(bundle.read("labels.json"))


def test_a_network_of_a_new_format_is_loaded_trained_and_saved_with_what_lies_beside(
    path, tmp_path
):
    model = jaxonnx.load(path, variant="net")
    assert {*model.params} == {"second"}
    assert {*model.state} == {"first"}
    assert "second" in str(model)
    np.testing.assert_array_equal(model(X), plain()(X))
    result = jaxonnx.train(model, (X, X[:, :2]), epochs=2, progress=False, **SETTINGS)
    expected = jaxonnx.train(
        plain(), (X, X[:, :2]), epochs=2, progress=False, trainable="second", **SETTINGS
    )
    np.testing.assert_array_equal(result.model.params["second"], expected.model.params["second"])
    result.model.save(tmp_path / "tuned.bundle")
    assert read_labels(tmp_path / "tuned.bundle") == (["net.onnx", "labels.json"], LABELS)
    again = jaxonnx.load(tmp_path / "tuned.bundle")
    np.testing.assert_array_equal(again(X), result.model(X))
    again.save(tmp_path / "alone.onnx")
    np.testing.assert_array_equal(jaxonnx.load(tmp_path / "alone.onnx")(X), again(X))
    assert not np.array_equal(again.params["second"], plain().params["second"])


def test_a_changed_model_keeps_its_companion(path, tmp_path):
    model = jaxonnx.load(path, variant="small")
    jaxonnx.convert(model, opset=21).save(tmp_path / "new.bundle")
    assert read_labels(tmp_path / "new.bundle") == (["small.onnx", "labels.json"], LABELS)
    model.with_head(3).save(tmp_path / "three.bundle")
    names, about = read_labels(tmp_path / "three.bundle")
    assert names == ["small.onnx", "labels.json"]
    assert about == LABELS | {"classes": ["LABEL_0", "LABEL_1", "LABEL_2"]}
    assert jaxonnx.load(tmp_path / "three.bundle").outputs[0].shape[-1] == 3


def test_any_model_is_written_in_a_new_format(tmp_path):
    plain().save(tmp_path / "new.bundle")
    assert read_labels(tmp_path / "new.bundle")[0] == ["net.onnx", "labels.json"]
    np.testing.assert_array_equal(jaxonnx.load(tmp_path / "new.bundle")(X), plain()(X))


def test_weights_are_those_of_a_new_format(tmp_path):
    weights = np.arange(8, dtype=np.float32).reshape(4, 2)
    changed = plain().replace(params={**plain().params, "second": weights})
    for name in ("a.bundle", "a.f32"):
        changed.save(tmp_path / name)
        model = jaxonnx.load(onnx.parser.parse_model(NETWORK), weights=tmp_path / name)
        np.testing.assert_array_equal(model.params["second"], weights)
    with pytest.raises(jaxonnx.ModelError, match=r"a\.f32' has weights, but no graph"):
        jaxonnx.load(tmp_path / "a.f32")


def test_a_new_format_is_one_of_the_command_line(path, tmp_path, capsys):
    jaxonnx.load(path, variant="small").save(tmp_path / "one.bundle")
    assert main(["info", str(tmp_path / "one.bundle")]) == 0
    assert "Gemm" in capsys.readouterr().out
    data, out = tmp_path / "data.npz", tmp_path / "out.npz"
    np.savez(data, x=X)
    assert main(["run", str(tmp_path / "one.bundle"), str(data), "-o", str(out)]) == 0
    (outputs,) = np.load(out).values()
    np.testing.assert_allclose(outputs, plain()(X), rtol=1e-6)


def test_a_new_format_has_its_own_errors(path, tmp_path):
    with pytest.raises(jaxonnx.InputError, match="has 2 such graphs"):
        jaxonnx.load(path)
    with pytest.raises(jaxonnx.InputError, match=r"variant='net' goes with a bundle or the folder"):
        jaxonnx.load(onnx.parser.parse_model(NETWORK), variant="net")
    with pytest.raises(jaxonnx.InputError, match="checkpoint='best' goes with a folder of check"):
        jaxonnx.load(path, checkpoint="best")
    with pytest.raises(jaxonnx.InputError, match=r"a model is a bundle, .* not of type int"):
        jaxonnx.load(3)
    model = jaxonnx.load(path, variant="net")
    for options in ({"external_data": True}, {"sparse": True}):
        with pytest.raises(jaxonnx.InputError, match="neither external"):
            model.save(tmp_path / "new.bundle", **options)
        with pytest.raises(jaxonnx.InputError, match="neither external"):
            plain().save(tmp_path / "new.bundle", **options)
    assert not (tmp_path / "new.bundle").exists()
    with pytest.raises(jaxonnx.InputError, match=r"a subclass of jaxonnx\.formats\.Format"):
        formats.register(Labels)
    with pytest.raises(jaxonnx.InputError, match="Silent accepts paths, and has no save"):
        type("Silent", (formats.Companion,), {"accepts": lambda self, path: True})
