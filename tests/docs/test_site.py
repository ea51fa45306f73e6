"""The site: its converters, and a strict build of all of it."""

import ast
import base64
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from jaxonnx import docs
from jaxonnx.docs import _site as site
from tests.support.paths import ROOT

PNG = base64.b64encode(b"\x89PNG").decode()


@pytest.fixture
def pages():
    return site.Pages(site.map_places(), site.map_names()[0], "https://example.org/repository")


def finish(pages, text, source="jaxonnx/docs/training.md", place="training.md"):
    return pages.finish(text, source, place).split("---\n", 2)[2]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[a](limits.md#files)", "[a](limits.md#files)"),
        ("[a](../../notebooks/lora.ipynb)", "[a](notebooks/lora.md)"),
        ("![a](../../benchmarks/charts/growth.png)", "![a](charts/growth.png)"),
        ("[a](../../README.md#versions-and-extras)", "[a](overview.md#versions-and-extras)"),
        (
            "[`a[0]`](../registry.py)",
            "[`a[0]`](https://example.org/repository/blob/main/jaxonnx/registry.py)",
        ),
        ("[a](https://arxiv.org/abs/1)", "[a](https://arxiv.org/abs/1)"),
        ("[a](nowhere.md)", "[a](nowhere.md)"),  # MkDocs reports it
        (
            "`jaxonnx.train(..., mesh=)` runs",
            "[`jaxonnx.train(..., mesh=)`](reference/jaxonnx.train.md) runs",
        ),
        ("[`jaxonnx.train`](limits.md)", "[`jaxonnx.train`](limits.md)"),
        ("# `jaxonnx.train`", "# `jaxonnx.train`"),
        ("* a\n  b\n\n  c\n  * d\n* e", "* a\n    b\n\n    c\n    * d\n\n* e"),
        ("```python\nf[0](limits.md)\n  `jaxonnx.load`\n```", None),
    ],
)
def test_pages_become_those_of_the_site(pages, text, shown):
    assert finish(pages, text) == (text if shown is None else shown)


def test_links_of_pages_in_folders(pages):
    text = finish(
        pages,
        "`jaxonnx.load` [a](../jaxonnx/docs/limits.md)",
        "notebooks/lora.ipynb",
        "notebooks/lora.md",
    )
    assert text == "[`jaxonnx.load`](../reference/jaxonnx.load.md) [a](../limits.md)"


def test_notebooks_keep_their_outputs(tmp_path):
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["1\n", "2\n"]},
        {"output_type": "stream", "name": "stdout", "text": ["3\n"]},
        {"output_type": "display_data", "data": {"image/png": PNG, "text/plain": ["<Figure>"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": ["f()"], "outputs": outputs},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    text = site.convert_notebook(tmp_path / "a.ipynb", tmp_path / "a.md")
    assert "# Title\ntext" in text
    assert "```python\nf()\n```\n\n```text\n1\n2\n3\n```" in text
    (picture,) = re.findall(r"!\[.*\]\((.*)\)", text)
    assert (tmp_path / picture).read_bytes() == b"\x89PNG"
    assert "<Figure>" not in text


def test_each_public_name_has_a_page():
    names, menu = site.map_names()
    shown = {
        page
        for part in menu[1:]
        for pages in part.values()
        for one in pages
        for page in one.values()
    }
    assert {name for _, values in docs.public_names() for name in values} == names.keys()
    assert set(names.values()) == shown


def build(folder, *flags):
    command = [sys.executable, "-m", "jaxonnx.docs", "build", str(folder), *flags]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )


@pytest.mark.deep
def test_the_site_is_built_strictly(tmp_path):
    """MkDocs fails for a link that leads nowhere, and for a page that is in no menu."""
    if not find_spec("material"):
        pytest.skip("needs the extra docs")
    repository = "https://example.org/repository"
    ended = build(
        tmp_path / "site", "--repository", repository, "--url", "https://example.org/site"
    )
    assert ended.returncode == 0, ended.stderr
    page = (tmp_path / "site" / "reference" / "jaxonnx.optim.adam" / "index.html").read_text()
    assert f"{repository}/edit/main/jaxonnx/optim.py" in page
    assert "<math" in page
    assert "\\alpha" not in page
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())
    assert {"sparsity/", "reference/jaxonnx.train/", "notebooks/lora/"} <= {
        document["location"] for document in index["docs"]
    }


@pytest.mark.deep
def test_a_link_that_leads_nowhere_ends_the_build(tmp_path, monkeypatch):
    if not find_spec("material"):
        pytest.skip("needs the extra docs")
    write = site.write_pages

    def write_wrong(folder, repository):
        menu = write(folder, repository)
        with (folder / "limits.md").open("a") as file:
            file.write("\n[a](nowhere.md)\n")
        return menu

    monkeypatch.setattr(site, "write_pages", write_wrong)
    with pytest.raises(SystemExit):
        site.build_site(tmp_path / "site")


def test_common_errors_are_messages_of_the_package():
    text = (ROOT / "jaxonnx" / "docs" / "common_errors.md").read_text()
    headings = re.findall(r"^### (.*)$", text.partition("## Messages of other")[0], re.MULTILINE)
    trees = [ast.parse(p.read_text()) for p in (ROOT / "jaxonnx").rglob("*.py")]
    constants = [n.value for t in trees for n in ast.walk(t) if isinstance(n, ast.Constant)]
    messages = [value for value in constants if isinstance(value, str)]
    assert len(headings) >= 9
    for heading in headings:
        assert any(heading in message for message in messages), heading
