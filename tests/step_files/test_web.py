"""The page beside an exported step: whole, at home with itself, and it trains in a browser."""

import contextlib
import io
import json
import re
import shutil
import time

import jax
import numpy as np
import onnx
import onnxruntime
import optax
import pytest

import jaxonnx
from jaxonnx import demo
from jaxonnx._step_files import web as _web
from jaxonnx.cli import main
from tests.support import chromium
from tests.support.tiny_networks import LABELS, examples, mlp


@pytest.fixture
def package(tmp_path):
    """What stands for npm's package where nothing is run."""
    folder = tmp_path / "onnxruntime-web"
    (folder / "dist").mkdir(parents=True)
    for name in _web.RUNTIME:
        (folder / "dist" / name).write_text(name)
    return folder


def run(path, feeds):
    session = onnxruntime.InferenceSession(path)
    feeds = {value.name: np.asarray(feeds[value.name]) for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def patched(folder, state):
    """What the page downloads: the file with the numbers of a state in their places."""
    manifest = json.loads((folder / "manifest.json").read_text())
    found = run(folder / "weights.onnx", state)
    data = bytearray((folder / manifest["web"]["model"]["file"]).read_bytes())
    for name, place in manifest["web"]["model"]["tensors"].items():
        numbers = found[manifest["weights"]["tensors"][name]].tobytes()
        assert len(numbers) == place["bytes"]
        data[place["offset"] : place["offset"] + len(numbers)] = numbers
    return bytes(data)


def test_the_folder_is_whole(tmp_path, package):
    model, data, folder = jaxonnx.load(mlp()), examples(43), tmp_path / "step"
    manifest = jaxonnx.export_step(
        model, folder, examples(8), LABELS, optax.adam(1e-2), web=data, runtime=package
    )
    page, program = ((folder / name).read_text() for name in ("index.html", "train.js"))
    outside = set(re.findall(r"(?:https?:)?//[\w.-]+\.[\w/.-]+", page + program))
    assert outside <= {"http://www.w3.org/2000/svg"}  # the name of a language, not an address
    assert "default-src 'self'" in page
    for name in re.findall(r'(?:src|href)="([^":,]+)"', page):
        assert (folder / name).is_file()
    for device in re.findall(r'<option value="(\w+)"', page):
        for name in (f"{device}.js", f"{device}-threaded.js", f"{device}-threaded.wasm"):
            assert (folder / "runtime" / name).is_file()
    used = set(re.findall(r'\$\("(\w+)"\)', program))
    assert used <= set(re.findall(r'id="(\w+)"', page))

    told = manifest["web"]["examples"]
    assert (told["count"], told["held_out"]) == (43, 8)
    text = (folder / told["file"]).read_bytes()
    x = np.frombuffer(text, np.float32, 43 * 8, told["arrays"]["x"]).reshape(43, 8)
    y = np.frombuffer(text, np.int32, 43, told["arrays"]["targets"])
    rows = {row.tobytes(): label for row, label in zip(*data, strict=True)}
    assert {row.tobytes(): label for row, label in zip(x, y, strict=True)} == rows
    assert manifest["web"]["classes"]["names"] == ["0", "1", "2", "3"]
    assert "drawing" not in manifest["web"]  # eight numbers are no picture

    state = run(folder / "init.onnx", {})
    state |= {name: state[name] + 1 for name in manifest["params"]}
    back = jaxonnx.load(patched(folder, state))
    for name, value in model.params.items():
        np.testing.assert_array_equal(back.params[name], value + 1)


def test_weights_of_the_file_are_found_among_others():
    proto = mlp()
    same = next(t for t in proto.graph.initializer if t.name == "b1")
    same.metadata_props.add(key="a", value="b")  # stands behind the numbers
    proto.graph.initializer.add().CopyFrom(onnx.numpy_helper.from_array(np.zeros(16), "b3"))
    text, places = _web._places(proto, {"w2": 256, "b1": 64})
    for name in ("w2", "b1"):
        values = next(t for t in proto.graph.initializer if t.name == name)
        place = places[name]
        found = text[place["offset"] : place["offset"] + place["bytes"]]
        np.testing.assert_array_equal(
            np.frombuffer(found, np.float32), onnx.numpy_helper.to_array(values).ravel()
        )
    with pytest.raises(jaxonnx.InputError, match=r"'b3'.*64 bits"):
        _web._places(proto, {"b3": 64})
    with pytest.raises(jaxonnx.InputError, match="'h'"):
        _web._places(proto, {"h": 64})


def test_a_picture_can_be_drawn():
    x = np.zeros((4, 1, 8, 8), np.float32)
    x[:, :, 2:6, 3] = 2
    told = _web._drawing(demo.model(), {"x": x})
    assert told == {"input": "x", "height": 8, "width": 8, "paper": 0.0, "ink": 2.0}
    assert _web._drawing(demo.model(), {"x": 1 - x})["ink"] == -1
    photographs = np.random.default_rng(0).random(x.shape, np.float32)
    assert _web._drawing(demo.model(), {"x": photographs}) is None
    assert _web._drawing(demo.model(), {"x": photographs}, is_image=True) is not None


def test_the_page_is_told_what_its_inputs_are(tmp_path, package):
    """Features of audio look like images: 49 x 10 of a keyword spotter got a drawing board."""
    x = np.zeros((8, 1, 8, 8), np.float32)
    x[:, :, 2:6, 3], y = 2, np.arange(8)
    settings = {"loss": LABELS, "optimizer": optax.sgd(0.1), "runtime": package, "check": False}

    def write(web):
        return jaxonnx.export_step(demo.model(), tmp_path, (x, y), web=web, **settings)["web"]

    entry = write((x, y))
    assert entry["inputs"] == "image"
    assert "drawing" in entry
    for web in ({"inputs": "audio"}, {"inputs": "table", "examples": (x[:4], y[:4])}):
        entry = write(web)
        assert entry["inputs"] == web["inputs"]
        assert "drawing" not in entry
    assert entry["examples"]["count"] == 4
    with pytest.raises(jaxonnx.InputError, match=r"web\['inputs'\] must be 'image', 'audio' or"):
        write({"inputs": "video"})
    with pytest.raises(jaxonnx.InputError, match="not 'data'"):
        write({"inputs": "audio", "data": (x, y)})
    with pytest.raises(jaxonnx.InputError, match="shapes and no numbers"):
        _web.split_setting({"inputs": "audio"}, jax.ShapeDtypeStruct((8, 10), np.float32))
    tall = np.zeros((8, 1, 49, 10), np.float32)
    wide = jaxonnx.load(keyword_spotter())
    assert _web._drawing(wide, {"x": tall}) is None
    assert _web._drawing(wide, {"x": tall}, is_image=True)["height"] == 49


def keyword_spotter():
    return onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
    g (float[n, 1, 49, 10] x) => (float[n, 490] y) { y = Flatten(x) }""")


def test_what_is_not_there_is_named(tmp_path, package, monkeypatch):
    (package / "dist" / "ort.webgpu.min.mjs").unlink()
    data = examples(8)
    with pytest.raises(jaxonnx.InputError, match=r"it lacks ort\.webgpu\.min\.mjs"):
        jaxonnx.export_step(
            mlp(), tmp_path / "step", data, LABELS, optax.sgd(0.1), web=data, runtime=package
        )
    assert not (tmp_path / "step").exists()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(jaxonnx.InputError, match="npm install onnxruntime-web@"),
        _web.runtime(None),
    ):
        pass


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A folder with a page for digits, as the command writes it."""
    folder = tmp_path_factory.mktemp("web")
    try:
        with _web.runtime(None):
            pass
    except jaxonnx.InputError as error:
        pytest.skip(str(error))
    (x, y), _ = demo.digits()
    np.savez(folder / "digits.npz", x=x, y=y)
    demo.model().save(folder / "net.onnx")
    command = f"export-step {folder}/net.onnx {folder}/digits.npz -o {folder}/step --web"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(command.split()) == 0
    for name in ("step.onnx", "model.onnx", "shared.data", "index.html"):
        assert f"{folder}/step/{name}" in printed.getvalue()
    return folder / "step"


ONE = [[(0.35, 0.3), (0.5, 0.12), (0.5, 0.5), (0.5, 0.88)]]


@pytest.mark.deep
@pytest.mark.skipif(chromium.PATH is None, reason="no Chromium")
def test_a_browser_trains(digits, tmp_path):
    status, answer = (f"document.getElementById('{x}').textContent" for x in ("status", "answer"))
    with chromium.served(digits) as address, chromium.opened(tmp_path) as page:
        page.open(address)
        page.wait(f"{status}.startsWith('Ready')")
        page.click("#train")
        page.wait(f"{status}.startsWith('Epoch 5 of 5:')")
        rows = page.evaluate("""[...document.querySelectorAll("#rows tr")].map(
            (row) => [...row.cells].map((cell) => Number.parseFloat(cell.textContent)))""")
        assert len(rows) == 6
        assert rows[5][1] < 0.2 < rows[1][1]
        assert rows[5][2] < 0.2
        assert rows[5][3] > 95
        page.drag("#board", ONE)
        page.wait(f"{answer}.startsWith('1 ')")
        page.click("#clear")
        page.wait(f"{answer}.startsWith('Draw')")
        page.click("#board")  # a dot, which the keyboard goes on with
        page.key("ArrowUp", 38)
        page.key(" ", 32, " ")
        page.wait(f"!{answer}.startsWith('Draw')")
        page.click("#add")
        page.wait(f"{status}.startsWith('Added')")
        for button, name in (("#download", "trained.onnx"), ("#keep", "trained.bin")):
            page.click(button)
            page.wait(f"{status}.startsWith('Downloaded {name}')")
            for _ in range(100):
                if (tmp_path / name).exists():
                    break
                time.sleep(0.1)
        page.click("#reset")
        page.wait(f"{status}.startsWith('As before')")
        assert not page.errors
        assert all(url.startswith((address, "data:", "blob:")) for url in page.requests)
    onnx.checker.check_model(tmp_path / "trained.onnx", full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx")
    back = jaxonnx.import_step(demo.model(), digits, tmp_path / "trained.bin")
    for name, value in jaxonnx.load(tmp_path / "trained.onnx").params.items():
        np.testing.assert_array_equal(back.params[name], value)
    web = json.loads((digits / "manifest.json").read_text())["web"]["examples"]
    text, held_out = (digits / web["file"]).read_bytes(), web["held_out"]
    x = np.frombuffer(text, np.float32, held_out * 64, web["arrays"]["x"]).reshape(-1, 1, 8, 8)
    y = np.frombuffer(text, np.int32, held_out, web["arrays"]["targets"])
    (logits,) = session.run(None, {session.get_inputs()[0].name: x})
    accuracy = 100 * float(np.mean(logits.argmax(1) == y))
    assert accuracy == pytest.approx(rows[5][3], abs=0.06)


@pytest.mark.deep
@pytest.mark.skipif(chromium.PATH is None, reason="no Chromium")
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([7, 1, 8, 8], "Wrong batch size: evaluate.onnx takes 32 examples at once, and 'x' has 7."),
        ([32, 1, 4, 16], "evaluate.onnx takes 'x' of shape 32 x 1 x 8 x 8, not 32 x 1 x 4 x 16."),
    ],
)
def test_a_browser_says_which_batch_a_step_takes(shape, message, digits, tmp_path):
    """onnxruntime says "Got invalid dimensions for input"."""
    folder = shutil.copytree(digits, tmp_path / "step")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["step"]["batch"]["x"]["shape"] = shape
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with chromium.served(folder) as address, chromium.opened(tmp_path) as page:
        page.open(address)
        page.wait("document.getElementById('status').classList.contains('bad')")
        assert page.evaluate("document.getElementById('status').textContent").startswith(message)


