"""The page of the functions that `to_onnx` writes has the names of today."""

import re
from importlib.metadata import version

import pytest

from jaxonnx.docs import _coverage


@pytest.mark.parametrize("family", ["jax.lax", "jax.nn", "jax.numpy.fft", "flax.linen"])
def test_the_page_has_every_name(family):
    if f"jax {version('jax')}," not in _coverage.PAGE.read_text():
        pytest.skip("the page was written with another version of JAX")
    section = _coverage.PAGE.read_text().partition(f"## {family}\n")[2].partition("\n## ")[0]
    names = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", section, re.MULTILINE)
    assert names == _coverage.list_names(family), "run: python -m jaxonnx.docs coverage"
