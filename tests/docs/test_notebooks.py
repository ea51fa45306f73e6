"""Every notebook runs from top to bottom."""

import os
import sys
from contextlib import contextmanager

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support import notebook_heads
from tests.support.paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
APART = {"many_devices"}
"""What needs a kernel in which nothing has run: it chooses devices."""
SHORTENED = {
    "chats": {'"epochs": 40': '"epochs": 8'},
    "language_model": {"epochs=4": "epochs=1", "epochs=6": "epochs=1"},
}
"""What takes a minute as it is printed: a part of its steps runs every line as well."""
START = """
import os

import jax

os.chdir({folder!r})
jax.clear_caches()
jax.config.update("jax_disable_most_optimizations", True)
get_ipython().run_line_magic("reset", "-f")
"""
"""What each begins with: without the names of the one before, whose imports it shares."""


@contextmanager
def kernel():
    """Start a kernel that imports this repository."""
    client = NotebookClient(nbformat.v4.new_notebook(), timeout=300)
    with client.setup_kernel(env=os.environ | {"PYTHONPATH": str(ROOT)}):
        yield client


@pytest.fixture(scope="module")
def shared():
    with kernel() as client:
        yield client


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_say_what_they_take_and_where_they_open(path):
    written = path.read_text()
    assert written == notebook_heads.write(path), "run: python -m tests.support.notebook_heads"


def test_the_readme_opens_the_quickstart():
    links = " ".join((ROOT / "README.md").read_text().split())
    assert notebook_heads.places("quickstart") in links


@pytest.mark.parametrize("there", [True, False])
def test_notebooks_install_where_jaxonnx_is_not(there, monkeypatch):
    commands = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: there or None)
    monkeypatch.setattr("subprocess.run", lambda command, check: commands.append(command))
    monkeypatch.setattr("sys.path", [])
    _, code = notebook_heads.heads("chats")
    exec(code, {})
    assert len(commands) == (0 if there else 2)
    clone, install = commands or ([], [])
    assert clone[4:] == [notebook_heads.REPOSITORY, "repository"][: len(clone)]
    assert install[-1:] == ["repository[notebooks,text]"][: len(install)]
    assert sys.path == ([] if there else ["repository"])


@pytest.mark.deep
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, tmp_path, request):
    if path.stem in APART:
        with kernel() as client:
            execute(client, path, tmp_path)
    else:
        execute(request.getfixturevalue("shared"), path, tmp_path)


def execute(client, path, folder):
    client.nb = notebook = nbformat.read(path, as_version=4)
    client.reset_execution_trackers()
    for text, shorter in SHORTENED.get(path.stem, {}).items():
        (cell,) = (cell for cell in notebook.cells if text in cell.source)
        cell.source = cell.source.replace(text, shorter)
    start = START.format(folder=str(folder))
    client.execute_cell(nbformat.v4.new_code_cell(start), 0)
    for number, cell in enumerate(notebook.cells):
        client.execute_cell(cell, number)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "error"]  # of drawing
    assert [output for output in outputs if "image/png" in output.get("data", {})]
