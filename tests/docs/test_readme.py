"""What the README and the pages print runs; the reference says what the docstrings say."""

import io
import json
import re
import shlex
import shutil
from base64 import b64decode
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from jax.experimental.compilation_cache import compilation_cache
from safetensors.numpy import save_file

import jaxonnx
from jaxonnx import docs
from jaxonnx.cli import main
from jaxonnx.cli._parser import COMMANDS, parse
from tests.support.pages import PAGES, blocks
from tests.support.paths import ROOT

LONG = {
    "back_to_onnx",
    "command_line",
    "jax_recipes",
    "language_models",
    "many_devices",
    "onnx_training",
    "other_languages",
    "quantization",
    "recipes",
    "sparsity",
    "training",
}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.deep
def test_the_recipe_with_optuna(folder):
    pytest.importorskip("optuna")
    page = ROOT / "jaxonnx" / "docs" / "recipes.md"
    (marked,) = re.findall(
        r"<!-- not run: [^\n]*optuna[^\n]*-->\n```python\n(.*?)```", page.read_text(), re.DOTALL
    )
    names: dict = {}
    for code in (blocks(page, "python")[0], marked):
        exec(compile(code, page.name, "exec"), names)
    assert len(names["study"].trials) == 4
    assert names["study"].best_value > 0.5


@pytest.mark.deep
@pytest.mark.parametrize("page", ["frozen_networks", "jax_recipes"])
def test_examples_with_other_packages(page, folder):
    page = ROOT / "jaxonnx" / "docs" / f"{page}.md"
    marked = re.findall(
        r"<!-- not run: test_readme runs it where (\w+) is installed -->\n```python\n(.*?)```",
        page.read_text(),
        re.DOTALL,
    )
    marked = [(package, code) for package, code in marked if find_spec(package)]
    if not marked:
        pytest.skip("none of them is installed")
    names = python(page)
    for package, code in marked:
        exec(compile(code, f"{page.name}: {package}", "exec"), names)


def python(page):
    """Run the Python of a page, and return its names."""
    names = {}
    for code in blocks(page, "python"):
        exec(compile(code, page.name, "exec"), names)
    return names


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder, but for tests/data."""
    monkeypatch.chdir(tmp_path)
    Path("tests").symlink_to(ROOT / "tests")
    settings = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in settings}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.deep] * (page.stem in LONG))
        for page in PAGES
        if page.stem != "models"  # test_models.py runs its parts
    ],
)
def test_page(page, folder, capsys):
    """A page makes the files of its examples itself: first its Python runs, then its commands."""
    if page.stem == "sparsity":
        try:
            jaxonnx.sparse.register_products("cpu")
        except jaxonnx.SparsityError as missing:
            pytest.skip(str(missing))
    names = python(page)
    if page.stem == "README":
        assert names["result"].history.epochs[-1]["validation_accuracy"] > 0.9
    for number, configuration in enumerate(blocks(page, "toml")):
        assert not number, "one configuration a page: it is run.toml"
        Path("run.toml").write_text(configuration)
    for line in "".join(blocks(page, "sh")).splitlines():
        if line.startswith("jaxonnx "):
            assert main(shlex.split(line, comments=True)[1:]) == 0, line
    if page.stem == "sparsity":
        shown = capsys.readouterr().out
        assert all(block in shown for block in blocks(page, "text"))


def test_commands_for_other_machines_are_understood():
    """Those of several processes, which do not run here."""
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for block in re.findall(r"```(?:ba)?sh\n(.*?)```", text, re.DOTALL):
            commands = re.findall(r"jaxonnx (?:train|evaluate|run|info) [^;\n]*", block)
            commands = [command.strip().rstrip("'") for command in commands]
            found += [(page.stem, one) for one in commands if "--config" not in one]
    assert len(found) > 20
    for page, command in found:
        try:
            parse(shlex.split(command, comments=True)[1:])
        except SystemExit:
            pytest.fail(f"{page}: {command}")


@pytest.mark.deep
def test_examples_of_help(folder, monkeypatch):
    python(ROOT / "jaxonnx" / "docs" / "command_line.md")
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[n, sequence] x) => (float[n, m] y) '
    onnx.save(onnx.parser.parse_model(text + "{ y = Relu(x) }"), "encoder.onnx")
    for name, of in (("qwen", "genai"), ("tuned", "genai"), ("Qwen3-0.6B", "optimum")):
        shutil.copytree(f"tests/data/llm/qwen3-{of}", name)
    monkeypatch.setattr("sys.stdin", io.StringIO("a list\n"))  # of chat
    Path("run.toml").write_text('data = "data.npz"\nmodel = "net.onnx"\noutput = "out.onnx"')
    for name, verb in COMMANDS.items():
        for line in verb.examples.splitlines():
            arguments = shlex.split(line)[1:]
            assert arguments[0] == name
            if name == "import-step":  # as a loop in any runtime leaves it
                session = onnxruntime.InferenceSession("step/init.onnx")
                state = dict(
                    zip([o.name for o in session.get_outputs()], session.run(None, {}), strict=True)
                )
                np.savez("step/state.npz", **state)
                save_file(state, "state.safetensors")
            if name != "demo":  # has a test of its own
                assert main(arguments) == 0, line


def test_reference_is_up_to_date():
    written = (ROOT / "jaxonnx" / "docs" / "reference.md").read_text()
    assert written == docs.reference(), "run: python -m jaxonnx.docs"


def find_anchors(page):
    """Return the anchors that GitHub gives the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}


def test_links():
    pages = [*PAGES, ROOT / "benchmarks" / "README.md", ROOT / ".github" / "CONTRIBUTING.md"]
    for page in pages:
        links = re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", page.read_text())
        for target, anchor in links:
            other = page.parent / target if target else page
            assert other.exists(), f"{page.name}: {target}"
            if anchor and other.suffix == ".md":
                assert anchor in find_anchors(other), f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_gallery_has_a_picture_of_each_notebook(path):
    outputs = [o for cell in json.loads(path.read_text())["cells"] for o in cell.get("outputs", ())]
    drawn = [b64decode(o["data"]["image/png"]) for o in outputs if "image/png" in o.get("data", {})]
    gallery = ROOT / "jaxonnx" / "docs" / "gallery"
    assert (gallery / f"{path.stem}.png").read_bytes() in drawn
