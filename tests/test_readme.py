"""What the README and the pages print runs; the reference says what the docstrings say."""

import re
import shlex
from pathlib import Path

import jax
import numpy as np
import onnx
import pytest
from jax.experimental.compilation_cache import compilation_cache
from PIL import Image

from jaxonnx import demo, docs
from jaxonnx.cli import main
from jaxonnx.cli._flags import VERBS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "jaxonnx" / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if page.stem != "reference"]


def blocks(page, language):
    """The code of a page, except what is marked as not to be run."""
    found = re.findall(rf"(<!-- .* -->\n)?```{language}\n(.*?)```", page.read_text(), re.DOTALL)
    return [code for mark, code in found if "not run" not in mark]


def network():
    """Two layers for 8x8 pictures, `body` and `head`."""
    proto = onnx.parser.parse_model("""
    <ir_version: 8, opset_import: ["" : 17]>
    digits (float[n, 1, 8, 8] x) => (float[n, 10] logits) {
        flat = Flatten(x)
        hidden = Gemm(flat, body_weight, body_bias)
        rectified = Relu(hidden)
        logits = Gemm(rectified, head_weight, head_bias)
    }""")
    for node, name in zip(proto.graph.node, ("flat", "body", "relu", "head"), strict=True):
        node.name = name
    random = np.random.default_rng(0)
    for name, *shape in (("body", 64, 32), ("head", 32, 10)):
        weight = random.normal(size=shape, scale=shape[0] ** -0.5)
        for part, value in (("weight", weight), ("bias", np.zeros(shape[1]))):
            tensor = onnx.numpy_helper.from_array(value.astype(np.float32), f"{name}_{part}")
            proto.graph.initializer.append(tensor)
    return proto


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder with the files that the pages speak of."""
    monkeypatch.chdir(tmp_path)
    onnx.save(network(), "net.onnx")
    (x, y), _ = demo.digits()
    np.savez("inputs.npz", x=x[:4])
    np.savez("data.npz", x=x[:256], y=y[:256])
    pixels = (x[:256, 0] * 255).astype(np.uint8)
    np.savez("images.npz", x=pixels, y=y[:256])
    Image.fromarray(pixels[0]).save("picture.png")
    for number, (image, label) in enumerate(zip(pixels[:60], y, strict=False)):
        Path("photos", str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(f"photos/{label}/{number}.png")
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[n, sequence] x) => (float[n, m] y) '
    onnx.save(onnx.parser.parse_model(text + "{ y = Relu(x) }"), "encoder.onnx")
    settings = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in settings}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python(page, folder):
    names = {}
    for code in blocks(page, "python"):
        exec(compile(code, page.name, "exec"), names)
    if page.stem == "README":
        assert names["result"].history.epochs[-1]["validation_accuracy"] > 0.9


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands(page, folder):
    for number, configuration in enumerate(blocks(page, "toml")):
        assert not number, "one configuration a page: it is run.toml"
        Path("run.toml").write_text(configuration)
    for line in "".join(blocks(page, "sh")).splitlines():
        if line.startswith("jaxonnx "):
            assert main(shlex.split(line, comments=True)[1:]) == 0, line


def test_examples_of_help(folder):
    Path("run.toml").write_text('data = "data.npz"\nmodel = "net.onnx"\noutput = "out.onnx"')
    for name, verb in VERBS.items():
        for line in verb.examples.splitlines():
            arguments = shlex.split(line)[1:]
            assert arguments[0] == name
            if name != "demo":  # has a test of its own
                assert main(arguments) == 0, line


def test_reference_is_up_to_date():
    written = (ROOT / "jaxonnx" / "docs" / "reference.md").read_text()
    assert written == docs.reference(), "run: python -m jaxonnx.docs"


def test_links():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
