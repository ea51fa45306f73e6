"""Operators of other packages: found by their entry points, imported when a file needs them."""

import os
import subprocess
import sys
import tomllib

import onnx.parser
import pytest

import jaxonnx
from jaxonnx._graph.bind import load_plugins
from tests.support.paths import ROOT

PACKAGE = ROOT / "tests" / "support" / "acme_jaxonnx"


@pytest.fixture
def site(tmp_path):
    """A folder of packages with the vendor's, as pip installs it."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = tmp_path / "acme_jaxonnx-1.0.dist-info"
    info.mkdir()
    about = ["Metadata-Version: 2.1", f"Name: {project['name']}", "Version: 1.0", ""]
    (info / "METADATA").write_text("\n".join(about))
    ((group, points),) = project["entry-points"].items()
    lines = [f"{name} = {module}" for name, module in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    (tmp_path / "acme_jaxonnx.py").write_text((PACKAGE / "acme_jaxonnx.py").read_text())
    return tmp_path


def test_a_package_brings_its_operators(site):
    """In a process of its own: operators stay registered."""
    path = os.pathsep.join([str(site), str(ROOT)])
    command = [sys.executable, "-P", PACKAGE / "check.py"]  # not what lies beside it
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def unread(monkeypatch):
    """Entry points are read anew, before and after."""
    monkeypatch.delitem(sys.modules, "acme_jaxonnx", raising=False)
    load_plugins.cache_clear()
    yield
    load_plugins.cache_clear()


def load():
    text = '<ir_version: 8, opset_import: ["com.acme": 1]> g (float[2] x) => (float[2] y)'
    return jaxonnx.load(onnx.parser.parse_model(f"{text} {{ y = com.acme.Swish (x, x) }}"))


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("code", ["import no_such_module", "from jaxonnx import no_such_name"])
def test_a_broken_package_is_named(site, code, monkeypatch):
    (site / "acme_jaxonnx.py").write_text(code)
    monkeypatch.syspath_prepend(site)
    named = r"the operators of the package 'acme-jaxonnx' \(acme_jaxonnx\) cannot be"
    with pytest.raises(jaxonnx.UnsupportedError, match=rf"{named}.*no_such.*uninstall it"):
        load()


@pytest.mark.usefixtures("unread")
def test_without_packages_the_operator_is_missing():
    missing = r"no implementation of these operators:\n  com.acme.Swish \(opset 1\)"
    with pytest.raises(jaxonnx.UnsupportedError, match=missing):
        load()