@pytest.mark.deep
@pytest.mark.skipif(chromium.PATH is None, reason="no Chromium")
def test_a_browser_takes_inputs_by_name(tmp_path):
    """JavaScript lists names that look like integers first, wherever they stand."""
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
    g (float[n, 2] x, float[n, 3] w) => (float[n, 4] y)
    <float[2, 4] a = {1, 2, 3, 4, 5, 6, 7, 8}, float[3, 4] b = {8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2, 3}>
    { c = MatMul(x, a) d = MatMul(w, b) y = Add(c, d) }""")
    for value, name in zip(proto.graph.input, ("x", "7"), strict=True):
        value.name = name
    proto.graph.node[1].input[0] = "7"
    random = np.random.default_rng(0)
    x, w = random.normal(size=(20, 2)), random.normal(size=(20, 3))
    data = (x.astype(np.float32), w.astype(np.float32)), np.arange(20, dtype=np.int32) % 4
    batch = jax.tree.map(lambda array: array[:8], data)
    try:
        manifest = jaxonnx.export_step(
            proto, tmp_path / "step", batch, LABELS, optax.sgd(0.1), web=data
        )
    except jaxonnx.InputError as error:  # no npm
        pytest.skip(str(error))
    roles = {name: about["role"] for name, about in manifest["step"]["batch"].items()}
    assert roles == {"x": "input", "7": "input", "targets": "target", "weight": "weight"}
    status = "document.getElementById('status').textContent"
    with chromium.served(tmp_path / "step") as address, chromium.opened(tmp_path) as page:
        page.open(address)
        page.wait(f"{status}.startsWith('Ready')")
        text = page.evaluate(status)
        assert not page.errors
    evaluated = jaxonnx.evaluate(
        jaxonnx.load(proto), _held_out(tmp_path / "step", manifest), loss=LABELS
    )
    assert float(re.search(r"held-out loss ([\d.]+)", text)[1]) == pytest.approx(
        evaluated["loss"], rel=5e-3
    )


def _held_out(folder, manifest):
    """Return the examples of a page that are held out, from its file."""
    entry = manifest["web"]["examples"]
    text, arrays = (folder / entry["file"]).read_bytes(), []
    for name, about in manifest["step"]["batch"].items():
        shape = [entry["held_out"], *about["shape"][1:]]
        x = np.frombuffer(text, about["dtype"], np.prod(shape, dtype=int), entry["arrays"][name])
        arrays.append(x.reshape(shape))
    *inputs, targets, _ = arrays
    return tuple(inputs), targets
