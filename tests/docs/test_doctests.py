"""The examples in docstrings run."""

import doctest
import importlib
import math
import pkgutil

import pytest

import jaxonnx

MODULES = [
    module.name
    for module in pkgutil.walk_packages(jaxonnx.__path__, "jaxonnx.")
    if not module.name.endswith("__main__")
]


@pytest.mark.deep
@pytest.mark.parametrize("name", MODULES)
def test_examples(name, monkeypatch):
    # a slow machine would print lines of progress
    monkeypatch.setattr("jaxonnx.training._loop.reporter._SECONDS_OF_LINES", math.inf)
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
