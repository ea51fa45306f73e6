"""Operators of other packages: found by their entry points, imported when a file needs them."""

import os
import subprocess
import sys
import tomllib

import pytest

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


def check(site):
    path = os.pathsep.join([str(site), str(ROOT)])
    command = [sys.executable, "-P", PACKAGE / "check.py"]  # not what lies beside it
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )


def test_a_package_brings_its_operators(site):
    done = check(site)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", ["import no_such_module", "from jaxonnx import no_such_name"])
def test_a_broken_package_is_named(site, code):
    (site / "acme_jaxonnx.py").write_text(code)
    done = check(site)
    assert done.returncode != 0
    assert "the operators of the package 'acme-jaxonnx' (acme_jaxonnx) cannot be" in done.stderr
    assert "no_such" in done.stderr
    assert "uninstall it" in done.stderr


def test_without_packages_the_operator_is_missing(tmp_path):
    done = check(tmp_path)
    assert "no implementation of these operators:\n  com.acme.Swish (opset 1)" in done.stderr
