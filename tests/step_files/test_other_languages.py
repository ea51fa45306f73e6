"""The programs of the page on other languages train as Python does."""

import contextlib
import io
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import optax
import pytest
from safetensors.numpy import load_file

import jaxonnx
from jaxonnx import demo
from tests.support import chromium
from tests.support.pages import PAGES, blocks

PAGE = next(page for page in PAGES if page.stem == "other_languages")
ROOTS = [*os.environ.get("CPATH", "").split(":"), "/usr/include", "/usr/local/include"]
ROOTS = [Path(root) for root in ROOTS if root]
HEADERS = [root / "onnxruntime" for root in ROOTS]
HEADERS = [path for path in HEADERS if (path / "onnxruntime_cxx_api.h").is_file()]
LIBRARY = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"), None)


def code(language):
    (found,) = blocks(PAGE, language)
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The files that the page's Python makes, and the losses that it prints."""
    folder, names, printed = tmp_path_factory.mktemp("python"), {}, io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        for part in blocks(PAGE, "python"):
            exec(compile(part, PAGE.name, "exec"), names)
    losses = np.array(printed.getvalue().split(), float)
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2
    return folder, losses


@pytest.fixture
def folder(python, tmp_path, monkeypatch):
    """The current folder, as a program finds it."""
    shutil.copytree(python[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "trained.bin").unlink()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def agree(command, python):
    """Train by a command; compare losses and weights with those of Python."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.array(done.stdout.split(), float), python[1], rtol=1e-5)
    models = [
        jaxonnx.import_step(demo.mlp(), "step", place / "trained.bin")
        for place in (python[0], Path())
    ]
    for name, value in models[0].params.items():
        np.testing.assert_allclose(models[1].params[name], value, atol=1e-5)


@pytest.mark.deep
@pytest.mark.skipif(not HEADERS, reason="no headers of onnxruntime (Debian: libonnxruntime-dev)")
@pytest.mark.parametrize(("language", "compiler"), [("cpp", "g++"), ("c", "gcc")])
def test_compiled(language, compiler, folder, python):
    if shutil.which(compiler) is None or LIBRARY is None:
        pytest.skip(f"no {compiler}, or no library in onnxruntime's wheel")
    if language == "cpp" and not any((root / "nlohmann").is_dir() for root in ROOTS):
        pytest.skip("no nlohmann/json.hpp (Debian: nlohmann-json3-dev)")
    Path(f"train.{language}").write_text(code(language))
    standard = {"cpp": "-std=c++17", "c": "-std=c11"}[language]
    command = [compiler, standard, "-Wall", f"train.{language}", "-o", "train"]
    Path("libonnxruntime.so.1").symlink_to(LIBRARY)
    where = [f"-I{HEADERS[0]}", "libonnxruntime.so.1", "-Wl,-rpath,$ORIGIN"]
    subprocess.run([*command, *where], check=True)
    agree(["./train"], python)


@pytest.mark.deep
def test_node(folder, python):
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm")
    Path("package.json").write_text('{"type": "module"}')
    install = [npm, "install", "--silent", "--ignore-scripts", "onnxruntime-node@1.30.0"]
    if (done := subprocess.run(install, capture_output=True, text=True)).returncode:
        pytest.skip(f"npm did not bring onnxruntime-node: {done.stderr}")
    Path("train.js").write_text(code("js"))
    agree(["node", "train.js"], python)


@pytest.mark.deep
@pytest.mark.skipif(chromium.PATH is None, reason="no Chromium")
def test_two_adapters_in_a_browser(folder):
    examples = demo.digits()[0]
    batch = [array[:8] for array in examples]
    settings = {"loss": "softmax_cross_entropy_with_integer_labels", "optimizer": optax.sgd(0.1)}
    try:
        jaxonnx.export_step(demo.mlp(), "trained", batch, web=examples, **settings)
    except jaxonnx.InputError as error:  # no npm
        pytest.skip(str(error))
    Path("trained", "runtime").rename("runtime")
    Path("index.html").write_text(code("html"))
    session = onnxruntime.InferenceSession("base.onnx")
    pixels = np.fromfile("x.bin", np.float32)[:64].reshape(1, 1, 8, 8)
    base = onnxruntime.InferenceSession(demo.mlp().to_onnx().SerializeToString())
    seen = {}
    answer = "document.getElementById('answer').textContent"
    with chromium.served(folder) as address, chromium.opened(folder) as page:
        page.open(address)
        for name in ("none", "mirrored", "upright", "none"):
            page.evaluate(
                f"""(() => {{ const select = document.getElementById("adapter");
                select.value = "{name}"; select.dispatchEvent(new Event("change")); }})()"""
            )
            page.wait(f"""{answer}.includes('"{name}"')""")
            shown = json.loads(page.evaluate(answer))["scores"]
            (expected,) = session.run(None, {"x": pixels, **load_file(f"{name}.safetensors")})
            np.testing.assert_allclose(shown, expected[0], atol=1e-5)
            seen[name] = shown
        assert not page.errors
        fetched = [url.rpartition("/")[2] for url in page.requests]
        assert fetched.count("base.onnx") == fetched.count("none.safetensors") == 1
    np.testing.assert_allclose(seen["none"], base.run(None, {"x": pixels})[0][0], atol=1e-5)
    assert np.abs(np.subtract(seen["upright"], seen["mirrored"])).max() > 0.1
