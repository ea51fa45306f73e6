"""The page of the functions that `to_onnx` writes has the names of today."""

import re
from importlib.metadata import version

import pytest

from benchmarks.to_onnx import cases
from jaxonnx.docs import COVERAGE_PAGE


@pytest.mark.parametrize("family", ["jax.lax", "jax.nn", "jax.numpy.fft", "flax.linen"])
def test_the_page_has_every_name(family):
    page = COVERAGE_PAGE.read_text()
    if f"jax {version('jax')}," not in page:
        pytest.skip("the page was written with another version of JAX")
    section = page.partition(f"## {family}\n")[2].partition("\n## ")[0]
    names = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", section, re.MULTILINE)
    assert names == [*cases.FAMILIES[family]()], "run: python -m jaxonnx.docs coverage"
